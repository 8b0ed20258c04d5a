"""Finds the measure that the picture of an alert draws, and its limits that depend on other values."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lookback.core.aggregation.aggregates import Count
from lookback.core.errors import ExpressionError
from lookback.core.explaining.evidence import Evidence
from lookback.core.expressions.compiling import add_memberships, compile_expression
from lookback.core.rules.compiled import CompiledMeasure, CompiledRule
from lookback.core.rules.wording import RelativeLimit, find_event_limits, find_measure_limits, find_measure_relations
from lookback.core.values.columns import from_text, from_values, to_stored
from lookback.core.values.limits import WIDEST_LIMITS
from lookback.core.values.times import parse_time


def main_measure(rule: CompiledRule) -> CompiledMeasure:
    """Returns the measure to draw: those with a limit come first, then measures of values before counts."""
    limits = {name.lower() for name, values in find_measure_limits(rule).items() if values}
    limits |= {name.lower() for limit in find_event_limits(rule) for name in limit.measures}
    limits |= {limit.name for limit in find_measure_relations(rule)}
    return max(rule.measures, key=lambda each: (each.name.lower() in limits, each.feature.argument is not None))


def draws_values(measure: CompiledMeasure) -> bool:
    """Returns whether a picture draws the argument of each event; for counts and texts it draws 1 for each event."""
    argument, aggregate = measure.feature.argument, measure.feature.aggregate
    return argument is not None and not isinstance(aggregate, Count) and argument.type.is_numeric


def to_number(value: Any) -> float:
    """Returns a value as a number for a picture; NaN if it is not a number."""
    return math.nan if value is None or isinstance(value, str) or not hasattr(value, "__float__") else float(value)


def list_event_limits(evidence: Evidence, alert: Mapping[str, Any], main: str) -> Iterator[tuple[str, str]]:
    """Yields the limits that contain the measure `main` and were compared with the event's value of the same field.

    They are computed from the alert's measures and its event's fields. If the event is gone, there are none.
    """
    rule = evidence.rule
    limits = [each for each in find_event_limits(rule) if main in each.measures]
    measure = next((each for each in rule.measures if each.name == main), None)
    if measure is None or not measure.argument_fields:
        return
    fields = {name.lower() for name in measure.argument_fields}
    for text, value in _compute_limits(evidence, alert, [each for each in limits if each.name in fields]):
        yield text, str(measure.format_value(value))


def list_measure_limits(evidence: Evidence, alert: Mapping[str, Any], main: str) -> Iterator[tuple[str, float]]:
    """Yields the limits of the measure `main` that depend on other values, with their values for this alert."""
    limits = [each for each in find_measure_relations(evidence.rule) if each.name == main.lower()]
    for text, value in _compute_limits(evidence, alert, limits):
        if not math.isnan(number := to_number(value)):
            yield text, number


def _compute_limits(
    evidence: Evidence, alert: Mapping[str, Any], limits: Sequence[RelativeLimit]
) -> Iterator[tuple[str, Any]]:
    """Computes limits from the alert's measures and its event, or any event of a window, which has the fields of the key."""
    rule, stream = evidence.rule, evidence.stream
    at: int | None = 0 if len(evidence.events) else None
    if alert["event_id"] is not None:
        at = evidence.find_position(str(alert["event_id"]), parse_time(alert["event_time"]), None)
    if at is None or not limits:
        return
    recorded = alert["measures"] or {}
    columns = {name: column.take(slice(at, at + 1)) for name, column in evidence.events.columns.items()}
    for each in rule.measures:
        text = recorded.get(each.name)
        stored = None if text is None else to_stored(each.type, from_text(each.type, text))
        columns[each.name] = from_values(each.type, [stored])
    schema = {name: type_ for name, type_ in stream.fields.items() if name in columns}
    schema |= {measure.name: measure.type for measure in rule.measures}
    for limit in limits:
        with contextlib.suppress(ExpressionError):
            expression = compile_expression(limit.text, schema, WIDEST_LIMITS)
            lists = evidence.lists.read(int(alert["arrival"]), expression.memberships)
            times = np.array([parse_time(alert["event_time"])], dtype=np.int64)
            seen = add_memberships(columns, expression.memberships, times, lists)
            value = expression.evaluate(seen, 1).item(0)
            if value is not None:
                yield limit.text, value

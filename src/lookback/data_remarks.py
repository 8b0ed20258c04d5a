"""Finds parts of a rule that are valid but that no event in the stream's history satisfies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from sqlglot import exp

from lookback.core.errors import ExpressionError, Problem
from lookback.core.expressions.compiling import Expression, compile_expression
from lookback.core.expressions.syntax import LookbackSql, parse, unwrap
from lookback.core.rules.compiled import CompiledRule
from lookback.core.rules.problems import quote_value
from lookback.core.rules.remarks import list_texts
from lookback.core.streams.declaration import Stream
from lookback.core.streams.eventrows import read_events
from lookback.core.streams.events import Events
from lookback.core.values.columns import Mask, to_text
from lookback.core.values.limits import WIDEST_LIMITS
from lookback.core.values.lists import Lists
from lookback.core.values.suggestions import find_nearest
from lookback.core.values.texts import count_noun
from lookback.core.values.windows import SEQUENCE
from lookback.testing.harness import replay

_COMPARISONS = (exp.EQ, exp.NEQ, exp.NullSafeEQ, exp.In)
_MAX_LISTED = 4
# The number of frequent values to search for one that resembles the unseen one.
_MAX_COMPARED_VALUES = 1_000
# Keys left out of the replay: they suppress alerts, or do not matter here.
_IGNORED_KEYS = ("suppress", "reset_on_alert", "effective_from", "effective_until", "message", "tests")


def find_data_remarks(
    rule: CompiledRule, stream: Stream, events: pa.Table, lists: Lists | None = None
) -> list[Problem]:
    """Finds parts of a rule that no event in the history satisfies.

    These are a text compared with a field that never had this value, a condition that matched no event, a rule that
    would have raised no alert, and events that could not be judged.

    Args:
        rule: The rule to examine.
        stream: The stream of the rule.
        events: Events as for `replay`; an empty table gives no remarks.
        lists: Current contents of the lists; None if the rule uses no list or the contents are unknown.
    """
    if not len(events):
        return []
    known = Lists.empty() if lists is None else lists
    history = read_events(events, stream, 1)[0].look_up(rule.memberships, known)
    compared = [each for place, text in list_texts(rule) for each in _find_unseen_values(place, text, stream, history)]
    unmatched = list(_find_unmatched_conditions(rule, history))
    remarks = [*dict.fromkeys(compared), *unmatched]
    if not any(remark.place == "where" for remark in unmatched):
        remarks += _find_replay_remarks(rule, stream, events, known)
    return remarks


def _find_unseen_values(place: str, text: str, stream: Stream, history: Events) -> Iterator[Problem]:
    """Yields a remark for each string literal compared with a field or an expression that never had this value."""
    for node in parse(text, WIDEST_LIMITS).find_all(*_COMPARISONS):
        if isinstance(node, exp.In):
            pairs = [(node.this, other) for other in node.expressions]
        else:
            pairs = [(node.this, node.expression), (node.expression, node.this)]
        for side, other in pairs:
            literal = unwrap(other)
            if not (isinstance(literal, exp.Literal) and literal.is_string):
                continue
            column = unwrap(side)
            sql = column.sql(LookbackSql, identify=True, comments=False)
            try:
                expression = compile_expression(sql, stream.fields, WIDEST_LIMITS)
            except ExpressionError:
                continue  # it reads a measure or a step, which events do not have
            if expression.type.name == "string" and expression.fields and not expression.memberships:
                seen = _count_values(expression, history)
                if literal.name not in seen:
                    name = column.name if isinstance(column, exp.Column) else sql
                    yield Problem(
                        place,
                        f"{quote_value(literal.name)} was never seen in {name}; {_suggest_value(literal.name, seen)}",
                    )


def _count_values(expression: Expression, history: Events) -> Counter[str]:
    return Counter(value for value in history.value(expression).to_stored_list() if value is not None)


def _suggest_value(text: str, seen: Mapping[str, int]) -> str:
    """Suggests the likely intended value, or lists the most frequent ones."""
    frequent = [value for value, _ in Counter(seen).most_common(_MAX_COMPARED_VALUES)]
    if not frequent:
        return "it has no value in any event"
    equal = (value for value in frequent if value.strip().casefold() == text.strip().casefold())
    nearest = next(equal, None) or find_nearest(text, frequent, 0.75)
    if nearest is not None:
        return f"did you mean {quote_value(nearest)}, of {count_noun(seen[nearest], 'event')}?"
    listed = ", ".join(f"{quote_value(value)} ({seen[value]:,})" for value in frequent[:_MAX_LISTED])
    return f"there are {listed}{', ...' if len(seen) > _MAX_LISTED else ''}"


def _find_unmatched_conditions(rule: CompiledRule, history: Events) -> Iterator[Problem]:
    """Yields a remark for each condition on single events that no event satisfies."""
    candidates: Mask = np.ones(len(history), dtype=bool)
    if rule.where is not None:
        candidates = history.value(rule.where).is_true()
        if not candidates.any():
            yield Problem("where", f"matched none of {count_noun(len(history), 'event')}; the rule would see nothing")
            return
    parts = [(f"measures.{m.name}", "the filter", m.feature.filter) for m in rule.measures]
    if rule.sequence is not None:
        for at, step in enumerate(rule.sequence.conditions):
            key = "absent" if step.step.absent else "where"
            parts.append((f"sequence.steps[{at}].{key}", "the condition", step.condition if step.own else step.gate))
        parts.append(("sequence.until", "the condition", rule.sequence.until))
    for place, what, part in parts:
        if part is not None and not (history.value(part).is_true() & candidates).any():
            yield Problem(place, f"{what} matched none of {count_noun(int(candidates.sum()), 'event')}")


def _find_replay_remarks(rule: CompiledRule, stream: Stream, events: pa.Table, lists: Lists) -> Iterator[Problem]:
    """Replays the rule over the events. Yields its errors, and a remark if it raises no alert."""
    probe: dict[str, Any] = {name: value for name, value in rule.spec.document.items() if name not in _IGNORED_KEYS}
    result = replay([probe], events, stream, lists)
    for row in result.errors:
        if row.action == "failed":
            yield Problem("", row.message)
    if not result.alerts:
        place = "sequence" if rule.spec.kind == SEQUENCE else "when" if rule.spec.when else "window"
        times = events[stream.event_time]
        first, last = (to_text(value) for value in _find_span(times))
        reason = "no window has ended" if place == "window" else "nothing satisfied it"
        yield Problem(
            place,
            f"would have raised no alert over {count_noun(len(events), 'event')} from {first} to {last}: {reason}",
        )


def _find_span(times: Any) -> tuple[Any, Any]:
    known = [value for value in times.to_pylist() if value is not None]
    return min(known), max(known)

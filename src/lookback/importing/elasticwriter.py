"""Writes sequences, and what only Elastic's rules have: suppression of single events, and thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lookback.core.expressions.syntax import name_as_sql
from lookback.core.streams.declaration import Stream
from lookback.core.values.durations import format_duration
from lookback.importing.conditions import And, Present
from lookback.importing.detections import Chain, Correlation, Counted, Shape, Single, Step, list_key_fields, name_member
from lookback.importing.expressions import write_condition
from lookback.importing.fields import FieldNames
from lookback.importing.literals import write_span, write_window
from lookback.importing.reasons import Reason

# The key of an event that lacks a field of the others, and the measures of a threshold.
_ALONE, _COUNT, _DISTINCT = "alone_", "events_", "values_"


def write_single(shape: Single, stream: Stream, fields: FieldNames) -> dict[str, Any]:
    """Writes the rule of a single event."""
    body = {"where": write_condition(shape.condition, fields)}
    if (suppression := shape.suppression) is None:
        return body
    keys = write_keys(suppression.fields, fields)
    if not suppression.joins_missing:
        lacks = " or ".join(f"{fields.write(name)} is null" for name in suppression.fields)
        keys.append({_ALONE: f"if({lacks}, {name_as_sql(stream.event_id)}, null)"})
    return {"group_by": keys, **body, "suppress": write_span(suppression.seconds)}


def write_counted(shape: Counted, fields: FieldNames) -> dict[str, Any]:
    """Writes a threshold. Where its window ends at each event, an alert uses its events up, as they are in no other one."""
    measures, wanted = dict[str, str](), list[str]()
    if shape.at_least > 1 or shape.distinct is None:
        measures[_COUNT] = "count(*)"
        wanted.append(f"{_COUNT} >= {shape.at_least}")
    if shape.distinct is not None:
        name, number = shape.distinct
        measures[_DISTINCT] = f"count(distinct {_write_value(name, fields)})"
        wanted.append(f"{_DISTINCT} >= {number}")
    there = (Present(name) for name in shape.keys)
    return {
        "group_by": write_keys(shape.keys, fields),
        "where": write_condition(And((shape.condition, *there)), fields),
        "window": write_window(shape.seconds, shape.slide),
        "measures": measures,
        "when": " and ".join(wanted),
        **({} if shape.slide else {"reset_on_alert": True}),
    }


def write_chain(shape: Chain, fields: FieldNames) -> dict[str, Any]:
    """Writes steps; each with the fields of its own, where they differ from those of the first."""
    key = [fields.find(name) for name in shape.steps[0].fields]
    steps = [{"name": name_member(at), **_write_step(step, key, fields)} for at, step in enumerate(shape.steps)]
    if shape.absent is not None:
        steps.append({"name": name_member(len(steps)), **_write_step(shape.absent, key, fields, "absent")})
    sequence: dict[str, Any] = {"within": format_duration(shape.microseconds)}
    sequence |= {**({"take": "once"} if shape.takes_once else {}), "steps": steps}
    if shape.until is not None:
        sequence["until"] = _write_step(shape.until, key, fields)
    return {"group_by": write_keys(shape.steps[0].fields, fields), "sequence": sequence}


def _write_step(step: Step, key: list[str], fields: FieldNames, word: str = "where") -> dict[str, Any]:
    own = [fields.find(each) for each in step.fields]
    written: dict[str, Any] = {word: write_condition(step.condition, fields)}
    written |= {"at_least": step.at_least} if step.at_least > 1 else {}
    return {**written, "key": own} if own != key else written


def write_keys(names: Sequence[str], fields: FieldNames) -> list[Any]:
    """Writes the entries of a key. An array is one by what all its items are together."""
    found = [fields.find(name) for name in names]
    return [
        name if fields.find_type(name).element is None else {f"{name}_joined": _write_value(name, fields)}
        for name in found
    ]


def _write_value(name: str, fields: FieldNames) -> str:
    field = fields.write(name)
    return field if fields.find_type(name).element is None else f"array_join({field}, ', ')"


def find_array_keys(shape: Shape, fields: FieldNames) -> list[Reason]:
    """Finds fields of the key that are arrays, of which each item would be a key by itself."""
    arrays = (name for name in list_key_fields(shape) if fields.find_type(name).element is not None)
    return [Reason("array-key", name) for name in dict.fromkeys(arrays)][:1]


def list_shown(shape: Correlation | Counted) -> list[str]:
    """Lists the fields of the key that a message shows."""
    if isinstance(shape, Chain):
        return [*(shape.shown or shape.steps[-1].fields)]
    return [*shape.keys] if isinstance(shape, Counted) else [key.name for key in shape.keys]

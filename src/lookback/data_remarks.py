"""Remarks on a rule beside its stream's history: what is fine to write and was never true."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from sqlglot import exp

from lookback.core.errors import ExpressionError
from lookback.core.expressions.compiling import Expression, compile_expression
from lookback.core.expressions.syntax import LookbackSql, parse, unwrapped
from lookback.core.rules.compiled import CompiledRule
from lookback.core.rules.document import quote_value
from lookback.core.rules.remarks import Remark
from lookback.core.streams.declaration import Stream
from lookback.core.streams.events import Events, read_events
from lookback.core.values.columns import Mask, text_of
from lookback.core.values.limits import WIDEST
from lookback.core.values.windows import SEQUENCE
from lookback.testing.harness import replay

_COMPARED = (exp.EQ, exp.NEQ, exp.NullSafeEQ, exp.In)
_SHOWN = 4
# So many of the most frequent values are looked through for one that was meant.
_MOST_VALUES = 1_000
# What makes no alert come that would come otherwise, or nothing of interest here.
_APART = ("suppress", "reset_on_alert", "effective_from", "effective_until", "message", "tests")


def data_remarks(rule: CompiledRule, stream: Stream, events: pa.Table) -> list[Remark]:
    """What the rule says that none of these events bears out.

    A text that is compared with a field and was never seen in it; a condition that matched no event; a rule that
    would have raised nothing; events that could not be judged. events: as for `replay`; empty: nothing is said.
    """
    if not len(events):
        return []
    history = read_events(events, stream, 1)[0]
    compared = [each for place, text in _texts(rule) for each in _unseen(place, text, stream, history)]
    unmatched = list(_unmatched(rule, history))
    remarks = [*dict.fromkeys(compared), *unmatched]
    if not any(remark.place == "where" for remark in unmatched):
        remarks += _judged(rule, stream, events)
    return remarks


def _texts(rule: CompiledRule) -> Iterator[tuple[str, str]]:
    """(place, text) of every expression of the rule."""
    spec = rule.spec
    yield "where", spec.where or ""
    for measure in spec.measures:
        yield f"measures.{measure.name}", measure.text
    yield "when", spec.when or ""
    if spec.sequence is not None:
        for at, step in enumerate(spec.sequence.steps):
            yield f"sequence.steps[{at}].{'absent' if step.absent else 'where'}", step.condition
        yield "sequence.until", spec.sequence.until or ""


def _unseen(place: str, text: str, stream: Stream, history: Events) -> Iterator[Remark]:
    """A remark for each text literal that is compared with what no event has."""
    for node in parse(text, WIDEST).find_all(*_COMPARED) if text else ():
        if isinstance(node, exp.In):
            pairs = [(node.this, other) for other in node.expressions]
        else:
            pairs = [(node.this, node.expression), (node.expression, node.this)]
        for side, other in pairs:
            literal = unwrapped(other)
            if not (isinstance(literal, exp.Literal) and literal.is_string):
                continue
            column = unwrapped(side)
            made = column.sql(LookbackSql, identify=True, comments=False)
            try:
                expression = compile_expression(made, stream.fields, WIDEST)
            except ExpressionError:
                continue  # it reads a measure or a step, which events do not have
            if expression.type.name == "string" and expression.fields:
                seen = _values(expression, history)
                if literal.name not in seen:
                    name = column.name if isinstance(column, exp.Column) else made
                    yield Remark(
                        place, f"{quote_value(literal.name)} was never seen in {name}; {_instead(literal.name, seen)}"
                    )


def _values(expression: Expression, history: Events) -> Counter[str]:
    return Counter(value for value in history.value(expression).stored() if value is not None)


def _instead(text: str, seen: Mapping[str, int]) -> str:
    """The value that may have been meant, else those that there are most of."""
    frequent = [value for value, _ in Counter(seen).most_common(_MOST_VALUES)]
    if not frequent:
        return "it has no value in any event"
    alike = [value for value in frequent if value.strip().casefold() == text.strip().casefold()]
    alike = alike or difflib.get_close_matches(text, frequent, 1, cutoff=0.75)
    if alike:
        return f"did you mean {quote_value(alike[0])}, of {_counted(seen[alike[0]])}?"
    listed = ", ".join(f"{quote_value(value)} ({seen[value]:,})" for value in frequent[:_SHOWN])
    return f"there are {listed}{', ...' if len(seen) > _SHOWN else ''}"


def _counted(events: int) -> str:
    return "1 event" if events == 1 else f"{events:,} events"


def _unmatched(rule: CompiledRule, history: Events) -> Iterator[Remark]:
    """A remark for each condition on the event alone that holds of none."""
    among: Mask = np.ones(len(history), dtype=bool)
    if rule.where is not None:
        among = history.value(rule.where).is_true()
        if not among.any():
            yield Remark("where", f"matched none of {_counted(len(history))}; the rule would see nothing")
            return
    parts = [(f"measures.{m.name}", "the filter", m.feature.filter) for m in rule.measures]
    if rule.sequence is not None:
        for at, step in enumerate(rule.sequence.conditions):
            key = "absent" if step.step.absent else "where"
            parts.append((f"sequence.steps[{at}].{key}", "the condition", step.condition if step.own else step.gate))
        parts.append(("sequence.until", "the condition", rule.sequence.until))
    for place, what, part in parts:
        if part is not None and not (history.value(part).is_true() & among).any():
            yield Remark(place, f"{what} matched none of {_counted(int(among.sum()))}")


def _judged(rule: CompiledRule, stream: Stream, events: pa.Table) -> Iterator[Remark]:
    """What replay of the rule over the events gives: errors, or no alert at all."""
    probe: dict[str, Any] = {name: value for name, value in rule.spec.document.items() if name not in _APART}
    result = replay([probe], events, stream)
    for row in result.errors:
        if row.action == "failed":
            yield Remark("", row.message)
    if not result.alerts:
        place = "sequence" if rule.spec.kind == SEQUENCE else "when" if rule.spec.when else "window"
        times = events[stream.event_time]
        first, last = (text_of(value) for value in _span(times))
        why = "no window has ended" if place == "window" else "nothing satisfied it"
        yield Remark(place, f"would have raised no alert over {_counted(len(events))} from {first} to {last}: {why}")


def _span(times: Any) -> tuple[Any, Any]:
    known = [value for value in times.to_pylist() if value is not None]
    return min(known), max(known)

"""A rule made ready to judge the events of its stream: names and types resolved, state needs named."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lookback.core.aggregates import AGGREGATES, Aggregate
from lookback.core.columns import text_of
from lookback.core.durations import format_duration
from lookback.core.errors import ExpressionError, Problem, RuleError
from lookback.core.expressions import AggregateCall, Expression, compile_aggregate, compile_expression
from lookback.core.rules import Rule, Window, read_rule
from lookback.core.streams import Stream
from lookback.core.types import BOOLEAN, DataType

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
WINDOW_COMPLETE = "window_complete"


@dataclass(frozen=True)
class Feature:
    """The part of a rule that needs state. Rules with equal features share one state.

    group_by: names in ascending order. where, filter and argument: what the rows kept have to satisfy and hold.
    allowed_lateness in microseconds.
    """

    stream: str
    group_by: tuple[str, ...]
    function: str
    allowed_lateness: int
    where: Expression | None = field(default=None, compare=False)
    filter: Expression | None = field(default=None, compare=False)
    argument: Expression | None = field(default=None, compare=False)
    feature_id: str = ""

    @property
    def aggregate(self) -> Aggregate:
        """The feature's aggregate function."""
        return AGGREGATES[self.function]

    @property
    def argument_type(self) -> DataType | None:
        """The type of the aggregate's argument; None for count(*)."""
        return None if self.argument is None else self.argument.type


@dataclass(frozen=True)
class CompiledMeasure:
    """A measure: its feature's aggregate over `window`, of type `type`."""

    name: str
    feature: Feature
    window: Window
    type: DataType


@dataclass(frozen=True)
class CompiledRule:
    """A rule bound to its stream. `fields`: what of an event the rule reads, group_by included, sorted."""

    rule: Rule
    group_by: tuple[str, ...]
    where: Expression | None
    measures: tuple[CompiledMeasure, ...]
    when: Expression
    allowed_lateness: int
    fields: tuple[str, ...]

    @property
    def features(self) -> tuple[Feature, ...]:
        """The distinct features of the measures."""
        return tuple({measure.feature.feature_id: measure.feature for measure in self.measures}.values())

    def message(self, values: Mapping[str, Any]) -> str:
        """The rule's message with the names in braces replaced by the texts of `values`; NULL is `null`."""
        return _PLACEHOLDER.sub(lambda match: _or_null(text_of(values.get(match[1]))), self.rule.message)


def compile_rule(document: Mapping[str, Any] | Rule, stream: Stream, version: int | None = None) -> CompiledRule:
    """The rule of a document, bound to `stream`. Raises RuleError with every problem, each with its place."""
    rule, problems = read_rule(document.document if isinstance(document, Rule) else document)
    binder = _Binder(rule, stream, problems)
    compiled = binder.bind()
    if problems or compiled is None:
        raise RuleError(rule.rule_id, problems, version)
    return compiled


def _or_null(text: str | None) -> str:
    return "null" if text is None else text


class _Binder:
    def __init__(self, rule: Rule, stream: Stream, problems: list[Problem]) -> None:
        self._rule, self._stream, self._problems = rule, stream, problems
        self._names = {name.lower(): name for name in stream.fields}

    def bind(self) -> CompiledRule | None:
        rule, stream = self._rule, self._stream
        if rule.stream and rule.stream != stream.name:
            self._wrong("stream", f"the rule is for stream {rule.stream!r}, not for {stream.name!r}")
            return None
        group_by = self._group_by()
        where = self._condition(rule.where, stream.fields, "where") if rule.where else None
        lateness = self._lateness()
        measures = self._measures(group_by, where, lateness)
        schema: dict[str, DataType] = {**stream.fields, **{m.name: m.type for m in measures}, WINDOW_COMPLETE: BOOLEAN}
        if len(measures) < len(rule.measures) and self._problems:
            when = None  # what is wrong with a measure would only be repeated for each of its uses
        else:
            when = self._condition(rule.when, schema, "when") if rule.when else None
        in_message = self._message(schema)
        if when is None:
            return None
        used = {*group_by, *in_message}
        for expression in [where, when, *(part for m in measures for part in (m.feature.filter, m.feature.argument))]:
            used |= expression.fields if expression else set()
        fields = tuple(sorted(used & set(stream.fields)))
        return CompiledRule(rule, group_by, where, measures, when, lateness, fields)

    def _wrong(self, place: str, message: str) -> None:
        self._problems.append(Problem(place, message))

    def _field(self, name: str, place: str) -> str | None:
        known = self._names.get(name.lower())
        if known is None:
            near = difflib.get_close_matches(name, self._stream.fields, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(self._stream.fields)}"
            self._wrong(place, f"stream {self._stream.name!r} has no field {name!r}; {hint}")
        return known

    def _group_by(self) -> tuple[str, ...]:
        names = [self._field(name, "group_by") for name in self._rule.group_by]
        for name in names:
            if name is not None and self._stream.fields[name].name == "array":
                self._wrong("group_by", f"field {name!r} is an array, which cannot be a key; group by a plain field")
        return tuple(sorted(name for name in names if name is not None))

    def _lateness(self) -> int:
        own, most = self._rule.allowed_lateness, self._stream.allowed_lateness
        if own is not None and own > most:
            self._wrong(
                "allowed_lateness",
                f"{format_duration(own)} is longer than the stream's {format_duration(most)}; write at most that",
            )
        return most if own is None else own

    def _condition(self, text: str, schema: Mapping[str, DataType], place: str) -> Expression | None:
        try:
            expression = compile_expression(text, schema)
        except ExpressionError as error:
            self._problems.extend(Problem(place, problem) for problem in error.problems)
            return None
        if expression.type.name not in ("boolean", "null"):
            self._wrong(
                place, f"must be true or false, but {text!r:.100} is {expression.type}; compare it with something"
            )
        return expression

    def _measures(
        self, group_by: tuple[str, ...], where: Expression | None, lateness: int
    ) -> tuple[CompiledMeasure, ...]:
        measures = []
        for measure in self._rule.measures:
            place = f"measures.{measure.name}"
            if measure.name.lower() in self._names or measure.name.lower() == WINDOW_COMPLETE:
                self._wrong(
                    place, f"{measure.name!r} is a field of the stream or a word of the engine; choose another name"
                )
            if not measure.text:
                continue
            try:
                call = compile_aggregate(measure.text, self._stream.fields)
            except ExpressionError as error:
                self._problems.extend(Problem(place, problem) for problem in error.problems)
                continue
            if refusal := _refusal(call):
                self._wrong(place, f"{call.sql}: {refusal}")
                continue
            feature = _feature(self._stream.name, group_by, where, call, lateness)
            type_ = feature.aggregate.result_type(feature.argument_type)
            measures.append(CompiledMeasure(measure.name, feature, measure.window, type_))
        return tuple(measures)

    def _message(self, schema: Mapping[str, DataType]) -> set[str]:
        names = set(_PLACEHOLDER.findall(self._rule.message))
        known = {*schema, *(measure.name for measure in self._rule.measures)}
        for name in sorted(names - known):
            near = difflib.get_close_matches(name, sorted(known), 1)
            hint = f"did you mean {{{near[0]}}}?" if near else "use the name of a field or a measure"
            self._wrong("message", f"{{{name}}} is neither a field nor a measure; {hint}")
        return names


def _refusal(call: AggregateCall) -> str | None:
    if call.function not in AGGREGATES:
        return f"{call.function} is not in this release; use one of {', '.join(AGGREGATES)}"
    return None if call.argument is None else AGGREGATES[call.function].refusal(call.argument.type)


def _feature(
    stream: str, group_by: tuple[str, ...], where: Expression | None, call: AggregateCall, lateness: int
) -> Feature:
    parts: Sequence[Expression | None] = (where, call.filter, call.argument)
    identity = [stream, list(group_by), call.function, lateness]
    identity += [[part.sql, str(part.type)] if part else None for part in parts]
    digest = hashlib.sha256(json.dumps(identity, separators=(",", ":")).encode()).hexdigest()[:16]
    return Feature(stream, group_by, call.function, lateness, where, call.filter, call.argument, digest)

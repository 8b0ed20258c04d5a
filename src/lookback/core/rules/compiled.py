"""A rule made ready to judge the events of its stream: names and types resolved, state needs named."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Context, Decimal
from functools import cached_property
from typing import Any

from lookback.core.aggregation.aggregates import AGGREGATES, Aggregate
from lookback.core.aggregation.runs import Buckets
from lookback.core.errors import ExpressionError, Problem, RuleError
from lookback.core.expressions.compiling import (
    AggregateCall,
    Expression,
    columns_of,
    compile_aggregate,
    compile_expression,
    compile_part,
)
from lookback.core.rules.document import Rule, first_problems, problem_at, read_rule, shown
from lookback.core.streams.declaration import Stream
from lookback.core.values.columns import text_of
from lookback.core.values.durations import format_duration
from lookback.core.values.suggestions import find_nearest, suggest
from lookback.core.values.types import BIGINT, BOOLEAN, NULL, DataType, array
from lookback.core.values.windows import (
    LOOKBACK,
    SEQUENCE,
    SESSION,
    SLIDING,
    TUMBLING,
    Lookback,
    Session,
    Step,
    TiledWindow,
    Window,
)

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
WINDOW_COMPLETE = "window_complete"
COUNT = "count"
# How the names of tables begin that remember the events judged, for rules that revise, or windows, by kind of rule.
JUDGED = "judged-"
_MEMORIES = {TUMBLING: "windows-", SLIDING: "windows-", SESSION: "sessions-"}
# More digits than any value that a message shows.
_WIDE = Context(prec=400)


@dataclass(frozen=True)
class Feature:
    """The part of a rule that needs state. Rules with equal features share one state.

    group_by: names in ascending order. where, filter and argument: what the rows kept have to satisfy and hold.
    allowed_lateness in microseconds. tiles: the windows by which a late event is taken; None: by its own time. buckets:
    how rows are combined, where its windows have a resolution.
    """

    stream: str
    group_by: tuple[str, ...]
    function: str
    allowed_lateness: int
    where: Expression | None = field(default=None, compare=False)
    filter: Expression | None = field(default=None, compare=False)
    argument: Expression | None = field(default=None, compare=False)
    tiles: TiledWindow | None = None
    buckets: Buckets | None = None
    feature_id: str = ""

    @property
    def aggregate(self) -> Aggregate:
        """The feature's aggregate function."""
        return AGGREGATES[self.function]

    @property
    def resolution(self) -> int:
        """The resolution of its windows; 0 for none."""
        return 0 if self.buckets is None else self.buckets.resolution

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

    def shown(self, value: Any) -> str | None:
        """The text of a value for people: what an average or a deviation of decimals has beyond their digits is rounded.

        Half up, as money is: 50.006957 of a decimal(18,2) is 50.01. None for NULL.
        """
        scale = 0 if self.feature.argument_type is None else self.feature.argument_type.scale
        if value is not None and scale and self.feature.function in ("avg", "stddev_samp"):
            exact = value if isinstance(value, Decimal) else Decimal(repr(float(value)))
            if exact.is_finite():
                value = exact.quantize(Decimal(1).scaleb(-scale), ROUND_HALF_UP, _WIDE)
        return text_of(value)


@dataclass(frozen=True)
class CompiledStep:
    """A step of a sequence.

    condition: over the event's fields and the arrays of earlier steps, such as `failures.ip`. gate: the part of it that
    reads the event alone, None for always true; own: whether that is all of it.
    """

    step: Step
    condition: Expression
    gate: Expression | None
    own: bool


@dataclass(frozen=True)
class CompiledSequence:
    """A sequence bound to its stream. absent: its last step, if that is one of absence; the others are in `steps`.

    kept: the fields of an event that later steps, the absence or the message read, sorted.
    """

    steps: tuple[CompiledStep, ...]
    absent: CompiledStep | None
    until: Expression | None
    kept: tuple[str, ...]

    @property
    def conditions(self) -> list[CompiledStep]:
        """All steps, the absent one included."""
        return [*self.steps, self.absent] if self.absent else list(self.steps)


@dataclass(frozen=True)
class CompiledRule:
    """A rule bound to its stream. `fields`: what of an event the rule reads, group_by included, sorted.

    presence: of tumbling and sliding windows, the feature that tells which windows have events. store: of a session or
    a sequence, the name of the state that is its own. needs: every state that the rule uses and how far below the
    watermark it is kept, in microseconds.
    """

    spec: Rule
    group_by: tuple[str, ...]
    where: Expression | None
    measures: tuple[CompiledMeasure, ...]
    when: Expression | None
    allowed_lateness: int
    fields: tuple[str, ...]
    sequence: CompiledSequence | None = None
    presence: Feature | None = None
    store: str = ""
    needs: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def in_message(self) -> frozenset[str]:
        """The names that the message fills in."""
        return frozenset(_PLACEHOLDER.findall(self.spec.message))

    @cached_property
    def memory(self) -> str:
        """The name of the table that remembers, per key, what the rule has judged or written; "" if the rule needs none.

        Each kind of rule has a table of its own, so that a version never reads what a version of another kind has left.
        """
        prefix = JUDGED if self.spec.late == "revise" else _MEMORIES.get(self.spec.kind, "")
        return f"{prefix}{self._owner}" if prefix else ""

    @cached_property
    def former_memory(self) -> str:
        """The name that `memory` has in state of release 0.1.0, where all kinds of rules shared one table."""
        return f"said-{self._owner}"

    @cached_property
    def _owner(self) -> str:
        return _digest([self.spec.rule_id, self.group_by])

    @cached_property
    def fingerprint(self) -> str:
        """A text that two rules have in common only if their documents are equal."""
        return _digest([json.dumps(self.spec.document, sort_keys=True, default=str)])

    @cached_property
    def features(self) -> tuple[Feature, ...]:
        """The distinct features whose rows are kept as runs."""
        if self.store:
            return ()
        listed = [*(measure.feature for measure in self.measures), *([self.presence] if self.presence else [])]
        return tuple({feature.feature_id: feature for feature in listed}.values())

    @cached_property
    def asks(self) -> tuple[object, ...]:
        """What puts rules that ask for the same windows of the same features next to each other."""
        where = self.where.sql if self.where else ""
        features = [feature.feature_id for feature in self.features]
        return self.group_by, self.allowed_lateness, where, features, repr(self.spec.window)

    def message(self, values: Mapping[str, Any]) -> str:
        """The rule's message with the names in braces replaced by the texts of `values` for people; NULL is `null`."""
        if not self.in_message:
            return self.spec.message
        return _PLACEHOLDER.sub(lambda match: _or_null(self._text(match[1], values.get(match[1]))), self.spec.message)

    def _text(self, name: str, value: Any) -> str | None:
        measure = self._by_name.get(name)
        return text_of(value) if measure is None else measure.shown(value)

    @cached_property
    def _by_name(self) -> dict[str, CompiledMeasure]:
        return {measure.name: measure for measure in self.measures}


def compile_rule(document: Mapping[str, Any] | Rule, stream: Stream, version: int | None = None) -> CompiledRule:
    """The rule of a document, bound to `stream`. Raises RuleError with every problem, each with its place."""
    rule, problems = read_rule(document.document if isinstance(document, Rule) else document, stream.limits)
    binder = _Binder(rule, stream, problems)
    compiled = binder.bind()
    if problems or compiled is None:
        raise RuleError(rule.rule_id, first_problems(problems), version)
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
            hint = suggest(rule.stream, [stream.name], "give it to that stream, or write the name of this one")
            self._wrong("stream", f"the rule is for stream {shown(rule.stream)}, not for {stream.name!r}; {hint}")
            return None
        group_by = self._group_by()
        where = self._condition(rule.where, stream.fields, "where") if rule.where else None
        lateness = self._lateness()
        measures = self._measures(group_by, where, lateness)
        sequence = self._sequence() if rule.sequence else None
        schema: dict[str, DataType] = {m.name: m.type for m in measures if m.name.lower() not in self._names}
        schema |= {WINDOW_COMPLETE: BOOLEAN}
        # Of a window there is no one event whose fields a condition or a message could mean, but for its key.
        own = stream.fields if rule.kind in (LOOKBACK, SEQUENCE) else {name: stream.fields[name] for name in group_by}
        schema = {**own, **schema} if not rule.sequence else {**own, WINDOW_COMPLETE: BOOLEAN}
        when = self._when(schema, {measure.name for measure in measures}) if rule.when else None
        in_message = self._message(schema | (self._arrays(rule.sequence.steps) if rule.sequence else {}))
        if self._problems:
            return None
        used = {*group_by, *in_message}
        parts = [where, when, *(part for m in measures for part in (m.feature.filter, m.feature.argument))]
        if sequence is not None:
            parts += [sequence.until, *(step.condition for step in sequence.conditions)]
            used |= set(sequence.kept)
        for expression in parts:
            used |= expression.fields if expression else set()
        fields = tuple(sorted(used & set(stream.fields)))
        presence = None
        if isinstance(rule.window, TiledWindow):
            presence = _feature(self._kind_of_state(group_by, lateness), where, _PRESENCE, rule.window)
        store = self._store(group_by, where, lateness, sequence)
        needs = self._needs(measures, presence, store, lateness)
        return CompiledRule(rule, group_by, where, measures, when, lateness, fields, sequence, presence, store, needs)

    def _all_named(self) -> bool:
        """Whether every measure or step that is written has a name by which it can be meant elsewhere."""
        rule, document = self._rule, self._rule.document
        if rule.sequence is None:
            written, read = document.get("measures"), len(rule.measures)
        else:
            sequence = document.get("sequence")
            written, read = sequence.get("steps") if isinstance(sequence, Mapping) else None, len(rule.sequence.steps)
        return isinstance(written, (Mapping, list)) and len(written) == read > 0

    def _when(self, schema: Mapping[str, DataType], sound: set[str]) -> Expression | None:
        if not self._all_named():
            return None  # what is wrong with a measure would only be repeated for each of its uses
        told = {measure.name for measure in self._rule.measures} - sound
        for name in _names_in(self._rule.when):
            field = self._names.get(name.lower())
            if field is not None and field not in schema:
                self._wrong("when", self._no_event(field))
                told.add(name.lower())
        return self._condition(self._rule.when, schema, "when", told)

    def _no_event(self, name: str) -> str:
        return (
            f"{name} is a field of single events, and a {self._rule.kind} window has many; "
            f"use a measure of it, such as max({name}), or add it to group_by"
        )

    def _kind_of_state(self, group_by: tuple[str, ...], lateness: int) -> list[Any]:
        """What every feature's identity begins with; that of a rule which resets holds the rule's own name."""
        owner = [self._rule.rule_id] if self._rule.reset_on_alert else []
        return [self._stream.name, group_by, lateness, *owner]

    def _store(
        self, group_by: tuple[str, ...], where: Expression | None, lateness: int, sequence: CompiledSequence | None
    ) -> str:
        """The name of a session's or a sequence's state: equal for versions that can go on with what there is."""
        rule, window = self._rule, self._rule.window
        identity: list[Any] = [self._stream.name, rule.rule_id, group_by, lateness, where.sql if where else None]
        if isinstance(window, Session):
            identity += ["session", window.gap]
        elif sequence is not None and rule.sequence is not None:
            spec = rule.sequence
            identity += [step.condition.sql for step in sequence.conditions]
            identity += [step.step.name for step in sequence.conditions]
            identity += [sequence.until.sql if sequence.until else None, spec.expiry, sequence.kept]
            if spec.expiry == "fixed" or sequence.absent:
                # What has begun goes by these.
                identity += [spec.within, rule.late]
                identity += [[step.step.at_least, step.step.at_most, step.step.within] for step in sequence.conditions]
        else:
            return ""
        return f"own-{_digest(identity)}"

    def _needs(
        self, measures: tuple[CompiledMeasure, ...], presence: Feature | None, store: str, lateness: int
    ) -> dict[str, int]:
        window, sequence = self._rule.window, self._rule.sequence
        if sequence is not None:
            return {store: sequence.within + lateness}
        if isinstance(window, Session):
            return {store: self._stream.max_session + lateness}
        needs: dict[str, int] = {}
        if presence is not None and isinstance(window, TiledWindow):
            return {
                feature.feature_id: window.size + lateness for feature in [presence, *(m.feature for m in measures)]
            }
        for measure in measures:
            assert isinstance(measure.window, Lookback)
            width = measure.window.size + measure.window.delay + measure.window.resolution + lateness
            needs[measure.feature.feature_id] = max(width, needs.get(measure.feature.feature_id, 0))
        return needs

    def _arrays(self, steps: Sequence[Step]) -> dict[str, DataType]:
        """What of steps can be read: `name.count`, and `name.field`, the array of the field over the step's events."""
        arrays: dict[str, DataType] = {}
        for step in steps:
            if not step.absent:
                arrays[f"{step.name}.{COUNT}"] = BIGINT
                arrays |= {f"{step.name}.{name}": array(t) for name, t in self._stream.fields.items() if not t.element}
        return arrays

    def _sequence(self) -> CompiledSequence | None:
        spec = self._rule.sequence
        assert spec is not None
        if COUNT in self._names:
            self._wrong(
                "sequence",
                f"stream {self._stream.name!r} has a field named {COUNT}, which in a sequence is the number of a step's "
                "events; rename the field in the stream's columns",
            )
        until = None
        if spec.until:
            told = self._wrong_steps(spec.until, (), spec.steps, "sequence.until")
            until = self._condition(spec.until, self._stream.fields, "sequence.until", told)
        steps = []
        for at, step in enumerate(spec.steps):
            place = f"sequence.steps[{at}]"
            if step.name.lower() in self._names:
                self._wrong(f"{place}.name", f"{step.name!r} is a field of the stream; choose another name")
            compiled = self._step(
                step, spec.steps[:at], spec.steps[at:], f"{place}.{'absent' if step.absent else 'where'}"
            )
            if compiled is not None:
                steps.append(compiled)
        absent = steps.pop() if steps and steps[-1].step.absent else None
        dotted = {name for step in [*steps, *([absent] if absent else [])] for name in step.condition.fields}
        dotted |= set(_PLACEHOLDER.findall(self._rule.message))
        kept = {name.partition(".")[2] for name in dotted if "." in name}
        for compiled in [*steps, *([absent] if absent else [])]:
            kept |= {name for name in compiled.condition.fields if "." not in name} if not compiled.own else set()
        if absent is not None:
            kept |= {self._names.get(name.lower(), name) for name in self._rule.group_by}
            kept |= set(_PLACEHOLDER.findall(self._rule.message))
        return CompiledSequence(tuple(steps), absent, until, tuple(sorted(kept & set(self._stream.fields))))

    def _step(self, step: Step, before: Sequence[Step], rest: Sequence[Step], place: str) -> CompiledStep | None:
        if not step.condition:
            return None
        told = self._wrong_steps(step.condition, before, rest, place)
        condition = self._condition(step.condition, {**self._stream.fields, **self._arrays(before)}, place, told)
        if condition is None or told:
            return None
        gate = compile_part(step.condition, self._stream.fields)
        return CompiledStep(step, condition, gate, condition.fields <= set(self._stream.fields))

    def _wrong_steps(self, text: str, before: Sequence[Step], rest: Sequence[Step], place: str) -> set[str]:
        """The names in a condition that are of a step which it cannot see, or of none; says why, name by name.

        rest: for a step's condition the step itself and those after it; for `until` all of them.
        """
        told = set()
        for name in _names_in(text):
            owner, dot, _ = name.lower().partition(".")
            seen = [step.name for step in before if step.name.lower() == owner]
            unseen = [step.name for step in rest if step.name.lower() == owner and not seen]
            known = len(self._problems)
            if owner in self._names:
                continue
            if unseen and place == "sequence.until":
                self._wrong(place, f"{name} is of step {unseen[0]!r}; until sees the event alone, use its fields")
            elif unseen:
                what = "the step itself" if unseen[0] == rest[0].name else f"step {unseen[0]!r}, which comes later"
                self._wrong(
                    place, f"{name} is of {what}; a condition sees the event and the steps before its own, use those"
                )
            elif seen and not dot:
                field = next(iter(self._stream.fields))
                self._wrong(
                    place,
                    f"{name} is a step; write {name}.{COUNT} for the number of its events, or such as {name}.{field} "
                    "for the values of a field",
                )
            elif dot and not seen and not find_nearest(name, self._arrays(before)):
                told.add(name.lower())
                if self._all_named():
                    earlier = ", ".join(step.name for step in before) or "none, since this is the first"
                    self._wrong(place, f"{name}: no step before this one is named {owner!r}; known are {earlier}")
            if len(self._problems) > known:
                told.add(name.lower())
        return told

    def _wrong(self, place: str, message: str) -> None:
        self._problems.append(problem_at(place, message))

    def _field(self, name: str, place: str) -> str | None:
        known = self._names.get(name.lower())
        if known is None:
            fields = ", ".join(list(self._stream.fields)[:20]) + (", ..." if len(self._stream.fields) > 20 else "")
            hint = suggest(name, self._stream.fields, f"known are {fields}")
            self._wrong(place, f"stream {self._stream.name!r} has no field {shown(name)}; {hint}")
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

    def _condition(
        self, text: str, schema: Mapping[str, DataType], place: str, told: Iterable[str] = ()
    ) -> Expression | None:
        """The condition. told: names of which it is said already what is wrong with them."""
        # Nobody knows of which type they would be; what comes of that is no problem of the condition.
        unsure = dict.fromkeys(told, NULL)
        try:
            expression = compile_expression(text, {**schema, **unsure}, self._stream.limits)
        except ExpressionError as error:
            problems = [problem for problem in error.problems if not unsure or "null" not in problem.lower()]
            self._problems.extend(problem_at(place, problem) for problem in problems)
            return None
        if expression.type.name not in ("boolean", "null"):
            self._wrong(
                place, f"must be true or false, but {shown(text)} is {expression.type}; compare it with something"
            )
        return expression

    def _measures(
        self, group_by: tuple[str, ...], where: Expression | None, lateness: int
    ) -> tuple[CompiledMeasure, ...]:
        measures = []
        for measure in self._rule.measures:
            place = f"measures.{measure.name}"
            if measure.name.lower() in self._names:
                self._wrong(place, f"{measure.name!r} is a field of the stream; choose another name")
            elif measure.name.lower() == WINDOW_COMPLETE:
                self._wrong(place, f"{measure.name!r} is a word of the engine; choose another name")
            if not measure.text:
                continue
            try:
                call = compile_aggregate(measure.text, self._stream.fields, self._stream.limits)
            except ExpressionError as error:
                self._problems.extend(problem_at(place, problem) for problem in error.problems)
                continue
            window = measure.window
            if isinstance(window, Lookback) and window.resolution and not AGGREGATES[call.function].additive:
                self._wrong(place, _not_additive(call, window))
                continue
            feature = _feature(self._kind_of_state(group_by, lateness), where, call, window)
            type_ = feature.aggregate.result_type(feature.argument_type)
            measures.append(CompiledMeasure(measure.name, feature, window, type_))
        return tuple(measures)

    def _message(self, schema: Mapping[str, DataType]) -> set[str]:
        names = set(_PLACEHOLDER.findall(self._rule.message))
        known = {*schema, *(measure.name for measure in self._rule.measures)}
        if not self._all_named():
            return names & known
        kinds = "a field of the event nor of a step" if self._rule.sequence else "a field nor a measure"
        for name in sorted(names - known):
            if name in self._stream.fields:
                self._wrong("message", self._no_event(name))
                continue
            near = find_nearest(name, sorted(known))
            hint = f"did you mean {{{near}}}?" if near else f"known are {', '.join(sorted(known)[:20])}"
            self._wrong("message", f"{{{name}}} is neither {kinds}; {hint}")
        return names


def _names_in(text: str) -> list[str]:
    """The names that a condition reads, each once; none where it cannot be read, which compiling it tells."""
    try:
        return list(dict.fromkeys(columns_of(text)))
    except ExpressionError:
        return []


_PRESENCE = AggregateCall("count", None, None, "count(*)")


def _not_additive(call: AggregateCall, window: Lookback) -> str:
    own = format_duration(window.size)
    if window.delay:
        own = f"{{lookback: {own}, delay: {format_duration(window.delay)}}}"
    return (
        f"{call.sql} takes no resolution: what is kept of a bucket are counts and sums, and they do not tell what is left "
        f"when an event is deleted; give it a window of its own without one, such as {{measure: ..., window: {own}}}"
    )


def _feature(kind: list[Any], where: Expression | None, call: AggregateCall, window: Window) -> Feature:
    parts: Sequence[Expression | None] = (where, call.filter, call.argument)
    identity: list[Any] = [*kind, call.function, *([part.sql, str(part.type)] if part else None for part in parts)]
    stream, group_by, lateness, *_ = kind
    tiles, buckets = None, None
    if isinstance(window, TiledWindow):
        tiles = window
        identity += [tiles.size, tiles.slide, tiles.offset]
    elif isinstance(window, Lookback) and window.resolution:
        # With the delay, since which buckets are closed goes by it: one more later could end in what is combined.
        identity += ["resolution", window.resolution, window.delay]
        buckets = Buckets(window.resolution, window.delay + lateness, call.function)
    return Feature(
        stream, group_by, call.function, lateness, where, call.filter, call.argument, tiles, buckets, _digest(identity)
    )


def _digest(identity: list[Any]) -> str:
    return hashlib.sha256(json.dumps(identity, separators=(",", ":")).encode()).hexdigest()[:16]

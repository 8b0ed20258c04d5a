"""Binds a rule to its stream: resolves names and types, and names the state that the rule needs."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import ROUND_HALF_UP, Context, Decimal
from functools import cached_property
from typing import Any

from lookback.core.aggregation.aggregates import AGGREGATES, Aggregate
from lookback.core.aggregation.runs import Buckets
from lookback.core.errors import ExpressionError, Problem, RuleError
from lookback.core.expressions.aggregatecalls import AggregateCall, compile_aggregate
from lookback.core.expressions.compiling import (
    Expression,
    Membership,
    compile_expression,
    compile_part,
    find_names,
    find_rising,
)
from lookback.core.rules.document import Rule, read_rule
from lookback.core.rules.problems import limit_problems, make_problem, quote_value
from lookback.core.streams.declaration import Stream
from lookback.core.values.columns import to_text
from lookback.core.values.durations import format_duration
from lookback.core.values.suggestions import find_nearest, suggest
from lookback.core.values.times import NEVER_DUE
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
# Aggregates that never fall as rows are added, in the order in which one may bound the next over the same rows.
_RISING = ("count", "sum", "max", "count_distinct")
# A decimal with at most this many digits can be compared with any number without an overflow.
_MAX_COMPARABLE_DIGITS = 18
_DIGITS = re.compile(r"(\d+)")
# Prefixes of the tables of judged events (for late: revise), of keys with open windows, and of judged windows.
JUDGED = "judged-"
OPEN_KEYS = "open-"
# Versions in this lane or a higher one are waiting for the history of their windows, and share no state.
WARMING_LANE = 2
_MEMORY_PREFIXES = {TUMBLING: "windows-", SLIDING: "windows-", SESSION: "sessions-"}
# Enough digits for any value in a message.
_WIDE_CONTEXT = Context(prec=400)


@dataclass(frozen=True)
class Feature:
    """The part of a rule that needs state. Rules with equal features share one state."""

    stream: str
    group_by: tuple[str, ...]  # in ascending order
    function: str
    allowed_lateness: int  # microseconds
    where: Expression | None = field(default=None, compare=False)  # with `filter`, the condition of the events to keep
    filter: Expression | None = field(default=None, compare=False)
    argument: Expression | None = field(default=None, compare=False)  # the value to keep of each event
    tiles: TiledWindow | None = None  # the windows that decide whether an event is too late; None: its own time decides
    buckets: Buckets | None = None  # how rows are combined, if the windows have a resolution
    feature_id: str = ""
    row_set: str = ""  # the rows shared with other features of the grouping; "": its own, which are combined or emptied

    @property
    def aggregate(self) -> Aggregate:
        """The feature's aggregate function."""
        return AGGREGATES[self.function]

    @cached_property
    def memberships(self) -> tuple[Membership, ...]:
        """The calls of in_list in the feature's expressions, inner ones first."""
        return _list_memberships((self.where, self.filter, self.argument))

    @property
    def argument_type(self) -> DataType | None:
        """The type of the aggregate's argument; None for count(*)."""
        return None if self.argument is None else self.argument.type

    @property
    def is_rising(self) -> bool:
        """True if the aggregate never falls as rows are added; for a sum, while no value is negative."""
        if self.function == "max":
            type_ = self.argument_type
            return type_ is not None and (
                type_.is_integer or (type_.is_decimal and type_.precision <= _MAX_COMPARABLE_DIGITS)
            )
        return self.buckets is None and self.function in _RISING

    @property
    def is_safe(self) -> bool:
        """True if the aggregate cannot fail, whatever the rows."""
        type_ = self.argument_type
        if self.function == "avg":
            return type_ is not None and (not type_.is_decimal or type_.precision + 4 <= 38)
        if self.function in ("min", "max", "first", "last"):
            return type_ is not None and type_.name not in ("timestamp", "date")
        return self.function in ("count", "count_distinct", "stddev_samp")


@dataclass(frozen=True)
class CompiledMeasure:
    """A measure bound to its stream: the aggregate of `feature` over `window`, of type `type`."""

    name: str
    feature: Feature
    window: Window
    type: DataType

    @property
    def argument_fields(self) -> frozenset[str]:
        """The fields of the event that the argument reads."""
        return frozenset() if self.feature.argument is None else self.feature.argument.named

    def format_value(self, value: Any) -> str | None:
        """Formats a value for people; None for NULL.

        Averages and deviations of decimals are rounded half up, as money is, to the digits of the argument: 50.006957 of a
        decimal(18,2) is 50.01.
        """
        if value is not None and self._last_digit is not None:
            exact = value if isinstance(value, Decimal) else Decimal(repr(float(value)))
            if exact.is_finite():
                value = exact.quantize(self._last_digit, ROUND_HALF_UP, _WIDE_CONTEXT)
        return to_text(value)

    @cached_property
    def _last_digit(self) -> Decimal | None:
        """The unit to which the value is rounded for people, such as 0.01; None for the exact value."""
        scale = 0 if self.feature.argument_type is None else self.feature.argument_type.scale
        return Decimal(1).scaleb(-scale) if scale and self.feature.function in ("avg", "stddev_samp") else None


@dataclass(frozen=True)
class CompiledStep:
    """A step of a sequence."""

    step: Step
    condition: Expression  # over the event's fields and the arrays of earlier steps, such as `failures.ip`
    gate: Expression | None  # the part of the condition that reads only the event; None: always true
    own: bool  # whether the gate is the whole condition


@dataclass(frozen=True)
class CompiledSequence:
    """A sequence bound to its stream."""

    steps: tuple[CompiledStep, ...]
    absent: CompiledStep | None  # the last step if it waits for an absence; it is not in `steps`
    until: Expression | None
    kept: tuple[str, ...]  # the fields to keep of an event for later steps, the absence and the message, sorted
    within: int  # the time for all steps, in microseconds

    @property
    def conditions(self) -> list[CompiledStep]:
        """All steps, the absent one included."""
        return [*self.steps, self.absent] if self.absent else list(self.steps)


@dataclass(frozen=True)
class CompiledRule:
    """A rule bound to its stream."""

    spec: Rule
    group_by: tuple[str, ...]
    where: Expression | None
    measures: tuple[CompiledMeasure, ...]
    when: Expression | None
    allowed_lateness: int
    fields: tuple[str, ...]  # all fields of the event that the rule reads, group_by included, sorted
    sequence: CompiledSequence | None = None
    # For tumbling and sliding windows: counts events, to find the windows that have any.
    presence: Feature | None = None
    store: str = ""  # the name of the state of a session or sequence, which no other rule shares
    # Each state that the rule uses -> the microseconds for which it is kept below the watermark.
    needs: Mapping[str, int] = field(default_factory=dict)
    lane: int = 0  # see `compile_rule`

    @property
    def window(self) -> Window | None:
        """The window of the rule; None for a sequence."""
        return self.spec.window

    @cached_property
    def memberships(self) -> tuple[Membership, ...]:
        """The calls of in_list in all expressions but `when`, which are decided as events arrive; inner ones first."""
        return _list_memberships(self._event_parts)

    @cached_property
    def lists(self) -> frozenset[str]:
        """The names of the lists that the rule reads."""
        judged = () if self.when is None else self.when.memberships
        return frozenset(each.list_name for each in (*self.memberships, *judged))

    @property
    def where_sql(self) -> str:
        """The condition of the rule's events as SQL; empty for all events."""
        return "" if self.where is None else self.where.sql

    @cached_property
    def event_fields(self) -> tuple[str, ...]:
        """The fields that decide what the rule keeps of an event, sorted, without those that only alerts show."""
        named = {*self.group_by, *(() if self.sequence is None else self.sequence.kept)}
        for part in self._event_parts:
            named |= part.named if part is not None else set()
        return tuple(sorted(named & set(self.fields)))

    @cached_property
    def measured(self) -> tuple[str, ...]:
        """The ids of the distinct features whose values a session's rows hold; empty for other kinds of rules."""
        return tuple(dict.fromkeys(measure.feature.feature_id for measure in self.measures)) if self.store else ()

    @property
    def _event_parts(self) -> list[Expression | None]:
        """The expressions over a single event."""
        parts = [self.where, *(part for m in self.measures for part in (m.feature.filter, m.feature.argument))]
        if self.sequence is not None:
            parts += [self.sequence.until, *(step.condition for step in self.sequence.conditions)]
        return parts

    @property
    def expressions(self) -> list[Expression]:
        """All expressions of the rule."""
        return [part for part in (*self._event_parts, self.when) if part is not None]

    @cached_property
    def message_names(self) -> frozenset[str]:
        """The names in braces in the message."""
        return frozenset(_PLACEHOLDER.findall(self.spec.message))

    @cached_property
    def memory(self) -> str:
        """The name of the table of the rule's verdicts by key or of its judged events; "" if it needs none.

        Each kind of rule has its own table, so that a version never reads the rows of a version of another kind.
        """
        prefix = JUDGED if self.spec.late == "revise" else _MEMORY_PREFIXES.get(self.spec.kind, "")
        return f"{prefix}{self._owner}" if prefix else ""

    @cached_property
    def _owner(self) -> str:
        return _digest([*_name_owner(self.spec.rule_id, self.lane), self.group_by])

    @cached_property
    def open_keys(self) -> str:
        """The name of the table of keys with open windows, shared by rules with this group_by; "" without tiled windows."""
        return "" if self.presence is None else f"{OPEN_KEYS}{_digest([self.group_by])}"

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the document: equal for equal documents only."""
        return _digest([json.dumps(self.spec.document, sort_keys=True, default=str)])

    @cached_property
    def features(self) -> tuple[Feature, ...]:
        """The distinct features whose rows are kept in runs."""
        if self.store:
            return ()
        features = [*(measure.feature for measure in self.measures), *([self.presence] if self.presence else [])]
        return tuple({feature.feature_id: feature for feature in features}.values())

    @cached_property
    def rising(self) -> Mapping[str, int]:
        """The measures that `when` reads, each with a number, if lower measures never make `when` true; otherwise empty.

        `when` is false if every measure is below its number by 1 or more. The measures of a larger window are upper bounds:
        if `when` is false with them, it is false, and only the event itself can cause an error.
        """
        if self.when is None or not all(isinstance(measure.window, Lookback) for measure in self.measures):
            return {}
        names = find_rising(self.when.sql) or {}
        by_name = {measure.name: measure for measure in self.measures}
        if names.keys() != self.when.fields or not all(
            name in by_name and by_name[name].feature.is_rising for name in names
        ):
            return {}
        is_safe = all(measure.name in names or measure.feature.is_safe for measure in self.measures)
        return names if is_safe else {}

    @cached_property
    def sharing_key(self) -> tuple[object, ...]:
        """A sort key that puts rules with the same windows next to each other, since they read the same rows.

        Rules that count distinct values come first, since windows of all sizes share that work. Rules with a rising condition
        come last, the weakest `where` and the largest window first, since these show which events the next need not measure.
        """
        where = self.where.sql if self.where else ""
        features = [feature.feature_id for feature in self.features]
        presence = self.presence.feature_id if self.presence else ""
        counted = [each.feature_id for each in self.features if each.function == "count_distinct" and not presence]
        window = repr(self.spec.window)
        grouping = self.group_by, self.allowed_lateness
        if self.rising and isinstance(self.spec.window, Lookback):
            # Numbers sort by value: amount >= 5 comes before amount >= 10 and holds for more events.
            parts = _DIGITS.split(where)
            numbered = [(len(part.lstrip("0")) * (at % 2), part) for at, part in enumerate(parts)]
            ranks = [
                _RISING.index(measure.feature.function) for measure in self.measures if measure.name in self.rising
            ]
            return *grouping, True, [], True, numbered, ranks, features, -self.spec.window.size
        return *grouping, not counted, counted, False, window, where, presence, features

    def message(self, values: Mapping[str, Any]) -> str:
        """Fills `values` into the rule's message, formatted for people; NULL becomes `null`."""
        return self._message_template % tuple(
            ["null" if (text := write(values.get(name))) is None else text for name, write in self._placeholders]
        )

    @cached_property
    def _message_template(self) -> str:
        """The message with %s instead of each name in braces."""
        return "%s".join(part.replace("%", "%%") for part in _PLACEHOLDER.split(self.spec.message)[::2])

    @cached_property
    def _placeholders(self) -> list[tuple[str, Callable[[Any], str | None]]]:
        """The names in the message, each with the function that formats its value."""
        measures = {measure.name: measure.format_value for measure in self.measures}
        return [(name, measures.get(name, to_text)) for name in _PLACEHOLDER.findall(self.spec.message)]


def compile_rule(
    document: Mapping[str, Any] | Rule, stream: Stream, version: int | None = None, *, lane: int = 0
) -> CompiledRule:
    """Reads a rule from a document and binds it to `stream`.

    Args:
        document: A rule document, or a rule that was read from one.
        stream: The stream to bind to.
        version: The version to name in the error.
        lane: 1 for the second of two versions side by side, which share no state that belongs to one rule. WARMING_LANE or
            higher for a version that is warming, which shares no state at all.

    Raises:
        RuleError: The document is wrong; it has every problem, each with its place.
    """
    rule, problems = read_rule(document.document if isinstance(document, Rule) else document, stream.limits)
    binder = _Binder(rule, stream, problems, lane)
    compiled = binder.bind()
    if problems or compiled is None:
        raise RuleError(rule.rule_id, limit_problems(problems), version)
    return compiled


def _list_memberships(parts: Iterable[Expression | None]) -> tuple[Membership, ...]:
    """Lists the distinct calls of in_list in some expressions, inner ones first."""
    found = {each.name: each for part in parts if part is not None for each in part.memberships}
    return tuple(found.values())


def _name_owner(rule_id: str, lane: int) -> list[Any]:
    """Returns the identity of state that only one version of a rule uses at a time."""
    return [rule_id, lane] if lane else [rule_id]


class _Binder:
    """Binds one rule to its stream and collects its problems."""

    def __init__(self, rule: Rule, stream: Stream, problems: list[Problem], lane: int) -> None:
        self._rule, self._stream, self._problems, self._lane = rule, stream, problems, lane
        self._names = {name.lower(): name for name in stream.fields}

    def bind(self) -> CompiledRule | None:
        rule, stream = self._rule, self._stream
        if rule.stream and rule.stream != stream.name:
            hint = suggest(rule.stream, [stream.name], "correct the name, or use the rule with that stream")
            self._add_problem(
                "stream", f"the rule is for stream {quote_value(rule.stream)}, not for {stream.name!r}; {hint}"
            )
            return None
        group_by = self._bind_group_by()
        where = self._bind_condition(rule.where, stream.fields, "where") if rule.where else None
        lateness = self._bind_lateness()
        measures = self._bind_measures(group_by, where, lateness)
        sequence = self._bind_sequence() if rule.sequence else None
        schema: dict[str, DataType] = {m.name: m.type for m in measures if m.name.lower() not in self._names}
        schema |= {WINDOW_COMPLETE: BOOLEAN}
        # The events of a window have only the key in common, so `when` and the message can read no other field.
        readable = stream.fields
        if rule.kind not in (LOOKBACK, SEQUENCE):
            readable = {name: stream.fields[name] for name in group_by}
        schema = {**readable, WINDOW_COMPLETE: BOOLEAN} if rule.sequence else {**readable, **schema}
        when = self._bind_when(schema, {measure.name for measure in measures}) if rule.when else None
        message_names = self._check_message(
            schema | (self._type_step_arrays(rule.sequence.steps) if rule.sequence else {})
        )
        if self._problems:
            return None
        presence = None
        if isinstance(rule.window, TiledWindow):
            presence = _make_feature(self._identify_state(group_by, lateness), where, _PRESENCE, rule.window)
        store = self._name_store(group_by, where, lateness, sequence)
        needs = self._find_needs(measures, presence, store, lateness)
        compiled = CompiledRule(
            rule, group_by, where, measures, when, lateness, (), sequence, presence, store, needs, self._lane
        )
        used = {*group_by, *message_names, *(sequence.kept if sequence else ())}
        used = used.union(*(expression.named for expression in compiled.expressions))
        return replace(compiled, fields=tuple(sorted(used & set(stream.fields))))

    def _has_all_names(self) -> bool:
        """Returns whether every measure or step of the document could be read, so that an unknown name is an error."""
        rule, document = self._rule, self._rule.document
        if rule.sequence is None:
            written, read = document.get("measures"), len(rule.measures)
        else:
            sequence = document.get("sequence")
            written, read = sequence.get("steps") if isinstance(sequence, Mapping) else None, len(rule.sequence.steps)
        return isinstance(written, (Mapping, list)) and len(written) == read > 0

    def _bind_when(self, schema: Mapping[str, DataType], sound: set[str]) -> Expression | None:
        if not self._has_all_names():
            return None  # each use of an unreadable measure would be reported again
        reported = {measure.name for measure in self._rule.measures} - sound
        for name in _find_names(self._rule.when):
            field = self._names.get(name.lower())
            if field is not None and field not in schema:
                self._add_problem("when", self._describe_event_field(field))
                reported.add(name.lower())
        return self._bind_condition(self._rule.when, schema, "when", reported)

    def _describe_event_field(self, name: str) -> str:
        return (
            f"{name} is a field of one event, and a {self._rule.kind} window has many events; "
            f"use a measure such as max({name}), or add it to group_by"
        )

    def _identify_state(self, group_by: tuple[str, ...], lateness: int) -> list[Any]:
        """Returns the first part of a feature's identity, with the rule_id if the rule resets or is warming: it shares no state."""
        is_alone = self._rule.reset_on_alert or self._lane >= WARMING_LANE
        owner = _name_owner(self._rule.rule_id, self._lane) if is_alone else []
        return [self._stream.name, group_by, lateness, *owner]

    def _name_store(
        self, group_by: tuple[str, ...], where: Expression | None, lateness: int, sequence: CompiledSequence | None
    ) -> str:
        """Returns the name of a session's or sequence's state, the same for versions that can use the same state."""
        rule, window = self._rule, self._rule.window
        owner = _name_owner(rule.rule_id, self._lane)
        identity: list[Any] = [self._stream.name, *owner, group_by, lateness, where.sql if where else None]
        if isinstance(window, Session):
            identity += ["session", window.gap]
        elif sequence is not None and rule.sequence is not None:
            spec = rule.sequence
            identity += [step.condition.sql for step in sequence.conditions]
            identity += [step.step.name for step in sequence.conditions]
            identity += [sequence.until.sql if sequence.until else None, spec.expiry, sequence.kept]
            if spec.expiry == "fixed" or sequence.absent:
                # Partial matches and waits depend on these.
                identity += [spec.within, rule.late]
                identity += [[step.step.at_least, step.step.at_most, step.step.within] for step in sequence.conditions]
        else:
            return ""
        return f"own-{_digest(identity)}"

    def _find_needs(
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

    def _type_step_arrays(self, steps: Sequence[Step]) -> dict[str, DataType]:
        """Returns the types of `step.count`, and of `step.field`: the array of a field over the step's events."""
        arrays: dict[str, DataType] = {}
        for step in steps:
            if not step.absent:
                arrays[f"{step.name}.{COUNT}"] = BIGINT
                arrays |= {f"{step.name}.{name}": array(t) for name, t in self._stream.fields.items() if not t.element}
        return arrays

    def _bind_sequence(self) -> CompiledSequence | None:
        spec = self._rule.sequence
        assert spec is not None
        if COUNT in self._names:
            self._add_problem(
                "sequence",
                f"field {COUNT} of stream {self._stream.name!r} clashes with step.{COUNT}, the number of a step's events; "
                "rename the field in the stream's columns",
            )
        until = None
        if spec.until:
            reported = self._find_wrong_steps(spec.until, (), spec.steps, "sequence.until")
            until = self._bind_condition(spec.until, self._stream.fields, "sequence.until", reported)
        steps = []
        for at, step in enumerate(spec.steps):
            place = f"sequence.steps[{at}]"
            if step.name.lower() in self._names:
                self._add_problem(f"{place}.name", f"{step.name!r} is a field of the stream; choose another name")
            compiled = self._bind_step(
                step, spec.steps[:at], spec.steps[at:], f"{place}.{'absent' if step.absent else 'where'}"
            )
            if compiled is not None:
                steps.append(compiled)
        absent = steps.pop() if steps and steps[-1].step.absent else None
        dotted = {name for step in [*steps, *([absent] if absent else [])] for name in step.condition.fields}
        dotted |= set(_PLACEHOLDER.findall(self._rule.message))
        kept = {name.partition(".")[2] for name in dotted if "." in name}
        looked_up = set[str]()
        for compiled in [*steps, *([absent] if absent else [])]:
            if not compiled.own:
                calls = [each for each in compiled.condition.memberships if each.name in compiled.condition.fields]
                looked_up |= {name for call in calls for name in (call.name, call.error_name) if name}
                kept |= {name for name in compiled.condition.fields if "." not in name}
        if absent is not None:
            kept |= {self._names.get(name.lower(), name) for name in self._rule.group_by}
            kept |= set(_PLACEHOLDER.findall(self._rule.message))
        kept_fields = tuple(sorted((kept & set(self._stream.fields)) | looked_up))
        return CompiledSequence(tuple(steps), absent, until, kept_fields, spec.within)

    def _bind_step(self, step: Step, before: Sequence[Step], rest: Sequence[Step], place: str) -> CompiledStep | None:
        if not step.condition:
            return None
        reported = self._find_wrong_steps(step.condition, before, rest, place)
        condition = self._bind_condition(
            step.condition, {**self._stream.fields, **self._type_step_arrays(before)}, place, reported
        )
        if condition is None or reported:
            return None
        for membership in condition.memberships:
            if of_steps := sorted(membership.text.named - set(self._stream.fields)):
                self._add_problem(
                    place,
                    f"in_list() cannot read {of_steps[0]} of an earlier step, since lists are read when an event arrives; "
                    "look up a field of the event itself",
                )
                return None
        gate = compile_part(step.condition, self._stream.fields)
        return CompiledStep(step, condition, gate, condition.named <= set(self._stream.fields))

    def _find_wrong_steps(self, text: str, before: Sequence[Step], rest: Sequence[Step], place: str) -> set[str]:
        """Reports each name in a condition that belongs to no step, or to one that the condition cannot read.

        Args:
            text: The condition.
            before: The steps that it can read.
            rest: The steps that it cannot read: the step itself and those after it; for `until`, all steps.
            place: Its place in the document.

        Returns:
            The reported names, in lower case.
        """
        reported = set()
        for name in _find_names(text):
            owner, dot, _ = name.lower().partition(".")
            seen = [step.name for step in before if step.name.lower() == owner]
            unseen = [step.name for step in rest if step.name.lower() == owner and not seen]
            known = len(self._problems)
            if owner in self._names:
                continue
            if unseen and place == "sequence.until":
                self._add_problem(place, f"{name} is of step {unseen[0]!r}; `until` can read only the event's fields")
            elif unseen:
                owner_text = (
                    "the step itself" if unseen[0] == rest[0].name else f"step {unseen[0]!r}, which comes later"
                )
                self._add_problem(place, f"{name} is of {owner_text}; use fields of the event and of earlier steps")
            elif seen and not dot:
                field = next(iter(self._stream.fields))
                self._add_problem(
                    place,
                    f"{name} is a step; write {name}.{COUNT} for the number of its events, or {name}.FIELD, such as "
                    f"{name}.{field}, for an array of their values",
                )
            elif dot and not seen and not find_nearest(name, self._type_step_arrays(before)):
                reported.add(name.lower())
                if self._has_all_names():
                    earlier = ", ".join(step.name for step in before) or "none, since this is the first"
                    self._add_problem(place, f"{name}: no earlier step is named {owner!r}; known: {earlier}")
            if len(self._problems) > known:
                reported.add(name.lower())
        return reported

    def _add_problem(self, place: str, message: str) -> None:
        self._problems.append(make_problem(place, message))

    def _find_field(self, name: str, place: str) -> str | None:
        known = self._names.get(name.lower())
        if known is None:
            fields = ", ".join(list(self._stream.fields)[:20]) + (", ..." if len(self._stream.fields) > 20 else "")
            hint = suggest(name, self._stream.fields, f"known: {fields}")
            self._add_problem(place, f"stream {self._stream.name!r} has no field {quote_value(name)}; {hint}")
        return known

    def _bind_group_by(self) -> tuple[str, ...]:
        names = [self._find_field(name, "group_by") for name in self._rule.group_by]
        for name in names:
            if name is not None and self._stream.fields[name].name == "array":
                self._add_problem("group_by", f"field {name!r} is an array and cannot be a key; choose another field")
        return tuple(sorted(name for name in names if name is not None))

    def _bind_lateness(self) -> int:
        own, most = self._rule.allowed_lateness, self._stream.allowed_lateness
        if own is not None and own > most:
            self._add_problem(
                "allowed_lateness",
                f"{format_duration(own)} is longer than the stream allows; write at most {format_duration(most)}",
            )
        return most if own is None else own

    def _bind_condition(
        self, text: str, schema: Mapping[str, DataType], place: str, reported: Iterable[str] = ()
    ) -> Expression | None:
        """Compiles a condition; None if it is wrong. reported: the wrong names in it that were reported already."""
        # Names of unknown type become NULL; problems that only follow from that are dropped.
        unsure = dict.fromkeys(reported, NULL)
        try:
            expression = compile_expression(text, {**schema, **unsure}, self._stream.limits)
        except ExpressionError as error:
            problems = [problem for problem in error.problems if not unsure or "null" not in problem.lower()]
            self._problems.extend(make_problem(place, problem) for problem in problems)
            return None
        if expression.type.name not in ("boolean", "null"):
            self._add_problem(
                place, f"must be true or false, but {quote_value(text)} is {expression.type}; compare it with something"
            )
        return expression

    def _bind_measures(
        self, group_by: tuple[str, ...], where: Expression | None, lateness: int
    ) -> tuple[CompiledMeasure, ...]:
        measures = []
        for measure in self._rule.measures:
            place = f"measures.{measure.name}"
            if measure.name.lower() in self._names:
                self._add_problem(place, f"{measure.name!r} is a field of the stream; choose another name")
            elif measure.name.lower() == WINDOW_COMPLETE:
                self._add_problem(place, f"{measure.name!r} is reserved; choose another name")
            if not measure.text:
                continue
            try:
                call = compile_aggregate(measure.text, self._stream.fields, self._stream.limits)
            except ExpressionError as error:
                self._problems.extend(make_problem(place, problem) for problem in error.problems)
                continue
            window = measure.window
            if isinstance(window, Lookback) and window.resolution and not AGGREGATES[call.function].additive:
                self._add_problem(place, _describe_no_resolution(call, window))
                continue
            feature = _make_feature(self._identify_state(group_by, lateness), where, call, window)
            type_ = feature.aggregate.result_type(feature.argument_type)
            measures.append(CompiledMeasure(measure.name, feature, window, type_))
        return tuple(measures)

    def _check_message(self, schema: Mapping[str, DataType]) -> set[str]:
        names = set(_PLACEHOLDER.findall(self._rule.message))
        known = {*schema, *(measure.name for measure in self._rule.measures)}
        if not self._has_all_names():
            return names & known
        kinds = "a field of the event nor of a step" if self._rule.sequence else "a field nor a measure"
        for name in sorted(names - known):
            if name in self._stream.fields:
                self._add_problem("message", self._describe_event_field(name))
                continue
            near = find_nearest(name, sorted(known))
            hint = f"did you mean {{{near}}}?" if near else f"known: {', '.join(sorted(known)[:20])}"
            self._add_problem("message", f"{{{name}}} is neither {kinds}; {hint}")
        return names


def _find_names(text: str) -> list[str]:
    """Returns the distinct names that a condition reads; none if it does not parse, which compiling reports."""
    try:
        return list(dict.fromkeys(find_names(text)))
    except ExpressionError:
        return []


_PRESENCE = AggregateCall("count", None, None, "count(*)")


def _describe_no_resolution(call: AggregateCall, window: Lookback) -> str:
    own = format_duration(window.size)
    if window.delay:
        own = f"{{lookback: {own}, delay: {format_duration(window.delay)}}}"
    return (
        f"{call.sql} cannot have a resolution, since counts and sums per bucket do not suffice to compute it when an event is "
        f"deleted; give it a window of its own, such as {{measure: ..., window: {own}}}"
    )


def _make_feature(kind: list[Any], where: Expression | None, call: AggregateCall, window: Window) -> Feature:
    parts: Sequence[Expression | None] = (where, call.filter, call.argument)
    identity: list[Any] = [*kind, call.function, *([part.sql, str(part.type)] if part else None for part in parts)]
    stream, group_by, lateness, *owner = kind
    tiles, buckets = None, None
    if isinstance(window, TiledWindow):
        tiles = window
        identity += [tiles.size, tiles.slide, tiles.offset]
    elif isinstance(window, Lookback) and window.resolution:
        # The delay decides which buckets are closed, so rules with different delays cannot share combined rows.
        identity += ["resolution", window.resolution, window.delay]
        # Lists may have changed when an event is deleted, so its row must still exist to be taken out.
        is_single = any(part is not None and part.memberships for part in parts)
        buckets = Buckets(window.resolution, NEVER_DUE if is_single else window.delay + lateness, call.function)
    row_set = "" if owner or buckets else json.dumps(group_by)
    return Feature(
        stream, group_by, call.function, lateness, where, call.filter, call.argument, tiles, buckets, _digest(identity),
        row_set,
    )  # fmt: skip


def _digest(identity: list[Any]) -> str:
    return hashlib.sha256(json.dumps(identity, separators=(",", ":")).encode()).hexdigest()[:16]

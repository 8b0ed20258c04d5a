"""Binds a rule to its stream: resolves names and types, and names the state that the rule needs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from lookback.core.aggregation.aggregates import find_aggregate
from lookback.core.errors import ExpressionError, Problem, RuleError
from lookback.core.expressions.aggregatecalls import AggregateCall, compile_aggregate
from lookback.core.expressions.compiling import Expression, compile_expression, compile_part, find_names, recompile
from lookback.core.expressions.syntax import name_as_sql
from lookback.core.rules.compiled import (
    COUNT,
    PLACEHOLDER,
    WARMING_LANE,
    WINDOW_COMPLETE,
    CompiledMeasure,
    CompiledRule,
    CompiledSequence,
    CompiledStep,
    Feature,
    digest,
    name_owner,
    split_step_name,
)
from lookback.core.rules.document import Rule, read_rule
from lookback.core.rules.features import make_feature
from lookback.core.rules.keys import KeyPart, add_guards, bind_key, explain_unknown_field
from lookback.core.rules.problems import limit_problems, make_problem, quote_value
from lookback.core.rules.stepkeys import add_keys, bind_keys
from lookback.core.streams.declaration import Stream
from lookback.core.values.durations import format_duration
from lookback.core.values.suggestions import find_nearest, suggest
from lookback.core.values.types import BIGINT, BOOLEAN, NULL, DataType, array
from lookback.core.values.windows import PER_EVENT, SEQUENCE, Lookback, Moment, Session, Step, TiledWindow


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


class _Binder:
    """Binds one rule to its stream and collects its problems."""

    def __init__(self, rule: Rule, stream: Stream, problems: list[Problem], lane: int) -> None:
        self._rule, self._stream, self._problems, self._lane = rule, stream, problems, lane
        self._names = {name.lower(): name for name in stream.fields}
        self._roots = {name.partition(".")[0] for name in self._names}
        self._entities: tuple[str, ...] = ()
        # The entries of group_by in the order of the document, with their types; None if one is wrong.
        self._grouped: dict[str, DataType] | None = None

    def bind(self) -> CompiledRule | None:
        rule, stream = self._rule, self._stream
        if rule.stream and rule.stream != stream.name:
            hint = suggest(rule.stream, [stream.name], "correct the name, or use the rule with that stream")
            self._add_problem(
                "stream", f"the rule is for stream {quote_value(rule.stream)}, not for {stream.name!r}; {hint}"
            )
            return None
        key = self._bind_key()
        group_by, key_types = tuple(part.column for part in key), {part.name: part.type for part in key}
        where = self._bind_condition(rule.where, stream.fields, "where") if rule.where else None
        if not isinstance(rule.window, Moment):
            where = add_guards(where, key, stream)
        self._entities = self._bind_entities(key_types)
        lateness = self._bind_lateness()
        measures = self._bind_measures(group_by, where, lateness)
        sequence = self._bind_sequence(group_by, where) if rule.sequence else None
        schema: dict[str, DataType] = {m.name: m.type for m in measures if m.name.lower() not in self._names}
        schema |= {WINDOW_COMPLETE: BOOLEAN}
        # The events of a window have only the key in common, so `when` and the message can read no other field.
        readable = stream.fields if rule.kind in (*PER_EVENT, SEQUENCE) else key_types
        schema = {**readable, WINDOW_COMPLETE: BOOLEAN} if rule.sequence else {**readable, **schema}
        is_event_rule = isinstance(rule.window, Moment)
        # Where there is an event, the names of its key stand for their expressions.
        named = {
            part.name.lower(): part.sql or name_as_sql(part.column) for part in key if part.name not in stream.fields
        }
        named = named if rule.kind in PER_EVENT else {}
        seen = stream.fields if is_event_rule else schema
        when = self._bind_when(seen, {measure.name for measure in measures}, named) if rule.when else None
        if is_event_rule:
            # One condition decides which events dispatch sends, and which ones alert.
            where, when = self._join_conditions(where, when), None
            where = add_guards(where, key, stream)
        message_names = self._check_message(
            schema | key_types | (self._type_step_arrays(rule.sequence.steps) if rule.sequence else {})
        )
        if self._problems:
            return None
        presence = None
        if isinstance(rule.window, TiledWindow):
            presence = make_feature(self._identify_state(group_by, lateness), where, _PRESENCE, rule.window)
        store = self._name_store(group_by, where, lateness, sequence)
        needs = self._find_needs(measures, presence, store, lateness)
        compiled = CompiledRule(
            rule,
            key,
            where,
            measures,
            when,
            lateness,
            (),
            sequence,
            presence,
            store,
            needs,
            self._lane,
            self._entities,
        )
        used = {*self._entities, *message_names, *(sequence.kept if sequence else ())}
        used = used.union(*(part.fields for part in key), *(part.named for part in compiled.expressions))
        used = used.union(*(each.fields for each in (sequence.keys if sequence else ())))
        keeps_nothing = is_event_rule and rule.suppress is None
        routed_by = (stream.event_id,) if keeps_nothing else group_by
        return replace(compiled, fields=tuple(sorted(used & set(stream.fields))), routed_by=routed_by)

    def _join_conditions(self, where: Expression | None, when: Expression | None) -> Expression | None:
        """Returns a condition that holds where both hold."""
        if where is None or when is None:
            return where or when
        return recompile(f"({where.sql}) AND ({when.sql})", self._stream.fields)

    def _has_all_names(self) -> bool:
        """Returns whether every measure or step of the document could be read, so that an unknown name is an error."""
        rule, document = self._rule, self._rule.document
        if isinstance(rule.window, Moment):
            return True
        if rule.sequence is None:
            written, read = document.get("measures"), len(rule.measures)
        else:
            sequence = document.get("sequence")
            written, read = sequence.get("steps") if isinstance(sequence, Mapping) else None, len(rule.sequence.steps)
        return isinstance(written, (Mapping, list)) and len(written) == read > 0

    def _bind_when(
        self, schema: Mapping[str, DataType], sound: set[str], named: Mapping[str, str]
    ) -> Expression | None:
        if not self._has_all_names():
            return None  # each use of an unreadable measure would be reported again
        reported = {measure.name for measure in self._rule.measures} - sound
        for name in _find_names(self._rule.when):
            field = self._names.get(name.lower())
            if field is not None and field not in schema:
                self._add_problem("when", self._describe_event_field(field))
                reported.add(name.lower())
        return self._bind_condition(self._rule.when, schema, "when", reported, named)

    def _describe_event_field(self, name: str) -> str:
        return (
            f"{name} is a field of one event, and a {self._rule.kind} window has many events; "
            f"use a measure such as max({name}), or add it to group_by"
        )

    def _identify_state(self, group_by: tuple[str, ...], lateness: int) -> list[Any]:
        """Returns the first part of a feature's identity, with the rule_id if the rule resets or is warming: it shares no state."""
        is_alone = self._rule.reset_on_alert or self._lane >= WARMING_LANE
        owner = name_owner(self._rule.rule_id, self._lane) if is_alone else []
        return [self._stream.name, group_by, lateness, *owner]

    def _name_store(
        self, group_by: tuple[str, ...], where: Expression | None, lateness: int, sequence: CompiledSequence | None
    ) -> str:
        """Returns the name of a session's or sequence's state, the same for versions that can use the same state."""
        rule, window = self._rule, self._rule.window
        owner = name_owner(rule.rule_id, self._lane)
        identity: list[Any] = [self._stream.name, *owner, group_by, lateness, where.sql if where else None]
        if isinstance(window, Session):
            identity += ["session", window.gap]
        elif sequence is not None and rule.sequence is not None:
            spec = rule.sequence
            identity += [step.condition.sql for step in sequence.conditions]
            identity += [step.step.name for step in sequence.conditions]
            identity += [sequence.until.sql if sequence.until else None, spec.expiry, spec.take, sequence.kept]
            if sequence.has_own_keys:
                identity += [[key.fields, key.bits] for key in sequence.keys]
            if spec.expiry == "fixed" or sequence.absent:
                # Partial matches and waits depend on these.
                identity += [spec.within, rule.late]
                identity += [[step.step.at_least, step.step.at_most, step.step.within] for step in sequence.conditions]
        else:
            return ""
        return f"own-{digest(identity)}"

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

    def _bind_sequence(self, group_by: tuple[str, ...], where: Expression | None) -> CompiledSequence | None:
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
            if step.name.lower() in self._roots:
                self._add_problem(f"{place}.name", f"{step.name!r} is a field of the stream; choose another name")
            compiled = self._bind_step(
                step, spec.steps[:at], spec.steps[at:], f"{place}.{'absent' if step.absent else 'where'}"
            )
            if compiled is not None:
                steps.append(compiled)
        absent = steps.pop() if steps and steps[-1].step.absent else None
        dotted = {name for step in [*steps, *([absent] if absent else [])] for name in step.condition.fields}
        dotted |= set(PLACEHOLDER.findall(self._rule.message))
        step_names = [step.step.name for step in steps]
        kept = {field for step, field in (split_step_name(name, step_names) for name in dotted) if step}
        looked_up = set[str]()
        for compiled in [*steps, *([absent] if absent else [])]:
            if not compiled.own:
                calls = [each for each in compiled.condition.memberships if each.name in compiled.condition.fields]
                looked_up |= {name for call in calls for name in (call.name, call.error_name) if name}
                kept |= {name for name in compiled.condition.fields if not split_step_name(name, step_names)[0]}
        if absent is not None:
            kept |= {self._names.get(entry.name.lower(), entry.name) for entry in self._rule.group_by}
            kept |= {*self._entities, *PLACEHOLDER.findall(self._rule.message)}
        kept_fields = tuple(sorted((kept & set(self._stream.fields)) | looked_up))
        compiled_sequence = CompiledSequence(tuple(steps), absent, until, kept_fields, spec.within)
        if self._grouped is None:
            return compiled_sequence
        fields = self._stream.fields
        keys = bind_keys(spec, self._grouped, fields, self._find_field, self._add_problem)
        return compiled_sequence if self._problems else add_keys(compiled_sequence, keys, group_by, where, fields)

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
            if owner in self._roots:
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
            self._add_problem(place, explain_unknown_field(name, self._stream))
        return known

    def _bind_key(self) -> tuple[KeyPart, ...]:
        """Binds the entries of group_by, by column, so that their order makes no difference."""
        steps = self._rule.sequence.steps if self._rule.sequence else ()
        taken = dict.fromkeys((measure.name.lower() for measure in self._rule.measures), "a measure")
        taken |= dict.fromkeys((step.name.lower() for step in steps), "a step") | {WINDOW_COMPLETE: "reserved"}
        parts, problems = bind_key(self._rule.group_by, self._stream, taken)
        self._problems.extend(problems)
        self._grouped = None if problems else {part.column: part.type for part in parts}
        return tuple(sorted(parts, key=lambda part: part.column))

    def _bind_entities(self, key: Collection[str]) -> tuple[str, ...]:
        """Returns the names of the key and the fields that the rule's alerts are about, in the order of the document."""
        found, names = [], {name.lower(): name for name in key if name not in self._stream.fields}
        for at, name in enumerate(self._rule.entities):
            place = "entity" if self._rule.entity else f"entities[{at}]"
            if name.lower() in names:
                found.append(names[name.lower()])
                continue
            field = self._find_field(name, place)
            if field is None:
                continue
            if self._stream.fields[field].name == "array":
                self._add_problem(place, f"field {field!r} is an array and cannot be an entity; choose another field")
            elif field not in key and self._rule.kind not in (*PER_EVENT, SEQUENCE):
                self._add_problem(
                    place,
                    f"{quote_value(field)} is not in group_by, and a {self._rule.kind} window has many events; name one of "
                    "its fields, or add it there",
                )
            found.append(field)
        return tuple(found)

    def _bind_lateness(self) -> int:
        own, most = self._rule.allowed_lateness, self._stream.allowed_lateness
        if own is not None and own > most:
            self._add_problem(
                "allowed_lateness",
                f"{format_duration(own)} is longer than the stream allows; write at most {format_duration(most)}",
            )
        return most if own is None else own

    def _bind_condition(
        self,
        text: str,
        schema: Mapping[str, DataType],
        place: str,
        reported: Iterable[str] = (),
        named: Mapping[str, str] = MappingProxyType({}),
    ) -> Expression | None:
        """Compiles a condition; None if it is wrong. reported: the wrong names in it that were reported already.

        named: see `compile_expression`.
        """
        # Names of unknown type become NULL; problems that only follow from that are dropped.
        unsure = dict.fromkeys(reported, NULL)
        try:
            expression = compile_expression(text, {**schema, **unsure}, self._stream.limits, named)
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
            if measure.name.lower() in self._roots:
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
            if isinstance(window, Lookback) and window.resolution and not find_aggregate(call.function).additive:
                self._add_problem(place, _describe_no_resolution(call, window))
                continue
            feature = make_feature(self._identify_state(group_by, lateness), where, call, window)
            type_ = feature.aggregate.result_type(feature.argument_type)
            measures.append(CompiledMeasure(measure.name, feature, window, type_))
        return tuple(measures)

    def _check_message(self, schema: Mapping[str, DataType]) -> set[str]:
        names = set(PLACEHOLDER.findall(self._rule.message))
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

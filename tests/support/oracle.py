"""The slow, obvious evaluator: keeps every event, takes them one at a time, rescans for every window and every sequence.

It is the truth that the engine is compared with. Of the engine it uses only what is tested elsewhere: documents,
expressions (against Spark), the identity of alerts and the texts of values.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal, localcontext
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np

from lookback.core.expressions.compiling import Expression, Membership, compile_expression, recompile
from lookback.core.expressions.syntax import LookbackSql, parse
from lookback.core.rules.compiled import CompiledMeasure, CompiledRule, CompiledStep, Feature
from lookback.core.rules.compiling import compile_rule
from lookback.core.streams.alerts import compute_alert_id
from lookback.core.streams.declaration import Stream
from lookback.core.streams.unions import Union
from lookback.core.values.columns import Column, from_text, from_values, to_text
from lookback.core.values.times import to_utc
from lookback.core.values.types import BIGINT, BOOLEAN, DataType, array
from lookback.core.values.windows import Lookback, Session, TiledWindow

ERROR = object()
# Before the first watermark: below every time.
NEVER = -(10**30)
# What all oracles of a test session have met; printed where many cases are made, to see that they were not empty.
COVERED: Counter[str] = Counter()
Key = tuple[Any, ...]
Fields = tuple[str, ...]
_T = TypeVar("_T")


@dataclass(eq=False)
class OracleEvent:
    """One event: stored values by field, and the commit that brought it.

    tie: orders the events of one commit and one time: by position, NULL first, then by id. number: its place in the order of arrival. known: values of expressions over the event alone. listed: what calls of in_list
    gave when it arrived.
    """

    values: Mapping[str, Any]
    commit: int
    time: int
    tie: Any
    number: int = -1
    known: dict[str, Any] = field(default_factory=dict)
    listed: dict[str, Column] = field(default_factory=dict)

    @property
    def place(self) -> tuple[int, int]:
        """Its place in (time, arrival) order."""
        return self.time, self.number


@dataclass(eq=False)
class _Row:
    """An event that counts for `key`. values: its argument, by the features that keep the event."""

    key: Key
    event: OracleEvent
    values: dict[str, Any] = field(default_factory=dict)


@dataclass
class _State:
    """The state kept under one name: a feature's rows, or all of a session's or sequence's own.

    resolution: the floor is a multiple of it. starts: of a session, the highest event time when each of its measures'
    features started.
    """

    since: int
    floor: int = NEVER
    width: int = 0
    resolution: int = 1
    rows: list[_Row] = field(default_factory=list)
    starts: dict[str, int] = field(default_factory=dict)
    # Of a sequence with fixed expiry, when the match of a key begins, and the number of the first event that is in it.
    matches: dict[Key, tuple[int, int]] = field(default_factory=dict)
    waits: list[_Wait] = field(default_factory=list)

    def of(self, key: Key) -> list[_Row]:
        """The key's rows in order of arrival."""
        return [row for row in self.rows if row.key == key]

    def empty(self, key: Key) -> None:
        """Forgets the key's rows and match."""
        self.rows = [row for row in self.rows if row.key != key]
        self.matches.pop(key, None)


@dataclass
class _Memory:
    """The rows written about one subject: how many, and what the last one said."""

    base: str
    rows: int = 0
    held: bool = False
    measures: dict[str, str | None] = field(default_factory=dict)
    end: int = 0


@dataclass(frozen=True)
class _Subject:
    """The subject of a verdict. named: the parts of the alert's id; identity: what tells it from others of its key."""

    key: Key
    named: str | int
    identity: int
    event_id: str | None
    time: int
    start: int
    end: int


class Oracle:
    """Rules and events in; alerts (see _Kind.settle), late events, failures and notes out."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        # By rule the version that is active or paused, and the one in shadow.
        self.mains: dict[str, _Kind] = {}
        self.shadows: dict[str, _Kind] = {}
        # The lane of each version that was in force.
        self.lanes: dict[tuple[str, int], int] = {}
        self.states: dict[str, _State] = {}
        self.high = self.advanced = NEVER
        self.last_commit: int | None = None
        # Of a union: of each commit, the members and times of its events.
        self.seen: list[list[tuple[str, int]]] = []
        self.passed = NEVER
        self.arrived = 0
        # Of the rule, whether it is its shadow, its group_by and a key, the time of the last raised alert; of the subject,
        # what was written about it by a version of one kind.
        self.hours: dict[tuple[str, bool, Fields, Key], int] = {}
        self.memories: dict[tuple[str, str, Fields, int, Key, int], _Memory] = {}
        # Of rules that revise: the version and document that judged, and the events.
        self.judged: dict[str, tuple[Any, list[OracleEvent]]] = {}
        self.alerts: list[tuple[Any, ...]] = []
        # By rule and id of the event, what was measured when it arrived: texts by measure, and whether windows were complete;
        # None where a measure had an error.
        self.measured: dict[tuple[str, str], tuple[dict[str, str | None], bool] | None] = {}
        # Of each alert, what decides its place among rows that the watermark brings: the watermark, the rule, the key.
        self.moments: list[tuple[int, str, int, str]] = []
        self.late: list[tuple[Any, ...]] = []
        self.failed: dict[tuple[str, int], int] = {}
        self.notes: list[tuple[str, str, int, int]] = []
        self.refused: list[tuple[str, int]] = []
        # By its SQL, an entry of a key.
        self.expressions: dict[str, Expression] = {}
        # By list its rows: a value, and the time at which it expires.
        self.lists: dict[str, list[tuple[str, float]]] = {}

    @property
    def watermark(self) -> int:
        """The watermark against which the next commit is judged."""
        if self.stream.union is not None:
            return max(self.passed, self.advanced)
        automatic = NEVER if self.high == NEVER else self.high - self.stream.max_out_of_orderness
        return max(automatic, self.advanced)

    def _union_watermark(self, union: Union) -> int:
        """The watermark that a union would have now, had it had none before."""
        past = self.seen
        highest = {
            name: max((time for commit in past for member, time in commit if member == name), default=NEVER)
            for name in union.members
        }
        awaited = []
        for name, disorder in union.members.items():
            last = max(
                (at for at, commit in enumerate(past) if any(member == name for member, _ in commit)), default=-1
            )
            if last < 0:
                continue
            # What was the latest event of all when it had its last one, and how far the others came since.
            heard = max(time for commit in past[: last + 1] for _, time in commit)
            others = max((high for other, high in highest.items() if other != name), default=NEVER)
            if others - heard <= union.idle:
                awaited.append(highest[name] - disorder)
            else:
                COVERED["idle members"] += 1
        return min(awaited, default=NEVER)

    def change(self, document: dict[str, Any], version: int, status: str) -> None:
        """A rule change between two commits."""
        rule_id = document["rule_id"]
        held = [role[rule_id] for role in (self.mains, self.shadows) if rule_id in role]
        if any((rule.version, rule.status, rule.spec.document) == (version, status, document) for rule in held):
            return  # an UPDATE of a comment, say, that leaves the row as it was in force
        if status in ("active", "shadow", "paused"):
            compiled = compile_rule(document, self.stream, lane=self._lane(rule_id, version, status))
            kind = _KINDS[compiled.spec.kind](self, compiled, version, status)
            self._end(rule_id, version)
            if status == "active":
                self.shadows.pop(rule_id, None)
            (self.shadows if status == "shadow" else self.mains)[rule_id] = kind
            COVERED[f"rules: {compiled.spec.kind}"] += 1
            COVERED[f"versions in shadow beside another: {compiled.spec.kind}"] += (
                rule_id in self.mains and rule_id in self.shadows
            )
        elif status == "retired":
            self.mains.pop(rule_id, None)
            self.shadows.pop(rule_id, None)
        self._open()

    def refuse(self, document: dict[str, Any], version: int) -> None:
        """An active row that the gate rejects: all stays as it was, also where the row is in force as it is."""
        rule = self.mains.get(document["rule_id"])
        if rule is None or (rule.version, rule.status, rule.spec.document) != (version, "active", document):
            self.refused.append((document["rule_id"], version))
            COVERED["rows that a gate rejected"] += 1

    def end(self, rule_id: str, version: int) -> None:
        """Takes one version out of force: it was deleted or quarantined. What others share with it is kept for them alone."""
        self._end(rule_id, version)
        self._open()

    def _end(self, rule_id: str, version: int) -> None:
        for role in (self.mains, self.shadows):
            if rule_id in role and role[rule_id].version == version:
                del role[rule_id]

    def _lane(self, rule_id: str, version: int, status: str) -> int:
        """The state that a version goes on with: its own, that of its role, or that of a shadow that it replaces."""
        main, shadow = self.mains.get(rule_id), self.shadows.get(rule_id)
        in_force = {rule.version: rule.compiled.lane for rule in (main, shadow) if rule}
        own = self.lanes.get((rule_id, version)) if version in in_force or not in_force else None
        before = shadow if status == "shadow" else main or (shadow if status == "active" else None)
        other = main if status == "shadow" else shadow
        if own is not None:
            lane = own
        elif before is not None:
            lane = before.compiled.lane
        else:
            lane = 1 - other.compiled.lane if other else 0
        self.lanes[rule_id, version] = lane
        return lane

    def command(self, action: str, time: int | None = None) -> None:
        """A command between two commits."""
        COVERED[f"commands: {action}"] += 1
        if action == "retire_all":
            self.mains.clear()
            self.shadows.clear()
        elif action == "clear_state":
            self.states.clear()
            self.hours.clear()
            self.judged.clear()
            self._open()
        else:
            assert time is not None
            before = self.watermark
            self.advanced = max(self.advanced, time)
            self._reach(before)

    def change_lists(self, rows: Iterable[tuple[str, str, int | None]]) -> None:
        """A commit of table `lists` between two commits of events. rows: list, value and expiry of all that it then has."""
        self.lists = {}
        for name, value, end in rows:
            self.lists.setdefault(name, []).append((value, math.inf if end is None else end))
        COVERED["commits of lists"] += 1

    def is_listed(self, name: str, text: str, time: int) -> bool:
        """Returns whether a text is in a list at a time."""
        return any(value == text and time < end for value, end in self.lists.get(name, ()))

    def look_up(self, memberships: Iterable[Membership], columns: Mapping[str, Column], time: int) -> dict[str, Column]:
        """Returns what calls of in_list give now, for columns of one row."""
        found: dict[str, Column] = {}
        for membership in memberships:
            text = membership.text.evaluate({**columns, **found}, 1)
            value = outcome(text)
            if value is None or value is ERROR:
                found[membership.name] = Column(BOOLEAN, np.array([False]), text.null, text.error)
            else:
                is_listed = self.is_listed(membership.list_name, value, time)
                found[membership.name] = single(BOOLEAN, is_listed)
                COVERED[f"look-ups: {is_listed}"] += 1
        return found

    def run(self, events: list[OracleEvent], deleted: Mapping[int, Sequence[OracleEvent]] | None = None) -> None:
        """Judges events; each commit is complete. deleted: what each of these commits deletes."""
        for commit in sorted({event.commit for event in events}):
            for rule in self.in_force():
                rule.begin()
            self._delete(set((deleted or {}).get(commit, ())))
            here = [event for event in events if event.commit == commit]
            before = self.watermark
            for event in sorted(here, key=lambda e: (e.time, e.tie)):
                event.number, self.arrived = self.arrived, self.arrived + 1
                self._event(event, before)
            self.high = max(self.high, *(event.time for event in here))
            self.seen.append([(event.values.get("member", ""), event.time) for event in here])
            if self.stream.union is not None:
                self.passed = max(self.passed, self._union_watermark(self.stream.union))
            self.last_commit = commit
            self._reach(before)
            self._forget_unused()

    def _delete(self, gone: set[OracleEvent]) -> None:
        """Removes the events that a commit deletes; earlier verdicts stay."""
        COVERED["deleted events"] += len(gone)
        for state in self.states.values():
            COVERED["deleted events that were in a state"] += sum(row.event in gone for row in state.rows)
            members = {
                key: rule.members(key)
                for rule in self.in_force()
                if isinstance(rule, _Sequences) and rule.state is state
                for key in state.matches
            }
            state.rows = [row for row in state.rows if row.event not in gone]
            state.waits = [wait for wait in state.waits if wait.event not in gone]
            for wait in state.waits:
                wait.match.drop(gone)
            for key, (_, since) in list(state.matches.items()):
                # A match goes on from the first event of step one that is left.
                left = [event.time for event in members.get(key, ()) if event not in gone]
                if left:
                    state.matches[key] = (min(left), since)
                else:
                    del state.matches[key]
        for _, judged in self.judged.values():
            judged[:] = [event for event in judged if event not in gone]

    def in_force(self) -> list[_Kind]:
        """The rules with state, by rule_id and version."""
        return sorted((*self.mains.values(), *self.shadows.values()), key=lambda rule: (rule.rule_id, rule.version))

    def _open(self) -> None:
        widths: dict[str, int] = {}
        for rule in self.in_force():
            for name, width in rule.widths().items():
                widths[name] = max(width, widths.get(name, 0))
        for name, width in widths.items():
            self.states.setdefault(name, _State(self.high)).width = width
        for rule in self.in_force():
            for measure in rule.compiled.measures:
                if isinstance(measure.window, Lookback) and measure.window.resolution:
                    self.states[measure.feature.feature_id].resolution = measure.window.resolution
        for rule in self.in_force():
            rule.open()

    def _forget_unused(self) -> None:
        used = {name for rule in self.in_force() for name in rule.widths()}
        self.states = {name: state for name, state in self.states.items() if name in used}
        revising = {r.judges for r in self.in_force() if r.spec.late == "revise"}
        self.judged = {slot: judged for slot, judged in self.judged.items() if slot in revising}
        for rule in self.in_force():
            rule.forget_unused()
        # An hour is kept while an event that it suppresses may still be taken.
        spans = {
            (r.rule_id, r.status == "shadow"): (r.spec.suppress, r.lateness)
            for r in self.in_force()
            if r.spec.suppress is not None
        }
        for slot in list(self.hours):
            span, lateness = spans.get(slot[:2], (NEVER, 0))
            if self.hours[slot] + span < self.watermark - lateness:
                del self.hours[slot]

    def _event(self, event: OracleEvent, watermark: int) -> None:
        for rule in self.in_force():
            new = [each for each in rule.compiled.memberships if each.name not in event.listed]
            event.listed |= self.look_up(new, self.columns(event), event.time)
        features = {f.feature_id: f for rule in self.in_force() for f in rule.compiled.features}
        for feature in features.values():
            self._feed(feature, event, watermark)
        actions = [action for rule in self.in_force() if (action := rule.event(event, watermark))]
        if event.time < watermark and actions:
            best = min(actions, key=["evaluated", "recorded", "discarded"].index)
            self.late.append((event.values[self.stream.event_id], event.commit, watermark - event.time, best))
            COVERED[f"late: {best}"] += 1

    def _feed(self, feature: Feature, event: OracleEvent, watermark: int) -> None:
        if feature.tiles is None:
            taken = event.time >= watermark - feature.allowed_lateness
        else:
            taken = bool(alive(feature.tiles, event.time, watermark - feature.allowed_lateness))
        key = self.key_of(feature.group_by, event)
        if taken and key is not None and self.value(feature.where, event, True) is True:
            values = self.kept(feature, event)
            if values:
                self.states[feature.feature_id].rows.append(_Row(key, event, values))

    def key_of(self, columns: Iterable[str], event: OracleEvent) -> Key | None:
        """The event's values of fields and of expressions, by their SQL; None if one has an error."""
        found = []
        for name in columns:
            if name in self.stream.fields:
                value = event.values[name]
            else:
                expression = self.expression(name)
                value = self.value(expression, event, None)
                if value is ERROR or is_beyond_calendar(expression.type, value):
                    COVERED["keys with an error"] += 1
                    return None
                COVERED["keys with an expression"] += 1
                COVERED["keys with an expression that is NULL"] += value is None
            found.append(one_of_equals(value))
        return tuple(found)

    def kept(self, feature: Feature, event: OracleEvent) -> dict[str, Any]:
        """Returns what a feature keeps of an event: nothing where its filter is not true or its argument has no value."""
        if self.value(feature.filter, event, True) is not True:
            return {}
        value = self.value(feature.argument, event, 0)
        if feature.function.startswith(("max_by", "min_by")) and value not in (None, ERROR):
            # The engine keeps a text that sorts; here both values are kept.
            assert feature.argument is not None
            parts = parse(feature.argument.sql).expressions
            value = tuple(self.value(recompile(part.sql(LookbackSql), self.stream.fields), event, 0) for part in parts)
        is_counted = value is not None or feature.function in ("first", "last")
        return {feature.feature_id: value} if is_counted and value is not ERROR else {}

    def value(self, expression: Expression | None, event: OracleEvent, default: Any) -> Any:
        """The stored value of an expression over the event alone; None for NULL, ERROR for an error."""
        if expression is None:
            return default
        if expression.sql not in event.known:
            event.known[expression.sql] = outcome(expression.evaluate(self.columns(event), 1))
        return event.known[expression.sql]

    def expression(self, sql: str) -> Expression:
        """An entry of a key over the event's fields."""
        if sql not in self.expressions:
            self.expressions[sql] = compile_expression(sql, self.stream.fields)
        return self.expressions[sql]

    def columns(self, event: OracleEvent) -> dict[str, Column]:
        """The event's fields as columns of one row."""
        fields = {name: single(type_, event.values[name]) for name, type_ in self.stream.fields.items()}
        return {**fields, **event.listed}

    def text(self, name: str, value: Any) -> str | None:
        """The text of a field's stored value."""
        return to_text(single(self.stream.fields[name], value).item(0))

    def _reach(self, before: int) -> None:
        """Does all that the watermark reaches on its way from `before`; then raises floors and forgets what expired."""
        now = self.watermark
        if now == NEVER:
            return
        start = len(self.alerts)
        for rule in self.in_force():
            if self.last_commit is not None:
                rule.reach(before, now, self.last_commit)
        order = sorted(range(start, len(self.alerts)), key=self.moments.__getitem__)
        self.alerts[start:], self.moments[start:] = (
            [listed[at] for at in order] for listed in (self.alerts, self.moments)
        )
        for state in self.states.values():
            floor = now - state.width
            state.floor = max(state.floor, floor - floor % state.resolution)
        for rule in self.in_force():
            rule.forget_expired(now)


class _Kind:
    """A version of a rule in force, and what rules of all kinds have in common."""

    def __init__(self, oracle: Oracle, compiled: CompiledRule, version: int, status: str) -> None:
        self.oracle, self.compiled, self.version, self.status = oracle, compiled, version, status
        self.spec, self.rule_id, self.lateness = compiled.spec, compiled.spec.rule_id, compiled.allowed_lateness
        self.evaluated = status in ("active", "shadow")
        fields = oracle.stream.fields
        self.where = compile_expression(self.spec.where, fields) if self.spec.where else None
        self.when = compiled.when
        # The types of the key's values, by the names that alerts show, in the order of `group_by`.
        self.named = dict(zip(compiled.key_names, (part.type for part in compiled.key), strict=True))
        if self.spec.when and set(self.named) - set(fields) and self.spec.kind != "event":
            measures = {measure.name: measure.type for measure in compiled.measures}
            seen = {**fields, **self.named, **measures, "window_complete": BOOLEAN}
            self.when = compile_expression(self.spec.when, seen)

    @property
    def judges(self) -> str:
        """The name of the events that a rule judged and may revise."""
        return f"{self.rule_id} {self.compiled.lane} {self.compiled.group_by}"

    def widths(self) -> dict[str, int]:
        """The states that the rule uses, and how far below the watermark they are kept."""
        raise NotImplementedError

    def take(self, event: OracleEvent, watermark: int) -> str | None:
        """Keeps and judges an event that satisfies `where`; what was done with it, None if the rule does not want it."""
        raise NotImplementedError

    def open(self) -> None:
        """Starts what the rule needs beside its states."""

    def begin(self) -> None:
        """Forgets what other versions have left, before a commit is judged."""

    def reach(self, before: int, now: int, arrival: int) -> None:
        """Does what is due when the watermark moves from `before` to `now`, after commit `arrival`."""

    def forget_expired(self, now: int) -> None:
        """Forgets what no event can change any more."""

    def forget_unused(self) -> None:
        """Forgets what the version in force does not use."""

    def event(self, event: OracleEvent, watermark: int) -> str | None:
        """Judges an event and returns what the rule did with it; None if it does not want it."""
        where = self.oracle.value(self.where, event, True)
        if where is False:
            return None
        if where is ERROR or self.oracle.key_of(self.compiled.group_by, event) is None:
            if event.time >= watermark - self.lateness:
                self.fail()
            return None
        return self.take(event, watermark) if where is True else None

    def key(self, event: OracleEvent) -> Key:
        """The event's key, if it has no error."""
        key = self.oracle.key_of(self.compiled.group_by, event)
        assert key is not None
        return key

    def own(self, key: Key) -> dict[str, Column]:
        """The values of a key, as columns of one row, by the names that alerts show."""
        return {name: single(type_, value) for (name, type_), value in zip(self.named.items(), key, strict=True)}

    def texts(self, key: Key) -> dict[str, str | None]:
        """The texts of a key, by the names that alerts show."""
        return {name: to_text(column.item(0)) for name, column in self.own(key).items()}

    def fail(self) -> None:
        """Counts one failure, while the rule is evaluated."""
        if self.evaluated:
            slot = (self.rule_id, self.version)
            self.oracle.failed[slot] = self.oracle.failed.get(slot, 0) + 1
            COVERED[f"failures: {self.spec.kind}"] += 1

    def note(self, action: str, arrival: int) -> None:
        """A row for the log beside the verdicts."""
        self.oracle.notes.append((action, self.rule_id, self.version, arrival))
        COVERED[f"notes: {action}"] += 1

    def effective(self, time: int) -> bool:
        """Returns whether what happens at `time` triggers."""
        start, end = self.spec.effective_from, self.spec.effective_until
        return (start is None or start <= time) and (end is None or time < end)

    def spoiled(self, event: OracleEvent) -> bool:
        """Returns whether a measure's FILTER has an error for the event, or its argument where the FILTER lets the event pass."""
        for measure in self.compiled.measures:
            passes = self.oracle.value(measure.feature.filter, event, True)
            if passes is ERROR or (passes is True and self.oracle.value(measure.feature.argument, event, 0) is ERROR):
                return True
            argument = self.oracle.value(measure.feature.argument, event, 0)
            COVERED["arguments with an error that a filter leaves out"] += passes is not True and argument is ERROR
        return False

    def holds(
        self, measured: Mapping[str, Column], own: Mapping[str, Column], complete: bool, time: int
    ) -> bool | None:
        """Returns whether the rule's condition holds; None for an error. time: that of the alert, for in_list."""
        if any(column.error is not None for column in measured.values()):
            return None
        try:
            for column in measured.values():
                column.item(0)
        except OverflowError:  # a time that Python cannot say
            COVERED["measures beyond the calendar"] += 1
            return None
        if self.when is None:
            return True
        columns = {**own, **measured, "window_complete": single(BOOLEAN, complete)}
        columns |= self.oracle.look_up(self.when.memberships, columns, time)
        result = outcome(self.when.evaluate(columns, 1))
        return None if result is ERROR else result is True

    def judge(
        self, about: _Subject, measured: dict[str, Column], own: Mapping[str, Column], complete: bool, arrival: int
    ) -> bool:
        """Settles a subject by its measures; whether that raised an alert."""
        holds = self.holds(measured, own, complete, about.time)
        if holds is None:
            self.fail()
            return False
        texts = {name: to_text(column.item(0)) for name, column in measured.items()}
        shown = {name: to_text(column.item(0)) for name, column in own.items()}
        return self.settle(about, holds, texts, shown, complete, arrival)

    def memory(self, about: _Subject) -> _Memory | None:
        """The rows that this version has written about a subject."""
        return self.oracle.memories.get(self._slot(about))

    def _slot(self, about: _Subject) -> tuple[str, str, Fields, int, Key, int]:
        kind = "tiles" if self.spec.kind in ("tumbling", "sliding") else self.spec.kind
        return self.rule_id, kind, self.compiled.group_by, self.version, about.key, about.identity

    def settle(
        self,
        about: _Subject,
        holds: bool,
        measures: dict[str, str | None],
        shown: Mapping[str, Any],
        complete: bool,
        arrival: int,
        evidence: Sequence[str] = (),
    ) -> bool:
        """Writes a row where the result calls for one; whether it is one that holds. shown: what a message may name."""
        memory = self.memory(about)
        held = memory is not None and memory.held
        if holds == held and (memory is None or not held or memory.measures == measures):
            return False
        if memory is None:
            memory = _Memory(self._base(about))
            self.oracle.memories[self._slot(about)] = memory
        verdict = memory.base if holds else "retracted"
        key = self.texts(about.key)
        # A retracted row may have measures that the version in force does not have.
        types = {
            measure.name: measure.type for measure in self.compiled.measures if measures.get(measure.name) is not None
        }
        typed = {**measures, **{name: from_text(type_, str(measures[name])) for name, type_ in types.items()}}
        message = self.compiled.message({**key, **shown, **typed, "window_complete": complete})
        self.oracle.alerts.append(
            (
                compute_alert_id(self.rule_id, self.version, key, about.named), memory.rows, self.rule_id, self.version,
                self.status, verdict, about.event_id, to_utc(about.time), to_utc(about.start), to_utc(about.end),
                tuple(sorted(measures.items())), complete, message, self._entities(key, shown), tuple(self.spec.tags),
                tuple(evidence), arrival,
            )
        )  # fmt: skip
        kind = "absence" if self.compiled.sequence and self.compiled.sequence.absent else self.spec.kind
        # An absence is raised once the watermark is beyond its due, a window when it is at its end.
        moment_ = about.time + (kind == "absence")
        text = json.dumps(list(key.values()), ensure_ascii=False)
        self.oracle.moments.append((moment_, self.rule_id, self.version, text))
        COVERED[f"rows: {kind} {verdict}"] += 1
        COVERED[f"rows: {kind} of a revision above 0"] += memory.rows > 0
        memory.rows, memory.held, memory.measures, memory.end = memory.rows + 1, holds, measures, about.end
        return holds

    def _entities(self, key: Mapping[str, str | None], shown: Mapping[str, Any]) -> tuple[tuple[str, str | None], ...]:
        """The fields that the alert is about, with their texts, sorted: those of the key, else those of its event."""
        names = {name.lower(): name for name in (*self.named, *self.oracle.stream.fields)}
        texts = {**{name: to_text(value) for name, value in shown.items() if name in names.values()}, **key}
        return tuple(sorted((names[each.lower()], texts[names[each.lower()]]) for each in self.spec.entities))

    def _base(self, about: _Subject) -> str:
        span, slot = self.spec.suppress, (self.rule_id, self.status == "shadow", self.compiled.group_by, about.key)
        if span is None:
            return "raised"
        if slot in self.oracle.hours and about.time <= self.oracle.hours[slot] + span:
            return "suppressed"
        self.oracle.hours[slot] = about.time
        return "raised"


class _Event(_Kind):
    """An event rule: `where` and `when` as they are written, and nothing kept."""

    def __init__(self, oracle: Oracle, compiled: CompiledRule, version: int, status: str) -> None:
        super().__init__(oracle, compiled, version, status)
        fields = oracle.stream.fields
        seen = {**fields, **self.named}
        self.conditions = [compile_expression(text, seen) for text in (self.spec.where, self.spec.when) if text]

    def widths(self) -> dict[str, int]:
        return {}

    def event(self, event: OracleEvent, watermark: int) -> str | None:
        holds: bool | None = True
        columns = {**self._read_key(event), **self.oracle.columns(event)}
        key = self.oracle.key_of(self.compiled.group_by, event)
        values = [outcome(condition.evaluate(columns, 1)) for condition in self.conditions]
        for value in [*values, ERROR if key is None else True]:
            if value is ERROR:
                if event.time >= watermark - self.lateness:
                    self.fail()
                return None
            # As in SQL, false settles it, and NULL does not.
            if value is False:
                return None
            holds = holds and value
        return self.take(event, watermark) if holds else None

    def _read_key(self, event: OracleEvent) -> dict[str, Column]:
        """The values of the key, of which some may have an error."""
        fields, columns = self.oracle.stream.fields, self.oracle.columns(event)
        listed = zip(self.named, self.compiled.group_by, strict=True)
        return {
            name: columns[sql] if sql in fields else self.oracle.expression(sql).evaluate(columns, 1)
            for name, sql in listed
        }

    def take(self, event: OracleEvent, watermark: int) -> str | None:
        if event.time < watermark - self.lateness:
            return "discarded"
        is_recorded = event.time < watermark and self.spec.late == "record"
        if not self.evaluated or not self.effective(event.time) or is_recorded:
            return "recorded"
        text = str(self.oracle.text(self.oracle.stream.event_id, event.values[self.oracle.stream.event_id]))
        about = _Subject(self.key(event), text, event.number, text, event.time, event.time, event.time)
        shown = {name: to_text(column.item(0)) for name, column in self.oracle.columns(event).items()}
        self.settle(about, True, {}, shown, True, event.commit, (text,))
        return "evaluated"


class _Lookback(_Kind):
    def widths(self) -> dict[str, int]:
        widths: dict[str, int] = {}
        for measure in self.compiled.measures:
            assert isinstance(measure.window, Lookback)
            width = measure.window.size + measure.window.resolution + measure.window.delay + self.lateness
            widths[measure.feature.feature_id] = max(width, widths.get(measure.feature.feature_id, 0))
        return widths

    def take(self, event: OracleEvent, watermark: int) -> str | None:
        if event.time < watermark - self.lateness:
            return "discarded"
        judged = self.evaluated and self.effective(event.time)
        judged = judged and not (event.time < watermark and self.spec.late == "record")
        if self.evaluated and self.spec.late == "revise":
            self._revise(event)
        if self.evaluated and not (event.time < watermark and self.spec.late == "record"):
            self._note(event)
        if judged and self.spoiled(event):
            self.fail()
        elif judged:
            self._judge(event, event.commit)
            if self.spec.late == "revise":
                self.oracle.judged[self.judges][1].append(event)
        return "evaluated" if judged else "recorded"

    def begin(self) -> None:
        mark = (self.version, self.spec.document)
        if self.spec.late == "revise" and self.oracle.judged.get(self.judges, (None,))[0] != mark:
            self.oracle.judged[self.judges] = (mark, [])

    def _revise(self, newcomer: OracleEvent) -> None:
        key = self.key(newcomer)
        again = [e for e in self.oracle.judged[self.judges][1] if self.key(e) == key and self._covers(e, newcomer.time)]
        limit = self.oracle.stream.max_revisions
        for event in sorted(again, key=lambda e: e.place)[:limit]:
            self._judge(event, newcomer.commit)
        if len(again) > limit:
            self.note("revisions_limited", newcomer.commit)

    def _covers(self, event: OracleEvent, time: int) -> bool:
        return any(first <= time <= last for first, last in (span(m, event.time) for m in self.compiled.measures))

    def _note(self, event: OracleEvent) -> None:
        """Notes what is measured of an event as it arrives."""
        measured, complete = self._measure(event)
        failed = self.spoiled(event) or any(
            outcome(column) is ERROR or is_beyond_calendar(column.type, outcome(column)) for column in measured.values()
        )
        texts = {} if failed else {name: to_text(column.item(0)) for name, column in measured.items()}
        event_id = str(event.values[self.oracle.stream.event_id])
        self.oracle.measured[self.rule_id, event_id] = None if failed else (texts, complete)

    def _measure(self, event: OracleEvent) -> tuple[dict[str, Column], bool]:
        """What the rule's windows at an event have now, and whether they are complete."""
        measured, complete = {}, True
        for measure in self.compiled.measures:
            state = self.oracle.states[measure.feature.feature_id]
            first, last = span(measure, event.time)
            complete = complete and first >= max(state.floor, state.since)
            rows = [row for row in state.of(self.key(event)) if max(first, state.floor) <= row.event.time <= last]
            measured[measure.name] = aggregate(measure, rows)
        return measured, complete

    def _judge(self, event: OracleEvent, arrival: int) -> None:
        oracle, key = self.oracle, self.key(event)
        measured, complete = self._measure(event)
        window = self.spec.window
        assert isinstance(window, Lookback)
        COVERED["verdicts: lookback with a resolution"] += any(
            m.feature.buckets is not None for m in self.compiled.measures
        )
        text = str(oracle.text(oracle.stream.event_id, event.values[oracle.stream.event_id]))
        about = _Subject(key, text, event.number, text, event.time, *bounds(window, event.time))
        alerted = self.judge(about, measured, {**self.own(key), **oracle.columns(event)}, complete, arrival)
        if alerted and self.spec.reset_on_alert:
            COVERED["resets: lookback"] += 1
            for feature in self.compiled.features:
                oracle.states[feature.feature_id].empty(key)


class _Windowed(_Kind):
    """The common part of tumbling, sliding and session rules: results of a window, not of an event."""

    def result(
        self, key: Key, start: int, end: int, rows: Mapping[str, list[_Row]], complete: bool, arrival: int
    ) -> None:
        """Judges a window. rows: by feature_id."""
        if self.evaluated and self.effective(end):
            measured = {m.name: aggregate(m, rows[m.feature.feature_id]) for m in self.compiled.measures}
            self.judge(window_subject(key, start, end), measured, self.own(key), complete, arrival)

    def retract(self, key: Key, start: int, complete: bool, arrival: int) -> None:
        """Takes back what was last said of a window that is no more."""
        memory = self.memory(window_subject(key, start, start))
        if self.evaluated and memory is not None:
            about = window_subject(key, start, memory.end)
            shown = {name: column.item(0) for name, column in self.own(key).items()}
            self.settle(about, False, memory.measures, shown, complete, arrival)


class _Tiled(_Windowed):
    @property
    def tiles(self) -> TiledWindow:
        """The rule's windows."""
        assert isinstance(self.spec.window, TiledWindow)
        return self.spec.window

    def widths(self) -> dict[str, int]:
        return {feature.feature_id: self.tiles.size + self.lateness for feature in self.compiled.features}

    def take(self, event: OracleEvent, watermark: int) -> str | None:
        starts = alive(self.tiles, event.time, watermark - self.lateness)
        if not starts:
            return "discarded"
        if self.spoiled(event):
            self.fail()
        for start in starts:
            if start + self.tiles.size <= watermark or self.spec.early:
                self._judge(self.key(event), start, event.commit)
        return "evaluated" if self.evaluated else "recorded"

    def reach(self, before: int, now: int, arrival: int) -> None:
        assert self.compiled.presence is not None
        size = self.tiles.size
        rows = self.oracle.states[self.compiled.presence.feature_id].rows
        found = [(start, row.key) for row in rows for start in alive(self.tiles, row.event.time, NEVER)]
        for start, key in sorted(unique(found), key=lambda each: each[0]):
            if before < start + size <= now:
                self._judge(key, start, arrival)

    def _judge(self, key: Key, start: int, arrival: int) -> None:
        end = start + self.tiles.size
        rows, complete = {}, True
        for feature in self.compiled.features:
            state = self.oracle.states[feature.feature_id]
            complete = complete and start >= max(state.floor, state.since)
            rows[feature.feature_id] = [r for r in state.of(key) if max(start, state.floor) <= r.event.time < end]
        self.result(key, start, end, rows, complete, arrival)


class _Sessions(_Windowed):
    @property
    def state(self) -> _State:
        """The state that the rule keeps."""
        return self.oracle.states[self.compiled.store]

    def widths(self) -> dict[str, int]:
        return {self.compiled.store: self.oracle.stream.max_session + self.lateness}

    def open(self) -> None:
        for measure in self.compiled.measures:
            self.state.starts.setdefault(measure.feature.feature_id, self.oracle.high)

    def forget_unused(self) -> None:
        used = {measure.feature.feature_id for measure in self.compiled.measures}
        self.state.starts = {name: since for name, since in self.state.starts.items() if name in used}
        for row in self.state.rows:
            row.values = {name: value for name, value in row.values.items() if name in used}

    def take(self, event: OracleEvent, watermark: int) -> str | None:
        key, features = self.key(event), {m.feature.feature_id: m.feature for m in self.compiled.measures}
        row = _Row(key, event)
        for feature in features.values():
            row.values |= self.oracle.kept(feature, event)
        old = self._sessions(self.state.of(key))
        new = self._sessions([*self.state.of(key), row])
        (mine,) = [session for session in new if row in session]
        if self._end(mine) + self.lateness <= watermark:
            return "discarded"
        self.state.rows.append(row)
        if self.spoiled(event):
            self.fail()
        starts = [session[0].event.time for session in new]
        for session in old:
            start = session[0].event.time
            if start not in starts:
                self.retract(key, start, self._complete(start), event.commit)
        for session in new:
            if session not in old and (self._end(session) <= watermark or self.spec.early):
                self._judge(session, event.commit)
        return "evaluated" if self.evaluated else "recorded"

    def reach(self, before: int, now: int, arrival: int) -> None:
        due = [session for session in self._all() if before < self._end(session) <= now]
        for session in sorted(due, key=lambda s: (self._end(s), s[0].event.time)):
            self._judge(session, arrival)
            if self.evaluated and self._end(session) < session[-1].event.time + self._gap + 1:
                self.note("session_closed", arrival)

    def forget_expired(self, now: int) -> None:
        for session in self._all():
            if self._end(session) + self.lateness <= now:
                self.state.rows = [row for row in self.state.rows if row not in session]

    @property
    def _gap(self) -> int:
        assert isinstance(self.spec.window, Session)
        return self.spec.window.gap

    def _all(self) -> list[list[_Row]]:
        keys = unique(row.key for row in self.state.rows)
        return [session for key in keys for session in self._sessions(self.state.of(key))]

    def _sessions(self, rows: list[_Row]) -> list[list[_Row]]:
        """The rows of one key, cut into sessions."""
        sessions: list[list[_Row]] = []
        for row in sorted(rows, key=lambda r: r.event.place):
            time = row.event.time
            begun = sessions[-1] if sessions else None
            near = begun is not None and time - begun[-1].event.time <= self._gap
            if begun is not None and near and time < begun[0].event.time + self.oracle.stream.max_session:
                begun.append(row)
            else:
                sessions.append([row])
        return sessions

    def _end(self, session: list[_Row]) -> int:
        longest = session[0].event.time + self.oracle.stream.max_session
        return min(session[-1].event.time + self._gap + 1, longest)

    def _complete(self, start: int) -> bool:
        since = [self.state.starts[measure.feature.feature_id] for measure in self.compiled.measures]
        return start >= max(self.state.floor, self.state.since, *since)

    def _judge(self, session: list[_Row], arrival: int) -> None:
        start = session[0].event.time
        names = {measure.feature.feature_id for measure in self.compiled.measures}
        rows = {name: [row for row in session if name in row.values] for name in names}
        self.result(session[0].key, start, self._end(session), rows, self._complete(start), arrival)


@dataclass
class _Match:
    """Events of a key taken by steps, one after another; the last list is the current step's.

    erred: whether the condition of the last step, with arrays, had an error for the event offered last. offered: all of
    these, in order; begins: what of them each step took first, once the match is complete.
    """

    rule: _Sequences
    key: Key
    taken: list[list[OracleEvent]] = field(default_factory=lambda: [[]])
    erred: bool = False
    offered: list[OracleEvent] = field(default_factory=list)
    begins: list[tuple[int, int]] = field(default_factory=list)

    def moved(self, at: int, event: OracleEvent) -> _Match:
        """With take: once, the match after a step has taken an event."""
        taken = [*self.taken, *[[] for _ in range(at + 1 - len(self.taken))]]
        return _Match(self.rule, self.key, [*taken[:at], [*taken[at], event]])

    def drop(self, gone: set[OracleEvent]) -> None:
        """Forgets events; each step then has those of its own time that satisfy it after what the others have left."""
        if self.rule.once:
            self.taken = [[event for event in events if event not in gone] for events in self.taken]
            return
        self.offered = [event for event in self.offered if event not in gone]
        ends = [*self.begins[1:], (10**30, 0)]
        self.taken = []
        for at, (begin, end) in enumerate(zip(self.begins, ends, strict=True)):
            here = [event for event in self.offered if begin <= event.place < end]
            self.taken.append([event for event in here if self._satisfies(at, event)])

    @property
    def dead(self) -> bool:
        """Whether a step has taken more than it may."""
        most = [step.step.at_most for step in self.rule.steps]
        return any(limit is not None and len(events) > limit for limit, events in zip(most, self.taken, strict=False))

    @property
    def begin(self) -> int:
        """The time of the first event taken."""
        return self.taken[0][0].time

    def offer(self, event: OracleEvent) -> bool:
        """The next step takes the event if the current one has enough; else the current one; else none."""
        steps, at = self.rule.steps, len(self.taken) - 1
        self.erred = False
        self.offered.append(event)
        if at + 1 < len(steps) and len(self.taken[at]) >= steps[at].step.at_least and self._satisfies(at + 1, event):
            self.taken.append([event])
            return True
        if self._satisfies(at, event):
            self.taken[at].append(event)
            return True
        return False

    def ends_with(self, event: OracleEvent) -> bool:
        """Whether the last step has just taken the event and has enough."""
        steps = self.rule.steps
        if len(self.taken) < len(steps) or self.dead or event not in self.taken[-1]:
            return False
        return len(self.taken[-1]) >= steps[-1].step.at_least

    def values(self) -> dict[str, Column]:
        """`name.field` and `name.count` of the steps reached."""
        columns: dict[str, Column] = {}
        for step, events in zip(self.rule.steps, self.taken, strict=False):
            columns[f"{step.step.name}.count"] = single(BIGINT, len(events))
            for name, type_ in self.rule.oracle.stream.fields.items():
                if not type_.element:
                    columns[f"{step.step.name}.{name}"] = single(array(type_), [e.values[name] for e in events])
        return columns

    def satisfied(self, step: CompiledStep, event: OracleEvent) -> Any:
        """The value of a step's condition for an event, given what was taken so far."""
        oracle = self.rule.oracle
        if self.rule.key_for(step.step.name, event) != self.key:
            return False
        # Where the part that reads the event alone does not hold, the whole does not either, and has no error of its own.
        if oracle.value(step.gate, event, True) is not True:
            return False
        if step.own:
            return oracle.value(step.condition, event, True)
        return outcome(step.condition.evaluate({**oracle.columns(event), **self.values()}, 1))

    def _satisfies(self, at: int, event: OracleEvent) -> bool:
        value = self.satisfied(self.rule.steps[at], event)
        self.erred = self.erred or (value is ERROR and at == len(self.rule.steps) - 1)
        return value is True


@dataclass
class _Wait:
    """An absence awaited since `event`, which ended `match`. pending: due is not reached yet."""

    key: Key
    event: OracleEvent
    match: _Match
    due: int
    complete: bool
    ended: bool = False
    pending: bool = True


class _Sequences(_Kind):
    def __init__(self, oracle: Oracle, compiled: CompiledRule, version: int, status: str) -> None:
        super().__init__(oracle, compiled, version, status)
        assert compiled.sequence is not None
        assert compiled.spec.sequence is not None
        self.sequence, self.within = compiled.sequence, compiled.spec.sequence.within
        self.steps = compiled.sequence.steps
        self.fixed = compiled.spec.sequence.expiry == "fixed"
        self.once = compiled.spec.sequence.take == "once"
        # By name of a step, and "" for `until`, the fields of its key, in the order of those of the rule.
        spec, names = compiled.spec.sequence, {name.lower(): name for name in oracle.stream.fields}
        written = {"": spec.until_key, **{step.name: step.key for step in spec.steps}}
        columns = {part.name.lower(): part.column for part in compiled.key}
        grouped = [columns[entry.name.lower()] for entry in compiled.spec.group_by]
        self.fields: dict[str, Fields] = {}
        for step, key in written.items():
            own = grouped if key is None else [names[name.lower()] for name in key]
            instead = dict(zip(grouped, own, strict=True))
            self.fields[step] = tuple(instead[name] for name in sorted(grouped))

    def key_for(self, step: str, event: OracleEvent) -> Key:
        """The key of an event for a step, or for `until`."""
        key = self.oracle.key_of(self.fields[step], event)
        assert key is not None
        return key

    def keys(self, event: OracleEvent) -> list[Key]:
        """The keys under which an event may take part, in the order of their texts."""
        found = unique(self.key_for(step, event) for step in self.fields)
        COVERED["events under several keys"] += len(found) > 1
        return sorted(found, key=lambda key: json.dumps(list(self.texts(key).values()), ensure_ascii=False))

    def begins(self, event: OracleEvent, key: Key) -> bool:
        """Returns whether an event satisfies step one under a key."""
        return _Match(self, key).satisfied(self.steps[0], event) is True

    def is_until(self, event: OracleEvent, key: Key) -> bool:
        """Returns whether an event satisfies `until` under a key."""
        ends = self.oracle.value(self.sequence.until, event, False) is True
        return ends and self.key_for("", event) == key

    @property
    def state(self) -> _State:
        """The state that the rule keeps."""
        return self.oracle.states[self.compiled.store]

    def widths(self) -> dict[str, int]:
        return {self.compiled.store: self.within + self.lateness}

    def take(self, event: OracleEvent, watermark: int) -> str | None:
        gates = [self.oracle.value(step.gate, event, True) for step in self.sequence.conditions]
        until = self.oracle.value(self.sequence.until, event, False)
        wanted = any(value is True for value in [*gates, until])
        if event.time < watermark - self.lateness:
            return "discarded" if wanted else None
        allowed = not (event.time < watermark and self.spec.late == "record")
        absent = self.sequence.absent
        due = event.time + (absent.step.within if absent else 0)
        judged = allowed and self.evaluated and self.effective(due)
        # It may also end waits that are due from its time on.
        ends = absent is not None and gates[-1] is True and any(map(self.effective, range(event.time, due + 1)))
        # A wait begins whatever the status, and its due decides whether it is effective.
        counts = allowed if self.sequence.absent else judged
        has_erred = False
        for key in self.keys(event):
            self.state.rows.append(_Row(key, event))
            self._end_waits(key, event)
            if self.fixed:
                match, erred = self._fixed(key, event, counts)
            elif self.once:
                match, erred = self._once(key, event) if counts else (None, False)
            else:
                match, erred = self._sliding(key, event) if counts else (None, False)
            has_erred = has_erred or erred
            if match is not None and counts:
                self._matched(key, event, match, watermark)
        if ERROR in [*gates, until] or (has_erred and judged):
            self.fail()
        is_evaluated = judged or (ends and allowed and self.evaluated)
        return ("evaluated" if is_evaluated else "recorded") if wanted else None

    def _sliding(self, key: Key, event: OracleEvent) -> tuple[_Match | None, bool]:
        """The first match that the event ends; without one, whether the earliest match had an error for the event."""
        low = max(event.time - self.within, self.state.floor)
        rows = [row.event for row in self.state.of(key) if low <= row.event.time <= event.time]
        rows.sort(key=lambda e: e.place)
        ends = [at for at, row in enumerate(rows[:-1]) if self.is_until(row, key)]
        rows = rows[ends[-1] + 1 if ends else 0 :]
        found = []
        for at, row in enumerate(rows):
            if not self.begins(row, key):
                continue
            found.append(self._matching(key, rows[at:]))
            if found[-1][0] is not None:
                COVERED["matches: from a later beginning"] += len(found) > 1
                return found[-1]
        return found[0] if found else (None, False)

    def _once(self, key: Key, event: OracleEvent) -> tuple[_Match | None, bool]:
        """The match that the event completes, after all rows of its key up to it went through the machine; or an error."""
        rows = [row.event for row in self.state.of(key) if self.state.floor <= row.event.time <= event.time]
        stages = [at for at, step in enumerate(self.steps) for _ in range(step.step.at_least)]
        waiting: list[_Match | None] = [None] * len(stages)
        completed, erred = None, False
        for row in sorted(rows, key=lambda e: e.place):
            completed, erred = None, False
            for stage in reversed(range(len(stages))):
                before = waiting[stage - 1] if stage else _Match(self, key, [])
                if before is None or (stage and before.begin < row.time - self.within):
                    continue
                value = before.satisfied(self.steps[stages[stage]], row)
                erred = erred or (value is ERROR and stages[stage] == len(self.steps) - 1)
                if value is not True:
                    continue
                if stage:
                    waiting[stage - 1] = None
                match = before.moved(stages[stage], row)
                if stage == len(stages) - 1:
                    completed = match
                else:
                    waiting[stage] = match
            if self.is_until(row, key):
                waiting = [None] * len(stages)
        COVERED["matches: once"] += completed is not None
        return completed, erred and completed is None

    def _matching(self, key: Key, events: list[OracleEvent]) -> tuple[_Match | None, bool]:
        """The match that the last of the events ends, and whether the last step's condition had an error for it."""
        match = _Match(self, key)
        for event in events:
            if match.dead:
                return None, False
            match.offer(event)
        if not match.ends_with(events[-1]):
            return None, match.erred
        match.begins = [taken[0].place for taken in match.taken]
        return match, match.erred

    def _fixed(self, key: Key, event: OracleEvent, counts: bool) -> tuple[_Match | None, bool]:
        """The same among the events of the key's match, which begins and ends by order of arrival."""
        matches, until = self.state.matches, self.is_until(event, key)
        if key in matches and event.time < matches[key][0]:
            return None, False
        if key not in matches or event.time > matches[key][0] + self.within:
            if not self.begins(event, key):
                if until:
                    matches.pop(key, None)
                return None, False
            matches[key] = (event.time, event.number)
        begin, since = matches[key]
        rows = [row.event for row in self.state.of(key) if begin <= row.event.time <= event.time]
        rows = [each for each in sorted(rows, key=lambda e: e.place) if each.number >= since]
        found = self._matching(key, rows) if counts else (None, False)
        if until:
            matches.pop(key, None)
        return found

    def members(self, key: Key) -> list[OracleEvent]:
        """The events of a key's match that may begin it."""
        begin, since = self.state.matches[key]
        events = [row.event for row in self.state.of(key) if begin <= row.event.time <= begin + self.within]
        return [e for e in events if e.number >= since and self.begins(e, key)]

    def _matched(self, key: Key, event: OracleEvent, match: _Match, watermark: int) -> None:
        complete = event.time - self.within >= max(self.state.floor, self.state.since)
        COVERED[f"matches: {len(self.steps)} steps, {'fixed' if self.fixed else 'sliding'}"] += 1
        if self.sequence.absent is None:
            if self._settle(key, event, match, event.time, True, complete, event.commit):
                self._reset(key)
            return
        wait = _Wait(key, event, match, event.time + self.sequence.absent.step.within, complete)
        wait.ended = any(self._ends(wait, row.event) for row in self.state.of(key))
        self.state.waits.append(wait)
        # That of a late event may be over when it begins.
        self.reach(NEVER, watermark, event.commit)

    def _settle(
        self, key: Key, event: OracleEvent, match: _Match, end: int, holds: bool, complete: bool, arrival: int
    ) -> bool:
        oracle = self.oracle
        ids = [
            str(oracle.text(oracle.stream.event_id, e.values[oracle.stream.event_id])) for e in (event, *_all(match))
        ]
        about = _Subject(key, ids[0], event.number, ids[0], end, event.time, end)
        if self.sequence.absent is None:
            about = _Subject(key, ids[0], event.number, ids[0], end, match.begin, end)
        # A field of the key is that of the match, whatever this event has in it.
        own = {part.column: single(part.type, v) for part, v in zip(self.compiled.key, key, strict=True)} | self.own(
            key
        )
        shown = {name: column.item(0) for name, column in {**oracle.columns(event), **match.values(), **own}.items()}
        return self.settle(about, holds, {}, shown, complete, arrival, ids[1:101])

    def _reset(self, key: Key) -> None:
        if self.spec.reset_on_alert:
            COVERED["resets: sequence"] += 1
            self.state.empty(key)

    def _ends(self, wait: _Wait, event: OracleEvent) -> bool:
        assert self.sequence.absent is not None
        if event.place <= wait.event.place or event.time > wait.due:
            return False
        return wait.match.satisfied(self.sequence.absent, event) is True

    def _end_waits(self, key: Key, event: OracleEvent) -> None:
        for wait in sorted(self.state.waits, key=lambda w: w.event.place):
            if wait.key == key and self._ends(wait, event):
                wait.ended = True
                if self.evaluated:
                    self._settle(key, wait.event, wait.match, wait.due, False, wait.complete, event.commit)

    def reach(self, before: int, now: int, arrival: int) -> None:
        reached = [wait for wait in self.state.waits if wait.pending and wait.due < now]
        for wait in sorted(reached, key=lambda w: (w.due, w.event.number)):
            wait.pending = False
            if wait.ended or not self.evaluated or not self.effective(wait.due):
                continue
            if self._settle(wait.key, wait.event, wait.match, wait.due, True, wait.complete, arrival):
                self._reset(wait.key)


_KINDS: dict[str, type[_Kind]] = {
    "event": _Event,
    "lookback": _Lookback,
    "tumbling": _Tiled,
    "sliding": _Tiled,
    "session": _Sessions,
    "sequence": _Sequences,
}


def window_subject(key: Key, start: int, end: int) -> _Subject:
    """A window as the subject of a verdict."""
    return _Subject(key, start, start, None, end, start, end)


def alive(tiles: TiledWindow, time: int, bound: int) -> list[int]:
    """Starts of the windows that cover `time` and end after `bound`, ascending."""
    last = time - (time - tiles.offset) % tiles.slide
    return [start for start in range(last, time - tiles.size, -tiles.slide) if start + tiles.size > bound][::-1]


def span(measure: CompiledMeasure, time: int) -> tuple[int, int]:
    """First and last time that a look-back measure covers."""
    assert isinstance(measure.window, Lookback)
    return bounds(measure.window, time)


def bounds(window: Lookback, time: int) -> tuple[int, int]:
    """First and last time that a look-back window covers; with a resolution the first is a multiple of it."""
    last = time - window.delay
    first = last - window.size
    return (first - first % window.resolution if window.resolution else first), last


def is_beyond_calendar(type_: DataType, value: Any) -> bool:
    """Returns whether a stored value is a time or date that Python cannot say, or an array with one."""
    if value is None or (type_.element or type_).name not in ("date", "timestamp"):
        return False
    try:
        single(type_, value).item(0)
    except OverflowError:
        return True
    return False


# NaN is no key of Python's: it does not equal itself, unless it is the same object.
_NAN = float("nan")


def one_of_equals(value: Any) -> Any:
    """0.0 for both zeros and one NaN for all: SQL takes them for equal, in keys and in extremes."""
    if not isinstance(value, float):
        return value
    return _NAN if math.isnan(value) else value + 0.0


def unique(items: Iterable[_T]) -> list[_T]:
    """Each item once, in order."""
    return list(dict.fromkeys(items))


def _all(match: _Match) -> Iterator[OracleEvent]:
    for events in match.taken:
        yield from events


def single(type_: DataType, value: Any) -> Column:
    """A column of one stored value."""
    if value is None or type_.name != "array":
        return from_values(type_, [value])
    values = np.empty(1, dtype=object)
    values[0] = value
    return Column(type_, values)


def outcome(column: Column) -> Any:
    """The stored value of a column's one row; None for NULL, ERROR for an error."""
    if column.error is not None and column.error[0]:
        return ERROR
    if column.null is not None and column.null[0]:
        return None
    value = column.values[0]
    return value.item() if isinstance(value, np.generic) else value


def aggregate(measure: CompiledMeasure, rows: list[_Row]) -> Column:
    """The measure over rows; under error where the result does not fit its type."""
    feature, type_ = measure.feature, measure.type
    ordered = sorted(rows, key=lambda row: row.event.place)
    result = _FUNCTIONS[feature.function.partition("(")[0]](
        [row.values[feature.feature_id] for row in ordered], feature
    )
    if type_.is_decimal and result is not None and abs(result) >= 10**type_.precision:
        return Column(type_, from_values(type_, [0]).values, None, np.array([True]))
    if type_.name == "bigint" and result is not None and not -(2**63) <= result < 2**63:
        return Column(type_, np.zeros(1, dtype=np.int64), None, np.array([True]))
    return single(type_, result)


def _avg(values: list[Any], feature: Feature) -> Any:
    if not values:
        return None
    argument = feature.argument_type
    assert argument is not None
    if not argument.is_decimal:
        return float(Fraction(sum(values), len(values)))
    digits = min(38, argument.scale + 4) - argument.scale
    with localcontext() as context:
        context.prec = 200
        mean = Decimal(sum(values)).scaleb(digits) / len(values)
        return int(mean.quantize(Decimal(1), ROUND_HALF_UP))


def _variance(values: list[Any], feature: Feature, spare: int) -> Fraction | None:
    if len(values) <= spare:
        return None
    assert feature.argument_type is not None
    exact = [Fraction(value, 10**feature.argument_type.scale) for value in values]
    mean = sum(exact) / len(exact)
    return Fraction(sum((value - mean) ** 2 for value in exact), len(exact) - spare)


def _rounded(variance: Fraction | None) -> float | None:
    return None if variance is None else float(variance)


def _root(variance: Fraction | None) -> float | None:
    if not variance:
        return None if variance is None else 0.0
    with localcontext() as context:
        context.prec = 120
        return float((Decimal(variance.numerator) / Decimal(variance.denominator)).sqrt())


def _percentile(values: list[Any], feature: Feature) -> float | None:
    """Spark's: between the two nearest values, by the distance to each."""
    if not values:
        return None
    assert feature.argument_type is not None
    fraction = float(feature.function.partition("(")[2].rstrip(")") or 0.5)
    unit = 10**feature.argument_type.scale
    doubles = [value if isinstance(value, float) else value / unit for value in sorted(values, key=_number)]
    place = fraction * (len(values) - 1)
    below, above = doubles[math.floor(place)], doubles[math.ceil(place)]
    if place == math.floor(place) or below == above:
        return one_of_equals(below)
    return one_of_equals((math.ceil(place) - place) * below + (place - math.floor(place)) * above)


def _mode(values: list[Any], feature: Feature) -> Any:
    found = [one_of_equals(value) for value in values]
    return min(found, key=lambda value: (-found.count(value), _number(value))) if found else None


def _number(value: Any) -> Any:
    # NaN is above all numbers, and one value.
    return (math.isnan(value), 0.0 if math.isnan(value) else value) if isinstance(value, float) else value


def _ranked(pair: tuple[Any, Any]) -> Any:
    rank, value = pair
    return _number(rank), (value is not None, _number(value))


def _distinct(values: list[Any], feature: Feature) -> int:
    # NaN is no different from NaN here, and 0.0 equals -0.0 in Python too.
    return len({"NaN" if isinstance(value, float) and math.isnan(value) else value for value in values})


_FUNCTIONS = {
    "count": lambda values, feature: len(values),
    "count_distinct": _distinct,
    "sum": lambda values, feature: sum(values) if values else None,
    "avg": _avg,
    "min": lambda values, feature: one_of_equals(min(values, key=_number)) if values else None,
    "max": lambda values, feature: one_of_equals(max(values, key=_number)) if values else None,
    "first": lambda values, feature: values[0] if values else None,
    "last": lambda values, feature: values[-1] if values else None,
    "stddev_samp": lambda values, feature: _root(_variance(values, feature, 1)),
    "stddev_pop": lambda values, feature: _root(_variance(values, feature, 0)),
    "var_samp": lambda values, feature: _rounded(_variance(values, feature, 1)),
    "var_pop": lambda values, feature: _rounded(_variance(values, feature, 0)),
    "median": _percentile,
    "percentile": _percentile,
    "mode": _mode,
    "max_by": lambda values, feature: max(values, key=_ranked)[1] if values else None,
    "min_by": lambda values, feature: min(values, key=_ranked)[1] if values else None,
    "collect_set": lambda values, feature: sorted({one_of_equals(value) for value in values}, key=_number)[:100],
}

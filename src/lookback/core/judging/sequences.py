"""Sequences: steps in order within a span of time, and the absence of what should have followed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from lookback.core.expressions.compiling import Expression
from lookback.core.judging.segment import Order, RuleRun
from lookback.core.judging.verdicts import Subject, texts_of
from lookback.core.rules.compiled import COUNT, CompiledRule, CompiledStep
from lookback.core.state.keyed import Key
from lookback.core.state.shard import ShardState
from lookback.core.streams.alerts import BY_EVENT, BY_WATERMARK
from lookback.core.streams.events import Events
from lookback.core.values.columns import Mask, from_values, to_python
from lookback.core.values.keys import Int64s, Keys
from lookback.core.values.types import BIGINT, DataType, array

# Where a row stands in (time, arrival) order: its time and its number.
Place = tuple[int, int]
_MOST_EVIDENCE = 100


class Row(NamedTuple):
    """An event that some condition may take.

    bits: the conditions that it may satisfy; values: of the fields that are kept; number: counts the rows of a key as
    they arrive.
    """

    time: int
    id: str
    bits: int
    values: list[Any]
    number: int


@dataclass(eq=False)
class Wait:
    """An absence awaited since an event completed the steps before it.

    It names the rows that the steps took by their places and keeps none of them, so that state grows with the rows alone.
    time, number: of the row that began it. since: rows with a lower number did not count for it. begins: the place of the
    first row that each step took. version: of the alert that was raised; None before the wait is over. complete: whether
    the steps could see all their events. taken: the rows themselves, per step, in state that release 0.1.0 left.
    """

    time: int
    number: int
    since: int
    begins: list[Place]
    version: int | None
    complete: bool
    taken: list[list[Row]] | None = None


@dataclass(eq=False)
class KeyState:
    """What is kept of a key.

    key: stored values of the group_by fields. rows: those that count, by place. held: those that an alert has emptied and
    that waits name, by place. next: the number of the next row; since: that of the first row that counts. match: with
    fixed expiry, the time at which the match begins and the number from which rows belong to it. pending, raised: waits,
    by place of the rows that began them.
    """

    key: list[Any]
    rows: list[Row] = field(default_factory=list)
    held: list[Row] = field(default_factory=list)
    next: int = 0
    since: int = 0
    match: tuple[int, int] | None = None
    pending: list[Wait] = field(default_factory=list)
    raised: list[Wait] = field(default_factory=list)

    @classmethod
    def of_value(cls, value: dict[str, Any]) -> KeyState:
        """What `to_value` wrote, or release 0.1.0."""
        if "next" not in value:
            return _of_release_0_1_0(value)
        kept = cls(value["key"], _rows(value["rows"]), _rows(value["held"]), value["next"], value["since"])
        kept.match = tuple(value["match"]) if value["match"] else None
        for time, number, since, begins, version, complete, taken in value["waits"]:
            places = [(at, each) for at, each in begins]
            wait = Wait(time, number, since, places, version, complete, taken and [_rows(rows) for rows in taken])
            (kept.pending if version is None else kept.raised).append(wait)
        return kept

    def to_value(self) -> dict[str, Any]:
        """Lists and numbers, as a table keeps them."""
        waits = [
            [wait.time, wait.number, wait.since, wait.begins, wait.version, wait.complete, wait.taken]
            for wait in (*self.pending, *self.raised)
        ]
        return {
            "key": self.key, "rows": self.rows, "held": self.held, "next": self.next, "since": self.since,
            "match": self.match, "waits": waits,
        }  # fmt: skip

    def members(self, within: int) -> list[Row]:
        """The rows of the match, by place."""
        if self.match is None:
            return []
        begin, since = self.match
        low, high = (bisect_left(self.rows, at, key=_time) for at in (begin, begin + within + 1))
        return [row for row in self.rows[low:high] if row.number >= since]

    def empty(self) -> None:
        """From now on only rows that arrive later count."""
        if self.pending or self.raised:
            self.held = sorted([*self.held, *self.rows], key=_place)
        self.rows, self.since, self.match = [], self.next, None

    def delete(self, time: int, event_id: str, within: int) -> None:
        """Takes an event out: it counts for no step, begins no wait and ends none from now on."""

        def left(rows: list[Row]) -> list[Row]:
            return [row for row in rows if (row.time, row.id) != (time, event_id)]

        own = {row.number for row in (*self.rows, *self.held) if (row.time, row.id) == (time, event_id)}

        def is_gone(wait: Wait) -> bool:
            named = wait.taken[-1][-1] if wait.taken else None
            is_own = wait.number in own if named is None else named.id == event_id
            return wait.time == time and is_own

        members = left(self.members(within))
        self.rows, self.held = left(self.rows), left(self.held)
        for waits in (self.pending, self.raised):
            waits[:] = [wait for wait in waits if not is_gone(wait)]
            for wait in waits:
                wait.taken = wait.taken and [left(rows) for rows in wait.taken]
        if self.match is not None:
            # The match goes on from the first row of step one that is left.
            begin = next((row.time for row in members if row.bits & 1), None)
            self.match = None if begin is None else (begin, self.match[1])

    def forget(self, oldest: int, within: int, lateness: int, wait: int) -> int | None:
        """Forgets what no event can need any more, with none to come before `oldest`; when to look again, None if it is empty."""
        self.raised = [each for each in self.raised if each.time + wait >= oldest]
        # Rows that waits name are kept as long as these.
        counted, emptied = [oldest - within], list[int]()
        for each in (*self.pending, *self.raised):
            (counted if each.since >= self.since else emptied).append(each.begins[0][0])
        self.rows = self.rows[bisect_left(self.rows, min(counted), key=_time) :]
        self.held = self.held[bisect_left(self.held, min(emptied), key=_time) :] if emptied else []
        if self.match is not None and self.match[0] + within < oldest:
            self.match = None
        if not (self.rows or self.pending or self.raised or self.match):
            return None
        wakes = [each.time + wait + 1 for each in self.pending[:1]]
        wakes += [each.time + wait + lateness + 1 for each in self.raised[:1]]
        wakes += [row.time + within + lateness + 1 for row in self.rows[-1:]]
        wakes += [self.match[0] + within + lateness + 1] if self.match else []
        return min(wakes)


def _rows(listed: list[list[Any]]) -> list[Row]:
    return [Row(*each) for each in listed]


def _time(each: Row | Wait) -> int:
    return each.time


def _place(each: Row | Wait) -> Place:
    return each.time, each.number


def _of_release_0_1_0(value: dict[str, Any]) -> KeyState:
    """Rows had no numbers; a match and each wait had rows of their own, per step."""
    match = value["match"]
    steps = match[0] if match else [[]]
    begin = steps[0][0] if steps[0] else None
    counted = Counter(map(repr, value["rows"]))
    more = [row for rows in steps for row in rows]
    # A row that also waits for what is absent was kept in both places.
    for row in more:
        counted[repr(row)] -= 1
    rows = [*more, *(row for row in value["rows"] if counted[repr(row)] > 0)]
    rows.sort(key=lambda row: (row[0], row is not begin))
    numbered = [_numbered(row, number) for number, row in enumerate(rows)]
    kept = KeyState(value["key"], numbered, next=len(rows))
    if begin is not None:
        kept.match = (begin[0], next(at for at, row in enumerate(rows) if row is begin))
    numbers = {(row.time, row.id): row.number for row in numbered}
    for time, _, row, taken, version, complete in value["waits"]:
        listed = [[_numbered(each, numbers.get((each[0], each[1]), -1)) for each in rows] for rows in taken]
        begins = [_place(rows[0]) for rows in listed if rows] or [(time, -1)]
        wait = Wait(time, numbers.get((time, row[1]), -1), 0, begins, version, complete, listed)
        if version is None or version >= 0:
            insort(kept.pending if version is None else kept.raised, wait, key=_place)
    return kept


def _numbered(row: list[Any], number: int) -> Row:
    time, event_id, bits, values = row
    return Row(time, event_id, bits, values, number)


def judge_sequences(rule_run: RuleRun) -> None:
    """Judges the events of a segment by a sequence."""
    _Judge(rule_run).run()


def delete_from_sequences(state: ShardState, rule: CompiledRule, keys: Keys, deleted: Events, mine: Mask) -> None:
    """Deleted events count for no step, begin no wait and end none from now on."""
    assert rule.spec.sequence is not None
    table = state.table(rule.store)
    for at in np.flatnonzero(mine).tolist():
        key = (int(keys.low[at]), int(keys.high[at]))
        value = table.get(key)
        if value is not None:
            kept = KeyState.of_value(value)
            kept.delete(int(deleted.times[at]), deleted.id_text(at), rule.spec.sequence.within)
            table.change(key, kept.to_value())


class _Steps:
    """The conditions of a sequence, on rows."""

    def __init__(self, rule_run: RuleRun) -> None:
        assert rule_run.rule.sequence is not None
        self.compiled = rule_run.rule.sequence
        self.steps = self.compiled.steps
        # Whether no condition reads what earlier steps took.
        self.plain = all(step.own for step in self.steps)
        self._fields = rule_run.segment.stream.fields
        self._kept = {name: at for at, name in enumerate(self.compiled.kept)}
        # The absence and `until` have the bits after those of the steps.
        self.last, self.absent, self.until = len(self.steps) - 1, len(self.steps), len(self.steps) + 1
        self.last_failed = False

    def bits(self, rule_run: RuleRun) -> tuple[Int64s, Mask]:
        """Per event the conditions that it may satisfy, and where one that reads the event alone has an error."""
        events = rule_run.events
        bits = np.zeros(len(events), dtype=np.int64)
        errors = np.zeros(len(events), dtype=bool)
        gates: list[tuple[int, Expression | None]] = [(1 << at, step.gate) for at, step in enumerate(self.steps)]
        if self.compiled.absent is not None:
            gates.append((1 << self.absent, self.compiled.absent.gate))
        if self.compiled.until is not None:
            gates.append((1 << self.until, self.compiled.until))
        for bit, gate in gates:
            if gate is None:
                bits |= bit
                continue
            value = events.value(gate)
            bits |= np.where(value.is_true(), bit, 0)
            if value.error is not None:
                errors |= value.error
        return bits, errors

    def takes(self, at: int, row: Row, taken: Sequence[Sequence[Row]]) -> bool:
        """Whether a step takes a row, after what the steps before have taken."""
        if not row.bits >> at & 1:
            return False
        step = self.steps[at]
        if step.own:
            return True
        holds, failed = self._value(step, row, taken)
        self.last_failed |= failed and at == self.last
        return holds

    def ends(self, row: Row, taken: Sequence[Sequence[Row]]) -> bool:
        """Whether a row is what was not to come."""
        absent = self.compiled.absent
        assert absent is not None
        return bool(row.bits >> self.absent & 1) and (absent.own or self._value(absent, row, taken)[0])

    def _value(self, step: CompiledStep, row: Row, taken: Sequence[Sequence[Row]]) -> tuple[bool, bool]:
        """Whether the step's condition holds, and whether it has an error."""
        columns = {}
        for name in step.condition.fields:
            value, type_ = self.value(name, row, taken)
            columns[name] = from_values(type_, [value])
        result = step.condition.evaluate(columns, 1)
        return bool(result.is_true()[0]), result.error is not None and bool(result.error[0])

    def value(self, name: str, row: Row, taken: Sequence[Sequence[Row]]) -> tuple[Any, DataType]:
        """What a name stands for: a field of the row, or an array or number of a step's rows; stored, with its type."""
        before, _, own = name.partition(".")
        if not own:
            return row.values[self._kept[name]], self._fields[name]
        rows = taken[next(at for at, step in enumerate(self.steps) if step.step.name == before)]
        if own == COUNT:
            return len(rows), BIGINT
        at = self._kept[own]
        return [each.values[at] for each in rows], array(self._fields[own])

    def values(self, names: Sequence[str], row: Row, taken: Sequence[Sequence[Row]]) -> dict[str, Any]:
        """What names in a message stand for."""
        found = {}
        for name in names:
            value, type_ = self.value(name, row, taken)
            found[name] = None if value is None else to_python(type_, value)
        return found


@dataclass
class _Match:
    """Steps taken so far. rows: per step; current: the step that is being filled; dead: it took too many."""

    rows: list[list[Row]]
    current: int = 0
    dead: bool = False

    def offer(self, steps: _Steps, row: Row) -> bool:
        """Whether a step takes the row."""
        if self.dead:
            return False
        at, listed = self.current, steps.steps
        if at < steps.last and len(self.rows[at]) >= listed[at].step.at_least and steps.takes(at + 1, row, self.rows):
            at += 1
        elif not steps.takes(at, row, self.rows):
            return False
        self.current = at
        self.rows[at].append(row)
        most = listed[at].step.at_most
        self.dead = most is not None and len(self.rows[at]) > most
        return True

    def is_complete(self, steps: _Steps) -> bool:
        """Whether the last step has enough."""
        least = steps.steps[steps.last].step.at_least
        return not self.dead and self.current == steps.last and len(self.rows[steps.last]) >= least


class _Index:
    """The places of rows by the conditions that they may satisfy: which row a step takes is looked up, not tried."""

    def __init__(self, steps: _Steps, rows: Sequence[Row]) -> None:
        self._steps = steps
        self.places: list[list[Place]] = [[] for _ in range(steps.until + 1)]
        for row in rows:
            for condition, places in enumerate(self.places):
                if row.bits >> condition & 1:
                    places.append(_place(row))

    def add(self, row: Row) -> None:
        """Adds a row."""
        for condition, places in enumerate(self.places):
            if row.bits >> condition & 1:
                insort(places, _place(row))

    def begins(self, low: Place, last: Place) -> list[Place] | None:
        """Where each step begins, from the rows in [low, last]; None if the last of them does not complete the steps.

        For steps whose conditions read the event alone. The last row may satisfy the last step.
        """
        at = bisect_left(self.places[0], low)
        found: list[Place] = []
        for number, each in enumerate(self._steps.steps):
            places, spec = self.places[number], each.step
            enough = at + spec.at_least - 1
            if enough >= len(places) or places[enough] > last:
                return None
            found.append(places[at])
            if number < self._steps.last:
                following = self.places[number + 1]
                after = bisect_right(following, places[enough])
                if after == len(following):
                    return None
                end, following_at = bisect_left(places, following[after]), after
            else:
                end, following_at = bisect_right(places, last), 0
            if spec.at_most is not None and end - at > spec.at_most:
                return None
            at = following_at
        return found


class _Judge:
    def __init__(self, rule_run: RuleRun) -> None:
        assert rule_run.rule.spec.sequence is not None
        self._rule_run, self._spec, self._steps = rule_run, rule_run.rule.spec.sequence, _Steps(rule_run)
        self._lateness = rule_run.rule.allowed_lateness
        absent = self._steps.compiled.absent
        self._wait = 0 if absent is None else absent.step.within
        self._after: list[int] = rule_run.timeline.after.tolist()
        # A `Kept` per key.
        self._table = rule_run.state.table(rule_run.rule.store)
        self._floor = rule_run.state.features[rule_run.rule.store].floor
        self._message = sorted(name for name in rule_run.rule.in_message if "." in name)
        self._plain = sorted(rule_run.rule.in_message & set(rule_run.segment.stream.fields))

    def run(self) -> None:
        rule_run = self._rule_run
        bits, errors = self._steps.bits(rule_run)
        taken = rule_run.wanted & rule_run.segment.measuring.is_in_time(rule_run.rule.allowed_lateness)
        self._judgeable = taken & ~rule_run.late if rule_run.rule.spec.late == "record" else taken
        # An absence triggers at its due: an event is judged where the wait that it may begin, or one that it may end, is
        # due in the effective range.
        times, dues = rule_run.events.times, rule_run.events.times + self._wait
        self._alerting = self._judgeable & rule_run.is_effective(dues) & rule_run.evaluated
        ending = (
            self._judgeable
            & (bits >> self._steps.absent & 1 > 0)
            & rule_run.is_effective(times, dues)
            & rule_run.evaluated
        )
        rule_run.record_judged(rule_run.wanted & (bits != 0), taken, self._alerting | ending)
        rule_run.failed |= taken & errors
        fields = [rule_run.events.columns[name].stored() for name in self._steps.compiled.kept]
        here = dict(rule_run.group_by_key(taken & (bits != 0)))
        none: Int64s = np.zeros(0, dtype=np.int64)
        for key in sorted({*here, *self._table.due(int(rule_run.timeline.after[-1]))}):
            self._follow(key, here.get(key, none), bits, fields)
        rule_run.count_failed_events(rule_run.failed)

    def _follow(self, key: Key, positions: Int64s, bits: Int64s, fields: list[list[Any]]) -> None:
        """One key through the segment."""
        rule_run = self._rule_run
        value = self._table.get(key)
        self._key, self._rank = key, 0
        self._kept = KeyState(rule_run.stored_key(int(positions[0]))) if value is None else KeyState.of_value(value)
        self._open_indexes()
        for at in positions.tolist():
            self._pass(int(rule_run.segment.watermarks[at]))
            values = [column[at] for column in fields]
            row = Row(
                int(rule_run.events.times[at]), rule_run.events.id_texts[at], int(bits[at]), values, self._kept.next
            )
            self._rank, self._kept.next = 0, self._kept.next + 1
            self._end_waits(row, at)
            insort(self._kept.rows, row, key=_place)
            self._live.add(row)
            if self._spec.expiry == "fixed":
                self._judge_fixed(row, at)
            else:
                self._judge_sliding(row, at)
        self._pass(self._after[-1])
        oldest = self._after[-1] - self._lateness
        wake = self._kept.forget(oldest, self._spec.within, self._lateness, self._wait)
        if wake is None:
            self._table.put(key, None)
        else:
            self._table.put(key, self._kept.to_value(), wake)

    def _open_indexes(self) -> None:
        """Indexes the rows that count and, with fixed expiry, those of the match."""
        self._live = _Index(self._steps, self._kept.rows)
        fixed = self._spec.expiry == "fixed"
        self._members = _Index(self._steps, self._kept.members(self._spec.within)) if fixed else self._live

    def _judge_sliding(self, row: Row, at: int) -> None:
        """An event is judged with the rows of the time before it, after the last one that satisfies `until`."""
        first = row.time - self._spec.within
        low = (first if self._floor is None else max(first, self._floor), -1)
        untils = self._live.places[self._steps.until]
        before = bisect_left(untils, _place(row)) - 1
        if before >= 0 and untils[before] >= low:
            low = (untils[before][0], untils[before][1] + 1)
        self._judge(row, at, low, self._kept.since)

    def _judge_fixed(self, row: Row, at: int) -> None:
        """An event is judged with the rows before it in the match that has begun when it arrives."""
        kept, ends = self._kept, row.bits >> self._steps.until & 1
        if kept.match is not None and row.time < kept.match[0]:
            return
        if kept.match is None or row.time > kept.match[0] + self._spec.within:
            if not row.bits & 1:
                kept.match = None if ends else kept.match
                return
            kept.match = (row.time, row.number)
            self._members = _Index(self._steps, ())
        self._members.add(row)
        begin, since = kept.match
        self._judge(row, at, (begin, -1), since)
        if ends:
            kept.match = None

    def _judge(self, row: Row, at: int, low: Place, since: int) -> None:
        """Whether an event completes the steps, with the rows from `low` up to itself and from the number `since` on."""
        steps = self._steps
        if not (row.bits >> steps.last & 1 and self._judgeable[at]):
            return
        if steps.plain:
            begins = self._members.begins(low, _place(row))
            if begins is not None:
                self._found(row, at, Wait(row.time, row.number, since, begins, None, False))
            return
        match, rows = _Match([[] for _ in steps.steps]), self._kept.rows
        for each in rows[bisect_left(rows, low, key=_place) : bisect_left(rows, _place(row), key=_place)]:
            if each.number >= since:
                match.offer(steps, each)
            if match.dead:
                return
        steps.last_failed = False
        is_taken = match.offer(steps, row)
        if steps.last_failed and self._alerting[at]:
            self._rule_run.failed[at] = True
        if is_taken and match.is_complete(steps):
            begins = [_place(taken[0]) for taken in match.rows]
            self._found(row, at, Wait(row.time, row.number, since, begins, None, False), match.rows)

    def _found(self, row: Row, at: int, found: Wait, taken: list[list[Row]] | None = None) -> None:
        """An event completes the steps: an alert, or the beginning of a wait."""
        rule_run = self._rule_run
        bound = rule_run.state.features[rule_run.rule.store].complete_from
        found.complete = bound is None or row.time - self._spec.within >= bound
        if self._steps.compiled.absent is not None:
            if not self._has_ended(found):
                insort(self._kept.pending, found, key=_place)
                if row.time + self._wait < rule_run.segment.watermarks[at]:
                    # It began so late that it is over at once.
                    self._kept.pending.remove(found)
                    self._over(found, (int(rule_run.segment.places[at]), BY_EVENT, at, self._rank))
            return
        if not self._alerting[at]:
            return
        taken = self._taken(found) if taken is None else taken
        subject = Subject(
            rule_run.key_texts(at), self._key, row.id, row.time, found.begins[0][0], row.time, _evidence(taken)
        )
        values = {name: rule_run.events.columns[name].item(at) for name in rule_run.rule.fields}
        values |= self._steps.values(self._message, row, taken)
        verdict, arrival = rule_run.writer.decide_first(subject), int(rule_run.events.commits[at])
        order = (int(rule_run.segment.places[at]), BY_EVENT, at, 0)
        rule_run.add_alert(order, rule_run.writer.make_alert(subject, verdict, 0, arrival, {}, found.complete, values))
        self._empty()

    def _taken(self, wait: Wait) -> list[list[Row]]:
        """The rows that each step took; no more than evidence needs where nothing else reads them."""
        if wait.taken is not None:
            return wait.taken
        absent = self._steps.compiled.absent
        enough = self._steps.plain and not self._message and (absent is None or absent.own)
        rows = self._kept.rows if wait.since >= self._kept.since else self._kept.held
        ends = [*wait.begins[1:], (wait.time, wait.number + 1)]
        taken: list[list[Row]] = []
        left = _MOST_EVIDENCE if enough else len(rows)
        for step, (begin, end) in enumerate(zip(wait.begins, ends, strict=True)):
            listed: list[Row] = []
            for at in range(bisect_left(rows, begin, key=_place), len(rows)):
                row = rows[at]
                if _place(row) >= end or not left:
                    break
                if wait.since <= row.number <= wait.number and self._steps.takes(step, row, taken):
                    listed.append(row)
                    left -= 1
            taken.append(listed)
        return taken

    def _own_row(self, wait: Wait) -> Row:
        """The row that began a wait."""
        if wait.taken is not None:
            return wait.taken[-1][-1]
        rows = self._kept.rows if wait.since >= self._kept.since else self._kept.held
        return rows[bisect_left(rows, _place(wait), key=_place)]

    def _empty(self) -> None:
        """An alert of a rule that resets: what has arrived counts no more."""
        if self._rule_run.rule.spec.reset_on_alert:
            self._kept.empty()
            self._open_indexes()

    def _has_ended(self, wait: Wait) -> bool:
        """Whether an event that was not to come is there already."""
        places, rows = self._live.places[self._steps.absent], self._kept.rows
        absent = self._steps.compiled.absent
        assert absent is not None
        at = bisect_right(places, _place(wait))
        there = [each for each in places[at : at + 1] if each[0] <= wait.time + self._wait]
        if not there or absent.own:
            return bool(there)
        taken, due = self._taken(wait), (wait.time + self._wait + 1, -1)
        listed = places[at : bisect_left(places, due)]
        return any(self._steps.ends(rows[bisect_left(rows, each, key=_place)], taken) for each in listed)

    def _end_waits(self, row: Row, at: int) -> None:
        """An event that was not to come ends waits, and takes back what was raised already."""
        absent, rule_run = self._steps.compiled.absent, self._rule_run
        if absent is None or not row.bits >> self._steps.absent & 1:
            return
        for waits in (self._kept.raised, self._kept.pending):
            low = bisect_left(waits, row.time - self._wait, key=_time)
            high = bisect_right(waits, row.time, key=_time)
            ended = [each for each in waits[low:high] if absent.own or self._steps.ends(row, self._taken(each))]
            for wait in ended:
                if wait.version == rule_run.entry.version and rule_run.evaluated:
                    order = (int(rule_run.segment.places[at]), BY_EVENT, at, self._rank)
                    self._say_wait(wait, "retracted", 1, order)
            gone = set(map(id, ended))
            waits[low:high] = [each for each in waits[low:high] if id(each) not in gone]

    def _pass(self, watermark: int) -> None:
        """The watermark moves: waits that were not ended are over."""
        over = bisect_left(self._kept.pending, watermark - self._wait, key=_time)
        waits = self._kept.pending[:over]
        del self._kept.pending[:over]
        for wait in waits:
            due = wait.time + self._wait
            # The watermark that raises it is the first beyond its due.
            self._over(wait, (bisect_right(self._after, due), BY_WATERMARK, due + 1, self._rank))

    def _over(self, wait: Wait, order: Order) -> None:
        """What was not to come did not come."""
        rule_run = self._rule_run
        if rule_run.evaluated and rule_run.is_effective(np.array([wait.time + self._wait]))[0]:
            wait.version = rule_run.entry.version
            insort(self._kept.raised, wait, key=_place)
            self._say_wait(wait, None, 0, order)
            self._empty()

    def _say_wait(self, wait: Wait, verdict: str | None, revision: int, order: Order) -> None:
        """A row of a wait; verdict None: the first one."""
        rule_run, due, row, taken = self._rule_run, wait.time + self._wait, self._own_row(wait), self._taken(wait)
        self._rank += 1
        key = texts_of(rule_run.key_values(self._kept.key))
        subject = Subject(key, self._key, row.id, due, wait.time, due, _evidence(taken))
        if verdict is None:
            verdict = rule_run.writer.decide_first(subject)
        values = self._steps.values([*self._message, *self._plain], row, taken)
        arrival = int(rule_run.timeline.commits[order[0]])
        rule_run.add_alert(
            order, rule_run.writer.make_alert(subject, verdict, revision, arrival, {}, wait.complete, values)
        )


def _evidence(taken: Sequence[Sequence[Row]]) -> list[str]:
    """The ids of the first rows that the steps took."""
    return [row.id for rows in taken for row in rows][:_MOST_EVIDENCE]

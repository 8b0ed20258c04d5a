"""Sequences: steps in order within a span of time, and the absence of what should have followed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lookback.core.alerts import BY_EVENT, BY_WATERMARK
from lookback.core.columns import Mask, from_values, to_python
from lookback.core.compiled import COUNT, CompiledRule, CompiledStep
from lookback.core.events import Events
from lookback.core.expressions import Expression
from lookback.core.keyed import NEVER_DUE, Key
from lookback.core.keys import Int64s, Keys
from lookback.core.state import ShardState
from lookback.core.stretch import Case, Order
from lookback.core.types import BIGINT, DataType, array
from lookback.core.verdicts import Subject, texts_of

# An event that some condition may take: [time, id as text, bits of the conditions that it may satisfy, values of the
# fields that are kept].
_Row = list[Any]
_MOST_EVIDENCE = 100


def judge_sequences(case: Case) -> None:
    """Judges the events of a stretch by a sequence."""
    _Judge(case).run()


def delete_from_sequences(state: ShardState, rule: CompiledRule, keys: Keys, deleted: Events, mine: Mask) -> None:
    """Deleted events count for no step, begin no wait and end none from now on."""
    table = state.table(rule.store)
    for at in np.flatnonzero(mine).tolist():
        key = (int(keys.low[at]), int(keys.high[at]))
        value = table.get(key)
        if value is None:
            continue
        same = [int(deleted.times[at]), deleted.id_text(at)]

        def left(rows: list[_Row], same: list[Any] = same) -> list[_Row]:
            return [row for row in rows if row[:2] != same]

        waits = [[*wait[:3], [left(rows) for rows in wait[3]], *wait[4:]] for wait in value["waits"] if left([wait[2]])]
        match = value["match"]
        if match is not None:
            taken = [left(rows) for rows in match[0]]
            match = [taken, match[1], _is_dead(rule, taken)] if taken[0] else None
        table.change(key, {**value, "rows": left(value["rows"]), "waits": waits, "match": match})


def _is_dead(rule: CompiledRule, taken: Sequence[Sequence[_Row]]) -> bool:
    """Whether a step has taken more than it may."""
    assert rule.sequence is not None
    most = [step.step.at_most for step in rule.sequence.steps]
    return any(limit is not None and len(rows) > limit for limit, rows in zip(most, taken, strict=True))


class _Steps:
    """The conditions of a sequence, on rows."""

    def __init__(self, case: Case) -> None:
        assert case.rule.sequence is not None
        self.compiled = case.rule.sequence
        self.steps = self.compiled.steps
        self._fields = case.stretch.stream.fields
        self._kept = {name: at for at, name in enumerate(self.compiled.kept)}
        # The absence and `until` have the bits after those of the steps.
        self.absent_bit = 1 << len(self.steps)
        self.until_bit = 1 << (len(self.steps) + 1)
        self.last_failed = False

    def bits(self, case: Case) -> tuple[Int64s, Mask]:
        """Per event the conditions that it may satisfy, and where one that reads the event alone has an error."""
        events = case.events
        bits = np.zeros(len(events), dtype=np.int64)
        errors = np.zeros(len(events), dtype=bool)
        gates: list[tuple[int, Expression | None]] = [(1 << at, step.gate) for at, step in enumerate(self.steps)]
        if self.compiled.absent is not None:
            gates.append((self.absent_bit, self.compiled.absent.gate))
        if self.compiled.until is not None:
            gates.append((self.until_bit, self.compiled.until))
        for bit, gate in gates:
            if gate is None:
                bits |= bit
                continue
            value = events.value(gate)
            bits |= np.where(value.is_true(), bit, 0)
            if value.error is not None:
                errors |= value.error
        return bits, errors

    def takes(self, at: int, row: _Row, taken: Sequence[Sequence[_Row]]) -> bool:
        """Whether a step takes a row, after what the steps before have taken."""
        if not row[2] >> at & 1:
            return False
        step = self.steps[at]
        if step.own:
            return True
        holds, failed = self._value(step, row, taken)
        self.last_failed |= failed and at == len(self.steps) - 1
        return holds

    def ends(self, row: _Row, taken: Sequence[Sequence[_Row]]) -> bool:
        """Whether a row is what was not to come."""
        absent = self.compiled.absent
        assert absent is not None
        return bool(row[2] & self.absent_bit) and (absent.own or self._value(absent, row, taken)[0])

    def _value(self, step: CompiledStep, row: _Row, taken: Sequence[Sequence[_Row]]) -> tuple[bool, bool]:
        """Whether the step's condition holds, and whether it has an error."""
        columns = {}
        for name in step.condition.fields:
            value, type_ = self.value(name, row, taken)
            columns[name] = from_values(type_, [value])
        result = step.condition.evaluate(columns, 1)
        return bool(result.is_true()[0]), result.error is not None and bool(result.error[0])

    def value(self, name: str, row: _Row, taken: Sequence[Sequence[_Row]]) -> tuple[Any, DataType]:
        """What a name stands for: a field of the row, or an array or number of a step's rows; stored, with its type."""
        before, _, own = name.partition(".")
        if not own:
            return row[3][self._kept[name]], self._fields[name]
        rows = taken[next(at for at, step in enumerate(self.steps) if step.step.name == before)]
        if own == COUNT:
            return len(rows), BIGINT
        at = self._kept[own]
        return [each[3][at] for each in rows], array(self._fields[own])

    def values(self, names: Sequence[str], row: _Row, taken: Sequence[Sequence[_Row]]) -> dict[str, Any]:
        """What names in a message stand for."""
        found = {}
        for name in names:
            value, type_ = self.value(name, row, taken)
            found[name] = None if value is None else to_python(type_, value)
        return found


@dataclass
class _Match:
    """Steps taken so far. rows: per step; current: the step that is being filled; dead: it took too many."""

    rows: list[list[_Row]]
    current: int = 0
    dead: bool = False

    def offer(self, steps: _Steps, row: _Row) -> bool:
        """Whether a step takes the row."""
        if self.dead:
            return False
        at, listed = self.current, steps.steps
        if (
            at + 1 < len(listed)
            and len(self.rows[at]) >= listed[at].step.at_least
            and steps.takes(at + 1, row, self.rows)
        ):
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
        last = len(steps.steps) - 1
        return not self.dead and self.current == last and len(self.rows[last]) >= steps.steps[last].step.at_least

    def evidence(self) -> list[str]:
        """The ids of the rows in the order in which they were taken."""
        return [row[1] for rows in self.rows for row in rows][:_MOST_EVIDENCE]

    @property
    def begin(self) -> int:
        """Time of the first row."""
        return int(self.rows[0][0][0])


class _Judge:
    def __init__(self, case: Case) -> None:
        assert case.rule.rule.sequence is not None
        self._case, self._spec, self._steps = case, case.rule.rule.sequence, _Steps(case)
        self._lateness = case.rule.allowed_lateness
        self._after: list[int] = case.timeline.after.tolist()
        # Per key {"key": stored values of the group_by fields, "rows": [...], "match": [rows per step, current, dead] or
        # None, "waits": [[time, due, row, rows per step, version of the alert that was raised (None before it is due, -1 for
        # none), whether the window was complete] ...]}.
        self._table = case.state.table(case.rule.store)
        self._floor = case.state.features[case.rule.store].floor
        self._message = sorted(name for name in case.rule.in_message if "." in name)
        self._plain = sorted(case.rule.in_message & set(case.stretch.stream.fields))

    def run(self) -> None:
        case = self._case
        bits, errors = self._steps.bits(case)
        taken = case.wanted & case.stretch.measuring.taken(case.rule.allowed_lateness)
        self._judgeable = taken & ~case.late if case.rule.rule.late == "record" else taken
        self._alerting = self._judgeable & case.effective(case.events.times)
        if not case.evaluated:
            self._alerting = np.zeros(len(taken), dtype=bool)
        case.note_taken(case.wanted & (bits != 0), taken, self._alerting)
        case.failed |= taken & errors
        fields = [case.events.columns[name].stored() for name in self._steps.compiled.kept]
        here = dict(case.by_key(taken & (bits != 0)))
        none: Int64s = np.zeros(0, dtype=np.int64)
        for key in sorted({*here, *self._table.due(int(case.timeline.after[-1]))}):
            self._follow(key, here.get(key, none), bits, fields)
        case.fail_events(case.failed)

    def _follow(self, key: Key, positions: Int64s, bits: Int64s, fields: list[list[Any]]) -> None:
        """One key through the stretch."""
        case = self._case
        value = self._table.get(key)
        if value is None:
            value = {"key": case.stored_key(int(positions[0])), "rows": [], "match": None, "waits": []}
        value["times"] = [row[0] for row in value["rows"]]
        for at in positions.tolist():
            self._pass(key, value, int(case.stretch.watermarks[at]))
            time = int(case.events.times[at])
            row: _Row = [time, case.events.id_texts[at], int(bits[at]), [column[at] for column in fields]]
            self._end_waits(key, value, row, at)
            if self._spec.expiry == "fixed":
                self._fixed(key, value, row, at)
            else:
                self._sliding(key, value, row, at)
        self._pass(key, value, self._after[-1])
        self._keep(key, value, self._after[-1])

    def _sliding(self, key: Key, value: dict[str, Any], row: _Row, at: int) -> None:
        rows, times, steps = value["rows"], value["times"], self._steps
        place = bisect_right(times, row[0])
        rows.insert(place, row)
        times.insert(place, row[0])
        last = len(steps.steps) - 1
        if not (row[2] >> last & 1 and self._judgeable[at]):
            return
        low = bisect_left(times, self._first(row[0]), 0, place)
        for before in range(place - 1, low - 1, -1):
            if rows[before][2] & steps.until_bit:
                low = before + 1
                break
        match = _Match([[] for _ in steps.steps])
        for each in rows[low:place]:
            match.offer(steps, each)
            if match.dead:
                return
        steps.last_failed = False
        is_taken = match.offer(steps, row)
        if steps.last_failed and self._alerting[at]:
            self._case.failed[at] = True
        if is_taken and match.is_complete(steps):
            self._found(key, value, match, row, at, place)

    def _fixed(self, key: Key, value: dict[str, Any], row: _Row, at: int) -> None:
        steps = self._steps
        place = bisect_right(value["times"], row[0])
        if row[2] & steps.absent_bit and steps.compiled.absent is not None:
            value["rows"].insert(place, row)
            value["times"].insert(place, row[0])
        match = None if value["match"] is None else _Match(*value["match"])
        if match is not None and row[0] < match.begin:
            return
        if match is None or row[0] > match.begin + self._spec.within:
            if not steps.takes(0, row, [[] for _ in steps.steps]):
                if match is not None and row[2] & steps.until_bit:
                    value["match"] = None
                return
            match = _Match([[] for _ in steps.steps])
        steps.last_failed = False
        is_taken = match.offer(steps, row)
        if steps.last_failed and self._alerting[at]:
            self._case.failed[at] = True
        value["match"] = [match.rows, match.current, match.dead] if match.rows[0] else None
        if is_taken and match.is_complete(steps) and self._judgeable[at]:
            self._found(key, value, match, row, at, place)
        if row[2] & steps.until_bit:
            value["match"] = None

    def _first(self, time: int) -> int:
        """The earliest time that counts for an event at `time`."""
        first = time - self._spec.within
        return first if self._floor is None else max(first, self._floor)

    def _found(self, key: Key, value: dict[str, Any], match: _Match, row: _Row, at: int, place: int) -> None:
        """An event completes the steps: an alert, or the beginning of a wait."""
        case, absent = self._case, self._steps.compiled.absent
        bound = case.state.features[case.rule.store].complete_from
        complete = bound is None or row[0] - self._spec.within >= bound
        if absent is not None:
            due = row[0] + absent.step.within
            later = value["rows"][place:] if self._spec.expiry == "fixed" else value["rows"][place + 1 :]
            if self._spec.expiry == "fixed":
                later = [each for each in later if each is not row]
            if not any(each[0] <= due and self._steps.ends(each, match.rows) for each in later):
                taken = [list(rows) for rows in match.rows]
                wait = [row[0], due, row, taken, None, complete]
                value["waits"].append(wait)
                if due < case.stretch.watermarks[at]:
                    # It began so late that it is over at once.
                    self._over(key, value, wait, (int(case.stretch.places[at]), BY_EVENT, at, len(value["waits"])))
            return
        if not self._alerting[at]:
            return
        subject = Subject(case.key_texts(at), key, row[1], row[0], match.begin, row[0], match.evidence())
        values = {name: case.events.columns[name].item(at) for name in case.rule.fields}
        values |= self._steps.values(self._message, row, match.rows)
        verdict, arrival = case.voice.first(subject), int(case.events.commits[at])
        order = (int(case.stretch.places[at]), BY_EVENT, at, 0)
        case.say(order, case.voice.row(subject, verdict, 0, arrival, {}, complete, values))
        self._empty(value)

    def _empty(self, value: dict[str, Any]) -> None:
        """An alert of a rule that resets: what has arrived counts no more."""
        if self._case.rule.rule.reset_on_alert:
            value.update(rows=[], times=[], match=None)

    def _end_waits(self, key: Key, value: dict[str, Any], row: _Row, at: int) -> None:
        """An event that was not to come ends waits, and takes back what was raised already."""
        if self._steps.compiled.absent is None or not row[2] & self._steps.absent_bit:
            return
        left = []
        for rank, wait in enumerate(value["waits"]):
            if not (wait[0] <= row[0] <= wait[1] and self._steps.ends(row, wait[3])):
                left.append(wait)
            elif wait[4] == self._case.entry.version and self._case.evaluated:
                order = (int(self._case.stretch.places[at]), BY_EVENT, at, rank)
                self._say_wait(key, value, wait, "retracted", 1, order)
        value["waits"] = left

    def _pass(self, key: Key, value: dict[str, Any], watermark: int) -> None:
        """The watermark moves: waits that were not ended are over."""
        over = [wait for wait in value["waits"] if wait[4] is None and wait[1] < watermark]
        for rank, wait in sorted(enumerate(over), key=lambda each: (each[1][1], each[0])):
            place = bisect_right(self._after, wait[1])
            # The watermark that raises it is the first beyond its due.
            self._over(key, value, wait, (place, BY_WATERMARK, wait[1] + 1, rank))

    def _over(self, key: Key, value: dict[str, Any], wait: list[Any], order: Order) -> None:
        """What was not to come did not come."""
        case = self._case
        wait[4] = -1
        if case.evaluated and case.effective(np.array([wait[1]]))[0]:
            wait[4] = case.entry.version
            self._say_wait(key, value, wait, None, 0, order)
            self._empty(value)

    def _say_wait(
        self, key: Key, value: dict[str, Any], wait: list[Any], verdict: str | None, revision: int, order: Order
    ) -> None:
        """A row of a wait; verdict None: the first one."""
        case = self._case
        time, due, row, taken, _, complete = wait
        match = _Match(taken)
        subject = Subject(texts_of(case.key_values(value["key"])), key, row[1], due, time, due, match.evidence())
        if verdict is None:
            verdict = case.voice.first(subject)
        values = self._steps.values([*self._message, *self._plain], row, taken)
        arrival = int(case.timeline.commits[order[0]])
        case.say(order, case.voice.row(subject, verdict, revision, arrival, {}, complete, values))

    def _keep(self, key: Key, value: dict[str, Any], watermark: int) -> None:
        """Forgets what no event can need any more; one that is taken is not older than the lateness."""
        oldest = watermark - self._lateness
        rows = [row for row in value["rows"] if row[0] >= oldest - self._spec.within]
        waits = [wait for wait in value["waits"] if wait[4] is None or (wait[4] >= 0 and wait[1] >= oldest)]
        match = value["match"]
        if match is not None and match[0][0][0][0] + self._spec.within < oldest:
            match = None
        if not (rows or waits or match):
            self._table.put(key, None)
            return
        wakes = [wait[1] + 1 + (self._lateness if wait[4] is not None else 0) for wait in waits]
        if rows:
            wakes.append(rows[-1][0] + self._spec.within + self._lateness + 1)
        if match is not None:
            wakes.append(match[0][0][0][0] + self._spec.within + self._lateness + 1)
        kept = {"key": value["key"], "rows": rows, "match": match, "waits": waits}
        self._table.put(key, kept, min(wakes, default=NEVER_DUE))

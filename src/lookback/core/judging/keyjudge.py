"""Judges one key of a sequence: its events in order of arrival, then the watermark after them.

Steps a, then b within 10 minutes, with reset_on_alert:

    minute       0    1    2    3    4
    row          a    a    b    b    b
    answer                 0    0    0     settled beforehand: all match from 0 on
    alert                  !               resets the key: a, a and b no longer count
    asked again                 -    -     nothing completes the steps, as no a has arrived since

Answers are settled for many rows at once, so a key asks for the next few rows together (`Question`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Generator, Iterator, Sequence
from itertools import compress, islice
from typing import TypeAlias

import numpy as np

from lookback.core.judging.keyedbatch import Answer, Arrival
from lookback.core.judging.keystates import FixedMatch, KeyState, Wait, time_of
from lookback.core.judging.once import list_stages
from lookback.core.judging.rulerun import RuleRun
from lookback.core.judging.segment import Order
from lookback.core.judging.steps import Index, LinkedRows, LinkedStep, Steps, Taken
from lookback.core.judging.taken import Row, RowRange, SortKey, TakenRows, sort_key
from lookback.core.judging.verdicts import Subject
from lookback.core.state.keyed import Key
from lookback.core.values.columns import Mask, to_texts
from lookback.core.values.times import NEVER

# How many results of linked steps, whose conditions read earlier steps, are cached for a key.
_MAX_LINKED = 64
# How many rows a key asks for after an alert has reset it; the number doubles until the next alert.
_MIN_ASKED = 4
# Rows that may complete the steps: their positions among all rows, and which rows count for each (see `Candidates`).
Question: TypeAlias = list[tuple[int, int, int]]
# Answers by the position of the row; rows without one do not complete the steps.
Answers: TypeAlias = dict[int, Answer]
Judging: TypeAlias = Generator[Question, Answers, None]


class SequenceRun:
    """The parts that the keys of a segment have in common.

    Attributes:
        absent: The step that waits for an absent event; None for none.
        is_fixed: Whether matches have fixed expiry.
        is_once: Whether one partial match waits at each stage (`take: once`).
        wait: How long to wait for it.
        floor: The time below which no row counts.
        complete_from: See `RuleRun`.
        alerting: Marks the events that may raise alerts.
        failing: Marks those of them whose errors are not counted yet.
        step_names: The names in the message that refer to earlier steps.
        field_names: The names in the message that refer to the event itself.
        shown_fields: Each of these with the field whose value it shows.
    """

    def __init__(self, rule_run: RuleRun) -> None:
        assert rule_run.spec.sequence is not None
        self.rule_run, self.spec, self.steps = rule_run, rule_run.spec.sequence, Steps(rule_run)
        self.absent = self.steps.compiled.absent
        self.is_fixed, self.is_once = self.spec.expiry == "fixed", self.spec.take == "once"
        self.wait = 0 if self.absent is None else self.absent.step.within
        floor = rule_run.state.features[rule_run.rule.store].floor
        self.floor = NEVER if floor is None else floor
        self.complete_from, self.resets = rule_run.complete_from, rule_run.spec.reset_on_alert
        self.alerting: Mask = np.zeros(len(rule_run.events), dtype=bool)
        self.failing: Mask = self.alerting
        # An event that completes the steps has the key of the last one.
        self.last_key = self.steps.compiled.key_of(self.steps.last)
        self.step_names = sorted(
            name for name in rule_run.rule.message_names if self.steps.compiled.split_name(name)[0]
        )
        self.field_names = sorted(rule_run.rule.shown_names & set(rule_run.stream.fields))
        # A field of group_by shows the key of the match, whatever the event itself has in it.
        own_fields = dict(zip(rule_run.rule.group_by, self.last_key, strict=True))
        self.shown_fields = {name: own_fields.get(name, name) for name in self.field_names}


class KeyJudge:
    """Judges the events of one key in a segment."""

    def __init__(self, common: SequenceRun, key: Key, state: KeyState) -> None:
        self._common, self._rule_run, self._spec, self._steps = common, common.rule_run, common.spec, common.steps
        self._key, self._state, self._rank = key, state, 0
        self._absent, self._wait = common.absent, common.wait
        self._key_texts: dict[str, str | None] | None = None
        # The latest time of a row that an alert has removed.
        self._emptied = NEVER
        # The answers to the last question, up to which arrival it asked, and for how many rows the next one asks.
        self._answers: Answers = {}
        self._asked, self._ahead = 0, _MIN_ASKED
        # The evidence of the last alert, and the first rows that its steps took.
        self._evidence: list[str] = []
        self._evidence_begins: list[list[Row]] = []
        # The rows that linked steps took, by the first rows of the steps up to each.
        self._linked: dict[tuple[SortKey, ...], LinkedStep] = {}
        self._index_rows()

    def run(self, arrivals: Sequence[Arrival]) -> Judging:
        """Judges the events of the key."""
        common, rule_run, state = self._common, self._rule_run, self._state
        for number, (row, at, place, may_complete, settled) in enumerate(arrivals):
            if self._absent is not None:
                self._pass_time(int(rule_run.watermarks[at]))
                self._rank = 0
                self._end_waits(row, at)
            state.next = row.number + 1
            self._add_row(row)
            match, following = self._follow(state.match, row) if common.is_fixed else (None, None)
            state.match, is_judged = match or following, may_complete and (match is not None or not common.is_fixed)
            answer = settled if is_judged else None
            if is_judged and (common.is_fixed or (self._is_reset(row) and not self._is_after_reset(row, settled))):
                if number >= self._asked:
                    self._answers = yield self._ask(arrivals, number)
                answer = self._answers.get(place)
            if answer is not None:
                self._conclude(row, at, answer)
            # An alert may have ended the match.
            state.match = following if state.match is match else state.match
        if self._absent is not None:
            self._pass_time(rule_run.timeline.end)

    def _follow(self, match: FixedMatch | None, row: Row) -> tuple[FixedMatch | None, FixedMatch | None]:
        """Returns the match that an arriving row belongs to, and the one that is open after it; None for none."""
        is_until = row.bits >> self._steps.until & 1 > 0
        if match is not None and row.time < match.begin:
            return None, match
        if match is None or row.time > match.begin + self._spec.within:
            if not row.bits & 1:
                return None, None if is_until else match
            match = FixedMatch(row.time, row.number)
        return match, None if is_until else match

    def _is_reset(self, row: Row) -> bool:
        """Returns whether an alert has removed a row that may have counted for this one."""
        return row.time - self._spec.within <= self._emptied

    def _is_after_reset(self, row: Row, answer: Answer | None) -> bool:
        """Returns whether a match, and all rows that count for an event, are later than those that an alert removed."""
        if answer is None or answer.begins is None or answer.begins[0][0] <= self._emptied:
            return False
        rows = self._state.rows
        return rows[bisect_left(rows, row.time - self._spec.within, key=time_of)].time > self._emptied

    def _ask(self, arrivals: Sequence[Arrival], number: int) -> Question:
        """Asks for an arrival and the next ones, assuming that no alert resets the key."""
        question: Question = []
        common, match, since, begin = self._common, self._state.match, self._state.since, self._common.floor
        most = self._ahead if common.resets else len(arrivals)
        while number < len(arrivals) and len(question) < most:
            row, _, place, may_complete, _ = arrivals[number]
            if common.is_fixed:
                own, match = self._follow(match, row)
                may_complete = may_complete and own is not None
                since, begin = (0, NEVER) if own is None else (own.since, own.begin)
            if may_complete and (common.is_fixed or self._is_reset(row)):
                question.append((place, since, begin))
            number += 1
        self._asked, self._ahead = number, 2 * self._ahead
        return question

    def _conclude(self, row: Row, at: int, answer: Answer) -> None:
        """Writes the alert of an event that completes the steps, or starts a wait, or counts an error."""
        common = self._common
        if answer.has_failed and common.failing[at]:
            self._rule_run.failed[at] = True
        if answer.begins is None:
            return
        since = self._state.since if self._state.match is None else self._state.match.since
        is_complete = common.complete_from is None or row.time - self._spec.within >= common.complete_from
        wait = Wait(row.time, row.number, since, answer.begins, None, is_complete)
        if self._absent is not None:
            self._begin_wait(wait, at)
        elif common.alerting[at]:
            self._write_alert(row, at, wait)
            self._reset_rows()

    def _add_row(self, row: Row) -> None:
        rows = self._state.rows
        self._live.add(row)
        # Its number is the highest.
        if not rows or rows[-1].time <= row.time:
            rows.append(row)
            return
        insort(rows, row, key=sort_key)
        self._evidence, self._linked = [], {}
        if self._late is not None:
            insort(self._late, row.sort_key)

    def _index_rows(self) -> None:
        """Indexes the rows that count."""
        self._evidence, self._linked = [], {}
        # The sort keys of rows that arrived after a row with a later time; None until needed.
        self._late: list[SortKey] | None = None
        self._live = Index(self._steps, self._state.rows)

    def _write_alert(self, row: Row, at: int, match: Wait) -> None:
        rule_run = self._rule_run
        # With fixed expiry, a row that arrived before the match began does not count.
        taken = self._read_taken(match) if self._common.is_fixed else self._list_taken(match)
        evidence = self._find_evidence(taken)
        if self._key_texts is None:
            self._key_texts = rule_run.key_texts(at, self._common.last_key)
        subject = Subject(self._key_texts, self._key, row.id, row.time, match.first_time, row.time, evidence)
        values = {name: rule_run.events.columns[field].item(at) for name, field in self._common.shown_fields.items()}
        values |= self._steps.message_values(self._common.step_names, row, taken)
        rule_run.writer.raise_alert(rule_run.order_by_event(at), subject, {}, match.is_complete, values)

    def _find_evidence(self, taken: Sequence[Taken]) -> list[str]:
        """Finds the evidence in the rows that steps took, up to the last one of the match.

        If the evidence has its maximum length, the next alert with the same first rows has the same evidence, unless a
        row arrived late.
        """
        if self._common.is_once:
            return _list_evidence(taken, self._rule_run.max_evidence)
        # The events that a step of a wait took may have been deleted since.
        begins, most = [list(rows[:1]) for rows in taken], self._rule_run.max_evidence
        if len(self._evidence) < most or begins != self._evidence_begins:
            self._evidence, self._evidence_begins = _list_evidence(taken, most), begins
        return self._evidence

    def _reset_rows(self) -> None:
        """Resets the key after an alert if the rule has reset_on_alert, so that nothing that has arrived counts."""
        if self._rule_run.spec.reset_on_alert:
            self._emptied = max([self._emptied, *(row.time for row in self._state.rows[-1:])])
            self._state.empty()
            self._asked, self._ahead = 0, _MIN_ASKED
            self._index_rows()

    def _begin_wait(self, wait: Wait, at: int) -> None:
        """Starts a wait, unless an event that ends it has already arrived."""
        if self._has_ended(wait):
            return
        if wait.time + self._wait < self._rule_run.watermarks[at]:
            # The wait starts so late that it is over at once.
            self._raise_absence(wait, self._rule_run.order_by_event(at, self._rank))
        else:
            insort(self._state.pending, wait, key=sort_key)

    def _has_ended(self, wait: Wait) -> bool:
        """Returns whether an event that ends the wait has already arrived."""
        absent = self._absent
        assert absent is not None
        ending = self._live.iterate(self._steps.absent, (wait.time, wait.number + 1), (wait.time + self._wait + 1, -1))
        first = next(ending, None)
        if first is None or absent.own:
            return first is not None
        taken = self._read_taken(wait)
        return any(self._steps.find_ended(row, [taken])[0] for row in (first, *ending))

    def _end_waits(self, row: Row, at: int) -> None:
        """Ends the waits for this event, and retracts the alerts of waits that were over."""
        absent, rule_run = self._absent, self._rule_run
        if absent is None or not row.bits >> self._steps.absent & 1:
            return
        for waits in (self._state.raised, self._state.pending):
            low = bisect_left(waits, row.time - self._wait, key=time_of)
            high = bisect_right(waits, row.time, key=time_of)
            taken = [() if absent.own else self._read_taken(each) for each in waits[low:high]]
            ended = list(compress(waits[low:high], self._steps.find_ended(row, taken)))
            for wait in ended:
                if wait.version == rule_run.entry.version and rule_run.is_evaluated:
                    self._write_absence(wait, rule_run.order_by_event(at, self._rank), is_retracted=True)
            gone = set(map(id, ended))
            waits[low:high] = [each for each in waits[low:high] if id(each) not in gone]

    def _pass_time(self, watermark: int) -> None:
        """Raises the absences whose wait is over at a watermark."""
        count = bisect_left(self._state.pending, watermark - self._wait, key=time_of)
        waits = self._state.pending[:count]
        del self._state.pending[:count]
        for wait in waits:
            # The first watermark above the end of the wait raises the alert.
            order = self._rule_run.order_by_watermark(wait.time + self._wait + 1, self._rank)
            self._raise_absence(wait, order)

    def _raise_absence(self, wait: Wait, order: Order) -> None:
        """Writes the alert of a wait that is over without the event."""
        rule_run = self._rule_run
        if rule_run.is_evaluated and rule_run.find_effective(np.array([wait.time + self._wait]))[0]:
            wait.version = rule_run.entry.version
            insort(self._state.raised, wait, key=sort_key)
            self._write_absence(wait, order)
            self._reset_rows()

    def _write_absence(self, wait: Wait, order: Order, *, is_retracted: bool = False) -> None:
        """Writes the first row of an absence, or its retraction."""
        rule_run, due, row = self._rule_run, wait.time + self._wait, self._find_row(wait)
        ranges = self._find_ranges(wait)
        taken = ranges or self._find_taken(wait)
        evidence = self._find_evidence(ranges) if ranges else _list_evidence(taken, rule_run.max_evidence)
        self._rank += 1
        key_values = rule_run.key_values(self._state.stored_key)
        key_texts = to_texts(key_values)
        subject = Subject(key_texts, self._key, row.id, due, wait.time, due, evidence)
        values = self._steps.message_values([*self._common.step_names, *self._common.field_names], row, taken)
        values |= key_values
        if is_retracted:
            rule_run.writer.retract(order, subject, 1, {}, wait.is_complete, values)
        else:
            rule_run.writer.raise_alert(order, subject, {}, wait.is_complete, values)

    def _find_row(self, wait: Wait) -> Row:
        """Finds the row that started a wait."""
        rows = self._find_rows(wait)
        return rows[bisect_left(rows, sort_key(wait), key=sort_key)]

    def _read_taken(self, wait: Wait) -> Sequence[Taken]:
        """Finds the rows that each step took, without a list if possible."""
        return self._find_ranges(wait) or self._find_taken(wait)

    def _find_taken(self, wait: Wait) -> list[TakenRows]:
        """Lists the rows that each step took; only as many as the evidence needs if nothing else reads them."""
        absent = self._absent
        only_evidence = not self._common.step_names and (absent is None or absent.own)
        ends = [*wait.begins[1:], (wait.time, wait.number + 1)]
        taken: list[TakenRows] = []
        left = self._rule_run.max_evidence if only_evidence else len(self._find_rows(wait))
        for step, (begin, end) in enumerate(zip(wait.begins, ends, strict=True)):
            rows = self._iterate_rows(wait, step, begin, end)
            listed = TakenRows()
            while len(listed) < left and (some := list(islice(rows, left))):
                listed.extend(compress(some, self._steps.find_taken(step, some, taken)))
            taken.append(TakenRows(listed[:left]))
            left -= len(taken[-1])
        return taken

    def _find_ranges(self, wait: Wait) -> list[Taken] | None:
        """Does the same as `_find_taken` without copying rows; returns None if that is not possible."""
        if not self._common.is_once and (wait.since < self._state.since or self._has_late(wait)):
            return None
        return self._list_taken(wait)

    def _list_taken(self, wait: Wait) -> list[Taken]:
        """Lists the rows that the steps took, without a list of them; all rows from the first on must count."""
        if self._common.is_once:
            return self._list_once(wait)
        begins, taken = wait.begins, list[Taken]()
        ends = [*begins[1:], (wait.time, wait.number + 1)]
        for step, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            places, rows = self._live.find_places(step, begin, end), self._live.rows[step]
            if self._steps.steps[step].own:
                taken.append(RowRange(rows, *places))
                continue
            key = tuple(begins[: step + 1])
            if key not in self._linked:
                if len(self._linked) >= _MAX_LINKED:
                    del self._linked[next(iter(self._linked))]
                self._linked[key] = LinkedStep(self._steps, step, list(taken), rows, places[0])
            taken.append(LinkedRows(self._linked[key], places[1]))
        return taken

    def _list_once(self, match: Wait) -> list[Taken]:
        """Lists the rows that the stages took, by step; without those that have been deleted since."""
        rows, numbers = self._find_rows(match), list_stages(self._steps)
        taken = [TakenRows() for _ in self._steps.steps]
        for number, key in zip(numbers, match.begins, strict=True):
            at = bisect_left(rows, key, key=sort_key)
            taken[number].extend(row for row in rows[at : at + 1] if row.sort_key == key)
        return list(taken)

    def _has_late(self, wait: Wait) -> bool:
        """Returns whether any row from the first to the last one of a wait arrived after a row with a later time."""
        if self._late is None:
            self._late, least = [], self._state.next
            for row in reversed(self._state.rows):
                if row.number > least:
                    self._late.append(row.sort_key)
                least = min(least, row.number)
            self._late.reverse()
        at = bisect_left(self._late, wait.begins[0])
        return at < len(self._late) and self._late[at] <= (wait.time, wait.number)

    def _iterate_rows(self, wait: Wait, step: int, begin: SortKey, end: SortKey) -> Iterator[Row]:
        """Yields the rows in [begin, end) that counted for a wait when it started and that a step may have taken."""
        if wait.since >= self._state.since:
            rows = self._live.iterate(step, begin, end)
        else:
            held = self._state.held
            low, high = bisect_left(held, begin, key=sort_key), bisect_left(held, end, key=sort_key)
            rows = (row for row in held[low:high] if row.bits >> step & 1)
        return (row for row in rows if wait.since <= row.number <= wait.number)

    def _find_rows(self, wait: Wait) -> list[Row]:
        """Returns the rows that include those of a wait."""
        return self._state.rows if wait.since >= self._state.since else self._state.held


def _list_evidence(taken: Sequence[Taken], most: int) -> list[str]:
    """Returns the ids of the first rows that the steps took, at most `most`."""
    ids: list[str] = []
    for rows in taken:
        ids += [row.id for row in rows[: most - len(ids)]]
    return ids

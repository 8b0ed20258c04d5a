"""Judges sequences: steps in order within a span of time, and the absence of an event that should have followed.

State is a keyed table. For most keys it only has the rows that steps may take, in columns. For keys with more state,
such as waits for absent events, it has a `KeyState`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, islice
from typing import Any, NamedTuple

import numpy as np

from lookback.core.judging.beginnings import Beginnings, leave_open, settle_candidates
from lookback.core.judging.matching import (
    Candidates,
    Computation,
    Index,
    KeyedRows,
    LinkedRows,
    LinkedStep,
    Match,
    Row,
    RowRange,
    SortKey,
    Steps,
    Taken,
    TakenRows,
    find_candidates,
    run_side_by_side,
    sort_key,
)
from lookback.core.judging.segment import Order, RuleRun
from lookback.core.judging.verdicts import Subject
from lookback.core.rules.compiled import CompiledRule
from lookback.core.state.keyed import Key
from lookback.core.state.keyruns import Rows
from lookback.core.state.shard import ShardState
from lookback.core.streams.events import Events
from lookback.core.values.columns import Mask, from_values, to_texts
from lookback.core.values.keycolumns import KeyColumns
from lookback.core.values.keys import Int64s, Keys, find_keys, order_by_group, order_by_number
from lookback.core.values.lists import Lists
from lookback.core.values.times import NEVER
from lookback.core.values.types import BIGINT

# The number of keys whose conditions are evaluated together.
_KEYS_AT_ONCE = 1_000
# The columns of rows in state, before those of the fields that are kept.
_TIME, _NUMBER, _BITS, _ID, _FIELDS = range(5)
# How many results of linked steps, whose conditions read earlier steps, are cached for a key.
_MAX_LINKED = 64
# After an alert has reset a key, it is faster to judge fewer beginnings than this one by one.
_MIN_SETTLED = 16
# A match may be offered at least this many rows before they are judged.
_MIN_AHEAD = 16


@dataclass(eq=False)
class Wait:
    """A wait for an absent event, which starts when an event completes the steps before it.

    It refers to the rows that the steps took by sort key and keeps no copies, so that state only grows with the rows.

    Attributes:
        time: The time of the row that started it.
        number: The number of that row.
        since: Rows with a lower number did not count for it.
        begins: The sort key of the first row that each step took.
        version: The version that raised the alert; None until the wait is over.
        is_complete: Whether the steps could see all their events.
    """

    time: int
    number: int
    since: int
    begins: list[SortKey]
    version: int | None
    is_complete: bool

    @property
    def first_time(self) -> int:
        """The time of the first row that the steps took."""
        time, _ = self.begins[0]
        return time

    @classmethod
    def from_value(cls, value: Sequence[Any]) -> Wait:
        """Decodes the output of `to_value`."""
        time, number, since, begins, version, is_complete = value
        return cls(time, number, since, [(at, each) for at, each in begins], version, is_complete)

    def to_value(self) -> list[Any]:
        """Encodes the wait for a keyed table."""
        return [self.time, self.number, self.since, self.begins, self.version, self.is_complete]


class FixedMatch(NamedTuple):
    """A match with fixed expiry: its start time, and the number of the first row that can belong to it."""

    begin: int
    since: int


@dataclass(eq=False)
class KeyState:
    """The state of one key.

    Attributes:
        stored_key: The values of the group_by fields.
        rows: The rows that count, sorted.
        held: The rows that an alert has removed but waits still refer to, sorted.
        next: The number of the next row.
        since: The number of the first row that counts.
        match: The current match, with fixed expiry.
        pending: The waits that are not over, sorted.
        raised: The waits that are over, sorted.
    """

    stored_key: list[Any]
    rows: list[Row] = field(default_factory=list)
    held: list[Row] = field(default_factory=list)
    next: int = 0
    since: int = 0
    match: FixedMatch | None = None
    pending: list[Wait] = field(default_factory=list)
    raised: list[Wait] = field(default_factory=list)

    @classmethod
    def from_value(cls, value: Mapping[str, Any]) -> KeyState:
        """Decodes the output of `to_value`, or the rows of a key in columns."""
        if "waits" not in value:
            rows = [Row(time, str(each), bits, values, number) for time, number, bits, each, *values in value["rows"]]
            return cls([], rows, next=max(row.number for row in rows) + 1)
        state = cls(value["key"], _read_rows(value["rows"]), _read_rows(value["held"]), value["next"], value["since"])
        state.match = FixedMatch(*value["match"]) if value["match"] else None
        for wait in map(Wait.from_value, value["waits"]):
            (state.pending if wait.version is None else state.raised).append(wait)
        return state

    def to_value(self) -> dict[str, Any]:
        """Encodes the state for a keyed table."""
        return {
            "key": self.stored_key, "rows": self.rows, "held": self.held, "next": self.next, "since": self.since,
            "match": self.match, "waits": [wait.to_value() for wait in (*self.pending, *self.raised)],
        }  # fmt: skip

    @property
    def has_only_rows(self) -> bool:
        """True if only the rows that count must be kept."""
        return not (self.held or self.match or self.pending or self.raised)

    def match_rows(self, within: int) -> list[Row]:
        """Returns the rows of the match, sorted."""
        if self.match is None:
            return []
        low = bisect_left(self.rows, self.match.begin, key=_time)
        high = bisect_right(self.rows, self.match.begin + within, key=_time)
        return [row for row in self.rows[low:high] if row.number >= self.match.since]

    def empty(self) -> None:
        """Resets the key, so that only rows that arrive later count."""
        if self.pending or self.raised:
            self.held = sorted([*self.held, *self.rows], key=sort_key)
        self.rows, self.since, self.match = [], self.next, None

    def delete(self, time: int, event_id: str, within: int) -> None:
        """Removes an event, so that it no longer counts for a step and no longer starts or ends a wait."""

        def without_event(rows: list[Row]) -> list[Row]:
            return [row for row in rows if (row.time, row.id) != (time, event_id)]

        own = {row.number for row in (*self.rows, *self.held) if (row.time, row.id) == (time, event_id)}

        members = without_event(self.match_rows(within))
        self.rows, self.held = without_event(self.rows), without_event(self.held)
        for waits in (self.pending, self.raised):
            waits[:] = [wait for wait in waits if wait.time != time or wait.number not in own]
        if self.match is not None:
            # The match continues from the first remaining row of step one.
            begin = next((row.time for row in members if row.bits & 1), None)
            self.match = None if begin is None else FixedMatch(begin, self.match.since)

    def forget(self, oldest: int, within: int, lateness: int, wait: int) -> int | None:
        """Drops everything that no event from `oldest` on needs.

        Returns the watermark at which the key must be processed again; None if no state remains.
        """
        self.raised = [each for each in self.raised if each.time + wait >= oldest]
        # Rows are kept as long as the waits that refer to them.
        counted, emptied = [oldest - within], list[int]()
        for each in (*self.pending, *self.raised):
            (counted if each.since >= self.since else emptied).append(each.first_time)
        self.rows = self.rows[bisect_left(self.rows, min(counted), key=_time) :]
        self.held = self.held[bisect_left(self.held, min(emptied), key=_time) :] if emptied else []
        if self.match is not None and self.match.begin + within < oldest:
            self.match = None
        if not (self.rows or self.pending or self.raised or self.match):
            return None
        wakes = [each.time + wait + 1 for each in self.pending[:1]]
        wakes += [each.time + wait + lateness + 1 for each in self.raised[:1]]
        wakes += [row.time + within + lateness + 1 for row in self.rows[-1:]]
        wakes += [self.match.begin + within + lateness + 1] if self.match else []
        return min(wakes)


def _read_rows(listed: Iterable[Sequence[Any]]) -> list[Row]:
    return [Row(*each) for each in listed]


def _time(each: Row | Wait) -> int:
    return each.time


def judge_sequences(rule_run: RuleRun) -> None:
    """Judges the events of a segment by a sequence rule."""
    _Judge(rule_run).run()


def select_taken(rule_run: RuleRun) -> Mask:
    """Marks the events that a sequence takes, for a version that judges them later; records actions on late ones."""
    bits, _ = Steps(rule_run).find_bits(rule_run.events)
    wanted, in_time = rule_run.wanted & (bits != 0), rule_run.find_in_time()
    rule_run.record_judged(wanted, in_time, np.zeros(len(wanted), dtype=bool))
    taken: Mask = wanted & in_time
    return taken


def delete_from_sequences(
    state: ShardState, rule: CompiledRule, keys: Keys, deleted: Events, selected: Mask, _lists: Lists
) -> None:
    """Removes the selected deleted events, so that they no longer count for steps and no longer start or end waits."""
    assert rule.spec.sequence is not None
    table = state.table(rule.store)
    for at in np.flatnonzero(selected).tolist():
        key = (int(keys.low[at]), int(keys.high[at]))
        value = table.get(key)
        if value is not None:
            key_state = KeyState.from_value(value)
            key_state.delete(int(deleted.times[at]), deleted.id_text(at), rule.spec.sequence.within)
            table.change(key, key_state.to_value())


class _Settled(NamedTuple):
    """The result for a row, valid unless an alert has removed rows of its window.

    Attributes:
        begins: The sort key of the first row that each step took; None if the row does not complete the steps.
        has_failed: Whether the last condition has an error for the row.
        again: Finds the result if only rows after a given time count; None if the row does not complete the steps then
            either.
    """

    begins: list[SortKey] | None
    has_failed: bool
    again: Callable[[int], _Settled] | None = None


# An arriving row, the position of its event, whether it may complete the steps, and its result; None if it must still
# be judged. A plain tuple for speed: there is one per event.
_Arrival = tuple[Row, int, bool, _Settled | None]


class _Found(NamedTuple):
    """The results for the rows of a batch before `Row` objects are made.

    Attributes:
        is_candidate: Marks the rows that may complete the steps.
        is_needed: Marks the rows that may count for a candidate.
        is_settled: Marks the rows that do not complete the steps unless an alert has reset their key.
        has_failed: Marks the rows with an error in the last condition.
        begins: For each row that completes the steps, by position, the first row that each step took.
        again: By position, settles a row if only rows after a given time count.
    """

    is_candidate: Mask
    is_needed: Mask
    is_settled: Mask
    has_failed: Mask
    begins: dict[int, list[int]]
    again: Mapping[int, Callable[[int], tuple[list[int] | None, bool]]]


class _KeyedBatch:
    """The rows of the keys to process: those in state, then those of the batch in order of arrival.

    All arrays of rows have shape (rows,).

    Attributes:
        keys: The keys of the grouping, by number, then further keys that are due.
        numbers: The number of each row's key.
        times: The time of each row.
        bits: The conditions that each row may satisfy.
        order: The order of the rows by (key, time, arrival).
        states: The states of keys that have more than rows, by number.
    """

    def __init__(self, rule_run: RuleRun, positions: Int64s, bits: Int64s, fields: Sequence[str]) -> None:
        self._rule_run, self._positions, self._fields = rule_run, positions, fields
        self._table, distinct = rule_run.state.table(rule_run.rule.store), rule_run.grouping.distinct
        due = self._table.find_due(rule_run.timeline.end)
        numbers_due = find_keys(due, distinct)
        others = np.flatnonzero(numbers_due < 0)
        numbers_due[others] = len(distinct) + np.arange(len(others))
        own = rule_run.grouping.numbers[positions]
        self.keys = Keys(np.append(distinct.low, due.low[others]), np.append(distinct.high, due.high[others]))
        wanted = np.unique(np.append(own, numbers_due))
        self._found = self._table.find_rows(self.keys.take(wanted))
        # The keys with rows in columns, the keys with another kind of value, and the rows of both.
        self._in_columns, self._by_value = wanted[self._found.places], wanted[self._found.others]
        self._stored, numbers = self._read_state()
        self._count = len(numbers)
        self.numbers: Int64s = np.append(numbers, own)
        self.times = np.append(self._stored.values[_TIME], rule_run.events.times[positions])
        self.bits = np.append(self._stored.values[_BITS], bits[positions])
        self.order = order_by_group(self.numbers, self.times)
        self._rows: list[Any] = []
        self._followed: dict[int, KeyState] = {}
        # The numbers of the rows of the batch that are made or kept; 0 for all other rows.
        self._row_numbers: Int64s = np.zeros(len(positions), dtype=np.int64)

    def _read_state(self) -> tuple[KeyColumns, Int64s]:
        """Reads the states of the keys. Returns their rows, and the number of each row's key."""
        self.states: dict[int, KeyState] = {}
        rows, numbers = list[Row](), list[int]()
        for number in self._by_value.tolist():
            value = self._table.get(self.keys.pair(number))
            if value is not None:
                state = KeyState.from_value(value)
                rows += state.rows
                numbers += [number] * len(state.rows)
                if not state.has_only_rows:
                    self.states[number] = state
        found = self._found.rows
        parts, of_parts = [self._to_columns(rows)], [np.array(numbers, dtype=np.int64)]
        if found.columns is not None and found.lengths is not None:
            parts.append(found.columns)
            of_parts.append(np.repeat(self._in_columns, found.lengths))
        return KeyColumns.join([part for part in parts if len(part)] or parts[:1]), np.concatenate(of_parts)

    def _to_columns(self, rows: Sequence[Row]) -> KeyColumns:
        """Converts rows to columns."""
        types, id_type = self._rule_run.kept_types, self._rule_run.events.id_column.type
        columns = [from_values(BIGINT, [row[at] for row in rows]) for at in (0, 4, 2)]
        columns.append(from_values(id_type, [int(row.id) if id_type.is_integer else row.id for row in rows]))
        columns += [from_values(types[name], [row.values[at] for row in rows]) for at, name in enumerate(self._fields)]
        return KeyColumns.from_columns(columns)

    def mark_events(self, mask: Mask) -> Mask:
        """Marks the rows of the marked events."""
        return np.append(np.zeros(self._count, dtype=bool), mask[self._positions])

    def mark_keys(self, mask: Mask) -> Mask:
        """Marks the keys of the marked rows, shape (keys,)."""
        marked = np.zeros(len(self.keys), dtype=bool)
        marked[self.numbers[mask]] = True
        return marked

    def read_field(self, name: str, at: Int64s) -> list[Any]:
        """Reads the values of a kept field for the rows at these positions."""
        is_stored, column = at < self._count, self._rule_run.read_kept(name)
        values = column.to_stored_list(self._positions[at[~is_stored] - self._count])
        if is_stored.any():
            of_state = iter(self._stored.list_column(_FIELDS + self._fields.index(name), at[is_stored]))
            of_batch = iter(values)
            values = [next(of_state) if is_there else next(of_batch) for is_there in is_stored.tolist()]
        return values

    def make_rows(self, is_needed: Mask, is_kept: Mask) -> None:
        """Makes the needed rows, and numbers needed and kept rows, from the next number of each key."""
        nexts = np.zeros(len(self.keys), dtype=np.int64)
        np.maximum.at(nexts, self.numbers[: self._count], self._stored.values[_NUMBER] + 1)
        nexts[list(self.states)] = [state.next for state in self.states.values()]
        at = np.flatnonzero((is_needed | is_kept)[self._count :])
        if len(at):
            numbers = self.numbers[self._count + at]
            order = order_by_number(numbers)
            grouped = numbers[order]
            self._row_numbers[at[order]] = np.arange(len(order)) - np.searchsorted(grouped, grouped) + nexts[grouped]
        self._rows = [None] * len(is_needed)
        # The states of keys with more than rows already have their rows.
        is_other = np.ones(len(self.keys), dtype=bool)
        is_other[list(self.states)] = False
        stored = np.flatnonzero(is_needed[: self._count] & is_other[self.numbers[: self._count]])
        self._fill_rows(stored, self._stored.take(stored))
        arrived = np.flatnonzero(is_needed[self._count :])
        self._fill_rows(self._count + arrived, self._select_events(arrived))

    def _fill_rows(self, at: Int64s, columns: KeyColumns) -> None:
        listed = [columns.list_column(column, slice(None)) for column in range(len(columns.values))]
        values = map(list, zip(*listed[_FIELDS:], strict=True)) if self._fields else ([] for _ in range(len(at)))
        made = map(Row, listed[_TIME], map(str, listed[_ID]), listed[_BITS], values, listed[_NUMBER])
        for place, row in zip(at.tolist(), made, strict=True):
            self._rows[place] = row

    def _select_events(self, at: Int64s) -> KeyColumns:
        """Returns the rows of the batch at these places, as columns."""
        events, positions = self._rule_run.events, self._positions[at]
        fields = KeyColumns.from_columns([events.id_column, *map(self._rule_run.read_kept, self._fields)], positions)
        times, bits = self.times[self._count + at], self.bits[self._count + at]
        return KeyColumns([times, self._row_numbers[at], bits, *fields.values], [None, None, None, *fields.nulls])

    def find_positions(self, at: Int64s) -> Int64s:
        """Returns the positions of the events of these rows of the batch."""
        return self._positions[at - self._count]

    def list_judged(self, found: _Found, is_followed: Mask) -> Iterator[tuple[Key, KeyState, list[_Arrival]]]:
        """Yields each key to judge with its state and its needed rows of the batch.

        These are the keys that are followed or have needed rows in the batch. If a key is not followed, its state only
        has the rows that are needed.
        """
        at = np.flatnonzero(found.is_needed)
        if len(at):
            at = at[order_by_number(self.numbers[at])]
        parts = {number: (start, end) for number, start, end in _find_parts(self.numbers[at])}
        rows, places = [self._rows[place] for place in at.tolist()], at.tolist()
        # Rows in state have no position among the events.
        positions = np.append(np.full(self._count, -1), self._positions)[at].tolist()
        may_complete = (found.is_candidate | found.is_settled)[at].tolist()
        settled = self._list_settled(found, places)
        followed = np.flatnonzero(is_followed)
        grouping = self._rule_run.grouping
        own = followed[followed < len(grouping.distinct)]
        # A key that is due without an event either has no waits, or its state has the values of its fields.
        stored_keys = self._rule_run.list_stored_keys(grouping.first_positions[own])
        fields: dict[int, list[Any]] = {number: [] for number in followed.tolist()}
        fields |= zip(own.tolist(), stored_keys, strict=True)
        for number in {**parts, **fields}:
            start, end = parts.get(number, (0, 0))
            # Rows in state come first.
            split = bisect_left(places, self._count, start, end)
            if split == end and number not in fields:
                continue
            state = self.states.get(number)
            if state is None:
                state = KeyState([], rows[start:split])
                state.next = max((row.number + 1 for row in state.rows), default=0)
            if number in fields:
                self._followed[number] = state
                state.stored_key = state.stored_key or fields[number]
            at_own = slice(split, end)
            yield (
                self.keys.pair(number),
                state,
                list(zip(rows[at_own], positions[at_own], may_complete[at_own], settled[at_own], strict=True)),
            )

    def _list_settled(self, found: _Found, places: Sequence[int]) -> list[_Settled | None]:
        """Lists the results of the rows at these places; None where a row must be judged."""
        settled: dict[int, _Settled] = {}
        for place in np.flatnonzero(found.is_settled).tolist():
            settled[place] = _Settled(None, bool(found.has_failed[place]))
        if found.begins:
            begins = self._find_sort_keys(np.array(list(found.begins.values())))
            settled |= {place: _Settled(each, False) for place, each in zip(found.begins, begins, strict=True)}
        for place in found.again.keys() & settled.keys():
            settled[place] = settled[place]._replace(again=partial(self._settle_again, found.again[place]))
        return list(map(settled.get, places))

    def _find_sort_keys(self, at: Int64s) -> list[list[SortKey]]:
        """Returns the sort keys of rows at positions of shape (rows, steps)."""
        numbers = np.append(self._stored.values[_NUMBER], self._row_numbers)
        keys = zip(self.times[at].tolist(), numbers[at].tolist(), strict=True)
        return [list(zip(*each, strict=True)) for each in keys]

    def _settle_again(self, settle: Callable[[int], tuple[list[int] | None, bool]], time: int) -> _Settled:
        begins, has_failed = settle(time)
        return _Settled(None if begins is None else self._find_sort_keys(np.array([begins]))[0], has_failed)

    def save(
        self, is_kept: Mask, is_followed: Mask, rows_wake_after: int, forget: Callable[[KeyState], int | None]
    ) -> None:
        """Saves the state of all keys.

        Args:
            is_kept: Marks the rows to keep for keys that are not followed.
            is_followed: Marks the keys that are followed.
            rows_wake_after: How long after its last row a key that is not followed wakes.
            forget: Drops what a followed key no longer needs, and returns its wake; None if no state remains.
        """
        at = self.order[(is_kept & ~is_followed[self.numbers])[self.order]]
        arrived = at[at >= self._count] - self._count
        # Positions among the rows in state followed by those that arrived.
        at[at >= self._count] = self._count + np.arange(len(arrived))
        numbers = np.append(self.numbers[: self._count], self.numbers[self._count + arrived])[at]
        columns = KeyColumns.join(
            [self._stored, self._select_events(arrived)] if len(arrived) else [self._stored]
        ).take(at)
        rows, of_rows, others = list[Row](), list[int](), list[tuple[int, KeyState, int]]()
        for number, state in self._followed.items():
            wake = forget(state)
            if wake is not None and state.has_only_rows:
                rows += state.rows
                of_rows += [number] * len(state.rows)
            elif wake is not None:
                others.append((number, state, wake))
        if rows:
            columns = KeyColumns.join([*([columns] if len(columns) else []), self._to_columns(rows)])
            numbers = np.append(numbers, np.array(of_rows, dtype=np.int64))
        edges = np.flatnonzero(np.diff(numbers, prepend=-1, append=-1))
        starts, ends = edges[:-1], edges[1:]
        is_gone = np.zeros(len(self.keys), dtype=bool)
        is_gone[self._by_value] = True
        is_gone[[number for number, _, _ in others]] = False
        is_gone[self._in_columns] = True
        is_gone[numbers] = False
        gone = np.flatnonzero(is_gone)
        wakes = np.append(columns.values[_TIME][ends - 1] + rows_wake_after, gone)
        lengths = np.append(ends - starts, np.zeros(len(gone), dtype=np.int64))
        changed = self.keys.take(np.append(numbers[starts], gone))
        self._table.replace_rows(
            self._found, Rows.from_columns(changed, wakes, lengths, columns if len(columns) else None)
        )
        for number, state, wake in others:
            self._table.put(self.keys.pair(number), state.to_value(), wake)


def _find_parts(numbers: Int64s) -> Iterator[tuple[int, int, int]]:
    """Yields each distinct one of sorted numbers, with its first position and the position after its last."""
    edges = np.flatnonzero(np.diff(numbers, prepend=-1, append=-1))
    return zip(numbers[edges[:-1]].tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True)


class _Judge:
    """Judges the events of a segment by a sequence rule.

    Events that cannot complete the steps are found for all keys at once. A key is followed event by event if more than
    its rows may change: an alert may reset it, it waits for absent events, or matches have fixed expiry. For all other
    keys, only events that may complete the steps are judged, each with the rows that may count for it.
    """

    def __init__(self, rule_run: RuleRun) -> None:
        assert rule_run.spec.sequence is not None
        self.rule_run, self.spec, self.steps = rule_run, rule_run.spec.sequence, Steps(rule_run)
        self.absent, self.is_fixed = self.steps.compiled.absent, self.spec.expiry == "fixed"
        # With fixed expiry only waits look for rows other than those of the match.
        self.reads_all_rows = self.absent is not None or not self.is_fixed
        # How long to wait for an absent event.
        self.wait = 0 if self.absent is None else self.absent.step.within
        self.floor = rule_run.state.features[rule_run.rule.store].floor
        self.complete_from = rule_run.complete_from
        self._resets = rule_run.spec.reset_on_alert
        # Without linked steps and limits, the earliest beginning reaches the last step first, so judging rows one by
        # one is fast.
        self._settles = any(not step.own or step.step.at_most is not None for step in self.steps.steps)
        self._oldest = rule_run.earliest_in_time(rule_run.timeline.end)
        # The names in the message that refer to earlier steps, and those that refer to the event itself.
        self.step_names = sorted(name for name in rule_run.rule.message_names if "." in name)
        self.field_names = sorted(rule_run.rule.message_names & set(rule_run.stream.fields))

    def run(self) -> None:
        """Judges the events of the segment, and the waits that the watermark ends."""
        rule_run = self.rule_run
        bits, errors = self.steps.find_bits(rule_run.events)
        taken = rule_run.wanted & rule_run.find_in_time()
        judgeable = taken & ~rule_run.is_late if rule_run.spec.late == "record" else taken
        # An absence triggers when its wait is over. So an event is judged if a wait that it may start or end is over
        # within the effective range.
        times, dues = rule_run.events.times, rule_run.events.times + self.wait
        self.alerting = judged = judgeable & rule_run.find_effective(dues) & rule_run.is_evaluated
        if self.absent is not None:
            is_ending = bits >> self.steps.absent & 1 > 0
            judged = judged | (judgeable & is_ending & rule_run.find_effective(times, dues) & rule_run.is_evaluated)
        rule_run.record_judged(rule_run.wanted & (bits != 0), taken, judged)
        rule_run.failed |= taken & errors
        # A wait may start outside the effective range, because it may be over inside it.
        may_complete = (self.alerting if self.absent is None else judgeable) & (bits >> self.steps.last & 1 > 0)
        self._judge_rows(np.flatnonzero(taken & (bits != 0)), bits, may_complete)
        rule_run.count_failed_events(rule_run.failed)

    def _judge_rows(self, positions: Int64s, bits: Int64s, may_complete: Mask) -> None:
        """Judges events and saves the state; `may_complete` marks those that satisfy the gate of the last step."""
        batch = _KeyedBatch(self.rule_run, positions, bits, self.steps.compiled.kept)
        is_kept = batch.times >= self._oldest - self.spec.within
        found = self._find_candidates(batch, batch.mark_events(may_complete))
        is_followed = self._find_followed(batch, found.is_candidate, is_kept)
        of_followed = is_followed[batch.numbers]
        found.is_needed[of_followed] = True
        # If a key is followed, an error counts only when its row arrives, because an alert may have reset the key
        # before.
        found.is_settled[~of_followed] = False
        failed = batch.find_positions(np.flatnonzero(found.has_failed & ~found.is_settled))
        self.rule_run.failed[failed] |= self.alerting[failed]
        batch.make_rows(found.is_needed, is_kept)
        judges = (
            _KeyJudge(self, key, state).run(arrivals) for key, state, arrivals in batch.list_judged(found, is_followed)
        )
        while some := list(islice(judges, _KEYS_AT_ONCE)):
            self.steps.run(run_side_by_side(some))
        lateness = self.rule_run.rule.allowed_lateness
        batch.save(
            is_kept, is_followed, self.spec.within + lateness + 1,
            lambda state: state.forget(self._oldest, self.spec.within, lateness, self.wait),
        )  # fmt: skip

    def _find_candidates(self, batch: _KeyedBatch, may_complete: Mask) -> _Found:
        """Finds the rows that may complete the steps, and the rows with an error in the last condition."""
        order = batch.order
        rows = KeyedRows(batch.numbers[order], batch.times[order], batch.bits[order], order, batch.read_field)
        judged, resets = np.flatnonzero(may_complete[order]), self._resets
        if self.is_fixed or not self._settles:
            # With fixed expiry, or after a reset, a row before `until` in time may belong to a match that began later.
            found = leave_open(self._find(rows, judged, until_ends=not (self.is_fixed or resets)))
        else:
            found = settle_candidates(self.steps, rows, judged, partial(self._find, until_ends=True))
        is_settled, is_candidate, is_needed, has_failed = (np.zeros(len(order), dtype=bool) for _ in range(4))
        again = dict[int, Callable[[int], tuple[list[int] | None, bool]]]()
        if resets and found.parts:
            is_settled[order[self._find(rows, judged, until_ends=False).at]] = True
            for part in found.parts:
                at = order[part.list_candidates()].tolist()
                again |= {place: partial(self._settle_after, part, order, n) for n, place in enumerate(at)}
        for each in (found.open, found.complete):
            is_candidate[order[each]] = True
        is_needed[order[found.needed]], has_failed[order[found.failed]] = True, True
        begins = dict(zip(order[found.complete].tolist(), order[found.begins].tolist(), strict=True))
        return _Found(is_candidate, is_needed, is_settled & ~is_candidate, has_failed, begins, again)

    @staticmethod
    def _settle_after(part: Beginnings, order: Int64s, number: int, time: int) -> tuple[list[int] | None, bool]:
        begins, has_failed = part.settle_after(number, time)
        return None if begins is None else order[begins].tolist(), has_failed

    def _find(self, rows: KeyedRows, judged: Int64s, until_ends: bool) -> Candidates:
        return find_candidates(self.steps, rows, judged, self.spec.within, self.floor, until_ends)

    def _find_followed(self, batch: _KeyedBatch, is_candidate: Mask, is_kept: Mask) -> Mask:
        """Marks the keys that are followed event by event, shape (keys,)."""
        is_followed: Mask = np.zeros(len(batch.keys), dtype=bool)
        if self.is_fixed:
            is_followed = batch.mark_keys(is_candidate | is_kept)
        elif self.absent is not None or self._resets:
            is_followed = batch.mark_keys(is_candidate)
        is_followed[list(batch.states)] = True
        return is_followed


class _KeyJudge:
    """Judges one key in a segment: its events in order of arrival, then the watermark after them."""

    def __init__(self, judge: _Judge, key: Key, state: KeyState) -> None:
        self._judge, self._rule_run, self._spec, self._steps = judge, judge.rule_run, judge.spec, judge.steps
        self._key, self._state, self._rank = key, state, 0
        self._absent, self._wait = judge.absent, judge.wait
        self._key_texts: dict[str, str | None] | None = None
        # The latest time of a row that an alert has removed.
        self._emptied = NEVER
        # The rows of the batch in order of arrival, and how many of them have arrived.
        self._arrivals: Sequence[_Arrival] = ()
        self._coming = 0
        # The evidence of the last alert, and the first rows that its steps took.
        self._evidence: list[str] = []
        self._evidence_begins: list[list[Row]] = []
        # What linked steps took, by the first rows of the steps up to each.
        self._linked: dict[tuple[SortKey, ...], LinkedStep] = {}
        self._index_rows()

    def run(self, arrivals: Sequence[_Arrival]) -> Computation[None]:
        """Judges the events of the key."""
        rule_run, self._arrivals = self._rule_run, arrivals
        for self._coming, (row, at, may_complete, settled) in enumerate(arrivals, 1):
            if self._absent is not None:
                self._pass_time(int(rule_run.watermarks[at]))
                self._rank = 0
                self._end_waits(row, at)
            self._state.next = row.number + 1
            self._add_row(row)
            if self._judge.is_fixed:
                yield from self._judge_fixed(row, at, may_complete)
            elif settled is not None and self._emptied < row.time - self._spec.within:
                self._conclude(row, at, settled)
            elif settled is not None and settled.again is not None and self._can_settle_again(row):
                self._conclude(row, at, settled.again(self._emptied))
            elif may_complete:
                yield from self._judge_sliding(row, at)
        if self._absent is not None:
            self._pass_time(rule_run.timeline.end)

    def _can_settle_again(self, row: Row) -> bool:
        """Returns whether all rows that count are later than those that an alert has removed; False if they are few."""
        first = row.time - self._spec.within
        begins = self._members.sort_keys[0]
        if len(begins) - bisect_left(begins, (first, -1)) < _MIN_SETTLED:
            return False
        rows = self._state.rows
        return rows[bisect_left(rows, first, key=_time)].time > self._emptied

    def _conclude(self, row: Row, at: int, settled: _Settled) -> None:
        """Applies the known result of an event."""
        if settled.has_failed and self._judge.alerting[at]:
            self._rule_run.failed[at] = True
        if settled.begins is not None:
            self._complete_steps(row, at, self._state.since, self._list_taken(settled.begins, row))

    def _add_row(self, row: Row) -> None:
        rows = self._state.rows
        if self._judge.reads_all_rows:
            self._live.add(row)
        # Its number is the highest.
        if not rows or rows[-1].time <= row.time:
            rows.append(row)
            return
        insort(rows, row, key=sort_key)
        self._evidence, self._linked = [], {}
        if self._late is not None:
            insort(self._late, row.sort_key)
        for match in self._matches.values():
            match.rewind(row.sort_key)

    def _index_rows(self) -> None:
        """Indexes the rows that count and, with fixed expiry, the rows of the match."""
        # The matches, by their first rows.
        self._matches: dict[SortKey, Match] = {}
        self._evidence = []
        self._linked = {}
        # The sort keys of rows that arrived after a row with a later time; None until needed.
        self._late: list[SortKey] | None = None
        rows, is_fixed = self._state.rows, self._judge.is_fixed
        self._members = Index(self._steps, self._state.match_rows(self._spec.within) if is_fixed else rows)
        self._live = Index(self._steps, rows) if is_fixed and self._judge.reads_all_rows else self._members

    def _judge_sliding(self, row: Row, at: int) -> Computation[None]:
        """Judges an event with the rows within the span before it, after the last row that satisfies `until`."""
        first, floor = row.time - self._spec.within, self._judge.floor
        low = (first if floor is None else max(first, floor), -1)
        untils = self._live.sort_keys[self._steps.until]
        before = bisect_left(untils, row.sort_key) - 1
        if before >= 0 and untils[before] >= low:
            time, number = untils[before]
            low = (time, number + 1)
        yield from self._judge_row(row, at, low, self._state.since)

    def _judge_fixed(self, row: Row, at: int, may_complete: bool) -> Computation[None]:
        """Judges an event with the earlier rows of the match that is open when it arrives."""
        state, is_until = self._state, row.bits >> self._steps.until & 1
        if state.match is not None and row.time < state.match.begin:
            return
        if state.match is None or row.time > state.match.begin + self._spec.within:
            if not row.bits & 1:
                state.match = None if is_until else state.match
                return
            state.match = FixedMatch(row.time, row.number)
            self._members = Index(self._steps, ())
        self._members.add(row)
        if may_complete:
            yield from self._judge_row(row, at, (state.match.begin, -1), state.match.since)
        if is_until:
            state.match = None

    def _judge_row(self, row: Row, at: int, low: SortKey, since: int) -> Computation[None]:
        """Judges whether an event completes the steps, with the rows from `low` to itself and numbers from `since` on.

        The event must satisfy the gate of the last step.
        """
        found: Sequence[Taken] | None
        if self._steps.reads_event_alone:
            found = self._members.find_taken(low, row.sort_key, begins_first=self._judge.is_fixed)
        else:
            found = yield from self._find_match(row, at, low, since)
        if found is not None:
            self._complete_steps(row, at, since, found)

    def _find_match(self, row: Row, at: int, low: SortKey, since: int) -> Computation[list[Taken] | None]:
        """Finds what the steps took in the earliest match that an event ends.

        Counts an error in the match with the earliest beginning. Each beginning has a match that continues from event
        to event, so that each match is offered every row once.
        """
        begins = self._members.sort_keys[0]
        first, end = bisect_left(begins, low), bisect_right(begins, row.sort_key)
        begins = begins[first : min(end, first + 1) if self._judge.is_fixed else end]
        self._matches = {each: self._matches[each] for each in begins if each in self._matches}
        start, size = 0, 1
        while start < len(begins):
            matches = [
                self._matches.setdefault(each, Match(self._steps, each, since)) for each in begins[start:][:size]
            ]
            yield from run_side_by_side(
                match.offer(self._list_next(match, row)) for match in matches if match.next <= row.sort_key
            )
            for match in matches:
                if (found := match.find_taken(row)) is not None:
                    return found
            start, size = start + size, 2 * size
        if begins and self._matches[begins[0]].has_failed(row) and self._judge.alerting[at]:
            self._rule_run.failed[at] = True
        return None

    def _list_next(self, match: Match, row: Row) -> list[Row]:
        """Lists the rows up to a row that a match has not been offered yet, and some rows ahead.

        The rows ahead belong to the same match unless an alert resets the key, which wastes the work on them. So there
        are at most as many as were offered before, but up to `_MIN_AHEAD` in any case.
        """
        rows = self._state.rows
        high = bisect_right(rows, row.sort_key, key=sort_key)
        listed = [
            each for each in rows[bisect_left(rows, match.next, key=sort_key) : high] if each.number >= match.since
        ]
        if high < len(rows) or row.bits >> self._steps.until & 1:
            return listed
        time, limit = row.time, match.begin[0] + self._spec.within
        most = max(_MIN_AHEAD, match.offered + len(listed))
        for coming, _, _, _ in islice(self._arrivals, self._coming, self._coming + most):
            if not time <= coming.time <= limit:
                break
            listed.append(coming)
            time = coming.time
            if coming.bits >> self._steps.until & 1:
                break
        return listed

    def _complete_steps(self, row: Row, at: int, since: int, taken: Sequence[Taken]) -> None:
        """Writes the alert of an event that completes the steps, or starts a wait; `taken` has each step's rows."""
        bound = self._judge.complete_from
        is_complete = bound is None or row.time - self._spec.within >= bound
        if self._absent is not None:
            begins = [rows[0].sort_key for rows in taken]
            self._begin_wait(Wait(row.time, row.number, since, begins, None, is_complete), at)
        elif self._judge.alerting[at]:
            self._write_alert(row, at, taken, is_complete)
            self._reset_rows()

    def _write_alert(self, row: Row, at: int, taken: Sequence[Taken], is_complete: bool) -> None:
        rule_run, evidence = self._rule_run, self._find_evidence(taken)
        if self._key_texts is None:
            self._key_texts = rule_run.key_texts(at)
        subject = Subject(self._key_texts, self._key, row.id, row.time, taken[0][0].time, row.time, evidence)
        values = {name: rule_run.events.columns[name].item(at) for name in self._judge.field_names}
        values |= self._steps.message_values(self._judge.step_names, row, taken)
        verdict = rule_run.writer.decide_first(subject)
        rule_run.write_alert(rule_run.order_by_event(at), subject, verdict, 0, {}, is_complete, values)

    def _find_evidence(self, taken: Sequence[Taken]) -> list[str]:
        """Finds the evidence in the rows that steps took, up to the last one of the match.

        If the evidence has its maximum length, the next alert with the same first rows has the same evidence, unless a
        row arrived late.
        """
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
            low = bisect_left(waits, row.time - self._wait, key=_time)
            high = bisect_right(waits, row.time, key=_time)
            taken = [() if absent.own else self._read_taken(each) for each in waits[low:high]]
            ended = list(compress(waits[low:high], self._steps.find_ended(row, taken)))
            for wait in ended:
                if wait.version == rule_run.entry.version and rule_run.is_evaluated:
                    self._write_absence(wait, "retracted", 1, rule_run.order_by_event(at, self._rank))
            gone = set(map(id, ended))
            waits[low:high] = [each for each in waits[low:high] if id(each) not in gone]

    def _pass_time(self, watermark: int) -> None:
        """Raises the absences whose wait is over at a watermark."""
        count = bisect_left(self._state.pending, watermark - self._wait, key=_time)
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
            self._write_absence(wait, None, 0, order)
            self._reset_rows()

    def _write_absence(self, wait: Wait, verdict: str | None, revision: int, order: Order) -> None:
        """Writes a row of an absence; if `verdict` is None, this is the first row, raised or suppressed."""
        rule_run, due, row = self._rule_run, wait.time + self._wait, self._find_row(wait)
        ranges = self._find_ranges(wait)
        taken = ranges or self._find_taken(wait)
        evidence = self._find_evidence(ranges) if ranges else _list_evidence(taken, rule_run.max_evidence)
        self._rank += 1
        key_texts = to_texts(rule_run.key_values(self._state.stored_key))
        subject = Subject(key_texts, self._key, row.id, due, wait.time, due, evidence)
        if verdict is None:
            verdict = rule_run.writer.decide_first(subject)
        values = self._steps.message_values([*self._judge.step_names, *self._judge.field_names], row, taken)
        rule_run.write_alert(order, subject, verdict, revision, {}, wait.is_complete, values)

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
        only_evidence = not self._judge.step_names and (absent is None or absent.own)
        ends = [*wait.begins[1:], (wait.time, wait.number + 1)]
        taken: list[TakenRows] = []
        left = self._rule_run.max_evidence if only_evidence else len(self._find_rows(wait))
        for step, (begin, end) in enumerate(zip(wait.begins, ends, strict=True)):
            rows = self._iterate_rows(wait, step, begin, end)
            listed = TakenRows()
            while len(listed) < left and (some := list(islice(rows, left))):
                are_taken, _ = self._steps.run(self._steps.find_taken(step, some, taken))
                listed.extend(row for row, is_taken in zip(some, are_taken, strict=True) if is_taken)
            listed.cut(left)
            taken.append(listed)
            left -= len(listed)
        return taken

    def _find_ranges(self, wait: Wait) -> list[Taken] | None:
        """Does the same as `_find_taken` without copying rows; returns None if that is not possible."""
        if wait.since < self._state.since or self._has_late(wait):
            return None
        return self._list_taken(wait.begins, wait)

    def _list_taken(self, begins: Sequence[SortKey], last: Row | Wait) -> list[Taken]:
        """Lists the rows that the steps took, given the first row of each and the row that completes them."""
        ends, taken = [*begins[1:], (last.time, last.number + 1)], list[Taken]()
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

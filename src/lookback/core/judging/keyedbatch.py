"""The rows of a sequence for all keys of a batch: those in state, then those of the batch in order of arrival.

    state      key x: a1 a2     key y: b1            `order` sorts them by (key, time, number), which gives positions:
    batch      x: b2   y: a3   x: a4 (late)          x: a1 a4 a2 b2     y: b1 a3

Most keys only have rows, in columns, and no `Row` is made for them unless they are judged.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lookback.core.judging.keyedevents import KeyedEvents
from lookback.core.judging.keystates import KeyState
from lookback.core.judging.matches import KeyedRows
from lookback.core.judging.rulerun import RuleRun
from lookback.core.judging.steps import Steps
from lookback.core.judging.taken import Row, SortKey
from lookback.core.state.keyed import Key
from lookback.core.state.keyruns import Rows
from lookback.core.values.columns import Mask, from_values
from lookback.core.values.keycolumns import KeyColumns
from lookback.core.values.keys import Int64s, Keys, count_earlier, find_keys, order_by_group, order_by_number
from lookback.core.values.types import BIGINT

# The columns of rows in state, before those of the fields that are kept.
_TIME, _NUMBER, _BITS, _ID, _FIELDS = range(5)


class Answer(NamedTuple):
    """Whether a row completes the steps.

    Attributes:
        begins: The sort key of the first row that each step took, or with `take: once` of each row that was taken; None if
            the row does not complete the steps.
        has_failed: Whether the last condition has an error for the row.
    """

    begins: list[SortKey] | None
    has_failed: bool


class Arrival(NamedTuple):
    """A row that arrives.

    Attributes:
        row: The row.
        at: The position of its event.
        place: Its position among all rows (see `KeyedBatch.order`).
        may_complete: Whether it may complete the steps.
        answer: Whether it does if no alert resets its key; None if it does not.
    """

    row: Row
    at: int
    place: int
    may_complete: bool
    answer: Answer | None


class KeyedBatch:
    """The rows of the keys to process: those in state, then those of the batch in order of arrival.

    All arrays of rows have shape (rows,).

    Attributes:
        keys: The keys of the events, by number, then further keys that are due.
        numbers: The number of each row's key.
        times: The time of each row.
        order: The order of the rows by (key, time, arrival).
        rows: The rows in this order.
        states: The states of keys that have more than rows, by number.
    """

    def __init__(self, rule_run: RuleRun, steps: Steps, events: KeyedEvents) -> None:
        self._rule_run, self._steps, self._events, self._fields = rule_run, steps, events, steps.compiled.kept
        self._positions = positions = events.positions
        self._table, distinct = rule_run.state.table(rule_run.rule.store), events.distinct
        due = self._table.find_due(rule_run.timeline.end)
        numbers_due = find_keys(due, distinct)
        others = np.flatnonzero(numbers_due < 0)
        numbers_due[others] = len(distinct) + np.arange(len(others))
        own = events.numbers
        self.keys = Keys.concat([distinct, due.take(others)])
        wanted = np.unique(np.append(own, numbers_due))
        self._found = self._table.find_rows(self.keys.take(wanted))
        # The keys with rows in columns, the keys with another kind of value, and the rows of both.
        self._in_columns, self._by_value = wanted[self._found.places], wanted[self._found.others]
        self._stored, numbers = self._read_state()
        self._count = len(numbers)
        self.numbers: Int64s = np.append(numbers, own)
        self.times = np.append(self._stored.values[_TIME], rule_run.events.times[positions])
        self._bits = np.append(self._stored.values[_BITS], events.bits)
        self.order = order_by_group(self.numbers, self.times)
        # Rows that arrive are numbered from the next number of their key.
        nexts = np.zeros(len(self.keys), dtype=np.int64)
        np.maximum.at(nexts, numbers, self._stored.values[_NUMBER] + 1)
        nexts[list(self.states)] = [state.next for state in self.states.values()]
        self._row_numbers = nexts[own] + count_earlier(own)
        at = self.order
        self.rows = KeyedRows(
            self.numbers[at],
            self.times[at],
            self._bits[at],
            np.append(self._stored.values[_NUMBER], self._row_numbers)[at],
            lambda name, places: self._read_field(name, at[places]),
        )
        self._followed: dict[int, KeyState] = {}

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
        types, id_type = self._steps.fields, self._rule_run.events.id_column.type
        columns = [from_values(BIGINT, [row[at] for row in rows]) for at in (0, 4, 2)]
        columns.append(from_values(id_type, [int(row.id) if id_type.is_integer else row.id for row in rows]))
        columns += [from_values(types[name], [row.values[at] for row in rows]) for at, name in enumerate(self._fields)]
        return KeyColumns.from_columns(columns)

    def find_rows(self, mask: Mask, bit: int) -> Int64s:
        """Returns the positions among all rows of those of the marked events that satisfy a condition, by its bit."""
        is_found = mask[self._positions] & (self._events.bits >> bit & 1 > 0)
        return np.flatnonzero(np.append(np.zeros(self._count, dtype=bool), is_found)[self.order])

    def _read_field(self, name: str, at: Int64s) -> list[Any]:
        """Reads the values of a kept field for the rows at these positions."""
        is_stored, column = at < self._count, self._steps.read_kept(name)
        values = column.to_stored_list(self._positions[at[~is_stored] - self._count])
        if is_stored.any():
            of_state = iter(self._stored.list_column(_FIELDS + self._fields.index(name), at[is_stored]))
            of_batch = iter(values)
            values = [next(of_state) if is_there else next(of_batch) for is_there in is_stored.tolist()]
        return values

    def _make_rows(self, at: Int64s) -> list[Row]:
        """Makes rows; rows in state come first in `at`."""
        split = int(np.searchsorted(at, self._count))
        of_state, of_batch = self._stored.take(at[:split]), self._select_events(at[split:] - self._count)
        made = list[Row]()
        for columns in (each for each in (of_state, of_batch) if len(each)):
            listed = [columns.list_column(column, slice(None)) for column in range(len(columns.values))]
            values = map(list, zip(*listed[_FIELDS:], strict=True)) if self._fields else ([] for _ in listed[_TIME])
            made += map(Row, listed[_TIME], map(str, listed[_ID]), listed[_BITS], values, listed[_NUMBER])
        return made

    def _select_events(self, at: Int64s) -> KeyColumns:
        """Returns the rows of the batch at these places, as columns."""
        events, positions = self._rule_run.events, self._positions[at]
        fields = KeyColumns.from_columns([events.id_column, *map(self._steps.read_kept, self._fields)], positions)
        times, bits = self.times[self._count + at], self._bits[self._count + at]
        return KeyColumns([times, self._row_numbers[at], bits, *fields.values], [None, None, None, *fields.nulls])

    def find_positions(self, places: Int64s) -> Int64s:
        """Returns the positions of the events of rows of the batch, given their positions among all rows."""
        return self._positions[self.order[places] - self._count]

    def find_sort_keys(self, places: Int64s) -> list[list[SortKey]]:
        """Returns the sort keys of rows at positions of shape (rows, steps)."""
        keys = zip(self.rows.times[places].tolist(), self.rows.numbers[places].tolist(), strict=True)
        return [list(zip(*each, strict=True)) for each in keys]

    def list_judged(
        self, is_needed: Mask, candidates: Int64s, is_followed: Mask, answers: Mapping[int, Answer]
    ) -> Iterator[tuple[Key, KeyState, list[Arrival]]]:
        """Yields each key to judge with its state and its needed rows of the batch.

        These are the keys that are followed or have needed rows in the batch. If a key is not followed, its state only
        has the rows that are needed. `is_needed` marks rows among all rows.
        """
        at = np.sort(self.order[is_needed])
        made, order = self._make_rows(at), order_by_number(self.numbers[at]) if len(at) else at
        made, at = [made[each] for each in order.tolist()], at[order]
        parts = {number: (start, end) for number, start, end in _find_parts(self.numbers[at])}
        places = np.empty(len(self.order), dtype=np.int64)
        places[self.order] = np.arange(len(self.order))
        may_complete = np.zeros(len(self.order), dtype=bool)
        may_complete[candidates] = True
        positions, own = np.append(np.full(self._count, -1), self._positions)[at], places[at]
        answered = map(answers.get, own.tolist())
        arrivals = list(map(Arrival, made, positions.tolist(), own.tolist(), may_complete[own].tolist(), answered))
        indexes = at.tolist()
        followed = np.flatnonzero(is_followed)
        own = followed[followed < len(self._events.distinct)]
        # A key that is due without an event either has no waits, or its state has the values of its fields.
        stored_keys = self._events.list_stored_keys(own)
        fields: dict[int, list[Any]] = {number: [] for number in followed.tolist()}
        fields |= zip(own.tolist(), stored_keys, strict=True)
        for number in {**parts, **fields}:
            start, end = parts.get(number, (0, 0))
            # Rows in state come first.
            split = bisect_left(indexes, self._count, start, end)
            if split == end and number not in fields:
                continue
            state = self.states.get(number)
            if state is None:
                state = KeyState([], made[start:split])
                state.next = max((row.number + 1 for row in state.rows), default=0)
            if number in fields:
                self._followed[number] = state
                state.stored_key = state.stored_key or fields[number]
            yield self.keys.pair(number), state, arrivals[split:end]

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

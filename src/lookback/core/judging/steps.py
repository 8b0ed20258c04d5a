"""The conditions of a sequence: which steps an event may satisfy, and what a step took that reads earlier steps.

    row      a1   a2   b1   a3   b2       steps: a, then b with the same number as the first a
    n        1    2    1    2    2
    bits     a    a    b    a    b        the part of a condition that reads the event alone is its gate
    b after a1         b                  LinkedStep evaluates the whole condition on rows that satisfy the gate

A linked step is one whose condition reads earlier steps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from lookback.core.expressions.compiling import Expression
from lookback.core.judging.rulerun import RuleRun
from lookback.core.judging.taken import ArrayPart, Row, RowRange, SortKey, TakenRows
from lookback.core.rules.compiled import COUNT, CompiledStep
from lookback.core.streams.events import Events
from lookback.core.values.columns import Column, Mask, from_values, make_objects, to_python
from lookback.core.values.keys import Int64s
from lookback.core.values.types import BIGINT, BOOLEAN, array

# How many rows a linked step evaluates at once.
_MAX_ROWS = 1024
# The rows that a step took, in order, as conditions, messages and evidence read them.
Taken: TypeAlias = "TakenRows | RowRange | LinkedRows"


class Steps:
    """The conditions of a sequence, evaluated on rows.

    Attributes:
        last: The bit of the last step; earlier steps have the lower bits.
        absent: The bit of the absence.
        until: The bit of `until`.
    """

    def __init__(self, rule_run: RuleRun) -> None:
        assert rule_run.rule.sequence is not None
        self.compiled = rule_run.rule.sequence
        self.steps = self.compiled.steps
        memberships, self._events = rule_run.rule.memberships, rule_run.events
        # By name of an in_list call, the name under which rows keep its errors.
        self._errors = {each.name: each.error_name for each in memberships if each.error_name}
        looked_up = [*(each.name for each in memberships), *self._errors.values()]
        # The types of what rows may keep of an event: its fields, and the results and errors of list lookups.
        self.fields = {**rule_run.stream.fields, **dict.fromkeys(looked_up, BOOLEAN)}
        # The position of each field among the values of a row.
        self._kept = {name: at for at, name in enumerate(self.compiled.kept)}
        self.numbers = {step.step.name: at for at, step in enumerate(self.steps)}
        self.last, self.absent, self.until = len(self.steps) - 1, len(self.steps), len(self.steps) + 1

    def find_bits(self, events: Events) -> tuple[Int64s, Mask]:
        """Finds the conditions that each event may satisfy, and marks events with an error in a gate."""
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

    def find_taken(self, number: int, rows: Sequence[Row], taken: Sequence[Taken]) -> list[bool]:
        """Marks the rows that a step takes, given the rows that the earlier steps took."""
        return self._evaluate(self.steps[number], number, [(row, taken) for row in rows])

    def find_ended(self, row: Row, waits: Sequence[Sequence[Taken]]) -> list[bool]:
        """Marks the waits that a row ends as the awaited event, given the rows that the steps of each wait took."""
        assert self.compiled.absent is not None
        return self._evaluate(self.compiled.absent, self.absent, [(row, taken) for taken in waits])

    def is_taken(self, number: int, row: Row, taken: Sequence[Taken]) -> bool | None:
        """Returns whether a linked step takes a row that satisfies its gate; None if its condition has an error."""
        value = self._read_condition(self.steps[number], [(row, taken)])
        return None if value.error is not None and value.error[0] else bool(value.is_true()[0])

    def _evaluate(self, step: CompiledStep, bit: int, pairs: Sequence[tuple[Row, Sequence[Taken]]]) -> list[bool]:
        able = [bool(row.bits >> bit & 1) for row, _ in pairs]
        if step.own or not any(able):
            return able
        seen = [pair for pair, is_able in zip(pairs, able, strict=True) if is_able]
        holds = iter(self._read_condition(step, seen).is_true().tolist())
        return [is_able and next(holds) for is_able in able]

    def _read_condition(self, step: CompiledStep, seen: Sequence[tuple[Row, Sequence[Taken]]]) -> Column:
        """Evaluates a condition for rows, each with the rows that the earlier steps took."""
        columns = {}
        for name in step.condition.fields:
            before, own = self.compiled.split_name(name)
            if not before:
                columns[name] = self.make_column(name, lambda each: [row.values[self._kept[each]] for row, _ in seen])
                continue
            of_step = [taken[self.numbers[before]] for _, taken in seen]
            if own == COUNT:
                columns[name] = Column(BIGINT, np.array([len(rows) for rows in of_step], dtype=np.int64))
                continue
            parts = [rows.part(self._kept[own], len(rows)) for rows in of_step]
            columns[name] = Column(array(self.fields[own]), make_objects(parts))
        return step.condition.evaluate(columns, len(seen))

    def read_kept(self, name: str) -> Column:
        """Returns the values of the segment's events under a name of `fields`."""
        for call, error_name in self._errors.items():
            if error_name == name:
                error = self._events.columns[call].error
                return Column(BOOLEAN, np.zeros(len(self._events), dtype=bool) if error is None else error)
        return self._events.columns[name]

    def make_column(self, name: str, read: Callable[[str], list[Any]]) -> Column:
        """Makes the column of a field or in_list call, with its errors; `read` returns what rows keep under a name."""
        column, error = from_values(self.fields[name], read(name)), self._errors.get(name)
        return column if error is None else replace(column, error=from_values(BOOLEAN, read(error)).values)

    def message_values(self, names: Sequence[str], row: Row, taken: Sequence[Sequence[Row]]) -> dict[str, Any]:
        """Returns the values of names in a message: fields of the row, or arrays and counts of the steps' rows."""
        values: dict[str, Any] = {}
        for name in names:
            before, own = self.compiled.split_name(name)
            if before and own == COUNT:
                values[name] = len(taken[self.numbers[before]])
            elif before:
                at, type_ = self._kept[own], array(self.fields[own])
                values[name] = to_python(type_, [each.values[at] for each in taken[self.numbers[before]]])
            else:
                value = row.values[self._kept[name]]
                values[name] = None if value is None else to_python(self.fields[name], value)
        return values


class Index:
    """Rows in order for each condition that they may satisfy."""

    def __init__(self, steps: Steps, rows: Sequence[Row]) -> None:
        self.rows = [TakenRows() for _ in range(steps.until + 1)]
        self.sort_keys: list[list[SortKey]] = [[] for _ in self.rows]
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        """Adds a row."""
        key, bits = row.sort_key, row.bits
        for condition, sort_keys in enumerate(self.sort_keys):
            if not bits >> condition & 1:
                continue
            if not sort_keys or sort_keys[-1] < key:
                sort_keys.append(key)
                self.rows[condition].append(row)
            else:
                at = bisect_left(sort_keys, key)
                sort_keys.insert(at, key)
                self.rows[condition].put_in(at, row)

    def find_places(self, condition: int, low: SortKey, high: SortKey) -> tuple[int, int]:
        """Finds the places of the rows in [low, high) among those that may satisfy a condition."""
        sort_keys = self.sort_keys[condition]
        return bisect_left(sort_keys, low), bisect_left(sort_keys, high)

    def iterate(self, condition: int, low: SortKey, high: SortKey) -> Iterator[Row]:
        """Yields the rows in [low, high) that may satisfy a condition."""
        rows, sort_keys = self.rows[condition], self.sort_keys[condition]
        return (rows[at] for at in range(bisect_left(sort_keys, low), bisect_left(sort_keys, high)))


class LinkedStep:
    """The events that a step takes whose condition reads earlier steps, found lazily.

    `rows` are those that the step may take, in order, and count from `begin` on. `before` are the rows that the earlier
    steps took.
    """

    def __init__(self, steps: Steps, at: int, before: Sequence[Taken], rows: TakenRows, begin: int) -> None:
        self._steps, self._at, self._before = steps, at, before
        self._rows, self._next = rows, begin
        self.taken = TakenRows()
        # The places of the rows that the step took.
        self._places: list[int] = []

    def count_taken(self, end: int, most: int | None = None) -> int:
        """Counts the rows before the place `end` that the step took, up to `most`."""
        while self._next < end and (most is None or len(self._places) < most):
            some = self._rows[self._next : min(end, self._next + _MAX_ROWS if most is None else self._next + most)]
            are_taken = self._steps.find_taken(self._at, some, self._before)
            self._places += [at for at, is_taken in enumerate(are_taken, self._next) if is_taken]
            self.taken.extend(row for row, is_taken in zip(some, are_taken, strict=True) if is_taken)
            self._next += len(some)
        return bisect_left(self._places, end)


class LinkedRows(Sequence[Row]):
    """A view, like `RowRange`, of the rows before the place `end` that a linked step took."""

    def __init__(self, step: LinkedStep, end: int) -> None:
        self._step, self._end = step, end

    def __len__(self) -> int:
        return self._step.count_taken(self._end)

    def __getitem__(self, at: Any) -> Any:
        last = at.stop if isinstance(at, slice) else at
        most = last + (not isinstance(at, slice)) if last is not None and last >= 0 else None
        return self._step.taken[: self._step.count_taken(self._end, most)][at]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._step.taken[: len(self)])

    def part(self, at: int, count: int) -> ArrayPart:
        """Returns the values of a field over the first `count` rows; `at` is its position among the values of a row."""
        self._step.count_taken(self._end, count)
        return self._step.taken.part(at, count)

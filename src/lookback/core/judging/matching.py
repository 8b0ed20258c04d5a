"""Matches the rows of a key, in order, against the steps of a sequence."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from lookback.core.expressions.compiling import Expression
from lookback.core.judging.segment import RuleRun
from lookback.core.rules.compiled import COUNT, CompiledStep
from lookback.core.streams.events import Events
from lookback.core.values.columns import Column, Mask, Values, from_values, is_nan, replace_nan, to_python
from lookback.core.values.keys import Int64s, TimeSearch
from lookback.core.values.types import BIGINT, BOOLEAN, array

# The time and number of a row; rows and waits are sorted by it.
SortKey = tuple[int, int]
# How many rows to offer at first, because a step may end soon; doubles each time, up to the second number.
_FIRST_ROWS, _MAX_ROWS = 16, 1024
# Up to this many values are searched one by one; for more, an index of places is used.
_MAX_SEARCHED = 64


class Row(NamedTuple):
    """An event that may satisfy some condition.

    Attributes:
        time: The event time.
        id: The id of the event.
        bits: The conditions that it may satisfy.
        values: The values of the fields that are kept.
        number: The number of the row in its key, in order of arrival.
    """

    time: int
    id: str
    bits: int
    values: list[Any]
    number: int

    @property
    def sort_key(self) -> SortKey:
        """Its place among the rows of its key."""
        return self.time, self.number


class Placed(Protocol):
    """Anything with a place among the rows of a key: a row, or a wait that a row starts."""

    @property
    def time(self) -> int:
        """The time of the row, in microseconds."""

    @property
    def number(self) -> int:
        """The number of the row."""


def sort_key(each: Placed) -> SortKey:
    """Returns the sort key of a row, or of the row that starts a wait."""
    return each.time, each.number


class Array:
    """The values of a field over rows, in order."""

    def __init__(self, values: Iterable[Any] = ()) -> None:
        self.values: list[Any] = list(values)
        # The places of each value among the first `_indexed` values.
        self._places: dict[Any, list[int]] = {}
        self._indexed = 0
        # For each place, the last place up to which all values are the same; empty until needed.
        self._same: list[int] = []

    def extend(self, values: Iterable[Any]) -> None:
        """Adds values at the end."""
        self.values.extend(values)
        self._same = []

    def cut(self, count: int) -> None:
        """Keeps the first `count` values."""
        for value in reversed(self.values[count : self._indexed]):
            self._places[replace_nan(value)].pop()
        self._indexed = min(self._indexed, count)
        del self.values[count:]
        self._same = []

    def find_first(self, value: Any, begin: int, end: int) -> int | None:
        """Finds the first place of a value in [begin, end)."""
        if end - begin <= _MAX_SEARCHED and not is_nan(value):
            part = self.values[begin:end]
            return begin + part.index(value) if value in part else None
        places = self._find_places(value)
        at = bisect_left(places, begin)
        return places[at] if at < len(places) and places[at] < end else None

    def find_last(self, value: Any, begin: int, end: int) -> int | None:
        """Finds the last place of a value in [begin, end)."""
        places = self._find_places(value)
        at = bisect_left(places, end) - 1
        return places[at] if at >= 0 and places[at] >= begin else None

    def find_same(self, place: int) -> int:
        """Finds the last place up to which all values equal the value at a place."""
        if not self._same:
            values, last = self.values, len(self.values) - 1
            self._same = [last] * len(values)
            for at in range(last - 1, -1, -1):
                self._same[at] = self._same[at + 1] if values[at] == values[at + 1] else at
        return self._same[place]

    def _find_places(self, value: Any) -> list[int]:
        for at in range(self._indexed, len(self.values)):
            self._places.setdefault(replace_nan(self.values[at]), []).append(at)
        self._indexed = len(self.values)
        return self._places.get(replace_nan(value), [])


class Part(Sequence[Any]):
    """A view of the values of an array in [begin, end), with a fast test for a value."""

    __slots__ = ("_array", "_begin", "_end")

    def __init__(self, array: Array, begin: int, end: int) -> None:
        self._array, self._begin, self._end = array, begin, end

    def __len__(self) -> int:
        return self._end - self._begin

    def __getitem__(self, at: Any) -> Any:
        place = at + (self._end if at < 0 else self._begin)
        if not self._begin <= place < self._end:
            raise IndexError(at)
        return self._array.values[place]

    def __contains__(self, value: object) -> bool:
        return self._array.find_first(value, self._begin, self._end) is not None

    def __iter__(self) -> Iterator[Any]:
        return iter(self._array.values[self._begin : self._end])


class TakenRows(list[Row]):
    """Rows in order, with the arrays of their fields that conditions read."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        super().__init__(rows)
        self._arrays: dict[int, Array] = {}

    def array(self, at: int) -> Array:
        """Returns the array of a field; `at` is its position among the values of a row."""
        found = self._arrays.setdefault(at, Array())
        if len(found.values) < len(self):
            found.extend([row.values[at] for row in self[len(found.values) :]])
        return found

    def part(self, at: int, count: int) -> Part:
        """Returns the values of a field over the first `count` rows."""
        return Part(self.array(at), 0, count)

    def put_in(self, at: int, row: Row) -> None:
        """Inserts a row at a place."""
        self._arrays.clear()
        self.insert(at, row)

    def cut(self, count: int) -> None:
        """Keeps the first `count` rows."""
        for each in self._arrays.values():
            each.cut(count)
        del self[count:]


# The rows that a step took, in order, as conditions, messages and evidence read them.
Taken: TypeAlias = "TakenRows | RowRange | LinkedRows"


class Evaluation(NamedTuple):
    """A condition to evaluate on rows.

    Attributes:
        step: The step with the condition.
        rows: The rows.
        taken: The rows of the earlier steps.
        counts: How many rows of the previous step each row sees; None for all.
    """

    step: CompiledStep
    rows: Sequence[Row]
    taken: Sequence[Taken]
    counts: Sequence[int] | None = None


# For each row, whether the condition holds, and whether it has an error; None if no row has one.
Evaluated = tuple[list[bool], list[bool] | None]
_Result = TypeVar("_Result")
# A computation yields conditions and is sent their results, so that many keys and matches are evaluated together.
Computation = Generator[list[Evaluation], list[Evaluated], _Result]


def run_side_by_side(computations: Iterable[Computation[None]]) -> Computation[None]:
    """Runs several computations as one."""
    going = [(each, handed) for each in computations if (handed := next(each, None)) is not None]
    while going:
        values = iter((yield [evaluation for _, handed in going for evaluation in handed]))
        sent = [(each, _send(each, list(islice(values, len(handed))))) for each, handed in going]
        going = [(each, handed) for each, handed in sent if handed is not None]


def _send(computation: Computation[None], values: list[Evaluated]) -> list[Evaluation] | None:
    try:
        return computation.send(values)
    except StopIteration:
        return None


@dataclass(frozen=True)
class KeyedRows:
    """Rows of many keys by (key, time, arrival); all arrays have shape (rows,).

    Attributes:
        keys: The number of each row's key, dense.
        times: The time of each row.
        bits: The conditions that each row may satisfy.
        arrivals: The position of each row in order of arrival.
        read: Reads a field of the rows at positions in order of arrival.
    """

    keys: Int64s
    times: Int64s
    bits: Int64s
    arrivals: Int64s
    read: Callable[[str, Int64s], list[Any]]

    @cached_property
    def is_in_order(self) -> Mask:
        """Marks the rows that arrived after all earlier rows of their key."""
        arrived = self.keys * (int(self.arrivals.max(initial=0)) + 1) + self.arrivals
        is_in_order: Mask = np.maximum.accumulate(arrived) == arrived
        return is_in_order

    def take(self, index: Int64s) -> KeyedRows:
        """Returns the rows at ascending positions."""
        _, keys = np.unique(self.keys[index], return_inverse=True)
        return KeyedRows(keys, self.times[index], self.bits[index], self.arrivals[index], self.read)

    def number_stretches(self) -> Int64s:
        """Numbers the stretches of each key from 0; a stretch is a run of rows that arrived in order of time."""
        arrived = np.lexsort((self.arrivals, self.keys))
        begun = np.cumsum(np.diff(arrived, prepend=-1) < 0)
        stretches = np.empty(len(arrived), dtype=np.int64)
        stretches[arrived] = begun
        # Keys ascend, so the first row of the next key continues the last stretch of the previous key.
        return stretches - begun[np.searchsorted(self.keys, self.keys)]


@dataclass(frozen=True)
class Candidates:
    """Rows that may complete the steps; all arrays but `able` have shape (candidates,).

    Attributes:
        at: The positions of the candidates.
        starts: The position of the first row that may count for each.
        able: For each step, the positions of the rows that satisfy its gate.
        first: For each step, the place in `able` of the row with which the step is reached.
    """

    at: Int64s
    starts: Int64s
    able: list[Int64s]
    first: list[Int64s]

    def take(self, index: Mask | Int64s) -> Candidates:
        """Returns the candidates at positions or of a mask."""
        return Candidates(self.at[index], self.starts[index], self.able, [each[index] for each in self.first])

    @property
    def needed(self) -> Int64s:
        """The positions of the rows that may count for a candidate."""
        return list_between(self.starts, self.at)


def list_between(first: Int64s, last: Int64s) -> Int64s:
    """Lists the positions in any of the ranges, ascending; `last` is inclusive."""
    rows = int(last.max(initial=-1)) + 1
    edges = np.bincount(first, minlength=rows + 1) - np.bincount(last + 1, minlength=rows + 1)
    return np.flatnonzero(np.cumsum(edges) > 0)


class Steps:
    """The conditions of a sequence, evaluated on rows.

    Attributes:
        reads_event_alone: Whether no condition reads the rows that earlier steps took.
        last: The bit of the last step; earlier steps have the lower bits.
        absent: The bit of the absence.
        until: The bit of `until`.
    """

    def __init__(self, rule_run: RuleRun) -> None:
        assert rule_run.rule.sequence is not None
        self.compiled = rule_run.rule.sequence
        self.steps = self.compiled.steps
        self.reads_event_alone = all(step.own for step in self.steps)
        self.fields = rule_run.kept_types
        # The position of each field among the values of a row.
        self._kept = {name: at for at, name in enumerate(self.compiled.kept)}
        self._errors = rule_run.kept_errors
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

    def find_taken(
        self, at: int, rows: Sequence[Row], taken: Sequence[Taken], counts: Sequence[int] | None = None
    ) -> Computation[Evaluated]:
        """Finds the rows that a step takes, and the rows for which its condition has an error.

        `taken` and `counts` are as in `Evaluation`.
        """
        step = self.steps[at]
        able = [bool(row.bits >> at & 1) for row in rows]
        if step.own or not any(able):
            return able, None
        seen = [n for n, is_able in enumerate(able) if is_able]
        counted = None if counts is None else [counts[n] for n in seen]
        ((holds, errors),) = yield [Evaluation(step, [rows[n] for n in seen], taken, counted)]
        for n, does_hold in zip(seen, holds, strict=True):
            able[n] = does_hold
        if errors is None:
            return able, None
        failed = [False] * len(rows)
        for n, is_error in zip(seen, errors, strict=True):
            failed[n] = is_error
        return able, failed

    def find_ended(self, row: Row, waits: Sequence[Sequence[Taken]]) -> list[bool]:
        """Marks the waits that a row ends as the awaited event, given the rows that the steps of each wait took."""
        absent = self.compiled.absent
        assert absent is not None
        if absent.own or not row.bits >> self.absent & 1 or not waits:
            return [row.bits >> self.absent & 1 > 0] * len(waits)
        return [holds for (holds,), _ in self.evaluate([Evaluation(absent, [row], taken) for taken in waits])]

    def run(self, computation: Computation[_Result]) -> _Result:
        """Runs a computation; conditions of the same step that it yields together are evaluated together."""
        try:
            handed = next(computation)
            while True:
                values: list[Any] = [None] * len(handed)
                by_step: dict[int, list[int]] = {}
                for at, evaluation in enumerate(handed):
                    by_step.setdefault(id(evaluation.step), []).append(at)
                for listed in by_step.values():
                    for at, evaluated in zip(listed, self.evaluate([handed[at] for at in listed]), strict=True):
                        values[at] = evaluated
                handed = computation.send(values)
        except StopIteration as end:
            result: _Result = end.value
            return result

    def evaluate(self, evaluations: Sequence[Evaluation]) -> list[Evaluated]:
        """Evaluates the condition of one step for several computations at once."""
        condition = evaluations[0].step.condition
        rows = [row for each in evaluations for row in each.rows]
        columns = {}
        for name in condition.fields:
            before, _, own = name.partition(".")
            if not own:
                columns[name] = self.make_column(name, lambda each: [row.values[self._kept[each]] for row in rows])
                continue
            number = self.numbers[before]
            lengths = [_find_lengths(each, number) for each in evaluations]
            if own == COUNT:
                columns[name] = Column(BIGINT, np.array([n for each in lengths for n in each], dtype=np.int64))
                continue
            at, parts = self._kept[own], list[Part]()
            for each, listed in zip(evaluations, lengths, strict=True):
                taken = each.taken[number]
                if listed and listed[0] == listed[-1]:
                    # The lengths never decrease from row to row.
                    parts += [taken.part(at, listed[0])] * len(listed)
                else:
                    parts += [taken.part(at, n) for n in listed]
            columns[name] = Column(array(self.fields[own]), to_objects(parts))
        result = condition.evaluate(columns, len(rows))
        holds = result.is_true().tolist()
        errors = None if result.error is None or not result.error.any() else result.error.tolist()
        found, start = list[Evaluated](), 0
        for each in evaluations:
            end = start + len(each.rows)
            found.append((holds[start:end], None if errors is None else errors[start:end]))
            start = end
        return found

    def make_column(self, name: str, read: Callable[[str], list[Any]]) -> Column:
        """Makes the column of a field or in_list call, with its errors; `read` returns what rows keep under a name."""
        column, error = from_values(self.fields[name], read(name)), self._errors.get(name)
        return column if error is None else replace(column, error=from_values(BOOLEAN, read(error)).values)

    def message_values(self, names: Sequence[str], row: Row, taken: Sequence[Sequence[Row]]) -> dict[str, Any]:
        """Returns the values of names in a message: fields of the row, or arrays and counts of the steps' rows."""
        values: dict[str, Any] = {}
        for name in names:
            before, _, own = name.partition(".")
            if own == COUNT:
                values[name] = len(taken[self.numbers[before]])
            elif own:
                at, type_ = self._kept[own], array(self.fields[own])
                values[name] = to_python(type_, [each.values[at] for each in taken[self.numbers[before]]])
            else:
                value = row.values[self._kept[name]]
                values[name] = None if value is None else to_python(self.fields[name], value)
        return values


def to_objects(parts: Sequence[Sequence[Any]]) -> Values:
    """Makes the values of a column of arrays."""
    # If a list were assigned, numpy would read the length of each part.
    return np.fromiter(parts, dtype=object, count=len(parts))


def _find_lengths(evaluation: Evaluation, number: int) -> Sequence[int]:
    """Returns, for each row of an evaluation, how many rows of an earlier step it sees."""
    if evaluation.counts is None or number < len(evaluation.taken) - 1:
        return [len(evaluation.taken[number])] * len(evaluation.rows)
    return evaluation.counts


def find_candidates(
    steps: Steps, rows: KeyedRows, judged: Int64s, within: int, floor: int | None, until_ends: bool
) -> Candidates:
    """Finds all rows that may complete the steps or may have an error in the last condition.

    It uses the gates instead of the conditions, and counts every row of the window no matter when it arrived. So no
    step is reached later than it really is, and no candidate is missed.

    Args:
        steps: The steps.
        rows: The rows.
        judged: The positions of the rows that satisfy the last gate.
        within: The span in microseconds within which the steps must be completed.
        floor: The time below which no row counts; None for no limit.
        until_ends: Whether a row that satisfies `until` and has arrived excludes all rows before it.
    """
    first = rows.times[judged] - within if floor is None else np.maximum(rows.times[judged] - within, floor)
    lows = TimeSearch(rows.keys, rows.times).find_first(rows.keys[judged], first)
    found = Candidates(judged, lows, [], [])
    untils = np.flatnonzero(rows.bits >> steps.until & 1)
    if until_ends and len(untils):
        before = np.searchsorted(untils, judged) - 1
        last = np.where(before >= 0, untils[before], -1)
        is_cut = (last >= lows) & (rows.arrivals[last] < rows.arrivals[judged])
        found = replace(found, starts=np.where(is_cut, last, lows))
        lows = np.where(is_cut, last + 1, lows)
    for number, each in enumerate(steps.steps):
        able = np.flatnonzero(rows.bits >> number & 1)
        first = np.searchsorted(able, lows)
        # An error in the last condition counts even if too few rows satisfy it.
        least = each.step.at_least if each.own or number < steps.last else 1
        enough = np.append(able, len(rows.keys))[np.minimum(first + least - 1, len(able))]
        may = enough <= found.at
        found = replace(found, able=[*found.able, able], first=[*found.first, first]).take(may)
        lows = enough[may] + 1
    return found


class Match:
    """The rows that the steps take among the rows of a key, from a first row of step one.

    Rows are offered in order, possibly before they are judged if they are already known. A row that arrives out of
    order rewinds the match to its place.

    Attributes:
        begin: The sort key of the first row.
        since: Rows with a lower number do not count.
        rows: The rows that each step took, up to the last step that is reached.
        next: All rows before this sort key have been offered.
        offered: How many rows have been offered, with repetitions.
    """

    def __init__(self, steps: Steps, begin: SortKey, since: int) -> None:
        self._steps, self.begin, self.since = steps, begin, since
        self.rows = [TakenRows()]
        self.next, self.offered = begin, 0
        # The sort key of the row with which a step took too many, and of the rows with an error in the last condition.
        self._ended: SortKey | None = None
        self._failed: set[SortKey] = set()

    def rewind(self, key: SortKey) -> None:
        """Rewinds the match to the state before any row from this sort key on was offered."""
        if not self.begin <= key < self.next:
            return
        for rows in self.rows:
            rows.cut(bisect_left(rows, key, key=sort_key))
        while len(self.rows) > 1 and not self.rows[-1]:
            del self.rows[-1]
        if self._ended is not None and self._ended >= key:
            self._ended = None
        self._failed = {each for each in self._failed if each < key}
        self.next = key

    def offer(self, rows: Sequence[Row]) -> Computation[None]:
        """Offers the next rows."""
        start, size = 0, _FIRST_ROWS
        while start < len(rows) and self._ended is None:
            start += yield from self._offer_some(rows[start : start + size])
            size = min(2 * size, _MAX_ROWS)
        if rows:
            time, number = rows[-1].sort_key
            self.next = time, number + 1
            self.offered += len(rows)

    def has_failed(self, row: Row) -> bool:
        """Returns whether the last step's condition has an error for a row that was offered."""
        key = row.sort_key
        return key in self._failed and (self._ended is None or key <= self._ended)

    def find_taken(self, row: Row) -> list[Taken] | None:
        """Finds the rows that each step took up to an offered row; None if this row does not complete the steps."""
        last, key = self.rows[-1], row.sort_key
        if len(self.rows) <= self._steps.last or (self._ended is not None and self._ended <= key):
            return None
        at = bisect_left(last, key, key=sort_key)
        if at + 1 < self._steps.steps[-1].step.at_least or at == len(last) or last[at].number != row.number:
            return None
        return [*self.rows[:-1], RowRange(last, 0, at + 1)]

    def _offer_some(self, rows: Sequence[Row]) -> Computation[int]:
        """Offers rows until the next step takes one. Returns how many were offered."""
        steps, at, listed = self._steps, len(self.rows) - 1, self.rows[-1]
        takes, errors = yield from steps.find_taken(at, rows, self.rows[:-1])
        counts, count = [], len(listed)
        for is_taken in takes:
            counts.append(count)
            count += is_taken
        listed.extend(row for row, is_taken in zip(rows, takes, strict=True) if is_taken)
        moved, spec, judged = None, steps.steps[at].step, rows
        if at < steps.last:
            enough = bisect_left(counts, spec.at_least)
            # The step sees the rows that the previous step had taken when the row arrived.
            judged = rows[enough:]
            nexts, errors = yield from steps.find_taken(at + 1, judged, self.rows, counts[enough:])
            if True in nexts:
                moved = enough + nexts.index(True)
                count = counts[moved]
                listed.cut(count)
                judged = rows[enough : moved + 1]
        if errors is not None and at >= steps.last - 1:
            self._failed.update(row.sort_key for row, is_error in zip(judged, errors, strict=False) if is_error)
        if spec.at_most is not None and count > spec.at_most:
            self._ended = listed[spec.at_most].sort_key
        elif moved is not None:
            self.rows.append(TakenRows([rows[moved]]))
        return len(rows) if moved is None else moved + 1


class Index:
    """Rows in order for each condition that they may satisfy, so that finding a step's row takes one search."""

    def __init__(self, steps: Steps, rows: Sequence[Row]) -> None:
        self._steps = steps
        self.rows = [TakenRows() for _ in range(steps.until + 1)]
        self.sort_keys: list[list[SortKey]] = [[] for _ in self.rows]
        self._least = steps.steps[-1].step.at_least
        specs = [each.step for each in steps.steps]
        self._limits = [(number, step.at_most) for number, step in enumerate(specs) if step.at_most is not None]
        # The last result of `_find_spans`.
        self._spans: list[tuple[int, int]] | None = None
        for row in rows:
            for condition, listed in enumerate(self.rows):
                if row.bits >> condition & 1:
                    listed.append(row)
                    self.sort_keys[condition].append(row.sort_key)

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
                at, self._spans = bisect_left(sort_keys, key), None
                sort_keys.insert(at, key)
                self.rows[condition].put_in(at, row)

    def find_first(self, condition: int, low: SortKey) -> SortKey | None:
        """Returns the sort key of the first row from `low` on that may satisfy a condition; None if there is none."""
        at = bisect_left(self.sort_keys[condition], low)
        return self.sort_keys[condition][at] if at < len(self.sort_keys[condition]) else None

    def find_places(self, condition: int, low: SortKey, high: SortKey) -> tuple[int, int]:
        """Finds the places of the rows in [low, high) among those that may satisfy a condition."""
        sort_keys = self.sort_keys[condition]
        return bisect_left(sort_keys, low), bisect_left(sort_keys, high)

    def iterate(self, condition: int, low: SortKey, high: SortKey) -> Iterator[Row]:
        """Yields the rows in [low, high) that may satisfy a condition."""
        rows, sort_keys = self.rows[condition], self.sort_keys[condition]
        return (rows[at] for at in range(bisect_left(sort_keys, low), bisect_left(sort_keys, high)))

    def find_taken(self, low: SortKey, last: SortKey, *, begins_first: bool = False) -> list[RowRange] | None:
        """Finds the rows in [low, last] that each step takes in the earliest match that the last row ends.

        This is for steps whose conditions only read the event. The last row must satisfy the gate of the last step.
        With `begins_first`, the match must begin with the first row of step one. Returns None without such a match.
        """
        at, sort_keys, least = bisect_left(self.sort_keys[0], low), self.sort_keys[self._steps.last], self._least
        end = len(sort_keys) if sort_keys[-1] <= last else bisect_right(sort_keys, last)
        while at < len(self.sort_keys[0]):
            if self._spans is None or self._spans[0][0] != at:
                self._spans = self._find_spans(at)
            if self._spans is None or self._spans[-1][0] >= end:
                # A later beginning reaches the last step no sooner.
                return None
            begin = self._spans[-1][0]
            if end - begin >= least and (not self._limits or self._are_few([*self._spans[:-1], (begin, end)])):
                before = [RowRange(rows, *span) for rows, span in zip(self.rows, self._spans[:-1], strict=False)]
                return [*before, RowRange(self.rows[self._steps.last], begin, end)]
            if begins_first or not self._limits:
                return None
            at += 1
        return None

    def _are_few(self, spans: Sequence[tuple[int, int]]) -> bool:
        return all(spans[number][1] - spans[number][0] <= most for number, most in self._limits)

    def _find_spans(self, at: int) -> list[tuple[int, int]] | None:
        """Finds the places that each step but the last takes, and where the last begins; None if a step is not reached.

        `at` is the place where step one begins. Rows that are appended at the end do not change the result.
        """
        spans: list[tuple[int, int]] = []
        for number, each in enumerate(self._steps.steps[:-1]):
            sort_keys, following = self.sort_keys[number], self.sort_keys[number + 1]
            enough = at + each.step.at_least - 1
            after = bisect_right(following, sort_keys[enough]) if enough < len(sort_keys) else len(following)
            if after == len(following):
                return None
            spans.append((at, bisect_left(sort_keys, following[after])))
            at = after
        return [*spans, (at, at)]


class RowRange(Sequence[Row]):
    """A view of the rows [begin, end) of a list; valid until the list changes."""

    def __init__(self, rows: TakenRows, begin: int, end: int) -> None:
        self._rows, self._begin, self._end = rows, begin, end

    def __len__(self) -> int:
        return self._end - self._begin

    def part(self, at: int, count: int) -> Part:
        """Returns the values of a field over the first `count` rows; `at` is its position among the values of a row."""
        return Part(self._rows.array(at), self._begin, self._begin + count)

    def __getitem__(self, at: Any) -> Any:
        if at == 0 and self._begin < self._end:
            return self._rows[self._begin]
        places = range(self._begin, self._end)[at]
        if isinstance(places, range):
            return (
                self._rows[places.start : places.stop : places.step]
                if places.step > 0
                else [self._rows[each] for each in places]
            )
        return self._rows[places]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows[self._begin : self._end])


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
            are_taken, _ = self._steps.run(self._steps.find_taken(self._at, some, self._before))
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

    def part(self, at: int, count: int) -> Part:
        """Returns the values of a field over the first `count` rows; `at` is its position among the values of a row."""
        self._step.count_taken(self._end, count)
        return self._step.taken.part(at, count)

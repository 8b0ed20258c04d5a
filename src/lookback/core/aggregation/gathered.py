"""Aggregates that need all values of a window at once: percentiles, the most frequent value, the set of values.

The contributions of runs to them cannot be merged, so the rows of all runs are gathered. One walk then goes over the
windows of each key, mostly in the order of arrival: a window takes in the rows that the window before it lacks, and gives
up those that it lacks itself. So windows that move forward visit each row twice, whatever their length; a visit is a
search in the sorted values of the window.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from lookback.core.aggregation.aggregate import Aggregate
from lookback.core.aggregation.distinct import STORED, GroupedRows
from lookback.core.aggregation.exact import Int64s, Partial
from lookback.core.values.columns import Column, Values, from_values, make_objects, normalize_zeros
from lookback.core.values.keys import TimeSearch, number_values
from lookback.core.values.types import DOUBLE, DataType, array

# The most values that collect_set returns.
MAX_COLLECTED = 100


# A tally is what is known of the values of one window. Values are given as ranks: equal values have one, the least has 0.


class SortedTally:
    """The ranks of all rows, ascending."""

    def __init__(self) -> None:
        self.ranks: list[int] = []

    def add(self, rank: int) -> None:
        """Takes a row in."""
        insort(self.ranks, rank)

    def remove(self, rank: int) -> None:
        """Gives a row up."""
        del self.ranks[bisect_left(self.ranks, rank)]


class CountedTally:
    """The different ranks by the number of their rows: `levels[n]` has those with n + 1 rows, ascending."""

    def __init__(self) -> None:
        self.levels: list[list[int]] = []
        self._counts: dict[int, int] = {}

    def add(self, rank: int) -> None:
        """Takes a row in."""
        self._move(rank, 1)

    def remove(self, rank: int) -> None:
        """Gives a row up."""
        self._move(rank, -1)

    def _move(self, rank: int, step: int) -> None:
        count = self._counts.pop(rank, 0)
        if count:
            level = self.levels[count - 1]
            del level[bisect_left(level, rank)]
        if count + step:
            self._counts[rank] = count + step
            if count + step > len(self.levels):
                self.levels.append([])
            insort(self.levels[count + step - 1], rank)
        while self.levels and not self.levels[-1]:
            self.levels.pop()


class SetTally:
    """The different ranks, ascending."""

    def __init__(self) -> None:
        self.ranks: list[int] = []
        self._counts: dict[int, int] = {}

    def add(self, rank: int) -> None:
        """Takes a row in."""
        count = self._counts.get(rank, 0)
        self._counts[rank] = count + 1
        if not count:
            insort(self.ranks, rank)

    def remove(self, rank: int) -> None:
        """Gives a row up."""
        count = self._counts.pop(rank)
        if count > 1:
            self._counts[rank] = count - 1
        else:
            del self.ranks[bisect_left(self.ranks, rank)]


class GatheredAggregate(Aggregate):
    """An aggregate over the gathered rows of a window.

    Its partial results are the values that it picks of each window as one object; they are never merged.
    """

    is_gathered = True
    tally: ClassVar[type[Any]]

    @abstractmethod
    def pick(self, tally: Any, values: Sequence[Any]) -> Any:
        """Picks of a tally what the result is made of; `values` has the value of each rank."""

    def build_index(self, values: Values) -> Any:
        """Returns the values."""
        return values

    def aggregate_ranges(self, index: Any, low: Int64s, high: Int64s) -> Partial:
        """Picks of the rows [low, high) of each window."""
        ranks, values = _rank_values(index)
        picked, tally, first, end = [], self.tally(), 0, 0
        for begin, until in zip(low.tolist(), high.tolist(), strict=True):
            # The ranges of a session grow by its events.
            if begin != first or until < end:
                tally, first, end = self.tally(), begin, begin
            for rank in ranks[end:until]:
                tally.add(rank)
            end = until
            picked.append(self.pick(tally, values))
        return (make_objects(picked),)

    def aggregate_windows(
        self, rows: GroupedRows, groups: Int64s, positions: Int64s, first: Int64s, last: Int64s
    ) -> Partial:
        """Picks of the rows of windows: of a group, from `first` to `last`, and arrived by a position in the batch."""
        ranks, values = _rank_values(rows.values)
        walk = _Walk(rows, ranks, int(groups.max(initial=-1)) + 1)
        low = walk.search.find_first(groups, first)
        high = np.maximum(low, walk.search.find_first(groups, last + 1))
        picked = [None] * len(groups)
        columns = (groups.tolist(), positions.tolist(), low.tolist(), high.tolist())
        for at in _order_windows(groups, positions, first).tolist():
            tally = walk.move_to(self.tally, *(column[at] for column in columns))
            picked[at] = self.pick(tally, values)
        return (make_objects(picked),)

    def merge(self, left: Partial, right: Partial) -> Partial:
        """Raises NotImplementedError: the rows of all runs are gathered before."""
        raise NotImplementedError(f"{type(self).__name__} is computed of gathered rows")


def _rank_values(values: Values) -> tuple[list[int], list[Any]]:
    """Returns the rank of each value, and the different values in ascending order; NaN is the greatest double."""
    codes, different = number_values(values)
    order = np.argsort(different, kind="stable")
    ranks = np.empty(len(order), dtype=np.int64)
    ranks[order] = np.arange(len(order))
    return ranks[codes].tolist(), different[order].tolist()


def _order_windows(groups: Int64s, positions: Int64s, first: Int64s) -> Int64s:
    """Orders windows so that each has most rows in common with the one before it."""
    by_arrival = np.lexsort((first, positions, groups))
    is_same_event = (np.diff(groups[by_arrival]) == 0) & (np.diff(positions[by_arrival]) == 0)
    # Windows that overlap at an event are on a grid, and each is measured as of many events.
    order: Int64s = np.lexsort((positions, first, groups)) if is_same_event.any() else by_arrival
    return order


class _Walk:
    """Keeps the tally of one window, and changes it into that of another."""

    def __init__(self, rows: GroupedRows, ranks: list[int], groups: int) -> None:
        self.search = TimeSearch(rows.groups, rows.times, groups)
        self._ranks, self._positions = ranks, rows.positions.tolist()
        # The rows of the batch by group and arrival, and where those of each group begin.
        batch = np.flatnonzero(rows.positions != STORED)
        batch = batch[np.lexsort((rows.positions[batch], rows.groups[batch]))]
        self._arrived, self._arrivals = batch.tolist(), rows.positions[batch].tolist()
        self._begins = np.searchsorted(rows.groups[batch], np.arange(groups + 1)).tolist()
        self._group, self._position, self._next = -1, STORED, 0
        self._low = self._high = 0
        self._tally: Any = None

    def move_to(self, make: type[Any], group: int, position: int, low: int, high: int) -> Any:
        """Returns the tally of the rows [low, high), which are of one group, that had arrived by a position."""
        overlaps = low < self._high and self._low < high
        if group == self._group and position >= self._position and overlaps:
            self._take_arrived(group, position)
        else:
            self._tally, self._group, self._position, self._low, self._high = make(), group, position, low, low
            self._next = bisect_right(self._arrivals, position, self._begins[group], self._begins[group + 1])
        self._stretch(low, high)
        return self._tally

    def _take_arrived(self, group: int, position: int) -> None:
        """Takes in the rows of the window that arrived since."""
        self._position = position
        while self._next < self._begins[group + 1] and self._arrivals[self._next] <= position:
            if self._low <= self._arrived[self._next] < self._high:
                self._tally.add(self._ranks[self._arrived[self._next]])
            self._next += 1

    def _stretch(self, low: int, high: int) -> None:
        # Take in before giving up, so that the window is never empty in between.
        for row in (*range(self._high, high), *range(low, self._low)):
            if self._positions[row] <= self._position:
                self._tally.add(self._ranks[row])
        for row in (*range(self._low, low), *range(high, self._high)):
            if self._positions[row] <= self._position:
                self._tally.remove(self._ranks[row])
        self._low, self._high = low, high


class Percentile(GatheredAggregate):
    """The exact percentile of numbers, interpolated between the two nearest as Spark does; NULL for none."""

    tally = SortedTally

    def __init__(self, fraction: float) -> None:
        """Takes the fraction, from 0 for the least value to 1 for the greatest."""
        self._fraction = fraction

    def result_type(self, argument: DataType | None) -> DataType:
        """Returns double."""
        return DOUBLE

    def pick(self, tally: Any, values: Sequence[Any]) -> Any:
        """Picks the place among the values, and the values before and after it."""
        ranks = tally.ranks
        if not ranks:
            return None
        place = (len(ranks) - 1) * self._fraction
        return place, values[ranks[math.floor(place)]], values[ranks[math.ceil(place)]]

    def finish(self, partial: Partial, argument: DataType | None) -> Column:
        """Returns the percentiles as doubles."""
        assert argument is not None
        unit = 10**argument.scale
        return normalize_zeros(from_values(DOUBLE, [_interpolate(pick, unit) for pick in partial[0].tolist()]))


def _interpolate(picked: tuple[float, Any, Any] | None, unit: int) -> float | None:
    if picked is None:
        return None
    place, lower, higher = picked
    low, high = (float(value) if isinstance(value, float) else value / unit for value in (lower, higher))
    if lower == higher or place == math.floor(place):
        return low
    return (math.ceil(place) - place) * low + (place - math.floor(place)) * high


class Mode(GatheredAggregate):
    """The most frequent value, the least of those that are equally frequent; NULL for none."""

    tally = CountedTally

    def result_type(self, argument: DataType | None) -> DataType:
        """Returns the argument's type."""
        assert argument is not None
        return argument

    def pick(self, tally: Any, values: Sequence[Any]) -> Any:
        """Picks the value."""
        return values[tally.levels[-1][0]] if tally.levels else None

    def finish(self, partial: Partial, argument: DataType | None) -> Column:
        """Returns the values."""
        return normalize_zeros(from_values(self.result_type(argument), partial[0].tolist()))


class CollectSet(GatheredAggregate):
    """The different values in ascending order, at most the first 100 of them; an empty array for none."""

    tally = SetTally

    def result_type(self, argument: DataType | None) -> DataType:
        """Returns an array of the argument's type."""
        assert argument is not None
        return array(argument)

    def pick(self, tally: Any, values: Sequence[Any]) -> Any:
        """Picks the values."""
        return [values[rank] for rank in tally.ranks[:MAX_COLLECTED]]

    def finish(self, partial: Partial, argument: DataType | None) -> Column:
        """Returns the arrays."""
        return normalize_zeros(Column(self.result_type(argument), partial[0]))

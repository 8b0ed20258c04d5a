"""Counts the different values in overlapping windows; each row is visited a few times, not once per window."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from pandas import factorize

from lookback.core.values.columns import Mask, Values
from lookback.core.values.keys import Int64s, TimeSearch, order_by_number

# The position of a row that was stored before the batch.
STORED = -1


@dataclass(frozen=True)
class GroupedRows:
    """Rows sorted by (group, time, arrival).

    groups: dense numbers; values: any storage; positions: among the events of the batch, STORED for rows from before it.
    """

    groups: Int64s
    times: Int64s
    values: Values
    positions: Int64s

    def take(self, at: Int64s) -> GroupedRows:
        """Returns the rows at these positions."""
        return GroupedRows(self.groups[at], self.times[at], self.values[at], self.positions[at])


class DistinctCounter:
    """Counts the different values in windows that all end at given times.

    A window covers the rows of its group up to the time `last` that had arrived by its position. `count` takes the times at
    which the windows begin, so that one counter serves measures with windows of different sizes. Within a group, windows
    are counted in the order of (position, last); most of them only move forward, which makes them cheap.
    """

    def __init__(self, rows: GroupedRows, groups: Int64s, positions: Int64s, last: Int64s) -> None:
        self._rows, self._groups, self._positions, self._last = rows, groups, positions, last
        self._codes = factorize(rows.values, use_na_sentinel=False)[0].astype(np.int64)
        order = np.lexsort((last, positions))
        order = order[np.argsort(groups[order], kind="stable")]
        moves_forward = _mark_running_maxima(groups[order], last[order])
        self._forward, self._back = order[moves_forward], order[~moves_forward]
        self._begins, self._ends = self._find_ranges()

    def count(self, first: Int64s) -> Int64s:
        """Counts the different values in the windows that begin at `first`; all NaNs are one value.

        Within a group, a window that ends later must not begin earlier.
        """
        counts = np.zeros(len(self._groups), dtype=np.int64)
        at = self._forward
        # The windows that begin at or before the row.
        beyond = self._count_windows(first[at])
        ends = np.minimum(self._ends, beyond)
        counted = self._begins < ends
        edges = len(at) + 1
        change = np.bincount(self._begins[counted], minlength=edges) - np.bincount(ends[counted], minlength=edges)
        counts[at] = np.cumsum(change[:-1])
        if len(self._back):
            self._count_back(first, counts)
        return counts

    def _count_windows(self, times: Int64s) -> Int64s:
        """Counts for each row the forward windows of earlier groups, and those of its own whose time is not above the row's.

        times: one of each forward window. There are fewer windows than rows, so their places among the rows are searched.
        """
        places = self._by_time.find_first(self._groups[self._forward], times)
        return np.cumsum(np.bincount(places, minlength=len(self._rows.times) + 1)[:-1])

    @cached_property
    def _by_time(self) -> TimeSearch:
        return TimeSearch(self._rows.groups, self._rows.times, int(self._groups.max(initial=-1)) + 1)

    def _find_ranges(self) -> tuple[Int64s, Int64s]:
        """Finds for each row the first window that covers it, and the first that covers a later row of the same value.

        The row is counted in the windows from the first up to the second, except those that begin after the row: only
        the last row of a value in a window counts.
        """
        rows, at = self._rows, self._forward
        by_time = self._count_windows(self._last[at] + 1)
        by_arrival = TimeSearch(self._groups[at], self._positions[at]).find_first(rows.groups, rows.positions)
        begins = np.maximum(by_time, by_arrival)
        numbers = rows.groups * (int(self._codes.max(initial=0)) + 1) + self._codes
        order = order_by_number(numbers)[::-1] if len(numbers) else np.zeros(0, dtype=np.int64)
        numbers = numbers[order]
        same = numbers[1:] == numbers[:-1]
        value = np.concatenate(([0], np.cumsum(~same))) if len(order) else order
        # The minimum over all later rows of the same value. The offset per value lets one pass serve all values.
        span = len(at) + 2
        least = np.minimum.accumulate(begins[order] - value * span) + value * span
        ends = np.full(len(begins), len(at), dtype=np.int64)
        ends[order[1:][same]] = least[:-1][same]
        return begins, ends

    def _count_back(self, first: Int64s, counts: Int64s) -> None:
        """Counts the windows that end before an earlier one of their group, by moving one window per group."""
        rows, groups = self._rows, self._groups[self._back]
        for part in np.split(self._back, np.flatnonzero(np.diff(groups)) + 1):
            group = self._groups[part[0]]
            mine = slice(*np.searchsorted(rows.groups, [group, group + 1]).tolist())
            moving = _MovingWindow(rows.times[mine], self._codes[mine], rows.positions[mine])
            windows = zip(self._positions[part].tolist(), first[part].tolist(), self._last[part].tolist(), strict=True)
            counts[part] = [moving.count(*window) for window in windows]


def count_from_start(groups: Int64s, values: Values, low: Int64s, high: Int64s) -> Int64s:
    """Counts the different values in each range [low, high) of rows; each range begins at the start of its group.

    groups: dense numbers, ascending. All NaNs are one value.
    """
    codes, different = factorize(values, use_na_sentinel=False)
    is_first = np.zeros(len(values) + 1, dtype=np.int64)
    is_first[1:][np.unique(groups * max(1, len(different)) + codes, return_index=True)[1]] = 1
    before = np.cumsum(is_first)
    return before[high] - before[low]


def _mark_running_maxima(groups: Int64s, times: Int64s) -> Mask:
    """Marks the times that are not below an earlier one of their group; groups ascend."""
    if not len(times):
        return np.zeros(0, dtype=bool)
    ranks = np.unique(times, return_inverse=True)[1]
    keyed = groups * (int(ranks.max()) + 1) + ranks
    return np.asarray(keyed >= np.maximum.accumulate(keyed))


class _MovingWindow:
    """A window over the rows of one group that have arrived; its cost is the number of rows that enter and leave it."""

    def __init__(self, times: Int64s, codes: Int64s, positions: Int64s) -> None:
        stored = positions == STORED
        self._rows: list[tuple[int, int]] = list(zip(times[stored].tolist(), codes[stored].tolist(), strict=True))
        order = np.flatnonzero(~stored)
        order = order[np.argsort(positions[order], kind="stable")][::-1]
        columns: tuple[list[Any], ...] = (positions[order].tolist(), times[order].tolist(), codes[order].tolist())
        # The next row to arrive comes last.
        self._to_arrive = list(zip(*columns, strict=True))
        self._low = self._high = 0
        self._counts: dict[int, int] = {}

    def count(self, position: int, first: int, last: int) -> int:
        """Counts the different values from `first` to `last` that arrived by `position`, which must not fall between calls."""
        while self._to_arrive and self._to_arrive[-1][0] <= position:
            _, time, code = self._to_arrive.pop()
            self._insert((time, code))
        low = bisect_left(self._rows, (first, -1))
        high = max(low, bisect_left(self._rows, (last + 1, -1)))
        if high <= self._low or low >= self._high:  # no row in common: start from an empty window
            self._counts = {}
            self._low = self._high = low
        for at in range(low, self._low):
            self._enter(at)
        for at in range(self._high, high):
            self._enter(at)
        for at in range(self._low, low):
            self._leave(at)
        for at in range(high, self._high):
            self._leave(at)
        self._low, self._high = low, high
        return len(self._counts)

    def _insert(self, row: tuple[int, int]) -> None:
        at = bisect_right(self._rows, row)
        insort(self._rows, row)
        if at < self._low:
            self._low += 1
            self._high += 1
        elif at < self._high:
            self._high += 1
            self._counts[row[1]] = self._counts.get(row[1], 0) + 1

    def _enter(self, at: int) -> None:
        code = self._rows[at][1]
        self._counts[code] = self._counts.get(code, 0) + 1

    def _leave(self, at: int) -> None:
        code = self._rows[at][1]
        left = self._counts[code] - 1
        if left:
            self._counts[code] = left
        else:
            del self._counts[code]

"""How many different values there are in windows that overlap: each row is looked at a few times, not once a window."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from typing import Any

import numpy as np
from pandas import factorize

from lookback.core.values.columns import Mask, Values
from lookback.core.values.keys import Int64s, TimeSearch

# The position of a row that was there before the batch.
STORED = -1


@dataclass(frozen=True)
class Rows:
    """Rows by (group, time), in order of arrival where both are equal.

    groups: dense numbers; values: any storage; positions: among the events of the batch, -1 for what was there before.
    """

    groups: Int64s
    times: Int64s
    values: Values
    positions: Int64s

    def take(self, at: Int64s) -> Rows:
        """The rows at these places."""
        return Rows(self.groups[at], self.times[at], self.values[at], self.positions[at])


class Distinct:
    """Answers for windows that end at given times: of the rows of `groups` that had arrived by `positions`, those up to `last`.

    Where the windows begin is asked later, once for every size. Those of a group are asked in the order of `positions`,
    then of `last`; most move forward only, which is what makes them cheap.
    """

    def __init__(self, rows: Rows, groups: Int64s, positions: Int64s, last: Int64s) -> None:
        self._rows, self._groups, self._positions, self._last = rows, groups, positions, last
        self._codes = factorize(rows.values, use_na_sentinel=False)[0].astype(np.int64)
        order = np.lexsort((last, positions))
        order = order[np.argsort(groups[order], kind="stable")]
        forward = _highest_so_far(groups[order], last[order])
        self._forward, self._back = order[forward], order[~forward]
        self._begins, self._ends = self._ranges()

    def count(self, first: Int64s) -> Int64s:
        """The number of different values in each window that begins at `first`; NaN is one value.

        Of windows of one group, one that ends later must not begin earlier.
        """
        counts = np.zeros(len(self._groups), dtype=np.int64)
        at, rows = self._forward, self._rows
        beyond = TimeSearch(self._groups[at], first[at]).first_at_least(rows.groups, rows.times + 1)
        ends = np.minimum(self._ends, beyond)
        counted = self._begins < ends
        size = len(at) + 1
        change = np.bincount(self._begins[counted], minlength=size) - np.bincount(ends[counted], minlength=size)
        counts[at] = np.cumsum(change[:-1])
        if len(self._back):
            self._count_back(first, counts)
        return counts

    def _ranges(self) -> tuple[Int64s, Int64s]:
        """Per row: the first window that holds it, and the first one that holds a later row of its value.

        A row counts in the windows from the one to the other, less those that begin after it: of the rows of one value
        in a window the last one counts.
        """
        rows, at = self._rows, self._forward
        by_time = TimeSearch(self._groups[at], self._last[at]).first_at_least(rows.groups, rows.times)
        by_arrival = TimeSearch(self._groups[at], self._positions[at]).first_at_least(rows.groups, rows.positions)
        begins = np.maximum(by_time, by_arrival)
        order = np.lexsort((np.arange(len(begins)), self._codes, rows.groups))[::-1]
        same = (rows.groups[order[1:]] == rows.groups[order[:-1]]) & (self._codes[order[1:]] == self._codes[order[:-1]])
        value = np.concatenate(([0], np.cumsum(~same))) if len(order) else order
        # The least of all later rows, value by value: as they fall from value to value, one pass does for all of them.
        span = len(at) + 2
        least = np.minimum.accumulate(begins[order] - value * span) + value * span
        ends = np.full(len(begins), len(at), dtype=np.int64)
        ends[order[1:][same]] = least[:-1][same]
        return begins, ends

    def _count_back(self, first: Int64s, counts: Int64s) -> None:
        """Windows that end before one that was asked earlier: one window of each group is moved to where they are."""
        rows, groups = self._rows, self._groups[self._back]
        for part in np.split(self._back, np.flatnonzero(np.diff(groups)) + 1):
            group = self._groups[part[0]]
            mine = slice(*np.searchsorted(rows.groups, [group, group + 1]).tolist())
            moving = _Moving(rows.times[mine], self._codes[mine], rows.positions[mine])
            asked = zip(self._positions[part].tolist(), first[part].tolist(), self._last[part].tolist(), strict=True)
            counts[part] = [moving.count(*each) for each in asked]


def count_from_start(groups: Int64s, values: Values, low: Int64s, high: Int64s) -> Int64s:
    """The number of different values in each range [low, high) of rows; a range begins where its group does.

    groups: dense numbers, ascending. NaN is one value.
    """
    codes, different = factorize(values, use_na_sentinel=False)
    is_first = np.zeros(len(values) + 1, dtype=np.int64)
    is_first[1:][np.unique(groups * max(1, len(different)) + codes, return_index=True)[1]] = 1
    before = np.cumsum(is_first)
    return before[high] - before[low]


def _highest_so_far(groups: Int64s, times: Int64s) -> Mask:
    """Which times are not below one before them in their group; groups ascending."""
    if not len(times):
        return np.zeros(0, dtype=bool)
    ranks = np.unique(times, return_inverse=True)[1]
    keyed = groups * (int(ranks.max()) + 1) + ranks
    return np.asarray(keyed >= np.maximum.accumulate(keyed))


class _Moving:
    """A window over the rows of one group that have arrived. Its cost is that of the rows that enter and leave it."""

    def __init__(self, times: Int64s, codes: Int64s, positions: Int64s) -> None:
        stored = positions == STORED
        self._rows: list[tuple[int, int]] = list(zip(times[stored].tolist(), codes[stored].tolist(), strict=True))
        order = np.flatnonzero(~stored)
        order = order[np.argsort(positions[order], kind="stable")][::-1]
        columns: tuple[list[Any], ...] = (positions[order].tolist(), times[order].tolist(), codes[order].tolist())
        self._coming = list(zip(*columns, strict=True))
        self._low = self._high = 0
        self._held: dict[int, int] = {}

    def count(self, position: int, first: int, last: int) -> int:
        """Different values among what has arrived by `position`. Positions must not fall from call to call."""
        while self._coming and self._coming[-1][0] <= position:
            _, time, code = self._coming.pop()
            self._insert((time, code))
        low = bisect_left(self._rows, (first, -1))
        high = max(low, bisect_left(self._rows, (last + 1, -1)))
        if high <= self._low or low >= self._high:  # nothing in common: begin anew
            self._held = {}
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
        return len(self._held)

    def _insert(self, row: tuple[int, int]) -> None:
        at = bisect_right(self._rows, row)
        insort(self._rows, row)
        if at < self._low:
            self._low += 1
            self._high += 1
        elif at < self._high:
            self._high += 1
            self._held[row[1]] = self._held.get(row[1], 0) + 1

    def _enter(self, at: int) -> None:
        code = self._rows[at][1]
        self._held[code] = self._held.get(code, 0) + 1

    def _leave(self, at: int) -> None:
        code = self._rows[at][1]
        left = self._held[code] - 1
        if left:
            self._held[code] = left
        else:
            del self._held[code]

"""How many different values there are in windows that overlap: each row is looked at a few times, not once a window."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from typing import Any

import numpy as np
from pandas import factorize

from lookback.core.columns import Mask, Values
from lookback.core.keys import Int64s, order_by_group

_STORED = -1


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


@dataclass(frozen=True)
class Windows:
    """Windows asked for: of the rows of `groups` that had arrived by `positions`, those with first <= time <= last."""

    groups: Int64s
    positions: Int64s
    first: Int64s
    last: Int64s

    def take(self, at: Int64s | Mask) -> Windows:
        """The windows at these places."""
        return Windows(self.groups[at], self.positions[at], self.first[at], self.last[at])


def count_distinct(rows: Rows, windows: Windows, sliding: Mask) -> Int64s:
    """The number of different values in each window; NaN is one value.

    sliding: of which windows it is known that those of their group, in the order of `last` and then of `positions`, move
    forward only (`first` as well), and that of their group no row of the batch arrived after one with a later time.
    """
    codes = factorize(rows.values, use_na_sentinel=False)[0].astype(np.int64)
    counts = np.zeros(len(windows.groups), dtype=np.int64)
    at = np.flatnonzero(sliding)
    if len(at):
        counts[at] = _sliding(rows, codes, windows.take(at))
    at = np.flatnonzero(~sliding)
    if len(at):
        counts[at] = _moved(rows, codes, windows.take(at))
    return counts


def _sliding(rows: Rows, codes: Int64s, windows: Windows) -> Int64s:
    """A row counts in the windows that hold it and not the next row of its value: one range of windows.

    Windows and rows stand in one order; a row's range begins with the first window after it and ends before the first
    one that begins after it, or that holds the next row of its value.
    """
    count, asked = len(rows.groups), len(windows.groups)
    order = _merged(rows, windows)
    is_window = order >= count
    place = np.empty(count + asked, dtype=np.int64)
    place[order] = np.arange(count + asked)
    before = np.cumsum(is_window)  # windows up to each place
    ranked = order[is_window] - count  # the windows as they stand
    begins = before[place[:count]]
    # The next row of a value: its first window is the one that begins to count it instead.
    by_value = np.lexsort((np.arange(count), codes, rows.groups))
    following = np.full(count, count, dtype=np.int64)
    same = (rows.groups[by_value[1:]] == rows.groups[by_value[:-1]]) & (codes[by_value[1:]] == codes[by_value[:-1]])
    following[by_value[:-1][same]] = by_value[1:][same]
    ends = np.append(begins, asked)[following]
    # The first window, of the group or of a later one, that begins after the row.
    starts = windows.first[ranked]
    ends = np.minimum(ends, _first_beyond(windows.groups[ranked], starts, rows.groups, rows.times))
    counted = begins < ends
    change = np.bincount(begins[counted], minlength=asked + 1) - np.bincount(ends[counted], minlength=asked + 1)
    counts = np.empty(asked, dtype=np.int64)
    counts[ranked] = np.cumsum(change[:asked])
    return counts


def _merged(rows: Rows, windows: Windows) -> Int64s:
    """Rows, and windows numbered after them, in one order: a window stands behind the rows that it may hold."""
    groups = np.concatenate([rows.groups, windows.groups])
    times = np.concatenate([rows.times, windows.last])
    ranks = np.concatenate([rows.positions * 2, windows.positions * 2 + 1])
    order = np.argsort(ranks, kind="stable")
    return order[order_by_group(groups[order], times[order])]


def _first_beyond(groups: Int64s, starts: Int64s, row_groups: Int64s, times: Int64s) -> Int64s:
    """Per row: the first of the windows, which stand by (group, start), that is of a later group or starts after it."""
    ranks = np.unique(np.concatenate([starts, times]))
    span = len(ranks) + 1
    keys = groups * span + np.searchsorted(ranks, starts)
    return np.searchsorted(keys, row_groups * span + np.searchsorted(ranks, times), side="right").astype(np.int64)


def _moved(rows: Rows, codes: Int64s, windows: Windows) -> Int64s:
    """One window of each group is kept and moved to where the next one is asked for, in order of arrival."""
    counts = np.zeros(len(windows.groups), dtype=np.int64)
    order = np.lexsort((windows.last, windows.positions, windows.groups))
    edges = np.flatnonzero(np.diff(windows.groups[order])) + 1
    for part in np.split(order, edges):
        group = windows.groups[part[0]]
        low, high = np.searchsorted(rows.groups, [group, group + 1])
        mine = slice(int(low), int(high))
        moving = _Moving(rows.times[mine], codes[mine], rows.positions[mine])
        asked = zip(
            windows.positions[part].tolist(), windows.first[part].tolist(), windows.last[part].tolist(), strict=True
        )
        counts[part] = [moving.count(*each) for each in asked]
    return counts


class _Moving:
    """A window over the rows of one group that have arrived. Its cost is that of the rows that enter and leave it."""

    def __init__(self, times: Int64s, codes: Int64s, positions: Int64s) -> None:
        stored = positions == _STORED
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

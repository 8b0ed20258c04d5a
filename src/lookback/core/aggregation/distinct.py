"""Counts the distinct values in overlapping windows; each row is visited a few times, not once per window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lookback.core.values.columns import Mask, Values
from lookback.core.values.keys import Int64s, TimeSearch, number_values, order_by_group, order_by_number

# The position of a row that was stored before the batch.
STORED = -1


@dataclass(frozen=True)
class GroupedRows:
    """Rows sorted by (group, time, arrival).

    Attributes:
        groups: The group of each row, as dense numbers.
        times: The time of each row.
        values: The value of each row, in any storage.
        positions: The positions of the rows in the batch; STORED for rows of earlier batches.
    """

    groups: Int64s
    times: Int64s
    values: Values
    positions: Int64s

    def take(self, at: Int64s) -> GroupedRows:
        """Returns the rows at these positions."""
        return GroupedRows(self.groups[at], self.times[at], self.values[at], self.positions[at])


class DistinctCounter:
    """Counts the distinct values in windows that end at given times.

    A window covers the rows of its group up to the time `last` that had arrived by its position. `count` takes the
    times at which the windows begin, so that one counter serves measures with windows of different sizes. Within a
    group, windows are counted in the order of (position, last). Most of them only move forward, and these are cheap.
    """

    def __init__(self, rows: GroupedRows, groups: Int64s, positions: Int64s, last: Int64s) -> None:
        self._windows = len(groups)
        codes = number_values(rows.values)[0]
        by_value = _order_by_value(rows.groups, codes)
        order = order_by_group(groups, last)
        order = order[order_by_group(groups[order], positions[order])]
        moves_forward = _mark_running_maxima(groups[order], last[order])
        self._forward, back = order[moves_forward], order[~moves_forward]
        self._back = back[order_by_group(groups[back], last[back])]
        self._places = _Places(rows, groups[self._forward])
        by_time = self._places.count_windows(last[self._forward] + 1)
        arrivals = TimeSearch(groups[self._forward], positions[self._forward])
        by_arrival, at = by_time.copy(), np.flatnonzero(rows.positions != STORED)
        by_arrival[at] = arrivals.find_first(rows.groups[at], rows.positions[at])
        self._begins = np.maximum(by_time, by_arrival)
        self._ends, self._forward_begun = self._find_ends(by_value), _count_begun(self._begins, len(self._forward))
        if len(self._back):
            # Only the rows of these groups matter, and they are few.
            has_back = np.zeros(int(groups.max()) + 1, dtype=bool)
            has_back[groups[self._back]] = True
            at = np.flatnonzero(has_back[rows.groups])
            places = _Places(rows.take(at), groups[self._back])
            # If a backward window ends after a row but lacks it, the row arrived after a forward window that ends
            # later.
            is_late, begins = by_time[at] < by_arrival[at], places.count_windows(last[self._back] + 1)
            taken = by_value.take(at, len(rows.groups))
            self._late = _LateRows(taken, is_late, begins, rows.positions[at], positions[self._back])
            self._late_places = places

    def count(self, first: Int64s) -> Int64s:
        """Counts the distinct values in the windows that begin at `first`; all NaNs are one value.

        Within a group, a window that ends later must not begin earlier.
        """
        counts = np.zeros(self._windows, dtype=np.int64)
        ends = np.minimum(self._ends, self._places.count_windows(first[self._forward]))
        counts[self._forward] = self._forward_begun - _count_ended(self._begins, ends, len(self._forward))
        if len(self._back):
            counts[self._back] = self._late.count(self._late_places.count_windows(first[self._back]))
        return counts

    def _find_ends(self, by_value: _ByValue) -> Int64s:
        """Finds for each row the first forward window that covers a later row with the same value.

        Only the last row of a value in a window counts. So a row counts in the windows from `_begins` to that one,
        exclusive, except those that begin after the row.
        """
        order, is_last = by_value.order[::-1], by_value.is_last[::-1]
        value = np.cumsum(is_last)
        # The minimum over all later rows with the same value. The offset per value lets one pass serve all values.
        span = len(self._forward) + 2
        least = np.minimum.accumulate(self._begins[order] - value * span) + value * span
        ends = np.full(len(order), len(self._forward), dtype=np.int64)
        ends[order[1:]] = np.where(is_last[1:], len(self._forward), least[:-1])
        return ends


class _Places:
    """Finds the places of windows among rows; `groups` are those of the windows, ascending."""

    def __init__(self, rows: GroupedRows, groups: Int64s) -> None:
        self._rows, self._groups = len(rows.times), groups
        self._by_time = TimeSearch(rows.groups, rows.times, int(groups.max(initial=-1)) + 1)

    def count_windows(self, times: Int64s) -> Int64s:
        """Counts for each row the windows of earlier groups and the windows of its own group up to the row's time.

        `times` has one time per window, ascending within a group. There are fewer windows than rows, so it searches for
        the windows among the rows.
        """
        places = self._by_time.find_first(self._groups, times)
        return np.cumsum(np.bincount(places, minlength=self._rows + 1)[:-1])


class _ByValue(NamedTuple):
    """Rows in the order of (group, value, time, arrival): their positions, and a mask of the last row of each value."""

    order: Int64s
    is_last: Mask

    def take(self, at: Int64s, rows: int) -> _ByValue:
        """Selects the rows at these ascending positions of all `rows`, and renumbers them; groups must be complete."""
        ranks = np.full(rows, -1, dtype=np.int64)
        ranks[at] = np.arange(len(at))
        taken = ranks[self.order]
        return _ByValue(taken[taken >= 0], self.is_last[taken >= 0])


def _order_by_value(groups: Int64s, codes: Int64s) -> _ByValue:
    if not len(codes):
        return _ByValue(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool))
    numbers = groups * (int(codes.max()) + 1) + codes
    order = order_by_number(numbers)
    numbers = numbers[order]
    return _ByValue(order, np.append(numbers[1:] != numbers[:-1], True))


class _LateRows:
    """Counts the distinct values in the few windows that arrive out of order.

    Windows are numbered by (group, last). A row is late if it had not yet arrived for some window that ends at or after
    it; few rows are. One row per value counts in a window: the last one that is not late, else the late one that
    arrived first. Each row counts in a range of windows; a late row only in those by which it had arrived.
    """

    def __init__(self, by_value: _ByValue, is_late: Mask, begins: Int64s, arrived: Int64s, positions: Int64s) -> None:
        """Prepares the counts.

        Args:
            by_value: The rows by value.
            is_late: Marks the late rows.
            begins: The first window that ends at or after each row.
            arrived: The position of each row in the batch.
            positions: The positions of the windows.
        """
        self._begins, self._positions, self._arrived, windows = begins, positions, arrived, len(positions)
        order, late = by_value.order, is_late[by_value.order]
        value: Int64s = np.cumsum(by_value.is_last, dtype=np.int64) - by_value.is_last.astype(np.int64)
        on_time = np.flatnonzero(~late)
        self._on_time, self._ends = order[on_time], np.full(len(on_time), windows, dtype=np.int64)
        self._on_time_begins = begins[self._on_time]
        self._begun = _count_begun(self._on_time_begins, windows)
        is_same: Mask = value[on_time[1:]] == value[on_time[:-1]]
        self._ends[:-1][is_same] = self._on_time_begins[1:][is_same]
        # Late rows and their neighbors; rows between those that are on time make no difference.
        near = late.copy()
        near[1:] |= late[:-1]
        near[:-1] |= late[1:]
        at = np.flatnonzero(near)
        ranks = np.where(late[at], arrived[order[at]], -1)
        span, value = int(ranks.max(initial=0)) + 2, value[at]
        dense = np.cumsum(np.diff(value, prepend=value[:1]) > 0).astype(np.int64)
        queried = np.flatnonzero(late[at])
        before = _find_lower_before(dense * span + ranks)[queried]
        after = len(at) - 1 - _find_lower_before((ranks - dense * span)[::-1])[::-1][queried]
        self._late, rows = order[at][queried], order[at]
        self._before = _take_same(rows, before, dense, dense[queried])
        following = _take_same(rows, after, dense, dense[queried])
        self._late_ends = np.where(following < 0, windows, begins[following])

    def count(self, beyond: Int64s) -> Int64s:
        """Counts the values in each window; `beyond` is the first window that begins after each row."""
        windows, late = len(self._positions), self._late
        ends = np.minimum(self._ends, beyond[self._on_time])
        counts = self._begun - _count_ended(self._on_time_begins, ends, windows)
        begins = np.maximum(self._begins[late], np.where(self._before < 0, 0, beyond[self._before]))
        ends = np.minimum(self._late_ends, beyond[late])
        counted = np.flatnonzero(begins < ends)
        counted = counted[np.argsort(self._arrived[late[counted]])]
        arrived = np.searchsorted(self._arrived[late[counted]], self._positions, side="right")
        limits = np.arange(1, windows + 1)
        counts += count_below(begins[counted], arrived, limits) - count_below(ends[counted], arrived, limits)
        return counts


def _count_begun(begins: Int64s, windows: int) -> Int64s:
    """Counts for each window the rows whose ranges [begin, end) of windows begin at or before it."""
    return np.cumsum(np.bincount(begins, minlength=windows + 1)[:windows])


def _count_ended(begins: Int64s, ends: Int64s, windows: int) -> Int64s:
    """Counts for each window the rows whose ranges end at or before it; a range that ends before it begins is empty."""
    return _count_begun(np.maximum(begins, ends), windows)


def _find_lower_before(scores: Int64s) -> Int64s:
    """Finds for each score the position of the nearest lower one before it; -1 if there is none."""
    # For each power of two, the lowest of that many scores up to each one. The search then skips the largest stretches
    # without a lower score.
    lowest = [scores]
    while 2 ** len(lowest) <= len(scores):
        step, last = 2 ** (len(lowest) - 1), lowest[-1]
        lowest.append(np.concatenate((last[:step], np.minimum(last[step:], last[:-step]))))
    ends = np.arange(len(scores), dtype=np.int64)
    for level in range(len(lowest) - 1, -1, -1):
        at = np.flatnonzero(ends >= 2**level)
        at = at[lowest[level][ends[at] - 1] >= scores[at]]
        ends[at] -= 2**level
    return ends - 1


def _take_same(rows: Int64s, at: Int64s, values: Int64s, wanted: Int64s) -> Int64s:
    """Returns the rows at these positions; -1 where a position is out of range or its row has another value."""
    is_inside = (at >= 0) & (at < len(rows))
    near = np.where(is_inside, at, 0)
    return np.where(is_inside & (values[near] == wanted), rows[near], -1) if len(rows) else at


def count_below(values: Int64s, counts: Int64s, limits: Int64s) -> Int64s:
    """Counts for each query how many of the first `counts` values are below its limit.

    Uses a wavelet matrix (Navarro et al., 2015): from the highest bit down, it partitions the values by the bit, and
    each query follows the bits of its limit.

    Args:
        values: Integers from 0.
        counts: The number of values that each query covers, shape (queries,).
        limits: The limit of each query, shape (queries,).
    """
    found: Int64s = np.zeros(len(limits), dtype=np.int64)
    low, high = found.copy(), counts
    for bit in range(int(max(values.max(initial=0), limits.max(initial=0))).bit_length() - 1, -1, -1):
        is_one = (values >> bit & 1).astype(bool)
        zeros = np.concatenate(([0], np.cumsum(~is_one)))
        low_zeros, high_zeros = zeros[low], zeros[high]
        follows_one = (limits >> bit & 1).astype(bool)
        found += np.where(follows_one, high_zeros - low_zeros, 0)
        low = np.where(follows_one, zeros[-1] + low - low_zeros, low_zeros)
        high = np.where(follows_one, zeros[-1] + high - high_zeros, high_zeros)
        values = np.concatenate((values[~is_one], values[is_one]))
    return found


def count_from_start(groups: Int64s, values: Values, low: Int64s, high: Int64s) -> Int64s:
    """Counts the distinct values in each range [low, high) of rows; each range begins at the start of its group.

    `groups` are dense numbers, ascending. All NaNs are one value.
    """
    codes, different = number_values(values)
    is_first = np.zeros(len(values) + 1, dtype=np.int64)
    is_first[1:][np.unique(groups * max(1, len(different)) + codes, return_index=True)[1]] = 1
    before = np.cumsum(is_first)
    return before[high] - before[low]


def _mark_running_maxima(groups: Int64s, times: Int64s) -> Mask:
    """Marks the times that are not below an earlier time of their group; groups ascend."""
    if not len(times):
        return np.zeros(0, dtype=bool)
    ranks = times - times.min()
    if (int(groups.max()) + 1) * (int(ranks.max()) + 1) >= 2**62:
        ranks = np.unique(times, return_inverse=True)[1]
    keyed = groups * (int(ranks.max()) + 1) + ranks
    return np.asarray(keyed >= np.maximum.accumulate(keyed))

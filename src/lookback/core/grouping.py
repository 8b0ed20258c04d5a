"""The events of a batch by one grouping set: keys, order, and windows among the events of the batch itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lookback.core.aggregates import Aggregate, Partial
from lookback.core.columns import Mask, Values
from lookback.core.keys import Int64s, Keys, number_keys
from lookback.core.rules import Window
from lookback.core.runs import TimeSearch


@dataclass(frozen=True)
class FeatureRows:
    """The rows of a batch that a feature keeps, sorted by (key, time, arrival).

    positions: of the rows among the batch's events in order of arrival; values None where none are stored.
    """

    positions: Int64s
    values: Values | None


class Grouping:
    """Events of one grouping set. `mine`: mask of the events that belong to this shard, in order of arrival."""

    def __init__(self, keys: Keys, times: Int64s, mine: Mask) -> None:
        self.mine = mine
        self.times = times
        self.keys = keys
        positions = np.flatnonzero(mine)
        numbers, self.distinct = number_keys(keys.take(positions))
        # Number of each event's key, over all events; those of other shards have none.
        self.numbers = np.full(len(times), -1, dtype=np.int64)
        self.numbers[positions] = numbers
        self.sorted = positions[np.lexsort((times[positions], numbers))]

    @cached_property
    def disordered(self) -> Mask:
        """Which keys have an event that arrived after one with a later time, shape (keys,)."""
        numbers = self.numbers[self.sorted]
        inverted = (numbers[1:] == numbers[:-1]) & (self.sorted[1:] < self.sorted[:-1])
        mask = np.zeros(len(self.distinct.low), dtype=bool)
        mask[numbers[1:][inverted]] = True
        return mask

    def rows(self, selected: Mask, values: Values | None) -> FeatureRows:
        """The selected events as a feature's rows; values: of all events, in order of arrival."""
        positions = self.sorted[selected[self.sorted]]
        return FeatureRows(positions, None if values is None else values[positions])

    def windows(
        self, aggregate: Aggregate, rows: FeatureRows, judged: Int64s, first: Int64s, window: Window
    ) -> Partial:
        """What the rows of the batch contribute to the windows [first, t - delay] of the judged events.

        Only rows that arrived before a judged event, or are that event, count for it.
        judged: positions of events; first: the windows' starts, shape (judged,).
        """
        numbers = self.numbers[judged]
        late = self.disordered[numbers]
        partial = self._in_order(aggregate, rows, judged, first, window, ~late)
        if late.any():
            at = np.flatnonzero(late)
            disordered = self._out_of_order(aggregate, rows, judged[at], first[at], window)
            partial = aggregate.merge(partial, tuple(_spread(part, at, len(judged)) for part in disordered))
        return partial

    def _in_order(
        self, aggregate: Aggregate, rows: FeatureRows, judged: Int64s, first: Int64s, window: Window, which: Mask
    ) -> Partial:
        """Keys whose events arrived in the order of their times: a window is one range of rows."""
        groups, numbers = self.numbers[rows.positions], self.numbers[judged]
        search = TimeSearch(groups, self.times[rows.positions])
        low = search.first_at_least(numbers, first)
        if window.delay:
            high = search.first_at_least(numbers, self.times[judged] - window.delay + 1)
        else:
            # Of rows with the time of the judged event, those that arrived after it are not in its window.
            high = TimeSearch(groups, rows.positions).first_at_least(numbers, judged + 1)
        high = np.maximum(low, high)
        return _ranges(
            aggregate, rows, np.arange(len(rows.positions)), np.where(which, low, 0), np.where(which, high, 0)
        )

    def _out_of_order(
        self, aggregate: Aggregate, rows: FeatureRows, judged: Int64s, first: Int64s, window: Window
    ) -> Partial:
        """Keys with inversions: divide and conquer over the order of arrival (offline, after Bentley, 1980).

        In the step of block size B every event asks the block of B events just before its own block, if that is the
        other half of the same 2B; over all steps it has asked for each earlier event once.
        """
        picked = self.disordered[self.numbers[rows.positions]]
        index = np.flatnonzero(picked)
        members = np.union1d(rows.positions[index], judged)
        row_rank = np.searchsorted(members, rows.positions[index])
        judged_rank = np.searchsorted(members, judged)
        last = self.times[judged] - window.delay
        total = self._own(aggregate, rows, index, judged, window)
        keys = len(self.distinct.low)
        size = 1
        while size < len(members):
            left = np.flatnonzero((row_rank // size) % 2 == 0)
            pair = row_rank[left] // (2 * size)
            left = left[np.argsort(pair, kind="stable")]
            at = index[left]
            groups = row_rank[left] // (2 * size) * keys + self.numbers[rows.positions[at]]
            wanted = judged_rank // (2 * size) * keys + self.numbers[judged]
            asks = (judged_rank // size) % 2 == 1
            distinct, dense = np.unique(groups, return_inverse=True)
            group = np.searchsorted(distinct, wanted)
            asks &= group < len(distinct)
            group = np.where(asks, group, 0)
            if len(distinct):
                asks &= distinct[group] == wanted
            search = TimeSearch(dense.astype(np.int64), self.times[rows.positions[at]])
            low = search.first_at_least(group, first)
            high = np.maximum(low, search.first_at_least(group, last + 1))
            total = aggregate.merge(
                total, _ranges(aggregate, rows, at, np.where(asks, low, 0), np.where(asks, high, 0))
            )
            size *= 2
        return total

    def _own(self, aggregate: Aggregate, rows: FeatureRows, index: Int64s, judged: Int64s, window: Window) -> Partial:
        """Each judged event itself, where it is a row and its window has no delay."""
        order = np.argsort(rows.positions[index])
        sorted_positions = rows.positions[index][order]
        at = np.searchsorted(sorted_positions, judged)
        inside = np.minimum(at, max(0, len(order) - 1))
        found = (at < len(order)) & (sorted_positions[inside] == judged) if len(order) else np.zeros(len(judged), bool)
        if window.delay:
            found = np.zeros(len(judged), dtype=bool)
        low = np.where(found, order[inside], 0) if len(order) else np.zeros(len(judged), dtype=np.int64)
        return _ranges(aggregate, rows, index, low, low + found)


def _ranges(aggregate: Aggregate, rows: FeatureRows, at: Int64s, low: Int64s, high: Int64s) -> Partial:
    values = rows.positions[at] if rows.values is None else rows.values[at]
    return aggregate.ranges(aggregate.index(values), low, high)


def _spread(part: Values, at: Int64s, rows: int) -> Any:
    full: Values = np.zeros(rows, dtype=part.dtype)
    full[at] = part
    return full

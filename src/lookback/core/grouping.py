"""The events of a batch by one grouping set: keys, order, and windows among the events of the batch itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any

import numpy as np

from lookback.core.aggregates import Aggregate, Partial
from lookback.core.columns import Mask, Values
from lookback.core.keys import Int64s, Keys, TimeSearch, number_keys, order_by_group


@dataclass(frozen=True)
class FeatureRows:
    """The rows of a batch that a feature keeps, sorted by (key, time, arrival).

    positions: of the rows among the batch's events in order of arrival; values None where none are stored.
    """

    positions: Int64s
    values: Values | None


@dataclass(frozen=True)
class Queries:
    """Windows asked for, one per row.

    numbers: of their keys in a grouping, -1 for a key that has no event in the batch; positions: what has arrived, up to
    this event of the batch, counts; first, last: times, both included, shape (rows,). by_arrival: of an ordered key some
    row within the times may arrive after its query; by_time: some row that has arrived may be later than `last`.
    """

    numbers: Int64s
    positions: Int64s
    first: Int64s
    last: Int64s
    by_arrival: bool = True
    by_time: bool = True

    def starting_at_least(self, floor: int) -> Queries:
        """The same windows without what lies below `floor`."""
        return replace(self, first=np.maximum(self.first, floor))

    def take(self, at: Int64s) -> Queries:
        """The queries at these positions."""
        return replace(
            self, numbers=self.numbers[at], positions=self.positions[at], first=self.first[at], last=self.last[at]
        )


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
        self.sorted = positions[order_by_group(numbers, times[positions])]

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

    def windows(self, aggregate: Aggregate, rows: FeatureRows, queries: Queries) -> Partial:
        """What the rows of the batch contribute to each window: those that had arrived by then."""
        numbers = queries.numbers
        known = numbers >= 0
        late = known & self.disordered[numbers] if len(self.disordered) else np.zeros(len(numbers), dtype=bool)
        partial = self._in_order(aggregate, rows, queries, known & ~late)
        if late.any():
            at = np.flatnonzero(late)
            disordered = self._out_of_order(aggregate, rows, queries.take(at))
            partial = aggregate.merge(partial, tuple(_spread(part, at, len(numbers)) for part in disordered))
        return partial

    def _in_order(self, aggregate: Aggregate, rows: FeatureRows, queries: Queries, which: Mask) -> Partial:
        """Keys whose events arrived in the order of their times: a window is one range of rows."""
        groups, numbers = self.numbers[rows.positions], queries.numbers
        search = TimeSearch(groups, self.times[rows.positions])
        low = search.first_at_least(numbers, queries.first)
        # Of rows with the time of a judged event, those that arrived after it are not in its window.
        ends = []
        if queries.by_arrival:
            ends.append(TimeSearch(groups, rows.positions).first_at_least(numbers, queries.positions + 1))
        if queries.by_time:
            ends.append(search.first_at_least(numbers, queries.last + 1))
        high = np.maximum(low, reduce(np.minimum, ends))
        return _ranges(
            aggregate, rows, np.arange(len(rows.positions)), np.where(which, low, 0), np.where(which, high, 0)
        )

    def _out_of_order(self, aggregate: Aggregate, rows: FeatureRows, queries: Queries) -> Partial:
        """Keys with inversions: divide and conquer over the order of arrival (offline, after Bentley, 1980).

        In the step of block size B every query asks the block of B events just before its own block, if that is the
        other half of the same 2B; over all steps it has asked for each earlier event once.
        """
        picked = self.disordered[self.numbers[rows.positions]]
        index = np.flatnonzero(picked)
        members = np.union1d(rows.positions[index], queries.positions)
        row_rank = np.searchsorted(members, rows.positions[index])
        query_rank = np.searchsorted(members, queries.positions)
        total = self._own(aggregate, rows, index, queries)
        keys = len(self.distinct.low)
        size = 1
        while size < len(members):
            left = np.flatnonzero((row_rank // size) % 2 == 0)
            pair = row_rank[left] // (2 * size)
            left = left[np.argsort(pair, kind="stable")]
            at = index[left]
            groups = row_rank[left] // (2 * size) * keys + self.numbers[rows.positions[at]]
            wanted = query_rank // (2 * size) * keys + queries.numbers
            asks = (query_rank // size) % 2 == 1
            distinct, dense = np.unique(groups, return_inverse=True)
            group = np.searchsorted(distinct, wanted)
            asks &= group < len(distinct)
            group = np.where(asks, group, 0)
            if len(distinct):
                asks &= distinct[group] == wanted
            search = TimeSearch(dense.astype(np.int64), self.times[rows.positions[at]])
            low = search.first_at_least(group, queries.first)
            high = np.maximum(low, search.first_at_least(group, queries.last + 1))
            total = aggregate.merge(
                total, _ranges(aggregate, rows, at, np.where(asks, low, 0), np.where(asks, high, 0))
            )
            size *= 2
        return total

    def _own(self, aggregate: Aggregate, rows: FeatureRows, index: Int64s, queries: Queries) -> Partial:
        """The row at the very position of each query, where it is of the same key and within the window."""
        positions = rows.positions[index]
        order = np.argsort(positions)
        nothing = np.zeros(len(queries.numbers), dtype=np.int64)
        if not len(order):
            return _ranges(aggregate, rows, index, nothing, nothing)
        at = np.minimum(np.searchsorted(positions[order], queries.positions), len(order) - 1)
        own = positions[order[at]]
        times = self.times[own]
        found = (own == queries.positions) & (self.numbers[own] == queries.numbers)
        found &= (times >= queries.first) & (times <= queries.last)
        low = np.where(found, order[at], 0)
        return _ranges(aggregate, rows, index, low, low + found)


def _ranges(aggregate: Aggregate, rows: FeatureRows, at: Int64s, low: Int64s, high: Int64s) -> Partial:
    values = rows.positions[at] if rows.values is None else rows.values[at]
    return aggregate.ranges(aggregate.index(values), low, high)


def _spread(part: Values, at: Int64s, rows: int) -> Any:
    full: Values = np.zeros(rows, dtype=part.dtype)
    full[at] = part
    return full

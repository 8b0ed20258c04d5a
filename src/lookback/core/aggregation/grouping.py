"""The events of a batch by one grouping set: keys, order, and windows among the events of the batch itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from lookback.core.aggregation.aggregates import Aggregate, Partial
from lookback.core.values.columns import Mask, Values
from lookback.core.values.keys import Int64s, Keys, TimeSearch, number_keys, order_by_group
from lookback.core.values.times import NEVER_DUE


@dataclass(eq=False)
class Queries:
    """Windows to be measured, one per row. Measure several features with one object: it caches the ranges of its windows.

    numbers: of their keys in a grouping, -1 for a key without events in the batch; positions: events of the batch count up
    to this one; first, last: times, both included, shape (rows,). by_arrival: rows inside the window may have arrived after
    the query and must be cut off; by_time: rows that have arrived may be later than `last` and must be cut off.
    found, mixed: the results of `Grouping.ranges` and `Grouping.mixed`, once they are known.
    """

    numbers: Int64s
    positions: Int64s
    first: Int64s
    last: Int64s
    by_arrival: bool = True
    by_time: bool = True
    found: tuple[Int64s, Int64s] | None = None
    mixed: tuple[Int64s, Queries] | None = None

    @cached_property
    def earliest(self) -> int:
        """The lowest `first`."""
        return int(self.first.min(initial=NEVER_DUE))

    @cached_property
    def latest(self) -> int:
        """The highest `last`."""
        return int(self.last.max(initial=-NEVER_DUE))

    def starting_at_least(self, floor: int) -> Queries:
        """The same windows, none of which begins before `floor`."""
        if floor <= self.earliest:
            return self
        return replace(self, first=np.maximum(self.first, floor), found=None, mixed=None)

    def take(self, at: Int64s) -> Queries:
        """The queries at these positions."""
        numbers, positions = self.numbers[at], self.positions[at]
        return Queries(numbers, positions, self.first[at], self.last[at], self.by_arrival, self.by_time)


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
    def is_out_of_order(self) -> Mask:
        """Marks the events that arrived after an event of their key with a later time, shape (rows,)."""
        is_out_of_order = np.zeros(len(self.times), dtype=bool)
        # Keys ascend, so that the earliest arrival among the rows behind begins anew with each key.
        arrived = self.numbers[self.sorted] * len(self.times) + self.sorted
        is_out_of_order[self.sorted] = arrived > np.minimum.accumulate(arrived[::-1])[::-1]
        return is_out_of_order

    @cached_property
    def has_disorder(self) -> Mask:
        """Marks the keys that have an event out of order, shape (keys,)."""
        mask = np.zeros(len(self.distinct.low), dtype=bool)
        mask[self.numbers[self.is_out_of_order]] = True
        return mask

    @cached_property
    def in_order(self) -> Int64s:
        """The positions of the events in order, sorted by (key, time, arrival): within a key times and arrivals ascend."""
        return self.sorted[~self.is_out_of_order[self.sorted]] if self.has_disorder.any() else self.sorted

    @cached_property
    def _by_time(self) -> TimeSearch:
        return TimeSearch(self.numbers[self.in_order], self.times[self.in_order])

    @cached_property
    def _by_arrival(self) -> TimeSearch:
        return TimeSearch(self.numbers[self.in_order], self.in_order)

    def mixed(self, queries: Queries) -> tuple[Int64s, Queries]:
        """Selects the queries of keys with events out of order: their positions, and the queries."""
        if queries.mixed is None:
            at: Int64s = np.empty(0, dtype=np.int64)
            if self.has_disorder.any():
                at = np.flatnonzero((queries.numbers >= 0) & self.has_disorder[queries.numbers])
            queries.mixed = at, queries.take(at)
        return queries.mixed

    def ranges(self, queries: Queries) -> tuple[Int64s, Int64s]:
        """The events in order inside each window, as a range [low, high) of `in_order`; low == high is none."""
        if queries.found is None:
            queries.found = self._find_ranges(queries)
        return queries.found

    def _find_ranges(self, queries: Queries) -> tuple[Int64s, Int64s]:
        numbers, known = queries.numbers, queries.numbers >= 0
        by_time, by_arrival = self._by_time, self._by_arrival
        low = by_time.first_at_least(numbers, queries.first)
        # Rows with the time of the judged event that arrived after it are not in its window.
        if queries.by_arrival:
            high = by_arrival.first_at_least(numbers, queries.positions + 1)
            if queries.by_time:
                high = np.minimum(high, by_time.first_at_least(numbers, queries.last + 1))
        else:
            high = by_time.first_at_least(numbers, queries.last + 1)
        if queries.by_arrival != queries.by_time:
            # With events out of order, rows may lie beyond both ends of a query.
            mixed, asked = self.mixed(queries)
            if len(mixed):
                other = (
                    by_time.first_at_least(asked.numbers, asked.last + 1)
                    if queries.by_arrival
                    else by_arrival.first_at_least(asked.numbers, asked.positions + 1)
                )
                high[mixed] = np.minimum(high[mixed], other)
        return np.where(known, low, 0), np.where(known, np.maximum(low, high), 0)


class FeatureRows:
    """The rows of a batch that a feature keeps, sorted by (key, time, arrival).

    positions: of the rows among the batch's events in order of arrival; values None where none are stored.
    """

    def __init__(self, grouping: Grouping, aggregate: Aggregate, selected: Mask, values: Values | None) -> None:
        """selected, values: of all events, in order of arrival."""
        self._grouping, self._aggregate, self._selected, self._of_all = grouping, aggregate, selected, values
        self.positions: Int64s = grouping.sorted[selected[grouping.sorted]]
        self.values = None if values is None else values[self.positions]

    @cached_property
    def _in_order(self) -> tuple[Int64s | None, Any]:
        """The number of rows before each event of `Grouping.in_order` (None if all are rows), and an index over the rows."""
        kept = self._selected[self._grouping.in_order]
        positions, before = self._grouping.in_order, None
        if not kept.all():
            positions = positions[kept]
            before = np.concatenate(([0], np.cumsum(kept))).astype(np.int64)
        return before, self._index(positions)

    @cached_property
    def _blocks(self) -> list[_Block]:
        """The rows out of order, in blocks of 1, 2, 4, ... by arrival (the logarithmic method, offline; Bentley, 1980).

        The first n of them had arrived by a query: a block of 2^k rows for every bit of n.
        """
        grouping, positions = self._grouping, self._out_of_order
        ranks = np.searchsorted(self._arrived, positions)
        keys, blocks = len(grouping.distinct.low), []
        size = 1
        while size <= len(positions):
            left = np.flatnonzero((ranks // size) % 2 == 0)
            pair = ranks[left] // (2 * size)
            order = np.argsort(pair, kind="stable")
            at = positions[left[order]]
            groups, dense = np.unique(pair[order] * keys + grouping.numbers[at], return_inverse=True)
            search = TimeSearch(dense.astype(np.int64), grouping.times[at])
            blocks.append(_Block(size, groups, search, self._index(at)))
            size *= 2
        return blocks

    @cached_property
    def _out_of_order(self) -> Int64s:
        """The rows out of order, by (key, time, arrival)."""
        return self.positions[self._grouping.is_out_of_order[self.positions]]

    @cached_property
    def _arrived(self) -> Int64s:
        """The rows out of order, by arrival."""
        return np.sort(self._out_of_order)

    def _index(self, positions: Int64s) -> Any:
        return self._aggregate.index(positions if self._of_all is None else self._of_all[positions])

    def windows(self, queries: Queries) -> Partial:
        """Aggregates the rows of each window that had arrived by its query."""
        low, high = self._grouping.ranges(queries)
        before, index = self._in_order
        if before is not None:
            low, high = before[low], before[high]
        partial = self._aggregate.ranges(index, low, high)
        mixed, asked = self._grouping.mixed(queries)
        if len(mixed) and len(self._arrived):
            arrived = np.searchsorted(self._arrived, asked.positions, side="right")
            keys = len(self._grouping.distinct.low)
            for block in self._blocks:
                at, low, high = block.ranges(asked, arrived, keys)
                more = self._aggregate.ranges(block.index, low, high)
                partial = merge_at(self._aggregate, partial, mixed[at], more)
        return partial


@dataclass(frozen=True)
class _Block:
    """The first of every two neighbouring blocks of `size` rows out of order, all in one.

    groups: pair of blocks * number of keys + key, ascending; search: over the rows by group and time; index: over them.
    """

    size: int
    groups: Int64s
    search: TimeSearch
    index: Any

    def ranges(self, queries: Queries, arrived: Int64s, keys: int) -> tuple[Int64s, Int64s, Int64s]:
        """The queries that have rows in these blocks, and the range of rows of each.

        arrived: how many rows out of order had arrived by each query.
        """
        wanted = arrived // (2 * self.size) * keys + queries.numbers
        at = np.flatnonzero((arrived // self.size) % 2 == 1)
        group = np.minimum(np.searchsorted(self.groups, wanted[at]), len(self.groups) - 1)
        found = self.groups[group] == wanted[at]
        at, group = at[found], group[found]
        low = self.search.first_at_least(group, queries.first[at])
        return at, low, np.maximum(low, self.search.first_at_least(group, queries.last[at] + 1))


def merge_at(aggregate: Aggregate, partial: Partial, at: Int64s, more: Partial) -> Partial:
    """Merges `more` into the windows of `partial` at these positions; arrays change in place where their type allows it."""
    if len(at) == len(partial[0]):
        return aggregate.merge(partial, more)
    merged = aggregate.merge(tuple(part[at] for part in partial), more)
    wholes = []
    for whole, part in zip(partial, merged, strict=True):
        # Sums that no longer fit 64 bits.
        wide = whole if whole.dtype == part.dtype else whole.astype(part.dtype)
        wide[at] = part
        wholes.append(wide)
    return tuple(wholes)

"""The events of a batch by one grouping set: keys, order, and windows among the events of the batch itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
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

    def take(self, index: Mask) -> FeatureRows:
        """The rows of a mask."""
        return FeatureRows(self.positions[index], None if self.values is None else self.values[index])


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

    @cached_property
    def late(self) -> Mask:
        """Which events arrived after one of their key with a later time, shape (rows,)."""
        late = np.zeros(len(self.times), dtype=bool)
        mixed = self.disordered
        if mixed.any():
            at = self.sorted[mixed[self.numbers[self.sorted]]]
            at = at[np.lexsort((at, self.numbers[at]))]
            ranks = np.unique(self.times[at], return_inverse=True)[1]
            # Of ascending keys, so that what is highest so far begins anew with each.
            keyed = self.numbers[at] * (int(ranks.max()) + 1) + ranks
            late[at] = keyed < np.maximum.accumulate(keyed)
        return late

    def windows(self, aggregate: Aggregate, rows: FeatureRows, queries: Queries) -> Partial:
        """What the rows of the batch contribute to each window: those that had arrived by then."""
        known = queries.numbers >= 0
        if not len(self.disordered) or not self.disordered.any():
            return self._in_order(aggregate, rows, queries, known, None)
        mixed = np.flatnonzero(known & self.disordered[queries.numbers])
        late = self.late[rows.positions]
        partial = self._in_order(aggregate, rows.take(~late), queries, known, mixed)
        if late.any() and len(mixed):
            overtaken = self._late(aggregate, rows.take(late), queries.take(mixed))
            partial = aggregate.merge(partial, tuple(_spread(part, mixed, len(known)) for part in overtaken))
        return partial

    def _in_order(
        self, aggregate: Aggregate, rows: FeatureRows, queries: Queries, which: Mask, mixed: Int64s | None
    ) -> Partial:
        """Rows that arrived in the order of their times: a window is one range of them.

        mixed: the queries of keys that have late events too, where rows may be beyond both ends of what a query asks for.
        """
        groups, numbers = self.numbers[rows.positions], queries.numbers
        by_time, by_arrival = TimeSearch(groups, self.times[rows.positions]), TimeSearch(groups, rows.positions)
        low = by_time.first_at_least(numbers, queries.first)
        # Of rows with the time of a judged event, those that arrived after it are not in its window.
        if queries.by_arrival:
            high = by_arrival.first_at_least(numbers, queries.positions + 1)
            if queries.by_time:
                high = np.minimum(high, by_time.first_at_least(numbers, queries.last + 1))
        else:
            high = by_time.first_at_least(numbers, queries.last + 1)
        if mixed is not None and queries.by_arrival != queries.by_time:
            asked = queries.take(mixed)
            other = (
                by_time.first_at_least(asked.numbers, asked.last + 1)
                if queries.by_arrival
                else by_arrival.first_at_least(asked.numbers, asked.positions + 1)
            )
            high[mixed] = np.minimum(high[mixed], other)
        high = np.maximum(low, high)
        return _ranges(aggregate, rows, slice(None), np.where(which, low, 0), np.where(which, high, 0))

    def _late(self, aggregate: Aggregate, rows: FeatureRows, queries: Queries) -> Partial:
        """Late rows: divide and conquer over their order of arrival (offline, after Bentley, 1980).

        What has arrived by a query is the first so many of them: a block of 2^k rows for every bit of that number.
        """
        arrived = np.sort(rows.positions)
        row_rank = np.searchsorted(arrived, rows.positions)
        query_rank = np.searchsorted(arrived, queries.positions, side="right")
        nothing = np.zeros(len(queries.numbers), dtype=np.int64)
        total = _ranges(aggregate, rows, slice(None), nothing, nothing)
        keys = len(self.distinct.low)
        size = 1
        while size <= len(arrived):
            left = np.flatnonzero((row_rank // size) % 2 == 0)
            pair = row_rank[left] // (2 * size)
            at = left[np.argsort(pair, kind="stable")]
            groups = row_rank[at] // (2 * size) * keys + self.numbers[rows.positions[at]]
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


def _ranges(aggregate: Aggregate, rows: FeatureRows, at: Int64s | slice, low: Int64s, high: Int64s) -> Partial:
    values = rows.positions[at] if rows.values is None else rows.values[at]
    return aggregate.ranges(aggregate.index(values), low, high)


def _spread(part: Values, at: Int64s, rows: int) -> Any:
    full: Values = np.zeros(rows, dtype=part.dtype)
    full[at] = part
    return full

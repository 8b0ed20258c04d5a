"""The rows of a batch that a feature keeps, and aggregates of windows over them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from lookback.core.aggregation.aggregate import Aggregate
from lookback.core.aggregation.exact import Partial
from lookback.core.aggregation.grouping import Grouping, Queries
from lookback.core.values.cache import forget_cached
from lookback.core.values.columns import Mask, Values
from lookback.core.values.keys import Int64s, TimeSearch


class FeatureRows:
    """The rows of a batch that a feature keeps, sorted by (key, time, arrival).

    Attributes:
        selected: Marks the rows among the events of the batch, which are in order of arrival.
        all_values: The values of all events of the batch; None if the feature stores none.
    """

    def __init__(self, grouping: Grouping, aggregate: Aggregate, selected: Mask, values: Values | None) -> None:
        """Takes `selected` and `values` with one element per event of the batch, in order of arrival."""
        self._grouping, self._aggregate = grouping, aggregate
        self.selected, self.all_values = selected, values

    def forget_searches(self) -> None:
        """Drops the cached indexes; the next measurement rebuilds them."""
        forget_cached(self)

    @property
    def positions(self) -> Int64s:
        """The positions of the rows."""
        positions: Int64s = self._grouping.sorted[self.selected[self._grouping.sorted]]
        return positions

    @property
    def values(self) -> Values | None:
        """The values of the rows."""
        return None if self.all_values is None else self.all_values[self.positions]

    @cached_property
    def _in_order(self) -> _Indexed:
        return self._index_rows(self._grouping.in_order)

    @cached_property
    def _sorted(self) -> _Indexed:
        return self._index_rows(self._grouping.sorted)

    @cached_property
    def _by_arrival(self) -> _Indexed:
        return self._index_rows(self._grouping.arrived) if self._grouping.has_disorder.any() else self._sorted

    def _index_rows(self, positions: Int64s) -> _Indexed:
        """Indexes the rows among the events at these positions, in this order."""
        kept = self.selected[positions]
        if kept.all():
            return _Indexed(None, self._build_index(positions))
        before = np.zeros(len(kept) + 1, dtype=np.int64)
        np.cumsum(kept, out=before[1:])
        return _Indexed(before, self._build_index(positions[kept]))

    @cached_property
    def _blocks(self) -> list[_Block]:
        """The rows out of order in blocks of 1, 2, 4, ... by arrival (the logarithmic method, offline; Bentley, 1980).

        If n of these rows had arrived by a query, the query reads one block of 2^k rows for each bit k set in n.
        """
        grouping, positions = self._grouping, self._out_of_order
        ranks = np.searchsorted(self._arrived, positions)
        keys, blocks = len(grouping.distinct), []
        rows = 1
        while rows <= len(positions):
            left = np.flatnonzero((ranks // rows) % 2 == 0)
            pair = ranks[left] // (2 * rows)
            order = np.argsort(pair, kind="stable")
            at = positions[left[order]]
            groups, dense = np.unique(pair[order] * keys + grouping.numbers[at], return_inverse=True)
            search = TimeSearch(dense.astype(np.int64), grouping.times[at])
            blocks.append(_Block(rows, groups, search, self._build_index(at)))
            rows *= 2
        return blocks

    @cached_property
    def _out_of_order(self) -> Int64s:
        """The positions of the rows out of order, by (key, time, arrival)."""
        positions = self.positions
        return positions[self._grouping.is_out_of_order[positions]]

    @cached_property
    def _arrived(self) -> Int64s:
        """The positions of the rows out of order, by arrival."""
        return np.sort(self._out_of_order)

    def _build_index(self, positions: Int64s) -> Any:
        values = positions if self.all_values is None else self.all_values[positions]
        return self._aggregate.index_rows(values, self._grouping.times[positions], positions)

    def aggregate_windows(self, queries: Queries) -> Partial:
        """Aggregates the rows of each window that had arrived by its query."""
        if self._aggregate.additive and queries.windows is None and queries.by_arrival != queries.by_time:
            return self._aggregate_spans(queries)
        return self._aggregate_ranges(queries)

    def _aggregate_spans(self, queries: Queries) -> Partial:
        """Aggregates windows that are cut off by arrival alone or by time alone, for an additive aggregate."""
        spans = self._grouping.find_spans(queries)
        before, until = self._sorted, self._sorted if queries.by_time else self._by_arrival
        high, low = until.count_before(spans.high), before.count_before(spans.low)
        partial = self._aggregate.subtract_rows(until.index, high, before.index, low)
        at, others = spans.other
        return _put_at(partial, at, self._aggregate_ranges(others)) if len(at) else partial

    def _aggregate_ranges(self, queries: Queries) -> Partial:
        low, high = map(self._in_order.count_before, self._grouping.find_ranges(queries))
        partial = self._aggregate.aggregate_ranges(self._in_order.index, low, high)
        positions, disordered = self._grouping.select_disordered(queries)
        if len(positions) and len(self._arrived):
            arrived = np.searchsorted(self._arrived, disordered.positions, side="right")
            keys = len(self._grouping.distinct)
            for block in self._blocks:
                at, low, high = block.find_ranges(disordered, arrived, keys)
                more = self._aggregate.aggregate_ranges(block.index, low, high)
                partial = merge_at(self._aggregate, partial, positions[at], more)
        return partial


class _Indexed(NamedTuple):
    """An index over some of the events; `before` is the number of its rows before each event, None if it has all."""

    before: Int64s | None
    index: Any

    def count_before(self, places: Int64s) -> Int64s:
        """Returns the number of rows among the first `places` events."""
        return places if self.before is None else self.before[places]


@dataclass(frozen=True)
class _Block:
    """All blocks of one level: the first one of each pair of adjacent blocks of `rows` rows out of order.

    Attributes:
        rows: The number of rows per block.
        groups: The number of the pair * number of keys + key, ascending.
        search: Finds rows by group and time.
        index: The aggregate's index over the same rows.
    """

    rows: int
    groups: Int64s
    search: TimeSearch
    index: Any

    def find_ranges(self, queries: Queries, arrived: Int64s, keys: int) -> tuple[Int64s, Int64s, Int64s]:
        """Returns the positions of the queries with rows in these blocks, and the range [low, high) of rows of each.

        `arrived` is the number of rows out of order that had arrived by each query.
        """
        wanted = arrived // (2 * self.rows) * keys + queries.numbers
        at = np.flatnonzero((arrived // self.rows) % 2 == 1)
        group = np.minimum(np.searchsorted(self.groups, wanted[at]), len(self.groups) - 1)
        has_group = self.groups[group] == wanted[at]
        at, group = at[has_group], group[has_group]
        low = self.search.find_first(group, queries.first[at])
        return at, low, np.maximum(low, self.search.find_first(group, queries.last[at] + 1))


def merge_at(aggregate: Aggregate, partial: Partial, at: Int64s, more: Partial) -> Partial:
    """Merges `more` into the windows of `partial` at these positions, in place if the types of the arrays allow it."""
    if len(at) == len(partial[0]):
        return aggregate.merge(partial, more)
    return _put_at(partial, at, aggregate.merge(tuple(part[at] for part in partial), more))


def _put_at(partial: Partial, at: Int64s, parts: Partial) -> Partial:
    """Replaces the contributions to the windows at these positions."""
    wholes = []
    for whole, part in zip(partial, parts, strict=True):
        # The types differ if sums no longer fit in 64 bits.
        wide = whole.astype(np.result_type(whole, part), copy=False)
        wide[at] = part
        wholes.append(wide)
    return tuple(wholes)

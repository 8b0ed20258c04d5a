"""Groups the events of a batch by the fields of one group_by and aggregates windows over them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from lookback.core.values.cache import RecentCache, forget_cached
from lookback.core.values.columns import Mask
from lookback.core.values.keys import (
    Int64s,
    Keys,
    TimeSearch,
    list_ranges,
    number_keys,
    order_by_group,
    order_by_number,
)
from lookback.core.values.times import NEVER_DUE


@dataclass(eq=False)
class Queries:
    """Windows to measure, one per row.

    Measure all features of the same windows with one object: it caches the ranges of its windows.

    Attributes:
        numbers: The number of each key in a grouping, shape (rows,); -1 for a key without events in the batch.
        positions: The last event of the batch that each query includes, shape (rows,).
        first: The first time of each window, inclusive, shape (rows,).
        last: The last time of each window, inclusive, shape (rows,).
        by_arrival: Rows inside a window may have arrived after the query and must be cut off. If only this is true,
            each query belongs to the event at its position, and `last` is the time of that event.
        by_time: Rows that have arrived may be later than `last` and must be cut off. If only this is true, the last
            event of each query has the query's key.
        windows: The distinct windows, if many queries measure the same window as of different events. Rows of earlier
            batches are then aggregated once per window, and the last event of each query must have the query's key.
        window_of: The number of each query's window in `windows`.
        ranges: The cached result of `Grouping.find_ranges`.
        disordered: The cached result of `Grouping.select_disordered`.
        spans: The cached result of `Grouping.find_spans`.
        stored: The cached results of `Run.find_windows`, by run.
    """

    numbers: Int64s
    positions: Int64s
    first: Int64s
    last: Int64s
    by_arrival: bool = True
    by_time: bool = True
    windows: Queries | None = None
    window_of: Int64s | None = None
    ranges: tuple[Int64s, Int64s] | None = None
    disordered: tuple[Int64s, Queries] | None = None
    spans: Spans | None = None
    stored: dict[str, tuple[Int64s, Int64s, Int64s]] = field(default_factory=dict)

    @cached_property
    def earliest(self) -> int:
        """The lowest `first`."""
        return int(self.first.min(initial=NEVER_DUE))

    @cached_property
    def latest(self) -> int:
        """The highest `last`."""
        return int(self.last.max(initial=-NEVER_DUE))

    def clip_to(self, floor: int) -> Queries:
        """Returns the same windows, cut off before `floor`."""
        if floor <= self.earliest:
            return self
        windows = None if self.windows is None else self.windows.clip_to(floor)
        first = np.maximum(self.first, floor)
        return replace(self, first=first, windows=windows, ranges=None, disordered=None, spans=None, stored={})

    def take(self, at: Int64s) -> Queries:
        """Returns the queries at these positions."""
        numbers, positions = self.numbers[at], self.positions[at]
        return Queries(numbers, positions, self.first[at], self.last[at], self.by_arrival, self.by_time)


@dataclass(frozen=True)
class Spans:
    """The events inside each window: the events up to its end minus the events before its begin.

    Attributes:
        low: The number of events of `Grouping.sorted` before each window.
        high: The number of events of `Grouping.arrived` up to the end of each window; of `sorted` if windows are cut
            off by time. They include the events before the window, except for the queries of `other`.
        other: The positions of the queries that must be measured in another way, and these queries.
    """

    low: Int64s
    high: Int64s
    other: tuple[Int64s, Queries]


class Grouping:
    """The events of a batch grouped by key, in order of arrival.

    Attributes:
        mine: Marks the events that belong to this shard.
        numbers: The number of each event's key, shape (events,); -1 for events of other shards.
        sorted: The positions of this shard's events by (key, time, arrival).
    """

    def __init__(self, keys: Keys, times: Int64s, mine: Mask) -> None:
        self.mine = mine
        self.times = times
        positions = np.flatnonzero(mine)
        numbers, self.distinct = number_keys(keys.take(positions))
        self.numbers = np.full(len(times), -1, dtype=np.int64)
        self.numbers[positions] = numbers
        self.sorted = positions[order_by_group(numbers, times[positions])]
        # Measuring alternates between the queries and those that must be measured in another way.
        self._arrivals: RecentCache[_GroupArrivals] = RecentCache(2)

    def forget_searches(self) -> None:
        """Drops the cached search structures; the next search rebuilds them."""
        forget_cached(self)
        self._arrivals.clear()

    def list_positions(self, is_wanted: Mask) -> Int64s:
        """Lists the positions of the wanted keys' events by (key, time, arrival); `is_wanted` has shape (keys,)."""
        wanted = np.flatnonzero(is_wanted)
        if len(wanted) == len(is_wanted):
            return self.sorted
        begins = self._begins[wanted]
        positions: Int64s = self.sorted[list_ranges(begins, self._begins[wanted + 1] - begins)]
        return positions

    @cached_property
    def sorted_numbers(self) -> Int64s:
        """The number of the key of each event of `sorted`."""
        return self.numbers[self.sorted]

    @cached_property
    def sorted_times(self) -> Int64s:
        """The time of each event of `sorted`."""
        return self.times[self.sorted]

    @cached_property
    def _sorted_places(self) -> Int64s:
        """The key * events + position of each event of `sorted`."""
        return self.sorted_numbers * len(self.times) + self.sorted

    @cached_property
    def _begins(self) -> Int64s:
        """The number of events of `sorted` before those of each key, and before the end, shape (keys + 1,)."""
        return np.searchsorted(self.sorted_numbers, np.arange(len(self.distinct) + 1)).astype(np.int64)

    @cached_property
    def first_positions(self) -> Int64s:
        """The position of each key's first event by time, shape (keys,)."""
        positions = np.zeros(len(self.distinct), dtype=np.int64)
        backwards = self.sorted[::-1]
        positions[self.numbers[backwards]] = backwards
        return positions

    @cached_property
    def is_out_of_order(self) -> Mask:
        """Marks the events that arrived after an event of their key with a later time, shape (rows,)."""
        is_out_of_order = np.zeros(len(self.times), dtype=bool)
        # Keys ascend, so the minimum over the arrivals of later rows never crosses into another key.
        arrived = self._sorted_places
        is_out_of_order[self.sorted] = arrived > np.minimum.accumulate(arrived[::-1])[::-1]
        return is_out_of_order

    @cached_property
    def has_disorder(self) -> Mask:
        """Marks the keys with an event out of order, shape (keys,)."""
        has_disorder = np.zeros(len(self.distinct), dtype=bool)
        has_disorder[self.numbers[self.is_out_of_order]] = True
        return has_disorder

    @cached_property
    def in_order(self) -> Int64s:
        """The positions of the events in order by (key, time, arrival): within a key, times and arrivals ascend."""
        return self.sorted[~self.is_out_of_order[self.sorted]] if self.has_disorder.any() else self.sorted

    @cached_property
    def arrived(self) -> Int64s:
        """The positions of this shard's events by (key, arrival)."""
        if not self.has_disorder.any():
            return self.sorted
        positions = np.flatnonzero(self.mine)
        return positions[order_by_number(self.numbers[positions])]

    @cached_property
    def arrived_until(self) -> Int64s:
        """The number of events of `arrived` up to each event; only for events of this shard."""
        ranks = np.zeros(len(self.numbers), dtype=np.int64)
        ranks[self.arrived] = np.arange(1, len(self.arrived) + 1)
        return ranks

    @cached_property
    def _latest_arrival(self) -> Int64s:
        """The highest key * events + position among the first n rows of `sorted`, for each n."""
        latest = np.full(len(self.sorted) + 1, -1, dtype=np.int64)
        np.maximum.accumulate(self._sorted_places, out=latest[1:])
        return latest

    @cached_property
    def _by_time(self) -> TimeSearch:
        """Finds times among the events of `sorted`."""
        return TimeSearch(self.sorted_numbers, self.sorted_times)

    @cached_property
    def _in_order_before(self) -> Int64s | None:
        """The number of events in order among the first n of `sorted`, for each n; None if all are in order."""
        if not self.has_disorder.any():
            return None
        before = np.zeros(len(self.sorted) + 1, dtype=np.int64)
        np.cumsum(~self.is_out_of_order[self.sorted], out=before[1:])
        return before

    def _find_first(self, numbers: Int64s, times: Int64s) -> Int64s:
        """Finds for each (key, time) the number of events of `in_order` before it."""
        return self._count_in_order(self._by_time.find_first(numbers, times))

    def _count_in_order(self, places: Int64s) -> Int64s:
        """Returns how many of the first `places` events of `sorted` are in order."""
        return places if self._in_order_before is None else self._in_order_before[places]

    @cached_property
    def _by_arrival(self) -> TimeSearch:
        return TimeSearch(self.numbers[self.in_order], self.in_order)

    @cached_property
    def _in_order_arrived(self) -> Int64s:
        """The end of the rows of `in_order` that had arrived with each event of this shard and have its key."""
        # Events in order have the same relative order by arrival as by time.
        if self._in_order_before is None:
            return self.arrived_until
        until = np.zeros(len(self.numbers), dtype=np.int64)
        until[self.arrived] = np.cumsum(~self.is_out_of_order[self.arrived])
        return until

    def select_disordered(self, queries: Queries) -> tuple[Int64s, Queries]:
        """Selects the queries of keys with events out of order. Returns their positions and the queries."""
        if queries.disordered is None:
            at: Int64s = np.empty(0, dtype=np.int64)
            if self.has_disorder.any():
                at = np.flatnonzero((queries.numbers >= 0) & self.has_disorder[queries.numbers])
            queries.disordered = at, queries.take(at)
        return queries.disordered

    def find_spans(self, queries: Queries) -> Spans:
        """Finds the events inside each window of queries that are cut off by arrival alone, or by time alone."""
        if queries.spans is None:
            queries.spans = self._compute_spans(queries)
        return queries.spans

    def _compute_spans(self, queries: Queries) -> Spans:
        low = self._by_time.find_first(queries.numbers, queries.first)
        arrivals = self._find_arrivals(queries)
        high = self._by_time.find_first(queries.numbers, queries.last + 1) if queries.by_time else arrivals.ends
        at: Int64s = np.empty(0, dtype=np.int64)
        if self.has_disorder.any():
            # Events that arrive after the query may lie before its window, and earlier arrivals may lie after it.
            is_other = self._latest_arrival[high if queries.by_time else low] > arrivals.places
            if queries.by_arrival:
                is_other |= arrivals.is_out_of_order
            at = np.flatnonzero(is_other)
        return Spans(low, np.maximum(low, high), (at, queries.take(at)))

    def _find_arrivals(self, queries: Queries) -> _GroupArrivals:
        """Returns how the last events of queries arrived; all windows of the same events share one result."""
        # The cache entry keeps the array alive, so that no other array can have its id.
        return self._arrivals.get(
            id(queries.positions), lambda: _GroupArrivals(self, queries.numbers, queries.positions)
        )

    def find_ranges(self, queries: Queries) -> tuple[Int64s, Int64s]:
        """Finds the events in order inside each window, as a range [low, high) of `in_order`; low == high if none."""
        if queries.ranges is None:
            queries.ranges = self._compute_ranges(queries)
        return queries.ranges

    def _compute_ranges(self, queries: Queries) -> tuple[Int64s, Int64s]:
        if queries.windows is not None:
            return self._compute_shared_ranges(queries, queries.windows)
        if queries.by_arrival and queries.by_time:
            return self._compute_each_range(queries)
        spans = self.find_spans(queries)
        low = self._count_in_order(spans.low)
        high = self._in_order_arrived[queries.positions] if queries.by_arrival else self._count_in_order(spans.high)
        # With events out of order, rows may lie beyond both ends of a window.
        at, disordered = self.select_disordered(queries)
        if len(at):
            if queries.by_arrival:
                other = self._find_first(disordered.numbers, disordered.last + 1)
            else:
                other = self._in_order_arrived[disordered.positions]
            high[at] = np.minimum(high[at], other)
        return low, np.maximum(low, high)

    def _compute_each_range(self, queries: Queries) -> tuple[Int64s, Int64s]:
        numbers, known = queries.numbers, queries.numbers >= 0
        low, beyond = self._find_first(numbers, queries.first), self._find_first(numbers, queries.last + 1)
        # Rows with the time of the judged event that arrived after it are outside its window.
        high = np.minimum(beyond, self._by_arrival.find_first(numbers, queries.positions + 1))
        return np.where(known, low, 0), np.where(known, np.maximum(low, high), 0)

    def _compute_shared_ranges(self, queries: Queries, windows: Queries) -> tuple[Int64s, Int64s]:
        """Searches for each distinct window and each event once instead of once per query."""
        low = self._find_first(windows.numbers, windows.first)[queries.window_of]
        beyond = self._find_first(windows.numbers, windows.last + 1)[queries.window_of]
        return low, np.maximum(low, np.minimum(beyond, self._in_order_arrived[queries.positions]))


class _GroupArrivals:
    """The order in which the events at some positions arrived; `numbers` are those of their keys."""

    def __init__(self, grouping: Grouping, numbers: Int64s, positions: Int64s) -> None:
        self._grouping, self._numbers, self._positions = grouping, numbers, positions

    @cached_property
    def ends(self) -> Int64s:
        """The number of events of `Grouping.arrived` up to each event."""
        return self._grouping.arrived_until[self._positions]

    @cached_property
    def places(self) -> Int64s:
        """The key * events + position of each event."""
        grouping = self._grouping
        if self._positions is grouping.sorted:
            return grouping._sorted_places
        return self._numbers * len(grouping.times) + self._positions

    @cached_property
    def is_out_of_order(self) -> Mask:
        """Marks the events out of order."""
        return self._grouping.is_out_of_order[self._positions]

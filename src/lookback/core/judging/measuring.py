"""Measures windows over the events of a segment and the rows of earlier events in state."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import numpy as np

from lookback.core.aggregation.distinct import STORED, DistinctCounter, GroupedRows
from lookback.core.aggregation.edges import Edge
from lookback.core.aggregation.exact import Partial
from lookback.core.aggregation.featurerows import FeatureRows, merge_at
from lookback.core.aggregation.gathered import GatheredAggregate
from lookback.core.aggregation.grouping import Grouping, Queries
from lookback.core.aggregation.runs import Run, has_negative
from lookback.core.aggregation.sharedruns import FeatureColumn
from lookback.core.judging.lateness import find_in_time
from lookback.core.rules.compiled import CompiledRule, Feature
from lookback.core.state.shard import ShardState
from lookback.core.state.storedruns import StoredRun
from lookback.core.streams.events import Events
from lookback.core.values.cache import RecentCache
from lookback.core.values.columns import Column, Mask, Values
from lookback.core.values.keys import Int64s, Keys, TimeSearch, find_keys, number_keys, order_by_group
from lookback.core.values.times import NEVER_DUE
from lookback.core.values.types import BIGINT
from lookback.core.values.windows import Lookback, Window


def select_kept(feature: Feature, events: Events) -> Mask:
    """Marks the events whose rows a feature keeps: where and filter hold, and the aggregate includes the argument."""
    selected = np.ones(len(events), dtype=bool)
    for condition in (feature.where, feature.filter):
        if condition is not None:
            selected &= events.value(condition).is_true()
    if feature.argument is not None:
        values = events.value(feature.argument)
        if not feature.aggregate.is_ordered:
            selected &= values.is_known()
        elif values.error is not None:
            selected &= ~values.error
    return selected


def select_values(feature: Feature, events: Events) -> Column | None:
    """Returns what the feature keeps of the argument's values; None if it stores none."""
    aggregate = feature.aggregate
    if feature.argument is None or not aggregate.stores_value:
        return None
    values = events.value(feature.argument)
    return aggregate.pack(values, events.id_texts) if isinstance(aggregate, Edge) else values


class Ceiling:
    """Upper bounds of a feature's aggregate over the windows of the counted events, known from larger windows.

    Attributes:
        feature: The feature.
        delay: The delay of the windows.
        counted: The counted events (see `Measuring.find_lookbacks`).
        counted_as: What identifies them.
        size: The size of the windows; the bounds also hold for smaller ones.
        column: The bounds, shape (counted,); None if nothing is known.
        widest: The size of the largest windows, and their column before smaller windows lowered it.
    """

    def __init__(self, feature: Feature, delay: int, counted: Int64s, counted_as: Hashable) -> None:
        self.feature, self.delay, self.counted, self.counted_as = feature, delay, counted, counted_as
        self.size = -1
        self.column: Column | None = None
        self.widest: tuple[int, Column | None] = -1, None
        self._is_own = False
        # The highest value, or None if any value is an error; empty until needed.
        self._most: list[int | None] = []

    def covers(self, window: Lookback) -> bool:
        """Returns whether the bounds hold for windows of this size."""
        return self.column is not None and window.size <= self.size

    def is_below(self, limit: int) -> bool:
        """Returns whether every value is at most limit - 1; true without values, false if any value is an error."""
        column = self.column
        assert column is not None
        if not self._most:
            known = column.values if column.null is None else column.values[~column.null]
            self._most = [None if column.error is not None else int(known.max()) if len(known) else -NEVER_DUE]
        most = self._most[0]
        return most is not None and most <= (limit - 1) * 10**column.type.scale

    def begin(self, size: int, column: Column) -> None:
        """Starts with values or upper bounds of windows of all counted events; callers must not change the column."""
        self.size, self.column, self._is_own, self._most = size, column, False, []
        self.widest = size, column

    def lower(self, window: Lookback, at: Int64s, column: Column) -> None:
        """Lowers the bounds to the values of smaller windows; `at` are their events' positions in `counted`."""
        whole, is_widest = self.column, window.size == self.size
        assert whole is not None
        self.size, self._most = window.size, []
        if column.values.dtype != whole.values.dtype:
            return
        if not self._is_own:
            whole = Column(whole.type, whole.values.copy(), whole.null, whole.error)
            self.column, self._is_own = whole, not is_widest
        if column.null is None and column.error is None:
            whole.values[at] = column.values
        else:
            # An event without rows in its window keeps its bound.
            is_known = column.is_known()
            whole.values[at[is_known]] = column.values[is_known]
        if is_widest:
            self.widest = window.size, whole


def _spread(at: Int64s, rows: Partial, window_of: Int64s) -> tuple[Int64s, Partial]:
    """Copies the contributions to windows to the queries of these windows; `window_of` is the window of each query."""
    ranks = np.full(int(window_of.max()) + 1, -1, dtype=np.int64)
    ranks[at] = np.arange(len(at))
    rank = ranks[window_of]
    queries = np.flatnonzero(rank >= 0)
    return queries, tuple(part[rank[queries]] for part in rows)


class Measuring:
    """Measures windows for the events of one shard, in order of arrival.

    `watermarks` has the watermark of each event, shape (rows,). Rows of earlier batches count only if `uses_state` is
    true.
    """

    def __init__(
        self, state: ShardState, events: Events, watermarks: Int64s, shard: int, shards: int, *, uses_state: bool = True
    ) -> None:
        self.state, self.events, self.watermarks = state, events, watermarks
        self._shard, self._shards, self._uses_state = shard, shards, uses_state
        self._groupings: dict[tuple[tuple[str, ...], tuple[str, ...]], Grouping] = {}
        self._in_time: dict[int, Mask] = {}
        self._listed: dict[tuple[tuple[str, ...], int], Int64s] = {}
        # The arrays in these caches are as long as the batch. Small caches suffice: rules with the same grouping, and
        # among them rules with the same measures, are judged one after another (see `CompiledRule.sharing_key`).
        self._rows: RecentCache[FeatureRows] = RecentCache(64)
        self._counted: RecentCache[tuple[Int64s, Int64s]] = RecentCache(2)
        self._queries: RecentCache[Queries] = RecentCache(4)
        self._columns: RecentCache[Column] = RecentCache(16)
        self._distincts: RecentCache[DistinctCounter] = RecentCache(4)
        self._run_numbers: RecentCache[Int64s] = RecentCache(64)
        self._ceilings: RecentCache[Ceiling] = RecentCache(10)
        self._has_negative: dict[Hashable, bool] = {}
        self._window: Window | None = None
        # The features of the last rule with a rising condition.
        self._features: set[str] | None = None

    def restrict_to(self, positions: Int64s) -> Measuring:
        """Makes a copy that measures only these events, at ascending positions, without rows of earlier batches."""
        events, watermarks = self.events.take(positions), self.watermarks[positions]
        return Measuring(self.state, events, watermarks, self._shard, self._shards, uses_state=False)

    def group_events(self, group_by: tuple[str, ...], routed_by: tuple[str, ...] | None = None) -> Grouping:
        """Groups this shard's events by one grouping set; `routed_by` decides which these are, if another one does."""
        known_as = group_by, group_by if routed_by is None else routed_by
        if known_as not in self._groupings:
            self.forget_searches()
            mine = self.events.find_shards(known_as[1], self._shards) == self._shard
            self._groupings[known_as] = Grouping(self.events.find_keys(group_by), self.events.times, mine)
        return self._groupings[known_as]

    def forget_searches(self) -> None:
        """Drops the caches for measuring the windows of a grouping, except its rows, which must still be stored."""
        caches = (self._counted, self._queries, self._columns, self._distincts, self._run_numbers, self._ceilings)
        for cache in caches:
            cache.clear()
        self._listed.clear()
        for rows in self._rows.values():
            rows.forget_searches()
        for grouping in self._groupings.values():
            grouping.forget_searches()

    def forget_other_windows(self, rule: CompiledRule) -> None:
        """Drops the cached windows of other rules before all events are measured over the windows of this rule.

        Rules with the same windows are judged one after another (see `CompiledRule.sharing_key`), and so are rules that
        count the distinct values of the same feature.
        """
        counted = {feature.feature_id for feature in rule.features if feature.function == "count_distinct"}
        self._distincts.retain(lambda key: key[0] in counted)
        if rule.spec.window != self._window:
            self._window, windows = rule.spec.window, {measure.window for measure in rule.measures}
            self._queries.retain(lambda key: key[0] in windows)
            self._columns.retain(lambda key: key[1] in windows)

    def _forget_other_features(self, rule: CompiledRule) -> None:
        """Drops the caches for measuring the features of other rules, except their rows, which must still be stored."""
        features = {feature.feature_id for feature in rule.features}
        if features != self._features:
            before, self._features = self._features, features
            for feature_id, rows in self._rows.items():
                if feature_id not in features and (before is None or feature_id in before):
                    rows.forget_searches()

    def find_in_time(self, allowed_lateness: int) -> Mask:
        """Marks all events that are in time, whether or not a rule counts them; callers must not change the mask."""
        if allowed_lateness not in self._in_time:
            self._in_time[allowed_lateness] = find_in_time(self.events.times, self.watermarks, allowed_lateness)
        return self._in_time[allowed_lateness]

    def list_in_time(self, group_by: tuple[str, ...], allowed_lateness: int) -> tuple[Mask, Int64s]:
        """Returns the mask of `find_in_time`, and this shard's events that are in time by (key, time, arrival)."""
        known_as, in_time = (group_by, allowed_lateness), self.find_in_time(allowed_lateness)
        if known_as not in self._listed:
            ordered = self.group_events(group_by).sorted
            self._listed[known_as] = ordered if in_time.all() else ordered[in_time[ordered]]
        return in_time, self._listed[known_as]

    def select_rows(self, feature: Feature) -> FeatureRows:
        """Selects the rows that a feature keeps of the events."""
        return self._rows.get(feature.feature_id, lambda: self._select_rows(feature))

    def _select_rows(self, feature: Feature) -> FeatureRows:
        grouping = self.group_events(feature.group_by)
        if feature.tiles is None:
            in_time = self.find_in_time(feature.allowed_lateness)
        else:
            in_time = find_in_time(self.events.times, self.watermarks, feature.allowed_lateness, feature.tiles)
        selected = grouping.mine & in_time & select_kept(feature, self.events)
        values = select_values(feature, self.events)
        return FeatureRows(grouping, feature.aggregate, selected, None if values is None else values.values)

    def find_lookbacks(
        self, window: Lookback, group_by: tuple[str, ...], counted: Int64s, counted_as: Hashable | None
    ) -> Queries:
        """Returns the windows of the counted events.

        `counted_as` identifies this selection of events: callers that pass the same value get the same object. Pass
        None if no other caller needs these events.
        """

        def list_counted() -> tuple[Int64s, Int64s]:
            grouping = self.group_events(group_by)
            if counted is grouping.sorted:
                return grouping.sorted_numbers, grouping.sorted_times
            return grouping.numbers[counted], self.events.times[counted]

        def make_queries() -> Queries:
            known_as = (group_by, counted_as)
            numbers, times = list_counted() if counted_as is None else self._counted.get(known_as, list_counted)
            first, last = window.bounds(times)
            is_delayed = window.delay > 0
            return Queries(numbers, counted, first, last, by_arrival=not is_delayed, by_time=is_delayed)

        if counted_as is None:
            return make_queries()
        return self._queries.get((window, group_by, counted_as), make_queries)

    def find_ceilings(
        self, rule: CompiledRule, counted: Int64s, counted_as: Hashable
    ) -> list[tuple[str, Lookback, Ceiling]]:
        """Returns name, window and ceiling of the measures that a rising condition reads; none if it may not be rising.

        Rules with such conditions are judged feature by feature (see `CompiledRule.sharing_key`), so the caches of
        other features are no longer needed.
        """
        self._forget_other_features(rule)
        found = []
        for measure in rule.measures:
            if measure.name in rule.rising:
                assert isinstance(measure.window, Lookback)
                ceiling = self._find_ceiling(measure.feature, measure.window, counted, counted_as)
                if ceiling is None:
                    return []
                found.append((measure.name, measure.window, ceiling))
        return found

    def _find_ceiling(
        self, feature: Feature, window: Lookback, counted: Int64s, counted_as: Hashable
    ) -> Ceiling | None:
        """Returns the ceiling of a rising feature for windows of the counted events; None if any value is negative."""
        if feature.function == "sum" and self._has_negative_value(feature):
            return None
        known_as = (feature.feature_id, window.delay, counted_as)
        return self._ceilings.get(known_as, lambda: self._begin_ceiling(feature, window, counted, counted_as))

    def _begin_ceiling(self, feature: Feature, window: Lookback, counted: Int64s, counted_as: Hashable) -> Ceiling:
        """Makes a ceiling, starting from that of a feature whose rows include all rows of this one, if there is any."""
        made = Ceiling(feature, window.delay, counted, counted_as)
        for known in reversed([*self._ceilings.values()]):
            size, column = known.widest
            if column is None or known.delay != window.delay or size < window.size:
                continue
            if self._is_within(feature, known.feature):
                column = self._move_column(column, known, counted, counted_as)
                if column is not None:
                    made.begin(window.size, column)
                    break
        return made

    def _move_column(self, column: Column, known: Ceiling, counted: Int64s, counted_as: Hashable) -> Column | None:
        """Returns a ceiling's column for other counted events; None if it lacks any of these events."""
        if known.counted_as == counted_as:
            return column
        places = np.full(len(self.events), -1, dtype=np.int64)
        places[known.counted] = np.arange(len(known.counted))
        at = places[counted]
        return None if (at < 0).any() else column.take(at)

    def _is_within(self, feature: Feature, other: Feature) -> bool:
        """Returns whether a rising feature never exceeds another feature over the same window."""
        is_counted = feature.function in ("count", "count_distinct")
        is_same = (feature.function, feature.argument) == (other.function, other.argument)
        if feature.group_by != other.group_by or not (is_same or (is_counted and other.function == "count")):
            return False
        floor, other_floor = (self.state.features[each.feature_id].floor for each in (feature, other))
        if other_floor is not None and (floor is None or floor < other_floor):
            return False
        if (self.select_rows(feature).selected > self.select_rows(other).selected).any():
            return False
        others = {stored.run_id: run for stored, run in self._find_runs(other, -NEVER_DUE, NEVER_DUE)}
        for stored, run in self._find_runs(feature, -NEVER_DUE, NEVER_DUE):
            around = others.get(stored.run_id)
            if not isinstance(run, FeatureColumn) or not isinstance(around, FeatureColumn):
                return False
            if not around.includes(run) or (feature.function == "sum" and run.place.values != around.place.values):
                return False
        return True

    def _has_negative_value(self, feature: Feature) -> bool:
        """Returns whether any value of the feature's rows, or of rows in the same pages, is negative."""
        known = self._has_negative
        if feature.feature_id not in known:
            runs = self._find_runs(feature, -NEVER_DUE, NEVER_DUE)
            known[feature.feature_id] = has_negative(self.select_rows(feature).values) or any(
                run.has_negative_value for _, run in runs
            )
        return known[feature.feature_id]

    def measure(
        self, feature: Feature, keys: Keys | None, queries: Queries, known_as: tuple[Window, Hashable] | None = None
    ) -> Column:
        """Computes the feature's aggregate over each window.

        Args:
            feature: The feature.
            keys: The keys of the queries; None if all have events in the batch.
            queries: The windows.
            known_as: The window that the queries have in common, and what else identifies them. The result is cached
                for callers that pass the same value.
        """
        if known_as is None:
            return self._measure(feature, keys, queries, None)
        window, others = known_as
        delay = window.delay if isinstance(window, Lookback) else None
        shared = (feature.feature_id, delay, others)
        return self._columns.get((feature.feature_id, *known_as), lambda: self._measure(feature, keys, queries, shared))

    def _measure(
        self, feature: Feature, keys: Keys | None, queries: Queries, shared: tuple[Hashable, ...] | None
    ) -> Column:
        state, aggregate = self.state.features[feature.feature_id], feature.aggregate
        if state.floor is not None:
            queries = queries.clip_to(state.floor)
        if feature.function == "count_distinct" and len(queries.first):
            return Column(BIGINT, self._find_distinct(feature, keys, queries, shared).count(queries.first))
        if isinstance(aggregate, GatheredAggregate) and len(queries.first):
            gathered, groups = self._gather_rows(feature, keys, queries, queries.earliest)
            picked = aggregate.aggregate_windows(gathered, groups, queries.positions, queries.first, queries.last)
            return aggregate.finish(picked, feature.argument_type)
        partial = self.select_rows(feature).aggregate_windows(queries)
        windows = queries if queries.windows is None else queries.windows
        for stored, run in self._find_runs(feature, windows.earliest, windows.latest):
            if isinstance(run, FeatureColumn):
                at, low, high = self._find_windows(stored, run, feature, keys, windows)
                rows = run.aggregate_ranges(feature.function, aggregate, low, high) if len(at) else ()
            else:
                groups = self._find_numbers(stored, run, feature, keys, windows)
                at, rows = run.aggregate_windows(feature.function, aggregate, groups, windows)
            if len(at) and queries.window_of is not None:
                at, rows = _spread(at, rows, queries.window_of)
            if len(at):
                partial = merge_at(aggregate, partial, at, rows)
        return aggregate.finish(partial, feature.argument_type)

    def has_same_rows(self, feature: Feature, windows: Queries) -> Mask:
        """Marks each window with the same rows of the feature as the preceding window, in this batch and earlier ones.

        The keys of the windows must have events in the batch. A window may also be marked if the preceding one has
        another key.
        """
        positions, grouping = self.select_rows(feature).positions, self.group_events(feature.group_by)
        search = TimeSearch(grouping.numbers[positions], self.events.times[positions])
        is_same = np.ones(len(windows.first), dtype=bool)
        for edges in (windows.first, windows.last + 1):
            found = search.find_first(windows.numbers, edges)
            is_same[1:] &= found[1:] == found[:-1]
        for stored, run in self._find_runs(feature, windows.earliest, windows.latest):
            groups = self._find_numbers(stored, run, feature, None, windows)
            for found in run.find_ranges(groups, windows.first, windows.last):
                is_same[1:] &= found[1:] == found[:-1]
        return is_same

    def _find_windows(
        self, stored: StoredRun, run: FeatureColumn, feature: Feature, keys: Keys | None, queries: Queries
    ) -> tuple[Int64s, Int64s, Int64s]:
        """Finds the rows in each window, only once for all features that share the run (see `Run.find_windows`)."""
        if stored.run_id not in queries.stored:
            groups = self._find_numbers(stored, run, feature, keys, queries)
            queries.stored[stored.run_id] = run.find_windows(groups, queries)
        return queries.stored[stored.run_id]

    def _find_numbers(
        self, stored: StoredRun, run: Run | FeatureColumn, feature: Feature, keys: Keys | None, queries: Queries
    ) -> Int64s:
        """Returns the number of each query's key in a run; -1 if the run lacks it or the key was reset since."""
        if keys is not None:
            return self._find_groups(stored, run, feature, keys)
        groups = self._run_numbers.get(
            stored.run_id, lambda: self._find_groups(stored, run, feature, self.group_events(feature.group_by).distinct)
        )
        return groups[queries.numbers]

    def _find_groups(self, stored: StoredRun, run: Run | FeatureColumn, feature: Feature, keys: Keys) -> Int64s:
        """Returns the number of each key in a run; -1 if it has no rows there that still count."""
        groups, state = find_keys(keys, run.keys), self.state.features[feature.feature_id]
        if state.last_reset > stored.segment:
            groups[state.find_resets(keys) > stored.segment] = -1
        return groups

    def _find_runs(
        self, feature: Feature, earliest: int, latest: int
    ) -> Iterator[tuple[StoredRun, Run | FeatureColumn]]:
        """Yields the runs of earlier batches with rows from `earliest` to `latest`."""
        if self._uses_state:
            yield from self.state.windows.find_rows(feature.feature_id, earliest, latest)

    def _find_distinct(
        self, feature: Feature, keys: Keys | None, queries: Queries, shared: tuple[Hashable, ...] | None
    ) -> DistinctCounter:
        """Returns a counter of the distinct values in windows.

        Counts of distinct values cannot be added over runs, so the counter gathers the rows of all runs. `shared`
        identifies windows that differ only in their size and share one counter.
        """

        def count_from(earliest: int) -> DistinctCounter:
            rows, groups = self._gather_rows(feature, keys, queries, earliest)
            return DistinctCounter(rows, groups, queries.positions, queries.last)

        if shared is None:
            return count_from(queries.earliest)
        return self._distincts.get(shared, lambda: count_from(-NEVER_DUE))

    def _gather_rows(
        self, feature: Feature, keys: Keys | None, queries: Queries, earliest: int
    ) -> tuple[GroupedRows, Int64s]:
        """Gathers the rows of the keys from the events, and from all runs those from `earliest` on.

        Returns the rows, and the group of each query among them.
        """
        grouping, rows = self.group_events(feature.group_by), self.select_rows(feature)
        assert rows.all_values is not None
        if keys is None:
            is_wanted = np.zeros(len(grouping.distinct), dtype=bool)
            is_wanted[queries.numbers] = True
            ranks = np.where(is_wanted, np.cumsum(is_wanted) - 1, -1)
            groups, wanted = ranks[queries.numbers], grouping.distinct.take(is_wanted)
            positions = grouping.list_positions(is_wanted)
            positions = positions[rows.selected[positions]]
            numbers = ranks[grouping.numbers[positions]]
        else:
            groups, wanted = number_keys(keys)
            positions = rows.positions
            numbers = find_keys(grouping.distinct, wanted)[grouping.numbers[positions]]
            has_wanted_key = numbers >= 0
            positions, numbers = positions[has_wanted_key], numbers[has_wanted_key]
        # No window begins before the floor.
        floor = self.state.features[feature.feature_id].floor
        first = np.full(len(wanted), earliest if floor is None else max(floor, earliest))
        last = np.full(len(wanted), queries.last.max())
        parts: list[tuple[Int64s, Int64s, Values, Int64s]] = []
        for stored, run in self._find_runs(feature, earliest, int(queries.last.max())):
            stored_numbers, at = run.find_rows(self._find_groups(stored, run, feature, wanted), first, last)
            assert run.values is not None
            parts.append((stored_numbers, run.times[at], run.values[at], np.full(len(at), STORED)))
        parts.append((numbers, self.events.times[positions], rows.all_values[positions], positions))
        gathered = GroupedRows(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
        # The copies of the rows are among the largest objects of a batch.
        parts.clear()
        return gathered.take(order_by_group(gathered.groups, gathered.times)), groups

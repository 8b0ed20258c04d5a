"""Measures of windows over the events of a batch and the rows of earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

import numpy as np

from lookback.core.aggregation.distinct import STORED, Distinct, Rows
from lookback.core.aggregation.grouping import FeatureRows, Grouping, Queries, merge_at
from lookback.core.aggregation.runs import Run
from lookback.core.rules.compiled import Feature
from lookback.core.state.shard import ShardState
from lookback.core.streams.events import Events
from lookback.core.values.columns import Column, Mask, Values
from lookback.core.values.keys import Int64s, Keys, encode_keys, find_keys, number_keys, order_by_group
from lookback.core.values.times import NEVER_DUE
from lookback.core.values.types import BIGINT
from lookback.core.values.windows import Lookback, TiledWindow, Window


def group_keys(group_by: tuple[str, ...], events: Events) -> Keys:
    """The key of every event under a grouping set."""
    return encode_keys([events.columns[name] for name in group_by], len(events))


def select_kept(feature: Feature, events: Events) -> Mask:
    """Which events a feature would keep a row of: where and filter hold, and the argument has a value."""
    selected = np.ones(len(events), dtype=bool)
    for condition in (feature.where, feature.filter):
        if condition is not None:
            selected &= events.value(condition).is_true()
    if feature.argument is not None:
        selected &= events.value(feature.argument).is_known()
    return selected


def select_values(feature: Feature, events: Events) -> Column | None:
    """The argument's values, where the feature stores them."""
    if feature.argument is None or not feature.aggregate.stores_value:
        return None
    return events.value(feature.argument)


_Key = TypeVar("_Key", bound=Hashable)
_Made = TypeVar("_Made")


class _RecentCache(Generic[_Key, _Made]):
    """What was made last, `most` of it: of what was not asked for longest there is no more, and it is made again."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._made: dict[_Key, _Made] = {}

    def get(self, key: _Key, make: Callable[[], _Made]) -> _Made:
        """What was made for the key."""
        made = self._made.pop(key) if key in self._made else make()
        self._made[key] = made
        if len(self._made) > self._most:
            del self._made[next(iter(self._made))]
        return made


class Measuring:
    """Answers what windows hold, for events of one shard in order of arrival.

    watermarks: of each event, shape (rows,). stored False: rows of earlier batches do not count.
    """

    def __init__(
        self, state: ShardState, events: Events, watermarks: Int64s, shard: int, shards: int, *, stored: bool = True
    ) -> None:
        self.state, self.events, self.watermarks = state, events, watermarks
        self._shard, self._shards, self._stored = shard, shards, stored
        self._groupings: dict[tuple[str, ...], Grouping] = {}
        # These are as long as the batch. Rules that ask alike ask one after another (see `CompiledRule.asks`).
        self._rows = _RecentCache[str, FeatureRows](64)
        self._queries = _RecentCache[Hashable, Queries](16)
        self._columns = _RecentCache[Hashable, Column](32)
        self._distincts = _RecentCache[Hashable, Distinct](4)
        self._looked_up = _RecentCache[str, Int64s](64)

    def grouping(self, group_by: tuple[str, ...]) -> Grouping:
        """The events by one grouping set."""
        if group_by not in self._groupings:
            keys = group_keys(group_by, self.events)
            mine = keys.shard(self._shards) == self._shard
            self._groupings[group_by] = Grouping(keys, self.events.times, mine)
        return self._groupings[group_by]

    def is_in_time(self, lateness: int, tiles: TiledWindow | None = None) -> Mask:
        """Which events are not too late: by their own time, or by the last of the windows that cover them."""
        times = self.events.times
        taken: Mask
        if tiles is None:
            taken = times >= self.watermarks - lateness
        else:
            taken = tiles.last_start(times) + tiles.size + lateness > self.watermarks
        return taken

    def rows(self, feature: Feature) -> FeatureRows:
        """The rows that a feature keeps of the events."""

        def made() -> FeatureRows:
            grouping = self.grouping(feature.group_by)
            selected = (
                grouping.mine
                & self.is_in_time(feature.allowed_lateness, feature.tiles)
                & select_kept(feature, self.events)
            )
            values = select_values(feature, self.events)
            return FeatureRows(grouping, feature.aggregate, selected, None if values is None else values.values)

        return self._rows.get(feature.feature_id, made)

    def lookbacks(self, window: Lookback, group_by: tuple[str, ...], counted: Int64s, counted_as: Hashable) -> Queries:
        """The windows of the counted events. counted_as: what tells them apart; those who ask alike get the same object."""

        def asked() -> Queries:
            first, last = window.bounds(self.events.times[counted])
            numbers, delayed = self.grouping(group_by).numbers[counted], window.delay > 0
            return Queries(numbers, counted, first, last, by_arrival=not delayed, by_time=delayed)

        return self._queries.get((window, group_by, counted_as), asked)

    def column(
        self, feature: Feature, keys: Keys | None, queries: Queries, known_as: tuple[Window, Hashable] | None = None
    ) -> Column:
        """The feature's aggregate over each window asked for. keys: of the queries; None if all have events in the batch.

        known_as: the window that they have in common, and what else tells these queries apart; the answer is kept for
        others who ask the same.
        """
        if known_as is None:
            return self._column(feature, keys, queries, None)
        window, others = known_as
        delay = window.delay if isinstance(window, Lookback) else None
        shared = (feature.feature_id, delay, others)
        return self._columns.get((feature.feature_id, *known_as), lambda: self._column(feature, keys, queries, shared))

    def _column(
        self, feature: Feature, keys: Keys | None, queries: Queries, shared: tuple[Hashable, ...] | None
    ) -> Column:
        state, aggregate = self.state.features[feature.feature_id], feature.aggregate
        if state.floor is not None:
            queries = queries.starting_at_least(state.floor)
        if feature.function == "count_distinct" and len(queries.first):
            return Column(BIGINT, self._distinct(feature, keys, queries, shared).count(queries.first))
        partial = self.rows(feature).windows(queries)
        for run_id, run, emptied in self._runs(feature, queries.earliest, queries.latest):
            groups = self._numbers_in(run_id, run, feature.group_by, keys, queries)
            if emptied is not None:
                groups = np.where((groups >= 0) & emptied[groups], -1, groups)
            at, rows = run.windows(feature.function, aggregate, groups, queries)
            if len(at):
                partial = merge_at(aggregate, partial, at, rows)
        return aggregate.finish(partial, feature.argument_type)

    def _numbers_in(
        self, run_id: str, run: Run, group_by: tuple[str, ...], keys: Keys | None, queries: Queries
    ) -> Int64s:
        """The number of each query's key in a run; -1 where it is not there."""
        if keys is not None:
            return find_keys(keys, run.keys)
        numbers = self._looked_up.get(run_id, lambda: find_keys(self.grouping(group_by).distinct, run.keys))
        return numbers[queries.numbers]

    def _runs(self, feature: Feature, earliest: int, latest: int) -> Iterator[tuple[str, Run, Mask | None]]:
        """The runs of earlier batches with rows in these times: id, run, and which keys have been emptied since."""
        state = self.state.features[feature.feature_id]
        for stored in state.runs if self._stored else ():
            if stored.last_time >= earliest and stored.first_time <= latest:
                run = self.state.load_run(stored)
                yield stored.run_id, run, stored.emptied(state.resets, run)
                # What was made to search it takes memory too.
                self.state.hold(stored)

    def _distinct(
        self, feature: Feature, keys: Keys | None, queries: Queries, shared: tuple[Hashable, ...] | None
    ) -> Distinct:
        """What tells the different values in windows: no sum over runs, so the rows of all of them are brought together.

        shared: what tells apart those who may ask the same windows, save for their sizes.
        """
        if shared is None:
            return self._brought_together(feature, keys, queries)
        return self._distincts.get(shared, lambda: self._brought_together(feature, keys, queries))

    def _brought_together(self, feature: Feature, keys: Keys | None, queries: Queries) -> Distinct:
        grouping, rows = self.grouping(feature.group_by), self.rows(feature)
        assert rows.values is not None
        if keys is None:
            there = np.zeros(len(grouping.distinct.low), dtype=bool)
            there[queries.numbers] = True
            groups, wanted = (np.cumsum(there) - 1)[queries.numbers], grouping.distinct.take(there)
        else:
            groups, wanted = number_keys(keys)
        # From the floor on, for windows of any size.
        first = np.full(len(wanted.low), -NEVER_DUE)
        last = np.full(len(wanted.low), queries.last.max())
        parts: list[tuple[Int64s, Int64s, Values, Int64s]] = []
        for _, run, emptied in self._runs(feature, -NEVER_DUE, int(queries.last.max())):
            numbers, at = run.rows_within(wanted, first, last, emptied)
            assert run.values is not None
            parts.append((numbers, run.times[at], run.values[at], np.full(len(at), STORED)))
        mine = find_keys(grouping.keys.take(rows.positions), wanted)
        here = mine >= 0
        positions = rows.positions[here]
        parts.append((mine[here], self.events.times[positions], rows.values[here], positions))
        found = Rows(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
        ordered = found.take(order_by_group(found.groups, found.times))
        return Distinct(ordered, groups, queries.positions, queries.last)

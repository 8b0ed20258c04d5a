"""Measures of windows over the events of a batch and the rows of earlier ones."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import numpy as np

from lookback.core.columns import Column, Mask, Values
from lookback.core.compiled import Feature
from lookback.core.distinct import Rows, Windows, count_distinct
from lookback.core.events import Events
from lookback.core.grouping import FeatureRows, Grouping, Queries
from lookback.core.keys import Int64s, Keys, encode_keys, find_keys, number_keys, order_by_group
from lookback.core.runs import Run
from lookback.core.state import ShardState
from lookback.core.types import BIGINT
from lookback.core.windows import Tiles


def group_keys(group_by: tuple[str, ...], events: Events) -> Keys:
    """The key of every event under a grouping set."""
    return encode_keys([events.columns[name] for name in group_by], len(events))


def kept(feature: Feature, events: Events) -> Mask:
    """Which events a feature would keep a row of: where and filter hold, and the argument has a value."""
    selected = np.ones(len(events), dtype=bool)
    for condition in (feature.where, feature.filter):
        if condition is not None:
            selected &= events.value(condition).is_true()
    if feature.argument is not None:
        selected &= events.value(feature.argument).is_known()
    return selected


def values_kept(feature: Feature, events: Events) -> Column | None:
    """The argument's values, where the feature stores them."""
    if feature.argument is None or not feature.aggregate.stores_value:
        return None
    return events.value(feature.argument)


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
        self._rows: dict[str, FeatureRows] = {}
        self._columns: dict[tuple[Hashable, ...], Column] = {}

    def grouping(self, group_by: tuple[str, ...]) -> Grouping:
        """The events by one grouping set."""
        if group_by not in self._groupings:
            keys = group_keys(group_by, self.events)
            mine = keys.shard(self._shards) == self._shard
            self._groupings[group_by] = Grouping(keys, self.events.times, mine)
        return self._groupings[group_by]

    def taken(self, lateness: int, tiles: Tiles | None = None) -> Mask:
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
        if feature.feature_id not in self._rows:
            grouping = self.grouping(feature.group_by)
            selected = grouping.mine & self.taken(feature.allowed_lateness, feature.tiles) & kept(feature, self.events)
            values = values_kept(feature, self.events)
            self._rows[feature.feature_id] = grouping.rows(selected, None if values is None else values.values)
        return self._rows[feature.feature_id]

    def column(
        self, feature: Feature, keys: Keys, queries: Queries, known_as: tuple[Hashable, ...] | None = None
    ) -> Column:
        """The feature's aggregate over each window asked for. keys: of the queries, shape (queries,).

        known_as: what tells these queries apart; the answer is kept for others who ask the same.
        """
        slot = None if known_as is None else (feature.feature_id, *known_as)
        if slot is None or slot not in self._columns:
            column = self._column(feature, keys, queries)
            if slot is None:
                return column
            self._columns[slot] = column
        return self._columns[slot]

    def _column(self, feature: Feature, keys: Keys, queries: Queries) -> Column:
        state, aggregate = self.state.features[feature.feature_id], feature.aggregate
        if state.floor is not None:
            queries = queries.starting_at_least(state.floor)
        if feature.function == "count_distinct" and len(queries.first):
            return Column(BIGINT, self._distinct(feature, keys, queries))
        partial = self.grouping(feature.group_by).windows(aggregate, self.rows(feature), queries)
        for run, emptied in self._runs(feature, queries):
            rows = run.windows(feature.function, aggregate, keys, queries.first, queries.last, emptied)
            partial = aggregate.merge(partial, rows)
        return aggregate.finish(partial, feature.argument_type)

    def _runs(self, feature: Feature, queries: Queries) -> Iterator[tuple[Run, Mask | None]]:
        """The runs of earlier batches that the windows reach into, and which keys of each have been emptied since."""
        if not len(queries.first) or not self._stored:
            return
        state = self.state.features[feature.feature_id]
        earliest, latest = int(queries.first.min()), int(queries.last.max())
        for stored in state.runs:
            if stored.last_time >= earliest and stored.first_time <= latest:
                run = self.state.load_run(stored)
                yield run, stored.emptied(state.resets, run)

    def _distinct(self, feature: Feature, keys: Keys, queries: Queries) -> Int64s:
        """The different values in each window: no sum over runs, so the rows of all of them are brought together."""
        grouping, rows = self.grouping(feature.group_by), self.rows(feature)
        assert rows.values is not None
        groups, distinct = number_keys(keys)
        first, last = np.full(len(distinct.low), queries.first.max()), np.full(len(distinct.low), queries.last.min())
        np.minimum.at(first, groups, queries.first)
        np.maximum.at(last, groups, queries.last)
        parts: list[tuple[Int64s, Int64s, Values, Int64s]] = []
        for run, emptied in self._runs(feature, queries):
            wanted, at = run.rows_within(distinct, first, last, emptied)
            assert run.values is not None
            parts.append((wanted, run.times[at], run.values[at], np.full(len(at), -1)))
        mine = find_keys(grouping.keys.take(rows.positions), distinct)
        here = mine >= 0
        positions = rows.positions[here]
        parts.append((mine[here], self.events.times[positions], rows.values[here], positions))
        found = Rows(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
        order = order_by_group(found.groups, found.times)
        known = queries.numbers >= 0
        sliding = known & ~grouping.disordered[queries.numbers] if len(grouping.disordered) else known
        sliding &= not (queries.by_arrival and queries.by_time)
        windows = Windows(groups, queries.positions, queries.first, queries.last)
        return count_distinct(found.take(order), windows, sliding)

"""Keeps the rows of windows, as sorted runs: of one feature, or of all features that share the rows of a grouping."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from lookback.core.aggregation.runs import Buckets, Run, combine_runs, make_run, match_rows, subtract_rows
from lookback.core.aggregation.sharedruns import FeatureColumn
from lookback.core.state.discarded import DiscardedRows
from lookback.core.state.featurestate import FeatureState
from lookback.core.state.keyruns import Key
from lookback.core.state.rowsets import RowSets
from lookback.core.state.storedruns import StoredRun, StoredRuns, count_alike
from lookback.core.state.tables import KeyedTables
from lookback.core.values.columns import Values
from lookback.core.values.keys import Int64s, Keys, find_keys
from lookback.core.values.times import NEVER_DUE

# Name prefix of a feature's keyed table of resets.
RESETS = "resets:"
# How many rows of runs that extend below their floor are counted one by one in a batch.
_MAX_COUNTED_ROWS = 2**20


class WindowRows:
    """The rows that features keep.

    Attributes:
        features: The features by id.
        row_sets: The rows that features share.
        discarded: The rows of events that came too late for features with buckets.
        runs: Loads, holds and saves the runs.
        segments: The number of segments judged.
    """

    def __init__(self, runs: StoredRuns, tables: KeyedTables) -> None:
        self.features: dict[str, FeatureState] = {}
        self.row_sets = RowSets(runs, self.features)
        self.discarded = DiscardedRows(tables)
        self.runs, self._tables, self.segments = runs, tables, 0
        # The row set whose runs were searched last.
        self._searched = ""

    def list_runs(self) -> Iterator[StoredRun]:
        """Yields all runs."""
        for feature in self.features.values():
            yield from feature.runs
        yield from self.row_sets.list_runs()

    def find_rows(self, feature_id: str, earliest: int, latest: int) -> Iterator[tuple[StoredRun, Run | FeatureColumn]]:
        """Yields the runs with rows of a feature between two times, also rows of keys whose windows were emptied."""
        row_set = self.features[feature_id].row_set
        if row_set != self._searched:
            # Rules are evaluated one grouping after the other.
            self._searched = row_set
            self.runs.bound_unsaved()
        for stored in self._list_stored(feature_id):
            if stored.last_time >= earliest and stored.first_time <= latest:
                yield stored, self._load(feature_id, stored)
                # Searching it built indexes, which take memory too.
                self.runs.hold(stored)

    def add_rows(
        self, feature: FeatureState, numbers: Int64s, keys: Keys, times: Int64s, values: Values | None
    ) -> None:
        """Adds rows that arrived after the feature's rows, and merges runs. See `make_run` for the arguments."""
        keep = times >= feature.earliest
        if not keep.all():
            numbers, times, values = numbers[keep], times[keep], None if values is None else values[keep]
        if len(times):
            feature.runs.append(self._new_run(feature, make_run(numbers, keys, times, values)))
            while alike := count_alike(feature.runs):
                self._rewrite(feature, len(feature.runs) - alike, len(feature.runs))

    def drop_old(self) -> None:
        """Drops runs below their features' floors. Rewrites runs if more than half is below, or can be combined."""
        for feature in self.features.values():
            for stored in list(feature.runs):
                at = feature.runs.index(stored)
                if stored.last_time < feature.earliest:
                    self._replace_runs(feature, at, at + 1)
                elif stored.middle_time < feature.earliest or stored.due < feature.closed:
                    self._rewrite(feature, at, at + 1)
        self.row_sets.drop_old(self.segments)

    def reset(self, feature_id: str, keys: Iterable[Key]) -> None:
        """Empties the windows of these keys: rows of earlier segments no longer count."""
        feature = self.features[feature_id]
        for key in keys:
            if feature.resets is None:
                feature.resets = self._tables.open(f"{RESETS}{feature_id}")
            # The wake of a reset is a segment number, not a watermark.
            feature.resets.put(key, self.segments, self.segments)
            feature.resets.notes["last"] = self.segments

    def forget_resets(self) -> None:
        """Drops the resets that are older than every run."""
        for feature in self.features.values():
            if feature.resets is not None:
                feature.resets.forget_due(min((stored.segment for stored in feature.runs), default=self.segments))
                if feature.resets.is_empty:
                    self._tables.drop(feature.resets.name)
                    feature.resets = None

    def remove_rows(self, feature_id: str, keys: Keys, times: Int64s, values: Values | None) -> Int64s:
        """Removes rows of a feature from the runs that hold them, for a privacy request.

        Returns the positions of the rows that were not found.
        """
        feature = self.features[feature_id]
        if feature.buckets is not None:
            left = self.discarded.take(feature_id, keys, times, values)
            part = None if values is None else values[left]
            return np.delete(left, self._subtract(feature, feature.buckets, keys.take(left), times[left], part))
        left = self.row_sets.remove_rows(feature.row_set, feature_id, keys, times, values, self.segments)
        for at in range(len(feature.runs) - 1, -1, -1):
            if not len(left):
                break
            part = None if values is None else values[left]
            run = self._load_own(feature, feature.runs[at])
            is_removed, held = match_rows(run, keys.take(left), times[left], part)
            if len(held):
                left = np.delete(left, held)
                self._replace_runs(feature, at, at + 1, run.take(~is_removed))
        return left

    def has_rows_at(self, feature_id: str, keys: Keys, times: Int64s) -> bool:
        """Returns whether a feature has a row with one of these pairs of key and time, whatever its value.

        False for a feature with buckets, whose combined rows have no times of their own.
        """
        if self.features[feature_id].buckets is not None or not len(times):
            return False
        return any(
            len(rows) and len(rows.find_rows(find_keys(keys, rows.keys), times, times)[0])
            for rows in self._list_current(feature_id)
        )

    def gather_rows(self, feature_id: str) -> Run | None:
        """Returns all rows of a feature as one run; None if it has none."""
        runs = [rows if isinstance(rows, Run) else rows.to_run() for rows in self._list_current(feature_id)]
        merged = self.features[feature_id].merge([run for run in runs if len(run)]) if any(map(len, runs)) else None
        return merged if merged is not None and len(merged) else None

    def add_history(self, feature_id: str, run: Run, prepare: Callable[[Run], None] | None = None) -> None:
        """Adds rows that arrived before the feature's rows. `prepare` builds the indexes that its windows need."""
        feature = self.features[feature_id]
        is_kept = run.times >= feature.earliest
        if is_kept.any():
            run = run if is_kept.all() else run.take(is_kept)
            feature.runs.insert(0, self._new_run(feature, run))
            if prepare is not None and self.runs.prepare(feature.runs[0]):
                prepare(run)

    def replace(self, feature_id: str, by: str) -> None:
        """Replaces a feature with the feature `by`, which takes over its id.

        `by` must have every row from its own floor on. Older rows of the replaced feature are kept, and windows are
        complete wherever either feature has all rows.
        """
        new, old, below = self.features.pop(by), self.features.get(feature_id), None
        if old is not None:
            if old.floor is not None and new.floor is not None and old.floor < new.floor:
                bounds = [each for each in (old.complete_from, new.complete_from) if each is not None]
                rows = self.gather_rows(feature_id)
                below = None if rows is None else rows.take(rows.times < new.floor)
                new.floor, new.since = old.floor, min(bounds)
            self.drop(feature_id)
        self.features[feature_id] = new
        if below is not None and len(below):
            self.add_history(feature_id, below)

    def drop(self, feature_id: str) -> None:
        """Drops a feature, its rows and its keyed tables."""
        feature = self.features.pop(feature_id)
        self._replace_runs(feature, 0, len(feature.runs))
        self.row_sets.drop_feature(feature.row_set, feature_id, self.segments)
        for name in (feature_id, f"{RESETS}{feature_id}"):
            self._tables.drop(name)
        self.discarded.drop(feature_id)

    def count_rows(self, feature_id: str) -> int:
        """Counts a feature's rows at or above its floor."""
        floor = self.features[feature_id].earliest
        return sum(rows.count_since(floor) for rows in self._list_current(feature_id))

    def estimate_rows(self) -> int:
        """Counts the rows of all features as `count_rows` does, without reading any page.

        A run that extends below the floor, or has rows of emptied keys, is counted row by row if it is in memory, up to
        a million rows in all; otherwise all its rows count.
        """
        rows, left = 0, _MAX_COUNTED_ROWS
        for feature_id, feature in self.features.items():
            floor, resets = feature.earliest, feature.last_reset
            for stored in self._list_stored(feature_id):
                if stored.last_time < floor:
                    continue
                is_whole = stored.first_time >= floor and resets <= stored.segment
                if is_whole or stored.run is None or stored.rows > left:
                    rows += stored.rows if stored.places is None else stored.places[feature_id].rows
                else:
                    rows += self._load_current(feature_id, stored).count_since(floor)
                    left -= stored.rows
        return rows

    def _list_stored(self, feature_id: str) -> Iterator[StoredRun]:
        """Yields the runs with rows of a feature, first those of its own."""
        feature = self.features[feature_id]
        yield from feature.runs
        yield from self.row_sets.find_runs(feature.row_set, feature_id)

    def _load(self, feature_id: str, stored: StoredRun) -> Run | FeatureColumn:
        """Returns the rows of a feature in a run."""
        if stored.places is None:
            return self.runs.load(stored, Run)
        return self.row_sets.load_rows(feature_id, stored)

    def _load_current(self, feature_id: str, stored: StoredRun) -> Run | FeatureColumn:
        """Returns the rows of a feature in a run, without those of keys whose windows were emptied since."""
        feature = self.features[feature_id]
        return self._load_own(feature, stored) if stored.places is None else self._load(feature_id, stored)

    def _load_own(self, feature: FeatureState, stored: StoredRun) -> Run:
        """Does the same for one of the feature's own runs."""
        run = self.runs.load(stored, Run)
        if feature.last_reset <= stored.segment:
            return run
        is_emptied = feature.find_resets(run.keys) > stored.segment
        return run.take(~is_emptied[run.groups]) if is_emptied.any() else run

    def _list_current(self, feature_id: str) -> Iterator[Run | FeatureColumn]:
        return (self._load_current(feature_id, stored) for stored in self._list_stored(feature_id))

    def _new_run(self, feature: FeatureState, run: Run) -> StoredRun:
        due = NEVER_DUE
        if feature.buckets is not None:
            # Rows that are already combined come first and do not count; fewer than half may be left.
            half = len(run) // 2 + (0 if run.parts is None else int((run.times < feature.closed).sum()))
            due = int(np.partition(run.times, half)[half]) if half < len(run) else NEVER_DUE
        return self.runs.add(run, self.segments, due)

    def _rewrite(self, feature: FeatureState, start: int, end: int) -> None:
        run = feature.merge([self._load_own(feature, stored) for stored in feature.runs[start:end]])
        self._replace_runs(feature, start, end, run)

    def _subtract(
        self, feature: FeatureState, buckets: Buckets, keys: Keys, times: Int64s, values: Values | None
    ) -> Int64s:
        """Removes rows from a feature with buckets. Returns the positions of the rows that it had.

        Closed rows are combined first, so that the result does not depend on which of them were combined already.
        """
        if not len(times) or not feature.runs:
            return np.zeros(0, dtype=np.int64)
        runs = [self._load_own(feature, stored) for stored in feature.runs]
        run = combine_runs(runs, feature.floor, buckets, feature.closed)
        run, had = subtract_rows(run, keys, times, values, buckets, feature.closed)
        self._replace_runs(feature, 0, len(runs), run)
        return had

    def _replace_runs(self, feature: FeatureState, start: int, end: int, run: Run | None = None) -> None:
        for stored in feature.runs[start:end]:
            self.runs.drop(stored)
        feature.runs[start:end] = [] if run is None or not len(run) else [self._new_run(feature, run)]

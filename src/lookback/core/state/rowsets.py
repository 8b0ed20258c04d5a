"""Keeps the rows that the features of a grouping share, so that each row is stored once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from lookback.core.aggregation.runs import match_rows
from lookback.core.aggregation.sharedruns import (
    ALL,
    FeatureColumn,
    Kept,
    Place,
    SharedRun,
    make_shared_run,
    merge_shared_runs,
)
from lookback.core.state.featurestate import FeatureState
from lookback.core.state.storedruns import StoredRun, StoredRuns, count_alike, find_middle
from lookback.core.values.columns import Values
from lookback.core.values.keys import Int64s, Keys


class RowSets:
    """The rows that features share.

    Methods that may write a run take the number of the segment that makes it.

    Attributes:
        runs: The runs of each row set, from oldest to newest, by `FeatureState.row_set`.
    """

    def __init__(self, stored: StoredRuns, features: Mapping[str, FeatureState]) -> None:
        """Takes the features by id, which may change later."""
        self.runs: dict[str, list[StoredRun]] = {}
        self._stored, self._features = stored, features

    def list_runs(self) -> Iterator[StoredRun]:
        """Yields the runs of all row sets."""
        for runs in self.runs.values():
            yield from runs

    def find_runs(self, row_set: str, feature_id: str) -> Iterator[StoredRun]:
        """Yields the runs of a row set that have rows of a feature."""
        for stored in self.runs.get(row_set, ()):
            if stored.places is not None and feature_id in stored.places:
                yield stored

    def load_rows(self, feature_id: str, stored: StoredRun) -> FeatureColumn:
        """Returns the rows of a feature in a run."""
        assert stored.places is not None
        return FeatureColumn(self._stored.load(stored, SharedRun), stored.places[feature_id])

    def add_rows(
        self, row_set: str, numbers: Int64s, keys: Keys, times: Int64s, kept: Sequence[Kept], segment: int
    ) -> None:
        """Adds rows, and merges runs. See `make_shared_run` for the arguments."""
        runs = self.runs.setdefault(row_set, [])
        runs.append(self._add_run(*make_shared_run(numbers, keys, times, kept), segment))
        while alike := count_alike(runs):
            self._rewrite(runs, len(runs) - alike, len(runs), segment)

    def remove_rows(
        self, row_set: str, feature_id: str, keys: Keys, times: Int64s, values: Values | None, segment: int
    ) -> Int64s:
        """Removes rows of a feature. Returns the positions of those not found."""
        left, runs = np.arange(len(times)), self.runs.get(row_set, [])
        for at in range(len(runs) - 1, -1, -1):
            stored = runs[at]
            assert stored.places is not None
            if feature_id in stored.places and len(left):
                column = self.load_rows(feature_id, stored)
                part = None if values is None else values[left]
                is_removed, held = match_rows(column.to_run(), keys.take(left), times[left], part)
                if len(held):
                    left = np.delete(left, held)
                    if is_removed.all():
                        del stored.places[feature_id]
                    else:
                        stored.run, stored.places[feature_id] = column.without(is_removed)
                    stored.has_dropped = True
            # Rows of features that were dropped earlier must go too.
            if stored.has_dropped and len(times):
                self._rewrite(runs, at, at + 1, segment)
        return left

    def drop_old(self, segment: int) -> None:
        """Drops runs below the floors of all their features. Rewrites runs if more than half is below."""
        for name, runs in list(self.runs.items()):
            for stored in list(runs):
                features = [self._features[feature_id] for feature_id in stored.places or ()]
                at = runs.index(stored)
                if all(stored.last_time < each.earliest for each in features):
                    self._stored.drop(runs.pop(at))
                # Rows were dropped up to these watermarks; more just after a feature's width grew.
                elif stored.due <= min(each.earliest + each.width for each in features):
                    self._rewrite(runs, at, at + 1, segment)
            if not runs:
                del self.runs[name]

    def drop_feature(self, row_set: str, feature_id: str, segment: int) -> None:
        """Drops the rows of a feature that has just been dropped."""
        runs = self.runs.get(row_set, [])
        for stored in list(self.find_runs(row_set, feature_id)):
            assert stored.places is not None
            del stored.places[feature_id]
            stored.has_dropped = True
            # Rewrite the run only if its other features keep less than half of the rows.
            if sum(place.rows for place in stored.places.values()) * 2 < stored.rows:
                at = runs.index(stored)
                self._rewrite(runs, at, at + 1, segment)
        if not runs:
            self.runs.pop(row_set, None)

    def clear(self) -> None:
        """Drops all rows."""
        for stored in list(self.list_runs()):
            self._stored.drop(stored)
        self.runs = {}

    def _add_run(self, run: SharedRun, places: dict[str, Place], segment: int) -> StoredRun:
        ends = run.times + self._find_widths(run, places) + 1
        return self._stored.add(run, segment, find_middle(ends), places)

    def _find_widths(self, run: SharedRun, places: Mapping[str, Place]) -> Int64s:
        """Returns how far below the watermark each row is kept, the width of its widest feature; shape (rows,)."""
        widest: dict[int, int] = {}
        for feature_id, place in places.items():
            widest[place.selection] = max(self._features[feature_id].width, widest.get(place.selection, 0))
        if ALL not in widest and len({*widest.values()}) == 1:
            # Every row belongs to a feature.
            return np.full(len(run), next(iter(widest.values())), dtype=np.int64)
        least = widest.pop(ALL, 0)
        widths = np.full(len(run), least, dtype=np.int64)
        for selection, width in widest.items():
            if width > least:
                mask = run.select(selection)
                widths[mask] = np.maximum(widths[mask], width)
        return widths

    def _rewrite(self, runs: list[StoredRun], start: int, end: int, segment: int) -> None:
        """Merges runs, leaving out dropped features and rows below the floor of every feature that keeps them."""
        old = runs[start:end]
        names = dict.fromkeys(name for stored in old for name in stored.places or ())
        places = {name: [(stored.places or {}).get(name) for stored in old] for name in names}
        floors = {name: self._features[name].floor for name in names}
        merged = merge_shared_runs([self._stored.load(stored, SharedRun) for stored in old], places, floors)
        for stored in old:
            self._stored.drop(stored)
        runs[start:end] = [] if merged is None else [self._add_run(*merged, segment)]

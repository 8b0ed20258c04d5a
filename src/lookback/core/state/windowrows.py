"""Keeps the rows of windows, as sorted runs: of one feature, or of all features that share the rows of a grouping."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from lookback.core.aggregation.runs import Buckets, Run, combine_runs, make_run, match_rows, remove_rows, subtract_rows
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
from lookback.core.state.keyruns import Key
from lookback.core.state.storedruns import StoredRun, StoredRuns, find_middle
from lookback.core.state.tables import KeyedTables
from lookback.core.values.columns import Values
from lookback.core.values.keys import Int64s, Keys
from lookback.core.values.times import NEVER_DUE
from lookback.core.values.windows import align_down

# Name prefixes of a feature's keyed tables: its resets, and the events that it discarded.
RESETS, _DISCARDED = "resets:", "discarded:"
# Merge four runs of one size class into one of the next, which is four times as large.
_RUNS_PER_CLASS = 4
_SMALLEST_CLASS_ROWS = 256
# Merging makes no larger runs: a run is read as a whole, and each row takes some 40 bytes of memory.
_MAX_MERGED_ROWS = 2**22
# How many rows of runs that extend below their floor are counted one by one in a batch.
_MAX_COUNTED_ROWS = 2**20


class WindowRows:
    """The rows that features keep.

    Attributes:
        features: The features by id.
        row_sets: The rows that features share, by `FeatureState.row_set`, as runs from oldest to newest.
        runs: Loads, holds and saves the runs.
        segments: The number of segments judged.
    """

    def __init__(self, runs: StoredRuns, tables: KeyedTables) -> None:
        self.features: dict[str, FeatureState] = {}
        self.row_sets: dict[str, list[StoredRun]] = {}
        self.runs, self._tables, self.segments = runs, tables, 0
        # The row set whose runs were searched last.
        self._searched = ""

    def list_runs(self) -> Iterator[StoredRun]:
        """Yields all runs."""
        for feature in self.features.values():
            yield from feature.runs
        for runs in self.row_sets.values():
            yield from runs

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
            while alike := _count_alike(feature.runs):
                self._rewrite(feature, len(feature.runs) - alike, len(feature.runs))

    def add_shared_rows(self, row_set: str, numbers: Int64s, keys: Keys, times: Int64s, kept: Sequence[Kept]) -> None:
        """Adds rows that features share, and merges runs. See `make_shared_run` for the arguments."""
        runs = self.row_sets.setdefault(row_set, [])
        runs.append(self._new_shared_run(*make_shared_run(numbers, keys, times, kept)))
        while alike := _count_alike(runs):
            self._rewrite_shared(runs, len(runs) - alike, len(runs))

    def drop_old(self) -> None:
        """Drops runs below their features' floors. Rewrites runs if more than half is below, or can be combined."""
        for feature in self.features.values():
            for stored in list(feature.runs):
                at = feature.runs.index(stored)
                if stored.last_time < feature.earliest:
                    self._replace_runs(feature, at, at + 1)
                elif stored.middle_time < feature.earliest or stored.due < feature.closed:
                    self._rewrite(feature, at, at + 1)
        for name, runs in list(self.row_sets.items()):
            for stored in list(runs):
                features = [self.features[feature_id] for feature_id in stored.places or ()]
                at = runs.index(stored)
                if all(stored.last_time < each.earliest for each in features):
                    self.runs.drop(runs.pop(at))
                # Rows were dropped up to these watermarks; more just after a feature's width grew.
                elif stored.due <= min(each.earliest + each.width for each in features):
                    self._rewrite_shared(runs, at, at + 1)
            if not runs:
                del self.row_sets[name]

    def next_expiry(self) -> int | None:
        """Returns the next watermark at which `drop_old` has something to drop; None if never."""
        times = [feature.next_expiry(stored) for feature in self.features.values() for stored in feature.runs]
        times += [stored.due for runs in self.row_sets.values() for stored in runs]
        return min(times) if times else None

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
            left = self._take_discarded(feature_id, keys, times, values)
            part = None if values is None else values[left]
            return np.delete(left, self._subtract(feature, feature.buckets, keys.take(left), times[left], part))
        left = self._remove_shared(feature_id, self.row_sets.get(feature.row_set, []), keys, times, values)
        for at in range(len(feature.runs) - 1, -1, -1):
            if not len(left):
                break
            part = None if values is None else values[left]
            run, held = remove_rows(self._load_own(feature, feature.runs[at]), keys.take(left), times[left], part)
            if len(held):
                left = np.delete(left, held)
                self._replace_runs(feature, at, at + 1, run)
        return left

    def note_discarded(self, feature_id: str, keys: Keys, times: Int64s, values: Values | None) -> None:
        """Remembers events that came too late for a feature with buckets until their buckets are gone.

        A bucket does not record which events it contains, and deleting these events must not change it.
        """
        feature, table = self.features[feature_id], self._tables.open(f"{_DISCARDED}{feature_id}")
        assert feature.buckets is not None
        resolution = feature.buckets.resolution
        for key, time, value in _list_rows(keys, times, values):
            wake = align_down(time, resolution) + resolution + feature.width
            table.put(key, [*(table.get(key) or ()), [time, value]], max(wake, table.find_wake(key)))

    def _take_discarded(self, feature_id: str, keys: Keys, times: Int64s, values: Values | None) -> Int64s:
        """Forgets the rows that were discarded, and returns the positions of the remaining ones."""
        table, left = self._tables.get(f"{_DISCARDED}{feature_id}"), []
        if table is None:
            return np.arange(len(times))
        for at, (key, time, value) in enumerate(_list_rows(keys, times, values)):
            discarded = list(table.get(key) or ())
            if [time, value] in discarded:
                discarded.remove([time, value])
                table.put(key, discarded or None, table.find_wake(key))
            else:
                left.append(at)
        return np.array(left, dtype=np.int64)

    def has_rows_at(self, feature_id: str, keys: Keys, times: Int64s) -> bool:
        """Returns whether a feature has a row with one of these pairs of key and time, whatever its value.

        False for a feature with buckets, whose combined rows have no times of their own.
        """
        if self.features[feature_id].buckets is not None or not len(times):
            return False
        return any(len(rows) and rows.has_rows(keys, times).any() for rows in self._list_current(feature_id))

    def _remove_shared(
        self, feature_id: str, runs: list[StoredRun], keys: Keys, times: Int64s, values: Values | None
    ) -> Int64s:
        """Removes rows of a feature from the runs that it shares. Returns the positions of those not found."""
        left = np.arange(len(times))
        for at in range(len(runs) - 1, -1, -1):
            stored = runs[at]
            assert stored.places is not None
            place = stored.places.get(feature_id)
            if place is not None and len(left):
                column = FeatureColumn(self.runs.load_shared(stored), place)
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
                self._rewrite_shared(runs, at, at + 1)
        return left

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
        runs = self.row_sets.get(feature.row_set, [])
        for stored in [stored for stored in runs if feature_id in (stored.places or ())]:
            assert stored.places is not None
            del stored.places[feature_id]
            stored.has_dropped = True
            # Rewrite the run only if its other features keep less than half of the rows.
            if sum(place.rows for place in stored.places.values()) * 2 < stored.rows:
                at = runs.index(stored)
                self._rewrite_shared(runs, at, at + 1)
        if not runs:
            self.row_sets.pop(feature.row_set, None)
        for name in (feature_id, f"{RESETS}{feature_id}", f"{_DISCARDED}{feature_id}"):
            self._tables.drop(name)

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
        for stored in self.row_sets.get(feature.row_set, ()):
            if stored.places is not None and feature_id in stored.places:
                yield stored

    def _load(self, feature_id: str, stored: StoredRun) -> Run | FeatureColumn:
        """Returns the rows of a feature in a run."""
        if stored.places is None:
            return self.runs.load(stored)
        return FeatureColumn(self.runs.load_shared(stored), stored.places[feature_id])

    def _load_current(self, feature_id: str, stored: StoredRun) -> Run | FeatureColumn:
        """Returns the rows of a feature in a run, without those of keys whose windows were emptied since."""
        feature = self.features[feature_id]
        return self._load_own(feature, stored) if stored.places is None else self._load(feature_id, stored)

    def _load_own(self, feature: FeatureState, stored: StoredRun) -> Run:
        """Does the same for one of the feature's own runs."""
        run = self.runs.load(stored)
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

    def _new_shared_run(self, run: SharedRun, places: dict[str, Place]) -> StoredRun:
        ends = run.times + self._find_widths(run, places) + 1
        return self.runs.add(run, self.segments, find_middle(ends), places)

    def _find_widths(self, run: SharedRun, places: Mapping[str, Place]) -> Int64s:
        """Returns how far below the watermark each row is kept, the width of its widest feature; shape (rows,)."""
        widest: dict[int, int] = {}
        for feature_id, place in places.items():
            widest[place.selection] = max(self.features[feature_id].width, widest.get(place.selection, 0))
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

    def _rewrite_shared(self, runs: list[StoredRun], start: int, end: int) -> None:
        """Merges runs, leaving out dropped features and rows below the floor of every feature that keeps them."""
        old = runs[start:end]
        names = dict.fromkeys(name for stored in old for name in stored.places or ())
        places = {name: [(stored.places or {}).get(name) for stored in old] for name in names}
        floors = {name: self.features[name].floor for name in names}
        merged = merge_shared_runs([self.runs.load_shared(stored) for stored in old], places, floors)
        for stored in old:
            self.runs.drop(stored)
        runs[start:end] = [] if merged is None else [self._new_shared_run(*merged)]

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


def _list_rows(keys: Keys, times: Int64s, values: Values | None) -> Iterator[tuple[Key, int, Any]]:
    """Yields the key, the time and the value of each row."""
    listed = [None] * len(times) if values is None else values.tolist()
    return zip(keys.list_pairs(), times.tolist(), listed, strict=True)


def _count_alike(runs: Sequence[StoredRun]) -> int:
    """Counts the newest runs of one size class; 0 if they should not be merged."""
    newest = _find_class(runs[-1].rows) if runs else 0
    alike = sum(1 for _ in takewhile(lambda stored: _find_class(stored.rows) <= newest, reversed(runs)))
    few = alike < _RUNS_PER_CLASS or sum(stored.rows for stored in runs[-alike:]) > _MAX_MERGED_ROWS
    return 0 if few else alike


def _find_class(rows: int) -> int:
    return (max(1, rows // _SMALLEST_CLASS_ROWS).bit_length() + 1) // 2

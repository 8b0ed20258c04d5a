"""Keeps everything that one shard remembers between batches, and saves it to the state store."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from lookback.core.aggregation.runs import (
    Buckets,
    Run,
    combine_runs,
    make_run,
    match_rows,
    merge_runs,
    remove_rows,
    subtract_rows,
)
from lookback.core.aggregation.sharedruns import (
    ALL,
    FeatureColumn,
    Kept,
    Place,
    SharedRun,
    make_shared_run,
    merge_shared_runs,
    move_run,
    read_run,
)
from lookback.core.errors import StateError
from lookback.core.rules.compiled import JUDGED, OPEN_KEYS
from lookback.core.rules.rulebook import RuleBook
from lookback.core.state.deferred import Deferred
from lookback.core.state.keyed import KeyedTable
from lookback.core.state.keyruns import Key, Rows, split_text
from lookback.core.state.manifest import (
    CombiningRecord,
    FeatureRecord,
    Manifest,
    RowSetRecord,
    RunRecord,
    SharedRunRecord,
)
from lookback.core.state.pieces import FindFile, Pieces, Store
from lookback.core.values.cache import SHARED_CACHE, ArrayFile, Cache
from lookback.core.values.columns import Values
from lookback.core.values.keys import Int64s, Keys, find_keys, number_keys
from lookback.core.values.pages import decode_page, encode_page
from lookback.core.values.times import NEVER_DUE
from lookback.core.values.windows import align_down

MANIFEST, _RULES = "manifest", "rules"
# Name prefixes of keyed tables: a rule's times of raised alerts, a feature's resets, and its discarded events.
_RAISED, _RESETS, _DISCARDED = "raised:", "resets:", "discarded:"
# Merge four runs of one size class into one of the next, which is four times as large.
_RUNS_PER_CLASS = 4
_SMALLEST_CLASS_ROWS = 256
# Merging makes no larger runs: a run is read as a whole, and each row takes some 40 bytes of memory.
_MAX_MERGED_ROWS = 2**22
# Shorter runs get no file, since decoding one takes only half a millisecond.
_MIN_FILED_ROWS = 2**15
# The limit for the memory of unsaved runs. For the most events that are judged together, two rules stay below it and a
# hundred measures exceed it.
_MAX_UNSAVED_BYTES = 2**27
# Up to 4,096 rows the median, which decides when a rewrite is worth it, is exact; beyond that it is estimated from a
# sample. Steps of the golden ratio cannot coincide with a period in rows sorted by key.
_SAMPLE_ROWS = 4_096
_SAMPLE_PLACES = np.arange(1, _SAMPLE_ROWS + 1) * ((5**0.5 - 1) / 2) % 1
# How many rows of runs that extend below their floor are counted one by one in a batch.
_MAX_COUNTED_ROWS = 2**20
# Longer texts continue in the next row of their page.
_MAX_ROW_CHARACTERS = 2**26


@dataclass(eq=False)
class StoredRun:
    """A run in the store, with what is known about it before it is read. Times are in microseconds.

    Attributes:
        segment: The number of the segment that made it.
        due: For a feature with buckets, half of the rows can be combined once buckets are closed up to this time. For a
            run that features share, the watermark at which no feature keeps half of the rows any longer.
        places: The places of the features that share the run; None for a run of one feature.
        has_dropped: Whether its page has features that were dropped since.
        file: Holds the run decoded, with its indexes, if it was read from the store, since it may be needed many times,
            or if it is history; None for no file.
        is_prepared: Whether it is history whose indexes were built when it was added.
    """

    run_id: str
    segment: int
    rows: int
    first_time: int
    middle_time: int
    last_time: int
    due: int = NEVER_DUE
    run: Run | SharedRun | None = None
    places: dict[str, Place] | None = None
    has_dropped: bool = False
    file: ArrayFile | None = None
    is_prepared: bool = False

    def evict(self) -> None:
        """Frees the run's memory: moves it to its file, or else drops it, since the store has it."""
        self.move_to_file()
        if self.run is not None and self.run.memory_bytes:
            self.run = None

    def move_to_file(self) -> None:
        """Moves the run and its indexes to its file, if it has one and takes memory."""
        if self.file is not None and self.run is not None and self.run.memory_bytes:
            moved = move_run(self.run, self.file)
            if moved is None:
                # Do not retry in every batch.
                self.file = None
            else:
                self.run = moved

    def to_record(self) -> RunRecord:
        """Returns the manifest's record of the run."""
        return RunRecord(
            self.run_id, self.segment, self.rows, self.first_time, self.middle_time, self.last_time, self.due
        )


@dataclass
class FeatureState:
    """The state of one feature: its rows, and how far they reach. State that belongs to one rule is in a keyed table.

    Attributes:
        floor: Events below it count in no window; None before the first commit.
        since: The highest event time when the feature started, before which its windows are incomplete; None if the
            stream was empty.
        width: How far below the watermark rows are kept.
        runs: Sorted rows, from oldest to newest, that the feature shares with no other feature, because they can be
            combined or emptied, or are history. Shared rows are in `ShardState.row_sets`.
        resets: For each key, the number of the segment in which an alert emptied its windows: its rows of earlier
            segments no longer count. None if no windows were emptied.
        buckets: How rows are combined, for a feature with a `resolution`.
        closed: Rows before it may be combined.
    """

    floor: int | None = None
    since: int | None = None
    width: int = 0
    runs: list[StoredRun] = field(default_factory=list)
    resets: KeyedTable | None = None
    buckets: Buckets | None = None
    closed: int = -NEVER_DUE

    def pass_time(self, watermark: int) -> None:
        """Raises `floor` and `closed` to match the watermark; they never fall."""
        floor = watermark - self.width
        if self.buckets is not None:
            floor = align_down(floor, self.buckets.resolution)
            self.closed = max(self.closed, self.buckets.find_closed_end(watermark))
        if self.floor is None or floor > self.floor:
            self.floor = floor

    @property
    def last_reset(self) -> int:
        """The number of the last segment in which an alert emptied the windows of a key; -1 for none."""
        return -1 if self.resets is None else int(self.resets.notes.get("last", -1))

    def find_resets(self, keys: Keys) -> Int64s:
        """Returns for each key the number of the segment in which its windows were emptied; -1 for none."""
        segments = np.full(len(keys), -1, dtype=np.int64)
        if self.resets is None:
            return segments
        if len(segments) <= self.resets.most_keys:
            found = map(self.resets.get, keys.list_pairs())
            segments[:] = [-1 if segment is None else segment for segment in found]
            return segments
        emptied = [(key, segment) for key, _, segment in self.resets.items()]
        halves = np.array([key for key, _ in emptied], dtype=np.int64).reshape(-1, 2)
        numbers, distinct = number_keys(Keys(halves[:, 0], halves[:, 1]))
        emptied_in = np.zeros(len(emptied) + 1, dtype=np.int64)
        emptied_in[numbers] = [segment for _, segment in emptied]
        emptied_in[-1] = -1
        return emptied_in[find_keys(keys, distinct)]

    def next_expiry(self, stored: StoredRun) -> int:
        """Returns the watermark at which half of the run's rows are below the floor or can be combined."""
        if self.buckets is None:
            return stored.middle_time + self.width + 1
        resolution = self.buckets.resolution
        times = [align_down(stored.middle_time, resolution) + self.width]
        if stored.due < NEVER_DUE:
            times.append(align_down(stored.due, resolution) + self.buckets.lag)
        return min(times) + resolution

    @property
    def complete_from(self) -> int | None:
        """The earliest start of a complete window; None if all windows are complete."""
        bounds = [bound for bound in (self.floor, self.since) if bound is not None]
        return max(bounds) if bounds else None

    def to_record(self) -> FeatureRecord:
        """Returns the manifest's record of the feature."""
        combining = None
        if self.buckets is not None:
            combining = CombiningRecord(self.closed, self.buckets.resolution, self.buckets.lag, self.buckets.function)
        runs = [stored.to_record() for stored in self.runs]
        return FeatureRecord(self.floor, self.since, self.width, runs, combining)

    @property
    def reach(self) -> int | None:
        """The watermark up to which rows were dropped; more just after `width` grew; None before the first commit."""
        return None if self.floor is None else self.floor + self.width

    @classmethod
    def from_record(cls, record: FeatureRecord) -> FeatureState:
        """Returns the feature of a record. Its runs are read when needed."""
        runs = [StoredRun(*run) for run in record.runs]
        feature = cls(record.floor, record.since, record.width, runs)
        if record.combining is not None:
            closed, resolution, lag, function = record.combining
            feature.closed, feature.buckets = closed, Buckets(resolution, lag, function)
        return feature


class StateCounts(NamedTuple):
    """The size of the state of a shard.

    Attributes:
        rows: Rows of window state at or above their feature's floor (see `ShardState.state_rows`).
        remembered: Keys whose alerts `suppress` holds back, keys whose windows an alert emptied, keys with events that
            a window with a `resolution` discarded, and verdicts and events that may still be revised. It may include
            forgotten ones until their page is rewritten.
    """

    rows: int
    remembered: int


@dataclass
class ShardState:
    """Everything that one shard keeps.

    Each attempt of a batch on the same state writes the same pages under the same names, since a state store may keep
    the pages of a failed attempt next to those of its retry.

    Attributes:
        high: The highest event time of all commits so far.
        advanced: The watermark reached. It never falls, even if the stream is declared with more disorder or a command
            moved it.
        last_commit: The last commit judged.
        segments: The number of segments judged.
        row_sets: The rows that features share, by `Feature.row_set`, as runs from oldest to newest.
        tables: Keyed tables by name.
        deferred: The events that warming versions have yet to judge, by the name of their keyed table.
        origin: A text unique to this state, set when it was created.
        saves: The number of times it was saved.
        timer: When the shell wakes to drop old state, in the shell's unit.
        declared: The mark of the declaration by which the last batch was judged (see `Declared.mark`).
        cache: Decides which pages stay in memory.
        manifest: The page last saved or loaded.
    """

    book: RuleBook
    high: int | None = None
    advanced: int | None = None
    last_commit: int | None = None
    segments: int = 0
    features: dict[str, FeatureState] = field(default_factory=dict)
    row_sets: dict[str, list[StoredRun]] = field(default_factory=dict)
    tables: dict[str, KeyedTable] = field(default_factory=dict)
    deferred: Deferred = field(default_factory=Deferred)
    origin: str = ""
    saves: int = 0
    timer: int | None = None
    declared: str = ""
    cache: Cache = SHARED_CACHE

    def __post_init__(self) -> None:
        self._store: Pieces | None = None
        self._run_count = 0
        self._unsaved: dict[str, StoredRun] = {}
        # The row set whose runs were searched last.
        self._searched = ""
        self._removed: list[str] = []
        self._saved_rules = ""
        self._pieces: dict[str, int] = {}
        self.manifest = b""

    @property
    def lists_commit(self) -> int | None:
        """The last commit of table `lists` that the shard has applied; None before the first."""
        return self.book.lists_commit

    def begin(self, store: Store, find_file: FindFile = lambda _: None) -> None:
        """Starts a batch that writes to `store`; see `Pieces` for `find_file`."""
        self._store, self._run_count = Pieces(store, self._pieces, find_file), 0
        self._unsaved, self._removed = {}, []
        for table in self.tables.values():
            table.use_store(self._store)
        self.deferred.use_store(self._store)

    def table(self, name: str) -> KeyedTable:
        """Returns the keyed table of that name, creating it if needed."""
        if name not in self.tables:
            self.tables[name] = KeyedTable(name, store=self._store, cache=self.cache)
        return self.tables[name]

    def watermark(self, max_out_of_orderness: int, *, automatic: bool = True) -> int | None:
        """Returns the watermark after the last commit; None if the stream has none yet."""
        bounds = [] if self.advanced is None else [self.advanced]
        if automatic and self.high is not None:
            bounds.append(self.high - max_out_of_orderness)
        return max(bounds) if bounds else None

    def pass_time(
        self, marks: Mapping[int, int | None], max_out_of_orderness: int, *, automatic: bool = True
    ) -> int | None:
        """Advances past these commits. Only this method raises the highest event time and the floors.

        `marks` has the highest event time of each commit, None if none of its events counts. `drop_old` later drops the
        rows below the floors. Returns the watermark after the commits.
        """
        highs = [high for high in marks.values() if high is not None]
        if highs:
            self.high = max(highs) if self.high is None else max(self.high, *highs)
        if marks:
            self.last_commit = max(marks)
        watermark = self.advanced = self.watermark(max_out_of_orderness, automatic=automatic)
        if watermark is not None:
            for feature in self.features.values():
                feature.pass_time(watermark)
        return watermark

    def load_run(self, stored: StoredRun) -> Run:
        """Returns the run, read from the store unless it is in memory."""
        run = self._load(stored)
        assert isinstance(run, Run)
        return run

    def load_shared(self, stored: StoredRun) -> SharedRun:
        """Returns the run that features share, read from the store unless it is in memory."""
        run = self._load(stored)
        assert isinstance(run, SharedRun)
        return run

    def _load(self, stored: StoredRun) -> Run | SharedRun:
        if stored.run is None:
            self._place_in_file(stored)
            stored.run = None if stored.file is None else read_run(stored.file)
        if stored.run is None:
            assert self._store is not None
            page = self._store.get(stored.run_id) or b""
            if stored.places is None:
                stored.run = Run.decode(page, stored.run_id)
            else:
                shared = SharedRun.decode(page, stored.run_id)
                if not all(map(shared.has_place, stored.places.values())):
                    raise StateError(f"{stored.run_id}: a page of window state is damaged; start with a new checkpoint")
                stored.run = shared
        run = stored.run
        self.hold(stored)
        return run

    def _place_in_file(self, stored: StoredRun) -> None:
        """Assigns a file to a long run in the store. The run moves there when it is evicted, or with the next save."""
        if stored.rows >= _MIN_FILED_ROWS:
            assert self._store is not None
            stored.file = self._store.find_file(stored.run_id)

    def find_rows(
        self, feature_id: str, row_set: str, earliest: int, latest: int
    ) -> Iterator[tuple[StoredRun, Run | FeatureColumn]]:
        """Yields the runs with rows of a feature between two times; see `rules.compiled.Feature` for `row_set`."""
        if row_set != self._searched:
            # Rules are evaluated one grouping after the other.
            self._searched = row_set
            self._bound_unsaved()
        for stored in (*self.features[feature_id].runs, *self.row_sets.get(row_set, ())):
            if stored.last_time < earliest or stored.first_time > latest:
                continue
            if stored.places is None:
                yield stored, self.load_run(stored)
            elif feature_id in stored.places:
                yield stored, self.load_shared(stored).column(stored.places[feature_id])
            else:
                continue
            # Searching it built indexes, which take memory too.
            self.hold(stored)

    def list_runs(self) -> Iterator[StoredRun]:
        """Yields all runs."""
        for feature in self.features.values():
            yield from feature.runs
        for runs in self.row_sets.values():
            yield from runs

    def hold(self, stored: StoredRun) -> None:
        """Marks a saved run as recently used, so that the cache keeps it in memory while there is room."""
        if self._store is not None and stored.run is not None and stored.run_id not in self._unsaved:
            self.cache.hold(stored, stored.run.memory_bytes)

    def add_rows(
        self, feature: FeatureState, numbers: Int64s, keys: Keys, times: Int64s, values: Values | None
    ) -> None:
        """Adds rows that arrived after the feature's rows, and merges runs. See `make_run` for the arguments."""
        keep = times >= feature.floor if feature.floor is not None else np.ones(len(times), dtype=bool)
        if not keep.all():
            numbers, times, values = numbers[keep], times[keep], None if values is None else values[keep]
        if not len(times):
            return
        feature.runs.append(self._new_run(feature, make_run(numbers, keys, times, values)))
        while alike := _count_alike(feature.runs):
            self._rewrite(feature, len(feature.runs) - alike, len(feature.runs))

    def add_shared_rows(self, row_set: str, numbers: Int64s, keys: Keys, times: Int64s, kept: Sequence[Kept]) -> None:
        """Adds rows that features share, and merges runs. See `make_shared_run` for the arguments."""
        runs = self.row_sets.setdefault(row_set, [])
        runs.append(self._new_shared_run(*make_shared_run(numbers, keys, times, kept)))
        while alike := _count_alike(runs):
            self._rewrite_shared(runs, len(runs) - alike, len(runs))

    def _bound_unsaved(self) -> None:
        """Drops the indexes of unsaved runs if they take much memory, since unsaved runs cannot be evicted.

        All state is in memory if there is no store; its indexes are then kept, because they are needed many times.
        """
        if self._store is None:
            return
        runs = [stored.run for stored in self._unsaved.values() if stored.run is not None]
        if sum(run.memory_bytes for run in runs) > _MAX_UNSAVED_BYTES:
            for run in runs:
                run.forget_indexes()

    def drop_old(self) -> None:
        """Drops runs below their features' floors. Rewrites runs if more than half is below, or can be combined."""
        for feature in self.features.values():
            if feature.floor is not None:
                self._drop_old_runs(feature, feature.floor)
        for name, runs in list(self.row_sets.items()):
            for stored in list(runs):
                features = [self.features[feature_id] for feature_id in stored.places or ()]
                if all(stored.last_time < _find_floor(feature) for feature in features):
                    runs.remove(stored)
                    self._drop_page(stored)
                elif stored.due <= min(-NEVER_DUE if each.reach is None else each.reach for each in features):
                    at = runs.index(stored)
                    self._rewrite_shared(runs, at, at + 1)
            if not runs:
                del self.row_sets[name]

    def forget_unused(
        self,
        features: Collection[str],
        tables: Collection[str],
        raised: Mapping[str, tuple[int, int]],
        watermark: int | None,
    ) -> None:
        """Drops unused features and keyed tables, and keys that are due.

        Args:
            features: Names of the features to keep.
            tables: Names of the keyed tables to keep.
            raised: For each rule with `suppress`, by `Entry.role`, how long an alert suppresses later ones, and the
                allowed lateness.
            watermark: The watermark; None if the stream has none yet.
        """
        for feature_id in [feature_id for feature_id in self.features if feature_id not in features]:
            self.drop_feature(feature_id)
        for name in [name for name in self.tables if name not in features and name not in tables]:
            if name.startswith(JUDGED):
                self.drop_table(name)
            elif not name.startswith((_RAISED, _RESETS)):
                # The memories of windows stay until they are due, since their version may come back and write more.
                self._drop_due(name, watermark)
        self._forget_raised(raised, watermark)
        self._forget_resets()

    def _forget_resets(self) -> None:
        """Drops the resets that are older than every run."""
        for feature in self.features.values():
            if feature.resets is not None:
                feature.resets.forget_due(min((stored.segment for stored in feature.runs), default=self.segments))
                if feature.resets.is_empty:
                    self.drop_table(feature.resets.name)
                    feature.resets = None

    def _drop_old_runs(self, feature: FeatureState, floor: int) -> None:
        for stored in [stored for stored in feature.runs if stored.last_time < floor]:
            self._drop_run(feature, stored)
        for at, stored in enumerate(feature.runs):
            if stored.middle_time < floor or stored.due < feature.closed:
                self._rewrite(feature, at, at + 1)

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
                feature.resets = self.table(f"{_RESETS}{feature_id}")
            # The wake of a reset is a segment number, not a watermark.
            feature.resets.put(key, self.segments, self.segments)
            feature.resets.notes["last"] = self.segments

    def raised(self, role: str, group_by: Sequence[str], keep: tuple[int, int] | None = None) -> KeyedTable:
        """Returns the table of the time of each key's last raised alert, creating it if needed.

        Args:
            role: The rule's role; see `Entry.role`.
            group_by: The fields of the keys. A version with other fields has its own table.
            keep: How long an alert suppresses later ones, and the allowed lateness; None if not yet known.
        """
        table = self.table(_RAISED + json.dumps([role, *group_by]))
        if keep is not None:
            _keep_raised(table, *keep)
        return table

    def _forget_raised(self, keep: Mapping[str, tuple[int, int]], watermark: int | None) -> None:
        """Drops raised alerts that can no longer suppress any, and those of rules that do not suppress alerts."""
        for name in [name for name in self.tables if name.startswith(_RAISED)]:
            table, spans = self.tables[name], keep.get(json.loads(name.removeprefix(_RAISED))[0])
            if spans is None:
                self.drop_table(name)
                continue
            _keep_raised(table, *spans)
            if watermark is not None:
                table.forget_due(watermark)
            if table.is_empty:
                self.drop_table(name)

    def remove_rows(self, feature_id: str, row_set: str, keys: Keys, times: Int64s, values: Values | None) -> Int64s:
        """Removes rows of a feature from the runs that hold them, for a privacy request.

        See `rules.compiled.Feature` for `row_set`. Returns the positions of the rows that were not found.
        """
        feature = self.features[feature_id]
        if feature.buckets is not None:
            left = self._take_discarded(feature_id, keys, times, values)
            part = None if values is None else values[left]
            return np.delete(left, self._subtract(feature, feature.buckets, keys.take(left), times[left], part))
        left = self._remove_shared(feature_id, self.row_sets.get(row_set, []), keys, times, values)
        for at in range(len(feature.runs) - 1, -1, -1):
            if not len(left):
                break
            part = None if values is None else values[left]
            run, held = remove_rows(self._load_current(feature, feature.runs[at]), keys.take(left), times[left], part)
            if len(held):
                left = np.delete(left, held)
                self._replace_runs(feature, at, at + 1, run)
        return left

    def note_discarded(self, feature_id: str, keys: Keys, times: Int64s, values: Values | None) -> None:
        """Remembers events that came too late for a feature with buckets until their buckets are gone.

        A bucket does not record which events it contains, and deleting these events must not change it.
        """
        feature, table = self.features[feature_id], self.table(f"{_DISCARDED}{feature_id}")
        assert feature.buckets is not None
        resolution = feature.buckets.resolution
        listed = [None] * len(times) if values is None else values.tolist()
        for key, time, value in zip(keys.list_pairs(), times.tolist(), listed, strict=True):
            wake = align_down(time, resolution) + resolution + feature.width
            table.put(key, [*(table.get(key) or ()), [time, value]], max(wake, table.find_wake(key)))

    def _take_discarded(self, feature_id: str, keys: Keys, times: Int64s, values: Values | None) -> Int64s:
        """Forgets the rows that were discarded, and returns the positions of the remaining ones."""
        table, left = self.tables.get(f"{_DISCARDED}{feature_id}"), []
        if table is None:
            return np.arange(len(times))
        listed = [None] * len(times) if values is None else values.tolist()
        for at, (key, time, value) in enumerate(zip(keys.list_pairs(), times.tolist(), listed, strict=True)):
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
        feature = self.features[feature_id]
        if feature.buckets is not None or not len(times):
            return False
        own = [self._load_current(feature, stored) for stored in feature.runs]
        columns: list[Run | FeatureColumn] = [run for run in own if len(run)]
        columns += self._list_columns(feature_id)
        return any(bool(rows.has_rows(keys, times).any()) for rows in columns)

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
                column = self.load_shared(stored).column(place)
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

    def gather_rows(self, feature_id: str, row_set: str) -> Run | None:
        """Returns all rows of a feature as one run; None if it has none. See `rules.compiled.Feature` for `row_set`."""
        feature = self.features[feature_id]
        runs = [self._load_current(feature, stored) for stored in feature.runs]
        runs += [column.to_run() for column in self._list_columns(feature_id)]
        runs = [run for run in runs if len(run)]
        if not runs:
            return None
        buckets, closed = feature.buckets, feature.closed
        if buckets is None:
            merged = merge_runs(runs, feature.floor)
        else:
            merged = combine_runs(runs, feature.floor, buckets, closed)
        return merged if len(merged) else None

    def add_history(self, feature_id: str, run: Run, prepare: Callable[[Run], None] | None = None) -> None:
        """Adds rows that arrived before the feature's rows. `prepare` builds the indexes that its windows need."""
        feature = self.features[feature_id]
        floor = _find_floor(feature)
        is_kept = run.times >= floor
        if is_kept.any():
            stored = self._new_run(feature, run if is_kept.all() else run.take(is_kept))
            feature.runs.insert(0, stored)
            if prepare is not None and stored.rows >= _MIN_FILED_ROWS:
                assert isinstance(stored.run, Run)
                prepare(stored.run)
                stored.is_prepared = True

    def replace_feature(self, feature_id: str, row_set: str, by: str) -> None:
        """Replaces a feature with the feature `by`, which takes over its id.

        `by` must have every row from its own floor on. Older rows of the replaced feature are kept, and windows are
        complete wherever either feature has all rows.
        """
        new, old = self.features.pop(by), self.features.get(feature_id)
        if old is not None and old.floor is not None and new.floor is not None and old.floor < new.floor:
            bounds = [each for each in (old.complete_from, new.complete_from) if each is not None]
            rows = self.gather_rows(feature_id, row_set)
            self.drop_feature(feature_id)
            below = None if rows is None else rows.take(rows.times < new.floor)
            new.floor, new.since = old.floor, min(bounds)
            self.features[feature_id] = new
            if below is not None and len(below):
                self.add_history(feature_id, below)
        else:
            if old is not None:
                self.drop_feature(feature_id)
            self.features[feature_id] = new

    def export_rows(self, name: str) -> list[Rows]:
        """Returns the rows of a session's or a sequence's keyed table, for `KeyedTable.add_rows`."""
        if name not in self.tables:
            return []
        return list(self.tables[name].export_rows(partial(_count_rows, floor=_find_floor(self.features[name]))))

    def replace_table(self, name: str, by: str) -> None:
        """Replaces a session's or a sequence's feature and keyed table with those of `by`, which take over its name."""
        rows, notes = self.export_rows(by), self.table(by).notes
        feature = self.features[by]
        for each in (by, name):
            if each in self.features:
                self.drop_feature(each)
        self.features[name], table = feature, self.table(name)
        table.notes = notes
        for part in rows:
            table.add_rows(part)

    def drop_feature(self, feature_id: str) -> None:
        """Drops a feature and its rows."""
        feature = self.features.pop(feature_id)
        for stored in list(feature.runs):
            self._drop_run(feature, stored)
        for name, runs in list(self.row_sets.items()):
            for stored in [stored for stored in runs if stored.places is not None and feature_id in stored.places]:
                self._drop_column(runs, stored, feature_id)
            if not runs:
                del self.row_sets[name]
        self.drop_table(feature_id)
        self.drop_table(f"{_RESETS}{feature_id}")
        self.drop_table(f"{_DISCARDED}{feature_id}")
        self.deferred.drop(feature_id)

    def _drop_column(self, runs: list[StoredRun], stored: StoredRun, feature_id: str) -> None:
        """Drops a feature from a run. Rewrites the run only if its other features keep less than half of the rows."""
        assert stored.places is not None
        del stored.places[feature_id]
        stored.has_dropped = True
        if sum(place.rows for place in stored.places.values()) * 2 < stored.rows:
            at = runs.index(stored)
            self._rewrite_shared(runs, at, at + 1)

    def clear(self) -> None:
        """Drops all features and their rows, raised alerts, keys with open windows, and events that may be revised."""
        for stored in [stored for runs in self.row_sets.values() for stored in runs]:
            self._drop_page(stored)
        self.row_sets = {}
        for feature_id in list(self.features):
            self.drop_feature(feature_id)
        for name in [name for name in self.tables if name.startswith((JUDGED, OPEN_KEYS, _RAISED))]:
            self.drop_table(name)

    def _drop_due(self, name: str, watermark: int | None) -> None:
        """Drops a table's keys whose wake is at or below the watermark, and the table if no key is left."""
        table = self.tables[name]
        if watermark is not None:
            table.forget_due(watermark)
        if next(table.values(), None) is None:
            self.drop_table(name)

    def drop_table(self, name: str) -> None:
        """Drops a keyed table, if it exists."""
        if name in self.tables:
            self._removed += self.tables.pop(name).clear()

    def state_rows(self) -> int:
        """Counts the rows of window state at or above their feature's floor.

        A row is an event that a feature keeps, or the events combined into one bucket of a `resolution`; an event that
        a session or a sequence keeps or has yet to judge; or a wait for an absence.
        """
        total = self.deferred.events
        for feature_id, feature in self.features.items():
            floor = _find_floor(feature)
            total += sum(int((self._load_current(feature, stored).times >= floor).sum()) for stored in feature.runs)
            total += sum(rows.count_since(floor) for rows in self._list_columns(feature_id))
            if feature_id in self.tables:
                total += sum(_count_rows(value, floor) for value in self.tables[feature_id].values())
        return total

    def _list_columns(self, feature_id: str) -> Iterator[FeatureColumn]:
        """Yields a feature's rows in each run that it shares."""
        for runs in self.row_sets.values():
            for stored in runs:
                if stored.places is not None and feature_id in stored.places:
                    yield self.load_shared(stored).column(stored.places[feature_id])

    def estimate_counts(self) -> StateCounts:
        """Counts rows as `state_rows` does, and remembered keys, without reading any page.

        Rows of sessions and sequences count as of the last write of their key. A run that extends below the floor, or
        has rows of emptied keys, is counted row by row if it is in memory, up to a million rows in all; otherwise all
        its rows count.
        """
        rows, left = self.deferred.events, _MAX_COUNTED_ROWS
        for feature in self.features.values():
            floor, resets = _find_floor(feature), feature.last_reset
            for stored in feature.runs:
                if stored.last_time < floor:
                    continue
                is_whole = stored.first_time >= floor and resets <= stored.segment
                if is_whole or stored.run is None or stored.rows > left:
                    rows += stored.rows
                else:
                    rows += int((self._load_current(feature, stored).times >= floor).sum())
                    left -= stored.rows
        for stored in (stored for runs in self.row_sets.values() for stored in runs):
            for feature_id, place in (stored.places or {}).items():
                floor = _find_floor(self.features[feature_id])
                if stored.last_time < floor:
                    continue
                if stored.first_time >= floor or not isinstance(stored.run, SharedRun) or stored.rows > left:
                    rows += place.rows
                else:
                    rows += stored.run.column(place).count_since(floor)
                    left -= stored.rows
        rows += sum(table.rows for name, table in self.tables.items() if name in self.features)
        remembered = sum(table.rows for name, table in self.tables.items() if name not in self.features)
        return StateCounts(rows, remembered)

    def save(self) -> None:
        """Writes all changes since `begin` to the store."""
        store = self._store
        if store is None:
            return
        self.saves += 1
        for name in self._removed:
            store.remove(name)
        for name, table in self.tables.items():
            feature = self.features.get(name)
            table.save(_count_memories if feature is None else partial(_count_rows, floor=_find_floor(feature)))
        new, self._unsaved = self._unsaved, {}
        for run_id, stored in new.items():
            assert stored.run is not None
            store.put(run_id, stored.run.encode())
            if stored.is_prepared:
                # History leaves memory to rules in force, and waits for its version in a file that all workers can
                # read.
                self._place_in_file(stored)
                stored.move_to_file()
            self.hold(stored)
        self.deferred.save()
        self._saved_rules = _put_if_changed(store, _RULES, self.book.to_json(), self._saved_rules)
        self.manifest = encode_text(self._to_manifest().to_json())
        store.put(MANIFEST, self.manifest)
        self._removed = []
        # Small state stays in memory: writing files takes longer than decoding its pages now and then.
        for stored in self.list_runs():
            if self.cache.is_crowded and stored.file is not None:
                stored.move_to_file()
                self.hold(stored)

    def load(self, store: Store, known: ShardState | None = None) -> bool:
        """Reads what `save` wrote; returns False if the store is empty.

        Reuses the runs that the state `known` has in memory. Raises StateError if the pages are damaged.
        """
        self._pieces = {}
        pages = Pieces(store, self._pieces)
        page = pages.get(MANIFEST)
        if page is None:
            return False
        try:
            self._read(page, pages, known)
        except (LookupError, ValueError, TypeError, AttributeError, RecursionError, AssertionError) as error:
            raise StateError(
                f"{MANIFEST}: the state of a shard is damaged ({type(error).__name__}: {error}); "
                "start with a new checkpoint"
            ) from error
        return True

    def _read(self, page: bytes, store: Store, known: ShardState | None) -> None:
        self.manifest = page
        manifest = Manifest.from_json(decode_text(page, MANIFEST))
        self._pieces.update(manifest.pieces)
        self.high, self.advanced, self.last_commit = manifest.high, manifest.advanced, manifest.last_commit
        self.segments, self.timer = manifest.segments, manifest.timer
        self.origin, self.saves, self.declared = manifest.origin, manifest.saves, manifest.declared
        self.book.lists_commit = manifest.lists_commit
        in_memory = known.runs_in_memory() if known is not None and known.origin == self.origin else {}
        self.features = {name: FeatureState.from_record(record) for name, record in manifest.features.items()}
        self.row_sets = {name: _read_row_set(record) for name, record in manifest.row_sets.items()}
        for stored in self.list_runs():
            if any(feature_id not in self.features for feature_id in stored.places or ()):
                raise ValueError("a run has rows of an unknown feature")
            if stored.run_id in in_memory:
                self._share_run(stored, in_memory[stored.run_id])
        self.tables = {
            name: KeyedTable.from_record(name, record, store, self.cache) for name, record in manifest.tables.items()
        }
        self.deferred = Deferred(manifest.deferred)
        self._saved_rules = decode_text(store.get(_RULES), _RULES)
        self.book.load(self._saved_rules)
        for feature_id, feature in self.features.items():
            feature.resets = self.tables.get(f"{_RESETS}{feature_id}")

    def runs_in_memory(self) -> dict[str, StoredRun]:
        """Returns the runs that are in memory, by id."""
        return {each.run_id: each for each in self.list_runs() if each.run is not None}

    def _share_run(self, stored: StoredRun, known: StoredRun) -> None:
        """Takes over a run that another state has in memory, unless it has been evicted there since."""
        if known.run is not None:
            stored.run, stored.file = known.run, known.file
            self.cache.forget(known)
            self.cache.hold(stored, stored.run.memory_bytes)

    def _to_manifest(self) -> Manifest:
        return Manifest(
            high=self.high,
            advanced=self.advanced,
            last_commit=self.last_commit,
            segments=self.segments,
            origin=self.origin,
            saves=self.saves,
            timer=self.timer,
            features={feature_id: feature.to_record() for feature_id, feature in self.features.items()},
            tables={name: table.to_record() for name, table in self.tables.items()},
            pieces={name: count for name, count in self._pieces.items() if name != MANIFEST},
            row_sets={name: _record_row_set(runs) for name, runs in self.row_sets.items() if runs},
            declared=self.declared,
            lists_commit=self.lists_commit,
            deferred=self.deferred.records,
        )

    def _new_run(self, feature: FeatureState, run: Run) -> StoredRun:
        due = NEVER_DUE
        if feature.buckets is not None:
            # Rows that are already combined come first and do not count; fewer than half may be left.
            half = len(run) // 2 + (0 if run.parts is None else int((run.times < feature.closed).sum()))
            due = int(np.partition(run.times, half)[half]) if half < len(run) else NEVER_DUE
        return self._store_new(run, due)

    def _new_shared_run(self, run: SharedRun, places: dict[str, Place]) -> StoredRun:
        ends = run.times + self._find_widths(run, places) + 1
        return self._store_new(run, _find_middle(ends), places)

    def _store_new(self, run: Run | SharedRun, due: int, places: dict[str, Place] | None = None) -> StoredRun:
        """Returns a new run, which the next save writes. See `StoredRun` for `due` and `places`."""
        self._run_count += 1
        times = run.times
        stored = StoredRun(
            f"run:{self.saves}:{self._run_count}", self.segments, len(run), int(times.min()), _find_middle(times),
            int(times.max()), due, run, places,
        )  # fmt: skip
        self._unsaved[stored.run_id] = stored
        return stored

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
        merged = merge_shared_runs([self.load_shared(stored) for stored in old], places, floors)
        for stored in old:
            self._drop_page(stored)
        runs[start:end] = [] if merged is None else [self._new_shared_run(*merged)]

    def _drop_run(self, feature: FeatureState, stored: StoredRun) -> None:
        feature.runs.remove(stored)
        self._drop_page(stored)

    def _drop_page(self, stored: StoredRun) -> None:
        self.cache.forget(stored)
        if self._unsaved.pop(stored.run_id, None) is None:
            self._removed.append(stored.run_id)

    def _rewrite(self, feature: FeatureState, start: int, end: int) -> None:
        runs = [self._load_current(feature, stored) for stored in feature.runs[start:end]]
        buckets, closed = feature.buckets, feature.closed
        if buckets is None or not any(run.parts is not None or (run.times < closed).any() for run in runs):
            run = merge_runs(runs, feature.floor)
        else:
            run = combine_runs(runs, feature.floor, buckets, closed)
        self._replace_runs(feature, start, end, run)

    def _subtract(
        self, feature: FeatureState, buckets: Buckets, keys: Keys, times: Int64s, values: Values | None
    ) -> Int64s:
        """Removes rows from a feature with buckets. Returns the positions of the rows that it had.

        Closed rows are combined first, so that the result does not depend on which of them were combined already.
        """
        if not len(times) or not feature.runs:
            return np.zeros(0, dtype=np.int64)
        runs = [self._load_current(feature, stored) for stored in feature.runs]
        run = combine_runs(runs, feature.floor, buckets, feature.closed)
        run, had = subtract_rows(run, keys, times, values, buckets, feature.closed)
        self._replace_runs(feature, 0, len(runs), run)
        return had

    def _load_current(self, feature: FeatureState, stored: StoredRun) -> Run:
        """Returns the run without the rows of keys whose windows were emptied since it was made."""
        run = self.load_run(stored)
        if feature.last_reset <= stored.segment:
            return run
        is_emptied = feature.find_resets(run.keys) > stored.segment
        return run.take(~is_emptied[run.groups]) if is_emptied.any() else run

    def _replace_runs(self, feature: FeatureState, start: int, end: int, run: Run) -> None:
        for stored in feature.runs[start:end]:
            self._drop_page(stored)
        feature.runs[start:end] = [self._new_run(feature, run)] if len(run) else []


def _count_alike(runs: Sequence[StoredRun]) -> int:
    """Counts the newest runs of one size class; 0 if they should not be merged."""
    newest = _size_class(runs[-1].rows) if runs else 0
    alike = sum(1 for _ in _take_small(reversed(runs), newest))
    few = alike < _RUNS_PER_CLASS or sum(stored.rows for stored in runs[-alike:]) > _MAX_MERGED_ROWS
    return 0 if few else alike


def _record_row_set(runs: Sequence[StoredRun]) -> RowSetRecord:
    """Returns the manifest's record of a row set, for `_read_row_set`."""
    numbers: dict[str, int] = {}
    records = []
    for stored in runs:
        places: list[int] = []
        for feature_id, place in (stored.places or {}).items():
            places += (numbers.setdefault(feature_id, len(numbers)), *place)
        records.append(SharedRunRecord(*stored.to_record(), stored.has_dropped, places))
    return RowSetRecord(list(numbers), records)


def _read_row_set(record: RowSetRecord) -> list[StoredRun]:
    runs = []
    for each in record.runs:
        listed = each.places
        places = {record.features[listed[at]]: Place(*listed[at + 1 : at + 4]) for at in range(0, len(listed), 4)}
        stored = StoredRun(
            each.run_id, each.segment, each.rows, each.first_time, each.middle_time, each.last_time, each.due,
            places=places, has_dropped=each.has_dropped,
        )  # fmt: skip
        runs.append(stored)
    return runs


def _find_middle(times: Int64s) -> int:
    """Returns the median of the times, or of a sample if there are many."""
    if len(times) > _SAMPLE_ROWS:
        times = times[(_SAMPLE_PLACES * len(times)).astype(np.int64)]
    half = len(times) // 2
    return int(np.partition(times, half)[half])


def _find_floor(feature: FeatureState) -> int:
    return -NEVER_DUE if feature.floor is None else feature.floor


def _count_rows(value: Any, floor: int) -> int:
    """Counts the rows of a key's session or sequence at or above the floor."""
    return sum(1 for row in _rows_of(value) if row[0] >= floor)


def _rows_of(value: Any) -> Iterator[Any]:
    """Yields the rows and waits of a key; each begins with its time."""
    yield from value.get("rows", ())
    yield from value.get("waits", ())


def _count_memories(value: Any) -> int:
    """Counts what is remembered for a key: verdicts, events that may be revised, a raised alert or a reset.

    Open windows do not count, since their rows do.
    """
    return 1 if isinstance(value, int) else len(value.get("rows", ()) if isinstance(value, dict) else value)


def raised_wake(raised_at: int, span: int, allowed_lateness: int) -> int:
    """Returns the watermark from which on an alert raised at that time can no longer suppress an event's alert."""
    return raised_at + span + allowed_lateness + 1


def _keep_raised(table: KeyedTable, span: int, allowed_lateness: int) -> None:
    """Keeps raised alerts for these spans, if another version had kept them for different ones."""
    spans = [span, allowed_lateness]
    if table.notes.get("spans") != spans:
        table.notes["spans"] = spans
        for key, _, raised_at in list(table.items()):
            table.put(key, raised_at, raised_wake(raised_at, *spans))


def _take_small(runs: Iterable[StoredRun], size_class: int) -> Iterator[StoredRun]:
    for stored in runs:
        if _size_class(stored.rows) > size_class:
            return
        yield stored


def _size_class(rows: int) -> int:
    return (max(1, rows // _SMALLEST_CLASS_ROWS).bit_length() + 1) // 2


def _put_if_changed(store: Store, name: str, text: str, before: str) -> str:
    if text != before:
        store.put(name, encode_text(text))
    return text


def encode_text(text: str) -> bytes:
    """Encodes a text as a page."""
    return encode_page([np.array(split_text(text, _MAX_ROW_CHARACTERS), dtype=object)])


def decode_text(page: bytes | None, name: str) -> str:
    """Decodes a page that `encode_text` wrote. Raises StateError, naming the page, for anything else."""
    arrays = decode_page(page or b"", name)
    assert arrays[0] is not None
    return "".join(arrays[0])

"""Keeps runs of window rows: in memory while there is room, in files if they are long, and as pages in a store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeVar

import numpy as np

from lookback.core.aggregation.runs import Run
from lookback.core.aggregation.sharedruns import Place, SharedRun, move_run, read_run
from lookback.core.errors import StateError
from lookback.core.state.pieces import Pieces
from lookback.core.values.cache import ArrayFile, Cache
from lookback.core.values.keys import Int64s
from lookback.core.values.times import NEVER_DUE

_AnyRun = TypeVar("_AnyRun", bound=Run | SharedRun)

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


@dataclass(eq=False)
class StoredRun:
    """A run in the store, with what is known about it before it is read. Times are in microseconds.

    Attributes:
        segment: The number of the segment that made it.
        due: For a feature with buckets, half of the rows can be combined once buckets are closed up to this time. For a
            run that features share, the watermark at which no feature keeps half of the rows any longer.
        run: The rows; None if they are not in memory.
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

    def to_json(self) -> list[Any]:
        """Returns what the manifest says about the run, without its places. Omits `due` if it is NEVER_DUE."""
        facts = [self.run_id, self.segment, self.rows, self.first_time, self.middle_time, self.last_time]
        return facts if self.due == NEVER_DUE else [*facts, self.due]


class StoredRuns:
    """The runs of a shard, however they are used: reads them when needed, and writes new ones with the next save.

    Attributes:
        cache: Decides which runs stay in memory.
        store: Where pages are saved; None if nothing is saved.
        saves: The number of times that the shard was saved.
    """

    def __init__(self, cache: Cache) -> None:
        self.cache, self.saves = cache, 0
        self.begin(None)

    def begin(self, store: Pieces | None) -> None:
        """Starts a batch that writes to `store`."""
        self.store, self._count = store, 0
        self._unsaved: dict[str, StoredRun] = {}
        self._removed: list[str] = []

    def add(self, run: Run | SharedRun, segment: int, due: int, places: dict[str, Place] | None = None) -> StoredRun:
        """Adds a run, which the next save writes. See `StoredRun` for the arguments."""
        self._count += 1
        times, run_id = run.times, f"run:{self.saves}:{self._count}"
        bounds = int(times.min()), find_middle(times), int(times.max())
        stored = self._unsaved[run_id] = StoredRun(run_id, segment, len(run), *bounds, due, run, places)
        return stored

    def drop(self, stored: StoredRun) -> None:
        """Drops a run, and its page with the next save."""
        self.cache.forget(stored)
        if self._unsaved.pop(stored.run_id, None) is None:
            self._removed.append(stored.run_id)

    def load(self, stored: StoredRun, kind: type[_AnyRun]) -> _AnyRun:
        """Returns a run, read from the store unless it is in memory; `kind` is SharedRun for one that features share."""
        if stored.run is None and not self._open_file(stored):
            stored.run = read = kind.decode(self._read_page(stored), stored.run_id)
            if isinstance(read, SharedRun) and not all(map(read.has_place, (stored.places or {}).values())):
                raise StateError(f"{stored.run_id}: a page of window state is damaged; start with a new checkpoint")
        run = stored.run
        assert isinstance(run, kind)
        self.hold(stored)
        return run

    def hold(self, stored: StoredRun) -> None:
        """Marks a saved run as recently used, so that the cache keeps it in memory while there is room."""
        if self.store is not None and stored.run is not None and stored.run_id not in self._unsaved:
            self.cache.hold(stored, stored.run.memory_bytes)

    def prepare(self, stored: StoredRun) -> bool:
        """Returns whether a new run is long enough for a file. Its indexes, to be built now, move there with it."""
        stored.is_prepared = stored.rows >= _MIN_FILED_ROWS
        return stored.is_prepared

    def bound_unsaved(self) -> None:
        """Drops the indexes of unsaved runs if they take much memory, since unsaved runs cannot be evicted.

        All state is in memory if there is no store; its indexes are then kept, because they are needed many times.
        """
        runs = [stored.run for stored in self._unsaved.values() if stored.run is not None]
        if self.store is not None and sum(run.memory_bytes for run in runs) > _MAX_UNSAVED_BYTES:
            for run in runs:
                run.forget_indexes()

    def save(self) -> None:
        """Writes all changes since `begin` to the store."""
        assert self.store is not None
        self.saves += 1
        for name in self._removed:
            self.store.remove(name)
        new, self._unsaved, self._removed = self._unsaved, {}, []
        for run_id, stored in new.items():
            assert stored.run is not None
            self.store.put(run_id, stored.run.encode())
            if stored.is_prepared:
                # History leaves memory to rules in force, and waits for its version in a file that all workers can
                # read.
                self._find_file(stored)
                stored.move_to_file()
            self.hold(stored)

    def free_memory(self, listed: Iterable[StoredRun]) -> None:
        """Moves the listed runs to their files if memory is scarce.

        Small state stays in memory: writing files takes longer than decoding its pages now and then.
        """
        for stored in listed:
            if self.cache.is_crowded and stored.file is not None:
                stored.move_to_file()
                self.hold(stored)

    def share(self, stored: StoredRun, known: Mapping[str, StoredRun]) -> None:
        """Takes over a run that another state has in memory, unless it has been evicted there since."""
        other = known.get(stored.run_id)
        if other is not None and other.run is not None:
            stored.run, stored.file = other.run, other.file
            self.cache.forget(other)
            self.cache.hold(stored, stored.run.memory_bytes)

    def _find_file(self, stored: StoredRun) -> None:
        """Assigns a file to a long run in the store. The run moves there when it is evicted, or with the next save."""
        if stored.rows >= _MIN_FILED_ROWS:
            assert self.store is not None
            stored.file = self.store.find_file(stored.run_id)

    def _open_file(self, stored: StoredRun) -> bool:
        """Reads a run from its file; returns False if it has none yet."""
        self._find_file(stored)
        stored.run = None if stored.file is None else read_run(stored.file)
        return stored.run is not None

    def _read_page(self, stored: StoredRun) -> bytes:
        assert self.store is not None
        return self.store.get(stored.run_id) or b""


def find_middle(times: Int64s) -> int:
    """Returns the median of the times, or of a sample if there are many."""
    if len(times) > _SAMPLE_ROWS:
        times = times[(_SAMPLE_PLACES * len(times)).astype(np.int64)]
    half = len(times) // 2
    return int(np.partition(times, half)[half])


def count_alike(runs: Sequence[StoredRun]) -> int:
    """Counts the newest runs of one size class; 0 if they should not be merged."""
    newest = _find_class(runs[-1].rows) if runs else 0
    alike = sum(1 for _ in takewhile(lambda stored: _find_class(stored.rows) <= newest, reversed(runs)))
    few = alike < _RUNS_PER_CLASS or sum(stored.rows for stored in runs[-alike:]) > _MAX_MERGED_ROWS
    return 0 if few else alike


def _find_class(rows: int) -> int:
    return (max(1, rows // _SMALLEST_CLASS_ROWS).bit_length() + 1) // 2

"""The runs of a keyed table, from oldest to newest: which has a key, and how they are merged.

Each batch adds one small run with the keys that it changed. Runs are merged as they accumulate (a log-structured merge,
O'Neil et al., 1996). A large merge proceeds in parts, in each batch in proportion to the keys that the batch changed.
So the bytes that a batch writes are proportional to the keys that it changes, and no batch writes the whole table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lookback.core.state.keyruns import Key, KeyRun, Page, Rows, hash_key, hash_keys, merge_rows
from lookback.core.state.pieces import Store
from lookback.core.values.cache import Cache
from lookback.core.values.keys import Int64s, Keys, find_keys
from lookback.core.values.times import NEVER_DUE

# Merge four runs of one size class into one of the next, which is four times as large.
_RUNS_PER_CLASS = 4
_SMALLEST_CLASS_KEYS = 256
# Merge all runs once the newer runs have this share of the oldest run's keys.
_FOLDED_SHARE = 0.5
# In each batch a merge reads this many rows for each key that the batch changed, and no fewer than _MIN_ROWS. It has to
# outrun the runs that accumulate meanwhile: until the next merge of all runs, half a table has to be written and one
# and a half have to be read.
_ROWS_PER_CHANGE, _MIN_ROWS = 6, 2_048


@dataclass(eq=False)
class TableRuns:
    """The runs of a keyed table, and their pages: those in the store, and those waiting for the next save.

    Attributes:
        name: The name of the table.
        store: Where pages are saved; None if nothing is saved.
        cache: Decides which pages stay in memory.
        runs: The runs from oldest to newest.
        made: The number of runs made so far.
        unsaved: New pages by name.
        removed: The names of stored pages for the next save to remove.
    """

    name: str
    store: Store | None
    cache: Cache
    runs: list[KeyRun] = field(default_factory=list)
    made: int = 0
    unsaved: dict[str, Page | bytes] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)

    @property
    def keys(self) -> int:
        """The number of keys of all runs; a key counts once for each run that has it."""
        return sum(run.keys for run in self.runs)

    @property
    def rows(self) -> int:
        """The rows of all keys, each as its newest run counts them."""
        return sum(run.rows for run in self.runs)

    def clear(self) -> list[str]:
        """Drops all runs and returns the names of their pages in the store, which the caller must remove."""
        for run in self.runs:
            self._drop_run(run)
        names, self.runs, self.removed = self.removed, [], []
        return names

    def to_json(self) -> list[Any]:
        """Returns what the manifest says about the runs: the number of runs made, and the runs."""
        for run in self.runs:
            if not run.has_index:
                self.open_run(run)
        return [self.made, [run.to_json() for run in self.runs]]

    def save(self) -> None:
        """Writes unsaved changes to the store."""
        assert self.store is not None
        for name in self.removed:
            self.store.remove(name)
        for name, page in self.unsaved.items():
            if isinstance(page, bytes):
                self.store.put(name, page)
            elif page.rows is not None:
                self.store.put(name, page.rows.encode())
                self.cache.hold(page, page.rows.memory_bytes)
        self.unsaved, self.removed = {}, []

    # Keys -------------------------------------------------------------------------------------------------------------

    def locate(self, key: Key) -> tuple[KeyRun | None, Rows | None, int]:
        """Finds the newest row of a key: its run, the rows of its page, and its position there."""
        hashed = hash_key(key)
        for run in self._list_current(hashed):
            number = hashed & ((1 << run.depth) - 1)
            page = (run.pages if run.pages is not None else self.open_run(run)).get(number)
            if page is not None:
                rows = self._load(run, number, page)
                at = rows.find(key)
                if at is not None:
                    return run, rows, at
        return None, None, -1

    def search(self, keys: Keys) -> Iterator[tuple[KeyRun, Rows, Int64s, Int64s]]:
        """Finds keys in the pages of all runs, from oldest to newest.

        Yields the run, the rows of a page, the positions in `keys` of the keys that the page has, and the positions of
        these keys in the page. Rows yielded later override earlier ones.
        """
        hashes = hash_keys(keys) if self.runs else np.zeros(0, dtype=np.int64)
        left: list[Int64s] = [np.arange(len(keys))] * len(self.runs)
        for end, target in enumerate(self.runs):
            if target.sources:
                # Search merged parts in the target only, not in its sources.
                is_left = hashes & (2 ** self._find_sources(target)[1] - 1) >= target.parts_done
                left[end - target.sources : end] = [np.flatnonzero(is_left)] * target.sources
        for run, own in zip(list(self.runs), left, strict=True):
            numbers, pages = hashes[own] & (2**run.depth - 1), self.open_run(run)
            order = np.argsort(numbers, kind="stable")
            for part in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
                page = pages.get(int(numbers[part[0]])) if len(part) else None
                if page is not None:
                    rows = self._load(run, int(numbers[part[0]]), page)
                    at = own[part]
                    places = find_keys(keys.take(at), rows.keys)
                    is_there = places >= 0
                    if is_there.any():
                        yield run, rows, at[is_there], places[is_there]

    def _list_current(self, hashed: int) -> Iterator[KeyRun]:
        """Yields the runs that may have the newest row of a key, newest first.

        Skips the sources of a merge that is past the key's part. They may still have its rows, since a page that spans
        several parts is dropped only when the merge is complete.
        """
        at = len(self.runs)
        while at:
            at -= 1
            run = self.runs[at]
            yield run
            if run.sources and hashed & (2 ** self._find_sources(run)[1] - 1) < run.parts_done:
                at -= run.sources

    def iterate_rows(self) -> Iterator[Rows]:
        """Yields the newest stored row of each key that is not forgotten, even if the key has changed since."""
        depth = max((run.depth for run in self.runs), default=0)
        for part in range(2**depth if self.runs else 0):
            runs = list(self._list_current(part))[::-1]
            rows, run_of = merge_rows([self._load_part(run, part, depth) for run in runs])
            horizons = np.array([run.horizon for run in runs])[run_of]
            yield rows.take(~rows.is_forgotten & (rows.wakes > horizons))

    def sweep(self, watermark: int) -> list[Keys]:
        """Finds the keys of stored runs whose wake is at or below the watermark, and some that newer rows override.

        No key is found twice, so the caller must rewrite the keys that it keeps.
        """
        found: list[Keys] = []
        for run in self.runs:
            if run.swept >= watermark:
                continue
            for number, page in self.open_run(run).items():
                if page.wake <= watermark:
                    rows = self._load(run, number, page)
                    is_due = (rows.wakes > run.swept) & (rows.wakes <= watermark)
                    found.append(rows.keys.take(is_due))
                    later = rows.wakes[rows.wakes > watermark]
                    page.wake = int(later.min()) if len(later) else NEVER_DUE
            run.swept = watermark
        return found

    def forget_until(self, watermark: int) -> None:
        """Forgets the keys whose wake is at or below the watermark."""
        for run in self.runs:
            run.horizon = max(run.horizon, watermark)

    # Runs -------------------------------------------------------------------------------------------------------------

    def open_run(self, run: KeyRun) -> dict[int, Page]:
        """Returns the pages of a run. Reads their wakes if they are not in memory."""
        if run.pages is not None:
            return run.pages
        assert self.store is not None
        name = run.name_index(self.name)
        pages = run.read_index(self.store.get(name) or b"", name)
        for target in self.runs:
            sources, depth = self._find_sources(target)
            if run in sources and run.depth >= depth:
                # The pages of merged parts have been dropped.
                pages = {number: page for number, page in pages.items() if number % 2**depth >= target.parts_done}
        run.pages = pages
        return pages

    def _load(self, run: KeyRun, number: int, page: Page) -> Rows:
        """Returns the rows of a page. Reads them if they are not in memory."""
        if page.rows is not None:
            return page.rows
        assert self.store is not None
        name = run.name_page(self.name, number)
        page.rows = rows = Rows.decode(self.store.get(name) or b"", name)
        self.cache.hold(page, rows.memory_bytes)
        return rows

    def _load_part(self, run: KeyRun, part: int, depth: int) -> Rows:
        """Returns the rows whose hash has `part` as its lowest `depth` bits."""
        pages = self.open_run(run)
        parts = [self._load(run, at, pages[at]) for at in run.numbers_in(part, depth) if at in pages]
        rows, _ = merge_rows(parts or [Rows.from_entries([])])
        return rows if run.depth >= depth else rows.take((rows.hashes & (2**depth - 1)) == part)

    def add(self, rows: Rows) -> KeyRun:
        """Adds a run of rows, which override those of all existing runs."""
        self.made += 1
        run = KeyRun.begin(self.made, len(rows))
        self._add_rows(run, rows, range(2**run.depth))
        run.rows = int(np.maximum(rows.counts, 0).sum())
        self._add_index(run)
        self.runs.append(run)
        return run

    def _add_rows(self, run: KeyRun, rows: Rows, numbers: Sequence[int]) -> None:
        for number, page in run.add_rows(rows, numbers):
            self.unsaved[run.name_page(self.name, number)] = page

    def _add_index(self, run: KeyRun) -> None:
        """Adds the page of the wakes of a complete run, if it has one."""
        if run.keys and run.has_index:
            self.unsaved[run.name_index(self.name)] = run.encode_index()

    def _drop_run(self, run: KeyRun) -> None:
        """Removes all pages of a run."""
        self._drop_pages(run, list(self.open_run(run)))
        if run.has_index:
            self._drop_name(run.name_index(self.name))

    def _drop_pages(self, run: KeyRun, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.cache.forget(run.opened.pop(number))
            self._drop_name(run.name_page(self.name, number))

    def _drop_name(self, name: str) -> None:
        if self.unsaved.pop(name, None) is None:
            self.removed.append(name)

    def drop_forgotten(self) -> None:
        """Drops the oldest runs as long as all their keys are forgotten."""
        while self.runs and self.runs[0].horizon >= self.runs[0].last_wake and not self._is_merging(0):
            self._drop_run(self.runs.pop(0))

    # Merges -----------------------------------------------------------------------------------------------------------

    def merge(self, changes: int) -> None:
        """Starts due merges and continues each by a number of rows proportional to the keys that the batch changed."""
        most, worked = max(_MIN_ROWS, _ROWS_PER_CHANGE * changes), set[int]()
        while True:
            self.drop_forgotten()
            self._start_merges()
            ongoing = [run for run in self.runs if run.sources and run.number not in worked]
            if not ongoing:
                return
            for target in ongoing:
                worked.add(target.number)
                self._continue_merge(target, most)

    def _is_merging(self, at: int) -> bool:
        """Returns whether the run at a position is a source or the target of a merge."""
        return any(run.sources and end - run.sources <= at <= end for end, run in enumerate(self.runs))

    def _start_merges(self) -> None:
        runs = self.runs
        is_free = [not self._is_merging(at) for at in range(len(runs))]
        if all(is_free) and self._is_fold_due():
            self._start_merge(0, len(runs))
            return
        for end in range(len(runs), 0, -1):
            start, size = end, _find_class(runs[end - 1].keys)
            while start and is_free[start - 1] and _find_class(runs[start - 1].keys) <= size:
                start -= 1
            if end - start >= _RUNS_PER_CLASS:
                self._start_merge(start, end)
                return

    def _is_fold_due(self) -> bool:
        """Returns whether all runs should be merged, because the newer ones have many keys."""
        if not self.runs:
            return False
        newer = sum(run.keys for run in self.runs[1:])
        return newer > 0 and newer >= _FOLDED_SHARE * self.runs[0].keys

    def _start_merge(self, start: int, end: int) -> None:
        """Starts merging the runs in a range of positions. The target overrides them as it grows."""
        sources = self.runs[start:end]
        self.made += 1
        target = KeyRun.begin(self.made, sum(run.keys for run in sources))
        target.sources = len(sources)
        target.swept = min(run.swept for run in sources)
        target.horizon = min(run.horizon for run in sources)
        self.runs.insert(end, target)

    def _find_sources(self, target: KeyRun) -> tuple[list[KeyRun], int]:
        """Returns the runs that are being merged into a run, and the depth of the merge's parts."""
        at = self.runs.index(target)
        sources = self.runs[at - target.sources : at]
        return sources, min(target.depth, max((run.depth for run in sources), default=0))

    def _continue_merge(self, target: KeyRun, most: int) -> None:
        """Merges further parts until `most` rows have been read."""
        sources, depth = self._find_sources(target)
        read = 0
        while read < most and target.parts_done < 2**depth:
            read += self._merge_part(target, sources, depth)
            target.parts_done += 1
        if target.parts_done == 2**depth:
            self._finish_merge(target, sources)

    def _merge_part(self, target: KeyRun, sources: list[KeyRun], depth: int) -> int:
        """Merges the rows of the next part and drops the sources' pages of it. Returns the number of rows read."""
        part = target.parts_done
        loaded = [self._load_part(run, part, depth) for run in sources]
        rows, run_of = merge_rows(loaded)
        is_void = rows.wakes <= np.array([run.horizon for run in sources])[run_of]
        void = rows.keys.take(is_void).list_pairs(), run_of[is_void].tolist(), rows.counts[is_void].tolist()
        if self.runs[0] is sources[0]:
            rows = rows.take(~is_void & ~rows.is_forgotten)
        elif is_void.any():
            # A forgotten key must still override the rows that older runs may have of it.
            rows = rows.forget(is_void)
        self._add_rows(target, rows, target.numbers_in(part, depth))
        for run in sources:
            if run.depth >= depth:
                self._drop_pages(run, [number for number in run.numbers_in(part, depth) if number in run.opened])
        for key, at, count in zip(*void, strict=True):
            # If a run newer than the target has the key, the row has been subtracted already.
            if count > 0 and self.locate(key)[0] in (None, target, *sources):
                sources[at].rows -= count
        return sum(map(len, loaded))

    def _finish_merge(self, target: KeyRun, sources: list[KeyRun]) -> None:
        """Completes a merge once all parts are merged, and removes the remaining pages of the sources."""
        for run in sources:
            self.runs.remove(run)
            target.rows += run.rows
            run.successor = target
        if not target.keys:
            self.runs.remove(target)
        target.sources = 0
        for run in sources:
            self._drop_run(run)
        self._add_index(target)


def find_successor(run: KeyRun) -> KeyRun:
    """Returns the run that has a run's rows now."""
    while run.successor is not None:
        run = run.successor
    return run


def _find_class(keys: int) -> int:
    return (max(1, keys // _SMALLEST_CLASS_KEYS).bit_length() + 1) // 2

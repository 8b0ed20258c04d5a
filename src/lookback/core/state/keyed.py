"""Keeps keyed tables: a value for each grouping key, such as its open session or begun matches.

Each batch writes the keys that it changed as one small run. Runs are merged as they accumulate (a log-structured merge,
O'Neil et al., 1996). A large merge proceeds in parts, in each batch in proportion to the keys that the batch changed.
So the bytes that a batch writes are proportional to the keys that it changes, and no batch writes the whole table. Each
key has a wake, the watermark at which something becomes due for it.

Values are read and put one by one, or for many keys at once if they are rows in columns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass, field
from heapq import heappop, heappush
from typing import Any

import numpy as np

from lookback.core.errors import StateError
from lookback.core.state.keyruns import Key, KeyRun, Page, Rows, RunPages, hash_key, hash_keys, merge_rows, select_rows
from lookback.core.state.pieces import Store
from lookback.core.values.cache import SHARED_CACHE, Cache
from lookback.core.values.columns import Mask
from lookback.core.values.keys import Int64s, Keys, find_keys, number_keys
from lookback.core.values.times import NEVER_DUE

__all__ = ["FoundRows", "Key", "KeyedTable"]

# Merge four runs of one size class into one of the next, which is four times as large.
_RUNS_PER_CLASS = 4
_SMALLEST_CLASS_KEYS = 256
# Merge all runs once the newer runs have this share of the oldest run's keys.
_FOLDED_SHARE = 0.5
# In each batch a merge reads this many rows for each key that the batch changed, and no fewer than _MIN_ROWS. It has to
# outrun the runs that accumulate meanwhile: until the next merge of all runs, half a table has to be written and one
# and a half have to be read.
_ROWS_PER_CHANGE, _MIN_ROWS = 6, 2_048
# The memory of a decoded value: a fixed part, and a part for each character of its JSON.
_VALUE_BYTES, _BYTES_PER_CHARACTER = 400, 9
# A row in columns takes the memory of this many characters once it is decoded for one key.
_CHARACTERS_PER_ROW = 40
# Several times as fast as json.dumps and json.loads for short values.
_encode_json = json.JSONEncoder(separators=(",", ":")).encode
_decode_json = json.JSONDecoder().raw_decode


@dataclass(eq=False, slots=True)
class _Entry:
    """A key's wake and its value.

    Attributes:
        wake: The watermark at which the key is due.
        value: The decoded value. None if it is not decoded yet, forgotten or was never put.
        text: The value as JSON until it is decoded.
        run: The run that has the newest row of the key; None if no run has the key.
        rows: The count of that row.
        characters: The length of its text.
    """

    wake: int = NEVER_DUE
    value: Any = None
    text: str | None = None
    run: KeyRun | None = None
    rows: int = 0
    characters: int = 0

    @property
    def exists(self) -> bool:
        """True if the key has a value."""
        return self.value is not None or self.text is not None


@dataclass(eq=False)
class FoundRows:
    """The values of keys that are in columns.

    Attributes:
        rows: The rows of the keys found.
        places: For each of `rows`, the position of its key among the keys looked up.
        others: The positions of keys that may have a value outside of columns.
        charges: The runs that have the rows, and how many rows of state each has.
    """

    rows: Rows
    places: Int64s
    others: Int64s
    charges: list[tuple[KeyRun, int]]


@dataclass(eq=False)
class KeyedTable:
    """A JSON value for each key.

    Attributes:
        name: Prefix of the names of its pages.
        notes: JSON values that belong to the table as a whole.
        cache: Decides which pages and values stay in memory.
    """

    name: str
    notes: dict[str, Any] = field(default_factory=dict)
    store: InitVar[Store | None] = None
    cache: Cache = SHARED_CACHE
    # The runs from oldest to newest, and the number of runs made so far.
    _runs: list[KeyRun] = field(default_factory=list)
    _made: int = 0

    def __post_init__(self, store: Store | None) -> None:
        self._pages = RunPages(self.name, store, self.cache)
        # Entries that changed since the last save, entries that were only read since, and entries of the batch before.
        self._changed: dict[Key, _Entry] = {}
        self._read: dict[Key, _Entry] = {}
        self._former: dict[Key, _Entry] = {}
        # A heap of the wakes of changed entries; some of them are outdated.
        self._wakes: list[tuple[int, Key]] = []

    def use_store(self, store: Store | None) -> None:
        """Reads and writes pages in another store from now on."""
        self._pages.store = store

    def get(self, key: Key) -> Any | None:
        """Returns the value of a key; None if it has none. If you change a value in place, put it again."""
        return self._decode_value(key, self._open(key))

    def find_wake(self, key: Key) -> int:
        """Returns the wake of a key; below every watermark if it has no value."""
        entry = self._open(key)
        return entry.wake if entry.exists else -NEVER_DUE

    def may_have(self, keys: Keys) -> Mask:
        """Marks the keys that may have a value; all other keys have none. Cheaper than `get` for many keys."""
        found = np.zeros(len(keys), dtype=bool)
        if self._changed:
            pairs = keys.list_pairs()
            found[:] = [key in self._changed for key in pairs]
        for _, _, at, _ in self._search(keys):
            found[at] = True
        return found

    def find_rows(self, keys: Keys) -> FoundRows:
        """Finds the values of distinct keys that are in columns."""
        # The newest piece that has each key; -1 for none, as for changed keys.
        newest = np.full(len(keys), -1, dtype=np.int64)
        pieces: list[tuple[KeyRun, Rows, Int64s, Int64s]] = []
        for run, rows, at, places in self._search(keys):
            newest[at] = len(pieces)
            pieces.append((run, rows, at, places))
        pairs = keys.list_pairs() if self._changed or self._read or self._former else []
        others = [at for at, key in enumerate(pairs) if key in self._changed]
        newest[others] = -1
        listed, of_parts = [np.array(others, dtype=np.int64)], [newest[:0]]
        parts: list[tuple[Rows, Int64s]] = []
        charges: list[tuple[KeyRun, int]] = []
        for number, (run, rows, all_at, all_places) in enumerate(pieces):
            is_own = newest[all_at] == number
            at, places = all_at[is_own], all_places[is_own]
            lengths = np.zeros(len(at)) if rows.lengths is None else rows.lengths[places]
            is_found = (lengths > 0) & (rows.wakes[places] > run.horizon)
            listed.append(at[~is_found & ~rows.is_forgotten[places]])
            if is_found.any():
                parts.append((rows, places[is_found]))
                of_parts.append(at[is_found])
                charges.append((run, int(rows.counts[places[is_found]].sum())))
        found = FoundRows(select_rows(parts), np.concatenate(of_parts), np.concatenate(listed), charges)
        for at in found.others.tolist():
            # The entry records the key's run, which must be known when the key is replaced.
            self._open(keys.pair(at))
        if pairs:
            # These entries are outdated once the rows are replaced.
            for at in found.places.tolist():
                self._read.pop(pairs[at], None)
                self._former.pop(pairs[at], None)
        return found

    def replace_rows(self, found: FoundRows, rows: Rows) -> None:
        """Puts values in columns, and forgets keys. `rows` must include every key that has rows in `found`."""
        for run, count in found.charges:
            _find_successor(run).rows -= count
        if self._changed or self._read or self._former:
            for key in rows.keys.list_pairs():
                former, read, changed = (each.pop(key, None) for each in (self._former, self._read, self._changed))
                entry = changed or read or former
                if entry is not None and entry.run is not None:
                    _find_successor(entry.run).rows -= entry.rows
        if len(rows):
            self._add_run(rows)
            self._merge_runs(len(rows))

    def put(self, key: Key, value: Any | None, wake: int = NEVER_DUE) -> None:
        """Sets the value of a key; None forgets the key. `due` returns the key from the watermark `wake` on."""
        entry = self._open(key)
        if value is None and not entry.exists:
            return
        entry.value, entry.text, entry.wake = value, None, wake if value is not None else NEVER_DUE
        self._mark_changed(key, entry)

    def change(self, key: Key, value: Any) -> None:
        """Replaces the value of a key that has one. Keeps its wake."""
        self.put(key, value, self._open(key).wake)

    def find_due(self, watermark: int) -> Keys:
        """Finds the keys whose wake is at or below the watermark, sorted. The caller must put or replace them all."""
        changed = np.array(self._list_due(watermark), dtype=np.int64).reshape(-1, 2)
        _, swept = number_keys(Keys.concat([*self._sweep(watermark), Keys(changed[:, 0], changed[:, 1])]))
        if not len(swept):
            return swept
        found = self.find_rows(swept)
        is_due = np.zeros(len(swept), dtype=bool)
        is_due[found.places] = found.rows.wakes <= watermark
        for at in found.others.tolist():
            entry = self._open(swept.pair(at))
            is_due[at] = entry.exists and entry.wake <= watermark
        return swept.take(is_due)

    def due(self, watermark: int) -> list[Key]:
        """Returns the keys whose wake is at or below the watermark, sorted."""
        for key in {key for keys in self._sweep(watermark) for key in keys.list_pairs()}:
            entry = self._open(key)
            # Rewrite the key even if nothing else changes, since its run is not searched for it again.
            if entry.exists and entry.wake <= watermark and key not in self._changed:
                self._mark_changed(key, entry)
        return self._list_due(watermark)

    def forget_due(self, watermark: int) -> None:
        """Forgets the keys whose wake is at or below the watermark."""
        for run in self._runs:
            run.horizon = max(run.horizon, watermark)
        self._read = {key: entry for key, entry in self._read.items() if entry.wake > watermark}
        self._former = {key: entry for key, entry in self._former.items() if entry.wake > watermark}
        for key in self._pop_due(watermark):
            self.put(key, None)
        self._drop_forgotten()

    @property
    def is_empty(self) -> bool:
        """True if no key has a value. Keys that `forget_due` forgot may still count as having one."""
        return not self._runs and not any(entry.exists for entry in self._changed.values())

    def items(self) -> Iterator[tuple[Key, int, Any]]:
        """Yields each key with its wake and its value."""
        for rows in self._iterate_stored():
            figures = rows.wakes.tolist(), rows.texts.tolist()
            for at, (key, wake, text) in enumerate(zip(rows.keys.list_pairs(), *figures, strict=True)):
                if key not in self._changed:
                    yield key, wake, self._decode_text(key, text) if text else rows.value(at)
        for key, entry in list(self._changed.items()):
            if entry.exists:
                yield key, entry.wake, self._decode_value(key, entry)

    def export_rows(self, count: Callable[[Any], int]) -> Iterator[Rows]:
        """Yields all keys with their values in the form that pages have, each key once. See `save` for `count`."""
        for rows in self._iterate_stored():
            if self._changed:
                rows = rows.take(np.array([key not in self._changed for key in rows.keys.list_pairs()], dtype=bool))  # noqa: PLW2901 - fewer of them
            if len(rows):
                yield rows
        listed = []
        for key in sorted(self._changed):
            entry = self._changed[key]
            if entry.exists:
                value = self._decode_value(key, entry)
                listed.append((key, entry.wake, _encode_json(value), count(value)))
        if listed:
            yield Rows.from_entries(listed)

    def add_rows(self, rows: Rows) -> None:
        """Adds keys from `export_rows` that the table does not have."""
        if self._read or self._former:
            # Entries may record that these keys have no value.
            for key in rows.keys.list_pairs():
                self._read.pop(key, None)
                self._former.pop(key, None)
        self._add_run(rows)
        self._merge_runs(len(rows))

    def _iterate_stored(self) -> Iterator[Rows]:
        """Yields the newest stored row of each key that is not forgotten, even if the key has changed since."""
        depth = max((run.depth for run in self._runs), default=0)
        for part in range(2**depth if self._runs else 0):
            runs = list(self._list_current(part))[::-1]
            for run in runs:
                self._open_run(run)
            rows, run_of = merge_rows([self._pages.load_part(run, part, depth) for run in runs])
            horizons = np.array([run.horizon for run in runs])[run_of]
            yield rows.take(~rows.is_forgotten & (rows.wakes > horizons))

    def values(self) -> Iterator[Any]:
        """Yields all values."""
        return (value for _, _, value in self.items())

    @property
    def most_keys(self) -> int:
        """An upper bound of the number of keys."""
        return sum(run.keys for run in self._runs) + len(self._changed)

    @property
    def rows(self) -> int:
        """The number of rows that each key had when it was last written, summed over all keys.

        Keys that `forget_due` forgot count until their run is merged or all its keys are forgotten.
        """
        return max(0, sum(run.rows for run in self._runs))

    def save(self, count: Callable[[Any], int] = lambda _: 1) -> None:
        """Writes the keys that changed, and merges runs. `count` returns the number of rows of a value."""
        touched = {**self._read, **self._changed}
        if self._changed:
            self._write_changed(count)
            self._merge_runs(len(self._changed))
        if touched:
            self._keep_decoded(touched)
        self._pages.save()
        self._changed, self._read, self._wakes = {}, {}, []

    def clear(self) -> list[str]:
        """Forgets all keys and returns the names of their pages, which the caller must remove."""
        for run in self._runs:
            self._drop_run(run)
        names, self._runs, self._pages.removed = self._pages.removed, [], []
        self._changed, self._read, self._former, self._wakes = {}, {}, {}, []
        self.cache.forget(self)
        return names

    def evict(self) -> None:
        """Drops the decoded values of the previous batch; the store has them."""
        self._former = {}

    def to_json(self) -> list[Any]:
        """Returns what the manifest says about a saved table: its notes, the number of runs made, and its runs."""
        for run in self._runs:
            if not run.has_index:
                self._open_run(run)
        return [self.notes, self._made, [run.to_json() for run in self._runs]]

    @classmethod
    def from_json(cls, name: str, row: list[Any], store: Store, cache: Cache = SHARED_CACHE) -> KeyedTable:
        """Reads what `to_json` returned; pages are read when needed. Raises ValueError for an invalid field."""
        notes, made, runs = row
        if not isinstance(notes, dict) or type(made) is not int:
            raise ValueError("a keyed table must have notes and a number of runs")
        return cls(name, notes, store, cache, [KeyRun.from_json(run) for run in runs], made)

    # Entries ----------------------------------------------------------------------------------------------------------

    def _open(self, key: Key) -> _Entry:
        """Returns the entry of a key, which stays in memory until the end of the next batch."""
        entry = self._changed.get(key) or self._read.get(key)
        if entry is None:
            # Without runs, as in a table without a store, looked-up keys must not accumulate in memory.
            if not self._runs:
                return _Entry()
            entry = self._former.pop(key, None)
            if entry is None:
                entry = self._find(key)
            self._read[key] = entry
        return entry

    def _find(self, key: Key) -> _Entry:
        """Reads the entry of a key from the newest run that has it."""
        run, rows, at = self._locate(key)
        if run is None or rows is None:
            return _Entry()
        wake, text, count = rows.wakes.item(at), rows.texts[at], rows.counts.item(at)
        value = None if text else rows.value(at)
        if not (text or value) or wake <= run.horizon:
            return _Entry(NEVER_DUE, None, None, run, max(0, count))
        if value:
            return _Entry(wake, value, None, run, count, count * _CHARACTERS_PER_ROW)
        return _Entry(wake, None, text, run, count, len(text))

    def _locate(self, key: Key) -> tuple[KeyRun | None, Rows | None, int]:
        """Finds the newest row of a key: its run, the rows of its page, and its position there."""
        hashed = hash_key(key)
        for run in self._list_current(hashed):
            number = hashed & ((1 << run.depth) - 1)
            page = (run.pages if run.pages is not None else self._open_run(run)).get(number)
            if page is not None:
                rows = page.rows if page.rows is not None else self._pages.load(run, number, page)
                at = rows.find(key)
                if at is not None:
                    return run, rows, at
        return None, None, -1

    def _search(self, keys: Keys) -> Iterator[tuple[KeyRun, Rows, Int64s, Int64s]]:
        """Finds keys in the pages of all runs, from oldest to newest.

        Yields the run, the rows of a page, the positions in `keys` of the keys that the page has, and the positions of
        these keys in the page. Rows yielded later override earlier ones.
        """
        hashes = hash_keys(keys) if self._runs else np.zeros(0, dtype=np.int64)
        left: list[Int64s] = [np.arange(len(keys))] * len(self._runs)
        for end, target in enumerate(self._runs):
            if target.sources:
                # Search merged parts in the target only, not in its sources.
                is_left = hashes & (2 ** self._find_sources(target)[1] - 1) >= target.parts_done
                left[end - target.sources : end] = [np.flatnonzero(is_left)] * target.sources
        for run, own in zip(list(self._runs), left, strict=True):
            numbers, pages = hashes[own] & (2**run.depth - 1), self._open_run(run)
            order = np.argsort(numbers, kind="stable")
            for part in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
                page = pages.get(int(numbers[part[0]])) if len(part) else None
                if page is not None:
                    rows = page.rows if page.rows is not None else self._pages.load(run, int(numbers[part[0]]), page)
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
        at = len(self._runs)
        while at:
            at -= 1
            run = self._runs[at]
            yield run
            if run.sources and hashed & (2 ** self._find_sources(run)[1] - 1) < run.parts_done:
                at -= run.sources

    def _decode_value(self, key: Key, entry: _Entry) -> Any | None:
        if entry.text is not None:
            entry.value, entry.text = self._decode_text(key, entry.text), None
        return entry.value

    def _decode_text(self, key: Key, text: str) -> Any:
        try:
            value, end = _decode_json(text)
            if end < len(text):
                raise ValueError("extra data after a value")
        except (ValueError, RecursionError) as error:
            place = f"{self.name}, key {key}"
            raise StateError(
                f"{place}: a page of window state is damaged ({error}); start with a new checkpoint"
            ) from error
        return value

    def _mark_changed(self, key: Key, entry: _Entry) -> None:
        self._read.pop(key, None)
        if not entry.exists and entry.run is None:
            self._changed.pop(key, None)
            return
        self._changed[key] = entry
        if entry.wake < NEVER_DUE:
            heappush(self._wakes, (entry.wake, key))

    def _keep_decoded(self, touched: dict[Key, _Entry]) -> None:
        """Keeps the batch's values decoded for the next batch, while the cache has room."""
        self._former = {key: entry for key, entry in touched.items() if entry.exists}
        characters = sum(entry.characters for entry in self._former.values())
        self.cache.hold(self, len(self._former) * _VALUE_BYTES + characters * _BYTES_PER_CHARACTER)

    # Wakes ------------------------------------------------------------------------------------------------------------

    def _sweep(self, watermark: int) -> list[Keys]:
        """Finds the keys of stored runs whose wake is at or below the watermark, and some that newer rows override.

        No key is found twice, so the caller must rewrite the keys that it keeps.
        """
        found: list[Keys] = []
        for run in self._runs:
            if run.swept >= watermark:
                continue
            for number, page in self._open_run(run).items():
                if page.wake <= watermark:
                    rows = page.rows if page.rows is not None else self._pages.load(run, number, page)
                    is_due = (rows.wakes > run.swept) & (rows.wakes <= watermark)
                    found.append(rows.keys.take(is_due))
                    later = rows.wakes[rows.wakes > watermark]
                    page.wake = int(later.min()) if len(later) else NEVER_DUE
            run.swept = watermark
        return found

    def _list_due(self, watermark: int) -> list[Key]:
        """Lists the changed keys whose wake is at or below the watermark, sorted."""
        due = sorted(self._pop_due(watermark))
        for key in due:
            heappush(self._wakes, (self._changed[key].wake, key))
        return due

    def _pop_due(self, watermark: int) -> set[Key]:
        """Removes the changed keys whose wake is at or below the watermark from the heap of wakes, and returns them."""
        due: set[Key] = set()
        while self._wakes and self._wakes[0][0] <= watermark:
            _, key = heappop(self._wakes)
            entry = self._changed.get(key)
            if entry is not None and entry.exists and entry.wake <= watermark:
                due.add(key)
        return due

    # Runs -------------------------------------------------------------------------------------------------------------

    def _open_run(self, run: KeyRun) -> dict[int, Page]:
        """Returns the pages of a run. Reads their wakes if they are not in memory."""
        if run.pages is not None:
            return run.pages
        pages = self._pages.load_index(run)
        for target in self._runs:
            sources, depth = self._find_sources(target)
            if run in sources and run.depth >= depth:
                # The pages of merged parts have been dropped.
                pages = {number: page for number, page in pages.items() if number % 2**depth >= target.parts_done}
        run.pages = pages
        return pages

    def _write_changed(self, count: Callable[[Any], int]) -> None:
        """Writes the changed entries as a run."""
        listed: list[tuple[Key, int, str | None, int]] = []
        for key in sorted(self._changed):
            entry = self._changed[key]
            if entry.run is not None:
                _find_successor(entry.run).rows -= entry.rows
            value = self._decode_value(key, entry)
            text = None if value is None else _encode_json(value)
            entry.characters, entry.rows = len(text or ""), 0 if value is None else count(value)
            listed.append((key, entry.wake, text, entry.rows))
        run = self._add_run(Rows.from_entries(listed))
        for entry in self._changed.values():
            entry.run = run

    def _add_run(self, rows: Rows) -> KeyRun:
        """Adds a run of rows, which override those of all existing runs."""
        self._made += 1
        run = self._pages.add_run(self._made, rows)
        self._runs.append(run)
        return run

    def _drop_run(self, run: KeyRun) -> None:
        self._open_run(run)
        self._pages.drop_run(run)

    def _drop_forgotten(self) -> None:
        """Drops the oldest runs as long as all their keys are forgotten."""
        while self._runs and self._runs[0].horizon >= self._runs[0].last_wake and not self._is_merging(0):
            self._drop_run(self._runs.pop(0))

    # Merges -----------------------------------------------------------------------------------------------------------

    def _merge_runs(self, changes: int) -> None:
        """Starts due merges and continues each by a number of rows proportional to the keys that the batch changed."""
        most, worked = max(_MIN_ROWS, _ROWS_PER_CHANGE * changes), set[int]()
        while True:
            self._drop_forgotten()
            self._start_merges()
            ongoing = [run for run in self._runs if run.sources and run.number not in worked]
            if not ongoing:
                return
            for target in ongoing:
                worked.add(target.number)
                self._continue_merge(target, most)

    def _is_merging(self, at: int) -> bool:
        """Returns whether the run at a position is a source or the target of a merge."""
        return any(run.sources and end - run.sources <= at <= end for end, run in enumerate(self._runs))

    def _start_merges(self) -> None:
        runs = self._runs
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
        if not self._runs:
            return False
        newer = sum(run.keys for run in self._runs[1:])
        return newer > 0 and newer >= _FOLDED_SHARE * self._runs[0].keys

    def _start_merge(self, start: int, end: int) -> None:
        """Starts merging the runs in a range of positions. The target overrides them as it grows."""
        sources = self._runs[start:end]
        self._made += 1
        target = KeyRun.begin(self._made, sum(run.keys for run in sources))
        target.sources = len(sources)
        target.swept = min(run.swept for run in sources)
        target.horizon = min(run.horizon for run in sources)
        self._runs.insert(end, target)

    def _find_sources(self, target: KeyRun) -> tuple[list[KeyRun], int]:
        """Returns the runs that are being merged into a run, and the depth of the merge's parts."""
        at = self._runs.index(target)
        sources = self._runs[at - target.sources : at]
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
        """Merges the rows of one part. Returns the number of rows read."""
        for run in sources:
            self._open_run(run)
        read, void = self._pages.merge_part(target, sources, depth, is_oldest=self._runs[0] is sources[0])
        for key, source, count in void:
            # If a run newer than the target has the key, the row has been subtracted already.
            if count > 0 and self._locate(key)[0] in (None, target, *sources):
                source.rows -= count
        return read

    def _finish_merge(self, target: KeyRun, sources: list[KeyRun]) -> None:
        for run in sources:
            self._runs.remove(run)
            target.rows += run.rows
            run.successor = target
        if not target.keys:
            self._runs.remove(target)
        self._pages.finish_merge(target, sources)


def _find_successor(run: KeyRun) -> KeyRun:
    """Returns the run that has a run's rows now."""
    while run.successor is not None:
        run = run.successor
    return run


def _find_class(keys: int) -> int:
    return (max(1, keys // _SMALLEST_CLASS_KEYS).bit_length() + 1) // 2

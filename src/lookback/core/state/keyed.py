"""Keeps keyed tables: a value for each grouping key, such as its open session or begun matches.

Each batch writes the keys that it changed as one small run; `tableruns` merges the runs. Each key has a wake, the
watermark at which something becomes due for it.

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
from lookback.core.state.keyruns import Key, KeyRun, Rows, select_rows
from lookback.core.state.pieces import Store
from lookback.core.state.tableruns import TableRuns, find_successor
from lookback.core.values.cache import SHARED_CACHE, Cache
from lookback.core.values.columns import Mask
from lookback.core.values.keys import Int64s, Keys, number_keys
from lookback.core.values.times import NEVER_DUE

__all__ = ["FoundRows", "Key", "KeyedTable"]

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


class _ChangedEntries(dict[Key, _Entry]):
    """The entries that changed since the last save, which know the keys that are due."""

    def __init__(self) -> None:
        super().__init__()
        # A heap of the wakes of the entries; some of them are outdated.
        self._wakes: list[tuple[int, Key]] = []

    def put(self, key: Key, entry: _Entry) -> None:
        """Adds an entry, or replaces the one of its key."""
        self[key] = entry
        if entry.wake < NEVER_DUE:
            heappush(self._wakes, (entry.wake, key))

    def list_due(self, watermark: int) -> list[Key]:
        """Lists the changed keys whose wake is at or below the watermark, sorted."""
        due = sorted(self.pop_due(watermark))
        for key in due:
            heappush(self._wakes, (self[key].wake, key))
        return due

    def pop_due(self, watermark: int) -> set[Key]:
        """Removes the changed keys whose wake is at or below the watermark from the heap of wakes, and returns them."""
        due: set[Key] = set()
        while self._wakes and self._wakes[0][0] <= watermark:
            _, key = heappop(self._wakes)
            entry = self.get(key)
            if entry is not None and entry.exists and entry.wake <= watermark:
                due.add(key)
        return due


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

    def __post_init__(self, store: Store | None) -> None:
        self._runs = TableRuns(self.name, store, self.cache)
        # Entries that changed since the last save, entries that were only read since, and entries of the batch before.
        self._changed = _ChangedEntries()
        self._read: dict[Key, _Entry] = {}
        self._former: dict[Key, _Entry] = {}

    def use_store(self, store: Store | None) -> None:
        """Reads and writes pages in another store from now on."""
        self._runs.store = store

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
        for _, _, at, _ in self._runs.search(keys):
            found[at] = True
        return found

    def find_rows(self, keys: Keys) -> FoundRows:
        """Finds the values of distinct keys that are in columns."""
        # The newest piece that has each key; -1 for none, as for changed keys.
        newest = np.full(len(keys), -1, dtype=np.int64)
        pieces: list[tuple[KeyRun, Rows, Int64s, Int64s]] = []
        for run, rows, at, places in self._runs.search(keys):
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
            find_successor(run).rows -= count
        if self._changed or self._read or self._former:
            for key in rows.keys.list_pairs():
                former, read, changed = (each.pop(key, None) for each in (self._former, self._read, self._changed))
                entry = changed or read or former
                if entry is not None and entry.run is not None:
                    find_successor(entry.run).rows -= entry.rows
        if len(rows):
            self._runs.add(rows)
            self._runs.merge(len(rows))

    def put(self, key: Key, value: Any | None, wake: int = NEVER_DUE) -> None:
        """Sets the value of a key; None forgets the key. `find_due` finds the key from the watermark `wake` on."""
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
        changed = np.array(self._changed.list_due(watermark), dtype=np.int64).reshape(-1, 2)
        _, swept = number_keys(Keys.concat([*self._runs.sweep(watermark), Keys(changed[:, 0], changed[:, 1])]))
        if not len(swept):
            return swept
        found = self.find_rows(swept)
        is_due = np.zeros(len(swept), dtype=bool)
        is_due[found.places] = found.rows.wakes <= watermark
        for at in found.others.tolist():
            entry = self._open(swept.pair(at))
            is_due[at] = entry.exists and entry.wake <= watermark
        return swept.take(is_due)

    def forget_due(self, watermark: int) -> None:
        """Forgets the keys whose wake is at or below the watermark."""
        self._runs.forget_until(watermark)
        self._read = {key: entry for key, entry in self._read.items() if entry.wake > watermark}
        self._former = {key: entry for key, entry in self._former.items() if entry.wake > watermark}
        for key in self._changed.pop_due(watermark):
            self.put(key, None)
        self._runs.drop_forgotten()

    @property
    def is_empty(self) -> bool:
        """True if no key has a value. Keys that `forget_due` forgot may still count as having one."""
        return not self._runs.runs and not any(entry.exists for entry in self._changed.values())

    def items(self) -> Iterator[tuple[Key, int, Any]]:
        """Yields each key with its wake and its value."""
        for rows in self._runs.iterate_rows():
            figures = rows.wakes.tolist(), rows.texts.tolist()
            for at, (key, wake, text) in enumerate(zip(rows.keys.list_pairs(), *figures, strict=True)):
                if key not in self._changed:
                    yield key, wake, _decode_text(self.name, key, text) if text else rows.value(at)
        for key, entry in list(self._changed.items()):
            if entry.exists:
                yield key, entry.wake, self._decode_value(key, entry)

    def export_rows(self, count: Callable[[Any], int]) -> Iterator[Rows]:
        """Yields all keys with their values in the form that pages have, each key once. See `save` for `count`."""
        for rows in self._runs.iterate_rows():
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
        self._runs.add(rows)
        self._runs.merge(len(rows))

    def values(self) -> Iterator[Any]:
        """Yields all values."""
        return (value for _, _, value in self.items())

    @property
    def most_keys(self) -> int:
        """An upper bound of the number of keys."""
        return self._runs.keys + len(self._changed)

    @property
    def rows(self) -> int:
        """The number of rows that each key had when it was last written, summed over all keys.

        Keys that `forget_due` forgot count until their run is merged or all its keys are forgotten.
        """
        return max(0, self._runs.rows)

    def save(self, count: Callable[[Any], int] = lambda _: 1) -> None:
        """Writes the keys that changed, and merges runs. `count` returns the number of rows of a value."""
        touched = {**self._read, **self._changed}
        if self._changed:
            self._write_changed(count)
            self._runs.merge(len(self._changed))
        if touched:
            self._keep_decoded(touched)
        self._runs.save()
        self._changed, self._read = _ChangedEntries(), {}

    def clear(self) -> list[str]:
        """Forgets all keys and returns the names of their pages, which the caller must remove."""
        names = self._runs.clear()
        self._changed, self._read, self._former = _ChangedEntries(), {}, {}
        self.cache.forget(self)
        return names

    def evict(self) -> None:
        """Drops the decoded values of the previous batch; the store has them."""
        self._former = {}

    def to_json(self) -> list[Any]:
        """Returns what the manifest says about a saved table: its notes, the number of runs made, and its runs."""
        return [self.notes, *self._runs.to_json()]

    @classmethod
    def from_json(cls, name: str, row: list[Any], store: Store, cache: Cache = SHARED_CACHE) -> KeyedTable:
        """Reads what `to_json` returned; pages are read when needed. Raises ValueError for an invalid field."""
        notes, made, runs = row
        if not isinstance(notes, dict) or type(made) is not int:
            raise ValueError("a keyed table must have notes and a number of runs")
        table = cls(name, notes, store, cache)
        table._runs.made, table._runs.runs = made, [KeyRun.from_json(run) for run in runs]
        return table

    # Entries ----------------------------------------------------------------------------------------------------------

    def _open(self, key: Key) -> _Entry:
        """Returns the entry of a key, which stays in memory until the end of the next batch."""
        entry = self._changed.get(key) or self._read.get(key)
        if entry is None:
            # Without runs, as in a table without a store, looked-up keys must not accumulate in memory.
            if not self._runs.runs:
                return _Entry()
            entry = self._former.pop(key, None)
            if entry is None:
                entry = self._find(key)
            self._read[key] = entry
        return entry

    def _find(self, key: Key) -> _Entry:
        """Reads the entry of a key from the newest run that has it."""
        run, rows, at = self._runs.locate(key)
        if run is None or rows is None:
            return _Entry()
        wake, text, count = rows.wakes.item(at), rows.texts[at], rows.counts.item(at)
        value = None if text else rows.value(at)
        if not (text or value) or wake <= run.horizon:
            return _Entry(NEVER_DUE, None, None, run, max(0, count))
        if value:
            return _Entry(wake, value, None, run, count, count * _CHARACTERS_PER_ROW)
        return _Entry(wake, None, text, run, count, len(text))

    def _decode_value(self, key: Key, entry: _Entry) -> Any | None:
        if entry.text is not None:
            entry.value, entry.text = _decode_text(self.name, key, entry.text), None
        return entry.value

    def _mark_changed(self, key: Key, entry: _Entry) -> None:
        self._read.pop(key, None)
        if not entry.exists and entry.run is None:
            self._changed.pop(key, None)
            return
        self._changed.put(key, entry)

    def _keep_decoded(self, touched: dict[Key, _Entry]) -> None:
        """Keeps the batch's values decoded for the next batch, while the cache has room."""
        self._former = {key: entry for key, entry in touched.items() if entry.exists}
        characters = sum(entry.characters for entry in self._former.values())
        self.cache.hold(self, len(self._former) * _VALUE_BYTES + characters * _BYTES_PER_CHARACTER)

    def _write_changed(self, count: Callable[[Any], int]) -> None:
        """Writes the changed entries as a run."""
        listed: list[tuple[Key, int, str | None, int]] = []
        for key in sorted(self._changed):
            entry = self._changed[key]
            if entry.run is not None:
                find_successor(entry.run).rows -= entry.rows
            value = self._decode_value(key, entry)
            text = None if value is None else _encode_json(value)
            entry.characters, entry.rows = len(text or ""), 0 if value is None else count(value)
            listed.append((key, entry.wake, text, entry.rows))
        run = self._runs.add(Rows.from_entries(listed))
        for entry in self._changed.values():
            entry.run = run


def _decode_text(table: str, key: Key, text: str) -> Any:
    try:
        value, end = _decode_json(text)
        if end < len(text):
            raise ValueError("extra data after a value")
    except (ValueError, RecursionError) as error:
        place = f"{table}, key {key}"
        raise StateError(
            f"{place}: a page of window state is damaged ({error}); start with a new checkpoint"
        ) from error
    return value

"""Keeps keyed tables: a value for each grouping key, such as its open session or begun matches.

A hash of the key divides a table into buckets; each bucket is one page. A batch reads and writes only the pages of the
keys that it touches. Each key has a wake, the watermark at which something becomes due for it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from lookback.core.errors import StateError
from lookback.core.state.manifest import BucketRecord, TableRecord
from lookback.core.values.cache import SHARED_CACHE, Cache
from lookback.core.values.columns import Values
from lookback.core.values.pages import decode_page, encode_page
from lookback.core.values.times import NEVER_DUE

# The low and the high half of a grouping key.
Key = tuple[int, int]
_BUCKETS = 256
# The largest page that a store is given at once.
MAX_PIECE_BYTES = 2**26
# A longer value goes on in the next row of its page.
_MAX_ROW_CHARACTERS = 2**26
_PIECES_MARK, _PIECES_HEAD = b"LBps", struct.Struct("<4sI")
# The memory of an entry: a fixed part, and a part for each character of its value as JSON.
_ENTRY_BYTES, _BYTES_PER_CHARACTER = 300, 9


class Store(Protocol):
    """Keeps pages: RocksDB in a stream, a dict in tests."""

    def get(self, name: str) -> bytes | None:
        """Returns the page of that name; None if there is none. Raises StoreFailed."""

    def put(self, name: str, page: bytes) -> None:
        """Keeps a page, in place of one of the same name."""

    def remove(self, name: str) -> None:
        """Removes a page, which must exist."""


class Pieces:
    """A store of pages of any size, on top of a store that takes at most MAX_PIECE_BYTES at once.

    A larger page is kept as pieces, and the page of its own name holds their number. counts: the number of pieces of each
    page that has any; it is saved with the pages, since a page can be replaced or removed without being read.
    """

    def __init__(self, store: Store, counts: dict[str, int]) -> None:
        self._store, self._counts = store, counts

    def get(self, name: str) -> bytes | None:
        """Returns the page of that name; None if there is none. Raises StateError if a piece is missing."""
        page = self._store.get(name)
        if page is None or page[:4] != _PIECES_MARK or len(page) != _PIECES_HEAD.size:
            return page
        self._counts[name] = count = _PIECES_HEAD.unpack(page)[1]
        parts = []
        for at in range(count):
            part = self._store.get(_name_piece(name, at))
            if part is None:
                error = f"piece {at + 1} of {count} is missing"
                raise StateError(f"{name}: a page of window state is damaged ({error}); start with a new checkpoint")
            parts.append(part)
        return b"".join(parts)

    def put(self, name: str, page: bytes) -> None:
        """Keeps a page, in pieces if it is large, in place of one of the same name."""
        parts = [page[at : at + MAX_PIECE_BYTES] for at in range(0, len(page), MAX_PIECE_BYTES)]
        count = len(parts) if len(parts) > 1 else 0
        self._remove_pieces(name, count)
        if count:
            self._counts[name] = count
            for at, part in enumerate(parts):
                self._store.put(_name_piece(name, at), part)
        self._store.put(name, _PIECES_HEAD.pack(_PIECES_MARK, count) if count else page)

    def remove(self, name: str) -> None:
        """Removes a page, which must exist, and its pieces."""
        self._remove_pieces(name, 0)
        self._store.remove(name)

    def _remove_pieces(self, name: str, first: int) -> None:
        for at in range(first, self._counts.pop(name, 0)):
            self._store.remove(_name_piece(name, at))


def _name_piece(name: str, at: int) -> str:
    return f"{name}/{at}"


class _Entry(NamedTuple):
    """A key's wake and its value."""

    wake: int
    value: Any


@dataclass(eq=False)
class _Bucket:
    """The keys of one page. wake: the earliest of its keys; entries: by key; None until they are read.

    is_stored: whether the store has its page. rows: those of its entries when they were last written, as
    `KeyedTable.save` counts them.
    """

    wake: int = NEVER_DUE
    entries: dict[Key, _Entry] | None = None
    is_stored: bool = False
    rows: int = 0

    def evict(self) -> None:
        """Drops the entries from memory; the store has them unchanged."""
        self.entries = None


@dataclass(eq=False)
class KeyedTable:
    """A value for each key, of the types that JSON has.

    name: prefix of its pages' names. notes: what is kept for the table as a whole, of the same types.
    """

    name: str
    notes: dict[str, Any] = field(default_factory=dict)
    store: Store | None = None
    cache: Cache = SHARED_CACHE
    _buckets: dict[int, _Bucket] = field(default_factory=dict)
    _changed: set[int] = field(default_factory=set)

    def get(self, key: Key) -> Any | None:
        """Returns the value of a key; None if it has none. A value that is changed in place must be put again."""
        bucket = self._buckets.get(_find_bucket(key))
        entry = None if bucket is None else self._load_entries(_find_bucket(key), bucket).get(key)
        return None if entry is None else entry.value

    def put(self, key: Key, value: Any | None, wake: int = NEVER_DUE) -> None:
        """Keeps a value, whose key `due` returns from the watermark `wake` on; None forgets the key."""
        number = _find_bucket(key)
        if value is None and number not in self._buckets:
            return
        bucket = self._buckets.setdefault(number, _Bucket(entries={}))
        entries = self._load_entries(number, bucket)
        if value is not None:
            entries[key] = _Entry(wake, value)
        elif entries.pop(key, None) is None:
            return
        self._changed.add(number)
        # A changed bucket must stay in memory until it is written.
        self.cache.forget(bucket)

    def change(self, key: Key, value: Any) -> None:
        """Replaces the value of a key that has one, and keeps its wake."""
        entry = self._load_entries(_find_bucket(key), self._buckets[_find_bucket(key)])[key]
        self.put(key, value, entry.wake)

    def due(self, watermark: int) -> list[Key]:
        """Returns the keys whose wake is at or below the watermark, sorted."""
        self._update_wakes()
        return sorted(
            key
            for number, bucket in self._buckets.items()
            if bucket.wake <= watermark
            for key, entry in self._load_entries(number, bucket).items()
            if entry.wake <= watermark
        )

    def forget_due(self, watermark: int) -> None:
        """Forgets the keys whose wake is at or below the watermark."""
        for key in self.due(watermark):
            self.put(key, None)

    def next_wake(self) -> int | None:
        """Returns the earliest wake of all keys; None if no key has one."""
        self._update_wakes()
        wakes = [bucket.wake for bucket in self._buckets.values() if bucket.wake < NEVER_DUE]
        return min(wakes) if wakes else None

    def items(self) -> Iterator[tuple[Key, int, Any]]:
        """Yields each key with its wake and its value."""
        for number, bucket in sorted(self._buckets.items()):
            yield from ((key, *entry) for key, entry in self._load_entries(number, bucket).items())

    def values(self) -> Iterator[Any]:
        """Yields all values."""
        for number, bucket in sorted(self._buckets.items()):
            yield from (entry.value for entry in self._load_entries(number, bucket).values())

    @property
    def rows(self) -> int:
        """The number of rows that the table had when its pages were last written."""
        return sum(bucket.rows for bucket in self._buckets.values())

    def save(self, count: Callable[[Any], int] = lambda _: 1) -> None:
        """Writes the buckets that changed. count: returns the number of rows of a value."""
        assert self.store is not None
        self._update_wakes()
        for number in sorted(self._changed):
            bucket = self._buckets[number]
            if bucket.entries:
                texts = _write_values(bucket.entries)
                self.store.put(self._name_page(number), _encode(bucket.entries, texts))
                bucket.is_stored = True
                bucket.rows = sum(count(entry.value) for entry in bucket.entries.values())
                self.cache.hold(bucket, _estimate_bytes(texts))
                continue
            if bucket.is_stored:
                self.store.remove(self._name_page(number))
            del self._buckets[number]
        self._changed.clear()

    def clear(self) -> list[str]:
        """Forgets all keys and returns the names of their pages, which the caller must remove."""
        pages = [self._name_page(number) for number, bucket in self._buckets.items() if bucket.is_stored]
        for bucket in self._buckets.values():
            self.cache.forget(bucket)
        self._buckets.clear()
        self._changed.clear()
        return pages

    def to_record(self) -> TableRecord:
        """Returns the manifest's record of a saved table."""
        buckets = [BucketRecord(number, bucket.wake, bucket.rows) for number, bucket in sorted(self._buckets.items())]
        return TableRecord(self.notes, buckets)

    @classmethod
    def from_record(cls, name: str, record: TableRecord, store: Store, cache: Cache = SHARED_CACHE) -> KeyedTable:
        """Returns the table of a record; its pages are read when they are needed."""
        buckets = {each.number: _Bucket(each.wake, is_stored=True, rows=each.rows) for each in record.buckets}
        return cls(name, record.notes, store, cache, buckets)

    def _name_page(self, number: int) -> str:
        return f"keys:{self.name}:{number}"

    def _load_entries(self, number: int, bucket: _Bucket) -> dict[Key, _Entry]:
        if bucket.entries is None:
            assert self.store is not None
            texts, bucket.entries = _decode(self.store.get(self._name_page(number)) or b"", self._name_page(number))
            self.cache.hold(bucket, _estimate_bytes(texts))
        return bucket.entries

    def _update_wakes(self) -> None:
        for number in self._changed:
            bucket = self._buckets[number]
            bucket.wake = min((entry.wake for entry in (bucket.entries or {}).values()), default=NEVER_DUE)


def split_text(text: str, most: int) -> list[str]:
    """Splits a text into parts of at most `most` characters; an empty text is one part."""
    return [text[at : at + most] for at in range(0, len(text), most)] or [""]


def _find_bucket(key: Key) -> int:
    low, high = key
    return (low ^ (low >> 20) ^ (low >> 40) ^ high) % _BUCKETS


def _write_values(entries: Mapping[Key, _Entry]) -> list[str]:
    """Returns the values as JSON, in the order of their keys."""
    return [json.dumps(entries[key].value, separators=(",", ":")) for key in sorted(entries)]


def _estimate_bytes(texts: list[str]) -> int:
    return len(texts) * _ENTRY_BYTES + sum(map(len, texts)) * _BYTES_PER_CHARACTER


def _encode(entries: Mapping[Key, _Entry], values: list[str]) -> bytes:
    """Encodes the page of a bucket. values: those of the entries, from `_write_values`."""
    keys = sorted(entries)
    rows: list[tuple[int, int, int]] = []
    cut: list[str] = []
    for key, text in zip(keys, values, strict=True):
        for part in split_text(text, _MAX_ROW_CHARACTERS):
            rows.append((*key, entries[key].wake))
            cut.append(part)
    texts: Values = np.empty(len(cut), dtype=object)
    texts[:] = cut
    return encode_page([*(np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)), texts])


def _decode(page: bytes, place: str) -> tuple[list[str], dict[Key, _Entry]]:
    """Decodes the page of a bucket into its values as JSON and its entries. Raises StateError."""
    arrays = decode_page(page, place)
    columns = [array.tolist() for array in arrays if array is not None]
    kinds = [None if array is None else array.dtype.kind for array in arrays]
    if kinds != ["i", "i", "i", "O"] or len({len(column) for column in columns}) != 1:
        raise StateError(f"{place}: a page of window state holds something else; start with a new checkpoint")
    low, high, wake, texts = columns
    try:
        joined: dict[Key, tuple[int, list[str]]] = {}
        for at, text in enumerate(texts):
            joined.setdefault((low[at], high[at]), (wake[at], []))[1].append(text)
        return texts, {key: _Entry(due, json.loads("".join(parts))) for key, (due, parts) in joined.items()}
    except (TypeError, ValueError, RecursionError) as error:
        raise StateError(
            f"{place}: a page of window state is damaged ({error}); start with a new checkpoint"
        ) from error

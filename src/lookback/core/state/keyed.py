"""Keyed tables: what is kept per grouping key and is no column of rows, such as open sessions and begun matches.

A table is cut by a hash of the key into buckets; a bucket is one page. A batch reads and writes only the pages of the
keys that it touches. Each key has a wake time, the watermark at which something becomes due for it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from lookback.core.errors import StateError
from lookback.core.values.cache import SHARED, Cache
from lookback.core.values.columns import Values
from lookback.core.values.pages import decode_page, encode_page
from lookback.core.values.times import NEVER_DUE

# Both halves of a key.
Key = tuple[int, int]
_BUCKETS = 256
# What a store is given at once, and the most characters of a value in one row of a page.
MAX_PIECE_BYTES = 2**26
_MOST_CHARACTERS = 2**26
_SPLIT, _SPLIT_HEAD = b"LBps", struct.Struct("<4sI")
# What a key's entry takes in memory: so much, and so much for each character of its value as JSON.
_ENTRY_BYTES, _BYTES_A_CHARACTER = 300, 9


class Store(Protocol):
    """Where pages are kept: RocksDB in a stream, a dict in tests."""

    def get(self, name: str) -> bytes | None:
        """The page of that name; None if there is none. Raises StoreFailed."""

    def put(self, name: str, page: bytes) -> None:
        """Keeps a page, in place of one of the same name."""

    def remove(self, name: str) -> None:
        """Forgets a page; it exists."""


class Pieces:
    """A store of pages of any size, over one that is given no more than MAX_PIECE_BYTES at once.

    A larger page is kept as pieces, and under its own name stands how many these are. counts: the pieces of each page that
    has any, to be kept with the pages, since a page may be replaced or removed without being read.
    """

    def __init__(self, store: Store, counts: dict[str, int]) -> None:
        self._store, self._counts = store, counts

    def get(self, name: str) -> bytes | None:
        """The page of that name; None if there is none. Raises StateError where a piece is missing."""
        page = self._store.get(name)
        if page is None or page[:4] != _SPLIT or len(page) != _SPLIT_HEAD.size:
            return page
        self._counts[name] = count = _SPLIT_HEAD.unpack(page)[1]
        parts = []
        for at in range(count):
            part = self._store.get(_piece(name, at))
            if part is None:
                error = f"piece {at + 1} of {count} is missing"
                raise StateError(f"{name}: a page of window state is damaged ({error}); start with a new checkpoint")
            parts.append(part)
        return b"".join(parts)

    def put(self, name: str, page: bytes) -> None:
        """Keeps a page, in place of one of the same name."""
        parts = [page[at : at + MAX_PIECE_BYTES] for at in range(0, len(page), MAX_PIECE_BYTES)]
        count = len(parts) if len(parts) > 1 else 0
        self._remove_pieces(name, count)
        if count:
            self._counts[name] = count
            for at, part in enumerate(parts):
                self._store.put(_piece(name, at), part)
        self._store.put(name, _SPLIT_HEAD.pack(_SPLIT, count) if count else page)

    def remove(self, name: str) -> None:
        """Forgets a page; it exists."""
        self._remove_pieces(name, 0)
        self._store.remove(name)

    def _remove_pieces(self, name: str, first: int) -> None:
        for at in range(first, self._counts.pop(name, 0)):
            self._store.remove(_piece(name, at))


def _piece(name: str, at: int) -> str:
    return f"{name}/{at}"


@dataclass(eq=False)
class _Bucket:
    """wake: the earliest of its keys; entries: per key its wake and its value; None until they are read.

    rows: how many its entries had when they were last written, as `KeyedTable.save` counted them.
    """

    wake: int = NEVER_DUE
    entries: dict[Key, tuple[int, Any]] | None = None
    stored: bool = False
    rows: int = 0

    def evict(self) -> None:
        """Lets go of the entries, which are as they were written."""
        self.entries = None


@dataclass(eq=False)
class KeyedTable:
    """A value per key: lists, dicts, texts, numbers, truths and None, as JSON has them.

    name: of its pages. notes: what is kept of the table as a whole, likewise.
    """

    name: str
    notes: dict[str, Any] = field(default_factory=dict)
    store: Store | None = None
    cache: Cache = SHARED
    _buckets: dict[int, _Bucket] = field(default_factory=dict)
    _changed: set[int] = field(default_factory=set)

    def get(self, key: Key) -> Any | None:
        """The value of a key; None if it has none. A value that is changed in place has to be put again."""
        bucket = self._buckets.get(_bucket_of(key))
        entry = None if bucket is None else self._entries(_bucket_of(key), bucket).get(key)
        return None if entry is None else entry[1]

    def put(self, key: Key, value: Any | None, wake: int = NEVER_DUE) -> None:
        """Keeps a value, which `due` names from the watermark `wake` on; None forgets the key."""
        number = _bucket_of(key)
        if value is None and number not in self._buckets:
            return
        bucket = self._buckets.setdefault(number, _Bucket(entries={}))
        entries = self._entries(number, bucket)
        if value is not None:
            entries[key] = (wake, value)
        elif entries.pop(key, None) is None:
            return
        self._changed.add(number)
        # It cannot be read again before it is written.
        self.cache.forget(bucket)

    def change(self, key: Key, value: Any) -> None:
        """Keeps a value with the wake that the key has."""
        entry = self._entries(_bucket_of(key), self._buckets[_bucket_of(key)])[key]
        self.put(key, value, entry[0])

    def due(self, watermark: int) -> list[Key]:
        """The keys whose wake is reached, sorted."""
        self._settle()
        return sorted(
            key
            for number, bucket in self._buckets.items()
            if bucket.wake <= watermark
            for key, (wake, _) in self._entries(number, bucket).items()
            if wake <= watermark
        )

    def forget_due(self, watermark: int) -> None:
        """Forgets the keys whose wake is reached."""
        for key in self.due(watermark):
            self.put(key, None)

    def next_wake(self) -> int | None:
        """The earliest wake of all keys; None if there is none."""
        self._settle()
        wakes = [bucket.wake for bucket in self._buckets.values() if bucket.wake < NEVER_DUE]
        return min(wakes) if wakes else None

    def items(self) -> Iterator[tuple[Key, int, Any]]:
        """Each key with its wake and its value."""
        for number, bucket in sorted(self._buckets.items()):
            yield from ((key, wake, value) for key, (wake, value) in self._entries(number, bucket).items())

    def values(self) -> Iterator[Any]:
        """All values."""
        for number, bucket in sorted(self._buckets.items()):
            yield from (value for _, value in self._entries(number, bucket).values())

    @property
    def rows(self) -> int:
        """How many rows the table had when its pages were last written."""
        return sum(bucket.rows for bucket in self._buckets.values())

    def save(self, count: Callable[[Any], int] = lambda _: 1) -> None:
        """Writes the buckets that changed. count: how many rows a value has."""
        assert self.store is not None
        self._settle()
        for number in sorted(self._changed):
            bucket = self._buckets[number]
            if bucket.entries:
                texts = _texts(bucket.entries)
                self.store.put(self._page(number), _encode(bucket.entries, texts))
                bucket.stored = True
                bucket.rows = sum(count(value) for _, value in bucket.entries.values())
                self.cache.hold(bucket, _memory_of(texts))
                continue
            if bucket.stored:
                self.store.remove(self._page(number))
            del self._buckets[number]
        self._changed.clear()

    def clear(self) -> list[str]:
        """Forgets all keys; the names of the pages that have to be removed."""
        pages = [self._page(number) for number, bucket in self._buckets.items() if bucket.stored]
        for bucket in self._buckets.values():
            self.cache.forget(bucket)
        self._buckets.clear()
        self._changed.clear()
        return pages

    def summary(self) -> Any:
        """What the manifest keeps of a saved table."""
        return [self.notes, [[number, bucket.wake, bucket.rows] for number, bucket in sorted(self._buckets.items())]]

    @classmethod
    def of_summary(cls, name: str, summary: Any, store: Store, cache: Cache = SHARED) -> KeyedTable:
        """The table that `summary` tells of; its pages are read when they are needed."""
        notes, buckets = summary
        # Earlier releases did not count rows.
        read = {number: _Bucket(wake, None, True, *rows) for number, wake, *rows in buckets}
        return cls(name, notes, store, cache, read)

    def _page(self, number: int) -> str:
        return f"keys:{self.name}:{number}"

    def _entries(self, number: int, bucket: _Bucket) -> dict[Key, tuple[int, Any]]:
        if bucket.entries is None:
            assert self.store is not None
            texts, bucket.entries = _decode(self.store.get(self._page(number)) or b"", self._page(number))
            self.cache.hold(bucket, _memory_of(texts))
        return bucket.entries

    def _settle(self) -> None:
        for number in self._changed:
            bucket = self._buckets[number]
            bucket.wake = min((wake for wake, _ in (bucket.entries or {}).values()), default=NEVER_DUE)


def cut_text(text: str, most: int) -> list[str]:
    """The text in parts of at most so many characters; one part at least."""
    return [text[at : at + most] for at in range(0, len(text), most)] or [""]


def _bucket_of(key: Key) -> int:
    low, high = key
    return (low ^ (low >> 20) ^ (low >> 40) ^ high) % _BUCKETS


def _texts(entries: Mapping[Key, tuple[int, Any]]) -> list[str]:
    """The values as JSON, by key."""
    return [json.dumps(entries[key][1], separators=(",", ":")) for key in sorted(entries)]


def _memory_of(texts: list[str]) -> int:
    return len(texts) * _ENTRY_BYTES + sum(map(len, texts)) * _BYTES_A_CHARACTER


def _encode(entries: Mapping[Key, tuple[int, Any]], listed: list[str]) -> bytes:
    """listed: what `_texts` made of the entries."""
    keys = sorted(entries)
    rows: list[tuple[int, int, int]] = []
    cut: list[str] = []
    for key, text in zip(keys, listed, strict=True):
        # A value that is too long for one row of the page goes on in the next.
        for part in cut_text(text, _MOST_CHARACTERS):
            rows.append((*key, entries[key][0]))
            cut.append(part)
    texts: Values = np.empty(len(cut), dtype=object)
    texts[:] = cut
    return encode_page([*(np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)), texts])


def _decode(page: bytes, place: str) -> tuple[list[str], dict[Key, tuple[int, Any]]]:
    """The values as JSON, and the entries."""
    arrays = decode_page(page, place)
    known = [array.tolist() for array in arrays if array is not None]
    kinds = [None if array is None else array.dtype.kind for array in arrays]
    if kinds != ["i", "i", "i", "O"] or len({len(column) for column in known}) != 1:
        raise StateError(f"{place}: a page of window state holds something else; start with a new checkpoint")
    low, high, wake, texts = known
    try:
        joined: dict[Key, tuple[int, list[str]]] = {}
        for at, text in enumerate(texts):
            joined.setdefault((low[at], high[at]), (wake[at], []))[1].append(text)
        return texts, {key: (due, json.loads("".join(parts))) for key, (due, parts) in joined.items()}
    except (TypeError, ValueError, RecursionError) as error:
        raise StateError(
            f"{place}: a page of window state is damaged ({error}); start with a new checkpoint"
        ) from error

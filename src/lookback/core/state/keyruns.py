"""Stores keys with their values as runs of immutable pages. A newer run overrides older ones key by key.

A hash of the key assigns it to one of the run's pages, whose number is a power of two. A value is JSON text, or rows in
the columns of its page. `tableruns` keeps the runs of a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lookback.core.errors import StateError
from lookback.core.state.pieces import require_integers
from lookback.core.values.columns import Mask, Values, make_objects
from lookback.core.values.keycolumns import KeyColumns
from lookback.core.values.keys import Int64s, Keys, list_ranges
from lookback.core.values.pages import decode_page, encode_page
from lookback.core.values.times import NEVER_DUE

# The low and the high half of a grouping key.
Key = tuple[int, int]
# The approximate number of keys in a page, unless its run would have more than 2**_MAX_DEPTH pages.
_KEYS_PER_PAGE = 512
_MAX_DEPTH = 12
# The manifest holds the wakes of up to 2**_INLINE_DEPTH pages of a run; the wakes of more pages have their own page.
_INLINE_DEPTH = 4
# Stands in for the wake of a page that the run does not have; above every wake.
_ABSENT = 2**63 - 1
# Longer values continue in the next row of their page.
_MAX_ROW_CHARACTERS = 2**26
# The count of a forgotten key.
_FORGOTTEN = -1
# The fields of a run in the manifest.
_FIGURES = ("number", "depth", "keys", "rows", "swept", "horizon", "last_wake", "sources", "parts_done")
# The memory of a row of a page without the characters of its value.
_ROW_BYTES = 220


def hash_key(key: Key) -> int:
    """Returns the hash whose lowest bits are the number of a key's page. Stored pages depend on it."""
    low, high = key
    return low ^ (low >> 20) ^ (low >> 40) ^ high


def hash_keys(keys: Keys) -> Int64s:
    """Returns the `hash_key` of each key."""
    hashes: Int64s = keys.low ^ (keys.low >> 20) ^ (keys.low >> 40) ^ keys.high
    return hashes


@dataclass(eq=False)
class Rows:
    """Rows of distinct keys, sorted by key; all arrays have shape (rows,).

    A forgotten key has a row too, which overrides those of older runs.

    Attributes:
        low: The low half of each key.
        high: The high half of each key.
        wakes: The watermark at which each key is due.
        counts: The number of rows of state in each value.
        texts: The values as JSON; empty for a key whose value is in `columns`.
        lengths: The number of rows that each key has in `columns`; None without columns.
        columns: The values that are rows, key after key.
    """

    low: Int64s
    high: Int64s
    wakes: Int64s
    counts: Int64s
    texts: Values
    lengths: Int64s | None = None
    columns: KeyColumns | None = None

    def __len__(self) -> int:
        return len(self.low)

    @classmethod
    def from_entries(cls, entries: Sequence[tuple[Key, int, str | None, int]]) -> Rows:
        """Makes rows from tuples (key, wake, text, count) sorted by key. The text of a forgotten key is None."""
        low, high = (np.array([key[half] for key, *_ in entries], dtype=np.int64) for half in (0, 1))
        wakes = np.array([wake for _, wake, _, _ in entries], dtype=np.int64)
        counts = [_FORGOTTEN if text is None else count for _, _, text, count in entries]
        texts = make_objects([text or "" for _, _, text, _ in entries])
        return cls(low, high, wakes, np.array(counts, dtype=np.int64), texts)

    @classmethod
    def from_columns(cls, keys: Keys, wakes: Int64s, lengths: Int64s, columns: KeyColumns | None) -> Rows:
        """Makes rows of keys in any order, each with its number of rows in `columns`; length 0 forgets the key."""
        counts = np.where(lengths > 0, lengths, _FORGOTTEN)
        texts = make_objects([""] * len(lengths))
        rows = cls(keys.low, keys.high, np.where(lengths > 0, wakes, NEVER_DUE), counts, texts, lengths, columns)
        return rows.take(np.lexsort((keys.high, keys.low)))

    @property
    def keys(self) -> Keys:
        """The key of each row."""
        return Keys(self.low, self.high)

    @property
    def is_forgotten(self) -> Mask:
        """Marks forgotten keys."""
        mask: Mask = self.counts == _FORGOTTEN
        return mask

    @cached_property
    def hashes(self) -> Int64s:
        """The hash of each key."""
        return hash_keys(self.keys)

    @cached_property
    def _positions(self) -> dict[int, int]:
        """The position of each low half; if several keys share one, that of the last."""
        return dict(zip(self.low.tolist(), range(len(self)), strict=True))

    @property
    def memory_bytes(self) -> int:
        """The estimated memory, in bytes."""
        own = 0 if self.columns is None else self.columns.memory_bytes
        return len(self) * _ROW_BYTES + sum(map(len, self.texts.tolist())) + own

    def find(self, key: Key) -> int | None:
        """Returns the position of a key; None if it has no row."""
        low, high = key
        at = self._positions.get(low, -1)
        while at >= 0 and self.low.item(at) == low:
            if self.high.item(at) == high:
                return at
            at -= 1
        return None

    def take(self, at: Int64s | Mask) -> Rows:
        """Returns the rows selected by positions or a mask."""
        rows = Rows(self.low[at], self.high[at], self.wakes[at], self.counts[at], self.texts[at])
        if self.columns is not None and self.lengths is not None and (lengths := self.lengths[at]).any():
            starts = (np.cumsum(self.lengths) - self.lengths)[at]
            rows.lengths, rows.columns = lengths, self.columns.take(list_ranges(starts, lengths))
        return rows

    def forget(self, at: Mask) -> Rows:
        """Returns a copy in which the keys of a mask are forgotten."""
        wakes, counts = np.where(at, NEVER_DUE, self.wakes), np.where(at, _FORGOTTEN, self.counts)
        texts = self.texts.copy()
        texts[at] = ""
        rows = Rows(self.low, self.high, wakes, counts, texts)
        if self.columns is not None and self.lengths is not None:
            rows.lengths = np.where(at, 0, self.lengths)
            rows.columns = self.columns.take(np.flatnonzero(np.repeat(~at, self.lengths)))
        return rows

    def value(self, at: int) -> Any:
        """Returns a value in columns as {"rows": [...]}, with a list for each row; None if it is not in columns."""
        if self.columns is None or self.lengths is None or not self.lengths[at]:
            return None
        start = int(self.lengths[:at].sum())
        return {"rows": self.columns.list_rows(start, start + int(self.lengths[at]))}

    def split(self, depth: int, numbers: Sequence[int]) -> Iterator[tuple[int, Rows]]:
        """Yields the number and the rows of each page in `numbers` that has rows, for a run of 2**depth pages."""
        if len(numbers) == 1:
            if len(self):
                yield numbers[0], self
            return
        page_of = self.hashes & (2**depth - 1)
        order = np.argsort(page_of, kind="stable")
        edges = np.searchsorted(page_of[order], [*numbers, 2**depth])
        for at, number in enumerate(numbers):
            if edges[at] < edges[at + 1]:
                yield number, self.take(order[edges[at] : edges[at + 1]])

    def encode(self) -> bytes:
        """Encodes the rows as a page."""
        listed, columns = self.texts.tolist(), [] if self.columns is None else self.columns.encode()
        if max(map(len, listed), default=0) <= _MAX_ROW_CHARACTERS:
            return encode_page([self.low, self.high, self.wakes, self.texts, self.counts, *columns])
        parts = [split_text(text, _MAX_ROW_CHARACTERS) for text in listed]
        at = np.repeat(np.arange(len(self)), [len(each) for each in parts])
        texts = make_objects([part for each in parts for part in each])
        return encode_page([self.low[at], self.high[at], self.wakes[at], texts, self.counts[at], *columns])

    @classmethod
    def decode(cls, page: bytes, place: str) -> Rows:
        """Decodes a page that `encode` wrote. Raises StateError."""
        decoded = decode_page(page, place)
        arrays = [array for array in decoded[:5] if array is not None]
        kinds = "".join(array.dtype.kind for array in arrays)
        if kinds != "iiiOi" or len({len(array) for array in arrays}) != 1:
            raise StateError(f"{place}: a page of window state holds something else; start with a new checkpoint")
        low, high, wakes, texts, counts = arrays
        if len(texts) and not isinstance(texts[0], str):
            raise StateError(f"{place}: a page of window state holds something else; start with a new checkpoint")
        continued = np.flatnonzero((low[1:] == low[:-1]) & (high[1:] == high[:-1])) + 1
        rows = cls(low, high, wakes, counts, texts)
        if len(continued):
            first = np.setdiff1d(np.arange(len(low)), continued)
            joined = ["".join(part.tolist()) for part in np.split(texts, first[1:])]
            rows = rows.take(first)
            rows.texts = make_objects(joined)
        if len(decoded) > 5:
            rows.lengths = np.where(rows.texts == "", np.maximum(rows.counts, 0), 0)
            rows.columns = KeyColumns.decode(decoded[5:], int(rows.lengths.sum()), place)
        return rows


@dataclass(eq=False)
class Page:
    """A page of a run.

    Attributes:
        wake: The earliest wake of the keys that are not yet known to be overridden.
        rows: Its rows; None until they are read.
    """

    wake: int
    rows: Rows | None = None

    def evict(self) -> None:
        """Drops the rows from memory; the store has them."""
        self.rows = None


@dataclass(eq=False)
class KeyRun:
    """Keys that were written or merged together.

    Attributes:
        number: Part of the names of its pages.
        depth: The run has up to 2**depth pages.
        keys: The number of keys, each of which has a row.
        rows: The sum of the counts of the keys that no newer run overrides.
        swept: All keys with a wake up to this watermark are overridden.
        horizon: All keys with a wake up to this watermark are forgotten.
        last_wake: An upper bound of the wakes of its keys.
        sources: How many of the runs just before it are being merged into it; 0 if it is complete.
        parts_done: How many parts of these runs have been merged.
        pages: Pages by number; None until needed.
        successor: The run into which it was merged.
    """

    number: int
    depth: int
    keys: int = 0
    rows: int = 0
    swept: int = -NEVER_DUE
    horizon: int = -NEVER_DUE
    last_wake: int = -NEVER_DUE
    sources: int = 0
    parts_done: int = 0
    pages: dict[int, Page] | None = None
    successor: KeyRun | None = None

    @classmethod
    def begin(cls, number: int, keys: int) -> KeyRun:
        """Returns a run without pages that has room for `keys` keys."""
        depth = min(_MAX_DEPTH, max(0, (keys - 1) // _KEYS_PER_PAGE).bit_length())
        return cls(number, depth, pages={})

    @property
    def opened(self) -> dict[int, Page]:
        """The pages, which must be in memory."""
        assert self.pages is not None
        return self.pages

    @property
    def has_index(self) -> bool:
        """True if the wakes of its pages have their own page."""
        return self.depth > _INLINE_DEPTH and not self.sources

    def name_page(self, table: str, number: int) -> str:
        """Returns the name of a page in the store."""
        return f"table:{table}:{self.number}:{number}"

    def name_index(self, table: str) -> str:
        """Returns the name of the page of the wakes."""
        return f"table:{table}:{self.number}:wakes"

    def numbers_in(self, part: int, depth: int) -> range:
        """Returns the numbers of the pages with keys whose hash has `part` as its lowest `depth` bits."""
        if self.depth <= depth:
            own = part & (2**self.depth - 1)
            return range(own, own + 1)
        return range(part, 2**self.depth, 2**depth)

    def add_rows(self, rows: Rows, numbers: Sequence[int]) -> Iterator[tuple[int, Page]]:
        """Adds rows whose pages are among `numbers` and do not exist yet. Yields the new pages with their numbers."""
        pages = self.opened
        self.keys += len(rows)
        if len(rows):
            self.last_wake = max(self.last_wake, int(np.where(rows.is_forgotten, -NEVER_DUE, rows.wakes).max()))
        for number, own in rows.split(self.depth, numbers):
            later = own.wakes[own.wakes > self.swept]
            page = pages[number] = Page(int(later.min()) if len(later) else NEVER_DUE, own)
            yield number, page

    def encode_index(self) -> bytes:
        """Encodes the wakes of the pages."""
        return encode_page([np.array(self._list_wakes(), dtype=np.int64)])

    def read_index(self, page: bytes, place: str) -> dict[int, Page]:
        """Reads the pages from what `encode_index` wrote. Raises StateError."""
        arrays = decode_page(page, place)
        wakes = arrays[0] if len(arrays) == 1 else None
        if wakes is None or wakes.dtype.kind != "i" or len(wakes) != 2**self.depth:
            raise StateError(f"{place}: a page of window state holds something else; start with a new checkpoint")
        return _open_pages(wakes.tolist())

    def _list_wakes(self) -> list[int]:
        pages = self.opened
        return [pages[number].wake if number in pages else _ABSENT for number in range(2**self.depth)]

    def to_json(self) -> list[Any]:
        """Returns what the manifest says about the run: its fields, and the wakes of its pages unless it has an index."""
        figures = [getattr(self, name) for name in _FIGURES]
        return [*figures, [] if self.has_index else self._list_wakes()]

    @classmethod
    def from_json(cls, row: Sequence[Any]) -> KeyRun:
        """Reads what `to_json` returned; the pages are read when needed. Raises ValueError for an invalid number."""
        *figures, wakes = row
        require_integers([*figures, *wakes])
        run = cls(*figures)
        if not 0 <= run.depth <= 16 or run.sources < 0 or (wakes and len(wakes) != 2**run.depth):
            raise ValueError("the numbers in a run of keys contradict each other")
        if not run.has_index:
            run.pages = _open_pages(wakes)
        return run


def _open_pages(wakes: Sequence[int]) -> dict[int, Page]:
    return {number: Page(wake) for number, wake in enumerate(wakes) if wake != _ABSENT}


def merge_rows(parts: Sequence[Rows]) -> tuple[Rows, Int64s]:
    """Merges parts, ordered from oldest to newest. Returns the newest row of each key and the part it comes from."""
    if len(parts) == 1:
        return parts[0], np.zeros(len(parts[0]), dtype=np.int64)
    joined = _join_rows(parts)
    part_of = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    # A stable sort: the newest of equal keys comes last.
    order = np.lexsort((joined.high, joined.low))
    low, high = joined.low[order], joined.high[order]
    is_newest = np.ones(len(order), dtype=bool)
    is_newest[:-1] = (low[1:] != low[:-1]) | (high[1:] != high[:-1])
    order = order[is_newest]
    return joined.take(order), part_of[order]


def select_rows(parts: Sequence[tuple[Rows, Int64s]]) -> Rows:
    """Returns the rows at the given positions of each part, one part after another."""
    return _join_rows([rows.take(places) for rows, places in parts]) if parts else Rows.from_entries([])


def _join_rows(parts: Sequence[Rows]) -> Rows:
    arrays = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("low", "high", "wakes", "counts", "texts")
    )
    joined = Rows(*arrays)
    columns = [part.columns for part in parts if part.columns is not None and len(part.columns)]
    if columns:
        lengths = [np.zeros(len(part), dtype=np.int64) if part.lengths is None else part.lengths for part in parts]
        joined.lengths, joined.columns = np.concatenate(lengths), KeyColumns.join(columns)
    return joined


def split_text(text: str, most: int) -> list[str]:
    """Splits a text into parts of at most `most` characters; an empty text is one part."""
    return [text[at : at + most] for at in range(0, len(text), most)] or [""]

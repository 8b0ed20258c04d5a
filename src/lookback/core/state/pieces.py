"""Keeps pages of any size in a store that limits the size of a page."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Protocol

from lookback.core.errors import StateError
from lookback.core.values.cache import ArrayFile

FindFile = Callable[[str], ArrayFile | None]

# Larger pages are split before they reach the store.
MAX_PIECE_BYTES = 2**26
_PIECES_MARK, _PIECES_HEAD = b"LBps", struct.Struct("<4sI")


class Store(Protocol):
    """Keeps pages: RocksDB in a stream, a dict in tests."""

    def get(self, name: str) -> bytes | None:
        """Returns the page of that name; None if it does not exist. Raises StoreFailed."""

    def put(self, name: str, page: bytes) -> None:
        """Writes a page, replacing any page of the same name."""

    def remove(self, name: str) -> None:
        """Removes a page, which must exist."""


class Pieces:
    """A store of pages of any size, on top of a store whose pages have at most MAX_PIECE_BYTES.

    A larger page is stored as pieces; the page under its own name holds their number.

    Args:
        store: The underlying store.
        counts: The number of pieces of each page that has pieces, by page name. It is saved with the pages, since a
            page can be replaced or removed without being read.
        find_file: Returns the file that may hold a page of the store decoded; None for no file. Each page has its own.
    """

    def __init__(self, store: Store, counts: dict[str, int], find_file: FindFile = lambda _: None) -> None:
        self._store, self._counts, self._find_file = store, counts, find_file

    def find_file(self, name: str) -> ArrayFile | None:
        """Returns the file that may hold a page decoded: that of its first piece if it has any; None for no file."""
        return self._find_file(_name_piece(name, 0) if name in self._counts else name)

    def get(self, name: str) -> bytes | None:
        """Returns the page of that name; None if it does not exist. Raises StateError if a piece is missing."""
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
        """Writes a page, in pieces if it is large, replacing any page of the same name."""
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


def require_integers(numbers: Iterable[object], least: int = -(2**63)) -> None:
    """Raises ValueError unless all numbers of a stored record are 64-bit integers from `least` on."""
    if not all(type(each) is int and least <= each < 2**63 for each in numbers):
        raise ValueError("a stored number is not an integer in its range")


def _name_piece(name: str, at: int) -> str:
    return f"{name}/{at}"

"""Caches: of decoded pages, bounded in bytes, and of what was computed last, bounded in number."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import cache, cached_property
from typing import Any, Generic, Protocol, TypeVar
from weakref import ref

import numpy as np
import pyarrow as pa

# A Python worker keeps this much state decoded in memory beside the state store. A row of a run takes about 40 bytes, so
# about 6 million rows fit. Long runs go into files beyond that (see `ArrayFile`); other pages are read again.
MAX_CACHED_BYTES = 256 * 2**20
# The average size of a Python object, without the pointer to it.
_OBJECT_BYTES = 56

_Entry = TypeVar("_Entry")


class ArrayFile(Protocol):
    """A place beside memory for an object with its arrays, which are Arrow's buffers there, and take no memory."""

    def write(self, content: Any) -> bool:
        """Stores an object, replacing an earlier one. Returns False, and changes nothing, if that is not possible.

        content: made of arrays of one dimension, tuples, lists, dicts, texts, numbers, None and objects whose attributes are.
        """

    def read(self, classes: Mapping[str, type[Any]]) -> Any:
        """Returns the object, whose arrays cannot be written to; None if there is none.

        classes: by name, those of which it may have objects.
        """


class Evictable(Protocol):
    """An object that holds the content of a page and can read it again."""

    def evict(self) -> None:
        """Drops the content."""


class Cache:
    """A cache of the most recently used items, of at most `max_bytes` together; the last item stays whatever its size.

    An item that nobody else holds is gone from the cache too.
    """

    def __init__(self, max_bytes: int = MAX_CACHED_BYTES) -> None:
        self._max_bytes = max_bytes
        # The least recently used item comes first.
        self._sizes: dict[ref[Evictable], int] = {}
        self.bytes = 0

    def hold(self, item: Evictable, item_bytes: int) -> None:
        """Records that an item was used and how many bytes it takes, and evicts others if the cache is too large."""
        self.forget(item)
        if item_bytes == 0:
            return
        self._sizes[ref(item, self._drop)] = item_bytes
        self.bytes += item_bytes
        while self.bytes > self._max_bytes and len(self._sizes) > 1:
            oldest = next(iter(self._sizes))
            self._drop(oldest)
            evicted = oldest()
            if evicted is not None:
                evicted.evict()

    def forget(self, item: Evictable) -> None:
        """Removes an item that is gone, or that was changed and so must not be evicted."""
        self._drop(ref(item))

    @property
    def is_crowded(self) -> bool:
        """True if more than half of it is in use, so that what is held now may soon be evicted."""
        return 2 * self.bytes > self._max_bytes

    def list_items(self) -> Iterator[tuple[Evictable, int]]:
        """Yields the items with their bytes, the least recently used one first."""
        for known, item_bytes in list(self._sizes.items()):
            item = known()
            if item is not None:
                yield item, item_bytes

    def _drop(self, known: ref[Evictable]) -> None:
        self.bytes -= self._sizes.pop(known, 0)


def estimate_bytes(content: Any) -> int:
    """Estimates how many bytes of memory arrays take, alone or inside tuples, lists, dicts and objects."""
    if isinstance(content, np.ndarray):
        if isinstance(content.base, pa.Buffer):
            # It is in a file.
            return 0
        return content.nbytes + (len(content) * _OBJECT_BYTES if content.dtype == np.dtype(object) else 0)
    if isinstance(content, (tuple, list)):
        return sum(map(estimate_bytes, content))
    if isinstance(content, dict):
        return sum(map(estimate_bytes, content.values()))
    return estimate_bytes(vars(content)) if hasattr(content, "__dict__") else 0


class RecentCache(Generic[_Entry]):
    """A cache of the `most` most recently used entries."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: dict[Hashable, _Entry] = {}

    def get(self, key: Hashable, make: Callable[[], _Entry]) -> _Entry:
        """Returns the entry of a key, made where there is none."""
        entry = self._entries.pop(key) if key in self._entries else make()
        self._entries[key] = entry
        if len(self._entries) > self._most:
            del self._entries[next(iter(self._entries))]
        return entry

    def retain(self, is_kept: Callable[[Any], bool]) -> None:
        """Drops the entries of all keys but these."""
        self._entries = {key: entry for key, entry in self._entries.items() if is_kept(key)}

    def clear(self) -> None:
        """Drops all entries."""
        self._entries.clear()

    def items(self) -> Iterable[tuple[Any, _Entry]]:
        """Returns all keys and their entries."""
        return self._entries.items()

    def values(self) -> Iterable[_Entry]:
        """Returns all entries."""
        return self._entries.values()


def forget_cached(content: object) -> None:
    """Drops the values of an object's cached properties, which are computed again when needed."""
    kind: Any = type(content)
    for name in _list_cached(kind):
        vars(content).pop(name, None)


@cache
def _list_cached(kind: type) -> list[str]:
    return [name for name, member in vars(kind).items() if isinstance(member, cached_property)]


# All shards of a process share this cache.
SHARED_CACHE = Cache()

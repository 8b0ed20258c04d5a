"""Caches: of decoded pages, bounded in bytes, and of what was computed last, bounded in number."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

# A Python worker keeps this much state decoded beside the state store. A row of a run takes about 40 bytes, so about
# 6 million rows fit; pages beyond that are read again in each batch.
MAX_CACHED_BYTES = 256 * 2**20
# The average size of a Python object, without the pointer to it.
_OBJECT_BYTES = 56

_Entry = TypeVar("_Entry")


class Evictable(Protocol):
    """An object that holds the content of a page and can read it again."""

    def evict(self) -> None:
        """Drops the content."""


class Cache:
    """A cache of the most recently used items, of at most `max_bytes` together; the last item stays whatever its size."""

    def __init__(self, max_bytes: int = MAX_CACHED_BYTES) -> None:
        self._max_bytes = max_bytes
        # The least recently used item comes first.
        self._sizes: dict[Evictable, int] = {}
        self.bytes = 0

    def hold(self, item: Evictable, item_bytes: int) -> None:
        """Records that an item was used and how many bytes it takes, and evicts others if the cache is too large."""
        self.forget(item)
        self._sizes[item] = item_bytes
        self.bytes += item_bytes
        while self.bytes > self._max_bytes and len(self._sizes) > 1:
            oldest = next(iter(self._sizes))
            self.forget(oldest)
            oldest.evict()

    def forget(self, item: Evictable) -> None:
        """Removes an item that is gone, or that was changed and so must not be evicted."""
        self.bytes -= self._sizes.pop(item, 0)


def estimate_bytes(content: Any) -> int:
    """Estimates how many bytes arrays take, alone or inside tuples, lists, dicts and objects."""
    if isinstance(content, np.ndarray):
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


# All shards of a process share this cache.
SHARED_CACHE = Cache()

"""A cache of decoded pages, bounded in bytes."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

# A Python worker keeps this much state decoded beside the state store. A row of a run takes about 40 bytes, so about
# 6 million rows fit; pages beyond that are read again in each batch.
MAX_CACHED_BYTES = 256 * 2**20
# The average size of a Python object, without the pointer to it.
_OBJECT_BYTES = 56


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


# All shards of a process share this cache.
SHARED_CACHE = Cache()

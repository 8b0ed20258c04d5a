"""Pages that are kept in memory after they were read, up to a number of bytes."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

# How much of its shards' state a Python worker keeps decoded beside the state store. A row of a run takes some 40 bytes,
# so these are about 6 million rows; what is needed beyond them is read again in each batch.
MAX_CACHED_BYTES = 256 * 2**20
# What a Python object costs beside the pointer to it, on average.
_OBJECT_BYTES = 56


class Evictable(Protocol):
    """Something that holds a page's content and can read it again."""

    def evict(self) -> None:
        """Lets go of the content."""


class Cache:
    """The items that hold their content, from the one used longest ago to the one used last.

    What is held together takes at most `most_bytes`; the item used last is held whatever its size.
    """

    def __init__(self, most_bytes: int = MAX_CACHED_BYTES) -> None:
        self._most_bytes = most_bytes
        self._sizes: dict[Evictable, int] = {}
        self.bytes = 0

    def hold(self, item: Evictable, size: int) -> None:
        """Notes that an item was used and takes `size` bytes, and evicts others where that is too much."""
        self.forget(item)
        self._sizes[item] = size
        self.bytes += size
        while self.bytes > self._most_bytes and len(self._sizes) > 1:
            oldest = next(iter(self._sizes))
            self.forget(oldest)
            oldest.evict()

    def forget(self, item: Evictable) -> None:
        """Notes that an item no longer holds what can be read again: it is gone, or has been changed."""
        self.bytes -= self._sizes.pop(item, 0)


def bytes_of(content: Any) -> int:
    """About how many bytes arrays take, alone or in tuples, lists, dicts and objects that hold them."""
    if isinstance(content, np.ndarray):
        return content.nbytes + (len(content) * _OBJECT_BYTES if content.dtype == np.dtype(object) else 0)
    if isinstance(content, (tuple, list)):
        return sum(map(bytes_of, content))
    if isinstance(content, dict):
        return sum(map(bytes_of, content.values()))
    return bytes_of(vars(content)) if hasattr(content, "__dict__") else 0


# Shared by the shards of a process.
SHARED = Cache()

"""Keeps the events that warming versions have yet to judge, in append-only pages.

Event order decides what a session or a sequence keeps, so these events wait until the state before them is rebuilt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from lookback.core.state.pieces import Store, require_integers


@dataclass
class Deferred:
    """Pages of waiting events, by the name of the keyed table they are for.

    `counts` has the number of pages and of events of each name. A batch adds at most one page, so the bytes it writes
    are proportional to its own events.
    """

    counts: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._store: Store | None = None
        # Pages that the store does not have yet, by name, and the names of pages for the next save to remove.
        self._unsaved: dict[str, bytes] = {}
        self._removed: list[str] = []

    @classmethod
    def from_json(cls, counts: dict[str, list[int]]) -> Deferred:
        """Reads the counts from their JSON. Raises ValueError for an invalid number."""
        for each in counts.values():
            require_integers(each, least=0)
        return cls({name: (pages, events) for name, (pages, events) in counts.items()})

    def use_store(self, store: Store | None) -> None:
        """Switches to another store and discards unsaved changes."""
        self._store, self._unsaved, self._removed = store, {}, []

    def add(self, name: str, page: bytes, events: int) -> None:
        """Appends a page of events to the pages of a table."""
        pages, known = self.counts.get(name, (0, 0))
        self._unsaved[_name_page(name, pages)] = page
        self.counts[name] = pages + 1, known + events

    def read(self, name: str) -> Iterator[bytes]:
        """Yields the pages of a table, in the order they were added."""
        for page_name in self.list_pages(name):
            page = self._unsaved.get(page_name)
            if page is None:
                assert self._store is not None
                page = self._store.get(page_name) or b""
            yield page

    def drop(self, name: str) -> None:
        """Drops the pages of a table, if it has any."""
        for page_name in self.list_pages(name):
            if self._unsaved.pop(page_name, None) is None:
                self._removed.append(page_name)
        self.counts.pop(name, None)

    def list_pages(self, name: str) -> list[str]:
        """Lists the page names of a table."""
        return [_name_page(name, at) for at in range(self.counts.get(name, (0, 0))[0])]

    @property
    def events(self) -> int:
        """The number of events in all pages."""
        return sum(events for _, events in self.counts.values())

    def save(self) -> None:
        """Writes unsaved changes to the store."""
        assert self._store is not None
        for name in self._removed:
            self._store.remove(name)
        for name, page in self._unsaved.items():
            self._store.put(name, page)
        self._unsaved, self._removed = {}, []


def _name_page(name: str, at: int) -> str:
    return f"deferred:{name}:{at}"

"""Keeps the events that warming versions have yet to judge, in append-only pages.

Event order decides what a session or a sequence keeps, so these events wait until the state before them is rebuilt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from lookback.core.state.manifest import DeferredRecord
from lookback.core.state.pieces import Store


@dataclass
class Deferred:
    """Pages of waiting events, by the name of the keyed table they are for.

    `records` counts the pages and the events of each name. A batch adds at most one page, so the bytes it writes are
    proportional to its own events.
    """

    records: dict[str, DeferredRecord] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._store: Store | None = None
        # Pages that the store does not have yet, by name, and the names of pages for the next save to remove.
        self._unsaved: dict[str, bytes] = {}
        self._removed: list[str] = []

    def use_store(self, store: Store | None) -> None:
        """Switches to another store and discards unsaved changes."""
        self._store, self._unsaved, self._removed = store, {}, []

    def add(self, name: str, page: bytes, events: int) -> None:
        """Appends a page of events to the pages of a table."""
        record = self.records.get(name, DeferredRecord(0, 0))
        self._unsaved[_name_page(name, record.pages)] = page
        self.records[name] = DeferredRecord(record.pages + 1, record.events + events)

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
        self.records.pop(name, None)

    def list_pages(self, name: str) -> list[str]:
        """Lists the page names of a table."""
        record = self.records.get(name)
        return [] if record is None else [_name_page(name, at) for at in range(record.pages)]

    @property
    def events(self) -> int:
        """The number of events in all pages."""
        return sum(record.events for record in self.records.values())

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

"""Keeps the events that versions which are warming have still to judge, in pages that are only ever added.

Their order decides what a session or a sequence keeps, so they wait until the state of before is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from lookback.core.state.manifest import DeferredRecord
from lookback.core.state.pieces import Store


@dataclass
class Deferred:
    """Pages of events, by the name of the state that is to have them.

    records: how many pages each name has, and how many events are in them. A batch adds one page at most, so what it writes
    follows its own events.
    """

    records: dict[str, DeferredRecord] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._store: Store | None = None
        # Pages that the store does not have yet, by name; and the names of those that a save removes.
        self._unsaved: dict[str, bytes] = {}
        self._removed: list[str] = []

    def use_store(self, store: Store | None) -> None:
        """Reads and writes pages in another store from now on."""
        self._store, self._unsaved, self._removed = store, {}, []

    def add(self, name: str, page: bytes, events: int) -> None:
        """Adds a page of events behind the others of that name."""
        record = self.records.get(name, DeferredRecord(0, 0))
        self._unsaved[_name_page(name, record.pages)] = page
        self.records[name] = DeferredRecord(record.pages + 1, record.events + events)

    def read(self, name: str) -> Iterator[bytes]:
        """Yields the pages of a name, in the order in which they were added."""
        for page_name in self.list_pages(name):
            page = self._unsaved.get(page_name)
            if page is None:
                assert self._store is not None
                page = self._store.get(page_name) or b""
            yield page

    def drop(self, name: str) -> None:
        """Drops the pages of a name, if there are any."""
        for page_name in self.list_pages(name):
            if self._unsaved.pop(page_name, None) is None:
                self._removed.append(page_name)
        self.records.pop(name, None)

    def list_pages(self, name: str) -> list[str]:
        """Lists the names of the pages of a name."""
        record = self.records.get(name)
        return [] if record is None else [_name_page(name, at) for at in range(record.pages)]

    @property
    def events(self) -> int:
        """The number of events in all pages."""
        return sum(record.events for record in self.records.values())

    def save(self) -> None:
        """Brings the store up to date."""
        assert self._store is not None
        for name in self._removed:
            self._store.remove(name)
        for name, page in self._unsaved.items():
            self._store.put(name, page)
        self._unsaved, self._removed = {}, []


def _name_page(name: str, at: int) -> str:
    return f"deferred:{name}:{at}"

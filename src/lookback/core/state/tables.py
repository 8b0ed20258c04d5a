"""Keeps the keyed tables of a shard by name, among them those of raised alerts, which suppress later ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lookback.core.state.keyed import KeyedTable
from lookback.core.state.pieces import Store
from lookback.core.values.cache import Cache

# The prefix of the names of tables of raised alerts.
RAISED = "raised:"


class KeyedTables(dict[str, KeyedTable]):
    """The keyed tables by name. `cache` decides which of their pages stay in memory."""

    def __init__(self, cache: Cache) -> None:
        super().__init__()
        self.cache = cache
        self._store: Store | None = None
        self._removed: list[str] = []

    def begin(self, store: Store) -> None:
        """Starts a batch that writes to `store`."""
        self._store, self._removed = store, []
        for table in self.values():
            table.use_store(store)

    def open(self, name: str) -> KeyedTable:
        """Returns the table of that name, creating it if needed."""
        if name not in self:
            self[name] = KeyedTable(name, store=self._store, cache=self.cache)
        return self[name]

    def drop(self, name: str) -> None:
        """Drops a table, if it exists."""
        if name in self:
            self._removed += self.pop(name).clear()

    def save(self, counts: Mapping[str, Callable[[Any], int]], count: Callable[[Any], int]) -> None:
        """Writes all changes since `begin`. `counts` has the count of rows of tables other than `count`."""
        assert self._store is not None
        for name in self._removed:
            self._store.remove(name)
        self._removed = []
        for name, table in self.items():
            table.save(counts.get(name, count))

    def raised(self, role: str, group_by: Sequence[str], keep: tuple[int, int] | None = None) -> KeyedTable:
        """Returns the table of the time of each key's last raised alert, creating it if needed.

        Args:
            role: The rule's role; see `Entry.role`.
            group_by: The fields of the keys. A version with other fields has its own table.
            keep: How long an alert suppresses later ones, and the allowed lateness; None if not yet known.
        """
        table = self.open(RAISED + json.dumps([role, *group_by]))
        if keep is not None:
            _keep_raised(table, *keep)
        return table

    def forget_raised(self, keep: Mapping[str, tuple[int, int]], watermark: int | None) -> None:
        """Drops raised alerts that can no longer suppress any, and those of rules that do not suppress alerts."""
        for name in [name for name in self if name.startswith(RAISED)]:
            spans = keep.get(json.loads(name.removeprefix(RAISED))[0])
            if spans is None:
                self.drop(name)
                continue
            _keep_raised(self[name], *spans)
            if watermark is not None:
                self[name].forget_due(watermark)
            if self[name].is_empty:
                self.drop(name)


def raised_wake(raised_at: int, span: int, allowed_lateness: int) -> int:
    """Returns the watermark from which on an alert raised at that time can no longer suppress an event's alert."""
    return raised_at + span + allowed_lateness + 1


def _keep_raised(table: KeyedTable, span: int, allowed_lateness: int) -> None:
    """Keeps raised alerts for these spans, if another version had kept them for different ones."""
    spans = [span, allowed_lateness]
    if table.notes.get("spans") != spans:
        table.notes["spans"] = spans
        for key, _, raised_at in list(table.items()):
            table.put(key, raised_at, raised_wake(raised_at, *spans))

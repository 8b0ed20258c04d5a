"""The layout of stored state, for tests: the pages that it should have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lookback.core.state import keyruns, tableruns
from lookback.core.state.keyed import KeyedTable
from lookback.core.state.shard import MANIFEST, ShardState


@contextmanager
def small_runs() -> Iterator[None]:
    """As if pages had a key or two each and a merge went on by a few rows a batch: tables of a few keys are large ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keyruns, "_KEYS_PER_PAGE", 1)
        patch.setattr(keyruns, "_MAX_DEPTH", 3)
        patch.setattr(keyruns, "_INLINE_DEPTH", 1)
        patch.setattr(tableruns, "_MIN_ROWS", 1)
        patch.setattr(tableruns, "_ROWS_PER_CHANGE", 1)
        patch.setattr(tableruns, "_SMALLEST_CLASS_KEYS", 1)
        yield


def table_pages(table: KeyedTable) -> set[str]:
    """The names of the pages that a saved table has."""
    names = {run.name_page(table.name, number) for run in table._runs.runs for number in table._runs.open_run(run)}
    return names | {run.name_index(table.name) for run in table._runs.runs if run.has_index}


def state_pages(state: ShardState) -> set[str]:
    """The names of the pages that a saved state has."""
    names = {MANIFEST, "rules"} | {stored.run_id for stored in state.windows.list_runs()}
    names = names.union(*(table_pages(table) for table in state.tables.values()))
    names = names.union(*(state.deferred.list_pages(name) for name in state.deferred.counts))
    return names | {f"{name}/{at}" for name, count in state._pieces.items() for at in range(count)}

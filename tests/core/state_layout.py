"""The layout of stored state, for tests: the pages that it should have, and those of earlier releases."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from lookback.core.state import keyed, keyruns
from lookback.core.state.keyed import KeyedTable
from lookback.core.state.shard import MANIFEST, ShardState, decode_text, encode_text
from lookback.core.values.pages import encode_page


@contextmanager
def small_runs() -> Iterator[None]:
    """As if pages had a key or two each and a merge went on by a few rows a batch: tables of a few keys are large ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keyruns, "_KEYS_PER_PAGE", 1)
        patch.setattr(keyruns, "_MAX_DEPTH", 3)
        patch.setattr(keyruns, "_INLINE_DEPTH", 1)
        patch.setattr(keyed, "_LEAST_ROWS", 1)
        patch.setattr(keyed, "_ROWS_PER_CHANGE", 1)
        patch.setattr(keyed, "_SMALLEST_CLASS_KEYS", 1)
        yield


def table_pages(table: KeyedTable) -> set[str]:
    """The names of the pages that a saved table has."""
    names = {run.name_page(table.name, number) for run in table._runs for number in table._open_run(run)}
    return names | {run.name_index(table.name) for run in table._runs if run.has_index}


def state_pages(state: ShardState) -> set[str]:
    """The names of the pages that a saved state has."""
    names = {MANIFEST, "rules"} | {stored.run_id for stored in state.list_runs()}
    names = names.union(*(table_pages(table) for table in state.tables.values()))
    names = names.union(*(state.deferred.list_pages(name) for name in state.deferred.records))
    return names | {f"{name}/{at}" for name, count in state._pieces.items() for at in range(count)}


def write_buckets(store: Any, name: str, items: list[tuple[keyed.Key, int, Any]], rows: int = 1) -> list[list[int]]:
    """Writes a table as earlier releases did, as 256 buckets. Returns their records: number, wake, rows."""
    buckets: dict[int, list[tuple[keyed.Key, int, Any]]] = {}
    for item in items:
        (low, high), _, _ = item
        buckets.setdefault((low ^ (low >> 20) ^ (low >> 40) ^ high) % 256, []).append(item)
    records = []
    for number, listed in sorted(buckets.items()):
        listed.sort(key=lambda item: item[0])
        columns = [[key[0] for key, _, _ in listed], [key[1] for key, _, _ in listed], [wake for _, wake, _ in listed]]
        texts = np.empty(len(listed), dtype=object)
        texts[:] = [json.dumps(value, separators=(",", ":")) for _, _, value in listed]
        store.put(f"keys:{name}:{number}", encode_page([*(np.array(each, dtype=np.int64) for each in columns), texts]))
        records.append([number, min(wake for _, wake, _ in listed), rows * len(listed)])
    return records


def write_as_before_runs(state: ShardState, store: Any) -> None:
    """Writes a saved state as the releases did whose tables were buckets and whose manifest held the resets."""
    manifest = json.loads(decode_text(store.get(MANIFEST), MANIFEST))
    del manifest["has_suppressed"]
    suppressed = []
    for name, table in state.tables.items():
        items = list(table.items())
        for page in table_pages(table):
            store.remove(page)
        notes = manifest["tables"].pop(name)[0]
        if name.startswith("raised:"):
            rule_id, *group_by = json.loads(name.removeprefix("raised:"))
            suppressed += [[rule_id, *key, raised_at, group_by] for key, _, raised_at in items]
        elif name.startswith("resets:"):
            resets = [[*key, segment] for key, _, segment in items]
            manifest["features"][name.removeprefix("resets:")][4] = resets
        else:
            # The keys with open windows were kept for each presence feature.
            windowed = [rule for _, rule in state.book.in_force() if rule.presence is not None]
            former = {rule.presence.feature_id for rule in windowed if rule.open_keys == name}
            for each in former or {name}:
                manifest["tables"][each] = [notes, write_buckets(store, each, items)]
    store.put("suppressed", encode_text(json.dumps(suppressed)))
    store.put(MANIFEST, encode_text(json.dumps(manifest)))

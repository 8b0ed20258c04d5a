"""Remembers events that came too late for features with buckets.

A bucket does not record which events it contains, and deleting these events must not change it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from lookback.core.state.featurestate import FeatureState
from lookback.core.state.keyruns import Key
from lookback.core.state.tables import KeyedTables
from lookback.core.values.columns import Values
from lookback.core.values.keys import Int64s, Keys
from lookback.core.values.windows import align_down

# Name prefix of a feature's keyed table of discarded events.
_DISCARDED = "discarded:"


class DiscardedRows:
    """The rows of events that came too late, kept until their buckets are gone."""

    def __init__(self, tables: KeyedTables) -> None:
        self._tables = tables

    def add(self, feature_id: str, feature: FeatureState, keys: Keys, times: Int64s, values: Values | None) -> None:
        """Remembers rows of a feature with buckets."""
        table = self._tables.open(f"{_DISCARDED}{feature_id}")
        assert feature.buckets is not None
        resolution = feature.buckets.resolution
        for key, time, value in _list_rows(keys, times, values):
            wake = align_down(time, resolution) + resolution + feature.width
            table.put(key, [*(table.get(key) or ()), [time, value]], max(wake, table.find_wake(key)))

    def take(self, feature_id: str, keys: Keys, times: Int64s, values: Values | None) -> Int64s:
        """Forgets the rows that were discarded, and returns the positions of the remaining ones."""
        table, left = self._tables.get(f"{_DISCARDED}{feature_id}"), []
        if table is None:
            return np.arange(len(times))
        for at, (key, time, value) in enumerate(_list_rows(keys, times, values)):
            discarded = list(table.get(key) or ())
            if [time, value] in discarded:
                discarded.remove([time, value])
                table.put(key, discarded or None, table.find_wake(key))
            else:
                left.append(at)
        return np.array(left, dtype=np.int64)

    def drop(self, feature_id: str) -> None:
        """Forgets the rows of a feature."""
        self._tables.drop(f"{_DISCARDED}{feature_id}")


def _list_rows(keys: Keys, times: Int64s, values: Values | None) -> Iterator[tuple[Key, int, Any]]:
    """Yields the key, the time and the value of each row."""
    listed = [None] * len(times) if values is None else values.tolist()
    return zip(keys.list_pairs(), times.tolist(), listed, strict=True)

"""Writes and reads the parts of the manifest, the page that lists everything else a shard keeps.

Every batch rewrites the manifest, so its JSON is compact: lists, with fields by position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lookback.core.aggregation.runs import Buckets
from lookback.core.aggregation.sharedruns import Place
from lookback.core.state.featurestate import FeatureState
from lookback.core.state.pieces import require_integers
from lookback.core.state.storedruns import StoredRun
from lookback.core.state.windowrows import WindowRows


def write_features(features: Mapping[str, FeatureState]) -> dict[str, list[Any]]:
    """Returns each feature as a list: floor, since, width, runs and, if it has buckets, how it combines rows."""
    written = {}
    for feature_id, feature in features.items():
        fields: list[Any] = [feature.floor, feature.since, feature.width, [stored.to_json() for stored in feature.runs]]
        if feature.buckets is not None:
            fields += [feature.closed, feature.buckets.resolution, feature.buckets.lag, feature.buckets.function]
        written[feature_id] = fields
    return written


def write_row_sets(row_sets: Mapping[str, Sequence[StoredRun]]) -> dict[str, list[Any]]:
    """Returns each row set as a list: the ids of its features, and its runs, each with the places of its features.

    A place has four integers: the position of its feature among the ids, and the three of its `sharedruns.Place`.
    """
    written = {}
    for name, runs in row_sets.items():
        numbers: dict[str, int] = {}
        listed = []
        for stored in runs:
            places: list[int] = []
            for feature_id, place in (stored.places or {}).items():
                places += (numbers.setdefault(feature_id, len(numbers)), *place)
            listed.append([stored.has_dropped, places, *stored.to_json()])
        if listed:
            written[name] = [list(numbers), listed]
    return written


def read_rows(rows: WindowRows, features: Mapping[str, Any], row_sets: Mapping[str, Any]) -> None:
    """Reads what `write_features` and `write_row_sets` returned. Raises ValueError, TypeError or LookupError."""
    rows.features.clear()
    rows.row_sets.runs = {}
    for feature_id, (floor, since, width, runs, *combining) in features.items():
        rows.features[feature_id] = FeatureState(floor, since, width, [StoredRun(*run) for run in runs])
        if combining:
            rows.features[feature_id].closed, *how = combining
            rows.features[feature_id].buckets = Buckets(*how)
    for name, (feature_ids, runs) in row_sets.items():
        rows.row_sets.runs[name] = []
        for has_dropped, numbers, *facts in runs:
            require_integers(numbers)
            if len(numbers) % 4 or not all(0 <= number < len(feature_ids) for number in numbers[::4]):
                raise ValueError("the places of features must be groups of four integers, the first a known feature")
            places = {feature_ids[numbers[at]]: Place(*numbers[at + 1 : at + 4]) for at in range(0, len(numbers), 4)}
            stored = StoredRun(*facts)
            stored.places, stored.has_dropped = places, has_dropped
            rows.row_sets.runs[name].append(stored)
        for feature_id in feature_ids:
            rows.features[feature_id].row_set = name

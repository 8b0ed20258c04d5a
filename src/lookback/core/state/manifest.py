"""Names the fields of the manifest, the page that lists everything else a shard keeps.

Its JSON holds lists by position, since a batch writes it anew and its bytes count; positions are read and written here and
nowhere else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from lookback.core.values.times import NEVER_DUE

# In place of the wake of a page: the run has no such page. Above every wake.
ABSENT = 2**63 - 1


class RunRecord(NamedTuple):
    """A stored run; see `shard.StoredRun` for its fields. due: left out of the JSON where it is NEVER_DUE."""

    run_id: str
    segment: int
    rows: int
    first_time: int
    middle_time: int
    last_time: int
    due: int = NEVER_DUE

    def to_json(self) -> list[Any]:
        """Returns the fields in order."""
        return list(self[:-1] if self.due == NEVER_DUE else self)


class SharedRunRecord(NamedTuple):
    """A stored run of many features; see `shard.StoredRun`.

    places: four figures of each feature: its number in the list of its row set's features, and those of its
    `sharedruns.Place`. has_dropped: whether the page has features that were dropped.
    """

    run_id: str
    segment: int
    rows: int
    first_time: int
    middle_time: int
    last_time: int
    due: int
    has_dropped: bool
    places: list[int]


class RowSetRecord(NamedTuple):
    """The rows that many features of a grouping share. features: their ids."""

    features: list[str]
    runs: list[SharedRunRecord]

    @classmethod
    def from_json(cls, row: Iterable[Any]) -> RowSetRecord:
        """Reads the record from its JSON. Raises ValueError if a figure cannot be."""
        features, runs = row
        records = [SharedRunRecord(*run) for run in runs]
        for record in records:
            places = record.places
            if len(places) % 4 or not all(type(each) is int for each in places):
                raise ValueError("the places of features are groups of four integers")
            if not all(0 <= number < len(features) for number in places[::4]):
                raise ValueError("a row set has no such feature")
        return cls([str(name) for name in features], records)


class CombiningRecord(NamedTuple):
    """The record of a feature that combines rows. closed: rows before it may be combined; the others are the fields of `runs.Buckets`."""

    closed: int
    resolution: int
    lag: int
    function: str


class FeatureRecord(NamedTuple):
    """The state of a feature; see `shard.FeatureState`. combining: only of a feature with buckets."""

    floor: int | None
    since: int | None
    width: int
    runs: list[RunRecord]
    combining: CombiningRecord | None = None

    def to_json(self) -> list[Any]:
        """Returns the fields in order, those of `combining` at the end."""
        runs = [run.to_json() for run in self.runs]
        return [self.floor, self.since, self.width, runs, *(self.combining or ())]

    @classmethod
    def from_json(cls, row: Iterable[Any]) -> FeatureRecord:
        """Reads what `to_json` wrote."""
        floor, since, width, runs, *combining = row
        return cls(
            floor,
            since,
            width,
            [RunRecord(*run) for run in runs],
            CombiningRecord(*combining) if combining else None,
        )


class KeyRunRecord(NamedTuple):
    """A run of a keyed table; see `keyruns.KeyRun` for its fields.

    wakes: that of each page, ABSENT for one that has no keys; empty where they have a page of their own.
    """

    number: int
    depth: int
    keys: int
    rows: int
    swept: int
    horizon: int
    last_wake: int
    sources: int
    parts_done: int
    wakes: list[int]

    @classmethod
    def from_json(cls, row: Iterable[Any]) -> KeyRunRecord:
        """Reads the record from its JSON. Raises ValueError if a figure cannot be."""
        record = cls(*row)
        *figures, wakes = record
        if not all(type(each) is int and -ABSENT <= each <= ABSENT for each in (*figures, *wakes)):
            raise ValueError("a figure of a run of keys is no integer of 64 bits")
        if not 0 <= record.depth <= 16 or record.sources < 0 or (wakes and len(wakes) != 2**record.depth):
            raise ValueError("the figures of a run of keys contradict each other")
        return record


class TableRecord(NamedTuple):
    """A keyed table. notes: what the table keeps beside its keys; runs: oldest first; made: how many runs it ever had."""

    notes: dict[str, Any]
    made: int
    runs: list[KeyRunRecord]

    @classmethod
    def from_json(cls, row: Iterable[Any]) -> TableRecord:
        """Reads the record from its JSON. Raises ValueError if a field cannot be."""
        notes, made, runs = row
        if not isinstance(notes, dict) or type(made) is not int:
            raise ValueError("a keyed table has notes and a number of runs")
        return cls(notes, made, [KeyRunRecord.from_json(run) for run in runs])


class DeferredRecord(NamedTuple):
    """The pages of events that a version which is warming has still to judge; see `deferred.Deferred`."""

    pages: int
    events: int

    @classmethod
    def from_json(cls, row: Iterable[Any]) -> DeferredRecord:
        """Reads the record from its JSON. Raises ValueError if a figure cannot be."""
        record = cls(*row)
        if not all(type(each) is int and each >= 0 for each in record):
            raise ValueError("the figures of deferred events are whole numbers")
        return record


@dataclass(frozen=True)
class Manifest:
    """Everything that a shard keeps outside of other pages; see `shard.ShardState` for the fields.

    pieces: the number of pieces of each page that has any, by the page's name.
    """

    high: int | None
    advanced: int | None
    last_commit: int | None
    segments: int
    origin: str
    saves: int
    timer: int | None
    features: dict[str, FeatureRecord]
    tables: dict[str, TableRecord]
    pieces: dict[str, int]
    row_sets: dict[str, RowSetRecord]
    declared: str
    lists_commit: int | None
    deferred: dict[str, DeferredRecord]

    def to_json(self) -> str:
        """Returns the manifest as JSON."""
        features = {feature_id: record.to_json() for feature_id, record in self.features.items()}
        return json.dumps({**vars(self), "features": features}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Reads what `to_json` wrote. Raises ValueError, TypeError or LookupError if damaged."""
        document = json.loads(text)
        return cls(
            high=document["high"],
            advanced=document["advanced"],
            last_commit=document["last_commit"],
            segments=document["segments"],
            origin=document["origin"],
            saves=document["saves"],
            timer=document["timer"],
            features={name: FeatureRecord.from_json(row) for name, row in document["features"].items()},
            tables={name: TableRecord.from_json(row) for name, row in document["tables"].items()},
            pieces={str(name): int(count) for name, count in document["pieces"].items()},
            row_sets={name: RowSetRecord.from_json(row) for name, row in document["row_sets"].items()},
            declared=str(document["declared"]),
            lists_commit=_read_commit(document["lists_commit"]),
            deferred={name: DeferredRecord.from_json(row) for name, row in document["deferred"].items()},
        )


def _read_commit(value: Any) -> int | None:
    """Reads the number of a commit, None for none. Raises ValueError for anything else."""
    if value is not None and type(value) is not int:
        raise ValueError("the commit of lists is no integer")
    return value

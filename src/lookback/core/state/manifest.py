"""Defines the records of the manifest, the page that lists everything else a shard keeps.

Every batch rewrites the manifest, so its JSON is compact: records are lists, with fields by position. Only this module
knows the positions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from lookback.core.values.times import NEVER_DUE

# Stands in for the wake of a page that the run does not have; above every wake.
ABSENT = 2**63 - 1


class RunRecord(NamedTuple):
    """A stored run; see `shard.StoredRun` for its fields. The JSON omits `due` if it is NEVER_DUE."""

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
    """A stored run that features share; see `shard.StoredRun`.

    `places` has four integers for each feature: its position in `RowSetRecord.features`, and the three of its
    `sharedruns.Place`.
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
    """The rows that features of one grouping share. `features` lists their ids."""

    features: list[str]
    runs: list[SharedRunRecord]

    @classmethod
    def from_json(cls, row: Iterable[Any]) -> RowSetRecord:
        """Reads the record from its JSON. Raises ValueError for an invalid number."""
        features, runs = row
        records = [SharedRunRecord(*run) for run in runs]
        for record in records:
            places = record.places
            if len(places) % 4 or not all(type(each) is int for each in places):
                raise ValueError("the places of features must be groups of four integers")
            if not all(0 <= number < len(features) for number in places[::4]):
                raise ValueError("a row set refers to an unknown feature")
        return cls([str(name) for name in features], records)


class CombiningRecord(NamedTuple):
    """How a feature combines its rows. Rows before `closed` may be combined; see `runs.Buckets` for the rest."""

    closed: int
    resolution: int
    lag: int
    function: str


class FeatureRecord(NamedTuple):
    """The state of a feature; see `shard.FeatureState`. Only features with buckets have `combining`."""

    floor: int | None
    since: int | None
    width: int
    runs: list[RunRecord]
    combining: CombiningRecord | None = None

    def to_json(self) -> list[Any]:
        """Returns the fields in order, with those of `combining` at the end."""
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

    `wakes` has the wake of each page, ABSENT for a page without keys. It is empty if the wakes are in their own page.
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
        """Reads the record from its JSON. Raises ValueError for an invalid number."""
        record = cls(*row)
        *figures, wakes = record
        if not all(type(each) is int and -ABSENT <= each <= ABSENT for each in (*figures, *wakes)):
            raise ValueError("a number in a run of keys is not a 64-bit integer")
        if not 0 <= record.depth <= 16 or record.sources < 0 or (wakes and len(wakes) != 2**record.depth):
            raise ValueError("the numbers in a run of keys contradict each other")
        return record


class TableRecord(NamedTuple):
    """A keyed table.

    Attributes:
        notes: Values that belong to the table as a whole.
        made: The number of runs made so far.
        runs: Oldest first.
    """

    notes: dict[str, Any]
    made: int
    runs: list[KeyRunRecord]

    @classmethod
    def from_json(cls, row: Iterable[Any]) -> TableRecord:
        """Reads the record from its JSON. Raises ValueError for an invalid field."""
        notes, made, runs = row
        if not isinstance(notes, dict) or type(made) is not int:
            raise ValueError("a keyed table must have notes and a number of runs")
        return cls(notes, made, [KeyRunRecord.from_json(run) for run in runs])


class DeferredRecord(NamedTuple):
    """The number of pages and events that a warming version has yet to judge; see `deferred.Deferred`."""

    pages: int
    events: int

    @classmethod
    def from_json(cls, row: Iterable[Any]) -> DeferredRecord:
        """Reads the record from its JSON. Raises ValueError for an invalid number."""
        record = cls(*row)
        if not all(type(each) is int and each >= 0 for each in record):
            raise ValueError("the numbers of deferred pages and events must be whole numbers")
        return record


@dataclass(frozen=True)
class Manifest:
    """Everything that a shard keeps outside of other pages; see `shard.ShardState` for the fields.

    `pieces` has the number of pieces of each page that has pieces, by page name.
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
        """Reads what `to_json` wrote. Raises ValueError, TypeError or LookupError if it is damaged."""
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
    """Reads a commit number or None. Raises ValueError for anything else."""
    if value is not None and type(value) is not int:
        raise ValueError("the commit of lists is not an integer")
    return value

"""Names the fields of the manifest, the page that lists everything else a shard keeps.

Its JSON holds lists by position, since a batch writes it anew and its bytes count; positions are read and written here and
nowhere else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lookback.core.values.times import NEVER_DUE

# In place of the wake of a page: the run has no such page. Above every wake.
ABSENT = 2**63 - 1
# Earlier releases kept the keys of a table in so many pages.
_BUCKETS = 256


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


class ResetRecord(NamedTuple):
    """A reset as earlier releases kept it: the segment in which an alert emptied the windows of a key. low, high: the halves of the key."""

    low: int
    high: int
    segment: int


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
    resets: list[ResetRecord]
    combining: CombiningRecord | None = None

    def to_json(self) -> list[Any]:
        """Returns the fields in order, those of `combining` at the end."""
        runs = [run.to_json() for run in self.runs]
        return [self.floor, self.since, self.width, runs, self.resets, *(self.combining or ())]

    @classmethod
    def from_json(cls, row: Iterable[Any]) -> FeatureRecord:
        """Reads what `to_json` wrote."""
        floor, since, width, runs, resets, *combining = row
        return cls(
            floor,
            since,
            width,
            [RunRecord(*run) for run in runs],
            [ResetRecord(*reset) for reset in resets],
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

    @classmethod
    def from_buckets(cls, buckets: Iterable[Iterable[int]]) -> KeyRunRecord:
        """Returns the run of the buckets that an earlier release wrote: (number, wake) of each, and its rows if it has them."""
        wakes, rows = [ABSENT] * _BUCKETS, 0
        for bucket in buckets:
            number, wake, *counted = bucket
            wakes[number], rows = wake, rows + sum(counted)
        # How many keys they have shows when they are read.
        return cls.from_json(
            (-1, _BUCKETS.bit_length() - 1, rows, rows, -NEVER_DUE, -NEVER_DUE, NEVER_DUE, 0, 0, wakes)
        )


class TableRecord(NamedTuple):
    """A keyed table. notes: what the table keeps beside its keys; runs: oldest first; made: how many runs it ever had."""

    notes: dict[str, Any]
    made: int
    runs: list[KeyRunRecord]

    @classmethod
    def from_json(cls, row: Iterable[Any]) -> TableRecord:
        """Reads the record from its JSON, or from that of an earlier release."""
        notes, *rest = row
        if len(rest) == 1:
            (buckets,) = rest
            return cls(notes, 0, [KeyRunRecord.from_buckets(buckets)] if buckets else [])
        made, runs = rest
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


class SuppressedRecord(NamedTuple):
    """The time of a key's last raised alert, in microseconds, as earlier releases kept it in a page of its own.

    group_by: the fields of the key; None as release 0.1.0 wrote it.
    """

    rule_id: str
    low: int
    high: int
    alerted_at: int
    group_by: list[str] | None = None


@dataclass(frozen=True)
class Manifest:
    """Everything that a shard keeps outside of other pages; see `shard.ShardState` for the fields.

    pieces: the number of pieces of each page that has any, by the page's name. has_suppressed: whether there is a page of
    suppressed keys, as earlier releases wrote it. lists_commit, deferred: left out of the JSON while there is none.
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
    has_suppressed: bool
    row_sets: dict[str, RowSetRecord]
    declared: str = ""
    lists_commit: int | None = None
    deferred: dict[str, DeferredRecord] = field(default_factory=dict)

    def to_json(self) -> str:
        """Returns the manifest as JSON."""
        document = {
            "high": self.high, "advanced": self.advanced, "last_commit": self.last_commit, "segments": self.segments,
            "origin": self.origin, "saves": self.saves, "timer": self.timer,
            "features": {feature_id: record.to_json() for feature_id, record in self.features.items()},
            "tables": self.tables, "has_suppressed": self.has_suppressed,
            **({"pieces": self.pieces} if self.pieces else {}),
            **({"row_sets": self.row_sets} if self.row_sets else {}),
            **({"declared": self.declared} if self.declared else {}),
            **({} if self.lists_commit is None else {"lists_commit": self.lists_commit}),
            **({"deferred": self.deferred} if self.deferred else {}),
        }  # fmt: skip
        return json.dumps(document, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Reads what `to_json` wrote, or an earlier release. Raises ValueError, TypeError or LookupError if damaged."""
        document = json.loads(text)
        return cls(
            high=document["high"],
            advanced=document["advanced"],
            last_commit=document["last_commit"],
            # Release 0.1.0 calls them so. It refuses a manifest without them, whose shared rows it would not see.
            segments=document["segments"] if "segments" in document else document["stretches"],
            origin=document["origin"],
            saves=document["saves"],
            timer=document["timer"],
            features={name: FeatureRecord.from_json(row) for name, row in document["features"].items()},
            tables={name: TableRecord.from_json(row) for name, row in document["tables"].items()},
            has_suppressed=bool(document.get("has_suppressed", True)),
            row_sets={name: RowSetRecord.from_json(row) for name, row in document.get("row_sets", {}).items()},
            pieces={str(name): int(count) for name, count in document.get("pieces", {}).items()},
            declared=str(document.get("declared", "")),
            lists_commit=_read_commit(document.get("lists_commit")),
            deferred={name: DeferredRecord.from_json(row) for name, row in document.get("deferred", {}).items()},
        )


def _read_commit(value: Any) -> int | None:
    """Reads the number of a commit, None for none. Raises ValueError for anything else."""
    if value is not None and type(value) is not int:
        raise ValueError("the commit of lists is no integer")
    return value

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


class ResetRecord(NamedTuple):
    """The segment in which an alert emptied the windows of a key. low, high: the halves of the key."""

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


class BucketRecord(NamedTuple):
    """A page of a keyed table. wake: the earliest of its keys; rows: earlier releases did not count them."""

    number: int
    wake: int
    rows: int = 0


class TableRecord(NamedTuple):
    """A keyed table. notes: what the table keeps beside its keys."""

    notes: dict[str, Any]
    buckets: list[BucketRecord]

    @classmethod
    def from_json(cls, row: Iterable[Any]) -> TableRecord:
        """Reads the record from its JSON."""
        notes, buckets = row
        return cls(notes, [BucketRecord(*bucket) for bucket in buckets])


class SuppressedRecord(NamedTuple):
    """The time of a key's last raised alert, in microseconds, for `suppress`. It has a page of its own.

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

    def to_json(self) -> str:
        """Returns the manifest as JSON."""
        document = {
            "high": self.high, "advanced": self.advanced, "last_commit": self.last_commit, "stretches": self.segments,
            "origin": self.origin, "saves": self.saves, "timer": self.timer,
            "features": {feature_id: record.to_json() for feature_id, record in self.features.items()},
            "tables": self.tables,
            **({"pieces": self.pieces} if self.pieces else {}),
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
            segments=document["stretches"],
            origin=document["origin"],
            saves=document["saves"],
            timer=document["timer"],
            features={name: FeatureRecord.from_json(row) for name, row in document["features"].items()},
            tables={name: TableRecord.from_json(row) for name, row in document["tables"].items()},
            pieces={str(name): int(count) for name, count in document.get("pieces", {}).items()},
        )

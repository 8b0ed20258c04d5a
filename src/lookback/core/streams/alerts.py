"""What the engine says: alerts, late events and log rows, and the identity of an alert."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
_LOWEST = dt.datetime.min.replace(tzinfo=dt.timezone.utc)
_HIGHEST = dt.datetime.max.replace(tzinfo=dt.timezone.utc)
# Rows of one commit: those of its events come before those that the watermark brings after it.
BY_EVENT, BY_WATERMARK = 0, 1
_CANONICAL = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode


@dataclass(frozen=True)
class Alert:
    """A row of the alerts table. measures: typed values by name; times are aware UTC; decided_at is the shell's."""

    alert_id: str
    revision: int
    verdict: str
    rule_id: str
    rule_version: int
    mode: str
    severity: str
    stream: str
    key: Mapping[str, str | None]
    event_id: str | None
    event_time: dt.datetime
    window_start: dt.datetime
    window_end: dt.datetime
    window_complete: bool
    measures: Mapping[str, Any]
    message: str
    evidence: Sequence[str]
    arrival: int
    decided_at: dt.datetime | None = None


class Place(NamedTuple):
    """Where a row stands among all alerts of a stream; places compare as the rows are ordered.

    First by the commit that brought the row. Within a commit, rows that its events bring come first, in order of arrival
    of these events: by event time, then by event id. Then come the rows that the watermark brings after the commit, by
    the watermark that each of them waited for. Rows that one event or one watermark brings are ordered by rule_id, then
    by key, then as their rule writes them (retractions first, then windows and revised events from the oldest on).
    Nothing of that depends on how commits are cut into batches, or keys into shards.

    time: microseconds, of the event or the watermark. event_id: as `sortable_id` writes it, empty for a watermark.
    key: the texts of the key as JSON. rank: among the rows that agree in all else.
    """

    arrival: int
    phase: int
    time: int
    event_id: str
    rule_id: str
    key: str
    rank: int


@dataclass(frozen=True)
class LateEvent:
    """A row of late_events. late_by_us: watermark less event time; action: evaluated, recorded or discarded."""

    stream: str
    event_id: str
    event_time: dt.datetime
    arrival: int
    late_by_us: int
    action: str


@dataclass(frozen=True)
class Failure:
    """Errors of one rule in one batch: how many, and the id of the first event in order of arrival."""

    rule_id: str
    version: int
    count: int
    first_event_id: str
    first_arrival: tuple[int, int]
    reason: str = field(compare=False, default="")


def alert_id(rule_id: str, version: int, key: Mapping[str, str | None], subject: str | int) -> str:
    """The first 128 bits, as 32 hex digits, of SHA-256 over canonical JSON [rule_id, version, key, subject].

    subject: the event id as text, or a window's start in microseconds. The key's names are sorted; no spaces; UTF-8.
    """
    text = _CANONICAL([rule_id, version, dict(key), subject])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def sortable_id(event_id: int | str) -> str:
    """An event id as a text that sorts as ids of its type do: integers by value, strings by code point."""
    return f"{event_id + 2**63:020d}" if isinstance(event_id, int) else event_id


def moment(microseconds: int) -> dt.datetime:
    """The aware UTC time so many `microseconds` after 1970; beyond the years 1 to 9999 the nearest that can be written."""
    try:
        return _EPOCH + dt.timedelta(microseconds=int(microseconds))
    except OverflowError:
        return _LOWEST if microseconds < 0 else _HIGHEST

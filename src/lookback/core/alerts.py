"""What the engine says: alerts, late events and log rows, and the identity of an alert."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
_LOWEST = dt.datetime.min.replace(tzinfo=dt.timezone.utc)
_HIGHEST = dt.datetime.max.replace(tzinfo=dt.timezone.utc)
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


def moment(microseconds: int) -> dt.datetime:
    """The aware UTC time so many `microseconds` after 1970; beyond the years 1 to 9999 the nearest that can be written."""
    try:
        return _EPOCH + dt.timedelta(microseconds=int(microseconds))
    except OverflowError:
        return _LOWEST if microseconds < 0 else _HIGHEST

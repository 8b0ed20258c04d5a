"""The rows that the engine writes: alerts, late events and failures. Also alert ids and the order of alerts.

The stream `alerts` lets rules read alerts: a row that opens or retracts an alert is an event of that stream, one for
each entity of the alert. `FIELDS` lists the fields of these events.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from lookback.core.values.types import DataType, parse_type

# The name of the table and of the stream that reads it.
TABLE = "alerts"
CHANGE_ID, DECIDED_AT = "change_id", "decided_at"
# Field of an event of that stream -> type. score: the score of the rule, negative if the row retracts the alert.
FIELDS: Mapping[str, DataType] = {
    name: parse_type(type_)
    for name, type_ in {
        CHANGE_ID: "string",
        DECIDED_AT: "timestamp",
        "alert_id": "string",
        "verdict": "string",
        "rule_id": "string",
        "rule_version": "bigint",
        "stream": "string",
        "severity": "string",
        "mode": "string",
        "entity": "string",
        "entity_id": "string",
        "score": "bigint",
        "tags": "array<string>",
    }.items()
}
# A privacy request replaces values in measures and texts with this, in rows that are kept.
REMOVED = "[removed by a privacy request]"
# The effect of a row on its alert: opens it, leaves it open, retracts it.
BEGINS, GOES_ON, CEASES = 1, 0, -1
# The dispositions of a review -> whether the alert's events count as positive; None: neither positive nor negative.
DISPOSITIONS: Mapping[str, bool | None] = {"confirmed": True, "false_positive": False, "benign": False, "unclear": None}
# The actions of a shard on a late event -> their strength. The strongest action of all shards is reported.
ACTION_STRENGTHS = {"discarded": 0, "recorded": 1, "evaluated": 2}
# The maximum number of event ids in the evidence of a sequence's alert.
MAX_EVIDENCE_IDS = 100
# Within a commit, alerts that events triggered come before alerts that its watermark triggered.
BY_EVENT, BY_WATERMARK = 0, 1
_TO_JSON = json.JSONEncoder(ensure_ascii=False).encode
_CANONICAL = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode


@dataclass
class Alert:
    """A row of the alerts table. measures: typed values by name; times are aware UTC; decided_at: set when written.

    entities: whom the alert is about: fields of its key or its event, and their values as text.
    score: the score of the rule. change: BEGINS, GOES_ON or CEASES; a suppressed alert is open, like a raised one.
    queue: False for a report, which is not queued for review. tags: those of the rule.

    The class is not frozen because creating a frozen instance takes five times as long.
    """

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
    entities: Mapping[str, str | None] = field(default_factory=dict)
    score: int = 0
    change: int = BEGINS
    queue: bool = True
    tags: Sequence[str] = ()
    decided_at: dt.datetime | None = None


class AlertOrder(NamedTuple):
    """The sort key of a row among all alerts of a stream.

    Rows are sorted by the commit that triggered them. Within a commit, the rows that its events triggered come first,
    in the events' order of arrival. The rows that the watermark after the commit triggered follow, sorted by the
    watermark that each was waiting for. Rows of one event or one watermark are sorted by rule_id, version and key, then
    in the order in which their rule writes them: retractions, then windows and revised events, oldest first.
    The order does not depend on how commits are divided into batches, or keys into shards.

    time: microseconds, of the event or the watermark. event: as `Events.sort_text` writes it; empty for a watermark.
    key: the texts of the key as JSON. rank: the position among rows that are equal in all other fields.
    """

    arrival: int
    phase: int
    time: int
    event: str
    rule_id: str
    version: int
    key: str
    rank: int


@dataclass(frozen=True)
class LateEvent:
    """A row of late_events. late_by_us: watermark minus event time; action: evaluated, recorded or discarded."""

    stream: str
    event_id: str
    event_time: dt.datetime
    arrival: int
    late_by_us: int
    action: str


@dataclass(frozen=True)
class Failure:
    """The errors of one rule in one batch: their number, and the first failing event in order of arrival.

    first_arrival: commit, time and `Events.sort_text` of that event. mode: the status of the version.
    """

    rule_id: str
    version: int
    count: int
    first_event_id: str
    first_arrival: tuple[int, int, str]
    reason: str = field(compare=False, default="")
    mode: str = field(compare=False, default="active")


def compute_alert_id(rule_id: str, version: int, key: Mapping[str, str | None], subject: str | int) -> str:
    """Computes an alert's id: the first 32 hex digits of SHA-256 over the canonical JSON [rule_id, version, key, subject].

    subject: the event id as text, or a window's start in microseconds. Canonical JSON has sorted names and no spaces,
    and is encoded as UTF-8.
    """
    return complete_alert_id(encode_key(rule_id, version, tuple(key.items())).id_begin, subject)


def complete_alert_id(begin: str, subject: str | int) -> str:
    """Computes an alert's id. begin: the key's `EncodedKey.id_begin`; subject: as in `compute_alert_id`."""
    text = f"{begin}{_CANONICAL(subject) if isinstance(subject, str) else subject}]"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class EncodedKey(NamedTuple):
    """The encodings that all alerts of a key share: the text that ids hash, up to the subject, and the sort text."""

    id_begin: str
    sort_text: str


@lru_cache(maxsize=4096)
def encode_key(rule_id: str, version: int, key: tuple[tuple[str, str | None], ...]) -> EncodedKey:
    """Encodes the names and texts of a key for the alerts of a rule version."""
    begin = _CANONICAL([rule_id, version, dict(key)])[:-1] + ","
    return EncodedKey(begin, _TO_JSON([text for _, text in key]))


def sortable_id(event_id: int | str) -> str:
    """Formats an event id as a text that sorts like the ids of its type: integers by value, strings by code point."""
    return str(event_id + 2**63).zfill(20) if isinstance(event_id, int) else event_id

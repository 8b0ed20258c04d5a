"""Reads the alerts of a review desk from the tables, and writes the decisions on them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lookback.core.streams.alerts import DISPOSITIONS
from lookback.core.values.columns import to_text
from lookback.desk.queue import QueuedAlert, SessionStep
from lookback.spark.explaining.explanations import Explainer
from lookback.spark.review import (
    RecordedReviews,
    Review,
    SeenAlert,
    decisions,
    note_on_older,
    open_queue,
    read_alerts_like,
    read_last_row,
    read_reviews_of,
    record_reviews,
    withdraw_reviews,
)
from lookback.spark.snoozes import Snooze, read_end, read_snoozes, snooze
from lookback.spark.tables.answers import compute_at_once
from lookback.views.display import draw_png, read_title
from lookback.views.explanations import describe_alert
from lookback.views.timeline import plot_key_timeline

if TYPE_CHECKING:
    import pandas as pd

    from lookback.core.explaining.evidence import Explanation
    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables

# The maximum number of alerts in memory: the highest severities first, and of each the newest first.
MAX_QUEUED = 20_000
_MAX_EVENTS = 50
_COLUMNS: tuple[str, ...] = ("alert_id", "revision", "severity", "event_time", "decided_at", "rule_id", "rule_version")
_COLUMNS += ("stream", "key", "measures", "message", "tags", "score")


@dataclass(frozen=True)
class QueueReading:
    """The open alerts as of a moment, including snoozed ones.

    `is_cut` is true if there are more than fit in memory; `note` is about older alerts.
    """

    alerts: Sequence[QueuedAlert]
    read_at: dt.datetime
    is_cut: bool = False
    note: str = ""


@dataclass(frozen=True)
class ListedEvent:
    """An event behind an alert: why it counts, such as `counted for total`, and its fields as exact texts by name."""

    reason: str
    fields: Mapping[str, str | None]


@dataclass(frozen=True)
class OpenedAlert:
    """An explained alert: its row in the table `alerts`, the explanation in words (lines), and its picture.

    `picture` is a PNG and `picture_words` describe it. `events` are those that counted, newest first.
    """

    alert: QueuedAlert
    row: Mapping[str, Any]
    lines: Sequence[str]
    picture: bytes
    picture_words: str
    events: Sequence[ListedEvent]


class AlertRecords:
    """The alerts of one place for a desk: reads and explains open alerts, and records decisions."""

    def __init__(
        self,
        tables: Tables,
        streams: Mapping[str, Stream],
        *,
        stream: str | None = None,
        rule_id: str | None = None,
        days: float = 90,
        reviewer: str | None = None,
    ) -> None:
        """Selects alerts as `open_queue` does. `reviewer` defaults to the current user."""
        self._tables, self._streams = tables.holding(*streams.values()), streams
        self._stream, self._rule_id, self._days = stream, rule_id, days
        self._explainer = Explainer(tables, streams)
        self.reviewer = reviewer or tables.current_user

    def read_queue(self) -> QueueReading:
        """Reads the open alerts with their snoozes."""
        # If the tables are folders, this takes a quarter of Spark's time.
        return compute_at_once(
            lambda them: self._read_queue(them.holding(*self._streams.values())),
            self._tables.root,
            lambda: self._tables,
        )

    def _read_queue(self, tables: Tables) -> QueueReading:
        now = dt.datetime.now(dt.timezone.utc)
        queue = open_queue(tables, self._rule_id, self._stream, self._days, with_snoozed=True)
        rows = queue.select(*_COLUMNS).limit(MAX_QUEUED + 1).toArrow().to_pylist()
        active = [each for each in read_snoozes(tables, ended_after=now) if each.since <= now]
        alerts = [make_queued(row, active) for row in rows[:MAX_QUEUED]]
        return QueueReading(alerts, now, len(rows) > MAX_QUEUED, note_on_older(tables, self._days))

    def open(self, alert: QueuedAlert) -> OpenedAlert:
        """Explains the revision of an alert that the queue shows, and draws its picture."""
        row = self._explainer.read_row(alert.alert_id, alert.revision, alert.decided_at)
        explanation = self._explainer.explain(row)
        figure = plot_key_timeline(explanation)
        events = list(list_events(explanation, self._streams[alert.stream]))
        return OpenedAlert(alert, row, list(describe_alert(explanation)), draw_png(figure), read_title(figure), events)

    def find_last(self, alert_id: str) -> QueuedAlert:
        """Finds the last revision of an alert, of any verdict."""
        return make_queued(read_last_row(self._tables, alert_id))

    def read_like(self, opened: OpenedAlert) -> list[dict[str, Any]]:
        """Reads the other alerts of its entity with their reviews; see `read_alerts_like`."""
        return read_alerts_like(self._tables, opened.row, self._days)

    def count_decisions(self) -> dict[str, dict[str, int]]:
        """Counts the decided alerts of each rule by disposition."""
        counts: dict[str, dict[str, int]] = {}
        for row in decisions(self._tables).collect():
            own = counts.setdefault(row["rule_id"], {})
            own[row["disposition"]] = own.get(row["disposition"], 0) + row["alerts"]
        return counts

    def decide(self, seen: Sequence[SeenAlert], disposition: str, note: str) -> RecordedReviews:
        """Records one decision on alerts as you saw them; see `record_reviews`."""
        return record_reviews(self._tables, seen, disposition, self.reviewer, note)

    def undo(self, step: SessionStep) -> dict[str, list[Review]]:
        """Withdraws a decision of this session. Returns the reviews of its alerts by other reviewers."""
        withdraw_reviews(self._tables, step.reviewer, step.reviewed_at)
        return read_reviews_of(self._tables, [each.alert_id for each in step.alerts])

    def snooze(self, alert: QueuedAlert, until: str, reason: str, *, whole_rule: bool = False) -> Snooze:
        """Leaves the alerts of an alert's rule and key, or of the whole rule, out of the queue for a while."""
        key = {name: text for name, text in alert.key.items() if text is not None}
        subject: tuple[Any, ...] = (alert.rule_id, None if whole_rule else key)
        if not whole_rule and len(key) < len(alert.key):
            # A key with NULL in it can only be given by the alert's id.
            subject = (alert.alert_id,)
        end = read_end(until)
        return snooze(self._tables, self._streams, *subject, until=end, reason=reason, author=self.reviewer)


def make_queued(row: Mapping[str, Any], snoozes: Sequence[Snooze] = ()) -> QueuedAlert:
    """Makes an alert of the queue from a row of `alerts` and the active snoozes."""
    maps: dict[str, Any] = {name: dict(row[name] or []) for name in ("key", "measures")}
    values: dict[str, Any] = {name: row[name] for name in _COLUMNS if name not in maps}
    values |= {name: row[name].astimezone(dt.timezone.utc) for name in ("event_time", "decided_at")}
    is_snoozed = any(each.covers({**values, **maps}) for each in snoozes)
    values |= {"message": row["message"] or "", "tags": tuple(row["tags"] or ()), "score": row["score"] or 0}
    values["is_snoozed"] = is_snoozed
    return QueuedAlert(**values, **maps)


def list_events(explanation: Explanation, stream: Stream) -> Iterator[ListedEvent]:
    """Lists the newest events that an alert counted or matched, at most 50 of the main measure or of each step."""
    parts = [
        (each.events, f"counted for {each.name}") for each in explanation.measures if each.name == explanation.main
    ]
    parts += [(each.events, f"step {each.name}") for each in explanation.steps]
    for events, reason in parts:
        for fields in reversed(_list_fields(events.tail(_MAX_EVENTS), stream)):
            yield ListedEvent(reason, fields)


def _list_fields(events: pd.DataFrame, stream: Stream) -> list[dict[str, str | None]]:
    names = [str(name) for name in events.columns]
    integers = {name for name, type_ in stream.fields.items() if type_.is_integer}
    return [
        {name: _write_value(value, is_integer=name in integers) for name, value in zip(names, row, strict=True)}
        for row in events.astype(object).itertuples(index=False, name=None)
    ]


def _write_value(value: Any, *, is_integer: bool) -> str | None:
    """Formats a value of a frame as exact text: pandas turns NULL into NaN, and integers in its column into floats."""
    if value is None or value != value:
        return None
    return to_text(int(value) if is_integer else value)


def describe_decisions(counts: Mapping[str, int]) -> str:
    """Describes how often the alerts of a rule were decided, such as `confirmed 3, false_positive 12: 20% confirmed`."""
    listed = [f"{name} {counts[name]:,}" for name in DISPOSITIONS if counts.get(name)]
    if not listed:
        return "none yet"
    decided = sum(counts.get(name, 0) for name, positive in DISPOSITIONS.items() if positive is not None)
    share = f": {counts.get('confirmed', 0) / decided:.0%} of the clear ones confirmed" if decided else ""
    return ", ".join(listed) + share

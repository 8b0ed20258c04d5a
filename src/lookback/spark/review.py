"""Reviews alerts: lists the queue of open alerts, explains them by their events, and records decisions."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812

from lookback.core.errors import ReviewError
from lookback.core.streams.alerts import DISPOSITIONS
from lookback.core.values.texts import count_noun
from lookback.core.values.times import parse_time, to_utc
from lookback.spark.snoozes import ACTIVE, list_snoozes
from lookback.spark.tables.conflicts import change_table
from lookback.spark.tables.sqltexts import to_timestamp

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from lookback.spark.explaining.explanations import Explainer, explain, explain_event
    from lookback.spark.tables.lakehouse import Tables

__all__ = [
    "Decision",
    "Explainer",
    "OlderAlerts",
    "RecordedReviews",
    "Review",
    "SeenAlert",
    "count_older",
    "decisions",
    "explain",
    "explain_event",
    "list_alerts",
    "note_on_older",
    "note_on_snoozed",
    "open_queue",
    "queue_begins",
    "read_alerts_like",
    "read_last_row",
    "read_reviews_of",
    "record_review",
    "record_reviews",
    "show_snoozes",
    "withdraw_reviews",
]


def __getattr__(name: str) -> Any:
    """Imports the explanations on first use, so that the queue opens faster."""
    if name not in ("Explainer", "explain", "explain_event"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lookback.spark.explaining import explanations

    return getattr(explanations, name)


# How far back the queue goes. It does not read older files of alerts.
QUEUE_DAYS = 90.0
_ANY_TIME = dt.datetime(1, 1, 2, tzinfo=dt.timezone.utc)
# Keeps the queue's begin within the dates that Python can represent.
_MAX_DAYS = 36_500


def list_alerts(
    tables: Tables, rule_id: str | None = None, stream: str | None = None, tag: str | None = None
) -> DataFrame:
    """Reads all rows of alerts in order of arrival, optionally of one rule, stream or tag, with the table's columns."""
    return tables.ask("listed_alerts", rule_id=rule_id, stream=stream, tag=tag)


def open_queue(
    tables: Tables,
    rule_id: str | None = None,
    stream: str | None = None,
    days: float = QUEUE_DAYS,
    *,
    tag: str | None = None,
    with_snoozed: bool = False,
    reports: bool = False,
) -> DataFrame:
    """Reads the open alerts, which wait for review: one row per alert, its last revision.

    Critical alerts come first, then high, medium, low; within a severity the newest event comes first. Alerts that are
    in shadow, retracted, suppressed, reviewed or snoozed are left out, and so are reports: alerts of a rule version
    with `queue: false` or severity info.

    Args:
        tables: The tables of the place.
        rule_id: Only alerts of this rule.
        stream: Only alerts of this stream.
        days: Maximum age of an alert, in days since it was decided; see `note_on_older`.
        tag: Only alerts with this tag; capitals make no difference.
        with_snoozed: Whether to include snoozed alerts.
        reports: Whether to read the reports instead.

    Returns:
        The columns severity, event_time, rule_id, rule_version, stream, key, message, measures, alert_id, revision,
        event_id, window_start, window_end, window_complete, arrival, decided_at, entities and tags.

    Raises:
        ReviewError: If `days` is out of range.
    """
    given = select_open(days, rule_id=rule_id, stream=stream, tag=tag, with_snoozed=with_snoozed, reports=reports)
    return tables.ask("open_queue", **given)


def select_open(days: float = QUEUE_DAYS, **chosen: object) -> dict[str, object]:
    """Returns the values of a question about the open queue: those in `chosen`, else no restriction."""
    values = {
        "until": None,
        "ended_after": None,
        "rule_id": None,
        "stream": None,
        "tag": None,
        "with_snoozed": False,
        "reports": False,
    }
    return {"since": queue_begins(days), **values, **chosen}


def queue_begins(days: float = QUEUE_DAYS) -> dt.datetime:
    """Returns the earliest `decided_at` of alerts in a queue of `days`. Raises ReviewError if that is out of range."""
    if not 0 < days <= _MAX_DAYS:
        raise ReviewError(f"the days of the queue must be above 0 and at most {_MAX_DAYS:,}, got {days}")
    return dt.datetime.now(dt.timezone.utc) - dt.timedelta(days=days)


def note_on_older(tables: Tables, days: float = QUEUE_DAYS) -> str:
    """Says where a queue of `days` begins and how to see older alerts; empty if no alert is older.

    It stops at the first older alert, so it does not know how many are open; `count_older` does.
    """
    begins = queue_begins(days)
    if tables.ask("older_alerts", until=begins).isEmpty():
        return ""
    return (
        f"The queue begins with alerts decided at {begins:%Y-%m-%dT%H:%MZ}, {days:g} days ago. There are older ones; "
        "`lookback maintain` counts those that are open, and a larger number of days (--days N, or the notebook's "
        "parameter) shows them."
    )


def show_snoozes(tables: Tables, days: float = QUEUE_DAYS) -> list[dict[str, Any]]:
    """Lists all snoozes, and how many alerts each keeps out of a queue of `days`; see `lookback.spark.snoozes`."""
    return list_snoozes(tables, queue_begins(days))


def note_on_snoozed(tables: Tables, days: float = QUEUE_DAYS) -> str:
    """Says how many alerts the active snoozes keep out of a queue of `days`; empty if no snooze is active."""
    active = [row for row in show_snoozes(tables, days) if row["state"] == ACTIVE]
    if not active:
        return ""
    kept = count_noun(sum(row["alerts"] for row in active), "open alert")
    subject = "1 snooze leaves" if len(active) == 1 else f"{len(active):,} snoozes leave"
    return f"{subject} out {kept}; `lookback snoozes` shows which, why and until when."


@dataclass(frozen=True)
class OlderAlerts:
    """Open alerts that are too old for the queue: their count, the queue's begin, and when the oldest was decided."""

    count: int
    begins: dt.datetime
    oldest: dt.datetime | None

    def __str__(self) -> str:
        """The count in a sentence that says how to see the alerts."""
        if self.oldest is None:
            return f"No open alert is older than the queue, which begins at {self.begins:%Y-%m-%d}."
        days = (dt.datetime.now(dt.timezone.utc) - self.oldest).days + 1
        alerts = "1 open alert is" if self.count == 1 else f"{self.count:,} open alerts are"
        return (
            f"{alerts} older than the queue, which begins at {self.begins:%Y-%m-%d}: "
            f"lookback alerts --queue --days {days} shows all of them."
        )


def count_older(tables: Tables, begins: dt.datetime | None = None) -> OlderAlerts:
    """Counts the open alerts decided before the aware time `begins` (default: of the queue). Reads all alerts."""
    begins = begins or queue_begins()
    rows = tables.ask("open_alerts", since=_ANY_TIME, until=begins, ended_after=None).where("queue")
    row = rows.agg(F.count_distinct("alert_id"), F.min(F.unix_micros("decided_at"))).collect()[0]
    return OlderAlerts(int(row[0]), begins, None if row[1] is None else to_utc(row[1]))


@dataclass(frozen=True)
class Decision:
    """A decision on one revision of an alert.

    `last` is the number of the alert's last revision. `before` is the reviewer's last decision if this one repeats it,
    so that no row was written.
    """

    alert_id: str
    disposition: str
    revision: int
    message: str
    last: int
    before: Review | None = None

    @property
    def is_new(self) -> bool:
        """Whether a row was written."""
        return self.before is None

    def __str__(self) -> str:
        """The decision in a sentence, and what to do if the reviewer has not seen a later revision."""
        record = f"is recorded as {self.disposition}"
        if self.before is not None:
            at = f"{self.before.reviewed_at:%Y-%m-%d %H:%M:%S} UTC"
            record = (
                f"was already recorded as {self.disposition} by {self.before.reviewer} at {at}, so nothing was written"
            )
        text = f"Alert {self.alert_id} {record}, by its revision {self.revision}: {self.message or 'no message'}."
        if self.revision == self.last:
            return text
        return f"{text} Revision {self.last} has arrived since; look at it, and decide again if it changes your mind."


def record_review(
    tables: Tables,
    alert_id: str,
    disposition: str,
    reviewer: str | None = None,
    note: str = "",
    revision: int | None = None,
) -> Decision:
    """Records a decision on an alert, which removes the alert from the queue.

    Another review of the same alert adds a row, unless it repeats the reviewer's last one.

    Args:
        tables: The tables of the place.
        alert_id: The alert.
        disposition: confirmed, false_positive, benign (true but harmless) or unclear.
        reviewer: Name of the reviewer; None for the current user.
        note: Reasons for the decision.
        revision: The revision that the reviewer saw; None for the last.

    Raises:
        ReviewError: If the alert, revision or disposition is unknown, or the reviewer is empty.
    """
    from lookback.spark.explaining.explanations import find_revision, read_alert_rows

    _check_disposition(disposition)
    reviewer = _choose_reviewer(tables, reviewer)
    rows = read_alert_rows(tables, alert_id)
    seen = find_revision(rows, alert_id, revision)
    known = read_reviews_of(tables, [alert_id]).get(alert_id, [])
    before = next((each for each in reversed(known) if each.reviewer == reviewer), None)
    now = dt.datetime.now(dt.timezone.utc)
    review = Review(alert_id, disposition, seen["revision"], reviewer, note, now)
    if before is None or replace(before, reviewed_at=now) != review:
        before = None
        _append_reviews(tables, [review])
    return Decision(alert_id, disposition, seen["revision"], seen["message"] or "", rows[-1]["revision"], before)


@dataclass(frozen=True)
class Review:
    """A row of the table `reviews`. `revision` is None if an external row lacks it; `reviewed_at` is aware."""

    alert_id: str
    disposition: str
    revision: int | None
    reviewer: str
    note: str
    reviewed_at: dt.datetime

    def __str__(self) -> str:
        """The decision in a few words, such as `false_positive by kim at 2026-03-01 10:00:00 UTC: known customer`."""
        note = f": {self.note}" if self.note else ""
        return f"{self.disposition} by {self.reviewer} at {self.reviewed_at:%Y-%m-%d %H:%M:%S} UTC{note}"


@dataclass(frozen=True)
class SeenAlert:
    """An alert as a reviewer saw it: its revision, when that was decided (aware), and its reviews at that time."""

    alert_id: str
    revision: int
    decided_at: dt.datetime
    reviews: frozenset[Review] = frozenset()


@dataclass(frozen=True)
class RecordedReviews:
    """One decision on one or more alerts.

    Attributes:
        recorded: Ids of the alerts for which it is recorded.
        reviewed_at: Time of the decision.
        elsewhere: The reviews, by id, of alerts that another reviewer has decided since they were seen. The decision is
            not recorded for these.
        later: The number of the last revision, by id, of recorded alerts that were revised since they were seen.
    """

    recorded: tuple[str, ...]
    reviewed_at: dt.datetime
    elsewhere: Mapping[str, tuple[Review, ...]] = field(default_factory=dict)
    later: Mapping[str, int] = field(default_factory=dict)


def record_reviews(
    tables: Tables, seen: Sequence[SeenAlert], disposition: str, reviewer: str | None = None, note: str = ""
) -> RecordedReviews:
    """Records one decision on the alerts in `seen`, in one commit, except for alerts that were decided since.

    `disposition`, `reviewer`, `note` and the errors are as in `record_review`. An alert with an unseen review stays
    unchanged: you may decide again once you have seen that review, and the last review counts.
    """
    _check_disposition(disposition)
    reviewer = _choose_reviewer(tables, reviewer)
    by_id = {each.alert_id: each for each in seen}
    elsewhere = {
        alert_id: unseen
        for alert_id, reviews in read_reviews_of(tables, by_id).items()
        if (unseen := tuple(each for each in reviews if each not in by_id[alert_id].reviews))
    }
    now = dt.datetime.now(dt.timezone.utc)
    own = {alert_id: each for alert_id, each in by_id.items() if alert_id not in elsewhere}
    if own:
        _append_reviews(
            tables,
            [Review(each.alert_id, disposition, each.revision, reviewer, note, now) for each in own.values()],
        )
    return RecordedReviews(tuple(own), now, elsewhere, _find_later_revisions(tables, own))


def withdraw_reviews(tables: Tables, reviewer: str, reviewed_at: dt.datetime) -> None:
    """Deletes the rows that `record_reviews` wrote for one decision, found by `reviewer` and `reviewed_at`.

    Its alerts are open again unless another reviewer decided them. Rows of other reviewers are never touched, and the
    table's history keeps the deleted rows.
    """
    own = (F.col("reviewer") == F.lit(reviewer)) & (F.col("reviewed_at") == to_timestamp(parse_time(reviewed_at)))
    change_table(tables, "reviews", lambda: tables.delta("reviews").delete(own))


def read_reviews_of(tables: Tables, alert_ids: Iterable[str]) -> dict[str, list[Review]]:
    """Reads the reviews of the alerts with these `alert_ids`, by alert, in order of time."""
    by_id: dict[str, list[Review]] = {}
    for alert_id, disposition, revision, reviewer, note, time in tables.ask(
        "reviews_of", ids=list(alert_ids)
    ).collect():
        by_id.setdefault(alert_id, []).append(Review(alert_id, disposition, revision, reviewer, note, to_utc(time)))
    return by_id


def read_last_row(tables: Tables, alert_id: str) -> dict[str, Any]:
    """Reads the last row of an alert, of any verdict, with aware times. Raises ReviewError if the alert is unknown."""
    from lookback.spark.explaining.explanations import read_alert_rows

    return read_alert_rows(tables, alert_id)[-1]


def _find_later_revisions(tables: Tables, seen: Mapping[str, SeenAlert]) -> dict[str, int]:
    """Finds the alerts that were revised since they were seen, with the number of the last revision."""
    if not seen:
        return {}
    # Skips files whose alerts were all decided before.
    since = min(each.decided_at for each in seen.values())
    rows = tables.ask("revisions_since", ids=list(seen), since=since).collect()
    return {
        alert_id: revision
        for alert_id, time, revision in rows
        if (time, revision) > (parse_time(seen[alert_id].decided_at), seen[alert_id].revision)
    }


def read_alerts_like(tables: Tables, alert: Mapping[str, Any], days: float = QUEUE_DAYS) -> list[dict[str, Any]]:
    """Reads the other alerts with the same key as an alert, or about one of its entities.

    `alert` is a row of `alerts`. Returns the last row of each alert, newest first, from at most 200 rows within `days`,
    each with its `reviews`, a list of Review. An alert over all events together has no key; it may have entities.
    """
    same = {name: dict(alert.get(name) or {}) for name in ("key", "entities")}
    if not any(same.values()):
        return []
    given = {name: json.dumps(texts) if texts else None for name, texts in same.items()}
    newest = tables.ask("similar_alerts", since=queue_begins(days), **given)
    last: dict[str, dict[str, Any]] = {}
    for row in newest.toArrow().to_pylist():
        last.setdefault(row["alert_id"], row)
    last.pop(alert["alert_id"], None)
    reviews = read_reviews_of(tables, last) if last else {}
    return [{**row, "reviews": reviews.get(alert_id, [])} for alert_id, row in last.items()]


def _check_disposition(disposition: str) -> None:
    if disposition not in DISPOSITIONS:
        raise ReviewError(f"disposition must be one of {', '.join(DISPOSITIONS)}, got {disposition!r}")


def _choose_reviewer(tables: Tables, reviewer: str | None) -> str:
    reviewer = tables.current_user if reviewer is None else reviewer
    if not reviewer.strip():
        raise ReviewError("reviewer must not be empty")
    return reviewer


def _append_reviews(tables: Tables, reviews: Sequence[Review]) -> None:
    """Appends reviews in one commit."""
    rows = [
        (each.alert_id, each.disposition, each.revision, each.reviewer, each.note, each.reviewed_at) for each in reviews
    ]
    tables.append_rows(rows, "reviews")


def decisions(tables: Tables) -> DataFrame:
    """Counts the alerts of each rule by disposition, with the columns stream, rule_id, disposition (sorted) and alerts.

    An alert counts once, by its last review, regardless of its revisions.
    """
    return tables.ask("counted_decisions", as_of=dt.datetime.now(dt.timezone.utc))

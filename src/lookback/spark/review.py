"""Reviews alerts: lists the queue of open ones, explains one by the events behind it, and records people's decisions."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import Window

from lookback.core.errors import ReviewError, SetupError
from lookback.core.rules.document import SEVERITIES
from lookback.core.streams.alerts import DISPOSITIONS
from lookback.core.values.texts import count_noun
from lookback.core.values.times import to_utc
from lookback.spark.queries import functions as F  # noqa: N812
from lookback.spark.snoozes import ACTIVE, leave_out_snoozed, list_snoozes
from lookback.spark.stream.evaluations import Evaluations
from lookback.spark.tables.lakehouse import SPARK_ERRORS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from lookback.spark.explaining.explanations import explain, explain_event
    from lookback.spark.tables.lakehouse import Tables

__all__ = [
    "Decision", "OlderAlerts", "count_older", "decisions", "explain", "explain_event", "list_alerts", "note_on_older",
    "note_on_snoozed", "open_queue", "queue_begins", "record_review", "show_snoozes",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imports what explains when it is asked for: the queue opens sooner without it."""
    if name not in ("explain", "explain_event"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lookback.spark.explaining import explanations

    return getattr(explanations, name)


# How far back the queue goes: older files of alerts are not read.
QUEUE_DAYS = 90.0
_QUEUE_COLUMNS = (
    "severity", "event_time", "rule_id", "rule_version", "stream", "key", "message", "measures", "alert_id", "revision",
    "event_id", "window_start", "window_end", "window_complete", "arrival", "decided_at",
)  # fmt: skip
# The last revision of an alert that needs a person.
_NEEDS_REVIEW = "verdict = 'raised' AND mode = 'active'"
# More than any number of a revision.
_REVISIONS = 2**32
# The queue must begin at a time that Python knows.
_MAX_DAYS = 36_500


def list_alerts(tables: Tables, rule_id: str | None = None, stream: str | None = None) -> DataFrame:
    """Reads all rows of alerts of one rule or stream, or of all, with the columns of the table, in order of arrival."""
    order = ("arrival", "event_time", "event_id", "rule_id", "alert_id", "revision", "decided_at")
    rows = tables.read("alerts").orderBy(*order)
    rows = rows if rule_id is None else rows.where(F.col("rule_id") == F.lit(rule_id))
    return rows if stream is None else rows.where(F.col("stream") == F.lit(stream))


def open_queue(
    tables: Tables, rule_id: str | None = None, stream: str | None = None, days: float = QUEUE_DAYS
) -> DataFrame:
    """Reads the alerts of one rule or stream, or of all, that wait for a person.

    Critical alerts come first, then high, medium, low; within a severity the newest event comes first. There is one row
    per alert, its last revision. Alerts in shadow, retracted, suppressed, reviewed or snoozed ones are left out. days: the
    greatest age of an alert, since it was decided; see `note_on_older`. Columns: severity, event_time, rule_id, rule_version,
    stream, key, message, measures, alert_id, revision, event_id, window_start, window_end, window_complete, arrival,
    decided_at. Raises ReviewError if `days` is no number of days.
    """
    begins = queue_begins(days)
    alerts = tables.read("alerts").where(F.col("decided_at") >= F.lit(begins))
    if rule_id is not None:
        alerts = alerts.where(F.col("rule_id") == F.lit(rule_id))
    if stream is not None:
        alerts = alerts.where(F.col("stream") == F.lit(stream))
    open_ = leave_out_snoozed(tables, _find_open(tables, alerts, begins))
    rank = F.array_position(F.array(*[F.lit(name) for name in SEVERITIES]), F.col("severity"))
    return open_.orderBy(rank.desc(), F.col("event_time").desc(), "rule_id", "alert_id").select(*_QUEUE_COLUMNS)


def _find_open(tables: Tables, alerts: DataFrame, since: dt.datetime | None = None) -> DataFrame:
    """Returns the rows of `alerts` that wait for a person: raised, not in shadow, of the last revision, not reviewed.

    since: a time at or before which no row of `alerts` was decided; revisions from before it are not read. Of several
    evaluations that wrote an alert, which each number its revisions from 0, the last one counts.
    """
    evaluation = Evaluations.read(tables).number()
    # One number to compare, so that rows are joined by their hashes.
    order = evaluation.cast("bigint") * F.lit(_REVISIONS) + F.col("revision")
    revised = tables.read("alerts").where((F.col("revision") > 0) | (evaluation > 0))
    if since is not None:
        revised = revised.where(F.col("decided_at") >= F.lit(since))
    # Revisions are few and their columns are narrow; to find the last one by a window would sort every wide row.
    revised = revised.select(F.col("alert_id").alias("same"), order.alias("later"))
    is_superseded = (F.col("alert_id") == F.col("same")) & (order < F.col("later"))
    last = alerts.where(_NEEDS_REVIEW).join(revised, is_superseded, "left_anti")
    return last.join(tables.read("reviews").select("alert_id"), "alert_id", "left_anti")


def queue_begins(days: float = QUEUE_DAYS) -> dt.datetime:
    """Returns the time, by `decided_at`, from which on alerts are in a queue of so many `days`. Raises ReviewError."""
    if not 0 < days <= _MAX_DAYS:
        raise ReviewError(f"the days of the queue are a number above 0, at most {_MAX_DAYS:,}, got {days}")
    return dt.datetime.now(dt.timezone.utc) - dt.timedelta(days=days)


def note_on_older(tables: Tables, days: float = QUEUE_DAYS) -> str:
    """Writes a sentence that says where the queue begins and how to see older alerts; empty if no alert is older.

    days: those of the queue. It stops at the first older alert, so it does not say how many of them are open; `count_older`
    does.
    """
    begins = queue_begins(days)
    if tables.read("alerts").where(F.col("decided_at") < F.lit(begins)).select("decided_at").isEmpty():
        return ""
    return (
        f"The queue begins with alerts decided at {begins:%Y-%m-%dT%H:%MZ}, {days:g} days ago. There are older ones; "
        "`lookback maintain` counts those that are open, and a larger number of days (--days N, or the notebook's "
        "parameter) shows them."
    )


def show_snoozes(tables: Tables, days: float = QUEUE_DAYS) -> list[dict[str, Any]]:
    """Lists all snoozes, and how many alerts each keeps out of a queue of so many days; see `lookback.spark.snoozes`."""
    begins = queue_begins(days)
    alerts = tables.read("alerts").where(F.col("decided_at") >= F.lit(begins))
    return list_snoozes(tables, _find_open(tables, alerts, begins).select("alert_id", "rule_id", "key"))


def note_on_snoozed(tables: Tables, days: float = QUEUE_DAYS) -> str:
    """Writes a sentence on the active snoozes and the alerts that they keep out of a queue of `days`; empty without any."""
    active = [row for row in show_snoozes(tables, days) if row["state"] == ACTIVE]
    if not active:
        return ""
    kept = count_noun(sum(row["alerts"] for row in active), "open alert")
    subject = "1 snooze leaves" if len(active) == 1 else f"{len(active):,} snoozes leave"
    return f"{subject} out {kept}; `lookback snoozes` says which, why and until when."


@dataclass(frozen=True)
class OlderAlerts:
    """Open alerts that are too old for the queue. begins: the queue's begin; oldest: the time of the first decision."""

    count: int
    begins: dt.datetime
    oldest: dt.datetime | None

    def __str__(self) -> str:
        """The count in a sentence, with how to see them."""
        if self.oldest is None:
            return f"No open alert is older than the queue, which begins at {self.begins:%Y-%m-%d}."
        days = (dt.datetime.now(dt.timezone.utc) - self.oldest).days + 1
        alerts = "1 open alert is" if self.count == 1 else f"{self.count:,} open alerts are"
        return (
            f"{alerts} older than the queue, which begins at {self.begins:%Y-%m-%d}: "
            f"lookback alerts --queue --days {days} shows all of them."
        )


def count_older(tables: Tables, begins: dt.datetime | None = None) -> OlderAlerts:
    """Counts the open alerts decided before the queue begins, or before the time `begins` (aware); reads all alerts."""
    begins = begins or queue_begins()
    alerts = tables.read("alerts").where(F.col("decided_at") < F.lit(begins))
    row = _find_open(tables, alerts).agg(F.count_distinct("alert_id"), F.min(F.unix_micros("decided_at"))).collect()[0]
    return OlderAlerts(int(row[0]), begins, None if row[1] is None else to_utc(row[1]))


@dataclass(frozen=True)
class Decision:
    """A person's decision about one revision of an alert.

    last: the number of the alert's last revision. is_new: False if the reviewer had recorded the same decision last, so
    that no row was written.
    """

    alert_id: str
    disposition: str
    revision: int
    message: str
    last: int
    is_new: bool

    def __str__(self) -> str:
        """The decision in a sentence, with a remedy if the reviewer has not seen a later revision."""
        record = f"is recorded as {self.disposition}" if self.is_new else f"was recorded as {self.disposition} before"
        text = f"Alert {self.alert_id} {record}, by its revision {self.revision}: {self.message or 'no message'}."
        if self.revision == self.last:
            return text
        return f"{text} Revision {self.last} has come since; look at it, and decide again where it changes your mind."


def record_review(
    tables: Tables,
    alert_id: str,
    disposition: str,
    reviewer: str | None = None,
    note: str = "",
    revision: int | None = None,
) -> Decision:
    """Records a person's decision about an alert, which removes the alert from the queue.

    disposition: confirmed, false_positive, benign (true but harmless) or unclear. reviewer: a name; None: the current
    user. note: the reasons. revision: the one that the person has seen; None: the last. A further review of the same
    alert is one more row, unless it repeats the reviewer's last one. Raises ReviewError if there is no such alert or
    revision, the disposition is none of these, or the reviewer's name is empty, and SetupError if the table of an earlier
    release lacks a column or refuses the disposition.
    """
    from lookback.spark.explaining.explanations import find_revision, read_alert_rows

    if disposition not in DISPOSITIONS:
        raise ReviewError(f"a disposition is one of {', '.join(DISPOSITIONS)}, got {disposition!r}")
    reviewer = tables.current_user if reviewer is None else reviewer
    if not reviewer.strip():
        raise ReviewError("a review needs the name of who did it, got an empty reviewer")
    rows = read_alert_rows(tables, alert_id)
    seen = find_revision(rows, alert_id, revision)
    reviews = tables.read("reviews")
    if "revision" not in reviews.columns:
        raise SetupError(
            f"table {tables.identifier('reviews')} has no column revision; `lookback init` or notebook 00_set_up adds it"
        )
    own = reviews.where((F.col("alert_id") == F.lit(alert_id)) & (F.col("reviewer") == F.lit(reviewer)))
    before = own.orderBy(F.col("reviewed_at").desc()).select("disposition", "revision", "note").head()
    is_new = before is None or tuple(before) != (disposition, seen["revision"], note)
    if is_new:
        now = dt.datetime.now(dt.timezone.utc)
        try:
            tables.append_rows([(alert_id, disposition, seen["revision"], reviewer, note, now)], "reviews")
        except SPARK_ERRORS as error:
            if "disposition_known" not in str(error):
                raise
            raise SetupError(
                f"table {tables.identifier('reviews')} refuses the disposition {disposition}; `lookback init` or notebook "
                "00_set_up lets it in"
            ) from None
    return Decision(alert_id, disposition, seen["revision"], seen["message"] or "", rows[-1]["revision"], is_new)


def decisions(tables: Tables) -> DataFrame:
    """Counts the alerts of each rule by disposition. Columns, also of the order: stream, rule_id, disposition; alerts.

    An alert counts once, by its last review; its revisions are one alert.
    """
    latest = Window.partitionBy("alert_id").orderBy(F.col("reviewed_at").desc(), "reviewer", "disposition")
    last = tables.read("reviews").withColumn("__nth", F.row_number().over(latest)).where(F.col("__nth") == 1)
    alerts = tables.read("alerts").select("alert_id", "stream", "rule_id").dropDuplicates(["alert_id"])
    names = ("stream", "rule_id", "disposition")
    return last.join(alerts, "alert_id").groupBy(*names).agg(F.count("*").alias("alerts")).orderBy(*names)

"""Review: the queue of open alerts, one alert explained by the events that stood behind it, and what people decided."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812

from lookback.core.errors import ReviewError, RuleError, SetupError
from lookback.core.explaining.evidence import (
    NOT_DELETED,
    Activation,
    Clock,
    Evidence,
    Explanation,
    Reset,
)
from lookback.core.explaining.explanation import explain_alert, picture_span
from lookback.core.rules.compiled import CompiledRule, compile_rule
from lookback.core.rules.document import SEVERITIES, read_document
from lookback.core.rules.rulebook import ACTIONS, WITH_STATE
from lookback.core.streams.arrival import split_future
from lookback.core.streams.events import Events, read_events
from lookback.core.values.keys import Int64s
from lookback.core.values.texts import first_line
from lookback.core.values.times import parse_time, to_utc
from lookback.core.values.windows import SEQUENCE
from lookback.spark.tables.schemas import REVIEWS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row

    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables

_Read = TypeVar("_Read")
DISPOSITIONS = ("confirmed", "false_positive", "unclear")
# How far back the queue goes: older files of alerts are not read.
QUEUE_DAYS = 90.0
_QUEUE = (
    "severity", "event_time", "rule_id", "rule_version", "stream", "key", "message", "measures", "alert_id", "revision",
    "event_id", "window_start", "window_end", "window_complete", "arrival", "decided_at",
)  # fmt: skip
# What an alert's last revision must be for the alert to need a person.
_IS_RAISED = "verdict = 'raised' AND mode = 'active'"
# So that its begin is a time that Python knows.
_MOST_DAYS = 36_500
_STATUS_OF = {action: status for status, action in ACTIONS.items()}


def open_queue(
    tables: Tables, rule_id: str | None = None, stream: str | None = None, days: float = QUEUE_DAYS
) -> DataFrame:
    """The alerts, of one rule or stream or of all, that wait for a person: critical first, then high, medium, low; of one severity the newest event first.

    One row per alert, its last revision. Left out are alerts in shadow, retracted or suppressed ones, and what has been
    reviewed. days: how long ago an alert was decided at most; see `note_on_older`. Columns: severity, event_time, rule_id,
    rule_version, stream, key, message, measures, alert_id, revision, event_id, window_start, window_end, window_complete,
    arrival, decided_at. Raises ReviewError where `days` is no number of days.
    """
    begins = queue_begins(days)
    alerts = tables.read("alerts").where(F.col("decided_at") >= F.lit(begins))
    if rule_id is not None:
        alerts = alerts.where(F.col("rule_id") == F.lit(rule_id))
    if stream is not None:
        alerts = alerts.where(F.col("stream") == F.lit(stream))
    open_ = _find_open(tables, alerts, begins)
    rank = F.array_position(F.array(*[F.lit(name) for name in SEVERITIES]), F.col("severity"))
    return open_.orderBy(rank.desc(), F.col("event_time").desc(), "rule_id", "alert_id").select(*_QUEUE)


def _find_open(tables: Tables, alerts: DataFrame, since: dt.datetime | None = None) -> DataFrame:
    """Returns the rows of `alerts` that wait for a person: raised, not in shadow, of the last revision, not reviewed.

    since: a time at or before which no row of `alerts` was decided; revisions from before it are not read.
    """
    revised = tables.read("alerts").where("revision > 0")
    if since is not None:
        revised = revised.where(F.col("decided_at") >= F.lit(since))
    # Revisions are few and two of their columns are narrow; to find the last one by a window would sort every wide row.
    revised = revised.select(F.col("alert_id").alias("same"), F.col("revision").alias("later"))
    is_superseded = (F.col("alert_id") == F.col("same")) & (F.col("revision") < F.col("later"))
    last = alerts.where(_IS_RAISED).join(revised, is_superseded, "left_anti")
    return last.join(tables.read("reviews").select("alert_id"), "alert_id", "left_anti")


def queue_begins(days: float = QUEUE_DAYS) -> dt.datetime:
    """The time, by `decided_at`, from which on alerts are in a queue of so many days. Raises ReviewError."""
    if not 0 < days <= _MOST_DAYS:
        raise ReviewError(f"the days of the queue are a number above 0, at most {_MOST_DAYS:,}, got {days}")
    return dt.datetime.now(dt.timezone.utc) - dt.timedelta(days=days)


def note_on_older(tables: Tables, days: float = QUEUE_DAYS) -> str:
    """A sentence that says where the queue begins and how to see what is older; empty where no alert is older.

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


@dataclass(frozen=True)
class OlderAlerts:
    """Open alerts that are too old for the queue. begins: where the queue begins; oldest: when the first was decided."""

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
    """How many open alerts were decided before the queue begins, or before another time (aware); reads all of them."""
    begins = begins or queue_begins()
    alerts = tables.read("alerts").where(F.col("decided_at") < F.lit(begins))
    row = _find_open(tables, alerts).agg(F.count_distinct("alert_id"), F.min(F.unix_micros("decided_at"))).collect()[0]
    return OlderAlerts(int(row[0]), begins, None if row[1] is None else to_utc(row[1]))


@dataclass(frozen=True)
class Decision:
    """What a person decided about one revision of an alert.

    last: the number of the alert's last revision. is_new: False where this was the reviewer's last word on the alert
    already, so that no row was written.
    """

    alert_id: str
    disposition: str
    revision: int
    message: str
    last: int
    is_new: bool

    def __str__(self) -> str:
        """The decision as a person reads it, with what to do where a later revision has not been seen."""
        done = f"is recorded as {self.disposition}" if self.is_new else f"was recorded as {self.disposition} before"
        text = f"Alert {self.alert_id} {done}, by its revision {self.revision}: {self.message or 'no message'}."
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
    """Writes down what a person decided about an alert, which leaves the queue.

    disposition: confirmed, false_positive or unclear. reviewer: None: who works here. revision: the one that the person has seen; None: the last. A
    further review of the same alert is one more row, unless it repeats the reviewer's last one.
    Raises ReviewError where there is no such alert or revision, the disposition is none of these, or nobody is named,
    and SetupError where the table of an earlier release lacks a column.
    """
    if disposition not in DISPOSITIONS:
        raise ReviewError(f"a disposition is one of {', '.join(DISPOSITIONS)}, got {disposition!r}")
    reviewer = tables.current_user if reviewer is None else reviewer
    if not reviewer.strip():
        raise ReviewError("a review needs the name of who did it, got an empty reviewer")
    rows = _rows(tables, alert_id)
    seen = _row_of(rows, alert_id, revision)
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
        row = (alert_id, disposition, seen["revision"], reviewer, note, now)
        tables.append(tables.spark.createDataFrame([row], REVIEWS).coalesce(1), "reviews")
    return Decision(alert_id, disposition, seen["revision"], seen["message"] or "", rows[-1]["revision"], is_new)


def decisions(tables: Tables) -> DataFrame:
    """How many alerts of each rule people found to be what: stream, rule_id, disposition, alerts, in this order.

    An alert counts once, by its last review; its revisions are one alert.
    """
    latest = Window.partitionBy("alert_id").orderBy(F.col("reviewed_at").desc(), "reviewer", "disposition")
    last = tables.read("reviews").withColumn("__nth", F.row_number().over(latest)).where(F.col("__nth") == 1)
    alerts = tables.read("alerts").select("alert_id", "stream", "rule_id").dropDuplicates(["alert_id"])
    names = ("stream", "rule_id", "disposition")
    return last.join(alerts, "alert_id").groupBy(*names).agg(F.count("*").alias("alerts")).orderBy(*names)


def explain(
    tables: Tables,
    streams: Mapping[str, Stream],
    alert_id: str,
    *,
    days: float | None = None,
    revision: int | None = None,
) -> Explanation:
    """Why an alert was raised: its rule in words, and the events that it counted or took, exactly as they stood.

    streams: the declared streams by name. revision: which row of the alert; default: its last, whatever the verdict.
    days: how far before the window the timeline goes; default: some windows' length, at most 30 days. Measures,
    sessions and sequences are computed again from those events: see `Explanation.consistent`. Events that have been
    deleted since count there and are not shown. Raises ReviewError where there is no such alert or revision, its rule's
    version cannot be found, or the events' history is gone.
    """
    tables = tables.holding(*streams.values())
    alert = _row_of(_rows(tables, alert_id), alert_id, revision)
    stream = _stream(streams, alert["stream"])
    history = _rule_history(tables)
    row, rule = _version(history, alert["rule_id"], alert["rule_version"], stream)
    since, earliest = picture_span(rule, stream, alert, days)
    return explain_alert(_read_evidence(tables, stream, rule, alert, earliest, history), alert, row, since)


def _rows(tables: Tables, alert_id: str) -> list[dict[str, Any]]:
    """The rows of an alert by revision, as dicts; their times aware."""
    rows = tables.read("alerts").where(F.col("alert_id") == F.lit(alert_id)).orderBy("revision").toArrow().to_pylist()
    if not rows:
        raise ReviewError(f"there is no alert {alert_id!r}; `open_queue` and `lookback alerts` list their ids")
    return [{**row, **{name: dict(row[name] or []) for name in ("key", "measures")}} for row in rows]


def _row_of(rows: list[dict[str, Any]], alert_id: str, revision: int | None) -> dict[str, Any]:
    """Returns the row of a revision of an alert; None: the last. Raises ReviewError where there is no such revision."""
    by_revision = {row["revision"]: row for row in rows}
    if revision is not None and revision not in by_revision:
        raise ReviewError(f"alert {alert_id!r} has no revision {revision}; there are {list(by_revision)}")
    return rows[-1] if revision is None else by_revision[revision]


def _stream(streams: Mapping[str, Stream], name: str) -> Stream:
    if name not in streams:
        raise ReviewError(f"the alert is of stream {name!r}, which is not declared; there are {', '.join(streams)}")
    return streams[name]


def _rule_history(tables: Tables) -> list[Row]:
    """Every row that the rules table ever held, in the order in which rows apply."""
    feed = _feed(tables, "rules").where(F.col("_change_type").isin("insert", "update_postimage"))
    return sorted(feed.collect(), key=lambda row: (row["_commit_version"], _number_of(row)))


def _number_of(row: Row) -> int:
    return 2**63 if row["version"] is None else int(row["version"])


def _version(history: Iterable[Row], rule_id: str, version: int, stream: Stream) -> tuple[dict[str, Any], CompiledRule]:
    """One version of a rule, as inserted first or as updated since: its row, the document read, and the rule.

    A NULL version is the highest accepted so far + 1.
    """
    highest, found = 0, None
    for row in history:
        rule = _accepted(row, stream) if row["rule_id"] == rule_id else None
        if rule is None:
            continue
        number = highest + 1 if row["version"] is None else int(row["version"])
        highest = max(highest, number)
        if number == version and (found is None or row["_change_type"] != "insert"):
            found = row, rule
    if found is None:
        raise ReviewError(f"version {version} of rule {rule_id!r} is not in the rules table, nor in its history")
    columns = {name: value for name, value in found[0].asDict().items() if not name.startswith("_")}
    return {**columns, "version": version, "document": dict(found[1].spec.document)}, found[1]


def _accepted(row: Row, stream: Stream) -> CompiledRule | None:
    try:
        return compile_rule(read_document(row["document"]), stream)
    except RuleError:
        return None


def _typed_id(stream: Stream, text: str) -> int | str:
    return int(text) if stream.fields[stream.event_id].is_integer else text


def _read_evidence(
    tables: Tables, stream: Stream, rule: CompiledRule, alert: Mapping[str, Any], earliest: int, history: list[Row]
) -> Evidence:
    """The key's events from `earliest` on that had arrived with the alert's commit, and what decides which counted."""
    arrival = int(alert["arrival"])
    within = F.col(stream.event_time) >= _time(earliest)
    # An earlier commit can hold such events only beyond max_future, where they do not count.
    feed = _feed(tables, stream.name, earliest - stream.max_future).where(within)
    table = _arrow(feed.where(_same_key(stream, rule, alert["key"])), stream)
    inserted = table.filter(_equal(table, "insert")).drop_columns(["_change_type"])
    deleted = table.filter(_equal(table, "delete"))
    events, committed = read_events(inserted, stream, 0)
    assert committed is not None
    order = split_future(events, committed, stream)[0].in_order_of_arrival()
    own = order.take(np.flatnonzero(order.commits <= arrival))
    log = _log_before(tables, stream, arrival)
    return Evidence(
        rule=rule,
        events=own,
        clock=Clock(stream, _highs(feed, stream, arrival), _advances(log, history)),
        activations=_activations(log, history, stream),
        resets=_resets(tables, stream, rule, alert, history),
        gone_at=_gone_at(own, stream, _deletions(deleted, stream)),
        earliest=earliest,
    )


def _resets(
    tables: Tables, stream: Stream, rule: CompiledRule, alert: Mapping[str, Any], history: list[Row]
) -> list[Reset]:
    """The alerts of the rule and key, up to this one's commit, that emptied the key's windows.

    Versions of a sequence share what is kept, also with one that resets where the other does not.
    """
    if not (rule.spec.reset_on_alert or rule.spec.kind == SEQUENCE):
        return []
    key = [F.col("key")[name].eqNullSafe(F.lit(text)) for name, text in alert["key"].items()]
    same = reduce(and_, key, F.size("key") == len(alert["key"]))
    first = (F.col("revision") == 0) & (F.col("rule_id") == F.lit(alert["rule_id"])) & same
    before = tables.read("alerts").where(first & (F.col("arrival") <= alert["arrival"]))
    columns = ("rule_version", "arrival", "event_id", "event_time", "window_start")
    compiled: dict[int, CompiledRule | None] = {}
    resets = []
    for row in before.select(*columns).toArrow().to_pylist():
        version = row["rule_version"]
        if version not in compiled:
            compiled[version] = _kept_by(history, alert["rule_id"], version, stream)
        other = compiled[version]
        if other is None or not other.spec.reset_on_alert:
            continue
        due = parse_time(row["event_time"]) if other.sequence is not None and other.sequence.absent else None
        time = parse_time(row["event_time" if due is None else "window_start"])
        resets.append(Reset(row["arrival"], time, _typed_id(stream, row["event_id"]), due))
    return resets


def _deletions(table: pa.Table, stream: Stream) -> dict[tuple[Any, int], list[int]]:
    """(id, time) -> the commits that deleted such a row."""
    if not table.num_rows:
        return {}
    events, _ = read_events(table.drop_columns(["_change_type"]), stream, 0)
    deletions: dict[tuple[Any, int], list[int]] = {}
    for at, event_id in enumerate(events.columns[stream.event_id].to_list()):
        deletions.setdefault((event_id, int(events.times[at])), []).append(int(events.commits[at]))
    return deletions


def _gone_at(events: Events, stream: Stream, deletions: Mapping[tuple[Any, int], list[int]]) -> Int64s | None:
    """The commit that deleted each event, NOT_DELETED for one that is still there; None if all are."""
    if not deletions:
        return None
    gone = np.full(len(events), NOT_DELETED, dtype=np.int64)
    for at, event_id in enumerate(events.columns[stream.event_id].to_list()):
        commits = deletions.get((event_id, int(events.times[at])), [])
        gone[at] = min((c for c in commits if c > events.commits[at]), default=NOT_DELETED)
    return gone


def _highs(feed: DataFrame, stream: Stream, arrival: int) -> dict[int, int]:
    """The highest event time of the commits up to `arrival`, events beyond max_future left out.

    What lies before the feed's first time cannot make anything late that lies after it.
    """
    micros = F.unix_micros(stream.event_time)
    counted = micros - F.lit(stream.max_future) <= F.unix_micros("_commit_timestamp")
    rows = feed.where((F.col("_change_type") == "insert") & (F.col("_commit_version") <= arrival) & counted)
    highs = rows.groupBy("_commit_version").agg(F.max(micros)).collect()
    return {int(row[0]): int(row[1]) for row in highs}


def _same_key(stream: Stream, rule: CompiledRule, key: Mapping[str, str | None]) -> Column:
    """The events of a key; its texts become values of the fields' types."""
    conditions = [F.lit(True)]
    for name in rule.group_by:
        text = key.get(name)
        value = F.lit(text).cast(str(stream.fields[name]))
        conditions.append(F.col(name).isNull() if text is None else F.col(name) == value)
    return reduce(and_, conditions)


def _arrow(rows: DataFrame, stream: Stream) -> pa.Table:
    columns: list[Column | str] = [
        *stream.fields,
        "_change_type",
        F.col("_commit_version").alias("arrival"),
        F.unix_micros("_commit_timestamp").alias("committed_at"),
    ]
    chosen = rows.where(F.col("_change_type").isin("insert", "delete")).select(*columns)
    return _history(chosen.toArrow, stream.name)


def _equal(table: pa.Table, kind: str) -> pa.Array[Any]:
    return pa.array([value == kind for value in table.column("_change_type").to_pylist()], pa.bool_())


def _feed(tables: Tables, name: str, since: int | None = None) -> DataFrame:
    """The table's change feed to its last commit, as a batch: from the first commit, or from those made at `since` on."""
    start = {"startingVersion": "0"}
    if since is not None:
        start = {"startingTimestamp": to_utc(since).replace(tzinfo=None).isoformat(sep=" ")}
    return _history(lambda: tables.changes(name, start), name)


def _history(read: Callable[[], _Read], name: str) -> _Read:
    try:
        return read()
    except PySparkException as error:
        raise ReviewError(
            f"the history of table {name!r} cannot be read as it stood: {first_line(error):.300}. "
            "Commits and removed files are kept for delta.logRetentionDuration and delta.deletedFileRetentionDuration."
        ) from error


def _time(microseconds: int) -> Column:
    return F.timestamp_micros(F.lit(microseconds).cast("bigint"))


def _log_before(tables: Tables, stream: Stream, arrival: int) -> list[Row]:
    """What rule_log says of changes up to the alert's commit, in the order in which they were obeyed."""
    actions = [*_STATUS_OF, "clear_state", "advance"]
    log = tables.read("rule_log").where((F.col("stream") == stream.name) & F.col("action").isin(actions))
    # The rows that an advance brings name the last commit before it.
    last = F.col("arrival") < arrival + F.when(F.col("action") == "advance", 1).otherwise(0)
    log = log.where(F.col("arrival").isNull() | last)
    in_order = (F.col("arrival").asc_nulls_first(), F.col("batch_id"), F.col("version").asc_nulls_last())
    return log.orderBy(*in_order).collect()


def _activations(log: list[Row], history: list[Row], stream: Stream) -> list[Activation]:
    """What was evaluated, change by change."""
    compiled: dict[tuple[str, int], CompiledRule | None] = {}
    activations = []
    for row in log:
        rule_id, version = row["rule_id"], row["version"]
        status = _STATUS_OF.get(row["action"], "")
        if status == "draft" or row["action"] == "advance":
            continue
        rule = None
        if status in WITH_STATE and rule_id != "*":
            if (rule_id, version) not in compiled:
                compiled[rule_id, version] = _kept_by(history, rule_id, version, stream)
            rule = compiled[rule_id, version]
        activations.append(Activation(row["arrival"], rule_id, rule))
    return activations


def _kept_by(history: list[Row], rule_id: str, version: int, stream: Stream) -> CompiledRule | None:
    try:
        return _version(history, rule_id, version, stream)[1]
    except ReviewError:
        return None  # mended since by hand: what it kept cannot be told any more


def _advances(log: list[Row], history: list[Row]) -> list[tuple[int | None, int]]:
    """The `advance` commands: (arrival, time in microseconds)."""
    rows = [row for row in history if row["rule_id"] == "*" and row["status"] == "advance"]
    times = {row["version"]: parse_time(read_document(row["document"])["time"]) for row in rows}
    return [(row["arrival"], times[row["version"]]) for row in log if row["action"] == "advance"]

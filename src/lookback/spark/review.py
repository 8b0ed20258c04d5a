"""Reviews alerts: lists the queue of open ones, explains one by the events behind it, and records people's decisions."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812

from lookback.core.errors import ReviewError, RuleError, SetupError
from lookback.core.explaining.counted import find_counted
from lookback.core.explaining.events import EventExplanation, Standing, explain_event_at
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
from lookback.core.rules.roles import read_quarantined
from lookback.core.rules.rulebook import ACTIONS, Entry, fill_role
from lookback.core.streams.alerts import DISPOSITIONS
from lookback.core.streams.arrival import split_future
from lookback.core.streams.events import Events, read_events
from lookback.core.values.columns import to_text
from lookback.core.values.keys import Int64s
from lookback.core.values.suggestions import suggest
from lookback.core.values.texts import first_line
from lookback.core.values.times import parse_time, to_utc
from lookback.core.values.windows import LOOKBACK, SEQUENCE, SESSION, TiledWindow
from lookback.spark.tables.lakehouse import WRITE_ERRORS, to_timestamp

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row

    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables

_Result = TypeVar("_Result")
# How far back the queue goes: older files of alerts are not read.
QUEUE_DAYS = 90.0
_QUEUE_COLUMNS = (
    "severity", "event_time", "rule_id", "rule_version", "stream", "key", "message", "measures", "alert_id", "revision",
    "event_id", "window_start", "window_end", "window_complete", "arrival", "decided_at",
)  # fmt: skip
# The last revision of an alert that needs a person.
_NEEDS_REVIEW = "verdict = 'raised' AND mode = 'active'"
# The queue must begin at a time that Python knows.
_MAX_DAYS = 36_500
_STATUS_BY_ACTION = {action: status for status, action in ACTIONS.items()}


class _RuleVersion(NamedTuple):
    """A version of a rule: its row in the rules table, with the document parsed, and the rule."""

    row: dict[str, Any]
    rule: CompiledRule


def open_queue(
    tables: Tables, rule_id: str | None = None, stream: str | None = None, days: float = QUEUE_DAYS
) -> DataFrame:
    """Reads the alerts of one rule or stream, or of all, that wait for a person.

    Critical alerts come first, then high, medium, low; within a severity the newest event comes first. There is one row
    per alert, its last revision. Alerts in shadow, retracted, suppressed or reviewed ones are left out. days: the greatest
    age of an alert, since it was decided; see `note_on_older`. Columns: severity, event_time, rule_id, rule_version,
    stream, key, message, measures, alert_id, revision, event_id, window_start, window_end, window_complete, arrival,
    decided_at. Raises ReviewError if `days` is no number of days.
    """
    begins = queue_begins(days)
    alerts = tables.read("alerts").where(F.col("decided_at") >= F.lit(begins))
    if rule_id is not None:
        alerts = alerts.where(F.col("rule_id") == F.lit(rule_id))
    if stream is not None:
        alerts = alerts.where(F.col("stream") == F.lit(stream))
    open_ = _find_open(tables, alerts, begins)
    rank = F.array_position(F.array(*[F.lit(name) for name in SEVERITIES]), F.col("severity"))
    return open_.orderBy(rank.desc(), F.col("event_time").desc(), "rule_id", "alert_id").select(*_QUEUE_COLUMNS)


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

    disposition: confirmed, false_positive, benign (true but harmless) or unclear. reviewer: a name; None: the current user.
    note: the reasons. revision: the one that the person has seen; None: the last. A further review of the same alert is one more row, unless
    it repeats the reviewer's last one. Raises ReviewError if there is no such alert or revision, the disposition is none
    of these, or the reviewer's name is empty, and SetupError if the table of an earlier release lacks a column or refuses
    the disposition.
    """
    if disposition not in DISPOSITIONS:
        raise ReviewError(f"a disposition is one of {', '.join(DISPOSITIONS)}, got {disposition!r}")
    reviewer = tables.current_user if reviewer is None else reviewer
    if not reviewer.strip():
        raise ReviewError("a review needs the name of who did it, got an empty reviewer")
    rows = _read_alert_rows(tables, alert_id)
    seen = _find_revision(rows, alert_id, revision)
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
        except WRITE_ERRORS as error:
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


def explain(
    tables: Tables,
    streams: Mapping[str, Stream],
    alert_id: str,
    *,
    days: float | None = None,
    revision: int | None = None,
) -> Explanation:
    """Explains why an alert was raised: its rule in words, and the events that it counted or took, exactly as they were.

    streams: the declared streams by name. revision: the row of the alert; default: its last, whatever the verdict.
    days: the time before the window that the timeline covers; default: some windows' length, at most 30 days. Measures,
    sessions and sequences are computed again from those events: see `Explanation.consistent`. Events that have been
    deleted since count there and are not shown. Raises ReviewError if there is no such alert or revision, its rule's
    version cannot be found, or the events' history is gone.
    """
    tables = tables.holding(*streams.values())
    alert = _find_revision(_read_alert_rows(tables, alert_id), alert_id, revision)
    stream = _find_stream(streams, alert["stream"])
    history = _RuleHistory(tables, stream)
    version = history.find_version(alert["rule_id"], alert["rule_version"])
    since, earliest = picture_span(version.rule, stream, alert, days)
    evidence = _read_evidence(tables, stream, version.rule, alert, earliest, history)
    return explain_alert(evidence, alert, version.row, since)


def explain_event(
    tables: Tables, streams: Mapping[str, Stream], rule_id: str, event_id: str, *,
    version: int | None = None, days: float | None = None,
) -> EventExplanation:  # fmt: skip
    """Explains how a rule judged an event: whether it saw it, its windows, each part of its condition, and what else counted.

    event_id: as text. version: of the rule; default: the one in force when the event came, else the last. A lookback rule is shown as of the
    event's arrival, any other as of the last commit. days: as for `explain`. Raises ReviewError if there is no such rule,
    version or event, or the history is gone.
    """
    tables = tables.holding(*streams.values())
    stream = _find_stream_of_rule(tables, streams, rule_id)
    history = _RuleHistory(tables, stream)
    place = _find_event(tables, stream, event_id)
    log = _read_log(tables, stream, tables.version(stream.name) + 1)
    standing = _find_standing(log, history, rule_id, version, place.arrival)
    found = history.find_version(rule_id, standing.version)
    rule, event = found.rule, place.event
    commit = place.arrival if rule.spec.kind == LOOKBACK else tables.version(stream.name)
    key = {name: to_text(event.columns[name].item(0)) for name in rule.group_by}
    time = to_utc(int(event.times[0]))
    start = time
    if rule.spec.kind == SESSION:
        start = to_utc(int(event.times[0]) - stream.max_session)
    elif isinstance(rule.window, TiledWindow):
        start = to_utc(rule.window.last_start(int(event.times[0])) - rule.window.size)
    row = {
        "rule_id": rule_id, "rule_version": standing.version, "key": key, "arrival": commit, "event_time": time,
        "window_start": start, "window_end": time,
    }  # fmt: skip
    since, earliest = picture_span(rule, stream, row, days)
    evidence = _read_evidence(tables, stream, rule, row, earliest, history)
    at = evidence.find_position(event_id, int(event.times[0]), place.arrival)
    if at is None:
        raise ReviewError(
            f"event {event_id!r} came more than max_future ahead of its commit {place.arrival}, so it counts nowhere; "
            f"table {tables.identifier('late_events')} has it"
        )
    alerts = _read_alerts_about(tables, stream, rule, key, event_id, int(event.times[0]))
    return explain_event_at(evidence, at, commit, standing, found.row, since, alerts)


class _EventPlace(NamedTuple):
    """An event of the table, as a column each of one row, and the commit that brought it."""

    event: Events
    arrival: int


def _find_stream_of_rule(tables: Tables, streams: Mapping[str, Stream], rule_id: str) -> Stream:
    """Finds the stream that the last document of a rule names. Raises ReviewError."""
    known = tables.read("rules").select("rule_id", "version", "document").collect()
    own = sorted((row for row in known if row["rule_id"] == rule_id), key=_rank_version)
    if not own:
        ids = [row["rule_id"] for row in known if row["rule_id"] not in (None, "*")]
        hint = suggest(rule_id, ids, "`lookback rules list` shows the rules")
        raise ReviewError(f"there is no rule {rule_id!r}; {hint}")
    return _find_stream(streams, str(read_document(own[-1]["document"]).get("stream")))


def _find_event(tables: Tables, stream: Stream, event_id: str) -> _EventPlace:
    """Finds the first row of an event that the table ever had. Raises ReviewError."""
    feed = _read_feed(tables, stream.name).where(F.col("_change_type") == "insert")
    rows = _to_arrow(feed.where(F.col(stream.event_id).cast("string") == F.lit(event_id)), stream)
    if not rows.num_rows:
        raise ReviewError(
            f"table {tables.identifier(stream.name)} has no event {event_id!r} and had none; the field {stream.event_id} "
            "names an event"
        )
    events = read_events(rows.drop_columns(["_change_type"]), stream, 0)[0].in_order_of_arrival()
    return _EventPlace(events.take(np.arange(1)), int(events.commits[0]))


def _find_standing(log: list[Row], history: _RuleHistory, rule_id: str, version: int | None, arrival: int) -> Standing:
    """Finds the version of a rule that an event of commit `arrival` met, or says how a chosen one stood then."""
    own = [row for row in log if row["rule_id"] == rule_id and _STATUS_BY_ACTION.get(row["action"], "draft") != "draft"]
    before = [row for row in own if row["arrival"] is None or row["arrival"] < arrival]
    roles = _Lanes(before, history, {"rule_id": rule_id, "rule_version": version}).list_roles(rule_id)
    meant = next((each.version for each in roles if version in (None, each.version)), None)
    if meant is not None or (before and version in (None, before[-1]["version"])):
        last = next((row for row in reversed(before) if row["version"] == meant), before[-1])
        return Standing(int(last["version"]), _STATUS_BY_ACTION[last["action"]], last["arrival"])
    version = history.find_last(rule_id) if version is None else version
    since = next((row["arrival"] for row in own if row["version"] == version), None)
    return Standing(version, "", since)


def _read_alerts_about(
    tables: Tables, stream: Stream, rule: CompiledRule, key: Mapping[str, str | None], event_id: str, time: int
) -> list[dict[str, Any]]:
    """Reads the alerts of a rule about an event: of it, of a window that covers it, or with it as evidence."""
    alerts = tables.read("alerts").where((F.col("stream") == stream.name) & (F.col("rule_id") == rule.spec.rule_id))
    if rule.spec.kind == LOOKBACK:
        about = F.col("event_id") == event_id
    elif rule.spec.kind == SEQUENCE:
        about = (F.col("event_id") == event_id) | F.array_contains("evidence", event_id)
    else:
        about = (F.col("window_start") <= to_timestamp(time)) & (F.col("window_end") > to_timestamp(time))
        about = reduce(and_, [F.col("key")[name].eqNullSafe(F.lit(text)) for name, text in key.items()], about)
    columns = ("alert_id", "revision", "verdict", "rule_version", "mode", "message", "arrival")
    rows = alerts.where(about).orderBy("arrival", "alert_id", "revision").select(*columns)
    return [row.asDict() for row in rows.collect()]


def _read_alert_rows(tables: Tables, alert_id: str) -> list[dict[str, Any]]:
    """Reads the rows of an alert, in order of revision, as dicts with aware times. Raises ReviewError if there are none."""
    rows = tables.read("alerts").where(F.col("alert_id") == F.lit(alert_id)).orderBy("revision").toArrow().to_pylist()
    if not rows:
        raise ReviewError(f"there is no alert {alert_id!r}; `open_queue` and `lookback alerts` list their ids")
    return [{**row, **{name: dict(row[name] or []) for name in ("key", "measures")}} for row in rows]


def _find_revision(rows: list[dict[str, Any]], alert_id: str, revision: int | None) -> dict[str, Any]:
    """Finds the row of a revision of an alert; None: the last. Raises ReviewError if there is no such revision."""
    by_revision = {row["revision"]: row for row in rows}
    if revision is not None and revision not in by_revision:
        raise ReviewError(f"alert {alert_id!r} has no revision {revision}; there are {list(by_revision)}")
    return rows[-1] if revision is None else by_revision[revision]


def _find_stream(streams: Mapping[str, Stream], name: str) -> Stream:
    if name not in streams:
        raise ReviewError(f"the alert is of stream {name!r}, which is not declared; there are {', '.join(streams)}")
    return streams[name]


class _RuleHistory:
    """Every row that the rules table ever held, in the order in which rows apply. Its rules are those of one stream."""

    def __init__(self, tables: Tables, stream: Stream) -> None:
        feed = _read_feed(tables, "rules").where(F.col("_change_type").isin("insert", "update_postimage"))
        self._rows = sorted(feed.collect(), key=lambda row: (row["_commit_version"], _rank_version(row)))
        self._stream = stream
        self._kept: dict[tuple[str, int, int], CompiledRule | None] = {}

    def find_version(self, rule_id: str, version: int) -> _RuleVersion:
        """Finds a version of a rule, as inserted first or as updated since. A NULL version is the highest so far + 1.

        Raises ReviewError if it is neither in the table nor in its history.
        """
        highest, found = 0, None
        for row in self._rows:
            rule = _compile_accepted(row, self._stream) if row["rule_id"] == rule_id else None
            if rule is None:
                continue
            number = highest + 1 if row["version"] is None else int(row["version"])
            highest = max(highest, number)
            if number == version and (found is None or row["_change_type"] != "insert"):
                found = row, rule
        if found is None:
            raise ReviewError(f"version {version} of rule {rule_id!r} is not in the rules table, nor in its history")
        row, rule = found
        columns = {name: value for name, value in row.asDict().items() if not name.startswith("_")}
        return _RuleVersion({**columns, "version": version, "document": dict(rule.spec.document)}, rule)

    def find_last(self, rule_id: str) -> int:
        """Finds the highest version of a rule. Raises ReviewError if no row of it is a rule of the stream."""
        highest = 0
        for row in self._rows:
            if row["rule_id"] == rule_id and _compile_accepted(row, self._stream) is not None:
                highest = max(highest, highest + 1 if row["version"] is None else int(row["version"]))
        if not highest:
            raise ReviewError(f"no version of rule {rule_id!r} is a rule of stream {self._stream.name!r}")
        return highest

    def find_kept(self, rule_id: str, version: int, lane: int = 0) -> CompiledRule | None:
        """Finds a version that kept state; None if it was changed by hand since, so that its rows are not known any more."""
        slot = (rule_id, version, lane)
        if slot not in self._kept:
            try:
                rule = self.find_version(rule_id, version).rule
                self._kept[slot] = compile_rule(rule.spec, self._stream, lane=lane) if lane else rule
            except ReviewError:
                self._kept[slot] = None
        return self._kept[slot]

    def find_quarantined(self, rule_id: str, version: int) -> Any:
        """Finds the version that a quarantined row took out of service; None if the row does not name it."""
        rows = [row for row in self._rows if (row["rule_id"], row["version"]) == (rule_id, version)]
        named = [read_quarantined(row["evidence"]) for row in rows if "evidence" in row]
        return next((each for each in named if each is not None), None)

    def find_advances(self, log: list[Row]) -> list[tuple[int | None, int]]:
        """Finds the `advance` commands in rule_log: (arrival, time in microseconds)."""
        rows = [row for row in self._rows if row["rule_id"] == "*" and row["status"] == "advance"]
        times = {row["version"]: parse_time(read_document(row["document"])["time"]) for row in rows}
        return [(row["arrival"], times[row["version"]]) for row in log if row["action"] == "advance"]


def _rank_version(row: Row) -> int:
    return 2**63 if row["version"] is None else int(row["version"])


def _compile_accepted(row: Row, stream: Stream) -> CompiledRule | None:
    try:
        return compile_rule(read_document(row["document"]), stream)
    except RuleError:
        return None


def _parse_event_id(stream: Stream, text: str) -> int | str:
    return int(text) if stream.fields[stream.event_id].is_integer else text


def _read_evidence(
    tables: Tables, stream: Stream, rule: CompiledRule, alert: Mapping[str, Any], earliest: int, history: _RuleHistory
) -> Evidence:
    """Reads the key's events from `earliest` on that had arrived with the alert's commit, and all that decides which counted."""
    arrival = int(alert["arrival"])
    within = F.col(stream.event_time) >= to_timestamp(earliest)
    # An earlier commit can contain such events only beyond max_future, and those do not count.
    feed = _read_feed(tables, stream.name, earliest - stream.max_future).where(within)
    table = _to_arrow(feed.where(_has_key(stream, rule, alert["key"])), stream)
    inserted, deleted = _select_changes(table, "insert"), _select_changes(table, "delete")
    events, committed = read_events(inserted, stream, 0)
    assert committed is not None
    order = split_future(events, committed, stream)[0].in_order_of_arrival()
    own = order.take(np.flatnonzero(order.commits <= arrival))
    log = _read_log(tables, stream, arrival)
    lanes = _Lanes(log, history, alert)
    return Evidence(
        rule=rule,
        events=own,
        clock=Clock(stream, _read_highs(feed, stream, arrival), history.find_advances(log)),
        activations=lanes.activations,
        resets=_read_resets(tables, stream, rule, alert, history, lanes),
        gone_at=_find_deleting_commits(own, stream, _read_deletions(deleted, stream)),
        earliest=earliest,
    )


@dataclass(frozen=True)
class _CountKey:
    """Finds the events behind the alerts of one key and version of a rule; called by Spark with both as tables."""

    rule: CompiledRule
    clock: Clock
    activations: Sequence[Activation]
    # Versions whose alerts emptied the key's windows, and whether they wait for an absence.
    resetting: Mapping[int, bool]

    def __call__(self, alerts: pa.Table, changes: pa.Table) -> pa.Table:
        """Returns a row for each event behind an alert, and one with NULL for an alert that cannot be reproduced."""
        stream = self.clock.stream
        rows = [{**row, "measures": dict(row["measures"] or [])} for row in alerts.to_pylist()]
        targets = [row for row in rows if row["is_target"]]
        found = _make_table((), ())
        if not targets:
            return found
        changes = changes.drop_columns([_KEY])
        inserted, deleted = _select_changes(changes, "insert"), _select_changes(changes, "delete")
        events, committed = read_events(inserted, stream, 0)
        assert committed is not None
        own = split_future(events, committed, stream)[0].in_order_of_arrival()
        evidence = Evidence(
            rule=self.rule, events=own, clock=self.clock, activations=self.activations, resets=self._list_resets(rows),
            gone_at=_find_deleting_commits(own, stream, _read_deletions(deleted, stream)),
        )  # fmt: skip
        names, ids = list[str](), list[str | None]()
        for alert, counted in zip(targets, find_counted(evidence, targets), strict=True):
            listed = [None] if counted is None else counted
            names += [alert["alert_id"]] * len(listed)
            ids += listed
        return _make_table(names, ids)

    def _list_resets(self, rows: Sequence[Mapping[str, Any]]) -> list[Reset]:
        return [
            _make_reset(row, self.clock.stream, self.resetting[row["rule_version"]])
            for row in rows
            if row["revision"] == 0 and row["rule_version"] in self.resetting and row["event_id"] is not None
        ]


_KEY = "__key"
_COUNTED_ROWS = "alert_id string, event_id string"


def _make_table(names: Sequence[str], ids: Sequence[str | None]) -> pa.Table:
    return pa.table({"alert_id": pa.array(names, pa.string()), "event_id": pa.array(ids, pa.string())})


def find_counted_events(tables: Tables, stream: Stream, alerts: DataFrame) -> DataFrame:
    """Finds the events behind alerts of windows and of sequences, more than `evidence` names: alert_id, event_id.

    alerts: raised rows of the alerts table, at most one revision an alert. The events of their keys are judged anew, as for an
    explanation, each key in a task of Spark's. event_id is NULL once for an alert that cannot be reproduced: its rule's
    version is not known any more, or the history of the events is gone.
    """
    versions = alerts.groupBy("rule_id", "rule_version").agg(F.max("arrival").alias("arrival")).collect()
    history = _RuleHistory(tables, stream)
    found = alerts.limit(0).select("alert_id", "event_id")
    for rule_id, number, arrival in sorted(map(tuple, versions)):
        own = alerts.where((F.col("rule_id") == F.lit(rule_id)) & (F.col("rule_version") == F.lit(number)))
        try:
            rule = history.find_version(rule_id, number).rule
        except ReviewError:
            found = found.unionByName(own.select("alert_id", F.lit(None).cast("string").alias("event_id")))
            continue
        found = found.unionByName(_find_by_key(tables, rule, own, history, number, int(arrival), stream))
    return found


def _find_by_key(
    tables: Tables, rule: CompiledRule, alerts: DataFrame, history: _RuleHistory, version: int, arrival: int, stream: Stream
) -> DataFrame:  # fmt: skip
    rule_id = rule.spec.rule_id
    names, types = list(rule.group_by), stream.fields

    def add_key(rows: DataFrame, values: Mapping[str, Column]) -> DataFrame:
        # Both sides cast from the field's type, so that equal values have equal texts.
        texts = [value.cast(str(types[name])).cast("string").alias(name) for name, value in values.items()]
        text = F.to_json(F.struct(*texts), {"ignoreNullFields": "false"}) if texts else F.lit("")
        return rows.withColumn(_KEY, text)

    feed, log = _read_feed(tables, stream.name), _read_log(tables, stream, arrival)
    lanes = _Lanes(log, history, {"rule_id": rule_id, "rule_version": version})
    columns = (
        "alert_id", "revision", "verdict", "rule_version", "event_id", "event_time", "window_start", "window_end",
        "measures", "evidence", "arrival", "key",
    )  # fmt: skip
    rows = alerts.select(*columns).withColumn("is_target", F.lit(True))
    resetting: dict[int, bool] = {}
    if rule.spec.kind == SEQUENCE:
        others = tables.read("alerts").where((F.col("revision") == 0) & (F.col("rule_id") == F.lit(rule_id)))
        for (number,) in others.select("rule_version").distinct().collect():
            other = history.find_kept(rule_id, number)
            if other is not None and other.spec.reset_on_alert and lanes.is_own(number):
                resetting[number] = other.sequence is not None and other.sequence.absent is not None
        resets = others.where(F.col("rule_version").isin(*resetting) & (F.col("stream") == stream.name))
        rows = rows.unionByName(resets.select(*columns).withColumn("is_target", F.lit(False)))
    keyed = add_key(rows, {name: F.col("key")[F.lit(name)] for name in names}).drop("key")
    changes = add_key(feed.where(F.col("_change_type").isin("insert", "delete")), {name: F.col(name) for name in names})
    concerned = keyed.where("is_target").select(_KEY).distinct()
    changes = changes.join(F.broadcast(concerned), _KEY, "left_semi").select(
        *stream.fields, "_change_type", F.col("_commit_version").alias("arrival"),
        F.unix_micros("_commit_timestamp").alias("committed_at"), _KEY,
    )  # fmt: skip
    clock = Clock(stream, _read_highs(feed, stream, arrival), history.find_advances(log))
    count = _CountKey(rule, clock, lanes.activations, resetting)

    def count_key(alerts: pa.Table, changes: pa.Table) -> pa.Table:
        # Spark tells what to pass by the number of parameters, and would take `self` for one.
        return count(alerts, changes)

    return keyed.groupBy(_KEY).cogroup(changes.groupBy(_KEY)).applyInArrow(count_key, _COUNTED_ROWS)


def _make_reset(row: Mapping[str, Any], stream: Stream, waits: bool) -> Reset:
    """Makes the reset of an alert's first row. waits: whether the rule waits for an absence."""
    due = parse_time(row["event_time"]) if waits else None
    time = parse_time(row["window_start" if waits else "event_time"])
    return Reset(row["arrival"], time, _parse_event_id(stream, row["event_id"]), due)


def _read_resets(
    tables: Tables, stream: Stream, rule: CompiledRule, alert: Mapping[str, Any], history: _RuleHistory, lanes: _Lanes
) -> list[Reset]:
    """Reads the alerts of the rule and key, up to this alert's commit, that emptied the key's windows.

    Versions of a sequence share their state, even if only one of them has `reset_on_alert`.
    """
    if not (rule.spec.reset_on_alert or rule.spec.kind == SEQUENCE):
        return []
    key = [F.col("key")[name].eqNullSafe(F.lit(text)) for name, text in alert["key"].items()]
    same = reduce(and_, key, F.size("key") == len(alert["key"]))
    first = (F.col("revision") == 0) & (F.col("rule_id") == F.lit(alert["rule_id"])) & same
    before = tables.read("alerts").where(first & (F.col("arrival") <= alert["arrival"]))
    columns = ("rule_version", "arrival", "event_id", "event_time", "window_start")
    resets = []
    for row in before.select(*columns).toArrow().to_pylist():
        other = history.find_kept(alert["rule_id"], row["rule_version"])
        if other is None or not other.spec.reset_on_alert or not lanes.is_own(row["rule_version"]):
            continue
        waits = other.sequence is not None and other.sequence.absent is not None
        resets.append(_make_reset(row, stream, waits))
    return resets


def _read_deletions(table: pa.Table, stream: Stream) -> dict[tuple[Any, int], list[int]]:
    """Reads which commits deleted rows, by (id, time) of the row."""
    if not table.num_rows:
        return {}
    events, _ = read_events(table, stream, 0)
    deletions: dict[tuple[Any, int], list[int]] = {}
    for at, event_id in enumerate(events.columns[stream.event_id].to_list()):
        deletions.setdefault((event_id, int(events.times[at])), []).append(int(events.commits[at]))
    return deletions


def _find_deleting_commits(
    events: Events, stream: Stream, deletions: Mapping[tuple[Any, int], list[int]]
) -> Int64s | None:
    """Finds the commit that deleted each event, NOT_DELETED for one that is still there; None if all are."""
    if not deletions:
        return None
    deleting = np.full(len(events), NOT_DELETED, dtype=np.int64)
    for at, event_id in enumerate(events.columns[stream.event_id].to_list()):
        commits = deletions.get((event_id, int(events.times[at])), [])
        deleting[at] = min((commit for commit in commits if commit > events.commits[at]), default=NOT_DELETED)
    return deleting


def _read_highs(feed: DataFrame, stream: Stream, arrival: int) -> dict[int, int]:
    """Reads the highest event time of each commit up to `arrival`; events beyond max_future are left out.

    Events before the feed's first time cannot make later ones late.
    """
    micros = F.unix_micros(stream.event_time)
    counted = micros - F.lit(stream.max_future) <= F.unix_micros("_commit_timestamp")
    rows = feed.where((F.col("_change_type") == "insert") & (F.col("_commit_version") <= arrival) & counted)
    highs = rows.groupBy("_commit_version").agg(F.max(micros)).collect()
    return {int(row[0]): int(row[1]) for row in highs}


def _has_key(stream: Stream, rule: CompiledRule, key: Mapping[str, str | None]) -> Column:
    """Returns the condition that an event has the key, whose texts become values of the fields' types."""
    conditions = [F.lit(True)]
    for name in rule.group_by:
        text = key.get(name)
        value = F.lit(text).cast(str(stream.fields[name]))
        conditions.append(F.col(name).isNull() if text is None else F.col(name) == value)
    return reduce(and_, conditions)


def _to_arrow(rows: DataFrame, stream: Stream) -> pa.Table:
    columns: list[Column | str] = [
        *stream.fields,
        "_change_type",
        F.col("_commit_version").alias("arrival"),
        F.unix_micros("_commit_timestamp").alias("committed_at"),
    ]
    chosen = rows.where(F.col("_change_type").isin("insert", "delete")).select(*columns)
    return _read_or_refuse(chosen.toArrow, stream.name)


def _select_changes(table: pa.Table, kind: str) -> pa.Table:
    is_kind = [value == kind for value in table.column("_change_type").to_pylist()]
    return table.filter(pa.array(is_kind, pa.bool_())).drop_columns(["_change_type"])


def _read_feed(tables: Tables, name: str, since: int | None = None) -> DataFrame:
    """Reads the table's change feed to its last commit, from the first commit or from those made at `since` on."""
    start = {"startingVersion": "0"}
    if since is not None:
        start = {"startingTimestamp": to_utc(since).replace(tzinfo=None).isoformat(sep=" ")}
    return _read_or_refuse(lambda: tables.changes(name, start), name)


def _read_or_refuse(read: Callable[[], _Result], name: str) -> _Result:
    try:
        return read()
    except PySparkException as error:
        raise ReviewError(
            f"the history of table {name!r} cannot be read as it stood: {first_line(error):.300}. "
            "Commits and removed files are kept for delta.logRetentionDuration and delta.deletedFileRetentionDuration."
        ) from error


def _read_log(tables: Tables, stream: Stream, arrival: int) -> list[Row]:
    """Reads the changes of rules up to the alert's commit from rule_log, in the order in which they took effect."""
    actions = [*_STATUS_BY_ACTION, "clear_state", "advance"]
    log = tables.read("rule_log").where((F.col("stream") == stream.name) & F.col("action").isin(actions))
    # The rows that an advance brings name the last commit before it.
    last = F.col("arrival") < arrival + F.when(F.col("action") == "advance", 1).otherwise(0)
    log = log.where(F.col("arrival").isNull() | last)
    in_order = (F.col("arrival").asc_nulls_first(), F.col("batch_id"), F.col("version").asc_nulls_last())
    return log.orderBy(*in_order).collect()


class _Lanes:
    """The rules that were in force after each change, and which versions of an alert's rule shared its state.

    activations: the changes. The version that is explained has lane 0 in them, whatever it had in the stream; a version of
    its rule beside it has lane 1.
    """

    def __init__(self, log: list[Row], history: _RuleHistory, alert: Mapping[str, Any]) -> None:
        self._history, self._rule_id = history, alert["rule_id"]
        self._roles: dict[str, list[Entry]] = {}
        self._lanes: dict[int, int] = {}
        changes: list[tuple[int | None, str, int, int | None]] = []
        for row in log:
            status = _STATUS_BY_ACTION.get(row["action"], "")
            if status == "draft" or row["action"] == "advance":
                continue
            if row["rule_id"] == "*":
                changes.append((row["arrival"], "*", 0, None))
                continue
            before = {each.lane: each.version for each in self._roles.get(row["rule_id"], ())}
            self._change_roles(row, status)
            after = {each.lane: each.version for each in self._roles[row["rule_id"]]}
            lanes = sorted(lane for lane in before | after if before.get(lane) != after.get(lane))
            changes += [(row["arrival"], row["rule_id"], lane, after.get(lane)) for lane in lanes]
        self._own = self._lanes.get(alert["rule_version"], 0)
        self.activations = [self._activate(*change) for change in changes]

    def list_roles(self, rule_id: str) -> list[Entry]:
        """Lists the versions of a rule that are in force in the end, the one in shadow last."""
        return self._roles.get(rule_id, [])

    def is_own(self, version: int) -> bool:
        """Returns whether a version of the alert's rule shared the state of the alert's version."""
        return self._lanes.get(version, self._own) == self._own

    def _change_roles(self, row: Row, status: str) -> None:
        rule_id, version = row["rule_id"], row["version"]
        before = self._roles.get(rule_id, [])
        if status == "quarantined" and before:
            failing = self._history.find_quarantined(rule_id, version)
            left = [each for each in before if each.version != (version - 1 if failing is None else failing)]
        elif status == "retired" and row["message"] and version in {each.version for each in before}:
            # The log names the version that a deletion or a command ended.
            left = [each for each in before if each.version != version]
        else:
            left = fill_role(before, Entry(rule_id, version, status, "", "", version))
        self._roles[rule_id] = [each for each in left if each.is_in_force]
        if rule_id == self._rule_id:
            self._lanes.update({each.version: each.lane for each in self._roles[rule_id]})

    def _activate(self, arrival: int | None, rule_id: str, lane: int, version: int | None) -> Activation:
        lane = lane ^ self._own if rule_id == self._rule_id else lane
        rule = None if version is None else self._history.find_kept(rule_id, version, lane)
        return Activation(arrival, f"{rule_id} beside" if lane else rule_id, rule)

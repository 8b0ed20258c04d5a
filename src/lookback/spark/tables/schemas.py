"""The columns and comments of the product's tables. Times are UTC microseconds; ids of events are kept as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DecimalType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from lookback.core.streams import metrics
from lookback.core.streams.fields import POSITION

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream

_STRING, _LONG, _TIME = StringType(), LongType(), TimestampType()
_TEXTS = MapType(_STRING, _STRING, valueContainsNull=True)


def _make_column(name: str, type_: DataType, comment: str, *, required: bool = False) -> StructField:
    return StructField(name, type_, nullable=not required, metadata={"comment": comment})


# Every column may be NULL, so that mistakes are logged as rejected instead of refused by the table.
RULES = StructType(
    [
        _make_column("rule_id", _STRING, "Lower-case letters, digits, '.', '_' and '-'; '*' carries commands"),
        _make_column("version", _LONG, "The last row by (commit, version) is in force; NULL: the highest so far + 1"),
        _make_column("status", _STRING, "draft, shadow, active, paused, retired or quarantined"),
        _make_column("document", _STRING, "The rule document, JSON"),
        _make_column("author", _STRING, "Who wrote this version"),
        _make_column("comment", _STRING, "Why"),
        _make_column("changed_at", _TIME, "When it was written"),
        _make_column("approved_by", _STRING, "Who approved this version"),
        _make_column(
            "evidence",
            _STRING,
            "JSON: what was known when the version was activated; in a quarantined row, the version that failed",
        ),
    ]
)

REJECTED_EVENTS = StructType(
    [
        _make_column("stream", _STRING, "The stream of the ingest", required=True),
        _make_column(
            "raw",
            _STRING,
            "The raw row: a line, its columns as JSON, or a record's value; NULL for an unreadable file or a record "
            "without a value",
        ),
        _make_column(
            "reason",
            _STRING,
            "Every field that could not be used, with its value; or why the file cannot be read",
            required=True,
        ),
        _make_column("source", _STRING, "The source file, or kafka:TOPIC/PARTITION/OFFSET"),
        _make_column("ingested_at", _TIME, "When it was rejected", required=True),
        _make_column(
            "read_as",
            _STRING,
            "How it was read, as JSON, for a retry: format, options, columns; for a record also key, time, headers",
        ),
        _make_column("position", _LONG, "Position as in the events table; NULL for an unreadable file"),
    ]
)

ALERTS = StructType(
    [
        _make_column("alert_id", _STRING, "32 hex digits; revisions of one alert share it", required=True),
        _make_column("revision", IntegerType(), "0 for the first row of an alert", required=True),
        _make_column("verdict", _STRING, "raised, suppressed or retracted", required=True),
        _make_column("rule_id", _STRING, "The rule", required=True),
        _make_column("rule_version", _LONG, "Its version in force", required=True),
        _make_column("mode", _STRING, "active or shadow", required=True),
        _make_column("severity", _STRING, "info, low, medium, high or critical", required=True),
        _make_column("stream", _STRING, "The stream", required=True),
        _make_column("key", _TEXTS, "group_by field -> value, exact text"),
        _make_column(
            "event_id", _STRING, "The triggering event; NULL for windows; for absence the event that started the wait"
        ),
        _make_column("event_time", _TIME, "Its time; for a window its end; for absence when it was due", required=True),
        _make_column("window_start", _TIME, "First time covered, included", required=True),
        _make_column(
            "window_end",
            _TIME,
            "Lookback, sequence: last time covered, included; other windows: excluded",
            required=True,
        ),
        _make_column("window_complete", BooleanType(), "false: the window begins before the data the rule has seen"),
        _make_column("measures", _TEXTS, "measure -> value, exact text"),
        _make_column("message", _STRING, "The rule's message, filled in"),
        _make_column("evidence", ArrayType(_STRING), "Sequence: ids of the events, at most 100"),
        _make_column(
            "arrival", _LONG, "Commit of the stream's table whose events or watermark caused this row", required=True
        ),
        _make_column("decided_at", _TIME, "When the row was created", required=True),
        _make_column("entity", _STRING, "The key field that the alert is about; NULL if the rule has none"),
        _make_column("entity_id", _STRING, "Its value, exact text"),
        _make_column("score", _LONG, "What the alert adds to the risk of its entity, from the rule"),
        _make_column(
            "change",
            IntegerType(),
            "1: with this row the alert begins to stand, raised or suppressed; -1: it ceases to; 0: it stood before",
            required=True,
        ),
        _make_column(
            "queue",
            BooleanType(),
            "false: the rule only reports, so the alert is not in the queue",
            required=True,
        ),
    ]
)

LATE_EVENTS = StructType(
    [
        _make_column("stream", _STRING, "The stream", required=True),
        _make_column("event_id", _STRING, "The event", required=True),
        _make_column("event_time", _TIME, "Its time", required=True),
        _make_column("arrival", _LONG, "Its commit of the stream's table", required=True),
        _make_column(
            "late_by_us", _LONG, "Watermark - event time, microseconds; negative: beyond max_future", required=True
        ),
        _make_column("action", _STRING, "evaluated, recorded or discarded", required=True),
    ]
)

RULE_LOG = StructType(
    [
        _make_column("stream", _STRING, "The stream whose evaluation wrote the row", required=True),
        _make_column("rule_id", _STRING, "The rule_id of the row in rules"),
        _make_column("version", _LONG, "Its version"),
        _make_column(
            "action",
            _STRING,
            "activated, paused, retired, rejected, failed, quarantined, advance, declared, session_closed, commit_cut, "
            "begun_afresh ...",
            required=True,
        ),
        _make_column("message", _STRING, "What happened and what to do"),
        _make_column("batch_id", _LONG, "The micro-batch in which it happened"),
        _make_column("arrival", _LONG, "Last commit of the stream's table evaluated before; NULL before the first"),
        _make_column("logged_at", _TIME, "When the batch was logged; each later than the one before", required=True),
        _make_column("rules_commit", _LONG, "The commit of rules with the row that was obeyed or rejected, else NULL"),
        _make_column("position", _LONG, "Its place in the order in which the batch took effect, from 0"),
        _make_column(
            "decision",
            _STRING,
            "What was decided, for programs. advance: the watermark; declared: the settings; activated, shadowed: "
            "with_history or without_history; retired: deleted, moved or retire_all; rejected: gate; else NULL",
        ),
    ]
)

REVIEWS = StructType(
    [
        _make_column("alert_id", _STRING, "The alert", required=True),
        _make_column(
            "disposition", _STRING, "confirmed, false_positive, benign (true but harmless) or unclear", required=True
        ),
        _make_column("revision", IntegerType(), "The reviewed revision of the alert; NULL if unknown"),
        _make_column("reviewer", _STRING, "Who reviewed it"),
        _make_column("note", _STRING, "What was found"),
        _make_column("reviewed_at", _TIME, "When", required=True),
    ]
)

LABELS = StructType(
    [
        _make_column("stream", _STRING, "The stream", required=True),
        _make_column("event_id", _STRING, "The event, as exact text", required=True),
        _make_column("positive", BooleanType(), "Whether the event was what rules look for", required=True),
        _make_column("label", _STRING, "The reason in one word: fraud, chargeback, benign ..."),
        _make_column("labelled_at", _TIME, "When it became known; the latest row of an event counts", required=True),
        _make_column("source", _STRING, "Where it comes from: a file, a system"),
        _make_column("author", _STRING, "Who wrote it"),
    ]
)

SNOOZES = StructType(
    [
        _make_column("rule_id", _STRING, "The rule; NULL: any"),
        _make_column("key", _TEXTS, "group_by field -> value, exact text; all keys with these values; NULL: any key"),
        _make_column("from", _TIME, "When it begins, by the clock", required=True),
        _make_column("until", _TIME, "When it ends, excluded", required=True),
        _make_column("reason", _STRING, "Why", required=True),
        _make_column("author", _STRING, "Who wrote it"),
    ]
)

LISTS = StructType(
    [
        _make_column("list", _STRING, "The list's name, as in in_list(field, 'name')", required=True),
        _make_column("value", _STRING, "A value, as cast(field as string) writes it, or a CIDR range", required=True),
        _make_column("reason", _STRING, "Why it is on the list"),
        _make_column("author", _STRING, "Who added it"),
        _make_column("added_at", _TIME, "When"),
        _make_column("expires_at", _TIME, "Events from this time on are not on the list; NULL: never"),
        _make_column("kind", _STRING, "cidr: the list holds ranges of addresses; NULL: plain values"),
    ]
)

NOTIFICATIONS = StructType(
    [
        _make_column("alert_id", _STRING, "The alert; NULL if status is began or settled"),
        _make_column("revision", IntegerType(), "Its revision"),
        _make_column("receiver", _STRING, "The receiver, as conf/notifiers.yml names it", required=True),
        _make_column(
            "status",
            _STRING,
            "sent, failed (will be retried), given_up; began: the receiver gets alerts from then on; settled: all "
            "of the stream's alerts decided before then are done",
            required=True,
        ),
        _make_column("attempts", IntegerType(), "Number of attempts so far"),
        _make_column("error", _STRING, "Why it failed"),
        _make_column("sent_at", _TIME, "When it was attempted", required=True),
        _make_column("stream", _STRING, "The alert's stream; NULL if status is began"),
    ]
)


INGESTS = StructType(
    [
        _make_column("stream", _STRING, "The stream that received the events", required=True),
        _make_column("offered", _LONG, "Rows found: ingested + duplicates + rejected", required=True),
        _make_column("ingested", _LONG, "Rows that became events", required=True),
        _make_column("duplicates", _LONG, "Rows whose event already existed", required=True),
        _make_column("rejected", _LONG, "Rows that could not be used, and files that could not be read", required=True),
        _make_column("commits", _LONG, "Commits to the events table", required=True),
        _make_column("first_ingested_at", _TIME, "ingested_at of the first commit; NULL if there is none"),
        _make_column("ended_at", _TIME, "When the round was complete", required=True),
    ]
)


def _make_metrics_column(column: metrics.MetricColumn) -> StructField:
    """Returns a column of the metrics table. Maps types itself because Spark can parse them only in a session."""
    type_ = metrics.FIELDS[column.name]
    types: dict[str, DataType] = {"string": _STRING, "bigint": _LONG, "timestamp": _TIME}
    spark_type = DecimalType(type_.precision, type_.scale) if type_.is_decimal else types[type_.name]
    required = column.name in (metrics.METRICS_ID, metrics.MEASURED_AT, "stream")
    return _make_column(column.name, spark_type, column.comment, required=required)


_COUNTS = StructType([StructField(name, _LONG) for name in ("evaluated", "matched", "suppressed", "failed")])
# The columns that rules read, the counts by rule, the remembered keys, and the ingested_at of every events table.
METRICS = StructType(
    [
        *map(_make_metrics_column, metrics.COLUMNS),
        _make_column(metrics.BY_RULE, MapType(_STRING, _COUNTS), "The same counts by rule; only rules with counts"),
        _make_column(
            "remembered",
            _LONG,
            "Kept outside the rows of state: keys that suppress holds back or an alert has reset, and verdicts and "
            "events that may still be revised. Expired ones may be counted for a while; NULL before the first batch",
        ),
        _make_column("ingested_at", _TIME, "When the row was written"),
    ]
)

PRODUCT_TABLES: dict[str, StructType] = {
    "rejected_events": REJECTED_EVENTS,
    "rules": RULES,
    "alerts": ALERTS,
    "late_events": LATE_EVENTS,
    "rule_log": RULE_LOG,
    "reviews": REVIEWS,
    metrics.TABLE: METRICS,
    "notifications": NOTIFICATIONS,
    "ingests": INGESTS,
    "labels": LABELS,
    "snoozes": SNOOZES,
    "lists": LISTS,
}
# Default values of columns, as SQL.
DEFAULTS: dict[str, dict[str, str]] = {
    "labels": {"labelled_at": "current_timestamp()"},
    "snoozes": {"from": "current_timestamp()"},
    "lists": {"added_at": "current_timestamp()"},
}


# The purpose of each table of the product.
COMMENTS = {
    "rejected_events": "Rows and files that ingest could not use, raw, with every reason",
    "rules": "Versions of rules; append-only, applied by evaluations within seconds. rule_id * carries commands",
    "alerts": "One alert per rule and triggering event or window; its revisions are further rows",
    "late_events": "Events below the watermark that a rule needs, and events beyond max_future, with the action taken",
    "rule_log": "When each change of a rule took effect, which rows of rules were rejected and why, and what failed",
    "reviews": "Reviewers' verdicts on alerts; append-only",
    metrics.TABLE: "Work and backlog of each evaluation; best effort, at most a row every 30 seconds",
    "notifications": "Alerts sent to receivers, and failed attempts; a sent alert is never sent again",
    "ingests": "How many rows each round of ingest added, skipped as duplicates or rejected; a killed round has no row",
    "labels": "Which events were what rules look for, as known later; append-only. A label overrides a review",
    "lists": "Values that rules look up with in_list(field, 'name'); running evaluations apply changes within seconds",
    "snoozes": "Alerts that the queue and notifications hide for a while: by rule, by key, or both",
}
# The columns that identify a row, not enforced. Tables that may contain equal rows have none.
KEYS: dict[str, tuple[str, ...]] = {
    "alerts": ("alert_id", "revision"),
    "late_events": ("stream", "event_id", "arrival"),
    metrics.TABLE: (metrics.METRICS_ID,),
}


def describe_events_table(stream: Stream) -> str:
    """Returns the comment on the events table of a stream."""
    return f"Events of the stream {stream.name}, as ingested; a DELETE removes rows from the windows of rules"


def make_events_schema(stream: Stream) -> StructType:
    """Returns the columns of a stream's events table: the declared fields in order, then position and ingested_at.

    Id and time are NOT NULL.
    """
    required = (stream.event_id, stream.event_time)
    fields = [
        _make_column(name, DataType.fromDDL(str(type_)), _describe_field(stream, name), required=name in required)
        for name, type_ in stream.fields.items()
    ]
    # Nullable, so that external writers can omit it.
    stamp = _make_column(
        "ingested_at", _TIME, "One stamp for all rows of a commit, later than those of every earlier commit"
    )
    place = _make_column(
        POSITION,
        _LONG,
        "Position in its round of ingest: file * 2^40 + row, or topic * 2^40 + record, from 0",
    )
    return StructType([*fields, *([place] if POSITION in stream.order_columns else []), stamp])


def _describe_field(stream: Stream, name: str) -> str:
    if name in stream.comments:
        return stream.comments[name]
    roles = {stream.event_id: "Identifies the event", stream.event_time: "When it happened"}
    if name in roles:
        return roles[name]
    for lookup in stream.lookups:
        if name in lookup.fields:
            return f"Looked up by ingest in {lookup.table}, by {', '.join(lookup.on)}"
        if name == lookup.version_field:
            return f"The version of table {lookup.table} that ingest used for the look-up"
    expression = stream.columns.get(name)
    return f"Computed by ingest: {expression}" if expression else "As in the source"

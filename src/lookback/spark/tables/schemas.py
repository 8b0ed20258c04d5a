"""The columns and comments of the product's tables. Times are UTC microseconds; ids of events are kept as text."""

from __future__ import annotations

import re
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
# Spark can parse types only in a session.
_TYPES: dict[str, DataType] = {
    "string": _STRING,
    "bigint": _LONG,
    "int": IntegerType(),
    "timestamp": _TIME,
    "boolean": BooleanType(),
    "texts": MapType(_STRING, _STRING, valueContainsNull=True),
    "list": ArrayType(_STRING),
}


def _make_column(name: str, type_: DataType, comment: str, *, required: bool = False) -> StructField:
    return StructField(name, type_, nullable=not required, metadata={"comment": comment})


def _read_columns(text: str) -> StructType:
    """Reads columns from lines of name, type and comment. A type with `!` is NOT NULL; an indented line continues one."""
    rows = (line.split(None, 2) for line in re.sub(r"\n {8,}", " ", text).strip().splitlines())
    return StructType(
        [
            _make_column(name, _TYPES[type_.rstrip("!")], comment, required=type_.endswith("!"))
            for name, type_, comment in rows
        ]
    )


# Every column may be NULL, so that mistakes are logged as rejected instead of refused by the table.
RULES = _read_columns("""
    rule_id      string     Lower-case letters, digits, '.', '_' and '-'; '*' carries commands
    version      bigint     The last row by (commit, version) is in force; NULL: the highest so far + 1
    status       string     draft, shadow, active, paused, retired or quarantined
    document     string     The rule document, JSON
    author       string     Who wrote this version
    comment      string     Why
    changed_at   timestamp  When it was written
    approved_by  string     Who approved this version
    evidence     string     JSON: what was known when the version was activated; in a quarantined row, the version that
        failed
""")

REJECTED_EVENTS = _read_columns("""
    stream       string!     The stream of the ingest
    raw          string      The raw row: a line, its columns as JSON, or a record's value; NULL for an unreadable file
        or a record without a value
    reason       string!     Every field that could not be used, with its value; or why the file cannot be read
    source       string      The source file, or kafka:TOPIC/PARTITION/OFFSET
    ingested_at  timestamp!  When it was rejected
    read_as      string      How it was read, as JSON, for a retry: format, options, columns; for a record also key,
        time, headers
    position     bigint      Position as in the events table; NULL for an unreadable file
""")

ALERTS = _read_columns("""
    alert_id         string!     32 hex digits; revisions of one alert share it
    revision         int!        0 for the first row of an alert
    verdict          string!     raised, suppressed or retracted
    rule_id          string!     The rule
    rule_version     bigint!     Its version in force
    mode             string!     active or shadow
    severity         string!     info, low, medium, high or critical
    stream           string!     The stream
    key              texts       group_by field -> value, exact text
    event_id         string      The triggering event; NULL for windows; for absence the event that started the wait
    event_time       timestamp!  Its time; for a window its end; for absence when it was due
    window_start     timestamp!  First time covered, included
    window_end       timestamp!  Lookback, sequence: last time covered, included; other windows: excluded
    window_complete  boolean     false: the window begins before the data the rule has seen
    measures         texts       measure -> value, exact text
    message          string      The rule's message, filled in
    evidence         list        Sequence: ids of the events, at most 100
    arrival          bigint!     Commit of the stream's table whose events or watermark caused this row
    decided_at       timestamp!  When the row was created
    entities         texts       Whom the alert is about: field -> value, exact text
    score            bigint      What the alert adds to the risk of each entity, from the rule
    change           int!        1: with this row the alert begins to stand, raised or suppressed; -1: it ceases to; 0:
        it stood before
    queue            boolean!    false: the rule only reports, so the alert is not in the queue
    tags             list        The tags of the rule's version
""")

LATE_EVENTS = _read_columns("""
    stream      string!     The stream
    event_id    string!     The event
    event_time  timestamp!  Its time
    arrival     bigint!     Its commit of the stream's table
    late_by_us  bigint!     Watermark - event time, microseconds; negative: beyond max_future
    action      string!     evaluated, recorded or discarded
""")

RULE_LOG = _read_columns("""
    stream        string!     The stream whose evaluation wrote the row
    rule_id       string      The rule_id of the row in rules
    version       bigint      Its version
    action        string!     activated, paused, retired, rejected, failed, quarantined, advance, declared,
        session_closed, commit_cut, begun_afresh ...
    message       string      What happened and what to do
    batch_id      bigint      The micro-batch in which it happened
    arrival       bigint      Last commit of the stream's table evaluated before; NULL before the first
    logged_at     timestamp!  When the batch was logged; each later than the one before
    rules_commit  bigint      The commit of rules with the row that was obeyed or rejected, else NULL
    position      bigint      Its place in the order in which the batch took effect, from 0
    decision      string      What was decided, for programs. advance: the watermark; declared: the settings; activated,
        shadowed: with_history or without_history; retired: deleted, moved or retire_all; rejected: gate; else NULL
""")

REVIEWS = _read_columns("""
    alert_id     string!     The alert
    disposition  string!     confirmed, false_positive, benign (true but harmless) or unclear
    revision     int         The reviewed revision of the alert; NULL if unknown
    reviewer     string      Who reviewed it
    note         string      What was found
    reviewed_at  timestamp!  When
""")

LABELS = _read_columns("""
    stream       string!     The stream
    event_id     string!     The event, as exact text
    positive     boolean!    Whether the event was what rules look for
    label        string      The reason in one word: fraud, chargeback, benign ...
    labelled_at  timestamp!  When it became known; the latest row of an event counts
    source       string      Where it comes from: a file, a system
    author       string      Who wrote it
""")

SNOOZES = _read_columns("""
    rule_id  string      The rule; NULL: any
    key      texts       group_by field -> value, exact text; all keys with these values; NULL: any key
    from     timestamp!  When it begins, by the clock
    until    timestamp!  When it ends, excluded
    reason   string!     Why
    author   string      Who wrote it
""")

LISTS = _read_columns("""
    list        string!    The list's name, as in in_list(field, 'name')
    value       string!    A value, as cast(field as string) writes it, or a CIDR range
    reason      string     Why it is on the list
    author      string     Who added it
    added_at    timestamp  When
    expires_at  timestamp  Events from this time on are not on the list; NULL: never
    kind        string     cidr: the list holds ranges of addresses; NULL: plain values
""")

NOTIFICATIONS = _read_columns("""
    alert_id  string      The alert; NULL if status is began or settled
    revision  int         Its revision
    receiver  string!     The receiver, as conf/notifiers.yml names it
    status    string!     sent, failed (will be retried), given_up; began: the receiver gets alerts from then on;
        settled: all of the stream's alerts decided before then are done
    attempts  int         Number of attempts so far
    error     string      Why it failed
    sent_at   timestamp!  When it was attempted
    stream    string      The alert's stream; NULL if status is began
""")


INGESTS = _read_columns("""
    stream             string!     The stream that received the events
    offered            bigint!     Rows found: ingested + duplicates + rejected
    ingested           bigint!     Rows that became events
    duplicates         bigint!     Rows whose event already existed
    rejected           bigint!     Rows that could not be used, and files that could not be read
    commits            bigint!     Commits to the events table
    first_ingested_at  timestamp   ingested_at of the first commit; NULL if there is none
    ended_at           timestamp!  When the round was complete
    files              texts       The files of a path that was ingested once, by name, with their times of change
        (milliseconds since 1970); NULL for other rounds, after rejected rows, and if there are too many
""")


def _make_metrics_column(column: metrics.MetricColumn) -> StructField:
    type_ = metrics.FIELDS[column.name]
    spark_type = DecimalType(type_.precision, type_.scale) if type_.is_decimal else _TYPES[type_.name]
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
        _make_column(name, DataType.fromDDL(type_), _describe_field(stream, name), required=name in required)
        for name, type_ in stream.table_columns.items()
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

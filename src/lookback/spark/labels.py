"""Imports and reads labels, which say whether an event is what rules look for, and when that became known.

A label is a row of the table `labels`, or a person's review of an alert. Both are read as of a moment, so that later
knowledge does not leak into an earlier figure.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pyspark.errors import PySparkException
from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812

from lookback.core.errors import SetupError
from lookback.core.streams.alerts import MAX_EVIDENCE_IDS
from lookback.core.streams.declaration import Stream
from lookback.core.values.texts import quote_identifier
from lookback.core.values.times import parse_time
from lookback.core.values.types import BOOLEAN, STRING, TIMESTAMP
from lookback.spark.explaining.counted import find_counted_events
from lookback.spark.ingest.fields import BLOCK, FILE, RAW, REASON, ROW
from lookback.spark.ingest.filerows import Files
from lookback.spark.ingest.rejected import Rejection, count_rejections
from lookback.spark.ingest.sources import Source
from lookback.spark.tables.lakehouse import keep
from lookback.spark.tables.sqltexts import to_timestamp

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from lookback.spark.tables.lakehouse import Tables

TABLE = "labels"
# The columns to read from a file if no option names another.
_EVENT_ID, _POSITIVE, _LABEL, _AT, _SOURCE = "event_id", "positive", "label", "labelled_at", "source"
_COLUMNS = (_EVENT_ID, _POSITIVE, _LABEL, _AT, _SOURCE)
# The column with the outcome of a row of a file.
_OUTCOME = "__outcome"
_UNKNOWN, _DUPLICATE, _REJECTED, _NEW = "unknown", "duplicate", "rejected", "new"


def read_labels(
    tables: Tables, stream: Stream, as_of: dt.datetime | None = None, *, streams: Mapping[str, Stream] | None = None
) -> DataFrame:
    """Reads the labels of a stream's events as known at a moment, one row per labelled event.

    If `labels` has several rows for an event, the latest by labelled_at counts; on a tie a positive one. An event
    without a row gets its label from reviews: the last review of each alert labels the triggering event and all events
    that the sequence matched, including those that `evidence` does not name. confirmed is positive; false_positive and
    benign are negative; unclear gives no label. A review of a window labels no event.

    Args:
        tables: The tables of the place.
        stream: The stream of the events.
        as_of: Aware time of the moment; None for now.
        streams: Every declared stream by name, since a version may have moved a rule to another stream; None if there
            is only one.

    Returns:
        The columns event_id (exact text), positive, label, labelled_at and source.
    """
    given = {"stream": stream.name, "as_of": as_of or dt.datetime.now(dt.timezone.utc)}
    seen = _add_unnamed(tables, stream, streams or {}, tables.ask("seen_alerts", **given))
    return tables.ask("labelled_events", {"seen_alerts": seen}, **given).select(*_COLUMNS)


def _add_unnamed(tables: Tables, stream: Stream, streams: Mapping[str, Stream], seen: DataFrame) -> DataFrame:
    """Adds the events of reviewed sequence alerts that `evidence` does not name to the answer to `seen_alerts`."""
    full = seen.where(F.size("evidence") >= MAX_EVIDENCE_IDS)
    rows = tables.ask("numbered_alerts").where("verdict = 'raised'")
    rows = rows.join(full, ["stream", "alert_id", "revision", "evaluation"], "left_semi")
    if rows.isEmpty():
        return seen
    # An alert that cannot be reproduced labels only the events that it names.
    matched = find_counted_events(tables, {**streams, stream.name: stream}, rows).where("event_id IS NOT NULL")
    unnamed = full.drop("event_id", "evidence").join(matched, "alert_id")
    return seen.unionByName(unnamed, allowMissingColumns=True)


@dataclass(frozen=True)
class LabelReport:
    """Counts of the rows offered to an import of labels, by outcome.

    `unknown_events` counts rows about events that are missing from the stream's table; these are not stored.
    `duplicates` counts rows that repeat a stored label.
    """

    stream: str
    offered: int
    stored: int
    unknown_events: int
    duplicates: int
    rejected: int
    seconds: float
    rejections: tuple[Rejection, ...] = ()

    def __str__(self) -> str:
        return (
            f"labels of {self.stream}: {self.offered:,} offered = {self.stored:,} stored + {self.unknown_events:,} of unknown "
            f"events + {self.duplicates:,} duplicates + {self.rejected:,} rejected; in {self.seconds:.1f} s"
        )


class _FileColumns(NamedTuple):
    """The columns of a file of labels; None for an optional column that the file lacks."""

    event_id: str
    positive: str
    at: str | None
    label: str | None
    source: str | None

    def name_in_order(self) -> tuple[str | None, ...]:
        """Returns the names in the order of the table's columns."""
        return self.event_id, self.positive, self.label, self.at, self.source


def import_labels(
    tables: Tables,
    stream: Stream,
    path: str | Path,
    *,
    event_id: str | None = None,
    positive: str | None = None,
    at: str | None = None,
    format: str | None = None,
    options: Mapping[str, str] | None = None,
    author: str | None = None,
) -> LabelReport:
    """Appends labels of a stream's events from the files at `path` to the table `labels`, in one commit.

    Importing the same file again stores nothing. The files may also have the columns `label` and `source`.

    Args:
        tables: The tables of the place.
        stream: The stream of the events.
        path: The files.
        event_id: Column of the event's id; default: `event_id`, or the name of the stream's own id.
        positive: Boolean column; default: `positive`.
        at: Column of the time when the label became known; default: `labelled_at`, or if missing the time of the
            import.
        format: parquet, csv or json; default: from the file names.
        options: Spark's reader options.
        author: Default: the current user.

    Raises:
        SetupError: If the files cannot be read or lack a column.
    """
    started, now = time.monotonic(), parse_time(dt.datetime.now(dt.timezone.utc))
    tables = tables.holding(stream)
    tables.require(stream)
    tables.require_table(TABLE)
    # A declaration without a `source`: its format and options would be those of events.
    bare = _make_file_stream(stream, _FileColumns(_EVENT_ID, _POSITIVE, None, None, None))
    source = Source.find(tables.spark, bare, str(path), format, options)
    columns = _find_columns(tables, source, stream, {"--event-id": event_id, "--positive": positive, "--at": at})
    checked, offered = Files(tables.spark, source, _make_file_stream(stream, columns)).read_kept()
    judged = keep(_add_outcomes(tables, stream, _select_columns(checked, columns), now))
    try:
        counts = {row[_OUTCOME]: row["count"] for row in judged.groupBy(_OUTCOME).count().collect()}
        rejections: tuple[Rejection, ...] = ()
        if counts.get(_REJECTED):
            refused = judged.where(F.col(_OUTCOME) == _REJECTED)
            rejections = count_rejections(refused, F.col(REASON), F.col(RAW), F.col(FILE))
        if counts.get(_NEW):
            author = tables.current_user if author is None else author
            tables.append(_make_rows(judged.where(F.col(_OUTCOME) == _NEW), stream, author, now), TABLE)
    finally:
        with suppress(PySparkException):
            judged.unpersist()
            checked.unpersist()
    new, unknown, duplicates, rejected = (counts.get(each, 0) for each in (_NEW, _UNKNOWN, _DUPLICATE, _REJECTED))
    seconds = time.monotonic() - started
    return LabelReport(stream.name, offered, new, unknown, duplicates, rejected, seconds, rejections)


def _make_rows(new: DataFrame, stream: Stream, author: str, now: int) -> DataFrame:
    """Makes rows of the table `labels`. Labels without a time get the time `now`, in microseconds."""
    file_name = F.regexp_extract(FILE, "[^/]*$", 0)
    return new.select(
        F.lit(stream.name).alias("stream"),
        _EVENT_ID,
        _POSITIVE,
        _LABEL,
        F.coalesce(_AT, to_timestamp(now)).alias(_AT),
        F.coalesce(_SOURCE, file_name).alias(_SOURCE),
        F.lit(author).alias("author"),
    )


def _find_columns(tables: Tables, source: Source, stream: Stream, given: Mapping[str, str | None]) -> _FileColumns:
    """Finds the columns of the files. `given` has column names by option. Raises SetupError if a column is missing."""
    existing = Files(tables.spark, source, stream).list_columns()
    defaults = {"--event-id": (_EVENT_ID, stream.event_id), "--positive": (_POSITIVE,), "--at": (_AT,)}
    found: dict[str, str | None] = {}
    for option, names in defaults.items():
        name = given[option]
        choice = [each for each in ((name,) if name else names) if each.lower() in existing]
        if not choice and (name or option != "--at"):
            wanted = " or ".join(repr(each) for each in dict.fromkeys((name,) if name else names))
            raise SetupError(
                f"{source.path}: column {wanted} is missing; the columns are {', '.join(sorted(existing))}. "
                f"Choose one with {option}"
            )
        found[option] = choice[0] if choice else None
    taken = {each.lower() for each in found.values() if each}
    label, origin = (name if name in existing and name not in taken else None for name in (_LABEL, _SOURCE))
    return _FileColumns(str(found["--event-id"]), str(found["--positive"]), found["--at"], label, origin)


def _make_file_stream(stream: Stream, columns: _FileColumns) -> Stream:
    """Makes the declaration with which ingest reads files of labels; its fields are the files' columns."""
    types = (stream.fields[stream.event_id], BOOLEAN, STRING, TIMESTAMP, STRING)
    fields = {name: type_ for name, type_ in zip(columns.name_in_order(), types, strict=True) if name is not None}
    # The id also serves as event_time: it is the only column that no row may lack.
    return Stream(name=TABLE, event_id=columns.event_id, event_time=columns.event_id, fields=fields)


def _select_columns(checked: DataFrame, columns: _FileColumns) -> DataFrame:
    """Selects the columns of the table `labels`, and the REASON why a row is unusable."""
    types = ("string", "boolean", "string", "timestamp", "string")
    selected = [
        (F.lit(None) if name is None else F.col(quote_identifier(name))).cast(type_).alias(column)
        for column, name, type_ in zip(_COLUMNS, columns.name_in_order(), types, strict=True)
    ]
    reason = F.coalesce(REASON, F.when(F.col(_POSITIVE).isNull(), F.lit(f"{columns.positive} is NULL")))
    rows = checked.select(*selected, REASON, RAW, FILE, BLOCK, ROW)
    return rows.withColumn(REASON, reason)


def _add_outcomes(tables: Tables, stream: Stream, rows: DataFrame, now: int) -> DataFrame:
    """Adds the outcome of each row: new, unknown event, duplicate, or rejected with its REASON.

    `now` is the time of the import in microseconds.
    """
    usable = F.col(REASON).isNull()
    label = F.to_json(F.struct(_POSITIVE, _LABEL))
    same_time = Window.partitionBy(usable, _EVENT_ID, _AT)
    rows = rows.withColumn("__differ", F.size(F.collect_set(label).over(same_time)) > 1)
    contradicts = F.concat(
        F.lit("event '"), F.col(_EVENT_ID), F.lit("' has two different labels with the same time; keep one of them")
    )
    rows = rows.withColumn(REASON, F.when(usable & F.col("__differ"), contradicts).otherwise(F.col(REASON)))
    same = Window.partitionBy(usable, _EVENT_ID, _AT, _POSITIVE, _LABEL).orderBy(FILE, BLOCK, ROW)
    rows = rows.withColumn("__nth", F.row_number().over(same))

    ids = tables.read_events(stream.name).select(F.col(stream.event_id).cast("string").alias(_EVENT_ID)).distinct()
    rows = rows.join(ids.withColumn("__known", F.lit(True)), _EVENT_ID, "left")
    stored = tables.read(TABLE).where(F.col("stream") == stream.name)
    one = F.struct(_AT, _POSITIVE, _LABEL)
    by_event = stored.groupBy(_EVENT_ID).agg(
        F.max(F.when(F.col(_AT) <= to_timestamp(now), one)).alias("__last"), F.collect_set(one).alias("__all")
    )
    rows = rows.join(by_event, _EVENT_ID, "left")
    repeats = F.when(
        F.col(_AT).isNull(),
        (F.col("__last")[_POSITIVE] == F.col(_POSITIVE)) & F.col("__last")[_LABEL].eqNullSafe(F.col(_LABEL)),
    ).otherwise(F.array_contains("__all", F.struct(_AT, _POSITIVE, _LABEL)))
    is_duplicate = reduce(or_, [F.col("__nth") > 1, F.coalesce(repeats, F.lit(False))])
    outcome = F.when(F.col(REASON).isNotNull(), _REJECTED).when(F.col("__known").isNull(), _UNKNOWN)
    outcome = outcome.when(is_duplicate, _DUPLICATE).otherwise(_NEW)
    return rows.select(*_COLUMNS, REASON, RAW, FILE, outcome.alias(_OUTCOME))

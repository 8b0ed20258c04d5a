"""Writes a stream's unusable rows to the table rejected_events, checks them again, and removes usable ones."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING

from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StringType, StructField, StructType

from lookback.core.streams.fields import POSITION
from lookback.core.values.texts import quote_identifier
from lookback.spark.ingest.fields import (
    BLOCK,
    CORRUPT,
    FILE,
    RAW,
    READ_AS,
    REASON,
    ROW,
    ROW_BITS,
    UNIT,
    cast_rows,
    list_source_columns,
    quote_value,
    reads_kafka,
)
from lookback.spark.ingest.filerows import Files
from lookback.spark.ingest.kafka import add_record_columns, drop_record_parts, is_record, name_source
from lookback.spark.ingest.sources import FORMATS, JSON_FORMATS, KEEP_CORRUPT, Source
from lookback.spark.tables.conflicts import change_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import Column, DataFrame

    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables

_TABLE = "rejected_events"
_GROUP = "__alike"
_MAX_KINDS, _MAX_RAW_CHARACTERS = 20, 200


@dataclass(frozen=True)
class Rejection:
    """The rows that were rejected for one kind of reason.

    Attributes:
        reason: The reason, with its values replaced by `…`.
        rows: The number of rows.
        example: The reason of one of the rows, with its values.
        raw: The original text of that row, truncated to 200 characters.
        source: Where that row came from.
    """

    reason: str
    rows: int
    example: str
    raw: str | None
    source: str | None

    def __str__(self) -> str:
        place = f" in {self.source}" if self.source else ""
        row = f"; such a row is {self.raw}" if self.raw else ""
        return f"{self.rows:,} rejected: {self.example}{place}{row}"


def count_rejections(rows: DataFrame, reason: Column, raw: Column, source: Column) -> tuple[Rejection, ...]:
    """Counts rejected rows by kind of reason, the most frequent first; at most 20 kinds."""
    kind = F.regexp_replace(reason, "'[^']*'", "'…'")
    # The minimum row of each kind, so that a repeated run reports the same example.
    example = F.min(
        F.struct(reason.alias("reason"), F.left(raw, F.lit(_MAX_RAW_CHARACTERS)).alias("raw"), source.alias("source"))
    )
    kinds = rows.groupBy(kind.alias("kind")).agg(F.count("*").alias("rows"), example.alias("example"))
    most_frequent = kinds.orderBy(F.desc("rows"), "kind").limit(_MAX_KINDS).collect()
    return tuple(Rejection(row["kind"], row["rows"], *row["example"]) for row in most_frequent)


def name_options_key(stream: Stream) -> str:
    """Returns the key in the stream's `source` that has the options for reading lines."""
    return "value_options" if reads_kafka(stream) else "options"


def mark_conflicts(rows: DataFrame, conflicts: DataFrame, stream: Stream) -> DataFrame:
    """Gives a REASON to the checked `rows` that are `conflicts`: their id belongs to a different event.

    If the text of a row was not kept, its RAW is made from its fields.
    """
    id_, fields = stream.event_id, stream.own_columns
    columns = ", ".join(f"{quote_identifier(name)} {type_}" for name, type_ in fields.items())
    reading = json.dumps({"format": "parquet", "columns": columns, "fields": True}, ensure_ascii=False)
    raw = F.make_valid_utf8(F.to_json(F.struct(*fields), {"ignoreNullFields": "false", **JSON_FORMATS}))
    reason = F.concat(
        F.lit(f"{id_}: "),
        quote_value(F.col(id_)),
        F.lit(
            " is the id of an existing event, and this row differs from it: give the row its own id, or delete that "
            "event"
        ),
    )
    place = [FILE, BLOCK, ROW, RAW]
    keys = conflicts.select(*[F.col(name).alias(f"{name}_key") for name in place])
    is_conflict = reduce(and_, [F.col(name).eqNullSafe(F.col(f"{name}_key")) for name in place])
    marked = conflicts.withColumns(
        {
            REASON: reason,
            READ_AS: F.when(F.col(RAW).isNull(), F.lit(reading)).otherwise(F.col(READ_AS)),
            RAW: F.coalesce(F.col(RAW), raw),
        }
    )
    return rows.join(keys, is_conflict, "left_anti").unionByName(marked)


@dataclass(frozen=True)
class RejectedRows:
    """A stream's rows in rejected_events."""

    tables: Tables
    stream: Stream

    def write(self, rows: DataFrame, mark: str, now: Column) -> None:
        """Appends checked rows with a REASON, except rows already written, with `now` as their `ingested_at`."""
        rows = rows.select(
            F.lit(self.stream.name).alias("stream"),
            F.col(RAW).alias("raw"),
            F.col(REASON).alias("reason"),
            name_source().alias("source"),
            now.alias("ingested_at"),
            F.col(READ_AS).alias("read_as"),
            F.col(POSITION).alias("position"),
        )
        known = self._read_stream()
        if not self.tables.is_unwritten(_TABLE) and known.inputFiles():
            # A repeated run must not write a row twice.
            known = known.select(F.col("source").alias("__source"), F.col("raw").alias("__known"))
            same = F.col("source").eqNullSafe(F.col("__source")) & F.col("raw").eqNullSafe(F.col("__known"))
            rows = rows.join(known, same, "left_anti")
            if rows.isEmpty():
                return
        self.tables.append(rows.coalesce(1), _TABLE, mark)

    def read(self) -> DataFrame:
        """Reads the stream's rows, newest first."""
        return self._read_stream().orderBy(F.desc("ingested_at"), "source", "raw").drop("read_as", "position")

    def count_by_reason(self) -> tuple[Rejection, ...]:
        """Counts the stream's rows by kind of reason."""
        return count_rejections(self._read_stream(), F.col("reason"), F.col("raw"), F.col("source"))

    def check_kept(self, options: Mapping[str, str]) -> list[DataFrame]:
        """Checks the rows with a kept text again, grouped by how they were read, without reading any file."""
        kept = self._read_stream().where("raw is not null").withColumn(_GROUP, drop_record_parts(F.col("read_as")))
        return [
            _parse_rows(
                kept.where(F.col(_GROUP).eqNullSafe(F.lit(row[_GROUP]))),
                _Reading.from_json(row[_GROUP], options),
                self.stream,
            )
            for row in kept.select(_GROUP).distinct().collect()
        ]

    def check_again(self, options: Mapping[str, str]) -> RetriedRows:
        """Checks all rows again, and reads the files again that could not be read.

        `options` override the reader options with which the rows were read.
        """
        parts = self.check_kept(options)
        rows = self._read_stream()
        files = rows.where("raw is null and source is not null and read_as is not null")
        files = files.where(~is_record(F.col("source")))
        names: list[str] = []
        for read_as, sources in files.groupBy("read_as").agg(F.collect_set("source")).collect():
            source = _Reading.from_json(read_as, options).source
            parts.append(Files(self.tables.spark, source, self.stream, sources).read_apart())
            names += sources
        no_rows = Files(self.tables.spark, _Reading.from_json(None, options).source, self.stream, []).read_apart()
        return RetriedRows(self, reduce(lambda some, more: some.unionByName(more), parts, no_rows), tuple(names))

    def delete(self, used: DataFrame) -> None:
        """Deletes the rows whose `source` and `raw` are in `used`, which must not contain a pair twice."""
        same = " and ".join(f"rejected.{name} <=> used.{name}" for name in ("source", "raw"))
        condition = (F.col("rejected.stream") == self.stream.name) & F.expr(same)

        def act() -> None:
            table = self.tables.delta(_TABLE).alias("rejected")
            table.merge(used.alias("used"), condition).whenMatchedDelete().execute()

        # Rows of other streams may be written concurrently.
        change_table(self.tables, _TABLE, act)

    def _read_stream(self) -> DataFrame:
        return self.tables.read(_TABLE).where(F.col("stream") == self.stream.name)


@dataclass(frozen=True)
class RetriedRows:
    """Rejected rows that were checked again.

    Attributes:
        rejected: The stream's rows in rejected_events.
        rows: The checked rows, with RAW if the text was kept.
        files: The names of the files that were read again.
    """

    rejected: RejectedRows
    rows: DataFrame
    files: Sequence[str]

    def remove(self, checked_rows: DataFrame) -> None:
        """Removes the rows that are now usable from rejected_events; `checked_rows` is `rows`, cached.

        A row is removed only after its event is in the table. If the process is killed in between, the next attempt
        finds a duplicate.
        """
        usable = F.col(REASON).isNull()
        rows = checked_rows.where(usable & F.col(RAW).isNotNull()).select(FILE, RAW)
        unread = checked_rows.where(~usable & F.col(RAW).isNull()).select(FILE)
        names = checked_rows.sparkSession.createDataFrame([(name,) for name in self.files], f"{FILE} string")
        read = names.join(unread, FILE, "left_anti").withColumn(RAW, F.lit(None).cast("string"))
        used = rows.unionByName(read).distinct().toDF("source", "raw").localCheckpoint()
        if not used.isEmpty():
            self.rejected.delete(used)


@dataclass(frozen=True)
class _Reading:
    """How rows were read.

    Attributes:
        source: The format and the options.
        columns: The columns of the source; None if it has none or they are unknown.
        is_record: Whether the rows are Kafka records.
        has_fields: Whether the columns are the stream's fields.
    """

    source: Source
    columns: StructType | None
    is_record: bool
    has_fields: bool

    @classmethod
    def from_json(cls, text: str | None, options: Mapping[str, str]) -> _Reading:
        """Reads the `read_as` of a row. Unreadable text is ignored, since anyone may have written it."""
        try:
            reading = json.loads(text or "{}")
            columns = StructType.fromDDL(reading["columns"]) if reading.get("columns") else None
            read_with = {str(name): str(value) for name, value in dict(reading.get("options") or {}).items()}
            format_, is_record = reading.get("format", "json"), reading.get("kafka") is True
            has_fields = reading.get("fields") is True
        except (AttributeError, PySparkException, TypeError, ValueError):
            columns, read_with, format_, is_record, has_fields = None, {}, "json", False, False
        if format_ not in FORMATS:
            columns, format_ = None, "json"
        source = Source(_TABLE, format_, {**read_with, **options})
        return cls(source, columns if isinstance(columns, StructType) else None, is_record, has_fields)


def _parse_rows(rows: DataFrame, reading: _Reading, stream: Stream) -> DataFrame:
    """Parses rows of rejected_events into source columns again, and checks them."""
    position = F.coalesce("position", F.lit(0).cast("bigint"))
    rows = rows.select(
        F.col("raw").alias(RAW),
        F.col("read_as").alias(READ_AS),
        F.col("source").alias(FILE),
        # Sorts the rows by the round that rejected them.
        F.lpad(F.unix_micros("ingested_at").cast("string"), 20, "0").alias(UNIT),
        F.shiftright(position, ROW_BITS).alias(BLOCK),
        position.bitwiseAND(F.lit(2**ROW_BITS - 1)).alias(ROW),
    )
    source, columns = reading.source, reading.columns
    if reading.has_fields:
        stream = replace(stream, columns={}, source={})
    if columns is None or source.format == "json":
        parsed = source.parse_json(rows, list_source_columns(stream))
    elif source.format == "csv":
        parsed = _parse_csv(rows, source, columns.names)
    else:
        parsed = _parse_typed(rows, columns)
    if reading.is_record:
        parsed = add_record_columns(parsed)
    return cast_rows(parsed, stream, text=source.is_text, place=_TABLE)


def _parse_csv(rows: DataFrame, source: Source, names: Sequence[str]) -> DataFrame:
    """Parses rows as JSON objects, or else as lines of a CSV file with these columns."""
    rows, line = source.parse_json(rows, names), source.parse_csv_line(names)
    is_line = F.col(CORRUPT).isNotNull()
    values = [
        F.when(is_line, line.getField(name)).otherwise(F.col(quote_identifier(name))).alias(name)
        for name in [*names, CORRUPT]
    ]
    return rows.select(RAW, READ_AS, FILE, UNIT, BLOCK, ROW, *values)


def _parse_typed(rows: DataFrame, columns: StructType) -> DataFrame:
    """Parses rows that `Source.write_line` wrote, into columns of their types."""
    schema = StructType([*columns.fields, StructField(CORRUPT, StringType())])
    options = {**JSON_FORMATS, **KEEP_CORRUPT}
    return (
        rows.select("*", F.from_json(RAW, schema, options).alias("__object")).select("*", "__object.*").drop("__object")
    )

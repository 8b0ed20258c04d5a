"""The table rejected_events: rows of one stream written, read again once they can be used, and taken out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StringType, StructField, StructType

from lookback.spark.ingest.fields import (
    BLOCK,
    CORRUPT,
    FILE,
    RAW,
    READ_AS,
    REASON,
    ROW,
    cast_rows,
    list_source_columns,
    quote_column,
    reads_kafka,
)
from lookback.spark.ingest.kafka import alike, beside_value, is_record, source_of
from lookback.spark.ingest.sources import CSV_DEFAULTS, FORMATS, JSON_FORMATS, Files, Source
from lookback.spark.tables.lakehouse import WRITE_ERRORS, is_conflict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import Column, DataFrame

    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables

_TABLE = "rejected_events"
_ATTEMPTS = 5
_ALIKE = "__alike"
_MOST_KINDS, _MOST_RAW = 20, 200


@dataclass(frozen=True)
class Rejection:
    """Rows that were rejected for reasons of one kind.

    reason: the reason, values in it replaced by `…`; rows: how many there are; example: the reason of one of them, with
    its values; raw: that row as it came, cut after 200 characters; source: where it came from.
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


def rejections_of(rows: DataFrame, reason: Column, raw: Column, source: Column) -> tuple[Rejection, ...]:
    """Rejected rows by kind of reason, the most frequent first; at most 20 kinds. reason, raw, source: columns of theirs."""
    kind = F.regexp_replace(reason, "'[^']*'", "'…'")
    # The least row of each kind, so that a run that is repeated says the same.
    example = F.min(
        F.struct(reason.alias("reason"), F.left(raw, F.lit(_MOST_RAW)).alias("raw"), source.alias("source"))
    )
    kinds = rows.groupBy(kind.alias("kind")).agg(F.count("*").alias("rows"), example.alias("example"))
    found = kinds.orderBy(F.desc("rows"), "kind").limit(_MOST_KINDS).collect()
    return tuple(Rejection(row["kind"], row["rows"], *row["example"]) for row in found)


def options_key(stream: Stream) -> str:
    """The key of the stream's `source` with the options by which lines are read."""
    return "value_options" if reads_kafka(stream) else "options"


@dataclass(frozen=True)
class Rejected:
    """What rejected_events holds of a stream. A table of an earlier release has no column `read_as`."""

    tables: Tables
    stream: Stream

    def write(self, rows: DataFrame, mark: str, now: Column) -> None:
        """Appends judged rows that have a REASON, but none that is there already. now: their `ingested_at`."""
        rows = rows.select(
            F.lit(self.stream.name).alias("stream"),
            F.col(RAW).alias("raw"),
            F.col(REASON).alias("reason"),
            source_of().alias("source"),
            now.alias("ingested_at"),
            F.col(READ_AS).alias("read_as"),
        )
        known = self._rows()
        if not self.tables.is_unwritten(_TABLE) and known.inputFiles():
            # A run that is run again says nothing twice.
            known = known.select(F.col("source").alias("__source"), F.col("raw").alias("__known"))
            again = F.col("source").eqNullSafe(F.col("__source")) & F.col("raw").eqNullSafe(F.col("__known"))
            rows = rows.join(known, again, "left_anti")
            if rows.isEmpty():
                return
        self.tables.append(rows.coalesce(1).select(*self.tables.read(_TABLE).columns), _TABLE, mark)

    def rows(self) -> DataFrame:
        """The stream's rows as the table has them, the newest first."""
        return self._rows().orderBy(F.desc("ingested_at"), "source", "raw").drop("read_as")

    def by_reason(self) -> tuple[Rejection, ...]:
        """The stream's rows by kind of reason."""
        return rejections_of(self._rows(), F.col("reason"), F.col("raw"), F.col("source"))

    def kept(self, options: Mapping[str, str]) -> list[DataFrame]:
        """The rows of which the text was kept, judged anew: those that were read alike together. No file is read."""
        kept = self._with_read_as().where("raw is not null").withColumn(_ALIKE, alike(F.col("read_as")))
        return [
            _opened(kept.where(F.col(_ALIKE).eqNullSafe(F.lit(row[0]))), _ReadAs.of(row[0], options), self.stream)
            for row in kept.select(_ALIKE).distinct().collect()
        ]

    def again(self, options: Mapping[str, str]) -> Again:
        """All of the rows, to be judged anew; files that could not be read are read again whole.

        options: the reader's, over those that the rows were read with.
        """
        parts = self.kept(options)
        rows = self._with_read_as()
        files = rows.where("raw is null and source is not null and read_as is not null")
        files = files.where(~is_record(F.col("source")))
        names: list[str] = []
        for read_as, sources in files.groupBy("read_as").agg(F.collect_set("source")).collect():
            source = _ReadAs.of(read_as, options).source
            parts.append(Files(self.tables.spark, source, self.stream, sources).apart())
            names += sources
        nothing = Files(self.tables.spark, _ReadAs.of(None, options).source, self.stream, []).apart()
        return Again(self, reduce(lambda some, more: some.unionByName(more), parts, nothing), tuple(names))

    def delete(self, used: DataFrame) -> None:
        """Takes out the rows with these columns `source` and `raw`, each pair once."""
        same = " and ".join(f"rejected.{name} <=> used.{name}" for name in ("source", "raw"))
        condition = (F.col("rejected.stream") == self.stream.name) & F.expr(same)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                table = self.tables.delta(_TABLE).alias("rejected")
                table.merge(used.alias("used"), condition).whenMatchedDelete().execute()
            except WRITE_ERRORS as error:  # noqa: PERF203 - rows of other streams come meanwhile
                if attempt == _ATTEMPTS or not is_conflict(error):
                    raise
            else:
                return

    def _with_read_as(self) -> DataFrame:
        rows = self._rows()
        return rows if "read_as" in rows.columns else rows.withColumn("read_as", F.lit(None).cast("string"))

    def _rows(self) -> DataFrame:
        return self.tables.read(_TABLE).where(F.col("stream") == self.stream.name)


@dataclass(frozen=True)
class Again:
    """Rejected rows judged anew. rows: RAW stands in every row that was kept; files: the names of those read again."""

    rejected: Rejected
    rows: DataFrame
    files: Sequence[str]

    def remove(self, judged_rows: DataFrame) -> None:
        """Takes out what could be used now. judged_rows: `rows`, the same ones whenever they are read.

        A row leaves only after its event is in the table: killed before, the next attempt finds a duplicate.
        """
        usable = F.col(REASON).isNull()
        rows = judged_rows.where(usable & F.col(RAW).isNotNull()).select(FILE, RAW)
        unread = judged_rows.where(~usable & F.col(RAW).isNull()).select(FILE)
        names = self.rejected.tables.spark.createDataFrame([(name,) for name in self.files], f"{FILE} string")
        read = names.join(unread, FILE, "left_anti").withColumn(RAW, F.lit(None).cast("string"))
        used = rows.unionByName(read).distinct().toDF("source", "raw").localCheckpoint()
        if not used.isEmpty():
            self.rejected.delete(used)


@dataclass(frozen=True)
class _ReadAs:
    """How rows were read. columns: of the source; None where it had none, or is not known. record: of Kafka."""

    source: Source
    columns: StructType | None
    record: bool

    @classmethod
    def of(cls, text: str | None, options: Mapping[str, str]) -> _ReadAs:
        """The `read_as` of a row. What cannot be read counts as absent: anyone may have written it."""
        try:
            found = json.loads(text or "{}")
            columns = StructType.fromDDL(found["columns"]) if found.get("columns") else None
            given = {str(name): str(value) for name, value in dict(found.get("options") or {}).items()}
            format_, record = found.get("format", "json"), found.get("kafka") is True
        except (AttributeError, PySparkException, TypeError, ValueError):
            columns, given, format_, record = None, {}, "json", False
        if format_ not in FORMATS:
            columns, format_ = None, "json"
        source = Source(_TABLE, format_, {**given, **options})
        return cls(source, columns if isinstance(columns, StructType) else None, record)


def _opened(rows: DataFrame, read_as: _ReadAs, stream: Stream) -> DataFrame:
    """Rows of rejected_events as source columns again, judged."""
    rows = rows.orderBy("ingested_at").select(
        F.col("raw").alias(RAW),
        F.col("read_as").alias(READ_AS),
        F.col("source").alias(FILE),
        F.lit(0).cast("bigint").alias(BLOCK),
        F.monotonically_increasing_id().alias(ROW),
    )
    source, columns = read_as.source, read_as.columns
    if columns is None or source.format == "json":
        opened = source.parsed(rows, list_source_columns(stream))
    elif source.format == "csv":
        opened = _csv(source.parsed(rows, columns.names), columns.names, source.options)
    else:
        opened = _typed(rows, columns)
    if read_as.record:
        opened = beside_value(opened)
    return cast_rows(opened, stream, text=source.format != "parquet", place=_TABLE)


def _csv(rows: DataFrame, names: Sequence[str], options: Mapping[str, str]) -> DataFrame:
    """Rows of `Source.parsed`; those that are no JSON objects are read as lines of a file with these columns."""
    schema = ", ".join(f"{quote_column(name)} string" for name in [*names, CORRUPT])
    line = F.from_csv(
        RAW, schema, {**CSV_DEFAULTS, **options, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": CORRUPT}
    )
    is_line = F.col(CORRUPT).isNotNull()
    made = {
        name: F.when(is_line, line.getField(name)).otherwise(F.col(quote_column(name))) for name in [*names, CORRUPT]
    }
    return rows.select(RAW, READ_AS, FILE, BLOCK, ROW, *[column.alias(name) for name, column in made.items()])


def _typed(rows: DataFrame, columns: StructType) -> DataFrame:
    """Rows that `Source.line` wrote, with columns of their types."""
    schema = StructType([*columns.fields, StructField(CORRUPT, StringType())])
    options = {**JSON_FORMATS, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": CORRUPT}
    return (
        rows.select("*", F.from_json(RAW, schema, options).alias("__object")).select("*", "__object.*").drop("__object")
    )

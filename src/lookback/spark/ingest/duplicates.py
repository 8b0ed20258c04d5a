"""Finds duplicates of events in the table and within a batch, and rows that differ from the event of their id."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812

from lookback.core.streams.fields import POSITION
from lookback.spark.tables.sqltexts import to_timestamp

if TYPE_CHECKING:
    import datetime as dt

    from pyspark.sql import Column, DataFrame

    from lookback.core.streams.declaration import Stream
    from lookback.spark.ingest.batch import BatchFigures
    from lookback.spark.tables.lakehouse import Tables

# Marks the events of a batch that may be duplicates of other events in it, see `Duplicates.drop_certain`.
DOUBTFUL = "__doubtful"


@dataclass(frozen=True)
class Duplicates:
    """The duplicates of a stream's events: rows with the same id, at most `dedupe_window` apart."""

    tables: Tables
    stream: Stream

    def find_known(self, usable: DataFrame, figures: BatchFigures) -> DataFrame | None:
        """Finds the table's events with ids of the batch, as (__id, __time, __content, __stamp); None without any."""
        if self.tables.is_unwritten(self.stream.name):
            return None
        bounds = (figures.first_time, figures.last_time, figures.first_id, figures.last_id)
        known = read_possible_duplicates(self.tables, self.stream, *bounds)
        known = known.select(
            F.col(self.stream.event_id).alias("__id"),
            F.unix_micros(self.stream.event_time).alias("__time"),
            F.struct(*self.stream.own_columns).alias("__content"),
            F.col("ingested_at").alias("__stamp"),
        )
        ids = usable.select(F.col(self.stream.event_id).alias("__wanted"))
        if figures.usable <= self.stream.commit_rows:
            # For few rows, filter the table by their ids before the shuffle.
            ids = F.broadcast(ids)
        # A checkpoint, because Spark would otherwise read the table again after every commit, with another result.
        hits = known.join(ids, F.col("__id") == F.col("__wanted"), "left_semi").localCheckpoint()
        return None if hits.isEmpty() else hits

    @property
    def is_known(self) -> Column:
        """The condition that a row is an event of the table, for a join with the result of `find_known`."""
        gap = F.abs(F.col("__time") - F.unix_micros(self.stream.event_time))
        return (F.col("__id") == F.col(self.stream.event_id)) & (gap <= self.stream.dedupe_window)

    def find_different(self, usable: DataFrame, known: DataFrame) -> DataFrame:
        """Finds the rows that have the id of an event in the table but differ from it in some field."""
        fields = self.stream.own_columns
        same = reduce(and_, [F.col(name).eqNullSafe(F.col("__content")[name]) for name in fields])
        found = usable.join(known, self.is_known & ~same, "left_semi").localCheckpoint()
        if found.isEmpty():
            return found
        # An event from before a column was added has no value there, which does not count as a difference.
        added = self._read_added_columns()
        same = F.lit(True)
        for name in fields:
            is_equal = F.col(name).eqNullSafe(F.col("__content")[name])
            same &= is_equal | (F.col("__stamp") < F.lit(added[name])) if name in added else is_equal
        # The row may equal another event with this id.
        return found.join(known, self.is_known & same, "left_anti")

    def _read_added_columns(self) -> dict[str, dt.datetime]:
        """Reads when columns were added to the events table; leaves out the original columns."""
        history = self.tables.history(self.stream.name).where("operation = 'ADD COLUMNS'")
        columns = F.from_json(F.col("operationParameters")["columns"], "array<struct<column: struct<name: string>>>")
        rows = history.select("timestamp", F.explode(columns["column"]["name"]).alias("name")).collect()
        return {row["name"]: row["timestamp"] for row in rows}

    def split_off_different(self, new: DataFrame) -> tuple[DataFrame, list[DataFrame]]:
        """Splits off the rows that differ from the kept event of their id; returns the rest and a list of these."""
        id_, fields = self.stream.event_id, list(self.stream.own_fields)
        # NULLs do not change the hash, so their positions are hashed too.
        content = F.xxhash64(*fields, *[F.col(name).isNull() for name in fields])
        contested = new.groupBy(id_).agg(F.min(content).alias("least"), F.max(content).alias("greatest"))
        contested = contested.where("least != greatest").select(id_).localCheckpoint()
        if contested.isEmpty():
            return new, []
        columns, window = new.columns, self.stream.dedupe_window
        row = F.struct(
            F.unix_micros(self.stream.event_time).alias("__time"),
            POSITION,
            F.struct(*fields).alias("__content"),
            F.struct(*columns).alias("__whole"),
        )
        lists = (
            new.join(contested, id_, "left_semi").groupBy(id_).agg(F.array_sort(F.collect_list(row)).alias("__rows"))
        )
        first = "__rows[0] as kept, array(struct(__rows[0].__whole as row, false as differs)) as seen"
        added = "concat(a.seen, array(struct(x.__whole as row, {} as differs))) as seen"
        walk = F.expr(
            f"aggregate(slice(__rows, 2, size(__rows)), struct({first}), (a, x) -> "
            f"if(x.__time - a.kept.__time > {window}, struct(x as kept, {added.format('false')}), "
            f"struct(a.kept as kept, {added.format('not (x.__content <=> a.kept.__content)')}))).seen"
        )
        walked = lists.select(F.explode(walk).alias("each")).select("each.row.*", "each.differs").localCheckpoint()
        alike = new.join(contested, id_, "left_anti").unionByName(walked.where("not differs").drop("differs"))
        return alike.select(*columns), [walked.where("differs").select(*columns)]

    def drop_certain(self, events: DataFrame) -> DataFrame:
        """Drops the rows that are certainly duplicates within the batch, and marks possible duplicates as DOUBTFUL.

        Among the events of one id, an event stays if it is more than the window after the previous event. It is dropped
        if it is at most the window after the last event that certainly stays. Any other event, at the end of a chain of
        closer ones, is doubtful: see `drop_doubtful`.
        """
        window, micros = self.stream.dedupe_window, F.unix_micros(self.stream.event_time)
        of_id = Window.partitionBy(self.stream.event_id).orderBy(self.stream.event_time, POSITION)
        before = F.lag(micros).over(of_id)
        events = events.withColumn("__stays", before.isNull() | (micros - before > window))
        kept = F.last(F.when(F.col("__stays"), micros), ignorenulls=True).over(of_id)
        events = events.withColumn("__kept", kept).withColumn(DOUBTFUL, ~F.col("__stays"))
        return events.where(F.col("__stays") | (micros - F.col("__kept") > window)).drop("__stays", "__kept")

    def drop_doubtful(self, events: DataFrame) -> DataFrame:
        """Drops duplicates among doubtful events: for each id in order of time, compares with the last kept event."""
        row = F.struct(F.unix_micros(self.stream.event_time).alias("__time"), POSITION, *self.stream.table_columns)
        lists = events.groupBy(self.stream.event_id).agg(F.array_sort(F.collect_list(row)).alias("__rows"))
        window = self.stream.dedupe_window
        stay = F.expr(
            "aggregate(__rows, slice(__rows, 1, 1), (kept, x) -> "
            f"if(x.__time - element_at(kept, -1).__time > {window}, concat(kept, array(x)), kept))"
        )
        return lists.select(F.explode(stay).alias("__row")).select("__row.*").drop("__time")


def read_possible_duplicates(
    tables: Tables, stream: Stream, first_time: int, last_time: int, first_id: int | str, last_id: int | str
) -> DataFrame:
    """Reads the rows of the events table that may be duplicates of events in a batch.

    The bounds are literals, so that Delta skips files whose statistics lie outside them.

    Args:
        tables: The tables of the workspace.
        stream: The stream.
        first_time: The lowest time in the batch, in microseconds; the stream's `dedupe_window` is subtracted.
        last_time: The highest time in the batch, inclusive; `dedupe_window` is added.
        first_id: The lowest id in the batch, of the field's type.
        last_id: The highest id in the batch, inclusive.
    """
    time_, id_ = F.col(stream.event_time), F.col(stream.event_id)
    first, last = to_timestamp(first_time - stream.dedupe_window), to_timestamp(last_time + stream.dedupe_window)
    near = (time_ >= first) & (time_ <= last)
    return tables.read(stream.name).where(near & (id_ >= F.lit(first_id)) & (id_ <= F.lit(last_id)))

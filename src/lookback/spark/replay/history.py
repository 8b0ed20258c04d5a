"""Reads the commits of an events table for a replay: how many rows each has, and the rows themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812

from lookback.core.streams.blocks import COMMIT
from lookback.core.streams.declaration import Stream
from lookback.spark.tables.history import find_first_readable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from lookback.spark.tables.lakehouse import Tables

# A task judges the commits of about so many events at a time, of which it holds those of its keys.
_SPAN_EVENTS = 1_000_000


@dataclass(frozen=True)
class History:
    """The commits of an events table that can be read.

    first, last: commits. events: inserted rows. deletes: commits that deleted rows. spans: the last commit of each span.
    first_time, last_time: of events in microseconds; None without events.
    """

    stream: Stream
    first: int
    last: int
    events: int
    deletes: int
    spans: Sequence[int]
    first_time: int | None
    last_time: int | None

    @classmethod
    def read(cls, tables: Tables, stream: Stream, until: int | None = None, since: int | None = None) -> History:
        """Counts the rows of each commit, from `since` up to the commit `until`; None for the first and for the last."""
        first, last = find_first_readable(tables, stream.name), tables.version(stream.name)
        first = first if since is None else max(first, since)
        last = last if until is None else max(first, min(last, until))
        inserted, time = F.col("_change_type") == "insert", F.unix_micros(stream.event_time)
        counts = (
            tables.read_changes(stream.name, first, last)
            .where(F.col("_change_type").isin("insert", "delete"))
            .groupBy(COMMIT)
            .agg(
                F.count_if(inserted).alias("events"),
                F.count_if(~inserted).alias("deleted"),
                F.min(F.when(inserted, time)).alias("first"),
                F.max(F.when(inserted, time)).alias("last"),
            )
            .orderBy(COMMIT)
            .collect()
        )
        spans, waiting = list[int](), 0
        for row in counts:
            waiting += row["events"]
            if waiting >= _SPAN_EVENTS:
                spans.append(row[COMMIT])
                waiting = 0
        return cls(
            stream, first, last, sum(row["events"] for row in counts), sum(row["deleted"] > 0 for row in counts),
            [*spans, last], min((row["first"] for row in counts if row["first"] is not None), default=None),
            max((row["last"] for row in counts if row["last"] is not None), default=None),
        )  # fmt: skip

    def read_changes(self, tables: Tables) -> DataFrame:
        """Reads the rows that were inserted and deleted."""
        changes = tables.read_changes(self.stream.name, self.first, self.last)
        return changes.where(F.col("_change_type").isin("insert", "delete"))

    def read_lasting(self, tables: Tables) -> DataFrame:
        """Reads the inserted rows as if those that were deleted later had never come: these are marked as deletions."""
        changes = self.read_changes(tables)
        inserted = changes.where(F.col("_change_type") == "insert")
        if not self.deletes:
            return inserted
        event_id, gone = self.stream.event_id, "_gone_since"
        deleted = changes.where(F.col("_change_type") == "delete").groupBy(event_id).agg(F.max(COMMIT).alias(gone))
        kind = F.when(F.col(gone) > F.col(COMMIT), "delete").otherwise("insert")
        return inserted.join(deleted, event_id, "left").withColumn("_change_type", kind)

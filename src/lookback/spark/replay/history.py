"""Reads the commits of an events table for a replay: the rows of each commit, and their number."""

from __future__ import annotations

import datetime as dt
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from lookback.core.streams.blocks import COMMIT
from lookback.core.streams.declaration import Stream
from lookback.core.values.times import parse_time
from lookback.spark.tables.history import find_first_readable

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

# The number of events in a span. A task judges one span at a time and holds the span's events of its keys. Half as many
# events make a backtest of 100 rules a twelfth slower; twice as many do not make it faster.
_SPAN_EVENTS = 2_000_000
# All rows of a commit have the same stamp, which is later than the stamps of all earlier commits.
_STAMP = "ingested_at"


@dataclass(frozen=True)
class History:
    """The readable commits of an events table.

    Attributes:
        stream: The stream of the events.
        first: The first commit.
        last: The last commit.
        events: The number of inserted rows.
        deletes: The number of commits that deleted rows.
        spans: The last commit of each span.
        first_time: The first event time in microseconds; None without events.
        last_time: The last event time in microseconds; None without events.
        warning: A sentence for the user if some events cannot be read.
        stamps: Set if the change feed no longer has all events: the values of `ingested_at` in microseconds, by which
            events are then ordered. Commit numbers are then positions in this list, from 1.
    """

    stream: Stream
    first: int
    last: int
    events: int
    deletes: int
    spans: Sequence[int]
    first_time: int | None
    last_time: int | None
    warning: str = ""
    stamps: Sequence[int] = ()

    @classmethod
    def read_whole(cls, tables: Tables, stream: Stream, span_events: int | None = None) -> History:
        """Counts the rows of all events, including those that the change feed no longer has.

        If `ingest` wrote the table, these are ordered by `ingested_at`, which is also the order of their commits. A
        span has at least `span_events` events, or the number that is best for a backtest if that is lower.
        """
        history = cls.read(tables, stream, span_events=span_events)
        if not history.first:
            return history
        rows, time = tables.read_events(stream.name), F.unix_micros(stream.event_time)
        counts = (
            rows.groupBy(F.unix_micros(_STAMP).alias(_STAMP))
            .agg(F.count("*").alias("events"), F.min(time).alias("first"), F.max(time).alias("last"))
            .orderBy(_STAMP)
            .collect()
        )
        events, name = sum(row["events"] for row in counts), tables.identifier(stream.name)
        if events <= history.events:
            return history
        begins = f"the change feed of {name} begins at commit {history.first}"
        if stream.table or counts[0][_STAMP] is None:
            warning = f"{begins}: the events of earlier commits are not judged"
            return replace(history, warning=warning)
        warning = f"{begins}: events come in the order of ingested_at, arrival is NULL, and deleted events are missing"
        stamps = [row[_STAMP] for row in counts]
        return cls(
            stream=stream,
            first=1,
            last=len(stamps),
            events=events,
            deletes=0,
            spans=_find_spans(enumerate((row["events"] for row in counts), 1), len(stamps), span_events),
            first_time=min(row["first"] for row in counts),
            last_time=max(row["last"] for row in counts),
            warning=warning,
            stamps=stamps,
        )

    @classmethod
    def read(
        cls,
        tables: Tables,
        stream: Stream,
        until: int | None = None,
        since: int | None = None,
        span_events: int | None = None,
    ) -> History:
        """Counts the rows of each commit from `since` through `until`; None means the first and the last commit."""
        first, last = find_first_readable(tables, stream.name), tables.version(stream.name)
        first = first if since is None else max(first, since)
        last = last if until is None else max(first, min(last, until))
        counts = _count_changes(tables, stream, first, last)
        return cls(
            stream=stream,
            first=first,
            last=last,
            events=sum(row.events for row in counts),
            deletes=sum(row.deleted > 0 for row in counts),
            spans=_find_spans(((row.commit, row.events) for row in counts), last, span_events),
            first_time=min((row.first for row in counts if row.first is not None), default=None),
            last_time=max((row.last for row in counts if row.last is not None), default=None),
        )

    def read_changes(self, tables: Tables) -> DataFrame:
        """Reads the inserted and deleted rows."""
        changes = tables.read_changes(self.stream.name, self.first, self.last)
        return changes.where(F.col("_change_type").isin("insert", "delete"))

    def read_lasting(self, tables: Tables) -> DataFrame:
        """Reads the inserted rows. Rows that were deleted later are marked as deletions, so they do not count."""
        if self.stamps:
            return self._read_by_stamp(tables)
        changes = self.read_changes(tables)
        inserted = changes.where(F.col("_change_type") == "insert")
        if not self.deletes:
            # A constant is cheaper than a column.
            return inserted.withColumn("_change_type", F.lit("insert"))
        event_id, gone = self.stream.event_id, "_gone_since"
        deleted = changes.where(F.col("_change_type") == "delete").groupBy(event_id).agg(F.max(COMMIT).alias(gone))
        kind = F.when(F.col(gone) > F.col(COMMIT), "delete").otherwise("insert")
        return inserted.join(deleted, event_id, "left").withColumn("_change_type", kind)

    def _read_by_stamp(self, tables: Tables) -> DataFrame:
        """Reads the current rows of the table, with the columns of a change feed."""
        numbered = [(number, stamp) for number, stamp in enumerate(self.stamps, 1)]
        numbers = tables.spark.createDataFrame(numbered, f"{COMMIT} bigint, _stamp bigint")
        rows = tables.read_events(self.stream.name).withColumn("_stamp", F.unix_micros(_STAMP))
        rows = rows.join(F.broadcast(numbers), "_stamp").drop("_stamp")
        return rows.withColumns({"_change_type": F.lit("insert"), "_commit_timestamp": F.col(_STAMP)})

    def find_place(self, tables: Tables, commit: int | None, logged_at: dt.datetime) -> int | None:
        """Finds the last commit of this history that was judged before a row of rule_log was written; None for none.

        If events are ordered by stamps, the stamp of the row's commit decides, or the row's own time if that commit can
        no longer be read.

        Args:
            tables: The tables of the workspace.
            commit: The commit that the row names.
            logged_at: The time of the row.
        """
        if not self.stamps or commit is None:
            return commit
        stamp = parse_time(logged_at)
        if commit >= find_first_readable(tables, self.stream.name):
            rows = tables.read_changes(self.stream.name, commit, commit).agg(F.max(F.unix_micros(_STAMP)))
            ((own,),) = rows.collect()
            stamp = stamp if own is None else own
        return bisect_right(self.stamps, stamp) or None


class _CommitCounts(NamedTuple):
    """The row counts of a commit, and its first and last inserted event time in microseconds; None without any."""

    commit: int
    events: int
    deleted: int
    first: int | None
    last: int | None


def _count_changes(tables: Tables, stream: Stream, first: int, last: int) -> list[_CommitCounts]:
    """Counts the rows of each commit from `first` to `last` by reading its changes."""
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
    )
    return [_CommitCounts(*row) for row in counts.collect()]


def _find_spans(commits: Iterable[tuple[int, int]], last: int, span_events: int | None) -> list[int]:
    """Returns the last commit of each span. `commits` has commits with their numbers of events; `last` is the last."""
    spans, waiting, least = list[int](), 0, _SPAN_EVENTS if span_events is None else min(span_events, _SPAN_EVENTS)
    for commit, events in commits:
        waiting += events
        if waiting >= least:
            spans.append(commit)
            waiting = 0
    return [*spans, last]

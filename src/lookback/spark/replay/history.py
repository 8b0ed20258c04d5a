"""Reads the commits of an events table for a replay: how many rows each has, and the rows themselves."""

from __future__ import annotations

import datetime as dt
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import DataFrame

from lookback.core.streams.blocks import COMMIT
from lookback.core.streams.declaration import Stream
from lookback.core.values.times import parse_time
from lookback.spark.queries import functions as F  # noqa: N812
from lookback.spark.tables.history import find_first_readable, list_inserted_rows

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

# A task judges the commits of about so many events at a time, of which it holds those of its keys. With half of them a
# backtest of 100 rules takes a twelfth longer, with twice as many no less.
_SPAN_EVENTS = 2_000_000
# All rows of a commit have the same one, later than that of every earlier commit.
_STAMP = "ingested_at"
# To find the first and the last event time at most so many commits are read; where more may have them, all are.
_MOST_OUTER = 8
_LOGGED_EXACTLY = 2_000


@dataclass(frozen=True)
class History:
    """The commits of an events table that can be read.

    first, last: commits. events: the number of inserted rows; deletes: of commits that deleted rows. spans: the last commit
    of each span. first_time, last_time: of events in microseconds; None without events. warning: for people, if some events
    cannot be read. stamps: the times by which events are ordered where the change feed no longer has them all, in
    microseconds; commits are then their positions, from 1.
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
    def read_whole(cls, tables: Tables, stream: Stream) -> History:
        """Counts the rows of all events, also of those that the change feed no longer has.

        Those of a table that `ingest` wrote have the order of `ingested_at`, which is that of their commits.
        """
        history = cls.read(tables, stream)
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
        warning = (
            f"{begins}: events come in the order of ingested_at, arrival is NULL, and deleted events are not there"
        )
        stamps = [row[_STAMP] for row in counts]
        return cls(
            stream, 1, len(stamps), events, 0, _find_spans(enumerate((row["events"] for row in counts), 1), len(stamps)),
            min(row["first"] for row in counts), max(row["last"] for row in counts), warning, stamps,
        )  # fmt: skip

    @classmethod
    def read(
        cls, tables: Tables, stream: Stream, until: int | None = None, since: int | None = None, *,
        is_estimate: bool = False,
    ) -> History:  # fmt: skip
        """Counts the rows of each commit, from `since` up to the commit `until`; None for the first and for the last.

        is_estimate: the first and the last event time need only be right to a millisecond, which the table's log may know.
        """
        first, last = find_first_readable(tables, stream.name), tables.version(stream.name)
        first = first if since is None else max(first, since)
        last = last if until is None else max(first, min(last, until))
        counts = _read_counts(tables, stream, first, last, is_estimate=is_estimate)
        return cls(
            stream, first, last, sum(row.events for row in counts), sum(row.deleted > 0 for row in counts),
            _find_spans(((row.commit, row.events) for row in counts), last),
            min((row.first for row in counts if row.first is not None), default=None),
            max((row.last for row in counts if row.last is not None), default=None),
        )  # fmt: skip

    def read_changes(self, tables: Tables) -> DataFrame:
        """Reads the rows that were inserted and deleted."""
        changes = tables.read_changes(self.stream.name, self.first, self.last)
        return changes.where(F.col("_change_type").isin("insert", "delete"))

    def read_lasting(self, tables: Tables) -> DataFrame:
        """Reads the inserted rows. Those that were deleted later are marked as deletions, so that they count nowhere."""
        if self.stamps:
            return self._read_by_stamp(tables)
        changes = self.read_changes(tables)
        inserted = changes.where(F.col("_change_type") == "insert")
        if not self.deletes:
            # A constant costs less than a column.
            return inserted.withColumn("_change_type", F.lit("insert"))
        event_id, gone = self.stream.event_id, "_gone_since"
        deleted = changes.where(F.col("_change_type") == "delete").groupBy(event_id).agg(F.max(COMMIT).alias(gone))
        kind = F.when(F.col(gone) > F.col(COMMIT), "delete").otherwise("insert")
        return inserted.join(deleted, event_id, "left").withColumn("_change_type", kind)

    def _read_by_stamp(self, tables: Tables) -> DataFrame:
        """Reads the rows that are there, with the columns of a change feed."""
        numbered = [(number, stamp) for number, stamp in enumerate(self.stamps, 1)]
        numbers = tables.spark.createDataFrame(numbered, f"{COMMIT} bigint, _stamp bigint")
        rows = tables.read_events(self.stream.name).withColumn("_stamp", F.unix_micros(_STAMP))
        rows = rows.join(F.broadcast(numbers), "_stamp").drop("_stamp")
        return rows.withColumns({"_change_type": F.lit("insert"), "_commit_timestamp": F.col(_STAMP)})

    def find_place(self, tables: Tables, commit: int | None, logged_at: dt.datetime) -> int | None:
        """Finds the last commit of this history that was judged before a row of rule_log; None for none.

        commit, logged_at: what the row says. Where events have the order of their stamps, the commit's own stamp decides, or
        the time of the row if that commit cannot be read any more.
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
    """The rows of a commit. first, last: the event times of those that it inserted, in microseconds; None without any."""

    commit: int
    events: int
    deleted: int
    first: int | None
    last: int | None


def _read_counts(tables: Tables, stream: Stream, first: int, last: int, *, is_estimate: bool) -> list[_CommitCounts]:
    """Counts the rows of the commits from the first to the last: by the log where it says all, else by reading them.

    The first and the last event time of all are exact, those of one commit to a millisecond; all are with `is_estimate`.
    """
    # Of the rows of alerts and of a table that others write, not all are events.
    folder = None if first or stream.table or stream.is_of_alerts else tables.log_folder(stream.name)
    logged = None if folder is None else list_inserted_rows(folder, last, stream.event_time)
    if not logged:
        return _count_changes(tables, stream, [(first, last)])
    if is_estimate:
        return [_CommitCounts(each.commit, each.rows, 0, each.first, each.last) for each in logged]
    # Statistics have milliseconds, cut or rounded.
    least, most = (
        min(each.first for each in logged) + _LOGGED_EXACTLY,
        max(each.last for each in logged) - _LOGGED_EXACTLY,
    )
    outer = {each.commit for each in logged if each.first <= least or each.last >= most}
    if len(outer) > _MOST_OUTER:
        return _count_changes(tables, stream, [(first, last)])
    inner = [
        _CommitCounts(each.commit, each.rows, 0, each.first, each.last) for each in logged if each.commit not in outer
    ]
    return sorted([*inner, *_count_changes(tables, stream, [(commit, commit) for commit in sorted(outer)])])


def _count_changes(tables: Tables, stream: Stream, ranges: Sequence[tuple[int, int]]) -> list[_CommitCounts]:
    """Counts the rows of commits by reading their changes. ranges: each from a commit to a commit."""
    inserted, time = F.col("_change_type") == "insert", F.unix_micros(stream.event_time)
    counts = (
        reduce(DataFrame.unionByName, (tables.read_changes(stream.name, *each) for each in ranges))
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


def _find_spans(commits: Iterable[tuple[int, int]], last: int) -> list[int]:
    """Returns the last commit of each span. commits: each with its number of events; last: the last of all."""
    spans, waiting = list[int](), 0
    for commit, events in commits:
        waiting += events
        if waiting >= _SPAN_EVENTS:
            spans.append(commit)
            waiting = 0
    return [*spans, last]

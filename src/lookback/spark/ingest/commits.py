"""Writes events to a stream's table in commits of a fixed size, each with a stamp later than all before."""

from __future__ import annotations

import os
import socket
import time
import uuid
from typing import TYPE_CHECKING, NamedTuple

from pyspark import StorageLevel
from pyspark.sql import functions as F  # noqa: N812

from lookback.core.errors import SetupError
from lookback.core.streams.fields import POSITION
from lookback.places import find_local_path
from lookback.spark.ingest.duplicates import DOUBTFUL, Duplicates
from lookback.spark.tables.sqltexts import to_timestamp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pyspark.sql import Column, DataFrame

    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables

_MARK = "lookback ingest"
_NUMBER = "__number"
# Rows of a partition are numbered from partition * 2^33, as monotonically_increasing_id does.
_PARTITION_BITS = 33


class Written(NamedTuple):
    """The numbers of events and commits written, and the `ingested_at` of the first commit; None without any."""

    events: int
    commits: int
    first_stamp: int | None


class EventWriter:
    """Writes the events of one round of ingest.

    Attributes:
        mark: The mark of the round's commits in the tables' logs.
    """

    def __init__(self, tables: Tables, stream: Stream, progress: Callable[[str], None] | None) -> None:
        self.mark = f"{_MARK} {uuid.uuid4().hex[:12]} by process {os.getpid()} on {socket.gethostname()}"
        self._tables, self._stream, self._progress = tables, stream, progress
        self._duplicates = Duplicates(tables, stream)
        # The last `ingested_at`, once known. No other process changes it while the lock is held.
        self._stamp: int | None = None

    def write(self, events: DataFrame, at_most: int) -> Written:
        """Writes new events commit by commit, except doubtful ones that prove to be duplicates.

        Args:
            events: The events, with the column DOUBTFUL.
            at_most: The maximum number of events.

        Raises:
            SetupError: If a lock file is impossible and another ingest has written since this one began.
        """
        events = self._number_rows(events, at_most).persist(StorageLevel.MEMORY_AND_DISK)
        try:
            partitions = _count_partitions(events)
            if partitions.doubtful:
                certain = self._duplicates.drop_doubtful(events).orderBy(*self._order_columns)
                certain = certain.withColumn(_NUMBER, F.monotonically_increasing_id())
                certain = certain.persist(StorageLevel.MEMORY_AND_DISK)
                try:
                    return self._commit_all(certain, _count_partitions(certain.withColumn(DOUBTFUL, F.lit(False))))
                finally:
                    certain.unpersist()
            return self._commit_all(events, partitions)
        finally:
            events.unpersist()

    def _number_rows(self, events: DataFrame, at_most: int) -> DataFrame:
        """Sorts new events and numbers them in that order; there are at most `at_most`."""
        if at_most <= self._stream.commit_rows:
            # With a single commit, Spark need not sample the rows to partition them.
            ordered = events.repartition(1).sortWithinPartitions(*self._order_columns)
        else:
            ordered = events.orderBy(*self._order_columns)
        return ordered.select(*self._stream.table_columns, POSITION, DOUBTFUL).withColumn(
            _NUMBER, F.monotonically_increasing_id()
        )

    @property
    def _order_columns(self) -> list[str]:
        return [self._stream.event_time, POSITION, self._stream.event_id]

    def _commit_all(self, events: DataFrame, partitions: _Partitions) -> Written:
        total, done, commits = sum(partitions.rows.values()), 0, 0
        first_stamp: int | None = None
        for ranges in _cut_commits(partitions.rows, self._stream.commit_rows):
            stamp = self._take_stamp()
            first_stamp = stamp if first_stamp is None else first_stamp
            self._commit(events.where(_is_within(ranges)), stamp)
            self._require_alone(commits)
            done, commits = done + sum(map(len, ranges)), commits + 1
            self._report(f"{self._stream.name}: {done:,} of {total:,} events, commit {commits}")
        return Written(total, commits, first_stamp)

    def _commit(self, events: DataFrame, stamp: int) -> None:
        # One task, hence one file. Sorted again because the task reads the cached partitions in any order.
        one = events.coalesce(1).sortWithinPartitions(_NUMBER)
        self._tables.append(
            one.select(*self._stream.table_columns, POSITION, to_timestamp(stamp).alias("ingested_at")),
            self._stream.name,
            self.mark,
        )

    def _take_stamp(self) -> int:
        last = self._read_last_stamp() if self._stamp is None else self._stamp
        self._stamp = max(read_clock(), last + 1)
        return self._stamp

    def _read_last_stamp(self) -> int:
        """Reads the table's last `ingested_at` if it is ahead of the clock, else returns 0. Usually reads no file."""
        if self._tables.is_unwritten(self._stream.name):
            return 0
        now = read_clock()
        ahead = self._tables.read(self._stream.name).where(F.col("ingested_at") >= to_timestamp(now))
        row = ahead.select(F.max(F.unix_micros("ingested_at"))).head()
        return int(row[0]) if row is not None and row[0] is not None else 0

    def _require_alone(self, commits: int) -> None:
        """Raises SetupError if a lock file is impossible and another ingest has written since this one began."""
        if find_local_path(self._tables.root) is not None:
            return
        # Maintenance may have committed since.
        history = self._tables.history(self._stream.name, commits + 50).select("userMetadata").collect()
        mine = [number for number, row in enumerate(history) if row[0] == self.mark]
        between = [row[0] for row in history[: mine[-1]] if (row[0] or "").startswith(_MARK) and row[0] != self.mark]
        if between:
            raise SetupError(
                f"another ingest writes to stream {self._stream.name!r} ({between[0]}); this one stopped after "
                f"{commits + 1} commits. Run it again when the other has ended, to ingest the remaining events."
            )

    def _report(self, line: str) -> None:
        if self._progress is not None:
            self._progress(line)


class _Partitions(NamedTuple):
    """The number of rows by partition, and the number of doubtful rows."""

    rows: dict[int, int]
    doubtful: int


def _count_partitions(events: DataFrame) -> _Partitions:
    partition = F.shiftright(F.col(_NUMBER), _PARTITION_BITS)
    rows = events.groupBy(partition.alias("partition")).agg(F.count("*"), F.count_if(F.col(DOUBTFUL))).collect()
    return _Partitions({row[0]: row[1] for row in sorted(rows)}, sum(row[2] for row in rows))


def _cut_commits(partitions: Mapping[int, int], commit_rows: int) -> Iterator[list[range]]:
    """Cuts partitions (number -> rows) in order into pieces of `commit_rows` row numbers; the last may be shorter."""
    piece: list[range] = []
    room = commit_rows
    for partition, rows in partitions.items():
        start, end = partition << _PARTITION_BITS, (partition << _PARTITION_BITS) + rows
        while start < end:
            taken = min(room, end - start)
            piece.append(range(start, start + taken))
            start, room = start + taken, room - taken
            if not room:
                yield piece
                piece, room = [], commit_rows
    if piece:
        yield piece


def _is_within(ranges: list[range]) -> Column:
    condition = F.lit(False)
    for each in ranges:
        condition = condition | F.col(_NUMBER).between(each.start, each.stop - 1)
    return condition


def read_clock() -> int:
    """Returns the current time in microseconds since the epoch."""
    return time.time_ns() // 1_000

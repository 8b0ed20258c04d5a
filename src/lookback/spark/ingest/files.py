"""Takes files into a stream's events table: typed, each event once, in order, in commits that no batch boundary cuts."""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pyspark import StorageLevel
from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812

from lookback.core.errors import SetupError
from lookback.core.values.times import to_utc
from lookback.spark.ingest.fields import ASSUMED, BLOCK, FILE, NO_TIME, NO_ZONE, RAW, REASON, ROW, reads_kafka
from lookback.spark.ingest.kafka import source_of
from lookback.spark.ingest.rejected import Rejected, Rejection, options_key, rejections_of
from lookback.spark.ingest.sources import Files, Source, planned, same_place
from lookback.spark.platform.session import is_connect
from lookback.spark.tables.locks import find_local_root, lock_ingest
from lookback.spark.tables.schemas import INGESTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from pyspark.sql import Column, DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables

_MARK = "lookback ingest"
_NUMBER, _DOUBTFUL = "__number", "__doubtful"
# Rows of a partition are numbered from partition * 2^33, as monotonically_increasing_id does.
_PARTITION_BITS = 33
_MOST_REASONS = 5


@dataclass(frozen=True)
class IngestReport:
    """What became of the rows offered.

    Versions are those of the events table; None where nothing was committed, and in the reports of continuous ingest.
    without_zone, without_time: usable rows with a time that names no zone, or with a day alone for a time; they are
    taken as UTC and as midnight UTC.
    """

    stream: str
    offered: int
    ingested: int
    duplicates: int
    rejected: int
    commits: int
    seconds: float
    first_version: int | None = None
    last_version: int | None = None
    without_zone: int = 0
    without_time: int = 0
    rejections: tuple[Rejection, ...] = ()

    @property
    def balanced(self) -> bool:
        """Whether every row offered is accounted for."""
        return self.offered == self.ingested + self.duplicates + self.rejected

    def plus(self, more: IngestReport) -> IngestReport:
        """This and a further round together, their versions left out."""
        counts = (
            "offered", "ingested", "duplicates", "rejected", "commits", "seconds", "without_zone", "without_time",
        )  # fmt: skip
        sums = {name: getattr(self, name) + getattr(more, name) for name in counts}
        return IngestReport(self.stream, **sums, rejections=_merged(self.rejections + more.rejections))

    @property
    def why_rejected(self) -> str:
        """The most frequent reasons of rejected rows, a line each with an example, and the command that lists all rows."""
        if not self.rejections:
            return ""
        lines = [f"  {rejection}" for rejection in self.rejections[:_MOST_REASONS]]
        if len(self.rejections) > _MOST_REASONS:
            lines.append(f"  ... and {len(self.rejections) - _MOST_REASONS} other reasons")
        return "\n".join([*lines, f"  all of them: lookback rejected {self.stream}"])

    def __str__(self) -> str:
        known = self.first_version is not None
        where = f" (versions {self.first_version} to {self.last_version})" if known else ""
        return (
            f"{self.stream}: {self.offered:,} offered = {self.ingested:,} ingested + {self.duplicates:,} duplicates + "
            f"{self.rejected:,} rejected; {self.commits:,} commits{where} in {self.seconds:.1f} s"
        )

    @property
    def assumptions(self) -> str:
        """What was assumed about times that do not say it, and how to say it; empty where nothing was."""
        told = []
        if self.without_zone:
            told.append(f"{_rows_have(self.without_zone)} a time without a zone, taken as UTC")
        if self.without_time:
            told.append(f"{_rows_have(self.without_time)} a day without a time, taken as midnight UTC")
        if not told:
            return ""
        return (
            f"{self.stream}: {'; '.join(told)}. Write times as 2026-01-31T12:00:00Z, or say the zone in `columns`, such as "
            "to_utc_timestamp(at, 'Europe/Berlin')"
        )


def _rows_have(count: int) -> str:
    return "1 row has" if count == 1 else f"{count:,} rows have"


def _merged(rejections: Iterable[Rejection]) -> tuple[Rejection, ...]:
    """One for each kind of reason, rows added, the first example kept; the most frequent first."""
    found: dict[str, Rejection] = {}
    for each in rejections:
        known = found.get(each.reason)
        found[each.reason] = each if known is None else replace(known, rows=known.rows + each.rows)
    return tuple(sorted(found.values(), key=lambda each: (-each.rows, each.reason)))


def ingest(
    tables: Tables,
    stream: Stream,
    path: str | Path | None = None,
    *,
    format: str | None = None,
    options: Mapping[str, str] | None = None,
    progress: Callable[[str], None] | None = print,
) -> IngestReport:
    """Takes in the files at `path` (default: where the stream's `source` says) once.

    format: parquet, csv or json; default: told by the files' names. options: Spark's reader options.
    progress: is given a line per commit. Events that the table has already, from an earlier run or one that was
    killed, are duplicates. Raises SetupError where the files or the table do not fit, or another ingest is running.
    """
    source = _source(tables, stream, path, format, options)
    with lock_ingest(tables, stream):
        tables.require(stream)
        step = Step(tables, stream, progress)
        return step.versions(step.take(source.files(tables.spark, stream)))


def retry_rejected(
    tables: Tables,
    stream: Stream,
    *,
    options: Mapping[str, str] | None = None,
    progress: Callable[[str], None] | None = print,
) -> IngestReport:
    """Takes in the stream's rows of rejected_events that can be used by now, as `ingest` would, and out of that table.

    They can be used when the stream's declaration was mended, or a person corrected `raw`; a file that could not be
    read is read again. What still cannot be used stays as it is and counts as rejected. options: Spark's reader options
    that were wrong before. Killed at any moment and run again, it loses nothing and takes nothing in twice.
    Raises SetupError where the table does not fit, or another ingest is running.
    """
    require_ingest(tables, stream)
    with lock_ingest(tables, stream):
        tables.require(stream)
        step = Step(tables, stream, progress)
        changed = {**dict(stream.source.get(options_key(stream)) or {}), **dict(options or {})}
        return step.versions(step.take_again(changed))


def ingest_continuously(
    tables: Tables,
    stream: Stream,
    path: str | Path | None = None,
    *,
    checkpoint: str | Path,
    every: str | None = "1 second",
    format: str | None = None,
    options: Mapping[str, str] | None = None,
    progress: Callable[[IngestReport], None] | None = None,
) -> StreamingQuery:
    """Takes in files as they appear at `path`, those that are there first; files taken once are not read again.

    A file that cannot be read is a row of rejected_events, for `retry_rejected`; the others go in. Move files to `path`
    when they are complete. checkpoint: the folder that remembers them. every: how often to look; None: take what is there, then end.
    progress: is given the report of each batch. Raises SetupError as `ingest` does.
    """
    source = _source(tables, stream, path, format, options)
    lock = lock_ingest(tables, stream)
    lock.__enter__()
    try:
        tables.require(stream)
        step = Step(tables, stream, None)

        def take(rows: DataFrame, batch_id: int) -> None:
            names = {same_place(row[0]) for row in rows.collect()}
            names |= {same_place(name) for name in planned(tables.spark, str(checkpoint), batch_id)}
            report = step.take(Files(tables.spark, source, stream, sorted(filter(source.means, names))))
            if progress is not None:
                progress(report)

        writer = source.watch(tables.spark).writeStream.foreachBatch(take)
        writer = writer.option("checkpointLocation", str(checkpoint)).queryName(f"ingest {stream.name}")
        writer = writer.trigger(availableNow=True) if every is None else writer.trigger(processingTime=every)
        query = writer.start()
    except BaseException:
        lock.__exit__(None, None, None)
        raise
    threading.Thread(target=_release_after, args=(query, lock), daemon=True).start()
    return query


def require_ingest(tables: Tables, stream: Stream) -> None:
    """Raises SetupError where others write the stream's events table, or this compute cannot take events in."""
    if is_connect(tables.spark):
        raise SetupError(
            "ingest keeps the rows that it found in memory while it writes them, commit by commit, for which Spark Connect "
            "(serverless, or standard access mode) has no way: take a cluster with dedicated access mode, as the job ingest does"
        )
    if stream.table:
        raise SetupError(
            f"the events of stream {stream.name!r} are in {stream.table}, which others write: nothing is ingested into it. "
            "Leave `table` out of the declaration to have a table of Lookback's own"
        )


def _source(
    tables: Tables, stream: Stream, path: str | Path | None, format_: str | None, options: Mapping[str, str] | None
) -> Source:
    require_ingest(tables, stream)
    if path is None and reads_kafka(stream):
        raise SetupError(f"stream {stream.name!r} reads a Kafka topic, which is taken in by `topic_ingest.TopicIngest`")
    return Source.find(tables.spark, stream, None if path is None else str(path), format_, options)


def _release_after(query: StreamingQuery, lock: Any) -> None:
    try:
        query.awaitTermination()
    except Exception:  # noqa: BLE001, S110 - whoever waits for the query is told why it ended
        pass
    finally:
        lock.__exit__(None, None, None)


class _Unread(Exception):
    """The rows cannot be read to their end."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Step:
    """One round: the rows that were found together, sorted and written. Its maker holds the lock of the stream."""

    def __init__(self, tables: Tables, stream: Stream, progress: Callable[[str], None] | None) -> None:
        self._tables, self._stream, self._progress = tables, stream, progress
        self._rejected = Rejected(tables, stream)
        self._mark = f"{_MARK} {uuid.uuid4().hex[:12]} by process {os.getpid()} on {socket.gethostname()}"
        # The last `ingested_at`, once it is known: nobody else stamps while the lock is held.
        self._stamp: int | None = None
        # That of the first commit of the round.
        self._first_stamp: int | None = None
        self._keeps_account: bool | None = None

    def take(self, files: Files) -> IngestReport:
        """Takes in the rows of files."""
        started = time.monotonic()
        try:
            return self._take(files.together(), started)
        except _Unread as failure:
            error: Exception = failure.error
        except Exception as found:  # noqa: BLE001 - raised again unless it is known
            error = found
        if not files.may_differ(error):
            raise error
        # Nothing is written yet.
        try:
            return self._take(files.apart(), started)
        except _Unread as failure:
            raise failure.error from None

    def take_again(self, options: Mapping[str, str]) -> IngestReport:
        """Takes in what was rejected and can be used now."""
        again = self._rejected.again(options)
        return self.take_judged(again.rows, again.remove)

    def take_judged(self, rows: DataFrame, then: Callable[[DataFrame], None] | None = None) -> IngestReport:
        """Takes in judged rows (see fields), whatever they came from; at last hands them to `then`."""
        try:
            return self._take(rows, time.monotonic(), then)
        except _Unread as failure:
            raise failure.error from None

    def _take(self, judged: DataFrame, started: float, then: Callable[[DataFrame], None] | None = None) -> IngestReport:
        """Takes in judged rows (see fields); at last hands them to `then`. Raises _Unread while nothing is written."""
        batch = judged.persist(StorageLevel.MEMORY_AND_DISK)
        self._first_stamp = None
        try:
            found = self._count(batch)
            ingested = commits = 0
            rejections: tuple[Rejection, ...] = ()
            if found.usable:
                ingested, commits = self._write(self._new(batch.where(F.col(REASON).isNull()), found))
            # Last, so that a run that was killed and is run again writes them once.
            if found.rejected:
                refused = batch.where(F.col(REASON).isNotNull())
                rejections = rejections_of(refused, F.col(REASON), F.col(RAW), source_of())
                self._rejected.write(refused, self._mark, _time(_now()))
            if then is not None:
                then(batch)
        finally:
            batch.unpersist()
        offered, seconds = found.usable + found.rejected, time.monotonic() - started
        duplicates = found.usable - ingested
        report = IngestReport(
            self._stream.name, offered, ingested, duplicates, found.rejected, commits, seconds,
            without_zone=found.without_zone, without_time=found.without_time, rejections=rejections,
        )  # fmt: skip
        self._keep_account(report)
        return report

    def _keep_account(self, report: IngestReport) -> None:
        """Writes what became of the rows into the table `ingests`, where `init` has made it."""
        if self._keeps_account is None:
            self._keeps_account = self._tables.exists("ingests")
        if not (report.offered and self._keeps_account):
            return
        counts = (report.offered, report.ingested, report.duplicates, report.rejected, report.commits)
        first, ended = (None if each is None else to_utc(each) for each in (self._first_stamp, _now()))
        row = self._tables.spark.createDataFrame([(report.stream, *counts, first, ended)], INGESTS)
        self._tables.append(row.coalesce(1), "ingests", self._mark)

    def versions(self, report: IngestReport) -> IngestReport:
        """The report with the versions of its commits. Raises SetupError where the table's log tells other numbers."""
        if not report.commits:
            return report
        # Others may have written in between, seldom many.
        history = self._tables.history(self._stream.name, report.commits + 100)
        rows = F.sum(F.col("operationMetrics")["numOutputRows"].cast("bigint"))
        mine = history.where(F.col("userMetadata") == self._mark)
        row = mine.select(F.min("version"), F.max("version"), rows).head()
        if row is None or row[2] != report.ingested:
            raise SetupError(f"{report} does not agree with the table's log: {row and row[2]} rows written")
        return replace(report, first_version=row[0], last_version=row[1])

    def _count(self, batch: DataFrame) -> _BatchFigures:
        usable = F.col(REASON).isNull()
        time_, id_ = F.when(usable, _micros(self._stream.event_time)), F.when(usable, F.col(self._stream.event_id))
        figures = (F.min(time_), F.max(time_), F.min(id_), F.max(id_), F.count_distinct(id_))
        try:
            assumed = [F.count_if(usable & (F.col(ASSUMED) == what)) for what in (NO_ZONE, NO_TIME)]
            row = batch.select(F.count_if(usable), F.count_if(~usable), *figures, *assumed).head()
        except Exception as error:
            raise _Unread(error) from error
        assert row is not None
        return _BatchFigures(*row)

    def _new(self, usable: DataFrame, found: _BatchFigures) -> DataFrame:
        """The events that the table does not have, each id once within dedupe_window, in order and numbered."""
        unknown = self._unknown(usable, found)
        if found.ids == found.usable:
            # The usual case: no id twice in the batch, so that nothing need be brought together by id.
            unknown = unknown.withColumn(_DOUBTFUL, F.lit(False))
        else:
            unknown = self._once(unknown)
        return self._numbered(unknown, found.usable)

    def _unknown(self, usable: DataFrame, found: _BatchFigures) -> DataFrame:
        if self._tables.is_unwritten(self._stream.name):
            return usable
        known = existing(self._tables, self._stream, found.first_time, found.last_time, found.first_id, found.last_id)
        known = known.select(
            F.col(self._stream.event_id).alias("__id"), _micros(self._stream.event_time).alias("__time")
        )
        ids = usable.select(F.col(self._stream.event_id).alias("__wanted"))
        if found.usable <= self._stream.commit_rows:
            # Few rows: the table's side shrinks to what they hit before anything of it is shuffled.
            ids = F.broadcast(ids)
        # Cut off from the table: Spark computes what depends on it anew, with another outcome, after every commit.
        hits = known.join(ids, F.col("__id") == F.col("__wanted"), "left_semi").localCheckpoint()
        if hits.isEmpty():
            return usable
        gap = F.abs(F.col("__time") - _micros(self._stream.event_time))
        same = (F.col("__id") == F.col(self._stream.event_id)) & (gap <= self._stream.dedupe_window)
        return usable.join(hits, same, "left_anti")

    def _once(self, events: DataFrame) -> DataFrame:
        """Marks what is certain, drops what certainly is a duplicate in the batch; the rest is DOUBTFUL.

        Of one id: an event more than the window after the one before it stays. One no more than the window after the
        last that surely stays goes. One beyond that, after a chain of closer ones, may be either: see `_settled`.
        """
        window, micros = self._stream.dedupe_window, _micros(self._stream.event_time)
        of_id = Window.partitionBy(self._stream.event_id).orderBy(self._stream.event_time, FILE, BLOCK, ROW)
        before = F.lag(micros).over(of_id)
        events = events.withColumn("__stays", before.isNull() | (micros - before > window))
        kept = F.last(F.when(F.col("__stays"), micros), ignorenulls=True).over(of_id)
        events = events.withColumn("__kept", kept).withColumn(_DOUBTFUL, ~F.col("__stays"))
        return events.where(F.col("__stays") | (micros - F.col("__kept") > window)).drop("__stays", "__kept")

    def _numbered(self, events: DataFrame, at_most: int) -> DataFrame:
        if at_most <= self._stream.commit_rows:
            # One commit: no sample need be drawn to share the rows out.
            ordered = events.repartition(1).sortWithinPartitions(*self._order)
        else:
            ordered = events.orderBy(*self._order)
        return ordered.select(*self._stream.fields, _DOUBTFUL).withColumn(_NUMBER, F.monotonically_increasing_id())

    @property
    def _order(self) -> list[str]:
        return [self._stream.event_time, self._stream.event_id]

    def _settled(self, events: DataFrame) -> DataFrame:
        """The events without the doubtful ones that are duplicates: id by id, in time, against the last that stayed."""
        row = F.struct(_micros(self._stream.event_time).alias("__time"), *[F.col(name) for name in self._stream.fields])
        lists = events.groupBy(self._stream.event_id).agg(F.array_sort(F.collect_list(row)).alias("__rows"))
        window = self._stream.dedupe_window
        stay = F.expr(
            "aggregate(__rows, slice(__rows, 1, 1), (kept, x) -> "
            f"if(x.__time - element_at(kept, -1).__time > {window}, concat(kept, array(x)), kept))"
        )
        settled = lists.select(F.explode(stay).alias("__row")).select("__row.*").drop("__time")
        return settled.orderBy(*self._order).withColumn(_NUMBER, F.monotonically_increasing_id())

    def _write(self, events: DataFrame) -> tuple[int, int]:
        """Writes the numbered events commit by commit. Returns how many events and commits."""
        events = events.persist(StorageLevel.MEMORY_AND_DISK)
        try:
            sizes, doubtful = _partitions(events)
            if doubtful:
                settled = self._settled(events).persist(StorageLevel.MEMORY_AND_DISK)
                try:
                    return self._commit_all(settled, _partitions(settled.withColumn(_DOUBTFUL, F.lit(False)))[0])
                finally:
                    settled.unpersist()
            return self._commit_all(events, sizes)
        finally:
            events.unpersist()

    def _commit_all(self, events: DataFrame, sizes: dict[int, int]) -> tuple[int, int]:
        total, done, commits = sum(sizes.values()), 0, 0
        for ranges in _cuts(sizes, self._stream.commit_rows):
            self._commit(events.where(_within(ranges)), self._next_stamp())
            self._alone(commits)
            done, commits = done + sum(last - first + 1 for first, last in ranges), commits + 1
            self._say(f"{self._stream.name}: {done:,} of {total:,} events, commit {commits}")
        return total, commits

    def _commit(self, events: DataFrame, stamp: int) -> None:
        # One task, hence one file; sorted again as it reads the cached partitions in any order.
        one = events.coalesce(1).sortWithinPartitions(_NUMBER)
        columns = [F.col(name) for name in self._stream.fields]
        self._tables.append(one.select(*columns, _time(stamp).alias("ingested_at")), self._stream.name, self._mark)

    def _next_stamp(self) -> int:
        last = self._last_stamp() if self._stamp is None else self._stamp
        self._stamp = max(_now(), last + 1)
        self._first_stamp = self._first_stamp or self._stamp
        return self._stamp

    def _last_stamp(self) -> int:
        """The table's last `ingested_at` where the clock has not passed it yet, else 0; reads no file in the usual case."""
        if self._tables.is_unwritten(self._stream.name):
            return 0
        now = _now()
        ahead = self._tables.read(self._stream.name).where(F.col("ingested_at") >= _time(now))
        row = ahead.select(F.max(_micros("ingested_at"))).head()
        return int(row[0]) if row is not None and row[0] is not None else 0

    def _alone(self, commits: int) -> None:
        """Where no lock file can be, looks whether another ingest has written since this one began."""
        if find_local_root(self._tables.root) is not None:
            return
        # Maintenance may have committed since.
        history = self._tables.history(self._stream.name, commits + 50).select("userMetadata").collect()
        mine = [number for number, row in enumerate(history) if row[0] == self._mark]
        between = [row[0] for row in history[: mine[-1]] if (row[0] or "").startswith(_MARK) and row[0] != self._mark]
        if between:
            raise SetupError(
                f"another ingest writes to stream {self._stream.name!r} ({between[0]}); this one stopped after "
                f"{commits + 1} commits. Run it again when the other has ended: it takes in what is missing."
            )

    def _say(self, line: str) -> None:
        if self._progress is not None:
            self._progress(line)


@dataclass(frozen=True)
class _BatchFigures:
    """A batch in figures: times in microseconds, None where no row is usable; `ids` different ids."""

    usable: int
    rejected: int
    first_time: int
    last_time: int
    first_id: int | str
    last_id: int | str
    ids: int
    without_zone: int
    without_time: int


def existing(
    tables: Tables, stream: Stream, first_time: int, last_time: int, first_id: int | str, last_id: int | str
) -> DataFrame:
    """The rows of the events table that can be duplicates of a batch with these least and greatest times and ids.

    first_time, last_time: microseconds; `dedupe_window` of the stream is added to both sides. first_id, last_id: of the
    field's type. The bounds are literals, both ends included, so that Delta passes over the files whose figures lie outside.
    """
    time_, id_ = F.col(stream.event_time), F.col(stream.event_id)
    first, last = _time(first_time - stream.dedupe_window), _time(last_time + stream.dedupe_window)
    near = (time_ >= first) & (time_ <= last)
    return tables.read(stream.name).where(near & (id_ >= F.lit(first_id)) & (id_ <= F.lit(last_id)))


def _partitions(events: DataFrame) -> tuple[dict[int, int], int]:
    """Rows in each partition, and how many rows are doubtful."""
    partition = F.shiftright(F.col(_NUMBER), _PARTITION_BITS)
    rows = events.groupBy(partition.alias("partition")).agg(F.count("*"), F.count_if(F.col(_DOUBTFUL))).collect()
    return {row[0]: row[1] for row in sorted(rows)}, sum(row[2] for row in rows)


def _cuts(sizes: Mapping[int, int], commit_rows: int) -> Iterator[list[tuple[int, int]]]:
    """Cuts partitions (number -> rows), in order, into pieces of `commit_rows` rows, the last one shorter.

    Each piece is a list of ranges of row numbers, both ends included.
    """
    piece: list[tuple[int, int]] = []
    room = commit_rows
    for partition, rows in sizes.items():
        start, end = partition << _PARTITION_BITS, (partition << _PARTITION_BITS) + rows
        while start < end:
            taken = min(room, end - start)
            piece.append((start, start + taken - 1))
            start, room = start + taken, room - taken
            if not room:
                yield piece
                piece, room = [], commit_rows
    if piece:
        yield piece


def _within(ranges: list[tuple[int, int]]) -> Column:
    condition = F.lit(False)
    for first, last in ranges:
        condition = condition | F.col(_NUMBER).between(first, last)
    return condition


def _micros(name: str) -> Column:
    return F.unix_micros(F.col(name))


def _time(microseconds: int) -> Column:
    return F.timestamp_micros(F.lit(microseconds).cast("bigint"))


def _now() -> int:
    return time.time_ns() // 1_000

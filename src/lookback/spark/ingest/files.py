"""Ingests files into a stream's events table: typed, each event once, in order, in commits of a fixed size."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import shlex
import socket
import threading
import time
import uuid
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, NamedTuple

from pyspark import StorageLevel
from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812

from lookback.core.errors import SetupError
from lookback.core.streams.fields import POSITION
from lookback.core.values.texts import count_noun
from lookback.core.values.times import to_utc
from lookback.places import find_local_path
from lookback.spark.ingest.fields import (
    ASSUMED,
    BLOCK,
    NO_TIME,
    NO_ZONE,
    RAW,
    REASON,
    ROW,
    ROW_BITS,
    UNIT,
    reads_kafka,
)
from lookback.spark.ingest.kafka import name_source
from lookback.spark.ingest.lookups import Lookups
from lookback.spark.ingest.rejected import RejectedRows, Rejection, count_rejections, mark_conflicts, name_options_key
from lookback.spark.ingest.sources import Files, Source, find_changed_files, normalize_slashes, read_planned_files
from lookback.spark.platform.session import is_connect, use_files_of
from lookback.spark.tables.locks import lock_ingest
from lookback.spark.tables.sqltexts import to_timestamp

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
_MAX_REASONS = 5


@dataclass(frozen=True)
class IngestReport:
    """Counts of the rows that an ingest read, ingested, found to be duplicates, and rejected.

    Attributes:
        stream: The stream's name.
        offered: The rows read.
        ingested: The rows written to the events table.
        duplicates: The rows whose event was already ingested.
        rejected: The rows written to rejected_events.
        commits: The number of commits.
        seconds: The duration.
        first_version: The first committed version of the events table; None if nothing was committed, and in the
            reports of continuous ingest.
        last_version: The last committed version; None in the same cases.
        without_zone: Usable rows with a time without a zone, taken as UTC.
        without_time: Usable rows with a day instead of a time, taken as midnight UTC.
        rejections: The kinds of reasons for rejected rows.
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
        """True if every row read is accounted for."""
        return self.offered == self.ingested + self.duplicates + self.rejected

    def plus(self, more: IngestReport) -> IngestReport:
        """Returns the sum of this report and another round's report `more`, without versions."""
        counts = (
            "offered", "ingested", "duplicates", "rejected", "commits", "seconds", "without_zone", "without_time",
        )  # fmt: skip
        sums = {name: getattr(self, name) + getattr(more, name) for name in counts}
        return IngestReport(self.stream, **sums, rejections=_merge_rejections(self.rejections + more.rejections))

    @property
    def why_rejected(self) -> str:
        """The most frequent reasons for rejected rows, one line each with an example, and the command to list all."""
        if not self.rejections:
            return ""
        lines = [f"  {rejection}" for rejection in self.rejections[:_MAX_REASONS]]
        if len(self.rejections) > _MAX_REASONS:
            lines.append(f"  ... and {len(self.rejections) - _MAX_REASONS} other reasons")
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
        """The assumptions about times without a zone or days without a time, and how to avoid them; may be empty."""
        assumed = []
        if self.without_zone:
            assumed.append(f"{_describe_rows(self.without_zone)} a time without a zone, taken as UTC")
        if self.without_time:
            assumed.append(f"{_describe_rows(self.without_time)} a day without a time, taken as midnight UTC")
        if not assumed:
            return ""
        return (
            f"{self.stream}: {'; '.join(assumed)}. Write times as 2026-01-31T12:00:00Z, or name the zone in `columns`, "
            "such as to_utc_timestamp(at, 'Europe/Berlin')"
        )


def _describe_rows(count: int) -> str:
    return "1 row has" if count == 1 else f"{count:,} rows have"


def _merge_rejections(rejections: Iterable[Rejection]) -> tuple[Rejection, ...]:
    """Merges rejections by kind: adds up the rows, keeps the first example, and sorts the most frequent kind first."""
    merged: dict[str, Rejection] = {}
    for each in rejections:
        known = merged.get(each.reason)
        merged[each.reason] = each if known is None else replace(known, rows=known.rows + each.rows)
    return tuple(sorted(merged.values(), key=lambda each: (-each.rows, each.reason)))


def ingest(
    tables: Tables,
    stream: Stream,
    path: str | Path | None = None,
    *,
    format: str | None = None,
    options: Mapping[str, str] | None = None,
    progress: Callable[[str], None] | None = print,
) -> IngestReport:
    """Ingests the files at a path once.

    Events that an earlier run has already written, even one that was killed, count as duplicates.

    Args:
        tables: The tables of the workspace.
        stream: The stream to ingest into.
        path: A file, a folder or a pattern; default: the path in the stream's `source`.
        format: parquet, csv or json; default: by the suffix of the files.
        options: Options of Spark's reader.
        progress: Called with a line for each commit.

    Raises:
        SetupError: If the files or the table do not fit, or another ingest is running.
    """
    source = _find_source(tables, stream, path, format, options)
    with lock_ingest(tables, stream):
        tables.require(stream)
        ingest_round = IngestRound(tables, stream, progress)
        return ingest_round.add_versions(ingest_round.take(source.select_files(tables.spark, stream)))


def retry_rejected(
    tables: Tables,
    stream: Stream,
    *,
    options: Mapping[str, str] | None = None,
    progress: Callable[[str], None] | None = print,
) -> IngestReport:
    """Moves rejected rows that have become usable into the events table, as `ingest` would.

    A row becomes usable if you correct the stream's declaration or the row's `raw`. Files that could not be read are
    read again. Rows that are still unusable stay unchanged and count as rejected. If the process is killed, run it
    again: no row is lost or ingested twice.

    Args:
        tables: The tables of the workspace.
        stream: The stream.
        options: Corrected options of Spark's reader.
        progress: Called with a line for each commit.

    Raises:
        SetupError: If the table does not fit, or another ingest is running.
    """
    require_ingest(tables, stream)
    with lock_ingest(tables, stream):
        tables.require(stream)
        ingest_round = IngestRound(tables, stream, progress)
        changed = {**dict(stream.source.get(name_options_key(stream)) or {}), **dict(options or {})}
        return ingest_round.add_versions(ingest_round.take_rejected(changed))


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
    warn: Callable[[str], None] | None = None,
) -> StreamingQuery:
    """Ingests the existing files at a path, then new files as they appear. Each file is read once.

    A file that cannot be read becomes a row of rejected_events, for `retry_rejected`, and does not stop the ingest.
    Move files to the path only when they are complete.

    Args:
        tables: The tables of the workspace.
        stream: The stream to ingest into.
        path: See `ingest`.
        checkpoint: The folder that records the ingested files.
        every: The interval at which to look for files; None: ingest the existing files, then end.
        format: See `ingest`.
        options: See `ingest`.
        progress: Called with the report of each batch.
        warn: Called with a sentence about files that changed after an earlier run had ingested them.

    Raises:
        SetupError: As `ingest` does.
    """
    source, folder = _find_source(tables, stream, path, format, options), tables.find_place(checkpoint)
    if warn is not None and (changed := find_changed_files(tables.spark, source, str(folder))):
        warn(
            f"{count_noun(len(changed), 'file')} changed after an earlier run ingested "
            f"{'it' if len(changed) == 1 else 'them'}, such as {changed[0]}: each file name is read once, so new rows "
            f"are missing. Ingest them with `lookback ingest {stream.name} {shlex.quote(changed[0])}`"
        )
    with contextlib.ExitStack() as opened:
        opened.enter_context(lock_ingest(tables, stream))
        tables.require(stream)
        ingest_round = IngestRound(tables, stream, None)

        def take(rows: DataFrame, batch_id: int) -> None:
            names = {normalize_slashes(row[0]) for row in rows.collect()}
            names |= {normalize_slashes(name) for name in read_planned_files(tables.spark, str(folder), batch_id)}
            report = ingest_round.take(Files(tables.spark, source, stream, sorted(filter(source.covers, names))))
            if progress is not None:
                progress(report)

        writer = source.watch(tables.spark).writeStream.foreachBatch(take)
        writer = writer.option("checkpointLocation", str(folder)).queryName(f"ingest {stream.name}")
        writer = writer.trigger(availableNow=True) if every is None else writer.trigger(processingTime=every)
        with use_files_of(tables.spark, folder):
            query = writer.start()
        lock = opened.pop_all()
    threading.Thread(target=_release_after, args=(query, lock), daemon=True).start()
    return query


def require_ingest(tables: Tables, stream: Stream) -> None:
    """Raises SetupError if another program writes the stream's events table, or this compute cannot ingest."""
    if is_connect(tables.spark):
        raise SetupError(
            "ingest caches rows in memory while it writes them, which Spark Connect (serverless, or standard access "
            "mode) does not support: use a cluster with dedicated access mode, as the job ingest does"
        )
    if stream.is_of_alerts:
        raise SetupError(
            f"the events of stream {stream.name!r} are the alerts of the other streams, written by their evaluations; "
            "you cannot ingest into it"
        )
    if stream.table:
        raise SetupError(
            f"the events of stream {stream.name!r} are in {stream.table}, which another program writes; you cannot "
            "ingest into it. To have Lookback create a table, remove `table` from the declaration"
        )


def _find_source(
    tables: Tables, stream: Stream, path: str | Path | None, format_: str | None, options: Mapping[str, str] | None
) -> Source:
    require_ingest(tables, stream)
    if path is None and reads_kafka(stream):
        raise SetupError(f"stream {stream.name!r} reads a Kafka topic; ingest it with `topics.TopicIngest`")
    return Source.find(tables.spark, stream, None if path is None else str(path), format_, options)


def _release_after(query: StreamingQuery, lock: contextlib.ExitStack) -> None:
    # The caller gets an error by waiting for the query.
    with lock, contextlib.suppress(Exception):
        query.awaitTermination()


class IngestRound:
    """One round of ingest: reads, sorts and writes rows together. The caller holds the stream's lock."""

    def __init__(self, tables: Tables, stream: Stream, progress: Callable[[str], None] | None) -> None:
        self._tables, self._stream, self._progress = tables, stream, progress
        self._rejected = RejectedRows(tables, stream)
        self._lookups = Lookups(tables, stream)
        self._lookups.require()
        self._mark = f"{_MARK} {uuid.uuid4().hex[:12]} by process {os.getpid()} on {socket.gethostname()}"
        # The last `ingested_at`, once known. No other process changes it while the lock is held.
        self._stamp: int | None = None
        # The stamp of the round's first commit.
        self._first_stamp: int | None = None
        self._has_account: bool | None = None

    def take(self, files: Files) -> IngestReport:
        """Ingests the rows of files."""
        started = time.monotonic()
        try:
            batch = self._cache(files.read_together())
        except Exception as error:
            if not files.may_succeed_apart(error):
                raise
            batch = self._cache(files.read_apart())
        return self._take(batch, started)

    def take_rejected(self, options: Mapping[str, str]) -> IngestReport:
        """Ingests rejected rows that have become usable; `options` override their original reader options."""
        retried = self._rejected.check_again(options)
        return self.take_checked(retried.rows, retried.remove)

    def take_checked(self, rows: DataFrame, then: Callable[[DataFrame], None] | None = None) -> IngestReport:
        """Ingests checked `rows` (see `fields`) of any source, and finally calls `then` with them."""
        started = time.monotonic()
        return self._take(self._cache(rows), started, then)

    def _cache(self, checked: DataFrame) -> _Batch:
        """Caches and counts checked rows, which reads all of them."""
        rows = checked.persist(StorageLevel.MEMORY_AND_DISK)
        try:
            return _Batch(rows, self._count_batch(rows))
        except BaseException:
            rows.unpersist()
            raise

    def _take(self, batch: _Batch, started: float, then: Callable[[DataFrame], None] | None = None) -> IngestReport:
        figures = batch.figures
        self._first_stamp = None
        with contextlib.ExitStack() as cached:
            cached.callback(batch.rows.unpersist)
            batch = _Batch(_add_positions(batch.rows), figures)
            written = _Written(0, 0)
            rejections: tuple[Rejection, ...] = ()
            settled = self._settle(batch, cached)
            if settled.new is not None:
                written = self._write(self._select_new(settled.new))
            # Rejected rows come last, so that a run that is killed and repeated writes them once.
            if settled.rejected:
                refused = settled.rows.where(F.col(REASON).isNotNull())
                rejections = count_rejections(refused, F.col(REASON), F.col(RAW), name_source())
                self._rejected.write(refused, self._mark, to_timestamp(_now()))
            if then is not None:
                then(settled.rows)
        offered, seconds = figures.usable + figures.rejected, time.monotonic() - started
        duplicates = offered - settled.rejected - written.events
        report = IngestReport(
            self._stream.name, offered, written.events, duplicates, settled.rejected, written.commits, seconds,
            without_zone=figures.without_zone, without_time=figures.without_time, rejections=rejections,
        )  # fmt: skip
        self._write_account(report)
        return report

    def _write_account(self, report: IngestReport) -> None:
        """Writes the counts of a round to the table `ingests`, if it exists."""
        if self._has_account is None:
            self._has_account = self._tables.exists("ingests")
        if not (report.offered and self._has_account):
            return
        counts = (report.offered, report.ingested, report.duplicates, report.rejected, report.commits)
        first, ended = (None if each is None else to_utc(each) for each in (self._first_stamp, _now()))
        self._tables.append_rows([(report.stream, *counts, first, ended)], "ingests", self._mark)

    def add_versions(self, report: IngestReport) -> IngestReport:
        """Returns the report with the versions of its commits. Raises SetupError if the table's log disagrees."""
        if not report.commits:
            return report
        # Other writers may have committed in between, but rarely often.
        history = self._tables.history(self._stream.name, report.commits + 100)
        rows = F.sum(F.col("operationMetrics")["numOutputRows"].cast("bigint"))
        mine = history.where(F.col("userMetadata") == self._mark)
        row = mine.select(F.min("version").alias("first"), F.max("version").alias("last"), rows.alias("rows")).head()
        if row is None or row["rows"] != report.ingested:
            raise SetupError(f"{report} does not agree with the table's log: {row and row['rows']} rows written")
        return replace(report, first_version=row["first"], last_version=row["last"])

    def _count_batch(self, rows: DataFrame) -> _BatchFigures:
        usable = F.col(REASON).isNull()
        time_, id_ = F.when(usable, _to_micros(self._stream.event_time)), F.when(usable, F.col(self._stream.event_id))
        figures = (F.min(time_), F.max(time_), F.min(id_), F.max(id_), F.count_distinct(id_))
        assumed = [F.count_if(usable & (F.col(ASSUMED) == part)) for part in (NO_ZONE, NO_TIME)]
        row = rows.select(F.count_if(usable), F.count_if(~usable), *figures, *assumed).head()
        assert row is not None
        return _BatchFigures(*row)

    def _settle(self, batch: _Batch, cached: contextlib.ExitStack) -> _Settled:
        """Finds the events that are not in the table yet and adds their look-ups; `cached` releases cached rows.

        Events that are in the table are not looked up again: they stay duplicates, even if a look-up would now differ.
        """
        rows, figures = batch
        if not figures.usable:
            return _Settled(rows, figures.rejected, None)
        usable = rows.where(F.col(REASON).isNull())
        known = self._find_known(usable, figures)
        new = usable if known is None else usable.join(known, self._is_known, "left_anti")
        differing = [] if known is None else [self._find_different(usable, known)]
        if figures.ids != figures.usable:
            new, more = self._split_off_different(new)
            differing += more
        if differing:
            conflicts = reduce(lambda some, more: some.unionByName(more), differing).persist()
            cached.callback(conflicts.unpersist)
            rejected = conflicts.count()
            if rejected:
                rows = mark_conflicts(rows, conflicts, self._stream)
                figures = figures._replace(usable=figures.usable - rejected, rejected=figures.rejected + rejected)
                usable = rows.where(F.col(REASON).isNull())
        if not self._stream.lookups:
            return _Settled(rows, figures.rejected, _Batch(new, figures))
        looked_up = self._cache(self._lookups.join(new, are_few=figures.usable <= self._stream.commit_rows))
        cached.callback(looked_up.rows.unpersist)
        settled = looked_up.rows.unionByName(rows.where(F.col(REASON).isNotNull()))
        if known is not None:
            settled = settled.unionByName(usable.join(known, self._is_known, "left_semi"))
        left = _Batch(looked_up.rows.where(F.col(REASON).isNull()), looked_up.figures)
        rejected = figures.rejected + looked_up.figures.rejected
        return _Settled(settled, rejected, left if left.figures.usable else None)

    def _select_new(self, batch: _Batch) -> DataFrame:
        """Selects the events that are not in the table, each id once within dedupe_window, sorted and numbered."""
        unknown, figures = batch
        if figures.ids == figures.usable:
            # The usual case: no id repeats in the batch, so no shuffle by id is needed.
            unknown = unknown.withColumn(_DOUBTFUL, F.lit(False))
        else:
            unknown = self._drop_certain_duplicates(unknown)
        return self._number_rows(unknown, figures.usable)

    def _find_known(self, usable: DataFrame, figures: _BatchFigures) -> DataFrame | None:
        """Finds the table's events with ids of the batch, as (__id, __time, __content, __stamp); None without any."""
        if self._tables.is_unwritten(self._stream.name):
            return None
        bounds = (figures.first_time, figures.last_time, figures.first_id, figures.last_id)
        known = read_possible_duplicates(self._tables, self._stream, *bounds)
        known = known.select(
            F.col(self._stream.event_id).alias("__id"),
            _to_micros(self._stream.event_time).alias("__time"),
            F.struct(*self._stream.own_fields).alias("__content"),
            F.col("ingested_at").alias("__stamp"),
        )
        ids = usable.select(F.col(self._stream.event_id).alias("__wanted"))
        if figures.usable <= self._stream.commit_rows:
            # For few rows, filter the table by their ids before the shuffle.
            ids = F.broadcast(ids)
        # A checkpoint, because Spark would otherwise read the table again after every commit, with another result.
        hits = known.join(ids, F.col("__id") == F.col("__wanted"), "left_semi").localCheckpoint()
        return None if hits.isEmpty() else hits

    @property
    def _is_known(self) -> Column:
        """The condition that a row is an event of the table, for a join with the result of `_find_known`."""
        gap = F.abs(F.col("__time") - _to_micros(self._stream.event_time))
        return (F.col("__id") == F.col(self._stream.event_id)) & (gap <= self._stream.dedupe_window)

    def _find_different(self, usable: DataFrame, known: DataFrame) -> DataFrame:
        """Finds the rows that have the id of an event in the table but differ from it in some field."""
        fields = self._stream.own_fields
        same = reduce(and_, [F.col(name).eqNullSafe(F.col("__content")[name]) for name in fields])
        found = usable.join(known, self._is_known & ~same, "left_semi").localCheckpoint()
        if found.isEmpty():
            return found
        # An event from before a column was added has no value there, which does not count as a difference.
        added = self._read_added_columns()
        same = F.lit(True)
        for name in fields:
            is_equal = F.col(name).eqNullSafe(F.col("__content")[name])
            same &= is_equal | (F.col("__stamp") < F.lit(added[name])) if name in added else is_equal
        # The row may equal another event with this id.
        return found.join(known, self._is_known & same, "left_anti")

    def _read_added_columns(self) -> dict[str, dt.datetime]:
        """Reads when columns were added to the events table; leaves out the original columns."""
        history = self._tables.history(self._stream.name).where("operation = 'ADD COLUMNS'")
        columns = F.from_json(F.col("operationParameters")["columns"], "array<struct<column: struct<name: string>>>")
        rows = history.select("timestamp", F.explode(columns["column"]["name"]).alias("name")).collect()
        return {row["name"]: row["timestamp"] for row in rows}

    def _split_off_different(self, new: DataFrame) -> tuple[DataFrame, list[DataFrame]]:
        """Splits off the rows that differ from the kept event of their id; returns the rest and a list of these."""
        id_, fields = self._stream.event_id, list(self._stream.own_fields)
        # NULLs do not change the hash, so their positions are hashed too.
        content = F.xxhash64(*fields, *[F.col(name).isNull() for name in fields])
        contested = new.groupBy(id_).agg(F.min(content).alias("least"), F.max(content).alias("greatest"))
        contested = contested.where("least != greatest").select(id_).localCheckpoint()
        if contested.isEmpty():
            return new, []
        columns, window = new.columns, self._stream.dedupe_window
        row = F.struct(
            _to_micros(self._stream.event_time).alias("__time"), POSITION, F.struct(*fields).alias("__content"),
            F.struct(*columns).alias("__whole"),
        )  # fmt: skip
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

    def _drop_certain_duplicates(self, events: DataFrame) -> DataFrame:
        """Drops the rows that are certainly duplicates within the batch, and marks possible duplicates as DOUBTFUL.

        Among the events of one id, an event stays if it is more than the window after the previous event. It is dropped
        if it is at most the window after the last event that certainly stays. Any other event, at the end of a chain of
        closer ones, is doubtful: see `_drop_doubtful_duplicates`.
        """
        window, micros = self._stream.dedupe_window, _to_micros(self._stream.event_time)
        of_id = Window.partitionBy(self._stream.event_id).orderBy(self._stream.event_time, POSITION)
        before = F.lag(micros).over(of_id)
        events = events.withColumn("__stays", before.isNull() | (micros - before > window))
        kept = F.last(F.when(F.col("__stays"), micros), ignorenulls=True).over(of_id)
        events = events.withColumn("__kept", kept).withColumn(_DOUBTFUL, ~F.col("__stays"))
        return events.where(F.col("__stays") | (micros - F.col("__kept") > window)).drop("__stays", "__kept")

    def _number_rows(self, events: DataFrame, at_most: int) -> DataFrame:
        if at_most <= self._stream.commit_rows:
            # With a single commit, Spark need not sample the rows to partition them.
            ordered = events.repartition(1).sortWithinPartitions(*self._order_columns)
        else:
            ordered = events.orderBy(*self._order_columns)
        return ordered.select(*self._stream.fields, POSITION, _DOUBTFUL).withColumn(
            _NUMBER, F.monotonically_increasing_id()
        )

    @property
    def _order_columns(self) -> list[str]:
        return [self._stream.event_time, POSITION, self._stream.event_id]

    def _drop_doubtful_duplicates(self, events: DataFrame) -> DataFrame:
        """Drops duplicates among doubtful events: for each id in order of time, compares with the last kept event."""
        row = F.struct(_to_micros(self._stream.event_time).alias("__time"), POSITION, *self._stream.fields)
        lists = events.groupBy(self._stream.event_id).agg(F.array_sort(F.collect_list(row)).alias("__rows"))
        window = self._stream.dedupe_window
        stay = F.expr(
            "aggregate(__rows, slice(__rows, 1, 1), (kept, x) -> "
            f"if(x.__time - element_at(kept, -1).__time > {window}, concat(kept, array(x)), kept))"
        )
        settled = lists.select(F.explode(stay).alias("__row")).select("__row.*").drop("__time")
        return settled.orderBy(*self._order_columns).withColumn(_NUMBER, F.monotonically_increasing_id())

    def _write(self, events: DataFrame) -> _Written:
        """Writes the numbered events commit by commit."""
        events = events.persist(StorageLevel.MEMORY_AND_DISK)
        try:
            partitions = _count_partitions(events)
            if partitions.doubtful:
                certain = self._drop_doubtful_duplicates(events).persist(StorageLevel.MEMORY_AND_DISK)
                try:
                    return self._commit_all(certain, _count_partitions(certain.withColumn(_DOUBTFUL, F.lit(False))))
                finally:
                    certain.unpersist()
            return self._commit_all(events, partitions)
        finally:
            events.unpersist()

    def _commit_all(self, events: DataFrame, partitions: _Partitions) -> _Written:
        total, done, commits = sum(partitions.rows.values()), 0, 0
        for ranges in _cut_commits(partitions.rows, self._stream.commit_rows):
            self._commit(events.where(_is_within(ranges)), self._take_stamp())
            self._require_alone(commits)
            done, commits = done + sum(map(len, ranges)), commits + 1
            self._report(f"{self._stream.name}: {done:,} of {total:,} events, commit {commits}")
        return _Written(total, commits)

    def _commit(self, events: DataFrame, stamp: int) -> None:
        # One task, hence one file. Sorted again because the task reads the cached partitions in any order.
        one = events.coalesce(1).sortWithinPartitions(_NUMBER)
        self._tables.append(
            one.select(*self._stream.fields, POSITION, to_timestamp(stamp).alias("ingested_at")),
            self._stream.name,
            self._mark,
        )

    def _take_stamp(self) -> int:
        last = self._read_last_stamp() if self._stamp is None else self._stamp
        self._stamp = max(_now(), last + 1)
        self._first_stamp = self._first_stamp or self._stamp
        return self._stamp

    def _read_last_stamp(self) -> int:
        """Reads the table's last `ingested_at` if it is ahead of the clock, else returns 0. Usually reads no file."""
        if self._tables.is_unwritten(self._stream.name):
            return 0
        now = _now()
        ahead = self._tables.read(self._stream.name).where(F.col("ingested_at") >= to_timestamp(now))
        row = ahead.select(F.max(_to_micros("ingested_at"))).head()
        return int(row[0]) if row is not None and row[0] is not None else 0

    def _require_alone(self, commits: int) -> None:
        """Raises SetupError if a lock file is impossible and another ingest has written since this one began."""
        if find_local_path(self._tables.root) is not None:
            return
        # Maintenance may have committed since.
        history = self._tables.history(self._stream.name, commits + 50).select("userMetadata").collect()
        mine = [number for number, row in enumerate(history) if row[0] == self._mark]
        between = [row[0] for row in history[: mine[-1]] if (row[0] or "").startswith(_MARK) and row[0] != self._mark]
        if between:
            raise SetupError(
                f"another ingest writes to stream {self._stream.name!r} ({between[0]}); this one stopped after "
                f"{commits + 1} commits. Run it again when the other has ended, to ingest the remaining events."
            )

    def _report(self, line: str) -> None:
        if self._progress is not None:
            self._progress(line)


class _BatchFigures(NamedTuple):
    """Figures of a batch. Times are in microseconds; `ids` counts distinct ids. Bounds are None if no row is usable."""

    usable: int
    rejected: int
    first_time: int
    last_time: int
    first_id: int | str
    last_id: int | str
    ids: int
    without_zone: int
    without_time: int


class _Batch(NamedTuple):
    """Checked rows, cached, and their figures."""

    rows: DataFrame
    figures: _BatchFigures


class _Settled(NamedTuple):
    """A batch after de-duplication and look-ups: all rows with their REASON, how many have one, and the new events."""

    rows: DataFrame
    rejected: int
    new: _Batch | None


class _Partitions(NamedTuple):
    """The number of rows by partition, and the number of doubtful rows."""

    rows: dict[int, int]
    doubtful: int


class _Written(NamedTuple):
    """The numbers of events and commits written."""

    events: int
    commits: int


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


def _count_partitions(events: DataFrame) -> _Partitions:
    partition = F.shiftright(F.col(_NUMBER), _PARTITION_BITS)
    rows = events.groupBy(partition.alias("partition")).agg(F.count("*"), F.count_if(F.col(_DOUBTFUL))).collect()
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


def _add_positions(rows: DataFrame) -> DataFrame:
    """Adds POSITION: the number of the row's UNIT in this batch, times 2^ROW_BITS, plus the row's number in the UNIT.

    Both numbers start at 0, in the order of UNIT, BLOCK and ROW. They do not depend on how Spark splits files among
    tasks.
    """
    blocks = rows.where(F.col(UNIT).isNotNull()).groupBy(UNIT, BLOCK).agg(F.min(ROW), F.max(ROW)).collect()
    starts, unit, number, row = list[tuple[str, int, int]](), None, -1, 0
    for each, block, first, last in sorted(blocks):
        if each != unit:
            unit, number, row = each, number + 1, 0
        starts.append((each, block, (number << ROW_BITS) + row - first))
        row += last - first + 1
    begins = rows.sparkSession.createDataFrame(starts, f"{UNIT} string, {BLOCK} bigint, __start bigint")
    placed = rows.join(F.broadcast(begins), [UNIT, BLOCK], "left")
    return placed.withColumn(POSITION, F.col(ROW) + F.col("__start")).drop("__start")


def _to_micros(name: str) -> Column:
    return F.unix_micros(F.col(name))


def _now() -> int:
    return time.time_ns() // 1_000

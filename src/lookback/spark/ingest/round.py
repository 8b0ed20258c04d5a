"""One round of ingest: reads rows, finds the new events, writes them, and accounts for every row."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import functions as F  # noqa: N812

from lookback.core.errors import SetupError
from lookback.core.values.times import to_utc
from lookback.spark.ingest.batch import CheckedBatch, add_positions, cache_batch
from lookback.spark.ingest.commits import EventWriter, Written, read_clock
from lookback.spark.ingest.duplicates import DOUBTFUL, Duplicates
from lookback.spark.ingest.fields import RAW, REASON
from lookback.spark.ingest.filelog import read_change_times
from lookback.spark.ingest.kafka import name_source
from lookback.spark.ingest.lookups import Lookups
from lookback.spark.ingest.rejected import RejectedRows, Rejection, count_rejections, mark_conflicts
from lookback.spark.ingest.report import IngestReport
from lookback.spark.tables.sqltexts import to_timestamp

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pyspark.sql import DataFrame

    from lookback.core.streams.declaration import Stream
    from lookback.spark.ingest.filerows import Files
    from lookback.spark.tables.lakehouse import Tables


# The maximum number of files whose names are kept in a row of `ingests`: about a megabyte.
_MAX_NAMED_FILES = 10_000


class IngestRound:
    """One round of ingest: reads, sorts and writes rows together. The caller holds the stream's lock."""

    def __init__(self, tables: Tables, stream: Stream, progress: Callable[[str], None] | None) -> None:
        self._tables, self._stream = tables, stream
        self._writer = EventWriter(tables, stream, progress)
        self._duplicates = Duplicates(tables, stream)
        self._rejected = RejectedRows(tables, stream)
        self._lookups = Lookups(tables, stream)
        self._lookups.require()
        self._has_account: bool | None = None

    def take(self, files: Files) -> IngestReport:
        """Ingests the rows of files."""
        started = time.monotonic()
        # Before the rows are read: a file that comes or changes meanwhile is read again.
        once = None if files.names is not None else read_change_times(self._tables.spark, files.source)
        try:
            batch = cache_batch(files.read_together(), self._stream)
        except Exception as error:
            if not files.may_succeed_apart(error):
                raise
            batch = cache_batch(files.read_apart(), self._stream)
        return self._take(batch, started, files=once)

    def take_rejected(self, options: Mapping[str, str]) -> IngestReport:
        """Ingests rejected rows that have become usable; `options` override their original reader options."""
        retried = self._rejected.check_again(options)
        return self.take_checked(retried.rows, retried.remove)

    def take_checked(self, rows: DataFrame, then: Callable[[DataFrame], None] | None = None) -> IngestReport:
        """Ingests checked `rows` (see `fields`) of any source, and finally calls `then` with them."""
        started = time.monotonic()
        return self._take(cache_batch(rows, self._stream), started, then)

    def _take(
        self,
        batch: CheckedBatch,
        started: float,
        then: Callable[[DataFrame], None] | None = None,
        files: Mapping[str, int] | None = None,
    ) -> IngestReport:
        figures = batch.figures
        with contextlib.ExitStack() as cached:
            cached.callback(batch.rows.unpersist)
            batch = CheckedBatch(add_positions(batch.rows), figures)
            written = Written(0, 0, None)
            rejections: tuple[Rejection, ...] = ()
            settled = self._settle(batch, cached)
            if settled.new is not None:
                written = self._writer.write(self._select_new(settled.new), settled.new.figures.usable)
            # Rejected rows come last, so that a run that is killed and repeated writes them once.
            if settled.rejected:
                refused = settled.rows.where(F.col(REASON).isNotNull())
                rejections = count_rejections(refused, F.col(REASON), F.col(RAW), name_source())
                self._rejected.write(refused, self._writer.mark, to_timestamp(read_clock()))
            if then is not None:
                then(settled.rows)
        offered, seconds = figures.usable + figures.rejected, time.monotonic() - started
        duplicates = offered - settled.rejected - written.events
        report = IngestReport(
            stream=self._stream.name,
            offered=offered,
            ingested=written.events,
            duplicates=duplicates,
            rejected=settled.rejected,
            commits=written.commits,
            seconds=seconds,
            without_zone=figures.without_zone,
            without_time=figures.without_time,
            rejections=rejections,
        )
        self._write_account(report, written.first_stamp, files)
        return report

    def _write_account(self, report: IngestReport, first_stamp: int | None, files: Mapping[str, int] | None) -> None:
        """Writes the counts of a round to the table `ingests`, if it exists, and the times of change of its files."""
        if self._has_account is None:
            self._has_account = self._tables.exists("ingests")
        if not (report.offered and self._has_account):
            return
        counts = (report.offered, report.ingested, report.duplicates, report.rejected, report.commits)
        first, ended = (None if each is None else to_utc(each) for each in (first_stamp, read_clock()))
        # A run with other options may use what this one rejected.
        names = None
        if files and len(files) <= _MAX_NAMED_FILES and not report.rejected:
            names = {name: str(time) for name, time in files.items()}
        self._tables.append_rows([(report.stream, *counts, first, ended, names)], "ingests", self._writer.mark)

    def add_versions(self, report: IngestReport) -> IngestReport:
        """Returns the report with the versions of its commits. Raises SetupError if the table's log disagrees."""
        if not report.commits:
            return report
        # Other writers may have committed in between, but rarely often.
        history = self._tables.history(self._stream.name, report.commits + 100)
        rows = F.sum(F.col("operationMetrics")["numOutputRows"].cast("bigint"))
        mine = history.where(F.col("userMetadata") == self._writer.mark)
        row = mine.select(F.min("version").alias("first"), F.max("version").alias("last"), rows.alias("rows")).head()
        if row is None or row["rows"] != report.ingested:
            raise SetupError(f"{report} does not agree with the table's log: {row and row['rows']} rows written")
        return replace(report, first_version=row["first"], last_version=row["last"])

    def _settle(self, batch: CheckedBatch, cached: contextlib.ExitStack) -> _Settled:
        """Finds the events that are not in the table yet and adds their look-ups; `cached` releases cached rows.

        Events that are in the table are not looked up again: they stay duplicates, even if a look-up would now differ.
        """
        rows, figures = batch
        if not figures.usable:
            return _Settled(rows, figures.rejected, None)
        usable = rows.where(F.col(REASON).isNull())
        known = self._duplicates.find_known(usable, figures)
        new = usable if known is None else usable.join(known, self._duplicates.is_known, "left_anti")
        differing = [] if known is None else [self._duplicates.find_different(usable, known)]
        if figures.ids != figures.usable:
            new, more = self._duplicates.split_off_different(new)
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
            return _Settled(rows, figures.rejected, CheckedBatch(new, figures))
        looked_up = cache_batch(
            self._lookups.join(new, are_few=figures.usable <= self._stream.commit_rows), self._stream
        )
        cached.callback(looked_up.rows.unpersist)
        settled = looked_up.rows.unionByName(rows.where(F.col(REASON).isNotNull()))
        if known is not None:
            settled = settled.unionByName(usable.join(known, self._duplicates.is_known, "left_semi"))
        left = CheckedBatch(looked_up.rows.where(F.col(REASON).isNull()), looked_up.figures)
        rejected = figures.rejected + looked_up.figures.rejected
        return _Settled(settled, rejected, left if left.figures.usable else None)

    def _select_new(self, batch: CheckedBatch) -> DataFrame:
        """Selects the events of a batch without those that are certainly duplicates in it; adds DOUBTFUL."""
        unknown, figures = batch
        if figures.ids == figures.usable:
            # The usual case: no id repeats in the batch, so no shuffle by id is needed.
            return unknown.withColumn(DOUBTFUL, F.lit(False))
        return self._duplicates.drop_certain(unknown)


class _Settled(NamedTuple):
    """A batch after de-duplication and look-ups: all rows with their REASON, how many have one, and the new events."""

    rows: DataFrame
    rejected: int
    new: CheckedBatch | None

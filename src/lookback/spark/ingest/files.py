"""Ingests files into a stream's events table: typed, each event once, in order, in commits of a fixed size."""

from __future__ import annotations

import contextlib
import shlex
import threading
from functools import cache, partial
from typing import TYPE_CHECKING

from lookback.core.errors import SetupError
from lookback.core.values.texts import count_noun
from lookback.spark.ingest.fields import reads_kafka
from lookback.spark.ingest.filelog import find_changed_files, find_taken_files, read_change_times, read_planned_files
from lookback.spark.ingest.filerows import Files
from lookback.spark.ingest.rejected import name_options_key
from lookback.spark.ingest.round import IngestRound
from lookback.spark.ingest.sources import Source, normalize_slashes
from lookback.spark.platform.session import is_connect, use_files_of
from lookback.spark.tables.locks import lock_ingest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from lookback.core.streams.declaration import Stream
    from lookback.spark.ingest.report import IngestReport
    from lookback.spark.tables.lakehouse import Tables


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
        return ingest_round.add_versions(ingest_round.take(Files(tables.spark, source, stream)))


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
        warn: Called with a sentence about files that changed after an earlier run had ingested them, and about files
            that `ingest` took before and that are left out here.

    Raises:
        SetupError: As `ingest` does.
    """
    source, folder = _find_source(tables, stream, path, format, options), tables.find_place(checkpoint)
    # A listing of a bucket may take minutes, so both questions about files share one.
    list_times = cache(partial(read_change_times, tables.spark, source))
    if warn is not None and (changed := find_changed_files(tables.spark, str(folder), list_times)):
        warn(
            f"{count_noun(len(changed), 'file')} changed after an earlier run ingested "
            f"{'it' if len(changed) == 1 else 'them'}, such as {changed[0]}: each file name is read once, so new rows "
            f"are missing. Ingest them with `lookback ingest {stream.name} {shlex.quote(changed[0])}`"
        )
    with contextlib.ExitStack() as opened:
        opened.enter_context(lock_ingest(tables, stream))
        tables.require(stream)
        ingest_round, taken = IngestRound(tables, stream, None), find_taken_files(tables, stream, list_times)

        def take(rows: DataFrame, batch_id: int) -> None:
            names = {normalize_slashes(row[0]) for row in rows.collect()}
            names |= {normalize_slashes(name) for name in read_planned_files(tables.spark, str(folder), batch_id)}
            if known := names & taken:
                if warn is not None:
                    warn(_describe_known(known))
                names -= known
                if not names:
                    return
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


def _describe_known(names: Collection[str]) -> str:
    was, have, they = ("was", "has", "it is") if len(names) == 1 else ("were", "have", "they are")
    return (
        f"{count_noun(len(names), 'file')} of this path {was} ingested before and {have} not changed since, so {they} not "
        "read again; to read all files again, ingest without --new and --every"
    )


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
    if stream.union is not None:
        raise SetupError(
            f"stream {stream.name!r} is a union, whose events come from {', '.join(stream.union.members)}; ingest files "
            "into these, then the union with `unions.UnionIngest`"
        )
    return Source.find(tables.spark, stream, None if path is None else str(path), format_, options)


def _release_after(query: StreamingQuery, lock: contextlib.ExitStack) -> None:
    # The caller gets an error by waiting for the query.
    with lock, contextlib.suppress(Exception):
        query.awaitTermination()

"""Reads which files were ingested, from checkpoints and the table `ingests`, and finds those that changed since."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING
from urllib.parse import unquote

from pyspark.errors import AnalysisException
from pyspark.sql import functions as F  # noqa: N812

from lookback.spark.ingest.sources import escape_pattern, normalize_slashes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from lookback.core.streams.declaration import Stream
    from lookback.spark.ingest.sources import Source
    from lookback.spark.tables.lakehouse import Tables

# The column of Spark's text reader.
_LINE = "value"
ListTimes = Callable[[], Mapping[str, int]]


def read_planned_files(spark: SparkSession, checkpoint: str, batch_id: int) -> list[str]:
    """Reads the names of the files in a batch of the query with this checkpoint, even if they have vanished since.

    They come from the checkpoint's own records; none are found if these are not in the format of Spark 3 and 4.
    """
    folder = escape_pattern(checkpoint)
    try:
        last = _read_log_offset(spark, folder, batch_id)
        first = _read_log_offset(spark, folder, batch_id - 1) if batch_id else -1
        entries = spark.read.text(f"{folder}/sources/0").where(F.col(_LINE).startswith("{"))
        entry = F.from_json(_LINE, "path string, batchId bigint")
        rows = entries.select(entry.alias("e")).where(f"e.batchId > {first} and e.batchId <= {last}").distinct()
        return [str(row[0]) for row in rows.select("e.path").collect()]
    except (AnalysisException, LookupError, TypeError, ValueError):
        return []


def find_changed_files(spark: SparkSession, checkpoint: str, list_times: ListTimes) -> list[str]:
    """Finds the files that changed after the query with this checkpoint read them, which a stream does not notice.

    `list_times` is called if the query has read any; see `read_change_times`. None are found if the checkpoint's
    records are not in the format of Spark 3 and 4, as on Databricks.
    """
    try:
        entries = spark.read.text(f"{escape_pattern(checkpoint)}/sources/0").where(F.col(_LINE).startswith("{"))
        entry = F.from_json(_LINE, "path string, timestamp long").alias("entry")
        taken = {normalize_slashes(row[0]): row[1] for row in entries.select(entry).select("entry.*").collect()}
    except AnalysisException:
        return []
    times = list_times() if taken else {}
    changed_names = [unquote(name) for name, time in times.items() if time > taken.get(name, time)]
    return sorted(re.sub("^file:/+", "/", name) for name in changed_names)


def find_taken_files(tables: Tables, stream: Stream, list_times: ListTimes) -> set[str]:
    """Finds the files that a round of `ingest` without a checkpoint took, and that have not changed since.

    `list_times` is called if there was such a round; see `read_change_times`.
    """
    if not tables.exists("ingests"):
        return set()
    taken: dict[str, set[str]] = {}
    for row in tables.read("ingests").where((F.col("stream") == stream.name) & F.col("files").isNotNull()).collect():
        for name, time in row["files"].items():
            taken.setdefault(name, set()).add(time)
    times = list_times() if taken else {}
    return {name for name, time in times.items() if str(time) in taken.get(name, ())}


def read_change_times(spark: SparkSession, source: Source) -> dict[str, int]:
    """Reads when each file of a source last changed, in milliseconds since 1970, by its name; empty if it cannot."""
    try:
        files = spark.read.format("binaryFile").options(**source.filters).load(source.path)
        rows = files.select("_metadata.file_path", F.unix_millis("_metadata.file_modification_time")).collect()
    except AnalysisException:
        return {}
    return {normalize_slashes(row[0]): row[1] for row in rows}


def _read_log_offset(spark: SparkSession, folder: str, batch_id: int) -> int:
    lines = spark.read.text(f"{folder}/offsets/{batch_id}", wholetext=True).collect()[0][0]
    return int(json.loads(lines.strip().splitlines()[-1])["logOffset"])

"""Reads Delta tables in local folders without Spark: delta-rs reads the log, DuckDB the files.

Raises one of READ_ERRORS if it may not read a table correctly, so that the caller uses Spark instead: tables of a
catalog or a bucket, deletion vectors, column mapping, a gap in the change feed.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote, urlsplit

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

from lookback.core.values.times import parse_time, to_utc
from lookback.questions import write_text
from lookback.spark.tables.frames import Frame, NeedsSpark, Session
from lookback.spark.tables.lakehouse import Tables
from lookback.spark.tables.logfiles import commit_file, read_actions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from lookback.core.streams.declaration import Stream
    from lookback.places import Place

READ_ERRORS = (NeedsSpark, DeltaError, duckdb.Error, pa.ArrowException, OSError)
_FEED, _TIME = "delta.enableChangeDataFeed", "inCommitTimestamp"
_UTC = pa.timestamp("us", "UTC")
_CHANGE = pa.schema([("_change_type", pa.string()), ("_commit_version", pa.int64()), ("_commit_timestamp", _UTC)])
_HISTORY = pa.schema(
    [
        ("version", pa.int64()),
        ("timestamp", _UTC),
        ("operation", pa.string()),
        ("operationMetrics", pa.map_(pa.string(), pa.string())),
        ("userMetadata", pa.string()),
    ]
)


@contextmanager
def open_folders(root: str) -> Iterator[Tables]:
    """Opens the tables below a local folder, to be read without Spark inside the block."""
    session = Session()
    try:
        yield FolderTables.local(cast("SparkSession", session), root)
    finally:
        # End its threads before the interpreter ends.
        session.close()


class FolderTables(Tables):
    """The tables below a folder, read-only and without Spark. `spark` holds a `Session` instead."""

    def exists(self, name: str) -> bool:
        """Returns whether the table exists and is a Delta table."""
        return DeltaTable.is_deltatable(str(self._require_folder(name)))

    def run(self, text: str, frames: Mapping[str, DataFrame] | None = None, /, **values: object) -> DataFrame:
        """Runs a text in the form of a question; see `Tables.run`."""
        session = cast("Session", self.spark)
        asked = set[str]()

        def write_table(name: str) -> str:
            if frames and name in frames:
                return cast("Frame", frames[name]).name
            session.name(name, self._open(name))
            return name

        def write_value(name: str) -> str:
            asked.add(name)
            return f":{name}"

        written = write_text(text, write_table, write_value, frames or ())
        return cast("DataFrame", session.ask(written, {name: values[name] for name in asked}))

    def history(self, name: str, limit: int | None = None) -> DataFrame:
        """Reads the last commits, newest first: version, timestamp, operation, operationMetrics, userMetadata."""
        folder = self._require_folder(name)
        last = DeltaTable(str(folder)).version()
        first = 0 if limit is None else max(0, last - limit + 1)
        commits = []
        for version in range(last, first - 1, -1):
            file = commit_file(folder, version)
            if not file.exists():
                break  # the log was cleaned
            info: dict[str, Any] = next((each["commitInfo"] for each in read_actions(file, "commitInfo")), {})
            at = to_utc(info[_TIME] * 1_000) if _TIME in info else _read_modification_time(file)
            figures = info.get("operationMetrics")
            texts = None if figures is None else [(name, str(value)) for name, value in figures.items()]
            commits.append((version, at, info.get("operation"), texts, info.get("userMetadata")))
        if not commits:
            raise NeedsSpark(f"{folder} has no log of its last commit")
        columns = zip(*commits, strict=True)
        return self._make_frame(pa.table(list(map(pa.array, columns, _HISTORY.types)), schema=_HISTORY))

    def find_misfit(self, stream: Stream) -> str | None:
        """Returns None: a missing column raises one of READ_ERRORS, and then Spark reports it."""
        return None

    def _read_rows(self, name: str, version: int | None = None) -> DataFrame:
        return self._make_frame(self._open(name, version))

    def _open(self, name: str, version: int | None = None) -> Any:
        folder, opened = self._require_folder(name), cast("Session", self.spark).opened
        if (folder, version) not in opened:
            # All queries of a command see the same version of the table, and its log is read once.
            opened[folder, version] = _open_rows(folder, DeltaTable(str(folder), version=version))
        return opened[folder, version]

    def _read_changed_rows(self, name: str, options: Mapping[str, str]) -> DataFrame:
        folder, last = self._require_folder(name), int(options.get("endingVersion", self.version(name)))
        if since := options.get("startingTimestamp"):
            first = _find_commit_since(folder, last, parse_time(since))
        else:
            first = int(options["startingVersion"])
        return self._make_frame(_open_changes(folder, first, last))

    def _require_folder(self, name: str) -> Path:
        folder = self.log_folder(name)
        if folder is None:
            raise NeedsSpark(f"table {name} is not in a local folder")
        return folder

    def _make_frame(self, data: Any) -> DataFrame:
        return cast("DataFrame", cast("Session", self.spark).read(data))


def _open_rows(folder: Path, table: DeltaTable) -> ds.FileSystemDataset:
    """Opens the rows of a table. Raises DeltaError or NeedsSpark if it uses an unsupported feature of Delta."""
    metadata = table.metadata()
    if metadata.configuration.get("delta.columnMapping.mode", "none") != "none":
        raise NeedsSpark(f"{folder}: the files use other column names")
    if metadata.partition_columns:
        raise NeedsSpark(f"{folder}: the files lack the partition columns")
    # With Arrow's own file system, no Arrow thread calls into Python or Rust, which would fail while the interpreter
    # ends.
    files = SubTreeFileSystem(str(folder), LocalFileSystem())
    # Spark may write times as int96, which Arrow reads as nanoseconds by default. These cannot hold the year 9999.
    rows = table.to_pyarrow_dataset(
        filesystem=files, parquet_read_options=ds.ParquetReadOptions(coerce_int96_timestamp_unit="us")
    )
    # If a file has no minimum for a column, delta-rs tells Arrow that the minimum is NULL, and a filter skips the file.
    # So leave out the statistics.
    fragments = [rows.format.make_fragment(each.path, rows.filesystem) for each in rows.get_fragments()]
    return ds.FileSystemDataset(fragments, rows.schema, rows.format, rows.filesystem)


def _open_changes(folder: Path, first: int, last: int) -> ds.Dataset:
    """Opens the change feed of a table's folder, from the commit `first` to `last`, both included."""
    table = DeltaTable(str(folder))
    rows = _open_rows(folder, table)
    metadata = table.metadata()
    fragments, settings = [], list[Mapping[str, str]]()
    for version in range(first, last + 1):
        actions = read_actions(commit_file(folder, version))
        settings += [each["metaData"].get("configuration") or {} for each in actions if "metaData" in each]
        at = to_utc(_read_time(actions, folder, version))
        for path, change in _list_changed_files(actions):
            known = {"_change_type": change, "_commit_version": version, "_commit_timestamp": pa.scalar(at, _UTC)}
            parts = [ds.field(name) == value for name, value in known.items() if value is not None]
            fragments.append(rows.format.make_fragment(path, rows.filesystem, _join(parts)))
    # If none of the commits changed the settings, the current ones applied throughout.
    if (settings and first > 0) or any(each.get(_FEED) != "true" for each in settings or [metadata.configuration]):
        raise NeedsSpark(f"{folder}: the change feed was off for some commits")
    return ds.FileSystemDataset(fragments, pa.schema([*rows.schema, *_CHANGE]), rows.format, rows.filesystem)


def _list_changed_files(actions: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str | None]]:
    """Yields the files with the changes of a commit, each with the kind of change; None if its rows have the kind."""
    # If a commit has change files, they contain all its changes.
    if changed := [each["cdc"] for each in actions if "cdc" in each]:
        yield from ((_read_path(each), None) for each in changed)
        return
    for action in actions:
        for kind, change in (("add", "insert"), ("remove", "delete")):
            if kind in action and action[kind].get("dataChange", True):
                yield _read_path(action[kind]), change


def _read_path(file: Mapping[str, Any]) -> str:
    """Returns the path of a file relative to the folder of its table."""
    path = str(file["path"])
    if file.get("deletionVector") or urlsplit(path).scheme or path.startswith("/"):
        raise NeedsSpark(f"{path} has a deletion vector, or belongs to another table")
    return unquote(path)


def _read_time(actions: Sequence[Mapping[str, Any]], folder: Path, version: int) -> int:
    """Reads the time of a commit in microseconds. Raises NeedsSpark if the log does not have it."""
    times = [each["commitInfo"].get(_TIME) for each in actions if "commitInfo" in each]
    if not times or times[0] is None:
        raise NeedsSpark(f"{folder}: commit {version} has no in-commit timestamp")
    return int(times[0]) * 1_000


def _find_commit_since(folder: Path, last: int, since: int) -> int:
    """Finds the first commit at or after `since` (microseconds), among those still in the log."""
    commits = sorted(int(file.stem) for file in (folder / "_delta_log").glob("*.json") if file.stem.isdecimal())
    low, high = 0, len(commits)
    while low < high:
        middle = (low + high) // 2
        version = commits[middle]
        if _read_time(read_actions(commit_file(folder, version), "commitInfo"), folder, version) < since:
            low = middle + 1
        else:
            high = middle
    if low == len(commits) or commits[low] > last:
        raise NeedsSpark(f"{folder} has no commit since then")
    return commits[low]


def _read_modification_time(file: Place) -> dt.datetime:
    return dt.datetime.fromtimestamp(file.stat().st_mtime, dt.timezone.utc)


def _join(parts: Sequence[ds.Expression]) -> ds.Expression:
    joined = parts[0]
    for each in parts[1:]:
        joined &= each
    return joined

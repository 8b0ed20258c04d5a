"""What can still be read of a table's change feed: logs are cleaned, files vacuumed, feeds switched on late."""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812

from lookback.core.errors import SetupError
from lookback.core.values.columns import to_text
from lookback.core.values.times import to_utc
from lookback.spark.tables.lakehouse import commit_file

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables

_NOT_RECORDED = re.compile(r"not\s+recorded for version \[(\d+)\]")


def readable_from(tables: Tables, name: str) -> int:
    """The first commit from which on the change feed of a table can be read; 0 is all of it.

    Raises SetupError where nothing of it can be read.
    """
    first = 0 if _has_feed_from_the_start(tables, name) else _first_recorded(tables, name)
    folder = tables.local_folder(name)
    return first if folder is None else max([first, *(commit + 1 for commit in _without_files(folder, first))])


def require_commits(tables: Tables, name: str, again: int, wanted: int, stream: str, last_batch: str | None) -> None:
    """Raises SetupError, naming what is missing and how to go on, where commits of a table cannot be read any more.

    wanted: the commit that the evaluation of `stream` goes on from, which may be still to come; again: that from which on
    Spark looks them up once more at a start. last_batch: when it last ended a batch, as text.
    """
    if _is_there(tables, name, wanted) and _is_there(tables, name, again):
        return
    first = readable_from(tables, name)
    since = _commit_time(tables, name, first)
    missing = f"commits {again} to {first - 1}" if again < first - 1 else f"commit {again}"
    lost = "What was in them and not judged yet is lost to this evaluation"
    if first <= wanted:
        lost = "They have been judged, but Spark looks up the last batch again at a start"
    raise SetupError(
        f"the evaluation of stream {stream!r} goes on from commit {wanted} of table {tables.identifier(name)}, and {missing} "
        f"cannot be read any more: the change feed begins at commit {first}"
        + (f" of {since}" if since else "")
        + (f"; the last batch ended at {last_batch}" if last_batch else "")
        + ". The log was cleaned or files were vacuumed (delta.logRetentionDuration, delta.deletedFileRetentionDuration). "
        f"{lost}. To resume: lookback evaluate {stream} --rebuild, which makes the state anew from commit {first} on; a "
        "window that begins before it gives no verdict"
    )


def _is_there(tables: Tables, name: str, commit: int) -> bool:
    """Whether a commit can be read, or is still to come."""
    folder = tables.local_folder(name)
    # Without a job: the commit itself, or the one before it, which is the last then.
    if folder is not None and any(commit_file(folder, each).exists() for each in (commit, commit - 1)):
        return True
    return commit > tables.version(name) or (folder is None and _can_read(tables, name, commit))


def _has_feed_from_the_start(tables: Tables, name: str) -> bool:
    folder = tables.local_folder(name)
    if folder is None:
        return _can_read(tables, name, 0)
    try:
        actions = _actions(commit_file(folder, 0))
        settings = next(action["metaData"]["configuration"] for action in actions if "metaData" in action)
    except (OSError, ValueError, KeyError, StopIteration):
        return False
    return bool(settings.get("delta.enableChangeDataFeed") == "true")


def _first_recorded(tables: Tables, name: str) -> int:
    """The first commit whose log is there and had a change feed, and all after it."""
    versions = sorted(row[0] for row in tables.history(name).select("version").collect())
    while versions:
        at = bisect_left(versions, True, key=lambda version: _can_read(tables, name, version))
        if at == len(versions):
            break
        gap = _gap(tables, name, versions[at])
        if gap is None:
            return int(versions[at])
        versions = [version for version in versions if version > gap]
    raise SetupError(
        f"table {tables.identifier(name)} has no change feed; switch it on: ALTER TABLE {tables.identifier(name)} SET "
        "TBLPROPERTIES (delta.enableChangeDataFeed = true, delta.enableInCommitTimestamps = true). What is written from "
        "then on is judged"
    )


def _can_read(tables: Tables, name: str, version: int) -> bool:
    try:
        tables.read_changes(name, version, version).limit(1).collect()
    except (PySparkException, Py4JJavaError):
        return False
    return True


def _gap(tables: Tables, name: str, version: int) -> int | None:
    """A later commit that was made while the change feed was off, if there is one."""
    try:
        tables.read_changes(name, version).limit(1).collect()
    except (PySparkException, Py4JJavaError) as error:
        match = _NOT_RECORDED.search(str(error))
        return int(match[1]) if match else version
    return None


def _commit_time(tables: Tables, name: str, version: int) -> str | None:
    rows = tables.history(name).where(f"version = {version:d}").selectExpr("unix_micros(timestamp)").collect()
    return str(to_text(to_utc(rows[0][0]))) if rows else None


def _without_files(folder: Path, first: int) -> Iterator[int]:
    """The commits from `first` on of which a file that the change feed reads is gone."""
    present = {
        Path(place, file).relative_to(folder).as_posix() for place, _, files in os.walk(folder) for file in files
    }
    version = first
    while (log := commit_file(folder, version)).exists():
        if any(path not in present and not Path(path).exists() for path in _files_read(_actions(log))):
            yield version
        version += 1


def _files_read(actions: list[dict[str, Any]]) -> list[str]:
    """The files that hold the changes of a commit."""
    changes = [action["cdc"] for action in actions if "cdc" in action]
    parts = [action[kind] for action in actions for kind in ("add", "remove") if kind in action]
    return [unquote(part["path"]) for part in changes or [part for part in parts if part.get("dataChange")]]


def _actions(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


def recent_events(tables: Tables, stream: Stream, limit: int) -> Any:
    """The newest events by event time as an Arrow table, with `arrival` in the order in which they were ingested.

    Raises SetupError for a limit below 1.
    """
    if limit < 1:
        raise SetupError(f"at least one event is needed to try a rule, got {limit}")
    newest = tables.read(stream.name).orderBy(F.col(stream.event_time).desc(), F.col(stream.event_id).desc())
    arrival = F.coalesce(F.unix_micros("ingested_at"), F.lit(0)).alias("arrival")
    return newest.limit(limit).select(*stream.fields, arrival).toArrow()

"""Finds the commits of a table whose changes can still be read, and reads a table's newest events.

Changes become unreadable when logs are cleaned or files vacuumed, or if the change feed was switched on late.
"""

from __future__ import annotations

import datetime as dt
import os
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812

from lookback.core.errors import SetupError
from lookback.core.values.columns import to_text
from lookback.core.values.times import to_utc
from lookback.spark.tables.logfiles import commit_file, read_actions
from lookback.spark.tables.sqltexts import select_field

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables

_NOT_RECORDED = re.compile(r"not\s+recorded for version \[(\d+)\]")


def find_first_readable(tables: Tables, name: str) -> int:
    """Returns the first commit from which a table's change feed can be read without gaps; 0 means all of it.

    Raises SetupError if no commit can be read.
    """
    first = 0 if _has_feed_from_start(tables, name) else _find_first_recorded(tables, name)
    folder = tables.local_folder(name)
    if folder is None:
        return first
    return max([first, *(commit + 1 for commit in find_commits_without_files(folder, first))])


def choose_log_time(tables: Tables, stream: str) -> dt.datetime:
    """Returns the time for new rows of rule_log: now, or just after the stream's last row if the clock was set back.

    Readers rely on these times for the order in which rules took effect.
    """
    now = dt.datetime.now(dt.timezone.utc)
    if not tables.may_have_rows("rule_log"):
        return now
    text = "SELECT unix_micros(max(logged_at)) AS last FROM rule_log WHERE stream = :stream"
    ((last,),) = tables.run(text, stream=stream).collect()
    return now if last is None else max(now, to_utc(last + 1))


def find_commits_without_files(folder: Path, first: int) -> Iterator[int]:
    """Yields the commits from `first` on that have lost a file that the change feed reads."""
    present = {
        Path(place, file).relative_to(folder).as_posix() for place, _, files in os.walk(folder) for file in files
    }
    version = first
    while (log := commit_file(folder, version)).exists():
        # The file may have been written after the listing. Some logs contain absolute paths.
        if any(path not in present and not (folder / path).exists() for path in _list_change_files(read_actions(log))):
            yield version
        version += 1


def require_commits(tables: Tables, name: str, reread: int, resume: int, stream: str, last_batch: str | None) -> None:
    """Checks that an evaluation can still read the commits of a table that it needs to resume.

    Args:
        tables: The tables.
        name: The table.
        reread: The first commit that Spark reads again at a start.
        resume: The commit from which the evaluation resumes; it may not exist yet.
        stream: The stream that is evaluated.
        last_batch: When the evaluation's last batch ended, as text.

    Raises:
        SetupError: If commits can no longer be read, with their numbers and how to continue.
    """
    if _is_readable_or_ahead(tables, name, resume) and _is_readable_or_ahead(tables, name, reread):
        return
    first = find_first_readable(tables, name)
    since = _read_commit_time(tables, name, first)
    missing = f"commits {reread} to {first - 1}" if reread < first - 1 else f"commit {reread}"
    lost = "Events in them that were not evaluated yet are lost to this evaluation"
    if first <= resume:
        lost = "Their events have been evaluated, but at a start Spark reads the last batch again"
    raise SetupError(
        f"the evaluation of stream {stream!r} resumes at commit {resume} of table {tables.identifier(name)}, but "
        f"{missing} can no longer be read: the change feed begins at commit {first}"
        + (f" of {since}" if since else "")
        + (f"; the last batch ended at {last_batch}" if last_batch else "")
        + ". The log was cleaned or files were vacuumed (delta.logRetentionDuration, "
        f"delta.deletedFileRetentionDuration). {lost}. To resume, run lookback evaluate {stream} --rebuild, "
        f"which rebuilds the state from commit {first}; windows that begin before it give no verdicts"
    )


def _is_readable_or_ahead(tables: Tables, name: str, commit: int) -> bool:
    """Returns whether a commit can be read or does not exist yet."""
    folder = tables.local_folder(name)
    # Reading the log files avoids a Spark job. If only the previous commit exists, this one comes next.
    if folder is not None and any(commit_file(folder, each).exists() for each in (commit, commit - 1)):
        return True
    return commit > tables.version(name) or (folder is None and _can_read(tables, name, commit))


def read_stamp(tables: Tables, name: str, commit: int) -> int | None:
    """Reads the in-commit timestamp of a commit, in milliseconds. It identifies the table's history.

    Returns None if the table has no in-commit timestamps or the commit was cleaned from the log.
    """
    folder = tables.find_log_place(name)
    if folder is None:
        rows = tables.history(name, tables.version(name) - commit + 1).where(F.col("version") == commit)
        rows = rows.select(F.unix_millis("timestamp"))
        return next((int(row[0]) for row in rows.collect()), None)
    with suppress(OSError, ValueError):
        for action in read_actions(commit_file(folder, commit), "commitInfo"):
            return action["commitInfo"].get("inCommitTimestamp")  # type: ignore[no-any-return]
    return None


def find_other_histories(tables: Tables, noted: Mapping[str, tuple[int, int]]) -> list[str]:
    """Finds tables whose history has been replaced since it was read, and describes each difference.

    A table that was restored from a backup, or deleted and created again, lacks the commit that was read or has a
    different one with the same number. `noted` maps each table to such a commit and its time from `read_stamp`.
    """
    found = []
    for name, (commit, stamp) in noted.items():
        table, last = tables.identifier(name), tables.version(name) if tables.exists(name) else -1
        if commit > last:
            ends = f"ends at commit {last}" if last >= 0 else "is gone"
            found.append(f"table {table} {ends}, but commit {commit} was read before")
        elif (now := read_stamp(tables, name, commit)) not in (None, stamp):
            is_now, was = (to_text(to_utc(1_000 * each)) for each in (now or 0, stamp))
            found.append(f"commit {commit} of table {table} is from {is_now}, but the one read before was from {was}")
    return found


def _has_feed_from_start(tables: Tables, name: str) -> bool:
    folder = tables.local_folder(name)
    if folder is None:
        return _can_read(tables, name, 0)
    try:
        actions = read_actions(commit_file(folder, 0))
        settings = next(action["metaData"]["configuration"] for action in actions if "metaData" in action)
    except (OSError, ValueError, KeyError, StopIteration):
        return False
    return bool(settings.get("delta.enableChangeDataFeed") == "true")


def _find_first_recorded(tables: Tables, name: str) -> int:
    """Returns the first commit from which all have a log and a change feed. Raises SetupError if there is none."""
    versions = sorted(row[0] for row in tables.history(name).select("version").collect())
    while versions:
        at = bisect_left(versions, True, key=lambda version: _can_read(tables, name, version))
        if at == len(versions):
            break
        gap = _find_gap(tables, name, versions[at])
        if gap is None:
            return int(versions[at])
        versions = [version for version in versions if version > gap]
    raise SetupError(
        f"table {tables.identifier(name)} has no change feed; switch it on: ALTER TABLE {tables.identifier(name)} SET "
        "TBLPROPERTIES (delta.enableChangeDataFeed = true, delta.enableInCommitTimestamps = true). Rules see only the "
        "rows written after that"
    )


def _can_read(tables: Tables, name: str, version: int) -> bool:
    try:
        tables.read_changes(name, version, version).limit(1).collect()
    except (PySparkException, Py4JJavaError):
        return False
    return True


def _find_gap(tables: Tables, name: str, version: int) -> int | None:
    """Returns a later commit that was made while the change feed was off, or None."""
    try:
        tables.read_changes(name, version).limit(1).collect()
    except (PySparkException, Py4JJavaError) as error:
        match = _NOT_RECORDED.search(str(error))
        return int(match[1]) if match else version
    return None


def _read_commit_time(tables: Tables, name: str, version: int) -> str | None:
    rows = tables.history(name).where(f"version = {version:d}").selectExpr("unix_micros(timestamp)").collect()
    return str(to_text(to_utc(rows[0][0]))) if rows else None


def _list_change_files(actions: list[dict[str, Any]]) -> list[str]:
    """Lists the files that hold the changes of a commit."""
    changes = [action["cdc"] for action in actions if "cdc" in action]
    parts = [action[kind] for action in actions for kind in ("add", "remove") if kind in action]
    return [unquote(part["path"]) for part in changes or [part for part in parts if part.get("dataChange")]]


def read_recent_events(tables: Tables, stream: Stream, limit: int) -> Any:
    """Returns the newest events by event time as an Arrow table, with the order of ingest in `arrival`.

    Raises SetupError if `limit` is below 1.
    """
    if limit < 1:
        raise SetupError(f"a trial needs at least one event, got {limit}")
    newest = tables.read_events(stream.name).orderBy(F.col(stream.event_time).desc(), F.col(stream.event_id).desc())
    arrival = F.coalesce(F.unix_micros("ingested_at"), F.lit(0)).alias("arrival")
    return newest.limit(limit).select(*map(select_field, stream.columns_of_events), arrival).toArrow()

"""Finds the commits of a table whose changes can still be read, and reads a table's newest events.

Logs are cleaned, files are vacuumed, change feeds are switched on late.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from lookback.core.errors import SetupError
from lookback.core.values.columns import to_text
from lookback.core.values.times import parse_time, to_utc
from lookback.spark.queries import functions as F  # noqa: N812
from lookback.spark.tables.lakehouse import commit_file, read_actions

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables

# Actions of a commit that change no row, or whose rows a file's statistics do not count.
_COUNTED_ACTIONS = {"add", "commitInfo", "metaData", "protocol", "txn", "domainMetadata"}
_NOT_RECORDED = re.compile(r"not\s+recorded for version \[(\d+)\]")


def find_first_readable(tables: Tables, name: str) -> int:
    """Returns the first commit from which on the change feed of a table can be read; 0 means all of it.

    Raises SetupError if no commit can be read.
    """
    first = 0 if _has_feed_from_start(tables, name) else _find_first_recorded(tables, name)
    folder = tables.local_folder(name)
    if folder is None:
        return first
    return max([first, *(commit + 1 for commit in find_commits_without_files(folder, first))])


def choose_log_time(tables: Tables, stream: str) -> dt.datetime:
    """Returns the time for new rows of rule_log: now, or after the stream's last row where the clock was set back since.

    Readers take the order in which rules were obeyed from these times.
    """
    now = dt.datetime.now(dt.timezone.utc)
    if not tables.may_have_rows("rule_log"):
        return now
    own = F.col("stream") == stream
    ((last,),) = tables.query(
        "rule_log", lambda rows: rows.where(own).agg(F.unix_micros(F.max("logged_at")).alias("last"))
    )
    return now if last is None else max(now, to_utc(last + 1))


def find_commits_without_files(folder: Path, first: int) -> Iterator[int]:
    """Yields the commits from `first` on that have lost a file that the change feed reads."""
    present = {
        Path(place, file).relative_to(folder).as_posix() for place, _, files in os.walk(folder) for file in files
    }
    version = first
    while (log := commit_file(folder, version)).exists():
        # Others may have written it since the files were listed. Some logs have whole paths.
        if any(path not in present and not (folder / path).exists() for path in _list_change_files(read_actions(log))):
            yield version
        version += 1


def require_commits(tables: Tables, name: str, reread: int, resume: int, stream: str, last_batch: str | None) -> None:
    """Raises SetupError if an evaluation needs commits of a table that cannot be read any more.

    The message names them and says how to go on. resume: the commit from which the evaluation of `stream` goes on, which
    may be still to come; reread: the first commit that Spark looks up once more at a start. last_batch: the time at which
    the evaluation last ended a batch, as text.
    """
    if _is_readable_or_ahead(tables, name, resume) and _is_readable_or_ahead(tables, name, reread):
        return
    first = find_first_readable(tables, name)
    since = _read_commit_time(tables, name, first)
    missing = f"commits {reread} to {first - 1}" if reread < first - 1 else f"commit {reread}"
    lost = "Events in them that were not judged yet are lost to this evaluation"
    if first <= resume:
        lost = "They have been judged, but Spark looks up the last batch again at a start"
    raise SetupError(
        f"the evaluation of stream {stream!r} goes on from commit {resume} of table {tables.identifier(name)}, and {missing} "
        f"cannot be read any more: the change feed begins at commit {first}"
        + (f" of {since}" if since else "")
        + (f"; the last batch ended at {last_batch}" if last_batch else "")
        + ". The log was cleaned or files were vacuumed (delta.logRetentionDuration, delta.deletedFileRetentionDuration). "
        f"{lost}. To resume: lookback evaluate {stream} --rebuild, which makes the state anew from commit {first} on; a "
        "window that begins before it gives no verdict"
    )


def _is_readable_or_ahead(tables: Tables, name: str, commit: int) -> bool:
    """Returns whether a commit can be read, or is still to come."""
    folder = tables.local_folder(name)
    # The log's files answer without a Spark job. If only the commit before it exists, this one is the next.
    if folder is not None and any(commit_file(folder, each).exists() for each in (commit, commit - 1)):
        return True
    return commit > tables.version(name) or (folder is None and _can_read(tables, name, commit))


def read_stamp(tables: Tables, name: str, commit: int) -> int | None:
    """Reads the time of a commit in milliseconds, as the commit itself has it; no other history has a commit of this time.

    None where the table keeps no such time, or where the log of the commit was cleaned.
    """
    folder = tables.log_folder(name)
    if folder is None:
        rows = tables.history(name, tables.version(name) - commit + 1).where(F.col("version") == commit)
        rows = rows.select(F.unix_millis("timestamp"))
        return next((int(row[0]) for row in rows.collect()), None)
    with suppress(OSError, ValueError):
        for action in read_actions(commit_file(folder, commit), "commitInfo"):
            return action["commitInfo"].get("inCommitTimestamp")  # type: ignore[no-any-return]
    return None


def find_other_histories(tables: Tables, noted: Mapping[str, tuple[int, int]]) -> list[str]:
    """Finds the tables whose history is not the one that was read, and says how each differs.

    noted: by table a commit that was read, and what `read_stamp` gave for it. A table that was restored from a backup, or
    deleted and created again, lacks the commit or has another one of its number.
    """
    found = []
    for name, (commit, stamp) in noted.items():
        table, last = tables.identifier(name), tables.version(name) if tables.exists(name) else -1
        if commit > last:
            ends = f"ends at commit {last}" if last >= 0 else "is gone"
            found.append(f"table {table} {ends}, and commit {commit} of it was read")
        elif (now := read_stamp(tables, name, commit)) not in (None, stamp):
            is_now, was = (to_text(to_utc(1_000 * each)) for each in (now or 0, stamp))
            found.append(f"commit {commit} of table {table} is of {is_now}, and the one that was read was of {was}")
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
    """Returns the first commit that has a log and a change feed, as all commits after it do. Raises SetupError."""
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
        "TBLPROPERTIES (delta.enableChangeDataFeed = true, delta.enableInCommitTimestamps = true). Rows that are "
        "written from then on are judged"
    )


def _can_read(tables: Tables, name: str, version: int) -> bool:
    try:
        tables.read_changes(name, version, version).limit(1).collect()
    except (PySparkException, Py4JJavaError):
        return False
    return True


def _find_gap(tables: Tables, name: str, version: int) -> int | None:
    """Returns a later commit that was made while the change feed was off, if there is one."""
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


class InsertedRows(NamedTuple):
    """The rows that a commit inserted. first, last: the bounds of a column of times in microseconds, exact to a millisecond."""

    commit: int
    rows: int
    first: int
    last: int


def list_inserted_rows(folder: Path, last: int, time: str) -> list[InsertedRows] | None:
    """Counts the rows of each commit up to the last one by the statistics of the files in a table's log.

    time: the column whose bounds are wanted. None if the log does not say it exactly: rows were deleted or updated, files have no
    statistics, columns have other names in files, or the log begins later. Commits without rows are left out.
    """
    counts = []
    try:
        for version in range(last + 1):
            files = _list_counted_files(read_actions(commit_file(folder, version)))
            if files is None:
                return None
            parts = [statistics for each in files if (statistics := json.loads(each["stats"]))["numRecords"]]
            if parts:
                firsts, lasts = ([parse_time(part[end][time]) for part in parts] for end in ("minValues", "maxValues"))
                rows = sum(part["numRecords"] for part in parts)
                counts.append(InsertedRows(version, rows, min(firsts), max(lasts)))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return counts


def _list_counted_files(actions: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Lists the files that a commit adds; None if its rows are not all rows of these files."""
    files = []
    for action in actions:
        kinds = set(action)
        # A file that is compacted is added and removed, and no row changes.
        changed = [
            action[kind] for kind in ("add", "remove") if kind in action and action[kind].get("dataChange", True)
        ]
        if "remove" in kinds and not changed:
            continue
        mode = action.get("metaData", {}).get("configuration", {}).get("delta.columnMapping.mode", "none")
        if not kinds <= _COUNTED_ACTIONS or mode != "none" or any(each.get("deletionVector") for each in changed):
            return None
        files += changed
    return files


def read_recent_events(tables: Tables, stream: Stream, limit: int) -> Any:
    """Returns the newest events by event time as an Arrow table, with `arrival` in the order in which they were ingested.

    Raises SetupError for a limit below 1.
    """
    if limit < 1:
        raise SetupError(f"at least one event is needed to try a rule, got {limit}")
    newest = tables.read_events(stream.name).orderBy(F.col(stream.event_time).desc(), F.col(stream.event_id).desc())
    arrival = F.coalesce(F.unix_micros("ingested_at"), F.lit(0)).alias("arrival")
    return newest.limit(limit).select(*stream.columns_of_events, arrival).toArrow()

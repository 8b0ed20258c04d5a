"""Keeps tables quick to read and storage small, and looks at the checkpoints; safe beside whatever runs.

Rows that are older than the settings' retention go first, see `lookback.spark.operations.retention`; without such settings none do.

OPTIMIZE moves rows and changes none, so its commits bring an evaluation nothing to judge. VACUUM deletes what was
removed for longer than the table keeps it, which is what replays and questions about old alerts need.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lookback.core.errors import SetupError
from lookback.core.operations.health import NOTE, PROBLEM, WARNING, check_health, describe_health
from lookback.spark.operations.retention import ORDER, Deletion, delete_old
from lookback.spark.operations.status import stream_figures
from lookback.spark.review import OlderAlerts, count_older
from lookback.spark.stream.checkpoint import Checkpoint
from lookback.spark.stream.resume import require_sources
from lookback.spark.tables.lakehouse import WRITE_ERRORS, is_conflict, parse_file_retention
from lookback.spark.tables.schemas import PRODUCT_TABLES

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables

# An evaluation that waits for longer than this share of the history that is kept is in danger of losing commits.
_MOST_WAITING = 0.5
_ATTEMPTS = 3


@dataclass(frozen=True)
class Upkeep:
    """What was done to a table.

    files: how many it has now; compacted: those that were put together, into `written`; deleted: files that VACUUM took
    out of storage, None where the table's history does not tell; keeps: how long removed files stay. expired: rows that
    were older than the settings keep them, and were deleted; open: alerts among them that waited for a person. note: what
    was left, and why.
    """

    table: str
    files: int
    compacted: int
    written: int
    deleted: int | None
    keeps: str
    note: str = ""
    expired: int = 0
    open: int = 0


@dataclass(frozen=True)
class CheckpointHealth:
    """Whether an evaluation can go on from its checkpoint. level: `problem` (it cannot), `warning`, `note` or `ok`."""

    stream: str
    level: str
    what: str


@dataclass(frozen=True)
class Maintenance:
    """What was done to every table, how the checkpoint of every stream is, and which open alerts the queue leaves out.

    older: None where there is no table of alerts.
    """

    tables: tuple[Upkeep, ...]
    checkpoints: tuple[CheckpointHealth, ...]
    older: OlderAlerts | None = None

    @property
    def problems(self) -> list[str]:
        """What is said of the checkpoints from which an evaluation cannot go on."""
        return [each.what for each in self.checkpoints if each.level == PROBLEM]


def maintain(
    tables: Tables,
    streams: Mapping[str, Stream],
    checkpoints: Mapping[str, str],
    retention: Mapping[str, dt.timedelta] | None = None,
) -> Maintenance:
    """Deletes rows that are too old, then OPTIMIZE and VACUUM of every table that is there; looks at every checkpoint.

    checkpoints: stream -> folder of its evaluation's. retention: table -> how old its rows may be. VACUUM goes by each table's own `deletedFileRetentionDuration`,
    never by less. A table whose writers keep coming first is left for the next time, and says so; one that others write
    is left to them, and one that nothing was ever written to is left as it is.
    """
    tables, retention = tables.holding(*streams.values()), retention or {}
    names = [*PRODUCT_TABLES, *(name for name, s in streams.items() if name not in PRODUCT_TABLES and not s.table)]
    there = [name for name in names if tables.exists(name)]
    expired = {name: delete_old(tables, name, retention[name]) for name in ORDER if name in there and name in retention}
    done = tuple(_maintain(tables, name, expired.get(name, Deletion())) for name in there)
    looked = tuple(checkpoint_health(tables, stream, checkpoints[name]) for name, stream in streams.items())
    has_alerts = tables.exists("alerts") and tables.exists("reviews")
    return Maintenance(done, looked, count_older(tables) if has_alerts else None)


def _maintain(tables: Tables, name: str, expired: Deletion = Deletion()) -> Upkeep:  # noqa: B008 - it is frozen
    table = tables.identifier(name)
    if tables.is_unwritten(name):
        return Upkeep(name, 0, 0, 0, 0, _span(_kept(tables, name)), expired.note, expired.rows, expired.open)
    compacted, written, note = _optimize(tables, table)
    before = tables.version(name)
    # No RETAIN: the table says how long.
    tables.spark.sql(f"VACUUM {table}")
    detail = tables.spark.sql(f"DESCRIBE DETAIL {table}").collect()[0]
    deleted = _vacuumed(tables, name, before)
    note = "; ".join(filter(None, (expired.note, note)))
    kept = _span(parse_file_retention(detail["properties"]))
    files = int(detail["numFiles"])
    return Upkeep(name, files, compacted, written, deleted, kept, note, expired.rows, expired.open)


def _optimize(tables: Tables, table: str) -> tuple[int, int, str]:
    """How many files were put together, into how many, and what is to be said."""
    for _ in range(_ATTEMPTS):
        try:
            row = tables.spark.sql(f"OPTIMIZE {table}").collect()[0]
        except WRITE_ERRORS as error:
            if is_conflict(error):
                continue
            raise
        metrics = row["metrics"]
        return int(metrics["numFilesRemoved"]), int(metrics["numFilesAdded"]), ""
    return 0, 0, "others rewrote its files at the same time; left for the next time"


def _vacuumed(tables: Tables, name: str, before: int) -> int | None:
    """How many files the VACUUM since a commit has deleted, where the history tells."""
    for row in tables.history(name, 20).collect():
        if row["version"] > before and row["operation"] == "VACUUM END":
            return int((row["operationMetrics"] or {}).get("numDeletedFiles", 0))
    return None


def _span(time: dt.timedelta) -> str:
    days, rest = divmod(round(time.total_seconds()), 86_400)
    return f"{days} days" if not rest else str(time)


def checkpoint_health(tables: Tables, stream: Stream, folder: str) -> CheckpointHealth:
    """Whether the evaluation of a stream can go on from its checkpoint, in words."""

    def said(level: str, what: str) -> CheckpointHealth:
        return CheckpointHealth(stream.name, level, what)

    checkpoint = Checkpoint(Path(folder))
    if not tables.exists(stream.name) or not checkpoint.folder.exists() or checkpoint.is_new:
        return said("ok", f"{stream.name}: no evaluation has begun in {folder}.")
    try:
        checkpoint.require_fit(stream, None)
        require_sources(tables, stream, checkpoint)
        figures = stream_figures(tables, stream, checkpoint)
    except SetupError as error:
        return said(PROBLEM, str(error))
    words = describe_health(figures, check_health(figures))
    kept = _kept(tables, stream.name)
    if figures.waiting and figures.lag > _MOST_WAITING * kept.total_seconds():
        return said(
            WARNING,
            f"{words} Its history is kept for {_span(kept)}: start it before what waits cannot be read any more.",
        )
    if aside := _set_aside(checkpoint):
        return said(
            NOTE, f"{words} Moved aside by --rebuild and without use once it has caught up: {', '.join(aside)}."
        )
    return said("ok", words)


def _kept(tables: Tables, name: str) -> dt.timedelta:
    detail = tables.spark.sql(f"DESCRIBE DETAIL {tables.identifier(name)}").collect()[0]
    return parse_file_retention(detail["properties"])


def _set_aside(checkpoint: Checkpoint) -> list[str]:
    """Folders that `Checkpoint.move_aside` has made of it, which end in a time."""
    stamped = checkpoint.folder.parent.glob(f"{checkpoint.folder.name}.[0-9]*T[0-9]*Z*")
    return sorted(path.name for path in stamped if path.is_dir())

"""Keeps tables fast and storage small, and checks the checkpoints. It is safe to run at any time.

First it deletes rows older than the retention in the settings, if any; see `lookback.spark.operations.retention`.
OPTIMIZE moves rows without changing them, so an evaluation has nothing to judge in its commits. VACUUM deletes files
that were removed longer ago than the table keeps them; until then replays and explanations of old alerts need them.

States from before the last deletion of events are removed, since they still contain the deleted data: checkpoints that
a rebuild has moved aside, and the state of a nightly proof, which then starts again at the first commit.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812

from lookback.core.errors import SetupError
from lookback.core.operations.health import NOTE, PROBLEM, WARNING, check_health, describe_health, is_healthy
from lookback.places import Place, remove_tree
from lookback.spark.checkpoints.checkpoint import Checkpoint
from lookback.spark.operations.forget import MAX_COMMITS, REMOVING
from lookback.spark.operations.retention import ORDER, Deletion, delete_old
from lookback.spark.operations.status import read_stream_figures, with_account
from lookback.spark.platform.session import is_connect
from lookback.spark.replay.proof import proof_folder
from lookback.spark.review import OlderAlerts, count_older
from lookback.spark.stream.rebuild import has_outputs
from lookback.spark.stream.resume import require_known_tables, require_sources
from lookback.spark.tables.conflicts import SPARK_ERRORS, is_conflict
from lookback.spark.tables.properties import parse_file_retention, parse_log_retention
from lookback.spark.tables.schemas import PRODUCT_TABLES

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables

# An evaluation that lags behind by more than this share of the kept history risks losing commits.
_MAX_WAITING_SHARE = 0.5
_ATTEMPTS = 3
_DAY_SECONDS = 86_400


@dataclass(frozen=True)
class TableUpkeep:
    """The work done on a table.

    Attributes:
        table: The table.
        files: The current number of files.
        compacted: The number of files that were rewritten.
        written: The number of files that replaced them.
        deleted: The number of files that VACUUM deleted from storage; None if the table's history does not show it.
        keeps: How long removed files are kept.
        note: Work left undone, and the reason.
        expired: The number of rows deleted by the retention in the settings.
        open: The number of unreviewed alerts among them.
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
    """The health of a checkpoint: `problem` (the evaluation cannot continue), `warning`, `note` or `ok`."""

    stream: str
    level: str
    what: str


@dataclass(frozen=True)
class Maintenance:
    """The work done on every table, the health of every checkpoint, and the open alerts too old for the queue.

    `older` is None without a table of alerts.
    """

    tables: tuple[TableUpkeep, ...]
    checkpoints: tuple[CheckpointHealth, ...]
    older: OlderAlerts | None = None

    @property
    def problems(self) -> list[str]:
        """A sentence for each checkpoint from which an evaluation cannot continue."""
        return [each.what for each in self.checkpoints if each.level == PROBLEM]


def maintain(
    tables: Tables,
    streams: Mapping[str, Stream],
    checkpoints: Mapping[str, str],
    retention: Mapping[str, dt.timedelta] | None = None,
) -> Maintenance:
    """Deletes expired rows, runs OPTIMIZE and VACUUM on every existing table, and checks every checkpoint.

    VACUUM keeps files at least as long as the table's own `deletedFileRetentionDuration`. If other writers keep
    conflicting, the table is left for the next run, with a note. Empty tables and tables of other programs are left
    unchanged.

    Args:
        tables: The tables of the deployment.
        streams: The declared streams by name.
        checkpoints: The checkpoint folder of each stream's evaluation.
        retention: The maximum age of each table's rows.
    """
    tables, retention = tables.holding(*streams.values()), retention or {}
    names = [*PRODUCT_TABLES, *(name for name, s in streams.items() if name not in PRODUCT_TABLES and not s.table)]
    existing = [name for name in names if tables.exists(name)]
    expired = {
        name: delete_old(tables, name, retention[name]) for name in ORDER if name in existing and name in retention
    }
    done = tuple(_maintain_table(tables, name, expired.get(name)) for name in existing)
    for name in set(existing) & set(streams):
        _remove_old_states(tables, streams[name], Checkpoint(tables.find_place(checkpoints[name])))
    checked = tuple(check_checkpoint(tables, stream, checkpoints[name]) for name, stream in streams.items())
    has_alerts = tables.exists("alerts") and tables.exists("reviews")
    return Maintenance(done, checked, count_older(tables) if has_alerts else None)


def _maintain_table(tables: Tables, name: str, expired: Deletion | None = None) -> TableUpkeep:
    table, expired = tables.identifier(name), expired or Deletion()
    if tables.is_unwritten(name):
        kept = _format_span(_read_file_retention(tables, name))
        return TableUpkeep(name, 0, 0, 0, 0, kept, expired.note, expired.rows, expired.open)
    compacted, written, note = _optimize(tables, table)
    before = tables.version(name)
    # Without RETAIN, the table's own setting applies.
    tables.spark.sql(f"VACUUM {table}")
    detail = tables.describe(name)
    _clean_log(tables, name, parse_log_retention(detail["properties"]))
    deleted = _find_vacuumed(tables, name, before)
    note = "; ".join(filter(None, (expired.note, note)))
    kept = _format_span(parse_file_retention(detail["properties"]))
    files = int(detail["numFiles"])
    return TableUpkeep(name, files, compacted, written, deleted, kept, note, expired.rows, expired.open)


def _clean_log(tables: Tables, name: str, keeps: dt.timedelta) -> None:
    """Makes Delta drop the old commits of a local table's log, which it would otherwise do many commits later."""
    folder = tables.log_folder(name)
    if folder is None or is_connect(tables.spark):
        return
    # Delta rounds up to whole days.
    limit = time.time() - keeps.total_seconds() - _DAY_SECONDS
    if any(file.stat().st_mtime < limit for file in (folder / "_delta_log").glob("[0-9]*.json")):
        log = tables.spark._jvm.org.apache.spark.sql.delta.DeltaLog  # type: ignore[union-attr]
        log.forTable(tables.spark._jsparkSession, str(folder)).checkpoint()


def _remove_old_states(tables: Tables, stream: Stream, checkpoint: Checkpoint) -> None:
    """Removes states of a stream older than the last deletion of events, except the state of its evaluation."""
    removal = tables.history(stream.name, MAX_COMMITS).where(F.col("operation").isin(*REMOVING))
    last = removal.orderBy(F.col("version").desc()).select("version", F.unix_micros("timestamp").alias("at")).head()
    if last is None:
        return
    for name in _list_moved_aside(checkpoint):
        folder = checkpoint.folder.with_name(name)
        if _find_first_write(folder) * 1_000_000 < last["at"]:
            remove_tree(folder)
    for state in proof_folder(tables, stream).glob("[0-9]*"):
        if int(state.name) < last["version"]:
            remove_tree(state)


def _find_first_write(folder: Place) -> float:
    """Finds when the oldest batch in a checkpoint was finished, in seconds since the epoch."""
    return min((file.stat().st_mtime for file in (folder / "commits").glob("*")), default=0.0)


def _optimize(tables: Tables, table: str) -> tuple[int, int, str]:
    """Runs OPTIMIZE. Returns the numbers of removed and added files, and a note if it gave up."""
    for _ in range(_ATTEMPTS):
        try:
            row = tables.spark.sql(f"OPTIMIZE {table}").collect()[0]
        except SPARK_ERRORS as error:
            if is_conflict(error):
                continue
            raise
        metrics = row["metrics"]
        return int(metrics["numFilesRemoved"]), int(metrics["numFilesAdded"]), ""
    return 0, 0, "other writers kept rewriting its files; left for the next run"


def _find_vacuumed(tables: Tables, name: str, before: int) -> int | None:
    """Finds how many files the VACUUM after a commit deleted; None if the history does not show it."""
    for row in tables.history(name, 20).collect():
        if row["version"] > before and row["operation"] == "VACUUM END":
            return int((row["operationMetrics"] or {}).get("numDeletedFiles", 0))
    return None


def _format_span(span: dt.timedelta) -> str:
    days, rest = divmod(round(span.total_seconds()), _DAY_SECONDS)
    return f"{days} days" if not rest else str(span)


def check_checkpoint(tables: Tables, stream: Stream, folder: str) -> CheckpointHealth:
    """Checks whether the evaluation of a stream can continue from its checkpoint, and describes the result."""
    report = partial(CheckpointHealth, stream.name)
    checkpoint = Checkpoint(tables.find_place(folder))
    if not tables.exists(stream.name) or not checkpoint.folder.exists() or checkpoint.is_new:
        if has_outputs(tables, stream):
            return report(
                WARNING,
                f"{stream.name}: an evaluation has written rows, and its checkpoint is not in {folder}. If it runs "
                "with --checkpoint, that checkpoint was not checked. If the checkpoint is lost, rebuild it: lookback "
                f"evaluate {stream.name} --rebuild",
            )
        return report("ok", f"{stream.name}: no evaluation has begun in {folder}.")
    try:
        checkpoint.require_fit(stream, None)
        require_known_tables(tables, stream, checkpoint)
        require_sources(tables, stream, checkpoint)
        figures = with_account(tables, stream, read_stream_figures(tables, stream, checkpoint))
    except SetupError as error:
        return report(PROBLEM, str(error))
    findings = check_health(figures)
    words = describe_health(figures, findings)
    kept = _read_file_retention(tables, stream.name)
    if figures.waiting and figures.lag > _MAX_WAITING_SHARE * kept.total_seconds():
        return report(
            WARNING,
            f"{words} Its history is kept for {_format_span(kept)}: start it before the waiting commits are lost.",
        )
    if aside := _list_moved_aside(checkpoint):
        return report(NOTE, f"{words} Moved aside by --rebuild and useless once it has caught up: {', '.join(aside)}.")
    if not is_healthy(findings):
        return report(NOTE, f"{words} The checkpoint is in order; lookback status says what to do.")
    return report("ok", words)


def _read_file_retention(tables: Tables, name: str) -> dt.timedelta:
    return parse_file_retention(tables.describe(name)["properties"])


def _list_moved_aside(checkpoint: Checkpoint) -> list[str]:
    """Lists the folders to which `Checkpoint.move_aside` has renamed this checkpoint. Their names end with a time."""
    stamped = checkpoint.folder.parent.glob(f"{checkpoint.folder.name}.[0-9]*T[0-9]*Z*")
    return sorted(path.name for path in stamped if path.is_dir())

"""Finds a stream's past lateness and limits: in rule_log for history, in the checkpoint for repeated batches."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from lookback.core.streams.declarations import Declarations, Declared, plan_declarations
from lookback.spark.queries import functions as F  # noqa: N812

if TYPE_CHECKING:
    from lookback.core.engine.schedule import Schedule
    from lookback.core.streams.declaration import Stream
    from lookback.spark.checkpoints.checkpoint import Checkpoint
    from lookback.spark.tables.lakehouse import Tables


def read_release() -> str:
    """Returns the installed release of Lookback, or "" if it is not installed."""
    try:
        return version("lookback-rules")
    except PackageNotFoundError:
        return ""


def read_declared(
    tables: Tables, stream: Stream, since: dt.datetime | None = None, until: dt.datetime | None = None
) -> Sequence[tuple[int | None, str, dt.datetime]]:
    """Reads a stream's declarations from rule_log, in order: arrival, text, time of the row.

    Only declarations logged after `since`, and at `until` or before, are read.
    """
    if not tables.may_have_rows("rule_log"):
        return []
    rows = tables.read("rule_log").where((F.col("stream") == stream.name) & (F.col("action") == "declared"))
    if since is not None:
        rows = rows.where(F.col("logged_at") > F.lit(since))
    if until is not None:
        rows = rows.where(F.col("logged_at") <= F.lit(until))
    listed = rows.orderBy("logged_at", "batch_id", F.col("arrival").asc_nulls_first()).collect()
    return [(row["arrival"], str(row["message"]), row["logged_at"]) for row in listed]


def read_declarations(
    tables: Tables, stream: Stream, since: dt.datetime | None = None, until: dt.datetime | None = None
) -> Declarations:
    """Reads the declarations by which a stream was evaluated. Without rows in rule_log this is the current one.

    For `since` and `until` see `read_declared`.
    """
    rows = read_declared(tables, stream, since, until)
    return Declarations.from_rows(stream, [(after, text) for after, text, _ in rows])


def plan_start(stream: Stream, checkpoint: Checkpoint, schedule: Schedule | None) -> Declarations:
    """Returns the declarations for an evaluation that starts on a checkpoint.

    A repeated batch uses the declarations of its first run, because some of its rows may already be written. The
    current declaration applies from the next batch on. A rebuild, given by its `schedule`, uses past declarations.
    """
    plan, today = checkpoint.read_plan(), Declared.now(stream, read_release())
    before, unfinished = () if plan is None else plan.settings, checkpoint.find_unfinished()
    if schedule is None:
        return plan_declarations(before, unfinished, today)
    known = Declarations.from_rows(stream, before or schedule.declared)
    reached = [each for each in (schedule.through, unfinished, checkpoint.find_last_judged()) if each is not None]
    return known.then(today._replace(after=max(reached, default=None)))

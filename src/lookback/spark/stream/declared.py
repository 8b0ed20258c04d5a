"""Finds by which lateness and limits a stream was judged: in rule_log for what was, in the checkpoint for what is repeated."""

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
    """Returns the release of Lookback that runs; empty if it is not installed."""
    try:
        return version("lookback-rules")
    except PackageNotFoundError:
        return ""


def read_declared(
    tables: Tables, stream: Stream, since: dt.datetime | None = None, until: dt.datetime | None = None
) -> Sequence[tuple[int | None, str, dt.datetime]]:
    """Reads the declarations that rule_log has of a stream, as they were written: arrival, text, time of the row.

    since: only those that were logged later; until: only those that were not.
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
    """Reads by which declarations a stream was judged; without rows in rule_log, by that of today.

    since, until: see `read_declared`.
    """
    rows = read_declared(tables, stream, since, until)
    return Declarations.from_rows(stream, [(after, text) for after, text, _ in rows])


def plan_start(stream: Stream, checkpoint: Checkpoint, schedule: Schedule | None) -> Declarations:
    """Plans by which declarations an evaluation judges that starts on a checkpoint.

    A batch that is repeated is judged as the first time, since some of its rows may be written; that of today counts from
    the next one on. schedule: of a rebuild, which judges again by the declarations of then.
    """
    plan, today = checkpoint.read_plan(), Declared.now(stream, read_release())
    before, unfinished = () if plan is None else plan.settings, checkpoint.find_unfinished()
    if schedule is None:
        return plan_declarations(before, unfinished, today)
    known = Declarations.from_rows(stream, before or schedule.declared)
    reached = [each for each in (schedule.through, unfinished, checkpoint.find_last_judged()) if each is not None]
    return known.then(today._replace(after=max(reached, default=None)))

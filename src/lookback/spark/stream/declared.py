"""Finds the lateness and limits of a stream that starts on a checkpoint."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from lookback.core.streams.declarations import Declarations, Declared, plan_declarations

if TYPE_CHECKING:
    from lookback.core.engine.schedule import Schedule
    from lookback.core.streams.declaration import Stream
    from lookback.spark.checkpoints.checkpoint import Checkpoint


def read_release() -> str:
    """Returns the installed release of Lookback, or "" if it is not installed."""
    try:
        return version("lookback-rules")
    except PackageNotFoundError:
        return ""


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

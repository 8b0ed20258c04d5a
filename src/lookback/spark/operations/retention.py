"""Deletes rows older than the retention in the settings, unless something still needs them.

Each table loses these rows once they are old enough:

    alerts         all rows, by `decided_at`, whether reviewed or not; reviews stay
    late_events    events judged before the limit; events beyond max_future stay, because a rebuild needs them
    rule_log       failures, cuts, closed sessions and limits; rule changes stay for rebuilds and explanations
    notifications  rows about alerts before the mark of their receiver and stream, which a notifier never reads again
    metrics        all rows
    ingests        all rows
    labels         all rows, by `labelled_at`
    snoozes        all rows, by their end
    lists          expired values, by `expires_at`

A rebuild writes the rows that a table lacks. To make it skip deleted rows, a row of rule_log names, for each stream,
the commit up to which rows were deleted. This row is written first, so a kill in between does no harm.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812

from lookback.core.engine.schedule import DELETED, NO_CHANGES
from lookback.core.operations.notifications import SETTLED
from lookback.core.streams import metrics
from lookback.spark.operations.notify import CLOCK_SKEW_SECONDS
from lookback.spark.review import count_older
from lookback.spark.tables.conflicts import retry_on_conflict
from lookback.spark.tables.history import choose_log_time

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from lookback.spark.tables.lakehouse import Tables

# late_events come first, because the tables after them date their commits.
ORDER = ("late_events", "alerts", "rule_log", "notifications", metrics.TABLE, "ingests", "labels", "snoozes", "lists")
# How long to retry a deletion while other writers keep conflicting.
_PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class Deletion:
    """A deletion from a table: the number of rows and of open alerts among them, and a note if rows were left."""

    rows: int = 0
    open: int = 0
    note: str = ""


def delete_old(tables: Tables, name: str, age: dt.timedelta) -> Deletion:
    """Deletes the rows of a table that are older than `age`; the module's docstring says which.

    `name` is one of `config.RETAINED`. Evaluations, notifiers and ingests may keep running. If their writes conflict
    for a minute, the rows are left for the next run, and `note` says so.
    """
    limit = dt.datetime.now(dt.timezone.utc) - age
    is_old = _CONDITIONS[name](tables, limit)
    if is_old is None:
        return Deletion()
    old = tables.read(name).where(is_old)
    rows = _log_deletions(tables, name, old, limit) if name in DELETED else old.count()
    if not rows:
        return Deletion()
    open_ = count_older(tables, limit).count if name == "alerts" else 0
    if not retry_on_conflict(tables, name, lambda: tables.delta(name).delete(is_old), _PATIENCE_SECONDS):
        return Deletion(note="other writers kept conflicting; old rows are left for the next run")
    return Deletion(rows, open_)


def _log_deletions(tables: Tables, name: str, old: DataFrame, limit: dt.datetime) -> int:
    """Writes the last commit of the rows to be deleted to rule_log, for each stream. Returns the number of rows."""
    streams = old.groupBy("stream").agg(F.count("*").alias("rows"), F.max("arrival").alias("arrival")).collect()
    log = []
    for row in streams:
        now = choose_log_time(tables, row["stream"])
        through = f"from before {limit:%Y-%m-%dT%H:%M:%SZ}, through commit {row['arrival']}"
        message = f"{row['rows']:,} rows of {name} {through}, are deleted by the settings' retention"
        named = {"stream": row["stream"], "action": DELETED[name], "message": message}
        log.append({**named, "arrival": row["arrival"], "logged_at": now})
    if log:
        tables.append_rows(log, "rule_log")
    return sum(row["rows"] for row in streams)


def _is_before(column: str) -> Callable[[Tables, dt.datetime], Column]:
    return lambda _, limit: F.col(column) < F.lit(limit)


def _select_late_events(tables: Tables, limit: dt.datetime) -> Column | None:
    """Selects late events of commits that were judged before the limit, according to tables with a time and a commit.

    late_events itself does not record when an event was judged.
    """
    judged: dict[str, int] = {}
    times = {
        "alerts": ("decided_at", "arrival"),
        "rule_log": ("logged_at", "arrival"),
        metrics.TABLE: ("measured_at", "judged"),
    }
    for name, (time, commit) in times.items():
        if not tables.exists(name):
            continue
        rows = tables.read(name).where(F.col(time) < F.lit(limit)).groupBy("stream").agg(F.max(commit)).collect()
        for stream, last in rows:
            judged[stream] = max(judged.get(stream, -1), -1 if last is None else last)
    ranges = [(F.col("stream") == stream) & (F.col("arrival") <= last) for stream, last in judged.items()]
    return (F.col("late_by_us") >= 0) & reduce(or_, ranges) if ranges else None


def _select_log_rows(_: Tables, limit: dt.datetime) -> Column:
    return F.col("action").isin(sorted(NO_CHANGES)) & (F.col("logged_at") < F.lit(limit))


def _select_notifications(tables: Tables, limit: dt.datetime) -> Column | None:
    """Selects rows about alerts that are at least a day older than the last mark of their receiver and stream.

    The few marks stay.
    """
    notes = tables.read("notifications")
    settled = notes.where(F.col("status") == SETTLED).groupBy("receiver", "stream").agg(F.max("sent_at").alias("at"))
    marks = {(row["receiver"], row["stream"]): row["at"].astimezone(dt.timezone.utc) for row in settled.collect()}
    ranges = []
    for (receiver, stream), at in sorted(marks.items()):
        until = min(limit, at - dt.timedelta(seconds=CLOCK_SKEW_SECONDS))
        same = (F.col("receiver") == receiver) & (F.col("stream") == stream)
        ranges.append(same & (F.col("sent_at") < F.lit(until)))
    return F.col("alert_id").isNotNull() & reduce(or_, ranges) if ranges else None


_CONDITIONS: Mapping[str, Callable[[Tables, dt.datetime], Column | None]] = {
    "late_events": _select_late_events,
    "alerts": _is_before("decided_at"),
    "rule_log": _select_log_rows,
    "notifications": _select_notifications,
    metrics.TABLE: _is_before(metrics.MEASURED_AT),
    "ingests": _is_before("ended_at"),
    "labels": _is_before("labelled_at"),
    "snoozes": _is_before("until"),
    "lists": _is_before("expires_at"),
}

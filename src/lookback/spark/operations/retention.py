"""Deletes rows that are older than the settings keep them, and none that anything still needs.

What a table loses, beyond a row's age:

    alerts         each row by its own `decided_at`, whatever a person found or did not find of it; reviews stay
    late_events    events that were judged so long ago; those beyond max_future stay, as a rebuild leaves them out by these
    rule_log       what failed, was cut, closed or limited; changes of rules stay, as rebuilds and explanations go by them
    notifications  rows on alerts before the mark of their receiver and stream, which no notifier reads again
    metrics        each row
    ingests        each row

A rebuild writes rows that a table lacks. So that it leaves out what was deleted here, a row of rule_log says for each
stream through which commit rows were deleted; it is written first, and a kill between the two costs nothing.
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
from lookback.spark.operations.notify import CLOCKS_APART
from lookback.spark.review import count_older
from lookback.spark.tables.lakehouse import retry_on_conflict
from lookback.spark.tables.schemas import RULE_LOG

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from lookback.spark.tables.lakehouse import Tables

# What tells how old late events are comes after them.
ORDER = ("late_events", "alerts", "rule_log", "notifications", metrics.TABLE, "ingests")
# How long to try again where others keep writing to the same table, seconds.
_PATIENCE = 60.0


@dataclass(frozen=True)
class Deletion:
    """What was deleted of a table. rows: how many; open: alerts among them that waited for a person; note: what was left."""

    rows: int = 0
    open: int = 0
    note: str = ""


def delete_old(tables: Tables, name: str, age: dt.timedelta) -> Deletion:
    """Deletes the rows of a table that are older than `age`; see the module for which these are.

    name: one of `config.RETAINED`. It may run while evaluations, notifiers and ingests do: where they write to the table
    again and again for a minute, the rows are left for the next time, and `note` says so.
    """
    limit = dt.datetime.now(dt.timezone.utc) - age
    is_old = _CONDITIONS[name](tables, limit)
    if is_old is None:
        return Deletion()
    doomed = tables.read(name).where(is_old)
    if name in DELETED:
        rows = _record(tables, name, doomed, limit)
    else:
        rows = doomed.count()
    if not rows:
        return Deletion()
    open_ = count_older(tables, limit).count if name == "alerts" else 0
    if not retry_on_conflict(tables, name, lambda: tables.delta(name).delete(is_old), _PATIENCE):
        return Deletion(note="others kept writing to it; old rows are left for the next time")
    return Deletion(rows, open_)


def _record(tables: Tables, name: str, doomed: DataFrame, limit: dt.datetime) -> int:
    """Writes into rule_log through which commit rows of each stream are about to be deleted. Returns how many."""
    found = doomed.groupBy("stream").agg(F.count("*").alias("rows"), F.max("arrival").alias("arrival")).collect()
    now = dt.datetime.now(dt.timezone.utc)
    log = []
    for row in found:
        through = f"from before {limit:%Y-%m-%dT%H:%M:%SZ}, through commit {row['arrival']}"
        message = f"{row['rows']:,} rows of {name} {through}, are deleted by the settings' retention"
        log.append((row["stream"], None, None, DELETED[name], message, None, row["arrival"], now))
    if log:
        tables.append(tables.spark.createDataFrame(log, RULE_LOG).coalesce(1), "rule_log")
    return sum(row["rows"] for row in found)


def _before(column: str) -> Callable[[Tables, dt.datetime], Column]:
    return lambda _, limit: F.col(column) < F.lit(limit)


def _old_late_events(tables: Tables, limit: dt.datetime) -> Column | None:
    """Late events have no time of their own but the event's; the commits that were judged before the limit are told by others."""
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


def _old_log_rows(_: Tables, limit: dt.datetime) -> Column:
    return F.col("action").isin(sorted(NO_CHANGES)) & (F.col("logged_at") < F.lit(limit))


def _old_notifications(tables: Tables, limit: dt.datetime) -> Column | None:
    """Rows on alerts of a receiver and a stream that are settled up to a day after them.

    Rows of an earlier release do not say which stream their alert is of, and stay; so do all marks, which are few.
    """
    notes = tables.read("notifications")
    if "stream" not in notes.columns:
        return None
    marks: Mapping[tuple[str, str], dt.datetime] = {
        (row[0], row[1]): row[2].astimezone(dt.timezone.utc)
        for row in notes.where(F.col("status") == SETTLED).groupBy("receiver", "stream").agg(F.max("sent_at")).collect()
    }
    ranges = []
    for (receiver, stream), at in sorted(marks.items()):
        until = min(limit, at - dt.timedelta(seconds=CLOCKS_APART))
        same = (F.col("receiver") == receiver) & (F.col("stream") == stream)
        ranges.append(same & (F.col("sent_at") < F.lit(until)))
    return F.col("alert_id").isNotNull() & reduce(or_, ranges) if ranges else None


_CONDITIONS: Mapping[str, Callable[[Tables, dt.datetime], Column | None]] = {
    "late_events": _old_late_events,
    "alerts": _before("decided_at"),
    "rule_log": _old_log_rows,
    "notifications": _old_notifications,
    metrics.TABLE: _before(metrics.MEASURED_AT),
    "ingests": _before("ended_at"),
}

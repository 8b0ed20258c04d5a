"""Reads the data of one key for an explanation: its events as of their arrival, deletions, watermarks and resets."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from lookback.core.explaining.evidence import (
    NOT_DELETED,
    Clock,
    Evidence,
    Reset,
)
from lookback.core.rules.compiled import CompiledRule
from lookback.core.streams.arrival import split_future
from lookback.core.streams.declarations import Declarations
from lookback.core.streams.events import Events, read_events
from lookback.core.values.keys import Int64s
from lookback.core.values.times import parse_time
from lookback.core.values.windows import SEQUENCE
from lookback.spark.explaining.history import (
    Lanes,
    RuleHistory,
    find_advances,
    read_feed,
    read_list_history,
    read_or_refuse,
)
from lookback.spark.queries import functions as F  # noqa: N812
from lookback.spark.tables.lakehouse import to_timestamp

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables

# The maximum difference between the clocks of the processes that commit events and of those that judge them.
_CLOCKS_APART_US = 3_600_000_000


def read_evidence(
    tables: Tables, stream: Stream, rule: CompiledRule, alert: Mapping[str, Any], earliest: int, history: RuleHistory
) -> Evidence:
    """Reads the key's events from `earliest` up to the alert's commit, and everything that decides which counted."""
    arrival = int(alert["arrival"])
    within = F.col(stream.event_time) >= to_timestamp(earliest)
    # Earlier commits can contain events from `earliest` on only beyond max_future, and those do not count.
    declarations = history.declarations
    feed = read_feed(tables, stream.name, earliest - declarations.widest.max_future).where(within)
    # After the alert's commit, only deletions matter. These conditions let Delta select files by commit and change
    # type.
    kind, commit = F.col("_change_type"), F.col("_commit_version")
    known = feed.where(((kind == "insert") & (commit <= arrival)) | (kind == "delete"))
    table = to_arrow(known.where(_has_key(stream, rule, alert["key"])), stream)
    inserted, deleted = select_changes(table, "insert"), select_changes(table, "delete")
    order = read_counted_events(inserted, stream, declarations).in_order_of_arrival()
    own = order.take(np.flatnonzero(order.commits <= arrival))
    log = history.list_obeyed(arrival)
    lanes = Lanes(log, history, alert)
    return Evidence(
        rule=rule,
        events=own,
        clock=Clock(declarations, read_highs(feed, declarations, arrival), find_advances(log)),
        activations=lanes.activations,
        resets=_read_resets(tables, stream, rule, alert, history, lanes, earliest),
        gone_at=find_deleting_commits(own, stream, read_deletions(deleted, stream)),
        earliest=earliest,
        lists=read_list_history(tables, rule, lanes.activations, history),
    )


def read_counted_events(inserted: pa.Table, stream: Stream, declarations: Declarations) -> Events:
    """Reads inserted rows (see `to_arrow`) as events, without those too far ahead of their commit."""
    events, committed = read_events(inserted, stream, 0)
    assert committed is not None
    return split_future(events, committed, stream, declarations.list_values("max_future", events.commits))[0]


def _read_resets(
    tables: Tables, stream: Stream, rule: CompiledRule, alert: Mapping[str, Any], history: RuleHistory, lanes: Lanes,
    earliest: int,
) -> list[Reset]:  # fmt: skip
    """Reads the alerts of the rule and key, up to this alert's commit, that reset the key's windows.

    Versions of a sequence share their state, even if only one of them has `reset_on_alert`. Resets from before
    `earliest` do not matter, since all the key's events are later.
    """
    if not (rule.spec.reset_on_alert or (rule.spec.kind == SEQUENCE and history.may_reset(alert["rule_id"]))):
        return []
    key = [F.col("key")[name].eqNullSafe(F.lit(text)) for name, text in alert["key"].items()]
    same = reduce(and_, key, F.size("key") == len(alert["key"]))
    first = (F.col("revision") == 0) & (F.col("rule_id") == F.lit(alert["rule_id"])) & same
    before = history.term.select(tables.read("alerts"), "decided_at").where(
        first & (F.col("arrival") <= alert["arrival"])
    )
    # As for the feed, a commit can contain later events only up to max_future, and alerts are decided after the commit.
    begins = earliest - history.declarations.widest.max_future - _CLOCKS_APART_US
    before = before.where(F.col("decided_at") >= to_timestamp(begins))
    columns = ("rule_version", "arrival", "event_id", "event_time", "window_start")
    resets = []
    for row in before.select(*columns).toArrow().to_pylist():
        other = history.find_kept(alert["rule_id"], row["rule_version"], row["arrival"] - 1)
        if other is None or not other.spec.reset_on_alert or not lanes.is_own(row["rule_version"]):
            continue
        waits = other.sequence is not None and other.sequence.absent is not None
        resets.append(make_reset(row, stream, waits))
    return resets


def make_reset(row: Mapping[str, Any], stream: Stream, waits: bool) -> Reset:
    """Makes the reset caused by an alert's first row; `waits` says whether the rule waits for an absence."""
    due = parse_time(row["event_time"]) if waits else None
    time = parse_time(row["window_start" if waits else "event_time"])
    return Reset(row["arrival"], time, _parse_event_id(stream, row["event_id"]), due)


def _parse_event_id(stream: Stream, text: str) -> int | str:
    return int(text) if stream.fields[stream.event_id].is_integer else text


def read_deletions(table: pa.Table, stream: Stream) -> dict[tuple[Any, int], list[int]]:
    """Reads the commits that deleted rows, by (id, time) of the row."""
    if not table.num_rows:
        return {}
    events, _ = read_events(table, stream, 0)
    deletions: dict[tuple[Any, int], list[int]] = {}
    for at, event_id in enumerate(events.columns[stream.event_id].to_list()):
        deletions.setdefault((event_id, int(events.times[at])), []).append(int(events.commits[at]))
    return deletions


def find_deleting_commits(
    events: Events, stream: Stream, deletions: Mapping[tuple[Any, int], list[int]]
) -> Int64s | None:
    """Finds the commit that deleted each event, or NOT_DELETED; None if no row was deleted."""
    if not deletions:
        return None
    deleting = np.full(len(events), NOT_DELETED, dtype=np.int64)
    for at, event_id in enumerate(events.columns[stream.event_id].to_list()):
        commits = deletions.get((event_id, int(events.times[at])), [])
        deleting[at] = min((commit for commit in commits if commit > events.commits[at]), default=NOT_DELETED)
    return deleting


def read_highs(feed: DataFrame, declarations: Declarations, arrival: int) -> dict[int, int]:
    """Reads the highest event time of each commit up to `arrival`, without events beyond max_future.

    Events before the feed's first time cannot make later ones late.
    """
    micros = F.unix_micros(declarations.last.event_time)
    most = F.lit(declarations.listed[0].stream.max_future)
    for cut, each in zip(declarations.cuts, declarations.listed[1:], strict=True):
        most = F.when(F.col("_commit_version") > cut, each.stream.max_future).otherwise(most)
    counted = micros - most <= F.unix_micros("_commit_timestamp")
    rows = feed.where((F.col("_change_type") == "insert") & (F.col("_commit_version") <= arrival) & counted)
    highs = rows.groupBy("_commit_version").agg(F.max(micros)).collect()
    return {int(row[0]): int(row[1]) for row in highs}


def _has_key(stream: Stream, rule: CompiledRule, key: Mapping[str, str | None]) -> Column:
    """Returns the condition that an event has the key, whose texts are cast to the fields' types."""
    conditions = [F.lit(True)]
    for name in rule.group_by:
        text = key.get(name)
        value = F.lit(text).cast(str(stream.fields[name]))
        conditions.append(F.col(name).isNull() if text is None else F.col(name) == value)
    return reduce(and_, conditions)


def to_arrow(rows: DataFrame, stream: Stream) -> pa.Table:
    """Reads the inserted and deleted rows of a change feed, with their commit (arrival) and its time (committed_at)."""
    columns: list[Column | str] = [
        *stream.columns_of_events,
        "_change_type",
        F.col("_commit_version").alias("arrival"),
        F.unix_micros("_commit_timestamp").alias("committed_at"),
    ]
    chosen = rows.where(F.col("_change_type").isin("insert", "delete")).select(*columns)
    return read_or_refuse(chosen.toArrow, stream.name)


def select_changes(table: pa.Table, kind: str) -> pa.Table:
    """Selects the rows of one `_change_type` and drops that column."""
    is_kind = [value == kind for value in table.column("_change_type").to_pylist()]
    return table.filter(pa.array(is_kind, pa.bool_())).drop_columns(["_change_type"])

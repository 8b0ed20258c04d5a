"""Reads the data of one key for an explanation: its events as of their arrival, deletions, watermarks and resets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, reduce
from operator import and_
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from lookback.core.explaining.evidence import Clock, Evidence, Reset
from lookback.core.rules.compiled import CompiledRule
from lookback.core.streams.declarations import Declarations
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
    feed = read_feed(tables, stream.name, earliest - history.declarations.widest.max_future).where(within)
    # After the alert's commit, only deletions matter. These conditions let Delta select files by commit and change
    # type.
    kind, commit = F.col("_change_type"), F.col("_commit_version")
    known = feed.where(((kind == "insert") & (commit <= arrival)) | (kind == "delete"))
    changes = to_arrow(known.where(_has_key(stream, rule, alert["key"])), stream)
    lanes, make = prepare_evidence(tables, feed, rule, alert, history)
    resets = _read_resets(tables, stream, rule, alert, history, lanes, earliest)
    return make(changes, resets=resets, earliest=earliest)


def prepare_evidence(
    tables: Tables, feed: DataFrame, rule: CompiledRule, alert: Mapping[str, Any], history: RuleHistory
) -> tuple[Lanes, Callable[..., Evidence]]:
    """Reads what decides which events of any key counted: the clock of the stream, its rules and its lists.

    Args:
        tables: The tables of the workspace.
        feed: The change feed of the stream.
        rule: The rule to explain.
        alert: The rule_id and rule_version of an alert, and its commit (arrival).
        history: The rules of the evaluation.

    Returns:
        The lanes, and a function that makes the evidence of a key; see `Evidence.read`.
    """
    arrival = int(alert["arrival"])
    log = history.list_obeyed(arrival)
    lanes = Lanes(log, history, alert)
    clock = Clock(history.declarations, _read_highs(feed, history.declarations, arrival), find_advances(log))
    lists = read_list_history(tables, rule, lanes.activations, history)
    return lanes, partial(Evidence.read, rule=rule, clock=clock, activations=lanes.activations, lists=lists)


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
        resets.append(Reset.from_row(row, stream, waits))
    return resets


def _read_highs(feed: DataFrame, declarations: Declarations, arrival: int) -> dict[int, int]:
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
    """Reads rows of a change feed; see `select_changes`."""
    return read_or_refuse(select_changes(rows, stream).toArrow, stream.name)


def select_changes(rows: DataFrame, stream: Stream, *more: str) -> DataFrame:
    """Selects the inserted and deleted rows of a change feed as `Evidence.read` takes them."""
    columns: list[Column | str] = [
        *stream.columns_of_events,
        "_change_type",
        F.col("_commit_version").alias("arrival"),
        F.unix_micros("_commit_timestamp").alias("committed_at"),
        *more,
    ]
    return rows.where(F.col("_change_type").isin("insert", "delete")).select(*columns)

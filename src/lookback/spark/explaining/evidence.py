"""Reads the data of one key for an explanation: its events as of their arrival, deletions, watermarks and resets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lookback.core.explaining.evidence import Clock, Evidence, Reset
from lookback.core.rules.compiled import CompiledRule
from lookback.core.streams.blocks import COMMIT
from lookback.core.streams.declarations import Declarations
from lookback.core.streams.unions import MEMBER
from lookback.core.streams.watermarks import Mark, merge_mark
from lookback.core.values.windows import SEQUENCE
from lookback.spark.explaining.history import (
    Lanes,
    RuleHistory,
    find_advances,
    read_feed,
    read_list_history,
    read_or_refuse,
)
from lookback.spark.tables.sqltexts import quote_field, quote_name

if TYPE_CHECKING:
    import datetime as dt

    from pyspark.sql import DataFrame

    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables

# The maximum difference between the clocks of the processes that commit events and of those that judge them.
_CLOCKS_APART_US = 3_600_000_000


def read_evidence(
    tables: Tables, stream: Stream, rule: CompiledRule, alert: Mapping[str, Any], earliest: int, history: RuleHistory
) -> Evidence:
    """Reads the key's events from `earliest` up to the alert's commit, and everything that decides which counted."""
    arrival = int(alert["arrival"])
    # Earlier commits can contain events from `earliest` on only beyond max_future, and those do not count.
    feed = read_feed(tables, stream.name, earliest - history.declarations.widest.max_future)
    within = f"SELECT * FROM feed WHERE {quote_name(stream.event_time)} >= timestamp_micros(:earliest)"
    feed = tables.run(within, {"feed": feed}, earliest=earliest)
    # After the alert's commit, only deletions matter. These conditions let Delta select files by commit and change
    # type.
    known = "(_change_type = 'insert' AND _commit_version <= :arrival) OR _change_type = 'delete'"
    has_key, key = _write_has_key(rule, alert["key"])
    rows = select_changes(tables, feed, stream, f"({known}) AND {has_key}", arrival=arrival, **key)
    # Where steps have keys of their own, events of other keys may be among these.
    if (parts := [part for part in rule.key if part.sql]) and len(rule.keys) == 1:
        from lookback.spark.explaining.keys import select_events  # noqa: PLC0415 - questions to folders need no pyspark

        rows = select_events(rows, stream, parts, alert["key"])
    changes = read_or_refuse(rows.toArrow, stream.name)
    lanes, make = prepare_evidence(tables, feed, rule, alert, history)
    resets = _read_resets(tables, stream, rule, alert, history, lanes, earliest)
    return make(changes, resets=resets, earliest=earliest, key=dict(alert["key"]))


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
    clock = Clock(history.declarations, _read_highs(tables, feed, history.declarations, arrival), find_advances(log))
    lists = read_list_history(tables, rule, lanes.activations, history)
    return lanes, partial(Evidence.read, rule=rule, clock=clock, activations=lanes.activations, lists=lists)


def _read_resets(
    tables: Tables,
    stream: Stream,
    rule: CompiledRule,
    alert: Mapping[str, Any],
    history: RuleHistory,
    lanes: Lanes,
    earliest: int,
) -> list[Reset]:
    """Reads the alerts of the rule and key, up to this alert's commit, that reset the key's windows.

    Versions of a sequence share their state, even if only one of them has `reset_on_alert`. Resets from before
    `earliest` do not matter, since all the key's events are later.
    """
    if not (rule.spec.reset_on_alert or (rule.spec.kind == SEQUENCE and history.may_reset(alert["rule_id"]))):
        return []
    # As for the feed, a commit can contain later events only up to max_future, and alerts are decided after the commit.
    begins = earliest - history.declarations.widest.max_future - _CLOCKS_APART_US
    given = {"rule_id": alert["rule_id"], "arrival": int(alert["arrival"]), "since": begins}
    before = select_key(tables, tables.ask("first_rows", **given, **history.term.values), alert["key"])
    resets = []
    # An alert of another version may have more names in its key.
    for row in (row for row in before.toArrow().to_pylist() if dict(row["key"] or []) == alert["key"]):
        other = history.find_kept(alert["rule_id"], row["rule_version"], row["arrival"] - 1)
        if other is None or not other.spec.reset_on_alert or not lanes.is_own(row["rule_version"]):
            continue
        waits = other.sequence is not None and other.sequence.absent is not None
        resets.append(Reset.from_row(row, stream, waits))
    return resets


def _read_highs(tables: Tables, feed: DataFrame, declarations: Declarations, arrival: int) -> dict[int, Mark]:
    """Reads the mark of each commit up to `arrival`, without events beyond max_future.

    Events before the feed's first time cannot make later ones late.
    """
    most = str(declarations.listed[0].stream.max_future)
    for cut, each in zip(declarations.cuts, declarations.listed[1:], strict=True):
        most = f"CASE WHEN _commit_version > {cut} THEN {each.stream.max_future} ELSE {most} END"
    member = "CAST(NULL AS STRING)" if declarations.last.union is None else MEMBER
    names = (
        f"{member} AS member",
        f"unix_micros({quote_name(declarations.last.event_time)}) AS at_us",
        f"{most} AS most",
    )
    rows = {"events": feed.selectExpr(*names, "unix_micros(_commit_timestamp) AS committed", "_change_type", COMMIT)}
    marks: dict[int, Mark | None] = {}
    for commit, member, high in tables.ask("highest_times", rows, arrival=arrival).collect():
        mark: Mark = int(high) if member is None else {member: int(high)}
        marks[int(commit)] = merge_mark(marks.get(int(commit)), mark)
    return {commit: mark for commit, mark in marks.items() if mark is not None}


def select_key(tables: Tables, alerts: DataFrame, key: Mapping[str, str | None]) -> DataFrame:
    """Selects the alerts whose key has these values."""
    conditions = (f" AND key[:name_{at}] <=> :text_{at}" for at in range(len(key)))
    values = {f"name_{at}": name for at, name in enumerate(key)} | {
        f"text_{at}": key[name] for at, name in enumerate(key)
    }
    return tables.run(f"SELECT * FROM alert_rows WHERE true{''.join(conditions)}", {"alert_rows": alerts}, **values)


def find_first_within(tables: Tables, stream: Stream, start: dt.datetime, end: dt.datetime) -> int | None:
    """Finds the time of the first event of a stream's table, in microseconds since 1970.

    None if it is at `start` or before, which is the usual case and costs little, or after `end`. Both are aware.
    """
    events = {"events": tables.read(stream.name).selectExpr(f"{quote_name(stream.event_time)} AS event_time")}
    if not tables.ask("earlier_event", events, start=start).isEmpty():
        return None
    first: int | None = tables.ask("first_event", events, last=end).collect()[0][0]
    return first


def _write_has_key(rule: CompiledRule, key: Mapping[str, str | None]) -> tuple[str, dict[str, object]]:
    """Returns the condition that an event has the fields of the key for some step, and the values that it names.

    Texts are cast to the types of the fields. Expressions are left out.
    """
    keys = []
    for fields in rule.keys:
        conditions = ["true"]
        for at, (part, name) in enumerate(zip(rule.key, fields, strict=True)):
            if name != part.sql:
                is_same = "IS NULL" if key.get(part.name) is None else f"= CAST(:key_{at} AS {part.type})"
                conditions.append(f"{quote_field(name)} {is_same}")
        keys.append(" AND ".join(conditions))
    has_key = " OR ".join(f"({each})" for each in keys)
    return f"({has_key})", {f"key_{at}": key.get(part.name) for at, part in enumerate(rule.key)}


def select_changes(
    tables: Tables,
    feed: DataFrame,
    stream: Stream,
    condition: str = "true",
    more: Sequence[str] = (),
    /,
    **values: object,
) -> DataFrame:
    """Selects the inserted and deleted rows of a change feed as `Evidence.read` takes them.

    Args:
        tables: The tables of the workspace.
        feed: The change feed.
        stream: The stream.
        condition: A condition in SQL, with `values` by name.
        more: Further columns.
        **values: The values in the condition.
    """
    names = (*stream.columns_of_events, "_change_type", *more)
    columns = ", ".join(f"{quote_field(name)} AS {quote_name(name)}" for name in names)
    text = (
        f"SELECT {columns}, _commit_version AS arrival, unix_micros(_commit_timestamp) AS committed_at FROM feed "
        f"WHERE _change_type IN ('insert', 'delete') AND ({condition})"
    )
    return tables.run(text, {"feed": feed}, **values)

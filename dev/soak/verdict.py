"""What the tables hold after a soak run, against a replay of the same events and of the rules at their logged arrivals."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812

import lookback
from dev.soak.scenario import STREAM, is_usable
from lookback.core.rules.rulebook import ACTIONS
from lookback.core.values.columns import to_text

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
# What a retire_all says of each rule follows from the command, which is in the log too.
_FOLLOWS = "by retire_all"
_SHOWN = 5


def compare(tables: Tables, landing: Path) -> dict[str, Any]:
    """Counts, and every kind of difference with its number and first examples; no difference is an empty list each."""
    events = tables.read_changes(STREAM.name, 0).where("_change_type = 'insert'")
    rows = events.select(
        *STREAM.fields,
        F.col("_commit_version").alias("arrival"),
        F.unix_micros("_commit_timestamp").alias("committed_at"),
    ).toArrow()
    log = [row.asDict() for row in tables.read("rule_log").collect()]
    result = lookback.replay(_activations(tables, log), rows, STREAM)
    stored, replayed = _stored_alerts(tables), _replayed_alerts(result)
    late, late_replayed = _stored_late(tables), [_late_row(vars(each)) for each in result.late_events]
    identities = Counter((row[0], row[1]) for row in stored)
    differences: dict[str, list[Any]] = {
        "alerts": difference(stored, replayed),
        "alerts twice": [key for key, count in identities.items() if count > 1],
        "late_events": difference(late, late_replayed),
        "rule changes": _log_problems(tables, log),
        "account": _account_problems(tables, landing),
    }
    return {
        "events": rows.num_rows,
        "commits": tables.version(STREAM.name),
        "alerts": len(stored),
        "late_events": len(late),
        "rule_changes": sum(1 for row in log if row["action"] in _TAKEN),
        "differences": {name: len(found) for name, found in differences.items()},
        "examples": {
            name: [str(each)[:400] for each in found[:_SHOWN]] for name, found in differences.items() if found
        },
    }


_TAKEN = {*ACTIONS.values(), "clear_state", "advance", "retire_all"}


def _activations(tables: Tables, log: list[dict[str, Any]]) -> list[tuple[dict[str, Any], int | None]]:
    """The rules rows that took effect, in the order in which they did, each with its arrival."""
    rows = {(row["rule_id"], row["version"]): row.asDict() for row in tables.read("rules").collect()}
    found = []
    # A batch's rows are one file and stand in it as they took effect; batches follow each other in time.
    for entry in sorted(log, key=lambda entry: entry["logged_at"]):
        if entry["action"] not in _TAKEN or entry["message"] == _FOLLOWS:
            continue
        if entry["rule_id"] == "*":
            document = {"stream": STREAM.name, "time": entry["message"].removeprefix("to ")}
            row = {"rule_id": "*", "version": None, "status": entry["action"], "document": document}
        else:
            row = rows[entry["rule_id"], entry["version"]]
        found.append((row, entry["arrival"]))
    return found


def _micros(time: dt.datetime) -> int:
    return (time - _EPOCH) // dt.timedelta(microseconds=1)


def _stored_alerts(tables: Tables) -> list[tuple[Any, ...]]:
    micros = {"at": "event_time", "start": "window_start", "end": "window_end"}
    rows = tables.read("alerts").withColumns({name: F.unix_micros(time) for name, time in micros.items()}).collect()
    return [
        (
            row["alert_id"], row["revision"], row["verdict"], row["rule_id"], row["rule_version"], row["mode"],
            row["severity"], tuple(sorted(row["key"].items())), str(row["event_id"]), row["at"], row["start"],
            row["end"], row["window_complete"], tuple(sorted(row["measures"].items())), row["message"],
            tuple(row["evidence"]), row["arrival"],
        )
        for row in rows
    ]  # fmt: skip


def _replayed_alerts(result: lookback.Result) -> list[tuple[Any, ...]]:
    return [
        (
            alert.alert_id, alert.revision, alert.verdict, alert.rule_id, alert.rule_version, alert.mode,
            alert.severity, tuple(sorted(alert.key.items())), str(alert.event_id), _micros(alert.event_time),
            _micros(alert.window_start), _micros(alert.window_end), alert.window_complete,
            tuple(sorted((name, to_text(value)) for name, value in alert.measures.items())), alert.message,
            tuple(alert.evidence), alert.arrival,
        )
        for alert in result.alerts
    ]  # fmt: skip


def _stored_late(tables: Tables) -> list[tuple[Any, ...]]:
    rows = tables.read("late_events").withColumn("event_time", F.unix_micros("event_time")).collect()
    return [_late_row(row.asDict()) for row in rows]


def _late_row(row: dict[str, Any]) -> tuple[Any, ...]:
    time = row["event_time"]
    at = _micros(time) if isinstance(time, dt.datetime) else time
    return row["event_id"], at, row["arrival"], row["late_by_us"], row["action"]


def difference(stored: Iterable[Any], replayed: Iterable[Any]) -> list[str]:
    """What only one side has, as often as it has it more."""
    ours, theirs = Counter(stored), Counter(replayed)
    only_stored = [f"only in the table: {row}" for row in (ours - theirs).elements()]
    return sorted(only_stored + [f"only in the replay: {row}" for row in (theirs - ours).elements()])


def _log_problems(tables: Tables, log: list[dict[str, Any]]) -> list[str]:
    """Rows of `rules` that the log has not exactly once."""
    logged = Counter(
        (entry["rule_id"], entry["version"] if entry["rule_id"] != "*" else entry["action"])
        for entry in log
        if entry["action"] in {*_TAKEN, "rejected"} and entry["message"] != _FOLLOWS
    )
    written = Counter(
        (row["rule_id"], row["version"] if row["rule_id"] != "*" else row["status"])
        for row in tables.read("rules").collect()
    )
    return difference(logged.elements(), written.elements())


def _account_problems(tables: Tables, landing: Path) -> list[str]:
    """Whether each event offered is in the table once, and each line that is none is in rejected_events once."""
    lines = [line for file in landing.glob("*.json") for line in file.read_text(encoding="utf-8").splitlines()]
    offered = {line for line in lines if is_usable(line)}
    ids = Counter(row["id"] for row in tables.read(STREAM.name).select("id").collect())
    problems = [f"{id_} is {count} times in the table" for id_, count in ids.items() if count > 1]
    if len(ids) != len(offered):
        problems.append(f"{len(offered)} events offered, {len(ids)} in the table")
    rejected, broken = tables.read("rejected_events").count(), len(lines) - sum(map(is_usable, lines))
    if rejected != broken:
        problems.append(f"{broken} lines are no events, {rejected} rows in rejected_events")
    return problems

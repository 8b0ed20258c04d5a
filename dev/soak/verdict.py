"""Compares the tables after a soak run with a replay of the same events, with the rules at their logged arrivals."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql import functions as F  # noqa: N812

import lookback
from dev.soak.scenario import STREAM, is_usable
from lookback.core.rules.rulebook import ACTIONS
from lookback.core.values.columns import to_text

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from lookback.spark.tables.lakehouse import Tables

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
# Rows with this message follow from a retire_all command, which is in the log, too.
_BY_RETIRE_ALL = "by retire_all"
_MAX_SHOWN = 5


def compare(tables: Tables, landing: Path) -> dict[str, Any]:
    """Compares the tables with a replay. Returns counts, and the number and first examples of each kind of difference."""
    events = tables.read_changes(STREAM.name, 0).where("_change_type = 'insert'")
    rows = events.select(
        *STREAM.fields,
        F.col("_commit_version").alias("arrival"),
        F.unix_micros("_commit_timestamp").alias("committed_at"),
    ).toArrow()
    log = [row.asDict() for row in tables.read("rule_log").collect()]
    result = lookback.replay(_list_activations(tables, log), rows, STREAM)
    stored, replayed = read_alerts(tables), list_alerts(result)
    late, late_replayed = _read_late(tables), [_make_late_row(vars(each)) for each in result.late_events]
    identities = Counter((row.alert_id, row.revision) for row in stored)
    differences: dict[str, list[Any]] = {
        "alerts": find_differences(stored, replayed),
        "alerts twice": [key for key, count in identities.items() if count > 1],
        "late_events": find_differences(late, late_replayed),
        "rule changes": _find_log_problems(tables, log),
        "account": _find_account_problems(tables, landing),
    }
    return {
        "events": rows.num_rows,
        "commits": tables.version(STREAM.name),
        "alerts": len(stored),
        "late_events": len(late),
        "rule_changes": sum(1 for row in log if row["action"] in _LOGGED_CHANGES),
        "differences": {name: len(found) for name, found in differences.items()},
        "examples": {
            name: [str(each)[:400] for each in found[:_MAX_SHOWN]] for name, found in differences.items() if found
        },
    }


_LOGGED_CHANGES = {*ACTIONS.values(), "clear_state", "advance", "retire_all"}


def _list_activations(tables: Tables, log: list[dict[str, Any]]) -> list[tuple[dict[str, Any], int | None]]:
    """Lists the rules rows that took effect, in that order, each with its arrival."""
    rows = {(row["rule_id"], row["version"]): row.asDict() for row in tables.read("rules").collect()}
    activations = []
    # A batch's rows are one file and have the order in which they took effect; batches follow each other in time.
    for entry in sorted(log, key=lambda entry: entry["logged_at"]):
        if entry["action"] not in _LOGGED_CHANGES or entry["message"] == _BY_RETIRE_ALL:
            continue
        if entry["rule_id"] == "*":
            document = {"stream": STREAM.name, "time": entry["message"].removeprefix("to ")}
            row = {"rule_id": "*", "version": None, "status": entry["action"], "document": document}
        else:
            row = rows[entry["rule_id"], entry["version"]]
        activations.append((row, entry["arrival"]))
    return activations


class AlertRow(NamedTuple):
    """A row of `alerts`, to be compared with a replay. Times are microseconds since 1970; maps are sorted pairs."""

    alert_id: str
    revision: int
    verdict: str
    rule_id: str
    rule_version: int | None
    mode: str
    severity: str
    key: tuple[tuple[str, str | None], ...]
    event_id: str
    event_time: int
    window_start: int
    window_end: int
    window_complete: bool
    measures: tuple[tuple[str, str | None], ...]
    message: str
    evidence: tuple[str, ...]
    arrival: int


def read_alerts(tables: Tables) -> list[AlertRow]:
    """Reads all rows of the table `alerts`."""
    return collect_alerts(tables.read("alerts"))


def collect_alerts(alerts: DataFrame) -> list[AlertRow]:
    """Collects rows that have the columns of the table `alerts`."""
    micros = {name: F.unix_micros(name) for name in ("event_time", "window_start", "window_end")}
    return [_make_alert_row(row.asDict()) for row in alerts.withColumns(micros).collect()]


def list_alerts(result: lookback.Result) -> list[AlertRow]:
    """Lists the alerts of a replay as rows of the table `alerts`."""
    return [_make_alert_row(vars(alert)) for alert in result.alerts]


def _make_alert_row(alert: Mapping[str, Any]) -> AlertRow:
    return AlertRow(*(_to_plain(alert[name]) for name in AlertRow._fields))


def _to_plain(value: Any) -> Any:
    if isinstance(value, dt.datetime):
        return (value - _EPOCH) // dt.timedelta(microseconds=1)
    if isinstance(value, Mapping):
        return tuple(sorted((name, to_text(each)) for name, each in value.items()))
    return tuple(value) if isinstance(value, list) else value


def _read_late(tables: Tables) -> list[tuple[Any, ...]]:
    rows = tables.read("late_events").withColumn("event_time", F.unix_micros("event_time")).collect()
    return [_make_late_row(row.asDict()) for row in rows]


def _make_late_row(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["event_id"], _to_plain(row["event_time"]), row["arrival"], row["late_by_us"], row["action"]


def find_differences(stored: Iterable[Any], replayed: Iterable[Any]) -> list[str]:
    """Lists the rows that only one side has, or has more often."""
    ours, theirs = Counter(stored), Counter(replayed)
    only_stored = [f"only in the table: {row}" for row in (ours - theirs).elements()]
    return sorted(only_stored + [f"only in the replay: {row}" for row in (theirs - ours).elements()])


def _find_log_problems(tables: Tables, log: list[dict[str, Any]]) -> list[str]:
    """Finds rows of `rules` that are not exactly once in the log."""
    logged = Counter(
        (entry["rule_id"], entry["version"] if entry["rule_id"] != "*" else entry["action"])
        for entry in log
        if entry["action"] in {*_LOGGED_CHANGES, "rejected"} and entry["message"] != _BY_RETIRE_ALL
    )
    written = Counter(
        (row["rule_id"], row["version"] if row["rule_id"] != "*" else row["status"])
        for row in tables.read("rules").collect()
    )
    return find_differences(logged.elements(), written.elements())


def _find_account_problems(tables: Tables, landing: Path) -> list[str]:
    """Finds problems unless each offered event is in the table once, and each broken line in rejected_events once."""
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

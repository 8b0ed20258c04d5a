"""Writes the output of a batch, exactly once per table, even if the batch is repeated."""

from __future__ import annotations

import datetime as dt
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from lookback.core.judging.segment import merge_failures
from lookback.core.rules.coverage import Coverage
from lookback.core.rules.quarantine import describe_failure
from lookback.core.rules.roles import name_role
from lookback.core.rules.rulelog import LogRow
from lookback.core.streams.alerts import ACTION_STRENGTHS, Failure
from lookback.core.streams.arrival import late_sort_key
from lookback.core.streams.blocks import LATE_SCHEMA, make_columns, merge_alerts, unpack_failures, unpack_late
from lookback.core.streams.metrics import RuleCounts
from lookback.core.values.columns import to_text
from lookback.core.values.times import to_utc
from lookback.spark.batches.shard import ALERTS, FAILURES, LATE, LOG, NOTES, REPORT
from lookback.spark.checkpoints.histories import Waiting, merge_waiting
from lookback.spark.tables.history import choose_log_time

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables

_TIME = pa.timestamp("us", tz="UTC")
_LOG_SCHEMA = make_columns(LogRow)
_LOG = logging.getLogger("lookback")
# The tables that a batch writes.
OUTPUTS = ("rule_log", "late_events", "alerts")
# How many commits of a table's history are first searched for a batch's mark.
_FIRST_LIMIT = 50


@dataclass(frozen=True)
class BatchReport:
    """The figures of one batch.

    Attributes:
        batch_id: The number of the batch.
        events: The events read.
        alerts: The alert rows written, by rule_id.
        late: The rows written to late_events.
        failed: The log rows about failed rules.
        log: The rows written to rule_log.
        watermark: The watermark after the batch, in microseconds.
        arrival: The last commit evaluated.
        state_rows: The rows that all shards keep; see `core.state.shard.StateCounts`.
        state_bytes_written: The bytes written to the state store.
        rules: The rules in force.
        evaluate_ms: The part of `run_ms` that the slowest shard takes.
        run_ms: The time in which Spark reads, dispatches and evaluates the events.
        write_ms: The time for writing the tables.
        shards_in_memory: The shards whose state was still in memory.
        finished_at: When the batch was written.
        required: The coverage needed from now on, if the batch changed the rules.
        failures: The errors of rules.
        discarded: The late events that no rule used.
        remembered: See `core.state.shard.StateCounts`.
        by_rule: The counts of each rule that did anything; shadow versions are under `RULE_ID (shadow)`.
        warming: The versions that wait for their history.
    """

    batch_id: int
    events: int
    alerts: Mapping[str, int]
    late: int
    failed: int
    log: tuple[Mapping[str, Any], ...]
    watermark: int | None
    arrival: int | None
    state_rows: int
    state_bytes_written: int
    rules: int
    evaluate_ms: float
    run_ms: float
    write_ms: float
    shards_in_memory: int
    finished_at: dt.datetime
    required: Coverage | None = None
    failures: tuple[Failure, ...] = ()
    discarded: int = 0
    remembered: int = 0
    by_rule: Mapping[str, RuleCounts] = field(default_factory=dict)
    warming: tuple[Waiting, ...] = ()

    def __str__(self) -> str:
        counts = {
            "events": self.events,
            "alerts": sum(self.alerts.values()),
            "late": self.late,
            "discarded": self.discarded,
            "failed": sum(counts.failed for counts in self.by_rule.values()),
            "rules": self.rules,
            "state_rows": self.state_rows,
            "judged": self.arrival,
            "watermark": None if self.watermark is None else to_text(to_utc(self.watermark)),
            "run_ms": round(self.run_ms),
            "evaluate_ms": round(self.evaluate_ms),
            "write_ms": round(self.write_ms),
        }
        return f"batch={self.batch_id} " + " ".join(f"{name}={value}" for name, value in counts.items())


@dataclass
class Sink:
    """Writes the output of the shards.

    Attributes:
        tables: The tables.
        stream: The stream.
        query_id: The query id of the checkpoint.
        check: Whether to check first if the next batch was already written.
        missing: During a rebuild, drops the rows that a table already has.
    """

    tables: Tables
    stream: Stream
    query_id: str
    check: bool = True
    missing: Callable[[str, pa.Table], pa.Table] | None = None
    # No row of rule_log has this time or a later one. None before the first row is written.
    _next_time: dt.datetime | None = field(default=None, init=False)

    def write(self, answers: pa.Table, batch_id: int, run_ms: float) -> BatchReport:
        """Appends alerts, late events and log rows, each in one commit that carries the batch's mark.

        Only the first batch after a start can be a repetition, so only then each table's history is searched.
        """
        mark, failures = f"{self.query_id}:{batch_id}", _merge_failures(answers)
        log = _make_log(answers, failures, self.stream.name, batch_id)
        started = self._choose_time(is_logged=bool(log.num_rows))
        log = log.append_column("logged_at", pa.array([started] * log.num_rows, _TIME))
        alerts = _merge_alerts(answers, started)
        late = _merge_late(answers, self.stream)
        if self.missing is not None:
            alerts, late, log = (
                self.missing(name, rows)
                for name, rows in (("alerts", alerts), ("late_events", late), ("rule_log", log))
            )
        # Write the log first, so that for every alert the log already has its rule's activation.
        self._append({"rule_log": log}, mark)
        self._append({"late_events": late, "alerts": alerts}, mark)
        self.check = False
        finished = dt.datetime.now(dt.timezone.utc)
        report = _make_report(
            answers, batch_id, alerts, late, log, failures, run_ms, finished, (finished - started).total_seconds() * 1e3
        )
        _LOG.info("stream=%s %s", self.stream.name, report)
        return report

    def _append(self, outputs: Mapping[str, pa.Table], mark: str) -> None:
        """Appends to several tables side by side, because a commit mostly waits for the storage."""
        missing = {
            name: rows
            for name, rows in outputs.items()
            if rows.num_rows and not (self.check and is_written(self.tables, name, mark))
        }
        with ThreadPoolExecutor(max(1, len(missing)), "lookback-append") as threads:
            for done in [threads.submit(self.tables.append_arrow, rows, name, mark) for name, rows in missing.items()]:
                done.result()

    def _choose_time(self, *, is_logged: bool) -> dt.datetime:
        """Chooses the time of a batch so that its rows of rule_log, if it has any, sort after all earlier ones."""
        if self._next_time is None and is_logged:
            self._next_time = choose_log_time(self.tables, self.stream.name)
        time = dt.datetime.now(dt.timezone.utc)
        if self._next_time is not None:
            time = max(time, self._next_time)
            self._next_time = time + dt.timedelta(microseconds=is_logged)
        return time


def is_written(tables: Tables, name: str, mark: str) -> bool:
    """Returns whether a commit of the table carries `mark` as its user metadata."""
    query, _, batch = mark.rpartition(":")
    return batch in map(str, _find_last_batches(tables, name, query))


def find_last_written(tables: Tables, query: str) -> int:
    """Returns the last batch of a query that has rows in any output table; -1 if there is none."""
    return max((batch for name in OUTPUTS for batch in _find_last_batches(tables, name, query)), default=-1)


def _find_last_batches(tables: Tables, name: str, query: str) -> list[int]:
    """Finds recent batches of a query by the marks in a table's commits, including the last one."""
    if not tables.may_have_rows(name):
        return []
    for marks in _read_history(tables, name):
        batches = [each.rpartition(":")[2] for each in marks if each.startswith(f"{query}:")]
        # Batches of a query are written in order, so its first mark ends the search.
        if numbers := [int(each) for each in batches if each.isdecimal()]:
            return numbers
    return []


def _read_history(tables: Tables, name: str) -> Iterator[list[str]]:
    """Yields the user metadata of the last commits of a table, more of them each time."""
    limit = _FIRST_LIMIT
    while True:
        rows = tables.history(name, limit).select("userMetadata").collect()
        yield [row["userMetadata"] or "" for row in rows]
        if len(rows) < limit:
            return
        limit *= 8


def _list_payloads(answers: pa.Table, kind: str) -> list[bytes]:
    kinds, payloads = answers.column("kind").to_pylist(), answers.column("payload")
    return [payloads[at].as_py() for at, each in enumerate(kinds) if each == kind]


def _merge_alerts(answers: pa.Table, decided_at: dt.datetime) -> pa.Table:
    alerts = merge_alerts(_list_payloads(answers, ALERTS))
    return alerts.append_column("decided_at", pa.array([decided_at] * alerts.num_rows, _TIME))


def _merge_late(answers: pa.Table, stream: Stream) -> pa.Table:
    """Returns a row per late event, in order of arrival, with the strongest action of any shard."""
    best: dict[tuple[str, int], dict[str, Any]] = {}
    for payload in _list_payloads(answers, LATE):
        for row in unpack_late(payload):
            known = best.get((row["event_id"], row["arrival"]))
            if known is None or ACTION_STRENGTHS[row["action"]] > ACTION_STRENGTHS[known["action"]]:
                best[row["event_id"], row["arrival"]] = row
    ordered = sorted(
        best.values(), key=lambda row: late_sort_key(stream, row["arrival"], row["event_time"], row["event_id"])
    )
    return pa.Table.from_pylist(ordered, schema=LATE_SCHEMA)


def _merge_failures(answers: pa.Table) -> list[Failure]:
    """Returns the errors of the evaluation, one per rule and version."""
    return merge_failures([f for payload in _list_payloads(answers, FAILURES) for f in unpack_failures(payload)])


def _read_rows(answers: pa.Table, kind: str) -> list[dict[str, Any]]:
    return [row for payload in _list_payloads(answers, kind) for row in json.loads(payload)]


def _make_log(answers: pa.Table, failures: Sequence[Failure], stream: str, batch_id: int) -> pa.Table:
    """Returns the rows of rule_log in the order in which they took effect, which `position` records, without times."""
    # Keep equal commands of a batch, but drop duplicate notes, which several shards may send.
    rows = _read_rows(answers, LOG)
    notes = {json.dumps(row): row for row in _read_rows(answers, NOTES)}.values()
    rows += sorted(
        notes, key=lambda row: (row["arrival"], row["rule_id"], row["version"], row["action"], row["message"])
    )
    rows += [
        {
            "stream": stream,
            "rule_id": failure.rule_id,
            "version": failure.version,
            "action": "failed",
            "message": describe_failure(failure),
            "arrival": failure.first_arrival[0],
        }
        for failure in failures
    ]
    log = pa.Table.from_pylist(rows, schema=_LOG_SCHEMA)
    log = log.append_column("position", pa.array(range(log.num_rows), pa.int64()))
    return log.append_column("batch_id", pa.array([batch_id] * log.num_rows, pa.int64()))


def _count_verdicts(alerts: pa.Table) -> dict[str, Counter[str]]:
    """Counts the rows of alerts by role of the rule, then by verdict."""
    counts: dict[str, Counter[str]] = {}
    for row in alerts.group_by(["rule_id", "mode", "verdict"]).aggregate([([], "count_all")]).to_pylist():
        counts.setdefault(name_role(row["rule_id"], row["mode"]), Counter())[row["verdict"]] = row["count_all"]
    return counts


def _count_by_rule(
    reports: Sequence[Mapping[str, Any]], verdicts: Mapping[str, Counter[str]], failures: Sequence[Failure]
) -> dict[str, RuleCounts]:
    evaluated: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    for report in reports:
        evaluated.update(report["evaluated"])
    for failure in failures:
        # A rule that broke counts as one more failure besides the failed events.
        failed[name_role(failure.rule_id, failure.mode)] += failure.count + bool(failure.reason)
    none: Counter[str] = Counter()
    return {
        rule_id: RuleCounts(
            evaluated[rule_id], counts["raised"] + counts["suppressed"], counts["suppressed"], failed[rule_id]
        )
        for rule_id in sorted({*evaluated, *failed, *verdicts})
        for counts in (verdicts.get(rule_id, none),)
    }


def _make_report(
    answers: pa.Table,
    batch_id: int,
    alerts: pa.Table,
    late: pa.Table,
    log: pa.Table,
    failures: Sequence[Failure],
    run_ms: float,
    finished: dt.datetime,
    write_ms: float,
) -> BatchReport:
    reports = [json.loads(payload) for payload in _list_payloads(answers, REPORT)]
    verdicts = _count_verdicts(alerts)
    log_rows = tuple(log.to_pylist())
    first: Mapping[str, Any] = reports[0] if reports else {}
    return BatchReport(
        batch_id=batch_id,
        events=sum(report["events"] for report in reports),
        alerts={
            row["rule_id"]: row["count_all"]
            for row in alerts.group_by(["rule_id"]).aggregate([([], "count_all")]).to_pylist()
        },
        late=late.num_rows,
        failed=sum(1 for row in log_rows if row["action"] == "failed"),
        log=log_rows,
        watermark=first.get("watermark"),
        arrival=first.get("arrival"),
        state_rows=sum(report["state_rows"] for report in reports),
        state_bytes_written=sum(report["bytes_written"] for report in reports),
        rules=first.get("rules", 0),
        evaluate_ms=max((report["milliseconds"] for report in reports), default=0.0),
        run_ms=run_ms,
        write_ms=write_ms,
        shards_in_memory=sum(1 for report in reports if report["in_memory"]),
        finished_at=finished,
        required=Coverage.from_dict(first["required"]) if "required" in first else None,
        failures=tuple(failures),
        remembered=sum(report["remembered"] for report in reports),
        discarded=late.column("action").to_pylist().count("discarded"),
        by_rule=_count_by_rule(reports, verdicts, failures),
        warming=merge_waiting(reports),
    )

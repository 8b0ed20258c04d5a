"""What a batch writes: each table at most once, and never again when the batch is repeated."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from lookback.core.alerts import Failure
from lookback.core.blocks import ALERTS_SCHEMA, LATE_SCHEMA, unpack_failures, unpack_table
from lookback.core.coverage import Coverage
from lookback.core.evaluation import failure_text
from lookback.core.stretch import merge_failures
from lookback.spark.shard import ALERTS, FAILURES, LATE, LOG, REPORT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from lookback.spark.tables import Tables

_STRENGTH = {"discarded": 0, "recorded": 1, "evaluated": 2}
_TIME = pa.timestamp("us", tz="UTC")
_LOG_SCHEMA = pa.schema(
    [
        ("stream", pa.string()), ("rule_id", pa.string()), ("version", pa.int64()), ("action", pa.string()),
        ("message", pa.string()), ("arrival", pa.int64()),
    ]
)  # fmt: skip
# How many commits of a table's history are read at first to look for a batch's mark.
_HISTORY = 50


@dataclass(frozen=True)
class BatchReport:
    """What one batch did. watermark: microseconds; arrival: the last commit judged; state_rows: rows in all pages.

    required: what must be sent of the events from now on, where the batch changed the rules.
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


@dataclass
class Sink:
    """Writes the answers of the shards. query_id: of the checkpoint; check: search for marks of the next batch first."""

    tables: Tables
    stream: str
    query_id: str
    check: bool = True

    def write(self, answers: pa.Table, batch_id: int, run_ms: float) -> BatchReport:
        """Appends alerts, late events and log rows, each in one commit that carries the batch's mark.

        Only the first batch after a start can be a repeated one; for it each table's history is searched.
        """
        started = dt.datetime.now(dt.timezone.utc)
        mark = f"{self.query_id}:{batch_id}"
        alerts = _alerts(answers, started)
        late = _late(answers)
        log = _log(answers, self.stream, batch_id, started)
        for name, rows in (("alerts", alerts), ("late_events", late), ("rule_log", log)):
            if rows.num_rows and not (self.check and is_written(self.tables, name, mark)):
                self.tables.append(self._frame(rows), name, mark)
        self.check = False
        finished = dt.datetime.now(dt.timezone.utc)
        return _report(
            answers, batch_id, alerts, late, log, run_ms, finished, (finished - started).total_seconds() * 1e3
        )

    def _frame(self, rows: pa.Table) -> DataFrame:
        return self.tables.spark.createDataFrame(rows).coalesce(1)


def is_written(tables: Tables, name: str, mark: str) -> bool:
    """Whether a commit of the table carries `mark` as its user metadata."""
    limit = _HISTORY
    while True:
        rows = tables.delta(name).history(limit).select("userMetadata").collect()
        if any(row["userMetadata"] == mark for row in rows):
            return True
        # Batches of a query are written in order: an earlier one's mark ends the search.
        query = mark.rpartition(":")[0]
        if len(rows) < limit or any((row["userMetadata"] or "").startswith(f"{query}:") for row in rows):
            return False
        limit *= 8


def _payloads(answers: pa.Table, kind: str) -> list[bytes]:
    kinds, payloads = answers.column("kind").to_pylist(), answers.column("payload")
    return [payloads[at].as_py() for at, each in enumerate(kinds) if each == kind]


def _alerts(answers: pa.Table, decided_at: dt.datetime) -> pa.Table:
    tables = [unpack_table(payload) for payload in _payloads(answers, ALERTS)]
    alerts = pa.concat_tables(tables) if tables else ALERTS_SCHEMA.empty_table()
    alerts = alerts.sort_by(
        [(name, "ascending") for name in ("arrival", "event_time", "event_id", "rule_id", "alert_id", "revision")]
    )
    return alerts.append_column("decided_at", pa.array([decided_at] * alerts.num_rows, _TIME))


def _late(answers: pa.Table) -> pa.Table:
    """One row per late event: the most that any shard did with it."""
    best: dict[tuple[str, int], dict[str, Any]] = {}
    for payload in _payloads(answers, LATE):
        for row in unpack_table(payload).to_pylist():
            known = best.get((row["event_id"], row["arrival"]))
            if known is None or _STRENGTH[row["action"]] > _STRENGTH[known["action"]]:
                best[row["event_id"], row["arrival"]] = row
    ordered = sorted(best.values(), key=lambda row: (row["arrival"], row["event_time"], row["event_id"]))
    return pa.Table.from_pylist(ordered, schema=LATE_SCHEMA)


def _log(answers: pa.Table, stream: str, batch_id: int, logged_at: dt.datetime) -> pa.Table:
    rows = [row for payload in _payloads(answers, LOG) for row in json.loads(payload)]
    failures: list[Failure] = [f for payload in _payloads(answers, FAILURES) for f in unpack_failures(payload)]
    rows += [
        {
            "stream": stream, "rule_id": failure.rule_id, "version": failure.version, "action": "failed",
            "message": failure_text(failure.count, failure.first_event_id), "arrival": failure.first_arrival[0],
        }
        for failure in merge_failures(failures)
    ]  # fmt: skip
    log = pa.Table.from_pylist(rows, schema=_LOG_SCHEMA)
    log = log.add_column(5, "batch_id", pa.array([batch_id] * log.num_rows, pa.int64()))
    return log.append_column("logged_at", pa.array([logged_at] * log.num_rows, _TIME))


def _report(
    answers: pa.Table, batch_id: int, alerts: pa.Table, late: pa.Table, log: pa.Table, run_ms: float,
    finished: dt.datetime, write_ms: float,
) -> BatchReport:  # fmt: skip
    reports = [json.loads(payload) for payload in _payloads(answers, REPORT)]
    counts: dict[str, int] = {}
    for rule_id in alerts.column("rule_id").to_pylist():
        counts[rule_id] = counts.get(rule_id, 0) + 1
    log_rows = tuple(log.to_pylist())
    first: Mapping[str, Any] = reports[0] if reports else {}
    return BatchReport(
        batch_id=batch_id,
        events=sum(report["events"] for report in reports),
        alerts=counts,
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
    )

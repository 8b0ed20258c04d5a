"""Aggregates the batches of an evaluation and writes them to the table `metrics`, in a separate thread."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from lookback.core.operations.backlog import Backlog, Commit, measure_backlog
from lookback.core.streams.alerts import TABLE as ALERTS
from lookback.core.streams.blocks import COMMIT
from lookback.core.streams.metrics import TABLE, RuleCounts
from lookback.core.values.texts import summarize_error
from lookback.core.values.times import to_utc
from lookback.spark.tables.conflicts import SPARK_ERRORS
from lookback.spark.tables.schemas import METRICS

if TYPE_CHECKING:
    from types import TracebackType

    from pyspark.sql.streaming.query import StreamingQuery

    from lookback.core.streams.declaration import Stream
    from lookback.spark.batches.sink import BatchReport
    from lookback.spark.checkpoints.checkpoint import Checkpoint
    from lookback.spark.tables.lakehouse import Tables

# Each row is a commit.
DEFAULT_SECONDS = 30.0
# An idle stream writes rows this many times less often.
IDLE_TIMES = 10
_LOG = logging.getLogger("lookback")


def read_backlog(tables: Tables, name: str, judged: int | None) -> Backlog:
    """Reads the backlog of the events table `name`. `judged` is the last evaluated commit, or None."""

    def history(limit: int) -> list[Commit]:
        rows = tables.history(name, limit)
        rows = rows.selectExpr("version", "unix_micros(timestamp) AS at", "operation", "operationMetrics")
        return [
            Commit(row["version"], to_utc(row["at"]), row["operation"], row["operationMetrics"] or {})
            for row in rows.collect()
        ]

    backlog = measure_backlog(history, judged)
    if name != ALERTS or judged is None or not backlog.waiting:
        return backlog
    # Not every row of alerts is an event: rows of rules over alerts are not.
    try:
        feed = {"changes": tables.read_changes(name, judged + 1)}
        rows = tables.run(f"SELECT DISTINCT {COMMIT} FROM changes", feed).collect()
    except SPARK_ERRORS:
        return backlog  # the log was cleaned: count all remaining commits
    bringing = {row[0] for row in rows}
    return measure_backlog(
        lambda limit: [each if each.version in bringing else each._replace(operation="") for each in history(limit)],
        judged,
    )


@dataclass
class Sums:
    """Sums over several batches, with `milliseconds` by stage and `by_rule` by rule_id, and the `last` report."""

    batches: int = 0
    events: int = 0
    late: int = 0
    discarded: int = 0
    bytes_written: int = 0
    milliseconds: dict[str, float] = field(default_factory=lambda: {"run": 0.0, "evaluate": 0.0, "write": 0.0})
    longest: float | None = None
    by_rule: dict[str, RuleCounts] = field(default_factory=dict)
    last: BatchReport | None = None

    @property
    def last_arrival(self) -> int | None:
        """The last commit that the batches evaluated; None without batches."""
        return None if self.last is None else self.last.arrival

    def add(self, report: BatchReport) -> None:
        """Adds a batch. Call this in the order of the batches."""
        self.batches += 1
        self.events += report.events
        self.late += report.late
        self.discarded += report.discarded
        self.bytes_written += report.state_bytes_written
        stages = {"run": report.run_ms, "evaluate": report.evaluate_ms, "write": report.write_ms}
        self.milliseconds = {name: total + stages[name] for name, total in self.milliseconds.items()}
        self.longest = max(self.longest or 0.0, report.run_ms + report.write_ms)
        for rule_id, counts in report.by_rule.items():
            self.by_rule[rule_id] = self.by_rule.get(rule_id, RuleCounts()) + counts
        self.last = report

    def to_row(self) -> dict[str, Any]:
        """Returns the columns of the table that are computed from the batches."""
        busy = (self.milliseconds["run"] + self.milliseconds["write"]) / 1_000
        total = sum(self.by_rule.values(), RuleCounts())
        raised = {rule_id: counts.matched - counts.suppressed for rule_id, counts in self.by_rule.items()}
        top = max(raised, key=lambda rule_id: (raised[rule_id], rule_id), default=None)
        most = raised[top] if top is not None else 0
        last = self.last
        return {
            "batches": self.batches,
            "events": self.events,
            "events_per_second": _to_decimal(self.events / busy, 1) if busy else None,
            "watermark": None if last is None or last.watermark is None else to_utc(last.watermark),
            "state_rows": None if last is None else last.state_rows,
            "remembered": None if last is None else last.remembered,
            "state_bytes_written": self.bytes_written,
            "rules": None if last is None else last.rules,
            **vars(total),
            "late": self.late,
            "discarded": self.discarded,
            "top_rule": top if most else None,
            "top_rule_alerts": most,
            **{f"{name}_ms": round(total) for name, total in self.milliseconds.items()},
            "longest_ms": None if self.longest is None else round(self.longest),
            "by_rule": {rule_id: vars(counts) for rule_id, counts in self.by_rule.items()},
        }


class Metrics:
    """Updates the table `metrics` while an evaluation runs. Use it as a context manager around the run.

    `add` only queues the report of a batch. Every `seconds` a thread writes a row about all batches since the last row,
    and one more at the end. While no batch ends and nothing waits, it writes only every tenth time. Metrics are best
    effort: a killed process loses unwritten counts, a repeated batch counts twice, and if a row cannot be written, its
    counts go into the next row. The evaluation of the stream `metrics` itself writes none, because its rows would be
    new events endlessly.
    """

    def __init__(
        self, tables: Tables, stream: Stream, checkpoint: Checkpoint, seconds: float | None = DEFAULT_SECONDS
    ) -> None:
        self._tables, self._stream, self._checkpoint = tables, stream, checkpoint
        self._seconds = None if stream.name == TABLE else seconds
        self._reports: deque[BatchReport] = deque()
        self._sums = Sums()
        self._failed = False
        self._covered_since = time.monotonic()
        self._query: StreamingQuery | None = None
        # The last batch whose total duration is counted.
        self._timed = -1
        self._stopping, self._woken = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._has_warned = False

    def add(self, report: BatchReport) -> None:
        """Queues the report of a batch. The batch waits for this call, so it does nothing else."""
        if self._thread is not None:
            self._reports.append(report)
            if self._query is None:
                self._woken.set()

    def __enter__(self) -> Metrics:
        if self._seconds is not None:
            self._covered_since = time.monotonic()
            self._thread = threading.Thread(target=self._run, name=f"metrics-{self._stream.name}", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._failed = kind is not None
            self._stopping.set()
            self._woken.set()
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        assert self._seconds is not None
        due = time.monotonic() + self._seconds
        while not self._stopping.is_set():
            self._woken.wait(max(0.0, due - time.monotonic()))
            self._woken.clear()
            self._find_query()
            if time.monotonic() >= due:
                due = time.monotonic() + self._seconds
                self._write(ended=False)
        self._write(ended=True)

    def _find_query(self) -> None:
        """Finds the running query, which changes when it is planned again."""
        # If Spark does not respond, the row has fewer figures.
        with contextlib.suppress(Exception):
            if self._query is None or not self._query.isActive:
                name = f"lookback-{self._stream.name}"
                self._query = next((q for q in self._tables.spark.streams.active if q.name == name), self._query)

    def _write(self, *, ended: bool) -> None:
        while self._reports:
            self._sums.add(self._reports.popleft())
        until = time.monotonic()
        try:
            row = self._make_row(until - self._covered_since)
            idle_seconds = IDLE_TIMES * (self._seconds or 0.0)
            ended_well = ended and not self._failed
            if row["batches"] or row["lag_commits"] or row["seconds"] >= idle_seconds or ended_well:
                frame = self._tables.spark.createDataFrame([row], METRICS).coalesce(1)
                self._tables.append(frame, TABLE)
                self._sums, self._covered_since, self._has_warned = Sums(last=self._sums.last), until, False
        except Exception as error:  # noqa: BLE001 - no error of metrics may stop the stream
            if not self._has_warned:
                reason = summarize_error(error)
                _LOG.warning("stream=%s cannot write metrics; the evaluation continues: %s", self._stream.name, reason)
            self._has_warned = True

    def _make_row(self, seconds: float) -> dict[str, Any]:
        now = dt.datetime.now(dt.timezone.utc)
        sums = self._sums.to_row()
        judged = self._find_last_judged()
        waiting = read_backlog(self._tables, self._stream.name, judged)
        behind = None if sums["watermark"] is None else (now - sums["watermark"]).total_seconds()
        return {
            "metrics_id": uuid.uuid4().hex,
            "measured_at": now,
            "stream": self._stream.name,
            "seconds": _to_decimal(seconds, 3),
            **sums,
            "lag_commits": waiting.waiting,
            "lag_seconds": _to_decimal(waiting.seconds(now), 3),
            "committed": waiting.committed,
            "judged": judged,
            "watermark_behind_seconds": None if behind is None else _to_decimal(behind, 3),
            **self._read_query_figures(),
            "ingested_at": now,
        }

    def _find_last_judged(self) -> int | None:
        """Returns the last evaluated commit, from the last batch or the checkpoint, which also counts empty commits."""
        known = (self._sums.last_arrival, self._checkpoint.find_last_judged())
        return max((commit for commit in known if commit is not None), default=None)

    def _read_query_figures(self) -> dict[str, int | None]:
        """Returns Spark's figures for the query: the total duration of its batches, and the size of its state store."""
        self._find_query()
        figures: dict[str, int | None] = {"trigger_ms": None, "state_bytes": None}
        recent: list[Any] = [] if self._query is None else list(self._query.recentProgress)
        # Depending on the version of Spark, a dict or an object with JSON.
        progress = [each if isinstance(each, dict) else json.loads(each.json) for each in recent]
        new = [each for each in progress if each["batchId"] > self._timed]
        if new:
            self._timed = max(each["batchId"] for each in new)
            figures["trigger_ms"] = sum(each["durationMs"].get("triggerExecution", 0) for each in new)
        if progress:
            figures["state_bytes"] = _sum_state_bytes(progress[-1]["stateOperators"])
        return figures


def _sum_state_bytes(operators: Iterable[Mapping[str, Any]]) -> int | None:
    sizes = [operator["customMetrics"].get("rocksdbSstFileSize") for operator in operators]
    return sum(size for size in sizes if size is not None) if sizes else None


def _to_decimal(value: float, digits: int) -> Decimal:
    return Decimal(value).quantize(Decimal(1).scaleb(-digits))

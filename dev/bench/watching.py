"""Collects the reports of a running evaluation's batches, with the query's own durations."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from lookback.spark.batches.sink import BatchReport

# The query keeps so many of its own reports; Spark's default is 100.
PROGRESS = {"spark.sql.streaming.numRecentProgressUpdates": "2000"}


class Watch:
    """Called with every report. Keeps them, and a hold of every query that ran, which knows its durations.

    every: seconds between two lines of progress; 0 for one a batch.
    """

    def __init__(self, spark: SparkSession, every: float = 0.0) -> None:
        self._spark, self._every = spark, every
        self._started = self._said = time.monotonic()
        self.reports: list[BatchReport] = []
        self._queries: dict[str, Any] = {}

    def __call__(self, report: BatchReport) -> None:
        """Takes a report, in the thread of the batch."""
        self.reports.append(report)
        if not self._queries or report.log:
            # A planning anew brings another query; it begins with a change of rules.
            self._queries.update({str(query.runId): query for query in self._spark.streams.active})
        now = time.monotonic()
        if now - self._said < self._every:
            return
        self._said = now
        say(
            f"{now - self._started:6.1f} s  batch {report.batch_id:>3}: {report.events:>9,} events, "
            f"run {report.run_ms / 1e3:5.2f} s, of which shards {report.evaluate_ms / 1e3:5.2f} s, "
            f"write {report.write_ms / 1e3:4.2f} s, {sum(report.alerts.values()):,} alerts, "
            f"{report.state_rows:,} rows of state, {report.shards_in_memory} shards in memory"
        )

    def steps(self, reports: Iterable[BatchReport]) -> dict[str, int]:
        """Returns the median milliseconds of each step of these batches, by the query's durations and the reports."""
        progress = self._progress()
        steps: dict[str, list[float]] = {}
        for report in reports:
            parts = {"run": report.run_ms, "shards": report.evaluate_ms, "write": report.write_ms}
            for step, value in {**progress.get(report.batch_id, {}), **parts}.items():
                steps.setdefault(step, []).append(float(value))
        return {step: round(statistics.median(values)) for step, values in sorted(steps.items())}

    @staticmethod
    def in_memory(reports: Sequence[BatchReport]) -> float | None:
        """Returns how many shards of a batch found their state in the worker's memory, on average; the others read it."""
        return round(statistics.mean(report.shards_in_memory for report in reports), 2) if reports else None

    def _progress(self) -> dict[int, dict[str, float]]:
        found: dict[int, dict[str, float]] = {}
        for query in self._queries.values():
            for each in query.recentProgress:
                progress = each if isinstance(each, dict) else json.loads(each.json)
                found[progress["batchId"]] = dict(progress["durationMs"])
        return found


def say(text: str) -> None:
    """Progress, at once."""
    print(text, flush=True)  # noqa: T201

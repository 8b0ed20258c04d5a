"""Throughput: a prepared events table is drained through the streaming evaluation, Delta in, RocksDB, Delta out."""

from __future__ import annotations

import datetime as dt
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dev.bench.lakehouse import STREAMS, commits_for, linked, push, stream_of
from dev.bench.processes import MemorySampler
from dev.bench.producer import put_on_list
from dev.bench.results import percentiles, record
from dev.bench.rules import LIST, PEERS_RULES, Rules, rules_for
from dev.bench.sets import DATA, EventSet
from dev.bench.standalone import Standalone
from dev.bench.state import in_force, on_disk
from dev.bench.watching import PROGRESS, Watch, say

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from lookback.config import Settings
    from lookback.core.streams.declaration import Stream
    from lookback.spark.batches.sink import BatchReport
    from lookback.spark.tables.lakehouse import Tables

# The first two batches plan, compile and start workers; what comes after is the steady state.
_COLD_BATCHES = 2
_FEW_RULES = 10
_CHECKPOINT = "_checkpoints/bench"
_WORKER_MEMORY = "2g"
_RATE_PARTS = ("p10", "p50", "p90")


@dataclass(frozen=True)
class Drain:
    """One measurement.

    repeats: of the set in time; state: also read the pages in force; name: of the result; workers: of a Spark cluster, 0
    for one process that has all cores.
    """

    events: EventSet
    rules: str
    repeats: float
    settings: Settings
    name: str = ""
    state: bool = False
    workers: int = 0

    @property
    def result(self) -> str:
        """The name of its result."""
        return self.name or f"drain-{self.events.stem}-{self.rules}"


def run(drain: Drain) -> Path:
    """Measures in this process, which must not have run Spark before. Returns the file of the result."""
    if not drain.workers:
        return _run(drain, drain.settings.spark)
    with Standalone(DATA / "cluster", workers=drain.workers, cores=1, memory=_WORKER_MEMORY) as cluster:
        settings = {"spark.executor.memory": _WORKER_MEMORY, **drain.settings.spark, **cluster.settings}
        return _run(drain, settings)


def _run(drain: Drain, spark_settings: Mapping[str, str]) -> Path:
    from lookback.spark.platform.session import get_spark  # noqa: PLC0415
    from lookback.spark.stream.pipeline import Evaluation  # noqa: PLC0415 - Spark is started after the sets are made
    from lookback.spark.tables.lakehouse import Tables  # noqa: PLC0415

    events, stream = drain.events, stream_of(drain.events.name)
    commits = commits_for(events, drain.repeats)
    rules = rules_for(drain.rules, events)
    root = linked(events, commits, DATA / "runs" / drain.result)
    say(f"{drain.result}: {commits} commits, {len(rules.documents)} rules")
    before_spark = time.monotonic()
    spark = get_spark("lookback bench", settings={**PROGRESS, **spark_settings})
    spark_seconds = time.monotonic() - before_spark
    tables = Tables.local(spark, root)
    tables.create(stream)
    if rules.listed:
        put_on_list(root / "lists", LIST, range(1, 2 * rules.listed, 2))
    features = push(tables, rules)
    watch = Watch(spark)
    evaluation = Evaluation(
        tables, stream, STREAMS, root / _CHECKPOINT, once=True, admission=drain.settings.admission, on_batch=watch
    )
    started, clock = dt.datetime.now(dt.timezone.utc), time.monotonic()
    with MemorySampler() as memory:
        evaluation.run()
        seconds = time.monotonic() - clock
    figures = {
        **throughput(watch.reports, started, seconds),
        "spark_start_s": round(spark_seconds, 2),
        "features": features,
        "memory": memory.figures(),
        "state": _state(spark, root, stream, watch.reports, pages=drain.state),
        **_alerts(watch.reports),
        "late": sum(report.late for report in watch.reports),
        "failed": sum(report.failed for report in watch.reports),
        "replans": evaluation.replans,
        "step_ms": watch.steps(watch.reports[_COLD_BATCHES:]),
        "shards_in_memory": watch.in_memory(watch.reports[_COLD_BATCHES:]),
    }
    if drain.rules == PEERS_RULES:
        _write_alerts(tables, DATA / "alerts" / f"{drain.result}.csv")
    settings = {
        "set": events.stem,
        "rules": drain.rules,
        "rule_count": len(rules.documents),
        **({"when": conditions(rules)} if len(rules.documents) <= _FEW_RULES else {}),
        "commits": commits,
        "profile": drain.settings.profile,
        "admission": dict(drain.settings.admission),
        "spark": dict(drain.settings.spark),
        **({"workers": drain.workers} if drain.workers else {}),
        "shards": _shards(root),
    }
    spark.stop()
    shutil.rmtree(root)
    file = record(drain.result, "drain", settings, figures, batches=_batches(watch.reports, started))
    say(
        f"{drain.result}: steady {figures['steady_events_per_s']:,.0f} events/s over {figures['steady_batches']} batches, "
        f"cold total {figures['cold_events_per_s']:,.0f} events/s, {figures['alerts']:,} alerts, {seconds:.0f} s"
    )
    return file


def _shards(root: Path) -> int:
    from lookback.spark.checkpoints.checkpoint import Checkpoint  # noqa: PLC0415

    plan = Checkpoint(root / _CHECKPOINT).read_plan()
    return 0 if plan is None else plan.shards


def conditions(rules: Rules) -> dict[str, str]:
    """rule_id -> what raises its alerts; none for a sequence."""
    return {document["rule_id"]: document["when"] for document in rules.documents if "when" in document}


def throughput(reports: list[BatchReport], started: dt.datetime, seconds: float) -> dict[str, Any]:
    """Events per second: of all from start to end, and after the second batch; of single batches the spread."""
    events = sum(report.events for report in reports)
    ends = [(report.finished_at - started).total_seconds() for report in reports]
    steady = [
        (report.events, end - before)
        for report, end, before in zip(
            reports[_COLD_BATCHES:], ends[_COLD_BATCHES:], ends[_COLD_BATCHES - 1 :], strict=False
        )
    ]
    figures: dict[str, Any] = {
        "events": events,
        "seconds": round(seconds, 3),
        "cold_events_per_s": round(events / seconds, 1),
        "first_batch_s": round(ends[0], 2) if ends else None,
        "steady_batches": len(steady),
    }
    if not steady:
        return {**figures, "steady_events_per_s": 0.0, "steady_spread": None}
    rates = [count / span for count, span in steady]
    # The last batch may be a small rest: it counts in the rate over all and not in the spread of the single ones.
    full = rates[:-1] if len(rates) > 2 and steady[-1][0] < 0.5 * steady[0][0] else rates
    middle = statistics.median(full)
    low, _, high = percentiles(full, 25, 50, 75)
    return {
        **figures,
        "steady_events_per_s": round(sum(count for count, _ in steady) / sum(span for _, span in steady), 1),
        "steady_spread": round((high - low) / middle, 4),
        "batch_events_per_s": dict(
            zip(_RATE_PARTS, (round(each) for each in percentiles(full, 10, 50, 90)), strict=True)
        ),
        "batch_seconds_p50": round(statistics.median(span for _, span in steady), 3),
    }


def _batches(reports: list[BatchReport], started: dt.datetime) -> list[list[float]]:
    """Per batch: events, second at which it was finished, ms of run, of which shards, ms of write, rows of state."""
    return [
        [
            report.events,
            round((report.finished_at - started).total_seconds(), 3),
            round(report.run_ms),
            round(report.evaluate_ms),
            round(report.write_ms),
            report.state_rows,
        ]
        for report in reports
    ]


def _alerts(reports: list[BatchReport]) -> dict[str, Any]:
    """Counts the alerts, and those of the five rules with the most; no rule should have far more than others."""
    counts: Counter[str] = Counter()
    for report in reports:
        counts.update(report.alerts)
    return {"alerts": sum(counts.values()), "most_alerts": dict(counts.most_common(5))}


def _state(
    spark: SparkSession, root: Path, stream: Stream, reports: list[BatchReport], *, pages: bool
) -> dict[str, Any]:
    """Measures the size of the state. pages: also read the pages in force, which takes some seconds."""
    written, events = sum(r.state_bytes_written for r in reports), sum(r.events for r in reports)
    found: dict[str, Any] = {
        "most_rows": max((report.state_rows for report in reports), default=0),
        "written_bytes": written,
        "written_bytes_per_event": round(written / max(1, events), 2),
        **on_disk(root / _CHECKPOINT),
    }
    return {**found, **in_force(spark, root / _CHECKPOINT, stream)} if pages else found


def _write_alerts(tables: Tables, file: Path) -> None:
    """Writes raised alerts as lines rule_id,event_id,value, like the peers: sums in cents, counts as they are."""
    columns = ("rule_id", "event_id", "measures['value'] as value")
    alerts = tables.read("alerts").where("verdict = 'raised'").selectExpr(*columns).toArrow()
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = zip(*(alerts.column(name).to_pylist() for name in alerts.column_names), strict=True)
    with file.open("w", encoding="utf-8") as out:
        # An amount has two digits behind its point.
        out.writelines(f"{rule},{event},{value.replace('.', '')}\n" for rule, event, value in lines)

"""Latency: events and rule changes come while the evaluation runs; how long until the alert is committed.

Moments are the modification times of the commits' files in the Delta logs, of events, rules and alerts alike: when a
reader could first see the commit. The producer is a process of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq

from dev.bench.lakehouse import STREAMS, TRANSACTIONS, push
from dev.bench.producer import COMMITS_PER_SECOND, Producer, put_on_list
from dev.bench.results import percentiles, record
from dev.bench.rules import LIST, LISTED, ON_LIST, Document, Rules, lookback, rules_for
from dev.bench.sets import DATA, DAY, MINUTE, EventSet
from dev.bench.watching import PROGRESS, Watch, say

if TYPE_CHECKING:
    from lookback.config import Settings
    from lookback.spark.batches.sink import BatchReport
    from lookback.spark.stream.pipeline import Evaluation
    from lookback.spark.tables.lakehouse import Tables

ALERTS_PER_SECOND = 10
CHECKPOINT = "_checkpoints/bench"
TIMEOUT = 120.0
# A rule on a new key comes so long after the change before: what reads its history is ready again.
_REST_SECONDS = 5.0
# As many for rules that are warmed as for rules that start cold: a key is new once.
_NEW_KEYS = (
    ("customer_id", "terminal_id"),
    ("amount", "customer_id"),
    ("amount", "terminal_id"),
    ("amount",),
    ("amount", "customer_id", "terminal_id"),
)
_COLD_KEYS = (
    ("terminal_id",),
    ("customer_id", "event_id"),
    ("event_id", "terminal_id"),
    ("event_id",),
    ("customer_id", "event_id", "terminal_id"),
)


@dataclass(frozen=True)
class Live:
    """The settings of a run.

    rate: events a second. seconds: the measured time, after warm_up. name: that of the result. plain: run in a session that
    somebody else has started, with all of Spark's defaults. many: with 100 rules more, which alert seldom.
    """

    rate: int
    seconds: float
    warm_up: float
    settings: Settings
    name: str = ""
    plain: bool = False
    many: bool = False


@dataclass(frozen=True)
class Verdict:
    """Alerts of one events commit under one version of a rule, in one commit of the alerts table."""

    rule_id: str
    version: int
    arrival: int
    alerts: int
    committed: float


@dataclass(frozen=True)
class Running:
    """An evaluation under way. ready: seconds since 1970 at which the first commit was judged; warm-up begins there."""

    tables: Tables
    producer: Producer
    evaluation: Evaluation
    watch: Watch
    ready: float

    @property
    def root(self) -> Path:
        """The folder of the tables."""
        return Path(str(self.tables.root))

    def finish(self) -> None:
        """Lets no more events come, and waits until all are judged."""
        self.producer.stop()
        last = self.tables.version(TRANSACTIONS.name)
        self.evaluation.wait_until(lambda report: (report.arrival or 0) >= last, TIMEOUT)


def make_rules(events: EventSet, rate: int, *more: Document) -> Rules:
    """Makes two rules that together raise ALERTS_PER_SECOND at this rate of events."""
    limit = find_amount(events, ALERTS_PER_SECOND / 2 / rate)
    where = f"value >= 0 and amount >= {limit}"
    return Rules(
        (
            lookback("spend", ("customer_id",), "sum(amount)", DAY, where),
            lookback("burst", ("terminal_id",), "count(*)", 10 * MINUTE, where),
            *more,
        )
    )


def run(live: Live) -> Path:
    """Measures from the commit of events to the commit of their alerts. Returns the file of the result."""
    events = EventSet("zipf")
    rules = make_rules(events, live.rate, *(rules_for("100", events).documents if live.many else ()))
    name = live.name or f"latency-{live.rate}{'-plain' if live.plain else ''}{'-many' if live.many else ''}"
    with running(live, events, rules, name) as run_now:
        time.sleep(live.warm_up + live.seconds)
        run_now.finish()
    root, watch = run_now.root, run_now.watch
    committed = read_commit_times(root / TRANSACTIONS.name)
    first = run_now.ready + live.warm_up
    verdicts = [each for each in verdicts_of(root / "alerts") if committed[each.arrival] >= first]
    measured = [each for each in watch.reports if each.finished_at.timestamp() >= first]
    figures = {
        **latencies(verdicts, committed),
        **_producer(run_now.producer, live, committed, first),
        "batches": len(measured),
        "step_ms": watch.steps(measured),
        "shards_in_memory": watch.in_memory(measured),
    }
    shutil.rmtree(root)
    file = record(name, "latency", settings_of(live), figures)
    say(f"{name}: p50 {figures['p50_ms']} ms, p95 {figures['p95_ms']} ms, p99 {figures['p99_ms']} ms")
    return file


def run_changes(live: Live, known: int, new: int, lists: int) -> Path:
    """Measures from the commit of a rule change to the commit of the first alert under it. Returns the result's file.

    known: changes of a rule on a grouping key that others use; new: rules on grouping keys that none used, some seconds after
    one another, and so many more that start without history; lists: changes of a list of a million values, up to the commit
    of their row in rule_log.
    """
    events = EventSet("zipf")
    limit = find_amount(events, 20 / live.rate)
    changed = lookback("changed", ("customer_id",), "sum(amount)", DAY, f"value >= 0 and amount >= {limit}")
    name = live.name or "rule-changes"
    times: dict[str, list[tuple[str, int, float]]] = {"known": [], "new": [], "cold": []}
    with running(live, events, Rules((changed,)), name) as run_now:
        time.sleep(live.warm_up)
        change = _Changes(run_now)
        for number in range(known):
            document = {**changed, "when": f"value >= {-1 - number} and amount >= {limit}"}
            times["known"].append(change(document))
        for number, group_by in enumerate(_NEW_KEYS[:new]):
            time.sleep(_REST_SECONDS)
            document = {**changed, "rule_id": f"new-{number}", "group_by": list(group_by)}
            times["new"].append(change(document))
        for number, group_by in enumerate(_COLD_KEYS[:new]):
            document = {**changed, "rule_id": f"cold-{number}", "group_by": list(group_by), "warm_start": False}
            times["cold"].append(change(document))
        listed = [change.put_on_list(range(1, 2 * LISTED, 2))]
        change({**changed, "rule_id": "listed", "where": f"not {ON_LIST}"})
        listed += [change.put_on_list([2 * LISTED + number]) for number in range(lists)]
    first = first_verdicts(verdicts_of(run_now.root / "alerts"))
    seconds = {
        kind: [round(first[rule_id, version] - at, 3) for rule_id, version, at in changes]
        for kind, changes in times.items()
    }
    logged = read_logged(run_now.root / "rule_log")
    million, *seconds_of_lists = [round(logged["*", commit, "list"] - at, 3) for commit, at in listed]
    figures: dict[str, Any] = {"replans": run_now.evaluation.replans, "list_of_a_million_s": million}
    for what, found in ({f"{kind}_key": each for kind, each in seconds.items()} | {"list": seconds_of_lists}).items():
        p50, worst = percentiles(found, 50, 100)
        figures |= {f"{what}_p50_s": p50, f"{what}_max_s": worst, f"{what}_s": found}
    shutil.rmtree(run_now.root)
    file = record(name, "changes", {**settings_of(live), "known": known, "new": new, "lists": lists}, figures)
    say(
        f"{name}: known key p50 {figures['known_key_p50_s']} s, new key p50 {figures['new_key_p50_s']} s, cold "
        f"{figures['cold_key_p50_s']} s, list p50 {figures['list_p50_s']} s"
    )
    return file


def read_commit_times(table: Path) -> dict[int, float]:
    """Version of a Delta table -> seconds since 1970 at which its commit could be seen; that which made it left out."""
    files = (table / "_delta_log").glob("*.json")
    return {int(file.stem): file.stat().st_mtime for file in files if file.stem.isdigit() and int(file.stem) > 0}


def verdicts_of(alerts: Path) -> list[Verdict]:
    """Every commit of the alerts table, by rule, version and events commit."""
    found = []
    for committed, rows in _read_appended(alerts, ["rule_id", "rule_version", "arrival"]):
        counts = Counter((row["rule_id"], row["rule_version"], row["arrival"]) for row in rows)
        found += [Verdict(*key, count, committed) for key, count in counts.items()]
    return found


def _read_appended(table: Path, columns: list[str]) -> Iterator[tuple[float, list[dict[str, Any]]]]:
    """Yields the time of each commit of a table, in order, and the rows that it added."""
    for version, committed in sorted(read_commit_times(table).items()):
        lines = (table / f"_delta_log/{version:020d}.json").read_text(encoding="utf-8").splitlines()
        added = [action["add"]["path"] for line in lines if (action := json.loads(line)).get("add")]
        yield committed, [row for path in added for row in pq.read_table(table / path, columns=columns).to_pylist()]


def read_logged(rule_log: Path) -> dict[tuple[str, int, str], float]:
    """(rule, version, action) -> when its last row was committed; of a list `*`, its commit and `list`."""
    logged: dict[tuple[str, int, str], float] = {}
    for committed, rows in _read_appended(rule_log, ["rule_id", "version", "action"]):
        logged |= {(row["rule_id"], row["version"], row["action"]): committed for row in rows}
    return logged


def first_verdicts(verdicts: Sequence[Verdict]) -> dict[tuple[str, int], float]:
    """(rule, version) -> when its first alert was committed."""
    first: dict[tuple[str, int], float] = {}
    for each in verdicts:
        key = (each.rule_id, each.version)
        first[key] = min(each.committed, first.get(key, each.committed))
    return first


class _Changes:
    """Publishes a rule and waits until it has alerted; then a moment more, so that changes come at any moment."""

    def __init__(self, running: Running) -> None:
        from lookback.spark.rules import RulesTable  # noqa: PLC0415 - after Spark

        self._running = running
        self._rules = RulesTable(running.tables, STREAMS)
        self._pauses = np.random.default_rng(1)

    def __call__(self, document: Document) -> tuple[str, int, float]:
        """Returns the rule's id, its version and the time of its commit."""
        rule_id = document["rule_id"]
        version = self._rules.push(document, author="bench")
        committed = max(read_commit_times(self._running.root / "rules").values())
        taken_up = self._wait(lambda report: _logs(report, rule_id, version, "activated")).batch_id
        self._wait(lambda report: report.batch_id >= taken_up and report.alerts.get(rule_id, 0) > 0)
        say(f"  {rule_id} v{version}: alerts under it about {time.time() - committed:.2f} s after its commit")
        self._pause()
        return rule_id, version, committed

    def put_on_list(self, values: Sequence[int]) -> tuple[int, float]:
        """Returns the commit of the table `lists` and its time, once the stream obeys it."""
        lists = self._running.root / "lists"
        commit = put_on_list(lists, LIST, values)
        self._wait(lambda report: _logs(report, "*", commit, "list"))
        self._pause()
        return commit, read_commit_times(lists)[commit]

    def _pause(self) -> None:
        time.sleep(float(self._pauses.uniform(0.2, 0.7)))

    def _wait(self, condition: Callable[[BatchReport], bool]) -> BatchReport:
        return self._running.evaluation.wait_until(condition, TIMEOUT)


def _logs(report: BatchReport, *wanted: object) -> bool:
    return any((row["rule_id"], row["version"], row["action"]) == wanted for row in report.log)


@contextmanager
def running(live: Live, events: EventSet, rules: Rules, name: str, after: int = 0) -> Iterator[Running]:
    """Fresh tables with these rules, a producer and a running evaluation that has judged its first commit.

    after: the tables are there, so many commits of the set in them, which the evaluation has judged.
    """
    from lookback.spark.platform.session import get_spark  # noqa: PLC0415
    from lookback.spark.replay.histories import make_history  # noqa: PLC0415
    from lookback.spark.stream.pipeline import Evaluation  # noqa: PLC0415 - Spark is started after the sets are made
    from lookback.spark.tables.lakehouse import Tables  # noqa: PLC0415

    root = DATA / "runs" / name
    if root.exists() and not after:
        shutil.rmtree(root)
    if live.plain:
        _start_plain_session()
    spark = get_spark("lookback bench", settings={**PROGRESS, **live.settings.spark})
    tables = Tables.local(spark, root)
    if not after:
        tables.create(TRANSACTIONS)
        push(tables, rules)
    watch = Watch(spark, every=5.0)
    evaluation = Evaluation(
        tables, TRANSACTIONS, STREAMS, root / CHECKPOINT, every=live.settings.every, admission=live.settings.admission,
        on_batch=watch, historian=make_history,
    )  # fmt: skip
    producer = Producer(root / TRANSACTIONS.name, events, live.rate, after)
    say(f"{name}: {live.rate:,} events/s in {COMMITS_PER_SECOND} commits a second")
    evaluation.start()
    producer.start()
    try:
        evaluation.wait_until(lambda report: report.events > 0, TIMEOUT)
        yield Running(tables, producer, evaluation, watch, time.time())
        producer.stop()
    finally:
        with suppress(Exception):
            producer.stop()
        evaluation.stop()
        spark.stop()


def _start_plain_session() -> None:
    """Starts Spark as its documentation says, with the two settings that Delta asks for and its JARs."""
    from pyspark.sql import SparkSession  # noqa: PLC0415

    from lookback.spark.platform.jars import fetch_session_jars  # noqa: PLC0415

    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.appName("plain").config("spark.jars", ",".join(map(str, fetch_session_jars())))
    builder = builder.config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
    builder = builder.config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
    builder.getOrCreate().sparkContext.setLogLevel("ERROR")


def latencies(verdicts: Sequence[Verdict], committed: Mapping[int, float]) -> dict[str, Any]:
    """Returns the shares of milliseconds, one for each alert."""
    milliseconds = [1e3 * (each.committed - committed[each.arrival]) for each in verdicts for _ in range(each.alerts)]
    p50, p95, p99, worst = percentiles(milliseconds, 50, 95, 99, 100)
    shares = percentiles(milliseconds, *range(1, 101))
    return {
        "p50_ms": round(p50),
        "p95_ms": round(p95),
        "p99_ms": round(p99),
        "max_ms": round(worst),
        "alerts": len(milliseconds),
        "percentiles_ms": [round(each) for each in shares],
    }


def _producer(producer: Producer, live: Live, committed: Mapping[int, float], first: float) -> dict[str, Any]:
    """Returns figures that show whether the events came as fast as they should."""
    times = [at for at in committed.values() if at >= first]
    rows = live.rate // COMMITS_PER_SECOND
    seconds = max(times) - min(times)
    p50, p99 = percentiles(producer.append_seconds, 50, 99)
    return {
        "events_per_s": round((len(times) - 1) * rows / seconds, 1),
        "append_p50_ms": round(1e3 * p50),
        "append_p99_ms": round(1e3 * p99),
        "commits": len(times),
        "commit_gap_p50_ms": round(1e3 * statistics.median(np.diff(sorted(times)).tolist())),
    }


def find_amount(events: EventSet, share: float) -> str:
    """Returns the amount that such a share of the events reaches, as text."""
    cents = int(np.quantile(events.columns["amount_cents"], 1 - share))
    return f"{cents // 100}.{cents % 100:02d}"


def settings_of(live: Live) -> dict[str, Any]:
    """Returns the settings of a run for its result."""
    return {
        "rate": live.rate,
        "seconds": live.seconds,
        "warm_up": live.warm_up,
        "plain": live.plain,
        "many": live.many,
        "profile": live.settings.profile,
        "every": live.settings.every,
        "admission": dict(live.settings.admission),
        "spark": dict(live.settings.spark),
    }

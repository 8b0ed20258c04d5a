"""Simulates what a large installation costs beside its events: many shards, many rules, a long log of commits.

Times are processor times of the processes that work, as others may use the machine too; with them stand bytes. Each part is
measured at several sizes, so that a cost that grows faster than its size shows. docs/sizing.md takes its formulas from here.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import shutil
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa

from dev.bench import shapes
from dev.bench.lakehouse import TRANSACTIONS, rows_of
from dev.bench.processes import ProcessorClock
from dev.bench.producer import append
from dev.bench.results import record
from dev.bench.sets import DATA
from dev.bench.shapes import STREAM
from dev.bench.watching import say
from lookback.core.engine.evaluation import Evaluator
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.compilecache import _open_compiler
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.coverage import find_coverage
from lookback.core.rules.rulebook import RuleBook
from lookback.core.state.shard import ShardState, encode_text
from lookback.core.streams.declarations import Declarations

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from lookback.spark.tables.lakehouse import Tables

SHARDS, RULES, COMMITS = (16, 64, 256), (2_500, 5_000, 10_000), (1_000, 4_000, 16_000)
# Sizes of a quick run, and parts that --parts chooses from.
QUICK = {"shards": (4, 8), "rules": (50, 100), "log": (100, 200)}
# Commits since the last checkpoint of the log, and batches that are measured.
_TAIL, _BATCHES = 50, 2
_ROOT = DATA / "scale"


def run(parts: Sequence[str], *, quick: bool) -> int:
    """Measures the chosen parts, prints and records each. Returns 0."""
    for part in parts:
        figures = PARTS[part](QUICK[part] if quick else SIZES[part])
        record(f"scale-{part}", "scale", {"part": part, "sizes": list(figures)}, figures)
    return 0


# Many shards in one batch ----------------------------------------------------------------------------------------------


class _Pages:
    """The pages of one shard, as a state store has them."""

    def __init__(self) -> None:
        self._pages: dict[str, bytes] = {}

    def getValue(self, name: tuple[str]) -> tuple[bytes] | None:  # noqa: N802 - Spark's names
        """Returns a page."""
        page = self._pages.get(name[0])
        return None if page is None else (page,)

    def updateValue(self, name: tuple[str], page: tuple[bytes]) -> None:  # noqa: N802
        """Keeps a page."""
        self._pages[name[0]] = page[0]

    def removeKey(self, name: tuple[str]) -> None:  # noqa: N802
        """Removes a page."""
        del self._pages[name[0]]

    def count_bytes(self, name: str = "") -> int:
        """Counts the bytes of one page, or of all."""
        return sum(len(page) for known, page in self._pages.items() if name in ("", known))


def measure_shards(sizes: Sequence[int]) -> dict[str, Any]:
    """Sends one batch by 100 rules through so many shards: a small one, and one of 100,000 events."""
    return {
        str(size): {
            **{str(rows): _measure_shards(size, rows) for rows in (1_000, 100_000)},
            "reports_of_10000_rules": _measure_reports(size, 10_000),
        }
        for size in sizes
    }


def _measure_shards(shards: int, rows: int) -> dict[str, Any]:
    from lookback.spark.batches import shard as shard_module  # noqa: PLC0415 - imports pyspark
    from lookback.spark.batches.dispatch import Dispatch  # noqa: PLC0415

    rules = [json.loads(document) for document in _make_documents(100)]
    changes = [
        {"change": "insert", "commit": 1, "rule_id": rule["rule_id"], "version": 1, "status": "active",
         "document": json.dumps(rule)}
        for rule in rules
    ]  # fmt: skip
    coverage = find_coverage(compile_rule(rule, STREAM) for rule in rules)
    labels = [f"s{at}" for at in range(shards)]
    plan: Any = SimpleNamespace(read_plan=lambda: SimpleNamespace(coverage=coverage))
    dispatch = Dispatch(Declarations.of(STREAM), coverage, tuple(labels), plan)
    stores = {label: _Pages() for label in labels}
    # On a cluster a worker has few shards; here one process has all of them.
    shard_module._MAX_IN_MEMORY = 2 * shards
    spent: dict[str, list[float]] = {"dispatch": [], "judge": [], "gather": []}
    sizes: dict[str, int] = {}
    for batch in range(3):
        start = time.process_time()
        blocks = list(dispatch([_make_batch(rows, batch)]))
        spent["dispatch"].append(time.process_time() - start)
        payloads: dict[str, list[tuple[str, bytes]]] = {label: [] for label in labels}
        for block in blocks:
            for label, kind, payload in zip(*(block.column(at).to_pylist() for at in range(3)), strict=True):
                payloads[label].append((kind, payload))
        sizes["shuffled"] = sum(len(payload) for each in payloads.values() for _, payload in each)
        if not batch:
            for each in payloads.values():
                each += [("rule", json.dumps(change).encode()) for change in changes]
        answers: list[Any] = []
        start = time.process_time()
        for label in labels:
            frame = pd.DataFrame(payloads[label], columns=["kind", "payload"])
            pages: Any = stores[label]
            shard = shard_module.Shard(
                Declarations.of(STREAM),
                {STREAM.name: STREAM},
                labels,
                Path(f"scale-{shards}-{rows}"),
                label,
                pages,
            )
            answers.append(pa.Table.from_pandas(shard.judge([frame]), preserve_index=False))
        spent["judge"].append(time.process_time() - start)
        table = pa.concat_tables(answers)
        sizes["answers"] = sum(map(len, table.column("payload").to_pylist()))
        sizes["written"] = sum(
            json.loads(payload)["bytes_written"]
            for kind, payload in zip(table["kind"].to_pylist(), table["payload"].to_pylist(), strict=True)
            if kind == "report"
        )
        start = time.process_time()
        _gather(table)
        spent["gather"].append(time.process_time() - start)
    figures = {
        **{f"{step}_ms": round(1_000 * min(seconds[1:]), 1) for step, seconds in spent.items()},
        **{f"{name}_bytes": size for name, size in sizes.items()},
        "manifest_bytes": sum(store.count_bytes("manifest") for store in stores.values()),
        "rules_bytes": sum(store.count_bytes("rules") for store in stores.values()),
    }
    say(f"{shards} shards, {rows:,} events, 100 rules: {figures}")
    return figures


def _measure_reports(shards: int, rules: int) -> dict[str, Any]:
    """Gathers the reports of shards in each of which so many rules judged an event."""
    report = {
        "shard": "s0", "events": 1, "watermark": 0, "arrival": 1, "state_rows": 1, "remembered": 0, "features": 8,
        "rules": rules, "bytes_read": 0, "bytes_written": 0, "in_memory": True, "milliseconds": 1.0,
        "evaluated": {f"rule-{at:05d}": 100 for at in range(rules)},
    }  # fmt: skip
    payload = json.dumps(report).encode()
    answers = pa.table({"kind": ["report"] * shards, "payload": [payload] * shards})
    start = time.process_time()
    _gather(answers)
    figures = {"gather_ms": round(1_000 * (time.process_time() - start), 1), "answers_bytes": shards * len(payload)}
    say(f"reports of {shards} shards with {rules:,} rules: {figures}")
    return figures


def _gather(answers: pa.Table) -> None:
    """Does what the driver does with the answers of a batch, but for writing the tables."""
    from lookback.spark.batches import sink  # noqa: PLC0415

    now = dt.datetime.now(dt.timezone.utc)
    alerts, late = sink._merge_alerts(answers, now), sink._merge_late(answers, STREAM)
    failures = sink._merge_failures(answers)
    log = sink._make_log(answers, failures, STREAM.name, 1)
    sink._make_report(answers, 1, alerts, late, log, failures, 0.0, now, 0.0)


def _make_batch(rows: int, batch: int) -> pa.RecordBatch:
    from lookback.spark.batches.dispatch import INSERTED  # noqa: PLC0415

    random = np.random.default_rng(batch)
    first = batch * rows
    cents = pa.array(random.integers(100, 10_000, rows)).cast(pa.decimal128(20, 0)).cast(pa.decimal128(18, 2))
    columns = {
        "id": pa.array(np.arange(first, first + rows)),
        "at": pa.array((first + np.arange(rows)) * 60_000_000 // rows, pa.timestamp("us", tz="UTC")),
        "position": pa.array(np.arange(rows)),
        "k": pa.array(random.integers(0, 100_000, rows)),
        "n": pa.array(random.integers(0, 10_000, rows).astype(np.int32)),
        "amount": cents,
        "_kind": pa.array(np.full(rows, INSERTED, np.int8)),
        "_commit_version": pa.array(np.full(rows, batch + 1)),
        "_committed": pa.nulls(rows, pa.timestamp("us", tz="UTC")),
    }
    return pa.RecordBatch.from_pydict(columns)


# Many rules ------------------------------------------------------------------------------------------------------------


def _make_documents(rules: int) -> list[str]:
    """Makes rules over 2 grouping sets, 8 features and 5 windows, which differ in their limits and texts."""
    windows = ("10 minutes", "1 hour", "1 day", "2 days", "7 days")
    aggregates = ("sum(amount)", "count(*)", "max(amount)", "avg(amount)")
    random = np.random.default_rng(1)
    return [
        json.dumps(
            {
                "rule_id": f"rule-{at:05d}",
                "stream": STREAM.name,
                "group_by": ["k" if at % 2 else "n"],
                "description": f"Rule {at}: {random.bytes(60).hex()}",
                "window": windows[at // 8 % 5],
                "measures": {"m": aggregates[at // 2 % 4]},
                "when": f"m > {10**9 + at}",
                "message": "{m} is more than usual",
            }
        )
        for at in range(rules)
    ]


def measure_rules(sizes: Sequence[int]) -> dict[str, Any]:
    """Loads so many rules into one shard, judges small batches and changes a rule."""
    return {str(size): _measure_rules(size) for size in sizes}


def _measure_rules(rules: int) -> dict[str, Any]:
    _open_compiler.cache_clear()
    stream = replace(STREAM, limits=replace(STREAM.limits, rules=max(rules, STREAM.limits.rules)))
    documents = _make_documents(rules)
    changes = [
        RuleChange("insert", 1, f"rule-{at:05d}", 1, "active", document) for at, document in enumerate(documents)
    ]
    book, again = RuleBook(stream, {stream.name: stream}), RuleBook(stream, {stream.name: stream})
    seconds: dict[str, float] = {}

    def measure(what: str, act: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = act()
        seconds[what] = round(time.process_time() - start, 4)
        return result

    tracemalloc.start()
    book.apply(changes, None)
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    _open_compiler.cache_clear()
    measure("first_load", lambda: RuleBook(stream, {stream.name: stream}).apply(changes, None))
    text = measure("write_page", book.to_json)
    measure("read_page", lambda: again.load(text))
    in_force = measure("in_force", again.in_force)
    coverage = measure("coverage", lambda: find_coverage(rule for _, rule in in_force))
    change = replace(changes[7], version=2, commit=2, document=documents[7].replace("10000", "20000"))
    measure("one_change", lambda: book.apply([change], 1))
    state, evaluator, store = ShardState(book), Evaluator(stream), shapes.Shard()
    store.adopt(state, evaluator)
    times, keys = np.arange(100) * 1_000, np.arange(100)
    spent = [store.judge(times + batch * 1_000_000, keys) for batch in range(3)]
    figures = {
        **{f"{what}_ms": round(1_000 * value, 1) for what, value in seconds.items()},
        "batch_of_100_ms": round(1_000 * min(spent[1:]), 1),
        "memory_bytes": memory, "text_bytes": len(text), "page_bytes": len(encode_text(text)),
        "dispatched_bytes": len(json.dumps(coverage.to_dict())),
    }  # fmt: skip
    say(f"{rules:,} rules: {figures}")
    return figures


# A log of many commits -----------------------------------------------------------------------------------------------


def measure_logs(sizes: Sequence[int]) -> dict[str, Any]:
    """Measures what a log of so many commits costs to start on, to follow and to search."""
    from lookback.spark.platform.session import get_spark  # noqa: PLC0415 - Spark is imported when it is needed

    spark = get_spark("lookback scale")
    try:
        return {str(size): _measure_log(spark, size) for size in sizes}
    finally:
        spark.stop()
        shutil.rmtree(_ROOT, ignore_errors=True)


def _measure_log(spark: SparkSession, commits: int) -> dict[str, Any]:
    from lookback.spark.batches.sink import is_written  # noqa: PLC0415
    from lookback.spark.stream.metrics import read_backlog  # noqa: PLC0415
    from lookback.spark.tables.history import find_first_readable  # noqa: PLC0415
    from lookback.spark.tables.lakehouse import Tables  # noqa: PLC0415

    shutil.rmtree(_ROOT, ignore_errors=True)
    tables, name = Tables.local(spark, _ROOT / f"log-{commits}"), TRANSACTIONS.name
    tables.create(TRANSACTIONS)
    folder = Path(tables.path_or_name(name))
    _lengthen_log(folder, commits - _TAIL)
    _checkpoint_log(spark, folder)
    _lengthen_log(folder, _TAIL)
    log = folder / "_delta_log"
    figures: dict[str, Any] = {
        "commit_bytes": round(
            sum(file.stat().st_size for file in log.glob("*[05]0.json")) / len(list(log.glob("*[05]0.json")))
        ),
        "checksum_bytes": round(
            sum(file.stat().st_size for file in log.glob("*[05]0.crc")) / len(list(log.glob("*[05]0.crc")))
        ),
        "checkpoint_bytes": sum(file.stat().st_size for file in log.glob("*.checkpoint*.parquet")),
    }
    figures["follow"] = _follow(tables, name, commits)
    mark = "00000000-0000-0000-0000-000000000000"
    measured: dict[str, Callable[[], object]] = {
        "version": lambda: tables.version(name),
        "mark_of_the_last_batch": lambda: is_written(tables, name, f"bench:{commits}"),
        "mark_of_a_query_without_commits": lambda: is_written(tables, name, f"{mark}:1"),
        "backlog_of_one_commit": lambda: read_backlog(tables, name, tables.version(name) - 1),
        "backlog_of_all": lambda: read_backlog(tables, name, None),
        "first_readable": lambda: find_first_readable(tables, name),
    }
    for what, act in measured.items():
        with _timed(figures, what):
            act()
        say(f"{commits:,} commits: {what} {figures[what]}")
    return figures


@contextmanager
def _timed(figures: dict[str, Any], what: str) -> Iterator[None]:
    started = time.perf_counter()
    with ProcessorClock() as clock:
        before = clock.read()
        yield
        used = clock.read() - before
    figures[what] = {"cpu_s": round(used, 2), "wall_s": round(time.perf_counter() - started, 2)}


def _lengthen_log(folder: Path, commits: int) -> None:
    """Appends commits of one small file each; all files are links to one, so that the log is all there is to read."""
    log = folder / "_delta_log"
    first = 1 + max(int(file.stem) for file in log.glob("[0-9]*.json"))
    if first == 1:
        append(folder, first, _make_rows())
        first, commits = 2, commits - 1
    file = next(folder.glob("*.parquet"))
    lines = (log / f"{first - 1:020d}.json").read_text(encoding="utf-8").splitlines()
    info, added = (json.loads(line) for line in lines)
    checksum = json.loads((log / f"{first - 1:020d}.crc").read_text(encoding="utf-8"))
    size = added["add"]["size"]
    for version in range(first, first + commits):
        now = checksum["inCommitTimestampOpt"] + 1
        commit = {**info["commitInfo"], "inCommitTimestamp": now, "timestamp": now, "userMetadata": f"bench:{version}"}
        part = {**added["add"], "path": f"part-{version:08d}.parquet", "modificationTime": now}
        os.link(file, folder / part["path"])
        text = "\n".join(json.dumps(each) for each in ({"commitInfo": commit}, {"add": part}))
        (log / f"{version:020d}.json").write_text(text + "\n", encoding="utf-8")
        # History takes the times of commits from their files where it reads no further.
        os.utime(log / f"{version:020d}.json", ns=(now * 1_000_000,) * 2)
        checksum |= {
            "tableSizeBytes": checksum["tableSizeBytes"] + size, "numFiles": checksum["numFiles"] + 1,
            "inCommitTimestampOpt": now,
        }  # fmt: skip
        (log / f"{version:020d}.crc").write_text(json.dumps(checksum), encoding="utf-8")


def _make_rows() -> pa.Table:
    rows = 10
    times = time.time_ns() // 1_000 - np.arange(rows)
    return rows_of(
        {"event_id": np.arange(rows), "event_time": times, "customer_id": np.arange(rows, dtype=np.int32),
         "terminal_id": np.arange(rows, dtype=np.int32), "amount_cents": np.arange(rows)}
    )  # fmt: skip


def _checkpoint_log(spark: SparkSession, folder: Path) -> None:
    """Lets Delta write its checkpoint of the log, as it does by itself after so many commits."""
    jvm: Any = spark._jvm
    log = jvm.org.apache.spark.sql.delta.DeltaLog.forTable(spark._jsparkSession, str(folder))
    none = jvm.scala.Option.empty()
    log.checkpoint(log.update(False, none, none), none)
    jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()


def _follow(tables: Tables, name: str, commits: int) -> dict[str, Any]:
    """Starts a stream of changes at the end of the log, and lets it take commits one at a time."""
    figures: dict[str, Any] = {}
    folder = Path(tables.path_or_name(name))
    options = {"maxFilesPerTrigger": "1"}
    frame = tables.stream_changes(name, commits, options)
    writer = frame.writeStream.foreachBatch(lambda rows, _: rows.write.format("noop").mode("append").save())
    writer = writer.option("checkpointLocation", str(_ROOT / f"checkpoint-{commits}"))
    with _timed(figures, "start"):
        query = writer.trigger(processingTime="0 seconds").start()
        query.processAllAvailable()
    try:
        with _timed(figures, "batch"):
            for _ in range(_BATCHES):
                _lengthen_log(folder, 1)
                query.processAllAvailable()
        recent: list[Any] = list(query.recentProgress)
        progress = [each if isinstance(each, dict) else json.loads(each.json) for each in recent]
        durations = [each["durationMs"] for each in progress if each["numInputRows"]]
        figures["batch"] = {what: round(value / _BATCHES, 3) for what, value in figures["batch"].items()}
        figures["steps_ms"] = {
            step: round(float(np.median([each.get(step, 0) for each in durations[-_BATCHES:]])))
            for step in ("latestOffset", "getBatch", "queryPlanning", "addBatch", "triggerExecution")
        }
    finally:
        query.stop()
    say(f"{commits:,} commits: follow {figures}")
    return figures


PARTS: dict[str, Callable[[Sequence[int]], dict[str, Any]]] = {
    "shards": measure_shards, "rules": measure_rules, "log": measure_logs,
}  # fmt: skip
SIZES = {"shards": SHARDS, "rules": RULES, "log": COMMITS}

"""Latency and requests in a bucket: events come while the evaluation runs, and each request takes some milliseconds more.

The S3 server is that of the tests, on this machine. It takes its own time, which a real store does not take of one's cores.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dev.bench.lakehouse import STREAMS, TRANSACTIONS, push
from dev.bench.latency import CHECKPOINT, TIMEOUT, Live, Verdict, latencies, make_rules, settings_of
from dev.bench.processes import ProcessorClock
from dev.bench.producer import Producer
from dev.bench.results import record
from dev.bench.sets import REPOSITORY, EventSet
from dev.bench.watching import say
from lookback.places import ObjectPath, parse_place

sys.path.insert(0, str(REPOSITORY / "tests" / "support"))

from objectstore import S3Server  # type: ignore[import-not-found]

_BUCKET = "bucket"
# After a change of the delay, these seconds are not measured.
_SETTLING_SECONDS = 10.0


def run(live: Live, delays: Sequence[int]) -> Path:
    """Measures with each of the delays, in milliseconds per request, in turn. Returns the file of the result."""
    from lookback.spark.platform.session import get_spark  # noqa: PLC0415
    from lookback.spark.replay.histories import make_history  # noqa: PLC0415
    from lookback.spark.stream.pipeline import Evaluation  # noqa: PLC0415
    from lookback.spark.tables.lakehouse import Tables  # noqa: PLC0415

    events = EventSet("zipf")
    rules = make_rules(events, live.rate)
    name = live.name or f"bucket-{live.rate}"
    with tempfile.TemporaryDirectory() as folder:
        server = S3Server(Path(folder))
        try:
            server.make_bucket(_BUCKET)
            spark = get_spark("lookback bench", settings={**server.settings, **live.settings.spark})
            root = _open(server, name)
            tables = Tables.local(spark, str(root))
            tables.create(TRANSACTIONS)
            push(tables, rules)
            evaluation = Evaluation(
                tables, TRANSACTIONS, STREAMS, root / CHECKPOINT, every=live.settings.every,
                admission=live.settings.admission, historian=make_history,
            )  # fmt: skip
            producer = Producer(root / TRANSACTIONS.name, events, live.rate)
            evaluation.start()
            producer.start()
            evaluation.wait_until(lambda report: report.events > 0, TIMEOUT)
            time.sleep(live.warm_up)
            with ProcessorClock(excluded=(server.process_id, producer.process_id)) as clock:
                phases = [_measure(server, clock, delay, live.seconds) for delay in delays]
            server.set_weather()
            producer.stop()
            last = tables.version(TRANSACTIONS.name)
            evaluation.wait_until(lambda report: (report.arrival or 0) >= last, TIMEOUT)
            evaluation.stop()
            committed = server.read_commit_times(f"{_BUCKET}/{name}/{TRANSACTIONS.name}")
            verdicts = _read_verdicts(root / "alerts", server.read_commit_times(f"{_BUCKET}/{name}/alerts"))
            figures = {f"{phase['delay_ms']} ms": _describe(phase, committed, verdicts, live.rate) for phase in phases}
            spark.stop()
        finally:
            server.stop()
    file = record(name, "bucket", settings_of(live), figures)
    for delay, each in figures.items():
        latency = f"p50 {each['p50_ms']} ms, p99 {each['p99_ms']} ms"
        say(f"{name}, {delay} a request: {latency}, {each['batches']} batches of {each['requests']} requests")
    return file


def _open(server: S3Server, name: str) -> ObjectPath:
    place = parse_place(f"s3a://{_BUCKET}/{name}")
    assert isinstance(place, ObjectPath)
    settings = ((key.removeprefix("spark.hadoop."), value) for key, value in server.settings.items())
    return replace(place, settings=tuple(settings))


def _measure(server: S3Server, clock: ProcessorClock, delay: int, seconds: float) -> dict[str, Any]:
    """Lets some time pass with a delay. Returns when it was, and what was asked of the store meanwhile."""
    server.set_weather(delay / 1_000)
    time.sleep(_SETTLING_SECONDS)
    first, processor = time.time(), clock.read()
    with server.count_requests():
        time.sleep(seconds)
        counts = server.read_counts()
    say(f"  {delay} ms a request: {len(counts['batches'])} batches")
    spent = clock.read() - processor
    return {"delay_ms": delay, "first": first, "last": time.time(), "processor_s": spent, **counts}


def _read_verdicts(alerts: ObjectPath, times: Mapping[int, float]) -> list[Verdict]:
    found = []
    for version, at in sorted(times.items()):
        lines = (alerts / "_delta_log" / f"{version:020d}.json").read_text().splitlines()
        for path in [action["add"]["path"] for line in lines if (action := json.loads(line)).get("add")]:
            rows = pq.read_table(
                pa.BufferReader((alerts / path).read_bytes()), columns=["rule_id", "arrival"]
            ).to_pylist()
            counts = Counter((row["rule_id"], row["arrival"]) for row in rows)
            found += [Verdict(rule_id, 1, arrival, count, at) for (rule_id, arrival), count in counts.items()]
    return found


def _describe(
    phase: Mapping[str, Any], committed: Mapping[int, float], verdicts: Sequence[Verdict], rate: int
) -> dict[str, Any]:
    """Returns the figures of the time with one delay; the producer's own requests are left out."""
    own = ("log of transactions", "data of transactions")
    by_kind: Counter[str] = Counter()
    for each in phase["batches"]:
        by_kind.update(
            {kind: count for kind, count in each.items() if not (kind.startswith("put") and kind.endswith(own))}
        )
    batches = len(phase["batches"])
    measured = [each for each in verdicts if phase["first"] <= committed[each.arrival] < phase["last"]]
    commits = sum(phase["first"] <= at < phase["last"] for at in committed.values())
    seconds = phase["last"] - phase["first"]
    return {
        **latencies(measured, committed),
        "events_per_s": round(commits * (rate // 2) / seconds),
        "batches": batches,
        "requests": round(sum(by_kind.values()) / max(1, batches), 1),
        "requests_by_kind": {kind: round(count / max(1, batches), 2) for kind, count in sorted(by_kind.items())},
        "processor_s_per_s": round(phase["processor_s"] / seconds, 3),
        "bytes_written_per_s": {kind: round(count / seconds) for kind, count in sorted(phase["bytes"].items())},
    }

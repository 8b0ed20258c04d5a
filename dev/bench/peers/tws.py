"""transformWithState the way most people write it: a state key per rule and key, its events in a ListState.

One query over all rules: each event is exploded into a row per rule and grouped by (rule, key). Queries of their own
would read and shuffle the events once per rule, and on a machine of few cores they would wait for each other's tasks.
The events come from Parquet files of a commit each, one file a micro-batch; the alerts go to a Delta table. With the
checkpoint and RocksDB that is durable with or without `--durable`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from bisect import bisect_left, bisect_right
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import parquet
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle, TimerValues

from dev.bench.peers import GRACE_US
from dev.bench.sets import RECORD
from lookback.spark.platform.session import get_spark

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from pyspark.sql import Column, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_COMMIT = 100_000
_EVENTS = "arrival long, event_id long, event_time long, customer_id int, terminal_id int, amount_cents int"
_POLL_SECONDS = 0.1


class PerKey(StatefulProcessor):
    """Judges the events of one key of one rule; times in microseconds, weights in cents or counts.

    rules: those of the JSON file, by id.
    """

    def __init__(self, rules: dict[str, dict[str, Any]]) -> None:
        self._rules = rules

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Opens the list of events. Called by Spark before the first rows."""
        self._events = handle.getListState("events", "event_time long, weight long")

    def handleInputRows(  # type: ignore[override]  # noqa: N802 - Spark's name
        self,
        key: Any,
        rows: Iterator[pd.DataFrame],
        timerValues: TimerValues,  # noqa: N803
    ) -> Iterator[pd.DataFrame]:
        """Yields the alerts of one batch of one key."""
        rule = self._rules[key[0]]
        frame = pd.concat(rows)
        arrived = sorted(
            zip(frame["arrival"], frame["event_id"], frame["event_time"], frame["amount_cents"], strict=True)
        )
        kept = sorted(self._events.get())
        times, weights = [when for when, _ in kept], [weight for _, weight in kept]
        window = rule["window_us"]
        # [start:] is the window of the newest event, total its aggregate.
        newest = times[-1] if times else -(2**62)
        start = bisect_left(times, newest - window)
        total = sum(weights[start:])
        added, found = [], []
        for _, event_id, when, amount in arrived:
            # Behind those of the same time: they arrived before.
            place = bisect_right(times, when)
            late = when < newest
            newest = max(newest, when)
            if amount >= rule.get("min_amount_cents", amount):
                weight = 1 if rule["aggregate"] == "count" else amount
                times.insert(place, when)
                weights.insert(place, weight)
                added.append((when, weight))
                place += 1
                if when >= newest - window:
                    total += weight
                else:
                    start += 1
            while start < len(times) and times[start] < newest - window:
                total -= weights[start]
                start += 1
            value = sum(weights[bisect_left(times, when - window) : place]) if late else total
            if value >= rule["at_least"]:
                found.append((event_id, value))
        self._store(times, weights, added, window + GRACE_US)
        if found:
            yield pd.DataFrame(found, columns=["event_id", "value"]).assign(rule_id=key[0])

    def _store(self, times: list[int], weights: list[int], added: list[tuple[int, int]], horizon: int) -> None:
        """Appends new entries; rewrites the list only once at least a quarter of it is no longer needed."""
        # A key's newest event is no younger than the newest of all, so this keeps enough.
        old = bisect_left(times, times[-1] - horizon) if times else 0
        if old * 4 > len(times):
            self._events.put(list(zip(times[old:], weights[old:], strict=True)))
        elif added:
            self._events.appendList(added)

    def close(self) -> None:
        """Nothing is held open."""


def _prepare(source: Path, folder: Path) -> int:
    """Writes the events as Parquet files of one commit each; their number."""
    records = np.fromfile(source, RECORD)
    folder.mkdir()
    for commit, start in enumerate(range(0, len(records), _COMMIT)):
        part = records[start : start + _COMMIT]
        columns = {"arrival": np.arange(start, start + len(part)), **{name: part[name] for name in RECORD.names or ()}}
        path = folder / f"{commit:06}.parquet"
        parquet.write_table(pa.table({name: np.ascontiguousarray(column) for name, column in columns.items()}), path)
        # The source takes files by the time of their last change.
        os.utime(path, (1_000_000_000 + commit, 1_000_000_000 + commit))
    return len(records)


def _of_rule(rule: dict[str, Any]) -> Column:
    return F.struct(F.lit(rule["rule_id"]).alias("rule_id"), F.col(rule["group_by"]).alias("key"))


def _start(spark: SparkSession, rules: list[dict[str, Any]], folder: Path) -> StreamingQuery:
    events = spark.readStream.schema(_EVENTS).option("maxFilesPerTrigger", 1).parquet(str(folder / "events"))
    keyed = events.select(
        F.explode(F.array(*map(_of_rule, rules))).alias("of"), "arrival", "event_id", "event_time", "amount_cents"
    )
    alerts = (
        keyed.select("of.*", "arrival", "event_id", "event_time", "amount_cents")
        .groupBy("rule_id", "key")
        .transformWithStateInPandas(
            PerKey({rule["rule_id"]: rule for rule in rules}),
            "event_id long, value long, rule_id string",
            outputMode="Append",
            timeMode="None",
        )
    )
    return (
        alerts.writeStream.format("delta")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(folder / "alerts"))
    )


def _wait(query: StreamingQuery, limit_seconds: float | None) -> list[tuple[float, int]]:
    """Per finished batch the seconds since the call and the events judged so far, until the query or the time ends."""
    began = time.perf_counter()
    done: list[tuple[float, int]] = []
    seen = -1

    def look() -> None:
        nonlocal seen
        for progress in query.recentProgress:
            if progress["batchId"] > seen and progress["numInputRows"]:
                seen = progress["batchId"]
                judged = (done[-1][1] if done else 0) + progress["numInputRows"]
                done.append((time.perf_counter() - began, judged))
                sys.stderr.write(f"{done[-1][1]} events in {done[-1][0]:.1f} s\n")

    while query.isActive:
        time.sleep(_POLL_SECONDS)
        look()
        if limit_seconds is not None and time.perf_counter() - began > limit_seconds:
            query.stop()
            return done
    query.awaitTermination()  # raises what it failed with
    look()
    return done


def _steady(done: list[tuple[float, int]]) -> float:
    """Events per second over the batches after the first quarter, of at least one."""
    if not done:
        return 0.0
    points = [(0.0, 0), *done]
    seconds, events = points[-1]
    at = next(index for index, (_, judged) in enumerate(points) if judged * 4 >= events)
    first = points[min(at, len(points) - 2)]
    return (events - first[1]) / (seconds - first[0])


def _take_alerts(spark: SparkSession, table: Path, judged: NDArray[np.int64], out: Path) -> int:
    """Writes the alerts about the events in `judged`; their number. A batch that was cut off may have written more."""
    if not (table / "_delta_log").exists():
        out.write_text("")
        return 0
    found = spark.read.format("delta").load(str(table)).select("rule_id", "event_id", "value").toPandas()
    found = found[found["event_id"].isin(judged)]
    found.to_csv(out, header=False, index=False)
    return len(found)


def main() -> None:
    """Runs the job that the command line names and prints its figures."""
    parser = argparse.ArgumentParser(prog="python -m dev.bench.peers.tws", description=__doc__)
    parser.add_argument("--variant", choices=["per-key"], default="per-key")
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--rules", type=Path, required=True)
    parser.add_argument("--alerts", type=Path, required=True)
    parser.add_argument("--durable", action="store_true", help="changes nothing: it always is")
    parser.add_argument("--limit-seconds", type=float)
    options = parser.parse_args()
    rules = json.loads(options.rules.read_text())["rules"]
    spark = get_spark("bench-tws")
    with tempfile.TemporaryDirectory(prefix="bench-tws-") as name:
        folder = Path(name)
        total = _prepare(options.input, folder / "events")
        done = _wait(_start(spark, rules, folder), options.limit_seconds)
        seconds, events = done[-1] if done else (0.0, 0)
        judged = np.fromfile(options.input, RECORD, events)["event_id"]
        alerts = _take_alerts(spark, folder / "alerts", judged, options.alerts)
        cores = spark.sparkContext.defaultParallelism
        spark.stop()
    result = {
        "peer": "tws",
        "variant": options.variant,
        "durable": True,
        "events": events,
        # To the end of the last batch that is judged and written: the one that a limit cut off counts for nothing.
        "seconds": round(seconds, 3),
        "steady_events_per_s": round(_steady(done)),
        "alerts": alerts,
        "complete": events == total,
        "settings": {
            "events_per_batch": _COMMIT,
            "state": "RocksDB with changelog, a ListState for each rule and key",
            "sink": "delta",
            "partitions": cores,
        },
        "version": metadata.version("pyspark"),
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()

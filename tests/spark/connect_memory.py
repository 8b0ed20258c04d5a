"""A backlog judged over Spark Connect by Python workers of 1 GiB, as on serverless compute; run as a process of its own.

    python tests/spark/connect_memory.py FOLDER [PROFILE [RULES [EVENTS [MIB]]]]

MIB: what a worker may hold; 0 for no limit. Prints one line of JSON: batches, alerts, events/s, and peaks of memory in MiB.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from connect_evaluation import connected

from dev.bench.processes import MemorySampler
from dev.soak.load import Load, make_hour_rule
from dev.soak.scenario import STREAM, STREAMS
from lookback.config import Settings
from lookback.spark.operations.catalog import set_up
from lookback.spark.stream.pipeline import Evaluation
from lookback.spark.tables.lakehouse import Tables
from payins import publish

ROOT = Path(__file__).parents[2]


def main(
    folder: Path, profile: str = "serverless", rules: str = "20", events: str = "400000", mib: str = "1024"
) -> None:
    """Every rule has state of its own, of an hour of events; one of them raises an alert for each tenth event."""
    limited = {"spark.python.daemon.module": "limited_pyspark.daemon", "spark.executorEnv.LOOKBACK_WORKER_MIB": mib}
    os.environ["LOOKBACK_WORKER_MIB"] = mib
    spark = connected(folder, limited if int(mib) else {})
    documents = [
        make_hour_rule(f"r{at}", where=f"amount >= {at}", when="amount < 100" if at == 0 else "n > 200")
        for at in range(int(rules))
    ]
    # The hour holds nine tenths of 400,000 events.
    load = Load(int(events), 50_000, 10_000, documents, int(events) // 10)
    tables = Tables.catalog(spark, "spark_catalog", "lookback_memory", volume=str(folder))
    set_up(tables, STREAMS)
    publish(tables, load.rules)
    for rows in load.make_commits():
        tables.append(spark.createDataFrame(rows).coalesce(1), STREAM.name)
    checkpoint = folder / "checkpoint"
    admission = Settings.local(conf=ROOT / "conf", profile=profile).admission
    evaluation = Evaluation(tables, STREAM, STREAMS, checkpoint, once=True, admission=admission, shards=2)
    started = time.monotonic()
    with MemorySampler() as memory:
        evaluation.run()
    seconds = time.monotonic() - started
    found = {
        "seconds": round(seconds, 1),
        "events_per_second": round(load.events / seconds),
        "batches": len(list((checkpoint / "commits").glob("[0-9]*"))),
        "alerts": tables.read("alerts").count(),
        "wanted": load.alerts,
        **memory.figures(),
    }
    sys.stdout.write(f"{json.dumps(found)}\n")
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

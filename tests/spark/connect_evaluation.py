"""A place set up, evaluated and maintained over Spark Connect, as on serverless compute; run as a process of its own.

    python tests/spark/connect_evaluation.py FOLDER

A process has either a classic session or one of Spark Connect. Prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from lookback.spark.catalog import set_up
from lookback.spark.jars import extra_jars
from lookback.spark.maintenance import maintain
from lookback.spark.pipeline import Evaluation
from lookback.spark.rules import RulesTable
from lookback.spark.session import get_spark, is_connect
from lookback.spark.tables import Tables
from payins import RULES, STREAM, STREAMS, append, make_events, replay_of_tables, replayed_alerts, rule, stored_alerts

_SERVER = {
    "spark.jars": ",".join(map(str, extra_jars())),
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.driver.memory": "2g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.defaultJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.ui.enabled": "false",
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "2",
}
# By another key than all rules before it, so that the running plan does not send what it needs; it fails at each event.
FAILING = rule("failing", group_by=["amount"], measures={"n": "count(*)"}, when="1 / (n - n) > 0", message="{n}")


def main(folder: Path) -> None:
    """The whole way; what is found goes to the standard output."""
    os.environ.update(PYSPARK_PYTHON=sys.executable, SPARK_TESTING="1")
    builder = SparkSession.builder.remote("local[2]")
    for key, value in {**_SERVER, "spark.sql.warehouse.dir": str(folder / "warehouse")}.items():
        builder = builder.config(key, value)
    builder.getOrCreate()
    spark = get_spark()
    tables = Tables.catalog(spark, "spark_catalog", "lookback_connect")
    set_up(tables, STREAMS)
    again = {step.done for step in set_up(tables, STREAMS)}
    rules = RulesTable(tables, STREAMS)
    for document in RULES:
        rules.push(document)
    events = make_events(250, seed=4)
    checkpoint = folder / "checkpoint"
    append(tables, events[:100])
    # Spark's default, which a new checkpoint must not freeze; what else is done here would only take longer by it.
    spark.conf.set("spark.sql.shuffle.partitions", "200")
    settings = dict(spark.conf.getAll)
    Evaluation(tables, STREAM, STREAMS, checkpoint, once=True).run()
    # Delta notes every commit of a session.
    left = {
        name: value
        for name, value in spark.conf.getAll.items()
        if settings.get(name) != value and name != "spark.databricks.delta.lastCommitVersionInSession"
    }
    spark.conf.set("spark.sql.shuffle.partitions", "2")
    partitions = [path.name for path in (checkpoint / "state" / "0").iterdir() if path.name.isdigit()]
    first = len(stored_alerts(tables))
    upkeep = {each.table: each for each in maintain(tables, STREAMS, {STREAM.name: str(checkpoint)}).tables}
    rules.push(FAILING)
    append(tables, events[100:])
    Evaluation(tables, STREAM, STREAMS, checkpoint, once=True).run()
    Evaluation(tables, STREAM, STREAMS, checkpoint, once=True).run()
    alerts = stored_alerts(tables)
    found = {
        "connect": is_connect(spark),
        "again": sorted(again),
        "compacted": upkeep[STREAM.name].compacted,
        "partitions": sorted(partitions),
        "settings_left": left,
        "alerts": [first, len(alerts)],
        "equal": alerts == replayed_alerts(replay_of_tables(tables)),
        "failing": [row.status for row in rules.rows() if row.rule_id == "failing"],
    }
    sys.stdout.write(f"{json.dumps(found)}\n")
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

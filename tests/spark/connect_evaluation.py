"""A place set up, evaluated, worked on and maintained over Spark Connect, as on serverless compute and an analysts' cluster.

    python tests/spark/connect_evaluation.py FOLDER

Run as a process of its own, since a process has either a classic session or one of Spark Connect. Prints one line of JSON,
and to the standard error how long each step took.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from lookback.cli import main as command_line
from lookback.core.errors import SetupError
from lookback.spark.operations.catalog import set_up
from lookback.spark.operations.maintenance import maintain
from lookback.spark.platform.jars import fetch_session_jars
from lookback.spark.platform.session import get_spark, is_connect
from lookback.spark.rules import RulesTable
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from lookback.spark.tables.lakehouse import Tables
from lookback.spark.tables.schemas import REJECTED_EVENTS
from payins import (
    RULES,
    START,
    STREAM,
    STREAMS,
    append,
    make_events,
    publish,
    replay_of_tables,
    replayed_alerts,
    rule,
    stored_alerts,
)

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
PLACE = {"catalog": "spark_catalog", "schema": "lookback_connect"}
SERVER = {
    "spark.jars": ",".join(map(str, fetch_session_jars())),
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.driver.memory": "2g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.defaultJavaOptions": "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseSerialGC",
    "spark.ui.enabled": "false",
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "2",
}
# As in the session of most other tests: to compile a query takes longer than to run it on a few rows.
BY_TREES = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
}
# By another key than all rules before it, so that the running plan does not send what it needs; it fails at each event.
FAILING = rule("failing", group_by=["amount"], measures={"n": "count(*)"}, when="1 / (n - n) > 0", message="{n}")
OPERATOR = "transformWithStateInPandas"


def main(folder: Path) -> None:
    """The whole way; the findings go to the standard output. Spark 4.0, without the operator, goes as far as it can."""
    with step("start"):
        spark = connected(folder, BY_TREES)
    tables = Tables.catalog(spark, *PLACE.values(), volume=str(folder))
    with step("set up"):
        set_up(tables, STREAMS)
    with step("set up again"):
        again = {each.done for each in set_up(tables, STREAMS)}
    publish(tables, RULES)
    events = make_events(250, seed=4)
    with step("append"):
        append(tables, events[:100])
    has_operator = hasattr(grouped_data(spark), OPERATOR)
    found = {"connect": is_connect(spark), "again": sorted(again), "refused": without_operator(tables)}
    if has_operator:
        found |= evaluated(tables, events)
        found |= worked_on(tables, folder)
    sys.stdout.write(f"{json.dumps(found)}\n")
    spark.stop()


def connected(folder: Path, settings: Mapping[str, str] | None = None) -> SparkSession:
    """A session of Spark Connect, with its server in a JVM of its own. settings: of the server, beside those here."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    own = {**SERVER, "spark.sql.warehouse.dir": str(folder / "warehouse"), **(settings or {})}
    # By SPARK_TESTING the client asks for the server's port. A JVM that has it checks every step of its planner, which takes
    # longer than all else; so the JVM begins without it.
    SparkContext._ensure_initialized(conf=SparkConf().setAll(list(own.items())))
    os.environ["SPARK_TESTING"] = "1"
    builder = SparkSession.builder.remote("local[2]")
    for key, value in own.items():
        builder = builder.config(key, value)
    builder.getOrCreate()
    return get_spark()


def grouped_data(spark: SparkSession) -> type[Any]:
    """The client's class that has the stateful operator, or has not."""
    return type(spark.range(1).groupBy("id"))


def without_operator(tables: Tables) -> dict[str, Any]:
    """An evaluation by a client that has no stateful operator, as that of Spark 4.0: what it says, and what it leaves."""
    grouped = grouped_data(tables.spark)
    operator = grouped.__dict__.get(OPERATOR)
    if operator is not None:
        delattr(grouped, OPERATOR)
    checkpoint = Path(checkpoint_folder(tables, STREAM))
    try:
        Evaluation(tables, STREAM, STREAMS, checkpoint, once=True).run()
        message = ""
    except SetupError as error:
        message = str(error)
    finally:
        if operator is not None:
            setattr(grouped, OPERATOR, operator)
    return {"message": message, "checkpoint": checkpoint.exists(), "log": tables.read("rule_log").count()}


def evaluated(tables: Tables, events: list[dict[str, Any]]) -> dict[str, Any]:
    """Three runs with events, maintenance and a failing rule between them, compared with a replay."""
    spark, rules, checkpoint = tables.spark, RulesTable(tables, STREAMS), Path(checkpoint_folder(tables, STREAM))
    # More than cores, as Spark's default, which a new checkpoint must not freeze.
    spark.conf.set("spark.sql.shuffle.partitions", "16")
    settings = dict(spark.conf.getAll)
    with step("first evaluation"):
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
    with step("maintenance"):
        upkeep = {each.table: each for each in maintain(tables, STREAMS, {STREAM.name: str(checkpoint)}).tables}
    rules.push(FAILING)
    append(tables, events[100:])
    with step("second evaluation"):
        Evaluation(tables, STREAM, STREAMS, checkpoint, once=True).run()
    with step("third evaluation"):
        run_notebook("03_evaluate_stream", conf_of(Path(tables.files)), view="lines")
    alerts = stored_alerts(tables)
    with step("replay"):
        equal = alerts == replayed_alerts(replay_of_tables(tables))
    return {
        "compacted": upkeep[STREAM.name].compacted,
        "partitions": sorted(partitions),
        "settings_left": left,
        "alerts": [first, len(alerts)],
        "equal": equal,
        "failing": [row.status for row in rules.rows() if row.rule_id == "failing"],
    }


def worked_on(tables: Tables, folder: Path) -> dict[str, Any]:
    """The notebooks of an analyst and the commands of an engineer, and those that are refused."""
    conf = conf_of(folder)
    (conf / "rules").mkdir()
    (conf / "rules/mine.yml").write_text(json.dumps(rule("mine", when="n >= 2")))
    (conf / "rules/pushed.yml").write_text(json.dumps(rule("pushed")))
    with step("notebook 2"):
        authored = run_notebook("02_author_rules", conf, rule_file="mine.yml", events="100", publish="true")
    first, other = tables.read("alerts").orderBy("alert_id", F.desc("revision")).dropDuplicates(["alert_id"]).take(2)
    alert_id, revision, other_id = first["alert_id"], first["revision"], other["alert_id"]
    with step("notebook 4"):
        decision = {"alert_id": alert_id, "revision": str(revision), "disposition": "confirmed"}
        explained = run_notebook("04_review_alerts", conf, **decision)["explanation"]
    reject(tables)
    before = {file.relative_to(folder).as_posix() for file in (folder / "_checkpoints").rglob("*")}
    commands = {
        "status": "status --json",
        "push": f"rules push {conf / 'rules/pushed.yml'}",
        "check": f"rules check {conf / 'rules/pushed.yml'} --against-data",
        "alerts": "alerts --json --queue",
        "rejected": "rejected payins --json",
        "review": f"review {other_id} --disposition false_positive --reviewer ann",
        "forget": "forget payins --where 'customer = 1' --yes --json",
        "ingest": f"ingest payins {folder / 'events.json'}",
        "retry": "ingest payins --retry-rejected",
        "rebuild": "evaluate payins --once --rebuild",
        "repartition": "repartition payins 1",
    }
    said = {name: run_command(name, words, conf) for name, words in commands.items()}
    after = {file.relative_to(folder).as_posix() for file in (folder / "_checkpoints").rglob("*")}
    reviews = {row["alert_id"]: row for row in tables.read("reviews").collect()}
    (status,), (rejected,) = said["status"]["lines"], said["rejected"]["lines"]
    return {
        "tried": len(authored["trial"].alerts) > 0,
        "version": authored["version"],
        "consistent": explained.consistent,
        "reviews": sorted(row["disposition"] for row in reviews.values()),
        "reviewed": [reviews[alert_id]["revision"] == revision, reviews[other_id]["reviewer"]],
        "codes": {name: each["code"] for name, each in said.items()},
        "errors": {name: each["error"] for name, each in said.items() if each["error"]},
        "status": [status["events"], status["lag_commits"]],
        "rejected": rejected["reason"],
        "pushed": [row.version for row in RulesTable(tables, STREAMS).rows() if row.rule_id == "pushed"],
        "forgotten": said["forget"]["lines"][0]["rows"],
        "left": tables.read(STREAM.name).where("customer = 1").count(),
        "checkpoint_changed": sorted(before ^ after),
    }


def conf_of(folder: Path) -> Path:
    """The folder conf/ with the declaration of the stream."""
    conf = folder / "conf"
    (conf / "streams").mkdir(parents=True, exist_ok=True)
    (conf / "streams/payins.yml").write_text(json.dumps(STREAM.to_dict()))
    return conf


def run_notebook(name: str, conf: Path, **parameters: str) -> dict[str, Any]:
    """Runs the cells of a notebook, which are plain Python. Returns its names; what it shows goes to the standard error."""
    given = {"root": str(conf.parent), "conf": str(conf), "stream": STREAM.name, **PLACE, **parameters}
    variables = {f"LOOKBACK_PARAM_{key.upper()}": value for key, value in given.items()}
    os.environ.update(variables)
    document = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    try:
        with contextlib.redirect_stdout(sys.stderr):
            for cell in document["cells"]:
                if cell["cell_type"] == "code":
                    exec("".join(cell["source"]), names)
    finally:
        for key in variables:
            del os.environ[key]
    return names


def run_command(name: str, words: str, conf: Path) -> dict[str, Any]:
    """Runs a command on the place. Returns its exit code, its lines that are JSON, and the error."""
    place = ["--root", str(conf.parent), "--conf", str(conf)]
    place += [word for key, value in PLACE.items() for word in (f"--{key}", value)]
    out, err = io.StringIO(), io.StringIO()
    with step(f"command {name}"), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = command_line([*shlex.split(words), *place])
    lines = [json.loads(line) for line in out.getvalue().splitlines() if line.startswith("{")]
    return {"code": code, "lines": lines, "error": err.getvalue().strip()}


def reject(tables: Tables) -> None:
    """Adds a row to rejected_events, as ingest does."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(START // 1_000_000))
    row = (STREAM.name, '{"id": "bad"}', "at: is missing", "file:/landing/bad.json", None, None)
    frame = tables.spark.createDataFrame(
        [row], "stream string, raw string, reason string, source string, a string, b string"
    )
    times = f"timestamp'{at}' AS ingested_at", "b AS read_as", "cast(NULL AS bigint) AS position"
    frame = frame.selectExpr("stream", "raw", "reason", "source", *times)
    tables.append(frame.select(*REJECTED_EVENTS.names).coalesce(1), "rejected_events")


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    """Says how long a step took."""
    started = time.monotonic()
    yield
    sys.stderr.write(f"{name}: {time.monotonic() - started:.1f} s\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

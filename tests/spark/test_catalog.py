"""Setting a place up, on real Delta: folders, and tables of a catalog; what only Unity Catalog knows is recorded."""

from __future__ import annotations

import getpass
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lookback import notebook
from lookback.cli import main
from lookback.core.errors import SetupError
from lookback.core.streams.declaration import Stream
from lookback.questions import VIEWS
from lookback.spark.operations import maintenance
from lookback.spark.operations.catalog import AS_IT_SHOULD_BE, set_up
from lookback.spark.operations.grants import Grantees
from lookback.spark.operations.maintenance import maintain
from lookback.spark.review import open_queue
from lookback.spark.stream.pipeline import Evaluation
from lookback.spark.tables.lakehouse import Tables
from lookback.spark.tables.schemas import COMMENTS, PRODUCT_TABLES, make_events_schema
from lookback.upkeep import forget as forgetting
from payins import RULES, STREAM, STREAMS, append, make_events, replay_of_tables, replayed_alerts, rule, stored_alerts

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
NAMES = (*PRODUCT_TABLES, STREAM.name)
# The address of a running server of the open-source Unity Catalog, of which the catalog `unity` is used: `make test-unity`.
SERVER = os.environ.get("LOOKBACK_UNITY")
CATALOG = "unity" if SERVER else "spark_catalog"
COMMENTED = Stream.from_dict({**STREAM.to_dict(), "comments": {"amount": 'What was paid, it\'s in "euros"'}})


def done(tables: Tables, stream: Stream = STREAM) -> dict[str, str]:
    """Table -> what became of it."""
    steps = set_up(tables, {stream.name: stream})
    return {step.thing.rsplit("/", 1)[-1].rsplit(".", 1)[-1].strip("`"): step.done for step in steps}


def versions(tables: Tables) -> list[int]:
    return [tables.version(name) for name in NAMES]


def comments(tables: Tables, name: str) -> dict[str, str | None]:
    return {field.name: field.metadata.get("comment") for field in tables.read(name).schema}


@pytest.mark.long
def test_tables_get_the_comments_that_they_lack_once(tables: Tables) -> None:
    events = tables.identifier(STREAM.name)
    tables.spark.sql(
        f"create table {events} (id string not null, at timestamp not null, customer int, shop string, "
        "amount decimal(18,2) comment 'cents?', position bigint, ingested_at timestamp) using delta"
    )
    rules = tables.identifier("rules")
    tables.spark.sql(f"alter table {rules} alter column status comment ''")

    first = done(tables, COMMENTED)

    assert first == {
        **dict.fromkeys(PRODUCT_TABLES, AS_IT_SHOULD_BE),
        "rules": "comments of 1 column",
        STREAM.name: "comments of 7 columns, its comment",
    }
    assert comments(tables, STREAM.name) == {
        "id": "Identifies the event",
        "at": "When it happened",
        "customer": "As in the source",
        "shop": "As in the source",
        "amount": 'What was paid, it\'s in "euros"',
        "position": ("Position in its round of ingest: file * 2^40 + row, or topic * 2^40 + record, from 0"),
        "ingested_at": "One stamp for all rows of a commit, later than those of every earlier commit",
    }
    for name, schema in PRODUCT_TABLES.items():
        assert comments(tables, name) == {field.name: field.metadata["comment"] for field in schema}
        (detail,) = tables.spark.sql(f"describe detail {tables.identifier(name)}").collect()
        assert detail["description"] == COMMENTS[name]
    before = versions(tables)
    assert set(done(tables, COMMENTED).values()) == {AS_IT_SHOULD_BE}
    assert versions(tables) == before


@pytest.fixture
def catalog(spark: SparkSession, tmp_path: Path) -> Iterator[Tables]:
    """A schema of a catalog that is not there yet."""
    if SERVER:
        for key, value in {"": "io.unitycatalog.spark.UCSingleCatalog", ".uri": SERVER, ".token": ""}.items():
            spark.conf.set(f"spark.sql.catalog.{CATALOG}{key}", value)
    name = f"lookback_{uuid.uuid4().hex}"
    tables = Tables.catalog(spark, CATALOG, name, str(tmp_path / "files") if SERVER else None)
    yield tables
    for view in VIEWS if SERVER else ():
        spark.sql(f"drop view if exists {tables.identifier(view)}")
    spark.sql(f"drop schema if exists {CATALOG}.{name} cascade")


@pytest.mark.long
def test_a_catalog_is_set_up_once_evaluated_and_maintained(catalog: Tables, tmp_path: Path) -> None:
    recorded: list[str] = []

    def unity(statement: str) -> list[dict[str, str]]:
        recorded.append(statement)
        return []

    place = f"{CATALOG}.{catalog.schema_name}"
    volume = f"/Volumes/{CATALOG}/{catalog.schema_name}/checkpoints"
    steps = set_up(catalog, STREAMS, checkpoints=volume, roles=Grantees(service="svc"), unity=unity)

    assert [step.done for step in steps if step.thing.startswith(("schema", "volume"))] == ["created"] * 2
    made = [line for line in recorded if not line.startswith(("SHOW", "SELECT"))]
    assert [line.split(" COMMENT ")[0].replace("`", "") for line in made] == [
        f"CREATE VOLUME IF NOT EXISTS {place}.checkpoints",
        f"ALTER TABLE {place}.alerts ADD CONSTRAINT alerts_pk PRIMARY KEY (alert_id, revision)",
        f"ALTER TABLE {place}.late_events ADD CONSTRAINT late_events_pk PRIMARY KEY (stream, event_id, arrival)",
        f"ALTER TABLE {place}.metrics ADD CONSTRAINT metrics_pk PRIMARY KEY (metrics_id)",
        f"ALTER TABLE {place}.payins ADD CONSTRAINT payins_pk PRIMARY KEY (id)",
        f"GRANT USE CATALOG ON CATALOG {CATALOG} TO svc",
        f"GRANT USE SCHEMA ON SCHEMA {place} TO svc",
        f"GRANT CREATE TABLE, CREATE VOLUME ON SCHEMA {place} TO svc",
        f"GRANT SELECT, MODIFY ON SCHEMA {place} TO svc",
        f"GRANT READ VOLUME, WRITE VOLUME ON VOLUME {place}.checkpoints TO svc",
    ]
    # Without Unity Catalog nothing of that is asked for, and all else is as it should be.
    assert set(done(catalog).values()) == {AS_IT_SHOULD_BE}
    assert versions(catalog) == [0] * len(NAMES)
    assert {name: clustered(catalog, name) for name in NAMES if clustered(catalog, name)} == {
        "alerts": ["event_time"], STREAM.name: ["at"],
    }  # fmt: skip

    rows = [(document["rule_id"], 1, "active", json.dumps(document)) for document in RULES]
    written = catalog.spark.createDataFrame(rows, "rule_id string, version bigint, status string, document string")
    catalog.append(written, "rules")
    events = make_events(100, seed=3)
    for half in (events[:50], events[50:]):
        append(catalog, half)
        Evaluation(catalog, STREAM, STREAMS, tmp_path / "checkpoint", once=True).run()
        upkeep = {
            each.table: each for each in maintain(catalog, STREAMS, {STREAM.name: str(tmp_path / "checkpoint")}).tables
        }
        assert (upkeep[STREAM.name].compacted >= 2, upkeep[STREAM.name].files) == (True, 1)
    alerts = stored_alerts(catalog)
    assert len(alerts) > 10
    assert alerts == replayed_alerts(replay_of_tables(catalog))
    queue = [row["alert_id"] for row in open_queue(catalog).collect()]
    view = catalog.spark.sql(f"select alert_id from {catalog.identifier('open_queue')}").collect()
    assert [row["alert_id"] for row in view] == queue != []


@pytest.mark.long
def test_every_command_works_on_the_tables_of_a_catalog(
    catalog: Tables, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = tmp_path / "conf"
    (conf / "streams").mkdir(parents=True)
    (conf / "streams/payins.yml").write_text(json.dumps(STREAM.to_dict()))
    (conf / "rule.yml").write_text(json.dumps(rule("any", window="1 hour", when="n >= 2", message="{n} by {customer}")))
    rows = [
        {"id": f"e{n}", "at": f"2026-03-01T00:0{n}:00Z", "customer": n % 2, "shop": "a", "amount": "5.00"}
        for n in range(5)
    ]
    (tmp_path / "events.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = tmp_path / "files"
    named = ["--catalog", CATALOG, "--schema", str(catalog.schema_name)]
    place = [*named, "--root", str(files), "--conf", str(conf)]

    def run(*command: str, code: int = 0) -> str:
        capsys.readouterr()
        assert main([*command, *place]) == code, capsys.readouterr().err
        said = capsys.readouterr()
        return said.out if code == 0 else said.err

    def listed(*command: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in run(*command, "--json").splitlines()]

    # Only init makes tables: a misspelt schema is not filled, and who may not create is told before the first step.
    for command in (
        ("rules", "push", f"{conf}/rule.yml"),
        ("evaluate", "payins", "--once"),
        ("ingest", "payins", f"{tmp_path}/events.jsonl"),
    ):
        assert "or you may not read it; the job set_up or `lookback init` creates the tables" in run(*command, code=2)
    with pytest.raises(SetupError, match="or you may not read it"):
        notebook.open_workspace("", CATALOG, str(catalog.schema_name), str(conf), "payins")
    assert not catalog.spark.catalog.databaseExists(f"{CATALOG}.{catalog.schema_name}")

    run("init")
    run("rules", "push", f"{conf}/rule.yml")
    (report,) = listed("ingest", "payins", str(tmp_path / "events.jsonl"))
    assert report["ingested"] == 5
    run("evaluate", "payins", "--once")
    assert (files / "_checkpoints/evaluate_payins/offsets").is_dir()
    (first, *_), queue = listed("alerts"), listed("alerts", "--queue")
    assert len(queue) == 3
    run("review", first["alert_id"], "--disposition", "confirmed")
    (reviewed,) = catalog.read("reviews").collect()
    assert (reviewed["revision"], reviewed["reviewer"]) == (0, getpass.getuser())
    (status,) = listed("status")
    assert (status["events"], status["alerts"], status["open"], status["judged"]) == (5, 3, 2, 1)
    assert status["lag_commits"] == 0
    assert [row["rule_id"] for row in listed("rules", "list")] == ["any"]
    # Some seconds for each table.
    monkeypatch.setattr(maintenance, "PRODUCT_TABLES", ("alerts", "reviews"))
    upkeep = listed("maintain")
    assert {row["table"] for row in upkeep if "table" in row} == {"payins", "alerts", "reviews"}
    (told,) = listed("forget", "payins", "--where", "customer = 1", "--yes")
    assert (told["rows"]["payins"], told["rows"]["alerts"], told["waiting"]) == (2, 1, True)
    assert catalog.read("payins").count() == 3
    workspace = notebook.open_workspace(str(files), CATALOG, str(catalog.schema_name), str(conf), "payins")
    assert workspace.checkpoint("evaluate") == f"{files}/_checkpoints/evaluate_payins"
    # As the job does it: counted unless told otherwise.
    counted = forgetting("", CATALOG, str(catalog.schema_name), str(conf), "payins", "customer = 0")
    assert (counted.dry_run, counted.rows["payins"], catalog.read("payins").count()) == (True, 3, 3)
    assert f"{counted.total} rows would be deleted" in capsys.readouterr().out
    assert main(["status", "--catalog", CATALOG, "--conf", str(conf)]) == 2
    assert "catalog and schema go together" in capsys.readouterr().err


def clustered(tables: Tables, name: str) -> list[str]:
    (detail,) = tables.spark.sql(f"describe detail {tables.identifier(name)}").collect()
    return list(detail["clusteringColumns"])


def test_a_comment_in_place_of_which_spark_would_put_a_variable_is_refused(tables: Tables) -> None:
    stream = Stream.from_dict({**STREAM.to_dict(), "comments": {"amount": "${spark.app.name}"}})
    with pytest.raises(SetupError, match=r"contains \${, which Spark would replace .* use another text"):
        set_up(tables, {stream.name: stream})


@pytest.mark.long
def test_a_table_that_was_made_before_is_clustered_from_now_on(catalog: Tables) -> None:
    spark = catalog.spark
    spark.sql(f"create schema {CATALOG}.{catalog.schema_name}")
    columns = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in make_events_schema(STREAM))
    spark.sql(f"create table {catalog.identifier(STREAM.name)} ({columns}) using delta")
    append(catalog, make_events(5, seed=1))

    assert done(catalog)[STREAM.name] == "comments of 7 columns, its comment, clustered by at"
    assert clustered(catalog, STREAM.name) == ["at"]
    before = catalog.version(STREAM.name)
    assert done(catalog)[STREAM.name] == AS_IT_SHOULD_BE
    assert catalog.version(STREAM.name) == before

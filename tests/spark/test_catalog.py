"""Setting a place up, on real Delta: folders, and tables of a catalog; what only Unity Catalog knows is recorded."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lookback.core.errors import SetupError
from lookback.core.streams import Stream
from lookback.spark.catalog import AS_IT_SHOULD_BE, set_up
from lookback.spark.grants import Roles
from lookback.spark.maintenance import maintain
from lookback.spark.pipeline import Evaluation
from lookback.spark.schemas import COMMENTS, PRODUCT_TABLES, events_schema
from lookback.spark.tables import Tables
from payins import RULES, STREAM, STREAMS, append, make_events, replay_of_tables, replayed_alerts, stored_alerts

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
NAMES = (*PRODUCT_TABLES, STREAM.name)
COMMENTED = Stream.from_dict({**STREAM.to_dict(), "comments": {"amount": 'What was paid, it\'s in "euros"'}})


def done(tables: Tables, stream: Stream = STREAM) -> dict[str, str]:
    """Table -> what became of it."""
    steps = set_up(tables, {stream.name: stream})
    return {step.thing.rsplit("/", 1)[-1].rsplit(".", 1)[-1].strip("`"): step.done for step in steps}


def versions(tables: Tables) -> list[int]:
    return [tables.version(name) for name in NAMES]


def comments(tables: Tables, name: str) -> dict[str, str | None]:
    return {field.name: field.metadata.get("comment") for field in tables.read(name).schema}


def test_tables_of_an_earlier_release_get_their_comments_once(tables: Tables) -> None:
    events = tables.identifier(STREAM.name)
    tables.spark.sql(
        f"create table {events} (id string not null, at timestamp not null, customer int, shop string, "
        "amount decimal(18,2) comment 'cents?', ingested_at timestamp) using delta"
    )
    rules = tables.identifier("rules")
    tables.spark.sql(f"alter table {rules} alter column status comment ''")

    first = done(tables, COMMENTED)

    assert first == {
        **dict.fromkeys(PRODUCT_TABLES, AS_IT_SHOULD_BE),
        "rules": "comments of 1 column",
        STREAM.name: "comments of 6 columns, its comment",
    }
    assert comments(tables, STREAM.name) == {
        "id": "Identifies the event",
        "at": "When it happened",
        "customer": "As the source has it",
        "shop": "As the source has it",
        "amount": 'What was paid, it\'s in "euros"',
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
def catalog(spark: SparkSession) -> Iterator[Tables]:
    """A schema of a catalog that is not there yet."""
    name = f"lookback_{uuid.uuid4().hex}"
    yield Tables.catalog(spark, "spark_catalog", name)
    spark.sql(f"drop schema if exists spark_catalog.{name} cascade")


@pytest.mark.long
def test_a_catalog_is_set_up_once_evaluated_and_maintained(catalog: Tables, tmp_path: Path) -> None:
    recorded: list[str] = []

    def unity(statement: str) -> list[dict[str, str]]:
        recorded.append(statement)
        return []

    place = f"spark_catalog.{catalog.schema_name}"
    volume = f"/Volumes/spark_catalog/{catalog.schema_name}/checkpoints"
    steps = set_up(catalog, STREAMS, checkpoints=volume, roles=Roles(service="svc"), unity=unity)

    assert [step.done for step in steps if step.thing.startswith(("schema", "volume"))] == ["created"] * 2
    made = [line for line in recorded if not line.startswith(("SHOW", "SELECT"))]
    assert [line.split(" COMMENT ")[0].replace("`", "") for line in made] == [
        f"CREATE VOLUME IF NOT EXISTS {place}.checkpoints",
        f"ALTER TABLE {place}.alerts ADD CONSTRAINT alerts_pk PRIMARY KEY (alert_id, revision)",
        f"ALTER TABLE {place}.late_events ADD CONSTRAINT late_events_pk PRIMARY KEY (stream, event_id, arrival)",
        f"ALTER TABLE {place}.metrics ADD CONSTRAINT metrics_pk PRIMARY KEY (metrics_id)",
        f"ALTER TABLE {place}.payins ADD CONSTRAINT payins_pk PRIMARY KEY (id)",
        "GRANT USE CATALOG ON CATALOG spark_catalog TO svc",
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


def clustered(tables: Tables, name: str) -> list[str]:
    (detail,) = tables.spark.sql(f"describe detail {tables.identifier(name)}").collect()
    return list(detail["clusteringColumns"])


def test_a_comment_in_place_of_which_spark_would_put_a_variable_is_refused(tables: Tables) -> None:
    stream = Stream.from_dict({**STREAM.to_dict(), "comments": {"amount": "${spark.app.name}"}})
    with pytest.raises(SetupError, match=r"holds \${, in place of which .* use another text"):
        set_up(tables, {stream.name: stream})


def test_a_table_that_was_made_before_is_clustered_from_now_on(catalog: Tables) -> None:
    spark = catalog.spark
    spark.sql(f"create schema spark_catalog.{catalog.schema_name}")
    columns = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in events_schema(STREAM))
    spark.sql(f"create table {catalog.identifier(STREAM.name)} ({columns}) using delta")
    append(catalog, make_events(5, seed=1))

    assert done(catalog)[STREAM.name] == "comments of 6 columns, its comment, clustered by at"
    assert clustered(catalog, STREAM.name) == ["at"]
    before = catalog.version(STREAM.name)
    assert done(catalog)[STREAM.name] == AS_IT_SHOULD_BE
    assert catalog.version(STREAM.name) == before

"""The order of lines: events of one time are judged as they stand in what ingest read."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lookback.core.streams.declaration import Stream
from lookback.spark.ingest.files import ingest, retry_rejected
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from lookback.testing.harness import replay
from payins import publish

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark
NOON = "2026-03-01T12:00:00Z"
LOGINS = Stream.from_dict(
    {
        "stream": "logins",
        "event_id": "id",
        "event_time": "at",
        "fields": {"id": "string", "at": "timestamp", "user": "string", "outcome": "string"},
    }
)
TAKEOVER = {
    "rule_id": "takeover",
    "stream": "logins",
    "group_by": ["user"],
    "sequence": {
        "within": "10 minutes",
        "steps": [{"name": "failed", "where": "outcome = 'FAIL'"}, {"name": "success", "where": "outcome = 'OK'"}],
        "until": "outcome = 'OK'",
    },
}


@pytest.fixture
def many_splits(spark: SparkSession) -> Iterator[None]:
    """Spark cuts files into pieces of 500 bytes."""
    settings = {"spark.sql.files.maxPartitionBytes": "500", "spark.sql.files.openCostInBytes": "100"}
    before = {name: spark.conf.get(name, None) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    yield
    for name, value in before.items():
        spark.conf.unset(name) if value is None else spark.conf.set(name, value)


def attempts(random: Random, count: int) -> list[dict[str, Any]]:
    """Users who fail and then succeed within one second, with ids by chance."""
    return [
        {"id": str(uuid.UUID(int=random.getrandbits(128))), "at": NOON, "user": f"u{at}", "outcome": outcome}
        for at in range(count)
        for outcome in ("FAIL", "OK")
    ]


def write(file: Path, rows: list[dict[str, Any]], modified: int) -> None:
    """Writes a file in the format of its suffix, with empty lines where there can be any."""
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=7, compression="none")
    elif file.suffix == ".csv":
        lines = [",".join(rows[0]), *(",".join(row.values()) + "\n" * (at % 3 == 0) for at, row in enumerate(rows))]
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    else:
        file.write_text("".join(json.dumps(row) + "\n" * (1 + at % 2) for at, row in enumerate(rows)), encoding="utf-8")
    os.utime(file, (modified, modified))


def read_positions(tables: Tables) -> list[tuple[str, int]]:
    rows = tables.read("logins").orderBy("position").select("id", "position").collect()
    return [(row[0], row[1]) for row in rows]


@pytest.mark.long
@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
@pytest.mark.usefixtures("many_splits")
def test_a_position_is_the_number_of_the_file_and_of_the_row_however_files_are_split(
    tables: Tables, tmp_path: Path, suffix: str
) -> None:
    tables.create(LOGINS)
    first, second = attempts(Random(1), 40), attempts(Random(2), 10)
    # The file that was written first comes first, whatever its name.
    folder = tmp_path / "files"
    folder.mkdir()
    write(folder / f"b.{suffix}", first, 1_700_000_000)
    write(folder / f"a.{suffix}", second, 1_700_000_100)

    ingest(tables, LOGINS, folder, progress=None)

    numbered = [(row["id"], at) for at, row in enumerate(first)]
    assert read_positions(tables) == [*numbered, *((row["id"], 2**40 + at) for at, row in enumerate(second))]


@pytest.mark.long
def test_a_login_that_fails_and_then_succeeds_in_one_second_is_seen_in_that_order(
    tables: Tables, tmp_path: Path
) -> None:
    tables.create(LOGINS)
    publish(tables, [TAKEOVER])
    rows = attempts(Random(3), 5)
    write(tmp_path / "logins.csv", rows, 1_700_000_000)
    ingest(tables, LOGINS, tmp_path / "logins.csv", progress=None)
    evaluation = Evaluation(tables, LOGINS, {"logins": LOGINS}, checkpoint_folder(tables, LOGINS), once=True)
    evaluation.run()

    stored = [row["event_id"] for row in tables.read("alerts").select("event_id").collect()]
    successes = [row["id"] for row in rows if row["outcome"] == "OK"]
    assert stored == successes
    together = [{**row, "arrival": 1} for row in rows]
    table = [row.asDict() | {"arrival": 1} for row in tables.read("logins").orderBy("id").collect()]
    for given in (rows, together, table):
        assert [alert.event_id for alert in replay([TAKEOVER], given, LOGINS).alerts] == successes


@pytest.mark.long
def test_rejected_lines_that_are_taken_in_later_keep_their_order(tables: Tables, tmp_path: Path) -> None:
    declared = Stream.from_dict(LOGINS.to_dict() | {"columns": {"at": "to_timestamp(at, 'yyyy')"}})
    tables.create(LOGINS)
    rows = attempts(Random(4), 20)
    write(tmp_path / "logins.csv", rows, 1_700_000_000)
    assert ingest(tables, declared, tmp_path / "logins.csv", progress=None).rejected == 40
    assert retry_rejected(tables, LOGINS, progress=None).ingested == 40
    assert [each for each, _ in read_positions(tables)] == [row["id"] for row in rows]


@pytest.mark.long
def test_a_table_of_others_is_ordered_by_the_fields_that_it_declares(
    tables: Tables, spark: SparkSession, tmp_path: Path
) -> None:
    columns = "id string, at timestamp, user string, outcome string, offset bigint"
    place = tmp_path / "theirs"
    properties = "delta.enableChangeDataFeed = true, delta.enableInCommitTimestamps = true"
    spark.sql(f"CREATE TABLE delta.`{place}` ({columns}) USING delta TBLPROPERTIES ({properties})")
    document = LOGINS.to_dict() | {"table": str(place), "order_by": ["offset"]}
    del document["source"], document["columns"]
    stream = Stream.from_dict(document | {"fields": document["fields"] | {"offset": "bigint"}})
    tables.create(stream)
    rows = [{**row, "offset": at} for at, row in enumerate(attempts(Random(5), 5))]
    frame = spark.createDataFrame([tuple(row.values()) for row in rows], columns.replace("timestamp", "string"))
    frame.selectExpr("id", "cast(at as timestamp) at", "user", "outcome", "offset").repartition(3, "id").write.format(
        "delta"
    ).mode("append").save(str(place))
    tables = tables.holding(stream)
    publish(tables, [TAKEOVER])
    Evaluation(tables, stream, {"logins": stream}, checkpoint_folder(tables, stream), once=True).run()
    stored = [row["event_id"] for row in tables.read("alerts").select("event_id").collect()]
    assert stored == [row["id"] for row in rows if row["outcome"] == "OK"]
    given = [{**row, "arrival": 1} for row in rows[::-1]]
    assert [alert.event_id for alert in replay([TAKEOVER], given, stream).alerts] == stored

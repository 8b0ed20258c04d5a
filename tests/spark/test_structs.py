"""Structs in events tables: in one that others write, and in one that ingest fills from JSON and Parquet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F  # noqa: N812

from lookback.core.errors import ExpressionError, SetupError
from lookback.core.streams.declaration import Stream
from lookback.spark.explaining.counted import find_counted_events
from lookback.spark.ingest.files import ingest
from lookback.spark.operations.forget import forget
from lookback.spark.replay.backtest import Candidate, backtest
from lookback.spark.replay.proof import prove
from lookback.spark.review import explain
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from payins import publish, stored_alerts

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark
FIELDS = {
    "id": "string",
    "at": "timestamp",
    "parent_name": "string",
    "process": "struct<name: string, pid: int, parent: struct<args: array<string>>>",
}
RULES: list[dict[str, Any]] = [
    {"rule_id": "one", "where": "process.name = 'cmd' and exists(process.parent.args, a -> a = '-enc')"},
    {
        "rule_id": "names",
        "group_by": ["process.name"],
        "window": "1 hour",
        "measures": {"n": "count(*)"},
        "when": "n = 2",
    },
    {
        "rule_id": "stems",
        "group_by": [{"stem": "upper(process.name)"}],
        "window": "1 hour",
        "measures": {"n": "count(*)"},
        "when": "n = 2",
    },
    {
        "rule_id": "parents",
        "group_by": ["parent_name"],
        "window": "1 hour",
        "measures": {"pids": "sum(process.pid)"},
        "when": "pids >= 3",
    },
]
FOUND = [
    ("names", "2", {"process.name": "cmd"}),
    ("names", "4", {"process.name": "p\ufffd"}),
    ("one", "1", {}),
    ("stems", "2", {"stem": "CMD"}),
    ("stems", "4", {"stem": "P\ufffd"}),
]


def evaluate(tables: Tables, stream: Stream) -> None:
    folder = checkpoint_folder(tables, stream)
    Evaluation(tables, stream, {stream.name: stream}, folder, once=True, shards=2).run()


def find_alerts(tables: Tables) -> list[tuple[Any, ...]]:
    return sorted(
        (row.rule_id, row.event_id, dict(row.key)) for row in stored_alerts(tables) if row.rule_id != "parents"
    )


def rules_of(stream: Stream) -> list[dict[str, Any]]:
    return [{**rule, "stream": stream.name} for rule in RULES]


@pytest.mark.long
def test_c12_4_rules_read_structs_and_mapped_columns_of_a_table_that_others_write(
    tables: Tables, spark: SparkSession, tmp_path: Path
):
    place = tmp_path / "starts"
    columns = "meta STRUCT<id STRING, at TIMESTAMP>, process STRUCT<name STRING, pid INT, more DOUBLE, parent "
    columns += "STRUCT<name STRING, args ARRAY<STRING>>>, other MAP<STRING, STRING>"
    properties = "delta.enableChangeDataFeed = true, delta.enableInCommitTimestamps = true"
    spark.sql(f"CREATE TABLE delta.`{place}` ({columns}) USING delta TBLPROPERTIES ({properties})")
    mapped = {"id": "meta.id", "at": "meta.at", "parent_name": "process.parent.name"}
    document = {"stream": "starts", "event_id": "id", "event_time": "at", "fields": FIELDS}
    stream = Stream.from_dict({**document, "table": str(place), "columns": mapped})
    tables.create(stream)
    publish(tables, rules_of(stream))
    times = [f"timestamp '2026-01-01 00:0{minute}:00'" for minute in range(6)]
    values = [
        f"(named_struct('id', '1', 'at', {times[1]}), ('cmd', 1, 0.5, ('word', array('-enc'))), NULL)",
        f"(named_struct('id', '2', 'at', {times[2]}), ('cmd', 2, 0.5, ('word', array('x', NULL))), NULL)",
        f"(named_struct('id', '3', 'at', {times[3]}), (cast(X'70ff' AS STRING), 3, 0.5, NULL), NULL)",
        f"(named_struct('id', '4', 'at', {times[4]}), (cast(X'70ff' AS STRING), 4, 0.5, NULL), NULL)",
        f"(named_struct('id', '5', 'at', {times[5]}), NULL, NULL)",
        "(NULL, ('cmd', 5, 0.5, NULL), NULL)",
    ]
    spark.sql(f"INSERT INTO delta.`{place}` VALUES {', '.join(values)}")

    evaluate(tables, stream)

    assert find_alerts(tables) == FOUND
    alert = next(row for row in stored_alerts(tables) if row.rule_id == "names" and row.event_id == "2")
    stem = next(row for row in stored_alerts(tables) if row.rule_id == "stems" and row.event_id == "2")
    for each in (alert, stem):
        assert explain(tables, {stream.name: stream}, each.alert_id).consistent
    behind = find_counted_events(
        tables, {stream.name: stream}, tables.read("alerts").where("rule_id IN ('names', 'stems')")
    )
    counted = behind.where(F.col("alert_id").isin(alert.alert_id, stem.alert_id))
    assert sorted(row["event_id"] for row in counted.collect()) == ["1", "1", "2", "2"]
    tried = backtest(tables, stream, [Candidate(rule) for rule in rules_of(stream)])
    found = tried.alerts.where("rule_id = 'parents'").select("event_id", "key.parent_name", "measures.pids").collect()
    assert sorted(map(tuple, found)) == [("2", "word", "3"), ("3", None, "3"), ("4", None, "7"), ("5", None, "7")]
    assert all(rule.holds for rule in prove(tables, stream, {stream.name: stream}).rows)

    # Whoever asks for a name that the table does not have is told what to do instead.
    with pytest.raises(ExpressionError, match=f"parent_name has another name in {place}"):
        forget(tables, stream, "parent_name = 'word'")
    assert forget(tables, stream, "process.name = 'cmd'", dry_run=True).rows["starts"] == 2
    other = {**FIELDS, "process": "struct<name: bigint, parent: struct<up: string>>", "more": "string"}
    misfit = Stream.from_dict(
        {**document, "fields": other, "table": str(place), "columns": {**mapped, "more": "meta.x"}}
    )
    with pytest.raises(SetupError) as refused:
        tables.create(misfit)
    assert "process.name is string, declared as bigint; process.parent.up is missing, declared as string" in str(
        refused.value
    )
    assert "ADD COLUMNS (`process`.`parent`.`up` string, `meta`.`x` string)" in str(refused.value)


@pytest.mark.long
def test_c12_4_ingest_fills_structs_from_json_and_parquet(tables: Tables, spark: SparkSession, tmp_path: Path):
    document = {"stream": "starts", "event_id": "id", "event_time": "at", "fields": FIELDS}
    stream = Stream.from_dict({**document, "columns": {"parent_name": "upper(up)"}})
    tables.create(stream)
    publish(tables, rules_of(stream))

    def line(id_: int, process: Any) -> dict[str, Any]:
        return {"id": str(id_), "at": f"2026-01-01T00:0{id_}:00Z", "up": "word", "process": process}

    lines = [
        line(1, {"name": "cmd", "pid": 1, "parent": {"args": ["-enc"], "more": 1}}),
        line(2, {"name": "cmd", "pid": "2"}),
        line(3, None),
        line(4, "cmd"),
        line(5, {"name": "cmd", "pid": 1.5}),
        line(6, {"name": "cmd", "pid": 1, "parent": {"args": "x"}}),
        line(7, {"name": {"first": "x"}, "pid": 9}),
    ]
    (tmp_path / "in.json").write_text("\n".join(map(json.dumps, lines)))
    report = ingest(tables, stream, tmp_path / "in.json", progress=None)
    assert (report.ingested, report.rejected) == (4, 3)
    rejected = {json.loads(row["raw"])["id"]: row["reason"] for row in tables.read("rejected_events").collect()}
    assert rejected["4"].startswith("process.name: 'cmd' is not string")
    assert 'process.pid: \'{"name":"cmd","pid":1.5}\' is not int' in rejected["5"]
    assert "process.parent.args" in rejected["6"]
    parquet = spark.createDataFrame(
        [("8", "2026-01-01T00:08:00Z", "word", ("cmd", 8, (["y"], 3)))],
        "id string, at string, up string, process struct<name string, pid int, parent struct<args array<string>, n int>>",
    )
    parquet.coalesce(1).write.parquet(str(tmp_path / "more"))
    assert ingest(tables, stream, tmp_path / "more", format="parquet", progress=None).ingested == 1

    stored = {row["id"]: row for row in tables.read("starts").collect()}
    assert tables.read("starts").schema["process"].dataType.simpleString() == (
        "struct<name:string,pid:int,parent:struct<args:array<string>>>"
    )
    assert [stored[id_]["process"]["name"] for id_ in "12378"] == ["cmd", "cmd", None, '{"first":"x"}', "cmd"]
    assert stored["1"]["process"]["parent"]["args"] == ["-enc"]
    assert stored["8"]["process"].asDict(recursive=True) == {"name": "cmd", "pid": 8, "parent": {"args": ["y"]}}
    assert stored["1"]["parent_name"] == "WORD"
    # A repeated file adds nothing, also where the duplicates must be compared row by row.
    assert ingest(tables, stream, tmp_path / "in.json", progress=None).duplicates == 4

    evaluate(tables, stream)
    assert find_alerts(tables) == [
        ("names", "2", {"process.name": "cmd"}),
        ("one", "1", {}),
        ("stems", "2", {"stem": "CMD"}),
    ]
    gone = forget(tables, stream, "process.pid in (1, 2)")
    assert gone.rows["starts"] == 2
    assert tables.read("starts").where(F.col("process.pid").isin(1, 2)).count() == 0
    assert find_alerts(tables) == []

"""Appends to local tables without a Spark job: read back as those by Spark are, once, whatever others do meanwhile."""

from __future__ import annotations

import datetime as dt
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from lookback.core.streams.blocks import ALERTS_SCHEMA
from lookback.spark.batches.sink import Sink, is_written
from lookback.spark.rules import RulesTable
from lookback.spark.tables import appends
from lookback.spark.tables.appends import TableChanged, append_directly
from lookback.spark.tables.lakehouse import SPARK_ERRORS, Tables, commit_file, is_conflict
from payins import RULES, STREAM, STREAMS
from sample_alert import ALERT

pytestmark = pytest.mark.spark

SCHEMA = ALERTS_SCHEMA.append(pa.field("decided_at", pa.timestamp("us", tz="UTC")))


def alerts(*rows: dict[str, Any]) -> pa.Table:
    found = [
        {
            **ALERT,
            **row,
            "key": list((row.get("key", ALERT["key"]) or {}).items()),
            "measures": [("total", "1.0"), ("none", None)],
        }
        for row in rows
    ]
    return pa.Table.from_pylist(found, schema=SCHEMA)


def at(text: str) -> dt.datetime:
    return dt.datetime.fromisoformat(text).replace(tzinfo=dt.timezone.utc)


ODD = alerts(
    {},
    {"event_id": None, "message": None, "evidence": None, "window_complete": None},
    {"evidence": ["a", None, "ü\n\0"], "key": {}, "message": "x" * 100_000, "arrival": 2**62},
    {"event_time": at("0001-01-02"), "window_start": at("1582-10-10"), "window_end": at("1899-12-31 23:59:59.999999")},
    {"event_time": at("9998-12-31 23:59:59.999999"), "decided_at": at("1969-12-31 23:59:59.999999")},
)


def folder_of(tables: Tables, name: str = "alerts") -> Path:
    folder = tables.local_folder(name)
    assert folder is not None
    return folder


def read_ids(tables: Tables) -> list[str]:
    return sorted(row["alert_id"] for row in tables.read("alerts").select("alert_id").collect())


def read_added(tables: Tables, version: int) -> dict[str, Any]:
    lines = commit_file(folder_of(tables), version).read_text().splitlines()
    (added,) = [json.loads(line)["add"] for line in lines if '"add"' in line]
    return dict(added)


def append_by_spark(tables: Tables, rows: pa.Table, mark: str) -> None:
    tables.append(tables.spark.createDataFrame(rows).coalesce(1), "alerts", mark)


@pytest.mark.long
def test_rows_are_read_back_as_those_that_spark_writes(tables: Tables) -> None:
    by_spark = Tables.local(tables.spark, Path(str(tables.root)).with_name("by-spark"))
    folder_of(by_spark).parent.mkdir(parents=True)
    shutil.copytree(folder_of(tables), folder_of(by_spark))
    assert append_directly(tables, ODD, "alerts", "q:1")
    append_by_spark(by_spark, ODD, "q:1")
    found, wanted = (
        sorted(each.read("alerts").toArrow().to_pylist(), key=lambda row: (row["arrival"], str(row)))
        for each in (tables, by_spark)
    )
    assert found == wanted
    assert len(found) == len(ODD)
    for condition in ("event_time < '1900-01-01'", "decided_at >= '1969-12-31 23:59:59.999999'", f"arrival = {2**62}"):
        counts = [each.read("alerts").where(condition).count() for each in (tables, by_spark)]
        assert counts[0] == counts[1] > 0, condition
    statistics = [json.loads(read_added(each, 1)["stats"]) for each in (tables, by_spark)]
    assert {**statistics[1], **statistics[0]} == statistics[1]
    columns = ("version", "userMetadata", "isBlindAppend")
    marks = [each.history("alerts", 1).select(*columns).collect() for each in (tables, by_spark)]
    assert marks[0] == marks[1]
    # A batch that is repeated after a kill finds what it has written.
    assert [is_written(tables, "alerts", mark) for mark in ("q:1", "q:2", "q")] == [True, False, False]


@pytest.mark.long
def test_delta_makes_its_checkpoints_and_a_cleaned_log_is_gone_on_with(tables: Tables) -> None:
    name = tables.identifier("alerts")
    tables.spark.sql(f"alter table {name} set tblproperties ('delta.checkpointInterval' = '4')")
    for number in range(9):
        assert append_directly(tables, alerts({"alert_id": str(number)}), "alerts", f"q:{number}")
    folder = folder_of(tables)
    assert sorted(int(file.name[:20]) for file in folder.glob("_delta_log/*.checkpoint.parquet")) == [4, 8]
    for version in range(8):
        commit_file(folder, version).unlink()
    assert append_directly(tables, alerts({"alert_id": "9"}), "alerts", "q:9")
    assert read_ids(tables) == [str(number) for number in range(10)]


def test_appends_by_spark_and_without_at_the_same_time_lose_nothing(tables: Tables) -> None:
    def write_by_spark() -> None:
        for number in range(8):
            append_by_spark(tables, alerts({"alert_id": f"spark-{number}"}), f"spark:{number}")

    thread = threading.Thread(target=write_by_spark)
    thread.start()
    number = 0
    while thread.is_alive():
        assert append_directly(tables, alerts({"alert_id": f"direct-{number}"}), "alerts", f"direct:{number}")
        number += 1
    thread.join()
    assert number > 1
    assert read_ids(tables) == sorted(
        [*(f"direct-{each}" for each in range(number)), *(f"spark-{each}" for each in range(8))]
    )


def alter(text: str) -> Callable[[Tables], None]:
    return lambda tables: tables.spark.sql(f"alter table {tables.identifier('alerts')} {text}") and None


def feature(name: str) -> Callable[[Tables], None]:
    return alter(f"set tblproperties ('delta.{name}' = 'true')")


@pytest.mark.parametrize(
    ("change", "is_direct"),
    [
        pytest.param(alter("add columns (team string)"), True, id="column"),
        pytest.param(feature("enableChangeDataFeed"), True, id="change-feed", marks=pytest.mark.long),
        pytest.param(feature("enableInCommitTimestamps"), True, id="commit-times", marks=pytest.mark.long),
        pytest.param(feature("enableDeletionVectors"), True, id="deletion-vectors", marks=pytest.mark.long),
        pytest.param(feature("enableRowTracking"), False, id="row-tracking", marks=pytest.mark.long),
        pytest.param(alter("add constraint short check (length(alert_id) < 9)"), False, id="constraint"),
        pytest.param(
            alter(
                "set tblproperties ('delta.columnMapping.mode' = 'name', 'delta.minReaderVersion' = '2', "
                "'delta.minWriterVersion' = '5')"
            ),
            False,
            id="column-mapping",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_table_that_others_have_altered_gets_the_rows_of_a_batch_once(
    change: Callable[[Tables], None], is_direct: bool, tables: Tables
) -> None:
    sink = Sink(tables, STREAM, "query")
    sink._append(alerts({"alert_id": "before"}), "alerts", "query:0")
    change(tables)
    for number in range(2):
        sink._append(alerts({"alert_id": f"after-{number}"}), "alerts", f"query:{number + 1}")
    assert read_ids(tables) == ["after-0", "after-1", "before"]
    rows = tables.history("alerts", 2).select("userMetadata", "operation").collect()
    assert [row["userMetadata"] for row in rows] == ["query:2", "query:1"]
    assert {row["operation"] for row in rows} == {"STREAMING UPDATE" if is_direct else "WRITE"}
    if is_direct:
        assert not append_directly(tables, alerts({}).drop_columns("alert_id"), "alerts", "query:9")
        assert not append_directly(tables, alerts({"alert_id": None}), "alerts", "query:9")


def test_a_partitioned_table_is_left_to_spark(tables: Tables) -> None:
    name = tables.identifier("alerts")
    tables.spark.sql(f"replace table {name} using delta partitioned by (stream) as select * from {name}")
    assert not append_directly(tables, alerts({}), "alerts", "q:1")


def test_tables_elsewhere_and_a_delta_without_these_classes_are_left_to_spark(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    for root in ("s3://bucket/root", "dbfs:/root"):
        assert not append_directly(Tables.local(tables.spark, root), alerts({}), "alerts", "q:1")
    with monkeypatch.context() as patch:
        patch.setenv("DATABRICKS_RUNTIME_VERSION", "17.3")
        assert not append_directly(tables, alerts({}), "alerts", "q:1")
    monkeypatch.setattr(appends, "_STREAMING_UPDATE", "DeltaOperations$SomethingElse")
    Sink(tables, STREAM, "query")._append(alerts({"alert_id": "once"}), "alerts", "query:1")
    assert read_ids(tables) == ["once"]


def test_rows_that_are_made_of_a_table_are_refused_once_others_have_written(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_at, write_file = tables.version("alerts"), appends._write_file

    def append(name: str) -> bool:
        return append_directly(tables, alerts({"alert_id": name}), "alerts", read_at=read_at)

    def write_second(*arguments: Any) -> dict[str, Any]:
        monkeypatch.setattr(appends, "_write_file", write_file)
        assert append("first")
        return write_file(*arguments)

    # Both have begun at the same commit.
    monkeypatch.setattr(appends, "_write_file", write_second)
    with pytest.raises(SPARK_ERRORS) as raised:
        append("second")
    assert is_conflict(raised.value)
    # It begins when the other one is there.
    with pytest.raises(TableChanged):
        append("third")
    assert read_ids(tables) == ["first"]
    (commit,) = tables.history("alerts", 1).select("operation", "isBlindAppend", "userMetadata").collect()
    assert tuple(commit) == ("WRITE", False, None)


def test_a_rule_is_published_without_a_job_of_spark(tables: Tables) -> None:
    def list_jobs() -> set[int]:
        return set(tables.spark.sparkContext.statusTracker().getJobIdsForGroup())

    rules = RulesTable(tables, STREAMS)
    rules.push(RULES[0], author="ann")
    before = list_jobs()
    assert rules.push({**RULES[0], "message": "{n}"}, author="ann", comment="why") == 2
    assert rules.set_status(RULES[0]["rule_id"], "paused", author="bob") == 3
    assert list_jobs() == before
    rows = tables.read("rules").orderBy("version").collect()
    assert [(row["version"], row["status"], row["author"], row["comment"]) for row in rows] == [
        (1, "active", "ann", ""), (2, "active", "ann", "why"), (3, "paused", "bob", ""),
    ]  # fmt: skip


def test_a_kill_between_data_and_commit_leaves_the_table_as_it_was(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_file = appends._write_file

    def write_and_die(*arguments: Any) -> None:
        write_file(*arguments)
        raise SystemExit

    monkeypatch.setattr(appends, "_write_file", write_and_die)
    with pytest.raises(SystemExit):
        append_directly(tables, alerts({"alert_id": "lost"}), "alerts", "q:1")
    assert len(list(folder_of(tables).glob("*.parquet"))) == 1
    assert read_ids(tables) == []
    assert not is_written(tables, "alerts", "q:1")

"""What a batch appends is read back as it was, once, whatever others do to the tables meanwhile."""

from __future__ import annotations

import datetime as dt
import threading
from typing import Any

import pyarrow as pa
import pytest

from lookback.core.streams.blocks import ALERTS_SCHEMA
from lookback.spark.batches.sink import is_written
from lookback.spark.tables.lakehouse import Tables
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


def append(tables: Tables, rows: pa.Table, mark: str) -> None:
    tables.append_arrow(rows, "alerts", mark)


def read_ids(tables: Tables) -> list[str]:
    return sorted(row["alert_id"] for row in tables.read("alerts").select("alert_id").collect())


@pytest.mark.long
def test_odd_rows_are_read_back_as_they_were(tables: Tables) -> None:
    append(tables, ODD, "q:1")
    found = tables.read("alerts").toArrow().select(ODD.column_names).cast(ODD.schema)
    assert sorted(found.to_pylist(), key=repr) == sorted(ODD.to_pylist(), key=repr)
    for condition in ("event_time < '1900-01-01'", "decided_at >= '1969-12-31 23:59:59.999999'", f"arrival = {2**62}"):
        assert tables.read("alerts").where(condition).count() > 0, condition
    # A batch that is repeated after a kill finds what it has written.
    assert [is_written(tables, "alerts", mark) for mark in ("q:1", "q:2", "q")] == [True, False, False]


@pytest.mark.long
def test_two_streams_that_append_at_the_same_time_lose_nothing(tables: Tables) -> None:
    def write(name: str) -> None:
        for number in range(8):
            append(tables, alerts({"alert_id": f"{name}-{number}"}), f"{name}:{number}")

    threads = [threading.Thread(target=write, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_ids(tables) == sorted(f"{name}-{number}" for name in ("a", "b") for number in range(8))


def alter(text: str) -> str:
    return f"alter table {{}} {text}"


def feature(name: str) -> str:
    return alter(f"set tblproperties ('delta.{name}' = 'true')")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(alter("add columns (team string)"), id="column"),
        pytest.param(feature("enableDeletionVectors"), id="deletion-vectors", marks=pytest.mark.long),
        pytest.param(feature("enableRowTracking"), id="row-tracking", marks=pytest.mark.long),
        pytest.param(
            alter("add constraint short check (length(alert_id) < 9)"), id="constraint", marks=pytest.mark.long
        ),
        pytest.param(
            alter(
                "set tblproperties ('delta.columnMapping.mode' = 'name', 'delta.minReaderVersion' = '2', "
                "'delta.minWriterVersion' = '5')"
            ),
            id="column-mapping",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "replace table {0} using delta partitioned by (stream) as select * from {0}",
            id="partitioned",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_table_that_others_have_altered_gets_the_rows_of_a_batch_once(change: str, tables: Tables) -> None:
    append(tables, alerts({"alert_id": "before"}), "query:0")
    tables.spark.sql(change.format(tables.identifier("alerts")))
    for number in range(2):
        append(tables, alerts({"alert_id": f"after-{number}"}), f"query:{number + 1}")
    assert read_ids(tables) == ["after-0", "after-1", "before"]
    rows = tables.history("alerts", 2).select("userMetadata").collect()
    assert [row["userMetadata"] for row in rows] == ["query:2", "query:1"]

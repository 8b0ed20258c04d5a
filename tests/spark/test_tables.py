"""The tables as the product creates them."""

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING

import pytest

from lookback.config import Settings
from lookback.core.errors import SetupError
from lookback.core.streams.declaration import Stream
from lookback.spark.tables.lakehouse import Tables
from lookback.spark.tables.logfiles import find_last_commit

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
COLUMNS = {
    "rejected_events": "stream raw reason source ingested_at read_as position",
    "rules": "rule_id version status document author comment changed_at approved_by evidence",
    "alerts": "alert_id revision verdict rule_id rule_version mode severity stream key event_id event_time window_start "
    "window_end window_complete measures message evidence arrival decided_at entities score change queue tags",
    "late_events": "stream event_id event_time arrival late_by_us action",
    "rule_log": "stream rule_id version action message batch_id arrival logged_at rules_commit position decision",
    "reviews": "alert_id disposition revision reviewer note reviewed_at",
    "labels": "stream event_id positive label labelled_at source author",
    "snoozes": "rule_id key from until reason author",
    "lists": "list value reason author added_at expires_at kind",
}
NOW = dt.datetime(2024, 3, 4, tzinfo=dt.timezone.utc)


def properties(tables: Tables, name: str) -> dict[str, str]:
    return {row.key: row.value for row in tables.spark.sql(f"show tblproperties {tables.identifier(name)}").collect()}


def test_c5_every_table_has_its_columns(created: Tables):
    for name, columns in COLUMNS.items():
        assert created.read(name).columns == columns.split()
    types = dict(created.read("alerts").dtypes)
    assert (types["key"], types["measures"]) == ("map<string,string>", "map<string,string>")
    assert (types["evidence"], types["arrival"], types["revision"]) == ("array<string>", "bigint", "int")
    assert (types["tags"], types["entities"]) == ("array<string>", "map<string,string>")


def test_c5_the_events_table_has_the_declared_fields_and_what_ingest_adds(created: Tables):
    fields = {
        field.name: (field.dataType.simpleString(), field.nullable) for field in created.read("transactions").schema
    }

    assert fields == {
        "transaction_id": ("bigint", False),
        "event_time": ("timestamp", False),
        "customer_id": ("int", True),
        "terminal_id": ("int", True),
        "amount": ("decimal(18,2)", True),
        "is_fraud": ("boolean", True),
        "fraud_scenario": ("int", True),
        "position": ("bigint", True),
        "ingested_at": ("timestamp", True),
    }


@pytest.mark.parametrize(("name", "days"), [("transactions", 30), ("rules", 3650), ("alerts", 30)])
def test_c5_what_is_replayed_has_a_change_feed_and_keeps_its_history(created: Tables, name: str, days: int):
    found = properties(created, name)

    assert found["delta.enableChangeDataFeed"] == found["delta.enableInCommitTimestamps"] == "true"
    assert found["delta.logRetentionDuration"] == found["delta.deletedFileRetentionDuration"] == f"interval {days} days"


def test_create_again_changes_nothing(created: Tables, transactions: Stream):
    created.create(transactions)

    assert [created.version(name) for name in ("transactions", *COLUMNS)] == [0] * (1 + len(COLUMNS))


def test_a_table_that_does_not_fit_the_declaration_is_refused(created: Tables, transactions: Stream):
    document = transactions.to_dict()
    document["fields"] = {**document["fields"], "amount": "int", "channel": "string"}

    with pytest.raises(SetupError, match=r"amount is decimal\(18,2\), declared as int; channel is missing"):
        created.create(Stream.from_dict(document))


def test_c4_any_row_can_be_put_into_rules(tables: Tables):
    tables.spark.sql(f"insert into {tables.identifier('rules')} (status) values ('nonsense'), (null)")

    assert tables.read("rules").count() == 2


@pytest.mark.parametrize("values", ["null, 'confirmed'", "'a1', 'sure'", "'a1', null"])
def test_a_review_needs_an_alert_and_a_known_disposition(created: Tables, values: str):
    with pytest.raises(Exception, match=r"DELTA_(VIOLATE_CONSTRAINT|NOT_NULL)"):
        created.spark.sql(
            f"insert into {created.identifier('reviews')} values ({values}, 0, 'me', '', current_timestamp())"
        )


def test_append_is_one_commit_that_carries_its_mark(tables: Tables):
    before = tables.version("rejected_events")
    rows = tables.spark.createDataFrame(
        [("s", "{}", "why", "f", NOW, None, None)], tables.read("rejected_events").schema
    )

    tables.append(rows, "rejected_events", "query-1:7")

    last = tables.delta("rejected_events").history(1).head()
    assert last is not None
    assert (last["version"], last["userMetadata"]) == (before + 1, "query-1:7")


def test_exists(created: Tables):
    assert created.exists("rules")
    assert not created.exists("payments")


@pytest.mark.parametrize(
    "name", ["../rules", "Rules", "a.b", "a.b.c.d", "a..b", "a.b.c`d", "", "a`b", "rules; drop table x"]
)
def test_a_name_that_is_no_table_name_is_refused(created: Tables, name: str):
    with pytest.raises(SetupError, match="not a table name"):
        created.identifier(name)


def test_identifiers(spark: SparkSession, tmp_path: Path):
    assert Tables.catalog(spark, "main", "fraud`x").identifier("rules") == "`main`.`fraud``x`.`rules`"
    assert Tables.local(spark, tmp_path / "a`b").identifier("rules") == f"delta.`{tmp_path}/a``b/rules`"
    assert Tables.local(spark, "s3://bucket/root/").path_or_name("rules") == "s3a://bucket/root/rules"


def test_a_bucket_out_of_reach_is_told_in_a_sentence(spark: SparkSession, tmp_path: Path):
    # The session of the tests has no JARs of S3.
    with pytest.raises(
        SetupError,
        match=r"Spark does not reach s3a://bucket/x: .*S3AFileSystem not found.* docs/how-to/object-store.md",
    ):
        Tables.of(spark, Settings("s3a://bucket/x", tmp_path))


def test_tables_of_a_catalog(spark: SparkSession, transactions: Stream):
    spark.sql("create schema spark_catalog.lookback_test")
    try:
        tables = Tables.catalog(spark, "spark_catalog", "lookback_test")
        assert not tables.exists("rules")
        tables.create(transactions)
        tables.append(spark.sql("select 'r' rule_id, 'active' status"), "rules")
        assert (tables.exists("rules"), tables.version("rules"), tables.read("rules").count()) == (True, 1, 1)
        assert "_commit_version" in tables.stream_changes("rules").columns
    finally:
        spark.sql("drop schema spark_catalog.lookback_test cascade")


def test_c3_1_the_change_feed_begins_with_the_first_commit(tables: Tables, tmp_path: Path):
    for rule in ("one", "two"):
        tables.append(tables.spark.sql(f"select '{rule}' rule_id"), "rules")
    out = tmp_path / "out"

    changes = tables.stream_changes("rules").select("rule_id", "_change_type", "_commit_version").writeStream
    changes.format("parquet").option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True).start(
        str(out)
    ).awaitTermination()

    rows = sorted(tuple(row) for row in tables.spark.read.parquet(str(out)).collect())
    assert rows == [("one", "insert", 1), ("two", "insert", 2)]


@pytest.mark.parametrize("last", [0, 1, 2, 3, 6, 7, 8, 9, 100])
@pytest.mark.parametrize("checkpoint", [None, 0, 1, 7])
def test_the_last_commit_is_found_by_the_names_of_files(last: int, checkpoint: int | None, tmp_path: Path) -> None:
    first = 0 if checkpoint is None else min(checkpoint, last)
    log = tmp_path / "_delta_log"
    log.mkdir()
    for commit in range(first, last + 1):
        (log / f"{commit:020d}.json").touch()
    if checkpoint is not None:
        (log / "_last_checkpoint").write_text(json.dumps({"version": first, "size": 1}))
    assert find_last_commit(tmp_path) == last


@pytest.mark.parametrize("pointer", [b"", b"{", b"[]", b'{"size": 1}', b'{"version": "x"}', b'{"version": 5}', b"\xff"])
def test_a_log_whose_pointer_cannot_be_read_is_left_to_delta(pointer: bytes, tmp_path: Path) -> None:
    log = tmp_path / "_delta_log"
    log.mkdir()
    (log / "00000000000000000003.json").touch()
    (log / "_last_checkpoint").write_bytes(pointer)
    assert find_last_commit(tmp_path) is None


def test_a_table_without_rows_is_known_by_its_log(tables: Tables) -> None:
    assert tables.is_unwritten("labels")
    assert not tables.may_have_rows("labels")
    assert not tables.may_have_rows("nothing")
    tables.spark.sql(f"CREATE TABLE delta.`{tables.root}/copied` USING delta AS SELECT 1 AS one")
    assert not tables.is_unwritten("copied")
    assert tables.may_have_rows("copied")
    tables.append_rows([("payins", "one", True, None, dt.datetime.now(dt.timezone.utc), None, "me")], "labels")
    assert tables.may_have_rows("labels")

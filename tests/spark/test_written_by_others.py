"""Events in a Delta table that others write: found wherever it is, judged row by row, never created or altered."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F  # noqa: N812

from lookback.core.errors import SetupError
from lookback.core.values.types import parse_type
from lookback.spark.checkpoints.checkpoint import Checkpoint
from lookback.spark.checkpoints.sparklogs import EVENTS
from lookback.spark.operations.catalog import AS_IT_SHOULD_BE, REFUSED, set_up
from lookback.spark.operations.forget import forget
from lookback.spark.operations.maintenance import maintain
from lookback.spark.operations.status import event_account, stream_status
from lookback.spark.replay.backtest import Candidate, backtest
from lookback.spark.replay.proof import prove
from lookback.spark.review import explain
from lookback.spark.rules import RulesTable
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from payins import (
    MORE_RULES,
    RULES,
    START,
    STREAM,
    make_events,
    publish,
    replay_of_tables,
    replayed_alerts,
    rule,
    stored_alerts,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark
PROPERTIES = "delta.enableChangeDataFeed = true, delta.enableInCommitTimestamps = true"
COLUMNS = ", ".join(f"{name} {type_}" for name, type_ in STREAM.fields.items())


def elsewhere(place: Path | str) -> Stream:
    return replace(STREAM, table=str(place))


def write(spark: SparkSession, place: Path, rows: list[dict[str, Any]], files: int = 3) -> None:
    """One commit of several files, in no order, with a column that nobody declared and none that ingest adds."""
    here = [tuple(row[name] for name in STREAM.fields) for row in rows]
    frame = spark.createDataFrame(here, "id string, at long, customer int, shop string, amount string")
    frame = frame.withColumn("at", F.timestamp_micros("at")).withColumn("amount", F.col("amount").cast("decimal(18,2)"))
    frame.withColumn("more", F.lit("x")).repartition(files, "id").write.format("delta").mode("append").save(str(place))


def evaluate(tables: Tables, stream: Stream, **options: Any) -> Evaluation:
    folder = checkpoint_folder(tables, stream)
    evaluation = Evaluation(tables, stream, {stream.name: stream}, folder, once=True, **options)
    evaluation.run()
    return evaluation


@pytest.mark.long
def test_rows_that_others_write_in_commits_of_several_files_are_judged_where_they_are(
    tables: Tables, spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING, "lookback")
    place = tmp_path / "their lake" / "pay-ins"
    spark.sql(f"CREATE TABLE delta.`{place}` ({COLUMNS}, more string) USING delta TBLPROPERTIES ({PROPERTIES})")
    stream = elsewhere(place)
    tables.create(stream)
    publish(tables, [*RULES, MORE_RULES[3]])
    events = make_events(100, seed=3)
    for arrival in (1, 2, 3):
        write(spark, place, [row for row in events if row["arrival"] == arrival])
    # No id, no time, and an id that is there already: the first two are no events, the last is one more.
    nothing = {"customer": 3, "shop": "a", "amount": "9999"}
    again = {**events[60], "amount": "49.5"}
    write(spark, place, [{**nothing, "id": None, "at": START}, {**nothing, "id": "n", "at": None}, again])

    evaluate(tables, stream)

    there = tables.holding(stream)
    assert stored_alerts(tables) == replayed_alerts(replay_of_tables(there, stream))
    assert {row.rule_id for row in stored_alerts(tables)} >= {"by-customer", "by-shop", "minutes"}
    assert f"2 rows of delta.`{place}` are not events and are ignored" in caplog.text

    before = stored_alerts(tables)
    evaluate(tables, stream, rebuild=True)
    assert stored_alerts(tables) == before

    # A commit that is cut between two batches is judged piece by piece, which is said.
    write(spark, place, [row for row in events if row["arrival"] == 4])
    evaluate(tables, stream, admission={"maxFilesPerTrigger": "1"})
    assert tables.read("rule_log").where("action = 'commit_cut'").count()
    assert event_account(tables, stream, 5).closes

    # Whatever looks for the events finds them there.
    status = stream_status(tables, stream, Checkpoint(Path(checkpoint_folder(tables, stream))))
    assert (status["events"], status["commits"], status["judged"]) == (101, 5, 5)
    alert = next(row for row in stored_alerts(tables) if row.rule_id == "by-customer")
    told = explain(tables, {stream.name: stream}, alert.alert_id)
    assert told.consistent
    assert forget(tables, stream, "customer = 3", dry_run=True).rows[stream.name] == sum(
        row["customer"] == 3 for row in [*events, again]
    )
    assert not Path(str(tables.root), stream.name).exists()
    assert "ingested_at" not in spark.read.format("delta").load(str(place)).columns


@pytest.mark.long
def test_a_table_that_cannot_be_followed_is_refused_with_what_to_run_and_then_followed_from_there(
    tables: Tables, spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING, "lookback")
    place = tmp_path / "late"
    stream = elsewhere(place)
    with pytest.raises(SetupError, match=r"table delta.`.*late` of stream 'payins' does not exist"):
        tables.create(stream)
    steps = {step.thing: step.done for step in set_up(tables, {stream.name: stream})}
    assert steps[f"table delta.`{place}`"].startswith(
        f"{REFUSED}table delta.`{place}` of stream 'payins' does not exist"
    )
    assert steps[f"table {tables.identifier('alerts')}"] == AS_IT_SHOULD_BE
    events = make_events(75, seed=5)
    write(spark, place, [row for row in events if row["arrival"] == 1])
    with pytest.raises(SetupError) as refused:
        tables.create(stream)
    assert "lacks a change feed, from which events are read and in-commit timestamps, by which" in str(refused.value)
    statement = re.search(r"ALTER TABLE .*? SET TBLPROPERTIES \(.*?\)", str(refused.value))
    assert statement
    spark.sql(statement[0])
    tables.create(stream)
    version = tables.holding(stream).version(stream.name)
    steps = {step.thing: step.done for step in set_up(tables, {stream.name: stream})}
    assert steps[f"table delta.`{place}`"] == "written by another program, left unchanged"
    done = maintain(tables, {stream.name: stream}, {stream.name: checkpoint_folder(tables, stream)})
    assert stream.name not in {each.table for each in done.tables}
    assert tables.holding(stream).version(stream.name) == version
    RulesTable(tables, {stream.name: stream}).push(RULES[2])
    write(spark, place, [row for row in events if row["arrival"] == 2])

    evaluate(tables, stream)

    plan = Checkpoint(Path(checkpoint_folder(tables, stream))).read_plan()
    assert plan is not None
    assert plan.starts[EVENTS] == 1
    assert "can be read only from commit 1 on: earlier rows are not evaluated" in caplog.text
    assert {row.arrival for row in stored_alerts(tables)} == {2}

    spark.sql(f"CREATE TABLE default.pay_ins ({COLUMNS}) USING delta TBLPROPERTIES ({PROPERTIES})")
    try:
        named = elsewhere("spark_catalog.default.pay_ins")
        tables.create(named)
        assert tables.holding(named).identifier("payins") == "`spark_catalog`.`default`.`pay_ins`"
        assert tables.holding(named).read("payins").columns == [*STREAM.fields, "ingested_at"]
        assert tables.holding(named).version("payins") == 0
        other = replace(named, fields={**STREAM.fields, "shop": STREAM.fields["customer"]})
        with pytest.raises(
            SetupError, match="does not match the stream's declaration: shop is string, declared as int"
        ):
            tables.create(other)
    finally:
        spark.sql("DROP TABLE default.pay_ins")


@pytest.mark.long
def test_columns_that_nobody_declared_may_be_renamed_and_dropped_while_the_stream_runs(
    tables: Tables, spark: SparkSession, tmp_path: Path
) -> None:
    place = tmp_path / "mapped"
    mapped = f"{PROPERTIES}, delta.columnMapping.mode = 'name'"
    spark.sql(
        f"CREATE TABLE delta.`{place}` ({COLUMNS}, more string, less string) USING delta TBLPROPERTIES ({mapped})"
    )
    stream = elsewhere(place)
    tables.create(stream)
    publish(tables, [rule("counted", when="n >= 1", message="")])
    evaluation = Evaluation(
        tables, stream, {stream.name: stream}, checkpoint_folder(tables, stream), every="1 second"
    ).start()
    try:
        for arrival, change in enumerate(("RENAME COLUMN less TO least", "DROP COLUMN least", ""), 1):
            write(spark, place, [row for row in make_events(100, seed=3) if row["arrival"] == arrival])
            commit = tables.holding(stream).version(stream.name)
            evaluation.wait_until(lambda report, last=commit: (report.arrival or 0) >= last, timeout=120)  # type: ignore[misc]
            if change:
                spark.sql(f"ALTER TABLE delta.`{place}` {change}")
    finally:
        evaluation.stop()
    stored = stored_alerts(tables)
    assert stored
    assert stored == replayed_alerts(replay_of_tables(tables.holding(stream), stream))


@pytest.mark.long
def test_columns_that_nobody_declared_may_be_renamed_and_dropped_and_a_declared_one_is_named_with_what_to_do(
    tables: Tables, spark: SparkSession, tmp_path: Path
) -> None:
    place = tmp_path / "mapped"
    mapped = f"{PROPERTIES}, delta.columnMapping.mode = 'name', delta.enableTypeWidening = true"
    spark.sql(
        f"CREATE TABLE delta.`{place}` ({COLUMNS}, more string, less string) USING delta TBLPROPERTIES ({mapped})"
    )
    stream, counted = elsewhere(place), rule("counted", when="n >= 1", message="")
    streams = {stream.name: stream}
    tables.create(stream)
    publish(tables, [counted])
    events = make_events(100, seed=3)

    def alter(what: str) -> None:
        spark.sql(f"ALTER TABLE delta.`{place}` {what}")

    def judge(arrival: int) -> int:
        write(spark, place, [row for row in events if row["arrival"] == arrival])
        evaluate(tables, stream)
        return len(stored_alerts(tables))

    assert judge(1) > 0
    alter("RENAME COLUMN less TO least")
    after_rename = judge(2)
    alter("DROP COLUMN least")
    assert judge(3) > after_rename > 0
    before = stored_alerts(tables)
    there = tables.holding(stream)
    assert before == replayed_alerts(replay_of_tables(there, stream))
    with prove(tables, stream, streams) as proofs:
        assert all(each.holds for each in proofs.rows)
    with backtest(tables, stream, [Candidate({**counted, "rule_id": "tried"})], streams=streams) as tried:
        assert len({row.alert_id for row in before}) == tried.figures[0].alerts
    evaluate(tables, stream, rebuild=True)
    assert stored_alerts(tables) == before

    alter("RENAME COLUMN shop TO store")
    folder = Checkpoint(Path(checkpoint_folder(tables, stream)))
    misfit = r"shop is missing, declared as string\. .* RENAME COLUMN its_current_name TO `shop`"
    for read in (lambda: evaluate(tables, stream), lambda: prove(tables, stream, streams)):
        with pytest.raises(SetupError, match=misfit):
            read()
    status = stream_status(tables, stream, folder)
    assert not status["healthy"]
    assert re.search(misfit, status["findings"][0]["what"])
    alter("RENAME COLUMN store TO shop")
    evaluate(tables, stream)
    assert stored_alerts(tables) == before

    alter("ALTER COLUMN customer TYPE bigint")
    with pytest.raises(SetupError, match=r"customer is bigint, declared as int\. Declare the table's type"):
        evaluate(tables, stream)
    wider = replace(stream, fields={**stream.fields, "customer": parse_type("bigint")})
    evaluate(tables, wider, rebuild=True)
    assert stored_alerts(tables) == before

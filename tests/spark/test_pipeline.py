"""The stream on real Spark, Delta and RocksDB, against replay, which the oracle checks in turn."""

from __future__ import annotations

import datetime as dt
import json
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F  # noqa: N812

import lookback
from lookback.core.errors import SetupError
from lookback.spark.batches.dispatch import find_shard_labels
from lookback.spark.batches.sink import BatchReport
from lookback.spark.checkpoints.checkpoint import Checkpoint, repartition
from lookback.spark.following.rulewatch import RulesWatch
from lookback.spark.newwindows import NewWindows
from lookback.spark.operations.status import event_account
from lookback.spark.rules import RulesTable
from lookback.spark.stream import pipeline
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from payins import (
    MORE_RULES,
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

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark


def evaluate(tables: Tables, **options: Any) -> Evaluation:
    evaluation = Evaluation(tables, STREAM, STREAMS, checkpoint_folder(tables, STREAM), once=True, **options)
    evaluation.run()
    account = event_account(tables, STREAM, Checkpoint(Path(checkpoint_folder(tables, STREAM))).read_last_judged())
    assert account.closes, account
    assert not account.waiting
    return evaluation


@pytest.mark.long
@pytest.mark.parametrize("files_per_batch", ["1", "1000"])
def test_c3_1_stream_equals_replay_however_batches_are_cut(ready: Tables, files_per_batch: str) -> None:
    publish(ready, RULES)
    events = make_events(200, seed=7)
    append(ready, events)
    evaluation = evaluate(ready, admission={"maxFilesPerTrigger": files_per_batch})
    # A table's first commit is 1 and the harness counts from 1 too: arrivals are the same numbers.
    assert len([report for report in evaluation.reports if report.events]) == (8 if files_per_batch == "1" else 1)
    expected = lookback.replay(RULES, events, STREAM)
    assert stored_alerts(ready) == replayed_alerts(expected)
    late = ready.read("late_events").withColumn("at", F.unix_micros("event_time")).collect()
    assert {(r["event_id"], r["arrival"], r["late_by_us"], r["action"]) for r in late} == {
        (row.event_id, row.arrival, row.late_by_us, row.action) for row in expected.late_events
    }
    assert {row.action for row in expected.late_events} == {"evaluated", "discarded"}
    failed = ready.read("rule_log").where("action = 'failed'").select("rule_id").distinct().collect()
    assert [row["rule_id"] for row in failed] == ["pair"]


@pytest.mark.long
def test_c8_a_stop_in_the_middle_of_a_batch_ends_the_query_without_an_error(ready: Tables) -> None:
    publish(ready, RULES)
    append(ready, make_events(50, seed=5))
    is_running = threading.Event()

    def wait_in_spark(report: Any) -> None:
        # Spark interrupts a long job of the batch, and the error in Python has the stack trace of it.
        is_running.set()
        ready.spark.range(0, 10**13, 1, 1).selectExpr("max(id % 7)").collect()

    evaluation = Evaluation(ready, STREAM, STREAMS, checkpoint_folder(ready, STREAM), on_batch=wait_in_spark).start()
    assert is_running.wait(180)
    query = evaluation._query
    assert query is not None
    evaluation.stop()
    # The message is another one where the query's thread died of an error.
    assert query.status["message"] == "Stopped"
    assert query.exception() is None
    evaluate(ready)
    assert stored_alerts(ready) == replayed_alerts(lookback.replay(RULES, make_events(50, seed=5), STREAM))


@pytest.mark.long
def test_c3_1_a_batch_whose_events_all_alert_is_written_whole_and_in_order(ready: Tables) -> None:
    # More than a shard packs together.
    events = [
        {"id": f"e{at:05}", "at": START + at * 1_000, "customer": at % 7, "shop": "a", "amount": "1.00", "arrival": 1}
        for at in range(25_000)
    ]
    document = rule("flood", when="n >= 1")
    publish(ready, [document])
    append(ready, events)
    evaluate(ready, shards=2)
    assert stored_alerts(ready) == replayed_alerts(lookback.replay([document], events, STREAM))
    written = [row["event_id"] for row in ready.read("alerts").coalesce(1).collect()]
    assert written == [each["id"] for each in events]


@pytest.mark.parametrize(("shards", "files_per_batch"), [(3, "2")])
def test_c3_every_kind_of_rule_gives_what_replay_gives_for_any_cut_and_shard_count(
    ready: Tables, spark: SparkSession, shards: int, files_per_batch: str
) -> None:
    rules = RulesTable(ready, STREAMS)
    publish(ready, MORE_RULES)
    events = make_events(300, seed=24)
    append(ready, [row for row in events if row["arrival"] <= 7])
    evaluate(ready, admission={"maxFilesPerTrigger": files_per_batch}, shards=shards)
    # The watermark by command, and versions in force while windows, matches and waits are open.
    rules.command("advance", STREAM.name, time=START + 250_000_000)
    rules.push({**MORE_RULES[3], "message": "{n}"})
    rules.push({**MORE_RULES[8], "severity": "low"})
    append(ready, [row for row in events if row["arrival"] > 7])
    evaluate(ready, admission={"maxFilesPerTrigger": files_per_batch})
    spark.sql(f"UPDATE {ready.identifier('rules')} SET version = NULL WHERE rule_id = '*'")
    found = stored_alerts(ready)
    assert found == replayed_alerts(replay_of_tables(ready))
    assert {row.rule_id for row in found} == {document["rule_id"] for document in MORE_RULES}
    assert {row.verdict for row in found} == {"raised", "suppressed", "retracted"}


@pytest.mark.long
def test_c3_2_idle_after_moves_the_watermark_and_silence_raises_alerts(ready: Tables) -> None:
    rules = RulesTable(ready, STREAMS)
    publish(ready, [MORE_RULES[3], MORE_RULES[8]])
    append(ready, make_events(25, seed=3))
    folder = checkpoint_folder(ready, STREAM)
    options = {"every": "100 milliseconds", "idle_after": 1_000_000}
    evaluation = Evaluation(ready, STREAM, STREAMS, folder, **options).start()
    evaluation.wait_until(lambda report: report.arrival == 1, 60)
    before = evaluation.reports[-1].watermark
    moved = evaluation.wait_until(lambda report: (report.watermark or 0) > (before or 0), 60)
    assert moved.watermark == before + 1_000_000
    evaluation.stop()
    log = ready.read("rule_log").where("action = 'advance'").collect()
    assert [(row["rule_id"], row["arrival"]) for row in log[:1]] == [("*", 1)]
    assert log[0]["message"].startswith("to 2023-11-1")
    rules.command("advance", STREAM.name, time="2023-11-15T00:00:00Z")
    evaluate(ready)
    events = make_events(25, seed=3)
    harness = lookback.Harness(STREAM)
    for document in (MORE_RULES[3], MORE_RULES[8]):
        harness.rule(document)
    harness.events(events)
    harness.watermark("2023-11-15T00:00:00Z")
    assert stored_alerts(ready) == replayed_alerts(lookback.Result(alerts=harness.alerts))
    assert {row.rule_id for row in stored_alerts(ready)} == {"minutes", "silent"}


@pytest.mark.long
def test_c3_7_changes_of_rules_between_runs_equal_replay_at_logged_arrivals(
    ready: Tables, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = RulesTable(ready, STREAMS)
    events = make_events(200, seed=11)
    rules.push(RULES[0])
    append(ready, [row for row in events if row["arrival"] <= 3])
    evaluate(ready)
    # A grouping set that dispatch did not send, a new limit, and a rule by plain SQL.
    rules.push(rule("by-customer", when="n >= 2"))
    document = json.dumps(RULES[1])
    spark.sql(
        f"INSERT INTO {ready.identifier('rules')} (rule_id, version, status, document, author, comment, changed_at) "
        f"VALUES ('by-shop', NULL, 'shadow', '{document}', 'me', NULL, now())"
    )
    append(ready, [row for row in events if 3 < row["arrival"] <= 6])
    evaluate(ready)
    rules.set_status("by-customer", "paused")
    append(ready, [row for row in events if row["arrival"] > 6])
    # A machine with other cores: the checkpoint's shards stay as they are.
    monkeypatch.setattr(pipeline, "count_cores", lambda _: 3)
    evaluate(ready)
    log = [
        (r["rule_id"], r["version"], r["action"], r["arrival"])
        for r in ready.read("rule_log").collect()
        if r["action"] not in ("failed", "declared")
    ]
    assert sorted(log, key=repr) == sorted(
        [
            ("by-customer", 1, "activated", None),
            ("by-customer", 2, "activated", 3),
            ("by-shop", 1, "shadowed", 3),
            ("by-customer", 3, "paused", 6),
        ],
        key=repr,
    )
    spark.sql(f"UPDATE {ready.identifier('rules')} SET version = 1 WHERE version IS NULL")
    assert stored_alerts(ready) == replayed_alerts(replay_of_tables(ready))


def test_c3_7_a_rule_inserted_by_sql_while_the_stream_runs_is_obeyed(
    ready: Tables, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def insert(document: dict[str, Any]) -> None:
        values = f"'{document['rule_id']}', 1, 'active', '{json.dumps(document)}', 'me', '', now()"
        columns = "rule_id, version, status, document, author, comment, changed_at"
        spark.sql(f"INSERT INTO {ready.identifier('rules')} ({columns}) VALUES ({values})")

    # The batch that has read these events ends when they are let go, so that no batch follows before.
    held = {3: threading.Event(), 5: threading.Event()}

    def hold(report: BatchReport) -> None:
        if report.arrival in held:
            held[report.arrival].wait(180)

    def covered() -> list[tuple[str, ...]]:
        plan = evaluation.checkpoint.read_plan()
        return [] if plan is None else plan.coverage.grouping_sets

    events = make_events(150, seed=17)
    publish(ready, [RULES[0]])
    folder = checkpoint_folder(ready, STREAM)
    evaluation = Evaluation(ready, STREAM, STREAMS, folder, every="100 milliseconds", on_batch=hold).start()
    append(ready, [row for row in events if row["arrival"] <= 2])
    evaluation.wait_until(lambda report: report.arrival == 2, 180)
    with pytest.raises(SetupError, match=rf"checkpoint {folder} is in use by process {os.getpid()} of "):
        evaluate(ready)
    insert(rule("known-key", when="n >= 2"))
    evaluation.wait_until(lambda report: any(row["rule_id"] == "known-key" for row in report.log), 180)
    # A grouping set that dispatch does not send yet: it learns of it before the batch that brings the rule.
    append(ready, [row for row in events if row["arrival"] == 3])
    evaluation.wait_until(lambda report: report.arrival == 3, 180)
    insert(rule("new-key", group_by=["shop", "customer"], when="n >= 1"))
    deadline = time.monotonic() + 180
    while ("customer", "shop") not in covered() and time.monotonic() < deadline:
        time.sleep(0.05)
    append(ready, [row for row in events if row["arrival"] == 4])
    held[3].set()
    evaluation.wait_until(lambda report: report.arrival == 4, 180)
    assert evaluation.replans == 0
    # Where nobody tells it, the batch fails and the query is planned anew in place.
    monkeypatch.setattr(RulesWatch, "follow_if_due", lambda watch, report: None)
    append(ready, [row for row in events if row["arrival"] == 5])
    evaluation.wait_until(lambda report: report.arrival == 5, 180)
    insert(rule("newer-key", group_by=["shop"], when="n >= 1"))
    append(ready, [row for row in events if row["arrival"] > 5])
    held[5].set()
    evaluation.wait_until(lambda report: report.arrival == 6, 180)
    assert evaluation.replans == 1
    evaluation.stop()
    assert stored_alerts(ready) == replayed_alerts(replay_of_tables(ready))
    assert {row["rule_id"] for row in ready.read("alerts").collect()} == {
        "by-customer",
        "known-key",
        "new-key",
        "newer-key",
    }


@pytest.mark.long
def test_c3_1_state_can_be_divided_among_more_partitions(ready: Tables) -> None:
    folder = checkpoint_folder(ready, STREAM)
    publish(ready, [*RULES[:2], MORE_RULES[-1]])
    events = make_events(120, seed=23)
    with pytest.raises(SetupError, match="is not the checkpoint of an evaluation"):
        repartition(ready.spark, folder, 3)
    append(ready, [row for row in events if row["arrival"] <= 3])
    evaluate(ready, shards=3)
    with pytest.raises(SetupError, match="into 3 shards, so its state has 1 to 3 partitions, not 4"):
        repartition(ready.spark, folder, 4)
    repartition(ready.spark, folder, 3)
    assert len([path for path in Path(folder, "state", "0").iterdir() if path.name.isdigit()]) == 3
    append(ready, [row for row in events if row["arrival"] > 3])
    evaluate(ready)
    assert stored_alerts(ready) == replayed_alerts(replay_of_tables(ready))


@pytest.mark.long
def test_c4_plain_sql_update_and_delete_and_equal_commands_are_obeyed_and_logged_each(
    ready: Tables, spark: SparkSession
) -> None:
    rules = RulesTable(ready, STREAMS)
    publish(ready, [rule("once", when="n >= 1"), rule("gone", when="n >= 1")])
    events = make_events(75, seed=3)
    append(ready, [row for row in events if row["arrival"] == 1])
    evaluate(ready)
    table, columns = ready.identifier("rules"), "rule_id, version, status, document, author, comment, changed_at"
    spark.sql(f"UPDATE {table} SET status = 'paused' WHERE rule_id = 'once'")
    spark.sql(f"DELETE FROM {table} WHERE rule_id = 'gone'")
    spark.sql(
        f"INSERT INTO {table} ({columns}) VALUES ('once', 1, 'active', '{json.dumps(rule('once'))}', '', '', now())"
    )
    spark.sql(f"INSERT INTO {table} ({columns}) VALUES ('bad', 1, 'active', 'no json', '', '', now())")
    # Nothing tells their rows in the log apart, and there are two.
    for _ in range(2):
        rules.command("clear_state", STREAM.name)
    append(ready, [row for row in events if row["arrival"] == 2])
    evaluate(ready)
    assert {row["arrival"] for row in ready.read("alerts").select("arrival").distinct().collect()} == {1}
    log = ready.read("rule_log").where("arrival = 1").collect()
    assert sorted((row["rule_id"], row["action"]) for row in log) == [
        ("*", "clear_state"), ("*", "clear_state"),
        ("bad", "rejected"), ("gone", "retired"), ("once", "paused"), ("once", "rejected"),
    ]  # fmt: skip
    superseded = next(row for row in log if row["rule_id"] == "once" and row["action"] == "rejected")
    assert "superseded: version 1 is not above version 1" in superseded["message"]


@pytest.mark.long
def test_c8_a_batch_repeated_after_its_output_was_written_writes_nothing_twice(ready: Tables) -> None:
    publish(ready, [RULES[0]])
    events = make_events(100, seed=5)
    append(ready, [row for row in events if row["arrival"] <= 2])
    evaluate(ready)
    append(ready, [row for row in events if row["arrival"] > 2])
    evaluate(ready)
    before = stored_alerts(ready)
    # As if the process had died after the sinks' commits and before the batch was marked as done.
    commits = Path(checkpoint_folder(ready, STREAM)) / "commits"
    last = max((file for file in commits.iterdir() if file.name.isdigit()), key=lambda file: int(file.name))
    for file in (last, commits / f".{last.name}.crc"):
        file.unlink(missing_ok=True)
    versions = {name: ready.version(name) for name in ("alerts", "late_events", "rule_log")}
    evaluate(ready)
    assert {name: ready.version(name) for name in versions} == versions
    append(ready, [{**row, "id": f"more-{row['id']}", "arrival": 9} for row in events[-5:]])
    evaluate(ready)
    assert [row for row in stored_alerts(ready) if row.arrival <= 4] == before
    assert stored_alerts(ready) == replayed_alerts(replay_of_tables(ready))


@pytest.mark.long
def test_c3_2_event_from_the_future_moves_no_watermark(ready: Tables) -> None:
    publish(ready, [rule("any", when="n >= 1")])
    events = make_events(25, seed=1)
    future = int(dt.datetime(2099, 1, 1, tzinfo=dt.timezone.utc).timestamp()) * 1_000_000
    first, second = (
        [*events, {**events[0], "id": "future", "at": future}],
        [{**events[-1], "id": "after", "arrival": 2}],
    )
    append(ready, first)
    append(ready, second)
    evaluate(ready)
    # A replay that does not know when commits were made does the same.
    assert stored_alerts(ready) == replayed_alerts(
        lookback.replay([rule("any", when="n >= 1")], [*first, *second], STREAM)
    )
    late = {row["event_id"]: row for row in ready.read("late_events").collect()}
    assert late["future"]["action"] == "discarded"
    assert late["future"]["late_by_us"] < 0
    assert "after" not in late
    assert "future" not in {row["event_id"] for row in ready.read("alerts").collect()}


@pytest.mark.long
def test_c3_4_times_before_1970_are_times_like_any_other(ready: Tables) -> None:
    publish(ready, [RULES[0]])
    events = [{**row, "at": row["at"] - 2 * START} for row in make_events(100, seed=9)]
    for part in ((1, 2), (3, 4)):
        append(ready, [row for row in events if row["arrival"] in part])
        evaluate(ready)
    assert stored_alerts(ready) == replayed_alerts(lookback.replay([RULES[0]], events, STREAM))


@pytest.mark.long
def test_c3_1_deleted_rows_leave_state_from_their_commit_on(ready: Tables, spark: SparkSession) -> None:
    publish(ready, [rule("seen", when="n >= 1")])
    events = [
        {"id": f"d{at}", "at": START + at, "customer": 1, "shop": "a", "amount": "1.00", "arrival": at + 1}
        for at in range(3)
    ]
    append(ready, events[:2])
    evaluate(ready)
    spark.sql(f"DELETE FROM {ready.identifier(STREAM.name)} WHERE id = 'd0'")
    append(ready, [{**events[2], "arrival": 1}])
    evaluate(ready)
    counts = {row["event_id"]: row["measures"]["n"] for row in ready.read("alerts").collect()}
    assert counts == {"d0": "1", "d1": "2", "d2": "2"}


@pytest.mark.long
def test_state_is_pages_in_rocksdb_and_falls_when_the_watermark_passes(ready: Tables, spark: SparkSession) -> None:
    publish(ready, [rule("kept", when="n > 1000")])
    append(ready, make_events(100, seed=2))
    full = evaluate(ready).reports[-1]
    assert full.state_rows > 80
    folder = checkpoint_folder(ready, STREAM)

    def runs() -> set[str]:
        pages = spark.read.format("statestore").option("stateVarName", "pages").load(folder)
        names = {row[0] for row in pages.select("user_map_key.name").collect()}
        assert "manifest" in names
        return {name for name in names if name.startswith("run:")}

    early = runs()
    assert early
    for day in (1, 2):
        later = {"id": f"later-{day}", "at": START + day * 86_400_000_000, "customer": 1, "shop": "a", "amount": "1.00"}
        append(ready, [{**later, "arrival": 1}])
        evaluate(ready)
    # Each shard dropped the pages of the first events when the watermark passed their windows.
    assert not early & runs()


def test_c3_8_push_can_warn_of_a_long_window_that_starts_empty(ready: Tables) -> None:
    rules = RulesTable(ready, STREAMS)
    long = rule(
        "long", window="30 days", measures={"n": "count(*)", "m": {"measure": "sum(amount)", "window": "1 day"}}
    )
    long["when"] = "n > 1 or m > 1"
    long["message"] = ""
    append(ready, make_events(1, seed=1))
    assert NewWindows(rules).find_cold_measures(rules.check(long)) == ["n"]
    rules.push(long)
    other = rules.check(rule("other", window="7 days"))
    assert NewWindows(rules).find_cold_measures(other) == ["top"]  # sums are kept already


def test_shard_labels_land_on_their_own_partitions(spark: SparkSession) -> None:
    labels = find_shard_labels(spark, 5)
    frame = spark.createDataFrame([(label,) for label in labels], "label string").repartition(5, "label")
    where = {row["label"]: row["at"] for row in frame.select("label", F.spark_partition_id().alias("at")).collect()}
    assert where == {label: at for at, label in enumerate(labels)}

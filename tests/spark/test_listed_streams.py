"""Lists that change while a stream runs: obeyed between two commits, logged, and seen by every replay (contract 11.3)."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F  # noqa: N812

import lookback
from alert_rows import AlertRow, collect_alerts, list_alerts
from lookback.spark.checkpoints.checkpoint import Checkpoint
from lookback.spark.checkpoints.listfiles import ListFiles
from lookback.spark.explaining.explanations import explain, explain_event
from lookback.spark.lists import add_values, remove_values
from lookback.spark.replay.backtest import Candidate, backtest
from lookback.spark.replay.history import History
from lookback.spark.replay.proof import prove
from lookback.spark.replay.trials import Course
from lookback.spark.rules import RulesTable
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from lookback.spark.tables.folders import open_folders
from payins import (
    RULES,
    START,
    STREAM,
    STREAMS,
    append,
    forget_commit,
    make_events,
    outputs,
    publish,
    rule,
    stored_alerts,
    window,
)

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark
EVENTS = make_events(300, seed=24)
LISTED = [
    rule("seen", where="in_list(shop, 'watched')"),
    rule("judged", when="n >= 2 and in_list(customer, 'vips')"),
    window(
        "counted",
        {"tumbling": "1 minute"},
        when="n >= 2",
        message="{n}",
        measures={"n": "count(*) filter (where not in_list(shop, 'watched'))"},
    ),
]


class Killed(Exception):
    pass


COLUMNS = ("version", "arrival", "message")


def evaluate(tables: Tables, **options: Any) -> Evaluation:
    evaluation = Evaluation(tables, STREAM, STREAMS, checkpoint_folder(tables, STREAM), once=True, **options)
    evaluation.run()
    return evaluation


def part(first: int, last: int) -> list[dict[str, Any]]:
    return [row for row in EVENTS if first <= row["arrival"] <= last]


def sql(tables: Tables, statement: str) -> None:
    tables.spark.sql(statement.format(tables.identifier("lists")))


def logged(tables: Tables) -> list[tuple[Any, ...]]:
    rows = tables.read("rule_log").where("action = 'list'").orderBy("version").select("rule_id", *COLUMNS).collect()
    assert {row["rule_id"] for row in rows} <= {"*"}
    return [tuple(row[name] for name in COLUMNS) for row in rows]


def change_often(tables: Tables) -> list[tuple[dict[str, Any], int | None]]:
    """Judges all events, with changes of every kind in between. Returns the lists as they were, each from an arrival on."""
    publish(tables, LISTED)
    append(tables, part(1, 3))
    evaluate(tables)
    sql(tables, "INSERT INTO {} (list, value) VALUES ('watched', 'a'), ('vips', '3'), ('unused', 'x')")
    append(tables, part(4, 6))
    evaluate(tables)
    end = START + 220_000_000
    # A bound amid the events, to the microsecond.
    sql(tables, f"UPDATE {{}} SET expires_at = timestamp_micros({end}) WHERE value = 'a'")
    sql(
        tables,
        "MERGE INTO {} AS t USING (SELECT 'watched' AS list, 'ü' AS value) AS s ON t.value = s.value "
        "WHEN NOT MATCHED THEN INSERT (list, value) VALUES (s.list, s.value)",
    )
    append(tables, part(7, 9))
    evaluate(tables)
    sql(tables, "DELETE FROM {} WHERE value = '3'")
    remove_values(tables, "watched", ["a"])
    append(tables, part(10, 12))
    evaluate(tables)
    first: dict[str, Any] = {"watched": ["a"], "vips": ["3"], "unused": ["x"]}
    return [
        (first, 3), ({"watched": [{"value": "a", "expires_at": end}, "ü"]}, 6), ({"vips": [], "watched": ["ü"]}, 9),
    ]  # fmt: skip


@pytest.mark.long
def test_c11_1_a_history_is_told_the_same_of_the_log_with_spark_and_without(ready: Tables) -> None:
    change_often(ready)
    rules = RulesTable(ready, STREAMS)
    rules.command("advance", STREAM.name, time=START + 900_000_000)
    rules.command("clear_state", STREAM.name)
    evaluate(ready)
    history, root = History.read(ready, STREAM), ready.root
    assert root is not None

    def read(tables: Tables) -> Course:
        return Course.read(tables, STREAM, history, ["watched", "vips"], only_logged=True)

    def read_twice() -> Course:
        by_spark = read(ready)
        with open_folders(root) as folders:
            found, document = read(folders), replace(rules, tables=folders).find_document("seen", 1)
        assert {change.status for change, _ in by_spark.commands} == {"advance", "clear_state", "lists"}
        assert by_spark.lists.steps.keys() == {"watched", "vips"}
        assert (found.commands, found.declarations, found.warnings, found.lists.steps) == (
            by_spark.commands, by_spark.declarations, by_spark.warnings, by_spark.lists.steps,
        )  # fmt: skip
        assert document == rules.find_document("seen", 1)
        return found

    assert {after for _, after in read_twice().commands} == {3, 6, 9, 12}
    # Another evaluation obeys all of it before the first commit.
    Evaluation(ready, STREAM, STREAMS, f"{checkpoint_folder(ready, STREAM)}-2", once=True, fresh=True).run()
    assert {after for _, after in read_twice().commands} == {None}


def replayed(lists: list[tuple[dict[str, Any], int | None]], rules: list[dict[str, Any]] = LISTED) -> list[AlertRow]:
    return sorted(list_alerts(lookback.replay(rules, EVENTS, STREAM, lists=lists)))


@pytest.mark.long
def test_c11_3_changes_between_commits_are_obeyed_logged_and_replayed_alike(ready: Tables) -> None:
    lists = change_often(ready)
    assert logged(ready) == [
        (1, 3, "unused: 1 added; vips: 1 added; watched: 1 added"),
        (2, 6, "watched: 1 changed"),
        (3, 6, "watched: 1 added"),
        (4, 9, "vips: 1 removed"),
        (5, 9, "watched: 1 removed"),
    ]
    alerts = stored_alerts(ready)
    assert {row.rule_id for row in alerts} == {each["rule_id"] for each in LISTED}
    assert alerts == replayed(lists) != replayed([])
    # Nobody sees the rows by which changes travel.
    assert {row.rule_id for row in RulesTable(ready, STREAMS).list_rows()} == {each["rule_id"] for each in LISTED}

    for rule_id in ("seen", "counted"):
        (alert, *_) = (row for row in alerts if row.rule_id == rule_id and row.arrival > 6)
        assert explain(ready, STREAMS, alert.alert_id, revision=alert.revision).consistent
    (early, *_) = (row["id"] for row in part(2, 3) if row["shop"] == "a")
    (reason,) = explain_event(ready, STREAMS, "seen", early).reasons
    assert (reason.name, "before the first commit of table lists" in reason.text) == ("list", True)

    with prove(ready, STREAM, STREAMS) as proofs:
        assert all(row.holds and not row.unprovable for row in proofs.rows), proofs.rows
        assert sum(row.alike for row in proofs.rows if row.rule_id) == len(alerts)

    with backtest(ready, STREAM, [Candidate(each) for each in LISTED]) as result:
        assert sorted(collect_alerts(result.alerts)) == alerts
    now: dict[str, Any] = {"watched": ["ü"], "unused": ["x"]}
    with backtest(ready, STREAM, [Candidate(each) for each in LISTED], lists_now=True) as result:
        assert sorted(collect_alerts(result.alerts)) == replayed([(now, None)]) != alerts

    expected = outputs(ready)
    # The last batch is cut short and repeated, and the files of lists are lost.
    forget_commit(ready, "alerts")
    shutil.rmtree(Checkpoint(Path(checkpoint_folder(ready, STREAM))).parcels("lists").folder)
    evaluate(ready, rebuild=True)
    assert outputs(ready) == expected


@pytest.mark.long
def test_c11_3_a_backtest_obeys_what_one_batch_obeyed_in_its_order(
    ready: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = window("counted", {"tumbling": "1 hour"}, when="n >= 1 and in_list(customer, 'vips')")
    publish(ready, [listed])
    append(ready, part(1, 12))
    evaluate(ready)
    announce = RulesTable.announce_lists

    def announce_and_advance(rules: RulesTable, *args: Any) -> None:
        announce(rules, *args)
        rules.command("advance", STREAM.name, time=START + 7_200_000_000)
        # Were it obeyed first, no window would be left to end.
        rules.command("clear_state", STREAM.name)

    monkeypatch.setattr(RulesTable, "announce_lists", announce_and_advance)
    add_values(ready, "vips", ["3"])
    evaluate(ready)
    obeyed = ready.read("rule_log").where("action in ('list', 'advance', 'clear_state')")
    assert obeyed.select("batch_id").distinct().count() == 1
    assert [row["action"] for row in obeyed.orderBy("position").collect()] == ["list", "advance", "clear_state"]
    alerts = stored_alerts(ready)
    (alert,) = alerts
    assert explain(ready, STREAMS, alert.alert_id).consistent
    with backtest(ready, STREAM, [Candidate(listed)]) as result:
        assert sorted(collect_alerts(result.alerts)) == alerts
    with prove(ready, STREAM, STREAMS) as proofs:
        assert all(row.holds for row in proofs.rows), proofs.rows


@pytest.mark.long
def test_c11_3_commits_that_nobody_logged_count_by_their_time(ready: Tables) -> None:
    append(ready, part(1, 3))
    sql(ready, "INSERT INTO {} (list, value) VALUES ('watched', 'a'), ('vips', '3')")
    append(ready, part(4, 6))
    sql(ready, "DELETE FROM {} WHERE value = 'a'")
    append(ready, part(7, 12))
    with backtest(ready, STREAM, [Candidate(each) for each in LISTED]) as result:
        first: dict[str, Any] = {"watched": ["a"], "vips": ["3"]}
        assert sorted(collect_alerts(result.alerts)) == replayed([(first, 3), ({"watched": []}, 6)])


@pytest.mark.long
def test_c11_3_a_kill_between_the_files_and_the_row_that_names_them_counts_nothing_twice(
    ready: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(ready, LISTED)
    append(ready, part(1, 2))
    evaluate(ready)
    for value in ("a", "ü"):
        sql(ready, f"INSERT INTO {{}} (list, value) VALUES ('watched', '{value}')")

    def kill(*_: object) -> None:
        raise Killed

    monkeypatch.setattr(RulesTable, "announce_lists", kill)
    with pytest.raises(Killed):
        evaluate(ready)
    monkeypatch.undo()
    append(ready, part(3, 6))
    evaluate(ready)
    sql(ready, "DELETE FROM {} WHERE value = 'a'")
    append(ready, part(7, 12))
    evaluate(ready)
    assert [row[:2] for row in logged(ready)] == [(1, 2), (2, 2), (3, 6)]
    lists: list[tuple[dict[str, Any], int | None]] = [({"watched": ["a", "ü"]}, 2), ({"watched": ["ü"]}, 6)]
    assert stored_alerts(ready) == replayed(lists)


@pytest.mark.long
def test_c11_3_a_first_evaluation_takes_all_lists_from_the_start_and_lost_files_come_again(ready: Tables) -> None:
    publish(ready, [*LISTED, RULES[0]])
    sql(ready, "INSERT INTO {} (list, value) VALUES ('watched', 'a')")
    sql(ready, "INSERT INTO {} (list, value) VALUES ('vips', '3')")
    append(ready, part(1, 6))
    evaluate(ready)
    assert logged(ready) == [(1, None, "watched: 1 added"), (2, None, "vips: 1 added")]
    files = Checkpoint(Path(checkpoint_folder(ready, STREAM))).parcels("lists")
    for name in files.list():
        files.remove(name)
    append(ready, part(7, 12))
    evaluate(ready)
    assert files.list()
    lists: dict[str, Any] = {"watched": ["a"], "vips": ["3"]}
    assert stored_alerts(ready) == replayed([(lists, None)], [*LISTED, RULES[0]])
    evaluate(ready, rebuild=True)
    assert logged(ready) == [(1, None, "watched: 1 added"), (2, None, "vips: 1 added")]


@pytest.mark.long
def test_c11_3_files_that_no_state_needs_are_removed_and_the_others_come_again(
    ready: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(ready, LISTED)
    lists: list[tuple[dict[str, Any], int | None]] = []
    values: list[str | int] = ["a", "ü", "", "b", "c"]
    for at, value in enumerate(values):
        sql(ready, f"INSERT INTO {{}} (list, value) VALUES ('watched', '{value}')")
        append(ready, part(2 * at + 1, 2 * at + 2))
        evaluate(ready)
        lists.append(({"watched": values[: at + 1]}, 2 * at or None))
    files = ListFiles.of(Checkpoint(Path(checkpoint_folder(ready, STREAM))))
    assert 0 < files.read_floor() == min(files.list_commits())
    assert len(files.list_commits()) <= 3
    shutil.rmtree(files.parcels.folder)
    append(ready, part(11, 12))
    evaluate(ready)
    assert stored_alerts(ready) == replayed(lists)
    with prove(ready, STREAM, STREAMS) as proofs:
        assert all(row.holds for row in proofs.rows), proofs.rows


@pytest.mark.long
def test_c11_3_a_running_stream_obeys_a_list_as_it_obeys_a_rule(ready: Tables) -> None:
    publish(ready, [rule("seen", where="in_list(shop, 'watched')", when="n >= 1")])
    # The watermark is NULL before the first event.
    append(ready, part(1, 1))
    evaluation = Evaluation(
        ready, STREAM, STREAMS, checkpoint_folder(ready, STREAM), every="100 milliseconds"
    ).start()  # fmt: skip
    try:
        evaluation.wait_until(lambda report: report.arrival == 1, 120)
        assert not stored_alerts(ready)
        add_values(ready, "watched", ["a"])
        started = time.monotonic()
        while not logged(ready):
            assert time.monotonic() < started + 60
            time.sleep(0.1)
        assert logged(ready) == [(1, 1, "watched: 1 added")]
        append(ready, part(2, 2))
        evaluation.wait_until(lambda report: report.arrival == 2, 60)
        seen = {row.event_id for row in stored_alerts(ready)}
        assert seen == {row["id"] for row in part(2, 2) if row["shop"] == "a"}
        # By plain SQL, and two commits at once.
        sql(ready, "DELETE FROM {} WHERE value = 'a'")
        sql(ready, "INSERT INTO {} (list, value) VALUES ('watched', 'ü')")
        while len(logged(ready)) < 3:
            assert time.monotonic() < started + 120
            time.sleep(0.1)
        append(ready, part(3, 3))
        evaluation.wait_until(lambda report: report.arrival == 3, 60)
        seen = {row.event_id for row in stored_alerts(ready)} - seen
        assert seen == {row["id"] for row in part(3, 3) if row["shop"] == "ü"}
    finally:
        evaluation.stop()
    rows = ready.read("rules").where(F.col("rule_id") == "*").select("status", "author").distinct().collect()
    assert [tuple(row) for row in rows] == [("lists", "lookback")]


@pytest.mark.long
def test_c11_3_a_stream_goes_on_where_no_list_was_ever_written(ready: Tables) -> None:
    publish(ready, [RULES[0]])
    append(ready, part(1, 1))
    evaluate(ready)
    folder = Checkpoint(Path(checkpoint_folder(ready, STREAM))).parcels("lists").folder
    assert (logged(ready), folder.exists()) == ([], False)
    # A property changes no list.
    sql(ready, "ALTER TABLE {} SET TBLPROPERTIES (a = 'b')")
    append(ready, part(2, 2))
    evaluate(ready)
    assert (logged(ready), folder.exists()) == ([], False)

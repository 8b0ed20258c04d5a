"""Contract 10.8 on the real stream: it rejects what became active by SQL without evidence, and a replay rejects the same."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from lookback.core.rules.gate import Gate, write_evidence
from lookback.spark.activation import activate
from lookback.spark.replay.proof import prove
from lookback.spark.rules import RulesTable
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from payins import STREAM, STREAMS, append, make_events, publish, rule

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

pytestmark = [pytest.mark.spark, pytest.mark.long]
GATE = Gate(approval=True, enforce=True)
EVENTS = make_events(150, seed=5)
OLD, TRIED = rule("old", when="n >= 2", message=""), rule("tried", when="n >= 2", message="")


def evaluate(tables: Tables, first: int, last: int, **options: Any) -> None:
    append(tables, [row for row in EVENTS if first <= row["arrival"] <= last])
    Evaluation(tables, STREAM, STREAMS, checkpoint_folder(tables, STREAM), once=True, **options).run()


def insert(tables: Tables, document: dict[str, Any], version: int, **columns: str) -> None:
    row = {
        "rule_id": document["rule_id"],
        "version": version,
        "status": "active",
        "document": json.dumps(document),
        **columns,
    }
    values = ", ".join(str(value) if isinstance(value, int) else f"'{value}'" for value in row.values())
    tables.spark.sql(f"INSERT INTO {tables.identifier('rules')} ({', '.join(row)}) VALUES ({values})")


def logged(tables: Tables) -> list[tuple[Any, ...]]:
    rows = tables.read("rule_log").where("rule_id is not null").orderBy("logged_at", "position").collect()
    return [(row["rule_id"], row["version"], row["action"]) for row in rows]


def raised_by(tables: Tables, after: int) -> set[tuple[str, int]]:
    rows = tables.read("alerts").where(f"arrival > {after}").select("rule_id", "rule_version").distinct().collect()
    return {(row["rule_id"], row["rule_version"]) for row in rows}


def test_c10_8_the_stream_rejects_a_row_that_was_activated_by_sql_without_evidence(ready: Tables) -> None:
    publish(ready, [OLD])
    evaluate(ready, 1, 1)
    # From here on the gate is enforced. What is in force goes on, without evidence as it is.
    insert(ready, {**OLD, "when": "n >= 3"}, 2)
    insert(ready, TRIED, 1, author="ann", approved_by="ann", evidence=write_evidence(TRIED, [], "now"))
    evaluate(ready, 2, 3, gate=GATE)
    expected = [("old", 1, "activated"), ("tried", 1, "rejected"), ("old", 2, "rejected")]
    assert sorted(logged(ready)) == sorted(expected)
    assert raised_by(ready, 1) == {("old", 1)}
    messages = {row["rule_id"]: row["message"] for row in ready.read("rule_log").where("action = 'rejected'").collect()}
    assert "it has no evidence that it met the gate" in messages["old"]
    assert "its author, 'ann', approved it" in messages["tried"]
    assert messages["tried"].endswith("`lookback rules activate tried`")

    # For the commands a rejected row is a draft.
    rules = RulesTable(ready, STREAMS, has_gate=True)
    assert [(row.rule_id, row.version, row.status) for row in rules.rows()] == [
        ("old", 1, "active"), ("old", 2, "draft"), ("tried", 1, "draft"),
    ]  # fmt: skip
    # Without a gate they are shown as what they are; the version in force stays in the list.
    listed = RulesTable(ready, STREAMS).list_rows()
    assert [(row.rule_id, row.version, row.status) for row in listed] == [
        ("old", 1, "active"), ("old", 2, "rejected"), ("tried", 1, "rejected"),
    ]  # fmt: skip
    assert activate(rules, "tried", GATE, approver="bob").version == 2
    assert rules.set_status("tried", "paused", author="bob") == 3
    # Who approved it may resume it.
    assert rules.set_status("tried", "active", author="bob", comment="back") == 4
    row = ready.read("rules").where("rule_id = 'tried' and version = 4").collect()[0]
    assert (row["author"], row["approved_by"], row["comment"]) == ("ann", "bob", "back; resumed by bob")
    evaluate(ready, 4, 5, gate=GATE)
    assert [each[1:] for each in logged(ready)[-3:]] == [(2, "activated"), (3, "paused"), (4, "activated")]
    assert raised_by(ready, 3) == {("old", 1), ("tried", 4)}

    # Judged anew, the rows are rejected that the log names, whatever the settings say then.
    with prove(ready, STREAM, STREAMS) as proofs:
        assert all(row.holds for row in proofs.rows), proofs.rows
        assert sum(row.alike for row in proofs.rows) > 20
    before = {name: ready.read(name).count() for name in ("alerts", "late_events", "rule_log")}
    evaluate(ready, 6, 6, rebuild=True)
    assert raised_by(ready, 5) == {("old", 1), ("tried", 4)}
    assert {name: ready.read(name).where("arrival is null or arrival <= 5").count() for name in before} == before

"""Contract 10.8 on real Spark and Delta: under a gate a version becomes active only by `activate`, which checks it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyspark.sql import functions as F  # noqa: N812

from lookback import notebook
from lookback.cli import main
from lookback.config import Settings
from lookback.core.errors import RuleError, SetupError
from lookback.core.rules.gate import Gate, is_proven
from lookback.spark.activation import activate
from lookback.spark.rules import RulesTable
from lookback.spark.tables.lakehouse import Tables
from payins import STREAM, STREAMS, append, make_events, rule

pytestmark = [pytest.mark.spark, pytest.mark.long]
GATE = Gate(backtest_days=1, max_alerts_per_day=1e9, shadow_hours=0.0, approval=True)


def test_c10_8_a_version_becomes_active_when_it_meets_the_gate(ready: Tables) -> None:
    rules = RulesTable(ready, STREAMS, has_gate=True)
    append(ready, make_events(50, seed=3))
    document = rule("tried", when="n >= 2", message="")
    assert rules.push(document, author="ann") == 1
    assert [(row.version, row.status) for row in rules.rows()] == [(1, "draft")]
    with pytest.raises(RuleError, match="version 1 has no evidence of meeting it; use `lookback rules activate tried`"):
        rules.set_status("tried", "active")
    own = activate(rules, "tried", GATE, approver="ann")
    assert own.version is None
    assert [(each.condition.split(" ")[0], each.met) for each in own.conditions] == [("at", True), ("an", False)]
    assert own.conditions[0].figure == "15041"
    strict = activate(rules, "tried", Gate(tests=1, shadow_hours=2), approver="bob")
    assert [(each.figure, each.met) for each in strict.conditions] == [("0", False), ("none", False)]
    found = activate(rules, "tried", GATE, approver="bob", comment="two of two were right")
    assert (found.candidate, found.version) == (1, 2)
    row = ready.read("rules").where("version = 2").collect()[0]
    assert (row["status"], row["author"], row["approved_by"], row["comment"]) == (
        "active", "ann", "bob", "two of two were right",
    )  # fmt: skip
    assert is_proven(json.loads(row["document"]), row["evidence"])
    # pause and resume carry the evidence on; another document has to show its own.
    assert rules.set_status("tried", "paused", author="cat") == 3
    assert rules.set_status("tried", "active", author="cat") == 4
    resumed = ready.read("rules").where("version = 4").collect()[0]
    assert (resumed["approved_by"], resumed["evidence"]) == ("bob", row["evidence"])
    assert rules.push({**document, "when": "n >= 3"}) == 5
    assert [(row.version, row.status) for row in rules.rows()] == [(4, "active"), (5, "draft")]
    # Without a gate everything is as it was.
    assert RulesTable(ready, {STREAM.name: STREAM}).push(document) == 6
    assert [(row.version, row.status) for row in rules.rows()] == [(6, "active")]


def test_c10_8_the_history_of_the_table_says_who_wrote_it_where_it_names_users(
    ready: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Local tables name nobody; on Databricks the history has the real user, whatever `author` says."""
    rules, gate = RulesTable(ready, STREAMS, has_gate=True), Gate(approval=True)
    rules.push(rule("tried", message=""), author="ann")
    (unknown,) = activate(rules, "tried", gate, approver="ann").conditions
    assert unknown.figure == "ann; its authors could not be checked, since the table's history names no users"
    read = Tables.history
    commit = ready.version("rules")
    named = F.when(F.col("version") == commit, "bob").otherwise("eve")
    monkeypatch.setattr(Tables, "history", lambda *given: read(*given).withColumn("userName", named))
    # Eve paused the rule, which does not make its document hers.
    rules.set_status("tried", "paused", author="eve")
    for approver, met in (("bob", False), ("ann", False), ("eve", True)):
        found = activate(rules, "tried", gate, approver=approver)
        assert found.conditions[0].figure == f"{approver}; by the table's history, bob wrote it"
        assert (found.conditions[0].met, found.version) == (met, 3 if met else None)
    assert ready.read("rules").where("version = 3").collect()[0]["author"] == "ann"


def test_c10_8_the_notebook_shows_the_conditions_and_activates_the_draft_that_it_published(
    ready: Tables, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    append(ready, make_events(50, seed=3))
    settings = Settings(str(ready.root), tmp_path, gate=Gate(backtest_days=1, max_alerts_per_day=1e9, approval=True))
    workspace = notebook.Workspace(settings)
    vars(workspace).update(tables=ready, streams=STREAMS, stream=STREAM)
    document = rule("tried", when="n >= 2", message="")
    before = ready.version("rules")
    assert notebook.check_gate(workspace, document, author="ann") is None
    shown = capsys.readouterr().out
    assert "at most 1e+09 alerts a day in a backtest of 1 days" in shown
    assert "to activate it, set the parameter activate to true" in shown
    assert ready.version("rules") == before
    assert notebook.publish_rule(workspace, document, author="ann") == 1
    assert "version 1 is a draft: it is not in force yet." in capsys.readouterr().out
    with pytest.raises(SetupError, match="version 1 of tried in the table has another document"):
        notebook.check_gate(workspace, {**document, "when": "n >= 3"}, activate=True, author="bob")
    assert notebook.check_gate(workspace, document, activate=True, author="ann") is None
    assert "Version 1 of tried is not active: not all conditions are met." in capsys.readouterr().out
    assert notebook.check_gate(workspace, document, activate=True, author="bob", comment="seen") == 2
    assert [(row.version, row.status, row.approved_by) for row in workspace.rules.rows()] == [(2, "active", "bob")]


def test_c10_8_the_commands_call_a_draft_a_draft_and_show_every_remedy_to_its_end(
    ready: Tables, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "streams").mkdir()
    (tmp_path / "streams" / f"{STREAM.name}.yml").write_text(json.dumps(STREAM.to_dict()))
    (tmp_path / "settings.yml").write_text("gate: {backtest_days: 1, min_precision: 0.5, approval: true}")
    (tmp_path / "tried.yml").write_text(
        json.dumps(rule("tried", when="n >= :least", parameters={"least": 2}, message=""))
    )

    def run(*words: str, code: int = 0) -> list[str]:
        assert main(["--root", str(ready.root), "--conf", str(tmp_path), *words]) == code
        return capsys.readouterr().out.splitlines()

    append(ready, make_events(50, seed=3))
    wrote = "wrote tried version {} as a draft: it is not in force yet"
    remedy = "the settings have a gate: lookback rules activate tried"
    assert run("rules", "push", str(tmp_path / "tried.yml"))[-2:] == [wrote.format("1"), remedy]
    assert run("rules", "set", "tried", "least=3") == [wrote.format("2 with least = 3"), remedy]
    assert run("rules", "pause", "tried") == ["published tried version 3 (paused)"]
    said = run("rules", "activate", "tried", "--author", "ann", code=1)
    assert (
        "not met: a precision of at least 0.5 in a backtest of 1 days: make the rule stricter; if there is no figure, "
        "label events with `lookback labels import`"
    ) in said

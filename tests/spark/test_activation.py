"""Contract 10.8 on real Spark and Delta: under a gate a version becomes active only by `activate`, which checks it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from lookback.core.errors import RuleError
from lookback.core.rules.gate import Gate, is_proven
from lookback.spark.activation import activate
from lookback.spark.rules import RulesTable
from payins import STREAM, STREAMS, append, make_events, rule

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

pytestmark = [pytest.mark.spark, pytest.mark.long]
GATE = Gate(backtest_days=1, max_alerts_per_day=1e9, shadow_hours=0.0, approval=True)


def test_c10_8_a_version_becomes_active_when_it_meets_the_gate(ready: Tables) -> None:
    rules = RulesTable(ready, STREAMS, has_gate=True)
    append(ready, make_events(50, seed=3))
    document = rule("tried", when="n >= 2", message="")
    assert rules.push(document, author="ann") == 1
    assert [(row.version, row.status) for row in rules.rows()] == [(1, "draft")]
    with pytest.raises(
        RuleError, match="version 1 has no evidence that it met it; use `lookback rules activate tried`"
    ):
        rules.set_status("tried", "active")
    own = activate(rules, "tried", GATE, approver="ann")
    assert own.version is None
    assert [(each.condition.split(" ")[0], each.met) for each in own.conditions] == [("at", True), ("an", False)]
    assert float(own.conditions[0].figure) > 0
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

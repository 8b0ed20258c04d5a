"""Contract 10.7 on real Spark and Delta: a challenger beside the active version, its quarantine, and both compared."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from lookback.cli import main
from lookback.core.errors import RuleError
from lookback.spark.challenger import compare_versions
from lookback.spark.rules import RulesTable
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from payins import STREAM, append, make_events, replay_of_tables, replayed_alerts, rule, stored_alerts

if TYPE_CHECKING:
    from pathlib import Path

    from lookback.spark.batches.sink import BatchReport
    from lookback.spark.tables.lakehouse import Tables

pytestmark = [pytest.mark.spark, pytest.mark.long]
STRICT = replace(STREAM, max_failures=5)
STREAMS = {STRICT.name: STRICT}


def evaluate(tables: Tables) -> list[BatchReport]:
    evaluation = Evaluation(tables, STRICT, STREAMS, checkpoint_folder(tables, STRICT), once=True)
    evaluation.run()
    return list(evaluation.reports)


def listed(rules: RulesTable) -> list[tuple[int, str]]:
    return [(row.version, row.status) for row in rules.rows()]


def test_c10_7_a_challenger_stands_beside_the_active_version(
    ready: Tables, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules, events = RulesTable(ready, STREAMS), make_events(200, seed=7)
    first = rule("tried", when="n >= 2", suppress="1 hour", message="")
    assert rules.push(first) == 1
    append(ready, [row for row in events if row["arrival"] <= 2])
    evaluate(ready)
    assert rules.push({**first, "when": "n >= 3", "suppress": "1 second"}, status="shadow") == 2
    append(ready, [row for row in events if row["arrival"] in (3, 4)])
    (report,) = evaluate(ready)
    assert {"tried", "tried (shadow)"} <= report.by_rule.keys()
    assert listed(rules) == [(1, "active"), (2, "shadow")]
    compared = compare_versions(ready, STREAMS, "tried")
    assert (compared.active, compared.shadow, compared.since) == (1, 2, 2)
    counts = {row["side"]: row["alerts"] for row in compared.count().collect()}
    last = {row.alert_id: row for row in ready.read("alerts").where("arrival > 2").orderBy("revision").collect()}
    stands = {
        mode: {(json.dumps(row["key"]), row["event_id"]) for row in last.values() if (row.mode, row.verdict) == (mode, "raised")}
        for mode in ("active", "shadow")
    }  # fmt: skip
    assert counts == {
        "both": len(stands["active"] & stands["shadow"]),
        "only active": len(stands["active"] - stands["shadow"]),
        "only shadow": len(stands["shadow"] - stands["active"]),
    }
    assert counts["only shadow"] > 0
    # What is paused and resumed is the document of the active role; paused leaves the shadow, active ends it.
    assert rules.set_status("tried", "paused") == 3
    assert listed(rules) == [(3, "paused"), (2, "shadow")]
    assert rules.set_status("tried", "active") == 4
    assert listed(rules) == [(4, "active")]
    assert rules.find_document("tried", 4)["when"] == "n >= 2"
    with pytest.raises(RuleError, match="no version in shadow to compare; publish one with"):
        compare_versions(ready, STREAMS, "tried")
    # A challenger that fails too often is quarantined alone.
    assert rules.push({**first, "when": "total / (n - n) > 1"}, status="shadow") == 5
    append(ready, [row for row in events if row["arrival"] in (5, 6)])
    evaluate(ready)
    append(ready, [row for row in events if row["arrival"] > 6])
    evaluate(ready)
    (quarantined,) = ready.read("rules").where("status = 'quarantined'").collect()
    assert (quarantined["version"], json.loads(quarantined["evidence"])) == (6, {"quarantined": 5})
    assert listed(rules) == [(4, "active"), (6, "quarantined")]
    assert ready.read("alerts").where("mode = 'active' and rule_version = 4 and arrival > 6").count() > 0
    assert stored_alerts(ready) == replayed_alerts(replay_of_tables(ready))
    found = diff(ready, tmp_path, capsys)
    assert found == [
        {"place": "when", "before": "n >= 2", "after": "n >= 3"},
        {"place": "suppress", "before": "1 hour", "after": "1 second"},
    ]


def diff(tables: Tables, folder: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """The differences of the first two versions, as the command prints them."""
    (folder / "conf" / "streams").mkdir(parents=True)
    (folder / "conf" / "streams" / "payins.yml").write_text(yaml.safe_dump(STRICT.to_dict()), encoding="utf-8")
    places = ["--root", str(tables.root), "--conf", str(folder / "conf")]
    capsys.readouterr()
    assert main([*places, "rules", "diff", "tried", "1", "2"]) == 0
    text = capsys.readouterr().out
    assert "when: 'n >= 2' becomes 'n >= 3'" in text
    assert "-when: n >= 2\n+when: n >= 3" in text
    assert main([*places, "rules", "diff", "tried", "1", "2", "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

"""Contract 10.8 in the CI of a repository of rules: `rules check --backtest` reports on each, and ends with 1 if one fails."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import yaml

from lookback.cli import main
from payins import STREAM, append, make_events, rule

if TYPE_CHECKING:
    from pathlib import Path

    from lookback.spark.tables.lakehouse import Tables

pytestmark = [pytest.mark.spark, pytest.mark.long]


def test_c10_8_a_report_for_a_pull_request(ready: Tables, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append(ready, make_events(150, seed=3))
    (tmp_path / "streams").mkdir()
    (tmp_path / "streams/payins.yml").write_text(yaml.safe_dump(STREAM.to_dict()))
    (tmp_path / "settings.yml").write_text(
        "gate: {backtest_days: 1, max_alerts_per_day: 1001, shadow_hours: 48, approval: true}"
    )
    documents = {
        "quiet": rule("quiet", when="n >= 1000", message=""),
        "noisy": rule("noisy", when="n >= 1", message=""),
        "wrong": rule("wrong", when="nosuch >= 1", message=""),
        "ended": rule("ended", message="", effective_until="2001-01-01T00:00:00Z"),
        "twice": rule("quiet", when="n >= 1", message=""),
    }
    for name, document in documents.items():
        (tmp_path / f"{name}.yml").write_text(yaml.safe_dump(document))
    (tmp_path / "torn.yml").write_text("rule_id: [")
    rules_before = ready.version("rules")

    def check(*names: str, code: int, options: tuple[str, ...] = ()) -> str:
        capsys.readouterr()
        files = [str(tmp_path / f"{name}.yml") for name in names]
        place = ["--root", str(ready.root), "--conf", str(tmp_path)]
        assert main([*place, "rules", "check", *files, *options]) == code
        said = capsys.readouterr()
        return said.err if code == 2 else said.out

    options = ("--backtest", "--max-alerts-per-day", "1000", "--since", "2023-11-14T00:00:00Z")
    assert "## Rules: it passes" in check("quiet", code=0, options=options)
    text = check(*documents, "torn", "missing", code=1, options=options)
    verdicts = {line.split(" | ")[0][2:]: line.split(" | ")[-1][:-2] for line in text.splitlines() if line[:2] == "| "}
    assert (verdicts["noisy"], verdicts["wrong"], verdicts["ended"]) == ("**fails**", "**fails**", "**fails**")
    assert "## Rules: 6 of 7 fail" in text
    assert "at most 1000 alerts a day in a backtest of" in text
    assert "nosuch" in text
    assert "has a rule with the same rule\\_id" in text
    found = {
        row["file"].split("/")[-1]: row
        for row in map(json.loads, check(*documents, "torn", code=1, options=(*options, "--json")).splitlines())
    }
    assert [found[f"{name}.yml"]["passes"] for name in (*documents, "torn")] == [
        True,
        False,
        False,
        False,
        False,
        False,
    ]
    assert found["noisy.yml"]["alerts"] > found["quiet.yml"]["alerts"] == 0
    assert found["twice.yml"]["alerts"] == found["noisy.yml"]["alerts"]
    assert ready.version("rules") == rules_before
    # Without options the gate of the settings says how many alerts, and over which days.
    row = json.loads(check("noisy", code=1, options=("--backtest", "--json")))
    assert len(row["problems"]) == 1
    assert row["problems"][0].startswith("at most 1001 alerts a day in a backtest of")
    assert 0 < row["days"] <= 1
    # Where no event is in the range, nothing is known of the rule.
    text = check(
        "quiet", code=1, options=("--backtest", "--max-alerts-per-day", "5", "--since", "2040-01-01T00:00:00Z")
    )
    assert "no events to try it on" in text
    assert "needs a backtest: add --backtest" in check("quiet", code=2, options=("--max-alerts-per-day", "5"))
    assert "must be at least 0" in check("quiet", code=2, options=("--backtest", "--max-alerts-per-day", "-1"))

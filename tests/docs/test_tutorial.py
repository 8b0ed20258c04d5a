"""The tutorial, as far as it needs no Spark, in a folder with nothing else; tests/spark runs the rest."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest
import yaml

import lookback
from lookback.cli import main
from lookback.config import load_rule_document, load_streams

PAGE = (Path(__file__).resolve().parents[2] / "docs/tutorial/first-alert.md").read_text(encoding="utf-8")
BLOCKS = [(info.strip(), text) for info, text in re.findall(r"^```([^\n]*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOOKBACK_CONF", raising=False)


def follow(steps: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    """Writes the files that the page shows, and runs the commands that need no Spark."""
    for (info, text), after in pairwise([*steps, ("", "")]):
        kind, is_file, name = info.partition(" file ")
        if is_file:
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(text, encoding="utf-8")
        elif kind == "sh" and re.match(r"lookback (stream new|rules check) ", text):
            capsys.readouterr()
            assert main(shlex.split(text)[1:]) == 0
            if after[0] == "text":
                assert capsys.readouterr().out == after[1]


def test_the_rule_raises_the_alerts_that_the_page_names(capsys: pytest.CaptureFixture[str]) -> None:
    follow(BLOCKS, capsys)
    stream = load_streams("conf")["purchases"]
    rule = load_rule_document("conf/rules/card-rush.yml")
    events = pd.read_csv("purchases.csv", dtype=str).to_dict("records")
    alerts = lookback.replay([rule], events, stream).alerts
    assert [(alert.event_id, alert.key["card"]) for alert in alerts] == [("4", "c2"), ("8", "c3")]
    higher = lookback.replay([{**rule, "parameters": {"limit": 600}}], events, stream).alerts
    assert [alert.key["card"] for alert in higher] == ["c2"]


def test_the_typo_is_refused_with_the_field_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    follow(BLOCKS, capsys)
    rule = yaml.safe_load(Path("conf/rules/card-rush.yml").read_text(encoding="utf-8"))
    Path("typo.yml").write_text(yaml.safe_dump({**rule, "group_by": ["cart"]}), encoding="utf-8")
    capsys.readouterr()
    assert main(["rules", "check", "typo.yml"]) == 1
    assert "did you mean 'card'? (group_by)" in "".join(capsys.readouterr())

"""The command line where only `pip install lookback-rules` was done: no pyspark, no delta."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lookback import cli, verbs

ROOT = Path(__file__).resolve().parents[2]
# Runs the commands given as JSON on the standard input, one after another; prints [code, standard error] of each.
SCRIPT = """
import contextlib, importlib.abc, io, json, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pyspark", "delta", "py4j"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from lookback.cli import main
found = []
for command in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = main(command)
    found.append([code, said.getvalue()])
print(json.dumps(found))
"""
RULE = str(ROOT / "conf/rules/large-payment.yml")
# Every command with what it must be given. Those that need no Spark answer as ever.
COMMANDS = {
    "init": [], "status": [], "maintain": [], "demo": [],
    "forget": ["transactions", "--where", "customer_id = 17", "--yes"],
    "ingest": ["transactions", "x.csv"], "rejected": ["transactions"], "evaluate": ["transactions", "--once"], "repartition": ["transactions", "2"],
    "alerts": [], "review": ["a", "--disposition", "confirmed"], "notify": ["--all", "--once"],
    "labels import": ["transactions", "x.csv"], "explain": ["a"], "snooze": ["r", "--until", "1 hour", "--reason", "known"], "snoozes": [], "rules overlap": [],
    "lists add": ["a", "x"], "lists remove": ["a", "x"], "lists show": [], "lists import": ["a", "x.csv"],
    "advance": ["transactions", "2026-01-01"],
    "backtest": [RULE], "features": [RULE, "--out", "x"], "prove": ["transactions"], "rules push": [RULE], "rules list": [], "rules show": ["r"], "rules pause": ["r"], "rules resume": ["r"], "rules retire": ["r"],
    "rules set": ["r", "n=1"], "rules compare": ["r"], "rules activate": ["r"], "rules diff": ["r", "1", "2"], "rules clear-state": ["transactions"], "rules retire-all": ["transactions"], "rules export": [],
    "rules coverage": [], "rules draft-tests": [RULE],
}  # fmt: skip
WITHOUT = {
    "rules check": [RULE],
    "rules schema": [],
    "stream list": [],
    "new": [],
    "stream new": [str(ROOT / "conf/samples/transactions.parquet")],
}
TO_TRANSACTIONS = ["--stream", "transactions"]
WITHOUT |= {
    f"import {name}": [str(ROOT / "tests/data" / name), *TO_TRANSACTIONS] for name in ("panther", "flink", "aws")
}
WITHOUT["import aws"] += ["--map", str(ROOT / "tests/data/aws/map.yml")]
# They have extras of their own.
ELSEWHERE = ("remote", "mcp")
if sys.version_info >= (3, 11):
    WITHOUT["import elastic"] = [str(ROOT / "tests/data/elastic"), *TO_TRANSACTIONS]
    WITHOUT["import sigma"] = [str(ROOT / "tests/data/sigma"), *TO_TRANSACTIONS]
else:
    # pySigma needs a newer Python.
    ELSEWHERE += ("import sigma", "import elastic")


def names(parser: argparse.ArgumentParser, before: str = "") -> list[str]:
    """Every command of a parser, those of commands with commands below them in full."""
    (sub,) = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)] or [None]
    if sub is None:
        return [before]
    return [name for word, each in sub.choices.items() for name in names(each, f"{before} {word}".strip())]


def test_every_command_is_known_here() -> None:
    there = {name for name in names(cli._make_parser()) if not {name, name.split()[0]} & {*ELSEWHERE}}
    assert there - {*COMMANDS, *WITHOUT} == {*COMMANDS, *WITHOUT} - there == set()


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("conf")
    (place / "streams").symlink_to(ROOT / "conf/streams")
    receiver = {"name": "desk", "webhook": {"url_env": "DESK_URL"}}
    (place / "notifiers.yml").write_text(yaml.safe_dump({"receivers": [receiver]}))
    return place


def test_a_command_that_needs_spark_names_the_extra_and_the_others_work(conf: Path, tmp_path: Path) -> None:
    place = ["--root", str(tmp_path / "lakehouse"), "--conf", str(conf)]
    asked = {**COMMANDS, **WITHOUT, "new": [str(tmp_path / "project")]}
    commands = [[*name.split(), *words, *place] for name, words in asked.items()]
    environment = {**os.environ, "DESK_URL": "https://desk.example.com"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=json.dumps(commands), capture_output=True, text=True, check=False,
        env=environment, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = dict(zip(asked, json.loads(done.stdout), strict=True))
    sentence = "lookback: this command needs Spark and Delta, which are not installed here: pip install 'lookback-rules[local]'\n"
    assert {name: found[name] for name in COMMANDS} == {name: [2, sentence] for name in COMMANDS}
    assert {name: found[name][0] for name in WITHOUT} == dict.fromkeys(WITHOUT, 0)


@pytest.mark.parametrize("command", [["backtest"], ["features", "--out", "x"]])
def test_a_wrong_file_is_refused_before_spark_starts(
    command: list[str], conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(*_: object) -> None:
        raise AssertionError("Spark was asked")

    monkeypatch.setattr(verbs.Workspace, "open_tables", start)
    (tmp_path / "wrong.yml").write_text("rule_id: wrong\nstream: transactions\nwhere: amount >\n")
    found = (("wrong.yml", 1, "something is missing at 'amount >'"), ("missing.yml", 2, "cannot be read"))
    for name, code, sentence in found:
        assert cli.main(["--conf", str(conf), *command, RULE, str(tmp_path / name)]) == code
        assert sentence in capsys.readouterr().err


def test_what_runs_on_a_cluster_needs_no_package_that_reads_tables_without_spark() -> None:
    # Jobs install neither; only these modules read with them, and nothing imports those before they are needed.
    readers = {f"lookback.spark.tables.{name}" for name in ("folders", "frames", "warehouse")}
    folder = ROOT / "src"
    modules = [
        ".".join(path.relative_to(folder).with_suffix("").parts) for path in folder.glob("lookback/spark/**/*.py")
    ]
    script = 'import importlib, sys; sys.modules |= {"deltalake": None, "duckdb": None}\n'
    script += "for name in sys.argv[1:]: importlib.import_module(name)"
    command = [sys.executable, "-c", script, *sorted({*modules} - readers)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr

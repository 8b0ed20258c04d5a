"""The whole work on an S3 server on this machine: the same alerts as in a folder, and nothing beside the bucket."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyspark.sql import SparkSession

from lookback.cli import main
from lookback.core.errors import SetupError, StoreFailed
from lookback.places import ObjectPath, open_place, parse_place, remove_tree, write_whole
from lookback.spark.checkpoints.checkpoint import Checkpoint
from lookback.spark.platform.owner import become_owner
from objectstore import SMALL, S3Server

pytestmark = [pytest.mark.spark, pytest.mark.objectstore]
Run = Callable[..., str]
STREAM = {
    "stream": "pay", "event_id": "id", "event_time": "at", "max_out_of_orderness": "10 seconds",
    "fields": {"id": "int", "at": "timestamp", "card": "string", "amount": "decimal(18,2)"},
}  # fmt: skip
RULE = {
    "rule_id": "much", "stream": "pay", "group_by": ["card"], "window": "1 hour", "measures": {"total": "sum(amount)"},
    "when": "total > 10 and not in_list(card, 'good')", "message": "{total}",
}  # fmt: skip
# Comes later, with a window that holds no row yet: its history is read, and goes to the shards by files of the checkpoint.
LATER = {**RULE, "rule_id": "ever", "window": "30 days", "when": "total > 60"}


@pytest.fixture(scope="module")
def conf(server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work") / "conf"
    (folder / "streams").mkdir(parents=True)
    (folder / "streams/pay.yml").write_text(yaml.safe_dump(STREAM))
    for rule in (RULE, LATER):
        (folder / f"{rule['rule_id']}.yml").write_text(yaml.safe_dump(rule))
    (folder / "settings.yml").write_text(yaml.safe_dump({"spark": {**server.settings, **SMALL}}))
    for part in range(3):
        lines = (f"{n},2026-01-31T1{part}:{n % 60:02}:00Z,c{n % 4},3.00" for n in range(part * 60, part * 60 + 60))
        (folder / f"{part}.csv").write_text("\n".join(["id,at,card,amount", *lines, ""]))
    return folder


@pytest.fixture
def run(conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)

    def run_command(root: str, *words: str, code: int = 0) -> str:
        capsys.readouterr()
        ended = main(["--root", root, "--conf", str(conf), *words])
        output, errors = capsys.readouterr()
        assert ended == code, f"{words}: {output}{errors}"
        assert "Traceback" not in errors
        return output if not code else errors

    return run_command


def read_alerts(run: Run, root: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in run(root, "alerts", "--json").splitlines()]
    return sorted(
        ({name: value for name, value in row.items() if name != "decided_at"} for row in rows),
        key=lambda row: (row["rule_id"], row["alert_id"], row["revision"]),
    )


def work(run: Run, conf: Path, root: str) -> list[dict[str, Any]]:
    """Evaluates twice on one checkpoint; a list is read by shards, and the second rule is warmed up."""
    run(root, "init")
    run(root, "lists", "add", "good", "c3", "--reason", "a friend")
    run(root, "rules", "push", str(conf / "much.yml"))
    run(root, "ingest", "pay", str(conf / "0.csv"))
    run(root, "evaluate", "pay", "--once")
    run(root, "ingest", "pay", str(conf / "1.csv"))
    run(root, "rules", "push", str(conf / "ever.yml"))
    run(root, "evaluate", "pay", "--once")
    return read_alerts(run, root)


def test_files_of_a_bucket_are_used_like_those_of_a_folder(server: S3Server) -> None:
    settings = {name.removeprefix("spark.hadoop."): value for name, value in server.settings.items()}
    root = replace(parse_place("s3://bucket/it's 100%"), settings=tuple(settings.items()))
    assert isinstance(root, ObjectPath)
    assert not root.exists()
    checkpoint = Checkpoint(root / "checkpoint")
    assert checkpoint.ensure_query_id() == checkpoint.query_id is not None
    state = checkpoint.folder / "state" / "0" / "1" / "7.zip"
    write_whole(state, b"x")
    assert list(checkpoint.folder.glob("state/*/*/[0-9]*.*")) == [state]
    parcels = checkpoint.parcels("lists")
    parcels.write("a", b"1")
    assert (parcels.list(), parcels.read("a")) == (["a"], b"1")
    with pytest.raises(StoreFailed, match="start the evaluation again"):
        parcels.read("b")
    parcels.remove("a")
    parcels.remove("a")
    assert parcels.list() == []
    with become_owner(checkpoint.owner_file, "checkpoint c", 0.1) as check:
        check()
        with pytest.raises(SetupError, match="one at a time"), become_owner(checkpoint.owner_file, "checkpoint c", 2):
            pass
    moved = checkpoint.move_aside()
    assert moved is not None
    assert not checkpoint.folder.exists()
    assert Checkpoint(moved).query_id is not None
    remove_tree(moved)
    assert [place.name for place in root.iterdir()] == [".checkpoint.owner"]
    with pytest.raises(OSError, match="NO_SUCH_BUCKET"):
        write_whole(replace(root, store="nowhere") / "x", b"")


@pytest.fixture(scope="module")
def made() -> list[list[dict[str, Any]]]:
    """The alerts that `evaluated` has read: its tables are made once."""
    return []


@pytest.fixture
def evaluated(run: Run, conf: Path, made: list[list[dict[str, Any]]]) -> str:
    """A root in the bucket whose events are judged."""
    root = "s3a://bucket/it's a root, 100%"
    if not made:
        made.append(work(run, conf, root))
    return root


def test_a_bucket_has_what_a_folder_has(
    run: Run, conf: Path, tmp_path: Path, evaluated: str, made: list[list[dict[str, Any]]]
) -> None:
    (alerts,) = made
    assert alerts == work(run, conf, str(tmp_path / "folder"))
    assert {row["rule_id"] for row in alerts} == {"much", "ever"}
    assert json.loads(run(evaluated, "status", "--json"))["events"] == 120
    alert = alerts[0]["alert_id"]
    assert alerts[0]["message"] in run(evaluated, "explain", alert)
    run(evaluated, "review", alert, "--disposition", "benign")
    assert len(read_alerts(run, evaluated)) == len(alerts)
    assert os.listdir(Path.cwd()) == []  # noqa: PTH208


def test_a_rule_is_tried_and_proved_in_a_bucket(run: Run, evaluated: str) -> None:
    words = ("backtest", "much", "--out", f"{evaluated}/trial")
    figures = [json.loads(line) for line in run(evaluated, *words, "--json").splitlines()]
    assert figures[0]["alerts"]
    assert "not empty" in run(evaluated, *words, code=2)
    run(evaluated, "prove", "pay")
    for _ in range(2):
        run(evaluated, "prove", "pay", "--nightly")
    assert os.listdir(Path.cwd()) == []  # noqa: PTH208


def test_a_person_is_forgotten_in_a_bucket(run: Run, conf: Path, evaluated: str) -> None:
    assert "no evaluation has begun" not in run(evaluated, "maintain")
    forget = ("forget", "pay", "--where", "card = 'c1'", "--yes", "--json")
    assert json.loads(run(evaluated, *forget))["waiting"] is True
    run(evaluated, "evaluate", "pay", "--once")
    assert json.loads(run(evaluated, *forget))["waiting"] is False
    run(evaluated, "evaluate", "pay", "--once", "--rebuild")
    assert [row for row in read_alerts(run, evaluated) if row["key"]["card"] == "c1"] == []
    run(evaluated, "ingest", "pay", str(conf / "2.csv"))
    run(evaluated, "evaluate", "pay", "--once")
    run(evaluated, "prove", "pay")
    assert os.listdir(Path.cwd()) == []  # noqa: PTH208


def test_a_killed_evaluation_goes_on_in_a_bucket(run: Run, conf: Path, tmp_path: Path) -> None:
    root = "s3a://bucket/killed"
    for place in (root, str(tmp_path / "folder")):
        run(place, "init")
        run(place, "lists", "add", "good", "c3", "--reason", "a friend")
        run(place, "rules", "push", str(conf / "much.yml"))
        run(place, "ingest", "pay", str(conf / "0.csv"))
        if place == root:
            kill_in_a_batch(root, conf)
        run(place, "evaluate", "pay", "--once")
    assert read_alerts(run, root) == read_alerts(run, str(tmp_path / "folder")) != []
    run(root, "prove", "pay")
    assert os.listdir(Path.cwd()) == []  # noqa: PTH208


def test_a_store_that_fails_now_and_then_changes_no_alert(
    server: S3Server, run: Run, conf: Path, tmp_path: Path
) -> None:
    failures = [
        {"kind": "busy", "rate": 0.005},
        {"kind": "reset", "rate": 0.003},
        {"kind": "lost", "rate": 0.005, "method": "PUT|POST"},
    ]
    root = "s3a://bucket/weather"
    for place in (root, str(tmp_path / "folder")):
        run(place, "init")
        run(place, "lists", "add", "good", "c3", "--reason", "a friend")
        run(place, "rules", "push", str(conf / "much.yml"))
        if place == root:
            server.set_weather(delay=0.005, failures=failures)
        try:
            run(place, "ingest", "pay", str(conf / "0.csv"))
            run(place, "evaluate", "pay", "--once")
        finally:
            server.set_weather()
    assert read_alerts(run, root) == read_alerts(run, str(tmp_path / "folder")) != []


def kill_in_a_batch(root: str, conf: Path) -> None:
    command = [sys.executable, "-m", "lookback.cli", "--root", root, "--conf", str(conf), "evaluate", "pay"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    spark = SparkSession.getActiveSession()
    assert spark is not None
    planned = open_place(f"{root}/_checkpoints/evaluate_pay/offsets/0", spark)
    deadline = time.monotonic() + 300
    while not planned.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()

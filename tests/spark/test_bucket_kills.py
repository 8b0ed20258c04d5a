"""kill -9 of an evaluation in a bucket at any moment, again and again: every alert once, and none is missing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bucket import BucketTables
from objectstore import S3Server

pytestmark = [pytest.mark.spark, pytest.mark.objectstore]
KILLS = int(os.environ.get("LOOKBACK_KILLS", "4"))
RULES = 2
# More commits than are judged between two kills, so that there is always a batch to kill.
COMMITS_PER_KILL = 8
REQUEST_SECONDS = 0.02


def kill_after(tables: BucketTables, seconds: float) -> None:
    """Starts an evaluation, and kills it some seconds after it has planned a batch."""
    with (tables.conf / "evaluate.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "lookback.cli", *tables.options, "evaluate", "pay", "--every", "0 seconds"],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + 300
            with tables.server.count_requests_of_batches():
                while not tables.server.read_counts()["batches"]:
                    assert process.poll() is None, (tables.conf / "evaluate.log").read_text()
                    assert time.monotonic() < deadline, "no batch was planned"
                    time.sleep(0.1)
            time.sleep(seconds)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    tables.release()


def test_c13_1_an_evaluation_that_is_killed_at_any_moment_raises_each_alert_once(
    server: S3Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = BucketTables.make(server, tmp_path / "kills", RULES)
    tables.append(KILLS * COMMITS_PER_KILL)
    server.set_weather(delay=REQUEST_SECONDS)
    chance = random.Random(5)
    try:
        for _ in range(KILLS):
            kill_after(tables, 4 * chance.random())
    finally:
        server.set_weather()
    tables.run("evaluate", "pay", "--once")
    capsys.readouterr()
    tables.run("alerts", "--json")
    tables.require_each_alert_once(capsys.readouterr().out, RULES)
    # A replay of the events, compared row by row.
    tables.run("prove", "pay")

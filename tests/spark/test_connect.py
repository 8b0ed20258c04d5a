"""Everything over Spark Connect, which serverless compute is: in a process of its own, against open-source Spark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Two servers of their own, each of which begins cold.
pytestmark = [pytest.mark.spark, pytest.mark.long]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The findings of `connect_evaluation.py`."""
    return run("connect_evaluation.py", tmp_path_factory.mktemp("connect"))


def run(script: str, *arguments: object) -> dict[str, Any]:
    """Runs a script beside this file in a process of its own. Returns the line of JSON that it prints."""
    # Workers of Spark import the tests' modules too.
    paths = [str(ROOT / "tests"), str(ROOT / "tests/support"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    paths.append(str(ROOT / "tests" / "spark"))
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "MPLBACKEND": "agg"}
    command = [sys.executable, Path(__file__).with_name(script), *map(str, arguments)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-5_000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_an_evaluation_whose_client_has_no_stateful_operator_is_refused_before_it_begins(found: dict[str, Any]) -> None:
    assert found["connect"]
    message = found["refused"].pop("message")
    assert (
        "has no stateful operator for Python; it needs Spark 4.1. Use a cluster with dedicated access mode" in message
    )
    assert found["refused"] == {"checkpoint": False, "log": 0}


def test_a_place_is_set_up_evaluated_and_maintained_over_spark_connect(found: dict[str, Any]) -> None:
    first, last = found["alerts"]
    assert 10 < first < last
    assert found["equal"]
    assert found["again"] == ["as it should be"]
    assert found["compacted"] == 4
    assert found["failing"] == ["quarantined"]
    # As many shards as cores, though the session has more partitions, and nothing of it is left there.
    assert (found["partitions"], found["settings_left"]) == (["0", "1"], {})


def test_an_analyst_tries_publishes_explains_and_reviews_over_spark_connect(found: dict[str, Any]) -> None:
    assert (found["tried"], found["version"], found["consistent"]) == (True, 1, True)
    assert found["reviews"] == ["confirmed", "false_positive"]
    assert found["reviewed"] == [True, "ann"]


def test_commands_work_over_spark_connect(found: dict[str, Any]) -> None:
    working = ("status", "push", "check", "alerts", "rejected", "review", "forget")
    assert {name: found["codes"][name] for name in working} == dict.fromkeys(working, 0)
    assert found["status"] == [250, 0]
    assert found["rejected"] == "at: is missing"
    assert found["pushed"] == [1]
    assert found["forgotten"]["payins"] > 20
    assert found["left"] == 0


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("ingest", "a cluster with dedicated access mode, as the job ingest does"),
        ("retry", "a cluster with dedicated access mode, as the job ingest does"),
        ("rebuild", "use a cluster with dedicated access mode for --rebuild"),
        ("repartition", "this Spark cannot repartition state"),
    ],
)
def test_commands_that_cannot_work_over_spark_connect_are_refused_in_a_sentence_before_they_begin(
    found: dict[str, Any], command: str, says: str
) -> None:
    assert found["codes"][command] == 2
    assert found["errors"][command].startswith("lookback: ")
    assert says in found["errors"][command]
    assert found["checkpoint_changed"] == []


def test_a_backlog_is_judged_by_workers_of_one_gibibyte_each(tmp_path: Path) -> None:
    found = run("connect_memory.py", tmp_path)
    assert found["alerts"] == found["wanted"] == 40_000
    assert found["batches"] >= 4
    # Some is left for larger events and rules.
    assert found["largest_worker_peak_mib"] < 896

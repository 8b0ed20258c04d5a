"""An evaluation on Spark Connect, which serverless compute is: in a process of its own, against open-source Spark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Spark gives a worker ten seconds to start, which a busy machine may not keep: not among the tests of every change.
pytestmark = [pytest.mark.spark, pytest.mark.long]
ROOT = Path(__file__).parents[2]


def test_a_place_is_set_up_evaluated_and_maintained_over_spark_connect(tmp_path: Path) -> None:
    script = Path(__file__).with_name("connect_evaluation.py")
    # Workers of Spark import the tests' modules too.
    paths = [str(ROOT / "tests"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, script, tmp_path], env=variables, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-5_000:]
    found = json.loads(done.stdout.splitlines()[-1])

    first, last = found.pop("alerts")
    assert 10 < first < last
    assert found == {
        "connect": True, "again": ["as it should be"], "compacted": 4, "equal": True, "failing": ["quarantined"],
        # As many shards as cores, though Spark's default is 200 partitions, and nothing of it is left in the session.
        "partitions": ["0", "1"], "settings_left": {},
    }  # fmt: skip

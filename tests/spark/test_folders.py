"""A process that has read tables without Spark ends in order, also where a query needed only the first rows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

# By delta-rs's own file system, which Arrow's threads call, this crashed two times of three, and hung the third time.
SCRIPT = """
import sys
from lookback.spark.tables.folders import open_folders

with open_folders(sys.argv[1]) as tables:
    rows = tables.read("alerts")
    assert not rows.isEmpty() and len(rows.limit(1).collect()) == 1 and rows.count() == 200_000
"""


@pytest.mark.long
def test_a_scan_that_ends_early_does_not_outlive_the_interpreter(tmp_path: Path) -> None:
    texts = [f"{at:032d}" for at in range(4_000)]
    for number in range(50):
        rows = pa.table({"alert_id": texts, "message": [text * 4 for text in texts], "arrival": [number] * len(texts)})
        write_deltalake(tmp_path / "alerts", rows, mode="append")
    for _ in range(3):
        ended = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
        )
        assert (ended.returncode, ended.stderr) == (0, "")

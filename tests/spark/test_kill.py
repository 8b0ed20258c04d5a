"""kill -9 of `lookback evaluate` in mid-run: the same alerts as an undisturbed run, none twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from payins import (
    MORE_RULES,
    RULES,
    STREAM,
    STREAMS,
    append,
    make_events,
    publish,
    replay_of_tables,
    replayed_alerts,
    stored_alerts,
)

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def start(tables: Tables, conf: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lookback.cli", "--root", str(tables.root), "--conf", str(conf)]
    return subprocess.Popen(
        [*command, "evaluate", STREAM.name, "--json", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def kill(process: subprocess.Popen[str]) -> None:
    """Ends the command, its JVM and its Python workers at once, as a machine that dies does."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize("kills", [1, pytest.param(2, marks=pytest.mark.long)])
def test_c8_killed_runs_and_a_last_one_give_what_one_run_gives(ready: Tables, tmp_path: Path, kills: int) -> None:
    conf = tmp_path / "conf"
    (conf / "streams").mkdir(parents=True)
    (conf / "streams/payins.yml").write_text(yaml.safe_dump(STREAM.to_dict()))
    options = {
        "spark.driver.memory": "2g",
        "spark.driver.defaultJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    (conf / "settings.yml").write_text(yaml.safe_dump({"spark": options}))
    publish(ready, [*RULES, *MORE_RULES])
    events = make_events(200, seed=21)
    offsets = Path(checkpoint_folder(ready, STREAM)) / "offsets"
    chance = random.Random(4)
    for part in range(kills):
        process = start(ready, conf, "--every", "100 milliseconds")
        try:
            planned = len(list(offsets.glob("[0-9]*")))
            append(ready, [row for row in events if row["arrival"] == 4 * part + 1])
            deadline = time.monotonic() + 120
            while len(list(offsets.glob("[0-9]*"))) == planned:
                assert process.poll() is None, process.stderr and process.stderr.read()
                assert time.monotonic() < deadline, "no batch was planned"
                time.sleep(0.02)
            append(ready, [row for row in events if 4 * part + 1 < row["arrival"] <= 4 * part + 4])
            time.sleep(chance.random() * 1.5)
        finally:
            kill(process)
    append(ready, [row for row in events if row["arrival"] > 4 * kills])
    last = Evaluation(ready, STREAM, STREAMS, checkpoint_folder(ready, STREAM), once=True)
    last.run()
    assert last.reports
    found = stored_alerts(ready)
    assert found == replayed_alerts(replay_of_tables(ready))
    identities = [(row.alert_id, row.revision) for row in found]
    assert len(set(identities)) == len(identities) > 20
    activated = ready.read("rule_log").where("action = 'activated'").collect()
    assert sorted(row["rule_id"] for row in activated) == sorted(
        document["rule_id"] for document in [*RULES, *MORE_RULES]
    )

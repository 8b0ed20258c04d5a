"""kill -9 of `lookback evaluate` in mid-run: the same alerts as an undisturbed run, none twice."""

from __future__ import annotations

import contextlib
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

from lookback.cli import main
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

pytestmark = pytest.mark.spark


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


@pytest.mark.long
@pytest.mark.parametrize("kills", [1, 2])
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


def write_files(folder: Path) -> None:
    """Writes what the commands below take in."""
    (folder / "more.yml").write_text(yaml.safe_dump({**MORE_RULES[0], "rule_id": "more"}))
    (folder / "shops.csv").write_text("value\na\nb\nc\n")
    (folder / "labels.csv").write_text("id,positive\ne1,true\ne2,false\n")


# What each command leaves behind, however often it is cut short and made again: the rows of a query.
COMMANDS = {
    "push": (
        ["rules", "push", "{conf}/more.yml"],
        ("rules", "select distinct status, document is null from {} where rule_id = 'more'"),
        [("active", False)],
    ),
    "review": (
        ["review", "{alert}", "--disposition", "benign"],
        ("reviews", "select distinct alert_id = '{alert}', disposition from {}"),
        [(True, "benign")],
    ),
    "import of a list": (
        ["lists", "import", "shops", "{conf}/shops.csv", "--reason", "known"],
        ("lists", "select value, count(*) from {} group by value order by value"),
        [("a", 1), ("b", 1), ("c", 1)],
    ),
    "import of labels": (
        ["labels", "import", STREAM.name, "{conf}/labels.csv"],
        ("labels", "select event_id, count(distinct positive) from {} group by event_id order by event_id"),
        [("e1", 1), ("e2", 1)],
    ),
    "forget": (
        ["forget", STREAM.name, "--where", "customer = 3", "--yes"],
        ("alerts", "select count(*) from {} where key['customer'] = '3'"),
        [(0,)],
    ),
    "maintain": (["maintain"], ("alerts", "select count(distinct alert_id, revision) = count(*) from {}"), [(True,)]),
    "prove": (
        ["prove", STREAM.name, "--nightly"],
        ("alerts", "select count(distinct alert_id, revision) = count(*) from {}"),
        [(True,)],
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", COMMANDS)
def test_c8_a_command_that_was_killed_is_made_again(ready: Tables, tmp_path: Path, name: str) -> None:
    conf = tmp_path / "conf"
    (conf / "streams").mkdir(parents=True)
    (conf / "streams/payins.yml").write_text(yaml.safe_dump(STREAM.to_dict()))
    write_files(conf)
    publish(ready, RULES)
    append(ready, make_events(100, seed=22))
    Evaluation(ready, STREAM, STREAMS, checkpoint_folder(ready, STREAM), once=True).run()
    root, words = Path(str(ready.root)), COMMANDS[name][0]
    alert = ready.read("alerts").select("alert_id").orderBy("alert_id").head()[0]  # type: ignore[index]
    command = ["--root", str(root), "--conf", str(conf), *(word.format(conf=conf, alert=alert) for word in words)]
    chance = random.Random(name)
    before = set(root.rglob("*"))
    process = subprocess.Popen(
        [sys.executable, "-m", "lookback.cli", *command],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while process.poll() is None and set(root.rglob("*")) <= before:
        assert time.monotonic() < deadline, "it has written nothing"
        time.sleep(0.005)
    # Its first file is there: a table is half written, or its commit follows.
    time.sleep(chance.choice([0, 0.05, 0.3]))
    with contextlib.suppress(ProcessLookupError):
        kill(process)
    ready.spark._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()  # type: ignore[union-attr]
    assert main(command) == 0
    table, query = COMMANDS[name][1]
    found = ready.spark.sql(query.format(ready.identifier(table), alert=alert)).collect()
    assert [tuple(row) for row in found] == COMMANDS[name][2]
    # The stream goes on, and nothing of what it wrote is gone or there twice.
    Evaluation(ready, STREAM, STREAMS, checkpoint_folder(ready, STREAM), once=True).run()
    assert main([*command[:4], "prove", STREAM.name]) == 0

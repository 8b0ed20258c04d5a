"""More than one machine, as far as one can show it: a Spark cluster of a master and two workers with executors of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from bucket import STREAM as PAY
from bucket import BucketTables
from dev.bench.standalone import Standalone, running
from lookback.spark.checkpoints.checkpoint import Checkpoint
from lookback.spark.rules import RulesTable
from lookback.spark.stream.pipeline import checkpoint_folder
from payins import (
    MORE_RULES,
    RULES,
    STREAM,
    STREAMS,
    append,
    make_events,
    replay_of_tables,
    replayed_alerts,
    rule,
    stored_alerts,
)

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables
    from objectstore import S3Server

pytestmark = [pytest.mark.spark, pytest.mark.cluster]
ROOT = Path(__file__).parents[2]
_QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseSerialGC"
_PATIENCE_SECONDS = 300
# By another key than all rules before it, so that the running query does not send what it needs. Without history, as in the
# replay: of what was there before, the moment of its activation would decide.
BY_AMOUNT = rule(
    "by-amount", group_by=["amount"], measures={"n": "count(*)"}, when="n > 1", message="{n}", warm_start=False
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    # What each node has installed, of which this tree goes first.
    installed = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    with Standalone(
        tmp_path_factory.mktemp("cluster"), workers=2, cores=1, memory="1g", environment=installed
    ) as started:
        yield started
        everything = started.members()
    assert len(everything) >= 3
    assert not everything.items() & running().items()


class Driver:
    """`lookback evaluate` on the cluster, a process of its own."""

    def __init__(
        self,
        cluster: Standalone,
        root: object,
        folder: Path,
        *options: str,
        stream: Mapping[str, Any] | None = None,
        more: Mapping[str, Any] | None = None,
        python: Path | None = None,
    ) -> None:
        """stream: its declaration, of STREAM if None. more: settings beside those of Spark. python: the executors' Python."""
        stream = stream or STREAM.to_dict()
        folder.mkdir()
        (folder / "streams").mkdir()
        (folder / f"streams/{stream['stream']}.yml").write_text(yaml.safe_dump(dict(stream)))
        settings = {
            **(more or {}).get("spark", {}),
            **cluster.settings,
            "spark.driver.memory": "1g",
            "spark.executor.memory": "700m",
            "spark.driver.defaultJavaOptions": _QUICK_JAVA,
            "spark.executor.extraJavaOptions": _QUICK_JAVA,
        }
        (folder / "settings.yml").write_text(yaml.safe_dump({**(more or {}), "metrics": "none", "spark": settings}))
        command = [sys.executable, "-m", "lookback.cli", "--root", str(root), "--conf", str(folder)]
        self._out, self._err = folder / "out.txt", folder / "err.txt"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [*command, "evaluate", stream["stream"], "--json", *options], stdout=out, stderr=err,
                env={**os.environ, **({} if python is None else {"PYSPARK_PYTHON": str(python)})}, start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    @property
    def batches(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._out.read_text().splitlines(keepends=True) if line.endswith("\n")]

    @property
    def error(self) -> str:
        return self._err.read_text()

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not condition():
            assert self.process.poll() is None, self.error
            assert time.monotonic() < deadline, f"{what}: not within {_PATIENCE_SECONDS} s\n{self.error}"
            time.sleep(0.01)

    def wait_until_judged(self, arrival: int) -> None:
        self.wait_for(lambda: any(batch["arrival"] >= arrival for batch in self.batches), f"commit {arrival} judged")

    def wait_for_batches(self, number: int) -> None:
        self.wait_for(lambda: len(self.batches) >= number, f"{number} batches")

    def ended(self) -> int:
        return self.process.wait(_PATIENCE_SECONDS)

    def kill(self) -> None:
        """Ends the command, its JVM and its Python processes at once, as a machine that dies does."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class ApartTables(BucketTables):
    """Tables in a bucket, whose commands run in processes of their own: the session of the tests knows no bucket."""

    def run(self, *words: str) -> str:
        """Runs a command and returns what it printed."""
        command = [sys.executable, "-m", "lookback.cli", *self.options, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout


def begun_batch(checkpoint: Path) -> int | None:
    """The batch that is planned and not finished."""
    begun = {int(file.name) for file in (checkpoint / "offsets").glob("[0-9]*")}
    (open_,) = begun - {int(file.name) for file in (checkpoint / "commits").glob("[0-9]*")} or {None}
    return open_


def test_c8_executors_workers_and_drivers_may_die_in_mid_batch_and_the_alerts_are_those_of_a_replay(
    cluster: Standalone, tables: Tables, tmp_path: Path
) -> None:
    tables.create(STREAM)
    rules = RulesTable(tables, STREAMS)
    for document in [*RULES, *MORE_RULES]:
        rules.push(document)
    events = make_events(250, seed=31)
    checkpoint = Path(checkpoint_folder(tables, STREAM))

    def arrive(first: int, last: int) -> None:
        append(tables, [row for row in events if first <= row["arrival"] <= last])

    def die_in_mid_batch(driver: Driver, die: Callable[[], None], first: int, last: int) -> None:
        # A batch says what it did before Spark notes its end.
        driver.wait_for(lambda: begun_batch(checkpoint) is None, "the end of the batch before")
        arrive(first, last)
        driver.wait_for(lambda: begun_batch(checkpoint) is not None, "a batch that has begun")
        batch = begun_batch(checkpoint)
        die()
        assert batch is not None
        assert not (checkpoint / "commits" / str(batch)).exists(), "it had ended before"

    with Driver(cluster, tables.root, tmp_path / "first", "--every", "100 milliseconds", "--shards", "4") as driver:
        arrive(1, 2)
        driver.wait_until_judged(2)
        assert len(cluster.executors()) == 2

        die_in_mid_batch(driver, lambda: os.kill(cluster.executors()[0], signal.SIGKILL), 3, 4)
        driver.wait_until_judged(4)
        driver.wait_for(lambda: len(cluster.executors()) == 2, "an executor in place of the one that died")

        die_in_mid_batch(driver, cluster.workers[0].kill, 5, 6)
        driver.wait_until_judged(6)
        assert len(cluster.executors()) == 1

        cluster.add_worker()
        driver.wait_for(lambda: len(cluster.executors()) == 2, "an executor on the worker that was added")
        rules.push(BY_AMOUNT)
        arrive(7, 8)
        driver.wait_until_judged(8)

        die_in_mid_batch(driver, driver.kill, 9, 9)
    with Driver(cluster, tables.root, tmp_path / "second", "--once") as driver:
        arrive(10, 10)
        assert driver.ended() == 0, driver.error

    found = stored_alerts(tables)
    assert found == replayed_alerts(replay_of_tables(tables))
    identities = [(row.alert_id, row.revision) for row in found]
    assert len(set(identities)) == len(identities) > 20
    assert {row.rule_id for row in found} >= {"by-amount", "by-customer", "sessions", "large-small"}
    plan = Checkpoint(checkpoint).read_plan()
    assert plan is not None
    assert plan.shards == 4


def test_c13_1_machines_that_share_only_a_bucket_may_die_and_each_alert_is_there_once(
    cluster: Standalone, server: S3Server, tmp_path: Path
) -> None:
    """Tables and checkpoint are in the bucket; each request takes 20 ms."""
    rules, commits = 2, 24
    tables = ApartTables.make(server, tmp_path / "shared", rules)
    tables.append(commits)
    more = yaml.safe_load((tables.conf / "settings.yml").read_text())
    server.set_weather(delay=0.02)
    try:
        options = ("--every", "0 seconds", "--shards", "4")
        with Driver(cluster, tables.root, tmp_path / "first", *options, stream=PAY, more=more) as driver:
            driver.wait_for_batches(3)
            os.kill(cluster.executors()[0], signal.SIGKILL)
            driver.wait_for_batches(6)
            cluster.workers[-1].kill()
            driver.wait_for_batches(9)
            cluster.add_worker()
            assert len(driver.batches) < commits
            driver.kill()
        tables.release()
        with Driver(cluster, tables.root, tmp_path / "second", "--once", stream=PAY, more=more) as driver:
            assert driver.ended() == 0, driver.error
    finally:
        server.set_weather()
    tables.require_each_alert_once(tables.run("alerts", "--json"), rules)
    tables.run("prove", "pay")


def test_machines_that_lack_lookback_are_told_what_to_install(
    cluster: Standalone, tables: Tables, tmp_path: Path
) -> None:
    tables.create(STREAM)
    append(tables, make_events(25, seed=1))
    # As on a machine where it was not installed, whatever this one has: the Python that PYSPARK_PYTHON names.
    missing = tmp_path / "machine" / "lookback"
    missing.mkdir(parents=True)
    (missing / "__init__.py").write_text("raise ModuleNotFoundError(f'No module named {__name__!r}')")
    python = tmp_path / "machine" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{missing.parent}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    with Driver(cluster, tables.root, tmp_path / "conf", "--once", python=python) as driver:
        assert driver.ended() == 2
        assert driver.error.splitlines()[-1].startswith(
            "lookback: the Python of Spark's executors has no module 'lookback'; on every machine of the cluster, install"
        )

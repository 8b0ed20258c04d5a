"""More than one machine, as far as one can show it: a Spark cluster of a master and two workers with executors of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

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
        self, cluster: Standalone, tables: Tables, folder: Path, *options: str, python: Path | None = None
    ) -> None:
        folder.mkdir()
        (folder / "streams").mkdir()
        (folder / "streams/payins.yml").write_text(yaml.safe_dump(STREAM.to_dict()))
        settings = {
            **cluster.settings,
            "spark.driver.memory": "1g",
            "spark.executor.memory": "700m",
            "spark.driver.defaultJavaOptions": _QUICK_JAVA,
            "spark.executor.extraJavaOptions": _QUICK_JAVA,
        }
        (folder / "settings.yml").write_text(yaml.safe_dump({"metrics": "none", "spark": settings}))
        command = [sys.executable, "-m", "lookback.cli", "--root", str(tables.root), "--conf", str(folder)]
        self._out, self._err = folder / "out.txt", folder / "err.txt"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [*command, "evaluate", STREAM.name, "--json", *options], stdout=out, stderr=err,
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

    def ended(self) -> int:
        return self.process.wait(_PATIENCE_SECONDS)

    def kill(self) -> None:
        """Ends the command, its JVM and its Python processes at once, as a machine that dies does."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


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

    with Driver(cluster, tables, tmp_path / "first", "--every", "100 milliseconds", "--shards", "4") as driver:
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
    with Driver(cluster, tables, tmp_path / "second", "--once") as driver:
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
    with Driver(cluster, tables, tmp_path / "conf", "--once", python=python) as driver:
        assert driver.ended() == 2
        assert driver.error.splitlines()[-1].startswith(
            "lookback: the Python of Spark's executors has no module 'lookback'; on every machine of the cluster, install"
        )

"""One round of a soak run: tables of its own, processes that are killed and started again, and a comparison."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from dev.soak.killing import OUTPUTS, Moment, Place, Torn, Worker, tear
from dev.soak.processes import LANDING
from dev.soak.scenario import STREAM, Feed
from dev.soak.tally import Tally

_EVALUATE = ["--every", "100 milliseconds"]
_REBUILD = "--rebuild"
# Events wait for evaluation, not evaluation for events; more than that would only make batches large.
_MOST_WAITING = 40
# For each time that ingest looks.
_MOST_FILES = 3
_LONGEST_WAIT = 120.0
_LONGEST_CLOSE = 600.0
_MOST_FAILURES = 3
# Spark takes up workers that wait for work before it sees that they are gone, one a task.
_FAILURES_OF_A_KILL = 3
# In one life of the evaluation: a batch that fails costs seconds, a JVM that starts ten times as many.
_WORKER_KILLS = (0, 2, 4, 8)


class Round:
    """tear: after which part of the kills of an evaluation a file of its checkpoint is cut off."""

    def __init__(self, folder: Path, chance: random.Random, tally: Tally, tear: float) -> None:
        self._place, self._chance, self._tally, self._tear = Place(folder), chance, tally, tear
        self._stopping = threading.Event()
        self._failures = self._started = 0
        # Since the last start that went well for longer than a torn file can stay unread.
        self._torn: list[Torn] = []
        self._rebuilds = _can_rebuild()

    def run(self, kills: int, deadline: float) -> dict[str, Any]:
        """Kills so many processes, or until `deadline` (monotonic seconds). Returns the comparison, or an `error`."""
        self._prepare()
        goal = self._tally.kills + kills

        def enough() -> bool:
            over = self._tally.kills >= goal or time.monotonic() > deadline or self._tally.stopping
            return over or self._stopping.is_set() or self._failures >= _MOST_FAILURES

        others = [
            self._thread(self._feed),
            self._thread(lambda chance: self._others("ingest", chance, enough)),
            self._thread(lambda chance: self._others("author", chance, enough)),
        ]
        try:
            self._evaluations(enough)
        except RuntimeError as error:
            self._failed("evaluate", str(error))
        finally:
            self._stopping.set()
            for thread in others:
                thread.join()
        return self._close()

    def _thread(self, work: Callable[[random.Random], None]) -> threading.Thread:
        chance = random.Random(self._chance.random())  # noqa: S311 - repeatable, no secret
        thread = threading.Thread(target=work, args=(chance,), daemon=True)
        thread.start()
        return thread

    def _prepare(self) -> None:
        """Makes the tables; as that process ends, its JVM writes down the classes that the others then read faster."""
        folder = self._place.folder
        (folder / "conf/streams").mkdir(parents=True)
        (folder / LANDING).mkdir()
        (folder / "conf/streams" / f"{STREAM.name}.yml").write_text(yaml.safe_dump(STREAM.to_dict()))
        archive = folder / "classes.jsa"
        self._configure(f"-XX:ArchiveClassesAtExit={archive}")
        worker = self._worker("prepare")
        worker.begin({})
        worker.finish(_LONGEST_WAIT)
        self._configure(f"-XX:SharedArchiveFile={archive}" if archive.exists() else "")

    def _configure(self, flags: str) -> None:
        settings = {
            "admission": {"maxFilesPerTrigger": "4"},
            "spark": {
                "spark.driver.memory": "1g",
                # A process is killed before a slower compiler pays.
                "spark.driver.defaultJavaOptions": f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:disable {flags}",
            },
        }
        (self._place.folder / "conf/settings.yml").write_text(yaml.safe_dump(settings))

    def _worker(self, role: str) -> Worker:
        self._started += 1
        return Worker(role, self._place, self._place.folder / f"{role}-{self._started}.log")

    def _feed(self, chance: random.Random) -> None:
        """Drops files for ingest, whole ones, as long as evaluation keeps up."""
        feed, number = Feed(chance), 0
        while not self._stopping.wait(chance.uniform(0.3, 1.5)):
            if self._place.waiting() > _MOST_WAITING or number > _MOST_FILES * (1 + self._place.taken_in()):
                continue
            number += 1
            text = "\n".join(feed.lines(chance.randint(1, 80)))
            draft = self._place.folder / f"{number}.draft"
            draft.write_text(text + "\n", encoding="utf-8")
            draft.rename(self._place.folder / LANDING / f"{number:06}.json")
            self._tally.add("offered", "files")

    def _others(self, role: str, chance: random.Random, enough: Callable[[], bool]) -> None:
        """Lives and deaths of the ingest or of the author."""
        table = STREAM.name if role == "ingest" else "rules"
        moments = [
            Moment("while it starts", None, 3),
            Moment("while a file is written", lambda: self._place.data(table), 0.02),
            Moment("at a commit", lambda: self._place.commits(table), 0.02),
            Moment("at any time", lambda: self._place.commits(table), 3),
        ]
        while not enough():
            worker = self._worker(role)
            try:
                self._life(worker, chance.choices(moments, weights=[1, 3, 3, 3])[0], chance)
            except RuntimeError as error:
                self._failed(role, str(error))
            finally:
                worker.kill()
                worker.log.unlink(missing_ok=True)

    def _life(self, worker: Worker, moment: Moment, chance: random.Random) -> None:
        """Of an ingest or of an author, up to the moment that it is killed at."""
        worker.begin({"seed": str(chance.random())})
        if moment.look is not None:
            self._stopping.wait(chance.uniform(15, 90))
        if moment.wait(chance, lambda: worker.ended() or self._stopping.is_set(), _LONGEST_WAIT):
            self._tally.kill(f"{worker.role}, {moment.name}")
        elif worker.ended():
            self._failed(worker.role, worker.complaint())

    def _evaluations(self, enough: Callable[[], bool]) -> None:
        """Lives and deaths of the evaluation."""
        options: list[str] = []
        worker = self._worker("evaluate")
        while not enough():
            worker.begin({"options": [*_EVALUATE, *options]})
            # The next one warms up meanwhile.
            standby = self._worker("evaluate")
            # A torn file may be read at any later start.
            killed = 1_000 if self._torn else 0
            for _ in range(self._chance.choice(_WORKER_KILLS)):
                if self._met(worker) and not enough():
                    worker.kill_workers()
                    killed += _FAILURES_OF_A_KILL
                    self._tally.kill("Python workers of the evaluation")
                    self._batches(worker, 1)
            met = self._met(worker)
            if worker.ended():
                options = self._remedy(worker)
            else:
                worker.kill()
                self._tally.kill(f"evaluation, {met or 'after a long wait'}")
                self._tally.add("left by kills of the evaluation", self._place.interrupted())
                options = []
                if self._chance.random() < self._tear:
                    self._tear_a_file()
            self._look(worker, killed)
            worker = standby
        worker.kill()

    def _met(self, worker: Worker) -> str:
        """Waits for a moment to kill at. Returns its name; empty if the process ended or nothing happened for long."""
        moments = [
            (1, Moment("at any time", None, 4)),
            (2, Moment("in a batch", self._place.planned, 1.0)),
            (2, Moment("while a page is written", self._place.pages, 0.03)),
            (2, Moment("while output is written", lambda: self._place.data(*OUTPUTS), 0.03)),
            (3, Moment("at a commit of output", lambda: self._place.commits(*OUTPUTS), 0.02)),
            (1, Moment("at the end of a batch", self._place.finished, 0.2)),
        ]
        moment = self._chance.choices([moment for _, moment in moments], [weight for weight, _ in moments])[0]
        if moment.look is not None:
            self._batches(worker, self._chance.choice([0, 0, 0, 1, 2]))
        return moment.name if moment.wait(self._chance, worker.ended, _LONGEST_WAIT) else ""

    def _tear_a_file(self) -> None:
        torn = tear(self._place, self._chance)
        if torn is not None:
            self._torn.append(torn)
            self._tally.add("torn", torn.kind)

    def _batches(self, worker: Worker, count: int) -> None:
        """Lets it end so many batches, if it does."""
        before, deadline = self._place.finished(), time.monotonic() + _LONGEST_WAIT
        while len(self._place.finished() - before) < count and time.monotonic() < deadline and not worker.ended():
            time.sleep(0.02)

    def _remedy(self, worker: Worker) -> list[str]:
        """What the next evaluation must be told after this one ended by itself."""
        complaint = worker.complaint()
        if not self._torn:
            self._failed(worker.role, complaint)
            return []
        for torn in self._torn:
            self._tally.remark(f"{torn.file.parent.name}/{torn.file.name} cut to {torn.left} bytes")
        self._tally.remark(complaint[:1_500])
        self._tally.add("torn, then", "refused and made anew" if self._rebuilds else "refused")
        if not self._rebuilds:
            for torn in self._torn:
                torn.mend()
        self._torn.clear()
        return [_REBUILD] if self._rebuilds else []

    def _failed(self, role: str, complaint: str) -> None:
        self._failures += 1
        self._tally.add("ended by itself", role)
        self._tally.remark(f"{role}: {complaint[:2_000]}")

    def _look(self, worker: Worker, killed: int) -> None:
        """Takes what an evaluation said into the figures. killed: how many failures are no wonder."""
        failures = 0
        for said in worker.said():
            if "broken" in said:
                failures += 1
                self._tally.add("evaluated", "batches that failed as Python workers were gone")
                if failures > killed:
                    self._failed(worker.role, said["broken"])
            if "batch_id" in said:
                self._tally.add("evaluated", "batches")
                self._tally.add("evaluated", "events, those judged again too", said["events"])
        worker.log.unlink(missing_ok=True)

    def _close(self, options: Sequence[str] = ()) -> dict[str, Any]:
        """Lets what is left be taken in and judged. Returns the comparison."""
        worker = self._worker("close")
        try:
            worker.begin({"options": options})
        except RuntimeError as error:
            return {"error": str(error)}
        code = worker.finish(_LONGEST_CLOSE)
        # The reader of its output may be a moment behind.
        time.sleep(0.5)
        verdicts: list[dict[str, Any]] = [said["verdict"] for said in worker.said() if "verdict" in said]
        if verdicts:
            return verdicts[0]
        if self._torn:
            return self._close(self._remedy(worker))
        return {"error": f"exit code {code}: {worker.complaint()}"}


def _can_rebuild() -> bool:
    command = [sys.executable, "-m", "lookback.cli", "evaluate", "--help"]
    return _REBUILD in subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603

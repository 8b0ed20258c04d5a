"""Runs one round of a soak run: it has its own tables, kills and restarts processes, and ends with a comparison."""

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
# Some commits should always wait for the evaluation; more than that would only make batches large.
_MAX_WAITING_COMMITS = 40
# At most so many files per round of ingest.
_MAX_FILES_PER_ROUND = 3
_MAX_WAIT_SECONDS = 120.0
_MAX_CLOSE_SECONDS = 600.0
_MAX_FAILURES = 3
# Spark tries to use idle workers before it sees that they are gone, one a task.
_FAILURES_PER_KILL = 3
# Kills of workers for each evaluation: a failed batch costs seconds, the start of a JVM ten times as many.
_WORKER_KILLS = (0, 2, 4, 8)


class Round:
    """A round. tear: the share of the kills of an evaluation after which a file of its checkpoint is cut off."""

    def __init__(self, folder: Path, chance: random.Random, tally: Tally, tear: float) -> None:
        self._place, self._chance, self._tally, self._tear = Place(folder), chance, tally, tear
        self._stopping = threading.Event()
        self._failures = self._started = 0
        # The files torn since the last start that went on for longer than a torn file can stay unread.
        self._torn: list[Torn] = []
        self._rebuilds = _can_rebuild()

    def run(self, kills: int, deadline: float) -> dict[str, Any]:
        """Kills processes until there were `kills`, or until `deadline` (monotonic seconds).

        Returns the comparison, or an `error`.
        """
        self._prepare()
        goal = self._tally.kills + kills

        def is_over() -> bool:
            over = self._tally.kills >= goal or time.monotonic() > deadline or self._tally.stopping
            return over or self._stopping.is_set() or self._failures >= _MAX_FAILURES

        others = [
            self._start_thread(self._feed),
            self._start_thread(lambda chance: self._run_others("ingest", chance, is_over)),
            self._start_thread(lambda chance: self._run_others("author", chance, is_over)),
        ]
        try:
            self._run_evaluations(is_over)
        except RuntimeError as error:
            self._record_failure("evaluate", str(error))
        finally:
            self._stopping.set()
            for thread in others:
                thread.join()
        return self._close()

    def _start_thread(self, work: Callable[[random.Random], None]) -> threading.Thread:
        chance = random.Random(self._chance.random())  # noqa: S311 - repeatable, no secret
        thread = threading.Thread(target=work, args=(chance,), daemon=True)
        thread.start()
        return thread

    def _prepare(self) -> None:
        """Creates the tables; when that process ends, its JVM archives its classes, which the others then load faster."""
        folder = self._place.folder
        (folder / "conf/streams").mkdir(parents=True)
        (folder / LANDING).mkdir()
        (folder / "conf/streams" / f"{STREAM.name}.yml").write_text(yaml.safe_dump(STREAM.to_dict()))
        archive = folder / "classes.jsa"
        self._configure(f"-XX:ArchiveClassesAtExit={archive}")
        worker = self._start_worker("prepare")
        worker.begin({})
        worker.finish(_MAX_WAIT_SECONDS)
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

    def _start_worker(self, role: str) -> Worker:
        self._started += 1
        return Worker(role, self._place, self._place.folder / f"{role}-{self._started}.log")

    def _feed(self, chance: random.Random) -> None:
        """Writes whole files for ingest, as long as the evaluation keeps up."""
        feed, number = Feed(chance), 0
        while not self._stopping.wait(chance.uniform(0.3, 1.5)):
            if self._place.count_waiting() > _MAX_WAITING_COMMITS or number > _MAX_FILES_PER_ROUND * (
                1 + self._place.count_ingest_rounds()
            ):
                continue
            number += 1
            text = "\n".join(feed.make_lines(chance.randint(1, 80)))
            draft = self._place.folder / f"{number}.draft"
            draft.write_text(text + "\n", encoding="utf-8")
            draft.rename(self._place.folder / LANDING / f"{number:06}.json")
            self._tally.add("offered", "files")

    def _run_others(self, role: str, chance: random.Random, is_over: Callable[[], bool]) -> None:
        """Starts and kills the ingest or the author again and again."""
        tables = (STREAM.name,) if role == "ingest" else ("rules", "lists")
        moments = [
            Moment("while it starts", None, 3),
            Moment("while a file is written", lambda: self._place.list_data_files(*tables), 0.02),
            Moment("at a commit", lambda: self._place.list_commits(*tables), 0.02),
            Moment("at any time", lambda: self._place.list_commits(*tables), 3),
        ]
        while not is_over():
            worker = self._start_worker(role)
            try:
                self._run_until_killed(worker, chance.choices(moments, weights=[1, 3, 3, 3])[0], chance)
            except RuntimeError as error:
                self._record_failure(role, str(error))
            finally:
                worker.kill()
                worker.log.unlink(missing_ok=True)

    def _run_until_killed(self, worker: Worker, moment: Moment, chance: random.Random) -> None:
        """Lets an ingest or an author work until the moment at which it is to be killed."""
        worker.begin({"seed": str(chance.random())})
        if moment.look is not None:
            self._stopping.wait(chance.uniform(15, 90))
        if moment.wait(chance, lambda: worker.has_ended() or self._stopping.is_set(), _MAX_WAIT_SECONDS):
            self._tally.kill(f"{worker.role}, {moment.name}")
        elif worker.has_ended():
            self._record_failure(worker.role, worker.read_errors())

    def _run_evaluations(self, is_over: Callable[[], bool]) -> None:
        """Starts and kills the evaluation again and again."""
        options: list[str] = []
        worker = self._start_worker("evaluate")
        while not is_over():
            worker.begin({"options": [*_EVALUATE, *options]})
            # The next one warms up meanwhile.
            standby = self._start_worker("evaluate")
            # A torn file may be read at any later start.
            killed = 1_000 if self._torn else 0
            for _ in range(self._chance.choice(_WORKER_KILLS)):
                if self._wait_for_moment(worker, is_over) and not is_over():
                    worker.kill_workers()
                    killed += _FAILURES_PER_KILL
                    self._tally.kill("Python workers of the evaluation")
                    self._wait_for_batches(worker, 1)
            met = self._wait_for_moment(worker, is_over)
            if worker.has_ended():
                options = self._handle_failure(worker)
            else:
                worker.kill()
                self._tally.kill(f"evaluation, {met or 'after a long wait'}")
                self._tally.add("left by kills of the evaluation", self._place.describe_kill())
                if stage := self._place.describe_warm_up():
                    self._tally.add("warm-ups cut by kills of the evaluation", stage)
                options = []
                if self._chance.random() < self._tear:
                    self._tear_a_file()
            self._count_output(worker, killed)
            worker = standby
        worker.kill()

    def _wait_for_moment(self, worker: Worker, is_over: Callable[[], bool]) -> str:
        """Waits for a moment to kill at. Returns its name; empty if the process ended, the round is over, or for long nothing came."""
        moments = [
            (1, Moment("at any time", None, 4)),
            (2, Moment("in a batch", self._place.list_planned, 1.0)),
            (2, Moment("while a page is written", self._place.list_pages, 0.03)),
            (2, Moment("while output is written", lambda: self._place.list_data_files(*OUTPUTS), 0.03)),
            (3, Moment("at a commit of output", lambda: self._place.list_commits(*OUTPUTS), 0.02)),
            (1, Moment("at the end of a batch", self._place.list_finished, 0.2)),
            (3, Moment("while a history is made", self._place.list_histories, 0.05)),
            # The evaluation writes rows of its own there: of commits of the lists, and of pieces of history.
            (2, Moment("at a commit of rules", lambda: self._place.list_commits("rules"), 1.0)),
        ]
        moment = self._chance.choices([moment for _, moment in moments], [weight for weight, _ in moments])[0]
        if moment.look is not None:
            self._wait_for_batches(worker, self._chance.choice([0, 0, 0, 1, 2]))
        is_done = moment.wait(self._chance, lambda: worker.has_ended() or is_over(), _MAX_WAIT_SECONDS)
        return moment.name if is_done else ""

    def _tear_a_file(self) -> None:
        torn = tear(self._place, self._chance)
        if torn is not None:
            self._torn.append(torn)
            self._tally.add("torn", torn.kind)

    def _wait_for_batches(self, worker: Worker, count: int) -> None:
        """Waits until the evaluation has finished `count` more batches, or the longest wait is over."""
        before, deadline = self._place.list_finished(), time.monotonic() + _MAX_WAIT_SECONDS
        while (
            len(self._place.list_finished() - before) < count and time.monotonic() < deadline and not worker.has_ended()
        ):
            time.sleep(0.02)

    def _handle_failure(self, worker: Worker) -> list[str]:
        """Records why the evaluation ended by itself. Returns the options that the next one needs."""
        errors = worker.read_errors()
        if not self._torn:
            self._record_failure(worker.role, errors)
            return []
        for torn in self._torn:
            self._tally.remark(f"{torn.file.parent.name}/{torn.file.name} cut to {torn.left} bytes")
        self._tally.remark(errors[:1_500])
        self._tally.add("torn, then", "refused and rebuilt" if self._rebuilds else "refused")
        if not self._rebuilds:
            for torn in self._torn:
                torn.restore()
        self._torn.clear()
        return [_REBUILD] if self._rebuilds else []

    def _record_failure(self, role: str, errors: str) -> None:
        self._failures += 1
        self._tally.add("ended by itself", role)
        self._tally.remark(f"{role}: {errors[:2_000]}")

    def _count_output(self, worker: Worker, killed: int) -> None:
        """Adds the output of an evaluation to the figures. killed: how many failures the kills explain."""
        failures = 0
        for line in worker.read_output():
            if "broken" in line:
                failures += 1
                self._tally.add("evaluated", "batches that failed as Python workers were gone")
                if failures > killed:
                    self._record_failure(worker.role, line["broken"])
            if "batch_id" in line:
                self._tally.add("evaluated", "batches")
                self._tally.add("evaluated", "events, those judged again too", line["events"])
        worker.log.unlink(missing_ok=True)

    def _close(self, options: Sequence[str] = ()) -> dict[str, Any]:
        """Has the rest of the events taken in and judged. Returns the comparison."""
        worker = self._start_worker("close")
        try:
            worker.begin({"options": options})
        except RuntimeError as error:
            return {"error": str(error)}
        code = worker.finish(_MAX_CLOSE_SECONDS)
        # The reader of its output may be a moment behind.
        time.sleep(0.5)
        verdicts: list[dict[str, Any]] = [line["verdict"] for line in worker.read_output() if "verdict" in line]
        if verdicts:
            return verdicts[0]
        if self._torn:
            return self._close(self._handle_failure(worker))
        return {"error": f"exit code {code}: {worker.read_errors()}"}


def _can_rebuild() -> bool:
    command = [sys.executable, "-m", "lookback.cli", "evaluate", "--help"]
    return _REBUILD in subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603

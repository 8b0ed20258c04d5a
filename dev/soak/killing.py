"""Starts the processes of a soak run and ends them by SIGKILL at moments that are seen from outside, in their files."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dev.soak.scenario import STREAM

OUTPUTS = ("alerts", "late_events", "rule_log")
_POLL_SECONDS = 0.002
_LONGEST_START = 400.0
_PROC = Path("/proc")


@dataclass(frozen=True)
class Place:
    """The folder of one round, and what can be told from its files while others write them."""

    folder: Path

    @property
    def root(self) -> Path:
        """The tables."""
        return self.folder / "lakehouse"

    @property
    def checkpoint(self) -> Path:
        """That of the evaluation."""
        return self.root / "_checkpoints" / f"evaluate_{STREAM.name}"

    def planned(self) -> set[str]:
        """The batches that were begun."""
        return {name for name in _names(self.checkpoint / "offsets") if name.isdigit()}

    def finished(self) -> set[str]:
        """The batches that were ended."""
        return {name for name in _names(self.checkpoint / "commits") if name.isdigit()}

    def taken_in(self) -> int:
        """How many times ingest has looked and found files."""
        return max((int(name) + 1 for name in _names(self.folder / "ingest/commits") if name.isdigit()), default=0)

    def pages(self) -> set[str]:
        """The files of the state store, those being written too."""
        state = self.checkpoint / "state" / "0"
        return {f"{part}/{name}" for part in _names(state) if part.isdigit() for name in _names(state / part)}

    def data(self, *tables: str) -> set[str]:
        """The data files of tables, those being written too."""
        return {f"{table}/{name}" for table in tables for name in _names(self.root / table) if "parquet" in name}

    def commits(self, *tables: str) -> set[str]:
        """The commits of tables."""
        logs = ((table, self.root / table / "_delta_log") for table in tables)
        return {f"{table}/{name}" for table, log in logs for name in _names(log) if name.endswith(".json")}

    def waiting(self) -> int:
        """Commits of the events table that no finished batch has read yet."""
        known = [int(Path(name).stem) for name in self.commits(STREAM.name)]
        newest = self.finished()
        if not newest or not known:
            return max(known, default=0)
        try:
            lines = (self.checkpoint / "offsets" / max(newest, key=int)).read_text().splitlines()
            read = json.loads(lines[2])
        except (OSError, ValueError, IndexError):
            return 0
        return max(known) - (0 if read is None else int(read["reservoirVersion"]) - 1)

    def interrupted(self) -> str:
        """What a kill of the evaluation left: nothing, a batch half done, or one with some of its output written."""
        half_done = {int(name) for name in self.planned()} - {int(name) for name in self.finished()}
        if not half_done:
            return "between batches"
        mark = f":{max(half_done)}"
        return "after output, before the batch's commit" if self._is_written(mark) else "in a batch"

    def _is_written(self, mark: str) -> bool:
        for table in OUTPUTS:
            newest = max(self.commits(table), default=None)
            if newest is None:
                continue
            name = newest.partition("/")[2]
            try:
                first = (self.root / table / "_delta_log" / name).read_text().splitlines()[0]
            except (OSError, IndexError):
                continue
            if str(json.loads(first).get("commitInfo", {}).get("userMetadata", "")).endswith(mark):
                return True
        return False


def _names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in os.scandir(folder)]
    except OSError:
        return []


@dataclass(frozen=True)
class Moment:
    """When to kill: as soon as `look` sees a name that it did not see before, and up to `spread` seconds later.

    Without `look`: up to `spread` seconds after the process began to work.
    """

    name: str
    look: Callable[[], set[str]] | None
    spread: float

    def wait(self, chance: random.Random, ended: Callable[[], bool], longest: float) -> bool:
        """Waits for the moment. False if the process ended by itself or nothing was seen for so many seconds."""
        deadline = time.monotonic() + longest
        if self.look is not None:
            before = self.look()
            while not self.look() - before:
                if ended() or time.monotonic() > deadline:
                    return False
                time.sleep(_POLL_SECONDS)
        time.sleep(chance.uniform(0, self.spread))
        return not ended()


class Worker:
    """A process of `dev.soak.processes`. log: the file that its standard error goes to."""

    def __init__(self, role: str, place: Place, log: Path) -> None:
        self.role, self.log, self._lines = role, log, queue.Queue[str]()
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", "dev.soak.processes", role, str(place.folder)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True,
            )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def begin(self, order: dict[str, Any]) -> None:
        """Waits until it is warm, then tells it what to do. Raises RuntimeError where it does not get there."""
        try:
            line = self._lines.get(timeout=_LONGEST_START)
        except queue.Empty:
            line = ""
        if line != "ready":
            self.kill()
            raise RuntimeError(f"{self.role} did not start: {self.complaint()}")
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def ended(self) -> bool:
        """Whether it ended by itself."""
        return self._process.poll() is not None

    def finish(self, seconds: float) -> int:
        """Waits until it ends by itself. Returns its exit code; kills it after so many seconds."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            return -signal.SIGKILL

    def said(self) -> list[dict[str, Any]]:
        """The lines of JSON since it was last asked."""
        found = []
        while not self._lines.empty():
            line = self._lines.get()
            if line.startswith("{"):
                found.append(json.loads(line))
        return found

    def complaint(self) -> str:
        """The errors that it wrote to its standard error, and the end of it."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line[:400] for line in lines if re.match(r"(Caused by: )?[\w.]+(Error|Exception)\b", line)]
        return "\n".join([*errors[:8], *(line[:200] for line in lines[-5:])])

    def kill(self) -> None:
        """Ends it with its JVM and its Python workers."""
        end(self._process)

    def kill_workers(self) -> int:
        """Ends the Python workers of Spark alone, as a machine does that runs out of memory. Returns how many."""
        workers = [process for process in _session(self._process.pid) if _is_worker(process)]
        for process in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return len(workers)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip("\n"))


def end(leader: subprocess.Popen[str]) -> None:
    """Ends all processes of a session at once, as a machine that dies does; none where its leader has ended already."""
    if leader.poll() is not None:
        # Its number may be another's by now; what it started ends by itself when its pipes do.
        return
    for process in [leader.pid, *_session(leader.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    leader.wait()


def _session(leader: int) -> list[int]:
    """The processes of a session; Spark's Python workers have a process group of their own."""
    found = []
    for entry in _names(_PROC):
        if not entry.isdigit():
            continue
        try:
            # After the name, which may hold anything: state, parent, group, session.
            fields = (_PROC / entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader and int(entry) != leader:
            found.append(int(entry))
    return found


def _is_worker(process: int) -> bool:
    try:
        return b"pyspark.daemon" in (_PROC / str(process) / "cmdline").read_bytes()
    except OSError:
        return False


@dataclass(frozen=True)
class Torn:
    """A file of the checkpoint as it was before its end was cut off."""

    file: Path
    content: bytes
    left: int

    @property
    def kind(self) -> str:
        """offsets, commits, or the file's suffix."""
        return self.file.suffix.lstrip(".") or self.file.parent.name

    def mend(self) -> None:
        """Puts the file back."""
        self.file.write_bytes(self.content)


def tear(place: Place, chance: random.Random) -> Torn | None:
    """Cuts off the end of the newest file of one kind, as a crash leaves it that came before the disk had it all."""
    kinds = [
        [place.checkpoint / "offsets" / name for name in place.planned()],
        [place.checkpoint / "commits" / name for name in place.finished()],
        [place.checkpoint / "state" / "0" / name for name in place.pages() if _is_state(name)],
    ]
    files = [file for file in chance.choice(kinds) if file.exists()]
    if not files:
        return None
    newest = max(files, key=lambda file: file.stat().st_mtime_ns)
    content = newest.read_bytes()
    left = chance.choice([0, chance.randrange(max(1, len(content)))])
    newest.write_bytes(content[:left])
    # The checksum beside it may be lost as well.
    if chance.random() < 0.5:
        (newest.parent / f".{newest.name}.crc").unlink(missing_ok=True)
    return Torn(newest, content, left)


def _is_state(name: str) -> bool:
    return name.endswith((".changelog", ".zip")) and "/." not in name

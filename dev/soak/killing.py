"""Starts the processes of a soak run and ends them by SIGKILL at moments that their files show."""

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
_MAX_START_SECONDS = 400.0
_PROC = Path("/proc")


@dataclass(frozen=True)
class Place:
    """The folder of one round. Its files are read while others write them."""

    folder: Path

    @property
    def root(self) -> Path:
        """The folder of the tables."""
        return self.folder / "lakehouse"

    @property
    def checkpoint(self) -> Path:
        """The checkpoint of the evaluation."""
        return self.root / "_checkpoints" / f"evaluate_{STREAM.name}"

    def list_planned(self) -> set[str]:
        """Lists the batches that were begun."""
        return {name for name in _list_names(self.checkpoint / "offsets") if name.isdigit()}

    def list_finished(self) -> set[str]:
        """Lists the batches that were finished."""
        return {name for name in _list_names(self.checkpoint / "commits") if name.isdigit()}

    def count_ingest_rounds(self) -> int:
        """Counts the rounds in which ingest has found files."""
        return max((int(name) + 1 for name in _list_names(self.folder / "ingest/commits") if name.isdigit()), default=0)

    def list_pages(self) -> set[str]:
        """Lists the files of the state store, those being written included."""
        state = self.checkpoint / "state" / "0"
        return {f"{part}/{name}" for part in _list_names(state) if part.isdigit() for name in _list_names(state / part)}

    def list_data_files(self, *tables: str) -> set[str]:
        """Lists the data files of tables, those being written included."""
        return {f"{table}/{name}" for table in tables for name in _list_names(self.root / table) if "parquet" in name}

    def list_commits(self, *tables: str) -> set[str]:
        """Lists the commits of tables."""
        logs = ((table, self.root / table / "_delta_log") for table in tables)
        return {f"{table}/{name}" for table, log in logs for name in _list_names(log) if name.endswith(".json")}

    def list_histories(self) -> set[str]:
        """Lists the files with history of versions that are warming, those being written included."""
        return set(_list_names(self.checkpoint / "lookback-histories"))

    def describe_warm_up(self) -> str:
        """Describes how far the warm-up is that is first in turn; empty if no version is warming."""
        try:
            waiting = json.loads((self.checkpoint / "warming.json").read_text())
        except (OSError, ValueError):
            return ""
        if not waiting:
            return ""
        rule_id, version, begun = waiting[0][:3]
        name = f"{rule_id}-{version}-{begun}."
        made = {file for file in self.list_histories() if name in file}
        return "history made, not in force" if f"{name}ready" in made else "history half made" if made else "begun"

    def count_waiting(self) -> int:
        """Counts the commits of the events table that no finished batch has read yet."""
        known = [int(Path(name).stem) for name in self.list_commits(STREAM.name)]
        newest = self.list_finished()
        if not newest or not known:
            return max(known, default=0)
        try:
            lines = (self.checkpoint / "offsets" / max(newest, key=int)).read_text().splitlines()
            read = json.loads(lines[2])
        except (OSError, ValueError, IndexError):
            return 0
        return max(known) - (0 if read is None else int(read["reservoirVersion"]) - 1)

    def describe_kill(self) -> str:
        """Describes the moment of a kill by its traces: no open batch, a half-done one, or one with output written."""
        half_done = {int(name) for name in self.list_planned()} - {int(name) for name in self.list_finished()}
        if not half_done:
            return "between batches"
        mark = f":{max(half_done)}"
        return "after output, before the batch's commit" if self._is_written(mark) else "in a batch"

    def _is_written(self, mark: str) -> bool:
        for table in OUTPUTS:
            newest = max(self.list_commits(table), default=None)
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


def _list_names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in os.scandir(folder)]
    except OSError:
        return []


@dataclass(frozen=True)
class Moment:
    """A moment to kill at: when `look` returns a new name, or up to `spread` seconds later.

    Without `look` it is up to `spread` seconds after the process began to work.
    """

    name: str
    look: Callable[[], set[str]] | None
    spread: float

    def wait(self, chance: random.Random, ended: Callable[[], bool], longest: float) -> bool:
        """Waits for the moment. Returns False if the process ended by itself or nothing was seen for `longest` seconds."""
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
        """Waits until the process is warm, then sends its order. Raises RuntimeError if it did not start."""
        try:
            line = self._lines.get(timeout=_MAX_START_SECONDS)
        except queue.Empty:
            line = ""
        if line != "ready":
            self.kill()
            raise RuntimeError(f"{self.role} did not start: {self.read_errors()}")
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def has_ended(self) -> bool:
        """Returns whether the process has ended."""
        return self._process.poll() is not None

    def finish(self, seconds: float) -> int:
        """Waits until the process ends by itself, and kills it after `seconds`. Returns its exit code."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            return -signal.SIGKILL

    def read_output(self) -> list[dict[str, Any]]:
        """Reads the lines of JSON that the process has written since the last call."""
        output = []
        while not self._lines.empty():
            line = self._lines.get()
            if line.startswith("{"):
                output.append(json.loads(line))
        return output

    def read_errors(self) -> str:
        """Reads the errors from the standard error, and its last lines."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line[:400] for line in lines if re.match(r"(Caused by: )?[\w.]+(Error|Exception)\b", line)]
        return "\n".join([*errors[:8], *(line[:200] for line in lines[-5:])])

    def kill(self) -> None:
        """Kills the process with its JVM and its Python workers."""
        kill_session(self._process)

    def kill_workers(self) -> int:
        """Kills only Spark's Python workers, as a machine does that runs out of memory. Returns their number."""
        workers = [process for process in _list_session(self._process.pid) if _is_worker(process)]
        for process in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return len(workers)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip("\n"))


def kill_session(leader: subprocess.Popen[str]) -> None:
    """Kills all processes of a session at once, as if the machine died; none if the leader has ended already."""
    if leader.poll() is not None:
        # Another process may have its id by now. Its children end by themselves when their pipes close.
        return
    for process in [leader.pid, *_list_session(leader.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    leader.wait()


def _list_session(leader: int) -> list[int]:
    """Lists the processes of a session; Spark's Python workers have a process group of their own."""
    processes = []
    for entry in _list_names(_PROC):
        if not entry.isdigit():
            continue
        try:
            # After the name, which may have any characters: state, parent, group, session.
            fields = (_PROC / entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader and int(entry) != leader:
            processes.append(int(entry))
    return processes


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
        """The kind of file: offsets, commits, or its suffix."""
        return self.file.suffix.lstrip(".") or self.file.parent.name

    def restore(self) -> None:
        """Writes the whole file back."""
        self.file.write_bytes(self.content)


def tear(place: Place, chance: random.Random) -> Torn | None:
    """Cuts off the end of the newest file of one kind, as a crash does before the whole file is on disk."""
    kinds = [
        [place.checkpoint / "offsets" / name for name in place.list_planned()],
        [place.checkpoint / "commits" / name for name in place.list_finished()],
        [place.checkpoint / "state" / "0" / name for name in place.list_pages() if _is_state(name)],
    ]
    files = [file for file in chance.choice(kinds) if file.exists()]
    if not files:
        return None
    newest = max(files, key=lambda file: file.stat().st_mtime_ns)
    content = newest.read_bytes()
    left = chance.choice([0, chance.randrange(max(1, len(content)))])
    newest.write_bytes(content[:left])
    # The checksum beside it may be lost, too.
    if chance.random() < 0.5:
        (newest.parent / f".{newest.name}.crc").unlink(missing_ok=True)
    return Torn(newest, content, left)


def _is_state(name: str) -> bool:
    return name.endswith((".changelog", ".zip")) and "/." not in name

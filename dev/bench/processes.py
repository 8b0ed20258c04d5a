"""Memory and processor time of this process and those below it, from /proc: the JVM and the Python workers of Spark."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

_PROC = Path("/proc")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_EVERY_SECONDS = 0.5
_MIB = 1 << 20


class _Sampler:
    """A thread that looks at the processes again and again while it is entered."""

    def __init__(self, name: str, every_seconds: float) -> None:
        self._every, self._stop = every_seconds, threading.Event()
        self._thread = threading.Thread(target=self._sample, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def look(self) -> None:
        """Looks once."""
        raise NotImplementedError

    def _sample(self) -> None:
        while not self._stop.wait(self._every):
            self.look()


class MemorySampler(_Sampler):
    """Looks twice a second, while it is entered, at the resident memory of the processes below this one.

    Histories are the processes that read those of rules that are warming. The peak of the largest worker is the kernel's own,
    which misses nothing between two looks. The workers together have two: resident memory, in which a page that they share counts
    for each, and proportional (PSS), in which it counts once. So have all processes together, each at one instant: proportional
    memory, and anonymous, without what they map of files, which the system takes back where others need it.
    """

    def __init__(self) -> None:
        self._peaks: dict[str, float] = {}
        self._series: list[float] = []
        super().__init__("memory", _EVERY_SECONDS)

    def figures(self) -> dict[str, Any]:
        """Peaks in MiB, and the sum over the Python workers in 20 equal parts of the time; empty without /proc."""
        parts = [self._series[len(self._series) * at // 20 :][: -(-len(self._series) // 20)] for at in range(20)]
        over_time = [round(max(part)) for part in parts if part]
        return {**{name: round(value) for name, value in self._peaks.items()}, "workers_over_time_mib": over_time}

    def look(self) -> None:
        """Adds the memory that the processes have now."""
        workers: list[float] = []
        jvm = of_workers = histories = proportional = anonymous = 0.0
        for process in _descendants(os.getpid()):
            command, resident = _command(process), _resident(process)
            own = _kib(process, "smaps_rollup", "Pss:") / 1_024
            proportional += own
            anonymous += _kib(process, "status", "RssAnon:") / 1_024
            # First the JVM, whose command may name the module of the workers too.
            if "java" in command.partition(" ")[0]:
                jvm += resident
            elif "pyspark.daemon" in command or "pyspark/daemon" in command:
                workers.append(resident)
                of_workers += own
                self._raise("largest_worker_peak_mib", _kib(process, "status", "VmHWM:") / 1_024)
            elif "spark.replay.histories" in command:
                histories += resident
        self._series.append(sum(workers))
        self._raise("jvm_peak_mib", jvm)
        self._raise("workers_peak_mib", sum(workers))
        self._raise("histories_peak_mib", histories)
        self._raise("workers_pss_peak_mib", of_workers)
        self._raise("pss_peak_mib", proportional)
        self._raise("anonymous_peak_mib", anonymous)
        self._raise("most_workers", float(len(workers)))

    def _raise(self, name: str, value: float) -> None:
        self._peaks[name] = max(value, self._peaks.get(name, 0.0))


def _descendants(parent: int) -> list[int]:
    found: list[int] = []
    waiting = [parent]
    while waiting:
        process = waiting.pop()
        try:
            tasks = list((_PROC / str(process) / "task").iterdir())
            children = [int(text) for task in tasks for text in (task / "children").read_text().split()]
        except OSError:
            continue
        found += children
        waiting += children
    return found


def _command(process: int) -> str:
    try:
        return (_PROC / str(process) / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return ""


def _resident(process: int) -> float:
    """MiB; shared pages count in every process."""
    try:
        return int((_PROC / str(process) / "statm").read_text().split()[1]) * _PAGE / _MIB
    except (OSError, IndexError):
        return 0.0


def _kib(process: int, file: str, name: str) -> int:
    """Reads a figure of a process, in KiB, by its name in a file of /proc; 0 if there is none."""
    try:
        lines = (_PROC / str(process) / file).read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)
    except OSError:
        return 0


class ProcessorClock(_Sampler):
    """The processor time of this process and those below it, the JVM and the workers included, while it is entered.

    It looks ten times a second, so that what workers used that have ended since counts too. excluded: processes that do not
    count.
    """

    def __init__(self, excluded: Collection[int] = ()) -> None:
        self._ticks: dict[tuple[int, str], int] = {}
        self._excluded = excluded
        super().__init__("processor", _EVERY_SECONDS / 5)

    def read(self) -> float:
        """Returns the seconds that were used until now."""
        self.look()
        return sum(self._ticks.values()) / os.sysconf("SC_CLK_TCK")

    def look(self) -> None:
        """Notes what each process has used until now."""
        for process in (os.getpid(), *_descendants(os.getpid())):
            if process in self._excluded:
                continue
            try:
                fields = (_PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            # A process is known by its number and its start. Its own utime and stime, without those of its children.
            self._ticks[process, fields[19]] = int(fields[11]) + int(fields[12])

"""A Spark cluster on this machine: a master and workers as processes of their own, on loopback addresses."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import pyspark

_HOST = "127.0.0.1"
_START_SECONDS = 120.0
_END_SECONDS = 10.0
# The master and the workers judge nothing: they start executors and watch them.
_DAEMON_OPTIONS = {"SPARK_DAEMON_MEMORY": "256m", "SPARK_DAEMON_JAVA_OPTS": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"}


class Standalone:
    """Started by `with`; at its end every process is gone, each killed by its id, whatever happened between.

    folder: of logs and of what executors keep on their disks. workers: how many at the start; cores and memory (such as
    1g) of each one. environment: variables of the workers, which their executors inherit.
    """

    def __init__(
        self, folder: Path, *, workers: int, cores: int, memory: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self.folder, self._count, self._cores, self._memory = folder, workers, cores, memory
        self._environment = {**os.environ, **(environment or {}), **_DAEMON_OPTIONS, "SPARK_LOCAL_IP": _HOST}
        # Not the settings of a Spark that this machine may have beside.
        self._environment["SPARK_HOME"] = str(Path(pyspark.__file__).parent)
        self._environment["SPARK_CONF_DIR"] = str(folder / "conf")
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.workers: list[subprocess.Popen[bytes]] = []
        port, self._page = _free_ports(2)
        self.url = f"spark://{_HOST}:{port}"

    def __enter__(self) -> Standalone:
        (self.folder / "conf").mkdir(parents=True, exist_ok=True)
        port = self.url.rpartition(":")[2]
        try:
            self._start("master", "master.Master", "--port", port, "--webui-port", str(self._page))
            self._wait_for(lambda: self._state() is not None)
            for _ in range(self._count):
                self.add_worker()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    @property
    def settings(self) -> dict[str, str]:
        """Spark settings of a session that works on this cluster."""
        return {"spark.master": self.url, "spark.driver.host": _HOST, "spark.driver.bindAddress": _HOST}

    def add_worker(self) -> subprocess.Popen[bytes]:
        """One more worker; returns when the master counts it."""
        before = self._alive()
        size = ("--cores", str(self._cores), "--memory", self._memory)
        place = ("--work-dir", str(self.folder / "work"), "--webui-port", "0")
        worker = self._start(f"worker-{len(self.workers)}", "worker.Worker", *size, *place, self.url)
        self.workers.append(worker)
        self._wait_for(lambda: self._alive() > before)
        return worker

    def executors(self) -> list[int]:
        """Lists the processes of all running executors."""
        return [process for process, command in self.members().items() if "CoarseGrainedExecutorBackend" in command]

    def end(self) -> None:
        """Ends every process of the cluster; may be called again."""
        deadline = time.monotonic() + _END_SECONDS
        while members := self.members():
            for pid in members:
                # It may have ended by itself.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in self._daemons:
                process.wait()
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes {sorted(members)} of the cluster do not end")
        self._daemons.clear()

    def members(self) -> dict[int, str]:
        """Reads the command of every process of the cluster by its id, also of those whose parent has ended."""
        sessions = {process.pid for process in self._daemons}
        return {pid: command for pid, command in running().items() if _session(pid) in sessions}

    def _start(self, name: str, of: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [str(Path(self._environment["SPARK_HOME"], "bin", "spark-class")), f"org.apache.spark.deploy.{of}"]
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(  # noqa: S603
                [*command, "--host", _HOST, *arguments],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder, env=self._environment, start_new_session=True,
                preexec_fn=_end_with_this_process,  # noqa: PLW1509 - it calls the kernel alone
            )  # fmt: skip
        self._daemons.append(process)
        return process

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not condition():
            ended = [process for process in self._daemons if process.poll() is not None and process not in self.workers]
            if ended or time.monotonic() > deadline:
                logs = "\n".join(
                    file.read_text(errors="replace")[-2_000:] for file in sorted(self.folder.glob("*.log"))
                )
                raise RuntimeError(f"the cluster did not start within {_START_SECONDS:.0f} s:\n{logs}")
            time.sleep(0.1)

    def _alive(self) -> int:
        return int((self._state() or {}).get("aliveworkers", 0))

    def _state(self) -> dict[str, Any] | None:
        """Reads the state of the cluster from its master; None if it does not answer."""
        try:
            with urllib.request.urlopen(f"http://{_HOST}:{self._page}/json/", timeout=5) as answer:
                return dict(json.load(answer))
        except (OSError, ValueError):
            return None


def running() -> dict[int, str]:
    """Reads the command of every process of this machine by its id."""
    command = ["ps", "-A", "-ww", "-o", "pid=,stat=,args="]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()  # noqa: S603
    rows = (line.split(None, 2) for line in lines)
    # One that has ended, and nobody has asked how, is a Z.
    return {int(row[0]): row[2] for row in rows if len(row) == 3 and not row[1].startswith("Z")}


def _session(process: int) -> int | None:
    try:
        return os.getsid(process)
    except ProcessLookupError:
        return None


def _end_with_this_process() -> None:
    """On Linux a process of the cluster is killed when the one that started it is gone, however that ended."""
    if hasattr(ctypes.CDLL(None), "prctl"):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _free_ports(number: int) -> list[int]:
    sockets = [socket.create_server((_HOST, 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports

"""Bytewax as a peer: per rule and key a sorted list with a running aggregate, in Python, one event at a time.

`workers-1` runs in this process, `workers-2` in two: Bytewax's workers of one process are threads that share one
interpreter lock, so only processes use both cores. With `--durable` the state goes to SQLite recovery partitions at the
end of each epoch and each batch of alerts is synced to disk.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from array import array
from bisect import bisect_left, bisect_right
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dev.bench.peers import GRACE_US
from dev.bench.sets import RECORD

try:
    import bytewax.operators as op
    from bytewax.connectors.files import FileSink
    from bytewax.dataflow import Dataflow
    from bytewax.inputs import FixedPartitionedSource, StatefulSourcePartition
    from bytewax.operators import StatefulBatchLogic
    from bytewax.outputs import DynamicSink, StatelessSinkPartition
    from bytewax.recovery import RecoveryConfig, init_db_dir
    from bytewax.testing import cluster_main
except ImportError as error:
    sys.exit(f"The bytewax peer needs the package bytewax ({error}): run `make bench-peers`.")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# An event as it flows: its fields in the order of RECORD.
Event = tuple[int, int, int, int, int]
# A commit of the set, as Lookback gets them; smaller ones cost more for each event.
_BATCH = 100_000
_REPORTED = 200_000
_EPOCH = timedelta(seconds=10)


@dataclass(frozen=True)
class PeerRule:
    """One rule of the JSON file; window_us in microseconds, min_amount in cents."""

    rule_id: str
    group_by: str
    counts: bool
    min_amount: int
    window_us: int
    at_least: int

    @classmethod
    def read(cls, path: Path) -> list[PeerRule]:
        """Reads the rules of the file."""
        return [
            cls(
                rule_id=rule["rule_id"],
                group_by=rule["group_by"],
                counts=rule["aggregate"] == "count",
                min_amount=rule.get("min_amount_cents", -(2**31)),
                window_us=rule["window_us"],
                at_least=rule["at_least"],
            )
            for rule in json.loads(path.read_text())["rules"]
        ]


@dataclass(frozen=True)
class State:
    """The state of a key that recovery stores: a copy, as Bytewax may keep it while the window goes on."""

    times: bytes
    weights: bytes
    start: int
    total: int
    newest: int


class Window(StatefulBatchLogic[Event, str, State]):
    """The events of one key for one rule, by time, with the aggregate of the window that ends at the newest event.

    Events in order cost an append and what leaves the window. One that is late is judged by the same aggregate, less
    what is younger than it, plus what has left the window since its time: the cost is how late it is.
    """

    def __init__(self, rule: PeerRule, state: State | None) -> None:
        self.rule = rule
        self.times, self.weights = array("q"), array("q")
        # [start:] is the window of the newest event, total its aggregate.
        self.start = self.total = 0
        self.newest = -(2**63)
        if state is not None:
            self.times.frombytes(state.times)
            self.weights.frombytes(state.weights)
            self.start, self.total, self.newest = state.start, state.total, state.newest

    def on_batch(self, values: list[Event]) -> tuple[Iterable[str], bool]:
        """Returns the alerts of these events, in order of arrival."""
        rule, times, weights = self.rule, self.times, self.weights
        at_least, window = rule.at_least, rule.window_us
        alerts = []
        for event_id, when, _, _, amount in values:
            if when < self.newest:
                value = self._late(when, amount)
            else:
                self.newest = when
                if amount >= rule.min_amount:
                    weight = 1 if rule.counts else amount
                    times.append(when)
                    weights.append(weight)
                    self.total += weight
                start, oldest = self.start, when - window
                while start < len(times) and times[start] < oldest:
                    self.total -= weights[start]
                    start += 1
                self.start = start
                value = self.total
            if value >= at_least:
                alerts.append(f"{rule.rule_id},{event_id},{value}")
        self._forget()
        return alerts, StatefulBatchLogic.RETAIN

    def _late(self, when: int, amount: int) -> int:
        """Takes in an event that is older than the newest, and returns the value at it."""
        times, weights = self.times, self.weights
        # After those of the same time: they arrived before.
        place = bisect_right(times, when)
        if amount >= self.rule.min_amount:
            weight = 1 if self.rule.counts else amount
            times.insert(place, when)
            weights.insert(place, weight)
            if when >= self.newest - self.rule.window_us:
                self.total += weight
            else:
                self.start += 1
            place += 1
        # Its window is [oldest:place], that of the newest is [start:]; oldest <= start.
        oldest = bisect_left(times, when - self.rule.window_us, 0, self.start)
        if place <= self.start:
            return sum(weights[oldest:place])
        return self.total - sum(weights[place:]) + sum(weights[oldest : self.start])

    def _forget(self) -> None:
        """Drops what no event needs that may still come, once it is an eighth of what is kept or more."""
        horizon = self.rule.window_us + GRACE_US
        if self.times and self.times[0] < self.newest - horizon - horizon // 8:
            # A key's newest event is no younger than the newest of all, so this keeps enough.
            gone = bisect_left(self.times, self.newest - horizon)
            del self.times[:gone], self.weights[:gone]
            self.start -= gone

    def snapshot(self) -> State:
        """For recovery."""
        return State(self.times.tobytes(), self.weights.tobytes(), self.start, self.total, self.newest)


class Clock:
    """The progress of the source: events read, the start, the end of the first quarter; seconds of perf_counter."""

    def __init__(self, limit_seconds: float | None) -> None:
        self.limit = limit_seconds
        self.began = self.quarter = self.ended = 0.0
        self.events = self.quarter_events = 0

    def over(self) -> bool:
        """Returns whether the limit has passed."""
        return self.limit is not None and time.perf_counter() - self.began > self.limit


class _Part(StatefulSourcePartition[Event, int]):
    def __init__(self, path: Path, clock: Clock, resume: int | None) -> None:
        self.records = np.fromfile(path, RECORD)
        self.clock, self.at = clock, resume or 0

    def next_batch(self) -> list[Event]:
        clock = self.clock
        # What was handed out before has gone through the steps of this worker.
        clock.events = self.at
        if not clock.quarter and self.at * 4 >= len(self.records):
            clock.quarter, clock.quarter_events = time.perf_counter(), self.at
        if self.at >= len(self.records) or clock.over():
            raise StopIteration
        if self.at % _REPORTED == 0:
            sys.stderr.write(f"{self.at} events in {time.perf_counter() - clock.began:.1f} s\n")
        events: list[Event] = self.records[self.at : self.at + _BATCH].tolist()
        self.at += len(events)
        return events

    def next_awake(self) -> datetime | None:
        return None

    def snapshot(self) -> int:
        return self.at


class _Source(FixedPartitionedSource[Event, int]):
    """The file as one partition: with more, events of a key could overtake each other."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path, self.clock = path, clock

    def list_parts(self) -> list[str]:
        return ["file"]

    def build_part(self, step_id: str, for_part: str, resume_state: int | None) -> _Part:
        # All workers are connected by now.
        self.clock.began = time.perf_counter()
        return _Part(self.path, self.clock, resume_state)


class _LinesPart(StatelessSinkPartition[tuple[str, str]]):
    def __init__(self, path: Path) -> None:
        self.file = path.open("w")

    def write_batch(self, items: list[tuple[str, str]]) -> None:
        self.file.writelines(f"{line}\n" for _, line in items)

    def close(self) -> None:
        self.file.close()


class _Lines(DynamicSink[tuple[str, str]]):
    """Buffered lines, a file for each worker."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def build(self, step_id: str, worker_index: int, worker_count: int) -> _LinesPart:
        return _LinesPart(Path(f"{self.path}.{worker_index}"))


def _keyed(field: str) -> Callable[[list[Event]], list[tuple[str, Event]]]:
    at = RECORD.names.index(field) if RECORD.names else 0
    return lambda events: [(str(event[at]), event) for event in events]


def _window_of(rule: PeerRule) -> Callable[[State | None], Window]:
    return lambda state: Window(rule, state)


def _dataflow(rules: list[PeerRule], source: Path, clock: Clock, alerts: Path, *, durable: bool) -> Any:
    flow = Dataflow("bench")
    events = op.input("events", flow, _Source(source, clock))
    found = []
    for rule in rules:
        keyed = op.flat_map_batch(f"{rule.rule_id}-keys", events, _keyed(rule.group_by))
        found.append(op.stateful_batch(rule.rule_id, keyed, _window_of(rule)))
    op.output("alerts", op.merge("all-alerts", *found), FileSink(alerts) if durable else _Lines(alerts))
    return flow


def _run(process: int, addresses: list[str], options: argparse.Namespace, folder: Path) -> Clock:
    """One process of the job, from its first event to its last."""
    clock = Clock(options.limit_seconds)
    flow = _dataflow(PeerRule.read(options.rules), options.input, clock, folder / "alerts.csv", durable=options.durable)
    recovery = RecoveryConfig(folder / "recovery") if options.durable else None
    cluster_main(flow, addresses, process, epoch_interval=_EPOCH, recovery_config=recovery)
    clock.ended = time.perf_counter()
    return clock


def _run_all(options: argparse.Namespace, folder: Path, processes: int) -> Clock:
    """Runs all processes. Returns the clock of the one that read the source; it ended when all did."""
    if options.durable:
        (folder / "alerts.csv").touch()
        (folder / "recovery").mkdir()
        init_db_dir(folder / "recovery", processes)
    if processes == 1:
        return _run(0, [], options, folder)
    addresses = [f"127.0.0.1:{port}" for port in _free_ports(processes)]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(_run, process, addresses, options, folder) for process in range(processes)]
        clocks = [job.result() for job in jobs]
    return max(clocks, key=lambda clock: clock.began)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def main() -> None:
    """Runs the job that the command line names and prints its figures."""
    parser = argparse.ArgumentParser(prog="python -m dev.bench.peers.bytewax", description=__doc__)
    parser.add_argument("--variant", choices=["workers-1", "workers-2"], default="workers-1")
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--rules", type=Path, required=True)
    parser.add_argument("--alerts", type=Path, required=True)
    parser.add_argument("--durable", action="store_true")
    parser.add_argument("--limit-seconds", type=float)
    options = parser.parse_args()
    total = options.input.stat().st_size // RECORD.itemsize
    processes = int(options.variant.rpartition("-")[2])
    with tempfile.TemporaryDirectory(prefix="bench-bytewax-") as name:
        folder = Path(name)
        clock = _run_all(options, folder, processes)
        lines = [line for part in sorted(folder.glob("alerts.csv*")) for line in part.read_text().splitlines()]
    options.alerts.write_text("".join(f"{line}\n" for line in lines))
    events, seconds = clock.events, clock.ended - clock.began
    # If stopped before a quarter was through, the rate is that of all.
    steady_from = clock.quarter or clock.began
    result = {
        "peer": "bytewax",
        "variant": options.variant,
        "durable": options.durable,
        "events": events,
        "seconds": round(seconds, 3),
        "steady_events_per_s": round((events - clock.quarter_events) / (clock.ended - steady_from)),
        "alerts": len(lines),
        "complete": events == total,
        "settings": {
            "processes": processes,
            "batch": _BATCH,
            "epoch_seconds": _EPOCH.total_seconds(),
            "recovery": "sqlite, a partition for each process" if options.durable else "none",
            "sink": "FileSink, synced at each batch" if options.durable else "buffered lines",
            "cores": os.cpu_count(),
        },
        "version": metadata.version("bytewax"),
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()

"""A producer of events, in a process of its own: whoever writes events is seldom the process that judges them.

It writes each commit as the Delta protocol has it, one Parquet file and one file of the log, with no Spark: an append by
Spark beside the evaluation takes 360 ms of one of two cores, so a run with it measures both.
"""

from __future__ import annotations

import datetime as dt
import json
import multiprocessing
import os
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dev.bench.lakehouse import rows_of
from dev.bench.sets import COMMIT_ROWS, SECOND, TIME, Columns, EventSet
from lookback.places import ObjectPath, Place

COMMITS_PER_SECOND = 2
# Delta's default, too, is ten commits.
_CHECKPOINT_INTERVAL = 10
_LONGEST_START, _LONGEST_END = 120.0, 30.0


class Producer:
    """Appends a commit of events twice a second, each event's time within the half second before its commit.

    table: the folder of the events table; rate: events a second. after: so many commits of the set are in the table, and
    the events go on in time where these end, with the keys of their last whole repeat. append_seconds: of each commit, known
    after `stop`.
    """

    def __init__(self, table: Place, events: EventSet, rate: int, after: int = 0) -> None:
        # Not a copy of this process, which has a JVM and threads by now.
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        # Its columns, if they are read already, are not sent along.
        events = EventSet(events.name, events.rows)
        self._process = context.Process(target=run, args=(there, table, events, rate, after), daemon=True)
        self._stopped = False
        self.append_seconds: list[float] = []
        self._process.start()
        there.close()

    @property
    def process_id(self) -> int:
        """The number of its process."""
        assert self._process.pid is not None
        return self._process.pid

    def start(self) -> None:
        """Appends from now on."""
        self._receive(_LONGEST_START)
        self._here.send("start")

    def stop(self) -> None:
        """Ends after the commit that is being made. Raises RuntimeError with what an append failed with."""
        if self._stopped:
            return
        self._stopped = True
        try:
            self._here.send("stop")
            self.append_seconds = self._receive(_LONGEST_END)
        finally:
            self._process.join(_LONGEST_END)
            self._process.terminate()

    def _receive(self, seconds: float) -> Any:
        try:
            found = self._here.recv() if self._here.poll(seconds) else RuntimeError(f"no answer in {seconds:.0f} s")
        except EOFError:
            found = RuntimeError("the producer is gone")
        if isinstance(found, Exception):
            raise found
        return found


def append(table: Place, version: int, rows: pa.Table) -> None:
    """Appends rows to a Delta table as commit `version`, in one file, with the checksum that spares readers the whole log.

    Raises FileExistsError if the commit exists. In an object store nobody else may write to the table.
    """
    file = table / f"part-00000-{uuid.uuid4()}.parquet"
    content = pa.BufferOutputStream()
    pq.write_table(rows, content, compression="snappy")
    size = content.tell()
    file.write_bytes(content.getvalue().to_pybytes())
    log = table / "_delta_log"
    before = json.loads((log / f"{version - 1:020d}.crc").read_text(encoding="utf-8"))
    # Times of commits always rise, also where two fall within a millisecond.
    now = max(time.time_ns() // 1_000_000, before.get("inCommitTimestampOpt", 0) + 1)
    transaction = str(uuid.uuid4())
    commit = {
        "inCommitTimestamp": now,
        "timestamp": now,
        "operation": "WRITE",
        "operationParameters": {"mode": "Append", "partitionBy": "[]"},
        "isBlindAppend": True,
        "engineInfo": "lookback-bench",
        "txnId": transaction,
    }
    added = {
        "path": file.name,
        "partitionValues": {},
        "size": size,
        "modificationTime": now,
        "dataChange": True,
        "stats": json.dumps({"numRecords": rows.num_rows}),
    }
    _make(
        log / f"{version:020d}.json", "\n".join(json.dumps(each) for each in ({"commitInfo": commit}, {"add": added}))
    )
    kept = ("numMetadata", "numProtocol", "setTransactions", "domainMetadata", "metadata", "protocol")
    checksum = {
        **{name: before[name] for name in kept},
        "tableSizeBytes": before["tableSizeBytes"] + size,
        "numFiles": before["numFiles"] + 1,
        "inCommitTimestampOpt": now,
        "txnId": transaction,
    }
    _make(log / f"{version:020d}.crc", json.dumps(checksum))


def _write_checkpoint(table: ObjectPath) -> None:
    """Writes the checkpoint of a table's log in a bucket, as whoever writes a table does once in a while."""
    # The tests append on every Databricks Runtime, where delta-rs is missing.
    from deltalake import DeltaTable  # noqa: PLC0415

    settings = dict(table.settings)
    options = {
        "AWS_ENDPOINT_URL": settings["fs.s3a.endpoint"],
        "AWS_REGION": settings["fs.s3a.endpoint.region"],
        "AWS_ACCESS_KEY_ID": settings["fs.s3a.access.key"],
        "AWS_SECRET_ACCESS_KEY": settings["fs.s3a.secret.key"],
        "AWS_ALLOW_HTTP": "true",
    }
    DeltaTable(f"s3://{table.store}/{table.key}", storage_options=options).create_checkpoint()


def put_on_list(table: Place, name: str, values: Iterable[int]) -> int:
    """Puts numbers on a list, for good, as one commit of the table `lists`. Returns the commit."""
    texts = pa.array(values).cast(pa.string())
    count, version = len(texts), _next_version(table)
    rows = {
        "list": pa.array([name] * count), "value": texts, "reason": pa.nulls(count, pa.string()),
        "author": pa.array(["bench"] * count), "added_at": pa.array([dt.datetime.now(dt.timezone.utc)] * count, TIME),
        "expires_at": pa.nulls(count, TIME), "kind": pa.nulls(count, pa.string()),
    }  # fmt: skip
    append(table, version, pa.table(rows))
    return version


def _next_version(table: Place) -> int:
    return 1 + max(int(file.name.partition(".")[0]) for file in (table / "_delta_log").glob("[0-9]*.json"))


def _make(file: Place, text: str) -> None:
    """Writes a file at once, as a whole or not at all. Raises FileExistsError if it exists in a folder."""
    if isinstance(file, ObjectPath):
        file.write_text(text + "\n")
        return
    draft = file.with_name(f".{uuid.uuid4()}.draft")
    draft.write_text(text + "\n", encoding="utf-8")
    try:
        os.link(draft, file)
    finally:
        draft.unlink()


def run(pipe: Connection, table: Place, events: EventSet, rate: int, after: int) -> None:
    """Runs the process: sends `ready`, appends from its first message to the second, then sends the time of each commit."""
    try:
        source = _Source.of(events, after)
        source.rows(rate, 0, 0)
        pipe.send("ready")
        pipe.recv()
        pipe.send(_append_until_told(pipe, table, source, rate))
    except EOFError:
        # Whoever started it is gone.
        return
    except Exception as error:  # noqa: BLE001 - raised again where it was started
        pipe.send(RuntimeError(f"the producer failed: {error!r}"))


def _append_until_told(pipe: Connection, table: Place, source: _Source, rate: int) -> list[float]:
    """After a commit that took too long the next one comes at once; what it lost is not made up for."""
    due, number, took = time.monotonic(), 0, []
    first, ahead = _next_version(table), 0 if source.last is None else source.last - _now()
    while not pipe.poll(max(0.0, due - time.monotonic())):
        due = max(due, time.monotonic()) + 1 / COMMITS_PER_SECOND
        before = time.monotonic()
        append(table, first + number, rows_of(source.rows(rate, number, ahead)))
        if isinstance(table, ObjectPath) and (first + number) % _CHECKPOINT_INTERVAL == 0:
            _write_checkpoint(table)
        took.append(time.monotonic() - before)
        number += 1
    return took


@dataclass(frozen=True)
class _Source:
    """The events that are drawn from in turn, the first id, and the time of the last event of before: None for none."""

    columns: Columns
    first_id: int = 0
    last: int | None = None

    @classmethod
    def of(cls, events: EventSet, after: int) -> _Source:
        """Returns a set from its beginning, or as it goes on after so many commits."""
        if not after:
            return cls(events.columns)
        there, rows = after * COMMIT_ROWS, len(events.columns["event_id"])
        repeat = max(0, there // rows - 1)
        columns = events.at(np.arange(repeat * rows, (repeat + 1) * rows, dtype=np.int64))
        return cls(columns, there, int(events.commit(after - 1)["event_time"].max()))

    def rows(self, rate: int, number: int, ahead: int) -> Columns:
        """Makes the rows of a commit, whose times are those of now and `ahead` microseconds more."""
        rows = rate // COMMITS_PER_SECOND
        positions = np.arange(number * rows, (number + 1) * rows, dtype=np.int64)
        at = positions % len(self.columns["event_id"])
        columns = {name: values[at] for name, values in self.columns.items()}
        columns["event_id"] = self.first_id + positions
        before = np.linspace(SECOND // COMMITS_PER_SECOND, 0, rows).astype(np.int64)
        columns["event_time"] = _now() + ahead - before
        return columns


def _now() -> int:
    return time.time_ns() // 1_000

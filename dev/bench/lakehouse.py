"""Events tables for the measurements: commits of 100,000 rows in one file each, made once and linked for each run."""

from __future__ import annotations

import datetime as dt
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from dev.bench.sets import COMMIT_ROWS, DATA, GENERATOR, REPOSITORY, TIME, Columns, EventSet
from dev.bench.texts import STREAM as PROCESSES
from dev.bench.watching import say
from lookback.core.streams.declaration import Stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dev.bench.rules import Rules
    from lookback.spark.tables.lakehouse import Tables

_LATENESS = {"max_out_of_orderness": "10 seconds", "allowed_lateness": "1 hour"}
TRANSACTIONS = Stream.from_dict(
    {
        "stream": "transactions",
        "event_id": "event_id",
        "event_time": "event_time",
        "fields": {
            "event_id": "bigint",
            "event_time": "timestamp",
            "customer_id": "int",
            "terminal_id": "int",
            "amount": "decimal(18,2)",
        },
        **_LATENESS,
    }
)
LOGINS = Stream.from_dict(
    {
        "stream": "logins",
        "event_id": "event_id",
        "event_time": "event_time",
        "fields": {
            "event_id": "bigint",
            "event_time": "timestamp",
            "user_id": "int",
            "ip": "int",
            "outcome": "string",
        },
        **_LATENESS,
    }
)
STREAMS = {stream.name: stream for stream in (TRANSACTIONS, LOGINS, PROCESSES)}
# Tables made by other code than this are made again. _LAYOUT: the version of what this module does itself.
_MADE_BY = ("src/lookback/spark/tables/lakehouse.py", "src/lookback/spark/tables/schemas.py")
_LAYOUT = b"1"


def stream_of(name: str) -> Stream:
    """Returns the stream of the set's events."""
    return STREAMS.get(name, TRANSACTIONS)


def rows_of(columns: Columns) -> pa.Table:
    """Converts columns of a set into rows of the events table: amounts as decimal(18,2), stamped with the time now."""
    rows = len(columns["event_id"])
    arrays = {name: pa.array(values) for name, values in columns.items() if name != "amount_cents"}
    arrays["event_time"] = arrays["event_time"].cast(TIME)
    if "amount_cents" in columns:
        # A decimal128 is two little-endian 64-bit words; cents are not negative.
        words = np.zeros((rows, 2), dtype="<i8")
        words[:, 0] = columns["amount_cents"]
        arrays["amount"] = pa.Array.from_buffers(pa.decimal128(18, 2), rows, [None, pa.py_buffer(words)])
    arrays["ingested_at"] = pa.array([dt.datetime.now(dt.timezone.utc)] * rows, TIME)
    return pa.table(arrays)


def append(tables: Tables, stream: Stream, rows: pa.Table) -> None:
    """Appends rows as one commit of one file."""
    tables.append(tables.spark.createDataFrame(rows).coalesce(1), stream.name)


def push(tables: Tables, rules: Rules) -> int:
    """Checks all rules and publishes them in one commit. Returns the number of their features."""
    from lookback.spark.tables.schemas import RULES  # noqa: PLC0415
    from lookback.testing.rule_tests import check_rule  # noqa: PLC0415

    now = dt.datetime.now(dt.timezone.utc)
    rows, features = [], set()
    for status, documents in (("active", rules.documents), ("paused", rules.paused)):
        for document in documents:
            compiled = check_rule(document, STREAMS)
            features |= {feature.feature_id for feature in compiled.features}
            rows.append((document["rule_id"], 1, status, json.dumps(document), "bench", "", now, None, None))
    tables.append(tables.spark.createDataFrame(rows, RULES).coalesce(1), "rules")
    return len(features)


def prepared(events: EventSet, commits: int) -> Path:
    """Returns the root of tables whose events table has at least `commits` commits of the set, repeated in time.

    A process of its own creates or extends them, so that the measuring process starts cold.
    """
    root = DATA / "tables" / f"{events.stem}-{_code()}"
    root.parent.mkdir(parents=True, exist_ok=True)
    with (root.parent / f"{root.name}.lock").open("w") as lock:
        # Two processes that need the same table make it once.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _commits(root / stream_of(events.name).name) < commits:
            _prepare_apart(events, commits)
    return root


def _prepare_apart(events: EventSet, commits: int) -> None:
    settings = ["--set", events.name, *([] if events.rows is None else ["--rows", str(events.rows)])]
    command = [sys.executable, "-m", "dev.bench", "prepare", *settings, "--commits", str(commits)]
    subprocess.run(command, cwd=REPOSITORY, check=True)  # noqa: S603


def prepare(spark: SparkSession, events: EventSet, commits: int) -> None:
    """Creates or extends the events table. Tables of the set that older code made are removed."""
    from lookback.spark.tables.lakehouse import Tables  # noqa: PLC0415 - needs Spark, which most of this module does not

    root = DATA / "tables" / f"{events.stem}-{_code()}"
    for old in root.parent.glob(f"{events.stem}-*"):
        if old != root and old.is_dir() and old.name.rpartition("-")[0] == events.stem:
            shutil.rmtree(old)
    stream = stream_of(events.name)
    tables = Tables.local(spark, root)
    tables.create(stream)
    there = _commits(root / stream.name)
    for number in range(there, commits):
        append(tables, stream, rows_of(events.commit(number)))
        if (number + 1) % 10 == 0 or number + 1 == commits:
            say(f"  {events.stem}: {number + 1} of {commits} commits")


def linked(events: EventSet, commits: int, root: Path) -> Path:
    """A fresh root with the first commits of the set's events table; files are linked, not copied."""
    source = prepared(events, commits) / stream_of(events.name).name
    if root.exists():
        shutil.rmtree(root)
    target = root / source.name
    (target / "_delta_log").mkdir(parents=True)
    for version in range(commits + 1):
        name = f"_delta_log/{version:020d}.json"
        # Without the checksum of a commit Delta reads the log anew.
        for each in (name, name.replace(".json", ".crc")):
            os.link(source / each, target / each)
        for line in (source / name).read_text(encoding="utf-8").splitlines():
            added = json.loads(line).get("add")
            if added:
                os.link(source / added["path"], target / added["path"])
    return root


def commits_for(events: EventSet, repeats: float) -> int:
    """Returns the number of commits with so many repeats of the set; the last commit may begin the next repeat."""
    return int(-(-len(events.columns["event_id"]) * repeats // COMMIT_ROWS))


def _commits(table: Path) -> int:
    """Version 0 made the table; every later one is a commit of events."""
    return max(0, len(list((table / "_delta_log").glob("*.json"))) - 1)


def _code() -> str:
    digest = hashlib.sha256(_LAYOUT + GENERATOR)
    for name in _MADE_BY:
        digest.update((REPOSITORY / name).read_bytes())
    return digest.hexdigest()[:8]

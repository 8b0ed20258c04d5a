"""The benchmarks' producer writes commits by itself: Delta must read them as its own."""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dev.bench import sets
from dev.bench.lakehouse import TRANSACTIONS, rows_of
from dev.bench.producer import append, run
from dev.bench.sets import EventSet, make

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark


@pytest.mark.long
def test_delta_reads_a_commit_of_the_producer_as_one_of_its_own(tables: Tables) -> None:
    tables.create(TRANSACTIONS)
    table = _table(tables)
    rows = rows_of(make("zipf", 500))
    append(table, 1, rows)
    tables.append(tables.spark.createDataFrame(rows).coalesce(1), TRANSACTIONS.name)
    with pytest.raises(FileExistsError):
        append(table, 2, rows)
    append(table, 3, rows)
    assert not list((table / "_delta_log").glob("*.draft"))
    written = {
        version: tables.read_changes(TRANSACTIONS.name, version, version).drop("_commit_version", "_commit_timestamp")
        for version in (1, 2, 3)
    }
    assert sorted(written[1].collect()) == sorted(written[2].collect()) == sorted(written[3].collect())
    assert written[1].count() == 500
    stamps = tables.read_changes(TRANSACTIONS.name, 1).select("_commit_version", "_commit_timestamp").distinct()
    ordered = [row["_commit_timestamp"] for row in sorted(stamps.collect())]
    assert ordered == sorted(ordered)


def test_the_producer_commits_twice_a_second_until_it_is_told_to_stop(
    tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sets, "DATA", tmp_path / "sets")
    tables.create(TRANSACTIONS)
    here, there = multiprocessing.Pipe()
    thread = threading.Thread(target=run, args=(there, _table(tables), EventSet("zipf", 20_000), 100, 0))
    thread.start()
    assert here.poll(60), "the producer did not begin"
    assert here.recv() == "ready"
    here.send("start")
    deadline = time.monotonic() + 60
    while tables.version(TRANSACTIONS.name) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    here.send("stop")
    assert here.poll(60), "the producer did not end"
    append_seconds = here.recv()
    thread.join()
    last = tables.version(TRANSACTIONS.name)
    assert last >= 3
    assert len(append_seconds) == last
    assert tables.read(TRANSACTIONS.name).count() == 50 * last
    first = json.loads((_table(tables) / f"_delta_log/{1:020d}.json").read_text().splitlines()[0])
    assert first["commitInfo"]["isBlindAppend"]


def _table(tables: Tables) -> Path:
    return Path(str(tables.root), TRANSACTIONS.name)

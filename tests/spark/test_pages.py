"""Copies of pages on the executor's disk: read in place of the state store's, for the manifest they belong to and no other."""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from lookback.core.engine.batch import Batch
from lookback.core.engine.evaluation import Evaluator
from lookback.core.errors import StoreFailed
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.rulebook import RuleBook
from lookback.core.state.shard import MANIFEST, ShardState
from lookback.core.streams.arrival import find_marks
from lookback.core.streams.events import Events
from lookback.core.values.cache import Cache
from lookback.core.values.columns import Column
from lookback.spark.batches.pages import ShardPages
from lookback.spark.batches.shard import give_back_memory
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from payins import (
    RULES,
    START,
    STREAM,
    STREAMS,
    append,
    make_events,
    publish,
    replay_of_tables,
    replayed_alerts,
    stored_alerts,
)

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

LARGE = bytes(range(256)) * 100


class MapState:
    """Spark's map state, which counts what is read."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}
        self.read: list[str] = []
        self.broken = False

    def getValue(self, key: tuple[str]) -> tuple[bytes] | None:  # noqa: N802 - Spark's name
        if self.broken:
            raise ConnectionError("no answer")
        self.read.append(key[0])
        return (self.pages[key[0]],) if key[0] in self.pages else None

    def updateValue(self, key: tuple[str], value: tuple[bytes]) -> None:  # noqa: N802 - Spark's name
        self.pages[key[0]] = value[0]

    def removeKey(self, key: tuple[str]) -> None:  # noqa: N802 - Spark's name
        del self.pages[key[0]]


@pytest.fixture
def state() -> MapState:
    return MapState()


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path},/nowhere/else")
    return tmp_path


def open_pages(state: MapState, label: str = "s0", manifest: bytes | None = None) -> ShardPages:
    pages = ShardPages(cast(Any, state), "file:/checkpoint", label)
    pages.find_copies(manifest)
    return pages


def save(state: MapState, manifest: bytes, **changed: bytes) -> None:
    pages = open_pages(state)
    for name, page in changed.items():
        pages.put(name, page)
    pages.keep_copies(manifest)


def list_files(place: Path) -> list[Path]:
    return [file for file in place.rglob("*") if file.is_file()]


def test_another_worker_reads_the_copies_of_large_pages_and_the_rest_from_the_store(state: MapState) -> None:
    save(state, b"first", run=LARGE, rules=b"small")
    pages = open_pages(state, manifest=b"first")
    assert [pages.get(name) for name in ("run", "rules", "none")] == [LARGE, b"small", None]
    assert state.read == ["rules", "none"]
    assert (pages.read, pages.written) == (5, 0)


@pytest.mark.parametrize(("label", "manifest"), [("s0", b"other"), ("s1", b"first"), ("s0", None)])
def test_copies_of_another_manifest_or_shard_are_not_read(state: MapState, label: str, manifest: bytes | None) -> None:
    save(state, b"first", run=LARGE)
    state.pages["run"] = LARGE[::-1]
    assert open_pages(state, label, manifest).get("run") == LARGE[::-1]


def test_copies_go_on_with_the_batches_and_old_ones_go(state: MapState, place: Path) -> None:
    save(state, b"first", one=LARGE, two=LARGE + b"2", three=LARGE + b"3")
    pages = open_pages(state, manifest=b"first")
    pages.put("two", b"2" + LARGE)
    pages.put("four", LARGE + b"4")
    pages.remove("three")
    pages.keep_copies(b"second")
    assert len(list_files(place)) == 4
    pages = open_pages(state, manifest=b"second")
    assert [pages.get(name) for name in ("one", "two", "four")] == [LARGE, b"2" + LARGE, LARGE + b"4"]
    assert state.read == []
    assert pages.get("three") is None
    assert open_pages(state, manifest=b"first").get("one") == LARGE
    assert state.read == ["three", "one"]


def test_a_page_that_grew_small_has_no_copy(state: MapState, place: Path) -> None:
    save(state, b"first", run=LARGE)
    pages = open_pages(state, manifest=b"first")
    pages.put("run", b"now small")
    pages.keep_copies(b"second")
    assert open_pages(state, manifest=b"second").get("run") == b"now small"
    assert len(list_files(place)) == 1


@pytest.mark.parametrize("damage", ["cut", "gone", "index", "list"])
def test_a_damaged_copy_is_no_answer(state: MapState, place: Path, damage: str) -> None:
    save(state, b"first", run=LARGE)
    for file in list_files(place):
        is_index = file.suffix == ".index"
        if is_index and damage in ("index", "list"):
            file.write_bytes(b"{" if damage == "index" else b"[]")
        elif not is_index and damage == "cut":
            file.write_bytes(LARGE[:-1])
        elif not is_index and damage == "gone":
            file.unlink()
    assert open_pages(state, manifest=b"first").get("run") == LARGE
    assert state.read == ["run"]


@pytest.mark.parametrize("folder", ["", "/proc/none"])
def test_without_a_folder_the_store_answers(state: MapState, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", folder)
    save(state, b"first", run=LARGE)
    assert open_pages(state, manifest=b"first").get("run") == LARGE
    assert state.read == ["run"]


def test_what_is_decoded_of_a_page_goes_with_its_copy(state: MapState, place: Path) -> None:
    save(state, b"first", run=LARGE, rules=b"small")
    pages = open_pages(state, manifest=b"first")
    assert pages.find_file("rules") is None
    decoded = pages.find_file("run")
    assert decoded is not None
    assert decoded.write("arrays")
    pages.put("other", LARGE)
    pages.keep_copies(b"second")
    assert open_pages(state, manifest=b"second").find_file("run") == decoded
    assert decoded.path.exists()
    pages = open_pages(state, manifest=b"second")
    pages.put("run", LARGE)
    assert pages.find_file("run") != decoded
    pages.keep_copies(b"third")
    assert not decoded.path.exists()
    assert len(list_files(place)) == 3


def test_a_page_from_the_state_store_has_a_copy_from_then_on(state: MapState) -> None:
    state.pages["run"] = LARGE
    pages = open_pages(state, manifest=b"of another machine")
    assert pages.find_file("run") is None
    assert pages.get("run") == LARGE
    pages.keep_copies(b"second")
    pages = open_pages(state, manifest=b"second")
    assert pages.get("run") == LARGE
    assert pages.find_file("run") is not None
    assert state.read == ["run"]


def test_workers_share_long_runs_in_files(state: MapState, place: Path) -> None:
    document = {"rule_id": "r", "stream": STREAM.name, "group_by": ["customer"], "window": "30 days", "measures": {"m": "sum(amount)"}, "when": "m > 1"}  # fmt: skip
    changes = [RuleChange("insert", 1, "r", 1, "active", json.dumps(document))]

    def judge(rows: int, first: int, most: int = 2**20) -> ShardState:
        """As a worker does that has not seen the shard."""
        cache, manifest = Cache(most), state.pages.get(MANIFEST)
        shard = ShardState(RuleBook(STREAM, STREAMS), cache=cache)
        pages = open_pages(state, manifest=manifest)
        shard.load(pages)
        shard.begin(pages, pages.find_file)
        made = {
            "id": np.arange(rows) + first * 10**6, "at": START + first * 10**9 + np.arange(rows) * 1_000,
            "customer": np.arange(rows) * 7_919 % 100_000, "shop": np.full(rows, "a"), "amount": np.ones(rows),
        }  # fmt: skip
        columns = {name: Column(type_, made[name].astype(type_.storage)) for name, type_ in STREAM.fields.items()}
        events = Events(columns, np.full(rows, first, dtype=np.int64), STREAM.event_id, STREAM.event_time)
        batch = Batch(events, marks=find_marks(events, events.commits), changes=changes if first == 1 else [])
        assert not Evaluator(STREAM).process(shard, batch).failures
        shard.save()
        pages.keep_copies(shard.manifest)
        return shard

    def list_decoded() -> list[str]:
        return [file.name for file in list_files(place) if file.suffix == ".decoded"]

    judge(140_000, 1)
    judge(10, 2, most=2**30)
    # What has room in memory needs no file.
    assert list_decoded() == []
    judge(10, 3)
    (decoded,) = list_decoded()
    state.read.clear()
    runs = [stored for stored in judge(10, 4).windows.list_runs() if stored.rows >= 140_000]
    assert [stored.run is not None and stored.run.memory_bytes for stored in runs] == [0]
    assert not [name for name in state.read if name.startswith("run:") and name == runs[0].run_id]
    assert list_decoded() == [decoded]
    # The file of a run goes with the run.
    for first in (5, 6, 7):
        judge(140_000, first)
    assert decoded not in list_decoded()


@pytest.mark.long
@pytest.mark.spark
def test_workers_leave_copies_in_the_folder_that_spark_removes(ready: Tables) -> None:
    manager = ready.spark._jvm.org.apache.spark.SparkEnv.get().blockManager().diskBlockManager()
    places = [Path(each.getPath()) for each in manager.localDirs()]

    def list_indexes() -> set[Path]:
        return {file for place in places for file in place.glob("lookback-pages/*/*.index")}

    before = list_indexes()
    publish(ready, RULES)
    append(ready, make_events(100, seed=3))
    evaluation = Evaluation(ready, STREAM, STREAMS, checkpoint_folder(ready, STREAM), once=True)
    evaluation.run()
    # One a shard: pages as small as these have no copies, but are noted to have none.
    assert len(list_indexes() - before) == 2
    assert stored_alerts(ready) == replayed_alerts(replay_of_tables(ready))


def test_a_store_that_fails_is_named(state: MapState) -> None:
    state.broken = True
    with pytest.raises(StoreFailed, match="rules: ConnectionError: no answer"):
        open_pages(state).get("rules")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_a_worker_gives_back_what_a_large_batch_freed_between_what_it_keeps() -> None:
    # Shorter than what the allocator asks the system for one by one.
    pieces = [np.ones(12_000) for _ in range(2_000)]
    kept = pieces[::20]
    del pieces
    held = find_memory()
    give_back_memory(above=held + 2**30)
    assert find_memory() > held - 2**26
    give_back_memory(above=2**20)
    assert find_memory() < held - 2**26
    assert len(kept) == 100


def find_memory() -> int:
    """The bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

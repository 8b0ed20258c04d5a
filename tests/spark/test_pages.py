"""Copies of pages on the executor's disk: read in place of the state store's, for the manifest they belong to and no other."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from lookback.core.errors import StoreFailed
from lookback.spark.batches.pages import ShardPages
from lookback.spark.batches.shard import give_back_memory
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from payins import (
    RULES,
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

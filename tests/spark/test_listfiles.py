"""Lists by commit in the files of a checkpoint: read as they were after any commit, in few pieces, and dropped when old."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest

from lookback.core.errors import StoreFailed
from lookback.core.values.columns import from_values
from lookback.core.values.listchanges import FOREVER, ListChange, ListRows
from lookback.core.values.lists import Lists
from lookback.core.values.types import STRING
from lookback.spark.checkpoints import listfiles
from lookback.spark.checkpoints.listfiles import ListFiles, pack_rows, unpack_rows
from lookback.spark.checkpoints.parcels import Parcels
from lookback.spark.following import listfeed
from lookback.spark.following.listfeed import ListFeed, ReplayedLists, describe_changes
from lookback.spark.replay import trials
from payins import STREAM

VALUES = [f"v{n}" for n in range(8)]


@pytest.fixture(autouse=True)
def _without_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    # Thousands of small files; none has to survive a crash.
    monkeypatch.setattr(os, "fsync", lambda _: None)


def added(value: str, rows: int = 1, list_: str = "a", expires_at: int | None = None) -> list[ListChange]:
    return [ListChange("insert" if rows > 0 else "delete", 1, list_, value, expires_at)] * abs(rows)


def rows_of(*changes: list[ListChange]) -> dict[str, ListRows]:
    return ListRows.by_list(row for rows in changes for row in rows)


def members(lists: Lists, name: str = "a", time: int = 0) -> set[str]:
    found = time < lists.find_until(name, from_values(STRING, VALUES))
    return {value for value, is_in in zip(VALUES, found.tolist(), strict=True) if is_in}


def count_reads(files: ListFiles, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    reads = Counter[str]()
    read = Parcels.read

    def count(self: Parcels, name: str) -> bytes:
        reads[name.rpartition(".")[2]] += 1
        return read(self, name)

    monkeypatch.setattr(Parcels, "read", count)
    return reads


def test_each_commit_is_read_as_it_was(tmp_path: Path) -> None:
    files = ListFiles(Parcels(tmp_path))
    assert files.read(None, frozenset("a")) == Lists.empty()
    files.add(None, 1, rows_of(added("v1"), added("v2", list_="b"), added("v3", expires_at=10)))
    files.add(1, 4, rows_of(added("v1", -1), added("v4", 2)))
    files.add(4, 5, rows_of())  # a commit that changed a reason
    files.add(5, 9, rows_of(added("v4", -1)))
    names = frozenset("abc")
    expected = {1: {"v1", "v3"}, 4: {"v3", "v4"}, 5: {"v3", "v4"}, 9: {"v3", "v4"}}
    for commit in (1, 9, 4, 5, 1):
        lists = files.read(commit, names)
        assert (members(lists), members(lists, "b"), members(lists, "c")) == (expected[commit], {"v2"}, set())
        assert lists.commit == commit
    # An event at its expiry is not on the list any more.
    assert members(files.read(9, names), time=10) == {"v4"}
    assert files.read(9, frozenset("b")).names == {"b"}
    assert files.list_commits() == [1, 4, 5, 9]


def test_a_worker_reads_of_a_changed_list_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ListFiles(Parcels(tmp_path))
    files.add(None, 1, rows_of(added("v1"), added("v1", list_="b")))
    files.add(1, 2, rows_of(added("v2")))
    reads = count_reads(files, monkeypatch)
    names = frozenset("ab")
    files.read(2, names)
    assert reads == {"index": 1, "changes": 3}
    reads.clear()
    files.read(2, names)
    assert reads == {"index": 1}
    files.add(2, 3, rows_of(added("v3")))
    reads.clear()
    assert members(files.read(3, names)) == {"v1", "v2", "v3"}
    assert reads == {"index": 1, "changes": 1}


def test_many_changes_become_a_snapshot_and_a_beginner_reads_few_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ListFiles(Parcels(tmp_path))
    for commit in range(200):
        files.add(
            commit - 1 if commit else None,
            commit,
            rows_of(added(VALUES[commit % 8], 1 if commit // 8 % 2 == 0 else -1)),
        )
    reads = count_reads(files, monkeypatch)
    listfiles._KEPT.clear()
    assert members(files.read(199, frozenset("a"))) == set(VALUES)
    assert reads["snapshot"] == 1
    assert reads["changes"] <= 64
    # A list that is filled at once is a snapshot at once.
    files.add(199, 200, rows_of(*(added(f"w{n}") for n in range(10_001))))
    assert sum(name.endswith("snapshot") for name in files.parcels.list() if name.startswith(f"{200:020}")) == 1


def test_old_commits_go_with_the_pieces_that_only_they_need(tmp_path: Path) -> None:
    files = ListFiles(Parcels(tmp_path))
    for commit in range(150):
        files.add(commit - 1 if commit else None, commit, rows_of(added(VALUES[commit % 8])))
    files.drop_before(140)
    assert (files.list_commits(), files.read_floor()) == ([*range(140, 150)], 140)
    assert [members(files.read(commit, frozenset("a"))) for commit in (140, 149)] == [set(VALUES)] * 2
    # What is left: ten indexes, the pieces since the last snapshot, and the floor.
    assert len(files.parcels.list()) <= 10 + 1 + 64 + 1
    with pytest.raises(StoreFailed, match=r"139.index of the checkpoint cannot be read .*start the evaluation again"):
        files.read(139, frozenset("a"))
    assert files.find_damaged([139, 140, 149]) == [139]


def test_a_value_that_was_removed_goes_with_the_older_commits(tmp_path: Path) -> None:
    files = ListFiles(Parcels(tmp_path))
    files.add(None, 1, rows_of(added("v1"), added("of a person")))
    files.add(1, 2, rows_of(added("v2")))
    files.add(2, 3, rows_of(added("of a person", -1)))
    files.add(3, 4, rows_of(added("v3")))
    assert any(b"of a person" in files.parcels.read(name) for name in files.parcels.list())
    files.drop_before(3)
    assert not any(b"of a person" in files.parcels.read(name) for name in files.parcels.list())
    listfiles._KEPT.clear()
    assert members(files.read(4, frozenset("a"))) == {"v1", "v2", "v3"}


def test_lost_and_damaged_files_are_found(tmp_path: Path) -> None:
    files = ListFiles(Parcels(tmp_path))
    for commit in (1, 2, 3):
        files.add(commit - 1 or None, commit, rows_of(added(VALUES[commit])))
    (piece,) = (name for name in files.parcels.list() if name.startswith(f"{2:020}") and name.endswith("changes"))
    files.parcels.remove(piece)
    assert files.find_damaged([1, 2, 3]) == [2, 3]
    files.parcels.write(f"{1:020}.index", b"{")
    assert files.find_damaged([1, 2, 3]) == [1, 2, 3]
    with pytest.raises(StoreFailed, match="is damaged"):
        files.read(1, frozenset("a"))


@pytest.mark.parametrize("seed", range(4))
def test_files_and_a_replay_agree_with_all_changes_applied(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    rows = Counter[tuple[str, str, int | None, str | None]]()
    history: dict[int, list[ListChange]] = {}
    for commit in sorted(draw.sample(range(1, 400), 120)):
        changes = []
        for _ in range(draw.randrange(4)):
            row = draw.choice("abc"), draw.choice(VALUES), draw.choice([None, 5]), draw.choice([None, "cidr"])
            is_removed = rows[row] and draw.random() < 0.5
            rows[row] += -1 if is_removed else 1
            changes.append(ListChange("delete" if is_removed else "insert", commit, *row))
        history[commit] = changes
    files, names = ListFiles(Parcels(tmp_path)), frozenset("abc")
    known = ListFeed(0, max(history), {commit: ListRows.by_list(changes) for commit, changes in history.items()})
    known.write(files)
    replayed = ReplayedLists.of(known)
    for commit in [*draw.sample(sorted(history), 20), max(history)]:
        applied = [each for at, changes in history.items() if at <= commit for each in changes]
        expected = Lists.empty().apply(applied)
        for source in (files, replayed):
            lists = source.read(commit, names)
            for name in names:
                for moment in (0, 5):
                    assert members(lists, name, moment) == members(expected, name, moment), (commit, name, moment)


@pytest.mark.parametrize("seed", range(20))
def test_rows_that_were_read_as_columns_are_the_changes_row_by_row(seed: int) -> None:
    draw = random.Random(seed)
    values = ["", "10.0.0.0/8", "10.0.0.1", "1/2", "::/0", "v", "é\0'", "cidr"]
    there: list[ListChange] = []
    changes: list[ListChange] = []
    for _ in range(draw.choice([0, 1, 60])):
        if there and draw.random() < 0.4:
            row = replace(there.pop(draw.randrange(len(there))), change="delete")
        else:
            expires_at, kind = draw.choice([None, 0, 5, -(2**63), FOREVER]), draw.choice([None, "cidr", "other"])
            row = ListChange("insert", 0, draw.choice(["a", "", "b'"]), draw.choice(values), expires_at, kind)
            there.append(row)
        changes.append(replace(row, commit=len(changes) // 25))
    columns = {name: [getattr(row, name) for row in changes] for name in listfeed._SCHEMA.names}
    table = listfeed._sum_rows(pa.table(columns, schema=listfeed._SCHEMA))
    by_commit = listfeed._split_by_commit(table, {row.commit for row in changes})
    assert list(by_commit) == sorted({row.commit for row in changes})
    read = applied = Lists.empty()
    asked = from_values(STRING, [*values, "10.255.255.255", "::1", "11.0.0.0"])
    for commit, rows in by_commit.items():
        read = read.change({name: unpack_rows(pack_rows(listed), name) for name, listed in rows.items()}, commit)
        applied = applied.apply([row for row in changes if row.commit == commit], commit)
        assert (read.commit, read.counts) == (applied.commit, applied.counts)
        for name in read.names:
            assert read.find_until(name, asked).tolist() == applied.find_until(name, asked).tolist()


@pytest.mark.long
def test_c11_3_a_list_of_a_million_values_is_one_file_and_a_change_of_it_a_small_one(tmp_path: Path) -> None:
    files = ListFiles(Parcels(tmp_path))
    files.add(None, 1, rows_of(*(added(f"{number:07}") for number in range(1_000_000))))
    files.add(1, 2, rows_of(added("v1")))
    sizes = {file.name.partition(".")[0][-1] + file.suffix: file.stat().st_size for file in tmp_path.iterdir()}
    assert sizes["1.snapshot"] < 24_100_000
    assert sizes["2.changes"] < 100
    listfiles._KEPT.clear()
    started = time.perf_counter()
    lists = files.read(1, frozenset("a"))
    cold = time.perf_counter() - started
    started = time.perf_counter()
    lists = files.read(2, frozenset("a"))
    warm = time.perf_counter() - started
    assert (members(lists), lists.count) == ({"v1"}, 1_000_001)
    # A worker that begins reads the file; another change costs it nothing in proportion to the list.
    assert cold < 5
    assert warm < 0.5


def test_before_the_first_commit_that_can_be_read_lists_are_as_they_were_then(tmp_path: Path) -> None:
    history = ListFeed(5, 6, {6: rows_of(added("v2"))}, rows_of(added("v1")))
    files = ListFiles(Parcels(tmp_path))
    history.write(files, [1, 3, 6])
    assert files.list_commits() == [1, 3, 4, 6]
    found = [members(files.read(commit, frozenset("a"))) for commit in (1, 3, 4, 6)]
    assert found == [{"v1"}, {"v1"}, {"v1"}, {"v1", "v2"}]
    replayed = ReplayedLists.of(history)
    assert [members(replayed.read(commit, frozenset("a"))) for commit in (6, 1)] == [{"v1", "v2"}, {"v1"}]


def test_what_a_commit_did_is_said_in_a_few_words() -> None:
    changes = rows_of(
        added("v1"), added("v2"), added("v3", -1), added("v4", -1, expires_at=1), added("v4", expires_at=2),
        added("v1", -1, "b"),
    )  # fmt: skip
    assert describe_changes(changes) == "a: 2 added, 1 changed, 1 removed; b: 1 removed"
    assert describe_changes({}) == "no value changed"
    many = describe_changes(rows_of(*(added("v", list_=f"l{n:02}") for n in range(12))))
    assert many.endswith("l09: 1 added; and 2 other lists")


def test_c11_3_a_commit_that_nobody_logged_is_in_force_no_earlier_than_one_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = {
        "lists": {
            1: 15,
            2: 25,
            3: 26,
            4: 45,
        },  # 2 was obeyed late, 3 was written right after it, and nobody logged 1, 3 and 4
        STREAM.name: {0: 0, 1: 10, 2: 20, 3: 30, 4: 40, 5: 45},
    }
    monkeypatch.setattr(
        trials, "_read_times", lambda _, name: [{"version": version, "at": at} for version, at in times[name].items()]
    )
    history: Any = SimpleNamespace(stamps=())
    placed = trials._place_by_time(cast("Any", None), STREAM, history, [1, 2, 3, 4], {2: 4})
    # A commit of lists follows the events of its own moment.
    assert [(each.change.version, each.after) for each in placed] == [(1, 1), (3, 4), (4, 5)]
    assert trials._place_by_time(cast("Any", None), STREAM, history, [2], {2: 4}) == []

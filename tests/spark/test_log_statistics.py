"""The log of a table says how many rows its commits have, where it says all, and which of them have lost their files."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from growth import grows_in_proportion
from lookback.core.values.times import parse_time
from lookback.spark.tables.history import find_commits_without_files, list_inserted_rows
from lookback.spark.tables.lakehouse import commit_file

FIRST, LAST = "2024-03-04T10:00:00.000Z", "2024-03-04T10:00:00.001Z"
REMOVED = {"remove": {"path": "0.parquet", "dataChange": True}}


def add(rows: int = 3, first: str = FIRST, last: str = LAST, **more: Any) -> dict[str, Any]:
    """Makes the action that adds a file. more: properties in place of its own."""
    statistics = {"numRecords": rows, "minValues": {"at": first}, "maxValues": {"at": last}}
    return {"add": {"path": "0.parquet", "dataChange": True, "stats": json.dumps(statistics), **more}}


def count(folder: Path, *commits: list[dict[str, Any]]) -> Any:
    """Counts the rows of commits by a log that has them after the one that made the table."""
    (folder / "_delta_log").mkdir()
    made = [{"commitInfo": {}}, {"protocol": {}}, {"metaData": {"configuration": {}}}]
    for version, actions in enumerate([made, *commits]):
        commit_file(folder, version).write_text("".join(json.dumps(action) + "\n" for action in actions))
    return list_inserted_rows(folder, len(commits), "at")


def test_the_rows_of_a_commit_are_those_of_its_files(tmp_path: Path) -> None:
    later = "2024-03-04T10:00:05.5+02:00"
    empty = {"add": {**add()["add"], "stats": json.dumps({"numRecords": 0})}}
    compacted = [{"remove": {"path": "0.parquet", "dataChange": False}}, add(7, dataChange=False)]
    found = count(
        tmp_path, [{"commitInfo": {}}, add(), add(4, later), empty], compacted, [{"txn": {}}], [add(last=later)]
    )
    assert found == [
        (1, 7, parse_time("2024-03-04T08:00:05.5Z"), parse_time(LAST)),
        (4, 3, parse_time(FIRST), parse_time("2024-03-04T08:00:05.5Z")),
    ]


@pytest.mark.parametrize(
    "action",
    [
        REMOVED,
        {"remove": {"path": "0.parquet"}},
        {"remove": add()["add"]},
        {"cdc": {"path": "_change_data/0.parquet"}},
        {"unheard_of": {}},
        {"metaData": {"configuration": {"delta.columnMapping.mode": "name"}}},
        add(deletionVector={"cardinality": 1}),
        add(stats=None),
        add(stats=""),
        add(stats=json.dumps({"numRecords": 3})),
        add(stats=json.dumps({"minValues": {"at": FIRST}, "maxValues": {"at": LAST}})),
        add(stats=json.dumps({"numRecords": 3, "minValues": {"id": 1}, "maxValues": {"id": 1}})),
        add(first="+12024-03-04T10:00:00.000Z"),
        {"add": {"path": "0.parquet", "dataChange": True}},
    ],
)
def test_a_log_that_does_not_say_all_counts_nothing(action: dict[str, Any], tmp_path: Path) -> None:
    assert count(tmp_path, [add()], [action]) is None


def test_a_log_that_begins_later_counts_nothing(tmp_path: Path) -> None:
    (tmp_path / "_delta_log").mkdir()
    commit_file(tmp_path, 1).write_text(json.dumps(add()) + "\n")
    assert list_inserted_rows(tmp_path, 1, "at") is None


def test_c10_2_counting_the_rows_of_commits_by_the_log_grows_in_proportion_to_the_commits(tmp_path: Path) -> None:
    def seconds_for(commits: int) -> float:
        folder = tmp_path / str(commits)
        if not folder.exists():
            folder.mkdir()
            count(folder, *([add()] for _ in range(commits)))
        began = time.process_time()
        found = list_inserted_rows(folder, commits, "at")
        seconds = time.process_time() - began
        assert len(found or ()) == commits
        return seconds

    assert grows_in_proportion(seconds_for, 500)


def test_c11_1_a_commit_that_is_written_while_files_are_listed_has_lost_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the history that a rule starts with would begin there, without all that came before."""
    (tmp_path / "_delta_log").mkdir()

    def commit(version: int) -> None:
        (tmp_path / f"{version}.parquet").touch()
        action = {"add": {"path": f"{version}.parquet", "dataChange": True}}
        commit_file(tmp_path, version).write_text(json.dumps(action))

    def list_and_commit(folder: Path) -> Iterator[Any]:
        yield from list_files(folder)
        commit(2)

    list_files = os.walk
    for version in (0, 1):
        commit(version)
    monkeypatch.setattr(os, "walk", list_and_commit)
    assert list(find_commits_without_files(tmp_path, 0)) == []
    (tmp_path / "1.parquet").unlink()
    assert list(find_commits_without_files(tmp_path, 0)) == [1]

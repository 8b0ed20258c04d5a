"""The mark of a batch is found in the log of a table, whatever else is written there."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lookback.spark.batches import sink
from lookback.spark.tables.lakehouse import commit_file


def make_table(folder: Path, marks: list[str | None], first: int = 0) -> Any:
    """Makes the log of a local table with a commit for each mark; None for a commit without one."""
    (folder / "_delta_log").mkdir()
    for version, mark in enumerate(marks, first):
        info = {"operation": "WRITE", **({} if mark is None else {"userMetadata": mark})}
        # A path may have the word that the search looks for.
        lines = [{"add": {"path": '"commitInfo"'}}, {"commitInfo": info}]
        commit_file(folder, version).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return SimpleNamespace(
        may_have_rows=lambda name: True, log_folder=lambda name: folder, version=lambda name: first + len(marks) - 1
    )


def test_the_mark_of_a_batch_is_found_behind_commits_of_others(tmp_path: Path) -> None:
    tables = make_table(tmp_path, [None, "a:1", "a:2", "b:1", "ab:3", None, 'x "a:3" y'])
    found = {
        mark: sink.is_written(tables, "alerts", mark) for mark in ("a:1", "a:2", "a:3", "a:22", "b:1", "ab:3", "c:1")
    }
    # Batches of a query are written in order, so an earlier one is asked for in vain; none repeats it.
    assert found == {"a:1": False, "a:2": True, "a:3": False, "a:22": False, "b:1": True, "ab:3": True, "c:1": False}


def test_a_log_that_was_cleaned_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    tables = make_table(tmp_path, ["a:7", "b:1"], first=5_000)
    assert sink.is_written(tables, "alerts", "a:7")
    assert not sink.is_written(tables, "alerts", "c:0")


def test_as_few_commits_are_read_as_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables, read = make_table(tmp_path, [f"a:{batch}" for batch in range(200)] + ["b:0"] * 3), list[int]()

    def count(folder: Path, version: int) -> Path:
        read.append(version)
        return commit_file(folder, version)

    monkeypatch.setattr(sink, "commit_file", count)
    assert sink.is_written(tables, "alerts", "a:199")
    assert not sink.is_written(tables, "alerts", "a:200")
    assert read == [202, 201, 200, 199] * 2

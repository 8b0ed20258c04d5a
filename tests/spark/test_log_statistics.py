"""The log of a table says which commits have lost their files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lookback.spark.tables.history import find_commits_without_files
from lookback.spark.tables.logfiles import commit_file


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

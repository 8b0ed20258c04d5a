"""Reads the log files of a Delta table in a folder or in S3, which needs no Spark job."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from lookback.places import Place


def commit_file(folder: Place, version: int) -> Place:
    """Returns the log file of the commit `version` of the table in `folder`."""
    return folder / "_delta_log" / f"{version:020d}.json"


def read_actions(commit: Place, kind: str = "") -> list[dict[str, Any]]:
    """Reads the actions of a commit.

    Args:
        commit: The log file, as returned by `commit_file`.
        kind: The kind of action to return, such as add; all if empty.

    Raises:
        OSError: If the file does not exist.
        ValueError: If the file is damaged.
    """
    mark = f'"{kind}"' if kind else ""
    lines = commit.read_text(encoding="utf-8").splitlines()
    # Lines that do not name the kind are not parsed: a commit may add thousands of files.
    actions = (json.loads(line) for line in lines if mark in line)
    return [action for action in actions if not kind or kind in action]


def find_last_commit(folder: Path) -> int | None:
    """Returns the last commit in the log of a table's folder; None if its files do not say. Commits have no gaps."""
    try:
        low = int(json.loads((folder / "_delta_log" / "_last_checkpoint").read_bytes())["version"])
    except (OSError, ValueError, KeyError, TypeError):
        low = 0

    def exists(commit: int) -> bool:
        return commit_file(folder, commit).exists()

    if not exists(low):
        return None
    step = 1
    while exists(low + step):
        low, step = low + step, 2 * step
    # Commit low exists, low + step does not.
    while step > 1:
        step = -(-step // 2)
        if exists(low + step):
            low += step
    return low

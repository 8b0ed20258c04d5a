"""The mark of a batch is found in the history of a table, whatever else is written there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lookback.spark.batches import sink


def make_table(marks: list[str | None], limits: list[int] | None = None) -> Any:
    """Makes a table whose commits have these marks, None for none; `limits` gets the limit of each reading."""

    def history(_: str, limit: int) -> Any:
        if limits is not None:
            limits.append(limit)
        rows = [{"userMetadata": mark} for mark in marks[::-1][:limit]]
        return SimpleNamespace(select=lambda *_: SimpleNamespace(collect=lambda: rows))

    return SimpleNamespace(may_have_rows=lambda name: True, history=history)


def test_the_mark_of_a_batch_is_found_behind_commits_of_others() -> None:
    tables = make_table([None, "a:1", "a:2", "b:1", "ab:3", None, 'x "a:3" y'])
    found = {
        mark: sink.is_written(tables, "alerts", mark) for mark in ("a:1", "a:2", "a:3", "a:22", "b:1", "ab:3", "c:1")
    }
    assert found == {"a:1": True, "a:2": True, "a:3": False, "a:22": False, "b:1": True, "ab:3": True, "c:1": False}


def test_as_few_commits_are_read_as_can_be() -> None:
    limits = list[int]()
    tables = make_table([f"a:{batch}" for batch in range(500)] + ["b:0"] * 60, limits)
    assert sink.is_written(tables, "alerts", "a:499")
    assert not sink.is_written(tables, "alerts", "a:500")
    # The last commits are all of others, so more of them are read, up to the first of this query.
    assert limits == [50, 400] * 2
    assert not sink.is_written(tables, "alerts", "c:0")
    assert limits[4:] == [50, 400, 3200]

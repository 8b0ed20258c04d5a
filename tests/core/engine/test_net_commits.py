"""A commit that removes rows and writes them again, as RESTORE and INSERT OVERWRITE do."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from lookback.core.engine.batch import Batch
from lookback.core.engine.evaluation import Evaluator
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.rulebook import RuleBook
from lookback.core.state.shard import ShardState
from lookback.core.streams.arrival import find_marks
from lookback.core.streams.declaration import Stream
from lookback.core.streams.eventrows import read_events
from lookback.core.streams.events import Events

FIELDS = {"id": "string", "at": "timestamp", "card": "string", "n": "int", "tags": "array<string>"}
STREAM = Stream.from_dict({"stream": "pay", "event_id": "id", "event_time": "at", "fields": FIELDS})
RULE = {
    "rule_id": "sums", "stream": "pay", "group_by": ["card"], "window": "10 minutes", "measures": {"s": "sum(n)"},
    "when": "s >= 1",
}  # fmt: skip


def row(name: str, minute: int, n: int | None, card: str = "x", commit: int = 1) -> dict[str, Any]:
    return {"id": name, "at": minute * 60_000_000, "card": card, "n": n, "tags": [name, None], "arrival": commit}


def read(rows: list[dict[str, Any]]) -> Events:
    return read_events(rows, STREAM, 1)[0]


def judge(*batches: tuple[list[dict[str, Any]], list[dict[str, Any]]], shards: int = 1) -> list[tuple[Any, ...]]:
    """Judges batches of (inserted, deleted) rows, each in every shard. Returns id, arrival and sum of each alert."""
    found: list[tuple[Any, ...]] = []
    for shard in range(shards):
        state = ShardState(RuleBook(STREAM, {STREAM.name: STREAM}))
        changes = [RuleChange("insert", 0, "sums", 1, "active", json.dumps(RULE))]
        for inserted, deleted in batches:
            events, gone = read(inserted), read(deleted) if deleted else None
            marks = find_marks(events, events.commits) | dict.fromkeys([] if gone is None else gone.commits.tolist())
            marks |= find_marks(events, events.commits)
            deleting = frozenset() if gone is None else frozenset(gone.commits.tolist())
            output = Evaluator(STREAM, shard, shards).process(
                state, Batch(events, gone, marks, changes, deleting=deleting)
            )
            changes = []
            found += [(alert.event_id, alert.arrival, alert.measures["s"]) for alert in output.alerts]
    return sorted(found)


FIRST = [row("a", 1, 1), row("b", 2, 2), row("c", 2, None, "y")]


@pytest.mark.parametrize("shards", [1, 3])
def test_rows_that_a_commit_writes_again_as_they_were_raise_no_alert_and_stay_in_their_windows(shards: int) -> None:
    again = [{**each, "arrival": 2} for each in FIRST]
    new = row("d", 3, 4, commit=3)
    assert judge((FIRST, []), (again, again), ([new], []), shards=shards) == [("a", 1, 1), ("b", 1, 3), ("d", 3, 7)]


def test_what_a_restore_takes_away_is_deleted_and_what_it_brings_back_is_judged_as_new() -> None:
    # b goes, d comes, a is written again; the three come in any order.
    deleted = [{**FIRST[1], "arrival": 2}, {**FIRST[0], "arrival": 2}]
    inserted = [row("d", 3, 4, commit=2), {**FIRST[0], "arrival": 2}]
    new = row("e", 4, 8, commit=3)
    assert judge((FIRST, []), (inserted, deleted), ([new], [])) == [("a", 1, 1), ("b", 1, 3), ("d", 2, 5), ("e", 3, 13)]


def test_a_row_with_another_value_is_no_longer_the_same_and_equal_rows_are_counted() -> None:
    changed = {**FIRST[0], "n": 16, "arrival": 2}
    found = judge((FIRST, []), ([changed], [{**FIRST[0], "arrival": 2}]), ([row("d", 3, 4, commit=3)], []))
    assert found == [("a", 1, 1), ("a", 2, 16), ("b", 1, 3), ("d", 3, 22)]
    twice = Batch(read([{**FIRST[0], "arrival": 2}] * 3), read([{**FIRST[0], "arrival": 2}])).net()
    assert (len(twice.events), twice.deleted) == (2, None)
    # Another commit is another matter.
    apart = Batch(read(FIRST), read([{**FIRST[0], "arrival": 2}])).net()
    assert apart.deleted is not None
    assert np.array_equal(apart.events.commits, [1, 1, 1])

"""Events that wait for the history of their key are afterwards what they were: values, NULLs, errors, watermarks, lists."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from lookback.core.engine.deferral import encode_events, find_pieces, list_no_events, read_deferred
from lookback.core.errors import StateError
from lookback.core.judging.rulerun import RuleRun
from lookback.core.judging.segment import Segment, Timeline
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.rulebook import RuleBook
from lookback.core.rules.versions import Entry
from lookback.core.state.shard import ShardState
from lookback.core.streams.declaration import Stream
from lookback.core.streams.eventrows import read_events
from lookback.core.streams.events import Events
from lookback.core.values.columns import Column
from lookback.core.values.keys import Keys
from lookback.core.values.lists import Lists

FIELDS = {
    "id": "string", "at": "timestamp", "n": "int", "text": "string", "wide": "decimal(38,2)", "few": "decimal(9,2)", "real": "double",
    "yes": "boolean", "day": "date", "many": "array<string>", "unread": "string",
}  # fmt: skip
STREAM = Stream.from_dict({"stream": "s", "event_id": "id", "event_time": "at", "fields": FIELDS})
RULE = {
    "rule_id": "r", "stream": "s", "group_by": ["text"], "window": {"session": "1 minute"}, "message": "{text}",
    "where": "yes or in_list(cast(12 div n as string), 'l')",
    "measures": {
        "a": "sum(wide)", "b": "max(real)", "c": "count(day)", "d": "count(many)", "e": "sum(few)", "f": "count(in_list(text, 'l'))",
    },
}  # fmt: skip
# NULLs, extremes, odd texts, no value of a type at all in a page of its own, and a division by zero within in_list.
ROWS: list[dict[str, Any]] = [
    {"id": "ü`", "at": 5, "n": 0, "text": None, "wide": None, "few": None, "real": None, "yes": None, "day": None, "many": None},
    {
        "id": "", "at": -(2**40), "n": 3, "text": "é'\n", "wide": "123456789012345678901234567890123456.78", "few": "-9999999.99",
        "real": float("nan"), "yes": True, "day": "1969-12-31", "many": ["x", None, ""],
    },
    {
        "id": "z", "at": 2**50, "n": -(2**31), "text": "", "wide": "-0.01", "few": "0.00", "real": float("-inf"), "yes": False,
        "day": "2026-03-01", "many": [],
    },
    {"id": "y", "at": 7, "n": None, "text": "x", "wide": "0.00", "few": "1.00", "real": -0.0, "yes": True, "day": None, "many": None},
]  # fmt: skip


def start(rows: list[dict[str, Any]], commits: list[int]) -> Any:
    events, _ = read_events([row | {"arrival": commit} for row, commit in zip(rows, commits, strict=True)], STREAM, 1)
    rule = compile_rule(RULE, STREAM, lane=2)
    timeline = Timeline(*(np.arange(1, 9) + shift for shift in (0, 100, 101)))
    state = ShardState(RuleBook(STREAM, {"s": STREAM}))
    segment = Segment(STREAM, state, events.look_up(rule.memberships, Lists.empty()), timeline, 0, 1)
    return RuleRun(segment, Entry("r", 1, "paused", json.dumps(RULE), "s", 1, lane=2), rule)


def listed(column: Column) -> list[Any]:
    known = column.is_known().tolist()
    error = [False] * len(column) if column.error is None else column.error.tolist()
    return [
        repr(value) if is_known else is_error
        for value, is_known, is_error in zip(column.values.tolist(), known, error, strict=True)
    ]


def read(pages: list[bytes], most: int = 10, without: str = "") -> list[tuple[Events, Timeline]]:
    rule = compile_rule(RULE, STREAM, lane=2)

    def select(keys: Keys) -> Any:
        left_out, _ = read_events([{"id": "-", "at": 0, "text": without, "arrival": 1}], STREAM, 1)
        key = left_out.find_keys(("text",))
        return (keys.low != key.low) | (keys.high != key.high)

    return list(read_deferred(pages, rule, STREAM, select, most))


@pytest.mark.parametrize("chosen", [[0, 1, 2, 3], [0], [1, 3], [2]])
def test_deferred_events_are_what_they_were(chosen: list[int]) -> None:
    run = start([ROWS[at] for at in chosen], [1, 1, 3, 8][: len(chosen)])
    ((events, timeline),) = read([encode_events(run, np.ones(len(chosen), dtype=bool))], without="no such text")
    assert "unread" not in events.columns
    for name in events.columns:
        assert listed(events.columns[name]) == listed(run.events.columns[name])
        assert events.columns[name].values.dtype == run.events.columns[name].values.dtype
    assert events.commits.tolist() == run.events.commits.tolist()
    assert sorted({*events.commits.tolist()}) == timeline.commits.tolist()
    assert (timeline.before - timeline.commits == 100).all()
    assert (timeline.after - timeline.commits == 101).all()
    where = run.rule.where
    assert listed(events.value(where)) == listed(run.events.value(where))
    assert set(list_no_events(run.rule, STREAM).columns) == set(events.columns)


def test_pages_are_joined_in_their_order_without_the_keys_that_are_not_meant() -> None:
    pages = [
        encode_events(run, np.array([True]))
        for run in (start([row], [commit]) for row, commit in zip(ROWS, (2, 4, 5, 8), strict=True))
    ]
    (whole,) = read(pages, without="")
    assert whole[0].id_texts == ["ü`", "", "y"]
    assert (whole[0].commits.tolist(), whole[1].commits.tolist()) == ([2, 4, 8], [2, 4, 8])
    assert [len(events) for events, _ in read(pages, most=2)] == [2, 1]


def test_keys_have_one_piece_of_their_shard() -> None:
    keys = Keys(np.arange(1_000), np.arange(1_000) % 7)
    for shards, pieces in ((1, 1), (1, 5), (3, 4)):
        for shard in range(shards):
            own = keys.take(keys.shard(shards) == shard)
            numbers = find_pieces(own, shards, pieces)
            assert {*numbers.tolist()} == {*range(1, pieces + 1)}
            # The part with that number is made by a shard of as many.
            assert (own.shard(shards * pieces) == shard + shards * (numbers - 1)).all()


def test_a_page_that_is_something_else_is_refused() -> None:
    page = encode_events(start(ROWS, [1, 1, 3, 8]), np.ones(4, dtype=bool))
    for damaged in (b"", page[:-40], page.replace(b"LBpg", b"LBxx")):
        with pytest.raises(StateError, match="start with a new checkpoint"):
            read([damaged])

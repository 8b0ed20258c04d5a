"""The order in which rows come out: alerts by what brings them, then by rule and key; late events by arrival."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from lookback import Harness, replay
from lookback.core.engine.batch import Batch
from lookback.core.engine.evaluation import Evaluator
from lookback.core.judging.segment import merge_failures
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.rulebook import RuleBook
from lookback.core.state.shard import ShardState
from lookback.core.streams.alerts import Failure
from lookback.core.streams.arrival import find_marks
from lookback.core.streams.blocks import merge_alerts, pack_alerts, pack_failures, unpack_failures
from lookback.core.streams.declaration import Stream
from lookback.core.streams.eventrows import read_events

STREAM = Stream.from_dict(
    {
        "stream": "uses",
        "event_id": "id",
        "event_time": "at",
        "fields": {"id": "bigint", "at": "timestamp", "card": "string", "place": "string"},
        "max_out_of_orderness": "0 seconds",
        "max_future": "100 microseconds",
    }
)
EACH = {"stream": "uses", "window": "1 second", "measures": {"n": "count(*)"}, "when": "n > 0"}
RULES: list[dict[str, Any]] = [
    {"rule_id": "b-by-place", "group_by": ["place"], **EACH},
    {"rule_id": "a-by-card", "group_by": ["card"], **EACH},
    {"rule_id": "c-windows", "group_by": ["card"], **EACH, "window": {"tumbling": "10 microseconds"}},
    {"rule_id": "a-short", "group_by": ["card"], **EACH, "window": {"tumbling": "5 microseconds"}},
    {
        "rule_id": "d-silence", "group_by": ["card"], "stream": "uses",
        "sequence": {"within": "1 second", "steps": [
            {"name": "use", "where": "card = 'x'"}, {"name": "none", "absent": "true", "within": "9 microseconds"}]},
    },
]  # fmt: skip
ROWS = [
    {"id": 10, "at": 1, "card": "x", "place": "p", "arrival": 1, "position": 0},
    {"id": 9, "at": 1, "card": "y", "place": "q", "arrival": 1, "position": 1},
    {"id": 11, "at": 0, "card": "z", "place": "p", "arrival": 1, "position": 2},
    {"id": 12, "at": 30, "card": "x", "place": "q", "arrival": 2, "position": 0},
]
EXPECTED = [
    # Commit 1, by event time, then by position, then by rule.
    ("a-by-card", "11", "z"), ("b-by-place", "11", "p"),
    ("a-by-card", "10", "x"), ("b-by-place", "10", "p"),
    ("a-by-card", "9", "y"), ("b-by-place", "9", "q"),
    # Commit 2: its event first, then what the watermark reaches: ends at 5, at 10, and a due at 10, which is over at 11.
    ("a-by-card", "12", "x"), ("b-by-place", "12", "q"),
    ("a-short", None, "x"), ("a-short", None, "y"), ("a-short", None, "z"),
    ("c-windows", None, "x"), ("c-windows", None, "y"), ("c-windows", None, "z"),
    ("d-silence", "10", "x"),
]  # fmt: skip


def told(alert: Any) -> tuple[str, str | None, str]:
    return alert.rule_id, alert.event_id, next(iter(dict(alert.key).values()))


@pytest.mark.parametrize("order", [1, -1])
def test_c3_1_alerts_come_by_what_brings_them_then_by_rule_and_key(order: int) -> None:
    result = replay(RULES[::order], ROWS[::order], STREAM)
    assert [told(alert) for alert in result.alerts] == EXPECTED
    harness = Harness(STREAM)
    for rule in RULES[::order]:
        harness.rule(rule)
    for arrival in (1, 2):
        harness.events([row for row in ROWS[::order] if row["arrival"] == arrival])
    assert [told(alert) for alert in harness.alerts] == EXPECTED


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_c3_1_what_the_shards_answer_comes_in_the_order_of_one(shards: int) -> None:
    events, _ = read_events(ROWS, STREAM, 1)
    changes = [RuleChange("insert", 1, rule["rule_id"], 1, "active", json.dumps(rule)) for rule in RULES]
    blocks = []
    for shard in reversed(range(shards)):
        state = ShardState(RuleBook(STREAM, {"uses": STREAM}))
        batch = Batch(events, marks=find_marks(events, events.commits), changes=changes)
        blocks.append(pack_alerts(Evaluator(STREAM, shard, shards).process(state, batch).rows))
    rows = merge_alerts(blocks).to_pylist()
    assert [(row["rule_id"], row["event_id"], dict(row["key"]).popitem()[1]) for row in rows] == EXPECTED


@pytest.mark.parametrize("shards", [1, 3])
def test_the_first_failing_event_is_the_first_in_order_of_arrival_in_whatever_shard(shards: int) -> None:
    rule = {**EACH, "rule_id": "fails", "group_by": ["card"], "where": "id div 0 > 0"}
    rows = [{"id": 20 - at, "at": 1, "card": f"c{at}", "arrival": 1} for at in range(6)]
    events, _ = read_events(rows, STREAM, 1)
    failures: list[Failure] = []
    for shard in range(shards):
        state = ShardState(RuleBook(STREAM, {"uses": STREAM}))
        changes = [RuleChange("insert", 1, "fails", 1, "active", json.dumps(rule))]
        batch = Batch(events, marks=find_marks(events, events.commits), changes=changes)
        failures += unpack_failures(pack_failures(Evaluator(STREAM, shard, shards).process(state, batch).failures))
    (failure,) = merge_failures(failures)
    assert (failure.count, failure.first_event_id) == (6, "20")


@pytest.mark.parametrize("names", [range(9, 15), "zyxwvu"])
def test_rows_of_one_commit_and_one_time_are_judged_as_they_are_given(names: Any) -> None:
    """A login that fails and then succeeds in one second, whatever the ids are."""
    fields = {"id": "string", "at": "timestamp", "user": "string", "outcome": "string"}
    stream = {"stream": "logins", "event_id": "id", "event_time": "at", "fields": fields}
    steps = [{"name": "failed", "where": "outcome = 'FAIL'"}, {"name": "success", "where": "outcome = 'OK'"}]
    rule = {
        "rule_id": "position", "stream": "logins", "group_by": ["user"],
        "sequence": {"within": "1 minute", "steps": steps, "until": "outcome = 'OK'"},
    }  # fmt: skip
    rows = [
        {"id": str(name), "at": 0, "user": f"u{at // 2}", "outcome": "OK" if at % 2 else "FAIL"}
        for at, name in enumerate(names)
    ]
    expected = [str(name) for name in names][1::2]
    together = [row | {"arrival": 1} for row in rows]
    for given in (rows, together, pd.DataFrame(together), pa.Table.from_pylist(together)):
        assert [alert.event_id for alert in replay([rule], given, stream).alerts] == expected
    positioned = [row | {"position": at} for at, row in enumerate(together)]
    assert [alert.event_id for alert in replay([rule], positioned[::-1], stream).alerts] == expected


def test_a_measure_may_be_named_like_the_column_of_positions() -> None:
    rule = {**EACH, "rule_id": "many", "measures": {"position": "count(*)"}, "when": "position >= 3"}
    rows = [{"id": at, "at": at, "arrival": 1, "position": 3 - at} for at in range(4)]
    assert [alert.event_id for alert in replay([rule], rows, STREAM).alerts] == ["2", "3"]


def test_c3_2_late_events_come_in_order_of_arrival_those_beyond_max_future_among_them() -> None:
    rows = [
        {"id": 1, "at": 1_000, "card": "x", "arrival": 1, "committed_at": 1_000},
        {"id": 10, "at": 7, "card": "x", "arrival": 2, "committed_at": 1_000},
        {"id": 9, "at": 7, "card": "x", "arrival": 2, "committed_at": 1_000},
        {"id": 3, "at": 9_000, "card": "x", "arrival": 3, "committed_at": 1_000},
        {"id": 4, "at": 8, "card": "x", "arrival": 4, "committed_at": 1_000},
    ]
    result = replay(RULES[:1], rows, STREAM)
    assert [late.event_id for late in result.late_events] == ["9", "10", "3", "4"]
    harness = Harness(STREAM)
    harness.rule(RULES[0])
    harness.events(rows)
    assert [late.event_id for late in harness.late_events] == ["9", "10", "3", "4"]

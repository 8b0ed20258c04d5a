"""The order in which rows come out: alerts by what brings them, then by rule and key; late events by arrival."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lookback import Harness, replay
from lookback.core.engine.evaluation import Batch, Evaluator
from lookback.core.rules.rulebook import RuleBook, RuleChange
from lookback.core.state.shard import ShardState
from lookback.core.streams.arrival import find_marks
from lookback.core.streams.blocks import merge_alerts, pack_alerts
from lookback.core.streams.declaration import Stream
from lookback.core.streams.events import read_events

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
    {"id": 10, "at": 1, "card": "x", "place": "p", "arrival": 1},
    {"id": 9, "at": 1, "card": "y", "place": "q", "arrival": 1},
    {"id": 11, "at": 0, "card": "z", "place": "p", "arrival": 1},
    {"id": 12, "at": 30, "card": "x", "place": "q", "arrival": 2},
]
EXPECTED = [
    # Commit 1, by event time, then by the number of the id (9 before 10), then by rule.
    ("a-by-card", "11", "z"), ("b-by-place", "11", "p"),
    ("a-by-card", "9", "y"), ("b-by-place", "9", "q"),
    ("a-by-card", "10", "x"), ("b-by-place", "10", "p"),
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

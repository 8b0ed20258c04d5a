"""Drafted tests: the fewest events that alert, and a near miss."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from lookback.core.errors import SetupError
from lookback.core.rules.compiling import compile_rule
from lookback.core.streams.declaration import Stream
from lookback.core.values.times import parse_time, to_utc
from lookback.testing.drafts import draft_tests
from lookback.testing.rule_tests import run_rule_tests

STREAM = Stream.from_dict(
    {
        "stream": "uses",
        "event_id": "id",
        "event_time": "at",
        "fields": {"id": "bigint", "at": "timestamp", "card": "string", "amount": "decimal(18,2)", "note": "string"},
    }
)
TWICE: dict[str, Any] = {
    "rule_id": "twice", "stream": "uses", "group_by": ["card"], "window": "1 hour",
    "measures": {"total": "sum(amount)", "n": "count(*)"}, "when": "n >= 3 and total > 100", "message": "{total}",
}  # fmt: skip


def events(*rows: tuple[str, str]) -> pa.Table:
    times = [to_utc(parse_time(f"2026-03-01T10:{at:02}:00Z")) for at in range(len(rows))]
    return pa.table(
        {
            "id": pa.array(range(len(rows)), pa.int64()),
            "at": pa.array(times, pa.timestamp("us", "UTC")),
            "card": [card for card, _ in rows],
            "amount": pa.array([Decimal(amount) for _, amount in rows], pa.decimal128(18, 2)),
            "note": ["private"] * len(rows),
            "arrival": pa.array(range(1, len(rows) + 1), pa.int64()),
        }
    )


def test_the_fewest_events_that_alert_and_a_near_miss() -> None:
    seen = events(("x", "1"), ("y", "200"), ("x", "90"), ("x", "1"), ("y", "1"), ("x", "20"), ("x", "3"))
    alert, miss = draft_tests(TWICE, seen, STREAM)
    assert [event["id"] for event in alert["events"]] == [2, 3, 5]
    assert alert["alerts"] == [{"event_id": "5", "message": "111.00"}]
    assert alert["events"][0] == {"id": 2, "at": "2026-03-01T10:02:00Z", "card": "x", "amount": "90.00"}
    assert ([event["id"] for event in miss["events"]], miss["alerts"]) == ([3, 5], [])
    assert run_rule_tests(compile_rule({**TWICE, "tests": [alert, miss]}, STREAM), STREAM) == []


def test_an_alert_is_found_among_many_events_of_other_keys() -> None:
    rows = [(f"other-{at % 7}", "1") for at in range(50)]
    for at in (3, 20, 30, 40):
        rows[at] = ("x", "40")
    alert, _ = draft_tests(TWICE, events(*rows), STREAM)
    assert [event["id"] for event in alert["events"]] == [3, 20, 30]
    # All in one commit and read in another order, as from a table.
    together = events(*rows).set_column(5, "arrival", pa.array([1] * 50, pa.int64())).sort_by([("at", "descending")])
    assert draft_tests(TWICE, together, STREAM)[0] == alert


def test_a_rule_of_single_events_has_another_event_as_near_miss() -> None:
    rule = {"rule_id": "large", "stream": "uses", "when": "amount > 100"}
    alert, miss = draft_tests(rule, events(("x", "1"), ("y", "200"), ("x", "90")), STREAM)
    assert [event["id"] for event in alert["events"]] == [1]
    assert [event["id"] for event in miss["events"]] == [2]
    assert miss["alerts"] == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"when": "n > 9"}, "twice raises no alert over the 2 newest events of 'uses'; write its tests by hand"),
        ({"window": {"tumbling": "1 hour"}}, "twice does not alert at an event but when time has passed"),
        ({"where": "in_list(card, 'known')"}, "twice reads lists, whose values a test must name"),
    ],
)
def test_rules_without_drafts(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SetupError, match=sentence):
        draft_tests({**TWICE, **change}, events(("x", "1"), ("x", "1")), STREAM)

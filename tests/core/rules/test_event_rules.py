"""Event rules: conditions on a single event, which keep nothing and need no window."""

from __future__ import annotations

from typing import Any

import pytest

from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.coverage import find_coverage
from lookback.core.rules.wording import describe_rule
from lookback.core.streams.declaration import Stream
from lookback.testing.harness import Harness

STREAM = Stream.from_dict(
    {
        "stream": "pay", "event_id": "id", "event_time": "at", "max_out_of_orderness": "10 seconds",
        "fields": {"id": "int", "at": "timestamp", "card": "string", "amount": "decimal(18,2)"},
    }
)  # fmt: skip
RULE: dict[str, Any] = {"rule_id": "large", "stream": "pay", "group_by": ["card"], "when": "amount > 100"}


def test_c12_1_an_event_rule_keeps_no_rows_however_many_events_come() -> None:
    harness = Harness(STREAM)
    harness.rule(RULE)
    harness.rule({**RULE, "rule_id": "small", "when": "amount < 5", "suppress": "1 second"})
    for number in range(200):
        at = f"2026-03-01T10:{number // 60:02}:{number % 60:02}Z"
        harness.events([{"id": number, "at": at, "card": f"c{number}", "amount": 3 * number}])
    assert len(harness.alerts) == 2 + 166
    assert harness.state_rows() == 0


def test_c12_1_it_is_in_force_at_once_as_there_is_nothing_to_warm() -> None:
    rule = compile_rule(RULE, STREAM)
    assert (rule.features, dict(rule.needs), rule.memory) == ((), {}, "")


@pytest.mark.parametrize(
    ("keys", "condition"),
    [
        ({}, "amount > 100"),
        ({"where": "card = 'a' or card = 'b'"}, "(card = 'a' or card = 'b') and amount > 100"),
        # Only the shards know the lists.
        ({"where": "in_list(card, 'bad')"}, "amount > 100"),
        ({"when": "amount > 100 -- large", "where": "card = 'a' /* or b */"}, "card = 'a' and amount > 100"),
    ],
)
def test_c12_1_only_events_that_alert_are_sent_to_shards(keys: dict[str, str], condition: str) -> None:
    (want,) = find_coverage([compile_rule({**RULE, **keys}, STREAM)]).wants
    assert want == (("id",), condition)


def test_c12_1_events_go_to_all_shards_unless_something_is_kept_of_their_keys() -> None:
    rules = [{**RULE, "suppress": "1 hour"}, {**RULE, "group_by": []}, {**RULE, "group_by": [], "suppress": "1 hour"}]
    coverages = [find_coverage([compile_rule(each, STREAM)]) for each in rules]
    assert [each.grouping_sets for each in coverages] == [[("card",)], [("id",)], [()]]


def test_a_condition_asks_lists_as_the_event_arrives() -> None:
    harness = Harness(STREAM)
    harness.rule({**RULE, "when": "amount > 100 and in_list(card, 'bad')"})
    row = {"at": "2026-03-01T10:00:00Z", "card": "a", "amount": 101}
    harness.events([{**row, "id": 1}])
    harness.lists({"bad": ["a"]})
    harness.events([{**row, "id": 2}, {**row, "id": 3, "card": "b"}])
    assert [alert.event_id for alert in harness.alerts] == ["2"]


def test_it_is_said_in_words() -> None:
    words = describe_rule(compile_rule({**RULE, "where": "card <> 'x'", "suppress": "1 hour"}, STREAM))
    assert words == (
        "Raised for each event where amount > 100; only events where card <> 'x'; further alerts of a key within 1 hour "
        "of one are suppressed."
    )

"""A rule's own tests cannot pass for the wrong reason, and what is wrong with them is told all at once."""

from __future__ import annotations

from typing import Any

import pytest

from lookback.core.errors import RuleError
from lookback.core.streams.declaration import Stream
from lookback.testing.rule_tests import check_rule

STREAM = Stream.from_dict(
    {
        "stream": "orders",
        "event_id": "id",
        "event_time": "at",
        "fields": {
            "id": "bigint", "at": "timestamp", "customer": "int", "amount": "decimal(18,2)", "qty": "int",
            "paid": "boolean",
        },
    }
)  # fmt: skip
RULE = {
    "rule_id": "much", "stream": "orders", "group_by": ["customer"], "window": "1 hour",
    "measures": {"total": "sum(amount)", "n": "count(*)"}, "when": "total >= 100",
}  # fmt: skip
TAKE = {
    "rule_id": "two", "stream": "orders", "group_by": ["customer"],
    "sequence": {"within": "1 hour", "steps": [{"name": "a", "where": "amount / qty > 1"}, {"name": "b", "where": "paid"}]},
}  # fmt: skip


def event(number: int, **more: Any) -> dict[str, Any]:
    return {"id": number, "at": f"2026-03-01T10:0{number}:00Z", "customer": 7, "amount": 60, **more}


def problems(rule: dict[str, Any], *tests: dict[str, Any]) -> list[str]:
    """Lists the problems of a rule with these tests; empty if they pass."""
    named = [{"name": f"t{number}", **test} for number, test in enumerate(tests)]
    try:
        check_rule({**rule, "tests": named}, {"orders": STREAM})
    except RuleError as error:
        return [str(problem) for problem in error.problems]
    return []


def test_what_is_right_passes_numbers_and_times_by_value():
    alert = {
        "event_id": 2, "measures": {"total": "120", "n": 2.0}, "key": {"customer": 7}, "verdict": "raised",
        "event_time": "2026-03-01 11:02:00+01:00", "window_complete": True, "evidence": [],
    }  # fmt: skip
    assert problems(RULE, {"events": [event(1), event(2)], "alerts": [alert]}) == []


def test_a_misspelt_field_of_an_event_is_named_with_its_row():
    events = [event(1), {**event(2), "amuont": 1000}]
    assert problems(RULE, {"events": events, "alerts": [{"event_id": 2}]}) == [
        "t0: row 2: stream 'orders' has no field 'amuont'; did you mean 'amount'? (tests[0])"
    ]


def test_arrival_and_committed_at_are_no_fields_and_no_mistakes():
    events = [event(1, arrival=1, committed_at="2026-03-01T10:05:00Z")]
    assert problems(RULE, {"events": events}) == []


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"when": "total / (n - n) > 1"}, "when, or in the value of a measure"),
        ({"where": "10 / (qty - qty) > 1"}, "where"),
        ({"group_by": [{"part": "10 div (qty - qty)"}]}, "group_by.part"),
        ({"measures": {"total": "sum(amount / (qty - 1))", "n": "count(*)"}}, "measures.total"),
    ],
)
def test_an_expression_that_fails_is_no_near_miss(change: dict[str, Any], place: str):
    found = problems({**RULE, **change}, {"events": [event(1, qty=1)], "alerts": []})
    assert found == [
        (
            "t0: 1 event could not be judged (overflow, division by zero or a cast); the first is 1; "
            f"the error is in {place}; guard it, such as by nullif(x, 0) under a division, or by try_cast (tests[0])"
        )
    ]


def test_a_step_that_fails_is_no_near_miss():
    found = problems(TAKE, {"events": [event(1, qty=0), event(2, qty=1, paid=True)], "alerts": []})
    assert len(found) == 1
    assert "the error is in step 'a'; guard it" in found[0]


def test_an_expected_measure_must_be_one_of_the_rule():
    test = {"events": [event(1), event(2)], "alerts": [{"event_id": 2, "measures": {"totl": None}}]}
    assert problems(RULE, test) == ["t0: alert 1: the rule has no measure 'totl'; did you mean 'total'? (tests[0])"]
    alerts = [{"event_id": 2, "measures": {"n": 2}}]
    assert problems(TAKE, {"events": [event(1, qty=1), event(2, qty=1, paid=True)], "alerts": alerts}) == [
        "t0: alert 1: the rule has no measure 'n'; leave it out, it has none (tests[0])"
    ]


@pytest.mark.parametrize("where", ["alerts", "near miss"])
def test_names_are_checked_even_where_no_alert_comes(where: str):
    events = [event(1), event(2)] if where == "alerts" else []
    found = problems(RULE, {"events": events, "alerts": [{"event": 2, "key": {"card": 1}}]})
    assert found == [
        "t0: alert 1: an alert has no 'event'; did you mean 'event_id'? (tests[0])",
        "t0: alert 1: the rule has no field of group_by 'card'; known: customer (tests[0])",
    ]


@pytest.mark.parametrize("odd", [[1], 5, "total", [{"total": 1}], True, 1.5, [[]]])
@pytest.mark.parametrize("name", ["measures", "key", "evidence", "event_time", "message", "window_complete"])
def test_an_odd_value_is_a_problem_of_the_rule_and_no_other_exception(name: str, odd: Any):
    if (name, odd) == ("window_complete", True):
        return
    found = problems(RULE, {"events": [event(1), event(2)], "alerts": [{name: odd}]})
    assert len(found) == 1
    assert found[0].startswith("t0: alert 1: ")


@pytest.mark.parametrize("odd", [[1], {"a": 1}, "x", "", float("nan"), True, 10**30])
@pytest.mark.parametrize("name", ["id", "at", "amount", "arrival", "committed_at"])
def test_an_odd_cell_is_a_problem_of_the_rule_and_no_other_exception(name: str, odd: Any):
    problems(RULE, {"events": [{**event(1), name: odd}], "alerts": []})


def test_all_that_is_wrong_is_told_at_once_with_rows_counted_from_one():
    first = {"events": [event(1, amount="12,5"), {**event(2), "amuont": 1}, {"id": 3}], "alerts": [{"evnt_id": 1}]}
    second = {"events": [event(1, amount=200)], "alerts": []}
    found = problems(RULE, first, second)
    assert [text.partition(";")[0] for text in found[:1]] == ["t0: row 2: stream 'orders' has no field 'amuont'"]
    assert found[1].startswith("t0: row 1: amount must be decimal(18,2), got '12,5'")
    assert found[2:] == [
        "t0: row 3: at is missing or NULL; every event needs one (tests[0])",
        "t0: alert 1: an alert has no 'evnt_id'; did you mean 'event_id'? (tests[0])",
        "t1: alerts expected: 0, found: 1 (1) (tests[1])",
    ]

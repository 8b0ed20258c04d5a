"""Entity, score and change of an alert's rows: whom it is about, what it weighs, whether it begins or ceases to stand (contract 11.6)."""

from __future__ import annotations

from typing import Any

import pytest

import lookback

STREAM: dict[str, Any] = {
    "stream": "uses",
    "event_id": "id",
    "event_time": "at",
    "fields": {"id": "bigint", "at": "timestamp", "Card": "string", "shop": "int", "amount": "int"},
    "max_out_of_orderness": "0 seconds",
}
MINUTE = 60_000_000
BEGINS, GOES_ON, CEASES = 1, 0, -1


def use(at: int, minute: float, card: str | None = "x", amount: int = 1) -> dict[str, Any]:
    return {"id": at, "at": round(minute * MINUTE), "Card": card, "shop": 7, "amount": amount}


def run(document: dict[str, Any], *events: dict[str, Any]) -> list[tuple[int, str, int]]:
    """The rows that events raise: revision, verdict, change."""
    harness = lookback.Harness(STREAM)
    harness.rule({"rule_id": "r", "stream": "uses", "group_by": ["card"], **document})
    for event in events:
        harness.events([event])
    return [(alert.revision, alert.verdict, alert.change) for alert in harness.alerts]


COUNTED = {"measures": {"n": "count(*)"}, "when": "n >= 2"}


def test_c11_6_an_alert_has_the_entity_of_its_key_and_the_score_of_its_rule() -> None:
    harness = lookback.Harness(STREAM)
    base = {
        "stream": "uses",
        "group_by": ["card", "Shop"],
        "window": "1 hour",
        "measures": {"n": "count(*)"},
        "when": "n >= 1",
    }
    # A field is named as the stream writes it, and its value as the column `key` has it.
    harness.rule({**base, "rule_id": "a", "entity": "CARD", "score": 7})
    harness.rule({**base, "rule_id": "b", "entity": "shop", "severity": "critical"})
    harness.rule({**base, "rule_id": "c", "severity": "low"})
    harness.rule({**base, "rule_id": "d", "entity": "card", "score": 0}, status="shadow")
    harness.events([use(1, 1), use(2, 2, None)])
    rows = [(each.rule_id, each.entities, each.score) for each in harness.alerts]
    assert rows == [
        ("a", {"Card": "x"}, 7), ("b", {"shop": "7"}, 100), ("c", {}, 10), ("d", {"Card": "x"}, 0),
        ("a", {"Card": None}, 7), ("b", {"shop": "7"}, 100), ("c", {}, 10), ("d", {"Card": None}, 0),
    ]  # fmt: skip
    assert {each.change for each in harness.alerts} == {BEGINS}


@pytest.mark.parametrize(
    ("severity", "score"), [("info", 0), ("low", 10), ("medium", 25), ("high", 50), ("critical", 100), (None, 25)]
)
def test_c11_6_the_score_is_by_severity_by_default(severity: str | None, score: int) -> None:
    document = {"rule_id": "r", "stream": "uses", "window": "1 hour", **COUNTED}
    document |= {} if severity is None else {"severity": severity}
    result = lookback.replay([document], [use(1, 1), use(2, 2)], STREAM)
    assert [alert.score for alert in result.alerts] == [score]


@pytest.mark.parametrize(
    ("changes", "queue"),
    [
        ({}, True), ({"queue": False}, False), ({"severity": "low"}, True), ({"severity": "info"}, False),
        ({"severity": "info", "queue": True}, True), ({"severity": "critical", "queue": False}, False),
    ],
)  # fmt: skip
def test_an_alert_says_whether_it_waits_for_a_person_by_the_version_that_raised_it(
    changes: dict[str, Any], queue: bool
) -> None:
    harness = lookback.Harness(STREAM)
    document = {"rule_id": "r", "stream": "uses", "window": "1 hour", **COUNTED}
    harness.rule({**document, "queue": not queue})
    harness.events([use(1, 1), use(2, 2)])
    harness.rule({**document, **changes})
    harness.events([use(3, 3)])
    assert [alert.queue for alert in harness.alerts] == [not queue, queue]


LOOKBACK = {"window": "1 hour", **COUNTED}
STEPS = [{"name": "first", "where": "amount = 1"}, {"name": "second", "where": "amount = 2"}]
SILENT = {"name": "silent", "absent": "amount = 2", "within": "1 minute"}


@pytest.mark.parametrize(
    ("document", "about"),
    [
        # Of an event and a lookback it is the event judged, of a sequence the last one, of an absence that which began the wait.
        ({"where": "amount = 2"}, [("Card", "x"), ("amount", "2")]),
        ({**LOOKBACK, "group_by": []}, [("Card", "x"), ("amount", "2")]),
        ({**LOOKBACK, "late": "revise"}, [("Card", "x"), ("amount", "2")]),
        ({"sequence": {"within": "1 hour", "steps": STEPS}}, [("Card", "x"), ("amount", "2")]),
        ({"sequence": {"within": "1 hour", "steps": [STEPS[0], SILENT]}}, [("Card", "x"), ("amount", "1")]),
    ],
)
def test_c12_2_an_alert_has_its_entities_in_order_of_its_key_or_of_its_event(
    document: dict[str, Any], about: list[tuple[str, str]]
) -> None:
    document = {"rule_id": "r", "stream": "uses", "group_by": ["card"], "entities": ["CARD", "amount"], **document}
    result = lookback.replay([document], [use(1, 1), use(2, 4, amount=2), use(3, 90, "y", 7)], STREAM)
    assert [list(alert.entities.items()) for alert in result.alerts] == [about]
    assert len({alert.alert_id for alert in result.alerts}) == 1


def test_c12_2_a_retraction_is_about_the_entities_of_its_alert() -> None:
    late = {**STREAM, "allowed_lateness": "1 hour"}
    document = {
        "rule_id": "r", "stream": "uses", "window": "10 minutes", "measures": {"n": "count(*)"}, "when": "n = 1",
        "late": "revise", "entities": ["amount", "shop"],
    }  # fmt: skip
    rows = [{**use(1, 9, amount=5), "arrival": 1}, {**use(2, 5), "arrival": 2}]
    found = [(each.verdict, each.entities) for each in lookback.replay([document], rows, late).alerts]
    first, second = {"amount": "5", "shop": "7"}, {"amount": "1", "shop": "7"}
    assert found == [("raised", first), ("retracted", first), ("raised", second)]
    wait = {"within": "1 hour", "steps": [STEPS[0], SILENT]}
    document = {"rule_id": "r", "stream": "uses", "sequence": wait, "entities": ["id", "amount"]}
    rows = [use(1, 1), use(2, 7, "y", 3), use(3, 1.5, amount=2)]
    found = [(each.verdict, each.entities) for each in lookback.replay([document], rows, late).alerts]
    assert found == [(verdict, {"id": "1", "amount": "1"}) for verdict in ("raised", "retracted")]


def test_c12_2_one_entity_means_a_list_of_one() -> None:
    documents = [{"rule_id": "r", "stream": "uses", **LOOKBACK, "group_by": ["card"]} for _ in range(2)]
    documents[0]["entity"], documents[1]["entities"] = "card", ["card"]
    events = [use(1, 1), use(2, 2)]
    one, other = (lookback.replay([each], events, STREAM).alerts for each in documents)
    assert one == other
    assert one[0].entities == {"Card": "x"}


def test_c12_2_an_alert_has_the_tags_of_the_version_that_raised_it() -> None:
    harness = lookback.Harness(STREAM)
    document = {"rule_id": "r", "stream": "uses", "window": "1 hour", **COUNTED}
    harness.rule({**document, "tags": ["attack.T1110", "a"]})
    harness.events([use(1, 1), use(2, 2)])
    harness.rule({**document, "tags": ["b"]})
    harness.events([use(3, 3)])
    harness.rule(document)
    harness.events([use(4, 4)])
    assert [list(alert.tags) for alert in harness.alerts] == [["attack.T1110", "a"], ["b"], []]


def test_c11_6_each_alert_of_a_lookback_begins_also_a_suppressed_one() -> None:
    document = {"window": "1 hour", **COUNTED, "suppress": "1 hour"}
    assert run(document, use(1, 1), use(2, 2), use(3, 3)) == [(0, "raised", BEGINS), (0, "suppressed", BEGINS)]


def test_c11_6_a_revision_with_other_measures_goes_on_and_one_that_holds_again_begins_again() -> None:
    document = {
        "window": {"tumbling": "1 hour"}, "early": True, "measures": {"n": "count(*)", "total": "sum(amount)"},
        "when": "n >= 2 and total < 10",
    }  # fmt: skip
    rows = run(document, use(1, 1), use(2, 2), use(3, 3), use(4, 4, amount=20), use(5, 5, amount=-20), use(6, 6))
    assert rows == [
        (0, "raised", BEGINS), (1, "raised", GOES_ON), (2, "retracted", CEASES), (3, "raised", BEGINS), (4, "raised", GOES_ON),
    ]  # fmt: skip


def test_c11_6_what_was_suppressed_begins_and_ceases_like_what_was_raised() -> None:
    document = {
        "window": {"tumbling": "10 minutes"}, "early": True, "measures": {"total": "sum(amount)"}, "when": "total >= 2",
        "suppress": "1 hour",
    }  # fmt: skip
    rows = run(document, use(1, 1, amount=2), use(2, 11, amount=2), use(3, 12, amount=-1), use(4, 13, amount=1))
    assert rows == [
        (0, "raised", BEGINS), (0, "suppressed", BEGINS), (1, "retracted", CEASES), (2, "suppressed", BEGINS),
    ]  # fmt: skip


def test_c11_6_a_late_event_revises_and_retracts() -> None:
    stream = {**STREAM, "allowed_lateness": "1 hour"}
    document = {
        "rule_id": "r", "stream": "uses", "group_by": ["card"], "window": "10 minutes", "measures": {"n": "count(*)"},
        "when": "n = 1", "late": "revise",
    }  # fmt: skip
    result = lookback.replay([document], [{**use(1, 9), "arrival": 1}, {**use(2, 5), "arrival": 2}], stream)
    assert [(each.event_id, each.verdict, each.change) for each in result.alerts] == [
        ("1", "raised", BEGINS), ("1", "retracted", CEASES), ("2", "raised", BEGINS),
    ]  # fmt: skip


def test_c11_6_a_session_that_merges_into_another_ceases() -> None:
    document = {"window": {"session": "10 minutes"}, "early": True, **COUNTED}
    harness = lookback.Harness({**STREAM, "max_out_of_orderness": "1 hour"})
    harness.rule({"rule_id": "r", "stream": "uses", "group_by": ["card"], **document})
    for event in (use(1, 1), use(2, 2), use(3, 20), use(4, 21), use(5, 11)):
        harness.events([event])
    by_start: dict[int, list[int]] = {}
    for alert in harness.alerts:
        by_start.setdefault(alert.window_start.minute, []).append(alert.change)
    assert by_start == {1: [BEGINS, GOES_ON], 20: [BEGINS, CEASES]}


def test_c11_6_an_absence_begins_when_it_is_due_and_ceases_when_the_event_comes_late() -> None:
    steps = [
        {"name": "first", "where": "amount = 1"},
        {"name": "second", "absent": "amount = 2", "within": "5 minutes"},
    ]
    document = {"sequence": {"within": "10 minutes", "steps": steps}}
    rows = run(document, use(1, 1), use(2, 7, "y", 3), use(3, 4, amount=2))
    assert rows == [(0, "raised", BEGINS), (1, "retracted", CEASES)]

"""A harness whose versions come into force with the history of their windows, as those of a stream do (11.1, 11.2)."""

from __future__ import annotations

from typing import Any

import pytest

import lookback

STREAM = {
    "stream": "logins", "event_id": "id", "event_time": "at",
    "fields": {"id": "string", "at": "timestamp", "user": "string", "outcome": "string", "n": "int"},
    "max_out_of_orderness": "2 minutes", "allowed_lateness": "30 minutes", "max_session": "40 minutes",
}  # fmt: skip
RULE = {"rule_id": "r", "stream": "logins", "group_by": ["user"], "severity": "low", "message": "{window_complete}"}
COUNT = {**RULE, "window": "20 minutes", "measures": {"n_": "count(*)"}, "when": "n_ >= 2"}
SESSION = {**COUNT, "window": {"session": "5 minutes"}}
STEPS = [
    {"name": "failures", "where": "outcome = 'FAIL'", "at_least": 2},
    {"name": "success", "where": "outcome = 'OK'"},
]
SEQUENCE = {**RULE, "sequence": {"within": "15 minutes", "steps": STEPS}}
FIXED = {**RULE, "sequence": {"within": "15 minutes", "steps": STEPS, "expiry": "fixed"}}
ABSENT = {
    **RULE,
    "sequence": {
        "within": "9 minutes",
        "steps": [STEPS[0], {"name": "quiet", "absent": "outcome = 'OK'", "within": "6 minutes"}],
    },
}
# Every third event is late, two of them later than a rule takes them.
EVENTS = [
    {
        "id": f"e{at}", "at": f"2026-03-01T10:{max(0, at - (7 * (at % 3 == 0)) - 38 * (at % 20 == 19)):02d}:00Z", "arrival": at,
        "user": "ab"[at % 5 == 0], "outcome": "OK" if at % 4 == 0 else "FAIL", "n": at % 3,
    }
    for at in range(1, 50)
]  # fmt: skip


def listed(alerts: Any, after: int) -> list[tuple[Any, ...]]:
    return [
        (each.alert_id, each.revision, each.verdict, each.evidence, each.message, each.arrival)
        for each in alerts if each.arrival > after
    ]  # fmt: skip


@pytest.mark.parametrize("document", [COUNT, SESSION, SEQUENCE, FIXED, ABSENT, {**SEQUENCE, "reset_on_alert": True}])
def test_a_version_has_the_history_of_what_the_harness_was_given(document: dict[str, Any]) -> None:
    """11.1: its alerts are those of a replay of the row with C and A; a harness that is not asked starts cold."""
    begun = 23
    found = []
    for warm_start in (True, False):
        harness = lookback.Harness(STREAM, warm_start=warm_start)
        harness.events(EVENTS[:begun])
        harness.rule(document)
        harness.events(EVENTS[begun:])
        assert {each.action for each in harness.errors} <= {"session_closed"}
        found.append(listed(harness.alerts, 0))
    row = {"rule_id": "r", "version": 1, "status": "active", "document": document}
    replayed = lookback.replay([(row, begun, begun)], EVENTS, STREAM)
    assert found[0] == listed(replayed.alerts, 0)
    assert {message for *_, message, _ in found[0]} == {"true"}
    assert found[1] == listed(lookback.replay([(row, begun)], EVENTS, STREAM).alerts, 0)
    assert found[0] != found[1]


def test_a_replay_takes_sequences_and_sessions_with_two_arrivals() -> None:
    """11.1: (row, C, A) of every kind; what came before C and until A counts, and no alert is written before A."""
    for document in (SESSION, SEQUENCE, FIXED, ABSENT):
        row = {"rule_id": "r", "version": 1, "status": "active", "document": document}
        alerts = lookback.replay([(row, 10, 30)], EVENTS, STREAM).alerts
        assert alerts
        assert min(each.arrival for each in alerts) > 30


def test_commands_and_the_watermark_are_part_of_the_history() -> None:
    harness = lookback.Harness(STREAM, "manual", warm_start=True)
    harness.events(EVENTS[:3])
    harness.clear_state()
    harness.events(EVENTS[3:6])
    harness.watermark("2026-03-01T09:50:00Z")
    harness.rule({**COUNT, "group_by": []})
    harness.events(EVENTS[6:7])
    (alert,) = harness.alerts
    # e4, e5 and e7 lie in its window and came after the command; e6 is at 10:00 as well.
    assert alert.measures["n_"] == 4

"""Contract section 3, line by line, at the exact edges. Times in the axes are seconds."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

import lookback
from lookback.core.values.times import parse_time

SECOND = 1_000_000
STREAM = {
    "stream": "tx",
    "event_id": "id",
    "event_time": "at",
    "fields": {"id": "string", "at": "timestamp", "c": "int", "a": "decimal(10,2)"},
    "max_out_of_orderness": "10 seconds",
    "allowed_lateness": "20 seconds",
}


def rule(**more: Any) -> dict[str, Any]:
    return {
        "rule_id": "r",
        "stream": "tx",
        "group_by": ["c"],
        "window": "5 seconds",
        "measures": {"n": "count(*)"},
        "when": "n >= 1",
        **more,
    }


def event(name: str, second: float, **more: Any) -> dict[str, Any]:
    return {"id": name, "at": round(second * SECOND), "c": 1, "a": 1, **more}


def run(document: dict[str, Any], events: list[dict[str, Any]], **stream: Any) -> lookback.Harness:
    harness = lookback.Harness({**STREAM, **stream})
    harness.rule(document)
    harness.events(events)
    return harness


def counts(harness: lookback.Harness) -> dict[str | None, Any]:
    return {alert.event_id: alert.measures["n"] for alert in harness.alerts}


def late(harness: lookback.Harness) -> list[tuple[str, int, str]]:
    return [(row.event_id, row.late_by_us, row.action) for row in harness.late_events]


def test_c3_1_arrival_is_commit_then_time_then_position_then_id_by_bytes() -> None:
    # One commit; "é" is C3 A9 in UTF-8 and comes after "z" (7A), the later time after both.
    events = [event(name, second, arrival=1) for name, second in [("é", 1), ("z", 1), ("a", 2), ("Z", 1)]]
    harness = run(rule(), events)
    assert [(alert.event_id, alert.measures["n"]) for alert in harness.alerts] == [
        ("é", 1),
        ("z", 2),
        ("Z", 3),
        ("a", 4),
    ]
    by_id = ["Z", "z", "é", "a"]
    unplaced = [{**row, "position": None} for row in events]
    assert [alert.event_id for alert in run(rule(), unplaced).alerts] == by_id
    assert [alert.event_id for alert in run(rule(), events, table="/lake/tx").alerts] == by_id


def test_c3_1_alerts_come_in_order_of_arrival_over_all_rules() -> None:
    harness = lookback.Harness(STREAM)
    for rule_id in ("b", "a"):
        harness.rule(rule(rule_id=rule_id))
    harness.events([event("x", 2), event("y", 1)])
    assert [(alert.event_id, alert.rule_id) for alert in harness.alerts] == [
        ("x", "a"),
        ("x", "b"),
        ("y", "a"),
        ("y", "b"),
    ]


def test_c3_1_integer_ids_compare_as_numbers() -> None:
    fields = {**STREAM["fields"], "id": "bigint"}  # type: ignore[dict-item]
    harness = run(rule(), [event(name, 1, arrival=1) for name in ("10", "9")], fields=fields, table="/lake/tx")
    assert [alert.event_id for alert in harness.alerts] == ["9", "10"]


def test_c3_2_events_of_one_commit_are_judged_against_the_watermark_before_it() -> None:
    #  commit 1: 0 and 100   -> none is late: before it there is no watermark
    #  commit 2: 89.999999   -> W = 100 - 10 = 90: late by 1 microsecond;  90 itself is not late
    events = [
        event("a", 0, arrival=1),
        event("b", 100, arrival=1),
        event("c", 89.999999, arrival=2),
        event("d", 90, arrival=2),
    ]
    assert late(run(rule(), events)) == [("c", 1, "evaluated")]


@pytest.mark.parametrize(("second", "action"), [(70, "evaluated"), (69.999999, "discarded")])
def test_c3_3_lookback_takes_an_event_at_the_watermark_less_allowed_lateness(second: float, action: str) -> None:
    harness = run(rule(), [event("a", 100), event("b", second)])
    assert late(harness) == [("b", round((90 - second) * SECOND), action)]
    assert ("b" in counts(harness)) == (action == "evaluated")


def test_c3_3_what_a_rule_did_not_take_never_counts_for_it() -> None:
    document = rule(window="100 seconds")
    harness = run(document, [event("a", 100), event("b", 60), event("c", 101)])
    assert counts(harness) == {"a": 1, "c": 2}


def test_c3_3_an_event_that_no_rule_wants_is_in_no_list() -> None:
    assert late(run(rule(where="a > 5"), [event("a", 100, a=9), event("b", 1, a=5)])) == []


def test_c3_3_a_rule_has_its_own_allowed_lateness() -> None:
    harness = lookback.Harness(STREAM)
    harness.rule(rule(rule_id="strict", allowed_lateness="0 seconds"))
    harness.rule(rule(rule_id="lax"))
    harness.events([event("a", 100), event("b", 80)])
    assert [(a.rule_id, a.event_id) for a in harness.alerts if a.event_id == "b"] == [("lax", "b")]
    assert late(harness) == [("b", 10 * SECOND, "evaluated")]


def test_c3_4_both_ends_of_the_window_are_included() -> None:
    #   0.000000      0.000001           5.000000   5.000001
    #   |--------------------------------|            [t - 5, t]
    #                 |-------------------------------|
    document = rule()
    assert counts(run(document, [event("a", 0), event("b", 5)])) == {"a": 1, "b": 2}
    assert counts(run(document, [event("a", 0), event("b", 5.000001)])) == {"a": 1, "b": 1}


def test_c3_4_a_tie_that_arrives_later_is_not_in_the_earlier_ones_window() -> None:
    assert counts(run(rule(), [event("b", 1), event("a", 1)])) == {"b": 1, "a": 2}


def test_c3_4_delay_leaves_out_the_event_itself() -> None:
    #   [t - d - w, t - d] = [0, 5] for t = 8, w = 5, d = 3
    document = rule(window={"lookback": "5 seconds", "delay": "3 seconds"}, when="n >= 0")
    events = [event("a", -0.000001), event("b", 0), event("c", 5), event("d", 5.000001), event("e", 8)]
    assert counts(run(document, events))["e"] == 2
    alert = run(document, events).alerts[-1]
    assert (alert.window_start.timestamp(), alert.window_end.timestamp()) == (0, 5)


def test_c3_4_an_event_out_of_order_sees_what_has_arrived() -> None:
    # Arrival: 3, 1, 2. The event at 2 sees 1 and itself, not the 3; the 3 was judged before either.
    assert counts(run(rule(), [event("c", 3), event("a", 1), event("b", 2)])) == {"c": 1, "a": 1, "b": 2}


def test_c3_6_record_counts_a_late_event_without_judging_it() -> None:
    harness = run(rule(window="60 seconds", late="record"), [event("a", 100), event("b", 80), event("c", 101)])
    assert counts(harness) == {"a": 1, "c": 3}
    assert late(harness) == [("b", 10 * SECOND, "recorded")]


def test_c3_7_effective_bounds_say_what_triggers_not_what_counts() -> None:
    document = rule(effective_from="1970-01-01T00:00:02Z", effective_until="1970-01-01T00:00:04Z")
    assert counts(run(document, [event(str(at), at) for at in range(5)])) == {"2": 3, "3": 4}


def test_c3_8_a_new_feature_starts_empty_and_says_so() -> None:
    harness = run(rule(), [event("a", 1)])
    harness.rule(rule(rule_id="new", measures={"n": "count(a)"}, when="true"))
    harness.events([event("b", 2), event("c", 7)])
    found = {(a.rule_id, a.event_id): (a.measures["n"], a.window_complete) for a in harness.alerts}
    # The new rule's window of b begins before 1, the highest event time at its start; that of c, at 2, does not.
    assert found["r", "b"] == (2, True)
    assert found["new", "b"] == (1, False)
    assert found["new", "c"] == (2, True)


def test_c3_8_a_window_is_complete_from_the_first_event_of_the_stream_on() -> None:
    """It says that no event is missing, and not that the stream is as old as the window."""
    harness = run(rule(window="365 days"), [event("a", 1), event("b", 2)])
    assert [(a.event_id, a.measures["n"], a.window_complete) for a in harness.alerts] == [
        ("a", 1, True),
        ("b", 2, True),
    ]
    # effective_from leaves out the windows that begin before the stream does.
    harness = run(
        rule(window="3 seconds", effective_from="1970-01-01T00:00:04Z"), [event(str(at), at) for at in (1, 3, 4)]
    )
    assert [(a.event_id, a.measures["n"]) for a in harness.alerts] == [("4", 3)]


def test_c3_8_a_window_that_is_widened_fills_up_anew() -> None:
    harness = run(rule(allowed_lateness="0 seconds"), [event("a", 0), event("b", 20)])
    # W = 10, floor = 10 - 5 = 5: the event at 0 is gone for good.
    assert harness.state_rows() == 1
    harness.rule(rule(allowed_lateness="0 seconds", window="30 seconds"))
    harness.events([event("c", 21), event("d", 36)])
    found = {a.event_id: (a.measures["n"], a.window_complete) for a in harness.alerts if a.rule_version == 2}
    assert found == {"c": (2, False), "d": (3, True)}


def test_c3_8_equal_features_share_state_over_versions() -> None:
    harness = run(rule(), [event("a", 1)])
    harness.rule(rule(when="n >= 2"))
    harness.events([event("b", 2)])
    assert [(a.event_id, a.rule_version, a.measures["n"]) for a in harness.alerts] == [("a", 1, 1), ("b", 2, 2)]


def test_c3_8_an_unused_feature_is_dropped_after_the_next_commit() -> None:
    harness = run(rule(), [event("a", 1)])
    harness.rule(rule(), status="retired")
    assert harness.state_rows() == 1
    harness.events([event("b", 2)])
    assert harness.state_rows() == 0


def test_c4_null_is_a_key_of_its_own() -> None:
    assert counts(run(rule(), [event("a", 1, c=None), event("b", 2, c=0), event("c", 3, c=None)])) == {
        "a": 1,
        "b": 1,
        "c": 2,
    }


def test_c4_suppress_counts_from_the_last_raised_alert() -> None:
    harness = run(rule(suppress="10 seconds"), [event(str(at), at) for at in (0, 5, 10, 10.000001, 20)])
    verdicts = [alert.verdict for alert in harness.alerts]
    # 10 is still within [0, 10]; a suppressed alert starts no new span.
    assert verdicts == ["raised", "suppressed", "suppressed", "raised", "suppressed"]


def test_c4_alert_id_is_sha256_of_canonical_json() -> None:
    (alert,) = run(rule(group_by=["c", "a"]), [event("é", 1)]).alerts
    text = '["r",1,{"a":"1.00","c":"1"},"é"]'
    assert alert.alert_id == hashlib.sha256(text.encode()).hexdigest()[:32]


def test_c4_an_error_while_judging_is_no_verdict_and_is_logged() -> None:
    document = rule(measures={"n": "count(*)", "per": "sum(a)"}, when="10 / (n - 2) > 0", window="60 seconds")
    harness = run(document, [event("a", 1), event("b", 2), event("c", 3)])
    assert counts(harness) == {"c": 3}
    assert [(row.rule_id, row.action) for row in harness.errors] == [("r", "failed")]
    assert "the first is b" in harness.errors[0].message


def test_c4_an_error_in_a_filter_leaves_the_event_out_of_that_measure() -> None:
    document = rule(measures={"n": "count(*)", "m": "count(*) filter (where 1 / a > 0)"}, when="true")
    harness = run(document, [event("a", 1, a=0), event("b", 2)])
    assert [(a.event_id, a.measures["n"], a.measures["m"]) for a in harness.alerts] == [("b", 2, 1)]


def test_c6_manual_watermark_moves_only_by_hand() -> None:
    harness = lookback.Harness(STREAM, watermark="manual")
    harness.rule(rule())
    harness.events([event("a", 1000), event("b", 1)])
    assert late(harness) == []
    harness.watermark("1970-01-01T00:20:00Z")
    harness.events([event("c", 1180), event("d", 1179)])
    assert late(harness) == [("c", 20 * SECOND, "evaluated"), ("d", 21 * SECOND, "discarded")]


def test_c6_committed_at_checks_max_future() -> None:
    events = [event("a", 0, committed_at=0), event("b", 3600, committed_at=0), event("c", 3600.000001, committed_at=0)]
    harness = run(rule(), events)
    assert counts(harness) == {"a": 1, "b": 1}
    assert late(harness) == [("c", -3600 * SECOND - 1, "discarded")]


@pytest.mark.parametrize("is_grouped", [False, True])
def test_without_committed_at_an_event_beyond_max_future_is_discarded_as_in_the_stream(is_grouped: bool) -> None:
    far = parse_time("2099-01-01T00:00:00Z") / SECOND
    events = [event("a", 0), event("b", far), event("c", 1), event("d", far), event("e", 2)]
    if is_grouped:
        events = [row | {"arrival": 1 + at // 3} for at, row in enumerate(events)]
    harness = run(rule(), events[:3])
    harness.events(events[3:])
    for found in (harness, lookback.replay([rule()], events, STREAM)):
        assert [(alert.event_id, alert.measures["n"]) for alert in found.alerts] == [("a", 1), ("c", 2), ("e", 3)]
        assert [(row.event_id, row.action) for row in found.late_events] == [("b", "discarded"), ("d", "discarded")]
        assert all(row.late_by_us < -70 * 365 * 86_400 * SECOND for row in found.late_events)


def test_events_that_are_all_in_the_future_are_judged_on_their_own_time_line() -> None:
    far = parse_time("2099-01-01T00:00:00Z") / SECOND
    events = [event("a", far), event("b", far + 9_000)]
    assert counts(run(rule(), events)) == {"a": 1, "b": 1}
    assert [alert.event_id for alert in lookback.replay([rule()], events, STREAM).alerts] == ["a", "b"]


def test_c6_a_change_that_is_not_taken_raises_and_leaves_the_rule_as_it_was() -> None:
    harness = run(rule(), [event("a", 1)])
    for version, status, message in [(1, "active", "superseded"), (None, "ACTIVE", "status must be one of")]:
        with pytest.raises(lookback.RuleError, match=message):
            harness.rule(rule(), status=status, version=version)
    harness.events([event("b", 2)])
    assert counts(harness) == {"a": 1, "b": 2}
    assert harness.errors == []


def test_c6_replay_takes_rules_at_their_arrivals() -> None:
    rules = [
        ({"rule_id": "r", "version": 1, "status": "active", "document": rule()}, None),
        ({"rule_id": "r", "version": 2, "status": "paused", "document": rule()}, 1),
        ({"rule_id": "r", "version": 3, "status": "shadow", "document": rule()}, 2),
    ]
    result = lookback.replay(rules, [event(name, at) for at, name in enumerate("abc")], STREAM)
    assert [(a.event_id, a.rule_version, a.mode, a.measures["n"]) for a in result.alerts] == [
        ("a", 1, "active", 1), ("c", 3, "shadow", 3),
    ]  # fmt: skip
    assert list(result.alerts.to_pandas()["event_id"]) == ["a", "c"]

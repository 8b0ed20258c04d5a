"""Rules that write no alerts: they flag the events for which they would have raised them, or those that windows count."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from lookback.core.engine.batch import Batch
from lookback.core.engine.evaluation import Evaluator
from lookback.core.engine.output import Output
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.rulebook import RuleBook
from lookback.core.state.shard import ShardState
from lookback.core.streams.arrival import find_marks
from lookback.core.streams.eventrows import read_events
from lookback.core.streams.flagged import FlagPlace
from lookback.core.values.times import parse_time
from payins import MORE_RULES, RULES, START, STREAM, make_events, sequence, window

LIMITS = [1, 2, 3, 4]
RESET = next(each for each in MORE_RULES if each.get("reset_on_alert") and "window" in each)


def judge(
    documents: list[dict[str, Any]], flagging: dict[str, FlagPlace], status: str = "active",
    rows: list[dict[str, Any]] | None = None, **more: int,
) -> list[Output]:  # fmt: skip
    """Judges events in two batches."""
    evaluator, state = Evaluator(STREAM, flagging=flagging, **more), ShardState(RuleBook(STREAM, {STREAM.name: STREAM}))
    rows = make_events(300, seed=3) if rows is None else rows
    changes = [
        RuleChange("insert", at, each["rule_id"], 1, status, json.dumps(each)) for at, each in enumerate(documents)
    ]
    outputs = []
    for part in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
        events, _ = read_events(part, STREAM, 0)
        outputs.append(evaluator.process(state, Batch(events, None, find_marks(events, events.commits), changes)))
        changes = []
    return outputs


def test_c10_3_flagged_events_are_those_of_the_alerts() -> None:
    limited = [{**RULES[0], "rule_id": f"limit-{limit}", "when": f"n >= {limit}"} for limit in LIMITS]
    documents = [*limited, {**RESET, "rule_id": "reset"}, RULES[1]]
    places = {each["rule_id"]: FlagPlace(0, 70 * at) for at, each in enumerate(limited)} | {"reset": FlagPlace(1, 0)}
    written, flagged = judge(documents, {}), judge(documents, places)
    for plain, output in zip(written, flagged, strict=True):
        expected: dict[tuple[int, str], set[int]] = {}
        for alert in plain.alerts:
            if alert.rule_id in places:
                assert alert.verdict == "raised"
                place = places[alert.rule_id]
                expected.setdefault((place.group, alert.event_id or ""), set()).add(place.bit)
        found = {}
        for each in output.flagged:
            for at, event_id in enumerate(each.event_ids):
                bits = {
                    bit for bit in range(64 * each.bits.shape[1]) if each.bits[at, bit // 64] >> np.int64(bit % 64) & 1
                }
                found[each.group, event_id] = bits
        assert found == expected
        assert {group for group, _ in found} == {0, 1}
        assert [each for each in plain.alerts if each.rule_id not in places] == output.alerts
        assert (plain.failures, plain.late, plain.evaluated) == (output.failures, output.late, output.evaluated)


def test_c10_3_flagged_events_have_the_keys_of_the_alerts() -> None:
    document = {**RULES[0], "rule_id": "one", "when": "n >= 2"}
    (plain, _), (output, _) = judge([document], {}), judge([document], {"one": FlagPlace(0, 0)})
    (flagged,) = output.flagged
    expected = [(alert.event_id, dict(alert.key), alert.arrival) for alert in plain.alerts]
    assert list(zip(flagged.event_ids, map(dict, flagged.keys), flagged.arrivals.tolist(), strict=True)) == expected


@pytest.mark.parametrize(
    "kind",
    [{"tumbling": "1 minute"}, {"sliding": "2 minutes", "slide": "1 minute"}, {"session": "10 seconds"}],
    ids=lambda kind: next(iter(kind)),
)
@pytest.mark.parametrize("is_early", [False, True])
def test_c10_4_events_that_windows_note_are_those_that_each_counted_as_of_its_last_row(
    kind: dict[str, str], is_early: bool
) -> None:
    measures = {"n": "count(*) filter (where shop = 'a')", "most": "max(amount) filter (where shop = 'a')"}
    document = window("one", kind, measures=measures, when="n >= 1", early=is_early, message="", where="amount > 5")
    alerts = [alert for output in judge([document], {}) for alert in output.alerts]
    noted = judge([document], {"one": FlagPlace(0, 0)}, "paused")
    assert [alert for output in noted for alert in output.alerts] == []
    rows = list_noted(noted)
    last = {alert.alert_id: alert for alert in alerts}
    standing = [alert for alert in last.values() if alert.verdict == "raised"]
    assert len(standing) > 3
    assert not is_early or any(alert.revision for alert in standing)
    for alert in standing:
        start, end = parse_time(alert.window_start), parse_time(alert.window_end)
        counted = [
            time for key, time, arrival in rows if key == alert.key and start <= time < end and arrival <= alert.arrival
        ]
        assert len(counted) == alert.measures["n"]


def list_noted(outputs: list[Output]) -> list[tuple[dict[str, str | None], int, int]]:
    """Lists key, time and arrival of the events that were noted."""
    return [
        (dict(key), time, arrival)
        for output in outputs
        for each in output.flagged
        for key, time, arrival in zip(each.keys, each.times.tolist(), each.arrivals.tolist(), strict=True)
    ]


def test_c10_4_an_event_that_was_too_late_is_not_noted_though_a_session_goes_around_it_later() -> None:
    """A gap of 10 s, watermark 100: e comes too late; then y keeps a session open, which z begins before e.

    z84 e85    y92        100
    """
    base = {"customer": 1, "shop": "a", "amount": "9.00"}
    delay = STREAM.max_out_of_orderness // 1_000_000
    seconds = [("w", 100 + delay), ("e", 85), ("y", 92), ("z", 84), ("far", 1_000)]
    rows = [
        {**base, "id": name, "at": START + at * 1_000_000, "arrival": arrival}
        for arrival, (name, at) in enumerate(seconds, 1)
    ]
    document = window(
        "one",
        {"session": "10 seconds"},
        measures={"n": "count(*)"},
        when="n = 2",
        message="",
        allowed_lateness="0 seconds",
    )
    (alert,) = [alert for output in judge([document], {}, rows=rows) for alert in output.alerts]
    assert (parse_time(alert.window_start), alert.measures["n"]) == (START + 84_000_000, 2)
    noted = list_noted(judge([document], {"one": FlagPlace(0, 0)}, "paused", rows))
    assert [(time - START) // 1_000_000 for _, time, _ in noted] == [100 + delay, 92, 84, 1_000]


@pytest.mark.parametrize("absent", [False, True])
def test_c10_4_a_sequence_may_name_all_its_events(absent: bool) -> None:
    steps: list[dict[str, Any]] = [
        {"name": "any", "where": "true", "at_least": 2},
        {"name": "a", "where": "shop = 'a'"},
    ]
    steps += [{"name": "none", "absent": "amount > 60", "within": "20 seconds"}] if absent else []
    document = sequence("many", steps, group_by=[], message="")
    few, many = (
        [alert for output in judge([document], {}, max_evidence=most) for alert in output.alerts] for most in (5, 99)
    )
    assert [list(each.evidence) for each in few] == [list(each.evidence)[:5] for each in many]
    assert max(len(each.evidence) for each in many) > 5
    assert [each.alert_id for each in few] == [each.alert_id for each in many]

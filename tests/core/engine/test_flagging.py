"""Rules that write no alerts: they flag the very events for which they would have raised them (contract 10.3)."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from lookback.core.engine.evaluation import Batch, Evaluator, Output
from lookback.core.rules.rulebook import RuleBook, RuleChange
from lookback.core.state.shard import ShardState
from lookback.core.streams.arrival import find_marks
from lookback.core.streams.events import read_events
from lookback.core.streams.flagged import FlagPlace
from payins import MORE_RULES, RULES, STREAM, make_events

LIMITS = [1, 2, 3, 4]
RESET = next(each for each in MORE_RULES if each.get("reset_on_alert") and "window" in each)


def judge(documents: list[dict[str, Any]], flagging: dict[str, FlagPlace]) -> list[Output]:
    """Judges events in two batches."""
    evaluator, state = Evaluator(STREAM, flagging=flagging), ShardState(RuleBook(STREAM, {STREAM.name: STREAM}))
    rows = make_events(300, seed=3)
    changes = [
        RuleChange("insert", at, each["rule_id"], 1, "active", json.dumps(each)) for at, each in enumerate(documents)
    ]
    outputs = []
    for part in (rows[:150], rows[150:]):
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

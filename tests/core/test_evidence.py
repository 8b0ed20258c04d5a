"""Evidence against the evaluator: recomputed event by event, every measure of every alert is the same."""

from __future__ import annotations

import datetime as dt
import random
from typing import Any

import numpy as np
import pytest

import lookback
from lookback.core.arrival import marks_of
from lookback.core.columns import text_of
from lookback.core.compiled import compile_rule
from lookback.core.events import read_events
from lookback.core.evidence import Activation, Clock, Evidence, Subject, feature_spans, measured
from lookback.core.rules import parse_time
from lookback.core.streams import Stream
from lookback.core.wording import limits_of, rule_in_words

STREAM = Stream.from_dict(
    {
        "stream": "tx",
        "event_id": "id",
        "event_time": "at",
        "fields": {"id": "string", "at": "timestamp", "k": "string", "amount": "decimal(18,2)"},
        "max_out_of_orderness": "2 seconds",
        "allowed_lateness": "20 seconds",
    }
)
RULE = {
    "rule_id": "r",
    "stream": "tx",
    "group_by": ["k"],
    "where": "amount <> 3",
    "window": "30 seconds",
    "measures": {
        "total": "sum(amount)",
        "mean": {"measure": "avg(amount) filter (where amount > 1)", "window": "10 seconds"},
        "n": "count(*)",
        "before": {"measure": "max(amount)", "window": {"lookback": "20 seconds", "delay": "5 seconds"}},
        "spread": "stddev_samp(amount)",
        "with_amount": "count(amount)",
    },
    "when": "n >= 2",
}


def moment(second: int) -> dt.datetime:
    return dt.datetime(2024, 3, 4, tzinfo=dt.timezone.utc) + dt.timedelta(seconds=second)


def rows(seed: int) -> list[dict[str, Any]]:
    """Out of order, with ties in time, late ones and NULLs; ten to a commit."""
    chance = random.Random(seed)
    return [
        {
            "id": f"{chance.randint(0, 99):02d}-{number}",
            "at": moment(number // 2 + chance.randint(-30, 5)),
            "k": chance.choice(["a", "b", None]),
            "amount": chance.choice([None, 1, 2, 3, 4]),
            "arrival": 1 + number // 10,
        }
        for number in range(200)
    ]


def evidence_of(given: list[dict[str, Any]], document: dict[str, Any], key: str | None, spans: Any) -> Evidence:
    everything = read_events(given, STREAM, 1)[0]
    highs = {commit: high for commit, high in marks_of(everything, everything.commits).items() if high is not None}
    mine = read_events([row for row in given if row["k"] == key], STREAM, 1)[0].in_order_of_arrival()
    return Evidence(compile_rule(document, STREAM), mine, mine.columns["id"], Clock(STREAM, highs), spans)


@pytest.mark.parametrize("seed", range(5))
def test_every_measure_of_every_alert_comes_out_the_same(seed: int):
    given = rows(seed)
    # A window widened in mid-stream, which has to fill up anew.
    short = {**RULE, "window": "10 seconds", "measures": {"n": "count(*)", "total": "sum(amount)"}}
    versions = {1: short, 2: RULE}
    changes = [({"rule_id": "r", "version": v, "document": d}, (None, None, 9)[v]) for v, d in versions.items()]
    compiled = {version: compile_rule(document, STREAM) for version, document in versions.items()}
    activations = [Activation(None, "r", compiled[1]), Activation(9, "r", compiled[2])]

    alerts = lookback.replay(changes, given, STREAM).alerts

    assert len(alerts) > 20
    assert {alert.rule_version for alert in alerts} == {1, 2}
    for alert in alerts:
        spans = feature_spans(activations, alert.arrival)
        evidence = evidence_of(given, versions[alert.rule_version], alert.key["k"], spans)
        subject = Subject(alert.arrival, parse_time(alert.event_time), str(alert.event_id))
        recorded = {name: text_of(value) for name, value in alert.measures.items()}
        nothing_gone = np.zeros(len(evidence.events), dtype=bool)
        for measure in measured(evidence, subject, recorded, nothing_gone, dict.fromkeys(recorded, "")):
            assert measure.recomputed == measure.recorded, (measure.name, alert)


def test_a_feature_that_no_rule_used_for_a_commit_starts_anew():
    rule = compile_rule(RULE, STREAM)
    names = {feature.feature_id for feature in rule.features}
    steps = [Activation(None, "r", rule), Activation(3, "r", None), Activation(5, "r", rule), Activation(7, "*", None)]
    assert {name: span[0][0] for name, span in feature_spans(steps, 3).items()} == dict.fromkeys(names)
    assert feature_spans(steps, 5) == {}
    assert {span[0][0] for span in feature_spans(steps, 6).values()} == {5}
    assert {span[0][0] for span in feature_spans(steps, 8).values()} == {7}


def test_a_rule_in_words_and_its_limits():
    document = {
        **RULE, "group_by": [], "where": None, "measures": {"total": "sum(amount)"}, "window": "7 days", "late": "record",
        "when": "(total) >= 2000 and -1.5 < total and total > 5 * amount and amount = 3", "suppress": "1 hour",
    }  # fmt: skip
    rule = compile_rule({name: value for name, value in document.items() if value is not None}, STREAM)
    assert limits_of(rule) == {"total": (2000.0, -1.5)}
    assert rule_in_words(rule) == (
        "Raised when (total) >= 2000 and -1.5 < total and total > 5 * amount and amount = 3, where total is the sum of "
        "amount over the week up to each event, over all events together; late events count but raise nothing "
        "themselves; further alerts of a key within 1 hour of one are suppressed."
    )

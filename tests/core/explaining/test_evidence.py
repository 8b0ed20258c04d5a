"""Evidence against the evaluator: recomputed event by event, every row of every alert comes out the same."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import random
import time
from dataclasses import replace
from typing import Any

import cases as generated
import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from test_equals_oracle import changes_after, new_state

import lookback
from growth import grows_in_proportion, takes_at_most
from lookback.core.engine.batch import Batch
from lookback.core.engine.evaluation import Evaluator
from lookback.core.engine.output import Output
from lookback.core.engine.schedule import WaitingChange, judge_batch
from lookback.core.errors import RuleError
from lookback.core.explaining.evidence import NOT_DELETED, Activation, Clock, Evidence, Explanation, Reset
from lookback.core.explaining.explanation import explain_alert, find_counted, picture_span
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.rulebook import RuleBook
from lookback.core.rules.wording import describe_measure, describe_rule, find_measure_limits
from lookback.core.state.shard import ShardState
from lookback.core.streams.arrival import find_marks
from lookback.core.streams.declaration import Stream
from lookback.core.streams.declarations import Declarations, Declared
from lookback.core.streams.eventrows import read_events
from lookback.core.streams.events import Events
from lookback.core.values.columns import to_text
from lookback.core.values.times import parse_time
from lookback.views.explanations import describe_alert, list_counted_events

STREAM = Stream.from_dict(
    {
        "stream": "tx",
        "event_id": "id",
        "event_time": "at",
        "fields": {"id": "string", "at": "timestamp", "k": "string", "amount": "decimal(18,2)"},
        "max_out_of_orderness": "2 seconds",
        "allowed_lateness": "20 seconds",
        "max_session": "40 seconds",
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


def rows(seed: int, count: int = 200) -> list[dict[str, Any]]:
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
        for number in range(count)
    ]


Found = tuple[Evidence, dict[str, Any], int]


def found(
    versions: list[tuple[dict[str, Any], int | None]],
    given: list[dict[str, Any]],
    activations: list[Activation] | None = None,
) -> list[Found]:
    """Lists for every row of a replay of one rule: its evidence, the row, and since when to show.

    versions: of the rule, and their arrivals. activations: what is known of these; None: all. Rows are as the alerts
    table holds them.
    """
    rules = [compile_rule(document, STREAM) for document, _ in versions]
    changes = [
        ({"rule_id": "r", "version": at, "document": document}, arrival)
        for at, (document, arrival) in enumerate(versions, 1)
    ]
    alerts = as_rows(lookback.replay(changes, given, STREAM).alerts)
    everything = read_events(given, STREAM, 1)[0].in_order_of_arrival()
    highs = {commit: high for commit, high in find_marks(everything, everything.commits).items() if high is not None}
    if activations is None:
        activations = [Activation(arrival, "r", rule) for (_, arrival), rule in zip(versions, rules, strict=True)]
    listed = []
    for at, alert in enumerate(alerts):
        rule = rules[alert["rule_version"] - 1]
        since, _ = picture_span(rule, STREAM, alert, None)
        mine = [row for row in given if alert["key"] in ({}, {"k": row["k"]}) and row["arrival"] <= alert["arrival"]]
        own = read_events(mine, STREAM, 1)[0].in_order_of_arrival()
        before = [row for row in alerts[: at + 1] if row["key"] == alert["key"] and row["revision"] == 0]
        evidence = Evidence(
            rule, own, Clock(Declarations.of(STREAM), highs), activations,
            resets=[reset_by(row, rule) for row in before] if rule.spec.reset_on_alert else [],
        )  # fmt: skip
        listed.append((evidence, alert, since))
    return listed


def as_rows(alerts: list[Any]) -> list[dict[str, Any]]:
    """Alerts as rows of the table."""
    return [{**vars(a), "measures": {name: to_text(value) for name, value in a.measures.items()}} for a in alerts]


def explain_all(
    versions: list[tuple[dict[str, Any], int | None]], given: list[dict[str, Any]]
) -> list[tuple[dict[str, Any], Explanation]]:
    return [(alert, explain_alert(evidence, alert, {}, since)) for evidence, alert, since in found(versions, given)]


def reset_by(alert: dict[str, Any], rule: Any) -> Reset:
    absence = rule.sequence is not None and rule.sequence.absent is not None
    time = parse_time(alert["window_start" if absence else "event_time"])
    due = parse_time(alert["event_time"]) if absence else None
    return Reset(alert["arrival"], time, alert["event_id"], due)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 5))])
def test_every_measure_of_every_alert_comes_out_the_same(seed: int):
    # A window widened in mid-stream, which has to fill up anew.
    short = {**RULE, "window": "10 seconds", "measures": {"n": "count(*)", "total": "sum(amount)"}}

    explanations = explain_all([(short, None), (RULE, 9)], rows(seed))

    assert len(explanations) > 20
    assert {alert["rule_version"] for alert, _ in explanations} == {1, 2}
    for alert, explanation in explanations:
        assert {m.name: m.recorded for m in explanation.measures} == alert["measures"]
        assert explanation.consistent, (alert, explanation.measures)


MEASURES = {"measures": {"total": "sum(amount)", "n": "count(*)", "kinds": "count(distinct amount)"}}
COARSE = {"measures": {"total": "sum(amount)", "n": "count(*)", "mean": "avg(amount)"}}
BASE = {"rule_id": "r", "stream": "tx", "group_by": ["k"]}
ONE = {"name": "one", "where": "amount = 1", "at_least": 2}
MORE = {"name": "more", "where": "amount > element_at(one.amount, -1)", "at_most": 2}
SILENT = {"name": "silent", "absent": "amount >= one.count and amount = 4", "within": "6 seconds"}
KINDS = {
    "event": {**BASE, "where": "amount <> 3", "when": "amount >= 2"},
    "lookback": {**BASE, **MEASURES, "window": "20 seconds", "when": "n >= 4"},
    "revise": {**BASE, **MEASURES, "window": {"lookback": "9 seconds", "delay": "1 second"}, "when": "n < 4", "late": "revise"},
    "reset": {**BASE, **MEASURES, "window": "30 seconds", "when": "n >= 4", "reset_on_alert": True},
    "coarse": {**BASE, **COARSE, "window": {"lookback": "20 seconds", "resolution": "7 seconds"}, "when": "n >= 4"},
    "coarse revised": {
        **BASE, **COARSE, "window": {"lookback": "9 seconds", "delay": "2 seconds", "resolution": "4 seconds"},
        "when": "n < 4", "late": "revise",
    },
    "tumbling": {**BASE, **MEASURES, "window": {"tumbling": "10 seconds"}, "when": "n < 8"},
    "early": {**BASE, **MEASURES, "window": {"tumbling": "10 seconds", "offset": "3 seconds"}, "early": True},
    "sliding": {**BASE, **MEASURES, "window": {"sliding": "10 seconds", "slide": "3 seconds"}, "when": "total > 9"},
    "session": {**BASE, **MEASURES, "window": {"session": "1 second"}},
    "closed": {**BASE, **MEASURES, "window": {"session": "8 seconds"}, "early": True},
    "sequence": {**BASE, "sequence": {"within": "20 seconds", "steps": [ONE, MORE], "until": "amount = 4"}},
    "fixed": {**BASE, "sequence": {"within": "20 seconds", "steps": [{**ONE, "at_least": 1}, MORE], "expiry": "fixed"}, "late": "record"},
    "absence": {**BASE, "sequence": {"within": "20 seconds", "steps": [ONE, {**SILENT, "absent": "amount = 4"}]}},
    "emptied": {**BASE, "sequence": {"within": "20 seconds", "steps": [ONE, SILENT]}, "reset_on_alert": True},
}  # fmt: skip
RETRACTED = {"revise", "coarse revised", "tumbling", "session", "closed", "absence", "emptied"}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_of_every_kind_comes_out_the_same(kind: str):
    # Each explanation judges all events again, so many small histories cost less than one large one.
    explanations = [each for seed in range(3) for each in explain_all([(KINDS[kind], None)], rows(seed, count=80))]

    assert len(explanations) > 10
    assert ("retracted" in {alert["verdict"] for alert, _ in explanations}) == (kind in RETRACTED)
    for alert, explanation in explanations:
        assert explanation.consistent, (alert, explanation.measures, explanation.steps)
        assert explanation.kind == compile_rule(KINDS[kind], STREAM).spec.kind
        assert any(note.startswith("Retracted") for note in explanation.notes) == (alert["verdict"] == "retracted")
        took = [event_id for step in explanation.steps if not step.absent for event_id in step.events.get("id", [])]
        assert took == (list(alert["evidence"]) if explanation.steps else [])


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_with_something_wrong_in_it_does_not_come_out(kind: str):
    for evidence, alert, since in found([(KINDS[kind], None)], rows(1))[::8]:
        wrongs = [{**alert, "measures": {**alert["measures"], "n": "1000"}}]
        if not alert["measures"]:
            wrongs = [
                {**alert, "evidence": ids}
                for ids in (alert["evidence"][::-1], alert["evidence"][:-1], ["90-99"])
                if ids != alert["evidence"]
            ]
        if "session" in KINDS[kind].get("window", {}) and alert["verdict"] != "retracted":
            wrongs.append({**alert, "window_end": alert["window_end"] + dt.timedelta(microseconds=1)})
        for wrong in wrongs:
            assert not explain_alert(evidence, wrong, {}, since).consistent, wrong


def test_an_event_rule_whose_event_is_gone_shows_the_others():
    evidence, alert, since = found([(KINDS["event"], None)], rows(1))[-1]
    left = [at for at in range(len(evidence.events)) if evidence.events.id_text(at) != alert["event_id"]]
    whole = explain_alert(evidence, alert, {}, since).timeline

    explained = explain_alert(replace(evidence, events=evidence.events.take(np.array(left))), alert, {}, since)

    assert not explained.consistent
    assert list(explained.timeline.columns) == list(whole.columns)
    assert list(explained.timeline["event_id"]) == [each for each in whole["event_id"] if each != alert["event_id"]]
    assert not explained.timeline["is_alert"].any()


def test_an_absence_that_is_said_to_be_retracted_though_nothing_came_does_not_come_out():
    cases = found([(KINDS["absence"], None)], rows(1))
    retracted = {alert["alert_id"] for _, alert, _ in cases if alert["verdict"] == "retracted"}
    quiet = [each for each in cases if each[1]["alert_id"] not in retracted]
    assert quiet
    for evidence, alert, since in quiet:
        assert not explain_alert(evidence, {**alert, "verdict": "retracted"}, {}, since).consistent


# [a b] at 0 and 5, [d] at 12: two sessions with a gap of 6 seconds, until c comes at 9 and joins them
def test_a_session_that_was_merged_away_says_into_which():
    times = {"a": (0, 1), "b": (5, 1), "d": (12, 1), "z": (30, 2), "c": (9, 3)}
    given = [
        {"id": name, "at": moment(at), "k": "x", "amount": 1, "arrival": arrival}
        for name, (at, arrival) in times.items()
    ]

    explanations = explain_all([({**BASE, **MEASURES, "window": {"session": "6 seconds"}}, None)], given)

    assert [(alert["verdict"], alert["revision"], each.consistent) for alert, each in explanations] == [
        ("raised", 0, True), ("raised", 0, True), ("retracted", 1, True), ("raised", 1, True)
    ]  # fmt: skip
    (note,) = explanations[2][1].notes
    assert note.endswith("it became part of the session from 2024-03-04 00:00:00 UTC to 2024-03-04 00:00:18 UTC.")
    assert [list(each.measures[0].events["id"]) for _, each in explanations] == [
        ["a", "b"],
        ["d"],
        ["d"],
        ["a", "b", "c", "d"],
    ]
    assert list(explanations[3][1].windows["window_start"]) == [moment(0)]
    assert not explanations[3][1].measures[0].end_included


def test_an_absence_says_what_was_waited_for_and_what_came_after_all():
    times = {"a": (0, 1), "b": (1, 1), "z": (30, 2), "c": (15, 3)}
    given = [
        {"id": name, "at": moment(at), "k": "x", "amount": 4 if name == "c" else 1, "arrival": arrival}
        for name, (at, arrival) in times.items()
    ]
    document = {
        **BASE,
        "sequence": {"within": "20 seconds", "steps": [ONE, {"name": "silent", "absent": "amount = 4"}]},
    }

    (raised, first), (retracted, last) = explain_all([(document, None)], given)

    assert (raised["verdict"], retracted["verdict"], first.consistent, last.consistent) == (
        "raised",
        "retracted",
        True,
        True,
    )
    assert first.notes == ("Waited from 2024-03-04 00:00:01 UTC to 2024-03-04 00:00:21 UTC, and no such event came.",)
    assert last.notes == ("Retracted: c came after all, with commit 3.",)
    assert [(step.name, step.words, list(step.events.get("id", []))) for step in last.steps] == [
        ("one", "at least 2 events where amount = 1", ["a", "b"]),
        ("silent", "no event where amount = 4", ["c"]),
    ]
    assert list(first.windows["name"]) == ["steps", "wait"]
    assert last.timeline[["event_id", "step"]].to_numpy().tolist() == [["a", "one"], ["b", "one"], ["c", "silent"]]


def test_an_event_that_fits_a_step_and_that_none_took_is_a_near_miss():
    # seconds: 0  1              25    40  41  42    70  71  73
    # amount:  1  1               2     1   9   2     1   1   2    one: at least two of amount 1; two: amount 2; within 20 seconds
    #          |--- 20 seconds ---|     one of two    a match
    seconds, amounts = (0, 1, 25, 40, 41, 42, 70, 71, 73), (1, 1, 2, 1, 9, 2, 1, 1, 2)
    given = [
        {"id": f"e{at}", "at": moment(second), "k": "x", "amount": amount, "arrival": at + 1}
        for at, (second, amount) in enumerate(zip(seconds, amounts, strict=True))
    ]
    two = {"name": "two", "where": "amount = 2 and not array_contains(one.id, id)"}
    document = {**BASE, "sequence": {"within": "20 seconds", "steps": [ONE, two]}}

    ((evidence, alert, _),) = found([(document, None)], given)
    explained = explain_alert(evidence, alert, {}, parse_time(moment(0)))

    fits = explained.timeline[["event_id", "step", "fits"]].to_numpy().tolist()
    # Two of step one and then step two, but too late; one of step one, and then step two.
    assert fits == [
        ["e0", "", "one"], ["e1", "", "one"], ["e2", "", "two"], ["e3", "", "one"], ["e4", "", ""], ["e5", "", "two"],
        ["e6", "one", ""], ["e7", "one", ""], ["e8", "two", ""],
    ]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"reset"}))
def test_every_row_comes_out_the_same_where_events_were_deleted_in_between(kind: str):
    chance, rule = random.Random(4), compile_rule(KINDS[kind], STREAM)
    events = read_events(rows(2), STREAM, 1)[0].in_order_of_arrival()
    gone_at = np.full(len(events), NOT_DELETED, dtype=np.int64)
    for at in chance.sample(range(150), 30):
        gone_at[at] = events.commits[at] + chance.randint(1, 5)
    gone = events.take(np.flatnonzero(gone_at < NOT_DELETED))
    deleted = Events(gone.columns, gone_at[gone_at < NOT_DELETED], "id", "at")
    marks, change = (
        find_marks(events, events.commits),
        RuleChange("insert", 0, "r", 1, "active", json.dumps(KINDS[kind])),
    )
    batch = Batch(events, deleted, marks, [change])
    alerts = as_rows(Evaluator(STREAM).process(ShardState(RuleBook(STREAM, {"tx": STREAM})), batch).alerts)
    highs = {commit: high for commit, high in marks.items() if high is not None}
    explained, missing = 0, 0
    for at, alert in list(enumerate(alerts))[:: 1 + len(alerts) // 40]:
        of_key = np.array([key == alert["key"]["k"] for key in events.columns["k"].to_list()])
        own = np.flatnonzero(of_key & (events.commits <= alert["arrival"]))
        before = [row for row in alerts[: at + 1] if row["key"] == alert["key"] and row["revision"] == 0]
        resets = [reset_by(row, rule) for row in before] if rule.spec.reset_on_alert else []
        evidence = Evidence(rule, events.take(own), Clock(Declarations.of(STREAM), highs), (), resets, gone_at[own])

        explanation = explain_alert(evidence, alert, {}, picture_span(rule, STREAM, alert, None)[0])

        assert explanation.consistent, (alert, explanation.measures, explanation.steps)
        shown = [
            frame for part in (explanation.measures, explanation.steps) for frame in (each.events for each in part)
        ]
        there = {event_id for frame in shown for event_id in frame.get("id", [])}
        assert not there & {events.id_text(each) for each in np.flatnonzero(gone_at < NOT_DELETED)}
        explained, missing = explained + 1, missing + explanation.missing
    assert explained > 5
    assert missing or rule.sequence or kind == "event"


# commit 1   2   3   4   5
#        a   b   c   d   e       the rule keeps no state from after 2 to after 3, or all state is cleared after 3
@pytest.mark.parametrize("gap", [[(2, None), (3, "r")], [(3, "*")]], ids=["retired", "cleared"])
def test_a_measure_that_no_rule_used_for_a_commit_starts_anew(gap: list[tuple[int, str | None]]):
    document = {**RULE, "measures": {"n": "count(*)"}, "when": "n >= 1"}
    rule = compile_rule(document, STREAM)
    given = [{"id": name, "at": moment(at), "k": "x", "amount": 1, "arrival": at} for at, name in enumerate("abcde", 1)]
    known = [
        Activation(None, "r", rule),
        *(Activation(arrival, name or "r", rule if name == "r" else None) for arrival, name in gap),
    ]

    cases = found([(document, None)], given, known)
    explanations = [explain_alert(evidence, alert, {}, since) for evidence, alert, since in cases]

    counted = [list(each.measures[0].events["id"]) for each in explanations if len(each.measures[0].events)]
    # What judged the events here did not stop: the explanations go by the activations alone.
    assert counted[:2] == [["a"], ["a", "b"]]
    assert counted[-2:] == [["d"], ["d", "e"]]


SPANS = st.sampled_from([1, 3, 6, 11])
CHANGES = st.lists(st.tuples(st.integers(1, 12), SPANS, SPANS), max_size=2, unique_by=lambda each: each[0])


@pytest.mark.long
@given(generated.cases(updates=False), CHANGES)
def test_c10_9_every_row_of_generated_rules_changes_and_declarations_comes_out_the_same(
    case: dict[str, Any], changes: list[tuple[int, int, int]]
) -> None:
    stream = generated.STREAMS[case["stream"]]
    declarations, commits = Declarations.of(stream), sorted({row["arrival"] for row in case["rows"]})
    for after, disorder, lateness in sorted(changes):
        # rule_log names the last commit that was judged.
        judged = max((commit for commit in commits if commit <= after), default=None)
        settings = {"max_out_of_orderness": disorder, "allowed_lateness": lateness}
        declarations = declarations.then(Declared.now(replace(stream, **settings), "1", judged))
    output = run_declared(case, declarations)
    assume(not any(failure.reason for failure in output.failures))
    explain_rows(case, output, declarations)


@pytest.mark.long
@given(generated.advanced_cases())
def test_c10_9_every_row_comes_out_the_same_where_versions_come_in_the_arrivals_of_advances(
    case: dict[str, Any],
) -> None:
    declarations = Declarations.of(generated.STREAMS[case["stream"]])
    output = run_declared(case, declarations)
    assume(not any(failure.reason for failure in output.failures))
    explain_rows(case, output, declarations)


# 0       8   | 10: the watermark        20 |
# a       b      c at 12                        with commit 1, in which nothing ends; the sum of version 2 has none of them
ORDERS = {
    "version first": (["version", 10], [(2, 1, {"m": "2", "s": None})]),
    "advance first": ([10, "version"], [(1, 1, {"m": "2"})]),
    "between": ([10, "version", 20], [(1, 1, {"m": "2"}), (2, 1, {"m": "1", "s": None})]),
}


@pytest.mark.parametrize(("steps", "expected"), ORDERS.values(), ids=ORDERS)
def test_c10_9_a_version_and_an_advance_of_one_arrival_count_in_the_order_in_which_they_came(
    steps: list[Any], expected: list[Any]
) -> None:
    base = {"rule_id": "r", "stream": "tx", "group_by": [], "window": {"tumbling": "10 microseconds"}}
    measures = [{"m": "count(*)"}, {"m": "count(*)", "s": "sum(n)"}]
    first, second = ({"rule_id": "r", "status": "active", "document": {**base, "measures": each}} for each in measures)
    changes = [{"after": 0, "change": "insert", "version": 1, **first}]
    for step in steps:
        row = {"rule_id": "*", "version": None, "status": "advance", "document": {"time": step}}
        changes.append({"after": 1, "change": "insert", **({"version": 2, **second} if step == "version" else row)})
    values = {"c": 1, "k": "x", "a": "1.00", "n": 1, "d": 0.0}
    rows = [{"id": name, "at": at, "arrival": 1, **values} for name, at in (("a", 0), ("b", 8), ("c", 12))]
    case = {"stream": "plain", "rows": rows, "changes": changes, "shards": 1}
    declarations = Declarations.of(generated.STREAMS["plain"])

    output = run_declared(case, declarations)

    assert [(row["rule_version"], row["arrival"], row["measures"]) for row in as_rows(output.alerts)] == expected
    explain_rows(case, output, declarations)


def run_declared(case: dict[str, Any], declarations: Declarations) -> Output:
    """Judges a case in one batch, within which rules and declarations change."""
    stream, total = generated.STREAMS[case["stream"]], Output()
    events, _ = read_events(case["rows"], stream, 1)
    marks, first = find_marks(events, events.commits), changes_after(case, 0)
    afters = sorted({each["after"] for each in case["changes"]} - {0})
    waiting = [WaitingChange(change, after) for after in afters for change in changes_after(case, after)]
    for shard in range(case["shards"]):
        evaluator = Evaluator(stream, shard, case["shards"])
        output, _ = judge_batch(evaluator, new_state(stream), Batch(events, None, marks, first), waiting, declarations)
        total.rows += output.rows
        total.failures += output.failures
    total.rows.sort(key=lambda row: row[0])
    return total


def explain_rows(case: dict[str, Any], output: Output, declarations: Declarations) -> None:
    """Explains every row that a case gave; all of them come out the same."""
    stream, history = generated.STREAMS[case["stream"]], History(case, declarations)
    events = read_events(case["rows"], stream, 1)[0].in_order_of_arrival()
    highs = {commit: high for commit, high in find_marks(events, events.commits).items() if high is not None}
    alerts = as_rows(output.alerts)
    for alert in alerts:
        slot = alert["rule_id"], alert["rule_version"]
        rule = compile_rule(history.rules[slot], declarations.after(alert["arrival"] - 1).stream)
        of_key = events.commits <= alert["arrival"]
        for name in rule.group_by:
            of_key &= np.array([to_text(value) == alert["key"][name] for value in events.columns[name].to_list()])
        earlier = [row for row in alerts if (row["rule_id"], row["key"]) == (alert["rule_id"], alert["key"])]
        first = [row for row in earlier if row["revision"] == 0 and row["arrival"] <= alert["arrival"]]
        slots = [(row, (row["rule_id"], row["rule_version"])) for row in first]
        slots = [(row, each) for row, each in slots if history.lanes[each] == history.lanes[slot]]
        # A version without reset_on_alert shares no windows with one that has it.
        slots = slots if rule.spec.reset_on_alert or rule.sequence is not None else []
        owners = [(row, compile_rule(history.rules[each], stream)) for row, each in slots]
        evidence = Evidence(
            rule,
            events.take(np.flatnonzero(of_key)),
            Clock(declarations, highs, history.advances),
            history.activations(*slot),
            [reset_by(row, owner) for row, owner in owners if owner.spec.reset_on_alert],
        )

        explanation = explain_alert(evidence, alert, {}, picture_span(rule, declarations.widest, alert, None)[0])

        assert explanation.consistent, (alert, explanation.measures, explanation.steps)


class History:
    """The changes of a case, as rule_log and the rules table tell them."""

    def __init__(self, case: dict[str, Any], declarations: Declarations) -> None:
        stream, commits = declarations.last, sorted({row["arrival"] for row in case["rows"]})
        book = RuleBook(stream, {stream.name: stream})
        self.declarations = declarations
        self.rules: dict[tuple[str, int], dict[str, Any]] = {}
        self.lanes: dict[tuple[str, int], int] = {}
        # Arrival, how many advances were before it, rule_id, lane, and the version that the lane has from then on.
        self.changes: list[tuple[int | None, int, str, int, int | None]] = []
        self.advances: list[tuple[int | None, int]] = []
        for after in sorted({*(change["after"] for change in case["changes"]), *declarations.cuts}):
            arrival = max((commit for commit in commits if commit <= after), default=None)
            book.declare(declarations.after(after).stream)
            if after in declarations.cuts:
                self.changes += [
                    (after, len(self.advances), *slot, version)
                    for slot, version in sorted(self._versions(book).items())
                ]
            for change in sorted(changes_after(case, after), key=lambda each: each.order):
                before = self._versions(book)
                log, commands = book.apply([change], arrival)
                self.advances += [(arrival, command.time) for command in commands if command.action == "advance"]
                if any(row.action == "clear_state" for row in log):
                    self.changes.append((arrival, len(self.advances), "*", 0, None))
                now = self._versions(book)
                changed = sorted(slot for slot in before | now if before.get(slot) != now.get(slot))
                self.changes += [(arrival, len(self.advances), *slot, now.get(slot)) for slot in changed]

    def _versions(self, book: RuleBook) -> dict[tuple[str, int], int]:
        """The version of each rule and lane."""
        entries = [each for held in (book.entries, book.challengers) for each in held.values() if each.is_in_force]
        for each in entries:
            self.rules[each.rule_id, each.version] = json.loads(each.document)
            self.lanes[each.rule_id, each.version] = each.lane
        return {(each.rule_id, each.lane): each.version for each in entries}

    def activations(self, rule_id: str, version: int) -> list[Activation]:
        """The activations as an explanation of a version needs them: that version has lane 0."""
        own, listed = self.lanes[rule_id, version], list[Activation]()
        for arrival, advances, name, real, number in self.changes:
            lane = real ^ own if name == rule_id else real
            document = None if number is None else self.rules[name, number]
            declared = self.declarations.after(arrival).stream
            rule = None
            # A version whose lateness a declaration does not allow is none, until the version that comes with it.
            with contextlib.suppress(RuleError):
                rule = None if document is None else compile_rule(document, declared, lane=lane)
            listed.append(Activation(arrival, f"{name} beside" if lane else name, rule, advances))
        return listed


@pytest.mark.parametrize("kind", ["sequence", "fixed", "absence", "emptied"])
def test_c10_4_the_events_behind_all_alerts_of_a_key_are_those_behind_each_of_them(kind: str):
    by_key: dict[str, list[Found]] = {}
    for each in found([(KINDS[kind], None)], rows(2)):
        if each[1]["verdict"] != "retracted":
            by_key.setdefault(str(each[1]["key"]), []).append(each)

    assert max(map(len, by_key.values())) > 3
    for cases in by_key.values():
        # The last one has all events of the key that came before it.
        counted = find_counted(cases[-1][0], [alert for _, alert, _ in cases])
        taken = [explain_alert(*case[:2], {}, case[2]).steps for case in cases]
        ids = [[each for step in steps if not step.absent for each in step.events.get("id", [])] for steps in taken]
        assert counted == ids


def long_history(pairs: int) -> tuple[Evidence, list[dict[str, Any]]]:
    """One key, whose every second event completes a sequence of a few events; each event is a commit."""
    document = {**BASE, "sequence": {"within": "9 seconds", "steps": [ONE, {"name": "more", "where": "amount = 2"}]}}
    given = [
        {"id": f"{at}", "at": moment(at), "k": "x", "amount": 1 + at % 2, "arrival": at} for at in range(2 * pairs)
    ]
    events, rule = read_events(given, STREAM, 1)[0].in_order_of_arrival(), compile_rule(document, STREAM)
    highs = {commit: high for commit, high in find_marks(events, events.commits).items() if high is not None}
    alerts = as_rows(lookback.replay([document], given, STREAM).alerts)
    return Evidence(rule, events, Clock(Declarations.of(STREAM), highs), [Activation(None, "r", rule)]), alerts


def test_c10_4_naming_the_events_of_a_thousand_sequences_of_a_key_takes_less_than_fifty_times_that_of_one():
    known, alerts = long_history(1_001)

    def seconds_for(count: int) -> float:
        evidence, started = replace(known), time.process_time()
        counted = find_counted(evidence, alerts[-count:])
        seconds = time.process_time() - started
        assert [ids and ids[-1] for ids in counted] == [alert["event_id"] for alert in alerts[-count:]]
        return seconds

    assert len(alerts) == 1_000
    assert takes_at_most(50, lambda: seconds_for(1), lambda: seconds_for(1_000))


WIDE = Stream.from_dict({**STREAM.to_dict(), "max_session": "7 days"})
COUNTED = {"measures": {"n": "count(*)", "total": "sum(amount)"}}
# Many windows; one window with a revision for each event; one match of all events.
LONG = {
    "tumbling": {**COUNTED, "window": {"tumbling": "10 seconds"}},
    "session": {**COUNTED, "window": {"session": "9 seconds"}, "early": True},
    "sequence": {"sequence": {"within": "7 days", "steps": [ONE, {"name": "last", "where": "amount = 2"}]}},
}


@pytest.mark.parametrize("kind", sorted(LONG))
def test_c10_4_finding_the_events_behind_the_alerts_of_a_key_grows_in_proportion_to_its_events(kind: str):
    document = {**BASE, **LONG[kind]}
    rule = compile_rule(document, WIDE)

    def seconds_for(count: int) -> float:
        given = [
            {"id": f"{at:05}", "at": moment(at), "k": "x", "amount": 1 + (at == count - 1), "arrival": at}
            for at in range(count)
        ]
        events = read_events(given, WIDE, 1)[0].in_order_of_arrival()
        highs = {commit: high for commit, high in find_marks(events, events.commits).items() if high is not None}
        alerts = {row["alert_id"]: row for row in as_rows(lookback.replay([document], given, WIDE).alerts)}
        evidence = Evidence(rule, events, Clock(Declarations.of(WIDE), highs), [Activation(None, "r", rule)])
        started = time.process_time()
        counted = find_counted(evidence, list(alerts.values()))
        seconds = time.process_time() - started
        last = len(given) - len(given) % 10 - 10 if kind == "tumbling" else len(given)
        assert sorted(name for ids in counted for name in ids or [""]) == [row["id"] for row in given[:last]]
        return seconds

    assert grows_in_proportion(seconds_for, 500)


def test_a_rule_in_words_and_its_limits():
    document = {
        **RULE, "group_by": [], "where": None, "measures": {"total": "sum(amount)"}, "window": "7 days", "late": "record",
        "when": "(total) >= 2000 and -1.5 < total and total > 5 * amount and amount = 3", "suppress": "1 hour",
    }  # fmt: skip
    rule = compile_rule({name: value for name, value in document.items() if value is not None}, STREAM)
    assert find_measure_limits(rule) == {"total": (2000.0, -1.5)}
    assert describe_rule(rule) == (
        "Raised when (total) >= 2000 and -1.5 < total and total > 5 * amount and amount = 3, where total is the sum of "
        "amount over the week up to each event, over all events together; late events count but raise nothing "
        "themselves; further alerts of a key within 1 hour of one are suppressed."
    )


WORDS = {
    "event": "Raised for each event where amount >= 2; only events where amount <> 3.",
    "revise": (
        "Raised when n < 4, where n is the number of events over the 9 seconds that end 1 second before each event, per k; "
        "judged again when an event arrives later that lies in the window."
    ),
    "coarse": (
        "Raised when n >= 4, where n is the number of events over the 20 seconds up to each event (begun at a multiple of 7 "
        "seconds), per k."
    ),
    "reset": (
        "Raised when n >= 4, where n is the number of events over the 30 seconds up to each event, per k; after an alert "
        "the key starts again: earlier events no longer count."
    ),
    "tumbling": "In every 10 seconds, raised when n < 8, where n is the number of events over the 10 seconds of the window, per k.",
    "early": (
        "In every 10 seconds (counted from 1970-01-01 00:00:03 UTC), raised if there is any event, where n is the number of "
        "events over the 10 seconds of the window, per k; judged after each event as well, before the window ends."
    ),
    "sliding": (
        "In every 10 seconds (one begins every 3 seconds), raised when total > 9, where n is the number of events over the "
        "10 seconds of the window, per k."
    ),
    "session": (
        "In every session (events no more than 1 second apart), raised if there is any event, where n is the number of "
        "events over the session, per k."
    ),
    "sequence": (
        "Raised when, per k, at least 2 events where amount = 1 (one) are followed by 1 to 2 events where amount > "
        "element_at(one.amount, -1) (more), within the 20 seconds up to the last event; an event where amount = 4 ends what "
        "has begun, once it has been judged itself."
    ),
    "fixed": (
        "Raised when, per k, an event where amount = 1 (one) is followed by 1 to 2 events where amount > "
        "element_at(one.amount, -1) (more), within 20 seconds from the first event on, after which the next such event "
        "begins again; late events count but raise nothing themselves."
    ),
    "absence": (
        "Raised when, per k, there are at least 2 events where amount = 1 (one), within the 20 seconds up to the last event, "
        "and in the 6 seconds after the last of them there is no event where amount = 4 (silent)."
    ),
}


@pytest.mark.parametrize("kind", WORDS)
def test_a_rule_of_each_kind_in_words(kind: str):
    document = {**KINDS[kind]}
    if "measures" in document:
        document["measures"] = {"n": "count(*)"} | ({"total": "sum(amount)"} if kind == "sliding" else {})
    said = describe_rule(compile_rule(document, STREAM))
    assert said.replace(" and total is the sum of amount over the 10 seconds of the window", "") == WORDS[kind]


def test_when_a_rule_is_effective_in_words_and_a_rule_without_condition_has_no_limits():
    effective = {"effective_from": "2024-01-01T00:00:00Z", "effective_until": "2025-01-01T00:00:00Z"}
    rule = compile_rule({**KINDS["session"], **effective}, STREAM)
    assert describe_rule(rule).endswith(
        "; only for times from 2024-01-01 00:00:00 UTC on and before 2025-01-01 00:00:00 UTC."
    )
    assert find_measure_limits(rule) == {}
    assert describe_measure(rule.measures[2]) == "the number of different values of amount over the session"


@pytest.mark.parametrize("changes", [{"queue": False}, {"severity": "info"}])
def test_a_rule_whose_alerts_are_reports_says_so_in_words(changes: dict[str, Any]):
    said = describe_rule(compile_rule({**KINDS["tumbling"], **changes}, STREAM))
    assert said.endswith("; its alerts are reports, which wait for nobody.")
    assert "report" not in describe_rule(compile_rule({**KINDS["tumbling"], **changes, "queue": True}, STREAM))


def test_c12_2_a_rule_says_whom_its_alerts_are_about_unless_its_key_does():
    document = {key: value for key, value in KINDS["lookback"].items() if key != "entity"}
    said = describe_rule(compile_rule(document, STREAM))
    assert describe_rule(compile_rule({**document, "entities": document["group_by"]}, STREAM)) == said
    about = describe_rule(compile_rule({**document, "entities": [*document["group_by"], "amount"]}, STREAM))
    names = " and ".join([*document["group_by"], "amount"])
    assert about == f"{said.removesuffix('.')}; its alerts are about {names}."


def test_c12_2_an_explained_alert_has_its_tags_runbook_and_whom_it_is_about_beside_its_key():
    alert = {
        "alert_id": "a", "revision": 0, "severity": "high", "rule_id": "r", "rule_version": 1, "message": "much",
        "key": {"k": "x"}, "entities": {"k": "x", "shop": "7"}, "tags": ["attack.t1110", "b"],
    }  # fmt: skip

    def describe(rule: dict[str, Any] | None = None, **changes: Any) -> list[str]:
        row = {**alert, **changes}
        explained = Explanation(alert=row, rule=rule or {}, sentence="In words.", limits={}, timeline=pd.DataFrame())
        return list(describe_alert(explained))

    plain = describe(entities={"k": "x"}, tags=[])
    assert describe() == [*plain, "About: shop = 7.", "Tags: attack.t1110, b."]
    rule = {"document": {"runbook": "Call the customer"}}
    assert describe(rule) == [*describe(), "Runbook: Call the customer"]
    # A row that was written by hand may lack both.
    assert describe(entities=None, tags=None) == plain


def test_the_events_that_an_alert_counted_are_listed_with_what_each_did():
    given = [
        {"id": name, "at": moment(at), "k": "x", "amount": amount, "arrival": 1}
        for at, (name, amount) in enumerate(zip("abcd", (1, 1, 9, 4), strict=True))
    ]
    given.append({"id": "later", "at": moment(100), "k": "y", "amount": 0, "arrival": 2})
    lines = {}
    for kind in ("lookback", "sequence", "event", "tumbling"):
        document = {**KINDS[kind], **({"when": "n = 4"} if kind in ("lookback", "tumbling") else {})}
        explained = explain_all([(document, None)], given)[-1][1]
        lines[kind] = [line.split("  ", 2)[2] for line in [*list_counted_events(explained)][1:]]
    assert lines == {
        "lookback": ["a  n = 1", "b  n = 2", "c  n = 3", "d  n = 4, raised the alert"],
        "sequence": ["a  one", "b  one", "c  more", "d  more, raised the alert"],
        "event": ["d  raised the alert"],
        "tumbling": ["a", "b", "c", "d"],
    }


def test_of_many_events_the_last_are_listed():
    given = [{"id": f"e{at}", "at": moment(at), "k": "x", "amount": 1, "arrival": 1} for at in range(30)]
    document = {**KINDS["lookback"], "window": "1 minute", "when": "n = 30"}
    ((_, explained),) = explain_all([(document, None)], given)
    head, *lines = list_counted_events(explained)
    assert head == "Events, the last 20 of 30:"
    assert [line.split("  ")[2] for line in lines] == [f"e{at}" for at in range(10, 30)]

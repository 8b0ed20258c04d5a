"""C 3.1: a DELETE takes its rows out of state from its commit on, for every kind of rule; earlier verdicts stay."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from cases import cases, resolution_cases
from hypothesis import given
from hypothesis import strategies as st
from test_equals_oracle import assert_engine_equals_oracle, regression, run_engine

from lookback.core.engine.batch import Batch
from lookback.core.engine.evaluation import Evaluator
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.rulebook import RuleBook
from lookback.core.state.shard import ShardState
from lookback.core.streams.declaration import Stream
from lookback.core.streams.eventrows import read_events

TX = Stream.from_dict(
    {
        "stream": "tx",
        "event_id": "id",
        "event_time": "at",
        "fields": {"id": "string", "at": "timestamp", "k": "string", "n": "int"},
        "max_out_of_orderness": "0 seconds",
        "allowed_lateness": "100 microseconds",
    }
)
COUNT = {"total": "sum(n)"}
STEPS = [{"name": "ones", "where": "n = 1", "at_least": 2}, {"name": "two", "where": "n = 2"}]
WAIT = [{"name": "one", "where": "n = 1"}, {"name": "none", "absent": "n = 3", "within": "5 microseconds"}]
# Events at 1, 2, 3 with n = 1; the one at 2 is deleted; then one at 4 with n = 2, and one at 100 to let time pass.
CASES: dict[str, tuple[dict[str, Any], list[tuple[Any, ...]]]] = {
    "lookback": ({"window": "10 microseconds", "measures": COUNT, "when": "n = 2"}, [("e4", 4)]),
    # The late event at 2 enters the windows of those at 2, 3 and 4. The first of them is gone and not judged again; the
    # total of the second is what it was.
    "revise": (
        {"window": "10 microseconds", "measures": COUNT, "when": "total > 1", "late": "revise"},
        [("e2", 2), ("e3", 3), ("e4", 4), ("e4", 5), ("late", 2)],
    ),
    "tumbling": ({"window": {"tumbling": "50 microseconds"}, "measures": COUNT}, [(None, 4), (None, 5)]),
    "session": ({"window": {"session": "20 microseconds"}, "measures": COUNT}, [(None, 4), (None, 5)]),
    "sequence": ({"sequence": {"within": "10 microseconds", "steps": STEPS}}, [("e4", "e1 e3 e4")]),
    "fixed": ({"sequence": {"within": "10 microseconds", "steps": STEPS, "expiry": "fixed"}}, [("e4", "e1 e3 e4")]),
    "absence": ({"sequence": {"within": "2 microseconds", "steps": WAIT}}, [("e1", "e1"), ("e3", "e1 e3")]),
}


@pytest.mark.parametrize("kind", CASES)
def test_c3_1_deleted_events_count_no_more(kind: str) -> None:
    document, expected = CASES[kind]
    assert found(document)[: len(expected)] == expected


def found(document: dict[str, Any]) -> list[tuple[Any, ...]]:
    state = ShardState(RuleBook(TX, {"tx": TX}))
    text = json.dumps({"rule_id": "r", "stream": "tx", "group_by": ["k"], **document})
    alerts = []
    first = [row(f"e{at}", at, 1, 1) for at in (1, 2, 3)]
    deleted = [row("e2", 2, 1, 2)]
    for rows, gone, changes in (
        (first, [], [RuleChange("insert", 0, "r", 1, "active", text)]),
        ([row("e4", 4, 2, 3)], deleted, []),
        ([row("e100", 100, 1, 4)], [], []),
        ([row("late", 2, 1, 5)], [], []),
    ):
        events, _ = read_events(rows, TX, 1)
        removed, _ = read_events(gone or rows, TX, 1)
        marks = {int(commit): int(time) for commit, time in zip(events.commits, events.times, strict=True)}
        marks |= {int(commit): None for commit in removed.commits} if gone else {}
        batch = Batch(events, removed if gone else None, marks, changes)
        alerts += Evaluator(TX).process(state, batch).alerts
    return [(a.event_id, " ".join(a.evidence) if "sequence" in document else a.measures["total"]) for a in alerts]


def row(event_id: str, at: int, n: int, arrival: int) -> dict[str, Any]:
    return {"id": event_id, "at": at, "k": "x", "n": n, "arrival": arrival}


def commits(*batches: tuple[list[dict[str, Any]], list[dict[str, Any]]], **document: Any) -> list[tuple[Any, ...]]:
    """Evaluates batches of (events, deleted events) and returns the results."""
    state = ShardState(RuleBook(TX, {"tx": TX}))
    text = json.dumps({"rule_id": "r", "stream": "tx", "group_by": ["k"], **document})
    changes, alerts = [RuleChange("insert", 0, "r", 1, "active", text)], []
    for rows, gone in batches:
        events, _ = read_events([*rows, *gone], TX, 1)
        at = len(rows)
        kept, deleted = events.take(slice(0, at)), events.take(slice(at, None))
        marks: dict[int, int | None] = {row["arrival"]: None for row in gone}
        for row in rows:
            marks[row["arrival"]] = max(row["at"], marks.get(row["arrival"]) or row["at"])
        output = Evaluator(TX).process(state, Batch(kept, deleted if gone else None, marks, changes))
        alerts, changes = alerts + output.alerts, []
        state.drop_old()
    return [(alert.event_id, alert.measures.get("total", " ".join(alert.evidence))) for alert in alerts]


def test_c3_1_a_session_that_a_delete_shortens_ends_in_its_own_time() -> None:
    #  1       5       9  10  11  12      15      gap 5: up to 15; without the event at 9 up to 11
    #  x───────x───────x───────┤───────────┤
    rows = [row("a", 1, 1, 1), row("b", 5, 10, 1), row("c", 9, 100, 1)]
    batches = [(rows, []), ([], [row("c", 9, 100, 2)]), ([{**row("d", 12, 1000, 3), "k": "other"}], [])]
    document = {"window": {"session": "5 microseconds"}, "measures": COUNT}
    assert commits(*batches, **document) == [(None, 11)]
    assert commits(*batches[::2], **document) == []


@pytest.mark.parametrize("window", ["10 microseconds", {"session": "20 microseconds"}])
def test_c3_1_a_delete_takes_out_its_own_event_among_others_of_its_time_and_value(window: object) -> None:
    rows = [row("a", 1, 7, 1), row("b", 1, 8, 2), row("c", 1, 7, 3)]
    document = {"window": window, "measures": {"total": "last(n) filter (where n > 5)"}}
    document |= {"when": "total > 0", "early": True} if isinstance(window, dict) else {"when": "n = 1"}
    end = ([row("now", 2, 1, 5)], [])
    assert commits((rows, []), ([], [row("c", 1, 7, 4)]), end, **document)[-1][1] == 8
    assert commits((rows, []), ([], [row("a", 1, 7, 4)]), end, **document)[-1][1] == 7


def test_c3_1_a_match_that_had_too_many_goes_on_without_the_one_that_was_too_many() -> None:
    steps = [{"name": "one", "where": "n = 1", "at_most": 1}, {"name": "two", "where": "n = 2"}]
    document = {"sequence": {"within": "10 microseconds", "steps": steps, "expiry": "fixed"}}
    first, last = [row("a", 1, 1, 1), row("b", 2, 1, 1)], ([row("c", 4, 2, 3)], [])
    assert commits((first, []), last, **document) == []
    assert commits((first, []), ([], [row("b", 2, 1, 2)]), last, **document) == [("c", "a c")]


def test_c3_1_a_delete_brings_back_nothing_that_an_alert_has_emptied() -> None:
    document = {"window": "50 microseconds", "measures": COUNT, "when": "total >= 3", "reset_on_alert": True}
    other = {**row("q", 1, 1, 1), "k": "other"}
    early, late = [row("a", 1, 1, 1), row("b", 2, 1, 1)], row("e", 9, 1, 9)
    alert = row("c", 3, 1, 3)
    gone = [{**other, "arrival": 2}]
    assert commits(([other, *early], []), ([alert], []), ([late], []), **document) == [("c", 3)]
    # The DELETE cuts a batch, so that the alert falls into its second part; or it comes after the alert.
    assert commits(([other, *early, alert], gone), ([late], []), **document) == [("c", 3)]
    assert commits(([other, *early], []), ([alert], []), ([late], [{**other, "arrival": 8}]), **document) == [("c", 3)]


# Against the oracle, which knows every event by itself ------------------------------------------------------------------


@st.composite
def deleting_cases(draw: st.DrawFn) -> dict[str, Any]:
    """Cases as of `cases` with events that later commits delete.

    Of events at one time that are alike in all that is kept, one that did not count would take out one that did; and from
    a bucket of a window with a resolution any event is subtracted that was not discarded. So those are left out.
    """
    case = draw(cases(updates=True))
    for change in case["changes"]:
        for window in windows_of(change["document"] or {}):
            window.pop("resolution", None)
    return draw(with_deletes(case))


@st.composite
def with_deletes(draw: st.DrawFn, case: dict[str, Any]) -> dict[str, Any]:
    times = Counter(row["at"] for row in case["rows"])
    arrivals = sorted({row["arrival"] for row in case["rows"]})
    deleted = []
    for at, row in enumerate(case["rows"]):
        later = [arrival for arrival in arrivals if arrival > row["arrival"]]
        if times[row["at"]] == 1 and later and draw(st.integers(0, 3)) == 0:
            deleted.append((at, draw(st.sampled_from(later[:4]))))
    return {**case, "deleted": deleted}


@st.composite
def deleting_resolution_cases(draw: st.DrawFn) -> dict[str, Any]:
    """Cases as of `resolution_cases` with deletions, of rules from which nothing but lateness keeps an event away."""
    case = draw(resolution_cases())
    first = case["changes"][0]
    first["document"].pop("reset_on_alert", None)
    return draw(with_deletes(case | {"changes": [first]}))


def windows_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The windows of a rule that are mappings."""
    measures = document.get("measures", {}).values()
    found = [document.get("window"), *(spec["window"] for spec in measures if isinstance(spec, dict))]
    return [window for window in found if isinstance(window, dict)]


@given(deleting_cases())
def test_c3_1_deletes_equal_the_oracle_for_any_cut_and_shard_count(case: dict[str, Any]) -> None:
    assert_engine_equals_oracle(case)


@given(deleting_resolution_cases())
def test_c3_1_deletes_from_buckets_equal_the_oracle(case: dict[str, Any]) -> None:
    assert_engine_equals_oracle(case)


# What has no match ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gone", "noted"),
    [
        (row("a", 1, 1, 2), False),
        # It was updated since: the 5 that it came with still counts, and the log says so.
        (row("b", 2, 7, 2), True),
        # Too late to count when it came, and nothing else is at its time.
        (row("never", 3, 1, 2), False),
        # The same, at the time of another.
        (row("never", 2, 1, 2), True),
        ({**row("b", 2, 5, 2), "k": "other"}, False),
    ],
)
def test_c3_1_a_delete_that_meets_other_values_is_told(gone: dict[str, Any], *, noted: bool) -> None:
    state = ShardState(RuleBook(TX, {"tx": TX}))
    rule = {
        "rule_id": "r",
        "stream": "tx",
        "group_by": ["k"],
        "window": "50 microseconds",
        "measures": COUNT,
        "when": "n > 100",
    }
    changes = [RuleChange("insert", 0, "r", 1, "active", json.dumps(rule))]
    events, _ = read_events([row("a", 1, 1, 1), row("b", 2, 5, 1), gone], TX, 1)
    Evaluator(TX).process(state, Batch(events.take(slice(0, 2)), None, {1: 2}, changes))
    notes = Evaluator(TX).process(state, Batch(events.take(slice(0, 0)), events.take(slice(2, 3)), {2: None})).notes
    assert [(note.action, note.rule_id, note.version, note.arrival) for note in notes] == (
        [("delete_unmatched", "r", 1, 2)] if noted else []
    )
    assert state.state_rows() == (1 if gone["id"] == "a" else 2)


@pytest.mark.parametrize("linked", ["element_at(s0.at, -1) < at", "s0.count >= 1 and n = 2", "n = 2"])
def test_c3_1_a_wait_goes_on_although_the_event_of_an_earlier_step_is_deleted(linked: str) -> None:
    """The deleted event had to be there for the wait to begin; what is shown of it is gone."""
    steps = [
        {"name": "s0", "where": "n = 1"}, {"name": "s1", "where": linked},
        {"name": "silent", "absent": "n = 3", "within": "3 microseconds"},
    ]  # fmt: skip
    document = {"group_by": ["k"], "sequence": {"within": "8 microseconds", "steps": steps}}
    rows = [
        {"id": name, "at": at, "arrival": arrival, "n": n}
        for arrival, (name, at, n) in enumerate([("a", 29, 1), ("b", 31, 2), ("c", 30, 0), ("d", 50, 0)], 1)
    ]
    case = regression("", [document], rows) | {"deleted": [(0, 3)]}
    output = run_engine(case)
    assert not output.failures
    assert [(alert.event_id, alert.arrival) for alert in output.alerts] == [("b", 4)]
    assert_engine_equals_oracle(case)

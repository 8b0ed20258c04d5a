"""Contract 11.3: rules that ask lists, at the exact edges. Times in the axes are seconds."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

import numpy as np
import pytest
from test_equals_oracle import DictStore, new_state

import lookback
from growth import takes_at_most
from lookback.core.engine.batch import Batch
from lookback.core.engine.evaluation import Evaluator
from lookback.core.engine.schedule import Schedule, WaitingChange, judge_batch
from lookback.core.errors import EventError, RuleError, StateError
from lookback.core.explaining.evidence import ListHistory
from lookback.core.expressions.compiling import compile_expression, drop_uncertain
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.coverage import find_coverage
from lookback.core.rules.memberships import find_unknown_lists
from lookback.core.rules.remarks import find_remarks
from lookback.core.rules.rulebook import RuleBook
from lookback.core.rules.rulelog import LogRow
from lookback.core.rules.wording import describe_rule
from lookback.core.state.shard import MANIFEST, ShardState, decode_text, encode_text
from lookback.core.streams.arrival import find_marks
from lookback.core.streams.declaration import Stream
from lookback.core.streams.declarations import Declarations
from lookback.core.streams.eventrows import read_events
from lookback.core.values.keys import encode_keys
from lookback.core.values.listchanges import FOREVER, ListChange
from lookback.core.values.lists import KnownLists, Lists, _List, _Values
from lookback.testing.rule_tests import check_rule

SECOND = 1_000_000
STREAM = Stream.from_dict(
    {
        "stream": "tx",
        "event_id": "id",
        "event_time": "at",
        "fields": {"id": "string", "at": "timestamp", "c": "int", "k": "string", "a": "decimal(10,2)"},
        "max_out_of_orderness": "10 seconds",
        "allowed_lateness": "20 seconds",
    }
)


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


def without(document: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key not in keys}


def event(name: str, second: float, **more: Any) -> dict[str, Any]:
    return {"id": name, "at": round(second * SECOND), "c": 1, "k": "x", "a": 1, **more}


def found(harness: lookback.Harness) -> list[tuple[str | None, str]]:
    return [(alert.event_id, alert.verdict) for alert in harness.alerts]


# Membership as of arrival, for good -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "asking",
    [
        {"where": "in_list(k, 'l')"},
        {"measures": {"n": "count(*) filter (where in_list(k, 'l'))"}},
        {"measures": {"n": "sum(case when in_list(k, 'l') then 1 else 0 end)"}},
        {"window": {"lookback": "5 seconds", "resolution": "1 second"}, "where": "in_list(k, 'l')"},
    ],
)
def test_c11_3_what_counts_is_what_was_in_the_list_when_the_event_arrived(asking: dict[str, Any]) -> None:
    # list:  {}      {x}              {}
    # event:    a(1)    b(2)   c(3)      d(4, of y)
    harness = lookback.Harness(STREAM)
    harness.rule(rule(**{"when": "n >= 2", **asking}))
    harness.rule(rule(rule_id="all", measures={"n": "count(*) filter (where in_list(k, 'l'))"}, when="true"))
    harness.events([event("a", 1)])
    harness.lists({"l": ["x"]})
    harness.events([event("b", 2), event("c", 3)])
    harness.lists({"l": []})
    harness.events([event("d", 4, k="y")])
    counted = {alert.event_id: alert.measures["n"] for alert in harness.alerts if alert.rule_id == "all"}
    assert counted == {"a": 0, "b": 1, "c": 2, "d": 2}
    # d is in no list, so a rule with `where` does not see it.
    seen = ["c"] if "where" in asking else ["c", "d"]
    assert [alert.event_id for alert in harness.alerts if alert.rule_id == "r"] == seen


def test_c11_3_steps_until_and_absent_take_what_was_in_the_list_when_the_event_arrived() -> None:
    steps = [{"name": "first", "where": "in_list(k, 'l')"}, {"name": "second", "where": "not in_list(k, 'l')"}]
    document = without(rule(sequence={"within": "1 minute", "steps": steps}), "window", "measures", "when")
    harness = lookback.Harness(STREAM)
    harness.rule(document)
    harness.lists({"l": ["x"]})
    harness.events([event("a", 1)])
    # a stays a first step, and x is a second one from now on.
    harness.lists({"l": []})
    harness.events([event("b", 2)])
    assert [(alert.event_id, alert.evidence) for alert in harness.alerts] == [("b", ["a", "b"])]


def test_c11_3_a_step_that_reads_earlier_ones_keeps_the_answer_of_the_list() -> None:
    """The condition of an event that arrives out of order is judged with what it was told when it arrived."""
    second = "element_at(first.a, 1) < a and (in_list(k, 'l') or a > 100)"
    steps = [
        {"name": "first", "where": "a < 5"},
        {"name": "second", "where": second},
        {"name": "third", "where": "a = 50"},
    ]
    document = without(rule(sequence={"within": "1 minute", "steps": steps}), "window", "measures", "when")
    for listed in (True, False):
        harness = lookback.Harness(STREAM)
        harness.rule(document)
        harness.lists({"l": ["x"] if listed else []})
        harness.events([event("b", 5, a=10)])
        harness.lists({"l": [] if listed else ["x"]})
        harness.events([event("a", 4, a=1), event("c", 6, a=50)])
        expected = [("a", "b", "c")] if listed else []
        # With the value in the list, c would be a second step too, and none follows.
        assert [tuple(alert.evidence) for alert in harness.alerts] == expected


def test_c11_3_a_late_event_is_wanted_or_not_by_the_list_as_it_arrives() -> None:
    harness = lookback.Harness(STREAM)
    harness.rule(rule(where="in_list(k, 'l')"))
    harness.events([event("a", 100)])
    harness.events([event("b", 60)])
    harness.lists({"l": ["x"]})
    harness.events([event("c", 60)])
    assert [(late.event_id, late.action) for late in harness.late_events] == [("c", "discarded")]


# Expiry, NULL, errors ---------------------------------------------------------------------------------------------------


def test_c11_3_a_value_counts_for_events_before_its_expiry_whenever_they_arrive() -> None:
    # expires at 10:   a(9.999999)  b(10)   c(9, out of order)
    harness = lookback.Harness(STREAM)
    harness.lists({"l": [{"value": "x", "expires_at": 10 * SECOND}]})
    harness.rule(rule(where="in_list(k, 'l')"))
    harness.events([event("a", 9.999999), event("b", 10), event("c", 9)])
    assert [alert.event_id for alert in harness.alerts] == ["a", "c"]


def test_c11_3_null_gives_null_and_values_are_compared_as_texts() -> None:
    harness = lookback.Harness(STREAM)
    harness.lists({"l": ["x", 1, "1.50"]})
    for rule_id, where in {
        "null": "in_list(k, 'l') is null",
        "not": "not in_list(k, 'l')",
        "int": "in_list(c, 'l')",
        "decimal": "in_list(a, 'l')",
        "expression": "in_list(lower(k), 'l')",
        "parameter": "in_list(k, :name)",
    }.items():
        more = {"parameters": {"name": "l"}} if rule_id == "parameter" else {}
        harness.rule(rule(rule_id=rule_id, where=where, **more))
    harness.events([event("a", 1, k=None, c=2), event("b", 2, k="X", a="1.5"), event("c", 3, c=None)])
    seen = {
        each: [alert.event_id for alert in harness.alerts if alert.rule_id == each]
        for each in ("null", "not", "int", "decimal", "expression", "parameter")
    }
    assert seen == {
        "null": ["a"],
        "not": ["b"],
        "int": ["b"],
        "decimal": ["b"],
        "expression": ["b", "c"],
        "parameter": ["c"],
    }


def test_c11_3_an_error_of_what_is_looked_up_is_an_error_of_the_condition() -> None:
    harness = lookback.Harness(STREAM)
    harness.lists({"l": [5]})
    harness.rule(rule(where="in_list(10 div c, 'l')"))
    harness.events([event("a", 1, c=2), event("b", 2, c=0)])
    assert found(harness) == [("a", "raised")]
    assert [(row.action, row.message[:7]) for row in harness.errors] == [("failed", "1 event")]


# In `when`: as of judging -------------------------------------------------------------------------------------------------


def test_c11_3_when_asks_the_list_as_of_judging() -> None:
    # [0, 5) ends with W = 5; x goes into the list after its events, and before it ends.
    document = rule(window={"tumbling": "5 seconds"}, when="n >= 1 and in_list(c, 'l')", early=True)
    harness = lookback.Harness(STREAM)
    harness.rule(document)
    harness.events([event("a", 1), event("b", 2)])
    assert harness.alerts == []
    harness.lists({"l": [1]})
    harness.events([event("c", 15)])
    assert [(alert.window_start.second, alert.measures["n"], alert.verdict) for alert in harness.alerts] == [
        (15, 1, "raised"),
        (0, 2, "raised"),
    ]
    # A late event has the window judged again, by the list of then.
    harness.lists({"l": []})
    harness.events([event("d", 3)])
    assert [(alert.revision, alert.verdict) for alert in harness.alerts][2:] == [(1, "retracted")]


@pytest.mark.parametrize(
    ("window", "end"),
    [
        ({"tumbling": "5 seconds"}, 5 * SECOND),
        ({"sliding": "10 seconds", "slide": "5 seconds"}, 5 * SECOND),
        ({"session": "3 seconds"}, 5 * SECOND + 1),
    ],
)
def test_c11_3_of_a_window_the_time_at_its_end_decides_whether_a_value_has_expired(window: Any, end: int) -> None:
    """The event time of its alert: the exclusive end."""
    for expires, raised in ((end, False), (end + 1, True)):
        harness = lookback.Harness(STREAM)
        harness.lists({"l": [{"value": 1, "expires_at": expires}]})
        harness.rule(rule(window=window, when="in_list(c, 'l')"))
        harness.events([event("a", 2), event("z", 30, c=2)])
        ends = [alert.window_end for alert in harness.alerts]
        assert bool(ends) == raised


def test_c11_3_windows_with_the_same_events_that_end_apart_are_asked_apart() -> None:
    """Otherwise sliding windows with the same rows share one verdict."""
    harness = lookback.Harness(STREAM)
    harness.lists({"l": [{"value": 1, "expires_at": 7 * SECOND}]})
    document = rule(window={"sliding": "4 seconds", "slide": "1 second"}, when="in_list(c, 'l')", early=True)
    harness.rule(document)
    harness.events([event("a", 4)])
    assert [alert.window_end.second for alert in harness.alerts] == [5, 6]


def test_c11_3_a_revision_asks_the_list_of_the_moment_that_it_is_judged() -> None:
    harness = lookback.Harness(STREAM)
    harness.rule(rule(when="n >= 1 and not in_list(k, 'l')", late="revise"))
    harness.events([event("b", 4)])
    harness.lists({"l": ["x"]})
    # c enters the window of b, which is judged again; a lies after it and is not.
    harness.events([event("c", 3)])
    assert [(alert.event_id, alert.revision, alert.verdict) for alert in harness.alerts] == [
        ("b", 0, "raised"),
        ("b", 1, "retracted"),
    ]


# Deletes --------------------------------------------------------------------------------------------------------------


def process(
    document: dict[str, Any], steps: list[Any], versions: dict[int, Lists], shards: int = 1
) -> tuple[list[Any], list[LogRow]]:
    """Runs commits of events, deletes and list commits, in order: [event, ...], ("delete", event) or the number of a commit."""
    evaluator, state = Evaluator(STREAM, lists=KnownLists(versions)), new_state(STREAM)
    state.begin(DictStore())
    empty = read_events([], STREAM, 1)[0]
    changes = [RuleChange("insert", 0, "r", 1, "active", json.dumps(document))]
    evaluator.process(state, Batch(empty, changes=changes))
    rows: list[Any] = []
    notes: list[LogRow] = []
    commit = 0
    for step in steps:
        if isinstance(step, int):
            batch = Batch(empty, changes=[list_change(step)])
        else:
            commit += 1
            deleted = isinstance(step, tuple)
            events = read_events(
                [{**each, "arrival": commit} for each in (step[1:] if deleted else step)], STREAM, commit
            )[0]
            parts = (empty, events) if deleted else (events, None)
            batch = Batch(*parts, marks={commit: None if deleted else int(events.times.max())})
        output = evaluator.process(state, batch)
        rows += output.alerts
        notes += output.notes
    return rows, notes


def list_change(commit: int, **more: Any) -> RuleChange:
    return RuleChange("insert", 100 + commit, "*", commit, "lists", json.dumps({"commit": commit, **more}))


LISTED = Lists.empty().apply([ListChange("insert", 1, "l", "x")])
EMPTY = LISTED.apply([ListChange("delete", 2, "l", "x")])


@pytest.mark.parametrize(
    ("more", "counts"),
    [
        ({"where": "in_list(k, 'l')"}, [1, 1]),
        ({"measures": {"n": "count(*) filter (where in_list(k, 'l'))"}}, [1, 1]),
        ({"window": {"lookback": "5 seconds", "resolution": "1 second"}, "where": "in_list(k, 'l')"}, [1, 1]),
        ({"measures": {"n": "sum(case when in_list(k, 'l') then 100 else 1 end)"}}, [100, 100]),
        ({"window": {"session": "5 seconds"}, "where": "in_list(k, 'l')", "early": True}, [1, 1]),
        ({"window": {"session": "5 seconds"}, "measures": {"n": "max(case when in_list(k, 'l') then a end)"}, "early": True}, [2, 3]),
    ],
)  # fmt: skip
def test_c11_3_a_delete_removes_what_the_event_put_in_whatever_lists_say_now(
    more: dict[str, Any], counts: list[int]
) -> None:
    """a came while its value was in the list, and is deleted when it is not; what comes after counts without it."""
    document = rule(**{"measures": {"n": "count(*)"}, "when": "true", **more})
    steps = [1, [event("a", 1, a=2)], 2, ("delete", event("a", 1, a=2)), 1 + 2, [event("b", 2, a=3)]]
    rows, notes = process(document, steps, {1: LISTED, 2: EMPTY, 3: LISTED})
    assert [row.measures["n"] for row in rows if row.verdict == "raised"] == counts
    assert not notes


def test_c11_3_a_delete_takes_out_nothing_of_an_event_that_the_list_kept_out() -> None:
    """b and a have another time, so the row that is there is not b's; and no log says that it is missing."""
    document = rule(where="in_list(k, 'l')", when="true")
    steps = [[event("b", 1)], 1, [event("a", 2)], ("delete", event("b", 1)), [event("c", 3)]]
    rows, notes = process(document, steps, {1: LISTED})
    assert [row.measures["n"] for row in rows] == [1, 2]
    assert not notes


def test_c11_3_that_an_event_of_the_list_has_the_key_and_time_of_a_deleted_one_is_not_logged() -> None:
    """The list explains that b is not in the windows, so nobody has to look for it."""
    document = rule(where="in_list(k, 'l')", measures={"n": "sum(a)"}, when="true")
    steps = [1, [event("a", 1, a=2), event("b", 1, k="y", a=3)], ("delete", event("b", 1, k="y", a=3)), [event("c", 2)]]
    rows, notes = process(document, steps, {1: LISTED})
    assert [row.measures["n"] for row in rows] == [2, 3]
    assert not notes


def test_c11_3_of_a_window_with_a_resolution_a_delete_takes_out_what_went_in_after_its_time_has_passed_too() -> None:
    """Rows of a bucket that has passed are combined elsewhere; then none could tell that b was left out."""
    # list:    {x}                                {x, y}
    # event:      a(1, x)  b(2, y)    z(40, x)            delete b         c(41, x)
    both = LISTED.apply([ListChange("insert", 2, "l", "y")])
    window = {"lookback": "1 minute", "resolution": "10 seconds"}
    document = rule(window=window, where="in_list(k, 'l')", when="true")
    late = event("b", 2, k="y")
    steps = [1, [event("a", 1), late], [event("z", 40)], 2, ("delete", late), [event("c", 41)]]
    rows, notes = process(document, steps, {1: LISTED, 2: both})
    assert [row.measures["n"] for row in rows] == [1, 2, 3]
    assert not notes


def test_c10_6_an_event_that_must_have_been_kept_and_is_not_found_is_still_logged() -> None:
    """Its value has been updated since it came, which no list explains."""
    document = rule(measures={"n": "sum(a) filter (where in_list(k, 'l') or not in_list(k, 'l'))"}, when="true")
    _, notes = process(document, [[event("a", 1, a=2)], ("delete", event("a", 1, a=7))], {})
    assert [row.action for row in notes] == ["delete_unmatched"]


# Changes in the order of the rules feed ---------------------------------------------------------------------------------


def test_c11_3_every_stream_logs_each_commit_of_lists_once_whether_a_rule_names_one_or_not() -> None:
    book = RuleBook(STREAM, {STREAM.name: STREAM, "other": dataclasses.replace(STREAM, name="other")})
    rows = [
        list_change(4, stream="tx", message="known: 2 added\n, 1 removed"),
        list_change(4, stream="tx"),
        list_change(3),
        list_change(9, stream="other"),
        list_change(5),
    ]
    log, commands = book.apply([dataclasses.replace(row, commit=at) for at, row in enumerate(rows)], 17)
    assert [(row.rule_id, row.version, row.action, row.message, row.arrival) for row in log] == [
        ("*", 4, "list", "known: 2 added , 1 removed", 17),
        ("*", 5, "list", "", 17),
    ]
    assert [(each.action, each.commit) for each in commands] == [("lists", 4), ("lists", 5)]
    assert book.lists_commit == 5


@pytest.mark.parametrize(
    "document", [None, "{}", '{"commit": true}', '{"commit": -1}', '{"commit": "3"}', '{"commit": 1e3}']
)
def test_c11_3_a_row_that_names_no_commit_of_lists_is_rejected_with_the_remedy(document: str | None) -> None:
    book = RuleBook(STREAM, {STREAM.name: STREAM})
    log, commands = book.apply([RuleChange("insert", 1, "*", None, "lists", document)], None)
    assert (commands, [row.action for row in log], book.lists_commit) == ([], ["rejected"], None)
    assert "the stream writes such rows itself" in log[0].message


def test_c11_3_a_list_changes_between_two_commits_in_order_with_changes_of_rules_and_advances() -> None:
    """The window [0, 5) ends by an advance, before x comes into the list and after it."""
    document = rule(window={"tumbling": "5 seconds"}, when="in_list(c, 'l')")
    listed = Lists.empty().apply([ListChange("insert", 1, "l", "1")])
    events = read_events([event("a", 1)], STREAM, 1)[0]
    advance = RuleChange("insert", 50, "*", None, "advance", json.dumps({"time": 6 * SECOND}))
    for commit, raised in ((40, True), (60, False)):
        evaluator, state = Evaluator(STREAM, lists=KnownLists({1: listed})), new_state(STREAM)
        state.begin(DictStore())
        first = [RuleChange("insert", 0, "r", 1, "active", json.dumps(document))]
        evaluator.process(state, Batch(events, marks=find_marks(events, events.commits), changes=first))
        change = dataclasses.replace(list_change(1), commit=commit)
        output = evaluator.process(state, Batch(events.take(slice(0, 0)), changes=[advance, change]))
        assert bool(output.alerts) == raised


def test_c11_3_the_state_knows_the_commit_of_lists_and_no_value() -> None:
    evaluator, state, store = Evaluator(STREAM, lists=KnownLists({7: LISTED})), new_state(STREAM), DictStore()
    state.begin(store)
    assert state.lists_commit is None
    empty = read_events([], STREAM, 1)[0]
    evaluator.process(state, Batch(empty, changes=[list_change(7)]))
    state.save()
    manifest = json.loads(decode_text(store.pages[MANIFEST], ""))
    assert manifest["lists_commit"] == 7
    assert sum(map(len, store.pages.values())) < 1_000
    other = new_state(STREAM)
    assert other.load(store)
    assert other.lists_commit == 7

    store.pages[MANIFEST] = encode_text(json.dumps({**manifest, "lists_commit": "7"}))
    with pytest.raises(StateError, match="start with a new checkpoint"):
        new_state(STREAM).load(store)


def test_c11_3_an_evaluator_reads_only_the_lists_that_rules_in_force_name() -> None:
    asked: list[tuple[int | None, frozenset[str]]] = []

    class Source:
        def read(self, commit: int | None, names: frozenset[str]) -> Lists:
            asked.append((commit, names))
            return LISTED.select(names)

        def knows(self, commit: int) -> bool:
            return True

    evaluator, state = Evaluator(STREAM, lists=Source()), new_state(STREAM)
    state.begin(DictStore())
    documents = [
        rule(rule_id="plain"),
        rule(rule_id="first", where="in_list(k, 'l')"),
        rule(rule_id="second", when="in_list(k, 'm')"),
    ]
    for number, document in enumerate(documents):
        change = RuleChange("insert", number, document["rule_id"], 1, "active", json.dumps(document))
        later = read_events([event("a", 1)], STREAM, number + 1)[0]
        evaluator.process(
            state, Batch(later, marks=find_marks(later, later.commits), changes=[change, list_change(number + 1)])
        )
    assert asked == [(2, frozenset("l")), (3, frozenset("lm"))]


def test_c11_3_state_made_anew_binds_the_commits_of_lists_at_the_arrivals_of_the_log() -> None:
    """Both rows come at once, with rules between them; `rule_log` says after which commit each took effect."""
    document = json.dumps(rule(where="in_list(k, 'l')"))
    changes = [
        RuleChange("insert", 1, "r", 1, "active", document),
        dataclasses.replace(list_change(3), commit=2),
        # Names a commit that is known, so it was not logged.
        dataclasses.replace(list_change(3), commit=3),
        dataclasses.replace(list_change(5), commit=4),
    ]
    log = [
        LogRow("tx", "r", 1, "activated", "", None, 1),
        LogRow("tx", "*", 3, "list", "", 1, 2),
        LogRow("tx", "*", 5, "list", "", 3, 4),
    ]
    schedule = Schedule.from_log(changes, log, 9, Declarations.of(STREAM))
    assert dict(schedule.arrivals) == {1: None, 2: 1, 3: 3, 4: 3}
    assert not schedule.unexplained
    events = read_events([event(name, at) for at, name in enumerate("abcde", 1)], STREAM, 1)[0]
    evaluator, state = Evaluator(STREAM, lists=KnownLists({3: LISTED, 5: EMPTY})), new_state(STREAM)
    state.begin(DictStore())
    bound = [(change, schedule.after(change.commit)) for change in changes]
    waiting = [WaitingChange(change, after) for change, after in bound if after is not None]
    batch = Batch(
        events, marks=find_marks(events, events.commits), changes=[change for change, after in bound if after is None]
    )
    output, left = judge_batch(evaluator, state, batch, waiting)
    assert [alert.event_id for alert in output.alerts] == ["b", "c"]
    assert [dataclasses.astuple(row) for row in output.log] == [dataclasses.astuple(row) for row in log]
    assert not left
    # A row of rules that is gone leaves the log unexplained.
    assert Schedule.from_log(changes[:1], log, 9, Declarations.of(STREAM)).unexplained == {"*"}


def test_c11_3_the_lists_of_a_commit_of_events_are_those_that_took_effect_before_it() -> None:
    history = ListHistory(KnownLists({1: LISTED, 2: EMPTY}), [(None, 1), (4, 2), (4, 3)])
    assert [history.commit_at(commit) for commit in (0, 4, 5, 9)] == [1, 1, 3, 3]
    assert ListHistory().commit_at(5) is None


# Rules: compiling, refusing, dispatching -----------------------------------------------------------------------------------


def test_c11_3_a_rule_names_its_lists_and_unknown_ones_are_found_where_they_stand() -> None:
    steps = [{"name": "one", "where": "in_list(k, 'seen')"}, {"name": "two", "absent": "in_list(c, 'gone')"}]
    sequence = without(
        rule(sequence={"within": "1 minute", "steps": steps, "until": "in_list(k, 'ends')"}),
        "window",
        "measures",
        "when",
    )
    asking = rule(
        where="in_list(k, 'known')",
        measures={
            "n": "count(*) filter (where in_list(c, 'others'))",
            "m": "max(case when in_list(k, 'known') then a end)",
        },
        when="n > 1 and not in_list(k, 'allowed')",
    )
    assert compile_rule(asking, STREAM).lists == {"known", "others", "allowed"}
    assert compile_rule(rule(), STREAM).lists == frozenset()
    assert list(map(str, find_unknown_lists(compile_rule(asking, STREAM), ["know", "others"]))) == [
        "unknown list 'known'; did you mean 'know'?, or create it with `lookback lists add NAME VALUE` (where)",
        "unknown list 'allowed'; known lists: know, others, or create it with `lookback lists add NAME VALUE` (when)",
        "unknown list 'known'; did you mean 'know'?, or create it with `lookback lists add NAME VALUE` (measures.m)",
    ]
    places = [problem.place for problem in find_unknown_lists(compile_rule(sequence, STREAM), [])]
    assert places == ["sequence.steps[0].where", "sequence.steps[1].absent", "sequence.until"]


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("in_list(k)", "in_list() takes a field and the name of a list, such as in_list(terminal_id, 'known-terminals'); got 1"),
        ("in_list(k, k)", "in_list(): the list is named by a text in quotes, such as "),
        ("in_list(k, ' ')", "in_list(): the list is named by a text in quotes, such as "),
        ("in_list('a', 'l')", "in_list(): 'a' is the same for all events; look a field up, such as "),
        ("in_list(cast(a as double), 'l')", "in_list() looks up texts: cast from double to string is not supported"),
        ("inlist(k, 'l')", "function inlist() is not allowed; did you mean in_list()?"),
        ("in_list(kk, 'l')", "unknown field 'kk'; did you mean 'k'?"),
        ("in_list(k, 'l') > 1", "mixes boolean and int; cast them to one type"),
    ],
)  # fmt: skip
def test_c4_a_wrong_question_to_a_list_is_refused_with_the_remedy(where: str, message: str) -> None:
    with pytest.raises(RuleError) as refused:
        compile_rule(rule(where=where), STREAM)
    assert message in str(refused.value)


def test_c4_a_step_looks_up_fields_of_its_event_alone() -> None:
    steps = [{"name": "one", "where": "true"}, {"name": "two", "where": "in_list(element_at(one.k, 1), 'l')"}]
    document = without(rule(sequence={"within": "1 minute", "steps": steps}), "window", "measures", "when")
    with pytest.raises(
        RuleError, match=r"in_list\(\) cannot read one.k of an earlier step, .*; look up a field of the event"
    ):
        compile_rule(document, STREAM)


@pytest.mark.parametrize(
    ("where", "sent"),
    [
        ("in_list(k, 'l')", None),
        ("not in_list(c, 'l')", None),
        ("in_list(k, 'l') and a > 1", "a > 1"),
        ("a > 1 and not in_list(k, 'l') and c = 2", "a > 1 and c = 2"),
        # An error of what is looked up counts, so dispatch must send the event.
        ("in_list(10 div c, 'l') and a > 1", "(cast(10 div c as string) is null or true) and a > 1"),
        # What else may depend on the answer.
        ("in_list(k, 'l') or a > 1", None),
        ("a > 1 and in_list(k, 'l') is null", None),
        ("a > 1 and (in_list(k, 'l') or 1 / c > 2)", None),
        ("a > 1 and in_list(case when in_list(k, 'm') then k end, 'l')", None),
    ],
)
def test_c11_3_dispatch_sends_at_least_the_events_that_a_rule_may_want(where: str, sent: str | None) -> None:
    compiled = compile_rule(rule(where=where), STREAM)
    assert find_coverage([compiled]).wants == {(("c",), sent)}
    assert {"c", *({"k"} if "(k" in where else set())} <= find_coverage([compiled]).fields
    assert compiled.where is not None
    assert compiled.where.is_readable


def test_c11_3_a_weaker_condition_holds_wherever_the_condition_may_hold() -> None:
    schema = {name: STREAM.fields[name] for name in ("k", "c", "a")}
    events = read_events(
        [event(f"{at}", at, k=k, c=c, a=a) for at, (k, c, a) in enumerate(
            [(k, c, a) for k in ("x", "y", None) for c in (0, 1, None) for a in (1, 2, None)]
        )],
        STREAM, 1,
    )[0]  # fmt: skip
    for where in (
        "in_list(10 div c, 'l') and a > 1",
        "a > 1 and not in_list(k, 'l') and 1 / c > 0",
        "not in_list(lower(k), 'l') and c = 1",
    ):
        condition = compile_expression(where, schema)
        weaker = drop_uncertain(condition)
        assert weaker is not None
        sent = events.value(weaker)
        is_sent = sent.is_true() | (np.zeros(len(events), dtype=bool) if sent.error is None else sent.error)
        for lists in (EMPTY, LISTED, Lists.empty().apply([ListChange("insert", 1, "l", "10")])):
            value = events.look_up(condition.memberships, lists).value(condition)
            wanted = value.is_true() | (np.zeros(len(events), dtype=bool) if value.error is None else value.error)
            assert not (wanted & ~is_sent).any()


def test_c11_3_a_rule_in_words_and_its_remarks_name_the_lists() -> None:
    document = rule(where="in_list(k, 'known')", tests=[{"name": "t", "events": [], "alerts": []}])
    assert describe_rule(compile_rule(document, STREAM)).endswith(
        "only events where in_list(k, 'known'); the list known is asked when an event arrives."
    )
    assert [str(remark) for remark in find_remarks(compile_rule(document, STREAM))] == [
        "list 'known' is empty in every test; write `lists: {known: [...]}` into one (tests)"
    ]
    document["tests"][0]["lists"] = {"known": ["x"]}
    assert find_remarks(compile_rule(document, STREAM)) == []


# Harness, replay, tests of rules ---------------------------------------------------------------------------------------------


def test_c11_3_a_replay_takes_lists_from_the_start_or_at_their_arrivals() -> None:
    events = [event(name, at) for at, name in enumerate("abcd", 1)]
    document = rule(where="in_list(k, 'l')")

    def ids(lists: Any) -> list[str | None]:
        return [alert.event_id for alert in lookback.replay([document], events, STREAM, lists).alerts]

    assert ids(()) == []
    assert ids({"l": ["x"]}) == ids(LISTED) == list("abcd")
    assert ids([({"l": ["x"]}, 1), ({"l": [], "m": ["x"]}, 3)]) == ["b", "c"]
    assert ids([(LISTED, 2), ({"m": []}, 3)]) == ["c", "d"]
    for wrong in ([({"l": ["x"]},)], [{"l": ["x"]}], [({"l": ["x"]}, "now")], {"l": 3}):
        with pytest.raises(EventError, match="lists"):
            ids(wrong)


def test_c11_3_a_replay_takes_what_comes_between_two_commits_in_the_order_of_its_arrivals() -> None:
    document = rule(group_by=["k"], window={"tumbling": "10 seconds"}, when="in_list(k, 'l')")
    document["measures"] = {"n": "count(*)"}
    advance = {"rule_id": "*", "version": None, "status": "advance", "document": {"time": "1970-01-01T00:00:10Z"}}

    def count_alerts(advanced: int, listed: int) -> int:
        return len(lookback.replay([document, (advance, advanced)], [event("a", 1)], STREAM, [(LISTED, listed)]).alerts)

    assert [count_alerts(*arrivals) for arrivals in ((3, 2), (3, 3), (2, 3))] == [1, 1, 0]


def test_c11_3_a_test_of_a_rule_takes_lists_and_refuses_those_that_the_rule_does_not_read() -> None:
    test = {"name": "t", "lists": {"l": ["x"]}, "events": [event("a", 1)], "alerts": [{"event_id": "a"}]}
    document = rule(where="in_list(k, 'l')", tests=[test])
    check_rule(document, {"tx": STREAM})
    # Without the list the alert is missing; lists of one test do not last into the next.
    document["tests"] = [test, {**test, "lists": {}}]
    with pytest.raises(RuleError, match=r"alerts expected: 1, found: 0 \(none\) \(tests\[1\]\)"):
        check_rule(document, {"tx": STREAM})
    document["tests"] = [{**test, "lists": {"l": ["x"], "k": []}}]
    with pytest.raises(RuleError, match="the rule reads no list 'k'; "):
        check_rule(document, {"tx": STREAM})
    document["tests"] = [{**test, "lists": {"l": [{"valu": "x"}]}}]
    with pytest.raises(RuleError, match=r"unknown key 'valu'; did you mean 'value'\? \(tests\[0\].lists.l\[0\]\)"):
        check_rule(document, {"tx": STREAM})


# Growth -----------------------------------------------------------------------------------------------------------------


def test_c11_3_a_small_batch_takes_as_long_with_a_list_of_a_million_values_as_with_few() -> None:
    document = json.dumps(rule(where="in_list(k, 'l')", when="not in_list(c, 'l')"))
    events = read_events([event(f"{at}", at / 1_000, k=f"v{at}") for at in range(100)], STREAM, 1)[0]
    own = encode_keys([events.columns["k"].take(slice(0, 1))], 1)

    def prepare(values: int) -> tuple[Evaluator, ShardState]:
        random = np.random.default_rng(values)
        low, high = (random.integers(-(2**63), 2**63 - 1, values, dtype=np.int64) for _ in range(2))
        table = _Values.of(np.append(low, own.low), np.append(high, own.high), np.full(values + 1, FOREVER))
        evaluator = Evaluator(STREAM, lists=KnownLists({1: Lists(1, {"l": _List(table)})}))
        state = new_state(STREAM)
        state.begin(DictStore())
        change = RuleChange("insert", 0, "r", 1, "active", document)
        evaluator.process(state, Batch(events.take(slice(0, 0)), changes=[change, list_change(1)]))
        return evaluator, state

    few, many = prepare(100), prepare(1_000_000)

    def seconds_for(evaluator: Evaluator, state: ShardState) -> float:
        commit = (state.last_commit or 0) + 1
        batch = Batch(read_events([{"id": "0", "at": 0, "k": "v0", "c": 1}], STREAM, commit)[0], marks={commit: 0})
        started = time.process_time()
        output = evaluator.process(state, batch)
        seconds = time.process_time() - started
        assert len(output.alerts) == 1
        return seconds

    assert takes_at_most(2, lambda: seconds_for(*few), lambda: seconds_for(*many), turns=8)

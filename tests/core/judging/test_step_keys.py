"""Sequences whose steps have keys of their own (12.6), on cases worked out by hand. Times in microseconds."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from lookback.core.engine.batch import Batch
from lookback.core.engine.evaluation import Evaluator
from lookback.core.engine.output import Output
from lookback.core.errors import RuleError
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.coverage import find_coverage
from lookback.core.rules.gate import hash_document
from lookback.core.rules.rulebook import RuleBook
from lookback.core.rules.wording import describe_rule
from lookback.core.state.shard import ShardState
from lookback.core.streams.arrival import find_marks
from lookback.core.streams.declaration import Stream
from lookback.core.streams.eventrows import read_events
from lookback.core.streams.events import Events
from lookback.testing.harness import Harness

STREAM = Stream.from_dict(
    {
        "stream": "hosts",
        "event_id": "id",
        "event_time": "at",
        "fields": {"id": "string", "at": "timestamp", "src": "string", "dst": "string", "n": "int", "many": "array<string>"},
        "max_out_of_orderness": "3 microseconds",
        "allowed_lateness": "6 microseconds",
    }
)  # fmt: skip
# A login from an address, then a connection to that address.
LOGIN, REMOTE = {"name": "login", "where": "n = 0"}, {"name": "remote", "where": "n = 1", "key": ["dst"]}
# An event: id, time, src, dst, n.
Row = tuple[str, int, str | None, str | None, int]


def rule(*steps: dict[str, Any], message: str = "", **keys: Any) -> dict[str, Any]:
    top = {name: keys.pop(name) for name in ("reset_on_alert", "suppress", "entities", "late") if name in keys}
    sequence = {"within": "10 microseconds", "steps": list(steps), **keys}
    return {"rule_id": "r", "stream": "hosts", "group_by": ["src"], "sequence": sequence, "message": message, **top}


def make_rows(*commits: list[Row]) -> list[dict[str, Any]]:
    names = ("id", "at", "src", "dst", "n")
    return [
        {**dict(zip(names, row, strict=True)), "arrival": arrival}
        for arrival, commit in enumerate(commits, 1)
        for row in commit
    ]


def judge(document: dict[str, Any], *commits: list[Row]) -> Harness:
    harness = Harness(STREAM)
    harness.rule(document)
    harness.events(make_rows(*commits))
    return harness


def found(harness: Harness) -> list[tuple[Any, ...]]:
    return [(a.event_id, a.verdict, dict(a.key), *a.evidence) for a in harness.alerts]


def test_c12_6_an_event_takes_part_under_the_key_of_each_step_that_it_satisfies() -> None:
    commits = [[("a", 1, "p", "x", 0)], [("b", 2, "p", "q", 1)], [("c", 3, "z", "p", 1)]]
    # b has the src of a, but a connection counts by its dst.
    assert found(judge(rule(LOGIN, REMOTE), *commits)) == [("c", "raised", {"src": "p"}, "a", "c")]


def test_c12_6_an_event_may_be_both_steps_of_two_keys() -> None:
    steps = ({"name": "one", "where": "true"}, {"name": "two", "where": "true", "key": ["dst"]})
    commits = [[("a", 1, "p", "x", 0)], [("b", 2, "q", "p", 0)], [("c", 3, "r", "q", 0)], [("d", 4, "s", "s", 0)]]
    # d alone is one event, and no match of two steps.
    assert found(judge(rule(*steps), *commits)) == [
        ("b", "raised", {"src": "p"}, "a", "b"), ("c", "raised", {"src": "q"}, "b", "c"),
    ]  # fmt: skip
    # Equal keys are one key: e, then f.
    commits = [[("e", 1, "p", "p", 0)], [("f", 2, "p", "p", 0)]]
    assert found(judge(rule(*steps), *commits)) == [("f", "raised", {"src": "p"}, "e", "f")]


def test_c12_6_entries_of_a_key_stand_for_those_of_group_by_as_they_are_written() -> None:
    document = rule(LOGIN, {**REMOTE, "key": ["dst", "src"]}) | {"group_by": ["src", "dst"]}
    commits = [[("a", 1, "p", "q", 0)], [("b", 2, "p", "q", 1)], [("c", 3, "q", "p", 1)]]
    assert found(judge(document, *commits)) == [("c", "raised", {"dst": "q", "src": "p"}, "a", "c")]
    # Here it is group_by itself.
    assert [row[0] for row in found(judge(document | {"group_by": ["dst", "src"]}, *commits))] == ["b"]
    document["sequence"]["steps"][1]["key"] = ["src", "dst"]
    assert [row[0] for row in found(judge(document, *commits))] == ["b"]
    assert [row[0] for row in found(judge(document | {"group_by": ["dst", "src"]}, *commits))] == ["c"]


def test_c12_6_null_is_a_key_value() -> None:
    commits = [[("a", 1, None, "x", 0)], [("b", 2, "x", None, 1)]]
    assert found(judge(rule(LOGIN, REMOTE), *commits)) == [("b", "raised", {"src": None}, "a", "b")]


def test_c12_6_until_has_the_key_that_it_says() -> None:
    commits = [[("a", 1, "p", "x", 0)], [("b", 2, "p", "x", 3)], [("c", 3, "x", "p", 1)]]
    assert len(found(judge(rule(LOGIN, REMOTE, until={"where": "n = 3", "key": ["dst"]}), *commits))) == 1
    assert not found(judge(rule(LOGIN, REMOTE, until={"where": "n = 3"}), *commits))
    assert not found(judge(rule(LOGIN, REMOTE, until="n = 3"), *commits))
    commits[1] = [("b", 2, "x", "p", 3)]
    assert not found(judge(rule(LOGIN, REMOTE, until={"where": "n = 3", "key": ["dst"]}), *commits))


def test_c12_6_an_absence_has_the_key_that_it_says() -> None:
    silent = {"name": "silent", "absent": "n = 2", "within": "5 microseconds", "key": ["dst"]}
    commits = [[("a", 1, "p", "x", 0)], [("b", 2, "p", "x", 2)], [("c", 20, "z", "z", 9)]]
    harness = judge(rule(LOGIN, silent, message="{src} of {id}"), *commits)
    assert found(harness) == [("a", "raised", {"src": "p"}, "a")]
    # It comes late, and takes the alert back.
    harness = judge(rule(LOGIN, silent), commits[0], [("c", 12, "z", "z", 9)], [("b", 4, "x", "p", 2)])
    assert [row[:3] for row in found(harness)] == [("a", "raised", {"src": "p"}), ("a", "retracted", {"src": "p"})]


def test_c12_6_a_wait_that_another_key_began_has_the_key_of_its_last_step() -> None:
    silent = {"name": "silent", "absent": "n = 2", "within": "5 microseconds"}
    commits = [[("a", 1, "p", "x", 0)], [("b", 2, "z", "p", 1)], [("c", 20, "y", "y", 9)]]
    harness = judge(rule(LOGIN, REMOTE, silent, message="{src} {dst} {remote.src}", entities=["src", "dst"]), *commits)
    assert found(harness) == [("b", "raised", {"src": "p"}, "a", "b")]
    (alert,) = harness.alerts
    assert (alert.message, dict(alert.entities)) == ("p p [z]", {"src": "p", "dst": "p"})


def test_c12_6_messages_and_entities_show_the_key_of_the_match() -> None:
    document = rule(LOGIN, REMOTE, message="{src} from {remote.src} at {id}, {login.dst}", entities=["src", "dst"])
    (alert,) = judge(document, [("a", 1, "p", "x", 0)], [("b", 2, "z", "p", 1)]).alerts
    assert (alert.message, dict(alert.entities)) == ("p from [z] at b, [x]", {"src": "p", "dst": "p"})


def test_c12_6_suppress_and_reset_go_by_the_key_of_the_match() -> None:
    commits = [
        [("a", 1, "p", "x", 0), ("b", 1, "q", "x", 0)], [("c", 2, "z", "p", 1)], [("d", 3, "z", "q", 1)], [("e", 4, "y", "p", 1)],
    ]  # fmt: skip
    harness = judge(rule(LOGIN, REMOTE, suppress="5 microseconds"), *commits)
    assert [row[:2] for row in found(harness)] == [("c", "raised"), ("d", "raised"), ("e", "suppressed")]
    harness = judge(rule(LOGIN, REMOTE, reset_on_alert=True), *commits)
    assert [row[:2] for row in found(harness)] == [("c", "raised"), ("d", "raised")]


def test_c12_6_late_events_count_under_each_of_their_keys() -> None:
    commits = [[("x", 10, "y", "y", 9)], [("b", 9, "z", "p", 1)], [("a", 2, "p", "x", 0)], [("c", 10, "z", "p", 1)]]
    harness = judge(rule(LOGIN, REMOTE), *commits)
    assert found(harness) == [("c", "raised", {"src": "p"}, "a", "b", "c")]
    assert [(late.event_id, late.action) for late in harness.late_events] == [("a", "evaluated")]


@pytest.mark.parametrize("take", ["all", "once"])
@pytest.mark.parametrize("shards", [1, 2, 5])
def test_c12_6_each_event_is_judged_once_in_the_shards_of_its_keys_and_deleted_from_them(
    take: str, shards: int
) -> None:
    """As dispatch sends them: each shard gets the events of its keys that may satisfy a step there."""
    names = [f"h{at}" for at in range(9)]
    rows = [
        {
            "id": f"{at:03}",
            "at": at,
            "src": names[at % 9],
            "dst": names[(at * 5 + 1) % 9],
            "n": at % 3,
            "arrival": 1 + at // 10,
        }
        for at in range(80)
    ]
    document = rule(LOGIN, REMOTE, take=take, within="30 microseconds")
    whole, sent = run(document, rows, 1, deleted=range(20, 40)), run(document, rows, shards, deleted=range(20, 40))
    assert list_rows(sent) == list_rows(whole)
    assert list_rows(whole) != list_rows(run(document, rows, 1))
    # The rows that it wants are counted once, also as what its failures and its account go by.
    assert sum(sent.taken.values()) == sum(whole.taken.values()) == len(rows)
    assert sent.evaluated == whole.evaluated


@pytest.mark.parametrize("shards", [1, 3])
def test_c12_6_a_deleted_event_no_longer_counts_under_any_of_its_keys(shards: int) -> None:
    steps = ({"name": "one", "where": "true"}, {"name": "two", "where": "n = 1", "key": ["dst"]})
    commits: list[list[Row]] = [[("a", 1, "p", "x", 0)], [("b", 2, "q", "p", 1)], [], [], [("d", 3, "y", "y", 0)]]
    commits.append([("e", 4, "z", "p", 1), ("f", 5, "z", "q", 1)])
    rows, found_ids = make_rows(*commits), []
    for gone in (range(0), range(1, 2)):
        output = run(rule(*steps), rows, shards, deleted=gone)
        found_ids.append([evidence for _, _, evidence in list_rows(output)])
    assert found_ids == [
        [("a", "b"), ("a", "b", "e"), ("b", "f")],
        [("a", "b"), ("a", "e")],
    ]


def test_c12_6_an_event_with_two_errors_fails_once_whatever_the_shards() -> None:
    steps = (
        {"name": "one", "where": "10 / n > 1"},
        {"name": "two", "where": "10 / n > element_at(one.n, 1)", "key": ["dst"]},
    )
    rows = [
        {"id": f"{at:03}", "at": at, "src": f"s{at % 3}", "dst": f"s{at % 4}", "n": at % 5, "arrival": 1 + at // 10}
        for at in range(60)
    ]  # fmt: skip
    for shards in (1, 2, 5):
        assert sum(each.count for each in run(rule(*steps), rows, shards).failures) == 12


def run(document: dict[str, Any], rows: list[dict[str, Any]], shards: int, deleted: range = range(0)) -> Output:
    """Judges rows in shards, each with the events that dispatch sends it; commit 5 deletes some."""
    events, _ = read_events(rows, STREAM, 1)
    gone = Events.of(events.columns, np.full(len(events), 5), STREAM).take(np.array(deleted, dtype=np.int64))
    marks, total = find_marks(events, events.commits), Output()
    change = RuleChange("insert", 0, "r", 1, "active", json.dumps(document))
    routes = compile_rule(document, STREAM).routes
    for shard in range(shards):
        state = ShardState(RuleBook(STREAM, {"hosts": STREAM}))
        for first, last in ((0, 3), (3, 99)):
            here = events.take((events.commits > first) & (events.commits <= last))
            parts = [each.take(select_sent(each, routes, shard, shards)) for each in (here, gone)]
            batch = Batch(
                parts[0],
                parts[1] if first and len(parts[1]) else None,
                {commit: high for commit, high in marks.items() if first < commit <= last},
                [] if first else [change],
            )
            output = Evaluator(STREAM, shard, shards).process(state, batch)
            total.rows += output.rows
            total.failures += output.failures
            total.taken.update(output.taken)
            total.evaluated.update(output.evaluated)
    return total


def select_sent(events: Events, routes: Any, shard: int, shards: int) -> Any:
    sent = np.zeros(len(events), dtype=bool)
    for fields, condition in routes:
        wanted = np.ones(len(events), dtype=bool)
        if condition is not None:
            value = events.value(condition)
            wanted = value.is_true() | (False if value.error is None else value.error)
        sent |= wanted & (events.find_keys(fields).shard(shards) == shard)
    return sent


def list_rows(output: Output) -> list[Any]:
    return [(a.alert_id, a.event_id, tuple(a.evidence)) for _, a in sorted(output.rows, key=lambda row: row[0])]


def test_c12_6_dispatch_sends_an_event_to_the_keys_that_it_may_play_a_part_in() -> None:
    document = rule(LOGIN, REMOTE, until={"where": "n = 3", "key": ["dst"]}) | {"where": "src <> dst"}
    coverage = find_coverage([compile_rule(document, STREAM)])
    assert coverage.wants == {(("src",), "src != dst"), (("dst",), "src != dst and (n = 1 or n = 3)")}
    assert coverage.fields == {"src", "dst", "n"}
    plain = rule(LOGIN, {"name": "remote", "where": "n = 1"})
    named = rule(LOGIN, {"name": "remote", "where": "n = 1", "key": ["src"]})
    assert (
        compile_rule(plain, STREAM).store
        == compile_rule(named, STREAM).store
        != compile_rule(rule(LOGIN, REMOTE), STREAM).store
    )


@pytest.mark.parametrize(
    ("changes", "place", "words"),
    [
        ({"key": ["dst", "src"]}, "sequence.steps[1].key", "names 2 fields, and group_by has 1 entry; name one field"),
        ({"key": []}, "sequence.steps[1].key", "names 0 fields"),
        ({"key": ["n"]}, "sequence.steps[1].key", "'n' is int, and 'src' of group_by, whose place it takes, is string"),
        ({"key": ["many"]}, "sequence.steps[1].key", "'many' is array<string>"),
        ({"key": ["dts"]}, "sequence.steps[1].key", "has no field 'dts'; did you mean"),
        ({"key": "dst"}, "sequence.steps[1].key", "must be a list of field names, one for each entry of group_by"),
        ({"key": [1]}, "sequence.steps[1].key", "must be a list of field names"),
    ],
)
def test_c12_6_a_key_that_does_not_fit_group_by_is_refused(changes: dict[str, Any], place: str, words: str) -> None:
    with pytest.raises(RuleError) as refused:
        compile_rule(rule(LOGIN, {**REMOTE, **changes}), STREAM)
    (problem,) = refused.value.problems
    assert problem.place == place
    assert words in problem.message
    with pytest.raises(RuleError) as refused:
        compile_rule(rule(LOGIN, until={"where": "true", **changes}), STREAM)
    assert [problem.place for problem in refused.value.problems] == ["sequence.until.key"]


def test_c12_6_a_key_belongs_to_a_step() -> None:
    document = {
        "rule_id": "r",
        "stream": "hosts",
        "group_by": ["src"],
        "window": "1 minute",
        "measures": {"m": "count(*)"},
    }
    with pytest.raises(RuleError) as refused:
        compile_rule({**document, "when": "m > 1", "key": ["dst"]}, STREAM)
    (problem,) = refused.value.problems
    assert (problem.place, "group_by" in problem.message) == ("key", True)


def test_c12_6_words_say_which_field_takes_the_place_of_which() -> None:
    words = describe_rule(compile_rule(rule(LOGIN, REMOTE, until={"where": "n = 3", "key": ["dst"]}), STREAM))
    assert "(remote with dst as src)" in words
    assert "an event where n = 3 with dst as src ends what has begun" in words
    assert "(login)" in words


def test_c12_6_the_gate_knows_the_order_of_group_by_where_steps_have_keys() -> None:
    document = rule(LOGIN, {**REMOTE, "key": ["dst", "src"]}) | {"group_by": ["src", "dst"]}
    turned = document | {"group_by": ["dst", "src"]}
    assert hash_document(document) != hash_document(turned)
    plain = rule(LOGIN) | {"group_by": ["src", "dst"]}
    assert hash_document(plain) == hash_document(plain | {"group_by": ["dst", "src"]})

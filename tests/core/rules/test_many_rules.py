"""Thousands of rules: the work that a rule makes does not depend on how many others there are."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from growth import grows_in_proportion
from lookback.core.engine.batch import Batch
from lookback.core.engine.evaluation import Evaluator
from lookback.core.engine.output import Output
from lookback.core.judging.segment import merge_failures
from lookback.core.rules import compilecache
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.rulebook import RuleBook
from lookback.core.rules.versions import Entry, Piece
from lookback.core.state.shard import ShardState
from lookback.core.streams.arrival import find_marks
from lookback.core.streams.declaration import Stream
from lookback.core.streams.events import Events
from lookback.core.values.columns import Column
from lookback.core.values.limits import Limits

TX = Stream.from_dict(
    {
        "stream": "tx", "event_id": "id", "event_time": "at",
        "fields": {"id": "bigint", "at": "timestamp", "customer": "bigint", "amount": "bigint"},
    }
)  # fmt: skip


def document(number: int, **more: Any) -> str:
    rule = {
        "rule_id": f"r{number}", "stream": "tx", "group_by": ["customer"], "window": "1 hour",
        "measures": {"m": "sum(amount)"}, "when": f"m > {number}",
    }  # fmt: skip
    return json.dumps({**rule, **more})


def insert(numbers: range, stream: str = "tx") -> list[RuleChange]:
    return [RuleChange("insert", 1, f"r{at}", 1, "active", document(at, stream=stream)) for at in numbers]


def events(rows: int, commit: int = 1) -> Batch:
    columns = {
        name: Column(type_, np.arange(rows).astype(type_.storage) + commit * rows) for name, type_ in TX.fields.items()
    }
    found = Events(columns, np.full(rows, commit, dtype=np.int64), "id", "at")
    return Batch(found, marks=find_marks(found, found.commits))


def grows_linearly(run: Callable[[int], Callable[[], object]], size: int) -> bool:
    """Whether time grows at most 2.2 times at each doubling. run: prepares, and returns what is timed."""

    def seconds_for(rows: int) -> float:
        act = run(rows)
        start = time.process_time()
        act()
        return time.process_time() - start

    return grows_in_proportion(seconds_for, size)


def test_a_rule_is_compiled_once_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def compile_and_note(found: dict[str, Any], stream: Stream) -> Any:
        compiled.append(f"{stream.name} {found['rule_id']}")
        return compile_rule(found, stream)

    # As if the streams of a process had more rules in force, all together, than one of them may have.
    compilecache._open_compiler.cache_clear()
    monkeypatch.setattr(compilecache, "_MAX_COMPILED", 25)
    monkeypatch.setattr(compilecache, "compile_rule", compile_and_note)
    other = replace(TX, name="other")
    try:
        states = [ShardState(RuleBook(stream, {stream.name: stream})) for stream in (TX, TX, other)]
        for state in states:
            name = state.book.stream.name
            state.book.apply(insert(range(20), name), None)
        for commit in (1, 2):
            for state in states:
                Evaluator(state.book.stream).process(state, events(1, commit))
        assert len(compiled) == len(set(compiled)) == 40
        # A new version, or another status, is what it says.
        book = states[0].book
        changes = [replace(insert(range(1))[0], version=2, document=document(0, when="m < 0")),
                   replace(insert(range(1, 2))[0], version=2, status="retired")]  # fmt: skip
        book.apply(changes, 3)
        assert {rule.spec.document["when"] for entry, rule in book.in_force() if entry.rule_id == "r0"} == {"m < 0"}
        assert "r1" not in {entry.rule_id for entry, _ in book.in_force()}
    finally:
        compilecache._open_compiler.cache_clear()


def test_one_stream_may_have_ten_thousand_rules() -> None:
    limits = Limits.from_dict({"rules": 10_000})
    assert limits.rules == 10_000
    assert compilecache._MAX_COMPILED > 10_000


@pytest.mark.long
def test_rules_that_were_retired_make_no_new_rule_slower() -> None:
    insert_all = functools.cache(insert)

    def run(size: int) -> Callable[[], object]:
        entries = {f"old{at}": Entry(f"old{at}", 1, "retired", "{}", "tx", 1) for at in range(size)}
        changes = insert_all(range(size))
        # The limit is near enough for each rule to be counted.
        stream = replace(TX, limits=Limits(rules=size))
        book = RuleBook(stream, {"tx": stream}, entries)
        RuleBook(stream, {"tx": stream}).apply(changes, None)

        def apply() -> None:
            log, _ = book.apply(changes, None)
            assert {row.action for row in log} == {"activated"}

        return apply

    assert grows_linearly(run, 500)


@pytest.mark.long
def test_versions_that_are_warming_make_no_other_slower() -> None:
    """11.1: several rules at once: thousands that are published together wait and come into force each in its turn."""
    insert_all = functools.cache(insert)

    def run(size: int) -> Callable[[], object]:
        changes = insert_all(range(size))
        # The limit is near enough for each rule to be counted.
        stream = replace(TX, limits=Limits(rules=size))
        book = RuleBook(stream, {"tx": stream})

        def apply() -> None:
            log, _ = book.apply(changes, 1, lambda _: True)
            assert {row.action for row in log} == {"warming"}
            assert len(book.list_judged()) == len({entry.lane for entry, _ in book.list_judged()}) == size
            again = RuleBook(stream, {"tx": stream})
            again.load(book.to_json())
            for each in book.list_known_warming():
                row, _ = book.finish_warming(Piece(*each.key, 1), 2)
                assert row.action == "activated"
            assert not book.warming
            assert len(again.warming) == size

        return apply

    assert grows_linearly(run, 300)


def test_lanes_of_versions_that_are_warming_are_taken_again() -> None:
    book = RuleBook(TX, {"tx": TX})
    book.apply(insert(range(4)), 1, lambda _: True)
    assert [each.entry.lane for each in book.list_known_warming()] == [2, 3, 4, 5]
    for name in ("r2", "r0"):
        book.finish_warming(Piece(name, 1, 1), 2)
    again = RuleBook(TX, {"tx": TX})
    again.load(book.to_json())
    for one in (book, again):
        log, _ = one.apply([replace(each, version=2) for each in insert(range(4, 7))], 2, lambda _: True)
        assert {row.action for row in log} == {"warming"}
        assert [each.entry.lane for each in one.list_known_warming()] == [3, 5, 2, 4, 6]


def test_the_limit_counts_rules_of_the_stream_in_force() -> None:
    limited = replace(TX, limits=Limits(rules=2))
    streams = {"tx": limited, "other": replace(TX, name="other")}
    book = RuleBook(limited, streams)
    book.apply([*insert(range(2)), replace(insert(range(2, 3))[0], document=document(2, stream="other"))], None)
    text = book.to_json()
    for again in (book, RuleBook(limited, streams)):
        again.load(text)
        (row,), _ = again.apply(insert(range(3, 4)), None)
        assert row.action == "rejected"
        # The command retires those of this stream, and a rule that moves here from another stream counts here.
        again.apply([RuleChange("insert", 2, "*", None, "retire_all", None)], None)
        moved = replace(insert(range(2, 3))[0], commit=3, version=2)
        log, _ = again.apply([moved, *(replace(each, commit=4) for each in insert(range(4, 6)))], None)
        assert [row.action for row in log] == ["activated", "activated", "rejected"]


def test_rules_that_all_break_cost_no_more_each() -> None:
    def run(size: int) -> Callable[[], object]:
        # As if the declaration had lost the field that they read.
        broken = document(0, measures={"m": "sum(gone)"})
        return judge_and_fail(size, broken)

    assert grows_linearly(run, 1_000)


def test_rules_that_all_fail_cost_no_more_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lookback.core.engine.evaluation.JUDGES", {"lookback": fail_once})

    def run(size: int) -> Callable[[], object]:
        return judge_and_fail(size, document(0))

    assert grows_linearly(run, 500)


def judge_and_fail(rules: int, text: str) -> Callable[[], object]:
    """Judges an event by rules of one document, all of which fail."""
    book = RuleBook(TX, {"tx": TX}, {f"r{at}": Entry(f"r{at}", 1, "active", text, "tx", 1) for at in range(rules)})
    state = ShardState(book)

    def process() -> Output:
        output = Evaluator(TX).process(state, events(1))
        assert len(merge_failures(output.failures)) == rules
        return output

    return process


def fail_once(run: Any) -> None:
    run.count_failure(1, 1, "0")

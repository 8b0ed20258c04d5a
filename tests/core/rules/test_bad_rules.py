"""Bad rows of the rules table, and a rule that breaks: each is stopped alone, with a message that teaches."""

from __future__ import annotations

import inspect
import itertools
import json
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import lookback
from lookback.core.engine import evaluation
from lookback.core.engine.batch import Batch
from lookback.core.engine.evaluation import Evaluator
from lookback.core.engine.output import Output
from lookback.core.errors import RuleError, StateError, StreamError
from lookback.core.expressions import functions, like
from lookback.core.expressions.compiling import compile_expression, recompile
from lookback.core.judging.rulerun import RuleRun
from lookback.core.judging.segment import Segment, merge_failures
from lookback.core.rules import compilecache
from lookback.core.rules.changes import MAX_VERSION, RuleChange
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.document import read_rule
from lookback.core.rules.quarantine import describe_error, find_quarantines
from lookback.core.rules.rulebook import RuleBook
from lookback.core.state.shard import ShardState
from lookback.core.streams.alerts import Failure
from lookback.core.streams.declaration import Stream
from lookback.core.streams.eventrows import read_events
from lookback.core.values.columns import Column
from lookback.core.values.limits import LIMITS, Limits
from lookback.core.values.types import BIGINT, STRING

FIELDS = {"id": "bigint", "at": "timestamp", "customer": "int", "amount": "decimal(18,2)", "text": "string"}
DECLARATION = {"stream": "tx", "event_id": "id", "event_time": "at", "fields": FIELDS}
TX = Stream.from_dict({**DECLARATION, "max_out_of_orderness": "0 seconds"})
STREAMS = {"tx": TX, "other": Stream.from_dict({**DECLARATION, "stream": "other"})}


def document(**more: Any) -> dict[str, Any]:
    base = {
        "rule_id": "r", "stream": "tx", "group_by": ["customer"], "window": "1 hour", "measures": {"n": "count(*)"},
        "when": "n > 0",
    }  # fmt: skip
    return {name: value for name, value in {**base, **more}.items() if value is not None}


def row(
    version: int | None = 1, status: Any = "active", *, change: str = "insert", commit: int = 1, **more: Any
) -> RuleChange:
    text = more.pop("text", None) or json.dumps(document(**more))
    return RuleChange(change, commit, more.get("rule_id", "r"), version, status, text)


def raw(rule_id: Any, version: Any, status: Any, text: Any, commit: int = 2) -> RuleChange:
    return RuleChange("insert", commit, rule_id, version, status, text)


def in_force(book: RuleBook) -> list[tuple[str, int, str]]:
    return [(entry.rule_id, entry.version, entry.status) for entry, _ in book.in_force()]


def command(**body: Any) -> RuleChange:
    return raw("*", None, "advance", json.dumps(body))


SURROGATE = '"\\ud800"'
BAD_ROWS: dict[str, tuple[RuleChange, str]] = {
    "no JSON": (raw("r", 2, "active", "rule_id: r"), "is not JSON"),
    "empty": (raw("r", 2, "active", ""), "is not JSON"),
    "a list": (raw("r", 2, "active", "[]"), "must be a JSON object"),
    "a number": (raw("r", 2, "active", "1e999"), "must be a JSON object"),
    "digits without end": (raw("r", 2, "active", "1" * 99_000), "is not JSON"),
    "10 MB": (raw("r", 2, "active", '{"rule_id": "' + "x" * 10_000_000 + '"}'), "longer than 500,000 bytes"),
    "10,000 lists deep": (raw("r", 2, "active", "[" * 10_000 + "]" * 10_000), "document"),
    "500 lists deep": (raw("r", 2, "active", json.dumps(document())[:-1] + ', "tests": ' + "[" * 500 + "]" * 500 + "}"), "deeper than 20"),
    "a stream deep down": (raw("r", 2, "active", '{"stream": ' + '{"a":' * 900 + "1" + "}" * 901), "unknown stream"),
    "no stream": (raw("r", 2, "active", "{}"), "unknown stream null; known: other, tx"),
    "unknown stream": (row(2, stream="nowhere"), "unknown stream 'nowhere'"),
    "a stream that is a list": (raw("r", 2, "active", '{"stream": ["tx"]}'), 'unknown stream ["tx"]'),
    "status in capitals": (row(2, "ACTIVE"), "status must be one of draft, shadow, active"),
    "status of a megabyte": (row(2, "a" * 1_000_000), "status must be one of"),
    "status NULL": (row(2, None), "status must be one of"),
    "all NULL": (raw(None, None, None, None), "rule_id must have 1 to 100 characters of a-z"),
    "rule_id of a megabyte": (raw("r" * 1_000_000, 1, "active", "{}"), "rule_id must have 1 to 100 characters of a-z"),
    "rule_id in capitals": (raw("R", 1, "active", json.dumps(document())), "rule_id must have 1 to 100 characters of a-z"),
    "rule_id with NUL": (raw("r\0", 1, "active", "{}"), "rule_id must have 1 to 100 characters of a-z"),
    "rule_id from right to left": (raw("\u202er", 1, "active", "{}"), "rule_id must have 1 to 100 characters of a-z"),
    "rule_id of another": (raw("s", 1, "active", json.dumps(document())), "the document has rule_id 'r', the row 's'"),
    "a negative version": (row(-5), "version must not be negative, got -5; insert 2"),
    "the last bigint": (row(2**63 - 1), "version must be less than 9,223,372,036,854,775,806"),
    "superseded": (row(1, commit=2, message="x"), "superseded: version 1 is not above version 1"),
    "half a character": (raw("r", 2, "active", json.dumps(document())[:-1] + f', "message": {SURROGATE}}}'), "half of a surrogate pair"),
    "half a character as a key": (raw("r", 2, "active", json.dumps(document())[:-1] + f", {SURROGATE}: 1}}"), "half of a surrogate pair"),
    "keys twice": (raw("r", 2, "active", '{"stream": "tx", "stream": "tx"}'), "gives the key 'stream' twice in one object; leave one of them out"),
    "a field that is not there": (row(2, where="nope > 1"), "nope"),
    "NaN": (raw("r", 2, "active", '{"stream": "tx", "rule_id": NaN}'), "got NaN"),
    "a command of no kind": (raw("*", None, "drop", "{}"), "a command's status must be one of"),
    "a command without status": (raw("*", 1, None, None), "a command's status must be one of"),
    "a command to a list": (raw("*", None, "clear_state", '{"stream": [{}]}'), "unknown stream [{}]; known: other, tx"),
    "a command to nowhere": (raw("*", None, "clear_state", '{"stream": "nowhere"}'), "unknown stream 'nowhere'"),
    "an advance to no time": (command(time="soon"), "advance needs a time such as"),
    "an advance beyond all years": (command(time=10**30), "advance needs a time such as"),
    "an advance to before the first year": (command(time="0001-01-01T00:00:00+23:59"), "advance needs a time such as"),
    "an advance to a mapping": (command(time={"a": 1}), "advance needs a time such as"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "reason"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_is_rejected_alone_and_told_once(change: RuleChange, reason: str) -> None:
    book = RuleBook(TX, STREAMS)
    book.apply([row(1)], None)
    log, commands = book.apply([change], 7)
    assert [(entry.action, entry.arrival) for entry in log] == [("rejected", 7)]
    assert reason in log[0].message
    assert len(log[0].message) < 700
    assert len(log[0].rule_id or "") <= 103
    log[0].message.encode()
    assert in_force(book) == [("r", 1, "active")]
    assert not commands


def test_a_defect_in_reading_a_row_rejects_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RecursionError("maximum recursion depth exceeded")

    book = RuleBook(TX, STREAMS)
    book.apply([row(1)], None)
    monkeypatch.setattr("lookback.core.rules.compilecache._open_compiler", broken)
    log, _ = book.apply([row(2, commit=2)], None)
    assert "RecursionError: maximum recursion depth exceeded (test_bad_rules.py" in log[0].message
    assert [(entry.version, entry.action) for entry in log] == [(2, "rejected")]
    assert book.entries["r"].version == 1


def test_out_of_memory_is_no_rules_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("lookback.core.rules.compilecache._open_compiler", broken)
    with pytest.raises(MemoryError):
        RuleBook(TX, STREAMS).apply([row(1)], None)


# Several rows of one commit -----------------------------------------------------------------------------------------


def test_equal_versions_of_one_commit_are_taken_alike_in_whatever_order_they_are_read() -> None:
    rows = [row(2, message=text) for text in ("b", "a", "c")] + [row(None, message="d"), row(None, message="e")]
    found = set()
    for order in itertools.permutations(rows):
        book = RuleBook(TX, STREAMS)
        log, _ = book.apply(order, None)
        found.add((json.dumps([vars(each) for each in log]), book.to_json()))
    assert len(found) == 1
    assert [(each.version, each.action) for each in log] == [
        (2, "activated"), (2, "rejected"), (2, "rejected"), (3, "activated"), (4, "activated"),
    ]  # fmt: skip


def overwritten(*rows: RuleChange, commit: int) -> list[RuleChange]:
    """Overwrites the table with the same rows and returns the result."""
    return [
        RuleChange(kind, commit, each.rule_id, each.version, each.status, each.document)
        for each in rows
        for kind in ("delete", "insert")
    ]


def test_an_overwrite_with_the_same_rows_changes_nothing() -> None:
    rows = [row(1), row(2, commit=2), row(None, rule_id="s"), row(None, rule_id="s", commit=2, message="x")]
    clear = RuleChange("insert", 3, "*", None, "clear_state", None)
    book = RuleBook(TX, STREAMS)
    book.apply([*rows, clear], None)
    before = book.to_json()
    assert book.apply(overwritten(*rows, clear, commit=4), None) == ([], [])
    assert book.to_json() == before


def test_a_row_that_a_commit_deletes_and_inserts_otherwise_is_updated() -> None:
    book = RuleBook(TX, STREAMS)
    book.apply([row(1)], None)
    changes = [row(1, change="delete", commit=2), row(1, "paused", commit=2, message="new")]
    log, _ = book.apply(changes, None)
    assert [(each.version, each.action) for each in log] == [(1, "paused")]


def test_an_update_of_the_rule_id_retires_the_old_rule() -> None:
    def renamed(rule_id: str, commit: int) -> list[RuleChange]:
        text = json.dumps(document(rule_id=rule_id))
        return [row(1, change="before", commit=commit), RuleChange("update", commit, "s", 1, "active", text)]

    book = RuleBook(TX, STREAMS)
    book.apply([row(1)], None)
    log, _ = book.apply(renamed("s", 2), None)
    assert [(each.rule_id, each.action) for each in log] == [("s", "activated"), ("r", "retired")]
    # Where the document keeps its old name, the row is no rule any more.
    book = RuleBook(TX, STREAMS)
    book.apply([row(1)], None)
    log, _ = book.apply(renamed("r", 2), None)
    assert [(each.rule_id, each.action) for each in log] == [("s", "rejected"), ("r", "retired")]


def test_an_update_that_leaves_a_row_as_it_was_is_no_change() -> None:
    old, new = row(None), row(None, commit=2, message="x")
    book = RuleBook(TX, STREAMS)
    book.apply([old, new], None)
    # As `UPDATE rules SET comment = ...`: every row is written again.
    changes = [
        RuleChange(kind, 3, each.rule_id, each.version, each.status, each.document)
        for each in (old, new)
        for kind in ("before", "update")
    ]
    assert book.apply(changes, None) == ([], [])
    assert in_force(book) == [("r", 2, "active")]


@pytest.mark.parametrize("version", [None, 1])
def test_an_update_that_lays_the_document_out_otherwise_is_no_change(version: int | None) -> None:
    """As a tool does that reads JSON and writes it again: keys in another order, other white space."""
    first = row(version)
    document = json.loads(str(first.document))
    again = json.dumps(dict(reversed(document.items())), indent=1)
    assert again != first.document
    book = RuleBook(TX, STREAMS)
    book.apply([first], None)
    assert book.apply([replace(first, change="update", commit=2, document=again)], None) == ([], [])
    assert in_force(book) == [("r", 1, "active")]
    # A row whose document no longer says the same is one.
    other = json.dumps({**document, "message": "changed"})
    log, _ = book.apply([replace(first, change="update", commit=3, document=other)], None)
    assert [each.action for each in log] == ["activated"]
    log, _ = book.apply(
        [replace(first, change="delete", commit=4, document=json.dumps(json.loads(other), indent=1))], None
    )
    assert [(each.rule_id, each.action) for each in log] == [("r", "retired")]


def test_delete_of_a_row_in_force_that_has_no_version_retires_the_rule() -> None:
    book = RuleBook(TX, STREAMS)
    book.apply([row(None), row(None, "paused", commit=2)], None)
    assert book.apply([row(None, change="delete", commit=3)], None) == ([], [])
    log, _ = book.apply([row(None, "paused", change="delete", commit=4)], None)
    assert [(each.rule_id, each.action) for each in log] == [("r", "retired")]


def test_the_last_version_that_is_possible_leaves_no_other() -> None:
    book = RuleBook(TX, STREAMS)
    log, _ = book.apply([row(MAX_VERSION - 1), row(None, commit=2)], None)
    assert [each.action for each in log] == ["activated", "rejected"]


# Limits --------------------------------------------------------------------------------------------------------------


def limited(**limits: Any) -> Stream:
    return Stream.from_dict({**DECLARATION, "limits": limits})


OVER: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "measures": ({"measures": 2}, {"measures": {f"m{i}": "count(*)" for i in range(3)}, "when": "m1 > 0"}, "3 measures are more than 2"),
    "steps": (
        {"steps": 2},
        {"window": None, "measures": None, "when": None,
         "sequence": {"within": "1 hour", "steps": [{"name": f"s{i}", "where": "amount > 1"} for i in range(3)]}},
        "3 steps are more than 2",
    ),
    "window": ({"window": "1 day"}, {"window": {"lookback": "20 hours", "delay": "5 hours"}}, "25 hours is longer than 1 day"),
    "alternatives": ({"alternatives": 3}, {"where": "customer in (1, 2, 3, 4)"}, "a list has 4 values, more than 3"),
    "expression_characters": ({"expression_characters": 100}, {"where": "amount > 1 or " * 10 + "true"}, "144 characters, more than 100"),
    "expression_levels": ({"expression_levels": 5}, {"where": "abs(abs(abs(abs(abs(amount))))) > 1"}, "deeper than 5 levels"),
}  # fmt: skip


@pytest.mark.parametrize(("limits", "more", "said"), OVER.values(), ids=OVER)
def test_a_limit_of_the_stream_is_kept_and_named(
    limits: dict[str, Any], more: dict[str, Any], said: str, request: pytest.FixtureRequest
) -> None:
    compile_rule(document(**more), TX)
    with pytest.raises(RuleError) as refused:
        compile_rule(document(**more), limited(**limits))
    assert said in str(refused.value)
    assert f"(limits.{next(iter(limits))} of the stream)" in str(refused.value)
    assert len(refused.value.problems) == 1


@pytest.mark.parametrize(
    "window", ["2 days", {"tumbling": "2 days"}, {"sliding": "2 days", "slide": "1 day"}, {"session": "2 days"}]
)
def test_every_window_has_the_same_limit(window: Any) -> None:
    with pytest.raises(RuleError, match="2 days is longer than 1 day; write at most that"):
        compile_rule(
            document(window=window, when=None if isinstance(window, dict) else "n > 0"), limited(window="1 day")
        )


def test_a_document_has_the_limit_of_its_stream() -> None:
    wide = {"tx": limited(document_bytes=2_000), "other": Stream.from_dict({**DECLARATION, "stream": "other"})}
    book = RuleBook(wide["tx"], wide)
    log, _ = book.apply([row(1, description="x" * 2_000)], None)
    assert "longer than 2,000 bytes" in log[0].message
    assert "(limits.document_bytes of the stream)" in log[0].message
    there = RuleBook(wide["other"], wide)
    log, _ = there.apply([row(1, description="x" * 2_000, stream="other")], None)
    assert [each.action for each in log] == ["activated"]


def test_a_stream_has_so_many_rules_at_a_time() -> None:
    few = {"tx": limited(rules=2), "other": STREAMS["other"]}
    book = RuleBook(few["tx"], few)
    rows = [row(1, rule_id=rule_id) for rule_id in "abc"] + [row(1, rule_id="d", stream="other")]
    log, _ = book.apply(rows, None)
    assert [(each.rule_id, each.action) for each in log] == [("a", "activated"), ("b", "activated"), ("c", "rejected")]
    assert "stream 'tx' already has 2 rules in force; retire one first (limits.rules of the stream)" in log[2].message
    # A new version of a rule in force is none more, a draft none at all, and what is retired leaves room.
    changes = [
        row(2, rule_id="a", commit=2),
        row(2, "draft", rule_id="c", commit=2),
        row(2, "retired", rule_id="b", commit=3),
    ]
    log, _ = book.apply([*changes, row(3, rule_id="c", commit=4)], None)
    assert [each.action for each in log] == ["activated", "drafted", "retired", "activated"]


def test_a_rule_in_force_goes_on_where_limits_are_lowered_and_can_be_taken_back() -> None:
    book = RuleBook(TX, STREAMS)
    book.apply([row(1, window="20 days"), row(1, rule_id="s")], None)
    low = {"tx": limited(window="1 day", rules=1), "other": STREAMS["other"]}
    again = RuleBook(low["tx"], low)
    again.load(book.to_json())
    assert in_force(again) == [("r", 1, "active"), ("s", 1, "active")]
    assert again.unreadable() == []
    changes = [row(2, commit=2, window="20 days", message="x"), row(2, "paused", commit=3, window="20 days")]
    log, _ = again.apply([*changes, row(3, "active", commit=4, window="20 days")], None)
    assert [(each.version, each.action) for each in log] == [(2, "rejected"), (2, "paused"), (3, "rejected")]
    log, _ = again.apply(
        [row(4, "retired", commit=5, window="20 days"), row(2, rule_id="s", commit=5, message="x")], None
    )
    assert [(each.rule_id, each.action) for each in log] == [("s", "activated"), ("r", "retired")]


def test_a_rule_in_force_that_cannot_be_read_any_more_stops_alone() -> None:
    state = ShardState(RuleBook(TX, STREAMS))
    rows, _ = read_events(events(2), TX, 1)
    marks = {int(commit): int(time) for commit, time in zip(rows.commits, rows.times, strict=True)}
    changes = [row(1, where="text = 'a'"), row(1, rule_id="s")]
    Evaluator(TX).process(state, Batch(rows, marks=marks, changes=changes))
    # The stream is declared without the field.
    less = Stream.from_dict(
        {**TX.to_dict(), "fields": {name: type_ for name, type_ in FIELDS.items() if name != "text"}}
    )
    book = RuleBook(less, {"tx": less, "other": STREAMS["other"]})
    book.load(state.book.to_json())
    state.book = book
    told = []
    for start in (2, 4):
        rows, _ = read_events(events(2, start), less, 1)
        marks = {int(commit): int(time) for commit, time in zip(rows.commits, rows.times, strict=True)}
        output = Evaluator(less).process(state, Batch(rows, marks=marks))
        assert {alert.rule_id for alert in output.alerts} == {"s"}
        told += output.failures
    assert [(each.rule_id, each.version) for each in told] == [("r", 1)]
    assert "cannot be read any more: unknown field 'text'" in told[0].reason


def test_limits_are_read_and_written_and_checked() -> None:
    stream = limited(window="30 days", measures=10)
    assert Stream.from_dict(stream.to_dict()) == stream
    assert (stream.limits.window, stream.limits.measures, stream.limits.steps) == (30 * 86_400_000_000, 10, 20)
    assert set(LIMITS) == set(Limits().to_dict())
    wrong = {"measures": 0, "steps": True, "window": "1 month", "rules": 1e9, "depth": 5, "alternatives": "many"}
    with pytest.raises(StreamError) as refused:
        limited(**wrong)
    assert {problem.place for problem in refused.value.problems} == {f"limits.{name}" for name in wrong}
    assert "a whole number from 1 to 500 is needed, got 0" in str(refused.value)
    with pytest.raises(StreamError, match="a mapping of limit to number"):
        Stream.from_dict({**DECLARATION, "limits": [1]})


def test_aliases_make_no_document_without_end() -> None:
    nested: Any = [1] * 10
    for _ in range(15):
        nested = [nested] * 10
    _, problems = read_rule(document(tests=nested))
    assert "the document has more than 100,000 parts" in str(problems[0])


# Expressions can neither grow without bound nor search for long ---------------------------------------------------------


def test_concat_ends_before_memory_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lookback.core.expressions.texts.MAX_JOINED_CHARACTERS", 25)
    monkeypatch.setattr(functions, "MAX_TEXT_CHARACTERS", 40)
    harness = lookback.Harness(TX)
    harness.rule(document(measures={"most": "max(concat(text, text))"}, when="most > ''"))
    harness.rule(document(rule_id="fine", when="n > 1"))
    events = [{"id": i, "at": i, "customer": 1, "text": "abcd", "arrival": 1 + i // 6} for i in range(8)]
    harness.events(events)
    assert [(row.rule_id, row.action) for row in harness.errors] == [("r", "failed")]
    assert "OverflowError: concat(text, text) gives more than 40 characters for the events" in harness.errors[0].message
    assert {alert.rule_id for alert in harness.alerts} == {"fine"}


def test_c3_1_what_concat_makes_of_a_batch_does_not_depend_on_its_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["abcd", "", None, "e" * 8, "abcd", "f" * 14, "abcd", "xyz"]
    events = [{"id": i, "at": i, "customer": 1, "text": text} for i, text in enumerate(texts)]
    joined = "coalesce(concat(text, text), 'none')"
    rule = document(where=f"length({joined}) < 20 or text like 'f%'", measures={"most": f"max({joined})"}, when="true")
    found = []
    # 25 characters are those of three events, and fewer than those of the one with the longest text.
    for limit in (25, 10**9):
        monkeypatch.setattr("lookback.core.expressions.texts.MAX_JOINED_CHARACTERS", limit)
        for arrivals in ([1] * 8, range(1, 9)):
            harness = lookback.Harness(TX)
            harness.rule(rule)
            harness.events([event | {"arrival": arrival} for event, arrival in zip(events, arrivals, strict=True)])
            found.append([(alert.event_id, alert.measures["most"]) for alert in harness.alerts])
    assert found[0] == found[1]
    assert found[2] == found[3]
    # An event whose text is too long costs itself alone.
    assert [event for event, _ in found[0]] == [str(at) for at in range(8) if at != 5]
    assert [event for event, _ in found[2]] == [str(at) for at in range(8)]


def test_what_a_condition_is_sent_as_may_be_longer_than_it() -> None:
    written = compile_expression(" or ".join(["n=1"] * 1_400), {"n": BIGINT})
    assert len(written.sql) > 10_000
    assert recompile(written.sql, {"n": BIGINT}) == written
    assert pickle.loads(pickle.dumps(written)) == written
    joined = compile_expression("||".join(["text"] * 95) + " = 'x'", {"text": STRING})
    assert recompile(joined.sql, {"text": STRING}) == joined


@pytest.mark.parametrize("text", ["concat", "coalesce", "greatest"])
def test_a_call_takes_100_arguments(text: str) -> None:
    compile_expression(f"{text}({', '.join(['text'] * 100)}) = 'x'", {"text": STRING})
    with pytest.raises(lookback.LookbackError, match="to 100 arguments, got 101"):
        compile_expression(f"{text}({', '.join(['text'] * 101)}) = 'x'", {"text": STRING})


def test_a_like_pattern_has_no_long_part_with_holes() -> None:
    with pytest.raises(lookback.LookbackError, match="a part of more than 100 characters with '_' between two '%'"):
        compile_expression(f"text like '%{'a' * 100}_b%'", {"text": STRING})
    matches = like.compile_like(like.split_pattern(f"%{'a' * 98}_b%", "\\"))
    assert not matches("a" * 100_000)
    assert matches("a" * 100_000 + "xb")


def test_the_longest_lists_and_chains_are_evaluated_item_by_item() -> None:
    alive = most = 0

    class Counted(np.ndarray):  # type: ignore[type-arg]
        """Counts how many results are alive at a time."""

        def __array_finalize__(self, other: object) -> None:
            nonlocal alive, most
            alive += 1
            most = max(most, alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    values = np.arange(3, dtype=np.int64).view(Counted)
    items = " , ".join(f"n + {at}" for at in range(5, 505))
    expression = compile_expression(f"n in ({items})", {"n": BIGINT})
    assert not expression.evaluate({"n": Column(BIGINT, values)}, 3).is_true().any()
    assert most < 100


# A rule that breaks ----------------------------------------------------------------------------------------------------


class Breaks:
    """Judges as ever, but breaks for one rule once it has judged; counts how often it was asked to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rule_id: str, error: BaseException) -> None:
        self.asked, self._rule_id, self._error = 0, rule_id, error
        for kind, judge in list(evaluation.JUDGES.items()):
            monkeypatch.setitem(evaluation.JUDGES, kind, self._around(judge))
        monkeypatch.setattr(evaluation.TiledJudge, "judge", self._around(evaluation.TiledJudge.judge))

    def _around(self, judge: Any) -> Any:
        def judged(*arguments: Any) -> None:
            judge(*arguments)
            case: RuleRun = arguments[-1]
            if case.entry.rule_id == self._rule_id:
                self.asked += 1
                raise self._error

        return judged


def events(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [
        {"id": at, "at": at * 1_000_000, "customer": 1, "amount": at, "arrival": 1 + at}
        for at in range(start, start + count)
    ]


KINDS: dict[str, dict[str, Any]] = {
    "lookback": {"suppress": "2 seconds"},
    "revised": {"late": "revise"},
    "emptied": {"reset_on_alert": True},
    "tumbling": {"window": {"tumbling": "2 seconds"}, "when": None},
    "session": {"window": {"session": "2 seconds"}, "when": None, "early": True},
    "sequence": {
        "window": None, "measures": None, "when": None,
        "sequence": {"within": "1 hour", "steps": [{"name": "a", "where": "amount > 1"}, {"name": "b", "where": "amount > 2"}]},
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_c4_a_rule_that_breaks_stops_alone_and_its_next_version_begins_anew(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judged(*, breaking: bool) -> tuple[lookback.Harness, int]:
        harness = lookback.Harness(TX)
        harness.rule(document(rule_id="fine"))
        harness.rule(document(rule_id="bad", **KINDS[kind]))
        harness.events(events(3))
        if not breaking:
            return harness, len(harness.alerts)
        with monkeypatch.context() as patch:
            breaks = Breaks(patch, "bad", ZeroDivisionError("of a kind"))
            harness.events(events(5, 3))
            assert breaks.asked == 1
        before = len(harness.alerts)
        harness.rule(document(rule_id="bad", message="mended", **KINDS[kind]))
        harness.events(events(8, 8))
        return harness, before

    plain, said = judged(breaking=False)
    broken, before = judged(breaking=True)
    assert [(each.rule_id, each.version, each.action) for each in broken.errors] == [("bad", 1, "failed")]
    assert "judging failed with ZeroDivisionError: of a kind (test_bad_rules.py" in broken.errors[0].message
    of_bad = [alert for alert in broken.alerts[:before] if alert.rule_id == "bad"]
    assert of_bad == [alert for alert in plain.alerts if alert.rule_id == "bad"]
    assert len([alert for alert in broken.alerts if alert.rule_id == "fine"]) == 16
    # The mended version alone, over the events that came after.
    alone = lookback.Harness(TX)
    alone.rule(document(rule_id="fine"))
    alone.events(events(8))
    alone.rule(document(rule_id="bad", message="mended", **KINDS[kind]), version=2)
    alone.events(events(8, 8))
    mended = [alert for alert in broken.alerts[before:] if alert.rule_id == "bad"]
    expected = [alert for alert in alone.alerts if alert.rule_id == "bad"]
    assert mended
    if kind in ("lookback", "revised"):
        # Its windows hold what the other rule, which asks for the same, has kept.
        assert [alert.event_id for alert in mended] == [alert.event_id for alert in expected]
    else:
        assert mended == expected
    assert said


def test_a_rule_that_breaks_while_it_is_read_again_stops_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = lookback.Harness(TX)
    for name in ("bad", "fine"):
        harness.rule(document(rule_id=name))
    harness.events(events(2))

    def broken(found: dict[str, Any], stream: Stream) -> Any:
        if found["rule_id"] == "bad":
            raise KeyError("from")
        return compile_rule(found, stream)

    # As another process, or another release, reads what is in force.
    compilecache._open_compiler.cache_clear()
    harness._state.book.load(harness._state.book.to_json())
    try:
        monkeypatch.setattr(compilecache, "compile_rule", broken)
        harness.events(events(2, start=2))
    finally:
        monkeypatch.undo()
        compilecache._open_compiler.cache_clear()
    assert [(each.rule_id, each.action) for each in harness.errors] == [("bad", "failed")]
    assert "the document cannot be read: KeyError: 'from'" in harness.errors[0].message
    assert [alert.event_id for alert in harness.alerts if alert.rule_id == "fine"] == ["0", "1", "2", "3"]


def test_what_a_broken_rule_said_of_late_events_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = lookback.Harness(TX)
    harness.rule(document(rule_id="bad", where="amount = 0"))
    harness.rule(document(rule_id="fine", where="amount = 1", late="record"))
    harness.events(events(60))
    Breaks(monkeypatch, "bad", KeyError("x"))
    late = [{"id": 100 + at, "at": 1_000_000, "customer": 1, "amount": at, "arrival": 100} for at in range(2)]
    harness.events(late)
    assert [(each.event_id, each.action) for each in harness.late_events] == [("101", "recorded")]


def test_c4_the_same_batch_repeated_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever broke: a batch is repeated from the state before it."""
    Breaks(monkeypatch, "bad", ValueError("at 0x7f0123456789"))

    def run() -> tuple[list[Output], str]:
        state = ShardState(RuleBook(TX, STREAMS))
        evaluator = Evaluator(TX)
        outputs = []
        for start in range(0, 9, 3):
            rows, _ = read_events(events(3, start), TX, 1)
            changes = [row(1, rule_id="bad", where="amount >= 0"), row(1, rule_id="fine")] if not start else []
            marks = {int(commit): int(time) for commit, time in zip(rows.commits, rows.times, strict=True)}
            outputs.append(evaluator.process(state, Batch(rows, marks=marks, changes=changes)))
        return outputs, state.book.to_json()

    (first, book), (again, book_again) = run(), run()
    assert (first, book) == (again, book_again)
    # It broke in the first batch and was not asked again.
    assert [[failure.reason for failure in output.failures] for output in first] == [
        [f"ValueError: at 0x (test_bad_rules.py:{judged_line()})"], [], [],
    ]  # fmt: skip
    assert {alert.rule_id for output in first for alert in output.alerts} == {"fine"}
    # It needs what it needed: dispatch sends the same for all shards.
    assert first[0].required == first[2].required
    # What the shard knows of it outlives a restart.
    state = ShardState(RuleBook(TX, STREAMS))
    state.book.load(book)
    assert [entry.rule_id for entry in state.book.entries.values() if entry.broken] == ["bad"]


def judged_line() -> int:
    lines, first = inspect.getsourcelines(Breaks)
    return first + next(at for at, line in enumerate(lines) if "raise self._error" in line)


def test_a_feature_that_breaks_stops_the_rules_that_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = Segment.keep_rows

    def broken(self: Segment, feature: Any) -> None:
        if feature.function == "sum":
            raise ValueError("no room")
        keep(self, feature)

    monkeypatch.setattr(Segment, "keep_rows", broken)
    harness = lookback.Harness(TX)
    for rule_id, measure in (("a", "sum(amount)"), ("b", "sum(amount)"), ("c", "count(*)")):
        harness.rule(document(rule_id=rule_id, measures={"n": measure}, when="n >= 0"))
    harness.events(events(1))
    harness.events(events(1, 1))
    assert sorted(each.rule_id or "" for each in harness.errors) == ["a", "b"]
    assert {alert.rule_id for alert in harness.alerts if alert.event_id == "1"} == {"c"}


@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt(), StateError("a page is torn")])
def test_what_is_no_rules_fault_ends_the_batch(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = lookback.Harness(TX)
    harness.rule(document())
    Breaks(monkeypatch, "r", error)
    with pytest.raises(type(error)):
        harness.events(events(1))


def test_c4_quarantine_comes_of_more_failures_than_max_failures_or_of_a_break() -> None:
    def failure(count: int, reason: str = "", event: str = "e7") -> Failure:
        return Failure("r", 3, count, event, (9, 0), reason)

    assert find_quarantines([failure(100)], 100) == []
    (found,) = find_quarantines(merge_failures([failure(60), failure(41, event="e5")]), 100)
    assert (found.rule_id, found.version) == ("r", 3)
    assert "101 events of one batch" in found.comment
    assert "rule_log names the first event; fix the rule and push it again" in found.comment
    assert "e5" not in found.comment, "a privacy request deletes no row of rules"
    (found,) = find_quarantines(merge_failures([failure(1), failure(0, "KeyError: 'x'", "")]), 100)
    assert found.comment.startswith("KeyError: 'x', at commit 9")


def test_a_reason_is_one_short_line_whatever_was_raised() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert describe_error(Odd()) == "Odd: (no text)"
    said = describe_error(ValueError("a\n\0b\ud800" + "x" * 1_000_000))
    assert "\n" not in said
    assert len(said.encode()) < 400

"""Contract section 4: what comes into force from rows of the rules table, and what is refused."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest

from lookback.core.errors import RuleError
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.document import read_rule
from lookback.core.rules.rulebook import RuleBook
from lookback.core.streams.declaration import Stream
from lookback.testing.harness import Harness

FIELDS = {
    "id": "bigint",
    "at": "timestamp",
    "customer_id": "int",
    "amount": "decimal(18,2)",
    "rate": "double",
    "tags": "array<string>",
}
TX, OTHER = (
    Stream.from_dict({"stream": name, "event_id": "id", "event_time": "at", "fields": FIELDS})
    for name in ("tx", "other")
)
STREAMS = {"tx": TX, "other": OTHER}


def document(**more: Any) -> dict[str, Any]:
    base = {
        "rule_id": "r",
        "stream": "tx",
        "group_by": ["customer_id"],
        "window": "1 hour",
        "measures": {"n": "count(*)"},
    }
    return {**base, "when": "n > 3", **more}


def row(
    version: int | None = 1, status: str | None = "active", *, change: str = "insert", commit: int = 1, **more: Any
) -> RuleChange:
    return RuleChange(
        change, commit, more.get("rule_id", "r"), version, status, more.get("text", json.dumps(document(**more)))
    )


def after(
    *changes: RuleChange, book: RuleBook | None = None
) -> tuple[RuleBook, list[tuple[str | None, int | None, str]]]:
    book = book or RuleBook(TX, STREAMS)
    log, _ = book.apply(changes, 7)
    assert all(entry.arrival == 7 and entry.stream == "tx" for entry in log)
    return book, [(entry.rule_id, entry.version, entry.action) for entry in log]


def in_force(book: RuleBook) -> list[tuple[str, int, str]]:
    return [(entry.rule_id, entry.version, entry.status) for entry, _ in book.in_force()]


def test_c4_the_last_row_by_commit_and_version_is_in_force() -> None:
    book, log = after(row(2, commit=1), row(1, commit=1), row(3, "paused", commit=2))
    assert in_force(book) == [("r", 3, "paused")]
    assert log == [("r", 1, "activated"), ("r", 2, "activated"), ("r", 3, "paused")]


def test_c4_null_version_is_the_highest_so_far_plus_one() -> None:
    book, log = after(row(4), row(None, "shadow"))
    assert log == [("r", 4, "activated"), ("r", 5, "shadowed")]
    assert in_force(book) == [("r", 4, "active"), ("r", 5, "shadow")]


def test_c4_an_insert_not_above_the_version_in_force_is_rejected() -> None:
    book, log = after(row(2), row(2, "paused", commit=2))
    assert log[1] == ("r", 2, "rejected")
    assert in_force(book) == [("r", 2, "active")]


def test_c4_update_of_the_row_in_force_or_of_a_higher_version_is_obeyed() -> None:
    book, _ = after(row(2))
    assert after(row(2, "paused", change="update", commit=2), book=book)[1] == [("r", 2, "paused")]
    assert after(row(1, "active", change="update", commit=3), book=book)[1] == []
    assert after(row(3, "draft", commit=4), book=book)[1] == [("r", 3, "drafted")]
    assert in_force(book) == [("r", 2, "paused")]
    assert after(row(3, "active", change="update", commit=5), book=book)[1] == [("r", 3, "activated")]


def test_c4_a_rejected_row_that_is_mended_comes_into_force() -> None:
    book, log = after(row(1), row(2, commit=2, when="nope > 1"))
    assert log[1] == ("r", 2, "rejected")
    assert after(row(2, change="update", commit=3), book=book)[1] == [("r", 2, "activated")]


def test_c4_delete_of_the_row_in_force_retires_the_rule() -> None:
    book, _ = after(row(1), row(2, commit=2))
    assert after(row(1, change="delete", commit=3), book=book)[1] == []
    assert after(row(2, change="delete", commit=4), book=book)[1] == [("r", 2, "retired")]
    assert in_force(book) == []


def test_c4_a_version_for_another_stream_retires_the_rule_in_the_old_one() -> None:
    moved = row(2, commit=2, stream="other")
    book, log = after(row(1), moved)
    assert log == [("r", 1, "activated"), ("r", 2, "retired")]
    assert in_force(book) == []
    there = RuleBook(OTHER, STREAMS)
    log_there, _ = there.apply([row(1), moved], None)
    assert [(entry.version, entry.action) for entry in log_there] == [(2, "activated")]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (row(text="no json"), "is not JSON"),
        (row(text=None), "is empty"),
        (row(text="[]"), "must be a JSON object"),
        (row(text="{" * 100_000), "is not JSON"),
        (row(text='"' + "x" * 600_000 + '"'), "longer than 500,000 bytes"),
        (row(stream="nowhere"), "unknown stream 'nowhere'"),
        (row(status="ACTIVE"), "status must be one of draft, shadow"),
        (row(status=None), "status must be one of"),
        (row(rule_id="R 1"), "rule_id must have 1 to 100"),
        (row(-1), "version must not be negative"),
        (row(text=json.dumps(document(rule_id="s"))), "the document has rule_id 's'"),
        (row(when="n >"), "when"),
    ],
)
def test_c4_a_row_that_is_no_valid_rule_is_rejected_alone(change: RuleChange, reason: str) -> None:
    book, _ = after(row(1, rule_id="fine"))
    log, _ = book.apply([change], 7)
    assert [entry.action for entry in log] == ["rejected"]
    assert reason in log[0].message
    assert in_force(book) == [("fine", 1, "active")]


def test_c4_retire_all_and_advance_are_commands() -> None:
    book, _ = after(row(1))
    advance = RuleChange(
        "insert", 2, "*", None, "advance", json.dumps({"stream": "tx", "time": "1970-01-01T00:00:01Z"})
    )
    elsewhere = RuleChange("insert", 3, "*", None, "retire_all", json.dumps({"stream": "other"}))
    log, commands = book.apply([advance, elsewhere], 7)
    assert [(command.action, command.time) for command in commands] == [("advance", 1_000_000)]
    assert in_force(book) == [("r", 1, "active")]
    log, _ = book.apply([RuleChange("insert", 4, "*", None, "retire_all", None)], 7)
    assert [(entry.rule_id, entry.action) for entry in log] == [("r", "retired"), ("*", "retire_all")]


def test_c4_a_book_comes_back_from_its_text() -> None:
    book, _ = after(row(1), row(2, "paused", commit=2), row(1, rule_id="s", commit=3))
    again = RuleBook(TX, STREAMS)
    again.load(book.to_json())
    assert in_force(again) == in_force(book) == [("r", 2, "paused"), ("s", 1, "active")]


WRONG = [
    ({"rule_id": "Not Good"}, "rule_id must be 1 to 100 lower-case letters"),
    ({"stream": None}, "stream is missing"),
    ({"stream": "other"}, "the rule is for stream 'other', not for 'tx'"),
    ({"severity": "huge"}, "severity must be one of info, low, medium, high, critical, got 'huge'"),
    ({"group_by": "customer_id"}, "group_by must be a list of field names"),
    ({"group_by": ["customr_id"]}, "has no field 'customr_id'; did you mean 'customer_id'?"),
    ({"group_by": ["customer_id", "Customer_ID"]}, "names a field twice"),
    ({"group_by": ["tags"]}, "is an array and cannot be a key"),
    ({"where": "amount"}, "where must be true or false"),
    ({"where": "amnt > 1"}, "amnt"),
    ({"where": "rand() > 1"}, "rand"),
    ({"where": "1=1; drop table rules"}, "where"),
    ({"where": "exists (select 1)"}, "where"),
    ({"window": "0 seconds"}, "window must be longer than 0 s, got '0 seconds'"),
    ({"window": "1 month"}, "a month has no fixed length"),
    ({"window": "soon"}, "'soon' is not a duration"),
    ({"window": 5}, "5 is not a duration"),
    ({"window": None}, "window is missing"),
    ({"window": {"lookback": "1 hour", "delays": "1 s"}}, "unknown key 'delays'"),
    ({"windw": "1 hour"}, "unknown key 'windw'; did you mean 'window'?"),
    ({"measures": {}}, "measures must be a mapping"),
    ({"measures": {"n": "amount"}}, "measures.n"),
    ({"measures": {"n": "sum(rate)"}}, "cast"),
    ({"measures": {"n": "kurtosis(amount)"}}, "kurtosis"),
    ({"measures": {"amount": "count(*)"}, "when": "true"}, "'amount' is a field of the stream"),
    ({"measures": {"window_complete": "count(*)"}, "when": "true"}, "is reserved"),
    ({"measures": {"n": {"measure": "count(*)", "windw": "1 hour"}}}, "unknown key 'windw'"),
    ({"measures": {"a b": "count(*)"}, "when": "true"}, "'a b' is not a name"),
    ({"when": "n"}, "when must be true or false, but 'n' is bigint"),
    ({"when": None}, "when is missing"),
    ({"when": "m > 1"}, "m"),
    ({"late": "maybe"}, "late must be one of evaluate, record"),
    ({"suppress": "0 hours"}, "suppress must be longer than 0 s"),
    ({"allowed_lateness": "2 hours"}, "is longer than the stream allows; write at most 1 hour"),
    ({"effective_from": "tomorrow"}, "must be a time such as"),
    ({"message": "{total} too much"}, "{total} is neither a field nor a measure"),
    ({"tests": {}}, "tests must be a list"),
    ({"tests": [{"events": [], "alert": []}]}, "unknown key 'alert'"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[json.dumps(change)[:50] for change, _ in WRONG])
def test_c4_a_wrong_rule_is_refused_with_place_and_remedy(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RuleError) as refused:
        compile_rule(document(**change), TX)
    assert message in str(refused.value)
    assert str(refused.value).startswith("Rule '")
    assert all(problem.place for problem in refused.value.problems)


def test_c4_all_problems_come_at_once() -> None:
    with pytest.raises(RuleError) as refused:
        compile_rule(document(window="0 s", severity="x", group_by=["nope"], where="zip > 1"), TX, version=3)
    assert len(refused.value.problems) == 4
    assert str(refused.value).startswith("Rule 'r' v3: ")


@pytest.mark.parametrize("wrong", [None, [], "text", 5, {}])
def test_c4_what_is_no_mapping_is_no_rule(wrong: object) -> None:
    assert read_rule(wrong)[1]


@pytest.mark.parametrize(
    ("measure", "value", "shown"),
    [
        ("avg(amount)", "50.006957", "50.01"),
        ("avg(amount)", "50.005000", "50.01"),
        ("avg(amount)", "-50.005000", "-50.01"),
        ("avg(amount)", "50.004999", "50.00"),
        ("avg(amount)", "0.000000", "0.00"),
        ("avg(cast(amount as decimal(38,18)))", "1.000000000000000005", "1.000000000000000005"),
        ("avg(cast(amount as decimal(18,0)))", "50.0069", "50.0069"),
        ("sum(amount)", "50.01", "50.01"),
        ("max(amount)", "12345678901234.50", "12345678901234.50"),
    ],
)
def test_a_message_shows_money_with_the_digits_of_its_field(measure: str, value: str, shown: str) -> None:
    rule = compile_rule(document(measures={"m": measure, "n": "count(*)"}, message="{m} of {amount}"), TX)
    assert rule.message({"m": Decimal(value), "amount": Decimal("1.5")}) == f"{shown} of 1.5"
    assert rule.message({"m": None, "amount": None}) == "null of null"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(12.345678, "12.35"), (0.0, "0.00"), (1e300, f"{10**300}.00"), (float("nan"), "nan"), (float("inf"), "inf")],
)
def test_a_message_shows_a_deviation_of_money_so_too(value: float, shown: str) -> None:
    rule = compile_rule(document(measures={"m": "stddev_samp(amount)", "n": "count(*)"}, message="{m}"), TX)
    assert rule.message({"m": value}) == shown


def test_measures_of_an_alert_stay_exact() -> None:
    harness = Harness(TX)
    harness.rule(document(measures={"m": "avg(amount)"}, when="m > 0", message="{m}"))
    harness.events([{"id": at, "at": f"2026-03-01T10:00:0{at}Z", "amount": at} for at in (1, 2, 2)])
    alert = harness.alerts[-1]
    assert (alert.message, alert.measures["m"]) == ("1.67", Decimal("1.666667"))

"""Expressions in keys: entries of group_by that are a name and an expression over the event."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lookback.core.engine.schedule import Seed
from lookback.core.errors import RuleError
from lookback.core.rules.account import Account
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.coverage import find_coverage
from lookback.core.rules.gate import hash_document
from lookback.core.rules.keys import KeyPart, find_key, list_entry_names
from lookback.core.rules.remarks import find_remarks
from lookback.core.rules.rulebook import RuleBook
from lookback.core.rules.wording import describe_rule
from lookback.core.state.shard import ShardState
from lookback.core.streams.declaration import Stream
from lookback.core.streams.eventrows import read_events
from lookback.testing.harness import Harness, replay
from lookback.testing.rule_tests import run_rule_tests

STREAM = Stream.from_dict(
    {
        "stream": "logins", "event_id": "id", "event_time": "at", "allowed_lateness": "1 hour",
        "fields": {
            "id": "int", "at": "timestamp", "email": "string", "ip": "string", "n": "int", "d": "double", "tags": "array<string>",
        },
    }
)  # fmt: skip
DOMAIN = {"domain": "lower(split_part(email, '@', 2))"}
RULE: dict[str, Any] = {
    "rule_id": "many", "stream": "logins", "group_by": [DOMAIN], "window": "1 hour", "measures": {"logins": "count(*)"},
    "when": "logins >= 2", "message": "{logins} at {domain}", "entities": ["domain"],
}  # fmt: skip
EVENT = {key: value for key, value in RULE.items() if key not in ("window", "measures", "when", "message")}
STEPS = {"within": "1 hour", "steps": [{"name": "first", "where": "n = 1"}, {"name": "second", "where": "n = 2"}]}
KINDS: dict[str, dict[str, Any]] = {
    "event": {**EVENT, "when": "domain <> 'c.de'", "message": "{domain}"},
    "lookback": RULE,
    "tumbling": {**RULE, "window": {"tumbling": "1 hour"}, "when": "domain <> 'c.de' and logins >= 2"},
    "session": {**RULE, "window": {"session": "1 hour"}, "when": "domain <> 'c.de' and logins >= 2"},
    "sequence": {**EVENT, "sequence": STEPS, "message": "{domain}"},
}


def row(number: int, email: str | None, minute: int = 0, **more: Any) -> dict[str, Any]:
    return {"id": number, "at": f"2026-03-01T10:{minute:02}:00Z", "email": email, "arrival": number, **more}


ROWS = [row(1, "Ann@A.de", n=1), row(2, "bob@a.DE", 1, n=2), row(3, "eve@b.de", 2, n=2), row(4, "x@c.de", 3, n=1)]


@pytest.mark.parametrize("kind", KINDS)
def test_c12_5_rules_of_every_kind_group_by_an_expression_and_show_its_name(kind: str) -> None:
    last = row(5, "z@z.de", 0) | {"at": "2026-03-01T20:00:00Z"}
    alerts = replay([KINDS[kind]], [*ROWS, last], STREAM).alerts
    found = [(dict(alert.key), dict(alert.entities), alert.message) for alert in alerts]
    texts = {"event": ["a.de", "a.de", "b.de", "z.de"], "sequence": ["a.de"]}.get(kind, ["a.de"])
    counted = {"event": "{}", "sequence": "{}"}.get(kind, "2 at {}")
    assert found == [({"domain": text}, {"domain": text}, counted.format(text)) for text in texts]


def test_c12_5_equal_expressions_share_features_and_a_bare_field_is_the_field() -> None:
    same = {**RULE, "rule_id": "same", "group_by": [{"host": "LOWER( split_part(EMAIL,'@',2) )"}]}
    same |= {"message": "", "entities": ["host"]}
    one, other = (compile_rule(document, STREAM) for document in (RULE, same))
    assert (one.group_by, one.features) == (other.group_by, other.features)
    assert [part.name for part in (*one.key, *other.key)] == ["domain", "host"]
    plain = {"group_by": ["ip"], "message": "", "entities": []}
    field, named = (compile_rule({**RULE, **plain, "group_by": [each]}, STREAM) for each in ("ip", {"address": "ip"}))
    assert field.features == named.features
    assert field.key == (KeyPart("ip", "ip", STREAM.fields["ip"], frozenset({"ip"})),)
    assert (named.key_names, named.where) == (("address",), None)
    harness = Harness(STREAM)
    harness.rule({**RULE, **plain, "group_by": [DOMAIN]})
    harness.rule(same)
    harness.events(ROWS)
    assert harness.state_rows() == len(ROWS)


def test_c12_5_a_field_with_a_word_of_sql_as_its_name_is_that_field_too() -> None:
    fields = {"id": "int", "at": "timestamp", "Order": "string", "null": "int"}
    stream = Stream.from_dict({"stream": "logins", "event_id": "id", "event_time": "at", "fields": fields})
    document = {"rule_id": "r", "stream": "logins", "when": "id > 0", "suppress": "1 hour"}
    one, other = (
        compile_rule({**document, "group_by": group_by}, stream)
        for group_by in (["order", "null"], [{"a": "`ORDER`"}, {"b": "`null`"}])
    )
    assert one.group_by == other.group_by == other.routed_by == ("Order", "null")
    (alert,) = replay(
        [{**document, "group_by": [{"b": "`null`"}], "when": "b = 3"}],
        [{"id": 1, "at": "2026-03-01T10:00:00Z", "null": 3}, {"id": 2, "at": "2026-03-01T10:00:00Z", "null": 4}],
        stream,
    ).alerts
    assert dict(alert.key) == {"b": "3"}


def test_the_key_of_an_event_is_null_where_the_expression_has_an_error_or_leaves_the_calendar() -> None:
    events, _ = read_events([row(1, "a", n=0), row(2, "a", n=3)], STREAM, 1)
    for sql, value in (("60 div n", 20), ("cast(60 div n as string)", "20"), ("d / 0", None), ("d * -1", None)):
        assert events.key_column(sql).to_list() == [None, value]
    beyond = events.key_column("case when n = 0 then at + interval 2932897 days else at end").to_list()
    assert (beyond[0], beyond[1].year) == (None, 2026)
    zeros, _ = read_events([row(1, "a", d=0.0)], STREAM, 1)
    assert str(zeros.key_column("d * -1").item(0)) == "0.0"


def test_c12_5_null_is_a_value_and_the_order_of_entries_makes_no_difference() -> None:
    entries: list[Any] = [DOMAIN, "ip"]
    rows = [row(1, None, ip="a"), row(2, None, 1, ip="a"), row(3, "x@a.de", 2, ip="a"), row(4, "X@A.DE", 3, ip=None)]
    for group_by in (entries, entries[::-1]):
        (alert,) = replay([{**RULE, "group_by": group_by, "message": "{domain}"}], rows, STREAM).alerts
        assert (alert.event_id, dict(alert.key), alert.message) == ("2", {"domain": None, "ip": "a"}, "null")
    turned = {**RULE, "group_by": entries[::-1]}
    assert hash_document({**RULE, "group_by": entries}) == hash_document(turned)
    assert hash_document({**RULE, "group_by": [{"domain": "upper(email)"}, "ip"]}) != hash_document(turned)


# Dividing by zero, and a time that Python cannot say.
FAILING = ["60 div n", "case when n = 0 then at + interval 2932897 days else at - interval 1 day end"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("expression", FAILING)
def test_c12_5_an_error_in_the_key_is_an_error_of_the_event_unless_where_is_false(kind: str, expression: str) -> None:
    document = {**KINDS[kind], "group_by": [{"part": expression}], "entities": [], "message": ""}
    if "when" in document:
        document["when"] = "true"
    rows = [row(1, "a", n=1, ip="x"), row(2, "a", n=0, ip="x"), row(3, "a", n=0, ip="y"), row(4, "a", n=2, ip="x")]
    for where, failed in (({}, 2), ({"where": "ip = 'x'"}, 1)):
        harness = Harness(STREAM)
        harness.rule({**document, **where})
        harness.events(rows)
        (error,) = harness.errors
        assert (error.action, re.findall(r"\d+", error.message)[0]) == ("failed", str(failed))
        assert not {"2", "3"} & {alert.event_id for alert in harness.alerts}


def test_c12_5_when_reads_the_name_of_an_entry_and_a_parameter_may_be_in_it() -> None:
    document = {**RULE, "group_by": [{"part": "split_part(email, :mark, 2)"}], "parameters": {"mark": "@"}}
    document |= {"when": "logins >= 1 and PART = 'b.de'", "message": "{part}", "entities": ["Part"]}
    (alert,) = replay([document], ROWS, STREAM).alerts
    assert (alert.event_id, alert.message, dict(alert.entities)) == ("3", "b.de", {"part": "b.de"})
    assert [remark for remark in find_remarks(compile_rule(document, STREAM)) if remark.place != "tests"] == []
    words = describe_rule(compile_rule(document, STREAM))
    assert "per part (split_part(email, '@', 2))" in words


def test_c12_5_only_the_fields_of_expressions_are_sent_and_dispatch_keeps_the_rule_of_where() -> None:
    rule = compile_rule(
        {**RULE, "where": "ip = 'x'", "group_by": [{"part": "60 div n"}], "entities": []} | {"message": ""}, STREAM
    )
    coverage = find_coverage([rule])
    assert (rule.fields, coverage.fields, coverage.grouping_sets) == (("ip", "n"), {"ip", "n"}, [("60 div n",)])
    assert coverage.conditions(("60 div n",)) == ["ip = 'x' and (60 div n is null or true)"]
    assert Account.of([rule], []).fields == {"ip", "n"}
    event = compile_rule({**EVENT, "when": "domain = 'a.de'"}, STREAM)
    assert find_coverage([event]).conditions(("id",)) == ["lower(split_part(email, '@', 2)) = 'a.de'"]


REFUSED: dict[str, tuple[Any, str, str]] = {
    "two names": ({"a": "ip", "b": "n"}, "group_by[0]", "one name with one expression"),
    "no name": ({}, "group_by[0]", "begin a new entry"),
    "a number": (3, "group_by", "such as [customer_id]"),
    "no word": ({"a b": "ip"}, "group_by[0]", "is not a name"),
    "blank": ({"a": " "}, "group_by[0].a", "an expression over the event"),
    "no text": ({"a": None}, "group_by[0].a", "an expression over the event"),
    "a field": ({"IP": "lower(ip)"}, "group_by[0].IP", "'IP' is a field of the stream; choose another name"),
    "a measure": ({"logins": "lower(ip)"}, "group_by[0].logins", "is a measure; choose"),
    "reserved": ({"window_complete": "n > 0"}, "group_by[0].window_complete", "is reserved; choose"),
    "an aggregate": ({"a": "count(*)"}, "group_by[0].a", "an aggregate belongs in measures"),
    "an unknown field": ({"a": "lower(mail)"}, "group_by[0].a", "unknown field 'mail'"),
    "an array": ({"a": "filter(tags, t -> t <> 'x')"}, "group_by[0].a", "is an array<string> and cannot be in a key; make one"),
    "a list": ({"a": "in_list(ip, 'bad')"}, "group_by[0].a", "use in_list in where or when"),
    "a constant": ({"a": "1 + 1"}, "group_by[0].a", "is the same for all events; leave it out"),
    "always NULL": ({"a": "case when n > 0 then null end"}, "group_by[0].a", "is always NULL; leave it out"),
    "a rounded digit": ({"a": "cast(ln(d) as int)"}, "group_by[0].a", "calls ln(), whose last digit"),
    "a parameter": ({"a": "split_part(ip, :mark, 1)"}, "group_by[0].a", "unknown parameter :mark"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_c12_5_a_wrong_entry_is_refused_with_a_remedy(name: str) -> None:
    entry, place, words = REFUSED[name]
    document = {key: value for key, value in RULE.items() if key not in ("entities", "message")}
    with pytest.raises(RuleError) as caught:
        compile_rule({**document, "group_by": [entry]}, STREAM)
    (problem,) = caught.value.problems
    assert (problem.place, words in problem.message) == (place, True), problem


@pytest.mark.parametrize(
    ("group_by", "words"),
    [
        (["ip", {"a": "ip"}], "ip and a have the same value in every event; leave one of them out"),
        ([{"a": "lower(ip)"}, {"b": "LOWER(ip)"}], "a and b have the same value in every event"),
        ([{"a": "lower(ip)"}, {"A": "upper(ip)"}], "names a field twice"),
    ],
)
def test_c12_5_two_entries_with_one_name_or_value_are_refused(group_by: list[Any], words: str) -> None:
    with pytest.raises(RuleError, match=words):
        compile_rule({**RULE, "group_by": group_by, "entities": [], "message": ""}, STREAM)


def test_c12_5_a_name_that_is_a_step_is_refused() -> None:
    with pytest.raises(RuleError, match="'first' is a step; choose another name"):
        compile_rule({**KINDS["sequence"], "group_by": [{"first": "lower(ip)"}], "entities": [], "message": ""}, STREAM)


def test_the_tests_of_a_rule_name_entries() -> None:
    example = {"name": "two", "events": ROWS[:2], "alerts": [{"event_id": 2, "key": {"domain": "a.de"}}]}
    assert run_rule_tests(compile_rule({**RULE, "tests": [example]}, STREAM), STREAM) == []
    example["alerts"] = [{"event_id": 2, "key": {"email": "bob@a.DE"}}]
    (problem,) = run_rule_tests(compile_rule({**RULE, "tests": [example]}, STREAM), STREAM)
    assert "no field of group_by 'email'; known: domain" in problem.message


def test_the_key_of_a_document_is_found_without_the_rest_of_it() -> None:
    assert list_entry_names([DOMAIN, "ip", 3]) == ["domain", "ip", "3"]
    assert list_entry_names(None) == list_entry_names("x") == []
    assert find_key(RULE, STREAM) == compile_rule(RULE, STREAM).key
    assert find_key({"group_by": ["gone"]}, STREAM) is None
    assert find_key({"group_by": [{"a": ""}]}, STREAM) is None
    assert find_key({}, STREAM) == ()


def test_what_an_alert_suppressed_before_a_rebuild_it_suppresses_afterwards() -> None:
    rule = {**RULE, "group_by": [DOMAIN, "ip"], "suppress": "1 hour"}
    compiled = compile_rule(rule, STREAM)
    state = ShardState(RuleBook(STREAM, {STREAM.name: STREAM}))
    key = dict(zip(compiled.group_by, (None if name == "ip" else "a.de" for name in compiled.group_by), strict=True))
    Seed(100, [("many", key, 90)]).apply_to(state, STREAM)
    events, _ = read_events([row(1, "Ann@A.de"), row(2, "bob@b.de")], STREAM, 1)
    keys = events.find_keys(compiled.group_by)
    table = state.tables.raised("many", compiled.group_by)
    assert [table.get(keys.pair(at)) for at in range(2)] == [90, None]

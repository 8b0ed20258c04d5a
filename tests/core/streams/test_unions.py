"""Unions (12.8): their declaration, and the watermark that waits for the slowest member that is not idle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import lookback
from lookback.config import load_stream, load_streams
from lookback.core.errors import EventError, StreamError
from lookback.core.streams.declaration import Stream
from lookback.core.streams.declarations import Declarations, Declared
from lookback.core.streams.unions import Union
from lookback.core.streams.watermarks import Reached, pass_marks
from lookback.core.values.times import NEVER

SECOND, HOUR = 1_000_000, 3_600_000_000
LOGINS = {
    "stream": "logins",
    "event_id": "id",
    "event_time": "at",
    "fields": {"id": "bigint", "at": "timestamp", "user": "string", "ok": "boolean"},
    "max_out_of_orderness": "1 minute",
}
PAYMENTS = {
    "stream": "payments",
    "event_id": "id",
    "event_time": "paid_at",
    "fields": {"id": "string", "paid_at": "timestamp", "payer": "string", "amount": "decimal(9,2)"},
    "max_out_of_orderness": "2 minutes",
}
ACTIVITY: dict[str, Any] = {
    "stream": "activity",
    "union": ["logins", "payments"],
    "columns": {"payments": {"user": "payer"}},
}


def declare(folder: Path, *documents: dict[str, Any]) -> Stream:
    """Reads the last of these declarations, and the two streams, from a folder."""
    (folder / "streams").mkdir(exist_ok=True)
    for document in (LOGINS, PAYMENTS, *documents):
        (folder / f"streams/{document['stream']}.yml").write_text(yaml.safe_dump(document, sort_keys=False))
    return load_streams(folder)[documents[-1]["stream"]]


def test_c12_8_a_union_has_the_fields_of_all_members_and_the_member(tmp_path: Path) -> None:
    stream = declare(tmp_path, ACTIVITY)
    assert {name: str(type_) for name, type_ in stream.fields.items()} == {
        "event_id": "string", "event_time": "timestamp", "member": "string", "user": "string", "ok": "boolean",
        "payer": "string", "amount": "decimal(9,2)",
    }  # fmt: skip
    members = {"logins": 60 * SECOND, "payments": 120 * SECOND}
    assert stream.union == Union(members, HOUR, {"payments": {"user": "payer"}})
    assert (stream.event_id, stream.event_time) == ("event_id", "event_time")
    assert stream.max_out_of_orderness == 120 * SECOND
    assert load_stream(tmp_path / "streams/activity.yml") == stream
    assert Stream.from_dict(stream.to_dict()) == stream


def test_c12_8_fields_of_a_union_may_be_listed(tmp_path: Path) -> None:
    listed = {"key": "string", "time": "timestamp", "id": "string", "user": "string"}
    stream = declare(
        tmp_path,
        {
            **ACTIVITY,
            "event_id": "key",
            "event_time": "time",
            "fields": listed,
            "columns": {"logins": {"id": "hex(id)"}},
        },
    )
    assert list(stream.fields) == ["key", "time", "member", "id", "user"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"union": "logins"}, "a list of streams, such as [logins, payments], is needed, got 'logins'"),
        ({"union": ["logins", "payment"]}, "no stream 'payment' is declared; did you mean 'payments'?"),
        ({"union": ["logins", "logins"]}, "'logins' is listed twice; list each stream once"),
        ({"union": ["logins", "activity"]}, "'activity' is the union itself; list the streams that it is made of"),
        ({"union": ["logins", "other"]}, "'other' is a union too; list the streams that it is made of"),
        ({"union": ["logins", "alerts"]}, "'alerts' is written by evaluations and cannot be in a union; leave it out"),
        (
            {"union": {"logins": "1 hour"}},
            "list the members; the max_out_of_orderness of each is that of its own declaration",
        ),
        (
            {"max_out_of_orderness": "1 hour"},
            "the watermark of a union goes by the max_out_of_orderness of each member; leave it out",
        ),
        ({"source": {"path": "x"}}, "the events of a union come from its members; leave it out"),
        ({"table": "/lake/x"}, "ingest fills the table of a union from its members; leave it out"),
        ({"lookups": [{"table": "t"}]}, "declare the look-ups of the members; a union can have their fields"),
        ({"order_by": ["user"]}, "a union keeps the order in which its members' events arrive; leave it out"),
        ({"idle": "1 month"}, "'1 month': a month has no fixed length; write days, such as '30 days'"),
        (
            {"fields": {"amount": "int"}},
            "payments has 'amount' as decimal(9,2), but the union declares it as int; convert it, such as columns: {",
        ),
        (
            {"fields": {"event_id": "bigint", "user": "string"}},
            "the id of an event of a union is `member:id`, so its type is string, got 'bigint'",
        ),
        ({"fields": {"usr": "string"}}, "none of the members has 'usr', nor do `columns`; did you mean 'user'?"),
        ({"columns": {"payment": {"user": "payer"}}}, "'payment' is not one of the members of the union; did you mean"),
        ({"columns": {"payments": {"who": "payer"}}}, "'who' is not one of the fields of the union; declare its type"),
        (
            {"columns": {"payments": {"member": "payer"}}},
            "ingest makes 'member' of every event of a union; leave it out",
        ),
        (
            {"columns": {"user": "payer"}},
            "a union has columns per member, such as {logins: {user: customer_id}}, got 'payer'",
        ),
        ({"columns": {"payments": {"user": 1}}}, "a SQL expression is needed, got 1"),
        (
            {"columns": "payer"},
            "a union has columns per member, such as {logins: {user: customer_id}}, got 'payer'",
        ),
    ],
)
def test_c12_8_a_wrong_union_is_refused_with_the_remedy(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    other = {"stream": "other", "union": ["logins"], "fields": {"user": "string"}}
    with pytest.raises(StreamError) as error:
        declare(tmp_path, other, {**ACTIVITY, **changes})
    assert sentence in str(error.value)
    assert "got None" not in str(error.value)


def test_c12_8_members_that_clash_are_named_both(tmp_path: Path) -> None:
    clashing = {**LOGINS, "stream": "visits", "fields": {**LOGINS["fields"], "amount": "int"}}  # type: ignore[dict-item]
    with pytest.raises(StreamError) as error:
        declare(tmp_path, clashing, {"stream": "activity", "union": ["visits", "payments"]})
    assert "payments has 'amount' as decimal(9,2), but visits has it as int; convert it" in str(error.value)
    named = {**LOGINS, "stream": "visits", "fields": {**LOGINS["fields"], "member": "string"}}  # type: ignore[dict-item]
    with pytest.raises(StreamError) as error:
        declare(tmp_path, named, {"stream": "activity", "union": ["visits", "payments"]})
    assert "visits has a field 'member', which in a union holds the name of the member" in str(error.value)


def starts(name: str, process: str) -> dict[str, Any]:
    fields = {"id": "string", "at": "timestamp", "process": process}
    return {"stream": name, "event_id": "id", "event_time": "at", "fields": fields}


def test_c12_8_structs_of_members_are_structs_of_the_union(tmp_path: Path) -> None:
    some, more = starts("windows", "struct<name:string,id:int>"), starts("linux", "struct<name:string,user:string>")
    stream = declare(tmp_path, some, more, {"stream": "all", "union": ["windows", "linux"]})
    parts = {"process.name": "string", "process.id": "int", "process.user": "string"}
    assert {name: str(type_) for name, type_ in stream.fields.items() if "." in name} == parts
    assert Stream.from_dict(stream.to_dict()) == stream
    listed = {
        "fields": {"process": "struct<name:string>"},
        "columns": {"linux": {"process.name": "lower(process.name)"}},
    }
    stream = declare(tmp_path, some, more, {"stream": "all", "union": ["windows", "linux"], **listed})
    assert list(stream.fields) == ["event_id", "event_time", "member", "process.name"]


@pytest.mark.parametrize(
    ("process", "columns", "sentence"),
    [
        ("string", {}, "linux has 'process' as string, but the union declares it as a struct; convert it, such as"),
        ("struct<name:int>", {}, """columns: {linux: {process.name: "cast(process.name as string)"}}"""),
        ("struct<name:string>", {"process": "x"}, "'process' is a struct; map its parts one by one"),
        ("struct<name:string>", {"process.nam": "x"}, "'process.nam' is not one of the fields of the union"),
    ],
)
def test_c12_8_structs_that_clash_are_refused_with_the_remedy(
    tmp_path: Path, process: str, columns: dict[str, str], sentence: str
) -> None:
    some, more = starts("windows", "struct<name:string>"), starts("linux", process)
    union = {"stream": "all", "union": ["windows", "linux"], "fields": {"process": "struct<name:string>"}}
    with pytest.raises(StreamError) as error:
        declare(tmp_path, some, more, {**union, "columns": {"linux": columns}} if columns else union)
    assert sentence in str(error.value)


def test_only_a_union_may_say_idle() -> None:
    with pytest.raises(StreamError, match="only a union has idle members; leave it out"):
        Stream.from_dict({**LOGINS, "idle": "1 hour"})


def minute(text: str) -> int:
    hours, minutes = text.split(":")
    return (int(hours) * 60 + int(minutes)) * 60 * SECOND


def watermarks(*marks: dict[str, str], idle: str = "1 hour", **members: str) -> list[str]:
    """The watermark after each commit as h:mm, for members whose disorder is a minute unless given."""
    union = {"x": "1 minute", "y": "1 minute", **members}
    stream = Stream.from_dict(
        {"stream": "u", "union": union, "idle": idle, "fields": {"k": "string"}},
    )
    read = [{name: minute(text) for name, text in mark.items()} for mark in marks]
    whole = pass_marks(stream, Reached(), read)
    # The same for any cut.
    for cut in range(len(read)):
        first = pass_marks(stream, Reached(), read[:cut])
        second = pass_marks(stream, first.reached, read[cut:])
        assert second.reached == whole.reached
        before = int(first.watermarks[-1]) if cut else NEVER
        assert [max(before, each) for each in second.watermarks.tolist()] == whole.watermarks[cut:].tolist()
    minutes = [None if each == NEVER else each // (60 * SECOND) for each in whole.watermarks.tolist()]
    return ["none" if each is None else f"{each // 60}:{each % 60:02}" for each in minutes]


def test_c12_8_the_watermark_waits_for_the_slowest_member_that_is_not_idle() -> None:
    # The table of core/streams/watermarks.py.
    found = watermarks({"x": "10:00"}, {"y": "10:05"}, {"y": "10:50"}, {"y": "11:10"}, {"x": "11:20"}, {"y": "11:25"})
    assert found == ["9:59", "9:59", "9:59", "11:09", "11:09", "11:19"]


def test_c12_8_a_member_is_idle_when_the_others_are_more_than_idle_ahead() -> None:
    assert watermarks({"x": "10:00"}, {"y": "11:00"}) == ["9:59", "9:59"]
    assert watermarks({"x": "10:00"}, {"y": "11:01"}) == ["9:59", "11:00"]


def test_c12_8_a_member_that_lags_behind_is_not_idle() -> None:
    # Each event of x is two hours older than those of y, but they keep coming.
    found = watermarks({"y": "12:00"}, {"x": "10:00"}, {"y": "12:30"}, {"x": "10:40"}, {"y": "13:30"}, {"y": "13:31"})
    assert found == ["11:59", "11:59", "11:59", "11:59", "11:59", "13:30"]
    assert watermarks({"x": "9:00", "y": "9:00"}, {"y": "9:50"}, {"x": "9:10"}, {"y": "10:40"}, {"x": "9:20"}) == [
        "8:59", "8:59", "9:09", "9:09", "9:19",
    ]  # fmt: skip


def test_c12_8_a_member_without_any_event_does_not_count_and_the_watermark_never_falls() -> None:
    assert watermarks({"y": "12:00"}, {"x": "10:00"}, {"x": "12:30"}) == ["11:59", "11:59", "11:59"]


def test_c12_8_each_member_has_its_own_disorder() -> None:
    assert watermarks({"x": "10:00", "y": "10:00"}, y="30 minutes") == ["9:30"]
    assert watermarks({"x": "10:00", "y": "10:20"}, y="30 minutes") == ["9:50"]


RULE = {
    "rule_id": "login-then-payment",
    "stream": "activity",
    "group_by": ["user"],
    "sequence": {
        "within": "10 minutes",
        "steps": [
            {"name": "failed", "where": "member = 'logins' and not ok", "at_least": 2},
            {"name": "paid", "where": "member = 'payments' and amount > 100"},
        ],
    },
}


def event(name: str, at: str, **values: Any) -> dict[str, Any]:
    return {
        "event_id": name,
        "member": name.partition(":")[0],
        "event_time": f"2026-03-01T{at}:00Z",
        "user": "ann",
        **values,
    }


def test_c12_8_a_sequence_goes_across_members_and_waits_for_the_slower_one(tmp_path: Path) -> None:
    harness = lookback.Harness(declare(tmp_path, ACTIVITY))
    harness.rule(RULE)
    harness.rule(
        {
            "rule_id": "hourly",
            "stream": "activity",
            "window": {"tumbling": "10 minutes"},
            "measures": {"n": "count(*)"},
        }
    )
    harness.events([event("logins:1", "10:00", ok=False), event("logins:2", "10:01", ok=False)])
    # Payments come much later; the watermark is that of logins, so none is late.
    harness.events([event("payments:a", "10:02", amount=500), event("logins:3", "10:40", ok=True)])
    assert [(alert.rule_id, alert.event_id) for alert in harness.alerts] == [("login-then-payment", "payments:a")]
    assert harness.late_events == []
    harness.events([event("payments:b", "10:30", amount=1)])
    assert [alert.measures for alert in harness.alerts if alert.rule_id == "hourly"] == [{"n": 3}]


def test_c12_8_events_of_a_union_name_their_member(tmp_path: Path) -> None:
    harness = lookback.Harness(declare(tmp_path, ACTIVITY))
    with pytest.raises(
        EventError, match="row 0: member is None; name the stream from which the event of the union comes"
    ):
        harness.events([{"event_id": "logins:1", "event_time": "2026-03-01T10:00:00Z"}])
    with pytest.raises(EventError, match="row 0: member is 'visits'"):
        harness.events([event("visits:1", "10:00")])


def test_c12_8_members_that_changed_are_logged_with_the_declaration(tmp_path: Path) -> None:
    stream = declare(tmp_path, ACTIVITY)
    changed = declare(tmp_path, {**ACTIVITY, "union": ["logins"], "columns": {}, "idle": "2 hours"})
    rows = [(None, Declared.now(changed, "1").text), (5, Declared.now(stream, "1").text)]
    known = Declarations.from_rows(stream, rows)
    assert [each.stream.union and each.stream.union.members.keys() for each in known.listed] == [
        {"logins"},
        {"logins", "payments"},
    ]
    assert known.listed[0].stream.union is not None
    assert known.listed[0].stream.union.idle == 2 * HOUR
    # What only ingest reads is no part of it.
    other = declare(tmp_path, {**ACTIVITY, "columns": {"payments": {"user": "upper(payer)"}}})
    assert Declared.now(other, "1").text == Declared.now(stream, "1").text

"""Structs: declared as a whole, read by their parts."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from lookback.core.errors import EventError, LookbackError, RuleError, StreamError
from lookback.core.expressions.syntax import name_as_sql
from lookback.core.streams.declaration import Stream
from lookback.testing.harness import Harness
from lookback.testing.rule_tests import check_rule, run_rule_tests

DECLARED = {
    "id": "bigint",
    "at": "timestamp",
    "host": "string",
    "process": "struct<name: string, pid: bigint, Parent struct<`name`:string, args: array<string>, "
    "a: struct<b: struct<c: decimal(10,2)>>>>",
}


def declare(**more: Any) -> Stream:
    document = {"stream": "starts", "event_id": "id", "event_time": "at", "fields": DECLARED, **more}
    return Stream.from_dict(document)


def start(id_: int, process: Any, **more: Any) -> dict[str, Any]:
    return {"id": id_, "at": f"2026-01-01T00:00:{id_:02}Z", "host": "h", "process": process, **more}


EVENTS = [
    start(1, {"name": "cmd", "pid": 4, "Parent": {"name": "winword", "args": ["a"], "a": {"b": {"c": "1.50"}}}}),
    start(2, {"name": "ps", "pid": 5, "Parent": {"name": "winword", "args": ["-enc"], "a": {"b": None}}}),
    start(3, {"name": "cmd", "pid": None, "Parent": None}),
    start(4, None),
    {"id": 5, "at": "2026-01-01T00:00:05Z"},
]
EVENT = {"rule_id": "a", "where": "process.parent.NAME like '%word' and Process.Parent.a.b.c >= 1.5"}
EVENT |= {"message": "{process.name} {process.Parent.a.b.c}", "entities": ["process.name"]}
COUNT = {"rule_id": "b", "group_by": ["process.Parent.name"], "window": "1 minute"}
COUNT |= {"measures": {"n": "count(distinct process.name)"}, "when": "n >= 2 and process.pid > 4"}
SEQUENCE = {
    "rule_id": "c",
    "group_by": ["host"],
    "sequence": {
        "within": "1 minute",
        "steps": [
            {"name": "first", "where": "process.name = 'cmd' and not array_contains(process.Parent.args, 'x')"},
            {
                "name": "then",
                "where": "array_contains(first.process.pid, process.pid - 1) and process.Parent.a.b.c is null "
                "and element_at(first.process.Parent.a.b.c, 1) = 1.5 "
                "and process.Parent.name = element_at(first.process.Parent.name, 1)",
            },
        ],
    },
    "message": "{first.process.name} {first.count} {process.Parent.name}",
}


def test_c12_4_a_struct_is_declared_as_a_whole_and_each_part_is_a_field() -> None:
    stream = declare()
    assert [*stream.fields][3:] == [
        "process.name", "process.pid", "process.Parent.name", "process.Parent.args", "process.Parent.a.b.c",
    ]  # fmt: skip
    assert str(stream.fields["process.Parent.a.b.c"]) == "decimal(10,2)"
    assert stream.table_columns["process"] == (
        "struct<name:string,pid:bigint,Parent:struct<name:string,args:array<string>,a:struct<b:struct<c:decimal(10,2)>>>>"
    )
    assert Stream.from_dict(stream.to_dict()) == stream


def read_alerts(events: Any) -> list[Any]:
    harness = Harness(declare())
    for rule in (EVENT, COUNT, SEQUENCE):
        harness.rule({**rule, "stream": "starts"})
    harness.events(events)
    assert not harness.errors
    return [(a.rule_id, a.event_id, dict(a.key), a.message, dict(a.entities), a.evidence) for a in harness.alerts]


def test_c12_4_rules_of_each_kind_read_parts_of_structs_by_their_names() -> None:
    found = read_alerts(EVENTS)
    assert found[0] == ("a", "1", {}, "cmd 1.50", {"process.name": "cmd"}, ("1",))
    assert found[1][:3] == ("b", "2", {"process.Parent.name": "winword"})
    assert found[2][:4] == ("c", "2", {"host": "h"}, "[cmd] 1 winword")
    assert list(found[2][5]) == ["1", "2"]
    assert len(found) == 3


def test_c12_4_structs_come_as_mappings_frames_and_arrow() -> None:
    found = read_alerts(EVENTS)
    parent = pa.struct(
        [
            ("name", pa.string()),
            ("args", pa.list_(pa.string())),
            ("a", pa.struct([("b", pa.struct([("c", pa.string())]))])),
        ]
    )
    process = pa.struct([("name", pa.string()), ("pid", pa.int64()), ("Parent", parent)])
    schema = pa.schema([("id", pa.int64()), ("at", pa.string()), ("host", pa.string()), ("process", process)])
    assert read_alerts(pa.Table.from_pylist(EVENTS, schema)) == found
    assert read_alerts(pd.DataFrame(EVENTS)) == found
    # A part that no event has is NULL, as a missing field is.
    lacking = pa.table({"id": [1], "at": ["2026-01-01T00:00:01Z"], "process": [{"pid": 3}]})
    assert read_alerts(lacking) == []
    with pytest.raises(EventError, match=r"row 1: process must be a struct, such as \{name: \.\.\.\}, got 'cmd'"):
        read_alerts([EVENTS[0], start(2, "cmd")])


@pytest.mark.parametrize(
    ("where", "problem"),
    [
        ("process.nme = 'x'", "unknown field 'process.nme'; did you mean 'process.name'?"),
        ("process is null", "process is a struct; read a part of it, such as process.name"),
        ("process.Parent.a = 1", "process.Parent.a is a struct; read a part of it, such as process.Parent.a.b.c"),
        ("process.Parent.a.b.d = 1", "unknown field 'process.Parent.a.b.d'; did you mean 'process.Parent.a.b.c'?"),
        ("exists(process.Parent.args, x -> x.y = 1)", "a nested field is not allowed"),
    ],
)
def test_c12_4_a_name_that_is_no_part_is_refused_with_what_there_is(where: str, problem: str) -> None:
    with pytest.raises(LookbackError) as refused:
        check_rule({"rule_id": "a", "stream": "starts", "where": where}, {"starts": declare()})
    assert problem in str(refused.value)


def test_c12_4_a_step_cannot_have_the_name_of_a_struct() -> None:
    steps = [{"name": "process", "where": "true"}, {"name": "b", "where": "process.pid = 1"}]
    with pytest.raises(LookbackError, match="'process' is a field of the stream; choose another name"):
        Harness(declare()).rule({"rule_id": "a", "sequence": {"within": "1 minute", "steps": steps}})


@pytest.mark.parametrize(
    "changes", [{"group_by": [{"Process": "lower(host)"}]}, {"measures": {"Process": "count(*)"}, "when": "true"}]
)
def test_c12_4_no_key_and_no_measure_has_the_name_of_a_struct(changes: dict[str, Any]) -> None:
    with pytest.raises(RuleError, match="'Process' is a field of the stream; choose another name"):
        Harness(declare()).rule({**COUNT, **changes})


def test_c12_4_a_struct_comes_whole_or_by_its_parts_and_not_both_ways() -> None:
    by_part = {"id": 9, "at": "2026-01-01T00:00:09Z", "process.name": "cmd"}
    with pytest.raises(EventError, match=r"there are columns 'process' and 'process\.name'; give process\.name in one"):
        read_alerts([EVENTS[0], by_part])


@pytest.mark.parametrize(
    ("type_", "problem"),
    [
        ("struct<>", "'' in the struct 'x' is not a name and a type; write them as `name: string`"),
        ("struct<a: foo>", "'foo' is not a supported type"),
        ("struct<a: int, A: int>", "'x.A' is declared twice"),
        ("struct<a: int, a: struct<b: int>>", "'x.a' is declared twice"),
        ("array<struct<a: int>>", "structs in arrays cannot be read; declare an array of one part of it"),
        ("struct<a: array<struct<b: int>>>", "structs in arrays cannot be read"),
        ("struct<a.b: int>", "is not a name and a type"),
        ("struct<a: int", "'struct<a: int' is not a supported type"),
        ("struct<a:" * 40 + "int" + ">" * 40, "is a struct within more than 32 others; use fewer levels"),
    ],
)
def test_c12_4_a_struct_that_cannot_be_read_is_refused(type_: str, problem: str) -> None:
    with pytest.raises(StreamError) as refused:
        declare(fields={**DECLARED, "x": type_})
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"event_id": "process.pid"}, "'process.pid' is in a struct; declare a field of its own for it"),
        ({"event_time": "process"}, "'process' is in a struct"),
        ({"value": "process.pid"}, "'process.pid' is in a struct"),
        ({"fields": {**DECLARED, "_kind": "int"}}, "'_kind' is a column that the engine adds; choose another name"),
        ({"fields": {**DECLARED, "Position": "struct<x: int>"}}, "is the column in which ingest stores where it read"),
        ({"table": "/lake/starts", "order_by": ["process.pid"]}, "'process.pid' is in a struct"),
        ({"columns": {"process.nme": "x"}}, "'process.nme' is not one of the declared fields"),
        ({"comments": {"process.name": "x"}}, "'process.name' is not one of the declared fields"),
        ({"table": "/lake/starts", "columns": {"host": "lower(h)"}}, "'lower(h)' is not a column of /lake/starts"),
        ({"table": "/lake/starts", "columns": {"host": "a.`b`; x"}}, "is not a column of /lake/starts"),
        (
            {"lookups": [{"table": "t", "on": {"host": "h"}, "fields": {"x": "struct<a: int>"}}]},
            "a look-up brings single values",
        ),
    ],
)
def test_c12_4_what_needs_a_field_by_itself_takes_no_part(more: dict[str, Any], problem: str) -> None:
    with pytest.raises(StreamError) as refused:
        declare(**more)
    assert problem in str(refused.value)


def test_c12_4_columns_beside_a_table_name_its_columns_and_parts() -> None:
    columns = {"host": "agent.`host name`", "process": "p", "process.Parent": "up", "process.Parent.a.b.c": "`x.y`"}
    stream = declare(table="/lake/starts", columns=columns)
    assert [stream.find_path(name) for name in [*stream.fields][2:]] == [
        ["agent", "host name"], ["p", "name"], ["p", "pid"], ["up", "name"], ["up", "args"], ["x.y"],
    ]  # fmt: skip
    # Ingest computes `columns`, so its own table has the fields by their names.
    assert declare(columns={"host": "lower(h)"}).find_path("host") == ["host"]
    assert Stream.from_dict(stream.to_dict()) == stream


def test_c12_4_the_tests_of_a_rule_have_structs_and_a_misspelt_part_is_named() -> None:
    test = {"name": "t", "events": EVENTS, "alerts": [{"event_id": 1, "entities": {"process.name": "cmd"}}]}
    rule = {**EVENT, "stream": "starts"}
    compiled = check_rule({**rule, "tests": [test]}, {"starts": declare()})
    assert run_rule_tests(compiled, declare()) == []
    wrong = {**rule, "tests": [{**test, "events": [start(1, {"nme": "cmd"})]}]}
    with pytest.raises(
        RuleError, match=r"row 1: stream 'starts' has no field 'process.nme'; did you mean 'process.name'\?"
    ):
        check_rule(wrong, {"starts": declare()})


def test_c12_4_names_of_any_length_are_written_as_they_are_read() -> None:
    assert name_as_sql("a.b.c.d.e.select") == "a.b.c.d.e.`select`"

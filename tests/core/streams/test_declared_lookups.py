"""Look-ups in a declaration (11.4): what is accepted comes back as it went in, what is wrong is told all at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import lookback
from lookback.config import load_stream
from lookback.core.errors import StreamError
from lookback.core.streams.declaration import Stream
from lookback.core.streams.lookups import NULL, REJECT, Lookup
from lookback.core.values.types import BIGINT, INT, STRING

# As the contract has it, 11.4.
LOOKUP: dict[Any, Any] = yaml.safe_load("{table: customers, on: customer_id, fields: {segment: string}, missing: null}")
STREAM: dict[str, Any] = {
    "stream": "payments",
    "event_id": "id",
    "event_time": "at",
    "fields": {"id": "string", "at": "timestamp", "customer_id": "bigint", "payee": "bigint", "tags": "array<string>"},
}


def stream(*lookups: Any, **changes: Any) -> Stream:
    return Stream.from_dict({**STREAM, "lookups": list(lookups), **changes})


def problems(*lookups: Any, **changes: Any) -> dict[str, str]:
    with pytest.raises(StreamError) as caught:
        stream(*lookups, **changes)
    return {problem.place: problem.message for problem in caught.value.problems}


def test_c11_4_the_fields_of_a_look_up_and_the_version_of_its_table_are_fields_of_the_stream():
    declared = stream(LOOKUP)

    assert declared.lookups == (
        Lookup("customers", {"customer_id": "customer_id"}, {"segment": STRING}, {}, NULL, REJECT),
    )
    assert list(declared.fields) == [*STREAM["fields"], "segment", "customers_version"]
    assert declared.fields["customers_version"] == BIGINT
    assert list(declared.own_fields) == list(STREAM["fields"])
    # YAML 1.1 reads a bare `on` as true; a look-up that comes from JSON has the text.
    assert "on" not in LOOKUP
    assert stream({key if isinstance(key, str) else "on": value for key, value in LOOKUP.items()}) == declared


def test_c11_4_a_rule_reads_what_was_looked_up_and_the_harness_takes_it_with_the_event():
    harness = lookback.Harness(stream(LOOKUP))
    harness.rule(
        {
            "rule_id": "students",
            "stream": "payments",
            "severity": "low",
            "group_by": ["segment"],
            "window": "1 hour",
            "measures": {"n": "count(*)"},
            "when": "n >= 2 and customers_version >= 7",
        }
    )
    harness.events(
        [
            {"id": str(at), "at": f"2026-01-31T12:0{at}:00Z", "segment": "student", "customers_version": 6 + at}
            for at in range(3)
        ]
    )

    assert [(alert.event_id, alert.key) for alert in harness.alerts] == [
        ("1", {"segment": "student"}), ("2", {"segment": "student"}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("table", "version_field"),
    [("customers", "customers_version"), ("prod-1.crm.Customers", "Customers_version"), ("c", "c_version")],
)
def test_c11_4_the_last_part_of_the_tables_name_is_in_that_of_the_version(table: str, version_field: str):
    assert list(stream({**LOOKUP, "table": table}).fields)[-1] == version_field


def test_one_table_may_be_looked_up_twice_and_has_one_version():
    payee = {
        "table": "customers",
        "on": {"payee": "customer_id"},
        "fields": {"payee_segment": "string"},
        "columns": {"payee_segment": "segment"},
        "missing": "reject",
        "ambiguous": None,
    }

    declared = stream(LOOKUP, payee, value="customers_version", comments={"payee_segment": "of the payee"})

    assert list(declared.fields)[5:] == ["segment", "customers_version", "payee_segment"]
    assert (declared.lookups[1].missing, declared.lookups[1].ambiguous) == (REJECT, NULL)
    assert Stream.from_dict(declared.to_dict()) == declared
    assert Stream.from_dict(yaml.safe_load(yaml.safe_dump(declared.to_dict()))) == declared


def test_style8_all_problems_of_all_look_ups_at_once():
    found = problems(
        {"table": "customers", "on": "custmer_id", "fields": {"segment": "strng", "AT": "string"}, "missing": "none"},
        {"table": "x", "on": "tags", "fields": {"tier": "int"}, "columns": {"a": "b"}, "ambiguous": "first", "of": 1},
        {"table": "a.b.x", "on": {"payee": "id"}, "fields": {"TIER": "string"}},
        5,
        {"table": "A B", "on": {"payee": 3}},
    )

    assert found == {
        "lookups[0].on": "'custmer_id' is not one of the declared fields; did you mean 'customer_id'?",
        "lookups[0].fields.segment": found["lookups[0].fields.segment"],
        "lookups[0].fields.AT": "'AT' is declared already; bring it under another name, with columns: {other_name: AT}",
        "lookups[0].missing": "null (the event is taken, with NULL in the fields) or reject is needed, got 'none'",
        "lookups[1].of": found["lookups[1].of"],
        "lookups[1].on": "field 'tags' is array<string>; a table is looked up by single values",
        "lookups[1].columns.a": "'a' is not one of the fields of this look-up",
        "lookups[1].ambiguous": "null (the event is taken, with NULL in the fields) or reject is needed, got 'first'",
        "lookups[2].fields.TIER": (
            "'TIER' is declared already, in lookups[1]; bring it under another name, with columns: {other_name: TIER}"
        ),
        "lookups[2].table": "the version of x is kept in field 'x_version' too; look up in one of the two tables",
        "lookups[3]": "a mapping of table, on and fields is needed, got 5",
        "lookups[4].table": (
            "a table beside the stream's, such as customers, or catalog.schema.table is needed, with letters, digits and _ "
            "in the name of the table, got 'A B'"
        ),
        "lookups[4].on": (
            "a field, or a mapping of field to the table's column such as {customer_id: id}, is needed, got {'payee': 3}"
        ),
        "lookups[4].fields": "a mapping of field to Spark type is needed, got None",
    }


def test_the_version_of_a_table_has_a_field_of_its_own():
    own = {**STREAM["fields"], "Customers_Version": "int"}
    later = {"table": "tiers", "on": "payee", "fields": {"CUSTOMERS_version": "int"}}

    for found in (problems(LOOKUP, fields=own), problems({**LOOKUP, "fields": {"customers_version": "int"}})):
        assert found == {
            "lookups[0].table": "field 'customers_version', which holds the version of the table, is declared already; rename "
            "that field"
        }
    assert problems(LOOKUP, later) == {
        "lookups[1].fields.CUSTOMERS_version": "'CUSTOMERS_version' holds the version of customers; bring it under another "
        "name, with columns: {other_name: CUSTOMERS_version}"
    }


@pytest.mark.parametrize("key", ["event_id", "event_time"])
def test_the_id_and_the_time_are_no_looked_up_fields(key: str):
    looked_up = {**LOOKUP, "fields": {"segment": "string", "since": "timestamp"}}
    name = {"event_id": "segment", "event_time": "since"}[key]

    assert set(problems(looked_up, **{key: name})) == {key}
    # Nor is a table looked up by what another one brings, nor does an expression of the source make it.
    assert set(problems(LOOKUP, {"table": "risks", "on": "segment", "fields": {"risk": "int"}})) == {"lookups[1].on"}
    assert set(problems(LOOKUP, columns={"segment": "upper(segment)"})) == {"columns.segment"}


@pytest.mark.parametrize(
    "table",
    [None, "", 5, "Customers", "crm.customers", "a.b.c.d", "a.b.c-d", "a.b.1c", "/lake/customers", "a..c", "${x}"],
)
def test_names_that_are_no_table(table: object):
    assert set(problems({**LOOKUP, "table": table})) == {"lookups[0].table"}


def test_where_ingest_writes_nothing_nothing_is_looked_up():
    assert "only ingest uses it" in problems(LOOKUP, table="main.sales.payments")["lookups"]
    metrics = {
        "stream": "metrics", "event_id": "metrics_id", "event_time": "measured_at",
        "fields": {"metrics_id": "string", "measured_at": "timestamp", "stream": "string"},
        "lookups": [{"table": "owners", "on": "stream", "fields": {"owner": "string"}}],
    }  # fmt: skip
    with pytest.raises(StreamError, match="ingest cannot look anything up"):
        Stream.from_dict(metrics)


@pytest.mark.parametrize("lookups", [None, []])
def test_no_look_up_is_as_if_the_key_were_left_out(lookups: object):
    assert Stream.from_dict({**STREAM, "lookups": lookups}) == Stream.from_dict(STREAM)
    assert "lookups" not in Stream.from_dict(STREAM).to_dict()


def test_problems_of_look_ups_come_with_the_lines_of_the_file(tmp_path: Path):
    file = tmp_path / "s.yml"
    file.write_text(
        "stream: s\nevent_id: id\nevent_time: at\nfields: {id: string, at: timestamp}\nlookups:\n"
        "  - table: customers\n    on: it\n    fields:\n      segment: string\n"
        "  - table: tiers\n    on: id\n    fields:\n      segment: string\n    table: tears\n"
    )

    with pytest.raises(StreamError) as caught:
        load_stream(file)

    places = {(problem.place, problem.message.rpartition(", ")[2]) for problem in caught.value.problems}
    assert places == {
        ("lookups[1].table", f"{file}:14"),
        ("lookups[0].on", f"{file}:7"),
        ("lookups[1].fields.segment", f"{file}:13"),
    }


NAMES = st.sampled_from(
    ["id", "ID", "at", "customer_id", "payee", "tags", "segment", "Segment", "tier", "x_version", "arrival"]
)
ODD = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.lists(st.none(), max_size=1)
TABLES = st.sampled_from(
    ["x", "tiers", "main.crm.x", "main.crm.tiers", "X", "", "a.b", "x" * 127, "x" * 128, "x" * 129]
)
TYPES = st.sampled_from(["string", "int", "decimal(38,0)", "array<array<int>>", "money", ""])
DRAWN = st.fixed_dictionaries(
    {"table": TABLES | ODD, "on": NAMES | st.dictionaries(NAMES, NAMES, max_size=2) | ODD},
    optional={
        "fields": st.dictionaries(NAMES | ODD.filter(lambda name: not isinstance(name, list)), TYPES | ODD, max_size=3)
        | ODD,
        "columns": st.dictionaries(NAMES, st.text(max_size=5) | ODD, max_size=2) | ODD,
        "missing": st.sampled_from([None, "null", "reject"]) | ODD,
        "ambiguous": st.sampled_from([None, "null", "reject"]) | ODD,
        True: NAMES,
        "onn": ODD,
    },
)


@given(st.lists(DRAWN | ODD, max_size=3))
def test_c11_4_any_look_ups_are_kept_whole_or_refused_each_at_its_place(lookups: list[Any]):
    refused = list_places(lookups)
    assert all(place.startswith("lookups[") for place in refused)
    # One that would be refused alone is refused among the others too, so that all are mended at once.
    alone = {at for at, lookup in enumerate(lookups) if list_places([lookup])}
    assert alone <= {int(place[len("lookups[") : place.index("]")]) for place in refused}
    if refused:
        return
    declared = stream(*lookups)
    assert Stream.from_dict(declared.to_dict()) == declared
    lowered = [name.lower() for name in declared.fields]
    assert len(set(lowered)) == len(lowered)
    for lookup in declared.lookups:
        assert lookup.brings.items() <= declared.fields.items()
        assert set(lookup.on) <= set(declared.own_fields)
        assert not set(lookup.brings) & set(declared.own_fields)


def list_places(lookups: list[Any]) -> list[str]:
    try:
        stream(*lookups)
    except StreamError as refused:
        return [problem.place for problem in refused.problems]
    return []


def test_a_looked_up_field_may_be_the_worth_of_an_event():
    assert stream({**LOOKUP, "fields": {"limit": "int"}}, value="limit").fields["limit"] == INT
    assert set(problems(LOOKUP, value="segment")) == {"value"}

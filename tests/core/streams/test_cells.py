"""The same rows in any container are the same events; a cell is read exactly or refused with what to write instead."""

from __future__ import annotations

import datetime as dt
import io
import re
import warnings
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lookback
from lookback.core.errors import EventError
from lookback.core.streams.cells import read_cell
from lookback.core.streams.declaration import Stream
from lookback.core.streams.eventrows import read_events
from lookback.core.values.columns import arrow_type
from lookback.core.values.types import parse_type

STREAM = Stream.from_dict(
    {
        "stream": "tx",
        "event_id": "id",
        "event_time": "at",
        "fields": {
            "id": "string", "at": "timestamp", "n": "int", "b": "bigint", "a": "decimal(18,2)", "d": "double", "f": "float",
            "ok": "boolean", "day": "date", "k": "string", "seen": "timestamp", "tags": "array<string>", "ds": "array<double>",
        },
    }
)  # fmt: skip
RULE = {
    "rule_id": "r1",
    "stream": "tx",
    "group_by": ["k", "n"],
    "window": "1 hour",
    "measures": {
        "rows": "count(*)", "ns": "count(n)", "bs": "sum(b)", "total": "sum(a)", "top": "max(d)", "least": "min(f)",
        "oks": "count(ok)", "days": "max(day)", "last": "max(seen)",
    },
    "when": "true",
    "message": "{d} {n} {day} {seen}",
}  # fmt: skip
_UTC = dt.timezone.utc
_VALUES = {
    "n": st.none() | st.integers(-3, 3),
    "b": st.none() | st.integers(-3, 3),
    "a": st.none() | st.sampled_from([Decimal("0.10"), Decimal("-7.25")]),
    "d": st.none() | st.sampled_from([0.0, -0.0, 1.5, float("inf"), float("-inf")]),
    "f": st.none() | st.sampled_from([0.0, -0.0, 1.5, float("inf"), float("-inf")]),
    "ok": st.none() | st.booleans(),
    "day": st.none() | st.sampled_from([dt.date(2026, 1, 31), dt.date(1, 1, 1), dt.date(9999, 12, 31)]),
    "k": st.none() | st.sampled_from(["x", "y"]),
    "seen": st.none()
    | st.sampled_from([dt.datetime(2026, 1, 31, 12, tzinfo=_UTC), dt.datetime(1999, 1, 1, tzinfo=_UTC)]),
    "tags": st.none() | st.lists(st.none() | st.sampled_from(["u", "v"]), max_size=2),
    "ds": st.none() | st.lists(st.none() | st.sampled_from([0.5, -0.0]), max_size=2),
}


def alerts(rows: Any) -> list[Any]:
    harness = lookback.Harness(STREAM)
    harness.rule(RULE)
    harness.events(rows)
    return [(a.alert_id, a.key, str(a.measures), a.message) for a in harness.alerts]


def values(rows: Any) -> dict[str, str]:
    """By field, as text, in which -0.0 is not 0.0 and NaN is like itself."""
    return {name: str(column.to_list()) for name, column in read_events(rows, STREAM, 1)[0].columns.items()}


def containers(rows: list[dict[str, Any]]) -> dict[str, Any]:
    types = {name: pa.int64() if name == "at" else arrow_type(type_) for name, type_ in STREAM.fields.items()}
    table = pa.table({name: pa.array([row.get(name) for row in rows], type) for name, type in types.items()})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # pandas, where it tries infinities as integers
        converted = pd.DataFrame(rows).convert_dtypes()
    return {
        "Arrow table": table,
        "Arrow batch": table.to_batches()[0],
        # A missing number makes a column of floats of it, and NaN of what is missing.
        "pandas": pd.DataFrame(rows),
        "pandas objects": pd.DataFrame(rows).astype(object),
        "pandas with types that may be missing": converted,
        "pandas of Arrow": table.to_pandas(),
        "pandas with Arrow's types": table.to_pandas(types_mapper=pd.ArrowDtype),
    }


@given(st.lists(st.fixed_dictionaries(_VALUES), min_size=1, max_size=4))
def test_the_same_rows_in_any_container_are_the_same_events(drawn: list[dict[str, Any]]) -> None:
    rows = [{"id": str(at), "at": at, **row} for at, row in enumerate(drawn)]
    expected = values(rows)
    for name, container in containers(rows).items():
        assert values(container) == expected, name


def test_a_missing_number_is_null_in_the_measures_of_any_container() -> None:
    rows = [{"id": "a", "at": 1, "d": 1.5, "n": 1}, {"id": "b", "at": 2, "d": None, "n": None}]
    expected = alerts(rows)
    assert "'top': None" in expected[1][2]
    for name, container in containers(rows).items():
        assert alerts(container) == expected, name


def test_nan_is_a_value_where_a_missing_one_has_a_mark_of_its_own() -> None:
    nan = float("nan")
    rows = [{"id": "a", "at": 1, "d": nan}]
    meant = [
        rows,
        pa.table({"id": ["a"], "at": [1], "d": [nan]}),
        pd.DataFrame({"id": ["a"], "at": [1], "d": pd.array(pa.array([nan]), dtype=pd.ArrowDtype(pa.float64()))}),
    ]
    for container in meant:
        (found,) = read_events(container, STREAM, 1)[0].columns["d"].to_list()
        assert found != found
    assert read_events(pd.DataFrame(rows), STREAM, 1)[0].columns["d"].to_list() == [None]


def test_an_empty_cell_of_a_csv_read_as_text_is_null() -> None:
    text = "id,at,n,a,d,ok,day,k\nx,2026-01-31T12:00:00Z,,,,,,\ny,2026-01-31T12:00:01Z,1,2.50,0.5,true,2026-01-31,u\n"
    events, _ = read_events(pd.read_csv(io.StringIO(text), dtype=str), STREAM, 1)
    first = {
        name: column.item(0)
        for name, column in events.columns.items()
        if name in STREAM.fields and name not in ("id", "at")
    }
    assert set(first.values()) == {None}
    assert events.columns["a"].item(1) == Decimal("2.50")


REFUSED = [
    # type, value, words of the reason, words of the remedy
    ("array<string>", "abc", "not a list", "['a', 'b']"),
    ("array<int>", "42", "not a list", "[1, 2]"),
    ("array<string>", {"a": 1}, "not a list", "write one"),
    ("array<int>", [1, "x"], "element 1", "write one, such as 12"),
    ("int", "1_000", "not a whole number", "without separators, such as 1000"),
    ("int", "1,000", "not a whole number", "without separators"),
    ("int", "\u0661", "not a whole number", "write one, such as 12"),
    ("int", "1.5", "not a whole number", "declare the field as decimal(18,2)"),
    ("int", 1.5, "not a whole number", "declare the field as decimal(18,2)"),
    ("int", True, "true or false", "declare the field as boolean"),
    ("int", 2**31, "beyond the range", "declare the field as bigint"),
    ("bigint", 2.0**60, "up to 2^53", "give an integer or a text"),
    ("bigint", float("nan"), "not a number", "give None"),
    ("double", "1e400", "beyond the range of double", "declare the field as decimal(38,s) or string"),
    ("double", 10**400, "beyond the range of double", "declare the field"),
    ("double", Decimal("1E+999999"), "beyond the range of double", "declare the field"),
    ("double", "\u0661.5", "not a number", "such as 12.50"),
    ("double", "1_0.5", "not a number", "without separators"),
    ("double", True, "true or false", "declare the field as boolean"),
    ("double", b"1", "not a number", "write one, such as 12.5"),
    ("float", 1e39, "beyond the range of float", "declare the field as double"),
    ("decimal(18,2)", True, "true or false", "declare the field as boolean"),
    ("decimal(18,2)", "12,5", "not a number", "decimal comma, 12.5"),
    ("decimal(18,2)", "1,000.50", "not a number", "without separators"),
    ("decimal(18,2)", "1,000", "not a number", "without separators"),
    ("decimal(18,2)", "12.345", "more than 2 digits", "round it"),
    ("decimal(18,2)", 0.004, "more than 2 digits", "round it"),
    ("decimal(4,2)", "123.45", "beyond the range of decimal(4,2)", "more digits"),
    ("decimal(18,2)", float("nan"), "not a finite number", "give None"),
    ("decimal(18,2)", (0, (1, 2), -1), "not a number", "such as 12.50"),
    ("decimal(18,2)", "\u0661", "not a number", "such as 12.50"),
    ("boolean", "ja", "neither true nor false", "write true or false"),
    ("boolean", 2, "neither true nor false", "write true or false"),
    ("date", dt.datetime(2026, 1, 31, 12, tzinfo=_UTC), "time of day", "declare the field as timestamp"),
    ("date", "31.01.2026", "not a date", "write it as 2026-01-31"),
    ("date", "2026-02-30", "does not exist", "correct it"),
    ("date", 5, "not a date", "write it as 2026-01-31"),
    ("timestamp", "31.01.2026 12:00", "not a valid time", "write it as 2026-01-31T12:00:00Z"),
    ("timestamp", 2**62, "beyond the years 1 to 9999", "correct it"),
    ("timestamp", 1.5, "not a valid time", "microseconds since 1970"),
    ("string", 12, "not a text", "put it in quotes"),
    ("string", float("nan"), "NaN", "give None"),
    ("string", "\ud800", "half a character", "correct it"),
]


@pytest.mark.parametrize(("type_", "value", "reason", "remedy"), REFUSED)
def test_what_does_not_fit_is_refused_with_place_value_and_remedy(
    type_: str, value: Any, reason: str, remedy: str
) -> None:
    stream = Stream.from_dict(STREAM.to_dict() | {"fields": {"id": "string", "at": "timestamp", "x": type_}})
    rows = [{"id": "a", "at": 1, "x": None}, {"id": "b", "at": 2, "x": value}]
    with pytest.raises(EventError) as told:
        read_events(rows, stream, 1)
    message = str(told.value)
    assert message.startswith(f"row 1: x must be {type_}, got {value!r:.100}: "), message
    assert reason in message, message
    assert remedy in message.partition(": ")[2].partition(": ")[2], message


READ = [
    ("date", dt.datetime(2026, 1, 31, tzinfo=_UTC), dt.date(2026, 1, 31)),
    ("date", np.datetime64("2026-01-31", "ns"), dt.date(2026, 1, 31)),
    ("date", pd.Timestamp("2026-01-31"), dt.date(2026, 1, 31)),
    ("timestamp", np.datetime64("2026-01-31T12:00", "ns"), dt.datetime(2026, 1, 31, 12, tzinfo=_UTC)),
    ("int", np.int64(3), 3),
    ("int", 3.0, 3),
    ("int", " +3 ", 3),
    ("int", Decimal("3.00"), 3),
    ("decimal(18,2)", "1.5e1", Decimal("15.00")),
    ("decimal(18,2)", 0.1, Decimal("0.10")),
    ("decimal(18,2)", np.float32(0.1), Decimal("0.10")),
    ("decimal(18,2)", "12.500", Decimal("12.50")),
    ("decimal(18,2)", Decimal("0E-9999"), Decimal("0.00")),
    ("double", "Infinity", float("inf")),
    ("double", float("-inf"), float("-inf")),
    ("boolean", 1, True),
    ("boolean", np.bool_(False), False),
    ("array<int>", (1, "2"), [1, 2]),
    ("array<int>", np.array([1, 2]), [1, 2]),
]


@pytest.mark.parametrize(("type_", "value", "expected"), READ)
def test_what_fits_is_read_exactly(type_: str, value: Any, expected: Any) -> None:
    stream = Stream.from_dict(STREAM.to_dict() | {"fields": {"id": "string", "at": "timestamp", "x": type_}})
    events, _ = read_events([{"id": "a", "at": 1, "x": value}], stream, 1)
    assert events.columns["x"].item(0) == expected


@given(
    st.sampled_from([str(type_) for type_ in STREAM.fields.values()]),
    st.one_of(
        st.floats(),
        st.decimals(),
        st.integers(),
        st.text(max_size=8),
        st.binary(max_size=3),
        st.datetimes(),
        st.dates(),
    ),
)
def test_any_value_is_read_or_refused_with_a_remedy(type_: str, value: Any) -> None:
    message = ""
    try:
        read_cell(parse_type(type_), value)
    except ValueError as error:
        message = str(error)
    assert not message or re.fullmatch(r"(element \d+: )?it .+; .+|this day does not exist; .+", message), message


def test_rows_that_are_no_rows_are_refused() -> None:
    for rows, words in [
        ([{}], "row 0: id is missing"),
        ({}, "put the one event into a list"),
        ({"id": "a", "at": 1}, "put the one event into a list"),
        ("", "a list of dicts"),
        (5, "a list of dicts"),
        ([{"id": "a", "at": 1}, 5], "row 1: a dict of field to value"),
        (pd.DataFrame(index=range(2)), "row 0: id is missing"),
        (
            pa.table([pa.array(["a"]), pa.array([1]), pa.array([1]), pa.array([2])], ["id", "at", "n", "n"]),
            "2 columns 'n'",
        ),
        (pd.DataFrame([["a", 1, 1, 2]], columns=["id", "at", "n", "n"]), "2 columns 'n'"),
        ([{"id": "a", "at": 1, "arrival": 1.5}], "row 0: arrival must be the number of a commit, got 1.5"),
        ([{"id": "a", "at": 1, "arrival": None}], "leave the column out"),
        (
            [{"id": "a", "at": 1, "committed_at": "soon"}],
            "row 0: committed_at must be the time of a commit, got 'soon'",
        ),
    ]:
        with pytest.raises(EventError) as told:
            read_events(rows, STREAM, 1)
        assert words in str(told.value)

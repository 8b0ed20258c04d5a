"""Arbitrary and mutated texts, documents, rows and events: refused as documented, or they work; never another error."""

from __future__ import annotations

import copy
import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from cases import documents
from fuzz_targets import STREAM, change, document, events, expression, other_texts, yaml_text
from hypothesis import given
from hypothesis import strategies as st

from lookback.core.errors import EventError
from lookback.core.expressions.compiling import compile_expression
from lookback.core.streams.eventrows import read_events

# What expressions are made of; put together at random most are refused, some late.
_WORDS = [
    *STREAM.fields, "and", "or", "not", "null", "true", "in", "between", "like", "escape", "is", "case", "when", "then",
    "else", "end", "cast", "as", "int", "bigint", "decimal(38,10)", "double", "string", "date", "timestamp", "array<int>",
    "(", ")", ",", "+", "-", "*", "/", "%", "||", "=", "<>", "<", ">=", "<=>", ".", "::", "[", "]", "?", ":x", ";", "--",
    "0", "1", "9223372036854775808", "1.5", "1e400", "'x'", "''", "'2024-02-30'", "'%_\\\\'", '"', "'", "`", "`a`", "\\",
    "count(*)", "sum(a)", "distinct", "filter (where", "over", "select", "x -> x", "@", "$1", "{{", "/*", "*/", "\0",
    "interval 1 day", "+ interval 106751991 days", "array_contains", "element_at", "size", "concat", "substring", "round", "abs", "lower", "length",
    "coalesce", "date_trunc", "hour", "dayofweek", "trim", "exists", "rand()", "current_timestamp()", "\u2028", "\ud800",
]  # fmt: skip
_LEAVES = st.sampled_from(
    [*STREAM.fields, "null", "true", "0", "-1", "1.50", "2147483647", "'x'", "''", "'12'", "1e3", "9223372036854775807"]
)


def _grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    two = st.tuples(inner, inner)
    operators = st.sampled_from(["+", "-", "*", "/", "%", "||", "=", "<>", "<", ">=", "<=>", "and", "or", "div"])
    calls = st.sampled_from(
        ["abs", "lower", "upper", "trim", "length", "hour", "dayofweek", "size", "round", "ltrim", "year", "not"]
    )
    pairs = st.sampled_from(
        ["concat", "coalesce", "element_at", "array_contains", "round", "substring", "nullif", "date_trunc", "greatest"]
    )
    types = st.sampled_from(
        ["tinyint", "int", "bigint", "decimal(5,2)", "decimal(38,38)", "double", "float", "string", "date", "timestamp"]
    )
    return st.one_of(
        st.builds("({0[0]} {1} {0[1]})".format, two, operators),
        st.builds("{1}({0})".format, inner, calls),
        st.builds("{1}({0[0]}, {0[1]})".format, two, pairs),
        st.builds("cast({0} as {1})".format, inner, types),
        st.builds("try_cast({0} as {1})".format, inner, types),
        st.builds("({0[0]} between {0[1]} and {1})".format, two, inner),
        st.builds("({0[0]} in ({0[1]}, {1}))".format, two, inner),
        st.builds("({0} is not null)".format, inner),
        st.builds("({0[0]} like {0[1]})".format, two),
        st.builds("case when {0[0]} then {0[1]} else {1} end".format, two, inner),
        st.builds("-({0})".format, inner),
        st.builds("date_trunc('{1}', {0})".format, inner, st.sampled_from(["hour", "week", "DAY", "aeon"])),
    )


_TEXTS = st.one_of(
    st.text(),
    st.lists(st.sampled_from(_WORDS), max_size=25).map(" ".join),
    st.lists(st.sampled_from(_WORDS), max_size=25).map("".join),
    st.recursive(_LEAVES, _grown, max_leaves=8),
)
_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(_WORDS),
    st.sampled_from(
        ["1 hour", "0 seconds", "-1 day", "9" * 30 + " weeks", "1 month", "2024-01-01", "9999-12-31", "lookback"]
    ),
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=4),
    max_leaves=12,
)


@given(_TEXTS)
def test_any_text_is_an_expression_that_runs_or_is_refused(text: str) -> None:
    expression(text)


@pytest.mark.parametrize(
    "text",
    [
        "-(-(0))",
        "cast(w as decimal(38,38)) + -(0)",
        "-(cast(1.50 as tinyint))",
        "-(try_cast('1' as int))",
        "n + -(cast('1' as int))",
        "at + interval '999999999' hours",
    ],
)
def test_what_is_printed_of_an_expression_is_read_again(text: str) -> None:
    compiled = compile_expression(text, STREAM.fields)
    assert compile_expression(compiled.sql, STREAM.fields) == compiled
    expression(text)


@given(
    _TEXTS | st.builds("{0}({1}) filter (where {1})".format, st.sampled_from(["sum", "avg", "count", "max"]), _TEXTS)
)
def test_any_other_text_is_read_or_refused(text: str) -> None:
    other_texts(text)


@given(st.data())
def test_a_rule_with_something_else_in_some_place_is_refused_or_judges(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["lookback", "tumbling", "sliding", "session", "sequence"]))
    value: Any = copy.deepcopy(data.draw(documents("r1", kind)))
    for _ in range(data.draw(st.integers(1, 3))):
        value = _mutated(value, data)
    document(value)


def _mutated(value: Any, data: st.DataObject) -> Any:
    """The value with another one, or another key, somewhere in it."""
    if isinstance(value, dict) and value and data.draw(st.integers(0, 5)):
        key = data.draw(st.sampled_from(sorted(value, key=str)))
        what = data.draw(st.integers(0, 9))
        if what == 0:
            return {name: each for name, each in value.items() if name != key}
        if what == 1:
            return {**value, data.draw(_SCALARS.filter(lambda name: name == name)): data.draw(_VALUES)}
        return {**value, key: _mutated(value[key], data)}
    if isinstance(value, list) and value and data.draw(st.integers(0, 3)):
        at = data.draw(st.integers(0, len(value) - 1))
        return [*value[:at], _mutated(value[at], data), *value[at + 1 :]]
    if isinstance(value, str) and data.draw(st.booleans()):
        return data.draw(_TEXTS)
    return data.draw(_VALUES)


@given(_VALUES)
def test_any_value_is_a_document_or_refused(value: Any) -> None:
    document(value)


@given(
    st.dictionaries(
        st.sampled_from(
            ["stream", "event_id", "event_time", "fields", "columns", "source", "max_future", "commit_rows", "lookups"]
        ),
        _VALUES | st.fixed_dictionaries({"id": st.just("int"), "at": st.just("timestamp") | _SCALARS}),
    )
)
def test_any_value_is_a_stream_or_refused(value: dict[str, Any]) -> None:
    document({"stream": "s", "event_id": "id", "event_time": "at", **value})


@given(
    st.tuples(
        st.sampled_from(["insert", "update", "delete"]),
        st.integers(0, 2**63 - 1),
        st.none() | st.sampled_from(["r1", "*"]) | st.text(),
        st.none() | st.integers(-(2**63), 2**63 - 1),
        st.none() | st.sampled_from(["active", "Active", "paused", "clear_state", "advance", "retire_all"]) | st.text(),
        st.none()
        | st.text()
        | st.sampled_from(["{}", "[]", "null", "NaN", '{"stream": "tx"}', '{"time": 1e999}', '{"time": "9999-12-31"}'])
        | st.just("[" * 100_000)
        | st.just('{"a":' * 100_000),
    )
)
def test_any_row_of_the_rules_table_is_obeyed_or_logged(row: tuple[Any, ...]) -> None:
    change(row)


_TIMES = st.datetimes(timezones=st.none() | st.just(dt.timezone.utc) | st.just(dt.timezone(dt.timedelta(hours=14))))
_CELLS = st.one_of(
    _SCALARS,
    _TIMES,
    st.dates(),
    st.decimals(),
    st.binary(max_size=4),
    st.lists(_SCALARS, max_size=3),
    st.complex_numbers(),
    st.sampled_from([
        pd.NaT, pd.NA, pd.Timestamp.max, np.float32("nan"), np.int64(-1), np.datetime64("NaT"), Decimal("sNaN"), Decimal("1E+999999"),
        "1E-999999", "9" * 5_000, "0001-01-01", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", object(), type, {1}, ...,
    ]),
)  # fmt: skip
_NAMES = st.sampled_from([*STREAM.fields, "arrival", "committed_at", "other"]) | st.text(max_size=3)


@given(
    st.one_of(
        st.lists(st.dictionaries(_NAMES, _CELLS, max_size=5), max_size=3),
        st.lists(
            st.fixed_dictionaries(
                {"id": st.sampled_from(["a", "b"]), "at": st.integers(0, 9)},
                optional={
                    name: _CELLS for name in [*STREAM.fields, "arrival", "committed_at"] if name not in ("id", "at")
                },
            ),
            min_size=1,
            max_size=3,
        ),
        _CELLS,
        st.dictionaries(_NAMES, _CELLS),
    )
)
def test_any_rows_are_events_or_refused(rows: Any) -> None:
    events(rows)


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ({"n": np.array([1])}, "n must be int"),  # passed for its one element
        ({"d": np.array([0.5])}, "d must be double"),
        ({"n": Decimal("1E+999999")}, "beyond the range of an integer"),
        ({"arrival": Decimal("1E+999999")}, "beyond the range of an integer"),
        ({"at": 2**63}, "beyond the years 1 to 9999"),
        ({"f": 1e39}, "beyond the range of float"),
        ({"k": "\ud800"}, "surrogates not allowed"),
        ({"arrival": None}, "arrival must be the number of a commit"),
        ({"arrival": "a"}, "arrival must be the number of a commit"),
        ({"arrival": 2**63}, "arrival must be the number of a commit"),
        ({"committed_at": 2**63}, "committed_at"),
    ],
)
def test_cells_that_were_read_wrongly_once_are_refused(cells: dict[str, Any], words: str) -> None:
    with pytest.raises(EventError, match=words):
        read_events([{"id": "a", "at": 1, **cells}], STREAM, 1)


def test_a_time_that_python_cannot_say_is_refused() -> None:
    beyond = pa.array([2**62], pa.timestamp("s"))
    with pytest.raises(EventError, match="at must be timestamp"):
        read_events(pa.table({"id": ["a"], "at": beyond}), STREAM, 1)


_ARRAYS = st.sampled_from([
    pa.array(["a", None]), pa.array([b"\xff", b""]), pa.array([2**64 - 1, 0], pa.uint64()), pa.array([1.5, None]),
    pa.array([None, None]), pa.array([[1], None]), pa.array([Decimal("1.005"), None]), pa.array([True, None]),
    pa.array([-(2**63), 2**63 - 1]), pa.array([2**63 - 1, 0], pa.timestamp("s")), pa.array([1, 2], pa.timestamp("ns")),
    pa.array([-(2**31), 2**31 - 1], pa.date32()), pa.array(["a", "b"]).dictionary_encode(), pa.array([{"x": 1}, None]),
    pa.array([1, 2], pa.duration("us")), pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int64())),
    pa.array(["1", "2"], pa.large_string()), pa.array([10**37, 1], pa.decimal256(76, 0)), pa.array([1, 2], pa.time64("us")),
])  # fmt: skip


@given(st.dictionaries(st.sampled_from([*STREAM.fields, "arrival", "committed_at"]), _ARRAYS), st.booleans())
def test_any_arrow_table_holds_events_or_is_refused(columns: dict[str, pa.Array], as_frame: bool) -> None:
    table = pa.table({"id": pa.array(["a", "b"]), "at": pa.array([1, 2]), **columns})
    try:
        rows = table.to_pandas() if as_frame else table
    except (pa.ArrowException, ValueError, OverflowError):  # Arrow's business
        return
    events(rows)


@given(
    st.text()
    | st.lists(
        st.sampled_from([*"[]{}:,-&*!|>%@#'\"?\n \t", "a", "<<", "1", "2024-99-99", "!!python/none", "\0"]), max_size=30
    ).map("".join)
)
def test_any_text_is_yaml_of_a_stream_or_of_a_rule_or_refused(text: str) -> None:
    yaml_text(text)


@pytest.mark.parametrize("text", ["[" * 3_000, "{a: " * 2_000, "&a [" * 2_000, "? " * 2_000])
def test_deep_yaml_is_refused(text: str) -> None:
    yaml_text(text)

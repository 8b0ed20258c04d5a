"""Functions of numbers, texts, times and arrays at their edges. tests/spark compares them with Spark's own."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import math
from typing import Any

import pytest
import tzdata

import lookback
from lookback.core.errors import ExpressionError
from lookback.core.expressions.compiling import compile_expression, drop_uncertain
from lookback.core.streams.declaration import Stream
from lookback.core.streams.declarations import Declared
from lookback.core.values.columns import from_values
from lookback.core.values.types import BIGINT, BOOLEAN, DATE, DOUBLE, INT, STRING, TIMESTAMP, array, decimal

SCHEMA = {
    "x": DOUBLE, "z": DOUBLE, "i": INT, "l": BIGINT, "ok": BOOLEAN, "t": STRING, "u": STRING, "day": DATE, "at": TIMESTAMP,
    "d": decimal(18, 2), "numbers": array(INT), "words": array(STRING), "doubles": array(DOUBLE), "lists": array(array(INT)),
}  # fmt: skip
ERROR = "error"
NAN, INF = math.nan, math.inf


def evaluated(text: str, /, **values: Any) -> Any:
    """The value of an expression for one row, "error" for an error."""
    expression = compile_expression(text, SCHEMA)
    columns = {name: from_values(SCHEMA[name], [value]) for name, value in values.items()}
    column = expression.evaluate(columns, 1)
    return ERROR if column.error is not None and column.error[0] else column.item(0)


def refusal(text: str) -> str:
    with pytest.raises(ExpressionError) as caught:
        compile_expression(text, SCHEMA)
    return "; ".join(caught.value.problems)


# Numbers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "x", "value"),
    [
        ("sqrt(x)", 2.0, math.sqrt(2)), ("sqrt(x)", -1.0, NAN), ("sqrt(x)", -0.0, -0.0), ("sqrt(x)", INF, INF), ("sqrt(x)", None, None),
        ("exp(x)", 710.0, INF), ("exp(x)", -INF, 0.0), ("exp(x)", NAN, NAN), ("exp(x)", -0.0, 1.0),
        ("ln(x)", 0.0, None), ("ln(x)", -0.0, None), ("ln(x)", -1.0, None), ("ln(x)", NAN, NAN), ("ln(x)", INF, INF),
        ("log10(x)", 1000.0, 3.0), ("log10(x)", -INF, None), ("sin(x)", INF, NAN), ("cos(x)", 0.0, 1.0), ("cos(x)", -INF, NAN),
        ("sin(x)", -0.0, -0.0), ("asin(x)", 1.5, NAN), ("acos(x)", 1.0, 0.0), ("acos(x)", NAN, NAN),
        ("pow(x, 0)", NAN, 1.0), ("pow(1, x)", NAN, NAN), ("pow(-1, x)", INF, NAN), ("pow(x, -1)", 0.0, INF), ("pow(x, -1)", -0.0, -INF),
        ("pow(x, -2)", -0.0, INF), ("pow(x, 0.5)", -8.0, NAN), ("pow(x, 3)", -1e200, -INF), ("pow(x, 2)", -1e200, INF), ("power(x, 3)", -INF, -INF),
        ("atan2(x, -1)", -0.0, math.pi), ("atan2(0, x)", -0.0, 0.0), ("atan2(x, 1)", NAN, NAN),
        ("radians(x)", 180.0, math.pi), ("degrees(x)", math.pi, 180.0), ("degrees(x)", INF, INF),
        ("try_divide(1, x)", 0.0, None), ("try_divide(1, x)", 4.0, 0.25), ("try_divide(x, null)", 1.0, None),
    ],
)  # fmt: skip
def test_c12_9_functions_of_doubles_at_their_edges(text: str, x: float | None, value: float | None) -> None:
    found = evaluated(text, x=x)
    if value is None:
        assert found is None
    else:
        assert (
            math.isnan(found)
            if math.isnan(value)
            else (found, math.copysign(1, found)) == (value, math.copysign(1, value))
        )


def test_c12_9_try_divide_is_null_for_its_own_errors_only() -> None:
    assert evaluated("try_divide(1 / i, 2)", i=0) == ERROR
    assert evaluated("try_divide(d, i)", d=100, i=0) is None
    assert compile_expression("try_divide(d, d)", SCHEMA).type == decimal(38, 20)


@pytest.mark.parametrize(
    ("points", "kilometres"),
    [
        ((52.52, 13.405, 48.8566, 2.3522), 877.464538),  # Berlin, Paris
        ((0.0, 0.0, 0.0, 180.0), 20015.114442), ((0.0, -179.5, 0.0, 179.5), 111.19508023), ((0.0, 359.0, 0.0, -1.0), 0.0),
        ((90.0, 10.0, 90.0, -170.0), 0.0), ((-90.0, 0.0, 90.0, 0.0), 20015.114442), ((1.0, 2.0, 1.0, 2.0), 0.0),
        ((90.000001, 0.0, 0.0, 0.0), None), ((0.0, 0.0, 0.0, 360.5), None), ((0.0, NAN, 0.0, 0.0), None), ((0.0, 0.0, INF, 0.0), None),
        ((0.0, None, 0.0, 0.0), None),
    ],
)  # fmt: skip
def test_c12_9_a_distance_is_null_where_there_is_no_place(
    points: tuple[float | None, ...], kilometres: float | None
) -> None:
    schema = dict.fromkeys(("a", "b", "c", "d"), DOUBLE)
    for order in ((0, 1, 2, 3), (2, 3, 0, 1)):
        columns = {name: from_values(DOUBLE, [points[at]]) for name, at in zip(schema, order, strict=True)}
        found = compile_expression("haversine_km(a, b, c, d)", schema).evaluate(columns, 1).item(0)
        assert found == (kilometres if kilometres is None else pytest.approx(kilometres, rel=1e-9, abs=1e-9))


@pytest.mark.parametrize(
    ("where", "sent"),
    [
        ("ok and x < sin(z)", "ok and ((x < sin(z)) is null or true)"),
        ("t = 'sin(x)' and sqrt(x) > 1", "t = 'sin(x)' and sqrt(x) > 1"),
        ("ok or power(x, 2) > 1", "(ok or pow(x, 2) > 1) is null or true"),
        ("in_list(t, 'a') and ln(x) > 1", "(ln(x) > 1) is null or true"),
        ("in_list(cast(cast(exp(x) as int) as string), 'a') and ok", None),
    ],
)
def test_c12_9_dispatch_does_not_decide_by_a_digit_that_may_differ(where: str, sent: str | None) -> None:
    found = drop_uncertain(compile_expression(where, SCHEMA))
    assert (None if found is None else found.sql) == sent


# Texts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("replace('aaaa', 'aa', 'b')", "bb"), ("replace('abc', '', 'x')", "abc"), ("replace('abc', 'b')", "ac"), ("replace('abc', null)", None),
        ("split_part('a.b.c', '.', -1)", "c"), ("split_part('a.b.c', '.', 4)", ""), ("split_part('a.b', '.', 0)", ERROR), ("split_part('', '.', 1)", ""),
        ("split_part('abc', '', 1)", "abc"), ("split_part('abc', '', 2)", ""), ("split_part('a', null, 0)", None),
        ("concat_ws(',')", ""), ("concat_ws(',', 'a', null, '')", "a,"), ("concat_ws(null, 'a')", None), ("concat_ws(',', words)", "x,y"),
        ("instr('\U0001f600xa', 'a')", 3), ("instr('abc', '')", 1), ("instr('', 'a')", 0),
        ("lpad('\U0001f600b', 5, '\u00e9z')", "\u00e9z\u00e9\U0001f600b"), ("rpad('abc', 2)", "ab"), ("lpad('abc', -1, 'x')", ""), ("rpad('abc', 9, '')", "abc"),
        ("repeat('ab', 0)", ""), ("repeat('ab', -5)", ""), ("repeat('', 2147483647)", ""), ("repeat('ab', 2147483647)", ERROR),
        ("lpad('a', 2147483647, 'x')", ERROR), ("reverse('\U0001f600ab')", "ba\U0001f600"), ("reverse(words)", ["y", None, "x"]),
        ("initcap('gHENT  south-east')", "Ghent  South-east"), ("initcap('\u00dfa \u01c6x')", "Ssa \u01c5x"), ("initcap('')", ""),
        ("md5('')", "d41d8cd98f00b204e9800998ecf8427e"), ("sha2('', 1)", None), ("sha2('\u00e9', 0)", hashlib.sha256("\u00e9".encode()).hexdigest()),
    ],
)  # fmt: skip
def test_c12_9_functions_of_texts_at_their_edges(text: str, value: Any) -> None:
    assert evaluated(text, words=["x", None, "y"]) == value


def test_c12_9_a_text_that_grows_too_long_is_an_error_of_its_event_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lookback.core.expressions.texts.MAX_JOINED_CHARACTERS", 10)
    columns = {"t": from_values(STRING, ["aaa", "a", None, "b" * 10, "aa"])}
    for text, lengths in {
        "replace(t, 'a', 'xxxx')": [ERROR, 4, None, 10, 8], "repeat(t, 4)": [ERROR, 4, None, ERROR, 8],
        "concat_ws('----', t, t)": [10, 6, 0, ERROR, 8], "rpad(t, length(t) * 4)": [ERROR, 4, None, ERROR, 8],
    }.items():  # fmt: skip
        column = compile_expression(text, SCHEMA).evaluate(columns, 5)
        error = [False] * 5 if column.error is None else column.error.tolist()
        assert [
            ERROR if error[row] else None if column.item(row) is None else len(column.item(row)) for row in range(5)
        ] == lengths, text


# Times ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("last_day(date '2024-02-10')", dt.date(2024, 2, 29)), ("last_day(date '1900-02-10')", dt.date(1900, 2, 28)), ("last_day(date '9999-12-01')", dt.date(9999, 12, 31)),
        ("dayofyear(date '2024-12-31')", 366), ("weekofyear(date '2021-01-03')", 53), ("weekofyear(date '2024-12-30')", 1), ("weekofyear(date '0001-01-01')", 1),
        ("quarter(date '2024-09-30')", 3), ("date_add(date '2024-02-28', 1)", dt.date(2024, 2, 29)), ("date_sub(timestamp '1970-01-01 23:00:00', 1)", dt.date(1969, 12, 31)),
        ("months_between(date '2024-02-29', date '2024-01-31')", 1.0), ("months_between(timestamp '2024-02-28 10:00:00', date '2024-01-31')", 0.91666667),
        ("months_between(timestamp '2024-02-28 10:00:00', date '2024-01-31', false)", 0.9166666666666666), ("months_between(date '2024-01-31', date '2024-02-28')", -0.90322581),
        ("months_between(date '2024-02-28', date '2024-01-31', null)", None), ("unix_timestamp(timestamp '1969-12-31 23:59:59.5')", 0), ("unix_timestamp(date '1969-12-31')", -86400),
        ("unix_timestamp(null)", None), ("date_add(date '2024-01-01', null)", None),
    ],
)  # fmt: skip
def test_c12_9_functions_of_dates_at_their_edges(text: str, value: Any) -> None:
    assert evaluated(text) == value


def test_c12_9_dates_beyond_the_calendar_move_as_spark_moves_them() -> None:
    assert evaluated("datediff(date_add(day, i), day)", day=2**31 - 1, i=1) == 1
    assert evaluated("year(date_add(day, 2147483647))", day=0) == 5_881_580


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("unix_timestamp()", "unix_timestamp() without a time reads a clock, so a replay would differ; use the event's time"),
        ("unix_timestamp = 1", "unix_timestamp() is not allowed; it reads a clock, so a replay would differ; use the event's time"),
        ("date_add(day, l)", "date_add() takes a int, but 'l' is of type bigint; cast it"),
        ("sqrt(t)", "sqrt() takes a number, but 't' is of type string; cast it"),
        ("lpad(i, 3)", "lpad() takes a string, but 'i' is of type int; cast it"),
        ("concat_ws(',', numbers)", "concat_ws() takes a string, but 'numbers' is of type array<int>; cast it"),
        ("array_max(lists)", "array_max() takes an array of single values, got array<array<int>>"),
        ("array_position(words, 1)", "array_position() looks for a string, but '1' is of type int; cast it"),
    ],
)  # fmt: skip
def test_c12_9_a_wrong_call_is_refused_with_a_remedy(text: str, problem: str) -> None:
    assert problem in refusal(text)


# Arrays --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "values", "value"),
    [
        ("array_position(numbers, 3)", {"numbers": [None, 3, 3]}, 2), ("array_position(numbers, 3)", {"numbers": [None]}, 0),
        ("array_position(numbers, 1)", {"numbers": None}, None),
        ("array_position(doubles, x)", {"doubles": [1.0, NAN], "x": NAN}, 2), ("array_position(doubles, x)", {"doubles": [0.0], "x": -0.0}, 1),
        ("array_distinct(numbers)", {"numbers": [2, None, 1, 2, None]}, [2, None, 1]), ("size(array_distinct(doubles))", {"doubles": [NAN, NAN, 0.0, -0.0]}, 2),
        ("array_max(numbers)", {"numbers": [None, -3]}, -3), ("array_max(numbers)", {"numbers": [None]}, None), ("array_min(numbers)", {"numbers": []}, None),
        ("isnan(array_max(doubles))", {"doubles": [1.0, NAN, INF]}, True), ("array_min(doubles)", {"doubles": [NAN, INF]}, INF),
        ("array_max(words)", {"words": ["\uffff", "\U00010000", None]}, "\U00010000"),
    ],
)  # fmt: skip
def test_c12_9_functions_of_arrays_at_their_edges(text: str, values: dict[str, Any], value: Any) -> None:
    assert evaluated(text, **values) == value


# Local time ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("utc", "zone", "local"),
    [
        # Summer time begins and ends, on both hemispheres.
        ("2024-03-31 00:59:59.999999", "Europe/Berlin", "2024-03-31 01:59:59.999999"), ("2024-03-31 01:00:00", "Europe/Berlin", "2024-03-31 03:00:00"),
        ("2024-10-27 00:59:59", "Europe/Berlin", "2024-10-27 02:59:59"), ("2024-10-27 01:00:00", "Europe/Berlin", "2024-10-27 02:00:00"),
        ("2024-04-06 15:00:00", "Australia/Lord_Howe", "2024-04-07 01:30:00"), ("2024-01-01 00:00:00", "Asia/Kathmandu", "2024-01-01 05:45:00"),
        ("1969-12-31 23:59:59", "America/New_York", "1969-12-31 18:59:59"), ("1850-01-01 00:00:00", "America/New_York", "1849-12-31 19:03:58"),
        ("2100-07-01 12:00:00", "Europe/Dublin", "2100-07-01 13:00:00"), ("2024-01-01 00:00:00", "-05:30", "2023-12-31 18:30:00"), ("2024-01-01 00:00:00", "Z", "2024-01-01 00:00:00"),
    ],
)  # fmt: skip
def test_c12_10_the_clock_of_a_zone(utc: str, zone: str, local: str) -> None:
    for text, value in ((f"'{zone}'", None), ("t", zone)):
        assert evaluated(f"from_utc_timestamp(timestamp '{utc}', {text}) = timestamp '{local}'", t=value), text


def test_c12_10_an_unknown_zone_in_a_field_is_an_error_of_its_row_alone() -> None:
    zones = ["UTC", "Mars/Base", None, "Asia/Tokyo", ""]
    columns = {"t": from_values(STRING, zones), "at": from_values(TIMESTAMP, [0] * 5)}
    column = compile_expression("hour(from_utc_timestamp(at, t))", SCHEMA).evaluate(columns, 5)
    assert column.error is not None
    assert column.error.tolist() == [False, True, False, False, True]
    assert column.to_list() == [0, None, None, 9, None]
    assert evaluated("from_utc_timestamp(at, t) is null", at=2**63 - 1, t="Asia/Tokyo") == ERROR


def test_c12_10_an_unknown_zone_in_a_rule_is_refused() -> None:
    assert "'Europe/Berlim' is not a time zone; did you mean 'Europe/Berlin'?" in refusal(
        "hour(from_utc_timestamp(at, 'Europe/Berlim'))"
    )
    assert "write a region such as 'Europe/Berlin' or a distance such as '+02:00'" in refusal(
        "from_utc_timestamp(at, '+25:00')"
    )


def test_c12_10_a_parameter_is_a_zone_and_is_refused_when_it_is_written() -> None:
    rule = {
        "rule_id": "r",
        "stream": "s",
        "parameters": {"zone": "Asia/Tokyo"},
        "when": "hour(from_utc_timestamp(at, :zone)) < 5",
    }
    stream = {"stream": "s", "event_id": "id", "event_time": "at", "fields": {"id": "string", "at": "timestamp"}}
    rows = [{"id": str(hour), "at": hour * 3_600_000_000} for hour in range(24)]
    assert [alert.event_id for alert in lookback.replay([rule], rows, stream).alerts] == ["15", "16", "17", "18", "19"]
    with pytest.raises(lookback.RuleError, match="'Tokyo' is not a time zone"):
        lookback.replay([{**rule, "parameters": {"zone": "Tokyo"}}], rows, stream)


def test_c12_10_the_release_of_the_zones_is_logged() -> None:
    stream = Stream.from_dict(
        {"stream": "s", "event_id": "id", "event_time": "at", "fields": {"id": "string", "at": "timestamp"}}
    )
    assert json.loads(Declared.now(stream, "1").text)["zones"] == tzdata.IANA_VERSION

"""Numbers of all types that overflow, in expressions that go on with what overflowed: an error of the row, never of the rule."""

from __future__ import annotations

import math
import random
from decimal import Context, Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lookback
from lookback.core.errors import ExpressionError
from lookback.core.expressions.compiling import Expression, compile_expression
from lookback.core.expressions.kernels import is_out_of_range
from lookback.core.values.columns import Column, arrow_type, from_arrow, from_values
from lookback.core.values.types import DataType, parse_type

FIELDS = {
    "y": "tinyint", "i": "int", "j": "int", "l": "bigint", "m": "bigint", "d52": "decimal(5,2)", "d102": "decimal(10,2)",
    "d180": "decimal(18,0)", "d3810": "decimal(38,10)", "d380": "decimal(38,0)", "x": "double", "f": "float", "n": "string",
}  # fmt: skip
TYPES = {name: parse_type(text) for name, text in FIELDS.items()}
ROWS = 15
_WIDE = Context(prec=60)
_LEAVES = st.sampled_from([*FIELDS, "null", "0", "1", "-3", "0.5", "2147483648", "-9223372036854775808", "1e300"])


def _grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    two, three = st.tuples(inner, inner), st.tuples(inner, inner, inner)
    types = st.sampled_from(["tinyint", "int", "bigint", "decimal(5,2)", "decimal(18,0)", "decimal(38,10)", "double"])
    return st.one_of(
        st.builds("({0[0]} {1} {0[1]})".format, two, st.sampled_from(["+", "-", "*", "*", "/", "%", "div"])),
        st.builds("{1}({0})".format, inner, st.sampled_from(["-", "abs", "floor", "ceil", "round", "sign"])),
        st.builds("round({0}, {1})".format, inner, st.sampled_from(["-1", "-2", "-9", "-18", "1", "2"])),
        st.builds("{1}({0} as {2})".format, inner, st.sampled_from(["cast", "try_cast", "try_cast"]), types),
        st.builds("{1}({0[0]}, {0[1]})".format, two, st.sampled_from(["greatest", "least", "coalesce", "nullif"])),
        st.builds("case when {0[0]} {1} {0[1]} then {0[2]} end".format, three, st.sampled_from(["<", "=", ">="])),
        st.builds("cast(cast({0} as string) as {1})".format, inner, types),
    )


NUMBERS = st.recursive(_LEAVES, _grow, max_leaves=6)


def _value(type_: DataType, chance: random.Random) -> Any:
    if chance.random() < 0.15:
        return None
    if type_.is_integer or type_.is_decimal:
        top = 2 ** (type_.bits - 1) - 1 if type_.is_integer else 10**type_.precision - 1
        least = -top - 1 if type_.is_integer else -top
        number = chance.choice([0, 1, -1, 2, 3, -7, 50, top, least, least + 1, top // 2, chance.randrange(least, top)])
        return number if type_.is_integer else Decimal(number).scaleb(-type_.scale, _WIDE)
    if type_.name == "string":
        return chance.choice(["0", "-1", "99999999999999999999", "0.005", "-9223372036854775808", "none"])
    return chance.choice([0.0, -1.5, 2.5, 1e10, 9.3e18, -1e30, math.nan, math.inf, -math.inf])


def _read_table() -> dict[str, Column]:
    chance = random.Random(20)
    columns = {}
    for name, type_ in TYPES.items():
        cells = [_value(type_, chance) for _ in range(ROWS)]
        columns[name] = from_arrow(pa.array(cells, arrow_type(type_)), type_)
    return columns


TABLE = _read_table()


def _compile(text: str) -> Expression | None:
    try:
        return compile_expression(text, TYPES)
    except ExpressionError:
        return None


def _show(column: Column) -> list[Any]:
    errors = [False] * len(column) if column.error is None else column.error.tolist()
    return ["error" if error else str(value) for error, value in zip(errors, column.to_list(), strict=True)]


@given(NUMBERS)
def test_each_row_has_the_value_that_it_has_alone(text: str) -> None:
    # What overflows in one row must not reach another one, nor what is made of it: not as an exception either.
    expression = _compile(text)
    if expression is None:
        return
    whole = expression.evaluate(TABLE, ROWS)
    alone = [
        shown
        for row in range(ROWS)
        for shown in _show(expression.evaluate({n: c.take(slice(row, row + 1)) for n, c in TABLE.items()}, 1))
    ]
    assert _show(whole) == alone
    if whole.type.is_integer:
        assert not is_out_of_range(whole.values, whole.type.bits).any()


@pytest.mark.parametrize(
    ("places", "rounded"), [(-1, -9223372036854775810), (-2, -9223372036854775800), (-18, -9 * 10**18)]
)
def test_the_least_bigint_is_rounded_as_any_other(places: int, rounded: int) -> None:
    column = compile_expression(f"round(l, {places})", TYPES).evaluate(
        {"l": from_values(TYPES["l"], [-(2**63), 149])}, 2
    )
    fits = rounded >= -(2**63)
    assert _show(column) == [str(rounded) if fits else "error", {-1: "150", -2: "100", -18: "0"}[places]]


STREAM = {
    "stream": "orders",
    "event_id": "id",
    "event_time": "at",
    "fields": {
        "id": "bigint",
        "at": "timestamp",
        "price": "decimal(10,2)",
        "units": "int",
        "each": "int",
        "m": "bigint",
    },
}


@pytest.mark.parametrize(
    "document",
    [
        {
            "where": "price + units * each > 0",
            "window": "1 microsecond",
            "measures": {"n": "count(*)"},
            "when": "n > 0",
        },
        {"window": "1 microsecond", "measures": {"n": "count(*)"}, "when": "try_cast(m as int) + 0.5 is not null"},
        {"window": "1 microsecond", "measures": {"s": "sum(price + units * each)"}, "when": "s > 0"},
    ],
)
def test_an_event_that_overflows_costs_itself_alone(document: dict[str, Any]) -> None:
    harness = lookback.Harness(STREAM)
    harness.rule({"rule_id": "r", "stream": "orders", "group_by": [], **document})
    numbers = [(2, 3, 1), (-(2**31), 2**31 - 1, 2**62), (2, 3, 1)]
    rows = enumerate(numbers, 1)
    harness.events(
        [{"id": at, "at": 10 * at, "price": "1.00", "units": u, "each": e, "m": m} for at, (u, e, m) in rows]
    )
    assert [alert.event_id for alert in harness.alerts] == ["1", "3"]

"""A call of in_list looks each value up once; every row gets what it gets alone."""

from __future__ import annotations

import functools
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookback.core.expressions.compiling import compile_expression
from lookback.core.values.columns import from_values
from lookback.core.values.lists import ListChange, Lists
from lookback.core.values.types import DataType, parse_type

# What a column may hold, and texts by which it is looked up: of values and of NULL.
DRAWN: dict[str, list[Any]] = {
    "bigint": [0, 7, -7, 2**62, None],
    "string": ["a", "", "7", "é", "10.0.0.1", None],
    "boolean": [True, False, None],
    "decimal(9,2)": [Decimal("7.00"), Decimal("-0.50"), None],
    "timestamp": [0, 1_000_000, None],
}
CALLS = [
    "in_list(x, 'l')", "in_list(coalesce(cast(x as string), 'none'), 'l')", "in_list(x, 'gone')",
    "in_list(cast(cast(x as string) as int), 'l')", "in_list(concat(cast(x as string), cast(y as string)), 'l')",
]  # fmt: skip
LISTED = ["7", "none", "-0.50", "7.00", "true", "a", "77", "1970-01-01 00:00:00", ""]
LISTS = Lists.empty().apply([
    *(ListChange("insert", 1, "l", text, 5 if at % 2 else None) for at, text in enumerate(LISTED)),
    ListChange("insert", 1, "l", "10.0.0.0/8", 7, "cidr"),
])  # fmt: skip


compile_call = functools.lru_cache(lambda call, kind: compile_expression(call, {"x": kind, "y": kind}))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", DRAWN)
@given(data=st.data())
@settings(max_examples=20)
def test_c11_3_every_row_gets_what_it_gets_alone(name: str, call: str, data: st.DataObject) -> None:
    kind = parse_type(name)
    values = data.draw(st.lists(st.sampled_from(DRAWN[name]), max_size=12))
    times = np.array(
        data.draw(st.lists(st.sampled_from([4, 5, 7]), min_size=len(values), max_size=len(values))), np.int64
    )
    together = ask(call, kind, values, times)
    assert together == [
        each for at, value in enumerate(values) for each in ask(call, kind, [value], times[at : at + 1])
    ]


def ask(call: str, kind: DataType, values: list[Any], times: Any) -> list[tuple[bool | None, bool]]:
    """Returns per row the value, None for NULL, and whether it is an error."""
    (membership,) = compile_call(call, kind).memberships
    column = from_values(kind, values)
    found = membership.evaluate({"x": column, "y": column}, times, LISTS)
    wrong = np.zeros(len(values), dtype=bool) if found.error is None else found.error
    return [(None if wrong[at] else found.item(at), bool(wrong[at])) for at in range(len(values))]

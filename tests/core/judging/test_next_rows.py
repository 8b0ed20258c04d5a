"""Rows that compare with the values of matches as they must are found without a look at the others."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookback.core.judging.nextrows import Compared, NextRows
from lookback.core.values.columns import from_values
from lookback.core.values.types import DOUBLE, STRING, DataType

_NAN = float("nan")
_COMPARES: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
_VALUES: dict[DataType, st.SearchStrategy[Any]] = {
    DOUBLE: st.sampled_from([None, _NAN, 0.0, -0.0, 1.5, -2.0, float("inf")]),
    STRING: st.sampled_from([None, "", "a", "ä", "b", "aa"]),
}


def is_true(symbol: str, own: Any, other: Any) -> bool:
    """Whether a comparison is true as in Spark: NaN is the greatest and equals itself, NULL compares with nothing."""
    if own is None or other is None:
        return False
    return _COMPARES[symbol](*((each != each, "" if each != each else each) for each in (own, other)))


# A symbol, and the values of rows and of matches that it compares.
_Case = tuple[str, DataType, list[Any], list[Any]]


@st.composite
def comparisons(draw: st.DrawFn) -> tuple[list[_Case], int, int]:
    rows, matches = draw(st.integers(1, 20)), draw(st.integers(1, 4))
    found = []
    for _ in range(draw(st.integers(0, 3))):
        type_ = draw(st.sampled_from([DOUBLE, STRING]))
        own, others = (draw(st.lists(_VALUES[type_], min_size=n, max_size=n)) for n in (rows, matches))
        found.append((draw(st.sampled_from(sorted(_COMPARES))), type_, own, others))
    return found, rows, matches


@given(comparisons(), st.data())
def test_the_next_rows_are_those_that_may_satisfy_all_comparisons(
    case: tuple[list[_Case], int, int], data: st.DataObject
) -> None:
    listed, rows, matches = case
    compared = [
        Compared(symbol, from_values(type_, own), from_values(type_, other)) for symbol, type_, own, other in listed
    ]
    next_rows = NextRows(compared, rows, matches)
    first = [data.draw(st.integers(0, rows - 1)) for _ in range(matches)]
    last = [data.draw(st.integers(each - 1, rows - 1)) for each in first]
    low, high = next_rows.find_ranges(np.array(first), np.array(last))
    for match in range(matches):
        expected = [
            at
            for at in range(first[match], last[match] + 1)
            if all(is_true(symbol, own[at], other[match]) for symbol, _, own, other in listed)
        ]
        found, place = [], int(low[match])
        while place <= high[match]:
            place = int(next_rows.find_next(np.array([match]), np.array([place]))[0])
            if place <= high[match]:
                found.append(int(next_rows.order[place]))
            place += 1
        # Each comparison leaves out the rows up to its next one, so that of several all have to be looked at.
        assert set(expected) <= set(found)
        if sum(symbol != "=" for symbol, *_ in listed) <= 1:
            assert found == expected


@pytest.mark.parametrize("symbol", ["<", "!="])
def test_of_rows_that_compare_with_no_match_none_is_looked_at(symbol: str) -> None:
    own, others = from_values(DOUBLE, [1.0, None, 1.0]), from_values(DOUBLE, [1.0])
    assert NextRows([Compared(symbol, own, others)], 3, 1).find_next(np.array([0]), np.array([0])).tolist() == [3]


def test_null_equals_no_null() -> None:
    own, others = from_values(STRING, ["a", None, "b"]), from_values(STRING, [None, "b"])
    low, high = NextRows([Compared("=", own, others)], 3, 2).find_ranges(np.array([0, 0]), np.array([2, 2]))
    assert (high - low + 1).tolist() == [0, 1]

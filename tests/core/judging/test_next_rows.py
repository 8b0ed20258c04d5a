"""Rows that compare with the values of matches as they must are found without a look at the others."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookback.core.judging.lookups import Compared, NextItems
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


def visit(
    compared: list[Compared], rows: int, first: list[int], last: list[int], found: dict[int, list[int]]
) -> NextItems:
    """Notes the rows that are visited for each match; none of them satisfies the condition."""

    def holds(owners: Any, at: Any) -> Any:
        for owner, each in zip(owners.tolist(), at.tolist(), strict=True):
            found.setdefault(owner, []).append(each)
        return np.zeros(len(owners), dtype=bool)

    items = NextItems(compared, rows, len(first))
    assert (items.find_nth(np.array(first), np.array(last), 1, holds) == -1).all()
    return items


@given(comparisons(), st.data())
def test_the_rows_that_are_visited_are_those_that_may_satisfy_all_comparisons(
    case: tuple[list[_Case], int, int], data: st.DataObject
) -> None:
    listed, rows, matches = case
    compared = [
        Compared(symbol, from_values(type_, own), from_values(type_, other)) for symbol, type_, own, other in listed
    ]
    first = [data.draw(st.integers(0, rows - 1)) for _ in range(matches)]
    last = [data.draw(st.integers(each - 1, rows - 1)) for each in first]
    visited: dict[int, list[int]] = {}
    items = visit(compared, rows, first, last, visited)
    for match in range(matches):
        expected = [
            at
            for at in range(first[match], last[match] + 1)
            if all(is_true(symbol, own[at], other[match]) for symbol, _, own, other in listed)
        ]
        found = visited.get(match, [])
        # Each comparison passes over the rows up to its next one, so rows that satisfy one of several are visited.
        assert set(expected) <= set(found)
        assert found == sorted(found)
        for nth in range(1, len(expected) + 2):
            holds = partial(_are_in, match, expected)
            at = items.find_nth(np.array(first), np.array(last), nth, holds)
            assert at[match] == (expected[nth - 1] if nth <= len(expected) else -1)


def _are_in(match: int, expected: list[int], owners: Any, at: Any) -> Any:
    return (owners == match) & np.isin(at, expected)


@pytest.mark.parametrize("symbol", ["<", "!="])
def test_rows_that_compare_with_no_match_are_not_visited(symbol: str) -> None:
    own, others = from_values(DOUBLE, [1.0, None, 1.0]), from_values(DOUBLE, [1.0])
    visited: dict[int, list[int]] = {}
    visit([Compared(symbol, own, others)], 3, [0], [2], visited)
    assert visited == {}


def test_null_equals_no_null() -> None:
    own, others = from_values(STRING, ["a", None, "b"]), from_values(STRING, [None, "b"])
    visited: dict[int, list[int]] = {}
    visit([Compared("=", own, others)], 3, [0, 0], [2, 2], visited)
    assert visited == {1: [2]}

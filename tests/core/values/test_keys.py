"""Keys are numbered and rows put in order as a plain sort would."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookback.core.values import keys as keys_module
from lookback.core.values.keys import (
    Keys,
    TimeSearch,
    find_keys,
    number_keys,
    number_sorted_keys,
    order_by_group,
    search_rows,
)

HALF = st.one_of(st.integers(-3, 3), st.integers(-(2**63), 2**63 - 1))


@given(st.lists(st.tuples(HALF, st.sampled_from([0, 0, 1, -1]))))
def test_keys_are_numbered_in_their_order(rows: list[tuple[int, int]]) -> None:
    halves = np.array(rows, dtype=np.int64).reshape(-1, 2)
    keys = Keys(halves[:, 0].copy(), halves[:, 1].copy())
    numbers, distinct = number_keys(keys)
    expected = sorted(set(rows))
    assert list(zip(distinct.low.tolist(), distinct.high.tolist(), strict=True)) == expected
    assert numbers.tolist() == [expected.index(row) for row in rows]
    assert find_keys(keys, distinct).tolist() == numbers.tolist()
    sorted_numbers, same = number_sorted_keys(keys)
    assert sorted_numbers.tolist() == numbers.tolist()
    assert (same.low.tolist(), same.high.tolist()) == (distinct.low.tolist(), distinct.high.tolist())


NUMBER = st.one_of(st.integers(0, 3), st.integers(0, 2**16 + 3), st.integers(0, 2**33))


@given(st.lists(st.tuples(NUMBER, st.integers(-5, 5))))
def test_rows_are_ordered_by_number_then_time_then_place(rows: list[tuple[int, int]]) -> None:
    # Numbers are dense where they come from, yet a few large ones pass through every digit of the sort.
    columns = np.array(rows, dtype=np.int64).reshape(-1, 2)
    dense = {number: at for at, number in enumerate(sorted({number for number, _ in rows}))}
    numbers = np.array([dense[n] if n > 2**20 else n for n, _ in rows], dtype=np.int64)
    expected = sorted(range(len(rows)), key=lambda at: (int(numbers[at]), rows[at][1], at))
    assert order_by_group(numbers, columns[:, 1].copy()).tolist() == expected


@given(st.lists(st.integers(-9, 9)), st.lists(st.integers(-10, 10)), st.booleans(), st.integers(1, 5))
def test_rows_are_found_whether_wanted_in_order_or_not(
    values: list[int], wanted: list[int], ascend: bool, at_once: int
) -> None:
    rows, wanted = np.array(sorted(values), dtype=np.int64), sorted(wanted) if ascend else wanted
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys_module, "_SEARCHED_AT_ONCE", at_once)
        found = search_rows(rows, np.array(wanted, dtype=np.int64))
    assert found.tolist() == [sum(value < each for value in values) for each in wanted]


GROUP_AND_TIME = st.tuples(st.integers(0, 4), st.integers(-20, 20))


@pytest.mark.parametrize("most_places", [2**62, 100, 1], ids=["in one span", "in own spans", "by rank"])
@given(st.lists(GROUP_AND_TIME), st.lists(GROUP_AND_TIME), st.integers(0, 5))
def test_times_are_found_in_their_group(
    most_places: int, rows: list[tuple[int, int]], wanted: list[tuple[int, int]], numbered: int
) -> None:
    known, rows = sorted({group for group, _ in rows}), sorted(rows)
    dense = [(known.index(group), time) for group, time in rows]
    groups, times = np.array(dense, dtype=np.int64).reshape(-1, 2).T.copy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys_module, "_MAX_PLACES", most_places)
        search = TimeSearch(groups, times, numbered)
    found = search.find_first(*np.array(wanted, dtype=np.int64).reshape(-1, 2).T.copy())
    assert found.tolist() == [sum(row < pair for row in dense) for pair in wanted]

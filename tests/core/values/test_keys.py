"""Keys are numbered and rows put in order as a plain sort would."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lookback.core.values.keys import Keys, find_keys, number_keys, order_by_group

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


NUMBER = st.one_of(st.integers(0, 3), st.integers(0, 2**16 + 3), st.integers(0, 2**33))


@given(st.lists(st.tuples(NUMBER, st.integers(-5, 5))))
def test_rows_are_ordered_by_number_then_time_then_place(rows: list[tuple[int, int]]) -> None:
    # Numbers are dense where they come from, yet a few large ones pass through every digit of the sort.
    columns = np.array(rows, dtype=np.int64).reshape(-1, 2)
    dense = {number: at for at, number in enumerate(sorted({number for number, _ in rows}))}
    numbers = np.array([dense[n] if n > 2**20 else n for n, _ in rows], dtype=np.int64)
    expected = sorted(range(len(rows)), key=lambda at: (int(numbers[at]), rows[at][1], at))
    assert order_by_group(numbers, columns[:, 1].copy()).tolist() == expected

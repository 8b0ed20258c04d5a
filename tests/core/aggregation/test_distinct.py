"""Different values of overlapping windows, against a set for each window."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lookback.core.aggregation.distinct import DistinctCounter, GroupedRows

TIME = st.integers(-6, 12)
ROWS = st.lists(st.tuples(st.integers(0, 2), TIME, st.integers(0, 3)), max_size=14)


def counted(rows: GroupedRows, windows: list[tuple[int, int, int, int]]) -> list[int]:
    return [
        len(
            {
                value
                for g, time, value, arrived in zip(rows.groups, rows.times, rows.values, rows.positions, strict=True)
                if g == group and first <= time <= last and arrived <= position
            }
        )
        for group, position, first, last in windows
    ]


@given(st.data(), ROWS, ROWS)
def test_windows_of_one_size_at_any_moment(
    data: st.DataObject, stored: list[tuple[int, int, int]], batch: list[tuple[int, int, int]]
) -> None:
    kept = data.draw(st.lists(st.booleans(), min_size=len(batch), max_size=len(batch)))
    if data.draw(st.booleans()):
        batch = sorted(batch, key=lambda row: row[1])
    rows = [(*row, -1) for row in stored] + [(*row, at) for at, row in enumerate(batch) if kept[at]]
    rows.sort(key=lambda row: (row[0], row[1], row[3]))
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4)
    table = GroupedRows(*columns.T.copy())
    # At an event, at its own time or before, or at some other time of its group: windows that end, verdicts revised.
    asked = data.draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, max(0, len(batch) - 1)), TIME), max_size=12))
    groups, positions, last = np.array(asked, dtype=np.int64).reshape(-1, 3).T.copy()
    distinct = DistinctCounter(table, groups, positions, last)
    floor = data.draw(TIME)
    for size in data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=3)):
        first = np.maximum(last - size, floor)
        windows = list(zip(groups, positions, first, last, strict=True))
        assert distinct.count(first).tolist() == counted(table, windows)


def test_nan_is_one_value() -> None:
    one, times = np.zeros(1, dtype=np.int64), np.arange(3)
    rows = GroupedRows(np.zeros(3, dtype=np.int64), times, np.array([np.nan, np.nan, 0.0]), np.full(3, -1))
    assert DistinctCounter(rows, one, one, one + 2).count(one).tolist() == [2]


def test_windows_of_groups_without_rows_beside_rows_of_all_times() -> None:
    #  Number and time of a group in one integer would exceed 64 bits.
    rows = GroupedRows(np.zeros(2, dtype=np.int64), np.array([-(2**60), 2**60]), np.array([1, 2]), np.full(2, -1))
    groups, last = np.array([0, 3, 7]), np.full(3, 2**60)
    counter = DistinctCounter(rows, groups, np.zeros(3, dtype=np.int64), last)
    assert counter.count(np.full(3, -(2**60))).tolist() == [2, 0, 0]
    assert counter.count(np.full(3, 0)).tolist() == [1, 0, 0]

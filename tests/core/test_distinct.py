"""Different values of overlapping windows, against a set for each window."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lookback.core.distinct import Rows, Windows, count_distinct

TIME = st.integers(-6, 12)
STORED = st.lists(st.tuples(st.integers(0, 2), TIME, st.integers(0, 3)), max_size=12)


def counted(rows: Rows, windows: Windows) -> list[int]:
    return [
        len(
            {
                value
                for g, time, value, arrived in zip(rows.groups, rows.times, rows.values, rows.positions, strict=True)
                if g == group and first <= time <= last and arrived <= position
            }
        )
        for group, position, first, last in zip(
            windows.groups, windows.positions, windows.first, windows.last, strict=True
        )
    ]


def table_of(stored: list[tuple[int, int, int]], batch: list[tuple[int, int, int]], kept: list[bool]) -> Rows:
    rows = [(*row, -1) for row in stored] + [(*row, at) for at, row in enumerate(batch) if kept[at]]
    rows.sort(key=lambda row: (row[0], row[1], row[3]))
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4)
    return Rows(columns[:, 0], columns[:, 1], columns[:, 2], columns[:, 3])


@given(st.data(), STORED, st.lists(st.tuples(st.integers(0, 2), TIME, st.integers(0, 3)), max_size=14))
def test_windows_that_slide(
    data: st.DataObject, stored: list[tuple[int, int, int]], batch: list[tuple[int, int, int]]
) -> None:
    batch = sorted(batch, key=lambda row: row[1])  # of every group in order of time
    kept = data.draw(st.lists(st.booleans(), min_size=len(batch), max_size=len(batch)))
    size, delay = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 4))
    asked = [at for at in range(len(batch)) if data.draw(st.booleans())]
    columns = np.array([batch[at][:2] for at in asked], dtype=np.int64).reshape(-1, 2)
    last = columns[:, 1] - delay
    positions = np.array(asked, dtype=np.int64) if delay == 0 else np.full(len(asked), len(batch))
    windows = Windows(columns[:, 0], positions, last - size, last)
    rows = table_of(stored, batch, kept)
    for sliding in (True, False):
        mask = np.full(len(asked), sliding)
        assert count_distinct(rows, windows, mask).tolist() == counted(rows, windows)


@given(st.data(), STORED, st.lists(st.tuples(st.integers(0, 2), TIME, st.integers(0, 3)), max_size=14))
def test_any_windows_at_any_moment(
    data: st.DataObject, stored: list[tuple[int, int, int]], batch: list[tuple[int, int, int]]
) -> None:
    rows = table_of(stored, batch, [True] * len(batch))
    asked = data.draw(
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, max(0, len(batch) - 1)), TIME, TIME), max_size=12)
    )
    columns = np.array(asked, dtype=np.int64).reshape(-1, 4)
    windows = Windows(columns[:, 0], columns[:, 1], columns[:, 2], columns[:, 3])
    assert count_distinct(rows, windows, np.zeros(len(asked), dtype=bool)).tolist() == counted(rows, windows)


def test_nan_is_one_value() -> None:
    groups, times = np.zeros(3, dtype=np.int64), np.arange(3)
    rows = Rows(groups, times, np.array([np.nan, np.nan, 0.0]), np.full(3, -1))
    windows = Windows(groups[:1], np.array([0]), np.array([0]), np.array([2]))
    for sliding in (True, False):
        assert count_distinct(rows, windows, np.array([sliding])).tolist() == [2]

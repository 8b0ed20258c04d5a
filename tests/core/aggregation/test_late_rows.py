"""Windows over events that arrived out of order, against a scan of all rows for each window."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookback.core.aggregation.aggregates import AGGREGATES
from lookback.core.aggregation.distinct import count_below
from lookback.core.aggregation.featurerows import FeatureRows
from lookback.core.aggregation.grouping import Grouping, Queries
from lookback.core.values.keys import Keys
from lookback.core.values.types import BIGINT

# Key, time, value and whether the feature keeps the event; in order of arrival.
EVENTS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 15), st.integers(-3, 2**31), st.booleans()), min_size=1, max_size=20
)


# test_gathered.py has those whose rows are gathered before.
@pytest.mark.parametrize("function", sorted(name for name, each in AGGREGATES.items() if not each.is_gathered))
@pytest.mark.parametrize("delay", [0, 2])
@given(events=EVENTS, size=st.integers(0, 12), in_order=st.booleans(), is_wide=st.booleans())
def test_every_event_measures_what_had_arrived_with_it(
    function: str, delay: int, events: list[Any], size: int, in_order: bool, is_wide: bool
) -> None:
    if in_order:
        events = sorted(events, key=lambda event: event[1])
    keys, times, values, kept = (np.array(column) for column in zip(*events, strict=True))
    # Sums of these do not fit in 64 bits.
    values = values.astype(object) * 2**40 if is_wide and not function.startswith(("stddev", "var")) else values
    aggregate, count = AGGREGATES[function], len(events)
    grouping = Grouping(Keys(keys, np.zeros(count, dtype=np.int64)), times, np.ones(count, dtype=bool))
    rows = FeatureRows(grouping, aggregate, kept, values if aggregate.stores_value else None)
    first, last = times - delay - size, times - delay
    positions = np.arange(count, dtype=np.int64)
    queries = Queries(grouping.numbers, positions, first, last, by_arrival=delay == 0, by_time=delay > 0)
    found = [part.tolist() for part in rows.aggregate_windows(queries)]
    for at in range(count):
        inside = (keys == keys[at]) & (times >= first[at]) & (times <= last[at]) & (positions <= positions[at]) & kept
        by_time = np.flatnonzero(inside)[np.argsort(times[inside], kind="stable")]
        index = aggregate.index_rows(values[by_time], times[by_time], by_time)
        ends = np.array([0]), np.array([int(inside.sum())])
        expected = [part.tolist()[0] for part in aggregate.aggregate_ranges(index, *ends)]
        # The extreme or first of no rows has no meaning, and an empty set may be a 0.
        if not inside.any() and function in ("min", "max", "count_distinct", "first", "last"):
            continue
        assert [part[at] for part in found] == expected


def test_the_average_of_late_rows_is_rounded_once() -> None:
    keys, times = np.zeros(3, dtype=np.int64), np.array([5, 1, 9])
    grouping = Grouping(Keys(keys, keys), times, np.ones(3, dtype=bool))
    rows = FeatureRows(grouping, AGGREGATES["avg"], np.ones(3, dtype=bool), np.array([1, 2, 4]))
    #   arrival: 5, 1, 9   windows of 8: [-3, 5] has 1; [-7, 1] has 2; [1, 9] has all
    queries = Queries(grouping.numbers, np.arange(3), times - 8, times, by_arrival=True, by_time=False)
    averages = AGGREGATES["avg"].finish(rows.aggregate_windows(queries), BIGINT)
    assert averages.values.tolist() == [1.0, 2.0, 7 / 3]


@given(
    values=st.lists(st.integers(0, 40), max_size=30),
    queries=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 45)), max_size=10),
)
def test_values_below_limits_are_counted(values: list[int], queries: list[tuple[int, int]]) -> None:
    asked = [(min(count, len(values)), limit) for count, limit in queries]
    counts, limits = np.array(asked, dtype=np.int64).reshape(-1, 2).T
    expected = [sum(value < limit for value in values[:count]) for count, limit in asked]
    assert count_below(np.array(values, dtype=np.int64), counts, limits).tolist() == expected

"""Percentiles, the most frequent value and sets of values, over every kind of window and against a plain evaluation."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import numpy as np
import pytest

import lookback
from lookback.core.aggregation.aggregates import find_aggregate
from lookback.core.aggregation.distinct import STORED, GroupedRows
from lookback.core.aggregation.gathered import GatheredAggregate
from lookback.core.values.columns import Column, to_stored
from lookback.core.values.sortable import read_sortable, write_sortable
from lookback.core.values.types import BIGINT, DOUBLE, STRING, DataType, decimal, parse_type

STREAM = {
    "stream": "s",
    "event_id": "id",
    "event_time": "at",
    "fields": {"id": "string", "at": "timestamp", "k": "string", "n": "bigint", "x": "double", "d": "decimal(9,2)"},
}


def over(function: str, values: list[Any], type_: DataType = BIGINT) -> Any:
    """The aggregate over one range."""
    aggregate = find_aggregate(function)
    stored = np.array([to_stored(type_, value) for value in values], dtype=type_.storage)
    low, high = np.array([0]), np.array([len(values)])
    return aggregate.finish(aggregate.aggregate_ranges(aggregate.build_index(stored), low, high), type_).item(0)


def measured(measure: str, rows: list[dict[str, Any]], window: Any = "10 seconds") -> list[Any]:
    """The measure of each alert of a rule that alerts always."""
    rule = {"rule_id": "r", "stream": "s", "group_by": [], "window": window, "measures": {"m": measure}, "when": "true"}
    return [alert.measures["m"] for alert in lookback.replay([rule], rows, STREAM).alerts]


def at(second: float, number: int, **fields: Any) -> dict[str, Any]:
    return {"id": str(number), "at": round(second * 1_000_000), **fields}


@pytest.mark.parametrize(
    ("function", "values", "type_", "result"),
    [
        ("median", [3, 1, 2], BIGINT, 2.0), ("median", [1, 2], BIGINT, 1.5), ("median", [], BIGINT, None), ("median", [7], BIGINT, 7.0),
        ("percentile(0.0)", [5, 1], BIGINT, 1.0), ("percentile(1.0)", [5, 1], BIGINT, 5.0), ("percentile(0.25)", [1, 2, 3, 4], BIGINT, 1.75),
        ("percentile(0.5)", [1.0, math.inf], DOUBLE, math.inf), ("percentile(1.0)", [1.0, math.nan], DOUBLE, math.nan), ("median", [-0.0, 0.0], DOUBLE, 0.0),
        ("mode", [2, 1, 2, 1, 3], BIGINT, 1), ("mode", [3], BIGINT, 3), ("mode", [], BIGINT, None), ("mode", ["b", "a", "b"], STRING, "b"),
        ("mode", [math.nan, 1.0, math.nan], DOUBLE, math.nan), ("mode", [1.0, math.nan], DOUBLE, 1.0),
        ("collect_set", [3, 1, 3], BIGINT, [1, 3]), ("collect_set", [], BIGINT, []), ("collect_set", ["\U00010000", "\uffff"], STRING, ["\uffff", "\U00010000"]),
        ("collect_set", list(range(200)), BIGINT, list(range(100))),
    ],
)  # fmt: skip
def test_c12_9_aggregates_of_all_values_of_a_window(
    function: str, values: list[Any], type_: DataType, result: Any
) -> None:
    found = over(function, values, type_)
    assert math.isnan(found) if isinstance(result, float) and math.isnan(result) else found == result, found


def test_c12_9_a_percentile_of_decimals_is_that_of_the_nearest_doubles() -> None:
    from decimal import Decimal

    assert over("percentile(0.3)", [Decimal("0.10"), Decimal("0.20")], decimal(9, 2)) == 0.7 * 0.1 + 0.3 * 0.2


@pytest.mark.parametrize(("n", "values"), [(1, (None, None, 0.0, 0.0)), (2, (2.0, math.sqrt(2), 1.0, 1.0))])
def test_c12_9_the_variance_of_a_sample_needs_two_values_that_of_the_population_one(n: int, values: Any) -> None:
    rows = [at(number, number, n=2 * number) for number in range(n)]
    found = [measured(f"{name}(n)", rows)[-1] for name in ("var_samp", "stddev_samp", "var_pop", "stddev_pop")]
    assert tuple(found) == values


def test_c12_9_a_variance_is_exact_where_doubles_would_cancel() -> None:
    numbers = [2**53 + each for each in (1, 3, 8, 8, 13)]
    rows = [at(number, number, n=n) for number, n in enumerate(numbers)]
    assert measured("var_samp(n)", rows)[-1] == float(statistics.variance([n - 2**53 for n in numbers]))
    assert measured("var_pop(n)", rows)[-1] == float(statistics.pvariance([n - 2**53 for n in numbers]))


def test_c12_9_conditions_are_counted_and_combined() -> None:
    rows = [at(0, 0, n=1), at(1, 1, n=None), at(2, 2, n=-1)]
    assert measured("count_if(n > 0)", rows) == [1, 1, 1]
    assert measured("every(n > 0)", rows) == [True, True, False]
    assert measured("any(n > 0) filter (where n < 9)", rows) == [True, True, True]
    assert measured("some(n > 5)", rows[1:2]) == [None]
    # The filter guards what is counted.
    assert measured("count_if(1 / n > 0) filter (where n <> 0)", [at(0, 0, n=0), at(1, 1, n=2)]) == [0, 1]


def test_c12_9_a_set_is_searched_by_the_condition_and_shown_in_the_message() -> None:
    rule = {
        "rule_id": "r",
        "stream": "s",
        "group_by": [],
        "window": "10 seconds",
        "measures": {"seen": "collect_set(k)"},
        "when": "array_contains(seen, 'b') and size(seen) = 2",
        "message": "{seen}",
    }
    rows = [at(0, 0, k="b"), at(1, 1, k="a"), at(2, 2, k=None), at(3, 3, k="c")]
    alerts = lookback.replay([rule], rows, STREAM).alerts
    assert [(alert.event_id, alert.message, alert.measures["seen"]) for alert in alerts] == [
        ("1", "[a, b]", ["a", "b"]),
        ("2", "[a, b]", ["a", "b"]),
    ]


def test_c12_9_the_value_of_the_largest_and_smallest_rank() -> None:
    rows = [
        at(0, 0, k="a", n=None), at(1, 1, k="b", n=3), at(2, 2, k=None, n=5), at(3, 3, k="d", n=5), at(4, 4, k="c\0", n=5), at(5, 5, k="x", n=-7),
    ]  # fmt: skip
    assert measured("max_by(k, n)", rows) == [None, "b", None, "d", "d", "d"]
    assert measured("min_by(k, n)", rows) == [None, "b", "b", "b", "b", "x"]
    assert measured("max_by(n, k) filter (where k < 'd')", rows) == [None, 3, 3, 3, 5, 5]
    assert measured("max_by(n > 0, k || 'x')", rows)[-1] is False
    with pytest.raises(
        lookback.RuleError, match=r"max_by\(\) takes a value and what ranks it, such as max_by\(merchant"
    ):
        measured("max_by(k)", rows)
    with pytest.raises(lookback.RuleError, match=r"function ranked\(\) is not allowed"):
        measured("max(ranked(k, n))", rows)


VALUES: dict[str, list[Any]] = {
    "double": [-math.inf, -1.5, -5e-324, 0.0, 5e-324, 2.0, math.inf, math.nan],
    "bigint": [-(2**63), -1, 0, 1, 2**63 - 1],
    "decimal(38,0)": [-(10**38) + 1, 0, 10**38 - 1],
    "boolean": [False, True],
    "string": ["", "\0", "\0a", "\1", "a", "a\0", "a\0\0", "a\0\1", "ab", "\uffff", "\U00010000"],
}


@pytest.mark.parametrize("name", VALUES)
def test_texts_sort_like_the_values_and_give_them_back(name: str) -> None:
    type_, values = parse_type(name), [None, *VALUES[name]]
    texts = [write_sortable(value) for value in values]
    for tail in ("", "x", "\0", write_sortable("a")):
        assert sorted(texts) == texts
        assert sorted(text + tail for text in texts) == [text + tail for text in texts]
    read = [read_sortable(text + "\0x", 0, type_) for text in texts]
    assert [end for _, end in read] == list(map(len, texts))
    assert repr([value for value, _ in read]) == repr(values)
    assert write_sortable(-0.0) == write_sortable(0.0)


@pytest.mark.parametrize("function", ["median", "percentile(0.9)", "mode", "collect_set"])
@pytest.mark.parametrize("on_grid", [False, True])
def test_windows_in_any_order_equal_those_that_are_gathered_one_by_one(function: str, on_grid: bool) -> None:
    chance = random.Random(4)
    aggregate = find_aggregate(function)
    assert isinstance(aggregate, GatheredAggregate)
    for _ in range(60):
        count, groups = chance.randrange(1, 30), chance.randrange(1, 4)
        rows = sorted((chance.randrange(groups), chance.randrange(12), number) for number in range(count))
        stored = [chance.random() < 0.3 for _ in rows]
        values = [chance.randrange(5) for _ in rows]
        grouped = GroupedRows(
            np.array([group for group, _, _ in rows]),
            np.array([time for _, time, _ in rows]),
            np.array(values),
            np.array([STORED if old else number for (_, _, number), old in zip(rows, stored, strict=True)]),
        )
        windows = []
        for _ in range(40):
            last = chance.randrange(12)
            group, position = chance.randrange(groups), chance.randrange(-1, count)
            windows += [(group, position, last - size, last) for size in ((3, 5) if on_grid else (4,))]
        columns = [np.array(column) for column in zip(*windows, strict=True)]
        found: Column = aggregate.finish(aggregate.aggregate_windows(grouped, *columns), BIGINT)
        for number, (group, position, first, last) in enumerate(windows):
            inside = [
                value
                for (g, time, _), arrived, value in zip(rows, grouped.positions.tolist(), values, strict=True)
                if g == group and first <= time <= last and arrived <= position
            ]
            assert found.item(number) == over(function, inside), (rows, windows[number])

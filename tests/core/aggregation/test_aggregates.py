"""Aggregates at the limits of their types, beyond what generated cases reach."""

from __future__ import annotations

import statistics
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from lookback.core.aggregation.aggregates import AGGREGATES
from lookback.core.values.columns import Column, from_values
from lookback.core.values.types import BIGINT, DOUBLE, INT, STRING, DataType, decimal


def over(name: str, values: list[Any], type_: DataType, low: list[int], high: list[int]) -> Column:
    aggregate = AGGREGATES[name]
    index = aggregate.build_index(from_values(type_, values).values)
    partial = aggregate.aggregate_ranges(index, np.array(low), np.array(high))
    return aggregate.finish(partial, type_)


def test_c4_sum_of_bigint_beyond_64_bits_is_an_error_of_that_window_alone() -> None:
    column = over("sum", [2**63 - 1, 1, -1], BIGINT, [0, 0, 1], [2, 3, 3])
    assert column.error is not None
    assert column.error.tolist() == [True, False, False]
    assert column.to_list() == [None, 2**63 - 1, 0]


def test_c4_sum_of_decimals_is_exact_to_38_digits() -> None:
    column = over("sum", [10**37, 1, 9 * 10**37], decimal(38, 2), [0, 0], [2, 3])
    assert column.item(0) == Decimal("100000000000000000000000000000000000.01")
    assert column.error is not None
    assert column.error.tolist() == [False, True]


@pytest.mark.parametrize(
    ("cents", "mean"), [([1, 2], "0.015000"), ([1, 1, 2], "0.013333"), ([-1, -1, -3], "-0.016667")]
)
def test_c4_avg_of_decimal_18_2_is_decimal_22_6_rounded_half_up(cents: list[int], mean: str) -> None:
    column = over("avg", cents, decimal(18, 2), [0], [len(cents)])
    assert column.type == decimal(22, 6)
    assert column.item(0) == Decimal(mean)


def test_c4_avg_of_integers_is_the_nearest_double() -> None:
    assert over("avg", [2**62, 2**62, 1], BIGINT, [0], [3]).item(0) == (2**63 + 1) / 3


def test_c4_stddev_samp_is_rounded_once_and_null_below_two_rows() -> None:
    values = [3, 7, 7, 19, 2**31 - 1]
    column = over("stddev_samp", values, INT, [0, 0, 0], [1, 2, 5])
    assert column.type == DOUBLE
    assert column.to_list() == [None, statistics.stdev([3, 7]), statistics.stdev(values)]


@pytest.mark.parametrize("largest", [3, 10**4, 10**6, 2**31 - 1, 10**11, 2**62])
@pytest.mark.parametrize("scale", [0, 2, 9, 18])
@pytest.mark.parametrize("shift", [0, 1])
def test_c4_stddev_samp_is_the_nearest_double_whatever_the_size_of_the_values(
    largest: int, scale: int, shift: int
) -> None:
    """shift 1: values that lie close together far from 0, where sums of squares cancel."""
    chance = np.random.default_rng(largest % 1_000 + scale)
    values = chance.integers(-largest, largest, 400) if not shift else largest + chance.integers(-3, 4, 400)
    low = chance.integers(0, 400, 500)
    high = np.minimum(400, low + chance.integers(0, 12, 500) ** 2)
    column = over("stddev_samp", values.tolist(), decimal(18, scale), low.tolist(), high.tolist())
    for row, (a, b) in enumerate(zip(low.tolist(), high.tolist(), strict=True)):
        exact = [Fraction(value, 10**scale) for value in values[a:b].tolist()]
        assert column.item(row) == (nearest_root(statistics.variance(exact)) if b - a > 1 else None)


def nearest_root(value: Fraction) -> float:
    with localcontext() as context:
        context.prec = 120
        return float((Decimal(value.numerator) / Decimal(value.denominator)).sqrt())


@pytest.mark.parametrize("count", [1, 31, 32, 33, 64, 200, 1000])
def test_extremes_of_every_range_are_those_of_the_rows(count: int) -> None:
    chance = np.random.default_rng(count)
    values = chance.integers(-1000, 1000, count)
    low = chance.integers(0, count, 300)
    high = np.minimum(count, low + chance.integers(0, count + 1, 300))
    for name, pick in (("min", min), ("max", max)):
        column = over(name, values.tolist(), INT, low.tolist(), high.tolist())
        expected = [pick(values[a:b].tolist()) if b > a else None for a, b in zip(low, high, strict=True)]
        assert column.to_list() == expected


def test_nan_is_the_greatest_double() -> None:
    nan = float("nan")
    assert over("min", [nan, 1.0], DOUBLE, [0], [2]).item(0) == 1.0
    assert np.isnan(over("max", [nan, 1.0], DOUBLE, [0], [2]).item(0))


def test_strings_have_an_order() -> None:
    assert over("max", ["z", "é", "a"], STRING, [0, 2], [3, 3]).to_list() == ["é", "a"]

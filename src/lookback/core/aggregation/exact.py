"""Exact arithmetic by column: sums of any size, quotients rounded half up, and roots rounded once."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from lookback.core.values.columns import Column, Values
from lookback.core.values.types import DataType

Int64s = npt.NDArray[np.int64]
# What one run contributes to each window: arrays of shape (windows,), which `merge` combines with those of other runs.
Partial = tuple[Values, ...]
# If every run's sum is below this, the sum of up to 128 runs fits in 64 bits.
SMALL_SUM = 2**55
# The bound on the relative error of an estimated deviation where a long double has at least 64 bits, as on Linux: there
# are five roundings, and the square root halves the error of four.
MAX_ERROR = np.longdouble(2) ** -61 if np.finfo(np.longdouble).nmant >= 63 else np.longdouble(np.nan)


def index_sums(parts: Partial) -> Partial:
    """Builds the index for `sum_ranges` over the contributions of rows to an additive aggregate."""
    return tuple(prefix_sums(part) for part in parts)


def sum_ranges(index: Partial, low: Int64s, high: Int64s) -> Partial:
    """Adds the contributions of the indexed rows [low, high) of each window."""
    return tuple(prefix[high] - prefix[low] for prefix in index)


def exact_squares(index: Any) -> Values:
    """Returns the exact prefix sums of squares of an index of Variance, computed when first needed."""
    values, exact = index[3:]
    if not exact:
        exact.append(prefix_sums(values.astype(object) ** 2))
    sums: Values = exact[0]
    return sums


def prefix_sums(values: Values) -> Values:
    """Returns the sums of the first n values for each n; as Python ints if they may not fit in 64 bits."""
    if values.dtype == np.dtype(object) or (
        len(values) and max(abs(int(values.max())), abs(int(values.min()))) * len(values) >= SMALL_SUM
    ):
        sums: Values = np.zeros(len(values) + 1, dtype=object)
        np.cumsum(values.astype(object), out=sums[1:])
        return sums
    sums = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=sums[1:])
    return sums


def multiply(values: Values, factor: int) -> Values:
    """Multiplies integers; as Python ints if products may not fit in 64 bits."""
    if values.dtype != np.dtype(object) and len(values) and int(np.abs(values).max()) * factor >= 2**61:
        values = values.astype(object)
    product: Values = values * factor
    return product


def divide_half_up(values: Values, divisor: Int64s) -> Values:
    """Divides integers by positive ones, and rounds halves away from zero."""
    magnitude = (2 * abs(values) + divisor) // (2 * divisor)
    quotient: Values = np.where(values < 0, -magnitude, magnitude)
    return quotient


def checked_column(type_: DataType, values: Values, empty: npt.NDArray[np.bool_]) -> Column:
    """Makes a column of `values`, with NULL where `empty` and an error where a value is out of the type's range."""
    error = None
    limit = 10**type_.precision - 1 if type_.is_decimal else 2**63 - 1
    if values.dtype == np.dtype(object) or (type_.is_decimal and type_.precision <= 18):
        beyond = np.asarray((values > limit) | (values < (-limit if type_.is_decimal else -limit - 1)), dtype=bool)
        if beyond.any():
            error = beyond
            values = np.where(beyond, 0, values)
    # Wide decimals stay int64 where they fit: Python's integers are ten times slower.
    storage = values.dtype if type_.is_decimal and values.dtype == np.int64 else type_.storage
    return Column(type_, values.astype(storage, copy=False), empty if empty.any() else None, error)


def estimate_variances(partial: Partial) -> npt.NDArray[np.longdouble]:
    """Estimates the sample variance of integers from their count, sum and sum of squares; NaN where they are too large.

    To avoid cancellation, it first converts the sums into those of the distances from the integer nearest to the mean.
    Arithmetic modulo 2^64 is exact here because these sums cannot exceed the sums of squares.
    """
    is_known = np.asarray(abs(partial[2]) < 2**61, dtype=bool) & (partial[0] > 1)
    n, total, squares = (np.where(is_known, part, 2).astype(np.int64) for part in partial)
    center = (2 * total + n) // (2 * n)
    rest = total - n * center
    around = squares - 2 * center * total + n * center * center
    wide = np.asarray(around, dtype=np.longdouble)
    within = np.asarray(rest * rest, dtype=np.longdouble) / n
    numerator = np.asarray(n * around - rest * rest, dtype=np.longdouble) / n
    sums = np.where(n * around.astype(np.float64) < 2**62, numerator, wide - within)
    return np.where(is_known, sums / (n - 1), np.nan)


def find_nearest_root(value: Fraction) -> float:
    """Returns the double nearest to the square root of a rational number, which must not be negative."""
    if value == 0:
        return 0.0
    # 64 bits of root with a sticky last bit round to the 53 bits of a double as the exact root does.
    shift = max(0, 130 - (value.numerator.bit_length() - value.denominator.bit_length()))
    shift += shift % 2
    scaled = (value.numerator << shift) // value.denominator
    root = math.isqrt(scaled)
    exact = root * root == scaled and scaled * value.denominator == value.numerator << shift
    return float(Fraction(2 * root + (not exact), 2 ** (shift // 2 + 1)))

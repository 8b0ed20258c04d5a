"""The aggregates that measures can use: small classes, and one table that names them.

The types that an aggregate accepts are checked when a measure is compiled: `AGGREGATE_ARGUMENTS` in
expressions/functions.py.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from lookback.core.aggregation.aggregate import Aggregate
from lookback.core.aggregation.edges import Edge
from lookback.core.aggregation.exact import (
    MAX_ERROR,
    SMALL_SUM,
    Int64s,
    Partial,
    checked_column,
    divide_half_up,
    estimate_variances,
    exact_squares,
    find_nearest_root,
    multiply,
    prefix_sums,
)
from lookback.core.aggregation.gathered import CollectSet, Mode, Percentile
from lookback.core.values.columns import Column, Values, from_values, normalize_zeros
from lookback.core.values.sortable import read_sortable
from lookback.core.values.types import BIGINT, DOUBLE, DataType, decimal, parse_type

# Returns the smaller or the larger of each pair of values.
_Pick = Callable[[Values, Values], Values]


class Count(Aggregate):
    """The number of rows, for count(*) and count(x); the caller leaves out rows where x is NULL."""

    stores_value = False
    additive = True

    def result_type(self, argument: DataType | None) -> DataType:
        """Returns bigint."""
        return BIGINT

    def build_index(self, values: Values) -> Any:
        """Returns None: counting needs no index."""
        return None

    def subtract_rows(self, index: Any, high: Int64s, without: Any, low: Int64s) -> Partial:
        """Counts the remaining rows."""
        return (high - low,)

    def merge(self, left: Partial, right: Partial) -> Partial:
        """Adds the counts."""
        return (left[0] + right[0],)

    def finish(self, partial: Partial, argument: DataType | None) -> Column:
        """Returns the counts, 0 for an empty window."""
        return Column(BIGINT, partial[0])


class CountDistinct(Count):
    """The number of distinct values, for which `distinct` counts the rows; NULLs are left out."""

    stores_value = True
    additive = False


class Sum(Aggregate):
    """The exact sum of integers or decimals, from prefix sums."""

    additive = True

    def result_type(self, argument: DataType | None) -> DataType:
        """Returns bigint for integers, decimal(min(38, p + 10), s) for decimal(p, s)."""
        assert argument is not None
        return decimal(min(38, argument.precision + 10), argument.scale) if argument.is_decimal else BIGINT

    def build_index(self, values: Values) -> Any:
        """Returns the prefix sums, one longer than the values."""
        return prefix_sums(values)

    def subtract_rows(self, index: Any, high: Int64s, without: Any, low: Int64s) -> Partial:
        """Returns the count and sum of the remaining rows."""
        return (high - low, index[high] - without[low])

    def merge(self, left: Partial, right: Partial) -> Partial:
        """Adds the counts and sums."""
        return tuple(a + b for a, b in zip(left, right, strict=True))

    def finish(self, partial: Partial, argument: DataType | None) -> Column:
        """Returns the sums: NULL for an empty window, an error where a sum does not fit."""
        result = self.result_type(argument)
        count, total = partial
        return checked_column(result, total, count == 0)


class Avg(Sum):
    """The exact average: decimal(p + 4, s + 4) for decimals, rounded half up; the nearest double for integers."""

    def result_type(self, argument: DataType | None) -> DataType:
        """Returns double for integers, decimal(min(38, p + 4), min(38, s + 4)) for decimal(p, s)."""
        assert argument is not None
        if not argument.is_decimal:
            return DOUBLE
        return decimal(min(38, argument.precision + 4), min(38, argument.scale + 4))

    def finish(self, partial: Partial, argument: DataType | None) -> Column:
        """Returns the averages, NULL for an empty window."""
        assert argument is not None
        count, total = partial
        empty = count == 0
        divisor = np.where(empty, 1, count)
        result = self.result_type(argument)
        if not result.is_decimal:
            # Python divides integers of any size with a single rounding.
            means = [int(t) / int(n) for t, n in zip(total.tolist(), divisor.tolist(), strict=True)]
            return Column(result, np.array(means, dtype=np.float64), empty if empty.any() else None)
        shifted = multiply(total, 10 ** (result.scale - argument.scale))
        return checked_column(result, divide_half_up(shifted, divisor), empty)


class Variance(Sum):
    """The variance from exact sums, or its square root, rounded once to the nearest double.

    That of a sample of n rows has the divisor n - 1 and is NULL below two rows; that of the population has n.
    """

    def __init__(self, *, is_sample: bool, is_root: bool) -> None:
        self._is_sample, self._is_root = is_sample, is_root

    def result_type(self, argument: DataType | None) -> DataType:
        """Returns double."""
        return DOUBLE

    def build_index(self, values: Values) -> Any:
        """Returns the prefix sums of the values, and of their squares in three forms, of which the last is lazy.

        Prefix sums of squares soon exceed 64 bits even though the sum over one window does not. So they are kept modulo
        2^64, as doubles, which show for which windows that is enough, and as Python ints for the other windows.
        """
        squares, rough = np.zeros(len(values) + 1, dtype=np.int64), np.zeros(len(values) + 1, dtype=np.float64)
        if values.dtype == np.dtype(object):
            rough[1:] = np.inf
        else:
            whole = values.astype(np.int64)
            np.cumsum(whole * whole, out=squares[1:])
            np.cumsum(np.square(values, dtype=np.float64), out=rough[1:])
        return prefix_sums(values), squares, rough, values, []

    def subtract_rows(self, index: Any, high: Int64s, without: Any, low: Int64s) -> Partial:
        """Returns the count, sum and sum of squares of the remaining rows."""
        (sums, modulo, rough, _, _), (sums_without, modulo_without, rough_without, _, _) = index, without
        squares = modulo[high] - modulo_without[low]
        # The error of each double is less than 2^-20 of the last one.
        with np.errstate(invalid="ignore"):
            fits = rough[high] - rough_without[low] + rough[-1] / 2**20 < SMALL_SUM
        if not fits.all():
            squares = exact_squares(index)[high] - exact_squares(without)[low]
        return high - low, sums[high] - sums_without[low], squares

    def finish(self, partial: Partial, argument: DataType | None) -> Column:
        """Returns (n * sum(x^2) - sum(x)^2) / (n * divisor), at the argument's scale, or its square root."""
        assert argument is not None
        unit, counts = 10 ** (2 * argument.scale), partial[0]
        few = counts < (2 if self._is_sample else 1)
        estimates = estimate_variances(partial) / np.longdouble(unit)
        if not self._is_sample:
            estimates *= np.asarray(counts - 1, dtype=np.longdouble) / np.maximum(counts, 1)
        if self._is_root:
            estimates = np.sqrt(estimates)
        # If both ends of the error interval round to the same double, that is the exact value rounded once.
        values = np.asarray(estimates * (1 - MAX_ERROR), dtype=np.float64)
        is_open = (counts > 1) & (values != np.asarray(estimates * (1 + MAX_ERROR), dtype=np.float64))
        values[counts < 2] = 0
        for row in np.flatnonzero(is_open).tolist():
            n, total, squares = (int(part[row]) for part in partial)
            variance = Fraction(n * squares - total * total, n * (n - self._is_sample) * unit)
            values[row] = find_nearest_root(variance) if self._is_root else float(variance)
        return Column(DOUBLE, values, few if few.any() else None)


class _Extreme(Aggregate):
    """The smallest or largest value, from prefix and suffix extremes of blocks and a sparse table over the blocks."""

    _BLOCK = 32

    def __init__(self, pick: _Pick) -> None:
        self._pick = pick

    def result_type(self, argument: DataType | None) -> DataType:
        """Returns the argument's type."""
        assert argument is not None
        return argument

    def build_index(self, values: Values) -> Any:
        """Returns the values in blocks of 32, each row's extremes to both ends of its block, and a sparse table."""
        count, block = len(values), self._BLOCK
        if count == 0:
            return values, values, values, []
        blocks = -(-count // block)
        padded = np.empty(blocks * block, dtype=values.dtype)
        padded[:count], padded[count:] = values, values[-1]
        grid = padded.reshape(blocks, block)
        prefix, suffix = grid.copy(), grid.copy()
        for at in range(1, block):
            prefix[:, at] = self._pick(prefix[:, at - 1], prefix[:, at])
            suffix[:, block - 1 - at] = self._pick(suffix[:, block - at], suffix[:, block - 1 - at])
        table = [suffix[:, 0]]
        while len(table[-1]) > 2 ** (len(table) - 1):
            step = 2 ** (len(table) - 1)
            table.append(self._pick(table[-1][:-step], table[-1][step:]))
        return padded, prefix.ravel(), suffix.ravel(), table

    def aggregate_ranges(self, index: Any, low: Int64s, high: Int64s) -> Partial:
        """Returns the count and extreme of each range; the extreme of an empty range is undefined."""
        padded, prefix, suffix, table = index
        count = high - low
        best = np.zeros(len(low), dtype=padded.dtype)
        if len(padded) == 0:
            return count, best
        first, last = low // self._BLOCK, (high - 1) // self._BLOCK
        wide = np.flatnonzero((count > 0) & (first < last))
        best[wide] = self._pick(suffix[low[wide]], prefix[high[wide] - 1])
        between = last[wide] - first[wide] - 1
        for level, extremes in enumerate(table):
            at = (between >= 2**level) & (between < 2 ** (level + 1))
            rows = wide[at]
            ends = self._pick(extremes[first[rows] + 1], extremes[last[rows] - 2**level])
            best[rows] = self._pick(best[rows], ends)
        narrow = np.flatnonzero((count > 0) & (first == last))
        best[narrow] = padded[low[narrow]]
        for step in range(1, int(count[narrow].max()) if len(narrow) else 0):
            narrow = narrow[count[narrow] > step]
            best[narrow] = self._pick(best[narrow], padded[low[narrow] + step])
        return count, best

    def merge(self, left: Partial, right: Partial) -> Partial:
        """Adds the counts and picks the extreme of each pair; where only one side has rows, its extreme."""
        if len(left[1]) == 0:
            return left
        both = np.flatnonzero((left[0] > 0) & (right[0] > 0))
        best = np.where(left[0] > 0, left[1], right[1])
        best[both] = self._pick(left[1][both], right[1][both])
        return left[0] + right[0], best

    def finish(self, partial: Partial, argument: DataType | None) -> Column:
        """Returns the extremes: NULL for an empty window, 0.0 for -0.0, which is equal to it in SQL."""
        empty = partial[0] == 0
        # An argument such as -d yields -0.0. Which of the two zeros is picked would depend on the order of the rows.
        return normalize_zeros(Column(self.result_type(argument), partial[1], empty if empty.any() else None))


def _pick_smaller(left: Values, right: Values) -> Values:
    """Returns the smaller of each pair; NaN is the greatest double, as in Spark and for `np.maximum`."""
    smaller: Values = np.fmin(left, right) if left.dtype.kind == "f" else np.minimum(left, right)
    return smaller


class _Ranked(_Extreme):
    """The value beside the largest or smallest rank, from the texts of `make_ranked`; its type is given.

    Of equal ranks, the largest or smallest value counts, so that the order of rows does not matter.
    """

    def __init__(self, pick: _Pick, type_: DataType) -> None:
        super().__init__(pick)
        self._type = type_

    def result_type(self, argument: DataType | None) -> DataType:
        """Returns the value's type."""
        return self._type

    def finish(self, partial: Partial, argument: DataType | None) -> Column:
        """Returns the values: NULL for an empty window and for a value that is NULL."""
        values = []
        for rows, text in zip(partial[0].tolist(), partial[1].tolist(), strict=True):
            # The rank comes first.
            _, begin = read_sortable(text, 0, self._type) if rows else (None, 0)
            values.append(read_sortable(text, begin, self._type)[0] if rows else None)
        return from_values(self._type, values)


AGGREGATES: dict[str, Aggregate] = {
    "count": Count(),
    "count_distinct": CountDistinct(),
    "sum": Sum(),
    "avg": Avg(),
    "min": _Extreme(_pick_smaller),
    "max": _Extreme(np.maximum),
    "first": Edge(is_last=False),
    "last": Edge(is_last=True),
    "stddev_samp": Variance(is_sample=True, is_root=True),
    "stddev_pop": Variance(is_sample=False, is_root=True),
    "var_samp": Variance(is_sample=True, is_root=False),
    "var_pop": Variance(is_sample=False, is_root=False),
    "median": Percentile(0.5),
    "mode": Mode(),
    "collect_set": CollectSet(),
}
# The aggregate that a function names with a number, such as percentile(0.9), and those with the type of the value.
PERCENTILE = "percentile"
RANKING: dict[str, _Pick] = {"max_by": np.maximum, "min_by": _pick_smaller}


@lru_cache(maxsize=1_000)
def find_aggregate(function: str) -> Aggregate:
    """Returns the aggregate of a feature's function: a name in AGGREGATES, percentile(p), or max_by(type)."""
    name, _, rest = function.partition("(")
    if name in RANKING:
        return _Ranked(RANKING[name], parse_type(rest[:-1]))
    return Percentile(float(rest[:-1])) if name == PERCENTILE else AGGREGATES[name]

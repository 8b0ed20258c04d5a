"""The aggregates that measures can use: one small class each, and one table that names them.

An aggregate answers for ranges of rows that are sorted by (key, time). It builds an index over the rows once, reads
any number of ranges from it, merges what several sorted runs say about one window, and finishes with a column of
Spark's type. All arithmetic is exact; a result that does not fit its type is an error of that row.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from lookback.core.values.columns import Column, Values, normalize_zeros
from lookback.core.values.types import BIGINT, DOUBLE, DataType, decimal

Int64s = npt.NDArray[np.int64]
# What one run of rows says about the windows asked for: arrays of shape (windows,), merged with `merge`.
Partial = tuple[Values, ...]
# A sum within this bound in every run stays within 64 bits when up to 128 runs are merged.
_SMALL_SUM = 2**55


class Aggregate(ABC):
    """One aggregate function.

    stores_value: whether its argument's values are kept in state. additive: whether what rows contribute is a sum over
    them, so that rows can stand together as one (see `sums` and `sums_between`), and one of them be subtracted again.
    """

    stores_value = True
    additive = False

    @abstractmethod
    def result_type(self, argument: DataType | None) -> DataType:
        """The type that Spark gives the result; `argument` is None for count(*)."""

    @abstractmethod
    def index(self, values: Values) -> Any:
        """An index over the values of rows sorted by (key, time), for `ranges`."""

    @abstractmethod
    def ranges(self, index: Any, low: Int64s, high: Int64s) -> Partial:
        """What the rows [low, high) of the indexed rows contribute, window by window; low == high is empty."""

    @abstractmethod
    def merge(self, left: Partial, right: Partial) -> Partial:
        """The contribution of two disjoint sets of rows."""

    @abstractmethod
    def finish(self, partial: Partial, argument: DataType | None) -> Column:
        """The results: of `result_type`, NULL where SQL says so, an error where the value does not fit."""


class Count(Aggregate):
    """Number of rows: count(*), or count(x) where rows with NULL were left out before."""

    stores_value = False
    additive = True

    def result_type(self, argument: DataType | None) -> DataType:
        """Always bigint."""
        return BIGINT

    def index(self, values: Values) -> Any:
        """Nothing is needed."""
        return None

    def ranges(self, index: Any, low: Int64s, high: Int64s) -> Partial:
        """The rows of each range."""
        return (high - low,)

    def merge(self, left: Partial, right: Partial) -> Partial:
        """Counts add up."""
        return (left[0] + right[0],)

    def finish(self, partial: Partial, argument: DataType | None) -> Column:
        """0 for an empty window."""
        return Column(BIGINT, partial[0])


class CountDistinct(Aggregate):
    """Number of different values; NULLs are not counted, NaN is one value, as in Spark."""

    def result_type(self, argument: DataType | None) -> DataType:
        """Always bigint."""
        return BIGINT

    def index(self, values: Values) -> Any:
        """The values as Python has them, NaN as None since it does not equal itself."""
        return [None if value != value else value for value in values.tolist()]

    def ranges(self, index: Any, low: Int64s, high: Int64s) -> Partial:
        """The set of values of each range."""
        return (_objects([frozenset(index[a:b]) for a, b in zip(low.tolist(), high.tolist(), strict=True)]),)

    def merge(self, left: Partial, right: Partial) -> Partial:
        """The union; 0 stands for a window that was not asked for."""
        pairs = zip(left[0].tolist(), right[0].tolist(), strict=True)
        return (_objects([(a or frozenset()) | b if b else a for a, b in pairs]),)

    def finish(self, partial: Partial, argument: DataType | None) -> Column:
        """0 for an empty window."""
        return Column(BIGINT, np.array([len(values or ()) for values in partial[0]], dtype=np.int64))


class Sum(Aggregate):
    """Exact sum of integers or decimals, from prefix sums."""

    additive = True

    def result_type(self, argument: DataType | None) -> DataType:
        """Bigint for integers, decimal(min(38, p + 10), s) for decimal(p, s)."""
        assert argument is not None
        return decimal(min(38, argument.precision + 10), argument.scale) if argument.is_decimal else BIGINT

    def index(self, values: Values) -> Any:
        """Prefix sums, one longer than the values."""
        return _prefix_sums(values)

    def ranges(self, index: Any, low: Int64s, high: Int64s) -> Partial:
        """Count and sum of each range."""
        return (high - low, index[high] - index[low])

    def merge(self, left: Partial, right: Partial) -> Partial:
        """Counts and sums add up."""
        return tuple(a + b for a, b in zip(left, right, strict=True))

    def finish(self, partial: Partial, argument: DataType | None) -> Column:
        """NULL for an empty window; an error where the sum does not fit."""
        result = self.result_type(argument)
        count, total = partial
        return _fitted(result, total, count == 0)


class Avg(Sum):
    """Exact average: decimal(p + 4, s + 4) for decimals, rounded half up; the nearest double for integers."""

    def result_type(self, argument: DataType | None) -> DataType:
        """Spark's: double for integers, decimal(min(38, p + 4), min(38, s + 4)) for decimal(p, s)."""
        assert argument is not None
        if not argument.is_decimal:
            return DOUBLE
        return decimal(min(38, argument.precision + 4), min(38, argument.scale + 4))

    def finish(self, partial: Partial, argument: DataType | None) -> Column:
        """NULL for an empty window."""
        assert argument is not None
        count, total = partial
        empty = count == 0
        divisor = np.where(empty, 1, count)
        result = self.result_type(argument)
        if not result.is_decimal:
            # Python divides integers with a single rounding, at any size.
            means = [int(t) / int(n) for t, n in zip(total.tolist(), divisor.tolist(), strict=True)]
            return Column(result, np.array(means, dtype=np.float64), empty if empty.any() else None)
        shifted = _times(total, 10 ** (result.scale - argument.scale))
        return _fitted(result, _divide_half_up(shifted, divisor), empty)


class StddevSamp(Sum):
    """Sample standard deviation from exact sums, rounded once to the nearest double; NULL below two rows."""

    def result_type(self, argument: DataType | None) -> DataType:
        """Always double."""
        return DOUBLE

    def index(self, values: Values) -> Any:
        """Prefix sums of the values and of their squares, as Python ints."""
        exact = values.astype(object)
        return _prefix_sums(exact), _prefix_sums(exact * exact)

    def ranges(self, index: Any, low: Int64s, high: Int64s) -> Partial:
        """Count, sum and sum of squares of each range."""
        return (high - low, index[0][high] - index[0][low], index[1][high] - index[1][low])

    def finish(self, partial: Partial, argument: DataType | None) -> Column:
        """The square root of (n * sum(x^2) - sum(x)^2) / (n * (n - 1)), at the argument's scale."""
        assert argument is not None
        unit = 10 ** (2 * argument.scale)
        values = np.zeros(len(partial[0]), dtype=np.float64)
        for row, (n, total, squares) in enumerate(zip(*(part.tolist() for part in partial), strict=True)):
            if n > 1:
                values[row] = _sqrt(Fraction(n * squares - total * total, n * (n - 1) * unit))
        few = partial[0] < 2
        return Column(DOUBLE, values, few if few.any() else None)


class _Extreme(Aggregate):
    """Smallest or largest value, from block-wise prefix and suffix extremes and a sparse table over the blocks."""

    _BLOCK = 32

    def result_type(self, argument: DataType | None) -> DataType:
        """The argument's own type."""
        assert argument is not None
        return argument

    @abstractmethod
    def better(self, left: Values, right: Values) -> Values:
        """The extreme of each pair."""

    def index(self, values: Values) -> Any:
        """Values in blocks of 32; per row the extreme from its block's start and to its block's end; a sparse table."""
        count, block = len(values), self._BLOCK
        if count == 0:
            return values, values, values, []
        blocks = -(-count // block)
        padded = np.empty(blocks * block, dtype=values.dtype)
        padded[:count], padded[count:] = values, values[-1]
        grid = padded.reshape(blocks, block)
        prefix, suffix = grid.copy(), grid.copy()
        for at in range(1, block):
            prefix[:, at] = self.better(prefix[:, at - 1], prefix[:, at])
            suffix[:, block - 1 - at] = self.better(suffix[:, block - at], suffix[:, block - 1 - at])
        table = [suffix[:, 0]]
        while len(table[-1]) > 2 ** (len(table) - 1):
            step = 2 ** (len(table) - 1)
            table.append(self.better(table[-1][:-step], table[-1][step:]))
        return padded, prefix.ravel(), suffix.ravel(), table

    def ranges(self, index: Any, low: Int64s, high: Int64s) -> Partial:
        """Count and extreme of each range; the extreme of an empty range means nothing."""
        padded, prefix, suffix, table = index
        count = high - low
        best = np.zeros(len(low), dtype=padded.dtype)
        if len(padded) == 0:
            return count, best
        first, last = low // self._BLOCK, (high - 1) // self._BLOCK
        wide = np.flatnonzero((count > 0) & (first < last))
        best[wide] = self.better(suffix[low[wide]], prefix[high[wide] - 1])
        between = last[wide] - first[wide] - 1
        for level, extremes in enumerate(table):
            at = (between >= 2**level) & (between < 2 ** (level + 1))
            rows = wide[at]
            ends = self.better(extremes[first[rows] + 1], extremes[last[rows] - 2**level])
            best[rows] = self.better(best[rows], ends)
        narrow = np.flatnonzero((count > 0) & (first == last))
        best[narrow] = padded[low[narrow]]
        for step in range(1, int(count[narrow].max()) if len(narrow) else 0):
            narrow = narrow[count[narrow] > step]
            best[narrow] = self.better(best[narrow], padded[low[narrow] + step])
        return count, best

    def merge(self, left: Partial, right: Partial) -> Partial:
        """The better of both, where both have rows."""
        if len(left[1]) == 0:
            return left
        both = np.flatnonzero((left[0] > 0) & (right[0] > 0))
        best = np.where(left[0] > 0, left[1], right[1])
        best[both] = self.better(left[1][both], right[1][both])
        return left[0] + right[0], best

    def finish(self, partial: Partial, argument: DataType | None) -> Column:
        """NULL for an empty window; 0.0 for -0.0, which SQL takes for equal."""
        empty = partial[0] == 0
        # An argument such as -d makes -0.0, and which zero is better would depend on the order of the rows.
        return normalize_zeros(Column(self.result_type(argument), partial[1], empty if empty.any() else None))


class Min(_Extreme):
    """Smallest value; NaN is the greatest double, as in Spark."""

    def better(self, left: Values, right: Values) -> Values:
        """The smaller of each pair."""
        smaller: Values = np.fmin(left, right) if left.dtype.kind == "f" else np.minimum(left, right)
        return smaller


class Max(_Extreme):
    """Largest value; NaN is the greatest double, as in Spark."""

    def better(self, left: Values, right: Values) -> Values:
        """The larger of each pair."""
        larger: Values = np.maximum(left, right)
        return larger


AGGREGATES: dict[str, Aggregate] = {
    "count": Count(),
    "count_distinct": CountDistinct(),
    "sum": Sum(),
    "avg": Avg(),
    "min": Min(),
    "max": Max(),
    "stddev_samp": StddevSamp(),
}


def sums(parts: Partial) -> Partial:
    """An index over what rows of an additive aggregate contribute, for `sums_between`."""
    return tuple(_prefix_sums(part) for part in parts)


def sums_between(index: Partial, low: Int64s, high: Int64s) -> Partial:
    """What the rows [low, high) of the indexed rows contribute together."""
    return tuple(prefix[high] - prefix[low] for prefix in index)


def _objects(items: list[Any]) -> Values:
    objects: Values = np.empty(len(items), dtype=object)
    objects[:] = items
    return objects


def _prefix_sums(values: Values) -> Values:
    if values.dtype == np.dtype(object) or (
        len(values) and max(abs(int(values.max())), abs(int(values.min()))) * len(values) >= _SMALL_SUM
    ):
        sums: Values = np.zeros(len(values) + 1, dtype=object)
        np.cumsum(values.astype(object), out=sums[1:])
        return sums
    sums = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=sums[1:])
    return sums


def _times(values: Values, factor: int) -> Values:
    if values.dtype != np.dtype(object) and len(values) and int(np.abs(values).max()) * factor >= 2**61:
        values = values.astype(object)
    product: Values = values * factor
    return product


def _divide_half_up(values: Values, divisor: Int64s) -> Values:
    magnitude = (2 * abs(values) + divisor) // (2 * divisor)
    quotient: Values = np.where(values < 0, -magnitude, magnitude)
    return quotient


def _fitted(type_: DataType, values: Values, empty: npt.NDArray[np.bool_]) -> Column:
    """The column of `values`, with an error where a value is beyond the type's range."""
    error = None
    limit = 10**type_.precision - 1 if type_.is_decimal else 2**63 - 1
    if values.dtype == np.dtype(object) or (type_.is_decimal and type_.precision <= 18):
        beyond = np.asarray((values > limit) | (values < (-limit if type_.is_decimal else -limit - 1)), dtype=bool)
        if beyond.any():
            error = beyond
            values = np.where(beyond, 0, values)
    return Column(type_, values.astype(type_.storage), empty if empty.any() else None, error)


def _sqrt(value: Fraction) -> float:
    """The double nearest to the square root of a rational number that is not negative."""
    if value == 0:
        return 0.0
    # 64 bits of root with a sticky last bit round to the 53 of a double as the exact root does.
    shift = max(0, 130 - (value.numerator.bit_length() - value.denominator.bit_length()))
    shift += shift % 2
    scaled = (value.numerator << shift) // value.denominator
    root = math.isqrt(scaled)
    exact = root * root == scaled and scaled * value.denominator == value.numerator << shift
    return float(Fraction(2 * root + (not exact), 2 ** (shift // 2 + 1)))

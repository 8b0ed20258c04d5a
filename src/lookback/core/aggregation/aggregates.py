"""The aggregates that measures can use: one small class each, and one table that names them.

An aggregate works on ranges of rows sorted by (key, time). It indexes the rows once, aggregates any number of ranges
with that index, merges the partial results that several sorted runs contribute to one window, and finishes with a
column of the type that Spark would return. All arithmetic is exact. A result that does not fit its type is an error of
that row.

The types that an aggregate accepts are checked when a measure is compiled: `AGGREGATE_ARGUMENTS` in
expressions/functions.py.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

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
from lookback.core.values.columns import Column, Values, from_values, make_objects, normalize_zeros
from lookback.core.values.types import BIGINT, DOUBLE, STRING, DataType, decimal


class Aggregate(ABC):
    """One aggregate function.

    Attributes:
        stores_value: State keeps the values of the argument.
        additive: The contribution of rows is a sum over them, so that rows can be combined into one (see `index_sums`
            and `sum_ranges`) and subtracted again.
        is_ordered: The result depends on the order of rows. Such an aggregate includes rows whose argument is NULL.
    """

    stores_value = True
    additive = False
    is_ordered = False

    @abstractmethod
    def result_type(self, argument: DataType | None) -> DataType:
        """Returns the type of the result, as in Spark; `argument` is None for count(*)."""

    @abstractmethod
    def build_index(self, values: Values) -> Any:
        """Builds the index for `aggregate_ranges` over the values of rows sorted by (key, time)."""

    def index_rows(self, values: Values, times: Int64s, arrivals: Int64s) -> Any:
        """Builds the same index for an aggregate that depends on the order of rows.

        Args:
            values: The values of rows sorted by (key, time, arrival).
            times: The times of the rows.
            arrivals: The positions of the rows in the batch; STORED for rows of earlier batches.
        """
        return self.build_index(values)

    @abstractmethod
    def aggregate_ranges(self, index: Any, low: Int64s, high: Int64s) -> Partial:
        """Aggregates the indexed rows [low, high) of each window; low == high is an empty window."""

    def subtract_rows(self, index: Any, high: Int64s, without: Any, low: Int64s) -> Partial:
        """Aggregates the first `high` rows of `index` except the first `low` of `without`, which must be among them.

        Only for additive aggregates. Both indexes hold the same rows, in different orders.
        """
        raise NotImplementedError(f"{type(self).__name__} is not additive")

    @abstractmethod
    def merge(self, left: Partial, right: Partial) -> Partial:
        """Merges the contributions of two disjoint sets of rows, window by window."""

    @abstractmethod
    def finish(self, partial: Partial, argument: DataType | None) -> Column:
        """Returns the results as a column of `result_type`: NULL as in SQL, an error where a result does not fit."""


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

    def aggregate_ranges(self, index: Any, low: Int64s, high: Int64s) -> Partial:
        """Counts the rows of each range."""
        return (high - low,)

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

    def aggregate_ranges(self, index: Any, low: Int64s, high: Int64s) -> Partial:
        """Returns the count and sum of each range."""
        return self.subtract_rows(index, high, index, low)

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


class StddevSamp(Sum):
    """The sample standard deviation from exact sums, rounded once to the nearest double; NULL below two rows."""

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

    def aggregate_ranges(self, index: Any, low: Int64s, high: Int64s) -> Partial:
        """Returns the count, sum and sum of squares of each range."""
        return self.subtract_rows(index, high, index, low)

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
        """Returns the square root of (n * sum(x^2) - sum(x)^2) / (n * (n - 1)), at the argument's scale."""
        assert argument is not None
        unit, few = 10 ** (2 * argument.scale), partial[0] < 2
        roots = np.sqrt(estimate_variances(partial) / np.longdouble(unit))
        # If both ends of the error interval round to the same double, that is the exact root rounded once.
        values = np.asarray(roots * (1 - MAX_ERROR), dtype=np.float64)
        is_open = ~few & (values != np.asarray(roots * (1 + MAX_ERROR), dtype=np.float64))
        values[few] = 0
        for row in np.flatnonzero(is_open).tolist():
            n, total, squares = (int(part[row]) for part in partial)
            values[row] = find_nearest_root(Fraction(n * squares - total * total, n * (n - 1) * unit))
        return Column(DOUBLE, values, few if few.any() else None)


class _Extreme(Aggregate):
    """The smallest or largest value, from prefix and suffix extremes of blocks and a sparse table over the blocks."""

    _BLOCK = 32

    def result_type(self, argument: DataType | None) -> DataType:
        """Returns the argument's type."""
        assert argument is not None
        return argument

    @abstractmethod
    def pick(self, left: Values, right: Values) -> Values:
        """Returns the extreme of each pair."""

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
            prefix[:, at] = self.pick(prefix[:, at - 1], prefix[:, at])
            suffix[:, block - 1 - at] = self.pick(suffix[:, block - at], suffix[:, block - 1 - at])
        table = [suffix[:, 0]]
        while len(table[-1]) > 2 ** (len(table) - 1):
            step = 2 ** (len(table) - 1)
            table.append(self.pick(table[-1][:-step], table[-1][step:]))
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
        best[wide] = self.pick(suffix[low[wide]], prefix[high[wide] - 1])
        between = last[wide] - first[wide] - 1
        for level, extremes in enumerate(table):
            at = (between >= 2**level) & (between < 2 ** (level + 1))
            rows = wide[at]
            ends = self.pick(extremes[first[rows] + 1], extremes[last[rows] - 2**level])
            best[rows] = self.pick(best[rows], ends)
        narrow = np.flatnonzero((count > 0) & (first == last))
        best[narrow] = padded[low[narrow]]
        for step in range(1, int(count[narrow].max()) if len(narrow) else 0):
            narrow = narrow[count[narrow] > step]
            best[narrow] = self.pick(best[narrow], padded[low[narrow] + step])
        return count, best

    def merge(self, left: Partial, right: Partial) -> Partial:
        """Adds the counts and picks the extreme of each pair; where only one side has rows, its extreme."""
        if len(left[1]) == 0:
            return left
        both = np.flatnonzero((left[0] > 0) & (right[0] > 0))
        best = np.where(left[0] > 0, left[1], right[1])
        best[both] = self.pick(left[1][both], right[1][both])
        return left[0] + right[0], best

    def finish(self, partial: Partial, argument: DataType | None) -> Column:
        """Returns the extremes: NULL for an empty window, 0.0 for -0.0, which is equal to it in SQL."""
        empty = partial[0] == 0
        # An argument such as -d yields -0.0. Which of the two zeros is picked would depend on the order of the rows.
        return normalize_zeros(Column(self.result_type(argument), partial[1], empty if empty.any() else None))


class Min(_Extreme):
    """The smallest value; NaN is the greatest double, as in Spark."""

    def pick(self, left: Values, right: Values) -> Values:
        """Returns the smaller of each pair."""
        smaller: Values = np.fmin(left, right) if left.dtype.kind == "f" else np.minimum(left, right)
        return smaller


class Max(_Extreme):
    """The largest value; NaN is the greatest double, as in Spark."""

    def pick(self, left: Values, right: Values) -> Values:
        """Returns the larger of each pair."""
        larger: Values = np.maximum(left, right)
        return larger


class Edge(Aggregate):
    """The value of the first or last row by (time, arrival), which may be NULL, as with Spark's first and last.

    Each value is kept as a text together with the id of its event, so that a deletion removes the row of its own event.
    Another row with the same time and value may have a different place in the order.
    """

    is_ordered = True

    def result_type(self, argument: DataType | None) -> DataType:
        """Returns the argument's type."""
        assert argument is not None
        return argument

    def pack(self, column: Column, ids: Sequence[str]) -> Column:
        """Returns the texts that are kept for the argument's values and the ids of their events."""
        rows = zip(column.to_stored_list(), ids, strict=True)
        texts = [
            f"{len(id_)}{'!' if value is None else '='}{id_}{'' if value is None else value}" for value, id_ in rows
        ]
        return Column(STRING, make_objects(texts), error=column.error)

    def build_index(self, values: Values) -> Any:
        """Returns the index of rows that all have the same time and arrived with the same commit."""
        zeros = np.zeros(len(values), dtype=np.int64)
        return self.index_rows(values, zeros, zeros)

    def index_rows(self, values: Values, times: Int64s, arrivals: Int64s) -> Any:
        """Returns the rows."""
        return times, arrivals, values

    @abstractmethod
    def find_row(self, low: Int64s, high: Int64s) -> Int64s:
        """Returns the position of the first or last of the rows [low, high)."""

    @abstractmethod
    def prefers_right(self, left: Partial, right: Partial) -> npt.NDArray[np.bool_]:
        """Marks the windows whose row is that of `right`, if both sides have one; on a tie, `right` arrived later."""

    @abstractmethod
    def find_running(self, times: Int64s) -> Int64s:
        """Returns for each row the position of the first or last row up to it; rows are in order of arrival."""

    def aggregate_ranges(self, index: Any, low: Int64s, high: Int64s) -> Partial:
        """Returns the count of each range and the time, arrival and value of its row, undefined for an empty range."""
        if not len(index[0]):
            return high - low, low.copy(), low.copy(), np.full(len(low), "", dtype=object)
        rows = np.where(high > low, self.find_row(low, high), 0)
        return high - low, *(part[rows] for part in index)

    def merge(self, left: Partial, right: Partial) -> Partial:
        """Adds the counts and picks the first or last row of each pair; where only one side has rows, its row."""
        takes_right = (right[0] > 0) & ((left[0] == 0) | self.prefers_right(left, right))
        picked = (np.where(takes_right, b, a) for a, b in zip(left[1:], right[1:], strict=True))
        return left[0] + right[0], *picked

    def finish(self, partial: Partial, argument: DataType | None) -> Column:
        """Returns the values: NULL for an empty window and for a row whose value is NULL."""
        assert argument is not None
        count, _, _, packed = partial
        read = _READERS.get(argument.name, int)
        values = []
        for rows, text in zip(count.tolist(), packed.tolist(), strict=True):
            digits = _DIGITS.match(text) if rows else None
            has_value = digits is not None and text[digits.end()] == "="
            values.append(read(text[digits.end() + 1 + int(digits[0]) :]) if digits and has_value else None)
        return from_values(argument, values)


class First(Edge):
    """The value of the first row."""

    def find_row(self, low: Int64s, high: Int64s) -> Int64s:
        """Returns the first rows."""
        return low

    def find_running(self, times: Int64s) -> Int64s:
        """Returns the earliest rows."""
        is_earliest = np.diff(np.minimum.accumulate(times), prepend=times[:1]) < 0
        return np.maximum.accumulate(np.where(is_earliest, np.arange(len(times)), 0))

    def prefers_right(self, left: Partial, right: Partial) -> npt.NDArray[np.bool_]:
        """Marks where the right row is earlier."""
        is_before: npt.NDArray[np.bool_] = (right[1] < left[1]) | ((right[1] == left[1]) & (right[2] < left[2]))
        return is_before


class Last(Edge):
    """The value of the last row."""

    def find_row(self, low: Int64s, high: Int64s) -> Int64s:
        """Returns the last rows."""
        return high - 1

    def find_running(self, times: Int64s) -> Int64s:
        """Returns the latest rows."""
        is_latest = times == np.maximum.accumulate(times)
        return np.maximum.accumulate(np.where(is_latest, np.arange(len(times)), 0))

    def prefers_right(self, left: Partial, right: Partial) -> npt.NDArray[np.bool_]:
        """Marks where the right row is not earlier."""
        is_after: npt.NDArray[np.bool_] = (right[1] > left[1]) | ((right[1] == left[1]) & (right[2] >= left[2]))
        return is_after


# How to read the value of a packed text, by type. All other types are read as integers.
_READERS: dict[str, Callable[[str], Any]] = {"string": str, "boolean": "True".__eq__, "double": float, "float": float}
_DIGITS = re.compile("[0-9]+")

AGGREGATES: dict[str, Aggregate] = {
    "count": Count(),
    "count_distinct": CountDistinct(),
    "sum": Sum(),
    "avg": Avg(),
    "min": Min(),
    "max": Max(),
    "first": First(),
    "last": Last(),
    "stddev_samp": StddevSamp(),
}

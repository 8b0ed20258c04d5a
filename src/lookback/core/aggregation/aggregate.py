"""The interface of aggregates.

An aggregate works on ranges of rows sorted by (key, time). It indexes the rows once, aggregates any number of ranges
with that index, merges the partial results that several sorted runs contribute to one window, and finishes with a
column of the type that Spark would return. All arithmetic is exact. A result that does not fit its type is an error of
that row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from lookback.core.aggregation.exact import Int64s, Partial
from lookback.core.values.columns import Column, Values
from lookback.core.values.types import DataType


class Aggregate(ABC):
    """One aggregate function.

    Attributes:
        stores_value: State keeps the values of the argument.
        additive: The contribution of rows is a sum over them, so that rows can be combined into one (see `index_sums`
            and `sum_ranges`) and subtracted again.
        is_ordered: The result depends on the order of rows. Such an aggregate includes rows whose argument is NULL.
        is_gathered: Contributions of runs cannot be merged; see `GatheredAggregate`.
    """

    stores_value = True
    additive = False
    is_ordered = False
    is_gathered = False

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

    def aggregate_ranges(self, index: Any, low: Int64s, high: Int64s) -> Partial:
        """Aggregates the indexed rows [low, high) of each window; low == high is an empty window."""
        return self.subtract_rows(index, high, index, low)

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

"""The aggregates first and last, which go by the order of rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lookback.core.aggregation.aggregate import Aggregate
from lookback.core.aggregation.exact import Int64s, Partial
from lookback.core.values.columns import Column, Values, from_values, make_objects
from lookback.core.values.types import STRING, DataType


class Edge(Aggregate):
    """The value of the first or last row by (time, arrival), which may be NULL, as with Spark's first and last.

    Each value is kept as a text together with the id of its event, so that a deletion removes the row of its own event.
    Another row with the same time and value may have a different place in the order.
    """

    is_ordered = True

    def __init__(self, *, is_last: bool) -> None:
        self._is_last = is_last

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

    def find_running(self, times: Int64s) -> Int64s:
        """Returns for each row the position of the first or last row up to it; rows are in order of arrival."""
        if self._is_last:
            is_picked = times == np.maximum.accumulate(times)
        else:
            is_picked = np.diff(np.minimum.accumulate(times), prepend=times[:1]) < 0
        return np.maximum.accumulate(np.where(is_picked, np.arange(len(times)), 0))

    def aggregate_ranges(self, index: Any, low: Int64s, high: Int64s) -> Partial:
        """Returns the count of each range and the time, arrival and value of its row, undefined for an empty range."""
        if not len(index[0]):
            return high - low, low.copy(), low.copy(), np.full(len(low), "", dtype=object)
        rows = np.where(high > low, high - 1 if self._is_last else low, 0)
        return high - low, *(part[rows] for part in index)

    def merge(self, left: Partial, right: Partial) -> Partial:
        """Adds the counts and picks the first or last row of each pair; where only one side has rows, its row.

        Of equal rows, that of `right` arrived later.
        """
        is_after = (right[1] > left[1]) | ((right[1] == left[1]) & (right[2] >= left[2]))
        takes_right = (right[0] > 0) & ((left[0] == 0) | (is_after == self._is_last))
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


# How to read the value of a packed text, by type. All other types are read as integers.
_READERS: dict[str, Callable[[str], Any]] = {"string": str, "boolean": "True".__eq__, "double": float, "float": float}
_DIGITS = re.compile("[0-9]+")

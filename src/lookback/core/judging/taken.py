"""The rows of a key in order, and views of those that a step of a sequence took.

    rows of the key    a1   a2   b1   a3   b2       steps: a, then b
    rows of step a     a1   a2        a3            a step that reads the event alone takes adjacent rows of its list:
    rows of step b               b1        b2       RowRange(rows of step a, 0, 2) is a1, a2

A condition reads a field of them as an `ArrayPart` of the array of this field, which has a fast test for a value.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from lookback.core.values.columns import is_nan, replace_nan

# The time and number of a row; rows and waits are sorted by it.
SortKey = tuple[int, int]
# Up to this many values are searched one by one; for more, an index of places is used.
_MAX_SEARCHED = 64


class Row(NamedTuple):
    """An event that may satisfy some condition.

    Attributes:
        time: The event time.
        id: The id of the event.
        bits: The conditions that it may satisfy.
        values: The values of the fields that are kept.
        number: The number of the row in its key, in order of arrival.
    """

    time: int
    id: str
    bits: int
    values: list[Any]
    number: int

    @property
    def sort_key(self) -> SortKey:
        """Its place among the rows of its key."""
        return self.time, self.number


# Returns the sort key of a row, or of the row that starts a wait.
sort_key = attrgetter("time", "number")


class Array:
    """The values of a field over rows, in order."""

    def __init__(self, values: Iterable[Any] = ()) -> None:
        self.values: list[Any] = list(values)
        # The places of each value among the first `_indexed` values.
        self._places: dict[Any, list[int]] = {}
        self._indexed = 0

    def contains(self, value: Any, begin: int, end: int) -> bool:
        """Returns whether a value is among those in [begin, end)."""
        if end - begin <= _MAX_SEARCHED and not is_nan(value):
            return value in self.values[begin:end]
        for at in range(self._indexed, len(self.values)):
            self._places.setdefault(replace_nan(self.values[at]), []).append(at)
        self._indexed = len(self.values)
        places = self._places.get(replace_nan(value), [])
        at = bisect_left(places, begin)
        return at < len(places) and places[at] < end


class ArrayPart(Sequence[Any]):
    """A view of the values of an array in [begin, end), with a fast test for a value."""

    __slots__ = ("_array", "_begin", "_end")

    def __init__(self, array: Array, begin: int, end: int) -> None:
        self._array, self._begin, self._end = array, begin, end

    def __len__(self) -> int:
        return self._end - self._begin

    def __getitem__(self, at: Any) -> Any:
        place = at + (self._end if at < 0 else self._begin)
        if not self._begin <= place < self._end:
            raise IndexError(at)
        return self._array.values[place]

    def __contains__(self, value: object) -> bool:
        return self._array.contains(value, self._begin, self._end)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._array.values[self._begin : self._end])


class TakenRows(list[Row]):
    """Rows in order, with the arrays of their fields that conditions read."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        super().__init__(rows)
        self._arrays: dict[int, Array] = {}

    def part(self, at: int, count: int) -> ArrayPart:
        """Returns the values of a field over the first `count` rows; `at` is its position among the values of a row."""
        return self.part_between(at, 0, count)

    def part_between(self, at: int, begin: int, end: int) -> ArrayPart:
        """Returns the values of a field over the rows in [begin, end)."""
        array = self._arrays.setdefault(at, Array())
        array.values.extend([row.values[at] for row in self[len(array.values) :]])
        return ArrayPart(array, begin, end)

    def put_in(self, at: int, row: Row) -> None:
        """Inserts a row at a place."""
        self._arrays.clear()
        self.insert(at, row)


class RowRange(Sequence[Row]):
    """A view of the rows [begin, end) of a list; valid until the list changes."""

    def __init__(self, rows: TakenRows, begin: int, end: int) -> None:
        self._rows, self._begin, self._end = rows, begin, end

    def __len__(self) -> int:
        return self._end - self._begin

    def part(self, at: int, count: int) -> ArrayPart:
        """Returns the values of a field over the first `count` rows; `at` is its position among the values of a row."""
        return self._rows.part_between(at, self._begin, self._begin + count)

    def __getitem__(self, at: Any) -> Any:
        places = range(self._begin, self._end)[at]
        return [self._rows[each] for each in places] if isinstance(places, range) else self._rows[places]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows[self._begin : self._end])

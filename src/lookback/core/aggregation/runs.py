"""Sorted runs, which hold the rows of one feature in state.

A run is immutable and sorted by (key, time, arrival). New rows form a new run. Runs of similar length are merged, so
that each row is rewritten a logarithmic number of times (a log-structured merge, O'Neil et al., 1996).

If a feature has a resolution, merging also combines rows: all rows of a key in a closed time bucket become one row,
with the start of the bucket as its time and the sum of their contributions instead of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from lookback.core.aggregation.aggregate import Aggregate
from lookback.core.aggregation.aggregates import AGGREGATES
from lookback.core.aggregation.distinct import STORED
from lookback.core.aggregation.exact import Partial, index_sums, sum_ranges
from lookback.core.aggregation.grouping import Queries
from lookback.core.errors import StateError
from lookback.core.values.cache import estimate_bytes
from lookback.core.values.columns import Mask, Values, replace_nan
from lookback.core.values.keys import Int64s, Keys, TimeSearch, list_ranges, number_sorted_keys, order_by_group
from lookback.core.values.pages import decode_page, encode_page
from lookback.core.values.windows import align_down

# Integers below this are stored in 64 bits.
_NARROW = 2**62


@dataclass(frozen=True)
class Buckets:
    """How the rows of a feature are combined: one row per key and time bucket.

    Attributes:
        resolution: The length of a bucket in microseconds; buckets start at multiples of it.
        lag: A bucket is closed once it ends this far below the watermark, because no later window can end in it.
        function: The name of the feature's aggregate, which is additive.
    """

    resolution: int
    lag: int
    function: str

    @property
    def aggregate(self) -> Aggregate:
        """The feature's aggregate function."""
        return AGGREGATES[self.function]

    def find_closed_end(self, watermark: int) -> int:
        """Returns the end of the last closed bucket; rows before it may be combined."""
        return align_down(watermark - self.lag, self.resolution)

    def contributions(self, times: Int64s, values: Values | None) -> Partial:
        """Returns the contribution of each single row."""
        rows = np.arange(len(times), dtype=np.int64)
        index = self.aggregate.build_index(times if values is None else values)
        return self.aggregate.aggregate_ranges(index, rows, rows + 1)


@dataclass(eq=False)
class Run:
    """Rows sorted by (key, time, arrival).

    Attributes:
        keys: Distinct, sorted keys.
        starts: Key i has the rows starts[i]:starts[i + 1].
        times: The time of each row in microseconds, shape (rows,).
        values: The value of each row, shape (rows,); None if the feature stores none.
        parts: Replaces `values` if some rows are combined: the contribution of each row, as arrays of shape (rows,).
            The first one is the count.
    """

    keys: Keys
    starts: Int64s
    times: Int64s
    values: Values | None
    parts: Partial | None = None
    _indexes: dict[str, Any] = field(default_factory=dict)
    # The number of attributes and indexes at the last estimate, and their size in bytes.
    _estimated: tuple[int, int] = (0, 0)

    def __len__(self) -> int:
        return len(self.times)

    @property
    def memory_bytes(self) -> int:
        """The estimated memory of the run, including its indexes, in bytes."""
        # Rules read it at each search. No index grows, except for exact squares, which are seldom needed.
        things = len(vars(self)) + len(self._indexes)
        if self._estimated[0] != things:
            self._estimated = things, estimate_bytes(vars(self))
        return self._estimated[1]

    def forget_indexes(self) -> None:
        """Drops the cached indexes; the next measurement rebuilds them."""
        self._indexes.clear()

    def forget_estimate(self) -> None:
        """Discards the estimate of memory, after the arrays have moved to a file."""
        self._estimated = (0, 0)

    @property
    def groups(self) -> Int64s:
        """The number of each row's key in `keys`, shape (rows,)."""
        return np.repeat(np.arange(len(self.keys), dtype=np.int64), np.diff(self.starts))

    def aggregate_windows(
        self, name: str, aggregate: Aggregate, groups: Int64s, queries: Queries
    ) -> tuple[Int64s, Partial]:
        """Aggregates the rows of this run in each window.

        Args:
            name: The name of the aggregate.
            aggregate: The aggregate.
            groups: The number of each query's key in the run; negative if the run lacks the key or its rows have
                expired.
            queries: The windows.

        Returns:
            The positions of the queries whose times overlap those of the run, and the contributions to them.
        """
        at, low, high = self.find_windows(groups, queries)
        if not len(at):
            return at, ()
        aggregate_ranges = aggregate.aggregate_ranges if self.parts is None else sum_ranges
        return at, aggregate_ranges(self._index(name, aggregate), low, high)

    def prepare(self, name: str, aggregate: Aggregate) -> None:
        """Builds the search and the index ahead of time, so that the first measurement need not wait for them."""
        _ = self._search
        if name != "count_distinct" and not aggregate.is_gathered:
            self._index(name, aggregate)

    def _index(self, name: str, aggregate: Aggregate) -> Any:
        if name not in self._indexes:
            if self.parts is not None:
                self._indexes[name] = index_sums(self.parts)
            else:
                values = self.times if self.values is None else self.values
                self._indexes[name] = aggregate.index_rows(values, self.times, np.full(len(self), STORED))
        return self._indexes[name]

    def find_windows(self, groups: Int64s, queries: Queries) -> tuple[Int64s, Int64s, Int64s]:
        """Finds the rows in each window; takes the arguments of `aggregate_windows`.

        Returns the positions of the queries that may have rows here, and the range [low, high) of rows of each.
        """
        at = np.flatnonzero((groups >= 0) & (queries.first <= self._last) & (queries.last >= self._first))
        return at, *self._find_ranges(groups[at], queries.first[at], queries.last[at])

    @cached_property
    def has_negative_value(self) -> bool:
        """True if any value is negative."""
        return has_negative(self.values)

    @cached_property
    def _first(self) -> int:
        return int(self.times.min())

    @cached_property
    def _last(self) -> int:
        return int(self.times.max())

    @cached_property
    def _search(self) -> TimeSearch:
        return TimeSearch(self.groups, self.times)

    def find_rows(self, groups: Int64s, first: Int64s, last: Int64s) -> tuple[Int64s, Int64s]:
        """Finds the rows of some keys with first <= time <= last.

        Args:
            groups: The number of each key in the run, shape (keys,); -1 if the run lacks the key.
            first: The first time of each key in microseconds, shape (keys,).
            last: The last time of each key in microseconds, shape (keys,).

        Returns:
            For each row found, the position of its key in `groups`, and its own position.
        """
        low, high = self.find_ranges(groups, first, last)
        return np.repeat(np.arange(len(low), dtype=np.int64), high - low), list_ranges(low, high - low)

    def find_ranges(self, groups: Int64s, first: Int64s, last: Int64s) -> tuple[Int64s, Int64s]:
        """Finds the rows [low, high) of each window; 0 and 0 if the run lacks its key, which then has the number -1."""
        low, high = self._find_ranges(np.maximum(groups, 0), first, last)
        return np.where(groups < 0, 0, low), np.where(groups < 0, 0, high)

    def _find_ranges(self, groups: Int64s, first: Int64s, last: Int64s) -> tuple[Int64s, Int64s]:
        """Finds the rows [low, high) of each window; its key must be in the run."""
        low = self.starts[groups]
        # Most windows begin before the run and end after it, and need no search.
        within = np.flatnonzero(first > self._first)
        low[within] = self._search.find_first(groups[within], first[within])
        high = self.starts[groups + 1]
        within = np.flatnonzero(last < self._last)
        high[within] = self._search.find_first(groups[within], last[within] + 1)
        return low, np.maximum(low, high)

    def list_rows(self) -> tuple[Int64s, Int64s]:
        """Returns the number of each row's key, and the times of the rows."""
        return self.groups, self.times

    def count_since(self, earliest: int) -> int:
        """Counts the rows from a time on."""
        return int(np.count_nonzero(self.times >= earliest))

    def take(self, rows: Mask) -> Run:
        """Returns a run of the marked rows."""
        values = None if self.values is None else self.values[rows]
        parts = None if self.parts is None else tuple(part[rows] for part in self.parts)
        return make_run(self.groups[rows], self.keys, self.times[rows], values, parts)

    def encode(self) -> bytes:
        """Encodes the run as a page."""
        columns = [self.keys.low, self.keys.high, np.diff(self.starts), self.times, self.values]
        return encode_page([*columns, *(self.parts or ())])

    @classmethod
    def decode(cls, page: bytes, place: str) -> Run:
        """Decodes a run from a page; raises StateError, naming `place`, if the page is damaged."""
        arrays = decode_page(page, place)
        keys, starts, times, (values, *more) = read_rows(arrays, place)
        rows = len(times)
        parts = tuple(part for part in more if part is not None and (part.dtype.kind == "i" or _has_integers(part)))
        if values is not None and len(values) != rows:
            raise StateError(f"{place}: a page of window state is damaged; start with a new checkpoint")
        if len(parts) != len(more) or any(len(part) != rows for part in parts) or (parts and values is not None):
            raise StateError(f"{place}: a page of window state is damaged; start with a new checkpoint")
        return cls(keys, starts, times, values, parts or None)


def read_rows(arrays: Sequence[Values | None], place: str) -> tuple[Keys, Int64s, Int64s, Sequence[Values | None]]:
    """Reads the keys, starts and times at the beginning of a run's page, and returns them with the remaining arrays.

    Raises StateError, naming `place`, if the page is damaged.
    """
    if len(arrays) < 5 or any(array is None or array.dtype != np.int64 for array in arrays[:4]):
        raise StateError(f"{place}: a page of window state holds something else; start with a new checkpoint")
    low, high, counts, times, *more = arrays
    assert low is not None
    assert high is not None
    assert counts is not None
    assert times is not None
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    rows = int(starts[-1])
    # With huge counts the sum could overflow to the right number.
    counted = len(times) == rows and not ((counts < 1) | (counts > rows)).any()
    if len(low) != len(high) or len(counts) != len(low) or not counted:
        raise StateError(f"{place}: a page of window state is damaged; start with a new checkpoint")
    return Keys(low, high), starts, times, more


def has_negative(values: Values | None) -> bool:
    """Returns whether any of the values is negative."""
    return values is not None and len(values) > 0 and bool(values.min() < 0)


def make_run(numbers: Int64s, keys: Keys, times: Int64s, values: Values | None, parts: Partial | None = None) -> Run:
    """Makes a run from rows; rows with equal key and time keep their order.

    `numbers` is the number of each row's key in `keys`, which are distinct and sorted. Drops keys without a row.
    """
    order = order_by_group(numbers, times)
    counts = np.bincount(numbers, minlength=len(keys))
    if not counts.all():
        has_rows = counts > 0
        keys, counts = keys.take(has_rows), counts[has_rows]
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    ordered = None if parts is None else tuple(part[order] for part in parts)
    return Run(keys, starts, times[order], None if values is None else values[order], ordered)


def merge_runs(runs: Sequence[Run], floor: int | None) -> Run:
    """Merges runs, dropping rows before `floor`; at equal key and time, rows of earlier runs come first."""
    numbers, keys, times = concat_rows(runs)
    columns = [run.values for run in runs if run.values is not None]
    values = np.concatenate(columns) if columns else None
    if floor is not None:
        keep = times >= floor
        if not keep.all():
            numbers, times = numbers[keep], times[keep]
            values = None if values is None else values[keep]
    return make_run(numbers, keys, times, values)


def combine_runs(runs: Sequence[Run], floor: int | None, buckets: Buckets, closed: int) -> Run:
    """Merges runs like `merge_runs`, and combines all rows of a key and bucket before `closed` into one.

    `floor` and `closed` are multiples of the resolution. The result has parts instead of values.
    """
    numbers, keys, times = concat_rows(runs)
    each = [buckets.contributions(run.times, run.values) if run.parts is None else run.parts for run in runs]
    parts = tuple(np.concatenate(columns) for columns in zip(*each, strict=True))
    times = np.where(times < closed, align_down(times, buckets.resolution), times)
    if floor is not None:
        keep = times >= floor
        numbers, times, parts = numbers[keep], times[keep], tuple(part[keep] for part in parts)
    run = make_run(numbers, keys, times, None, parts)
    assert run.parts is not None
    groups = run.groups
    first = np.ones(len(run) + 1, dtype=bool)
    first[1:-1] = (groups[1:] != groups[:-1]) | (run.times[1:] != run.times[:-1]) | (run.times[1:] >= closed)
    edges = np.flatnonzero(first)
    counts = np.bincount(groups[edges[:-1]], minlength=len(run.keys))
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    combined = tuple(_narrow(part) for part in sum_ranges(index_sums(run.parts), edges[:-1], edges[1:]))
    return Run(run.keys, starts, run.times[edges[:-1]], None, combined)


def concat_rows(runs: Sequence[Run]) -> tuple[Int64s, Keys, Int64s]:
    """Concatenates the rows of runs. Returns the number of each row's key, the distinct keys, and the times."""
    numbers, keys = number_sorted_keys(Keys.concat(run.keys for run in runs))
    each = np.split(numbers, np.cumsum([len(run.keys) for run in runs])[:-1])
    rows = [np.repeat(of_run, np.diff(run.starts)) for of_run, run in zip(each, runs, strict=True)]
    return np.concatenate(rows), keys, np.concatenate([run.times for run in runs])


def _has_integers(part: Values) -> bool:
    return part.dtype == np.dtype(object) and not any(isinstance(value, str) for value in part[:1])


def _narrow(part: Values) -> Values:
    """Converts integers of any size to 64 bits if all of them fit."""
    if part.dtype == np.dtype(object) and len(part) and max(int(part.max()), -int(part.min())) >= _NARROW:
        return part
    narrow: Values = part.astype(np.int64)
    return narrow


def match_rows(run: Run, keys: Keys, times: Int64s, values: Values | None) -> tuple[Mask, Int64s]:
    """Finds one row for each (key, time, value), if the run has it.

    Returns the mask of the rows found, and the positions of those (key, time, value) that the run has.
    """
    wanted: dict[tuple[Any, ...], list[int]] = {}
    columns = [keys.low.tolist(), keys.high.tolist(), times.tolist()]
    columns += [] if values is None else [[replace_nan(value) for value in values.tolist()]]
    for at, row in enumerate(zip(*columns, strict=True)):
        wanted.setdefault(row, []).append(at)
    is_found = np.zeros(len(run), dtype=bool)
    had: list[int] = []
    group = run.groups
    candidates = np.flatnonzero(np.isin(run.times, times))
    for at in candidates.tolist():
        row = (int(run.keys.low[group[at]]), int(run.keys.high[group[at]]), int(run.times[at]))
        if run.values is not None:
            value = run.values[at]
            row = (*row, replace_nan(value.item() if isinstance(value, np.generic) else value))
        if wanted.get(row):
            had.append(wanted[row].pop())
            is_found[at] = True
    return is_found, np.array(had, dtype=np.int64)


def subtract_rows(
    run: Run, keys: Keys, times: Int64s, values: Values | None, buckets: Buckets, closed: int
) -> tuple[Run, Int64s]:
    """Removes rows from a run whose rows before `closed` are combined.

    Before `closed`, it subtracts the row's contribution from its bucket, if the bucket has rows. From `closed` on, it
    removes one row with equal key, time and value. Buckets that become empty are dropped.

    Returns the remaining run, and the positions of the rows that it had.
    """
    assert run.parts is not None
    wanted_times = np.where(times < closed, align_down(times, buckets.resolution), times)
    group, parts = run.groups, [part.astype(object) for part in run.parts]
    rows: dict[tuple[int, int, int], list[int]] = {}
    for at in np.flatnonzero(np.isin(run.times, wanted_times)).tolist():
        key = int(run.keys.low[group[at]]), int(run.keys.high[group[at]]), int(run.times[at])
        rows.setdefault(key, []).append(at)
    columns = [keys.low, keys.high, wanted_times, *buckets.contributions(times, values)]
    had: list[int] = []
    for wanted, row_wanted in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        low, high, time, *contribution = row_wanted
        for at in rows.get((low, high, time), []):
            row = [part[at] for part in parts]
            if row == contribution or (row[0] and time < closed):
                for part, value in zip(parts, contribution, strict=True):
                    part[at] -= value
                had.append(wanted)
                break
    left = Run(run.keys, run.starts, run.times, None, tuple(_narrow(part) for part in parts))
    return left.take(parts[0] > 0), np.array(had, dtype=np.int64)

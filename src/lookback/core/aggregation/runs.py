"""Sorted runs: the rows of one feature as they stand in state.

A run is immutable and sorted by (key, time, arrival). New rows make a new run; runs of like size are merged, so a
row is rewritten a logarithmic number of times (a log-structured merge, O'Neil et al., 1996).

Where a feature has a resolution, merging also combines: of a key and bucket of time that is closed one row is left, with
the bucket's start as its time and, in place of a value, what the rows contributed together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from lookback.core.aggregation.aggregates import AGGREGATES, Aggregate, Partial, sums, sums_between
from lookback.core.aggregation.grouping import Queries
from lookback.core.errors import StateError
from lookback.core.values.cache import estimate_bytes
from lookback.core.values.columns import Mask, Values
from lookback.core.values.keys import Int64s, Keys, TimeSearch, find_keys, number_keys, order_by_group
from lookback.core.values.pages import decode_page, encode_page
from lookback.core.values.windows import align_down

# Integers up to this are kept as 64 bits.
_NARROW = 2**62


@dataclass(frozen=True)
class Buckets:
    """How the rows of a feature are combined: those in [b, b + resolution), for b a multiple of it, to one per key.

    lag: a bucket is closed when it ends this far below the watermark, so that no window that is judged ends in it.
    function: the feature's aggregate, which is additive.
    """

    resolution: int
    lag: int
    function: str

    @property
    def aggregate(self) -> Aggregate:
        """The feature's aggregate function."""
        return AGGREGATES[self.function]

    def closed(self, watermark: int) -> int:
        """The end of the last bucket that is closed: rows before it may be combined."""
        return align_down(watermark - self.lag, self.resolution)

    def contributions(self, times: Int64s, values: Values | None) -> Partial:
        """What each row contributes on its own."""
        rows = np.arange(len(times), dtype=np.int64)
        index = self.aggregate.index(times if values is None else values)
        return self.aggregate.ranges(index, rows, rows + 1)


@dataclass(eq=False)
class Run:
    """Rows sorted by (key, time, arrival): `keys` are distinct and sorted, key i has rows starts[i]:starts[i + 1].

    times: microseconds, shape (rows,); values: shape (rows,) or None where the feature stores none. parts: in place of
    values, where some rows are combined, what each row contributes; arrays of shape (rows,), the first is its count.
    """

    keys: Keys
    starts: Int64s
    times: Int64s
    values: Values | None
    parts: Partial | None = None
    _indexes: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.times)

    @property
    def memory(self) -> int:
        """About how much memory the run takes now, with what was made to search it."""
        return estimate_bytes(vars(self))

    @property
    def groups(self) -> Int64s:
        """The number of each row's key, shape (rows,)."""
        return np.repeat(np.arange(len(self.keys.low), dtype=np.int64), np.diff(self.starts))

    def windows(self, name: str, aggregate: Aggregate, groups: Int64s, queries: Queries) -> tuple[Int64s, Partial]:
        """What this run contributes to the windows asked for: which windows it has rows near, and what those get.

        groups: of each query the number of its key in the run; negative where it is not there or counts no more.
        """
        at = np.flatnonzero((groups >= 0) & (queries.first <= self._last) & (queries.last >= self._first))
        if not len(at):
            return at, ()
        if name not in self._indexes:
            if self.parts is not None:
                self._indexes[name] = sums(self.parts)
            else:
                self._indexes[name] = aggregate.index(self.times if self.values is None else self.values)
        ranges = aggregate.ranges if self.parts is None else sums_between
        return at, ranges(self._indexes[name], *self._bounds(groups[at], queries.first[at], queries.last[at]))

    @cached_property
    def _first(self) -> int:
        return int(self.times.min())

    @cached_property
    def _last(self) -> int:
        return int(self.times.max())

    @cached_property
    def _search(self) -> TimeSearch:
        return TimeSearch(self.groups, self.times)

    def rows_within(
        self, keys: Keys, first: Int64s, last: Int64s, emptied: Mask | None = None
    ) -> tuple[Int64s, Int64s]:
        """The rows of each key with first <= time <= last: the number of the key, and the position of the row.

        keys: distinct; first, last: microseconds, shape (keys,). emptied: which of the run's own keys count no more.
        """
        groups = find_keys(keys, self.keys)
        if emptied is not None:
            groups[emptied[groups] & (groups >= 0)] = -1
        low, high = self._bounds(np.maximum(groups, 0), first, last)
        counts = np.where(groups >= 0, high - low, 0)
        numbers = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        starts = np.cumsum(counts) - counts
        return numbers, np.arange(len(numbers), dtype=np.int64) - starts[numbers] + low[numbers]

    def has_rows(self, keys: Keys, times: Int64s) -> Mask:
        """Whether there is a row of each key at each time, shape (keys,)."""
        groups = find_keys(keys, self.keys)
        low, high = self._bounds(np.maximum(groups, 0), times, times)
        found: Mask = (groups >= 0) & (high > low)
        return found

    def _bounds(self, groups: Int64s, first: Int64s, last: Int64s) -> tuple[Int64s, Int64s]:
        """Of each window of a key that is there the positions of its first row and behind its last one."""
        low = self.starts[groups]
        # Most windows have a run all behind their begin and before their end, and it takes no search to see that.
        within = np.flatnonzero(first > self._first)
        low[within] = self._search.first_at_least(groups[within], first[within])
        high = self.starts[groups + 1]
        within = np.flatnonzero(last < self._last)
        high[within] = self._search.first_at_least(groups[within], last[within] + 1)
        return low, np.maximum(low, high)

    def take(self, rows: Mask) -> Run:
        """The run of these rows alone."""
        values = None if self.values is None else self.values[rows]
        parts = None if self.parts is None else tuple(part[rows] for part in self.parts)
        return make_run(self.groups[rows], self.keys, self.times[rows], values, parts)

    def encode(self) -> bytes:
        """The run as a page."""
        columns = [self.keys.low, self.keys.high, np.diff(self.starts), self.times, self.values]
        return encode_page([*columns, *(self.parts or ())])

    @classmethod
    def decode(cls, page: bytes, place: str) -> Run:
        """The run of a page; StateError, naming `place`, if it is damaged."""
        arrays = decode_page(page, place)
        if len(arrays) < 5 or any(array is None or array.dtype != np.int64 for array in arrays[:4]):
            raise StateError(f"{place}: a page of window state holds something else; start with a new checkpoint")
        low, high, counts, times, values, *more = arrays
        parts = tuple(part for part in more if part is not None and (part.dtype.kind == "i" or _integers(part)))
        assert low is not None
        assert high is not None
        assert counts is not None
        assert times is not None
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        rows = int(starts[-1])
        # A count beyond the rows could make their sum overflow to the right number.
        counted = len(times) == rows and not ((counts < 1) | (counts > rows)).any()
        if len(low) != len(high) or len(counts) != len(low) or not counted:
            raise StateError(f"{place}: a page of window state is damaged; start with a new checkpoint")
        if values is not None and len(values) != rows:
            raise StateError(f"{place}: a page of window state is damaged; start with a new checkpoint")
        if len(parts) != len(more) or any(len(part) != rows for part in parts) or (parts and values is not None):
            raise StateError(f"{place}: a page of window state is damaged; start with a new checkpoint")
        return cls(Keys(low, high), starts, times, values, parts or None)


def make_run(numbers: Int64s, keys: Keys, times: Int64s, values: Values | None, parts: Partial | None = None) -> Run:
    """The run of these rows; rows of equal key and time keep their order.

    numbers: of each row's key in `keys`, which are distinct and sorted; those without a row are left out.
    """
    order = order_by_group(numbers, times)
    counts = np.bincount(numbers, minlength=len(keys.low))
    if not counts.all():
        there = counts > 0
        keys, counts = keys.take(there), counts[there]
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    ordered = None if parts is None else tuple(part[order] for part in parts)
    return Run(keys, starts, times[order], None if values is None else values[order], ordered)


def merge_runs(runs: Sequence[Run], floor: int | None) -> Run:
    """One run of all rows with a time of at least `floor`; of equal keys and times those of earlier runs first."""
    numbers, keys, times = _rows(runs)
    columns = [run.values for run in runs if run.values is not None]
    values = np.concatenate(columns) if columns else None
    if floor is not None:
        keep = times >= floor
        if not keep.all():
            numbers, times = numbers[keep], times[keep]
            values = None if values is None else values[keep]
    return make_run(numbers, keys, times, values)


def combine_runs(runs: Sequence[Run], floor: int | None, buckets: Buckets, closed: int) -> Run:
    """One run as of `merge_runs`, with one row for all of a key and bucket before `closed`; it has parts.

    floor, closed: multiples of the resolution.
    """
    numbers, keys, times = _rows(runs)
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
    counts = np.bincount(groups[edges[:-1]], minlength=len(run.keys.low))
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    combined = tuple(_narrow(part) for part in sums_between(sums(run.parts), edges[:-1], edges[1:]))
    return Run(run.keys, starts, run.times[edges[:-1]], None, combined)


def _rows(runs: Sequence[Run]) -> tuple[Int64s, Keys, Int64s]:
    """The rows of all runs: the number of each one's key, those keys, and the times."""
    own = Keys(np.concatenate([run.keys.low for run in runs]), np.concatenate([run.keys.high for run in runs]))
    numbers, keys = number_keys(own)
    each = np.split(numbers, np.cumsum([len(run.keys.low) for run in runs])[:-1])
    rows = [np.repeat(of_run, np.diff(run.starts)) for of_run, run in zip(each, runs, strict=True)]
    return np.concatenate(rows), keys, np.concatenate([run.times for run in runs])


def _integers(part: Values) -> bool:
    return part.dtype == np.dtype(object) and not any(isinstance(value, str) for value in part[:1])


def _narrow(part: Values) -> Values:
    """Integers of any size as 64 bits, where all of them fit."""
    if part.dtype == np.dtype(object) and len(part) and max(int(part.max()), -int(part.min())) >= _NARROW:
        return part
    narrow: Values = part.astype(np.int64)
    return narrow


def comparable(value: Any) -> Any:
    """The value, or for NaN, which does not equal itself, something that does."""
    return "NaN" if value != value else value


def remove_rows(run: Run, keys: Keys, times: Int64s, values: Values | None) -> tuple[Run, Int64s]:
    """The run less one row for each wanted (key, time, value) that it holds, and which wanted rows it held."""
    wanted: dict[tuple[Any, ...], list[int]] = {}
    columns = [keys.low.tolist(), keys.high.tolist(), times.tolist()]
    columns += [] if values is None else [[comparable(value) for value in values.tolist()]]
    for at, row in enumerate(zip(*columns, strict=True)):
        wanted.setdefault(row, []).append(at)
    keep = np.ones(len(run), dtype=bool)
    held: list[int] = []
    group = run.groups
    candidates = np.flatnonzero(np.isin(run.times, times))
    for at in candidates.tolist():
        row = (int(run.keys.low[group[at]]), int(run.keys.high[group[at]]), int(run.times[at]))
        if run.values is not None:
            value = run.values[at]
            row = (*row, comparable(value.item() if isinstance(value, np.generic) else value))
        if wanted.get(row):
            held.append(wanted[row].pop())
            keep[at] = False
    if not held:
        return run, np.zeros(0, dtype=np.int64)
    kept = make_run(group[keep], run.keys, run.times[keep], None if run.values is None else run.values[keep])
    return kept, np.array(held, dtype=np.int64)


def subtract_rows(run: Run, keys: Keys, times: Int64s, values: Values | None, buckets: Buckets, closed: int) -> Run:
    """The run, combined up to `closed`, less the wanted rows: each is subtracted from its bucket, if that has any.

    After `closed` rows stand alone, and one of equal key, time and value goes. What has no rows left is no more.
    """
    assert run.parts is not None
    wanted_times = np.where(times < closed, align_down(times, buckets.resolution), times)
    group, parts = run.groups, [part.astype(object) for part in run.parts]
    rows: dict[tuple[int, int, int], list[int]] = {}
    for at in np.flatnonzero(np.isin(run.times, wanted_times)).tolist():
        key = int(run.keys.low[group[at]]), int(run.keys.high[group[at]]), int(run.times[at])
        rows.setdefault(key, []).append(at)
    columns = [keys.low, keys.high, wanted_times, *buckets.contributions(times, values)]
    for low, high, time, *gone in zip(*(column.tolist() for column in columns), strict=True):
        for at in rows.get((low, high, time), []):
            held = [part[at] for part in parts]
            if held == gone or (held[0] and time < closed):
                for part, value in zip(parts, gone, strict=True):
                    part[at] -= value
                break
    left = Run(run.keys, run.starts, run.times, None, tuple(_narrow(part) for part in parts))
    return left.take(parts[0] > 0)

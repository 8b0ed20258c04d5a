"""Sorted runs: the rows of one feature as they stand in state.

A run is immutable and sorted by (key, time, arrival). New rows make a new run; runs of like size are merged, so a
row is rewritten a logarithmic number of times (a log-structured merge, O'Neil et al., 1996).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lookback.core.aggregates import Aggregate, Partial
from lookback.core.columns import Mask, Values
from lookback.core.errors import StateError
from lookback.core.keys import Int64s, Keys, find_keys, number_keys
from lookback.core.pages import decode_page, encode_page


class TimeSearch:
    """Finds times in rows that are sorted by (group, time), for many groups at once.

    groups: int64 shape (rows,), dense numbers in ascending order; times: int64 shape (rows,), ascending in a group.
    """

    def __init__(self, groups: Int64s, times: Int64s) -> None:
        self._ranks: Int64s | None = None
        if len(times) == 0:
            self._base, self._span = 0, 1
        else:
            self._base = int(times.min())
            self._span = int(times.max()) - self._base + 2
        # (group, time) becomes one 64-bit number; where that would overflow, ranks stand in for times.
        if len(groups) and (int(groups[-1]) + 1) * self._span >= 2**62:
            self._ranks = np.unique(times)
            self._span = len(self._ranks) + 1
            offsets = np.searchsorted(self._ranks, times)
        else:
            offsets = times - self._base
        self._positions = groups * self._span + offsets

    def first_at_least(self, groups: Int64s, times: Int64s) -> Int64s:
        """Per wanted (group, time): the position of the group's first row with at least that time, or of its end."""
        if self._ranks is not None:
            offsets = np.searchsorted(self._ranks, times)
        else:
            low, high = self._base, self._base + self._span - 1
            offsets = np.clip(times, low, high) - low
        return np.searchsorted(self._positions, groups * self._span + offsets).astype(np.int64)


@dataclass(eq=False)
class Run:
    """Rows sorted by (key, time, arrival): `keys` are distinct and sorted, key i has rows starts[i]:starts[i + 1].

    times: microseconds, shape (rows,); values: shape (rows,) or None where the feature stores none.
    """

    keys: Keys
    starts: Int64s
    times: Int64s
    values: Values | None
    _search: TimeSearch | None = None
    _indexes: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.times)

    @property
    def groups(self) -> Int64s:
        """The number of each row's key, shape (rows,)."""
        return np.repeat(np.arange(len(self.keys.low), dtype=np.int64), np.diff(self.starts))

    def windows(
        self, name: str, aggregate: Aggregate, keys: Keys, first: Int64s, last: Int64s, emptied: Mask | None = None
    ) -> Partial:
        """What this run contributes to windows [first, last] (times, both ends included) of `keys`, row by row.

        emptied: which of the run's own keys count no more.
        """
        if self._search is None:
            self._search = TimeSearch(self.groups, self.times)
        if name not in self._indexes:
            self._indexes[name] = aggregate.index(self.times if self.values is None else self.values)
        group = find_keys(keys, self.keys)
        known = group >= 0
        group = np.where(known, group, 0)
        if emptied is not None:
            known &= ~emptied[group]
        low = self._search.first_at_least(group, first)
        high = np.maximum(low, self._search.first_at_least(group, last + 1))
        return aggregate.ranges(self._indexes[name], np.where(known, low, 0), np.where(known, high, 0))

    def take(self, rows: Mask) -> Run:
        """The run of these rows alone."""
        values = None if self.values is None else self.values[rows]
        return make_run(self.keys.take(self.groups[rows]), self.times[rows], values)

    def encode(self) -> bytes:
        """The run as a page."""
        return encode_page([self.keys.low, self.keys.high, np.diff(self.starts), self.times, self.values])

    @classmethod
    def decode(cls, page: bytes, place: str) -> Run:
        """The run of a page; StateError, naming `place`, if it is damaged."""
        arrays = decode_page(page, place)
        if len(arrays) != 5 or any(array is None for array in arrays[:4]):
            raise StateError(f"{place}: a page of window state holds something else; start with a new checkpoint")
        low, high, counts, times, values = arrays
        assert low is not None
        assert high is not None
        assert counts is not None
        assert times is not None
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        rows = int(starts[-1])
        if len(low) != len(high) or len(counts) != len(low) or len(times) != rows or (counts < 1).any():
            raise StateError(f"{place}: a page of window state is damaged; start with a new checkpoint")
        if values is not None and len(values) != rows:
            raise StateError(f"{place}: a page of window state is damaged; start with a new checkpoint")
        return cls(Keys(low, high), starts, times, values)


def make_run(keys: Keys, times: Int64s, values: Values | None) -> Run:
    """The run of these rows; rows of equal key and time keep their order."""
    numbers, distinct = number_keys(keys)
    order = np.lexsort((times, numbers))
    counts = np.bincount(numbers, minlength=len(distinct.low))
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    return Run(distinct, starts, times[order], None if values is None else values[order])


def merge_runs(runs: Sequence[Run], floor: int | None) -> Run:
    """One run of all rows with a time of at least `floor`; of equal keys and times those of earlier runs first."""
    keys = Keys(
        np.concatenate([run.keys.low[run.groups] for run in runs]),
        np.concatenate([run.keys.high[run.groups] for run in runs]),
    )
    times = np.concatenate([run.times for run in runs])
    columns = [run.values for run in runs if run.values is not None]
    values = np.concatenate(columns) if columns else None
    if floor is not None:
        keep = times >= floor
        if not keep.all():
            keys, times = keys.take(keep), times[keep]
            values = None if values is None else values[keep]
    return make_run(keys, times, values)


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
    kept = make_run(run.keys.take(group[keep]), run.times[keep], None if run.values is None else run.values[keep])
    return kept, np.array(held, dtype=np.int64)

"""Encodes grouping keys as 128 bits and assigns them to shards.

A key of one integer, date, timestamp, boolean or narrow decimal field is kept exactly. Any other key is hashed:
strings by SipHash-2-4 (Aumasson and Bernstein, 2012) under two fixed keys, numbers by the finalizer of
SplitMix64 (Steele, Lea and Flood, 2014), combined column by column. Two keys are confused only if both halves
collide: for ten million keys the chance is less than 1 in 10^24.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pandas import factorize
from pandas.util import hash_array

from lookback.core.values.columns import Column, Mask, Values

Int64s = npt.NDArray[np.int64]
_UInt64s = npt.NDArray[np.uint64]
_SIP_KEYS = ("lookback.key.low", "lookback.keyhigh")
_SEEDS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03))
# Up to this many sorted runs are merged: numpy's stable sort then needs fewer passes than a radix sort.
_MAX_RUNS = 16
# So many rows are looked at first.
_FIRST_ROWS = 1_000
# A block of the values that are searched for fits in a processor's first cache.
_SEARCHED_AT_ONCE = 4096
_MIXED_AT_ONCE = 16_384
# Pairs of group and time are numbered below this.
_MAX_PLACES = 2**62
_NULL = np.uint64(0x5851F42D4C957F2D)


@dataclass(frozen=True)
class Keys:
    """One key per row: `low` and `high` are its two halves, shape (rows,)."""

    low: Int64s
    high: Int64s

    def __len__(self) -> int:
        return len(self.low)

    def pair(self, at: int) -> tuple[int, int]:
        """Returns one key, as tables know it."""
        return int(self.low[at]), int(self.high[at])

    def list_pairs(self) -> list[tuple[int, int]]:
        """Lists all keys, as tables know them."""
        return list(zip(self.low.tolist(), self.high.tolist(), strict=True))

    def take(self, index: npt.NDArray[Any] | slice) -> Keys:
        """Returns the keys at `index` (positions, a mask or a slice)."""
        return Keys(self.low[index], self.high[index])

    @classmethod
    def concat(cls, parts: Iterable[Keys]) -> Keys:
        """Joins one part or more."""
        listed = list(parts)
        return cls(np.concatenate([each.low for each in listed]), np.concatenate([each.high for each in listed]))

    def shard(self, shards: int) -> Int64s:
        """Returns the shard of each key, 0 to shards - 1."""
        found = np.zeros(len(self.low), dtype=np.int64)
        if shards > 1:
            # In one piece, a million keys need large temporary arrays: the first time it takes 15 ms instead of 9.
            for start in range(0, len(found), _MIXED_AT_ONCE):
                part = slice(start, start + _MIXED_AT_ONCE)
                mixed = _mix(self.low[part].view(np.uint64) ^ _mix(self.high[part].view(np.uint64) + _SEEDS[0]))
                found[part] = mixed % np.uint64(shards)
        return found


def encode_keys(columns: Sequence[Column], rows: int, *, has_repeats: bool = True) -> Keys:
    """Encodes the key of each of `rows` rows from `columns`, one per group_by field in the order of their names.

    NULL equals NULL. Without columns all rows have one key. has_repeats: whether most texts come often; of those that hardly
    do each is hashed sooner than told from the others.
    """
    if not columns:
        zero = np.zeros(rows, dtype=np.int64)
        return Keys(zero, zero)
    if len(columns) == 1 and columns[0].values.dtype in (np.int64, np.bool_):
        return _keep_exact(columns[0])
    halves: list[_UInt64s] = [np.full(rows, seed, dtype=np.uint64) for seed in _SEEDS]
    for column in columns:
        for half, (hashed, seed) in enumerate(zip(_hash(column, has_repeats), _SEEDS, strict=True)):
            halves[half] = _mix(halves[half] * np.uint64(0x2545F4914F6CDD1D) + hashed + seed)
    return Keys(halves[0].view(np.int64), halves[1].view(np.int64))


def _keep_exact(column: Column) -> Keys:
    low: Int64s = column.values.astype(np.int64)
    high: Int64s = np.zeros(len(low), dtype=np.int64)
    if column.null is not None:
        low = np.where(column.null, 0, low)
        high = column.null.astype(np.int64)
    return Keys(low, high)


def _hash(column: Column, has_repeats: bool) -> list[_UInt64s]:
    """Hashes a column, once for each half. has_repeats: see `encode_keys`."""
    values = column.values
    if values.dtype == np.dtype(object):
        texts = values
        if column.type.name != "string":
            texts = np.array([str(value) for value in values], dtype=object)
        if column.null is not None:
            texts = texts.copy()
            texts[column.null] = ""
        codes, distinct = number_values(texts) if has_repeats else (slice(None), texts)
        halves = [hash_array(distinct, hash_key=key, categorize=False)[codes] for key in _SIP_KEYS]
    else:
        if values.dtype.kind == "f":
            # -0.0 and 0.0 are one group in SQL, and so are all NaNs, whatever their bits.
            unified = np.where(values == 0, 0.0, values.astype(np.float64))
            bits = np.where(np.isnan(unified), np.nan, unified).view(np.uint64)
        else:
            bits = values.astype(np.int64).view(np.uint64)
        halves = [_mix(bits ^ seed) for seed in _SEEDS]
    return halves if column.null is None else [np.where(column.null, _NULL, half) for half in halves]


def _mix(values: _UInt64s) -> _UInt64s:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def number_values(values: Values) -> tuple[Int64s, Values]:
    """Numbers the different values 0, 1, ... as they come; all NaNs are one value, and so is None.

    Texts are compared whole: pandas would compare them as C strings, which end at the first NUL.

    Args:
        values: Of any storage, shape (rows,).

    Returns:
        The number of each row's value, shape (rows,), and the different values in the order of their numbers.
    """
    if values.dtype == np.dtype(object) and all(isinstance(value, str) for value in values[:1]):
        encoded = pa.array(values, pa.large_string()).dictionary_encode(null_encoding="encode")
        codes, different = encoded.indices.to_numpy(), encoded.dictionary.to_numpy(zero_copy_only=False)
    else:
        codes, different = factorize(values, use_na_sentinel=False)
    return codes.astype(np.int64, copy=False), different


def number_keys(keys: Keys) -> tuple[Int64s, Keys]:
    """Numbers the distinct keys 0, 1, ... in the order of (low, high).

    Returns the number of each row's key, shape (rows,), and the distinct keys in that order.
    """
    codes, low = number_values(keys.low)
    high = np.zeros(len(low), dtype=np.int64)
    if keys.high.any():
        high[codes] = keys.high
        if bool(np.any(high[codes] != keys.high)):  # two keys share their low half: NULL and 0, otherwise almost never
            return _number_wide_keys(keys)
    order = np.argsort(low)
    ranks = np.empty(len(low), dtype=np.int64)
    ranks[order] = np.arange(len(low))
    return ranks[codes], Keys(low[order], high[order])


def number_sorted_keys(keys: Keys) -> tuple[Int64s, Keys]:
    """Numbers keys as `number_keys` does, faster where they are a few sorted runs, one after another."""
    # A stable sort merges the runs.
    order = np.argsort(keys.low, kind="stable")
    low, high = keys.low[order], keys.high[order]
    is_same: Mask = low[1:] == low[:-1]
    if bool(np.any(is_same & (high[1:] != high[:-1]))):
        return _number_wide_keys(keys)
    first = np.append(True, ~is_same)[: len(low)]
    return _number_in_order(order, first), Keys(low[first], high[first])


def _number_wide_keys(keys: Keys) -> tuple[Int64s, Keys]:
    order = np.lexsort((keys.high, keys.low))
    low, high = keys.low[order], keys.high[order]
    first = np.ones(len(low), dtype=bool)
    first[1:] = (low[1:] != low[:-1]) | (high[1:] != high[:-1])
    return _number_in_order(order, first), Keys(low[first], high[first])


def _number_in_order(order: Int64s, first: Mask) -> Int64s:
    """Numbers rows whose order is known. first: marks, in that order, the first row of each number."""
    numbers = np.empty(len(order), dtype=np.int64)
    numbers[order] = np.cumsum(first) - 1
    return numbers


def order_by_group(numbers: Int64s, times: Int64s) -> Int64s:
    """Returns the positions of rows sorted by (number, time), a stable order; shape (rows,).

    numbers: from 0. A few sorted runs, one after another, are merged. Other rows are sorted by time only in the numbers whose
    times are not in order, since most are in order.
    """
    placed = _place_runs(numbers, times)
    if placed is not None:
        return np.argsort(placed, kind="stable").astype(np.int64, copy=False)
    if len(numbers) > 1 and bool((numbers[1:] < numbers[:-1]).any()):
        order = order_by_number(numbers)
    else:
        order = np.arange(len(numbers), dtype=np.int64)
    grouped, ordered = numbers[order], times[order]
    same = grouped[1:] == grouped[:-1]
    inverted = same & (ordered[1:] < ordered[:-1])
    if not inverted.any():
        return order
    has_disorder = np.zeros(int(grouped[-1]) + 1, dtype=bool)
    has_disorder[grouped[1:][inverted]] = True
    at = has_disorder[grouped]
    rows = order[at]
    rows = rows[np.argsort(times[rows], kind="stable")]
    order[at] = rows[order_by_number(numbers[rows])]
    return order


def _place_runs(numbers: Int64s, times: Int64s) -> Int64s | None:
    """Returns (number, time) of each row as one integer; None if these do not fit, or are not a few sorted runs."""
    # Most rows that are not in runs show it in the first few.
    begin = numbers[:_FIRST_ROWS]
    if not len(numbers) or np.count_nonzero(begin[1:] < begin[:-1]) >= _MAX_RUNS:
        return None
    base = int(times.min())
    span = int(times.max()) - base + 1
    if (int(numbers.max()) + 1) * span >= _MAX_PLACES:
        return None
    placed = numbers * span + (times - base)
    return placed if np.count_nonzero(placed[1:] < placed[:-1]) < _MAX_RUNS else None


def order_by_number(numbers: Int64s) -> Int64s:
    """Returns a stable order by number (from 0, at least one), in one pass per 16 bits: numpy sorts 16 bits by radix."""
    order = np.argsort((numbers & 0xFFFF).astype(np.uint16), kind="stable")
    highest, shift = int(numbers.max()), 16
    while highest >> shift:
        digits = ((numbers >> shift) & 0xFFFF).astype(np.uint16)
        order = order[np.argsort(digits[order], kind="stable")]
        shift += 16
    return order.astype(np.int64, copy=False)


def count_earlier(numbers: Int64s) -> Int64s:
    """Counts for each row the earlier rows with the same number (from 0)."""
    order = order_by_number(numbers) if len(numbers) else numbers
    ordered = numbers[order]
    earlier = np.empty(len(numbers), dtype=np.int64)
    earlier[order] = np.arange(len(numbers)) - np.searchsorted(ordered, ordered)
    return earlier


def find_keys(wanted: Keys, sorted_keys: Keys) -> Int64s:
    """Finds the positions of `wanted` in distinct keys sorted by (low, high); -1 for a key that is not there."""
    count = len(sorted_keys.low)
    if count == 0:
        return np.full(len(wanted.low), -1, dtype=np.int64)
    position = search_rows(sorted_keys.low, wanted.low)
    nearest = np.minimum(position, count - 1)
    same_low = sorted_keys.low[nearest] == wanted.low
    match = same_low & (sorted_keys.high[nearest] == wanted.high)
    for row in np.flatnonzero(same_low & ~match):  # two keys share their low half: NULL and 0, otherwise almost never
        at = int(position[row])
        while at < count and sorted_keys.low[at] == wanted.low[row]:
            if sorted_keys.high[at] == wanted.high[row]:
                nearest[row], match[row] = at, True
            at += 1
    return np.where(match, nearest, -1)


class TimeSearch:
    """Finds times in rows that are sorted by (group, time), for many groups at once.

    groups: int64 shape (rows,), dense numbers in ascending order; times: int64 shape (rows,), ascending in a group.
    numbered: how many groups may be searched for, if that is more than have rows.
    """

    def __init__(self, groups: Int64s, times: Int64s, numbered: int = 0) -> None:
        # (group, time) becomes one 64-bit number, in the fastest way in which that cannot overflow.
        numbered = max(numbered, int(groups.max(initial=-1)) + 1)
        place: _Place | None = _PlaceInSpan.of(times, numbered) or _PlaceInOwnSpans.of(groups, times, numbered)
        self._place = place or _PlaceByRank(np.unique(times))
        self._places = self._place(groups, times)

    def find_first(self, groups: Int64s, times: Int64s) -> Int64s:
        """Finds for each (group, time) the position of the group's first row with at least that time, or of its end."""
        return search_rows(self._places, self._place(groups, times))


class _Place(Protocol):
    """Numbers pairs of group and time in their order."""

    def __call__(self, groups: Int64s, times: Int64s) -> Int64s: ...


@dataclass(frozen=True)
class _PlaceInSpan:
    """Gives every group numbers for the span of all times; times before and after it have the number of its ends."""

    low: int
    high: int

    def __call__(self, groups: Int64s, times: Int64s) -> Int64s:
        # Of few times, `np.clip` takes four times as long.
        within = np.minimum(np.maximum(times, self.low), self.high)
        placed: Int64s = groups * (self.high - self.low + 1) + (within - self.low)
        return placed

    @classmethod
    def of(cls, times: Int64s, numbered: int) -> _PlaceInSpan | None:
        """Returns None if the numbers could overflow."""
        low, high = (int(times.min()), int(times.max()) + 1) if len(times) else (0, 0)
        return cls(low, high) if numbered * (high - low + 1) < _MAX_PLACES else None


@dataclass(frozen=True)
class _PlaceInOwnSpans:
    """Gives every group numbers for the span of its own times alone; begins, first, last: of each group, and one more."""

    begins: Int64s
    first: Int64s
    last: Int64s

    def __call__(self, groups: Int64s, times: Int64s) -> Int64s:
        groups = np.minimum(groups, len(self.begins) - 1)
        within = np.clip(times, self.first[groups], self.last[groups])
        return np.where(groups < 0, -1, self.begins[groups] + within)

    @classmethod
    def of(cls, groups: Int64s, times: Int64s, numbered: int) -> _PlaceInOwnSpans | None:
        """Returns None if the numbers could overflow."""
        counts = np.bincount(groups, minlength=numbered + 1)
        ends, has_rows = np.cumsum(counts), counts > 0
        # A group without rows has numbers too, and so have all groups after the last.
        first, last = np.zeros(numbered + 1, dtype=np.int64), np.zeros(numbered + 1, dtype=np.int64)
        first[has_rows], last[has_rows] = times[(ends - counts)[has_rows]], times[ends[has_rows] - 1] + 1
        sizes = last - first + 1
        if sizes.sum(dtype=np.float64) >= _MAX_PLACES:
            return None
        return cls(np.cumsum(sizes) - sizes - first, first, last)


@dataclass(frozen=True)
class _PlaceByRank:
    """Gives every group numbers for the ranks of all times; only of these ranks."""

    ranks: Int64s

    def __call__(self, groups: Int64s, times: Int64s) -> Int64s:
        return groups * (len(self.ranks) + 1) + np.searchsorted(self.ranks, times)


# Of what a search is made.
SEARCH_CLASSES = (TimeSearch, _PlaceInSpan, _PlaceInOwnSpans, _PlaceByRank)


def list_ranges(first: Int64s, counts: Int64s) -> Int64s:
    """Returns the numbers first, first + 1, ... of each range, one range after another."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(first - ends + counts, counts)


def list_between(first: Int64s, last: Int64s) -> Int64s:
    """Lists the positions in any of the ranges, ascending; `last` is inclusive."""
    rows = int(last.max(initial=-1)) + 1
    edges = np.bincount(first, minlength=rows + 1) - np.bincount(last + 1, minlength=rows + 1)
    return np.flatnonzero(np.cumsum(edges) > 0)


def search_rows(values: Int64s, wanted: Int64s) -> Int64s:
    """Finds for each wanted value the position of the first of the ascending values that is not below it, or their end.

    Wanted values that ascend are searched in blocks, each among the few values that lie between the ends of the block.
    """
    if len(wanted) <= _SEARCHED_AT_ONCE or bool((wanted[1:] < wanted[:-1]).any()):
        return values.searchsorted(wanted).astype(np.int64, copy=False)
    edges = [*np.searchsorted(values, wanted[::_SEARCHED_AT_ONCE]).tolist(), len(values)]
    found = np.empty(len(wanted), dtype=np.int64)
    for at, (low, high) in enumerate(pairwise(edges)):
        block = slice(at * _SEARCHED_AT_ONCE, (at + 1) * _SEARCHED_AT_ONCE)
        np.add(np.searchsorted(values[low:high], wanted[block]), low, out=found[block])
    return found

"""Finds the next row that compares with a value as it must, for many values at once and without a look at the rows between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lookback.core.values.columns import Column
from lookback.core.values.keys import Int64s

# Below all ranks and above them; nothing is above the last.
_LOW, _HIGH, _NOTHING = -(2**62), 2**62, 2**62 + 1
# A comparison as alternatives: a rank, or its negative, that is above the other one less some number.
_ABOVE = {"<": [(-1, 0)], "<=": [(-1, 1)], ">": [(1, 0)], ">=": [(1, 1)], "!=": [(1, 0), (-1, 0)]}


@dataclass(frozen=True)
class Compared:
    """A comparison `own symbol others` of a value of each row with one of each match; the values have one order."""

    symbol: str
    own: Column
    others: Column

    def find_ranks(self) -> Int64s:
        """Finds the ranks of the values of the rows, then of those of the matches; -1 for NULL and errors."""
        known = np.append(self.own.is_known(), self.others.is_known())
        ranks = np.full(len(known), -1)
        values = np.concatenate([self.own.values, self.others.values])[known]
        _, ranks[known] = np.unique(values, return_inverse=True)
        return ranks


class NextRows:
    """Rows, sorted so that those which equalities leave for a match are neighbours, and then as they were.

    order: the positions of the rows in this order, shape (rows,). compared: the comparisons that must all be true. The places
    of this class are those in this order.
    """

    def __init__(self, compared: Sequence[Compared], rows: int, matches: int) -> None:
        groups, orders = np.zeros(rows + matches, dtype=np.int64), list[tuple[str, Int64s]]()
        for each in compared:
            ranks = each.find_ranks()
            if each.symbol != "=":
                orders.append((each.symbol, ranks))
                continue
            pairs, known = groups * (len(ranks) + 1) + ranks, (groups >= 0) & (ranks >= 0)
            groups = np.full(len(ranks), -1)
            _, groups[known] = np.unique(pairs[known], return_inverse=True)
        own, self._groups = groups[:rows], groups[rows:]
        self.order: Int64s = np.argsort(own, kind="stable")
        self._span = rows + 1
        self._sorted = own[self.order] * self._span + self.order
        self._alternatives = [
            [self._rank_above(ranks, rows, *each) for each in _ABOVE[symbol]] for symbol, ranks in orders
        ]

    def _rank_above(self, ranks: Int64s, rows: int, sign: int, less: int) -> tuple[Peaks, Int64s]:
        own, others = ranks[:rows][self.order], ranks[rows:]
        return Peaks(np.where(own >= 0, sign * own, _LOW)), np.where(others >= 0, sign * others - less, _HIGH)

    def find_ranges(self, first: Int64s, last: Int64s) -> tuple[Int64s, Int64s]:
        """Finds for each match the first and the last place of the rows at positions from `first` to `last`.

        Only those that the equalities leave; the last place is below the first if there are none.
        """
        low = np.searchsorted(self._sorted, self._groups * self._span + first)
        high = np.searchsorted(self._sorted, self._groups * self._span + last, "right") - 1
        return low, np.where(self._groups >= 0, high, low - 1)

    def find_places(self, matches: Int64s, positions: Int64s) -> Int64s:
        """Finds for matches the place of the first row at a position or after it that the equalities leave."""
        return np.searchsorted(self._sorted, self._groups[matches] * self._span + positions)

    def find_next(self, matches: Int64s, places: Int64s) -> Int64s:
        """Finds for matches the place, from one on, before which no row satisfies all comparisons; beyond all if none does."""
        for alternatives in self._alternatives:
            places = np.minimum.reduce([peaks.find_next(places, bounds[matches]) for peaks, bounds in alternatives])
        return places


class Peaks:
    """Numbers by their places, and the highest of each two, four, eight, ... neighbours."""

    def __init__(self, numbers: Int64s) -> None:
        # What is above everything follows them, so that each search ends.
        level = np.full(1 << len(numbers).bit_length(), _LOW)
        level[: len(numbers)], level[len(numbers)] = numbers, _NOTHING
        self._levels = [level]
        while len(level) > 1:
            level = level.reshape(-1, 2).max(axis=1)
            self._levels.append(level)

    def find_next(self, places: Int64s, bounds: Int64s) -> Int64s:
        """Finds the first places, from some on, of numbers above bounds; the number of numbers if none is."""
        at, height, is_open = places.copy(), np.zeros(len(places), dtype=np.int64), np.ones(len(places), dtype=bool)
        for up, level in enumerate(self._levels):
            # All from `at` on is open; a node that begins a pair is as far as that pair.
            asked = np.flatnonzero(is_open & ((at & 1 > 0) | (up == len(self._levels) - 1)))
            is_above = level[at[asked]] > bounds[asked]
            is_open[asked[is_above]] = False
            at[asked[~is_above]] += 1
            at[is_open] >>= 1
            height[is_open] += 1
        for down in range(len(self._levels) - 2, -1, -1):
            lower = np.flatnonzero(height > down)
            left = 2 * at[lower]
            at[lower] = left + (self._levels[down][left] <= bounds[lower])
        return at

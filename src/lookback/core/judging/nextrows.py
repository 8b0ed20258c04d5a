"""Finds the next row that satisfies comparisons, for many matches at once and without visiting the rows in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lookback.core.values.columns import Column
from lookback.core.values.keys import Int64s

# A number below all ranks, one above them, and one above everything.
_LOW, _HIGH, _NOTHING = -(2**62), 2**62, 2**62 + 1
# Each comparison as alternatives (sign, less): sign * own rank > sign * other rank - less.
_ABOVE = {"<": [(-1, 0)], "<=": [(-1, 1)], ">": [(1, 0)], ">=": [(1, 1)], "!=": [(1, 0), (-1, 0)]}


@dataclass(frozen=True)
class Compared:
    """A comparison of the values of rows (`own`) with the values of matches (`others`), which have a common order."""

    symbol: str
    own: Column
    others: Column

    def find_ranks(self) -> Int64s:
        """Returns the ranks of the rows' values, then of the matches' values; -1 for NULL and errors."""
        known = np.append(self.own.is_known(), self.others.is_known())
        ranks = np.full(len(known), -1)
        values = np.concatenate([self.own.values, self.others.values])[known]
        _, ranks[known] = np.unique(values, return_inverse=True)
        return ranks


class NextRows:
    """Rows in an order in which all rows with the values that a match requires are adjacent.

    Rows with equal values keep their order. A place is an index into this order, a position one into the original rows.

    Attributes:
        order: The positions of the rows in this order, shape (rows,).
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
        """Finds for each match the first and last place of its rows at positions from `first` to `last`, inclusive.

        These are the rows that satisfy its equalities. If there are none, the last place is below the first.
        """
        low = np.searchsorted(self._sorted, self._groups * self._span + first)
        high = np.searchsorted(self._sorted, self._groups * self._span + last, "right") - 1
        return low, np.where(self._groups >= 0, high, low - 1)

    def find_places(self, matches: Int64s, positions: Int64s) -> Int64s:
        """Finds for matches the place of the first row from a position on that satisfies the equalities."""
        return np.searchsorted(self._sorted, self._groups[matches] * self._span + positions)

    def find_next(self, matches: Int64s, places: Int64s) -> Int64s:
        """Advances places to a lower bound of the next row that satisfies all comparisons; beyond all if none does."""
        for alternatives in self._alternatives:
            places = np.minimum.reduce([peaks.find_next(places, bounds[matches]) for peaks, bounds in alternatives])
        return places


class Peaks:
    """Numbers by place, with the maxima of aligned blocks of 2, 4, 8, ... numbers."""

    def __init__(self, numbers: Int64s) -> None:
        # A number above everything follows them, so that each search ends.
        level = np.full(1 << len(numbers).bit_length(), _LOW)
        level[: len(numbers)], level[len(numbers)] = numbers, _NOTHING
        self._levels = [level]
        while len(level) > 1:
            level = level.reshape(-1, 2).max(axis=1)
            self._levels.append(level)

    def find_next(self, places: Int64s, bounds: Int64s) -> Int64s:
        """Finds the first place, from each place on, with a number above its bound; the count of numbers if none is."""
        at, height, is_open = places.copy(), np.zeros(len(places), dtype=np.int64), np.ones(len(places), dtype=bool)
        for up, level in enumerate(self._levels):
            # All numbers from node `at` on are still open. The first node of a pair is left to the level above.
            checked = np.flatnonzero(is_open & ((at & 1 > 0) | (up == len(self._levels) - 1)))
            is_above = level[at[checked]] > bounds[checked]
            is_open[checked[is_above]] = False
            at[checked[~is_above]] += 1
            at[is_open] >>= 1
            height[is_open] += 1
        for down in range(len(self._levels) - 2, -1, -1):
            lower = np.flatnonzero(height > down)
            left = 2 * at[lower]
            at[lower] = left + (self._levels[down][left] <= bounds[lower])
        return at

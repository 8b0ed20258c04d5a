"""Finds the next item that satisfies comparisons, for many seekers at once, without visiting the items in between.

In a sequence, a seeker is a match that looks for rows, or a row that looks for a match which it ends:

    item            0   1   2   3   4   5
    ip              p   q   p   r   q   p
    n               5   1   7   2   9   3

    ip = 'p'        *       *           *      equalities: items with equal values are adjacent in a sorted order
    n > 6                   *       *          a comparison that stands alone: blocks of items have their maximum
    both                    *

A plain loop evaluates all other conditions on one item after another (`NextItems.find_nth`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lookback.core.expressions.compiling import TURNED
from lookback.core.values.columns import Column, Mask
from lookback.core.values.keys import Int64s, list_ranges

# On how many pairs of a seeker and an item a condition is evaluated at once.
MAX_PAIRS = 1 << 15
# How many items of a seeker are checked at once at most; the number doubles from check to check.
_MAX_ITEMS = 1024
# A number below all ranks, one above them, and one above everything.
_LOW, _HIGH, _NOTHING = -(2**62), 2**62, 2**62 + 1
# Each comparison as alternatives (sign, less): sign * item's rank > sign * seeker's rank - less.
_ABOVE = {"<": [(-1, 0)], "<=": [(-1, 1)], ">": [(1, 0)], ">=": [(1, 1)], "!=": [(1, 0), (-1, 0)]}
_OPERATORS = {
    "=": np.equal,
    "!=": np.not_equal,
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
}


@dataclass(frozen=True)
class Compared:
    """A comparison of the values of items (`own`) with the values of seekers (`others`), which have a common order."""

    symbol: str
    own: Column
    others: Column

    def find_ranks(self) -> Int64s:
        """Returns the ranks of the items' values, then of the seekers' values; -1 for NULL and errors."""
        known = np.append(self.own.is_known(), self.others.is_known())
        ranks = np.full(len(known), -1)
        values = np.concatenate([self.own.values, self.others.values])[known]
        _, ranks[known] = np.unique(values, return_inverse=True)
        return ranks

    def turn(self, at: Int64s) -> Compared:
        """Returns the comparison with swapped sides, in which the items at these places are the seekers."""
        return Compared(TURNED.get(self.symbol, self.symbol), self.others, self.own.take(at))

    def is_true(self) -> Mask:
        """Compares each item with the seeker at its place; both sides have as many values."""
        own, others = np.split(self.find_ranks(), 2)
        mask: Mask = _OPERATORS[self.symbol](own, others) & (own >= 0) & (others >= 0)
        return mask


class NextItems:
    """Items in an order in which all items with the values that a seeker requires are adjacent.

    Items with equal values keep their order. A place is an index into this order, a position one into the items.
    """

    def __init__(
        self, compared: Sequence[Compared], items: int, seekers: int, contained: Sequence[Contained] = ()
    ) -> None:
        groups, orders = np.zeros(items + seekers, dtype=np.int64), list[tuple[str, Int64s]]()
        for each in compared:
            ranks = each.find_ranks()
            if each.symbol != "=":
                orders.append((each.symbol, ranks))
                continue
            pairs, known = groups * (len(ranks) + 1) + ranks, (groups >= 0) & (ranks >= 0)
            groups = np.full(len(ranks), -1)
            _, groups[known] = np.unique(pairs[known], return_inverse=True)
        own, self._groups = groups[:items], groups[items:]
        self._order: Int64s = np.argsort(own, kind="stable")
        self._span = items + 1
        self._sorted = own[self._order] * self._span + self._order
        self._alternatives = [
            [self._rank_above(ranks, items, *each) for each in _ABOVE[symbol]] for symbol, ranks in orders
        ]
        self._contained = contained

    def _rank_above(self, ranks: Int64s, items: int, sign: int, less: int) -> tuple[Peaks, Int64s]:
        own, others = ranks[:items][self._order], ranks[items:]
        return Peaks(np.where(own >= 0, sign * own, _LOW)), np.where(others >= 0, sign * others - less, _HIGH)

    def find_nth(
        self, first: Int64s, last: Int64s, nth: int, holds: Callable[[Int64s, Int64s], Mask], at_once: int = 1
    ) -> Int64s:
        """Finds for each seeker the position of its nth item that satisfies a condition; -1 if there are fewer.

        Args:
            first: The position of the first item that each seeker may take.
            last: The position of the last one.
            nth: The number of the item, from 1.
            holds: Evaluates the condition for pairs of a seeker and the position of an item.
            at_once: How many items to check first.
        """
        found, left, size = np.full(len(first), -1), np.full(len(first), nth), at_once
        places, limits = self._find_ranges(first, last)
        pending, places = self._pass_over(np.arange(len(first)), places, limits)
        while len(pending):
            for begin in range(0, len(pending), max(1, MAX_PAIRS // size)):
                some = slice(begin, begin + max(1, MAX_PAIRS // size))
                lengths = np.minimum(limits[pending[some]] - places[some] + 1, size)
                owners, at = np.repeat(pending[some], lengths), self._order[list_ranges(places[some], lengths)]
                true = holds(owners, at)
                owners, at = owners[true], at[true]
                ranks = np.arange(len(owners)) - np.searchsorted(owners, owners) + 1
                is_nth = ranks == left[owners]
                found[owners[is_nth]] = at[is_nth]
                left -= np.bincount(owners, minlength=len(left))
            pending, places = pending[found[pending] < 0], places[found[pending] < 0] + size
            pending, places = self._pass_over(pending, places, limits)
            size = min(2 * size, _MAX_ITEMS)
        return found

    def _find_ranges(self, first: Int64s, last: Int64s) -> tuple[Int64s, Int64s]:
        """Finds the first and last place of each seeker's items at positions from `first` to `last`, inclusive.

        These are the items that satisfy its equalities. If there are none, the last place is below the first.
        """
        low = np.searchsorted(self._sorted, self._groups * self._span + first)
        high = np.searchsorted(self._sorted, self._groups * self._span + last, "right") - 1
        return low, np.where(self._groups >= 0, high, low - 1)

    def _pass_over(self, pending: Int64s, places: Int64s, limits: Int64s) -> tuple[Int64s, Int64s]:
        """Advances seekers to a lower bound of the next item for which all lookups hold; drops those without one."""
        is_near = places <= limits[pending]
        pending, places = pending[is_near], places[is_near]
        for alternatives in self._alternatives:
            places = np.minimum.reduce([peaks.find_next(places, bounds[pending]) for peaks, bounds in alternatives])
        for each in self._contained:
            near = np.flatnonzero(places <= limits[pending])
            nexts = each.find_next(pending[near], self._order[places[near]])
            places[near] = np.searchsorted(self._sorted, self._groups[pending[near]] * self._span + nexts)
        is_near = places <= limits[pending]
        return pending[is_near], places[is_near]


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


class Occurrences:
    """The places of values: `own` has the values in order, `others` those to look for."""

    def __init__(self, own: Column, others: Column) -> None:
        ranks = Compared("=", own, others).find_ranks()
        known = np.flatnonzero(ranks[: len(own)] >= 0)
        self._wanted, self._span = ranks[len(own) :], len(own) + 1
        self._sorted = np.append(np.sort(ranks[known] * self._span + known), _NOTHING)

    def find_next(self, wanted: Int64s, places: Int64s) -> Int64s:
        """Finds the first place, from each place on, of the values to look for; beyond all places if there is none."""
        base = self._wanted[wanted] * self._span
        found = self._sorted[np.searchsorted(self._sorted, base + places)] - base
        return np.where((self._wanted[wanted] >= 0) & (found < self._span), found, self._span)

    def find_last_before(self, places: Int64s) -> Int64s:
        """Finds for each value to look for its last place before a place; -1 if there is none."""
        base = self._wanted * self._span
        found = self._sorted[np.searchsorted(self._sorted, base + places) - 1] - base
        return np.where((self._wanted >= 0) & (found >= 0) & (found < places), found, -1)


class Contained:
    """`array_contains(a.x, y)`, or its negation: step `a` of each match took adjacent rows, and `y` is of a seeker.

    `begins` and `ends` are the places of the rows that the step took in each match; begins ascend. `own` has the values
    of all rows that the step may take, and `others` the values of the seekers.
    """

    def __init__(self, is_wanted: bool, begins: Int64s, ends: Int64s, own: Column, others: Column) -> None:
        self._is_wanted, self._begins, self._ends = is_wanted, begins, ends
        self._occurrences, self._is_known = Occurrences(own, others), others.is_known()
        self._peaks = Peaks(ends if is_wanted else -ends)

    def find_next(self, seekers: Int64s, matches: Int64s) -> Int64s:
        """Advances seekers to a lower bound of the next match that has the value, or with negation lacks it."""
        place = self._occurrences.find_next(seekers, self._begins[matches])
        # The matches from there on begin after the row that has the value.
        beyond = np.searchsorted(self._begins, place, "right")
        nexts = np.minimum(self._peaks.find_next(matches, place if self._is_wanted else -place - 1), beyond)
        if not self._is_wanted:
            nexts = np.where(place < self._ends[matches], nexts, matches)
        return np.where(self._is_known[seekers], nexts, len(self._begins))

"""Finds the rows that may complete the steps of a sequence, and divides them into groups that see rows in order.

A candidate sees the rows that arrived before it. A row that arrives late, l below, is unseen by those before it:

    arrival     1    2    3    4    5    6
    row         a    c1   c2   l    d    c3      in order of time: a  l  c1  c2  d  c3
    stretch     0    0    0    1    1    1       a stretch is a run of rows that arrived in order of time

    c3          sees all rows, so it belongs to the group of all rows
    c1, c2      see stretch 0 alone: a, c1, c2

So each group has rows that arrived in order for its candidates, and `MatchSearch` settles all groups together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lookback.core.judging.matches import KeyedRows, MatchSearch
from lookback.core.judging.once import OnceSearch, list_stages
from lookback.core.judging.steps import Steps
from lookback.core.values.columns import Mask
from lookback.core.values.keys import Int64s, TimeSearch, list_ranges
from lookback.core.values.times import NEVER_DUE
from lookback.core.values.windows import StepSequence

# How many rows of groups are settled at once.
_MAX_ROWS = 1 << 19


@dataclass(frozen=True)
class Candidates:
    """Rows that may complete the steps; all arrays have shape (candidates,).

    Attributes:
        at: Their positions.
        since: The number of the first row that counts for each.
        begin: The time of the first row that counts for each; with fixed expiry the time at which its match began.
    """

    at: Int64s
    since: Int64s
    begin: Int64s

    def take(self, index: Int64s) -> Candidates:
        """Returns the candidates at some positions."""
        return Candidates(self.at[index], self.since[index], self.begin[index])


class Settler:
    """Settles which candidates complete the steps.

    Args:
        steps: The steps.
        rows: The rows, also those that arrive after a candidate.
        spec: The sequence, which says how matches expire and which events they take.
    """

    def __init__(self, steps: Steps, rows: KeyedRows, spec: StepSequence) -> None:
        self._steps, self._rows, self._within = steps, rows, spec.within
        self._is_fixed, self._is_once = spec.expiry == "fixed", spec.take == "once"
        self._by_time = TimeSearch(rows.keys, rows.times)

    def _find_lows(self, at: Int64s, begin: Int64s | int) -> Int64s:
        """Finds the position of the first row that may count for each of some rows; `begin` is as in `Candidates`."""
        return self._by_time.find_first(self._rows.keys[at], np.maximum(self._rows.times[at] - self._within, begin))

    def find_possible(self, judged: Int64s, begin: int, *, until_ends: bool) -> Int64s:
        """Finds the rows that may complete the steps, or may have an error in the last condition.

        It uses the gates instead of the conditions, and counts every row of the window no matter when it arrived. So no
        step is reached later than it really is, and no candidate is missed.

        Args:
            judged: The positions of the rows that satisfy the last gate.
            begin: The time of the first row that counts.
            until_ends: Whether a row that satisfies `until` and has arrived excludes all rows before it.
        """
        steps, rows, lows = self._steps, self._rows, self._find_lows(judged, begin)
        untils = rows.find_able(steps.until)
        if until_ends and len(untils):
            before = np.searchsorted(untils, judged) - 1
            last = np.where(before >= 0, untils[before], -1)
            is_cut = (last >= lows) & (rows.numbers[last] < rows.numbers[judged])
            lows = np.where(is_cut, last + 1, lows)
        for number, each in enumerate(steps.steps):
            able = rows.find_able(number)
            # An error in the last condition counts even if too few rows satisfy it.
            least = each.step.at_least if each.own or number < steps.last else 1
            enough = np.append(able, len(rows.keys))[np.minimum(np.searchsorted(able, lows) + least - 1, len(able))]
            may = enough <= judged
            judged, lows = judged[may], enough[may] + 1
        return judged

    def settle(self, candidates: Candidates) -> tuple[Int64s, Mask]:
        """Finds the match that each candidate ends, and errors, as `MatchSearch` and `OnceSearch` return them."""
        taken = list_stages(self._steps) if self._is_once else self._steps.steps
        begins = np.full((len(candidates.at), len(taken)), -1)
        has_failed = np.zeros(len(candidates.at), dtype=bool)
        if not len(candidates.at):
            return begins, has_failed
        # The candidates of a group, in order: of one key and its limits, and in order among all rows or of one stretch.
        stretches, is_late = np.full(len(candidates.at), NEVER_DUE), ~self._rows.is_in_order[candidates.at]
        if is_late.any():
            stretches[is_late] = self._rows.stretches[candidates.at[is_late]]
        limits = np.stack([stretches, candidates.begin, candidates.since, self._rows.keys[candidates.at]])
        order = np.lexsort((candidates.at, *limits))
        limits, ordered = limits[:, order], candidates.take(order)
        is_first = np.append(True, (limits[:, 1:] != limits[:, :-1]).any(axis=0))
        starts, group = np.flatnonzero(is_first), np.cumsum(is_first) - 1
        lows = self._find_lows(ordered.at, ordered.begin)
        first, last = lows[starts], ordered.at[np.append(starts[1:], len(order)) - 1]
        # Several groups are settled at once.
        part = (np.cumsum(last - first + 1) // _MAX_ROWS)[group]
        for some in np.split(np.arange(len(order)), np.flatnonzero(np.diff(part)) + 1):
            groups = slice(int(group[some[0]]), int(group[some[-1]]) + 1)
            lengths = (last - first + 1)[groups]
            at, numbers = list_ranges(first[groups], lengths), np.repeat(np.arange(groups.start, groups.stop), lengths)
            is_seen = self._rows.numbers[at] >= limits[2, starts][numbers]
            if is_late.any():
                is_seen &= self._rows.stretches[at] <= limits[0, starts][numbers]
            at, numbers = at[is_seen], numbers[is_seen]
            places, span = numbers * len(self._rows.keys) + at, group[some] * len(self._rows.keys)
            ends, low = (np.searchsorted(places, span + each[some]) for each in (ordered.at, lows))
            found, has_failed[order[some]] = self._settle_group(self._take(at, numbers), ends, low)
            begins[order[some]] = np.where(found < 0, -1, at[found])
        return begins, has_failed

    def _settle_group(self, rows: KeyedRows, ends: Int64s, low: Int64s) -> tuple[Int64s, Mask]:
        """Settles the rows at `ends`, which have arrived after all rows before them; `low` are the first that count."""
        if self._is_once:
            return OnceSearch(self._steps, rows, ends, self._within).settle()
        untils = rows.find_able(self._steps.until)
        if len(untils) and not self._is_fixed:
            before = np.searchsorted(untils, ends) - 1
            low = np.where(before >= 0, np.maximum(low, untils[before] + 1), low)
        return MatchSearch(self._steps, rows, ends, low, self._is_fixed).settle()

    def _take(self, at: Int64s, keys: Int64s) -> KeyedRows:
        """Returns the rows at some positions, as those of these keys."""
        rows = self._rows
        return KeyedRows(
            keys, rows.times[at], rows.bits[at], rows.numbers[at], lambda name, places: rows.read(name, at[places])
        )

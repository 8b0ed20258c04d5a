"""Finds the rows that complete the steps of a sequence, for all keys at once.

A match begins at each row of step one. From there the steps take rows in order, so a match is fully determined by the
first rows of its steps:

    row        a1   a2   b1   a3   b2        steps: a, then b with the same number as the first a
    n          1    2    1    2    2
    from a1    a    a    b    .    .         ends at b1
    from a2         a    .    a    b         ends at b2
    from a3                   a    b         ends at b2, which alerts with its earliest beginning, a2

The steps are processed in turn, each for all beginnings together: a search finds the first row of the step. Then a
search finds the earliest beginning for each row of the last step. Neither search visits the rows in between, as long as
conditions are comparisons with earlier steps (`ip = element_at(a.ip, 1)`, `a.count >= 5`, `array_contains(a.ip, ip)`),
alone or joined by `and`.

A linked step is one whose condition reads earlier steps. Any other condition of a linked step is evaluated for each
pair of a row and an earlier beginning, so its cost grows with the square of the rows in a window. The same is true of a
message or evidence that needs all rows that a linked step took (`{b.count}`). If a step reads more than the first row
of a linked step, the rows are judged one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from typing import Any

import numpy as np

from lookback.core.expressions.compiling import (
    Comparison,
    Expression,
    find_comparisons,
    find_containments,
    find_read_first,
    find_thresholds,
)
from lookback.core.judging.matching import (
    Array,
    Candidates,
    KeyedRows,
    Part,
    Steps,
    list_between,
    to_objects,
)
from lookback.core.judging.nextrows import Compared, NextRows, Peaks
from lookback.core.rules.compiled import COUNT
from lookback.core.values.columns import Column, Mask, from_values
from lookback.core.values.keys import Int64s, list_ranges
from lookback.core.values.times import NEVER_DUE
from lookback.core.values.types import BIGINT, array

# How many rows to search at first for the first row of a step; doubles with each try, up to the second number.
_FIRST_ROWS, _MAX_ROWS = 8, 1024
# How many rows to search per match before checking for each row in which matches it satisfies the condition.
_MAX_SEARCHED = 24
# On how many pairs of a row and a match the condition is evaluated at once.
_MAX_PAIRS = 1 << 15
# Candidates out of order are settled by stretch if their windows have at least this many rows per stretch.
_MIN_ROWS_PER_STRETCH = 500
# How often the condition of a row may change from match to match; if it changes more often, each match is searched.
_MAX_CHANGES = 8


Find = Callable[[KeyedRows, Int64s], Candidates]


@dataclass(frozen=True)
class Settlement:
    """The result for rows that may complete the steps; all arrays have positions of rows.

    Attributes:
        open: The rows to judge one by one, shape (open,).
        starts: The first row that may count for each of them, shape (open,).
        complete: The rows that complete the steps.
        begins: The first row that each step took for them, shape (complete, steps).
        failed: The rows that do not complete the steps and have an error in the last condition for the earliest
            beginning.
        parts: The beginnings by which all rows but the open ones were settled.
    """

    open: Int64s
    starts: Int64s
    complete: Int64s
    begins: Int64s
    failed: Int64s
    parts: tuple[Beginnings, ...] = ()

    @property
    def needed(self) -> Int64s:
        """The positions of the rows that may count for a candidate that is open or complete."""
        return list_between(np.append(self.starts, self.begins[:, 0]), np.append(self.open, self.complete))


def leave_open(candidates: Candidates) -> Settlement:
    """Leaves all candidates to be judged one by one."""
    none = np.empty(0, dtype=np.int64)
    return Settlement(candidates.at, candidates.starts, none, none.reshape(0, len(candidates.able)), none)


def settle_candidates(steps: Steps, rows: KeyedRows, judged: Int64s, find: Find) -> Settlement:
    """Finds which rows complete the steps, as far as this can be settled for all of them at once.

    `judged` are the positions of rows that satisfy the last gate. `find` finds the candidates among them (see
    `find_candidates`).
    """
    found = find(rows, judged)
    if not all(step.own or _reads_first_rows(steps, at) for at, step in enumerate(steps.steps)):
        return leave_open(found)
    is_in_order = rows.is_in_order[found.at]
    others = found.take(~is_in_order)
    parts = [Beginnings(steps, rows, found.take(is_in_order), np.arange(len(rows.keys)))]
    late = _split_late(steps, rows, others, find) if len(others.at) else []
    if late is not None:
        parts, others = [*parts, *late], others.take(np.empty(0, dtype=np.int64))
    settled = [each.settle_all() for each in parts]
    complete, begins, failed = (np.concatenate(each) for each in zip(*settled, strict=True))
    return Settlement(others.at, others.starts, complete, begins, failed, tuple(parts))


def _split_late(steps: Steps, rows: KeyedRows, others: Candidates, find: Find) -> list[Beginnings] | None:
    """Makes beginnings for candidates that are out of order, one per stretch; None if too few rows.

    A stretch is a run of rows of a key that arrived in order of time. If later stretches are left out, the rows up to
    the end of a stretch arrived in order. So each stretch has its own beginnings, for all keys at once.
    """
    needed = others.needed
    stretches = rows.take(needed).number_stretches()
    own = stretches[np.searchsorted(needed, others.at)]
    numbers = np.unique(own)
    if (others.at - others.starts).sum() < _MIN_ROWS_PER_STRETCH * len(numbers):
        return None
    parts = []
    for number in numbers.tolist():
        some = others.take(own == number)
        places = some.needed
        places = places[stretches[np.searchsorted(needed, places)] <= number]
        part = rows.take(places)
        found = find(part, np.searchsorted(places, some.at))
        parts.append(Beginnings(steps, part, found, places))
    return parts


def _reads_first_rows(steps: Steps, number: int) -> bool:
    """Returns whether the condition of a step reads only the first rows of the linked steps before it."""
    condition = steps.steps[number].condition
    linked = {step.step.name for step in steps.steps[:number] if not step.own}
    read = {name for name in condition.fields if name.partition(".")[0] in linked}
    return not read or read <= find_read_first(condition.sql)


def _settle_step(steps: Steps, rows: KeyedRows, known: Candidates, number: int) -> Candidates:
    """Finds where a step before the last begins, and the earliest place where the next step may begin.

    In `known`, `at` is the last row of each match. `first` has the begins of the steps before this one, and the
    earliest begin of this one. Returns the matches in which the step has enough rows before the last row.
    """
    step, able = steps.steps[number], known.able[number]
    if step.own:
        begins, enough = known.first[number], known.first[number] + step.step.at_least - 1
    else:
        begins, enough = _LinkedStep(steps, rows, known, number).find_begins()
    reached = np.append(able, NEVER_DUE)[np.minimum(enough, len(able))]
    following, ends = (np.searchsorted(known.able[number + 1], each, "right") for each in (reached, known.at))
    return replace(known, first=[*known.first[:number], begins, following]).take(following < ends)


def _mark_few(steps: Steps, rows: KeyedRows, known: Candidates, last: Int64s) -> Mask:
    """Marks matches in which no step before the last takes too many rows; `last` is where the last step begins."""
    is_few, first = np.ones(len(last), dtype=bool), [*known.first[:-1], last]
    for number, step in enumerate(steps.steps[:-1]):
        most = step.step.at_most
        if most is None or not len(last):
            continue
        able, end = known.able[number], known.able[number + 1][first[number + 1]]
        ends = np.searchsorted(able, end)
        if step.own:
            is_few &= ends - first[number] <= most
        else:
            is_few &= _LinkedStep(steps, rows, known, number).find_taken(first[number], ends, most) >= ends
    return is_few


class Beginnings:
    """The matches that begin at rows of step one, and the candidates that end them.

    The rows arrived in order. `found` are the candidates, and `places` are the positions of the rows among the
    caller's.
    """

    def __init__(self, steps: Steps, rows: KeyedRows, found: Candidates, places: Int64s) -> None:
        self._steps, self._rows, self._found, self._places = steps, rows, found, places
        able, low = found.able, found.first[0]
        # The rows of step one up to each candidate, and the candidates among the rows of the last step.
        self._high = np.searchsorted(able[0], found.at, "right") - 1
        self._own: Int64s = np.searchsorted(able[-1], found.at)
        begins = list_between(low, self._high)
        limits = found.at[np.searchsorted(low, begins, "right") - 1] if len(begins) else begins
        known = Candidates(limits, able[0][begins], able, [begins])
        for number in range(steps.last):
            if len(known.at):
                known = _settle_step(steps, rows, known, number)
        if not len(known.at):
            known = replace(known, first=[begins[:0]] * len(able))
        self._known = known
        last = steps.steps[-1]
        self._linked = None if last.own or not len(known.at) else _LinkedStep(steps, rows, known, steps.last, self._own)
        # For each match, places among the rows of the last step: the first that it takes, the one with which it has
        # enough, and the first one too many.
        self._starts = known.first[-1] if self._linked is None else self._linked.find_first()
        self._enough = self._take_more(last.step.at_least - 1)
        self._excess = None if last.step.at_most is None else self._take_more(last.step.at_most)
        has_begun = np.flatnonzero(self._starts >= 0)
        begun = known.take(has_begun)
        # The matches that reach the last step.
        self._reached = has_begun[_mark_few(steps, rows, begun, self._starts[has_begun])]

    def _take_more(self, number: int) -> Int64s:
        """Finds the row that the last step of each match takes `number` rows after its first; beyond all if none."""
        if self._linked is None:
            return self._starts + number
        begins = np.where(self._starts < 0, len(self._found.able[-1]), self._starts)
        ends = np.searchsorted(self._found.able[-1], self._known.at, "right")
        return self._linked.find_taken(begins, ends, number)

    def settle_all(self) -> tuple[Int64s, Int64s, Int64s]:
        """Finds the candidates that complete the steps, the first row that each step took, and failed candidates."""
        numbers = np.arange(len(self._found.at))
        matches, has_failed = self._settle(numbers, self._found.first[0])
        is_complete, at = matches >= 0, self.list_candidates()
        return at[is_complete], self._list_begins(matches[is_complete]), at[has_failed]

    def list_candidates(self) -> Int64s:
        """Lists the positions of the candidates, by their numbers."""
        return self._places[self._found.at]

    def settle_after(self, number: int, time: int) -> tuple[list[int] | None, bool]:
        """Settles a candidate if only rows after a time count.

        Returns the positions of the first row that each step took (None if the candidate does not complete the steps),
        and whether it has failed.
        """
        able, low, high = self._found.able[0], self._found.first[0][number], self._high[number]
        later = low + np.searchsorted(self._rows.times[able[low : high + 1]], time, "right")
        (match,), (has_failed,) = self._settle(np.array([number]), np.array([later]))
        return (None if match < 0 else self._list_begins(np.array([match]))[0].tolist()), bool(has_failed)

    def _list_begins(self, matches: Int64s) -> Int64s:
        """Returns the positions of the first row that each step takes, shape (matches, steps)."""
        able, first = self._found.able, [*self._known.first[:-1], self._starts]
        begins = [rows[each[matches]] for rows, each in zip(able, first, strict=True)]
        return self._places[np.stack(begins, axis=1)]

    def _settle(self, numbers: Int64s, lows: Int64s) -> tuple[Int64s, Mask]:
        """Finds the earliest match that each candidate ends, -1 for none, and which candidates without one have failed.

        `lows` are the places of the first row of step one that counts for each.
        """
        found, has_failed = self._find_matches(numbers, lows), np.zeros(len(numbers), dtype=bool)
        if self._linked is not None:
            left = np.flatnonzero(found < 0)
            has_failed[left] = self._find_failed(self._linked, numbers[left], lows[left])
        return found, has_failed

    def _find_matches(self, numbers: Int64s, lows: Int64s) -> Int64s:
        """Finds the earliest match that each candidate ends, -1 for none."""
        found, own = np.full(len(numbers), -1), self._own[numbers]
        begins = self._known.first[0][self._reached]
        first, last = np.searchsorted(begins, lows), np.searchsorted(begins, self._high[numbers], "right") - 1
        is_open = first <= last
        searched = list_between(first[is_open], last[is_open])
        if not len(searched):
            return found
        search = _Search(self._list_ends(self._reached[searched]), own)
        first, last = np.searchsorted(searched, first), np.searchsorted(searched, last, "right") - 1
        earliest = search.run(first, np.where(is_open, last, first - 1))
        is_found = earliest >= 0
        found[is_found] = self._reached[searched[earliest[is_found]]]
        return found

    def _list_ends(self, matches: Int64s) -> _Ends:
        first = [each[matches] for each in self._known.first[:-1]]
        taken = [] if self._linked is None else self._linked.find_ends(first, self._starts[matches])
        excess = None if self._excess is None else self._excess[matches]
        return _Ends(self._linked, self._enough[matches], excess, first, taken)

    def _find_failed(self, linked: _LinkedStep, numbers: Int64s, lows: Int64s) -> Mask:
        """Marks the candidates for which the last condition has an error in the match with the earliest beginning."""
        has_failed: Mask = np.zeros(len(numbers), dtype=bool)
        begins, own = self._known.first[0], self._own[numbers]
        earliest = np.minimum(np.searchsorted(begins, lows), len(begins) - 1)
        is_judged = (begins[earliest] == lows) & (self._known.first[-1][earliest] <= own)
        if self._excess is not None:
            is_judged &= own <= self._excess[earliest]
        at = np.flatnonzero(is_judged)
        if not len(at):
            return has_failed
        known, places, starts = self._known.take(earliest[at]), own[at], self._starts[earliest[at]]
        starts = np.where(starts < 0, places, np.minimum(starts, places))
        first = known.first[:-1]
        result, _ = linked.evaluate(places, first, linked.find_ends(first, starts))
        if result.error is not None and result.error.any():
            failed = np.flatnonzero(result.error)
            has_failed[at[failed]] = _mark_few(self._steps, self._rows, known.take(failed), starts[failed])
        return has_failed


@dataclass(frozen=True)
class _Ends:
    """The candidates that end each match, as places among the rows of the last step; arrays have shape (matches,).

    Attributes:
        linked: The last step, if it reads earlier steps.
        enough: The first candidate.
        excess: The first row that is one too many; None without a limit.
        first: The places where the rows of each step before the last begin.
        taken: The places where they end.
    """

    linked: _LinkedStep | None
    enough: Int64s
    excess: Int64s | None
    first: list[Int64s]
    taken: list[Int64s]

    def find_true(self, matches: Int64s, own: Int64s) -> Mask:
        """Marks the pairs of a match and a candidate that ends it."""
        ends = self.enough[matches] <= own
        if self.excess is not None:
            ends &= own < self.excess[matches]
        if self.linked is not None:
            at = matches[ends]
            result, _ = self.linked.evaluate(
                own[ends], [each[at] for each in self.first], [each[at] for each in self.taken]
            )
            ends[ends] = result.is_true()
        return ends

    def list_compared(self, own: Int64s) -> list[Compared]:
        """Lists the comparisons that hold if a candidate ends a match."""
        compared = [Compared("<=", Column(BIGINT, self.enough), Column(BIGINT, own))]
        if self.excess is not None:
            compared.append(Compared(">", Column(BIGINT, self.excess), Column(BIGINT, own)))
        # For a few matches, evaluating the condition is faster than preparing a search.
        if self.linked is not None and len(self.enough) > _MAX_SEARCHED:
            compared += self.linked.list_compared_back(own, self.first, self.taken)
        return compared

    def list_contained(self, own: Int64s) -> list[_Contained]:
        """Lists the arrays that must contain, or must not contain, a value of a candidate that ends a match."""
        if self.linked is None or len(self.enough) <= _MAX_SEARCHED:
            return []
        return self.linked.list_contained(own, self.first, self.taken)


class _Search:
    """Searches for the earliest match that each candidate ends, and skips matches that it cannot end."""

    def __init__(self, ends: _Ends, own: Int64s) -> None:
        self._ends, self._own = ends, own
        self._rows = NextRows(ends.list_compared(own), len(ends.enough), len(own))
        self._contained = ends.list_contained(own)

    def run(self, first: Int64s, last: Int64s) -> Int64s:
        """Searches the matches from `first` to `last`, which is empty if `last` is lower; returns -1 for none."""
        found = np.full(len(first), -1)
        places, limits = self._rows.find_ranges(first, last)
        pending, size = np.flatnonzero(places <= limits), 1
        pending, places = self._pass_over(pending, places[pending], limits)
        while len(pending):
            at_once = max(1, _MAX_PAIRS // size)
            for begin in range(0, len(pending), at_once):
                some = slice(begin, begin + at_once)
                lengths = np.clip(limits[pending[some]] - places[some] + 1, 0, size)
                owners, matches = (
                    np.repeat(pending[some], lengths),
                    self._rows.order[list_ranges(places[some], lengths)],
                )
                ends = self._ends.find_true(matches, self._own[owners])
                ended, at = np.unique(owners[ends], return_index=True)
                found[ended] = matches[ends][at]
            left = (found[pending] < 0) & (places + size <= limits[pending])
            pending, places = self._pass_over(pending[left], places[left] + size, limits)
            size = min(2 * size, _MAX_ROWS)
        return found

    def _pass_over(self, pending: Int64s, places: Int64s, limits: Int64s) -> tuple[Int64s, Int64s]:
        """Advances to the next match that each candidate may end, and drops candidates without one."""
        places = self._rows.find_next(pending, places)
        for each in self._contained:
            near = np.flatnonzero(places <= limits[pending])
            nexts = each.find_next(pending[near], self._rows.order[places[near]])
            places[near] = self._rows.find_places(pending[near], nexts)
        is_near = places <= limits[pending]
        return pending[is_near], places[is_near]


class _Contained:
    """`array_contains(a.x, y)`, or its negation: step `a` of each match took adjacent rows, and `y` is of a candidate.

    `begins` and `ends` are the places of the rows that the step took in each match; begins ascend. `own` has the values
    of the rows from the place `low` on, and `others` the values of the candidates.
    """

    def __init__(self, is_wanted: bool, begins: Int64s, ends: Int64s, low: int, own: Column, others: Column) -> None:
        self._is_wanted, self._begins, self._ends = is_wanted, begins, ends
        ranks = Compared("=", own, others).find_ranks()
        known = np.flatnonzero(ranks[: len(own)] >= 0)
        self._wanted, self._span = ranks[len(own) :], low + len(own) + 1
        self._sorted = np.sort(ranks[known] * self._span + low + known)
        self._peaks = Peaks(ends if is_wanted else -ends)

    def find_next(self, candidates: Int64s, matches: Int64s) -> Int64s:
        """Advances candidates to a lower bound of the next match that has the value, or with negation lacks it."""
        wanted, begins = self._wanted[candidates], self._begins[matches]
        at = np.searchsorted(self._sorted, wanted * self._span + begins)
        found = np.append(self._sorted, -1)[at]
        is_there = (found >= 0) & (found // self._span == wanted)
        place = np.where(is_there, found - wanted * self._span, self._span)
        # The matches from there on begin after the row that has the value.
        beyond = np.searchsorted(self._begins, place, "right")
        bounds = place if self._is_wanted else -place - 1
        nexts = np.minimum(self._peaks.find_next(matches, bounds), beyond)
        if not self._is_wanted:
            nexts = np.where(place < self._ends[matches], nexts, matches)
        return np.where((wanted >= 0) & (is_there | (not self._is_wanted)), nexts, len(self._begins))


class _LongestPart(Part):
    """The values of all rows that a step can have taken, of which it has taken at least `least`.

    Lengths are left to `find_thresholds`.

    Attributes:
        has_guessed: Whether a value was read that may differ if the step has not taken all rows.
        until: If the rows begin later, up to this place, all values read are the same.
    """

    __slots__ = ("has_guessed", "least", "until")

    def __init__(self, values: Array, begin: int, end: int, least: int) -> None:
        super().__init__(values, begin, end)
        self.least, self.has_guessed, self.until = least, False, end

    def __len__(self) -> int:
        self.has_guessed |= self._end - self._begin > self.least
        return self._end - self._begin

    def __getitem__(self, at: Any) -> Any:
        length = self._end - self._begin
        self.has_guessed |= length > self.least and not 0 <= at < self.least
        if 0 <= at < length:
            same = self._array.find_same(self._begin + at)
            self.until = min(self.until, min(same, self._end - 1) - at)
        elif -length <= at < 0:
            self.until = min(self.until, self._end + at)
        return super().__getitem__(at)

    def __contains__(self, value: object) -> bool:
        at = self._array.find_first(value, self._begin, self._end)
        if at is None:
            return False
        self.has_guessed |= at - self._begin >= self.least
        last = self._array.find_last(value, at, self._end)
        self.until = min(self.until, at if last is None else last)
        return True

    def __iter__(self) -> Any:
        return iter([self[at] for at in range(len(self))])


@dataclass(frozen=True)
class _Matches:
    """Matches in order; all arrays have shape (matches,).

    Attributes:
        first: For each step before the last, the place of its first row.
        cursor: The place of the first row that may be the first of the last step.
        limit: The place of the last row that may be the first of the last step.
    """

    first: list[Int64s]
    cursor: Int64s
    limit: Int64s

    def take(self, index: Mask | Int64s) -> _Matches:
        """Returns the matches at these positions or of a mask."""
        return _Matches([each[index] for each in self.first], self.cursor[index], self.limit[index])


@dataclass(frozen=True)
class _Scan:
    """A search for rows of matches.

    Attributes:
        matches: All matches.
        rows: The rows to search.
        places: The places of these rows.
        pending: The numbers of the matches that are still open.
        cursor: Where the next row of each open match is in `rows`.
        limit: Where the last row of each open match is in `rows`.
        size: How many rows to check next.
    """

    matches: _Matches
    rows: NextRows
    places: Int64s
    pending: Int64s
    cursor: Int64s
    limit: Int64s
    size: int

    def move(self, is_left: Mask, size: int) -> _Scan:
        """Advances the matches that `is_left` marks to the next `size` rows that satisfy the comparisons."""
        left = is_left[self.pending] & (self.cursor + self.size <= self.limit)
        pending, limit = self.pending[left], self.limit[left]
        cursor = self.rows.find_next(pending, self.cursor[left] + self.size)
        near = cursor <= limit
        return replace(self, pending=pending[near], cursor=cursor[near], limit=limit[near], size=min(size, _MAX_ROWS))


class _LinkedStep:
    """A step whose condition reads earlier steps, over matches of rows that arrived in order.

    It reads only the first rows of the linked steps before it. `known` are the matches, with the last row of each as
    `at`. `judged` are the places of further rows to judge that matches do not reach.
    """

    def __init__(
        self, steps: Steps, rows: KeyedRows, known: Candidates, number: int, judged: Int64s | None = None
    ) -> None:
        self._steps, self._rows, self._known, self._number = steps, rows, known, number
        self._step, self._condition = steps.steps[number].step, steps.steps[number].condition
        self._before, self._first = steps.steps[number - 1].step, known.first[:number]
        self._able = known.able[number]
        # The place among the rows of the step where the last row of each match is or would be.
        self._places: Int64s = np.searchsorted(self._able, known.at)
        # The first place from which fields of each step are read.
        self._lows = [int(each.min()) for each in known.first[: number + 1]]
        read = self._places if judged is None else np.append(self._places, judged)
        self._read = min(self._lows[-1], int(read.min())), int(read.max()) + 1
        self._arrays: dict[str, Array] = {}
        self._columns: dict[str, Column] = {}

    def find_begins(self) -> tuple[Int64s, Int64s]:
        """Finds the first row of the step before each candidate, and the row with which the step has enough.

        Returns places; beyond all rows if there is none.
        """
        starts = self._find_starts(_Matches(self._first, self._known.first[self._number], self._places - 1))
        begins = np.where((starts >= 0) & (starts < self._places), starts, len(self._able))
        return begins, self.find_taken(begins, self._places, self._step.at_least - 1)

    def find_first(self) -> Int64s:
        """Finds the place of the first row in each match, including its last row, that qualifies; -1 for none."""
        return self._find_starts(_Matches(self._first, self._known.first[self._number], self._places))

    def find_ends(self, first: Sequence[Int64s], places: Int64s) -> list[Int64s]:
        """Finds the places where the rows of the earlier steps end when rows of this step arrive."""
        return [*self._find_ends(first)[:-1], self._find_rank(places)]

    def list_compared_back(self, own: Int64s, first: Sequence[Int64s], ends: Sequence[Int64s]) -> list[Compared]:
        """Lists the comparisons in the condition, of matches with candidates at the places `own`."""
        compared = []
        for each in _find_linked(self._condition):
            of_matches, _ = self.evaluate(ends[0], first, ends, None, each.right)
            of_candidates, _ = self.evaluate(own, (), (), None, each.left)
            compared.append(Compared(each.turn().symbol, of_matches, of_candidates))
        return compared

    def list_contained(self, own: Int64s, first: Sequence[Int64s], ends: Sequence[Int64s]) -> list[_Contained]:
        """Lists the array_contains calls in the condition, of matches with candidates at the places `own`."""
        contained = []
        for each in find_containments(self._condition):
            before, _, name = each.array.partition(".")
            number = self._steps.numbers[before]
            # Beginnings ascend from match to match, and each step took adjacent rows.
            if all(step.own for step in self._steps.steps[: number + 1]):
                values = from_values(self._steps.fields[name], self.read_array(each.array, number).values)
                others, _ = self.evaluate(own, (), (), None, each.value)
                contained.append(
                    _Contained(each.is_wanted, first[number], ends[number], self._lows[number], values, others)
                )
        return contained

    def find_taken(self, begins: Int64s, ends: Int64s, number: int) -> Int64s:
        """Finds the place of the row that the step takes `number` rows after its first; beyond all if there is none.

        Args:
            begins: Where the step begins for each candidate; beyond all if it does not.
            ends: The places up to which to search.
            number: How many rows after the first.
        """
        found = begins.copy()
        at = np.flatnonzero(begins < len(self._able))
        if number == 0 or not len(at):
            return found
        matches = _Matches([each[at] for each in self._first], begins[at] + 1, ends[at] - 1)
        known = self.find_ends(matches.first, begins[at])
        taken = np.full(len(matches.limit), len(self._able))
        left, scan = np.full(len(taken), number), self._scan(matches, known)
        while len(scan.pending):
            for owners, places in self._evaluate_next(scan, known):
                ranks = np.arange(len(owners)) - np.searchsorted(owners, owners) + 1
                is_last = ranks == left[owners]
                taken[owners[is_last]] = places[is_last]
                left -= np.bincount(owners, minlength=len(left))
            scan = scan.move(left > 0, 2 * scan.size)
        found[at] = taken
        return found

    def _find_ends(self, first: Sequence[Int64s]) -> list[Int64s]:
        """Finds where the rows of each step but the last two end; the end of the step before the last is still open."""
        able = self._known.able
        following = [able[number + 1][first[number + 1]] for number in range(len(first) - 1)]
        return [*(np.searchsorted(able[number], each) for number, each in enumerate(following)), first[-1]]

    def _find_rank(self, places: Int64s) -> Int64s:
        """Finds where the rows of the previous step end when rows of this step arrive."""
        rank: Int64s = np.searchsorted(self._known.able[self._number - 1], self._able[places])
        return rank

    def _find_starts(self, matches: _Matches) -> Int64s:
        """Finds the place of the first row up to the limit of each match that satisfies the condition; -1 for none."""
        starts, scan = np.full(len(matches.limit), -1), self._scan(matches)
        searched, can_go_by_row = 0, self._thresholds is not None
        while len(scan.pending):
            if can_go_by_row and searched >= _MAX_SEARCHED:
                can_go_by_row, found = False, self._find_starts_by_row(matches.take(scan.pending))
                if found is not None:
                    starts[scan.pending] = found
                    break
            for owners, places in self._evaluate_next(scan):
                some, at = np.unique(owners, return_index=True)
                starts[some] = places[at]
            searched, scan = searched + scan.size, scan.move(starts < 0, 2 * scan.size)
        return starts

    def _scan(self, matches: _Matches, ends: Sequence[Int64s] | None = None) -> _Scan:
        """Starts a search of the rows from the cursor to the limit of each match; `ends` is as in `_evaluate_next`."""
        is_open = matches.cursor <= matches.limit
        places = list_between(matches.cursor[is_open], matches.limit[is_open])
        compared = self._list_compared(matches, places, ends) if len(places) else []
        rows = NextRows(compared, len(places), len(is_open))
        cursor, limit = (np.searchsorted(places, each) for each in (matches.cursor, matches.limit))
        low, high = rows.find_ranges(cursor, np.where(is_open, limit, cursor - 1))
        scan = _Scan(matches, rows, places[rows.order], np.arange(len(low)), low, high, 0)
        # Most rows that satisfy the comparisons also satisfy the condition.
        return scan.move(is_open, 1 if compared else _FIRST_ROWS)

    def _list_compared(self, matches: _Matches, places: Int64s, ends: Sequence[Int64s] | None) -> list[Compared]:
        """Lists the comparisons in the condition, of rows at these places with the known values of each match."""
        least, known, compared = None, ends, list[Compared]()
        if known is None:
            most = self._find_rank(np.maximum(matches.limit, matches.cursor))
            known = [*self._find_ends(matches.first)[:-1], most]
            least = np.minimum(most - matches.first[-1], self._before.at_least)
        for each in _find_linked(self._condition):
            if ends is None and f"{self._before.name}.{COUNT}" in each.right.fields:
                continue
            others, parts = self.evaluate(matches.cursor, matches.first, known, least, each.right)
            if not any(part.has_guessed for listed in parts for part in listed):
                own, _ = self.evaluate(places, (), (), None, each.left)
                compared.append(Compared(each.symbol, own, others))
        return compared

    def _evaluate_next(self, scan: _Scan, ends: Sequence[Int64s] | None = None) -> Iterator[tuple[Int64s, Int64s]]:
        """Yields batches of match numbers and the places of the next rows that satisfy the condition for them.

        `ends` are the places where the rows of the earlier steps of each match end; None if the step just before ends
        with the row.
        """
        step = max(1, _MAX_PAIRS // scan.size)
        for begin in range(0, len(scan.pending), step):
            own = slice(begin, begin + step)
            lengths = np.clip(scan.limit[own] - scan.cursor[own] + 1, 0, scan.size)
            of_match = np.repeat(scan.pending[own], lengths)
            places = scan.places[list_ranges(scan.cursor[own], lengths)]
            first = [each[of_match] for each in scan.matches.first]
            if ends is None:
                known = self.find_ends(first, places)
            else:
                known = [each[of_match] for each in ends]
            result, _ = self.evaluate(places, first, known)
            true = result.is_true()
            yield of_match[true], places[true]

    @cached_property
    def _thresholds(self) -> Int64s | None:
        """The numbers of rows of the previous step at which the condition may change, sorted.

        None if the condition reads other steps or does anything with the number but compare it with constants, or if
        the beginnings of matches do not ascend.
        """
        name = self._before.name
        if not all(step.own for step in self._steps.steps[: self._number]):
            return None
        if any("." in each and each.partition(".")[0] != name for each in self._condition.fields):
            return None
        numbers = find_thresholds(self._condition.sql, COUNT)
        return None if numbers is None else np.array(sorted(numbers), dtype=np.int64)

    def _find_starts_by_row(self, matches: _Matches) -> Int64s | None:
        """Does the same as `_find_starts` without a search: finds for each row the matches in which it qualifies.

        Many matches give a row the same result, because they only differ in where the previous step begins, and its
        last rows are the same until they are left out. Returns None if the result may change too often from match to
        match.
        """
        begins, places = matches.first[-1], list_between(matches.cursor, matches.limit)
        low, high = np.searchsorted(matches.limit, places), np.searchsorted(matches.cursor, places, "right") - 1
        ends, found = self._find_rank(places), list[tuple[Int64s, Int64s, Int64s]]()
        for _ in range(_MAX_CHANGES):
            true, until = self._find_validity(places, begins[low], ends)
            found.append((low[true], places[true], until[true]))
            low = np.searchsorted(begins, until, "right")
            left = low <= high
            places, low, high, ends = places[left], low[left], high[left], ends[left]
            if not len(places):
                return _sweep(matches, [np.concatenate(each) for each in zip(*found, strict=True)])
        return None

    def _find_validity(self, places: Int64s, begins: Int64s, ends: Int64s) -> tuple[Mask, Int64s]:
        """Evaluates the condition for rows and begins of the previous step, and up to which begin the result holds."""
        assert self._thresholds is not None
        true, until = np.zeros(len(places), dtype=bool), ends.copy()
        for begin in range(0, len(places), _MAX_PAIRS):
            some = slice(begin, begin + _MAX_PAIRS)
            first = [begins[some]] * self._number
            result, parts = self.evaluate(places[some], first, [*first[:-1], ends[some]])
            true[some] = result.is_true()
            for each in parts:
                same = np.fromiter((part.until for part in each), dtype=np.int64, count=len(each))
                until[some] = np.minimum(until[some], same + self._lows[self._number - 1])
        # The highest threshold that the number of rows still reaches.
        at = np.searchsorted(self._thresholds, ends - begins, "right") - 1
        kept = np.append(self._thresholds, 0)[at]
        return true, np.maximum(begins, np.where(at >= 0, np.minimum(until, ends - kept), until))

    def evaluate(
        self,
        places: Int64s,
        first: Sequence[Int64s],
        ends: Sequence[Int64s],
        least: Int64s | None = None,
        condition: Expression | None = None,
    ) -> tuple[Column, list[list[_LongestPart]]]:
        """Evaluates the condition for rows, given the rows of the earlier steps.

        Args:
            places: The places of the rows.
            first: Where the rows of each earlier step begin.
            ends: Where they end, exclusive.
            least: How many of them the previous step has taken at least; None for all.
            condition: The part of the condition to evaluate; None for the whole condition.

        Returns:
            The result, and the arrays that were read from the earlier steps.
        """
        condition = condition or self._condition
        columns, parts = dict[str, Column](), list[list[_LongestPart]]()
        for name in condition.fields:
            before, _, own = name.partition(".")
            if not own:
                columns[name] = self._read_field(name, places)
                continue
            number = self._steps.numbers[before]
            # For a linked step this also counts rows that it did not take, but only its first row is read.
            counts = ends[number] - first[number]
            if own == COUNT:
                columns[name] = Column(BIGINT, counts)
                continue
            low, is_open = self._lows[number], number == self._number - 1 and least is not None
            most = least if is_open and least is not None else counts
            figures = (first[number] - low).tolist(), (ends[number] - low).tolist(), most.tolist()
            values = self.read_array(name, number)
            listed = [_LongestPart(values, *each) for each in zip(*figures, strict=True)]
            parts.append(listed)
            columns[name] = Column(array(self._steps.fields[own]), to_objects(listed))
        return condition.evaluate(columns, len(places)), parts

    def _read_field(self, name: str, places: Int64s) -> Column:
        """Reads a field of rows that the step may take, and caches the whole column if there are many rows."""
        low, high = self._read
        column = self._columns.get(name)
        if column is None and len(places) < high - low:
            return self._make_column(name, self._able[places])
        if column is None:
            column = self._make_column(name, self._able[low:high])
            self._columns[name] = column
        return column.take(places - low)

    def _make_column(self, name: str, able: Int64s) -> Column:
        return self._steps.make_column(name, lambda each: self._rows.read(each, self._rows.arrivals[able]))

    def read_array(self, name: str, number: int) -> Array:
        """Reads a field of the rows that an earlier step may take; `name` includes the step's name."""
        values = self._arrays.get(name)
        if values is None:
            able = self._known.able[number][self._lows[number] :]
            most = np.searchsorted(able, self._known.at[-1])
            values = Array(self._rows.read(name.partition(".")[2], self._rows.arrivals[able[:most]]))
            self._arrays[name] = values
        return values


def _find_linked(condition: Expression) -> list[Comparison]:
    """Finds the comparisons of the event with earlier steps in a condition; the left side of each is the event."""
    both = [side for each in find_comparisons(condition) for side in (each, each.turn())]
    return [each for each in both if _is_of_steps(each.right) and not any("." in name for name in each.left.fields)]


def _is_of_steps(part: Expression) -> bool:
    return bool(part.fields) and all("." in name for name in part.fields)


def _sweep(matches: _Matches, found: Sequence[Int64s]) -> Int64s:
    """Finds the first row that satisfies the condition for each match.

    `found` has (low, place, until) of rows in any order: the row qualifies in the matches from `low` to those that
    begin at `until`.
    """
    order = np.argsort(found[0], kind="stable")
    listed = list(zip(*(each[order].tolist() for each in found), strict=True))
    begins, open_, at = matches.first[-1].tolist(), list[tuple[int, int]](), 0
    starts = np.full(len(begins), -1)
    for match, (begin, cursor, limit) in enumerate(
        zip(begins, matches.cursor.tolist(), matches.limit.tolist(), strict=True)
    ):
        while at < len(listed) and listed[at][0] <= match:
            _, place, until = listed[at]
            heappush(open_, (place, until))
            at += 1
        # Later matches begin later, and so do their last steps.
        while open_ and (open_[0][0] < cursor or open_[0][1] < begin):
            heappop(open_)
        if open_ and open_[0][0] <= limit:
            starts[match] = open_[0][0]
    return starts

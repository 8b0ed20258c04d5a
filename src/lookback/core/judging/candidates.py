"""Finds out which rows complete the steps of a sequence whose last condition reads earlier steps, for all keys at once.

A match begins with another event whenever the window slides, so that none can be gone on with. What an event costs does not
grow with the window nevertheless: for all matches at once the first row of the last step is searched from where it can be.
If it is not near, each row is asked for which matches it satisfies the condition, since what the condition reads of the step
before (its last rows, whether it has a value, how it compares with a number) is the same for neighbouring matches.

Two things grow with the window for each match. A condition that compares an event with the *first* rows of a step is another
one in each match, so the rows up to the first that satisfies it are searched; where it is rarely satisfied, few matches are
left to be searched. And whoever shows what a linked step took (`{b.count}`) is shown what it took in this match alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from typing import Any

import numpy as np

from lookback.core.expressions.compiling import find_thresholds
from lookback.core.judging.matching import Array, Candidates, KeyedRows, Part, Steps, to_objects
from lookback.core.rules.compiled import COUNT
from lookback.core.values.columns import Column, Mask, from_values
from lookback.core.values.keys import Int64s
from lookback.core.values.types import BIGINT, array

# The first row of a step is looked for among so many rows at first, then among twice as many, up to the second number.
_FIRST_ROWS, _MOST_ROWS = 8, 1024
# So many rows are searched before it is asked for which matches the condition holds at all.
_MOST_SEARCHED = 24
# The condition is evaluated on so many pairs of a row and a match at once.
_MOST_PAIRS = 1 << 15
# The condition of a row may change so often from match to match; if it changes more often, each match is searched.
_MOST_CHANGES = 8


def settle_candidates(steps: Steps, rows: KeyedRows, found: Candidates) -> Candidates:
    """Finds out which candidates that came in order complete the steps, where only the last condition reads earlier ones.

    Of these the rows that the steps before can have taken are known, but for those of the step just before, which ends with
    the first row of the last step. So a candidate is dropped first if it satisfies the last condition neither with the most
    that this step can have taken nor with less.
    """
    in_order: Int64s = np.flatnonzero(rows.is_in_order[found.at])
    if not len(in_order) or not all(step.own for step in steps.steps[:-1]):
        return found
    known = found.take(in_order)
    last = _LastStep(steps, rows, known)
    is_out, errors = last.find_unsatisfied()
    step = steps.steps[-1].step
    if step.at_least > 1 or step.at_most is not None:
        is_left = np.ones(len(found.at), dtype=bool)
        is_left[in_order] = ~is_out | errors
        return found.take(is_left)
    is_complete, has_failed, starts = last.find_complete(~is_out, errors)
    settled, is_left = found.last.copy(), np.ones(len(found.at), dtype=bool)
    settled[in_order], is_left[in_order] = starts, is_complete
    return replace(found, last=settled, failed=known.at[has_failed]).take(is_left)


class _Most(Part):
    """The values of the most rows that a step can have taken, of which it has taken at least `least`.

    has_guessed: whether something was read that may differ if it has not taken all. until: what was read is the same if
    these begin later, up to this place. Lengths are left to `find_thresholds`.
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
        if -length <= at < length:
            self.until = min(self.until, self._begin if at >= 0 else self._end + at)
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
    """Matches by their order; all arrays have shape (matches,).

    first: for each step before the last the place of its first row; cursor, limit: the places of the first and the last row
    that may be the first of the last step.
    """

    first: list[Int64s]
    cursor: Int64s
    limit: Int64s

    def take(self, index: Mask | Int64s) -> _Matches:
        """Returns some of the matches."""
        return _Matches([each[index] for each in self.first], self.cursor[index], self.limit[index])


class _LastStep:
    """The last step of a sequence, of which alone the condition reads earlier steps, and candidates that came in order."""

    def __init__(self, steps: Steps, rows: KeyedRows, known: Candidates) -> None:
        self._steps, self._rows, self._known = steps, rows, known
        self._condition, self._before = steps.steps[-1].condition, steps.steps[-2].step
        self._able = known.able[-1]
        # The places of the candidates, and of the first rows after those that a step before them can have taken.
        self._places = np.searchsorted(self._able, known.at)
        # The places from which on fields are read of each step.
        self._lows = [int(each.min()) for each in known.first]
        self._arrays: dict[str, Array] = {}
        self._columns: dict[str, Column] = {}

    def find_unsatisfied(self) -> tuple[Mask, Mask]:
        """Marks the candidates that satisfy the condition with nothing that the step before can have taken, and errors.

        An error is that with the most that it can have taken.
        """
        known = self._known
        most = [*self._find_ends(known.first[:-1])[:-1], np.searchsorted(known.able[-2], known.at)]
        counts = most[-1] - known.first[-2]
        result, parts = self._evaluate(self._places, known.first[:-1], most, np.minimum(counts, self._before.at_least))
        has_guessed = self._reads_count(self._steps.last - 1) & (counts > self._before.at_least)
        for each in parts:
            has_guessed |= np.fromiter((part.has_guessed for part in each), dtype=bool, count=len(each))
        errors = np.zeros(len(known.at), dtype=bool) if result.error is None else result.error
        is_alone = known.first[-1] == self._places
        return ~result.is_true() & (~has_guessed | is_alone), errors

    def find_complete(self, is_left: Mask, errors: Mask) -> tuple[Mask, Mask, Int64s]:
        """Marks the candidates that complete the steps, and those with an error; finds where the last step begins.

        is_left: those that may complete them; errors: those with an error if the last step begins with none before them.
        """
        known, places = self._known, self._places
        is_complete, has_failed = np.zeros(len(places), dtype=bool), errors.copy()
        starts = np.full(len(places), -1)
        at = np.flatnonzero(is_left | errors)
        if not len(at):
            return is_complete, has_failed, starts
        first = [each[at] for each in known.first[:-1]]
        is_new = np.append(True, np.any([np.diff(each) != 0 for each in first], axis=0))
        heads, tails = np.flatnonzero(is_new), np.append(np.flatnonzero(is_new)[1:], len(at)) - 1
        matches = _Matches([each[heads] for each in first], known.first[-1][at[heads]], places[at[tails]])
        start = self._find_starts(matches)[np.cumsum(is_new) - 1]
        has_begun = (start >= 0) & (start <= places[at])
        starts[at] = np.where(has_begun, start, -1)
        is_complete[at] = has_begun
        # What the step before took is settled where the last step has begun with an earlier row.
        later = at[has_begun & (start < places[at])]
        if len(later):
            first = [each[later] for each in known.first[:-1]]
            ends = [*self._find_ends(first)[:-1], self._find_rank(starts[later])]
            result, _ = self._evaluate(places[later], first, ends)
            is_complete[later] = result.is_true()
            has_failed[later] = False if result.error is None else result.error
        is_few = self._find_few(starts)
        return (
            is_complete & is_few,
            has_failed & is_few & (is_left | errors),
            np.where(is_complete & is_few, starts, -1),
        )

    def _find_few(self, starts: Int64s) -> Mask:
        """Marks the candidates for which no step before the last takes too many. starts: of the last step, -1 if none."""
        known, is_few = self._known, np.ones(len(starts), dtype=bool)
        ends = self._find_ends(known.first[:-1])
        ends[-1] = self._find_rank(np.where(starts >= 0, starts, self._places))
        for step, first, end in zip(self._steps.steps, known.first, ends, strict=False):
            if step.step.at_most is not None:
                is_few &= end - first <= step.step.at_most
        return is_few

    def _find_ends(self, first: Sequence[Int64s]) -> list[Int64s]:
        """Finds the place at which the rows of each step but the last two end; that of the step before the last is open."""
        able = self._known.able
        following = [able[number + 1][first[number + 1]] for number in range(len(first) - 1)]
        return [*(np.searchsorted(able[number], each) for number, each in enumerate(following)), first[-1]]

    def _find_rank(self, places: Int64s) -> Int64s:
        """Finds how far the step before the last has come when rows of the last step come."""
        rank: Int64s = np.searchsorted(self._known.able[-2], self._able[places])
        return rank

    def _reads_count(self, number: int) -> bool:
        return f"{self._steps.steps[number].step.name}.{COUNT}" in self._condition.fields

    def _find_starts(self, matches: _Matches) -> Int64s:
        """Finds for each match the place of the first row that satisfies the condition; -1 if none does up to the limit."""
        starts, size = np.full(len(matches.limit), -1), _FIRST_ROWS
        pending: Int64s = np.arange(len(starts))
        searched, can_ask = 0, self._thresholds is not None
        while len(pending):
            if can_ask and searched >= _MOST_SEARCHED:
                can_ask, found = False, self._ask_matches(matches)
                if found is not None:
                    starts[pending] = found
                    break
            found = self._search(matches, size)
            starts[pending] = found
            left = (found < 0) & (matches.cursor + size <= matches.limit)
            matches, pending = replace(matches, cursor=matches.cursor + size).take(left), pending[left]
            searched, size = searched + size, min(2 * size, _MOST_ROWS)
        return starts

    def _search(self, matches: _Matches, size: int) -> Int64s:
        """Finds the first rows among the next `size` ones."""
        starts, step = np.full(len(matches.limit), -1), max(1, _MOST_PAIRS // size)
        for begin in range(0, len(starts), step):
            some = matches.take(np.arange(begin, min(begin + step, len(starts))))
            lengths = np.minimum(size, some.limit - some.cursor + 1)
            offsets = np.cumsum(lengths) - lengths
            of_match = np.repeat(np.arange(len(lengths)), lengths)
            places = np.arange(len(of_match)) - offsets[of_match] + some.cursor[of_match]
            first = [each[of_match] for each in some.first]
            ends = [*(each[of_match] for each in self._find_ends(some.first)[:-1]), self._find_rank(places)]
            result, _ = self._evaluate(places, first, ends)
            true = np.flatnonzero(result.is_true())
            owners, at = np.unique(of_match[true], return_index=True)
            starts[begin + owners] = places[true[at]]
        return starts

    @cached_property
    def _thresholds(self) -> Int64s | None:
        """The numbers of rows of the step before at which the condition may change, sorted.

        None where the condition reads other steps, or uses the number in another way than to compare it with numbers.
        """
        name = self._before.name
        if any("." in each and each.partition(".")[0] != name for each in self._condition.fields):
            return None
        numbers = find_thresholds(self._condition.sql, COUNT)
        return None if numbers is None else np.array(sorted(numbers), dtype=np.int64)

    def _ask_matches(self, matches: _Matches) -> Int64s | None:
        """Finds what `_search` does, without a search: asks of each row for which matches it satisfies the condition.

        For a row the condition reads the same in many matches, since these differ in where the step before begins: its last
        rows are the same until they are left out. None if it may change too often from match to match.
        """
        begins, number = matches.first[-1], len(self._able)
        edges = np.bincount(matches.cursor, minlength=number + 1) - np.bincount(matches.limit + 1, minlength=number + 1)
        places = np.flatnonzero(np.cumsum(edges) > 0)
        low, high = np.searchsorted(matches.limit, places), np.searchsorted(matches.cursor, places, "right") - 1
        ends, found = self._find_rank(places), list[tuple[Int64s, Int64s, Int64s]]()
        for _ in range(_MOST_CHANGES):
            true, until = self._find_validity(places, begins[low], ends)
            found.append((low[true], places[true], until[true]))
            low = np.searchsorted(begins, until, "right")
            left = low <= high
            places, low, high, ends = places[left], low[left], high[left], ends[left]
            if not len(places):
                return _sweep(matches, [np.concatenate(each) for each in zip(*found, strict=True)])
        return None

    def _find_validity(self, places: Int64s, begins: Int64s, ends: Int64s) -> tuple[Mask, Int64s]:
        """Evaluates the condition for rows and where the step before begins; also finds up to where that is the same."""
        assert self._thresholds is not None
        true, until = np.zeros(len(places), dtype=bool), ends.copy()
        for begin in range(0, len(places), _MOST_PAIRS):
            some = slice(begin, begin + _MOST_PAIRS)
            first = [begins[some]] * len(self._known.first[:-1])
            result, parts = self._evaluate(places[some], first, [*first[:-1], ends[some]])
            true[some] = result.is_true()
            for each in parts:
                same = np.fromiter((part.until for part in each), dtype=np.int64, count=len(each))
                until[some] = np.minimum(until[some], same + self._lows[-2])
        # The highest number of rows up to which there are as many as this one, or more.
        at = np.searchsorted(self._thresholds, ends - begins, "right") - 1
        kept = np.append(self._thresholds, 0)[at]
        return true, np.maximum(begins, np.where(at >= 0, np.minimum(until, ends - kept), until))

    def _evaluate(
        self, places: Int64s, first: Sequence[Int64s], ends: Sequence[Int64s], least: Int64s | None = None
    ) -> tuple[Column, list[list[_Most]]]:
        """Evaluates the condition for rows at places, with the rows of the steps before in [first, end).

        least: how many of them the step before has taken at least; None: all. Returns the arrays that were read of that step.
        """
        columns, parts = dict[str, Column](), list[list[_Most]]()
        for name in self._condition.fields:
            before, _, own = name.partition(".")
            if not own:
                columns[name] = self._read_field(name, places)
                continue
            number = self._steps.numbers[before]
            counts = ends[number] - first[number]
            if own == COUNT:
                columns[name] = Column(BIGINT, counts)
                continue
            low, is_open = self._lows[number], number == self._steps.last - 1 and least is not None
            most = least if is_open and least is not None else counts
            figures = (first[number] - low).tolist(), (ends[number] - low).tolist(), most.tolist()
            values = self._read_array(name, number)
            listed = [_Most(values, *each) for each in zip(*figures, strict=True)]
            parts.append(listed)
            columns[name] = Column(array(self._steps.fields[own]), to_objects(listed))
        return self._condition.evaluate(columns, len(places)), parts

    def _read_field(self, name: str, places: Int64s) -> Column:
        """Reads a field of rows that the last step may take; of all of them if they are many."""
        low, high = self._lows[-1], int(self._places.max()) + 1
        type_, column = self._steps.fields[name], self._columns.get(name)
        if column is None and len(places) < high - low:
            return from_values(type_, self._rows.read(name, self._rows.arrivals[self._able[places]]))
        if column is None:
            column = from_values(type_, self._rows.read(name, self._rows.arrivals[self._able[low:high]]))
            self._columns[name] = column
        return column.take(places - low)

    def _read_array(self, name: str, number: int) -> Array:
        """Reads a field of the rows that a step before may take. name: with that of the step."""
        values = self._arrays.get(name)
        if values is None:
            able = self._known.able[number][self._lows[number] :]
            most = np.searchsorted(able, self._known.at[-1])
            values = Array(self._rows.read(name.partition(".")[2], self._rows.arrivals[able[:most]]))
            self._arrays[name] = values
        return values


def _sweep(matches: _Matches, found: Sequence[Int64s]) -> Int64s:
    """Finds for each match the first row that satisfies the condition.

    found: (low, place, until) of rows, sorted in no way: it is satisfied in the matches from `low` to those that begin at
    `until`.
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

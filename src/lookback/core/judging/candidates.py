"""Finds out which rows complete the steps of a sequence whose conditions read earlier steps, for all keys at once.

A match begins with another event whenever the window slides, so that none can be gone on with. What an event costs does not
grow with the window nevertheless: for all matches at once the first row of the first step that reads earlier ones is searched from where it can be.
If it is not near, each row is asked for which matches it satisfies the condition, since what the condition reads of the step
before (its last rows, whether it has a value, how it compares with a number) is the same for neighbouring matches.

Two things grow with the window for each match. A condition that compares an event with the *first* rows of a step is another
one in each match whose first rows have other values, so the rows up to the first that satisfies it are searched; if it is
that of the last step and rarely satisfied, few matches are left to be searched. And whoever shows what a linked step took (`{b.count}`) is shown what it took in this match alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from typing import Any

import numpy as np

from lookback.core.expressions.compiling import find_thresholds
from lookback.core.judging.matching import (
    Array,
    Candidates,
    KeyedRows,
    Part,
    Settlement,
    Steps,
    to_objects,
)
from lookback.core.rules.compiled import COUNT
from lookback.core.values.columns import Column, Mask, from_values
from lookback.core.values.keys import Int64s, list_ranges
from lookback.core.values.times import NEVER_DUE
from lookback.core.values.types import BIGINT, array

# The first row of a step is looked for among so many rows at first, then among twice as many, up to the second number.
_FIRST_ROWS, _MOST_ROWS = 8, 1024
# So many rows are searched before it is asked for which matches the condition holds at all.
_MOST_SEARCHED = 24
# The condition is evaluated on so many pairs of a row and a match at once.
_MOST_PAIRS = 1 << 15
# Candidates out of order are settled stretch by stretch where their windows have so many rows a stretch.
_ROWS_OF_A_STRETCH = 500
# The condition of a row may change so often from match to match; if it changes more often, each match is searched.
_MOST_CHANGES = 8


Find = Callable[[KeyedRows, Int64s], Candidates]


def settle_candidates(steps: Steps, rows: KeyedRows, judged: Int64s, find: Find) -> Settlement:
    """Finds out which rows complete the steps, as far as the first linked step can be settled for all of them at once.

    judged: positions of rows that satisfy the last gate. find: finds the candidates among them (see `find_candidates`).
    """
    found = find(rows, judged)
    is_in_order = rows.is_in_order[found.at]
    settled, others = _settle_in_order(steps, rows, found.take(is_in_order)), found.take(~is_in_order)
    return Settlement.join([settled, _settle_others(steps, rows, others, find)]) if len(others.at) else settled


def _settle_others(steps: Steps, rows: KeyedRows, others: Candidates, find: Find) -> Settlement:
    """Settles candidates before which, in time, some row came after they did.

    Rows of a key that arrived one after another in order of time are a stretch. Without the rows of later stretches those of
    one came in order, so the stretches of each key are settled one after another, all keys at once.
    """
    needed = others.needed
    stretches = rows.take(needed).number_stretches()
    own = stretches[np.searchsorted(needed, others.at)]
    numbers = np.unique(own)
    if (others.at - others.starts).sum() < _ROWS_OF_A_STRETCH * len(numbers):
        return others.unsettled
    parts = []
    for number in numbers.tolist():
        some = others.take(own == number)
        places = some.needed
        places = places[stretches[np.searchsorted(needed, places)] <= number]
        part = rows.take(places)
        found = find(part, np.searchsorted(places, some.at))
        parts.append(_settle_in_order(steps, part, found).move(places))
    return Settlement.join(parts)


def _settle_in_order(steps: Steps, rows: KeyedRows, known: Candidates) -> Settlement:
    """Settles candidates that came in order.

    The rows that each step before the first linked one can have taken are known, but for those of the step just before it,
    which ends with the first row of the linked step.
    """
    number = next(at for at, step in enumerate(steps.steps) if not step.own)
    if not len(known.at):
        return known.unsettled
    linked = _LinkedStep(steps, rows, known, number)
    if number == steps.last:
        is_out, errors = linked.find_unsatisfied()
        is_complete, has_failed, starts = linked.find_complete(~is_out, errors)
        failed, first = known.at[has_failed], [*known.first[:-1], starts]
    else:
        starts, failed = linked.find_reached(), known.at[:0]
        known, starts = known.take(starts >= 0), starts[starts >= 0]
        spec = steps.steps[number].step
        if spec.at_least > 1 or spec.at_most is not None or not all(step.own for step in steps.steps[number + 1 :]):
            return known.unsettled
        first, is_complete = _follow_steps(steps, known, [*known.first[:number], starts])
    begins = [able[each[is_complete]] for able, each in zip(known.able, first, strict=True)]
    none = known.at[:0]
    return Settlement(none, none, known.at[is_complete], np.stack(begins, axis=1), failed)


def _follow_steps(steps: Steps, known: Candidates, first: list[Int64s]) -> tuple[list[Int64s], Mask]:
    """Follows steps that read the event alone. Returns where each step begins, and which candidates complete the last.

    first: the places of the rows with which the steps up to one of which one row is enough are reached.
    """
    able, is_complete = known.able, np.ones(len(known.at), dtype=bool)
    reached = able[len(first) - 1][first[-1]]
    for number in range(len(first), len(able)):
        begin = np.searchsorted(able[number], reached, "right")
        enough = begin + steps.steps[number].step.at_least - 1
        reached = np.append(able[number], NEVER_DUE)[np.minimum(enough, len(able[number]))]
        is_complete &= reached <= known.at
        first = [*first, np.where(is_complete, begin, 0)]
    is_complete &= _mark_few(steps, able, first)
    most = steps.steps[-1].step.at_most
    if most is not None:
        is_complete &= np.searchsorted(able[-1], known.at, "right") - first[-1] <= most
    return first, is_complete


def _mark_few(steps: Steps, able: Sequence[Int64s], first: Sequence[Int64s]) -> Mask:
    """Marks where no step but the last takes too many rows. first: for each step the place of its first row."""
    is_few = np.ones(len(first[0]), dtype=bool)
    for number, step in enumerate(steps.steps[: len(first) - 1]):
        if step.step.at_most is not None:
            end = np.searchsorted(able[number], able[number + 1][first[number + 1]])
            is_few &= end - first[number] <= step.step.at_most
    return is_few


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


def _group_matches(first: Sequence[Int64s], cursor: Int64s, limit: Int64s) -> tuple[_Matches, Int64s]:
    """Groups candidates by their match: those of which the steps begin alike. Returns the matches, and that of each candidate.

    limit: of each candidate; a match has that of its last one.
    """
    is_new = np.append(True, np.any([np.diff(each) != 0 for each in first], axis=0))
    heads, tails = np.flatnonzero(is_new), np.append(np.flatnonzero(is_new)[1:], len(is_new)) - 1
    return _Matches([each[heads] for each in first], cursor[heads], limit[tails]), np.cumsum(is_new) - 1


class _LinkedStep:
    """The first step of a sequence whose condition reads earlier steps, and candidates that came in order."""

    def __init__(self, steps: Steps, rows: KeyedRows, known: Candidates, number: int) -> None:
        self._steps, self._rows, self._known, self._number = steps, rows, known, number
        self._step, self._condition = steps.steps[number].step, steps.steps[number].condition
        self._before, self._first = steps.steps[number - 1].step, known.first[:number]
        self._able = known.able[number]
        # How many rows that the step may take are before each candidate; of the last step that is the candidate's own place.
        self._places: Int64s = np.searchsorted(self._able, known.at)
        # The places from which on fields are read of each step.
        self._lows = [int(each.min()) for each in known.first[: number + 1]]
        self._arrays: dict[str, Array] = {}
        self._columns: dict[str, Column] = {}

    def find_reached(self) -> Int64s:
        """Finds for each candidate the place of the row with which the step is reached before it; -1 if it is not."""
        limit = self._places - 1
        matches, of_match = _group_matches(self._first, self._known.first[self._number], limit)
        starts = self._find_starts(matches)[of_match]
        return np.where(starts <= limit, starts, -1)

    def find_unsatisfied(self) -> tuple[Mask, Mask]:
        """Marks the candidates that satisfy the last condition with nothing that the step before can have taken, and errors.

        An error is that with the most that it can have taken.
        """
        known = self._known
        most = [*self._find_ends(self._first)[:-1], np.searchsorted(known.able[-2], known.at)]
        counts = most[-1] - known.first[-2]
        result, parts = self._evaluate(self._places, self._first, most, np.minimum(counts, self._before.at_least))
        has_guessed = self._reads_count(self._number - 1) & (counts > self._before.at_least)
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
        first = [each[at] for each in self._first]
        matches, of_match = _group_matches(first, known.first[-1][at], places[at])
        start = self._find_starts(matches)[of_match]
        has_begun = (start >= 0) & (start <= places[at])
        starts[at] = np.where(has_begun, start, -1)
        is_complete[at] = has_begun
        # What the step before took is settled where the last step has begun with an earlier row.
        later = at[has_begun & (start < places[at])]
        if len(later):
            first = [each[later] for each in self._first]
            ends = [*self._find_ends(first)[:-1], self._find_rank(starts[later])]
            result, _ = self._evaluate(places[later], first, ends)
            is_complete[later] = result.is_true()
            has_failed[later] = False if result.error is None else result.error
        self._count_taken(is_complete, has_failed, starts)
        is_few = _mark_few(self._steps, known.able, [*self._first, np.where(starts >= 0, starts, places)])
        return (
            is_complete & is_few,
            has_failed & is_few & (is_left | errors),
            np.where(is_complete & is_few, starts, -1),
        )

    def _count_taken(self, is_complete: Mask, has_failed: Mask, starts: Int64s) -> None:
        """Unmarks the candidates up to which the last step takes too few rows, or too many. starts: where it begins."""
        least, most, places = self._step.at_least, self._step.at_most, self._places
        later = starts < places
        if least > 1:
            # The first row and the candidate are two of them.
            is_complete &= later
            at = np.flatnonzero(is_complete)
            is_complete[at] = least == 2 or self._find_taken(at, starts[at], least - 2) < places[at]
        if most is not None:
            at = np.flatnonzero(is_complete & later)
            is_complete[at] = self._find_taken(at, starts[at], most - 1) >= places[at]
            at = np.flatnonzero(has_failed & later & (starts >= 0))
            has_failed[at] = self._find_taken(at, starts[at], most) >= places[at]

    def _find_taken(self, at: Int64s, starts: Int64s, number: int) -> Int64s:
        """Finds the place of the row that the last step takes as so many rows after its first; beyond all if none is.

        It is searched up to a candidate. at: of candidates; starts: where the last step begins for each.
        """
        if number == 0 or not len(at):
            return starts
        matches, of_match = _group_matches([each[at] for each in self._first], starts + 1, self._places[at] - 1)
        ends = [*self._find_ends(matches.first)[:-1], self._find_rank(matches.cursor - 1)]
        found, left, size = (
            np.full(len(matches.limit), len(self._able)),
            np.full(len(matches.limit), number),
            _FIRST_ROWS,
        )
        pending: Int64s = np.arange(len(found))
        while len(pending):
            for begin, of_some, places in self._evaluate_next(matches, size, ends):
                owners = pending[begin + of_some]
                ranks = np.arange(len(owners)) - np.searchsorted(owners, owners) + 1
                is_last = ranks == left[owners]
                found[owners[is_last]] = places[is_last]
                left -= np.bincount(owners, minlength=len(left))
            is_left = (left[pending] > 0) & (matches.cursor + size <= matches.limit)
            matches, pending = replace(matches, cursor=matches.cursor + size).take(is_left), pending[is_left]
            ends, size = [each[is_left] for each in ends], min(2 * size, _MOST_ROWS)
        return found[of_match]

    def _find_ends(self, first: Sequence[Int64s]) -> list[Int64s]:
        """Finds the place at which the rows of each step but the last two end; that of the step before the last is open."""
        able = self._known.able
        following = [able[number + 1][first[number + 1]] for number in range(len(first) - 1)]
        return [*(np.searchsorted(able[number], each) for number, each in enumerate(following)), first[-1]]

    def _find_rank(self, places: Int64s) -> Int64s:
        """Finds how far the step before the last has come when rows of the last step come."""
        rank: Int64s = np.searchsorted(self._known.able[self._number - 1], self._able[places])
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
        starts = np.full(len(matches.limit), -1)
        for begin, of_some, places in self._evaluate_next(matches, size):
            owners, at = np.unique(of_some, return_index=True)
            starts[begin + owners] = places[at]
        return starts

    def _evaluate_next(
        self, matches: _Matches, size: int, ends: Sequence[Int64s] | None = None
    ) -> Iterator[tuple[int, Int64s, Int64s]]:
        """Yields which of the next `size` rows satisfy the condition, some matches at a time.

        ends: the places at which the rows of the steps before end, of each match; None if that just before ends with the row.
        Yields the number of the first match, and of each such row the match, counted from that one, and the place.
        """
        step = max(1, _MOST_PAIRS // size)
        for begin in range(0, len(matches.limit), step):
            own = slice(begin, begin + step)
            cursor = matches.cursor[own]
            lengths = np.clip(matches.limit[own] - cursor + 1, 0, size)
            of_match = np.repeat(np.arange(len(lengths)), lengths)
            if not len(of_match):
                continue
            places = list_ranges(cursor, lengths)
            first = [each[own][of_match] for each in matches.first]
            if ends is None:
                known = [*self._find_ends(first)[:-1], self._find_rank(places)]
            else:
                known = [each[own][of_match] for each in ends]
            result, _ = self._evaluate(places, first, known)
            true = np.flatnonzero(result.is_true())
            yield begin, of_match[true], places[true]

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
            first = [begins[some]] * self._number
            result, parts = self._evaluate(places[some], first, [*first[:-1], ends[some]])
            true[some] = result.is_true()
            for each in parts:
                same = np.fromiter((part.until for part in each), dtype=np.int64, count=len(each))
                until[some] = np.minimum(until[some], same + self._lows[self._number - 1])
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
            low, is_open = self._lows[number], number == self._number - 1 and least is not None
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

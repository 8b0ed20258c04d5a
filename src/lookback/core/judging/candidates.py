"""Finds out which rows complete the steps of a sequence whose conditions read earlier steps, for all keys at once.

A match begins with another event whenever the window slides, so that none can be gone on with. What an event costs does not
grow with the window nevertheless: step by step, for all matches at once, the first row of a step is searched from where it can be.
Rows that a comparison with what is known of a match leaves out (`ip = element_at(a.ip, 1)`) are passed over. If the row is not
near, each row is asked for which matches it satisfies the condition, since what the condition reads of the step before (its
last rows, whether it has a value, how it compares with a number) is the same for neighbouring matches.

Two things grow with the window for each match: the rows up to the first that satisfies a condition which no comparison makes
rare, and which is another one in each match, such as `amount > element_at(a.amount, 1) + n`; and for whoever shows what
a linked step took (`{b.count}`) the rows that it took in this match alone. A step that reads more of a linked step than its
first row leaves the candidates to be judged one by one.
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
    find_read_first,
    find_thresholds,
)
from lookback.core.judging.matching import (
    Array,
    Candidates,
    KeyedRows,
    Part,
    Settlement,
    Steps,
    list_between,
    to_objects,
)
from lookback.core.judging.nextrows import Compared, NextRows
from lookback.core.rules.compiled import COUNT
from lookback.core.values.columns import Column, Mask
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
    """Finds out which rows complete the steps, as far as the linked steps can be settled for all of them at once.

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
    """Settles candidates that came in order, step by step from the first linked one on.

    As long as a step reads nothing of linked steps but their first rows, these are all that has to be known of them.
    """
    for number in range(next(at for at, step in enumerate(steps.steps) if not step.own), len(steps.steps)):
        if not len(known.at) or not _reads_first_rows(steps, number):
            return known.unsettled
        if number < steps.last:
            known = _settle_step(steps, rows, known, number)
    failed, first = known.at[:0], known.first
    if steps.steps[-1].own:
        is_complete = _mark_complete(steps, rows, known)
    else:
        linked = _LinkedStep(steps, rows, known, steps.last)
        is_out, errors = linked.find_unsatisfied()
        is_complete, has_failed, starts = linked.find_complete(~is_out, errors)
        failed, first = known.at[has_failed], [*first[:-1], starts]
    begins = [able[each[is_complete]] for able, each in zip(known.able, first, strict=True)]
    none = known.at[:0]
    return Settlement(none, none, known.at[is_complete], np.stack(begins, axis=1), failed)


def _reads_first_rows(steps: Steps, number: int) -> bool:
    """Returns whether the condition of a step reads no more of linked steps before it than their first rows."""
    condition = steps.steps[number].condition
    linked = {step.step.name for step in steps.steps[:number] if not step.own}
    read = {name for name in condition.fields if name.partition(".")[0] in linked}
    return not read or read <= find_read_first(condition.sql)


def _settle_step(steps: Steps, rows: KeyedRows, known: Candidates, number: int) -> Candidates:
    """Settles where a step before the last begins, and so from where on the next one may.

    known.first: for the steps before this one where they begin, for this one from where on it may. Returns the candidates
    before which the step has enough.
    """
    step, able = steps.steps[number], known.able[number]
    if step.own:
        begins, enough = known.first[number], known.first[number] + step.step.at_least - 1
    else:
        begins, enough = _LinkedStep(steps, rows, known, number).find_begins()
    reached = np.append(able, NEVER_DUE)[np.minimum(enough, len(able))]
    following, ends = (np.searchsorted(known.able[number + 1], each, "right") for each in (reached, known.at))
    first = [*known.first[:number], begins, following, *known.first[number + 2 :]]
    return replace(known, first=first).take(following < ends)


def _mark_complete(steps: Steps, rows: KeyedRows, known: Candidates) -> Mask:
    """Marks the candidates that complete steps of which the last one reads the event alone."""
    spec = steps.steps[-1].step
    taken = np.searchsorted(known.able[-1], known.at, "right") - known.first[-1]
    is_complete: Mask = taken >= spec.at_least
    if spec.at_most is not None:
        is_complete &= taken <= spec.at_most
    known = known.take(is_complete)
    is_complete[is_complete] = _mark_few(steps, rows, known, known.first[-1])
    return is_complete


def _mark_few(steps: Steps, rows: KeyedRows, known: Candidates, last: Int64s) -> Mask:
    """Marks where no step but the last takes too many rows. last: the place of the first row of the last step."""
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


@dataclass(frozen=True)
class _Scan:
    """A search for rows of matches, some of which are left: `pending` has their numbers.

    rows, places: the rows in which it searches, and their places. cursor, limit: where the next row and the last one of each
    match that is left are among these; size: how many are looked at next.
    """

    matches: _Matches
    rows: NextRows
    places: Int64s
    pending: Int64s
    cursor: Int64s
    limit: Int64s
    size: int

    def move(self, is_left: Mask, size: int) -> _Scan:
        """Goes on to the next rows that no comparison leaves out, so many of them at most. is_left: marks matches."""
        left = is_left[self.pending] & (self.cursor + self.size <= self.limit)
        pending, limit = self.pending[left], self.limit[left]
        cursor = self.rows.find_next(pending, self.cursor[left] + self.size)
        near = cursor <= limit
        return replace(self, pending=pending[near], cursor=cursor[near], limit=limit[near], size=min(size, _MOST_ROWS))


def _group_matches(first: Sequence[Int64s], cursor: Int64s, limit: Int64s) -> tuple[_Matches, Int64s]:
    """Groups candidates by their match: those of which the steps begin alike. Returns the matches, and that of each candidate.

    limit: of each candidate; a match has that of its last one.
    """
    is_new = np.append(True, np.any([np.diff(each) != 0 for each in first], axis=0))
    heads, tails = np.flatnonzero(is_new), np.append(np.flatnonzero(is_new)[1:], len(is_new)) - 1
    return _Matches([each[heads] for each in first], cursor[heads], limit[tails]), np.cumsum(is_new) - 1


class _LinkedStep:
    """A step of a sequence whose condition reads earlier steps, and candidates that came in order.

    Of linked steps before it, it reads the first rows alone.
    """

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

    def find_begins(self) -> tuple[Int64s, Int64s]:
        """Finds for each candidate the places before it of the first row of the step, and of the one with which it has enough.

        Beyond all rows where there is none.
        """
        matches, of_match = _group_matches(self._first, self._known.first[self._number], self._places - 1)
        starts = self._find_starts(matches)[of_match]
        begins = np.where((starts >= 0) & (starts < self._places), starts, len(self._able))
        return begins, self.find_taken(begins, self._places, self._step.at_least - 1)

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
        is_few = _mark_few(self._steps, self._rows, known, np.where(starts >= 0, starts, places))
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
            begins = np.where(is_complete, starts, len(self._able))
            is_complete &= self.find_taken(begins, places, least - 2) < places
        if most is not None:
            begins = np.where(is_complete & later, starts, len(self._able))
            is_complete &= self.find_taken(begins, places, most - 1) >= places
            begins = np.where(has_failed & later & (starts >= 0), starts, len(self._able))
            has_failed &= self.find_taken(begins, places, most) >= places

    def find_taken(self, begins: Int64s, ends: Int64s, number: int) -> Int64s:
        """Finds the places of the rows that the step takes as so many rows after its first; beyond all if none is.

        begins: where the step begins for each candidate; beyond all if it does not. ends: the places up to which it is
        searched.
        """
        found = begins.copy()
        at = np.flatnonzero(begins < len(self._able))
        if number == 0 or not len(at):
            return found
        matches, of_match = _group_matches([each[at] for each in self._first], begins[at] + 1, ends[at] - 1)
        known = [*self._find_ends(matches.first)[:-1], self._find_rank(matches.cursor - 1)]
        taken = np.full(len(matches.limit), len(self._able))
        left, scan = np.full(len(taken), number), self._scan(matches, known)
        while len(scan.pending):
            for owners, places in self._evaluate_next(scan, known):
                ranks = np.arange(len(owners)) - np.searchsorted(owners, owners) + 1
                is_last = ranks == left[owners]
                taken[owners[is_last]] = places[is_last]
                left -= np.bincount(owners, minlength=len(left))
            scan = scan.move(left > 0, 2 * scan.size)
        found[at] = taken[of_match]
        return found

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
        starts, scan = np.full(len(matches.limit), -1), self._scan(matches)
        searched, can_ask = 0, self._thresholds is not None
        while len(scan.pending):
            if can_ask and searched >= _MOST_SEARCHED:
                can_ask, found = False, self._ask_matches(matches.take(scan.pending))
                if found is not None:
                    starts[scan.pending] = found
                    break
            for owners, places in self._evaluate_next(scan):
                some, at = np.unique(owners, return_index=True)
                starts[some] = places[at]
            searched, scan = searched + scan.size, scan.move(starts < 0, 2 * scan.size)
        return starts

    def _scan(self, matches: _Matches, ends: Sequence[Int64s] | None = None) -> _Scan:
        """Begins to search the rows from the cursor up to the limit of each match. ends: as of `_evaluate_next`."""
        is_open = matches.cursor <= matches.limit
        places = list_between(matches.cursor[is_open], matches.limit[is_open])
        compared = self._list_compared(matches, places, ends) if len(places) else []
        rows = NextRows(compared, len(places), len(is_open))
        cursor, limit = (np.searchsorted(places, each) for each in (matches.cursor, matches.limit))
        low, high = rows.find_ranges(cursor, np.where(is_open, limit, cursor - 1))
        scan = _Scan(matches, rows, places[rows.order], np.arange(len(low)), low, high, 0)
        # Most rows that no comparison leaves out satisfy the condition.
        return scan.move(is_open, 1 if compared else _FIRST_ROWS)

    def _list_compared(self, matches: _Matches, places: Int64s, ends: Sequence[Int64s] | None) -> list[Compared]:
        """Lists the comparisons that the condition asks for, of rows at places with what is known of each match."""
        least, known, compared = None, ends, list[Compared]()
        if known is None:
            most = self._find_rank(np.maximum(matches.limit, matches.cursor))
            known = [*self._find_ends(matches.first)[:-1], most]
            least = np.minimum(most - matches.first[-1], self._before.at_least)
        for each in _find_linked(self._condition):
            if ends is None and f"{self._before.name}.{COUNT}" in each.right.fields:
                continue
            others, parts = self._evaluate(matches.cursor, matches.first, known, least, each.right)
            if not any(part.has_guessed for listed in parts for part in listed):
                own, _ = self._evaluate(places, (), (), None, each.left)
                compared.append(Compared(each.symbol, own, others))
        return compared

    def _evaluate_next(self, scan: _Scan, ends: Sequence[Int64s] | None = None) -> Iterator[tuple[Int64s, Int64s]]:
        """Yields the numbers of matches and the places of the next rows that satisfy the condition for them, some at a time.

        ends: the places at which the rows of the steps before end, of each match; None if that just before ends with the row.
        """
        step = max(1, _MOST_PAIRS // scan.size)
        for begin in range(0, len(scan.pending), step):
            own = slice(begin, begin + step)
            lengths = np.clip(scan.limit[own] - scan.cursor[own] + 1, 0, scan.size)
            of_match = np.repeat(scan.pending[own], lengths)
            places = scan.places[list_ranges(scan.cursor[own], lengths)]
            first = [each[of_match] for each in scan.matches.first]
            if ends is None:
                known = [*self._find_ends(first)[:-1], self._find_rank(places)]
            else:
                known = [each[of_match] for each in ends]
            result, _ = self._evaluate(places, first, known)
            true = result.is_true()
            yield of_match[true], places[true]

    @cached_property
    def _thresholds(self) -> Int64s | None:
        """The numbers of rows of the step before at which the condition may change, sorted.

        None where the condition reads other steps, or uses the number in another way than to compare it with numbers, and
        where matches by their order do not begin one after another.
        """
        name = self._before.name
        if not all(step.own for step in self._steps.steps[: self._number]):
            return None
        if any("." in each and each.partition(".")[0] != name for each in self._condition.fields):
            return None
        numbers = find_thresholds(self._condition.sql, COUNT)
        return None if numbers is None else np.array(sorted(numbers), dtype=np.int64)

    def _ask_matches(self, matches: _Matches) -> Int64s | None:
        """Finds what `_find_starts` does, without a search: asks of each row for which matches it satisfies the condition.

        For a row the condition reads the same in many matches, since these differ in where the step before begins: its last
        rows are the same until they are left out. None if it may change too often from match to match.
        """
        begins, places = matches.first[-1], list_between(matches.cursor, matches.limit)
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
        self,
        places: Int64s,
        first: Sequence[Int64s],
        ends: Sequence[Int64s],
        least: Int64s | None = None,
        condition: Expression | None = None,
    ) -> tuple[Column, list[list[_Most]]]:
        """Evaluates the condition for rows at places, with the rows of the steps before in [first, end).

        least: how many of them the step before has taken at least; None: all. condition: a part of it; None: all of it.
        Returns the arrays that were read of the steps before.
        """
        condition = condition or self._condition
        columns, parts = dict[str, Column](), list[list[_Most]]()
        for name in condition.fields:
            before, _, own = name.partition(".")
            if not own:
                columns[name] = self._read_field(name, places)
                continue
            number = self._steps.numbers[before]
            # Of a linked step, of which this counts what it may have taken, the first row is read alone.
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
        return condition.evaluate(columns, len(places)), parts

    def _read_field(self, name: str, places: Int64s) -> Column:
        """Reads a field of rows that the last step may take; of all of them if they are many."""
        low, high = self._lows[-1], int(self._places.max()) + 1
        column = self._columns.get(name)
        if column is None and len(places) < high - low:
            return self._make_column(name, self._able[places])
        if column is None:
            column = self._make_column(name, self._able[low:high])
            self._columns[name] = column
        return column.take(places - low)

    def _make_column(self, name: str, able: Int64s) -> Column:
        return self._steps.make_column(name, lambda each: self._rows.read(each, self._rows.arrivals[able]))

    def _read_array(self, name: str, number: int) -> Array:
        """Reads a field of the rows that a step before may take. name: with that of the step."""
        values = self._arrays.get(name)
        if values is None:
            able = self._known.able[number][self._lows[number] :]
            most = np.searchsorted(able, self._known.at[-1])
            values = Array(self._rows.read(name.partition(".")[2], self._rows.arrivals[able[:most]]))
            self._arrays[name] = values
        return values


def _find_linked(condition: Expression) -> list[Comparison]:
    """Finds the comparisons that a condition asks for: on the left the event, on the right earlier steps."""
    both = [side for each in find_comparisons(condition) for side in (each, each.turn())]
    return [each for each in both if _is_of_steps(each.right) and not any("." in name for name in each.left.fields)]


def _is_of_steps(part: Expression) -> bool:
    return bool(part.fields) and all("." in name for name in part.fields)


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

"""Finds the matches that begin at rows of step one, and the earliest match that a row of the last step ends.

The rows of a match arrived in order. So the first rows of its steps determine it:

    row        a1   a2   b1   a3   b2        steps: a, then b with the same number as the first a
    n          1    2    1    2    2
    from a1    a    a    b    .    .         ends at b1
    from a2         a    .    a    b         ends at b2
    from a3                   a    b         ends at b2, which alerts with its earliest beginning, a2

The steps are processed in turn, each for all matches together: a search finds the first row of the step. A last search
finds the earliest match for each row of the last step. A search does not visit the rows or matches in between if the
condition compares the row with earlier steps (`ip = element_at(a.ip, 1)`, `a.count >= 5`, `array_contains(a.ip, ip)`),
alone or joined by `and` (see `lookups`). Any other condition of a linked step is evaluated in a plain loop, for each
pair of a row and a match, so its cost grows with the square of the rows in a window.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lookback.core.expressions.compiling import Comparison, Expression, find_comparisons, find_containments, find_items
from lookback.core.judging.lookups import Compared, Contained, NextItems, Occurrences
from lookback.core.judging.steps import Steps
from lookback.core.judging.taken import Array, ArrayPart
from lookback.core.rules.compiled import COUNT
from lookback.core.values.columns import Column, Mask, make_objects
from lookback.core.values.keys import Int64s, list_between, list_ranges
from lookback.core.values.types import BIGINT, BOOLEAN, array

# Up to this many rows or matches, evaluating a condition is faster than preparing lookups.
_MIN_LOOKED_UP = 24
# How many rows a match checks first if no lookup narrows them down.
_FIRST_ROWS = 8
# In how many matches the rows that a linked step took are listed at once, and how many rows are kept.
_MATCHES_AT_ONCE = 32
_MAX_LISTED = 1 << 20
# The result of a subtraction of numbers up to this one fits into 64 bits.
_MAX_NUMBER = 1 << 61


@dataclass(frozen=True)
class KeyedRows:
    """Rows by (key, time, number); all arrays have shape (rows,).

    Attributes:
        keys: The number of each row's key, ascending.
        times: The time of each row.
        bits: The conditions that each row may satisfy.
        numbers: The number of each row in its key, in order of arrival.
        read: Reads a field of the rows at some positions.
    """

    keys: Int64s
    times: Int64s
    bits: Int64s
    numbers: Int64s
    read: Callable[[str, Int64s], list[Any]]

    @cached_property
    def is_in_order(self) -> Mask:
        """Marks the rows that arrived after all earlier rows of their key."""
        arrived = self.keys * (int(self.numbers.max(initial=0)) + 1) + self.numbers
        is_in_order: Mask = np.maximum.accumulate(arrived) == arrived
        return is_in_order

    @cached_property
    def stretches(self) -> Int64s:
        """Numbers the stretches of each key from 0; a stretch is a run of rows that arrived in order of time."""
        arrived = np.lexsort((self.numbers, self.keys))
        begun = np.cumsum(np.diff(arrived, prepend=-1) < 0)
        stretches = np.empty(len(arrived), dtype=np.int64)
        stretches[arrived] = begun
        # Keys ascend, so the first row of the next key continues the last stretch of the previous key.
        return stretches - begun[np.searchsorted(self.keys, self.keys)]

    def find_able(self, step: int) -> Int64s:
        """Returns the positions of the rows that satisfy the gate of a step."""
        return np.flatnonzero(self.bits >> step & 1)


@dataclass(frozen=True)
class _Matches:
    """Matches in the order of their beginnings; all arrays have shape (matches,).

    Attributes:
        limit: The position of the last row that may belong to each match.
        first: For each step that is reached, the place of the first row that it took among those it may take; beyond
            all places if none did.
    """

    limit: Int64s
    first: list[Int64s]

    def take(self, index: Mask | Int64s) -> _Matches:
        """Returns the matches at some positions or of a mask."""
        return _Matches(self.limit[index], [each[index] for each in self.first])


class _Listed:
    """The rows that a linked step took in a match, as places, with the arrays of their fields."""

    def __init__(self, places: Int64s) -> None:
        self.places: list[int] = places.tolist()
        self.arrays: dict[str, Array] = {}


class MatchSearch:
    """The matches of rows that arrived in order, and the rows that may end them.

    `ends` are the positions of these rows, ascending, and `low` the position of the first row that counts for each. If
    `is_fixed`, only the first row of step one that counts begins a match.
    """

    def __init__(self, steps: Steps, rows: KeyedRows, ends: Int64s, low: Int64s, is_fixed: bool) -> None:
        self._steps, self._rows = steps, rows
        self._specs, self._is_own = [each.step for each in steps.steps], [each.own for each in steps.steps]
        self._able = [rows.find_able(number) for number in range(len(steps.steps))]
        self._columns: dict[tuple[str, int], Column] = {}
        self._arrays: dict[tuple[str, int], Array] = {}
        self._listed: dict[tuple[int, int], _Listed] = {}
        self._listed_rows = 0
        # The places of the rows that may end matches, and of the first and last row with which these begin.
        self._own: Int64s = np.searchsorted(self._able[-1], ends)
        self._low: Int64s = np.searchsorted(self._able[0], low)
        self._high: Int64s = np.searchsorted(self._able[0], ends, "right") - 1
        if is_fixed:
            self._high = np.minimum(self._low, self._high)
        may_begin = self._low <= self._high
        begins = list_between(self._low[may_begin], self._high[may_begin])
        limit = ends[np.searchsorted(self._low, begins, "right") - 1]
        self._known, self._starts = self._find_all(_Matches(limit, [begins]))

    def settle(self) -> tuple[Int64s, Mask]:
        """Finds the earliest match that each row ends.

        Returns the positions of the first row that each step took, shape (rows, steps), -1 if the row ends no match;
        and marks the rows that end none and have an error in the last condition for the earliest beginning.
        """
        known, last = self._known, self._steps.last
        begins, has_failed = np.full((len(self._own), last + 1), -1), np.zeros(len(self._own), dtype=bool)
        most = self._specs[-1].at_most
        excess = None if most is None else self._find_more(known, last, most)
        reached = np.flatnonzero(known.first[-1] < len(self._able[-1]))
        reached = reached[self._mark_few(known.take(reached), last)]
        found = self._find_earliest(known.take(reached), None if excess is None else excess[reached])
        ended = np.flatnonzero(found >= 0)
        matches = known.take(reached[found[ended]])
        for number, places in enumerate(matches.first):
            begins[ended, number] = self._able[number][places]
        if not self._is_own[-1]:
            left = np.flatnonzero(found < 0)
            has_failed[left] = self._find_failed(left, excess)
        return begins, has_failed

    def _find_all(self, matches: _Matches) -> tuple[_Matches, Int64s]:
        """Finds the first row of each step, and the place from which the last step may begin."""
        starts = matches.first[0]
        for number in range(1, self._steps.last + 1):
            enough = self._find_more(matches, number - 1, self._specs[number - 1].at_least - 1)
            position = np.append(self._able[number - 1], len(self._rows.keys))[enough]
            starts = np.searchsorted(self._able[number], position, "right")
            is_reached = starts < np.searchsorted(self._able[number], matches.limit, "right")
            matches, starts = matches.take(is_reached), starts[is_reached]
            first = starts if self._is_own[number] else self._find_nth(matches, number, starts, 1, None)
            matches = _Matches(matches.limit, [*matches.first, first])
            if number < self._steps.last:
                matches = matches.take(first < len(self._able[number]))
                matches = matches.take(self._mark_few(matches, number))
        return matches, starts

    def _find_more(self, matches: _Matches, number: int, more: int) -> Int64s:
        """Finds the place of the row that a step takes `more` rows after its first; beyond all if there is none."""
        able, first = self._able[number], matches.first[number]
        if more == 0 or self._is_own[number]:
            return np.minimum(first + more, len(able))
        found, begun = np.full(len(first), len(able)), np.flatnonzero(first < len(able))
        first = first[begun]
        found[begun] = self._find_nth(matches.take(begun), number, first + 1, more, able[first])
        return found

    def _find_nth(self, matches: _Matches, number: int, starts: Int64s, nth: int, ends: Int64s | None) -> Int64s:
        """Finds the place of the nth row, from a place on, that satisfies a linked step; beyond all if there is none.

        `ends` are the positions where the step before ends in each match; None if it ends with the row.
        """
        able = self._able[number]
        last = np.searchsorted(able, matches.limit, "right") - 1
        compared = self._list_compared(matches, number, ends) if len(able) > _MIN_LOOKED_UP else []

        def holds(owners: Int64s, places: Int64s) -> Mask:
            of_pairs = able[places] if ends is None else ends[owners]
            return self._evaluate(matches, owners, number, places, of_pairs).is_true()

        items = NextItems(compared, len(able), len(starts))
        found = items.find_nth(starts, last, nth, holds, 1 if compared else _FIRST_ROWS)
        return np.where(found < 0, len(able), found)

    def _mark_few(self, matches: _Matches, number: int, ends: Int64s | None = None) -> Mask:
        """Marks the matches in which the step before this one does not take too many rows.

        That step takes rows up to the positions `ends`; None for the first row of this step.
        """
        most = self._specs[number - 1].at_most if number else None
        if most is None:
            return np.ones(len(matches.limit), dtype=bool)
        ends = self._able[number][matches.first[number]] if ends is None else ends
        excess = self._find_more(matches, number - 1, most)
        mask: Mask = excess >= np.searchsorted(self._able[number - 1], ends)
        return mask

    def _find_earliest(self, matches: _Matches, excess: Int64s | None) -> Int64s:
        """Finds the earliest match that each row ends, -1 for none; `excess` is the first row too many, as a place."""
        last, own, begins = self._steps.last, self._own, matches.first[0]
        enough = self._find_more(matches, last, self._specs[-1].at_least - 1)
        ends = self._able[last][matches.first[last]]
        compared, contained = [Compared("<=", Column(BIGINT, enough), Column(BIGINT, own))], list[Contained]()
        if excess is not None:
            compared.append(Compared(">", Column(BIGINT, excess), Column(BIGINT, own)))
        if not self._is_own[last] and len(begins) > _MIN_LOOKED_UP:
            compared += [each.turn(own) for each in self._list_compared(matches, last, ends)]
            contained = self._list_contained(matches, own, ends)

        def holds(owners: Int64s, at: Int64s) -> Mask:
            mask = enough[at] <= own[owners]
            if excess is not None:
                mask &= own[owners] < excess[at]
            if not self._is_own[last]:
                at = at[mask]
                mask[mask] = self._evaluate(matches, at, last, own[owners[mask]], ends[at]).is_true()
            return mask

        items = NextItems(compared, len(begins), len(own), contained)
        first, until = np.searchsorted(begins, self._low), np.searchsorted(begins, self._high, "right") - 1
        return items.find_nth(first, until, 1, holds)

    def _find_failed(self, left: Int64s, excess: Int64s | None) -> Mask:
        """Marks the rows for which the last condition has an error in the match with the earliest beginning."""
        has_failed, known, last = np.zeros(len(left), dtype=bool), self._known, self._steps.last
        begins, own = known.first[0], self._own[left]
        if not len(begins):
            return has_failed
        earliest = np.minimum(np.searchsorted(begins, self._low[left]), len(begins) - 1)
        is_judged = (begins[earliest] == self._low[left]) & (self._low[left] <= self._high[left])
        is_judged &= self._starts[earliest] <= own
        if excess is not None:
            is_judged &= own <= excess[earliest]
        at, own, earliest = np.flatnonzero(is_judged), own[is_judged], earliest[is_judged]
        ends = self._able[last][np.minimum(known.first[last][earliest], own)]
        errors = self._evaluate(known, earliest, last, own, ends).error
        if errors is not None and errors.any():
            has_failed[at[errors]] = self._mark_few(known.take(earliest[errors]), last, ends[errors])
        return has_failed

    def _list_compared(self, matches: _Matches, number: int, ends: Int64s | None) -> list[Compared]:
        """Lists comparisons of the rows that a step may take with matches, all true if its condition is.

        `ends` is as in `_find_nth`.
        """
        condition, compared = self._steps.steps[number].condition, list[Compared]()
        able, before = self._able[number], number - 1
        is_open = ends is None and self._is_own[before]
        ranks = np.searchsorted(self._able[before], able)
        for each in self._find_linked(condition):
            own = self._evaluate_rows(number, each.left)
            if is_open and each.left.type.is_integer and self._is_count(each.right, before):
                # The step before took the rows from its first one in the match up to this row.
                counted = ranks - np.clip(own.values.astype(np.int64), -_MAX_NUMBER, _MAX_NUMBER)
                first = Column(BIGINT, matches.first[before])
                compared.append(Compared(each.turn().symbol, Column(BIGINT, counted, ~own.is_known()), first))
            elif self._is_settled(each.right, number, is_closed=ends is not None):
                known_ends = self._able[before][matches.first[before]] + 1 if ends is None else ends
                if is_open:
                    enough = matches.first[before] + self._specs[before].at_least - 1
                    known_ends = self._able[before][enough] + 1
                at = np.arange(len(matches.limit))
                others = self._evaluate(matches, at, number, None, known_ends, each.right)
                compared.append(Compared(each.symbol, own, others))
            elif is_open and self._reads_last(each.right, before):
                # The last rows of the step before are the same in each match.
                some = _Matches(able, [np.maximum(ranks - self._specs[before].at_least, 0)] * number)
                others = self._evaluate(some, np.arange(len(able)), number, None, able, each.right)
                is_true = Column(BOOLEAN, Compared(each.symbol, own, others).is_true())
                compared.append(Compared("=", is_true, Column(BOOLEAN, np.ones(len(matches.limit), dtype=bool))))
        for contains in find_containments(condition) if is_open else ():
            step, name = self._split(contains.array)
            if step == before:
                values, wanted = self._read_column(name, before), self._evaluate_rows(number, contains.value)
                place = Occurrences(values, wanted).find_last_before(ranks)
                symbol, first = ">=" if contains.is_wanted else "<", Column(BIGINT, matches.first[before])
                compared.append(Compared(symbol, Column(BIGINT, place), first))
        return compared

    def _list_contained(self, matches: _Matches, own: Int64s, ends: Int64s) -> list[Contained]:
        """Lists the arrays that must contain, or must not contain, a value of a row that ends a match."""
        last, contained = self._steps.last, list[Contained]()
        for each in find_containments(self._steps.steps[last].condition):
            number, name = self._split(each.array)
            # Beginnings ascend from match to match, and each step took adjacent rows.
            if number is not None and all(self._is_own[: number + 1]):
                end = np.searchsorted(self._able[number], self._find_ends(matches, number, ends, None))
                values, others = self._read_column(name, number), self._evaluate_rows(last, each.value).take(own)
                contained.append(Contained(each.is_wanted, matches.first[number], end, values, others))
        return contained

    def _find_linked(self, condition: Expression) -> Sequence[Comparison]:
        """Finds the comparisons of the event with earlier steps in a condition; the left side of each is the event."""
        both = [side for each in find_comparisons(condition) for side in (each, each.turn())]

        def is_earlier(part: Expression) -> list[bool]:
            return [self._split(name)[0] is not None for name in part.fields]

        return [
            each for each in both if any(own := is_earlier(each.right)) and all(own) and not any(is_earlier(each.left))
        ]

    def _split(self, name: str) -> tuple[int | None, str]:
        """Splits a name in a condition into the number of the earlier step, None for the event itself, and the field."""
        before, field = self._steps.compiled.split_name(name)
        return (self._steps.numbers[before] if before else None), field

    def _is_count(self, part: Expression, before: int) -> bool:
        """Returns whether an expression is the number of rows that a step took."""
        name = self._specs[before].name
        if part.sql == f"{name}.{COUNT}":
            return True
        return len(part.fields) == 1 and part.sql == f"size({next(iter(part.fields))})" and self._reads(part, before)

    def _reads(self, part: Expression, step: int) -> bool:
        """Returns whether an expression reads this earlier step and no other one."""
        return all(self._split(name)[0] == step for name in part.fields)

    def _reads_last(self, part: Expression, before: int) -> bool:
        """Returns whether an expression only reads the last rows of a step, which it has taken in any match."""
        least = self._specs[before].at_least
        items = find_items(part).values()
        return self._reads(part, before) and all(each and all(-least <= item < 0 for item in each) for each in items)

    def _is_settled(self, part: Expression, number: int, *, is_closed: bool) -> bool:
        """Returns whether an expression of earlier steps has one value in each match, whatever rows these still take."""
        for name, items in find_items(part).items():
            step, _ = self._split(name)
            if step is None:
                return False
            known = 1
            if self._is_own[step]:
                known = self._specs[step].at_least
                if is_closed or step < number - 1:
                    continue
            if items is None or not all(1 <= item <= known for item in items):
                return False
        return True

    def _evaluate_rows(self, number: int, part: Expression) -> Column:
        """Evaluates an expression that reads the event alone for all rows that a step may take."""
        columns = {name: self._read_column(name, number) for name in part.fields}
        return part.evaluate(columns, len(self._able[number]))

    def _evaluate(
        self,
        matches: _Matches,
        at: Int64s,
        number: int,
        places: Int64s | None,
        ends: Int64s,
        part: Expression | None = None,
    ) -> Column:
        """Evaluates the condition of a step, or a part of it, for pairs of a match and a row.

        Args:
            matches: The matches.
            at: The position of the match of each pair.
            number: The step.
            places: The place of the row of each pair; None if the part reads earlier steps alone.
            ends: The position where the step before ends in each pair.
            part: The part of the condition; None for all of it.
        """
        condition, columns = part or self._steps.steps[number].condition, dict[str, Column]()
        for name in condition.fields:
            step, field = self._split(name)
            if step is None:
                assert places is not None
                columns[name] = self._read_column(name, number).take(places)
                continue
            end: Int64s = np.searchsorted(self._able[step], self._find_ends(matches, step, ends, at, number))
            if self._is_own[step] or find_items(condition).get(name) == frozenset({1}):
                begin = matches.first[step][at]
                if field == COUNT:
                    columns[name] = Column(BIGINT, end - begin)
                    continue
                values = self._read_array(field, step)
                parts = [ArrayPart(values, *each) for each in zip(begin.tolist(), end.tolist(), strict=True)]
            else:
                listed = self._list_taken(matches, at, step)
                counts = [bisect_left(each.places, stop) for each, stop in zip(listed, end.tolist(), strict=True)]
                if field == COUNT:
                    columns[name] = Column(BIGINT, np.array(counts, dtype=np.int64))
                    continue
                arrays = [self._read_listed(each, field, step) for each in listed]
                parts = [ArrayPart(values, 0, count) for values, count in zip(arrays, counts, strict=True)]
            columns[name] = Column(array(self._steps.fields[field]), make_objects(parts))
        return condition.evaluate(columns, len(at))

    def _find_ends(
        self, matches: _Matches, step: int, ends: Int64s, at: Int64s | None, number: int | None = None
    ) -> Int64s:
        """Finds the positions where a step ends; `ends` are those of the step before `number`, else before the last."""
        if step == (self._steps.last if number is None else number) - 1:
            return ends
        first = matches.first[step + 1]
        return self._able[step + 1][first if at is None else first[at]]

    def _list_taken(self, matches: _Matches, at: Int64s, step: int) -> list[_Listed]:
        """Lists the rows that a linked step took in each of some matches, up to the next step if that is known."""
        begins = matches.first[0][at].tolist()
        if self._listed_rows > _MAX_LISTED:
            self._listed, self._listed_rows = {}, 0
        different, first_at = np.unique(matches.first[0][at], return_index=True)
        known = {begin: self._listed[step, begin] for begin in different.tolist() if (step, begin) in self._listed}
        unknown = [n for n, begin in enumerate(different.tolist()) if begin not in known]
        for start in range(0, len(unknown), _MATCHES_AT_ONCE):
            numbers = unknown[start : start + _MATCHES_AT_ONCE]
            # This lists the rows of an earlier linked step, too, and may empty `_listed`.
            places, edges = self._find_taken(matches.take(at[first_at[numbers]]), step)
            for begin, taken in zip(different[numbers].tolist(), np.split(places, edges), strict=True):
                known[begin] = self._listed[step, begin] = _Listed(taken)
            self._listed_rows += len(places)
        return [known[begin] for begin in begins]

    def _find_taken(self, matches: _Matches, step: int) -> tuple[Int64s, Int64s]:
        """Finds the places of the rows that a linked step takes in matches, and where those of each next match begin."""
        able, first = self._able[step], matches.first[step]
        if len(matches.first) > step + 1:
            is_known = matches.first[step + 1] < len(self._able[step + 1])
            following = np.append(self._able[step + 1], len(self._rows.keys))[matches.first[step + 1]]
            stops = np.searchsorted(able, np.where(is_known, following, matches.limit + 1))
        else:
            stops = np.searchsorted(able, matches.limit, "right")
        lengths, ends = stops - first, able[first]
        owners, places = np.repeat(np.arange(len(first)), lengths), list_ranges(first, lengths)
        is_taken = self._evaluate(matches, owners, step, places, ends[owners]).is_true()
        return places[is_taken], np.searchsorted(owners[is_taken], np.arange(1, len(first)))

    def _read_listed(self, listed: _Listed, field: str, step: int) -> Array:
        values = listed.arrays.get(field)
        if values is None:
            known = self._read_array(field, step).values
            values = listed.arrays[field] = Array([known[place] for place in listed.places])
        return values

    def _read_column(self, name: str, step: int) -> Column:
        """Reads a field or in_list call of all rows that a step may take."""
        column = self._columns.get((name, step))
        if column is None:
            column = self._steps.make_column(name, lambda each: self._rows.read(each, self._able[step]))
            self._columns[name, step] = column
        return column

    def _read_array(self, field: str, step: int) -> Array:
        values = self._arrays.get((field, step))
        if values is None:
            values = self._arrays[field, step] = Array(self._rows.read(field, self._able[step]))
        return values

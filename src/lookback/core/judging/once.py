"""Finds the matches of a sequence with `take: once`: at most one partial match of a key waits at each stage.

Steps a, then b, then c. A partial match that moves on, or a new one, replaces the one that waits there:

    row          a1      a2      b1         a3         b2         c1         c2
    after a      a1      a2                 a3
    after b                      a2 b1      a2 b1      a3 b2
    match                                                         a3 b2 c1   none waits

This is the machine of EQL. A step that needs n events is n stages. A row is offered to the last stage first, so it can
end one match and begin the next, but never moves the same partial match twice.

A partial match never meets an older one on its way, except to replace it. So what a row completes depends only on the
rows up to `within` before it, and no state is kept beside the rows.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from lookback.core.judging.matches import KeyedRows
from lookback.core.judging.steps import Steps
from lookback.core.judging.taken import Row, TakenRows
from lookback.core.values.columns import Mask
from lookback.core.values.keys import Int64s

# The positions of the rows that a partial match took, one for each stage that it has passed.
Partial: TypeAlias = tuple[int, ...]


class OnceSearch:
    """The matches of rows that arrived in order, and the rows that end them.

    Args:
        steps: The steps.
        rows: The rows.
        ends: The positions of the rows to answer for, ascending.
        within: How long a match may take, in microseconds.
    """

    def __init__(self, steps: Steps, rows: KeyedRows, ends: Int64s, within: int) -> None:
        self._steps, self._rows, self._ends, self._within = steps, rows, ends, within
        self._times: list[int] = rows.times.tolist()
        # The step of each stage.
        self._stages = list_stages(steps)
        # The stages, last first, whose gates a row satisfies, by its bits.
        self._able: dict[int, list[int]] = {}
        self._values: list[list[object]] = []
        if not all(step.own for step in steps.steps):
            everywhere = np.arange(len(rows.keys))
            columns = [rows.read(name, everywhere) for name in steps.compiled.kept]
            self._values = list(map(list, zip(*columns, strict=True))) if columns else [[] for _ in everywhere]

    def settle(self) -> tuple[Int64s, Mask]:
        """Finds the match that each row ends.

        Returns the positions of the rows that the stages took, shape (rows, stages), -1 if the row ends no match; and
        marks the rows that end none and have an error in the last condition for the partial match that waits.
        """
        begins = np.full((len(self._ends), len(self._stages)), -1)
        has_failed = np.zeros(len(self._ends), dtype=bool)
        number_of = {at: number for number, at in enumerate(self._ends.tolist())}
        waiting: list[Partial | None] = [None] * len(self._stages)
        last_key, until = -1, 1 << self._steps.until
        rows = zip(self._rows.keys.tolist(), self._rows.bits.tolist(), strict=True)
        for at, (key, bits) in enumerate(rows):
            if key != last_key:
                waiting, last_key = [None] * len(self._stages), key
            match, failed = self._offer(at, bits, waiting)
            number = number_of.get(at)
            if number is not None and match is not None:
                begins[number] = match
            elif number is not None:
                has_failed[number] = failed
            if bits & until:
                waiting = [None] * len(self._stages)
        return begins, has_failed

    def _offer(self, at: int, bits: int, waiting: list[Partial | None]) -> tuple[Partial | None, bool]:
        """Offers a row to the stages. Returns the match that it ends, and whether the last condition has an error."""
        match, failed, last = None, False, len(self._stages) - 1
        for stage in self._find_able(bits):
            partial = waiting[stage - 1] if stage else ()
            if partial is None or (partial and not self._is_in_time(partial, at)):
                continue
            is_taken = self._is_taken(self._stages[stage], at, partial)
            if is_taken is None:
                failed |= self._stages[stage] == self._steps.last
            if not is_taken:
                continue
            if stage:
                waiting[stage - 1] = None
            if stage == last:
                match = (*partial, at)
            else:
                waiting[stage] = (*partial, at)
        return match, failed

    def _find_able(self, bits: int) -> list[int]:
        able = self._able.get(bits)
        if able is None:
            able = [stage for stage, step in enumerate(self._stages) if bits >> step & 1][::-1]
            self._able[bits] = able
        return able

    def _is_in_time(self, partial: Partial, at: int) -> bool:
        return self._times[partial[0]] >= self._times[at] - self._within

    def _is_taken(self, step: int, at: int, partial: Partial) -> bool | None:
        """Returns whether a step takes a row that satisfies its gate; None if its condition has an error."""
        if self._steps.steps[step].own:
            return True
        taken = [TakenRows() for _ in self._steps.steps[:step]]
        for place, of_step in zip(partial, self._stages, strict=False):
            if of_step < step:
                taken[of_step].append(self._make_row(place))
        return self._steps.is_taken(step, self._make_row(at), taken)

    def _make_row(self, at: int) -> Row:
        rows = self._rows
        return Row(self._times[at], "", int(rows.bits[at]), self._values[at], int(rows.numbers[at]))


def list_stages(steps: Steps) -> list[int]:
    """Lists the step of each stage: a step that needs n events has n of them."""
    return [number for number, each in enumerate(steps.steps) for _ in range(each.step.at_least)]

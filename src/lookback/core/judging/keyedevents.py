"""The events of a segment under the keys under which they take part in a sequence: a row for each event and key.

Steps a and b, where b has a key of its own:

    event        group_by    key of b    may satisfy      rows
    e1           p           q           a                e1 under p, as a
    e2           q           p           b                e2 under p, as b
    e3           q           p           a and b          e3 under q, as a; e3 under p, as b
    e4           p           p           a and b          e4 under p, as a and b

Without keys of their own each event has one row, under the key of group_by.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lookback.core.judging.rulerun import RuleRun, SelectKeys
from lookback.core.judging.steps import Steps
from lookback.core.rules.compiled import SequenceKey
from lookback.core.values.columns import Mask
from lookback.core.values.keys import Int64s, Keys, number_keys


class KeyedEvents:
    """The events that may satisfy a condition, under each key that belongs to this shard and that `select` marks.

    All arrays but `distinct` have shape (rows,); rows are in order of arrival.

    Attributes:
        positions: The position of each row's event.
        numbers: The number of each row's key.
        bits: The conditions that the event may satisfy under this key.
        distinct: The keys by number, sorted.
    """

    def __init__(
        self, rule_run: RuleRun, steps: Steps, selected: Mask, bits: Int64s, select: SelectKeys | None = None
    ) -> None:
        keys = steps.compiled.keys
        self._rule_run, self._fields = rule_run, [key.fields for key in keys]
        if len(keys) == 1 and select is None:
            grouping = rule_run.grouping
            self.positions: Int64s = np.flatnonzero(selected & grouping.mine & (bits != 0))
            self.numbers: Int64s = grouping.numbers[self.positions]
            self.bits: Int64s = bits[self.positions]
            self.distinct = grouping.distinct
            self._first, self._of_key = grouping.first_positions, np.zeros(len(self.distinct), dtype=np.int64)
            return
        parts = [self._list_rows(key, selected, bits, select) for key in keys]
        self.positions, self.bits = (np.concatenate([part[at] for part in parts]) for at in (0, 1))
        self.numbers, self.distinct = number_keys(Keys.concat([found for _, _, found in parts]))
        # Of each key an event that has it, and by which fields.
        self._first, self._of_key = (np.zeros(len(self.distinct), dtype=np.int64) for _ in range(2))
        self._first[self.numbers] = self.positions
        self._of_key[self.numbers] = np.repeat(np.arange(len(parts)), [len(at) for at, _, _ in parts])
        self._merge()

    def _list_rows(
        self, key: SequenceKey, selected: Mask, bits: Int64s, select: SelectKeys | None
    ) -> tuple[Int64s, Int64s, Keys]:
        """Lists the events that may satisfy a condition with this key: positions, bits and keys."""
        grouping, own = self._rule_run.measuring.group_events(key.fields), bits & key.bits
        at = np.flatnonzero(selected & grouping.mine & (own != 0))
        found = grouping.distinct.take(grouping.numbers[at])
        if select is not None:
            is_selected = select(found)
            at, found = at[is_selected], found.take(is_selected)
        return at, own[at], found

    def _merge(self) -> None:
        """Merges the rows of an event with equal keys, and sorts rows by arrival."""
        order = np.lexsort((self.numbers, self.positions))
        positions, numbers = self.positions[order], self.numbers[order]
        is_first = np.ones(len(order), dtype=bool)
        is_first[1:] = (positions[1:] != positions[:-1]) | (numbers[1:] != numbers[:-1])
        starts = np.flatnonzero(is_first)
        if len(starts):
            self.bits = np.bitwise_or.reduceat(self.bits[order], starts)
        self.positions, self.numbers = positions[starts], numbers[starts]

    def list_stored_keys(self, numbers: Int64s) -> list[list[Any]]:
        """Returns the values of these keys in the form that tables store."""
        found: list[list[Any]] = [[] for _ in numbers]
        for number, fields in enumerate(self._fields):
            at = np.flatnonzero(self._of_key[numbers] == number)
            stored = self._rule_run.list_stored_keys(self._first[numbers[at]], fields)
            for place, values in zip(at.tolist(), stored, strict=True):
                found[place] = values
        return found

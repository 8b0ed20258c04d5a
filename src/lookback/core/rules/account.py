"""Counts the events that each rule wants, straight from all events, to compare with what the shards judged.

The count uses neither keys nor shards, so it finds an event that was lost on its way to a shard.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from lookback.core.expressions.compiling import Expression
from lookback.core.rules.compiled import CompiledRule
from lookback.core.streams.events import Events

# A version that was judged from a commit on: rule_id, version, `CompiledRule.where_sql`, commit.
Taken = tuple[str, int, str, int]


@dataclass(frozen=True)
class Account:
    """The conditions to count, and the commits that part their counts: those between two cuts are a span, numbered from 0."""

    conditions: Mapping[str, Expression | None]  # by `CompiledRule.where_sql`; None for all events
    cuts: tuple[int, ...]  # the commits after which rules change, ascending

    @classmethod
    def of(cls, rules: Iterable[CompiledRule], cuts: Iterable[int]) -> Account:
        """Builds the account of all rules but those that read lists: the events alone do not show what these want."""
        counted = (
            rule for rule in rules if rule.where is None or (rule.where.is_readable and not rule.where.memberships)
        )
        return cls({rule.where_sql: rule.where for rule in counted}, tuple(sorted(set(cuts))))

    @property
    def fields(self) -> frozenset[str]:
        """All fields that the conditions read."""
        return frozenset().union(*(each.fields for each in self.conditions.values() if each is not None))

    def count_wanted(self, events: Events) -> list[tuple[str, int, int]]:
        """Counts the events that satisfy each condition in each span, as (condition, span, count)."""
        spans = np.searchsorted(self.cuts, events.commits)
        found = []
        for name, condition in self.conditions.items():
            wanted = spans if condition is None else spans[events.value(condition).is_true()]
            found += [(name, span, count) for span, count in sorted(Counter(wanted.tolist()).items())]
        return found

    def find_missing(
        self, wanted: Mapping[tuple[str, int], int], taken: Mapping[Taken, int]
    ) -> Counter[tuple[str, int]]:
        """Counts the events that no shard took, or more than one, by rule_id and version.

        Args:
            wanted: The counts of `count_wanted` over all events, by condition and span.
            taken: The counts of all shards.
        """
        by_span = Counter[tuple[str, int, str, int]]()
        for (rule_id, version, condition, commit), count in taken.items():
            by_span[rule_id, version, condition, bisect_left(self.cuts, commit)] += count
        missing = Counter[tuple[str, int]]()
        for (rule_id, version, condition, span), count in by_span.items():
            if condition in self.conditions:
                missing[rule_id, version] += abs(wanted.get((condition, span), 0) - count)
        return +missing

"""Counts the events that rules want by reading all of them plainly, to compare with those that shards have judged.

Neither keys nor shards come into it, so an event that is lost on its way to a shard is missed here.
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

# The version of a rule that was judged from a commit on: rule_id, version, `CompiledRule.where_sql`, commit.
Taken = tuple[str, int, str, int]


@dataclass(frozen=True)
class Account:
    """What is counted.

    conditions: by `CompiledRule.where_sql`, None for all events. cuts: the commits after which rules change, in ascending
    order; the commits between two of them are a span, and spans are numbered from 0.
    """

    conditions: Mapping[str, Expression | None]
    cuts: tuple[int, ...]

    @classmethod
    def of(cls, rules: Iterable[CompiledRule], cuts: Iterable[int]) -> Account:
        """Returns the account of these rules, except those that ask lists: events alone do not tell what they want."""
        counted = (
            rule for rule in rules if rule.where is None or (rule.where.is_readable and not rule.where.memberships)
        )
        return cls({rule.where_sql: rule.where for rule in counted}, tuple(sorted(set(cuts))))

    @property
    def fields(self) -> frozenset[str]:
        """The fields that the conditions read."""
        return frozenset().union(*(each.fields for each in self.conditions.values() if each is not None))

    def count_wanted(self, events: Events) -> list[tuple[str, int, int]]:
        """Counts the events that satisfy each condition, by condition and span."""
        spans = np.searchsorted(self.cuts, events.commits)
        found = []
        for name, condition in self.conditions.items():
            wanted = spans if condition is None else spans[events.value(condition).is_true()]
            found += [(name, span, count) for span, count in sorted(Counter(wanted.tolist()).items())]
        return found

    def find_missing(
        self, wanted: Mapping[tuple[str, int], int], taken: Mapping[Taken, int]
    ) -> Counter[tuple[str, int]]:
        """Counts the events that a version wants and no shard took, or that several did, by rule_id and version.

        Args:
            wanted: What `count_wanted` counted of all events, by condition and span.
            taken: What all shards took.
        """
        by_span = Counter[tuple[str, int, str, int]]()
        for (rule_id, version, condition, commit), count in taken.items():
            by_span[rule_id, version, condition, bisect_left(self.cuts, commit)] += count
        missing = Counter[tuple[str, int]]()
        for (rule_id, version, condition, span), count in by_span.items():
            if condition in self.conditions:
                missing[rule_id, version] += abs(wanted.get((condition, span), 0) - count)
        return +missing

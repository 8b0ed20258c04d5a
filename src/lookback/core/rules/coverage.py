"""Finds the events, and their fields, that dispatch must send so that every rule in force can be judged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lookback.core.expressions.compiling import drop_uncertain
from lookback.core.rules.compiled import CompiledRule

# A grouping set (the fields of a key in order), and the condition of the events to send as canonical SQL; None for all events.
Want = tuple[tuple[str, ...], "str | None"]
# With more conditions on one grouping set, sending all of its events costs less than evaluating the conditions.
MAX_CONDITIONS = 16


@dataclass(frozen=True)
class Coverage:
    """The events and fields that dispatch sends: each event once per grouping set whose condition it satisfies."""

    wants: frozenset[Want] = frozenset()
    fields: frozenset[str] = frozenset()

    @classmethod
    def of(cls, wants: Iterable[Want], fields: Iterable[str]) -> Coverage:
        """Builds the simplest coverage that sends all of these."""
        conditions: dict[tuple[str, ...], set[str | None]] = {}
        for group_by, condition in wants:
            conditions.setdefault(group_by, set()).add(condition)
        simplest = {
            (group_by, each)
            for group_by, wanted in conditions.items()
            for each in ([None] if None in wanted or len(wanted) > MAX_CONDITIONS else wanted)
        }
        return cls(frozenset(simplest), frozenset(fields))

    @property
    def grouping_sets(self) -> list[tuple[str, ...]]:
        """The grouping sets, sorted."""
        return sorted({group_by for group_by, _ in self.wants})

    def conditions(self, group_by: tuple[str, ...]) -> list[str] | None:
        """Returns the conditions of a grouping set, any of which an event must satisfy, sorted; None for all events."""
        conditions = {condition for grouping_set, condition in self.wants if grouping_set == group_by}
        return None if None in conditions else sorted(map(str, conditions))

    def covers(self, other: Coverage) -> bool:
        """Returns whether this sends everything that `other` sends."""
        sent = all((group_by, None) in self.wants or (group_by, where) in self.wants for group_by, where in other.wants)
        return sent and other.fields <= self.fields

    def __or__(self, other: Coverage) -> Coverage:
        return Coverage.of(self.wants | other.wants, self.fields | other.fields)

    def __and__(self, other: Coverage) -> Coverage:
        """Returns what both send."""
        kept = {want for want in self.wants if other.covers(Coverage(frozenset({want})))}
        kept |= {want for want in other.wants if self.covers(Coverage(frozenset({want})))}
        return Coverage(frozenset(kept), self.fields & other.fields)

    def to_dict(self) -> dict[str, Any]:
        """Returns the coverage as lists, for JSON."""
        wants = [[list(group_by), where] for group_by, where in self.wants]
        return {"wants": sorted(wants, key=repr), "fields": sorted(self.fields)}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Coverage:
        """Reads what `to_dict` wrote."""
        wants = frozenset((tuple(group_by), where) for group_by, where in document["wants"])
        return cls(wants, frozenset(document["fields"]))


def find_coverage(rules: Iterable[CompiledRule]) -> Coverage:
    """Returns the coverage with which all of these rules can be judged."""
    wants: set[Want] = set()
    fields: set[str] = set()
    for rule in rules:
        for fields_of_key, condition in rule.routes:
            # Dispatch sends all events if it might read the condition differently than the shards, so that none is
            # lost. Only the shards know the lists, and how they round.
            sent = drop_uncertain(condition) if condition is not None and condition.is_readable else None
            wants.add((fields_of_key, None if sent is None else sent.sql))
        fields.update(rule.fields)
    return Coverage.of(wants, fields)

"""What dispatch must send of the events, so that every rule in force can be judged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

from lookback.core.compiled import CompiledRule

# A grouping set (fields in ascending order) and the condition, as canonical SQL, that its events satisfy; None: all events.
Want = tuple[tuple[str, ...], "str | None"]
# With more conditions on one grouping set, sending all of its events costs less than telling which are wanted.
MOST_CONDITIONS = 16


@dataclass(frozen=True)
class Coverage:
    """What is sent: of each event these `fields`, to the shard of its key under each grouping set that wants it."""

    wants: frozenset[Want] = frozenset()
    fields: frozenset[str] = frozenset()

    @property
    def grouping_sets(self) -> list[tuple[str, ...]]:
        """The grouping sets, sorted."""
        return sorted({group_by for group_by, _ in self.wants})

    def conditions(self, group_by: tuple[str, ...]) -> list[str] | None:
        """The conditions, sorted, of which an event satisfies one to be sent by this grouping set; None: all are sent."""
        found = {condition for wanted, condition in self.wants if wanted == group_by}
        return None if None in found else sorted(map(str, found))

    def covers(self, other: Coverage) -> bool:
        """Whether all that `other` asks for is sent."""
        sent = all((group_by, None) in self.wants or (group_by, where) in self.wants for group_by, where in other.wants)
        return sent and other.fields <= self.fields

    def __or__(self, other: Coverage) -> Coverage:
        wants = self.wants | other.wants
        wide = {
            group_by
            for group_by in {group_by for group_by, _ in wants}
            if (group_by, None) in wants or sum(1 for wanted, _ in wants if wanted == group_by) > MOST_CONDITIONS
        }
        narrow = {want for want in wants if want[0] not in wide}
        return Coverage(frozenset({*narrow, *((group_by, None) for group_by in wide)}), self.fields | other.fields)

    def __and__(self, other: Coverage) -> Coverage:
        """What both send."""
        kept = {want for want in self.wants if other.covers(Coverage(frozenset({want})))}
        kept |= {want for want in other.wants if self.covers(Coverage(frozenset({want})))}
        return Coverage(frozenset(kept), self.fields & other.fields)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, for JSON."""
        wants = [[list(group_by), where] for group_by, where in self.wants]
        return {"wants": sorted(wants, key=repr), "fields": sorted(self.fields)}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Coverage:
        """The coverage that `to_dict` wrote."""
        wants = frozenset((tuple(group_by), where) for group_by, where in document["wants"])
        return cls(wants, frozenset(document["fields"]))


def needed_by(rule: CompiledRule) -> Coverage:
    """What dispatch must send for a rule to be judged."""
    where = None if rule.where is None else rule.where.sql
    return Coverage(frozenset({(rule.group_by, where)}), frozenset(rule.fields))


def needed_by_all(rules: Iterable[CompiledRule]) -> Coverage:
    """What dispatch must send for all of these rules."""
    return reduce(or_, map(needed_by, rules), Coverage())

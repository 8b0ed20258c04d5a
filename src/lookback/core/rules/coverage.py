"""What dispatch must send of the events, so that every rule in force can be judged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lookback.core.rules.compiled import CompiledRule

# A grouping set (fields in ascending order) and the condition, as canonical SQL, that its events satisfy; None: all events.
Want = tuple[tuple[str, ...], "str | None"]
# With more conditions on one grouping set, sending all of its events costs less than telling which are wanted.
MOST_CONDITIONS = 16


@dataclass(frozen=True)
class Coverage:
    """What is sent: of each event these `fields`, to the shard of its key under each grouping set that wants it."""

    wants: frozenset[Want] = frozenset()
    fields: frozenset[str] = frozenset()

    @classmethod
    def of(cls, wants: Iterable[Want], fields: Iterable[str]) -> Coverage:
        """What sends all of these, in its simplest form."""
        conditions: dict[tuple[str, ...], set[str | None]] = {}
        for group_by, condition in wants:
            conditions.setdefault(group_by, set()).add(condition)
        simplest = {
            (group_by, each)
            for group_by, found in conditions.items()
            for each in ([None] if None in found or len(found) > MOST_CONDITIONS else found)
        }
        return cls(frozenset(simplest), frozenset(fields))

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
        return Coverage.of(self.wants | other.wants, self.fields | other.fields)

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
        """The coverage that `to_dict` wrote, or an earlier version, which sent every event by every grouping set."""
        wants = document["wants"] if "wants" in document else [(each, None) for each in document["grouping_sets"]]
        return cls(frozenset((tuple(group_by), where) for group_by, where in wants), frozenset(document["fields"]))


def needed_by(rules: Iterable[CompiledRule]) -> Coverage:
    """What dispatch must send for all of these rules to be judged."""
    wants: set[Want] = set()
    fields: set[str] = set()
    for rule in rules:
        # A condition that could be read otherwise in dispatch might lose events: all are sent then.
        where = rule.where.sql if rule.where is not None and rule.where.reads_back else None
        wants.add((rule.group_by, where))
        fields.update(rule.fields)
    return Coverage.of(wants, fields)

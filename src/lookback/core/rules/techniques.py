"""Which techniques and tactics of MITRE ATT&CK have rules, by tags such as `attack.t1110.003`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lookback.core.rules.descriptions import list_tags
from lookback.core.values.texts import count_noun

# Sigma writes tactics by name, with - or _. Groups (g0016) and software (s0002) are neither techniques nor tactics.
_TAG = re.compile(
    r"attack\.(?:(?P<technique>t\d{4}(?:\.\d{3})?)|(?P<tactic>ta\d{4}|[a-z]+(?:[-_][a-z]+)*))", re.I | re.A
)
_ACTIVE = "active"


class _Version(Protocol):
    """A version of a rule."""

    @property
    def rule_id(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def status(self) -> str: ...
    @property
    def document(self) -> Mapping[str, Any] | None: ...


@dataclass(frozen=True)
class Covered:
    """A technique or tactic and a version of a rule that has its tag.

    Attributes:
        technique: The id of the technique, such as T1110.003, or the tactic: TA0006, or its name in lower case with _.
        rule_id: The rule.
        version: The version.
        status: The status of the version.
    """

    technique: str
    rule_id: str
    version: int
    status: str

    @property
    def is_technique(self) -> bool:
        """False for a tactic."""
        return self.technique[:1] == "T" and self.technique[1:2].isdigit()


def find_technique(tag: str) -> str | None:
    """Returns the technique or tactic that a tag names, as `Covered` writes it; None for another tag."""
    found = _TAG.fullmatch(tag)
    if found is None:
        return None
    tactic = found["tactic"]
    if tactic and not tactic[-1].isdigit():
        return tactic.lower().replace("-", "_")
    return (found["technique"] or tactic).upper()


def find_coverage(versions: Iterable[_Version]) -> list[Covered]:
    """Finds the techniques and tactics of versions of rules: techniques first, by id; of each the rules by id."""
    found = {
        Covered(technique, each.rule_id, each.version, each.status)
        for each in versions
        for technique in map(find_technique, list_tags(each.document))
        if technique is not None
    }
    return sorted(found, key=lambda each: (not each.is_technique, each.technique, each.rule_id, each.version))


def describe_coverage(found: Sequence[Covered]) -> str:
    """Says how many techniques have rules, and how many of them an active one."""
    every = {each.technique for each in found if each.is_technique}
    active = {each.technique for each in found if each.is_technique and each.status == _ACTIVE}
    if not found:
        return "no rule has a tag such as attack.t1110"
    return f"{count_noun(len(every), 'technique')}, {len(active):,} of them with an active rule"

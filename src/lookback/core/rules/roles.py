"""Finds the versions that fill the two roles of a rule: one is active or paused, and one may be in shadow beside it.

The rulebook applies changes one by one; this module works on all rows that a rule has in the rules table.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

SHADOW = "shadow"
# Replaces the status of a row that its stream rejected, and of one that waits for its history.
REJECTED, WARMING = "rejected", "warming"
# The key of the failing version in the evidence of a quarantined row.
QUARANTINED = "quarantined"


class TableRow(Protocol):
    """A row of the rules table with at least `version`, `status` and `evidence`."""

    def __getitem__(self, name: str, /) -> Any:
        """Returns a column."""


_Row = TypeVar("_Row", bound=TableRow)


@dataclass(frozen=True)
class Roles(Generic[_Row]):
    """The rows of a rule that count."""

    main: _Row | None = None  # active, paused, retired or quarantined
    shadow: _Row | None = None
    draft: _Row | None = None  # a draft, REJECTED or WARMING, later than the other rows

    @property
    def current(self) -> _Row | None:
        """The row that a command on the rule acts on: the main one, else the one in shadow, else the draft."""
        if self.main is not None and self.main["status"] != "retired":
            return self.main
        return self.shadow or self.draft or self.main

    @property
    def listed(self) -> list[_Row]:
        """All rows that count."""
        return [row for row in (self.main, self.shadow, self.draft) if row is not None]


def name_role(rule_id: str, mode: str) -> str:
    """Returns the rule_id for the main role, and for shadow a name that cannot be a rule_id."""
    return f"{rule_id} ({SHADOW})" if mode == SHADOW else rule_id


def write_quarantined(version: int) -> str:
    """Returns the evidence of a row that quarantines a version."""
    return json.dumps({QUARANTINED: version})


def read_quarantined(evidence: str | None) -> Any:
    """Returns the failing version that the evidence of a quarantined row names; None if it names none."""
    try:
        named = json.loads(evidence or "null")
    except (ValueError, RecursionError):
        return None
    return named.get(QUARANTINED) if isinstance(named, dict) else None


def find_roles(rows: Iterable[_Row]) -> Roles[_Row]:
    """Finds the roles of one rule from its rows, leaving out versions that later ones ended.

    A quarantined version keeps its role until another version takes it.
    """
    main: _Row | None = None
    shadow: _Row | None = None
    draft: _Row | None = None
    for row in sorted(rows, key=lambda row: row["version"] or 0):
        status = row["status"]
        if status in ("draft", REJECTED, WARMING):
            draft = row
            continue
        draft = None
        failing = read_quarantined(row["evidence"]) if status == "quarantined" else None
        if status == SHADOW or (failing is not None and shadow is not None and shadow["version"] == failing):
            shadow = row
            continue
        main = row
        if status in ("active", "retired"):
            shadow = None
    return Roles(main, shadow, draft)

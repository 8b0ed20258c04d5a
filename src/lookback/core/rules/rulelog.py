"""Rows of rule_log: what became of the changes of rules."""

from __future__ import annotations

from dataclasses import dataclass

ACTIONS = {
    "draft": "drafted",
    "shadow": "shadowed",
    "active": "activated",
    "paused": "paused",
    "retired": "retired",
    "quarantined": "quarantined",
}


@dataclass(frozen=True)
class LogRow:
    """A row of rule_log, without the columns that only the shell knows."""

    stream: str
    rule_id: str | None
    version: int | None
    action: str
    message: str
    arrival: int | None  # the last commit judged before the row; None before the first
    rules_commit: int | None = None  # the commit of the rules table with the row that was obeyed or rejected
    decision: str | None = None  # what was decided, for programs: see the column in the schema of rule_log

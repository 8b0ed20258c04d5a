"""The rules of a stream as a list for controlling it: status, alerts per minute, parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lookback.core.rules.roles import name_role
from lookback.core.values.texts import cut_end, to_one_line

if TYPE_CHECKING:
    from lookback.spark.rulerows import RuleRow

_NAME_WIDTH = 34


@dataclass(frozen=True)
class SteeredRule:
    """A version of a rule in the list: its role (see `name_role`), average alerts per minute, and parameter values."""

    role: str
    rule_id: str
    version: int
    status: str
    per_minute: float
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """The rule as a line of a list in a monospaced font."""
        name = cut_end(to_one_line(self.rule_id), _NAME_WIDTH)
        return f"{name:<{_NAME_WIDTH}} {self.status:<11} v{self.version:<5} {self.per_minute:>8,.1f} a minute"


def list_steered(rows: Iterable[RuleRow], stream: str, alerts: Mapping[str, int], minutes: float) -> list[SteeredRule]:
    """Lists the rules of a stream from the current versions, and from alert counts by role in the last `minutes`."""
    listed = []
    for row in rows:
        document = row.document or {}
        if document.get("stream") != stream:
            continue
        role, parameters = name_role(row.rule_id, row.status), document.get("parameters")
        values = dict(parameters) if isinstance(parameters, Mapping) else {}
        listed.append(SteeredRule(role, row.rule_id, row.version, row.status, alerts.get(role, 0) / minutes, values))
    return listed

"""Changes to rows of the rules table, in the order in which they apply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from lookback.core.rules.gate import REFUSAL

# The largest bigint that has a next one.
MAX_VERSION = 2**63 - 2
# The decisions in rule_log about versions that ended although no row of their own has status retired.
ROW_DELETED, MOVED, RETIRE_ALL = "deleted", "moved", "retire_all"


@dataclass(frozen=True)
class RuleChange:
    """A change to a row of the rules table, as the change feed reports it."""

    change: str  # insert, delete, update (the new row) or before (the old row of an update)
    commit: int
    rule_id: str | None
    version: int | None
    status: str | None
    document: str | None
    evidence: str | None = None  # JSON: of a quarantined row the failing version, of an active one the gate's figures
    author: str | None = None
    approved_by: str | None = None
    gate: str = (
        ""  # what an enforced gate requires of an active row: EVIDENCE or APPROVAL; empty for rows before the gate
    )
    # What rule_log says, in a replay; None if the state decides. For a version: whether it was warmed first; for a piece of
    # history: whether it was the last; for a commit of lists: whether it was obeyed.
    warms: bool | None = None

    @property
    def order(self) -> tuple[object, ...]:
        """The sort key by which changes apply: commit, then version; rows without a version come later, deletions last.

        The row's texts break ties, so that every reader applies a commit in the same order.
        """
        number = 2**63 if self.version is None else self.version
        named = (self.rule_id, self.change, self.status, self.document, self.evidence, self.author, self.approved_by)
        texts = [text or "" for text in named]
        return (self.commit, self.change == "delete", number, *texts)

    @property
    def slot(self) -> tuple[int, str | None, int | None]:
        """The version of a rule that the change is about; a commit changes each at most once."""
        return (self.commit, self.rule_id, self.version)


class Rejected(Exception):
    """Raised for a row that cannot come into force; its text goes to rule_log, and so does `decision`."""

    decision: str | None = None


class GateRejected(Rejected):
    """Raised for a row that the gate rejects."""

    decision = REFUSAL


def order_changes(changes: Iterable[RuleChange]) -> list[RuleChange]:
    """Returns the net changes of each commit in the order in which they apply, at most one per version of a rule.

    A row that an overwrite or a MERGE removes and writes back unchanged is dropped; written back with other values, it is an
    update. If an UPDATE changes a row's rule_id or version, the old version is deleted, since each version in force needs
    its row.
    """
    written: Counter[RuleChange] = Counter()
    removed: Counter[RuleChange] = Counter()
    for change in changes:
        (removed if change.change in ("delete", "before") else written)[change] += 1
    unchanged = _count_rows(written) & _count_rows(removed)
    new_rows, old_rows = list(_without(written, unchanged)), list(_without(removed, unchanged))
    new, old = ({change.slot for change in part if change.version is not None} for part in (new_rows, old_rows))
    net = [replace(change, change="update") if change.slot in old else change for change in new_rows]
    net += [replace(change, change="delete") for change in old_rows if change.slot not in new]
    return sorted(net, key=lambda change: change.order)


def _count_rows(changes: Counter[RuleChange]) -> Counter[RuleChange]:
    """Counts equal rows, whatever the kind of change."""
    rows: Counter[RuleChange] = Counter()
    for change, count in changes.items():
        rows[replace(change, change="")] += count
    return rows


def _without(changes: Counter[RuleChange], unchanged: Counter[RuleChange]) -> Iterator[RuleChange]:
    """Yields the changes without those of unchanged rows."""
    left = unchanged.copy()
    for change in changes.elements():
        row = replace(change, change="")
        if left[row]:
            left[row] -= 1
        else:
            yield change

"""Checks a version of a rule against the gate of the settings, and makes it active if every condition is met."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812

from lookback.core.errors import Problem, RuleError
from lookback.core.rules.gate import (
    Condition,
    Gate,
    Knowledge,
    check_gate,
    hash_document,
    is_same_person,
    write_evidence,
)
from lookback.spark.replay.backtest import Candidate, backtest, find_last_days
from lookback.spark.rulerows import RuleRow
from lookback.spark.tables.history import find_first_readable

if TYPE_CHECKING:
    from lookback.spark.rules import RulesTable
    from lookback.spark.tables.lakehouse import Tables


@dataclass(frozen=True)
class Approval:
    """The result of an attempt: the checked version (candidate), its conditions, and the published version.

    `version` is None if a condition is not met.
    """

    candidate: int
    conditions: list[Condition]
    version: int | None

    @property
    def outcome(self) -> str:
        """Says of the candidate whether it is active."""
        if self.version is None:
            return "is not active: not all conditions are met"
        return f"is active as version {self.version}"


def activate(
    rules: RulesTable,
    rule_id: str,
    gate: Gate,
    *,
    approver: str = "",
    comment: str = "",
    progress: Callable[[str], None] | None = None,
) -> Approval:
    """Checks a rule's candidate against the gate, and publishes it as active if it meets all conditions.

    The candidate is the last draft, else the version in shadow, else the paused, active or quarantined one.

    Args:
        rules: The rules table.
        rule_id: The rule.
        gate: The conditions.
        approver: Who activates it; default: the current user.
        comment: Comment of the new version.
        progress: Receives lines for people.

    Raises:
        RuleError: If the rule is unknown or retired, or its document fails its check.
    """
    approver = approver or rules.tables.current_user
    row = find_candidate(rules, rule_id)
    conditions = find_conditions(rules, row, gate, approver=approver, progress=progress)
    if not all(each.met for each in conditions):
        return Approval(row.version, conditions, None)
    document = row.document or {}
    author, _ = _find_author(rules, row, hash_document(document))
    evidence = write_evidence(document, conditions, dt.datetime.now(dt.timezone.utc).isoformat())
    # Authors cannot approve their own rule; without `approval` in the gate nobody else has to.
    second = "" if is_same_person(approver, author) else approver
    version = rules.publish_approved(row, author=author, approver=second, evidence=evidence, comment=comment)
    return Approval(row.version, conditions, version)


def find_conditions(
    rules: RulesTable, row: RuleRow, gate: Gate, *, approver: str = "", progress: Callable[[str], None] | None = None
) -> list[Condition]:
    """Evaluates the conditions of a gate for a row, which need not be in the table of `rules` yet.

    `approver` is who would activate it (default: the current user); `progress` receives lines for people. Raises
    RuleError if the row's document fails its check.
    """
    document = row.document or {}
    compiled, tables = rules.check(document), rules.tables
    per_day, precision = None, None
    if gate.backtest_days:
        per_day, precision = _try(tables, rules, compiled.spec.stream, row, gate.backtest_days, progress)
    wanted = hash_document(document)
    hours = _find_shadow_hours(rules, row.rule_id, wanted) if gate.shadow_hours else None
    author, first = _find_author(rules, row, wanted)
    committers = _find_committers(tables, row.rule_id, first) if gate.approval else None
    user = tables.current_user
    known = Knowledge(len(compiled.spec.tests), hours, per_day, precision, author, approver or user, user, committers)
    return check_gate(gate, known)


def check_document(
    rules: RulesTable,
    document: Mapping[str, Any],
    gate: Gate,
    *,
    author: str = "",
    progress: Callable[[str], None] | None = None,
) -> list[Condition]:
    """Evaluates the conditions of a gate for a document before it is published to `rules`.

    `author` wrote the document and would activate it (default: the current user); `progress` receives lines for people.
    Raises RuleError if the document fails its check.
    """
    rule_id = str(document["rule_id"])
    writer = author or rules.tables.current_user
    row = RuleRow(rule_id, rules.next_version(rule_id), "draft", dict(document), writer, "", None)
    return find_conditions(rules, row, gate, approver=author, progress=progress)


def find_candidate(rules: RulesTable, rule_id: str) -> RuleRow:
    """Finds the version of a rule in `rules` that `activate` checks. Raises RuleError if the rule has none."""
    rows = [row for row in rules.list_obeyed(rule_id) if row.document is not None]
    for status in ("draft", "shadow", "paused", "active", "quarantined"):
        for row in rows:
            if row.status == status:
                return row
    raise RuleError(rule_id, [Problem("status", "has no version to activate; publish one with `lookback rules push`")])


def _find_author(rules: RulesTable, row: RuleRow, wanted: str) -> tuple[str, int]:
    """Finds who wrote the document of a row, and the first version of the rule with this document.

    A later version with the same document, such as a pause, has its own publisher as author.
    """
    versions = rules.read_versions(row.rule_id)
    alike = [each for each in versions if each.document is not None and hash_document(each.document) == wanted]
    first = min(alike, key=lambda each: each.version, default=row)
    return first.author or "", first.version


def _find_committers(tables: Tables, rule_id: str, version: int) -> list[str]:
    """Finds the users who wrote a version of a rule in the table's history; empty if the history has no users."""
    is_written = F.col("_change_type").isin("insert", "update_postimage")
    own = is_written & (F.col("rule_id") == rule_id) & (F.col("version") == version)
    changes = tables.read_changes("rules", find_first_readable(tables, "rules")).where(own)
    commits = [row[0] for row in changes.select("_commit_version").distinct().collect()]
    users = tables.history("rules").where(F.col("version").isin(commits)).select("userName").distinct().collect()
    return sorted(row["userName"] for row in users if row["userName"])


def _try(
    tables: Tables, rules: RulesTable, name: str, row: RuleRow, days: float, progress: Callable[[str], None] | None
) -> tuple[float | None, float | None]:
    """Returns the alerts per day and the precision of a version over the last days of its stream, which is `name`."""
    stream = rules.streams[name]
    within = find_last_days(tables, stream, days)
    if within is None:
        return None, None
    candidate = Candidate(dict(row.document or {}), row.version)
    with backtest(tables, stream, [candidate], within, rows=False, streams=rules.streams, progress=progress) as result:
        (figures,) = result.figures
        return figures.alerts_per_day, figures.precision


def _find_shadow_hours(rules: RulesTable, rule_id: str, wanted: str) -> float | None:
    """Returns for how many hours a document has been in shadow; None if it is not in shadow."""
    row = next((row for row in rules.rows() if (row.rule_id, row.status) == (rule_id, "shadow")), None)
    if row is None or row.document is None or hash_document(row.document) != wanted:
        return None
    is_begin = (F.col("rule_id") == rule_id) & (F.col("version") == row.version) & (F.col("action") == "shadowed")
    begin = rules.tables.read("rule_log").where(is_begin).agg(F.unix_micros(F.min("logged_at"))).head()
    if begin is None or begin[0] is None:
        return None
    now = dt.datetime.now(dt.timezone.utc).timestamp()
    return (now - float(begin[0]) / 1_000_000) / 3_600

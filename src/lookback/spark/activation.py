"""Checks a version of a rule against the gate of the settings, and makes it active if every condition is met."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812

from lookback.core.errors import Problem, RuleError
from lookback.core.rules.gate import Condition, Gate, Knowledge, check_gate, hash_document, write_evidence
from lookback.core.values.durations import MICROSECONDS
from lookback.spark.replay.backtest import Candidate, Range, backtest

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream
    from lookback.spark.rules import RuleRow, RulesTable
    from lookback.spark.tables.lakehouse import Tables


@dataclass(frozen=True)
class Activation:
    """The result of an attempt. candidate: the version that was checked. version: the published one; None: not all is met."""

    candidate: int
    conditions: list[Condition]
    version: int | None


def activate(
    rules: RulesTable, rule_id: str, gate: Gate, *, approver: str = "", comment: str = "",
    progress: Callable[[str], None] | None = None,
) -> Activation:  # fmt: skip
    """Checks the version of a rule that is to become active, and publishes it if it meets the gate.

    That is the last draft, else the version in shadow, else the one that is active, paused or quarantined. rules: the table.
    gate: the conditions. approver: who activates it; default: the current user. progress: called with lines for people. Raises
    RuleError for an unknown or retired rule, and if its document fails its check.
    """
    approver = approver or rules.tables.current_user
    row = _find_candidate(rules, rule_id)
    assert row.document is not None
    compiled = rules.check(row.document)
    tables, stream = rules.tables, rules.streams[compiled.spec.stream]
    per_day, precision = None, None
    if gate.backtest_days:
        per_day, precision = _try(tables, stream, row, gate.backtest_days, progress)
    hours = _find_shadow_hours(rules, rule_id, hash_document(row.document)) if gate.shadow_hours else None
    known = Knowledge(len(compiled.spec.tests), hours, per_day, precision, row.author or "", approver)
    conditions = check_gate(gate, known)
    if not all(each.met for each in conditions):
        return Activation(row.version, conditions, None)
    evidence = write_evidence(row.document, conditions, dt.datetime.now(dt.timezone.utc).isoformat())
    version = rules.publish_approved(
        row, author=row.author or "", approver=approver, evidence=evidence, comment=comment
    )
    return Activation(row.version, conditions, version)


def _find_candidate(rules: RulesTable, rule_id: str) -> RuleRow:
    rows = [row for row in rules.rows() if row.rule_id == rule_id and row.document is not None]
    for status in ("draft", "shadow", "paused", "active", "quarantined"):
        for row in rows:
            if row.status == status:
                return row
    raise RuleError(rule_id, [Problem("status", "has no version to activate; publish one with `lookback rules push`")])


def _try(
    tables: Tables, stream: Stream, row: RuleRow, days: float, progress: Callable[[str], None] | None
) -> tuple[float | None, float | None]:
    """Returns the alerts a day and the precision of a version over the last days of events."""
    newest = tables.read(stream.name).agg(F.unix_micros(F.max(stream.event_time))).head()
    if newest is None or newest[0] is None:
        return None, None
    since = int(newest[0]) - round(days * MICROSECONDS["day"])
    candidate = Candidate(dict(row.document or {}), row.version)
    with backtest(tables, stream, [candidate], Range(since=since), rows=False, progress=progress) as result:
        (figures,) = result.figures
        return figures.alerts_per_day, figures.precision


def _find_shadow_hours(rules: RulesTable, rule_id: str, wanted: str) -> float | None:
    """Returns since how many hours the stream has judged a document in shadow; None if it does not."""
    row = next((row for row in rules.rows() if (row.rule_id, row.status) == (rule_id, "shadow")), None)
    if row is None or row.document is None or hash_document(row.document) != wanted:
        return None
    is_begin = (F.col("rule_id") == rule_id) & (F.col("version") == row.version) & (F.col("action") == "shadowed")
    begin = rules.tables.read("rule_log").where(is_begin).agg(F.unix_micros(F.min("logged_at"))).head()
    if begin is None or begin[0] is None:
        return None
    now = dt.datetime.now(dt.timezone.utc).timestamp()
    return (now - float(begin[0]) / 1_000_000) / 3_600

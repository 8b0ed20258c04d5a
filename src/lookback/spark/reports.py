"""Reports on rule files before you merge them: their own tests, and a backtest against limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lookback.core.errors import RuleError
from lookback.core.rules.gate import Gate, Knowledge, check_gate
from lookback.core.rules.remarks import find_remarks
from lookback.core.values.durations import MICROSECONDS
from lookback.spark.replay.backtest import BacktestFigures, Candidate, Range, backtest, find_last_days
from lookback.testing.rule_tests import CheckedFile, check_files

if TYPE_CHECKING:
    from lookback.core.rules.compiled import CompiledRule
    from lookback.spark.rules import RulesTable


@dataclass(frozen=True)
class RuleReport:
    """The report on one file.

    Attributes:
        file: The file.
        rule_id: Id of the rule; empty if it cannot be read.
        tests: Number of the rule's own tests.
        figures: Figures of the backtest; None without one.
        days: Days of event time that the figures cover.
        problems: Sentences that say what to do; empty if the rule passes.
        remarks: Sentences that do not make the rule fail.
    """

    file: str
    rule_id: str = ""
    tests: int = 0
    figures: BacktestFigures | None = None
    days: float = 0.0
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def passes(self) -> bool:
        """True if the rule has no problem."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        names = ("alerts", "alerts_per_day", "keys", "precision", "recall")
        figures = {name: None if self.figures is None else getattr(self.figures, name) for name in names}
        own = {"file": self.file, "rule_id": self.rule_id, "tests": self.tests, **figures, "days": self.days}
        return {**own, "passes": self.passes, "problems": self.problems, "remarks": self.remarks}


def report_rules(
    rules: RulesTable,
    files: Sequence[str],
    gate: Gate,
    within: Range | None = None,
    *,
    progress: Callable[[str], None] | None = None,
) -> list[RuleReport]:
    """Checks the rules in files, see `check_files`, and backtests the valid ones on the events of their streams.

    Args:
        rules: The rules table.
        files: The rule files.
        gate: Limits on tests, alerts per day and precision. Conditions that a file cannot meet yet, such as hours in
            shadow, are skipped.
        within: Range in which the rules may alert; default: the gate's last days, or everywhere.
        progress: Receives lines for people.

    Raises:
        SetupError: If the events table of a stream is missing.
    """
    checked = list(check_files(files, rules.streams))
    reports = [_begin_report(each) for each in checked]
    compiled = {at: each.rule for at, each in enumerate(checked) if each.rule is not None}
    for stream in dict.fromkeys(rule.spec.stream for rule in compiled.values()):
        own = {at: rule for at, rule in compiled.items() if rule.spec.stream == stream}
        chosen = within or _choose_range(rules, stream, gate)
        for at, tried in _try_rules(rules, stream, own, chosen, progress).items():
            reports[at] = _judge(reports[at], tried, gate)
    return reports


def _choose_range(rules: RulesTable, stream: str, gate: Gate) -> Range:
    declared = rules.streams[stream]
    tables = rules.tables.holding(declared)
    tables.require(declared)
    return (find_last_days(tables, declared, gate.backtest_days) if gate.backtest_days else None) or Range()


def _begin_report(checked: CheckedFile) -> RuleReport:
    problems, rule = list(map(str, checked.problems)), checked.rule
    if rule is None:
        return RuleReport(checked.file, checked.name, problems=problems)
    remarks = list(map(str, find_remarks(rule)))
    return RuleReport(checked.file, checked.name, len(rule.spec.tests), problems=problems, remarks=remarks)


@dataclass(frozen=True)
class _Tried:
    """The result of a backtest of one rule: its figures and the days they cover, or the problem."""

    figures: BacktestFigures | None = None
    days: float = 0.0
    problem: str = ""


def _try_rules(
    rules: RulesTable,
    stream: str,
    compiled: Mapping[int, CompiledRule],
    within: Range,
    progress: Callable[[str], None] | None,
) -> dict[int, _Tried]:
    """Backtests rules of one stream in one pass, or one by one if a rule makes that pass fail."""
    candidates = [
        Candidate(dict(rule.spec.document), rules.next_version(rule.spec.rule_id)) for rule in compiled.values()
    ]
    try:
        with backtest(
            rules.tables,
            rules.streams[stream],
            candidates,
            within,
            rows=False,
            streams=rules.streams,
            progress=progress,
        ) as result:
            known = result.first_time is not None and result.last_time is not None
            days = ((result.last_time or 0) - (result.first_time or 0)) / MICROSECONDS["day"] if known else 0.0
            return {at: _Tried(each, days) for at, each in zip(compiled, result.figures, strict=True)}
    except RuleError as error:
        if len(compiled) == 1:
            return dict.fromkeys(compiled, _Tried(problem="; ".join(map(str, error.problems))))
    found = dict[int, _Tried]()
    for at, rule in compiled.items():
        found |= _try_rules(rules, stream, {at: rule}, within, progress)
    return found


def _judge(report: RuleReport, tried: _Tried, gate: Gate) -> RuleReport:
    """Returns the report with the figures of a backtest, and the conditions that they do not meet."""
    if tried.figures is None:
        return replace(report, problems=[*report.problems, tried.problem])
    if tried.figures.alerts_per_day is None:
        problem = "no events to try it on; ingest some, or choose another range with --since and --until"
        return replace(report, figures=tried.figures, problems=[*report.problems, problem])
    # The remaining conditions are about a version in the table.
    applicable = replace(gate, backtest_days=round(tried.days, 1), shadow_hours=0.0, approval=False)
    figures = tried.figures
    known = Knowledge(report.tests, None, figures.alerts_per_day, figures.precision, "", "")
    unmet = [
        f"{each.condition}: {each.figure}; {each.remedy}" for each in check_gate(applicable, known) if not each.met
    ]
    remarks = list(report.remarks)
    if figures.failures:
        remarks.append(f"could not be judged {figures.failures:,} times; guard what fails, such as nullif(x, 0)")
    return replace(report, figures=figures, days=tried.days, problems=[*report.problems, *unmet], remarks=remarks)

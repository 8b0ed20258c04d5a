"""Formats the findings of a rule check as Markdown, for a pull request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lookback.core.values.texts import escape_unprintable

if TYPE_CHECKING:
    from lookback.spark.reports import RuleReport

_HEAD = ("Rule", "Tests", "Alerts", "Alerts a day", "Keys", "Precision", "Recall", "Verdict")
# Authors choose the names of files and invalid rules, which must not end a cell, mention a person or act as markup.
_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;", "#": "&#35;"})
_ESCAPED = str.maketrans({each: f"\\{each}" for each in "\\`*_[]|~"})


def format_reports(reports: Sequence[RuleReport]) -> str:
    """Formats reports as a table with a row per rule, followed by their sentences."""
    failing = sum(not each.passes for each in reports)
    title = f"## Rules: {failing} of {len(reports)} fail" if failing else f"## Rules: {_count_passing(reports)}"
    align = ["---", *["--:"] * (len(_HEAD) - 2), "---"]
    table = [_format_row(_HEAD), _format_row(align), *(_format_row(_list_cells(each)) for each in reports)]
    below = [line for each in reports for line in _list_sentences(each)]
    return "\n".join([title, "", *table, *(["", *below] if below else [])])


def escape_markdown(text: str) -> str:
    """Escapes a text, so that Markdown shows it unchanged, on one line."""
    line = " ".join(text.split())
    return escape_unprintable(line.translate(_ESCAPED).translate(_ENTITIES))


def _count_passing(reports: Sequence[RuleReport]) -> str:
    return "it passes" if len(reports) == 1 else f"all {len(reports)} pass"


def _format_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _list_cells(report: RuleReport) -> list[str]:
    name, verdict = escape_markdown(report.rule_id or report.file), "passes" if report.passes else "**fails**"
    figures = report.figures
    if figures is None:
        return [name, f"{report.tests:,}", "", "", "", "", "", verdict]
    per_day = "" if figures.alerts_per_day is None else f"{figures.alerts_per_day:,.1f}"
    ratios = ("" if each is None else f"{each:.3f}" for each in (figures.precision, figures.recall))
    return [name, f"{report.tests:,}", f"{figures.alerts:,}", per_day, f"{figures.keys:,}", *ratios, verdict]


def _list_sentences(report: RuleReport) -> list[str]:
    name = escape_markdown(report.rule_id or report.file)
    where = f" ({escape_markdown(report.file)})" if report.rule_id else ""
    lines = [f"- **{name}**{where} fails: {escape_markdown(each)}" for each in report.problems]
    lines += [f"- {name}{where}, remark: {escape_markdown(each)}" for each in report.remarks]
    return lines


def describe_range(reports: Sequence[RuleReport]) -> str:
    """Says how many days the figures cover; empty without figures."""
    days = {round(each.days, 1) for each in reports if each.figures is not None and each.days}
    return "" if not days else f"Figures cover {' or '.join(f'{each:,g}' for each in sorted(days))} days of events."

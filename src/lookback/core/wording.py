"""A rule in words, for people who did not write it."""

from __future__ import annotations

from collections.abc import Mapping

from sqlglot import exp

from lookback.core.compiled import CompiledMeasure, CompiledRule
from lookback.core.durations import MICROSECONDS, format_duration
from lookback.core.rules import Window
from lookback.core.syntax import parse, unwrapped

_AGGREGATES = {
    "count": "the number of events with a value of {}",
    "count_distinct": "the number of different values of {}",
    "sum": "the sum of {}",
    "avg": "the average of {}",
    "min": "the smallest {}",
    "max": "the largest {}",
    "stddev_samp": "the standard deviation of {}",
}
_BOUNDS = (exp.GT, exp.GTE, exp.LT, exp.LTE, exp.EQ)


def rule_in_words(rule: CompiledRule) -> str:
    """One sentence that says when the rule raises an alert.

    Such as: Raised when total >= 2000, where total is the sum of amount over the 24 hours up to each event, per
    customer_id; only events where amount > 0.
    """
    clauses = [f"{measure.name} is {measure_in_words(measure)}" for measure in rule.measures]
    key = f"per {' and '.join(rule.group_by)}" if rule.group_by else "over all events together"
    parts = [f"Raised when {_plain(rule.rule.when)}, where {_listed(clauses)}, {key}"]
    if rule.rule.where:
        parts.append(f"only events where {_plain(rule.rule.where)}")
    if rule.rule.late == "record":
        parts.append("late events count but raise nothing themselves")
    if rule.rule.suppress:
        parts.append(f"further alerts of a key within {format_duration(rule.rule.suppress)} of one are suppressed")
    return "; ".join(parts) + "."


def measure_in_words(measure: CompiledMeasure) -> str:
    """What a measure counts and over which time, such as `the number of events over the 10 minutes up to each event`."""
    feature = measure.feature
    argument = "" if feature.argument is None else feature.argument.sql
    what = "the number of events" if not argument else _AGGREGATES[feature.function].format(argument)
    where = f" where {feature.filter.sql}" if feature.filter is not None else ""
    return f"{what}{where} {_window(measure.window)}"


def limits_of(rule: CompiledRule) -> Mapping[str, tuple[float, ...]]:
    """The numbers that `when` compares a measure with, by the measure's name, such as {"total": (2000.0,)}.

    Only plain comparisons of one measure with one number; a limit that depends on the event is not among them.
    """
    names = {measure.name.lower(): measure.name for measure in rule.measures}
    limits: dict[str, list[float]] = {}
    for node in parse(rule.rule.when).find_all(*_BOUNDS):
        for name, number in ((node.this, node.expression), (node.expression, node.this)):
            column, value = unwrapped(name), _number(number)
            if isinstance(column, exp.Column) and value is not None and column.name.lower() in names:
                limits.setdefault(names[column.name.lower()], []).append(value)
    return {name: tuple(values) for name, values in limits.items()}


def _number(node: exp.Expr) -> float | None:
    node = unwrapped(node)
    if isinstance(node, exp.Neg):
        value = _number(node.this)
        return None if value is None else -value
    return float(node.name) if isinstance(node, exp.Literal) and not node.is_string else None


def _window(window: Window) -> str:
    if not window.delay:
        return f"over the {_span(window.size)} up to each event"
    return f"over the {_span(window.size)} that end {_span(window.delay)} before each event"


def _span(microseconds: int) -> str:
    """`24 hours` up to two days, since windows are spoken of so; longer ones in days or weeks."""
    hours, rest = divmod(microseconds, MICROSECONDS["hour"])
    if not rest and 1 < hours <= 48:
        return f"{hours} hours"
    return format_duration(microseconds).removeprefix("1 ")


def _plain(text: str) -> str:
    return " ".join(text.split())


def _listed(clauses: list[str]) -> str:
    return clauses[0] if len(clauses) == 1 else ", ".join(clauses[:-1]) + f" and {clauses[-1]}"

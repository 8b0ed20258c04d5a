"""Finds the lists that a rule names and that do not exist."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lookback.core.errors import Problem
from lookback.core.expressions.compiling import Expression
from lookback.core.rules.compiled import CompiledRule
from lookback.core.rules.problems import make_problem, quote_value
from lookback.core.values.suggestions import suggest

_MAX_SHOWN_LISTS = 20


def find_unknown_lists(rule: CompiledRule, known: Iterable[str]) -> list[Problem]:
    """Reports each list that a rule names and that is not among the known ones, with its place and a suggestion."""
    names = sorted(set(known))
    problems = []
    for place, part in _list_parts(rule):
        for name in dict.fromkeys(each.list_name for each in part.memberships if each.list_name not in names):
            shown = ", ".join(names[:_MAX_SHOWN_LISTS]) + (", ..." if len(names) > _MAX_SHOWN_LISTS else "")
            fallback = f"known lists: {shown}" if names else "no lists exist yet"
            hint = suggest(name, names, fallback)
            remedy = "or create it with `lookback lists add NAME VALUE`"
            problems.append(make_problem(place, f"unknown list {quote_value(name)}; {hint}, {remedy}"))
    return problems


def _list_parts(rule: CompiledRule) -> Iterator[tuple[str, Expression]]:
    """Yields the expressions that name lists, with their places in the document."""
    parts: list[tuple[str, Expression | None]] = [("where", rule.where), ("when", rule.when)]
    for measure in rule.measures:
        parts += [(f"measures.{measure.name}", part) for part in (measure.feature.argument, measure.feature.filter)]
    if rule.sequence is not None:
        for at, step in enumerate(rule.sequence.conditions):
            parts.append((f"sequence.steps[{at}].{'absent' if step.step.absent else 'where'}", step.condition))
        parts.append(("sequence.until", rule.sequence.until))
    yield from ((place, part) for place, part in parts if part is not None and part.memberships)

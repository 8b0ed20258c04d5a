"""Finds the lists that a rule names and nobody knows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lookback.core.errors import Problem
from lookback.core.expressions.compiling import Expression
from lookback.core.rules.compiled import CompiledRule
from lookback.core.rules.document import make_problem, quote_value
from lookback.core.values.suggestions import suggest

# So many names of lists are shown to one who names another.
_MOST_SHOWN = 20


def find_unknown_lists(rule: CompiledRule, known: Iterable[str]) -> list[Problem]:
    """Finds the lists that a rule names and that are not among the known ones, each where it stands, with suggestions."""
    names = sorted(set(known))
    problems = []
    for place, part in _list_parts(rule):
        for name in dict.fromkeys(each.list_name for each in part.memberships if each.list_name not in names):
            shown = ", ".join(names[:_MOST_SHOWN]) + (", ..." if len(names) > _MOST_SHOWN else "")
            fallback = f"known are {shown}" if names else "there are no lists yet"
            hint = suggest(name, names, fallback)
            remedy = "or add its first value with `lookback lists add NAME VALUE`"
            problems.append(make_problem(place, f"there is no list {quote_value(name)}; {hint}, {remedy}"))
    return problems


def _list_parts(rule: CompiledRule) -> Iterator[tuple[str, Expression]]:
    """Yields the expressions of a rule that name lists, each with its place in the document."""
    parts: list[tuple[str, Expression | None]] = [("where", rule.where), ("when", rule.when)]
    for measure in rule.measures:
        parts += [(f"measures.{measure.name}", part) for part in (measure.feature.argument, measure.feature.filter)]
    if rule.sequence is not None:
        for at, step in enumerate(rule.sequence.conditions):
            parts.append((f"sequence.steps[{at}].{'absent' if step.step.absent else 'where'}", step.condition))
        parts.append(("sequence.until", rule.sequence.until))
    yield from ((place, part) for place, part in parts if part is not None and part.memberships)

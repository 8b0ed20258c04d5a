"""Compiles the text of a measure: one aggregate call over the events of a window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlglot import exp

from lookback.core.errors import ExpressionError
from lookback.core.expressions.compiling import Expression, compile_tree
from lookback.core.expressions.functions import AGGREGATE_ALIASES, AGGREGATE_ARGUMENTS, RANKED, check_ordered
from lookback.core.expressions.refusals import WINDOW_REMEDIES
from lookback.core.expressions.syntax import parse, quote_node, unwrap
from lookback.core.values.limits import DEFAULT_LIMITS, Limits
from lookback.core.values.types import BOOLEAN, NULL, DataType


@dataclass(frozen=True)
class AggregateCall:
    """An aggregate over the events of a window, such as `avg(x) filter (where amount > 1000)`.

    Attributes:
        function: A name that `find_aggregate` knows, such as count_distinct or percentile(0.95).
        argument: The argument; None for count(*).
        filter: Only rows for which it is true are counted; None for all rows.
        sql: Canonical SQL, as in Expression.
    """

    function: str
    argument: Expression | None
    filter: Expression | None
    sql: str

    @property
    def fields(self) -> frozenset[str]:
        """The names that argument and filter read."""
        return frozenset().union(*(part.named for part in (self.argument, self.filter) if part is not None))


_TEACHING = (
    "a measure is one aggregate such as sum(amount) or count(*) filter (where amount > 1000); "
    "give each aggregate its own measure and combine them in when"
)


def compile_aggregate(text: str, schema: Mapping[str, DataType], limits: Limits = DEFAULT_LIMITS) -> AggregateCall:
    """Compiles the text of a measure, which is exactly one aggregate call. Raises ExpressionError with all problems."""
    tree = unwrap(parse(text, limits))
    condition: exp.Expr | None = None
    if isinstance(tree, exp.Filter):
        tree, condition = tree.this, tree.expression.this
    if isinstance(tree, exp.Window):
        raise ExpressionError(["a window function (over) is not allowed; the rule's window does that"])
    if not isinstance(tree, exp.Anonymous):
        raise ExpressionError([f"{quote_node(tree)} is not an aggregate: {_TEACHING}"])
    name = str(tree.name).lower()
    name = AGGREGATE_ALIASES.get(name, name)
    if name not in AGGREGATE_ARGUMENTS:
        remedy = WINDOW_REMEDIES.get(name) or f"{_TEACHING}; the aggregates are {_list_aggregates()}"
        raise ExpressionError([f"{name}() is not an aggregate that can be used: {remedy}"])
    return _compile_call(name, tree, condition, schema, limits)


def _list_aggregates() -> str:
    return ", ".join(sorted([*AGGREGATE_ARGUMENTS, *AGGREGATE_ALIASES]))


def _compile_call(
    name: str, tree: exp.Expr, condition: exp.Expr | None, schema: Mapping[str, DataType], limits: Limits
) -> AggregateCall:
    problems: list[str] = []
    distinct, parts = _read_arguments(name, tree, problems)
    fraction = _read_fraction(parts, problems) if name == "percentile" and len(parts) == 2 else ""
    argument, shown, more = None, "", fraction
    if name in _RANKING and not problems:
        argument, shown, more = _compile_ranked(name, parts, schema, limits, problems)
    elif len(parts) == 1 and not _is_star(parts[0]):
        argument = _compile_argument(parts[0], schema, limits, problems)
    elif distinct and name == "count" and len(parts) > 1 and not problems:
        argument = _compile_argument(exp.Tuple(expressions=parts), schema, limits, problems)
    where = None if condition is None else _compile_argument(condition, schema, limits, problems)
    # Counting distinct values requires comparable values.
    check, shown_name = (check_ordered, f"{name}(distinct)") if distinct else (AGGREGATE_ARGUMENTS[name], f"{name}()")
    if argument is not None and not shown and (problem := check(argument.type)):
        problems.append(f"{shown_name} {problem}")
    if where is not None and where.type not in (BOOLEAN, NULL):
        problems.append(
            f"filter takes a condition, but {where.sql!r} is of type {where.type}; compare it with something"
        )
    if problems:
        raise ExpressionError(problems)
    if name == "count_if":
        # Only where the filter is true is the condition computed.
        both = parts[0] if condition is None else exp.And(this=exp.paren(condition), expression=exp.paren(parts[0]))
        name, argument, where = "count", None, _compile_argument(both, schema, limits, problems)
    name = _SAME.get(name, name)
    shown = shown or ("*" if argument is None else argument.sql)
    if distinct:
        shown = f"distinct {shown[1:-1] if len(parts) > 1 else shown}"
    sql = f"{name}({shown}{fraction and f', {fraction}'})" + (
        f" filter (where {where.sql})" if where is not None else ""
    )
    function = "count_distinct" if distinct else f"{name}({more})" if more else name
    return AggregateCall(function, argument, where, sql)


def _compile_ranked(
    name: str, parts: Sequence[exp.Expr], schema: Mapping[str, DataType], limits: Limits, problems: list[str]
) -> tuple[Expression | None, str, str]:
    """Compiles the arguments of max_by and min_by: the text that is kept of both, their SQL, and the value's type."""
    value, rank = (_compile_argument(part, schema, limits, problems) for part in parts)
    found = (AGGREGATE_ARGUMENTS[name](part.type) for part in (value, rank) if part is not None)
    problems += [f"{name}() {problem}" for problem in found if problem]
    if value is None or rank is None or problems:
        return None, "", ""
    ranked = exp.Anonymous(this=RANKED, expressions=[part.copy() for part in reversed(parts)])
    return _compile_argument(ranked, schema, limits, problems), f"{value.sql}, {rank.sql}", str(value.type)


# Aggregates of a value and of what ranks it.
_RANKING = ("max_by", "min_by")
# false is less than true.
_SAME = {"bool_and": "min", "bool_or": "max"}


def _read_fraction(parts: list[exp.Expr], problems: list[str]) -> str:
    """Takes the second argument of percentile from `parts`, and returns it in one form."""
    number = unwrap(parts.pop())
    text = number.name if isinstance(number, exp.Literal) and not number.is_string else ""
    try:
        fraction = float(text)
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction <= 1:
        problems.append(
            f"percentile() takes a number from 0 to 1, such as 0.95, as its second argument; got {quote_node(number)}"
        )
    return repr(fraction)


def _read_arguments(name: str, tree: exp.Expr, problems: list[str]) -> tuple[bool, list[exp.Expr]]:
    """Returns whether the call has `distinct`, and its arguments."""
    parts = list(tree.expressions)
    distinct = len(parts) == 1 and isinstance(parts[0], exp.Distinct)
    if distinct:
        parts = list(parts[0].expressions)
        if name != "count":
            problems.append(f"{name}(distinct ...) is not supported; only count takes distinct")
    if name in _RANKING and not distinct:
        if len(parts) != 2 or any(map(_is_star, parts)):
            problems.append(f"{name}() takes a value and what ranks it, such as {name}(merchant, amount)")
    elif any(map(_is_star, parts)) and distinct:
        problems.append("count(distinct *) is not allowed; name a field")
    elif name == "percentile" and not distinct:
        if len(parts) != 2:
            problems.append(f"percentile() takes a field and a number from 0 to 1, such as 0.95; got {len(parts)}")
    elif len(parts) != 1 and not (distinct and parts):
        known = "; to leave NULLs out add filter (where x is not null)" if name in ("first", "last") else ""
        problems.append(f"{name}() takes one argument, got {len(parts)}{known}")
    elif _is_star(parts[0]) and name != "count":
        problems.append(f"{name}(*) is not allowed; name a field")
    return distinct, parts


def _is_star(tree: exp.Expr) -> bool:
    return isinstance(tree, exp.Star)


def _compile_argument(
    tree: exp.Expr, schema: Mapping[str, DataType], limits: Limits, problems: list[str]
) -> Expression | None:
    try:
        # A tuple in the text has a parent; the tuple of a call's arguments has none.
        return compile_tree(tree, schema, limits, takes_combination=tree.parent is None)
    except ExpressionError as error:
        problems += [problem for problem in error.problems if problem not in problems]
        return None

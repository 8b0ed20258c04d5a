"""Expressions and aggregate calls of rules: Spark SQL text in, values as Spark (ANSI mode, UTC) would give them out.

    text --parse--> syntax tree --bind to the schema--> typed node --evaluate--> column

Nothing is ever handed to `eval`, and a construct that could not be matched exactly is refused with a remedy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from sqlglot import exp

from lookback.core.errors import ExpressionError
from lookback.core.expressions.binding import Binder, conjuncts
from lookback.core.expressions.functions import AGGREGATES, ordered
from lookback.core.expressions.kernels import narrow_decimals
from lookback.core.expressions.nodes import Node
from lookback.core.expressions.syntax import parse, shortened, unwrapped
from lookback.core.values.columns import Column
from lookback.core.values.limits import DEFAULT_LIMITS, LIMITS, Limits
from lookback.core.values.types import BOOLEAN, NULL, DataType

# Of canonical SQL, which can be longer and deeper than what it was made of: that was checked.
_CANONICAL = Limits(
    expression_characters=100 * LIMITS["expression_characters"].most,
    expression_levels=3 * LIMITS["expression_levels"].most,
    alternatives=LIMITS["alternatives"].most,
)


@dataclass(frozen=True)
class Expression:
    """A checked expression.

    `sql` is canonical: equal for texts that differ only in white space, case of keywords and names, aliases of
    functions and needless parentheses. Equal `sql` over one schema means equal values, so it can identify shared
    state. `fields` are the names it reads, spelled as in the schema. Pickles by compiling again.
    """

    sql: str
    type: DataType
    fields: frozenset[str]
    _node: Node = field(repr=False, compare=False)
    _schema: tuple[tuple[str, DataType], ...] = field(repr=False, compare=False)

    def evaluate(self, columns: Mapping[str, Column], rows: int) -> Column:
        """The values over columns of `rows` rows each; of `columns` only `fields` are looked at.

        NULLs are as in SQL. A row for which Spark would raise (overflow, division by zero, cast) is marked in
        `Column.error`; the others are not touched by it. The arrays may be shared with the input or read-only.
        """
        inputs = {name: _swift(columns[name]) for name in self.fields}
        with np.errstate(all="ignore"):
            column = self._node.run(inputs, rows)
        if column.values.dtype == self.type.storage:
            return column
        return replace(column, values=column.values.astype(self.type.storage))

    @cached_property
    def reads_back(self) -> bool:
        """Whether `sql` can be read again, with the same fields and type; if not, it must not be sent as text."""
        try:
            again = recompiled(self.sql, dict(self._schema))
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - whatever reading it raises, it cannot be sent
            return False
        return (again.type, again.fields) == (self.type, self.fields)

    def __reduce__(self) -> tuple[Any, ...]:
        return recompiled, (self.sql, dict(self._schema))


def _swift(column: Column) -> Column:
    if not column.type.is_decimal or column.values.dtype != object:
        return column
    return replace(column, values=narrow_decimals(column.values))


@dataclass(frozen=True)
class AggregateCall:
    """An aggregate over the events of a window, such as `avg(x) filter (where amount > 1000)`.

    `function` is one of count, count_distinct, sum, avg, min, max, stddev_samp. `argument` is None for count(*).
    Only rows whose `filter` (None: all) is true are counted. `sql` is canonical, as in Expression.
    """

    function: str
    argument: Expression | None
    filter: Expression | None
    sql: str

    @property
    def fields(self) -> frozenset[str]:
        """The names that argument and filter read."""
        return frozenset().union(*(part.fields for part in (self.argument, self.filter) if part is not None))


def compile_expression(text: str, schema: Mapping[str, DataType], limits: Limits = DEFAULT_LIMITS) -> Expression:
    """The expression that a text of Spark SQL means over a schema (field name -> type).

    Names match whatever their case; a dotted name of the schema is written as it is. Raises ExpressionError with all
    problems: what is not allowed, unknown fields, type errors, more characters, levels or values of an `in` than `limits`.
    """
    return _compiled(parse(text, limits), schema, limits)


def recompiled(sql: str, schema: Mapping[str, DataType]) -> Expression:
    """The expression of a canonical text, that is, of the `sql` of one that was compiled over these fields."""
    return compile_expression(sql, schema, _CANONICAL)


def _compiled(tree: exp.Expr, schema: Mapping[str, DataType], limits: Limits = _CANONICAL) -> Expression:
    binder = Binder(schema, limits.alternatives)
    node = binder.bind(tree)
    if node is None or binder.problems:
        raise ExpressionError(binder.problems)
    return Expression(
        node.sql, node.type, node.fields, node, tuple((name, schema[name]) for name in sorted(node.fields))
    )


def compile_part(text: str, schema: Mapping[str, DataType]) -> Expression | None:
    """The operands of the text's outermost `and` that read only names of `schema`, joined by `and`; None if none does.

    Where it does not hold, the text as a whole does not hold either, whatever the other names stand for.
    """
    parts = []
    for tree in conjuncts(parse(text)):
        with contextlib.suppress(ExpressionError):
            parts.append(_compiled(tree, schema).sql)
    return recompiled(" and ".join(f"({part})" for part in parts), schema) if parts else None


def columns_of(text: str) -> list[str]:
    """The names that a text reads, as they are written, dotted ones in full. Raises ExpressionError."""
    return [".".join(part.name for part in column.parts) for column in parse(text).find_all(exp.Column)]


_TEACHING = (
    "a measure is one aggregate such as sum(amount) or count(*) filter (where amount > 1000); "
    "give each aggregate its own measure and combine them in when"
)


def compile_aggregate(text: str, schema: Mapping[str, DataType], limits: Limits = DEFAULT_LIMITS) -> AggregateCall:
    """The aggregate call that a measure's text means over a schema.

    Exactly one call, at the top level. Raises ExpressionError with all problems.
    """
    tree = unwrapped(parse(text, limits))
    condition: exp.Expr | None = None
    if isinstance(tree, exp.Filter):
        tree, condition = tree.this, tree.expression.this
    if isinstance(tree, exp.Window):
        raise ExpressionError(["a window function (over) is not allowed; the rule's window does that"])
    if not isinstance(tree, exp.Anonymous):
        raise ExpressionError([f"{shortened(tree)} is not an aggregate: {_TEACHING}"])
    name = str(tree.name).lower()
    if name not in AGGREGATES:
        raise ExpressionError(
            [f"{name}() is not an aggregate that can be used: {_TEACHING}; the aggregates are {_listing()}"]
        )
    return _aggregate(name, tree, condition, schema, limits)


def _listing() -> str:
    return ", ".join(sorted(AGGREGATES))


def _aggregate(
    name: str, tree: exp.Expr, condition: exp.Expr | None, schema: Mapping[str, DataType], limits: Limits
) -> AggregateCall:
    problems: list[str] = []
    distinct, parts = _arguments(name, tree, problems)
    argument = _part(parts[0], schema, limits, problems) if len(parts) == 1 and not _is_star(parts[0]) else None
    where = None if condition is None else _part(condition, schema, limits, problems)
    # Only what can be told apart can be counted once.
    takes, called = (ordered, f"{name}(distinct)") if distinct else (AGGREGATES[name], f"{name}()")
    if argument is not None and (wrong := takes(argument.type)):
        problems.append(f"{called} {wrong}")
    if where is not None and where.type not in (BOOLEAN, NULL):
        problems.append(
            f"filter takes a condition, but {where.sql!r} is of type {where.type}; compare it with something"
        )
    if problems:
        raise ExpressionError(problems)
    shown = "*" if argument is None else f"distinct {argument.sql}" if distinct else argument.sql
    sql = f"{name}({shown})" + (f" filter (where {where.sql})" if where is not None else "")
    return AggregateCall("count_distinct" if distinct else name, argument, where, sql)


def _arguments(name: str, tree: exp.Expr, problems: list[str]) -> tuple[bool, list[exp.Expr]]:
    """Whether the call is distinct, and its arguments."""
    parts = list(tree.expressions)
    distinct = len(parts) == 1 and isinstance(parts[0], exp.Distinct)
    if distinct:
        parts = list(parts[0].expressions)
        if name != "count":
            problems.append(f"{name}(distinct ...) is not supported; only count takes distinct")
    if len(parts) != 1:
        problems.append(f"{name}() takes one argument, got {len(parts)}")
    elif _is_star(parts[0]) and (name != "count" or distinct):
        problems.append(
            f"{name}(*) is not allowed; name a field"
            if not distinct
            else "count(distinct *) is not allowed; name a field"
        )
    return distinct, parts


def _is_star(tree: exp.Expr) -> bool:
    return isinstance(tree, exp.Star)


def _part(tree: exp.Expr, schema: Mapping[str, DataType], limits: Limits, problems: list[str]) -> Expression | None:
    try:
        return _compiled(tree, schema, limits)
    except ExpressionError as error:
        problems += [problem for problem in error.problems if problem not in problems]
        return None

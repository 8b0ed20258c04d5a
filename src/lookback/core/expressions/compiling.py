"""Compiles the expressions and aggregate calls of rules, with the syntax and values of Spark SQL (ANSI mode, UTC).

    text --parse--> syntax tree --bind to the schema--> typed node --evaluate--> column

No text is ever passed to `eval`. Constructs whose values could differ from Spark's are refused with a remedy.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
from sqlglot import exp

from lookback.core.errors import ExpressionError
from lookback.core.expressions import functions
from lookback.core.expressions.binding import Binder, split_conjuncts
from lookback.core.expressions.kernels import narrow_decimals
from lookback.core.expressions.mathematics import ROUNDED
from lookback.core.expressions.nodes import Node, replace_settled
from lookback.core.expressions.syntax import name_as_sql, parse, unwrap
from lookback.core.expressions.texts import TooManyCharacters
from lookback.core.values.columns import Column, concat_columns
from lookback.core.values.keys import Int64s
from lookback.core.values.limits import DEFAULT_LIMITS, LIMITS, Limits
from lookback.core.values.lists import Lists
from lookback.core.values.types import BOOLEAN, STRING, TIMESTAMP, DataType

# The limits of canonical SQL, which can be longer and deeper than its source text. The source text was checked already.
CANONICAL = Limits(
    expression_characters=100 * LIMITS["expression_characters"].most,
    expression_levels=3 * LIMITS["expression_levels"].most,
    alternatives=LIMITS["alternatives"].most,
)


_MAY_BE_ROUNDED = re.compile(rf"\b({'|'.join(sorted(ROUNDED))})\(", re.IGNORECASE)
# The symbol of each comparison whose sides are swapped, if it is another one.
TURNED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


@dataclass(frozen=True)
class Expression:
    """A checked expression. Unpickling compiles its `sql`.

    Attributes:
        sql: Canonical SQL, equal for texts that differ only in white space, case of keywords and names, aliases of
            functions and needless parentheses. Equal `sql` over one schema means equal values, so it can identify
            shared state.
        type: The type of its values.
        fields: The names of the columns that it reads, spelled as in the schema. A call of in_list reads its own column
            instead of its argument.
        memberships: The calls of in_list, each after those in its argument.
    """

    sql: str
    type: DataType
    fields: frozenset[str]
    memberships: tuple[Membership, ...] = field(repr=False, compare=False)
    _node: Node = field(repr=False, compare=False)
    _schema: tuple[tuple[str, DataType], ...] = field(repr=False, compare=False)

    def evaluate(self, columns: Mapping[str, Column], rows: int) -> Column:
        """Evaluates the expression over columns of `rows` rows each. Reads only the columns in `fields`.

        NULLs behave as in SQL. A row for which Spark would raise an error (overflow, division by zero, cast) is marked
        in `Column.error` and does not affect other rows. The arrays may be shared with the input or read-only.
        """
        inputs = {name: _narrow_column(columns[name]) for name in self.fields}
        try:
            with np.errstate(all="ignore"):
                column = self._node.run(inputs, rows)
        except TooManyCharacters:
            return self._evaluate_halves(inputs, rows)
        if column.values.dtype == self.type.storage:
            return column
        return replace(column, values=column.values.astype(self.type.storage))

    def _evaluate_halves(self, columns: Mapping[str, Column], rows: int) -> Column:
        halves = []
        for half in (slice(0, rows // 2), slice(rows // 2, rows)):
            part = {name: column.take(half) for name, column in columns.items()}
            halves.append(self.evaluate(part, half.stop - half.start))
        column = concat_columns(halves)
        most = functions.MAX_TEXT_CHARACTERS
        if self.type == STRING and sum(map(len, column.values[column.is_known()])) > most:
            raise OverflowError(f"{self.sql} gives more than {most:,} characters for the events judged at once")
        return column

    @cached_property
    def named(self) -> frozenset[str]:
        """The names of the schema that it reads, including those in arguments of in_list."""
        own = self.fields - {membership.name for membership in self.memberships}
        return own.union(*(membership.text.named for membership in self.memberships))

    @property
    def types(self) -> dict[str, DataType]:
        """The types of the names of the schema that it reads."""
        return dict(self._schema)

    @cached_property
    def is_readable(self) -> bool:
        """True if `sql` can be compiled again with the same fields and type. Otherwise it must not be sent as text."""
        try:
            again = recompile(self.sql, dict(self._schema))
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - after any error it cannot be sent
            return False
        return (again.type, again.fields) == (self.type, self.fields)

    def __reduce__(self) -> tuple[Any, ...]:
        return recompile, (self.sql, dict(self._schema))


@dataclass(frozen=True)
class Membership:
    """A call of in_list.

    Attributes:
        name: The name of the column with its values.
        sql: The call.
        list_name: The name of the list.
        text: The text to look up in the list.
    """

    name: str
    sql: str
    list_name: str
    text: Expression

    @property
    def error_name(self) -> str:
        """The name under which a sequence stores if the call has an error; "" for a plain field, which has none."""
        is_field = self.text.sql in {f"cast({name_as_sql(name)} as string)" for name in self.text.fields}
        return "" if is_field else f"{self.name}:error"

    def evaluate(self, columns: Mapping[str, Column], times: Int64s, lists: Lists) -> Column:
        """Returns whether the texts are in the list at the given times (microseconds, shape (rows,)); NULL for NULL."""
        read = {name: columns[name] for name in self.text.fields}
        ((name, column), *others) = read.items()
        # In other types, equal values may have different texts.
        is_exact = column.values.dtype.kind in "ib" or column.type == STRING
        if others or not is_exact or column.error is not None or not len(times):
            until = self._find_until(read, len(times), lists)
        else:
            answers = lists.recall(self.list_name, (self.text.sql, column.type))
            until = answers.find(column, lambda part: self._find_until({name: part}, len(part), lists))
        return replace(until, type=BOOLEAN, values=times < until.values)

    def _find_until(self, columns: Mapping[str, Column], rows: int, lists: Lists) -> Column:
        """Finds the times until which the texts are in the list; NULL for NULL."""
        texts = self.text.evaluate(columns, rows)
        known = Column(STRING, replace_settled(texts, ~texts.is_known()), texts.null)
        return Column(TIMESTAMP, lists.find_until(self.list_name, known), texts.null, texts.error)


def add_memberships(
    columns: Mapping[str, Column], memberships: Iterable[Membership], times: Int64s, lists: Lists
) -> dict[str, Column]:
    """Adds the columns of calls of in_list, each after those in its argument. `times` has the time of each row."""
    known = dict(columns)
    for membership in memberships:
        known[membership.name] = membership.evaluate(known, times, lists)
    return known


def _narrow_column(column: Column) -> Column:
    if not column.type.is_decimal or column.values.dtype != object:
        return column
    return replace(column, values=narrow_decimals(column.values))


def compile_expression(
    text: str,
    schema: Mapping[str, DataType],
    limits: Limits = DEFAULT_LIMITS,
    named: Mapping[str, str] = MappingProxyType({}),
) -> Expression:
    """Compiles a Spark SQL expression over a schema (field name -> type).

    Names are case-insensitive. Dotted names of the schema are written without backticks. `named` has the canonical SQL
    of expressions by names in lower case, which stand for them in the text. Raises ExpressionError with all problems:
    constructs that are not allowed, unknown fields, type errors, and more characters, levels or values of an `in` than
    `limits` allow.
    """
    tree = parse(text, limits)
    return compile_tree(_fill_names(tree, named) if named else tree, schema, limits)


def _fill_names(tree: exp.Expr, named: Mapping[str, str]) -> exp.Expr:
    """Writes expressions for the names that stand for them."""

    def fill(node: exp.Expr) -> exp.Expr:
        sql = named.get(node.name.lower()) if isinstance(node, exp.Column) else None
        return node if sql is None else exp.Paren(this=parse(sql, CANONICAL))

    return tree.transform(fill)


def recompile(sql: str, schema: Mapping[str, DataType]) -> Expression:
    """Compiles the `sql` of an expression that was compiled before over these fields."""
    return compile_tree(parse(sql, CANONICAL), schema, takes_combination=True)


def compile_tree(
    tree: exp.Expr, schema: Mapping[str, DataType], limits: Limits = CANONICAL, *, takes_combination: bool = False
) -> Expression:
    """Compiles a tree.

    `takes_combination` allows what only aggregates take: several values in parentheses, as in count(distinct a, b), and
    RANKED, a value after its rank.
    """
    binder = Binder(schema, limits.alternatives)
    is_ranked = isinstance(tree, exp.Anonymous) and tree.name == functions.RANKED
    is_combination = takes_combination and (is_ranked or isinstance(tree, exp.Tuple))
    node = binder.bind_combination(tree) if is_combination else binder.bind(tree)
    if node is None or binder.problems:
        raise ExpressionError(binder.problems)
    return _make_expression(node, schema, _make_memberships(binder, schema))


def _make_memberships(binder: Binder, schema: Mapping[str, DataType]) -> list[Membership]:
    """Returns the calls of in_list that were bound, each after those in its argument."""
    made: list[Membership] = []
    for name, (sql, list_name, text) in binder.memberships.items():
        made.append(Membership(name, sql, list_name, _make_expression(text, schema, made)))
    return made


def _make_expression(node: Node, schema: Mapping[str, DataType], known: Sequence[Membership]) -> Expression:
    """Makes the expression of a node. `known` must include the node's calls of in_list."""
    wanted = set(node.fields)
    for membership in reversed(known):
        if membership.name in wanted:
            wanted |= membership.text.fields
    used = tuple(membership for membership in known if membership.name in wanted)
    return Expression(
        node.sql,
        node.type,
        node.fields,
        used,
        node,
        tuple((name, schema[name]) for name in sorted(wanted & schema.keys())),
    )


def compile_part(text: str, schema: Mapping[str, DataType]) -> Expression | None:
    """Compiles those operands of the text's outermost `and` that read only names of `schema`; None if there are none.

    If this part does not hold, the whole condition does not hold, whatever the values of other names.
    """
    parts = []
    for tree in split_conjuncts(parse(text)):
        with contextlib.suppress(ExpressionError):
            parts.append(compile_tree(tree, schema).sql)
    return recompile(" and ".join(f"({part})" for part in parts), schema) if parts else None


def split_condition(condition: Expression) -> list[Expression]:
    """Splits a condition at its outermost `and`. Returns the operands in order."""
    schema = dict(condition._schema)
    return [compile_tree(tree, schema) for tree in split_conjuncts(parse(condition.sql, CANONICAL))]


# Shards ask in each batch for each rule.
@lru_cache(maxsize=20_000)
def drop_uncertain(condition: Expression) -> Expression | None:
    """Returns a condition that is true or an error whenever the given one is, for any lists and on any machine.

    It has no call of in_list, and nothing that is true or false by a rounded digit. Returns None if no such condition
    exists, because the given one may hold for any event.
    """
    if not condition.memberships and not list_rounded(condition):
        return condition
    kept: list[str] = []
    for part in split_condition(condition):
        if not part.memberships:
            # If the part has an error, so has the condition.
            kept.append(f"({part.sql}) is null or true" if list_rounded(part) else part.sql)
            continue
        # A part other than a call of in_list, or `not` with a call, may fail for some contents of the lists only.
        (membership, *others) = part.memberships
        if others or part.sql.removeprefix("not ") != membership.sql:
            return None
        text = membership.text
        if list_rounded(text):
            return None
        if membership.error_name:
            # If the text has an error, so has the condition.
            kept.append(f"{text.sql} is null or true")
    return recompile(" and ".join(f"({part})" for part in kept), dict(condition._schema)) if kept else None


def list_rounded(expression: Expression) -> list[str]:
    """Lists the functions that an expression calls whose last digit may be another one on another machine."""
    if not _MAY_BE_ROUNDED.search(expression.sql):
        return []  # Most rules: parsing again would be a sixth of the time that their loading takes.
    calls = parse(expression.sql, CANONICAL).find_all(exp.Anonymous)
    return sorted({str(call.name).lower() for call in calls} & ROUNDED)


@dataclass(frozen=True)
class Comparison:
    """A comparison of two expressions by one of `= != < <= > >=`, whose stored values can be compared."""

    symbol: str
    left: Expression
    right: Expression

    def turn(self) -> Comparison:
        """Returns the same comparison with its sides swapped."""
        return Comparison(TURNED.get(self.symbol, self.symbol), self.right, self.left)


def find_comparisons(condition: Expression) -> Sequence[Comparison]:
    """Finds comparisons that are all true whenever the condition is: operands of its outermost `and`."""
    return _find_comparisons(condition.sql, condition._schema) if condition.is_readable else ()


@lru_cache(maxsize=1_000)
def _find_comparisons(sql: str, schema: tuple[tuple[str, DataType], ...]) -> Sequence[Comparison]:
    found = []
    for part in split_condition(recompile(sql, dict(schema))):
        if part._node.compared is not None:
            symbol, *nodes = part._node.compared
            left, right = (_make_expression(each, dict(schema), part.memberships) for each in nodes)
            found.append(Comparison(symbol, left, right))
    return found


@dataclass(frozen=True)
class Containment:
    """A call `array_contains(x.y, value)`, or `not` with this call if not `is_wanted`. `array` is the name `x.y`."""

    array: str
    value: Expression
    is_wanted: bool


def find_containments(condition: Expression) -> Sequence[Containment]:
    """Finds calls of array_contains, or `not` with a call, that are all true whenever the condition is.

    Leaves out calls whose value reads an array.
    """
    return _find_containments(condition.sql, condition._schema) if condition.is_readable else ()


@lru_cache(maxsize=1_000)
def _find_containments(sql: str, schema: tuple[tuple[str, DataType], ...]) -> Sequence[Containment]:
    found = []
    for tree in map(unwrap, split_conjuncts(parse(sql, CANONICAL))):
        is_wanted = not isinstance(tree, exp.Not)
        call = tree if is_wanted else unwrap(tree.this)
        if isinstance(call, exp.Anonymous) and str(call.name).lower() == "array_contains":
            array, value = unwrap(call.expressions[0]), compile_tree(call.expressions[1], dict(schema))
            if not isinstance(array, exp.Column) or "." not in array.name:
                continue
            if not any("." in name for name in value.fields):
                found.append(Containment(array.name, value, is_wanted))
    return found


def find_names(text: str) -> list[str]:
    """Returns the names that a text reads, as written; dotted names in full. Raises ExpressionError."""
    return [column.name for column in parse(text).find_all(exp.Column)]


def find_rising(text: str) -> dict[str, int] | None:
    """Finds the limits of a monotone condition, which never begins to hold when a value falls.

    Such a condition consists of comparisons such as `total >= 100`, joined by `and` or `or`.

    Args:
        text: Canonical SQL of the condition.

    Returns:
        For each name in the condition the lowest number that it is compared with, rounded down. The condition does not
        hold if every name is below its number by one or more, however they are rounded for the comparison. None for any
        other condition, and for one that cannot be parsed again.
    """
    try:
        parts = [parse(text, CANONICAL)]
    except ExpressionError:
        return None
    lowest: dict[str, int] = {}
    while parts:
        tree = unwrap(parts.pop())
        if isinstance(tree, (exp.And, exp.Or)):
            parts += [tree.this, tree.expression]
            continue
        if isinstance(tree, (exp.GT, exp.GTE)):
            name, number = unwrap(tree.this), unwrap(tree.expression)
        elif isinstance(tree, (exp.LT, exp.LTE)):
            name, number = unwrap(tree.expression), unwrap(tree.this)
        else:
            return None
        is_number = isinstance(number, exp.Literal) and not number.is_string
        if not is_number or not isinstance(name, exp.Column):
            return None
        whole = number.name.partition(".")[0]
        limit = int(whole) if whole.isdigit() and len(whole) <= _EXACT_DIGITS else 0
        lowest[name.name] = min(limit, lowest.get(name.name, limit))
    return lowest


def find_items(condition: Expression) -> Mapping[str, frozenset[int] | None]:
    """Finds the items that a condition reads of arrays such as `x.y`, from 1, or from -1 for the last.

    None if it reads an array in any other way than by `element_at` with a number.
    """
    return _find_items(condition.sql) if condition.is_readable else dict.fromkeys(condition.fields)


@lru_cache(maxsize=1_000)
def _find_items(text: str) -> Mapping[str, frozenset[int] | None]:
    found: dict[str, frozenset[int] | None] = {}
    for column in parse(text, CANONICAL).find_all(exp.Column):
        name, call = column.name, column.parent
        is_item = isinstance(call, exp.Anonymous) and str(call.name).lower() == "element_at"
        index = unwrap(call.expressions[-1]) if is_item and call is not None else column
        number = index.this if isinstance(index, exp.Neg) else index
        known = found.get(name, frozenset())
        if known is None or not isinstance(number, exp.Literal) or not number.name.isdigit():
            found[name] = None
        else:
            found[name] = known | {-int(number.name) if number is not index else int(number.name)}
    return found


# A double can represent every whole number with this many digits.
_EXACT_DIGITS = 15

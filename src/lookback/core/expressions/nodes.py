"""Defines the nodes of typed expression trees, and how NULLs and errors propagate through them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import numpy as np

from lookback.core.expressions.kernels import KernelResult, broadcast, either_mask, mask_or_none
from lookback.core.values.columns import Column, Mask, Values
from lookback.core.values.types import DataType

Evaluate = Callable[[Mapping[str, Column], int], Column]
Kernel = Callable[..., KernelResult]
# A pattern of `like` between its `%`, character by character; None is any character.
Pieces = tuple[tuple[str | None, ...], ...]

# With one row in four left to decide, or fewer, it takes less time to take these rows than to evaluate all.
_MOSTLY_SETTLED = 4
# The precedence of operators, to print expressions without needless parentheses.
OR, AND, NOT, COMPARISON, SUM, PRODUCT, UNARY, PRIMARY = range(1, 9)


@dataclass(frozen=True)
class Node:
    """One operation.

    Attributes:
        type: The type of its result.
        sql: Its canonical SQL.
        run: A function from columns and a number of rows to a column.
        level: Its precedence.
        literal: The Python value (int, str) of a literal, since types depend on it; None for other operations.
        fields: The names that it reads.
        compared: The symbol and the operands of a comparison, whose stored values can be compared; None for other
            operations.
        tested: The text and the pattern of a `like` that is not negated; None for other operations.
    """

    type: DataType
    sql: str
    run: Evaluate
    level: int = PRIMARY
    literal: Any = None
    fields: frozenset[str] = frozenset()
    compared: tuple[str, Node, Node] | None = None
    tested: TextTest | None = None

    def within(self, level: int) -> str:
        """Returns the SQL as an operand of an operator of this level, in parentheses unless it binds tighter."""
        return self.sql if self.level > level else f"({self.sql})"


@dataclass(frozen=True)
class TextTest:
    """A `like` that is not negated.

    Attributes:
        text: The text.
        ignores_case: Whether the text is compared in small letters.
        pieces: The pattern.
    """

    text: Node
    ignores_case: bool
    pieces: Pieces


def make_field(name: str, type_: DataType, sql: str) -> Node:
    """Makes the node that reads a column."""
    return Node(type_, sql, lambda columns, rows: columns[name], fields=frozenset({name}))


def name_membership(sql: str) -> str:
    """Returns the name of the column with the values of a call of in_list, given as SQL.

    No field has such a name. It contains no dot, which would mark a field of a step.
    """
    return f"in_list:{sha256(sql.encode()).hexdigest()[:32]}"


def make_constant(type_: DataType, value: Any, sql: str, level: int = PRIMARY, literal: Any = None) -> Node:
    """Makes the node of a stored value (see DataType.storage), None for NULL."""

    def run(columns: Mapping[str, Column], rows: int) -> Column:
        if value is None:
            return Column(type_, np.zeros(rows, dtype=type_.storage), np.ones(rows, dtype=bool) if rows else None)
        return Column(type_, broadcast(value, type_.storage, rows))

    return Node(type_, sql, run, level, literal)


def union_fields(nodes: Sequence[Node]) -> frozenset[str]:
    """Returns the names that the nodes read."""
    return frozenset(name for node in nodes for name in node.fields)


def make_strict(
    type_: DataType,
    sql: str,
    arguments: Sequence[Node],
    kernel: Kernel,
    level: int = PRIMARY,
    right_first: bool = False,
) -> Node:
    """Makes an operation that is NULL if an argument is NULL.

    As in Spark, arguments are evaluated in order: the first that is NULL or an error decides the row. Divisions
    evaluate the divisor first (`right_first`).
    """

    def run(columns: Mapping[str, Column], rows: int) -> Column:
        inputs = [argument.run(columns, rows) for argument in arguments]
        null, error = decide_in_order(inputs[::-1] if right_first else inputs)
        settled = either_mask(null, error)
        outcome = kernel(*(replace_settled(column, settled) for column in inputs))
        return finish_column(type_, outcome, null, error, settled)

    return Node(type_, sql, run, level, fields=union_fields(arguments))


def finish_column(
    type_: DataType, outcome: KernelResult, null: Mask | None, error: Mask | None, settled: Mask | None
) -> Column:
    """Makes the column of a kernel's result; rows in `settled` were NULL or errors before the kernel ran."""
    new_error, new_null = outcome.error, outcome.null
    if settled is not None:
        new_error = None if new_error is None else mask_or_none(new_error & ~settled)
        new_null = None if new_null is None else mask_or_none(new_null & ~settled)
    null, error = either_mask(null, new_null), either_mask(error, new_error)
    values, unknown = outcome.values, either_mask(null, error)
    if unknown is not None and values.dtype == np.int64:
        # The next kernel may rely on each number fitting its type, even under NULL and error.
        values = np.where(unknown, 0, values)
    return Column(type_, values, null, error)


def decide_in_order(inputs: Sequence[Column]) -> tuple[Mask | None, Mask | None]:
    """Returns the masks (NULL, error) of a strict operation: the first argument that is either decides the row."""
    null, error = inputs[0].null, inputs[0].error
    for column in inputs[1:]:
        new_error = column.error if null is None or column.error is None else column.error & ~null
        new_null = column.null if error is None or column.null is None else column.null & ~error
        null, error = either_mask(null, new_null), either_mask(error, new_error)
    return mask_or_none(null), mask_or_none(error)


def decide_at_once(inputs: Sequence[Column]) -> tuple[Mask | None, Mask | None]:
    """Returns the masks (NULL, error) of an operation that first evaluates all arguments: any error decides the row."""
    null: Mask | None = None
    error: Mask | None = None
    for column in inputs:
        null, error = either_mask(null, column.null), either_mask(error, column.error)
    if null is not None and error is not None:
        null = null & ~error
    return mask_or_none(null), mask_or_none(error)


def replace_settled(column: Column, settled: Mask | None) -> Values:
    """Replaces values under NULL and error with a neutral object, so that kernels over objects cannot fail there."""
    if settled is None or column.values.dtype != object:
        return column.values
    values: Values = column.values.copy()
    if column.type.name == "array":
        for row in np.flatnonzero(settled):
            values[row] = []
    else:
        values[settled] = "" if column.type.name == "string" else 0
    return values


# Lazy operations -----------------------------------------------------------------------------------------------------


def combine(nodes: Sequence[Node], columns: Mapping[str, Column], rows: int, *, settles: bool) -> Column:
    """Computes AND or OR of conditions from left to right.

    A row is settled by an error and by the value `settles`: false for AND, true for OR. Later conditions cannot make it
    fail, and are evaluated without the settled rows if most are.
    """
    first, *rest = nodes
    column = _read_booleans(first.run(columns, rows))
    for node in rest:
        open_ = column.values != settles
        if column.null is not None:
            open_ |= column.null
        if column.error is not None:
            open_ &= ~column.error
        left = int(np.count_nonzero(open_))
        if not left:
            break
        if left * _MOSTLY_SETTLED > rows:
            other = node.run(columns, rows)
        else:
            at = np.flatnonzero(open_)
            other = _spread(node.run({name: columns[name].take(at) for name in node.fields}, left), at, rows)
        column = _combine_pair(column, _read_booleans(other), settles=settles)
    return column


def _read_booleans(column: Column) -> Column:
    if column.type.name == "boolean":
        return column
    return replace(column, values=np.zeros(len(column), dtype=bool))


def _spread(column: Column, at: Values, rows: int) -> Column:
    """Makes a column of `rows` rows that has these rows at these positions, and false elsewhere."""

    def spread(mask: Values) -> Mask:
        found = np.zeros(rows, dtype=bool)
        found[at] = mask
        return found

    null, error = (None if mask is None else spread(mask) for mask in (column.null, column.error))
    return replace(column, values=spread(_read_booleans(column).values), null=null, error=error)


def _combine_pair(before: Column, column: Column, *, settles: bool) -> Column:
    value, null, error = before.values, before.null, before.error
    if null is None and error is None and column.null is None and column.error is None:
        return replace(before, values=value | column.values if settles else value & column.values)
    known = value == settles
    if null is not None:
        known = known & ~null
    if error is not None:
        known = known & ~error
    open_ = ~known if error is None else ~(known | error)
    if column.error is not None:
        error = either_mask(error, mask_or_none(column.error & open_))
        open_ = open_ & ~column.error
    decides = open_ & (column.values == settles)
    if column.null is not None:
        decides = decides & ~column.null
    decided = known | decides
    unknown = either_mask(null, column.null)
    if unknown is not None:
        unknown = unknown & ~decided if error is None else unknown & ~decided & ~error
    return replace(before, values=decided == settles, null=mask_or_none(unknown), error=error)


class Choice:
    """Gives each row the value of the first branch that takes it. Rows that no branch takes are NULL."""

    def __init__(self, type_: DataType, rows: int) -> None:
        self._type = type_
        self._values: Values = np.zeros(rows, dtype=type_.storage)
        self._null = np.zeros(rows, dtype=bool)
        self._error = np.zeros(rows, dtype=bool)
        self._open = np.ones(rows, dtype=bool)

    def fail(self, column: Column) -> None:
        """Marks open rows as errors if `column`, the condition being evaluated, is an error there."""
        if column.error is not None:
            self._error |= column.error & self._open
            self._open &= ~column.error

    def take(self, rows: Mask | None, column: Column) -> None:
        """Gives the open rows among `rows` (None: all) the values of `column`, including its NULLs and errors."""
        taken = self._open if rows is None else self._open & rows
        self._values[taken] = column.values[taken]
        if column.null is not None:
            self._null[taken] = column.null[taken]
        if column.error is not None:
            self._error[taken] = column.error[taken]
        self._open = self._open & ~taken

    def column(self) -> Column:
        """Returns the column. Rows that no branch took are NULL."""
        return Column(self._type, self._values, mask_or_none(self._null | self._open), mask_or_none(self._error))

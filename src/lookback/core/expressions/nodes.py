"""A typed expression tree, ready to run: nodes, and how NULL and error pass through them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lookback.core.expressions.kernels import KernelResult, broadcast, either_mask, mask_or_none
from lookback.core.values.columns import Column, Mask, Values
from lookback.core.values.types import DataType

Run = Callable[[Mapping[str, Column], int], Column]
Kernel = Callable[..., KernelResult]

# How tightly a construct binds, for printing with no more parentheses than needed.
OR, AND, NOT, COMPARISON, SUM, PRODUCT, UNARY, PRIMARY = range(1, 9)


@dataclass(frozen=True)
class Node:
    """One operation: its type, its canonical SQL, and a function from columns and row count to a column.

    `literal` is the Python value of a literal (int, str) where its being one matters for types; `fields` are the
    names it reads.
    """

    type: DataType
    sql: str
    run: Run
    level: int = PRIMARY
    literal: Any = None
    fields: frozenset[str] = frozenset()

    def within(self, level: int) -> str:
        """The SQL as an operand of something that binds at `level`: in parentheses unless it binds tighter."""
        return self.sql if self.level > level else f"({self.sql})"


def field(name: str, type_: DataType, sql: str) -> Node:
    """The node that reads a column."""
    return Node(type_, sql, lambda columns, rows: columns[name], fields=frozenset({name}))


def constant(type_: DataType, value: Any, sql: str, level: int = PRIMARY, literal: Any = None) -> Node:
    """The node of a stored value (see DataType.storage), None for NULL."""

    def run(columns: Mapping[str, Column], rows: int) -> Column:
        if value is None:
            return Column(type_, np.zeros(rows, dtype=type_.storage), np.ones(rows, dtype=bool) if rows else None)
        return Column(type_, broadcast(value, type_.storage, rows))

    return Node(type_, sql, run, level, literal)


def fields_of(nodes: Sequence[Node]) -> frozenset[str]:
    """Names that any of the nodes reads."""
    return frozenset(name for node in nodes for name in node.fields)


def renamed(node: Node, sql: str, level: int = PRIMARY) -> Node:
    """The same operation printed otherwise; no longer a literal."""
    return replace(node, sql=sql, level=level, literal=None)


def strict(
    type_: DataType,
    sql: str,
    arguments: Sequence[Node],
    kernel: Kernel,
    level: int = PRIMARY,
    right_first: bool = False,
) -> Node:
    """An operation that is NULL if an argument is.

    Arguments are judged in order, as Spark evaluates them: the first that is NULL or an error settles the row.
    Divisions judge the divisor first (`right_first`).
    """

    def run(columns: Mapping[str, Column], rows: int) -> Column:
        inputs = [argument.run(columns, rows) for argument in arguments]
        null, error = decide_in_order(inputs[::-1] if right_first else inputs)
        settled = either_mask(null, error)
        outcome = kernel(*(harmless_values(column, settled) for column in inputs))
        return finish_column(type_, outcome, null, error, settled)

    return Node(type_, sql, run, level, fields=fields_of(arguments))


def finish_column(
    type_: DataType, outcome: KernelResult, null: Mask | None, error: Mask | None, settled: Mask | None
) -> Column:
    """The column of a kernel's outcome, where some rows were settled before it ran."""
    bad, new_null = outcome.bad, outcome.null
    if settled is not None:
        bad = None if bad is None else mask_or_none(bad & ~settled)
        new_null = None if new_null is None else mask_or_none(new_null & ~settled)
    return Column(type_, outcome.values, either_mask(null, new_null), either_mask(error, bad))


def decide_in_order(inputs: Sequence[Column]) -> tuple[Mask | None, Mask | None]:
    """(NULL, error) of a strict operation: the first argument that is either decides the row."""
    null, error = inputs[0].null, inputs[0].error
    for column in inputs[1:]:
        new_error = column.error if null is None or column.error is None else column.error & ~null
        new_null = column.null if error is None or column.null is None else column.null & ~error
        null, error = either_mask(null, new_null), either_mask(error, new_error)
    return mask_or_none(null), mask_or_none(error)


def decide_at_once(inputs: Sequence[Column]) -> tuple[Mask | None, Mask | None]:
    """(NULL, error) where all arguments are evaluated before any is looked at."""
    null: Mask | None = None
    error: Mask | None = None
    for column in inputs:
        null, error = either_mask(null, column.null), either_mask(error, column.error)
    if null is not None and error is not None:
        null = null & ~error
    return mask_or_none(null), mask_or_none(error)


def harmless_values(column: Column, settled: Mask | None) -> Values:
    """The values, with something harmless in place of objects under NULL or error."""
    if settled is None or column.values.dtype != object:
        return column.values
    values: Values = column.values.copy()
    if column.type.name == "array":
        for row in np.flatnonzero(settled):
            values[row] = []
    else:
        values[settled] = "" if column.type.name == "string" else 0
    return values


# What is evaluated only where it is needed ---------------------------------------------------------------------------


def conjunction(inputs: Iterable[Column]) -> Column:
    """AND from left to right: false settles a row, then what comes after cannot fail; an error settles it too."""
    return _chain(inputs, settles=False)


def disjunction(inputs: Iterable[Column]) -> Column:
    """OR from left to right: true settles a row."""
    return _chain(inputs, settles=True)


def _chain(inputs: Iterable[Column], settles: bool) -> Column:
    rest = iter(inputs)
    first = next(rest)
    value: Values = first.values if first.type.name == "boolean" else np.zeros(len(first), dtype=bool)
    null, error = first.null, first.error
    for column in rest:
        other = column.values if column.type.name == "boolean" else np.zeros(len(column), dtype=bool)
        if null is None and error is None and column.null is None and column.error is None:
            value = value | other if settles else value & other
            continue
        value, null, error = _linked(
            (value, null, error), Column(first.type, other, column.null, column.error), settles
        )
    return Column(first.type, value, null, error)


def _linked(
    state: tuple[Values, Mask | None, Mask | None], column: Column, settles: bool
) -> tuple[Values, Mask | None, Mask | None]:
    value, null, error = state
    known = ~value if not settles else value
    if null is not None:
        known = known & ~null
    if error is not None:
        known = known & ~error
    open_ = ~known if error is None else ~(known | error)
    if column.error is not None:
        error = either_mask(error, mask_or_none(column.error & open_))
        open_ = open_ & ~column.error
    decides = open_ & (column.values if settles else ~column.values)
    if column.null is not None:
        decides = decides & ~column.null
    decided = known | decides
    unknown = either_mask(null, column.null)
    if unknown is not None:
        unknown = unknown & ~decided if error is None else unknown & ~decided & ~error
    return (decided if settles else ~decided), mask_or_none(unknown), error


class Choice:
    """Rows taken one after another by the first branch that wants them; the rest is NULL."""

    def __init__(self, type_: DataType, rows: int) -> None:
        self._type = type_
        self._values: Values = np.zeros(rows, dtype=type_.storage)
        self._null = np.zeros(rows, dtype=bool)
        self._error = np.zeros(rows, dtype=bool)
        self._open = np.ones(rows, dtype=bool)

    def fail(self, column: Column) -> None:
        """Rows still open where `column`, a condition that must be known now, is an error."""
        if column.error is not None:
            self._error |= column.error & self._open
            self._open &= ~column.error

    def take(self, rows: Mask | None, column: Column) -> None:
        """Give the open rows among `rows` (None: all) the values of `column`, NULLs and errors included."""
        taken = self._open if rows is None else self._open & rows
        self._values[taken] = column.values[taken]
        if column.null is not None:
            self._null[taken] = column.null[taken]
        if column.error is not None:
            self._error[taken] = column.error[taken]
        self._open = self._open & ~taken

    def column(self) -> Column:
        """The column, NULL where no branch took the row."""
        return Column(self._type, self._values, mask_or_none(self._null | self._open), mask_or_none(self._error))

"""Functions that apply a lambda to each item of an array: exists, forall, filter and transform.

The lambda's body is evaluated once, over the items of all rows one after another; fields of the event are repeated for
each item. As in Spark, exists and forall stop at the item that decides, so that a later error does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lookback.core.expressions.kernels import KernelResult, either_mask, mask_or_none
from lookback.core.expressions.nodes import Node, make_field
from lookback.core.expressions.operators import RefusedOperator, require_condition
from lookback.core.expressions.syntax import is_bare_name
from lookback.core.expressions.texts import TooManyCharacters
from lookback.core.values.columns import Column, Mask, Values, from_values, make_objects
from lookback.core.values.keys import Int64s
from lookback.core.values.texts import quote_identifier
from lookback.core.values.types import BOOLEAN, DataType, array

# The limit for the items of all rows that are evaluated at once; beyond it, fewer rows are. One row may have more.
MAX_ITEMS = 4_000_000


@dataclass(frozen=True)
class Items:
    """The items of the arrays of all rows, one after another.

    Attributes:
        arrays: The items by row; none where the array is NULL or an error.
        rows: The row of each item. Shape (items,).
        results: The body's value for each item.
    """

    arrays: Sequence[Sequence[Any]]
    rows: Int64s
    results: Column

    def find_first(self, marked: Mask) -> Int64s:
        """Returns the position of the first marked item of each row; the number of all items if there is none."""
        first = np.full(len(self.arrays), len(self.rows), dtype=np.int64)
        positions = np.flatnonzero(marked)[::-1]
        first[self.rows[positions]] = positions
        return first

    def has(self, marked: Mask | None) -> Mask:
        """Marks the rows with a marked item."""
        has = np.zeros(len(self.arrays), dtype=bool)
        if marked is not None:
            has[self.rows[marked]] = True
        return has

    def split(self, values: Sequence[Any]) -> Values:
        """Gives each row the values of its items."""
        ends = np.cumsum([len(items) for items in self.arrays]).tolist()
        return make_objects([values[end - len(items) : end] for items, end in zip(self.arrays, ends, strict=True)])


Collect = Callable[[Items], KernelResult]


def make_variable(name: str, type_: DataType) -> Node:
    """Makes the node that reads the items, as a column whose name no field has."""
    return make_field(f"lambda:{name}", type_, name if is_bare_name(name) else quote_identifier(name))


def make_lambda(name: str, items: Node, variable: Node, body: Node) -> Node:
    """Makes the call of a function in LAMBDAS.

    Args:
        name: The function.
        items: The array.
        variable: What `make_variable` made for the type of the items.
        body: The value for each item.

    Raises:
        RefusedOperator: The body has the wrong type.
    """
    if name != "transform":
        body = require_condition(body, f"{name}()")
    elif body.type.name in ("array", "null"):
        raise RefusedOperator(f"transform() makes an array of single values, but {body.sql!r} is of type {body.type}")
    type_ = {"filter": items.type, "transform": array(body.type)}.get(name, BOOLEAN)
    (column_name,) = variable.fields
    read, collect = body.fields - {column_name}, LAMBDAS[name]

    def run(columns: Mapping[str, Column], rows: int) -> Column:
        column = items.run(columns, rows)
        known = column.is_known()
        arrays = [each if there else [] for each, there in zip(column.values.tolist(), known.tolist(), strict=True)]
        flat = [item for each in arrays for item in each]
        if len(flat) > MAX_ITEMS and rows > 1:
            raise TooManyCharacters
        index = np.repeat(np.arange(rows), [len(each) for each in arrays])
        inner = {each: columns[each].take(index) for each in read}
        inner[column_name] = from_values(variable.type, flat)
        try:
            results = body.run(inner, len(flat))
        except TooManyCharacters:
            if rows > 1:
                raise
            # The items of one event need more than there is room for: an error of that event.
            results = replace(
                from_values(body.type, [None] * len(flat)), null=None, error=np.ones(len(flat), dtype=bool)
            )
        found = collect(Items(arrays, index, results))
        null: Mask = ~known
        if column.error is not None:
            null &= ~column.error
        error = either_mask(found.error, column.error)
        return Column(type_, found.values, mask_or_none(either_mask(found.null, null)), mask_or_none(error))

    sql = f"{name}({items.sql}, {variable.sql} -> {body.sql})"
    return Node(type_, sql, run, fields=items.fields | read)


def _decide(items: Items, decider: bool) -> KernelResult:
    """Gives `decider` where an item has it, else NULL where an item is NULL, else the opposite."""
    results = items.results
    deciding = results.is_known() & (results.values.astype(bool) == decider)
    first = items.find_first(deciding)
    error: Mask = np.zeros(len(first), dtype=bool)
    if results.error is not None:
        error = items.find_first(results.error) < first
    decided = items.has(deciding)
    null = items.has(results.null) & ~decided & ~error
    return KernelResult(decided == decider, error, null)


def _filter(items: Items) -> KernelResult:
    kept = items.split(items.results.is_true().tolist())
    values = [
        [item for item, is_kept in zip(each, keeps, strict=True) if is_kept]
        for each, keeps in zip(items.arrays, kept, strict=True)
    ]
    return KernelResult(make_objects(values), items.has(items.results.error))


def _transform(items: Items) -> KernelResult:
    return KernelResult(items.split(items.results.to_stored_list()), items.has(items.results.error))


# SQL name -> how the values of the items become that of their row; the type is given by `make_lambda`.
LAMBDAS: dict[str, Collect] = {
    "exists": lambda items: _decide(items, True),
    "forall": lambda items: _decide(items, False),
    "filter": _filter,
    "transform": _transform,
}

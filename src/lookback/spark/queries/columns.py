"""PySpark's columns and functions as SQL for DuckDB.

Contains only what the reading commands use. Results equal Spark's, including NULLs; a test compares queries on both
engines. Anything else raises NeedsSpark.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

from lookback.core.values.times import parse_time


class NeedsSpark(Exception):
    """A query or a table that only Spark can be trusted to answer or read correctly."""


# Spark types with a different name in DuckDB.
_TYPES = {
    "string": "VARCHAR", "timestamp": "TIMESTAMPTZ", "timestamp_ntz": "TIMESTAMP", "binary": "BLOB", "byte": "TINYINT",
    "short": "SMALLINT", "long": "BIGINT",
}  # fmt: skip
_SAME_TYPES = ("boolean", "tinyint", "smallint", "int", "bigint", "float", "double", "date")


class Column:
    """An expression over the columns of a frame.

    Attributes:
        sql: The SQL of the expression, for DuckDB.
        name: The name of the result, if any.
        parts: The columns of a struct, in the order in which they are compared.
    """

    # `==` returns a column, so columns cannot be hashed.
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, sql: str, name: str | None = None, parts: Sequence[Column] = ()) -> None:
        self.sql, self.name, self.parts = sql, name, parts

    @property
    def item(self) -> str:
        """The expression with its name, for a SELECT list."""
        return self.sql if self.name is None else f"{self.sql} AS {quote(self.name)}"

    def alias(self, name: str) -> Column:
        """Names the result."""
        return Column(self.sql, name, self.parts)

    def cast(self, type_: str) -> Column:
        """Converts to a Spark type. As in ANSI mode, an invalid string is an error."""
        return Column(f"CAST({self.sql} AS {_name_type(type_)})", self.name)

    def isNull(self) -> Column:
        return Column(f"({self.sql} IS NULL)")

    def isNotNull(self) -> Column:
        return Column(f"({self.sql} IS NOT NULL)")

    def eqNullSafe(self, other: Any) -> Column:
        return Column(f"({self.sql} IS NOT DISTINCT FROM {_render(other)})")

    def isin(self, *values: Any) -> Column:
        listed = values[0] if len(values) == 1 and isinstance(values[0], (list, tuple, set)) else values
        return Column(f"({self.sql} IN ({', '.join(map(_render, listed))}))") if listed else Column("false")

    def startswith(self, other: Any) -> Column:
        return Column(f"starts_with({self.sql}, {_render(other)})")

    def between(self, low: Any, high: Any) -> Column:
        return Column(f"({self.sql} BETWEEN {_render(low)} AND {_render(high)})")

    def when(self, condition: Column, value: Any) -> Column:
        """Adds a case to a `when` expression."""
        return Column(f"{self.sql.removesuffix(' END')} WHEN {condition.sql} THEN {_render(value)} END")

    def otherwise(self, value: Any) -> Column:
        return Column(f"{self.sql.removesuffix(' END')} ELSE {_render(value)} END")

    def asc(self) -> Column:
        return Column(f"{self.sql} ASC NULLS FIRST")

    def desc(self) -> Column:
        return Column(f"{self.sql} DESC NULLS LAST")

    def asc_nulls_first(self) -> Column:
        return self.asc()

    def asc_nulls_last(self) -> Column:
        return Column(f"{self.sql} ASC NULLS LAST")

    def __getitem__(self, key: Any) -> Column:
        """Returns a field of a struct, or the value of a map's key, NULL if the key is missing."""
        return Column(f"{self.sql}[{_render(key)}]")

    def _combine(self, operator: str, other: Any) -> Column:
        return Column(f"({self.sql} {operator} {_render(other)})")

    def __eq__(self, other: object) -> Column:  # type: ignore[override]
        return self._combine("=", other)

    def __ne__(self, other: object) -> Column:  # type: ignore[override]
        return self._combine("<>", other)

    def __lt__(self, other: Any) -> Column:
        return self._combine("<", other)

    def __le__(self, other: Any) -> Column:
        return self._combine("<=", other)

    def __gt__(self, other: Any) -> Column:
        return self._combine(">", other)

    def __ge__(self, other: Any) -> Column:
        return self._combine(">=", other)

    def __and__(self, other: Any) -> Column:
        return self._combine("AND", other)

    def __or__(self, other: Any) -> Column:
        return self._combine("OR", other)

    def __add__(self, other: Any) -> Column:
        return self._combine("+", other)

    def __sub__(self, other: Any) -> Column:
        return self._combine("-", other)

    def __mul__(self, other: Any) -> Column:
        return self._combine("*", other)

    def __invert__(self) -> Column:
        return Column(f"(NOT {self.sql})")


def quote(name: str) -> str:
    """Quotes a name for DuckDB. Raises NeedsSpark if it has a zero character."""
    _refuse_zero(name)
    return '"' + name.replace('"', '""') + '"'


def as_column(value: Column | str) -> Column:
    """Returns a column, or the column with the given name."""
    return value if isinstance(value, Column) else col(value)


def find_function(name: str) -> Callable[..., Any]:
    """Finds a function by its name in PySpark. Raises NeedsSpark if it is not available here."""
    function = _FUNCTIONS.get(name)
    if function is None:
        raise NeedsSpark(f"function {name} needs Spark")
    return function


def col(name: str) -> Column:
    """Returns the column with this name."""
    return Column(quote(name), name)


def _render(value: Any) -> str:
    """Returns the SQL of a column or of a literal."""
    if isinstance(value, Column):
        return value.sql
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, Decimal)):
        return f"({value})"
    if isinstance(value, float):
        return f"CAST('{value!r}' AS DOUBLE)"
    if isinstance(value, dt.datetime):
        # As in PySpark, a time without a zone is local.
        return f"make_timestamptz({parse_time(value.astimezone(dt.timezone.utc))})"
    if not isinstance(value, str):
        raise NeedsSpark(f"a literal of type {type(value).__name__} needs Spark")
    _refuse_zero(value)
    return "'" + value.replace("'", "''") + "'"


def _refuse_zero(text: str) -> None:
    if "\0" in text:
        raise NeedsSpark("the text contains a zero character, which ends SQL")


def _name_type(type_: str) -> str:
    if type_ in _SAME_TYPES or type_.startswith("decimal("):
        return type_
    if type_ not in _TYPES:
        raise NeedsSpark(f"a cast to {type_} needs Spark")
    return _TYPES[type_]


def _call(function: str) -> Callable[..., Column]:
    """Returns a function of columns with this name in DuckDB."""

    def make(*columns: Column | str) -> Column:
        return Column(f"{function}({', '.join(as_column(each).sql for each in columns)})")

    return make


def _order(column: Column | str) -> str:
    """Returns the SQL for comparing rows by a column. NULL is smallest, also inside a struct."""
    column = as_column(column)
    return ", ".join(f"{each.sql} IS NOT NULL, {each.sql}" for each in column.parts or [column])


def _max_by(value: Column | str, order: Column | str) -> Column:
    order = as_column(order)
    known = "" if order.parts else f" FILTER (WHERE {order.sql} IS NOT NULL)"
    return Column(f"arg_max_null({as_column(value).sql}, row({_order(order)})){known}")


def _struct(*columns: Column | str) -> Column:
    parts = [as_column(each) for each in columns]
    fields = ", ".join(f"{quote(str(each.name))} := {each.sql}" for each in parts)
    return Column(f"struct_pack({fields})", parts=parts)


def _substring(column: Column | str, start: int, length: int) -> Column:
    return Column(f"substring({as_column(column).sql}, {start:d}, {length:d})")


def _count_distinct(column: Column | str) -> Column:
    return Column(f"count(DISTINCT {as_column(column).sql})")


def _array_contains(column: Column | str, value: Any) -> Column:
    listed, value = as_column(column).sql, _render(value)
    has, has_null = f"list_contains({listed}, {value})", f"len(list_filter({listed}, lambda e: e IS NULL)) > 0"
    return Column(f"CASE WHEN NOT {has} AND {has_null} THEN NULL ELSE {has} END")


# PySpark's functions in DuckDB.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "col": col,
    "lit": lambda value: value if isinstance(value, Column) else Column(_render(value)),
    "when": lambda condition, value: Column(f"CASE WHEN {condition.sql} THEN {_render(value)} END"),
    "coalesce": _call("coalesce"),
    # NULL if any argument is NULL.
    "concat": lambda *columns: Column(f"({' || '.join(as_column(each).sql for each in columns)})"),
    "substring": _substring,
    # DuckDB reads only valid UTF-8.
    "make_valid_utf8": lambda column: Column(as_column(column).sql),
    "unix_micros": _call("epoch_us"),
    "timestamp_micros": _call("make_timestamptz"),
    "current_timestamp": _call("now"),
    "struct": _struct,
    "array": lambda *columns: Column(f"[{', '.join(as_column(each).sql for each in columns)}]"),
    "array_contains": _array_contains,
    # The size of a map.
    "size": lambda column: Column(f"len(map_keys({as_column(column).sql}))"),
    "count": lambda column: Column("count(*)") if column == "*" else _call("count")(column),
    "count_distinct": _count_distinct,
    "count_if": lambda column: Column(f"count(*) FILTER (WHERE {as_column(column).sql})"),
    "min": _call("min"),
    "max": _call("max"),
    "max_by": _max_by,
    "first": _call("any_value"),
    "bool_and": _call("bool_and"),
    "bool_or": _call("bool_or"),
    # DuckDB chooses the kind of join itself.
}

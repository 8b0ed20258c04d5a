"""Implements Spark's rules for result types (ANSI mode): precision and scale of decimals, and common types."""

from __future__ import annotations

from collections.abc import Iterable

from lookback.core.values.types import DOUBLE, NULL, TIMESTAMP, DataType, decimal

MAX_PRECISION = 38
_MINIMUM_ADJUSTED_SCALE = 6
_INTEGER_ORDER = ("tinyint", "smallint", "int", "bigint")
_INTEGER_DIGITS = {"tinyint": 3, "smallint": 5, "int": 10, "bigint": 20}


def decimal_type_of(type_: DataType) -> DataType:
    """Returns the decimal type that holds every value of an integer or decimal type."""
    return type_ if type_.is_decimal else decimal(_INTEGER_DIGITS[type_.name], 0)


def literal_decimal_type(value: int) -> DataType:
    """Returns the smallest decimal type of an integer literal. Next to a decimal, 1000 counts as decimal(4,0)."""
    return decimal(len(str(abs(value))), 0)


def fit_precision(precision: int, scale: int) -> DataType:
    """Cuts a result type to 38 digits. Keeps the digits before the point, and 6 after it (or all, if fewer)."""
    if precision <= MAX_PRECISION:
        return decimal(precision, scale)
    whole = precision - scale
    return decimal(MAX_PRECISION, max(MAX_PRECISION - whole, min(scale, _MINIMUM_ADJUSTED_SCALE)))


def sum_type(a: DataType, b: DataType) -> DataType:
    """Returns the type of a + b and a - b of decimals."""
    scale = max(a.scale, b.scale)
    return fit_precision(max(a.precision - a.scale, b.precision - b.scale) + scale + 1, scale)


def product_type(a: DataType, b: DataType) -> DataType:
    """Returns the type of a * b of decimals."""
    return fit_precision(a.precision + b.precision + 1, a.scale + b.scale)


def quotient_type(a: DataType, b: DataType) -> DataType:
    """Returns the type of a / b of decimals."""
    scale = max(_MINIMUM_ADJUSTED_SCALE, a.scale + b.precision + 1)
    return fit_precision(a.precision - a.scale + b.scale + scale, scale)


def remainder_type(a: DataType, b: DataType) -> DataType:
    """Returns the type of a % b of decimals."""
    scale = max(a.scale, b.scale)
    return fit_precision(min(a.precision - a.scale, b.precision - b.scale) + scale, scale)


def wider_decimal_type(a: DataType, b: DataType) -> DataType:
    """Returns the common type of two decimals. Beyond 38 digits the fraction is cut, as in Spark."""
    scale = max(a.scale, b.scale)
    precision = max(a.precision - a.scale, b.precision - b.scale) + scale
    if precision <= MAX_PRECISION:
        return decimal(precision, scale)
    return decimal(MAX_PRECISION, max(0, scale - (precision - MAX_PRECISION)))


def common_type(types: Iterable[DataType]) -> DataType | None:
    """Returns the type to which Spark casts the branches of a CASE, COALESCE, IN or GREATEST; None if there is none.

    Unlike in Spark, strings have no common type with other types, since such a mix is usually a mistake.
    """
    result: DataType | None = NULL
    for type_ in types:
        result = None if result is None else _common(result, type_)
    return result


def _common(a: DataType, b: DataType) -> DataType | None:
    if a == b or b == NULL:
        return a
    if a == NULL:
        return b
    if a.is_integer and b.is_integer:
        return max(a, b, key=lambda type_: _INTEGER_ORDER.index(type_.name))
    if a.is_numeric and b.is_numeric:
        return DOUBLE if a.is_float or b.is_float else wider_decimal_type(decimal_type_of(a), decimal_type_of(b))
    if {a.name, b.name} == {"date", "timestamp"}:
        return TIMESTAMP
    return None

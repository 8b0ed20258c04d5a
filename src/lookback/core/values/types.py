"""The column types that rules can use, with Spark's names."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from lookback.core.errors import TypeNameError

_INTEGERS = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
_ALIASES = {
    "byte": "tinyint",
    "short": "smallint",
    "integer": "int",
    "long": "bigint",
    "real": "float",
    "bool": "boolean",
    "numeric": "decimal",
    "dec": "decimal",
}
_SIMPLE = {*_INTEGERS, "boolean", "float", "double", "string", "date", "timestamp"}
_DECIMAL = re.compile(r"decimal\s*\(\s*(\d{1,2})\s*(?:,\s*(\d{1,2})\s*)?\)", re.ASCII)
_ARRAY = re.compile(r"array\s*<(.*)>", re.ASCII)
_VAGUE = (
    "{!r} does not say how many digits there are, and how many of them after the point; write both, such as decimal(18,2) "
    "for money"
)
MAX_ARRAYS = 32


@dataclass(frozen=True)
class DataType:
    """A Spark SQL type with Spark's name (`bigint`, `decimal`, `array`, ...).

    Decimals have precision and scale (1 <= precision <= 38, 0 <= scale <= precision), arrays have an element. `null` is
    the type of a bare NULL, as in Spark.
    """

    name: str
    precision: int = 0
    scale: int = 0
    element: DataType | None = None

    def __str__(self) -> str:
        if self.name == "decimal":
            return f"decimal({self.precision},{self.scale})"
        if self.name == "array":
            return f"array<{self.element}>"
        return self.name

    @property
    def is_integer(self) -> bool:
        """True if the type is tinyint, smallint, int or bigint."""
        return self.name in _INTEGERS

    @property
    def is_decimal(self) -> bool:
        """True if the type is a decimal."""
        return self.name == "decimal"

    @property
    def is_float(self) -> bool:
        """True if the type is float or double."""
        return self.name in ("float", "double")

    @property
    def is_numeric(self) -> bool:
        """True if the type is a number of any kind."""
        return self.is_integer or self.is_decimal or self.is_float

    @property
    def bits(self) -> int:
        """Width of an integer type in bits."""
        return _INTEGERS[self.name]

    @property
    def storage(self) -> np.dtype:  # type: ignore[type-arg]
        """The numpy dtype of a column's values.

        Integers, dates (days) and timestamps (microseconds) are int64. A decimal is stored as its unscaled value: int64 up
        to precision 18, Python ints in an object array above. Strings (str) and arrays (list) are objects.
        """
        if self.name == "boolean":
            return np.dtype(bool)
        if self.is_float:
            return np.dtype(np.float32 if self.name == "float" else np.float64)
        if self.name in ("string", "array", "null") or (self.is_decimal and self.precision > 18):
            return np.dtype(object)
        return np.dtype(np.int64)


BOOLEAN = DataType("boolean")
TINYINT = DataType("tinyint")
INT = DataType("int")
BIGINT = DataType("bigint")
DOUBLE = DataType("double")
STRING = DataType("string")
DATE = DataType("date")
TIMESTAMP = DataType("timestamp")
NULL = DataType("null")


def decimal(precision: int, scale: int) -> DataType:
    """The type decimal(precision, scale)."""
    return DataType("decimal", precision, scale)


def array(element: DataType) -> DataType:
    """The type array<element>."""
    return DataType("array", element=element)


def parse_type(text: object, *, explicit: bool = False) -> DataType:
    """Reads a type from a text such as `bigint`, `decimal(18,2)` or `array<string>`. Raises TypeNameError.

    explicit: a decimal must have precision and scale; otherwise `decimal` is decimal(10,0), as in Spark, without digits
    after the point.
    """
    lowered = text.strip().lower() if isinstance(text, str) else ""
    arrays = 0
    while match := _ARRAY.fullmatch(lowered):
        lowered, arrays = match.group(1).strip(), arrays + 1
        if arrays > MAX_ARRAYS:
            raise TypeNameError(f"{text!r:.100} is an array within more than {MAX_ARRAYS} others; use fewer levels")
    type_ = _parse_plain(text, _ALIASES.get(lowered, lowered), explicit)
    for _ in range(arrays):
        type_ = array(type_)
    return type_


def _parse_plain(text: object, lowered: str, explicit: bool) -> DataType:
    if lowered in _SIMPLE:
        return DataType(lowered)
    if lowered == "decimal" and not explicit:
        return decimal(10, 0)
    if match := _DECIMAL.fullmatch(lowered):
        if match.group(2) is None and explicit:
            raise TypeNameError(_VAGUE.format(text))
        precision, scale = int(match.group(1)), int(match.group(2) or 0)
        if not (1 <= precision <= 38 and scale <= precision):
            raise TypeNameError(f"{text!r}: a decimal has a precision of 1 to 38 and a scale of 0 to its precision")
        return decimal(precision, scale)
    if lowered == "decimal":
        raise TypeNameError(_VAGUE.format(text))
    raise TypeNameError(
        f"{text!r:.100} is not a supported type; use one of {', '.join(sorted(_SIMPLE))}, decimal(p,s) or array<type>"
    )

"""Columns of values with masks for NULLs and errors; expressions and aggregates compute on them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lookback.core.values.times import DAY_US, EPOCH, FIRST_TIME_US, LAST_TIME_US
from lookback.core.values.types import DataType

Mask = npt.NDArray[np.bool_]
Values = npt.NDArray[Any]
EPOCH_DATE = dt.date(1970, 1, 1)
_EXACT, _EXACT_LIMIT = Context(prec=28), 10**18
_MICROSECOND = dt.timedelta(microseconds=1)


@dataclass(frozen=True)
class Column:
    """A column of one type.

    values: shape (rows,), dtype `type.storage`, or int64 for the wide decimals of a measure; a value under `null` or `error`
    has no meaning. null, error: boolean masks of the same shape, or None if no row is marked. `error` marks the rows for
    which Spark would raise an error in ANSI mode; no row is marked in both.
    """

    type: DataType
    values: Values
    null: Mask | None = None
    error: Mask | None = None

    def __len__(self) -> int:
        return len(self.values)

    def take(self, index: npt.NDArray[Any] | slice) -> Column:
        """Returns the rows at `index` (positions, a boolean mask or a slice), in that order."""
        return Column(
            self.type,
            self.values[index],
            None if self.null is None else self.null[index],
            None if self.error is None else self.error[index],
        )

    def with_nulls(self, null: Mask) -> Column:
        """Returns the same column with NULL also in these rows."""
        if not null.any():
            return self
        error = None if self.error is None else self.error & ~null
        return Column(self.type, self.values, null if self.null is None else self.null | null, error)

    def is_true(self) -> Mask:
        """Marks the rows where a boolean column is true: not false, not NULL, no error."""
        true: Mask = self.values.astype(bool, copy=True)
        if self.null is not None:
            true &= ~self.null
        if self.error is not None:
            true &= ~self.error
        return true

    def is_known(self) -> Mask:
        """Marks the rows with a value: no NULL and no error."""
        known = np.ones(len(self.values), dtype=bool)
        if self.null is not None:
            known &= ~self.null
        if self.error is not None:
            known &= ~self.error
        return known

    def item(self, row: int) -> Any:
        """Returns one value as int, float, bool, str, Decimal, date, aware datetime or list; None for NULL and errors."""
        if (self.null is not None and self.null[row]) or (self.error is not None and self.error[row]):
            return None
        return to_python(self.type, self.values[row])

    def to_stored_list(self, rows: npt.NDArray[Any] | slice = slice(None)) -> list[Any]:
        """Returns the stored values of these rows as Python's own types; None for NULL and errors."""
        values: list[Any] = self.values[rows].tolist()
        unknown = ~self.is_known()[rows] if self.null is not None or self.error is not None else None
        if unknown is None or not unknown.any():
            return values
        return [None if missing else value for value, missing in zip(values, unknown.tolist(), strict=True)]

    def to_list(self) -> list[Any]:
        """Returns all values as `item` returns them."""
        stored, type_ = self.to_stored_list(), self.type
        if type_.is_decimal:
            # The conversion of `to_decimal` in place: a batch may have millions of measures.
            exponent, scale = -type_.scale, _EXACT.scaleb

            def convert(value: Any) -> Any:
                return None if value is None else to_decimal(value, type_.scale)

            return [
                scale(value, exponent) if value is not None and -_EXACT_LIMIT < value < _EXACT_LIMIT else convert(value)
                for value in stored
            ]
        if type_.name not in ("timestamp", "date", "array"):
            return stored
        return [None if value is None else to_python(type_, value) for value in stored]


def make_objects(items: Iterable[Any]) -> Values:
    """Makes an array of Python objects, which may be sequences themselves."""
    listed = list(items)
    # If a list were assigned, numpy would read the length of each item.
    return np.fromiter(listed, dtype=object, count=len(listed))


def concat_columns(columns: Sequence[Column]) -> Column:
    """Joins columns of one type, at least one."""
    values = np.concatenate([column.values for column in columns])
    null, error = _concat_masks([c.null for c in columns], columns), _concat_masks([c.error for c in columns], columns)
    return Column(columns[0].type, values, null, error)


def _concat_masks(masks: Sequence[Mask | None], columns: Sequence[Column]) -> Mask | None:
    if all(mask is None for mask in masks):
        return None
    parts = [np.zeros(len(c), dtype=bool) if mask is None else mask for mask, c in zip(masks, columns, strict=True)]
    joined: Mask = np.concatenate(parts)
    return joined


def to_python(type_: DataType, value: Any) -> Any:
    """Converts a stored value (see DataType.storage) to the Python object that people expect."""
    if type_.name == "timestamp":
        return EPOCH + int(value) * _MICROSECOND
    if type_.name == "date":
        return EPOCH_DATE + dt.timedelta(days=int(value))
    if type_.is_decimal:
        return to_decimal(int(value), type_.scale)
    if type_.name == "array":
        element = type_.element
        assert element is not None
        return [None if v is None else to_python(element, v) for v in value]
    return value.item() if isinstance(value, np.generic) else value


# The first and the last value of the years 1 to 9999.
_CALENDAR = {"timestamp": (FIRST_TIME_US, LAST_TIME_US), "date": (FIRST_TIME_US // DAY_US, LAST_TIME_US // DAY_US)}


def find_beyond_calendar(column: Column) -> Mask | None:
    """Marks the times or dates outside the years 1 to 9999, and arrays with one; None if there are none."""
    type_ = column.type.element or column.type
    if type_.name not in _CALENDAR:
        return None
    first, last = _CALENDAR[type_.name]
    if column.type.element is None:
        beyond = (column.values < first) | (column.values > last)
    else:
        listed = (items if isinstance(items, list) else [] for items in column.values.tolist())
        found = (any(item is not None and not first <= item <= last for item in items) for items in listed)
        beyond = np.fromiter(found, dtype=bool, count=len(column))
    beyond = column.is_known() & beyond
    return beyond if beyond.any() else None


def is_nan(values: Any) -> Any:
    """Returns whether a value is NaN, or marks the NaNs of an array: NaN alone does not equal itself."""
    return values != values


def replace_nan(value: Any) -> Any:
    """Replaces NaN by a text that equals itself, so that NaN equals NaN as in Spark; returns other values unchanged."""
    return "NaN" if is_nan(value) else value


def to_decimal(value: int, scale: int) -> Decimal:
    """Returns value * 10^-scale exactly; Decimal's own arithmetic would round to 28 digits."""
    if -_EXACT_LIMIT < value < _EXACT_LIMIT:
        return _EXACT.scaleb(value, -scale)
    digits = tuple(int(digit) for digit in str(abs(value)))
    return Decimal((int(value < 0), digits, -scale))


def to_text(value: Any) -> str | None:
    """Writes a value as the exact text that the tables hold; None for None.

    Decimals are plain digits with their scale, booleans true or false, dates and times ISO 8601 (times in UTC with Z),
    floats Python's shortest exact text, arrays JSON-like brackets.
    """
    if value is None:
        return None
    if type(value) is int:
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, dt.datetime):
        return value.astimezone(dt.timezone.utc).replace(tzinfo=None).isoformat() + "Z"
    if isinstance(value, dt.date):
        return value.isoformat()
    if isinstance(value, list):
        return "[" + ", ".join(to_text(v) or "null" for v in value) + "]"
    return str(value)


def to_texts(values: Mapping[str, Any]) -> dict[str, str | None]:
    """Writes values by name as `to_text` does."""
    return {name: to_text(value) for name, value in values.items()}


def from_text(type_: DataType, text: str) -> Any:
    """Reads a text that `to_text` wrote as a Python value of `type_`, which must not be an array."""
    if type_.is_integer:
        return int(text)
    if type_.is_decimal:
        return Decimal(text)
    if type_.is_float:
        return float(text)
    if type_.name == "boolean":
        return text == "true"
    if type_.name == "timestamp":
        return dt.datetime.fromisoformat(text.removesuffix("Z")).replace(tzinfo=dt.timezone.utc)
    return dt.date.fromisoformat(text) if type_.name == "date" else text


def from_arrow(array: pa.Array[Any] | pa.ChunkedArray[Any], type_: DataType) -> Column:
    """Converts an Arrow array of type `arrow_type(type_)`, or of one that casts to it without loss, to a column.

    Raises pyarrow.ArrowInvalid if a value does not fit.
    """
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
        if isinstance(array, pa.ChunkedArray):  # pragma: no cover - depends on the Arrow version
            array = pa.concat_arrays(array.chunks)
    target = arrow_type(type_)
    if array.type != target:
        array = array.cast(target)
    null = np.asarray(array.is_null()) if array.null_count else None
    return Column(type_, _values_from_arrow(array, type_), null)


def _values_from_arrow(array: pa.Array[Any], type_: DataType) -> Values:
    storage = type_.storage
    if type_.name == "null":
        return np.full(len(array), None, dtype=object)
    if type_.is_decimal:
        return _unscaled_from_arrow(array, type_)
    if type_.name in ("string", "array"):
        if type_.name == "string":
            return np.asarray(array.to_numpy(zero_copy_only=False), dtype=object)
        if type_.element is not None and type_.element.name in _CALENDAR:
            # Read as numbers, since Arrow may hold times and dates outside the years 1 to 9999, and Python cannot.
            numbers = pa.list_(pa.int32() if type_.element.name == "date" else pa.int64())
            return make_objects(array.cast(numbers).to_pylist())
        return make_objects(None if v is None else _stored_list(v, type_.element) for v in array.to_pylist())
    if type_.name == "boolean":
        return np.asarray(array.fill_null(False).to_numpy(zero_copy_only=False), dtype=bool)
    if type_.name == "date":
        array = array.cast(pa.int32())
    elif type_.name == "timestamp":
        array = array.cast(pa.int64())
    if array.null_count:
        array = array.fill_null(0)
    return np.asarray(array.to_numpy(zero_copy_only=False)).astype(storage, copy=False)


def normalize_zeros(column: Column) -> Column:
    """Replaces -0.0 by 0.0, also inside arrays.

    The two are equal in SQL; if both occurred, a group or an extreme would show one or the other by the order of rows.
    """
    type_, values = column.type, column.values
    leaf = type_
    while leaf.element is not None:
        leaf = leaf.element
    if not leaf.is_float:
        return column
    if type_.is_float:
        return Column(type_, values + type_.storage.type(0), column.null, column.error)
    return Column(type_, make_objects(map(_normalize_items, values)), column.null, column.error)


def _normalize_items(value: Any) -> Any:
    if isinstance(value, list):
        return [_normalize_items(item) for item in value]
    return value + 0.0 if isinstance(value, float) else value


def _unscaled_from_arrow(array: pa.Array[Any], type_: DataType) -> Values:
    # Arrow stores a decimal128 as 16 little-endian bytes: two 64-bit limbs, the upper one signed.
    buffer = array.buffers()[1]
    count = len(array)
    if buffer is None or count == 0:
        return np.zeros(count, dtype=type_.storage)
    limbs = np.frombuffer(buffer, dtype=np.int64, count=2 * count, offset=16 * array.offset).reshape(count, 2)
    if type_.precision <= 18:
        low = limbs[:, 0].copy()
        if array.null_count:
            low[np.asarray(array.is_null())] = 0
        return low
    values = (limbs[:, 1].astype(object) << 64) + limbs[:, 0].astype(np.uint64).astype(object)
    if array.null_count:
        values[np.asarray(array.is_null())] = 0
    return np.asarray(values, dtype=object)


def _stored_list(items: list[Any], element: DataType | None) -> list[Any]:
    assert element is not None
    return [None if item is None else to_stored(element, item) for item in items]


def to_stored(type_: DataType, value: Any) -> Any:
    """Converts a Python value (as `to_python` returns it) to the form that columns store."""
    if type_.name == "timestamp":
        return (value - EPOCH) // _MICROSECOND
    if type_.name == "date":
        return (value - EPOCH_DATE).days
    if type_.is_decimal:
        sign, digits, exponent = value.as_tuple()
        unscaled = int("".join(map(str, digits)) or "0") * 10 ** (exponent + type_.scale)
        return -unscaled if sign else unscaled
    if type_.name == "array":
        return _stored_list(value, type_.element)
    return value


def from_values(type_: DataType, values: list[Any]) -> Column:
    """Makes a column of stored values (see DataType.storage); None is NULL."""
    null = np.fromiter((v is None for v in values), dtype=bool, count=len(values))
    storage = type_.storage
    if storage == np.dtype(object):
        stored = make_objects(values)
    else:
        stored = np.array([0 if v is None else v for v in values], dtype=storage)
    return Column(type_, stored, null if null.any() else None)


def to_arrow(column: Column) -> pa.Array[Any]:
    """Converts a column to an Arrow array of type `arrow_type(column.type)`; NULLs and errors become NULL."""
    type_, target = column.type, arrow_type(column.type)
    mask = None if column.null is None and column.error is None else ~column.is_known()
    values = column.values
    if type_.is_decimal and values.dtype == np.int64:
        # As in `_unscaled_from_arrow`; the upper limb repeats the sign.
        limbs = np.stack([values, values >> 63], axis=1)
        known = None if mask is None else pa.py_buffer(np.packbits(~mask, bitorder="little"))
        return pa.Array.from_buffers(target, len(values), [known, pa.py_buffer(limbs)])
    if type_.is_decimal or type_.name == "array":
        return pa.array(column.to_list(), target)
    if type_.name in ("string", "boolean") or type_.is_float:
        return pa.array(values, target, mask=mask, from_pandas=False)
    # Spark's Arrow types have the width of the stored values only for bigint and timestamp.
    narrow = values.astype(
        np.int32 if type_.name == "date" else target.to_pandas_dtype() if type_.is_integer else np.int64
    )
    return pa.array(narrow, mask=mask, from_pandas=False).cast(target)


def arrow_type(type_: DataType) -> pa.DataType:
    """Returns the Arrow type that holds `type_`; a timestamp is in microseconds, UTC."""
    if type_.is_decimal:
        return pa.decimal128(type_.precision, type_.scale)
    if type_.name == "array":
        assert type_.element is not None
        return pa.list_(arrow_type(type_.element))
    return _ARROW[type_.name]


_ARROW: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "null": pa.null(),
}

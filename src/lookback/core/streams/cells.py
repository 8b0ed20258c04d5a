"""Reads one value of a caller as a field's type, exactly.

A value that does not fit raises a ValueError with the reason and the remedy. Texts follow `values.notation`, as in
ingest.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import math
import re
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd

from lookback.core.values.columns import is_nan
from lookback.core.values.notation import (
    BLANKS,
    find_integer,
    is_day,
    is_not_finite,
    is_number,
    parse_boolean,
    parse_datetime,
)
from lookback.core.values.times import DAY_US, EPOCH, FIRST_TIME_US, LAST_TIME_US, parse_time
from lookback.core.values.types import DataType

# The smallest number that becomes infinite as a float.
_MIN_INFINITE_FLOAT = (2 - 2**-24) * 2.0**127
# A double holds every whole number up to this one.
_WHOLE_DOUBLES = 2**53
_MAX_DIGITS = 1_000
_BEYOND_YEARS = "beyond the years 1 to 9999; correct it"


def is_missing(value: Any, *, nan: bool = False) -> bool:
    """Returns whether a caller's value means NULL. nan: whether NaN does too, as in most columns of a pandas frame."""
    if value is None or value is pd.NaT or value is pd.NA:
        return True
    if isinstance(value, (np.datetime64, np.timedelta64)):
        return bool(np.isnat(value))
    return nan and isinstance(value, (float, np.floating)) and bool(is_nan(value))


def read_cell(type_: DataType, value: Any, *, nan_is_missing: bool = False) -> Any:
    """Converts a caller's value to the form that columns store; missing gives None. Raises ValueError with a remedy."""
    if is_missing(value, nan=nan_is_missing):
        return None
    value = _to_python(value)
    if type_.is_integer:
        return _read_integer(type_, value)
    if type_.is_decimal:
        return _read_unscaled(type_, value)
    if type_.is_float:
        return _read_float(type_, value)
    if type_.name == "boolean":
        return _read_boolean(value)
    if type_.name == "timestamp":
        return _read_time(value)
    if type_.name == "date":
        return _read_day(value)
    if type_.name == "array":
        return _read_items(type_, value, nan_is_missing)
    return _read_text(value)


def _to_python(value: Any) -> Any:
    """Converts values of numpy and pandas to Python's own types."""
    if isinstance(value, np.datetime64):
        value = pd.Timestamp(value)
    if isinstance(value, pd.Timestamp):
        try:
            return value.to_pydatetime(warn=False)
        except OverflowError:
            raise ValueError(f"it is {_BEYOND_YEARS}") from None
    if isinstance(value, np.float32):
        # The shortest text that reads as this number is what its author wrote.
        return float(str(value))
    if isinstance(value, np.ndarray):
        # `item` would unwrap an array of one element, and `tolist` would turn times in nanoseconds into numbers.
        return list(value) if value.ndim else value[()]
    return value.item() if isinstance(value, np.generic) else value


def _read_integer(type_: DataType, value: Any) -> int:
    if isinstance(value, bool):
        raise ValueError("it is true or false, not a number; give 1 or 0, or declare the field as boolean")
    if isinstance(value, str):
        digits = find_integer(value.strip(BLANKS))
        if digits is None:
            raise ValueError(_explain_not_whole(value))
        if len(digits) > _MAX_DIGITS:
            raise ValueError(_explain_integer_range(type_))
        value = int(digits)
    if isinstance(value, (int, float, Decimal)):
        if not _is_finite(value):
            raise ValueError("it is not a number; give None for a missing value")
        if isinstance(value, Decimal) and value and not -_MAX_DIGITS < value.adjusted() <= 40:
            raise ValueError(_explain_integer_range(type_) if value.adjusted() > 0 else _explain_not_whole(""))
        if value != int(value):
            raise ValueError(_explain_not_whole(""))
        if isinstance(value, float) and abs(value) > _WHOLE_DOUBLES:
            raise ValueError(
                "it is a float, which is exact only for whole numbers up to 2^53; give an integer or a text; in "
                "pandas, use a column of type Int64"
            )
        number = int(value)
    else:
        raise ValueError("it is not a whole number; write one, such as 12")
    if not -(2 ** (type_.bits - 1)) <= number < 2 ** (type_.bits - 1):
        raise ValueError(_explain_integer_range(type_))
    return number


def _explain_not_whole(text: str) -> str:
    if "," in text or "_" in text:
        return "it is not a whole number; write its digits without separators, such as 1000"
    return "it is not a whole number; write one, such as 12, or declare the field as decimal(18,2) or double"


def _explain_integer_range(type_: DataType) -> str:
    wider = "bigint" if type_.bits < 64 else "decimal(38,0) or string"
    return f"it is beyond the range of an integer of type {type_}; declare the field as {wider}"


def _read_unscaled(type_: DataType, value: Any) -> int:
    number = _read_exact(value)
    if not number.is_finite():
        raise ValueError("it is not a finite number; give None for a missing value, or declare the field as double")
    sign, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    wider = "declare the field with more digits, up to decimal(38,s)"
    if number and number.adjusted() > 40:
        raise ValueError(f"it is beyond the range of {type_}; {wider}")
    shift = exponent + type_.scale
    magnitude = int("".join(map(str, digits)))
    if magnitude and shift < 0 and (-shift > len(digits) or magnitude % 10**-shift):
        raise ValueError(
            f"it has more than {type_.scale} digits after the point; round it, or declare the field with more"
        )
    unscaled = 0 if not magnitude else int(magnitude * 10**shift) if shift >= 0 else magnitude // 10**-shift
    if unscaled >= 10**type_.precision:
        raise ValueError(f"it is beyond the range of {type_}; {wider}")
    return -unscaled if sign else unscaled


def _read_exact(value: Any) -> Decimal:
    """Converts a value to an exact number. A float is read from its shortest text, which is what its author wrote."""
    if isinstance(value, bool):
        raise ValueError("it is true or false, not a number; give 1 or 0, or declare the field as boolean")
    if isinstance(value, float):
        return Decimal(repr(value))
    if isinstance(value, int):
        if value.bit_length() > 200:
            raise ValueError("it is beyond the range of a decimal; declare the field as string")
        return Decimal(value)
    if isinstance(value, Decimal):
        if len(value.as_tuple().digits) > _MAX_DIGITS:
            raise ValueError("it has more digits than a decimal can have; round it, or declare the field as string")
        return value
    if not isinstance(value, str):
        raise ValueError("it is not a number; write one, such as 12.50")
    text = value.strip(BLANKS)
    if is_not_finite(text):
        return Decimal("NaN")
    _require_number(text)
    return Decimal(text)


def _require_number(text: str) -> None:
    if not is_number(text) or len(text) > _MAX_DIGITS:
        comma = re.fullmatch(r"[+-]?[0-9]+,[0-9]+", text)
        if comma and not re.fullmatch(r"[+-]?[1-9][0-9]{0,2},[0-9]{3}", text):
            raise ValueError(
                f"it is not a number; write a point where it has a decimal comma, {text.replace(',', '.')}"
            )
        if "," in text or "_" in text:
            raise ValueError(
                "it is not a number; write its digits without separators and a decimal point, such as 1000.50"
            )
        raise ValueError("it is not a number; write one, such as 12.50, or give None for a missing value")


def _read_float(type_: DataType, value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError("it is true or false, not a number; give 1 or 0, or declare the field as boolean")
    if isinstance(value, str):
        value = value.strip(BLANKS)
        if not is_not_finite(value):
            _require_number(value)
    elif not isinstance(value, (int, float, Decimal)):
        raise ValueError("it is not a number; write one, such as 12.5")
    finite = not is_not_finite(value) if isinstance(value, str) else _is_finite(value)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except ValueError:  # a signalling NaN
        number = math.nan
    if finite and (math.isinf(number) or (type_.name == "float" and abs(number) >= _MIN_INFINITE_FLOAT)):
        wider = "double" if type_.name == "float" and math.isfinite(number) else "decimal(38,s) or string"
        raise ValueError(f"it is beyond the range of {type_}; declare the field as {wider}")
    return number + 0.0  # normalizes -0.0, which equals 0.0 in SQL


def _is_finite(value: int | float | Decimal) -> bool:
    if isinstance(value, Decimal):
        return value.is_finite()
    return isinstance(value, int) or math.isfinite(value)


def _read_boolean(value: Any) -> bool:
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return parse_boolean(value)
    if isinstance(value, (int, float, Decimal)) and _is_finite(value) and value in (0, 1):
        return bool(value)
    raise ValueError("it is neither true nor false; write true or false")


def _read_time(value: Any) -> int:
    if isinstance(value, float) and value.is_integer() and abs(value) <= _WHOLE_DOUBLES:
        value = int(value)
    try:
        microseconds = parse_time(value)
    except (ValueError, TypeError, OverflowError):
        raise ValueError(
            "it is not a valid time; write it as 2026-01-31T12:00:00Z, or give microseconds since 1970"
        ) from None
    if not FIRST_TIME_US <= microseconds <= LAST_TIME_US:
        raise ValueError(f"it is {_BEYOND_YEARS}")
    if not FIRST_TIME_US + DAY_US <= microseconds <= LAST_TIME_US - DAY_US:
        raise ValueError(
            "it is on 0001-01-01 or 9999-12-31, which some time zones cannot show; give None for an unknown time"
        )
    return microseconds


def _read_day(value: Any) -> int:
    if isinstance(value, str):
        try:
            value = parse_datetime(value)
        except ValueError:
            if is_day(value):
                raise ValueError("this day does not exist; correct it, or give None for an unknown date") from None
    if isinstance(value, dt.datetime):
        days, rest = divmod(parse_time(value), DAY_US)
        if rest:
            raise ValueError(
                "it has a time of day, which a date cannot hold; give only the day, or declare the field as timestamp"
            )
        return days
    if not isinstance(value, dt.date):
        raise ValueError("it is not a date; write it as 2026-01-31")
    return (value - EPOCH.date()).days


def _read_items(type_: DataType, value: Any, nan_is_missing: bool) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"it is not a list; write one, such as {_EXAMPLES.get(str(type_.element), '[...]')}")
    assert type_.element is not None
    return [_read_item(type_.element, at, item, nan_is_missing) for at, item in enumerate(value)]


def _read_item(type_: DataType, at: int, value: Any, nan_is_missing: bool) -> Any:
    try:
        return read_cell(type_, value, nan_is_missing=nan_is_missing)
    except ValueError as error:
        raise ValueError(f"element {at}: {error}") from None


_EXAMPLES = {"string": "['a', 'b']", "int": "[1, 2]", "bigint": "[1, 2]", "double": "[1.5, 2.0]"}


def _read_text(value: Any) -> str:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(
                "it contains half a character (surrogates not allowed), which tables cannot store; correct it"
            ) from None
        return value
    if isinstance(value, float) and is_nan(value):
        raise ValueError("it is NaN; give None for a missing value")
    raise ValueError("it is not a text; put it in quotes, or convert it, such as str(12)")

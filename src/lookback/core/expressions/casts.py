"""Implements casts with Spark's results in ANSI mode, in one table of (from, to) -> kernel."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lookback.core.expressions.kernels import LONG_MAX, KernelResult, as_mask, is_out_of_range, mask_or_none, rescale
from lookback.core.values.columns import Mask, Values, make_objects, to_decimal
from lookback.core.values.times import DAY_US
from lookback.core.values.types import DataType

SECOND_US = 1_000_000
Cast = Callable[[Values, DataType, DataType], KernelResult]


def find_cast(source: DataType, target: DataType) -> Callable[[Values], KernelResult] | None:
    """Returns the kernel that casts stored values of one type to another; None if the cast is not supported."""
    if source == target:
        return KernelResult
    cast = _CASTS.get((_kind(source), _kind(target)))
    if cast is None or _is_inexact(source, target):
        return None
    return lambda values: cast(values, source, target)


def explain_refusal(source: DataType, target: DataType) -> str:
    """Explains why a cast is not supported, and what to write instead."""
    kinds = (_kind(source), _kind(target))
    if kinds in _REMEDIES:
        return f"cast from {source} to {target} is not supported; {_REMEDIES[kinds]}"
    if _is_inexact(source, target):
        return f"cast from {source} to {target} is not supported; cast to bigint"
    return f"cast from {source} to {target} is not supported"


def _kind(type_: DataType) -> str:
    return "integer" if type_.is_integer else type_.name


def _is_inexact(source: DataType, target: DataType) -> bool:
    # Spark truncates long fractions through a double here, which can give the next integer.
    return source.is_decimal and source.scale > 0 and source.precision > 15 and target.is_integer and target.bits < 64


def _map_texts(function: Callable[[int], str], values: Values) -> KernelResult:
    return KernelResult(make_objects(map(function, values.tolist())))


# Numbers -------------------------------------------------------------------------------------------------------------


def _integer_to_integer(values: Values, source: DataType, target: DataType) -> KernelResult:
    return KernelResult(
        values, mask_or_none(is_out_of_range(values, target.bits)) if target.bits < source.bits else None
    )


def _to_boolean(values: Values, source: DataType, target: DataType) -> KernelResult:
    return KernelResult(as_mask(values != 0))


def _convert(values: Values, source: DataType, target: DataType) -> KernelResult:
    return KernelResult(values.astype(target.storage))


def _to_decimal(values: Values, source: DataType, target: DataType) -> KernelResult:
    return rescale(values.astype(np.int64) if source.name == "boolean" else values, source.scale, target)


def _float_to_integer(values: Values, source: DataType, target: DataType) -> KernelResult:
    wide = values.astype(np.float64)
    top = 2.0 ** (target.bits - 1)
    # Spark accepts 2^63 itself and converts it to the greatest bigint.
    high = top if target.bits == 64 else top - 1
    if target.bits < 32:
        wide = np.trunc(wide)
    error = ~((np.floor(wide) <= high) & (np.ceil(wide) >= -top))
    cut = np.trunc(np.where(error, 0.0, wide))
    full = cut >= 2.0**63
    integers = np.where(full, 0.0, cut).astype(np.int64)
    return KernelResult(np.where(full, LONG_MAX, integers) if full.any() else integers, mask_or_none(error))


def _decimal_to_integer(values: Values, source: DataType, target: DataType) -> KernelResult:
    factor = 10**source.scale
    if values.dtype == object or factor > LONG_MAX:
        exact = values.astype(object)
        whole = np.where(as_mask(exact < 0), -(np.abs(exact) // factor), np.abs(exact) // factor)
        error = is_out_of_range(whole, target.bits)
        return KernelResult(np.where(error, 0, whole).astype(np.int64), mask_or_none(error))
    whole = np.sign(values) * (np.abs(values) // factor)
    return KernelResult(whole, mask_or_none(is_out_of_range(whole, target.bits)))


def decimals_to_floats(values: Values, scale: int) -> Values:
    """Converts unscaled decimals to the nearest doubles."""
    if values.dtype != object and scale <= 22 and (not len(values) or int(np.abs(values).max()) < 2**53):
        return np.asarray(values / np.float64(10.0**scale))
    factor = 10**scale
    return np.array([value / factor for value in values.tolist()], dtype=np.float64)


def _float_to_decimal(values: Values, source: DataType, target: DataType) -> KernelResult:
    doubles = values.astype(np.float64)
    # Even in ANSI mode Spark turns NaN and the infinities into NULL, not into errors.
    null = ~np.isfinite(doubles)
    numbers = [_unscale(Decimal(repr(value)), target) for value in np.where(null, 0.0, doubles).tolist()]
    unscaled = make_objects(0 if value is None else value for value in numbers)
    error: Mask = np.fromiter((value is None for value in numbers), dtype=bool, count=len(numbers))
    return KernelResult(unscaled.astype(target.storage), mask_or_none(error), mask_or_none(null))


def _unscale(value: Decimal, target: DataType) -> int | None:
    """Returns the unscaled value, rounded half up to the type's scale; None if it has too many digits."""
    sign, digits, exponent = value.as_tuple()
    if not any(digits):
        return 0
    if not isinstance(exponent, int) or value.adjusted() >= target.precision - target.scale + 1:
        return None
    shift = exponent + target.scale
    if value.adjusted() < -target.scale - 1:
        return 0
    number = int("".join(map(str, digits)))
    number = number * _power(shift) if shift >= 0 else (number + _power(-shift) // 2) // _power(-shift)
    if number >= 10**target.precision:
        return None
    return -number if sign else number


def _power(exponent: int) -> int:
    return int(10**exponent)


# Strings -------------------------------------------------------------------------------------------------------------

# Spark ignores ASCII white space and control characters around a number or a boolean.
_BLANKS = "".join(map(chr, range(0x21))) + "\x7f"
_JAVA_BLANKS = "".join(map(chr, range(0x21)))
_INTEGER = re.compile(r"[+-]?[0-9]+", re.ASCII)
# As in Java, a decimal may use the digits of any script in the first Unicode plane.
_NUMBER = re.compile(r"([+-]?)(\d*)(?:\.(\d*))?(?:[eE]([+-]?\d{1,10}))?")
_BOOLEANS = {
    "t": True,
    "true": True,
    "y": True,
    "yes": True,
    "1": True,
    "f": False,
    "false": False,
    "n": False,
    "no": False,
    "0": False,
}


def _string_to_integer(values: Values, source: DataType, target: DataType) -> KernelResult:
    limit = 2 ** (target.bits - 1)

    def parse(text: str) -> int | None:
        stripped = text.strip(_BLANKS)
        if not _INTEGER.fullmatch(stripped) or len(stripped) > 4000:
            return None
        number = int(stripped)
        return number if -limit <= number < limit else None

    return _parse_texts(values, parse, np.int64)


def parse_decimal(text: str, target: DataType) -> int | None:
    """Parses a decimal and returns its unscaled value; None if Spark would not accept the text."""
    match = _NUMBER.fullmatch(text.strip(_JAVA_BLANKS))
    if match is None or not (match.group(2) or match.group(3)) or any(c > "\uffff" for c in text):
        return None
    sign, whole, fraction, exponent = match.groups()
    digits = str(int(whole + (fraction or "")) if len(text) <= 4000 else 10**4001)
    power = int(exponent or 0) - len(fraction or "")
    if abs(power) > 2**31 - 1 or len(digits) > 4000:
        return None
    if digits == "0":
        # Java counts a zero's digits by its exponent: 0e39 has forty.
        return None if 1 + power > 38 else 0
    if len(digits) + power > 38:
        return None
    return _unscale(Decimal((int(sign == "-"), tuple(map(int, digits)), power)), target)


def _parse_texts(values: Values, parse: Callable[[str], int | None], storage: npt.DTypeLike) -> KernelResult:
    parsed = [parse(value) for value in values.tolist()]
    error: Mask = np.fromiter((value is None for value in parsed), dtype=bool, count=len(parsed))
    column = make_objects(0 if value is None else value for value in parsed)
    return KernelResult(column.astype(storage), mask_or_none(error))


def _boolean_to_string(values: Values, source: DataType, target: DataType) -> KernelResult:
    return KernelResult(np.where(values, np.array("true", dtype=object), np.array("false", dtype=object)))


def _integer_to_string(values: Values, source: DataType, target: DataType) -> KernelResult:
    # Arrow writes numbers as `str` does, in half the time.
    return KernelResult(pa.array(values).cast(pa.large_string()).to_numpy(zero_copy_only=False))


# Times ---------------------------------------------------------------------------------------------------------------


def timestamps_to_dates(values: Values) -> Values:
    """Converts timestamps in microseconds to days since 1970."""
    return values // DAY_US


def _date_to_timestamp(values: Values, source: DataType, target: DataType) -> KernelResult:
    error = (values > LONG_MAX // DAY_US) | (values < -(LONG_MAX // DAY_US))
    return KernelResult(values * DAY_US, mask_or_none(error))


def _timestamp_to_integer(values: Values, source: DataType, target: DataType) -> KernelResult:
    seconds = values // SECOND_US
    return KernelResult(seconds, mask_or_none(is_out_of_range(seconds, target.bits)) if target.bits < 64 else None)


def _format_date(days: int) -> str:
    year, month, day = split_date(days)
    shown = f"{year:04d}" if 0 <= year <= 9999 else f"{year:+05d}"
    return f"{shown}-{month:02d}-{day:02d}"


def split_date(days: int) -> tuple[int, int, int]:
    """Returns the year, month and day of a day since 1970, in the proleptic Gregorian calendar."""
    shifted = days + 719_468
    era, of_era = divmod(shifted, 146_097)
    year = (of_era - of_era // 1_460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * year + year // 4 - year // 100)
    month = (5 * of_year + 2) // 153
    day = of_year - (153 * month + 2) // 5 + 1
    month = month + 3 if month < 10 else month - 9
    return year + era * 400 + (month <= 2), month, day


def _format_timestamp(microseconds: int) -> str:
    days, rest = divmod(microseconds, DAY_US)
    seconds, fraction = divmod(rest, SECOND_US)
    text = f"{_format_date(days)} {seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return f"{text}.{fraction:06d}".rstrip("0") if fraction else text


_CASTS: dict[tuple[str, str], Cast] = {
    ("integer", "integer"): _integer_to_integer,
    ("integer", "boolean"): _to_boolean,
    ("integer", "float"): _convert,
    ("integer", "double"): _convert,
    ("integer", "decimal"): _to_decimal,
    ("integer", "string"): _integer_to_string,
    ("boolean", "integer"): _convert,
    ("boolean", "float"): _convert,
    ("boolean", "double"): _convert,
    ("boolean", "decimal"): _to_decimal,
    ("boolean", "string"): _boolean_to_string,
    ("decimal", "integer"): _decimal_to_integer,
    ("decimal", "boolean"): _to_boolean,
    ("decimal", "double"): lambda values, source, _: KernelResult(decimals_to_floats(values, source.scale)),
    ("decimal", "decimal"): _to_decimal,
    ("decimal", "string"): lambda values, source, _: _map_texts(
        lambda value: format(to_decimal(value, source.scale), "f"), values
    ),
    ("float", "integer"): _float_to_integer,
    ("float", "boolean"): _to_boolean,
    ("float", "double"): _convert,
    ("float", "decimal"): _float_to_decimal,
    ("double", "integer"): _float_to_integer,
    ("double", "boolean"): _to_boolean,
    ("double", "float"): _convert,
    ("double", "decimal"): _float_to_decimal,
    ("string", "integer"): _string_to_integer,
    ("string", "boolean"): lambda values, *_: _parse_texts(
        values, lambda text: _BOOLEANS.get(text.strip(_BLANKS).lower()), bool
    ),
    ("string", "decimal"): lambda values, _, target: _parse_texts(
        values, lambda text: parse_decimal(text, target), target.storage
    ),
    ("date", "timestamp"): _date_to_timestamp,
    ("date", "string"): lambda values, *_: _map_texts(_format_date, values),
    ("timestamp", "date"): lambda values, *_: KernelResult(timestamps_to_dates(values)),
    ("timestamp", "integer"): _timestamp_to_integer,
    ("timestamp", "string"): lambda values, *_: _map_texts(_format_timestamp, values),
}

_REMEDIES = {
    ("string", "double"): "cast to a decimal",
    ("string", "float"): "cast to a decimal",
    ("decimal", "float"): "cast to double",
    ("double", "string"): "cast it to a decimal first",
    ("float", "string"): "cast it to a decimal first",
    (
        "string",
        "timestamp",
    ): "write a literal such as timestamp '2026-01-31 12:00:00', or declare the field as timestamp",
    ("string", "date"): "write a literal such as date '2026-01-31', or declare the field as date",
    ("integer", "timestamp"): "declare the field as timestamp",
    ("timestamp", "decimal"): "use unix_micros()",
    ("timestamp", "double"): "use unix_micros()",
}

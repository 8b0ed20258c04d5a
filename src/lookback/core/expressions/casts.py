"""Casts that give what Spark gives in ANSI mode: one visible table of (from, to) -> kernel."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal

import numpy as np
import numpy.typing as npt

from lookback.core.expressions.kernels import LONG_MAX, KernelResult, as_mask, in_range, mask_or_none, rescaled
from lookback.core.values.columns import Mask, Values, to_decimal
from lookback.core.values.types import DataType

DAY_US = 86_400_000_000
SECOND_US = 1_000_000
Cast = Callable[[Values, DataType, DataType], KernelResult]


def cast_kernel(source: DataType, target: DataType) -> Callable[[Values], KernelResult] | None:
    """The kernel that casts stored values of one type to another, None where the cast is not supported."""
    if source == target:
        return KernelResult
    cast = _CASTS.get((_kind(source), _kind(target)))
    if cast is None or _unsure(source, target):
        return None
    return lambda values: cast(values, source, target)


def refusal(source: DataType, target: DataType) -> str:
    """Why a cast is not supported, and what to write instead."""
    kinds = (_kind(source), _kind(target))
    if kinds in _REMEDIES:
        return f"cast from {source} to {target} is not supported; {_REMEDIES[kinds]}"
    if _unsure(source, target):
        return f"cast from {source} to {target} is not supported; cast to bigint"
    return f"cast from {source} to {target} is not supported"


def _kind(type_: DataType) -> str:
    return "integer" if type_.is_integer else type_.name


def _unsure(source: DataType, target: DataType) -> bool:
    # Spark cuts long fractions through a double here, which can give the next integer.
    return source.is_decimal and source.scale > 0 and source.precision > 15 and target.is_integer and target.bits < 64


def _each(function: Callable[..., str], values: Values) -> Values:
    made = np.empty(len(values), dtype=object)
    made[:] = [function(value) for value in values.tolist()]
    return made


# Numbers -------------------------------------------------------------------------------------------------------------


def _integer_to_integer(values: Values, source: DataType, target: DataType) -> KernelResult:
    return KernelResult(values, mask_or_none(in_range(values, target.bits)) if target.bits < source.bits else None)


def _boolean_to_integer(values: Values, source: DataType, target: DataType) -> KernelResult:
    return KernelResult(values.astype(np.int64))


def _integer_to_boolean(values: Values, source: DataType, target: DataType) -> KernelResult:
    return KernelResult(as_mask(values != 0))


def _to_float(values: Values, source: DataType, target: DataType) -> KernelResult:
    return KernelResult(values.astype(target.storage))


def _float_to_integer(values: Values, source: DataType, target: DataType) -> KernelResult:
    wide = values.astype(np.float64)
    top = 2.0 ** (target.bits - 1)
    # Spark admits 2^63 itself, which then becomes the greatest bigint.
    high = top if target.bits == 64 else top - 1
    if target.bits < 32:
        wide = np.trunc(wide)
    bad = ~((np.floor(wide) <= high) & (np.ceil(wide) >= -top))
    cut = np.trunc(np.where(bad, 0.0, wide))
    full = cut >= 2.0**63
    integers = np.where(full, 0.0, cut).astype(np.int64)
    return KernelResult(np.where(full, LONG_MAX, integers) if full.any() else integers, mask_or_none(bad))


def _float_to_boolean(values: Values, source: DataType, target: DataType) -> KernelResult:
    return KernelResult(as_mask(values != 0))


def _integer_to_decimal(values: Values, source: DataType, target: DataType) -> KernelResult:
    return rescaled(values, 0, target)


def _boolean_to_decimal(values: Values, source: DataType, target: DataType) -> KernelResult:
    return rescaled(values.astype(np.int64), 0, target)


def _decimal_to_decimal(values: Values, source: DataType, target: DataType) -> KernelResult:
    return rescaled(values, source.scale, target)


def _decimal_to_boolean(values: Values, source: DataType, target: DataType) -> KernelResult:
    return KernelResult(as_mask(values != 0))


def _decimal_to_integer(values: Values, source: DataType, target: DataType) -> KernelResult:
    factor = 10**source.scale
    if values.dtype == object or factor > LONG_MAX:
        exact = values.astype(object)
        whole = np.where(as_mask(exact < 0), -(np.abs(exact) // factor), np.abs(exact) // factor)
        bad = in_range(whole, target.bits)
        return KernelResult(np.where(bad, 0, whole).astype(np.int64), mask_or_none(bad))
    whole = np.sign(values) * (np.abs(values) // factor)
    return KernelResult(whole, mask_or_none(in_range(whole, target.bits)))


def decimals_to_floats(values: Values, scale: int) -> Values:
    """Unscaled decimals as doubles, each the nearest one."""
    if values.dtype != object and scale <= 22 and (not len(values) or int(np.abs(values).max()) < 2**53):
        return np.asarray(values / np.float64(10.0**scale))
    factor = 10**scale
    return np.array([value / factor for value in values.tolist()], dtype=np.float64)


def _decimal_to_double(values: Values, source: DataType, target: DataType) -> KernelResult:
    return KernelResult(decimals_to_floats(values, source.scale))


def _float_to_decimal(values: Values, source: DataType, target: DataType) -> KernelResult:
    doubles = values.astype(np.float64)
    # Not an error to Spark, even in ANSI mode: NaN and the infinities become NULL.
    null = ~np.isfinite(doubles)
    made = [_decimal_unscaled(Decimal(repr(value)), target) for value in np.where(null, 0.0, doubles).tolist()]
    unscaled = np.empty(len(made), dtype=object)
    unscaled[:] = [0 if value is None else value for value in made]
    bad: Mask = np.fromiter((value is None for value in made), dtype=bool, count=len(made))
    return KernelResult(unscaled.astype(target.storage), mask_or_none(bad), mask_or_none(null))


def _decimal_unscaled(value: Decimal, target: DataType) -> int | None:
    """The unscaled value rounded half up to the type, None if it has too many digits."""
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

# Spark ignores these around a number or a boolean: ASCII white space and control characters.
_BLANKS = "".join(map(chr, range(0x21))) + "\x7f"
_JAVA_BLANKS = "".join(map(chr, range(0x21)))
_INTEGER = re.compile(r"[+-]?[0-9]+", re.ASCII)
# A decimal may be written in the digits of any script, as in Java (where those beyond the first plane are none).
_NUMBER = re.compile(r"([+-]?)(\d*)(?:\.(\d*))?(?:[eE]([+-]?\d{1,10}))?")
_BOOLEANS = {
    "t": True, "true": True, "y": True, "yes": True, "1": True,
    "f": False, "false": False, "n": False, "no": False, "0": False,
}  # fmt: skip


def _string_to_integer(values: Values, source: DataType, target: DataType) -> KernelResult:
    limit = 2 ** (target.bits - 1)

    def parsed(text: str) -> int | None:
        stripped = text.strip(_BLANKS)
        if not _INTEGER.fullmatch(stripped) or len(stripped) > 4000:
            return None
        number = int(stripped)
        return number if -limit <= number < limit else None

    return _parsed(values, parsed, np.int64)


def _string_to_boolean(values: Values, source: DataType, target: DataType) -> KernelResult:
    return _parsed(values, lambda text: _BOOLEANS.get(text.strip(_BLANKS).lower()), bool)


def _string_to_decimal(values: Values, source: DataType, target: DataType) -> KernelResult:
    return _parsed(values, lambda text: decimal_from_text(text, target), target.storage)


def decimal_from_text(text: str, target: DataType) -> int | None:
    """The unscaled value of a number in a text, None where Spark would not take it."""
    match = _NUMBER.fullmatch(text.strip(_JAVA_BLANKS))
    if match is None or not (match.group(2) or match.group(3)) or any(c > "\uffff" for c in text):
        return None
    sign, whole, fraction, exponent = match.groups()
    digits = str(int(whole + (fraction or "")) if len(text) <= 4000 else 10**4001)
    power = int(exponent or 0) - len(fraction or "")
    if abs(power) > 2**31 - 1 or len(digits) > 4000:
        return None
    if digits == "0":
        # Java counts a zero's digits from its exponent: 0e39 has forty of them.
        return None if 1 + power > 38 else 0
    if len(digits) + power > 38:
        return None
    return _decimal_unscaled(Decimal((int(sign == "-"), tuple(map(int, digits)), power)), target)


def _parsed(values: Values, parse: Callable[[str], int | None], storage: npt.DTypeLike) -> KernelResult:
    made = [parse(value) for value in values.tolist()]
    bad: Mask = np.fromiter((value is None for value in made), dtype=bool, count=len(made))
    column = np.empty(len(made), dtype=object)
    column[:] = [0 if value is None else value for value in made]
    return KernelResult(column.astype(storage), mask_or_none(bad))


def _boolean_to_string(values: Values, source: DataType, target: DataType) -> KernelResult:
    return KernelResult(np.where(values, np.array("true", dtype=object), np.array("false", dtype=object)))


def _integer_to_string(values: Values, source: DataType, target: DataType) -> KernelResult:
    return KernelResult(_each(str, values))


def _decimal_to_string(values: Values, source: DataType, target: DataType) -> KernelResult:
    return KernelResult(_each(lambda value: format(to_decimal(value, source.scale), "f"), values))


# Times ---------------------------------------------------------------------------------------------------------------


def timestamps_to_dates(values: Values) -> Values:
    """Days since the epoch of timestamps in microseconds."""
    return values // DAY_US


def _timestamp_to_date(values: Values, source: DataType, target: DataType) -> KernelResult:
    return KernelResult(timestamps_to_dates(values))


def _date_to_timestamp(values: Values, source: DataType, target: DataType) -> KernelResult:
    bad = (values > LONG_MAX // DAY_US) | (values < -(LONG_MAX // DAY_US))
    return KernelResult(values * DAY_US, mask_or_none(bad))


def _timestamp_to_integer(values: Values, source: DataType, target: DataType) -> KernelResult:
    seconds = values // SECOND_US
    return KernelResult(seconds, mask_or_none(in_range(seconds, target.bits)) if target.bits < 64 else None)


def _date_text(days: int) -> str:
    year, month, day = civil(days)
    shown = f"{year:04d}" if 0 <= year <= 9999 else f"{year:+05d}"
    return f"{shown}-{month:02d}-{day:02d}"


def civil(days: int) -> tuple[int, int, int]:
    """Year, month and day of a day since the epoch, in the proleptic Gregorian calendar."""
    shifted = days + 719_468
    era, of_era = divmod(shifted, 146_097)
    year = (of_era - of_era // 1_460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * year + year // 4 - year // 100)
    month = (5 * of_year + 2) // 153
    day = of_year - (153 * month + 2) // 5 + 1
    month = month + 3 if month < 10 else month - 9
    return year + era * 400 + (month <= 2), month, day


def _timestamp_text(microseconds: int) -> str:
    days, rest = divmod(microseconds, DAY_US)
    seconds, fraction = divmod(rest, SECOND_US)
    text = f"{_date_text(days)} {seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return f"{text}.{fraction:06d}".rstrip("0") if fraction else text


def _date_to_string(values: Values, source: DataType, target: DataType) -> KernelResult:
    return KernelResult(_each(_date_text, values))


def _timestamp_to_string(values: Values, source: DataType, target: DataType) -> KernelResult:
    return KernelResult(_each(_timestamp_text, values))


_CASTS: dict[tuple[str, str], Cast] = {
    ("integer", "integer"): _integer_to_integer,
    ("integer", "boolean"): _integer_to_boolean,
    ("integer", "float"): _to_float,
    ("integer", "double"): _to_float,
    ("integer", "decimal"): _integer_to_decimal,
    ("integer", "string"): _integer_to_string,
    ("boolean", "integer"): _boolean_to_integer,
    ("boolean", "float"): _to_float,
    ("boolean", "double"): _to_float,
    ("boolean", "decimal"): _boolean_to_decimal,
    ("boolean", "string"): _boolean_to_string,
    ("decimal", "integer"): _decimal_to_integer,
    ("decimal", "boolean"): _decimal_to_boolean,
    ("decimal", "double"): _decimal_to_double,
    ("decimal", "decimal"): _decimal_to_decimal,
    ("decimal", "string"): _decimal_to_string,
    ("float", "integer"): _float_to_integer,
    ("float", "boolean"): _float_to_boolean,
    ("float", "double"): _to_float,
    ("float", "decimal"): _float_to_decimal,
    ("double", "integer"): _float_to_integer,
    ("double", "boolean"): _float_to_boolean,
    ("double", "float"): _to_float,
    ("double", "decimal"): _float_to_decimal,
    ("string", "integer"): _string_to_integer,
    ("string", "boolean"): _string_to_boolean,
    ("string", "decimal"): _string_to_decimal,
    ("date", "timestamp"): _date_to_timestamp,
    ("date", "string"): _date_to_string,
    ("timestamp", "date"): _timestamp_to_date,
    ("timestamp", "integer"): _timestamp_to_integer,
    ("timestamp", "string"): _timestamp_to_string,
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

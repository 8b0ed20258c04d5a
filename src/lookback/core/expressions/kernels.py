"""Vectorised arithmetic and comparison on stored values. Overflow is detected, not wrapped.

A kernel takes values (numpy arrays of equal length) and returns a KernelResult. It never raises an error for a row, but
marks the row. A value under NULL or error may be any number of the right type, and the result there has no meaning.

Between kernels, wide decimals may be held as int64 (except LONG_MIN, which cannot be negated), since Python's integers
are ten times slower. Only the column that leaves an expression must have the storage of its type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lookback.core.values.columns import Mask, Values, is_nan, make_objects
from lookback.core.values.types import DataType

LONG_MIN, LONG_MAX = -(2**63), 2**63 - 1
_COMPACT_DIGITS = 18
# The most digits of the whole quotient in Spark's decimal remainder.
_QUOTIENT_DIGITS = 39
# So many texts tell whether texts repeat. In logs of processes most do: the same programs start again and again.
_SAMPLE = 256


class KernelResult(NamedTuple):
    """The values that a kernel computes, and masks of the rows that are errors or NULL; None marks no row."""

    values: Values
    error: Mask | None = None
    null: Mask | None = None


def mask_or_none(mask: Mask | None) -> Mask | None:
    """Returns the mask, or None if it marks nothing."""
    return mask if mask is not None and mask.any() else None


def either_mask(a: Mask | None, b: Mask | None) -> Mask | None:
    """Marks the rows that a or b marks; None marks nothing."""
    if a is None or b is None:
        return b if a is None else a
    return a | b


def as_mask(values: Any) -> Mask:
    """Converts the comparison of object arrays to a boolean array."""
    return np.asarray(values, dtype=bool)


def find_max_magnitude(values: Values) -> int:
    """Returns the largest absolute value of an integer array, 0 if it is empty."""
    if not len(values):
        return 0
    return max(abs(int(values.max())), abs(int(values.min())))


def narrow_decimals(values: Values) -> Values:
    """Converts wide decimals to int64 if all of them fit."""
    try:
        narrow = values.astype(np.int64)
    except (OverflowError, TypeError):
        return values
    return values if len(narrow) and narrow.min() == LONG_MIN else narrow


# Integers ------------------------------------------------------------------------------------------------------------


def is_out_of_range(values: Values, bits: int) -> Mask:
    """Marks the integers outside a signed type of `bits` bits."""
    return as_mask((values < -(2 ** (bits - 1))) | (values > 2 ** (bits - 1) - 1))


def add_integers(a: Values, b: Values, bits: int) -> KernelResult:
    """Computes a + b."""
    total = a + b
    if bits < 64:
        return KernelResult(total, mask_or_none(is_out_of_range(total, bits)))
    return KernelResult(total, mask_or_none(((a ^ total) & (b ^ total)) < 0))


def subtract_integers(a: Values, b: Values, bits: int) -> KernelResult:
    """Computes a - b."""
    difference = a - b
    if bits < 64:
        return KernelResult(difference, mask_or_none(is_out_of_range(difference, bits)))
    return KernelResult(difference, mask_or_none(((a ^ b) & (a ^ difference)) < 0))


def multiply_integers(a: Values, b: Values, bits: int) -> KernelResult:
    """Computes a * b."""
    if bits <= 32 or find_max_magnitude(a) * find_max_magnitude(b) <= LONG_MAX:
        product = a * b
        return KernelResult(product, mask_or_none(is_out_of_range(product, bits)) if bits < 64 else None)
    exact = a.astype(object) * b.astype(object)
    error = is_out_of_range(exact, 64)
    return KernelResult(np.where(error, 0, exact).astype(np.int64), mask_or_none(error))


def _replace_zeros(b: Values) -> tuple[Values, Mask | None]:
    """Replaces divisors that are 0 by 1, and marks them."""
    zero = b == 0
    if not zero.any():
        return b, None
    return np.where(zero, np.ones(1, dtype=b.dtype), b), as_mask(zero)


def divide_integers(a: Values, b: Values) -> KernelResult:
    """Computes a div b, truncated towards zero."""
    divisor, error = _replace_zeros(b)
    quotient = a // divisor
    quotient += (a - quotient * divisor != 0) & ((a < 0) != (divisor < 0))
    overflow = (a == LONG_MIN) & (b == -1)
    return KernelResult(quotient, either_mask(error, mask_or_none(overflow)))


def remainder_integers(a: Values, b: Values) -> KernelResult:
    """Computes a % b with the sign of a."""
    divisor, error = _replace_zeros(b)
    # LONG_MIN % -1 overflows in the processor; % 1 also gives 0.
    divisor = np.where(divisor == -1, 1, divisor)
    return KernelResult(np.fmod(a, divisor), error)


def positive_remainder_integers(a: Values, b: Values, bits: int) -> KernelResult:
    """Computes pmod(a, b): a % b, plus b if that is negative."""
    rest, error, _ = remainder_integers(a, b)
    # Java adds in at least 32 bits and wraps around.
    total = rest + b if bits != 32 else (rest + b + 2**31) % 2**32 - 2**31
    return KernelResult(np.where(rest < 0, remainder_integers(total, b).values, rest), error)


def negate_integers(a: Values, bits: int) -> KernelResult:
    """Computes -a."""
    return KernelResult(-a, mask_or_none(as_mask(a == -(2 ** (bits - 1)))))


# Floats --------------------------------------------------------------------------------------------------------------


def divide_floats(a: Values, b: Values) -> KernelResult:
    """Computes a / b."""
    divisor, error = _replace_zeros(b)
    return KernelResult(a / divisor, error)


def remainder_floats(a: Values, b: Values) -> KernelResult:
    """Computes a % b with the sign of a."""
    divisor, error = _replace_zeros(b)
    return KernelResult(np.fmod(a, divisor), error)


def positive_remainder_floats(a: Values, b: Values) -> KernelResult:
    """Computes pmod(a, b): a % b, plus b if that is negative."""
    rest, error, _ = remainder_floats(a, b)
    return KernelResult(np.where(rest < 0, remainder_floats(rest + b, b).values, rest), error)


# Decimals: unscaled values -------------------------------------------------------------------------------------------


def scale_up(values: Values, places: int) -> Values:
    """Computes values * 10^places, in int64 if all fit."""
    if places == 0:
        return values
    factor = 10**places
    if values.dtype != object:
        if find_max_magnitude(values) * factor <= LONG_MAX:
            return values * np.int64(factor) if factor <= LONG_MAX else values
        values = values.astype(object)
    return np.asarray(values * factor, dtype=object)


def round_off(values: Values, places: int) -> Values:
    """Computes values / 10^places, rounded half away from zero."""
    if places == 0:
        return values
    factor = 10**places
    if values.dtype != object:
        # The absolute value of LONG_MIN does not fit int64.
        if factor > LONG_MAX // 4 or (len(values) and values.min() == LONG_MIN):
            values = values.astype(object)
        else:
            magnitudes = np.abs(values)
            rounded = magnitudes // factor + (magnitudes % factor * 2 >= factor)
            return np.asarray(np.sign(values) * rounded, dtype=np.int64)
    half = factor // 2
    negative = as_mask(values < 0)
    magnitudes = (np.abs(values) + half) // factor
    return np.asarray(np.where(negative, -magnitudes, magnitudes), dtype=object)


def store_decimal(values: Values, type_: DataType, checked: bool = True) -> KernelResult:
    """Converts unscaled values of the scale of `type_` to its storage. Values with too many digits are errors."""
    error: Mask | None = None
    limit = 10**type_.precision
    if checked and (values.dtype == object or limit <= LONG_MAX):
        error = mask_or_none(as_mask((values <= -limit) | (values >= limit)))
    if type_.precision <= _COMPACT_DIGITS:
        values = (values if error is None else np.where(error, 0, values)).astype(np.int64, copy=False)
    elif values.dtype != object and len(values) and values.min() == LONG_MIN:
        values = values.astype(object)
    return KernelResult(values, error)


def rescale(values: Values, scale: int, type_: DataType, checked: bool = True) -> KernelResult:
    """Converts unscaled values of a scale to `type_`, rounded half up. Values that do not fit are errors."""
    if scale > type_.scale:
        values = round_off(values, scale - type_.scale)
    else:
        values = scale_up(values, type_.scale - scale)
    return store_decimal(values, type_, checked)


def add_decimals(
    a: Values, b: Values, types: tuple[DataType, DataType], result: DataType, sign: int = 1
) -> KernelResult:
    """Computes a + b, or a - b if sign is -1."""
    scale = max(types[0].scale, types[1].scale)
    left, right = scale_up(a, scale - types[0].scale), scale_up(b, scale - types[1].scale)
    if left.dtype != right.dtype or (
        left.dtype != object and find_max_magnitude(left) + find_max_magnitude(right) > LONG_MAX
    ):
        left, right = left.astype(object), right.astype(object)
    total = left + right if sign > 0 else left - right
    exact = max(t.precision - t.scale for t in types) + scale + 1 <= result.precision and scale == result.scale
    return rescale(total, scale, result, checked=not exact)


def multiply_decimals(a: Values, b: Values, types: tuple[DataType, DataType], result: DataType) -> KernelResult:
    """Computes a * b."""
    if a.dtype == object or b.dtype == object or find_max_magnitude(a) * find_max_magnitude(b) > LONG_MAX:
        a, b = a.astype(object), b.astype(object)
    scale = types[0].scale + types[1].scale
    digits = types[0].precision + types[1].precision
    return rescale(a * b, scale, result, checked=digits > result.precision or scale != result.scale)


def divide_decimals(a: Values, b: Values, types: tuple[DataType, DataType], result: DataType) -> KernelResult:
    """Computes a / b."""
    divisor, zero = _replace_zeros(b)
    # The exponent is never negative: the result's type keeps the digits before the point.
    factor = 10 ** (result.scale - types[0].scale + types[1].scale)
    largest, largest_divisor = find_max_magnitude(a), find_max_magnitude(divisor)
    if 2 * largest * factor + largest_divisor > LONG_MAX or 2 * largest_divisor > LONG_MAX or factor > LONG_MAX:
        a, divisor = a.astype(object), divisor.astype(object)
    magnitudes = (2 * np.abs(a) * factor + np.abs(divisor)) // (2 * np.abs(divisor))
    values, error, _ = store_decimal(np.where(as_mask((a < 0) != (divisor < 0)), -magnitudes, magnitudes), result)
    return KernelResult(values, either_mask(zero, error))


def remainder_decimals(a: Values, b: Values, types: tuple[DataType, DataType], result: DataType) -> KernelResult:
    """Computes a % b with the sign of a."""
    divisor, zero = _replace_zeros(b)
    scale = max(types[0].scale, types[1].scale)
    left, right = scale_up(a, scale - types[0].scale), scale_up(divisor, scale - types[1].scale)
    if left.dtype != object and right.dtype != object:
        # LONG_MIN % -1 overflows in the processor.
        values, error, _ = rescale(np.fmod(left, np.where(right == -1, 1, right)), scale, result)
        return KernelResult(values, either_mask(zero, error))
    left, right = left.astype(object), right.astype(object)
    divisors = np.abs(right)
    rest = np.abs(left) % divisors
    too_long = as_mask(np.frompyfunc(_has_too_long_quotient, 2, 1)(np.abs(left), divisors))
    values, error, _ = rescale(np.where(left < 0, -rest, rest), scale, result)
    return KernelResult(values, either_mask(either_mask(zero, mask_or_none(too_long)), error))


def positive_remainder_decimals(
    a: Values, b: Values, types: tuple[DataType, DataType], result: DataType
) -> KernelResult:
    """Computes pmod(a, b): a % b, plus b if a % b is negative and b is positive."""
    rest, error, _ = remainder_decimals(a, b, types, result)
    divisor = scale_up(b, result.scale - types[1].scale)
    positive, beyond, _ = store_decimal(np.where(as_mask((rest < 0) & (divisor > 0)), rest + divisor, rest), result)
    return KernelResult(positive, either_mask(error, beyond))


def _has_too_long_quotient(dividend: int, divisor: int) -> bool:
    # Spark's remainder fails if the whole quotient needs more digits than it allows.
    quotient = dividend // divisor
    excess = len(str(quotient)) - _QUOTIENT_DIGITS
    return excess > 0 and quotient % 10**excess != 0


# Comparison ----------------------------------------------------------------------------------------------------------


def is_equal(a: Values, b: Values) -> Mask:
    """Computes a = b; for floats NaN equals NaN."""
    same = a == b
    if a.dtype.kind == "f":
        return as_mask(same | (is_nan(a) & is_nan(b)))
    return as_mask(same)


def is_less(a: Values, b: Values) -> Mask:
    """Computes a < b; for floats NaN is the greatest."""
    if a.dtype.kind == "f":
        return as_mask((a < b) | (is_nan(b) & ~is_nan(a)))
    return as_mask(a < b)


def broadcast(value: Any, dtype: npt.DTypeLike, rows: int) -> Values:
    """Returns a constant as a read-only array of `rows` rows, without copying it."""
    single = np.empty((), dtype=dtype)
    single[()] = value
    return np.broadcast_to(single, (rows,))


def map_repeated(function: Callable[[Values], Values], texts: Values) -> Values:
    """Applies a function to texts, to each different one once if the first of them repeat."""
    sample = texts[:_SAMPLE].tolist()
    if len(sample) < _SAMPLE or 2 * len(set(sample)) > _SAMPLE:
        return function(texts)
    listed = texts.tolist()
    numbers = {text: number for number, text in enumerate(dict.fromkeys(listed))}
    found = function(make_objects(numbers))
    return found[np.fromiter(map(numbers.__getitem__, listed), dtype=np.int64, count=len(listed))]

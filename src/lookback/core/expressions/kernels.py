"""Vectorised arithmetic and comparison on stored values, with overflow found and not wrapped.

A kernel takes values (numpy arrays of equal length) and gives an Outcome. It never raises for a row: it marks the row.
What stands under NULL or error may be any number of the right kind; an outcome there means nothing.

Between kernels a wide decimal may travel as int64 (never as its least value, which has no opposite), since Python's
integers are ten times slower; only the column that leaves an expression has the storage of its type.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lookback.core.values.columns import Mask, Values
from lookback.core.values.types import DataType

LONG_MIN, LONG_MAX = -(2**63), 2**63 - 1
_COMPACT_DIGITS = 18
# Spark's decimal remainder works with whole quotients of so many digits.
_QUOTIENT_DIGITS = 39


class KernelResult(NamedTuple):
    """Result of a kernel: values, and where (if anywhere) there is an error or a NULL instead."""

    values: Values
    bad: Mask | None = None
    null: Mask | None = None


def mask_or_none(mask: Mask | None) -> Mask | None:
    """The mask, or None if it marks nothing."""
    return mask if mask is not None and mask.any() else None


def either_mask(a: Mask | None, b: Mask | None) -> Mask | None:
    """Where a or b."""
    if a is None or b is None:
        return b if a is None else a
    return a | b


def as_mask(values: Any) -> Mask:
    """A comparison of object arrays as a boolean array."""
    return np.asarray(values, dtype=bool)


def max_magnitude(values: Values) -> int:
    """The largest absolute value of an integer array, 0 if empty."""
    if not len(values):
        return 0
    return max(abs(int(values.max())), abs(int(values.min())))


def narrow_decimals(values: Values) -> Values:
    """Wide decimals as int64 if all of them fit."""
    try:
        narrow = values.astype(np.int64)
    except (OverflowError, TypeError):
        return values
    return values if len(narrow) and narrow.min() == LONG_MIN else narrow


# Integers ------------------------------------------------------------------------------------------------------------


def in_range(values: Values, bits: int) -> Mask:
    """Where integers lie outside a signed type of so many bits."""
    return as_mask((values < -(2 ** (bits - 1))) | (values > 2 ** (bits - 1) - 1))


def add_integers(a: Values, b: Values, bits: int) -> KernelResult:
    """a + b."""
    total = a + b
    if bits < 64:
        return KernelResult(total, mask_or_none(in_range(total, bits)))
    return KernelResult(total, mask_or_none(((a ^ total) & (b ^ total)) < 0))


def subtract_integers(a: Values, b: Values, bits: int) -> KernelResult:
    """a - b."""
    difference = a - b
    if bits < 64:
        return KernelResult(difference, mask_or_none(in_range(difference, bits)))
    return KernelResult(difference, mask_or_none(((a ^ b) & (a ^ difference)) < 0))


def multiply_integers(a: Values, b: Values, bits: int) -> KernelResult:
    """a * b."""
    if bits <= 32 or max_magnitude(a) * max_magnitude(b) <= LONG_MAX:
        product = a * b
        return KernelResult(product, mask_or_none(in_range(product, bits)) if bits < 64 else None)
    exact = a.astype(object) * b.astype(object)
    bad = in_range(exact, 64)
    return KernelResult(np.where(bad, 0, exact).astype(np.int64), mask_or_none(bad))


def _divisors(b: Values) -> tuple[Values, Mask | None]:
    zero = b == 0
    if not zero.any():
        return b, None
    return np.where(zero, np.ones(1, dtype=b.dtype), b), as_mask(zero)


def divide_integers(a: Values, b: Values) -> KernelResult:
    """a div b, cut towards zero."""
    divisor, bad = _divisors(b)
    quotient = a // divisor
    quotient += (a - quotient * divisor != 0) & ((a < 0) != (divisor < 0))
    overflow = (a == LONG_MIN) & (b == -1)
    return KernelResult(quotient, either_mask(bad, mask_or_none(overflow)))


def remainder_integers(a: Values, b: Values) -> KernelResult:
    """a % b with the sign of a."""
    divisor, bad = _divisors(b)
    # LONG_MIN % -1 overflows inside the processor; with 1 the result is the same 0.
    divisor = np.where(divisor == -1, 1, divisor)
    return KernelResult(np.fmod(a, divisor), bad)


def negate_integers(a: Values, bits: int) -> KernelResult:
    """-a."""
    return KernelResult(-a, mask_or_none(as_mask(a == -(2 ** (bits - 1)))))


# Floats --------------------------------------------------------------------------------------------------------------


def divide_floats(a: Values, b: Values) -> KernelResult:
    """a / b."""
    divisor, bad = _divisors(b)
    return KernelResult(a / divisor, bad)


def remainder_floats(a: Values, b: Values) -> KernelResult:
    """a % b with the sign of a."""
    divisor, bad = _divisors(b)
    return KernelResult(np.fmod(a, divisor), bad)


# Decimals: unscaled values -------------------------------------------------------------------------------------------


def scaled_up(values: Values, places: int) -> Values:
    """values * 10^places, in int64 where that holds them."""
    if places == 0:
        return values
    factor = 10**places
    if values.dtype != object:
        if max_magnitude(values) * factor <= LONG_MAX:
            return values * np.int64(factor) if factor <= LONG_MAX else values
        values = values.astype(object)
    return np.asarray(values * factor, dtype=object)


def rounded_off(values: Values, places: int) -> Values:
    """values / 10^places, half away from zero."""
    if places == 0:
        return values
    factor = 10**places
    if values.dtype != object:
        if factor > LONG_MAX // 4:
            values = values.astype(object)
        else:
            size = np.abs(values)
            return np.asarray(np.sign(values) * (size // factor + (size % factor * 2 >= factor)), dtype=np.int64)
    half = factor // 2
    negative = as_mask(values < 0)
    size = (np.abs(values) + half) // factor
    return np.asarray(np.where(negative, -size, size), dtype=object)


def stored_decimal(values: Values, type_: DataType, checked: bool = True) -> KernelResult:
    """Unscaled values at the scale of `type_` in its storage; an error where they have too many digits."""
    bad: Mask | None = None
    limit = 10**type_.precision
    if checked and (values.dtype == object or limit <= LONG_MAX):
        bad = mask_or_none(as_mask((values <= -limit) | (values >= limit)))
    if type_.precision <= _COMPACT_DIGITS:
        values = (values if bad is None else np.where(bad, 0, values)).astype(np.int64, copy=False)
    elif values.dtype != object and len(values) and values.min() == LONG_MIN:
        values = values.astype(object)
    return KernelResult(values, bad)


def rescaled(values: Values, scale: int, type_: DataType, checked: bool = True) -> KernelResult:
    """Unscaled values of one scale as `type_`: rounded half up, an error where they do not fit."""
    if scale > type_.scale:
        values = rounded_off(values, scale - type_.scale)
    else:
        values = scaled_up(values, type_.scale - scale)
    return stored_decimal(values, type_, checked)


def add_decimals(
    a: Values, b: Values, types: tuple[DataType, DataType], result: DataType, sign: int = 1
) -> KernelResult:
    """a + b, or a - b with sign -1."""
    scale = max(types[0].scale, types[1].scale)
    left, right = scaled_up(a, scale - types[0].scale), scaled_up(b, scale - types[1].scale)
    if left.dtype != right.dtype or (left.dtype != object and max_magnitude(left) + max_magnitude(right) > LONG_MAX):
        left, right = left.astype(object), right.astype(object)
    total = left + right if sign > 0 else left - right
    exact = max(t.precision - t.scale for t in types) + scale + 1 <= result.precision and scale == result.scale
    return rescaled(total, scale, result, checked=not exact)


def multiply_decimals(a: Values, b: Values, types: tuple[DataType, DataType], result: DataType) -> KernelResult:
    """a * b."""
    if a.dtype == object or b.dtype == object or max_magnitude(a) * max_magnitude(b) > LONG_MAX:
        a, b = a.astype(object), b.astype(object)
    scale = types[0].scale + types[1].scale
    digits = types[0].precision + types[1].precision
    return rescaled(a * b, scale, result, checked=digits > result.precision or scale != result.scale)


def divide_decimals(a: Values, b: Values, types: tuple[DataType, DataType], result: DataType) -> KernelResult:
    """a / b."""
    divisor, zero = _divisors(b)
    # Never negative: the rules for the result's type keep the digits before the point.
    factor = 10 ** (result.scale - types[0].scale + types[1].scale)
    size, divisor_size = max_magnitude(a), max_magnitude(divisor)
    if 2 * size * factor + divisor_size > LONG_MAX or 2 * divisor_size > LONG_MAX or factor > LONG_MAX:
        a, divisor = a.astype(object), divisor.astype(object)
    sizes = (2 * np.abs(a) * factor + np.abs(divisor)) // (2 * np.abs(divisor))
    values, bad, _ = stored_decimal(np.where(as_mask((a < 0) != (divisor < 0)), -sizes, sizes), result)
    return KernelResult(values, either_mask(zero, bad))


def remainder_decimals(a: Values, b: Values, types: tuple[DataType, DataType], result: DataType) -> KernelResult:
    """a % b with the sign of a."""
    divisor, zero = _divisors(b)
    scale = max(types[0].scale, types[1].scale)
    left, right = scaled_up(a, scale - types[0].scale), scaled_up(divisor, scale - types[1].scale)
    if left.dtype != object and right.dtype != object:
        # The least int64 has no remainder by -1 inside the processor.
        values, bad, _ = rescaled(np.fmod(left, np.where(right == -1, 1, right)), scale, result)
        return KernelResult(values, either_mask(zero, bad))
    left, right = left.astype(object), right.astype(object)
    sizes = np.abs(right)
    rest = np.abs(left) % sizes
    impossible = as_mask(np.frompyfunc(_impossible, 2, 1)(np.abs(left), sizes))
    values, bad, _ = rescaled(np.where(left < 0, -rest, rest), scale, result)
    return KernelResult(values, either_mask(either_mask(zero, mask_or_none(impossible)), bad))


def _impossible(size: int, divisor: int) -> bool:
    # Spark's remainder fails where the whole quotient needs more digits than it works with.
    quotient = size // divisor
    excess = len(str(quotient)) - _QUOTIENT_DIGITS
    return excess > 0 and quotient % 10**excess != 0


# Comparison ----------------------------------------------------------------------------------------------------------


def equal(a: Values, b: Values) -> Mask:
    """a = b; for floats NaN equals NaN."""
    same = a == b
    if a.dtype.kind == "f":
        return as_mask(same | ((a != a) & (b != b)))
    return as_mask(same)


def less(a: Values, b: Values) -> Mask:
    """a < b; for floats NaN is the greatest."""
    if a.dtype.kind == "f":
        return as_mask((a < b) | ((b != b) & (a == a)))
    return as_mask(a < b)


def aligned_decimals(a: Values, b: Values, scales: tuple[int, int]) -> tuple[Values, Values]:
    """Unscaled values at one scale, for comparing."""
    scale = max(scales)
    return scaled_up(a, scale - scales[0]), scaled_up(b, scale - scales[1])


def broadcast(value: Any, dtype: npt.DTypeLike, rows: int) -> Values:
    """A constant as a read-only array of so many rows, without copying."""
    single = np.empty((), dtype=dtype)
    single[()] = value
    return np.broadcast_to(single, (rows,))

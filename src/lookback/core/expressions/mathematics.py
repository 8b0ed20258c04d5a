"""Kernels of mathematical functions over doubles, with the results of Java's functions for NaN, infinities and zeros.

The last digit of a function such as `sin` differs between libraries (see ROUNDED). Rows are computed one by one with the
functions of the C library: numpy's own give another last digit on another processor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from lookback.core.expressions.kernels import KernelResult, mask_or_none
from lookback.core.expressions.signatures import Call, CallKernel
from lookback.core.values.columns import Values, is_nan

# The functions whose last digit may be another one in Spark or on another machine.
ROUNDED = frozenset({"exp", "ln", "log10", "pow", "sin", "cos", "asin", "acos", "atan2", "haversine_km"})
# The mean radius of the Earth (IUGG), for a sphere.
EARTH_RADIUS_KM = 6371.0088
# Java multiplies by the nearest doubles.
_RADIANS_PER_DEGREE, _DEGREES_PER_RADIAN = 0.017453292519943295, 57.29577951308232


def map_doubles(function: Callable[..., float]) -> CallKernel:
    """Makes the kernel of a function of doubles."""
    return lambda call, values: KernelResult(_map_rows(function, values))


def map_logarithm(function: Callable[[float], float]) -> CallKernel:
    """Makes the kernel of a logarithm, which is NULL for 0 and negative numbers, as in Spark."""

    def kernel(call: Call, values: Sequence[Values]) -> KernelResult:
        outside = values[0] <= 0
        return KernelResult(_map_rows(function, [np.where(outside, 1.0, values[0])]), None, mask_or_none(outside))

    return kernel


def _map_rows(function: Callable[..., float], values: Sequence[Values]) -> Values:
    rows = zip(*(each.tolist() for each in values), strict=True)
    return np.fromiter((function(*row) for row in rows), dtype=np.float64, count=len(values[0]))


def take_root(call: Call, values: Sequence[Values]) -> KernelResult:
    """Computes square roots, which every processor rounds alike; NaN for negative numbers."""
    return KernelResult(np.sqrt(values[0]))


def to_radians(call: Call, values: Sequence[Values]) -> KernelResult:
    """Converts degrees to radians."""
    return KernelResult(values[0] * _RADIANS_PER_DEGREE)


def to_degrees(call: Call, values: Sequence[Values]) -> KernelResult:
    """Converts radians to degrees."""
    return KernelResult(values[0] * _DEGREES_PER_RADIAN)


def find_exponential(x: float) -> float:
    """Returns e to the power of x; infinity beyond the range of a double."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def inside_domain(function: Callable[[float], float]) -> Callable[[float], float]:
    """Makes a function NaN outside its domain, where Python raises an error."""

    def compute(x: float) -> float:
        try:
            return function(x)
        except ValueError:
            return math.nan

    return compute


def find_power(base: float, exponent: float) -> float:
    """Returns base to the power of exponent, as Java does."""
    # C says 1 for these two.
    if is_nan(exponent) or (abs(base) == 1 and math.isinf(exponent)):
        return math.nan
    try:
        return math.pow(base, exponent)
    except ValueError:
        if base != 0:
            return math.nan
    except OverflowError:
        pass
    is_negative = math.copysign(1.0, base) < 0 and math.fmod(exponent, 2) in (1, -1)
    return -math.inf if is_negative else math.inf


def find_angle(y: float, x: float) -> float:
    """Returns the angle of the point (x, y) in radians; a negative zero counts as zero, as in Spark."""
    return math.atan2(y + 0.0, x + 0.0)


def measure_distances(call: Call, values: Sequence[Values]) -> KernelResult:
    """Computes great-circle distances in kilometres between points (lat1, lon1) and (lat2, lon2), in degrees.

    NULL for NaN, latitudes outside -90..90 and longitudes outside -360..360, which are no places.
    """
    lat1, lon1, lat2, lon2 = values
    # A comparison with NaN is false.
    is_place = (np.abs(lat1) <= 90) & (np.abs(lat2) <= 90) & (np.abs(lon1) <= 360) & (np.abs(lon2) <= 360)
    degrees = [np.where(is_place, each, 0.0) for each in values]
    return KernelResult(_map_rows(_measure_distance, degrees), None, mask_or_none(~is_place))


def _measure_distance(lat1: float, lon1: float, lat2: float, lon2: float) -> float:
    north, east = math.radians(lat2 - lat1), math.radians(lon2 - lon1)
    parallels = math.cos(math.radians(lat1)) * math.cos(math.radians(lat2))
    half_chord = math.sin(north / 2) ** 2 + parallels * math.sin(east / 2) ** 2
    # Rounding can exceed 1 for antipodes.
    return 2 * EARTH_RADIUS_KM * math.asin(min(1.0, math.sqrt(half_chord)))

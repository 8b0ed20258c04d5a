"""Kernels of functions over dates (days since 1970) and times (microseconds), in the proleptic Gregorian calendar."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lookback.core.expressions.casts import SECOND_US, timestamps_to_dates
from lookback.core.expressions.kernels import KernelResult, add_integers, divide_integers, mask_or_none
from lookback.core.expressions.signatures import TRUNCATIONS, UNITS, Call
from lookback.core.values.columns import Values
from lookback.core.values.keys import number_values
from lookback.core.values.times import DAY_US
from lookback.core.values.zones import find_zone

_DAY_SECONDS = DAY_US // SECOND_US


def count_months(days: Values) -> Values:
    """Returns the number of months from January 1970 to each day."""
    return np.asarray(days.astype("datetime64[D]").astype("datetime64[M]").astype(np.int64))


def find_first_days(months: Values) -> Values:
    """Returns the first day of each month, counted from January 1970."""
    return np.asarray(months.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64))


def find_last_days(days: Values) -> Values:
    """Returns the last day of the month of each day."""
    return find_first_days(count_months(days) + 1) - 1


def find_day_of_month(days: Values) -> Values:
    """Returns the days of the month, from 1."""
    return days - find_first_days(count_months(days)) + 1


def find_day_of_year(days: Values) -> Values:
    """Returns the days of the year, from 1."""
    return days - find_first_days(count_months(days) // 12 * 12) + 1


def find_week_of_year(days: Values) -> Values:
    """Returns the ISO weeks: a week begins on Monday and belongs to the year of its Thursday."""
    return (find_day_of_year(days - (days + 3) % 7 + 3) - 1) // 7 + 1


def add_days(days: Values, more: Values) -> Values:
    """Moves days; beyond the range of Spark's dates, which are 32 bits wide, they wrap around as there."""
    return (days + more + 2**31) % 2**32 - 2**31


def truncate(call: Call, values: Sequence[Values]) -> KernelResult:
    """Cuts times down to the beginning of a unit."""
    unit, times = TRUNCATIONS[str(call.arguments[0].literal).lower()], values[1]
    if unit in ("month", "quarter", "year"):
        months = count_months(timestamps_to_dates(times))
        return KernelResult(find_first_days(months // UNITS[unit] * UNITS[unit]) * DAY_US)
    if unit == "week":
        days = timestamps_to_dates(times)
        return KernelResult((days - (days + 3) % 7) * DAY_US)
    return KernelResult(times // UNITS[unit] * UNITS[unit])


def convert_to_local(call: Call, values: Sequence[Values]) -> KernelResult:
    """Converts UTC times to the clock of a zone; an unknown zone is an error."""
    times, names = values
    codes, different = number_values(names)
    offsets, error = np.zeros(len(times), dtype=np.int64), np.zeros(len(times), dtype=bool)
    for code, name in enumerate(different.tolist()):
        rows, zone = np.flatnonzero(codes == code), find_zone(name)
        if zone is None:
            error[rows] = True
        else:
            offsets[rows] = zone.find_offsets(times[rows])
    moved = add_integers(times, offsets, 64)
    return KernelResult(moved.values, mask_or_none(error if moved.error is None else error | moved.error))


def count_seconds(call: Call, values: Sequence[Values]) -> KernelResult:
    """Counts the whole seconds since 1970; before 1970 the fraction is dropped towards it, as in Spark."""
    return KernelResult(divide_integers(values[0], np.full(1, SECOND_US)).values)


def count_months_between(call: Call, values: Sequence[Values]) -> KernelResult:
    """Counts the months from the second time to the first, as a double, with 31 days to a month.

    Whole if both are the same day of the month, or both the last one. Rounded to 8 places unless a third argument is
    false. All steps are those of Spark, so that the digits are.
    """
    days, seconds = zip(*(np.divmod(times // SECOND_US, _DAY_SECONDS) for times in values[:2]), strict=True)
    of_month = [find_day_of_month(each) for each in days]
    is_last = [find_last_days(each) == each for each in days]
    months = (count_months(days[0]) - count_months(days[1])).astype(np.float64)
    rest = (of_month[0] - of_month[1]) * _DAY_SECONDS + seconds[0] - seconds[1]
    between = months + rest / np.float64(31 * _DAY_SECONDS)
    rounded = np.floor(between * 1e8 + 0.5) / 1e8
    shown = rounded if len(values) == 2 else np.where(values[2], rounded, between)
    return KernelResult(np.where((of_month[0] == of_month[1]) | (is_last[0] & is_last[1]), months, shown))

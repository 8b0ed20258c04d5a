"""Reads and writes durations such as `24 hours`; the engine counts in microseconds."""

from __future__ import annotations

import re

from lookback.core.errors import DurationError

MICROSECONDS = {
    "microsecond": 1,
    "millisecond": 1_000,
    "second": 1_000_000,
    "minute": 60_000_000,
    "hour": 3_600_000_000,
    "day": 86_400_000_000,
    "week": 604_800_000_000,
}
# About 10,000 years, so that sums of a time and a few durations fit in 64 bits.
MAX_DURATION_US = 366 * 10_000 * MICROSECONDS["day"]
_PATTERN = re.compile(r"\s*([0-9]{1,19})\s+([a-zA-Z]+)\s*", re.ASCII)


def parse_duration(text: object) -> int:
    """Reads a duration such as `24 hours` or `1 week` as microseconds.

    A duration is an integer, a space and one of microseconds, milliseconds, seconds, minutes, hours, days, weeks
    (a day is 24 hours, as in UTC). Months and years have no fixed length and are refused: raises DurationError.
    """
    match = _PATTERN.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise DurationError(f"{text!r} is not a duration; write an integer and a unit, such as '24 hours'")
    unit = match.group(2).lower().removesuffix("s")
    if unit in ("month", "year", "quarter"):
        raise DurationError(f"{text!r}: a {unit} has no fixed length; write days, such as '30 days'")
    if unit not in MICROSECONDS:
        raise DurationError(
            f"{text!r}: unknown unit {match.group(2)!r}; use one of {', '.join(u + 's' for u in MICROSECONDS)}"
        )
    value = int(match.group(1)) * MICROSECONDS[unit]
    if value > MAX_DURATION_US:
        raise DurationError(f"{text!r} is longer than 10,000 years; write a shorter duration")
    return value


def format_duration(microseconds: int) -> str:
    """Writes a duration in the largest unit that leaves an integer: 86,400,000,000 is `1 day`."""
    for unit, length in reversed(MICROSECONDS.items()):
        if microseconds % length == 0 and (microseconds or unit == "second"):
            count = microseconds // length
            return f"{count} {unit}" if count == 1 else f"{count} {unit}s"
    return f"{microseconds} microseconds"

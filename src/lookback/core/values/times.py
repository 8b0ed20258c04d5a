"""Converts times, as people write them, to and from UTC microseconds since 1970."""

from __future__ import annotations

import datetime as dt

from lookback.core.errors import show_value
from lookback.core.values.notation import parse_datetime

# Later than any watermark, and earlier than any time: no watermark yet.
NEVER_DUE, NEVER = 2**62, -(2**62)
DAY_US = 86_400_000_000
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
_MICROSECOND = dt.timedelta(microseconds=1)
# The years 1 to 9999, beyond which Python has no dates.
FIRST_TIME_US, LAST_TIME_US = (
    (time - EPOCH) // _MICROSECOND
    for time in (
        dt.datetime(1, 1, 1, tzinfo=dt.timezone.utc),
        dt.datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=dt.timezone.utc),
    )
)


def parse_calendar_time(value: object) -> int:
    """Reads a time like `parse_time`, but only of the years 1 to 9999. Raises ValueError for anything else."""
    try:
        microseconds = parse_time(value)
    except OverflowError:
        raise ValueError("a time beyond the years 1 to 9999") from None
    # An integer is accepted unchecked by `parse_time`, but the engine counts in 64 bits.
    if not FIRST_TIME_US <= microseconds <= LAST_TIME_US:
        raise ValueError("a time beyond the years 1 to 9999")
    return microseconds


def parse_time(value: object) -> int:
    """Reads a time as UTC microseconds: an aware datetime, a naive one (taken as UTC), a text or microseconds.

    A date is its midnight; `notation` says how a time is written. Raises ValueError for anything else.
    """
    if isinstance(value, bool):
        raise ValueError(f"{show_value(value)} is not a time")
    if isinstance(value, int):
        return value
    if isinstance(value, str):
        value = parse_datetime(value)
    if not isinstance(value, dt.datetime):
        if not isinstance(value, dt.date):
            raise ValueError(f"{show_value(value)} is not a time")
        value = dt.datetime(value.year, value.month, value.day, tzinfo=dt.timezone.utc)
    aware = value if value.tzinfo else value.replace(tzinfo=dt.timezone.utc)
    return (aware - EPOCH) // _MICROSECOND


def to_utc(microseconds: int) -> dt.datetime:
    """Converts microseconds since 1970 to an aware UTC time; beyond the years 1 to 9999, to the nearest one within."""
    try:
        return EPOCH + int(microseconds) * _MICROSECOND
    except OverflowError:
        return EPOCH + (FIRST_TIME_US if microseconds < 0 else LAST_TIME_US) * _MICROSECOND


def format_time(time: dt.datetime | int) -> str:
    """Writes a time for people, such as `2024-03-04 10:00:00 UTC`. time: aware and UTC, or microseconds since 1970."""
    return f"{to_utc(time) if isinstance(time, int) else time:%Y-%m-%d %H:%M:%S} UTC"

"""Reads dates and times that are written as literals in SQL."""

from __future__ import annotations

import datetime as dt
import re

from lookback.core.values.times import DAY_US

_LITERAL_TIME = re.compile(
    r"(\d{4})-(\d{1,2})-(\d{1,2})(?:[ T](\d{1,2}):(\d{1,2})(?::(\d{1,2})(?:\.(\d{1,6}))?)?(Z|[+-]\d{2}:\d{2})?)?",
    re.ASCII,
)


def read_literal_time(text: str, *, is_date: bool) -> int | None:
    """Reads a date as days, or a time as microseconds since 1970; UTC if it has no zone. None for any other text."""
    match = _LITERAL_TIME.fullmatch(text.strip(" "))
    if match is None or (is_date and match.group(4)):
        return None
    year, month, day, hour, minute, second, fraction, zone = match.groups()
    offset = _read_offset(zone)
    try:
        date = dt.date(int(year), int(month), int(day))
        time = dt.time(int(hour or 0), int(minute or 0), int(second or 0), int((fraction or "0").ljust(6, "0")))
    except ValueError:
        return None
    days = (date - dt.date(1970, 1, 1)).days
    if is_date or offset is None:
        return days if is_date else None
    seconds = time.hour * 3600 + time.minute * 60 + time.second - offset
    return days * DAY_US + seconds * 1_000_000 + time.microsecond


def _read_offset(zone: str | None) -> int | None:
    """Returns the seconds that a zone is ahead of UTC; None beyond 18 hours."""
    if zone is None or zone == "Z":
        return 0
    hours, minutes = int(zone[1:3]), int(zone[4:6])
    if hours > 18 or minutes > 59 or (hours == 18 and minutes):
        return None
    return (-1 if zone[0] == "-" else 1) * (hours * 3600 + minutes * 60)

"""Reads dates and times that are written as literals in SQL."""

from __future__ import annotations

import datetime as dt
import re

from lookback.core.values.notation import read_zone
from lookback.core.values.times import DAY_US, parse_time

_LITERAL_TIME = re.compile(
    r"(\d{4})-(\d{1,2})-(\d{1,2})(?:[ T](\d{1,2}):(\d{1,2})(?::(\d{1,2})(?:\.(\d{1,6}))?)?(Z|[+-]\d{2}:\d{2})?)?",
    re.ASCII,
)


def read_literal_time(text: str, *, is_date: bool) -> int | None:
    """Reads a date as days, or a time as microseconds since 1970; UTC if it has no zone. None for any other text."""
    match = _LITERAL_TIME.fullmatch(text.strip(" "))
    if match is None or (is_date and match[4]):
        return None
    *parts, fraction, zone = match.groups()
    year, month, day, hour, minute, second = (int(part or 0) for part in parts)
    microsecond = int((fraction or "0").ljust(6, "0"))
    try:
        time = dt.datetime(year, month, day, hour, minute, second, microsecond, read_zone(zone or "Z"))
    except ValueError:
        return None
    return parse_time(time) // (DAY_US if is_date else 1)

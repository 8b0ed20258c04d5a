"""How values are written as text, for every reader: the harness, replay and tests read by it, and ingest makes SQL of it.

The patterns mean the same to Python and to Java, and are matched against the whole text without the BLANKS around it.
"""

from __future__ import annotations

import datetime as dt
import re

# Characters that may surround a value.
BLANKS = " \t\r\n"
# The digits after the point are zeros, as pandas writes whole numbers of a column in which some are missing.
INTEGER = "([+-]?[0-9]+)([.]0*)?"
NUMBER = "[+-]?([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][+-]?[0-9]{1,6})?"
NOT_FINITE = "(?i)([+-]?(inf|infinity)|nan)"
TRUE, FALSE = "(?i)(true|t|yes|y|1([.]0*)?)", "(?i)(false|f|no|n|0([.]0*)?)"
# Year, month, day. Years begin with 1.
DATE = "(?!0000)([0-9]{4})-([0-9]{1,2})-([0-9]{1,2})"
_ZONE = "([Zz]|[Uu][Tt][Cc]|[Gg][Mm][Tt]|[+-][0-9]{2}(?::?[0-9]{2})?)"
# A day and a time of day: hour, minute, second, fraction, zone. One digit is enough for month, day and hour.
TIME = f"{DATE}[Tt ]([0-9]{{1,2}}):([0-9]{{2}})(?::([0-9]{{2}})(?:[.,]([0-9]+))?)? ?{_ZONE}?"
# The same in the basic format of ISO 8601; without the T it would be a number.
BASIC_TIME = (
    "(?!0000)([0-9]{4})([0-9]{2})([0-9]{2})[Tt]"
    f"([0-9]{{2}})([0-9]{{2}})(?:([0-9]{{2}})(?:[.,]([0-9]+))?)? ?{_ZONE}?"
)
MAX_ZONE_MINUTES = 18 * 60

_INTEGER, _NOT_FINITE, _NUMBER, _TRUE, _FALSE = map(re.compile, (INTEGER, NOT_FINITE, NUMBER, TRUE, FALSE))
_DATE, _TIMES = re.compile(DATE), (re.compile(TIME), re.compile(BASIC_TIME))


def find_integer(text: str) -> str | None:
    """Returns the digits of an integer with its sign; None if the text is not one."""
    match = _INTEGER.fullmatch(text)
    return None if match is None else match[1]


def is_number(text: str) -> bool:
    """Returns whether a text is a finite number."""
    return _NUMBER.fullmatch(text) is not None


def is_not_finite(text: str) -> bool:
    """Returns whether a text means NaN or an infinity."""
    return _NOT_FINITE.fullmatch(text) is not None


def is_day(text: str) -> bool:
    """Returns whether a text is a day without a time of day, be it one of the calendar or not."""
    return _DATE.fullmatch(text.strip(BLANKS)) is not None


def parse_boolean(text: str) -> bool:
    """Reads true or false, in any of the forms that TRUE and FALSE match. Raises ValueError for anything else."""
    text = text.strip(BLANKS)
    if _TRUE.fullmatch(text):
        return True
    if _FALSE.fullmatch(text):
        return False
    raise ValueError(f"{text!r} is neither true nor false")


def parse_datetime(text: str) -> dt.datetime:
    """Reads a time, or a day as its midnight; one without a zone is UTC. Raises ValueError for anything else.

    Digits after the microseconds are cut.
    """
    text = text.strip(BLANKS)
    day = _DATE.fullmatch(text)
    if day:
        return dt.datetime(*map(int, day.groups()), tzinfo=dt.timezone.utc)  # type: ignore[misc,arg-type]
    match = next(filter(None, (each.fullmatch(text) for each in _TIMES)), None)
    if match is None:
        raise ValueError(f"{text!r} is not a time")
    *parts, fraction, zone = match.groups()
    microsecond = int((fraction or "")[:6].ljust(6, "0"))
    year, month, date, hour, minute, second = (int(part or 0) for part in parts)
    return dt.datetime(year, month, date, hour, minute, second, microsecond, tzinfo=read_zone(zone or "Z"))


def read_zone(text: str) -> dt.timezone:
    """Reads a zone as the pattern of a time has it. Raises ValueError for a distance that no zone has."""
    if text[0] not in "+-":
        return dt.timezone.utc
    hours, minutes = int(text[1:3]), int(text[3:].lstrip(":") or 0)
    if minutes >= 60 or hours * 60 + minutes > MAX_ZONE_MINUTES:
        raise ValueError(f"no zone is at {text}")
    return dt.timezone(dt.timedelta(minutes=(hours * 60 + minutes) * (-1 if text[0] == "-" else 1)))

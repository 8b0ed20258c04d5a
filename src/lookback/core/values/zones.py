"""Time zones, from the pinned package `tzdata` and never from the system's files."""

from __future__ import annotations

import datetime as dt
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

import numpy as np
import tzdata

from lookback.core.values.keys import Int64s
from lookback.core.values.suggestions import find_nearest

# The release of the database. It is logged with the settings of a stream, since local times depend on it.
ZONES_RELEASE: str = tzdata.IANA_VERSION
_SECOND_US = 1_000_000
_FIRST_TIME = -(2**63)
# The Gregorian calendar, with its days of the week, repeats after 400 years.
_CYCLE_YEARS, _CYCLE_SECONDS = 400, 146_097 * 86_400
_EPOCH_DAY = dt.date(1970, 1, 1).toordinal()
_OFFSET = re.compile(r"([+-])(\d{2}):(\d{2})", re.ASCII)
_LONGEST_OFFSET = 18 * 3600


@dataclass(frozen=True)
class Zone:
    """The offsets of a zone from UTC.

    Attributes:
        starts: The times from which each offset applies, in microseconds, ascending; the first is before every time.
        offsets: The offsets in microseconds.
        cycle_start: From this time on, offsets repeat every 400 years.
    """

    starts: Int64s
    offsets: Int64s
    cycle_start: int

    def find_offsets(self, times: Int64s) -> Int64s:
        """Returns the offset from UTC at each time, both in microseconds."""
        within = (times - self.cycle_start) % (_CYCLE_SECONDS * _SECOND_US) + self.cycle_start
        places = np.searchsorted(self.starts, np.where(times < self.cycle_start, times, within), side="right")
        return self.offsets[places - 1]


@lru_cache(maxsize=1)
def list_zones() -> frozenset[str]:
    """Returns the ids of the regions, such as Europe/Berlin."""
    return frozenset(resources.files(tzdata).joinpath("zones").read_text(encoding="utf-8").split())


@lru_cache(maxsize=1_000)
def find_zone(name: str) -> Zone | None:
    """Returns a zone by the id of its region, or by its distance from UTC such as +02:00; None if there is none."""
    if name in list_zones():
        return _read_zone(resources.files(tzdata).joinpath("zoneinfo", *name.split("/")).read_bytes())
    match = _OFFSET.fullmatch("+00:00" if name == "Z" else name)
    if match is None:
        return None
    seconds = int(match[2]) * 3600 + int(match[3]) * 60
    if int(match[3]) > 59 or seconds > _LONGEST_OFFSET:
        return None
    return _make_zone([], [-seconds if match[1] == "-" else seconds], 0)


def explain_no_zone(name: str) -> str:
    """Explains why a text is not a zone, and what to write instead."""
    near = find_nearest(name, sorted(list_zones()))
    hint = (
        f"did you mean {near!r}?" if near else "write a region such as 'Europe/Berlin' or a distance such as '+02:00'"
    )
    return f"{name!r} is not a time zone; {hint}"


def _make_zone(starts: list[int], offsets: list[int], cycle_start: int) -> Zone:
    """Makes a zone from seconds. `starts` lacks that of the first offset."""
    times = [_FIRST_TIME, *(start * _SECOND_US for start in starts)]
    shifts = np.array(offsets, dtype=np.int64) * _SECOND_US
    return Zone(np.array(times, dtype=np.int64), shifts, cycle_start * _SECOND_US)


# Files of the database (RFC 8536) ------------------------------------------------------------------------------------

_HEAD = struct.Struct(">4sc15x6l")


def _read_zone(file: bytes) -> Zone:
    """Reads the second, 64-bit part of a file, and the rule for times after its last transition."""
    _, _, *counts = _HEAD.unpack_from(file)
    isutcs, isstds, leaps, times, types, characters = counts
    at = _HEAD.size + times * 5 + types * 6 + characters + leaps * 8 + isstds + isutcs
    _, _, isutcs, isstds, leaps, times, types, characters = _HEAD.unpack_from(file, at)
    at += _HEAD.size
    transitions = list(struct.unpack_from(f">{times}q", file, at))
    numbers = struct.unpack_from(f">{times}B", file, at + times * 8)
    at += times * 9
    kinds = [struct.unpack_from(">lBB", file, at + 6 * number)[0] for number in range(types)]
    at += types * 6 + characters + leaps * 12 + isstds + isutcs
    footer = file[at:].decode("ascii").strip("\n")
    offsets = [kinds[0], *(kinds[number] for number in numbers)]
    last = max([0, *transitions[-1:]])
    year = 1970 + last // (365 * 86_400)
    for time, offset in sorted(_follow_rule(footer, year - 2, year + _CYCLE_YEARS + 2)):
        if not transitions or time > transitions[-1]:
            transitions.append(time)
            offsets.append(offset)
    return _make_zone(transitions, offsets, _count_seconds(dt.date(year + 1, 1, 1)))


_NAME = r"(?:<[^>]+>|[A-Za-z]+)"
_CLOCK = r"[+-]?\d+(?::\d+){0,2}"
_DATE = rf",M(\d+)\.(\d)\.(\d)(?:/({_CLOCK}))?"
_RULE = re.compile(rf"{_NAME}({_CLOCK})(?:{_NAME}({_CLOCK})?{_DATE}{_DATE})?", re.ASCII)


def _follow_rule(rule: str, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yields times and the offsets from then on, in seconds, by a rule such as CET-1CEST,M3.5.0,M10.5.0/3."""
    match = _RULE.fullmatch(rule)
    assert match is not None, rule
    standard, summer, *dates = match.groups()
    offset = -_read_clock(standard)
    if dates[0] is None:
        return
    other = offset + 3600 if summer is None else -_read_clock(summer)
    for year in range(first, last + 1):
        # The clock of a date is that before the change.
        yield _count_seconds(_find_date(year, *map(int, dates[:3]))) + _read_clock(dates[3] or "2") - offset, other
        yield _count_seconds(_find_date(year, *map(int, dates[4:7]))) + _read_clock(dates[7] or "2") - other, offset


def _read_clock(text: str) -> int:
    hours, minutes, seconds, *_ = [*map(int, text.lstrip("+-").split(":")), 0, 0]
    return (-1 if text[0] == "-" else 1) * (hours * 3600 + minutes * 60 + seconds)


def _find_date(year: int, month: int, week: int, weekday: int) -> dt.date:
    """Finds such a day of a month, Sunday being 0; week 5 is the last."""
    first = dt.date(year, month, 1)
    day = first + dt.timedelta((weekday - first.isoweekday()) % 7 + 7 * (week - 1))
    return day if day.month == month else day - dt.timedelta(7)


def _count_seconds(day: dt.date) -> int:
    return (day.toordinal() - _EPOCH_DAY) * 86_400

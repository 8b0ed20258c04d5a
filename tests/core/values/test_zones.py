"""Offsets of every zone against Python's, which reads the same files in another way, and the edges of summer time."""

from __future__ import annotations

import datetime as dt
import random
from importlib import resources
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import tzdata

from lookback.core.values.times import EPOCH
from lookback.core.values.zones import find_zone, list_zones

_US = dt.timedelta(microseconds=1)


def offsets(name: str, times: list[int]) -> list[int]:
    zone = find_zone(name)
    assert zone is not None
    return zone.find_offsets(np.array(times, dtype=np.int64)).tolist()


def test_offsets_of_every_zone_equal_pythons() -> None:
    chance = random.Random(3)
    first, last = ((dt.datetime(year, 1, 2, tzinfo=dt.timezone.utc) - EPOCH) // _US for year in (1, 9999))
    for name in sorted(list_zones()):
        with resources.files(tzdata).joinpath("zoneinfo", *name.split("/")).open("rb") as file:
            known = ZoneInfo.from_file(file)
        zone = find_zone(name)
        assert zone is not None
        starts = zone.starts[1:]
        edges = [each + step for each in starts[:60].tolist() + starts[-20:].tolist() for step in (-1, 0)]
        edges = [each for each in edges if each > first]
        times = [*edges, *(chance.randrange(first, last) for _ in range(40))]
        # 1900 to 2100, where most changes are.
        times += [chance.randrange(-2_208_988_800, 4_102_444_800) * 1_000_000 for _ in range(60)]
        expected = [(EPOCH + time * _US).astimezone(known).utcoffset() // _US for time in times]
        assert offsets(name, times) == expected, name


@pytest.mark.parametrize(
    ("name", "seconds"),
    [("Z", 0), ("+00:00", 0), ("-05:30", -19_800), ("+18:00", 64_800), ("UTC", 0), ("Asia/Kathmandu", 20_700)],
)
def test_c12_10_a_zone_is_a_region_or_a_distance(name: str, seconds: int) -> None:
    assert offsets(name, [10**15]) == [seconds * 1_000_000]


@pytest.mark.parametrize(
    "name",
    ["", " UTC", "europe/berlin", "Mars/Base", "+18:01", "+2", "+02", "+02:60", "CST", "../tzdata", "Europe", "Europe/Berlin\0", "GMT+1", "\u0661"],
)  # fmt: skip
def test_c12_10_any_other_text_is_no_zone(name: str) -> None:
    assert find_zone(name) is None


def test_c12_10_rules_of_summer_time_hold_for_ever() -> None:
    # The last Sunday of March 2400 is the 26th, as in 2000.
    change = (dt.datetime(2400, 3, 26, 1, tzinfo=dt.timezone.utc) - EPOCH) // _US
    assert offsets("Europe/Berlin", [change - 1, change]) == [3600 * 10**6, 7200 * 10**6]
    assert offsets("Europe/Berlin", [2**62, -(2**63)])[1] == 3208 * 10**6

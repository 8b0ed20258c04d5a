"""Finds the watermark after each commit of a stream from the highest event times of its commits.

Without a union, the watermark is the highest event time so far less max_out_of_orderness. A union waits for its slowest
member, unless that one is idle:

    arrival            1      2      3      4      5      6        disorder of a minute, idle: 1 hour
    logins         10:00                        11:20             new events of each member
    payments              10:05  10:50  11:10          11:25
    highest time   10:00  10:05  10:50  11:10  11:20  11:25       of all members
    watermark       9:59   9:59   9:59  11:09  11:09  11:19       before 4 it waits for logins, then logins are idle

A member is idle while the event times of the others exceed, by more than `idle`, the highest event time of all members
as it was when the last event of this member arrived. An event makes it count again, however old it is, but never lowers
the watermark. A member without any event yet does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from lookback.core.streams.declaration import Stream
from lookback.core.streams.unions import Union
from lookback.core.values.keys import Int64s
from lookback.core.values.times import NEVER

# The highest event time of a commit, in microseconds; for a union that of each member with an event in the commit.
Mark = int | Mapping[str, int]


class MemberTimes(NamedTuple):
    """The event times that a union remembers of a member, in microseconds.

    high: its highest event time. heard: the highest event time of all members when its last event arrived.
    """

    high: int
    heard: int


class Reached(NamedTuple):
    """The event times up to a commit: the highest of all (None before the first), and those of a union's members."""

    high: int | None = None
    members: Mapping[str, MemberTimes] = {}

    @classmethod
    def by(cls, mark: Mark | None) -> Reached:
        """Returns the times after a commit with this mark, before which no event came."""
        return cls().then(mark)

    def then(self, mark: Mark | None) -> Reached:
        """Returns the times after a further commit."""
        highest = find_highest(mark)
        if highest is None:
            return self
        high = highest if self.high is None else max(self.high, highest)
        if not isinstance(mark, Mapping):
            return Reached(high)
        members = dict(self.members)
        for name, time in mark.items():
            known = members.get(name)
            members[name] = MemberTimes(time if known is None else max(time, known.high), high)
        return Reached(high, members)

    def watermark(self, stream: Stream) -> int:
        """Returns the watermark that these times alone give; NEVER if they give none."""
        if stream.union is None:
            return NEVER if self.high is None else self.high - stream.max_out_of_orderness
        waits = _list_awaited(stream.union, self.members)
        return min((self.members[name].high - stream.union.members[name] for name in waits), default=NEVER)


def _list_awaited(union: Union, times: Mapping[str, MemberTimes]) -> list[str]:
    """Lists the members for which the watermark waits: those with an event that are not idle."""
    known = [name for name in union.members if name in times]
    return [name for name in known if all(times[other].high - times[name].heard <= union.idle for other in known)]


class Passed(NamedTuple):
    """The times after some commits, and the watermark after each, shape (commits,); NEVER where there is none yet."""

    reached: Reached
    watermarks: Int64s


def pass_marks(stream: Stream, reached: Reached, marks: Iterable[Mark | None]) -> Passed:
    """Finds the watermark after each of some commits, given their marks in order and the times reached before them."""
    if stream.union is None:
        highs = [NEVER if reached.high is None else reached.high, *(NEVER if m is None else m for m in marks)]
        highest = np.maximum.accumulate(np.array(highs, dtype=np.int64))
        last = int(highest[-1])
        watermarks = np.where(highest == NEVER, NEVER, highest - stream.max_out_of_orderness)
        return Passed(Reached(None if last == NEVER else last), watermarks[1:])
    watermark, found = reached.watermark(stream), list[int]()
    for mark in marks:
        if mark is not None:
            reached = reached.then(mark)
            watermark = max(watermark, reached.watermark(stream))
        found.append(watermark)
    return Passed(reached, np.array(found, dtype=np.int64))


def find_highest(mark: Mark | None) -> int | None:
    """Returns the highest event time of a mark, of whichever member."""
    return max(mark.values(), default=None) if isinstance(mark, Mapping) else mark


def read_mark(mark: Any) -> Mark:
    """Reads a mark from JSON. Raises TypeError or ValueError for anything else."""
    return {str(name): int(time) for name, time in mark.items()} if isinstance(mark, dict) else int(mark)


def merge_mark(known: Mark | None, other: Mark | None) -> Mark | None:
    """Merges the marks of two parts of one commit."""
    if known is None or other is None:
        return other if known is None else known
    if isinstance(known, Mapping) and isinstance(other, Mapping):
        names = {**known, **other}
        return {name: max(part[name] for part in (known, other) if name in part) for name in names}
    assert isinstance(known, int)
    assert isinstance(other, int)
    return max(known, other)

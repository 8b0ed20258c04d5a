"""The state that a sequence keeps of a key: the rows that steps may take, and waits for absent events.

Steps a and b, then `absent` c within 5 minutes:

    minute     0    1    2    7    8
    row        a    b    b         c       rows        a, b, b until no window that an event in time may see has them
    waits           +1   +2   1!           pending     each b begins a wait, over after minutes 6 and 7
                                           raised      a wait is over and alerts; c would retract it if c were not late

With fixed expiry there is also the match that is open.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from lookback.core.judging.taken import Row, SortKey, sort_key

# Returns the time of a row, or of the row that started a wait.
time_of = attrgetter("time")


@dataclass(eq=False)
class Wait:
    """A wait for an absent event, which starts when an event completes the steps before it.

    It refers to the rows that the steps took by sort key and keeps no copies, so that state only grows with the rows.

    Attributes:
        time: The time of the row that started it.
        number: The number of that row.
        since: Rows with a lower number did not count for it.
        begins: As in `Answer`.
        version: The version that raised the alert; None until the wait is over.
        is_complete: Whether the steps could see all their events.
    """

    time: int
    number: int
    since: int
    begins: list[SortKey]
    version: int | None
    is_complete: bool

    @property
    def first_time(self) -> int:
        """The time of the first row that the steps took."""
        time, _ = self.begins[0]
        return time

    @classmethod
    def from_value(cls, value: Sequence[Any]) -> Wait:
        """Decodes the output of `to_value`."""
        time, number, since, begins, version, is_complete = value
        return cls(time, number, since, [(at, each) for at, each in begins], version, is_complete)

    def to_value(self) -> list[Any]:
        """Encodes the wait for a keyed table."""
        return [self.time, self.number, self.since, self.begins, self.version, self.is_complete]


class FixedMatch(NamedTuple):
    """A match with fixed expiry: its start time, and the number of the first row that can belong to it."""

    begin: int
    since: int


@dataclass(eq=False)
class KeyState:
    """The state of one key.

    Attributes:
        stored_key: The values of the group_by fields.
        rows: The rows that count, sorted.
        held: The rows that an alert has removed but waits still refer to, sorted.
        next: The number of the next row.
        since: The number of the first row that counts.
        match: The current match, with fixed expiry.
        pending: The waits that are not over, sorted.
        raised: The waits that are over, sorted.
    """

    stored_key: list[Any]
    rows: list[Row] = field(default_factory=list)
    held: list[Row] = field(default_factory=list)
    next: int = 0
    since: int = 0
    match: FixedMatch | None = None
    pending: list[Wait] = field(default_factory=list)
    raised: list[Wait] = field(default_factory=list)

    @classmethod
    def from_value(cls, value: Mapping[str, Any]) -> KeyState:
        """Decodes the output of `to_value`, or the rows of a key in columns."""
        if "waits" not in value:
            rows = [Row(time, str(each), bits, values, number) for time, number, bits, each, *values in value["rows"]]
            return cls([], rows, next=max(row.number for row in rows) + 1)
        state = cls(value["key"], _read_rows(value["rows"]), _read_rows(value["held"]), value["next"], value["since"])
        state.match = FixedMatch(*value["match"]) if value["match"] else None
        for wait in map(Wait.from_value, value["waits"]):
            (state.pending if wait.version is None else state.raised).append(wait)
        return state

    def to_value(self) -> dict[str, Any]:
        """Encodes the state for a keyed table."""
        return {
            "key": self.stored_key,
            "rows": self.rows,
            "held": self.held,
            "next": self.next,
            "since": self.since,
            "match": self.match,
            "waits": [wait.to_value() for wait in (*self.pending, *self.raised)],
        }

    @property
    def has_only_rows(self) -> bool:
        """True if only the rows that count must be kept."""
        return not (self.held or self.match or self.pending or self.raised)

    def match_rows(self, within: int) -> list[Row]:
        """Returns the rows of the match, sorted."""
        if self.match is None:
            return []
        low = bisect_left(self.rows, self.match.begin, key=time_of)
        high = bisect_right(self.rows, self.match.begin + within, key=time_of)
        return [row for row in self.rows[low:high] if row.number >= self.match.since]

    def empty(self) -> None:
        """Resets the key, so that only rows that arrive later count."""
        if self.pending or self.raised:
            self.held = sorted([*self.held, *self.rows], key=sort_key)
        self.rows, self.since, self.match = [], self.next, None

    def delete(self, time: int, event_id: str, within: int) -> None:
        """Removes an event, so that it no longer counts for a step and no longer starts or ends a wait."""

        def without_event(rows: list[Row]) -> list[Row]:
            return [row for row in rows if (row.time, row.id) != (time, event_id)]

        own = {row.number for row in (*self.rows, *self.held) if (row.time, row.id) == (time, event_id)}

        members = without_event(self.match_rows(within))
        self.rows, self.held = without_event(self.rows), without_event(self.held)
        for waits in (self.pending, self.raised):
            waits[:] = [wait for wait in waits if wait.time != time or wait.number not in own]
        if self.match is not None:
            # The match continues from the first remaining row of step one.
            begin = next((row.time for row in members if row.bits & 1), None)
            self.match = None if begin is None else FixedMatch(begin, self.match.since)

    def forget(self, oldest: int, within: int, lateness: int, wait: int) -> int | None:
        """Drops everything that no event from `oldest` on needs.

        Returns the watermark at which the key must be processed again; None if no state remains.
        """
        self.raised = [each for each in self.raised if each.time + wait >= oldest]
        # Rows are kept as long as the waits that refer to them.
        counted, emptied = [oldest - within], list[int]()
        for each in (*self.pending, *self.raised):
            (counted if each.since >= self.since else emptied).append(each.first_time)
        self.rows = self.rows[bisect_left(self.rows, min(counted), key=time_of) :]
        self.held = self.held[bisect_left(self.held, min(emptied), key=time_of) :] if emptied else []
        if self.match is not None and self.match.begin + within < oldest:
            self.match = None
        if not (self.rows or self.pending or self.raised or self.match):
            return None
        wakes = [each.time + wait + 1 for each in self.pending[:1]]
        wakes += [each.time + wait + lateness + 1 for each in self.raised[:1]]
        wakes += [row.time + within + lateness + 1 for row in self.rows[-1:]]
        wakes += [self.match.begin + within + lateness + 1] if self.match else []
        return min(wakes)


def _read_rows(listed: Iterable[Sequence[Any]]) -> list[Row]:
    return [Row(*each) for each in listed]

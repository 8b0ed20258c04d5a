"""The sessions of one key: its rows, cut into sessions, and how a row that arrives changes these.

With a gap of 10 minutes, the row of 10:09 arrives last:

    rows       10:00  10:05           10:16  10:20
    sessions   [----------]           [----------]
    10:09      [---------------------------------]      `Sessions.add`: one session changed, that of 10:16 is gone
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Any

from lookback.core.values.times import NEVER_DUE

# An event of a session, as tables store it: its time, then one value per slot. A value is None if the slot's measure
# leaves the event out. Rows written before a slot was added lack its value.
SessionRow = list[Any]

_time, _start = itemgetter(0), attrgetter("start")


@dataclass(eq=False)
class OpenSession:
    """One session: its rows by (time, arrival), at least one, and a log of the same rows in the order of joining.

    A growing session only appends to its log, so that a length of the log identifies the session at some moment.
    """

    rows: list[SessionRow]
    log: list[SessionRow]

    @property
    def start(self) -> int:
        """The time of its first row."""
        time: int = self.rows[0][0]
        return time

    @property
    def last(self) -> int:
        """The time of its last row."""
        time: int = self.rows[-1][0]
        return time


@dataclass
class Sessions:
    """The sessions of one key, by time.

    A session includes the rows that follow its first one with gaps of at most `gap`, up to `longest` after it.
    """

    gap: int
    longest: int
    listed: list[OpenSession] = field(default_factory=list)

    @classmethod
    def from_rows(cls, gap: int, longest: int, rows: list[SessionRow]) -> Sessions:
        """Cuts rows, sorted by time, into sessions."""
        sessions = cls(gap, longest)
        sessions.listed = [OpenSession(part, list(part)) for part in sessions._cut(rows)]
        return sessions

    def end(self, session: OpenSession) -> int:
        """Returns the exclusive end of a session."""
        rows = session.rows
        end: int = min(rows[-1][0] + self.gap + 1, rows[0][0] + self.longest)
        return end

    def is_cut(self, session: OpenSession) -> bool:
        """Returns whether the session ends because it reached its maximum length."""
        return session.start + self.longest < session.last + self.gap + 1

    def forget(self, until: int) -> None:
        """Drops the sessions that end at or before `until`."""
        while self.listed and self.end(self.listed[0]) <= until:
            del self.listed[0]

    def add(self, row: SessionRow, closed_until: int) -> tuple[list[OpenSession], list[int]] | None:
        """Adds a row, if the session that it would belong to ends after `closed_until`.

        Returns the new and changed sessions, and the starts that no session has any longer; None if the row was not
        added.
        """
        time = int(row[0])
        first, last = self._find_region(time)
        if first < last and time >= self.listed[first].start + self.longest:
            # That session ended before the row, so the row begins a new session or becomes the first of the next one.
            first += 1
        before = self.listed[first:last]
        start = min(time, before[0].start) if before else time
        joined, final = 0, time
        for session in before:
            if session.start >= start + self.longest:
                break
            if session.last >= start + self.longest:
                return self._cut_anew(row, closed_until, first, last)
            joined, final = joined + 1, max(final, session.last)
        if min(final + self.gap + 1, start + self.longest) <= closed_until:
            return None
        parts = before[:joined]
        gone = [session.start for session in parts if session.start != start]
        merged = _merge(parts, row)
        self.listed[first : first + joined] = [merged]
        return [merged], gone

    def _cut_anew(
        self, row: SessionRow, closed_until: int, first: int, last: int
    ) -> tuple[list[OpenSession], list[int]] | None:
        """Adds a row that makes a session of listed[first:last] too long: cuts all their rows into new sessions."""
        before = self.listed[first:last]
        rows = [each for session in before for each in session.rows]
        rows.insert(bisect_right(rows, row[0], key=_time), row)
        known = {(id(session.rows[0]), id(session.rows[-1])): session for session in before}
        after, changed = [], []
        for part in self._cut(rows):
            session = known.get((id(part[0]), id(part[-1])))
            is_own = any(each is row for each in part)
            if session is None or is_own:
                session = OpenSession(part, list(part))
                changed.append(session)
            if is_own and self.end(session) <= closed_until:
                return None
            after.append(session)
        self.listed[first:last] = after
        starts = {session.start for session in after}
        return changed, [session.start for session in before if session.start not in starts]

    def _find_region(self, time: int) -> tuple[int, int]:
        """Finds the sessions listed[first:last] that a row at `time` may change, each at most a gap from the next."""
        first = bisect_right(self.listed, time, key=_start) - 1
        if first < 0 or self.listed[first].last + self.gap < time:
            first += 1
        last, end = first, time
        while last < len(self.listed) and self.listed[last].start - self.gap <= end:
            end = max(end, self.listed[last].last)
            last += 1
        return first, last

    def _cut(self, rows: list[SessionRow]) -> list[list[SessionRow]]:
        """Cuts rows, sorted by time, into the rows of each session."""
        sessions: list[list[SessionRow]] = []
        end = -NEVER_DUE
        for row in rows:
            time = row[0]
            if time >= end:
                sessions.append([])
                longest_end = time + self.longest
            sessions[-1].append(row)
            end = min(time + self.gap + 1, longest_end)
        return sessions


def _merge(parts: list[OpenSession], row: SessionRow) -> OpenSession:
    """Merges consecutive sessions and a row that joins them.

    The rows of the smaller sessions move into the largest one, so that few rows move.
    """
    if not parts:
        return OpenSession([row], [row])
    at = max(range(len(parts)), key=lambda each: len(parts[each].rows))
    session = parts[at]
    left = [each for part in parts[:at] for each in part.rows]
    right = [each for part in parts[at + 1 :] for each in part.rows]
    session.rows[:0] = left
    session.rows += right
    session.rows.insert(bisect_right(session.rows, row[0], key=_time), row)
    session.log += [*left, *right, row]
    return session

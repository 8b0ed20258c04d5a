"""Decides which events are late, and which late events a rule still accepts.

An event is late if and only if its time is below the watermark that it is judged against. A rule accepts late events up
to its allowed lateness. An event that arrives after a later event of its key is out of order, which is a different
property: see `aggregation.grouping`. All times are in microseconds.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from lookback.core.streams.alerts import LateEvent
from lookback.core.streams.events import Events
from lookback.core.values.columns import Mask
from lookback.core.values.keys import Int64s
from lookback.core.values.times import to_utc
from lookback.core.values.windows import TiledWindow

_UNWANTED, _DISCARDED, _RECORDED, _EVALUATED = range(4)
_ACTIONS = {_DISCARDED: "discarded", _RECORDED: "recorded", _EVALUATED: "evaluated"}
_Times = TypeVar("_Times", int, Int64s)


def find_in_time(times: Int64s, watermarks: Int64s, allowed_lateness: int, tiles: TiledWindow | None = None) -> Mask:
    """Marks the events that are not late, or not later than allowed.

    With `tiles`, the end of the last window that covers the event decides instead of its time.
    """
    earliest = earliest_in_time(watermarks, allowed_lateness)
    in_time: Mask = times >= earliest if tiles is None else tiles.last_start(times) + tiles.size > earliest
    return in_time


def earliest_in_time(watermark: _Times, allowed_lateness: int) -> _Times:
    """Returns the earliest time that is still in time; the rule discards earlier events.

    A window or session is closed for good once its exclusive end is at or below this time.
    """
    return watermark - allowed_lateness


class LateEvents:
    """The late events of a segment, and the strongest action of any rule on each: discard, record or evaluate.

    `watermarks` has the watermark of each event, and `is_late` marks the late ones.
    """

    def __init__(self, events: Events, watermarks: Int64s) -> None:
        self._events, self._watermarks = events, watermarks
        self.is_late: Mask = events.times < watermarks
        self._positions = np.flatnonzero(self.is_late)
        self._actions: NDArray[np.int8] = np.full(len(self._positions), _UNWANTED, dtype=np.int8)

    def record(self, wanted: Mask, taken: Mask, judged: Mask) -> None:
        """Records what a rule did with the late events that it wants."""
        at = self._positions
        if not len(at):
            return
        action = np.where(judged[at], _EVALUATED, np.where(taken[at], _RECORDED, _DISCARDED))
        self._actions = np.maximum(self._actions, np.where(wanted[at], action, _UNWANTED)).astype(np.int8)

    def list_rows(self, stream: str) -> list[LateEvent]:
        """Returns a row of late_events for each late event that a rule wants, in order of arrival."""
        rows = []
        for at, action in zip(self._positions.tolist(), self._actions.tolist(), strict=True):
            if action == _UNWANTED:
                continue
            time, commit = int(self._events.times[at]), int(self._events.commits[at])
            late_by = int(self._watermarks[at]) - time
            rows.append(LateEvent(stream, self._events.id_text(at), to_utc(time), commit, late_by, _ACTIONS[action]))
        return rows

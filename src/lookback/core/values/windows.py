"""The specifications of windows and sequences; times and durations are in microseconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

EVENT, LOOKBACK, TUMBLING, SLIDING, SESSION, SEQUENCE = (
    "event",
    "lookback",
    "tumbling",
    "sliding",
    "session",
    "sequence",
)
# Rules of these kinds judge each event over a window that ends at it, when it arrives.
PER_EVENT = (EVENT, LOOKBACK)
_Times = TypeVar("_Times", int, npt.NDArray[np.int64])


def align_down(times: _Times, resolution: int) -> _Times:
    """Rounds times down to a multiple of `resolution` since 1970, also before 1970; 0 leaves them unchanged."""
    return times // resolution * resolution if resolution else times


@dataclass(frozen=True)
class Lookback:
    """A window that ends at each event: for an event at t it covers [t - delay - size, t - delay], both ends included.

    resolution: the window begins at the last multiple of it at or before t - delay - size; 0 for exactly there.
    """

    size: int
    delay: int = 0
    resolution: int = 0

    kind = LOOKBACK

    def bounds(self, times: _Times) -> tuple[_Times, _Times]:
        """Returns the first and last time, both included, of the window of an event at each of `times`."""
        last = times - self.delay if self.delay else times
        return align_down(last - self.size, self.resolution), last

    def find_affected_times(self, time: int) -> tuple[int, int]:
        """Returns the first and last time, both included, of the events whose windows cover `time`."""
        last_begin = align_down(time, self.resolution) + self.resolution - 1 if self.resolution else time
        return time + self.delay, last_begin + self.delay + self.size


@dataclass(frozen=True)
class Moment(Lookback):
    """The window of an event rule: the event alone, so nothing is kept."""

    size: int = 0

    kind = EVENT


@dataclass(frozen=True)
class TiledWindow:
    """Tumbling and sliding windows [a, a + size) for every a = k * slide + offset; tumbling if slide equals size."""

    size: int
    slide: int
    offset: int = 0

    @property
    def kind(self) -> str:
        """`tumbling` or `sliding`."""
        return TUMBLING if self.slide == self.size else SLIDING

    def last_start(self, times: _Times) -> _Times:
        """Returns the start of the last window that covers each of `times`; the one before starts `slide` earlier."""
        return (times - self.offset) // self.slide * self.slide + self.offset

    def find_ends(self, after: int, until: int) -> range:
        """Returns the ends of windows in (after, until], ascending."""
        return range(self.last_start(after - self.size) + self.size + self.slide, until + 1, self.slide)


@dataclass(frozen=True)
class Session:
    """Windows of events at most `gap` apart; the exclusive end is the last event + gap + 1 microsecond."""

    gap: int

    kind = SESSION


Window = Lookback | TiledWindow | Session


@dataclass(frozen=True)
class Step:
    """A step of a sequence: from `at_least` to `at_most` events that satisfy `condition`.

    absent: no event may satisfy the condition up to `within` after the step before; only the last step can be absent.
    key: the fields that stand for those of group_by, one for each, in the order in which group_by is written; None for
    group_by itself.
    """

    name: str
    condition: str
    at_least: int = 1
    at_most: int | None = None
    absent: bool = False
    within: int = 0
    key: tuple[str, ...] | None = None


@dataclass(frozen=True)
class StepSequence:
    """Steps in order, within a span of event time.

    Attributes:
        within: The span, in microseconds.
        steps: The steps.
        until: The condition of events that end matches; None for none.
        expiry: Whether the span ends at the event (sliding), or begins at the first event (fixed).
        take: Whether an event may belong to many matches (all), or one partial match waits at each stage (once).
        until_key: The key of `until`, as that of a step.
    """

    within: int
    steps: tuple[Step, ...]
    until: str | None = None
    expiry: str = "sliding"
    take: str = "all"
    until_key: tuple[str, ...] | None = None

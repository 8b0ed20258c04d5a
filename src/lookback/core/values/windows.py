"""What a rule can look at: windows and sequences. Times and durations in microseconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

LOOKBACK, TUMBLING, SLIDING, SESSION, SEQUENCE = ("lookback", "tumbling", "sliding", "session", "sequence")
_Times = TypeVar("_Times", int, npt.NDArray[np.int64])


def aligned(times: _Times, resolution: int) -> _Times:
    """Each of `times` down to a multiple of `resolution` since 1970, also before 1970; with 0 as it is."""
    return times // resolution * resolution if resolution else times


@dataclass(frozen=True)
class Lookback:
    """A window that ends at an event: of one at t it covers [t - delay - size, t - delay], both ends included.

    resolution: the window begins at the multiple of it at or before t - delay - size; 0 for exactly there.
    """

    size: int
    delay: int = 0
    resolution: int = 0

    kind = LOOKBACK

    def bounds(self, times: _Times) -> tuple[_Times, _Times]:
        """First and last time covered, both included, of an event at each of `times`."""
        last = times - self.delay
        return aligned(last - self.size, self.resolution), last

    def seen_from(self, time: int) -> tuple[int, int]:
        """First and last time, both included, of the events whose windows cover `time`."""
        begun = aligned(time, self.resolution) + self.resolution - 1 if self.resolution else time
        return time + self.delay, begun + self.delay + self.size


@dataclass(frozen=True)
class TiledWindow:
    """Tumbling and sliding windows: [a, a + size) for every a = k * slide + offset; tumbling: slide equals size."""

    size: int
    slide: int
    offset: int = 0

    @property
    def kind(self) -> str:
        """`tumbling` or `sliding`."""
        return TUMBLING if self.slide == self.size else SLIDING

    def last_start(self, times: _Times) -> _Times:
        """Start of the last window that covers each of `times`; the others start `slide` earlier each."""
        return (times - self.offset) // self.slide * self.slide + self.offset


@dataclass(frozen=True)
class Session:
    """Windows of events that lie `gap` or less apart; the exclusive end is the last event + gap + 1 microsecond."""

    gap: int

    kind = SESSION


Window = Lookback | TiledWindow | Session


@dataclass(frozen=True)
class Step:
    """A step of a sequence: at least `at_least` events that satisfy `condition`, and no more than `at_most`.

    absent: no event may satisfy the condition up to `within` after the step before; only a last step can be absent.
    """

    name: str
    condition: str
    at_least: int = 1
    at_most: int | None = None
    absent: bool = False
    within: int = 0


@dataclass(frozen=True)
class StepSequence:
    """Steps in order, within a span of event time. expiry: sliding (it ends at the event) or fixed (from the first on)."""

    within: int
    steps: tuple[Step, ...]
    until: str | None = None
    expiry: str = "sliding"

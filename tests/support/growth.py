"""How time grows with the work: processor time, of which the least of some turns counts."""

from __future__ import annotations

import gc
from collections.abc import Callable

# The machine may be busy with other things in one of the attempts.
_ATTEMPTS = 12


def takes_at_most(times: float, few: Callable[[], float], many: Callable[[], float], turns: int = 4) -> bool:
    """Whether the second takes at most so many times the processor time of the first. Each does its work and returns its time."""
    for _ in range(_ATTEMPTS):
        least, most = _find_least_seconds(few, many, turns=turns)
        if most <= times * least:
            return True
    return False


def grows_in_proportion(seconds_for: Callable[[int], float], size: int) -> bool:
    """
    Whether time grows at most 2.2 times at each doubling, from half the size to four times it.

    Three doublings are asked at once, since a doubling by itself leaves a tenth for noise and for what grows in
    steps (numpy's ways through small and large arrays, a processor's caches): in proportion is 8 times the time,
    what is allowed is 10.6 times, and quadratic is 64 times.

    seconds_for: does the work of a size, and returns its time.
    """
    return takes_at_most(2.2**3, lambda: seconds_for(size // 2), lambda: seconds_for(4 * size), turns=2)


def _find_least_seconds(*measured: Callable[[], float], turns: int) -> list[float]:
    """The least processor time of each, of turns that alternate; without the garbage collector, as timeit."""
    gc.collect()
    gc.disable()
    try:
        found = [[measure() for measure in measured] for _ in range(turns)]
    finally:
        gc.enable()
    return [min(seconds) for seconds in zip(*found, strict=True)]

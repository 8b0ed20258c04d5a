"""The cost of windows: a small batch costs nothing for the rows and windows that it does not touch."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dev.bench.shapes import DAY, HOUR, MINUTE, SECOND, Shard
from growth import takes_at_most
from lookback.core.engine import batch
from lookback.core.state import storedruns
from lookback.core.values.windows import TiledWindow

SLIDING = {
    "group_by": ["k"], "window": {"sliding": "1 day", "slide": "5 minutes"}, "measures": {"m": "sum(amount)"}, "when": "m < 0",
}  # fmt: skip


def after(rows: int, step: int, rule: dict[str, Any] = SLIDING) -> Callable[[], float]:
    """Judges, each time it is called, 200 events after so many of the first minutes of a day; `step` later each time."""
    shard, keys = Shard(rule), np.arange(200)
    shard.judge(DAY + np.arange(rows) * MINUTE // rows, np.arange(rows) % 200)
    ends = iter(range(DAY + 2 * MINUTE, DAY + 100 * MINUTE, step))

    def judge() -> float:
        return shard.judge(np.full(200, next(ends)), keys)

    return judge


def test_c3_a_batch_in_which_no_window_ends_costs_nothing_for_the_rows_that_are_kept() -> None:
    assert takes_at_most(2.2, after(5_000, SECOND), after(80_000, SECOND))


@pytest.mark.parametrize("measure", ["last(amount)", "first(amount)"])
def test_c3_the_last_value_costs_nothing_for_the_rows_that_are_kept(measure: str) -> None:
    rule = {**SLIDING, "window": {"lookback": "1 day", "delay": "1 microsecond"}, "measures": {"m": measure}}
    assert takes_at_most(2.2, after(5_000, SECOND, rule), after(80_000, SECOND, rule))


def test_c3_of_a_long_batch_one_part_at_a_time_takes_the_memory_of_judging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "MAX_EVENTS", 4_000)
    rule = {**SLIDING, "window": "1 minute"}
    few, many = find_peak(40_000, rule), find_peak(80_000, rule)
    assert many <= 2.2 * few
    # Beside the events themselves, which take 48 bytes each; 217 where all were judged at once.
    assert many - few <= 40_000 * 120


def find_peak(rows: int, *rules: dict[str, Any]) -> int:
    """The most bytes that are held while so many events of one batch are judged, in commits of 1,000."""
    shard, at = Shard(*rules), np.arange(rows)
    times, keys, numbers = DAY + at * SECOND, at % 200, at % 50
    tracemalloc.start()
    shard.judge(times, keys, numbers, commits=rows // 1_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_c3_of_many_measures_only_those_that_are_judged_have_indexes_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "MAX_EVENTS", 4_000)
    sums = {"a" if at == 0 else f"m{at}": f"sum(amount) filter (where n <> {at})" for at in range(20)}
    groupings = (["k"], ["n"], ["k", "n"], [])
    rules = [{"group_by": by, "window": "10 days", "when": "a < 0", "measures": sums} for by in groupings]
    monkeypatch.setattr(storedruns, "_MAX_UNSAVED_BYTES", 0)
    bounded = find_peak(20_000, *rules)
    monkeypatch.setattr(storedruns, "_MAX_UNSAVED_BYTES", 2**40)
    assert find_peak(20_000, *rules) >= 1.4 * bounded


def once(rules: list[dict[str, Any]], rows: int, keys: int) -> Callable[[], float]:
    """Judges, each time it is called, events of an hour by rules that are new."""
    return lambda: Shard(*rules).judge(DAY + np.arange(rows) * HOUR // rows, np.arange(rows) % keys)


def early(windows: int, when: str) -> dict[str, Any]:
    """A rule with so many windows an event."""
    window = {"sliding": "10 hours", "slide": f"{10 * 3600 // windows} seconds"}
    return {**SLIDING, "window": window, "when": when, "early": True}


def test_c3_an_event_costs_nothing_for_the_windows_that_hold_the_same_events_as_their_neighbours() -> None:
    assert takes_at_most(8, once([early(60, "m < 0")], 1_000, 50), once([early(1_000, "m < 0")], 1_000, 50))


def test_c3_an_alert_costs_nothing_for_the_other_windows_of_its_key_that_have_alerts() -> None:
    assert takes_at_most(16 * 1.6, once([early(50, "m > 0")], 8, 1), once([early(800, "m > 0")], 8, 1), turns=3)


def test_c3_rules_with_the_same_windows_share_all_but_their_conditions() -> None:
    rules = [{**SLIDING, "window": {"tumbling": "1 minute"}, "when": f"m < {-at}"} for at in range(20)]
    assert takes_at_most(3, once(rules[:1], 5_000, 500), once(rules, 5_000, 500))


@pytest.mark.parametrize(
    ("after", "until", "ends"),
    [(12, 13, []), (13, 14, [14]), (14, 18, []), (14, 19, [19]), (13, 19, [14, 19]), (-7, -1, [-6, -1]), (-6, -2, []), (5, 5, [])],
)  # fmt: skip
def test_c3_the_ends_that_a_watermark_passes(after: int, until: int, ends: list[int]) -> None:
    """
        -6   -1    4    9    14   19
    ─────┤────┤────┤────┤────┤────┤─▶   ends of windows of 12 that begin every 5 from 2 on
    """
    window = TiledWindow(12, 5, 2)
    assert list(window.find_ends(after, until)) == ends

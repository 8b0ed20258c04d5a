"""From which values on the checks of health report a finding, and why."""

from __future__ import annotations

import datetime as dt
from typing import NamedTuple


class Threshold(NamedTuple):
    """The value from which on a check reports a finding, its unit, and the reason for this value."""

    value: float
    unit: str
    why: str


# How far back recent figures go. The thresholds below apply to this period.
RECENT = dt.timedelta(hours=1)
THRESHOLDS: dict[str, Threshold] = {
    "silent": Threshold(
        120, "seconds", "a working evaluation writes metrics every 30 seconds; four times that is silence"
    ),
    "unjudged": Threshold(
        300,
        "seconds",
        "starting Spark, a first batch and a new plan together take less, so a commit should not wait longer",
    ),
    "behind": Threshold(
        60, "seconds", "events should be judged within seconds; a batch of a backlog takes up to a minute"
    ),
    "behind_growing": Threshold(
        60,
        "seconds",
        "longer than a batch takes, so a lag that grew by this within 10 minutes will not go away by itself",
    ),
    "rejected_share": Threshold(0.1, "of the events", "a single bad file is less; more means that the source changed"),
    "discarded_share": Threshold(
        0.01, "of the events", "rules miss all discarded events; a sound source has fewer stragglers"
    ),
    "late_share": Threshold(
        0.1, "of the events", "late events are judged, but windows and absences have given their results by then"
    ),
    "late_least": Threshold(100, "events", "a share of fewer events is not significant"),
    "watermark_stuck": Threshold(
        600,
        "seconds",
        "event time follows the clock, so if events arrive and the watermark does not move, one event holds it",
    ),
    "watermark_ahead": Threshold(
        600,
        "seconds",
        "clocks differ by seconds; with a watermark further ahead, all events are late until the clock catches up",
    ),
    "watermark_behind": Threshold(
        3_600, "seconds", "windows and absences end with the watermark, so their alerts are delayed by as much"
    ),
    "state_growth": Threshold(2, "times", "windows that fill for the first time also grow, but only once"),
    "state_least": Threshold(1_000_000, "rows", "a few megabytes; growth below that costs little"),
    "warming_stuck": Threshold(600, "seconds", "the history of twenty million events takes half of that"),
    "storm": Threshold(1_000, "alerts", "nobody can review this many alerts of one rule in an hour"),
}

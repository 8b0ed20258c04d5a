"""The figures of a stream that tell whether it is healthy."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lookback.core.operations.thresholds import THRESHOLDS
from lookback.core.streams.metrics import RuleCounts


@dataclass(frozen=True)
class Sample:
    """The columns of the table `metrics` that health uses. `lag` is in seconds; `rules` has counts by rule_id."""

    at: dt.datetime
    events: int
    late: int
    discarded: int
    lag: float
    watermark: dt.datetime | None
    state_rows: int | None
    stages: Mapping[str, int] = field(default_factory=dict)
    rules: Mapping[str, RuleCounts] = field(default_factory=dict)


class WarmUp(NamedTuple):
    """A version that waits for the history of its windows.

    Attributes:
        rule_id: The rule.
        version: The number of the version.
        since: When it began to wait.
        named: How many pieces of its history are published.
        pieces: How many pieces its history has; 0 if not known yet.
    """

    rule_id: str
    version: int
    since: dt.datetime
    named: int
    pieces: int


def describe_warm_up(each: WarmUp) -> str:
    """Describes how far the history of a waiting version is."""
    how_far = (
        f"{each.named} of {each.pieces} pieces of its history are published"
        if each.pieces
        else "its history is being built"
    )
    return f"version {each.version} of rule {each.rule_id} since {each.since:%Y-%m-%dT%H:%M:%SZ}: {how_far}"


@dataclass(frozen=True)
class Figures:
    """The figures of a stream at the time `now` (aware).

    Attributes:
        stream: The name of the stream.
        now: The time of the figures.
        rules: The number of active and shadow rules in the rules table.
        quarantined: Ids of the rules that the engine took out of service.
        committed: The last commit of the events table.
        judged: The last commit judged.
        waiting: The number of commits that add rows and are not judged.
        lag: How many seconds the oldest waiting commit has waited.
        newest: The time of the last commit.
        samples: Rows of the table `metrics` of the last hour, oldest first.
        last_sample: When the newest row of `metrics` was written.
        failing: rule_id -> the message of its last failure in the last hour.
        refused: rule_id -> why its last row was rejected.
        rejected: The number of rows that ingest rejected in the last hour.
        reason: Why the newest of these rows was rejected.
        ingested: The number of rows that ingest accepted in the last hour.
        warming: The versions that wait for the history of their windows.
        leader: A description of the event that moved the watermark furthest ahead in the last hour; empty if not known.
        other_tables: How tables differ from those that the evaluation has read, one sentence each.
        account: The sums of the last rounds of ingest, by name; None if not known.
    """

    stream: str
    now: dt.datetime
    rules: int = 0
    quarantined: Sequence[str] = ()
    committed: int | None = None
    judged: int | None = None
    waiting: int = 0
    lag: float = 0.0
    newest: dt.datetime | None = None
    samples: Sequence[Sample] = ()
    last_sample: dt.datetime | None = None
    failing: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    rejected: int = 0
    reason: str = ""
    ingested: int = 0
    warming: Sequence[WarmUp] = ()
    leader: str = ""
    other_tables: Sequence[str] = ()
    account: Mapping[str, Any] | None = None

    @property
    def furthest(self) -> Sample | None:
        """The sample of the last hour whose watermark was furthest ahead of its time."""
        known = [(sample.watermark - sample.at, sample) for sample in self.samples if sample.watermark is not None]
        return max(known, key=lambda pair: pair[0])[1] if known else None

    @property
    def is_silent(self) -> bool:
        """True if no evaluation has written metrics recently."""
        if self.last_sample is None:
            return True
        return (self.now - self.last_sample).total_seconds() > THRESHOLDS["silent"].value

    @property
    def rule_counts(self) -> dict[str, RuleCounts]:
        """The counts of each rule in the last hour."""
        counts: dict[str, RuleCounts] = {}
        for sample in self.samples:
            for rule_id, each in sample.rules.items():
                counts[rule_id] = counts.get(rule_id, RuleCounts()) + each
        return counts

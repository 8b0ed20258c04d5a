"""Finds how far a sequence had come when an event arrived: which steps had their events, and which lacked some.

The engine judges the counted events by a rule with only the first steps, the last of which needs just one event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lookback.core.explaining.evidence import Clock, Evidence
from lookback.core.explaining.tracing import replay
from lookback.core.judging.lateness import find_in_time
from lookback.core.rules.compiled import CompiledRule
from lookback.core.rules.compiling import compile_rule
from lookback.core.streams.arrival import arrival_number
from lookback.core.streams.declaration import Stream
from lookback.core.streams.declarations import Declarations
from lookback.core.streams.events import Events
from lookback.core.streams.fields import POSITION
from lookback.core.values.columns import Column
from lookback.core.values.keys import Int64s
from lookback.core.values.limits import WIDEST_LIMITS
from lookback.core.values.types import BIGINT

# A sentence names at most this many events of a step, the last ones.
_MAX_NAMED = 5
# Parts of a rule document that may refer to dropped steps, or that only concern what happens with an alert.
_DROPPED = ("message", "tests", "suppress", "reset_on_alert", "effective_from", "effective_until")


@dataclass(frozen=True)
class StepProgress:
    """The events that a step had taken, in time order, and how many it needs; `at_most` None means no upper bound."""

    name: str
    at_least: int
    at_most: int | None
    event_ids: tuple[str, ...]

    @property
    def is_met(self) -> bool:
        """True if the step had the events it needs."""
        return self.at_least <= len(self.event_ids) and (self.at_most is None or len(self.event_ids) <= self.at_most)

    def __str__(self) -> str:
        """The step with the number of its events and the ids of the last ones."""
        count = len(self.event_ids)
        if not count:
            return f"step {self.name} has no event"
        bound = f"at least {self.at_least:,}" if count < self.at_least else f"at most {self.at_most or 0:,}"
        ids = ", ".join([*(["..."] if count > _MAX_NAMED else []), *self.event_ids[-_MAX_NAMED:]])
        return f"step {self.name} has {count:,}{'' if self.is_met else f' of {bound}'} ({ids})"


@dataclass(frozen=True)
class Progress:
    """How far the steps of a sequence had come with an event. A wait for an absence is not among the steps.

    Attributes:
        steps: The steps, from the events that count.
        untimed: The steps without the limit `within`, if they come further then; else empty.
        gap: The microseconds from the first event of `untimed` to the event.
    """

    steps: tuple[StepProgress, ...]
    untimed: tuple[StepProgress, ...] = ()
    gap: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        parts = {"steps": self.steps, "untimed": self.untimed}
        return {name: [dict(vars(step)) for step in steps] for name, steps in parts.items()}


def find_progress(evidence: Evidence, at: int) -> Progress:
    """Finds how far the rule's steps had come with the event at a position, from the events that arrived by then."""
    times, spec = evidence.events.times, evidence.rule.spec.sequence
    assert spec is not None
    counted, time = _list_counted(evidence, at), int(times[at])
    in_time = counted if spec.expiry == "fixed" else counted[times[counted] >= time - spec.within]
    steps = _describe_steps(evidence, _follow_steps(evidence, in_time, spec.within))
    taken = _follow_steps(evidence, counted, time - int(times[counted].min()) + 1)
    untimed = _describe_steps(evidence, taken)
    return (
        Progress(steps, untimed, time - int(times[taken[0][0]])) if _rank(untimed) > _rank(steps) else Progress(steps)
    )


def _describe_steps(evidence: Evidence, taken: Sequence[Sequence[int]]) -> tuple[StepProgress, ...]:
    """Describes all steps. `taken` has the positions of the events of the first steps, which have any."""
    assert evidence.rule.sequence is not None
    steps = [each.step for each in evidence.rule.sequence.steps]
    listed = [*taken, *[()] * (len(steps) - len(taken))]
    return tuple(
        StepProgress(step.name, step.at_least, step.at_most, tuple(evidence.events.id_text(at) for at in positions))
        for step, positions in zip(steps, listed, strict=True)
    )


def _rank(steps: Sequence[StepProgress]) -> list[tuple[bool, int]]:
    """Returns a sort key for how far steps have come. A step that is met ranks above any step that is not."""
    return [(step.is_met, 0 if step.is_met else len(step.event_ids)) for step in steps]


def _list_counted(evidence: Evidence, at: int) -> Int64s:
    """Lists the positions of the events that count for a match with the event, at any distance, in time order.

    They satisfy `where`, arrived no later than the event, were not too late then, and follow the last one that
    satisfies `until`.
    """
    events, commit = evidence.events, int(evidence.events.commits[at])
    first = max(evidence.first_counted(at + 1), _count_before_rule(evidence, commit))
    before = np.arange(min(first, at), at, dtype=np.int64)
    commits, places = np.unique(events.commits[before], return_inverse=True)
    watermarks = np.array([evidence.clock.watermark_before(each) for each in commits.tolist()], dtype=np.int64)
    counts = find_in_time(events.times[before], watermarks[places], evidence.rule.allowed_lateness)
    counts &= (evidence.is_wanted & evidence.is_kept_after(commit))[before] & (events.times[before] <= events.times[at])
    listed = before[counts]
    listed = listed[np.argsort(events.times[listed], kind="stable")]
    ends = np.flatnonzero(evidence.ends_sequence[listed])
    return np.append(listed[ends[-1] + 1 :] if len(ends) else listed, at)


def _count_before_rule(evidence: Evidence, commit: int) -> int:
    """Returns how many of the key's events arrived before the rule began to keep the state that it had at a commit."""
    rule, count, has_state = evidence.rule, 0, False
    for each in evidence.activations:
        if arrival_number(each.arrival) >= commit or each.rule_id not in ("*", rule.spec.rule_id):
            continue
        is_own = each.rule is not None and each.rule.store == rule.store
        if each.rule_id == "*" or (is_own and not has_state):
            count = evidence.count_arrived(arrival_number(each.arrival))
        if each.rule_id != "*":
            has_state = is_own
    return count


def _follow_steps(evidence: Evidence, positions: Int64s, within: int) -> list[list[int]]:
    """Returns the positions of the events that each step had taken with the last event, for the steps that had any.

    Args:
        evidence: The rule and the events of the key.
        positions: The positions of the events that count, in order.
        within: How long the steps may take, in microseconds.
    """
    # In a single commit nothing is late, so events are judged in time order, and in arrival order at equal times.
    stream = replace(evidence.stream, limits=WIDEST_LIMITS)
    events = evidence.events.take(positions)
    came = {POSITION: Column(BIGINT, np.arange(len(events)))} if POSITION in stream.order_columns else {}
    events = Events.of({**events.columns, **came}, np.ones(len(events), dtype=np.int64), stream)
    first, last = int(events.times[0]), int(events.times[-1])
    assert evidence.rule.sequence is not None
    for count in range(len(evidence.rule.sequence.steps), 0, -1):
        rule = _cut_steps(evidence.rule, count, within, stream)
        known = Evidence(rule, events, Clock(Declarations.of(stream), {}), key=evidence.key)
        rows = replay(known, 1, first=first, last=last)
        # With fixed expiry, a match that began too early has expired.
        rows = [row for row in rows if int(events.times[row.taken[0][0]]) + within >= last]
        if rows:
            return [[int(positions[place]) for place in places] for places in rows[-1].taken]
    return []


def _cut_steps(rule: CompiledRule, count: int, within: int, stream: Stream) -> CompiledRule:
    """Makes a rule with the first steps of a rule, which alerts as soon as the last of them has one event."""
    document = {name: value for name, value in rule.spec.document.items() if name not in _DROPPED}
    sequence = document["sequence"]
    steps = list(sequence["steps"])[:count]
    steps[-1] = {**{name: value for name, value in steps[-1].items() if name != "at_most"}, "at_least": 1}
    return compile_rule(
        {**document, "sequence": {**sequence, "steps": steps, "within": f"{within} microseconds"}}, stream
    )

"""Sequences and absences matched again, from the events of a key, to tell which event each step of an alert took.

Slow and plain on purpose: it starts from an alert's own event and looks at all events around it, where `sequences` goes
on from what it has kept, so that equal results mean something.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from lookback.core.explaining.evidence import MOST_EVENTS, Evidence, KindEvidence, StepEvidence, format_time
from lookback.core.rules.compiled import COUNT, CompiledRule, CompiledStep
from lookback.core.rules.wording import describe_step
from lookback.core.values.columns import Column, Mask, from_values
from lookback.core.values.times import parse_time, to_utc
from lookback.core.values.types import BIGINT, array

# An alert lists the ids of so many events of a sequence.
_MOST_EVIDENCE = 100


class _Match:
    """Events taken by the steps of a sequence, one after another; the last list is the current step's."""

    def __init__(self, evidence: Evidence) -> None:
        assert evidence.rule.sequence is not None
        self._evidence, self.steps = evidence, evidence.rule.sequence.steps
        self.taken: list[list[int]] = [[]]
        self._offered: list[int] = []

    @property
    def ids(self) -> list[str]:
        """The ids of all events taken, in order."""
        return [self._evidence.events.id_text(at) for positions in self.taken for at in positions]

    @property
    def is_dead(self) -> bool:
        """Whether a step took more than it may."""
        most = [step.step.at_most for step in self.steps]
        return any(m is not None and len(p) > m for m, p in zip(most, self.taken, strict=False))

    def offer(self, at: int) -> bool:
        """Whether an event was taken: by the next step if the current one has enough, else by the current one."""
        self._offered.append(at)
        current = len(self.taken) - 1
        enough = len(self.taken[current]) >= self.steps[current].step.at_least
        if current + 1 < len(self.steps) and enough and self.satisfies(self.steps[current + 1], at):
            self.taken.append([at])
            return True
        if self.satisfies(self.steps[current], at):
            self.taken[current].append(at)
            return True
        return False

    def drop(self, commit: int) -> None:
        """Forgets events that have been deleted by a commit: each step has those of its own time that satisfy it still."""
        if self._evidence.gone_at is None:
            return
        standing, order = self._evidence.is_standing(commit), self._offered
        begins = [order.index(positions[0]) for positions in self.taken]
        self.taken = []
        for step, begin, end in zip(self.steps, begins, [*begins[1:], len(order)], strict=True):
            self.taken.append([at for at in order[begin:end] if standing[at] and self.satisfies(step, at)])

    def ends_with(self, at: int) -> bool:
        """Whether the last step took the event just now, and all steps have enough."""
        steps, last = self.steps, self.taken[-1]
        complete = len(self.taken) == len(steps) and not self.is_dead
        return complete and at in last[-1:] and len(last) >= steps[-1].step.at_least

    def satisfies(self, step: CompiledStep, at: int) -> bool:
        """Whether an event satisfies a step's condition, given what was taken so far; an error does not."""
        if not self._evidence.holds(step.gate)[at]:
            return False
        if step.own:
            return bool(self._evidence.holds(step.condition)[at])
        columns = {name: self._column(name, at) for name in step.condition.fields}
        return bool(step.condition.evaluate(columns, 1).is_true()[0])

    def _column(self, name: str, at: int) -> Column:
        before, _, own = name.partition(".")
        columns = self._evidence.events.columns
        if not own:
            return columns[name].take(np.array([at]))
        positions = self.taken[[step.step.name for step in self.steps].index(before)]
        if own == COUNT:
            return from_values(BIGINT, [len(positions)])
        return from_values(array(columns[own].type), [columns[own].to_stored_list(np.array(positions, dtype=np.int64))])


def sequence(evidence: Evidence, rows: Sequence[Mapping[str, Any]], since: int) -> KindEvidence:
    """A sequence: the events that its steps took, up to the alert's own; of an absence also what came or did not."""
    rule, alert = evidence.rule, rows[-1]
    absence, recorded, commit = is_absence(rule), list(alert["evidence"] or []), int(alert["arrival"])
    at = evidence.find_position(str(alert["event_id"]), parse_time(alert["window_start" if absence else "event_time"]))
    match = None if at is None else _matched(evidence, at, recorded)
    standing = evidence.is_standing(commit)
    if match is not None:
        # What was deleted while the wait lasted is no part of it any more.
        match.drop(commit)
    reproduced = match is not None and match.ids[:_MOST_EVIDENCE] == recorded
    if match is not None and reproduced:
        taken = match.taken
        steps = [_step_of(evidence, step, positions) for step, positions in zip(match.steps, taken, strict=True)]
    else:
        # At least the events that the alert names.
        taken = [[place for event_id in recorded if (place := evidence.find_position(event_id)) is not None]]
        steps = [_step_evidence(evidence, "events", "", "the events that the alert names", taken[0])]
    notes: tuple[str, ...] = ()
    came: list[int] = []
    if absence and rule.sequence is not None and rule.sequence.absent is not None:
        due = parse_time(alert["event_time"])
        retracted = alert["verdict"] == "retracted"
        if at is not None and match is not None:
            is_over = not retracted and evidence.is_over(due, commit)
            came = _came(evidence, match, at, due, at + 1 if is_over else evidence.moments(commit)[0])
        steps.append(_step_of(evidence, rule.sequence.absent, [each for each in came if standing[each]]))
        reproduced = reproduced and bool(came) == retracted
        if retracted:
            which = ", ".join(evidence.events.id_text(each) for each in came) or "what was not to come"
            notes = (f"Retracted: {which} came after all, with commit {commit}.",)
        else:
            notes = (f"Waited from {format_time(parse_time(alert['window_start']))} to {format_time(due)}, and nothing of the kind came.",)  # fmt: skip
    names = {each: step.name for step, positions in zip(steps, [*taken, came], strict=False) for each in positions}
    return KindEvidence(
        timeline=_sequence_timeline(evidence, alert, since, names, at),
        notes=notes,
        steps=tuple(steps),
        windows=_spans_of(evidence, alert, taken),
        reproduced=reproduced,
    )


def is_absence(rule: CompiledRule) -> bool:
    """Whether a rule tells of what did not come after the steps of its sequence."""
    return rule.sequence is not None and rule.sequence.absent is not None


def _matched(evidence: Evidence, at: int, recorded: Sequence[str]) -> _Match | None:
    """The match that the event at one position ends, as of its arrival; None if there is none.

    expiry fixed: the one that begins with the first event that the alert names.
    """
    rule, spec = evidence.rule, evidence.rule.spec.sequence
    assert spec is not None
    commit = int(evidence.events.commits[at])
    rows = evidence.is_wanted & evidence.is_in_time & evidence.since(rule.store, commit)
    rows[at + 1 :] = False
    rows[: evidence.first_counted(at + 1)] = False
    if spec.expiry != "fixed":
        return _sliding(evidence, rows & evidence.is_standing(commit), at, spec.within)
    begin = evidence.find_position(recorded[0]) if recorded else None
    match = None if begin is None else _fixed(evidence, rows, at, spec.within, begin)
    if match is not None or not evidence.is_deleted.any():
        return match
    # The first event may have been deleted since: the one that makes the others come out.
    for other in np.flatnonzero(rows & (evidence.events.times >= evidence.events.times[at] - spec.within)).tolist():
        match = _fixed(evidence, rows, at, spec.within, other)
        if match is not None and [each for each in match.ids if each in recorded][:_MOST_EVIDENCE] == recorded:
            return match
    return None


def _sliding(evidence: Evidence, rows: Mask, at: int, within: int) -> _Match | None:
    times, until = evidence.events.times, evidence.ends_sequence
    near = np.flatnonzero(rows & (times >= times[at] - within) & (times <= times[at]))
    ordered = near[np.argsort(times[near], kind="stable")].tolist()
    ends = [rank for rank, each in enumerate(ordered[:-1]) if until[each]]
    return _matching(evidence, ordered[ends[-1] + 1 if ends else 0 :], at)


def _matching(evidence: Evidence, ordered: Sequence[int], at: int) -> _Match | None:
    match = _Match(evidence)
    for each in ordered:
        if match.is_dead:
            return None
        match.offer(each)
    return match if match.ends_with(at) else None


def _fixed(evidence: Evidence, rows: Mask, at: int, within: int, begin: int) -> _Match | None:
    """The match among the events that arrived since the one at `begin`, unless it was over before the one at `at` came."""
    assert evidence.rule.sequence is not None
    times, until, commits = evidence.events.times, evidence.ends_sequence, evidence.events.commits
    begins = evidence.holds(evidence.rule.sequence.steps[0].condition)
    first, arrived = int(times[begin]), list[int]()
    for each in (begin + np.flatnonzero(rows[begin:])).tolist():
        if evidence.gone_at is not None and each != begin:
            standing = evidence.is_standing(int(commits[each]))
            left = [int(times[n]) for n in arrived if begins[n] and standing[n] and first <= times[n] <= first + within]
            if not left:
                return None
            first = min(left)
        arrived.append(each)
        is_in = first <= times[each] <= first + within
        if each != at and times[each] >= first and (until[each] or (begins[each] and not is_in)):
            return None
    if not (begins[begin] and at in arrived and first <= times[at] <= first + within):
        return None
    standing = evidence.is_standing(int(commits[at]))
    inside = [each for each in arrived if standing[each] and first <= times[each] <= times[at]]
    return _matching(evidence, sorted(inside, key=lambda each: (times[each], each)), at)


def _came(evidence: Evidence, match: _Match, at: int, due: int, arrived: int) -> list[int]:
    """The events that end the wait of the event at one position, of the first `arrived`."""
    rule, times = evidence.rule, evidence.events.times
    assert rule.sequence is not None
    assert rule.sequence.absent is not None
    rows = evidence.is_wanted & evidence.is_in_time & (times <= due)
    rows &= evidence.since(rule.store, int(evidence.events.commits[at]), floored=False)
    rows &= (times > times[at]) | ((times == times[at]) & (np.arange(len(times)) > at))
    rows[arrived:] = False
    rows[: evidence.first_counted(at + 1)] = False
    # What was deleted before the wait began did not end it.
    rows &= evidence.is_standing(int(evidence.events.commits[at]))
    return [each for each in np.flatnonzero(rows).tolist() if match.satisfies(rule.sequence.absent, each)]


def _step_of(evidence: Evidence, step: CompiledStep, positions: Sequence[int]) -> StepEvidence:
    spec = step.step
    return _step_evidence(evidence, spec.name, spec.condition, describe_step(spec), positions, absent=spec.absent)


def _step_evidence(
    evidence: Evidence, name: str, text: str, words: str, positions: Sequence[int], *, absent: bool = False
) -> StepEvidence:
    listed = np.array(positions, dtype=np.int64)
    frame = evidence.frame(listed, by_time=False)
    return StepEvidence(name, text, words, frame, len(listed) - len(frame), absent)


def _spans_of(evidence: Evidence, alert: Mapping[str, Any], taken: Sequence[Sequence[int]]) -> pd.DataFrame:
    """The time that a sequence's steps had and, of an absence, the wait."""
    spec, start, end = evidence.rule.spec.sequence, parse_time(alert["window_start"]), parse_time(alert["event_time"])
    assert spec is not None
    last = start if is_absence(evidence.rule) else end
    first = last - spec.within
    if spec.expiry == "fixed":
        first = min((int(evidence.events.times[at]) for at in taken[0]), default=start)
        last = first + spec.within
    spans = [(to_utc(first), to_utc(last), "steps")]
    if is_absence(evidence.rule):
        spans.append((to_utc(start), to_utc(end), "wait"))
    return pd.DataFrame(spans, columns=["window_start", "window_end", "name"])


def _sequence_timeline(
    evidence: Evidence, alert: Mapping[str, Any], since: int, names: Mapping[int, str], own: int | None
) -> pd.DataFrame:
    events, last, until = evidence.events, parse_time(alert["event_time"]), evidence.ends_sequence
    seen = evidence.is_wanted & (events.times >= since) & (events.times <= last) & ~evidence.is_deleted
    seen &= evidence.is_standing(int(alert["arrival"])) & (events.commits <= int(alert["arrival"]))
    at = np.flatnonzero(seen)
    listed = at[np.argsort(events.times[at], kind="stable")][-MOST_EVENTS:].tolist()
    times = events.times[np.array(listed, dtype=np.int64)]
    return pd.DataFrame(
        {
            "event_time": pd.to_datetime(times, unit="us", utc=True),
            "event_id": [events.id_text(each) for each in listed],
            "value": np.ones(len(listed)),
            "running": np.full(len(listed), np.nan),
            "in_window": np.array([each in names for each in listed], dtype=bool),
            "is_alert": np.array([each == own for each in listed], dtype=bool),
            "step": [names.get(each, "") for each in listed],
            "until": until[np.array(listed, dtype=np.int64)],
        }
    )

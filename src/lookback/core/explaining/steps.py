"""Explains alerts of sequences and absences: the events that each step took, and the event that ended a wait."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from lookback.core.explaining.evidence import Evidence, KindEvidence, StepEvidence
from lookback.core.explaining.tracing import TracedRow, replay
from lookback.core.rules.compiled import CompiledRule, CompiledStep
from lookback.core.rules.wording import describe_step
from lookback.core.values.keys import Int64s
from lookback.core.values.times import format_time, parse_time, to_utc


def explain_sequence(evidence: Evidence, alert: Mapping[str, Any], since: int) -> KindEvidence:
    """Explains a row of a sequence: the events that its steps took and, for an absence, the one that ended the wait."""
    rule = evidence.rule
    assert rule.sequence is not None
    absent, recorded, commit = rule.sequence.absent, list(alert["evidence"] or []), int(alert["arrival"])
    at = _find_last_step(evidence, alert)
    row = _find_row(evidence, alert)
    if row is not None:
        taken = row.taken
        steps = [_step_of(evidence, step, each) for step, each in zip(rule.sequence.steps, taken, strict=True)]
    else:
        # Show at least the events that the alert names.
        taken = [[place for event_id in recorded if (place := evidence.find_position(event_id)) is not None]]
        steps = [_step_evidence(evidence, "events", "", "the events that the alert names", taken[0])]
    notes: tuple[str, ...] = ()
    came: list[int] = []
    if absent is not None:
        ended_by = evidence.position_of(row.place) if row is not None and row.is_retraction else None
        came = [] if ended_by is None else [ended_by]
        steps.append(_step_of(evidence, absent, came))
        if alert["verdict"] == "retracted":
            which = ", ".join(evidence.events.id_text(each) for each in came) or "an event that must not come"
            notes = (f"Retracted: {which} came after all, with commit {commit}.",)
        else:
            start, end = (format_time(parse_time(alert[name])) for name in ("window_start", "event_time"))
            notes = (f"Waited from {start} to {end}, and no such event came.",)
    names = {each: step.name for step, positions in zip(steps, [*taken, came], strict=False) for each in positions}
    return KindEvidence(
        timeline=_draw_timeline(evidence, alert, since, names, at),
        notes=notes,
        steps=tuple(steps),
        windows=_spans_of(evidence, alert, taken),
        reproduced=row is not None,
    )


def find_all_taken(evidence: Evidence, alerts: Sequence[Mapping[str, Any]]) -> list[list[list[int]] | None]:
    """Returns the positions of the events that each step took, for each alert; None if no replay reproduces its row.

    `evidence` must have all events of the alerts' key. One replay serves all alerts between two resets, so the cost of
    an alert depends only on the events that it took.
    """
    by_begin: dict[int, list[int]] = defaultdict(list)
    for number, alert in enumerate(alerts):
        if (at := _find_last_step(evidence, alert)) is not None:
            by_begin[evidence.first_counted(at + 1)].append(number)
    found: list[list[list[int]] | None] = [None] * len(alerts)
    for begin, numbers in by_begin.items():
        last, dues = (
            max(int(alerts[each]["arrival"]) for each in numbers),
            [_find_due(alerts[each]) for each in numbers],
        )
        part = np.arange(begin, evidence.count_arrived(last), dtype=np.int64)
        rows = replay(evidence, last, first=min(dues), last=max(dues), positions=part)
        by_name = {_name_row(vars(row.alert)): row for row in reversed(rows)}
        for number in numbers:
            row = by_name.get(_name_row(alerts[number])) or _find_row(evidence, alerts[number])
            found[number] = None if row is None else row.taken
    return found


def _find_due(alert: Mapping[str, Any]) -> int:
    return parse_time(alert["event_time"])


def _name_row(alert: Mapping[str, Any]) -> tuple[Any, ...]:
    """Identifies an alert row by the values that a replay must reproduce."""
    is_retracted = alert["verdict"] == "retracted"
    return alert["event_id"], _find_due(alert), int(alert["arrival"]), tuple(alert["evidence"] or ()), is_retracted


def _find_last_step(evidence: Evidence, alert: Mapping[str, Any]) -> int | None:
    """Returns the position of the event that completed the steps; None if not found."""
    time = alert["window_start" if is_absence(evidence.rule) else "event_time"]
    return evidence.find_position(str(alert["event_id"]), parse_time(time))


def is_absence(rule: CompiledRule) -> bool:
    """Returns whether a rule waits for an event that must not follow the steps of its sequence."""
    return rule.sequence is not None and rule.sequence.absent is not None


def _find_row(evidence: Evidence, alert: Mapping[str, Any]) -> TracedRow | None:
    """Returns the replayed row that equals the alert's; None if not found."""
    at, due, commit, name = _find_last_step(evidence, alert), _find_due(alert), int(alert["arrival"]), _name_row(alert)
    for positions in () if at is None else _list_histories(evidence, alert, at):
        for row in replay(evidence, commit, first=due, last=due, positions=positions):
            if _name_row(vars(row.alert)) == name:
                return row
    return None


def _list_histories(evidence: Evidence, alert: Mapping[str, Any], at: int) -> Iterator[Int64s]:
    """Yields the positions of events to replay, until a replay reproduces the alert.

    With fixed expiry these are the events from the first one of the match on, since the beginning of a match depends on
    all earlier events. The alert's evidence begins with this event, unless it had been deleted by then.
    """
    rule, times = evidence.rule, evidence.events.times
    spec = rule.spec.sequence
    assert rule.sequence is not None
    assert spec is not None
    positions = np.arange(evidence.first_counted(at + 1), len(times), dtype=np.int64)
    if spec.expiry != "fixed":
        due = parse_time(alert["event_time"])
        yield positions[(times[positions] >= times[at] - spec.within) & (times[positions] <= due)]
        return
    begins = evidence.is_wanted & evidence.holds(rule.sequence.steps[0].condition) & evidence.has_key(0)
    begins &= times >= times[at] - spec.within
    candidates = [begin for begin in positions.tolist() if begins[begin] and begin <= at]
    named = evidence.find_position(alert["evidence"][0]) if alert["evidence"] else None
    if not evidence.is_deleted.any():
        candidates = [begin for begin in candidates if begin == named]
    for begin in sorted(candidates, key=lambda each: each != named):
        yield positions[positions >= begin]


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
    """Returns the time span of the steps and, for an absence, of the wait."""
    rule, start, end = evidence.rule, parse_time(alert["window_start"]), parse_time(alert["event_time"])
    spec = rule.spec.sequence
    assert spec is not None
    last = start if is_absence(rule) else end
    first = last - spec.within
    if spec.expiry == "fixed":
        first = min((int(evidence.events.times[at]) for at in taken[0]), default=start)
        last = first + spec.within
    spans = [(to_utc(first), to_utc(last), "steps")]
    if is_absence(rule):
        spans.append((to_utc(start), to_utc(end), "wait"))
    return pd.DataFrame(spans, columns=["window_start", "window_end", "name"])


def _find_fitting(evidence: Evidence, listed: Int64s) -> list[str]:
    """Finds for each event the first step whose condition it meets, considering the event alone; empty for none."""
    assert evidence.rule.sequence is not None
    fitting = [""] * len(listed)
    for number, step in reversed(list(enumerate(evidence.rule.sequence.steps))):
        if step.gate is not None:
            for place in np.flatnonzero((evidence.holds(step.gate) & evidence.has_key(number))[listed]).tolist():
                fitting[place] = step.step.name
    return fitting


def _draw_timeline(
    evidence: Evidence, alert: Mapping[str, Any], since: int, names: Mapping[int, str], own: int | None
) -> pd.DataFrame:
    """Returns the key's last events from `since` up to the alert.

    An event that no step took may still fit a step, considering the event alone: a near miss.

    Args:
        evidence: The rule and the events of the key.
        alert: The row of the alert.
        since: The time at which the picture begins, in microseconds.
        names: The name of the step that took each event, by position.
        own: The position of the alert's event.
    """
    events, last, commit = evidence.events, parse_time(alert["event_time"]), int(alert["arrival"])
    seen = evidence.is_wanted & (events.times >= since) & (events.times <= last)
    listed = evidence.list_events(seen & evidence.is_kept_after(commit) & (events.commits <= commit))
    positions = listed.tolist()
    return pd.DataFrame(
        {
            "event_time": pd.to_datetime(events.times[listed], unit="us", utc=True),
            "event_id": [events.id_text(each) for each in positions],
            "value": np.ones(len(positions)),
            "running": np.full(len(positions), np.nan),
            "in_window": np.array([each in names for each in positions], dtype=bool),
            "is_alert": np.array([each == own for each in positions], dtype=bool),
            "step": [names.get(each, "") for each in positions],
            "fits": [
                "" if each in names else fitting
                for each, fitting in zip(positions, _find_fitting(evidence, listed), strict=True)
            ],
            "until": evidence.ends_sequence[listed],
        }
    )

"""Explains why an alert was raised by recomputing its row from the events of its key at that time.

An alert row names the commit that brought it, not the event of that commit. If several rows of a replay match, the last
one with the alert's measures is taken.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pandas as pd

from lookback.core.explaining.evidence import MAX_EVENTS, Evidence, Explanation, KindEvidence, MeasureEvidence
from lookback.core.explaining.measures import (
    draws_values,
    list_event_limits,
    list_measure_limits,
    main_measure,
    to_number,
)
from lookback.core.explaining.steps import explain_sequence, find_all_taken, is_absence
from lookback.core.explaining.tracing import TracedRow, replay
from lookback.core.judging.measuring import select_kept
from lookback.core.rules.compiled import CompiledMeasure, CompiledRule
from lookback.core.rules.wording import describe_measure, describe_rule, find_field_limits, find_measure_limits
from lookback.core.streams.declaration import Stream
from lookback.core.values.columns import from_text, to_text
from lookback.core.values.durations import MICROSECONDS
from lookback.core.values.keys import Int64s
from lookback.core.values.times import format_time, parse_time, to_utc
from lookback.core.values.windows import (
    EVENT,
    LOOKBACK,
    SEQUENCE,
    SESSION,
    SLIDING,
    TUMBLING,
    Lookback,
    Moment,
    Session,
    TiledWindow,
)

# A picture of more windows would be unreadable.
_MAX_WINDOWS = 60
# How far a picture goes back before the window at most, in microseconds, unless days are given.
_MAX_CONTEXT = 30 * MICROSECONDS["day"]
# An event rule has no window, so its picture shows a day of the key.
_EVENT_CONTEXT = MICROSECONDS["day"]


def picture_span(rule: CompiledRule, stream: Stream, alert: Mapping[str, Any], days: float | None) -> tuple[int, int]:
    """Returns where the picture of an alert's key begins, and from when on its events are needed; in microseconds.

    `days` is how far the picture goes back before the window; None for a few lengths of the window, at most 30 days.
    """
    start, end, window = parse_time(alert["window_start"]), parse_time(alert["window_end"]), rule.window
    if rule.sequence is not None:
        within = rule.sequence.within
        since = start - _context(within, days)
        return since, min(since, (start if is_absence(rule) else end) - within)
    if isinstance(window, TiledWindow):
        since = start - _context(4 * window.size, days)
        return since, since
    if isinstance(window, Session):
        since = start - _context(4 * (end - start), days)
        # Whether a session took a late event depends on the sessions at that time.
        return since, min(since, start - stream.max_session - rule.allowed_lateness - window.gap)
    if isinstance(window, Moment):
        since = start - _context(_EVENT_CONTEXT, days)
        return since, since
    main = main_measure(rule)
    time, own = parse_time(alert["event_time"]), _lookback_of(main)
    since = own.bounds(time)[0] - _context(own.size, days)
    firsts = [_lookback_of(measure).bounds(time)[0] for measure in rule.measures]
    return since, min(own.bounds(since)[0], *firsts)


def explain_alert(evidence: Evidence, alert: Mapping[str, Any], rule_row: Mapping[str, Any], since: int) -> Explanation:
    """Explains a row of an alert.

    Args:
        evidence: The rule and the events of the alert's key.
        alert: The row, with the columns of the alerts table and measures as exact text.
        rule_row: The row of the rules table that was in force.
        since: The time at which pictures begin, in microseconds.
    """
    rule = evidence.rule
    part = _EXPLAINERS[rule.spec.kind](evidence, alert, since)
    notes = part.notes
    if alert["verdict"] == "suppressed":
        notes = (*notes, "Suppressed: another alert of the key was raised shortly before.")
    if alert["revision"] and alert["verdict"] != "retracted":
        revised = f"Revised: this is revision {alert['revision']}, from the events up to commit {alert['arrival']}."
        notes = (*notes, revised)
    limits = tuple(list_event_limits(evidence, alert, part.main))
    notes = (*notes, *(f"For this event the limit {text} was {value}." for text, value in limits))
    return Explanation(
        alert=alert,
        rule=rule_row,
        sentence=describe_rule(rule),
        limits=find_measure_limits(rule) if rule.measures else find_field_limits(rule, evidence.stream),
        **{**vars(part), "notes": notes},
        missing=max([*(m.missing for m in part.measures), *(s.missing for s in part.steps)], default=0),
        kind=rule.spec.kind,
        event_limits=limits,
        measure_limits=tuple(list_measure_limits(evidence, alert, part.main)),
    )


@dataclass(frozen=True)
class _Recomputed:
    """The row of a replay that is compared with the alert's row.

    Attributes:
        evidence: The rule and the events of the alert's key.
        commit: The alert's commit.
        row: The row; None if the replay gives none for the alert's event or window.
        bounds: The first and last time that each measure sees, both included.
        end_included: Whether the window's end is shown as that last time.
    """

    evidence: Evidence
    commit: int
    row: TracedRow | None
    bounds: Mapping[str, tuple[int, int]]
    end_included: bool

    @classmethod
    def select(
        cls,
        evidence: Evidence,
        alert: Mapping[str, Any],
        candidates: Sequence[TracedRow],
        bounds: Mapping[str, tuple[int, int]],
        *,
        end_included: bool = False,
    ) -> _Recomputed:
        """Selects the last row of the alert's commit with the alert's measures.

        If the commit has no such row, selects its last row, or else the last row before it.
        """
        commit, recorded = int(alert["arrival"]), alert["measures"] or {}
        rows = [row for row in candidates if row.alert.arrival == commit] or list(candidates[-1:])
        rows.reverse()
        equal = (row for row in rows if row.has_measures(evidence.rule, recorded))
        return cls(evidence, commit, next(equal, rows[0] if rows else None), bounds, end_included)

    @property
    def caused_by(self) -> int | None:
        """The position of the event that caused the row; None if the watermark did, and without a row."""
        return None if self.row is None else self.evidence.position_of(self.row.place)

    @property
    def arrived(self) -> int:
        """The number of the key's events that had arrived when the row was made."""
        row, position = self.row, self.caused_by
        if position is None or row is None or row.alert.arrival < self.commit:
            return self.evidence.count_arrived(self.commit)
        return position + 1

    def list_counted(self, measure: CompiledMeasure) -> Int64s:
        """Returns the positions of the events that a measure counted, in arrival order."""
        return np.zeros(0, dtype=np.int64) if self.row is None else self.row.list_counted(measure)

    def number(self, measure: CompiledMeasure) -> float:
        """Returns the measure's value for a picture."""
        return math.nan if self.row is None else to_number(self.row.value_of(measure))

    def measures(self, recorded: Mapping[str, str | None]) -> tuple[MeasureEvidence, ...]:
        """Returns the evidence of each measure. `recorded` has the alert's measures."""
        results, evidence, rule = [], self.evidence, self.evidence.rule
        for measure, spec in zip(rule.measures, rule.spec.measures, strict=True):
            first, last = self.bounds[measure.name]
            positions, text = self.list_counted(measure), recorded.get(measure.name)
            results.append(
                MeasureEvidence(
                    name=measure.name,
                    text=spec.text,
                    words=describe_measure(measure),
                    window_start=to_utc(first),
                    window_end=to_utc(last if self.end_included else last + 1),
                    recorded=text,
                    recomputed=None if self.row is None else to_text(self.row.value_of(measure)),
                    events=evidence.frame(positions),
                    missing=int(evidence.is_deleted[positions].sum()),
                    end_included=self.end_included,
                    shown=None if text is None else measure.format_value(from_text(measure.type, text)),
                )
            )
        return tuple(results)

    def timeline(self, measure: CompiledMeasure, since: int, own: int | None) -> pd.DataFrame:
        """Returns the alert's event and the last events of the key from `since` on that the measure can see.

        `own` is the position of the event that raised the alert; None if no event did. A lookback measure is given as
        of each event; the events of other windows end with the window. See Explanation.
        """
        evidence, events, feature = self.evidence, self.evidence.events, measure.feature
        seen = select_kept(feature, events) & (events.times >= since) & evidence.is_kept_after(self.commit)
        seen[self.arrived :] = False
        is_lookback = isinstance(measure.window, Lookback)
        if not is_lookback:
            seen &= events.times <= self.bounds[measure.name][1]
        counted = np.isin(np.arange(len(events)), self.list_counted(measure)) & (events.times >= since)
        if own is not None:
            counted[own] = True
        # Of more events than a picture can show, those that count come first.
        first, others = evidence.list_events(counted), evidence.list_events(seen & ~counted)
        listed = np.concatenate([others[max(0, len(others) + len(first) - MAX_EVENTS) :], first])
        listed = listed[np.argsort(events.times[listed], kind="stable")]
        running = self._run_measure(measure, listed) if is_lookback else {}
        values = [1.0] * len(listed)
        if feature.argument is not None and draws_values(measure):
            values = [to_number(value) for value in events.value(feature.argument).take(listed).to_list()]
        return pd.DataFrame(
            {
                "event_time": pd.to_datetime(events.times[listed], unit="us", utc=True),
                "event_id": [events.id_text(at) for at in listed.tolist()],
                "value": np.array(values, dtype=np.float64),
                "running": np.array(
                    [self.number(measure) if at == own else running.get(at, math.nan) for at in listed.tolist()],
                    dtype=np.float64,
                ),
                "in_window": np.isin(listed, self.list_counted(measure)),
                "is_alert": np.array([at == own for at in listed.tolist()], dtype=bool),
            }
        )

    def _run_measure(self, measure: CompiledMeasure, listed: Int64s) -> dict[int, float]:
        """Returns the measure as of the arrival of each listed event that was judged, by position."""
        history = replace(self.evidence, rule=replace(self.evidence.rule, measures=(measure,)))
        times = history.events.times[listed]
        values: dict[int, float] = {}
        edges = [0, *(at for at in history.emptied if at < self.arrived), self.arrived]
        # After each reset the windows start empty.
        for begin, end in pairwise(edges):
            if ((listed >= begin) & (listed < end)).any():
                first, last, part = int(times.min()), int(times.max()), np.arange(begin, end, dtype=np.int64)
                for row in replay(history, self.commit, first=first, last=last, positions=part, late="evaluate"):
                    position = history.position_of(row.place)
                    assert position is not None
                    values[position] = to_number(row.alert.measures[measure.name])
        return values


def _explain_event(evidence: Evidence, alert: Mapping[str, Any], since: int) -> KindEvidence:
    """Explains a row of an event rule, which looks at nothing but the event."""
    time, commit, event_id = parse_time(alert["event_time"]), int(alert["arrival"]), str(alert["event_id"])
    at, events = evidence.find_position(event_id, time, commit), evidence.events
    traced: Sequence[TracedRow] = ()
    if at is not None:
        traced = replay(evidence, commit, first=time, last=time, positions=np.arange(at, at + 1, dtype=np.int64))
    shown = (events.times >= since) & evidence.is_kept_after(commit)
    shown[evidence.count_arrived(commit) if at is None else at + 1 :] = False
    listed = evidence.list_events(shown)
    main = next(iter(find_field_limits(evidence.rule, evidence.stream)), "")
    values = events.columns[main].take(listed).to_list() if main else [math.nan] * len(listed)
    timeline = pd.DataFrame(
        {
            "event_time": pd.to_datetime(events.times[listed], unit="us", utc=True),
            "event_id": [events.id_text(each) for each in listed.tolist()],
            "value": np.array([to_number(value) for value in values], dtype=np.float64),
            "fits": evidence.is_wanted[listed],
            "is_alert": np.array([each == at for each in listed.tolist()], dtype=bool),
        }
    )
    is_reproduced = bool(traced) and list(alert["evidence"]) == [event_id]
    return KindEvidence(timeline=timeline, main=main, reproduced=is_reproduced)


def _explain_lookback(evidence: Evidence, alert: Mapping[str, Any], since: int) -> KindEvidence:
    """Explains a row of a lookback rule: an event as of its own arrival, or of a later event's in its window."""
    rule = evidence.rule
    time, commit, event_id = parse_time(alert["event_time"]), int(alert["arrival"]), str(alert["event_id"])
    is_revised = rule.spec.late == "revise"
    at = evidence.find_position(event_id, time, None if is_revised else commit)
    candidates: list[TracedRow] = []
    if at is not None and is_revised:
        traced = replay(evidence, commit, first=time, last=time)
        candidates = [row for row in traced if row.alert.event_id == event_id]
    elif at is not None:
        part = np.arange(evidence.first_counted(at + 1), at + 1, dtype=np.int64)
        traced = replay(evidence, commit, first=time, last=time, positions=part)
        candidates = [row for row in traced if evidence.position_of(row.place) == at]
    bounds = {measure.name: _lookback_of(measure).bounds(time) for measure in rule.measures}
    recomputed = _Recomputed.select(evidence, alert, candidates, bounds, end_included=True)
    main, notes = main_measure(rule), []
    if alert["verdict"] == "retracted":
        notes.append(f"Retracted: with the events up to commit {commit} the condition no longer holds.")
    if at is not None and evidence.first_counted(recomputed.arrived):
        notes.append(
            "Events that arrived before the rule's previous alert do not count, because an alert empties its windows."
        )
    return KindEvidence(
        timeline=recomputed.timeline(main, since, at),
        measures=recomputed.measures(alert["measures"] or {}),
        main=main.name,
        notes=tuple(notes),
        reproduced=recomputed.row is not None,
    )


def _explain_tiled(evidence: Evidence, alert: Mapping[str, Any], since: int) -> KindEvidence:
    """Explains a row of a tumbling or sliding window that the window's end or a late event caused."""
    rule, window = evidence.rule, evidence.rule.window
    assert isinstance(window, TiledWindow)
    start, commit = parse_time(alert["window_start"]), int(alert["arrival"])
    starts = range(start, since - 1, -window.slide)[:_MAX_WINDOWS]
    first = (starts[-1] if starts else start) + window.size
    traced = replay(evidence, commit, first=first, last=start + window.size)
    candidates = [row for row in traced if row.alert.window_start == to_utc(start)]
    recomputed = _Recomputed.select(evidence, alert, candidates, _same_bounds(rule, start, start + window.size))
    notes = []
    if alert["verdict"] == "retracted":
        notes.append(f"Retracted: with the events of commit {commit} the condition no longer holds.")
    return _describe_window(recomputed, traced, alert, since, notes)


def _explain_session(evidence: Evidence, alert: Mapping[str, Any], since: int) -> KindEvidence:
    """Explains a row of a session that the session's end, a late event or a merge with another session caused."""
    rule = evidence.rule
    start, end, commit = parse_time(alert["window_start"]), parse_time(alert["window_end"]), int(alert["arrival"])
    part = np.flatnonzero(evidence.events.times >= find_clean_start(evidence, start))
    is_retracted = alert["verdict"] == "retracted"
    # A retracted session may have been merged into one that has not ended yet.
    early = rule.spec.early or is_retracted
    traced = replay(evidence, commit, first=min(since, start), last=None, positions=part, early=early)
    own = [row for row in traced if row.alert.window_start == to_utc(start)]
    candidates = [row for row in own if row.alert.window_end == to_utc(end) and not row.is_retraction]
    recomputed = _Recomputed.select(evidence, alert, candidates, _same_bounds(rule, start, end))
    notes = []
    if is_retracted:
        notes.append(f"Retracted: with the events of commit {commit} the condition no longer holds.")
    # As the stream was declared when the events of the commit were judged.
    if end == start + evidence.clock.declarations.after(commit - 1).stream.max_session:
        notes.append("The session was closed because it reached the stream's maximum length (max_session).")
    if is_retracted and own and own[-1].is_retraction:
        merged = [
            row for row in list_last_rows(traced) if row.alert.window_start < to_utc(start) < row.alert.window_end
        ]
        if merged:
            first, last = (parse_time(time) for time in (merged[0].alert.window_start, merged[0].alert.window_end))
            whole = f"the session from {format_time(first)} to {format_time(last)}"
            notes = [f"Retracted: with the events of commit {commit} it became part of {whole}."]
    return _describe_window(recomputed, traced, alert, since, notes)


def find_clean_start(evidence: Evidence, start: int) -> int:
    """Returns the first time at which a session certainly began, at the latest `start`.

    Events before the first pause may belong to a session that began before the first known event.
    """
    window, events = evidence.rule.window, evidence.events
    assert isinstance(window, Session)
    times = np.sort(events.times[evidence.is_wanted & (events.times <= start)])
    if len(times) and times[0] - window.gap > evidence.earliest:
        return int(times[0])
    pauses = np.flatnonzero(np.diff(times) > window.gap)
    return int(times[pauses[0] + 1]) if len(pauses) else start


def _same_bounds(rule: CompiledRule, start: int, end: int) -> dict[str, tuple[int, int]]:
    return {measure.name: (start, end - 1) for measure in rule.measures}


def list_last_rows(traced: Sequence[TracedRow]) -> list[TracedRow]:
    """Returns the last row of each window, by start, without sessions that were merged into another."""
    last = {row.alert.window_start: row for row in traced}
    return [last[start] for start in sorted(last) if not last[start].is_retraction]


def _describe_window(
    recomputed: _Recomputed, traced: Sequence[TracedRow], alert: Mapping[str, Any], since: int, notes: Sequence[str]
) -> KindEvidence:
    """Returns the evidence of a window, with earlier windows for a picture."""
    rule = recomputed.evidence.rule
    main = main_measure(rule)
    first, last = recomputed.bounds[main.name]
    start, end = to_utc(first), to_utc(last + 1)
    earlier = [row.alert for row in list_last_rows(traced) if row.alert.window_start < start]
    if rule.spec.kind == SESSION:
        earlier = [each for each in earlier if each.window_end <= start]
    windows = [(each.window_start, each.window_end, to_number(each.measures[main.name]), False) for each in earlier]
    windows.append((start, end, recomputed.number(main), True))
    columns = ["window_start", "window_end", "value", "is_alert"]
    return KindEvidence(
        timeline=recomputed.timeline(main, since, recomputed.caused_by),
        measures=recomputed.measures(alert["measures"] or {}),
        main=main.name,
        notes=tuple(notes),
        windows=pd.DataFrame(windows[-_MAX_WINDOWS:], columns=columns),
        reproduced=recomputed.row is not None,
    )


_EXPLAINERS: dict[str, Callable[[Evidence, Mapping[str, Any], int], KindEvidence]] = {
    EVENT: _explain_event,
    LOOKBACK: _explain_lookback,
    TUMBLING: _explain_tiled,
    SLIDING: _explain_tiled,
    SESSION: _explain_session,
    SEQUENCE: explain_sequence,
}


def find_counted(evidence: Evidence, alerts: Sequence[Mapping[str, Any]]) -> list[list[str] | None]:
    """Returns the ids of the events behind each row of `alerts`; None for a row that a replay does not reproduce.

    For a window these are the events that any measure counted, for a sequence the events that its steps took.

    Args:
        evidence: All events of the key, and what decides which of them count.
        alerts: Raised rows of that key and rule, of windows or a sequence, with the columns of the alerts table.
    """
    if evidence.rule.spec.kind == SEQUENCE:
        found = find_all_taken(evidence, alerts)
        return [None if taken is None else _list_ids(evidence, list(chain.from_iterable(taken))) for taken in found]
    starts = [parse_time(alert["window_start"]) for alert in alerts]
    last = max(int(alert["arrival"]) for alert in alerts)
    by_window: dict[tuple[Any, Any], list[TracedRow]] = defaultdict(list)
    for row in replay(evidence, last, first=min(starts), last=None):
        if not row.is_retraction:
            by_window[row.alert.window_start, row.alert.window_end].append(row)
    return [_find_in_window(evidence, alert, by_window[alert["window_start"], alert["window_end"]]) for alert in alerts]


def _find_in_window(evidence: Evidence, alert: Mapping[str, Any], rows: Sequence[TracedRow]) -> list[str] | None:
    """Lists the events of the window's last row, up to the alert's commit, that has the alert's measures."""
    recorded, rule = alert["measures"] or {}, evidence.rule
    for row in reversed(rows):
        if row.alert.arrival <= int(alert["arrival"]) and row.has_measures(rule, recorded):
            counted = [row.list_counted(measure) for measure in rule.measures]
            return _list_ids(evidence, np.unique(np.concatenate(counted)).tolist())
    return None


def _list_ids(evidence: Evidence, positions: Sequence[int]) -> list[str]:
    return [evidence.events.id_text(at) for at in positions]


def _lookback_of(measure: CompiledMeasure) -> Lookback:
    assert isinstance(measure.window, Lookback)
    return measure.window


def _context(length: int, days: float | None) -> int:
    return min(length, _MAX_CONTEXT) if days is None else round(days * MICROSECONDS["day"])

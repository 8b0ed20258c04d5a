"""What an alert was made of: the events that it counted or that its steps took, recomputed one alert at a time.

Slow and plain on purpose. It shares the expressions and the aggregates with the evaluator, but neither its state nor its
way of finding windows, sessions and sequences (see `rematching`), so that equal results mean something.

An alert row says which commit brought it, not which event of that commit. Where that matters (revisions, windows that
late events enter, `early`), the row is recomputed as of the end of the commit and, if that gives other measures, as of
each event of the key in it, from the last to the first; what agrees is taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from lookback.core.errors import ExpressionError
from lookback.core.explaining.evidence import (
    MOST_EVENTS,
    NEVER,
    STANDS,
    Evidence,
    Explanation,
    KindEvidence,
    MeasureEvidence,
    format_time,
)
from lookback.core.explaining.rematching import is_absence, sequence
from lookback.core.expressions.compiling import compile_expression
from lookback.core.rules.compiled import CompiledMeasure, CompiledRule
from lookback.core.rules.wording import describe_measure, describe_rule, find_event_limits, find_measure_limits
from lookback.core.streams.declaration import Stream
from lookback.core.values.columns import Mask, from_text, from_values, to_stored, to_text
from lookback.core.values.durations import MICROSECONDS
from lookback.core.values.keys import Int64s
from lookback.core.values.limits import WIDEST_LIMITS
from lookback.core.values.times import parse_time, to_utc
from lookback.core.values.windows import LOOKBACK, SEQUENCE, SESSION, SLIDING, TUMBLING, Lookback, Session, TiledWindow

# Of a picture's windows: more than it can show apart.
_MOST_WINDOWS = 60
# Of a key's history before the window: what a picture shows of it unless told otherwise.
_MOST_CONTEXT = 30 * MICROSECONDS["day"]


def picture_span(rule: CompiledRule, stream: Stream, alert: Mapping[str, Any], days: float | None) -> tuple[int, int]:
    """Since when a picture shows the alert's key, and from what time on its events are needed; microseconds.

    days: how far before the window a picture goes; None: some times as far as the window is long, at most 30 days.
    """
    start, end, window = parse_time(alert["window_start"]), parse_time(alert["window_end"]), rule.spec.window
    if rule.spec.sequence is not None:
        within = rule.spec.sequence.within
        since = start - _context(within, days)
        return since, min(since, (start if is_absence(rule) else end) - within)
    if isinstance(window, TiledWindow):
        since = start - _context(4 * window.size, days)
        return since, since
    if isinstance(window, Session):
        since = start - _context(4 * (end - start), days)
        # Whether a late event was taken depends on the sessions that there were then.
        return since, min(since, start - stream.max_session - rule.allowed_lateness - window.gap)
    main = main_measure(rule)
    time, own = parse_time(alert["event_time"]), _lookback_of(main)
    since = own.bounds(time)[0] - _context(own.size, days)
    firsts = [_lookback_of(measure).bounds(time)[0] for measure in rule.measures]
    return since, min(own.bounds(since)[0], *firsts)


def explain_alert(
    evidence: Evidence, rows: Sequence[Mapping[str, Any]], rule_row: Mapping[str, Any], since: int
) -> Explanation:
    """The explanation of an alert's row. rows: those of the alert by revision, up to the one to be explained.

    Each has the columns of the alerts table, measures as exact text. since: from what time on pictures show the key.
    """
    rule, alert = evidence.rule, rows[-1]
    found = _FINDERS[rule.spec.kind](evidence, rows, since)
    notes = found.notes
    if alert["verdict"] == "suppressed":
        notes = (*notes, "Suppressed: an alert of the key was raised shortly before.")
    if alert["revision"] and alert["verdict"] != "retracted":
        notes = (*notes, f"Revised: this is revision {alert['revision']}, over what had arrived with commit {alert['arrival']}.")  # fmt: skip
    limits = tuple(_event_limits(evidence, alert, found.main))
    notes = (*notes, *(f"For this event the limit {text} was {value}." for text, value in limits))
    return Explanation(
        alert=alert,
        rule=rule_row,
        sentence=describe_rule(rule),
        limits=find_measure_limits(rule),
        measures=found.measures,
        timeline=found.timeline,
        main=found.main,
        missing=max([*(m.missing for m in found.measures), *(s.missing for s in found.steps)], default=0),
        kind=rule.spec.kind,
        notes=notes,
        steps=found.steps,
        windows=found.windows,
        reproduced=found.reproduced,
        event_limits=limits,
    )


def _event_limits(evidence: Evidence, alert: Mapping[str, Any], main: str) -> Iterator[tuple[str, str]]:
    """The limits that rest on the measure `main` and that the event's value of the same field was compared with.

    They are computed from the measures of the alert and the fields of its event; none where the event is gone.
    """
    rule, stream = evidence.rule, evidence.clock.stream
    limits = [each for each in find_event_limits(rule) if main in each.measures]
    if not limits:
        return
    measure = next(measure for measure in rule.measures if measure.name == main)
    at = evidence.find_position(str(alert["event_id"]), parse_time(alert["event_time"]), None)
    if at is None or measure.feature.argument is None:
        return
    recorded = alert["measures"] or {}
    columns = {name: column.take(slice(at, at + 1)) for name, column in evidence.events.columns.items()}
    for each in rule.measures:
        text = recorded.get(each.name)
        stored = None if text is None else to_stored(each.type, from_text(each.type, text))
        columns[each.name] = from_values(each.type, [stored])
    schema = {name: type_ for name, type_ in stream.fields.items() if name in columns}
    schema |= {measure.name: measure.type for measure in rule.measures}
    for limit in limits:
        if limit.field not in {name.lower() for name in measure.feature.argument.fields}:
            continue
        with contextlib.suppress(ExpressionError):
            value = compile_expression(limit.text, schema, WIDEST_LIMITS).evaluate(columns, 1).item(0)
            if value is not None:
                yield limit.text, str(measure.format_value(value))


def _shown(measure: CompiledMeasure, text: str | None) -> str | None:
    return None if text is None else measure.format_value(from_text(measure.type, text))


@dataclass(frozen=True)
class _View:
    """What a row's measures saw: first and last time of each, both included, of the first `arrived` events.

    commit: the one that the row was made in or after. among: the events of sessions; None for other windows.
    """

    evidence: Evidence
    bounds: Mapping[str, tuple[int, int]]
    commit: int
    arrived: int = 0
    among: Mask | None = None

    def counted(self, measure: CompiledMeasure) -> Int64s:
        """Positions of the events that a measure counted."""
        return self.evidence.find_counted(measure, *self.bounds[measure.name], self.arrived, self.commit, self.among)

    def agreeing(self, recorded: Mapping[str, str | None], moments: Sequence[int]) -> _View:
        """The view as of the first of `moments` that gives the recorded measures, else of the first of all."""
        left = list(moments)
        for measure in self.evidence.rule.measures:
            # What had arrived at an earlier moment is the beginning of what had at the latest.
            whole = _View(self.evidence, self.bounds, self.commit, max(left, default=0), self.among)
            positions = whole.counted(measure)
            column = self.evidence.values(measure, positions, np.searchsorted(positions, left).tolist())
            left = [each for at, each in enumerate(left) if to_text(column.item(at)) == recorded.get(measure.name)]
        return _View(self.evidence, self.bounds, self.commit, (left or list(moments))[0], self.among)

    def agrees(self, recorded: Mapping[str, str | None]) -> bool:
        """Whether every measure comes out as recorded."""
        evidence = self.evidence
        values = {m.name: to_text(evidence.value(m, self.counted(m))) for m in evidence.rule.measures}
        return values == {name: recorded.get(name) for name in values}

    def measured(self, recorded: Mapping[str, str | None], *, end_included: bool) -> tuple[MeasureEvidence, ...]:
        """The evidence of each measure."""
        results, evidence = [], self.evidence
        for measure, spec in zip(evidence.rule.measures, evidence.rule.spec.measures, strict=True):
            first, last = self.bounds[measure.name]
            positions = self.counted(measure)
            results.append(
                MeasureEvidence(
                    name=measure.name,
                    text=spec.text,
                    words=describe_measure(measure),
                    window_start=to_utc(first),
                    window_end=to_utc(last if end_included else last + 1),
                    recorded=recorded.get(measure.name),
                    recomputed=to_text(evidence.value(measure, positions)),
                    events=evidence.frame(positions),
                    missing=int(evidence.is_deleted[positions].sum()),
                    end_included=end_included,
                    shown=_shown(measure, recorded.get(measure.name)),
                )
            )
        return tuple(results)

    def timeline(self, measure: CompiledMeasure, since: int, event_id: str | None = None) -> pd.DataFrame:
        """The key's last events, from `since` to the window's end, that the measure sees; see Explanation.

        event_id: of the alert's own event, if it has one; the measure is then given as of each event.
        """
        evidence, events, feature = self.evidence, self.evidence.events, measure.feature
        seen = (
            evidence.is_kept(feature)
            & (events.times >= since)
            & ~evidence.is_deleted
            & evidence.is_standing(self.commit)
        )
        seen[self.arrived :] = False
        if event_id is None:
            seen &= events.times <= self.bounds[measure.name][1]
        at = np.flatnonzero(seen)
        at = at[np.argsort(events.times[at], kind="stable")][-MOST_EVENTS:]
        ids = [events.id_text(each) for each in at.tolist()]
        own = [each == event_id for each in ids]
        running = [float("nan")] * len(at)
        if event_id is not None:
            running = [
                _number(evidence.value(measure, self.counted(measure) if is_own else self._counted_at(measure, each)))
                for each, is_own in zip(at.tolist(), own, strict=True)
            ]
        counts = feature.argument is None or not feature.aggregate.stores_value
        values = [1.0] * len(at) if counts else [_number(v) for v in events.value(feature.argument).take(at).to_list()]  # type: ignore[arg-type]
        return pd.DataFrame(
            {
                "event_time": pd.to_datetime(events.times[at], unit="us", utc=True),
                "event_id": ids,
                "value": np.array(values, dtype=np.float64),
                "running": np.array(running, dtype=np.float64),
                "in_window": np.isin(at, self.counted(measure)),
                "is_alert": np.array(own, dtype=bool),
            }
        )

    def _counted_at(self, measure: CompiledMeasure, at: int) -> Int64s:
        """What a look-back measure counted of the event at one position, when that came."""
        events = self.evidence.events
        first, last = _lookback_of(measure).bounds(int(events.times[at]))
        return self.evidence.find_counted(measure, first, last, at + 1, int(events.commits[at]))


def _lookback(evidence: Evidence, rows: Sequence[Mapping[str, Any]], since: int) -> KindEvidence:
    """A lookback rule: an event, as of its arrival, or of that of a later one in its window."""
    rule, alert = evidence.rule, rows[-1]
    time, commit, event_id = parse_time(alert["event_time"]), int(alert["arrival"]), str(alert["event_id"])
    view = _View(evidence, {m.name: _lookback_of(m).bounds(time) for m in rule.measures}, commit)
    is_revised = rule.spec.late == "revise"
    at = evidence.find_position(event_id, time, None if is_revised else commit)
    own = 0 if at is None else at + 1
    moments = evidence.moments(commit, own) if is_revised else [own]
    recorded = alert["measures"] or {}
    view, main = view.agreeing(recorded, moments), main_measure(rule)
    notes = []
    if alert["verdict"] == "retracted":
        notes.append(f"Retracted: over what had arrived with commit {commit} the condition holds no more.")
    if evidence.first_counted(view.arrived):
        notes.append(
            "What had arrived by the rule's alert before this one does not count: an alert empties its windows."
        )
    return KindEvidence(
        timeline=view.timeline(main, since, event_id),
        measures=view.measured(recorded, end_included=True),
        main=main.name,
        notes=tuple(notes),
    )


def _tiles(evidence: Evidence, rows: Sequence[Mapping[str, Any]], since: int) -> KindEvidence:
    """A window, as of the commit after which the watermark passed its end, or of an event that came into it."""
    rule, alert, tiles = evidence.rule, rows[-1], evidence.rule.spec.window
    assert isinstance(tiles, TiledWindow)
    start, commit, recorded = parse_time(alert["window_start"]), int(alert["arrival"]), alert["measures"] or {}
    view = _window_view(evidence, start, start + tiles.size, commit)
    view, main = view.agreeing(recorded, evidence.moments(commit)), main_measure(rule)
    notes = []
    if alert["verdict"] == "retracted":
        notes.append(f"Retracted: with what came in commit {commit} the condition holds no more.")
    starts = range(start, since - 1, -tiles.slide)[:_MOST_WINDOWS]
    return KindEvidence(
        timeline=view.timeline(main, since),
        measures=view.measured(recorded, end_included=False),
        main=main.name,
        notes=tuple(notes),
        windows=_windows(view, [(each, each + tiles.size) for each in starts], start),
    )


def _window_view(evidence: Evidence, start: int, end: int, commit: int, among: Mask | None = None) -> _View:
    bounds = {measure.name: (start, end - 1) for measure in evidence.rule.measures}
    return _View(evidence, bounds, commit, among=among)


def _windows(view: _View, windows: Iterable[tuple[int, int]], own: int) -> pd.DataFrame:
    """The windows (start, exclusive end) that have events, for a picture. own: the start of the alert's."""
    evidence, main = view.evidence, main_measure(view.evidence.rule)
    times = np.sort(evidence.events.times[: view.arrived][evidence.is_wanted[: view.arrived]])
    found = []
    for start, end in sorted(windows):
        if np.searchsorted(times, end) > np.searchsorted(times, start):
            positions = evidence.find_counted(main, start, end - 1, view.arrived, view.commit, view.among)
            found.append((to_utc(start), to_utc(end), _number(evidence.value(main, positions)), start == own))
    return pd.DataFrame(found, columns=["window_start", "window_end", "value", "is_alert"])


def _session(evidence: Evidence, rows: Sequence[Mapping[str, Any]], since: int) -> KindEvidence:
    """A session, as of the commit after which the watermark passed its end, or of an event that came into it.

    Of one that was merged away the last row before that is recomputed, whose measures the retraction repeats.
    """
    alert = rows[-1]
    start, end, commit = parse_time(alert["window_start"]), parse_time(alert["window_end"]), int(alert["arrival"])
    sessions = _Sessions(evidence, start)
    alive, recorded = sessions.alive(commit), alert["measures"] or {}
    moments = evidence.moments(commit)
    view = _window_view(evidence, start, end, commit, alive)
    # The watermark brings most sessions, after the commit.
    for tried in (moments[:1], moments):
        fitting = [each for each in tried if (start, end) in sessions.bounds(alive, each)]
        view = view.agreeing(recorded, fitting or tried)
        if fitting and view.agrees(recorded):
            break
    measures = view.measured(recorded, end_included=False)
    notes: list[str] = []
    if alert["verdict"] == "retracted":
        merged = [each for each in sessions.bounds(alive, moments[0]) if each[0] < start < each[1]]
        if len(rows) > 1 and merged and not (fitting and view.agrees(recorded)):
            (other,) = merged
            before = _session(evidence, [*rows[:-2], {**rows[-2], "measures": recorded}], since)
            note = f"Retracted: with what came in commit {commit} it became part of the session from {format_time(other[0])} to {format_time(other[1])}."
            return KindEvidence(
                before.timeline, before.measures, before.main, (note,), (), before.windows, before.reproduced
            )
        notes.append(f"Retracted: with what came in commit {commit} the condition holds no more.")
    if end == start + evidence.clock.stream.max_session:
        notes.append("The session was closed since it had become as long as the stream allows (max_session).")
    everything = alive | (evidence.is_wanted & evidence.is_in_time)
    earlier = [each for each in sessions.bounds(everything, view.arrived, since) if each[1] <= start]
    pictured = _View(evidence, view.bounds, commit, view.arrived, everything)
    main = main_measure(evidence.rule)
    return KindEvidence(
        timeline=view.timeline(main, since),
        measures=measures,
        main=main.name,
        notes=tuple(notes),
        windows=_windows(pictured, [*earlier, (start, end)][-_MOST_WINDOWS:], start),
        reproduced=bool(fitting),
    )


class _Sessions:
    """The sessions of a key around the one that begins at `start`, event by event from the last pause before it on.

    Without such a pause among the events that there are, `start` is taken for the beginning of all.
    """

    def __init__(self, evidence: Evidence, start: int) -> None:
        window = evidence.rule.spec.window
        assert isinstance(window, Session)
        self._evidence, self._gap, self._longest = evidence, window.gap, evidence.clock.stream.max_session
        self._rows = evidence.is_wanted & evidence.since(evidence.rule.store, STANDS, floored=False)
        times = np.sort(evidence.events.times[self._rows & (evidence.events.times <= start)])
        pauses = np.flatnonzero(np.diff(times) > self._gap)
        self._begin = start
        if len(pauses):
            self._begin = int(times[pauses[-1] + 1])
        elif len(times) and times[0] - self._gap > evidence.earliest:
            self._begin = int(times[0])

    def alive(self, commit: int) -> Mask:
        """Which events sessions held in `commit`: taken when they came, and not forgotten or deleted before it."""
        events = self._evidence.events
        alive = np.zeros(len(events), dtype=bool)
        rows = self._rows & (events.times >= self._begin) & (events.commits <= commit)
        reached, oldest = -1, NEVER
        for at in np.flatnonzero(rows).tolist():
            if events.commits[at] > reached:
                oldest = self._pass(alive, reached, int(events.commits[at]))
                reached = int(events.commits[at])
            alive[at] = True
            time = int(events.times[at])
            if time < oldest:
                (end,) = [end for start, end in self.bounds(alive, at + 1) if start <= time < end]
                alive[at] = end > oldest
        self._pass(alive, reached, commit)
        return alive

    def bounds(self, among: Mask, arrived: int, since: int = NEVER) -> list[tuple[int, int]]:
        """Start and exclusive end of the sessions that some of the first `arrived` events make, from `since` on."""
        times = self._evidence.events.times[:arrived]
        times = np.sort(times[among[:arrived] & (times >= since)])
        found: list[tuple[int, int]] = []
        edges = [0, *(np.flatnonzero(np.diff(times) > self._gap) + 1).tolist(), len(times)]
        for low, high in pairwise(edges):
            first = low
            while first < high:
                longest = int(times[first]) + self._longest
                after = min(high, int(np.searchsorted(times, longest)))
                found.append((int(times[first]), min(int(times[after - 1]) + self._gap + 1, longest)))
                first = after
        return found

    def _pass(self, alive: Mask, after: int, commit: int) -> int:
        """Up to a commit, from the one `after` on: forgets old sessions and what is deleted; what ends then is too old."""
        evidence, oldest = self._evidence, NEVER
        gone_at = np.zeros(0, dtype=np.int64) if evidence.gone_at is None else evidence.gone_at[alive]
        deletions = set(gone_at[(gone_at > after) & (gone_at < commit)].tolist())
        for each in (*sorted(deletions), commit):
            oldest = int(evidence.clock.before(np.array([each]))[0]) - evidence.rule.allowed_lateness
            self._forget(alive, oldest)
            alive &= evidence.is_standing(each)
        return oldest

    def _forget(self, alive: Mask, oldest: int) -> None:
        times = self._evidence.events.times
        if alive.any() and times[alive].min() < oldest:
            ends = [end for _, end in self.bounds(alive, len(times)) if end <= oldest]
            alive &= times >= max(ends, default=NEVER)


_FINDERS: dict[str, Callable[[Evidence, Sequence[Mapping[str, Any]], int], KindEvidence]] = {
    LOOKBACK: _lookback,
    TUMBLING: _tiles,
    SLIDING: _tiles,
    SESSION: _session,
    SEQUENCE: sequence,
}


def main_measure(rule: CompiledRule) -> CompiledMeasure:
    """What a picture is about: rather a measure of values than a count, rather one that is or makes a limit, else the first."""
    limits = {name for name, values in find_measure_limits(rule).items() if values}
    limits |= {name for limit in find_event_limits(rule) for name in limit.measures}
    return max(rule.measures, key=lambda measure: (measure.feature.argument is not None, measure.name in limits))


def _lookback_of(measure: CompiledMeasure) -> Lookback:
    assert isinstance(measure.window, Lookback)
    return measure.window


def _context(length: int, days: float | None) -> int:
    return min(length, _MOST_CONTEXT) if days is None else round(days * MICROSECONDS["day"])


def _number(value: Any) -> float:
    """A value as a picture shows it: NaN where there is no number."""
    return float("nan") if value is None or isinstance(value, str) or not hasattr(value, "__float__") else float(value)

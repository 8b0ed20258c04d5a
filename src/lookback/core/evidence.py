"""What an alert was made of: the events that it counted or that its steps took, recomputed one alert at a time.

Slow and plain on purpose. It shares the expressions and the aggregates with the evaluator, but neither its state nor its
way of finding windows, sessions and sequences, so that equal results mean something.

An alert row says which commit brought it, not which event of that commit. Where that matters (revisions, windows that
late events enter, `early`), the row is recomputed as of the end of the commit and, if that gives other measures, as of
each event of the key in it, from the last to the first; what agrees is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import pandas as pd

from lookback.core.alerts import moment
from lookback.core.columns import Column, Mask, Values, from_values, text_of
from lookback.core.compiled import COUNT, CompiledMeasure, CompiledRule, CompiledStep, Feature
from lookback.core.durations import MICROSECONDS
from lookback.core.events import Events
from lookback.core.expressions import Expression
from lookback.core.keys import Int64s
from lookback.core.rules import parse_time
from lookback.core.streams import Stream
from lookback.core.types import BIGINT, array
from lookback.core.windows import LOOKBACK, SEQUENCE, SESSION, SLIDING, TUMBLING, Lookback, Session, Tiles
from lookback.core.wording import limits_of, measure_in_words, rule_in_words, step_in_words

_NEVER = -(2**62)
# Stands for the commit that deletes an event that is still there, and for a time after all others.
STANDS = 2**62
# Of a time line: more than a picture can show apart.
_MOST_EVENTS = 500
_MOST_WINDOWS = 60
# An alert lists the ids of so many events of a sequence.
_MOST_EVIDENCE = 100
# Of a key's history before the window: what a picture shows of it unless told otherwise.
_MOST_CONTEXT = 30 * MICROSECONDS["day"]
# Of a state, from its start on: the last commit before each change of its width (None: before the first), the width.
Span = Sequence[tuple[int | None, int]]


@dataclass(frozen=True)
class Activation:
    """A change of what is evaluated, after commit `arrival` (None: before the first).

    rule None: the rule keeps no state from then on. rule_id `*`: all state was cleared.
    """

    arrival: int | None
    rule_id: str
    rule: CompiledRule | None


@dataclass(frozen=True)
class Clock:
    """The watermarks of a stream.

    highs: commit -> its highest event time; commits that move nothing may be left out. advances: (arrival, time) of
    the `advance` commands. All in microseconds.
    """

    stream: Stream
    highs: Mapping[int, int]
    advances: Sequence[tuple[int | None, int]] = ()

    def before(self, commits: Int64s) -> Int64s:
        """The watermark that events of each commit are judged against; below all times where there is none."""
        known = np.array(sorted(self.highs), dtype=np.int64)
        highest = np.array([self.highs[int(commit)] for commit in known], dtype=np.int64)
        highest = np.concatenate(([_NEVER], np.maximum.accumulate(highest)))
        marks = highest[np.searchsorted(known, commits, side="left")]
        watermarks: Int64s = np.where(marks == _NEVER, _NEVER, marks - self.stream.max_out_of_orderness)
        for arrival, time in self.advances:
            due = commits > (-1 if arrival is None else arrival)
            watermarks = np.where(due, np.maximum(watermarks, time), watermarks)
        return watermarks


@dataclass(frozen=True)
class Subject:
    """The event that an alert is about: its place in the order of arrival (commit, microseconds, id as its type)."""

    commit: int
    time: int
    event_id: int | str


@dataclass(frozen=True)
class Reset:
    """An alert of a rule that resets, which emptied the windows of its key.

    subject: its event, or the one that began the wait for an absence, with the commit that brought the alert.
    due: of an absence, when it was due.
    """

    subject: Subject
    due: int | None = None


@dataclass(frozen=True)
class MeasureEvidence:
    """One measure of an alert. events: those it counted, oldest first.

    window_end: included if `end_included`, as the start always is. recorded: the value in the alert, recomputed: from
    all events that stood then, both as exact text (None: NULL). missing: how many of these have been deleted since and
    are not shown.
    """

    name: str
    text: str
    words: str
    window_start: Any
    window_end: Any
    recorded: str | None
    recomputed: str | None
    events: pd.DataFrame
    missing: int = 0
    end_included: bool = True


@dataclass(frozen=True)
class StepEvidence:
    """One step of a sequence. text: its condition; events: those it took, in the order taken.

    absent: nothing was to come; `events` are then those that came all the same. missing: how many events have been
    deleted since and are not shown.
    """

    name: str
    text: str
    words: str
    events: pd.DataFrame
    missing: int = 0
    absent: bool = False


@dataclass(frozen=True)
class Explanation:
    """Why an alert row was written, as things stood.

    alert: the row. rule: the row of the rules table that was in force. sentence: that rule in words. limits: the numbers
    that its condition compares measures with. kind: of the rule. notes: sentences about this row, such as why it was
    retracted. missing: events that counted and have been deleted since.

    timeline: the key's events for a picture, with columns event_time, event_id, value (what the measure `main` is made
    of), running (that measure as of each event, of a lookback rule), in_window (it counted) and is_alert; of a sequence
    also step (the name of the one that took it, or empty) and until (it ends what has begun).
    windows: of window rules, the key's windows for a picture, with columns window_start, window_end (excluded), value
    (the measure `main`) and is_alert; of a sequence the time that its steps had and, of an absence, the wait, with
    columns window_start, window_end (included) and name (steps, wait). steps: of a sequence, an absence as the last.

    reproduced: whether the very window came out, of a session, or the same events in the same order, of a sequence, and
    of an absence that nothing had come by then (or, of one that was retracted, that something did).
    """

    alert: Mapping[str, Any]
    rule: Mapping[str, Any]
    sentence: str
    limits: Mapping[str, tuple[float, ...]]
    measures: tuple[MeasureEvidence, ...]
    timeline: pd.DataFrame = field(repr=False)
    main: str = ""
    missing: int = 0
    kind: str = LOOKBACK
    notes: tuple[str, ...] = ()
    steps: tuple[StepEvidence, ...] = ()
    windows: pd.DataFrame = field(default_factory=pd.DataFrame, repr=False)
    reproduced: bool = True

    @property
    def key(self) -> Mapping[str, str | None]:
        """group_by field -> value, exact text."""
        return dict(self.alert["key"] or {})

    @property
    def consistent(self) -> bool:
        """Whether all that can be recomputed from the events that stood then is as the alert has it.

        Every measure, and what `reproduced` says.
        """
        return self.reproduced and all(measure.recorded == measure.recomputed for measure in self.measures)


@dataclass(frozen=True)
class Evidence:
    """The events of one key, in order of arrival, and what decides which of them count for a rule.

    spans: by the name of a state, see `state_spans`; a state without a span counts everything. resets: the alerts of
    this key that emptied its windows. gone_at: the commit that deleted each event, STANDS for none, shape (rows,).
    earliest: events before that time are not among `events`.
    """

    rule: CompiledRule
    events: Events
    ids: Column
    clock: Clock
    spans: Mapping[str, Span]
    resets: Sequence[Reset] = ()
    gone_at: Int64s | None = None
    earliest: int = _NEVER

    @cached_property
    def marks(self) -> Int64s:
        """The watermark that each event was judged against."""
        return self.clock.before(self.events.commits)

    @cached_property
    def wanted(self) -> Mask:
        """Of which events the rule's `where` holds."""
        return self.holds(self.rule.where)

    @cached_property
    def in_time(self) -> Mask:
        """Which events were not too late for the rule: by their own time, or by the last of their windows."""
        times, oldest, window = self.events.times, self.marks - self.rule.allowed_lateness, self.rule.rule.window
        mask: Mask = times >= oldest
        if isinstance(window, Tiles):
            mask = window.last_start(times) + window.size > oldest
        return mask

    @cached_property
    def _held(self) -> dict[str, Mask]:
        return {}

    def holds(self, condition: Expression | None) -> Mask:
        """Of which events a condition on the event alone holds; None holds of all."""
        if condition is None:
            return np.ones(len(self.events), dtype=bool)
        if condition.sql not in self._held:
            self._held[condition.sql] = self.events.value(condition).is_true()
        return self._held[condition.sql]

    def kept(self, feature: Feature) -> Mask:
        """Which events a feature keeps: where and filter hold, and the argument has a value."""
        mask = self.holds(feature.where) & self.holds(feature.filter)
        return mask if feature.argument is None else mask & self.events.value(feature.argument).is_known()

    @cached_property
    def until(self) -> Mask:
        """Which events end what a sequence has begun."""
        until = None if self.rule.sequence is None else self.rule.sequence.until
        return np.zeros(len(self.events), dtype=bool) if until is None else self.holds(until)

    @cached_property
    def gone(self) -> Mask:
        """Which events have been deleted since, and are counted but not shown."""
        return ~self.standing(STANDS - 1)

    def standing(self, commit: int) -> Mask:
        """Which events are not deleted by that commit or an earlier one."""
        mask = np.ones(len(self.events), dtype=bool)
        return mask if self.gone_at is None else mask & (self.gone_at > commit)

    def arrived(self, subject: Subject) -> int:
        """How many of the events had arrived when the subject was judged, itself included."""
        events = self.events
        tied = (events.commits == subject.commit) & (events.times == subject.time)
        before = (events.commits < subject.commit) | (
            (events.commits == subject.commit) & (events.times < subject.time)
        )
        ids = self.ids.take(tied).to_list()
        return int(before.sum()) + sum(1 for event_id in ids if event_id <= subject.event_id)

    def moments(self, commit: int, least: int = 0) -> list[int]:
        """How many events had arrived at the end of a commit and after each of its events, the latest first."""
        low, high = np.searchsorted(self.events.commits, (commit, commit + 1)).tolist()
        return [high, *range(high - 1, max(low, least - 1), -1)]

    def place(self, event_id: str, time: int | None = None, commit: int | None = None) -> int | None:
        """Position of the first event of that id (and time, and commit); None if it is not there."""
        here = np.ones(len(self.events), dtype=bool) if time is None else self.events.times == time
        if commit is not None:
            here &= self.events.commits == commit
        return next((at for at in np.flatnonzero(here).tolist() if self.events.id_text(at) == event_id), None)

    def begin(self, arrived: int) -> int:
        """How many of the first `arrived` events do not count since an alert emptied the windows after them."""
        return max((at for at in self._emptied if at < arrived), default=0)

    def is_over(self, due: int, commit: int) -> bool:
        """Whether a wait that a late event of `commit` begins is over at once."""
        return due < int(self.clock.before(np.array([commit], dtype=np.int64))[0])

    def since(self, name: str, commit: int, *, floored: bool = True) -> Mask:
        """Which events the state of that name may hold when `commit` is judged: not from before its start or floor."""
        mask = np.ones(len(self.events), dtype=bool)
        span = self.spans.get(name, ())
        if span:
            mask &= self.events.commits > (-1 if span[0][0] is None else span[0][0])
            if floored:
                mask &= self.events.times >= self._floor(span, commit)
        return mask

    def counted(
        self, measure: CompiledMeasure, first: int, last: int, arrived: int, commit: int, among: Mask | None = None
    ) -> Int64s:
        """Positions of the events that a measure counted, of the first `arrived`, in order of arrival.

        first, last: times, both included. among: the events of sessions; None: those that were in time.
        """
        events = self.events
        mask = (self.in_time if among is None else among) & (events.times >= first) & (events.times <= last)
        mask &= self.kept(measure.feature) & self.standing(commit)
        mask &= self.since(_state_of(self.rule, measure.feature), commit, floored=among is None)
        mask[arrived:] = False
        mask[: self.begin(arrived)] = False
        return np.flatnonzero(mask)

    def values(self, measure: CompiledMeasure, positions: Int64s, sizes: Sequence[int]) -> Column:
        """The measure over the first so many of the events at `positions`, for each of `sizes`."""
        feature = measure.feature
        aggregate = feature.aggregate
        values: Values = np.zeros(len(positions), dtype=np.int64)
        if feature.argument is not None and aggregate.stores_value:
            values = self.events.value(feature.argument).values[positions]
        index, upper = aggregate.index(values), np.array(sizes, dtype=np.int64)
        if feature.function == "count_distinct":
            # Set by set it would take the square of the time.
            seen: set[Any] = set()
            numbers = [0]
            for value in index:
                seen.add(value)
                numbers.append(len(seen))
            return Column(BIGINT, np.array(numbers, dtype=np.int64)[upper])
        return aggregate.finish(aggregate.ranges(index, np.zeros_like(upper), upper), feature.argument_type)

    def value(self, measure: CompiledMeasure, positions: Int64s) -> Any:
        """The measure over the events at `positions`; None for NULL."""
        return self.values(measure, positions, [len(positions)]).item(0)

    def frame(self, positions: Int64s, *, by_time: bool = True) -> pd.DataFrame:
        """The events at `positions`, those left out that have been deleted since: all fields, and `arrival`."""
        shown = positions[~self.gone[positions]]
        ordered = shown[np.argsort(self.events.times[shown], kind="stable")] if by_time else shown
        columns = {name: column.take(ordered).to_list() for name, column in self.events.columns.items()}
        return pd.DataFrame({**columns, "arrival": self.events.commits[ordered]})

    @cached_property
    def _emptied(self) -> list[int]:
        return [self._emptied_at(reset) for reset in self.resets]

    def _emptied_at(self, reset: Reset) -> int:
        subject = reset.subject
        if reset.due is not None and not self.is_over(reset.due, subject.commit):
            # Raised by the watermark, after all events of the commit.
            subject = Subject(subject.commit, STANDS, 0)
        return self.arrived(subject)

    def _floor(self, span: Span, commit: int) -> int:
        """Below it nothing counts: a window that was widened fills up anew."""
        floors = [_NEVER]
        for (_, width), (end, _) in pairwise(span):
            if end is not None:
                mark = int(self.clock.before(np.array([min(end + 1, commit)], dtype=np.int64))[0])
                floors.append(mark - width if mark != _NEVER else _NEVER)
        return max(floors)


def state_spans(activations: Iterable[Activation], before: int) -> dict[str, Span]:
    """Since when, and how wide, the states in use were kept when commit `before` was judged.

    activations: in the order in which they were obeyed. What no rule uses after a commit is forgotten.
    """
    rules: dict[str, CompiledRule] = {}
    spans: dict[str, list[tuple[int | None, int]]] = {}
    for arrival, changes in groupby(activations, key=lambda activation: activation.arrival):
        if arrival is not None and arrival >= before:
            break
        for change in changes:
            if change.rule_id == "*":
                spans = {}
            elif change.rule is None:
                rules.pop(change.rule_id, None)
            else:
                rules[change.rule_id] = change.rule
        widths = _widths(rules.values())
        spans = {name: [*spans.get(name, []), (arrival, width)] for name, width in widths.items()}
    return dict(spans)


def reach(rule: CompiledRule, stream: Stream, alert: Mapping[str, Any], days: float | None) -> tuple[int, int]:
    """Since when a picture shows the alert's key, and from what time on its events are needed; microseconds.

    days: how far before the window a picture goes; None: some times as far as the window is long, at most 30 days.
    """
    start, end, window = parse_time(alert["window_start"]), parse_time(alert["window_end"]), rule.rule.window
    if rule.rule.sequence is not None:
        within = rule.rule.sequence.within
        since = start - _context(within, days)
        return since, min(since, (start if _is_absence(rule) else end) - within)
    if isinstance(window, Tiles):
        since = start - _context(4 * window.size, days)
        return since, since
    if isinstance(window, Session):
        since = start - _context(4 * (end - start), days)
        # Whether a late event was taken depends on the sessions that there were then.
        return since, min(since, start - stream.max_session - rule.allowed_lateness - window.gap)
    main = _main_measure(rule)
    time, own = parse_time(alert["event_time"]), _lookback_of(main)
    since = own.bounds(time)[0] - _context(own.size, days)
    firsts = [_lookback_of(measure).bounds(time)[0] for measure in rule.measures]
    return since, min(since - own.size - own.delay, *firsts)


def explained(
    evidence: Evidence, rows: Sequence[Mapping[str, Any]], rule_row: Mapping[str, Any], since: int
) -> Explanation:
    """The explanation of an alert's row. rows: those of the alert by revision, up to the one to be explained.

    Each has the columns of the alerts table, measures as exact text. since: from what time on pictures show the key.
    """
    rule, alert = evidence.rule, rows[-1]
    found = _FINDERS[rule.rule.kind](evidence, rows, since)
    notes = found.notes
    if alert["verdict"] == "suppressed":
        notes = (*notes, "Suppressed: an alert of the key was raised shortly before.")
    if alert["revision"] and alert["verdict"] != "retracted":
        notes = (*notes, f"Revised: this is revision {alert['revision']}, over what had arrived with commit {alert['arrival']}.")  # fmt: skip
    return Explanation(
        alert=alert,
        rule=rule_row,
        sentence=rule_in_words(rule),
        limits=limits_of(rule),
        measures=found.measures,
        timeline=found.timeline,
        main=found.main,
        missing=max([*(m.missing for m in found.measures), *(s.missing for s in found.steps)], default=0),
        kind=rule.rule.kind,
        notes=notes,
        steps=found.steps,
        windows=found.windows,
        reproduced=found.reproduced,
    )


@dataclass(frozen=True)
class _Found:
    """What was found out about a row of one kind of rule; see Explanation."""

    timeline: pd.DataFrame
    measures: tuple[MeasureEvidence, ...] = ()
    main: str = ""
    notes: tuple[str, ...] = ()
    steps: tuple[StepEvidence, ...] = ()
    windows: pd.DataFrame = field(default_factory=pd.DataFrame)
    reproduced: bool = True


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
        return self.evidence.counted(measure, *self.bounds[measure.name], self.arrived, self.commit, self.among)

    def agreeing(self, recorded: Mapping[str, str | None], moments: Sequence[int]) -> _View:
        """The view as of the first of `moments` that gives the recorded measures, else of the first of all."""
        left = list(moments)
        for measure in self.evidence.rule.measures:
            # What had arrived at an earlier moment is the beginning of what had at the latest.
            whole = _View(self.evidence, self.bounds, self.commit, max(left, default=0), self.among)
            positions = whole.counted(measure)
            column = self.evidence.values(measure, positions, np.searchsorted(positions, left).tolist())
            left = [each for at, each in enumerate(left) if text_of(column.item(at)) == recorded.get(measure.name)]
        return _View(self.evidence, self.bounds, self.commit, (left or list(moments))[0], self.among)

    def agrees(self, recorded: Mapping[str, str | None]) -> bool:
        """Whether every measure comes out as recorded."""
        evidence = self.evidence
        values = {m.name: text_of(evidence.value(m, self.counted(m))) for m in evidence.rule.measures}
        return values == {name: recorded.get(name) for name in values}

    def measured(self, recorded: Mapping[str, str | None], *, end_included: bool) -> tuple[MeasureEvidence, ...]:
        """The evidence of each measure."""
        results, evidence = [], self.evidence
        for measure, spec in zip(evidence.rule.measures, evidence.rule.rule.measures, strict=True):
            first, last = self.bounds[measure.name]
            positions = self.counted(measure)
            results.append(
                MeasureEvidence(
                    name=measure.name,
                    text=spec.text,
                    words=measure_in_words(measure),
                    window_start=moment(first),
                    window_end=moment(last if end_included else last + 1),
                    recorded=recorded.get(measure.name),
                    recomputed=text_of(evidence.value(measure, positions)),
                    events=evidence.frame(positions),
                    missing=int(evidence.gone[positions].sum()),
                    end_included=end_included,
                )
            )
        return tuple(results)

    def timeline(self, measure: CompiledMeasure, since: int, event_id: str | None = None) -> pd.DataFrame:
        """The key's last events, from `since` to the window's end, that the measure sees; see Explanation.

        event_id: of the alert's own event, if it has one; the measure is then given as of each event.
        """
        evidence, events, feature = self.evidence, self.evidence.events, measure.feature
        seen = evidence.kept(feature) & (events.times >= since) & ~evidence.gone & evidence.standing(self.commit)
        seen[self.arrived :] = False
        if event_id is None:
            seen &= events.times <= self.bounds[measure.name][1]
        at = np.flatnonzero(seen)
        at = at[np.argsort(events.times[at], kind="stable")][-_MOST_EVENTS:]
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
        return self.evidence.counted(measure, first, last, at + 1, int(events.commits[at]))


def _lookback(evidence: Evidence, rows: Sequence[Mapping[str, Any]], since: int) -> _Found:
    """A lookback rule: an event, as of its arrival, or of that of a later one in its window."""
    rule, alert = evidence.rule, rows[-1]
    time, commit, event_id = parse_time(alert["event_time"]), int(alert["arrival"]), str(alert["event_id"])
    view = _View(evidence, {m.name: _lookback_of(m).bounds(time) for m in rule.measures}, commit)
    is_revised = rule.rule.late == "revise"
    at = evidence.place(event_id, time, None if is_revised else commit)
    own = 0 if at is None else at + 1
    moments = evidence.moments(commit, own) if is_revised else [own]
    recorded = alert["measures"] or {}
    view, main = view.agreeing(recorded, moments), _main_measure(rule)
    notes = []
    if alert["verdict"] == "retracted":
        notes.append(f"Retracted: over what had arrived with commit {commit} the condition holds no more.")
    if evidence.begin(view.arrived):
        notes.append(
            "What had arrived by the rule's alert before this one does not count: an alert empties its windows."
        )
    return _Found(
        timeline=view.timeline(main, since, event_id),
        measures=view.measured(recorded, end_included=True),
        main=main.name,
        notes=tuple(notes),
    )


def _tiles(evidence: Evidence, rows: Sequence[Mapping[str, Any]], since: int) -> _Found:
    """A window, as of the commit after which the watermark passed its end, or of an event that came into it."""
    rule, alert, tiles = evidence.rule, rows[-1], evidence.rule.rule.window
    assert isinstance(tiles, Tiles)
    start, commit, recorded = parse_time(alert["window_start"]), int(alert["arrival"]), alert["measures"] or {}
    view = _window_view(evidence, start, start + tiles.size, commit)
    view, main = view.agreeing(recorded, evidence.moments(commit)), _main_measure(rule)
    notes = []
    if alert["verdict"] == "retracted":
        notes.append(f"Retracted: with what came in commit {commit} the condition holds no more.")
    starts = range(start, since - 1, -tiles.slide)[:_MOST_WINDOWS]
    return _Found(
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
    evidence, main = view.evidence, _main_measure(view.evidence.rule)
    times = np.sort(evidence.events.times[: view.arrived][evidence.wanted[: view.arrived]])
    found = []
    for start, end in sorted(windows):
        if np.searchsorted(times, end) > np.searchsorted(times, start):
            positions = evidence.counted(main, start, end - 1, view.arrived, view.commit, view.among)
            found.append((moment(start), moment(end), _number(evidence.value(main, positions)), start == own))
    return pd.DataFrame(found, columns=["window_start", "window_end", "value", "is_alert"])


def _session(evidence: Evidence, rows: Sequence[Mapping[str, Any]], since: int) -> _Found:
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
            note = f"Retracted: with what came in commit {commit} it became part of the session from {_said(other[0])} to {_said(other[1])}."
            return _Found(before.timeline, before.measures, before.main, (note,), (), before.windows, before.reproduced)
        notes.append(f"Retracted: with what came in commit {commit} the condition holds no more.")
    if end == start + evidence.clock.stream.max_session:
        notes.append("The session was closed since it had become as long as the stream allows (max_session).")
    everything = alive | (evidence.wanted & evidence.in_time)
    earlier = [each for each in sessions.bounds(everything, view.arrived, since) if each[1] <= start]
    pictured = _View(evidence, view.bounds, commit, view.arrived, everything)
    main = _main_measure(evidence.rule)
    return _Found(
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
        window = evidence.rule.rule.window
        assert isinstance(window, Session)
        self._evidence, self._gap, self._longest = evidence, window.gap, evidence.clock.stream.max_session
        self._rows = evidence.wanted & evidence.since(evidence.rule.store, STANDS, floored=False)
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
        reached, oldest = -1, _NEVER
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

    def bounds(self, among: Mask, arrived: int, since: int = _NEVER) -> list[tuple[int, int]]:
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
        evidence, oldest = self._evidence, _NEVER
        gone_at = np.zeros(0, dtype=np.int64) if evidence.gone_at is None else evidence.gone_at[alive]
        deletions = set(gone_at[(gone_at > after) & (gone_at < commit)].tolist())
        for each in (*sorted(deletions), commit):
            oldest = int(evidence.clock.before(np.array([each]))[0]) - evidence.rule.allowed_lateness
            self._forget(alive, oldest)
            alive &= evidence.standing(each)
        return oldest

    def _forget(self, alive: Mask, oldest: int) -> None:
        times = self._evidence.events.times
        if alive.any() and times[alive].min() < oldest:
            ends = [end for _, end in self.bounds(alive, len(times)) if end <= oldest]
            alive &= times >= max(ends, default=_NEVER)


class _Match:
    """Events taken by the steps of a sequence, one after another; the last list is the current step's."""

    def __init__(self, evidence: Evidence) -> None:
        assert evidence.rule.sequence is not None
        self._evidence, self.steps = evidence, evidence.rule.sequence.steps
        self.taken: list[list[int]] = [[]]

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
        """Forgets events that have been deleted by a commit."""
        if self._evidence.gone_at is not None:
            standing = self._evidence.standing(commit)
            self.taken = [[at for at in positions if standing[at]] for positions in self.taken]

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
        return from_values(array(columns[own].type), [columns[own].stored(np.array(positions, dtype=np.int64))])


def _sequence(evidence: Evidence, rows: Sequence[Mapping[str, Any]], since: int) -> _Found:
    """A sequence: the events that its steps took, up to the alert's own; of an absence also what came or did not."""
    rule, alert = evidence.rule, rows[-1]
    absence, recorded, commit = _is_absence(rule), list(alert["evidence"] or []), int(alert["arrival"])
    at = evidence.place(str(alert["event_id"]), parse_time(alert["window_start" if absence else "event_time"]))
    match = None if at is None else _matched(evidence, at, recorded)
    standing = evidence.standing(commit)
    if match is not None:
        # What was deleted while the wait lasted is no part of it any more.
        match.drop(commit)
    reproduced = match is not None and match.ids[:_MOST_EVIDENCE] == recorded
    if match is not None and reproduced:
        taken = match.taken
        steps = [_step_of(evidence, step, positions) for step, positions in zip(match.steps, taken, strict=True)]
    else:
        # At least the events that the alert names.
        taken = [[place for event_id in recorded if (place := evidence.place(event_id)) is not None]]
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
            notes = (f"Waited from {_said(parse_time(alert['window_start']))} to {_said(due)}, and nothing of the kind came.",)  # fmt: skip
    names = {each: step.name for step, positions in zip(steps, [*taken, came], strict=False) for each in positions}
    return _Found(
        timeline=_sequence_timeline(evidence, alert, since, names, at),
        notes=notes,
        steps=tuple(steps),
        windows=_spans_of(evidence, alert, taken),
        reproduced=reproduced,
    )


def _matched(evidence: Evidence, at: int, recorded: Sequence[str]) -> _Match | None:
    """The match that the event at one position ends, as of its arrival; None if there is none.

    expiry fixed: the one that begins with the first event that the alert names.
    """
    rule, spec = evidence.rule, evidence.rule.rule.sequence
    assert spec is not None
    commit = int(evidence.events.commits[at])
    rows = evidence.wanted & evidence.in_time & evidence.since(rule.store, commit)
    rows[at + 1 :] = False
    rows[: evidence.begin(at + 1)] = False
    if spec.expiry != "fixed":
        return _sliding(evidence, rows & evidence.standing(commit), at, spec.within)
    begin = evidence.place(recorded[0]) if recorded else None
    match = None if begin is None else _fixed(evidence, rows, at, spec.within, begin)
    if match is not None or not evidence.gone.any():
        return match
    # The first event may have been deleted since: the one that makes the others come out.
    for other in np.flatnonzero(rows & (evidence.events.times >= evidence.events.times[at] - spec.within)).tolist():
        match = _fixed(evidence, rows, at, spec.within, other)
        if match is not None and [each for each in match.ids if each in recorded][:_MOST_EVIDENCE] == recorded:
            return match
    return None


def _sliding(evidence: Evidence, rows: Mask, at: int, within: int) -> _Match | None:
    times, until = evidence.events.times, evidence.until
    near = np.flatnonzero(rows & (times >= times[at] - within) & (times <= times[at]))
    ordered = near[np.argsort(times[near], kind="stable")].tolist()
    ends = [rank for rank, each in enumerate(ordered[:-1]) if until[each]]
    match = _Match(evidence)
    for each in ordered[ends[-1] + 1 if ends else 0 :]:
        if match.is_dead:
            return None
        match.offer(each)
    return match if match.ends_with(at) else None


def _fixed(evidence: Evidence, rows: Mask, at: int, within: int, begin: int) -> _Match | None:
    times, until = evidence.events.times, evidence.until
    match = _Match(evidence)
    for each in (begin + np.flatnonzero(rows[begin:])).tolist():
        match.drop(int(evidence.events.commits[each]))
        if not match.taken[0] and each != begin:
            return None
        first = int(times[(match.taken[0] or [begin])[0]])
        if times[each] < first:
            continue
        if times[each] > first + within:
            if until[each] or _Match(evidence).offer(each):
                return None
            continue
        if not match.is_dead:
            match.offer(each)
        if each != at and until[each]:
            return None
    return match if match.ends_with(at) else None


def _came(evidence: Evidence, match: _Match, at: int, due: int, arrived: int) -> list[int]:
    """The events that end the wait of the event at one position, of the first `arrived`."""
    rule, times = evidence.rule, evidence.events.times
    assert rule.sequence is not None
    assert rule.sequence.absent is not None
    rows = evidence.wanted & evidence.in_time & (times <= due)
    rows &= evidence.since(rule.store, int(evidence.events.commits[at]), floored=False)
    rows &= (times > times[at]) | ((times == times[at]) & (np.arange(len(times)) > at))
    rows[arrived:] = False
    rows[: evidence.begin(at + 1)] = False
    # What was deleted before the wait began did not end it.
    rows &= evidence.standing(int(evidence.events.commits[at]))
    return [each for each in np.flatnonzero(rows).tolist() if match.satisfies(rule.sequence.absent, each)]


def _step_of(evidence: Evidence, step: CompiledStep, positions: Sequence[int]) -> StepEvidence:
    spec = step.step
    return _step_evidence(evidence, spec.name, spec.condition, step_in_words(spec), positions, absent=spec.absent)


def _step_evidence(
    evidence: Evidence, name: str, text: str, words: str, positions: Sequence[int], *, absent: bool = False
) -> StepEvidence:
    listed = np.array(positions, dtype=np.int64)
    frame = evidence.frame(listed, by_time=False)
    return StepEvidence(name, text, words, frame, len(listed) - len(frame), absent)


def _spans_of(evidence: Evidence, alert: Mapping[str, Any], taken: Sequence[Sequence[int]]) -> pd.DataFrame:
    """The time that a sequence's steps had and, of an absence, the wait."""
    spec, start, end = evidence.rule.rule.sequence, parse_time(alert["window_start"]), parse_time(alert["event_time"])
    assert spec is not None
    last = start if _is_absence(evidence.rule) else end
    first = last - spec.within
    if spec.expiry == "fixed":
        first = min((int(evidence.events.times[at]) for at in taken[0]), default=start)
        last = first + spec.within
    spans = [(moment(first), moment(last), "steps")]
    if _is_absence(evidence.rule):
        spans.append((moment(start), moment(end), "wait"))
    return pd.DataFrame(spans, columns=["window_start", "window_end", "name"])


def _sequence_timeline(
    evidence: Evidence, alert: Mapping[str, Any], since: int, names: Mapping[int, str], own: int | None
) -> pd.DataFrame:
    events, last, until = evidence.events, parse_time(alert["event_time"]), evidence.until
    seen = evidence.wanted & (events.times >= since) & (events.times <= last) & ~evidence.gone
    seen &= evidence.standing(int(alert["arrival"])) & (events.commits <= int(alert["arrival"]))
    at = np.flatnonzero(seen)
    listed = at[np.argsort(events.times[at], kind="stable")][-_MOST_EVENTS:].tolist()
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


_FINDERS: dict[str, Callable[[Evidence, Sequence[Mapping[str, Any]], int], _Found]] = {
    LOOKBACK: _lookback,
    TUMBLING: _tiles,
    SLIDING: _tiles,
    SESSION: _session,
    SEQUENCE: _sequence,
}


def _is_absence(rule: CompiledRule) -> bool:
    return rule.sequence is not None and rule.sequence.absent is not None


def _main_measure(rule: CompiledRule) -> CompiledMeasure:
    """What a picture is about: rather a measure of values than a count, rather one with a plain limit, else the first."""
    limits = limits_of(rule)
    return max(
        rule.measures, key=lambda measure: (measure.feature.argument is not None, bool(limits.get(measure.name)))
    )


def _lookback_of(measure: CompiledMeasure) -> Lookback:
    assert isinstance(measure.window, Lookback)
    return measure.window


def _context(length: int, days: float | None) -> int:
    return min(length, _MOST_CONTEXT) if days is None else round(days * MICROSECONDS["day"])


def _state_of(rule: CompiledRule, feature: Feature) -> str:
    """The name under which spans tell since when a measure's events are kept: a session's are part of its store."""
    return f"{rule.store}:{feature.feature_id}" if rule.store else feature.feature_id


def _widths(rules: Iterable[CompiledRule]) -> dict[str, int]:
    widths: dict[str, int] = {}
    for rule in rules:
        needs = dict(rule.needs)
        if rule.store:
            needs |= {_state_of(rule, measure.feature): rule.needs[rule.store] for measure in rule.measures}
        for name, width in needs.items():
            widths[name] = max(width, widths.get(name, 0))
    return widths


def _number(value: Any) -> float:
    """A value as a picture shows it: NaN where there is no number."""
    return float("nan") if value is None or isinstance(value, str) or not hasattr(value, "__float__") else float(value)


def _said(microseconds: int) -> str:
    return f"{moment(microseconds):%Y-%m-%d %H:%M:%S} UTC"

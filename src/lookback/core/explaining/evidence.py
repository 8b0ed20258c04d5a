"""What an alert is explained by: the events of its key, which of them count, and the form that an explanation has.

`Evidence` tells which events stood, were in time and were counted by a measure. It shares the expressions and the
aggregates with the evaluator, but not its state. `explaining` makes the explanation of an alert's row of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import pandas as pd

from lookback.core.expressions.compiling import Expression
from lookback.core.rules.compiled import CompiledMeasure, CompiledRule, Feature
from lookback.core.streams.declaration import Stream
from lookback.core.streams.events import Events
from lookback.core.values.columns import Column, Mask, Values
from lookback.core.values.keys import Int64s
from lookback.core.values.times import to_utc
from lookback.core.values.types import BIGINT
from lookback.core.values.windows import LOOKBACK, TiledWindow, align_down

# A time before all others.
NEVER = -(2**62)
# Stands for the commit that deletes an event that is still there, and for a time after all others.
STANDS = 2**62
# Of a time line: more than a picture can show apart.
MOST_EVENTS = 500
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
        highest = np.concatenate(([NEVER], np.maximum.accumulate(highest)))
        marks = highest[np.searchsorted(known, commits, side="left")]
        watermarks: Int64s = np.where(marks == NEVER, NEVER, marks - self.stream.max_out_of_orderness)
        for arrival, time in self.advances:
            due = commits > (-1 if arrival is None else arrival)
            watermarks = np.where(due, np.maximum(watermarks, time), watermarks)
        return watermarks


@dataclass(frozen=True)
class JudgedSubject:
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

    subject: JudgedSubject
    due: int | None = None


@dataclass(frozen=True)
class MeasureEvidence:
    """One measure of an alert. events: those it counted, oldest first.

    window_end: included if `end_included`, as the start always is. recorded: the value in the alert, recomputed: from
    all events that stood then, both as exact text (None: NULL). shown: the value in the alert as its message shows it. missing: how many of these have been deleted since and
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
    shown: str | None = None


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

    event_limits: (text, value) of what the condition compares the event's own value of `main`'s field with, such as
    ("3 * usual", "150.02"): the limit as it was for this event.

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
    event_limits: tuple[tuple[str, str], ...] = ()

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
class KindEvidence:
    """What was found out about a row of one kind of rule; see Explanation."""

    timeline: pd.DataFrame
    measures: tuple[MeasureEvidence, ...] = ()
    main: str = ""
    notes: tuple[str, ...] = ()
    steps: tuple[StepEvidence, ...] = ()
    windows: pd.DataFrame = field(default_factory=pd.DataFrame)
    reproduced: bool = True


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
    earliest: int = NEVER

    @cached_property
    def watermarks(self) -> Int64s:
        """The watermark that each event was judged against."""
        return self.clock.before(self.events.commits)

    @cached_property
    def is_wanted(self) -> Mask:
        """Of which events the rule's `where` holds."""
        return self.holds(self.rule.where)

    @cached_property
    def is_in_time(self) -> Mask:
        """Which events were not too late for the rule: by their own time, or by the last of their windows."""
        times, oldest, window = self.events.times, self.watermarks - self.rule.allowed_lateness, self.rule.spec.window
        mask: Mask = times >= oldest
        if isinstance(window, TiledWindow):
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

    def is_kept(self, feature: Feature) -> Mask:
        """Which events a feature keeps: where and filter hold, and the argument has a value."""
        mask = self.holds(feature.where) & self.holds(feature.filter)
        return mask if feature.argument is None else mask & self.events.value(feature.argument).is_known()

    @cached_property
    def ends_sequence(self) -> Mask:
        """Which events end what a sequence has begun."""
        until = None if self.rule.sequence is None else self.rule.sequence.until
        return np.zeros(len(self.events), dtype=bool) if until is None else self.holds(until)

    @cached_property
    def is_deleted(self) -> Mask:
        """Which events have been deleted since, and are counted but not shown."""
        return ~self.is_standing(STANDS - 1)

    def is_standing(self, commit: int) -> Mask:
        """Which events are not deleted by that commit or an earlier one."""
        mask = np.ones(len(self.events), dtype=bool)
        return mask if self.gone_at is None else mask & (self.gone_at > commit)

    def count_arrived(self, subject: JudgedSubject) -> int:
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

    def find_position(self, event_id: str, time: int | None = None, commit: int | None = None) -> int | None:
        """Position of the first event of that id (and time, and commit); None if it is not there."""
        here = np.ones(len(self.events), dtype=bool) if time is None else self.events.times == time
        if commit is not None:
            here &= self.events.commits == commit
        return next((at for at in np.flatnonzero(here).tolist() if self.events.id_text(at) == event_id), None)

    def first_counted(self, arrived: int) -> int:
        """How many of the first `arrived` events do not count since an alert emptied the windows after them."""
        return max((at for at in self._emptied if at < arrived), default=0)

    def is_over(self, due: int, commit: int) -> bool:
        """Whether a wait that a late event of `commit` begins is over at once."""
        return due < int(self.clock.before(np.array([commit], dtype=np.int64))[0])

    def since(self, name: str, commit: int, *, floored: bool = True, resolution: int = 0) -> Mask:
        """Which events the state of that name may hold when `commit` is judged: not from before its start or floor.

        resolution: that of the state's windows.
        """
        mask = np.ones(len(self.events), dtype=bool)
        span = self.spans.get(name, ())
        if span:
            mask &= self.events.commits > (-1 if span[0][0] is None else span[0][0])
            if floored:
                mask &= self.events.times >= align_down(self._floor(span, commit), resolution)
        return mask

    def find_counted(
        self, measure: CompiledMeasure, first: int, last: int, arrived: int, commit: int, among: Mask | None = None
    ) -> Int64s:
        """Positions of the events that a measure counted, of the first `arrived`, in order of arrival.

        first, last: times, both included. among: the events of sessions; None: those that were in time.
        """
        events = self.events
        mask = (self.is_in_time if among is None else among) & (events.times >= first) & (events.times <= last)
        feature = measure.feature
        mask &= self.is_kept(feature) & self.is_standing(commit)
        mask &= self.since(_state_of(self.rule, feature), commit, floored=among is None, resolution=feature.resolution)
        mask[arrived:] = False
        mask[: self.first_counted(arrived)] = False
        return np.flatnonzero(mask)

    def values(self, measure: CompiledMeasure, positions: Int64s, sizes: Sequence[int]) -> Column:
        """The measure over the first so many of the events at `positions`, for each of `sizes`."""
        feature = measure.feature
        aggregate = feature.aggregate
        values: Values = np.zeros(len(positions), dtype=np.int64)
        if feature.argument is not None and aggregate.stores_value:
            values = self.events.value(feature.argument).values[positions]
        index, upper = aggregate.build_index(values), np.array(sizes, dtype=np.int64)
        if feature.function == "count_distinct":
            # Set by set it would take the square of the time.
            seen: set[Any] = set()
            numbers = [0]
            for value in index:
                seen.add(value)
                numbers.append(len(seen))
            return Column(BIGINT, np.array(numbers, dtype=np.int64)[upper])
        return aggregate.finish(aggregate.aggregate_ranges(index, np.zeros_like(upper), upper), feature.argument_type)

    def value(self, measure: CompiledMeasure, positions: Int64s) -> Any:
        """The measure over the events at `positions`; None for NULL."""
        return self.values(measure, positions, [len(positions)]).item(0)

    def frame(self, positions: Int64s, *, by_time: bool = True) -> pd.DataFrame:
        """The events at `positions`, those left out that have been deleted since: all fields, and `arrival`."""
        shown = positions[~self.is_deleted[positions]]
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
            subject = JudgedSubject(subject.commit, STANDS, 0)
        return self.count_arrived(subject)

    def _floor(self, span: Span, commit: int) -> int:
        """Below it nothing counts: a window that was widened fills up anew."""
        floors = [NEVER]
        for (_, width), (end, _) in pairwise(span):
            if end is not None:
                mark = int(self.clock.before(np.array([min(end + 1, commit)], dtype=np.int64))[0])
                floors.append(mark - width if mark != NEVER else NEVER)
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


def format_time(microseconds: int) -> str:
    """A time as the notes of an explanation say it."""
    return f"{to_utc(microseconds):%Y-%m-%d %H:%M:%S} UTC"

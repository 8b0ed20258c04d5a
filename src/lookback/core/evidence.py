"""What an alert was made of: the events that each of its measures counted, recomputed one alert at a time.

Slow and plain on purpose. It shares the expressions and the aggregates with the evaluator, but neither its state nor its
way of finding windows, so that equal results mean something.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd

from lookback.core.alerts import moment
from lookback.core.columns import Column, Mask, Values, text_of
from lookback.core.compiled import CompiledMeasure, CompiledRule, Feature
from lookback.core.events import Events
from lookback.core.keys import Int64s
from lookback.core.streams import Stream

_NEVER = -(2**62)
# Of a time line: more than a picture can show apart.
_MOST_EVENTS = 500
# Of a feature, from its start on: the last commit before each change of its width (None: before the first), the width.
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
class MeasureEvidence:
    """One measure of an alert. events: those it counted, oldest first; both ends of the window are included.

    recorded: the value in the alert, recomputed: from all events that stood then, both as exact text (None: NULL).
    missing: how many of these have been deleted since and are not shown.
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


@dataclass(frozen=True)
class Explanation:
    """Why an alert was raised, as things stood.

    alert: its row. rule: the row of the rules table that was in force. sentence: that rule in words. limits: the numbers
    that its condition compares measures with. timeline: the key's events for a picture, with columns event_time,
    event_id, value (what the measure `main` is made of), running (that measure as of each event), in_window (it counted)
    and is_alert. missing: events that counted and have been deleted since.
    """

    alert: Mapping[str, Any]
    rule: Mapping[str, Any]
    sentence: str
    limits: Mapping[str, tuple[float, ...]]
    measures: tuple[MeasureEvidence, ...]
    timeline: pd.DataFrame = field(repr=False)
    main: str = ""
    missing: int = 0

    @property
    def key(self) -> Mapping[str, str | None]:
        """group_by field -> value, exact text."""
        return dict(self.alert["key"] or {})

    @property
    def consistent(self) -> bool:
        """Whether every measure, recomputed from the events that stood then, is the one in the alert."""
        return all(measure.recorded == measure.recomputed for measure in self.measures)


@dataclass(frozen=True)
class Evidence:
    """The events of one key, in order of arrival, and what decides which of them count for a rule.

    spans: by feature_id, see `feature_spans`. A feature without a span counts everything.
    """

    rule: CompiledRule
    events: Events
    ids: Column
    clock: Clock
    spans: Mapping[str, Span]

    @cached_property
    def taken(self) -> Mask:
        """Which events were not too late for the rule."""
        marks = self.clock.before(self.events.commits)
        mask: Mask = self.events.times >= marks - self.rule.allowed_lateness
        return mask

    def arrived(self, subject: Subject) -> int:
        """How many of the events had arrived when the subject was judged, itself included."""
        events = self.events
        tied = (events.commits == subject.commit) & (events.times == subject.time)
        before = (events.commits < subject.commit) | (
            (events.commits == subject.commit) & (events.times < subject.time)
        )
        ids = self.ids.take(tied).to_list()
        return int(before.sum()) + sum(1 for event_id in ids if event_id <= subject.event_id)

    def counted(self, measure: CompiledMeasure, subject: Subject, arrived: int | None = None) -> Int64s:
        """Positions of the events that the measure counted for the subject, in order of arrival.

        arrived: what the method of that name gives, where it is known.
        """
        first, last = window_of(measure, subject.time)
        events = self.events
        mask = self.taken & (events.times >= first) & (events.times <= last)
        mask[self.arrived(subject) if arrived is None else arrived :] = False
        mask &= _kept(measure.feature, events)
        span = self.spans.get(measure.feature.feature_id, ())
        if span:
            since = span[0][0]
            mask &= events.commits > (-1 if since is None else since)
            mask &= events.times >= self._floor(span, subject.commit)
        return np.flatnonzero(mask)

    def value(self, measure: CompiledMeasure, positions: Int64s) -> Any:
        """The measure over the events at `positions`; None for NULL."""
        feature = measure.feature
        aggregate = feature.aggregate
        values: Values = np.zeros(len(positions), dtype=np.int64)
        if feature.argument is not None and aggregate.stores_value:
            values = self.events.value(feature.argument).values[positions]
        bounds = np.array([0], dtype=np.int64), np.array([len(positions)], dtype=np.int64)
        return aggregate.finish(aggregate.ranges(aggregate.index(values), *bounds), feature.argument_type).item(0)

    def subject(self, at: int) -> Subject:
        """The event at one position, as a subject."""
        return Subject(int(self.events.commits[at]), int(self.events.times[at]), self.ids.item(at))

    def frame(self, positions: Int64s) -> pd.DataFrame:
        """The events at `positions` by event time: all fields, `arrival` and the measures' own arguments left as they are."""
        ordered = positions[np.argsort(self.events.times[positions], kind="stable")]
        columns = {name: column.take(ordered).to_list() for name, column in self.events.columns.items()}
        return pd.DataFrame({**columns, "arrival": self.events.commits[ordered]})

    def _floor(self, span: Span, commit: int) -> int:
        """Below it nothing counts: a window that was widened fills up anew."""
        ends = [arrival for arrival, _ in span[1:]]
        floors = [_NEVER]
        for (_, width), end in zip(span[:-1], ends, strict=True):
            if end is not None:
                mark = int(self.clock.before(np.array([min(end + 1, commit)], dtype=np.int64))[0])
                floors.append(mark - width if mark != _NEVER else _NEVER)
        return max(floors)


def window_of(measure: CompiledMeasure, time: int) -> tuple[int, int]:
    """First and last time, both included, that a measure covers for an event at `time`."""
    last = time - measure.window.delay
    return last - measure.window.size, last


def feature_spans(activations: Iterable[Activation], before: int) -> dict[str, Span]:
    """Since when, and how wide, the features in use were kept when commit `before` was judged.

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


def measured(
    evidence: Evidence, subject: Subject, recorded: Mapping[str, str | None], gone: Mask, words: Mapping[str, str]
) -> tuple[MeasureEvidence, ...]:
    """The evidence of each measure. gone: which events have been deleted since, and are counted but not shown."""
    results = []
    for measure in evidence.rule.measures:
        first, last = window_of(measure, subject.time)
        positions = evidence.counted(measure, subject)
        shown = positions[~gone[positions]]
        results.append(
            MeasureEvidence(
                name=measure.name,
                text=next(m.text for m in evidence.rule.rule.measures if m.name == measure.name),
                words=words[measure.name],
                window_start=moment(first),
                window_end=moment(last),
                recorded=recorded.get(measure.name),
                recomputed=text_of(evidence.value(measure, positions)),
                events=evidence.frame(shown),
                missing=len(positions) - len(shown),
            )
        )  # fmt: skip
    return tuple(results)


def timeline(evidence: Evidence, subject: Subject, measure: CompiledMeasure, since: int, gone: Mask) -> pd.DataFrame:
    """The key's last events, from `since` on, that the measure sees, with its value as of each; see Explanation."""
    events, feature = evidence.events, measure.feature
    seen = _kept(feature, events) & (events.times >= since) & ~gone
    seen[evidence.arrived(subject) :] = False
    at = np.flatnonzero(seen)
    at = at[np.argsort(events.times[at], kind="stable")][-_MOST_EVENTS:]
    of_each = [evidence.counted(measure, evidence.subject(int(each)), int(each) + 1) for each in at]
    running = [evidence.value(measure, positions) for positions in of_each]
    counts = feature.argument is None or not feature.aggregate.stores_value
    values = [1.0] * len(at) if counts else [_number(v) for v in events.value(feature.argument).take(at).to_list()]  # type: ignore[arg-type]
    ids = [text_of(evidence.ids.item(int(each))) for each in at]
    return pd.DataFrame(
        {
            "event_time": pd.to_datetime(events.times[at], unit="us", utc=True),
            "event_id": ids,
            "value": np.array(values, dtype=np.float64),
            "running": np.array([_number(value) for value in running], dtype=np.float64),
            "in_window": np.isin(at, evidence.counted(measure, subject)),
            "is_alert": [each == text_of(subject.event_id) for each in ids],
        }
    )


def _kept(feature: Feature, events: Events) -> Mask:
    mask = np.ones(len(events), dtype=bool)
    for condition in (feature.where, feature.filter):
        if condition is not None:
            mask &= events.value(condition).is_true()
    if feature.argument is not None:
        mask &= events.value(feature.argument).is_known()
    return mask


def _widths(rules: Iterable[CompiledRule]) -> dict[str, int]:
    widths: dict[str, int] = {}
    for rule in rules:
        for measure in rule.measures:
            width = measure.window.size + measure.window.delay + rule.allowed_lateness
            name = measure.feature.feature_id
            widths[name] = max(width, widths.get(name, 0))
    return widths


def _number(value: Any) -> float:
    """A value as a picture shows it: NaN where there is no number."""
    return float("nan") if value is None or isinstance(value, str) or not hasattr(value, "__float__") else float(value)

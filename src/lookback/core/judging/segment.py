"""A segment: events and watermarks between two changes of anything else, and what judging them brings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lookback.core.expressions.kernels import either_mask
from lookback.core.judging.measuring import Measuring
from lookback.core.judging.verdicts import AlertWriter
from lookback.core.rules.compiled import WINDOW_COMPLETE, CompiledRule, Feature
from lookback.core.rules.rulebook import EVALUATED, Entry, LogRow
from lookback.core.state.keyed import Key
from lookback.core.state.shard import ShardState
from lookback.core.streams.alerts import BY_EVENT, Alert, Failure, LateEvent, Place, moment, sortable_id
from lookback.core.streams.declaration import Stream
from lookback.core.streams.events import Events
from lookback.core.values.columns import Column, Mask, beyond_calendar, from_text, from_values, text_of
from lookback.core.values.keys import Int64s
from lookback.core.values.types import BOOLEAN, DataType

_UNWANTED, _DISCARDED, _RECORDED, _EVALUATED = range(4)
_ACTIONS = {_DISCARDED: "discarded", _RECORDED: "recorded", _EVALUATED: "evaluated"}
# Where a row of a rule stands within a segment: (place of its commit, BY_EVENT or BY_WATERMARK, the position of the event
# or the watermark that brings it, rank among the rows of the rule and key that the same event or watermark brings).
Order = tuple[int, int, int, int]


@dataclass(frozen=True)
class Timeline:
    """The commits of a segment, ascending, and the watermark that each is judged against (before) and leaves (after)."""

    commits: Int64s
    before: Int64s
    after: Int64s

    def find_passing(self, times: Int64s) -> Int64s:
        """Per time: the place of the first commit after which the watermark is at least that; their number if none."""
        return np.searchsorted(self.after, times).astype(np.int64)


@dataclass
class Gathered:
    """What judging brought: rows of alerts with their places, what became of late events, failures and notes.

    evaluated: how many events each rule judged.
    """

    alerts: list[tuple[Place, Alert]] = field(default_factory=list)
    late: list[LateEvent] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    notes: list[LogRow] = field(default_factory=list)
    evaluated: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """How much was gathered at some moment. evaluated: of the rule; actions: with each late event, shape (late,)."""

    rule_id: str
    alerts: int
    notes: int
    failures: list[Failure]
    evaluated: int | None
    actions: NDArray[np.int8]


class Segment:
    """The events of a segment in order of arrival, with all that judges need; see the attributes.

    watermarks: per event; measuring: answers for windows; dropped: per feature the events that an alert has emptied.
    """

    def __init__(
        self, stream: Stream, state: ShardState, events: Events, timeline: Timeline, shard: int, shards: int
    ) -> None:
        self.stream, self.state, self.timeline = stream, state, timeline
        self.shard, self.shards = shard, shards
        self.events = events.in_order_of_arrival()
        self.places: Int64s = np.searchsorted(timeline.commits, self.events.commits).astype(np.int64)
        self.watermarks: Int64s = timeline.before[self.places]
        self.measuring = Measuring(state, self.events, self.watermarks, shard, shards)
        self.dropped: dict[str, Mask] = {}
        self.gathered = Gathered()
        # Late means below the watermark, and nothing else; how much later is allowed is a matter of each rule.
        self.is_late: Mask = self.events.times < self.watermarks
        self._late = np.flatnonzero(self.is_late)
        self._actions = np.zeros(len(self.events), dtype=np.int8)

    def measuring_of(self, positions: Int64s) -> Measuring:
        """Answers as if there were only these events, in ascending order, and none of earlier batches."""
        events, marks = self.events.take(positions), self.watermarks[positions]
        return Measuring(self.state, events, marks, self.shard, self.shards, stored=False)

    def start_run(self, entry: Entry, rule: CompiledRule) -> RuleRun:
        """One rule over this segment."""
        return RuleRun(self, entry, rule)

    def record_late(self, wanted: Mask, taken: Mask, judged: Mask) -> None:
        """Remembers the most that a rule did with each late event."""
        at = self._late[wanted[self._late]]
        action = np.where(judged[at], _EVALUATED, np.where(taken[at], _RECORDED, _DISCARDED))
        self._actions[at] = np.maximum(self._actions[at], action)

    def finish(self) -> Gathered:
        """All that was gathered, in an order that no cut shows in: alerts by `Place`, late events by arrival.

        Notes are ordered by arrival, rule and text.
        """
        events = self.events
        for at in np.flatnonzero(self._actions).tolist():
            time = int(events.times[at])
            late_by = int(self.watermarks[at]) - time
            action = _ACTIONS[int(self._actions[at])]
            self.gathered.late.append(
                LateEvent(self.stream.name, events.id_text(at), moment(time), int(events.commits[at]), late_by, action)
            )
        gathered = self.gathered
        gathered.alerts.sort(key=lambda row: row[0])
        gathered.notes.sort(key=lambda row: (row.arrival, row.rule_id, row.version, row.action, row.message))
        return gathered

    def keep_rows(self, feature: Feature) -> None:
        """Adds what a feature keeps of the events to the state."""
        rows = self.measuring.rows(feature)
        positions, values = rows.positions, rows.values
        if feature.feature_id in self.dropped:
            keep = ~self.dropped[feature.feature_id][positions]
            positions, values = positions[keep], None if values is None else values[keep]
        if len(positions):
            grouping, state = self.measuring.grouping(feature.group_by), self.state.features[feature.feature_id]
            numbers, times = grouping.numbers[positions], self.events.times[positions]
            self.state.add_rows(state, numbers, grouping.distinct, times, values)

    def take_snapshot(self, rule_id: str) -> Snapshot:
        """What has been gathered so far, before the rule is judged."""
        gathered = self.gathered
        return Snapshot(
            rule_id, len(gathered.alerts), len(gathered.notes), gathered.failures, gathered.evaluated.get(rule_id),
            self._actions[self._late],
        )  # fmt: skip

    def restore(self, before: Snapshot) -> None:
        """Drops what was gathered since."""
        gathered = self.gathered
        del gathered.alerts[before.alerts :]
        del gathered.notes[before.notes :]
        gathered.failures = before.failures
        if before.evaluated is None:
            gathered.evaluated.pop(before.rule_id, None)
        else:
            gathered.evaluated[before.rule_id] = before.evaluated
        self._actions[self._late] = before.actions


class RuleRun:
    """One rule over one segment: what each kind of judge shares.

    mine: events of this shard; wanted: of those, the ones that the rule's `where` holds of; late: below the watermark.
    """

    def __init__(self, segment: Segment, entry: Entry, rule: CompiledRule) -> None:
        self.segment, self.entry, self.rule = segment, entry, rule
        self.state, self.events, self.timeline = segment.state, segment.events, segment.timeline
        self.grouping = segment.measuring.grouping(rule.group_by)
        self.writer = AlertWriter(entry, rule, segment.stream.name, segment.state)
        self.evaluated = entry.status in EVALUATED
        self.late: Mask = segment.is_late
        self.wanted: Mask = self.grouping.mine.copy()
        self.failed: Mask = np.zeros(len(self.events), dtype=bool)
        if rule.where is not None:
            where = self.events.value(rule.where)
            self.wanted &= where.is_true()
            if where.error is not None:
                self.failed |= self.grouping.mine & where.error & segment.measuring.is_in_time(rule.allowed_lateness)

    def record_judged(self, wanted: Mask, taken: Mask, judged: Mask) -> None:
        """Remembers how many events the rule judged, and what it did with each late one."""
        evaluated = self.segment.gathered.evaluated
        evaluated[self.entry.rule_id] = evaluated.get(self.entry.rule_id, 0) + int(np.count_nonzero(judged))
        self.segment.record_late(wanted, taken, judged)

    def is_effective(self, times: Int64s, until: Int64s | None = None) -> Mask:
        """Which times may trigger: those in [effective_from, effective_until).

        until: of each time, whether it or one of those after it does, up to this one.
        """
        rule = self.rule.spec
        mask = np.ones(len(times), dtype=bool)
        if rule.effective_from is not None:
            mask &= (times if until is None else until) >= rule.effective_from
        if rule.effective_until is not None:
            mask &= times < rule.effective_until
        return mask

    def find_errors(self, events: Events) -> Mask:
        """Which events have an error in a FILTER of the rule's measures, or in an argument where its FILTER is true."""
        spoiled = np.zeros(len(events), dtype=bool)
        for measure in self.rule.measures:
            argument = measure.feature.argument
            error = None if argument is None else events.value(argument).error
            if measure.feature.filter is not None:
                filtered = events.value(measure.feature.filter)
                # Where the FILTER is false or NULL, the argument is not evaluated.
                error = either_mask(filtered.error, None if error is None else error & filtered.is_true())
            if error is not None:
                spoiled |= error
        return spoiled

    def check_condition(self, columns: Mapping[str, Column], complete: Mask) -> tuple[Mask, Mask]:
        """Where the rule's condition holds, and where a measure or the condition has an error.

        A measure that is a time or a date outside the years 1 to 9999 has one.
        """
        errors = np.zeros(len(complete), dtype=bool)
        for measure in self.rule.measures:
            # A time that moved out of the calendar is exact in a condition, and cannot be written into an alert.
            column = columns[measure.name]
            error = either_mask(column.error, beyond_calendar(column))
            if error is not None:
                errors |= error
        if self.rule.when is None:
            return ~errors, errors
        when = self.rule.when.evaluate({**columns, WINDOW_COMPLETE: Column(BOOLEAN, complete)}, len(complete))
        if when.error is not None:
            errors |= when.error
        return when.is_true() & ~errors, errors

    def is_complete(self, state_id: str, starts: Int64s) -> Mask:
        """Which window starts have all their events in the state of that name."""
        bound = self.state.features[state_id].complete_from
        return np.ones(len(starts), dtype=bool) if bound is None else np.asarray(starts >= bound)

    def key_texts(self, at: int) -> dict[str, str | None]:
        """The texts of an event's key."""
        return {name: text_of(self.events.columns[name].item(at)) for name in self.rule.group_by}

    def stored_key(self, at: int) -> list[Any]:
        """The stored values of an event's key, for a table to keep."""
        return [self.events.columns[name].take(slice(at, at + 1)).stored()[0] for name in self.rule.group_by]

    def key_values(self, stored: Sequence[Any]) -> dict[str, Any]:
        """The values of a key that `stored_key` gave, as a message shows them."""
        fields = self.segment.stream.fields
        return {
            name: from_values(fields[name], [value]).item(0)
            for name, value in zip(self.rule.group_by, stored, strict=True)
        }

    def key_columns(self, keys: Iterable[Sequence[Any]]) -> dict[str, Column]:
        """The group_by fields that the rule's condition reads, of keys that `stored_key` gave; read only if there are any."""
        when, fields = self.rule.when, self.segment.stream.fields
        named = [] if when is None else [(at, n) for at, n in enumerate(self.rule.group_by) if n in when.fields]
        listed = list(keys) if named else []
        return {name: from_values(fields[name], [key[at] for key in listed]) for at, name in named}

    def type_measures(self, texts: Mapping[str, str | None]) -> dict[str, object]:
        """Measures from the texts that are remembered of them; the text itself where the rule has no such measure any more."""
        types = {measure.name: measure.type for measure in self.rule.measures}
        return {name: _typed(types.get(name), text) for name, text in texts.items()}

    def halves(self, at: int) -> Key:
        """Both halves of an event's key."""
        return int(self.grouping.keys.low[at]), int(self.grouping.keys.high[at])

    def add_alert(self, order: Order, alert: Alert) -> None:
        """Adds a row."""
        _, phase, at, rank = order
        time, event_id = (
            (int(self.events.times[at]), sortable_id(self.events.id_value(at))) if phase == BY_EVENT else (at, "")
        )
        key = json.dumps(list(alert.key.values()), ensure_ascii=False)
        place = Place(alert.arrival, phase, time, event_id, alert.rule_id, key, rank)
        self.segment.gathered.alerts.append((place, alert))

    def add_note(self, action: str, message: str, arrival: int) -> None:
        """Adds a row for rule_log that only this shard knows of."""
        row = LogRow(self.segment.stream.name, self.entry.rule_id, self.entry.version, action, message, arrival)
        self.segment.gathered.notes.append(row)

    def count_failure(self, commit: int, time: int, name: str, count: int = 1) -> None:
        """Counts errors while judging. commit, time, name: of the first one, such as an event's id."""
        if self.evaluated:
            failure = Failure(self.entry.rule_id, self.entry.version, count, name, (commit, time))
            self.segment.gathered.failures = merge_failures([*self.segment.gathered.failures, failure])

    def count_failed_events(self, mask: Mask) -> None:
        """Counts events with errors."""
        if mask.any():
            first = int(np.flatnonzero(mask)[0])
            commit, time = int(self.events.commits[first]), int(self.events.times[first])
            self.count_failure(commit, time, self.events.id_text(first), int(mask.sum()))

    def group_by_key(self, mask: Mask) -> list[tuple[Key, Int64s]]:
        """The events of a mask by key: both halves, and positions in order of arrival; keys sorted."""
        positions = np.flatnonzero(mask)
        numbers = self.grouping.numbers[positions]
        order = np.argsort(numbers, kind="stable")
        positions, numbers = positions[order], numbers[order]
        cuts = np.flatnonzero(np.diff(numbers)) + 1
        parts = np.split(positions, cuts) if len(positions) else []
        return [(self.halves(int(part[0])), part) for part in parts]


def _typed(type_: DataType | None, text: str | None) -> object:
    if type_ is None or text is None:
        return text
    try:
        value = from_text(type_, text)
    except (ValueError, ArithmeticError):
        return text
    return value if text_of(value) == text else text


def merge_failures(failures: Sequence[Failure]) -> list[Failure]:
    """One failure per rule and version, by these: counts added, the first event by arrival kept, and the first reason."""
    merged: dict[tuple[str, int], Failure] = {}
    for failure in failures:
        slot = (failure.rule_id, failure.version)
        known = merged.get(slot, replace(failure, count=0))
        # One that has no event has a reason.
        first = min(
            known, failure, key=lambda f: (bool(f.reason and not f.first_event_id), f.first_arrival, f.first_event_id)
        )
        broken = [f for f in (known, failure) if f.reason]
        reason = min(broken, key=lambda f: (f.first_arrival, f.reason)).reason if broken else ""
        merged[slot] = replace(first, count=known.count + failure.count, reason=reason)
    return [merged[slot] for slot in sorted(merged)]

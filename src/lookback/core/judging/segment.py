"""A segment: the events between two deletes or commands, with their watermarks, and the results of judging them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lookback.core.aggregation.sharedruns import Kept
from lookback.core.judging.lateness import LateEvents
from lookback.core.judging.measuring import Measuring, select_kept, select_values
from lookback.core.rules.account import Taken
from lookback.core.rules.compiled import Feature
from lookback.core.rules.keys import KeyPart
from lookback.core.rules.rulelog import LogRow
from lookback.core.state.featurestate import FeatureState
from lookback.core.state.keyed import Key
from lookback.core.state.shard import ShardState
from lookback.core.streams.alerts import MAX_EVIDENCE_IDS, Alert, AlertOrder, Failure, LateEvent
from lookback.core.streams.declaration import Stream
from lookback.core.streams.events import Events
from lookback.core.streams.flagged import FlaggedEvents, FlagPlace, make_bits
from lookback.core.streams.measured import (
    ARRIVAL,
    EVENT_ID,
    EVENT_TIME,
    MeasuredEvents,
    MeasuredPlace,
    Measures,
)
from lookback.core.values.columns import Column, Mask, Values, to_text
from lookback.core.values.keys import Int64s
from lookback.core.values.lists import Lists
from lookback.core.values.types import BIGINT, TIMESTAMP


class Order(NamedTuple):
    """The place of a result among a rule's results in a segment; results are written in ascending order.

    Attributes:
        commit_index: The index of its commit in the timeline.
        phase: BY_EVENT or BY_WATERMARK.
        cause: The position of the event, or the watermark, that causes the result.
        rank: Its rank among the results of the rule and key with the same cause.
    """

    commit_index: int
    phase: int
    cause: int
    rank: int


@dataclass(frozen=True)
class Timeline:
    """The commits of a segment, ascending, with the watermarks before and after each; `before` decides what is late."""

    commits: Int64s
    before: Int64s
    after: Int64s

    @cached_property
    def start(self) -> int:
        """The watermark before the first commit."""
        return int(self.before[0])

    @cached_property
    def end(self) -> int:
        """The watermark after the last commit."""
        return int(self.after[-1])

    def find_passing(self, times: Int64s) -> Int64s:
        """Returns for each time the index of the first commit with a watermark at or above it after the commit.

        The index is the number of commits if no commit reaches the time.
        """
        return np.searchsorted(self.after, times).astype(np.int64)

    def find_passing_one(self, time: int) -> int:
        """Does the same as `find_passing` for one time."""
        return bisect_left(self.after, time)


@dataclass
class Gathered:
    """The results of judging.

    Attributes:
        alerts: The rows of alerts with their places.
        judged: For each step of judging, masks of the events that the rule wants, takes and judges.
        late: The rows of late_events.
        failures: The failures.
        notes: The rows for rule_log.
        evaluated: How many events each rule judged, by `Entry.role`.
        flags: The events that rules that write no alerts have flagged.
        flagged: The same after judging, merged for all rules of a group.
        measures: What rules that write no alerts measured, each with its group and the rule's key.
        measured: The same after judging, merged for all rules of a group.
        taken: How many events of this shard each rule wants.
    """

    alerts: list[tuple[AlertOrder, Alert]] = field(default_factory=list)
    judged: list[tuple[Mask, Mask, Mask]] = field(default_factory=list)
    late: list[LateEvent] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    notes: list[LogRow] = field(default_factory=list)
    evaluated: Counter[str] = field(default_factory=Counter)
    flags: list[Flags] = field(default_factory=list)
    flagged: list[FlaggedEvents] = field(default_factory=list)
    measures: list[tuple[int, tuple[KeyPart, ...], Measures]] = field(default_factory=list)
    measured: list[MeasuredEvents] = field(default_factory=list)
    taken: Counter[Taken] = field(default_factory=Counter)


@dataclass(frozen=True)
class Flags:
    """The positions of the events of a segment that a rule with this key has flagged (see `Evaluator`)."""

    place: FlagPlace
    key: tuple[KeyPart, ...]
    positions: Int64s


class Segment:
    """The events of a segment in order of arrival, with everything that judges need.

    Attributes:
        events: The events, with a column for each list lookup.
        watermarks: The watermark that each event is judged against.
        commit_indexes: The index of each event's commit in the timeline.
        measuring: Measures windows.
        late_events: Which events are late.
        gathered: The results so far.
        flagging: See `Evaluator`.
        max_evidence: See `Evaluator`.
        lists: The lists in force, for conditions.
    """

    def __init__(
        self,
        stream: Stream,
        state: ShardState,
        events: Events,
        timeline: Timeline,
        shard: int,
        shards: int,
        flagging: Mapping[str, FlagPlace | MeasuredPlace] | None = None,
        max_evidence: int = MAX_EVIDENCE_IDS,
        lists: Lists | None = None,
    ) -> None:
        self.stream, self.state, self.timeline = stream, state, timeline
        self.flagging, self.max_evidence = flagging or {}, max_evidence
        self.lists = Lists.empty() if lists is None else lists
        self.events = events.in_order_of_arrival()
        self.commit_indexes: Int64s = np.searchsorted(timeline.commits, self.events.commits).astype(np.int64)
        self.watermarks: Int64s = timeline.before[self.commit_indexes]
        self.measuring = Measuring(state, self.events, self.watermarks, shard, shards)
        self.late_events = LateEvents(self.events, self.watermarks)
        self.gathered = Gathered()
        # By feature, a mask of the events that an alert has removed from its windows.
        self._emptied: dict[str, Mask] = {}
        # By grouping, the rows to keep of the features that share rows.
        self._kept: dict[tuple[str, ...], list[Kept]] = {}

    def add_results(self, results: Gathered) -> None:
        """Adds the results of a rule that was judged without failing."""
        gathered = self.gathered
        gathered.alerts += results.alerts
        gathered.notes += results.notes
        gathered.failures += results.failures
        gathered.flags += results.flags
        gathered.measures += results.measures
        gathered.evaluated.update(results.evaluated)
        for wanted, taken, judged in results.judged:
            self.late_events.record(wanted, taken, judged)

    def finish(self) -> Gathered:
        """Returns all results, in an order that does not depend on how commits are divided into batches.

        Alerts are ordered by `AlertOrder`, late events by arrival, notes by arrival, rule and text.
        """
        gathered = self.gathered
        self.measuring.forget_searches()
        gathered.late += self.late_events.list_rows(self.stream.name)
        gathered.alerts.sort(key=lambda row: row[0])
        gathered.notes.sort(key=lambda row: (row.arrival, row.rule_id, row.version, row.action, row.message))
        gathered.failures = merge_failures(gathered.failures)
        groups: dict[int, list[Flags]] = {}
        for flags in gathered.flags:
            groups.setdefault(flags.place.group, []).append(flags)
        gathered.flagged = [self._merge_flags(group, listed) for group, listed in groups.items()]
        tables: dict[int, list[Measures]] = {}
        for group, _, measures in gathered.measures:
            tables.setdefault(group, []).append(measures)
        keys = {group: key for group, key, _ in gathered.measures}
        gathered.measured = [self._merge_measures(group, keys[group], listed) for group, listed in tables.items()]
        gathered.measures = []
        return gathered

    def _merge_flags(self, group: int, listed: Sequence[Flags]) -> FlaggedEvents:
        """Merges the events that all rules of a group have flagged."""
        at = np.unique(np.concatenate([flags.positions for flags in listed]))
        bits = make_bits(len(at), [(flags.place.bit, np.searchsorted(at, flags.positions)) for flags in listed])
        keys = list_key_texts(self.events, listed[0].key, at)
        events = self.events
        ids = [str(each) for each in events.list_ids(at)]
        return FlaggedEvents(group, keys, ids, events.times[at], events.commits[at], bits)

    def _merge_measures(self, group: int, key: Sequence[KeyPart], listed: Sequence[Measures]) -> MeasuredEvents:
        """Merges what the rules of a group measured."""
        at, events = np.unique(np.concatenate([each.at for each in listed])), self.events
        shared = {
            EVENT_ID: events.id_column.take(at),
            EVENT_TIME: Column(TIMESTAMP, events.times[at]),
            ARRIVAL: Column(BIGINT, events.commits[at]),
            **{part.name: events.key_column(part.column).take(at) for part in key},
        }
        return MeasuredEvents(group, shared, [Measures(np.searchsorted(at, each.at), each.columns) for each in listed])

    def empty_feature(self, feature_id: str, is_emptied: Mask, keys: Iterable[Key]) -> None:
        """Resets the windows of these keys, and keeps these events out of the windows of later segments."""
        self._emptied[feature_id] = is_emptied
        self.state.windows.reset(feature_id, keys)

    def keep_rows(self, feature: Feature) -> None:
        """Adds the rows that a feature keeps to the state; `store_shared_rows` adds rows that features share."""
        rows, state = self.measuring.select_rows(feature), self.state.features[feature.feature_id]
        if feature.row_set:
            selected = rows.selected if state.floor is None else rows.selected & (self.events.times >= state.floor)
            if selected.any():
                argument = None
                if feature.argument is not None:
                    # Aggregates that depend on order keep their values in another form.
                    argument = feature.argument.sql, str(feature.argument.type), feature.aggregate.is_ordered
                kept = Kept(feature.feature_id, selected, rows.all_values, argument)
                self._kept.setdefault(feature.group_by, []).append(kept)
            return
        if state.buckets is not None:
            self._note_discarded(feature, state)
        positions, values = rows.positions, rows.values
        if feature.feature_id in self._emptied:
            keep = ~self._emptied[feature.feature_id][positions]
            positions, values = positions[keep], None if values is None else values[keep]
        if len(positions):
            grouping = self.measuring.group_events(feature.group_by)
            numbers, times = grouping.numbers[positions], self.events.times[positions]
            self.state.windows.add_rows(state, numbers, grouping.distinct, times, values)

    def _note_discarded(self, feature: Feature, state: FeatureState) -> None:
        """Records the events that arrived too late for a feature with buckets."""
        too_late = ~self.measuring.find_in_time(feature.allowed_lateness)
        if state.floor is not None:
            too_late &= self.events.times >= state.floor
        if not too_late.any():
            return
        grouping = self.measuring.group_events(feature.group_by)
        at = np.flatnonzero(grouping.mine & too_late & select_kept(feature, self.events))
        if len(at):
            values = select_values(feature, self.events)
            part = None if values is None else values.values[at]
            keys = self.events.find_keys(feature.group_by).take(at)
            self.state.windows.discarded.add(feature.feature_id, state, keys, self.events.times[at], part)

    def store_shared_rows(self, features: Sequence[Feature]) -> None:
        """Adds the rows that these features of one grouping share to the state; drops those of features that failed."""
        group_by, row_set = features[0].group_by, features[0].row_set
        wanted = {feature.feature_id for feature in features}
        kept = [each for each in self._kept.pop(group_by, ()) if each.feature_id in wanted]
        if not kept:
            return
        grouping = self.measuring.group_events(group_by)
        is_kept = np.zeros(len(self.events), dtype=bool)
        for each in kept:
            is_kept |= each.selected
        at = grouping.sorted[is_kept[grouping.sorted]]
        values: dict[Hashable, Values] = {}
        rows = []
        for each in kept:
            if each.values is not None and each.argument not in values:
                values[each.argument] = each.values[at]
            own = None if each.values is None else values[each.argument]
            rows.append(Kept(each.feature_id, each.selected[at], own, each.argument))
        windows, times = self.state.windows, self.events.times[at]
        windows.row_sets.add_rows(row_set, grouping.numbers[at], grouping.distinct, times, rows, windows.segments)


def list_key_texts(events: Events, key: Sequence[KeyPart], positions: Int64s) -> list[dict[str, str | None]]:
    """Returns the texts of the keys of events."""
    texts: list[dict[str, str | None]] = [{} for _ in positions]
    for part in key:
        for row, value in zip(texts, events.key_column(part.column).take(positions).to_list(), strict=True):
            row[part.name] = to_text(value)
    return texts


def merge_failures(failures: Sequence[Failure]) -> list[Failure]:
    """Merges failures into one per rule and version: total count, first event by arrival, and first reason."""
    merged: dict[tuple[str, int], Failure] = {}
    for failure in failures:
        slot = (failure.rule_id, failure.version)
        known = merged.get(slot, replace(failure, count=0))
        # A failure without an event has a reason.
        first = min(
            known, failure, key=lambda f: (bool(f.reason and not f.first_event_id), f.first_arrival, f.first_event_id)
        )
        broken = [f for f in (known, failure) if f.reason]
        reason = min(broken, key=lambda f: (f.first_arrival, f.reason)).reason if broken else ""
        merged[slot] = replace(first, count=known.count + failure.count, reason=reason)
    return [merged[slot] for slot in sorted(merged)]

"""A segment: the events between two deletes or commands, with their watermarks, and the results of judging them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from lookback.core.aggregation.sharedruns import Kept
from lookback.core.expressions.compiling import add_memberships
from lookback.core.expressions.kernels import either_mask
from lookback.core.judging.lateness import Actions, LateEvents, earliest_in_time
from lookback.core.judging.measuring import Measuring, select_kept, select_values
from lookback.core.judging.verdicts import AlertWriter, Judgement, Memory, Subject
from lookback.core.rules.account import Taken
from lookback.core.rules.compiled import WARMING_LANE, WINDOW_COMPLETE, CompiledRule, Feature
from lookback.core.rules.rulebook import LogRow
from lookback.core.rules.versions import EVALUATED, Entry
from lookback.core.state.keyed import Key
from lookback.core.state.shard import ShardState
from lookback.core.state.windowrows import FeatureState
from lookback.core.streams.alerts import (
    BEGINS,
    BY_EVENT,
    BY_WATERMARK,
    CEASES,
    MAX_EVIDENCE_IDS,
    Alert,
    AlertOrder,
    EncodedKey,
    Failure,
    LateEvent,
    encode_key,
)
from lookback.core.streams.declaration import Stream
from lookback.core.streams.events import Events
from lookback.core.streams.flagged import FlaggedEvents, FlagPlace, make_bits
from lookback.core.values.columns import Column, Mask, Values, find_beyond_calendar, from_text, from_values, to_text
from lookback.core.values.keys import Int64s
from lookback.core.values.lists import Lists
from lookback.core.values.types import BOOLEAN, DataType


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
        return bisect_left(self._after, time)

    @cached_property
    def _after(self) -> list[int]:
        listed: list[int] = self.after.tolist()
        return listed


@dataclass
class Gathered:
    """The results of judging.

    Attributes:
        alerts: The rows of alerts with their places.
        late: The rows of late_events.
        failures: The failures.
        notes: The rows for rule_log.
        evaluated: How many events each rule judged, by `Entry.role`.
        flags: The events that rules that write no alerts have flagged.
        flagged: The same after judging, merged for all rules of a group.
        taken: How many events of this shard each rule wants.
    """

    alerts: list[tuple[AlertOrder, Alert]] = field(default_factory=list)
    late: list[LateEvent] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    notes: list[LogRow] = field(default_factory=list)
    evaluated: dict[str, int] = field(default_factory=dict)
    flags: list[Flags] = field(default_factory=list)
    flagged: list[FlaggedEvents] = field(default_factory=list)
    taken: Counter[Taken] = field(default_factory=Counter)


@dataclass(frozen=True)
class Flags:
    """The positions of the events of a segment that a rule with this group_by has flagged (see `Evaluator`)."""

    place: FlagPlace
    group_by: tuple[str, ...]
    positions: Int64s


@dataclass(frozen=True)
class Snapshot:
    """How many results of each kind had been gathered before a rule was judged.

    `role` is the `Entry.role` of the rule, `evaluated` its count, and `actions` are those on late events.
    """

    role: str
    alerts: int
    notes: int
    failures: int
    flags: int
    evaluated: int | None
    actions: Actions


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
        self, stream: Stream, state: ShardState, events: Events, timeline: Timeline, shard: int, shards: int,
        flagging: Mapping[str, FlagPlace] | None = None, max_evidence: int = MAX_EVIDENCE_IDS,
        lists: Lists | None = None,
    ) -> None:  # fmt: skip
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

    def start_run(self, entry: Entry, rule: CompiledRule) -> RuleRun:
        """Starts one rule over this segment."""
        rule_run = RuleRun(self, entry, rule)
        if rule.lane < WARMING_LANE:
            taken = entry.rule_id, entry.version, rule.where_sql, int(self.timeline.commits[0])
            self.gathered.taken[taken] += int(np.count_nonzero(rule_run.wanted))
        return rule_run

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
        gathered.flagged = self._list_flagged()
        return gathered

    def _list_flagged(self) -> list[FlaggedEvents]:
        """Lists the events that rules that write no alerts have flagged, merged for all rules of a group."""
        groups: dict[int, list[Flags]] = {}
        for flags in self.gathered.flags:
            groups.setdefault(flags.place.group, []).append(flags)
        return [self._merge_flags(group, listed) for group, listed in groups.items()]

    def _merge_flags(self, group: int, listed: Sequence[Flags]) -> FlaggedEvents:
        at = np.unique(np.concatenate([flags.positions for flags in listed]))
        bits = make_bits(len(at), [(flags.place.bit, np.searchsorted(at, flags.positions)) for flags in listed])
        keys = list_key_texts(self.events, listed[0].group_by, at)
        events = self.events
        ids = [str(each) for each in events.list_ids(at)]
        return FlaggedEvents(group, keys, ids, events.times[at], events.commits[at], bits)

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
            self.state.windows.note_discarded(feature.feature_id, keys, self.events.times[at], part)

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
        self.state.windows.add_shared_rows(
            row_set, grouping.numbers[at], grouping.distinct, self.events.times[at], rows
        )

    def take_snapshot(self, role: str) -> Snapshot:
        """Records how much has been gathered so far, before the rule is judged."""
        gathered = self.gathered
        return Snapshot(
            role, len(gathered.alerts), len(gathered.notes), len(gathered.failures), len(gathered.flags),
            gathered.evaluated.get(role), self.late_events.actions,
        )  # fmt: skip

    def restore(self, before: Snapshot) -> None:
        """Drops all results since the snapshot."""
        gathered = self.gathered
        del gathered.alerts[before.alerts :]
        del gathered.notes[before.notes :]
        del gathered.failures[before.failures :]
        del gathered.flags[before.flags :]
        if before.evaluated is None:
            gathered.evaluated.pop(before.role, None)
        else:
            gathered.evaluated[before.role] = before.evaluated
        self.late_events.restore(before.actions)


class RuleRun:
    """One rule over one segment: what judges of all kinds need to know, and the methods that take their results.

    Attributes:
        wanted: Marks the events of this shard for which the rule's `where` holds.
        failed: Marks the events with an error.
        is_late: Marks the events below their watermark.
        is_evaluated: Whether the status of the rule allows alerts.
    """

    def __init__(self, segment: Segment, entry: Entry, rule: CompiledRule) -> None:
        self.entry, self.rule, self.spec = entry, rule, rule.spec
        self.stream, self.state, self.timeline = segment.stream, segment.state, segment.timeline
        self.events, self.watermarks, self.commit_indexes = segment.events, segment.watermarks, segment.commit_indexes
        self.measuring, self._late_events = segment.measuring, segment.late_events
        self.is_late = segment.late_events.is_late
        self.grouping = segment.measuring.group_events(rule.group_by)
        self.writer = AlertWriter(entry, rule, segment.stream.name, segment.state)
        self.is_evaluated, self.max_evidence = entry.status in EVALUATED, segment.max_evidence
        self._segment, self._gathered = segment, segment.gathered
        self._encoded: dict[Key, EncodedKey] = {}
        self.wanted: Mask = self.grouping.mine.copy()
        self.failed: Mask = np.zeros(len(self.events), dtype=bool)
        if rule.where is not None:
            where = self.events.value(rule.where)
            self.wanted &= where.is_true()
            if where.error is not None:
                self.failed |= self.grouping.mine & where.error & self.find_in_time()

    def find_in_time(self) -> Mask:
        """Marks events that are in time for the rule, regardless of its windows; callers must not change the mask."""
        return self.measuring.find_in_time(self.rule.allowed_lateness)

    def earliest_in_time(self, watermark: int) -> int:
        """Returns the earliest time that is in time for the rule at a watermark."""
        return earliest_in_time(watermark, self.rule.allowed_lateness)

    def order_by_event(self, at: int, rank: int = 0) -> Order:
        """Returns the order of a result that an event causes."""
        return Order(self.commit_indexes.item(at), BY_EVENT, at, rank)

    def order_by_watermark(self, watermark: int, rank: int) -> Order:
        """Returns the order of a result that a watermark causes, at the first commit that reaches it."""
        return Order(self.timeline.find_passing_one(watermark), BY_WATERMARK, watermark, rank)

    def arrival_of(self, order: Order) -> int:
        """Returns the commit of a result."""
        return int(self.timeline.commits.item(order.commit_index))

    def watermark_before(self, order: Order) -> int:
        """Returns the watermark before the commit of a result."""
        return int(self.timeline.before[order.commit_index])

    def record_judged(self, wanted: Mask, taken: Mask, judged: Mask) -> None:
        """Counts the events that the rule judged, and records what it did with each late event."""
        evaluated = self._gathered.evaluated
        evaluated[self.entry.role] = evaluated.get(self.entry.role, 0) + int(np.count_nonzero(judged))
        if not self.entry.is_unseen:
            self._late_events.record(wanted, taken, judged)

    def count_taken(self, taken: Mask) -> None:
        """Records the events that the rule's windows take, and counts those with an error.

        A rule that writes no alerts flags the events that any of its measures counts.
        """
        if not self.writes_alerts:
            kept = [select_kept(measure.feature, self.events) for measure in self.rule.measures]
            self.note_flagged(np.flatnonzero(taken & np.any(kept, axis=0)))
        self.record_judged(self.wanted, taken, taken if self.is_evaluated else np.zeros(len(taken), dtype=bool))
        if self.is_evaluated:
            errors = self.find_errors(self.events)
            if errors is not None:
                self.failed |= taken & errors
            self.count_failed_events(self.failed)

    def find_effective(self, times: Int64s, until: Int64s | None = None) -> Mask:
        """Marks the times that may trigger: those in [effective_from, effective_until).

        With `until`, also marks a time if any time from it up to `until` may trigger.
        """
        rule = self.spec
        mask = np.ones(len(times), dtype=bool)
        if rule.effective_from is not None:
            mask &= (times if until is None else until) >= rule.effective_from
        if rule.effective_until is not None:
            mask &= times < rule.effective_until
        return mask

    def find_errors(self, events: Events) -> Mask | None:
        """Marks the events with an error in a FILTER of the rule's measures, or in an argument whose FILTER is true.

        Returns None if no event has one.
        """
        has_error: Mask | None = None
        for measure in self.rule.measures:
            argument = measure.feature.argument
            error = None if argument is None else events.value(argument).error
            if measure.feature.filter is not None:
                filtered = events.value(measure.feature.filter)
                # If the FILTER is false or NULL, the argument is not evaluated.
                error = either_mask(filtered.error, None if error is None else error & filtered.is_true())
            has_error = either_mask(has_error, error)
        return has_error

    def check_condition(self, columns: Mapping[str, Column], complete: Mask, times: Int64s) -> tuple[Mask, Mask]:
        """Marks the rows for which the rule's condition holds, and those with an error in a measure or the condition.

        `times` are the event times that alerts about the rows would have; in_list looks them up in the lists in force.
        A time or date outside the years 1 to 9999 is an error of its measure.
        """
        errors = np.zeros(len(complete), dtype=bool)
        for measure in self.rule.measures:
            # A condition can compare times outside the calendar exactly, but an alert cannot show them.
            column = columns[measure.name]
            error = either_mask(column.error, find_beyond_calendar(column))
            if error is not None:
                errors |= error
        if self.rule.when is None:
            return ~errors, errors
        seen = {**columns, WINDOW_COMPLETE: Column(BOOLEAN, complete)}
        if self.rule.when.memberships:
            seen = add_memberships(seen, self.rule.when.memberships, times, self._segment.lists)
        when = self.rule.when.evaluate(seen, len(complete))
        if when.error is not None:
            errors |= when.error
        return when.is_true() & ~errors, errors

    @cached_property
    def kept_types(self) -> Mapping[str, DataType]:
        """The types of what a sequence may keep of an event: its fields, and the results and errors of list lookups."""
        names = [*(membership.name for membership in self.rule.memberships), *self.kept_errors.values()]
        return {**self.stream.fields, **dict.fromkeys(names, BOOLEAN)} if names else self.stream.fields

    @cached_property
    def kept_errors(self) -> Mapping[str, str]:
        """By name of an in_list call, the name under which a sequence keeps its errors."""
        return {membership.name: membership.error_name for membership in self.rule.memberships if membership.error_name}

    def read_kept(self, name: str) -> Column:
        """Returns the events' values for a name of `kept_types`."""
        call = self._calls.get(name)
        if call is None:
            return self.events.columns[name]
        error = self.events.columns[call].error
        return Column(BOOLEAN, np.zeros(len(self.events), dtype=bool) if error is None else error)

    @cached_property
    def _calls(self) -> Mapping[str, str]:
        return {error: call for call, error in self.kept_errors.items()}

    @cached_property
    def complete_from(self) -> int | None:
        """The earliest start of a window with all its events in all states that the rule needs; None for any start."""
        each = (self.state.features[name].complete_from for name in self.rule.needs)
        return max((bound for bound in each if bound is not None), default=None)

    def find_complete_from(self, feature: Feature) -> int | None:
        """Returns the earliest start of a window with all its rows of a feature; None for any start."""
        return self.state.features[feature.feature_id].complete_from

    def find_complete(self, starts: Int64s) -> Mask:
        """Marks the starts of windows with all their events."""
        bound = self.complete_from
        return np.ones(len(starts), dtype=bool) if bound is None else np.asarray(starts >= bound)

    def key_at(self, at: int) -> Key:
        """Returns an event's key as in keyed tables."""
        return self.grouping.distinct.pair(int(self.grouping.numbers[at]))

    def key_texts(self, at: int) -> dict[str, str | None]:
        """Returns the texts of an event's key."""
        return {name: to_text(self.events.columns[name].item(at)) for name in self.rule.group_by}

    def list_keys(self, positions: Int64s) -> list[Key]:
        """Returns the keys of events as in keyed tables."""
        return self.grouping.distinct.take(self.grouping.numbers[positions]).list_pairs()

    def list_key_texts(self, positions: Int64s) -> list[dict[str, str | None]]:
        """Returns the texts of the keys of events; events with the same key share one dictionary."""
        numbers, of_key = np.unique(self.grouping.numbers[positions], return_inverse=True)
        texts = list_key_texts(self.events, self.rule.group_by, self.grouping.first_positions[numbers])
        return [texts[at] for at in of_key.tolist()]

    def stored_key(self, at: int) -> list[Any]:
        """Returns the values of an event's key in the form that tables store."""
        return self.list_stored_keys(slice(at, at + 1))[0]

    def list_stored_keys(self, positions: Int64s | slice) -> list[list[Any]]:
        """Does the same as `stored_key` for many events."""
        columns = [self.events.columns[name].to_stored_list(positions) for name in self.rule.group_by]
        count = len(self.events.times[positions])
        return [list(values) for values in zip(*columns, strict=True)] if columns else [[] for _ in range(count)]

    def key_values(self, stored: Sequence[Any]) -> dict[str, Any]:
        """Returns the values of a key from `stored_key`, as a message shows them."""
        fields = self.stream.fields
        return {
            name: from_values(fields[name], [value]).item(0)
            for name, value in zip(self.rule.group_by, stored, strict=True)
        }

    def key_columns(self, keys: Iterable[Sequence[Any]]) -> dict[str, Column]:
        """Returns the group_by fields that the rule's condition reads, for keys from `stored_key`.

        Reads `keys` only if the condition reads any such field.
        """
        when, fields = self.rule.when, self.stream.fields
        named = [] if when is None else [(at, n) for at, n in enumerate(self.rule.group_by) if n in when.named]
        listed = list(keys) if named else []
        return {name: from_values(fields[name], [key[at] for key in listed]) for at, name in named}

    def type_measures(self, texts: Mapping[str, str | None]) -> dict[str, object]:
        """Parses the texts of measures; returns the text itself if the rule no longer has such a measure."""
        types = {measure.name: measure.type for measure in self.rule.measures}
        return {name: _parse_measure(types.get(name), text) for name, text in texts.items()}

    def empty_windows(self, is_emptied: Mask, keys: Iterable[Key]) -> None:
        """Resets the rule's windows of these keys after alerts, and keeps these events out of later windows."""
        listed = list(keys)
        for feature in self.rule.features:
            self._segment.empty_feature(feature.feature_id, is_emptied, listed)

    @property
    def writes_alerts(self) -> bool:
        """True if the rule writes alerts instead of only flagging events."""
        return self.entry.rule_id not in self._segment.flagging

    def note_flagged(self, positions: Int64s) -> None:
        """Flags events for a rule that writes no alerts (see `Evaluator`)."""
        place = self._segment.flagging[self.entry.rule_id]
        self._gathered.flags.append(Flags(place, self.rule.group_by, positions))

    def write_alert(
        self,
        order: Order,
        subject: Subject,
        verdict: str,
        revision: int,
        measures: Mapping[str, Any],
        is_complete: bool,
        values: Mapping[str, Any],
    ) -> None:
        """Writes the first row of an alert, or its retraction.

        `measures` are typed, and `values` are further values that the message may name.
        """
        arrival, key = self.arrival_of(order), self._encode_key(subject)
        make, begin, change = self.writer.make_alert, key.id_begin, CEASES if verdict == "retracted" else BEGINS
        alert = make(subject, verdict, revision, arrival, measures, is_complete, values, begin, change)
        self._add_alert(order, key, alert)

    def revise(
        self, order: Order, memory: Memory | None, subject: Subject, judgement: Judgement, values: Mapping[str, Any]
    ) -> Memory | None:
        """Decides the verdict on a subject, and writes its row if the verdict or the measures have changed.

        `memory` is that of the previous row, and `values` are further values that the message may name. Returns the
        memory of the new row; None if no row is written.
        """
        arrival, key = self.arrival_of(order), self._encode_key(subject)
        memory, alert = self.writer.revise(memory, subject, judgement, arrival, values, key.id_begin)
        if alert is None:
            return None
        self._add_alert(order, key, alert)
        return memory

    def _encode_key(self, subject: Subject) -> EncodedKey:
        """Encodes the key of a subject, only once for all its alerts."""
        encoded = self._encoded.get(subject.key)
        if encoded is None:
            encoded = encode_key(self.entry.rule_id, self.entry.version, tuple(subject.key_texts.items()))
            self._encoded[subject.key] = encoded
        return encoded

    def _add_alert(self, order: Order, key: EncodedKey, alert: Alert) -> None:
        time, event = order.cause, ""
        if order.phase == BY_EVENT:
            time, event = self.events.times.item(order.cause), self.events.sort_text(order.cause)
        place = AlertOrder(
            alert.arrival, order.phase, time, event, alert.rule_id, alert.rule_version, key.sort_text, order.rank
        )
        self._gathered.alerts.append((place, alert))

    def add_note(self, action: str, message: str, arrival: int) -> None:
        """Adds a row of this shard for rule_log."""
        row = LogRow(self.stream.name, self.entry.rule_id, self.entry.version, action, message, arrival)
        self._gathered.notes.append(row)

    def count_failure(self, commit: int, time: int, name: str, count: int = 1, event: str = "") -> None:
        """Counts errors while judging.

        The other arguments describe the first one; `name` may be the id of an event, for example. For `event` see
        `Failure`.
        """
        if self.is_evaluated:
            entry = self.entry
            failure = Failure(entry.rule_id, entry.version, count, name, (commit, time, event), mode=entry.status)
            self._gathered.failures.append(failure)

    def count_failed_events(self, mask: Mask) -> None:
        """Counts events with errors."""
        if mask.any():
            first = int(np.flatnonzero(mask)[0])
            commit, time = int(self.events.commits[first]), int(self.events.times[first])
            self.count_failure(commit, time, self.events.id_text(first), int(mask.sum()), self.events.sort_text(first))

    def group_by_key(self, mask: Mask) -> list[tuple[Key, Int64s]]:
        """Groups the events of a mask by key: keys sorted, each with its positions in order of arrival."""
        positions = np.flatnonzero(mask)
        numbers = self.grouping.numbers[positions]
        order = np.argsort(numbers, kind="stable")
        positions, numbers = positions[order], numbers[order]
        cuts = np.flatnonzero(np.diff(numbers)) + 1
        parts = np.split(positions, cuts) if len(positions) else []
        return [(self.key_at(int(part[0])), part) for part in parts]


def list_key_texts(events: Events, group_by: Sequence[str], positions: Int64s) -> list[dict[str, str | None]]:
    """Returns the texts of the keys of events."""
    texts: list[dict[str, str | None]] = [{} for _ in positions]
    for name in group_by:
        for row, value in zip(texts, events.columns[name].take(positions).to_list(), strict=True):
            row[name] = to_text(value)
    return texts


def _parse_measure(type_: DataType | None, text: str | None) -> object:
    if type_ is None or text is None:
        return text
    try:
        value = from_text(type_, text)
    except (ValueError, ArithmeticError):
        return text
    return value if to_text(value) == text else text


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

"""One rule over one segment: what judges of all kinds need to know, and the methods that take their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from lookback.core.aggregation.grouping import Grouping
from lookback.core.expressions.compiling import add_memberships
from lookback.core.expressions.kernels import either_mask
from lookback.core.judging.lateness import earliest_in_time
from lookback.core.judging.measuring import select_kept
from lookback.core.judging.segment import Flags, Gathered, Order, Segment, list_key_texts
from lookback.core.judging.verdicts import AlertWriter, Verdicts
from lookback.core.rules.compiled import WARMING_LANE, WINDOW_COMPLETE, CompiledRule
from lookback.core.rules.rulelog import LogRow
from lookback.core.rules.versions import EVALUATED, Entry
from lookback.core.state.keyed import Key
from lookback.core.streams.alerts import BY_EVENT, BY_WATERMARK, Failure
from lookback.core.streams.events import Events
from lookback.core.streams.flagged import FlagPlace
from lookback.core.streams.measured import MeasuredPlace, Measures
from lookback.core.values.columns import Column, Mask, find_beyond_calendar, from_values, to_text
from lookback.core.values.keys import Int64s, Keys
from lookback.core.values.types import BOOLEAN

SelectKeys: TypeAlias = Callable[[Keys], Mask]


class RuleRun:
    """One rule over one segment: what judges of all kinds need to know, and the methods that take their results.

    Attributes:
        matching: Marks the events for which the rule's `where` holds.
        wanted: Marks those of them that belong to this shard.
        grouping: The events by the fields that route them to shards, which are those of the key if anything is kept of it.
        failed: Marks the events with an error.
        is_late: Marks the events below their watermark.
        recorded: Marks the events whose measures a rule records instead of raising alerts (see `Evaluator`).
        is_evaluated: Whether the status of the rule allows alerts.
        select_keys: Marks the keys under which a sequence takes events; None for all keys of this shard.
    """

    def __init__(
        self, segment: Segment, entry: Entry, rule: CompiledRule, select_keys: SelectKeys | None = None
    ) -> None:
        self.entry, self.rule, self.spec, self.select_keys = entry, rule, rule.spec, select_keys
        self.stream, self.state, self.timeline = segment.stream, segment.state, segment.timeline
        self.events, self.watermarks, self.commit_indexes = segment.events, segment.watermarks, segment.commit_indexes
        self.measuring, self.is_late = segment.measuring, segment.late_events.is_late
        self.grouping = segment.measuring.group_events(rule.routed_by)
        self.is_evaluated, self.max_evidence = entry.status in EVALUATED, segment.max_evidence
        self._segment, self._gathered = segment, Gathered()
        self.writer = AlertWriter(entry, rule, segment, self._gathered.alerts)
        self.matching: Mask = np.ones(len(self.events), dtype=bool)
        self.failed: Mask = np.zeros(len(self.events), dtype=bool)
        self.recorded: Mask = np.zeros(len(self.events), dtype=bool)
        self._measures: list[Measures] = []
        if rule.where is not None:
            holds, error = self.events.test(rule.where)
            self.matching = holds
            if error is not None:
                self.failed |= self.grouping.mine & error & self.find_in_time()
        self.wanted: Mask = self.grouping.mine & self.matching
        if rule.lane < WARMING_LANE:
            taken = entry.rule_id, entry.version, rule.where_sql, int(self.timeline.commits[0])
            segment.gathered.taken[taken] += int(np.count_nonzero(self.wanted))

    def finish(self) -> None:
        """Adds the results to those of the segment; until then, nothing of a rule that fails is in its output."""
        if self._measures:
            place = self._segment.flagging[self.entry.rule_id]
            self._gathered.measures.append((place.group, self.rule.key, Measures.concat(self._measures)))
        self._segment.add_results(self._gathered)

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

    def record_judged(self, wanted: Mask, taken: Mask, judged: Mask) -> None:
        """Counts the events that the rule judged, and records what it did with each late event."""
        self._gathered.evaluated[self.entry.role] += int(np.count_nonzero(judged))
        if not self.entry.is_unseen:
            self._gathered.judged.append((wanted, taken, judged))

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
            self.count_failed_events()

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
        errors = self._find_measure_errors(columns, len(complete))
        if self.rule.when is None:
            return ~errors, errors
        seen = {**columns, WINDOW_COMPLETE: Column(BOOLEAN, complete)}
        if self.rule.when.memberships:
            seen = add_memberships(seen, self.rule.when.memberships, times, self._segment.lists)
        when = self.rule.when.evaluate(seen, len(complete))
        if when.error is not None:
            errors |= when.error
        return when.is_true() & ~errors, errors

    def _find_measure_errors(self, columns: Mapping[str, Column], rows: int) -> Mask:
        """Marks the rows with an error in a measure."""
        errors = np.zeros(rows, dtype=bool)
        for measure in self.rule.measures:
            # A condition can compare times outside the calendar exactly, but an alert cannot show them.
            column = columns[measure.name]
            error = either_mask(column.error, find_beyond_calendar(column))
            if error is not None:
                errors |= error
        return errors

    @cached_property
    def complete_from(self) -> int | None:
        """The earliest start of a window with all its events in all states that the rule needs; None for any start."""
        each = (self.state.features[name].complete_from for name in self.rule.needs)
        return max((bound for bound in each if bound is not None), default=None)

    def find_complete(self, starts: Int64s) -> Mask:
        """Marks the starts of windows with all their events."""
        bound = self.complete_from
        return np.ones(len(starts), dtype=bool) if bound is None else np.asarray(starts >= bound)

    @cached_property
    def _keys(self) -> Grouping:
        """The events by the keys of alerts; other than `grouping` if events are routed by their ids."""
        return self.measuring.group_events(self.rule.group_by, self.rule.routed_by)

    def key_texts(self, at: int, fields: Sequence[str] = ()) -> dict[str, str | None]:
        """Returns the texts of an event's key, which these fields make; those of group_by by default."""
        columns = (self.events.key_column(name) for name in fields or self.rule.group_by)
        return {part.name: to_text(column.item(at)) for part, column in zip(self.rule.key, columns, strict=True)}

    def list_keys(self, positions: Int64s) -> list[Key]:
        """Returns the keys of events as in keyed tables."""
        grouping = self._keys
        return grouping.distinct.take(grouping.numbers[positions]).list_pairs()

    def list_key_texts(self, positions: Int64s) -> list[dict[str, str | None]]:
        """Returns the texts of the keys of events; events with the same key share one dictionary."""
        grouping = self._keys
        numbers, of_key = np.unique(grouping.numbers[positions], return_inverse=True)
        texts = list_key_texts(self.events, self.rule.key, grouping.first_positions[numbers])
        return [texts[at] for at in of_key.tolist()]

    def list_stored_keys(self, positions: Int64s | slice, fields: Sequence[str] = ()) -> list[list[Any]]:
        """Returns the values of the keys of events in the form that tables store; `fields` is as in `key_texts`."""
        columns = [self.events.key_column(name).to_stored_list(positions) for name in fields or self.rule.group_by]
        count = len(self.events.times[positions])
        return [list(values) for values in zip(*columns, strict=True)] if columns else [[] for _ in range(count)]

    def key_values(self, stored: Sequence[Any]) -> dict[str, Any]:
        """Returns the values of a key from `list_stored_keys`, as a message shows them."""
        return {
            part.name: from_values(part.type, [value]).item(0)
            for part, value in zip(self.rule.key, stored, strict=True)
        }

    def key_columns(self, keys: Iterable[Sequence[Any]]) -> dict[str, Column]:
        """Returns the entries of the key that the rule's condition reads, for keys from `list_stored_keys`.

        Reads `keys` only if the condition reads any such field.
        """
        when = self.rule.when
        read = [] if when is None else [(at, part) for at, part in enumerate(self.rule.key) if part.name in when.named]
        listed = list(keys) if read else []
        return {part.name: from_values(part.type, [key[at] for key in listed]) for at, part in read}

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
        if isinstance(place, FlagPlace):
            self._gathered.flags.append(Flags(place, self.rule.key, positions))

    @property
    def records_measures(self) -> bool:
        """True if the rule records the measures of its events instead of raising alerts."""
        return isinstance(self._segment.flagging.get(self.entry.rule_id), MeasuredPlace)

    def note_measures(self, positions: Int64s, verdicts: Verdicts) -> None:
        """Records the measures of those of these events that `recorded` marks; `verdicts` has a row for each.

        They are NULL for an event with an error in a measure, on which the rule gives no verdict.
        """
        place = self._segment.flagging[self.entry.rule_id]
        assert isinstance(place, MeasuredPlace)
        rows = np.flatnonzero(self.recorded[positions] & place.covers(self.events.times[positions]))
        at, columns = positions[rows], {name: column.take(rows) for name, column in verdicts.columns.items()}
        failed, error = self._find_measure_errors(columns, len(rows)), self.find_errors(self.events)
        if error is not None:
            failed |= error[at]
        columns[WINDOW_COMPLETE] = Column(BOOLEAN, verdicts.is_complete[rows])
        named = {place.names[name]: column.with_nulls(failed) for name, column in columns.items()}
        self._measures.append(Measures(at, named))

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

    def count_failed_events(self) -> None:
        """Counts the events with errors."""
        failed = np.flatnonzero(self.failed)
        if len(failed):
            first, events = int(failed[0]), self.events
            commit, time = int(events.commits[first]), int(events.times[first])
            self.count_failure(commit, time, events.id_text(first), len(failed), events.sort_text(first))

    def group_by_key(self, mask: Mask) -> list[tuple[Key, Int64s]]:
        """Groups the events of a mask by key: keys sorted, each with its positions in order of arrival."""
        positions = np.flatnonzero(mask)
        numbers = self.grouping.numbers[positions]
        order = np.argsort(numbers, kind="stable")
        positions, numbers = positions[order], numbers[order]
        cuts = np.flatnonzero(np.diff(numbers)) + 1
        parts = np.split(positions, cuts) if len(positions) else []
        keys = self.grouping.distinct
        return [(keys.pair(int(self.grouping.numbers[part[0]])), part) for part in parts]

"""Judges lookback rules: each event over a window that ends at the event, or some time before it.

An event rule is one without measures: its `where` decides everything, and it keeps nothing.

An event is judged once, when it arrives (`_judge_events`). With reset_on_alert, an alert resets the windows of its key,
so a segment is judged in rounds (`_judge_resetting`). With late: revise, an event that enters the windows of earlier
judged events causes these to be judged again (`_Revising`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lookback.core.aggregation.grouping import Queries
from lookback.core.judging.measuring import Ceiling, Measuring
from lookback.core.judging.rulerun import RuleRun
from lookback.core.judging.verdicts import Judgement, Memory, Subject, Verdicts
from lookback.core.rules.compiled import CompiledRule
from lookback.core.rules.versions import Entry
from lookback.core.state.keyed import Key
from lookback.core.state.shard import ShardState
from lookback.core.streams.events import Events
from lookback.core.values.columns import Column, Mask, from_values, to_texts
from lookback.core.values.keys import Int64s, Keys
from lookback.core.values.lists import Lists
from lookback.core.values.windows import Lookback, Moment

# After an alert has reset a key, judge this many of its events first, and twice as many after each round without an
# alert.
_FIRST_EVENTS = 16
# If the condition may hold for at least this share of the events, all are measured, which other rules can share.
_MAX_CANDIDATES = 0.5
# Used instead of a condition: all events that are in time.
_ALL = "*"


def judge_lookback(rule_run: RuleRun) -> None:
    """Judges the events of a segment by a lookback rule."""
    rule = rule_run.rule
    in_time, ordered = rule_run.measuring.list_in_time(rule.routed_by, rule.allowed_lateness)
    taken = rule_run.wanted & in_time
    seen = taken & ~rule_run.is_late if rule_run.spec.late == "record" else taken
    judged = seen & rule_run.find_effective(rule_run.events.times)
    if not rule_run.is_evaluated:
        judged = np.zeros(len(judged), dtype=bool)
    rule_run.record_judged(rule_run.wanted, taken, judged)
    if not rule_run.is_evaluated or not len(rule_run.events):
        return
    if not rule.measures and not judged.any():
        # Most of thousands of event rules find nothing in a batch.
        rule_run.count_failed_events()
        return
    if rule_run.records_measures:
        # What limits alerts does not limit them: a range of effective times, and an event is measured once.
        rule_run.recorded = seen
    if rule_run.spec.late == "revise" and not rule_run.records_measures:
        _Revising(rule_run, taken, judged).run()
    elif rule_run.spec.reset_on_alert:
        _judge_resetting(rule_run, taken, judged)
    else:
        _judge_once(rule_run, taken, judged, ordered)
    rule_run.count_failed_events()


def _judge_once(rule_run: RuleRun, taken: Mask, judged: Mask, ordered: Int64s) -> None:
    """Judges each event that is taken.

    `ordered` are all events that are in time, by (key, time). In this order, adjacent events search the same rows,
    which is several times faster.
    """
    rule, measuring, counted, counted_as = rule_run.rule, rule_run.measuring, ordered, _ALL
    if 2 * np.count_nonzero(taken) < len(counted):
        counted, counted_as = counted[taken[counted]], rule.where.sql if rule.where else ""
    # Otherwise every event is measured, even if the rule does not count it, so that all such rules share one search.
    known_as = (counted_as, rule.allowed_lateness)
    is_recording = rule_run.records_measures
    ceilings = measuring.find_ceilings(rule, counted, known_as) if rule.rising and not is_recording else []
    candidates = _find_candidates(rule_run, ceilings, counted, judged)
    if candidates is None:
        measuring.forget_other_windows(rule)
        verdicts = _judge_events(rule_run, measuring, counted, known_as)
        for name, window, ceiling in ceilings:
            ceiling.begin(window.size, verdicts.columns[name])
        if is_recording:
            rule_run.note_measures(counted, verdicts)
    else:
        has_error = rule_run.find_errors(rule_run.events)
        if has_error is not None:
            rule_run.failed |= judged & has_error
        if not len(candidates):
            return
        counted = counted[candidates]
        verdicts = _judge_events(rule_run, measuring, counted, None)
        for name, window, ceiling in ceilings:
            ceiling.lower(window, candidates, verdicts.columns[name])
    failing, hits = counted[verdicts.errors], np.flatnonzero(verdicts.holds)
    rule_run.failed[failing[judged[failing]]] = True
    hits = hits[judged[counted[hits]]]
    if len(hits):
        _raise_alerts(rule_run, verdicts, counted, hits[np.argsort(counted[hits])])


def _find_candidates(
    rule_run: RuleRun, ceilings: list[tuple[str, Lookback, Ceiling]], counted: Int64s, judged: Mask
) -> Int64s | None:
    """Returns the positions of the counted events for which the condition may hold, according to the ceilings.

    Returns None if the ceilings are unknown, or if they exclude too few events to be worth it.
    """
    columns = {name: ceiling.column for name, window, ceiling in ceilings if ceiling.column and ceiling.covers(window)}
    if not ceilings or len(columns) < len(ceilings):
        return None
    if all(ceiling.is_below(rule_run.rule.rising[name]) for name, _, ceiling in ceilings):
        return np.empty(0, dtype=np.int64)
    assert rule_run.rule.when is not None
    when = rule_run.rule.when.evaluate(columns, len(counted))
    may_hold = when.is_true()
    for error in (when.error, *(column.error for column in columns.values())):
        if error is not None:
            # A sum that does not fit its type may fit for a smaller window; if not, it is an error to report.
            may_hold |= error
    candidates = np.flatnonzero(may_hold)
    candidates = candidates[judged[counted[candidates]]]
    return candidates if len(candidates) < _MAX_CANDIDATES * len(counted) else None


def _judge_events(rule_run: RuleRun, measuring: Measuring, counted: Int64s, counted_as: Hashable | None) -> Verdicts:
    """Judges each counted event of `measuring` as of its arrival.

    `counted_as` identifies this selection of events for rules that share it; None if no other rule does.
    """
    rule, events = rule_run.rule, measuring.events
    columns: dict[str, Column] = {}
    is_complete = np.ones(len(counted), dtype=bool)
    has_error = rule_run.find_errors(events)
    for measure in rule.measures:
        window = measure.window
        assert isinstance(window, Lookback)
        queries = measuring.find_lookbacks(window, rule.group_by, counted, counted_as)
        known_as = None if counted_as is None else (window, counted_as)
        columns[measure.name] = measuring.measure(measure.feature, None, queries, known_as)
        complete_from = rule_run.state.features[measure.feature.feature_id].complete_from
        if complete_from is not None and complete_from > queries.earliest:
            is_complete &= queries.first >= complete_from
    inputs = dict(columns)
    named = frozenset() if rule.when is None else rule.when.named
    # A measure may have the name of a column that only orders events.
    for name in (named & set(events.columns)) - set(columns):
        inputs[name] = events.columns[name].take(counted)
    holds, errors = rule_run.check_condition(inputs, is_complete, events.times[counted])
    if has_error is not None:
        holds, errors = holds & ~has_error[counted], errors | has_error[counted]
    return Verdicts(columns, is_complete, holds, errors)


def _raise_alerts(rule_run: RuleRun, verdicts: Verdicts, at_counted: Int64s, hits: Int64s) -> None:
    """Writes an alert for each hit in order of arrival; `at_counted` are the events' positions in the segment."""
    rule, events, window = rule_run.rule, rule_run.events, rule_run.spec.window
    assert isinstance(window, Lookback)
    at_hits = at_counted[hits]
    if not rule_run.writes_alerts:
        rule_run.note_flagged(at_hits)
        return
    # Columns are converted as a whole: a rule may alert on every event, with many measures.
    measures = _list_rows({measure.name: verdicts.columns[measure.name].take(hits) for measure in rule.measures}, hits)
    shown = [name for name in rule.fields if name in rule.shown_names]
    values = _list_rows({name: events.columns[name].take(at_hits) for name in shown}, hits)
    is_complete, times = verdicts.is_complete[hits].tolist(), events.times[at_hits].tolist()
    key_texts, keys = rule_run.list_key_texts(at_hits), rule_run.list_keys(at_hits)
    ids = list(map(str, events.list_ids(at_hits)))
    for row, (at, time) in enumerate(zip(at_hits.tolist(), times, strict=True)):
        first, last = window.bounds(time)
        evidence = (ids[row],) if isinstance(window, Moment) else ()
        subject = Subject(key_texts[row], keys[row], ids[row], time, first, last, evidence)
        order = rule_run.order_by_event(at)
        rule_run.writer.raise_alert(order, subject, measures[row], is_complete[row], values[row])


def _list_rows(columns: Mapping[str, Column], hits: Int64s) -> list[dict[str, Any]]:
    """Returns the values of each hit by column, as dictionaries; all columns have the length of `hits`."""
    if not columns:
        return [{}] * len(hits)
    rows = zip(*(column.to_list() for column in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _judge_resetting(rule_run: RuleRun, taken: Mask, judged: Mask) -> None:
    """Judges a rule whose alerts reset its windows, in rounds that each end at the next alert of every key."""
    events, grouping = rule_run.events, rule_run.grouping
    order = np.flatnonzero(taken)
    order = order[np.argsort(grouping.numbers[order], kind="stable")]
    numbers, keys = grouping.numbers[order], np.arange(len(grouping.distinct.low))
    starts = np.searchsorted(numbers, keys)
    sizes = np.searchsorted(numbers, keys, side="right") - starts
    # For each key, as ranks among its events: `begin` is the first after its last alert, and those before `done` are
    # judged.
    begin, done, reach = np.zeros_like(sizes), np.zeros_like(sizes), sizes.copy()
    # The first round judges all events, with the rows of earlier batches. Later rounds judge only keys that were reset.
    measuring, positions, counted = rule_run.measuring, np.arange(len(events), dtype=np.int64), order
    active, is_first_round = keys[sizes > 0], True
    while len(active):
        ends = np.minimum(done[active] + reach[active], sizes[active])
        if not is_first_round:
            spans = list(zip(active.tolist(), ends.tolist(), strict=True))
            positions = np.sort(
                np.concatenate([order[starts[key] + begin[key] : starts[key] + end] for key, end in spans])
            )
            fresh = np.concatenate([order[starts[key] + done[key] : starts[key] + end] for key, end in spans])
            measuring = rule_run.measuring.restrict_to(positions)
            counted = np.searchsorted(positions, fresh)
        verdicts = _judge_events(rule_run, measuring, counted, rule_run.rule.fingerprint)
        at = positions[counted]
        hits = np.flatnonzero(verdicts.holds & judged[at])
        first = np.full(len(keys), len(events), dtype=np.int64)
        np.minimum.at(first, grouping.numbers[at[hits]], at[hits])
        first_hits = first[grouping.numbers[at]]
        rule_run.failed[at[verdicts.errors & judged[at] & (at < first_hits)]] = True
        hits = hits[at[hits] == first_hits[hits]]
        if rule_run.records_measures:
            # The next round measures again what comes after an alert.
            rows = np.flatnonzero(at <= first_hits)
            rule_run.note_measures(at[rows], verdicts.take(rows))
        _raise_alerts(rule_run, verdicts, at, hits[np.argsort(at[hits])])
        done[active], reach[active] = ends, 2 * reach[active]
        for key in active[first[active] < len(events)].tolist():
            own = order[starts[key] : starts[key] + sizes[key]]
            begin[key] = done[key] = int(np.searchsorted(own, first[key])) + 1
            reach[key] = _FIRST_EVENTS
        active, is_first_round = active[done[active] < sizes[active]], False
    _reset_windows(rule_run, order, starts, begin)


def _reset_windows(rule_run: RuleRun, order: Int64s, starts: Int64s, begin: Int64s) -> None:
    """Removes everything that arrived up to the last alert of each key from the state, and keeps it out."""
    emptied = np.flatnonzero(begin)
    if not len(emptied):
        return
    is_emptied = np.zeros(len(rule_run.events), dtype=bool)
    for key in emptied.tolist():
        is_emptied[order[starts[key] : starts[key] + begin[key]]] = True
    keys = rule_run.grouping.distinct.take(emptied)
    rule_run.empty_windows(is_emptied, keys.list_pairs())


@dataclass(eq=False)
class _JudgedEvent:
    """A judged event whose verdict may be revised.

    Attributes:
        time: The event time.
        id: The id of the event.
        values: The values of the fields that the condition, the message, the entities and the key read.
        memory: The memory of its verdict; None if it has no row.
    """

    time: int
    id: str
    values: list[Any]
    memory: Memory | None

    @classmethod
    def from_value(cls, value: Sequence[Any]) -> _JudgedEvent:
        """Decodes the output of `to_value`."""
        time, event_id, values, memory = value
        return cls(time, event_id, values, None if memory is None else Memory(*memory))

    def to_value(self) -> list[Any]:
        """Encodes the event for a keyed table."""
        return [self.time, self.id, self.values, self.memory]


def _read_judged(value: Mapping[str, Any] | None) -> list[_JudgedEvent]:
    """Reads the judged events of a key, by time."""
    return [] if value is None else [_JudgedEvent.from_value(row) for row in value["rows"]]


def _judged_value(events: Sequence[_JudgedEvent]) -> dict[str, Any]:
    """Encodes the judged events of a key for `_read_judged`."""
    return {"rows": [event.to_value() for event in events]}


def forget_other_versions(state: ShardState, entry: Entry, rule: CompiledRule) -> None:
    """Drops the judged events of other versions or documents of a rule with `late: revise`."""
    table, mark = state.table(rule.memory), {"version": entry.version, "document": rule.fingerprint}
    if table.notes != mark:
        state.tables.drop(rule.memory)
        table = state.table(rule.memory)
    table.notes.update(mark)


def delete_judged(
    state: ShardState, rule: CompiledRule, keys: Keys, deleted: Events, selected: Mask, _lists: Lists
) -> None:
    """Drops the selected deleted events, so that they are not judged again."""
    if rule.spec.late != "revise":
        return
    table = state.table(rule.memory)
    for at in np.flatnonzero(selected).tolist():
        key = keys.pair(at)
        value = table.get(key)
        if value is not None:
            time, event_id = int(deleted.times[at]), deleted.id_text(at)
            kept = [each for each in _read_judged(value) if (each.time, each.id) != (time, event_id)]
            table.change(key, _judged_value(kept))


@dataclass(frozen=True)
class _Item:
    """An event to judge as of the arrival of another event, or its own.

    Attributes:
        position: The position of the arriving event.
        rank: The rank of the judged event among those of its key.
        key: The key.
        judged: The judged event.
    """

    position: int
    rank: int
    key: Key
    judged: _JudgedEvent


class _Revising:
    """Judges a rule that revises its verdicts when another event arrives in their windows."""

    def __init__(self, rule_run: RuleRun, taken: Mask, judged: Mask) -> None:
        self._rule_run, self._taken = rule_run, taken
        rule = rule_run.rule
        has_error = rule_run.find_errors(rule_run.events)
        self._judged = judged
        if has_error is not None:
            rule_run.failed |= judged & has_error
            self._judged = judged & ~has_error
        named = {*(rule.when.named if rule.when else ()), *rule.shown_names, *rule.group_by}
        self._fields = [name for name in rule.fields if name in named]
        self._windows = {measure.window for measure in rule.measures if isinstance(measure.window, Lookback)}
        # By key, the judged events that may still be revised (see `_read_judged`).
        self._table = rule_run.state.table(rule.memory)

    def run(self) -> None:
        """Judges the events of the segment, and re-judges the events whose windows they enter."""
        rule_run = self._rule_run
        items: list[_Item] = []
        values = [rule_run.events.columns[name].to_stored_list() for name in self._fields]
        touched: list[tuple[Key, list[_JudgedEvent]]] = []
        for key, positions in rule_run.group_by_key(self._taken):
            rows = _read_judged(self._table.get(key))
            touched.append((key, rows))
            times = [row.time for row in rows]
            for at in positions.tolist():
                items += self._find_entered(key, rows, times, at)
                if self._judged[at]:
                    time = int(rule_run.events.times[at])
                    row = _JudgedEvent(time, rule_run.events.id_texts[at], [column[at] for column in values], None)
                    rank = bisect_right(times, time)
                    rows.insert(rank, row)
                    times.insert(rank, time)
                    items.append(_Item(at, len(rows), key, row))
        items.sort(key=lambda item: (item.position, item.rank))
        if items:
            self._judge(items)
        self._keep_revisable(touched)

    def _find_entered(self, key: Key, rows: list[_JudgedEvent], times: list[int], at: int) -> list[_Item]:
        """Finds the judged events whose windows an arriving event enters, oldest first."""
        rule_run = self._rule_run
        time = int(rule_run.events.times[at])
        ranks: set[int] = set()
        for window in self._windows:
            first, last = window.find_affected_times(time)
            ranks.update(range(bisect_left(times, first), bisect_right(times, last)))
        ordered = sorted(ranks)
        most = rule_run.stream.max_revisions
        if len(ordered) > most:
            event_id = rule_run.events.id_text(at)
            message = (
                f"event {event_id} enters the windows of {len(ordered)} events judged before it; the {most} oldest "
                "are judged again (max_revisions of the stream)"
            )
            rule_run.add_note("revisions_limited", message, int(rule_run.events.commits[at]))
        return [_Item(at, rank, key, rows[rank]) for rank in ordered[:most]]

    def _judge(self, items: list[_Item]) -> None:
        """Measures all items at once and writes them in order."""
        rule_run, rule = self._rule_run, self._rule_run.rule
        positions = np.array([item.position for item in items], dtype=np.int64)
        times = np.array([item.judged.time for item in items], dtype=np.int64)
        columns: dict[str, Column] = {}
        is_complete = np.ones(len(items), dtype=bool)
        for measure in rule.measures:
            assert isinstance(measure.window, Lookback)
            queries = Queries(rule_run.grouping.numbers[positions], positions, *measure.window.bounds(times))
            columns[measure.name] = rule_run.measuring.measure(measure.feature, None, queries)
            complete_from = rule_run.state.features[measure.feature.feature_id].complete_from
            if complete_from is not None:
                is_complete &= queries.first >= complete_from
        event_columns = {
            name: from_values(rule_run.stream.fields[name], [item.judged.values[at] for item in items])
            for at, name in enumerate(self._fields)
        }
        holds, errors = rule_run.check_condition({**columns, **event_columns}, is_complete, times)
        for row, item in enumerate(items):
            if errors[row]:
                arrival = int(rule_run.events.commits[item.position])
                events = rule_run.events
                time, event = int(events.times[item.position]), events.sort_text(item.position)
                rule_run.count_failure(arrival, time, item.judged.id, event=event)
            elif holds[row] or item.judged.memory is not None:
                measures = {measure.name: columns[measure.name].item(row) for measure in rule.measures}
                values = {name: column.item(row) for name, column in event_columns.items()}
                self._write(item, bool(holds[row]), measures, bool(is_complete[row]), values)

    def _write(
        self, item: _Item, holds: bool, measures: dict[str, Any], is_complete: bool, values: dict[str, Any]
    ) -> None:
        """Writes the row of an item if its verdict or its measures have changed."""
        rule_run, window, judged = self._rule_run, self._rule_run.spec.window, item.judged
        assert isinstance(window, Lookback)
        first, last = window.bounds(judged.time)
        key_texts = rule_run.key_texts(item.position)
        subject = Subject(key_texts, item.key, judged.id, judged.time, first, last)
        order = rule_run.order_by_event(item.position, item.rank)
        judgement = Judgement(holds, measures, to_texts(measures), is_complete)
        judged.memory = rule_run.writer.revise(order, judged.memory, subject, judgement, values) or judged.memory

    def _keep_revisable(self, touched: list[tuple[Key, list[_JudgedEvent]]]) -> None:
        """Keeps the judged events whose windows a future event can still enter in time."""
        rule_run, delay = self._rule_run, min(window.delay for window in self._windows)
        earliest = rule_run.earliest_in_time(rule_run.timeline.end)
        for key, rows in touched:
            kept = [row for row in rows if row.time - delay >= earliest]
            wake = max((row.time for row in kept), default=0) - delay + rule_run.rule.allowed_lateness + 1
            self._table.put(key, _judged_value(kept) if kept else None, wake)
        self._table.forget_due(rule_run.timeline.end)

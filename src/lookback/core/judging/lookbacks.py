"""Lookback rules: every event judged over a window that ends at it, or some time before it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np

from lookback.core.aggregation.grouping import Queries
from lookback.core.judging.measuring import Measuring
from lookback.core.judging.segment import RuleRun
from lookback.core.judging.verdicts import Memory, Subject, texts_of
from lookback.core.rules.compiled import CompiledRule
from lookback.core.rules.rulebook import Entry
from lookback.core.state.keyed import Key
from lookback.core.state.shard import ShardState
from lookback.core.streams.alerts import BY_EVENT
from lookback.core.streams.events import Events
from lookback.core.values.columns import Column, Mask, from_values
from lookback.core.values.keys import Int64s, Keys
from lookback.core.values.windows import Lookback

# Of a key that an alert has emptied, so many events are tried at first; twice as many each time without an alert.
_TRIED = 16


def judge_lookback(rule_run: RuleRun) -> None:
    """Judges the events of a segment by a lookback rule."""
    rule, segment = rule_run.rule, rule_run.segment
    taken = rule_run.wanted & segment.measuring.is_in_time(rule.allowed_lateness)
    judged = taken & rule_run.is_effective(rule_run.events.times)
    if rule.spec.late == "record":
        judged &= ~rule_run.late
    if not rule_run.evaluated:
        judged = np.zeros(len(judged), dtype=bool)
    rule_run.record_judged(rule_run.wanted, taken, judged)
    if not rule_run.evaluated or not len(rule_run.events):
        return
    if rule.spec.late == "revise":
        _Revising(rule_run, taken, judged).run()
    elif rule.spec.reset_on_alert:
        _judge_resetting(rule_run, taken, judged)
    else:
        # In the order of (key, time): neighbours search the same rows, which is several times faster.
        counted = rule_run.grouping.sorted[taken[rule_run.grouping.sorted]]
        found = _judge_events(rule_run, segment.measuring, counted)
        wrong, hits = counted[found.errors], np.flatnonzero(found.holds)
        rule_run.failed[wrong[judged[wrong]]] = True
        hits = hits[judged[counted[hits]]]
        _raise_alerts(rule_run, found, counted, hits[np.argsort(counted[hits])], np.arange(len(rule_run.events)))
    rule_run.count_failed_events(rule_run.failed)


@dataclass(frozen=True)
class _Findings:
    """Measures of some windows, whether each is complete, where the condition holds, where there is an error."""

    columns: dict[str, Column]
    complete: Mask
    holds: Mask
    errors: Mask


def _judge_events(rule_run: RuleRun, measuring: Measuring, counted: Int64s) -> _Findings:
    """What the rule finds at each counted event of `measuring`, as of its arrival."""
    rule, events = rule_run.rule, measuring.events
    columns: dict[str, Column] = {}
    complete = np.ones(len(counted), dtype=bool)
    # Rules that count the same events ask the same; one whose alerts empty its windows asks in an order of its own.
    asked = (rule.where.sql if rule.where else "", rule.allowed_lateness, rule.spec.reset_on_alert, len(counted))
    spoiled = rule_run.find_errors(events)[counted]
    for measure in rule.measures:
        window = measure.window
        assert isinstance(window, Lookback)
        queries = measuring.lookbacks(window, rule.group_by, counted, asked)
        columns[measure.name] = measuring.column(measure.feature, None, queries, (window, asked))
        complete &= rule_run.is_complete(measure.feature.feature_id, queries.first)
    inputs = dict(columns)
    assert rule.when is not None
    for name in rule.when.fields & set(events.columns):
        inputs[name] = events.columns[name].take(counted)
    holds, errors = rule_run.check_condition(inputs, complete)
    return _Findings(columns, complete, holds & ~spoiled, errors | spoiled)


def _raise_alerts(rule_run: RuleRun, found: _Findings, counted: Int64s, hits: Int64s, positions: Int64s) -> None:
    """Writes a row for each hit, in order of arrival. positions: of the counted events among those of the segment."""
    rule, events, window = rule_run.rule, rule_run.events, rule_run.rule.spec.window
    assert isinstance(window, Lookback)
    told = [name for name in rule.fields if name in rule.in_message]
    for hit in hits.tolist():
        at = int(positions[counted[hit]])
        time = int(events.times[at])
        first, last = window.bounds(time)
        measures = {measure.name: found.columns[measure.name].item(hit) for measure in rule.measures}
        subject = Subject(rule_run.key_texts(at), rule_run.halves(at), events.id_text(at), time, first, last)
        values = {name: events.columns[name].item(at) for name in told}
        arrival, complete = int(events.commits[at]), bool(found.complete[hit])
        row = rule_run.writer.make_alert(
            subject, rule_run.writer.decide_first(subject), 0, arrival, measures, complete, values
        )
        rule_run.add_alert((int(rule_run.segment.places[at]), BY_EVENT, at, 0), row)


def _judge_resetting(rule_run: RuleRun, taken: Mask, judged: Mask) -> None:
    """A rule whose alerts empty its windows: round by round, in each up to the next alert of every key."""
    events, grouping, segment = rule_run.events, rule_run.grouping, rule_run.segment
    order = np.flatnonzero(taken)
    order = order[np.argsort(grouping.numbers[order], kind="stable")]
    numbers, keys = grouping.numbers[order], np.arange(len(grouping.distinct.low))
    starts = np.searchsorted(numbers, keys)
    sizes = np.searchsorted(numbers, keys, side="right") - starts
    # Per key, as ranks among its events: `begin` after its last alert, `done` up to where it is judged.
    begin, done, reach = np.zeros_like(sizes), np.zeros_like(sizes), sizes.copy()
    # In the first round all events, with what earlier batches brought; then only those of keys that were emptied.
    measuring, positions, counted = segment.measuring, np.arange(len(events), dtype=np.int64), order
    active, whole = keys[sizes > 0], True
    while len(active):
        ends = np.minimum(done[active] + reach[active], sizes[active])
        if not whole:
            spans = list(zip(active.tolist(), ends.tolist(), strict=True))
            positions = np.sort(
                np.concatenate([order[starts[key] + begin[key] : starts[key] + end] for key, end in spans])
            )
            fresh = np.concatenate([order[starts[key] + done[key] : starts[key] + end] for key, end in spans])
            measuring = segment.measuring_of(positions)
            counted = np.searchsorted(positions, fresh)
        found = _judge_events(rule_run, measuring, counted)
        at = positions[counted]
        hits = np.flatnonzero(found.holds & judged[at])
        first = np.full(len(keys), len(events), dtype=np.int64)
        np.minimum.at(first, grouping.numbers[at[hits]], at[hits])
        of_key = first[grouping.numbers[at]]
        rule_run.failed[at[found.errors & judged[at] & (at < of_key)]] = True
        hits = hits[at[hits] == of_key[hits]]
        _raise_alerts(rule_run, found, counted, hits[np.argsort(at[hits])], positions)
        done[active], reach[active] = ends, 2 * reach[active]
        for key in active[first[active] < len(events)].tolist():
            own = order[starts[key] : starts[key] + sizes[key]]
            begin[key] = done[key] = int(np.searchsorted(own, first[key])) + 1
            reach[key] = _TRIED
        active, whole = active[done[active] < sizes[active]], False
    _reset_windows(rule_run, order, starts, begin)


def _reset_windows(rule_run: RuleRun, order: Int64s, starts: Int64s, begin: Int64s) -> None:
    """Takes out of the state, and keeps out of it, what arrived up to the last alert of each key."""
    emptied = np.flatnonzero(begin)
    if not len(emptied):
        return
    gone = np.zeros(len(rule_run.events), dtype=bool)
    for key in emptied.tolist():
        gone[order[starts[key] : starts[key] + begin[key]]] = True
    distinct = rule_run.grouping.distinct.take(emptied)
    halves = list(zip(distinct.low.tolist(), distinct.high.tolist(), strict=True))
    for feature in rule_run.rule.features:
        rule_run.segment.dropped[feature.feature_id] = gone
        rule_run.state.reset(rule_run.state.features[feature.feature_id], halves)


def forget_other_versions(state: ShardState, entry: Entry, rule: CompiledRule) -> None:
    """Forgets the events that another version, or another document of the same version, has judged."""
    if rule.spec.late != "revise":
        return
    table, mark = state.table(rule.memory), {"version": entry.version, "document": rule.fingerprint}
    # Release 0.1.0 did not note the document.
    if table.notes not in (mark, {"version": entry.version}):
        state.drop_table(rule.memory)
        table = state.table(rule.memory)
    table.notes.update(mark)


def delete_judged(state: ShardState, rule: CompiledRule, keys: Keys, deleted: Events, mine: Mask) -> None:
    """Deleted events are not judged again."""
    if rule.spec.late != "revise":
        return
    table = state.table(rule.memory)
    for at in np.flatnonzero(mine).tolist():
        key = (int(keys.low[at]), int(keys.high[at]))
        value = table.get(key)
        if value is not None:
            gone = (int(deleted.times[at]), deleted.id_text(at))
            judged = (_JudgedEvent(*row) for row in value["rows"])
            table.change(key, {"rows": [each.to_value() for each in judged if (each.time, each.id) != gone]})


@dataclass(eq=False)
class _JudgedEvent:
    """An event that was judged. values: of the fields that condition, message and key read; memory: None without a row."""

    time: int
    id: str
    values: list[Any]
    memory: Memory | None

    def __post_init__(self) -> None:
        if self.memory is not None:
            self.memory = Memory(*self.memory)

    def to_value(self) -> list[Any]:
        """A list, as a keyed table stores it."""
        return [self.time, self.id, self.values, self.memory]


@dataclass(frozen=True)
class _Item:
    """An event to be judged as of the arrival of another (or its own)."""

    position: int
    rank: int
    key: Key
    number: int
    judged: _JudgedEvent


class _Revising:
    """A rule whose verdicts are judged again when an event arrives in their windows."""

    def __init__(self, rule_run: RuleRun, taken: Mask, judged: Mask) -> None:
        self._rule_run, self._taken = rule_run, taken
        rule = rule_run.rule
        spoiled = rule_run.find_errors(rule_run.events)
        rule_run.failed |= judged & spoiled
        self._judged = judged & ~spoiled
        named = {*(rule.when.fields if rule.when else ()), *rule.in_message, *rule.group_by}
        self._fields = [name for name in rule.fields if name in named]
        self._windows = {measure.window for measure in rule.measures if isinstance(measure.window, Lookback)}
        self._table = rule_run.state.table(rule.memory)

    def run(self) -> None:
        rule_run = self._rule_run
        items: list[_Item] = []
        values = [rule_run.events.columns[name].stored() for name in self._fields]
        touched: list[tuple[Key, list[_JudgedEvent]]] = []
        for key, positions in rule_run.group_by_key(self._taken):
            entry = self._table.get(key) or {"rows": []}
            rows = [_JudgedEvent(*row) for row in entry["rows"]]
            touched.append((key, rows))
            times = [row.time for row in rows]
            for at in positions.tolist():
                items += self._entered(key, rows, times, at)
                if self._judged[at]:
                    time = int(rule_run.events.times[at])
                    row = _JudgedEvent(time, rule_run.events.id_texts[at], [column[at] for column in values], None)
                    place = bisect_right(times, time)
                    rows.insert(place, row)
                    times.insert(place, time)
                    items.append(_Item(at, len(rows), key, int(rule_run.grouping.numbers[at]), row))
        items.sort(key=lambda item: (item.position, item.rank))
        if items:
            self._judge(items)
        self._keep(touched)

    def _entered(self, key: Key, rows: list[_JudgedEvent], times: list[int], at: int) -> list[_Item]:
        """The judged events whose windows an arriving event enters, oldest first."""
        rule_run = self._rule_run
        time, number = int(rule_run.events.times[at]), int(rule_run.grouping.numbers[at])
        ranks: set[int] = set()
        for window in self._windows:
            first, last = window.seen_from(time)
            ranks.update(range(bisect_left(times, first), bisect_right(times, last)))
        ordered = sorted(ranks)
        most = rule_run.segment.stream.max_revisions
        if len(ordered) > most:
            event_id = rule_run.events.id_text(at)
            message = (
                f"event {event_id} enters the windows of {len(ordered)} events judged before it; the {most} oldest "
                "are judged again (max_revisions of the stream)"
            )
            rule_run.add_note("revisions_limited", message, int(rule_run.events.commits[at]))
        return [_Item(at, rank, key, number, rows[rank]) for rank in ordered[:most]]

    def _judge(self, items: list[_Item]) -> None:
        rule_run, rule = self._rule_run, self._rule_run.rule
        measuring = rule_run.segment.measuring
        numbers = np.array([item.number for item in items], dtype=np.int64)
        positions = np.array([item.position for item in items], dtype=np.int64)
        times = np.array([item.judged.time for item in items], dtype=np.int64)
        columns: dict[str, Column] = {}
        complete = np.ones(len(items), dtype=bool)
        for measure in rule.measures:
            assert isinstance(measure.window, Lookback)
            first, last = measure.window.bounds(times)
            columns[measure.name] = measuring.column(measure.feature, None, Queries(numbers, positions, first, last))
            complete &= rule_run.is_complete(measure.feature.feature_id, first)
        fields = rule_run.segment.stream.fields
        of_event = {
            name: from_values(fields[name], [item.judged.values[at] for item in items])
            for at, name in enumerate(self._fields)
        }
        holds, errors = rule_run.check_condition({**columns, **of_event}, complete)
        for row, item in enumerate(items):
            if errors[row]:
                arrival = int(rule_run.events.commits[item.position])
                rule_run.count_failure(arrival, int(rule_run.events.times[item.position]), item.judged.id)
            elif holds[row] or item.judged.memory is not None:
                measures = {measure.name: columns[measure.name].item(row) for measure in rule.measures}
                values = {name: column.item(row) for name, column in of_event.items()}
                self._write(item, bool(holds[row]), measures, bool(complete[row]), values)

    def _write(
        self, item: _Item, holds: bool, measures: dict[str, Any], complete: bool, values: dict[str, Any]
    ) -> None:
        rule_run, window = self._rule_run, self._rule_run.rule.spec.window
        assert isinstance(window, Lookback)
        judged = item.judged
        first, last = window.bounds(judged.time)
        key = rule_run.key_texts(item.position)
        subject = Subject(key, item.key, judged.id, judged.time, first, last)
        memory, verdict = rule_run.writer.revise(judged.memory, subject, holds, texts_of(measures))
        judged.memory = memory
        if verdict is not None and memory is not None:
            arrival = int(rule_run.events.commits[item.position])
            row = rule_run.writer.make_alert(subject, verdict, memory.revision, arrival, measures, complete, values)
            rule_run.add_alert((int(rule_run.segment.places[item.position]), BY_EVENT, item.position, item.rank), row)

    def _keep(self, touched: list[tuple[Key, list[_JudgedEvent]]]) -> None:
        """Forgets the events that no event can enter any more: one that is taken is not older than the lateness."""
        rule_run = self._rule_run
        lateness, delay = rule_run.rule.allowed_lateness, min(window.delay for window in self._windows)
        watermark = int(rule_run.timeline.after[-1])
        for key, rows in touched:
            left = [row for row in rows if row.time - delay >= watermark - lateness]
            wake = max((row.time for row in left), default=0) - delay + lateness + 1
            self._table.put(key, {"rows": [row.to_value() for row in left]} if left else None, wake)

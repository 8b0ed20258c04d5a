"""Lookback rules: every event judged over a window that ends at it, or some time before it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np

from lookback.core.alerts import BY_EVENT
from lookback.core.columns import Column, Mask, from_values
from lookback.core.compiled import CompiledRule
from lookback.core.events import Events
from lookback.core.grouping import Queries
from lookback.core.keyed import Key
from lookback.core.keys import Int64s, Keys
from lookback.core.measuring import Measuring
from lookback.core.rulebook import Entry
from lookback.core.state import ShardState
from lookback.core.stretch import Case
from lookback.core.verdicts import Memory, Subject, texts_of
from lookback.core.windows import Lookback

# Of a key that an alert has emptied, so many events are tried at first; twice as many each time without an alert.
_TRIED = 16


def judge_lookback(case: Case) -> None:
    """Judges the events of a stretch by a lookback rule."""
    rule, stretch = case.rule, case.stretch
    taken = case.wanted & stretch.measuring.taken(rule.allowed_lateness)
    judged = taken & case.effective(case.events.times)
    if rule.rule.late == "record":
        judged &= ~case.late
    if not case.evaluated:
        judged = np.zeros(len(judged), dtype=bool)
    case.note_taken(case.wanted, taken, judged)
    if not case.evaluated or not len(case.events):
        return
    if rule.rule.late == "revise":
        _Revising(case, taken, judged).run()
    elif rule.rule.reset_on_alert:
        _judge_resetting(case, taken, judged)
    else:
        # In the order of (key, time): neighbours search the same rows, which is several times faster.
        counted = case.grouping.sorted[taken[case.grouping.sorted]]
        found = _found(case, stretch.measuring, counted)
        wrong, hits = counted[found.errors], np.flatnonzero(found.holds)
        case.failed[wrong[judged[wrong]]] = True
        hits = hits[judged[counted[hits]]]
        _raise(case, found, counted, hits[np.argsort(counted[hits])], np.arange(len(case.events)))
    case.fail_events(case.failed)


@dataclass(frozen=True)
class _Found:
    """Measures of some windows, whether each is complete, where the condition holds, where there is an error."""

    columns: dict[str, Column]
    complete: Mask
    holds: Mask
    errors: Mask


def _found(case: Case, measuring: Measuring, counted: Int64s) -> _Found:
    """What the rule finds at each counted event of `measuring`, as of its arrival."""
    rule, events = case.rule, measuring.events
    columns: dict[str, Column] = {}
    complete = np.ones(len(counted), dtype=bool)
    # Rules that count the same events ask the same; one whose alerts empty its windows asks in an order of its own.
    asked = (rule.where.sql if rule.where else "", rule.allowed_lateness, rule.rule.reset_on_alert, len(counted))
    spoiled = case.spoiled(events)[counted]
    for measure in rule.measures:
        window = measure.window
        assert isinstance(window, Lookback)
        queries = measuring.lookbacks(window, rule.group_by, counted, asked)
        columns[measure.name] = measuring.column(measure.feature, None, queries, (window, asked))
        complete &= case.complete(measure.feature.feature_id, queries.first)
    inputs = dict(columns)
    assert rule.when is not None
    for name in rule.when.fields & set(events.columns):
        inputs[name] = events.columns[name].take(counted)
    holds, errors = case.when(inputs, complete)
    return _Found(columns, complete, holds & ~spoiled, errors | spoiled)


def _raise(case: Case, found: _Found, counted: Int64s, hits: Int64s, positions: Int64s) -> None:
    """Writes a row for each hit, in order of arrival. positions: of the counted events among those of the stretch."""
    rule, events, window = case.rule, case.events, case.rule.rule.window
    assert isinstance(window, Lookback)
    told = [name for name in rule.fields if name in rule.in_message]
    for hit in hits.tolist():
        at = int(positions[counted[hit]])
        time = int(events.times[at])
        first, last = window.bounds(time)
        measures = {measure.name: found.columns[measure.name].item(hit) for measure in rule.measures}
        subject = Subject(case.key_texts(at), case.halves(at), events.id_text(at), time, first, last)
        values = {name: events.columns[name].item(at) for name in told}
        arrival, complete = int(events.commits[at]), bool(found.complete[hit])
        row = case.voice.row(subject, case.voice.first(subject), 0, arrival, measures, complete, values)
        case.say((int(case.stretch.places[at]), BY_EVENT, at, 0), row)


def _judge_resetting(case: Case, taken: Mask, judged: Mask) -> None:
    """A rule whose alerts empty its windows: round by round, in each up to the next alert of every key."""
    events, grouping, stretch = case.events, case.grouping, case.stretch
    order = np.flatnonzero(taken)
    order = order[np.argsort(grouping.numbers[order], kind="stable")]
    numbers, keys = grouping.numbers[order], np.arange(len(grouping.distinct.low))
    starts = np.searchsorted(numbers, keys)
    sizes = np.searchsorted(numbers, keys, side="right") - starts
    # Per key, as ranks among its events: `begin` after its last alert, `done` up to where it is judged.
    begin, done, reach = np.zeros_like(sizes), np.zeros_like(sizes), sizes.copy()
    # In the first round all events, with what earlier batches brought; then only those of keys that were emptied.
    measuring, positions, counted = stretch.measuring, np.arange(len(events), dtype=np.int64), order
    active, whole = keys[sizes > 0], True
    while len(active):
        ends = np.minimum(done[active] + reach[active], sizes[active])
        if not whole:
            spans = list(zip(active.tolist(), ends.tolist(), strict=True))
            positions = np.sort(
                np.concatenate([order[starts[key] + begin[key] : starts[key] + end] for key, end in spans])
            )
            fresh = np.concatenate([order[starts[key] + done[key] : starts[key] + end] for key, end in spans])
            measuring = stretch.measuring_of(positions)
            counted = np.searchsorted(positions, fresh)
        found = _found(case, measuring, counted)
        at = positions[counted]
        hits = np.flatnonzero(found.holds & judged[at])
        first = np.full(len(keys), len(events), dtype=np.int64)
        np.minimum.at(first, grouping.numbers[at[hits]], at[hits])
        of_key = first[grouping.numbers[at]]
        case.failed[at[found.errors & judged[at] & (at < of_key)]] = True
        hits = hits[at[hits] == of_key[hits]]
        _raise(case, found, counted, hits[np.argsort(at[hits])], positions)
        done[active], reach[active] = ends, 2 * reach[active]
        for key in active[first[active] < len(events)].tolist():
            own = order[starts[key] : starts[key] + sizes[key]]
            begin[key] = done[key] = int(np.searchsorted(own, first[key])) + 1
            reach[key] = _TRIED
        active, whole = active[done[active] < sizes[active]], False
    _empty(case, order, starts, begin)


def _empty(case: Case, order: Int64s, starts: Int64s, begin: Int64s) -> None:
    """Takes out of the state, and keeps out of it, what arrived up to the last alert of each key."""
    emptied = np.flatnonzero(begin)
    if not len(emptied):
        return
    gone = np.zeros(len(case.events), dtype=bool)
    for key in emptied.tolist():
        gone[order[starts[key] : starts[key] + begin[key]]] = True
    distinct = case.grouping.distinct.take(emptied)
    halves = list(zip(distinct.low.tolist(), distinct.high.tolist(), strict=True))
    for feature in case.rule.features:
        case.stretch.dropped[feature.feature_id] = gone
        case.state.reset(case.state.features[feature.feature_id], halves)


def forget_other_versions(state: ShardState, entry: Entry, rule: CompiledRule) -> None:
    """Forgets the events that another version, or another document of the same version, has judged."""
    if rule.rule.late != "revise":
        return
    table, mark = state.table(rule.memory), {"version": entry.version, "document": rule.fingerprint}
    # Release 0.1.0 did not note the document.
    if table.notes not in (mark, {"version": entry.version}):
        state.drop_table(rule.memory)
        table = state.table(rule.memory)
    table.notes.update(mark)


def delete_judged(state: ShardState, rule: CompiledRule, keys: Keys, deleted: Events, mine: Mask) -> None:
    """Deleted events are not judged again."""
    if rule.rule.late != "revise":
        return
    table = state.table(rule.memory)
    for at in np.flatnonzero(mine).tolist():
        key = (int(keys.low[at]), int(keys.high[at]))
        value = table.get(key)
        if value is not None:
            same = [int(deleted.times[at]), deleted.id_text(at)]
            table.change(key, {"rows": [row for row in value["rows"] if row[:2] != same]})


# An event that was judged: [time, id, values of the fields that condition, message and key read, Memory or None].
_Judged = list[Any]


@dataclass(frozen=True)
class _Item:
    """An event to be judged as of the arrival of another (or its own)."""

    position: int
    rank: int
    key: Key
    number: int
    judged: _Judged


class _Revising:
    """A rule whose verdicts are judged again when an event arrives in their windows."""

    def __init__(self, case: Case, taken: Mask, judged: Mask) -> None:
        self._case, self._taken = case, taken
        rule = case.rule
        spoiled = case.spoiled(case.events)
        case.failed |= judged & spoiled
        self._judged = judged & ~spoiled
        named = {*(rule.when.fields if rule.when else ()), *rule.in_message, *rule.group_by}
        self._fields = [name for name in rule.fields if name in named]
        self._windows = {measure.window for measure in rule.measures if isinstance(measure.window, Lookback)}
        self._table = case.state.table(rule.memory)

    def run(self) -> None:
        case = self._case
        items: list[_Item] = []
        values = [case.events.columns[name].stored() for name in self._fields]
        touched: list[tuple[Key, list[_Judged]]] = []
        for key, positions in case.by_key(self._taken):
            entry = self._table.get(key) or {"rows": []}
            rows: list[_Judged] = entry["rows"]
            touched.append((key, rows))
            times = [row[0] for row in rows]
            for at in positions.tolist():
                items += self._entered(key, rows, times, at)
                if self._judged[at]:
                    time = int(case.events.times[at])
                    row: _Judged = [time, case.events.id_texts[at], [column[at] for column in values], None]
                    place = bisect_right(times, time)
                    rows.insert(place, row)
                    times.insert(place, time)
                    items.append(_Item(at, len(rows), key, int(case.grouping.numbers[at]), row))
        items.sort(key=lambda item: (item.position, item.rank))
        if items:
            self._judge(items)
        self._keep(touched)

    def _entered(self, key: Key, rows: list[_Judged], times: list[int], at: int) -> list[_Item]:
        """The judged events whose windows an arriving event enters, oldest first."""
        case = self._case
        time, number = int(case.events.times[at]), int(case.grouping.numbers[at])
        ranks: set[int] = set()
        for window in self._windows:
            first, last = window.seen_from(time)
            ranks.update(range(bisect_left(times, first), bisect_right(times, last)))
        ordered = sorted(ranks)
        most = case.stretch.stream.max_revisions
        if len(ordered) > most:
            event_id = case.events.id_text(at)
            message = (
                f"event {event_id} enters the windows of {len(ordered)} events judged before it; the {most} oldest "
                "are judged again (max_revisions of the stream)"
            )
            case.note("revisions_limited", message, int(case.events.commits[at]))
        return [_Item(at, rank, key, number, rows[rank]) for rank in ordered[:most]]

    def _judge(self, items: list[_Item]) -> None:
        case, rule = self._case, self._case.rule
        measuring = case.stretch.measuring
        numbers = np.array([item.number for item in items], dtype=np.int64)
        positions = np.array([item.position for item in items], dtype=np.int64)
        times = np.array([item.judged[0] for item in items], dtype=np.int64)
        columns: dict[str, Column] = {}
        complete = np.ones(len(items), dtype=bool)
        for measure in rule.measures:
            assert isinstance(measure.window, Lookback)
            first, last = measure.window.bounds(times)
            columns[measure.name] = measuring.column(measure.feature, None, Queries(numbers, positions, first, last))
            complete &= case.complete(measure.feature.feature_id, first)
        fields = case.stretch.stream.fields
        of_event = {
            name: from_values(fields[name], [item.judged[2][at] for item in items])
            for at, name in enumerate(self._fields)
        }
        holds, errors = case.when({**columns, **of_event}, complete)
        for row, item in enumerate(items):
            if errors[row]:
                arrival = int(case.events.commits[item.position])
                case.fail(arrival, int(case.events.times[item.position]), str(item.judged[1]))
            elif holds[row] or item.judged[3] is not None:
                measures = {measure.name: columns[measure.name].item(row) for measure in rule.measures}
                values = {name: column.item(row) for name, column in of_event.items()}
                self._say(item, bool(holds[row]), measures, bool(complete[row]), values)

    def _say(self, item: _Item, holds: bool, measures: dict[str, Any], complete: bool, values: dict[str, Any]) -> None:
        case, window = self._case, self._case.rule.rule.window
        assert isinstance(window, Lookback)
        time, event_id, _, memory = item.judged
        first, last = window.bounds(time)
        key = case.key_texts(item.position)
        subject = Subject(key, item.key, event_id, time, first, last)
        item.judged[3], verdict = case.voice.revise(memory, subject, holds, texts_of(measures))
        known: Memory | None = item.judged[3]
        if verdict is not None and known is not None:
            arrival = int(case.events.commits[item.position])
            row = case.voice.row(subject, verdict, known[1], arrival, measures, complete, values)
            case.say((int(case.stretch.places[item.position]), BY_EVENT, item.position, item.rank), row)

    def _keep(self, touched: list[tuple[Key, list[_Judged]]]) -> None:
        """Forgets the events that no event can enter any more: one that is taken is not older than the lateness."""
        case = self._case
        lateness, delay = case.rule.allowed_lateness, min(window.delay for window in self._windows)
        watermark = int(case.timeline.after[-1])
        for key, rows in touched:
            left = [row for row in rows if row[0] - delay >= watermark - lateness]
            wake = max((row[0] for row in left), default=0) - delay + lateness + 1
            self._table.put(key, {"rows": left} if left else None, wake)

"""Tumbling and sliding windows: results when the watermark passes their end, and again for each late event."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lookback.core.aggregation.grouping import Queries
from lookback.core.judging.segment import Order, RuleRun
from lookback.core.judging.verdicts import Memory, Subject, texts_of
from lookback.core.rules.compiled import CompiledRule
from lookback.core.state.keyed import Key
from lookback.core.state.shard import ShardState
from lookback.core.streams.alerts import BY_EVENT, BY_WATERMARK, moment
from lookback.core.values.columns import Column, Mask, text_of
from lookback.core.values.keys import Int64s, Keys, find_keys, number_keys
from lookback.core.values.windows import TiledWindow


def forget_keys(state: ShardState, rules: Iterable[CompiledRule], watermark: int) -> None:
    """Forgets keys of which no window is left, once all rules that share their windows are judged."""
    for name in sorted({rule.presence.feature_id for rule in rules if rule.presence is not None}):
        state.table(name).forget_due(watermark)


def judge_tiled(rule_run: RuleRun) -> None:
    """Judges the windows of a segment by a rule with tumbling or sliding windows."""
    _Judge(rule_run).run()


class _Judge:
    def __init__(self, rule_run: RuleRun) -> None:
        assert isinstance(rule_run.rule.spec.window, TiledWindow)
        assert rule_run.rule.presence is not None
        self._rule_run, self._tiles, self._presence = rule_run, rule_run.rule.spec.window, rule_run.rule.presence
        self._lateness = rule_run.rule.allowed_lateness
        # Per key the stored values of the group_by fields, and until when a window of theirs can give a result.
        self._names = rule_run.state.table(self._presence.feature_id)
        # Per key [start of a window, Memory] of the windows that have a row.
        self._memories = rule_run.state.table(rule_run.rule.memory)

    def run(self) -> None:
        rule_run = self._rule_run
        taken = rule_run.wanted & rule_run.segment.measuring.is_in_time(self._lateness, self._tiles)
        judged = taken if rule_run.evaluated else np.zeros(len(taken), dtype=bool)
        rule_run.record_judged(rule_run.wanted, taken, judged)
        self._remember_keys(taken)
        if rule_run.evaluated:
            rule_run.failed |= taken & rule_run.find_errors(rule_run.events)
            rule_run.count_failed_events(rule_run.failed)
            self._judge(taken)
        self._forget()

    def _remember_keys(self, taken: Mask) -> None:
        """Keeps the values of the keys for as long as one of their windows can give a result."""
        rule_run, tiles = self._rule_run, self._tiles
        for key, positions in rule_run.group_by_key(taken):
            value = self._names.get(key)
            last = int(rule_run.events.times[positions].max())
            until = tiles.last_start(last) + tiles.size + self._lateness
            if value is None:
                value = {"key": rule_run.stored_key(int(positions[0])), "until": until}
            elif value["until"] >= until:
                continue
            value["until"] = until
            self._names.put(key, value, until)

    def _judge(self, taken: Mask) -> None:
        """Measures all results of the segment at once and writes them in order."""
        rule_run, tiles = self._rule_run, self._tiles
        results = _joined(self._updates(taken), self._ends(taken))
        if not len(results.starts):
            return
        measuring = rule_run.segment.measuring
        here = measuring.column(self._presence, results.keys, self._queries(results)).values > 0
        results = results.take(np.flatnonzero(here))
        starts, queries = results.starts, self._queries(results)
        columns: dict[str, Column] = {}
        complete = rule_run.is_complete(self._presence.feature_id, starts)
        for measure in rule_run.rule.measures:
            columns[measure.name] = measuring.column(measure.feature, results.keys, queries)
            complete &= rule_run.is_complete(measure.feature.feature_id, starts)
        halves = list(zip(results.keys.low.tolist(), results.keys.high.tolist(), strict=True))
        holds, errors = rule_run.check_condition(
            {**columns, **rule_run.key_columns(self._name(key) for key in halves)}, complete
        )
        effective = rule_run.is_effective(starts + tiles.size)
        # A key without alerts has nothing to retract.
        alerting = {halves[row] for row in np.flatnonzero(holds & effective).tolist()}
        alerting |= {key for key in set(halves) if self._memories.get(key)}
        has_alerts = np.fromiter((key in alerting for key in halves), dtype=bool, count=len(halves))
        shown = np.flatnonzero(effective & (errors | has_alerts))
        orders = results.take(shown).orders()
        for at in sorted(range(len(shown)), key=orders.__getitem__):
            row, start = int(shown[at]), int(starts[shown[at]])
            if errors[row]:
                arrival = int(rule_run.timeline.commits[orders[at][0]])
                rule_run.count_failure(arrival, start, f"the window of {text_of(moment(start))}")
                continue
            measures = {measure.name: columns[measure.name].item(row) for measure in rule_run.rule.measures}
            self._write(halves[row], start, bool(holds[row]), measures, bool(complete[row]), orders[at])

    def _queries(self, results: _Results) -> Queries:
        numbers = find_keys(results.keys, self._rule_run.grouping.distinct)
        return Queries(numbers, results.positions, results.starts, results.starts + self._tiles.size - 1)

    def _write(
        self, halves: Key, start: int, holds: bool, measures: dict[str, Any], complete: bool, order: Order
    ) -> None:
        rule_run, span = self._rule_run, self._tiles.size + self._lateness
        key = self._name(halves)
        # Windows that are over by now are forgotten.
        before = int(rule_run.timeline.before[order[0]])
        stored = self._memories.get(halves) or ()
        memories = {at: Memory(*memory) for at, memory in stored if at + span > before}
        end = start + self._tiles.size
        subject = Subject(texts_of(rule_run.key_values(key)), halves, None, end, start, end)
        memory, verdict = rule_run.writer.revise(memories.get(start), subject, holds, texts_of(measures))
        if verdict is None or memory is None:
            return
        memories[start] = memory
        self._memories.put(halves, [[at, memories[at]] for at in sorted(memories)], max(memories) + span)
        arrival = int(rule_run.timeline.commits[order[0]])
        rule_run.add_alert(
            order,
            rule_run.writer.make_alert(
                subject, verdict, memory.revision, arrival, measures, complete, rule_run.key_values(key)
            ),
        )

    def _name(self, halves: Key) -> list[Any]:
        """The stored values of a key."""
        value = self._names.get(halves)
        assert value is not None
        return list(value["key"])

    def _updates(self, taken: Mask) -> _Results:
        """Results that events bring: to windows that have ended, and with `early` to those that have not."""
        rule_run, tiles = self._rule_run, self._tiles
        positions = np.flatnonzero(taken if rule_run.rule.spec.early else taken & rule_run.late)
        times, marks = rule_run.events.times[positions], rule_run.segment.watermarks[positions]
        start = tiles.last_start(times)
        found: list[tuple[Int64s, Int64s]] = []
        for _ in range(-(-tiles.size // tiles.slide)):
            end = start + tiles.size
            fires = (end > times) & (end + self._lateness > marks)
            if not rule_run.rule.spec.early:
                fires &= end <= marks
            found.append((positions[fires], start[fires]))
            start = start - tiles.slide
        at = np.concatenate([position for position, _ in found]).astype(np.int64)
        starts = np.concatenate([each for _, each in found]).astype(np.int64)
        return _Results(
            rule_run.grouping.keys.take(at), starts, at, rule_run.segment.places[at], np.full_like(at, BY_EVENT), at
        )

    def _ends(self, taken: Mask) -> _Results:
        """Results that the watermark brings when it passes the ends of windows."""
        rule_run, tiles = self._rule_run, self._tiles
        before, after = int(rule_run.timeline.before[0]), int(rule_run.timeline.after[-1])
        positions = np.flatnonzero(taken)
        parts = [(rule_run.grouping.keys.take(positions), rule_run.events.times[positions])]
        for stored in rule_run.state.features[self._presence.feature_id].runs:
            if stored.last_time >= before - tiles.size:
                run = rule_run.state.load_run(stored)
                late = np.flatnonzero(run.times >= before - tiles.size)
                parts.append((run.keys.take(run.groups[late]), run.times[late]))
        keys = Keys(np.concatenate([k.low for k, _ in parts]), np.concatenate([k.high for k, _ in parts]))
        times = np.concatenate([t for _, t in parts])
        numbers, distinct = number_keys(keys)
        windows: list[tuple[Int64s, Int64s]] = []
        start = tiles.last_start(times)
        for _ in range(-(-tiles.size // tiles.slide)):
            end = start + tiles.size
            ending = (end > times) & (end > before) & (end <= after)
            windows.append(_distinct(numbers[ending], start[ending]))
            start = start - tiles.slide
        number, starts = _distinct(*(np.concatenate(column) for column in zip(*windows, strict=True)))
        places = rule_run.timeline.find_passing(starts + tiles.size)
        last = (
            np.searchsorted(rule_run.events.commits, rule_run.timeline.commits[places], side="right").astype(np.int64)
            - 1
        )
        return _Results(
            distinct.take(number), starts, last, places, np.full_like(places, BY_WATERMARK), starts + tiles.size
        )

    def _forget(self) -> None:
        """Forgets the memories of windows that are over."""
        self._memories.forget_due(int(self._rule_run.timeline.after[-1]))


@dataclass(frozen=True)
class _Results:
    """Windows to be judged, one per row: their keys and starts, and the event up to which each result counts.

    places, phases, ranks: where the result stands among all rows (see segment.Order).
    """

    keys: Keys
    starts: Int64s
    positions: Int64s
    places: Int64s
    phases: Int64s
    ranks: Int64s

    def take(self, at: Int64s) -> _Results:
        """The results at these positions."""
        columns = (self.starts, self.positions, self.places, self.phases, self.ranks)
        return _Results(self.keys.take(at), *(column[at] for column in columns))

    def orders(self) -> list[Order]:
        """Where each row stands; of one event the windows by their starts."""
        columns = (self.places, self.phases, self.ranks, self.starts)
        return list(zip(*(column.tolist() for column in columns), strict=True))


def _joined(left: _Results, right: _Results) -> _Results:
    keys = Keys(np.concatenate([left.keys.low, right.keys.low]), np.concatenate([left.keys.high, right.keys.high]))
    names = ("starts", "positions", "places", "phases", "ranks")
    return _Results(keys, *(np.concatenate([getattr(left, name), getattr(right, name)]) for name in names))


def _distinct(numbers: Int64s, starts: Int64s) -> tuple[Int64s, Int64s]:
    """The distinct pairs, sorted."""
    order = np.lexsort((starts, numbers))
    numbers, starts = numbers[order], starts[order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = (numbers[1:] != numbers[:-1]) | (starts[1:] != starts[:-1])
    return numbers[first], starts[first]

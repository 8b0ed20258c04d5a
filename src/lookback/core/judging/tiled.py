"""Judges tumbling and sliding windows: when the watermark passes their end, and again for each late event.

State: the rows of each measure and of the rule's `presence` feature (which tells which windows have events) are runs. Keyed
tables hold the keys with open windows (`_OpenKey`) and the last verdict on each window (`verdicts.Memory`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lookback.core.aggregation.grouping import Queries
from lookback.core.judging.segment import Order, RuleRun
from lookback.core.judging.verdicts import Memory, Subject, memories_value, read_memories, texts_of
from lookback.core.rules.compiled import CompiledRule
from lookback.core.state.keyed import Key
from lookback.core.state.shard import ShardState
from lookback.core.streams.alerts import BY_EVENT, BY_WATERMARK
from lookback.core.values.columns import Column, Mask, to_text
from lookback.core.values.keys import Int64s, Keys, find_keys, number_keys
from lookback.core.values.times import to_utc
from lookback.core.values.windows import TiledWindow


def judge_tiled(rule_run: RuleRun) -> None:
    """Judges the windows of a segment by a rule with tumbling or sliding windows."""
    _Judge(rule_run).run()


def forget_keys(state: ShardState, rules: Iterable[CompiledRule], watermark: int) -> None:
    """Forgets keys without open windows, once all rules that share their windows are judged."""
    for name in sorted({rule.presence.feature_id for rule in rules if rule.presence is not None}):
        state.table(name).forget_due(watermark)


@dataclass
class _OpenKey:
    """A key with open windows. stored: the values of the group_by fields; until: the watermark that closes the last window."""

    stored: list[Any]
    until: int

    @classmethod
    def from_value(cls, value: Mapping[str, Any]) -> _OpenKey:
        """Reads what `to_value` wrote."""
        return cls(value["key"], value["until"])

    def to_value(self) -> dict[str, Any]:
        """Returns plain values, as a keyed table stores them."""
        return {"key": self.stored, "until": self.until}


@dataclass(frozen=True)
class _Results:
    """Windows to be judged, one per row: their keys and starts, and the event up to which each result counts.

    commit_indexes, phases, causes: the order of the results (see segment.Order).
    """

    keys: Keys
    starts: Int64s
    positions: Int64s
    commit_indexes: Int64s
    phases: Int64s
    causes: Int64s

    def take(self, at: Int64s) -> _Results:
        """Returns the results at these positions."""
        columns = (self.starts, self.positions, self.commit_indexes, self.phases, self.causes)
        return _Results(self.keys.take(at), *(column[at] for column in columns))

    def join(self, other: _Results) -> _Results:
        """Returns these results and then the other ones."""
        names = ("starts", "positions", "commit_indexes", "phases", "causes")
        columns = (np.concatenate([getattr(self, name), getattr(other, name)]) for name in names)
        return _Results(_join_keys([self.keys, other.keys]), *columns)

    def orders(self) -> list[Order]:
        """Returns the order of each result; windows that one event brings are ordered by their starts."""
        columns = (self.commit_indexes, self.phases, self.causes, self.starts)
        return list(map(Order._make, zip(*(column.tolist() for column in columns), strict=True)))


class _Judge:
    def __init__(self, rule_run: RuleRun) -> None:
        assert isinstance(rule_run.spec.window, TiledWindow)
        assert rule_run.rule.presence is not None
        self._rule_run, self._tiles, self._presence = rule_run, rule_run.spec.window, rule_run.rule.presence
        self._lateness = rule_run.rule.allowed_lateness
        # An `_OpenKey` per key.
        self._open_keys = rule_run.state.table(self._presence.feature_id)
        # Per key the memories of its windows, by start (see `verdicts.read_memories`).
        self._memories = rule_run.state.table(rule_run.rule.memory)

    def run(self) -> None:
        """Judges the windows that events or the watermark change in the segment."""
        rule_run = self._rule_run
        taken = rule_run.wanted & rule_run.find_in_time(self._tiles)
        judged = taken if rule_run.is_evaluated else np.zeros(len(taken), dtype=bool)
        rule_run.record_judged(rule_run.wanted, taken, judged)
        self._remember_keys(taken)
        if rule_run.is_evaluated:
            rule_run.failed |= taken & rule_run.find_errors(rule_run.events)
            rule_run.count_failed_events(rule_run.failed)
            self._judge(self._find_updated(taken).join(self._find_ended(taken)))
        self._memories.forget_due(rule_run.timeline.end)

    def _remember_keys(self, taken: Mask) -> None:
        """Keeps the values of the keys for as long as one of their windows can give a result."""
        rule_run, tiles = self._rule_run, self._tiles
        for key, positions in rule_run.group_by_key(taken):
            value = self._open_keys.get(key)
            last = int(rule_run.events.times[positions].max())
            until = tiles.last_start(last) + tiles.size + self._lateness
            if value is None:
                known = _OpenKey(rule_run.stored_key(int(positions[0])), until)
            else:
                known = _OpenKey.from_value(value)
                if known.until >= until:
                    continue
                known.until = until
            self._open_keys.put(key, known.to_value(), until)

    def _find_updated(self, taken: Mask) -> _Results:
        """Finds the results that events bring: to windows that have ended, and with `early` to those that have not."""
        rule_run, tiles, is_early = self._rule_run, self._tiles, self._rule_run.spec.early
        positions = np.flatnonzero(taken if is_early else taken & rule_run.is_late)
        times, watermarks = rule_run.events.times[positions], rule_run.watermarks[positions]
        covering: list[tuple[Int64s, Int64s]] = []
        for start in self._covering_starts(times):
            end = start + tiles.size
            is_updated = (end > times) & (end + self._lateness > watermarks)
            if not is_early:
                is_updated &= end <= watermarks
            covering.append((positions[is_updated], start[is_updated]))
        at = np.concatenate([position for position, _ in covering]).astype(np.int64)
        starts = np.concatenate([start for _, start in covering]).astype(np.int64)
        return _Results(
            rule_run.grouping.keys.take(at), starts, at, rule_run.commit_indexes[at], np.full_like(at, BY_EVENT), at
        )

    def _find_ended(self, taken: Mask) -> _Results:
        """Finds the results that the watermark brings when it passes the ends of windows."""
        rule_run, tiles, timeline = self._rule_run, self._tiles, self._rule_run.timeline
        passed = tiles.find_ends(timeline.start, timeline.end)
        if not passed:
            nothing: Int64s = np.zeros(0, dtype=np.int64)
            return _Results(rule_run.grouping.keys.take(nothing), nothing, nothing, nothing, nothing, nothing)
        keys, times = self._find_rows(taken, passed[0] - tiles.size)
        numbers, distinct = number_keys(keys)
        windows: list[tuple[Int64s, Int64s]] = []
        if len(passed) < tiles.windows_per_time:
            for each in passed:
                covered = numbers[(each - tiles.size <= times) & (times < each)]
                windows.append(_find_distinct(covered, np.full_like(covered, each - tiles.size)))
        else:
            for start in self._covering_starts(times):
                end = start + tiles.size
                is_ended = (end > times) & (end > timeline.start) & (end <= timeline.end)
                windows.append(_find_distinct(numbers[is_ended], start[is_ended]))
        number, starts = _find_distinct(*(np.concatenate(column) for column in zip(*windows, strict=True)))
        ends = starts + tiles.size
        commit_indexes = timeline.find_passing(ends)
        # All events of the commit count, and of those before it.
        last = np.searchsorted(rule_run.events.commits, timeline.commits[commit_indexes], side="right") - 1
        return _Results(
            distinct.take(number), starts, last.astype(np.int64), commit_indexes,
            np.full_like(commit_indexes, BY_WATERMARK), ends,
        )  # fmt: skip

    def _find_rows(self, taken: Mask, earliest: int) -> tuple[Keys, Int64s]:
        """Finds keys and times of the events, and of the stored rows from `earliest` on."""
        rule_run = self._rule_run
        positions = np.flatnonzero(taken)
        keys, times = [rule_run.grouping.keys.take(positions)], [rule_run.events.times[positions]]
        for stored in rule_run.state.features[self._presence.feature_id].runs:
            if stored.last_time >= earliest:
                run = rule_run.state.load_run(stored)
                at = np.flatnonzero(run.times >= earliest)
                keys.append(run.keys.take(run.groups[at]))
                times.append(run.times[at])
        return _join_keys(keys), np.concatenate(times)

    def _covering_starts(self, times: Int64s) -> Iterator[Int64s]:
        """Yields the starts of the windows that may cover each time, from the last window on.

        Where the slide does not divide the size, the last one may end before the time.
        """
        start = self._tiles.last_start(times)
        for _ in range(self._tiles.windows_per_time):
            yield start
            start = start - self._tiles.slide

    def _judge(self, results: _Results) -> None:
        """Measures all results of the segment at once and writes them in order."""
        rule_run, measuring = self._rule_run, self._rule_run.measuring
        if not len(results.starts):
            return
        has_events = measuring.measure(self._presence, results.keys, self._queries(results)).values > 0
        results = results.take(np.flatnonzero(has_events))
        starts, queries = results.starts, self._queries(results)
        columns: dict[str, Column] = {}
        is_complete = rule_run.find_complete(self._presence.feature_id, starts)
        for measure in rule_run.rule.measures:
            columns[measure.name] = measuring.measure(measure.feature, results.keys, queries)
            is_complete &= rule_run.find_complete(measure.feature.feature_id, starts)
        keys = list(zip(results.keys.low.tolist(), results.keys.high.tolist(), strict=True))
        key_columns = rule_run.key_columns(self._stored_key(key) for key in keys)
        holds, errors = rule_run.check_condition({**columns, **key_columns}, is_complete)
        effective = rule_run.find_effective(starts + self._tiles.size)
        # A key without alerts has nothing to retract.
        alerting = {keys[row] for row in np.flatnonzero(holds & effective).tolist()}
        alerting |= {key for key in set(keys) if self._memories.get(key)}
        has_alerts = np.fromiter((key in alerting for key in keys), dtype=bool, count=len(keys))
        shown = np.flatnonzero(effective & (errors | has_alerts))
        orders = results.take(shown).orders()
        for at in sorted(range(len(shown)), key=orders.__getitem__):
            row, start = int(shown[at]), int(starts[shown[at]])
            if errors[row]:
                arrival = rule_run.arrival_of(orders[at])
                rule_run.count_failure(arrival, start, f"the window of {to_text(to_utc(start))}")
                continue
            measures = {measure.name: columns[measure.name].item(row) for measure in rule_run.rule.measures}
            self._write(orders[at], keys[row], start, bool(holds[row]), measures, bool(is_complete[row]))

    def _queries(self, results: _Results) -> Queries:
        numbers = find_keys(results.keys, self._rule_run.grouping.distinct)
        return Queries(numbers, results.positions, results.starts, results.starts + self._tiles.size - 1)

    def _write(
        self, order: Order, key: Key, start: int, holds: bool, measures: dict[str, Any], is_complete: bool
    ) -> None:
        """Writes the row of a window, if its verdict or its measures have changed."""
        rule_run, span = self._rule_run, self._tiles.size + self._lateness
        # Windows that are closed by now are forgotten.
        memories = read_memories(Memory, self._memories.get(key), after=rule_run.watermark_before(order) - span)
        values, end = rule_run.key_values(self._stored_key(key)), start + self._tiles.size
        subject = Subject(texts_of(values), key, None, end, start, end)
        memory, verdict = rule_run.writer.revise(memories.get(start), subject, holds, texts_of(measures))
        if verdict is None or memory is None:
            return
        memories[start] = memory
        self._memories.put(key, memories_value(memories), max(memories) + span)
        rule_run.write_alert(order, subject, verdict, memory.revision, measures, is_complete, values)

    def _stored_key(self, key: Key) -> list[Any]:
        """Returns the stored values of a key's fields."""
        value = self._open_keys.get(key)
        assert value is not None
        return _OpenKey.from_value(value).stored


def _join_keys(parts: Iterable[Keys]) -> Keys:
    listed = list(parts)
    return Keys(np.concatenate([keys.low for keys in listed]), np.concatenate([keys.high for keys in listed]))


def _find_distinct(numbers: Int64s, starts: Int64s) -> tuple[Int64s, Int64s]:
    """Returns the distinct pairs, sorted."""
    order = np.lexsort((starts, numbers))
    numbers, starts = numbers[order], starts[order]
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = (numbers[1:] != numbers[:-1]) | (starts[1:] != starts[:-1])
    return numbers[is_first], starts[is_first]

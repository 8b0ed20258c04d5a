"""Judges tumbling and sliding windows: when the watermark passes their end, and again for each late event.

Tumbling windows of 10 minutes that count events, which are up to 5 minutes out of order:

    event        10:03    10:08    10:16    10:09    10:26    in order of arrival
    watermark     9:58    10:03    10:11    10:11    10:21    after each
    10:00-10:10      1        2       2!       3!             judged when W is 10:11, and again for 10:09, which is late
    10:10-10:20                        1                1!    judged when W is 10:21

A window is judged when the watermark passes its end and whenever a later event arrives in it; with `early`, earlier
events count as well. Adjacent windows with the same events are judged once (`WindowResults`). Only windows that can get a
row of alerts are processed one by one (`_RuleJudge`). Rules with the same windows share everything but their measures and
conditions.

State: runs hold the rows of each measure and of the rule's `presence` feature, which shows which windows have events.
Keyed tables hold the keys of a grouping with open windows (`OpenKeys`) and the last verdict on each window
(`verdicts.Memory`).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lookback.core.judging.rulerun import RuleRun
from lookback.core.judging.segment import Order
from lookback.core.judging.tiledwindows import OpenKeys, SegmentWindows, WindowResults
from lookback.core.judging.verdicts import Judgement, Memory, Subject, Verdicts, memories_value, read_memories
from lookback.core.state.keyed import Key
from lookback.core.values.columns import Column, Mask, to_text, to_texts
from lookback.core.values.keys import Int64s, Keys, list_between, list_ranges
from lookback.core.values.times import NEVER_DUE, to_utc
from lookback.core.values.windows import TiledWindow


@dataclass(eq=False)
class TiledJudge:
    """Judges the rules of a segment with tumbling or sliding windows; rules with the same windows share them."""

    _open_keys: dict[str, OpenKeys] = field(default_factory=dict)
    # The windows judged last, by the id of their presence feature. Rules that share them are judged one after another.
    _windows: dict[str, SegmentWindows] = field(default_factory=dict)

    def judge(self, rule_run: RuleRun) -> None:
        """Judges the windows of a segment by one rule."""
        rule, tiles = rule_run.rule, rule_run.spec.window
        assert isinstance(tiles, TiledWindow)
        assert rule.presence is not None
        if rule.open_keys not in self._open_keys:
            self._open_keys[rule.open_keys] = OpenKeys(rule_run)
        presence_id = rule.presence.feature_id
        if presence_id not in self._windows:
            self._windows = {
                presence_id: SegmentWindows(rule_run, tiles, rule.presence, self._open_keys[rule.open_keys])
            }
        _RuleJudge(rule_run, self._windows[presence_id]).run()

    def finish(self) -> None:
        """Keeps the keys with open windows and drops closed ones; call it when all rules of the segment are judged."""
        for _, open_keys in sorted(self._open_keys.items()):
            open_keys.finish()


@dataclass(frozen=True)
class _Row:
    """A window as of an event or a watermark, which may get a row of alerts."""

    order: Order
    key: Key
    number: int
    judgement: Judgement


class _RuleJudge:
    """Judges one rule over the windows of a segment, and writes rows once all results are known."""

    def __init__(self, rule_run: RuleRun, windows: SegmentWindows) -> None:
        self._rule_run, self._windows, self._open_keys = rule_run, windows, windows.open_keys
        self._tiles, self._end = windows.tiles, rule_run.timeline.end
        self._span = self._tiles.size + rule_run.rule.allowed_lateness
        # By key, the memories of its windows, by start (see `verdicts.read_memories`).
        self._table = rule_run.state.table(rule_run.rule.memory)
        self._memories: dict[Key, dict[int, Memory]] = {}
        self._changed: set[Key] = set()
        self._values: dict[Key, tuple[dict[str, Any], dict[str, str | None]]] = {}
        self._rows: list[_Row] = []
        # The windows for which the condition held: keys and starts.
        self._held: list[tuple[Keys, Int64s]] = []

    def run(self) -> None:
        """Judges the windows that events or the watermark change in the segment."""
        rule_run = self._rule_run
        rule_run.count_taken(self._windows.taken)
        if rule_run.is_evaluated:
            for name, results in self._windows.list_results(rule_run):
                self._judge(name, results)
        self._write_rows()

    def _judge(self, name: Hashable, results: WindowResults) -> None:
        """Measures results and lists the rows that they may get."""
        rule_run, windows, keys = self._rule_run, self._windows, results.result_keys
        known_as = (windows.tiles, (windows.presence.feature_id, name))
        columns = {
            measure.name: rule_run.measuring.measure(measure.feature, keys, results.queries, known_as)
            for measure in rule_run.rule.measures
        }
        is_complete = rule_run.find_complete(results.first_starts)
        ends = results.first_starts + windows.tiles.size
        holds, errors = rule_run.check_condition({**columns, **self._key_columns(results)}, is_complete, ends)
        self._add(results, Verdicts(columns, is_complete, holds, errors))

    def _key_columns(self, results: WindowResults) -> dict[str, Column]:
        """Returns the entries of the key that the condition reads, for each result."""
        rule = self._rule_run.rule
        if rule.when is None or rule.when.named.isdisjoint(rule.key_names):
            return {}
        used, keys = results.used_groups, results.keys.take(results.used_groups)
        numbered = zip(keys.list_pairs(), results.numbers[used].tolist(), strict=True)
        columns = self._rule_run.key_columns([self._open_keys.find_stored_key(key, number) for key, number in numbered])
        ranks = np.searchsorted(used, results.groups[results.firsts])
        return {name: column.take(ranks) for name, column in columns.items()}

    def _add(self, results: WindowResults, verdicts: Verdicts) -> None:
        """Adds the results that can get a row: the condition holds now, or it held the last time the window was judged.

        Add the results of the watermark first, because later events revise them.
        """
        is_watched = self._find_watched(results)
        if not (verdicts.holds.any() or verdicts.errors.any() or is_watched.any()):
            return
        is_effective = self._rule_run.find_effective(results.starts + self._tiles.size)
        if verdicts.errors.any():
            self._count_failures(results, np.flatnonzero(verdicts.errors), is_effective)
        firsts, may_get = results.firsts[verdicts.holds], is_watched.copy()
        may_get[list_between(firsts, firsts + results.counts[verdicts.holds] - 1)] = True
        at, windows = _list_marked(results, np.flatnonzero(~verdicts.errors), may_get & is_effective)
        order = np.lexsort((results.causes[at], results.phases[at], results.commit_indexes[at], windows))
        at, windows = at[order], windows[order]
        holds = verdicts.holds[at]
        # If the condition did not hold before, there is nothing to retract.
        before = is_watched[windows]
        before[1:] = np.where(windows[1:] == windows[:-1], holds[:-1], before[1:])
        self._list_rows(results, verdicts, at[holds | before], windows[holds | before])
        held = np.unique(windows[holds])
        self._held.append((results.keys.take(results.groups[held]), results.starts[held]))

    def _find_watched(self, results: WindowResults) -> Mask:
        """Marks the windows whose condition held the last time they were judged."""
        mask = np.zeros(len(results.starts), dtype=bool)
        if not self._table.is_empty:
            keys = results.keys.take(results.used_groups)
            keys = keys.take(self._table.may_have(keys))
            remembered = [
                (*key, start)
                for key in keys.list_pairs()
                for start, memory in self._open_memories(key).items()
                if memory.holds
            ]
            columns = np.array(remembered, dtype=np.int64).reshape(-1, 3).T
            mask |= results.mark_windows(Keys(columns[0], columns[1]), columns[2])
        for keys, starts in self._held:
            mask |= results.mark_windows(keys, starts)
        return mask

    def _open_memories(self, key: Key) -> dict[int, Memory]:
        if key not in self._memories:
            self._memories[key] = read_memories(Memory, self._table.get(key), after=-NEVER_DUE)
        return self._memories[key]

    def _count_failures(self, results: WindowResults, failed: Int64s, is_effective: Mask) -> None:
        """Counts the windows whose results have an error."""
        at, windows = _list_marked(results, failed, is_effective)
        if len(at):
            first = np.lexsort((results.starts[windows], results.commit_indexes[at]))[0]
            start = int(results.starts[windows[first]])
            rule_run = self._rule_run
            commit = int(rule_run.timeline.commits[results.commit_indexes[at[first]]])
            rule_run.count_failure(commit, start, f"the window of {to_text(to_utc(start))}", len(at))

    def _list_rows(self, results: WindowResults, verdicts: Verdicts, at: Int64s, windows: Int64s) -> None:
        """Lists the rows of these results and windows, converting whole columns and each result only once."""
        distinct, ranks = np.unique(at, return_inverse=True)
        columns = {name: column.take(distinct).to_list() for name, column in verdicts.columns.items()}
        measures = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        flags = zip(verdicts.holds[distinct].tolist(), verdicts.is_complete[distinct].tolist(), measures, strict=True)
        judgements = [Judgement(holds, each, to_texts(each), is_complete) for holds, is_complete, each in flags]
        groups, starts = results.groups[windows], results.starts[windows].tolist()
        keys = results.keys.take(groups)
        pairs, numbers = keys.list_pairs(), results.numbers[groups].tolist()
        places = (column[at].tolist() for column in (results.commit_indexes, results.phases, results.causes))
        orders = map(Order, *places, starts)
        for order, key, number, rank in zip(orders, pairs, numbers, ranks.tolist(), strict=True):
            self._rows.append(_Row(order, key, number, judgements[rank]))

    def _write_rows(self) -> None:
        """Writes all rows in order, and keeps the memories of their windows."""
        for row in sorted(self._rows, key=lambda row: row.order):
            self._write(row)
        for key in self._changed:
            # Drop the memories of windows that are closed by now.
            memories = {
                start: memory for start, memory in self._memories[key].items() if start + self._span > self._end
            }
            self._table.put(key, memories_value(memories) if memories else None, max(memories, default=0) + self._span)
        self._table.forget_due(self._end)

    def _write(self, row: _Row) -> None:
        """Writes the row of a window if its verdict or its measures have changed."""
        rule_run, start, memories = self._rule_run, row.order.rank, self._open_memories(row.key)
        if row.key not in self._values:
            values = rule_run.key_values(self._open_keys.find_stored_key(row.key, row.number))
            self._values[row.key] = values, to_texts(values)
        values, texts = self._values[row.key]
        end = start + self._tiles.size
        subject = Subject(texts, row.key, None, end, start, end)
        memory = rule_run.writer.revise(row.order, memories.get(start), subject, row.judgement, values)
        if memory is not None:
            memories[start] = memory
            self._changed.add(row.key)


def _list_marked(results: WindowResults, at: Int64s, is_marked: Mask) -> tuple[Int64s, Int64s]:
    """Lists the marked windows of the results at these positions, as positions of results and of windows."""
    before, marked = np.concatenate(([0], np.cumsum(is_marked))), np.flatnonzero(is_marked)
    first, beyond = before[results.firsts[at]], before[(results.firsts + results.counts)[at]]
    return np.repeat(at, beyond - first), marked[list_ranges(first, beyond - first)]

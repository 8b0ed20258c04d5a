"""Finds the tumbling and sliding windows of a segment to judge, and the keys with open ones."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from lookback.core.aggregation.grouping import Queries
from lookback.core.judging.rulerun import RuleRun
from lookback.core.rules.compiled import Feature
from lookback.core.state.keyed import Key
from lookback.core.streams.alerts import BY_EVENT, BY_WATERMARK
from lookback.core.values.columns import Mask
from lookback.core.values.keys import Int64s, Keys, TimeSearch, find_keys, list_ranges, number_keys
from lookback.core.values.times import NEVER_DUE
from lookback.core.values.windows import TiledWindow

# The number of windows to judge at once, to bound memory.
_MAX_WINDOWS = 2**18
# A key with open windows is kept for a quarter longer than needed, so that it is written less often.
_SPARE = 4


class OpenKeys:
    """The keys of a grouping with open windows of any rule.

    For each key the table has the values of its fields, and as its wake a watermark that closes all its windows.
    """

    def __init__(self, rule_run: RuleRun) -> None:
        self._rule_run, self._grouping = rule_run, rule_run.grouping
        self._table = rule_run.state.table(rule_run.rule.open_keys)
        self._untils = np.full(len(self._grouping.distinct), -NEVER_DUE)

    def keep_until(self, watermarks: Int64s) -> None:
        """Extends how long each key of the grouping is kept, up to these watermarks."""
        self._untils = np.maximum(self._untils, watermarks)

    def find_stored_key(self, key: Key, number: int) -> list[Any]:
        """Returns the stored values of a key's fields; `number` is the key's in the grouping, -1 if it has none."""
        if number >= 0:
            return self._rule_run.list_stored_keys(self._grouping.first_positions[number : number + 1])[0]
        value = self._table.get(key)
        assert value is not None
        stored: list[Any] = value["key"]
        return stored

    def finish(self) -> None:
        """Keeps the keys with open windows at the end of the segment, and drops closed ones."""
        rule_run, grouping = self._rule_run, self._grouping
        end, events = rule_run.timeline.end, rule_run.events
        numbers = np.flatnonzero(self._untils > end)
        keys, positions = grouping.distinct.take(numbers), grouping.first_positions[numbers]
        columns = [events.key_column(name).to_stored_list(positions) for name in rule_run.rule.group_by]
        pairs = keys.list_pairs()
        for row, (key, until) in enumerate(zip(pairs, self._untils[numbers].tolist(), strict=True)):
            if self._table.find_wake(key) < until:
                # Keeping the key longer than needed avoids writing it again for every event.
                wake = until + (until - end) // _SPARE
                self._table.put(key, {"key": [column[row] for column in columns]}, wake)
        self._table.forget_due(end)


@dataclass(frozen=True)
class WindowResults:
    """Windows to judge, each as of an event or a watermark.

    A result covers `counts` adjacent windows from the position `firsts`. Windows are sorted by group and start.

    Attributes:
        keys: The distinct keys.
        numbers: The number of each key in the grouping; -1 without events in the batch.
        groups: The position of each window's key in `keys`.
        starts: The start of each window.
        firsts: The position of the first window of each result.
        counts: The number of windows of each result.
        queries: The first window of each result.
        commit_indexes: See `segment.Order`.
        phases: See `segment.Order`.
        causes: See `segment.Order`.
    """

    keys: Keys
    numbers: Int64s
    groups: Int64s
    starts: Int64s
    firsts: Int64s
    counts: Int64s
    queries: Queries
    commit_indexes: Int64s
    phases: Int64s
    causes: Int64s

    def take(self, at: Int64s) -> WindowResults:
        """Returns the results at these positions."""
        return replace(
            self,
            firsts=self.firsts[at],
            counts=self.counts[at],
            queries=self.queries.take(at),
            commit_indexes=self.commit_indexes[at],
            phases=self.phases[at],
            causes=self.causes[at],
        )

    @cached_property
    def first_starts(self) -> Int64s:
        """The start of the first window of each result."""
        return self.starts[self.firsts]

    @cached_property
    def result_keys(self) -> Keys | None:
        """The key of each result; None if all have events in the batch."""
        return None if self.queries.windows is not None else self.keys.take(self.groups[self.firsts])

    @cached_property
    def used_groups(self) -> Int64s:
        """The positions of the keys with windows."""
        is_used = np.zeros(len(self.keys), dtype=bool)
        is_used[self.groups] = True
        return np.flatnonzero(is_used)

    @cached_property
    def _search(self) -> TimeSearch:
        return TimeSearch(self.groups, self.starts)

    def mark_windows(self, keys: Keys, starts: Int64s) -> Mask:
        """Marks the windows with one of these pairs of key and start."""
        groups = find_keys(keys, self.keys)
        groups, starts = groups[groups >= 0], starts[groups >= 0]
        at = np.minimum(self._search.find_first(groups, starts), len(self.starts) - 1)
        mask = np.zeros(len(self.starts), dtype=bool)
        mask[at[(self.groups[at] == groups) & (self.starts[at] == starts)]] = True
        return mask


class SegmentWindows:
    """Finds the windows of a segment to judge, for all rules with the same windows; `taken` marks their events."""

    def __init__(self, rule_run: RuleRun, tiles: TiledWindow, presence: Feature, open_keys: OpenKeys) -> None:
        self.tiles, self.presence, self.open_keys = tiles, presence, open_keys
        self._rule_run, self._measuring, self._grouping = rule_run, rule_run.measuring, rule_run.grouping
        self._lateness = rule_run.rule.allowed_lateness
        self.taken = self._measuring.select_rows(presence).selected
        open_keys.keep_until(self._find_last_ends())
        self._arrivals: dict[bool, list[_Arrivals]] = {}
        # The last results of events, with their name.
        self._updated: tuple[Hashable, WindowResults | None] = None, None

    def _find_last_ends(self) -> Int64s:
        """Returns for each key of the grouping the watermark that closes its last window."""
        grouping, taken = self._grouping, self.taken
        last = np.full(len(grouping.distinct), -NEVER_DUE)
        np.maximum.at(last, grouping.numbers[taken], self._rule_run.events.times[taken])
        return self.tiles.last_start(last) + self.tiles.size + self._lateness

    def list_results(self, rule_run: RuleRun) -> Iterator[tuple[Hashable, WindowResults]]:
        """Yields the results caused by the watermark, then those caused by events, with names that rules may share."""
        if self.ended is not None:
            yield self.ended
        is_early = rule_run.spec.early
        if is_early not in self._arrivals:
            self._arrivals[is_early] = self._find_arrivals(is_early)
        when = rule_run.rule.when
        # The contents of a list depend on the end of the window.
        is_apart = when is not None and bool(when.memberships)
        for part, arrivals in enumerate(self._arrivals[is_early]):
            name = (is_early, part, rule_run.complete_from, is_apart)
            if self._updated[0] != name:
                self._updated = name, self._find_updated(arrivals, rule_run.complete_from, is_apart=is_apart)
            _, results = self._updated
            assert results is not None
            yield name, results

    @cached_property
    def ended(self) -> tuple[str, WindowResults] | None:
        """The windows with events whose ends the watermark passes, with their name; None without such windows."""
        rule_run, tiles, timeline = self._rule_run, self.tiles, self._rule_run.timeline
        passed = tiles.find_ends(timeline.start, timeline.end)
        parts = list(self._list_ended(passed)) if passed else []
        if not parts:
            return None
        each, starts = (Keys.concat(keys for keys, _ in parts), np.concatenate([starts for _, starts in parts]))
        groups, keys = number_keys(each)
        groups, starts = _find_distinct(groups, starts)
        ends, numbers = starts + tiles.size, find_keys(keys, self._grouping.distinct)
        commit_indexes = timeline.find_passing(ends)
        # All events up to the end of the commit count.
        last = np.searchsorted(rule_run.events.commits, timeline.commits[commit_indexes], side="right") - 1
        queries = Queries(numbers[groups], last.astype(np.int64), starts, ends - 1)
        # Nearly all windows have events. Then rules that count events can reuse these counts.
        known_as = (tiles, (self.presence.feature_id, "passed"))
        has_events = self._measuring.measure(self.presence, keys.take(groups), queries, known_as).values > 0
        firsts, ones = np.arange(len(starts), dtype=np.int64), np.ones(len(starts), dtype=np.int64)
        phases = np.full_like(commit_indexes, BY_WATERMARK)
        results = WindowResults(keys, numbers, groups, starts, firsts, ones, queries, commit_indexes, phases, ends)
        if has_events.all():
            return "passed", results
        return ("ended", results.take(np.flatnonzero(has_events))) if has_events.any() else None

    def _list_ended(self, passed: range) -> Iterator[tuple[Keys, Int64s]]:
        """Yields the keys and starts of the windows with events or stored rows and one of these ends."""
        rule_run, grouping, size = self._rule_run, self._grouping, self.tiles.size
        first, last = passed[0] - size, passed[-1] - 1
        positions = grouping.sorted[self.taken[grouping.sorted]]
        yield self._list_covering(
            grouping.distinct, grouping.numbers[positions], rule_run.events.times[positions], passed
        )
        presence = self.presence
        for _, run in rule_run.state.windows.find_rows(presence.feature_id, first, last):
            if len(passed) * len(run.keys) > len(run):
                yield self._list_covering(run.keys, *run.list_rows(), passed)
                continue
            every = np.arange(len(run.keys), dtype=np.int64)
            for end in passed:
                low, high = run.find_ranges(every, np.full_like(every, end - size), np.full_like(every, end - 1))
                groups = np.flatnonzero(low < high)
                yield run.keys.take(groups), np.full(len(groups), end - size)

    def _list_covering(self, keys: Keys, groups: Int64s, times: Int64s, passed: range) -> tuple[Keys, Int64s]:
        """Returns the windows with one of these ends that cover rows sorted by group and time."""
        tiles, first, last = self.tiles, passed[0] - self.tiles.size, passed[-1] - self.tiles.size
        at = np.flatnonzero((times >= first) & (times < passed[-1]))
        lows = np.maximum(self._find_first_starts(times[at]), first)
        highs = np.minimum(tiles.last_start(times[at]), last)
        at_groups, starts = _list_windows(groups[at], lows, highs, tiles.slide)
        return keys.take(at_groups), starts

    def _find_first_starts(self, times: Int64s) -> Int64s:
        """Returns the start of the first window that ends after each time."""
        return self.tiles.last_start(times - self.tiles.size) + self.tiles.slide

    def _find_arrivals(self, is_early: bool) -> list[_Arrivals]:
        """Finds the windows that each event updates: those that have ended, and with `early` also open ones.

        Each part has a bounded number of windows.
        """
        rule_run, tiles = self._rule_run, self.tiles
        positions = np.flatnonzero(self.taken if is_early else self.taken & rule_run.is_late)
        times, watermarks = rule_run.events.times[positions], rule_run.watermarks[positions]
        # A window is closed once its end is at or below the watermark minus the allowed lateness.
        first = np.maximum(self._find_first_starts(times), self._find_first_starts(watermarks - self._lateness))
        last = tiles.last_start(times)
        if not is_early:
            last = np.minimum(last, tiles.last_start(watermarks - tiles.size))
        counts = np.maximum(0, (last - first) // tiles.slide + 1)
        order = np.flatnonzero(counts)
        order = order[np.argsort(self._grouping.numbers[positions[order]], kind="stable")]
        full = (np.cumsum(counts[order]) - 1) // _MAX_WINDOWS
        # An event with more windows than fit into a part gets a part with all its windows.
        cuts = np.flatnonzero(np.diff(full)) + 1
        parts = zip(*(np.split(each[order], cuts) for each in (positions, first, last)), strict=True)
        return [_Arrivals(*part) for part in parts] if len(order) else []

    def _find_updated(self, arrivals: _Arrivals, complete_from: int | None, *, is_apart: bool) -> WindowResults:
        """Finds the results that events cause.

        Windows that start before `complete_from` are not complete. With `is_apart`, each window has its own results;
        otherwise windows with the same rows share them.
        """
        rule_run, slide, grouping = self._rule_run, self.tiles.slide, self._grouping
        numbers = grouping.numbers[arrivals.positions]
        order = np.lexsort((arrivals.first, numbers))
        groups, starts = _list_windows(numbers[order], arrivals.first[order], arrivals.last[order], slide)
        windows = self._make_queries(groups, starts)
        is_alike = self._measuring.has_same_rows(self.presence, windows)
        is_alike[0] = False
        if is_apart:
            is_alike[:] = False
        is_alike[1:] &= (groups[1:] == groups[:-1]) & (starts[1:] == starts[:-1] + slide)
        if complete_from is not None:
            is_alike[1:] &= (starts[1:] < complete_from) == (starts[:-1] < complete_from)
        classes, class_firsts = np.cumsum(~is_alike) - 1, np.flatnonzero(~is_alike)
        first = TimeSearch(groups, starts).find_first(numbers, arrivals.first)
        last = first + (arrivals.last - arrivals.first) // slide
        counts = classes[last] - classes[first] + 1
        rows, class_of = np.repeat(np.arange(len(numbers)), counts), list_ranges(classes[first], counts)
        firsts = np.maximum(class_firsts[class_of], first[rows])
        beyond = np.minimum(np.append(class_firsts[1:], len(groups))[class_of], last[rows] + 1)
        at = arrivals.positions[rows]
        queries = self._make_queries(groups[class_firsts[class_of]], starts[class_firsts[class_of]], at)
        queries.windows, queries.window_of = windows.take(class_firsts), class_of
        every = np.arange(len(grouping.distinct), dtype=np.int64)
        return WindowResults(
            keys=grouping.distinct,
            numbers=every,
            groups=groups,
            starts=starts,
            firsts=firsts,
            counts=beyond - firsts,
            queries=queries,
            commit_indexes=rule_run.commit_indexes[at],
            phases=np.full_like(at, BY_EVENT),
            causes=at,
        )

    def _make_queries(self, numbers: Int64s, starts: Int64s, positions: Int64s | None = None) -> Queries:
        return Queries(numbers, starts if positions is None else positions, starts, starts + self.tiles.size - 1)


@dataclass(frozen=True)
class _Arrivals:
    """Events that update windows, sorted by key and arrival.

    Attributes:
        positions: The positions of the events.
        first: The start of the first window of each event.
        last: The start of the last window of each event.
    """

    positions: Int64s
    first: Int64s
    last: Int64s


def _find_distinct(numbers: Int64s, starts: Int64s) -> tuple[Int64s, Int64s]:
    """Returns the distinct pairs, sorted."""
    order = np.lexsort((starts, numbers))
    numbers, starts = numbers[order], starts[order]
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = (numbers[1:] != numbers[:-1]) | (starts[1:] != starts[:-1])
    return numbers[is_first], starts[is_first]


def _list_windows(groups: Int64s, first: Int64s, last: Int64s, slide: int) -> tuple[Int64s, Int64s]:
    """Lists the windows that start from `first` to `last`, each once, as groups and starts in ascending order.

    The ranges must be sorted by group and first; a range with first > last is empty.
    """
    if not len(groups):
        return groups, first
    ends, ranks = np.unique(last, return_inverse=True)
    # The last start of all ranges of the group so far. The offset per group lets one pass serve all groups.
    highest = ends[np.maximum.accumulate(groups * len(ends) + ranks) % len(ends)]
    first = first.copy()
    is_same = groups[1:] == groups[:-1]
    first[1:] = np.where(is_same, np.maximum(first[1:], highest[:-1] + slide), first[1:])
    counts = np.maximum(0, (last - first) // slide + 1)
    steps = list_ranges(np.zeros_like(counts), counts)
    return np.repeat(groups, counts), np.repeat(first, counts) + steps * slide

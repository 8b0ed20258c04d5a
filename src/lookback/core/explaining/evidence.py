"""Defines the history of a key from which an alert is explained, and the explanation itself."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from lookback.core.expressions.compiling import Expression, Membership
from lookback.core.rules.compiled import CompiledRule
from lookback.core.streams.alerts import BY_EVENT, AlertOrder
from lookback.core.streams.arrival import arrival_number, split_future
from lookback.core.streams.declaration import Stream
from lookback.core.streams.declarations import Declarations
from lookback.core.streams.eventrows import read_events
from lookback.core.streams.events import Events
from lookback.core.streams.watermarks import Mark, Reached, pass_marks
from lookback.core.values.columns import Column, Mask, to_text
from lookback.core.values.keys import Int64s
from lookback.core.values.lists import KnownLists, Lists, ListSource
from lookback.core.values.times import NEVER, parse_time
from lookback.core.values.windows import LOOKBACK

# Stands in for the deleting commit of an event that has not been deleted.
NOT_DELETED = 2**62
# A picture of more events would be unreadable.
MAX_EVENTS = 500


@dataclass(frozen=True)
class Activation:
    """A change of the rules in force.

    If a new declaration of the stream allows more lateness and so changes a rule, the rule is activated again.

    Attributes:
        arrival: The commit after which it took effect; None for before the first.
        rule_id: `*` if all state was cleared. Another version of the explained rule has a name of its own here.
        rule: The rule in force from then on; None if it keeps no state. Another version has another lane.
        advances: How many of the clock's advances took effect before it; some may name the same commit.
        is_silent: Whether the rule only keeps state from then on and raises no alert.
    """

    arrival: int | None
    rule_id: str
    rule: CompiledRule | None
    advances: int = 0
    is_silent: bool = False


@dataclass(frozen=True)
class Clock:
    """The commits and commands that move the watermark of a stream. Times are in microseconds.

    Attributes:
        declarations: The declarations by which the stream was judged.
        highs: commit -> its mark. Commits that do not move the watermark may be left out.
        advances: (arrival, time) of the `advance` commands, in the order they took effect.
    """

    declarations: Declarations
    highs: Mapping[int, Mark]
    advances: Sequence[tuple[int | None, int]] = ()

    @property
    def stream(self) -> Stream:
        """The stream's latest declaration."""
        return self.declarations.last

    def advances_until(self, commit: int) -> list[tuple[int | None, int]]:
        """Returns the `advance` commands that took effect up to and including a commit."""
        return [each for each in self.advances if arrival_number(each[0]) <= commit]

    def watermark_before(self, commit: int) -> int:
        """Returns the watermark against which the events of a commit are judged; NEVER if there was none yet."""
        commits, watermarks, begins = self._passed
        bounds = [time for arrival, time in self.advances if arrival is None or arrival < commit]
        # The watermark rises if less disorder is declared, and never falls.
        bounds.append(begins[bisect_left(self.declarations.cuts, commit)])
        if before := int(np.searchsorted(commits, commit)):
            bounds.append(int(watermarks[before - 1]))
        return max(bounds)

    @cached_property
    def _passed(self) -> tuple[Int64s, Int64s, list[int]]:
        """The commits in ascending order, the watermark after each, and that at the beginning of each declaration."""
        commits = sorted(self.highs)
        edges = [0, *(bisect_right(commits, cut) for cut in self.declarations.cuts), len(commits)]
        reached, watermark, begins, parts = Reached(), NEVER, list[int](), list[Int64s]()
        for declared, (low, high) in zip(self.declarations.listed, pairwise(edges), strict=True):
            watermark = max(watermark, reached.watermark(declared.stream))
            begins.append(watermark)
            reached, passed = pass_marks(declared.stream, reached, [self.highs[commit] for commit in commits[low:high]])
            parts.append(np.maximum(passed, watermark))
            watermark = int(parts[-1][-1]) if len(passed) else watermark
        return np.array(commits, dtype=np.int64), np.concatenate(parts), begins


@dataclass(frozen=True)
class ListHistory:
    """The lists by which the events of a stream were judged.

    Attributes:
        source: Returns the contents of the lists.
        changes: (arrival, commit of table `lists`), in the order they took effect.
    """

    source: ListSource = field(default_factory=KnownLists)
    changes: Sequence[tuple[int | None, int]] = ()

    def commit_at(self, commit: int) -> int | None:
        """Returns the commit of table `lists` that applied to a commit of events; None for before the first."""
        known = [list_commit for arrival, list_commit in self.changes if arrival_number(arrival) < commit]
        return known[-1] if known else None

    def read(self, commit: int, memberships: Iterable[Membership]) -> Lists:
        """Returns the lists that calls of in_list refer to, as of the judging of a commit of events."""
        return self.source.read(self.commit_at(commit), frozenset(each.list_name for each in memberships))

    def look_up(self, events: Events, memberships: Sequence[Membership]) -> Events:
        """Returns events in arrival order, with the answers of in_list as of each event's arrival."""
        new = [membership for membership in memberships if membership.name not in events.columns]
        if not new:
            return events
        used = np.array([arrival_number(arrival) for arrival, _ in self.changes], dtype=np.int64)
        versions = np.searchsorted(used, events.commits)
        parts = []
        for version in np.unique(versions).tolist() if len(events) else [0]:
            part = events.take(versions == version)
            commit = int(part.commits[0]) if len(part) else 0
            parts.append(part.look_up(new, self.read(commit, new)))
        return Events.join(parts)


@dataclass(frozen=True)
class Reset:
    """An alert of a rule with `reset_on_alert`, which emptied the windows of its key.

    Attributes:
        commit: The commit that brought the alert.
        time: The time of the alert's event, or of the event that began the wait for an absence.
        event_id: The id of that event, in the stream's type.
        due: The time at which an absence was due; None for other alerts.
    """

    commit: int
    time: int
    event_id: int | str
    due: int | None = None

    @classmethod
    def from_row(cls, row: Mapping[str, Any], stream: Stream, waits: bool) -> Reset:
        """Makes the reset of an alert's first row; `waits` says whether the rule waits for an absence."""
        due = parse_time(row["event_time"]) if waits else None
        event_id = int(row["event_id"]) if stream.fields[stream.event_id].is_integer else row["event_id"]
        return cls(row["arrival"], parse_time(row["window_start" if waits else "event_time"]), event_id, due)


@dataclass(frozen=True)
class MeasureEvidence:
    """One measure of an alert.

    Attributes:
        name: The name of the measure.
        text: The measure as written in the rule.
        words: The measure in words.
        window_start: The start of its window, included.
        window_end: The end of its window.
        recorded: The value in the alert, as exact text; None for NULL.
        recomputed: The value from all events at that time, including those deleted since, as exact text; None for NULL.
        events: The events it counted, oldest first, without those deleted since.
        missing: How many of the events it counted have been deleted since.
        end_included: Whether `window_end` is included.
        shown: `recorded` as shown in the alert's message.
    """

    name: str
    text: str
    words: str
    window_start: Any
    window_end: Any
    recorded: str | None
    recomputed: str | None
    events: pd.DataFrame
    missing: int = 0
    end_included: bool = True
    shown: str | None = None


@dataclass(frozen=True)
class StepEvidence:
    """One step of a sequence.

    Attributes:
        name: The name of the step.
        text: Its condition.
        words: The step in words.
        events: The events it took, in that order, without those deleted since.
        missing: How many of the events it took have been deleted since.
        absent: Whether the step waits for an event that must not come. `events` then holds the event that did come.
    """

    name: str
    text: str
    words: str
    events: pd.DataFrame
    missing: int = 0
    absent: bool = False


@dataclass(frozen=True)
class KindEvidence:
    """The part of an explanation that depends on the kind of rule; see Explanation."""

    timeline: pd.DataFrame = field(repr=False)
    measures: tuple[MeasureEvidence, ...] = ()
    main: str = ""
    notes: tuple[str, ...] = ()
    steps: tuple[StepEvidence, ...] = ()
    windows: pd.DataFrame = field(default_factory=pd.DataFrame, repr=False)
    reproduced: bool = True


@dataclass(frozen=True, kw_only=True)
class Explanation(KindEvidence):
    """Explains why a row of an alert was written, from the events at that time.

    Attributes:
        alert: The row.
        rule: The row of the rules table that was in force, without comment and time.
        sentence: The rule in words.
        limits: The numbers that the rule's condition compares each measure with.
        measures: The evidence of each measure.
        timeline: The key's events for a picture, with columns event_time, event_id, value (the event's contribution to
            the measure `main`), running (that measure as of each event; lookback rules only), in_window (whether it
            counted) and is_alert. For a sequence also step (the name of the step that took it, or empty), fits (the
            first step that it fits by itself if no step took it, or empty) and until (whether it satisfies `until`). For an
            event rule only event_time, event_id, value, fits (whether its conditions hold) and is_alert.
        main: The name of the measure to draw; of an event rule the field that it compares with a number, or empty.
        missing: How many counted events have been deleted since.
        kind: The kind of rule.
        notes: Sentences about this row, such as why it was retracted.
        steps: The steps of a sequence; an absence comes last.
        windows: For tumbling, sliding and session windows, the key's windows for a picture, with columns window_start,
            window_end (excluded), value (the measure `main`) and is_alert. For a sequence the time that its steps had
            and the wait for an absence, with columns window_start, window_end (included) and name (steps, wait).
        reproduced: Whether a replay of the events reproduces the row: for the same event or window; for a sequence with
            the same events in the same order, and retracted if an absence was retracted.
        event_limits: (text, value) of the limits that the condition compares with the event's own value of `main`'s
            field, such as ("3 * usual", "150.02"), with their values for this event.
        measure_limits: (text, value) of the limits of `main` that depend on other values, such as ("3 * before", 12.5),
            with their values for this alert.
    """

    alert: Mapping[str, Any]
    rule: Mapping[str, Any]
    sentence: str
    limits: Mapping[str, tuple[float, ...]]
    missing: int = 0
    kind: str = LOOKBACK
    event_limits: tuple[tuple[str, str], ...] = ()
    measure_limits: tuple[tuple[str, float], ...] = ()

    @property
    def key(self) -> Mapping[str, str | None]:
        """The key: group_by field -> value as exact text."""
        return dict(self.alert["key"] or {})

    @property
    def consistent(self) -> bool:
        """True if the row is reproduced and every recomputed measure equals the alert's."""
        return self.reproduced and all(measure.recorded == measure.recomputed for measure in self.measures)

    def to_dict(self) -> dict[str, Any]:
        """Returns the alert and its explanation for JSON. Events appear only as ids in `evidence`."""
        measures = [
            {
                name: getattr(each, name)
                for name in ("name", "text", "window_start", "window_end", "recorded", "recomputed")
            }
            for each in self.measures
        ]
        own = {"rule": self.sentence, "measures": measures, "notes": list(self.notes), "missing": self.missing}
        return {**self.alert, **own, "consistent": self.consistent}


@dataclass(frozen=True)
class Evidence:
    """The events of one key, and everything that decides which of them a rule counted.

    Attributes:
        rule: The rule to explain.
        events: The events in arrival order. They get the answers of in_list as of their arrival.
        clock: Gives the watermark of each commit.
        activations: In the order they took effect. Without one of the rule itself, the rule is assumed to have been in
            force from the start.
        resets: The alerts of this key that emptied its windows.
        gone_at: The commit that deleted each event, NOT_DELETED if none did, shape (rows,). None: no event was deleted.
        earliest: Events before this time are not in `events`.
        key: The key: group_by field -> value as exact text; None if it need not be known. If steps have keys of their own,
            some events have it in other fields than those of group_by.
        lists: The lists by which the events were judged.
    """

    rule: CompiledRule
    events: Events
    clock: Clock
    activations: Sequence[Activation] = ()
    resets: Sequence[Reset] = ()
    gone_at: Int64s | None = None
    earliest: int = NEVER
    key: Mapping[str, str | None] | None = None
    lists: ListHistory = field(default_factory=ListHistory)

    def __post_init__(self) -> None:
        object.__setattr__(self, "events", self.lists.look_up(self.events, self._memberships))

    @classmethod
    def read(cls, changes: pa.Table, rule: CompiledRule, clock: Clock, **context: Any) -> Evidence:
        """Reads the events of a key, without those too far ahead of their commit, and the commits that deleted them.

        Args:
            changes: The inserted and deleted rows of the key in a change feed, with their `_change_type`, their commit
                (arrival) and its time (committed_at).
            rule: The rule to explain.
            clock: The clock of the stream.
            **context: The other attributes.
        """
        stream, declarations = clock.stream, clock.declarations
        kinds = np.array(changes.column("_change_type").to_pylist(), dtype=object)
        inserted, deleted = (
            read_events(changes.filter(pa.array(kinds == kind)).drop_columns(["_change_type"]), stream, 0)
            for kind in ("insert", "delete")
        )
        events, committed = inserted
        assert committed is not None
        limits = declarations.list_values("max_future", events.commits)
        own = split_future(events, committed, stream, limits)[0].in_order_of_arrival()
        return cls(rule, own, clock, gone_at=_find_deleting_commits(own, deleted[0]), **context)

    @cached_property
    def _memberships(self) -> list[Membership]:
        """The calls of in_list on events, in the rule and in the rules that share its state."""
        rules = [self.rule, *(each.rule for each in self.activations if each.rule is not None)]
        return list({each.name: each for rule in rules for each in rule.memberships}.values())

    @property
    def stream(self) -> Stream:
        """The latest declaration of the events' stream."""
        return self.clock.stream

    def select_fields(self, at: Int64s | slice) -> dict[str, Column]:
        """Returns the fields of the events at positions."""
        columns = self.events.columns.items()
        return {name: column.take(at) for name, column in columns if name in self.stream.fields}

    @cached_property
    def is_wanted(self) -> Mask:
        """Marks the events for which the rule's `where` holds."""
        return self.holds(self.rule.where)

    def holds(self, condition: Expression | None) -> Mask:
        """Marks the events for which a condition on the event alone holds; the condition None always holds."""
        return np.ones(len(self.events), dtype=bool) if condition is None else self.events.value(condition).is_true()

    @cached_property
    def ends_sequence(self) -> Mask:
        """Marks the events that satisfy `until`."""
        sequence = self.rule.sequence
        if sequence is None or sequence.until is None:
            return np.zeros(len(self.events), dtype=bool)
        return self.holds(sequence.until) & self.has_key(len(sequence.steps) + 1)

    def has_key(self, bit: int) -> Mask:
        """Marks the events that have the key for a condition of a sequence, by its bit (see `SequenceKey`)."""
        marked, sequence = np.ones(len(self.events), dtype=bool), self.rule.sequence
        if self.key is None or sequence is None or not sequence.has_own_keys:
            return marked
        for part, name in zip(self.rule.key, sequence.key_of(bit), strict=True):
            texts = map(to_text, self.events.key_column(name).to_list())
            marked &= np.fromiter((text == self.key[part.name] for text in texts), dtype=bool, count=len(marked))
        return marked

    @cached_property
    def is_deleted(self) -> Mask:
        """Marks the events that have been deleted by now. They are counted but not shown."""
        return ~self.is_kept_after(NOT_DELETED - 1)

    def is_kept_after(self, commit: int) -> Mask:
        """Marks the events that were not deleted by this commit or an earlier one."""
        return np.ones(len(self.events), dtype=bool) if self.gone_at is None else self.gone_at > commit

    def find_position(self, event_id: str, time: int | None = None, commit: int | None = None) -> int | None:
        """Returns the position of the first event with that id (and time, and commit); None if not found."""
        times, commits = self.events.times, self.events.commits
        named = self._positions_by_id.get(event_id, ())
        fitting = (at for at in named if time is None or times[at] == time)
        return next((at for at in fitting if commit is None or commits[at] == commit), None)

    @cached_property
    def _positions_by_id(self) -> dict[str, list[int]]:
        """The positions of the events of each id, as text, in arrival order."""
        positions: dict[str, list[int]] = {}
        for at in range(len(self.events)):
            positions.setdefault(self.events.id_text(at), []).append(at)
        return positions

    def count_arrived(self, commit: int) -> int:
        """Returns how many events had arrived up to and including a commit."""
        return int(np.searchsorted(self.events.commits, commit, side="right"))

    def first_counted(self, arrived: int) -> int:
        """Returns how many of the first `arrived` events do not count because an alert then emptied the windows."""
        earlier = bisect_left(self.emptied, arrived)
        return self.emptied[earlier - 1] if earlier else 0

    @cached_property
    def emptied(self) -> list[int]:
        """The number of events that had arrived by each reset, ascending."""
        return sorted(self._count_before(reset) for reset in self.resets)

    def _count_before(self, reset: Reset) -> int:
        if reset.due is not None and reset.due >= self.clock.watermark_before(reset.commit):
            # Raised by the watermark, after all events of the commit.
            return self.count_arrived(reset.commit)
        low, high = self.count_arrived(reset.commit - 1), self.count_arrived(reset.commit)
        here = range(low, high)
        own = (at for at in here if self.events.times[at] == reset.time and self.events.id_value(at) == reset.event_id)
        last = max(own, default=None)
        return low + sum(bool(self.events.times[at] <= reset.time) for at in here) if last is None else last + 1

    def position_of(self, place: AlertOrder) -> int | None:
        """Returns the position of the event that caused a row; None if the watermark caused it."""
        if place.phase != BY_EVENT:
            return None
        here = np.flatnonzero((self.events.commits == place.arrival) & (self.events.times == place.time)).tolist()
        return next((at for at in here if self.events.sort_text(at) == place.event), None)

    def frame(self, positions: Int64s, *, by_time: bool = True) -> pd.DataFrame:
        """Returns all fields and `arrival` of the events at `positions` that have not been deleted by now."""
        shown = positions[~self.is_deleted[positions]]
        ordered = shown[np.argsort(self.events.times[shown], kind="stable")] if by_time else shown
        columns = {name: column.to_list() for name, column in self.select_fields(ordered).items()}
        return pd.DataFrame({**columns, "arrival": self.events.commits[ordered]})

    def list_events(self, mask: Mask) -> Int64s:
        """Returns the positions of the last MAX_EVENTS events of a mask that are not deleted, oldest first."""
        at = np.flatnonzero(mask & ~self.is_deleted)
        return at[np.argsort(self.events.times[at], kind="stable")][-MAX_EVENTS:]


def _find_deleting_commits(events: Events, deleted: Events) -> Int64s | None:
    """Finds the commit that deleted each event, or NOT_DELETED; None if no row was deleted."""
    if not len(deleted):
        return None
    deletions: dict[tuple[Any, int], list[int]] = {}
    for at, event_id in enumerate(deleted.list_ids(slice(None))):
        deletions.setdefault((event_id, int(deleted.times[at])), []).append(int(deleted.commits[at]))
    deleting = np.full(len(events), NOT_DELETED, dtype=np.int64)
    for at, event_id in enumerate(events.list_ids(slice(None))):
        commits = deletions.get((event_id, int(events.times[at])), [])
        deleting[at] = min((commit for commit in commits if commit > events.commits[at]), default=NOT_DELETED)
    return deleting

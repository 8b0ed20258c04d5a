"""Runs the engine in one process without Spark: a harness for tests and trials, and a replay of whole tables.

Both use the stream's evaluator with state in memory.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import pandas as pd

from lookback.core.engine.batch import Batch
from lookback.core.engine.evaluation import Evaluator
from lookback.core.engine.output import Output
from lookback.core.engine.schedule import open_warmed
from lookback.core.engine.warming import WindowHistory
from lookback.core.errors import EventError, Problem, RuleError, show_value
from lookback.core.judging.segment import merge_failures
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.commands import LISTS
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.document import Rule
from lookback.core.rules.quarantine import describe_failure
from lookback.core.rules.rulebook import RuleBook
from lookback.core.rules.rulelog import LogRow
from lookback.core.rules.versions import WARM, Piece, Warming
from lookback.core.state.shard import ShardState
from lookback.core.streams.alerts import Alert, LateEvent
from lookback.core.streams.arrival import find_marks, late_sort_key, split_future
from lookback.core.streams.cells import read_cell
from lookback.core.streams.declaration import Stream
from lookback.core.streams.eventrows import read_events
from lookback.core.streams.events import Events, empty_events
from lookback.core.streams.watermarks import Mark
from lookback.core.values.contents import set_contents
from lookback.core.values.keys import Int64s
from lookback.core.values.lists import KnownLists, Lists
from lookback.core.values.times import NEVER
from lookback.core.values.types import TIMESTAMP
from lookback.testing.inputs import (
    check_rule,
    load_any_stream,
    read_changes,
    read_lists,
    read_version,
    require_contents,
    require_status,
)

_Row = TypeVar("_Row")
# Replay judges this many events at a time. Results do not depend on it.
_MAX_REPLAY_ROWS = 500_000


class _Clock:
    """Treats commits without a time as committed when their events are judged, as if ingest read them now.

    As long as all events are further ahead than the clock allows, they have their own time line, and none is too far
    ahead.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._has_past = False

    def split_future(self, events: Events, committed_at: Int64s | None) -> tuple[Events, list[LateEvent]]:
        """Splits off the events that are more than max_future ahead; see `arrival.split_future`."""
        if committed_at is None:
            now = time.time_ns() // 1_000
            self._has_past = self._has_past or bool((events.times <= now + self._stream.max_future).any())
            committed_at = np.full(len(events), now) if self._has_past else events.times
        return split_future(events, committed_at, self._stream)


class HarnessRows(list[_Row], Generic[_Row]):
    """A list of rows that converts to a pandas frame."""

    def to_pandas(self) -> pd.DataFrame:
        """Returns a frame with a column per attribute. Without rows it has no columns."""
        return pd.DataFrame([asdict(row) for row in self])  # type: ignore[call-overload]


@dataclass(frozen=True)
class Result:
    """The result of a replay. `errors` are the rows of rule_log with action `failed` or `rejected`."""

    alerts: HarnessRows[Alert] = field(default_factory=HarnessRows)
    late_events: HarnessRows[LateEvent] = field(default_factory=HarnessRows)
    errors: HarnessRows[LogRow] = field(default_factory=HarnessRows)


class Harness:
    """One shard in memory: takes rules and events, and has the alerts immediately.

    Times are aware datetimes, ISO 8601 texts or integer microseconds; naive ones are UTC.

    Args:
        stream: A Stream, its document, or the path of its YAML.
        watermark: With `automatic` it moves, after each commit, to the highest event time less max_out_of_orderness.
            With `manual` it only moves by `watermark(t)`.
        warm_start: Whether versions come into force with the history of their windows, as in a stream that reads it
            immediately. The harness then keeps all events.

    Raises:
        StreamError: If the stream is invalid.
        ValueError: If `watermark` is unknown.

    Examples:
        >>> fields = {"id": "bigint", "at": "timestamp", "card": "string"}
        >>> harness = Harness({"stream": "uses", "event_id": "id", "event_time": "at", "fields": fields})
        >>> harness.rule({"rule_id": "twice", "stream": "uses", "group_by": ["card"], "window": "1 minute",
        ...     "measures": {"n": "count(*)"}, "when": "n >= 2"})
        >>> harness.events([{"id": 1, "at": "2026-03-01T10:00:00Z", "card": "x"}])
        >>> harness.events([{"id": 2, "at": "2026-03-01T10:01:00Z", "card": "x"}])
        >>> [(alert.event_id, alert.key, alert.measures) for alert in harness.alerts]
        [('2', {'card': 'x'}, {'n': 2})]
    """

    def __init__(
        self, stream: Stream | Mapping[str, Any] | str | Path, watermark: str = "automatic", *, warm_start: bool = False
    ) -> None:
        if watermark not in ("automatic", "manual"):
            raise ValueError(f"watermark must be 'automatic' or 'manual', got {show_value(watermark)}")
        self.stream = load_any_stream(stream)
        self.alerts: HarnessRows[Alert] = HarnessRows()
        self.late_events: HarnessRows[LateEvent] = HarnessRows()
        self.errors: HarnessRows[LogRow] = HarnessRows()
        self._clock = _Clock(self.stream)
        self._known = KnownLists({})
        # Everything judged so far, for the history of later versions: batches, and times of manual watermarks.
        self._judged: list[Batch | int] | None = [] if warm_start else None
        self._history = b""
        self._evaluator = Evaluator(
            self.stream,
            automatic=watermark == "automatic",
            lists=self._known,
            warms=warm_start,
            read_parcel=lambda _name, _part: self._history,
        )
        self._state = _make_state(self.stream)
        self._changes = 0

    def lists(self, contents: Mapping[str, Iterable[Any]]) -> None:
        """Sets the contents of lists between two commits, for `in_list(field, 'name')`.

        `contents` has values by list: texts, whole numbers, or mappings with value, expires_at (the event time from
        which it no longer matches) and kind (`cidr` for a range of addresses). Other lists stay unchanged. Raises
        EventError, with the place, for anything else.

        Examples:
            >>> fields = {"id": "bigint", "at": "timestamp", "card": "string"}
            >>> harness = Harness({"stream": "uses", "event_id": "id", "event_time": "at", "fields": fields})
            >>> harness.lists({"stolen": ["x"]})
            >>> harness.rule({"rule_id": "stolen", "stream": "uses", "window": "1 minute",
            ...     "measures": {"n": "count(*)"}, "where": "in_list(card, 'stolen')", "when": "n >= 1"})
            >>> harness.events([{"id": at, "at": "2026-03-01T10:00:00Z", "card": card} for at, card in enumerate("xy")])
            >>> [alert.event_id for alert in harness.alerts]
            ['0']
        """
        commit = (self._state.lists_commit or 0) + 1
        known = self._known.read(self._state.lists_commit, None)
        self._known.versions[commit] = set_contents(known, require_contents(contents, "lists"), commit)
        self._process(self._make_batch("*", commit, LISTS, json.dumps({"commit": commit})))

    def rule(self, rule: Mapping[str, Any] | Rule, status: str = "active", version: int | None = None) -> None:
        """Applies a rule change between two commits. Versions are 1, 2, ... unless given.

        Raises RuleError, with all problems, for an invalid rule, an unknown status, or a version that is not above the
        one in force, which then stays in force.
        """
        rule_id, text = check_rule(rule, self.stream)
        number = read_version(rule_id, version)
        require_status(rule_id, status)
        before = len(self.errors)
        self._process(self._make_batch(rule_id, number, status, text))
        if refused := self.errors[before:]:
            del self.errors[before:]
            raise RuleError(rule_id, [Problem("", row.message) for row in refused], number)
        for warming in self._state.book.list_known_warming():
            self._warm(warming)

    def _warm(self, warming: Warming) -> None:
        """Activates a warming version, with the history of everything judged so far."""
        entry, state = warming.entry, _make_state(self.stream)
        evaluator = replace(self._evaluator, warms=False)
        silent = RuleChange("insert", 0, entry.rule_id, 1, "paused", entry.document)
        evaluator.process(state, Batch(empty_events(self.stream, ()), changes=[silent]))
        for judged in self._judged or ():
            if isinstance(judged, int):
                evaluator.advance(state, judged)
            else:
                evaluator.process(state, judged)
            state.drop_old()
        self._history = WindowHistory.of(state, compile_rule(json.loads(entry.document), self.stream)).encode()
        piece = Piece(entry.rule_id, entry.version, warming.begun or 0, 1, 1)
        batch = self._make_batch("*", None, WARM, piece.to_document(self.stream.name))
        self._add_output(self._evaluator.process(self._state, batch))
        self._history = b""

    def events(self, rows: object) -> None:
        """Judges events from a list of dicts, a pandas frame or an Arrow table.

        Each row is its own commit, unless a column `arrival` groups rows; rows with the same commit and time are judged
        in the given order. A column `committed_at` has the commit's time. Without it the commit counts as made now, and
        an event more than max_future ahead is discarded, unless all events so far are that far ahead.

        None, NaT and pd.NA are NULL, and so is NaN in a pandas frame, where it marks a missing value. NaN is a value
        only outside pandas, and in columns of the types Float32, Float64 and Arrow's. Raises EventError for invalid
        rows, with row, field and remedy.
        """
        events, committed_at = read_events(rows, self.stream, (self._state.last_commit or 0) + 1)
        commits = events.commits
        events, future = self._clock.split_future(events, committed_at)
        known = len(self.late_events)
        if len(commits):
            self._process(Batch(events, marks=find_marks(events, commits)))
        if future:
            self.late_events[known:] = _sort_late_events([*self.late_events[known:], *future], self.stream)

    def watermark(self, time: object) -> None:
        """Advances the watermark to `time` if that is later, and judges all windows and absences that end by then.

        Raises EventError if `time` is invalid.
        """
        try:
            microseconds = read_cell(TIMESTAMP, time)
        except ValueError as error:
            raise EventError(f"watermark: got {show_value(time)}: {error}") from None
        if microseconds is None:
            raise EventError("watermark: got no time; give an aware datetime, an ISO 8601 text or microseconds")
        if self._judged is not None:
            self._judged.append(microseconds)
        self._add_output(self._evaluator.advance(self._state, microseconds))

    def clear_state(self) -> None:
        """Drops all window state, as the command `clear_state` does. The rules continue with empty windows."""
        self._process(self._make_batch("*", None, "clear_state", None))

    def state_rows(self) -> int:
        """Counts the rows of window state at or above the floor, which `metrics` calls state_rows.

        These are the events that windows, sessions and sequences keep, and waits for absences. Verdicts, suppressed
        keys and keys reset by an alert do not count.
        """
        return self._state.state_rows()

    def _make_batch(self, rule_id: str, version: int | None, status: str, document: str | None) -> Batch:
        """Makes a batch of the next change, without events."""
        self._changes += 1
        change = RuleChange("insert", self._changes, rule_id, version, status, document)
        return Batch(empty_events(self.stream, ()), changes=[change])

    def _process(self, batch: Batch) -> None:
        commands = [change for change in batch.changes if change.rule_id == "*"]
        if self._judged is not None and (batch.marks or commands):
            self._judged.append(replace(batch, changes=commands))
        self._add_output(self._evaluator.process(self._state, batch))

    def _add_output(self, output: Output) -> None:
        self._state.drop_old()
        self.alerts += output.alerts
        self.late_events += output.late
        self.errors += find_errors(output, self.stream.name)


def replay(
    rules: Iterable[
        Mapping[str, Any] | Rule | tuple[Mapping[str, Any], int | None] | tuple[Mapping[str, Any], int | None, int]
    ],
    events: object,
    stream: Stream | Mapping[str, Any] | str | Path,
    lists: Mapping[str, Iterable[Any]] | Lists | Iterable[tuple[Mapping[str, Iterable[Any]], int | None]] = (),
) -> Result:
    """Judges events in order of arrival, as the stream would have. Raises RuleError, EventError and StreamError.

    Args:
        rules: Documents (version 1, active from the start), or pairs of a row of the rules table and its activation
            arrival: the last commit judged before it (None: before the first). A third part gives the row a warm start:
            its version collects rows from the first commit, is warming from `arrival` on, and comes into force after
            the commit in the third part.
        events: Events as for Harness.events, with the columns `arrival` and `committed_at` if known.
        stream: A Stream, its document, or the path of its YAML.
        lists: Contents of lists from the start, as for Harness.lists, or pairs of contents and the arrival from which
            they apply.

    Examples:
        >>> fields = {"id": "bigint", "at": "timestamp", "card": "string"}
        >>> stream = {"stream": "uses", "event_id": "id", "event_time": "at", "fields": fields}
        >>> rule = {"rule_id": "any", "stream": "uses", "window": "1 minute", "measures": {"n": "count(*)"},
        ...     "when": "n > 0"}
        >>> result = replay([rule], [{"id": 7, "at": "2026-03-01T10:00:00Z", "card": "x"}], stream)
        >>> result.alerts.to_pandas()["event_id"].tolist()
        ['7']
    """
    declared = load_any_stream(stream)
    changes, warmed = read_changes(rules, declared)
    known, list_changes = read_lists(lists)
    # There may be several arrivals between two commits of events. At the same arrival, lists come before rules.
    ordered = sorted([*list_changes, *changes], key=lambda pair: NEVER if pair[0] is None else pair[0])
    changes = [(arrival, replace(change, commit=number)) for number, (arrival, change) in enumerate(ordered)]
    every, committed_at = read_events(rows=events, stream=declared, next_commit=1)
    result = Result()
    rows, future = _Clock(declared).split_future(every, committed_at)
    result.late_events.extend(future)
    marks = find_marks(rows, every.commits)
    evaluator = Evaluator(declared, lists=known)
    state = _make_state(declared)
    open_warmed(state, warmed)
    for batch in _split_batches(rows, marks, changes, declared):
        output = evaluator.process(state, batch)
        state.drop_old()
        result.alerts.extend(output.alerts)
        result.late_events.extend(output.late)
        result.errors.extend(find_errors(output, declared.name))
    result.late_events[:] = _sort_late_events(result.late_events, declared)
    return result


def _make_state(stream: Stream) -> ShardState:
    return ShardState(RuleBook(stream, {stream.name: stream}))


def _sort_late_events(late: Iterable[LateEvent], stream: Stream) -> list[LateEvent]:
    return sorted(late, key=lambda row: late_sort_key(stream, row.arrival, row.event_time, row.event_id))


def find_errors(output: Output, stream: str) -> list[LogRow]:
    """Returns the log rows of an output about rejected changes, evaluation errors and reached limits."""
    failed = [
        LogRow(stream, each.rule_id, each.version, "failed", describe_failure(each), each.first_arrival[0])
        for each in merge_failures(output.failures)
    ]
    return [*(row for row in output.log if row.action == "rejected"), *output.notes, *failed]


def _split_batches(
    events: Events, marks: Mapping[int, Mark | None], changes: list[tuple[int | None, RuleChange]], stream: Stream
) -> Iterable[Batch]:
    """Splits the events into batches: a new one begins at each rule change, and after _MAX_REPLAY_ROWS events."""
    commits = np.array(sorted(marks), dtype=np.int64)
    order = np.argsort(events.commits, kind="stable")
    ordered = events.commits[order]
    positions = [
        0 if arrival is None else int(np.searchsorted(commits, arrival, side="right")) for arrival, _ in changes
    ]
    sizes = np.searchsorted(ordered, commits, side="right")
    full = np.flatnonzero(np.diff(sizes // _MAX_REPLAY_ROWS, prepend=0)) + 1
    edges = sorted({0, len(commits), *positions, *(int(cut) for cut in full)})
    for start, end in zip(edges, [*edges[1:], None], strict=True):
        due = [change for position, (_, change) in zip(positions, changes, strict=True) if position == start]
        part = commits[start:end]
        low, high = np.searchsorted(ordered, (part[0], part[-1] + 1)) if len(part) else (0, 0)
        chosen = events.take(order[low:high])
        yield Batch(chosen, marks={int(commit): marks[int(commit)] for commit in part}, changes=due)

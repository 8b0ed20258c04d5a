"""Rule changes bound to arrivals: when state is made anew, each takes effect where it did the first time."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from lookback.core.engine.evaluation import Batch, Evaluator, Output
from lookback.core.rules.rulebook import LogRow, RuleBook, RuleChange, order_changes
from lookback.core.state.shard import FeatureState, ShardState
from lookback.core.streams.alerts import Alert, Place
from lookback.core.streams.declaration import Stream
from lookback.core.values.columns import from_text, from_values, to_stored
from lookback.core.values.keys import encode_keys
from lookback.core.values.types import DataType

# What rule_log says of itself, not of a row of the rules table.
NO_CHANGES = frozenset({"failed", "commit_cut", "session_closed", "revisions_limited", "delete_unmatched"})
# By table: the action by which rule_log says through which commit the retention of settings has deleted rows of it.
DELETED = {"alerts": "alerts_deleted", "late_events": "late_events_deleted", "rule_log": "log_deleted"}
_Logged = tuple[str | None, int | None, str]


@dataclass(frozen=True)
class Seed:
    """What is known of the commits that are not read again.

    high: their highest event time. raised: of rules and the texts of their keys, the event time of the last alert that was
    raised, which later ones may be suppressed by. Times in microseconds.
    """

    high: int
    raised: Sequence[tuple[str, Mapping[str, str | None], int]] = ()

    def apply_to(self, state: ShardState, stream: Stream) -> None:
        """Puts it into a state that is new."""
        state.high = self.high
        for rule_id, key, time in self.raised:
            fields = sorted(key)
            columns = [from_values(stream.fields[name], [_value(stream.fields[name], key[name])]) for name in fields]
            halves = encode_keys(columns, 1)
            state.suppressed.setdefault((rule_id, tuple(fields)), {})[int(halves.low[0]), int(halves.high[0])] = time

    def without_known(self, state: ShardState, rows: Sequence[tuple[Place, Alert]]) -> list[tuple[Place, Alert]]:
        """The rows of alerts less those of windows that begin before what was read: of these only the tables know."""
        names = {name for name, feature in state.features.items() if self._cuts(feature)}
        cut = {entry.rule_id for entry, rule in state.book.in_force() if names & rule.needs.keys()}
        return [row for row in rows if row[1].window_complete or row[1].rule_id not in cut]

    def _cuts(self, feature: FeatureState) -> bool:
        """Whether windows of a feature may still begin before what was read."""
        return feature.since == self.high and (feature.floor is None or feature.floor < self.high)


@dataclass(frozen=True)
class Schedule:
    """When the changes of a rules table take effect.

    arrivals: per commit of the rules table, the last commit of the events that was judged before it; None: before the
    first. through: the last arrival that outputs name; a change of any other commit waits until that is judged. None: no
    output names one. seed: None where the events are read from their first commit on.
    """

    through: int | None
    arrivals: Mapping[int, int | None]
    seed: Seed | None = None

    def after(self, commit: int) -> int | None:
        """The commit of the events that must be judged before the changes of a commit of the rules take effect."""
        return self.arrivals.get(commit, self.through)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        seed = None if self.seed is None else [self.seed.high, [[*each] for each in self.seed.raised]]
        return {"through": self.through, "arrivals": sorted(self.arrivals.items()), "seed": seed}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Schedule:
        """The schedule that `to_dict` wrote. Raises KeyError, TypeError or ValueError for anything else."""
        arrivals = {int(commit): None if after is None else int(after) for commit, after in document["arrivals"]}
        through, seed = document["through"], document["seed"]
        sown = (
            None
            if seed is None
            else Seed(int(seed[0]), [(rule_id, dict(key), int(at)) for rule_id, key, at in seed[1]])
        )
        return cls(None if through is None else int(through), arrivals, sown)

    @classmethod
    def from_log(
        cls, changes: Iterable[RuleChange], logged: Iterable[LogRow], stream: Stream, streams: Mapping[str, Stream],
        through: int | None, seed: Seed | None = None,
    ) -> Schedule:  # fmt: skip
        """The schedule by which `changes` were logged as they are.

        changes: all of the rules table; logged: the stream's rows of rule_log. Changes take effect in their order, so one
        that was not logged, since it changes nothing here, goes with the next that was.
        """
        times: dict[_Logged, list[int]] = {}
        for row in logged:
            if row.action not in NO_CHANGES:
                times.setdefault((row.rule_id, row.version, row.action), []).append(_number(row.arrival))
        for found in times.values():
            found.sort()
        book, reached = RuleBook(stream, streams), _number(None)
        arrivals: dict[int, int | None] = {}
        unlogged: list[int] = []
        for change in order_changes(changes):
            said, _ = book.apply([change], None)
            at = [_first(times.get((row.rule_id, row.version, row.action)), reached) for row in said]
            unlogged.append(change.commit)
            if known := [each for each in at if each is not None]:
                reached = max(reached, *known)
                arrivals.update(dict.fromkeys(unlogged, None if reached == _number(None) else reached))
                unlogged = []
        return cls(through, arrivals, seed)


@dataclass(frozen=True)
class Waiting:
    """A rule change that takes effect when commit `after` of the events, or a later one, has been judged."""

    change: RuleChange
    after: int


def judge_batch(
    evaluator: Evaluator, state: ShardState, batch: Batch, waiting: Sequence[Waiting]
) -> tuple[Output, list[Waiting]]:
    """As `Evaluator.process`, with changes that take effect within the batch. Returns what still waits after it."""
    output = Output()
    commits = sorted(batch.marks)
    ordered = sorted(waiting, key=lambda each: each.after)
    cuts = {bisect_right(commits, each.after) for each in ordered}
    edges = sorted({0, *cuts, len(commits)})
    between = _Pieces(batch)
    if batch.changes:
        evaluator.process(state, _without_events(batch, batch.changes), output)
    for start, end in pairwise(edges):
        ordered = _take_effect(evaluator, state, batch, ordered, commits[start] - 1, output)
        if output.covered:
            evaluator.process(state, between(commits[start], commits[end - 1]), output)
    if output.covered and state.last_commit is not None:
        ordered = _take_effect(evaluator, state, batch, ordered, state.last_commit, output)
    return output, ordered


def pack_waiting(waiting: Sequence[Waiting]) -> str:
    """The changes as text, for the state store."""
    return json.dumps([[vars(each.change), each.after] for each in waiting], separators=(",", ":"))


def unpack_waiting(text: str) -> list[Waiting]:
    """The changes that `pack_waiting` wrote."""
    return [Waiting(RuleChange(**change), after) for change, after in json.loads(text)]


def _take_effect(
    evaluator: Evaluator, state: ShardState, batch: Batch, waiting: list[Waiting], judged: int, output: Output
) -> list[Waiting]:
    """Applies what is due when all commits up to `judged` have been. Returns the rest."""
    judged = judged if state.last_commit is None else max(judged, state.last_commit)
    due = [each for each in waiting if each.after <= judged]
    for after, group in groupby(due, key=lambda each: each.after):
        if output.covered:
            known = len(output.log)
            evaluator.process(state, _without_events(batch, [each.change for each in group]), output)
            # The commit that it was judged after may lie before those that are read this time.
            output.log[known:] = [
                row if row.arrival is not None and row.arrival >= after else replace(row, arrival=after)
                for row in output.log[known:]
            ]
    return waiting[len(due) :]


def _without_events(batch: Batch, changes: list[RuleChange]) -> Batch:
    return Batch(batch.events.take(np.empty(0, dtype=np.int64)), changes=changes, coverage=batch.coverage)


class _Pieces:
    """What a batch has of the commits from one to another, both included."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._order = np.argsort(batch.events.commits, kind="stable")
        self._commits = batch.events.commits[self._order]

    def __call__(self, first: int, last: int) -> Batch:
        batch, (low, high) = self._batch, np.searchsorted(self._commits, (first, last + 1))
        deleted = batch.deleted
        if deleted is not None:
            deleted = deleted.take(np.flatnonzero((deleted.commits >= first) & (deleted.commits <= last)))
        marks = {commit: highest for commit, highest in batch.marks.items() if first <= commit <= last}
        events = batch.events.take(np.sort(self._order[low:high]))
        return Batch(events, deleted, marks, coverage=batch.coverage)


def _first(times: list[int] | None, reached: int) -> int | None:
    """Takes the first of the times that is not before `reached`; None if there is none."""
    for at, time in enumerate(times or ()):
        if time >= reached:
            assert times is not None
            return times.pop(at)
    return None


def _value(type_: DataType, text: str | None) -> Any:
    return None if text is None else to_stored(type_, from_text(type_, text))


def _number(arrival: int | None) -> int:
    return -1 if arrival is None else arrival

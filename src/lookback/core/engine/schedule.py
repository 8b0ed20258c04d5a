"""Schedules rule changes by arrival, so that each takes effect at its original place when state is rebuilt."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from math import inf
from typing import Any, NamedTuple

import numpy as np

from lookback.core.engine.evaluation import Batch, CommitRanges, Evaluator, Output
from lookback.core.rules.gate import APPROVAL
from lookback.core.rules.quarantine import AUTHOR
from lookback.core.rules.roles import WARMING, name_role
from lookback.core.rules.rulebook import (
    ACTIONS,
    COMMANDS,
    LIST_CHANGED,
    LISTS,
    LogRow,
    RuleBook,
    RuleChange,
    order_changes,
)
from lookback.core.rules.versions import WARM, Piece, describe_start
from lookback.core.state.shard import ShardState
from lookback.core.state.windowrows import FeatureState
from lookback.core.streams.alerts import Alert, AlertOrder
from lookback.core.streams.arrival import arrival_number
from lookback.core.streams.declaration import Stream
from lookback.core.streams.declarations import Declarations, Declared
from lookback.core.values.columns import from_text, from_values, to_stored
from lookback.core.values.keys import encode_keys
from lookback.core.values.types import DataType

# Actions of rule_log that do not result from a row of the rules table.
NO_CHANGES = frozenset({"failed", "commit_cut", "session_closed", "revisions_limited", "delete_unmatched"})
# Actions of rule_log by which a version or a command took effect.
_OBEYED = frozenset(ACTIONS.values()) - {ACTIONS["draft"]} | frozenset(COMMANDS) | {LIST_CHANGED}
# By table, the action with which rule_log records the last commit whose rows retention has deleted.
DELETED = {"alerts": "alerts_deleted", "late_events": "late_events_deleted", "rule_log": "log_deleted"}
# The rule_id, version and action of a row of rule_log.
_Logged = tuple[str | None, int | None, str]
# The arrival of a row of rule_log, and its position among all rows that were read.
_Time = tuple[int, int]
# The commit, rule_id and version of a change.
_Slot = tuple[int, str | None, int | None]


class Warmed(NamedTuple):
    """A version that came into force at `arrival` with its history; the other fields are as in `versions.Entry`."""

    arrival: int
    rule_id: str
    version: int
    status: str
    document: str


@dataclass(frozen=True)
class Seed:
    """The remaining knowledge about commits that are not read again. Times are in microseconds.

    Attributes:
        high: Their highest event time.
        raised: The role of a rule, the texts of a key, and the event time of the last alert that the rule raised for
            that key, which may suppress later alerts.
    """

    high: int
    raised: Sequence[tuple[str, Mapping[str, str | None], int]] = ()

    def apply_to(self, state: ShardState, stream: Stream) -> None:
        """Writes the seed into a new state."""
        state.high = self.high
        for role, key, time in self.raised:
            fields = sorted(key)
            columns = [
                from_values(stream.fields[name], [_read_stored(stream.fields[name], key[name])]) for name in fields
            ]
            encoded = encode_keys(columns, 1)
            key_hash = encoded.pair(0)
            state.tables.raised(role, fields).put(key_hash, time)

    def drop_known(self, state: ShardState, rows: Sequence[tuple[AlertOrder, Alert]]) -> list[tuple[AlertOrder, Alert]]:
        """Drops the alerts of windows that begin before the commits that are read; the tables already have them."""
        names = {name for name, feature in state.features.items() if self._cuts_windows(feature)}
        cut = {entry.role for entry, rule in state.book.in_force() if names & rule.needs.keys()}
        return [
            (place, alert)
            for place, alert in rows
            if alert.window_complete or name_role(alert.rule_id, alert.mode) not in cut
        ]

    def _cuts_windows(self, feature: FeatureState) -> bool:
        """Returns whether windows of a feature may begin before the commits that are read."""
        return feature.since == self.high and (feature.floor is None or feature.floor < self.high)


@dataclass(frozen=True)
class Schedule:
    """The arrivals after which the changes of a rules table take effect.

    Attributes:
        through: The last arrival in the output tables; None if they are empty. Changes of commits that are not in
            `arrivals` wait until it is judged.
        arrivals: For each commit of the rules table, the last commit of the events that was judged before it; None if
            it came before the first one.
        seed: None if the events are read from their first commit.
        refused: The rows that the gate rejected, by `RuleChange.slot`.
        declared: The rows of `Declarations`.
        unexplained: The rules (`*` for commands) whose logged changes do not follow from the rows, because some rows
            are gone (see `restore_changes`).
        warmed: The versions whose history a replay gathers from the first commit on.
        warming: The slots of all rows that began or ended a warm-up, and of the commits of lists that took effect.
    """

    through: int | None
    arrivals: Mapping[int, int | None]
    seed: Seed | None = None
    refused: frozenset[_Slot] = frozenset()
    declared: Sequence[tuple[int | None, str]] = ()
    unexplained: frozenset[str] = field(default=frozenset(), compare=False)
    warmed: Sequence[Warmed] = ()
    warming: frozenset[_Slot] = frozenset()

    def after(self, commit: int) -> int | None:
        """Returns the commit of the events after which a commit of the rules table takes effect."""
        return self.arrivals.get(commit, self.through)

    def restore_decision(self, change: RuleChange) -> RuleChange:
        """Restores the decisions about a logged change; today's settings do not apply.

        The change is subject to the gate only if the gate rejected it. Its version waits for history only if it did
        then.
        """
        if change.commit not in self.arrivals:
            return change
        gate = APPROVAL if change.slot in self.refused else ""
        return replace(change, gate=gate, warms=change.slot in self.warming)

    def begin(self, state: ShardState, stream: Stream) -> None:
        """Writes the seed into a new state, and opens the versions that were warmed later."""
        if self.seed is not None:
            self.seed.apply_to(state, stream)
        open_warmed(state, self.warmed)

    def drop_known(self, state: ShardState, rows: list[tuple[AlertOrder, Alert]]) -> list[tuple[AlertOrder, Alert]]:
        """Drops the alerts that the tables already have and whose windows are read only in part."""
        return rows if self.seed is None else self.seed.drop_known(state, rows)

    def to_dict(self) -> dict[str, Any]:
        """Returns the schedule as plain values, for JSON."""
        seed = None if self.seed is None else [self.seed.high, [[*each] for each in self.seed.raised]]
        refused, arrivals = sorted(map(list, self.refused), key=repr), sorted(self.arrivals.items())
        declared = [list(row) for row in self.declared]
        warming = sorted(map(list, self.warming), key=repr)
        return {
            "through": self.through, "arrivals": arrivals, "seed": seed, "refused": refused, "declared": declared,
            "warmed": [list(each) for each in self.warmed], "warming": warming,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Schedule:
        """Reads the output of `to_dict`; raises KeyError, TypeError or ValueError for anything else."""
        arrivals = {int(commit): None if after is None else int(after) for commit, after in document["arrivals"]}
        through, seed = document["through"], None
        if document["seed"] is not None:
            high, raised = document["seed"]
            seed = Seed(int(high), [(role, dict(key), int(at)) for role, key, at in raised])
        refused, warming = (
            frozenset((int(commit), rule_id, version) for commit, rule_id, version in document[name])
            for name in ("refused", "warming")
        )
        warmed = [Warmed(*each) for each in document["warmed"]]
        declared = [(None if after is None else int(after), str(text)) for after, text in document["declared"]]
        return cls(
            None if through is None else int(through), arrivals, seed, refused, declared, warmed=warmed, warming=warming
        )

    @classmethod
    def from_log(
        cls, changes: Iterable[RuleChange], logged: Iterable[LogRow], stream: Stream, streams: Mapping[str, Stream],
        through: int | None, seed: Seed | None = None, declarations: Declarations | None = None,
    ) -> Schedule:  # fmt: skip
        """Finds the schedule by which `changes` were logged.

        Changes take effect in order. A change that was not logged because it has no effect on this stream takes effect
        with the next one that was.

        Args:
            changes: All changes of the rules table.
            logged: The stream's rows of rule_log; rows with the same arrival in the order in which they were written.
            stream: The stream.
            streams: All streams, by name.
            through: The last arrival in the output tables; None if they are empty.
            seed: See `Schedule`.
            declarations: The declarations of the stream; None if it had only one.
        """
        declarations = declarations or Declarations.of(stream)
        rows, ordered = list(logged), order_changes(replace(each, gate="") for each in changes)
        candidates = _list_last_pieces(ordered, stream.name)
        while True:
            last = dict(rows_of_version[-1] for rows_of_version in candidates.values())
            schedule, left = cls._follow_log(ordered, last, rows, stream, streams, declarations)
            # The log has these versions in force, but not through this row. So an earlier row brought them into force.
            early = {
                rule_id: (rule_id, version)
                for (rule_id, version), listed in candidates.items()
                if len(listed) > 1 and (rule_id, version) in left and listed[-1][0] not in schedule.warming
            }
            if not early:
                return replace(schedule, through=through, seed=seed)
            for version in early.values():
                candidates[version].pop()

    @classmethod
    def _follow_log(
        cls, ordered: Sequence[RuleChange], pieces: Mapping[_Slot, Piece], logged: Sequence[LogRow], stream: Stream,
        streams: Mapping[str, Stream], declarations: Declarations,
    ) -> tuple[Schedule, set[tuple[str | None, int | None]]]:  # fmt: skip
        """Finds the schedule, assuming that `pieces` brought their versions into force.

        Returns the schedule, and the versions with log rows that it does not explain.
        """
        times = _list_times(logged)
        reads = _list_reads(times)
        book, reached = RuleBook(stream, streams), arrival_number(None)
        arrivals: dict[int, int | None] = {}
        unlogged: list[int] = []
        refused, unexplained = set[_Slot](), set[str]()
        warming, warmed = set[_Slot](), list[Warmed]()
        warm_ids = {rule_id for rule_id, _, action in times if action == WARMING}
        for change in ordered:
            # The declaration that applied when the row was read decides whether it is accepted.
            book.declare(declarations.after(_find_read(reads, change, reached)).stream)
            if _was_refused(change, book, times, reached):
                refused.add(change.slot)
                change = replace(change, gate=APPROVAL)  # noqa: PLW2901 - the same row as the stream saw it
            piece = pieces.get(change.slot)
            if piece is not None:
                is_warm = _was_last(piece, book, times, reached)
            elif change.rule_id == "*":
                is_warm = change.status == LISTS and _was_announced(change, times, reached)
            else:
                is_warm = change.rule_id in warm_ids and _was_warmed(change, book, times, reached)
            if is_warm:
                warming.add(change.slot)
            if piece is not None and is_warm and not piece.is_cold:
                entry = book.warming[piece.rule_id, piece.version].entry
                listed = times[entry.rule_id, entry.version, ACTIONS[entry.status]]
                arrival = min(time for time, _ in listed if time >= reached)
                warmed.append(Warmed(arrival, entry.rule_id, entry.version, entry.status, entry.document))
            log = obey(book, replace(change, warms=is_warm), None)
            at = [_take_first(times.get((row.rule_id, row.version, row.action)), reached) for row in log]
            if change.commit < 0:
                unlike = zip(log, at, strict=True)
                unexplained |= {str(row.rule_id) for row, time in unlike if time is None and row.action in _OBEYED}
            unlogged.append(change.commit)
            if known := [each for each in at if each is not None]:
                reached = max(reached, *known)
                arrivals.update(dict.fromkeys(unlogged, None if reached == arrival_number(None) else reached))
                unlogged = []
        left = {
            (rule_id, version) for (rule_id, version, action), listed in times.items() if listed and action in _OBEYED
        }
        unexplained |= {str(rule_id) for rule_id, _ in left}
        schedule = cls(
            None, arrivals, None, frozenset(refused), declarations.to_rows(), frozenset(unexplained), warmed,
            frozenset(warming),
        )  # fmt: skip
        return schedule, left


def obey(book: RuleBook, change: RuleChange, arrival: int | None) -> list[LogRow]:
    """Applies a logged change and returns its log rows; the last piece of a history brings its version into force."""
    log, commands = book.apply([change], arrival)
    for command in commands:
        if command.piece is not None and command.warms:
            row, _ = book.finish_warming(
                (command.piece.rule_id, command.piece.version), arrival, describe_start(command.piece)
            )
            log.append(row)
    return log


def open_warmed(state: ShardState, warmed: Iterable[Warmed]) -> None:
    """Lets versions gather rows silently in a state, until their row of the rules table brings them into force."""
    for each in warmed:
        state.book.open_warming(each.rule_id, each.version, each.status, each.document)


def restore_changes(rows: Iterable[RuleChange], logged: Iterable[LogRow]) -> list[RuleChange]:
    """Turns rows of the rules table whose commits are gone into insertions, in the order of the log.

    Each gets a negative commit of its own. Rows that the log does not name were never read, and are left out.
    `Schedule.unexplained` then names the rules that also had other rows, which were deleted or updated later.
    """
    first: dict[tuple[str | None, int | None], int] = {}
    for row in logged:
        if row.action in _OBEYED or row.action in ("rejected", WARMING):
            slot, arrival = (row.rule_id, row.version), arrival_number(row.arrival)
            first[slot] = min(arrival, first.get(slot, arrival))

    def rank(row: RuleChange) -> tuple[float, float]:
        return first.get((row.rule_id, row.version), -inf), inf if row.version is None else row.version

    ids = {rule_id for rule_id, _ in first}
    read = (row for row in rows if (row.rule_id, row.version) in first or (row.version is None and row.rule_id in ids))
    ordered = sorted(read, key=rank)
    return [replace(row, change="insert", commit=at - len(ordered)) for at, row in enumerate(ordered)]


@dataclass(frozen=True)
class WaitingChange:
    """A rule change that takes effect once commit `after` of the events, or a later one, has been judged."""

    change: RuleChange
    after: int


def judge_batch(
    evaluator: Evaluator, state: ShardState, batch: Batch, waiting: Sequence[WaitingChange],
    declarations: Declarations | None = None,
) -> tuple[Output, list[WaitingChange]]:  # fmt: skip
    """Judges a batch like `Evaluator.process`, but rules and the declaration of the stream may change within it.

    `declarations` is None if the stream had only one. Returns the output, and the changes that still wait.
    """
    output, declarations = Output(), declarations or Declarations.of(evaluator.stream)
    commits = sorted(batch.marks)
    ordered = sorted(waiting, key=lambda each: each.after)
    cuts = {bisect_right(commits, after) for after in (*(each.after for each in ordered), *declarations.cuts)}
    edges = sorted({0, *cuts, len(commits)})
    ranges = CommitRanges(batch)
    evaluator = declare(evaluator, state, declarations.after(state.last_commit), output)
    if batch.changes:
        evaluator.process(state, _without_events(batch, batch.changes), output)
    for start, end in pairwise(edges):
        evaluator, ordered = _apply_due(evaluator, state, batch, ordered, declarations, commits[start] - 1, output)
        if output.covered:
            evaluator.process(state, ranges.select(commits[start], commits[end - 1] + 1), output)
    if output.covered and state.last_commit is not None:
        _, ordered = _apply_due(evaluator, state, batch, ordered, declarations, state.last_commit, output)
    return output, ordered


def declare(evaluator: Evaluator, state: ShardState, declared: Declared, output: Output) -> Evaluator:
    """Switches a shard to a declaration of its stream, and logs the declaration if it is new to the shard.

    Returns the evaluator that uses it.
    """
    state.book.declare(declared.stream)
    if declared.mark and state.declared != declared.mark:
        state.declared = declared.mark
        # The commit before the change may be one that is not read now.
        known = arrival_number(state.last_commit) >= arrival_number(declared.after)
        after = state.last_commit if known else declared.after
        output.log.append(LogRow(declared.stream.name, None, None, "declared", declared.text, after))
    return evaluator if evaluator.stream == declared.stream else replace(evaluator, stream=declared.stream)


def pack_waiting(waiting: Sequence[WaitingChange]) -> str:
    """Encodes the changes as text, for the state store."""
    return json.dumps([[vars(each.change), each.after] for each in waiting], separators=(",", ":"))


def unpack_waiting(text: str) -> list[WaitingChange]:
    """Decodes the output of `pack_waiting`."""
    return [WaitingChange(RuleChange(**change), after) for change, after in json.loads(text)]


def _apply_due(
    evaluator: Evaluator, state: ShardState, batch: Batch, waiting: list[WaitingChange], declarations: Declarations,
    judged: int, output: Output,
) -> tuple[Evaluator, list[WaitingChange]]:  # fmt: skip
    """Applies the changes that are due once all commits up to `judged` have been judged.

    Returns the evaluator to continue with, and the remaining changes.
    """
    judged = judged if state.last_commit is None else max(judged, state.last_commit)
    due = [each for each in waiting if each.after <= judged]
    for after, group in groupby(due, key=lambda each: each.after):
        if output.covered:
            evaluator = declare(evaluator, state, declarations.after(after), output)
            known = len(output.log)
            evaluator.process(state, _without_events(batch, [each.change for each in group]), output)
            # The commit before the change may be one that is not read now.
            output.log[known:] = [
                row if row.arrival is not None and row.arrival >= after else replace(row, arrival=after)
                for row in output.log[known:]
            ]
    if output.covered:
        evaluator = declare(evaluator, state, declarations.after(judged), output)
    return evaluator, waiting[len(due) :]


def _without_events(batch: Batch, changes: list[RuleChange]) -> Batch:
    return Batch(batch.events.take(np.empty(0, dtype=np.int64)), changes=changes, coverage=batch.coverage)


def _list_times(logged: Iterable[LogRow]) -> dict[_Logged, list[_Time]]:
    """Lists the arrivals of each rule change in the log, ascending."""
    times: dict[_Logged, list[_Time]] = {}
    for place, row in enumerate(logged):
        if row.action not in NO_CHANGES and row.action != "declared":
            times.setdefault((row.rule_id, row.version, row.action), []).append((arrival_number(row.arrival), place))
    for listed in times.values():
        listed.sort()
    return times


def _list_reads(times: Mapping[_Logged, list[_Time]]) -> dict[tuple[str | None, int | None], list[int]]:
    """Lists the arrivals at which rows of a rule's version were read, whether or not they took effect."""
    reads: dict[tuple[str | None, int | None], list[int]] = {}
    for (rule_id, version, _), listed in times.items():
        reads.setdefault((rule_id, version), []).extend(arrival for arrival, _ in listed)
    return reads


def _find_read(reads: Mapping[tuple[str | None, int | None], Sequence[int]], change: RuleChange, reached: int) -> int:
    """Finds the arrival at which a change was read; `reached` if the log does not have it."""
    listed = reads.get((change.rule_id, change.version), ())
    return min((time for time in listed if time >= reached), default=reached)


def _was_refused(change: RuleChange, book: RuleBook, times: Mapping[_Logged, list[_Time]], reached: int) -> bool:
    """Returns whether the log shows that the gate rejected a change, rather than that it took effect without a gate."""
    if change.status != "active" or (change.rule_id, change.version, "rejected") not in times:
        return False
    with_gate, without = (book.preview(replace(change, gate=gate)) for gate in (APPROVAL, ""))
    if with_gate == without:
        return False
    return _find_first(with_gate, times, reached) < _find_first(without, times, reached)


def _list_last_pieces(changes: Iterable[RuleChange], stream: str) -> dict[tuple[str, int], list[tuple[_Slot, Piece]]]:
    """Lists, by version, the rows with the last piece of its history; one of them may have brought it into force.

    A version has several if its warm-up was restarted, for example by another evaluation. If a driver was killed, it
    may have written the row of one history twice, and only the first counts.
    """
    found: dict[tuple[str, int], list[tuple[_Slot, Piece]]] = {}
    known = set[tuple[str, int, str, int]]()
    for change in changes:
        if change.rule_id != "*" or change.status != WARM or change.change != "insert":
            continue
        if change.author not in (None, AUTHOR):
            continue
        # A person may have written any text here.
        with suppress(ValueError, TypeError, LookupError, AttributeError, RecursionError):
            document = json.loads(change.document or "")
            piece = Piece.from_document(document)
            history = (piece.rule_id, piece.version, piece.query, piece.through)
            if document["stream"] == stream and piece.is_last and history not in known:
                known.add(history)
                found.setdefault((piece.rule_id, piece.version), []).append((change.slot, piece))
    return found


def _was_warmed(change: RuleChange, book: RuleBook, times: Mapping[_Logged, list[_Time]], reached: int) -> bool:
    """Returns whether the log shows that a version began to warm up, rather than that it started without history."""
    warm, cold = (book.preview(replace(change, warms=warms)) for warms in (True, False))
    return warm != cold and _find_first(warm, times, reached) < _find_first(cold, times, reached)


def _was_last(piece: Piece, book: RuleBook, times: Mapping[_Logged, list[_Time]], reached: int) -> bool:
    """Returns whether the log shows that the version of a last piece of history came into force with it."""
    warming = book.warming.get((piece.rule_id, piece.version))
    if warming is None:
        return False
    action = ACTIONS[warming.entry.status]
    return any(time >= reached for time, _ in times.get((piece.rule_id, piece.version, action), []))


def _was_announced(change: RuleChange, times: Mapping[_Logged, list[_Time]], reached: int) -> bool:
    """Returns whether the log shows that a row's commit of lists took effect, rather than that the row was rejected.

    The result does not matter for a row that only repeats a commit, because it changes nothing.
    """
    obeyed, rejected = (
        min((time for time in times.get(("*", change.version, action), []) if time[0] >= reached), default=(inf, inf))
        for action in (LIST_CHANGED, "rejected")
    )
    return obeyed < rejected


def _find_first(log: Iterable[LogRow], times: Mapping[_Logged, list[_Time]], reached: int) -> tuple[float, float]:
    """Finds the first time from `reached` on at which the log has one of these rows; infinite if it has none."""
    listed = [times.get((row.rule_id, row.version, row.action), []) for row in log]
    return min((time for each in listed for time in each if time[0] >= reached), default=(inf, inf))


def _take_first(times: list[_Time] | None, reached: int) -> int | None:
    """Removes the first time from `reached` on and returns its arrival; None if there is none."""
    for at, (arrival, _) in enumerate(times or ()):
        if arrival >= reached:
            assert times is not None
            return times.pop(at)[0]
    return None


def _read_stored(type_: DataType, text: str | None) -> Any:
    return None if text is None else to_stored(type_, from_text(type_, text))

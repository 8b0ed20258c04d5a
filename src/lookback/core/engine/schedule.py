"""Schedules rule changes by arrival, so that each takes effect at its original place when state is rebuilt."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np

from lookback.core.engine.batch import Batch, CommitRanges
from lookback.core.engine.evaluation import Evaluator
from lookback.core.engine.output import Output
from lookback.core.rules.changes import MOVED, RETIRE_ALL, ROW_DELETED, RuleChange, order_changes
from lookback.core.rules.commands import COMMANDS, LIST_CHANGED, LISTS
from lookback.core.rules.gate import APPROVAL, REFUSAL
from lookback.core.rules.roles import WARMING, name_role
from lookback.core.rules.rulelog import ACTIONS, LogRow
from lookback.core.rules.versions import WARM, WITH_HISTORY, WITH_STATE, WITHOUT_HISTORY, Piece, describe_start
from lookback.core.state.featurestate import FeatureState
from lookback.core.state.shard import ShardState
from lookback.core.streams.alerts import Alert, AlertOrder
from lookback.core.streams.arrival import arrival_number
from lookback.core.streams.declaration import Stream
from lookback.core.streams.declarations import Declarations, Declared
from lookback.core.streams.events import compile_key
from lookback.core.streams.watermarks import Mark, Reached, find_highest, read_mark
from lookback.core.values.columns import from_text, from_values, to_stored, to_text
from lookback.core.values.keys import encode_keys
from lookback.core.values.times import parse_calendar_time, to_utc
from lookback.core.values.types import DataType

# Actions of rule_log that do not result from a row of the rules table.
NO_CHANGES = frozenset({"failed", "commit_cut", "session_closed", "revisions_limited", "delete_unmatched"})
# Actions of rule_log by which a version or a command took effect.
_OBEYED = frozenset(ACTIONS.values()) - {ACTIONS["draft"]} | frozenset(COMMANDS) | {LIST_CHANGED}
# By table, the action with which rule_log records the last commit whose rows retention has deleted.
DELETED = {"alerts": "alerts_deleted", "late_events": "late_events_deleted", "rule_log": "log_deleted"}
# By decision about a version that a command caused, not a row of its own, the status of the command.
_STATUS_OF_COMMAND = {WITH_HISTORY: WARM, WITHOUT_HISTORY: WARM, RETIRE_ALL: RETIRE_ALL}
STATUS_BY_ACTION = {action: status for status, action in ACTIONS.items()}
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
        high: The mark of all of them.
        raised: The role of a rule, the texts of a key by column (see `KeyPart`), and the event time of the last alert
            that the rule raised for that key, which may suppress later alerts.
    """

    high: Mark
    raised: Sequence[tuple[str, Mapping[str, str | None], int]] = ()

    def apply_to(self, state: ShardState, stream: Stream) -> None:
        """Writes the seed into a new state."""
        state.reached = Reached.by(self.high)
        for role, key, time in self.raised:
            names, fields = sorted(key), tuple(stream.fields.items())
            types = [stream.fields[name] if name in stream.fields else compile_key(name, fields).type for name in names]
            columns = [
                from_values(type_, [_read_stored(type_, key[name])]) for name, type_ in zip(names, types, strict=True)
            ]
            state.tables.raised(role, names).put(encode_keys(columns, 1).pair(0), time)

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
        high = find_highest(self.high)
        return high is not None and feature.since == high and (feature.floor is None or feature.floor < high)


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
            "through": self.through,
            "arrivals": arrivals,
            "seed": seed,
            "refused": refused,
            "declared": declared,
            "warmed": [list(each) for each in self.warmed],
            "warming": warming,
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Schedule:
        """Reads the output of `to_dict`; raises KeyError, TypeError or ValueError for anything else."""
        arrivals = {int(commit): None if after is None else int(after) for commit, after in document["arrivals"]}
        through, seed = document["through"], None
        if document["seed"] is not None:
            high, raised = document["seed"]
            seed = Seed(read_mark(high), [(role, dict(key), int(at)) for role, key, at in raised])
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
        cls,
        changes: Iterable[RuleChange],
        logged: Iterable[LogRow],
        through: int | None,
        declarations: Declarations,
        seed: Seed | None = None,
    ) -> Schedule:
        """Finds the schedule by which `changes` were logged.

        A change that was not logged, because it has no effect on this stream, takes effect with the next one that was.

        Args:
            changes: All changes of the rules table.
            logged: The stream's rows of rule_log.
            through: The last arrival in the output tables; None if they are empty.
            declarations: The declarations of the stream.
            seed: See `Schedule`.
        """
        ordered, rows = order_changes(changes), [row for row in logged if row.rules_commit is not None]
        reached = {row.rules_commit: row.arrival for row in rows}
        arrivals = dict[int, int | None]()
        for change in reversed(ordered):
            if change.commit in reached:
                arrivals[change.commit] = reached[change.commit]
            elif arrivals:
                arrivals.setdefault(change.commit, next(reversed(arrivals.values())))
        causes = list(find_causes(rows, ordered))
        begun, warmed = dict[tuple[str | None, int | None], RuleChange](), list[Warmed]()
        for row, cause in sorted(causes, key=lambda each: each[0].rules_commit or 0):
            version = (row.rule_id, row.version)
            if row.action == WARMING and cause is not None:
                begun[version] = cause
            elif row.decision == WITH_HISTORY and cause is not None and version in begun:
                arrival, status = arrival_number(row.arrival), STATUS_BY_ACTION[row.action]
                document = str(begun[version].document)
                warmed.append(Warmed(arrival, str(row.rule_id), int(row.version or 0), status, document))
        return cls(
            through,
            arrivals,
            seed,
            refused=frozenset(cause.slot for row, cause in causes if cause is not None and row.decision == REFUSAL),
            declared=declarations.to_rows(),
            unexplained=frozenset(str(row.rule_id) for row, cause in causes if cause is None and row.action in _OBEYED),
            warmed=warmed,
            warming=frozenset(cause.slot for row, cause in causes if cause is not None and _is_warm(row)),
        )


def open_warmed(state: ShardState, warmed: Iterable[Warmed]) -> None:
    """Lets versions gather rows silently in a state, until their row of the rules table brings them into force."""
    for each in warmed:
        state.book.open_warming(each.rule_id, each.version, each.status, each.document)


def find_causes(rows: Iterable[LogRow], changes: Iterable[RuleChange]) -> Iterator[tuple[LogRow, RuleChange | None]]:
    """Yields each row of rule_log that names a commit, with the change that caused it; None if the change is not there.

    Args:
        rows: Rows of rule_log; those of one commit in the order in which they took effect.
        changes: The changes of the rules table, in that order too. One without a version got one from the stream.
    """
    groups = dict[_Slot, list[RuleChange]]()
    for change in changes:
        groups.setdefault(change.slot, []).append(change)
        if change.rule_id == "*" and change.version is not None:
            groups.setdefault((change.commit, "*", None), []).append(change)
    # By slot, the last row that a change of it caused, and how many of its changes come up to that one.
    reached = dict[_Slot, tuple[LogRow, int]]()
    for row in rows:
        if row.rules_commit is None:
            continue
        is_by_command = row.decision in _STATUS_OF_COMMAND
        rule_id, version = ("*", None) if is_by_command else (row.rule_id, row.version)
        cause = None
        for slot in dict.fromkeys(((row.rules_commit, rule_id, version), (row.rules_commit, rule_id, None))):
            fitting = [each for each in enumerate(groups.get(slot, ()), 1) if _fits(each[1], row)]
            last, used = reached.get(slot, (row, 0))
            # A change may cause two rows about its version: that it goes on to warm up, and its new status.
            is_same = last.version == row.version and "rejected" not in (last.action, row.action)
            left = [each for each in fitting if each[0] > used or (each[0] == used and is_same)]
            if left:
                at, cause = left[0]
                reached[slot] = row, at
                break
            cause = fitting[-1][1] if fitting else cause
        yield row, cause


def _fits(change: RuleChange, row: LogRow) -> bool:
    """Returns whether a change of the slot that a row of rule_log names may have caused the row."""
    if row.decision == ROW_DELETED or change.change == "delete":
        return row.decision == ROW_DELETED and change.change == "delete"
    if row.action == WARMING:
        return change.status in WITH_STATE
    if row.action == LIST_CHANGED:
        return change.status == LISTS
    if row.action == "rejected" or row.decision == MOVED:
        return True
    wanted = _STATUS_OF_COMMAND.get(str(row.decision), row.action)
    return wanted in (change.status, ACTIONS.get(str(change.status)))


def restore_changes(rows: Iterable[RuleChange], logged: Sequence[LogRow], start: int) -> list[RuleChange]:
    """Turns rows of the rules table, as they were before the commit `start`, into insertions of the commits in the log.

    Rows that the log does not name were never read, and are left out. A row that has changed since the log named it
    becomes the first of all. `Schedule.unexplained` then names the rules that also had other rows, which were deleted
    or updated later.
    """
    left, restored = dict[str | None, list[RuleChange]](), list[RuleChange]()
    for row in rows:
        left.setdefault(row.rule_id, []).append(row)
    lost = [row for row in logged if row.rules_commit is not None and row.rules_commit < start]
    lost = [row for row in lost if row.action in _OBEYED or row.action in ("rejected", WARMING)]
    # A row that was rejected may have taken effect later.
    for log in sorted(lost, key=lambda log: log.action == "rejected"):
        listed = left.get("*" if log.decision in _STATUS_OF_COMMAND else log.rule_id, [])
        found = next((each for each in listed if _explains(each, log)), None)
        if found is not None:
            listed.remove(found)
            restored.append(replace(found, change="insert", commit=int(log.rules_commit or 0)))
    obeyed = {(row.rule_id, row.version) for row in lost if row.action in _OBEYED and row.rule_id != "*"}
    changed = [each for listed in left.values() for each in listed if (each.rule_id, each.version) in obeyed]
    return [*(replace(each, change="insert", commit=-1) for each in changed), *restored]


def _explains(row: RuleChange, logged: LogRow) -> bool:
    """Returns whether a row of the rules table, as it is now, may have caused a row of rule_log."""
    if row.rule_id == "*":
        return _is_command_of(row, logged)
    if logged.decision == ROW_DELETED or row.version not in (None, logged.version):
        return False
    is_same = ACTIONS.get(str(row.status)) == logged.action
    return is_same or logged.decision == MOVED or logged.action in ("rejected", WARMING)


def _is_command_of(row: RuleChange, logged: LogRow) -> bool:
    """Returns whether a command may have caused a row of rule_log."""
    # A person may have written any text here.
    with suppress(ValueError, TypeError, LookupError, AttributeError, RecursionError):
        document = json.loads(row.document or "{}")
        if document.get("stream") not in (None, logged.stream):
            return False
        if row.status == WARM:
            piece = Piece.from_document(document)
            is_own = (piece.rule_id, piece.version) == (logged.rule_id, logged.version)
            return piece.is_last and is_own and logged.decision == describe_start(piece)[1]
        if row.status == LISTS:
            return bool(logged.action == LIST_CHANGED and document["commit"] == logged.version)
        if row.status == "advance":
            time = to_text(to_utc(parse_calendar_time(document.get("time"))))
            return logged.action == "advance" and time == logged.decision
        return row.status == logged.action
    return False


@dataclass(frozen=True)
class WaitingChange:
    """A rule change that takes effect once commit `after` of the events, or a later one, has been judged."""

    change: RuleChange
    after: int


def judge_batch(
    evaluator: Evaluator,
    state: ShardState,
    batch: Batch,
    waiting: Sequence[WaitingChange],
    declarations: Declarations | None = None,
) -> tuple[Output, list[WaitingChange]]:
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
        row = LogRow(declared.stream.name, None, None, "declared", declared.text, after, decision=declared.text)
        output.log.append(row)
    return evaluator if evaluator.stream == declared.stream else replace(evaluator, stream=declared.stream)


def pack_waiting(waiting: Sequence[WaitingChange]) -> str:
    """Encodes the changes as text, for the state store."""
    return json.dumps([[vars(each.change), each.after] for each in waiting], separators=(",", ":"))


def unpack_waiting(text: str) -> list[WaitingChange]:
    """Decodes the output of `pack_waiting`."""
    return [WaitingChange(RuleChange(**change), after) for change, after in json.loads(text)]


def _apply_due(
    evaluator: Evaluator,
    state: ShardState,
    batch: Batch,
    waiting: list[WaitingChange],
    declarations: Declarations,
    judged: int,
    output: Output,
) -> tuple[Evaluator, list[WaitingChange]]:
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


def _is_warm(row: LogRow) -> bool:
    """Returns whether a row of rule_log is about a warm-up that began or ended, or a commit of lists."""
    return row.action in (WARMING, LIST_CHANGED) or row.decision in (WITH_HISTORY, WITHOUT_HISTORY)


def _read_stored(type_: DataType, text: str | None) -> Any:
    return None if text is None else to_stored(type_, from_text(type_, text))

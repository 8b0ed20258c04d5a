"""The evaluator: events and rule changes in, verdicts out, exactly as if events came one at a time.

One evaluator serves the stream's shards, the harness and replay. It holds no clock and no files; what it remembers is
a ShardState. All arithmetic is by column over a whole batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from lookback.core.judging.lookbacks import delete_judged, forget_other_versions, judge_lookback
from lookback.core.judging.measuring import group_keys, select_kept, select_values
from lookback.core.judging.segment import RuleRun, Segment, Timeline, merge_failures
from lookback.core.judging.sequences import delete_from_sequences, judge_sequences
from lookback.core.judging.sessions import delete_from_sessions, forget_measures, judge_sessions
from lookback.core.judging.tiled import forget_keys, judge_tiled
from lookback.core.judging.verdicts import are_memories
from lookback.core.rules.compiled import JUDGED, CompiledRule, Feature
from lookback.core.rules.coverage import Coverage, needed_by
from lookback.core.rules.quarantine import NOT_THE_RULES, describe_error
from lookback.core.rules.rulebook import Command, Entry, LogRow, RuleChange, order_changes
from lookback.core.state.shard import FeatureState, ShardState
from lookback.core.streams.alerts import Alert, Failure, LateEvent, Place
from lookback.core.streams.declaration import Stream
from lookback.core.streams.events import Events, empty_events
from lookback.core.values.columns import Mask
from lookback.core.values.keys import Int64s, Keys
from lookback.core.values.windows import LOOKBACK, SEQUENCE, SESSION, SLIDING, TUMBLING

# Stands for "no watermark yet"; below every time that can be written.
_NEVER = -(2**62)
# Who judges rules of each kind.
JUDGES: dict[str, Callable[[RuleRun], None]] = {
    LOOKBACK: judge_lookback,
    TUMBLING: judge_tiled,
    SLIDING: judge_tiled,
    SESSION: judge_sessions,
    SEQUENCE: judge_sequences,
}
# Who takes deleted events out of what a rule has of its own.
DELETERS: dict[str, Callable[[ShardState, CompiledRule, Keys, Events, Mask], None]] = {
    LOOKBACK: delete_judged,
    SESSION: delete_from_sessions,
    SEQUENCE: delete_from_sequences,
}
# Which values of a table that release 0.1.0 left are a rule's own, by its kind: there all kinds shared one table.
IS_OWN: dict[str, Callable[[Any], bool]] = {
    LOOKBACK: lambda value: isinstance(value, dict),
    TUMBLING: partial(are_memories, length=5),
    SLIDING: partial(are_memories, length=5),
    SESSION: partial(are_memories, length=7),
}
_Rules = Sequence[tuple[Entry, CompiledRule]]


@dataclass
class Batch:
    """What a shard is given at once.

    events: inserted events of the shard, in any order; deleted: rows deleted, with the commit that deleted them.
    marks: every commit of the batch and its highest event time over all shards, None if no event of it counts.
    coverage: what was sent of the events; None for all.
    """

    events: Events
    deleted: Events | None = None
    marks: Mapping[int, int | None] = field(default_factory=dict)
    changes: list[RuleChange] = field(default_factory=list)
    coverage: Coverage | None = None


@dataclass
class Output:
    """What a batch brought. rows: of alerts, in order of their places; failures: one per rule and version.

    log: what every shard says alike; notes: rows for rule_log that this shard alone knows of. evaluated: per rule how many
    events it judged, of windows those that it counted.
    covered False: a rule came into force for which dispatch did not send what it needs; nothing was judged, and the
    batch must be given again with `required` sent.
    """

    rows: list[tuple[Place, Alert]] = field(default_factory=list)
    late: list[LateEvent] = field(default_factory=list)
    log: list[LogRow] = field(default_factory=list)
    notes: list[LogRow] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    evaluated: Counter[str] = field(default_factory=Counter)
    required: Coverage = field(default_factory=Coverage)
    covered: bool = True

    @property
    def alerts(self) -> list[Alert]:
        """The rows of alerts, in order (see `Place`)."""
        return [alert for _, alert in self.rows]


@dataclass(frozen=True)
class Evaluator:
    """Judges the events of `stream` that belong to `shard` of `shards`.

    automatic False: the watermark moves only by `advance` commands.
    """

    stream: Stream
    shard: int = 0
    shards: int = 1
    automatic: bool = True

    def process(self, state: ShardState, batch: Batch, output: Output | None = None) -> Output:
        """Applies the batch's rule changes, then judges its events; `state` is brought up to date.

        output: of what came before in the same batch; this is added to it.
        """
        output = Output() if output is None else output
        for change in order_changes(batch.changes):
            log, commands = state.book.apply([change], state.last_commit)
            output.log += log
            for command in commands:
                self._run_command(command, state, output)
        _stop_unreadable(state, output)
        in_force = state.book.in_force()
        # The same in all shards, whatever broke in one of them.
        output.required = needed_by(rule for _, rule in in_force)
        rules = _unbroken(state, in_force)
        if batch.coverage is not None and not batch.coverage.covers(output.required):
            output.covered = False
            return output
        _open_features(state, rules)
        if not batch.marks:
            return output
        _adopt_memories(state, rules)
        for entry, rule in rules:
            forget_other_versions(state, entry, rule)
        commits = np.array(sorted(batch.marks), dtype=np.int64)
        if state.last_commit is not None and int(commits[0]) <= state.last_commit:
            message = f"commit {int(commits[0])} was cut between two batches; its pieces are judged one after another"
            output.log.append(LogRow(self.stream.name, None, None, "commit_cut", message, int(commits[0])))
        for part in _parts(batch, commits):
            if part.deleted is not None:
                self._delete(state, rules, part.deleted, output)
            self._judge(state, _unbroken(state, rules), part, output)
        rules = _unbroken(state, rules)
        watermark = self._watermark(state)
        _forget_unused(state, rules, watermark)
        _forget_suppressed(state, rules, watermark)
        state.forget_resets()
        return output

    def advance(self, state: ShardState, time: int) -> Output:
        """Moves the watermark to `time` (microseconds), if that is later; what it reaches happens now."""
        output = Output()
        self._advance(state, time, output)
        return output

    def _advance(self, state: ShardState, time: int, output: Output) -> None:
        before = self._watermark(state)
        state.advanced = time if state.advanced is None else max(state.advanced, time)
        after = self._watermark(state)
        assert after is not None
        if state.last_commit is not None and (before is None or before < after):
            commits, marks = np.array([state.last_commit]), np.array([_NEVER if before is None else before])
            timeline = Timeline(commits, marks, np.array([after]))
            rules = _unbroken(state, state.book.in_force())
            _open_features(state, rules)
            _adopt_memories(state, rules)
            fields = {name for _, rule in rules for name in rule.fields}
            segment = Segment(self.stream, state, empty_events(self.stream, fields), timeline, self.shard, self.shards)
            _judge_segment(output, segment, rules)
        self._raise_floors(state)

    def _watermark(self, state: ShardState) -> int | None:
        return state.watermark(self.stream.max_out_of_orderness, automatic=self.automatic)

    def _judge(self, state: ShardState, rules: _Rules, batch: Batch, output: Output) -> None:
        """One run over events between two changes of anything else."""
        state.segments += 1
        segment = Segment(self.stream, state, batch.events, self._timeline(state, batch.marks), self.shard, self.shards)
        _judge_segment(output, segment, rules)
        highs = [high for high in batch.marks.values() if high is not None]
        if highs:
            state.high = max(highs) if state.high is None else max(state.high, *highs)
        state.last_commit = max(batch.marks)
        self._raise_floors(state)
        # The floors are those after the batch: of a long one, only what later windows can hold is kept.
        _keep_rows(output, segment, _unbroken(state, rules))

    def _timeline(self, state: ShardState, marks: Mapping[int, int | None]) -> Timeline:
        commits = np.array(sorted(marks), dtype=np.int64)
        highs = [_NEVER if state.high is None else state.high]
        highs += [_NEVER if (high := marks[int(commit)]) is None else high for commit in commits]
        highest = np.maximum.accumulate(np.array(highs, dtype=np.int64))
        if not self.automatic:
            highest = np.full(len(highest), _NEVER)
        watermarks = np.where(highest == _NEVER, _NEVER, highest - self.stream.max_out_of_orderness)
        if state.advanced is not None:
            watermarks = np.maximum(watermarks, state.advanced)
        return Timeline(commits, watermarks[:-1], watermarks[1:])

    def _raise_floors(self, state: ShardState) -> None:
        """Raises the floors to what the watermark says; `ShardState.drop_old` then forgets what lies below."""
        watermark = self._watermark(state)
        if watermark is None:
            return
        for feature in state.features.values():
            feature.pass_time(watermark)

    def _run_command(self, command: Command, state: ShardState, output: Output) -> None:
        if command.action == "advance" and command.time is not None:
            self._advance(state, command.time, output)
        elif command.action == "clear_state":
            for feature_id in list(state.features):
                state.drop_feature(feature_id)
            for name in [name for name in state.tables if name.startswith(JUDGED)]:
                state.drop_table(name)
            state.suppressed.clear()

    def _delete(self, state: ShardState, rules: _Rules, deleted: Events, output: Output) -> None:
        commit = int(deleted.commits[0])
        unmatched: set[tuple[str, int]] = set()
        for feature, users in _users(rules):
            with _contain_failure(output, state, users, commit):
                if self._delete_rows(state, feature, deleted):
                    unmatched.update((entry.rule_id, entry.version) for entry, _ in users)
        # All shards that meet one say the same: how keys are divided must not show.
        for rule_id, version in sorted(unmatched):
            output.notes.append(
                LogRow(self.stream.name, rule_id, version, "delete_unmatched", delete_text(commit), commit)
            )
        for entry, rule in _unbroken(state, rules):
            if rule.spec.kind in DELETERS:
                with _contain_failure(output, state, [(entry, rule)], commit):
                    keys = group_keys(rule.group_by, deleted)
                    DELETERS[rule.spec.kind](state, rule, keys, deleted, keys.shard(self.shards) == self.shard)

    def _delete_rows(self, state: ShardState, feature: Feature, deleted: Events) -> bool:
        """Takes the rows of deleted events out; what `ShardState.remove_rows` says of them."""
        keys = group_keys(feature.group_by, deleted)
        selected = select_kept(feature, deleted) & (keys.shard(self.shards) == self.shard)
        values = select_values(feature, deleted)
        return state.remove_rows(
            state.features[feature.feature_id],
            keys.take(selected),
            deleted.times[selected],
            None if values is None else values.values[selected],
        )


def _judge_segment(output: Output, segment: Segment, rules: _Rules) -> None:
    """Judges a segment by all rules. What breaks stops alone, and what it said of the segment is dropped."""
    commit = int(segment.timeline.commits[0])
    # Neighbours ask for the same windows; the places of rows do not depend on who is judged first.
    for entry, rule in sorted(rules, key=lambda each: each[1].asks):
        before = segment.take_snapshot(entry.rule_id)
        with _contain_failure(output, segment.state, [(entry, rule)], commit, partial(segment.restore, before)):
            JUDGES[rule.spec.kind](segment.start_run(entry, rule))
    forget_keys(segment.state, (rule for _, rule in rules), int(segment.timeline.after[-1]))
    gathered = segment.finish()
    output.rows += gathered.alerts
    output.late += gathered.late
    output.notes += gathered.notes
    output.evaluated.update(gathered.evaluated)
    output.failures = merge_failures([*output.failures, *gathered.failures])


def _keep_rows(output: Output, segment: Segment, rules: _Rules) -> None:
    """Adds what features keep of the events to the state."""
    for feature, users in _users(rules):
        with _contain_failure(output, segment.state, users, int(segment.timeline.commits[0])):
            segment.keep_rows(feature)


@contextmanager
def _contain_failure(
    output: Output, state: ShardState, rules: _Rules, commit: int, undo: Callable[[], None] | None = None
) -> Iterator[None]:
    """Keeps an unexpected exception within `rules`, which are judged no more here.

    Their state may be half changed by then: what is their own goes now, what no other rule shares with the batch. What
    they said before stays in the tables and is forgotten here: a version that broke never speaks again.
    """
    try:
        yield
    except NOT_THE_RULES:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, other rules and the stream go on
        if undo is not None:
            undo()
        reason = describe_error(error)
        for entry, rule in rules:
            state.book.stop(entry.rule_id)
            for name in (rule.store, rule.memory):
                state.drop_table(name)
            failure = Failure(entry.rule_id, entry.version, 0, "", (commit, 0), reason)
            output.failures = merge_failures([*output.failures, failure])


def _stop_unreadable(state: ShardState, output: Output) -> None:
    """Says once of each rule in force that it cannot be read any more."""
    for entry, problems in state.book.unreadable():
        if not entry.broken:
            state.book.stop(entry.rule_id)
            reason = f"a document that cannot be read any more: {problems}"
            failure = Failure(entry.rule_id, entry.version, 0, "", (state.last_commit or 0, 0), reason)
            output.failures = merge_failures([*output.failures, failure])


def _unbroken(state: ShardState, rules: _Rules) -> _Rules:
    """The rules that have not broken in this shard."""
    return [each for each in rules if not state.book.entries[each[0].rule_id].broken]


def _users(rules: _Rules) -> list[tuple[Feature, list[tuple[Entry, CompiledRule]]]]:
    """Each feature whose rows are kept as runs, with the rules that use it."""
    features: dict[str, Feature] = {}
    users: dict[str, list[tuple[Entry, CompiledRule]]] = {}
    for entry, rule in rules:
        for feature in rule.features:
            features[feature.feature_id] = feature
            users.setdefault(feature.feature_id, []).append((entry, rule))
    return [(feature, users[feature_id]) for feature_id, feature in features.items()]


def _open_features(state: ShardState, rules: _Rules) -> None:
    widths: dict[str, int] = {}
    for _, rule in rules:
        for name, width in rule.needs.items():
            widths[name] = max(width, widths.get(name, 0))
    for name, width in widths.items():
        state.features.setdefault(name, FeatureState(since=state.high)).width = width
    for _, rule in rules:
        for feature in rule.features:
            state.features[feature.feature_id].buckets = feature.buckets


def _adopt_memories(state: ShardState, rules: _Rules) -> None:
    for _, rule in rules:
        if rule.memory:
            state.adopt(rule.former_memory, rule.memory, IS_OWN[rule.spec.kind])


def _forget_unused(state: ShardState, rules: _Rules, watermark: int | None) -> None:
    used = {name for _, rule in rules for name in rule.needs}
    for name in [name for name in state.features if name not in used]:
        state.drop_feature(name)
    # What was written of windows is kept until it is due: its version may come back and write more.
    remembered = {rule.memory for _, rule in rules}
    for name in [name for name in state.tables if name not in used and name not in remembered]:
        if name.startswith(JUDGED):
            state.drop_table(name)
        else:
            state.drop_due(name, watermark)
    for _, rule in rules:
        if rule.store and rule.measures:
            forget_measures(state.table(rule.store), [measure.feature.feature_id for measure in rule.measures])


def _forget_suppressed(state: ShardState, rules: _Rules, watermark: int | None) -> None:
    suppress = {entry.rule_id: (rule.spec.suppress, rule.allowed_lateness) for entry, rule in rules}
    kept = {}
    for slot, keys in state.suppressed.items():
        span, lateness = suppress.get(slot[0], (None, 0))
        if span is not None:
            oldest = None if watermark is None else watermark - lateness - span
            kept[slot] = {key: at for key, at in keys.items() if oldest is None or at >= oldest}
    state.suppressed = {slot: keys for slot, keys in kept.items() if keys}


def _parts(batch: Batch, commits: Int64s) -> list[Batch]:
    """The batch cut at every commit that deletes rows: they are gone from that commit on."""
    if batch.deleted is None or not len(batch.deleted):
        return [Batch(batch.events, None, batch.marks)]
    cuts = np.unique(batch.deleted.commits)
    edges = [int(commits[0]), *(int(cut) for cut in cuts if cut > commits[0]), int(commits[-1]) + 1]
    parts = []
    for start, end in pairwise(edges):
        here = (batch.events.commits >= start) & (batch.events.commits < end)
        gone = batch.deleted.commits == start
        marks = {commit: high for commit, high in batch.marks.items() if start <= commit < end}
        deleted = batch.deleted.take(np.flatnonzero(gone)) if gone.any() else None
        parts.append(Batch(batch.events.take(np.flatnonzero(here)), deleted, marks))
    return parts


def delete_text(commit: int) -> str:
    """What rule_log says where a deleted event is not in a rule's windows with the values that it has now."""
    return (
        f"an event that commit {commit} deleted is not in the rule's windows with the values that it has now: it never counted "
        "there, or it was updated since it came, and what it came with counts until the windows have passed"
    )

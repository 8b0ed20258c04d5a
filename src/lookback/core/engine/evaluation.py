"""Evaluates batches of events and rule changes, with the same results as if events came one at a time.

A batch of three commits, the last of which also deletes a row; W is the watermark, with disorder of 5 minutes:

    commit        7        8        9
    latest    10:20    10:31    10:35      the highest event time
    W         10:10    10:15    10:26      before the commit: it decides which events are late
    part      1        1        2          each part: delete rows, judge events, move W, keep rows, drop old state

All changes of rules come before part 1. W is 10:30 at the end.

Read `Evaluator.process` first: the methods below are in the order in which it calls them. The stream's shards, the test
harness and replay all use this evaluator. It reads no clock and no files; its memory is a ShardState. All arithmetic is
by column over a whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from lookback.core.engine.batch import MAX_EVENTS, Batch, split_batch
from lookback.core.engine.deferral import (
    encode_events,
    find_pieces,
    has_deferred,
    list_no_events,
    mark_loaded,
    read_deferred,
    select_events,
)
from lookback.core.engine.output import Output
from lookback.core.engine.rulestate import (
    Rules,
    contain_failure,
    drop_stopped,
    forget_unused,
    list_features,
    open_states,
    stop_unreadable,
)
from lookback.core.engine.warming import ReadParcel, WindowHistory, list_lost, needs_history, open_features, take_over
from lookback.core.expressions.textsearch import prepare_search
from lookback.core.judging.answers import list_answers
from lookback.core.judging.lookbacks import delete_judged, forget_other_versions, judge_lookback
from lookback.core.judging.measuring import select_kept, select_values
from lookback.core.judging.rulerun import RuleRun, SelectKeys
from lookback.core.judging.segment import Segment, Timeline
from lookback.core.judging.sequences import delete_from_sequences, judge_sequences
from lookback.core.judging.sessions import delete_from_sessions, judge_sessions
from lookback.core.judging.tiled import TiledJudge
from lookback.core.rules.changes import RuleChange, order_changes
from lookback.core.rules.commands import NOT_BY_ENGINE, Command
from lookback.core.rules.compiled import WARMING_LANE, CompiledRule, Feature
from lookback.core.rules.coverage import find_coverage
from lookback.core.rules.roles import WARMING
from lookback.core.rules.rulelog import LogRow
from lookback.core.rules.versions import WARM, Entry, Piece, Warming, describe_warming
from lookback.core.state.shard import ShardState
from lookback.core.streams.alerts import MAX_EVIDENCE_IDS
from lookback.core.streams.declaration import Stream
from lookback.core.streams.events import Events, empty_events
from lookback.core.streams.flagged import FlagPlace
from lookback.core.streams.measured import MeasuredPlace
from lookback.core.streams.watermarks import Mark, pass_marks
from lookback.core.values.columns import Mask
from lookback.core.values.keys import Keys
from lookback.core.values.lists import KnownLists, Lists, ListSource
from lookback.core.values.times import NEVER
from lookback.core.values.windows import EVENT, LOOKBACK, SEQUENCE, SESSION, SLIDING, TUMBLING

# By kind, the function that judges a rule over a segment; `TiledJudge` judges the other kinds.
JUDGES: dict[str, Callable[[RuleRun], None]] = {
    EVENT: judge_lookback,
    LOOKBACK: judge_lookback,
    SESSION: judge_sessions,
    SEQUENCE: judge_sequences,
}
# By kind, the function that removes deleted events from the keyed tables of a rule.
DELETERS: dict[str, Callable[[ShardState, CompiledRule, Keys, Events, Mask, Lists], None]] = {
    LOOKBACK: delete_judged,
    SESSION: delete_from_sessions,
    SEQUENCE: delete_from_sequences,
}


@dataclass(frozen=True)
class Evaluator:
    """Judges the events of `stream` that belong to `shard` of `shards`.

    Attributes:
        stream: The stream.
        shard: The number of the shard.
        shards: The number of shards.
        automatic: If false, only `advance` commands move the watermark.
        flagging: Where rules that write no alerts record events, by rule_id. Lookback rules without suppress and revise
            record the events that would have raised alerts. Rules over other windows must be paused; they record the
            events that their windows count. With a MeasuredPlace, a lookback rule records the measures of every event
            that it judges, as of the event's arrival.
        max_evidence: How many events an alert of a sequence names.
        lists: Gives the contents of the lists that rules name, as of the commit that the state has reached.
        warms: Whether versions wait for the history of their windows.
        read_parcel: Reads the pieces of that history.
        knows_piece: Returns whether the driver has written a piece.
        query: The evaluation that the pieces must be for.
    """

    stream: Stream
    shard: int = 0
    shards: int = 1
    automatic: bool = True
    flagging: Mapping[str, FlagPlace | MeasuredPlace] = field(default_factory=dict)
    max_evidence: int = MAX_EVIDENCE_IDS
    lists: ListSource = field(default_factory=KnownLists)
    warms: bool = False
    read_parcel: ReadParcel | None = None
    knows_piece: Callable[[Piece], bool] = lambda _: True
    query: str = ""

    def process(self, state: ShardState, batch: Batch, output: Output | None = None) -> Output:
        """Applies the batch's rule changes, then judges its events and updates `state`.

        Adds the results to `output`, which may have those of earlier parts of the same batch.
        """
        output, batch = Output() if output is None else output, batch.net()
        self._apply_changes(state, batch.changes, output)
        judged = state.book.list_judged()
        if not _check_coverage(judged, batch, output):
            return output
        rules = drop_stopped(state, judged)
        if state.book.warming:
            self._begin_anew(state, output, list_lost(state))
        open_states(state, rules)
        if not batch.marks:
            return output
        for entry, rule in rules:
            if rule.spec.late == "revise":
                forget_other_versions(state, entry, rule)
        is_cut = self._note_cut_commit(state, batch, output)
        watermark = None
        for part in split_batch(batch):
            self._delete_events(state, rules, part, output)
            segment = self._judge_events(state, rules, part, output)
            watermark = self._pass_time(state, part.marks)
            _keep_rows(segment, drop_stopped(state, rules), output)
        forget_unused(state, drop_stopped(state, rules), watermark)
        if is_cut or batch.deleting:
            self._begin_anew(state, output, state.book.list_known_warming())
        return output

    # Changes ----------------------------------------------------------------------------------------------------------

    def _apply_changes(self, state: ShardState, changes: Sequence[RuleChange], output: Output) -> None:
        """Applies rule changes in order, each with its commands."""
        for change in order_changes(changes):
            log, commands = state.book.apply(
                [change], state.last_commit, partial(self._needs_history, state), self.lists.knows
            )
            output.log += log
            for command in commands:
                self._run_command(command, state, output)
        stop_unreadable(state, output)

    def _run_command(self, command: Command, state: ShardState, output: Output) -> None:
        if command.action == "advance" and command.time is not None:
            self.advance(state, command.time, output)
        elif command.action == "clear_state":
            state.clear()
            for warming in state.book.list_known_warming():
                state.book.change_warming(replace(warming, is_void=True))
        elif command.opened is not None:
            self._open_warming(command.opened, state)
        elif command.action == WARM and command.piece is not None:
            self._take_piece(command, command.piece, state, output)

    def advance(self, state: ShardState, time: int, output: Output | None = None) -> Output:
        """Moves the watermark to `time` (microseconds), if that is later, and judges what is due by then.

        Adds the results to `output`, if there is one.
        """
        output, before = Output() if output is None else output, self._watermark(state)
        state.advanced = time if state.advanced is None else max(state.advanced, time)
        after = self._watermark(state)
        assert after is not None
        rules = drop_stopped(state, state.book.list_judged())
        # Must happen before time passes: a version that has just come into force may keep rows for longer.
        open_states(state, rules)
        if state.last_commit is not None and (before is None or before < after):
            commits, watermarks = np.array([state.last_commit]), np.array([NEVER if before is None else before])
            timeline = Timeline(commits, watermarks, np.array([after]))
            events = empty_events(self.stream, {name for _, rule in rules for name in rule.fields})
            segment = self._segment(state, rules, events, timeline, output)
            self._judge(segment, rules, output)
        self._pass_time(state, {})
        return output

    # Warm-ups ---------------------------------------------------------------------------------------------------------

    def _needs_history(self, state: ShardState, rule: CompiledRule) -> bool:
        return self.warms and needs_history(state, rule, self._watermark(state))

    def _open_warming(self, warming: Warming, state: ShardState) -> None:
        state.book.change_warming(replace(warming, watermark=self._watermark(state)))
        rule = state.book.compile_warming(warming)
        if rule is not None:
            open_features(state, rule)

    def _take_piece(self, command: Command, piece: Piece, state: ShardState, output: Output) -> None:
        """Loads a piece of the history of a warming version; the last piece brings the version into force.

        `command.warms` is as in `RuleChange`: in a replay, the version already has its history.
        """
        warms, commit = command.warms, command.rules_commit
        warming = state.book.warming.get((piece.rule_id, piece.version))
        if warming is None or not warming.is_known or warms is False:
            return
        if warms is None:
            if not self._fits(piece, warming, state):
                return
            if not self.knows_piece(piece):
                output.log.append(
                    LogRow(self.stream.name, "*", None, "rejected", NOT_BY_ENGINE, state.last_commit, commit)
                )
                return
            if not self._load(piece, warming, state, output):
                return
        waiting = state.book.compile_warming(warming)
        row, entry = state.book.finish_warming(piece, state.last_commit, commit)
        output.log.append(row)
        if waiting is not None and not piece.is_cold:
            rule = next((rule for each, rule in state.book.in_force() if each is entry), None)
            if rule is not None:
                take_over(state, waiting, rule)

    def _fits(self, piece: Piece, warming: Warming, state: ShardState) -> bool:
        """Returns whether a piece is the next one of a version's history."""
        if piece.query != self.query or warming.begun is None or self.read_parcel is None:
            return False
        # A history may end with commits without events, as long as no later commit has been judged.
        ends = piece.through == warming.begun or (state.last_commit == warming.begun <= piece.through)
        return ends and (piece.is_cold or piece.piece == warming.loaded + 1)

    def _load(self, piece: Piece, warming: Warming, state: ShardState, output: Output) -> bool:
        """Loads a piece. Returns whether it is the last one."""
        rule = state.book.compile_warming(warming)
        if rule is not None and not piece.is_cold and not warming.is_void:
            assert self.read_parcel is not None
            # The pieces divide the keys of a shard as a larger number of shards would.
            content = self.read_parcel(piece.parcel, self.shard + self.shards * (piece.piece - 1))
            WindowHistory.decode(content, piece.parcel).load(state, rule)
        warming = replace(warming, loaded=piece.piece, pieces=piece.pieces)
        state.book.change_warming(warming)
        if rule is not None and not piece.is_cold and has_deferred(state, warming.entry, rule):
            rules = drop_stopped(state, [(warming.silence(rule), rule)])
            with contain_failure(output, state, rules, state.last_commit or 0):
                for entry, _ in rules:
                    self._catch_up(state, entry, rule, piece)
        return piece.is_last

    def _catch_up(self, state: ShardState, entry: Entry, rule: CompiledRule, piece: Piece) -> None:
        """Judges the deferred events of the keys whose history has just been loaded, up to the current watermark."""
        feature = state.features[rule.store]
        # The floor has risen while these events waited. When they arrived, all rows that they need were above it.
        floor, feature.floor = feature.floor, None

        def select(keys: Keys) -> Mask:
            is_own: Mask = find_pieces(keys, self.shards, piece.pieces) == piece.piece
            return is_own

        pages, end = state.deferred.read(rule.store), NEVER
        for events, timeline in read_deferred(pages, rule, self.stream, select, MAX_EVENTS):
            self._judge_in_silence(state, entry, rule, events, timeline, select)
            end = timeline.end
        watermark = self._watermark(state)
        if state.last_commit is not None and watermark is not None:
            now = Timeline(*(np.array([each]) for each in (state.last_commit, end, watermark)))
            self._judge_in_silence(state, entry, rule, list_no_events(rule, self.stream), now, select)
        feature.floor = floor

    def _begin_anew(self, state: ShardState, output: Output, versions: Sequence[Warming]) -> None:
        """Restarts the warm-up of versions, so that their history ends later and reflects the latest deletes.

        This is also needed if a commit was split between two batches, because a history consists of whole commits.
        """
        for warming in versions:
            if not warming.is_replayed:
                anew = replace(warming, begun=state.last_commit, loaded=0, pieces=0, is_void=False)
                self._open_warming(anew, state)
                row = LogRow(self.stream.name, *warming.key, WARMING, describe_warming(anew.begun), state.last_commit)
                output.log.append(row)

    # Events and deletes -----------------------------------------------------------------------------------------------

    def _note_cut_commit(self, state: ShardState, batch: Batch, output: Output) -> bool:
        """Returns whether the first commit was split between two batches, and logs it if so."""
        first = int(min(batch.marks))
        is_cut = state.last_commit is not None and first <= state.last_commit
        if is_cut:
            message = f"commit {first} was cut between two batches; its pieces are judged one after another"
            output.log.append(LogRow(self.stream.name, None, None, "commit_cut", message, first))
        return is_cut

    def _delete_events(self, state: ShardState, rules: Rules, part: Batch, output: Output) -> None:
        """Removes the part's deleted events from the rows of features, and from the keyed tables of rules."""
        if part.deleted is None:
            return
        deleted, commit, lists = part.deleted, int(part.deleted.commits[0]), self._read_lists(state, rules)
        unmatched: set[tuple[str, int]] = set()
        for feature, users in list_features(rules):
            with contain_failure(output, state, users, commit):
                if self._delete_rows(state, feature, deleted, lists):
                    unmatched.update(
                        (entry.rule_id, entry.version) for entry, rule in users if rule.lane < WARMING_LANE
                    )
        # One row no matter how many shards have such an event: the output must not depend on the number of shards.
        message = (
            f"commit {commit} deleted an event that is not in the rule's windows with its current values: either it "
            "never counted there, or it was updated after it arrived, and its original values count until the windows "
            "have passed"
        )
        for rule_id, version in sorted(unmatched):
            output.notes.append(LogRow(self.stream.name, rule_id, version, "delete_unmatched", message, commit))
        for entry, rule in drop_stopped(state, rules):
            if rule.spec.kind in DELETERS:
                with contain_failure(output, state, [(entry, rule)], commit):
                    for fields, _ in rule.routes:
                        keys = deleted.find_keys(fields)
                        is_own = keys.shard(self.shards) == self.shard
                        DELETERS[rule.spec.kind](state, rule, keys, deleted, is_own, lists)

    def _delete_rows(self, state: ShardState, feature: Feature, deleted: Events, lists: Lists) -> bool:
        """Removes the rows of deleted events, no matter what the lists contained when the rows were kept.

        Returns whether an event that must have been kept was not found, although there is a row with its key and time
        and another value. Then the event was updated after it was judged, or the row belongs to another event.
        """
        keys, name = deleted.find_keys(feature.group_by), feature.feature_id
        left = np.flatnonzero(keys.shard(self.shards) == self.shard)
        was_kept = np.ones(len(deleted), dtype=bool)
        for answered in list_answers(deleted, feature.memberships, lists):
            is_kept, values = select_kept(feature, answered), select_values(feature, answered)
            was_kept &= is_kept
            at = left[is_kept[left]]
            part = None if values is None else values.values[at]
            missing = state.windows.remove_rows(name, keys.take(at), deleted.times[at], part)
            left = np.setdiff1d(left, np.delete(at, missing))
        left = left[was_kept[left]]
        return state.windows.has_rows_at(name, keys.take(left), deleted.times[left])

    def _judge_events(self, state: ShardState, rules: Rules, part: Batch, output: Output) -> Segment:
        """Judges the events of a part by all rules that have not stopped."""
        state.windows.segments += 1
        timeline = self._timeline(state, part.marks)
        segment = self._segment(state, drop_stopped(state, rules), part.events, timeline, output)
        self._judge(segment, rules, output)
        # The commit of a command's segment was judged before, perhaps by other versions, and is not counted again.
        output.taken.update(segment.gathered.taken)
        return segment

    def _judge(self, segment: Segment, rules: Rules, output: Output) -> None:
        """Judges a segment by the rules that have not stopped; defers events of warming rules if necessary.

        A rule that fails stops alone, and its results of this segment are lost.
        """
        state, commit = segment.state, int(segment.timeline.commits[0])
        judged = list[tuple[Entry, CompiledRule]]()
        for entry, rule in drop_stopped(state, rules):
            if has_deferred(state, entry, rule):
                with contain_failure(output, state, [(entry, rule)], commit):
                    self._judge_or_defer(segment, entry, rule)
            else:
                judged.append((entry, rule))
        tiled = TiledJudge()
        judges = {**JUDGES, TUMBLING: tiled.judge, SLIDING: tiled.judge}
        # Sorted so that adjacent rules measure the same windows; the order of alerts does not depend on the order of
        # judging.
        for entry, rule in sorted(judged, key=lambda each: each[1].sharing_key):
            with contain_failure(output, state, [(entry, rule)], commit):
                rule_run = RuleRun(segment, entry, rule)
                judges[rule.spec.kind](rule_run)
                rule_run.finish()
        if any(rule.presence is not None for _, rule in judged):
            tiled.finish()
        gathered = segment.finish()
        output.add_rows(gathered.alerts)
        output.late += gathered.late
        output.notes += gathered.notes
        output.evaluated.update(gathered.evaluated)
        output.failures += gathered.failures
        output.flagged += gathered.flagged
        output.measured += gathered.measured

    def _judge_or_defer(self, segment: Segment, entry: Entry, rule: CompiledRule) -> None:
        """Judges the events whose keys have their history, silently, and defers the remaining events."""
        state, rule_run = segment.state, RuleRun(segment, entry, rule)
        warming = state.book.warming[entry.rule_id, entry.version]
        is_loaded = partial(mark_loaded, warming, self.shards)
        ready, left = select_events(rule_run, is_loaded)
        if left.any():
            state.deferred.add(rule.store, encode_events(rule_run, left), int(left.sum()))
        if warming.loaded:
            self._judge_in_silence(state, entry, rule, segment.events.take(ready), segment.timeline, is_loaded)
        rule_run.finish()

    def _judge_in_silence(
        self,
        state: ShardState,
        entry: Entry,
        rule: CompiledRule,
        events: Events,
        timeline: Timeline,
        select: SelectKeys,
    ) -> None:
        """Judges events by a warming version and discards the output, which is reported when events arrive."""
        segment = Segment(self.stream, state, events, timeline, self.shard, self.shards)
        JUDGES[rule.spec.kind](RuleRun(segment, replace(entry, is_unseen=True), rule, select))

    def _segment(self, state: ShardState, rules: Rules, events: Events, timeline: Timeline, output: Output) -> Segment:
        """Makes a segment, with its events looked up in the lists that the rules name."""
        lists = self._read_lists(state, rules)
        for entry, rule in rules:
            if rule.memberships:
                with contain_failure(output, state, [(entry, rule)], int(timeline.commits[0])):
                    events = events.look_up(rule.memberships, lists)
        # Only event rules evaluate a condition just once.
        conditions = tuple(rule.where for _, rule in rules if rule.spec.kind == EVENT and rule.where is not None)
        search = prepare_search(conditions)
        if search is not None and len(events):
            events.search(search)
        return Segment(
            self.stream, state, events, timeline, self.shard, self.shards, self.flagging, self.max_evidence, lists
        )

    def _read_lists(self, state: ShardState, rules: Rules) -> Lists:
        """Reads the lists that the rules name, in the version that is in force."""
        names = frozenset[str]().union(*(rule.lists for _, rule in rules))
        return self.lists.read(state.lists_commit, names) if names else Lists.empty()

    def _timeline(self, state: ShardState, marks: Mapping[int, Mark | None]) -> Timeline:
        """Returns the watermarks before and after each commit."""
        commits = np.array(sorted(marks), dtype=np.int64)
        watermarks = np.full(len(commits) + 1, NEVER)
        if self.automatic:
            passed = pass_marks(self.stream, state.reached, (marks[commit] for commit in commits.tolist()))
            watermarks[0], watermarks[1:] = state.reached.watermark(self.stream), passed.watermarks
        if state.advanced is not None:
            watermarks = np.maximum(watermarks, state.advanced)
        return Timeline(commits, watermarks[:-1], watermarks[1:])

    # Time -------------------------------------------------------------------------------------------------------------

    def _pass_time(self, state: ShardState, marks: Mapping[int, Mark | None]) -> int | None:
        return state.pass_time(marks, self.stream, automatic=self.automatic)

    def _watermark(self, state: ShardState) -> int | None:
        return state.watermark(self.stream, automatic=self.automatic)


def _check_coverage(in_force: Rules, batch: Batch, output: Output) -> bool:
    """Finds what the rules in force require from dispatch. Returns whether the batch has all of it."""
    # Includes rules that failed in this shard: all shards must have the same requirements.
    output.required = find_coverage([rule for _, rule in in_force])
    if batch.coverage is not None and not batch.coverage.covers(output.required):
        output.covered = False
    return output.covered


def _keep_rows(segment: Segment, rules: Rules, output: Output) -> None:
    """Adds the rows that features keep to the state.

    Call this after the floors have risen, so that only the rows of a long batch that later windows can include are
    kept.
    """
    commit = int(segment.timeline.commits[0])
    for feature, users in list_features(rules):
        with contain_failure(output, segment.state, users, commit):
            segment.keep_rows(feature)
    sharing: dict[str, list[tuple[Feature, list[tuple[Entry, CompiledRule]]]]] = {}
    for feature, users in list_features(drop_stopped(segment.state, rules)):
        if feature.row_set:
            sharing.setdefault(feature.row_set, []).append((feature, users))
    for each in sharing.values():
        with contain_failure(output, segment.state, [user for _, users in each for user in users], commit):
            segment.store_shared_rows([feature for feature, _ in each])

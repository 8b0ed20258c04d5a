"""The evaluator: events and rule changes in, verdicts out, exactly as if events came one at a time.

One evaluator serves the stream's shards, the harness and replay. It holds no clock and no files; what it remembers is
a ShardState. All arithmetic is by column over a whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from lookback.core.alerts import Alert, Failure, LateEvent, alert_id, moment
from lookback.core.columns import Column, Mask, text_of
from lookback.core.compiled import WINDOW_COMPLETE, CompiledRule, Feature
from lookback.core.events import Events
from lookback.core.grouping import FeatureRows, Grouping
from lookback.core.keys import Int64s, Keys, encode_keys
from lookback.core.rulebook import EVALUATED, Command, Coverage, Entry, LogRow, RuleChange, needed_by_all
from lookback.core.rules import Window
from lookback.core.state import FeatureState, ShardState
from lookback.core.streams import Stream
from lookback.core.types import BOOLEAN

# Stands for "no watermark yet"; below every time that can be written.
_NEVER = -(2**62)
_UNWANTED, _DISCARDED, _RECORDED, _EVALUATED = range(4)
_ACTIONS = {_DISCARDED: "discarded", _RECORDED: "recorded", _EVALUATED: "evaluated"}


@dataclass
class Batch:
    """What a shard is given at once.

    events: inserted events of the shard, in any order; deleted: rows deleted, with the commit that deleted them.
    marks: every commit of the batch and its highest event time over all shards, None if no event of it counts.
    """

    events: Events
    deleted: Events | None = None
    marks: Mapping[int, int | None] = field(default_factory=dict)
    changes: list[RuleChange] = field(default_factory=list)


@dataclass
class Output:
    """What a batch brought. alerts: in order of arrival, of one event by rule_id; failures: one per rule and version.

    covered False: a rule came into force for which dispatch did not send what it needs; nothing was judged, and the
    batch must be given again with `required` sent.
    """

    alerts: list[Alert] = field(default_factory=list)
    late: list[LateEvent] = field(default_factory=list)
    log: list[LogRow] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    required: Coverage = field(default_factory=Coverage)
    covered: bool = True


@dataclass(frozen=True)
class Evaluator:
    """Judges the events of `stream` that belong to `shard` of `shards`.

    automatic False: the watermark moves only by `advance` commands. coverage: what dispatch sends; None for all.
    """

    stream: Stream
    shard: int = 0
    shards: int = 1
    automatic: bool = True
    coverage: Coverage | None = None

    def process(self, state: ShardState, batch: Batch) -> Output:
        """Applies the batch's rule changes, then judges its events; `state` is brought up to date."""
        output = Output()
        log, commands = state.book.apply(batch.changes, state.last_commit)
        output.log += log
        rules = state.book.in_force()
        output.required = needed_by_all(rule for _, rule in rules)
        if self.coverage is not None and not self.coverage.covers(output.required):
            output.covered = False
            return output
        for command in commands:
            self._obey(command, state)
        _open_features(state, rules)
        if not batch.marks:
            return output
        commits = np.array(sorted(batch.marks), dtype=np.int64)
        if state.last_commit is not None and int(commits[0]) <= state.last_commit:
            message = f"commit {int(commits[0])} was cut between two batches; its pieces are judged one after another"
            output.log.append(LogRow(self.stream.name, None, None, "commit_cut", message, int(commits[0])))
        for part in _parts(batch, commits):
            if part.deleted is not None:
                self._delete(state, rules, part.deleted)
            _Judge(self, state, rules, part, output).run()
        _forget_unused(state, rules)
        _forget_suppressed(state, rules, state.watermark(self.stream.max_out_of_orderness, automatic=self.automatic))
        return output

    def advance(self, state: ShardState, time: int) -> None:
        """Moves the watermark to `time` (microseconds), if that is later; what it reaches happens now."""
        state.advanced = time if state.advanced is None else max(state.advanced, time)
        self.pass_time(state)

    def pass_time(self, state: ShardState) -> None:
        """Raises the floors to what the watermark says; `ShardState.drop_old` then forgets what lies below."""
        watermark = state.watermark(self.stream.max_out_of_orderness, automatic=self.automatic)
        if watermark is None:
            return
        for feature in state.features.values():
            floor = watermark - feature.width
            if feature.floor is None or floor > feature.floor:
                feature.floor = floor

    def _obey(self, command: Command, state: ShardState) -> None:
        if command.action == "advance" and command.time is not None:
            self.advance(state, command.time)
        elif command.action == "clear_state":
            for feature_id in list(state.features):
                state.drop_feature(feature_id)
            state.suppressed.clear()

    def _delete(self, state: ShardState, rules: list[tuple[Entry, CompiledRule]], deleted: Events) -> None:
        features = {feature.feature_id: feature for _, rule in rules for feature in rule.features}
        for feature_id, feature in features.items():
            keys = group_keys(feature.group_by, deleted)
            selected = _kept(feature, deleted) & (keys.shard(self.shards) == self.shard)
            values = _values(feature, deleted)
            state.remove_rows(
                state.features[feature_id],
                keys.take(selected),
                deleted.times[selected],
                None if values is None else values.values[selected],
            )


def group_keys(group_by: tuple[str, ...], events: Events) -> Keys:
    """The key of every event under a grouping set."""
    return encode_keys([events.columns[name] for name in group_by], len(events))


def _open_features(state: ShardState, rules: list[tuple[Entry, CompiledRule]]) -> None:
    widths: dict[str, int] = {}
    for _, rule in rules:
        for measure in rule.measures:
            width = measure.window.size + measure.window.delay + rule.allowed_lateness
            feature_id = measure.feature.feature_id
            widths[feature_id] = max(width, widths.get(feature_id, 0))
    for feature_id, width in widths.items():
        feature = state.features.setdefault(feature_id, FeatureState(since=state.high))
        feature.width = width


def _forget_unused(state: ShardState, rules: list[tuple[Entry, CompiledRule]]) -> None:
    used = {feature.feature_id for _, rule in rules for feature in rule.features}
    for feature_id in [feature_id for feature_id in state.features if feature_id not in used]:
        state.drop_feature(feature_id)


def _forget_suppressed(state: ShardState, rules: list[tuple[Entry, CompiledRule]], watermark: int | None) -> None:
    suppress = {entry.rule_id: (rule.rule.suppress, rule.allowed_lateness) for entry, rule in rules}
    for rule_id in list(state.suppressed):
        span, lateness = suppress.get(rule_id, (None, 0))
        if span is None:
            del state.suppressed[rule_id]
        elif watermark is not None:
            keys = state.suppressed[rule_id]
            state.suppressed[rule_id] = {key: at for key, at in keys.items() if at + span >= watermark - lateness}


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


def _kept(feature: Feature, events: Events) -> Mask:
    """Which events a feature would keep a row of: where and filter hold, and the argument has a value."""
    selected = np.ones(len(events), dtype=bool)
    for condition in (feature.where, feature.filter):
        if condition is not None:
            selected &= events.value(condition).is_true()
    argument = _values(feature, events, counted=True)
    return selected & argument.is_known() if argument is not None else selected


def _values(feature: Feature, events: Events, *, counted: bool = False) -> Column | None:
    """The argument's values, where the feature stores them (or, with `counted`, looks at them)."""
    if feature.argument is None or not (counted or feature.aggregate.stores_value):
        return None
    return events.value(feature.argument)


class _Judge:
    """One run over events between two changes of anything else."""

    def __init__(
        self,
        evaluator: Evaluator,
        state: ShardState,
        rules: list[tuple[Entry, CompiledRule]],
        batch: Batch,
        output: Output,
    ) -> None:
        self._evaluator, self._state, self._rules, self._output = evaluator, state, rules, output
        self._stream = evaluator.stream
        self._commits = np.array(sorted(batch.marks), dtype=np.int64)
        highs = [batch.marks[int(commit)] for commit in self._commits]
        self._highs = np.array([_NEVER if high is None else high for high in highs], dtype=np.int64)
        self._events = batch.events.in_order_of_arrival()
        self._watermarks = self._event_watermarks()
        self._groupings: dict[tuple[str, ...], Grouping] = {}
        self._rows: dict[str, FeatureRows] = {}
        self._measured: dict[tuple[str, Window, str], Column] = {}
        self._actions = np.zeros(len(self._events), dtype=np.int8)
        self._alerts: list[tuple[int, Alert]] = []

    def run(self) -> None:
        if len(self._events):
            for entry, rule in self._rules:
                self._judge(entry, rule)
            # As if events came one at a time, each judged by all rules.
            self._output.alerts += [alert for _, alert in sorted(self._alerts, key=lambda each: each[0])]
            self._report_late()
            self._keep_rows()
        self._pass_time()

    def _event_watermarks(self) -> Int64s:
        before = _NEVER if self._state.high is None else self._state.high
        highest = np.maximum.accumulate(np.concatenate(([before], self._highs)))[:-1]
        if not self._evaluator.automatic:
            highest = np.full(len(highest), _NEVER)
        marks = np.where(highest == _NEVER, _NEVER, highest - self._stream.max_out_of_orderness)
        if self._state.advanced is not None:
            marks = np.maximum(marks, self._state.advanced)
        watermarks: Int64s = marks[np.searchsorted(self._commits, self._events.commits)]
        return watermarks

    def _grouping(self, group_by: tuple[str, ...]) -> Grouping:
        if group_by not in self._groupings:
            keys = group_keys(group_by, self._events)
            mine = keys.shard(self._evaluator.shards) == self._evaluator.shard
            self._groupings[group_by] = Grouping(keys, self._events.times, mine)
        return self._groupings[group_by]

    def _taken(self, lateness: int) -> Mask:
        taken: Mask = self._events.times >= self._watermarks - lateness
        return taken

    def _judge(self, entry: Entry, rule: CompiledRule) -> None:
        events, grouping = self._events, self._grouping(rule.group_by)
        taken = self._taken(rule.allowed_lateness)
        wanted = grouping.mine.copy()
        failed = np.zeros(len(events), dtype=bool)
        if rule.where is not None:
            where = events.value(rule.where)
            wanted &= where.is_true()
            if where.error is not None:
                failed |= grouping.mine & taken & where.error
        late = events.times < self._watermarks
        judging = entry.status in EVALUATED
        counted = wanted & taken
        judged = counted & ~late if rule.rule.late == "record" else counted
        if rule.rule.effective_from is not None:
            judged = judged & (events.times >= rule.rule.effective_from)
        if rule.rule.effective_until is not None:
            judged = judged & (events.times <= rule.rule.effective_until)
        if late.any():
            self._note_late(late & wanted, counted, judged if judging else np.zeros(len(events), dtype=bool))
        if judging:
            # In the order of (key, time): neighbours search the same rows, which is several times faster.
            self._raise(entry, rule, grouping.sorted[counted[grouping.sorted]], judged, failed)

    def _note_late(self, late: Mask, counted: Mask, judged: Mask) -> None:
        action = np.where(judged, _EVALUATED, np.where(counted, _RECORDED, _DISCARDED))
        self._actions = np.maximum(self._actions, np.where(late, action, _UNWANTED)).astype(np.int8)

    def _raise(self, entry: Entry, rule: CompiledRule, counted: Int64s, judged: Mask, failed: Mask) -> None:
        """Measures every counted event, which rules share, and raises alerts among the judged ones in order of arrival."""
        columns, complete, spoiled = self._measures(rule, counted)
        verdict = judged[counted]
        names = rule.when.fields
        for name in names & set(self._events.columns):
            columns.setdefault(name, self._events.columns[name].take(counted))
        columns[WINDOW_COMPLETE] = Column(BOOLEAN, complete)
        when = rule.when.evaluate(columns, len(counted))
        errors = spoiled if when.error is None else spoiled | when.error
        failed[counted[verdict & errors]] = True
        hits = np.flatnonzero(when.is_true() & ~errors & verdict)
        hits = hits[np.argsort(counted[hits])]
        if failed.any():
            self._fail(entry, np.flatnonzero(failed))
        if len(hits):
            self._alert(entry, rule, counted, hits, columns)

    def _measures(self, rule: CompiledRule, counted: Int64s) -> tuple[dict[str, Column], Mask, Mask]:
        """The measures of the counted events, where every window is complete, and where one has an error."""
        columns: dict[str, Column] = {}
        complete = np.ones(len(counted), dtype=bool)
        spoiled = np.zeros(len(counted), dtype=bool)
        for measure in rule.measures:
            column = self._measure(rule, measure.feature, measure.window, counted)
            columns[measure.name] = column
            start = self._events.times[counted] - measure.window.delay - measure.window.size
            bound = self._state.features[measure.feature.feature_id].complete_from
            if bound is not None:
                complete &= start >= bound
            for part in (measure.feature.filter, measure.feature.argument):
                errors = None if part is None else self._events.value(part).error
                if errors is not None:
                    spoiled |= errors[counted]
            if column.error is not None:
                spoiled |= column.error
        return columns, complete, spoiled

    def _measure(self, rule: CompiledRule, feature: Feature, window: Window, counted: Int64s) -> Column:
        cached = (feature.feature_id, window, rule.where.sql if rule.where else "")
        if cached in self._measured:
            return self._measured[cached]
        grouping, state = self._grouping(rule.group_by), self._state.features[feature.feature_id]
        last = self._events.times[counted] - window.delay
        first = last - window.size
        if state.floor is not None:
            first = np.maximum(first, state.floor)
        aggregate = feature.aggregate
        partial = grouping.windows(aggregate, self._feature_rows(feature), counted, first, window)
        if len(counted):
            keys, earliest = grouping.keys.take(counted), int(first.min())
            for stored in state.runs:
                if stored.last_time >= earliest:
                    run = self._state.load_run(stored)
                    partial = aggregate.merge(partial, run.windows(feature.function, aggregate, keys, first, last))
        column = aggregate.finish(partial, feature.argument_type)
        self._measured[cached] = column
        return column

    def _feature_rows(self, feature: Feature) -> FeatureRows:
        if feature.feature_id not in self._rows:
            grouping = self._grouping(feature.group_by)
            selected = grouping.mine & self._taken(feature.allowed_lateness) & _kept(feature, self._events)
            values = _values(feature, self._events)
            self._rows[feature.feature_id] = grouping.rows(selected, None if values is None else values.values)
        return self._rows[feature.feature_id]

    def _alert(
        self, entry: Entry, rule: CompiledRule, counted: Int64s, hits: Int64s, columns: Mapping[str, Column]
    ) -> None:
        events = self._events
        suppress = self._suppressor(entry.rule_id, rule)
        for hit in hits.tolist():
            at = int(counted[hit])
            time = int(events.times[at])
            key = {name: text_of(events.columns[name].item(at)) for name in rule.group_by}
            measures = {measure.name: columns[measure.name].item(hit) for measure in rule.measures}
            event_id = events.id_text(at)
            last = time - rule.rule.window.delay
            values = {**{name: events.columns[name].item(at) for name in rule.fields}, **measures}
            alert = Alert(
                alert_id=alert_id(entry.rule_id, entry.version, key, event_id),
                revision=0,
                verdict=suppress(at, time),
                rule_id=entry.rule_id,
                rule_version=entry.version,
                mode=entry.status,
                severity=rule.rule.severity,
                stream=self._stream.name,
                key=key,
                event_id=event_id,
                event_time=moment(time),
                window_start=moment(last - rule.rule.window.size),
                window_end=moment(last),
                window_complete=bool(columns[WINDOW_COMPLETE].values[hit]),
                measures=measures,
                message=rule.message({**values, WINDOW_COMPLETE: bool(columns[WINDOW_COMPLETE].values[hit])}),
                evidence=(),
                arrival=int(events.commits[at]),
            )
            self._alerts.append((at, alert))

    def _suppressor(self, rule_id: str, rule: CompiledRule) -> Callable[[int, int], str]:
        """Answers `raised` or `suppressed` for alerts in order of arrival (position, event time)."""
        span = rule.rule.suppress
        if span is None:
            return lambda at, time: "raised"
        keys = self._grouping(rule.group_by).keys
        raised = self._state.suppressed.setdefault(rule_id, {})

        def verdict(at: int, time: int) -> str:
            key = (int(keys.low[at]), int(keys.high[at]))
            if key in raised and time <= raised[key] + span:
                return "suppressed"
            raised[key] = time
            return "raised"

        return verdict

    def _fail(self, entry: Entry, positions: Int64s) -> None:
        at = int(positions[0])
        commit, time = int(self._events.commits[at]), int(self._events.times[at])
        failure = Failure(entry.rule_id, entry.version, len(positions), self._events.id_text(at), (commit, time))
        self._output.failures = merge_failures([*self._output.failures, failure])

    def _report_late(self) -> None:
        events = self._events
        for at in np.flatnonzero(self._actions).tolist():
            time = int(events.times[at])
            late_by = int(self._watermarks[at]) - time
            action = _ACTIONS[int(self._actions[at])]
            self._output.late.append(
                LateEvent(self._stream.name, events.id_text(at), moment(time), int(events.commits[at]), late_by, action)
            )

    def _keep_rows(self) -> None:
        for feature in {f.feature_id: f for _, rule in self._rules for f in rule.features}.values():
            rows = self._feature_rows(feature)
            if len(rows.positions):
                keys = self._grouping(feature.group_by).keys.take(rows.positions)
                state = self._state.features[feature.feature_id]
                self._state.add_rows(state, keys, self._events.times[rows.positions], rows.values)

    def _pass_time(self) -> None:
        """After the last commit: the watermark moves on, and with it what the features keep."""
        state = self._state
        high = int(self._highs.max())
        if high != _NEVER:
            state.high = high if state.high is None else max(state.high, high)
        state.last_commit = int(self._commits[-1])
        self._evaluator.pass_time(state)


def merge_failures(failures: list[Failure]) -> list[Failure]:
    """One failure per rule and version: counts added, the first event by arrival kept."""
    merged: dict[tuple[str, int], Failure] = {}
    for failure in failures:
        slot = (failure.rule_id, failure.version)
        known = merged.get(slot, replace(failure, count=0))
        first = min(known, failure, key=lambda f: (f.first_arrival, f.first_event_id))
        merged[slot] = replace(first, count=known.count + failure.count)
    return list(merged.values())


def failure_text(count: int, first_event_id: str) -> str:
    """What rule_log says of errors while judging."""
    events = "1 event" if count == 1 else f"{count} events"
    return f"{events} could not be judged (overflow, division by zero or a cast); the first is {first_event_id}"

"""Replays the events of a key through the engine, with a rule that also lists the events it counts.

Each measure gets a twin that collects the positions of the events in its aggregate, and a sequence writes the positions
that its steps took into its message. To the engine a twin is just another measure, so it shares the measure's windows,
lateness and deletions.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from lookback.core.aggregation.aggregate import Aggregate
from lookback.core.aggregation.exact import Partial
from lookback.core.engine.batch import Batch
from lookback.core.engine.evaluation import Evaluator
from lookback.core.engine.output import Output
from lookback.core.explaining.evidence import NOT_DELETED, Activation, Evidence
from lookback.core.expressions.compiling import Expression, compile_expression
from lookback.core.judging.measuring import select_kept
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.compiled import CompiledMeasure, CompiledRule, Feature
from lookback.core.rules.rulebook import RuleBook
from lookback.core.rules.versions import Entry
from lookback.core.state.shard import ShardState
from lookback.core.streams.alerts import Alert, AlertOrder
from lookback.core.streams.arrival import arrival_number
from lookback.core.streams.events import Events, empty_events
from lookback.core.streams.watermarks import Mark
from lookback.core.values.columns import Column, Values, make_objects, to_text
from lookback.core.values.keys import Int64s
from lookback.core.values.types import BIGINT, DataType
from lookback.core.values.windows import LOOKBACK

# Columns that a replay adds to events. They contain a space, so they cannot clash with declared fields.
_POSITION = "position in history"
_COUNTED = "counted by "
_ALWAYS = compile_expression("true", {})


@dataclass(frozen=True)
class TracedRow:
    """An alert row from a replay, and its place among all rows."""

    place: AlertOrder
    alert: Alert
    _collected: _Collect

    def value_of(self, measure: CompiledMeasure) -> Any:
        """Returns the value of a measure."""
        return self.alert.measures[measure.name]

    def list_counted(self, measure: CompiledMeasure) -> Int64s:
        """Returns the positions of the events that a measure counted, ascending."""
        return self._collected.values(int(self.alert.measures[_COUNTED + measure.name]))

    def has_measures(self, rule: CompiledRule, recorded: Mapping[str, str | None]) -> bool:
        """Returns whether the row has the measures of an alert, as exact text."""
        return all(to_text(self.value_of(each)) == recorded.get(each.name) for each in rule.measures)

    @property
    def taken(self) -> list[list[int]]:
        """The positions of the events that each step of a sequence took, in step order."""
        taken: list[list[int]] = json.loads(self.alert.message)
        return taken

    @property
    def is_retraction(self) -> bool:
        """True if the row retracts an alert."""
        return self.alert.verdict == "retracted"


def replay(
    evidence: Evidence, commit: int, *, first: int, last: int | None, positions: Int64s | None = None, **changes: Any
) -> list[TracedRow]:
    """Returns the rows that the rule would give up to a commit if `when` were always true.

    Args:
        evidence: The rule and the events of a key.
        commit: The last commit to replay.
        first: The first time of the events or windows to return rows for, included.
        last: The last time, included; None for no end.
        positions: The ascending positions of the events to replay; None for all.
        **changes: Fields of the rule's document to override.
    """
    until, collected = None if last is None else last + 1, _Collect()
    same = {"suppress": None, "reset_on_alert": False, "effective_from": first, "effective_until": until}
    if positions is None:
        positions = np.arange(len(evidence.events), dtype=np.int64)
    rows = _Replay(evidence, {**same, **changes}, commit, positions, collected).rows()
    if evidence.key is not None and evidence.rule.sequence is not None:
        # Events may take part under other keys of steps too, of which not all events are known.
        rows = ((place, alert) for place, alert in rows if dict(alert.key) == evidence.key)
    return [TracedRow(place, alert, collected) for place, alert in rows]


class _Replay:
    """A run of the engine over some events of a key, up to a commit; see `replay` for the arguments."""

    def __init__(
        self, evidence: Evidence, changes: Mapping[str, Any], commit: int, positions: Int64s, collected: _Collect
    ) -> None:
        self._evidence, self._changes, self._commit, self._collected = evidence, changes, commit, collected
        self._rule_id, self._document = evidence.rule.spec.rule_id, evidence.rule.fingerprint
        self._clock, stream = evidence.clock, evidence.stream
        rules = [evidence.rule, *(each.rule for each in self._activations if each.rule is not None)]
        self._features = {measure.feature.feature_id: measure.feature for each in rules for measure in each.measures}
        added = dict.fromkeys([_POSITION, *(_COUNTED + feature_id for feature_id in self._features)], BIGINT)
        self._stream = replace(stream, fields={**stream.fields, **added})
        self._evaluator = self._make_evaluator(None)
        self._book = _Book(self._stream, {stream.name: self._stream})
        self._state = ShardState(self._book)
        self._events = self._add_positions(positions)
        self._deleted = self._list_deleted(positions)
        commits = [*self._events.commits.tolist(), *self._deleted.commits.tolist(), commit]
        # The next commit drops state that no rule uses, even if the commit has no events.
        commits += [each.arrival for each in self._activations if each.arrival is not None]
        self._marks: dict[int, Mark | None] = dict.fromkeys(commits)
        self._marks |= {at: high for at, high in evidence.clock.highs.items() if at <= commit}

    @cached_property
    def _activations(self) -> list[Activation]:
        """The activations that affect the rule's state: those before the last commit, or before an advance after it."""
        rule = self._evidence.rule
        known = [each for each in self._evidence.activations if self._has_rows_after(each)]
        # The rule's state has other names if it was compiled for another declaration of the stream.
        needs = set(rule.needs).union(*(each.rule.needs for each in known if each.rule and self._is_own(each)))
        # A version that shares no state with the rule matters no more than a retired one.
        known = [
            each if each.rule is None or each.rule.needs.keys() & needs else replace(each, rule=None) for each in known
        ]
        sharing = {each.rule_id for each in known if each.rule is not None}
        shared = [each for each in known if each.rule_id in {*sharing, "*"}]
        if any(self._is_own(each) for each in shared):
            return shared
        # It is unknown since when the rule was in force: assume from the start.
        return [Activation(None, rule.spec.rule_id, rule), *shared]

    def _has_rows_after(self, activation: Activation) -> bool:
        """Returns whether rows up to the last commit, to which advances add some, may follow an activation."""
        after = arrival_number(activation.arrival)
        is_advanced = activation.advances < len(self._clock.advances_until(self._commit))
        return after < self._commit or (after == self._commit and is_advanced)

    def _make_evaluator(self, judged: int | None) -> Evaluator:
        """Makes the evaluator for the commits after `judged`, with the declaration at that point."""
        declared = self._clock.declarations.after(judged).stream
        return Evaluator(replace(declared, fields=self._stream.fields))

    def _add_positions(self, positions: Int64s) -> Events:
        """Returns the events with a column of positions, and one for each feature with the positions that it keeps."""
        events = self._evidence.events.take(positions)
        columns = {**events.columns, _POSITION: Column(BIGINT, positions)}
        for feature_id, feature in self._features.items():
            columns[_COUNTED + feature_id] = Column(BIGINT, positions, ~select_kept(feature, events))
        return Events.of(columns, events.commits, self._stream)

    def _list_deleted(self, positions: Int64s) -> Events:
        """Returns the deleted events, with the commits that deleted them."""
        gone_at = self._evidence.gone_at
        gone_at = np.full(len(self._events), NOT_DELETED) if gone_at is None else gone_at[positions]
        gone = np.flatnonzero(gone_at <= self._commit)
        columns = self._events.take(gone).columns
        return Events.of(columns, gone_at[gone], self._stream)

    def rows(self) -> Iterator[tuple[AlertOrder, Alert]]:
        """Judges all events, applying declarations, activations and advances where they took effect."""
        # An advance after the last commit gives rows that name this commit.
        advances = self._clock.advances_until(self._commit)
        reached: int | None = None
        cuts = [cut for cut in self._clock.declarations.cuts if cut < self._commit]
        arrivals = {*(each.arrival for each in self._activations), *(arrival for arrival, _ in advances), *cuts}
        for arrival in sorted(arrivals, key=arrival_number):
            yield from self._judge(reached, arrival)
            self._evaluator = self._make_evaluator(arrival)
            for change in self._list_changes(arrival):
                if isinstance(change, Activation):
                    self._activate(change)
                else:
                    yield from self._select_own(self._evaluator.advance(self._state, change))
            reached = arrival
        yield from self._judge(reached, self._commit)

    def _list_changes(self, arrival: int | None) -> Iterator[Activation | int]:
        """Yields the activations and the times of the advances after a commit, in the order they took effect."""
        advances = self._clock.advances_until(self._commit)
        left = deque((number, time) for number, (at, time) in enumerate(advances) if at == arrival)
        for activation in self._activations:
            if activation.arrival == arrival:
                while left and left[0][0] < activation.advances:
                    yield left.popleft()[1]
                yield activation
        yield from (time for _, time in left)

    def _judge(self, after: int | None, last: int | None) -> Iterator[tuple[AlertOrder, Alert]]:
        """Judges the commits after `after`, up to and including `last`."""
        low, high = arrival_number(after), arrival_number(last)
        marks = {commit: mark for commit, mark in self._marks.items() if low < commit <= high}
        if not marks:
            return
        parts = (self._events, self._deleted)
        events, deleted = (part.take((part.commits > low) & (part.commits <= high)) for part in parts)
        yield from self._select_own(self._evaluator.process(self._state, Batch(events, deleted, marks)))

    def _activate(self, activation: Activation) -> None:
        """Brings a rule into force, takes one out of force, or clears all state."""
        changes = []
        if activation.rule_id == "*":
            changes.append(RuleChange("insert", 0, "*", None, "clear_state", None))
        elif activation.rule is None:
            self._book.remove(activation.rule_id)
        else:
            is_own = self._is_own(activation)
            rule = _trace_rule(activation.rule, self._collected, **(self._changes if is_own else {}))
            self._book.put(activation.rule_id, rule, is_own)
        # Opens new state.
        self._evaluator.process(self._state, Batch(empty_events(self._stream, ()), changes=changes))

    def _is_own(self, activation: Activation) -> bool:
        """Returns whether an activation is of the explained rule itself, not of a similar version next to it."""
        rule = activation.rule
        if activation.is_silent:
            return False
        return rule is not None and (rule.fingerprint, rule.lane) == (self._document, self._evidence.rule.lane)

    def _select_own(self, output: Output) -> Iterator[tuple[AlertOrder, Alert]]:
        """Selects the rows of the rule itself."""
        return (row for row in output.rows if row[1].rule_id == self._rule_id)


class _Book(RuleBook):
    """A rulebook of traced rules, which evaluates one rule; the remaining rules only keep state."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._rules: dict[str, CompiledRule] = {}

    def put(self, rule_id: str, rule: CompiledRule, is_evaluated: bool) -> None:
        """Brings a rule into force, as version 1 if it is evaluated, else as version 0."""
        status = "active" if is_evaluated else "paused"
        self.entries[rule_id] = Entry(rule_id, int(is_evaluated), status, "", self.stream.name, 1)
        self._rules[rule_id] = rule

    def remove(self, rule_id: str) -> None:
        """Takes a rule out of force."""
        self._rules.pop(rule_id, None)

    def in_force(self) -> list[tuple[Entry, CompiledRule]]:
        """Returns the rules, by rule_id."""
        return [(self.entries[rule_id], rule) for rule_id, rule in sorted(self._rules.items())]

    def unreadable(self) -> list[tuple[Entry, str]]:
        """Returns an empty list, since all rules are compiled already."""
        return []


class _TracedRule(CompiledRule):
    """A rule with a twin of each measure. Its message has the positions that each step took, as JSON."""

    @cached_property
    def message_names(self) -> frozenset[str]:
        """The names of the positions of each step."""
        steps = self.sequence.steps if self.sequence else ()
        return frozenset(_positions_of(step.step.name) for step in steps)

    def message(self, values: Mapping[str, Any]) -> str:
        """Returns a list of positions for each step, in step order, as JSON."""
        steps = self.sequence.steps if self.sequence else ()
        return json.dumps([values[_positions_of(step.step.name)] for step in steps])


def _positions_of(step: str) -> str:
    return f"{step}.{_POSITION}"


def _trace_rule(rule: CompiledRule, collected: _Collect, **changes: Any) -> CompiledRule:
    """Makes the rule with twins. `changes` overrides fields of its document."""
    twins = tuple(_twin_of(measure, collected) for measure in rule.measures)
    needs = dict(rule.needs)
    if not rule.store:
        pairs = zip(rule.measures, twins, strict=True)
        needs |= {twin.feature.feature_id: needs[measure.feature.feature_id] for measure, twin in pairs}
    traced = {each.name: getattr(rule, each.name) for each in fields(CompiledRule)}
    traced |= {
        "spec": replace(rule.spec, **changes),
        "measures": (*rule.measures, *twins),
        "when": _ALWAYS if rule.spec.kind == LOOKBACK else None,
        "fields": (*rule.fields, _POSITION, *(twin.feature.feature_id for twin in twins)),
        "sequence": rule.sequence and replace(rule.sequence, kept=(*rule.sequence.kept, _POSITION)),
        "needs": needs,
    }
    return _TracedRule(**traced)


def _twin_of(measure: CompiledMeasure, collected: _Collect) -> CompiledMeasure:
    feature, column = measure.feature, _COUNTED + measure.feature.feature_id
    # The twin has no buckets, which would combine events. After a window with a resolution was widened, events of its
    # first bucket may be missing.
    twin = _CollectingFeature(
        feature.stream,
        feature.group_by,
        "collect",
        feature.allowed_lateness,
        feature.where,
        argument=_read_column(column),
        tiles=feature.tiles,
        feature_id=column,
        collected=collected,
    )
    return CompiledMeasure(_COUNTED + measure.name, twin, measure.window, BIGINT)


class _Collect(Aggregate):
    """Collects the values of each window as parts of arrays, and returns a number for them.

    The parts are joined only when they are read, since most windows of a replay are never read.
    """

    def __init__(self) -> None:
        self._sets: list[tuple[Int64s, ...]] = []

    def result_type(self, argument: DataType | None) -> DataType:
        """Returns the type of a number."""
        return BIGINT

    def build_index(self, values: Values) -> Values:
        """Returns the values themselves."""
        return values

    def aggregate_ranges(self, index: Values, low: Int64s, high: Int64s) -> Partial:
        """Returns one part for each range."""
        ranges = zip(low.tolist(), high.tolist(), strict=True)
        return (make_objects((index[begin:end],) for begin, end in ranges),)

    def merge(self, left: Partial, right: Partial) -> Partial:
        """Returns the parts of both sides."""
        return (left[0] + right[0],)

    def finish(self, partial: Partial, argument: DataType | None) -> Column:
        """Returns the numbers of the windows."""
        first = len(self._sets)
        self._sets += partial[0].tolist()
        return Column(BIGINT, np.arange(first, len(self._sets)))

    def values(self, number: int) -> Int64s:
        """Returns the values of a window, ascending."""
        return np.sort(np.concatenate(self._sets[number]))


@dataclass(frozen=True)
class _CollectingFeature(Feature):
    """A feature whose aggregate collects the values of its argument."""

    collected: _Collect = field(default_factory=_Collect, compare=False)

    @property
    def aggregate(self) -> Aggregate:
        """The collecting aggregate."""
        return self.collected


@lru_cache(256)
def _read_column(name: str) -> Expression:
    return compile_expression(f"`{name}`", {name: BIGINT})

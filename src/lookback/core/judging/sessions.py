"""Judges session windows: consecutive events of a key at most one gap apart belong to the same session.

With a gap of 10 minutes and disorder of 5, 10:09 arrives last, late but in time:

    event        10:00  10:05  10:16  10:20  10:36  10:09     in order of arrival
    watermark     9:55  10:00  10:11  10:15  10:31  10:31     after each
    from 10:00                                  2!     5!     ends just after 10:15, and with 10:09 just after 10:30
    from 10:16                                  2!     !      retracted: 10:09 joins it with the session from 10:00

State is two keyed tables: for each key the values of its group_by fields and its rows by (time, arrival), which are
cut into sessions (`Sessions`), and the last verdict on each session (`SessionMemory`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lookback.core.aggregation.distinct import count_from_start
from lookback.core.aggregation.edges import Edge
from lookback.core.judging.answers import list_answers
from lookback.core.judging.measuring import select_kept, select_values
from lookback.core.judging.opensessions import OpenSession, SessionRow, Sessions
from lookback.core.judging.rulerun import RuleRun
from lookback.core.judging.segment import Order
from lookback.core.judging.verdicts import Judgement, Memory, Subject, memories_value, read_memories
from lookback.core.rules.compiled import CompiledRule, Feature
from lookback.core.state.keyed import Key, KeyedTable
from lookback.core.state.shard import ShardState
from lookback.core.streams.events import Events
from lookback.core.values.columns import Column, Mask, Values, from_text, from_values, replace_nan, to_text, to_texts
from lookback.core.values.keys import Int64s, Keys
from lookback.core.values.lists import Lists
from lookback.core.values.times import NEVER_DUE, to_utc
from lookback.core.values.types import BIGINT, STRING, DataType
from lookback.core.values.windows import Session


class Slot(NamedTuple):
    """A measure's place among the values of rows.

    Attributes:
        feature_id: The feature of the measure; None once it is no longer used.
        since: The highest event time when the measure was added, before which it has no rows; None if the stream was
            empty.
    """

    feature_id: str | None
    since: int | None


class SessionMemory(NamedTuple):
    """The last row that was written about a session: a `Memory`, whether the session was complete, and its end.

    `texts` are its measures, which the retraction repeats when the session is merged into another.
    """

    version: int
    revision: int
    holds: bool
    verdict: str
    measures: str
    complete: bool
    end: int
    texts: dict[str, str | None]

    @property
    def last(self) -> Memory:
        """The part that all kinds of rules remember."""
        return Memory(self.version, self.revision, self.holds, self.verdict, self.measures)


def judge_sessions(rule_run: RuleRun) -> None:
    """Judges the sessions of a segment."""
    _Judge(rule_run).run()


def forget_measures(table: KeyedTable, used: Iterable[str]) -> None:
    """Frees the slots of measures that are no longer used; a measure that is used again later starts without rows."""
    known = set(used)
    if "slots" in table.notes:
        slots = _read_slots(table)
        table.notes["slots"] = [slot if slot.feature_id in known else slot._replace(feature_id=None) for slot in slots]


def _read_slots(table: KeyedTable) -> list[Slot]:
    return [Slot(*slot) for slot in table.notes.get("slots", ())]


def _number_slots(slots: Sequence[Slot]) -> dict[str, int]:
    """Returns the number of each measure's slot."""
    return {slot.feature_id: number for number, slot in enumerate(slots) if slot.feature_id is not None}


def open_measures(table: KeyedTable, rule: CompiledRule, high: int | None) -> list[Slot]:
    """Gives each measure of a rule a slot in its table, and returns all slots.

    A new measure starts without rows at `high`, the highest event time so far.
    """
    slots = _read_slots(table)
    known = {slot.feature_id for slot in slots}
    slots += [Slot(feature_id, high) for feature_id in rule.measured if feature_id not in known]
    table.notes["slots"] = slots
    return slots


def adopt_measures(table: KeyedTable, rule: CompiledRule, notes: Mapping[str, Any]) -> None:
    """Gives a table the slots of another table whose rows it takes over, for a rule with the same measures.

    `notes` are those of the other table, where the measures may have other ids.
    """
    if "slots" in notes:
        slots = [Slot(*slot) for slot in notes["slots"]]
        table.notes["slots"] = [
            slot._replace(feature_id=feature_id) for slot, feature_id in zip(slots, rule.measured, strict=True)
        ]


def has_measures(table: KeyedTable | None, rule: CompiledRule, earliest: int) -> bool:
    """Returns whether the rows of a table from `earliest` on have the values of all measures of a rule."""
    slots = [] if table is None else _read_slots(table)
    full = {slot.feature_id for slot in slots if slot.since is None or slot.since <= earliest}
    return all(feature_id in full for feature_id in rule.measured)


def delete_from_sessions(
    state: ShardState, rule: CompiledRule, keys: Keys, deleted: Events, selected: Mask, lists: Lists
) -> None:
    """Removes one row with equal key, time and values for each selected event, which may split a session.

    The values are those that the event had, regardless of what the lists now contain.
    """
    table = state.table(rule.store)
    slots = _number_slots(_read_slots(table))
    answered = list(list_answers(deleted, rule.memberships, lists))
    wanted = [None if rule.where is None else events.value(rule.where).is_true() for events in answered]
    for at in np.flatnonzero(selected).tolist():
        key = keys.pair(at)
        value = table.get(key)
        if value is None:
            continue
        rows, time = value["rows"], int(deleted.times[at])
        likely = (events for events, mask in zip(answered, wanted, strict=True) if mask is None or mask[at])
        ranks = (_find_row(rows, time, _measured_values(rule, events, at, slots)) for events in likely)
        rank = next((rank for rank in ranks if rank is not None), None)
        if rank is not None:
            rows = [*rows[:rank], *rows[rank + 1 :]]
            # These sessions may end earlier now, so check them once the watermark reaches the first row.
            table.put(key, {**value, "rows": rows} if rows else None, rows[0][0] if rows else NEVER_DUE)


def _find_row(rows: Sequence[SessionRow], time: int, values: Mapping[int, Any]) -> int | None:
    """Finds a row by its time and its values by slot, or returns None; a missing value counts as equal."""
    for rank, row in enumerate(rows):
        if row[0] == time and all(
            slot + 1 >= len(row) or replace_nan(row[slot + 1]) == replace_nan(value) for slot, value in values.items()
        ):
            return rank
    return None


def _measured_values(rule: CompiledRule, events: Events, at: int, slots: Mapping[str, int]) -> dict[int, Any]:
    """Returns the values of an event's row, by slot."""
    event, values = events.take(np.array([at])), {}
    for measure in rule.measures:
        feature = measure.feature
        if feature.feature_id in slots:
            column = select_values(feature, event)
            value = 1 if column is None else column.to_stored_list()[0]
            values[slots[feature.feature_id]] = value if select_kept(feature, event)[0] else None
    return values


@dataclass(frozen=True)
class _Result:
    """A session at some moment: the first `rows` of its log; `log` is None if it was merged into another session."""

    order: Order
    key: Key
    start: int
    end: int = 0
    log: list[SessionRow] | None = None
    rows: int = 0

    @classmethod
    def of(cls, order: Order, key: Key, session: OpenSession, end: int) -> _Result:
        """Returns the current state of a session."""
        return cls(order, key, session.start, end, session.log, len(session.log))


class _Judge:
    def __init__(self, rule_run: RuleRun) -> None:
        assert isinstance(rule_run.spec.window, Session)
        self._rule_run, self._measures, self._gap = rule_run, rule_run.rule.measures, rule_run.spec.window.gap
        self._longest, self._lateness = rule_run.stream.max_session, rule_run.rule.allowed_lateness
        # By key, {"key": the values of its group_by fields, "rows": its rows by (time, arrival)}.
        self._table = rule_run.state.table(rule_run.rule.store)
        # By key, the `SessionMemory` of each session with a row of alerts, by start.
        self._memories = rule_run.state.table(rule_run.rule.memory)
        self._slots = open_measures(self._table, rule_run.rule, rule_run.state.high)
        self._slot_numbers = _number_slots(self._slots)
        self._stored_keys: dict[Key, list[Any]] = {}

    def run(self) -> None:
        """Judges the sessions that events or the watermark change in the segment."""
        rule_run = self._rule_run
        results: list[_Result] = []
        taken = np.zeros(len(rule_run.events), dtype=bool)
        positions_by_key = dict(rule_run.group_by_key(rule_run.wanted))
        none: Int64s = np.zeros(0, dtype=np.int64)
        values = self._slot_values()
        for key in sorted({*positions_by_key, *self._table.find_due(rule_run.timeline.end).list_pairs()}):
            results += self._process_key(key, positions_by_key.get(key, none), values, taken)
        rule_run.count_taken(taken)
        if rule_run.is_evaluated:
            self._judge(results)
        self._memories.forget_due(rule_run.timeline.end)

    def _slot_values(self) -> list[list[Any]]:
        """Returns the values of the events in each slot; None where the measure leaves an event out."""
        events = self._rule_run.events
        columns: list[list[Any]] = [[None] * len(events)] * len(self._slots)
        for measure in self._measures:
            feature = measure.feature
            selected, values = select_kept(feature, events), select_values(feature, events)
            stored = [1] * len(events) if values is None else values.to_stored_list()
            columns[self._slot_numbers[feature.feature_id]] = [
                value if keep else None for value, keep in zip(stored, selected.tolist(), strict=True)
            ]
        return columns

    def _process_key(self, key: Key, positions: Int64s, values: list[list[Any]], taken: Mask) -> Iterator[_Result]:
        """Moves the sessions of one key through the segment, yields their results, and marks the events they take."""
        rule_run, timeline = self._rule_run, self._rule_run.timeline
        value = self._table.get(key) or {"key": rule_run.list_stored_keys(positions[:1])[0], "rows": []}
        self._stored_keys[key] = value["key"]
        sessions = Sessions.from_rows(self._gap, self._longest, value["rows"])
        watermark, closed_until = timeline.start, None
        for at in positions.tolist():
            before, watermark = watermark, int(rule_run.watermarks[at])
            if watermark != before:
                yield from self._end_sessions(key, sessions, before, watermark)
            if closed_until is None or watermark != before:
                closed_until = rule_run.earliest_in_time(watermark)
                sessions.forget(closed_until)
            row = [int(rule_run.events.times[at]), *(column[at] for column in values)]
            added = sessions.add(row, closed_until)
            if added is None:
                continue
            taken[at] = True
            changed, gone = added
            for rank, start in enumerate(gone):
                yield _Result(rule_run.order_by_event(at, rank), key, start)
            for rank, session in enumerate(changed, len(gone)):
                end = sessions.end(session)
                if end <= watermark or rule_run.spec.early:
                    yield _Result.of(rule_run.order_by_event(at, rank), key, session, end)
        yield from self._end_sessions(key, sessions, watermark, timeline.end)
        sessions.forget(rule_run.earliest_in_time(timeline.end))
        rows = [row for session in sessions.listed for row in session.rows]
        value = {"key": value["key"], "rows": rows} if rows else None
        self._table.put(key, value, self._find_wake(sessions, timeline.end))

    def _end_sessions(self, key: Key, sessions: Sessions, before: int, after: int) -> Iterator[_Result]:
        """Yields the results of the sessions that end as the watermark moves from `before` to `after`."""
        rule_run = self._rule_run
        for session in sessions.listed:
            end = sessions.end(session)
            if before < end <= after:
                order = rule_run.order_by_watermark(end, session.start)
                yield _Result.of(order, key, session, end)
                if sessions.is_cut(session) and rule_run.is_evaluated:
                    texts = json.dumps(to_texts(rule_run.key_values(self._stored_keys[key])), ensure_ascii=False)
                    message = (
                        f"the session of {texts} that began {to_text(to_utc(session.start))} was closed at max_session"
                    )
                    rule_run.add_note("session_closed", message, rule_run.arrival_of(order))

    def _find_wake(self, sessions: Sessions, watermark: int) -> int:
        """Finds the watermark at which the first session ends or can be dropped."""
        ends = [sessions.end(session) for session in sessions.listed]
        return min((end if end > watermark else end + self._lateness for end in ends), default=NEVER_DUE)

    def _judge(self, results: list[_Result]) -> None:
        """Measures all results at once and writes them in order."""
        rule_run = self._rule_run
        # Plain tuples sort several times faster than named ones.
        results.sort(key=lambda result: tuple(result.order))
        shown = [result for result in results if result.log is not None]
        starts = np.array([result.start for result in shown], dtype=np.int64)
        ends = np.array([result.end for result in shown], dtype=np.int64)
        columns = {measure.name: self._measure(measure.feature, shown) for measure in rule_run.rule.measures}
        is_complete = rule_run.find_complete(starts)
        for slot in self._slots:
            if slot.feature_id is not None and slot.since is not None:
                is_complete &= starts >= slot.since
        key_columns = rule_run.key_columns(self._stored_keys[result.key] for result in shown)
        holds, errors = rule_run.check_condition({**columns, **key_columns}, is_complete, ends)
        effective = rule_run.find_effective(ends)
        row = 0
        for result in results:
            if result.log is None:
                self._retract_merged(result)
                continue
            if effective[row] and (holds[row] or errors[row] or self._memories.get(result.key)):
                if errors[row]:
                    name = f"the session that began {to_text(to_utc(result.start))}"
                    rule_run.count_failure(rule_run.arrival_of(result.order), result.start, name)
                else:
                    measures = {measure.name: columns[measure.name].item(row) for measure in rule_run.rule.measures}
                    self._write_verdict(result, bool(holds[row]), measures, bool(is_complete[row]))
            row += 1

    def _measure(self, feature: Feature, shown: list[_Result]) -> Column:
        """Computes a measure of each session from the values of its rows, without those that the measure leaves out."""
        slot, aggregate = self._slot_numbers[feature.feature_id], feature.aggregate
        logs = {id(result.log): result.log or [] for result in shown}
        listed: list[Any] = []
        # For an aggregate that depends on order, the row that decides the result, up to each row.
        running: list[Values] = [np.empty(0, dtype=np.int64)]
        # Where the values of each log begin, and where those of its first n rows end, for each n.
        begins: dict[int, int] = {}
        ends: dict[int, Int64s] = {}
        for name, log in logs.items():
            values = [row[slot + 1] if slot + 1 < len(row) else None for row in log]
            begins[name] = len(listed)
            counted = np.cumsum([0, *(value is not None for value in values)])
            ends[name] = (len(listed) + counted).astype(np.int64)
            if isinstance(aggregate, Edge):
                times = [row[0] for row, value in zip(log, values, strict=True) if value is not None]
                running.append(len(listed) + aggregate.find_running(np.array(times, dtype=np.int64)))
            listed += [value for value in values if value is not None]
        low = np.array([begins[id(result.log)] for result in shown], dtype=np.int64)
        high = np.array([ends[id(result.log)][result.rows] for result in shown], dtype=np.int64)
        type_ = feature.argument_type
        stored: Values = np.zeros(len(listed), dtype=np.int64)
        if isinstance(aggregate, Edge):
            stored, found = from_values(STRING, listed).values, np.concatenate(running)
            low[high > low] = found[high[high > low] - 1]
            high = np.minimum(high, low + 1)
        elif type_ is not None and aggregate.stores_value:
            stored = from_values(type_, listed).values
        if feature.function == "count_distinct":
            groups = np.searchsorted(np.array(sorted(begins.values())), np.arange(len(listed)), side="right")
            return Column(BIGINT, count_from_start(groups.astype(np.int64), stored, low, high))
        return aggregate.finish(aggregate.aggregate_ranges(aggregate.build_index(stored), low, high), type_)

    def _write_verdict(self, result: _Result, holds: bool, measures: dict[str, Any], is_complete: bool) -> None:
        """Writes the row of a session if its verdict or its measures have changed."""
        memories, values = self._read_memories(result), self._key_values(result)
        known = memories.get(result.start)
        subject = self._make_subject(result, result.end, values)
        judgement = Judgement(holds, measures, to_texts(measures), is_complete)
        memory = self._rule_run.writer.revise(result.order, known and known.last, subject, judgement, values)
        if memory is not None:
            texts = dict(judgement.texts) if known is None or memory != known.last else known.texts
            self._remember(result, memories, SessionMemory(*memory, complete=is_complete, end=result.end, texts=texts))

    def _retract_merged(self, result: _Result) -> None:
        """Retracts the alert of a session that was merged into another."""
        rule_run, memories = self._rule_run, self._read_memories(result)
        known = memories.get(result.start)
        if known is not None and known.holds and rule_run.writer.keep_own(known.last) is not None:
            retracted, values = known._replace(revision=known.revision + 1, holds=False), self._key_values(result)
            self._remember(result, memories, retracted)
            subject, measures = self._make_subject(result, known.end, values), self._type_measures(known.texts)
            rule_run.writer.retract(result.order, subject, retracted.revision, measures, known.complete, values)

    def _type_measures(self, texts: Mapping[str, str | None]) -> dict[str, object]:
        """Parses the texts of measures; returns the text itself if the rule no longer has such a measure."""
        types = {measure.name: measure.type for measure in self._measures}
        return {name: _parse_measure(types.get(name), text) for name, text in texts.items()}

    def _key_values(self, result: _Result) -> dict[str, Any]:
        return self._rule_run.key_values(self._stored_keys[result.key])

    def _make_subject(self, result: _Result, end: int, key_values: Mapping[str, Any]) -> Subject:
        return Subject(to_texts(key_values), result.key, None, end, result.start, end)

    def _read_memories(self, result: _Result) -> dict[int, SessionMemory]:
        """Reads the memories of the key by session start, without starts that no session can have any longer."""
        after = int(self._rule_run.timeline.before[result.order.commit_index]) - self._longest - self._lateness
        return read_memories(SessionMemory, self._memories.get(result.key), after)

    def _remember(self, result: _Result, memories: dict[int, SessionMemory], memory: SessionMemory) -> None:
        memories[result.start] = memory
        until = max(memories) + self._longest + self._lateness
        self._memories.put(result.key, memories_value(memories), until)


def _parse_measure(type_: DataType | None, text: str | None) -> object:
    if type_ is None or text is None:
        return text
    try:
        value = from_text(type_, text)
    except (ValueError, ArithmeticError):
        return text
    return value if to_text(value) == text else text

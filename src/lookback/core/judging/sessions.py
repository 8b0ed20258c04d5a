"""Session windows: events of a key that lie a gap or less apart belong together."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from lookback.core.aggregation.distinct import count_from_start
from lookback.core.aggregation.runs import comparable
from lookback.core.judging.measuring import select_kept, select_values
from lookback.core.judging.segment import Order, RuleRun
from lookback.core.judging.verdicts import Memory, Subject, texts_of
from lookback.core.rules.compiled import CompiledRule, Feature
from lookback.core.state.keyed import Key, KeyedTable
from lookback.core.state.shard import ShardState
from lookback.core.streams.alerts import BY_EVENT, BY_WATERMARK, moment
from lookback.core.streams.events import Events
from lookback.core.values.columns import Column, Mask, Values, from_values, text_of
from lookback.core.values.keys import Int64s, Keys
from lookback.core.values.times import NEVER_DUE
from lookback.core.values.types import BIGINT
from lookback.core.values.windows import Session

# An event of a session: [time, value per measure]; a value is None where the measure leaves the event out. Rows written
# before a measure was added lack its value.
_Row = list[Any]


def judge_sessions(rule_run: RuleRun) -> None:
    """Judges the sessions of a segment."""
    _Judge(rule_run).run()


def forget_measures(table: KeyedTable, used: Iterable[str]) -> None:
    """Forgets the values of measures that are used no more; one that comes back starts anew."""
    known = set(used)
    for slot in table.notes.get("slots", ()):
        if slot[0] not in known:
            slot[0] = None


def delete_from_sessions(state: ShardState, rule: CompiledRule, keys: Keys, deleted: Events, mine: Mask) -> None:
    """Takes one row of equal key, time and values out for each deleted event; a session may fall apart by it."""
    table = state.table(rule.store)
    slots = {slot[0]: at + 1 for at, slot in enumerate(table.notes.get("slots", ()))}
    wanted = mine if rule.where is None else mine & deleted.value(rule.where).is_true()
    for at in np.flatnonzero(wanted).tolist():
        key = (int(keys.low[at]), int(keys.high[at]))
        value = table.get(key)
        if value is None:
            continue
        measured = _values_at(rule, deleted, at, slots)
        for place, row in enumerate(value["rows"]):
            if row[0] == deleted.times[at] and all(
                slot >= len(row) or comparable(row[slot]) == comparable(value) for slot, value in measured.items()
            ):
                left = [*value["rows"][:place], *value["rows"][place + 1 :]]
                # What is left may end earlier, and is looked at once its first row is reached.
                table.put(key, {**value, "rows": left} if left else None, left[0][0] if left else NEVER_DUE)
                break


def _values_at(rule: CompiledRule, events: Events, at: int, slots: Mapping[str, int]) -> dict[int, Any]:
    """What the row of an event holds, by slot."""
    event, found = events.take(np.array([at])), {}
    for measure in rule.measures:
        feature = measure.feature
        values = select_values(feature, event)
        value = 1 if values is None else values.stored()[0]
        if feature.feature_id in slots:
            found[slots[feature.feature_id]] = value if select_kept(feature, event)[0] else None
    return found


@dataclass(eq=False)
class OpenSession:
    """One session. rows: by (time, arrival), never empty; log: the same rows in the order in which they came to it.

    A session that grows only adds to its log, so what it was at some moment is told by the log's length then.
    """

    rows: list[_Row]
    log: list[_Row]

    @property
    def start(self) -> int:
        """The time of its first row."""
        return int(self.rows[0][0])

    @property
    def last(self) -> int:
        """The time of its last row."""
        return int(self.rows[-1][0])


@dataclass
class Sessions:
    """The sessions of one key, by time.

    A session takes the rows that follow its first one with gaps of `gap` or less, up to `longest` after it.
    """

    gap: int
    longest: int
    listed: list[OpenSession] = field(default_factory=list)

    @classmethod
    def of_rows(cls, gap: int, longest: int, rows: list[_Row]) -> Sessions:
        """The sessions that rows, sorted by time, make."""
        sessions = cls(gap, longest)
        sessions.listed = [OpenSession(part, list(part)) for part in sessions._cut(rows)]
        return sessions

    def end(self, session: OpenSession) -> int:
        """The exclusive end of a session."""
        return min(session.last + self.gap + 1, session.start + self.longest)

    def is_cut(self, session: OpenSession) -> bool:
        """Whether the session ends because it became too long."""
        return session.start + self.longest < session.last + self.gap + 1

    def forget(self, until: int) -> None:
        """Forgets the sessions whose end is `until` or earlier."""
        while self.listed and self.end(self.listed[0]) <= until:
            del self.listed[0]

    def add(self, row: _Row, alive_after: int) -> tuple[list[OpenSession], list[int]] | None:
        """Adds a row if the session that it comes to belong to ends after `alive_after`.

        Returns the sessions that are new or changed, and the starts that are no more; None if it was not added.
        """
        time = int(row[0])
        first, last = self._region(time)
        if first < last and time >= self.listed[first].start + self.longest:
            # That session was closed before the row; it begins another, or the next one begins with it.
            first += 1
        before = self.listed[first:last]
        start = min(time, before[0].start) if before else time
        joined, final = 0, time
        for session in before:
            if session.start >= start + self.longest:
                break
            if session.last >= start + self.longest:
                return self._cut_anew(row, alive_after, first, last)
            joined, final = joined + 1, max(final, session.last)
        if min(final + self.gap + 1, start + self.longest) <= alive_after:
            return None
        parts = before[:joined]
        gone = [session.start for session in parts if session.start != start]
        merged = _merged(parts, row)
        self.listed[first : first + joined] = [merged]
        return [merged], gone

    def _cut_anew(
        self, row: _Row, alive_after: int, first: int, last: int
    ) -> tuple[list[OpenSession], list[int]] | None:
        """A row that makes some session of listed[first:last] too long: their rows are divided again."""
        before = self.listed[first:last]
        rows = [each for session in before for each in session.rows]
        rows.insert(bisect_right(rows, row[0], key=_time), row)
        known = {(id(session.rows[0]), id(session.rows[-1])): session for session in before}
        after, changed = [], []
        for part in self._cut(rows):
            session = known.get((id(part[0]), id(part[-1])))
            is_own = any(each is row for each in part)
            if session is None or is_own:
                session = OpenSession(part, list(part))
                changed.append(session)
            if is_own and self.end(session) <= alive_after:
                return None
            after.append(session)
        self.listed[first:last] = after
        starts = {session.start for session in after}
        return changed, [session.start for session in before if session.start not in starts]

    def _region(self, time: int) -> tuple[int, int]:
        """The sessions that a row at `time` may change: those of the chain of gaps that it lies in."""
        first = bisect_right(self.listed, time, key=_start) - 1
        if first < 0 or self.listed[first].last + self.gap < time:
            first += 1
        last, end = first, time
        while last < len(self.listed) and self.listed[last].start - self.gap <= end:
            end = max(end, self.listed[last].last)
            last += 1
        return first, last

    def _cut(self, rows: list[_Row]) -> list[list[_Row]]:
        sessions: list[list[_Row]] = []
        for row in rows:
            session = sessions[-1] if sessions else None
            if session and row[0] - session[-1][0] <= self.gap and row[0] < session[0][0] + self.longest:
                session.append(row)
            else:
                sessions.append([row])
        return sessions


def _merged(parts: list[OpenSession], row: _Row) -> OpenSession:
    """Sessions that follow each other and a row that joins them: the largest of them takes all, so that rows seldom move."""
    if not parts:
        return OpenSession([row], [row])
    at = max(range(len(parts)), key=lambda each: len(parts[each].rows))
    session = parts[at]
    left = [each for part in parts[:at] for each in part.rows]
    right = [each for part in parts[at + 1 :] for each in part.rows]
    session.rows[:0] = left
    session.rows += right
    session.rows.insert(bisect_right(session.rows, row[0], key=_time), row)
    session.log += [*left, *right, row]
    return session


def _time(row: _Row) -> int:
    return int(row[0])


def _start(session: OpenSession) -> int:
    return session.start


@dataclass(frozen=True)
class _Result:
    """A session as of some moment: the first `rows` of its log. log None: it was merged into another, which retracts it."""

    order: Order
    key: Key
    start: int
    end: int = 0
    log: list[_Row] | None = None
    rows: int = 0

    @classmethod
    def of(cls, order: Order, key: Key, session: OpenSession, end: int) -> _Result:
        """The session as it is now."""
        return cls(order, key, session.start, end, session.log, len(session.log))


class SessionMemory(NamedTuple):
    """The last row that was written about a session, as `Memory`; whether it had all its events, and when it ended."""

    version: int
    revision: int
    holds: bool
    verdict: str
    measures: dict[str, str | None]
    complete: bool
    end: int

    @property
    def last(self) -> Memory:
        """The part that every kind of rule remembers."""
        return Memory(*self[:5])


class _Judge:
    def __init__(self, rule_run: RuleRun) -> None:
        assert isinstance(rule_run.rule.spec.window, Session)
        self._rule_run, self._gap = rule_run, rule_run.rule.spec.window.gap
        self._longest, self._lateness = rule_run.segment.stream.max_session, rule_run.rule.allowed_lateness
        # Per key {"key": stored values of the group_by fields, "rows": [...]}.
        self._table = rule_run.state.table(rule_run.rule.store)
        self._table_of_memories = rule_run.state.table(rule_run.rule.memory)
        self._after: list[int] = rule_run.timeline.after.tolist()
        self._slots = self._open_slots()
        self._names: dict[Key, list[Any]] = {}

    def run(self) -> None:
        rule_run = self._rule_run
        results: list[_Result] = []
        taken = np.zeros(len(rule_run.events), dtype=bool)
        here = dict(rule_run.group_by_key(rule_run.wanted))
        none: Int64s = np.zeros(0, dtype=np.int64)
        values = self._slot_values()
        for key in sorted({*here, *self._table.due(int(rule_run.timeline.after[-1]))}):
            results += self._follow(key, here.get(key, none), values, taken)
        judged = taken if rule_run.evaluated else np.zeros(len(taken), dtype=bool)
        rule_run.record_judged(rule_run.wanted, taken, judged)
        if rule_run.evaluated:
            rule_run.failed |= taken & rule_run.find_errors(rule_run.events)
            rule_run.count_failed_events(rule_run.failed)
            self._judge(results)
        self._table_of_memories.forget_due(int(rule_run.timeline.after[-1]))

    def _open_slots(self) -> dict[str, int]:
        """Where in a row each measure's value is; a measure that is new starts without rows."""
        rule_run, notes = self._rule_run, self._table.notes
        slots: list[Any] = notes.setdefault("slots", [])
        used = {measure.feature.feature_id: None for measure in rule_run.rule.measures}
        for feature_id in used:
            if feature_id not in {slot[0] for slot in slots}:
                slots.append([feature_id, rule_run.state.high])
        return {slot[0]: at + 1 for at, slot in enumerate(slots) if slot[0] is not None}

    def _slot_values(self) -> list[list[Any] | None]:
        """Per slot the values of the events, None where the measure leaves an event out."""
        events = self._rule_run.events
        columns: list[list[Any] | None] = [None] * len(self._table.notes["slots"])
        for measure in self._rule_run.rule.measures:
            feature = measure.feature
            selected, values = select_kept(feature, events), select_values(feature, events)
            stored = [1] * len(events) if values is None else values.stored()
            columns[self._slots[feature.feature_id] - 1] = [
                value if keep else None for value, keep in zip(stored, selected.tolist(), strict=True)
            ]
        return columns

    def _follow(self, key: Key, positions: Int64s, values: list[list[Any] | None], taken: Any) -> Iterator[_Result]:
        """One key through the segment: sessions grow, merge, end and are forgotten."""
        rule_run, timeline = self._rule_run, self._rule_run.timeline
        value = self._table.get(key)
        if value is None:
            value = {"key": rule_run.stored_key(int(positions[0])), "rows": []}
        self._names[key] = value["key"]
        sessions = Sessions.of_rows(self._gap, self._longest, value["rows"])
        watermark, forgotten = int(timeline.before[0]), None
        for at in positions.tolist():
            mark = int(rule_run.segment.watermarks[at])
            if mark != watermark:
                yield from self._ends(key, sessions, watermark, mark)
                watermark = mark
            if mark != forgotten:
                sessions.forget(mark - self._lateness)
                forgotten = mark
            row = [int(rule_run.events.times[at]), *(None if column is None else column[at] for column in values)]
            added = sessions.add(row, mark - self._lateness)
            if added is None:
                continue
            taken[at] = True
            changed, gone = added
            place = int(rule_run.segment.places[at])
            for rank, start in enumerate(gone):
                yield _Result((place, BY_EVENT, at, rank), key, start)
            for rank, session in enumerate(changed):
                end = sessions.end(session)
                if end <= mark or rule_run.rule.spec.early:
                    order = (place, BY_EVENT, at, len(gone) + rank)
                    yield _Result.of(order, key, session, end)
        last = int(timeline.after[-1])
        yield from self._ends(key, sessions, watermark, last)
        sessions.forget(last - self._lateness)
        rows = [row for session in sessions.listed for row in session.rows]
        self._table.put(key, {"key": value["key"], "rows": rows} if rows else None, self._wake(sessions, last))

    def _ends(self, key: Key, sessions: Sessions, before: int, after: int) -> Iterator[_Result]:
        """Results of the sessions that the watermark ends on its way from `before` to `after`."""
        rule_run = self._rule_run
        for session in sessions.listed:
            end = sessions.end(session)
            if before < end <= after:
                place = bisect_left(self._after, end)
                yield _Result.of((place, BY_WATERMARK, end, session.start), key, session, end)
                if sessions.is_cut(session) and rule_run.evaluated:
                    message = (
                        f"the session of {texts_of(rule_run.key_values(self._names[key]))} that began "
                        f"{text_of(moment(session.start))} was closed at max_session"
                    )
                    rule_run.add_note("session_closed", message, int(rule_run.timeline.commits[place]))

    def _wake(self, sessions: Sessions, watermark: int) -> int:
        """When the first session ends or is forgotten."""
        ends = [sessions.end(session) for session in sessions.listed]
        return min((end if end > watermark else end + self._lateness for end in ends), default=NEVER_DUE)

    def _judge(self, results: list[_Result]) -> None:
        """Measures all results at once and tells them in order."""
        rule_run = self._rule_run
        results.sort(key=lambda result: result.order)
        shown = [result for result in results if result.log is not None]
        starts = np.array([result.start for result in shown], dtype=np.int64)
        ends = np.array([result.end for result in shown], dtype=np.int64)
        columns = {measure.name: self._column(measure.feature, shown) for measure in rule_run.rule.measures}
        complete = rule_run.is_complete(rule_run.rule.store, starts)
        for feature_id, since in self._table.notes["slots"]:
            if feature_id is not None and since is not None:
                complete &= starts >= since
        holds, errors = rule_run.check_condition(
            {**columns, **rule_run.key_columns(self._names[result.key] for result in shown)}, complete
        )
        effective = rule_run.is_effective(ends)
        row = 0
        for result in results:
            if result.log is None:
                self._retract(result)
                continue
            if effective[row] and (holds[row] or errors[row] or self._table_of_memories.get(result.key)):
                arrival = int(rule_run.timeline.commits[result.order[0]])
                if errors[row]:
                    rule_run.count_failure(
                        arrival, result.start, f"the session that began {text_of(moment(result.start))}"
                    )
                else:
                    measures = {measure.name: columns[measure.name].item(row) for measure in rule_run.rule.measures}
                    self._judge_one(result, bool(holds[row]), measures, bool(complete[row]))
            row += 1

    def _column(self, feature: Feature, shown: list[_Result]) -> Column:
        """A measure of each session, from the values of its rows: those that the measure does not leave out."""
        slot, aggregate = self._slots[feature.feature_id], feature.aggregate
        logs = {id(result.log): result.log or [] for result in shown}
        listed: list[Any] = []
        # Where the values of each log begin, and per number of its rows where theirs end.
        begins: dict[int, int] = {}
        ends: dict[int, Int64s] = {}
        for name, log in logs.items():
            values = [row[slot] if slot < len(row) else None for row in log]
            begins[name] = len(listed)
            counted = np.cumsum([0, *(value is not None for value in values)])
            ends[name] = (len(listed) + counted).astype(np.int64)
            listed += [value for value in values if value is not None]
        low = np.array([begins[id(result.log)] for result in shown], dtype=np.int64)
        high = np.array([ends[id(result.log)][result.rows] for result in shown], dtype=np.int64)
        type_ = feature.argument_type
        stored: Values = np.zeros(len(listed), dtype=np.int64)
        if type_ is not None and aggregate.stores_value:
            stored = from_values(type_, listed).values
        if feature.function == "count_distinct":
            groups = np.searchsorted(np.array(sorted(begins.values())), np.arange(len(listed)), side="right")
            return Column(BIGINT, count_from_start(groups.astype(np.int64), stored, low, high))
        return aggregate.finish(aggregate.ranges(aggregate.index(stored), low, high), type_)

    def _judge_one(self, result: _Result, holds: bool, measures: dict[str, Any], complete: bool) -> None:
        rule_run = self._rule_run
        subject = self._subject(result, result.end)
        memories = self._memories(result)
        known = memories.get(result.start)
        memory, verdict = rule_run.writer.revise(known and known.last, subject, holds, texts_of(measures))
        if verdict is not None and memory is not None:
            self._remember(result, memories, SessionMemory(*memory, complete=complete, end=result.end))
            self._write(result, subject, verdict, memory.revision, measures, complete)

    def _retract(self, result: _Result) -> None:
        """Retracts the alert of a session that was merged into another."""
        rule_run = self._rule_run
        memories = self._memories(result)
        known = memories.get(result.start)
        if known is not None and known.holds and rule_run.writer.in_force(known.last) is not None:
            retracted = known._replace(revision=known.revision + 1, holds=False)
            self._remember(result, memories, retracted)
            subject, measures = self._subject(result, known.end), rule_run.type_measures(known.measures)
            self._write(result, subject, "retracted", retracted.revision, measures, known.complete)

    def _subject(self, result: _Result, end: int) -> Subject:
        key = texts_of(self._rule_run.key_values(self._names[result.key]))
        return Subject(key, result.key, None, end, result.start, end)

    def _memories(self, result: _Result) -> dict[int, SessionMemory]:
        """The memories of the key by session start, without those of starts that no session can have any more."""
        mark = int(self._rule_run.timeline.before[result.order[0]]) - self._longest - self._lateness
        stored = self._table_of_memories.get(result.key) or ()
        return {start: SessionMemory(*memory) for start, memory in stored if start > mark}

    def _remember(self, result: _Result, memories: dict[int, SessionMemory], memory: SessionMemory) -> None:
        memories[result.start] = memory
        until = max(memories) + self._longest + self._lateness
        self._table_of_memories.put(result.key, [[start, memories[start]] for start in sorted(memories)], until)

    def _write(
        self, result: _Result, subject: Subject, verdict: str, revision: int, measures: dict[str, Any], complete: bool
    ) -> None:
        rule_run = self._rule_run
        values = rule_run.key_values(self._names[result.key])
        arrival = int(rule_run.timeline.commits[result.order[0]])
        rule_run.add_alert(
            result.order, rule_run.writer.make_alert(subject, verdict, revision, arrival, measures, complete, values)
        )

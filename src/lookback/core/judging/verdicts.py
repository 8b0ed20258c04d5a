"""Decides the verdicts of a rule: raises, suppresses, revises or retracts alerts, and makes their rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from lookback.core.judging.segment import Order, Segment
from lookback.core.rules.compiled import WINDOW_COMPLETE, CompiledRule
from lookback.core.rules.versions import Entry
from lookback.core.state.keyed import Key
from lookback.core.state.tables import raised_wake
from lookback.core.streams.alerts import (
    BEGINS,
    BY_EVENT,
    CEASES,
    GOES_ON,
    Alert,
    AlertOrder,
    EncodedKey,
    complete_alert_id,
    encode_key,
)
from lookback.core.values.columns import Column, Mask, to_text
from lookback.core.values.keys import Int64s
from lookback.core.values.times import to_utc


class Memory(NamedTuple):
    """The last row that was written about a subject; keyed tables store it as a list.

    Attributes:
        version: The version of the rule.
        revision: The revision of the row.
        holds: Whether the condition held.
        verdict: The verdict of the first row.
        measures: A digest of the measures' texts, so that state keeps no values of an event that is deleted later.
    """

    version: int
    revision: int
    holds: bool
    verdict: str
    measures: str


class Subject(NamedTuple):
    """The subject of a verdict: an event, a window, or the wait that an event began. Times are in microseconds.

    Attributes:
        key_texts: The texts of the group_by fields.
        key: The key in keyed tables.
        event_id: The id of the event; None for a window.
        event_time: The event time of the alert.
        window_start: The start of the window.
        window_end: The end of the window.
        evidence: The ids of the events that prove the verdict.
    """

    key_texts: Mapping[str, str | None]
    key: Key
    event_id: str | None
    event_time: int
    window_start: int
    window_end: int
    evidence: Sequence[str] = ()


class Judgement(NamedTuple):
    """The result for one window: whether the condition holds, typed measures and their texts, and completeness."""

    holds: bool
    measures: Mapping[str, Any]
    texts: Mapping[str, str | None]
    is_complete: bool


@dataclass(frozen=True)
class Verdicts:
    """The measures of windows, and masks of those that are complete, meet the condition, or have an error."""

    columns: Mapping[str, Column]
    is_complete: Mask
    holds: Mask
    errors: Mask

    def take(self, rows: Int64s) -> Verdicts:
        """Returns the verdicts of some of the windows."""
        columns = {name: column.take(rows) for name, column in self.columns.items()}
        return Verdicts(columns, self.is_complete[rows], self.holds[rows], self.errors[rows])


_Memory = TypeVar("_Memory", bound=NamedTuple)


def read_memories(kind: type[_Memory], value: Any | None, after: int) -> dict[int, _Memory]:
    """Decodes the output of `memories_value`: the memories of a key's windows with starts above `after`, by start."""
    return {start: kind(*memory) for start, memory in value or () if start > after}


def memories_value(memories: Mapping[int, NamedTuple]) -> list[list[Any]]:
    """Encodes the memories of a key's windows for a keyed table: [start, memory] by start."""
    return [[start, memories[start]] for start in sorted(memories)]


def _digest(texts: Mapping[str, str | None]) -> str:
    """Returns a 128-bit hex digest of the measures of a row."""
    return hashlib.sha256(json.dumps(sorted(texts.items())).encode()).hexdigest()[:32]


class AlertWriter:
    """Decides the verdicts of one version of a rule and writes their rows to `alerts`.

    It must see subjects in order of arrival, because an alert can suppress later ones. In its methods `order` is the
    place of the result, and `values` are those of `CompiledRule.shown_names`.
    """

    def __init__(
        self, entry: Entry, rule: CompiledRule, segment: Segment, alerts: list[tuple[AlertOrder, Alert]]
    ) -> None:
        self._entry, self._rule, self._segment, self._alerts = entry, rule, segment, alerts
        # By key, the time of its last raised alert.
        span = rule.spec.suppress
        keep = None if span is None else (span, rule.allowed_lateness)
        self._raised = None if keep is None else segment.state.tables.raised(entry.role, rule.group_by, keep)
        self._encoded: dict[Key, EncodedKey] = {}

    def _decide_first(self, subject: Subject) -> str:
        """Decides the first verdict on a subject: raised or suppressed."""
        span = self._rule.spec.suppress
        if span is None or self._raised is None:
            return "raised"
        last = self._raised.get(subject.key)
        if last is not None and subject.event_time <= last + span:
            return "suppressed"
        wake = raised_wake(subject.event_time, span, self._rule.allowed_lateness)
        self._raised.put(subject.key, subject.event_time, wake)
        return "raised"

    def keep_own(self, memory: Memory | None) -> Memory | None:
        """Returns the memory if the version in force wrote it; None otherwise."""
        return memory if memory is not None and memory.version == self._entry.version else None

    def raise_alert(
        self, order: Order, subject: Subject, measures: Mapping[str, Any], is_complete: bool, values: Mapping[str, Any]
    ) -> None:
        """Writes the first row of an alert, raised or suppressed; `measures` are typed."""
        verdict = self._decide_first(subject)
        self._add_row(order, subject, verdict, 0, measures, is_complete, values, BEGINS)

    def retract(
        self,
        order: Order,
        subject: Subject,
        revision: int,
        measures: Mapping[str, Any],
        is_complete: bool,
        values: Mapping[str, Any],
    ) -> None:
        """Writes the retraction of an alert; `measures` are typed."""
        self._add_row(order, subject, "retracted", revision, measures, is_complete, values, CEASES)

    def revise(
        self, order: Order, memory: Memory | None, subject: Subject, judgement: Judgement, values: Mapping[str, Any]
    ) -> Memory | None:
        """Decides the verdict on a subject, and writes its row if the verdict or the measures have changed.

        `memory` is that of the previous row. Returns the memory of the new row; None if no row is written.
        """
        before = self.keep_own(memory)
        memory, verdict = self._decide(before, subject, judgement)
        if memory is None or verdict is None:
            return None
        change = CEASES if not memory.holds else BEGINS if before is None or not before.holds else GOES_ON
        measures, is_complete = dict(judgement.measures), judgement.is_complete
        self._add_row(order, subject, verdict, memory.revision, measures, is_complete, values, change)
        return memory

    def _decide(
        self, memory: Memory | None, subject: Subject, judgement: Judgement
    ) -> tuple[Memory | None, str | None]:
        """Returns the new memory, and the verdict of the row to write; None for no row."""
        holds, measures = judgement.holds, _digest(judgement.texts)
        if memory is None:
            if not holds:
                return None, None
            verdict = self._decide_first(subject)
            return Memory(self._entry.version, 0, True, verdict, measures), verdict
        revised = memory._replace(revision=memory.revision + 1, holds=holds, measures=measures)
        if holds and not (memory.holds and memory.measures == measures):
            return revised, memory.verdict
        if memory.holds and not holds:
            return revised, "retracted"
        return memory, None

    def _add_row(
        self,
        order: Order,
        subject: Subject,
        verdict: str,
        revision: int,
        measures: Mapping[str, Any],
        is_complete: bool,
        values: Mapping[str, Any],
        change: int,
    ) -> None:
        """Adds the row of a verdict; `change` is BEGINS, GOES_ON or CEASES."""
        entry, rule, segment = self._entry, self._rule, self._segment
        key = self._encode_key(subject)
        event_time, window_end = to_utc(subject.event_time), subject.window_end
        named = subject.event_id if subject.event_id is not None else subject.window_start
        message = rule.spec.message
        key_texts = subject.key_texts
        if rule.message_names:
            message = rule.message({**key_texts, **values, **measures, WINDOW_COMPLETE: is_complete})
        entities = {name: key_texts[name] if name in key_texts else to_text(values[name]) for name in rule.entities}
        arrival = int(segment.timeline.commits.item(order.commit_index))
        # Positional arguments: keywords make this call twice as slow, and a rule may alert on every event.
        alert = Alert(
            complete_alert_id(key.id_begin, named),
            revision,
            verdict,
            entry.rule_id,
            entry.version,
            entry.status,
            rule.spec.severity,
            segment.stream.name,
            key_texts,
            subject.event_id,
            event_time,
            to_utc(subject.window_start),
            event_time if window_end == subject.event_time else to_utc(window_end),
            is_complete,
            measures,
            message,
            subject.evidence,
            arrival,
            entities,
            rule.spec.score,
            change,
            rule.spec.queue,
            rule.spec.tags,
        )
        time, event = order.cause, ""
        if order.phase == BY_EVENT:
            time, event = segment.events.times.item(order.cause), segment.events.sort_text(order.cause)
        place = AlertOrder(arrival, order.phase, time, event, entry.rule_id, entry.version, key.sort_text, order.rank)
        self._alerts.append((place, alert))

    def _encode_key(self, subject: Subject) -> EncodedKey:
        """Encodes the key of a subject, only once for all its alerts."""
        encoded = self._encoded.get(subject.key)
        if encoded is None:
            encoded = encode_key(self._entry.rule_id, self._entry.version, tuple(subject.key_texts.items()))
            self._encoded[subject.key] = encoded
        return encoded

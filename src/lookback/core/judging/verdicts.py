"""What a rule says: rows of alerts and their revisions, and which of them are suppressed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lookback.core.rules.compiled import WINDOW_COMPLETE, CompiledRule
from lookback.core.rules.rulebook import Entry
from lookback.core.state.keyed import Key
from lookback.core.state.shard import ShardState
from lookback.core.streams.alerts import Alert, alert_id, moment
from lookback.core.values.columns import text_of

# What is remembered of a subject: [rule version, revision of its last row, whether that held, its first verdict, its
# measures as texts]. A list, since it is kept as JSON.
Memory = list[Any]


@dataclass(frozen=True)
class Subject:
    """What a verdict is about: an event, a window, or the wait that an event began. Times in microseconds.

    key: the texts of the group_by fields; halves: the key itself. event_id: None for a window. evidence: event ids.
    """

    key: Mapping[str, str | None]
    halves: Key
    event_id: str | None
    event_time: int
    window_start: int
    window_end: int
    evidence: Sequence[str] = ()


def are_memories(value: Any, length: int) -> bool:
    """Whether a value is a list of [start, memory], as windows keep it, with memories of that length."""
    return isinstance(value, list) and all(len(memory) == length for _, memory in value)


class AlertWriter:
    """The rows that one version of a rule writes. In order of arrival: what is suppressed depends on what was raised."""

    def __init__(self, entry: Entry, rule: CompiledRule, stream: str, state: ShardState) -> None:
        self._entry, self._rule, self._stream = entry, rule, stream
        suppresses, slot = rule.spec.suppress is not None, (entry.rule_id, rule.group_by)
        self._raised = state.suppressed.setdefault(slot, {}) if suppresses else {}

    def decide_first(self, subject: Subject) -> str:
        """The verdict of a subject of which nothing was said yet: raised or suppressed."""
        span = self._rule.spec.suppress
        if span is None:
            return "raised"
        last = self._raised.get(subject.halves)
        if last is not None and subject.event_time <= last + span:
            return "suppressed"
        self._raised[subject.halves] = subject.event_time
        return "raised"

    def in_force(self, memory: Memory | None) -> Memory | None:
        """The memory, if it is of the version in force."""
        return memory if memory is not None and memory[0] == self._entry.version else None

    def revise(
        self, memory: Memory | None, subject: Subject, holds: bool, texts: Mapping[str, str | None]
    ) -> tuple[Memory | None, str | None]:
        """The new memory of a subject that was judged (again), and the verdict of the row to write; None for no row."""
        memory = self.in_force(memory)
        if memory is None:
            if not holds:
                return None, None
            verdict = self.decide_first(subject)
            return [self._entry.version, 0, True, verdict, dict(texts)], verdict
        version, revision, held, verdict, before = memory
        if holds and not (held and before == texts):
            return [version, revision + 1, True, verdict, dict(texts)], str(verdict)
        if held and not holds:
            return [version, revision + 1, False, verdict, dict(texts)], "retracted"
        return memory, None

    def make_alert(
        self,
        subject: Subject,
        verdict: str,
        revision: int,
        arrival: int,
        measures: Mapping[str, Any],
        complete: bool,
        values: Mapping[str, Any],
    ) -> Alert:
        """The row of a verdict. measures: typed values; values: what else the message may name."""
        entry, rule = self._entry, self._rule
        named = subject.event_id if subject.event_id is not None else subject.window_start
        return Alert(
            alert_id=alert_id(entry.rule_id, entry.version, subject.key, named),
            revision=revision,
            verdict=verdict,
            rule_id=entry.rule_id,
            rule_version=entry.version,
            mode=entry.status,
            severity=rule.spec.severity,
            stream=self._stream,
            key=subject.key,
            event_id=subject.event_id,
            event_time=moment(subject.event_time),
            window_start=moment(subject.window_start),
            window_end=moment(subject.window_end),
            window_complete=complete,
            measures=measures,
            message=rule.message({**values, **measures, WINDOW_COMPLETE: complete}),
            evidence=subject.evidence,
            arrival=arrival,
        )


def texts_of(measures: Mapping[str, Any]) -> dict[str, str | None]:
    """Measures as the alerts table holds them."""
    return {name: text_of(value) for name, value in measures.items()}

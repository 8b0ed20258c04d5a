"""Verdicts of a rule: which are raised, revised, retracted or suppressed, and the alerts that are written of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lookback.core.rules.compiled import WINDOW_COMPLETE, CompiledRule
from lookback.core.rules.rulebook import Entry
from lookback.core.state.keyed import Key
from lookback.core.state.shard import ShardState
from lookback.core.streams.alerts import Alert, alert_id, moment
from lookback.core.values.columns import text_of


class Memory(NamedTuple):
    """The last row that was written about a subject; a keyed table holds it as a JSON list.

    version: of the rule; revision: of that row; holds: whether the condition held; verdict: that of the first row;
    measures: their texts.
    """

    version: int
    revision: int
    holds: bool
    verdict: str
    measures: dict[str, str | None]


@dataclass(frozen=True)
class Subject:
    """The subject of a verdict: an event, a window, or the wait that an event began. Times in microseconds.

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
    """Whether a value is a list of [start, memory], as windows store it, with memories of that length."""
    return isinstance(value, list) and all(len(memory) == length for _, memory in value)


class AlertWriter:
    """Writes the alerts of one version of a rule, in order of arrival: an alert that was raised can suppress later ones."""

    def __init__(self, entry: Entry, rule: CompiledRule, stream: str, state: ShardState) -> None:
        self._entry, self._rule, self._stream = entry, rule, stream
        suppresses, slot = rule.spec.suppress is not None, (entry.rule_id, rule.group_by)
        self._raised = state.suppressed.setdefault(slot, {}) if suppresses else {}

    def decide_first(self, subject: Subject) -> str:
        """The first verdict on a subject: raised or suppressed."""
        span = self._rule.spec.suppress
        if span is None:
            return "raised"
        last = self._raised.get(subject.halves)
        if last is not None and subject.event_time <= last + span:
            return "suppressed"
        self._raised[subject.halves] = subject.event_time
        return "raised"

    def in_force(self, memory: Memory | None) -> Memory | None:
        """The memory, if the version in force wrote it."""
        return memory if memory is not None and memory.version == self._entry.version else None

    def revise(
        self, memory: Memory | None, subject: Subject, holds: bool, texts: Mapping[str, str | None]
    ) -> tuple[Memory | None, str | None]:
        """Judges a subject (again): its new memory, and the verdict of the row to write; None for no row."""
        memory = self.in_force(memory)
        if memory is None:
            if not holds:
                return None, None
            verdict = self.decide_first(subject)
            return Memory(self._entry.version, 0, True, verdict, dict(texts)), verdict
        revised = memory._replace(revision=memory.revision + 1, holds=holds, measures=dict(texts))
        if holds and not (memory.holds and memory.measures == texts):
            return revised, memory.verdict
        if memory.holds and not holds:
            return revised, "retracted"
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

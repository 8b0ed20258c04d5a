"""What an explanation of one event says: parts of conditions, windows, and why the rule raised no alert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lookback.core.explaining.evidence import Explanation
from lookback.core.explaining.progress import Progress


@dataclass(frozen=True)
class Standing:
    """The version of a rule that applied to an event, and its status then.

    Attributes:
        version: The version number.
        status: active, shadow, paused, retired or quarantined; "" if the version was not in force before the event
            came.
        since: The commit after which the version came into or went out of force; None for before the first, or never.
    """

    version: int
    status: str
    since: int | None = None


@dataclass(frozen=True)
class Part:
    """A part of a condition, between two `and`.

    Attributes:
        text: The part as SQL.
        values: The values of the names that it reads, as exact text.
        holds: None if it is NULL or has an error, which both count as false.
        has_error: Whether it has an error.
        step: The name of the sequence step that it belongs to.
        is_linked: Whether it also reads earlier steps. `holds` then considers the event alone.
        lists: The lists that kept it from holding: it would hold with the opposite answer from any one of them.
    """

    text: str
    values: Mapping[str, str | None]
    holds: bool | None
    has_error: bool = False
    step: str = ""
    is_linked: bool = False
    lists: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The part with its result and its values."""
        values = ", ".join(f"{name} = {'null' if text is None else text}" for name, text in self.values.items())
        found = "an error" if self.has_error else "null" if self.holds is None else str(self.holds).lower()
        step = f"step {self.step}: " if self.step else ""
        linked = ", considering the event alone" if self.is_linked else ""
        return f"{step}{self.text} is {found}{linked}{f' ({values})' if values else ''}"


@dataclass(frozen=True)
class JudgedWindow:
    """A window that contains the event.

    Attributes:
        window_start: An aware datetime.
        window_end: An aware datetime, included or excluded as in the alerts table.
        is_judged: False if the watermark has not passed the window's end and the rule is not `early`.
        is_complete: Whether the window has all its events.
        measures: Values of the measures, as exact text.
        parts: The parts of the condition.
        lists_commit: The commit of table `lists` by which the condition was judged; None for before the first, or if
            the condition uses no list.
    """

    window_start: Any
    window_end: Any
    is_judged: bool
    is_complete: bool
    measures: Mapping[str, str | None]
    parts: tuple[Part, ...]
    lists_commit: int | None = None

    @property
    def holds(self) -> bool:
        """True if the whole condition holds."""
        return self.is_judged and all(part.holds for part in self.parts)


@dataclass(frozen=True)
class Reason:
    """A reason why the event raised an alert or not: a name for programs, and a sentence."""

    name: str
    text: str


@dataclass(frozen=True)
class EventExplanation:
    """Explains how a rule judged an event, as of commit `arrival` for a lookback rule, else as of the last commit.

    Attributes:
        rule_id: The rule.
        standing: The version that applied to the event.
        event_id: The id of the event, as text.
        event_time: The time of the event.
        arrival: The commit that brought the event.
        event: The fields of the event, as exact text.
        key: The event's grouping key: group_by field -> value as exact text. If steps have keys of their own, that of the
            last step that the event fits by itself.
        is_seen: Whether the rule's `where` holds.
        where: The parts of `where`.
        windows: The windows that contain the event.
        steps: For a sequence, whether the event fits each step.
        reasons: Why the event raised an alert or not, the strongest reason first.
        alerts: Rows of the alerts table about the event.
        progress: For a sequence that did not match, how far it came.
        notes: Sentences about what is no longer known.
        picture: The explanation from which the key's time line is drawn; None if the rule does not see the event.
    """

    rule_id: str
    standing: Standing
    event_id: str
    event_time: Any
    arrival: int
    event: Mapping[str, str | None]
    key: Mapping[str, str | None]
    is_seen: bool
    where: tuple[Part, ...] = ()
    windows: tuple[JudgedWindow, ...] = ()
    steps: tuple[Part, ...] = ()
    reasons: tuple[Reason, ...] = ()
    alerts: tuple[Mapping[str, Any], ...] = ()
    progress: Progress | None = None
    notes: tuple[str, ...] = ()
    picture: Explanation | None = field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Returns everything but the picture, for JSON."""

        def list_parts(parts: Sequence[Part]) -> list[dict[str, Any]]:
            return [dict(vars(part)) for part in parts]

        return {
            "rule_id": self.rule_id,
            "rule_version": self.standing.version,
            "status": self.standing.status,
            "event_id": self.event_id,
            "event_time": self.event_time,
            "arrival": self.arrival,
            "event": dict(self.event),
            "key": dict(self.key),
            "seen": self.is_seen,
            "where": list_parts(self.where),
            "windows": [{**vars(each), "parts": list_parts(each.parts), "holds": each.holds} for each in self.windows],
            "steps": list_parts(self.steps),
            "progress": None if self.progress is None else self.progress.to_dict(),
            "reasons": [dict(vars(each)) for each in self.reasons],
            "notes": list(self.notes),
            "alerts": [dict(each) for each in self.alerts],
        }

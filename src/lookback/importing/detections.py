"""A rule of another system, whatever its format: where it comes from, what it looks for, and what was lost on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lookback.importing.conditions import And, Condition, Not, Or, Present, list_fields
from lookback.importing.reasons import Reason


@dataclass(frozen=True)
class Origin:
    """The origin of a rule, and its texts for people.

    Attributes:
        format: The name of the format, such as sigma.
        file: The file, as given.
        place: Its number in the file, counted from 1.
        path: The file below the folder that was given, with `/`.
        title, id, description, author, license, severity, tags, references, runbook: As the rule has them; empty if it
            does not.
        shown: The fields that it wants to be shown.
        logsource: The name of its source of events, such as windows/process_creation.
        score: What an alert weighs; None if the rule does not say.
        waits: Whether its alerts wait for a person; None if the rule does not say.
    """

    format: str
    file: str
    place: int = 1
    path: str = ""
    title: str = ""
    id: str = ""
    description: str = ""
    author: str = ""
    license: str = ""
    severity: str = "medium"
    tags: tuple[str, ...] = ()
    references: tuple[str, ...] = ()
    runbook: str = ""
    shown: tuple[str, ...] = ()
    logsource: str = ""
    score: int | None = None
    waits: bool | None = None

    @property
    def identity(self) -> str:
        """The id of the rule; of a rule without one its file and place."""
        return self.id or (self.path if self.place == 1 else f"{self.path}#{self.place}")


@dataclass(frozen=True)
class Key:
    """An entry of the key by which events belong together.

    Attributes:
        name: Its name in the rule.
        fields: The field that holds it in the events of each member, in the order of the members.
    """

    name: str
    fields: tuple[str, ...]


@dataclass(frozen=True)
class Suppression:
    """After an alert, more of the same key are not heard of for a time.

    joins_missing: Whether events that lack a field of the key have a key in common; else each is heard of.
    """

    fields: tuple[str, ...]
    seconds: int
    joins_missing: bool = True


@dataclass(frozen=True)
class Single:
    """An event by itself that satisfies a condition."""

    condition: Condition
    suppression: Suppression | None = None


@dataclass(frozen=True)
class Measured:
    """An aggregate over the events of a key in the last `seconds` compares with a number.

    Attributes:
        members: Each event satisfies one of these conditions.
        aggregate: count, count(distinct), sum, avg, median or percentile.
        fields: The aggregated fields; empty for count.
        percentile: From 0 to 100, for percentile.
        resets: Whether an alert empties the window.
        operator, number: The comparison, as in SQL.
    """

    members: tuple[Condition, ...]
    keys: tuple[Key, ...]
    seconds: int
    aggregate: str
    operator: str
    number: str
    fields: tuple[str, ...] = ()
    percentile: int = 50
    resets: bool = False


@dataclass(frozen=True)
class Together:
    """Events of a key that satisfy several conditions, in any order, in the last `seconds`.

    Attributes:
        wanted: SQL over the names that `name_member` gives to the members' counts.
        slide: How many seconds apart the windows start; 0 for a window that ends at each event.
    """

    members: tuple[Condition, ...]
    keys: tuple[Key, ...]
    seconds: int
    wanted: str
    slide: int = 0


@dataclass(frozen=True)
class Gauge:
    """A measure of the events that satisfy one member.

    Attributes:
        aggregate: last, count, or count(distinct), of the shape's field.
        member: The place of the member.
        seconds, delay: The window, and how long before the event it ends.
    """

    name: str
    aggregate: str
    member: int
    seconds: int
    delay: int = 0


@dataclass(frozen=True)
class Gauged:
    """Measures of the events of a key, each with a window of its own, satisfy a condition.

    wanted: SQL over the names of the gauges.
    """

    members: tuple[Condition, ...]
    keys: tuple[Key, ...]
    fields: tuple[str]
    gauges: tuple[Gauge, ...]
    wanted: str


@dataclass(frozen=True)
class Counted:
    """Events of a key within a span of time reach a number, and a number of different values of a field.

    Attributes:
        keys: The fields of the key, which an event must have.
        distinct: The field whose values are counted, and how many there must be; None without such a condition.
        slide: How far apart the spans begin, in seconds. 0: one ends at each event, and what has alerted counts no more.
    """

    condition: Condition
    keys: tuple[str, ...]
    seconds: int
    at_least: int
    distinct: tuple[str, int] | None = None
    slide: int = 0


@dataclass(frozen=True)
class Step:
    """Events that satisfy a condition. fields: those that hold the key, as many in each step of a chain."""

    condition: Condition
    fields: tuple[str, ...] = ()
    at_least: int = 1


@dataclass(frozen=True)
class Chain:
    """Steps one after another.

    Attributes:
        microseconds: From the first event to the last at most.
        until: Events that end all matches of their key.
        absent: Events that must not come up to `microseconds` after the last step.
        takes_once: Whether each event counts once, and one match at a time waits at each step, as in EQL.
        shown: The fields that a message shows; empty for the key of the last step.
    """

    steps: tuple[Step, ...]
    microseconds: int
    until: Step | None = None
    absent: Step | None = None
    takes_once: bool = True
    shown: tuple[str, ...] = ()

    @property
    def all_steps(self) -> tuple[Step, ...]:
        """The steps with `until` and `absent`."""
        return (*self.steps, *(each for each in (self.until, self.absent) if each is not None))


Correlation = Measured | Together | Gauged | Chain
Shape = Single | Correlation | Counted


@dataclass(frozen=True)
class Example:
    """A test that a rule brings along.

    Attributes:
        name: What it shows.
        rows: The time of each event in microseconds, and its fields by the rule's names, in order of time.
        alerts: Whether the rule alerts.
    """

    name: str
    rows: tuple[tuple[int, Mapping[str, Any]], ...]
    alerts: bool


@dataclass(frozen=True)
class Detection:
    """A rule that was read. losses: why the written rule differs from it, besides what the writer finds."""

    origin: Origin
    shape: Shape
    losses: tuple[Reason, ...] = ()
    examples: tuple[Example, ...] = ()


@dataclass(frozen=True)
class Unread:
    """A rule or a file that cannot be taken over, or that another rule contains (`part_of`)."""

    origin: Origin
    reasons: tuple[Reason, ...] = ()
    part_of: str = ""


def name_member(at: int) -> str:
    """Returns the name of a member's measure or step, counted from 0."""
    return f"part_{at + 1}"


def make_chain(
    members: Sequence[Condition],
    keys: Sequence[Key],
    seconds: int,
    counts: Sequence[int] = (),
    unwanted: Sequence[Condition] = (),
) -> Chain:
    """Makes a chain of which an event may take part in several matches.

    Args:
        members: The conditions of the steps, in their order.
        keys: With the fields of the members, and after them that of the unwanted ones.
        seconds: From the first event to the last at most.
        counts: How many events each member needs at least; empty if one is enough.
        unwanted: After the last event, none must satisfy one of these for as long.
    """
    wanted, absent = [*members], None
    if unwanted:
        # The last event itself may be what must not come.
        wanted[-1] = And((wanted[-1], Not(Or(tuple(unwanted)))))
        absent = _make_step(Or(tuple(unwanted)), keys, len(members))
    steps = [_make_step(each, keys, at, *counts[at : at + 1]) for at, each in enumerate(wanted)]
    shown = tuple(key.name for key in keys)
    return Chain(tuple(steps), seconds * 1_000_000, absent=absent, takes_once=False, shown=shown)


def _make_step(condition: Condition, keys: Sequence[Key], at: int, count: int = 1) -> Step:
    fields = tuple(key.fields[at] for key in keys)
    return Step(And((condition, *map(Present, fields))), fields, count)


def list_members(shape: Shape) -> tuple[Condition, ...]:
    """Lists the conditions of a rule."""
    if isinstance(shape, Chain):
        return tuple(step.condition for step in shape.all_steps)
    return (shape.condition,) if isinstance(shape, (Single, Counted)) else shape.members


def list_key_fields(shape: Shape) -> list[str]:
    """Lists the fields by which events of a rule belong together."""
    if isinstance(shape, Single):
        return [] if shape.suppression is None else [*shape.suppression.fields]
    if isinstance(shape, Counted):
        return [*shape.keys, *([] if shape.distinct is None else [shape.distinct[0]])]
    if isinstance(shape, Chain):
        return [field for step in shape.all_steps for field in step.fields]
    fields = [field for key in shape.keys for field in key.fields]
    return [*fields, *shape.fields] if isinstance(shape, (Measured, Gauged)) else fields


def list_fields_read(shape: Shape) -> list[str]:
    """Lists the fields that a rule reads, each once."""
    found = [field for condition in list_members(shape) for field in list_fields(condition)]
    return list(dict.fromkeys([*found, *list_key_fields(shape)]))

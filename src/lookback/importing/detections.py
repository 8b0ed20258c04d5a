"""A rule of another system, whatever its format: where it comes from, what it looks for, and what was lost on the way."""

from __future__ import annotations

from dataclasses import dataclass

from lookback.importing.conditions import Condition, list_fields
from lookback.importing.reasons import Reason


@dataclass(frozen=True)
class Origin:
    """Where a rule comes from, and what it says for people.

    Attributes:
        format: The name of the format, such as sigma.
        file: The file, as given.
        place: Its number in the file, counted from 1.
        path: The file below the folder that was given, with `/`.
        title, id, description, author, license, severity, tags, references: As the rule has them; empty if it does not.
        shown: The fields that it wants to be shown.
        logsource: The name of its source of events, such as windows/process_creation.
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
    shown: tuple[str, ...] = ()
    logsource: str = ""

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
class Single:
    """An event by itself that satisfies a condition."""

    condition: Condition


@dataclass(frozen=True)
class Measured:
    """An aggregate over the events of a key in the last `seconds` compares with a number.

    Attributes:
        members: Each event satisfies one of these conditions.
        aggregate: count, count(distinct), sum, avg, median or percentile.
        fields: What is aggregated; empty for count.
        percentile: From 0 to 100, for percentile.
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


@dataclass(frozen=True)
class Together:
    """Events of a key that satisfy several conditions, in any order, in the last `seconds`.

    wanted: SQL over the names that `name_member` gives to the members' counts.
    """

    members: tuple[Condition, ...]
    keys: tuple[Key, ...]
    seconds: int
    wanted: str


@dataclass(frozen=True)
class Ordered:
    """Events of a key that satisfy several conditions one after another, in `seconds` from the first to the last."""

    members: tuple[Condition, ...]
    keys: tuple[Key, ...]
    seconds: int


@dataclass(frozen=True)
class Missing:
    """An event that satisfies the first member, and none of its key that satisfies another one up to `seconds` later."""

    members: tuple[Condition, ...]
    keys: tuple[Key, ...]
    seconds: int


Correlation = Measured | Together | Ordered | Missing
Shape = Single | Correlation


@dataclass(frozen=True)
class Detection:
    """A rule that was read. losses: why the written rule differs from it, besides what the writer finds."""

    origin: Origin
    shape: Shape
    losses: tuple[Reason, ...] = ()


@dataclass(frozen=True)
class Unread:
    """A rule or a file that cannot be taken over, or that another rule contains (`part_of`)."""

    origin: Origin
    reasons: tuple[Reason, ...] = ()
    part_of: str = ""


def name_member(at: int) -> str:
    """Returns the name of a member's measure or step, counted from 0."""
    return f"part_{at + 1}"


def list_members(shape: Shape) -> tuple[Condition, ...]:
    """Lists the conditions of a rule."""
    return (shape.condition,) if isinstance(shape, Single) else shape.members


def list_fields_read(shape: Shape) -> list[str]:
    """Lists the fields that a rule reads, each once."""
    found = [field for condition in list_members(shape) for field in list_fields(condition)]
    if not isinstance(shape, Single):
        found += [field for key in shape.keys for field in key.fields]
    if isinstance(shape, Measured):
        found += shape.fields
    return list(dict.fromkeys(found))

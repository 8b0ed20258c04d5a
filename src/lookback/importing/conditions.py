"""Conditions on one event, as rules of other systems have them: each is true or false, also where a field is missing.

A test of a field that an event lacks is false, so its opposite is true. `expressions` writes them as SQL, where a
missing field is NULL.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum


class Wildcard(Enum):
    """A part of a pattern that stands for other text."""

    ANY = "any text, also none"
    ONE = "any one character"


# A pattern: texts that stand for themselves, and wildcards. An empty one is the empty text.
Pattern = tuple["str | Wildcard", ...]


@dataclass(frozen=True)
class And:
    """All parts hold; true without parts."""

    parts: tuple[Condition, ...]


@dataclass(frozen=True)
class Or:
    """A part holds; false without parts."""

    parts: tuple[Condition, ...]


@dataclass(frozen=True)
class Not:
    """The part does not hold."""

    part: Condition


@dataclass(frozen=True)
class Text:
    """A field is a text, or fits a pattern as a whole; of an array, an item is or does.

    is_cased: Whether capitals and small letters are different letters.
    """

    field: str
    pattern: Pattern
    is_cased: bool = False


@dataclass(frozen=True)
class Number:
    """A field is a number, or a text that is one, and compares with another number. operator: `=`, `<`, ..., as in SQL."""

    field: str
    operator: str
    number: int | Decimal


@dataclass(frozen=True)
class Flag:
    """A field is true or false."""

    field: str
    is_true: bool


@dataclass(frozen=True)
class Present:
    """An event has the field."""

    field: str


@dataclass(frozen=True)
class Regex:
    """A regular expression is found in a field. flags: letters of `ims`."""

    field: str
    pattern: str
    flags: str = ""


@dataclass(frozen=True)
class Network:
    """A field is an address in a range such as 10.0.0.0/8."""

    field: str
    cidr: str


@dataclass(frozen=True)
class Listed:
    """A field, in small letters, is in a list."""

    field: str
    list: str


class Relation(Enum):
    """How the value of one field relates to that of another."""

    EQUALS = "="
    STARTS = "startswith"
    ENDS = "endswith"
    CONTAINS = "contains"


@dataclass(frozen=True)
class Fields:
    """A field relates to another field, whatever the case."""

    field: str
    relation: Relation
    other: str


@dataclass(frozen=True)
class TimePart:
    """A part of a time is a number. part: the name of a function, such as `hour`."""

    field: str
    part: str
    number: int


@dataclass(frozen=True)
class Given:
    """A condition that the user has written as SQL over the stream's fields."""

    sql: str


Test = Text | Number | Flag | Present | Regex | Network | Listed | Fields | TimePart
Condition = And | Or | Not | Test | Given


def list_tests(condition: Condition) -> Iterator[Test]:
    """Lists the tests of fields in a condition, in order."""
    if isinstance(condition, (And, Or)):
        for part in condition.parts:
            yield from list_tests(part)
    elif isinstance(condition, Not):
        yield from list_tests(condition.part)
    elif not isinstance(condition, Given):
        yield condition


def list_fields(condition: Condition) -> list[str]:
    """Lists the fields that a condition reads, each once, in order."""
    found: dict[str, None] = {}
    for test in list_tests(condition):
        found[test.field] = None
        if isinstance(test, Fields):
            found[test.other] = None
    return list(found)

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
class Call:
    """A value that is computed of fields and literals. NULL if a field is missing.

    Attributes:
        function: One of those that `calls` writes, in small letters.
        arguments: Fields are texts; literals stand in a `Literal`.
        is_cased: Whether it tells capitals from small letters, where it looks for a text.
    """

    function: str
    arguments: tuple[Operand | Literal, ...]
    is_cased: bool = True


@dataclass(frozen=True)
class Literal:
    """A value that is written in a rule."""

    value: str | int | Decimal


# The name of a field, or what is computed of fields.
Operand = str | Call


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

    field: Operand
    pattern: Pattern
    is_cased: bool = False


@dataclass(frozen=True)
class Number:
    """A field is a number, or a text that is one, and compares with another number. operator: `=`, `<`, ..., as in SQL."""

    field: Operand
    operator: str
    number: int | Decimal


@dataclass(frozen=True)
class Flag:
    """A field is true or false."""

    field: Operand
    is_true: bool


@dataclass(frozen=True)
class Present:
    """An event has the field."""

    field: Operand


@dataclass(frozen=True)
class Regex:
    """A regular expression is found in a field. flags: letters of `ims`."""

    field: Operand
    pattern: str
    flags: str = ""


@dataclass(frozen=True)
class Network:
    """A field is an address in a range such as 10.0.0.0/8."""

    field: Operand
    cidr: str


@dataclass(frozen=True)
class Listed:
    """A field is in a list; in small letters, unless is_cased."""

    field: str
    list: str
    is_cased: bool = False


class Relation(Enum):
    """How the value of one field relates to that of another."""

    EQUALS = "="
    STARTS = "startswith"
    ENDS = "endswith"
    CONTAINS = "contains"


@dataclass(frozen=True)
class Fields:
    """A field relates to another field, whatever the case unless is_cased."""

    field: Operand
    relation: Relation
    other: Operand
    is_cased: bool = False


@dataclass(frozen=True)
class Compared:
    """Numbers compare, or texts if the other one is a text. operator: as in SQL."""

    field: Operand
    operator: str
    other: Operand | Literal


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


Test = Text | Number | Flag | Present | Regex | Network | Listed | Fields | Compared | TimePart
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


def list_operands(operand: Operand | Literal) -> Iterator[str]:
    """Lists the fields that a value is computed of."""
    if isinstance(operand, Call):
        for argument in operand.arguments:
            yield from list_operands(argument)
    elif isinstance(operand, str):
        yield operand


def list_fields(condition: Condition) -> list[str]:
    """Lists the fields that a condition reads, each once, in order."""
    found: dict[str, None] = {}
    for test in list_tests(condition):
        operands = (test.field, test.other) if isinstance(test, (Fields, Compared)) else (test.field,)
        found.update(dict.fromkeys(name for each in operands for name in list_operands(each)))
    return list(found)

"""Writes conditions as SQL of rules.

A test that an event cannot satisfy because it lacks the field is NULL there, which is no alert. So only `not` has to make
it false: `not coalesce(x, false)`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeGuard

from lookback.core.expressions.letters import change_to_lower
from lookback.core.expressions.like import MAX_LIKE_PART_CHARACTERS
from lookback.core.values.types import STRING, DataType
from lookback.importing.calls import DECIMAL, ITEM, as_text, find_array, write_operand
from lookback.importing.conditions import (
    And,
    Compared,
    Condition,
    Fields,
    Flag,
    Given,
    Listed,
    Literal,
    Network,
    Not,
    Number,
    Or,
    Pattern,
    Present,
    Regex,
    Relation,
    Text,
    TimePart,
    Wildcard,
)
from lookback.importing.fields import FieldNames
from lookback.importing.literals import write_text
from lookback.importing.reasons import Refusal

# How a word binds its neighbours; a part that binds less is put in parentheses.
_OR, _AND, _NOT, _TEST = range(4)
_WHOLE = re.compile(r"-?(0|[1-9][0-9]{0,17})", re.ASCII)
_FRACTION = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,9})?", re.ASCII)

Sql = tuple[int, str]


def write_condition(condition: Condition, names: FieldNames) -> str:
    """Writes a condition as SQL. Raises Refusal for a field that the stream lacks, or whose type does not fit."""
    return _write(condition, names)[1]


def _write(condition: Condition, names: FieldNames) -> Sql:
    if isinstance(condition, And):
        return _join(condition.parts, names, _AND)
    if isinstance(condition, Or):
        return _join(condition.parts, names, _OR)
    if isinstance(condition, Not):
        return _write_not(condition.part, names)
    if isinstance(condition, Given):
        return _OR, condition.sql
    return _write_tests([condition], names, "any")


def _write_not(part: Condition, names: FieldNames) -> Sql:
    if isinstance(part, Not):
        return _write(part.part, names)
    if (isinstance(part, Present) or _is_any(part)) and _is_plain(part, names):
        return _TEST, f"{write_operand(part.field, names)[0]} is null"
    return _NOT, f"not coalesce({_write(part, names)[1]}, false)"


def _flatten(parts: Iterable[Condition], kind: type[And] | type[Or]) -> Iterator[Condition]:
    for part in parts:
        if isinstance(part, kind):
            yield from _flatten(part.parts, kind)
        else:
            yield part


def _join(parts: Sequence[Condition], names: FieldNames, level: int) -> Sql:
    """Joins the parts by `and` or `or`; tests of one field of the same kind become one test of several values."""
    kind, word, quantity = (And, "and", "all") if level == _AND else (Or, "or", "any")
    flat = list(dict.fromkeys(_flatten(parts, kind)))
    if not flat:
        return _TEST, "true" if level == _AND else "false"
    groups: dict[object, list[Condition]] = {}
    for at, part in enumerate(flat):
        groups.setdefault(_find_group(part, quantity) or at, []).append(part)
    written = [
        _write_tests(group, names, quantity) if len(group) > 1 else _write(group[0], names) for group in groups.values()
    ]
    if len(written) == 1:
        return written[0]
    return level, f" {word} ".join(f"({sql})" if inner <= level else sql for inner, sql in written)


def _find_group(part: Condition, quantity: str) -> object:
    """Returns what tests have in common that can be written as one; None for a part that stands alone."""
    if isinstance(part, Network) or (isinstance(part, Number) and part.operator == "="):
        return (part.field, type(part)) if quantity == "any" else None
    if not isinstance(part, Text):
        return None
    is_literal = not _has_wildcards(part.pattern)
    # `like all` has no pattern for two texts that a field equals.
    return None if is_literal and quantity == "all" else (part.field, part.is_cased, is_literal)


def _is_plain(test: Present | Text, names: FieldNames) -> bool:
    """Returns whether a field is there or not, without items of an array that could be asked."""
    is_field = isinstance(test, Present) and isinstance(test.field, str)
    return is_field or find_array([test.field], names) is None


def _is_any(test: Condition) -> TypeGuard[Text]:
    """Returns whether a test asks for any text, so that a field need only be there."""
    return isinstance(test, Text) and set(test.pattern) == {Wildcard.ANY}


def _has_wildcards(pattern: Pattern) -> bool:
    return any(isinstance(part, Wildcard) for part in pattern)


def _write_tests(tests: Sequence[Condition], names: FieldNames, quantity: str) -> Sql:
    """Writes tests of one field of one kind; of which any, or all, hold."""
    first = tests[0]
    assert not isinstance(first, (And, Or, Not, Given))
    operands = [first.field, *([first.other] if isinstance(first, (Fields, Compared)) else [])]
    if isinstance(first, Present) and isinstance(first.field, str):
        return _TEST, f"{names.write(first.field)} is not null"
    array = find_array(operands, names)
    if isinstance(first, (Fields, Compared)):
        return _TEST, _wrap(_write_relation(first, names, array), array, names)
    field, type_ = write_operand(first.field, names, array)
    if array is None:
        return _write_values(tests, field, type_, quantity)
    if quantity == "all":
        # Each may be satisfied by another item.
        each = [_wrap(_write_values([test], field, type_, "any")[1], array, names) for test in tests]
        return _join_written(each, quantity)
    return _TEST, _wrap(_write_values(tests, field, type_, quantity)[1], array, names)


def _wrap(sql: str, array: str | None, names: FieldNames) -> str:
    """Writes that an item of an array satisfies a condition."""
    return sql if array is None else f"exists({names.write(array)}, {ITEM} -> {sql})"


def _write_values(tests: Sequence[Condition], field: str, type_: DataType, quantity: str) -> Sql:
    """Writes tests of one kind of a value."""
    first = tests[0]
    if isinstance(first, Text):
        return _write_texts([test for test in tests if isinstance(test, Text)], field, type_, quantity)
    if isinstance(first, Network):
        ranges = ", ".join(write_text(test.cidr) for test in tests if isinstance(test, Network))
        return _TEST, f"cidr_match({as_text(field, type_)}, {ranges})"
    if isinstance(first, Number) and first.operator == "=":
        numbers = [str(test.number) for test in tests if isinstance(test, Number)]
        if type_.is_numeric:
            return _TEST, _write_in(field, numbers)
        return _TEST, _write_in(as_text(field, type_), map(write_text, numbers))
    assert not isinstance(first, (And, Or, Not, Given, Fields, Compared))
    return _TEST, _write_value(first, field, type_)


def _write_texts(tests: Sequence[Text], field: str, type_: DataType, quantity: str) -> Sql:
    first = tests[0]
    if not _has_wildcards(first.pattern):
        return _write_equals(["".join(map(str, test.pattern)) for test in tests], field, type_, first.is_cased)
    if len(tests) == 1 and _is_any(first):
        return _TEST, f"{field} is not null"
    text = as_text(field, type_)
    if any(_is_long(test.pattern) for test in tests):
        value = text if first.is_cased else f"lower({text})"
        return _join_written([f"{value} rlike {write_text(_write_regex_of(test))}" for test in tests], quantity)
    word = "like" if first.is_cased else "ilike"
    patterns = [write_text(_write_pattern(test.pattern)) for test in tests]
    if len(patterns) == 1:
        return _TEST, f"{text} {word} {patterns[0]}"
    return _TEST, f"{text} {word} {quantity} ({', '.join(patterns)})"


def _join_written(tests: Sequence[str], quantity: str) -> Sql:
    if len(tests) == 1:
        return _TEST, tests[0]
    return (_AND, " and ".join(tests)) if quantity == "all" else (_OR, " or ".join(tests))


def _is_long(pattern: Pattern) -> bool:
    """Returns whether `like` refuses a pattern, since between two `%` it has more than a number of characters and `_`."""
    pieces: list[list[str | Wildcard]] = [[]]
    for part in pattern:
        if part is Wildcard.ANY:
            pieces.append([])
        else:
            pieces[-1].append(part)
    lengths = (sum(1 if isinstance(part, Wildcard) else len(part) for part in piece) for piece in pieces)
    return any(
        length > MAX_LIKE_PART_CHARACTERS and Wildcard.ONE in piece
        for length, piece in zip(lengths, pieces, strict=True)
    )


def _write_regex_of(test: Text) -> str:
    """Writes a pattern as a regular expression over the text, in small letters unless it is cased."""
    signs = {Wildcard.ANY: ".*", Wildcard.ONE: "."}
    lower = (lambda text: text) if test.is_cased else change_to_lower
    parts = [signs[part] if isinstance(part, Wildcard) else re.escape(lower(part)) for part in test.pattern]
    start = "" if test.pattern[0] is Wildcard.ANY else r"\A"
    end = "" if test.pattern[-1] is Wildcard.ANY else r"\z"
    return f"(?s){start}{''.join(parts).removeprefix('.*').removesuffix('.*')}{end}"


def _write_pattern(pattern: Pattern) -> str:
    signs = {Wildcard.ANY: "%", Wildcard.ONE: "_"}
    return "".join(
        signs[part] if isinstance(part, Wildcard) else re.sub(r"([\\%_])", r"\\\1", part) for part in pattern
    )


def _write_equals(texts: Sequence[str], field: str, type_: DataType, is_cased: bool) -> Sql:
    """Writes that a value is one of the texts."""
    as_value = {"boolean": _as_flag}.get(type_.name, _as_number if type_.is_numeric else None)
    if as_value is not None:
        values = [as_value(text, type_) for text in texts]
        if None not in values:
            return _TEST, _write_in(field, [str(value) for value in values])
    # Digits and signs have no case.
    if is_cased or all(text.upper() == text.lower() for text in texts):
        return _TEST, _write_in(as_text(field, type_), [write_text(text) for text in texts])
    return _TEST, _write_in(f"lower({as_text(field, type_)})", [write_text(change_to_lower(text)) for text in texts])


def _write_in(value: str, literals: Iterable[str]) -> str:
    listed = list(dict.fromkeys(literals))
    return f"{value} = {listed[0]}" if len(listed) == 1 else f"{value} in ({', '.join(listed)})"


def _as_flag(text: str, _: DataType) -> str | None:
    return text.lower() if text.lower() in ("true", "false") else None


def _as_number(text: str, type_: DataType) -> str | None:
    """Returns a text as a number of the field's type; None if no such number is written so."""
    return text if (_WHOLE if type_.is_integer else _FRACTION).fullmatch(text) else None


def _write_value(test: Number | Flag | Present | Regex | Listed | TimePart, field: str, type_: DataType) -> str:
    """Writes a test of one value."""
    if isinstance(test, Present):
        return f"{field} is not null"
    if isinstance(test, Number):
        if not type_.is_numeric and type_ != STRING:
            raise Refusal("type", f"{field} is {type_}, and is compared with the number {test.number}")
        number = field if type_.is_numeric else f"try_cast({field} as {DECIMAL})"
        return f"{number} {test.operator} {test.number}"
    if isinstance(test, TimePart):
        if type_.name not in ("timestamp", "date"):
            raise Refusal("type", f"{field} is {type_}, and the rule asks for its {test.part}; declare it as timestamp")
        return f"{test.part}({field}) = {test.number}"
    if isinstance(test, Flag) and type_.is_numeric:
        return f"{field} = {int(test.is_true)}"
    if isinstance(test, Flag):
        word = "true" if test.is_true else "false"
        return f"{field} = {word}" if type_.name == "boolean" else f"lower({as_text(field, type_)}) = '{word}'"
    text = as_text(field, type_)
    if isinstance(test, Regex):
        flags = f"(?{test.flags})" if test.flags else ""
        return f"{text} rlike {write_text(flags + test.pattern)}"
    return f"in_list({text if test.is_cased else f'lower({text})'}, {write_text(test.list)})"


def _write_relation(test: Fields | Compared, names: FieldNames, array: str | None) -> str:
    """Writes how two fields or computed values relate."""
    if array in (test.field, test.other):
        raise Refusal("type", f"{test.field} or {test.other} is an array, and they are compared with each other")
    values = [write_operand(each, names, array) for each in (test.field, test.other)]
    if isinstance(test, Compared):
        if isinstance(test.other, Literal):
            return f" {test.operator} ".join(as_text(*value) for value in values)
        numbers = [sql if type_.is_numeric else f"try_cast({sql} as {DECIMAL})" for sql, type_ in values]
        return f" {test.operator} ".join(numbers)
    if test.relation is Relation.EQUALS and all(type_.is_numeric for _, type_ in values):
        return " = ".join(sql for sql, _ in values)
    texts = [as_text(*value) if test.is_cased else f"lower({as_text(*value)})" for value in values]
    if test.relation is Relation.EQUALS:
        return " = ".join(texts)
    return f"{test.relation.value}({', '.join(texts)})"

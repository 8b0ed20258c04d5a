"""Parses the fields of a declaration: their names, their types, and texts per field.

A struct is declared as a whole and read by its parts, so that each part is a field of its own:

    process: struct<name: string, parent: struct<name: string>>      process.name, process.parent.name
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Annotated, NamedTuple, TypeVar

from pydantic import PlainValidator

from lookback.core.errors import Problem, TypeNameError
from lookback.core.values.reading import Refused
from lookback.core.values.types import MAX_ARRAYS, DataType, parse_type

T = TypeVar("T")
# The column in which ingest stores where it read an event.
POSITION = "position"
_FIELD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)
_STRUCT = re.compile(r"\s*struct\s*<(.*)>\s*", re.ASCII | re.IGNORECASE | re.DOTALL)
_MEMBER = re.compile(r"\s*`?([^`:\s]*)`?\s*(?::\s*|\s)(.*)", re.ASCII | re.DOTALL)
_STRUCTS = re.compile(r"\s*array\s*<.*\bstruct\s*<.*", re.ASCII | re.IGNORECASE | re.DOTALL)
# Columns that the change feed or the engine adds.
RESERVED_FIELDS = frozenset(
    {
        *("ingested_at", "arrival", "committed_at", "_change_type", "_commit_version", "_commit_timestamp"),
        *("_kind", "_committed"),
    }
)


class ParsedFields(NamedTuple):
    """The valid fields of a declaration, and the problems of the invalid ones."""

    types: dict[str, DataType]
    problems: list[Problem]


def is_field_name(name: object) -> bool:
    """Returns whether this is a valid name for a field."""
    return isinstance(name, str) and bool(_FIELD.fullmatch(name))


def parse_fields(declared: object) -> ParsedFields:
    """Parses a mapping of field to Spark type. The place of a problem is relative to the mapping."""
    if not isinstance(declared, Mapping) or not declared:
        return ParsedFields({}, [Problem("", f"a mapping of field to Spark type is needed, got {declared!r}")])
    fields: dict[str, DataType] = {}
    problems: list[Problem] = []
    lowered: set[str] = set()
    for name, text in declared.items():
        if not is_field_name(name):
            problems.append(Problem(str(name), f"{name!r} is not a field name; use letters, digits and _"))
        elif name.lower() in RESERVED_FIELDS:
            problems.append(Problem(name, f"{name!r} is a column that the engine adds; choose another name"))
        elif name.lower() in lowered:
            problems.append(Problem(name, f"{name!r} is declared twice (Spark does not tell capitals apart)"))
        else:
            lowered.add(name.lower())
            try:
                fields |= _parse_field(name, text)
            except TypeNameError as error:
                problems.append(Problem(name, str(error)))
    return ParsedFields(fields, problems)


def _parse_field(name: str, text: object) -> dict[str, DataType]:
    """Parses the type of a field; a struct gives its parts, by their names with dots. Raises TypeNameError."""
    if not (isinstance(text, str) and (struct := _STRUCT.fullmatch(text))):
        if isinstance(text, str) and _STRUCTS.fullmatch(text):
            remedy = (
                "declare an array of one part of it, and map it in `columns`, such as `columns: {names: items.name}`"
            )
            raise TypeNameError(f"{text!r:.100}: structs in arrays cannot be read; {remedy}")
        return {name: parse_type(text, explicit=True)}
    fields: dict[str, DataType] = {}
    if name.count(".") >= MAX_ARRAYS:
        raise TypeNameError(f"{name!r:.100} is a struct within more than {MAX_ARRAYS} others; use fewer levels")
    for part in _split_members(struct.group(1)):
        member = _MEMBER.fullmatch(part)
        if member is None or not is_field_name(member.group(1)):
            raise TypeNameError(
                f"{part.strip()!r:.100} in the struct {name!r} is not a name and a type; write them as `name: string`"
            )
        whole = f"{name}.{member.group(1)}"
        if any(f"{field}.".lower().startswith(f"{whole}.".lower()) for field in fields):
            raise TypeNameError(f"{whole!r} is declared twice (Spark does not tell capitals apart)")
        fields |= _parse_field(whole, member.group(2))
    return fields


def _split_members(text: str) -> Iterator[str]:
    """Splits the members of a struct at the commas between them."""
    depth, begin = 0, 0
    for at, character in enumerate(text):
        depth += (character in "<(") - (character in ">)")
        if character == "," and not depth:
            yield text[begin:at]
            begin = at + 1
    yield text[begin:]


def nest_parts(fields: Mapping[str, T], join: Callable[[Mapping[str, T]], T]) -> dict[str, T]:
    """Returns what fields have by columns, in order. `join` makes one of the parts of a struct, by their names."""
    columns: dict[str, T] = {}
    for name, value in fields.items():
        root, dot, _ = name.partition(".")
        if not dot:
            columns[name] = value
        elif root not in columns:
            own = {each[len(root) + 1 :]: of for each, of in fields.items() if each.startswith(f"{root}.")}
            columns[root] = join(nest_parts(own, join))
    return columns


def nest_fields(fields: Mapping[str, DataType]) -> dict[str, str]:
    """Returns the columns that hold fields, in order: name -> Spark type. Parts of a struct are in one column."""
    types = {name: str(type_) for name, type_ in fields.items()}
    return nest_parts(types, lambda parts: f"struct<{','.join(f'{name}:{type_}' for name, type_ in parts.items())}>")


def _require_fields(fields: ParsedFields) -> dict[str, DataType]:
    if fields.problems:
        raise Refused(fields.problems)
    return fields.types


def texts_by_field(kind: str) -> PlainValidator:
    """Returns a validator for a mapping of field to text."""

    def read(texts: object) -> dict[str, str]:
        texts = texts or {}
        if not isinstance(texts, Mapping):
            raise ValueError(f"a mapping of field to {kind} is needed, got {texts!r}")
        wrong = {name: text for name, text in texts.items() if not isinstance(text, str)}
        if wrong:
            raise Refused(Problem(str(name), f"a {kind} is needed, got {text!r}") for name, text in wrong.items())
        return dict(texts)

    return PlainValidator(read)


def find_undeclared(texts: object, fields: Collection[str], place: str, of: str) -> Iterator[Problem]:
    """Finds names in a mapping of field to text that are not declared. of: where they should be declared."""
    for name in texts if isinstance(texts, Mapping) else ():
        if name not in fields:
            yield Problem(f"{place}.{name}", f"{name!r} is not one of {of}")


# A key whose value has been parsed by `parse_fields`.
FieldTypes = Annotated[Mapping[str, DataType], PlainValidator(_require_fields)]

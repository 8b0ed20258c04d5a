"""Parses the fields of a declaration: their names, their types, and texts per field."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, NamedTuple

from pydantic import PlainValidator

from lookback.core.errors import Problem, TypeNameError
from lookback.core.values.reading import Refused
from lookback.core.values.types import DataType, parse_type

# The column in which ingest stores where it read an event.
POSITION = "position"
_FIELD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)
# Columns that the change feed or the engine adds.
RESERVED_FIELDS = frozenset(
    {"ingested_at", "arrival", "committed_at", "_change_type", "_commit_version", "_commit_timestamp"}
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
                fields[name] = parse_type(text, explicit=True)
            except TypeNameError as error:
                problems.append(Problem(name, str(error)))
    return ParsedFields(fields, problems)


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


def find_undeclared(texts: object, fields: Mapping[str, DataType], place: str, of: str) -> Iterator[Problem]:
    """Finds names in a mapping of field to text that are not declared. of: where they should be declared."""
    for name in texts if isinstance(texts, Mapping) else ():
        if name not in fields:
            yield Problem(f"{place}.{name}", f"{name!r} is not one of {of}")


# A key whose value has been parsed by `parse_fields`.
FieldTypes = Annotated[Mapping[str, DataType], PlainValidator(_require_fields)]

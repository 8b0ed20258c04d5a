"""Look-ups of a stream: the tables that ingest joins, and the fields that they add to each event.

The event stores the joined values and the version of the table that they came from, so later changes to the table do
not affect how the event is judged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from pydantic import PlainValidator

from lookback.core.errors import Problem
from lookback.core.streams.fields import (
    FieldTypes,
    ParsedFields,
    find_undeclared,
    is_field_name,
    parse_fields,
    texts_by_field,
)
from lookback.core.values.reading import Refused, read_mapping
from lookback.core.values.suggestions import suggest
from lookback.core.values.types import BIGINT, DataType

# What ingest does with an event whose key has no row in the table, or several rows that differ.
NULL, REJECT = "null", "reject"
_TABLE = re.compile(r"[a-z][a-z0-9_]{0,127}|(?:\w[\w-]{0,254}\.){2}\w{1,255}", re.ASCII)


def _read_table(table: object) -> str:
    if not (isinstance(table, str) and _TABLE.fullmatch(table) and is_field_name(name_version_field(table))):
        raise ValueError(
            "a table beside the stream's, such as customers, or catalog.schema.table is needed, with letters, digits and _ "
            f"in the name of the table, got {table!r:.100}"
        )
    return table


def _read_keys(on: object) -> dict[str, str]:
    keys = {on: on} if isinstance(on, str) and on else on
    if not (isinstance(keys, Mapping) and keys and all(_is_text(each) for pair in keys.items() for each in pair)):
        raise ValueError(
            f"a field, or a mapping of field to the table's column such as {{customer_id: id}}, is needed, got {on!r:.100}"
        )
    return dict(keys)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _read_policy(policy: object) -> str:
    # YAML reads the bare word as None.
    if policy is None or policy == NULL:
        return NULL
    if policy != REJECT:
        raise ValueError(f"null (the event is taken, with NULL in the fields) or reject is needed, got {policy!r:.100}")
    return REJECT


Policy = Annotated[str, PlainValidator(_read_policy)]


@dataclass(frozen=True)
class Lookup:
    """A table that ingest joins to each event.

    table: the name of a table stored next to the stream's tables, or catalog.schema.table. on: field of the event ->
    column of the table; a row matches an event if all of them are equal, and NULL equals nothing. fields: the fields
    that the look-up adds, name -> type. columns: field -> SQL expression over the table's columns; default: the column
    of the same name. missing, ambiguous: NULL or REJECT, for an event without a row, and for one with rows whose fields
    differ.
    """

    table: Annotated[str, PlainValidator(_read_table)]
    on: Annotated[Mapping[str, str], PlainValidator(_read_keys)]
    fields: FieldTypes
    columns: Annotated[Mapping[str, str], texts_by_field("SQL expression")] = field(default_factory=dict)
    missing: Policy = NULL
    ambiguous: Policy = REJECT

    @property
    def version_field(self) -> str:
        """The field that holds the version of the table."""
        return name_version_field(self.table)

    @property
    def brings(self) -> Mapping[str, DataType]:
        """All fields that the look-up adds; the version field is last."""
        return {**self.fields, self.version_field: BIGINT}

    def to_dict(self) -> dict[str, Any]:
        """Returns the look-up in the form of a declaration, with all defaults."""
        return {
            "table": self.table,
            "on": dict(self.on),
            "fields": {name: str(type_) for name, type_ in self.fields.items()},
            "columns": dict(self.columns),
            "missing": None if self.missing == NULL else self.missing,
            "ambiguous": None if self.ambiguous == NULL else self.ambiguous,
        }


def name_version_field(table: str) -> str:
    """Returns the name of the field that holds the version of a table: the last part of its name and `_version`."""
    return f"{table.rpartition('.')[2]}_version"


class ParsedLookups(NamedTuple):
    """The valid look-ups of a declaration, the fields that look-ups add, and all problems."""

    listed: tuple[Lookup, ...]
    fields: dict[str, DataType]
    problems: list[Problem]


def parse_lookups(declared: object, own: ParsedFields, names: set[Any]) -> ParsedLookups:
    """Parses the look-ups of a stream. own: the fields of its source; names: all declared names, valid or not."""
    if declared is None:
        return ParsedLookups((), {}, [])
    if not isinstance(declared, (list, tuple)):
        problem = f"a list of look-ups, each with table, on and fields, is needed, got {declared!r:.100}"
        return ParsedLookups((), {}, [Problem("lookups", problem)])
    listed, fields, problems = list[Lookup](), dict[str, DataType](), list[Problem]()
    taken = _Taken({str(name).lower(): "" for name in names})
    for at, each in enumerate(declared):
        place = f"lookups[{at}]"
        if not isinstance(each, Mapping):
            problem = f"a mapping of table, on and fields is needed, got {each!r:.100}"
            problems.append(Problem(place, problem))
            continue
        # YAML 1.1 reads a bare `on` as true.
        document = {"on" if key is True else key: value for key, value in each.items()}
        parsed = parse_fields(document.get("fields"))
        found = [*_find_contradictions(document, parsed, own, names), *taken.add(document.get("table"), parsed, place)]
        try:
            lookup = read_mapping(Lookup, {**document, "fields": parsed}, found)
        except Refused as error:
            problems += [Problem(f"{place}.{each.place}", each.message) for each in error.problems]
            fields |= parsed.types
        else:
            listed.append(lookup)
            fields |= lookup.brings
    return ParsedLookups(tuple(listed), fields, problems)


def _find_contradictions(
    document: Mapping[Any, Any], parsed: ParsedFields, own: ParsedFields, names: set[Any]
) -> Iterator[Problem]:
    """Finds values that contradict the stream's own fields or another key of the look-up."""
    on = document.get("on")
    for name in [on] if isinstance(on, str) and on else on if isinstance(on, Mapping) else ():
        if _is_text(name) and names and name not in names:
            hint = suggest(name, map(str, names), "")
            yield Problem("on", f"{name!r} is not one of the declared fields" + (f"; {hint}" if hint else ""))
        elif name in own.types and own.types[name].name == "array":
            yield Problem("on", f"field {name!r} is {own.types[name]}; a table is looked up by single values")
        elif name in own.types and "." in name:
            yield Problem("on", f"{name!r} is in a struct; declare a field of its own for it, and map it in `columns`")
    for name in parsed.types:
        if "." in name:
            yield Problem(
                f"fields.{name}",
                "a look-up brings single values; declare a field for each part, and map it in `columns`",
            )
    yield from find_undeclared(document.get("columns"), parsed.types, "columns", "the fields of this look-up")


class _Taken:
    """The column names in use so far, in lower case. places: where each is declared; empty for the stream's own."""

    def __init__(self, places: dict[str, str]) -> None:
        self._places = places
        self._tables: dict[str, str] = {}

    def add(self, table: object, parsed: ParsedFields, place: str) -> Iterator[Problem]:
        """Adds the fields and the version field of a look-up. Yields a problem for each name that is already in use."""
        for name in parsed.types:
            other = self._places.setdefault(name.lower(), place)
            version_of = self._tables.get(name.lower())
            if other != place or version_of is not None:
                yield Problem(f"fields.{name}", _explain_taken(name, other, version_of))
        if not (isinstance(table, str) and _TABLE.fullmatch(table)):
            return
        version_field = name_version_field(table)
        known = self._tables.setdefault(version_field.lower(), table)
        if known != table:
            yield Problem(
                "table",
                f"the version of {known} is kept in field {version_field!r} too; look up in one of the two tables",
            )
        elif version_field.lower() in self._places:
            yield Problem(
                "table",
                f"field {version_field!r}, which holds the version of the table, is declared already; rename that field",
            )


def _explain_taken(name: str, other: str, version_of: str | None) -> str:
    if version_of is not None:
        where = f"holds the version of {version_of}"
    else:
        where = f"is declared already, in {other}" if other else "is declared already"
    return f"{name!r} {where}; bring it under another name, with columns: {{other_name: {name}}}"

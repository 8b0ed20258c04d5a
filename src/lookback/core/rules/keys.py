"""The entries of a key, such as those of group_by: fields, and expressions over the event that have a name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lookback.core.errors import ExpressionError, Problem
from lookback.core.expressions.compiling import Expression, compile_expression, list_rounded, recompile
from lookback.core.expressions.syntax import MAX_CHARACTERS, name_as_sql
from lookback.core.expressions.textsearch import never_fails
from lookback.core.rules.kinds import NAMES, Kind, Reading, check_name, is_blank, settle
from lookback.core.rules.parameters import Parameters
from lookback.core.rules.problems import make_problem, quote_value
from lookback.core.streams.declaration import Stream
from lookback.core.values.reading import Refused, put_below
from lookback.core.values.suggestions import suggest
from lookback.core.values.types import DataType

# The first and last value that Python can show, of types whose expressions can go beyond them.
_CALENDARS = {
    "date": "date '0001-01-01' and date '9999-12-31'",
    "timestamp": "timestamp '0001-01-01 00:00:00' and timestamp '9999-12-31 23:59:59.999999'",
}
_EXAMPLE = "such as {domain: \"lower(split_part(email, '@', 2))\"}"


@dataclass(frozen=True)
class KeyEntry:
    """An entry of a key as it is written: a field, or a name for an expression.

    name: the field, or the name. expression: empty for a field.
    """

    name: str
    expression: str = ""


@dataclass(frozen=True)
class KeyPart:
    """An entry of a key, bound to its stream.

    Attributes:
        name: What alerts, messages and people call it: the field, or the name of the expression.
        column: What state and shards call it: the field, or the canonical SQL of the expression, which no field has
            as its name. Entries with equal columns have equal values.
        type: The type of its values.
        fields: The fields that it reads.
        guard: A condition in SQL that is true, or an error if the entry has an error; empty if it cannot have one.
    """

    name: str
    column: str
    type: DataType
    fields: frozenset[str]
    guard: str = ""

    @property
    def sql(self) -> str:
        """The SQL of an entry that is not a field; empty for a field."""
        return "" if self.column in self.fields else self.column


def read_entries(value: Any, reading: Reading) -> tuple[KeyEntry, ...]:
    """Reads a list of fields and of mappings from one name to an expression."""
    if not isinstance(value, list) or not all(isinstance(each, (str, Mapping)) for each in value):
        raise ValueError(f"must be a list of field names, such as [customer_id], got {quote_value(value)}")
    entries, problems, known = list[KeyEntry](), list[Problem](), set[str]()
    for at, each in enumerate(value):
        entry, found = (KeyEntry(each), []) if isinstance(each, str) else _read_expression(each, reading)
        problems += [put_below(f"[{at}]", problem) for problem in found]
        if entry is None:
            continue
        if entry.name.lower() in known:
            message = f"names a field twice (capitals make no difference): {quote_value(value)}; leave one out"
            problems.append(Problem("", message))
        else:
            known.add(entry.name.lower())
            entries.append(entry)
    return settle(tuple(entries), problems)


def _read_expression(value: Mapping[Any, Any], reading: Reading) -> tuple[KeyEntry | None, list[Problem]]:
    if len(value) != 1:
        remedy = "begin a new entry for each name"
        return None, [
            Problem("", f"must be one name with one expression, {_EXAMPLE}, got {quote_value(value)}; {remedy}")
        ]
    ((name, text),) = value.items()
    if message := check_name(name):
        return None, [Problem("", message)]
    if is_blank(text):
        message = f"must be an expression over the event, such as 'lower(email)', got {quote_value(text)}"
        return None, [Problem(name, message)]
    try:
        return KeyEntry(name, reading.fill_expression(text)), []
    except Refused as error:
        return KeyEntry(name, error.partial), [put_below(name, each) for each in error.problems]


KEY = Kind(
    read_entries,
    {
        "type": "array",
        "items": {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "object",
                    "propertyNames": {"pattern": NAMES["pattern"]},
                    "additionalProperties": {"type": "string", "pattern": r"\S", "maxLength": MAX_CHARACTERS},
                    "minProperties": 1,
                    "maxProperties": 1,
                },
            ]
        },
        "uniqueItems": True,
    },
)


def list_entry_names(value: object) -> list[str]:
    """Lists the names of the entries of a key in a document, also of one that was never checked."""
    entries = value if isinstance(value, list) else []
    return [str(name) for each in entries for name in (each if isinstance(each, Mapping) else [each])]


def bind_key(
    entries: Iterable[KeyEntry], stream: Stream, taken: Mapping[str, str]
) -> tuple[list[KeyPart], list[Problem]]:
    """Binds the entries of a key to their stream.

    Args:
        entries: The entries.
        stream: The stream.
        taken: Names in lower case that an expression cannot have beside those of fields, each with what has it.

    Returns:
        The parts in the order of the entries, and the problems.
    """
    parts, problems = dict[str, KeyPart](), list[Problem]()
    fields = {name.lower(): name for name in stream.fields}
    columns = {name.partition(".")[0] for name in fields}
    for at, entry in enumerate(entries):
        here, found, part = "group_by", list[str](), None
        if not entry.expression:
            name = fields.get(entry.name.lower())
            if name is None:
                found.append(explain_unknown_field(entry.name, stream))
            elif stream.fields[name].name == "array":
                found.append(f"field {name!r} is an array and cannot be a key; choose another field")
            else:
                part = KeyPart(name, name, stream.fields[name], frozenset({name}))
        else:
            here, owners = f"group_by[{at}].{entry.name}", {**taken, **dict.fromkeys(columns, "a field of the stream")}
            try:
                part = _bind_expression(entry, stream)
            except ExpressionError as error:
                found += error.problems
            if owner := owners.get(entry.name.lower()):
                found.append(f"{entry.name!r} is {owner}; choose another name")
                part = None
        if part is not None and part.column in parts:
            same = parts[part.column].name
            found.append(f"{same} and {part.name} have the same value in every event; leave one of them out")
        elif part is not None:
            parts[part.column] = part
        problems += [make_problem(here, message) for message in found]
    return list(parts.values()), problems


def find_key(document: Mapping[str, Any], stream: Stream) -> tuple[KeyPart, ...] | None:
    """Finds the key of a document that was checked, by column; None if it does not fit the stream as it is now."""
    parameters = document.get("parameters")
    reading = Reading(Parameters(parameters if isinstance(parameters, Mapping) else {}), stream.limits)
    try:
        parts, problems = bind_key(read_entries(document.get("group_by") or [], reading), stream, {})
    except ValueError:
        return None
    return None if problems else tuple(sorted(parts, key=lambda part: part.column))


def explain_unknown_field(name: str, stream: Stream) -> str:
    """Explains that a stream has no such field, and suggests one."""
    fields = ", ".join(list(stream.fields)[:20]) + (", ..." if len(stream.fields) > 20 else "")
    hint = suggest(name, stream.fields, f"known: {fields}")
    return f"stream {stream.name!r} has no field {quote_value(name)}; {hint}"


def _bind_expression(entry: KeyEntry, stream: Stream) -> KeyPart:
    """Binds an entry with an expression to its stream. Raises ExpressionError with all problems."""
    bound = compile_expression(entry.expression, stream.fields, stream.limits)
    problems = list(_find_unsuitable(bound))
    if problems:
        raise ExpressionError(f"{quote_value(entry.expression)} {each}" for each in problems)
    (name, *others) = bound.named
    if not others and bound.sql == name_as_sql(name):
        return KeyPart(entry.name, name, bound.type, bound.named)
    return KeyPart(entry.name, bound.sql, bound.type, bound.named, _write_guard(bound))


def _find_unsuitable(bound: Expression) -> Iterator[str]:
    """Yields why an expression cannot be in a key."""
    if bound.memberships:
        yield "asks a list, and lists are read after keys have decided where an event is judged; use in_list in where or when"
    elif not bound.named:
        yield "is the same for all events; leave it out, or name a field of the event in it"
    elif bound.type.name == "array":
        yield f"is an {bound.type} and cannot be in a key; make one value of it, as array_join and size do"
    elif bound.type.name == "null":
        yield "is always NULL; leave it out"
    elif rounded := list_rounded(bound):
        yield (
            f"calls {rounded[0]}(), whose last digit may be another one on another machine, and keys decide where an event "
            "is judged; use it in where, when or a measure"
        )
    elif not bound.is_readable:
        yield "is too complex for a key; write it in a simpler way"


def _write_guard(bound: Expression) -> str:
    """Writes a condition that is true, or an error if the expression has an error; empty if it never has one."""
    if bound.type.name in _CALENDARS:
        # No alert could show a value beyond the calendar. Dividing by zero makes it an error.
        return f"({bound.sql}) is null or ({bound.sql}) between {_CALENDARS[bound.type.name]} or 1 div 0 = 0"
    return "" if never_fails(bound) else f"({bound.sql}) is null or true"


def add_guards(where: Expression | None, parts: Iterable[KeyPart], stream: Stream) -> Expression | None:
    """Returns a condition that is an error for an event for which a part has one, unless `where` is false for it."""
    guards = [part.guard for part in parts if part.guard]
    if not guards:
        return where
    texts = [*([where.sql] if where is not None else []), *guards]
    return recompile(" and ".join(f"({text})" for text in texts), stream.fields)

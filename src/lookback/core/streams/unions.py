"""Unions: streams whose events are those of other streams, their members, in one order of arrival.

A union has an events table of its own, which ingest fills from the members' change feeds. Its fields are those of the
members by name, besides an id `member:id`, the member's event time and the field `member`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lookback.core.errors import DurationError, Problem
from lookback.core.streams.fields import parse_fields
from lookback.core.values.durations import format_duration, parse_duration
from lookback.core.values.suggestions import suggest

# The field that names the member from which an event comes.
MEMBER = "member"
# The names of the id and the time of a union that declares none.
DEFAULT_ID, DEFAULT_TIME = "event_id", "event_time"
DEFAULT_IDLE = 3_600_000_000
# Keys that make events out of a source; the events of a union come from its members.
_NOT_OF_UNIONS = {
    "source": "the events of a union come from its members; leave it out",
    "table": "ingest fills the table of a union from its members; leave it out",
    "order_by": "a union keeps the order in which its members' events arrive; leave it out",
    "lookups": "declare the look-ups of the members; a union can have their fields",
}


@dataclass(frozen=True)
class Union:
    """The members of a union. Durations are in microseconds.

    members: member -> its max_out_of_orderness. idle: how far the event time of the others may advance without a new
    event of a member before the watermark no longer waits for that member. columns: member -> field of the union -> SQL
    expression over the member's fields, where the field of the same name is not what is meant.
    """

    members: Mapping[str, int]
    idle: int = DEFAULT_IDLE
    columns: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def max_out_of_orderness(self) -> int:
        """The largest max_out_of_orderness of the members."""
        return max(self.members.values())

    def to_dict(self) -> dict[str, Any]:
        """Returns the keys of a declaration that `parse_union` reads as an equal union."""
        return {
            "union": {name: format_duration(disorder) for name, disorder in self.members.items()},
            "idle": format_duration(self.idle),
            "columns": {member: dict(texts) for member, texts in self.columns.items()},
        }


class ParsedUnion(NamedTuple):
    """The union of a declaration, None if it has none or an invalid one; the remaining keys; and all problems."""

    union: Union | None
    rest: dict[Any, Any]
    problems: list[Problem]


def parse_union(document: Mapping[Any, Any]) -> ParsedUnion:
    """Parses the keys of a union, and fills in the names and types that every union has.

    `union` lists the members, or maps each to its max_out_of_orderness, as declarations read from a folder do. Members
    in a list have the max_out_of_orderness of the document.
    """
    if document.get("union") is None:
        rest = {key: value for key, value in document.items() if key != "union"}
        problems = [Problem("idle", "only a union has idle members; leave it out")] if "idle" in document else []
        return ParsedUnion(None, {key: value for key, value in rest.items() if key != "idle"}, problems)
    rest = {key: value for key, value in document.items() if key not in ("union", "idle", "columns", *_NOT_OF_UNIONS)}
    problems = [Problem(key, why) for key, why in _NOT_OF_UNIONS.items() if document.get(key)]
    members, found = _parse_members(document)
    problems += found
    columns = document.get("columns") or {}
    problems += find_column_problems(columns, members)
    try:
        idle = DEFAULT_IDLE if document.get("idle") is None else parse_duration(document["idle"])
    except DurationError as error:
        problems.append(Problem("idle", str(error)))
        idle = DEFAULT_IDLE
    rest.setdefault("event_id", DEFAULT_ID)
    rest.setdefault("event_time", DEFAULT_TIME)
    if isinstance(fields := rest.get("fields"), Mapping):
        problems += _find_type_problems(rest, fields)
        own = {rest["event_id"]: "string", rest["event_time"]: "timestamp", MEMBER: "string"}
        rest["fields"] = {**{name: type_ for name, type_ in own.items() if isinstance(name, str)}, **fields}
        problems += _find_unknown_columns(columns, rest["fields"], own)
    if problems:
        return ParsedUnion(None, rest, problems)
    union = Union(members, idle, columns)
    return ParsedUnion(union, {**rest, "max_out_of_orderness": format_duration(union.max_out_of_orderness)}, [])


def list_members(document: Mapping[Any, Any]) -> list[str]:
    """Lists the members that a declaration names, whether they are valid or not; none if it is not a union."""
    union = document.get("union")
    return [str(name) for name in union] if isinstance(union, (list, tuple, Mapping)) else []


def _parse_members(document: Mapping[Any, Any]) -> tuple[dict[str, int], list[Problem]]:
    union = document["union"]
    if not isinstance(union, (list, tuple, Mapping)) or not union or not all(isinstance(name, str) for name in union):
        return {}, [Problem("union", f"a list of streams, such as [logins, payments], is needed, got {union!r:.100}")]
    problems, members = list[Problem](), dict[str, int]()
    for name in union:
        if name in members:
            problems.append(Problem("union", f"{name!r} is listed twice; list each stream once"))
        elif name == document.get("stream"):
            problems.append(Problem("union", f"{name!r} is the union itself; list the streams that it is made of"))
        disorder = union[name] if isinstance(union, Mapping) else document.get("max_out_of_orderness", "10 seconds")
        members[name] = 0
        try:
            members[name] = parse_duration(disorder)
        except DurationError as error:
            place = f"union.{name}" if isinstance(union, Mapping) else "max_out_of_orderness"
            problems.append(Problem(place, str(error)))
    return members, problems


def find_column_problems(columns: object, members: Mapping[str, Any]) -> Iterator[Problem]:
    """Finds what is wrong in `columns` of a union, without regard to its fields."""
    example = f"a union has columns per member, such as {{{next(iter(members), 'payments')}: {{user: customer_id}}}}"
    if not isinstance(columns, Mapping):
        yield Problem("columns", f"{example}, got {columns!r:.100}")
        return
    for member, texts in columns.items():
        if not isinstance(texts, Mapping):
            yield Problem(f"columns.{member}", f"{example}, got {texts!r:.100}")
        elif member not in members:
            hint = suggest(str(member), members)
            yield Problem(f"columns.{member}", f"{member!r} is not one of the members of the union; {hint}")
        else:
            for name, text in texts.items():
                if not isinstance(text, str):
                    yield Problem(f"columns.{member}.{name}", f"a SQL expression is needed, got {text!r:.100}")


def _find_unknown_columns(columns: object, fields: Mapping[Any, Any], own: Mapping[Any, str]) -> Iterator[Problem]:
    parts = parse_fields(fields).types
    for member, texts in columns.items() if isinstance(columns, Mapping) else ():
        for name in texts if isinstance(texts, Mapping) else ():
            if name in own:
                yield Problem(
                    f"columns.{member}.{name}", f"ingest makes {name!r} of every event of a union; leave it out"
                )
            elif name not in parts:
                remedy = "map its parts one by one" if name in fields else "declare its type below `fields`"
                kind = "a struct" if name in fields else "not one of the fields of the union"
                yield Problem(f"columns.{member}.{name}", f"{name!r} is {kind}; {remedy}")


def _find_type_problems(document: Mapping[Any, Any], fields: Mapping[Any, Any]) -> Iterator[Problem]:
    """Finds the fields that every union has and that are declared with another type."""
    made = {
        document["event_id"]: ("string", "the id of an event of a union is `member:id`"),
        MEMBER: ("string", "it holds the name of the member"),
    }
    for name, (type_, why) in made.items():
        if isinstance(name, str) and name in fields and fields[name] != type_:
            yield Problem(f"fields.{name}", f"{why}, so its type is {type_}, got {fields[name]!r:.100}")

"""Completes the declaration of a union from the declarations of its members."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lookback.core.errors import Problem
from lookback.core.streams import alerts, metrics
from lookback.core.streams.declaration import Stream
from lookback.core.streams.fields import nest_fields, parse_fields
from lookback.core.streams.unions import DEFAULT_ID, DEFAULT_TIME, MEMBER, list_members
from lookback.core.values.durations import format_duration
from lookback.core.values.suggestions import suggest
from lookback.core.values.types import DataType


def complete_union(
    document: Mapping[Any, Any], streams: Mapping[str, Stream], unions: frozenset[str] = frozenset()
) -> tuple[dict[Any, Any], list[Problem]]:
    """Completes the document of a union, so that `Stream.from_dict` reads it without the members.

    It gets the max_out_of_orderness of each member and, if it declares no fields, those of all members except their ids
    and times.

    Args:
        document: The document of a union.
        streams: The declared streams that are not unions, by name.
        unions: The names of the declared unions.

    Returns:
        The completed document, and the problems of the union with its members.
    """
    names = list_members(document)
    problems = list(_find_member_problems(document, names, streams, unions))
    members = {name: streams[name] for name in names if name in streams}
    made = {document.get("event_id", DEFAULT_ID), document.get("event_time", DEFAULT_TIME), MEMBER}
    # `Stream.from_dict` refuses a list with a stream twice, or with the union itself.
    if problems or not members or len({document.get("stream"), *names}) <= len(names):
        fields = document.get("fields") or _gather_fields(members, made) or {MEMBER: "string"}
        return {**document, "fields": fields}, problems
    whole = {**document, "union": {name: format_duration(each.max_out_of_orderness) for name, each in members.items()}}
    is_gathered = document.get("fields") is None
    if is_gathered:
        whole["fields"] = _gather_fields(members, made) or None
    # `Stream.from_dict` finds the problems of the types themselves.
    fields = parse_fields(whole["fields"]).types
    given = {name: _list_columns(document, name) for name in members}
    for name, stream in members.items():
        compared = {field: type_ for field, type_ in fields.items() if field not in made and field not in given[name]}
        problems += _find_clashes(name, stream, compared, members if is_gathered else {})
        if is_gathered and MEMBER in _list_fields(stream):
            problems.append(Problem("fields", _explain_member_field(name)))
    for field in fields if not is_gathered else ():
        if field not in made and not any(
            field in each.fields or field in given[name] for name, each in members.items()
        ):
            hint = suggest(field, {each: None for stream in members.values() for each in stream.fields})
            problems.append(Problem(f"fields.{field}", f"none of the members has {field!r}, nor do `columns`; {hint}"))
    return whole, problems


def _find_member_problems(
    document: Mapping[Any, Any], names: list[str], streams: Mapping[str, Stream], unions: frozenset[str]
) -> Iterator[Problem]:
    """Finds the members that cannot be in a union, and the settings that only members have."""
    if isinstance(document.get("union"), Mapping):
        yield Problem("union", "list the members; the max_out_of_orderness of each is that of its own declaration")
    if "max_out_of_orderness" in document:
        problem = "the watermark of a union goes by the max_out_of_orderness of each member; leave it out"
        yield Problem("max_out_of_orderness", problem)
    for name in names:
        if name == document.get("stream"):
            continue
        if name in unions:
            yield Problem("union", f"{name!r} is a union too; list the streams that it is made of")
        elif name in (alerts.TABLE, metrics.TABLE):
            yield Problem("union", f"{name!r} is written by evaluations and cannot be in a union; leave it out")
        elif name not in streams:
            yield Problem("union", f"no stream {name!r} is declared; {suggest(name, streams)}")


def _list_fields(stream: Stream) -> dict[str, DataType]:
    """Returns the fields of a member without its id and its time, from which those of the union are made."""
    own = (stream.event_id, stream.event_time)
    return {name: type_ for name, type_ in stream.fields.items() if name not in own}


def _list_columns(document: Mapping[Any, Any], member: str) -> Mapping[Any, Any]:
    """Returns the expressions of a member; none if they are invalid."""
    columns = document.get("columns")
    texts = columns.get(member) if isinstance(columns, Mapping) else None
    return texts if isinstance(texts, Mapping) else {}


def _gather_fields(members: Mapping[str, Stream], made: set[Any]) -> dict[str, str]:
    """Returns the fields of all members by name; the first member that has a field gives its type."""
    fields: dict[str, DataType] = {}
    for stream in members.values():
        for name, type_ in _list_fields(stream).items():
            if name not in made:
                fields.setdefault(name, type_)
    return nest_fields(fields)


def _find_clashes(
    member: str, stream: Stream, fields: Mapping[str, DataType], givers: Mapping[str, Stream]
) -> Iterator[Problem]:
    """Finds the fields that a member has with another type; `givers` are the members that gave the types, if any."""
    for name, type_ in fields.items():
        giver = next((other for other, each in givers.items() if each.fields.get(name) == type_), None)
        there = "the union declares it as" if giver is None else f"{giver} has it as"
        parts = [each for each in stream.fields if each.startswith(f"{name}.")]
        whole = next((each for each in stream.fields if name.startswith(f"{each}.")), None)
        if parts:
            clash, made = f"{name!r} as a struct, but {there} {type_}", f"cast({parts[0]} as {type_})"
        elif whole is not None:
            clash, made = f"{whole!r} as {stream.fields[whole]}, but {there} a struct", f"cast({whole} as {type_})"
        elif name in stream.fields and stream.fields[name] != type_:
            clash, made = f"{name!r} as {stream.fields[name]}, but {there} {type_}", f"cast({name} as {type_})"
        else:
            continue
        yield Problem(
            f"fields.{name}",
            f'{member} has {clash}; convert it, such as columns: {{{member}: {{{name}: "{made}"}}}}',
        )


def _explain_member_field(member: str) -> str:
    return (
        f"{member} has a field {MEMBER!r}, which in a union holds the name of the member; list the `fields` of the union, "
        f"and give this one another name: columns: {{{member}: {{other_name: {MEMBER}}}}}"
    )

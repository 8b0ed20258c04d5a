"""The declaration of a stream: the fields of its events, its id and time, and how much disorder is allowed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Any

from pydantic import Field, PlainValidator, SkipValidation, Strict

from lookback.core.errors import Problem, StreamError
from lookback.core.streams import alerts, metrics
from lookback.core.streams.fields import (
    POSITION,
    FieldTypes,
    find_undeclared,
    nest_fields,
    parse_fields,
    texts_by_field,
)
from lookback.core.streams.lookups import Lookup, parse_lookups
from lookback.core.streams.source_keys import find_source_problems
from lookback.core.streams.unions import MEMBER, Union, parse_union
from lookback.core.values.durations import format_duration, parse_duration
from lookback.core.values.limits import MAX_NESTING, Limits, is_too_deep
from lookback.core.values.reading import Refused, needs, read_mapping
from lookback.core.values.suggestions import suggest
from lookback.core.values.types import BIGINT, DataType

# A table that Lookback does not write is declared by its path or as catalog.schema.table.
_PATH = re.compile(r"/[^\0]*[^/\0]|dbfs:/.+|[a-z][a-z0-9]*://.+", re.ASCII)
_TABLE = re.compile(r"\w[\w-]{0,254}(\.\w[\w-]{0,254}){2}")
# A column of such a table, or a part of a struct in it.
_COLUMN = re.compile(r"([A-Za-z_]\w*|`[^`]+`)(\.([A-Za-z_]\w*|`[^`]+`))*", re.ASCII)
_PART = re.compile(r"`([^`]+)`|([^`.]+)")
# Tables and views of Lookback, whose names a stream must not take.
RESERVED_TABLES = frozenset(
    {
        "rules",
        "alerts",
        "late_events",
        "rule_log",
        "reviews",
        "rejected_events",
        "metrics",
        "notifications",
        "ingests",
        "labels",
        "snoozes",
        "lists",
        "open_queue",
        "standing_alerts",
        "labelled_events",
    }
)
# Streams whose events Lookback writes, so their id, time and fields are fixed -> id, time, fields, and who writes them.
_OWN_STREAMS = {
    metrics.TABLE: (metrics.METRICS_ID, metrics.MEASURED_AT, metrics.FIELDS, "written by every evaluation"),
    alerts.TABLE: (alerts.CHANGE_ID, alerts.DECIDED_AT, alerts.FIELDS, "made of the alerts of all streams"),
}
# The types that the id and the time of an event may have.
_TYPES = {
    "event_id": frozenset({"tinyint", "smallint", "int", "bigint", "string"}),
    "event_time": frozenset({"timestamp"}),
}
# The types whose values every reader sorts in the same order.
_ORDERED_TYPES = frozenset({"tinyint", "smallint", "int", "bigint", "decimal", "string", "date", "timestamp"})


def _read_count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"a positive integer is needed, got {value!r}")
    return value


def _read_source(source: object) -> dict[str, Any]:
    source = source or {}
    if not isinstance(source, Mapping):
        raise ValueError(f"a mapping of format and path is needed, got {source!r}")
    if problems := list(find_source_problems(source)):
        raise Refused(problems)
    return dict(source)


def _read_order_by(names: object) -> tuple[str, ...]:
    names = [] if names is None else names
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"a list of fields is needed, got {names!r:.100}")
    return tuple(names)


def _is_table(value: object) -> bool:
    return isinstance(value, str) and bool(_PATH.fullmatch(value) or _TABLE.fullmatch(value))


def _read_table(table: Any) -> str:
    if not (table is None or _is_table(table)):
        raise ValueError(f"a whole path, such as /lake/orders, or catalog.schema.table is needed, got {table!r}")
    return table or ""


Name = Annotated[
    str,
    Field(strict=True, pattern=r"^[a-z][a-z0-9_]{0,62}$"),
    needs("a name of lower-case letters, digits and _ is needed"),
]
FieldName = Annotated[str, Strict(), needs("the name of a field is needed")]
Duration = Annotated[int, PlainValidator(parse_duration)]
Count = Annotated[int, PlainValidator(_read_count)]


@dataclass(frozen=True)
class Stream:
    """A checked stream declaration; durations are in microseconds.

    name: also the name of the events table. fields: the declared fields in order, name -> type; fields of look-ups come
    last, and each part of a struct is a field, such as `process.name`. columns: field -> SQL expression over the
    source's columns, used by ingest; with `table`: field -> column of that table, or part of a struct in it. comments:
    column -> its description, for readers of the table. An event is late if its time is below the watermark, which is
    the highest event time of all earlier commits minus max_out_of_orderness. shards: the number of parts into which the
    keys of a new checkpoint are divided; None: the evaluation decides. table: the path, or catalog.schema.table, of a
    Delta table of events that other systems write; empty: Lookback's own table, which ingest fills. order_by: the
    fields that order events with the same commit and time in such a table; ties are broken by id. value: the field with
    the worth of an event; empty: none. lookups: the tables whose values ingest adds to each event. union: the streams
    whose events these are; None for all others. Its max_out_of_orderness is the largest of its members.
    """

    name: Annotated[Name, Field(alias="stream")]
    event_id: FieldName
    event_time: FieldName
    fields: FieldTypes
    columns: Annotated[Mapping[str, str], texts_by_field("SQL expression")] = field(default_factory=dict)
    comments: Annotated[Mapping[str, str], texts_by_field("text")] = field(default_factory=dict)
    max_out_of_orderness: Duration = 10_000_000
    allowed_lateness: Duration = 3_600_000_000
    max_future: Duration = 3_600_000_000
    max_session: Duration = 7 * 86_400_000_000
    dedupe_window: Duration = 30 * 86_400_000_000
    max_revisions: Count = 1_000
    max_failures: Count = 100
    commit_rows: Count = 100_000
    limits: Annotated[Limits, PlainValidator(Limits.from_dict)] = field(default_factory=Limits)
    source: Annotated[Mapping[str, Any], PlainValidator(_read_source)] = field(default_factory=dict)
    table: Annotated[str, PlainValidator(_read_table)] = ""
    order_by: Annotated[Sequence[str], PlainValidator(_read_order_by)] = ()
    shards: Annotated[int | None, PlainValidator(_read_count)] = None
    value: Annotated[str, Strict(), needs("the name of a field is needed")] = ""
    lookups: Annotated[Sequence[Lookup], PlainValidator(tuple)] = ()
    union: Annotated[Union | None, SkipValidation()] = None

    @property
    def own_fields(self) -> dict[str, DataType]:
        """The fields that come from the source of events, not from look-ups."""
        brought = {name for lookup in self.lookups for name in lookup.brings}
        return {name: type_ for name, type_ in self.fields.items() if name not in brought}

    @property
    def own_columns(self) -> dict[str, str]:
        """The columns that hold the fields of the source: name -> Spark type. A struct is one column."""
        return nest_fields(self.own_fields)

    @property
    def table_columns(self) -> dict[str, str]:
        """The columns that hold the fields, in order: name -> Spark type. A struct is one column."""
        return nest_fields(self.fields)

    def find_origin(self, name: str) -> tuple[str | None, list[str]]:
        """Finds what a field is read from: the text in `columns`, if any, and the names below it, or from a column on."""
        parts = name.split(".")
        for count in range(len(parts), 0, -1):
            if text := self.columns.get(".".join(parts[:count])):
                return text, parts[count:]
        return None, parts

    def find_path(self, name: str) -> list[str]:
        """Finds the column of the events table that holds a field, and the names of the parts below it."""
        text, below = self.find_origin(name) if self.table else (None, name.split("."))
        return [*(quoted or bare for quoted, bare in _PART.findall(text or "")), *below]

    @property
    def order_columns(self) -> dict[str, DataType]:
        """The columns that order events with the same commit and time, before their ids do: name -> type."""
        if self.table or self.name in _OWN_STREAMS:
            return {name: self.fields[name] for name in self.order_by}
        return {POSITION: BIGINT}

    @property
    def key_columns(self) -> tuple[str, ...]:
        """The columns that are always read, whatever rules need: the id, the time, the order columns, a union's member."""
        member = [] if self.union is None else [MEMBER]
        return tuple(dict.fromkeys([self.event_id, self.event_time, *self.order_columns, *member]))

    @property
    def columns_of_events(self) -> dict[str, DataType]:
        """The columns that can be read of events: the fields and the order columns."""
        return {**self.fields, **self.order_columns}

    @property
    def is_of_alerts(self) -> bool:
        """True for the stream `alerts`, whose events are rows of the table of that name, which Lookback writes."""
        return self.name == alerts.TABLE

    @property
    def has_table_path(self) -> bool:
        """True if `table` is a path, not a name in a catalog."""
        return bool(_PATH.fullmatch(self.table))

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Stream:
        """Reads a stream from a parsed YAML document (see conf/streams). Raises StreamError with every problem."""
        if is_too_deep(document):
            raise StreamError("?", [Problem("", f"a stream has at most {MAX_NESTING} levels of lists and mappings")])
        if not isinstance(document, Mapping):
            raise StreamError(
                "?",
                [Problem("", f"a stream is a mapping of stream, event_id, event_time, fields ..., got {document!r}")],
            )
        union, document, found = parse_union(document)
        declared = document.get("fields")
        own = parse_fields(declared)
        # A field with an invalid type counts as declared, so that only its type is reported.
        names = {*declared, *own.types} if isinstance(declared, Mapping) else set()
        lookups = parse_lookups(document.get("lookups"), own, names)
        fields = own._replace(types={**own.types, **lookups.fields})
        problems = [*found, *lookups.problems, *_find_contradictions(document, own.types, names, fields.types)]
        parsed = {"fields": fields, "lookups": lookups.listed, "union": union}
        try:
            return read_mapping(cls, {**document, **parsed}, problems)
        except Refused as error:
            raise StreamError(str(document.get("stream")), error.problems) from None

    def to_dict(self) -> dict[str, Any]:
        """Returns the document with all defaults; `from_dict` reads it back as an equal stream."""
        document: dict[str, Any] = {"stream": self.name, "event_id": self.event_id, "event_time": self.event_time}
        document["fields"] = self.own_columns
        document["columns"], document["comments"] = dict(self.columns), dict(self.comments)
        document.update({name: format_duration(getattr(self, name)) for name in _DURATIONS})
        document.update({name: getattr(self, name) for name in _COUNTS})
        document["limits"] = self.limits.to_dict()
        document["source"] = dict(self.source)
        given: dict[str, Any] = {
            "table": self.table,
            "order_by": list(self.order_by),
            "shards": self.shards,
            "value": self.value,
            "lookups": [lookup.to_dict() for lookup in self.lookups],
        }
        document.update({name: value for name, value in given.items() if value})
        if self.union is not None:
            document.update(self.union.to_dict())
        return document


_DURATIONS = ("max_out_of_orderness", "allowed_lateness", "max_future", "max_session", "dedupe_window")
_COUNTS = ("max_revisions", "max_failures", "commit_rows")


def _find_value_problems(value: object, names: set[Any], fields: Mapping[str, DataType]) -> Iterator[Problem]:
    """Finds the problem with the `value` field. names: all declared names, including those with an invalid type."""
    if not isinstance(value, str) or not value or not fields:
        return
    if value not in names:
        yield Problem("value", f"{value!r} is not one of the declared fields; {suggest(value, fields)}")
    elif value in fields and not fields[value].is_numeric:
        yield Problem("value", f"field {value!r} is {fields[value]}; the value of an event must be a number")


def _find_parts(document: Mapping[str, Any], fields: Mapping[str, DataType]) -> Iterator[Problem]:
    """Finds structs, or parts of them, where a field by itself is needed."""
    order = document.get("order_by")
    named = [(key, document.get(key)) for key in ("event_id", "event_time", "value")]
    named += [("order_by", each) for each in order] if isinstance(order, (list, tuple)) else []
    structs = {name.partition(".")[0] for name in fields if "." in name}
    for key, name in named:
        if isinstance(name, str) and name.partition(".")[0] in structs:
            yield Problem(
                key,
                f"{name!r} is in a struct; declare a field of its own for it, and map it in `columns`, such as "
                f"`columns: {{its_name: {name}}}`",
            )


def _find_order_problems(
    document: Mapping[str, Any], names: set[Any], fields: Mapping[str, DataType]
) -> Iterator[Problem]:
    """Finds problems with `order_by`, and with fields named like the column in which ingest stores the order."""
    listed, name = document.get("order_by"), document.get("stream")
    if not (document.get("table") or (isinstance(name, str) and name in _OWN_STREAMS)):
        for field_ in fields:
            if field_.partition(".")[0].lower() == POSITION:
                yield Problem(
                    f"fields.{field_}",
                    f"{field_!r} is the column in which ingest stores where it read an event; choose another name, and "
                    f'map it in `columns`, such as `columns: {{place: "{field_}"}}`',
                )
        if listed:
            yield Problem(
                "order_by",
                "ingest stores the order in which it reads rows; leave it out, or name another system's `table`",
            )
        return
    for field_ in listed if isinstance(listed, (list, tuple)) else ():
        if not isinstance(field_, str) or not fields:
            continue
        if field_ not in names:
            yield Problem("order_by", f"{field_!r} is not one of the declared fields; {suggest(field_, fields)}")
        elif field_ in fields and fields[field_].name not in _ORDERED_TYPES:
            yield Problem(
                "order_by",
                f"field {field_!r} is {fields[field_]}; events are ordered by {', '.join(sorted(_ORDERED_TYPES))}",
            )


def _find_name_problems(document: Mapping[str, Any], own: Mapping[str, DataType]) -> Iterator[Problem]:
    """Finds the problems of a stream that has the name of one of Lookback's tables."""
    name = document.get("stream")
    known = _OWN_STREAMS.get(name) if isinstance(name, str) else None
    if known is None:
        if isinstance(name, str) and name in RESERVED_TABLES:
            yield Problem("stream", f"{name!r} is a table of the product; choose another name")
        return
    event_id, event_time, fields, written = known
    named = [document.get(key) for key in ("event_id", "event_time")]
    if named != [event_id, event_time] or not own.items() <= fields.items():
        yield Problem(
            "stream",
            f"{name!r} is a table of the product, {written}; declare it as conf/streams/{name}.yml does, or choose "
            "another name",
        )
    if document.get("lookups"):
        yield Problem("lookups", f"{name!r} is {written}, so ingest cannot look anything up; leave it out")


def _find_contradictions(
    document: Mapping[str, Any], own: Mapping[str, DataType], names: set[Any], fields: Mapping[str, DataType]
) -> Iterator[Problem]:
    """Finds values that contradict the declared fields or another key.

    own: the valid fields of the source; names: all its declared names, including those with an invalid type; fields:
    own and the fields of look-ups.
    """
    name, table = document.get("stream"), document.get("table")
    for key, types in _TYPES.items():
        field_ = document.get(key)
        if own and isinstance(field_, str) and field_ not in names:
            hint = suggest(field_, own, "")
            yield Problem(key, f"{field_!r} is not one of the declared fields" + (f"; {hint}" if hint else ""))
        elif isinstance(field_, str) and field_ in own and own[field_].name not in types:
            yield Problem(key, f"field {field_!r} is {own[field_]}; it must be one of {', '.join(sorted(types))}")
    yield from _find_parts(document, fields)
    yield from _find_value_problems(document.get("value"), {*names, *fields}, fields)
    yield from _find_order_problems(document, {*names, *fields}, fields)
    parts = {part for name in own for part in accumulate(name.split("."), "{}.{}".format)}
    yield from find_undeclared(document.get("columns"), parts, "columns", "the declared fields")
    yield from find_undeclared(document.get("comments"), nest_fields(fields), "comments", "the declared fields")
    yield from _find_name_problems(document, own)
    if not _is_table(table):
        return
    if isinstance(name, str) and name in _OWN_STREAMS:
        yield Problem("table", f"{name!r} is a table of the product; leave `table` out")
    for key in ("source", "lookups"):
        if document.get(key):
            yield Problem(
                key, f"only ingest uses it, and ingest does not write {table}; leave it out, or leave out `table`"
            )
    columns = document.get("columns")
    for field_, text in columns.items() if isinstance(columns, Mapping) else ():
        if isinstance(text, str) and not _COLUMN.fullmatch(text):
            yield Problem(
                f"columns.{field_}",
                f"{text!r:.100} is not a column of {table}, whose values are taken as they are; name a column, or a part "
                "of a struct, such as process.parent.name",
            )

"""A stream: the fields of its events, which of them are the id and the time, and how disordered they may arrive."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lookback.core.errors import DurationError, Problem, StreamError, TypeNameError
from lookback.core.streams import metrics
from lookback.core.streams.source_keys import problems_of_source
from lookback.core.values.durations import format_duration, parse_duration
from lookback.core.values.limits import Limits
from lookback.core.values.suggestions import suggest
from lookback.core.values.types import DataType, parse_type

_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}", re.ASCII)
_FIELD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)
# A table that others write: where it is, or catalog.schema.table.
_PLACE = re.compile(r"/[^\0]*[^/\0]|dbfs:/.+|[a-z][a-z0-9]*://.+", re.ASCII)
_TABLE = re.compile(r"\w[\w-]{0,254}(\.\w[\w-]{0,254}){2}")
# Tables of the product, and columns that the change feed or the engine adds.
RESERVED_TABLES = frozenset(
    {"rules", "alerts", "late_events", "rule_log", "reviews", "rejected_events", "metrics", "notifications", "ingests"}
)
RESERVED_FIELDS = frozenset(
    {"ingested_at", "arrival", "committed_at", "_change_type", "_commit_version", "_commit_timestamp"}
)
_ID_TYPES = frozenset({"tinyint", "smallint", "int", "bigint", "string"})


@dataclass(frozen=True)
class Stream:
    """A checked stream declaration; durations in microseconds.

    name: the events table's name. fields: declared columns in order, name -> type. columns: field -> SQL expression
    over the source's columns, used by ingest only. comments: field -> what it holds, for people who read the table. An
    event is late when its time is below the watermark, the highest event time of all earlier commits less
    max_out_of_orderness. shards: into how many parts the keys of a new checkpoint are divided; None: the evaluation
    chooses. table: the Delta table of the events where others write it, a path or catalog.schema.table;
    empty: Lookback's own, which ingest fills.
    """

    name: str
    event_id: str
    event_time: str
    fields: Mapping[str, DataType]
    columns: Mapping[str, str] = field(default_factory=dict)
    max_out_of_orderness: int = 10_000_000
    allowed_lateness: int = 3_600_000_000
    max_future: int = 3_600_000_000
    max_session: int = 7 * 86_400_000_000
    max_revisions: int = 1_000
    max_failures: int = 100
    dedupe_window: int = 30 * 86_400_000_000
    commit_rows: int = 100_000
    source: Mapping[str, Any] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    comments: Mapping[str, str] = field(default_factory=dict)
    table: str = ""
    shards: int | None = None

    @property
    def table_is_place(self) -> bool:
        """Whether `table` is a path, not a name in a catalog."""
        return bool(_PLACE.fullmatch(self.table))

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Stream:
        """The stream that a YAML document (see conf/streams) declares. Raises StreamError with every problem."""
        return _Reader(document).read()

    def to_dict(self) -> dict[str, Any]:
        """The document again, with every default written out: from_dict(to_dict(x)) == x."""
        document: dict[str, Any] = {"stream": self.name, "event_id": self.event_id, "event_time": self.event_time}
        document["fields"] = {name: str(type_) for name, type_ in self.fields.items()}
        document["columns"], document["comments"] = dict(self.columns), dict(self.comments)
        document.update({name: format_duration(getattr(self, name)) for name in _DURATIONS})
        document.update({name: getattr(self, name) for name in _COUNTS})
        document["limits"] = self.limits.to_dict()
        document["source"] = dict(self.source)
        if self.table:
            document["table"] = self.table
        if self.shards is not None:
            document["shards"] = self.shards
        return document


_DURATIONS = ("max_out_of_orderness", "allowed_lateness", "max_future", "max_session", "dedupe_window")
_COUNTS = ("max_revisions", "max_failures", "commit_rows")
_KEYS = (
    "stream",
    "event_id",
    "event_time",
    "fields",
    "columns",
    "comments",
    *_DURATIONS,
    *_COUNTS,
    "limits",
    "source",
    "table",
    "shards",
)


class _Reader:
    """Reads one document and collects what is wrong with it."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document
        self._problems: list[Problem] = []

    def read(self) -> Stream:
        document = self._document
        if not isinstance(document, Mapping):
            raise StreamError(
                "?", [Problem("", f"a stream is a mapping of {', '.join(_KEYS[:4])} ..., got {document!r}")]
            )
        name = document.get("stream")
        for key in document:
            if key not in _KEYS:
                self._unknown(str(key))
        if not (isinstance(name, str) and _NAME.fullmatch(name)):
            self._wrong("stream", f"a name of lower-case letters, digits and _ is needed, got {name!r}")
        fields = self._fields()
        if name == metrics.TABLE:
            self._measures(fields)
        elif isinstance(name, str) and name in RESERVED_TABLES:
            self._wrong("stream", f"{name!r} is a table of the product; choose another name")
        event_id = self._named_field("event_id", fields, _ID_TYPES)
        event_time = self._named_field("event_time", fields, frozenset({"timestamp"}))
        columns = self._by_field("columns", "SQL expression", fields)
        comments = self._by_field("comments", "text", fields)
        values: dict[str, Any] = {}
        for key in _DURATIONS:
            if key in document:
                values[key] = self._duration(key)
        for key in (*_COUNTS, "shards"):
            if key in document:
                values[key] = self._count(key)
        if "limits" in document:
            values["limits"] = self._limits()
        source = document.get("source") or {}
        if not isinstance(source, Mapping):
            self._wrong("source", f"a mapping of format and path is needed, got {source!r}")
        else:
            self._problems += problems_of_source(source)
        table = self._table()
        if self._problems:
            raise StreamError(str(name), self._problems)
        values.update(comments=comments, source=dict(source), table=table)
        return Stream(str(name), event_id, event_time, fields, columns, **values)

    def _wrong(self, place: str, message: str) -> None:
        self._problems.append(Problem(place, message))

    def _measures(self, fields: Mapping[str, DataType]) -> None:
        """Of the product's tables one is a stream too: rules may watch the engine itself. It has the columns that it has."""
        named = [self._document.get(key) for key in ("event_id", "event_time")]
        if named != [metrics.METRICS_ID, metrics.MEASURED_AT] or not fields.items() <= metrics.FIELDS.items():
            self._wrong(
                "stream",
                f"{metrics.TABLE!r} is a table of the product, written by every evaluation; declare it as "
                "conf/streams/metrics.yml does, or choose another name",
            )

    def _table(self) -> str:
        """The table that others write; empty where there is none."""
        table = self._document.get("table")
        if table is None:
            return ""
        if not (isinstance(table, str) and (_PLACE.fullmatch(table) or _TABLE.fullmatch(table))):
            self._wrong(
                "table", f"a whole path, such as /lake/orders, or catalog.schema.table is needed, got {table!r}"
            )
            return ""
        if self._document.get("stream") == metrics.TABLE:
            self._wrong("table", f"{metrics.TABLE!r} is a table of the product; leave `table` out")
        for key in ("source", "columns"):
            if self._document.get(key):
                self._wrong(key, f"ingest reads by it, and into {table} others write; leave it out, or `table`")
        return table

    def _unknown(self, key: str) -> None:
        self._wrong(key, f"unknown key {key!r}; {suggest(key, _KEYS)}")

    def _fields(self) -> dict[str, DataType]:
        declared = self._document.get("fields")
        if not isinstance(declared, Mapping) or not declared:
            self._wrong("fields", f"a mapping of field to Spark type is needed, got {declared!r}")
            return {}
        fields: dict[str, DataType] = {}
        lowered: set[str] = set()
        for name, text in declared.items():
            place = f"fields.{name}"
            if not (isinstance(name, str) and _FIELD.fullmatch(name)):
                self._wrong(place, f"{name!r} is not a field name; use letters, digits and _")
            elif name.lower() in RESERVED_FIELDS:
                self._wrong(place, f"{name!r} is a column that the engine adds; choose another name")
            elif name.lower() in lowered:
                self._wrong(place, f"{name!r} is declared twice (Spark does not tell capitals apart)")
            else:
                lowered.add(name.lower())
                try:
                    fields[name] = parse_type(text, explicit=True)
                except TypeNameError as error:
                    self._wrong(place, str(error))
        return fields

    def _named_field(self, key: str, fields: Mapping[str, DataType], types: frozenset[str]) -> str:
        name = self._document.get(key)
        if not isinstance(name, str):
            self._wrong(key, f"the name of a field is needed, got {name!r}")
            return ""
        declared = self._document.get("fields")
        if name not in fields and isinstance(declared, Mapping) and name in declared:
            # Its type was refused already; to say that it is missing would be wrong.
            return name
        if fields and name not in fields:
            hint = suggest(name, fields, "")
            self._wrong(key, f"{name!r} is not one of the declared fields" + (f"; {hint}" if hint else ""))
        elif fields and fields[name].name not in types:
            self._wrong(key, f"field {name!r} is {fields[name]}; it must be one of {', '.join(sorted(types))}")
        return name

    def _by_field(self, key: str, what: str, fields: Mapping[str, DataType]) -> dict[str, str]:
        """A mapping of declared fields to texts."""
        texts = self._document.get(key) or {}
        if not isinstance(texts, Mapping):
            self._wrong(key, f"a mapping of field to {what} is needed, got {texts!r}")
            return {}
        for name, text in texts.items():
            if name not in fields:
                self._wrong(f"{key}.{name}", f"{name!r} is not one of the declared fields")
            if not isinstance(text, str):
                self._wrong(f"{key}.{name}", f"a {what} is needed, got {text!r}")
        return {str(name): str(text) for name, text in texts.items()}

    def _duration(self, key: str) -> int:
        try:
            return parse_duration(self._document[key])
        except DurationError as error:
            self._wrong(key, str(error))
            return 0

    def _limits(self) -> Limits:
        value = self._document["limits"]
        if not isinstance(value, Mapping):
            self._wrong("limits", f"a mapping of limit to number is needed, got {value!r:.100}")
            return Limits()
        limits, wrong = Limits.from_dict(value)
        for key, message in wrong.items():
            self._wrong(f"limits.{key}", message)
        return limits

    def _count(self, key: str) -> int:
        value = self._document[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self._wrong(key, f"a positive integer is needed, got {value!r}")
            return 1
        return value

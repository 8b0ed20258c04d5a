"""The declaration of a stream: the fields of its events, its id and time, and how much disorder is allowed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lookback.core.errors import DurationError, Problem, StreamError, TypeNameError
from lookback.core.streams import metrics
from lookback.core.streams.source_keys import find_source_problems
from lookback.core.values.durations import format_duration, parse_duration
from lookback.core.values.limits import Limits
from lookback.core.values.suggestions import suggest
from lookback.core.values.types import DataType, parse_type

_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}", re.ASCII)
_FIELD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)
# A table that others write is declared by its path or as catalog.schema.table.
_PATH = re.compile(r"/[^\0]*[^/\0]|dbfs:/.+|[a-z][a-z0-9]*://.+", re.ASCII)
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
    """A checked stream declaration; durations are in microseconds.

    name: also the name of the events table. fields: the declared columns in order, name -> type. columns: field -> SQL
    expression over the source's columns, used by ingest only. comments: field -> its description, for readers of the table.
    An event is late if its time is below the watermark, which is the highest event time of all earlier commits minus
    max_out_of_orderness. shards: the number of parts into which the keys of a new checkpoint are divided; None: chosen by
    the evaluation. table: the path, or catalog.schema.table, of a Delta table of events that others write; empty:
    Lookback's own table, which ingest fills.
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
    def has_table_path(self) -> bool:
        """Whether `table` is a path, not a name in a catalog."""
        return bool(_PATH.fullmatch(self.table))

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Stream:
        """Reads a stream from a YAML document (see conf/streams). Raises StreamError with every problem."""
        return _Reader(document).read()

    def to_dict(self) -> dict[str, Any]:
        """Returns the document with all defaults: from_dict(to_dict(x)) == x."""
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
    """Reads one document and collects its problems."""

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
                self._report_unknown_key(str(key))
        if not (isinstance(name, str) and _NAME.fullmatch(name)):
            self._report("stream", f"a name of lower-case letters, digits and _ is needed, got {name!r}")
        fields = self._read_fields()
        if name == metrics.TABLE:
            self._check_metrics(fields)
        elif isinstance(name, str) and name in RESERVED_TABLES:
            self._report("stream", f"{name!r} is a table of the product; choose another name")
        event_id = self._read_field_name("event_id", fields, _ID_TYPES)
        event_time = self._read_field_name("event_time", fields, frozenset({"timestamp"}))
        columns = self._read_by_field("columns", "SQL expression", fields)
        comments = self._read_by_field("comments", "text", fields)
        values: dict[str, Any] = {}
        for key in _DURATIONS:
            if key in document:
                values[key] = self._read_duration(key)
        for key in (*_COUNTS, "shards"):
            if key in document:
                values[key] = self._read_count(key)
        if "limits" in document:
            values["limits"] = self._read_limits()
        source = document.get("source") or {}
        if not isinstance(source, Mapping):
            self._report("source", f"a mapping of format and path is needed, got {source!r}")
        else:
            self._problems += find_source_problems(source)
        table = self._read_table()
        if self._problems:
            raise StreamError(str(name), self._problems)
        values.update(comments=comments, source=dict(source), table=table)
        return Stream(str(name), event_id, event_time, fields, columns, **values)

    def _report(self, place: str, message: str) -> None:
        self._problems.append(Problem(place, message))

    def _check_metrics(self, fields: Mapping[str, DataType]) -> None:
        """Checks the declaration of the metrics table: a stream of the engine's own, so its columns are fixed."""
        named = [self._document.get(key) for key in ("event_id", "event_time")]
        if named != [metrics.METRICS_ID, metrics.MEASURED_AT] or not fields.items() <= metrics.FIELDS.items():
            self._report(
                "stream",
                f"{metrics.TABLE!r} is a table of the product, written by every evaluation; declare it as "
                "conf/streams/metrics.yml does, or choose another name",
            )

    def _read_table(self) -> str:
        """Reads the table that others write; empty if there is none."""
        table = self._document.get("table")
        if table is None:
            return ""
        if not (isinstance(table, str) and (_PATH.fullmatch(table) or _TABLE.fullmatch(table))):
            self._report(
                "table", f"a whole path, such as /lake/orders, or catalog.schema.table is needed, got {table!r}"
            )
            return ""
        if self._document.get("stream") == metrics.TABLE:
            self._report("table", f"{metrics.TABLE!r} is a table of the product; leave `table` out")
        for key in ("source", "columns"):
            if self._document.get(key):
                self._report(key, f"ingest reads by it, and into {table} others write; leave it out, or `table`")
        return table

    def _report_unknown_key(self, key: str) -> None:
        self._report(key, f"unknown key {key!r}; {suggest(key, _KEYS)}")

    def _read_fields(self) -> dict[str, DataType]:
        declared = self._document.get("fields")
        if not isinstance(declared, Mapping) or not declared:
            self._report("fields", f"a mapping of field to Spark type is needed, got {declared!r}")
            return {}
        fields: dict[str, DataType] = {}
        lowered: set[str] = set()
        for name, text in declared.items():
            place = f"fields.{name}"
            if not (isinstance(name, str) and _FIELD.fullmatch(name)):
                self._report(place, f"{name!r} is not a field name; use letters, digits and _")
            elif name.lower() in RESERVED_FIELDS:
                self._report(place, f"{name!r} is a column that the engine adds; choose another name")
            elif name.lower() in lowered:
                self._report(place, f"{name!r} is declared twice (Spark does not tell capitals apart)")
            else:
                lowered.add(name.lower())
                try:
                    fields[name] = parse_type(text, explicit=True)
                except TypeNameError as error:
                    self._report(place, str(error))
        return fields

    def _read_field_name(self, key: str, fields: Mapping[str, DataType], types: frozenset[str]) -> str:
        name = self._document.get(key)
        if not isinstance(name, str):
            self._report(key, f"the name of a field is needed, got {name!r}")
            return ""
        declared = self._document.get("fields")
        if name not in fields and isinstance(declared, Mapping) and name in declared:
            # It is declared, but its type was refused, which is reported already.
            return name
        if fields and name not in fields:
            hint = suggest(name, fields, "")
            self._report(key, f"{name!r} is not one of the declared fields" + (f"; {hint}" if hint else ""))
        elif fields and fields[name].name not in types:
            self._report(key, f"field {name!r} is {fields[name]}; it must be one of {', '.join(sorted(types))}")
        return name

    def _read_by_field(self, key: str, what: str, fields: Mapping[str, DataType]) -> dict[str, str]:
        """Reads a mapping of declared fields to texts."""
        texts = self._document.get(key) or {}
        if not isinstance(texts, Mapping):
            self._report(key, f"a mapping of field to {what} is needed, got {texts!r}")
            return {}
        for name, text in texts.items():
            if name not in fields:
                self._report(f"{key}.{name}", f"{name!r} is not one of the declared fields")
            if not isinstance(text, str):
                self._report(f"{key}.{name}", f"a {what} is needed, got {text!r}")
        return {str(name): str(text) for name, text in texts.items()}

    def _read_duration(self, key: str) -> int:
        try:
            return parse_duration(self._document[key])
        except DurationError as error:
            self._report(key, str(error))
            return 0

    def _read_limits(self) -> Limits:
        value = self._document["limits"]
        if not isinstance(value, Mapping):
            self._report("limits", f"a mapping of limit to number is needed, got {value!r:.100}")
            return Limits()
        limits, wrong = Limits.from_dict(value)
        for key, message in wrong.items():
            self._report(f"limits.{key}", message)
        return limits

    def _read_count(self, key: str) -> int:
        value = self._document[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self._report(key, f"a positive integer is needed, got {value!r}")
            return 1
        return value

"""Makes a stream's fields from the columns of a source, and finds the problems of each row.

A bad row does not stop the rest: a value that does not fit becomes NULL, and `REASON` says why.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, NamedTuple

import sqlglot
from pyspark.errors import AnalysisException
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StringType
from sqlglot import exp

from lookback.core.errors import SetupError
from lookback.core.streams.source_keys import KAFKA
from lookback.core.values.texts import first_line, quote_identifier
from lookback.spark.ingest.casting import (
    suggest_remedy,
    write_cast,
    write_exactness,
    write_is_day_alone,
    write_lacks_zone,
)
from lookback.spark.tables.sqltexts import nest_columns, refuse_substitution

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType as SparkType

    from lookback.core.streams.declaration import Stream

# Columns besides the stream's fields. REASON is NULL for a usable row. READ_AS says how to read RAW again. ASSUMED
# names the part that a time lacks: NO_ZONE, NO_TIME or NULL.
REASON, RAW, READ_AS = "__reason", "__raw", "__read_as"
# Where a row comes from. FILE is the name of the file or topic. UNIT is a text that sorts the files and topics that are
# read together; NULL for a file that cannot be read. Within a UNIT, rows are ordered by BLOCK and ROW; the ROWs of a
# BLOCK are consecutive numbers, or offsets.
FILE, UNIT, BLOCK, ROW = "__file", "__unit", "__block", "__row"
ASSUMED, NO_ZONE, NO_TIME = "__assumed", "zone", "time"
# Streams with the missing columns that the log has named.
_WARNED: set[tuple[str, tuple[str, ...]]] = set()
_LOG = logging.getLogger("lookback")
# The number of bits of a position that number the rows of a UNIT.
ROW_BITS = 40
# An extra column with the whole text of a row that cannot be split into the source's columns.
CORRUPT = "__corrupt"
# Columns of a Kafka record from which fields can be made in addition to the keys of its value. They hide keys of the
# value with the same names. If a header repeats, the last one counts.
BESIDE = {
    "kafka_key": "string",
    "kafka_timestamp": "timestamp",
    "kafka_topic": "string",
    "kafka_partition": "int",
    "kafka_offset": "bigint",
    "kafka_headers": "map<string,string>",
}
# The number of characters of a value that a reason quotes; the row itself is kept whole.
QUOTED_CHARACTERS = 100
# Functions that raise an error for an unreadable value, and have a try_ form that gives NULL instead.
_RAISING = frozenset(
    {
        "TO_DATE", "TO_TIMESTAMP", "TO_NUMBER", "TO_BINARY", "ELEMENT_AT", "URL_DECODE", "PARSE_JSON",
        "MAKE_TIMESTAMP", "MAKE_TIMESTAMP_LTZ", "MAKE_TIMESTAMP_NTZ",
    }
)  # fmt: skip
# Such functions without a try_ form, with the largest number whose microseconds fit in 64 bits.
_EPOCH = {
    "TIMESTAMP_SECONDS": 9_223_372_036_854,
    "TIMESTAMP_MILLIS": 9_223_372_036_854_775,
}
# The first and last day of Python's calendar.
_EDGES = ("0001-01-01", "9999-12-31")
# Typed as Any because the name of the operators' base class differs between versions of sqlglot.
_OPERATORS: dict[Any, str] = {
    exp.Add: "try_add",
    exp.Sub: "try_subtract",
    exp.Mul: "try_multiply",
    exp.Div: "try_divide",
    exp.Mod: "try_mod",
}


class _FieldSql(NamedTuple):
    """The SQL of a field before the cast, and the condition that a part of it could not be computed."""

    value: str
    failed: str


def cast_rows(rows: DataFrame, stream: Stream, *, text: bool, place: str, malformed: Column | None = None) -> DataFrame:
    """Casts rows of source columns to the stream's declared fields, and adds REASON and ASSUMED.

    A value that the field's type cannot hold exactly gives a REASON; only an expression in `columns` rounds. Missing
    source columns count as NULL, and fields of look-ups are NULL.

    Args:
        rows: The rows, with RAW, READ_AS, FILE, UNIT, BLOCK and ROW, which are kept. If they have a column CORRUPT, a
            row in which it is not NULL is malformed.
        stream: The stream.
        text: Whether arrays are in text columns as JSON.
        place: The source's name for messages.
        malformed: The reason for malformed rows.

    Raises:
        SetupError: If Spark cannot make a field from these columns.
    """
    there = {name.lower() for name in rows.columns}
    lacking = dict.fromkeys(list_source_columns(stream), "string") | (BESIDE if reads_kafka(stream) else {})
    if not text:
        # Text cannot be cast to an array, not even if it is NULL.
        lacking |= {name: type_ for name, type_ in stream.table_columns.items() if name in lacking}
    nulls = [F.lit(None).cast(type_).alias(name) for name, type_ in lacking.items() if name.lower() not in there]
    rows = rows.select("*", *nulls)
    fields = _build_fields(rows, stream, text, place)
    try:
        reason = _describe_problems(fields)
        if CORRUPT in rows.columns:
            unreadable = F.lit("malformed line") if malformed is None else malformed
            twice = F.lit("the line contains a key twice, and only one value can count; send it once")
            unreadable = F.when(repeats_key(F.col(RAW)), twice).otherwise(unreadable)
            reason = F.when(F.col(CORRUPT).isNotNull(), unreadable).otherwise(reason)
        kept = [READ_AS, FILE, UNIT, BLOCK, ROW]
        brought = {name: F.lit(None).cast(str(type_)) for name, type_ in stream.fields.items()}
        values = nest_columns({**brought, **{field.name: field.value for field in fields}})
        return rows.select(*values, reason.alias(REASON), _choose_assumption(fields).alias(ASSUMED), RAW, *kept)
    except AnalysisException:
        for field in fields:
            field.check(rows, place)
        raise


def make_fields(rows: DataFrame, stream: Stream, place: str) -> tuple[list[Column], Column]:
    """Returns the stream's own fields over rows with typed columns, and a column with each row's problems or NULL.

    Raises:
        SetupError: As `cast_rows` does.
    """
    fields = _build_fields(rows, stream, False, place)
    for field in fields:
        field.check(rows, place)
    return [field.value for field in fields], _describe_problems(fields)


def list_uncast_fields(rows: DataFrame, stream: Stream) -> list[Column]:
    """Returns the stream's own fields over source columns, before they are cast to their types."""
    return nest_columns({name: F.expr(sql.value) for name, sql in _write_fields_sql(rows, stream).items()})


def _describe_problems(fields: Sequence[_Field]) -> Column:
    problems = F.concat_ws("; ", *[field.problem for field in fields])
    return F.when(problems != "", problems)


def _build_fields(rows: DataFrame, stream: Stream, text: bool, place: str) -> list[_Field]:
    """Builds the stream's own fields over source columns, whose types decide how to cast and when a cast is exact."""
    fields = _write_fields_sql(rows, stream)
    try:
        types = rows.select(*[F.expr(sql.value).alias(name) for name, sql in fields.items()]).schema
    except AnalysisException:
        for name, sql in fields.items():
            _require_castable(rows, stream, name, [F.expr(sql.value)], place)
        raise
    sources = [field.dataType for field in types.fields]
    return [
        _Field(stream, name, text, sql, source) for (name, sql), source in zip(fields.items(), sources, strict=True)
    ]


def _write_fields_sql(rows: DataFrame, stream: Stream) -> dict[str, _FieldSql]:
    """Writes the SQL of the stream's own fields over source columns, by name."""
    # Whether what parts are read from is a text. Asking Spark takes milliseconds.
    texts: dict[str, bool] = {}
    fields = {}
    for name in stream.own_fields:
        expression, below = stream.find_origin(name)
        if expression is None:
            sql, below = _FieldSql(quote_identifier(below[0]), "false"), below[1:]
        else:
            sql = _make_lenient(expression)
        if below and sql.value not in texts:
            texts[sql.value] = _is_text(rows, sql.value)
        fields[name] = _take_part(sql, below, is_text=texts[sql.value]) if below else sql
    return fields


def _is_text(rows: DataFrame, value: str) -> bool:
    """Returns whether Spark computes texts; false if it cannot compute the value at all, which is refused later."""
    with suppress(AnalysisException):
        return rows.select(F.expr(value)).schema[0].dataType == StringType()
    return False


def _take_part(whole: _FieldSql, below: Sequence[str], *, is_text: bool) -> _FieldSql:
    """Writes the SQL of a part of a struct, which files of text have as JSON."""
    if not is_text:
        return _FieldSql(".".join([f"({whole.value})", *map(quote_identifier, below)]), whole.failed)
    is_other = f"({whole.value}) is not null and json_object_keys({whole.value}) is null"
    return _FieldSql(f"get_json_object({whole.value}, '$.{'.'.join(below)}')", f"{whole.failed} or {is_other}")


def _require_castable(rows: DataFrame, stream: Stream, name: str, columns: Sequence[Column], place: str) -> None:
    """Raises SetupError if Spark cannot compute these columns of a field."""
    try:
        rows.select(*columns)
    except AnalysisException as error:
        source = f"columns.{name}" if name in stream.columns else name
        raise SetupError(f"{place}: {source} cannot become {stream.fields[name]}: {first_line(error)}") from error


def _choose_assumption(fields: Sequence[_Field]) -> Column:
    """Names the part that one of the row's times lacks and that is assumed (midnight or UTC); NULL if no time does."""
    times = [field for field in fields if field.is_time]
    lacks_time = reduce(or_, [F.coalesce(field.is_day_alone, F.lit(False)) for field in times], F.lit(False))
    lacks_zone = reduce(or_, [F.coalesce(field.lacks_zone, F.lit(False)) for field in times], F.lit(False))
    return F.when(lacks_time, F.lit(NO_TIME)).when(lacks_zone, F.lit(NO_ZONE))


def repeats_key(line: Column) -> Column:
    """Returns the condition that a line is a JSON object that contains a key twice; false for other lines."""
    keys = F.json_object_keys(line)
    return F.coalesce(F.size(keys) > F.size(F.array_distinct(keys)), F.lit(False))


def list_source_columns(stream: Stream) -> list[str]:
    """Lists the columns that the stream's own fields are made from, in order, without those in BESIDE."""
    names = sorted({name for field in stream.own_fields for name in find_source_columns(stream, field)})
    return [name for name in names if name.lower() not in BESIDE] if reads_kafka(stream) else names


def reads_kafka(stream: Stream) -> bool:
    """Returns whether the stream's `source` is a Kafka topic."""
    return stream.source.get("format") == KAFKA


def require_columns(stream: Stream, there: set[str], place: str) -> None:
    """Raises SetupError if a column that the id or the time is made from is not in `there` (lower case)."""
    for field in (stream.event_id, stream.event_time):
        for name in find_source_columns(stream, field):
            if name.lower() not in there:
                role = "event_id" if field == stream.event_id else "event_time"
                if separator := _find_separator(there):
                    raise SetupError(
                        f"{place}: the header is a single column, {min(there)!r:.100}. If {separator!r} separates the "
                        f"values, add it to the source of stream {stream.name!r}: `options: {{sep: {json.dumps(separator)}}}`"
                    )
                raise SetupError(
                    f"{place}: column {name!r}, from which the {role} of stream {stream.name!r} is made, is missing; "
                    f"there are {', '.join(sorted(there))}. Name the right one in the stream's `columns`, such as "
                    f'`columns: {{{field}: "other_name"}}`.'
                )


def warn_about_missing_columns(stream: Stream, there: set[str], place: str) -> None:
    """Logs a warning, once, if a column that a field is made from is not in `there` (lower case)."""
    missing = tuple(name for name in list_source_columns(stream) if name.lower() not in there)
    if missing and (stream.name, missing) not in _WARNED:
        _WARNED.add((stream.name, missing))
        _LOG.warning(
            f"{place} has no column {', '.join(missing)}, so what stream {stream.name!r} makes of it is NULL in every row; "
            f"there are {', '.join(sorted(there))}. If a name is wrong, correct it in `fields`, or name the right one in "
            "`columns`; rows that are ingested already stay as they are"
        )


def _find_separator(there: set[str]) -> str:
    """Returns the separator in the only column's name; empty if there are several columns or it has no separator."""
    return next((mark for mark in (";", "\t", "|", ",") if len(there) == 1 and mark in min(there)), "")


def find_source_columns(stream: Stream, field: str) -> list[str]:
    """Returns the source columns that a field is made from."""
    expression, below = stream.find_origin(field)
    if expression is None:
        return below[:1]
    columns = _parse(expression).find_all(exp.Column)
    return list(dict.fromkeys(column.parts[0].name for column in columns))


class _Field:
    """A declared field as Spark columns: its value, and the problem if a row has no usable value.

    `sql` is the field before the cast and `source` its type; for `text` see `cast_rows`.
    """

    def __init__(self, stream: Stream, name: str, text: bool, sql: _FieldSql, source: SparkType) -> None:
        self._stream, self.name, self._type = stream, name, stream.fields[name]
        self._expression, _ = stream.find_origin(name)
        self._required = name in (stream.event_id, stream.event_time)
        self._reads = find_source_columns(stream, name)
        self._uncast, self._source = sql, source
        json = text and self._expression is None
        self._cast = write_cast(sql.value, source, self._type, json=json)
        self._exact = write_exactness(sql.value, source, self._type, json=json)
        if self._type.name == "string" and not text:
            # Text files are decoded on reading. In other files, invalid UTF-8 would break Python readers of the table.
            self._cast = f"make_valid_utf8({self._cast})"

    def check(self, rows: DataFrame, place: str) -> None:
        """Raises SetupError if Spark cannot make the field from these columns."""
        _require_castable(rows, self._stream, self.name, [self.value, self.problem], place)

    @property
    def value(self) -> Column:
        return F.expr(self._cast).alias(self.name)

    @property
    def is_time(self) -> bool:
        return self._type.name == "timestamp"

    @property
    def is_day_alone(self) -> Column:
        return F.expr(write_is_day_alone(self._uncast.value, self._source))

    @property
    def lacks_zone(self) -> Column:
        return F.expr(write_lacks_zone(self._uncast.value, self._source))

    @property
    def problem(self) -> Column:
        """The problem of the row's value, else NULL."""
        value = F.expr(self._cast)
        unusable = value.isNull() & F.expr(f"({self._uncast.value}) is not null or {self._uncast.failed}")
        inexact = value.isNotNull() & ~F.coalesce(F.expr(self._exact), F.lit(False))
        problem = F.when(unusable, self._describe_value(False)).when(inexact, self._describe_value(True))
        if self.is_time:
            # Python supports only these years, and adding durations to them does not overflow.
            year = F.year(value)
            problem = problem.when((year < 1) | (year > 9999), F.lit(f"{self.name} is not in the years 1 to 9999"))
        if self.is_time or (self._type.element is not None and self._type.element.name == "timestamp"):
            # In time zones other than UTC, a part of these days is out of Python's range, and collecting it would fail.
            days = (F.array(value) if self.is_time else value).cast("array<date>")
            edge = F.arrays_overlap(days, F.array(*[F.lit(day).cast("date") for day in _EDGES]))
            problem = problem.when(
                edge, F.lit(f"{self.name} is on {_EDGES[0]} or {_EDGES[1]}, which not every zone has")
            )
        if self._required and self._type.name == "string":
            # Otherwise different ids would become equal, and all but the first event would count as duplicates.
            not_text = F.concat(
                F.lit(f"{self.name}: '"), _shorten_value(value), F.lit("' holds bytes that are not UTF-8")
            )
            problem = problem.when(F.contains(value, F.lit("\ufffd")), not_text)
        return problem.when(value.isNull(), F.lit(f"{self.name} is NULL")) if self._required else problem

    def _describe_value(self, is_inexact: bool) -> Column:
        read = [
            F.coalesce(_shorten_value(F.col(quote_identifier(name)).cast("string")), F.lit("NULL"))
            for name in self._reads
        ]
        if self._expression is None:
            text = F.btrim(F.expr(self._uncast.value).cast("string"))
            advice = suggest_remedy(self.name, self._type, text, is_inexact)
            return F.concat(F.lit(f"{self.name}: '"), read[0], F.lit(f"' is not {self._type}: "), advice)
        values = [
            F.concat(F.lit(f"{name} = '"), value, F.lit("'")) for name, value in zip(self._reads, read, strict=True)
        ]
        failure = F.lit(f"{self.name}: `{self._expression}` is not {self._type} where ")
        remedy = (
            f": cast it to {self._type} there, which rounds" if is_inexact else ": correct the expression or the row"
        )
        return F.concat(failure, F.concat_ws(", ", *values), F.lit(remedy))


def quote_value(value: Column) -> Column:
    """Writes a value for a reason: shortened and in quotes, or NULL without quotes."""
    quote = F.lit("'")
    return F.coalesce(F.concat(quote, _shorten_value(value.cast("string")), quote), F.lit("NULL"))


def _shorten_value(value: Column) -> Column:
    """Shortens a long text for a reason: keeps the beginning and adds the length."""
    value = F.make_valid_utf8(value)
    length = F.format_number(F.length(value), 0)
    short = F.concat(F.left(value, F.lit(QUOTED_CHARACTERS)), F.lit("... ("), length, F.lit(" characters)"))
    return F.when(F.length(value) > QUOTED_CHARACTERS, short).otherwise(value)


def _parse(expression: str) -> Any:
    refuse_substitution(expression, "expression")
    try:
        return sqlglot.parse_one(expression, read="spark")
    except sqlglot.errors.SqlglotError as error:
        raise SetupError(
            f"{expression!r} is not a SQL expression: {first_line(error)} If a column has the name of a word of SQL, such "
            "as when, write it in backticks: `when`"
        ) from error


def _make_lenient(expression: str) -> _FieldSql:
    """Makes an expression give NULL where Spark would raise an error, and adds the condition that this happened.

    A NULL input does not count as an error, so `nullif(x, '')` keeps its meaning.
    """
    tree, failing = _parse(expression), []
    # Innermost first, since the lenient form of an outer part contains that of the inner one.
    for node in reversed(list(tree.walk())):
        part = _write_try(node)
        if part is None:
            continue
        failing.append(f"({part.sql} is null and {' and '.join(f'({text}) is not null' for text in part.inputs)})")
        lenient = exp.Var(this=part.sql)
        if node is tree:
            tree = lenient
        else:
            node.replace(lenient)
    return _FieldSql(tree.sql("spark"), " or ".join(failing) or "false")


class _TryForm(NamedTuple):
    """The SQL of a part of an expression, which gives NULL instead of an error, and its inputs."""

    sql: str
    inputs: Sequence[str]


def _write_try(node: Any) -> _TryForm | None:
    """Writes the try_ form of a part; None if the part cannot raise an error."""
    function = _OPERATORS.get(type(node))
    if function is not None:
        inputs = [node.this.sql("spark"), node.expression.sql("spark")]
        return _TryForm(f"{function}({', '.join(inputs)})", inputs)
    text = node.sql("spark")
    name = text.partition("(")[0].upper()
    if name in _EPOCH and isinstance(node, exp.Anonymous):
        number = node.expressions[0].sql("spark")
        return _TryForm(f"if(({number}) between -{_EPOCH[name]} and {_EPOCH[name]}, {text}, null)", [number])
    if name in _RAISING and isinstance(node, exp.TimestampFromParts | exp.Anonymous):
        return _TryForm(f"try_{text}", [part.sql("spark") for part in node.iter_expressions()])
    if isinstance(node, exp.Cast) and node.to.sql("spark").startswith("TIMESTAMP"):
        # Spark would take a time without a day as a time of today.
        value = node.this.sql("spark")
        dated = f"if(cast({value} as string) rlike '^[ T]*[0-9]+:', null, {value})"
        return _TryForm(f"try_cast({dated} as {node.to.sql('spark')})", [value])
    if (isinstance(node, exp.Cast) and name == "CAST") or name in _RAISING:
        return _TryForm(f"try_{text}", [node.this.sql("spark")])
    return None


def drop_raw(rows: DataFrame, stream: Stream) -> DataFrame:
    """Drops RAW and READ_AS of checked rows without a REASON, unless a look-up may still reject them."""
    if stream.lookups:
        return rows
    rejected = F.col(REASON).isNotNull()
    return rows.withColumns({name: F.when(rejected, F.col(name)) for name in (RAW, READ_AS)})

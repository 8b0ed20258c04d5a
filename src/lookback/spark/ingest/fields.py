"""Makes a stream's fields of the columns of a source, and tells of each row what is wrong with it.

No row stops anything: what does not fit becomes NULL, and `REASON` says why.
"""

from __future__ import annotations

import json
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

import sqlglot
from pyspark.errors import AnalysisException
from pyspark.sql import functions as F  # noqa: N812
from sqlglot import exp

from lookback.core.errors import SetupError
from lookback.core.streams.source_keys import KAFKA
from lookback.core.values.texts import first_line
from lookback.spark.ingest.casting import cast_sql, exact_sql, is_day_alone, lacks_zone, remedy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType as SparkType

    from lookback.core.streams.declaration import Stream

# Columns beside the stream's fields. REASON is NULL for a usable row; FILE, BLOCK, ROW give the order in the files;
# READ_AS says how to read RAW again; ASSUMED what a time did not say: NO_ZONE, NO_TIME or NULL.
REASON, RAW, READ_AS, FILE, BLOCK, ROW = "__reason", "__raw", "__read_as", "__file", "__block", "__row"
ASSUMED, NO_ZONE, NO_TIME = "__assumed", "zone", "time"
# Beside the source's columns: the whole of a row that is not made of them.
CORRUPT = "__corrupt"
# Of a stream that reads Kafka: what its fields may be made of besides the keys of a record's value. A value's own keys of
# these names are not seen. Of headers that repeat the last.
BESIDE = {
    "kafka_key": "string",
    "kafka_timestamp": "timestamp",
    "kafka_topic": "string",
    "kafka_partition": "int",
    "kafka_offset": "bigint",
    "kafka_headers": "map<string,string>",
}
# Characters of a value that a reason quotes; the row itself is kept whole.
QUOTED_CHARACTERS = 100
# Functions that raise an error for a value that they cannot read, and have a try_ form that gives NULL.
_RAISING = frozenset(
    {
        "TO_DATE", "TO_TIMESTAMP", "TO_NUMBER", "TO_BINARY", "ELEMENT_AT", "URL_DECODE", "PARSE_JSON",
        "MAKE_TIMESTAMP", "MAKE_TIMESTAMP_LTZ", "MAKE_TIMESTAMP_NTZ",
    }
)  # fmt: skip
# Those that have none, and the greatest number whose microseconds fit into 64 bits.
_EPOCH = {
    "TIMESTAMP_SECONDS": 9_223_372_036_854,
    "TIMESTAMP_MILLIS": 9_223_372_036_854_775,
}
# First and last day of Python's calendar.
_EDGES = ("0001-01-01", "9999-12-31")
# What sqlglot calls the base of these changes with its version.
_OPERATORS: dict[Any, str] = {
    exp.Add: "try_add",
    exp.Sub: "try_subtract",
    exp.Mul: "try_multiply",
    exp.Div: "try_divide",
    exp.Mod: "try_mod",
}


def cast_rows(rows: DataFrame, stream: Stream, *, text: bool, place: str, malformed: Column | None = None) -> DataFrame:
    """Rows of source columns with RAW, READ_AS, FILE, BLOCK, ROW -> the stream's fields as declared, these, REASON, ASSUMED.

    A value that is not exactly one of the field's type is a REASON; only an expression in `columns` rounds. Columns that
    the fields are made of and that are not there count as NULL. Where there is a column CORRUPT, a row in which it is not
    NULL is malformed; malformed: the reason. text: arrays stand in text columns as JSON. place: what messages name.
    Raises SetupError where Spark cannot make a field of such columns.
    """
    there = {name.lower() for name in rows.columns}
    lacking = dict.fromkeys(source_columns(stream), "string") | (BESIDE if reads_kafka(stream) else {})
    if not text:
        # No text becomes an array by a cast, not even one that is NULL.
        lacking |= {name: str(type_) for name, type_ in stream.fields.items() if name in lacking}
    nulls = [F.lit(None).cast(type_).alias(name) for name, type_ in lacking.items() if name.lower() not in there]
    rows = rows.select("*", *nulls)
    fields = _fields(rows, stream, text, place)
    try:
        problems = F.concat_ws("; ", *[field.problem for field in fields])
        reason = F.when(problems != "", problems)
        if CORRUPT in rows.columns:
            unread = F.lit("malformed line") if malformed is None else malformed
            twice = F.lit("a key stands twice in the line, and only one value can count; send it once")
            unread = F.when(repeats_key(F.col(RAW)), twice).otherwise(unread)
            reason = F.when(F.col(CORRUPT).isNotNull(), unread).otherwise(reason)
        others = [READ_AS, FILE, BLOCK, ROW]
        values = [field.value for field in fields]
        return rows.select(*values, reason.alias(REASON), _assumed(fields).alias(ASSUMED), RAW, *others)
    except AnalysisException:
        for field in fields:
            field.check(rows, place)
        raise


def _fields(rows: DataFrame, stream: Stream, text: bool, place: str) -> list[_Field]:
    """The declared fields over source columns, whose types say how a value is made and when it is exact."""
    made = {name: _made(stream, name) for name in stream.fields}
    try:
        types = rows.select(*[F.expr(sql).alias(name) for name, (sql, _) in made.items()]).schema
    except AnalysisException:
        for name, (sql, _) in made.items():
            _require_made(rows, stream, name, [F.expr(sql)], place)
        raise
    sources = [field.dataType for field in types.fields]
    return [
        _Field(stream, name, text, sql, failing, source)
        for (name, (sql, failing)), source in zip(made.items(), sources, strict=True)
    ]


def _made(stream: Stream, name: str) -> tuple[str, str]:
    """What a field is made of before it has its type, and whether a part of that failed, as SQL."""
    expression = stream.columns.get(name)
    return (quote_column(name), "false") if expression is None else _lenient(expression)


def _require_made(rows: DataFrame, stream: Stream, name: str, columns: Sequence[Column], place: str) -> None:
    """Raises SetupError where Spark cannot make these columns of a field."""
    try:
        rows.select(*columns)
    except AnalysisException as error:
        made = f"columns.{name}" if name in stream.columns else name
        raise SetupError(f"{place}: {made} cannot become {stream.fields[name]}: {first_line(error)}") from error


def _assumed(fields: Sequence[_Field]) -> Column:
    """What the row's times do not say, and UTC and midnight are taken for."""
    times = [field for field in fields if field.is_time]
    no_time, no_zone = (
        [F.coalesce(condition, F.lit(False)) for condition in conditions]
        for conditions in ([field.is_day_alone for field in times], [field.lacks_zone for field in times])
    )
    return F.when(reduce(or_, no_time), F.lit(NO_TIME)).when(reduce(or_, no_zone), F.lit(NO_ZONE))


def repeats_key(line: Column) -> Column:
    """Whether a line is a JSON object in which a key stands twice; false for what is none."""
    keys = F.json_object_keys(line)
    return F.coalesce(F.size(keys) > F.size(F.array_distinct(keys)), F.lit(False))


def source_columns(stream: Stream) -> list[str]:
    """The columns that the stream's fields are made of, in order, without those BESIDE a record's value."""
    names = sorted({name for field in stream.fields for name in read_by(stream, field)})
    return [name for name in names if name.lower() not in BESIDE] if reads_kafka(stream) else names


def reads_kafka(stream: Stream) -> bool:
    """Whether the stream's `source` is a Kafka topic."""
    return stream.source.get("format") == KAFKA


def require(stream: Stream, there: set[str], place: str) -> None:
    """Raises SetupError where a column that makes the id or the time is not among `there` (lower case)."""
    for field in (stream.event_id, stream.event_time):
        for name in read_by(stream, field):
            if name.lower() not in there:
                role = "event_id" if field == stream.event_id else "event_time"
                if separator := _separator_of(there):
                    raise SetupError(
                        f"{place}: the header is one column, {min(there)!r:.100}; where {separator!r} separates the values, "
                        f"write it into the source of stream {stream.name!r}: `options: {{sep: {json.dumps(separator)}}}`"
                    )
                raise SetupError(
                    f"{place}: column {name!r}, which the {role} of stream {stream.name!r} is made of, is missing; "
                    f"there are {', '.join(sorted(there))}. Name the right one in the stream's `columns`, such as "
                    f'`columns: {{{field}: "other_name"}}`.'
                )


def _separator_of(there: set[str]) -> str:
    """The separator that stands in the only column's name; empty where there are more columns, or none stands there."""
    return next((mark for mark in (";", "\t", "|", ",") if len(there) == 1 and mark in min(there)), "")


def read_by(stream: Stream, field: str) -> list[str]:
    """The source columns that a field is made of."""
    expression = stream.columns.get(field)
    if expression is None:
        return [field]
    columns = _parsed(expression).find_all(exp.Column)
    return list(dict.fromkeys(column.parts[0].name for column in columns))


def quote_column(name: str) -> str:
    """A column as SQL names it."""
    return "`" + name.replace("`", "``") + "`"


class _Field:
    """A declared field as Spark columns: its value, and what is wrong where there is none.

    made, failing: see `_made`; source: the type of what is made.
    """

    def __init__(self, stream: Stream, name: str, text: bool, made: str, failing: str, source: SparkType) -> None:
        self._stream, self._name, self._type = stream, name, stream.fields[name]
        self._expression = stream.columns.get(name)
        self._required = name in (stream.event_id, stream.event_time)
        self._reads = read_by(stream, name)
        self._made, self._failing, self._source = made, failing, source
        json = text and self._expression is None
        self._sql = cast_sql(made, source, self._type, json=json)
        self._exact = exact_sql(made, source, self._type, json=json)
        if self._type.name == "string" and not text:
            # Text files were decoded as they were read. Bytes that are no text would stop whoever reads the table in Python.
            self._sql = f"make_valid_utf8({self._sql})"

    def check(self, rows: DataFrame, place: str) -> None:
        """Raises SetupError where Spark cannot make the field of these columns."""
        _require_made(rows, self._stream, self._name, [self.value, self.problem], place)

    @property
    def value(self) -> Column:
        return F.expr(self._sql).alias(self._name)

    @property
    def is_time(self) -> bool:
        """Whether the field is a timestamp."""
        return self._type.name == "timestamp"

    @property
    def is_day_alone(self) -> Column:
        return F.expr(is_day_alone(self._made, self._source))

    @property
    def lacks_zone(self) -> Column:
        return F.expr(lacks_zone(self._made, self._source))

    @property
    def problem(self) -> Column:
        """What is wrong with the row's value, else NULL."""
        value = F.expr(self._sql)
        unusable = value.isNull() & F.expr(f"({self._made}) is not null or {self._failing}")
        inexact = value.isNotNull() & ~F.coalesce(F.expr(self._exact), F.lit(False))
        problem = F.when(unusable, self._told(False)).when(inexact, self._told(True))
        if self._type.name == "timestamp":
            # Python knows no other years, and durations can be added to these without an overflow.
            year = F.year(value)
            problem = problem.when((year < 1) | (year > 9999), F.lit(f"{self._name} is not in the years 1 to 9999"))
            # Nor, in zones off UTC, all of these; a reader that collects such a time would fail.
            edge = value.cast("date").isin(*[F.lit(day).cast("date") for day in _EDGES])
            problem = problem.when(
                edge, F.lit(f"{self._name} is on {_EDGES[0]} or {_EDGES[1]}, which not every zone has")
            )
        if self._required and self._type.name == "string":
            # Different ids would become one, and all but the first of them duplicates.
            told = F.concat(F.lit(f"{self._name}: '"), _quoted(value), F.lit("' holds bytes that are not UTF-8"))
            problem = problem.when(F.contains(value, F.lit("\ufffd")), told)
        return problem.when(value.isNull(), F.lit(f"{self._name} is NULL")) if self._required else problem

    def _told(self, is_inexact: bool) -> Column:
        found = [F.coalesce(_quoted(F.col(quote_column(name)).cast("string")), F.lit("NULL")) for name in self._reads]
        if self._expression is None:
            text = F.btrim(F.col(quote_column(self._name)).cast("string"))
            advice = remedy(self._name, self._type, text, is_inexact)
            return F.concat(F.lit(f"{self._name}: '"), found[0], F.lit(f"' is not {self._type}: "), advice)
        values = [
            F.concat(F.lit(f"{name} = '"), value, F.lit("'")) for name, value in zip(self._reads, found, strict=True)
        ]
        told = F.lit(f"{self._name}: `{self._expression}` is not {self._type} where ")
        mend = f": cast it to {self._type} there, which rounds" if is_inexact else ": mend the expression or the row"
        return F.concat(told, F.concat_ws(", ", *values), F.lit(mend))


def _quoted(value: Column) -> Column:
    """The text as a reason quotes it: the beginning of a long one, and how long it is."""
    value = F.make_valid_utf8(value)
    length = F.format_number(F.length(value), 0)
    short = F.concat(F.left(value, F.lit(QUOTED_CHARACTERS)), F.lit("... ("), length, F.lit(" characters)"))
    return F.when(F.length(value) > QUOTED_CHARACTERS, short).otherwise(value)


def _parsed(expression: str) -> Any:
    try:
        return sqlglot.parse_one(expression, read="spark")
    except sqlglot.errors.SqlglotError as error:
        raise SetupError(f"{expression!r} is not a SQL expression: {first_line(error)}") from error


def _lenient(expression: str) -> tuple[str, str]:
    """The expression with NULL where Spark would raise an error, and a condition: whether any part of it did so.

    A NULL that goes in is no error, so `nullif(x, '')` stays what it says.
    """
    tree, failing = _parsed(expression), []
    # Innermost first: an outer part is written in terms of the inner one's lenient form.
    for node in reversed(list(tree.walk())):
        tried = _tried(node)
        if tried is None:
            continue
        text, inputs = tried
        failing.append(f"({text} is null and {' and '.join(f'({given}) is not null' for given in inputs)})")
        lenient = exp.Var(this=text)
        if node is tree:
            tree = lenient
        else:
            node.replace(lenient)
    return tree.sql("spark"), " or ".join(failing) or "false"


def _tried(node: Any) -> tuple[str, Sequence[str]] | None:
    """The try_ form of a part that can raise an error, and what goes into it."""
    function = _OPERATORS.get(type(node))
    if function is not None:
        inputs = [node.this.sql("spark"), node.expression.sql("spark")]
        return f"{function}({', '.join(inputs)})", inputs
    text = node.sql("spark")
    name = text.partition("(")[0].upper()
    if name in _EPOCH and isinstance(node, exp.Anonymous):
        given = node.expressions[0].sql("spark")
        return f"if(({given}) between -{_EPOCH[name]} and {_EPOCH[name]}, {text}, null)", [given]
    if name in _RAISING and isinstance(node, exp.TimestampFromParts | exp.Anonymous):
        return f"try_{text}", [part.sql("spark") for part in node.iter_expressions()]
    if (isinstance(node, exp.Cast) and name == "CAST") or name in _RAISING:
        return f"try_{text}", [node.this.sql("spark")]
    return None

"""Files as ingest finds them: read, typed as the stream declares, each row judged usable or not.

No row stops anything. Text is read as text and then cast; what does not fit is told in `REASON`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import sqlglot
from pyspark.errors import AnalysisException
from pyspark.sql import functions as F  # noqa: N812
from sqlglot import exp

from lookback.core.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyspark.sql import Column, DataFrame, SparkSession

    from lookback.core.streams import Stream
    from lookback.core.types import DataType

# Columns beside the stream's fields. REASON is NULL for a usable row; FILE, BLOCK, ROW give the order in the files.
REASON, RAW, FILE, BLOCK, ROW = "__reason", "__raw", "__file", "__block", "__row"
_CORRUPT, _LINE = "__corrupt", "value"
_SUFFIXES = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json", ".ndjson": "json"}
_COMPRESSIONS = (".gz", ".bz2", ".zst", ".snappy", ".lz4")
# Functions that raise an error for a value that they cannot read, and have a try_ form that gives NULL.
_RAISING = frozenset({"TO_DATE", "TO_TIMESTAMP", "TO_NUMBER", "TO_BINARY", "ELEMENT_AT", "URL_DECODE", "PARSE_JSON"})
# What sqlglot calls the base of these changes with its version.
_OPERATORS: dict[Any, str] = {
    exp.Add: "try_add",
    exp.Sub: "try_subtract",
    exp.Mul: "try_multiply",
    exp.Div: "try_divide",
    exp.Mod: "try_mod",
}
_JSON_SAMPLE = 1_000


@dataclass(frozen=True)
class Source:
    """Files of one format. format: parquet, csv (with a header) or json (an object a line). options: the reader's."""

    path: str
    format: str
    options: Mapping[str, str]

    @classmethod
    def find(
        cls,
        spark: SparkSession,
        stream: Stream,
        path: str | None,
        format_: str | None,
        options: Mapping[str, str] | None,
    ) -> Source:
        """The files at `path` (a file, a folder, a pattern; default: stream.source), their format told by their suffixes.

        Raises SetupError where nothing is there or the format is unknown.
        """
        declared = stream.source
        chosen = path or declared.get("path")
        if not chosen:
            raise SetupError(f"stream {stream.name!r} declares no source: name the file or folder to ingest")
        name = format_ or (declared.get("format") if path is None else None)
        name = name or _format_of(_files(spark, chosen), chosen) or declared.get("format")
        known = _SUFFIXES.get(f".{name}")
        if known is None:
            raise SetupError(f"{chosen}: the format {name or ''!r} is not known; name one of parquet, csv, json")
        return cls(chosen, known, {**dict(declared.get("options") or {}), **dict(options or {})})

    def read(self, spark: SparkSession, stream: Stream) -> DataFrame:
        """All rows of the files, judged: the stream's fields, then REASON, RAW, FILE, BLOCK, ROW."""
        rows = _with_place(self._reader(spark.read, self._columns(spark)).load(self.path))
        if self.format == "json":
            # Lines have no header: some keys of the first ones tell whether these are the right files.
            self._require(stream, _json_keys(rows))
        return self.judge(rows, stream)

    def read_stream(self, spark: SparkSession) -> DataFrame:
        """A stream of the files' rows as they are, for `judge` in each batch. At least one file must be there."""
        return _with_place(self._reader(spark.readStream, self._columns(spark)).load(self.path))

    def judge(self, rows: DataFrame, stream: Stream) -> DataFrame:
        """Rows of `read_stream` -> the stream's fields as declared, then REASON, RAW, FILE, BLOCK, ROW.

        Raises SetupError where a column that makes the id or the time is missing, or an expression cannot be used.
        """
        # Within a file the splits follow their start, within a split the rows their number.
        rows = rows.withColumn(ROW, F.monotonically_increasing_id())
        wanted = sorted({name for field in stream.fields for name in _read_by(stream, field)})
        rows, there = self._opened(rows, wanted)
        self._require(stream, there)
        columns = [_Field(stream, name, type_, self.format != "parquet") for name, type_ in stream.fields.items()]
        try:
            return _judged(rows, columns, self.format)
        except AnalysisException:
            for column in columns:
                column.check(rows, self.path)
            raise

    def _columns(self, spark: SparkSession) -> Any:
        """The schema to read with; None: the text reader's own."""
        if self.format == "json":
            return None
        try:
            reader = spark.read.format(self.format).options(**{"header": "true", **self.options})
            found = reader.load(self.path).schema
        except AnalysisException as error:
            raise SetupError(f"{self.path} cannot be read as {self.format}: {_first_line(error)}") from error
        if self.format == "csv":
            # Text; what does not have the header's number of columns is kept whole.
            found = found.add(_CORRUPT, "string")
        return found

    def _reader(self, reader: Any, schema: Any) -> Any:
        options = dict(self.options)
        if self.format == "csv":
            # Files whose headers differ are refused instead of read crosswise; every column is looked at, so that a row
            # is malformed or not whichever columns are asked for.
            options = {"header": "true", "enforceSchema": "false", "columnPruning": "false", **options}
            options = {**options, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
        reader = reader.format("text" if self.format == "json" else self.format).options(**options)
        return reader if schema is None else reader.schema(schema)

    def _opened(self, rows: DataFrame, wanted: list[str]) -> tuple[DataFrame, set[str] | None]:
        """The rows with every wanted column (NULL text where the files lack it), and the columns that the files have."""
        place = [F.col(name) for name in (FILE, BLOCK, ROW)]
        if self.format == "json":
            schema = ", ".join(f"{_ticked(name)} string" for name in [*wanted, _CORRUPT])
            parsed = F.from_json(_LINE, schema, {"columnNameOfCorruptRecord": _CORRUPT, **self.options})
            rows = rows.where(F.trim(F.col(_LINE)) != "")
            return rows.select(F.col(_LINE).alias(RAW), *place, parsed.alias("__o")).select(RAW, *place, "__o.*"), None
        found = [name for name in rows.columns if not name.startswith("__")]
        there = {name.lower() for name in found}
        lacking = [F.lit(None).cast("string").alias(name) for name in wanted if name.lower() not in there]
        raw = F.to_json(F.struct(*[F.col(_ticked(name)) for name in found]), {"ignoreNullFields": "false"})
        if self.format == "csv":
            raw = F.coalesce(F.col(_CORRUPT), raw)
        return rows.select("*", *lacking, raw.alias(RAW)), there

    def _require(self, stream: Stream, there: set[str] | None) -> None:
        if there is None:
            return
        for field in (stream.event_id, stream.event_time):
            for name in _read_by(stream, field):
                if name.lower() not in there:
                    role = "event_id" if field == stream.event_id else "event_time"
                    raise SetupError(
                        f"{self.path}: column {name!r}, which the {role} of stream {stream.name!r} is made of, is missing; "
                        f"there are {', '.join(sorted(there))}. Name the right one in the stream's `columns`, such as "
                        f'`columns: {{{field}: "other_name"}}`.'
                    )


class _Field:
    """A declared field as Spark columns: its value, and what is wrong where there is none."""

    def __init__(self, stream: Stream, name: str, type_: DataType, text: bool) -> None:
        self._name, self._type = name, type_
        self._expression = stream.columns.get(name)
        self._required = name in (stream.event_id, stream.event_time)
        self._reads = _read_by(stream, name)
        if self._expression is None:
            self._made, self._failing = _ticked(name), "false"
        else:
            self._made, self._failing = _lenient(self._expression)
        if text and type_.name == "array" and self._expression is None:
            self._sql = f"from_json({self._made}, '{type_}')"
        else:
            self._sql = f"try_cast({self._made} as {type_})"

    def check(self, rows: DataFrame, path: str) -> None:
        """Raises SetupError where Spark cannot make the field of these columns."""
        try:
            rows.select(self.value, self.problem)
        except AnalysisException as error:
            made = f"columns.{self._name}" if self._expression else self._name
            raise SetupError(f"{path}: {made} cannot become {self._type}: {_first_line(error)}") from error

    @property
    def value(self) -> Column:
        return F.expr(self._sql).alias(self._name)

    @property
    def problem(self) -> Column:
        """What is wrong with the row's value, else NULL."""
        value = F.expr(self._sql)
        unusable = value.isNull() & F.expr(f"({self._made}) is not null or {self._failing}")
        problem = F.when(unusable, self._told())
        if self._type.name == "timestamp":
            # Python knows no other years, and durations can be added to these without an overflow.
            year = F.year(value)
            problem = problem.when((year < 1) | (year > 9999), F.lit(f"{self._name} is not in the years 1 to 9999"))
        return problem.when(value.isNull(), F.lit(f"{self._name} is NULL")) if self._required else problem

    def _told(self) -> Column:
        found = [F.coalesce(F.col(_ticked(name)).cast("string"), F.lit("NULL")) for name in self._reads]
        if self._expression is None:
            return F.concat(F.lit(f"{self._name}: '"), found[0], F.lit(f"' is not {self._type}"))
        values = [
            F.concat(F.lit(f"{name} = '"), value, F.lit("'")) for name, value in zip(self._reads, found, strict=True)
        ]
        told = F.lit(f"{self._name}: `{self._expression}` is not {self._type} where ")
        return F.concat(told, F.concat_ws(", ", *values))


def _judged(rows: DataFrame, fields: Iterable[_Field], format_: str) -> DataFrame:
    fields = list(fields)
    problems = F.concat_ws("; ", *[field.problem for field in fields])
    reason = F.when(problems != "", problems)
    if format_ != "parquet":
        reason = F.when(F.col(_CORRUPT).isNotNull(), F.lit("malformed line")).otherwise(reason)
    judged = rows.select(*[field.value for field in fields], reason.alias(REASON), RAW, FILE, BLOCK, ROW)
    return judged.withColumn(RAW, F.when(F.col(REASON).isNotNull(), F.col(RAW)))


def _with_place(rows: DataFrame) -> DataFrame:
    file = F.col("_metadata")
    return rows.select("*", file.getField("file_path").alias(FILE), file.getField("file_block_start").alias(BLOCK))


def _files(spark: SparkSession, path: str) -> list[str]:
    try:
        return list(spark.read.text(path).inputFiles())
    except AnalysisException as error:
        raise SetupError(f"{path} cannot be read: {_first_line(error)}") from error


def _format_of(files: Iterable[str], path: str) -> str | None:
    found: dict[str, str] = {}
    for file in files:
        name = PurePosixPath(file)
        suffix = PurePosixPath(name.stem).suffix if name.suffix in _COMPRESSIONS else name.suffix
        if suffix in _SUFFIXES:
            found[_SUFFIXES[suffix]] = name.name
    if len(found) > 1:
        raise SetupError(
            f"{path} holds files of several formats ({', '.join(sorted(found.values()))}): name the format"
        )
    return next(iter(found), None)


def _json_keys(lines: DataFrame) -> set[str] | None:
    sample = lines.select(F.explode(F.json_object_keys(F.col(_LINE)))).limit(_JSON_SAMPLE).distinct()
    return {str(row[0]).lower() for row in sample.collect()} or None


def _read_by(stream: Stream, field: str) -> list[str]:
    """The source columns that a field is made of."""
    expression = stream.columns.get(field)
    if expression is None:
        return [field]
    columns = _parsed(expression).find_all(exp.Column)
    return list(dict.fromkeys(column.parts[0].name for column in columns))


def _parsed(expression: str) -> Any:
    try:
        return sqlglot.parse_one(expression, read="spark")
    except sqlglot.errors.SqlglotError as error:
        raise SetupError(f"{expression!r} is not a SQL expression: {_first_line(error)}") from error


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


def _tried(node: Any) -> tuple[str, list[str]] | None:
    """The try_ form of a part that can raise an error, and what goes into it."""
    function = _OPERATORS.get(type(node))
    if function is not None:
        inputs = [node.this.sql("spark"), node.expression.sql("spark")]
        return f"{function}({', '.join(inputs)})", inputs
    text = node.sql("spark")
    name = text.partition("(")[0].upper()
    if (isinstance(node, exp.Cast) and name == "CAST") or name in _RAISING:
        return f"try_{text}", [node.this.sql("spark")]
    return None


def _ticked(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]

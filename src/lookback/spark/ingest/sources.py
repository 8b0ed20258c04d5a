"""Files as ingest finds them: listed, read whatever their columns are, each row judged usable or not.

No file stops another: one that cannot be read becomes one row with a `REASON`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import reduce
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from pyspark.errors import AnalysisException
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StringType, StructField, StructType

from lookback.core.errors import SetupError
from lookback.core.values.texts import first_line
from lookback.spark.ingest.fields import (
    ASSUMED,
    BLOCK,
    CORRUPT,
    FILE,
    RAW,
    READ_AS,
    REASON,
    ROW,
    cast_rows,
    find_source_columns,
    list_source_columns,
    quote_column,
    repeats_key,
    require_columns,
)
from lookback.spark.platform.session import on_databricks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pyspark.sql import Column, DataFrame, SparkSession

    from lookback.core.streams.declaration import Stream

FORMATS = ("parquet", "csv", "json")
# Microseconds and all: what is read again is what was read.
JSON_FORMATS = {
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
_LINE, _OBJECTS = "value", "__objects"
_SUFFIXES = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json", ".ndjson": "json"}
_COMPRESSIONS = (".gz", ".bz2", ".zst", ".snappy", ".lz4")
_JSON_SAMPLE = 1_000
# Quotes inside quotes are doubled (RFC 4180), as spreadsheets and Python write them.
CSV_DEFAULTS = {"header": "true", "escape": '"'}
# Nothing may be passed over in silence, whatever the session's settings are.
_NOTHING_SKIPPED = {"ignoreCorruptFiles": "false", "ignoreMissingFiles": "false"}
# Reader options that say which files are meant.
_WHICH_FILES = frozenset({"recursivefilelookup", "pathglobfilter", "modifiedbefore", "modifiedafter"})
_FILE = "path string, modificationTime timestamp, length bigint, content binary"
# Options of a file stream, by the names that Auto Loader has for them.
_BOUNDS = ("maxFilesPerTrigger", "maxBytesPerTrigger")
_AUTO_LOADER = "cloudFiles."
# A double keeps no more digits than these of a JSON number.
_LONG_NUMBER = "[0-9][0-9.]{15}"
_OF_FILES = re.compile(r"FAILED_READ_FILE|CANNOT_MERGE_|FileNotFoundException|PARQUET_TYPE_|UNABLE_TO_INFER_SCHEMA")
_VANISHED = re.compile(r"FILE_NOT_EXIST|FileNotFoundException|PATH_NOT_FOUND")


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
        if path is not None and declared.get("format") not in (None, *FORMATS):
            # The declared source is none of files, and these come beside it.
            declared = {}
        chosen = path or declared.get("path")
        if not chosen:
            raise SetupError(f"stream {stream.name!r} declares no source: name the file or folder to ingest")
        options = {**dict(declared.get("options") or {}), **dict(options or {})}
        name = format_ or (declared.get("format") if path is None else None)
        name = name or _format_of(_files(spark, chosen, options), chosen) or declared.get("format")
        known = _SUFFIXES.get(f".{name}")
        if known is None:
            raise SetupError(f"{chosen}: the format {name or ''!r} is not known; name one of {', '.join(FORMATS)}")
        return cls(chosen, known, options)

    def files(self, spark: SparkSession, stream: Stream) -> Files:
        """The files that are there now."""
        return Files(spark, self, stream, None)

    def watch(self, spark: SparkSession) -> DataFrame:
        """A stream of the names of files as they appear, one row a file; none is opened. On Databricks by Auto Loader."""
        reader = spark.readStream.format("cloudFiles" if on_databricks() else "binaryFile")
        reader = reader.schema(_FILE).options(**self.watch_options(on_databricks()))
        return reader.load(self.path).select("_metadata.file_path")

    def watch_options(self, auto_loader: bool) -> dict[str, str]:
        """The options of the reader that finds files; how they are read is not its business.

        A file is known by its name, however old it is, and taken once, also where it is written anew later. The schema
        is given, so that Auto Loader needs no place to remember one and has nothing to rescue.
        """
        own = {name: value for name, value in self.options.items() if name.startswith(_AUTO_LOADER)}
        others = {name: value for name, value in self.options.items() if name not in own}
        if not auto_loader:
            # Spark forgets files of the last week by default, and takes none that is older than those: however old, a new
            # name is a new file. One that has vanished is told by `planned`.
            return {"maxFileAge": "36500d", **others, "ignoreMissingFiles": "true"}
        which = {name: value for name, value in others.items() if name.lower() in _WHICH_FILES}
        bounds = {f"{_AUTO_LOADER}{name}": others[name] for name in _BOUNDS if name in others}
        fixed = {f"{_AUTO_LOADER}format": "binaryFile", f"{_AUTO_LOADER}allowOverwrites": "false"}
        return {
            f"{_AUTO_LOADER}includeExistingFiles": "true",
            **which,
            **bounds,
            **own,
            **fixed,
            "ignoreMissingFiles": "true",
        }

    def means(self, name: str) -> bool:
        """Whether a file that was found is one that a batch read of the path takes too.

        Auto Loader goes into every folder; Spark's readers only into those such as `day=2026-01-31`, unless
        `recursiveFileLookup` says otherwise, and pass over names that begin with `_` or `.`.
        """
        recursive = any(n.lower() == "recursivefilelookup" and v.lower() == "true" for n, v in self.options.items())
        base = re.sub(r"^\w+:/*", "/", self.path).rstrip("/") + "/"
        if recursive or re.search(r"[*?\[{]", self.path) or base not in unquote(name):
            return True
        *folders, file = unquote(name).partition(base)[2].split("/")
        return all("=" in folder for folder in folders) and not file.startswith(("_", "."))

    def line(self, row: Column) -> Column:
        """A row of source columns as one JSON object."""
        return F.make_valid_utf8(F.to_json(row, {"ignoreNullFields": "false", **JSON_FORMATS}))

    def parsed(self, lines: DataFrame, names: Sequence[str]) -> DataFrame:
        """JSON lines in a column RAW, and others, -> the same with the named keys as text, and CORRUPT.

        CORRUPT is the line where it is not one JSON object, or one in which a key stands twice.
        """
        fields = ", ".join(f"{quote_column(name)}: string" for name in names)
        # In brackets, so that a second object on the line is not passed over.
        array = F.concat(F.lit("["), F.col(RAW), F.lit("]"))
        options = {**self.options, "mode": "PERMISSIVE"}
        lines = lines.withColumn(_OBJECTS, F.from_json(array, f"array<struct<{fields}>>", options))
        one = (F.size(_OBJECTS) == 1) & F.get(F.col(_OBJECTS), F.lit(0)).isNotNull() & ~repeats_key(F.col(RAW))
        lines = lines.withColumn(CORRUPT, F.when(F.coalesce(one, F.lit(False)), F.lit(None)).otherwise(F.col(RAW)))
        columns = [_json_text(name).alias(name) for name in names]
        return lines.select(*[quote_column(name) for name in lines.columns if name != _OBJECTS], *columns)

    def split(self, lines: DataFrame, names: Sequence[str]) -> DataFrame:
        """Lines of CSV in a column RAW, and others, -> the same with the named columns as text, and CORRUPT.

        CORRUPT is the line where it has not as many values as there are names.
        """
        schema = ", ".join(f"{quote_column(name)} string" for name in [*names, CORRUPT])
        options = {**CSV_DEFAULTS, **self.options, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": CORRUPT}
        lines = lines.withColumn(_OBJECTS, F.from_csv(RAW, schema, options))
        return lines.select("*", f"{_OBJECTS}.*").drop(_OBJECTS)

    def read_as(self, schema: StructType | None) -> str:
        """How the files are read, as JSON, to read their rejected rows again: format, options, columns."""
        # Names with a dot are settings of a file system, keys to it among them.
        options = {name: str(value) for name, value in self.options.items() if "." not in name}
        columns = None if schema is None else schema.toDDL()
        return json.dumps({"format": self.format, "options": options, "columns": columns}, ensure_ascii=False)


@dataclass(frozen=True)
class Files:
    """Files that are taken in one round. names: as Spark writes them in `_metadata.file_path`; None: all at the path.

    Named files come from a stream: all rows of theirs go somewhere, and none is looked at again. Unnamed ones are
    refused where none of them fits.
    """

    spark: SparkSession
    source: Source
    stream: Stream
    names: Sequence[str] | None

    def together(self) -> DataFrame:
        """All rows of the files, judged (see `fields`), where they can be read and have the same columns.

        Raises SetupError where a column that makes the id or the time is missing, or an expression cannot be used, and
        Spark's errors where a file cannot be read.
        """
        schema = self._schema(self.names)
        if schema is not None:
            require_columns(self.stream, {name.lower() for name in schema.names}, self.source.path)
        elif self.names is None:
            self._require_keys()
        return self._judged(self.names, schema)

    def apart(self) -> DataFrame:
        """All rows of the files that can be read, judged, and one row for each file that cannot, with the REASON.

        Files are halved until what is left can be read and has the same columns. Raises SetupError where no unnamed
        file can be used.
        """
        source = self.source
        names = _files(self.spark, source.path, source.options) if self.names is None else list(self.names)
        broken: dict[str, str] = {}
        alike: dict[str, tuple[StructType | None, list[str]]] = {}
        for schema, group in self._sound(sorted(names), broken):
            alike.setdefault("" if schema is None else schema.json(), (schema, []))[1].extend(group)
        parts = [part for schema, group in alike.values() for part in self._fitting(group, schema, broken)]
        if self.names is None and broken and not parts:
            name, reason = min(broken.items())
            others = f" The other {len(broken) - 1:,} files cannot be used either." if len(broken) > 1 else ""
            raise SetupError(reason + others if reason.startswith(source.path) else f"{name}: {reason}{others}")
        return reduce(lambda some, more: some.unionByName(more), [*parts, self._told(broken)])

    def may_differ(self, error: Exception) -> bool:
        """Whether `apart` may do where `together` raised the error."""
        if isinstance(error, SetupError):
            # The first header stands for all files of a CSV source.
            return self.names is not None or self.source.format == "csv"
        return isinstance(error, AnalysisException) or bool(_OF_FILES.search(str(error)))

    def _sound(self, names: list[str], broken: dict[str, str]) -> Iterator[tuple[StructType | None, list[str]]]:
        """Groups of files that Spark can read together, to the last row; `broken` gets the others, with the reason."""
        if not names:
            return
        try:
            schema = self._schema(names)
            if schema is None or schema.names:
                self._opened(names, schema).agg(F.max(F.length(RAW))).collect()
                yield schema, names
        except Exception as error:
            if not (isinstance(error, AnalysisException) or _OF_FILES.search(str(error))):
                raise
            if len(names) > 1:
                half = len(names) // 2
                yield from self._sound(names[:half], broken)
                yield from self._sound(names[half:], broken)
            elif _VANISHED.search(str(error)):
                broken[names[0]] = "the file vanished before it was read"
            else:
                broken[names[0]] = f"the file cannot be read as {self.source.format}: {_cause(error)}"

    def _fitting(self, names: list[str], schema: StructType | None, broken: dict[str, str]) -> Iterator[DataFrame]:
        """The rows of files with the same columns, judged; where the stream cannot be made of these, `broken` gets them."""
        try:
            if schema is not None:
                require_columns(self.stream, {name.lower() for name in schema.names}, self.source.path)
            yield self._judged(names, schema)
        except SetupError as error:
            broken.update(dict.fromkeys(names, str(error)))

    def _schema(self, names: Sequence[str] | None) -> StructType | None:
        """The columns of the files, without CORRUPT; None for lines of JSON."""
        if self.source.format == "json":
            return None
        options = {**CSV_DEFAULTS, "mergeSchema": "true", **self.source.options, **_base(names)}
        return self._load(self.spark.read.format(self.source.format).options(**options), names).schema

    def _judged(self, names: Sequence[str] | None, schema: StructType | None) -> DataFrame:
        if schema is not None and not schema.names:
            # Empty files.
            return self._told({})
        text = self.source.format != "parquet"
        rows = cast_rows(self._opened(names, schema), self.stream, text=text, place=self.source.path)
        rejected = F.col(REASON).isNotNull()
        return rows.withColumns({name: F.when(rejected, F.col(name)) for name in (RAW, READ_AS)})

    def _opened(self, names: Sequence[str] | None, schema: StructType | None) -> DataFrame:
        """Rows of source columns, with RAW, READ_AS, FILE, BLOCK, ROW, and CORRUPT where the files are text."""
        source = self.source
        rows = _with_place(self._load(self._reader(schema).options(**_base(names)), names))
        rows = rows.withColumn(READ_AS, F.lit(source.read_as(schema)))
        if schema is None:
            rows = rows.where(F.trim(F.col(_LINE)) != "").withColumn(RAW, F.make_valid_utf8(_LINE)).drop(_LINE)
            return source.parsed(rows, list_source_columns(self.stream))
        raw = source.line(F.struct(*[F.col(quote_column(name)) for name in schema.names]))
        return rows.withColumn(RAW, F.coalesce(F.col(CORRUPT), raw) if source.format == "csv" else raw)

    def _reader(self, schema: StructType | None) -> Any:
        options = {**self.source.options, **_NOTHING_SKIPPED}
        if schema is None:
            return self.spark.read.format("text").options(**options)
        if self.source.format == "csv":
            # Text; what does not have the header's number of columns is kept whole. Files whose headers differ are
            # refused instead of read crosswise; every column is looked at, so that a row is malformed or not whichever
            # columns are asked for.
            options = {**CSV_DEFAULTS, "enforceSchema": "false", "columnPruning": "false", **options}
            options = {**options, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": CORRUPT}
            schema = StructType([*schema.fields, StructField(CORRUPT, StringType())])
        return self.spark.read.format(self.source.format).options(**options).schema(schema)

    def _load(self, reader: Any, names: Sequence[str] | None) -> DataFrame:
        rows: DataFrame = reader.load(self.source.path if names is None else [_pattern(name) for name in names])
        return rows

    def _told(self, broken: Mapping[str, str]) -> DataFrame:
        """The files that cannot be read, as judged rows."""
        files = self.spark.createDataFrame(sorted(broken.items()), f"{FILE} string, {REASON} string")
        nothing = [F.lit(None).cast(str(type_)).alias(name) for name, type_ in self.stream.fields.items()]
        raw, read_as = F.lit(None).cast("string").alias(RAW), F.lit(self.source.read_as(None)).alias(READ_AS)
        first = F.lit(0).cast("bigint")
        assumed = F.lit(None).cast("string").alias(ASSUMED)
        order = [F.col(FILE), first.alias(BLOCK), first.alias(ROW)]
        return files.select(*nothing, F.col(REASON), assumed, raw, read_as, *order)

    def _require_keys(self) -> None:
        """Raises SetupError where no line of the files has a key that the id or the time is made of."""
        lines = self._load(self._reader(None), self.names)
        keys = lines.select(F.explode(F.json_object_keys(F.col(_LINE))).alias("key"))
        sample = {str(row[0]).lower() for row in keys.limit(_JSON_SAMPLE).distinct().collect()}
        roles = (self.stream.event_id, self.stream.event_time)
        needed = {name.lower() for field in roles for name in find_source_columns(self.stream, field)}
        if sample and not needed <= sample:
            # The first lines need not be like the others.
            lowered = keys.select(F.lower("key").alias("key"))
            sample |= {str(row[0]) for row in lowered.where(F.col("key").isin(*needed)).distinct().collect()}
            require_columns(self.stream, sample, self.source.path)


def planned(spark: SparkSession, checkpoint: str, batch_id: int) -> list[str]:
    """The files that Spark gave to a batch of the query with this checkpoint, those that have vanished since included.

    Read from the checkpoint's own records; empty where they are not in the form of Spark 3 and 4.
    """
    folder = _escaped(checkpoint)
    try:
        last = _log_offset(spark, folder, batch_id)
        first = _log_offset(spark, folder, batch_id - 1) if batch_id else -1
        entries = spark.read.text(f"{folder}/sources/0").where(F.col(_LINE).startswith("{"))
        entry = F.from_json(_LINE, "path string, batchId bigint")
        rows = entries.select(entry.alias("e")).where(f"e.batchId > {first} and e.batchId <= {last}").distinct()
        return [str(row[0]) for row in rows.select("e.path").collect()]
    except (AnalysisException, LookupError, TypeError, ValueError):
        return []


def _log_offset(spark: SparkSession, folder: str, batch_id: int) -> int:
    lines = spark.read.text(f"{folder}/offsets/{batch_id}", wholetext=True).collect()[0][0]
    return int(json.loads(lines.strip().splitlines()[-1])["logOffset"])


def same_place(name: str) -> str:
    """The file's name with as many slashes as `_metadata.file_path` has."""
    return re.sub(r"^file:/+", "file:/", name)


def _json_text(name: str) -> Column:
    """The text of a key of the only object: of a long number exactly, where Spark goes by way of a double."""
    text = F.get(F.col(_OBJECTS), F.lit(0)).getField(name)
    number = text.rlike("^-?[0-9.]+(E-?[0-9]+)?$") & text.rlike("[.E]") & F.col(RAW).rlike(_LONG_NUMBER)
    if '"' not in name and "\\" not in name:
        path = '$["' + name.replace("'", "\\'") + '"]'
        exact = F.expr(f"try_variant_get(try_parse_json({RAW}), '{path}', 'string')")
        text = F.when(number, F.coalesce(exact, text)).otherwise(text)
    # What Python and others write for what JSON has no number for.
    return F.when(text.isin('"NaN"', '"Infinity"', '"-Infinity"'), F.btrim(text, F.lit('"'))).otherwise(text)


def _with_place(rows: DataFrame) -> DataFrame:
    file = F.col("_metadata")
    # Within a file the splits follow their start, within a split the rows their number.
    place = {FILE: file.getField("file_path"), BLOCK: file.getField("file_block_start")}
    return rows.withColumns(place).withColumn(ROW, F.monotonically_increasing_id())


def _files(spark: SparkSession, path: str, options: Mapping[str, str]) -> list[str]:
    which = {name: value for name, value in options.items() if name.lower() in _WHICH_FILES}
    try:
        return [same_place(name) for name in spark.read.options(**which).text(path).inputFiles()]
    except AnalysisException as error:
        raise SetupError(f"{path} cannot be read: {first_line(error)}") from error


def _pattern(name: str) -> str:
    """The path pattern that means the named file and no other."""
    return _escaped(unquote(name))


def _escaped(path: str) -> str:
    return re.sub(r"([{}\[\]*?\\])", r"\\\1", path)


def _base(names: Sequence[str] | None) -> dict[str, str]:
    """The folder above folders such as `day=2026-01-31`, which are columns to Spark if it knows where they begin."""
    folder = re.match(r"(.*?)/[^/=]+=[^/]*/", names[0]) if names else None
    return {"basePath": unquote(folder.group(1))} if folder else {}


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


def _cause(error: Exception) -> str:
    """The innermost cause that Java names, without its class."""
    causes = re.findall(r"Caused by: ([^\n]*)", str(error))
    text = causes[-1] if causes else first_line(error)
    return re.sub(r"^[\w.$]+(Exception|Error): ", "", text).strip()[:1_000]

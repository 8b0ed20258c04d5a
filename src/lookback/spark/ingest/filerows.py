"""Reads files whatever their columns are, and checks whether each row is usable.

An unreadable file does not stop the rest: it becomes one row with a `REASON`.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from pyspark.errors import AnalysisException
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StringType, StructField, StructType

from lookback.core.errors import SetupError
from lookback.core.values.texts import first_line, quote_identifier
from lookback.places import find_local_path
from lookback.spark.ingest.fields import (
    ASSUMED,
    BLOCK,
    CORRUPT,
    FILE,
    RAW,
    READ_AS,
    REASON,
    ROW,
    UNIT,
    cast_rows,
    drop_raw,
    find_source_columns,
    list_source_columns,
    require_columns,
    warn_about_missing_columns,
)
from lookback.spark.ingest.sources import CSV_DEFAULTS, KEEP_CORRUPT, NO_PATTERN, Source
from lookback.spark.platform.session import is_connect
from lookback.spark.tables.lakehouse import keep

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from lookback.core.streams.declaration import Stream

# The column of Spark's text reader.
_LINE = "value"
_JSON_SAMPLE = 1_000
# No file may be silently skipped, whatever the session's settings.
_NOTHING_SKIPPED = {"ignoreCorruptFiles": "false", "ignoreMissingFiles": "false"}
_FILE_ERRORS = re.compile(
    r"FAILED_READ_FILE|CANNOT_MERGE_|FileNotFoundException|PATH_NOT_FOUND|PARQUET_TYPE_|UNABLE_TO_INFER_SCHEMA"
)
_VANISHED = re.compile(r"FILE_NOT_EXIST|FileNotFoundException|PATH_NOT_FOUND")


class _UnlistedFileError(Exception):
    """A folder has a file that Spark leaves out without a word."""


class _FileGroup(NamedTuple):
    """Names of files with the same columns; the schema is None for lines of JSON."""

    schema: StructType | None
    names: list[str]


@dataclass(frozen=True)
class Files:
    """The files of one round of ingest.

    A stream names its files and never looks at them again, so all their rows are ingested or rejected. If unnamed files
    are read and none of them is usable, an error is raised instead.

    Attributes:
        spark: The session.
        source: The place, format and options of the files.
        stream: The stream that the files are for.
        names: The file names as Spark writes them in `_metadata.file_path`; None: all files at the path.
    """

    spark: SparkSession
    source: Source
    stream: Stream
    names: Sequence[str] | None = None

    @cached_property
    def _local_files(self) -> list[Path]:
        """The path and everything below it, if it is on this machine."""
        local = find_local_path(self.source.path)
        return [] if local is None else [local, *local.rglob("*")]

    @property
    def _unlisted(self) -> list[str]:
        """The files on this machine that Hadoop leaves out of its lists, because their names are not UTF-8."""
        names = map(str, self._local_files[1:])
        return [shown for name in names if (shown := os.fsencode(name).decode(errors="replace")) != name]

    def read_together(self) -> DataFrame:
        """Reads all rows of the files, checked (see `fields`), if they can be read and have the same columns.

        Raises SetupError if a column for the id or the time is missing or an expression is unusable, and Spark's errors
        if a file cannot be read.
        """
        if self.names is None and self._unlisted:
            raise _UnlistedFileError
        schema = self._read_schema(self.names)
        if schema is not None:
            there = {name.lower() for name in schema.names}
            require_columns(self.stream, there, self.source.path)
            warn_about_missing_columns(self.stream, there, self.source.path)
        elif self.names is None:
            self._require_keys()
        return self._read_checked(self.names, schema)

    def read_apart(self) -> DataFrame:
        """Reads all rows of the readable files, checked, and one row with a REASON for each unreadable file.

        It halves the list of files until a part can be read and has the same columns. Raises SetupError if none of a
        set of unnamed files is usable.
        """
        source = self.source
        names = source.list_files(self.spark) if self.names is None else list(self.names)
        unlisted = self._unlisted if self.names is None else []
        broken = dict.fromkeys(unlisted, "the file's name is not UTF-8, so Spark cannot open it; rename the file")
        by_schema: dict[str, _FileGroup] = {}
        for group in self._find_readable(sorted(names), broken):
            key = "" if group.schema is None else group.schema.json()
            by_schema.setdefault(key, _FileGroup(group.schema, [])).names.extend(group.names)
        parts = [part for group in by_schema.values() for part in self._read_fitting(group, broken)]
        if self.names is None and broken and not parts:
            name, reason = min(broken.items())
            rest = f" The other {len(broken) - 1:,} files cannot be used either." if len(broken) > 1 else ""
            raise SetupError(reason + rest if reason.startswith(source.path) else f"{name}: {reason}{rest}")
        return reduce(lambda some, more: some.unionByName(more), [*parts, self._make_unreadable_rows(broken)])

    def read_kept(self) -> tuple[DataFrame, int]:
        """Reads the rows of the files, together if possible, then caches and counts them.

        Raises the errors of `read_together` and `read_apart`.
        """
        try:
            rows = keep(self.read_together())
            return rows, rows.count()
        except Exception as error:
            if not self.may_succeed_apart(error):
                raise
        rows = keep(self.read_apart())
        return rows, rows.count()

    def list_columns(self) -> set[str]:
        """Lists the columns of the files, or the keys of all lines of JSON, in lower case.

        Raises SetupError if the files cannot be read together.
        """
        try:
            schema = self._read_schema(self.names)
            if schema is not None:
                return {name.lower() for name in schema.names}
            lines = self._load(self._make_reader(None), self.names)
            keys = lines.select(F.explode(F.json_object_keys(F.col(_LINE))).alias("key")).distinct()
            return {str(row["key"]).lower() for row in keys.collect()}
        except Exception as error:
            if not (isinstance(error, AnalysisException) or _FILE_ERRORS.search(str(error))):
                raise
            raise SetupError(
                f"{self.source.path} cannot be read as {self.source.format}: {_find_cause(error)}"
            ) from error

    def may_succeed_apart(self, error: Exception) -> bool:
        """Returns whether `read_apart` may succeed after `read_together` raised the error."""
        if isinstance(error, SetupError):
            # In a CSV source, the first header is taken for all files.
            return self.names is not None or self.source.format == "csv"
        return isinstance(error, (AnalysisException, _UnlistedFileError)) or bool(_FILE_ERRORS.search(str(error)))

    def _find_readable(self, names: list[str], broken: dict[str, str]) -> Iterator[_FileGroup]:
        """Yields groups of files that Spark can read together to the last row; adds the rest to `broken`."""
        if not names:
            return
        try:
            schema = self._read_schema(names)
            if schema is None or schema.names:
                self._read_rows(names, schema).agg(F.max(F.length(RAW))).collect()
                yield _FileGroup(schema, names)
        except Exception as error:
            if not (isinstance(error, AnalysisException) or _FILE_ERRORS.search(str(error))):
                raise
            if len(names) > 1:
                half = len(names) // 2
                yield from self._find_readable(names[:half], broken)
                yield from self._find_readable(names[half:], broken)
            elif _VANISHED.search(str(error)) or self._has_vanished(names[0]):
                broken[names[0]] = "the file vanished before it was read"
            else:
                broken[names[0]] = f"the file cannot be read as {self.source.format}: {_find_cause(error)}"

    def _has_vanished(self, name: str) -> bool:
        """Returns whether the file is missing, which the Parquet reader reports as a file without a schema."""
        reader = self.spark.read.format("binaryFile").options(**NO_PATTERN)
        return not reader.load(unquote(name)).inputFiles()

    def _read_fitting(self, group: _FileGroup, broken: dict[str, str]) -> Iterator[DataFrame]:
        """Yields the checked rows of a group; adds its files to `broken` if their columns do not fit the stream."""
        try:
            if group.schema is not None:
                require_columns(self.stream, {name.lower() for name in group.schema.names}, self.source.path)
            yield self._read_checked(group.names, group.schema)
        except SetupError as error:
            broken.update(dict.fromkeys(group.names, str(error)))

    def _read_schema(self, names: Sequence[str] | None) -> StructType | None:
        """Reads the columns of the files, without CORRUPT; None for lines of JSON."""
        if self.source.format == "json":
            return None
        options = {**CSV_DEFAULTS, "mergeSchema": "true", **self.source.options, **_find_base_path(names)}
        return self._load(self.spark.read.format(self.source.format).options(**options), names).schema

    def _read_checked(self, names: Sequence[str] | None, schema: StructType | None) -> DataFrame:
        if schema is not None and not schema.names:
            # Empty files.
            return self._make_unreadable_rows({})
        rows = self._read_rows(names, schema)
        return drop_raw(cast_rows(rows, self.stream, text=self.source.is_text, place=self.source.path), self.stream)

    def _read_rows(self, names: Sequence[str] | None, schema: StructType | None) -> DataFrame:
        """Reads rows of source columns with RAW, READ_AS, FILE, UNIT, BLOCK, ROW, and CORRUPT if the files are text."""
        source = self.source
        rows = self._load(self._make_reader(schema).options(**_find_base_path(names)), names)
        if schema is None:
            # As in CSV, empty lines do not count as rows and are not numbered.
            rows = rows.where(F.trim(F.col(_LINE)) != "")
        rows = _add_place(rows).withColumn(READ_AS, F.lit(source.describe_reading(schema)))
        if schema is None:
            rows = rows.withColumn(RAW, F.make_valid_utf8(_LINE)).drop(_LINE)
            return source.parse_json(rows, list_source_columns(self.stream))
        raw = source.write_line(F.struct(*[F.col(quote_identifier(name)) for name in schema.names]))
        return rows.withColumn(RAW, F.coalesce(F.col(CORRUPT), raw) if source.format == "csv" else raw)

    def _make_reader(self, schema: StructType | None) -> Any:
        options = {**self.source.options, **_NOTHING_SKIPPED}
        if schema is None:
            return self.spark.read.format("text").options(**options)
        if self.source.format == "csv":
            # All columns are text; a line with another number of values than the header is kept whole. Files with
            # different headers are refused, not read with mixed-up columns. Without column pruning, whether a line is
            # malformed does not depend on the columns that a query selects.
            options = {**CSV_DEFAULTS, "enforceSchema": "false", "columnPruning": "false", **options, **KEEP_CORRUPT}
            schema = StructType([*schema.fields, StructField(CORRUPT, StringType())])
        return self.spark.read.format(self.source.format).options(**options).schema(schema)

    def _load(self, reader: Any, names: Sequence[str] | None) -> DataFrame:
        if find_local_path(self.source.path) is not None and not is_connect(self.spark):
            own = self._local_files if names is None else map(PurePosixPath, names)
            if any(":" in file.name for file in own):
                _read_without_checksums(self.spark)
        if names is None:
            rows: DataFrame = reader.options(**self.source.path_options).load(self.source.path)
        else:
            rows = reader.options(**NO_PATTERN).load([unquote(name) for name in names])
            # If a path is not a pattern, Spark reads a missing file as empty.
            if len(rows.inputFiles()) < len(set(names)):
                raise FileNotFoundError(f"PATH_NOT_FOUND: one of {len(names)} files vanished before it was read")
        return rows

    def _make_unreadable_rows(self, broken: Mapping[str, str]) -> DataFrame:
        """Makes a checked row for each file that cannot be read."""
        files = self.spark.createDataFrame(sorted(broken.items()), f"{FILE} string, {REASON} string")
        nulls = [F.lit(None).cast(type_).alias(name) for name, type_ in self.stream.table_columns.items()]
        raw, read_as = F.lit(None).cast("string").alias(RAW), F.lit(self.source.describe_reading(None)).alias(READ_AS)
        first = F.lit(0).cast("bigint")
        assumed = F.lit(None).cast("string").alias(ASSUMED)
        order = [F.col(FILE), F.lit(None).cast("string").alias(UNIT), first.alias(BLOCK), first.alias(ROW)]
        return files.select(*nulls, F.col(REASON), assumed, raw, read_as, *order)

    def _require_keys(self) -> None:
        """Raises SetupError if no line of the files has the keys from which the id and the time are made."""
        lines = self._load(self._make_reader(None), self.names)
        keys = lines.select(F.explode(F.json_object_keys(F.col(_LINE))).alias("key"))
        sample = {str(row[0]).lower() for row in keys.limit(_JSON_SAMPLE).distinct().collect()}
        roles = (self.stream.event_id, self.stream.event_time)
        needed = {name.lower() for field in roles for name in find_source_columns(self.stream, field)}
        if sample and not needed <= sample:
            # The remaining lines may have other keys.
            lowered = keys.select(F.lower("key").alias("key"))
            sample |= {str(row[0]) for row in lowered.where(F.col("key").isin(*needed)).distinct().collect()}
            require_columns(self.stream, sample, self.source.path)


def _add_place(rows: DataFrame) -> DataFrame:
    file = F.col("_metadata")
    name, modified = file.getField("file_path"), F.unix_micros(file.getField("file_modification_time"))
    unit = F.concat(F.lpad(modified.cast("string"), 20, "0"), F.lit(" "), name)
    # A task reads a split of a file from start to end, so its rows get consecutive numbers.
    place = {FILE: name, UNIT: unit, BLOCK: file.getField("file_block_start")}
    return rows.withColumns(place).withColumn(ROW, F.monotonically_increasing_id())


def _read_without_checksums(spark: SparkSession) -> None:
    """Turns off checksums of local files: Hadoop cannot parse the path of `.NAME.crc` if the name has a colon."""
    jvm: Any = spark._jvm
    files = jvm.org.apache.hadoop.fs.FileSystem
    files.getLocal(spark._jsparkSession.sessionState().newHadoopConf()).setVerifyChecksum(False)


def _find_base_path(names: Sequence[str] | None) -> dict[str, str]:
    """Returns the folder above folders such as `day=2026-01-31`, which Spark needs to read these as columns."""
    folder = re.match(r"(.*?)/[^/=]+=[^/]*/", names[0]) if names else None
    return {"basePath": unquote(folder.group(1))} if folder else {}


def _find_cause(error: Exception) -> str:
    """Returns the message of the innermost Java cause, without its class."""
    header = re.search(r"CSV header does not conform to the schema\.\s*Header: (.*)", str(error))
    if header is not None:
        counts = Counter(name.strip().lower() for name in header[1].split(","))
        twice = [name for name, count in counts.items() if count > 1]
        if twice:
            return f"its header names {', '.join(map(repr, twice))} more than once; give each column its own name"
    causes = re.findall(r"Caused by: ([^\n]*)", str(error))
    text = causes[-1] if causes else first_line(error)
    return re.sub(r"^[\w.$]+(Exception|Error): ", "", text).strip()[:1_000]

"""Finds the files of a source and their format, and writes and reads the text of one row."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import unquote

from pyspark.errors import AnalysisException
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType

from lookback.core.errors import SetupError
from lookback.core.values.texts import first_line, quote_identifier
from lookback.places import find_local_path, parse_source
from lookback.spark.ingest.fields import CORRUPT, RAW, repeats_key
from lookback.spark.platform.session import on_databricks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pyspark.sql import Column, DataFrame, SparkSession

    from lookback.core.streams.declaration import Stream

FORMATS = ("parquet", "csv", "json")
# With microseconds, so that reading a row again gives the same row.
JSON_FORMATS = {
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
_OBJECTS = "__objects"
_SUFFIXES = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json", ".ndjson": "json"}
_COMPRESSIONS = (".gz", ".bz2", ".zst", ".snappy", ".lz4")
# Quotes inside quotes are doubled (RFC 4180), as in files from spreadsheets and Python.
CSV_DEFAULTS = {"header": "true", "escape": '"'}
# Makes Spark keep a row that it cannot split in CORRUPT.
KEEP_CORRUPT = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": CORRUPT}
# With this option, Spark takes a path literally, not as a pattern.
NO_PATTERN = {"__globPaths__": "false"}
# Reader options that select files, in lower case.
_FILE_FILTERS = frozenset({"recursivefilelookup", "pathglobfilter", "modifiedbefore", "modifiedafter"})
_FILE_SCHEMA = "path string, modificationTime timestamp, length bigint, content binary"
# Options of a file stream that limit a batch; Auto Loader's have a prefix.
_BATCH_LIMITS = ("maxFilesPerTrigger", "maxBytesPerTrigger")
_AUTO_LOADER = "cloudFiles."
# Matches a JSON number with more digits than a double can hold.
_LONG_NUMBER = "[0-9][0-9.]{15}"


@dataclass(frozen=True)
class Source:
    """Files of one format.

    Attributes:
        path: A file, a folder or a pattern.
        format: parquet, csv (with a header) or json (one object per line).
        options: Options of Spark's reader.
    """

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
        """Finds the files at `path` (a file, a folder, a pattern; default: stream.source), and their format by suffix.

        Raises:
            SetupError: If nothing is found or the format is unknown.
        """
        declared = stream.source
        if path is not None and declared.get("format") not in (None, *FORMATS):
            # The declared source is something else, and these files are an addition.
            declared = {}
        chosen = path or declared.get("path")
        if not chosen:
            raise SetupError(f"stream {stream.name!r} declares no source: name the file or folder to ingest")
        chosen = parse_source(str(chosen))
        options = {**dict(declared.get("options") or {}), **dict(options or {})}
        name = format_ or (declared.get("format") if path is None else None)
        name = name or _find_format(cls(chosen, "", options).list_files(spark), chosen) or declared.get("format")
        known = _SUFFIXES.get(f".{name}")
        if known is None:
            raise SetupError(f"{chosen}: the format {name or ''!r} is unknown; name one of {', '.join(FORMATS)}")
        return cls(chosen, known, options)

    @property
    def is_text(self) -> bool:
        """True if all columns of the files are text, as in CSV and JSON, but not in Parquet."""
        return self.format != "parquet"

    @property
    def is_pattern(self) -> bool:
        """True if the path is a pattern. An existing path on this machine is never a pattern."""
        local = find_local_path(self.path)
        return bool(re.search(r"[*?\[{\\]", self.path)) and (local is None or not local.exists())

    @property
    def path_options(self) -> dict[str, str]:
        """The options that make readers take the path as a name or as a pattern, whichever it is."""
        return {} if self.is_pattern else dict(NO_PATTERN)

    @property
    def filters(self) -> dict[str, str]:
        """The options that a reader needs to find the files."""
        filters = {name: value for name, value in self.options.items() if name.lower() in _FILE_FILTERS}
        return {**filters, **self.path_options}

    def list_files(self, spark: SparkSession) -> list[str]:
        """Lists the names of the existing files. Raises SetupError if the path cannot be read."""
        reader = spark.read.options(**self.filters)
        try:
            return [normalize_slashes(name) for name in reader.text(self.path).inputFiles()]
        except AnalysisException as error:
            raise SetupError(f"{self.path} cannot be read: {first_line(error)}") from error

    def watch(self, spark: SparkSession) -> DataFrame:
        """Streams the names of files as they appear, one row per file, unopened; on Databricks with Auto Loader."""
        reader = spark.readStream.format("cloudFiles" if on_databricks() else "binaryFile")
        reader = reader.schema(_FILE_SCHEMA).options(**self.make_watch_options(on_databricks()))
        # Streaming readers take any path as a pattern.
        path = self.path if self.is_pattern else escape_pattern(self.path)
        # Auto Loader watches folders, which may hold millions of files.
        if not self.is_pattern and not on_databricks() and self._is_file(spark):
            path = write_file_pattern(self.path)
        return reader.load(path).select("_metadata.file_path")

    def _is_file(self, spark: SparkSession) -> bool:
        """Returns whether the path is a file, or a folder that holds one file of the same name."""
        names = [PurePosixPath(unquote(name)).name for name in self.list_files(spark)]
        return names == [PurePosixPath(self.path).name]

    def make_watch_options(self, auto_loader: bool) -> dict[str, str]:
        """Returns the options of the reader that finds files, without those for reading them.

        A file is identified by its name, whatever its age, and reported once, even if it is rewritten later. Auto
        Loader gets a schema, so it needs no place to store one and no rescued data.
        """
        own = {name: value for name, value in self.options.items() if name.startswith(_AUTO_LOADER)}
        others = {name: value for name, value in self.options.items() if name not in own}
        if not auto_loader:
            # By default Spark forgets files after a week, and ignores files that are older. Here a new name is a new
            # file, whatever its age. `read_planned_files` finds files that have vanished.
            return {"maxFileAge": "36500d", **others, "ignoreMissingFiles": "true"}
        filters = {name: value for name, value in others.items() if name.lower() in _FILE_FILTERS}
        limits = {f"{_AUTO_LOADER}{name}": others[name] for name in _BATCH_LIMITS if name in others}
        fixed = {f"{_AUTO_LOADER}format": "binaryFile", f"{_AUTO_LOADER}allowOverwrites": "false"}
        return {
            f"{_AUTO_LOADER}includeExistingFiles": "true",
            **filters,
            **limits,
            **own,
            **fixed,
            "ignoreMissingFiles": "true",
        }

    def covers(self, name: str) -> bool:
        """Returns whether a batch read of the path would also read the file `name`, which a stream has found.

        Auto Loader descends into every folder. Spark's readers descend only into folders such as `day=2026-01-31`,
        unless `recursiveFileLookup` is on, and skip names that begin with `_` or `.`.
        """
        recursive = any(n.lower() == "recursivefilelookup" and v.lower() == "true" for n, v in self.options.items())
        base = re.sub(r"^\w+:/*", "/", self.path).rstrip("/") + "/"
        if recursive or self.is_pattern or base not in unquote(name):
            return True
        *folders, file = unquote(name).partition(base)[2].split("/")
        return all("=" in folder for folder in folders) and not file.startswith(("_", "."))

    def write_line(self, row: Column) -> Column:
        """Writes a row of source columns as one JSON object."""
        return F.make_valid_utf8(F.to_json(row, {"ignoreNullFields": "false", **JSON_FORMATS}))

    def parse_json(self, lines: DataFrame, names: Sequence[str]) -> DataFrame:
        """Parses the JSON lines in the column RAW: adds the named keys as text, and CORRUPT.

        CORRUPT is the line if it is not exactly one JSON object or contains a key twice, else NULL.
        """
        fields = ", ".join(f"{quote_identifier(name)}: string" for name in names)
        # In brackets, so that a second object on the line is not ignored.
        array = F.concat(F.lit("["), F.col(RAW), F.lit("]"))
        options = {**self.options, "mode": "PERMISSIVE"}
        lines = lines.withColumn(_OBJECTS, F.from_json(array, f"array<struct<{fields}>>", options))
        one = (F.size(_OBJECTS) == 1) & F.get(F.col(_OBJECTS), F.lit(0)).isNotNull() & ~repeats_key(F.col(RAW))
        lines = lines.withColumn(CORRUPT, F.when(F.coalesce(one, F.lit(False)), F.lit(None)).otherwise(F.col(RAW)))
        columns = [_select_key(name).alias(name) for name in names]
        return lines.select(*[quote_identifier(name) for name in lines.columns if name != _OBJECTS], *columns)

    def parse_csv(self, lines: DataFrame, names: Sequence[str]) -> DataFrame:
        """Parses the CSV lines in the column RAW: adds the named columns as text, and CORRUPT."""
        return lines.withColumn(_OBJECTS, self.parse_csv_line(names)).select("*", f"{_OBJECTS}.*").drop(_OBJECTS)

    def parse_csv_line(self, names: Sequence[str]) -> Column:
        """Parses the CSV line in the column RAW into a struct of the named columns as text, and CORRUPT.

        CORRUPT is the line if it has another number of values than names, else NULL.
        """
        schema = ", ".join(f"{quote_identifier(name)} string" for name in [*names, CORRUPT])
        return F.from_csv(RAW, schema, {**CSV_DEFAULTS, **self.options, **KEEP_CORRUPT})

    def describe_reading(self, schema: StructType | None) -> str:
        """Describes, as JSON, how to read rejected rows of the files again: format, options and columns (`schema`)."""
        # Options with a dot in the name are file system settings, which may include credentials.
        options = {name: str(value) for name, value in self.options.items() if "." not in name}
        columns = None if schema is None else schema.toDDL()
        return json.dumps({"format": self.format, "options": options, "columns": columns}, ensure_ascii=False)


def normalize_slashes(name: str) -> str:
    """Returns the file's name with the same number of slashes after the scheme in all Spark APIs."""
    return re.sub(r"^file:/+", "file:/", name)


def _select_key(name: str) -> Column:
    """Returns the text of a key of the only object. Long numbers keep all digits, which doubles would lose."""
    text = F.get(F.col(_OBJECTS), F.lit(0)).getField(name)
    number = text.rlike("^-?[0-9.]+(E-?[0-9]+)?$") & text.rlike("[.E]") & F.col(RAW).rlike(_LONG_NUMBER)
    if '"' not in name and "\\" not in name:
        path = '$["' + name.replace("'", "\\'") + '"]'
        exact = F.expr(f"try_variant_get(try_parse_json({RAW}), '{path}', 'string')")
        text = F.when(number, F.coalesce(exact, text)).otherwise(text)
    # Python and other writers use these for values that JSON numbers cannot express.
    return F.when(text.isin('"NaN"', '"Infinity"', '"-Infinity"'), F.btrim(text, F.lit('"'))).otherwise(text)


def escape_pattern(path: str) -> str:
    """Returns the pattern that matches exactly this path."""
    return re.sub(r"([{}\[\]*?\\])", r"\\\1", path)


def write_file_pattern(path: str) -> str:
    """Returns a pattern with a wildcard that matches exactly the file at this path.

    A file stream takes a path without wildcards as the base of partitions, which Spark refuses if it is a file.
    """
    folder, slash, name = path.rpartition("/")
    plain = re.search(r"[A-Za-z0-9]", name)
    if plain is None:
        return escape_pattern(path)
    before, after = escape_pattern(name[: plain.start()]), escape_pattern(name[plain.end() :])
    return f"{escape_pattern(folder)}{slash}{before}[{plain[0]}]{after}"


def _find_format(files: Iterable[str], path: str) -> str | None:
    formats: dict[str, str] = {}
    for file in files:
        name = PurePosixPath(file)
        suffix = PurePosixPath(name.stem).suffix if name.suffix in _COMPRESSIONS else name.suffix
        if suffix in _SUFFIXES:
            formats[_SUFFIXES[suffix]] = name.name
    if len(formats) > 1:
        raise SetupError(
            f"{path} holds files of several formats ({', '.join(sorted(formats.values()))}): name the format"
        )
    return next(iter(formats), None)

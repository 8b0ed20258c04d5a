"""The Delta tables under one root folder or in one schema of a catalog."""

from __future__ import annotations

import datetime as dt
import getpass
import json
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delta.tables import DeltaTable
from py4j.protocol import Py4JJavaError
from pyspark import StorageLevel
from pyspark.errors import PySparkException

from lookback.core.errors import DurationError, SetupError
from lookback.core.streams import alerts, metrics
from lookback.core.streams.alerts import DISPOSITIONS
from lookback.core.values.durations import parse_duration
from lookback.core.values.texts import first_line, quote_identifier
from lookback.core.values.times import parse_time
from lookback.places import Place, find_local_path, open_place, parse_place
from lookback.questions import write_question
from lookback.spark.platform.session import is_connect, on_databricks
from lookback.spark.queries import functions as F  # noqa: N812
from lookback.spark.tables.schemas import COMMENTS, DEFAULTS, PRODUCT_TABLES, describe_events_table, make_events_schema

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, DataFrameReader, Row, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamReader
    from pyspark.sql.types import StructField, StructType

    from lookback.config import Settings
    from lookback.core.streams.declaration import Stream

# The errors of a failed read or write: Spark's own, or Java's if Spark has no class for it.
SPARK_ERRORS = (PySparkException, Py4JJavaError)
# A write that conflicts with another one can be retried. The Python class of the error depends on the version of Delta
# and on Spark Connect; its name does not.
_CONFLICT = re.compile(
    r"DELTA_(CONCURRENT_\w+|METADATA_CHANGED|PROTOCOL_CHANGED)"
    r"|\b(Concurrent(Append|DeleteDelete|DeleteRead|Transaction|Write)|MetadataChanged|ProtocolChanged)Exception"
)
# How long a change is retried while other writers keep committing to the same table.
_RETRY_SECONDS = 300.0
_NAME = re.compile(r"[a-z][a-z0-9_]{0,127}", re.ASCII)
# A table of another catalog or schema, used for look-ups.
_FULL_NAME = re.compile(r"(\w[\w-]{0,254}\.){2}\w[\w-]{0,254}", re.ASCII)
# How far back you can replay an events table or read an earlier version of it.
DEFAULT_HISTORY = "30 days"
_DEFAULT_FILE_RETENTION = "interval 7 days"
_CHANGE_FEED = {"delta.enableChangeDataFeed": "true", "delta.enableInCommitTimestamps": "true"}
_PURPOSES = {
    "delta.enableChangeDataFeed": "a change feed, from which events are read",
    "delta.enableInCommitTimestamps": "in-commit timestamps, by which `max_future` is checked",
}
# Commits between checkpoints of the log. For a small table, a checkpoint costs more than reading a hundred short log
# files.
_OFTEN_WRITTEN = {"delta.checkpointInterval": "100"}
# For tables that an evaluation writes in every batch: a checkpoint of the log delays alerts by 1.7 s. Without one, a
# first reader takes 2.4 s longer after 950 commits (2 cores).
_WRITTEN_EVERY_BATCH = {"delta.checkpointInterval": "1000"}
# Statistics for these columns only, the ones that help readers, make an append a sixth faster.
_STATISTICS_COLUMNS = {
    "alerts": "event_time,arrival,decided_at",
    "late_events": "event_time,arrival",
    "rule_log": "arrival,logged_at",
}
STATISTICS = "delta.dataSkippingStatsColumns"
# Bounds of event times in an external table, the last excluded. Ingest checks the times in Lookback's own tables.
_FIRST_DAY, _LAST_DAY = "0001-01-02", "9999-12-31"
# Catalogs of a workspace outside Unity Catalog.
_LEGACY_CATALOGS = ("spark_catalog", "hive_metastore")
# Delta checks these on every row, so they exist only where people write and a wrong value would be lost.
_DISPOSITION_TEXTS = ", ".join(f"'{disposition}'" for disposition in DISPOSITIONS)
_CHECKS = {"reviews": {"delta.constraints.disposition_known": f"disposition in ({_DISPOSITION_TEXTS})"}}
# Past rules and lists must stay readable for as long as anyone may have to explain an alert.
_AUDITED = ("rules", "lists")


@dataclass(frozen=True)
class Tables:
    """The tables of one place: `root` (a folder or its URL) or `catalog` and `schema`, never both.

    Create one with `Tables.of`, `Tables.local` or `Tables.catalog`. Table names consist of lower-case letters, digits
    and _. A name with two dots refers to a table of another catalog or schema, which you can only read.

    Attributes:
        spark: The session that runs the queries.
        root: The folder of local tables, or its URL.
        catalog_name: The catalog.
        schema_name: The schema in the catalog.
        elsewhere: Streams whose events are in external tables, by name; see `holding`.
        volume: The folder for the checkpoints of a catalog's tables; see `files`.
    """

    spark: SparkSession
    root: str | None = None
    catalog_name: str | None = None
    schema_name: str | None = None
    elsewhere: Mapping[str, Stream] = field(default_factory=dict, hash=False)
    volume: str | None = None

    @classmethod
    def of(cls, spark: SparkSession, settings: Settings) -> Tables:
        """Returns the tables of the place that `settings` name. Raises SetupError if Spark cannot reach its bucket."""
        if settings.catalog:
            return cls.catalog(spark, settings.catalog, settings.schema, settings.root)
        tables = cls.local(spark, settings.root)
        tables._require_reachable()
        return tables

    @classmethod
    def local(cls, spark: SparkSession, root: str | Path) -> Tables:
        """Returns tables in the Delta folders ROOT/<table>. `root` is a path or a URI; see `parse_place`."""
        return cls(spark, root=str(parse_place(root)))

    @classmethod
    def catalog(cls, spark: SparkSession, catalog: str, schema: str, volume: str | None = None) -> Tables:
        """Returns tables named catalog.schema.table. The schema must exist. `volume` is a folder in a volume."""
        folder = None if volume is None else volume.rstrip("/")
        return cls(spark, catalog_name=catalog, schema_name=schema, volume=folder)

    @property
    def place(self) -> str:
        """The place, for display: catalog.schema, or the folder."""
        return str(self.root) if self.root is not None else f"{self.catalog_name}.{self.schema_name}"

    @property
    def files(self) -> str:
        """The folder of checkpoints and locks: the root, or for a catalog the volume.

        Raises SetupError if there is none, or this machine cannot reach it.
        """
        if self.root is not None:
            return self.root
        if self.volume is None:
            raise SetupError("tables of a catalog need a checkpoint folder: give one in a volume, /Volumes/...")
        if self.is_unity and not self.volume.startswith(("/", "dbfs:")) and "://" not in self.volume:
            raise SetupError(
                f"root must be the volume for checkpoints, such as /Volumes/main/fraud/checkpoints, got {self.volume!r}"
            )
        if self.volume.startswith("/Volumes/") and not self.reaches_files:
            raise SetupError(
                f"{self.volume} is not on this machine: run this as a job, or in a notebook or terminal of the "
                "workspace"
            )
        return str(parse_place(self.volume))

    def choose_checkpoint(self, step: str, stream: Stream) -> str:
        """Returns the default checkpoint folder of a step for a stream. Raises SetupError as `files` does."""
        return f"{self.files}/_checkpoints/{step}_{stream.name}"

    def _require_reachable(self) -> None:
        if find_local_path(self.root) is not None:
            return
        try:
            self.exists("rules")
        except SPARK_ERRORS as error:
            cause = next((line for line in str(error).splitlines() if "Exception" in line), first_line(error))
            raise SetupError(
                f"Spark does not reach {self.root}: {cause.lstrip(': '):.300}. It needs the JARs of the store and its "
                "settings, below `spark` of conf/settings.yml; docs/operations.md shows them"
            ) from error

    def find_place(self, folder: str | Place) -> Place:
        """Opens a folder, such as a checkpoint, to read and write its files."""
        return open_place(folder, self.spark)

    @property
    def reaches_files(self) -> bool:
        """Whether this machine can reach the checkpoints. Those in a volume need the workspace's /Volumes."""
        return not (self.volume or "").startswith("/Volumes/") or Path("/Volumes").is_dir()

    @property
    def current_user(self) -> str:
        """The user of the workspace, or on a local machine the user of the operating system."""
        if on_databricks() or is_connect(self.spark):
            (row,) = self.spark.sql("SELECT current_user() AS name").collect()
            return str(row["name"])
        return getpass.getuser()

    @property
    def is_unity(self) -> bool:
        """Whether the tables are in Unity Catalog, which has volumes, keys and grants."""
        return self.catalog_name is not None and self.catalog_name not in _LEGACY_CATALOGS

    def holding(self, *streams: Stream) -> Tables:
        """Returns these tables, with events read from the external tables that the streams declare."""
        elsewhere = {stream.name: stream for stream in streams if stream.table}
        return replace(self, elsewhere={**self.elsewhere, **elsewhere}) if elsewhere else self

    def is_place(self, name: str) -> bool:
        """Returns whether the table is addressed by its path, not by its name in a catalog."""
        stream = self.elsewhere.get(name)
        if stream is not None:
            return stream.has_table_path
        return self.root is not None and not _FULL_NAME.fullmatch(name)

    def identifier(self, name: str) -> str:
        """Returns the quoted SQL name of a table: delta.`<root>/rules` or `catalog`.`schema`.`rules`."""
        if self.is_place(name):
            return f"delta.{quote_name(self.path_or_name(name))}"
        return self.path_or_name(name)

    def path_or_name(self, name: str) -> str:
        """Returns the folder of a local table, or the quoted three-part name of a table in a catalog.

        `name` is a table of this place, or catalog.schema.table for any other. Raises SetupError if it is not a table
        name.
        """
        if _FULL_NAME.fullmatch(name):
            return ".".join(map(quote_name, name.split(".")))
        if not _NAME.fullmatch(name):
            raise SetupError(f"{name!r} is not a table name; use lower-case letters, digits and _")
        if name in self.elsewhere:
            table = self.elsewhere[name].table
            return str(parse_place(table)) if self.is_place(name) else ".".join(map(quote_name, table.split(".")))
        if self.root is not None:
            return f"{self.root}/{name}"
        return f"{quote_name(str(self.catalog_name))}.{quote_name(str(self.schema_name))}.{quote_name(name)}"

    def read(self, name: str, version: int | None = None) -> DataFrame:
        """Reads the latest version of a table when the query runs, or its state after the commit `version`."""
        return self._select_events(self._read_rows(name, version), name)

    def read_events(self, name: str, version: int | None = None) -> DataFrame:
        """Reads the events of a stream, from the latest version of its table or from the commit `version`.

        Events of the stream `alerts` are derived from the rows of its table. For any other stream they are its rows.
        """
        rows = self.read(name, version)
        return _select_alert_events(rows) if name == alerts.TABLE else rows

    def _read_rows(self, name: str, version: int | None = None) -> DataFrame:
        reader = self.spark.read if version is None else self.spark.read.option("versionAsOf", str(version))
        place = self.path_or_name(name)
        return reader.format("delta").load(place) if self.is_place(name) else reader.table(place)

    def _select_events(self, rows: DataFrame, name: str) -> DataFrame:
        """Returns the rows of a table. For an external table: only the rows that are events, with `ingested_at`."""
        stream = self.elsewhere.get(name)
        if stream is None:
            return rows
        there = {column.lower() for column in rows.columns}
        texts = {name: F.make_valid_utf8(name) for name, type_ in stream.fields.items() if type_.name == "string"}
        stamp = {} if "ingested_at" in there else {"ingested_at": F.lit(None).cast("timestamp")}
        return rows.where(_is_event(stream)).withColumns({**texts, **stamp})

    def count_passed_over(self, stream: Stream) -> int:
        """Counts the rows of a stream's table that are not events. Only an external table can have such rows."""
        if stream.name not in self.elsewhere:
            return 0
        return self._read_rows(stream.name).where(~F.coalesce(_is_event(stream), F.lit(False))).count()

    def exists(self, name: str) -> bool:
        """Returns whether the table exists and is a Delta table."""
        if self.is_place(name):
            return DeltaTable.isDeltaTable(self.spark, self.path_or_name(name))
        return self.spark.catalog.tableExists(self.path_or_name(name))

    def append(self, df: DataFrame, name: str, user_metadata: str | None = None) -> None:
        """Appends `df` in one commit, with `user_metadata` if given. Columns are matched by name."""
        writer = df.write.format("delta").mode("append")
        if user_metadata is not None:
            writer = writer.option("userMetadata", user_metadata)
        if self.is_place(name):
            writer.save(self.path_or_name(name))
        else:
            writer.saveAsTable(self.path_or_name(name))

    def append_rows(self, rows: Sequence[Any], name: str, user_metadata: str | None = None) -> None:
        """Appends `rows`, tuples or dicts, to one of Lookback's own tables, as one file; `user_metadata` as in `append`."""
        self.append(self.spark.createDataFrame(rows, PRODUCT_TABLES[name]).coalesce(1), name, user_metadata)

    def append_arrow(self, rows: pa.Table, name: str, user_metadata: str | None = None) -> None:
        """Appends the rows of an Arrow table in one commit, as one file; `user_metadata` as in `append`."""
        self.append(self.spark.createDataFrame(rows).coalesce(1), name, user_metadata)

    def delta(self, name: str) -> DeltaTable:
        """Opens the table for updates and merges."""
        if self.is_place(name):
            return DeltaTable.forPath(self.spark, self.path_or_name(name))
        return DeltaTable.forName(self.spark, self.path_or_name(name))

    def stream_changes(
        self, name: str, starting_version: int = 0, options: Mapping[str, str] | None = None
    ) -> DataFrame:
        """Streams the change feed, starting with the commit `starting_version`.

        The columns are the table's own plus _change_type, _commit_version and _commit_timestamp. `options` are passed
        to the Delta source, such as maxFilesPerTrigger.
        """
        changes = {"startingVersion": str(starting_version), **(options or {})}
        return self._select_changes(self._read_feed(self.spark.readStream, name, changes), name)

    def read_changes(self, name: str, starting_version: int, ending_version: int | None = None) -> DataFrame:
        """Reads the change feed from commit `starting_version` to `ending_version` (default: the last), both included.

        The columns are the same as in `stream_changes`. The result is empty if the table has no such commit yet.
        """
        if starting_version > self.version(name):
            return self.read_changes(name, self.version(name)).limit(0)
        ending = {} if ending_version is None else {"endingVersion": str(ending_version)}
        return self.changes(name, {"startingVersion": str(starting_version), **ending})

    def changes(self, name: str, options: Mapping[str, str]) -> DataFrame:
        """Reads the change feed as a batch; `options` of the Delta source give the range."""
        return self._select_changes(self._read_changed_rows(name, options), name)

    def _read_changed_rows(self, name: str, options: Mapping[str, str]) -> DataFrame:
        return self._read_feed(self.spark.read, name, options)

    def _read_feed(
        self, reader: DataFrameReader | DataStreamReader, name: str, options: Mapping[str, str]
    ) -> DataFrame:
        reader = reader.format("delta").option("readChangeFeed", "true").options(**options)
        place = self.path_or_name(name)
        return reader.load(place) if self.is_place(name) else reader.table(place)

    def _select_changes(self, rows: DataFrame, name: str) -> DataFrame:
        # Only rules over alerts read the change feed of that table.
        return _select_alert_events(rows) if name == alerts.TABLE else self._select_events(rows, name)

    def version(self, name: str) -> int:
        """Returns the number of the last commit, 0 for a new table."""
        folder = self.log_folder(name)
        # Reading the log files avoids a Spark job, which would take longer than most callers' own work.
        commit = None if folder is None else _find_last_commit(folder)
        if commit is not None:
            return commit
        return int(self.history(name, 1).select("version").head()[0])  # type: ignore[index]

    def local_folder(self, name: str) -> Path | None:
        """Returns the folder of a table on this machine; None if it is not here."""
        return find_local_path(self.path_or_name(name)) if self.is_place(name) else None

    def log_folder(self, name: str) -> Path | None:
        """Returns the folder of a table if this process can read its log itself; None on Databricks and if remote."""
        return None if on_databricks() else self.local_folder(name)

    def is_unwritten(self, name: str) -> bool:
        """Returns whether a table was certainly never written to; False if unknown."""
        folder = self.local_folder(name)
        if folder is None or commit_file(folder, 1).exists():
            return False
        try:
            # A copy of another table has files in its first commit.
            return not read_actions(commit_file(folder, 0), "add")
        except (OSError, ValueError):
            return False

    def may_have_rows(self, name: str) -> bool:
        """Returns False if a table does not exist or was never written to, without running a Spark job."""
        return not self.is_unwritten(name) and self.exists(name)

    def describe(self, name: str) -> Row:
        """Reads the detail of a table: numFiles, properties, clusteringColumns, description and more."""
        return self.spark.sql(f"DESCRIBE DETAIL {self.identifier(name)}").collect()[0]

    def query(self, name: str, query: Callable[[DataFrame], DataFrame]) -> list[Row]:
        """Runs a query on a table's rows and returns the result.

        For a table that was never written to, the result is empty (even of an aggregate) and no Spark job runs.
        """
        return [] if self.is_unwritten(name) else query(self.read(name)).collect()

    def ask(self, question: str, **values: object) -> DataFrame:
        """Asks a question of `lookback.questions`. `values` has its values: texts, booleans, aware times or None."""
        written = {name: _write_value(value) for name, value in values.items()}
        return self.spark.sql(write_question(question, self._write_table, written.__getitem__))

    def _write_table(self, name: str) -> str:
        """Returns the SQL for one of Lookback's own tables; without any scan if it was never written to."""
        if not self.is_unwritten(name):
            return self.identifier(name)
        columns = (
            f"CAST(NULL AS {each.dataType.simpleString()}) AS {quote_name(each.name)}" for each in PRODUCT_TABLES[name]
        )
        return f"(SELECT {', '.join(columns)} WHERE false)"

    def history(self, name: str, limit: int | None = None) -> DataFrame:
        """Reads the last commits of the table, newest first: version, timestamp, operation, userMetadata and more."""
        # Unlike the Delta API, SQL works in every kind of session.
        bound = "" if limit is None else f" LIMIT {limit:d}"
        return self.spark.sql(f"DESCRIBE HISTORY {self.identifier(name)}{bound}")

    def create(self, stream: Stream, history: str = DEFAULT_HISTORY) -> None:
        """Creates the stream's events table and Lookback's own tables if they are missing.

        Existing and external tables are never altered. Old versions of the rules stay readable for ten years.

        Args:
            stream: The stream.
            history: How long old versions of the events table stay readable, such as `30 days`.

        Raises:
            SetupError: If a table lacks a declared field or has it with another type, or an external table is missing
                or has no change feed.
        """
        for name, schema in PRODUCT_TABLES.items():
            if not self.exists(name):
                self._create(name, schema, _choose_properties(name), COMMENTS[name])
        events = make_events_schema(stream)
        if stream.table:
            self.holding(stream)._require_external(stream, events)
        elif stream.is_of_alerts:
            return
        elif self.exists(stream.name):
            self._require_columns(stream.name, events)
        else:
            properties = {**_CHANGE_FEED, **_OFTEN_WRITTEN, **_make_retention(history), **_make_statistics(events)}
            self._create(stream.name, events, properties, describe_events_table(stream), stream.event_time)

    def require(self, stream: Stream) -> None:
        """Checks that the rules table and the stream's events table exist. Creates missing tables in local folders.

        In a catalog only `set_up` creates tables: other users lack the privilege, and a misspelt schema would get
        tables. Raises SetupError if a table is missing or does not match the stream's declaration.
        """
        if self.root is not None:
            self.create(stream)
        else:
            self._require_tables(stream)

    def _require_tables(self, stream: Stream) -> None:
        self.require_table("rules")
        if stream.is_of_alerts:
            self.require_table(stream.name)
        elif stream.table:
            self.holding(stream)._require_external(stream, make_events_schema(stream))
        else:
            self.require_table(stream.name)
            self._require_columns(stream.name, make_events_schema(stream))

    def require_table(self, name: str) -> None:
        """Raises SetupError if a table does not exist."""
        if not self.exists(name):
            raise SetupError(
                f"table {self.identifier(name)} does not exist, or you may not read it; the job set_up or "
                "`lookback init` creates the tables and the grants"
            )

    def choose_clustering(self, name: str, event_time: str | None = None) -> str | None:
        """Returns the column that OPTIMIZE clusters a table's files by, or None.

        `event_time` is the time field of the stream whose events table this is. Events and alerts are clustered by time
        because their queries name one: they look for duplicates, the events behind an alert, or the newest rows. The
        other tables are small. Only tables of a catalog are clustered, because all their readers and writers must
        support it. Appended files are not clustered until the next OPTIMIZE.
        """
        if self.root is not None:
            return None
        return event_time or ("event_time" if name == "alerts" else None)

    def _create(
        self, name: str, schema: StructType, properties: Mapping[str, str], comment: str, event_time: str | None = None
    ) -> None:
        columns = ", ".join(_render_column(field, DEFAULTS.get(name, {}).get(field.name)) for field in schema)
        settings = ", ".join(f"{quote_text(key)} = {quote_text(value)}" for key, value in properties.items())
        column = self.choose_clustering(name, event_time)
        layout = f"CLUSTER BY ({quote_name(column)}) " if column else ""
        self.spark.sql(
            f"CREATE TABLE IF NOT EXISTS {self.identifier(name)} ({columns}) USING delta {layout}"
            f"COMMENT {quote_text(comment)} TBLPROPERTIES ({settings})"
        )

    def _require_external(self, stream: Stream, schema: StructType) -> None:
        place = self.identifier(stream.name)
        if not self.exists(stream.name):
            raise SetupError(
                f"table {place} of stream {stream.name!r} does not exist or is not a Delta table; its writer must "
                "create it. Correct `table` in the declaration, or omit it to use a table of Lookback's own"
            )
        self._require_columns(stream.name, schema)
        properties = dict(self.describe(stream.name)["properties"] or {})
        missing = [name for name, value in _CHANGE_FEED.items() if properties.get(name, "").lower() != value]
        if missing:
            raise SetupError(
                f"table {place} of stream {stream.name!r} lacks {' and '.join(map(_PURPOSES.__getitem__, missing))}. "
                f"Run ALTER TABLE {place} SET TBLPROPERTIES ({', '.join(f'{name} = true' for name in missing)}). "
                "Rules see only the rows written after that"
            )

    def require_fields(self, stream: Stream) -> None:
        """Raises SetupError, with the remedy, if an external table does not match the stream's declared fields."""
        if stream.table and (misfit := self.holding(stream).find_misfit(stream)):
            raise SetupError(misfit)

    def _require_columns(self, name: str, schema: StructType) -> None:
        if misfit := self._describe_misfit(name, schema):
            raise SetupError(misfit)

    def find_misfit(self, stream: Stream) -> str | None:
        """Describes the declared fields that a stream's table lacks or has with another type; None if all match."""
        return self._describe_misfit(stream.name, make_events_schema(stream))

    def _describe_misfit(self, name: str, schema: StructType) -> str | None:
        found = {field.name: field.dataType.simpleString() for field in self._read_rows(name).schema}
        declared = [field for field in schema if field.name != "ingested_at"]
        missing = [field for field in declared if field.name not in found]
        wrong = [
            f"{field.name} is {found.get(field.name, 'missing')}, declared as {field.dataType.simpleString()}"
            for field in declared
            if found.get(field.name) != field.dataType.simpleString()
        ]
        if not wrong:
            return None
        place, remedies = self.identifier(name), []
        if missing:
            columns = ", ".join(f"{quote_name(field.name)} {field.dataType.simpleString()}" for field in missing)
            remedies.append(f"add the missing columns: ALTER TABLE {place} ADD COLUMNS ({columns})")
            back = f"ALTER TABLE {place} RENAME COLUMN its_current_name TO {quote_name(missing[0].name)}"
            remedies.append(f"rename a renamed column back: {back}")
        if len(wrong) > len(missing):
            remedies.append(f"declare the table's type, then run lookback evaluate {name} --rebuild")
        remedy = "; or ".join(remedies)
        return (
            f"table {place} does not match the stream's declaration: {'; '.join(wrong)}. "
            f"{remedy[0].upper()}{remedy[1:]}"
        )


def commit_file(folder: Path, version: int) -> Path:
    """Returns the log file of the commit `version` of the table in `folder`."""
    return folder / "_delta_log" / f"{version:020d}.json"


def read_actions(commit: Path, kind: str = "") -> list[dict[str, Any]]:
    """Reads the actions of a commit.

    Args:
        commit: The log file, as returned by `commit_file`.
        kind: The kind of action to return, such as add; all if empty.

    Raises:
        OSError: If the file does not exist.
        ValueError: If the file is damaged.
    """
    mark = f'"{kind}"' if kind else ""
    lines = commit.read_text(encoding="utf-8").splitlines()
    # Lines that do not name the kind are not parsed: a commit may add thousands of files.
    actions = (json.loads(line) for line in lines if mark in line)
    return [action for action in actions if not kind or kind in action]


def _find_last_commit(folder: Path) -> int | None:
    """Returns the last commit in the log of a table's folder; None if its files do not say. Commits have no gaps."""
    try:
        low = int(json.loads((folder / "_delta_log" / "_last_checkpoint").read_bytes())["version"])
    except (OSError, ValueError, KeyError, TypeError):
        low = 0

    def exists(commit: int) -> bool:
        return commit_file(folder, commit).exists()

    if not exists(low):
        return None
    step = 1
    while exists(low + step):
        low, step = low + step, 2 * step
    # Commit low exists, low + step does not.
    while step > 1:
        step = -(-step // 2)
        if exists(low + step):
            low += step
    return low


def keep(rows: DataFrame) -> DataFrame:
    """Caches rows that are read several times. Serverless compute has no cache and reads them each time."""
    with suppress(PySparkException):
        return rows.persist(StorageLevel.MEMORY_AND_DISK)
    return rows


def is_conflict(error: Exception) -> bool:
    """Returns whether a write failed because of a conflicting write and can be retried."""
    return _CONFLICT.search(f"{type(error).__name__}: {error}") is not None


def retry_on_conflict(tables: Tables, name: str, act: Callable[[], object], patience: float) -> bool:
    """Changes a table, with retries while other writers conflict with the change.

    Open-source Delta lets only one of two concurrent writers succeed. Databricks does so too if both remove rows.

    Args:
        tables: The tables.
        name: The table to change.
        act: Makes the change, or raises a conflict; see `is_conflict`.
        patience: The seconds after which to stop retrying.

    Returns:
        Whether the change was made.
    """
    deadline = time.monotonic() + patience
    while not _succeeds(act):
        if time.monotonic() > deadline:
            return False
        _await_commit(tables, name)
    return True


def change_table(tables: Tables, name: str, act: Callable[[], object]) -> None:
    """Changes a table with `act` like `retry_on_conflict`, for up to five minutes. Raises SetupError if that fails."""
    if not retry_on_conflict(tables, name, act, _RETRY_SECONDS):
        raise SetupError(
            f"other writers keep changing {tables.identifier(name)}; pause the ingest or the evaluation for a minute, "
            "then try again"
        )


def _succeeds(act: Callable[[], object]) -> bool:
    """Makes a change. Returns False if another write conflicted with it."""
    try:
        act()
    except SPARK_ERRORS as error:
        if not is_conflict(error):
            raise
        return False
    return True


def _await_commit(tables: Tables, name: str) -> None:
    """Waits up to two seconds for another writer's next commit: right after it there is the most time for one's own."""
    until, version = time.monotonic() + 2, tables.version(name)
    while time.monotonic() < until and tables.version(name) == version:
        time.sleep(0.05)


def quote_name(text: str) -> str:
    """Quotes a name for SQL, in backticks. Raises SetupError if Spark would substitute a part of it."""
    return quote_identifier(refuse_substitution(text, "name"))


def quote_text(text: str) -> str:
    """Quotes a text for SQL, in single quotes. Raises SetupError if Spark would substitute a part of it."""
    return _quote(refuse_substitution(text, "text"))


def _write_value(value: object) -> str:
    """Returns the SQL for a value of a question. Delta's parser does not accept parameters."""
    if value is None or isinstance(value, bool):
        return {None: "NULL", True: "true", False: "false"}[value]
    if isinstance(value, dt.datetime):
        return f"timestamp_micros({parse_time(value)})"
    assert isinstance(value, str), value
    # Spark does not substitute a variable that begins with an escaped $.
    return _quote(value).replace("$", "\\u0024")


def _quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def to_timestamp(microseconds: int) -> Column:
    """Returns a Spark timestamp, exact to the microsecond, from microseconds since 1970."""
    return F.timestamp_micros(F.lit(microseconds).cast("bigint"))


def _is_event(stream: Stream) -> Column:
    """Returns a condition: the row has an id and a time that Python can hold in every zone. NULL counts as false."""
    time = F.col(stream.event_time)
    first, last = (F.lit(day).cast("timestamp") for day in (_FIRST_DAY, _LAST_DAY))
    return F.col(stream.event_id).isNotNull() & (time >= first) & (time < last)


def _select_alert_events(rows: DataFrame) -> DataFrame:
    """Selects the events of the stream `alerts` from its table or change feed, and keeps the feed's columns.

    A row is an event if an alert begins or ceases to stand with it. Alerts of rules over alerts are not events, so that
    no rule triggers itself.
    """
    is_event = (F.col("change") != alerts.GOES_ON) & (F.col("stream") != alerts.TABLE)
    # All rows of a batch have the same time and are evaluated in the order of their ids. Alerts that cease come first,
    # so that the number of standing alerts is never too high.
    order = F.when(F.col("change") == alerts.CEASES, F.lit("ceases:")).otherwise(F.lit("stands:"))
    made = {
        alerts.CHANGE_ID: F.concat(order, "alert_id", F.lit("."), F.col("revision").cast("string")),
        "score": F.col("score") * F.col("change"),
        "ingested_at": F.lit(None).cast("timestamp"),
    }
    feed = [name for name in rows.columns if name.startswith("_")]
    return rows.where(is_event).withColumns(made).select(*alerts.FIELDS, "ingested_at", *feed)


def refuse_substitution(text: str, what: str) -> str:
    """Returns `text`, which Spark will parse as SQL. Raises SetupError if Spark would substitute a part of it first.

    `what` is what the error calls the text, such as "name".
    """
    if "${" in text:
        raise SetupError(
            f"{text!r} contains ${{, which Spark would replace with a setting or a variable; use another {what}"
        )
    return text


def parse_file_retention(properties: Mapping[str, str]) -> dt.timedelta:
    """Returns how long a table with these properties keeps the files that a commit has removed.

    VACUUM deletes only files that were removed longer ago. Raises SetupError if the property is not a duration.
    """
    return _parse_interval(properties, "delta.deletedFileRetentionDuration", _DEFAULT_FILE_RETENTION)


def parse_log_retention(properties: Mapping[str, str]) -> dt.timedelta:
    """Returns how long a table with these properties keeps its log. Raises SetupError if that is not a duration."""
    return _parse_interval(properties, "delta.logRetentionDuration", f"interval {DEFAULT_HISTORY}")


def _parse_interval(properties: Mapping[str, str], name: str, default: str) -> dt.timedelta:
    text = properties.get(name, default)
    try:
        return dt.timedelta(microseconds=parse_duration(text.lower().removeprefix("interval").strip()))
    except DurationError as error:
        raise SetupError(f"{name} is {text!r}, which is not a duration: {error}") from error


def _render_column(field: StructField, default: str | None = None) -> str:
    comment = field.metadata.get("comment")
    required = "" if field.nullable else " NOT NULL"
    filled = "" if default is None else f" DEFAULT {default}"
    return f"{quote_name(field.name)} {field.dataType.simpleString()}{required}{filled}" + (
        f" COMMENT {quote_text(comment)}" if comment else ""
    )


def _choose_properties(name: str) -> dict[str, str]:
    defaults = {"delta.feature.allowColumnDefaults": "supported"} if name in DEFAULTS else {}
    if name in _AUDITED:
        return {**_CHANGE_FEED, **_OFTEN_WRITTEN, **_make_retention("3650 days"), **defaults}
    if name == metrics.TABLE:
        # Evaluations write this events table, and rules may watch it.
        return {**_CHANGE_FEED, **_OFTEN_WRITTEN, **_make_retention(DEFAULT_HISTORY)}
    if name in _STATISTICS_COLUMNS:
        # Alerts are also events, for rules over alerts.
        feed = {**_CHANGE_FEED, **_make_retention(DEFAULT_HISTORY)} if name == alerts.TABLE else {}
        return {**feed, **_WRITTEN_EVERY_BATCH, STATISTICS: _STATISTICS_COLUMNS[name]}
    return {**_OFTEN_WRITTEN, **_CHECKS.get(name, {}), **defaults}


def _make_retention(history: str) -> dict[str, str]:
    # Delta refuses time travel beyond the retention of deleted files, whatever the log's retention.
    interval = f"interval {history}"
    return {"delta.logRetentionDuration": interval, "delta.deletedFileRetentionDuration": interval}


def _make_statistics(schema: StructType) -> dict[str, str]:
    # Ingest prunes by id, time and ingested_at, which may be beyond the 32 columns that have statistics by default.
    return {"delta.dataSkippingNumIndexedCols": str(len(schema))} if len(schema) > 32 else {}

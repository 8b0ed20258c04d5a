"""The Delta tables of one place: folders below a root, or a schema of a catalog."""

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
from lookback.places import Place, find_local_path, open_place, parse_place
from lookback.spark.platform.session import is_connect, on_databricks
from lookback.spark.queries import functions as F  # noqa: N812
from lookback.spark.tables.schemas import COMMENTS, DEFAULTS, PRODUCT_TABLES, describe_events_table, make_events_schema

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyspark.sql import Column, DataFrame, DataFrameReader, Row, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamReader
    from pyspark.sql.types import StructField, StructType

    from lookback.config import Settings
    from lookback.core.streams.declaration import Stream

# The errors of a failed read or write: Spark's own, or Java's where Spark has no class for it.
SPARK_ERRORS = (PySparkException, Py4JJavaError)
# A write that conflicts with another one may be tried again. The Python class of such an error differs between versions of
# Delta, and over Spark Connect; its name does not.
_CONFLICT = re.compile(
    r"DELTA_(CONCURRENT_\w+|METADATA_CHANGED|PROTOCOL_CHANGED)"
    r"|\b(Concurrent(Append|DeleteDelete|DeleteRead|Transaction|Write)|MetadataChanged|ProtocolChanged)Exception"
)
# For so long a change is tried again while others keep writing to the same table.
_PATIENCE_SECONDS = 300.0
_NAME = re.compile(r"[a-z][a-z0-9_]{0,127}", re.ASCII)
# A table of another catalog or schema, in which events are looked up.
_FULL_NAME = re.compile(r"(\w[\w-]{0,254}\.){2}\w[\w-]{0,254}", re.ASCII)
# How far back commits of an events table can be replayed and read as they were.
DEFAULT_HISTORY = "30 days"
_DEFAULT_FILE_RETENTION = "interval 7 days"
_CHANGE_FEED = {"delta.enableChangeDataFeed": "true", "delta.enableInCommitTimestamps": "true"}
_PURPOSES = {
    "delta.enableChangeDataFeed": "a change feed, from which events are read",
    "delta.enableInCommitTimestamps": "in-commit timestamps, by which `max_future` is judged",
}
# Commits to a checkpoint of the log. For a small table a checkpoint costs more than reading a hundred short log files.
_OFTEN_WRITTEN = {"delta.checkpointInterval": "100"}
# For tables that an evaluation writes in every batch: a checkpoint of the log keeps alerts waiting for 1.7 s, and without
# one a first reader takes 2.4 s more after 950 commits (2 cores).
_WRITTEN_EVERY_BATCH = {"delta.checkpointInterval": "1000"}
# Statistics of few columns make an append a sixth faster; those of these columns help readers.
_STATISTICS_COLUMNS = {
    "alerts": "event_time,arrival,decided_at",
    "late_events": "event_time,arrival",
    "rule_log": "arrival,logged_at",
}
STATISTICS = "delta.dataSkippingStatsColumns"
# Bounds of the times of events in a table that others write, the last excluded; ingest checks those of its own tables.
_FIRST_DAY, _LAST_DAY = "0001-01-02", "9999-12-31"
# Catalogs of a workspace that are not Unity Catalog's.
_OTHER_CATALOGS = ("spark_catalog", "hive_metastore")
# Checked with every row that is written, so only where people write and a wrong value would be lost.
_KNOWN = ", ".join(f"'{disposition}'" for disposition in DISPOSITIONS)
_CHECKS = {"reviews": {"delta.constraints.disposition_known": f"disposition in ({_KNOWN})"}}
# The rules and lists that were in force at a time must stay readable for as long as alerts are questioned.
_QUESTIONED = ("rules", "lists")


@dataclass(frozen=True)
class Tables:
    """The tables of one place: `root` (a folder or its URL) or `catalog` and `schema`, never both.

    Made by `Tables.of`, `Tables.local` or `Tables.catalog`. Table names are lower-case letters, digits and _; a name with two
    dots is that of a table of another catalog or schema, which can be read. elsewhere: the streams whose events are in
    tables that others write, by name; see `holding`. volume: the folder of the checkpoints of a catalog's tables; see
    `files`.
    """

    spark: SparkSession
    root: str | None = None
    catalog_name: str | None = None
    schema_name: str | None = None
    elsewhere: Mapping[str, Stream] = field(default_factory=dict, hash=False)
    volume: str | None = None

    @classmethod
    def of(cls, spark: SparkSession, settings: Settings) -> Tables:
        """Returns the tables of the place that the settings name. Raises SetupError if Spark does not reach its bucket."""
        if settings.catalog:
            return cls.catalog(spark, settings.catalog, settings.schema, settings.root)
        tables = cls.local(spark, settings.root)
        tables._require_reachable()
        return tables

    @classmethod
    def local(cls, spark: SparkSession, root: str | Path) -> Tables:
        """Returns tables in Delta folders ROOT/<table>. root: a path or a URI, see `parse_place`."""
        return cls(spark, root=str(parse_place(root)))

    @classmethod
    def catalog(cls, spark: SparkSession, catalog: str, schema: str, volume: str | None = None) -> Tables:
        """Returns tables named catalog.schema.table, as in Unity Catalog. The schema must exist. volume: a folder in one."""
        folder = None if volume is None else volume.rstrip("/")
        return cls(spark, catalog_name=catalog, schema_name=schema, volume=folder)

    @property
    def place(self) -> str:
        """The place as people name it: catalog.schema, or the folder."""
        return str(self.root) if self.root is not None else f"{self.catalog_name}.{self.schema_name}"

    @property
    def files(self) -> str:
        """The folder of checkpoints and locks: the root, or the volume of a catalog's tables.

        Raises SetupError where there is none that this machine reaches.
        """
        if self.root is not None:
            return self.root
        if self.volume is None:
            raise SetupError("tables of a catalog need a checkpoint folder: give one in a volume, /Volumes/...")
        if self.is_unity and not self.volume.startswith(("/", "dbfs:")) and "://" not in self.volume:
            raise SetupError(
                f"root is the volume that holds checkpoints, such as /Volumes/main/fraud/checkpoints, got {self.volume!r}"
            )
        if self.volume.startswith("/Volumes/") and not self.reaches_files:
            raise SetupError(
                f"{self.volume} is not on this machine: run this as a job, or in a notebook or terminal of the workspace"
            )
        return str(parse_place(self.volume))

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
        """Returns a folder, such as that of a checkpoint, so that its files can be read and written from here."""
        return open_place(folder, self.spark)

    @property
    def reaches_files(self) -> bool:
        """Returns whether this machine reaches the checkpoints: those in a volume need the volumes of the workspace."""
        return not (self.volume or "").startswith("/Volumes/") or Path("/Volumes").is_dir()

    @property
    def current_user(self) -> str:
        """The user of the workspace, or on a machine of one's own the user of the operating system."""
        if on_databricks() or is_connect(self.spark):
            (row,) = self.spark.sql("SELECT current_user() AS name").collect()
            return str(row["name"])
        return getpass.getuser()

    @property
    def is_unity(self) -> bool:
        """Returns whether the tables are in Unity Catalog, which has volumes, keys and grants."""
        return self.catalog_name is not None and self.catalog_name not in _OTHER_CATALOGS

    def holding(self, *streams: Stream) -> Tables:
        """Returns these tables, with the events of the streams read from the tables that their declarations name."""
        elsewhere = {stream.name: stream for stream in streams if stream.table}
        return replace(self, elsewhere={**self.elsewhere, **elsewhere}) if elsewhere else self

    def is_place(self, name: str) -> bool:
        """Returns whether the table is found by its path, not by its name in a catalog."""
        stream = self.elsewhere.get(name)
        if stream is not None:
            return stream.has_table_path
        return self.root is not None and not _FULL_NAME.fullmatch(name)

    def identifier(self, name: str) -> str:
        """Returns the table as SQL names it, quoted: delta.`<root>/rules` or `catalog`.`schema`.`rules`."""
        if self.is_place(name):
            return f"delta.{quote_name(self.path_or_name(name))}"
        return self.path_or_name(name)

    def path_or_name(self, name: str) -> str:
        """Returns the folder of a local table, or the quoted three-part name. Raises SetupError if `name` is no table name.

        name: that of a table of this place, or catalog.schema.table of any other.
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
        """Reads the table as it is when the query runs, or as it was after the commit `version`."""
        return self._select_events(self._read_rows(name, version), name)

    def read_events(self, name: str, version: int | None = None) -> DataFrame:
        """Reads the events of a stream, now or after the commit `version`.

        Those of the stream `alerts` are made of the rows of that table; of all others they are what `read` reads.
        """
        rows = self.read(name, version)
        return _select_alert_events(rows) if name == alerts.TABLE else rows

    def _read_rows(self, name: str, version: int | None = None) -> DataFrame:
        reader = self.spark.read if version is None else self.spark.read.option("versionAsOf", str(version))
        place = self.path_or_name(name)
        return reader.format("delta").load(place) if self.is_place(name) else reader.table(place)

    def _select_events(self, rows: DataFrame, name: str) -> DataFrame:
        """Returns the rows of a table. If others write the table: only the rows that are events, with `ingested_at`."""
        stream = self.elsewhere.get(name)
        if stream is None:
            return rows
        there = {column.lower() for column in rows.columns}
        texts = {name: F.make_valid_utf8(name) for name, type_ in stream.fields.items() if type_.name == "string"}
        stamp = {} if "ingested_at" in there else {"ingested_at": F.lit(None).cast("timestamp")}
        return rows.where(_is_event(stream)).withColumns({**texts, **stamp})

    def count_passed_over(self, stream: Stream) -> int:
        """Counts the rows of a stream's table that are no events; only a table that others write can hold any."""
        if stream.name not in self.elsewhere:
            return 0
        return self._read_rows(stream.name).where(~F.coalesce(_is_event(stream), F.lit(False))).count()

    def exists(self, name: str) -> bool:
        """Returns whether the table is there, as a Delta table."""
        if self.is_place(name):
            return DeltaTable.isDeltaTable(self.spark, self.path_or_name(name))
        return self.spark.catalog.tableExists(self.path_or_name(name))

    def append(self, df: DataFrame, name: str, user_metadata: str | None = None) -> None:
        """Appends the rows of `df` in one commit, which carries `user_metadata` if given. Columns are matched by name."""
        writer = df.write.format("delta").mode("append")
        if user_metadata is not None:
            writer = writer.option("userMetadata", user_metadata)
        if self.is_place(name):
            writer.save(self.path_or_name(name))
        else:
            writer.saveAsTable(self.path_or_name(name))

    def append_rows(self, rows: Sequence[Any], name: str, user_metadata: str | None = None) -> None:
        """Appends `rows`, tuples or dicts, to a table of the product in one file; `user_metadata` as in `append`."""
        self.append(self.spark.createDataFrame(rows, PRODUCT_TABLES[name]).coalesce(1), name, user_metadata)

    def delta(self, name: str) -> DeltaTable:
        """Returns the table for updates and merges."""
        if self.is_place(name):
            return DeltaTable.forPath(self.spark, self.path_or_name(name))
        return DeltaTable.forName(self.spark, self.path_or_name(name))

    def stream_changes(
        self, name: str, starting_version: int = 0, options: Mapping[str, str] | None = None
    ) -> DataFrame:
        """Streams the change feed from the commit `starting_version` on, that commit included.

        The columns are the table's and _change_type, _commit_version, _commit_timestamp.
        options: those of the Delta source, such as maxFilesPerTrigger.
        """
        changes = {"startingVersion": str(starting_version), **(options or {})}
        return self._select_changes(self._read_feed(self.spark.readStream, name, changes), name)

    def read_changes(self, name: str, starting_version: int, ending_version: int | None = None) -> DataFrame:
        """Reads the change feed from commit `starting_version` to `ending_version` (default: the last), both included.

        The columns are those of `stream_changes`. There are no rows if the table has no such commit yet.
        """
        if starting_version > self.version(name):
            return self.read_changes(name, self.version(name)).limit(0)
        ending = {} if ending_version is None else {"endingVersion": str(ending_version)}
        return self.changes(name, {"startingVersion": str(starting_version), **ending})

    def changes(self, name: str, options: Mapping[str, str]) -> DataFrame:
        """Reads the change feed as a batch, with the options of the Delta source that say from where to where."""
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
        # Nobody but rules over alerts follows the changes of that table.
        return _select_alert_events(rows) if name == alerts.TABLE else self._select_events(rows, name)

    def version(self, name: str) -> int:
        """Returns the number of the last commit; a table that was just created has 0."""
        folder = self.log_folder(name)
        # The log's files answer without a job, which takes longer than most callers' own work.
        commit = None if folder is None else _find_last_commit(folder)
        if commit is not None:
            return commit
        return int(self.history(name, 1).select("version").head()[0])  # type: ignore[index]

    def local_folder(self, name: str) -> Path | None:
        """Returns the folder of a table if it is on this machine, else None."""
        return find_local_path(self.path_or_name(name)) if self.is_place(name) else None

    def log_folder(self, name: str) -> Path | None:
        """Returns the folder of a table whose log this process may read itself; None on Databricks, and elsewhere."""
        return None if on_databricks() else self.local_folder(name)

    def is_unwritten(self, name: str) -> bool:
        """Returns whether nothing can have been written to a table; False if that is not known."""
        folder = self.local_folder(name)
        if folder is None or commit_file(folder, 1).exists():
            return False
        try:
            # A copy of another table has its files from the first commit on.
            return not read_actions(commit_file(folder, 0), "add")
        except (OSError, ValueError):
            return False

    def may_have_rows(self, name: str) -> bool:
        """Returns False if a table is not there, or nothing was ever written to it; no Spark job runs."""
        return not self.is_unwritten(name) and self.exists(name)

    def describe(self, name: str) -> Row:
        """Reads the detail of a table: numFiles, properties, clusteringColumns, description and more."""
        return self.spark.sql(f"DESCRIBE DETAIL {self.identifier(name)}").collect()[0]

    def query(self, name: str, query: Callable[[DataFrame], DataFrame]) -> list[Row]:
        """Runs a query over a table's rows and returns its result.

        If nothing was ever written to the table, the result is empty, also that of an aggregate, and no Spark job runs.
        """
        return [] if self.is_unwritten(name) else query(self.read(name)).collect()

    def history(self, name: str, limit: int | None = None) -> DataFrame:
        """Reads the last commits of the table, newest first: version, timestamp, operation, userMetadata and more."""
        # By SQL, which every kind of session understands.
        bound = "" if limit is None else f" LIMIT {limit:d}"
        return self.spark.sql(f"DESCRIBE HISTORY {self.identifier(name)}{bound}")

    def create(self, stream: Stream, history: str = DEFAULT_HISTORY) -> None:
        """Creates the stream's events table and the product's tables where they are missing; others stay as they are.

        history: how long commits of the events table can be read as they were, such as `30 days`. Rules stay readable
        for ten years. A table that others write is never created or altered. Raises SetupError if a table lacks a declared
        field or has it with another type, and if one that others write is missing or has no change feed.
        """
        for name, schema in PRODUCT_TABLES.items():
            if not self.exists(name):
                self._create(name, schema, _choose_properties(name), COMMENTS[name])
        events = make_events_schema(stream)
        if stream.table:
            self.holding(stream)._require_written_by_others(stream, events)
        elif stream.is_of_alerts:
            return
        elif self.exists(stream.name):
            self._require_columns(stream.name, events)
        else:
            properties = {**_CHANGE_FEED, **_OFTEN_WRITTEN, **_make_retention(history), **_make_statistics(events)}
            self._create(stream.name, events, properties, describe_events_table(stream), stream.event_time)

    def require(self, stream: Stream) -> None:
        """Checks that the rules and the events table of the stream are there; in local folders creates missing tables.

        In a catalog only `set_up` creates tables: other users have no right to, and a misspelt schema would be filled.
        Raises SetupError, also if a table does not fit the stream's declaration.
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
            self.holding(stream)._require_written_by_others(stream, make_events_schema(stream))
        else:
            self.require_table(stream.name)
            self._require_columns(stream.name, make_events_schema(stream))

    def require_table(self, name: str) -> None:
        """Raises SetupError if a table is not there."""
        if not self.exists(name):
            raise SetupError(
                f"there is no table {self.identifier(name)}, or you may not read it; the job set_up or `lookback init` makes "
                "the tables and gives the grants"
            )

    def choose_clustering(self, name: str, event_time: str | None = None) -> str | None:
        """Returns the column by which OPTIMIZE lays out a table's files; None for no column.

        event_time: the stream's, for its events table. Queries on events and alerts name a time: they look for duplicates,
        the events behind an alert, or the newest. Only tables of a catalog are clustered, as that takes readers and
        writers that know clustering; an append writes its files as before. The other tables are small.
        """
        if self.root is not None:
            return None
        return event_time or ("event_time" if name == "alerts" else None)

    def _create(
        self, name: str, schema: StructType, properties: Mapping[str, str], comment: str, event_time: str | None = None
    ) -> None:
        columns = ", ".join(_render_column(field, DEFAULTS.get(name, {}).get(field.name)) for field in schema)
        settings = ", ".join(f"{quote_text(key)} = {quote_text(value)}" for key, value in properties.items())
        choose_clustering = self.choose_clustering(name, event_time)
        layout = f"CLUSTER BY ({quote_name(choose_clustering)}) " if choose_clustering else ""
        self.spark.sql(
            f"CREATE TABLE IF NOT EXISTS {self.identifier(name)} ({columns}) USING delta {layout}"
            f"COMMENT {quote_text(comment)} TBLPROPERTIES ({settings})"
        )

    def _require_written_by_others(self, stream: Stream, schema: StructType) -> None:
        place = self.identifier(stream.name)
        if not self.exists(stream.name):
            raise SetupError(
                f"table {place} of stream {stream.name!r} is not there, or is no Delta table; those who write it create "
                "it. Mend `table` in the declaration, or leave it out to have a table of Lookback's own"
            )
        self._require_columns(stream.name, schema)
        properties = dict(self.describe(stream.name)["properties"] or {})
        lacking = [name for name, value in _CHANGE_FEED.items() if properties.get(name, "").lower() != value]
        if lacking:
            raise SetupError(
                f"table {place} of stream {stream.name!r} lacks {' and '.join(map(_PURPOSES.__getitem__, lacking))}. "
                f"Switch it on: ALTER TABLE {place} SET TBLPROPERTIES ({', '.join(f'{name} = true' for name in lacking)}). "
                "Rows that are written from then on are judged"
            )

    def require_fields(self, stream: Stream) -> None:
        """Raises SetupError, with the remedy, if a table that others write has not all declared fields as declared."""
        if stream.table and (misfit := self.holding(stream).find_misfit(stream)):
            raise SetupError(misfit)

    def _require_columns(self, name: str, schema: StructType) -> None:
        if misfit := self._describe_misfit(name, schema):
            raise SetupError(misfit)

    def find_misfit(self, stream: Stream) -> str | None:
        """Says which declared fields the table of a stream lacks or has with another type; None if it has all."""
        return self._describe_misfit(stream.name, make_events_schema(stream))

    def _describe_misfit(self, name: str, schema: StructType) -> str | None:
        found = {field.name: field.dataType.simpleString() for field in self._read_rows(name).schema}
        declared = [field for field in schema if field.name != "ingested_at"]
        missing = [field for field in declared if field.name not in found]
        wrong = [
            f"{field.name} is {found.get(field.name, 'missing')}, declared is {field.dataType.simpleString()}"
            for field in declared
            if found.get(field.name) != field.dataType.simpleString()
        ]
        if not wrong:
            return None
        place, remedies = self.identifier(name), []
        if missing:
            columns = ", ".join(f"{quote_name(field.name)} {field.dataType.simpleString()}" for field in missing)
            remedies.append(f"add what was never there: ALTER TABLE {place} ADD COLUMNS ({columns})")
            back = f"ALTER TABLE {place} RENAME COLUMN its_name_of_now TO {quote_name(missing[0].name)}"
            remedies.append(f"give a column that was renamed its name back: {back}")
        if len(wrong) > len(missing):
            remedies.append(f"declare the type that the table has, then lookback evaluate {name} --rebuild")
        remedy = "; or ".join(remedies)
        return (
            f"table {place} does not fit the stream's declaration: {'; '.join(wrong)}. {remedy[0].upper()}{remedy[1:]}"
        )


def commit_file(folder: Path, version: int) -> Path:
    """Returns the file that holds the commit `version` in the log of a table's folder, by the protocol of Delta."""
    return folder / "_delta_log" / f"{version:020d}.json"


def read_actions(commit: Path, kind: str = "") -> list[dict[str, Any]]:
    """Reads the actions of a commit.

    commit: the file that `commit_file` names; kind: of the actions that are wanted, such as add; all of them without it.
    Raises OSError if there is no such file, and ValueError if it is damaged.
    """
    mark = f'"{kind}"' if kind else ""
    lines = commit.read_text(encoding="utf-8").splitlines()
    # A line that does not name the kind is not parsed: a commit may add thousands of files.
    actions = (json.loads(line) for line in lines if mark in line)
    return [action for action in actions if not kind or kind in action]


def _find_last_commit(folder: Path) -> int | None:
    """Returns the last commit in the log of a table's folder; None if the log does not say. Commits have no gaps."""
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
    # low is there, low + step is not.
    while step > 1:
        step = -(-step // 2)
        if exists(low + step):
            low += step
    return low


def keep(rows: DataFrame) -> DataFrame:
    """Keeps rows that are read several times; serverless compute does not, and reads them again."""
    with suppress(PySparkException):
        return rows.persist(StorageLevel.MEMORY_AND_DISK)
    return rows


def is_conflict(error: Exception) -> bool:
    """Returns whether a write failed because it conflicts with another one, so that it may be tried again."""
    return _CONFLICT.search(f"{type(error).__name__}: {error}") is not None


def retry_on_conflict(tables: Tables, name: str, act: Callable[[], object], patience: float) -> bool:
    """Changes a table, and tries again while others write to it in between. Returns whether the change was made.

    name: the table; act: makes the change, or raises a conflict; patience: the seconds for which it is tried. OSS
    Delta lets only one of two writers at the same time win, and so does any Delta if both remove rows.
    """
    deadline = time.monotonic() + patience
    while not _succeeds(act):
        if time.monotonic() > deadline:
            return False
        _await_commit(tables, name)
    return True


def change_table(tables: Tables, name: str, act: Callable[[], object]) -> None:
    """Changes a table as `retry_on_conflict` does, for up to five minutes. Raises SetupError if it could not.

    name: the table; act: makes the change, or raises a conflict.
    """
    if not retry_on_conflict(tables, name, act, _PATIENCE_SECONDS):
        raise SetupError(
            f"others keep writing to {tables.identifier(name)}; pause the ingest or the evaluation for a minute and make the "
            "same request again"
        )


def _succeeds(act: Callable[[], object]) -> bool:
    """Makes a change. Returns whether it was made, and no other came first."""
    try:
        act()
    except SPARK_ERRORS as error:
        if not is_conflict(error):
            raise
        return False
    return True


def _await_commit(tables: Tables, name: str) -> None:
    """Waits up to two seconds for the others' next commit: just after it there is the most time before another."""
    until, version = time.monotonic() + 2, tables.version(name)
    while time.monotonic() < until and tables.version(name) == version:
        time.sleep(0.05)


def quote_name(text: str) -> str:
    """Writes a name as SQL has it, in backticks. Raises SetupError if Spark would substitute a part of it."""
    return quote_identifier(refuse_substitution(text, "name"))


def quote_text(text: str) -> str:
    """Writes a text as SQL has it, in quotes. Raises SetupError if Spark would substitute a part of it."""
    return "'" + refuse_substitution(text, "text").replace("\\", "\\\\").replace("'", "\\'") + "'"


def to_timestamp(microseconds: int) -> Column:
    """Returns a time since 1970 as Spark has it, exact to the microsecond."""
    return F.timestamp_micros(F.lit(microseconds).cast("bigint"))


def _is_event(stream: Stream) -> Column:
    """Returns a condition: a row that others wrote has an id, and a time that Python knows in every zone; NULL is false."""
    time = F.col(stream.event_time)
    first, last = (F.lit(day).cast("timestamp") for day in (_FIRST_DAY, _LAST_DAY))
    return F.col(stream.event_id).isNotNull() & (time >= first) & (time < last)


def _select_alert_events(rows: DataFrame) -> DataFrame:
    """Selects the events of the stream `alerts` from rows of the table, or of its change feed, whose own columns stay.

    An event is a row with which an alert begins or ceases to stand. Alerts of rules over alerts are none, so that no rule
    raises itself.
    """
    is_event = (F.col("change") != alerts.GOES_ON) & (F.col("stream") != alerts.TABLE)
    # All rows of a batch have one time, and are judged in the order of their ids: what ceases to stand comes first, so that
    # for no moment more stands than does in truth.
    order = F.when(F.col("change") == alerts.CEASES, F.lit("ceases:")).otherwise(F.lit("stands:"))
    made = {
        alerts.CHANGE_ID: F.concat(order, "alert_id", F.lit("."), F.col("revision").cast("string")),
        "score": F.col("score") * F.col("change"),
        "ingested_at": F.lit(None).cast("timestamp"),
    }
    feed = [name for name in rows.columns if name.startswith("_")]
    return rows.where(is_event).withColumns(made).select(*alerts.FIELDS, "ingested_at", *feed)


def refuse_substitution(text: str, what: str) -> str:
    """Returns `text`, which Spark parses as SQL. Raises SetupError if Spark would substitute a part of it first.

    what: the thing that the text is, as the error calls it.
    """
    if "${" in text:
        raise SetupError(
            f"{text!r} holds ${{, in place of which Spark would put a setting or a variable; use another {what}"
        )
    return text


def parse_file_retention(properties: Mapping[str, str]) -> dt.timedelta:
    """Returns how long a table with these properties keeps the files that a commit has removed.

    VACUUM deletes no file that was removed later than that. Raises SetupError if the property is no duration.
    """
    return _parse_interval(properties, "delta.deletedFileRetentionDuration", _DEFAULT_FILE_RETENTION)


def parse_log_retention(properties: Mapping[str, str]) -> dt.timedelta:
    """Returns how long a table with these properties keeps the files of its log. Raises SetupError if it is no duration."""
    return _parse_interval(properties, "delta.logRetentionDuration", f"interval {DEFAULT_HISTORY}")


def _parse_interval(properties: Mapping[str, str], name: str, default: str) -> dt.timedelta:
    text = properties.get(name, default)
    try:
        return dt.timedelta(microseconds=parse_duration(text.lower().removeprefix("interval").strip()))
    except DurationError as error:
        raise SetupError(f"{name} is {text!r}, which is no duration: {error}") from error


def _render_column(field: StructField, default: str | None = None) -> str:
    comment = field.metadata.get("comment")
    required = "" if field.nullable else " NOT NULL"
    filled = "" if default is None else f" DEFAULT {default}"
    return f"{quote_name(field.name)} {field.dataType.simpleString()}{required}{filled}" + (
        f" COMMENT {quote_text(comment)}" if comment else ""
    )


def _choose_properties(name: str) -> dict[str, str]:
    defaults = {"delta.feature.allowColumnDefaults": "supported"} if name in DEFAULTS else {}
    if name in _QUESTIONED:
        return {**_CHANGE_FEED, **_OFTEN_WRITTEN, **_make_retention("3650 days"), **defaults}
    if name == metrics.TABLE:
        # An events table that evaluations write: rules may watch it.
        return {**_CHANGE_FEED, **_OFTEN_WRITTEN, **_make_retention(DEFAULT_HISTORY)}
    if name in _STATISTICS_COLUMNS:
        # The alerts are events too, for rules over alerts.
        feed = {**_CHANGE_FEED, **_make_retention(DEFAULT_HISTORY)} if name == alerts.TABLE else {}
        return {**feed, **_WRITTEN_EVERY_BATCH, STATISTICS: _STATISTICS_COLUMNS[name]}
    return {**_OFTEN_WRITTEN, **_CHECKS.get(name, {}), **defaults}


def _make_retention(history: str) -> dict[str, str]:
    # Delta refuses time travel past the second, whatever the first allows.
    interval = f"interval {history}"
    return {"delta.logRetentionDuration": interval, "delta.deletedFileRetentionDuration": interval}


def _make_statistics(schema: StructType) -> dict[str, str]:
    # Ingest prunes by id, time and ingested_at, which may come after the 32 columns that have statistics by default.
    return {"delta.dataSkippingNumIndexedCols": str(len(schema))} if len(schema) > 32 else {}

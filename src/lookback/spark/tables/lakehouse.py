"""The Delta tables of one place: folders below a root, or a schema of a catalog."""

from __future__ import annotations

import datetime as dt
import getpass
import json
import re
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from delta.tables import DeltaTable
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812

from lookback.core.errors import DurationError, SetupError
from lookback.core.streams import metrics
from lookback.core.values.durations import parse_duration
from lookback.spark.platform.session import is_connect, on_databricks
from lookback.spark.tables.schemas import COMMENTS, PRODUCT_TABLES, events_comment, events_schema

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructField, StructType

    from lookback.config import Settings
    from lookback.core.streams.declaration import Stream

# How Spark says that a write failed: by an error of its own, or by Java's where it knows none.
WRITE_ERRORS = (PySparkException, Py4JJavaError)
# A write that met another one may be tried again. Which Python class says so differs from Delta to Delta, and over Spark
# Connect; the name of the error does not.
_CONFLICT = re.compile(
    r"DELTA_(CONCURRENT_\w+|METADATA_CHANGED|PROTOCOL_CHANGED)"
    r"|\b(Concurrent(Append|DeleteDelete|DeleteRead|Transaction|Write)|MetadataChanged|ProtocolChanged)Exception"
)
_NAME = re.compile(r"[a-z][a-z0-9_]{0,127}", re.ASCII)
# Of an events table: how far back commits can be replayed and read as they stood.
DEFAULT_HISTORY = "30 days"
_DELTA_DEFAULT = "interval 7 days"
_CHANGE_FEED = {"delta.enableChangeDataFeed": "true", "delta.enableInCommitTimestamps": "true"}
_WHAT_FOR = {
    "delta.enableChangeDataFeed": "a change feed, from which events are read",
    "delta.enableInCommitTimestamps": "in-commit timestamps, by which `max_future` is told",
}
# A checkpoint of a small table costs more than reading a hundred short log files.
_HOT = {"delta.checkpointInterval": "100"}
# Of what an evaluation commits in every batch: a checkpoint of the log keeps alerts waiting for 1.7 s, and without one a
# first reader takes 2.4 s more after 950 commits (2 cores).
_OUTPUT = {"delta.checkpointInterval": "1000"}
# Figures of few columns make an append a sixth faster; of these they help a reader.
_FIGURES = {
    "alerts": "event_time,arrival,decided_at",
    "late_events": "event_time,arrival",
    "rule_log": "arrival,logged_at",
}
STATISTICS = "delta.dataSkippingStatsColumns"
# What an event of a table that others write must have, as ingest sees to it elsewhere.
_FIRST_DAY, _LAST_DAY = "0001-01-02", "9999-12-31"
# Catalogs of a workspace that are not Unity Catalog's.
_OTHER_CATALOGS = ("spark_catalog", "hive_metastore")
# Checked with every row that is written, so only where people write and a wrong value would be lost.
_CHECKS = {"reviews": {"disposition_known": "disposition in ('confirmed', 'false_positive', 'unclear')"}}


@dataclass(frozen=True)
class Tables:
    """Where the tables are: `root` (a folder or its URL) or `catalog` and `schema`, never both.

    Made by `Tables.of`, `Tables.local` or `Tables.catalog`. Table names are lower-case letters, digits and _. elsewhere: the
    streams whose events are in tables that others write, by name; see `holding`. volume: where tables of a catalog have
    their checkpoints; see `files`.
    """

    spark: SparkSession
    root: str | None = None
    catalog_name: str | None = None
    schema_name: str | None = None
    elsewhere: Mapping[str, Stream] = field(default_factory=dict, hash=False)
    volume: str | None = None

    @classmethod
    def of(cls, spark: SparkSession, settings: Settings) -> Tables:
        """The tables of a place, as the settings name it."""
        if settings.catalog:
            return cls.catalog(spark, settings.catalog, settings.schema, settings.root)
        return cls.local(spark, settings.root)

    @classmethod
    def local(cls, spark: SparkSession, root: str | Path) -> Tables:
        """Tables in Delta folders ROOT/<table>. A relative folder is taken from where the process is now."""
        text = str(root)
        if "://" in text or text.startswith("dbfs:/"):
            return cls(spark, root=text.rstrip("/"))
        return cls(spark, root=str(Path(text).expanduser().resolve()))

    @classmethod
    def catalog(cls, spark: SparkSession, catalog: str, schema: str, volume: str | None = None) -> Tables:
        """Tables named catalog.schema.table, as in Unity Catalog. The schema must exist. volume: a folder in one."""
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
        return self.volume

    @property
    def reaches_files(self) -> bool:
        """Whether this machine has the volumes of the workspace, where the checkpoints are in one."""
        return not (self.volume or "").startswith("/Volumes/") or Path("/Volumes").is_dir()

    @property
    def current_user(self) -> str:
        """Who works here: the user of the workspace, on this machine that of the operating system."""
        if on_databricks() or is_connect(self.spark):
            (row,) = self.spark.sql("SELECT current_user() AS name").collect()
            return str(row["name"])
        return getpass.getuser()

    @property
    def is_unity(self) -> bool:
        """Whether the tables are in Unity Catalog, which has volumes, keys and grants."""
        return self.catalog_name is not None and self.catalog_name not in _OTHER_CATALOGS

    def holding(self, *streams: Stream) -> Tables:
        """These tables, with the events of the streams where their declarations say."""
        elsewhere = {stream.name: stream for stream in streams if stream.table}
        return replace(self, elsewhere={**self.elsewhere, **elsewhere}) if elsewhere else self

    def is_place(self, name: str) -> bool:
        """Whether the table is found by its path, not by its name in a catalog."""
        stream = self.elsewhere.get(name)
        return self.root is not None if stream is None else stream.has_table_path

    def identifier(self, name: str) -> str:
        """The table as SQL names it, quoted: delta.`<root>/rules` or `catalog`.`schema`.`rules`."""
        if self.is_place(name):
            return f"delta.{quoted(self.path_or_name(name))}"
        return self.path_or_name(name)

    def path_or_name(self, name: str) -> str:
        """The folder of a local table, or the quoted three-part name. Raises SetupError where `name` is no table name."""
        if not _NAME.fullmatch(name):
            raise SetupError(f"{name!r} is not a table name; use lower-case letters, digits and _")
        if name in self.elsewhere:
            table = self.elsewhere[name].table
            return table.rstrip("/") if self.is_place(name) else ".".join(map(quoted, table.split(".")))
        if self.root is not None:
            return f"{self.root}/{name}"
        return f"{quoted(str(self.catalog_name))}.{quoted(str(self.schema_name))}.{quoted(name)}"

    def read(self, name: str, version: int | None = None) -> DataFrame:
        """The table as it stands when the query runs, or as it stood after the commit `version`."""
        reader = self.spark.read if version is None else self.spark.read.option("versionAsOf", str(version))
        place = self.path_or_name(name)
        return self._events(reader.format("delta").load(place) if self.is_place(name) else reader.table(place), name)

    def _events(self, rows: DataFrame, name: str) -> DataFrame:
        """The rows of a table; of one that others write those that are events, with `ingested_at`."""
        stream = self.elsewhere.get(name)
        if stream is None:
            return rows
        there = {column.lower() for column in rows.columns}
        texts = {name: F.make_valid_utf8(name) for name, type_ in stream.fields.items() if type_.name == "string"}
        stamp = {} if "ingested_at" in there else {"ingested_at": F.lit(None).cast("timestamp")}
        return rows.where(_is_event(stream)).withColumns({**texts, **stamp})

    def passed_over(self, stream: Stream) -> int:
        """How many rows of a stream's table, as it stands, are no events; only where others write it there can be any."""
        if stream.name not in self.elsewhere:
            return 0
        place = self.path_or_name(stream.name)
        reader = self.spark.read
        rows = reader.format("delta").load(place) if self.is_place(stream.name) else reader.table(place)
        return rows.where(~F.coalesce(_is_event(stream), F.lit(False))).count()

    def exists(self, name: str) -> bool:
        """Whether the table is there, as a Delta table."""
        if self.is_place(name):
            return DeltaTable.isDeltaTable(self.spark, self.path_or_name(name))
        return self.spark.catalog.tableExists(self.path_or_name(name))

    def append(self, df: DataFrame, name: str, user_metadata: str | None = None) -> None:
        """Appends the rows of `df` in one commit, which carries `user_metadata` where given. Columns go by name."""
        writer = df.write.format("delta").mode("append")
        if user_metadata is not None:
            writer = writer.option("userMetadata", user_metadata)
        if self.is_place(name):
            writer.save(self.path_or_name(name))
        else:
            writer.saveAsTable(self.path_or_name(name))

    def delta(self, name: str) -> DeltaTable:
        """The table for updates and merges."""
        if self.is_place(name):
            return DeltaTable.forPath(self.spark, self.path_or_name(name))
        return DeltaTable.forName(self.spark, self.path_or_name(name))

    def stream_changes(
        self, name: str, starting_version: int = 0, options: Mapping[str, str] | None = None
    ) -> DataFrame:
        """A stream of the change feed from the commit `starting_version` on, that commit included.

        The table's columns and _change_type, _commit_version, _commit_timestamp.
        options: those of the Delta source, such as maxFilesPerTrigger.
        """
        reader = self.spark.readStream.format("delta").option("readChangeFeed", "true")
        reader = reader.option("startingVersion", str(starting_version)).options(**dict(options or {}))
        place = self.path_or_name(name)
        return self._events(reader.load(place) if self.is_place(name) else reader.table(place), name)

    def read_changes(self, name: str, starting_version: int, ending_version: int | None = None) -> DataFrame:
        """The change feed from commit `starting_version` to `ending_version`, both included; without that to the last.

        The columns of `stream_changes`. No rows where the table has no such commit yet.
        """
        if starting_version > self.version(name):
            return self.read_changes(name, self.version(name)).limit(0)
        ending = {} if ending_version is None else {"endingVersion": str(ending_version)}
        return self.changes(name, {"startingVersion": str(starting_version), **ending})

    def changes(self, name: str, options: Mapping[str, str]) -> DataFrame:
        """The change feed as a batch, with the options of the Delta source that say from where to where."""
        reader = self.spark.read.format("delta").option("readChangeFeed", "true").options(**options)
        place = self.path_or_name(name)
        return self._events(reader.load(place) if self.is_place(name) else reader.table(place), name)

    def version(self, name: str) -> int:
        """The number of the last commit; a table that was just created has 0."""
        folder = None if on_databricks() else self.local_folder(name)
        # Without a job, which takes longer than most of what asks for it.
        commit = None if folder is None else _last_commit(folder)
        if commit is not None:
            return commit
        return int(self.history(name, 1).select("version").head()[0])  # type: ignore[index]

    def local_folder(self, name: str) -> Path | None:
        """The folder of a table where it is one of this machine."""
        place = self.path_or_name(name)
        if not self.is_place(name) or "://" in place or place.startswith("dbfs:"):
            return None
        return Path(place)

    def is_unwritten(self, name: str) -> bool:
        """Whether nothing can have been written to a table since it was created; False where that is not known."""
        folder = self.local_folder(name)
        if folder is None:
            return False
        return commit_file(folder, 0).exists() and not commit_file(folder, 1).exists()

    def history(self, name: str, limit: int | None = None) -> DataFrame:
        """The last commits of the table, newest first: version, timestamp, operation, userMetadata and more.

        By SQL, which every kind of session understands.
        """
        bound = "" if limit is None else f" LIMIT {limit:d}"
        return self.spark.sql(f"DESCRIBE HISTORY {self.identifier(name)}{bound}")

    def create(self, stream: Stream, history: str = DEFAULT_HISTORY) -> None:
        """Creates what is missing of the stream's events table and the product's tables; what is there stays as it is.

        history: how long commits of the events table can be read as they stood, such as `30 days`. Rules stay readable
        for ten years. A table that others write is never created or altered. Raises SetupError where a table is there
        without a declared field, or with another type, and where one that others write is missing or has no change feed.
        """
        for name, schema in PRODUCT_TABLES.items():
            if not self.exists(name):
                self._create(name, schema, _properties(name), COMMENTS[name])
        events = events_schema(stream)
        if stream.table:
            self.holding(stream)._require_written_by_others(stream, events)
        elif self.exists(stream.name):
            self._require(stream.name, events)
        else:
            properties = {**_CHANGE_FEED, **_HOT, **_retention(history), **_statistics(events)}
            self._create(stream.name, events, properties, events_comment(stream), stream.event_time)

    def require(self, stream: Stream) -> None:
        """Checks that the rules and the events table of the stream are there; in local folders makes what is missing.

        In a catalog only `set_up` makes tables: who works there has no right to, and a misspelt schema would be filled.
        Raises SetupError, also where a table does not fit the stream's declaration.
        """
        if self.root is not None:
            self.create(stream)
            return
        self.require_table("rules")
        if stream.table:
            self.holding(stream)._require_written_by_others(stream, events_schema(stream))
        else:
            self.require_table(stream.name)
            self._require(stream.name, events_schema(stream))

    def require_table(self, name: str) -> None:
        """Raises SetupError where a table is not there."""
        if not self.exists(name):
            raise SetupError(
                f"there is no table {self.identifier(name)}, or you may not read it; the job set_up or `lookback init` makes "
                "the tables and gives the grants"
            )

    def clustering(self, name: str, event_time: str | None = None) -> str | None:
        """The column that a table's files are laid out by when OPTIMIZE writes them anew; None for no column.

        event_time: that of the stream, for its events table. What is asked of events and alerts is asked of a time:
        duplicates, what stood behind an alert, the newest. Only tables of a catalog: an append writes its files as ever,
        but the table then needs readers and writers that know clustering. The other tables are small.
        """
        if self.root is not None:
            return None
        return event_time or ("event_time" if name == "alerts" else None)

    def statistics(self, name: str) -> str | None:
        """The columns of a product's table that Delta keeps figures of for each file; None: its first 32."""
        return _FIGURES.get(name)

    def _create(
        self, name: str, schema: StructType, properties: Mapping[str, str], comment: str, event_time: str | None = None
    ) -> None:
        columns = ", ".join(_column(field) for field in schema)
        settings = ", ".join(f"{literal(key)} = {literal(value)}" for key, value in properties.items())
        clustering = self.clustering(name, event_time)
        layout = f"CLUSTER BY ({quoted(clustering)}) " if clustering else ""
        self.spark.sql(
            f"CREATE TABLE IF NOT EXISTS {self.identifier(name)} ({columns}) USING delta {layout}"
            f"COMMENT {literal(comment)} TBLPROPERTIES ({settings})"
        )

    def _require_written_by_others(self, stream: Stream, schema: StructType) -> None:
        place = self.identifier(stream.name)
        if not self.exists(stream.name):
            raise SetupError(
                f"table {place} of stream {stream.name!r} is not there, or is no Delta table; those who write it create "
                "it. Mend `table` in the declaration, or leave it out to have a table of Lookback's own"
            )
        self._require(stream.name, schema)
        detail = self.spark.sql(f"DESCRIBE DETAIL {place}").head()
        properties = {} if detail is None else dict(detail["properties"] or {})
        lacking = [name for name, value in _CHANGE_FEED.items() if properties.get(name, "").lower() != value]
        if lacking:
            raise SetupError(
                f"table {place} of stream {stream.name!r} lacks {' and '.join(map(_WHAT_FOR.__getitem__, lacking))}. "
                f"Switch it on: ALTER TABLE {place} SET TBLPROPERTIES ({', '.join(f'{name} = true' for name in lacking)}). "
                "What is written from then on is judged"
            )

    def _require(self, name: str, schema: StructType) -> None:
        found = {field.name: field.dataType.simpleString() for field in self.read(name).schema}
        wrong = [
            f"{field.name} is {found.get(field.name, 'missing')}, declared is {field.dataType.simpleString()}"
            for field in schema
            if found.get(field.name) != field.dataType.simpleString() and field.name != "ingested_at"
        ]
        if wrong:
            raise SetupError(
                f"table {self.identifier(name)} does not fit the stream's declaration: {'; '.join(wrong)}. "
                "Change the declaration, or alter the table."
            )


def commit_file(folder: Path, version: int) -> Path:
    """Returns the file that holds a commit in the log of a table's folder, by the protocol of Delta."""
    return folder / "_delta_log" / f"{version:020d}.json"


def _last_commit(folder: Path) -> int | None:
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


def is_conflict(error: Exception) -> bool:
    """Whether a write failed because it met another one, so that it may be tried again."""
    return _CONFLICT.search(f"{type(error).__name__}: {error}") is not None


def retried(tables: Tables, name: str, act: Callable[[], object], patience: float) -> bool:
    """Does what changes a table, again and again while others write to it in between.

    name: the table; act: makes the change, or raises a conflict; patience: for how many seconds it is tried. Returns whether it was done: OSS Delta lets only one of two win, and so does any Delta where both remove rows.
    """
    deadline = time.monotonic() + patience
    while not _is_done(act):
        if time.monotonic() > deadline:
            return False
        _await_commit(tables, name)
    return True


def _is_done(act: Callable[[], object]) -> bool:
    """Whether it went through, and no other came first."""
    try:
        act()
    except WRITE_ERRORS as error:
        if not is_conflict(error):
            raise
        return False
    return True


def _await_commit(tables: Tables, name: str) -> None:
    """Waits for the others' next commit, up to two seconds: just after it there is the most time before another."""
    until, version = time.monotonic() + 2, tables.version(name)
    while time.monotonic() < until and tables.version(name) == version:
        time.sleep(0.05)


def quoted(text: str) -> str:
    """A name as SQL has it, in backticks. Raises SetupError where Spark would put something else in its place."""
    return "`" + _kept(text, "name").replace("`", "``") + "`"


def literal(text: str) -> str:
    """A text as SQL has it, in quotes. Raises SetupError where Spark would put something else in its place."""
    return "'" + _kept(text, "text").replace("\\", "\\\\").replace("'", "\\'") + "'"


def _is_event(stream: Stream) -> Column:
    """Whether a row that others wrote has an id, and a time that Python knows in every zone; NULL counts as not."""
    time = F.col(stream.event_time)
    first, last = (F.lit(day).cast("timestamp") for day in (_FIRST_DAY, _LAST_DAY))
    return F.col(stream.event_id).isNotNull() & (time >= first) & (time < last)


def _kept(text: str, what: str) -> str:
    if "${" in text:
        raise SetupError(
            f"{text!r} holds ${{, in place of which Spark would put a setting or a variable; use another {what}"
        )
    return text


def keeps_removed_files(properties: Mapping[str, str]) -> dt.timedelta:
    """How long a table with these properties keeps files that a commit has removed: VACUUM deletes none that is younger.

    Raises SetupError where the property is no duration.
    """
    text = properties.get("delta.deletedFileRetentionDuration", _DELTA_DEFAULT)
    try:
        return dt.timedelta(microseconds=parse_duration(text.lower().removeprefix("interval").strip()))
    except DurationError as error:
        raise SetupError(f"delta.deletedFileRetentionDuration is {text!r}, which is no duration: {error}") from error


def _column(field: StructField) -> str:
    comment = field.metadata.get("comment")
    required = "" if field.nullable else " NOT NULL"
    return f"{quoted(field.name)} {field.dataType.simpleString()}{required}" + (
        f" COMMENT {literal(comment)}" if comment else ""
    )


def _properties(name: str) -> dict[str, str]:
    checks = {f"delta.constraints.{check}": condition for check, condition in _CHECKS.get(name, {}).items()}
    if name == "rules":
        # What was in force when must stay readable for as long as alerts are questioned.
        return {**_CHANGE_FEED, **_HOT, **_retention("3650 days")}
    if name == metrics.TABLE:
        # An events table that evaluations write: rules may watch it.
        return {**_CHANGE_FEED, **_HOT, **_retention(DEFAULT_HISTORY)}
    if name in _FIGURES:
        return {**_OUTPUT, STATISTICS: _FIGURES[name]}
    return {**_HOT, **checks}


def _retention(history: str) -> dict[str, str]:
    # Delta refuses time travel past the second, whatever the first allows.
    interval = f"interval {history}"
    return {"delta.logRetentionDuration": interval, "delta.deletedFileRetentionDuration": interval}


def _statistics(schema: StructType) -> dict[str, str]:
    # Ingest prunes by id, time and ingested_at, which may stand behind the 32 columns that Delta keeps figures of.
    return {"delta.dataSkippingNumIndexedCols": str(len(schema))} if len(schema) > 32 else {}

"""The Delta tables under one root folder or in one schema of a catalog."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from delta.tables import DeltaTable
from pyspark import StorageLevel
from pyspark.errors import PySparkException
from pyspark.sql.types import ArrayType, StructType

from lookback.core.errors import SetupError
from lookback.core.values.texts import first_line
from lookback.places import find_local_path
from lookback.spark.platform.logstores import probe_one_winner, require_one_winner
from lookback.spark.platform.session import has_databricks_connect, is_connect, on_databricks
from lookback.spark.tables.conflicts import SPARK_ERRORS
from lookback.spark.tables.properties import CHANGE_FEED, DEFAULT_HISTORY, choose_event_properties, choose_properties
from lookback.spark.tables.reading import ReadableTables
from lookback.spark.tables.schemas import COMMENTS, DEFAULTS, PRODUCT_TABLES, describe_events_table, make_events_schema
from lookback.spark.tables.sqltexts import quote_name, quote_path, quote_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructField

    from lookback.config import Settings
    from lookback.core.streams.declaration import Stream

_PURPOSES = {
    "delta.enableChangeDataFeed": "a change feed, from which events are read",
    "delta.enableInCommitTimestamps": "in-commit timestamps, by which `max_future` is checked",
}


@dataclass(frozen=True)
class Tables(ReadableTables):
    """The tables of one place, which can be read, written and created.

    Create one with `Tables.of`, `Tables.local` or `Tables.catalog`; for the attributes see `AddressedTables`.
    """

    @classmethod
    def of(cls, spark: SparkSession, settings: Settings) -> Tables:
        """Returns the tables of the place that `settings` name.

        Raises SetupError if Spark cannot reach its bucket, or does not keep two writers apart there.
        """
        if settings.catalog:
            return cls.catalog(spark, settings.catalog, settings.schema, settings.root)
        tables = cls.local(spark, settings.root)
        tables._require_reachable()
        if (settings_of_spark := tables._find_commit_settings()) is not None:
            require_one_winner(spark, settings.root, settings_of_spark)
        return tables

    def require_conditional_writes(self) -> None:
        """Raises SetupError if the store of these tables overwrites a file that must not exist; asks it by writing one."""
        if self.root is not None and (settings := self._find_commit_settings()) is not None:
            probe_one_winner(self.spark, self.root, settings)

    def _find_commit_settings(self) -> Mapping[str, str] | None:
        """Returns the settings that decide how Spark commits to Delta tables; None on Databricks, which sees to it."""
        if is_connect(self.spark):
            return None if has_databricks_connect() else self.spark.conf.getAll
        return None if on_databricks() else dict(self.spark.sparkContext.getConf().getAll())

    def _require_reachable(self) -> None:
        if find_local_path(self.root) is not None:
            return
        try:
            self.exists("rules")
        except SPARK_ERRORS as error:
            cause = next((line for line in str(error).splitlines() if "Exception" in line), first_line(error))
            raise SetupError(
                f"Spark does not reach {self.root}: {cause.lstrip(': '):.300}. It needs the JARs of the store and its "
                "settings, below `spark` of conf/settings.yml; docs/how-to/object-store.md shows them"
            ) from error

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

    def make_rows(self, rows: Sequence[tuple[Any, ...]], types: Mapping[str, str]) -> DataFrame:
        """Makes a frame of `rows`, for `run` and `change`; `types` are the columns' types by name."""
        return self.spark.createDataFrame(
            rows, ", ".join(f"{quote_name(name)} {type_}" for name, type_ in types.items())
        )

    def change(self, text: str, frames: Mapping[str, DataFrame] | None = None, /, **values: object) -> None:
        """Runs a MERGE or DELETE in the form of a question.

        Args:
            text: The text.
            frames: As in `run`.
            **values: As in `run`.
        """
        self._run(text, frames or {}, values, self.identifier)

    def delta(self, name: str) -> DeltaTable:
        """Opens the table for updates and merges."""
        if self.is_place(name):
            return DeltaTable.forPath(self.spark, self.path_or_name(name))
        return DeltaTable.forName(self.spark, self.path_or_name(name))

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
                self._create(name, schema, choose_properties(name), COMMENTS[name])
        events = make_events_schema(stream)
        if stream.table:
            self.holding(stream)._require_external(stream)
        elif stream.is_of_alerts:
            return
        elif self.exists(stream.name):
            self._require_columns(stream)
        else:
            properties = choose_event_properties(events, history)
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
            self.holding(stream)._require_external(stream)
        else:
            self.require_table(stream.name)
            self._require_columns(stream)

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
        if self.is_open_unity:
            # Delta 4.4 cannot follow the change feed of tables that the open-source server manages, nor compact them.
            layout += f"LOCATION {quote_text(f'{self.files}/{name}')} "
        self.spark.sql(
            f"CREATE TABLE IF NOT EXISTS {self.identifier(name)} ({columns}) USING delta {layout}"
            f"COMMENT {quote_text(comment)} TBLPROPERTIES ({settings})"
        )

    def _require_external(self, stream: Stream) -> None:
        place = self.identifier(stream.name)
        if not self.exists(stream.name):
            raise SetupError(
                f"table {place} of stream {stream.name!r} does not exist or is not a Delta table; its writer must "
                "create it. Correct `table` in the declaration, or omit it to use a table of Lookback's own"
            )
        self._require_columns(stream)
        properties = dict(self.describe(stream.name)["properties"] or {})
        missing = [name for name, value in CHANGE_FEED.items() if properties.get(name, "").lower() != value]
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

    def _require_columns(self, stream: Stream) -> None:
        if misfit := self.find_misfit(stream):
            raise SetupError(misfit)

    def find_misfit(self, stream: Stream) -> str | None:
        """Describes the declared fields that a stream's table lacks or has with another type; None if all match."""
        name, schema = stream.name, self._read_rows(stream.name).schema
        paths = {each: stream.find_path(each) for each in stream.columns_of_events}
        types = {each: str(type_) for each, type_ in stream.columns_of_events.items()}
        found = {each: _find_type(schema, path) for each, path in paths.items()}
        missing = [each for each, type_ in found.items() if type_ is None]
        wrong = [
            f"{'.'.join(paths[each])} is {type_ or 'missing'}, declared as {types[each]}"
            for each, type_ in found.items()
            if type_ != types[each]
        ]
        if not wrong:
            return None
        place, remedies = self.identifier(name), []
        if missing:
            # A part can be added only to a struct that is there.
            whole = {**types, **stream.table_columns}
            roots = (
                each if _find_type(schema, paths[each][:1]) or stream.columns else paths[each][0] for each in missing
            )
            columns = ", ".join(f"{quote_path(stream.find_path(each))} {whole[each]}" for each in dict.fromkeys(roots))
            remedies.append(f"add the missing columns: ALTER TABLE {place} ADD COLUMNS ({columns})")
            back = f"ALTER TABLE {place} RENAME COLUMN its_current_name TO {quote_name(paths[missing[0]][-1])}"
            remedies.append(f"rename a renamed column back: {back}")
        if len(wrong) > len(missing):
            remedies.append(f"declare the table's type, then run lookback evaluate {name} --rebuild")
        remedy = "; or ".join(remedies)
        return (
            f"table {place} does not match the stream's declaration: {'; '.join(wrong)}. "
            f"{remedy[0].upper()}{remedy[1:]}"
        )


def _find_type(schema: StructType, path: Sequence[str]) -> str | None:
    """Finds the type of a column, or of a part of a struct in it, as Spark writes it; None if there is none."""
    type_: DataType = schema
    arrays = 0
    for name in path:
        while isinstance(type_, ArrayType):
            # A part of the structs in an array is an array of their parts.
            type_, arrays = type_.elementType, arrays + 1
        if not isinstance(type_, StructType) or name not in type_.names:
            return None
        type_ = type_[name].dataType
    return "array<" * arrays + type_.simpleString() + ">" * arrays


def keep(rows: DataFrame) -> DataFrame:
    """Caches rows that are read several times. Serverless compute has no cache and reads them each time."""
    with suppress(PySparkException):
        return rows.persist(StorageLevel.MEMORY_AND_DISK)
    return rows


def _render_column(field: StructField, default: str | None = None) -> str:
    comment = field.metadata.get("comment")
    required = "" if field.nullable else " NOT NULL"
    filled = "" if default is None else f" DEFAULT {default}"
    return f"{quote_name(field.name)} {field.dataType.simpleString()}{required}{filled}" + (
        f" COMMENT {quote_text(comment)}" if comment else ""
    )

"""Reads tables, their change feeds and their histories, and asks questions about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from delta.tables import DeltaTable

from lookback.core.streams import alerts
from lookback.core.streams.fields import nest_parts
from lookback.questions import read_question, write_text
from lookback.spark.platform.logstores import begin_following
from lookback.spark.platform.session import is_connect
from lookback.spark.tables.addresses import AddressedTables
from lookback.spark.tables.logfiles import commit_file, find_last_commit, read_actions
from lookback.spark.tables.schemas import PRODUCT_TABLES
from lookback.spark.tables.sqltexts import quote_name, quote_path, quote_text, write_value

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pyspark.sql import DataFrame, DataFrameReader, Row
    from pyspark.sql.streaming.readwriter import DataStreamReader

    from lookback.core.streams.declaration import Stream

# Bounds of event times in an external table, the last excluded. Ingest checks the times in Lookback's own tables.
_FIRST_DAY, _LAST_DAY = "0001-01-02", "9999-12-31"


@dataclass(frozen=True)
class ReadableTables(AddressedTables):
    """Tables that can be read; see `Tables`."""

    def read(self, name: str, version: int | None = None) -> DataFrame:
        """Reads the latest version of a table when the query runs, or its state after the commit `version`."""
        return self._select_events(self._read_rows(name, version), name)

    def read_events(self, name: str, version: int | None = None) -> DataFrame:
        """Reads the events of a stream, from the latest version of its table or from the commit `version`.

        Events of the stream `alerts` are derived from the rows of its table. For any other stream they are its rows.
        """
        rows = self.read(name, version)
        return self._select_alert_events(rows) if name == alerts.TABLE else rows

    def _read_rows(self, name: str, version: int | None = None) -> DataFrame:
        reader = self.spark.read if version is None else self.spark.read.option("versionAsOf", str(version))
        place = self.path_or_name(name)
        return reader.format("delta").load(place) if self.is_place(name) else reader.table(place)

    def _select_events(self, rows: DataFrame, name: str) -> DataFrame:
        """Returns the rows of a table. For an external table: only the rows that are events, with `ingested_at`."""
        stream = self.elsewhere.get(name)
        if stream is None:
            return rows
        declared = _write_columns(stream)
        known = {name.lower() for name in declared}
        columns = [quote_name(each) for each in rows.columns if each.lower() not in known]
        columns += [f"{sql} AS {quote_name(name)}" for name, sql in declared.items()]
        if "ingested_at" not in map(str.lower, rows.columns):
            columns.append("CAST(NULL AS TIMESTAMP) AS ingested_at")
        return self.run(f"SELECT {', '.join(columns)} FROM events WHERE {_write_is_event(stream)}", {"events": rows})

    def count_passed_over(self, stream: Stream) -> int:
        """Counts the rows of a stream's table that are not events. Only an external table can have such rows."""
        if stream.name not in self.elsewhere:
            return 0
        return self._read_rows(stream.name).where(f"NOT coalesce({_write_is_event(stream)}, false)").count()

    def exists(self, name: str) -> bool:
        """Returns whether the table exists and is a Delta table."""
        if self.is_place(name):
            return DeltaTable.isDeltaTable(self.spark, self.path_or_name(name))
        return self.spark.catalog.tableExists(self.path_or_name(name))

    def stream_changes(
        self, name: str, starting_version: int = 0, options: Mapping[str, str] | None = None
    ) -> DataFrame:
        """Streams the change feed, starting with the commit `starting_version`.

        The columns are the table's own plus _change_type, _commit_version and _commit_timestamp. `options` are passed
        to the Delta source, such as maxFilesPerTrigger.
        """
        changes = {"startingVersion": str(starting_version), **(options or {})}
        if self.is_place(name) and not is_connect(self.spark):
            changes |= begin_following(self.spark, self.path_or_name(name))
        return self._select_changes(self._read_feed(self.spark.readStream, name, changes), name)

    def read_changes(self, name: str, starting_version: int, ending_version: int | None = None) -> DataFrame:
        """Reads the change feed from commit `starting_version` to `ending_version` (default: the last), both included.

        The columns are the same as in `stream_changes`. The result is empty if the table has no such commit yet.
        """
        if starting_version > self.version(name):
            return self.read_changes(name, self.version(name)).limit(0)
        ending = {} if ending_version is None else {"endingVersion": str(ending_version)}
        return self.changes(name, {"startingVersion": str(starting_version), **ending})

    def read_as_inserts(self, name: str, version: int | None, commit: int) -> DataFrame:
        """Reads a table's rows after the commit `version` like a change feed in which `commit` inserted all of them."""
        rows = {"current_rows": self._read_rows(name, version)}
        text = "SELECT *, 'insert' AS _change_type, :commit AS _commit_version FROM current_rows"
        return self.run(text, rows, commit=commit)

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
        return self._select_alert_events(rows) if name == alerts.TABLE else self._select_events(rows, name)

    def _select_alert_events(self, rows: DataFrame) -> DataFrame:
        """Selects the events of the stream `alerts` from its table or change feed, and keeps the feed's columns."""
        feed = [name for name in rows.columns if name.startswith("_")]
        return self.ask("alert_events", {"alert_rows": rows}).select(*alerts.FIELDS, "ingested_at", *feed)

    def version(self, name: str) -> int:
        """Returns the number of the last commit, 0 for a new table."""
        folder = self.log_folder(name)
        # Reading the log files avoids a Spark job, which would take longer than most callers' own work.
        commit = None if folder is None else find_last_commit(folder)
        if commit is not None:
            return commit
        return int(self.history(name, 1).select("version").head()[0])  # type: ignore[index]

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

    def ask(self, question: str, frames: Mapping[str, DataFrame] | None = None, /, **values: object) -> DataFrame:
        """Asks a question of `lookback.questions`; for the other arguments see `run`."""
        return self.run(read_question(question), frames, **values)

    def run(self, text: str, frames: Mapping[str, DataFrame] | None = None, /, **values: object) -> DataFrame:
        """Runs a text in the form of a question.

        Args:
            text: The text.
            frames: Rows that it names, besides tables of this place.
            **values: Its values: texts, numbers, booleans, aware times, lists of texts, or None.
        """
        return self._run(text, frames or {}, values, self._write_table)

    def _run(
        self,
        text: str,
        frames: Mapping[str, DataFrame],
        values: Mapping[str, object],
        write_table: Callable[[str], str],
    ) -> DataFrame:
        def escape(part: str) -> str:
            # Spark writes its own names for frames in place of names in braces.
            return part.replace("{", "{{").replace("}", "}}") if frames else part

        def write_rows(name: str) -> str:
            return f"{{{name}}}" if name in frames else escape(write_table(name))

        written = write_text(escape(text), write_rows, lambda name: escape(write_value(values[name])), frames)
        named: dict[str, Any] = dict(frames)
        return self.spark.sql(written, **named)

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


def _write_columns(stream: Stream) -> dict[str, str]:
    """Returns the declared columns of an external table as SQL, by name. Bytes that are not UTF-8 are replaced in texts."""
    fields = {name: quote_path(stream.find_path(name)) for name in stream.fields}
    for name, type_ in stream.fields.items():
        if type_.name == "string":
            fields[name] = f"make_valid_utf8({fields[name]})"
    return nest_parts(
        fields, lambda parts: f"named_struct({', '.join(f'{quote_text(name)}, {sql}' for name, sql in parts.items())})"
    )


def _write_is_event(stream: Stream) -> str:
    """Returns a condition: the row has an id and a time that Python can hold in every zone. It may be NULL."""
    event_id, time = (quote_path(stream.find_path(name)) for name in (stream.event_id, stream.event_time))
    first, last = (f"CAST('{day}' AS TIMESTAMP)" for day in (_FIRST_DAY, _LAST_DAY))
    return f"{event_id} IS NOT NULL AND {time} >= {first} AND {time} < {last}"

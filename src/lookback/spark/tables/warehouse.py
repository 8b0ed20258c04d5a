"""Reads the tables of a catalog over a SQL warehouse, and changes their rows, without Spark.

Rows are texts of SQL until they are read; the warehouse computes them and sends each as JSON. What it cannot do is
refused with a sentence.
"""

from __future__ import annotations

import atexit
import datetime as dt
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any, NoReturn, cast

import pyarrow as pa

from lookback.core.errors import RemoteError, SetupError
from lookback.core.values.times import parse_time, to_utc
from lookback.questions import Execute, Query, write_text
from lookback.spark.tables.frames import Frame, Session
from lookback.spark.tables.lakehouse import Tables
from lookback.spark.tables.schemas import PRODUCT_TABLES
from lookback.spark.tables.sqltexts import quote_name, write_value

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

    from lookback.core.streams.declaration import Stream

# Names of values. Texts are put together, so each value needs a name of its own.
_NAMES = count()
# Times to the microsecond, and NULLs, so that nothing is lost on the way.
_JSON = "map('ignoreNullFields', 'false', 'timeZone', 'UTC', 'timestampFormat', \"yyyy-MM-dd'T'HH:mm:ss.SSSSSS'Z'\")"
_NEEDS_SPARK = "this needs Spark, which --warehouse does without; leave it out"
_MISSING = ("TABLE_OR_VIEW_NOT_FOUND", "DELTA_MISSING_DELTA_TABLE")


class Warehouse:
    """Answers questions on a SQL warehouse, in place of a Spark session.

    It takes the function that runs a query, and the name of the user.
    """

    def __init__(self, execute: Execute, user: str) -> None:
        self.execute, self.user = execute, user
        self._session = Session()
        # End its threads before the interpreter ends.
        atexit.register(self._session.close)

    def __getattr__(self, name: str) -> NoReturn:
        raise SetupError(_NEEDS_SPARK)

    def fetch(self, query: Query) -> Frame:
        """Runs a query and returns its rows."""
        text = f"SELECT to_json(struct(t.*), {_JSON}) AS row, typeof(struct(t.*)) AS type FROM (\n{query.text}\n) t"
        found = self.execute(Query(text, query.values))
        type_ = str(found[0]["type"]) if found else "struct<none: int>"
        return self._session.read_json([str(row["row"]) for row in found], type_)

    def hold(self, rows: pa.Table) -> Frame:
        """Returns rows that are here already."""
        return self._session.read(rows)


class WarehouseRows:
    """The rows of a query, which the warehouse computes when they are read, with methods of Spark's data frames."""

    def __init__(self, warehouse: Warehouse, query: Query) -> None:
        self._warehouse, self.query = warehouse, query

    def __getattr__(self, name: str) -> NoReturn:
        raise SetupError(_NEEDS_SPARK)

    @cached_property
    def _fetched(self) -> Frame:
        return self._warehouse.fetch(self.query)

    @cached_property
    def columns(self) -> list[str]:
        """The names of the columns."""
        text, values = self.query
        return [str(row["col_name"]) for row in self._warehouse.execute(Query(f"DESCRIBE QUERY {text}", values))]

    def select(self, *names: str) -> WarehouseRows:
        """Selects columns."""
        return self.selectExpr(*map(quote_name, names))

    def selectExpr(self, *expressions: str) -> WarehouseRows:  # noqa: N802 - Spark's name
        """Selects expressions."""
        return self._wrap(f"SELECT {', '.join(expressions)} FROM", "")

    def limit(self, rows: int) -> WarehouseRows:
        """Returns at most this many rows."""
        return self._wrap("SELECT * FROM", f" LIMIT {rows:d}")

    def count(self) -> int:
        """Counts the rows."""
        (row,) = self._wrap("SELECT count(*) AS counted FROM", "").collect()
        return int(row[0])

    def isEmpty(self) -> bool:  # noqa: N802 - Spark's name
        """Returns whether it is empty."""
        return not self.limit(1).collect()

    def persist(self, level: object) -> WarehouseRows:
        """Returns itself: a warehouse keeps no rows."""
        return self

    def unpersist(self) -> WarehouseRows:
        """Returns itself."""
        return self

    def collect(self) -> list[Row]:
        """Returns the rows."""
        return self._fetched.collect()

    def toArrow(self) -> pa.Table:  # noqa: N802 - Spark's name
        """Returns the rows as a table of Arrow."""
        return self._fetched.toArrow()

    def toLocalIterator(self) -> Iterator[Row]:  # noqa: N802 - Spark's name
        """Yields the rows."""
        return self._fetched.toLocalIterator()

    def _wrap(self, before: str, after: str) -> WarehouseRows:
        text, values = self.query
        return WarehouseRows(self._warehouse, Query(f"{before} (\n{text}\n){after}", values))


class WarehouseTables(Tables):
    """The tables of a catalog, over a SQL warehouse. `spark` holds a `Warehouse` instead."""

    @property
    def current_user(self) -> str:
        """The user who is logged in to the workspace."""
        return self._warehouse.user

    @property
    def reaches_files(self) -> bool:
        """False: checkpoints are not read."""
        return False

    @property
    def files(self) -> str:
        """Raises SetupError."""
        raise SetupError(_NEEDS_SPARK)

    def exists(self, name: str) -> bool:
        """Returns whether the table exists. Raises RemoteError."""
        try:
            self._warehouse.execute(Query(f"DESCRIBE TABLE {self.identifier(name)}", {}))
        except RemoteError as error:
            if any(code in str(error) for code in _MISSING):
                return False
            raise
        return True

    def run(self, text: str, frames: Mapping[str, DataFrame] | None = None, /, **values: object) -> DataFrame:
        """Returns the rows of a text in the form of a question; see `Tables.run`."""
        return self._make_frame(*self._write_query(text, frames, values))

    def change(self, text: str, frames: Mapping[str, DataFrame] | None = None, /, **values: object) -> None:
        """Runs a MERGE or DELETE; see `Tables.change`."""
        self._warehouse.execute(self._write_query(text, frames, values))

    def _write_query(self, text: str, frames: Mapping[str, DataFrame] | None, values: Mapping[str, object]) -> Query:
        given = cast("Mapping[str, WarehouseRows]", frames or {})
        markers: dict[str, str | None] = {}
        for rows in given.values():
            markers |= rows.query.values

        def write_table(name: str) -> str:
            return f"(\n{given[name].query.text}\n) AS {name}" if name in given else self.identifier(name)

        return Query(write_text(text, write_table, lambda name: _write(values[name], markers), given), markers)

    def history(self, name: str, limit: int | None = None) -> DataFrame:
        """Reads the last commits, newest first: version, timestamp, operation, operationMetrics, userMetadata."""
        bound = "" if limit is None else f" LIMIT {limit:d}"
        rows = self._warehouse.execute(Query(f"DESCRIBE HISTORY {self.identifier(name)}{bound}", {}))
        texts = pa.map_(pa.string(), pa.string())
        columns = {
            "version": pa.array([int(row["version"] or 0) for row in rows], pa.int64()),
            "timestamp": pa.array([_read_time(row["timestamp"]) for row in rows], pa.timestamp("us", "UTC")),
            "operation": pa.array([row["operation"] for row in rows], pa.string()),
            "operationMetrics": pa.array([_read_map(row["operationMetrics"]) for row in rows], texts),
            "userMetadata": pa.array([row.get("userMetadata") for row in rows], pa.string()),
        }
        return cast("DataFrame", self._warehouse.hold(pa.table(columns)))

    def version(self, name: str) -> int:
        """Returns the number of the last commit."""
        return int(self.history(name, 1).collect()[0]["version"])

    def find_misfit(self, stream: Stream) -> str | None:
        """Returns None: the warehouse says itself which column is missing."""
        return None

    def append_rows(self, rows: Sequence[Any], name: str, user_metadata: str | None = None) -> None:
        """Appends `rows`, tuples or dicts, to one of Lookback's own tables in one commit, without `user_metadata`."""
        types = {field.name: field.dataType.simpleString() for field in PRODUCT_TABLES[name]}
        in_order = [tuple(map(row.get, types)) if isinstance(row, Mapping) else row for row in rows]
        tuples, markers = _write_tuples(in_order, types)
        text = f"INSERT INTO {self.identifier(name)} ({', '.join(map(quote_name, types))}) {tuples}"
        self._warehouse.execute(Query(text, markers))

    def make_rows(self, rows: Sequence[tuple[Any, ...]], types: Mapping[str, str]) -> DataFrame:
        """Makes a frame of rows, which are sent with each query that reads it; see `Tables.make_rows`."""
        tuples, markers = _write_tuples(rows, types)
        return self._make_frame(f"SELECT * FROM ({tuples}) AS t ({', '.join(map(quote_name, types))})", markers)

    @property
    def _warehouse(self) -> Warehouse:
        return cast("Warehouse", self.spark)

    def _read_rows(self, name: str, version: int | None = None) -> DataFrame:
        at = "" if version is None else f" VERSION AS OF {version:d}"
        return self._make_frame(f"SELECT * FROM {self.identifier(name)}{at}", {})

    def _read_changed_rows(self, name: str, options: Mapping[str, str]) -> DataFrame:
        first: object = options.get("startingVersion")
        begin = (
            write_value(to_utc(parse_time(options["startingTimestamp"]))) if first is None else f"{int(str(first)):d}"
        )
        end = f", {int(options['endingVersion']):d}" if "endingVersion" in options else ""
        return self._make_frame(
            f"SELECT * FROM table_changes({write_value(self.path_or_name(name))}, {begin}{end})", {}
        )

    def _make_frame(self, text: str, values: Mapping[str, str | None]) -> DataFrame:
        return cast("DataFrame", WarehouseRows(self._warehouse, Query(text, values)))


def open_warehouse(execute: Execute, user: str, catalog: str, schema: str) -> WarehouseTables:
    """Opens the tables of a catalog's schema over a warehouse."""
    return WarehouseTables.catalog(cast("SparkSession", Warehouse(execute, user)), catalog, schema)


def _write_tuples(rows: Sequence[tuple[Any, ...]], types: Mapping[str, str]) -> tuple[str, dict[str, str | None]]:
    """Returns a clause VALUES, with the values of its markers."""
    markers: dict[str, str | None] = {}
    tuples = (
        ", ".join(
            f"CAST({_write(value, markers)} AS {type_})" for value, type_ in zip(row, types.values(), strict=True)
        )
        for row in rows
    )
    return f"VALUES {', '.join(f'({row})' for row in tuples)}", markers


def _write(value: object, markers: dict[str, str | None]) -> str:
    """Returns the SQL for a value. A text goes apart from the SQL: it is added to `markers`."""
    if isinstance(value, Mapping):
        return f"map({', '.join(_write(each, markers) for pair in value.items() for each in pair)})"
    if isinstance(value, (list, tuple)):
        return f"CAST(array({', '.join(_write(each, markers) for each in value)}) AS ARRAY<STRING>)"
    if not isinstance(value, str):
        return write_value(value)
    name = f"value_{next(_NAMES)}"
    markers[name] = value
    return f":{name}"


def _read_time(text: str | None) -> dt.datetime:
    return to_utc(parse_time(str(text)))


def _read_map(text: str | None) -> list[tuple[str, str]] | None:
    return None if text is None else [(name, str(value)) for name, value in json.loads(text).items()]

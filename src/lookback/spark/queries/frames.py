"""PySpark's DataFrame API on DuckDB, for Arrow data."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import count
from typing import Any, Literal

import duckdb
import pyarrow as pa
import sqlglot
from pyspark.sql import Row

from lookback.spark.queries.columns import Column, NeedsSpark, as_column, col, quote

_JOINS: Mapping[str, Literal["inner", "left", "outer", "anti"]] = {
    "inner": "inner", "left": "left", "full_outer": "outer", "left_anti": "anti",
}  # fmt: skip
_BATCH_ROWS = 10_000
_NAMES = count()


class Session:
    """Runs queries in this process, like a Spark session. Close it before the interpreter ends.

    `opened` caches what readers have opened, for later queries.
    """

    def __init__(self) -> None:
        self.opened: dict[Any, Any] = {}
        # Never download extensions that the package does not include.
        self._connection = duckdb.connect(config={"autoinstall_known_extensions": "false"})
        # Keep standard output for answers.
        self._connection.execute("SET TimeZone = 'UTC'; SET enable_progress_bar = false")

    def __getattr__(self, name: str) -> Any:
        raise NeedsSpark(f"a session without Spark has no {name}")

    def read(self, data: Any) -> Frame:
        """Returns a frame of an Arrow table or dataset. A query reads only the columns and row groups that it needs."""
        return Frame(self._connection.from_arrow(data))

    def name(self, table: str, data: Any) -> None:
        """Gives an Arrow table or dataset a name for queries in SQL."""
        self._connection.register(table, data)

    def ask(self, text: str, values: Mapping[str, Any]) -> Frame:
        """Runs a query in Spark's dialect of SQL, with values for its :markers, on the named tables."""
        return Frame(self._connection.sql(_translate(text), params=dict(values)))

    def close(self) -> None:
        """Ends DuckDB and its threads."""
        self._connection.close()


class Frame:
    """The rows of a query, which runs when they are read."""

    def __init__(self, relation: duckdb.DuckDBPyRelation) -> None:
        # The two sides of a join must have different names.
        self._relation = relation.set_alias(f"frame_{next(_NAMES)}")

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(self._relation.columns)

    def __getitem__(self, name: str) -> Column:
        return col(name)

    def where(self, condition: Column | str) -> Frame:
        """Selects rows. A string must be SQL that means the same in both engines."""
        return Frame(self._relation.filter(condition if isinstance(condition, str) else condition.sql))

    def select(self, *columns: Column | str) -> Frame:
        """Selects columns; `*` selects all."""
        items = ("*" if each == "*" and isinstance(each, str) else as_column(each).item for each in columns)
        return Frame(self._relation.project(", ".join(items)))

    def withColumns(self, columns: Mapping[str, Column]) -> Frame:
        there = {name.lower(): name for name in self.columns}
        replaced = {there[name.lower()]: each for name, each in columns.items() if name.lower() in there}
        kept = [col(name) if name not in replaced else replaced[name].alias(name) for name in self.columns]
        return self.select(*kept, *(each.alias(name) for name, each in columns.items() if name.lower() not in there))

    def withColumn(self, name: str, column: Column) -> Frame:
        return self.withColumns({name: column})

    def drop(self, *names: str) -> Frame:
        return self.select(*(name for name in self.columns if name not in names))

    def join(self, other: Frame, on: Column | str | list[str], how: str = "inner") -> Frame:
        names = [on] if isinstance(on, str) else on
        condition = names.sql if isinstance(names, Column) else ", ".join(map(quote, names))
        return Frame(self._relation.join(other._relation, condition, how=_JOINS[how]))

    def groupBy(self, *columns: Column | str) -> Groups:
        return Groups(self._relation, [as_column(each) for each in columns])

    def agg(self, *figures: Column) -> Frame:
        return self.groupBy().agg(*figures)

    def orderBy(self, *columns: Column | str) -> Frame:
        orders = (each if each.sql.endswith((" FIRST", " LAST")) else each.asc() for each in map(as_column, columns))
        return Frame(self._relation.order(", ".join(each.sql for each in orders)))

    def limit(self, rows: int) -> Frame:
        return Frame(self._relation.limit(rows))

    def distinct(self) -> Frame:
        return Frame(self._relation.distinct())

    def count(self) -> int:
        (row,) = self.groupBy().count().collect()
        return int(row[0])

    def isEmpty(self) -> bool:
        return not self.limit(1).collect()

    def head(self) -> Row | None:
        return next(iter(self.limit(1).collect()), None)

    def collect(self) -> list[Row]:
        return list(self.toLocalIterator())

    def toArrow(self) -> pa.Table:
        return self._relation.to_arrow_table()

    def toLocalIterator(self) -> Iterator[Row]:
        """Yields rows like Spark's: maps as dicts, structs as rows. Times are in UTC, with their zone."""
        reader = self._relation.fetch_record_batch(_BATCH_ROWS)
        convert = _make_row_reader(reader.schema)
        for batch in reader:
            yield from map(convert, zip(*(column.to_pylist() for column in batch.columns), strict=True))


class Groups:
    """The rows of a frame, grouped by columns."""

    def __init__(self, relation: duckdb.DuckDBPyRelation, columns: list[Column]) -> None:
        self._relation, self._columns = relation, columns

    def agg(self, *figures: Column) -> Frame:
        """Returns a row per group: its columns, then the figures."""
        items = ", ".join(each.item for each in (*self._columns, *figures))
        return Frame(self._relation.aggregate(items, ", ".join(each.sql for each in self._columns)))

    def count(self) -> Frame:
        """Counts the rows of each group."""
        return self.agg(Column("count(*)", "count"))


@cache
def _translate(text: str) -> str:
    """Translates a query from Spark's dialect. A desk asks the same few questions again and again."""
    (translated,) = sqlglot.transpile(text, read="databricks", write="duckdb")
    return translated


def _make_row_reader(schema: pa.Schema) -> Callable[[tuple[Any, ...]], Row]:
    converters = [_find_converter(type_) for type_ in schema.types]
    make = Row(*schema.names)

    def convert(values: tuple[Any, ...]) -> Row:
        pairs = zip(converters, values, strict=True)
        return make(*(value if how is None or value is None else how(value) for how, value in pairs))

    return convert


def _find_converter(type_: pa.DataType) -> Callable[[Any], Any] | None:
    """Returns the conversion from Arrow's Python value to Spark's; None if they are the same."""
    if pa.types.is_timestamp(type_) and type_.tz is not None:
        return _to_utc
    if pa.types.is_map(type_):
        inner = _find_converter(type_.item_type)
        return (
            dict if inner is None else lambda value: {key: None if each is None else inner(each) for key, each in value}
        )
    if pa.types.is_struct(type_):
        convert = _make_row_reader(pa.schema(list(type_)))
        return lambda value: convert(tuple(value.values()))
    return None


def _to_utc(time: dt.datetime) -> dt.datetime:
    return time.astimezone(dt.timezone.utc)

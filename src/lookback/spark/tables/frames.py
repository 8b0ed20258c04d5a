"""The results of questions in SQL, answered by DuckDB from Arrow data, with the reading methods of Spark's data frames."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import count
from typing import Any

import duckdb
import pyarrow as pa
import sqlglot
from pyspark.sql import Row
from sqlglot import exp

_BATCH_ROWS = 10_000
_NAMES = count()
# Functions of Spark that DuckDB lacks. DuckDB reads only valid UTF-8.
_MACROS = "CREATE MACRO make_valid_utf8(text) AS text; CREATE MACRO timestamp_micros(us) AS make_timestamptz(us)"


class NeedsSpark(Exception):
    """A question or a table that only Spark can be trusted to answer or read correctly."""


class Session:
    """Answers questions in this process, in place of a Spark session. Close it before the interpreter ends.

    `opened` caches what readers have opened, for later questions.
    """

    def __init__(self) -> None:
        self.opened: dict[Any, Any] = {}
        # Never download extensions that the package does not include.
        self._connection = duckdb.connect(config={"autoinstall_known_extensions": "false"})
        # Keep standard output for answers.
        self._connection.execute(f"SET TimeZone = 'UTC'; SET enable_progress_bar = false; {_MACROS}")

    def __getattr__(self, name: str) -> Any:
        raise NeedsSpark(f"a session without Spark has no {name}")

    def read(self, data: Any) -> Frame:
        """Returns the rows of an Arrow table or dataset. A question reads only the columns and row groups it needs."""
        return Frame(self._connection.from_arrow(data))

    def read_json(self, rows: Sequence[str], type_: str) -> Frame:
        """Returns the rows of JSON objects, whose type is a struct as Spark writes it."""
        # As texts, numbers keep all their digits.
        texts = [json.dumps(json.loads(row, parse_float=str, parse_int=str)) for row in rows]
        written = exp.DataType.build(type_, dialect="databricks").sql("duckdb")
        read = self._connection.from_arrow(pa.table({"row": pa.array(texts, pa.string())}))
        return Frame(read.project(f"unnest(CAST(row::JSON AS {written}))"))

    def name(self, table: str, data: Any) -> None:
        """Gives an Arrow table or dataset a name in questions."""
        self._connection.register(table, data)

    def ask(self, text: str, values: Mapping[str, Any]) -> Frame:
        """Runs a query in Spark's dialect of SQL, with values for its :markers, on named tables and frames."""
        return Frame(self._connection.sql(_translate(text), params=dict(values)))

    def close(self) -> None:
        """Ends DuckDB and its threads."""
        self._connection.close()


class Frame:
    """The rows of an answer, which DuckDB computes when they are read."""

    def __init__(self, relation: duckdb.DuckDBPyRelation) -> None:
        self._relation, self._name = relation, ""

    def __getattr__(self, name: str) -> Any:
        raise NeedsSpark(f"rows that are read without Spark have no {name}")

    @property
    def name(self) -> str:
        """The name of these rows in other questions."""
        if not self._name:
            self._name = f"frame_{next(_NAMES)}"
            self._relation.create_view(self._name)
        return self._name

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(self._relation.columns)

    def select(self, *names: str) -> Frame:
        """Selects columns."""
        return Frame(self._relation.project(", ".join('"' + name.replace('"', '""') + '"' for name in names)))

    def selectExpr(self, *expressions: str) -> Frame:
        """Selects expressions in Spark's dialect of SQL."""
        return Frame(self._relation.project(_translate(f"SELECT {', '.join(expressions)}").removeprefix("SELECT ")))

    def limit(self, rows: int) -> Frame:
        return Frame(self._relation.limit(rows))

    def count(self) -> int:
        (row,) = self._relation.aggregate("count(*)").fetchall()
        return int(row[0])

    def isEmpty(self) -> bool:
        return not self.limit(1).collect()

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


@lru_cache(maxsize=200)
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

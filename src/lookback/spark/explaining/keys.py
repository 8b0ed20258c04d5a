"""Keys of events in Spark: the columns that a key has, or that the rules' own language computes of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StringType, StructField, StructType

from lookback.core.rules.keys import KeyPart
from lookback.core.streams.events import evaluate_key
from lookback.core.values.columns import from_arrow, normalize_zeros, to_text
from lookback.spark.tables.sqltexts import quote_field, quote_name, write_plain_name

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from lookback.core.streams.declaration import Stream


def add_texts(rows: DataFrame, stream: Stream, key: Sequence[KeyPart]) -> DataFrame:
    """Adds a column with the texts of each expression of a key; `list_values` finds it. Errors and NULLs are NULL.

    rows: have the fields of the stream. Spark's own SQL would stop at the first error.
    """
    sqls = {_name_column(at): part.sql for at, part in enumerate(key) if part.sql}
    if not sqls:
        return rows
    read = sorted(frozenset[str]().union(*(part.fields for part in key)))
    plain = rows.toDF(*map(write_plain_name, rows.columns))
    schema = StructType([*plain.schema.fields, *(StructField(name, StringType()) for name in sqls)])
    return plain.mapInArrow(_Writing(stream, sqls, tuple(read)), schema).toDF(*rows.columns, *sqls)


def list_values(key: Sequence[KeyPart]) -> dict[str, Column]:
    """Lists the columns with the values of a key, or their texts, by the names of its entries."""
    return {part.name: column for part, column in zip(key, list_columns(key), strict=True)}


def list_columns(key: Sequence[KeyPart]) -> list[Column]:
    """Lists the columns with the values of the entries of a key, or their texts, in their order."""
    return [F.col(_name_column(at) if part.sql else quote_field(part.column)) for at, part in enumerate(key)]


def write_key(key: Sequence[KeyPart], values: Mapping[str, Column]) -> Column:
    """Writes the values of a key, or their texts, by the names of its entries, as a text that is equal for equal keys."""
    # Both are cast from the type, so equal values have equal texts.
    texts = [values[part.name].cast(str(part.type)).cast("string").alias(part.name) for part in key]
    return F.to_json(F.struct(*texts), {"ignoreNullFields": "false"}) if texts else F.lit("")


def write_own_key(key: Sequence[KeyPart], fields: Sequence[str]) -> Column:
    """Writes, as `write_key` does, the key that these fields make of an event, each in the place of an entry.

    The events have the columns of `add_texts`.
    """
    own = list_values(key)
    pairs = zip(key, fields, strict=True)
    values = {part.name: own[part.name] if part.column == name else F.col(quote_field(name)) for part, name in pairs}
    return write_key(key, values)


def select_events(
    rows: DataFrame, stream: Stream, key: Sequence[KeyPart], texts: Mapping[str, str | None]
) -> DataFrame:
    """Selects the events whose key has these texts."""
    with_texts = add_texts(rows, stream, key)
    own = write_key(key, {part.name: F.lit(texts.get(part.name)) for part in key})
    return with_texts.where(write_key(key, list_values(key)) == own).select(*map(quote_name, rows.columns))


def _read_field(batch: pa.RecordBatch, name: str) -> pa.Array[Any]:
    """Reads a field, which is a column of its own or a part of a struct."""
    if (plain := write_plain_name(name)) in batch.schema.names:
        return batch.column(plain)
    column, *parts = name.split(".")
    return pc.struct_field(batch.column(column), parts)


def _name_column(at: int) -> str:
    return f"__key_{at}"


@dataclass(frozen=True)
class _Writing:
    """Writes the texts of expressions, given as canonical SQL by the names of their columns, beside those of batches."""

    stream: Stream
    sqls: Mapping[str, str]
    read: tuple[str, ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        types = self.stream.fields
        for batch in batches:
            columns = {name: normalize_zeros(from_arrow(_read_field(batch, name), types[name])) for name in self.read}
            found = [evaluate_key(sql, columns, batch.num_rows).to_list() for sql in self.sqls.values()]
            texts = [pa.array([to_text(value) for value in values], pa.string()) for values in found]
            names = [*batch.schema.names, *self.sqls]
            yield pa.RecordBatch.from_arrays([*batch.columns, *texts], names=names)

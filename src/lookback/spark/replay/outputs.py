"""Writes the rows that a replay computed to a new place, never over anything."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from lookback.core.errors import SetupError
from lookback.places import open_place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DELTA, PARQUET = "delta", "parquet"
_TABLE = re.compile(r"\w+(\.\w+){1,2}", re.ASCII)


def require_new(spark: SparkSession, place: str, format: str = DELTA) -> None:
    """Raises SetupError if there is something at `place` already; see `write_new`."""
    if _is_table(place, format):
        if spark.catalog.tableExists(place):
            raise SetupError(f"--out: table {place} already exists; name another one")
        return
    folder = open_place(place, spark)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SetupError(f"--out: {place} is not empty; name a new or empty folder")


def write_new(rows: DataFrame, place: str, format: str = DELTA) -> None:
    """Writes rows to a new place.

    Args:
        rows: The rows.
        place: A new or empty folder; for Delta also catalog.schema.table for a new table.
        format: delta or parquet.

    Raises:
        SetupError: If the table exists or the folder is not empty.
    """
    require_new(rows.sparkSession, place, format)
    writer = rows.write.format(format).mode("error")
    if _is_table(place, format):
        writer.saveAsTable(place)
        return
    # Spark refuses to write Parquet to a folder that exists, even if it is empty, unless it may append.
    writer.mode("append").save(str(open_place(place, rows.sparkSession)))


def count_written(spark: SparkSession, place: str, format: str = DELTA) -> int:
    """Counts the rows at a place that `write_new` wrote."""
    if _is_table(place, format):
        return spark.table(place).count()
    return spark.read.format(format).load(str(open_place(place, spark))).count()


def _is_table(place: str, format: str) -> bool:
    return format == DELTA and _TABLE.fullmatch(place) is not None

"""Caches the checked rows of a batch, counts them and gives each row its position."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pyspark import StorageLevel
from pyspark.sql import functions as F  # noqa: N812

from lookback.core.streams.fields import POSITION
from lookback.spark.ingest.fields import ASSUMED, BLOCK, NO_TIME, NO_ZONE, REASON, ROW, ROW_BITS, UNIT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from lookback.core.streams.declaration import Stream


class BatchFigures(NamedTuple):
    """Figures of a batch. Times are in microseconds; `ids` counts distinct ids. Bounds are None if no row is usable."""

    usable: int
    rejected: int
    first_time: int
    last_time: int
    first_id: int | str
    last_id: int | str
    ids: int
    without_zone: int
    without_time: int


class CheckedBatch(NamedTuple):
    """Checked rows, cached, and their figures."""

    rows: DataFrame
    figures: BatchFigures


def cache_batch(checked: DataFrame, stream: Stream) -> CheckedBatch:
    """Caches and counts checked rows (see `fields`), which reads all of them."""
    rows = checked.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        return CheckedBatch(rows, _count_batch(rows, stream))
    except BaseException:
        rows.unpersist()
        raise


def _count_batch(rows: DataFrame, stream: Stream) -> BatchFigures:
    usable = F.col(REASON).isNull()
    time_, id_ = F.when(usable, F.unix_micros(stream.event_time)), F.when(usable, F.col(stream.event_id))
    figures = (F.min(time_), F.max(time_), F.min(id_), F.max(id_), F.count_distinct(id_))
    assumed = [F.count_if(usable & (F.col(ASSUMED) == part)) for part in (NO_ZONE, NO_TIME)]
    row = rows.select(F.count_if(usable), F.count_if(~usable), *figures, *assumed).head()
    assert row is not None
    return BatchFigures(*row)


def add_positions(rows: DataFrame) -> DataFrame:
    """Adds POSITION: the number of the row's UNIT in this batch, times 2^ROW_BITS, plus the row's number in the UNIT.

    Both numbers start at 0, in the order of UNIT, BLOCK and ROW. They do not depend on how Spark splits files among
    tasks.
    """
    blocks = rows.where(F.col(UNIT).isNotNull()).groupBy(UNIT, BLOCK).agg(F.min(ROW), F.max(ROW)).collect()
    starts, unit, number, row = list[tuple[str, int, int]](), None, -1, 0
    for each, block, first, last in sorted(blocks):
        if each != unit:
            unit, number, row = each, number + 1, 0
        starts.append((each, block, (number << ROW_BITS) + row - first))
        row += last - first + 1
    begins = rows.sparkSession.createDataFrame(starts, f"{UNIT} string, {BLOCK} bigint, __start bigint")
    placed = rows.join(F.broadcast(begins), [UNIT, BLOCK], "left")
    return placed.withColumn(POSITION, F.col(ROW) + F.col("__start")).drop("__start")

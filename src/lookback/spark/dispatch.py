"""Dispatch: which shard needs which event. Runs before the shuffle and packs what a shard gets into blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from lookback.core.arrival import marks_of, split_future
from lookback.core.blocks import COMMIT, pack_events
from lookback.core.columns import from_arrow
from lookback.core.events import Events
from lookback.core.measuring import group_keys
from lookback.core.rulebook import Coverage
from lookback.core.streams import Stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from lookback.core.alerts import LateEvent

EVENTS, RULE = "events", "rule"
# What goes to the stateful operator, and what it answers with: few rows, each large.
BLOCKS = StructType(
    [
        StructField("shard", StringType(), nullable=False),
        StructField("kind", StringType(), nullable=False),
        StructField("payload", BinaryType(), nullable=False),
    ]
)
_INSERTED, _DELETED = "insert", "delete"
# Rows that are packed at once; bounds the memory of the worker.
_CHUNK_ROWS = 200_000


def shard_labels(spark: SparkSession, shards: int) -> list[str]:
    """A label per shard, such that Spark's shuffle puts shard i on partition i of `shards`."""
    column = F.col("label")
    candidates = spark.range(64 * shards + 64).select(F.concat(F.lit("s"), F.col("id").cast("string")).alias("label"))
    rows = candidates.select(column, F.pmod(F.hash(column), F.lit(shards)).alias("partition")).collect()
    labels: dict[int, str] = {}
    for row in rows:
        labels.setdefault(row["partition"], row["label"])
    return [labels[partition] for partition in range(shards)]


def event_blocks(changes: DataFrame, stream: Stream, coverage: Coverage, labels: list[str]) -> DataFrame:
    """Blocks of the events of a change feed. The result has no watermark column, so Spark drops no late row."""
    time, committed = F.col(stream.event_time), F.col("_commit_timestamp")
    # Spark's watermark only wakes timers; an event from the future must not push it.
    bound = committed + F.make_dt_interval(secs=F.lit(stream.max_future / 1_000_000).cast("decimal(18,6)"))
    fields = sorted({stream.event_id, stream.event_time, *coverage.fields})
    rows = (
        changes.where(F.col("_change_type").isin(_INSERTED, _DELETED))
        .withColumn("_wakes", F.when(time <= bound, time))
        .withWatermark("_wakes", f"{stream.max_out_of_orderness} microseconds")
        .select(*fields, "_change_type", COMMIT, "_commit_timestamp", "_wakes")
    )
    return rows.mapInArrow(Dispatch(stream, coverage, tuple(labels)), BLOCKS)


def rule_blocks(changes: DataFrame, labels: list[str]) -> DataFrame:
    """Every change of the rules table, once for each shard."""
    change = F.when(F.col("_change_type") == "update_postimage", "update").otherwise(F.col("_change_type"))
    row = F.struct(change.alias("change"), F.col(COMMIT).alias("commit"), "rule_id", "version", "status", "document")
    return changes.where(F.col("_change_type").isin(_INSERTED, "update_postimage", _DELETED)).select(
        F.explode(F.array(*map(F.lit, labels))).alias("shard"),
        F.lit(RULE).alias("kind"),
        F.to_json(row, {"ignoreNullFields": "false"}).cast("binary").alias("payload"),
    )


@dataclass(frozen=True)
class Dispatch:
    """Packs record batches of events into a block per shard; every shard is told the marks of all commits."""

    stream: Stream
    coverage: Coverage
    labels: tuple[str, ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The blocks of `batches`, as Spark's mapInArrow calls it."""
        for chunk in _chunks(batches):
            kinds = chunk.column("_change_type").to_numpy(zero_copy_only=False)
            for kind in (_INSERTED, _DELETED):
                at = np.flatnonzero(kinds == kind)
                if len(at):
                    yield self._blocks(chunk if len(at) == len(kinds) else chunk.take(pa.array(at)), kind)

    def _blocks(self, chunk: pa.RecordBatch, kind: str) -> pa.RecordBatch:
        fields = [name for name in chunk.schema.names if name in self.stream.fields]
        sent = chunk.select([*fields, COMMIT])
        needed = {self.stream.event_id, self.stream.event_time, *(n for g in self.coverage.grouping_sets for n in g)}
        commits = chunk.column(COMMIT).to_numpy()
        columns = {name: from_arrow(chunk.column(name), self.stream.fields[name]) for name in sorted(needed)}
        events = Events(columns, commits, self.stream.event_id, self.stream.event_time)
        header: dict[str, Any] = {"deleted": kind == _DELETED, "rows": len(commits)}
        kept: np.ndarray[Any, Any] | None = None
        future: list[LateEvent] = []
        if kind == _INSERTED:
            committed = from_arrow(chunk.column("_commit_timestamp"), self.stream.fields[self.stream.event_time]).values
            kept_events, future = split_future(events, committed, self.stream)
            if future:
                kept = events.times - self.stream.max_future <= committed
                events, sent = kept_events, sent.filter(pa.array(kept))
            header["marks"] = list(marks_of(events, commits).items())
        else:
            header["marks"] = [(int(commit), None) for commit in np.unique(commits)]
        header["future"] = [{**asdict(late), "event_time": late.event_time.isoformat()} for late in future]
        payloads = [pack_events(part, header) for part in self._parts(events, sent)]
        rows = {"shard": list(self.labels), "kind": [EVENTS] * len(payloads), "payload": payloads}
        return pa.RecordBatch.from_pydict(rows, schema=_ARROW_BLOCKS)

    def _parts(self, events: Events, sent: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """What of a chunk each shard gets: the events of which some grouping set puts the key there."""
        shards = len(self.labels)
        homes = [group_keys(group_by, events).shard(shards) for group_by in sorted(self.coverage.grouping_sets)]
        for shard in range(shards):
            if not homes:
                yield sent.slice(0, 0)
                continue
            here = reduce(or_, (home == shard for home in homes))
            yield sent if here.all() else sent.filter(pa.array(here))


_ARROW_BLOCKS = pa.schema(
    [
        pa.field("shard", pa.string(), False),
        pa.field("kind", pa.string(), False),
        pa.field("payload", pa.binary(), False),
    ]
)


def _chunks(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows of the batches in larger batches."""
    waiting: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        waiting.append(batch)
        rows += batch.num_rows
        if rows >= _CHUNK_ROWS:
            yield from pa.Table.from_batches(waiting).combine_chunks().to_batches()
            waiting, rows = [], 0
    if rows:
        yield from pa.Table.from_batches(waiting).combine_chunks().to_batches()

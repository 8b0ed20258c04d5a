"""Has Spark run the tasks of a replay, keeps their answers on its disks, and reads them by kind."""

from __future__ import annotations

import json
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from lookback.core.rules.account import Account, Taken
from lookback.core.streams.blocks import TRIED, unpack_failures, unpack_table
from lookback.core.values import types
from lookback.core.values.columns import arrow_type
from lookback.spark.batches.shard import ALERTS, FAILURES, LATE
from lookback.spark.platform.faults import find_setup_error
from lookback.spark.platform.session import is_connect
from lookback.spark.tables.schemas import ALERTS as ALERTS_COLUMNS
from lookback.spark.tables.schemas import LATE_EVENTS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

# The size of an Arrow batch between Spark and a task. Its rows are blocks, so a limit on their number is not enough.
_BATCH_BYTES = str(64 << 20)
_BYTES_SETTING = "spark.sql.execution.arrow.maxBytesPerBatch"
_ANSWERS = StructType(
    [StructField("kind", StringType(), nullable=False), StructField("payload", BinaryType(), nullable=False)]
)
_ALERTS_ROWS = StructType([each for each in ALERTS_COLUMNS if each.name != "decided_at"])
_TRIED_ROWS = StructType([*_ALERTS_ROWS, StructField(TRIED, IntegerType())])
_FLAGGED_ROWS = StructType(
    [
        StructField("group", IntegerType()),
        *(each for each in ALERTS_COLUMNS if each.name in ("key", "event_id", "event_time", "arrival")),
        StructField("bits", ArrayType(LongType())),
    ]
)
# The kind of answers with flagged events.
FLAGGED = "flagged"
# How the kind of answers with measured events begins; the number of their group follows.
MEASURED = "measured-"
# The kind of answers with counts of events, see `ReplayPlan.account`.
ACCOUNT = "account"
# The kind of answers with a page of the final state, after the label of its shard.
STATE = "state"
LABEL_BYTES = 32
_PROGRESS_SECONDS = 2.0


class ShardAnswers:
    """The answers of the shards, which Spark keeps on its disks until `close`.

    Attributes:
        facts: All answers except alerts, flagged, measured and late events, and the state.
        shards: The number of shards.
    """

    def __init__(
        self,
        blocks: DataFrame,
        judge: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]],
        shards: int,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.shards = shards
        spark = blocks.sparkSession
        with _show_progress(spark, progress):
            # To bound the bytes of a batch, Spark measures every row, which takes as long as reading an event. So only
            # batches of blocks are bounded, which are few.
            kept = _keep_on_disk(blocks)
            try:
                with _bounded_batches(spark):
                    rows = blocks.mapInArrow(judge, _ANSWERS)
                    # Serverless compute cannot cache rows, and judges again at each read.
                    self._rows = rows.persist(StorageLevel.DISK_ONLY) if kept else rows
                    self.facts = self._collect_facts()
            finally:
                if kept:
                    blocks.unpersist()

    def _collect_facts(self) -> list[Row]:
        try:
            is_fact = ~F.col("kind").isin(ALERTS, LATE, FLAGGED, STATE) & ~F.col("kind").startswith(MEASURED)
            return self._rows.where(is_fact).collect()
        except BaseException as error:
            # After a failure or a cancellation, the caller has no object to close.
            self.close()
            if isinstance(error, PySparkException) and (setup := find_setup_error(error)):
                raise setup from error
            raise

    def read_alerts(self) -> DataFrame:
        """Reads the alert rows, with the columns of the table except decided_at."""
        return self._unpack(ALERTS, _ALERTS_ROWS)

    def read_tried_alerts(self) -> DataFrame:
        """Reads the alert rows with one more column: the number of the candidate (see `ReplayPlan.tried`)."""
        return self._unpack(ALERTS, _TRIED_ROWS)

    def read_flagged(self) -> DataFrame:
        """Reads the events flagged by candidates that write no alerts."""
        return self._unpack(FLAGGED, _FLAGGED_ROWS)

    def read_measured(self, group: int, columns: Mapping[str, object]) -> DataFrame:
        """Reads the events that the rules of a group measured.

        Args:
            group: The number of the group.
            columns: The type of each column by name: Spark's name of it, or that of a measure, which may be missing
                where its rule measured nothing.
        """
        schema = StructType([StructField(name, DataType.fromDDL(str(type_))) for name, type_ in columns.items()])
        measured = {name: arrow_type(type_) for name, type_ in columns.items() if isinstance(type_, types.DataType)}
        return self._unpack(f"{MEASURED}{group}", schema, measured)

    def read_late(self) -> DataFrame:
        """Reads the late_events rows of all shards; several shards may have a row for the same event."""
        return self._unpack(LATE, LATE_EVENTS)

    def read_state(self) -> DataFrame:
        """Reads the pages of the final state, with the columns shard and payload."""
        # The label of the shard is short and padded with zero bytes.
        rows = self._rows.where(F.col("kind") == STATE)
        label = F.substring_index(F.col("payload").substr(1, LABEL_BYTES).cast("string"), "\0", 1)
        return rows.select(label.alias("shard"), F.substring("payload", LABEL_BYTES + 1, 2**31 - 1).alias("payload"))

    def list_payloads(self, kind: str) -> list[bytes]:
        """Lists the facts of a kind."""
        return [bytes(row["payload"]) for row in self.facts if row["kind"] == kind]

    def find_missing(self, account: Account) -> Counter[tuple[str, int]]:
        """Counts the events that a version wants and no shard judged, by rule_id and version; skips broken versions."""
        wanted, taken = Counter[tuple[str, int]](), Counter[Taken]()
        for counts in map(json.loads, self.list_payloads(ACCOUNT)):
            for condition, span, count in counts["wanted"]:
                wanted[condition, span] += count
            for *each, count in counts["taken"]:
                taken[tuple(each)] += count
        failures = (each for payload in self.list_payloads(FAILURES) for each in unpack_failures(payload))
        broken = {(each.rule_id, each.version) for each in failures if each.reason}
        return account.find_missing(wanted, {each: count for each, count in taken.items() if each[:2] not in broken})

    def close(self) -> None:
        """Frees the rows; you cannot read them afterwards."""
        with suppress(PySparkException):
            self._rows.unpersist()

    def _unpack(self, kind: str, columns: StructType, optional: Mapping[str, pa.DataType] | None = None) -> DataFrame:
        rows = self._rows.where(F.col("kind") == kind).select("payload")
        return rows.mapInArrow(_Unpack(tuple(columns.names), optional or {}), columns)


@dataclass(frozen=True)
class _Unpack:
    """Reads the tables of payloads. A column in `optional` that a table lacks is NULL."""

    names: tuple[str, ...]
    optional: Mapping[str, pa.DataType]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for payload in batch["payload"]:
                table = unpack_table(payload.as_py())
                for name in self.optional.keys() - table.column_names:
                    table = table.append_column(name, pa.nulls(len(table), self.optional[name]))
                yield from table.select(self.names).to_batches()


def _keep_on_disk(blocks: DataFrame) -> bool:
    """Computes blocks and keeps them on Spark's disks. Returns False if Spark cannot, as on serverless compute."""
    try:
        blocks.persist(StorageLevel.DISK_ONLY)
    except PySparkException:
        return False
    try:
        blocks.count()
    except BaseException:
        blocks.unpersist()
        raise
    return True


@contextmanager
def _bounded_batches(spark: SparkSession) -> Iterator[None]:
    """Bounds the bytes of the batches that Spark hands to a task, within the `with` block."""
    before = spark.conf.get(_BYTES_SETTING, None)
    with suppress(PySparkException):
        spark.conf.set(_BYTES_SETTING, _BATCH_BYTES)
    try:
        yield
    finally:
        with suppress(PySparkException):
            spark.conf.unset(_BYTES_SETTING) if before is None else spark.conf.set(_BYTES_SETTING, before)


@contextmanager
def _show_progress(spark: SparkSession, show: Callable[[str], None] | None) -> Iterator[None]:
    """Shows the progress of the jobs in the `with` block every few seconds; Spark Connect does not support this."""
    if show is None or is_connect(spark):
        yield
        return
    group, done = f"backtest-{uuid.uuid4().hex}", threading.Event()
    context = spark.sparkContext
    context.setJobGroup(group, "backtest", interruptOnCancel=True)

    def watch() -> None:
        tracker, last = context.statusTracker(), ""
        while not done.wait(_PROGRESS_SECONDS):
            stages = [
                stage
                for job in tracker.getJobIdsForGroup(group)
                for number in getattr(tracker.getJobInfo(job), "stageIds", ())
                if (stage := tracker.getStageInfo(number)) is not None
            ]
            tasks = sum(stage.numTasks for stage in stages)
            line = f"{sum(stage.numCompletedTasks for stage in stages)} of {tasks} parts of the events read and judged"
            if tasks and line != last:
                show(line)
                last = line

    thread = threading.Thread(target=watch, name="backtest-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        context.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]

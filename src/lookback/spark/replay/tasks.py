"""Divides the keys of a replay among Spark tasks, and judges the events of each.

Events are packed into blocks as in the stream, one block per shard and span of commits. The task of a shard judges its
spans in order, with its state in memory.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
from pyspark import StorageLevel
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import ArrayType, BinaryType, IntegerType, LongType, StringType, StructField, StructType

from lookback.core.engine.batch import Batch
from lookback.core.engine.evaluation import Evaluator
from lookback.core.engine.output import Output
from lookback.core.engine.schedule import WaitingChange, Warmed, judge_batch, open_warmed
from lookback.core.engine.warming import WindowHistory
from lookback.core.judging.segment import merge_failures
from lookback.core.rules.account import Account, Taken
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.compiled import CompiledRule
from lookback.core.rules.coverage import Coverage, find_coverage
from lookback.core.rules.rulebook import RuleBook
from lookback.core.state.shard import ShardState
from lookback.core.streams.alerts import MAX_EVIDENCE_IDS, Alert, AlertOrder, LateEvent, compute_alert_id
from lookback.core.streams.arrival import merge_marks
from lookback.core.streams.blocks import (
    COMMIT,
    TRIED,
    OwnCount,
    pack_alerts,
    pack_failures,
    pack_flagged,
    pack_late,
    require_own,
    unpack_events,
    unpack_failures,
    unpack_table,
)
from lookback.core.streams.declaration import Stream
from lookback.core.streams.declarations import Declarations
from lookback.core.streams.events import Events
from lookback.core.streams.flagged import FlagPlace
from lookback.core.values.lists import ListSource
from lookback.core.values.times import parse_time
from lookback.spark.batches.dispatch import (
    DELETED,
    INSERTED,
    KIND,
    BlockBuilder,
    find_shard_labels,
    merge_batches,
    select_changes,
    take_rows,
)
from lookback.spark.batches.shard import ALERTS, FAILURES, LATE, LOG, pause_collector
from lookback.spark.checkpoints.histories import name_part
from lookback.spark.checkpoints.parcels import Parcels
from lookback.spark.following.listfeed import ReplayedLists
from lookback.spark.platform.faults import find_setup_error
from lookback.spark.platform.session import count_cores, is_connect
from lookback.spark.tables.schemas import ALERTS as ALERTS_COLUMNS
from lookback.spark.tables.schemas import LATE_EVENTS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

    from lookback.spark.replay.saved import SavedState

_T = TypeVar("_T")
# The number of events per shard. It keeps a task's state and blocks small: below 1 GB with 100 rules. Smaller shards
# cost more, because rules with several groupings send an event to several shards.
_SHARD_EVENTS = 12_000_000
_MAX_SHARDS = 400
# The maximum number of alerts or late events in one row of the answers.
_ROWS_IN_BLOCK = 10_000
# The size of an Arrow batch between Spark and a task. Its rows are blocks, so a limit on their number is not enough.
_BATCH_BYTES = str(64 << 20)
_BYTES_SETTING = "spark.sql.execution.arrow.maxBytesPerBatch"
_SPAN = "span"
_ANSWERS = StructType(
    [StructField("kind", StringType(), nullable=False), StructField("payload", BinaryType(), nullable=False)]
)
_SPAN_BLOCKS = StructType(
    [
        StructField("shard", StringType(), nullable=False),
        StructField(_SPAN, IntegerType(), nullable=False),
        StructField("payload", BinaryType(), nullable=False),
    ]
)
_ARROW_BLOCKS = pa.schema(
    [pa.field("shard", pa.string(), False), pa.field(_SPAN, pa.int32(), False), pa.field("payload", pa.binary(), False)]
)
_ARROW_ANSWERS = pa.schema([pa.field("kind", pa.string(), False), pa.field("payload", pa.binary(), False)])
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
# The kind of answers with counts of events, see `ReplayPlan.account`.
ACCOUNT = "account"
# The kind of answers with a page of the final state, after the label of its shard.
STATE = "state"
_LABEL_BYTES = 32
# The span of blocks that are pages of a saved state.
_BEFORE = -1
_PROGRESS_SECONDS = 2.0
# On Linux this nice value gives a tenth of the CPU weight of a normal process; see sched(7).
_LOW_PRIORITY = 10


@dataclass(frozen=True)
class ReplayPlan:
    """The rules of a replay and their changes.

    Attributes:
        rules: All rules that may come into force.
        first: The changes before the first commit.
        waiting: The changes that take effect after a later commit.
        streams: All declared streams by name.
        erases: True counts a deleted event until it is deleted, as in the stream. False never counts it, though it
            moves the watermark.
        tried: The candidates of a backtest, by the id under which each is judged. If empty, rules keep their own ids.
        flagging: See `Evaluator`.
        max_evidence: See `Evaluator`.
        keeps_state: Whether the answers include the final state.
        declarations: The declarations by which the stream was judged; None: the current one.
        high: The highest event time before the commits that are read, in microseconds; None for none.
        lists: The lists that rules name, by commit.
        warmed: The versions that came into force with the history of their windows.
        history: Where each shard stores the rows that it gathered for the first rule.
        account: The counts to take of all events and of the events that shards take, to find events that no shard took.
    """

    rules: Sequence[CompiledRule]
    first: Sequence[RuleChange]
    waiting: Sequence[WaitingChange]
    streams: Mapping[str, Stream]
    erases: bool = False
    tried: Mapping[str, Tried] = field(default_factory=dict)
    flagging: Mapping[str, FlagPlace] = field(default_factory=dict)
    max_evidence: int = MAX_EVIDENCE_IDS
    keeps_state: bool = False
    declarations: Declarations | None = None
    high: int | None = None
    lists: ListSource = field(default_factory=ReplayedLists)
    warmed: Sequence[Warmed] = ()
    history: HistoryPlace | None = None
    account: Account | None = None

    @property
    def gives_way(self) -> bool:
        """True if the replay runs beside a stream, which has priority."""
        return self.history is not None and self.history.gives_way


class HistoryPlace(NamedTuple):
    """The parcels of a history and its name there. If `gives_way` is true, the replay leaves a core to the stream."""

    parcels: Parcels
    name: str
    gives_way: bool


class Tried(NamedTuple):
    """A candidate of a backtest: its number and its rule's id. Versions and variants of one rule share this id."""

    number: int
    rule_id: str


class ShardAnswers:
    """The answers of the shards, which Spark keeps on its disks until `close`.

    Attributes:
        facts: All answers except alerts, flagged events, late events and the state.
        shards: The number of shards.
    """

    def __init__(
        self, blocks: DataFrame, judge: _ShardJudge, shards: int, progress: Callable[[str], None] | None = None
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
            return self._rows.where(~F.col("kind").isin(ALERTS, LATE, FLAGGED, STATE)).collect()
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

    def read_late(self) -> DataFrame:
        """Reads the late_events rows of all shards; several shards may have a row for the same event."""
        return self._unpack(LATE, LATE_EVENTS)

    def read_state(self) -> DataFrame:
        """Reads the pages of the final state, with the columns shard and payload."""
        # The label of the shard is short and padded with zero bytes.
        rows = self._rows.where(F.col("kind") == STATE)
        label = F.substring_index(F.col("payload").substr(1, _LABEL_BYTES).cast("string"), "\0", 1)
        return rows.select(label.alias("shard"), F.substring("payload", _LABEL_BYTES + 1, 2**31 - 1).alias("payload"))

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

    def _unpack(self, kind: str, columns: StructType) -> DataFrame:
        rows = self._rows.where(F.col("kind") == kind).select("payload")
        return rows.mapInArrow(_Unpack(tuple(columns.names)), columns)


@dataclass(frozen=True)
class _Unpack:
    names: tuple[str, ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for payload in batch["payload"]:
                yield from unpack_table(payload.as_py()).select(self.names).to_batches()


def count_shards(events: int, cores: int) -> int:
    """Returns the number of shards for a number of events: a multiple of the cores, so that no core is idle."""
    needed = max(1, -(-events // _SHARD_EVENTS))
    return min(_MAX_SHARDS, -(-needed // cores) * cores)


def judge(
    rows: DataFrame, stream: Stream, plan: ReplayPlan, events: int, spans: Sequence[int],
    progress: Callable[[str], None] | None = None, saved: SavedState | None = None, shards: int | None = None,
) -> ShardAnswers:  # fmt: skip
    """Judges the rows of a change feed. Each event goes in a block to the task of its key, which judges span by span.

    Args:
        rows: The rows of the change feed.
        stream: The stream of the events.
        plan: The rules and their changes.
        events: The number of rows.
        spans: The last commit of each span.
        progress: Called with lines of progress for the user.
        saved: The state to continue from.
        shards: The number of shards to divide the keys among; None: as many as the events need.
    """
    spark = rows.sparkSession
    if shards is None:
        shards = count_shards(events, count_cores(spark)) if saved is None else saved.shards
    labels = tuple(find_shard_labels(spark, shards))
    dispatch = _SpanDispatch.of(stream, plan, labels, spans)
    sent, tasks = dispatch.select(rows), shards
    if plan.gives_way:
        tasks = max(1, min(shards, count_cores(spark) - 1))
        sent = sent.coalesce(tasks)
    blocks = sent.mapInArrow(dispatch, _SPAN_BLOCKS)
    if saved is not None:
        blocks = blocks.unionByName(saved.read(spark).withColumn(_SPAN, F.lit(_BEFORE)))
    blocks = blocks.repartition(tasks, "shard").sortWithinPartitions("shard", _SPAN)
    return ShardAnswers(blocks, _ShardJudge(stream, labels, plan), shards, progress)


@dataclass(frozen=True)
class _SpanDispatch:
    """Packs events into a block per shard and span of commits; `spans` has the last commit of each span."""

    builder: BlockBuilder
    coverage: Coverage
    spans: tuple[int, ...]
    erases: bool
    gives_way: bool = False

    @classmethod
    def of(cls, stream: Stream, plan: ReplayPlan, labels: tuple[str, ...], spans: Sequence[int]) -> _SpanDispatch:
        """Returns the dispatch of a plan's events to the shards with these labels."""
        builder = BlockBuilder(plan.declarations or Declarations.of(stream), labels, plan.account)
        return cls(builder, find_coverage(plan.rules), tuple(spans), plan.erases, plan.gives_way)

    def select(self, changes: DataFrame) -> DataFrame:
        """Selects the rows and columns of a change feed that blocks need."""
        return select_changes(changes, self.builder.declarations, self.coverage.fields)

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the blocks of `batches`; called by Spark's mapInArrow."""
        blocks = self._pack(batches)
        return give_way(blocks) if self.gives_way else blocks

    def _pack(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        # Without coverage, a block has only the marks of its events, which move the watermark.
        of_deleted = (DELETED, self.coverage) if self.erases else (INSERTED, Coverage())
        for chunk in merge_batches(batches):
            spans = np.searchsorted(self.spans, chunk.column(COMMIT).to_numpy())
            kinds = chunk.column(KIND).to_numpy()
            for kind, (built_as, coverage) in ((INSERTED, (INSERTED, self.coverage)), (DELETED, of_deleted)):
                for span in np.unique(spans[kinds == kind]).tolist():
                    at = np.flatnonzero((spans == span) & (kinds == kind))
                    blocks = self.builder.build(take_rows(chunk, at), built_as, coverage)
                    columns = [blocks["shard"], pa.array([span] * len(blocks), pa.int32()), blocks["payload"]]
                    yield pa.RecordBatch.from_arrays(columns, schema=_ARROW_BLOCKS)


@dataclass(frozen=True)
class _ShardJudge:
    """Judges the blocks of shards, shard by shard and span by span."""

    stream: Stream
    labels: tuple[str, ...]
    plan: ReplayPlan

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the answers of the shards in `batches`, sorted by shard and span; called by Spark's mapInArrow."""
        answers = self._judge(batches)
        return give_way(answers) if self.plan.gives_way else answers

    def _judge(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = (
            (label, span, payload)
            for batch in batches
            for label, span, payload in zip(
                batch["shard"].to_pylist(), batch[_SPAN].to_pylist(), batch["payload"], strict=True
            )
        )
        for label, of_shard in groupby(rows, key=itemgetter(0)):
            shard = _Shard(self.stream, self.labels, label, self.plan)
            for span, blocks in groupby(of_shard, key=itemgetter(1)):
                payloads = (block.as_py() for _, _, block in blocks)
                if span == _BEFORE:
                    shard.load(payloads)
                    continue
                with pause_collector():
                    yield _to_batch(shard.judge(payloads))
            if self.plan.keeps_state:
                yield from (_to_batch([answer]) for answer in shard.save())
            if self.plan.history is not None:
                shard.leave_history(self.plan.rules[0], self.plan.history)


def give_way(batches: Iterator[_T]) -> Iterator[_T]:
    """Yields `batches`, each computed in a low-priority thread, and pauses after each for as long as it took.

    It uses a thread because a Spark worker also serves the stream, and a process cannot raise its priority again. The
    pauses let the JVM rest, which supplies the batches and has a single priority.
    """
    with ThreadPoolExecutor(1, "history", _lower_priority) as thread:
        while True:
            started = time.monotonic()
            batch = thread.submit(next, batches, None).result()
            if batch is None:
                break
            yield batch
            time.sleep(time.monotonic() - started)


def _lower_priority() -> None:
    # On other systems a thread's id may be the id of another process.
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)


def _to_batch(answers: Sequence[tuple[str, bytes]]) -> pa.RecordBatch:
    columns = {"kind": [kind for kind, _ in answers], "payload": [payload for _, payload in answers]}
    return pa.RecordBatch.from_pydict(columns, schema=_ARROW_ANSWERS)


class _Pages(dict[str, bytes]):
    """The pages of a state in memory."""

    def put(self, name: str, page: bytes) -> None:
        """Keeps a page."""
        self[name] = page

    def remove(self, name: str) -> None:
        """Removes a page."""
        del self[name]


class _Shard:
    """The keys of one shard, with their state in memory."""

    def __init__(self, stream: Stream, labels: Sequence[str], label: str, plan: ReplayPlan) -> None:
        self._stream, self._tried, self._declarations = stream, plan.tried, plan.declarations
        number = list(labels).index(label)
        self._evaluator = Evaluator(
            stream, number, len(labels), flagging=plan.flagging, max_evidence=plan.max_evidence, lists=plan.lists
        )
        self._state = ShardState(RuleBook(stream, plan.streams))
        self._state.high = plan.high
        open_warmed(self._state, plan.warmed)
        self._changes, self._waiting = list(plan.first), list(plan.waiting)
        # Every block lists the events beyond max_future, so only one shard reports them.
        self._is_first = label == labels[0]
        self._label, self._pages = label, _Pages()
        self._has_account = plan.account is not None
        if plan.keeps_state:
            self._state.origin = label
            self._state.begin(self._pages)

    def load(self, payloads: Iterable[bytes]) -> None:
        """Reads the state from its pages."""
        for payload in payloads:
            name, _, page = payload.partition(b"\0")
            self._pages[name.decode()] = page
        self._state.load(self._pages)
        self._state.begin(self._pages)

    def save(self) -> Iterator[tuple[str, bytes]]:
        """Yields the pages of the state, each as the shard's label, the page's name and its content."""
        self._state.save()
        label = self._label.encode().ljust(_LABEL_BYTES, b"\0")
        for name, page in self._pages.items():
            yield STATE, b"".join([label, name.encode(), b"\0", page])

    def leave_history(self, rule: CompiledRule, place: HistoryPlace) -> None:
        """Stores the rows gathered for a rule as one part of its history."""
        content = WindowHistory.of(self._state, rule).encode()
        place.parcels.write(name_part(place.name, self._evaluator.shard), content)

    def judge(self, blocks: Iterable[bytes]) -> list[tuple[str, bytes]]:
        """Judges the blocks of one span and returns the answers, each a kind and a payload."""
        inserted: list[Events] = []
        deleted: list[Events] = []
        marks: list[dict[int, int | None]] = []
        future: list[LateEvent] = []
        wanted: list[tuple[str, int, int]] = []
        own: dict[bool, list[list[OwnCount]]] = {False: [], True: []}
        for block in blocks:
            events, header = unpack_events(block, self._stream)
            marks.append(dict(header["marks"]))
            wanted += header["wanted"]
            # A block without coverage has no rows and lacks some fields.
            if len(events):
                (deleted if header["deleted"] else inserted).append(events)
                own[header["deleted"]].append(header["own"])
            if self._is_first:
                future += header["future"]
        events, gone = Events.concat_arrived(inserted, self._stream), Events.concat(deleted, self._stream)
        for part, counts in ((events, own[False]), (gone, own[True])):
            require_own(part, counts, self._evaluator.shard, self._evaluator.shards)
        batch = Batch(events, gone, merge_marks(marks), self._changes)
        self._changes = []
        output, self._waiting = judge_batch(self._evaluator, self._state, batch, self._waiting, self._declarations)
        self._state.drop_old()
        output.late += future
        answers = list(_pack(output, self._tried))
        if self._has_account:
            taken = [[*each, count] for each, count in output.taken.items()]
            answers.append((ACCOUNT, json.dumps({"wanted": wanted, "taken": taken}).encode()))
        return answers


def _pack(output: Output, tried: Mapping[str, Tried]) -> Iterator[tuple[str, bytes]]:
    for at in range(0, len(output.rows), _ROWS_IN_BLOCK):
        rows = output.rows[at : at + _ROWS_IN_BLOCK]
        yield ALERTS, pack_alerts(rows, _rename(rows, tried) if tried else None)
    for flagged in output.flagged:
        yield FLAGGED, pack_flagged(flagged)
    for at in range(0, len(output.late), _ROWS_IN_BLOCK):
        yield LATE, pack_late(output.late[at : at + _ROWS_IN_BLOCK])
    if output.failures:
        yield FAILURES, pack_failures(merge_failures(output.failures))
    if logged := [*(row for row in output.log if row.action == "rejected"), *output.notes]:
        yield LOG, json.dumps([asdict(row) for row in logged]).encode()


def _rename(rows: Sequence[tuple[AlertOrder, Alert]], tried: Mapping[str, Tried]) -> list[int]:
    """Gives alerts the ids of their own rules, in place, and returns the numbers of their candidates."""
    numbers = []
    for _, alert in rows:
        number, alert.rule_id = tried[alert.rule_id]
        named = alert.event_id if alert.event_id is not None else parse_time(alert.window_start)
        alert.alert_id = compute_alert_id(alert.rule_id, alert.rule_version, alert.key, named)
        numbers.append(number)
    return numbers


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

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import BinaryType, IntegerType, StringType, StructField, StructType

from lookback.core.engine.batch import Batch
from lookback.core.engine.evaluation import Evaluator
from lookback.core.engine.output import Output
from lookback.core.engine.schedule import judge_batch, open_warmed
from lookback.core.engine.warming import WindowHistory
from lookback.core.judging.segment import merge_failures
from lookback.core.rules.compiled import CompiledRule
from lookback.core.rules.coverage import Coverage, find_coverage
from lookback.core.rules.rulebook import RuleBook
from lookback.core.state.shard import ShardState
from lookback.core.streams.alerts import Alert, AlertOrder, LateEvent, compute_alert_id
from lookback.core.streams.arrival import merge_marks
from lookback.core.streams.blocks import (
    COMMIT,
    OwnCount,
    pack_alerts,
    pack_failures,
    pack_flagged,
    pack_late,
    pack_table,
    require_own,
    unpack_events,
)
from lookback.core.streams.declaration import Stream
from lookback.core.streams.declarations import Declarations
from lookback.core.streams.events import Events
from lookback.core.streams.watermarks import Mark, Reached
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
from lookback.spark.platform.session import count_cores
from lookback.spark.replay.answers import ACCOUNT, FLAGGED, LABEL_BYTES, MEASURED, STATE, ShardAnswers
from lookback.spark.replay.plan import HistoryPlace, ReplayPlan, Tried

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from lookback.spark.replay.saved import SavedState

_T = TypeVar("_T")
# The number of events per shard. It keeps a task's state and blocks small: below 1 GB with 100 rules. Smaller shards
# cost more, because rules with several groupings send an event to several shards.
_SHARD_EVENTS = 12_000_000
_MAX_SHARDS = 400
# When an Arrow batch of answers has more bytes than this, the next answer begins another one.
_BATCH_BYTES = 64 << 20
# The maximum number of alerts or late events in one row of the answers.
_ROWS_IN_BLOCK = 10_000
_SPAN = "span"
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
# The span of blocks that are pages of a saved state.
_BEFORE = -1
# On Linux this nice value gives a tenth of the CPU weight of a normal process; see sched(7).
_LOW_PRIORITY = 10


def count_shards(events: int, cores: int) -> int:
    """Returns the number of shards for a number of events: a multiple of the cores, so that no core is idle."""
    needed = max(1, -(-events // _SHARD_EVENTS))
    return min(_MAX_SHARDS, -(-needed // cores) * cores)


def judge(
    rows: DataFrame,
    stream: Stream,
    plan: ReplayPlan,
    events: int,
    spans: Sequence[int],
    progress: Callable[[str], None] | None = None,
    saved: SavedState | None = None,
    shards: int | None = None,
) -> ShardAnswers:
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
                    answers = shard.judge(payloads)
                yield from map(_to_batch, _cut(answers))
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


def _cut(answers: Sequence[tuple[str, bytes]]) -> Iterator[Sequence[tuple[str, bytes]]]:
    """Cuts answers into parts whose size an Arrow batch can have; one part if there are none."""
    start, size = 0, 0
    for at, (_, payload) in enumerate(answers):
        size += len(payload)
        if size > _BATCH_BYTES:
            yield answers[start : at + 1]
            start, size = at + 1, 0
    yield answers[start:]


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
        self._state.reached = Reached.by(plan.high)
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
        label = self._label.encode().ljust(LABEL_BYTES, b"\0")
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
        marks: list[dict[int, Mark | None]] = []
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
    for measured in output.measured:
        for table in measured.list_tables():
            yield f"{MEASURED}{measured.group}", pack_table(table)
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

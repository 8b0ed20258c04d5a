"""Backtests rules on Spark: finds the alerts that they would have raised over the whole events table.

The keys are divided among tasks, each of which walks the commits in order with its state in memory, through the evaluator
of the stream. So the alerts are those of a stream in which the rules were in force from before the first commit. No events
are on the driver, and a task holds the events of one span of commits at a time, a part of them.
"""

from __future__ import annotations

import json
import re
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark import StorageLevel
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import BinaryType, IntegerType, StringType, StructField, StructType

from lookback.core.engine.evaluation import Batch, Evaluator, Output
from lookback.core.engine.schedule import WaitingChange, judge_batch
from lookback.core.errors import SetupError
from lookback.core.judging.segment import merge_failures
from lookback.core.rules.compiled import CompiledRule, compile_rule
from lookback.core.rules.coverage import Coverage, find_coverage
from lookback.core.rules.rulebook import LogRow, RuleBook, RuleChange
from lookback.core.state.shard import ShardState
from lookback.core.streams.alerts import Failure
from lookback.core.streams.arrival import merge_marks
from lookback.core.streams.blocks import (
    ALERTS_SCHEMA,
    COMMIT,
    pack_alerts,
    pack_failures,
    unpack_events,
    unpack_failures,
    unpack_table,
)
from lookback.core.streams.declaration import Stream
from lookback.core.streams.events import Events, empty_events
from lookback.spark.platform.session import count_cores, find_local_path, is_connect, open_own_session
from lookback.spark.stream.dispatch import (
    DELETED,
    INSERTED,
    KIND,
    BlockBuilder,
    find_shard_labels,
    merge_batches,
    select_changes,
)
from lookback.spark.stream.shard import ALERTS, FAILURES, LOG, REPORT, pause_collector
from lookback.spark.tables.history import find_first_readable
from lookback.spark.tables.schemas import ALERTS as ALERTS_COLUMNS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from lookback.spark.tables.lakehouse import Tables

# A task judges the commits of about so many events at a time, of which it holds those of its keys.
_SPAN_EVENTS = 1_000_000
# A task's keys have about so many events in all, so that their state and their blocks stay small.
_SHARD_EVENTS = 5_000_000
_MAX_SHARDS = 400
# The most alerts in one row of the answers.
_ALERTS_IN_BLOCK = 10_000
# An Arrow batch between Spark and a task; its rows are blocks, so it must be bounded by its bytes.
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
_DAY_US = 86_400_000_000
_TABLE = re.compile(r"\w+(\.\w+){1,2}", re.ASCII)
_PROGRESS_SECONDS = 2.0


@dataclass(frozen=True)
class Candidate:
    """A version of a rule that is tried. version: the number that its alerts have."""

    document: Mapping[str, Any]
    version: int = 1

    @property
    def rule_id(self) -> str:
        """The rule's id."""
        return str(self.document["rule_id"])


@dataclass(frozen=True)
class Range:
    """The part of history in which the rules speak; before it they gather state and are silent.

    since, until: event times in microseconds, [since, until), as `effective_from` and `effective_until` of a rule.
    since_commit: the first commit whose events may raise alerts.
    """

    since: int | None = None
    until: int | None = None
    since_commit: int | None = None

    def narrow(self, document: Mapping[str, Any], stream: Stream) -> dict[str, Any]:
        """Returns the document of a rule that triggers only within the range. Raises RuleError."""
        rule = compile_rule(document, stream).spec
        bounds = {
            "effective_from": _pick(max, rule.effective_from, self.since),
            "effective_until": _pick(min, rule.effective_until, self.until),
        }
        return {**document, **{name: value for name, value in bounds.items() if value is not None}}


@dataclass(frozen=True)
class Figures:
    """What a rule would have raised. alerts: those that stand, by their last revision; keys: how many keys have one.

    rows: of alerts, with all revisions and suppressed ones. failures: how many times it could not be judged. alerts_per_day:
    over the days of event time in which the rule speaks; None if these are none.
    """

    rule_id: str
    version: int
    alerts: int
    alerts_per_day: float | None
    keys: int
    rows: int
    failures: int


@dataclass
class Backtest:
    """The result of a backtest.

    alerts: rows with the columns of the table `alerts`, of which decided_at is NULL. events: how many were judged, through
    `commits`, the first and the last. deletes: the number of commits that deleted events, which count nowhere.
    errors: rows as rule_log would have had them. first_time, last_time: the event times that the figures are over,
    in microseconds; None without events.
    """

    alerts: DataFrame
    figures: list[Figures]
    events: int
    commits: tuple[int, int]
    deletes: int
    first_time: int | None
    last_time: int | None
    errors: list[LogRow] = field(default_factory=list)
    _answers: DataFrame | None = None

    def write(self, place: str) -> None:
        """Writes the alerts as a Delta table, with a column `variant`.

        place: a new or empty folder, or catalog.schema.table for a new table. Raises SetupError if something is there.
        """
        writer = self.alerts.withColumn("variant", F.lit("")).write.format("delta").mode("error")
        if _TABLE.fullmatch(place):
            if self.alerts.sparkSession.catalog.tableExists(place):
                raise SetupError(f"--out: there is a table {place}; name another one")
            writer.saveAsTable(place)
            return
        folder = find_local_path(place)
        if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise SetupError(f"--out: {place} is not empty; name a new or empty folder")
        writer.save(place if folder is None else str(folder.absolute()))

    def close(self) -> None:
        """Frees the rows that Spark keeps for `alerts`, which cannot be read afterwards."""
        if self._answers is not None:
            with suppress(PySparkException):
                self._answers.unpersist()

    def __enter__(self) -> Backtest:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def backtest(
    tables: Tables, stream: Stream, candidates: Sequence[Candidate], within: Range | None = None, *,
    progress: Callable[[str], None] | None = None,
) -> Backtest:  # fmt: skip
    """Judges all events of a stream by rules that were in force from before its first commit on.

    within: where the rules speak; default: everywhere. Two candidates cannot have one rule_id. Raises RuleError for a wrong
    rule, and SetupError if the table or its change feed is missing.
    """
    within = within or Range()
    tables = replace(tables.holding(stream), spark=open_own_session(tables.spark))
    tables.require(stream)
    _require_different(candidates)
    history = _History.read(tables, stream)
    plan = _Plan.make(tables, stream, candidates, within, history)
    answers = _judge_history(tables, stream, find_coverage(plan.rules), plan, history)
    with _bounded_batches(tables.spark), _show_progress(tables.spark, progress):
        with suppress(PySparkException):  # as on serverless compute, which judges again where the alerts are read
            answers = answers.persist(StorageLevel.DISK_ONLY)
        facts = answers.where(F.col("kind") != ALERTS).collect()
    alerts = answers.where(F.col("kind") == ALERTS).select("payload").mapInArrow(_unpack_alerts, _ALERTS_ROWS)
    alerts = alerts.select(*alerts.columns, F.lit(None).cast("timestamp").alias("decided_at"))
    failures = [each for row in facts if row["kind"] == FAILURES for each in unpack_failures(row["payload"])]
    errors = {LogRow(**each) for row in facts if row["kind"] == LOG for each in json.loads(row["payload"])}
    first_time, last_time = history.clip(within)
    return Backtest(
        alerts, _make_figures(candidates, alerts, failures, (first_time, last_time)), history.events,
        (history.first, history.last), history.deletes, first_time, last_time, sorted(errors, key=repr), answers,
    )  # fmt: skip


def _judge_history(tables: Tables, stream: Stream, coverage: Coverage, plan: _Plan, history: _History) -> DataFrame:
    """Plans the job: events into blocks, blocks to the task of their keys, there span after span."""
    shards = min(_MAX_SHARDS, max(count_cores(tables.spark), -(-history.events // _SHARD_EVENTS)))
    labels = tuple(find_shard_labels(tables.spark, shards))
    dispatch = _SpanDispatch(BlockBuilder(stream, labels), coverage, tuple(history.spans))
    rows = select_changes(history.select_events(tables), stream, coverage.fields)
    blocks = rows.mapInArrow(dispatch, _SPAN_BLOCKS).repartition(shards, "shard").sortWithinPartitions(_SPAN)
    return blocks.mapInArrow(_Judge(stream, labels, plan), _ANSWERS)


def _pick(choose: Callable[[int, int], int], own: int | None, given: int | None) -> int | None:
    known = [each for each in (own, given) if each is not None]
    return choose(*known) if len(known) == 2 else known[0] if known else None


def _require_different(candidates: Sequence[Candidate]) -> None:
    ids = [each.rule_id for each in candidates]
    if twice := sorted({each for each in ids if ids.count(each) > 1}):
        raise SetupError(f"rule {twice[0]!r} is to be tried twice at once; try its versions one after the other")


# The history ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _History:
    """The commits of an events table that can be read.

    first, last: commits. events: inserted rows. deletes: commits that deleted rows. spans: the last commit of each span.
    first_time, last_time: of events in microseconds; None without events.
    """

    stream: Stream
    first: int
    last: int
    events: int
    deletes: int
    spans: Sequence[int]
    first_time: int | None
    last_time: int | None

    @classmethod
    def read(cls, tables: Tables, stream: Stream) -> _History:
        """Counts the rows of each commit."""
        first, last = find_first_readable(tables, stream.name), tables.version(stream.name)
        inserted, time = F.col("_change_type") == "insert", F.unix_micros(stream.event_time)
        counts = (
            tables.read_changes(stream.name, first, last)
            .where(F.col("_change_type").isin("insert", "delete"))
            .groupBy(COMMIT)
            .agg(
                F.count_if(inserted).alias("events"),
                F.count_if(~inserted).alias("deleted"),
                F.min(F.when(inserted, time)).alias("first"),
                F.max(F.when(inserted, time)).alias("last"),
            )
            .orderBy(COMMIT)
            .collect()
        )
        spans, waiting = list[int](), 0
        for row in counts:
            waiting += row["events"]
            if waiting >= _SPAN_EVENTS:
                spans.append(row[COMMIT])
                waiting = 0
        return cls(
            stream, first, last, sum(row["events"] for row in counts), sum(row["deleted"] > 0 for row in counts),
            [*spans, last], min((row["first"] for row in counts if row["first"] is not None), default=None),
            max((row["last"] for row in counts if row["last"] is not None), default=None),
        )  # fmt: skip

    def select_events(self, tables: Tables) -> DataFrame:
        """Selects the inserted rows; those that were deleted later are marked as deletions."""
        changes = tables.read_changes(self.stream.name, self.first, self.last)
        inserted = changes.where(F.col("_change_type") == "insert")
        if not self.deletes:
            return inserted
        event_id, gone = self.stream.event_id, "_gone_since"
        deleted = changes.where(F.col("_change_type") == "delete").groupBy(event_id).agg(F.max(COMMIT).alias(gone))
        kind = F.when(F.col(gone) > F.col(COMMIT), "delete").otherwise("insert")
        return inserted.join(deleted, event_id, "left").withColumn("_change_type", kind)

    def clip(self, within: Range) -> tuple[int | None, int | None]:
        """Returns the first and the last event time within a range; None without events."""
        if self.first_time is None or self.last_time is None:
            return None, None
        first, last = _pick(max, self.first_time, within.since), _pick(min, self.last_time, within.until)
        return first, max(last or 0, first or 0)


@dataclass(frozen=True)
class _Plan:
    """The rules of a backtest, and the changes that bring them: those before the first commit, and those after a later one."""

    rules: Sequence[CompiledRule]
    first: Sequence[RuleChange]
    waiting: Sequence[WaitingChange]

    @classmethod
    def make(
        cls, tables: Tables, stream: Stream, candidates: Sequence[Candidate], within: Range, history: _History
    ) -> _Plan:
        """Plans that all candidates are in force from the beginning, and that commands come as they came to the stream.

        Raises RuleError for a wrong rule.
        """
        is_silent = within.since_commit is not None and within.since_commit > history.first
        documents = [within.narrow(each.document, stream) for each in candidates]
        first, waiting = list[RuleChange](), list[WaitingChange]()
        for at, (each, document) in enumerate(zip(candidates, documents, strict=True)):
            text = json.dumps(document, ensure_ascii=False, default=str)
            status = "paused" if is_silent else "active"
            first.append(RuleChange("insert", at, each.rule_id, each.version, status, text))
            if is_silent and within.since_commit is not None:
                speaks = RuleChange("update", at, each.rule_id, each.version, "active", text)
                waiting.append(WaitingChange(speaks, within.since_commit - 1))
        for command, after in _read_commands(tables, stream, len(candidates)):
            if after is None:
                first.append(command)
            else:
                waiting.append(WaitingChange(command, after))
        return cls([compile_rule(each, stream) for each in documents], first, waiting)


def _read_commands(tables: Tables, stream: Stream, number: int) -> Iterator[tuple[RuleChange, int | None]]:
    """Yields the commands that rule_log has of the stream, in their order, each with the commit judged before it."""
    if not tables.exists("rule_log"):
        return
    own = (F.col("stream") == stream.name) & F.col("action").isin("advance", "clear_state")
    logged = tables.read("rule_log").where(own).orderBy("logged_at", "batch_id").collect()
    for at, row in enumerate(logged, number):
        time = str(row["message"]).removeprefix("to ") if row["action"] == "advance" else None
        document = {"stream": stream.name, **({} if time is None else {"time": time})}
        yield RuleChange("insert", at, "*", None, row["action"], json.dumps(document)), row["arrival"]


# Tasks ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _SpanDispatch:
    """Packs events into a block per shard and span of commits. spans: the last commit of each span."""

    builder: BlockBuilder
    coverage: Coverage
    spans: tuple[int, ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the blocks of `batches`; called by Spark's mapInArrow."""
        for chunk in merge_batches(batches):
            spans = np.searchsorted(self.spans, chunk.column(COMMIT).to_numpy())
            kinds = chunk.column(KIND).to_numpy()
            # Events that were deleted later count nowhere, and have moved the watermark.
            for kind, coverage in ((INSERTED, self.coverage), (DELETED, Coverage())):
                for span in np.unique(spans[kinds == kind]).tolist():
                    part = chunk.take(pa.array(np.flatnonzero((spans == span) & (kinds == kind))))
                    blocks = self.builder.build(part, INSERTED, coverage)
                    columns = [blocks["shard"], pa.array([span] * len(blocks), pa.int32()), blocks["payload"]]
                    yield pa.RecordBatch.from_arrays(columns, schema=_ARROW_BLOCKS)


@dataclass(frozen=True)
class _Judge:
    """Judges the blocks of shards, span by span."""

    stream: Stream
    labels: tuple[str, ...]
    plan: _Plan

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the answers of the shards in `batches`, which are sorted by span; called by Spark's mapInArrow."""
        shards: dict[str, _Shard] = {}
        rows = (
            (label, span, payload)
            for batch in batches
            for label, span, payload in zip(
                batch["shard"].to_pylist(), batch[_SPAN].to_pylist(), batch["payload"], strict=True
            )
        )
        for (label, _), blocks in groupby(rows, key=lambda row: row[:2]):
            if label not in shards:
                shards[label] = _Shard(self.stream, self.labels, label, self.plan)
            with pause_collector():
                answers = shards[label].judge(block.as_py() for _, _, block in blocks)
            kinds, payloads = zip(*answers, strict=True)
            yield pa.RecordBatch.from_pydict({"kind": list(kinds), "payload": list(payloads)}, schema=_ARROW_ANSWERS)


class _Shard:
    """The keys of one shard, with their state in memory."""

    def __init__(self, stream: Stream, labels: Sequence[str], label: str, plan: _Plan) -> None:
        self._stream, self._evaluator = stream, Evaluator(stream, list(labels).index(label), len(labels))
        self._state = ShardState(RuleBook(stream, {stream.name: stream}))
        self._waiting = list(plan.waiting)
        # Each alone: a command between rules means what it means at its place.
        self._first: Sequence[RuleChange] = plan.first

    def judge(self, blocks: Iterable[bytes]) -> list[tuple[str, bytes]]:
        """Judges the blocks of one span. Returns answers: their kinds and payloads."""
        parts, marks, rows = list[Events](), list[dict[int, int | None]](), 0
        for block in blocks:
            events, header = unpack_events(block, self._stream)
            marks.append(dict(header["marks"]))
            parts.append(events)
            rows += len(events)
        names = sorted(set.union(*(set(each.columns) for each in parts)))
        # Blocks of deleted events have marks and no rows.
        parts = [each for each in parts if len(each)] or [empty_events(self._stream, names)]
        events = Events.concat(parts, self._stream.event_id, self._stream.event_time)
        batch = Batch(events, marks=merge_marks(marks), changes=list(self._first))
        self._first = ()
        output, self._waiting = judge_batch(self._evaluator, self._state, batch, self._waiting)
        self._state.drop_old()
        return list(_pack(output, rows))


def _pack(output: Output, rows: int) -> Iterator[tuple[str, bytes]]:
    yield REPORT, json.dumps({"rows": rows}).encode()
    for at in range(0, len(output.rows), _ALERTS_IN_BLOCK):
        yield ALERTS, pack_alerts(output.rows[at : at + _ALERTS_IN_BLOCK])
    if output.failures:
        yield FAILURES, pack_failures(merge_failures(output.failures))
    if logged := [*(row for row in output.log if row.action == "rejected"), *output.notes]:
        yield LOG, json.dumps([asdict(row) for row in logged]).encode()


_ALERTS_ROWS = StructType([each for each in ALERTS_COLUMNS if each.name != "decided_at"])


def _unpack_alerts(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for payload in batch["payload"]:
            yield from unpack_table(payload.as_py()).select(ALERTS_SCHEMA.names).to_batches()


# Results --------------------------------------------------------------------------------------------------------------


def _make_figures(
    candidates: Sequence[Candidate], alerts: DataFrame, failures: list[Failure], times: tuple[int | None, int | None]
) -> list[Figures]:
    counts, failed = _count_alerts(alerts), Counter[str]()
    for failure in failures:
        failed[failure.rule_id] += failure.count
    first, last = times
    days = None if first is None or last is None else (last - first) / _DAY_US
    figures = []
    for each in candidates:
        own = counts.get(each.rule_id, {"alerts": 0, "keys": 0, "rows": 0})
        per_day = own["alerts"] / days if days else None
        figures.append(
            Figures(each.rule_id, each.version, own["alerts"], per_day, own["keys"], own["rows"], failed[each.rule_id])
        )
    return figures


def _count_alerts(alerts: DataFrame) -> dict[str, dict[str, int]]:
    """Counts the alerts of each rule, and the keys that have one."""
    last = alerts.groupBy("rule_id", "alert_id").agg(
        F.max_by(F.struct("verdict", F.to_json("key").alias("key")), "revision").alias("last"),
        F.count("*").alias("rows"),
    )
    stands = F.col("last.verdict") == "raised"
    counted = last.groupBy("rule_id").agg(
        F.count_if(stands).alias("alerts"),
        F.count_distinct(F.when(stands, F.col("last.key"))).alias("keys"),
        F.sum("rows").alias("rows"),
    )
    return {row["rule_id"]: row.asDict() for row in counted.collect()}


@contextmanager
def _bounded_batches(spark: SparkSession) -> Iterator[None]:
    """Bounds the bytes that Spark hands to a task at once, until the end of the block."""
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
    """Shows how far the jobs of the block are, now and then; Spark Connect does not say."""
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

"""Streaming evaluation: events and rules by change feed, shards with state in RocksDB, alerts into Delta."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import functions as F  # noqa: N812

from lookback.core.errors import SetupError
from lookback.core.rules.coverage import Coverage
from lookback.core.streams.declaration import Stream
from lookback.core.values.columns import to_text
from lookback.core.values.times import to_utc
from lookback.spark.platform.faults import explain_failure
from lookback.spark.platform.owner import become_owner
from lookback.spark.platform.session import (
    apply_query_settings,
    choose_default_shards,
    count_cores,
    is_connect,
    open_own_session,
)
from lookback.spark.rules import RulesTable
from lookback.spark.stream.checkpoint import EVENTS, RULES, Checkpoint, Plan, declared
from lookback.spark.stream.dispatch import BLOCKS, event_blocks, rule_blocks, shard_labels
from lookback.spark.stream.processor import ShardProcessor
from lookback.spark.stream.quarantine import Quarantines
from lookback.spark.stream.rebuild import Missing
from lookback.spark.stream.resume import Beginning, begin
from lookback.spark.stream.serverless import RemoteBatches
from lookback.spark.stream.shard import UncoveredError
from lookback.spark.stream.sink import BatchReport, Sink
from lookback.spark.stream.watching import RulesWatch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from lookback.spark.tables.lakehouse import Tables

_LOG = logging.getLogger("lookback")
DEFAULT_EVERY = "500 milliseconds"
# Bound a batch, and with it the memory of a worker: about 600,000 card transactions.
_ADMISSION = {"maxFilesPerTrigger": "1000", "maxBytesPerTrigger": "8m"}
# When state is made anew, the first batch brings all changes of the rules, which wait for their time.
_ALL_FILES = {"maxFilesPerTrigger": str(2**31 - 1)}
_NO_REBUILD = (
    "state is made anew by the process that started the evaluation, and this compute runs what writes its output elsewhere "
    "(Spark Connect: serverless, or standard access mode); take a cluster with dedicated access mode for --rebuild"
)
# Looking for a file costs nothing; over Spark Connect each look at the query is a call to the server.
_POLL_SECONDS = 0.02
_SLOW_POLL_SECONDS = 0.5


def checkpoint_folder(tables: Tables, stream: Stream) -> str:
    """Where an evaluation of the stream keeps its checkpoint unless told otherwise: below the tables' root or volume.

    Raises SetupError for tables of a catalog without a volume that can be reached.
    """
    return f"{tables.files}/_checkpoints/evaluate_{stream.name}"


class Evaluation:
    """A running evaluation of one stream.

    What dispatch sends follows the rules table while the query runs. Where it comes too late for a batch, or a rule needs
    a field that the query does not read, the evaluation re-plans itself in place.
    checkpoint: its folder. once: judge what is there, then end. every: how often to look for more. admission: options
    of the Delta source that bound a batch. on_batch: is called with the report of each batch. idle_after: for each such
    time, in microseconds, without a new commit the watermark is moved on by as much, by an `advance` in the rules table.
    shards: into how many parts the keys of a new checkpoint are divided, for good; SetupError where an existing one has
    another number; see `repartition`. default_shards: the same as a setting, which an existing checkpoint with another
    number is told of and keeps; without both the stream's `shards`, without that the cores of the cluster, at most 48.
    rebuild: the checkpoint is moved aside and the state made anew from the tables;
    what they hold already is not written again. fresh: a new checkpoint may begin on tables that have outputs of the
    stream, and writes all of them once more. accept_unknown: a checkpoint of a form that this release does not know is gone
    on with as it is, unchecked. reports: of the last batches, newest last; replans: how often it was planned
    anew.

    One process at a time evaluates on a checkpoint: `run` raises SetupError, naming the other, where there is one.
    """

    def __init__(
        self,
        tables: Tables,
        stream: Stream,
        streams: Mapping[str, Stream],
        checkpoint: str | Path,
        *,
        once: bool = False,
        every: str = DEFAULT_EVERY,
        admission: Mapping[str, str] | None = None,
        on_batch: Callable[[BatchReport], None] | None = None,
        idle_after: int | None = None,
        shards: int | None = None,
        default_shards: int | None = None,
        rebuild: bool = False,
        fresh: bool = False,
        accept_unknown: bool = False,
    ) -> None:
        self.tables, self.stream = replace(tables.holding(stream), spark=open_own_session(tables.spark)), stream
        self.streams = dict(streams)
        # Executors, which read it too, have working directories of their own.
        self.checkpoint = Checkpoint(Path(checkpoint) if ":" in str(checkpoint) else Path(checkpoint).absolute())
        self.reports: deque[BatchReport] = deque(maxlen=1_000)
        self.replans = 0
        self._once, self._every, self._on_batch = once, every, on_batch
        self._idle = None if idle_after is None else _Idle(self, idle_after)
        self._admission = {**_ADMISSION, **(admission or {})}
        for number in (shards, default_shards):
            if number is not None and number < 1:
                raise SetupError(f"an evaluation has at least one shard, got {number}")
        self._shards, self._default_shards = shards, default_shards or stream.shards
        self._rebuild, self._fresh, self._accept_unknown = rebuild, fresh, accept_unknown
        self._query: StreamingQuery | None = None
        self._beginning = Beginning({}, None)
        self._wanted: Coverage | None = None
        self._known_labels: list[str] | None = None
        self._stopping = threading.Event()

    def run(self) -> None:
        """Evaluates until `stop` is called or, with once, until all that was there is judged.

        Raises what the query failed with.
        """
        self._require_compute()
        with become_owner(
            self.checkpoint.owner_file, f"checkpoint {self.checkpoint.folder}"
        ) as self._require_ownership:
            self._beginning = begin(
                self.tables, self.stream, self.streams, self.checkpoint,
                rebuild=self._rebuild, fresh=self._fresh, shards=self._shards, default_shards=self._default_shards,
                accept_unknown=self._accept_unknown,
            )  # fmt: skip
            self._quarantines = Quarantines(self.tables, self.stream, self.streams, self.checkpoint)
            try:
                while not self._stopping.is_set():
                    self._quarantines.publish(at_once=True)
                    self._start()
                    if self._wait():
                        return
            except (PySparkException, Py4JJavaError) as error:
                told = explain_failure(error, self.stream.name, self.checkpoint.folder)
                if told is error:
                    raise
                raise told from error
            finally:
                self._end_query()
                self._quarantines.publish(at_once=True)

    def start(self) -> Evaluation:
        """Runs in a thread of its own; `stop` ends it and raises what it failed with."""
        self._failure: BaseException | None = None

        def guarded() -> None:
            try:
                self.run()
            except BaseException as error:  # noqa: BLE001 - raised again by stop() and wait()
                self._failure = error

        self._thread = threading.Thread(target=guarded, name=f"evaluate-{self.stream.name}", daemon=True)
        self._thread.start()
        return self

    def request_stop(self) -> None:
        """Asks `run` to end soon; returns at once."""
        self._stopping.set()

    def stop(self) -> None:
        """Ends the evaluation; a batch that is half done is repeated at the next start."""
        self._stopping.set()
        if hasattr(self, "_thread"):
            self._thread.join()
            if self._failure is not None:
                raise self._failure

    def wait(self, seconds: float) -> bool:
        """Waits until the evaluation ends, at most so long. Returns whether it has ended."""
        if hasattr(self, "_thread"):
            self._thread.join(seconds)
        return not self.running

    @property
    def running(self) -> bool:
        """Whether the evaluation goes on."""
        return hasattr(self, "_thread") and self._thread.is_alive()

    def wait_until(self, condition: Callable[[BatchReport], bool], timeout: float) -> BatchReport:
        """The first report, old or new, that satisfies `condition`. Raises TimeoutError after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            for report in list(self.reports):
                if condition(report):
                    return report
            if not self.running:
                self.stop()
                raise TimeoutError("the evaluation has ended")
            time.sleep(_POLL_SECONDS)
        raise TimeoutError(f"not within {timeout} s")

    def _require_compute(self) -> None:
        """Raises SetupError where Spark Connect cannot do what is asked for; nothing has been moved or written by then."""
        spark = self.tables.spark
        if not is_connect(spark):
            return
        if not hasattr(spark.range(1).groupBy("id"), "transformWithStateInPandas"):
            raise SetupError(
                f"this is Spark Connect (serverless, or standard access mode) with the client of Spark {pyspark.__version__}, "
                "which has no stateful operator for Python; Spark 4.1 has. Evaluate on a cluster with dedicated access mode, or "
                "take a runtime, environment version or databricks-connect with a newer Spark"
            )
        if self._rebuild:
            raise SetupError(_NO_REBUILD)

    def _start(self) -> None:
        before = self.checkpoint.plan()
        self._watch = RulesWatch(self.tables, self.stream, self.checkpoint)
        # What is in force is covered by what was sent last; what the table holds may come into force.
        coverage = self._watch.table_needs() | (self._wanted or (before.coverage if before else Coverage()))
        if self._beginning.rebuild is not None and self.checkpoint.is_new:
            coverage |= self._watch.past_needs(self._beginning.starts[RULES])
        spark = self.tables.spark
        shards = before.shards if before else self._shards or self._default_shards or choose_default_shards(spark)
        plan = Plan(shards, coverage, declared(self.stream), self._beginning.starts, spark.version)
        self.checkpoint.record(plan)
        self._wanted = None
        self._query = self._query_of(plan)

    def _query_of(self, plan: Plan) -> StreamingQuery:
        labels = self._labels(plan.shards)
        rebuild = self._beginning.rebuild
        events = self.tables.stream_changes(self.stream.name, plan.start(EVENTS), self._admission)
        rules = self.tables.stream_changes("rules", plan.start(RULES), _ALL_FILES if rebuild else None)
        blocks = event_blocks(events, self.stream, plan, labels, self.checkpoint).union(rule_blocks(rules, labels))
        schedule = None if rebuild is None else rebuild.schedule.to_dict()
        processor = ShardProcessor(self.stream, self.streams, labels, str(self.checkpoint.folder), schedule)
        answers = blocks.groupBy("shard").transformWithStateInPandas(
            processor, BLOCKS, outputMode="Append", timeMode="EventTime"
        )
        writer = (
            answers.writeStream.queryName(f"lookback-{self.stream.name}")
            .option("checkpointLocation", str(self.checkpoint.folder))
            .foreachBatch(self._writer())
        )
        # More tasks than cores only cost time. A checkpoint that is not new has its number.
        partitions = min(plan.shards, count_cores(self.tables.spark)) if self.checkpoint.is_new else None
        with apply_query_settings(self.tables.spark, partitions):
            if self._once:
                return writer.trigger(availableNow=True).start()
            return writer.trigger(processingTime=self._every).start()

    def _labels(self, shards: int) -> list[str]:
        if self._known_labels is None:
            self._known_labels = shard_labels(self.tables.spark, shards)
        return self._known_labels

    def _writer(self) -> Callable[[DataFrame, int], None]:
        rebuild = self._beginning.rebuild
        if is_connect(self.tables.spark):
            if rebuild is not None:
                raise SetupError(_NO_REBUILD)
            return RemoteBatches.of(self.tables, self.stream, self.streams, self.checkpoint.ensure_query_id())
        sink: Sink | None = None
        missing = None if rebuild is None else Missing(self.tables, self.stream.name, rebuild)

        def write(answers: DataFrame, batch_id: int) -> None:
            nonlocal sink
            if sink is None:
                query_id = self.checkpoint.query_id
                assert query_id is not None
                sink = Sink(self.tables, self.stream, query_id, missing=missing)
            started = time.perf_counter()
            table = answers.toArrow()
            if not table.num_rows:
                return
            report = sink.write(table, batch_id, 1_000 * (time.perf_counter() - started))
            # What is judged again, to make state anew, has had its consequences.
            if rebuild is None or (report.arrival or 0) > (rebuild.schedule.through or 0):
                self._quarantines.note(report)
            self.reports.append(report)
            if self._on_batch is not None:
                self._on_batch(report)

        return write

    def _wait(self) -> bool:
        """Waits until the query ends. Returns whether that is all: it was asked to stop, or has judged what was there."""
        query = self._query
        assert query is not None
        seconds = _POLL_SECONDS if self._watch.is_cheap else _SLOW_POLL_SECONDS
        try:
            while not self._stopping.is_set():
                if query.awaitTermination(seconds):  # type: ignore[arg-type]
                    return True
                self._require_ownership()
                self._watch.look(self.reports[-1] if self.reports else None)
                self._quarantines.publish()
                if self._idle is not None:
                    self._idle.look(query)
        except StreamingQueryException as error:
            self._wanted = UncoveredError.find(error)
            if self._wanted is None:
                raise
            self.replans += 1
            return False
        self._end_query()
        return True

    def _end_query(self) -> None:
        if self._query is not None and self._query.isActive:
            self._query.stop()


class _Idle:
    """Moves the watermark of a stream on while no events come, so that windows end and silence raises alerts."""

    def __init__(self, evaluation: Evaluation, span: int) -> None:
        self._evaluation, self._span = evaluation, span
        self._version: int | None = None
        self._since = time.monotonic()

    def look(self, query: StreamingQuery) -> None:
        """Called often; acts once a span. What fails, as in an outage of the catalog, is logged and done a span later."""
        if (time.monotonic() - self._since) * 1e6 < self._span:
            return
        try:
            self._move_on(query)
        except Exception as error:  # noqa: BLE001 - whatever it is, the stream goes on
            self._version, self._since = None, time.monotonic()
            told = str(error).partition("\n")[0][:300]
            name = self._evaluation.stream.name
            _LOG.warning("stream=%s the watermark could not be moved on, it will be tried again: %s", name, told)

    def _move_on(self, query: StreamingQuery) -> None:
        tables, stream = self._evaluation.tables, self._evaluation.stream
        version, before = tables.version(stream.name), self._version
        self._version, self._since = version, time.monotonic()
        # What is there but not judged yet must not become late by this.
        if version != before or query.status["isDataAvailable"]:
            return
        watermark = self._watermark()
        if watermark is not None:
            reached = str(to_text(to_utc(watermark + self._span)))
            rules = RulesTable(tables, self._evaluation.streams)
            rules.command("advance", stream.name, time=reached, author="lookback", comment="no events came")

    def _watermark(self) -> int | None:
        """The watermark of the last batch; before the first one what the table suggests, which is not later."""
        reports = self._evaluation.reports
        if reports:
            return reports[-1].watermark
        time_, stream = F.col(self._evaluation.stream.event_time), self._evaluation.stream
        past = self._evaluation.tables.read(stream.name).where(time_ <= F.current_timestamp())
        highest = past.agg(F.max(F.unix_micros(time_)).alias("highest")).collect()[0]["highest"]
        return None if highest is None else int(highest) - stream.max_out_of_orderness

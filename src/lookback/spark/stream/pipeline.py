"""Runs the streaming query: reads events and rules by change feed, keeps state in RocksDB, writes alerts to Delta."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pyspark
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import functions as F  # noqa: N812

from lookback.core.errors import SetupError
from lookback.core.rules.coverage import Coverage
from lookback.core.streams.declaration import Stream
from lookback.core.streams.watermarks import Reached
from lookback.core.values.columns import to_text
from lookback.core.values.texts import summarize_error
from lookback.core.values.times import NEVER, to_utc
from lookback.spark.batches.dispatch import BLOCKS, build_event_blocks, build_rule_blocks, find_shard_labels
from lookback.spark.batches.processor import ShardProcessor
from lookback.spark.batches.shard import UncoveredError
from lookback.spark.batches.sink import BatchReport, Sink
from lookback.spark.checkpoints.checkpoint import Checkpoint, checkpoint_folder
from lookback.spark.checkpoints.plan import Plan, snapshot_declaration
from lookback.spark.checkpoints.sparklogs import EVENTS, RULES
from lookback.spark.following.listwatch import ListsWatch
from lookback.spark.following.quarantine import Quarantines
from lookback.spark.following.rulewatch import RulesWatch
from lookback.spark.following.warmups import WarmUps
from lookback.spark.platform.faults import explain_failure, explain_full_disk, succeeds
from lookback.spark.platform.owner import become_owner
from lookback.spark.platform.session import (
    apply_query_settings,
    choose_default_shards,
    count_cores,
    is_connect,
    open_own_session,
    use_files_of,
)
from lookback.spark.rules import RulesTable
from lookback.spark.stream.declared import plan_start
from lookback.spark.stream.options import EvaluationOptions
from lookback.spark.stream.rebuild import UnwrittenRows, find_mark
from lookback.spark.stream.resume import Beginning, begin, is_being_rebuilt
from lookback.spark.stream.serverless import RemoteBatches
from lookback.spark.tables.history import read_stamp

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from lookback.core.streams.declarations import Declarations
    from lookback.places import Place
    from lookback.spark.tables.lakehouse import Tables

__all__ = ["Evaluation", "checkpoint_folder"]

_LOG = logging.getLogger("lookback")
# Limits for a batch, and so for the memory of a worker: about 600,000 card transactions.
_ADMISSION = {"maxFilesPerTrigger": "1000", "maxBytesPerTrigger": "8m"}
# During a rebuild, the first batch reads all rule changes, which then wait for their time.
_ALL_FILES = {"maxFilesPerTrigger": str(2**31 - 1)}
_NO_REBUILD = (
    "a rebuild must write its output in the process that started it, but this compute uses another process "
    "(Spark Connect: serverless, or standard access mode); use a cluster with dedicated access mode for --rebuild"
)
# Spark matches the text of Python's error to find out whether a batch failed or was interrupted by a stop. Its pattern
# uses stack for each character, so that an error text with a Java stack trace ends the query's thread with a
# StackOverflowError. This short text matches the pattern.
_INTERRUPTED = "py4j.protocol.Py4JJavaError: An error occurred while calling a batch: java.lang.InterruptedException"
# In Delta's error when a table's columns changed after the query was planned.
_NEW_COLUMNS = "DELTA_SCHEMA_CHANGED"
# How often a query is planned again for changed columns without a batch in between.
_MAX_NEW_COLUMNS = 10
# Looking for a file costs nothing; over Spark Connect each check of the query is a server call.
_POLL_SECONDS = 0.02
_SLOW_POLL_SECONDS = 0.5


class Evaluation:
    """A running evaluation of one stream.

    Dispatch follows the rules table while the query runs. If a change comes too late for a batch, or a rule needs a
    field that the query does not read, the evaluation plans a new query and continues.

    Only one process at a time can evaluate on a checkpoint. If there is another one, `run` raises SetupError with its
    name.

    Args:
        tables: The tables.
        stream: The stream to evaluate.
        streams: All streams by name.
        checkpoint: The folder of the checkpoint.
        options: How to evaluate.
        changes: Fields of the options to change, such as `once=True`.

    Attributes:
        reports: The reports of the last batches, newest last.
        replans: How often the query was planned again.
    """

    def __init__(
        self,
        tables: Tables,
        stream: Stream,
        streams: Mapping[str, Stream],
        checkpoint: str | Place,
        options: EvaluationOptions | None = None,
        **changes: Any,
    ) -> None:
        self.tables, self.stream = replace(tables.holding(stream), spark=open_own_session(tables.spark)), stream
        self.streams = dict(streams)
        self.checkpoint = Checkpoint(tables.find_place(checkpoint))
        self.reports: deque[BatchReport] = deque(maxlen=1_000)
        self.replans = 0
        options = replace(options or EvaluationOptions(), **changes)
        self._options = replace(options, default_shards=options.default_shards or stream.shards)
        self._idle = None if options.idle_after is None else _Idle(self, options.idle_after)
        self._warm_ups: WarmUps | None = None
        self._goes_on = False
        self._query: StreamingQuery | None = None
        self._beginning = Beginning({}, None)
        self._noted: dict[str, int] = {}
        self._new_columns = 0
        self._required: Coverage | None = None
        self._known_labels: list[str] | None = None
        self._stopping = threading.Event()
        self._is_interrupted = False

    def run(self) -> None:
        """Evaluates until `stop` is called or, with `once`, until all existing events are evaluated.

        Raises the error if the query fails.
        """
        try:
            self._run()
        except OSError as error:
            if (full := explain_full_disk(error)) is None:
                raise
            raise full from error

    def _run(self) -> None:
        self._require_compute()
        self.tables.require_fields(self.stream)
        with become_owner(
            self.checkpoint.owner_file, f"checkpoint {self.checkpoint.folder}"
        ) as self._require_ownership:
            self._beginning = begin(self.tables, self.stream, self.streams, self.checkpoint, self._options)
            self._quarantines = Quarantines(
                self.tables, self.stream, self.streams, self.checkpoint, has_gate=self._options.gate is not None
            )
            is_rebuilding = partial(is_being_rebuilt, self.checkpoint, self._beginning.rebuild)
            self._lists = ListsWatch(self.tables, self.stream, self.streams, self.checkpoint, is_rebuilding)
            # Over Spark Connect, another process writes the batches and knows the warming versions.
            if self._options.historian is not None and not is_connect(self.tables.spark):
                rules = RulesTable(self.tables, self.streams)
                self._warm_ups = WarmUps(self.tables, self.stream, rules, self.checkpoint, self._options.historian)
            try:
                self._lists.begin()
                while not self._stopping.is_set():
                    self._quarantines.publish(at_once=True)
                    if self._options.once and self._warm_ups is not None:
                        self._warm_ups.prepare()
                    self._plan_and_start()
                    if self._wait() and not self._must_go_on():
                        return
            except (PySparkException, Py4JJavaError) as error:
                explained = explain_failure(error, self.stream.name, self.checkpoint.folder)
                if explained is error:
                    raise
                raise explained from error
            finally:
                self._end_query()
                self._quarantines.publish(at_once=True)
                if self.reports:
                    note = partial(self._note_read, self.reports[-1].batch_id, is_last=True)
                    succeeds(note, "stream=%s could not note the last commits read: %s", self.stream)
                self._lists.remove_old()

    def _must_go_on(self) -> bool:
        """Returns whether a version unexpectedly still waits for its history after all events were evaluated."""
        is_waiting = self._options.once and self._warm_ups is not None and not self._warm_ups.is_idle
        must_go_on, self._goes_on = is_waiting and not self._goes_on, is_waiting
        return must_go_on

    def start(self) -> Evaluation:
        """Starts `run` in a new thread. `stop` ends it and raises its error if it failed."""
        self._failure: BaseException | None = None

        def run_and_keep_failure() -> None:
            try:
                self.run()
            except BaseException as error:  # noqa: BLE001 - raised again by stop() and wait()
                self._failure = error

        self._thread = threading.Thread(target=run_and_keep_failure, name=f"evaluate-{self.stream.name}", daemon=True)
        self._thread.start()
        return self

    def request_stop(self) -> None:
        """Asks `run` to end, and returns at once."""
        self._stopping.set()

    def stop(self) -> None:
        """Ends the evaluation and waits for it. The next start repeats an unfinished batch."""
        self._stopping.set()
        if hasattr(self, "_thread"):
            self._thread.join()
            if self._failure is not None:
                raise self._failure

    def wait(self, seconds: float) -> bool:
        """Waits up to `seconds` for the evaluation to end. Returns whether it has ended."""
        if hasattr(self, "_thread"):
            self._thread.join(seconds)
        return not self.running

    @property
    def running(self) -> bool:
        """Whether the thread of the evaluation is alive."""
        return hasattr(self, "_thread") and self._thread.is_alive()

    def wait_until(self, condition: Callable[[BatchReport], bool], timeout: float) -> BatchReport:
        """Waits for an old or new report that meets the `condition`, and returns it.

        Raises TimeoutError after `timeout` seconds or if the evaluation has ended.
        """
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
        """Raises SetupError if Spark Connect cannot run this evaluation, before anything is moved or written."""
        spark = self.tables.spark
        if not is_connect(spark):
            return
        if not hasattr(spark.range(1).groupBy("id"), "transformWithStateInPandas"):
            raise SetupError(
                "this is Spark Connect (serverless, or standard access mode) with the client of Spark "
                f"{pyspark.__version__}, which has no stateful operator for Python; it needs Spark 4.1. Use a cluster "
                "with dedicated access mode, or a runtime, environment version or databricks-connect with a newer Spark"
            )
        if self._options.rebuild:
            raise SetupError(_NO_REBUILD)

    def _plan_and_start(self) -> None:
        before = self.checkpoint.read_plan()
        self._watch = RulesWatch(self.tables, self.stream, self.checkpoint)
        # The last plan covers the rules in force. The rules in the table may take effect.
        coverage = self._watch.find_current_needs() | (self._required or (before.coverage if before else Coverage()))
        if self._beginning.rebuild is not None and self.checkpoint.is_new:
            coverage |= self._watch.find_past_needs(self._beginning.starts[RULES])
        spark = self.tables.spark
        shards = (
            before.shards
            if before
            else self._options.shards or self._options.default_shards or choose_default_shards(spark)
        )
        gates = self.checkpoint.plan_gates("" if self._options.gate is None else self._options.gate.enforced)
        rebuild = self._beginning.rebuild
        declarations = plan_start(self.stream, self.checkpoint, None if rebuild is None else rebuild.schedule)
        plan = Plan(
            shards=shards,
            coverage=coverage,
            declared=snapshot_declaration(self.stream),
            starts=self._beginning.starts,
            spark=spark.version,
            gates=gates,
            settings=declarations.to_rows(),
        )
        self.checkpoint.write_plan(plan)
        self._required = None
        self._query = self._start_query(plan, declarations)

    def _start_query(self, plan: Plan, declarations: Declarations) -> StreamingQuery:
        labels = self._find_labels(plan.shards)
        rebuild = self._beginning.rebuild
        events = self.tables.stream_changes(
            self.stream.name, plan.first_commit(EVENTS), {**_ADMISSION, **self._options.admission}
        )
        rules = self.tables.stream_changes("rules", plan.first_commit(RULES), _ALL_FILES if rebuild else None)
        blocks = build_event_blocks(events, declarations, plan, labels, self.checkpoint).union(
            build_rule_blocks(rules, labels, plan.gates)
        )
        schedule = None if rebuild is None else rebuild.schedule.to_dict()
        query_id = None if self._warm_ups is None else self.checkpoint.ensure_query_id()
        processor = ShardProcessor(declarations, self.streams, labels, self.checkpoint.folder, schedule, query_id)
        answers = blocks.groupBy("shard").transformWithStateInPandas(
            processor, BLOCKS, outputMode="Append", timeMode="None"
        )
        writer = (
            answers.writeStream.queryName(f"lookback-{self.stream.name}")
            .option("checkpointLocation", str(self.checkpoint.folder))
            .foreachBatch(self._make_writer())
        )
        # More tasks than cores only take time. An existing checkpoint keeps its number.
        partitions = min(plan.shards, count_cores(self.tables.spark)) if self.checkpoint.is_new else None
        with (
            use_files_of(self.tables.spark, self.checkpoint.folder),
            apply_query_settings(self.tables.spark, partitions),
        ):
            if self._options.once:
                return writer.trigger(availableNow=True).start()
            return writer.trigger(processingTime=self._options.every).start()

    def _find_labels(self, shards: int) -> list[str]:
        # Finding the labels takes a Spark job, so reuse them when the query is planned again.
        if self._known_labels is None:
            self._known_labels = find_shard_labels(self.tables.spark, shards)
        return self._known_labels

    def _make_writer(self) -> Callable[[DataFrame, int], None]:
        rebuild = self._beginning.rebuild
        if is_connect(self.tables.spark):
            if rebuild is not None:
                raise SetupError(_NO_REBUILD)
            return RemoteBatches.from_evaluation(
                self.tables,
                self.stream,
                self.streams,
                self.checkpoint.ensure_query_id(),
                has_gate=self._options.gate is not None,
            )
        sink: Sink | None = None
        missing = None if rebuild is None else UnwrittenRows(self.tables, self.stream.name, rebuild)

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
            # Failures repeated by a rebuild have already led to a quarantine.
            if rebuild is None or (report.arrival or 0) > (rebuild.through or 0):
                self._quarantines.add_failures(report)
            self.reports.append(report)
            self._new_columns = 0
            if self._warm_ups is not None:
                self._warm_ups.note(report)
            # The batch continues without a note; the next start then uses an earlier one.
            with suppress(SetupError, OSError):
                self._note_read(batch_id)
            if self._options.on_batch is not None:
                self._options.on_batch(report)

        def write_unless_interrupted(answers: DataFrame, batch_id: int) -> None:
            try:
                write(answers, batch_id)
            except Exception as error:
                if not self._is_interrupted:
                    raise
                reason = summarize_error(error)
                _LOG.info("stream=%s batch=%d was interrupted by the stop: %s", self.stream.name, batch_id, reason)
                raise InterruptedError(_INTERRUPTED) from None

        return write_unless_interrupted

    def _note_read(self, batch: int, *, is_last: bool = False) -> None:
        """Notes in the checkpoint which commits a batch has read, so that a later start can recognize the tables.

        If the log is remote, reading the time of a commit takes a job, so this is done only once, after the last batch.
        """
        names = {EVENTS: self.stream.name, RULES: RULES}
        due = {source: name for source, name in names.items() if is_last or self.tables.log_folder(name) is not None}
        read = self.checkpoint.read_batch(batch) if due else {}
        for source, name in due.items():
            commit = read[source]
            if commit is None or commit < 0 or self._noted.get(source) == commit:
                continue
            if (stamp := read_stamp(self.tables, name, commit)) is not None:
                self.checkpoint.note_read(source, commit, stamp)
            self._noted[source] = commit

    def _wait(self) -> bool:
        """Waits until the query ends. Returns False if a new query must be planned, True if the evaluation is over."""
        query = self._query
        assert query is not None
        seconds = _POLL_SECONDS if self._watch.is_cheap else _SLOW_POLL_SECONDS
        try:
            while not self._stopping.is_set():
                if query.awaitTermination(seconds):  # type: ignore[arg-type]
                    return True
                self._require_ownership()
                self._watch.follow_if_due(self.reports[-1] if self.reports else None)
                self._lists.follow_if_due()
                self._quarantines.publish()
                if self._warm_ups is not None and not self._options.once:
                    self._warm_ups.follow()
                if self._idle is not None:
                    self._idle.advance_if_due(query)
        except StreamingQueryException as error:
            self._required = UncoveredError.find_required(error)
            if self._required is None:
                # A query fails if its table's columns change after it was planned.
                self._new_columns += 1
                if _NEW_COLUMNS not in str(error) or self._new_columns > _MAX_NEW_COLUMNS:
                    raise
                self.tables.require_fields(self.stream)
            self.replans += 1
            return False
        self._end_query()
        return True

    def _end_query(self) -> None:
        if self._query is not None and self._query.isActive:
            self._is_interrupted = True
            self._query.stop()


class _Idle:
    """Advances a stream's watermark while no events arrive, so that windows end and absences raise alerts."""

    def __init__(self, evaluation: Evaluation, span: int) -> None:
        self._evaluation, self._span = evaluation, span
        self._version: int | None = None
        self._since = time.monotonic()

    def advance_if_due(self, query: StreamingQuery) -> None:
        """Advances the watermark if a span has passed since the last time; called often.

        A failure, such as during an outage of the catalog, is logged and retried one span later.
        """
        if (time.monotonic() - self._since) * 1e6 < self._span:
            return
        if not succeeds(
            lambda: self._advance(query),
            "stream=%s could not advance the watermark, will retry: %s",
            self._evaluation.stream,
        ):
            self._version, self._since = None, time.monotonic()

    def _advance(self, query: StreamingQuery) -> None:
        tables, stream = self._evaluation.tables, self._evaluation.stream
        version, before = tables.version(stream.name), self._version
        self._version, self._since = version, time.monotonic()
        # Waiting events must not become late.
        if version != before or query.status["isDataAvailable"]:
            return
        watermark = self._find_watermark()
        if watermark is not None:
            reached = str(to_text(to_utc(watermark + self._span)))
            rules = RulesTable(tables, self._evaluation.streams)
            rules.command("advance", stream.name, time=reached, author="lookback", comment="no events came")

    def _find_watermark(self) -> int | None:
        """Returns the last batch's watermark, or before the first batch a watermark from the table's events."""
        reports = self._evaluation.reports
        if reports:
            return reports[-1].watermark
        time_, stream = F.col(self._evaluation.stream.event_time), self._evaluation.stream
        past = self._evaluation.tables.read_events(stream.name).where(time_ <= F.current_timestamp())
        watermark = Reached.by(find_mark(past, stream)).watermark(stream)
        return None if watermark == NEVER else watermark

"""Ingests a Kafka topic batch by batch, and waits while brokers are unreachable."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from typing import TYPE_CHECKING

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from lookback.core.errors import LookbackError, SetupError
from lookback.spark.ingest.files import require_ingest
from lookback.spark.ingest.kafka import Topic
from lookback.spark.ingest.kafka_faults import BEGIN_ANEW, BrokersAway, explain_kafka_failure
from lookback.spark.ingest.report import IngestReport
from lookback.spark.ingest.round import IngestRound
from lookback.spark.platform.session import use_files_of
from lookback.spark.tables.locks import lock_ingest

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from lookback.core.streams.declaration import Stream
    from lookback.places import Place
    from lookback.spark.tables.lakehouse import Tables

_LOG = logging.getLogger("lookback")
# How long a run without `every` waits for a broker.
PATIENCE_SECONDS = 300.0
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
_CONNECT_SECONDS = 5.0
_POLL_SECONDS = 0.2
# A query may be waiting for a broker if it has made no progress for this long. Spark reports progress every 10 s, even
# without records.
_SILENCE_SECONDS = 20.0
_LOST = {"failOnDataLoss": "false"}


class TopicIngest:
    """Ingests the records of a stream's Kafka topic into its events table, each exactly once.

    The checkpoint records the progress. An interrupted batch is repeated, and the events that it has already written
    count as duplicates.

    Args:
        tables: The tables of the workspace.
        stream: The stream.
        checkpoint: The folder of the checkpoint; default: see `Tables.choose_checkpoint`.
        every: The interval at which to look for records; None: ingest the existing records, then end.
        skip_lost: Continues even if the next records are no longer in the topic.
        patience: How long a run with `every` None waits for a broker, in seconds.
        progress: Called with a line for each batch.
    """

    def __init__(
        self,
        tables: Tables,
        stream: Stream,
        checkpoint: str | Place | None = None,
        *,
        every: str | None = None,
        skip_lost: bool = False,
        patience: float = PATIENCE_SECONDS,
        progress: Callable[[str], None] | None = print,
    ) -> None:
        require_ingest(tables, stream)
        self._tables, self._stream, self._every = tables, stream, every
        self._topic = Topic.of(stream)
        self._checkpoint = tables.find_place(checkpoint or tables.choose_checkpoint("kafka", stream))
        self._options = _LOST if skip_lost else {}
        self._progress = progress
        # A run with `every` waits forever.
        self._absence = _Absence(self._topic, patience if every is None else None)
        self._stopping = threading.Event()
        self._failure: LookbackError | None = None
        self._sum = IngestReport(stream.name, 0, 0, 0, 0, 0, 0.0)

    def run(self) -> IngestReport:
        """Ingests records until the end or until `request_stop`, and returns the summed report of all batches.

        Raises:
            SetupError: If the topic is missing, records are lost, the brokers refuse access, or, in a run without
                `every`, no broker answers for `patience` seconds.
        """
        with lock_ingest(self._tables, self._stream):
            self._require_same_topics()
            self._tables.require(self._stream)
            self._round = IngestRound(self._tables, self._stream, None)
            is_whole = True
            while not self._stopping.is_set():
                if is_reachable(self._topic.servers):
                    try:
                        self._run_query()
                        break
                    except BrokersAway as reason:
                        self._absence.begin(str(reason))
                        is_whole = False
                self._absence.wait(self._stopping)
            # The commits of an interrupted batch are in the table's log, but not in a report.
            is_complete = is_whole and self._every is None and not self._stopping.is_set()
            return self._round.add_versions(self._sum) if is_complete else self._sum

    def request_stop(self) -> None:
        """Asks `run` to end soon; the next start repeats an unfinished batch."""
        self._stopping.set()

    def _require_same_topics(self) -> None:
        """Raises SetupError if the checkpoint has other topics: Spark would take them for deleted and corrupt it."""
        dropped = self._topic.find_dropped(read_checkpoint_topics(self._checkpoint))
        if dropped:
            raise SetupError(
                f"{self._checkpoint} is of topic {', '.join(sorted(dropped))}, but stream {self._stream.name!r} now "
                f"reads {self._topic.topics}. {BEGIN_ANEW}"
            )

    def _run_query(self) -> None:
        """Runs one query until it ends. Raises BrokersAway if no broker can be reached."""
        query = None
        try:
            records = self._topic.watch(self._tables.spark, self._options)
            writer = records.writeStream.foreachBatch(self._take).option("checkpointLocation", str(self._checkpoint))
            writer = writer.queryName(f"ingest {self._stream.name}")
            every = self._every
            writer = writer.trigger(availableNow=True) if every is None else writer.trigger(processingTime=every)
            with use_files_of(self._tables.spark, self._checkpoint):
                query = writer.start()
            watch = _QuietWatch(query, self._topic)
            while not self._stopping.is_set():
                if query.awaitTermination(_POLL_SECONDS):  # type: ignore[arg-type]
                    return
                if watch.has_progress():
                    self._absence.end()
        except (PySparkException, Py4JJavaError) as error:
            if self._failure is not None:
                raise self._failure from None
            raise explain_kafka_failure(error, self._topic, self._stream, str(self._checkpoint)) from error
        finally:
            if query is not None and query.isActive:
                query.stop()

    def _take(self, records: DataFrame, batch_id: int) -> None:
        try:
            report = self._round.take_checked(self._topic.read_records(records, self._stream))
        except LookbackError as error:
            # The query's own error has only the text of this one.
            self._failure = error
            raise
        self._absence.end()
        self._sum = self._sum.plus(report)
        if self._progress is not None:
            self._progress(str(report))


def read_checkpoint_topics(checkpoint: Place) -> set[str]:
    """Returns the topics in a checkpoint; none if it is new or not accessible as files."""
    try:
        plans = [file for file in (checkpoint / "offsets").iterdir() if file.name.isdigit()]
        last = max(plans, key=lambda file: int(file.name)).read_text(encoding="utf-8")
        return set(json.loads(last.strip().splitlines()[-1]))
    except (OSError, TypeError, ValueError):
        return set()


def is_reachable(servers: str) -> bool:
    """Returns whether any of the brokers in `servers` (host:port, separated by commas) accepts a connection."""
    for server in servers.split(","):
        host, _, port = server.rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS):
                return True
        except OSError:
            continue
    return False


class _Absence:
    """A period in which no broker answers. Logs its start and end, and raises an error if it exceeds `patience`."""

    def __init__(self, topic: Topic, patience: float | None) -> None:
        self._topic, self._patience = topic, patience
        self._since: float | None = None
        self._pause = _FIRST_PAUSE

    def begin(self, reason: str = "") -> None:
        """Logs the start once, with the reason if it is known."""
        if self._since is None:
            self._since = time.monotonic()
            _LOG.warning(f"no broker of {self._topic} answers; waiting for one" + (f": {reason}" if reason else ""))

    def wait(self, stopping: threading.Event) -> None:
        """Waits, longer each time. Raises SetupError once `patience` is exceeded."""
        self.begin()
        now = time.monotonic()
        waited = now - (self._since or now)
        if self._patience is not None and waited >= self._patience:
            raise SetupError(
                f"no broker of {self._topic} has answered for {waited:,.0f} s. Check that one is running, and that "
                "host and port are correct. Nothing is lost: run the ingest again once a broker answers"
            )
        stopping.wait(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def end(self) -> None:
        """Logs the end, if a start was logged."""
        if self._since is not None:
            _LOG.warning(f"{self._topic} answers again after {time.monotonic() - self._since:,.0f} s")
        self._since, self._pause = None, _FIRST_PAUSE


class _QuietWatch:
    """Watches a running query and logs when it waits for a broker, which Spark does silently for minutes."""

    def __init__(self, query: StreamingQuery, topic: Topic) -> None:
        self._query, self._topic = query, topic
        self._last: str | None = None
        self._since = self._looked = time.monotonic()
        self._is_away = False

    def has_progress(self) -> bool:
        """Returns whether the query has reported progress since the last call. Call it often."""
        now = time.monotonic()
        if now - self._looked < _SILENCE_SECONDS / 10:
            return False
        self._looked = now
        progress = self._query.lastProgress
        last = None if progress is None else str(progress["timestamp"])
        has_progress = last != self._last
        if has_progress:
            self._last, self._since = last, now
        is_away = now - self._since >= _SILENCE_SECONDS and not is_reachable(self._topic.servers)
        if is_away != self._is_away:
            self._is_away = is_away
            if is_away:
                _LOG.warning(f"{self._topic} no longer answers; waiting for a broker")
            else:
                _LOG.warning(f"{self._topic} answers again")
        return has_progress

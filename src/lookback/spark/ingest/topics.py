"""Ingests a Kafka topic, batch by batch from the end of the last one, and waits for brokers that are away."""

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
from lookback.spark.ingest.files import IngestReport, IngestRound, require_ingest
from lookback.spark.ingest.kafka import Topic
from lookback.spark.ingest.kafka_faults import BEGIN_ANEW, BrokersAway, explain_kafka_failure
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
# The time for which a run that is to end waits for a broker.
PATIENCE_SECONDS = 300.0
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
_CONNECT_SECONDS = 5.0
_POLL_SECONDS = 0.2
# A query without progress for so long may wait for a broker. Spark reports progress every 10 s, also without records.
_SILENCE_SECONDS = 20.0
_LOST = {"failOnDataLoss": "false"}


def choose_topic_checkpoint(tables: Tables, stream: Stream) -> str:
    """Returns the default checkpoint of an ingest of the stream's topic: a folder below the tables' root or volume."""
    return f"{tables.files}/_checkpoints/kafka_{stream.name}"


class TopicIngest:
    """Brings the records of a stream's Kafka topic into its events table as ingest does with files, each exactly once.

    The checkpoint records the progress; a batch that was cut short is repeated, and the events that it had written are
    found as duplicates. checkpoint: its folder. every: the interval between two looks for more; None: take the records
    that are there at the start, then end. skip_lost: go on although the next records are no longer in the topic.
    progress: called with a line for each batch.
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
        self._checkpoint = tables.find_place(checkpoint or choose_topic_checkpoint(tables, stream))
        self._options = _LOST if skip_lost else {}
        self._progress = progress
        # Only a run that is to end loses patience.
        self._absence = _Absence(self._topic, patience if every is None else None)
        self._stopping = threading.Event()
        self._failure: LookbackError | None = None
        self._sum = IngestReport(stream.name, 0, 0, 0, 0, 0, 0.0)

    def run(self) -> IngestReport:
        """Takes records in until the end, or `request_stop`. Returns the account of all batches.

        Raises SetupError if the topic is not there, records of it are lost, the brokers refuse, or, in a run that is to
        end, no broker answers for `patience` seconds.
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
            # The commits of a batch that was cut short are in the log, but in no report.
            is_complete = is_whole and self._every is None and not self._stopping.is_set()
            return self._round.add_versions(self._sum) if is_complete else self._sum

    def request_stop(self) -> None:
        """Asks `run` to end soon; a batch that is half done is repeated at the next start."""
        self._stopping.set()

    def _require_same_topics(self) -> None:
        """Raises SetupError if the checkpoint is of other topics: Spark would take these for deleted, and spoil it."""
        dropped = self._topic.find_dropped(read_checkpoint_topics(self._checkpoint))
        if dropped:
            raise SetupError(
                f"{self._checkpoint} is of topic {', '.join(sorted(dropped))}, and stream {self._stream.name!r} now reads "
                f"{self._topic.topics}. {BEGIN_ANEW}"
            )

    def _run_query(self) -> None:
        """Runs one query until it ends. Raises BrokersAway if it failed for lack of a broker."""
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
            # The query raises only the text of this error.
            self._failure = error
            raise
        self._absence.end()
        self._sum = self._sum.plus(report)
        if self._progress is not None:
            self._progress(str(report))


def read_checkpoint_topics(checkpoint: Place) -> set[str]:
    """Returns the topics in a checkpoint; none if it is new, or is not reached as files."""
    try:
        plans = [file for file in (checkpoint / "offsets").iterdir() if file.name.isdigit()]
        last = max(plans, key=lambda file: int(file.name)).read_text(encoding="utf-8")
        return set(json.loads(last.strip().splitlines()[-1]))
    except (OSError, TypeError, ValueError):
        return set()


def is_reachable(servers: str) -> bool:
    """Returns whether any of the brokers in `servers` (host:port, with commas between) accepts a connection."""
    for server in servers.split(","):
        host, _, port = server.rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS):
                return True
        except OSError:
            continue
    return False


class _Absence:
    """The time for which no broker answers. Logs its begin and its end, and raises an error when patience is over."""

    def __init__(self, topic: Topic, patience: float | None) -> None:
        self._topic, self._patience = topic, patience
        self._since: float | None = None
        self._pause = _FIRST_PAUSE

    def begin(self, reason: str = "") -> None:
        """Logs once that it has begun, and the reason if that is known."""
        if self._since is None:
            self._since = time.monotonic()
            _LOG.warning(f"no broker of {self._topic} answers; waiting for it" + (f": {reason}" if reason else ""))

    def wait(self, stopping: threading.Event) -> None:
        """Waits, longer each time. Raises SetupError when patience is over."""
        self.begin()
        now = time.monotonic()
        waited = now - (self._since or now)
        if self._patience is not None and waited >= self._patience:
            raise SetupError(
                f"no broker of {self._topic} has answered for {waited:,.0f} s. Is it running, and are host and port "
                "right? Nothing is lost: run it again when it answers"
            )
        stopping.wait(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def end(self) -> None:
        """Logs that it has ended, if it had begun."""
        if self._since is not None:
            _LOG.warning(f"{self._topic} answers again after {time.monotonic() - self._since:,.0f} s")
        self._since, self._pause = None, _FIRST_PAUSE


class _QuietWatch:
    """Watches a running query, and logs that it waits for a broker, which Spark does in silence for minutes."""

    def __init__(self, query: StreamingQuery, topic: Topic) -> None:
        self._query, self._topic = query, topic
        self._last: str | None = None
        self._since = self._looked = time.monotonic()
        self._is_away = False

    def has_progress(self) -> bool:
        """Returns whether the query has reported progress since the last call; call it often."""
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
                _LOG.warning(f"{self._topic} does not answer any more; waiting for it")
            else:
                _LOG.warning(f"{self._topic} answers again")
        return has_progress

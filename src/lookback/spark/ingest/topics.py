"""Ingest of a Kafka topic: batch by batch from where the last one ended, waiting for brokers that are away."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from lookback.core.errors import LookbackError, SetupError
from lookback.spark.ingest.files import IngestReport, Step, require_ingest
from lookback.spark.ingest.kafka import Topic
from lookback.spark.ingest.kafka_faults import BrokersAway, explain_kafka_failure
from lookback.spark.tables.locks import lock_ingest

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables

_LOG = logging.getLogger("lookback")
# How long a run that is to end waits for a broker.
PATIENCE_SECONDS = 300.0
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
_CONNECT_SECONDS = 5.0
_POLL_SECONDS = 0.2
# A query of which nothing was heard for so long may wait for a broker. Spark speaks every 10 s, also without records.
_SILENCE_SECONDS = 20.0
_LOST = {"failOnDataLoss": "false"}


def topic_checkpoint(tables: Tables, stream: Stream) -> str:
    """Where an ingest of the stream's topic keeps how far it is unless told otherwise: below the tables' root or volume."""
    return f"{tables.files}/_checkpoints/kafka_{stream.name}"


class TopicIngest:
    """The records of a stream's Kafka topic into its events table, as files go there, each exactly once.

    How far it is stands in the checkpoint; a batch that was cut short is repeated, and what it had written is found as
    duplicates. checkpoint: its folder. every: how often to look for more; None: take what is there when it starts, then
    end. skip_lost: go on where records that the topic no longer has would be next. progress: is given a line a batch.
    """

    def __init__(
        self,
        tables: Tables,
        stream: Stream,
        checkpoint: str | Path | None = None,
        *,
        every: str | None = None,
        skip_lost: bool = False,
        patience: float = PATIENCE_SECONDS,
        progress: Callable[[str], None] | None = print,
    ) -> None:
        require_ingest(tables, stream)
        self._tables, self._stream, self._every = tables, stream, every
        self._topic = Topic.of(stream)
        self._checkpoint = str(checkpoint or topic_checkpoint(tables, stream))
        self._options = _LOST if skip_lost else {}
        self._progress = progress
        # Of a run that is to end; one that goes on waits for as long as it takes.
        self._absence = _Absence(self._topic, patience if every is None else None)
        self._stopping = threading.Event()
        self._failure: LookbackError | None = None
        self._sum = IngestReport(stream.name, 0, 0, 0, 0, 0, 0.0)

    def run(self) -> IngestReport:
        """Takes records in until the end, or `request_stop`. Returns the account of all batches.

        Raises SetupError, in words, where the topic is not there, records of it are lost, the brokers refuse, or for
        a run that is to end none answers for `patience` seconds.
        """
        with lock_ingest(self._tables, self._stream):
            self._require_same_topics()
            self._tables.require(self._stream)
            self._step = Step(self._tables, self._stream, None)
            whole = True
            while not self._stopping.is_set():
                if is_reachable(self._topic.servers):
                    try:
                        self._query()
                        break
                    except BrokersAway as reason:
                        self._absence.begin(str(reason))
                        whole = False
                self._absence.wait(self._stopping)
            # Of a batch that was cut short the log has commits that no report counts.
            is_all = whole and self._every is None and not self._stopping.is_set()
            return self._step.versions(self._sum) if is_all else self._sum

    def request_stop(self) -> None:
        """Asks `run` to end soon; a batch that is half done is repeated at the next start."""
        self._stopping.set()

    def _require_same_topics(self) -> None:
        """Raises SetupError where the checkpoint is of other topics; Spark would see theirs deleted, and spoil it."""
        kind, names = self._topic.subscription
        gone = topics_of(self._checkpoint) - set(names.split(",")) if kind == "subscribe" else set()
        if gone:
            raise SetupError(
                f"{self._checkpoint} is of topic {', '.join(sorted(gone))}, and stream {self._stream.name!r} now reads {names}: "
                "begin with another --checkpoint. What is in the events table already is not taken in twice"
            )

    def _query(self) -> None:
        """One query, until it ends. Raises Away where it failed for want of a broker."""
        query = None
        try:
            records = self._topic.watch(self._tables.spark, self._options)
            writer = records.writeStream.foreachBatch(self._take).option("checkpointLocation", self._checkpoint)
            writer = writer.queryName(f"ingest {self._stream.name}")
            every = self._every
            writer = writer.trigger(availableNow=True) if every is None else writer.trigger(processingTime=every)
            query = writer.start()
            heard = _QuietWatch(query, self._topic)
            while not self._stopping.is_set():
                if query.awaitTermination(_POLL_SECONDS):  # type: ignore[arg-type]
                    return
                if heard.look():
                    self._absence.over()
        except (PySparkException, Py4JJavaError) as error:
            if self._failure is not None:
                raise self._failure from None
            raise explain_kafka_failure(error, self._topic, self._stream, self._checkpoint) from error
        finally:
            if query is not None and query.isActive:
                query.stop()

    def _take(self, records: DataFrame, batch_id: int) -> None:
        try:
            report = self._step.take_judged(self._topic.judged(records, self._stream))
        except LookbackError as error:
            # What comes out of the query is only its text.
            self._failure = error
            raise
        self._absence.over()
        self._sum = self._sum.plus(report)
        if self._progress is not None:
            self._progress(str(report))


def topics_of(checkpoint: str) -> set[str]:
    """The topics that a checkpoint knows; none where it is new, or is not reached as files."""
    try:
        plans = [file for file in Path(checkpoint, "offsets").iterdir() if file.name.isdigit()]
        last = max(plans, key=lambda file: int(file.name)).read_text(encoding="utf-8")
        return set(json.loads(last.strip().splitlines()[-1]))
    except (OSError, TypeError, ValueError):
        return set()


def is_reachable(servers: str) -> bool:
    """Whether any of the brokers (host:port, with commas between) takes a connection."""
    for server in servers.split(","):
        host, _, port = server.rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS):
                return True
        except OSError:
            continue
    return False


class _Absence:
    """The time for which no broker answers: said when it begins, again and again, and when it is over."""

    def __init__(self, topic: Topic, patience: float | None) -> None:
        self._topic, self._patience = topic, patience
        self._since: float | None = None
        self._pause = _FIRST_PAUSE

    def begin(self, reason: str = "") -> None:
        """Says once that it has begun, and why if that is known."""
        if self._since is None:
            self._since = time.monotonic()
            _LOG.warning(f"no broker of {self._topic} answers; waiting for it" + (f": {reason}" if reason else ""))

    def wait(self, stopping: threading.Event) -> None:
        """A pause, longer each time. Raises SetupError when patience is over."""
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

    def over(self) -> None:
        """Says that it is over, if there was one."""
        if self._since is not None:
            _LOG.warning(f"{self._topic} answers again after {time.monotonic() - self._since:,.0f} s")
        self._since, self._pause = None, _FIRST_PAUSE


class _QuietWatch:
    """Watches a running query and says so where it waits for a broker, which Spark does in silence for minutes."""

    def __init__(self, query: StreamingQuery, topic: Topic) -> None:
        self._query, self._topic = query, topic
        self._last: str | None = None
        self._since = self._looked = time.monotonic()
        self._away = False

    def look(self) -> bool:
        """Called often. Returns whether the query has been heard of since the last time."""
        now = time.monotonic()
        if now - self._looked < _SILENCE_SECONDS / 10:
            return False
        self._looked = now
        progress = self._query.lastProgress
        last = None if progress is None else str(progress["timestamp"])
        heard = last != self._last
        if heard:
            self._last, self._since = last, now
        away = now - self._since >= _SILENCE_SECONDS and not is_reachable(self._topic.servers)
        if away != self._away:
            self._away = away
            if away:
                _LOG.warning(f"{self._topic} does not answer any more; waiting for it")
            else:
                _LOG.warning(f"{self._topic} answers again")
        return heard

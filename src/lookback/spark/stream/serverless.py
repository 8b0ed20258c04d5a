"""Writes the output of batches on Spark Connect: serverless compute, and standard access mode.

There the writer runs in a different process from the evaluation. Spark sends it there with plain values, and its
results are in the tables.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lookback.core.rules.quarantine import find_quarantines
from lookback.core.streams.declaration import Stream
from lookback.spark.batches.sink import Sink
from lookback.spark.rules import RulesTable
from lookback.spark.tables.lakehouse import Tables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_LOG = logging.getLogger("lookback")


@dataclass(frozen=True)
class RemoteBatches:
    """Writes the answers of a batch, for `foreachBatch`.

    Each batch may run in a new process, so every batch may be a repetition.

    Attributes:
        place: The root, catalog and schema of the tables.
        stream: The evaluated stream.
        streams: All declarations by name.
        query_id: The query id of the checkpoint.
        has_gate: Whether the settings have a gate.
    """

    place: tuple[str | None, str | None, str | None]
    stream: str
    streams: Mapping[str, Mapping[str, Any]]
    query_id: str
    has_gate: bool = False

    @classmethod
    def from_evaluation(
        cls, tables: Tables, stream: Stream, streams: Mapping[str, Stream], query_id: str, *, has_gate: bool = False
    ) -> RemoteBatches:
        """Returns the writer of an evaluation."""
        place = (tables.root, tables.catalog_name, tables.schema_name)
        return cls(place, stream.name, {name: each.to_dict() for name, each in streams.items()}, query_id, has_gate)

    def __call__(self, answers: DataFrame, batch_id: int) -> None:
        """Writes the output of a batch, and publishes the quarantines for its failures."""
        tables = Tables(answers.sparkSession, *self.place)
        started = time.perf_counter()
        table = answers.toArrow()
        if not table.num_rows:
            return
        milliseconds = 1_000 * (time.perf_counter() - started)
        streams = {name: Stream.from_dict(document) for name, document in self.streams.items()}
        report = Sink(tables, streams[self.stream], self.query_id).write(table, batch_id, milliseconds)
        for quarantine in find_quarantines(report.failures, streams[self.stream].max_failures):
            try:
                RulesTable(tables, streams, self.has_gate).quarantine(quarantine)
            except Exception as error:  # noqa: BLE001, PERF203 - no error may stop the stream
                # The rule will fail again, so a later batch retries this.
                _LOG.warning("stream=%s rule=%s could not be quarantined: %s", self.stream, quarantine.rule_id, error)

"""Publishes what the engine takes out of service, beside the batches.

What is to be published is written into the checkpoint before its batch ends, and taken out once it stands in the rules
table: neither a kill nor a table that cannot be written loses it, and the table itself tells what stands there already.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from lookback.core.rules.quarantine import Quarantine, find_quarantines
from lookback.spark.rules import RulesTable

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream
    from lookback.spark.stream.checkpoint import Checkpoint
    from lookback.spark.stream.sink import BatchReport
    from lookback.spark.tables.lakehouse import Tables

FILE = "quarantine.json"
_LOG = logging.getLogger("lookback")
# Seconds until the next attempt where one has failed.
_PAUSE = 10.0


class Quarantines:
    """What is to be taken out of service of one stream and is not published yet. May be used by several threads.

    Failing to publish stops nothing: it is logged and tried again, also by the next run on this checkpoint.
    """

    def __init__(self, tables: Tables, stream: Stream, streams: Mapping[str, Stream], checkpoint: Checkpoint) -> None:
        self._rules, self._stream = RulesTable(tables, streams), stream
        self._folder = checkpoint.folder
        self._lock = threading.Lock()
        self._waiting = self._read()
        self._not_before = 0.0

    def note(self, report: BatchReport) -> None:
        """Keeps what a batch has to say; before the batch ends, so that a repeated one says it again."""
        due = {
            (each.rule_id, each.version): each for each in find_quarantines(report.failures, self._stream.max_failures)
        }
        with self._lock:
            if due.keys() - self._waiting.keys():
                self._waiting = {**due, **self._waiting}
                self._write()

    def publish(self, *, at_once: bool = False) -> None:
        """Publishes what waits; called often. at_once: also where it has just failed."""
        if not self._waiting or (not at_once and time.monotonic() < self._not_before):
            return
        with self._lock:
            waiting = list(self._waiting.items())
        for slot, quarantine in waiting:
            if not self._published(quarantine):
                self._not_before = time.monotonic() + _PAUSE
                return
            with self._lock:
                del self._waiting[slot]
                self._write()

    def _published(self, quarantine: Quarantine) -> bool:
        """Whether the quarantine stands in the table, or need not any more."""
        rule = f"rule={quarantine.rule_id} version={quarantine.version}"
        try:
            done = self._rules.quarantine(quarantine)
        except Exception as error:  # noqa: BLE001 - whatever it is, the stream goes on
            told = str(error).partition("\n")[0][:300]
            _LOG.warning(
                "stream=%s %s could not be quarantined, it will be tried again: %s", self._stream.name, rule, told
            )
            return False
        if done:
            _LOG.warning("stream=%s %s is quarantined: %s", self._stream.name, rule, quarantine.comment)
        return True

    def _read(self) -> dict[tuple[str, int], Quarantine]:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            listed = [Quarantine(**row) for row in json.loads((self._folder / FILE).read_text(encoding="utf-8"))]
            return {(each.rule_id, each.version): each for each in listed}
        return {}

    def _write(self) -> None:
        file = self._folder / FILE
        temporary = file.with_name(f".{FILE}.{os.getpid()}")
        try:
            if self._waiting:
                temporary.write_text(json.dumps([asdict(each) for each in self._waiting.values()]), encoding="utf-8")
                temporary.replace(file)
            else:
                file.unlink(missing_ok=True)
        except OSError as error:
            _LOG.warning("stream=%s %s cannot be written: %s", self._stream.name, file, error)

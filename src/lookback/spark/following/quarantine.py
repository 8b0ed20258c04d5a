"""Publishes quarantined rule versions to the rules table while batches run.

A quarantine is stored in the checkpoint before its batch ends and removed once the rules table has it. So it survives a
killed process and a failed write, and is never published twice, because the table shows what it already has.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from lookback.core.rules.quarantine import Quarantine, find_quarantines
from lookback.core.values.texts import summarize_error
from lookback.spark.rules import RulesTable

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream
    from lookback.spark.batches.sink import BatchReport
    from lookback.spark.checkpoints.checkpoint import Checkpoint
    from lookback.spark.tables.lakehouse import Tables

FILE = "quarantine.json"
_LOG = logging.getLogger("lookback")
# Time until the next attempt after a failed one.
_PAUSE_SECONDS = 10.0


class Quarantines:
    """The unpublished quarantines of one stream. Thread-safe.

    If publishing fails, the stream continues. The failure is logged and retried, also by the next run on this
    checkpoint.
    """

    def __init__(
        self,
        tables: Tables,
        stream: Stream,
        streams: Mapping[str, Stream],
        checkpoint: Checkpoint,
        *,
        has_gate: bool = False,
    ) -> None:
        self._rules, self._stream = RulesTable(tables, streams, has_gate), stream
        self._checkpoint, self._file = checkpoint, checkpoint.folder / FILE
        self._lock = threading.Lock()
        self._waiting = self._read()
        self._not_before = 0.0

    def add_failures(self, report: BatchReport) -> None:
        """Stores the quarantines for a batch's failures; called before the batch ends, so a repetition adds them."""
        due = {
            (each.rule_id, each.version): each for each in find_quarantines(report.failures, self._stream.max_failures)
        }
        with self._lock:
            if due.keys() - self._waiting.keys():
                self._waiting = {**due, **self._waiting}
                self._write()

    def publish(self, *, at_once: bool = False) -> None:
        """Publishes waiting quarantines; called often. `at_once` skips the pause after a failed attempt."""
        if not self._waiting or (not at_once and time.monotonic() < self._not_before):
            return
        with self._lock:
            waiting = list(self._waiting.items())
        for slot, quarantine in waiting:
            if not self._try_publish(quarantine):
                self._not_before = time.monotonic() + _PAUSE_SECONDS
                return
            with self._lock:
                del self._waiting[slot]
                self._write()

    def _try_publish(self, quarantine: Quarantine) -> bool:
        """Publishes a quarantine unless it is no longer needed. Returns False if that failed and must be retried."""
        rule = f"rule={quarantine.rule_id} version={quarantine.version}"
        try:
            done = self._rules.quarantine(quarantine)
        except Exception as error:  # noqa: BLE001 - no error may stop the stream
            reason = summarize_error(error)
            _LOG.warning("stream=%s %s could not be quarantined, will retry: %s", self._stream.name, rule, reason)
            return False
        if done:
            _LOG.warning("stream=%s %s is quarantined: %s", self._stream.name, rule, quarantine.comment)
        return True

    def _read(self) -> dict[tuple[str, int], Quarantine]:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            listed = [Quarantine(**row) for row in json.loads(self._file.read_text(encoding="utf-8"))]
            return {(each.rule_id, each.version): each for each in listed}
        return {}

    def _write(self) -> None:
        try:
            if self._waiting:
                self._checkpoint.write_json(FILE, [asdict(each) for each in self._waiting.values()])
            else:
                self._file.unlink(missing_ok=True)
        except OSError as error:
            _LOG.warning("stream=%s cannot write %s: %s", self._stream.name, self._file, error)

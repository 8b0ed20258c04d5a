"""Runs slow work in a separate thread, so that you can continue meanwhile, or cancel it."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lookback.core.errors import LookbackError
from lookback.desk.parts import describe_failure
from lookback.spark.platform.jobs import cancel_jobs, tagged_jobs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from lookback.verbs import Progress

_CANCEL_SECONDS = 0.2
_LOG = logging.getLogger("lookback")


class RunningEvaluation:
    """One piece of work in a separate thread.

    `work` gets a function that shows a line of progress; its Spark jobs can be cancelled. In the same thread, `on_done`
    gets the result, or `on_failure` a sentence. After a cancellation `on_cancelled` is called instead once the work has
    ended. With `is_lasting` the work writes something, so a result counts even after a cancellation.
    """

    def __init__(
        self,
        spark: SparkSession | None,
        work: Callable[[Progress], Any],
        *,
        on_line: Progress,
        on_done: Callable[[Any], None],
        on_failure: Callable[[str], None],
        on_cancelled: Callable[[], None],
        is_lasting: bool = False,
    ) -> None:
        self._spark, self._work, self._tag = spark, work, f"lookback-desk-{uuid.uuid4().hex}"
        self._on_line, self._on_done, self._on_failure, self._on_cancelled = on_line, on_done, on_failure, on_cancelled
        self._is_lasting, self._is_cancelled = is_lasting, threading.Event()
        self._thread = threading.Thread(target=self._run, name="lookback-desk", daemon=True)

    def start(self) -> RunningEvaluation:
        """Starts the work."""
        self._thread.start()
        return self

    @property
    def is_running(self) -> bool:
        """Whether the work is running, which includes cancelled work that has not ended yet."""
        return self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until the work has ended, up to `seconds`. Returns whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def cancel(self) -> None:
        """Cancels the work: its running Spark jobs, and each further job as it starts, until the thread has ended."""
        if not self._is_cancelled.is_set():
            self._is_cancelled.set()
            threading.Thread(target=self._cancel_until_ended, name="lookback-desk-cancel", daemon=True).start()

    def _cancel_until_ended(self) -> None:
        while self._spark is not None and not self.wait(_CANCEL_SECONDS):
            cancel_jobs(self._spark, self._tag)

    def _show_line(self, line: str) -> None:
        if not self._is_cancelled.is_set():
            self._on_line(line)

    def _run(self) -> None:
        try:
            result = self._run_work()
            if self._is_lasting or not self._is_cancelled.is_set():
                self._on_done(result)
                return
        except Exception as error:  # noqa: BLE001 - whatever ends the thread is shown to the person who started it
            if not self._is_cancelled.is_set():
                if not isinstance(error, LookbackError):
                    _LOG.warning("work at a desk failed", exc_info=True)
                self._on_failure(describe_failure(error))
        if self._is_cancelled.is_set():
            self._on_cancelled()

    def _run_work(self) -> Any:
        if self._spark is None:
            return self._work(self._show_line)
        with tagged_jobs(self._spark, self._tag):
            return self._work(self._show_line)


class Ticker:
    """Calls a function repeatedly in a separate thread, until it is stopped or has not been touched for a while.

    `act` is called with pauses of `seconds`; its errors are logged, and the next call follows. After `patience` seconds
    without a `touch` it stops and calls `on_end`.
    """

    def __init__(self, act: Callable[[], None], seconds: float, patience: float, on_end: Callable[[], None]) -> None:
        self._act, self._seconds, self._patience, self._on_end = act, seconds, patience, on_end
        self._touched_at = time.monotonic()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lookback-desk-ticker", daemon=True)

    def start(self) -> Ticker:
        """Starts the thread."""
        self._thread.start()
        return self

    @property
    def is_running(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    def touch(self) -> None:
        """Restarts the patience, as the user is active."""
        self._touched_at = time.monotonic()

    def stop(self, wait: bool = True) -> None:
        """Stops the thread. With `wait` it returns once the thread has ended, unless called from that thread."""
        self._stopping.set()
        if wait and self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(self._seconds):
            if time.monotonic() - self._touched_at > self._patience:
                self._on_end()
                return
            try:
                self._act()
            except Exception:  # noqa: BLE001 - the next time may do
                _LOG.warning("a desk could not be refreshed", exc_info=True)

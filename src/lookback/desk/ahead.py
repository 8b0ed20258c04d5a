"""Prepares what a review desk shows next, in the background and without touching widgets."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from lookback.desk.queue import QueuedAlert, SessionStep
from lookback.desk.records import AlertRecords, OpenedAlert


class Ahead:
    """Explains the next alert, and counts decisions by rule, while you look at the current alert."""

    def __init__(self, records: AlertRecords, *, in_background: bool) -> None:
        self._records = records
        self._pool = ThreadPoolExecutor(1, "lookback-desk") if in_background else None
        self._next: tuple[QueuedAlert, Future[tuple[OpenedAlert, list[dict[str, Any]]]]] | None = None
        self._counting: Future[dict[str, dict[str, int]]] | None = None
        # Decisions of this session, by rule and disposition, that the counts do not include.
        self._added = Counter[tuple[str, str]]()

    def count(self, rule_id: str) -> dict[str, int] | None:
        """Returns a rule's decided alerts by disposition, including this session; None until they have been read."""
        if self._counting is None or not self._counting.done() or self._counting.exception() is not None:
            return None
        counts = Counter(self._counting.result().get(rule_id, {}))
        counts.update({disposition: by for (own, disposition), by in self._added.items() if own == rule_id})
        return counts

    def add(self, step: SessionStep, by: int) -> None:
        """Counts a decision (1) or its undoing (-1). A count that is still running sees it in the table."""
        for alert in step.alerts:
            if self.count(alert.rule_id) is not None:
                self._added[alert.rule_id, step.disposition] += by

    def forget(self) -> None:
        """Drops everything prepared, as the queue is reloaded."""
        self._next = self._counting = None
        self._added.clear()

    def drop(self) -> None:
        """Drops the prepared alert, as decisions on related alerts were withdrawn."""
        self._next = None

    def prepare(self, alert: QueuedAlert) -> None:
        """Starts explaining an alert unless that is done or running; after the first alert it also counts decisions."""
        if self._pool is None:
            return
        if self._next is None or self._next[0] != alert:
            if self._next is not None:
                self._next[1].cancel()
            self._next = alert, self._pool.submit(self._explain, alert)
        if self._counting is None:
            self._counting = self._pool.submit(self._records.count_decisions)

    def open(self, alert: QueuedAlert) -> tuple[OpenedAlert, list[dict[str, Any]]]:
        """Returns an alert with its explanation, and the related alerts: as prepared, or read now."""
        if self._next is not None and self._next[0] == alert:
            return self._next[1].result()
        return self._explain(alert)

    def _explain(self, alert: QueuedAlert) -> tuple[OpenedAlert, list[dict[str, Any]]]:
        opened = self._records.open(alert)
        return opened, self._records.read_like(opened)

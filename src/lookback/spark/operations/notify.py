"""Sends new alerts from the alerts table to receivers, independently of the evaluation."""

from __future__ import annotations

import datetime as dt
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Event
from typing import TYPE_CHECKING, Any

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812

from lookback.core.operations.notifications import (
    BEGAN,
    FAILED,
    GIVEN_UP,
    SENT,
    SETTLED,
    Attempt,
    Send,
    is_given_up,
    pause_seconds,
)
from lookback.core.operations.receivers import Receiver
from lookback.core.rules.document import SEVERITIES
from lookback.core.values.times import EPOCH
from lookback.spark.snoozes import TABLE as SNOOZES
from lookback.spark.snoozes import Snooze, read_snoozes
from lookback.spark.tables.locks import lock_notifier
from lookback.spark.tables.schemas import ALERTS, NOTIFICATIONS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row

    from lookback.spark.tables.lakehouse import Tables

TABLE = "notifications"
# The limits of a pass for each receiver: messages, and approximate seconds. The messages are recorded after the pass,
# for which all receivers wait for the slowest.
MAX_MESSAGES, MAX_SECONDS = 100, 5.0
# A batch stamps its alerts when it raises them and commits them soon after, certainly within a day.
_COMMIT_SECONDS = 86_400.0
# How far the clock that stamps alerts may be ahead of the one that stamps notifications.
CLOCK_SKEW_SECONDS = 86_400.0
# The time between two `settled` marks of a receiver and stream, and the maximum age of rows to search for one at first.
_MARK_SECONDS, _RECENT_MARK_SECONDS = 86_400.0, 7 * 86_400.0
# A column of alerts: whether the row is the last one of an unreviewed alert.
_IS_OPEN = "is_open"
_LOG = logging.getLogger("lookback")


@dataclass(frozen=True)
class WaitingAlert:
    """An alert to be sent to a receiver. All times are seconds since 1970.

    Attributes:
        alert: The row of the alert.
        decided_at: When the alert was decided.
        attempts: The number of attempts so far.
        first_failed: When the first attempt failed; None if none was made.
        last_failed: When the last attempt failed; None if none was made.
        held_until: The end of the last snooze that has begun and covers the alert; 0 for none.
    """

    alert: Mapping[str, Any]
    decided_at: float
    attempts: int = 0
    first_failed: float | None = None
    last_failed: float | None = None
    held_until: float = 0.0

    @property
    def due(self) -> float:
        """The earliest time of the next attempt."""
        again = 0.0 if self.last_failed is None else self.last_failed + pause_seconds(self.attempts)
        return max(again, self.held_until)

    def is_given_up(self, now: float, give_up_after: float, down_since: float | None) -> bool:
        """Returns whether the alert has waited too long, not counting snoozes."""
        begun = max(self.decided_at, self.held_until)
        failed = None if self.first_failed is None else max(self.first_failed, self.held_until)
        return now >= self.held_until and is_given_up(now, give_up_after, failed, begun, down_since)


@dataclass
class DeliveryCounts:
    """The counts of passes; `waiting` counts alerts that a later pass will try, or try again."""

    sent: int = 0
    failed: int = 0
    given_up: int = 0
    waiting: int = 0

    def __str__(self) -> str:
        return f"{self.sent:,} sent, {self.failed:,} failed, {self.given_up:,} given up, {self.waiting:,} waiting"

    @property
    def has_failed(self) -> bool:
        """Whether an alert could not be sent."""
        return bool(self.failed or self.given_up)

    def add(self, later: DeliveryCounts) -> None:
        """Adds the counts of a later pass."""
        self.sent, self.failed = self.sent + later.sent, self.failed + later.failed
        self.given_up, self.waiting = self.given_up + later.given_up, later.waiting


@dataclass
class _Pause:
    """The pause of a receiver after `failures` failed passes in a row. Nothing is sent before the time `until`."""

    failures: int = 0
    until: float = 0.0


@dataclass
class Notifier:
    """Sends the alerts of some streams, each at least once.

    The table `notifications` records every sent alert, so that it is not sent again; a notifier killed before this
    record sends it again. Each receiver has its own thread, and pauses on its own after a failure.

    About once a day, a row with the status `settled` marks, for each receiver and stream, the time before which all
    alerts are settled. These are not read again, so that the cost of a pass does not grow with the history.

    A snoozed alert waits for the end of its snooze. It is then sent if it is still unreviewed and has no later
    revision.

    Attributes:
        tables: The tables.
        streams: The names of the streams.
        senders: The function that makes one attempt, by receiver.
        since: The time (aware) from which on a new receiver gets alerts; default: now.
        clock: Returns the seconds since 1970.
    """

    tables: Tables
    streams: Sequence[str]
    senders: Mapping[Receiver, Send]
    since: dt.datetime | None = None
    clock: Callable[[], float] = time.time
    _pauses: dict[str, _Pause] = field(default_factory=dict)
    # By receiver and stream: alerts decided before this time are settled, or older than the receiver.
    _starts: dict[tuple[str, str], float] = field(default_factory=dict)
    # Alerts decided before this time are settled.
    _floor: float | None = None
    # The versions of alerts and snoozes at the last pass, and when the next pass is due even if they do not change.
    _seen: tuple[int, int] | None = None
    _due: float = 0.0

    def run(self, *, once: bool, every: float, stop: Event, report: Callable[[DeliveryCounts], None]) -> DeliveryCounts:
        """Sends until `stop` is set, and returns the counts of all passes.

        Args:
            once: True ends once all alerts are sent that can be sent now.
            every: The seconds between two checks for new alerts.
            stop: Ends the run when set.
            report: Called with the counts of each pass that sent or tried something.

        Raises:
            SetupError: If another notifier of one of the streams is running.
        """
        with lock_notifier(self.tables.files, self.streams) as require_alone:
            total = DeliveryCounts()
            self._find_starts()
            while not stop.is_set():
                require_alone()
                version = self.tables.version("alerts"), self.tables.version(SNOOZES)
                if version != self._seen or self.clock() >= self._due:
                    counts = self.send()
                    self._seen = version
                    if counts.sent or counts.failed or counts.given_up:
                        report(counts)
                    total.add(counts)
                    if counts.sent and counts.waiting:
                        continue
                if once:
                    break
                stop.wait(every)
            return total

    def send(self) -> DeliveryCounts:
        """Makes one pass: sends the due alerts to all receivers in parallel, then records them in one commit."""
        starts = self._find_starts()
        now = self.clock()
        floor = min(starts.values()) if self._floor is None else self._floor
        # Alerts are recorded after they are decided, so older rows are about settled alerts.
        notes = self._read_notes().where(F.col("sent_at") >= F.lit(_to_time(floor - CLOCK_SKEW_SECONDS)))
        down = self._find_down_since(notes)
        queues = self._find_waiting(starts, floor, notes)
        with ThreadPoolExecutor(max_workers=len(self.senders)) as pool:
            work = [
                pool.submit(self._deliver, receiver, queues[receiver.name], down.get(receiver.name))
                for receiver in self.senders
            ]
            rows = [row for each in work for row in each.result()]
        counts = _count(rows)
        settled = {(row["receiver"], row["alert_id"], row["revision"]) for row in rows if row["status"] != FAILED}
        left = [
            (name, waiting)
            for name, queue in queues.items()
            for waiting in queue
            if (name, *_get_key(waiting)) not in settled
        ]
        counts.waiting = len(left)
        self._floor = min([now - _COMMIT_SECONDS, *(waiting.decided_at for _, waiting in left)])
        self._append([*rows, *self._make_due_marks(self._floor)])
        self._due = min((max(self._get_pause(name).until, waiting.due) for name, waiting in left), default=float("inf"))
        return counts

    def _find_starts(self) -> dict[tuple[str, str], float]:
        """Finds the time from which on each receiver gets alerts of each stream, and records it for new receivers."""
        if self._starts:
            return self._starts
        pairs = [(receiver.name, stream) for receiver in self.senders for stream in self.streams]
        recent = F.col("sent_at") >= F.lit(_to_time(self.clock() - _RECENT_MARK_SECONDS))
        marks = self._read_settled(self._read_notes().where(recent))
        if set(pairs) <= marks.keys():
            self._starts = {pair: marks[pair] for pair in pairs}
            return self._starts
        marks = self._read_settled(self._read_notes())
        first = self._read_notes().where(F.col("status") == BEGAN).groupBy("receiver").agg(F.min("sent_at").alias("at"))
        began = {row["receiver"]: _to_seconds(row["at"]) for row in first.collect()}
        new = [receiver.name for receiver in self.senders if receiver.name not in began]
        if new:
            start = self.since or _to_time(self.clock())
            self._append([_make_mark(name, BEGAN, start.timestamp()) for name in new])
            began.update(dict.fromkeys(new, start.timestamp()))
            for name in new:
                _LOG.info("receiver=%s gets alerts from %s on", name, start.isoformat())
        self._starts = {(name, stream): marks.get((name, stream), began[name]) for name, stream in pairs}
        return self._starts

    def _read_settled(self, notes: DataFrame) -> dict[tuple[str, str], float]:
        """Reads the last `settled` mark by receiver and stream."""
        marks = notes.where(F.col("status") == SETTLED).groupBy("receiver", "stream").agg(F.max("sent_at").alias("at"))
        return {(row["receiver"], row["stream"]): _to_seconds(row["at"]) for row in marks.collect()}

    def _make_due_marks(self, floor: float) -> list[dict[str, Any]]:
        """Makes the marks that are due, given that all alerts decided before `floor` are settled."""
        due = [pair for pair, start in self._starts.items() if floor - start >= _MARK_SECONDS]
        self._starts.update(dict.fromkeys(due, floor))
        return [_make_mark(receiver, SETTLED, floor, stream) for receiver, stream in due]

    def _append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if rows:
            frame = self.tables.spark.createDataFrame([dict(row) for row in rows], NOTIFICATIONS).coalesce(1)
            self.tables.append(frame, TABLE)

    def _read_notes(self) -> DataFrame:
        names = [receiver.name for receiver in self.senders]
        return self.tables.read(TABLE).where(F.col("receiver").isin(names))

    @staticmethod
    def _find_down_since(notes: DataFrame) -> dict[str, float]:
        """Finds receivers whose last attempt failed, each with the time of the first failure since its last success."""
        tried = notes.where(F.col("alert_id").isNotNull())
        sent = F.max(F.when(F.col("status") == SENT, F.col("sent_at")))
        last = tried.groupBy("receiver").agg(sent.alias("last_sent"))
        later = (F.col("status") == FAILED) & (F.col("last_sent").isNull() | (F.col("sent_at") > F.col("last_sent")))
        rows = tried.join(last, "receiver").where(later).groupBy("receiver").agg(F.min("sent_at").alias("at")).collect()
        return {row["receiver"]: _to_seconds(row["at"]) for row in rows}

    def _find_waiting(
        self, starts: Mapping[tuple[str, str], float], floor: float, notes: DataFrame
    ) -> dict[str, list[WaitingAlert]]:
        """Finds the alerts that each receiver has not received, sorted by the number of attempts and then by age.

        Args:
            starts: The earliest time by receiver and stream.
            floor: Alerts decided before this time are settled.
            notes: The rows of `notifications` about later alerts.
        """
        is_settled = F.max(F.col("status").isin(SENT, GIVEN_UP))
        grouped = notes.where(F.col("alert_id").isNotNull()).groupBy("alert_id", "revision", "receiver")
        failed = F.min("sent_at").alias("first_failed"), F.max("sent_at").alias("last_failed")
        states = grouped.agg(is_settled.alias("settled"), F.max("attempts").alias("attempts"), *failed)
        alerts = self.tables.read("alerts").where(F.col("stream").isin(list(self.streams)))
        alerts = alerts.where(F.col("decided_at") >= F.lit(_to_time(floor)))
        is_candidate = F.lit(False)
        for receiver in self.senders:
            own = {stream: starts[receiver.name, stream] for stream in self.streams}
            is_candidate = is_candidate | _match_roughly(receiver, own)
        names = F.explode(F.array(*(F.lit(receiver.name) for receiver in self.senders)))
        snoozes = read_snoozes(self.tables, ended_after=_to_time(floor))
        if snoozes:
            alerts = self._add_open(alerts)
        pairs = alerts.withColumn("receiver", names).where(is_candidate)
        rows = pairs.join(states, ["alert_id", "revision", "receiver"], "left").where("settled IS NULL OR NOT settled")
        return self._group_by_receiver(rows.toLocalIterator(), snoozes)

    def _add_open(self, alerts: DataFrame) -> DataFrame:
        """Adds whether a row is the last one of an unreviewed alert."""
        last = F.max("revision").over(Window.partitionBy("alert_id"))
        reviewed = self.tables.read("reviews").select("alert_id").distinct().withColumn("is_reviewed", F.lit(True))
        alerts = alerts.withColumn("is_last", F.col("revision") == last).join(reviewed, "alert_id", "left")
        return alerts.withColumn(_IS_OPEN, F.col("is_last") & F.col("is_reviewed").isNull())

    def _group_by_receiver(self, rows: Iterator[Row], snoozes: Sequence[Snooze]) -> dict[str, list[WaitingAlert]]:
        receivers = {receiver.name: receiver for receiver in self.senders}
        queues: dict[str, list[WaitingAlert]] = {name: [] for name in receivers}
        for row in rows:
            waiting = self._hold(_read_waiting(row), snoozes)
            is_closed = 0 < waiting.held_until <= self.clock() and not row[_IS_OPEN]
            if not is_closed and receivers[row["receiver"]].wants(waiting.alert):
                queues[row["receiver"]].append(waiting)
        for queue in queues.values():
            queue.sort(key=lambda waiting: (waiting.attempts, waiting.decided_at, *_get_key(waiting)))
        return queues

    def _hold(self, waiting: WaitingAlert, snoozes: Sequence[Snooze]) -> WaitingAlert:
        """Adds the end of the snoozes that have held the alert back or still do."""
        begun = [each for each in snoozes if each.since.timestamp() <= self.clock() and each.covers(waiting.alert)]
        ends = [end for end in (each.until.timestamp() for each in begun) if end > waiting.decided_at]
        return replace(waiting, held_until=max(ends)) if ends else waiting

    def _deliver(
        self, receiver: Receiver, queue: Sequence[WaitingAlert], down_since: float | None
    ) -> list[dict[str, Any]]:
        """Sends to one receiver until it fails or reaches a limit, and returns the rows to record."""
        rows: list[dict[str, Any]] = []
        pause, until = self._get_pause(receiver.name), time.monotonic() + MAX_SECONDS
        if self.clock() < pause.until:
            return rows
        for at, waiting in enumerate(queue):
            if waiting.due > self.clock():
                continue
            outcome = self._attempt(receiver, waiting, rows, down_since)
            if outcome.status == FAILED:
                pause.failures += 1
                pause.until = self.clock() + max(pause_seconds(pause.failures), outcome.pause)
                rows += self._give_up(receiver, queue[at + 1 :], down_since, outcome)
                break
            pause.failures, pause.until, down_since = 0, 0.0, None
            if len(rows) >= MAX_MESSAGES or time.monotonic() >= until:
                break
        return rows

    def _attempt(
        self, receiver: Receiver, waiting: WaitingAlert, rows: list[dict[str, Any]], down_since: float | None
    ) -> Attempt:
        """Sends one alert and adds the row to record."""
        outcome, now = self.senders[receiver](waiting.alert), self.clock()
        over = outcome.status == FAILED and waiting.is_given_up(now, receiver.give_up_after, down_since)
        status = GIVEN_UP if over else outcome.status
        rows.append(_make_note(receiver, waiting, status, waiting.attempts + 1, outcome.error, now))
        return outcome

    def _give_up(
        self, receiver: Receiver, rest: Sequence[WaitingAlert], down_since: float | None, outcome: Attempt
    ) -> list[dict[str, Any]]:
        """Returns rows for the alerts, tried or not, that have waited too long for a receiver that is down."""
        now = self.clock()
        return [
            _make_note(receiver, waiting, GIVEN_UP, waiting.attempts, f"the receiver is down: {outcome.error}", now)
            for waiting in rest
            if waiting.is_given_up(now, receiver.give_up_after, down_since)
        ]

    def _get_pause(self, name: str) -> _Pause:
        return self._pauses.setdefault(name, _Pause())


def _match_roughly(receiver: Receiver, starts: Mapping[str, float]) -> Column:
    """Preselects a receiver's alerts in Spark, given the earliest time by stream; `Receiver.wants` decides."""
    is_in_time = F.lit(False)
    for stream, start in starts.items():
        is_in_time = is_in_time | ((F.col("stream") == stream) & (F.col("decided_at") >= F.lit(_to_time(start))))
    return (
        (F.col("receiver") == receiver.name)
        & is_in_time
        & F.col("severity").isin(list(SEVERITIES[SEVERITIES.index(receiver.severity) :]))
        & F.col("verdict").isin(list(receiver.verdicts))
        & F.col("mode").isin(list(receiver.modes))
    )


def _read_waiting(row: Row) -> WaitingAlert:
    alert = {name: _to_plain(row[name]) for name in ALERTS.names if name in row}
    first, last = (None if row[name] is None else _to_seconds(row[name]) for name in ("first_failed", "last_failed"))
    return WaitingAlert(alert, _to_seconds(row["decided_at"]), row["attempts"] or 0, first, last)


def _make_note(
    receiver: Receiver, waiting: WaitingAlert, status: str, attempts: int, error: str, now: float
) -> dict[str, Any]:
    """Makes a row of `notifications`, and logs it unless the alert was sent."""
    alert_id, revision = _get_key(waiting)
    if status != SENT:
        level = logging.WARNING if status == GIVEN_UP else logging.INFO
        text = "receiver=%s alert=%s revision=%s %s attempts=%s %s"
        _LOG.log(level, text, receiver.name, alert_id, revision, status, attempts, error)
    tried = {"alert_id": alert_id, "revision": revision, "attempts": attempts, "error": error or None}
    return {**_make_mark(receiver.name, status, now, waiting.alert["stream"]), **tried}


def _make_mark(receiver: str, status: str, at: float, stream: str | None = None) -> dict[str, Any]:
    """Makes a row of `notifications` without an alert."""
    empty = dict.fromkeys(("alert_id", "revision", "attempts", "error"))
    return {**empty, "receiver": receiver, "status": status, "sent_at": _to_time(at), "stream": stream}


def _count(rows: Sequence[Mapping[str, Any]]) -> DeliveryCounts:
    statuses = [row["status"] for row in rows]
    return DeliveryCounts(statuses.count(SENT), statuses.count(FAILED), statuses.count(GIVEN_UP))


def _get_key(waiting: WaitingAlert) -> tuple[str, int]:
    return waiting.alert["alert_id"], waiting.alert["revision"]


def _to_plain(value: Any) -> Any:
    # Spark returns local times without a time zone.
    return value.astimezone(dt.timezone.utc) if isinstance(value, dt.datetime) else value


def _to_seconds(time_: dt.datetime) -> float:
    return time_.astimezone(dt.timezone.utc).timestamp()


def _to_time(seconds: float) -> dt.datetime:
    return EPOCH + dt.timedelta(seconds=seconds)

"""Alerts out: what the alerts table has and a receiver was not sent yet, apart from the evaluation that writes it."""

from __future__ import annotations

import datetime as dt
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812

from lookback.core.operations.notifications import (
    BEGAN,
    FAILED,
    GIVEN_UP,
    SENT,
    SETTLED,
    Attempt,
    is_given_up,
    pause_seconds,
)
from lookback.core.operations.receivers import Receiver
from lookback.core.rules.document import SEVERITIES
from lookback.spark.tables.locks import lock_notifier
from lookback.spark.tables.schemas import ALERTS, NOTIFICATIONS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row

    from lookback.spark.tables.lakehouse import Tables

Send = Callable[[Mapping[str, Any]], Attempt]
TABLE = "notifications"
# Of one pass, for one receiver: what was sent is recorded after so many, or after so many seconds.
MOST_MESSAGES, MOST_SECONDS = 100, 30.0
# A batch stamps its alerts when it makes them and commits them soon after; in a day for sure. Seconds.
_LATEST_COMMIT = 86_400.0
# How far a clock that stamps alerts may be ahead of the one that stamps notifications. Seconds.
CLOCKS_APART = 86_400.0
# A mark of what is settled is written so seldom, and looked for first among rows so young. Seconds.
_MARK_EVERY, _MARK_AGE = 86_400.0, 7 * 86_400.0
_LOG = logging.getLogger("lookback")
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)


@dataclass(frozen=True)
class Waiting:
    """An alert that a receiver is to be sent. Times are seconds since 1970; first_failed, last_failed: None if not tried."""

    alert: Mapping[str, Any]
    decided_at: float
    attempts: int = 0
    first_failed: float | None = None
    last_failed: float | None = None

    @property
    def due(self) -> float:
        """From when on it may be tried."""
        return 0.0 if self.last_failed is None else self.last_failed + pause_seconds(self.attempts)


@dataclass
class Counts:
    """What passes did. waiting: alerts that are to be tried, or tried again, in a later one."""

    sent: int = 0
    failed: int = 0
    given_up: int = 0
    waiting: int = 0

    def __str__(self) -> str:
        return f"{self.sent:,} sent, {self.failed:,} failed, {self.given_up:,} given up, {self.waiting:,} waiting"

    def add(self, later: Counts) -> None:
        """Counts what a later pass did as well."""
        self.sent, self.failed = self.sent + later.sent, self.failed + later.failed
        self.given_up, self.waiting = self.given_up + later.given_up, later.waiting


@dataclass
class _Pause:
    """How a receiver does. failures: of its passes, one after another; until: nothing is sent before."""

    failures: int = 0
    until: float = 0.0


@dataclass
class Notifier:
    """Sends the alerts of some streams. senders: receiver -> what sends to it once.

    At least once: what was sent is recorded in the table `notifications` after that, by receiver, and never sent again; a
    notifier that is killed between the two sends again. Each receiver has a thread of its own and a pause of its own when
    it fails. A receiver that is new hears of alerts from `since` on (aware; now, unless given). clock: seconds since 1970.
    About once a day a row of status `settled` marks, by receiver and stream, up to when nothing is left to be sent; alerts
    decided before it are not read again, so that a pass costs the same however long the history is.
    """

    tables: Tables
    streams: Sequence[str]
    senders: Mapping[Receiver, Send]
    since: dt.datetime | None = None
    clock: Callable[[], float] = time.time
    _pauses: dict[str, _Pause] = field(default_factory=dict)
    # By receiver and stream: alerts decided before are settled, or came before the receiver began.
    _starts: dict[tuple[str, str], float] = field(default_factory=dict)
    # Whether the table has the column by which streams are told apart; that of an earlier release does not.
    _has_stream: bool = True
    # Alerts from before are settled; the version of the alerts table that was looked at; when to look again all the same.
    _floor: float | None = None
    _seen: int | None = None
    _due: float = 0.0

    def run(self, *, once: bool, every: float, stop: Event, report: Callable[[Counts], None]) -> Counts:
        """Passes until `stop` is set, or with `once` until all that can be sent now is. every: seconds between two looks.

        report: is handed the counts of each pass that did something. Returns those of all. Raises SetupError where another
        notifier of one of the streams runs.
        """
        with lock_notifier(self.tables.files, self.streams) as require_alone:
            total = Counts()
            self._begin()
            while not stop.is_set():
                require_alone()
                version = self.tables.version("alerts")
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

    def send(self) -> Counts:
        """One pass: sends what is due, each receiver beside the others, then records all of it in one commit."""
        starts = self._begin()
        now = self.clock()
        floor = min(starts.values()) if self._floor is None else self._floor
        # An alert is noted after it was decided.
        notes = self._notes().where(F.col("sent_at") >= F.lit(_moment(floor - CLOCKS_APART)))
        down = self._down_since(notes)
        found = self._waiting(starts, floor, notes)
        with ThreadPoolExecutor(max_workers=len(self.senders)) as pool:
            work = [
                pool.submit(self._deliver, receiver, found[receiver.name], down.get(receiver.name))
                for receiver in self.senders
            ]
            rows = [row for each in work for row in each.result()]
        counts = _counted(rows)
        settled = {(row["receiver"], row["alert_id"], row["revision"]) for row in rows if row["status"] != FAILED}
        left = [
            (name, waiting) for name, each in found.items() for waiting in each if (name, *_key(waiting)) not in settled
        ]
        counts.waiting = len(left)
        self._floor = min([now - _LATEST_COMMIT, *(waiting.decided_at for _, waiting in left)])
        self._append([*rows, *self._marks(self._floor)])
        self._due = min((max(self._pause(name).until, waiting.due) for name, waiting in left), default=float("inf"))
        return counts

    def _begin(self) -> dict[tuple[str, str], float]:
        """From when on each receiver hears of the alerts of each stream; of new receivers it is written down."""
        if self._starts:
            return self._starts
        self._has_stream = "stream" in self.tables.read(TABLE).columns
        pairs = [(receiver.name, stream) for receiver in self.senders for stream in self.streams]
        recent = F.col("sent_at") >= F.lit(_moment(self.clock() - _MARK_AGE))
        marks = self._settled(self._notes().where(recent))
        if set(pairs) <= marks.keys():
            self._starts = {pair: marks[pair] for pair in pairs}
            return self._starts
        marks = self._settled(self._notes())
        first = self._notes().where(F.col("status") == BEGAN).groupBy("receiver").agg(F.min("sent_at").alias("at"))
        began = {row["receiver"]: _seconds(row["at"]) for row in first.collect()}
        new = [receiver.name for receiver in self.senders if receiver.name not in began]
        if new:
            start = self.since or _moment(self.clock())
            self._append([_mark(name, BEGAN, start.timestamp()) for name in new])
            began.update(dict.fromkeys(new, start.timestamp()))
            for name in new:
                _LOG.info("receiver=%s hears of alerts from %s on", name, start.isoformat())
        self._starts = {(name, stream): marks.get((name, stream), began[name]) for name, stream in pairs}
        return self._starts

    def _settled(self, notes: DataFrame) -> dict[tuple[str, str], float]:
        """By receiver and stream: the last mark."""
        if not self._has_stream:
            return {}
        marks = notes.where(F.col("status") == SETTLED).groupBy("receiver", "stream")
        return {(row[0], row[1]): _seconds(row[2]) for row in marks.agg(F.max("sent_at")).collect()}

    def _marks(self, floor: float) -> list[dict[str, Any]]:
        """The marks that are due: alerts decided before `floor` are settled."""
        due = [pair for pair, start in self._starts.items() if self._has_stream and floor - start >= _MARK_EVERY]
        self._starts.update(dict.fromkeys(due, floor))
        return [_mark(receiver, SETTLED, floor, stream) for receiver, stream in due]

    def _append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if rows:
            frame = self.tables.spark.createDataFrame([dict(row) for row in rows], NOTIFICATIONS).coalesce(1)
            self.tables.append(frame if self._has_stream else frame.drop("stream"), TABLE)

    def _notes(self) -> DataFrame:
        names = [receiver.name for receiver in self.senders]
        return self.tables.read(TABLE).where(F.col("receiver").isin(names))

    @staticmethod
    def _down_since(notes: DataFrame) -> dict[str, float]:
        """The receivers whose last attempt failed -> the first failure since they were last sent anything."""
        tried = notes.where(F.col("alert_id").isNotNull())
        last = tried.groupBy("receiver").agg(
            F.max(F.when(F.col("status") == SENT, F.col("sent_at"))).alias("last_sent")
        )
        later = (F.col("status") == FAILED) & (F.col("last_sent").isNull() | (F.col("sent_at") > F.col("last_sent")))
        rows = tried.join(last, "receiver").where(later).groupBy("receiver").agg(F.min("sent_at").alias("at")).collect()
        return {row["receiver"]: _seconds(row["at"]) for row in rows}

    def _waiting(
        self, starts: Mapping[tuple[str, str], float], floor: float, notes: DataFrame
    ) -> dict[str, list[Waiting]]:
        """What each receiver is still to be sent, those that were tried least first, then the oldest.

        floor: alerts decided before are settled. notes: the rows of notifications on alerts that are not older.
        """
        is_settled = F.max(F.col("status").isin(SENT, GIVEN_UP))
        states = notes.where(F.col("alert_id").isNotNull()).groupBy("alert_id", "revision", "receiver").agg(
            is_settled.alias("settled"), F.max("attempts").alias("attempts"),
            F.min("sent_at").alias("first_failed"), F.max("sent_at").alias("last_failed"),
        )  # fmt: skip
        alerts = self.tables.read("alerts").where(F.col("stream").isin(list(self.streams)))
        alerts = alerts.where(F.col("decided_at") >= F.lit(_moment(floor)))
        wanted = F.lit(False)
        for receiver in self.senders:
            wanted = wanted | _coarse(receiver, {stream: starts[receiver.name, stream] for stream in self.streams})
        names = F.explode(F.array(*(F.lit(receiver.name) for receiver in self.senders)))
        pairs = alerts.withColumn("receiver", names).where(wanted)
        rows = pairs.join(states, ["alert_id", "revision", "receiver"], "left").where("settled IS NULL OR NOT settled")
        return self._by_receiver(rows.toLocalIterator())

    def _by_receiver(self, rows: Iterator[Row]) -> dict[str, list[Waiting]]:
        receivers = {receiver.name: receiver for receiver in self.senders}
        found: dict[str, list[Waiting]] = {name: [] for name in receivers}
        for row in rows:
            waiting = _of_row(row)
            if receivers[row["receiver"]].wants(waiting.alert):
                found[row["receiver"]].append(waiting)
        for each in found.values():
            each.sort(key=lambda waiting: (waiting.attempts, waiting.decided_at, *_key(waiting)))
        return found

    def _deliver(self, receiver: Receiver, found: Sequence[Waiting], down_since: float | None) -> list[dict[str, Any]]:
        """Sends to one receiver until it fails. Returns the rows to record."""
        rows: list[dict[str, Any]] = []
        pause, until = self._pause(receiver.name), time.monotonic() + MOST_SECONDS
        if self.clock() < pause.until:
            return rows
        for at, waiting in enumerate(found):
            if waiting.due > self.clock():
                continue
            outcome = self._attempt(receiver, waiting, rows, down_since)
            if outcome.status == FAILED:
                pause.failures += 1
                pause.until = self.clock() + max(pause_seconds(pause.failures), outcome.pause)
                rows += self._given_up(receiver, found[at + 1 :], down_since, outcome)
                break
            pause.failures, pause.until, down_since = 0, 0.0, None
            if len(rows) >= MOST_MESSAGES or time.monotonic() >= until:
                break
        return rows

    def _attempt(
        self, receiver: Receiver, waiting: Waiting, rows: list[dict[str, Any]], down_since: float | None
    ) -> Attempt:
        """Sends one alert; adds what is to be recorded of it."""
        outcome, now = self.senders[receiver](waiting.alert), self.clock()
        over = outcome.status == FAILED and is_given_up(
            now, receiver.give_up_after, waiting.first_failed, waiting.decided_at, down_since
        )
        status = GIVEN_UP if over else outcome.status
        rows.append(_note(receiver, waiting, status, waiting.attempts + 1, outcome.error, now))
        return outcome

    def _given_up(
        self, receiver: Receiver, rest: Sequence[Waiting], down_since: float | None, outcome: Attempt
    ) -> list[dict[str, Any]]:
        """Of a receiver that is down for too long: the alerts that have waited for too long, tried or not."""
        now = self.clock()
        return [
            _note(receiver, waiting, GIVEN_UP, waiting.attempts, f"the receiver is down: {outcome.error}", now)
            for waiting in rest
            if is_given_up(now, receiver.give_up_after, waiting.first_failed, waiting.decided_at, down_since)
        ]

    def _pause(self, name: str) -> _Pause:
        return self._pauses.setdefault(name, _Pause())


def _coarse(receiver: Receiver, starts: Mapping[str, float]) -> Column:
    """What Spark leaves out before `Receiver.wants` has the last word. starts: stream -> from when on it hears."""
    hears = F.lit(False)
    for stream, start in starts.items():
        hears = hears | ((F.col("stream") == stream) & (F.col("decided_at") >= F.lit(_moment(start))))
    return (
        (F.col("receiver") == receiver.name)
        & hears
        & F.col("severity").isin(list(SEVERITIES[SEVERITIES.index(receiver.severity) :]))
        & F.col("verdict").isin(list(receiver.verdicts))
        & F.col("mode").isin(list(receiver.modes))
    )


def _of_row(row: Row) -> Waiting:
    alert = {name: _plain(row[name]) for name in ALERTS.names}
    first, last = (None if row[name] is None else _seconds(row[name]) for name in ("first_failed", "last_failed"))
    return Waiting(alert, _seconds(row["decided_at"]), row["attempts"] or 0, first, last)


def _note(receiver: Receiver, waiting: Waiting, status: str, attempts: int, error: str, now: float) -> dict[str, Any]:
    """A row of `notifications`, told in the log as well where it is no success."""
    alert_id, revision = _key(waiting)
    if status != SENT:
        level = logging.WARNING if status == GIVEN_UP else logging.INFO
        text = "receiver=%s alert=%s revision=%s %s attempts=%s %s"
        _LOG.log(level, text, receiver.name, alert_id, revision, status, attempts, error)
    return {
        "alert_id": alert_id, "revision": revision, "receiver": receiver.name, "status": status,
        "attempts": attempts, "error": error or None, "sent_at": _moment(now), "stream": waiting.alert["stream"],
    }  # fmt: skip


def _mark(receiver: str, status: str, at: float, stream: str | None = None) -> dict[str, Any]:
    """A row of `notifications` that is about no alert."""
    return {
        "alert_id": None, "revision": None, "receiver": receiver, "status": status,
        "attempts": None, "error": None, "sent_at": _moment(at), "stream": stream,
    }  # fmt: skip


def _counted(rows: Sequence[Mapping[str, Any]]) -> Counts:
    found = [row["status"] for row in rows]
    return Counts(found.count(SENT), found.count(FAILED), found.count(GIVEN_UP))


def _key(waiting: Waiting) -> tuple[str, int]:
    return waiting.alert["alert_id"], waiting.alert["revision"]


def _plain(value: Any) -> Any:
    # Spark hands out local times without a zone.
    return value.astimezone(dt.timezone.utc) if isinstance(value, dt.datetime) else value


def _seconds(time_: dt.datetime) -> float:
    return time_.astimezone(dt.timezone.utc).timestamp()


def _moment(seconds: float) -> dt.datetime:
    return _EPOCH + dt.timedelta(seconds=seconds)

"""Gives new rule versions the history of their windows: built while the stream runs, published piece by piece.

A shard reports with each batch which versions are warming up and how many pieces they have loaded. Once a historian has
stored all pieces in the checkpoint, a `*` row in the rules table names the next piece, and the stream loads it between
two commits. When all pieces are stored, so is their number, and a restarted driver continues with the pieces it finds.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lookback.core.engine.warming import find_reason_cold
from lookback.core.errors import LookbackError
from lookback.core.rules.compiled import CompiledRule
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.document import read_document
from lookback.core.rules.roles import SHADOW, find_roles
from lookback.core.rules.versions import EVALUATED, WITH_STATE, Piece
from lookback.core.values.texts import summarize_error
from lookback.spark.batches.dispatch import select_rule_changes
from lookback.spark.checkpoints.checkpoint import Checkpoint
from lookback.spark.checkpoints.histories import Histories, Waiting
from lookback.spark.checkpoints.parcels import Parcels
from lookback.spark.checkpoints.sparklogs import RULES
from lookback.spark.platform.faults import succeeds

if TYPE_CHECKING:
    from pyspark.sql import Row

    from lookback.core.streams.declaration import Stream
    from lookback.spark.batches.sink import BatchReport
    from lookback.spark.rules import RulesTable
    from lookback.spark.tables.lakehouse import Tables

_LOG = logging.getLogger("lookback")
# The file in the checkpoint that lists the warming versions, for the next start.
_PENDING = "warming.json"
_MAX_ATTEMPTS = 3
_PAUSE_SECONDS = 5.0


@dataclass(frozen=True)
class Request:
    """The history that a version needs: the rows of commits up to `through`, divided among the shards.

    Attributes:
        rule: The version.
        through: The last commit to read.
        shards: The number of shards.
        parcels: Where to store its pieces, each as `name.PART`; keys are divided into shards x pieces parts.
        name: The name of the history.
        earliest: See `Waiting`.
        pieces: The number of pieces to make, because some are already loaded; 0 for as many as its events need.
        settled: See `Waiting`.
        is_beside: Whether the stream runs meanwhile.
    """

    rule: CompiledRule
    through: int
    shards: int
    parcels: Parcels
    name: str
    earliest: int | None = None
    pieces: int = 0
    settled: int | None = None
    is_beside: bool = True


# Builds the history of a version, stores the parts of all its pieces in parcels, and returns the number of pieces.
Historian = Callable[["Tables", "Stream", Request], int]


@dataclass
class _Job:
    """Builds one history in a thread. `pieces` is their number when built; `published` is the last piece named."""

    pieces: int | None = None
    error: Exception | None = None
    attempts: int = 0
    published: int = 0
    thread: threading.Thread | None = None
    next_attempt: float = 0.0


@dataclass
class WarmUps:
    """Follows the versions of a stream that are warming up, with histories from `historian`.

    The warming versions are stored in the checkpoint before a batch is finished, for the next start.
    """

    tables: Tables
    stream: Stream
    rules: RulesTable
    checkpoint: Checkpoint
    historian: Historian
    _jobs: dict[Waiting, _Job] = field(default_factory=dict)
    _pending: tuple[Waiting, ...] = ()
    _gone: dict[str, int] = field(default_factory=dict)
    # Whether there may be parcels. A look is a request to a store, so not every batch looks.
    _may_have_parcels: bool = True
    _next_look: float = 0.0

    def __post_init__(self) -> None:
        self._pending = self._read_pending()
        if self.checkpoint.find_unfinished() is None:
            # No batch will be repeated, so nothing reads the parcels of an earlier run.
            for parcel in self._list_stale():
                self._parcels.remove(parcel)

    @property
    def is_idle(self) -> bool:
        """Whether no version is warming up."""
        return not self._pending

    @property
    def _histories(self) -> Histories:
        return Histories.of(self.checkpoint.folder, "")

    @property
    def _parcels(self) -> Parcels:
        return self._histories.parcels

    def note(self, report: BatchReport) -> None:
        """Notes the warming versions in a batch's report; called before the batch is finished."""
        if report.warming != self._pending:
            self._pending = report.warming
            self.checkpoint.write_json(_PENDING, [list(each) for each in self._pending])
        if self._may_have_parcels or self._pending:
            self._remove_stale(report.batch_id)

    def follow(self) -> None:
        """Builds missing histories, and names the next piece once the stream has loaded the previous one; called often.

        A failure is logged and retried; after three failures the version starts without history.
        """
        if not self._pending or time.monotonic() < self._next_look:
            return
        if not succeeds(self._follow, "stream=%s could not publish a piece of history, will retry: %s", self.stream):
            self._next_look = time.monotonic() + _PAUSE_SECONDS

    def _follow(self) -> None:
        for waiting in self._pending:
            job = self._find_job(waiting)
            if job.thread is not None and job.thread.is_alive():
                return
            if job.pieces is None:
                self._begin_or_give_up(waiting, job)
                return
            if job.pieces == 0:
                # An earlier driver gave up.
                self._publish_cold(waiting, job)
            elif job.published <= waiting.loaded < job.pieces:
                self._publish(waiting, job, waiting.loaded + 1)

    def prepare(self) -> None:
        """Builds and names the histories of versions that warm up now or soon, before a run that does not wait.

        Failures are logged. Versions without a named piece are still warming up after the run.
        """
        succeeds(self._prepare_all, "stream=%s could not publish the history of new versions: %s", self.stream)

    def _prepare_all(self) -> None:
        expected = {(each.rule_id, each.version) for each in self._pending}
        for waiting in self._pending + tuple(
            each for each in self._expect() if (each.rule_id, each.version) not in expected
        ):
            self._prepare(waiting)

    def _prepare(self, waiting: Waiting) -> None:
        job = self._find_job(waiting)
        while job.pieces is None and job.attempts < _MAX_ATTEMPTS:
            self._make(waiting, job, is_beside=False)
        if job.pieces:
            for number in range(max(waiting.loaded, job.published) + 1, job.pieces + 1):
                self._publish(waiting, job, number)
        else:
            self._publish_cold(waiting, job)

    def _read_pending(self) -> tuple[Waiting, ...]:
        file = self.checkpoint.folder / _PENDING
        try:
            return tuple(Waiting(*row) for row in json.loads(file.read_text()))
        except (OSError, ValueError, TypeError):
            # The next batch reports it again.
            return ()

    def _expect(self) -> list[Waiting]:
        """Lists versions in the next batch that will probably warm up because their windows are new."""
        judged = self.checkpoint.find_last_judged()
        if judged is None or self.checkpoint.find_unfinished() is not None:
            return []
        start = self.checkpoint.find_next_commits()[RULES]
        if start > self.tables.version("rules"):
            return []
        held = self._find_held_needs(start)
        found: dict[str, Waiting] = {}
        for row in select_rule_changes(self.tables.read_changes("rules", start)).orderBy("commit", "version").collect():
            if row["change"] not in ("insert", "update") or row["version"] is None:
                continue
            rule = self._compile(row["document"])
            if rule is None or row["status"] not in EVALUATED or find_reason_cold(rule) is not None:
                found.pop(row["rule_id"], None)
            elif any(held.get(name, -1) < width for name, width in _list_needs(rule, row["status"]).items()):
                found[row["rule_id"]] = Waiting(row["rule_id"], row["version"], judged)
        return list(found.values())

    def _find_held_needs(self, start: int) -> dict[tuple[str, bool], int]:
        """Returns how far back the rules before commit `start` of the rules table reach."""
        held: dict[tuple[str, bool], int] = {}
        by_rule: dict[str, list[Row]] = {}
        for row in self.tables.read("rules", version=start - 1).collect() if start else ():
            if row["rule_id"] not in (None, "*"):
                by_rule.setdefault(row["rule_id"], []).append(row)
        for row in (row for rows in by_rule.values() for row in find_roles(rows).listed):
            rule = self._compile(row["document"]) if row["status"] in WITH_STATE else None
            for name, width in (_list_needs(rule, row["status"]) if rule is not None else {}).items():
                held[name] = max(width, held.get(name, 0))
        return held

    def _compile(self, document: str | None) -> CompiledRule | None:
        """Compiles a rule of this stream; None for anything else."""
        try:
            read = read_document(document)
            return compile_rule(read, self.stream) if read.get("stream") == self.stream.name else None
        except LookbackError:
            return None

    def _find_job(self, waiting: Waiting) -> _Job:
        return self._jobs.setdefault(waiting._replace(loaded=0, earliest=None, pieces=0, settled=None), _Job())

    def _begin_or_give_up(self, waiting: Waiting, job: _Job) -> None:
        if job.attempts >= _MAX_ATTEMPTS:
            self._publish_cold(waiting, job)
        elif time.monotonic() >= job.next_attempt:
            job.thread = threading.Thread(
                target=self._make, args=(waiting, job), name=f"history-{waiting.rule_id}", daemon=True
            )
            self._may_have_parcels = True
            job.thread.start()

    def _make(self, waiting: Waiting, job: _Job, *, is_beside: bool = True) -> None:
        """Builds a history unless an earlier run has."""
        histories, started = self._histories, time.monotonic()
        try:
            if (pieces := histories.count_pieces(waiting.name)) is None:
                rule = compile_rule(self.rules.find_document(waiting.rule_id, waiting.version), self.stream)
                plan = self.checkpoint.read_plan()
                if plan is None:
                    raise LookupError("the checkpoint has no plan")
                request = Request(
                    rule=rule,
                    through=waiting.begun,
                    shards=plan.shards,
                    parcels=histories.parcels,
                    name=waiting.name,
                    earliest=waiting.earliest,
                    pieces=waiting.pieces,
                    settled=waiting.settled,
                    is_beside=is_beside,
                )
                pieces = self.historian(self.tables, self.stream, request)
                histories.note_pieces(waiting.name, pieces)
            job.pieces = pieces
            seconds = time.monotonic() - started
            _LOG.info("stream=%s history of %s made in %.1f s", self.stream.name, waiting.name, seconds)
        except Exception as error:  # noqa: BLE001 - no error may stop the stream
            job.error, job.attempts = error, job.attempts + 1
            job.next_attempt = time.monotonic() + _PAUSE_SECONDS
            _LOG.warning(
                "stream=%s could not build the history of version %s of rule %s (attempt %s of %s): %s",
                self.stream.name,
                waiting.version,
                waiting.rule_id,
                job.attempts,
                _MAX_ATTEMPTS,
                summarize_error(error),
            )

    def _publish(self, waiting: Waiting, job: _Job, number: int) -> None:
        assert job.pieces is not None
        piece = Piece(
            rule_id=waiting.rule_id,
            version=waiting.version,
            through=waiting.begun,
            piece=number,
            pieces=job.pieces,
            parcel=waiting.name,
            query=self.checkpoint.ensure_query_id(),
        )
        self._append(piece)
        job.published = number

    def _publish_cold(self, waiting: Waiting, job: _Job) -> None:
        if not job.published:
            self._histories.note_pieces(waiting.name, 0)
            query = self.checkpoint.ensure_query_id()
            self._append(Piece(waiting.rule_id, waiting.version, waiting.begun, parcel=waiting.name, query=query))
            job.published = 1

    def _append(self, piece: Piece) -> None:
        self.rules.publish_piece(self.stream.name, piece)

    def _remove_stale(self, batch_id: int) -> None:
        """Removes the parcels of versions that have warmed up, once the batch that loaded them is finished."""
        # A history may begin meanwhile, in another thread, and sets it again.
        self._may_have_parcels = False
        is_building = any(job.thread is not None and job.thread.is_alive() for job in self._jobs.values())
        stale = self._list_stale()
        if is_building or stale or self._pending:
            self._may_have_parcels = True
        self._gone = {parcel: self._gone.get(parcel, batch_id) for parcel in stale}
        for parcel in [parcel for parcel in stale if self._gone[parcel] < batch_id]:
            self._parcels.remove(parcel)

    def _list_stale(self) -> list[str]:
        """Lists the parcels of versions that are not warming up."""
        names = {each.name for each in self._pending}
        return [parcel for parcel in self._parcels.list() if parcel.rpartition(".")[0] not in names]


def _list_needs(rule: CompiledRule, status: str) -> dict[tuple[str, bool], int]:
    """Maps each state that a rule needs to how far back it reaches. A shadow version may need some of its own."""
    is_own = status == SHADOW and (bool(rule.store) or rule.spec.reset_on_alert)
    needs = {**rule.needs, **dict.fromkeys(rule.measured, 0)}
    return {(name, is_own): width for name, width in needs.items()}

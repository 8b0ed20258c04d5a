"""Evaluates one shard: blocks in, answers out, with state in Spark's state store."""

from __future__ import annotations

import base64
import ctypes
import gc
import json
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from operator import and_
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import MapState

from lookback.core.engine.batch import Batch
from lookback.core.engine.evaluation import Evaluator
from lookback.core.engine.output import Output
from lookback.core.engine.schedule import Schedule, WaitingChange, declare, judge_batch, pack_waiting, unpack_waiting
from lookback.core.judging.segment import merge_failures
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.coverage import Coverage
from lookback.core.rules.rulebook import RuleBook
from lookback.core.state.shard import MANIFEST, ShardState, encode_text
from lookback.core.streams.alerts import LateEvent
from lookback.core.streams.arrival import merge_marks
from lookback.core.streams.blocks import OwnCount, pack_alerts, pack_failures, pack_late, require_own, unpack_events
from lookback.core.streams.declaration import Stream
from lookback.core.streams.declarations import Declarations
from lookback.core.streams.events import Events
from lookback.core.streams.watermarks import Mark
from lookback.places import Place
from lookback.spark.batches.arrayfiles import release_mapped
from lookback.spark.batches.dispatch import EVENTS
from lookback.spark.batches.pages import ShardPages
from lookback.spark.checkpoints.checkpoint import Checkpoint
from lookback.spark.checkpoints.histories import Histories, describe_waiting
from lookback.spark.checkpoints.listfiles import ListFiles

ALERTS, LATE, LOG, NOTES, FAILURES, REPORT = "alerts", "late", "log", "notes", "failures", "report"
# The states of the shards that this Python worker has evaluated, by (query, shard). A state is only a cached copy, used
# if its manifest equals the one in the state store byte for byte.
_IN_MEMORY: dict[tuple[str, str], ShardState] = {}
_MAX_IN_MEMORY = 64
# Releasing memory takes tens of milliseconds, and so does allocating it again, so do it only for large amounts.
_MUCH_BYTES = 512 * 2**20
# The name of the page with the rule changes that wait for their time.
WAITING = "waiting"


class UncoveredError(Exception):
    """Aborts a batch in which a new rule needs more than dispatch sends.

    The message carries the required coverage through Spark's errors to the driver.
    """

    _TEXT = re.compile(r"dispatch must send <<([A-Za-z0-9+/=]*)>>")

    def __init__(self, required: Coverage) -> None:
        text = base64.b64encode(json.dumps(required.to_dict()).encode()).decode()
        super().__init__(f"dispatch must send <<{text}>>")

    @classmethod
    def find_required(cls, error: BaseException) -> Coverage | None:
        """Returns the coverage that dispatch must send if such an error caused `error`, else None."""
        match = cls._TEXT.search(str(error))
        return None if match is None else Coverage.from_dict(json.loads(base64.b64decode(match[1])))


class Shard:
    """Evaluates the blocks of one shard.

    The first of all `labels` also returns the facts that every shard knows. `label` is this shard's. `histories` has
    the histories for versions that are warming up; None if versions start without history.
    """

    def __init__(
        self,
        declarations: Declarations,
        streams: dict[str, Stream],
        labels: Sequence[str],
        query: Place,
        label: str,
        pages: MapState,
        schedule: Schedule | None = None,
        histories: Histories | None = None,
    ) -> None:
        self._schedule, self._declarations = schedule, declarations
        self._stream, self._streams, self._query, self._label = declarations.last, streams, str(query), label
        lists = ListFiles.of(Checkpoint(query))
        self._evaluator = Evaluator(self._stream, list(labels).index(label), len(labels), lists=lists)
        if histories is not None:
            self._evaluator = replace(
                self._evaluator,
                warms=True,
                read_parcel=histories.read_part,
                knows_piece=histories.knows,
                query=histories.query_id,
            )
        self._first = label == labels[0]
        self._pages = ShardPages(pages, self._query, label)

    def judge(self, rows: Iterable[pd.DataFrame]) -> pd.DataFrame:
        """Evaluates one batch."""
        with pause_collector():
            answers = self._judge(rows)
        # Release the files first: the rest shows how much memory the allocator holds.
        release_mapped()
        give_back_memory()
        return answers

    def _judge(self, rows: Iterable[pd.DataFrame]) -> pd.DataFrame:
        started = time.perf_counter()
        batch, future, offered = self._unpack_batch(rows)
        # Arrow keeps the memory of the blocks, which is as much as the events take.
        pa.default_memory_pool().release_unused()
        state, cached = self._open_state()
        output, waiting = self._process(state, batch)
        if not output.covered:
            # The task must fail before it saves state, which could otherwise survive beside that of the repeated batch.
            raise UncoveredError(output.required)
        self._save_state(state)
        self._keep_waiting(waiting)
        self._pages.keep_copies(state.manifest)
        if self._first:
            output.late += future
        report = self._make_report(state, offered if self._first else 0)
        report["evaluated"] = {rule_id: count for rule_id, count in output.evaluated.items() if count}
        # Waiting rule changes need more than the rules in force; the plan made at the start covers them.
        if output.log and not waiting:
            report["required"] = output.required.to_dict()
        report.update(
            in_memory=cached,
            milliseconds=1_000 * (time.perf_counter() - started),
        )
        return _pack_answers(self._label, output, report, with_log=self._first)

    def _process(self, state: ShardState, batch: Batch) -> tuple[Output, list[WaitingChange]]:
        """Evaluates a batch. During a rebuild, rule changes wait for the commit after which they took effect."""
        if self._schedule is None:
            output = Output(pack=pack_alerts)
            # A repeated batch ends before newer batches begin, so one declaration applies to all of it.
            judged = min(batch.marks) - 1 if batch.marks else state.last_commit
            evaluator = declare(self._evaluator, state, self._declarations.after(judged), output)
            return evaluator.process(state, batch, output), []
        text = self._pages.get_text(WAITING)
        waiting = unpack_waiting(text) if text else []
        bound = [
            (self._schedule.restore_decision(change), self._schedule.after(change.commit)) for change in batch.changes
        ]
        waiting += [WaitingChange(change, after) for change, after in bound if after is not None]
        batch = replace(batch, changes=[change for change, after in bound if after is None])
        output, waiting = judge_batch(self._evaluator, state, batch, waiting, self._declarations)
        output.rows = self._schedule.drop_known(state, output.rows)
        return output, waiting

    def _keep_waiting(self, waiting: list[WaitingChange]) -> None:
        if self._schedule is not None:
            text = pack_waiting(waiting) if waiting else ""
            if text != (self._pages.get_text(WAITING) or ""):
                self._pages.put(WAITING, encode_text(text))

    def _open_state(self) -> tuple[ShardState, bool]:
        """Returns the shard's state, and whether it was in memory. Otherwise reads it, reusing runs still in memory."""
        known = _IN_MEMORY.pop((self._query, self._label), None)
        manifest = self._pages.get(MANIFEST)
        self._pages.find_copies(manifest)
        if known is not None and manifest is not None and known.manifest == manifest:
            state, cached = known, True
        else:
            state, cached = ShardState(RuleBook(self._stream, self._streams)), False
            if not state.load(self._pages, known):
                state.origin = uuid.uuid4().hex
                if self._schedule is not None:
                    self._schedule.begin(state, self._stream)
        state.begin(self._pages, self._pages.find_file)
        self._forget_old_states(state)
        return state, cached

    def _forget_old_states(self, state: ShardState) -> None:
        """Frees states that are behind: as every shard gets every commit, another worker has evaluated their shards."""
        old = [
            key
            for key, each in _IN_MEMORY.items()
            if key[0] == self._query and (each.last_commit or 0) < (state.last_commit or 0)
        ]
        for key in old:
            del _IN_MEMORY[key]

    def _save_state(self, state: ShardState) -> None:
        state.drop_old()
        state.save()
        if len(_IN_MEMORY) >= _MAX_IN_MEMORY:
            _IN_MEMORY.pop(next(iter(_IN_MEMORY)))
        _IN_MEMORY[self._query, self._label] = state

    def _unpack_batch(self, rows: Iterable[pd.DataFrame]) -> tuple[Batch, list[LateEvent], int]:
        changes: list[RuleChange] = []
        inserted: list[Events] = []
        deleted: list[Events] = []
        marks: list[dict[int, Mark | None]] = []
        sent: list[Coverage] = []
        own: dict[bool, list[list[OwnCount]]] = {False: [], True: []}
        deleting = set[int]()
        future: list[LateEvent] = []
        offered = 0
        for frame in rows:
            for kind, payload in zip(frame["kind"], frame["payload"], strict=True):
                if kind != EVENTS:
                    changes.append(RuleChange(**json.loads(payload)))
                    continue
                events, header = unpack_events(payload, self._stream)
                marks.append(dict(header["marks"]))
                sent.append(Coverage.from_dict(header["coverage"]))
                if len(events):
                    own[header["deleted"]].append(header["own"])
                (deleted if header["deleted"] else inserted).append(events)
                deleting.update(commit for commit, _ in header["marks"] if header["deleted"])
                future += header["future"]
                offered += 0 if header["deleted"] else header["rows"]
        coverage = reduce(and_, sent) if sent else None
        # Already in the order of evaluation, so that they need not be copied.
        events = Events.concat_arrived(inserted, self._stream)
        gone = Events.concat(deleted, self._stream)
        for part, counts in ((events, own[False]), (gone, own[True])):
            require_own(part, counts, self._evaluator.shard, self._evaluator.shards)
        batch = Batch(events, gone, merge_marks(marks), changes, coverage, frozenset(deleting))
        return batch, future, offered

    def _make_report(self, state: ShardState, offered: int) -> dict[str, Any]:
        held, watermark = state.estimate_counts(), state.watermark(state.book.stream)
        return {
            "shard": self._label,
            "events": offered,
            "watermark": watermark,
            "warming": describe_waiting(state, watermark),
            "arrival": state.last_commit,
            "state_rows": held.rows,
            "remembered": held.remembered,
            "features": len(state.features),
            "rules": len(state.book.in_force()),
            "bytes_read": self._pages.read,
            "bytes_written": self._pages.written,
        }


def give_back_memory(above: int = _MUCH_BYTES) -> None:
    """Returns free memory to the system, on Linux with glibc, if this process holds more than `above` bytes.

    The allocator keeps memory that a large batch has freed. Spark has more workers than tasks and uses any of them for
    the next batch, so without this every worker would hold as much memory as one needs.
    """
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return
    if pages * os.sysconf("SC_PAGE_SIZE") > above:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


@contextmanager
def pause_collector() -> Iterator[None]:
    """Pauses the cyclic garbage collector.

    A batch creates hundreds of thousands of objects but hardly any cycles, and the collector would visit all of them
    and the state repeatedly. For rules with many small objects, such as sequences, this took half of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _pack_answers(label: str, output: Output, report: dict[str, Any], *, with_log: bool) -> pd.DataFrame:
    rows: list[tuple[str, bytes]] = [(REPORT, json.dumps(report).encode())]
    rows += [(ALERTS, block) for block in output.packed]
    if output.rows:
        rows.append((ALERTS, pack_alerts(output.rows)))
    if output.late:
        rows.append((LATE, pack_late(output.late)))
    if output.failures:
        rows.append((FAILURES, pack_failures(merge_failures(output.failures))))
    # All shards log the same rows, so only one sends them. Only one or a few shards know a note.
    rows += [
        (kind, json.dumps([vars(row) for row in logged]).encode())
        for kind, logged in ((LOG, output.log if with_log else []), (NOTES, output.notes))
        if logged
    ]
    return pd.DataFrame(
        {"shard": label, "kind": [kind for kind, _ in rows], "payload": [payload for _, payload in rows]}
    )

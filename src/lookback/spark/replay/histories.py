"""Makes the window history of a warming version, by a replay in which the version gathers rows without raising alerts.

If the tables are folders on this machine, a separate process makes it beside the stream, without Spark; the system runs
that process only when the stream leaves a core idle. Otherwise Spark jobs make it.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException

from lookback.core.engine import warming
from lookback.core.engine.schedule import WaitingChange
from lookback.core.rules.compiled import CompiledRule, compile_rule
from lookback.core.rules.rulebook import RuleChange
from lookback.core.streams.declaration import Stream
from lookback.core.values.limits import WIDEST_LIMITS
from lookback.core.values.texts import summarize_error
from lookback.core.values.times import DAY_US
from lookback.spark.checkpoints.histories import name_part
from lookback.spark.checkpoints.parcels import Parcels
from lookback.spark.following.warmups import Request
from lookback.spark.platform.session import is_connect, open_own_session
from lookback.spark.queries import functions as F  # noqa: N812
from lookback.spark.queries.functions import make_window
from lookback.spark.replay.history import History
from lookback.spark.replay.tasks import HistoryPlace, Plan, judge, judge_in_turn
from lookback.spark.replay.trials import Course
from lookback.spark.stream.rebuild import find_highest_before
from lookback.spark.tables.answers import compute_at_once, has_reader
from lookback.spark.tables.lakehouse import to_timestamp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import DataFrame, SparkSession

    from lookback.spark.tables.lakehouse import Tables

# The approximate number of events per shard in a piece. A shard loads a piece in a batch between those of the stream.
_PIECE_EVENTS = 200_000
_MAX_PIECES = 100
# How far before the settled time to look for a gap in every key, in days, or in gaps if these are longer than a day;
# and how many events must be saved to make the search worthwhile.
_SPANS, _MIN_LEFT_OUT = (1, 10), 500_000
_TIME, _BEFORE, _HAS_GAP = "_time", "_before", "_has_gap"
# Before it imports anything, the process leaves a core to the stream and takes the idle scheduling class: with a nice
# value alone, threads that wake up would wait for its time slice. Not every system has this class; see sched(7).
_START = """
import os
try:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[1:] or cores)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
except (AttributeError, OSError):
    getattr(os, "nice", int)(19)
from lookback.spark.replay.histories import serve
serve()
"""
# The scheduler pool, if pools are in use: a task of the stream then waits for at most one task of a history, not for
# all.
_POOL = "lookback-histories"
# How long a stream must have run before a process is started to wait for its next history.
_READY_SECONDS = 10.0
_LOG = logging.getLogger("lookback")


class HistoryMaker:
    """Makes histories beside a stream with `make_history`, and keeps a process ready for the next one.

    The process starts once the stream has run for some seconds, because importing its modules takes longer than making
    a short history.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._next_start = time.monotonic() + _READY_SECONDS

    def __call__(self, tables: Tables, stream: Stream, request: Request) -> int:
        """Stores the parts of all pieces, and returns the number of pieces."""
        return make_history(tables, stream, request, self._take_process())

    def get_ready(self, tables: Tables, stream: Stream) -> None:
        """Starts the process if it is due. Called often."""
        if self._process is not None or time.monotonic() < self._next_start:
            return
        # A failure to start is logged when a process is needed.
        with self._lock, suppress(OSError):
            if _find_folder(tables.holding(stream), stream) is not None:
                self._process = _start_process()
        if self._process is None:
            self._next_start = time.monotonic() + _READY_SECONDS

    def close(self) -> None:
        """Ends the waiting process."""
        process = self._take_process()
        if process is not None:
            with process:
                process.kill()

    def _take_process(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            process, self._process = self._process, None
        if process is None or process.poll() is None:
            return process
        # The process has ended; the system may have killed it for its memory.
        with process:
            return None


def make_history(
    tables: Tables, stream: Stream, request: Request, process: subprocess.Popen[bytes] | None = None
) -> int:
    """Stores the history of a version in parcels, and returns the number of pieces.

    The history covers the readable commits up to `request.through`, with the deletes, commands and lists that the
    stream saw. `process` is a process that waits for an order, if there is one.
    """
    tables = tables.holding(stream)
    folder = _find_folder(tables, stream) if request.is_beside else None
    if folder is not None:
        pieces = _make_apart(folder, stream, request, process)
        if pieces is not None:
            return pieces
    tables = replace(tables, spark=open_own_session(tables.spark))

    def judge_all(rows: DataFrame, plan: Plan, history: History, shards: int) -> None:
        with _in_pool(tables.spark):
            judge(rows, stream, plan, history.events, history.spans, shards=shards).close()

    return _make(tables, stream, request, judge_all)


def make_without_spark(root: str, stream: Stream, request: Request) -> int:
    """Like `make_history`, but in this process and without Spark, for tables in folders below `root`.

    Raises:
        READ_ERRORS: If it needs Spark to read the tables.
    """
    from lookback.spark.tables.folders import open_folders  # noqa: PLC0415 - its packages may be missing

    def judge_all(rows: DataFrame, plan: Plan, history: History, shards: int) -> None:
        judge_in_turn(rows, stream, plan, history.spans, shards)

    with open_folders(root) as tables:
        return _make(tables.holding(stream), stream, replace(request, is_beside=False), judge_all)


def _make(
    tables: Tables, stream: Stream, request: Request, judge_all: Callable[[DataFrame, Plan, History, int], None]
) -> int:
    history = History.read(tables, stream, request.through, is_estimate=True)
    pieces = request.pieces
    if not pieces:
        pieces = min(_MAX_PIECES, 1 + _estimate_events(history, request.earliest) // (_PIECE_EVENTS * request.shards))
    parts, rows = request.shards * pieces, history.read_changes(tables)
    if request.earliest is not None:
        # Earlier rows are outside all windows. Leaving them out does not change the watermark where it decides on a
        # row.
        rows = rows.where(F.col(stream.event_time) >= to_timestamp(request.earliest))
    rows = leave_out_settled(rows, stream, request, history)
    plan = _make_plan(tables, stream, request, history)
    judge_all(rows, plan, history, parts)
    left = set(request.parcels.list())
    for name in (name_part(request.name, part) for part in range(parts)):
        if name not in left:
            request.parcels.write(name, warming.History.empty(request.rule, plan.high).encode())
    return pieces


def _find_folder(tables: Tables, stream: Stream) -> str | None:
    """Returns the folder of the tables if a process without Spark may read the events there."""
    is_readable = tables.root is not None and tables.log_folder(stream.name) is not None and has_reader()
    return tables.root if is_readable else None


def _make_apart(root: str, stream: Stream, request: Request, process: subprocess.Popen[bytes] | None) -> int | None:
    """Makes a history in a separate process. Returns None if that needs Spark, or if the process cannot be started."""
    try:
        if process is None:
            process = _start_process()
    except OSError as error:
        _LOG.warning("stream=%s cannot start a process to read its history: %s", stream.name, summarize_error(error))
        return None
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(_write_order(root, stream, request))
            process.stdin.flush()
        # Its input stays open until it answers, because the process exits when its input closes.
        answer = process.stdout.read()
    if not answer:
        raise RuntimeError(f"the process that reads the history has ended with code {process.returncode}")
    made = json.loads(answer)
    if "error" in made:
        raise RuntimeError(made["error"])
    if reason := made.get("needs_spark"):
        _LOG.info("stream=%s reading its history with Spark: %s", stream.name, reason)
    return made.get("pieces")  # type: ignore[no-any-return]


def _start_process() -> subprocess.Popen[bytes]:
    """Starts a process that runs `serve`, with this process's module path."""
    return subprocess.Popen(  # noqa: S603 - no shell reads it
        [sys.executable, "-c", _START], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip


def _write_order(root: str, stream: Stream, request: Request) -> bytes:
    """Encodes the order to make a history as one line."""
    own = asdict(replace(request, rule=None, parcels=None))  # type: ignore[arg-type]
    order = {
        **own, "root": root, "stream": stream.to_dict(), "rule": request.rule.spec.document,
        "parcels": str(request.parcels.folder),
    }  # fmt: skip
    return json.dumps(order, default=str).encode() + b"\n"


def _read_order(line: bytes) -> tuple[str, Stream, Request]:
    """Decodes an order from `_write_order`."""
    order = json.loads(line)
    root, stream = order.pop("root"), Stream.from_dict(order.pop("stream"))
    rule, parcels = compile_rule(order.pop("rule"), stream), Parcels(Path(order.pop("parcels")))
    return root, stream, Request(rule, parcels=parcels, **order)


def serve() -> None:
    """Makes the history ordered on standard input.

    The answer on standard output is the number of pieces, the reason why Spark is needed, or an error.
    """
    from lookback.spark.tables.folders import READ_ERRORS  # noqa: PLC0415 - its packages may be missing

    # Output printed by packages goes to standard error.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    order = sys.stdin.buffer.readline()
    if not order:
        # The stream ended without an order.
        return
    root, stream, request = _read_order(order)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        made: dict[str, Any] = {"pieces": make_without_spark(root, stream, request)}
    except READ_ERRORS as error:
        made = {"needs_spark": summarize_error(error)}
    except Exception as error:  # noqa: BLE001 - the parent logs it and tries again
        made = {"error": summarize_error(error)}
    with answers:
        answers.write(json.dumps(made))


def _end_with_parent() -> None:
    """Ends this process when its parent ends, for whatever reason, which closes standard input."""
    # A buffered reader would still hold its lock at interpreter exit.
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


def _estimate_events(history: History, earliest: int | None) -> int:
    """Estimates the number of events in the windows, assuming an even rate."""
    first, last = history.first_time, history.last_time
    if earliest is None or first is None or last is None or earliest <= first:
        return history.events
    return round(history.events * max(0, last - earliest) / max(1, last - first))


def leave_out_settled(rows: DataFrame, stream: Stream, request: Request, history: History) -> DataFrame:
    """Leaves out early events that no longer matter, if there are many of them.

    After a pause longer than the gap, a key starts from scratch. So if every key has such a pause before the settled
    time, up to which all sessions and matches are over, the events before the pauses do not change the result.
    """
    gap, settled = warming.find_gap(request.rule), request.settled
    if gap is None or settled is None:
        return rows
    for spans in _SPANS:
        begin = settled - spans * max(DAY_US, gap)
        if history.events - _estimate_events(history, begin) < _MIN_LEFT_OUT:
            break
        later = rows.where(F.col(stream.event_time) >= to_timestamp(begin))
        if _find_busy(later, stream, request.rule, begin, settled, gap).isEmpty():
            return later
    return rows


def _find_busy(rows: DataFrame, stream: Stream, rule: CompiledRule, begin: int, settled: int, gap: int) -> DataFrame:
    """Finds the keys without a gap from `begin` to `settled` but with later events. `rows` starts at `begin`."""
    keys, time = rule.group_by, F.unix_micros(F.col(stream.event_time))
    # The last event before `begin` is unknown, so assume that it came right at `begin`.
    before = F.coalesce(F.lag(time).over(make_window(keys, time)), F.lit(begin))
    gaps = rows.where(F.col("_change_type") == "insert").select(*keys, time.alias(_TIME), before.alias(_BEFORE))
    is_gap = (F.col(_BEFORE) <= settled) & (F.col(_TIME) - F.col(_BEFORE) > gap)
    found = gaps.groupBy(*keys).agg(F.max(_TIME).alias(_TIME), F.max(is_gap).alias(_HAS_GAP))
    return found.where((F.col(_TIME) > settled) & ~F.col(_HAS_GAP))


def _make_plan(tables: Tables, stream: Stream, request: Request, history: History) -> Plan:
    spec = request.rule.spec
    text = json.dumps(spec.document, ensure_ascii=False, default=str)
    first, waiting = [RuleChange("insert", -1, spec.rule_id, 1, "paused", text)], list[WaitingChange]()
    course = compute_at_once(
        lambda them: Course.read(them.holding(stream), stream, history, request.rule.lists, only_logged=True),
        tables.root, lambda: tables,
    )  # fmt: skip
    for change, after in course.commands:
        if after is None:
            first.append(change)
        elif after <= request.through:
            waiting.append(WaitingChange(change, after))
    # The version was accepted under the current limits, so earlier and lower limits must not reject it.
    widened = replace(stream, limits=WIDEST_LIMITS)
    return Plan(
        [request.rule], first, waiting, {stream.name: widened}, erases=True,
        declarations=course.declarations.with_limits(widened), lists=course.lists,
        high=find_highest_before(tables, stream, history.first) if history.first else None,
        history=HistoryPlace(request.parcels, request.name, request.is_beside),
    )  # fmt: skip


@contextmanager
def _in_pool(spark: SparkSession) -> Iterator[None]:
    """Makes the jobs of this thread yield to those of the stream, as far as Spark's scheduler can."""
    if is_connect(spark):
        yield
        return
    context = spark.sparkContext
    with suppress(PySparkException):
        context.setLocalProperty("spark.scheduler.pool", _POOL)
    try:
        yield
    finally:
        context.setLocalProperty("spark.scheduler.pool", None)  # type: ignore[arg-type]

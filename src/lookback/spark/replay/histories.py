"""Makes the window history of a warming version, by a replay in which the version gathers rows without raising alerts."""

from __future__ import annotations

import json
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from pyspark.errors import PySparkException
from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812

from lookback.core.engine import warming
from lookback.core.engine.schedule import WaitingChange
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.compiled import CompiledRule
from lookback.core.streams.declaration import Stream
from lookback.core.streams.watermarks import find_highest
from lookback.core.values.limits import WIDEST_LIMITS
from lookback.core.values.times import DAY_US
from lookback.spark.checkpoints.histories import name_part
from lookback.spark.explaining.keys import add_texts, list_values
from lookback.spark.following.warmups import Request
from lookback.spark.platform.session import is_connect, open_own_session
from lookback.spark.replay.history import History
from lookback.spark.replay.plan import HistoryPlace, ReplayPlan
from lookback.spark.replay.tasks import judge
from lookback.spark.replay.trials import Course
from lookback.spark.stream.rebuild import find_mark_before
from lookback.spark.tables.sqltexts import to_timestamp

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession

    from lookback.spark.tables.lakehouse import Tables

# The approximate number of events per shard in a piece. A shard loads a piece in a batch between those of the stream.
_PIECE_EVENTS = 200_000
_MAX_PIECES = 100
# How far before the settled time to look for a gap in every key, in days, or in gaps if these are longer than a day;
# and how many events must be saved to make the search worthwhile.
_SPANS, _MIN_LEFT_OUT = (1, 10), 500_000
_TIME, _BEFORE, _HAS_GAP = "_time", "_before", "_has_gap"
# The scheduler pool, if pools are in use: a task of the stream then waits for at most one task of a history, not for
# all.
_POOL = "lookback-histories"


def make_history(tables: Tables, stream: Stream, request: Request) -> int:
    """Stores the history of a version in parcels, and returns the number of pieces.

    The history covers the readable commits up to `request.through`, with the deletes, commands and lists that the
    stream saw.
    """
    tables = replace(tables.holding(stream), spark=open_own_session(tables.spark))
    history = History.read(tables, stream, request.through)
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
    with _in_pool(tables.spark):
        judge(rows, stream, plan, history.events, history.spans, shards=parts).close()
    left = set(request.parcels.list())
    for name in (name_part(request.name, part) for part in range(parts)):
        if name not in left:
            request.parcels.write(name, warming.WindowHistory.empty(request.rule, find_highest(plan.high)).encode())
    return pieces


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
    # With keys of their own for some steps, events of one key are found by several fields.
    if gap is None or settled is None or len(request.rule.routes) > 1:
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
    rows, time = add_texts(rows, stream, rule.key), F.unix_micros(F.col(stream.event_time))
    values, keys = list_values(rule.key), [f"key_{at}" for at in range(len(rule.key))]
    rows = rows.withColumns(dict(zip(keys, values.values(), strict=True)))
    # The last event before `begin` is unknown, so assume that it came right at `begin`.
    before = F.coalesce(F.lag(time).over(Window.partitionBy(*keys).orderBy(time)), F.lit(begin))
    gaps = rows.where(F.col("_change_type") == "insert").select(*keys, time.alias(_TIME), before.alias(_BEFORE))
    is_gap = (F.col(_BEFORE) <= settled) & (F.col(_TIME) - F.col(_BEFORE) > gap)
    found = gaps.groupBy(*keys).agg(F.max(_TIME).alias(_TIME), F.max(is_gap).alias(_HAS_GAP))
    return found.where((F.col(_TIME) > settled) & ~F.col(_HAS_GAP))


def _make_plan(tables: Tables, stream: Stream, request: Request, history: History) -> ReplayPlan:
    spec = request.rule.spec
    text = json.dumps(spec.document, ensure_ascii=False, default=str)
    first, waiting = [RuleChange("insert", -1, spec.rule_id, 1, "paused", text)], list[WaitingChange]()
    course = Course.read(tables, stream, history, request.rule.lists, only_logged=True)
    for change, after in course.commands:
        if after is None:
            first.append(change)
        elif after <= request.through:
            waiting.append(WaitingChange(change, after))
    # The version was accepted under the current limits, so earlier and lower limits must not reject it.
    widened = replace(stream, limits=WIDEST_LIMITS)
    return ReplayPlan(
        rules=[request.rule],
        first=first,
        waiting=waiting,
        streams={stream.name: widened},
        erases=True,
        declarations=course.declarations.with_limits(widened),
        lists=course.lists,
        high=find_mark_before(tables, stream, history.first) if history.first else None,
        history=HistoryPlace(request.parcels, request.name, request.is_beside),
    )


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

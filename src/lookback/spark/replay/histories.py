"""Makes the history of the windows of a version that is warming, by a replay in which it gathers rows in silence."""

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
from lookback.core.rules.rulebook import RuleChange
from lookback.core.values.limits import WIDEST_LIMITS
from lookback.core.values.texts import quote_identifier
from lookback.core.values.times import DAY_US
from lookback.spark.checkpoints.histories import name_part
from lookback.spark.platform.session import is_connect, open_own_session
from lookback.spark.replay.history import History
from lookback.spark.replay.tasks import HistoryPlace, Plan, judge
from lookback.spark.replay.trials import Course
from lookback.spark.stream.rebuild import find_highest_before
from lookback.spark.tables.answers import compute_at_once
from lookback.spark.tables.lakehouse import to_timestamp

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession

    from lookback.core.rules.compiled import CompiledRule
    from lookback.core.streams.declaration import Stream
    from lookback.spark.following.warmups import Request
    from lookback.spark.tables.lakehouse import Tables

# A piece has about so many events for each shard, which loads it in a batch between those of the stream.
_PIECE_EVENTS = 400_000
_MOST_PIECES = 100
# A gap of every key is looked for in so many days, or gaps, before all is settled; only if so many events may be left out.
_SPANS, _LEAST_LEFT_OUT = (1, 10), 500_000
_TIME, _BEFORE, _HAS_GAP = "_time", "_before", "_has_gap"
# The scheduler's pool, where it has any: a task of the stream waits for one of these at most, not for all of them.
_POOL = "lookback-histories"


def make_history(tables: Tables, stream: Stream, request: Request) -> int:
    """Leaves the history of a version in parcels, and returns the number of pieces.

    It is that of the commits that can be read, up to `request.through`, with deletes, commands and lists as the stream had them.
    """
    tables = replace(tables.holding(stream), spark=open_own_session(tables.spark))
    history = History.read(tables, stream, request.through, is_estimate=True)
    pieces = request.pieces
    if not pieces:
        pieces = min(_MOST_PIECES, 1 + _estimate_events(history, request.earliest) // (_PIECE_EVENTS * request.shards))
    parts, rows = request.shards * pieces, history.read_changes(tables)
    if request.earliest is not None:
        # Earlier rows are in no window. Without them the watermark is the same wherever it decides about others.
        rows = rows.where(F.col(stream.event_time) >= to_timestamp(request.earliest))
    rows = leave_out_settled(rows, stream, request, history)
    plan = _make_plan(tables, stream, request, history)
    with _in_pool(tables.spark):
        judge(rows, stream, plan, history.events, history.spans, shards=parts).close()
    left = set(request.parcels.list())
    for name in (name_part(request.name, part) for part in range(parts)):
        if name not in left:
            request.parcels.write(name, warming.History.empty(request.rule, plan.high).encode())
    return pieces


def _estimate_events(history: History, earliest: int | None) -> int:
    """Estimates how many events are in the windows, as if they came at an even pace."""
    first, last = history.first_time, history.last_time
    if earliest is None or first is None or last is None or earliest <= first:
        return history.events
    return round(history.events * max(0, last - earliest) / max(1, last - first))


def leave_out_settled(rows: DataFrame, stream: Stream, request: Request, history: History) -> DataFrame:
    """Leaves out the events before a time after which every key begins anew, where there is such a time and they are many.

    A key does that has had no event for longer than the gap, up to a time at which all that was before is over. Then it has
    what it would have had with them.
    """
    gap, settled = warming.find_gap(request.rule), request.settled
    if gap is None or settled is None:
        return rows
    for spans in _SPANS:
        begin = settled - spans * max(DAY_US, gap)
        if history.events - _estimate_events(history, begin) < _LEAST_LEFT_OUT:
            break
        later = rows.where(F.col(quote_identifier(stream.event_time)) >= to_timestamp(begin))
        if _find_busy(later, stream, request.rule, begin, settled, gap).isEmpty():
            return later
    return rows


def _find_busy(rows: DataFrame, stream: Stream, rule: CompiledRule, begin: int, settled: int, gap: int) -> DataFrame:
    """Finds the keys that have no gap from `begin` to `settled`, and have gone on since. rows: from `begin` on."""
    keys = [quote_identifier(name) for name in rule.group_by]
    time = F.unix_micros(F.col(quote_identifier(stream.event_time)))
    # Whether there is an event of before is not known: it may have come until `begin`.
    before = F.coalesce(F.lag(time).over(Window.partitionBy(*keys).orderBy(time)), F.lit(begin))
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
    # The version was admitted under the limits that hold now, and no earlier ones keep it out.
    widened = replace(stream, limits=WIDEST_LIMITS)
    return Plan(
        [request.rule], first, waiting, {stream.name: widened}, erases=True,
        declarations=course.declarations.with_limits(widened), lists=course.lists,
        high=find_highest_before(tables, stream, history.first) if history.first else None,
        history=HistoryPlace(request.parcels, request.name, request.is_beside),
    )  # fmt: skip


@contextmanager
def _in_pool(spark: SparkSession) -> Iterator[None]:
    """Lets the jobs of this thread wait behind those of the stream, as far as Spark's scheduler can."""
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

"""Finds the events behind the alerts of a backtest: those that an alert names, and all that its window counted.

An alert of a window names no events, and an alert of a long sequence names only some. The keys of such alerts are
judged a second time: window rules then note the events that they take, and sequences name all their events.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from pyspark.sql import functions as F  # noqa: N812

from lookback.core.rules.compiled import CompiledRule
from lookback.core.rules.keys import KeyPart
from lookback.core.streams.alerts import MAX_EVIDENCE_IDS
from lookback.core.streams.blocks import TRIED
from lookback.core.streams.declaration import Stream
from lookback.core.streams.flagged import FlagPlace
from lookback.core.values.windows import PER_EVENT, SEQUENCE, Session, TiledWindow
from lookback.spark.explaining.counted import list_named_events
from lookback.spark.explaining.keys import add_texts, write_key, write_own_key
from lookback.spark.replay.answers import ShardAnswers
from lookback.spark.replay.counting import find_last_rows, list_flagged
from lookback.spark.replay.history import History
from lookback.spark.replay.tasks import judge
from lookback.spark.replay.trials import Course, Trial, make_plan
from lookback.spark.tables.sqltexts import quote_name

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from lookback.spark.tables.lakehouse import Tables

_STANDS = "verdict = 'raised'"
_KEY, _IS_CONCERNED = "_key", "_is_concerned"
_ENTRIES = "array<struct<key string, value string>>"
# A key, and the fields that make it of an event.
_Grouping: TypeAlias = tuple[tuple[KeyPart, ...], tuple[str, ...]]


def find_named_events(last: DataFrame) -> DataFrame:
    """Lists the events that standing alerts in `last` (see `find_last_rows`) name: tried, alert_id, event_id."""
    rows = last.where(_STANDS).where(F.col("event_id").isNotNull())
    return rows.select(TRIED, "alert_id", F.explode(list_named_events()).alias("event_id"))


def find_events_behind(
    tables: Tables,
    stream: Stream,
    history: History,
    trials: Sequence[Trial],
    last: DataFrame,
    course: Course,
    since_commit: int | None,
    progress: Callable[[str], None] | None,
) -> tuple[DataFrame, ShardAnswers | None]:
    """Finds all events behind the standing alerts in `last` (see `find_last_rows`).

    For course and since_commit, see `make_plan`.

    Returns:
        The events with the columns tried, alert_id and event_id, and the answers of the second replay, or None if none
        was needed. Keep the answers open as long as you read the events.
    """
    # An alert of an event or lookback rule names its only event.
    names_all = all(trial.place is not None or trial.rule.spec.kind in PER_EVENT for trial in trials)
    sequences, shared, places = ([], {}, {}) if names_all else _plan_rejudging(trials, last)
    if not sequences and not places:
        return find_named_events(last), None
    plan = make_plan(
        {at: trials[at] for at in sorted([*sequences, *places])},
        stream,
        course,
        since_commit,
        flagging=places,
        paused=places,
        max_evidence=sys.maxsize,
    )
    groupings: dict[_Grouping, list[int]] = {}
    for at in [*shared, *sequences]:
        for fields in trials[at].rule.keys:
            groupings.setdefault((trials[at].rule.key, fields), []).append(at)
    rows = _mark_concerned(history.read_lasting(tables), stream, last, groupings)
    answers = judge(rows, stream, plan, history.events, history.spans, progress)
    events = find_named_events(last.where(~F.col(TRIED).isin(*sequences)))
    if sequences:
        events = events.unionByName(find_named_events(find_last_rows(answers.read_tried_alerts())))
    if shared:
        clears = [command.after for command in course.commands if command.change.status == "clear_state"]
        counted = list_flagged(answers.read_flagged(), {place: at for at, place in places.items()})
        windows = last.where(_STANDS).where(F.col(TRIED).isin(*shared))
        widths = {at: _find_width(trials[at].rule) for at in places}
        bounds = [after for after in clears if after is not None]
        events = events.unionByName(_find_counted(windows, counted, shared, widths, bounds))
    return events, answers


def _plan_rejudging(trials: Sequence[Trial], last: DataFrame) -> tuple[list[int], dict[int, int], dict[int, FlagPlace]]:
    """Finds the trials to judge a second time, because their standing alerts do not name all their events.

    Returns:
        The numbers of the sequence trials; for each window trial, the number of the trial that represents it, since
        rules that differ only in `when` count the same events; and where each representative notes its events.
    """
    is_short = F.col("event_id").isNull() | (F.size("evidence") >= MAX_EVIDENCE_IDS)
    numbers = sorted(row[0] for row in last.where(_STANDS).where(is_short).select(TRIED).distinct().collect())
    sequences = [at for at in numbers if trials[at].rule.spec.kind == SEQUENCE]
    first: dict[object, int] = {}
    bits: dict[tuple[KeyPart, ...], int] = {}
    groups: dict[tuple[KeyPart, ...], int] = {}
    shared: dict[int, int] = {}
    places: dict[int, FlagPlace] = {}
    for at in numbers:
        rule = trials[at].rule
        if rule.spec.kind == SEQUENCE:
            continue
        shared[at] = first.setdefault(_identify_windows(rule), at)
        if shared[at] == at:
            group, bit = groups.setdefault(rule.key, len(groups)), bits.get(rule.key, 0)
            places[at], bits[rule.key] = FlagPlace(group, bit), bit + 1
    return sequences, shared, places


def _identify_windows(rule: CompiledRule) -> object:
    """Returns a value that is equal for two rules if their windows count the same events."""
    where = None if rule.where is None else rule.where.sql
    features = frozenset(measure.feature.feature_id for measure in rule.measures)
    return rule.key, repr(rule.window), rule.allowed_lateness, where, features


def _find_width(rule: CompiledRule) -> int:
    """Returns the approximate width of a rule's windows in microseconds; for sessions, the gap between events."""
    window = rule.window
    if isinstance(window, Session):
        return max(1, window.gap)
    assert isinstance(window, TiledWindow)
    return window.size


def _mark_concerned(
    rows: DataFrame, stream: Stream, last: DataFrame, groupings: Mapping[_Grouping, Sequence[int]]
) -> DataFrame:
    """Marks the events of keys without alerts as deletions, which move the watermark but do not count.

    `groupings` has the trials by their keys, of which a sequence may have several. If a key has no entries or a float,
    which has no exact text, all events are judged.
    """
    if any(not key or any(part.type.is_float for part in key) for key, _ in groupings):
        return rows
    is_concerned = F.lit(False)
    entries = F.map_from_entries(F.from_json("key", _ENTRIES))
    for at, ((key, fields), numbers) in enumerate(groupings.items()):
        own = last.where(_STANDS).where(F.col(TRIED).isin(*numbers))
        keys = own.select(
            write_key(key, {part.name: entries[F.lit(part.name)] for part in key}).alias(f"{_KEY}{at}")
        ).distinct()
        given = [F.col(quote_name(name)) for name in rows.columns]
        own_key = write_own_key(key, fields).alias(f"{_KEY}{at}")
        rows = add_texts(rows, stream, key).select(*given, own_key)
        rows = rows.join(keys.withColumn(f"{_IS_CONCERNED}{at}", F.lit(True)), f"{_KEY}{at}", "left")
        is_concerned = is_concerned | F.col(f"{_IS_CONCERNED}{at}").isNotNull()
    return rows.withColumn("_change_type", F.when(is_concerned, F.col("_change_type")).otherwise("delete"))


def _find_counted(
    windows: DataFrame, counted: DataFrame, shared: Mapping[int, int], widths: Mapping[int, int], clears: Sequence[int]
) -> DataFrame:
    """Finds the events that each window counted as of its last row: tried, alert_id, event_id.

    A window with a row at some commit was open at every earlier commit, so it counted all events that its rule had
    taken.

    Args:
        windows: The last rows of the windows' alerts.
        counted: The events that the judged trials took (see `list_flagged`).
        shared: See `_plan_rejudging`.
        widths: See `_find_width`.
        clears: The last commit before each time the state was cleared.
    """
    rows = _pair_by_span(windows, counted, shared, widths)
    before = F.filter(F.array(*map(F.lit, clears)).cast("array<bigint>"), lambda after: after < F.col("_until"))
    is_inside = (F.col("_time") >= F.col("_start")) & (F.col("_time") < F.col("_end"))
    is_known = (F.col("arrival") <= F.col("_until")) & (F.col("arrival") > F.coalesce(F.array_max(before), F.lit(-1)))
    return rows.where(is_inside & is_known).select(TRIED, "alert_id", "event_id")


def _pair_by_span(
    windows: DataFrame, counted: DataFrame, shared: Mapping[int, int], widths: Mapping[int, int]
) -> DataFrame:
    """Pairs each event with the windows of its key that are near it in time, so that few pairs need to be dropped."""

    def find_span(time: Column) -> Column:
        return F.floor(time / F.element_at(_make_map(widths), F.col("_judged")))

    judged = F.element_at(_make_map(shared), F.col(TRIED)).alias("_judged")
    start, end = F.unix_micros("window_start").alias("_start"), F.unix_micros("window_end").alias("_end")
    rows = windows.select(TRIED, "alert_id", "key", judged, start, end, F.col("arrival").alias("_until"))
    spans = F.sequence(find_span(F.col("_start")), find_span(F.col("_end") - 1))
    rows = rows.withColumn("_span", F.explode(spans))
    time = F.unix_micros("event_time").alias("_time")
    events = counted.select(F.col(TRIED).alias("_judged"), "key", "event_id", time, "arrival")
    return rows.join(events.withColumn("_span", find_span(F.col("_time"))), ["_judged", "key", "_span"])


def _make_map(values: Mapping[int, int]) -> Column:
    return F.create_map(*(F.lit(each) for pair in values.items() for each in pair))

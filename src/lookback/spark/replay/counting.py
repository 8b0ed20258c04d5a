"""Counts the alerts that the rules of a backtest would have raised, their keys, and their events by label."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812

from lookback.core.streams.blocks import COMMIT, TRIED
from lookback.core.streams.declaration import Stream
from lookback.core.streams.flagged import WORD_BITS, FlagPlace, count_bits
from lookback.spark.labels import read_labels
from lookback.spark.tables.lakehouse import keep
from lookback.spark.tables.sqltexts import to_timestamp

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from lookback.spark.replay.history import History
    from lookback.spark.tables.lakehouse import Tables


@dataclass
class TrialCounts:
    """The counts of one trial; see `Figures`."""

    alerts: int = 0
    keys: int = 0
    rows: int = 0
    flagged: int = 0
    labelled: int = 0
    positives: int = 0


@dataclass
class LabelCounts:
    """The counts of all trials, and the number of events in the range with a positive label."""

    by_trial: dict[int, TrialCounts] = field(default_factory=dict)
    all_positives: int = 0


def read_range_labels(
    tables: Tables,
    stream: Stream,
    history: History,
    within: tuple[int | None, int | None, int | None],
    as_of: dt.datetime | None,
    streams: Mapping[str, Stream] | None = None,
) -> DataFrame | None:
    """Reads the labels of a range's events as of a time.

    Args:
        tables: The tables of the workspace.
        stream: The stream of the events.
        history: The commits that are judged.
        within: The first event time and the end of the range (exclusive), in microseconds, and the first commit; None
            for no bound.
        as_of: Ignores labels that became known after this time; None: now.
        streams: See `read_labels`.

    Returns:
        The columns event_id and positive; None if there are no labels.
    """
    if not tables.exists("reviews") or not any(map(tables.may_have_rows, ("reviews", "labels"))):
        return None
    labels = read_labels(tables, stream, as_of, streams=streams).select("event_id", "positive")
    if labels.isEmpty():
        return None
    since, until, since_commit = within
    events = history.read_lasting(tables).where(F.col("_change_type") == "insert")
    if since is not None:
        events = events.where(F.col(stream.event_time) >= to_timestamp(since))
    if until is not None:
        events = events.where(F.col(stream.event_time) < to_timestamp(until))
    if since_commit is not None:
        events = events.where(F.col(COMMIT) >= since_commit)
    ids = events.select(F.col(stream.event_id).cast("string").alias("event_id"))
    return keep(labels.join(ids, "event_id", "left_semi"))


def count_trials(
    trials: int,
    last: DataFrame,
    events: DataFrame,
    flagged: DataFrame,
    places: Mapping[FlagPlace, int],
    labels: DataFrame | None,
) -> LabelCounts:
    """Counts the alerts and events of the trials.

    Args:
        trials: The number of trials.
        last: The last row of each alert of the trials that write alerts (see `find_last_rows`).
        events: The events behind the standing alerts of these trials, with tried and alert_id.
        flagged: The events that the remaining trials flag.
        places: The places of these trials' flags, each with the trial's number.
        labels: See `read_range_labels`.
    """
    counts = LabelCounts(all_positives=0 if labels is None else labels.where("positive").count())
    if len(places) < trials:
        _count_alerts(counts, last, events, labels)
    if places:
        _count_flagged(counts, flagged, places, labels)
    return counts


def _count_alerts(counts: LabelCounts, last: DataFrame, events: DataFrame, labels: DataFrame | None) -> None:
    stands = F.col("verdict") == "raised"
    counted = last.groupBy(TRIED).agg(
        F.count_if(stands).alias("alerts"),
        F.count_distinct(F.when(stands, F.col("key"))).alias("keys"),
        F.sum("rows").alias("rows"),
    )
    for row in counted.collect():
        counts.by_trial[row[TRIED]] = TrialCounts(row["alerts"], row["keys"], row["rows"])
    events = _add_labels(events.select(TRIED, "event_id").distinct(), labels)
    by_label = events.groupBy(TRIED).agg(
        F.count("*").alias("flagged"), F.count("positive").alias("labelled"), F.count_if("positive").alias("positives")
    )
    for row in by_label.collect():
        own = counts.by_trial[row[TRIED]]
        own.flagged, own.labelled, own.positives = row["flagged"], row["labelled"], row["positives"]


def find_last_rows(alerts: DataFrame) -> DataFrame:
    """Finds the last row of each alert of each trial, with `key` as JSON and the number of the alert's rows."""
    names = ("verdict", "event_id", "window_start", "window_end", "event_time", "evidence", "arrival")
    row = F.struct(*names, F.to_json(F.array_sort(F.map_entries("key"))).alias("key"))
    last = alerts.groupBy(TRIED, "alert_id").agg(F.max_by(row, "revision").alias("last"), F.count("*").alias("rows"))
    return last.select(TRIED, "alert_id", "rows", "last.*")


def _count_flagged(
    counts: LabelCounts, flagged: DataFrame, places: Mapping[FlagPlace, int], labels: DataFrame | None
) -> None:
    counts.by_trial.update({at: TrialCounts() for at in places.values()})
    words = 1 + max(place.bit for place in places) // WORD_BITS

    def add(name: str, rows: DataFrame) -> None:
        """Adds the number of rows in which each trial's bit is set."""
        counted = rows.select("group", "bits").mapInArrow(_count_bits, "group int, counts array<bigint>")
        for row in counted.collect():
            for bit, count in enumerate(row["counts"]):
                if count:
                    own = counts.by_trial[places[FlagPlace(row["group"], bit)]]
                    setattr(own, name, getattr(own, name) + count)

    def merge(by: Column) -> DataFrame:
        """Merges the rows of each key or event: a trial's bit is set if any row has it."""
        bits = [F.coalesce(F.get("bits", F.lit(at)), F.lit(0).cast("bigint")) for at in range(words)]
        merged = flagged.groupBy("group", by.alias("event_id")).agg(
            F.array(*(F.bit_or(each) for each in bits)).alias("bits")
        )
        return merged.select("group", "event_id", "bits")

    add("alerts", flagged)
    add("keys", merge(F.to_json("key")))
    events = merge(F.col("event_id"))
    add("flagged", events)
    if labels is not None:
        labelled = events.join(labels, "event_id")
        add("labelled", labelled)
        add("positives", labelled.where("positive"))
    for at in places.values():
        counts.by_trial[at].rows = counts.by_trial[at].alerts


def _add_labels(events: DataFrame, labels: DataFrame | None) -> DataFrame:
    if labels is None:
        return events.withColumn("positive", F.lit(None).cast("boolean"))
    return events.join(labels, "event_id", "left")


def list_flagged(flagged: DataFrame, places: Mapping[FlagPlace, int]) -> DataFrame:
    """Lists the flagged events of each trial: tried (its number), key as JSON, event_id, event_time and arrival."""
    listed: Sequence[Column] = [
        F.when(
            (F.col("group") == place.group)
            & (
                F.shiftrightunsigned(F.get("bits", F.lit(place.bit // WORD_BITS)), place.bit % WORD_BITS).bitwiseAND(1)
                == 1
            ),
            F.lit(at),
        )
        for place, at in places.items()
    ]
    numbers = F.filter(F.array(*listed), lambda each: each.isNotNull())
    key = F.to_json(F.array_sort(F.map_entries("key"))).alias("key")
    return flagged.select(F.explode(numbers).alias(TRIED), key, "event_id", "event_time", "arrival")


def _count_bits(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Counts the rows of each group in which each bit is set."""
    for batch in batches:
        groups, words = batch["group"].to_numpy(), batch["bits"]
        for group in np.unique(groups).tolist():
            rows = np.flatnonzero(groups == group)
            bits = words.take(pa.array(rows)).flatten().to_numpy().reshape(len(rows), -1)
            counts = count_bits(bits, bits.shape[1] * WORD_BITS)
            columns = {"group": pa.array([group], pa.int32()), "counts": pa.array([counts], pa.list_(pa.int64()))}
            yield pa.RecordBatch.from_pydict(columns)

"""Compares the alerts of two versions of a rule: which ones the new version gains and loses.

Alerts are matched by key and event, or by key and window start, because their ids depend on the version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812

from lookback.core.streams.blocks import TRIED
from lookback.core.streams.flagged import FlagPlace
from lookback.core.values.texts import count_noun
from lookback.spark.replay.counting import list_flagged

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_SUBJECT = ["key", "event_id", "window_start"]
_CHANGES = ("gained", "lost", "kept")


@dataclass(frozen=True)
class AlertCount:
    """Counts alerts in total and by label.

    An alert is positive if any of its events has a positive label, and negative if all its labels are negative.
    """

    alerts: int = 0
    positives: int = 0
    negatives: int = 0


@dataclass(frozen=True)
class RunComparison:
    """The alerts of a rule compared with those of another version, here identified by rule_id and version.

    Attributes:
        rule_id: The id of the rule compared with.
        version: The version compared with.
        gained: Alerts that only the rule raises.
        lost: Alerts that only the other version raises.
        kept: Alerts that both raise.
        keys_gained: The number of keys for which only the rule raises alerts.
        keys_lost: The number of keys for which only the other version raises alerts.
    """

    rule_id: str
    version: int
    gained: AlertCount
    lost: AlertCount
    kept: AlertCount
    keys_gained: int
    keys_lost: int

    @property
    def sentence(self) -> str:
        """The comparison in words."""
        before, after = self.lost.alerts + self.kept.alerts, self.gained.alerts + self.kept.alerts
        text = f"{count_noun(before, 'alert')} become{'s' if before == 1 else ''} {after:,}"
        # A label is positive, also where nobody has confirmed the alert.
        if positives := self.lost.positives + self.kept.positives:
            text += f"; of {positives:,} with a positive label {self.kept.positives:,} stay"
        if self.gained.positives:
            text += f", and {self.gained.positives:,} are new"
        return text

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        counts = {change: asdict(getattr(self, change)) for change in _CHANGES}
        named = {"rule_id": self.rule_id, "version": self.version, "sentence": self.sentence}
        return {**named, **counts, "keys_gained": self.keys_gained, "keys_lost": self.keys_lost}


def find_standing(
    last: DataFrame, events: DataFrame, flagged: DataFrame, places: Mapping[FlagPlace, int], labels: DataFrame | None
) -> DataFrame:
    """Finds the standing alerts of each trial; see `count_trials` for the arguments.

    Returns:
        The columns tried (the trial's number), key as JSON, event_id or window_start, event_time, and positive: whether
        any of the alert's events has a positive label, or NULL if none has a label.
    """
    columns, event = (TRIED, "key", "event_id", "event_time"), F.col("event_id").alias("_event")
    start = F.when(F.col("event_id").isNull(), F.col("window_start")).alias("window_start")
    standing = last.where("verdict = 'raised'").select(*columns, start, "alert_id")
    known = standing.join(events.select(TRIED, "alert_id", event), [TRIED, "alert_id"], "left").drop("alert_id")
    if places:
        own = list_flagged(flagged, places).select(*columns, F.lit(None).cast("timestamp").alias("window_start"), event)
        known = known.unionByName(own)
    if labels is None:
        known = known.withColumn("positive", F.lit(None).cast("boolean"))
    else:
        known = known.join(labels.withColumnRenamed("event_id", "_event"), "_event", "left")
    return known.groupBy(TRIED, *_SUBJECT).agg(
        F.max("event_time").alias("event_time"), F.max("positive").alias("positive")
    )


def find_changes(standing: DataFrame, number: int, against: int) -> DataFrame:
    """Lists each alert of two trials once, as gained, lost or kept.

    Args:
        standing: The result of `find_standing`.
        number: The number of the new trial.
        against: The number of the trial to compare with.

    Returns:
        The columns change (gained, lost, kept), key as JSON, event_id, window_start, event_time, and positive according
        to the labels; a kept alert has the value of the trial `against`.
    """
    old = F.col(TRIED) == against
    pair = standing.where(F.col(TRIED).isin(number, against)).groupBy(*_SUBJECT)
    merged = pair.agg(
        F.bool_or(old).alias("_old"),
        F.bool_or(~old).alias("_new"),
        F.max("event_time").alias("event_time"),
        F.max_by("positive", old).alias("positive"),
    )
    change = F.when(~F.col("_old"), "gained").when(~F.col("_new"), "lost").otherwise("kept").alias("change")
    return merged.select(change, *_SUBJECT, "event_time", "positive")


def compare(changes: DataFrame, rule_id: str, version: int) -> RunComparison:
    """Counts the rows of `find_changes`; rule_id and version name the rule compared with."""
    counted = changes.groupBy("change").agg(
        F.count("*").alias("alerts"),
        F.count_if("positive").alias("positives"),
        F.count_if(~F.col("positive")).alias("negatives"),
    )
    counts = {row["change"]: AlertCount(row["alerts"], row["positives"], row["negatives"]) for row in counted.collect()}
    keys = changes.groupBy("key").agg(
        F.bool_and(F.col("change") == "gained").alias("gained"), F.bool_and(F.col("change") == "lost").alias("lost")
    )
    (row,) = keys.agg(F.count_if("gained").alias("gained"), F.count_if("lost").alias("lost")).collect()
    gained, lost, kept = (counts.get(change, AlertCount()) for change in _CHANGES)
    return RunComparison(rule_id, version, gained, lost, kept, row["gained"], row["lost"])

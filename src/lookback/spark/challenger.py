"""Compares the alerts of a rule's version in shadow, its challenger, with those of the active one beside it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812

from lookback.core.errors import Problem, RuleError
from lookback.core.rules.roles import SHADOW
from lookback.core.streams.declaration import Stream
from lookback.spark.labels import read_labels
from lookback.spark.rules import RulesTable
from lookback.spark.stream.evaluations import Term

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from lookback.spark.tables.lakehouse import Tables

BOTH, ONLY_ACTIVE, ONLY_SHADOW = "both", "only active", "only shadow"


@dataclass(frozen=True)
class ChallengerComparison:
    """The alerts of two versions of a rule since the shadow began.

    active, shadow: their versions; active None: the rule has no other version than the one in shadow. since: the commit
    judged before the shadow began; None for before the first, or if the stream has not obeyed it yet. alerts: one row per
    subject that either alerts on, with the columns side (both, only active, only shadow), key, event_id, event_time,
    window_start, active_alert_id, shadow_alert_id and positive, the label of the event if it has one.
    """

    rule_id: str
    active: int | None
    shadow: int
    since: int | None
    alerts: DataFrame

    def count(self) -> DataFrame:
        """Counts the alerts of each side. Columns: side, alerts, keys, positives, negatives, unlabelled."""
        counts = self.alerts.groupBy("side").agg(
            F.count("*").alias("alerts"),
            F.count_distinct(F.to_json("key")).alias("keys"),
            F.count_if("positive").alias("positives"),
            F.count_if(~F.col("positive")).alias("negatives"),
            F.count_if(F.col("positive").isNull()).alias("unlabelled"),
        )
        sides = counts.sparkSession.createDataFrame([(BOTH,), (ONLY_ACTIVE,), (ONLY_SHADOW,)], "side string")
        return sides.join(counts, "side", "left").fillna(0).orderBy("side")


def compare_versions(
    tables: Tables, streams: Mapping[str, Stream], rule_id: str, *, as_of: dt.datetime | None = None,
    has_gate: bool = False,
) -> ChallengerComparison:  # fmt: skip
    """Compares the version of a rule in shadow with the one beside it, by key and event or start of window.

    Alerts of the last evaluation that stand count: those whose last verdict is raised. A suppressed or retracted one does not.
    streams: the declared streams by name. as_of: an aware time, as of which labels are read; None: now. has_gate: whether the settings have one; see
    `RulesTable`. Raises RuleError if no version is in shadow.
    """
    tables = tables.holding(*streams.values())
    rows = [row for row in RulesTable(tables, streams, has_gate).rows() if row.rule_id == rule_id]
    shadow = next((row for row in rows if row.status == SHADOW), None)
    if shadow is None or shadow.document is None:
        message = "has no version in shadow to compare; publish one with `lookback rules push FILE --status shadow`"
        raise RuleError(rule_id, [Problem("status", message)])
    active = next((row.version for row in rows if row.status in ("active", "paused")), None)
    stream = streams[str(shadow.document["stream"])]
    own = (F.col("stream") == stream.name) & (F.col("rule_id") == rule_id)
    is_begin = (F.col("action") == "shadowed") & (F.col("version") == shadow.version)
    term = Term.find(tables, stream)
    log = term.select(tables.read("rule_log"), "logged_at").where(own & is_begin)
    begin = log.agg(F.max(F.coalesce("arrival", F.lit(-1)))).head()
    since = -1 if begin is None or begin[0] is None else int(begin[0])
    is_compared = (F.col("mode") == "active") | (F.col("rule_version") == shadow.version)
    alerts = term.select(tables.read("alerts"), "decided_at")
    alerts = alerts.where(own & is_compared & (F.col("arrival") > since))
    labels = read_labels(tables, stream, as_of, streams=streams).select("event_id", "positive")
    return ChallengerComparison(
        rule_id,
        active,
        shadow.version,
        None if since < 0 else since,
        _match_sides(alerts).join(labels, "event_id", "left"),
    )


def _match_sides(alerts: DataFrame) -> DataFrame:
    """Puts the alerts of both modes on one subject into one row."""
    last = alerts.groupBy("alert_id", "mode").agg(
        *(
            F.max_by(name, "revision").alias(name)
            for name in ("verdict", "event_id", "event_time", "window_start", "key")
        )
    )
    standing = last.where("verdict = 'raised'")
    entries = F.to_json(F.array_sort(F.map_entries("key")))
    # An alert on an event is the same whatever the window, so windows tell apart only what has no event.
    window = F.when(F.col("event_id").isNull(), F.col("window_start"))

    both = standing.groupBy(entries.alias("_key"), "event_id", window.alias("_window")).agg(
        F.any_value("key").alias("key"),
        F.min("event_time").alias("event_time"),
        F.min("window_start").alias("window_start"),
        F.max(F.when(F.col("mode") == "active", F.col("alert_id"))).alias("active_alert_id"),
        F.max(F.when(F.col("mode") == SHADOW, F.col("alert_id"))).alias("shadow_alert_id"),
    )
    side = (
        F.when(F.col("shadow_alert_id").isNull(), ONLY_ACTIVE)
        .when(F.col("active_alert_id").isNull(), ONLY_SHADOW)
        .otherwise(BOTH)
    )
    names = ("key", "event_id", "event_time", "window_start", "active_alert_id", "shadow_alert_id")
    return both.select(side.alias("side"), *names)

"""Compares the alerts of a rule's version in shadow, the challenger, with those of its active version."""

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
from lookback.spark.record.evaluations import Term
from lookback.spark.rules import RulesTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from lookback.spark.tables.lakehouse import Tables

BOTH, ONLY_ACTIVE, ONLY_SHADOW = "both", "only active", "only shadow"


@dataclass(frozen=True)
class ChallengerComparison:
    """The alerts of two versions of a rule since the shadow began.

    Attributes:
        rule_id: The rule.
        active: Number of the active or paused version; None if the rule only has the one in shadow.
        shadow: Number of the version in shadow.
        since: Last commit that was judged before the shadow began; None if it began before the first commit, or the
            stream has not applied it yet.
        alerts: One row per key and event or window with an alert, with the columns side (both, only active, only
            shadow), key, event_id, event_time, window_start, active_alert_id, shadow_alert_id and positive, the label
            of the event if it has one.
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
    tables: Tables,
    streams: Mapping[str, Stream],
    rule_id: str,
    *,
    as_of: dt.datetime | None = None,
    has_gate: bool = False,
) -> ChallengerComparison:
    """Compares the version of a rule in shadow with the active one, by key and event or start of window.

    Only alerts of the last evaluation whose last verdict is raised count, not suppressed or retracted ones.

    Args:
        tables: The tables of the place.
        streams: The declared streams by name.
        rule_id: The rule.
        as_of: Aware time as of which to read labels; None for now.
        has_gate: Whether the settings have a gate; see `RulesTable`.

    Raises:
        RuleError: If no version is in shadow.
    """
    tables = tables.holding(*streams.values())
    rows = [row for row in RulesTable(tables, streams, has_gate).rows() if row.rule_id == rule_id]
    shadow = next((row for row in rows if row.status == SHADOW), None)
    if shadow is None or shadow.document is None:
        message = "has no version in shadow to compare; publish one with `lookback rules push FILE --status shadow`"
        raise RuleError(rule_id, [Problem("status", message)])
    active = next((row.version for row in rows if row.status in ("active", "paused")), None)
    stream = streams[str(shadow.document["stream"])]
    term = Term.find(tables, stream)
    given = {"stream": stream.name, "rule_id": rule_id, "shadow": shadow.version, **term.values}
    ((begin,),) = tables.ask("shadow_begin", **given).collect()
    since = -1 if begin is None else int(begin)
    alerts = tables.ask("compared_alerts", after=since, **given)
    labels = read_labels(tables, stream, as_of, streams=streams).select("event_id", "positive")
    return ChallengerComparison(
        rule_id,
        active,
        shadow.version,
        None if since < 0 else since,
        alerts.join(labels, "event_id", "left"),
    )

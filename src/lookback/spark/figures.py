"""Measures rules over a period of event time: how often each was right, how much it found, what it adds to other rules.

All figures are as of a moment: alerts decided later and labels that became known later do not count. Only alerts in
mode active count, not those in shadow. An alert stands if its last revision is raised.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812

from lookback.core.rules.keys import KeyPart, find_key
from lookback.core.values.times import parse_time
from lookback.spark.explaining.counted import find_counted_events, list_named_events
from lookback.spark.explaining.keys import add_texts, list_values, write_key
from lookback.spark.labels import read_labels
from lookback.spark.tables.sqltexts import to_timestamp

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables

_DAY_US = 86_400_000_000
# Stands for all rules together; no rule can have this id.
_TOGETHER = ""
_FIGURES = (
    "rule_id",
    "alerts",
    "alerts_per_day",
    "keys",
    "flagged",
    "labelled",
    "unlabelled",
    "positives",
    "all_positives",
    "precision",
    "recall",
    "value_precision",
    "value_recall",
    "seconds_to_alert",
)
_CASES = ("cases", "case_precision", "case_recall")


@dataclass(frozen=True)
class Period:
    """A range of event time, [since, until), as of a moment.

    Times are aware. A range without `since` or `until` has no such bound; `as_of` defaults to now. With
    `unlabelled_are_negative` an event without a label counts as negative.
    """

    since: dt.datetime | None = None
    until: dt.datetime | None = None
    as_of: dt.datetime | None = None
    unlabelled_are_negative: bool = False

    def holds(self, time: str) -> Column:
        """Returns the condition that a column's time is in the period."""
        bounds = [F.lit(True)]
        if self.since is not None:
            bounds.append(F.col(time) >= to_timestamp(parse_time(self.since)))
        if self.until is not None:
            bounds.append(F.col(time) < to_timestamp(parse_time(self.until)))
        return reduce(and_, bounds)


class RuleFigures:
    """The figures of a stream's rules over a period. The tables are read once; later changes do not show.

    `rules` selects rules by id; the default is every rule with an alert and every active rule. `streams` has every
    declared stream by name, since a version may have moved a rule to another stream; None means there is only one.
    """

    def __init__(
        self,
        tables: Tables,
        stream: Stream,
        period: Period | None = None,
        rules: Sequence[str] | None = None,
        *,
        streams: Mapping[str, Stream] | None = None,
    ) -> None:
        self._streams = {**(streams or {}), stream.name: stream}
        self._tables, self._stream = tables.holding(*self._streams.values()), stream
        self._period = period or Period()
        as_of = self._period.as_of or dt.datetime.now(dt.timezone.utc)
        self._alerts = self._tables.ask("standing_alerts", stream=stream.name, as_of=as_of)
        self.rules = sorted(rules) if rules is not None else self._find_rules()
        self._alerts = self._alerts.where(F.col("rule_id").isin(self.rules)).localCheckpoint()
        self._events = self._read_events(as_of).localCheckpoint()
        self._flagged = self._read_flagged().localCheckpoint()

    @property
    def events(self) -> DataFrame:
        """The events of the period: event_id, event_time, day, value, positive (NULL without a label)."""
        return self._events.select("event_id", "event_time", "day", "value", "positive")

    @property
    def flagged(self) -> DataFrame:
        """The events of the period that each rule flagged, each once: rule_id and the columns of `events`."""
        rows = self._flagged.where(F.col("event_id").isNotNull()).select("rule_id", "event_id").distinct()
        return rows.join(self.events, "event_id").select("rule_id", *self.events.columns)

    @property
    def unexplained(self) -> DataFrame:
        """The standing alerts whose events are unknown, by rule: rule_id, alerts. They flag no events here.

        These alerts cannot be reproduced: they are on windows, or on sequences with more events than an alert can name.
        """
        rows = self._flagged.where(F.col("event_id").isNull())
        return rows.groupBy("rule_id").agg(F.count("*").alias("alerts")).orderBy("rule_id")

    def by_rule(self) -> DataFrame:
        """Returns a row for each rule, and a last row for all rules together, with rule_id NULL.

        Columns, where a ratio over 0 is NULL:
            alerts: Standing alerts in the period.
            alerts_per_day: Alerts divided by the days between the period's first and last event.
            keys: Number of keys with an alert.
            flagged: Flagged events; labelled, unlabelled and positives are parts of it.
            all_positives: Positive events of the period.
            precision: positives / labelled.
            recall: positives / all_positives.
            value_precision, value_recall: The same, weighted by the stream's field `value`.
            cases, case_precision, case_recall: The same, counting keys instead of events. A key is positive if any of
            its
                events is: any flagged event for precision, any event at all for recall.
            seconds_to_alert: Median time from the event to the first decision.
        """
        rows = self._aggregate(by_day=False).drop("day").join(self._count_cases(), "rule_id", "left")
        days = self._count_days()
        rows = rows.withColumn("alerts_per_day", F.try_divide(F.col("alerts"), F.lit(days)))
        return _order(rows, "rule_id").select(*_FIGURES, *_CASES)

    def by_day(self) -> DataFrame:
        """Returns the figures of `by_rule`, except those by key, for each UTC day of the period, in a column `day`."""
        rows = self._aggregate(by_day=True).withColumn("alerts_per_day", F.col("alerts").cast("double"))
        return _order(rows, "day", "rule_id").select("day", *_FIGURES)

    def pairs(self) -> DataFrame:
        """Counts, for each pair a < b, the events that both flagged, and their share of those either flagged."""
        flagged = self.flagged.select("rule_id", "event_id")
        sizes = self._list_rules(flagged.groupBy("rule_id").agg(F.count("*").alias("flagged")), "flagged")
        first, second = (sizes.select(F.col("rule_id").alias(n), F.col("flagged").alias(f"of_{n}")) for n in "ab")
        a, b = (flagged.select("event_id", F.col("rule_id").alias(name)) for name in "ab")
        both = a.join(b, "event_id").where("a < b").groupBy("a", "b").agg(F.count("*").alias("both"))
        pairs = first.crossJoin(second).where("a < b").join(both, ["a", "b"], "left")
        shared = F.coalesce("both", F.lit(0))
        jaccard = F.try_divide(shared, F.col("of_a") + F.col("of_b") - shared)
        return pairs.select("a", "b", shared.alias("both"), jaccard.alias("jaccard")).orderBy("a", "b")

    def alone(self) -> DataFrame:
        """Counts, for each rule `a`, the positives that only it flagged (alone) and all events it flagged (flagged).

        A rule adds nothing (adds_nothing) if the remaining rules that add something flag all its events that are
        positive or have no label. So a rule that alone catches something always stays, and of two equal rules one
        stays.
        """
        kinds = self.flagged.groupBy("event_id").agg(
            F.array_sort(F.collect_set("rule_id")).alias("rules"), F.max("positive").alias("positive")
        )
        counted = kinds.groupBy("rules").agg(
            F.count("*").alias("events"),
            F.count_if("positive").alias("positives"),
            F.count_if(F.coalesce("positive", F.lit(True))).alias("wanted"),
        )
        sets = [
            _FlaggedSet(frozenset(row["rules"]), row["events"], row["positives"], row["wanted"])
            for row in counted.collect()
        ]
        idle = find_redundant(self.rules, sets)
        rows = [
            (
                rule_id,
                sum(each.positives for each in sets if each.rules == {rule_id}),
                sum(each.events for each in sets if rule_id in each.rules),
                rule_id in idle,
            )
            for rule_id in self.rules
        ]
        return self._tables.spark.createDataFrame(rows, "a string, alone bigint, flagged bigint, adds_nothing boolean")

    def _find_rules(self) -> list[str]:
        flagging = {row[0] for row in self._alerts.select("rule_id").distinct().collect()}
        rows = self._tables.read("rules").where(F.col("rule_id") != "*")
        last = rows.groupBy("rule_id").agg(F.max_by(F.struct("status", "document"), "version").alias("last"))
        own = F.get_json_object("last.document", "$.stream") == self._stream.name
        active = last.where((F.col("last.status") == "active") & own).select("rule_id").collect()
        return sorted(flagging | {row[0] for row in active})

    def _read_events(self, as_of: dt.datetime) -> DataFrame:
        """Reads the events of the period, each id once, with their labels and all fields."""
        stream = self._stream
        value = F.col(stream.value).cast("double") if stream.value else F.lit(None).cast("double")
        rows = self._tables.read_events(stream.name).select(
            F.col(stream.event_id).cast("string").alias("event_id"),
            F.col(stream.event_time).alias("event_time"),
            value.alias("value"),
            F.struct(*stream.table_columns).alias("event"),
        )
        rows = rows.where(self._period.holds("event_time")).dropDuplicates(["event_id"])
        rows = rows.withColumn("day", _find_day("event_time"))
        labels = read_labels(self._tables, stream, as_of, streams=self._streams).select("event_id", "positive")
        rows = rows.join(labels, "event_id", "left")
        if self._period.unlabelled_are_negative:
            rows = rows.withColumn("positive", F.coalesce("positive", F.lit(False)))
        return rows

    def _read_flagged(self) -> DataFrame:
        """Finds the events that each standing alert flagged; event_id is NULL if an alert's events are unknown."""
        whole = self._alerts.where("is_named").select(
            "rule_id", "alert_id", F.explode(list_named_events()).alias("event_id")
        )
        partial = self._alerts.where("NOT is_named")
        if partial.isEmpty():
            return whole
        counted = find_counted_events(self._tables, self._streams, partial)
        return whole.unionByName(partial.select("rule_id", "alert_id").join(counted, "alert_id"))

    def _aggregate(self, *, by_day: bool) -> DataFrame:
        """Counts alerts and flagged events of each rule and of all rules together (_TOGETHER)."""
        day = F.col("day") if by_day else F.lit(None).cast("date").alias("day")
        flagged = self.flagged
        rows = flagged.unionByName(flagged.withColumn("rule_id", F.lit(_TOGETHER)).distinct())
        is_known, is_positive = F.col("positive").isNotNull(), F.col("positive")
        found = rows.groupBy("rule_id", day).agg(
            F.count("*").alias("flagged"),
            F.count_if(is_known).alias("labelled"),
            F.count_if(is_positive).alias("positives"),
            F.sum(F.when(is_known, F.col("value"))).alias("labelled_value"),
            F.sum(F.when(is_positive, F.col("value"))).alias("positive_value"),
        )
        alerts = self._alerts.where(self._period.holds("event_time")).withColumn("day", _find_day("event_time"))
        alerts = alerts.unionByName(alerts.withColumn("rule_id", F.lit(_TOGETHER)))
        waited = (F.unix_micros("first_decided_at") - F.unix_micros("event_time")) / 1_000_000
        raised = alerts.groupBy("rule_id", day).agg(
            F.count("*").alias("alerts"),
            F.percentile(waited, 0.5).alias("seconds_to_alert"),
            F.count_distinct(F.to_json(F.array_sort(F.map_entries("key")))).alias("keys"),
        )
        everything = self._events.groupBy(day).agg(
            F.count_if(is_positive).alias("all_positives"),
            F.sum(F.when(is_positive, F.col("value"))).alias("all_positive_value"),
        )
        days = everything.select("day").union(raised.select("day")).distinct()
        if not by_day:
            days = self._tables.spark.createDataFrame([(None,)], "day date")
        rows = days.crossJoin(self._list_rules(None)).alias("base")
        for other, names in ((found, ["rule_id", "day"]), (raised, ["rule_id", "day"]), (everything, ["day"])):
            rows = _join_by(rows, other, names)
        rows = rows.fillna(0, ["alerts", "keys", "flagged", "labelled", "positives", "all_positives"])
        ratios = {
            "precision": ("positives", "labelled"),
            "recall": ("positives", "all_positives"),
            "value_precision": ("positive_value", "labelled_value"),
            "value_recall": ("positive_value", "all_positive_value"),
        }
        if self._stream.value:
            # SQL's sum over no rows is NULL; the sum over no flagged events is 0.
            rows = rows.withColumn("positive_value", F.coalesce("positive_value", F.lit(0.0)))
        rows = rows.withColumns({name: F.try_divide(*parts) for name, parts in ratios.items()})
        return rows.withColumn("unlabelled", F.col("flagged") - F.col("labelled"))

    def _list_rules(self, counts: DataFrame | None, *names: str) -> DataFrame:
        """Returns a row for each rule with its counts, by default 0. Without counts adds a row for all together."""
        ids = self.rules if counts is not None else [*self.rules, _TOGETHER]
        rows = self._tables.spark.createDataFrame([(each,) for each in ids], "rule_id string")
        return rows if counts is None else rows.join(counts, "rule_id", "left").fillna(0, list(names))

    def _count_cases(self) -> DataFrame:
        """Counts each rule's keys with a flagged event, and how many of these are positive."""
        found = []
        own_columns = ("event_id", "positive")
        for key, rules in self._find_groupings().items():
            events = self._events.select(*(F.col(name).alias(f"__{name}") for name in own_columns), "event.*")
            key_text = write_key(key, list_values(key)).alias("key_text")
            given = [F.col(f"__{name}").alias(name) for name in own_columns]
            keyed = add_texts(events, self._stream, key).select(*given, key_text)
            all_ = keyed.where("positive").select(F.count_distinct("key_text")).head()
            assert all_ is not None
            own = self.flagged.where(F.col("rule_id").isin(rules)).select("rule_id", "event_id")
            cases = own.join(keyed, "event_id").groupBy("rule_id", "key_text").agg(F.max("positive").alias("positive"))
            counted = cases.groupBy("rule_id").agg(F.count("*"), F.count("positive"), F.count_if("positive"))
            counts = {row[0]: tuple(row)[1:] for row in counted.collect()}
            for rule_id in rules:
                flagged, labelled, positives = counts.get(rule_id, (0, 0, 0))
                found.append((rule_id, flagged, _divide(positives, labelled), _divide(positives, all_[0])))
        return self._tables.spark.createDataFrame(
            found, "rule_id string, cases bigint, case_precision double, case_recall double"
        )

    def _find_groupings(self) -> dict[tuple[KeyPart, ...], list[str]]:
        """Groups the rules by their key, from the highest version on this stream or the fields of their alerts' keys."""
        is_own = F.get_json_object("document", "$.stream") == self._stream.name
        rows = self._tables.read("rules").where(F.col("rule_id").isin(self.rules) & is_own)
        last = rows.groupBy("rule_id").agg(F.max_by("document", "version").alias("document"))
        written = {row["rule_id"]: json.loads(row["document"]) for row in last.collect()}
        for row in self._alerts.groupBy("rule_id").agg(F.max_by(F.map_keys("key"), "arrival").alias("names")).collect():
            written.setdefault(row["rule_id"], {"group_by": list(row["names"] or [])})
        groupings: dict[tuple[KeyPart, ...], list[str]] = {}
        for rule_id, document in sorted(written.items()):
            key = find_key(document, self._stream)
            if key is not None:
                groupings.setdefault(key, []).append(rule_id)
        return groupings

    def _count_days(self) -> float:
        """Returns the days from the first to the last event of the period."""
        time = F.unix_micros("event_time")
        bounds = self._events.agg(F.min(time).alias("first"), F.max(time).alias("last")).head()
        if bounds is None or bounds["first"] is None:
            return 0.0
        return float(bounds["last"] - bounds["first"]) / _DAY_US


@dataclass(frozen=True)
class _FlaggedSet:
    """Counts of events that exactly these rules flagged: all, positive, and positive or unlabelled (wanted)."""

    rules: frozenset[str]
    events: int
    positives: int
    wanted: int


def find_redundant(rules: Sequence[str], sets: Sequence[_FlaggedSet]) -> set[str]:
    """Finds the rules that can go while the rest still flags every event that is positive or has no label.

    `sets` has the flagged events by the rules that flagged them. Rules with the fewest positives go first. A rule stays
    if dropping it with those already dropped would lose an event.
    """
    positives = {rule_id: sum(each.positives for each in sets if rule_id in each.rules) for rule_id in rules}
    dropped = set[str]()
    for rule_id in sorted(rules, key=lambda each: (positives[each], each)):
        if not any(each.wanted and each.rules <= {*dropped, rule_id} for each in sets):
            dropped.add(rule_id)
    return dropped


def _divide(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _find_day(time: str) -> Column:
    return F.date_trunc("day", time).cast("date")


def _join_by(rows: DataFrame, other: DataFrame, names: Sequence[str]) -> DataFrame:
    """Adds the columns of `other` by a left join in which NULL equals NULL."""
    renamed = other.withColumnsRenamed({name: f"__{name}" for name in names})
    same = reduce(and_, [rows[name].eqNullSafe(renamed[f"__{name}"]) for name in names])
    return rows.join(renamed, same, "left").drop(*(f"__{name}" for name in names))


def _order(rows: DataFrame, *names: str) -> DataFrame:
    """Sorts the rows. The id for all rules together becomes NULL and comes last."""
    rows = rows.withColumn("rule_id", F.nullif(F.col("rule_id"), F.lit(_TOGETHER)))
    return rows.orderBy(*(F.col(name).asc_nulls_last() for name in names))

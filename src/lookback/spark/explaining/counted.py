"""Finds the events behind alerts of windows and sequences, with a Spark task per key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from lookback.core.errors import ReviewError
from lookback.core.explaining.evidence import Evidence, Reset
from lookback.core.explaining.explanation import find_counted
from lookback.core.rules.compiled import CompiledRule
from lookback.core.values.times import to_utc
from lookback.core.values.windows import SEQUENCE
from lookback.spark.explaining.evidence import prepare_evidence, select_changes
from lookback.spark.explaining.history import RuleHistory, read_feed
from lookback.spark.explaining.keys import add_texts, write_key, write_own_key
from lookback.spark.tables.schemas import ALERTS
from lookback.spark.tables.sqltexts import read_plain_name, write_plain_name

if TYPE_CHECKING:
    from pyspark.sql import Column, Row

    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables


_KEY, _EVALUATION, _DOCUMENT = "__key", "evaluation", "__document"
# The columns that identify the rule version that raised an alert, and the evaluation.
_VERSION = ("stream", _EVALUATION, "rule_id", "rule_version")
_COUNTED_ROWS = "alert_id string, event_id string"


def list_named_events() -> Column:
    """Returns a column with the ids of the events that an alert row names: the triggering event and its `evidence`."""
    return F.array_union(F.array("event_id"), F.coalesce("evidence", F.array().cast("array<string>")))


def find_counted_events(tables: Tables, streams: Mapping[str, Stream], alerts: DataFrame) -> DataFrame:
    """Finds all events behind alerts of windows and sequences, including those that `evidence` does not name.

    As for an explanation, the events of the alerts' keys are judged again by the rules of the evaluation that wrote the
    row, with a Spark task per key.

    Args:
        tables: The tables of the workspace.
        streams: The declared streams by name.
        alerts: Raised rows of the alerts table, of any stream and evaluation, at most one row per alert.

    Returns:
        The columns alert_id and event_id. An alert that cannot be reproduced, because its stream is not declared or its
        rule version is no longer known, has a single row with event_id NULL.
    """
    tables = tables.holding(*streams.values())
    alerts = tables.ask("numbered_alerts", {"alerts": alerts.select(*ALERTS.names)})
    versions = alerts.groupBy(*_VERSION).agg(
        F.min("arrival").alias("first"),
        F.max("arrival").alias("arrival"),
        F.unix_micros(F.max("decided_at")).alias("decided_at"),
    )
    found = alerts.limit(0).select("alert_id", "event_id")
    histories: dict[tuple[str, int], RuleHistory] = {}
    for row in versions.orderBy(*_VERSION).collect():
        own = alerts.where(reduce(and_, [F.col(name) == F.lit(row[name]) for name in _VERSION]))
        stream, evaluation = streams.get(row["stream"]), (row["stream"], row[_EVALUATION])
        if stream is not None and evaluation not in histories:
            histories[evaluation] = RuleHistory(tables, stream, streams, to_utc(row["decided_at"]))
        counted = None if stream is None else _find_of_version(tables, stream, histories[evaluation], row, own)
        if counted is None:
            counted = own.select("alert_id", F.lit(None).cast("string").alias("event_id"))
        found = found.unionByName(counted)
    return found


def _find_of_version(
    tables: Tables, stream: Stream, history: RuleHistory, version: Row, alerts: DataFrame
) -> DataFrame | None:
    """Finds the events behind the alerts of a rule version in one evaluation; None if the version is not known."""
    number, arrival = version["rule_version"], int(version["arrival"])
    try:
        documents = history.list_judged_documents(version["rule_id"], number, int(version["first"]), arrival)
    except ReviewError:
        return None
    if len(documents) == 1:
        return _find_by_key(tables, documents[0].rule, alerts, history, number, arrival, stream)
    is_left, found = F.lit(True), list[DataFrame]()
    for at, each in enumerate(documents):
        is_own = F.col("arrival").between(each.first, each.last) & _has_names_of(each.rule)
        counted = _find_by_key(tables, each.rule, alerts.where(is_own), history, number, each.last, stream)
        found.append(counted.withColumn(_DOCUMENT, F.lit(at)))
        is_left = is_left & ~is_own
    left = alerts.where(is_left).select("alert_id", F.lit(None).cast("string").alias("event_id"))
    counted = reduce(DataFrame.unionByName, found, left.withColumn(_DOCUMENT, F.lit(0)))
    # Of several documents, choose the first that reproduces the alert.
    of_alert = Window.partitionBy("alert_id")
    first = F.min(F.when(F.col("event_id").isNotNull(), F.col(_DOCUMENT))).over(of_alert)
    chosen = F.coalesce(first, F.min(_DOCUMENT).over(of_alert))
    return counted.withColumn("__chosen", chosen).where(F.col(_DOCUMENT) == F.col("__chosen")).select(*left.columns)


def _has_names_of(rule: CompiledRule) -> Column:
    """Returns the condition that a row of `alerts` has exactly the key fields and the measures of a rule."""

    def has_names(column: str, names: Iterable[str]) -> Column:
        expected = F.array(*map(F.lit, sorted(set(names)))).cast("array<string>")
        return F.array_sort(F.coalesce(F.map_keys(column), F.array().cast("array<string>"))) == expected

    return has_names("key", rule.key_names) & has_names("measures", [each.name for each in rule.measures])


def _find_by_key(
    tables: Tables,
    rule: CompiledRule,
    alerts: DataFrame,
    history: RuleHistory,
    version: int,
    arrival: int,
    stream: Stream,
) -> DataFrame:
    rule_id = rule.spec.rule_id
    feed = read_feed(tables, stream.name)
    version_row = {"rule_id": rule_id, "rule_version": version, "arrival": arrival}
    lanes, make = prepare_evidence(tables, feed, rule, version_row, history)
    columns = (
        "alert_id",
        "revision",
        "verdict",
        "rule_version",
        "event_id",
        "event_time",
        "window_start",
        "window_end",
        "measures",
        "evidence",
        "arrival",
        "key",
    )
    rows = alerts.select(*columns).withColumn("is_target", F.lit(True))
    # The versions whose alerts reset the key's windows, each with whether it waits for an absence.
    resetting: dict[int, bool] = {}
    if rule.spec.kind == SEQUENCE:
        reset_rows = tables.ask("first_rows", rule_id=rule_id, arrival=None, since=None, **history.term.values)
        for (number,) in reset_rows.select("rule_version").distinct().collect():
            other = history.find_kept(rule_id, number, arrival)
            if other is not None and other.spec.reset_on_alert and lanes.is_own(number):
                resetting[number] = other.sequence is not None and other.sequence.absent is not None
        resets = reset_rows.where(F.col("rule_version").isin(*resetting) & (F.col("stream") == stream.name))
        rows = rows.unionByName(resets.select(*columns).withColumn("is_target", F.lit(False)))
    key_of_alert = write_key(rule.key, {name: F.col("key")[F.lit(name)] for name in rule.key_names})
    keyed = rows.withColumn(_KEY, key_of_alert)
    # An event may have several keys if steps have their own.
    own_keys = [write_own_key(rule.key, fields) for fields in rule.keys]
    key_of_event = F.explode(F.array_distinct(F.array(*own_keys))) if own_keys[1:] else own_keys[0]
    changes = add_texts(feed, stream, rule.key).withColumn(_KEY, key_of_event)
    concerned = keyed.where("is_target").select(_KEY).distinct()
    changes = select_changes(tables, changes.join(F.broadcast(concerned), _KEY, "left_semi"), stream, "true", [_KEY])
    changes = changes.toDF(*map(write_plain_name, changes.columns))

    def count_key(alerts: pa.Table, changes: pa.Table) -> pa.Table:
        changes = changes.drop_columns([_KEY])
        changes = changes.rename_columns(list(map(read_plain_name, changes.column_names)))
        return _count_key(make, stream, resetting, alerts, changes)

    return keyed.groupBy(_KEY).cogroup(changes.groupBy(_KEY)).applyInArrow(count_key, _COUNTED_ROWS)


def _count_key(
    make: Callable[..., Evidence], stream: Stream, resetting: Mapping[int, bool], alerts: pa.Table, changes: pa.Table
) -> pa.Table:
    """Returns a row per event behind an alert of a key, or a row with NULL for an alert that cannot be reproduced."""
    rows = [{**row, "measures": dict(row["measures"] or [])} for row in alerts.to_pylist()]
    targets = [row for row in rows if row["is_target"]]
    names, ids = list[str](), list[str | None]()
    if targets:
        resets = [
            Reset.from_row(row, stream, resetting[row["rule_version"]])
            for row in rows
            if row["revision"] == 0 and row["rule_version"] in resetting and row["event_id"] is not None
        ]
        evidence = make(changes, resets=resets, key=dict(targets[0]["key"] or []))
        for alert, counted in zip(targets, find_counted(evidence, targets), strict=True):
            listed = [None] if counted is None else counted
            names += [alert["alert_id"]] * len(listed)
            ids += listed
    return pa.table({"alert_id": pa.array(names, pa.string()), "event_id": pa.array(ids, pa.string())})

"""Finds the rows of all tables that a privacy request deletes with the events, because they are about them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812

from lookback.core.errors import LookbackError
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.document import read_document
from lookback.core.rules.keys import KeyPart
from lookback.spark.explaining.counted import list_named_events
from lookback.spark.ingest.fields import RAW, REASON
from lookback.spark.ingest.rejected import RejectedRows
from lookback.spark.tables.sqltexts import nest_columns

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from lookback.core.rules.compiled import CompiledRule
    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables

# The columns that identify the rows to delete. Reviews come first, since they are found through their alerts.
KNOWN_BY = {
    "reviews": ("alert_id",),
    "alerts": ("alert_id",),
    "labels": ("stream", "event_id"),
    "snoozes": ("rule_id", "key"),
    "lists": ("list", "value"),
    "late_events": ("stream", "event_id"),
    "rule_log": ("stream", "action", "message"),
    "rejected_events": ("stream", "raw"),
}
# The actions of log rows that name an event or a key. A replay does not depend on them.
_NAMING = ("failed", "revisions_limited", "session_closed")


def read_rules(tables: Tables, stream: Stream) -> list[CompiledRule]:
    """Reads all versions of the rules of a stream, whatever became of them."""
    own = F.get_json_object("document", "$.stream") == F.lit(stream.name)
    rules = []
    for (document,) in tables.read("rules").where(own).select("document").distinct().collect():
        # A row written by hand may be invalid.
        with suppress(LookbackError):
            rules.append(compile_rule(read_document(document), stream))
    return rules


def list_key_parts(rules: Iterable[CompiledRule]) -> Iterator[KeyPart]:
    """Lists the entries of the keys of rules: each expression, and each field that a step uses for an entry."""
    for rule in rules:
        for fields in rule.keys:
            for part, column in zip(rule.key, fields, strict=True):
                if part.sql or part.name != column:
                    yield part if part.column == column else KeyPart(part.name, column, part.type, frozenset([column]))


@dataclass(frozen=True)
class Dependents:
    """The rows that are about the events of a request, or have a key or a value that only those events had.

    Attributes:
        tables: The tables.
        stream: The stream of the events.
        fields: The names of the fields that the request's condition reads, sorted.
        holds: The condition, over columns with these names.
        ids: The ids of the events as text, in the column event_id.
        own: The values that only these events had; see `find_own_values`.
        rules: All versions of the rules of the stream.
    """

    tables: Tables
    stream: Stream
    fields: Sequence[str]
    holds: Column
    ids: DataFrame
    own: DataFrame
    rules: Sequence[CompiledRule]

    def find(self) -> dict[str, DataFrame]:
        """Finds the rows to delete with the events, by table, as frames with the columns of KNOWN_BY."""
        alerts = self._find_alerts()
        events = self.ids.select(F.lit(self.stream.name).alias("stream"), "event_id")
        return {
            "reviews": alerts,
            "alerts": alerts,
            "labels": events,
            "snoozes": self._find_snoozes(),
            "lists": self._find_listed(),
            "late_events": events,
            "rule_log": self._find_log_rows(),
        }

    def _read_own(self, name: str) -> DataFrame:
        return self.tables.read(name).where(F.col("stream") == F.lit(self.stream.name))

    def _find_alerts(self) -> DataFrame:
        alerts = self._read_own("alerts")
        named = alerts.select("alert_id", F.explode(list_named_events()).alias("event_id"))
        by_event = named.join(self.ids, "event_id", "left_semi")
        # An alert is about its entities as it is about its key.
        parts = F.array_union(F.map_entries("key"), F.coalesce(F.map_entries("entities"), F.array()))
        about = alerts.withColumn("key", F.map_from_entries(parts))
        found = by_event.select("alert_id").union(self.select_by_key(about, F.col("alert_id")))
        if self.stream.is_of_alerts:
            events = self.tables.read_events(self.stream.name).where(self.holds)
            found = found.union(events.select("alert_id"))
        return found.distinct().localCheckpoint()

    def _find_snoozes(self) -> DataFrame:
        """Finds the snoozes with a matching key, of this stream's rules or of all rules."""
        rules = self.tables.read("rules").where(F.get_json_object("document", "$.stream") == F.lit(self.stream.name))
        snoozes = self.tables.read("snoozes")
        own = snoozes.join(rules.select("rule_id").distinct(), "rule_id", "left_semi")
        own = own.unionByName(snoozes.where("rule_id IS NULL"))
        return self.select_by_key(own, F.struct("rule_id", "key")).select("__known_by.*").localCheckpoint()

    def _find_listed(self) -> DataFrame:
        """Finds list values that satisfy the condition or that only the events had, if a rule looks them up."""
        rows, known_by = self.tables.read("lists"), F.struct("list", "value")
        found = rows.limit(0).select(known_by.alias("__known_by"))
        for field_, names in self._find_lists().items():
            listed = rows.where(F.col("list").isin(*names))
            if self.fields == [field_]:
                found = found.union(self._select_satisfying(listed, {field_: F.col("value")}, known_by))
            own = self.own.where(F.col("name") == F.lit(field_)).select(F.col("text").alias("value"))
            matching = listed.join(F.broadcast(own), "value", "left_semi")
            found = found.union(matching.select(known_by.alias("__known_by")))
        return found.select("__known_by.*").distinct().localCheckpoint()

    def _find_lists(self) -> dict[str, set[str]]:
        """Finds, by field, the lists in which any version of a rule of this stream looks up that field alone."""
        names: dict[str, set[str]] = {}
        for rule in self.rules:
            judged = () if rule.when is None else rule.when.memberships
            for each in (*rule.memberships, *judged):
                if len(each.text.named) == 1:
                    names.setdefault(next(iter(each.text.named)), set()).add(each.list_name)
        return names

    def select_by_key(self, rows: DataFrame, known_by: Column) -> DataFrame:
        """Selects `known_by` of the rows whose key satisfies the condition or has a value that only the events had.

        A key satisfies the condition only if it has every field that the condition reads.
        """
        has_fields = reduce(and_, [F.map_contains_key("key", F.lit(name)) for name in self.fields])
        texts = {name: F.col("key")[F.lit(name)] for name in self.fields}
        found = self._select_satisfying(rows.where(has_fields), texts, known_by)
        parts = rows.select(known_by.alias("__known_by"), F.explode("key").alias("name", "text"))
        return found.union(parts.join(F.broadcast(self.own), ["name", "text"], "left_semi").select("__known_by"))

    def _select_satisfying(self, rows: DataFrame, texts: Mapping[str, Column], known_by: Column) -> DataFrame:
        """Selects `known_by` of the rows that satisfy the condition; its fields are cast from `texts`."""
        types = self.stream.fields
        fields = nest_columns({name: text.try_cast(str(types[name])) for name, text in texts.items()})
        return rows.select(known_by.alias("__known_by"), *fields).where(self.holds).select("__known_by")

    def _find_log_rows(self) -> DataFrame:
        log = self._read_own("rule_log").where(F.col("action").isin(*_NAMING))
        patterns = ("(?s)the first is (.*)$", "(?s)^event (.*) enters the windows of ")
        found = (F.nullif(F.regexp_extract("message", pattern, 1), F.lit("")) for pattern in patterns)
        named = F.coalesce(*found)
        by_event = log.withColumn("event_id", named).join(self.ids, "event_id", "left_semi")
        # The message has the key as JSON: {"customer": "17", "shop": null}.
        text = F.regexp_extract("message", r"^the session of (\{.*\}) that began ", 1)
        keyed = log.where("action = 'session_closed'").withColumn("key", F.from_json(text, "map<string,string>"))
        by_key = self.select_by_key(keyed, F.col("message")).withColumnRenamed("__known_by", "message")
        stream = F.lit(self.stream.name).alias("stream")
        closed = by_key.select(stream, F.lit("session_closed").alias("action"), "message")
        return by_event.select(stream, "action", "message").union(closed).distinct().localCheckpoint()

    def find_rejected(self) -> tuple[DataFrame, int]:
        """Finds the rejected rows that satisfy the condition when read with the stream's current declaration.

        Returns:
            The rows, as a frame with the columns of KNOWN_BY, and the number of rows that cannot be read.
        """
        own = self._read_own("rejected_events")
        unreadable = own.where("raw is null").count()
        keys = own.limit(0).select("stream", "raw")
        for judged in RejectedRows(self.tables, self.stream).check_kept({}):
            unreadable += judged.where(F.col(REASON) == "malformed line").count()
            keys = keys.union(judged.where(self.holds).select(F.lit(self.stream.name), RAW))
        return keys.distinct().localCheckpoint(), unreadable

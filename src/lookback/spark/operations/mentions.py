"""Finds what a privacy request for one stream leaves in other streams of the place. It only names them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812

from lookback.core.values.texts import count_noun, join_words
from lookback.spark.tables.conflicts import SPARK_ERRORS

if TYPE_CHECKING:
    from pyspark.sql import Column

    from lookback.core.expressions.compiling import Expression
    from lookback.core.streams.declaration import Stream
    from lookback.spark.operations.dependents import Dependents
    from lookback.spark.tables.lakehouse import Tables


@dataclass(frozen=True)
class Mention:
    """What another stream still has of the values of a request.

    Attributes:
        stream: The stream; empty for snoozes of rules that are in no declared stream.
        where: The condition of the request.
        events: The number of its events that satisfy the condition; None if they cannot be searched.
        snoozes: The number of snoozes of its rules with a key that satisfies the condition.
    """

    stream: str
    where: str
    events: int | None
    snoozes: int

    def __str__(self) -> str:
        """Names what is left, and the command that deletes it."""
        if not self.stream:
            text = f"the table snoozes: {count_noun(self.snoozes, 'row')} of rules that are in no declared stream"
            return f"{text}; delete them there"
        counts = [count_noun(self.events, "event")] if self.events else []
        counts += [count_noun(self.snoozes, "snooze")] if self.snoozes else []
        counts += ["events that could not be searched"] if self.events is None else []
        return (
            f"{self.stream}: {join_words(counts)}; run lookback forget {self.stream} --where {shlex.quote(self.where)}"
        )


def find_mentions(
    tables: Tables, streams: Iterable[Stream], condition: Expression, holds: Column, dependents: Dependents
) -> list[Mention]:
    """Finds the streams, other than the request's, with events or snoozes that satisfy its condition.

    Only a stream that declares all fields of the condition, with the same types, can satisfy it. The stream `alerts` is
    left out, since its events are the alerts of the others.

    Args:
        tables: The tables of the place.
        streams: All declared streams.
        condition: The condition of the request.
        holds: The condition for Spark.
        dependents: The rows that the request deletes.
    """
    own, snoozes = dependents.stream, _count_snoozes(tables, dependents)
    found = []
    for stream in streams:
        if stream.name == own.name or stream.is_of_alerts:
            continue
        is_like = all(stream.fields.get(name) == own.fields[name] for name in condition.fields)
        events = _count_events(tables, stream, holds) if is_like else 0
        found.append(Mention(stream.name, condition.sql, events, snoozes.pop(stream.name, 0)))
    left = sum(number for name, number in snoozes.items() if name != own.name)
    return [each for each in (*found, Mention("", condition.sql, 0, left)) if each.events != 0 or each.snoozes]


def _count_events(tables: Tables, stream: Stream, holds: Column) -> int | None:
    held = tables.holding(stream)
    if not held.exists(stream.name):
        return 0
    try:
        return held.read_events(stream.name).where(holds).count()
    except SPARK_ERRORS:
        # For example a cast in the condition that fails on a value of this stream.
        return None


def _count_snoozes(tables: Tables, dependents: Dependents) -> dict[str, int]:
    """Counts the snoozes that mention a value of the request and that it does not delete, by stream of their rule."""
    snoozes = tables.read("snoozes").where("rule_id IS NOT NULL")
    # A key may satisfy the condition and also have a value that only the events had. Spark cannot compare maps.
    known_by = F.struct("rule_id", F.to_json(F.struct(*snoozes.columns)).alias("row"))
    mentioning = dependents.select_by_key(snoozes, known_by).distinct().select("__known_by.rule_id")
    stream = F.coalesce(F.get_json_object("document", "$.stream"), F.lit(""))
    rules = tables.read("rules").select("rule_id", stream.alias("stream")).distinct()
    own = rules.where(F.col("stream") == F.lit(dependents.stream.name)).select("rule_id")
    left = mentioning.join(own, "rule_id", "left_anti").join(rules, "rule_id", "left")
    return {row[0] or "": row[1] for row in left.groupBy("stream").count().collect()}

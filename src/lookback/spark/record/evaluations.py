"""Distinguishes the evaluations of a stream: each `evaluate --fresh` begins another one and keeps earlier outputs."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from lookback.core.values.times import parse_time
from lookback.spark.queries import functions as F  # noqa: N812
from lookback.spark.tables.lakehouse import to_timestamp

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables


@dataclass(frozen=True)
class Evaluations:
    """The evaluations of all streams. `begun` lists those begun by `--fresh`: stream and time in microseconds."""

    begun: Sequence[tuple[str, int]] = ()

    @classmethod
    def read(cls, tables: Tables) -> Evaluations:
        """Reads the evaluations from rule_log."""
        if not tables.may_have_rows("rule_log"):
            return cls()
        rows = tables.read("rule_log").where(F.col("action") == "begun_afresh")
        return cls([(row[0], row[1]) for row in rows.select("stream", F.unix_micros("logged_at")).collect()])

    def number(self, written_at: str = "decided_at") -> Column:
        """Returns the number of the evaluation that wrote a row: how many `--fresh` of its stream came before.

        Rows need a column `stream`, and the column `written_at` with the time at which they were written.
        """
        number = F.lit(0)
        for stream, time in self.begun:
            is_later = (F.col("stream") == F.lit(stream)) & (F.col(written_at) > to_timestamp(time))
            number = number + F.when(is_later, 1).otherwise(0)
        return number


class Term(NamedTuple):
    """The time of one evaluation of a stream, between two starts with `--fresh`; None means unbounded.

    Attributes:
        begun_at: When it began.
        ended_at: When the next one began.
        begun_after: The last commit of the events that appears in the outputs of earlier evaluations, if any.
    """

    begun_at: dt.datetime | None = None
    ended_at: dt.datetime | None = None
    begun_after: int | None = None

    @classmethod
    def find(cls, tables: Tables, stream: Stream, decided_at: dt.datetime | None = None) -> Term:
        """Finds the evaluation that wrote a row at `decided_at`; by default the last evaluation."""
        if not tables.may_have_rows("rule_log"):
            return cls()
        own = tables.read("rule_log").where((F.col("stream") == stream.name) & (F.col("action") == "begun_afresh"))
        is_before = F.lit(True) if decided_at is None else F.col("logged_at") < to_timestamp(parse_time(decided_at))
        rows = own.orderBy("logged_at").select("logged_at", "arrival", is_before.alias("is_before")).collect()
        begun = [(row["logged_at"], row["arrival"]) for row in rows if row["is_before"]]
        ended = [row["logged_at"] for row in rows if not row["is_before"]]
        begun_at, begun_after = begun[-1] if begun else (None, None)
        return cls(begun_at, ended[0] if ended else None, begun_after)

    def covers(self, written_at: dt.datetime) -> bool:
        """Returns whether the evaluation wrote a row at `written_at`, a time with a zone."""
        # Spark's rows contain local times without a zone.
        begun_at, ended_at = (None if each is None else each.astimezone(dt.timezone.utc) for each in self[:2])
        return (begun_at is None or begun_at < written_at) and (ended_at is None or written_at <= ended_at)

    def select(self, rows: DataFrame, column: str) -> DataFrame:
        """Selects the rows that the evaluation wrote. `column` has the time at which a row was written."""
        if self.begun_at is not None:
            rows = rows.where(F.col(column) > F.lit(self.begun_at))
        return rows if self.ended_at is None else rows.where(F.col(column) <= F.lit(self.ended_at))

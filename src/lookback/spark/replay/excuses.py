"""Finds the reasons why a row that only the table or only the replay has does not count as a difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812

from lookback.core.rules.changes import RuleChange
from lookback.core.rules.compiled import CompiledRule
from lookback.core.rules.roles import read_quarantined
from lookback.core.rules.rulelog import LogRow
from lookback.core.streams.alerts import REMOVED
from lookback.core.streams.declaration import Stream
from lookback.spark.record.record import Record
from lookback.spark.replay.history import History
from lookback.spark.replay.reach import LostLists, LostRules, Reach
from lookback.spark.stream.rebuild import find_deletions

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from lookback.spark.tables.lakehouse import Tables

# The columns of compared rows that say how many copies of the row the table has, and how many the replay.
RECORDED, REPLAYED = "recorded", "replayed"
_ROW_KEY = ("alert_id", "revision", "arrival")


@dataclass(frozen=True)
class Unreached:
    """The rows that cannot be proved because the history of events, rules or lists is gone.

    `rules` has all rules that are judged.
    """

    rules: Sequence[CompiledRule]
    lost: LostRules
    reach: Reach | None
    lists: LostLists

    def excuse(self, *, late: bool = False) -> Column:
        """Returns the condition of the alerts that cannot be proved, or with `late` that of late_events."""
        lost = self.lost.excuse(late=late) | self.lists.excuse(late=late)
        return lost if self.reach is None else lost | self.reach.excuse(self.rules, late=late)

    def describe(self, tables: Tables, stream: Stream) -> str:
        """Describes what cannot be proved, in sentences for the user; empty if nothing is gone."""
        events = [] if self.reach is None else [self.reach.describe(tables.identifier(stream.name), self.rules)]
        rules = [self.lost.describe(tables.identifier("rules"))] if self.lost.begins else []
        lists = [self.lists.describe(tables.identifier("lists"))] if self.lists.rules else []
        return ". ".join([*events, *rules, *lists])


@dataclass(frozen=True)
class Excuses:
    """The reasons why a row that only one side has does not count as a difference.

    Attributes:
        gone: The ids of deleted events.
        deleted: By table, the last arrival of the rows that retention deleted.
        broken: The quarantined versions.
        cut: The commits that were judged in pieces.
        unreached: Whether a row of `alerts` depends on events, rules or lists whose history is gone.
        late_unreached: The same for a row of `late_events`.
    """

    gone: DataFrame
    deleted: Mapping[str, int]
    broken: Sequence[str]
    cut: Sequence[int]
    unreached: Column
    late_unreached: Column

    @classmethod
    def find(cls, tables: Tables, stream: Stream, history: History, record: Record, unreached: Unreached) -> Excuses:
        """Finds the reasons in the tables and in what the stream obeyed."""
        logged = record.logged
        cut = {row.arrival for row in logged if row.action == "commit_cut" and row.arrival is not None}
        return cls(
            gone=_find_deleted_events(tables, stream, history),
            deleted=find_deletions(logged),
            broken=_find_broken(logged, record.changes),
            cut=sorted(cut),
            unreached=unreached.excuse(),
            late_unreached=unreached.excuse(late=True),
        )

    def select_unjudged(self, missing: Mapping[tuple[str, int], int]) -> dict[str, int]:
        """Sums up the missing events by rule; `missing` has them by rule_id and version."""
        found = Counter[str]()
        for (rule_id, version), number in missing.items():
            if f"{rule_id} {version}" not in self.broken:
                found[rule_id] += number
        return found

    def mark_alerts(self, rows: DataFrame) -> DataFrame:
        """Marks, as `is_excused`, the alerts whose difference is explained."""
        is_broken = F.concat_ws(" ", "rule_id", "rule_version").isin(list(self.broken)) if self.broken else F.lit(False)
        is_redacted = F.contains("message", F.lit(REMOVED)) & (F.col(RECORDED) > 0)
        redacted = rows.where(is_redacted).select(*(F.col(each).alias(f"_{each}") for each in _ROW_KEY)).distinct()
        same = reduce(and_, [F.col(each) == F.col(f"_{each}") for each in _ROW_KEY])
        rows = rows.join(F.broadcast(redacted), same, "left")
        others = self.unreached | is_broken | F.col("_alert_id").isNotNull()
        return self._mark(rows, self.deleted["alerts"], others).drop(*redacted.columns)

    def mark_late(self, rows: DataFrame, begun_after: int | None) -> DataFrame:
        """Marks, as `is_excused`, the late events whose difference is explained. For begun_after see `Term`."""
        is_older = F.lit(False)
        if begun_after is not None:
            # late_events does not record when a row was written.
            is_older = (F.col(RECORDED) > F.col(REPLAYED)) & (F.col("arrival") <= begun_after)
        return self._mark(rows, self.deleted["late_events"], self.late_unreached | is_older)

    def _mark(self, rows: DataFrame, deleted_through: int, others: Column) -> DataFrame:
        marked = rows.join(F.broadcast(self.gone), F.col("event_id") == F.col("_deleted_id"), "left")
        by_retention = (F.col(RECORDED) == 0) & (F.col("arrival") <= deleted_through)
        is_deleted = F.col("_deleted_id").isNotNull()
        excused = is_deleted | by_retention | F.col("arrival").isin(list(self.cut)) | others
        return marked.withColumn("is_excused", excused).drop("_deleted_id")


def _find_deleted_events(tables: Tables, stream: Stream, history: History) -> DataFrame:
    """Finds the ids of all deleted events, including those deleted after the compared commits."""
    changes = tables.read_changes(stream.name, history.first, tables.version(stream.name))
    deleted = changes.where(F.col("_change_type") == "delete")
    return deleted.select(F.col(stream.event_id).cast("string").alias("_deleted_id")).distinct()


def _find_broken(logged: Iterable[LogRow], changes: Iterable[RuleChange]) -> list[str]:
    """Lists the quarantined versions as `rule_id version`. At which event each shard stopped is unknown."""
    named = {(row.rule_id, row.version): read_quarantined(row.evidence) for row in changes}
    rows = [row for row in logged if row.action == "quarantined" and row.version]
    return [f"{row.rule_id} {named.get((row.rule_id, row.version)) or (row.version or 0) - 1}" for row in rows]

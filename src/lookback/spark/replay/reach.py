"""Finds what a replay can still prove if the first events, rules or lists are gone.

From some commit on, the replay must match the stream again, except for rules whose alerts depend on earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from pyspark.sql import functions as F  # noqa: N812

from lookback.core.engine.schedule import WaitingChange
from lookback.core.rules.commands import LIST_CHANGED
from lookback.core.rules.compiled import CompiledRule
from lookback.core.rules.rulelog import LogRow
from lookback.core.rules.versions import WITH_STATE
from lookback.core.streams.arrival import arrival_number
from lookback.core.streams.blocks import COMMIT
from lookback.core.streams.declarations import Declarations
from lookback.core.streams.unions import MEMBER
from lookback.core.streams.watermarks import Mark, Reached, find_highest, merge_mark, pass_marks
from lookback.core.values.windows import SESSION
from lookback.spark.stream.rebuild import find_mark_before

if TYPE_CHECKING:
    from pyspark.sql import Column

    from lookback.spark.replay.history import History
    from lookback.spark.tables.lakehouse import Tables


@dataclass(frozen=True)
class Reach:
    """The limits of a proof whose first events are gone.

    Attributes:
        begins: The first commit that the proof reads.
        high: The mark of all events before that commit.
        exact_from: The first commit at which windows hold only events after `high`; None if no commit is that far yet.
    """

    begins: int
    high: Mark
    exact_from: int | None = None

    @classmethod
    def find(cls, tables: Tables, history: History) -> Reach | None:
        """Finds the limits of a proof that reads this history; None if no earlier events are gone."""
        high = find_mark_before(tables, history.stream, history.first) if history.first else None
        return None if high is None else cls(history.first, high)

    def follow(
        self, tables: Tables, history: History, declarations: Declarations, rules: Iterable[CompiledRule]
    ) -> Reach:
        """Returns these limits with `exact_from` set, if the history reaches that commit."""
        if self.exact_from is not None:
            return self
        stream = history.stream
        time, committed = F.unix_micros(stream.event_time), F.unix_micros("_commit_timestamp")
        inserted = (F.col("_change_type") == "insert") & (time - F.lit(declarations.least_future) <= committed)
        member = F.lit(None).cast("string") if stream.union is None else F.col(MEMBER)
        rows = history.read_changes(tables).where(inserted).groupBy(COMMIT, member.alias("_member"))
        marks: dict[int, Mark | None] = {}
        for commit, name, high in rows.agg(F.max(time)).orderBy(COMMIT).collect():
            marks[commit] = merge_mark(marks.get(commit), high if name is None else {name: high})
        # Until the watermark has passed all earlier events, it may be another one than in the stream.
        wanted = (find_highest(self.high) or 0) + max(map(_find_width, rules), default=0)
        before = Reached.by(self.high)
        passed = [pass_marks(each.stream, before, marks.values()).watermarks for each in declarations.listed]
        is_reached = np.minimum.reduce(passed) > wanted
        after = next((commit for commit, reached in zip(marks, is_reached, strict=True) if reached), None)
        return self if after is None else Reach(self.begins, self.high, after + 1)

    def excuse(self, rules: Iterable[CompiledRule], *, late: bool = False) -> Column:
        """Returns the condition of the unprovable alerts, or with `late` that of late_events.

        Late events are unprovable as long as there are session rules, since open sessions may take them.
        """
        chained = [rule.spec for rule in rules if _is_chained(rule)]
        if self.exact_from is None or (late and any(spec.kind == SESSION for spec in chained)):
            return F.lit(True)
        early = F.col("arrival") < self.exact_from
        return early if late else early | F.col("rule_id").isin(sorted({spec.rule_id for spec in chained}))

    def describe(self, name: str, rules: Iterable[CompiledRule]) -> str:
        """Describes in a sentence what cannot be proved; `name` is the name of the events table."""
        text = f"the change feed of {name} begins at commit {self.begins}, and windows hold events from before it"
        if self.exact_from is None:
            return f"{text} up to the last commit: no row can be proved to differ yet"
        chained = sorted({rule.spec.rule_id for rule in rules if _is_chained(rule)})
        text = f"{text} up to commit {self.exact_from - 1}: rows of these commits cannot be proved to differ"
        return f"{text}, nor those of {', '.join(chained)}, whose alerts depend on earlier ones" if chained else text


@dataclass(frozen=True)
class LostRules:
    """The rules with unknown versions, because the first commits of the rules table are gone.

    Attributes:
        begins: The first commit that can be read; 0 if all can.
        unknown: The ids of the rules with unknown versions; `*` stands for commands.
        beside: Rules that came into force after one of the unknown versions and may share its state.
    """

    begins: int = 0
    unknown: frozenset[str] = frozenset()
    beside: frozenset[str] = frozenset()

    @classmethod
    def find(
        cls, begins: int, unknown: frozenset[str], logged: Iterable[LogRow], waiting: Iterable[WaitingChange]
    ) -> LostRules:
        """Finds the rules that cannot be proved; `waiting` has the rule changes that take effect after a commit."""
        began = (arrival_number(row.arrival) for row in logged if row.rule_id in unknown and row.action != "rejected")
        since = min(began, default=None)
        later = [each.change for each in waiting if since is not None and each.after > since]
        beside = {str(each.rule_id) for each in later if each.status in WITH_STATE} - unknown
        return cls(begins, unknown, frozenset(beside))

    def excuse(self, *, late: bool = False) -> Column:
        """Returns the condition of the unprovable alerts, or with `late` of late_events, which name no rule."""
        if late or "*" in self.unknown:
            return F.lit(bool(self.unknown))
        return F.col("rule_id").isin(sorted(self.unknown | self.beside))

    def describe(self, name: str) -> str:
        """Describes in a sentence what cannot be proved; `name` is the name of the rules table."""
        text = (
            f"the change feed of {name} begins at commit {self.begins}: earlier versions are read from the table's "
            "current rows"
        )
        if not self.unknown:
            return text
        if "*" in self.unknown:
            return f"{text}, and some commands are missing: no row can be proved to differ"
        text += (
            f". Some versions of {', '.join(sorted(self.unknown))} are missing: their rows cannot be proved to differ"
        )
        beside = f"those of {', '.join(sorted(self.beside))}, which came into force later, " if self.beside else ""
        return f"{text}, nor {beside}{'nor ' if beside else ''}those of late_events"


@dataclass(frozen=True)
class LostLists:
    """The rules that name lists, if the first commits of the table of lists are gone.

    Attributes:
        begins: The first commit of the table that can be read; 0 if none is lost.
        rules: The ids of the rules.
    """

    begins: int = 0
    rules: frozenset[str] = frozenset()

    @classmethod
    def find(cls, begins: int, logged: Iterable[LogRow], rules: Iterable[CompiledRule]) -> LostLists:
        """Finds the rules that were judged by lists from before `begins`, according to the rows of rule_log."""
        # The lists as of the commit right before `begins` are known.
        lost = [row for row in logged if row.action == LIST_CHANGED and (row.version or 0) < begins - 1]
        return cls(begins, frozenset(rule.spec.rule_id for rule in rules if rule.lists)) if lost else cls()

    def excuse(self, *, late: bool = False) -> Column:
        """Returns the condition of the unprovable alerts, or with `late` of late_events, which name no rule."""
        return F.lit(bool(self.rules)) if late else F.col("rule_id").isin(sorted(self.rules))

    def describe(self, name: str) -> str:
        """Describes in a sentence what cannot be proved; `name` is the name of the table of lists."""
        return (
            f"the change feed of {name} begins at commit {self.begins}: rows of {', '.join(sorted(self.rules))}, which "
            "look up values there, cannot be proved to differ, nor those of late_events"
        )


def _find_width(rule: CompiledRule) -> int:
    """Returns how far below the watermark a rule may keep rows, in microseconds."""
    absent = None if rule.sequence is None else rule.sequence.absent
    wait = 0 if absent is None else absent.step.within or 0
    return max(rule.needs.values(), default=0) + wait + rule.allowed_lateness


def _is_chained(rule: CompiledRule) -> bool:
    """Returns whether a rule's alerts may depend on any of its earlier ones."""
    spec = rule.spec
    return (
        spec.suppress is not None
        or spec.reset_on_alert
        or spec.kind == SESSION
        or (spec.sequence is not None and spec.sequence.expiry == "fixed")
    )

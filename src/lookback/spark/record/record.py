"""Finds what an evaluation of a stream obeyed, and when, from the tables `rules` and `rule_log`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lookback.core.engine.schedule import Schedule, Seed, restore_changes
from lookback.core.rules.changes import RuleChange, order_changes
from lookback.core.rules.rulelog import LogRow
from lookback.core.streams.declarations import Declarations
from lookback.spark.batches.dispatch import select_rule_changes
from lookback.spark.record.evaluations import Term
from lookback.spark.record.log import list_declarations, read_log
from lookback.spark.tables.history import find_first_readable

if TYPE_CHECKING:
    from pyspark.sql import Row

    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables


@dataclass(frozen=True)
class Record:
    """What an evaluation of a stream obeyed, and when.

    Attributes:
        term: The evaluation.
        logged: Its rows of rule_log, in the order in which they took effect, without messages.
        declarations: The declarations by which it judged.
        begins: The first commit of the rules table that can be read; 0 if all can.
        changes: The changes of the rules table, in order. Those of lost commits are restored from its rows.
    """

    term: Term
    logged: Sequence[LogRow]
    declarations: Declarations
    begins: int
    changes: Sequence[RuleChange]

    @classmethod
    def read(cls, tables: Tables, stream: Stream, term: Term) -> Record:
        """Reads the record of an evaluation."""
        logged, begins = read_log(tables, stream, term), find_first_readable(tables, "rules")
        rows = select_rule_changes(tables.read_changes("rules", begins)).collect()
        lost = restore_changes(_read_rules_before(tables, begins), logged, begins) if begins else []
        changes = order_changes([*lost, *(RuleChange(**row.asDict()) for row in rows)])
        return cls(term, logged, list_declarations(stream, logged), begins, changes)

    def make_schedule(self, through: int | None = None, seed: Seed | None = None) -> Schedule:
        """Makes the schedule by which all changes took effect; for the arguments see `Schedule`."""
        return Schedule.from_log(self.changes, self.logged, through, self.declarations, seed)


def _read_rules_before(tables: Tables, start: int) -> list[RuleChange]:
    """Returns the rows of the rules table before the commit `start`: the current rows with later changes undone."""
    last = tables.version("rules")
    now = select_rule_changes(tables.read_as_inserts("rules", last, 0))
    rows = Counter(_drop_place(row) for row in now.collect())
    for row in select_rule_changes(tables.read_changes("rules", start, last)).collect():
        rows[_drop_place(row)] += -1 if row["change"] in ("insert", "update") else 1
    return list((+rows).elements())


def _drop_place(row: Row) -> RuleChange:
    return RuleChange(**{**row.asDict(), "change": "", "commit": 0})

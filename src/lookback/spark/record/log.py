"""Reads what an evaluation of a stream wrote to rule_log, in the order in which it took effect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lookback.core.rules.rulelog import LogRow
from lookback.core.streams.declarations import Declarations

if TYPE_CHECKING:
    from pyspark.sql import Row

    from lookback.core.streams.declaration import Stream
    from lookback.spark.record.evaluations import Term
    from lookback.spark.tables.lakehouse import Tables

DECLARED = "declared"


def read_rows(tables: Tables, stream: Stream, term: Term) -> list[Row]:
    """Reads the rows of an evaluation, without messages."""
    if not tables.may_have_rows("rule_log"):
        return []
    return tables.ask("logged_rows", stream=stream.name, **term.values).collect()


def read_log(tables: Tables, stream: Stream, term: Term) -> list[LogRow]:
    """Reads the rows of an evaluation, without messages."""
    names = ("stream", "rule_id", "version", "action", "arrival", "rules_commit", "decision")
    return [LogRow(message="", **{name: row[name] for name in names}) for row in read_rows(tables, stream, term)]


def list_declarations(stream: Stream, logged: list[LogRow]) -> Declarations:
    """Lists the declarations by which a stream was evaluated. Without rows in the log this is the current one."""
    rows = ((row.arrival, str(row.decision)) for row in logged if row.action == DECLARED)
    return Declarations.from_rows(stream, rows)

"""Reads what an evaluation of a stream wrote to rule_log, in the order in which it took effect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lookback.core.rules.rulebook import LogRow
from lookback.core.streams.declarations import Declarations
from lookback.spark.queries import functions as F  # noqa: N812

if TYPE_CHECKING:
    from pyspark.sql import Row

    from lookback.core.streams.declaration import Stream
    from lookback.spark.record.evaluations import Term
    from lookback.spark.tables.lakehouse import Tables

DECLARED = "declared"


def read_rows(tables: Tables, stream: Stream, term: Term, *actions: str) -> list[Row]:
    """Reads the rows of an evaluation, without messages; all of them, or those with one of some actions."""
    if not tables.may_have_rows("rule_log"):
        return []
    own = term.select(tables.read("rule_log").where(F.col("stream") == stream.name), "logged_at")
    own = own.where(F.col("action").isin(*actions)) if actions else own
    in_order = (F.col(name).asc_nulls_first() for name in ("arrival", "rules_commit", "logged_at", "position"))
    names = ("stream", "rule_id", "version", "action", "arrival", "rules_commit", "decision", "logged_at")
    return own.orderBy(*in_order).select(*names).collect()


def read_log(tables: Tables, stream: Stream, term: Term) -> list[LogRow]:
    """Reads the rows of an evaluation, without messages."""
    return [
        LogRow(
            row["stream"], row["rule_id"], row["version"], row["action"], "", row["arrival"], row["rules_commit"],
            row["decision"],
        )
        for row in read_rows(tables, stream, term)
    ]  # fmt: skip


def list_declarations(stream: Stream, logged: list[LogRow]) -> Declarations:
    """Lists the declarations by which a stream was evaluated. Without rows in the log this is the current one."""
    rows = ((row.arrival, str(row.decision)) for row in logged if row.action == DECLARED)
    return Declarations.from_rows(stream, rows)

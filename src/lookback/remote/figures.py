"""Reads the figures of a stream's health from a workspace's tables, over a SQL warehouse."""

from __future__ import annotations

import datetime as dt
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from databricks.sdk.service.sql import (
    Disposition,
    ExecuteStatementRequestOnWaitTimeout,
    Format,
    ResultData,
    StatementParameterListItem,
    StatementResponse,
    StatementState,
)

from lookback.core.errors import LookbackError, RemoteError, SetupError
from lookback.core.operations.backlog import Commit, measure_backlog
from lookback.core.operations.figures import Figures
from lookback.core.operations.health import check_health, describe_health, is_healthy
from lookback.core.operations.thresholds import RECENT
from lookback.core.rules.document import read_document
from lookback.core.rules.roles import find_roles
from lookback.core.values.texts import collapse_spaces
from lookback.core.values.times import parse_time
from lookback.questions import write_question
from lookback.questions.health import HealthQuestions
from lookback.remote.workspace import RemoteWorkspace, explain_errors

Row = Mapping[str, "str | None"]
# Runs a query. The values of its rows are texts, as in the statement execution API.
Execute = Callable[["Query"], Sequence[Row]]


class Query(NamedTuple):
    """An SQL text and the values of its :markers."""

    text: str
    values: Mapping[str, str | None]


@dataclass(frozen=True)
class StreamTables:
    """The tables of a stream. `quote` returns the name of a table for SQL."""

    stream: str
    quote: Callable[[str], str]

    @classmethod
    def in_schema(cls, catalog: str, schema: str, stream: str) -> StreamTables:
        """Returns the tables in a schema of Unity Catalog."""
        return cls(stream, lambda table: ".".join(f"`{part.replace('`', '``')}`" for part in (catalog, schema, table)))


def read_figures(tables: StreamTables, execute: Execute, now: dt.datetime) -> Figures:
    """Returns the figures of a stream at the aware time `now`, as `lookback status` does for local tables.

    The last judged commit comes from `metrics`, or without a row there from the last alert, as the checkpoint is not
    read.
    """

    def ask(question: str, **values: object) -> Sequence[Row]:
        written: dict[str, str | None] = {}

        def write_value(name: str) -> str:
            value = values[name]
            if isinstance(value, dt.datetime):
                return f"timestamp_micros({parse_time(value)})"
            written[name] = None if value is None else str(value)
            return f":{name}"

        return execute(Query(write_question(question, tables.quote, write_value), written))

    return HealthQuestions(ask, tables.stream, now).read_figures(
        lambda: _read_statuses(tables.stream, ask("rule_statuses", stream=tables.stream, rule_id=None)),
        lambda judged: measure_backlog(lambda limit: _read_history(tables, execute, limit), judged),
        lambda: _count_ingested(tables, execute, now),
    )


def _read_statuses(stream: str, rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Returns rule_id and status of the current versions of a stream's rules; a rule may have one in each role."""
    by_rule: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_rule.setdefault(str(row["rule_id"]), []).append({**row, "version": int(row["version"] or 0)})
    return [
        (rule_id, str(row["status"]))
        for rule_id, versions in by_rule.items()
        for row in find_roles(versions).listed
        if _is_of(stream, row["document"])
    ]


def _is_of(stream: str, document: str | None) -> bool:
    """Returns whether a document belongs to a stream."""
    try:
        return bool(read_document(document).get("stream") == stream)
    except LookbackError:
        return False


def _read_history(tables: StreamTables, execute: Execute, limit: int) -> list[Commit]:
    """Returns the newest commits of the events table."""
    rows = execute(Query(f"DESCRIBE HISTORY {tables.quote(tables.stream)} LIMIT {limit}", {}))
    return [
        Commit(
            version=int(row["version"] or 0),
            at=_parse_time(str(row["timestamp"])),
            operation=row["operation"] or "",
            figures=json.loads(row["operationMetrics"] or "{}") or {},
        )
        for row in rows
    ]


def _count_ingested(tables: StreamTables, execute: Execute, now: dt.datetime) -> int:
    """Counts the rows that ingest accepted in the last hour."""
    since = f"timestamp_micros({parse_time(now - RECENT)})"
    table = tables.quote(tables.stream)
    (row,) = execute(Query(f"SELECT count(*) AS counted FROM {table} WHERE ingested_at >= {since}", {}))
    return int(row["counted"] or 0)


def describe_stream(tables: StreamTables, execute: Execute, now: dt.datetime) -> dict[str, Any]:
    """Returns the figures of a stream and whether it is healthy, by the names of `lookback status`."""
    figures = read_figures(tables, execute, now)
    findings = check_health(figures)
    return {
        "stream": figures.stream,
        "commits": figures.committed,
        "judged": figures.judged,
        "lag_commits": figures.waiting,
        "lag_seconds": round(figures.lag, 3),
        "rules": figures.rules,
        "healthy": is_healthy(findings),
        "health": describe_health(figures, findings),
        "findings": [asdict(finding) for finding in findings],
    }


def prepare_queries(
    workspace: RemoteWorkspace,
    warehouse_id: str,
    *,
    seconds: float = 600.0,
    sleep: Callable[[float], None] = time.sleep,
) -> Execute:
    """Returns a function that runs queries on an SQL warehouse, starts it if needed, and cancels after `seconds`."""

    def execute(query: Query) -> Sequence[Row]:
        api = workspace.client.statement_execution
        values = [StatementParameterListItem(name=name, value=value) for name, value in query.values.items()]
        until = time.monotonic() + seconds
        with explain_errors(workspace.host, f"a query on SQL warehouse {warehouse_id}"):
            # The wait is shorter than the timeout of a request.
            answer = api.execute_statement(
                query.text,
                warehouse_id,
                parameters=values,
                wait_timeout="5s",
                format=Format.JSON_ARRAY,
                disposition=Disposition.INLINE,
                on_wait_timeout=ExecuteStatementRequestOnWaitTimeout.CONTINUE,
            )
            while _get_state(answer) in (StatementState.PENDING, StatementState.RUNNING):
                assert answer.statement_id is not None
                if time.monotonic() >= until:
                    api.cancel_execution(answer.statement_id)
                    break
                sleep(1.0)
                answer = api.get_statement(answer.statement_id)
            if _get_state(answer) != StatementState.SUCCEEDED:
                raise RemoteError(
                    f"{workspace.host}: SQL warehouse {warehouse_id}: {_explain_failure(answer, seconds)}"
                )
            return _collect_rows(workspace, answer)

    return execute


def _collect_rows(workspace: RemoteWorkspace, answer: StatementResponse) -> list[Row]:
    """Returns the rows of an answer, which may have several chunks."""
    schema = answer.manifest.schema if answer.manifest else None
    names = [column.name or "" for column in (schema.columns if schema else None) or []]
    chunk: ResultData | None = answer.result
    rows: list[Row] = []
    while chunk is not None:
        rows += [dict(zip(names, values, strict=True)) for values in chunk.data_array or []]
        index = chunk.next_chunk_index
        api = workspace.client.statement_execution
        chunk = api.get_statement_result_chunk_n(str(answer.statement_id), index) if index else None
    return rows


def _get_state(answer: StatementResponse) -> StatementState | None:
    return answer.status.state if answer.status else None


def _explain_failure(answer: StatementResponse, seconds: float) -> str:
    state = _get_state(answer)
    if state in (StatementState.PENDING, StatementState.RUNNING):
        return f"no answer to a query within {seconds:,.0f} seconds; it was cancelled. Can the warehouse start?"
    error = answer.status.error if answer.status else None
    text = collapse_spaces((error and error.message) or str(state))[:300]
    if "TABLE_OR_VIEW_NOT_FOUND" in text or "DELTA_MISSING_DELTA_TABLE" in text:
        return f"a table is missing, which the first run of ingest or evaluate creates ({text})"
    if "INSUFFICIENT_PERMISSIONS" in text or "PERMISSION_DENIED" in text:
        return f"you may not read a table: ask for USE CATALOG, USE SCHEMA and SELECT ({text})"
    return f"a query failed ({text})"


def _parse_time(text: str) -> dt.datetime:
    """Parses a time such as 2026-03-01T10:00:00.000Z; without a zone it is UTC."""
    try:
        found = dt.datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        raise SetupError(f"the history has a time that cannot be read: {text!r:.50}") from None
    return found if found.tzinfo else found.replace(tzinfo=dt.timezone.utc)

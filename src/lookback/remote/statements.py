"""Runs queries on a SQL warehouse of a Databricks workspace."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from databricks.sdk.service.sql import (
    Disposition,
    ExecuteStatementRequestOnWaitTimeout,
    Format,
    ResultData,
    StatementParameterListItem,
    StatementResponse,
    StatementState,
)

from lookback.core.errors import RemoteError
from lookback.core.values.texts import collapse_spaces
from lookback.questions import Execute, Query
from lookback.remote.workspace import RemoteWorkspace, explain_errors

Row = Mapping[str, "str | None"]


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
        return f"you may not read or change a table: ask for USE CATALOG, USE SCHEMA and SELECT, and to change it MODIFY ({text})"
    return f"a query failed ({text})"

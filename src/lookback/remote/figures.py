"""Reads the figures of a stream's health from a workspace's tables, over a SQL warehouse."""

from __future__ import annotations

import datetime as dt
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
from lookback.core.operations.health import RECENT, Figures, Sample, check_health, describe_health, is_healthy
from lookback.core.rules.document import read_document
from lookback.core.rules.roles import find_roles
from lookback.core.rules.rulebook import ACTIONS
from lookback.core.rules.versions import EVALUATED
from lookback.core.streams.metrics import RuleCounts
from lookback.core.values.texts import collapse_spaces
from lookback.core.values.times import parse_time, to_utc
from lookback.remote.workspace import RemoteWorkspace, explain_errors

Row = Mapping[str, "str | None"]
# Runs a query. The values of its rows are texts, as in the statement execution API.
Execute = Callable[["Query"], Sequence[Row]]
# The maximum length of a log message.
_MAX_CHARACTERS = 200
# The actions of rule_log that record the outcome of a row of the rules table.
_DECISIONS = ", ".join(f"'{action}'" for action in ("rejected", *ACTIONS.values()))


class Query(NamedTuple):
    """An SQL text and the values of its :markers."""

    text: str
    values: Mapping[str, str]


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

    The last judged commit comes from `metrics`, as the checkpoint is not read.
    """
    reader = _Reader(tables, execute, str(parse_time(now - RECENT)))
    samples, last = reader.read_samples()
    rules = reader.read_statuses()
    judged = reader.read_judged(last)
    waiting = measure_backlog(reader.read_history, judged)
    rejected, reason = reader.count_rejected()
    failing, refused = reader.read_log(now)
    return Figures(
        tables.stream, now,
        rules=sum(1 for _, status in rules if status in EVALUATED),
        quarantined=[rule_id for rule_id, status in rules if status == "quarantined"],
        committed=waiting.committed, judged=judged, waiting=waiting.waiting, lag=waiting.seconds(now),
        newest=waiting.newest, samples=samples, last_sample=None if last is None else _parse_micros(last["at_us"]),
        failing=failing, refused=refused, rejected=rejected, reason=reason,
        ingested=reader.count_ingested() if rejected else 0,
    )  # fmt: skip


@dataclass(frozen=True)
class _Reader:
    """Runs the queries of a stream. Rows count as recent from the time `since`, in microseconds."""

    tables: StreamTables
    execute: Execute
    since: str
    _since: str = field(default="timestamp_micros(cast(:since AS bigint))", init=False)

    def read_samples(self) -> tuple[list[Sample], Row | None]:
        """Returns the rows of `metrics` in the last hour, oldest first, and the last row ever."""
        table = self.tables.quote("metrics")
        rows = self._query(
            f"SELECT unix_micros(measured_at) AS at_us, measured_at >= {self._since} AS recent, events, late, discarded, "
            "lag_seconds, unix_micros(watermark) AS watermark, state_rows, run_ms, evaluate_ms, write_ms, "
            f"to_json(by_rule) AS by_rule, judged FROM {table} WHERE stream = :stream AND (measured_at >= {self._since} "
            f"OR measured_at = (SELECT max(measured_at) FROM {table} WHERE stream = :stream)) ORDER BY measured_at",
            stream=self.tables.stream, since=self.since,
        )  # fmt: skip
        return [_parse_sample(row) for row in rows if row["recent"] == "true"], rows[-1] if rows else None

    def read_statuses(self) -> list[tuple[str, str]]:
        """Returns rule_id and status of the current versions of the stream's rules; a rule may have one in each role.

        Versions that the stream rejected and never applied are left out.
        """
        # Reads the documents of some versions only.
        rows = self._query(
            "WITH refused AS (SELECT rule_id, version FROM (SELECT rule_id, version, bool_and(action = 'rejected') AS is_refused "
            f"FROM {self.tables.quote('rule_log')} WHERE stream = :stream AND action IN ({_DECISIONS}) GROUP BY rule_id, version) "
            "WHERE is_refused) SELECT rule_id, version, status, named AS evidence, CASE WHEN row_number() OVER (PARTITION BY rule_id, status, "
            "named ORDER BY coalesce(version, 0) DESC) = 1 THEN document END AS document FROM (SELECT rule_id, version, "
            "status, document, CASE WHEN status = 'quarantined' THEN evidence END "
            f"AS named FROM {self.tables.quote('rules')} LEFT ANTI JOIN refused USING (rule_id, version) WHERE rule_id <> '*') "
            "ORDER BY rule_id, version",
            stream=self.tables.stream,
        )
        by_rule: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            by_rule.setdefault(str(row["rule_id"]), []).append({**row, "version": int(row["version"] or 0)})
        return [
            (rule_id, str(row["status"]))
            for rule_id, versions in by_rule.items()
            for row in find_roles(versions).listed
            if self._is_own(row["document"])
        ]

    def _is_own(self, document: str | None) -> bool:
        """Returns whether a document belongs to the stream."""
        try:
            return bool(read_document(document).get("stream") == self.tables.stream)
        except LookbackError:
            return False

    def read_judged(self, last: Row | None) -> int | None:
        """Returns the last judged commit from the last row of `metrics`; without one, the last that raised an alert."""
        if last is not None and last["judged"] is not None:
            return int(last["judged"])
        rows = self._query(
            f"SELECT max(arrival) AS arrival FROM {self.tables.quote('alerts')} WHERE stream = :stream",
            stream=self.tables.stream,
        )
        return None if rows[0]["arrival"] is None else int(rows[0]["arrival"])

    def read_history(self, limit: int) -> list[Commit]:
        """Returns the newest commits of the events table."""
        rows = self._query(f"DESCRIBE HISTORY {self.tables.quote(self.tables.stream)} LIMIT {limit}")
        return [
            Commit(
                int(row["version"] or 0), _parse_time(str(row["timestamp"])), row["operation"] or "",
                json.loads(row["operationMetrics"] or "{}") or {},
            )
            for row in rows
        ]  # fmt: skip

    def count_rejected(self) -> tuple[int, str]:
        """Counts the rows that ingest rejected in the last hour, and returns the reason of the newest."""
        rows = self._query(
            "SELECT count(*) AS counted, max_by(reason, ingested_at) AS reason "
            f"FROM {self.tables.quote('rejected_events')} WHERE stream = :stream AND ingested_at >= {self._since}",
            stream=self.tables.stream, since=self.since,
        )  # fmt: skip
        return int(rows[0]["counted"] or 0), (rows[0]["reason"] or "")[:_MAX_CHARACTERS]

    def count_ingested(self) -> int:
        """Counts the rows that ingest accepted in the last hour."""
        rows = self._query(
            f"SELECT count(*) AS counted FROM {self.tables.quote(self.tables.stream)} WHERE ingested_at >= {self._since}",
            since=self.since,
        )
        return int(rows[0]["counted"] or 0)

    def read_log(self, now: dt.datetime) -> tuple[dict[str, str], dict[str, str]]:
        """Maps rules that failed in the last hour, and rules whose last version was rejected, to the log's message."""
        rows = self._query(
            "SELECT rule_id, has_failed, newest.action AS action, newest.message AS message, at_us FROM ("
            "SELECT rule_id, action = 'failed' AS has_failed, unix_micros(max(logged_at)) AS at_us, "
            "max_by(struct(action, message), struct(logged_at, position)) AS newest "
            f"FROM {self.tables.quote('rule_log')} WHERE stream = :stream AND rule_id IS NOT NULL "
            "GROUP BY rule_id, action = 'failed') ORDER BY rule_id",
            stream=self.tables.stream,
        )
        messages = [(str(row["rule_id"]), (row["message"] or "")[:_MAX_CHARACTERS], row) for row in rows]
        failing = {
            rule_id: message
            for rule_id, message, row in messages
            if row["has_failed"] == "true" and _parse_micros(row["at_us"]) >= now - RECENT
        }
        return failing, {rule_id: message for rule_id, message, row in messages if row["action"] == "rejected"}

    def _query(self, text: str, **values: str) -> Sequence[Row]:
        return self.execute(Query(text, values))


def describe_stream(tables: StreamTables, execute: Execute, now: dt.datetime) -> dict[str, Any]:
    """Returns the figures of a stream and whether it is healthy, by the names of `lookback status`."""
    figures = read_figures(tables, execute, now)
    findings = check_health(figures)
    return {
        "stream": figures.stream, "commits": figures.committed, "judged": figures.judged, "lag_commits": figures.waiting,
        "lag_seconds": round(figures.lag, 3), "rules": figures.rules, "healthy": is_healthy(findings),
        "health": describe_health(figures, findings), "findings": [asdict(finding) for finding in findings],
    }  # fmt: skip


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
                query.text, warehouse_id, parameters=values, wait_timeout="5s", format=Format.JSON_ARRAY,
                disposition=Disposition.INLINE, on_wait_timeout=ExecuteStatementRequestOnWaitTimeout.CONTINUE,
            )  # fmt: skip
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


def _parse_sample(row: Row) -> Sample:
    counts = json.loads(row["by_rule"] or "{}")
    return Sample(
        at=_parse_micros(row["at_us"]),
        events=_parse_count(row["events"]),
        late=_parse_count(row["late"]),
        discarded=_parse_count(row["discarded"]),
        lag=float(row["lag_seconds"] or 0),
        watermark=None if row["watermark"] is None else _parse_micros(row["watermark"]),
        state_rows=None if row["state_rows"] is None else _parse_count(row["state_rows"]),
        stages={stage: _parse_count(row[f"{stage}_ms"]) for stage in ("run", "evaluate", "write")},
        rules={rule_id: RuleCounts(**each) for rule_id, each in counts.items()},
    )


def _parse_count(text: str | None) -> int:
    return int(text or 0)


def _parse_micros(text: str | None) -> dt.datetime:
    return to_utc(int(text or 0))


def _parse_time(text: str) -> dt.datetime:
    """Parses a time such as 2026-03-01T10:00:00.000Z; without a zone it is UTC."""
    try:
        found = dt.datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        raise SetupError(f"the history has a time that cannot be read: {text!r:.50}") from None
    return found if found.tzinfo else found.replace(tzinfo=dt.timezone.utc)

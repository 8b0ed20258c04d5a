"""What health goes by, read from a workspace's tables over a SQL warehouse."""

from __future__ import annotations

import datetime as dt
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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
from lookback.core.operations.health import RECENT, Figures, Sample
from lookback.core.rules.document import read_document
from lookback.core.rules.rulebook import EVALUATED
from lookback.core.streams.metrics import RuleCounts
from lookback.core.values.times import to_utc
from lookback.remote.workspace import Workspace, in_words

Row = Mapping[str, "str | None"]
# Runs a query; values are texts, as the statement execution API has them.
Execute = Callable[["Query"], Sequence[Row]]
# Of a message of the log, in a sentence.
_MOST_TEXT = 200


class Query(NamedTuple):
    """SQL text, and the values of its :markers."""

    text: str
    values: Mapping[str, str]


@dataclass(frozen=True)
class Place:
    """Where a stream's tables are. quote: how SQL names a table of it."""

    stream: str
    quote: Callable[[str], str]

    @classmethod
    def of(cls, catalog: str, schema: str, stream: str) -> Place:
        """Tables of a schema of Unity Catalog."""
        return cls(stream, lambda table: ".".join(f"`{part.replace('`', '``')}`" for part in (catalog, schema, table)))


def remote_figures(place: Place, execute: Execute, now: dt.datetime) -> Figures:
    """The figures of a stream at the time `now` (aware), as `lookback status` has them of local tables.

    The last commit judged is the one that `metrics` names, as the checkpoint is not read.
    """
    reader = _Reader(place, execute, str(_micros(now - RECENT)))
    samples, last = reader.samples()
    rules = reader.rules()
    judged = reader.judged(last)
    waiting = measure_backlog(reader.history, judged)
    rejected, reason = reader.rejected()
    failing, refused = reader.logged(now)
    return Figures(
        place.stream, now,
        rules=sum(1 for status in rules.values() if status in EVALUATED),
        quarantined=[rule_id for rule_id, status in rules.items() if status == "quarantined"],
        committed=waiting.committed, judged=judged, waiting=waiting.waiting, lag=waiting.seconds(now),
        newest=waiting.newest, samples=samples, last_sample=None if last is None else _time(last["at_us"]),
        failing=failing, refused=refused, rejected=rejected, reason=reason,
        ingested=reader.ingested() if rejected else 0,
    )  # fmt: skip


@dataclass(frozen=True)
class _Reader:
    """The queries of a stream. since: from when on rows are recent, microseconds."""

    place: Place
    execute: Execute
    since: str
    _since: str = field(default="timestamp_micros(cast(:since AS bigint))", init=False)

    def samples(self) -> tuple[list[Sample], Row | None]:
        """The rows of `metrics` of the last hour, oldest first, and the last of all."""
        table = self.place.quote("metrics")
        rows = self._rows(
            f"SELECT unix_micros(measured_at) AS at_us, measured_at >= {self._since} AS recent, events, late, discarded, "
            "lag_seconds, unix_micros(watermark) AS watermark, state_rows, run_ms, evaluate_ms, write_ms, "
            f"to_json(by_rule) AS by_rule, judged FROM {table} WHERE stream = :stream AND (measured_at >= {self._since} "
            f"OR measured_at = (SELECT max(measured_at) FROM {table} WHERE stream = :stream)) ORDER BY measured_at",
            stream=self.place.stream, since=self.since,
        )  # fmt: skip
        return [_sample(row) for row in rows if row["recent"] == "true"], rows[-1] if rows else None

    def rules(self) -> dict[str, str]:
        """The rules of the stream -> the status of their last version."""
        rows = self._rows(
            "SELECT rule_id, newest.status AS status, newest.document AS document FROM (SELECT rule_id, "
            "max_by(struct(status, document), coalesce(version, 0)) AS newest "
            f"FROM {self.place.quote('rules')} WHERE rule_id <> '*' GROUP BY rule_id) ORDER BY rule_id"
        )
        found = {}
        for row in rows:
            try:
                document = read_document(row["document"])
            except LookbackError:
                continue
            if document.get("stream") == self.place.stream:
                found[str(row["rule_id"])] = str(row["status"])
        return found

    def judged(self, last: Row | None) -> int | None:
        """The last commit judged, by the last row of `metrics`; without one, the last that brought an alert."""
        if last is not None and last["judged"] is not None:
            return int(last["judged"])
        rows = self._rows(
            f"SELECT max(arrival) AS arrival FROM {self.place.quote('alerts')} WHERE stream = :stream",
            stream=self.place.stream,
        )
        return None if rows[0]["arrival"] is None else int(rows[0]["arrival"])

    def history(self, limit: int) -> list[Commit]:
        """The newest commits of the events table."""
        rows = self._rows(f"DESCRIBE HISTORY {self.place.quote(self.place.stream)} LIMIT {limit}")
        return [
            Commit(
                int(row["version"] or 0), _written(str(row["timestamp"])), row["operation"] or "",
                json.loads(row["operationMetrics"] or "{}") or {},
            )
            for row in rows
        ]  # fmt: skip

    def rejected(self) -> tuple[int, str]:
        """How many rows ingest rejected within the last hour, and why the newest."""
        rows = self._rows(
            "SELECT count(*) AS counted, max_by(reason, ingested_at) AS reason "
            f"FROM {self.place.quote('rejected_events')} WHERE stream = :stream AND ingested_at >= {self._since}",
            stream=self.place.stream, since=self.since,
        )  # fmt: skip
        return int(rows[0]["counted"] or 0), (rows[0]["reason"] or "")[:_MOST_TEXT]

    def ingested(self) -> int:
        """How many rows ingest could use within the last hour."""
        rows = self._rows(
            f"SELECT count(*) AS counted FROM {self.place.quote(self.place.stream)} WHERE ingested_at >= {self._since}",
            since=self.since,
        )
        return int(rows[0]["counted"] or 0)

    def logged(self, now: dt.datetime) -> tuple[dict[str, str], dict[str, str]]:
        """Rules that failed within the last hour, and rules of which the last row was rejected, with what the log says."""
        rows = self._rows(
            "SELECT rule_id, has_failed, newest.action AS action, newest.message AS message, at_us FROM ("
            "SELECT rule_id, action = 'failed' AS has_failed, unix_micros(max(logged_at)) AS at_us, "
            "max_by(struct(action, message), struct(logged_at, batch_id, version)) AS newest "
            f"FROM {self.place.quote('rule_log')} WHERE stream = :stream AND rule_id IS NOT NULL "
            "GROUP BY rule_id, action = 'failed') ORDER BY rule_id",
            stream=self.place.stream,
        )
        said = [(str(row["rule_id"]), (row["message"] or "")[:_MOST_TEXT], row) for row in rows]
        failing = {
            rule_id: message
            for rule_id, message, row in said
            if row["has_failed"] == "true" and _time(row["at_us"]) >= now - RECENT
        }
        return failing, {rule_id: message for rule_id, message, row in said if row["action"] == "rejected"}

    def _rows(self, text: str, **values: str) -> Sequence[Row]:
        return self.execute(Query(text, values))


def warehouse_query(
    workspace: Workspace, warehouse_id: str, *, seconds: float = 600.0, sleep: Callable[[float], None] = time.sleep
) -> Execute:
    """Runs queries on a SQL warehouse, which starts if it is stopped; one that takes longer than so long is cancelled."""

    def execute(query: Query) -> Sequence[Row]:
        api = workspace.client.statement_execution
        values = [StatementParameterListItem(name=name, value=value) for name, value in query.values.items()]
        until = time.monotonic() + seconds
        with in_words(workspace.host, f"a query on SQL warehouse {warehouse_id}"):
            # Less than a request may take.
            answer = api.execute_statement(
                query.text, warehouse_id, parameters=values, wait_timeout="5s", format=Format.JSON_ARRAY,
                disposition=Disposition.INLINE, on_wait_timeout=ExecuteStatementRequestOnWaitTimeout.CONTINUE,
            )  # fmt: skip
            while _state(answer) in (StatementState.PENDING, StatementState.RUNNING):
                assert answer.statement_id is not None
                if time.monotonic() >= until:
                    api.cancel_execution(answer.statement_id)
                    break
                sleep(1.0)
                answer = api.get_statement(answer.statement_id)
            if _state(answer) != StatementState.SUCCEEDED:
                raise RemoteError(f"{workspace.host}: SQL warehouse {warehouse_id}: {_why(answer, seconds)}")
            return _table(workspace, answer)

    return execute


def _table(workspace: Workspace, answer: StatementResponse) -> list[Row]:
    """The rows of an answer, also of those that come in several pieces."""
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


def _state(answer: StatementResponse) -> StatementState | None:
    return answer.status.state if answer.status else None


def _why(answer: StatementResponse, seconds: float) -> str:
    state = _state(answer)
    if state in (StatementState.PENDING, StatementState.RUNNING):
        return f"no answer to a query within {seconds:,.0f} seconds; it was cancelled. Is the warehouse able to start?"
    error = answer.status.error if answer.status else None
    said = " ".join(((error and error.message) or str(state)).split())[:300]
    if "TABLE_OR_VIEW_NOT_FOUND" in said or "DELTA_MISSING_DELTA_TABLE" in said:
        return f"a table is missing, which the first run of ingest or evaluate creates ({said})"
    if "INSUFFICIENT_PERMISSIONS" in said or "PERMISSION_DENIED" in said:
        return f"you may not read a table: ask for USE CATALOG, USE SCHEMA and SELECT ({said})"
    return f"a query failed ({said})"


def _sample(row: Row) -> Sample:
    counts = json.loads(row["by_rule"] or "{}")
    return Sample(
        at=_time(row["at_us"]),
        events=_number(row["events"]),
        late=_number(row["late"]),
        discarded=_number(row["discarded"]),
        lag=float(row["lag_seconds"] or 0),
        watermark=None if row["watermark"] is None else _time(row["watermark"]),
        state_rows=None if row["state_rows"] is None else _number(row["state_rows"]),
        stages={stage: _number(row[f"{stage}_ms"]) for stage in ("run", "evaluate", "write")},
        rules={rule_id: RuleCounts(**each) for rule_id, each in counts.items()},
    )


def _number(text: str | None) -> int:
    return int(text or 0)


def _time(text: str | None) -> dt.datetime:
    return to_utc(int(text or 0))


def _micros(time_: dt.datetime) -> int:
    return (time_ - dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)) // dt.timedelta(microseconds=1)


def _written(text: str) -> dt.datetime:
    """A time as the API writes it, such as 2026-03-01T10:00:00.000Z; one without a zone is UTC."""
    try:
        found = dt.datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        raise SetupError(f"the history has a time that is none: {text!r:.50}") from None
    return found if found.tzinfo else found.replace(tzinfo=dt.timezone.utc)

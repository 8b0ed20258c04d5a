"""`lookback status --warehouse` against a workspace on this machine, with the payloads of the REST API."""

from __future__ import annotations

import datetime as dt
import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from lookback.cli import main
from lookback.core.errors import RemoteError
from lookback.remote.figures import Query, prepare_queries
from lookback.remote.workspace import RemoteWorkspace, open_workspace
from workspace_server import Answer, Asked, WorkspaceServer, error

ME = "GET /api/2.0/preview/scim/v2/Me"
NOW = 1772359200  # 2026-03-01T10:00:00Z


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[WorkspaceServer]:
    """A workspace, which the environment names."""
    for name in ("DATABRICKS_CONFIG_PROFILE", "DATABRICKS_CLIENT_ID", "DATABRICKS_WORKSPACE_ID"):
        monkeypatch.delenv(name, raising=False)
    with WorkspaceServer() as server:
        monkeypatch.setenv("DATABRICKS_HOST", server.url)
        monkeypatch.setenv("DATABRICKS_TOKEN", "secret-token")
        monkeypatch.setenv("DATABRICKS_CONFIG_FILE", str(tmp_path / "none.cfg"))
        server.replies[ME] = {"userName": "ann.lee@example.com", "displayName": "Ann Lee", "id": "7"}
        yield server


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """A project with one stream."""
    (tmp_path / "conf/streams").mkdir(parents=True)
    stream = {"stream": "payments", "event_id": "id", "event_time": "at", "fields": {"id": "string", "at": "timestamp"}}
    (tmp_path / "conf/streams/payments.yml").write_text(yaml.safe_dump(stream))
    return tmp_path / "conf"


def workspace() -> RemoteWorkspace:
    """The workspace by a client that soon gives up."""
    return open_workspace(request_seconds=0.3, retry_seconds=1.0)


def no_sleep(_: float) -> None:
    """Time passes."""


def read_status(conf: Path, *words: str) -> int:
    place = ["--catalog", "main", "--schema", "lookback_ann_lee", "--conf", str(conf)]
    return main(["status", "--warehouse", "b2", *place, *words])


SAMPLE = {
    "at_us": str((NOW - 5) * 1_000_000), "is_recent": "1", "events": "1200", "late": "0", "discarded": "0",
    "lag_seconds": "0.000", "watermark_us": str((NOW - 20) * 1_000_000), "state_rows": "5000", "run_ms": "300",
    "evaluate_ms": "100", "write_ms": "100", "judged": "7",
    "by_rule": '{"big":{"evaluated":1200,"matched":1500,"suppressed":100,"failed":0}}',
}  # fmt: skip
# What a query is told by -> the rows of its answer.
ROWS: dict[str, list[dict[str, str | None]]] = {
    "`metrics`": [SAMPLE],
    "`rules`": [{"rule_id": "big", "version": "1", "status": "active", "document": '{"stream": "payments"}'},
                {"rule_id": "odd", "version": "1", "status": "active", "document": "no JSON"},
                {"rule_id": "other", "version": "1", "status": "active", "document": '{"stream": "logins"}'}],
    "DESCRIBE HISTORY": [
        {"version": "8", "timestamp": "2026-03-01T09:59:58.000Z", "operation": "OPTIMIZE", "operationMetrics": "{}"},
        {"version": "7", "timestamp": "2026-03-01T09:59:50Z", "operation": "WRITE", "operationMetrics": '{"numOutputRows":"9"}'},
    ],
    "`rejected_events`": [{"counted": "0", "reason": None}],
    "`rule_log`": [],
}  # fmt: skip


def succeeded(rows: list[dict[str, str | None]], **result: Any) -> Answer:
    columns = [
        {"name": name, "type_name": "STRING", "type_text": "STRING", "position": at}
        for at, name in enumerate(rows[0] if rows else {})
    ]
    return Answer(
        {
            "statement_id": "01f0-1", "status": {"state": "SUCCEEDED"},
            "manifest": {"format": "JSON_ARRAY", "schema": {"column_count": len(columns), "columns": columns}},
            "result": {"chunk_index": 0, "row_offset": 0, "data_array": [list(row.values()) for row in rows], **result},
        }
    )  # fmt: skip


def told(asked: Asked, rows: dict[str, list[dict[str, str | None]]] = ROWS) -> Answer:
    return succeeded(next(found for part, found in rows.items() if part in asked.body["statement"]))


@pytest.fixture
def at_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands at NOW."""

    class Clock(dt.datetime):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> dt.datetime:  # type: ignore[override]
            return dt.datetime.fromtimestamp(NOW, tz)

    monkeypatch.setattr("lookback.commands.upkeep.dt", SimpleNamespace(**{**vars(dt), "datetime": Clock}))


def test_health_is_that_of_local_status(
    conf: Path, server: WorkspaceServer, at_ten: None, capsys: pytest.CaptureFixture[str]
) -> None:
    server.replies["POST /api/2.0/sql/statements"] = told
    assert read_status(conf) == 0
    assert capsys.readouterr().out.splitlines() == [
        "payments needs a look (1 warning): judged through commit 7, nothing waits, last heard from 5 seconds ago.",
        "  warning: Rule big raised 1,400 alerts within the last hour, 100% of all.",
        "    Raise its limit, give it `suppress`, or pause it: lookback rules pause big.",
    ]
    assert read_status(conf, "--check", "--json") == 1
    printed = capsys.readouterr()
    row = json.loads(printed.out)
    assert (row["healthy"], row["judged"], row["commits"], row["lag_commits"], row["rules"]) == (False, 7, 8, 0, 1)
    asked = server.of("POST /api/2.0/sql/statements")
    assert {each.body["warehouse_id"] for each in asked} == {"b2"}
    # Values go apart from the text.
    assert all("payments'" not in each.body["statement"] for each in asked)
    assert {"name": "stream", "value": "payments"} in asked[0].body["parameters"]
    assert "FROM `main`.`lookback_ann_lee`.`metrics`" in asked[0].body["statement"]
    assert {each.headers["Authorization"] for each in server.asked if each.path.startswith("/api/")} == {
        "Bearer secret-token"
    }
    assert "secret-token" not in "".join(printed)


def test_an_evaluation_that_has_stopped_is_a_problem(
    conf: Path, server: WorkspaceServer, at_ten: None, capsys: pytest.CaptureFixture[str]
) -> None:
    old = {**SAMPLE, "at_us": str((NOW - 7200) * 1_000_000), "is_recent": "0", "judged": "5"}
    history = [{**row, "timestamp": "2026-03-01T09:00:00.000Z"} for row in ROWS["DESCRIBE HISTORY"]]
    rows = {**ROWS, "`metrics`": [old], "DESCRIBE HISTORY": history}
    server.replies["POST /api/2.0/sql/statements"] = lambda asked: told(asked, rows)
    assert read_status(conf) == 0
    assert (
        "problem: The evaluation is not running: it was last heard from 2 hours ago, and 1 commit of events waits"
        in capsys.readouterr().out
    )


def test_a_profile_names_the_workspace(
    conf: Path, server: WorkspaceServer, at_ten: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "some.cfg").write_text(f"[fraud]\nhost = {server.url}\ntoken = of-the-profile\n")
    monkeypatch.setenv("DATABRICKS_CONFIG_FILE", str(tmp_path / "some.cfg"))
    monkeypatch.setenv("DATABRICKS_CONFIG_PROFILE", "fraud")
    monkeypatch.delenv("DATABRICKS_HOST")
    monkeypatch.delenv("DATABRICKS_TOKEN")
    server.replies["POST /api/2.0/sql/statements"] = told
    assert read_status(conf) == 0
    assert server.of(ME)[0].headers["Authorization"] == "Bearer of-the-profile"


@pytest.mark.parametrize("host", [True, False])
def test_missing_credentials_are_named(
    conf: Path, server: WorkspaceServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], host: bool
) -> None:
    monkeypatch.delenv("DATABRICKS_TOKEN")
    monkeypatch.setenv("PATH", "")
    if not host:
        monkeypatch.delenv("DATABRICKS_HOST")
    assert read_status(conf) == 2
    error = capsys.readouterr().err
    assert "no credentials for a workspace" in error
    assert "databricks auth login" in error
    assert "DATABRICKS_TOKEN" in error


def test_a_warehouse_reads_the_tables_of_a_catalog(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--warehouse", "b2", "--root", str(conf.parent), "--conf", str(conf)]) == 2
    assert "name it by --catalog and --schema" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (error(401, "UNAUTHENTICATED", "Invalid access token."), "not accepted (401: Invalid access token)"),
        (error(403, "PERMISSION_DENIED", "User is not authorized."), "not allowed (403: User is not authorized)"),
        (error(500, "INTERNAL_ERROR", "Internal error."), "the workspace failed (500: Internal error)"),
        (error(503, "TEMPORARILY_UNAVAILABLE", "Busy.", Retry_After="0"), "is not available for now (503)"),
        (error(429, "REQUEST_LIMIT_EXCEEDED", "Slow down.", Retry_After="0"), "too many requests (429)"),
        (error(400, "INVALID_PARAMETER_VALUE", "No such thing."), "refused (INVALID_PARAMETER_VALUE: No such thing)"),
        (Answer("<html>Sign in to the proxy</html>"), "the answer does not come from a workspace"),
        (Answer({}, seconds=0.5), "no answer in time"),
    ],
    ids=["401", "403", "500", "503", "429", "400", "html", "time-out"],
)
def test_refusal_is_a_sentence_with_the_remedy(server: WorkspaceServer, answer: Answer, said: str) -> None:
    server.replies["POST /api/2.0/sql/statements"] = answer
    with pytest.raises(RemoteError) as caught:
        prepare_queries(workspace(), "a1")(Query("SELECT n", {}))
    assert str(caught.value).startswith(f"{server.url}: a query on SQL warehouse a1: ")
    assert said in str(caught.value)
    assert "secret-token" not in str(caught.value)


def test_a_workspace_that_is_not_there_is_named(server: WorkspaceServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with WorkspaceServer() as gone:
        monkeypatch.setenv("DATABRICKS_HOST", gone.url)
    with pytest.raises(RemoteError, match="cannot be reached; is the host right"):
        open_workspace(request_seconds=0.3, retry_seconds=1.0)


def test_a_throttled_request_waits_as_long_as_the_workspace_asks_for(server: WorkspaceServer) -> None:
    me = server.replies[ME]
    throttled = [error(429, "REQUEST_LIMIT_EXCEEDED", "Slow down.", Retry_After="1")]
    server.replies[ME] = lambda _: throttled.pop() if throttled else Answer(me)
    before = time.monotonic()
    assert open_workspace(request_seconds=0.3, retry_seconds=5).user == "ann.lee@example.com"
    assert 1 <= time.monotonic() - before < 4
    assert len(server.of(ME)) == 2


def test_query_that_takes_long_is_waited_for_and_read_to_its_last_chunk(server: WorkspaceServer) -> None:
    pending = Answer({"statement_id": "01f0-1", "status": {"state": "PENDING"}})
    server.replies["POST /api/2.0/sql/statements"] = pending
    server.replies["GET /api/2.0/sql/statements/01f0-1"] = [pending, succeeded([{"n": "1"}], next_chunk_index=1)]
    server.replies["GET /api/2.0/sql/statements/01f0-1/result/chunks/1"] = {"chunk_index": 1, "data_array": [["2"]]}
    execute = prepare_queries(workspace(), "a1", sleep=no_sleep)
    assert execute(Query("SELECT n", {})) == [{"n": "1"}, {"n": "2"}]


def test_query_that_takes_too_long_is_cancelled(server: WorkspaceServer) -> None:
    server.replies["POST /api/2.0/sql/statements"] = {"statement_id": "01f0-1", "status": {"state": "PENDING"}}
    server.replies["POST /api/2.0/sql/statements/01f0-1/cancel"] = {}
    execute = prepare_queries(workspace(), "a1", seconds=0, sleep=no_sleep)
    with pytest.raises(RemoteError, match="no answer to a query within 0 seconds; it was cancelled"):
        execute(Query("SELECT n", {}))
    assert server.of("POST /api/2.0/sql/statements/01f0-1/cancel")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("[TABLE_OR_VIEW_NOT_FOUND] The table cannot be found.", "the first run of ingest or evaluate creates"),
        ("[INSUFFICIENT_PERMISSIONS] User does not have SELECT.", "ask for USE CATALOG, USE SCHEMA and SELECT"),
        ("[DIVIDE_BY_ZERO] Division by zero.", "a query failed"),
    ],
)
def test_query_that_fails_is_told(server: WorkspaceServer, message: str, said: str) -> None:
    status = {"state": "FAILED", "error": {"error_code": "BAD_REQUEST", "message": message}}
    server.replies["POST /api/2.0/sql/statements"] = {"statement_id": "01f0-1", "status": status}
    with pytest.raises(RemoteError) as caught:
        prepare_queries(workspace(), "a1")(Query("SELECT n", {}))
    assert said in str(caught.value)
    assert message in str(caught.value)

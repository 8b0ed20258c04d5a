"""A SQL warehouse of a workspace on this machine, with the payloads of the REST API."""

from __future__ import annotations

import datetime as dt
import math
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml

from lookback.cli import main
from lookback.core.errors import RemoteError, SetupError
from lookback.questions import Query
from lookback.remote.statements import prepare_queries
from lookback.remote.workspace import RemoteWorkspace, open_workspace
from lookback.spark.tables.warehouse import open_warehouse
from workspace_server import Answer, WorkspaceServer, error

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


def test_a_profile_names_the_workspace(
    server: WorkspaceServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "some.cfg").write_text(f"[fraud]\nhost = {server.url}\ntoken = of-the-profile\n")
    monkeypatch.setenv("DATABRICKS_CONFIG_FILE", str(tmp_path / "some.cfg"))
    monkeypatch.setenv("DATABRICKS_CONFIG_PROFILE", "fraud")
    monkeypatch.delenv("DATABRICKS_HOST")
    monkeypatch.delenv("DATABRICKS_TOKEN")
    assert workspace().user == "ann.lee@example.com"
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


class Statements:
    """Answers each query with the next of these rows, and keeps the queries."""

    def __init__(self, *answers: list[dict[str, str | None]]) -> None:
        self.answers, self.queries = list(answers), list[Query]()

    def __call__(self, query: Query) -> list[dict[str, str | None]]:
        self.queries.append(query)
        return self.answers.pop(0) if self.answers else []


def test_what_a_warehouse_sends_keeps_every_digit_and_its_type() -> None:
    type_ = "struct<id:string,key:map<string,string>,at:timestamp,amount:decimal(38,10),x:double,tags:array<string>,n:bigint>"
    row = (
        '{"id":"a\\u0000b","key":{"x":null},"at":"2026-01-01T10:00:00.123456Z","amount":1234567890123456789.0123456789,'
        '"x":"NaN","tags":["a",null],"n":9007199254740993}'
    )
    execute = Statements([{"row": row, "type": type_}])
    tables = open_warehouse(execute, "ann", "main", "fr`aud")
    (found,) = tables.run("SELECT * FROM alerts WHERE rule_id = :id AND revision = :n", id="it's", n=2).collect()
    assert (found["id"], found["key"], found["tags"], found["n"]) == ("a\0b", {"x": None}, ["a", None], 2**53 + 1)
    assert found["at"] == dt.datetime(2026, 1, 1, 10, 0, 0, 123_456, tzinfo=dt.timezone.utc)
    assert found["amount"] == Decimal("1234567890123456789.0123456789")
    assert math.isnan(found["x"])
    (query,) = execute.queries
    assert "FROM `main`.`fr``aud`.`alerts` WHERE rule_id = :" in query.text
    assert "revision = 2L" in query.text
    assert list(query.values.values()) == ["it's"]


def test_rows_of_a_warehouse_are_computed_when_they_are_read() -> None:
    execute = Statements()
    tables = open_warehouse(execute, "ann", "main", "fraud")
    some = tables.run("SELECT id, at FROM events WHERE id = :id", id="1")
    other = tables.run("SELECT count(*) FROM some WHERE id <> :id", {"some": some.select("id").limit(3)}, id="2")
    assert execute.queries == []
    assert other.isEmpty()
    (query,) = execute.queries
    assert sorted(query.values.values()) == ["1", "2"]
    assert query.text.count("`main`.`fraud`.`events`") == 1
    with pytest.raises(SetupError, match="--warehouse does without"):
        some.where("id = 1")


def test_rows_are_appended_by_an_insert_whose_texts_go_apart() -> None:
    execute = Statements()
    now = dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc)
    row = ("r'1", {"customer": "1'"}, now, now, None, "ann")
    open_warehouse(execute, "ann", "main", "fraud").append_rows([row], "snoozes")
    (query,) = execute.queries
    assert query.text.startswith("INSERT INTO `main`.`fraud`.`snoozes` (`rule_id`, `key`, ")
    assert "CAST(NULL AS string)" in query.text
    assert list(query.values.values()) == ["r'1", "customer", "1'", "ann"]
    assert "'" not in query.text

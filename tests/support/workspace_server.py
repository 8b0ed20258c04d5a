"""A workspace on this machine: answers as the REST API does, remembers what it was asked."""

from __future__ import annotations

import datetime as dt
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from lookback.spark.tables.sqltexts import write_value


@dataclass(frozen=True)
class Asked:
    """A request. query: the last value of each name; body: JSON, bytes where it is none, None without one."""

    method: str
    path: str
    query: dict[str, str]
    body: Any
    headers: dict[str, str]


@dataclass(frozen=True)
class Answer:
    """An answer: a body as JSON, or text as it stands. seconds: after so long."""

    body: Any = field(default_factory=dict)
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


def error(status: int, code: str, message: str, **headers: str) -> Answer:
    """A refusal, as the REST API has them."""
    return Answer(
        {"error_code": code, "message": message}, status, {k.replace("_", "-"): v for k, v in headers.items()}
    )


def _plain(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body


Reply = Answer | list[Answer] | Callable[[Asked], Answer] | dict[str, Any]


def run_statement(run: Callable[[str], list[Any]], body: dict[str, Any]) -> Answer:
    """Answers a statement as the statement execution API does. `run` runs a text of SQL and returns rows of Spark."""
    # Delta's parser hands markers on without their values (Delta 4.4 on Spark 4.2).
    given = {each["name"]: each.get("value") for each in body.get("parameters", ())}
    values = {name: write_value(value) for name, value in given.items()}
    try:
        rows = run(re.sub(r":(\w+)", lambda marker: values.get(marker[1], marker[0]), body["statement"]))
    except Exception as failure:  # noqa: BLE001 - a workspace says of any failure what it is
        status = {"state": "FAILED", "error": {"error_code": "BAD_REQUEST", "message": str(failure)[:1000]}}
        return Answer({"statement_id": "1", "status": status})
    names = list(rows[0].asDict()) if rows else []
    columns = [{"name": name, "type_text": "STRING", "position": at} for at, name in enumerate(names)]
    data = [[_write_text(row[name]) for name in names] for row in rows]
    return Answer(
        {
            "statement_id": "1",
            "status": {"state": "SUCCEEDED"},
            "manifest": {"format": "JSON_ARRAY", "schema": {"column_count": len(columns), "columns": columns}},
            "result": {"chunk_index": 0, "row_offset": 0, "data_array": data},
        }
    )


def _write_text(value: Any) -> str | None:
    """Writes a value as the API does."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dt.datetime):
        return value.astimezone(dt.timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return json.dumps(value) if isinstance(value, dict) else str(value)


class WorkspaceServer:
    """A context manager around the server. replies: "METHOD /path" -> what is answered; a list: one after another, the last again."""

    def __init__(self) -> None:
        self.replies: dict[str, Reply] = {}
        self.asked: list[Asked] = []
        self._lock = threading.Lock()

    def of(self, place: str) -> list[Asked]:
        """Lists the requests of a "METHOD /path"."""
        return [asked for asked in self.asked if f"{asked.method} {asked.path}" == place]

    def answer(self, asked: Asked) -> Answer:
        with self._lock:
            self.asked.append(asked)
            reply = self.replies.get(f"{asked.method} {asked.path}")
            if isinstance(reply, list):
                reply = reply.pop(0) if len(reply) > 1 else reply[0]
        if reply is None:
            return error(404, "RESOURCE_DOES_NOT_EXIST", f"No API found for {asked.method} {asked.path}")
        if callable(reply):
            return reply(asked)
        return reply if isinstance(reply, Answer) else Answer(reply)

    def __enter__(self) -> WorkspaceServer:
        workspace = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                length = int(self.headers.get("Content-Length") or 0)
                body = _plain(self.rfile.read(length)) if length else None
                query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
                asked = Asked(self.command, parts.path, query, body, dict(self.headers))
                self._send(workspace.answer(asked))

            def _send(self, answer: Answer) -> None:
                time.sleep(answer.seconds)
                content = answer.body if isinstance(answer.body, str) else json.dumps(answer.body)
                try:
                    self.send_response(answer.status)
                    self.send_header("Content-Length", str(len(content.encode())))
                    for name, value in answer.headers.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(content.encode())
                except (BrokenPipeError, ConnectionResetError):
                    pass  # Who asked has gone.

            do_POST = do_PUT = do_GET  # noqa: N815

            def log_message(self, *_: Any) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

"""Serves moto's S3 with the weather of a real store: time per request, failures, lost answers, and a count of requests.

It runs in a venv of its own, as `objectstore` starts it, and imports nothing of this repository. `GET /-/requests` gives
{"counts", "batches", "bytes"} since the last `DELETE /-/requests`: the requests, those of each micro-batch, from one plan
in the checkpoint's `offsets` to the next, and the bytes written. `GET /-/commits` gives the time at which each commit of
a Delta log was there. `PUT /-/weather` takes a JSON object with `delay` (seconds per request) and `failures`, a list of
{"kind", "rate", "method", "match"} (see `Failure`).
"""

from __future__ import annotations

import copy
import json
import random
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
from moto.s3.models import S3Backend
from werkzeug.serving import run_simple

_BUSY = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
_EXISTS = b"<?xml version='1.0'?><Error><Code>PreconditionFailed</Code><Message>It exists.</Message></Error>"
# What a request is for, by the part of the key that tells it.
_KINDS = (
    (r"([^/]+)/_delta_log(?:/|$)", "log of {}"),
    (r"/_checkpoints?/.*/(offsets|commits|sources|state)(?:/|$)", "{}"),
    (r"\.owner$", "owner"),
    (r"/_checkpoints?/", "checkpoint"),
    (r"([^/]+)/(?:[^/]*=[^/]*/)*[^/]*\.parquet", "data of {}"),
)
_PLAN = re.compile(r"/offsets/\d+$")
_COMMIT = re.compile(r"/_delta_log/\d+\.json$")


class Handler(MotoRequestHandler):
    """Answers `Expect: 100-continue` once: Werkzeug does so itself, and a second 100 is taken for the answer."""

    def handle_expect_100(self) -> bool:
        return True

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        pass


@dataclass(frozen=True)
class Failure:
    """Requests that fail.

    Attributes:
        kind: `busy` answers 503, `reset` closes the connection before anything is done, `lost` does what was asked
            and closes the connection instead of answering, `unconditional` ignores If-None-Match.
        rate: The share of requests, 0 to 1.
        method: The methods, such as `PUT|POST`; all by default.
        match: A pattern of the keys; all by default.
    """

    kind: str
    rate: float = 1.0
    method: str = ".*"
    match: str = ""


_list_objects = S3Backend.list_objects_v2


def list_few_objects(
    backend: S3Backend, bucket: Any, *, prefix: str | None, start_after: str | None, **page: Any
) -> Any:
    """Lists like moto, which looks at every key of a bucket: of 5,000 that took 30 ms of a core, and takes 13."""
    begin, after = prefix or "", start_after or ""
    few = copy.copy(bucket)
    few.keys = {name: bucket.keys[name] for name in bucket.keys if name.startswith(begin) and name > after}
    return _list_objects(backend, few, prefix=prefix, start_after=start_after, **page)


class Weather:
    """Moto's application behind a delay, failures, and counts."""

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self._app = app
        # Moto looks whether a key exists and then writes it; a conditional write has to be one step.
        self._one_at_a_time = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        # The counts at the start of each micro-batch.
        self._batches: list[Counter[str]] = []
        self._commits: dict[str, float] = {}
        self._delay = 0.0
        self._failures: list[Failure] = []

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        if path.startswith("/-/"):
            return self._control(path, method, environ, start_response)
        key = path + "?" + environ.get("QUERY_STRING", "")
        kind = _describe(method, key, environ)
        if method == "PUT" and _PLAN.search(path):
            self._batches.append(self._counts.copy())
        self._counts[kind] += 1
        if method in ("PUT", "POST"):
            self._bytes[kind] += int(environ.get("CONTENT_LENGTH") or 0)
        time.sleep(self._delay)
        failure = self._find_failure(method, key)
        if failure == "unconditional":
            environ.pop("HTTP_IF_NONE_MATCH", None)
            failure = None
        # A client that still sends would take an early answer for a broken connection.
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)) if failure else b""
        if failure == "busy":
            start_response("503 Slow Down", [("Content-Type", "application/xml"), ("Content-Length", str(len(_BUSY)))])
            return [_BUSY]
        if failure == "lost":
            environ["wsgi.input"] = _Body(body)
            b"".join(self._ask(environ, lambda *_: lambda _: None))
        if failure:
            _cut(environ["werkzeug.socket"])
            raise ConnectionResetError
        answer = self._ask(environ, start_response)
        if method == "PUT" and _COMMIT.search(path):
            self._commits[path] = time.time()
        return answer

    def _ask(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        with self._one_at_a_time:
            if environ["REQUEST_METHOD"] == "POST" and environ.get("HTTP_IF_NONE_MATCH") and self._exists(environ):
                # Moto knows this condition for a PUT, not for the end of an upload in parts.
                start_response("412 Precondition Failed", [("Content-Length", str(len(_EXISTS)))])
                return [_EXISTS]
            return list(self._app(environ, start_response))

    def _exists(self, environ: dict[str, Any]) -> bool:
        found: list[str] = []
        head = {
            **environ,
            "REQUEST_METHOD": "HEAD",
            "QUERY_STRING": "",
            "CONTENT_LENGTH": "0",
            "wsgi.input": _Body(b""),
        }
        list(self._app(head, lambda status, *_: found.append(status) or (lambda _: None)))
        return found[0].startswith("200")

    def _find_failure(self, method: str, key: str) -> str | None:
        for each in self._failures:
            if re.fullmatch(each.method, method) and re.search(each.match, key) and random.random() < each.rate:
                return each.kind
        return None

    def _control(
        self, path: str, method: str, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> list[bytes]:
        if method == "PUT":
            settings = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
            self._delay = settings.get("delay", 0.0)
            self._failures = [Failure(**each) for each in settings.get("failures", [])]
        elif method == "DELETE":
            self._counts.clear()
            self._bytes.clear()
            self._batches.clear()
        answer = json.dumps(self._commits if path == "/-/commits" else self._report()).encode()
        start_response("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(answer)))])
        return [answer]

    def _report(self) -> dict[str, Any]:
        ends = [*self._batches[1:], self._counts]
        batches = [end - start for start, end in zip(self._batches, ends, strict=False)]
        return {"counts": self._counts, "batches": batches, "bytes": self._bytes}


class _Body:
    """The body of a request that was read already."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def read(self, size: int = -1) -> bytes:
        taken = self._content if size < 0 else self._content[:size]
        self._content = self._content[len(taken) :]
        return taken


def _describe(method: str, key: str, environ: dict[str, Any]) -> str:
    """Says what is done to what, such as `list log of alerts`."""
    name, _, query = key.partition("?")
    words = parse_qs(query, keep_blank_values=True)
    if method == "GET" and words.keys() & {"list-type", "prefix"}:
        return f"list {_find_kind(name.rstrip('/') + '/' + words.get('prefix', [''])[0])}"
    if method == "PUT" and environ.get("HTTP_X_AMZ_COPY_SOURCE"):
        return f"copy {_find_kind(name)}"
    if method == "PUT" and environ.get("HTTP_IF_NONE_MATCH"):
        return f"put-if-absent {_find_kind(name)}"
    if method == "POST" and "delete" in words:
        return "delete several"
    return f"{method.lower()} {_find_kind(name)}"


def _find_kind(key: str) -> str:
    for pattern, kind in _KINDS:
        if match := re.search(pattern, key):
            return kind.format(*match.groups())
    return "other"


def _cut(connection: socket.socket) -> None:
    """Closes at once: others hold the socket too, so closing it alone would let the client wait."""
    connection.shutdown(socket.SHUT_RDWR)
    connection.close()


if __name__ == "__main__":
    # With moto's dispatcher, which finds the service of each request, a PUT takes 3.6 ms of a core instead of 1.2.
    S3Backend.list_objects_v2 = list_few_objects
    app = Weather(create_backend_app("s3"))
    run_simple("127.0.0.1", int(sys.argv[1]), app, threaded=True, request_handler=Handler)

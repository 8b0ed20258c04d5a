"""Webhooks and e-mail to servers on this machine."""

from __future__ import annotations

import base64
import datetime as dt
import email
import email.policy
import hashlib
import hmac
import json
import socketserver
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from lookback.cli import main
from lookback.core.errors import SetupError
from lookback.core.operations.notifications import FAILED, GIVEN_UP, SENT, Attempt, make_health_notice
from lookback.core.operations.receivers import Email, Receiver, Webhook
from lookback.senders import make_sender, send_to_all
from sample_alert import ALERT
from workspace_server import Answer, WorkspaceServer


class MailServer:
    """A context manager around an SMTP server that keeps what it gets. refuse: command -> what is answered in its place."""

    def __init__(self, certificate: Path | None = None) -> None:
        self.messages: list[tuple[list[str], EmailMessage]] = []
        self.logins: list[str] = []
        self.secured = 0
        self.refuse: dict[str, str] = {}
        self._certificate = certificate

    def __enter__(self) -> MailServer:
        mail = self

        class Handler(socketserver.StreamRequestHandler):
            def say(self, line: str) -> None:
                self.wfile.write(f"{line}\r\n".encode())

            def handle(self) -> None:
                recipients: list[str] = []
                self.say("220 here")
                while line := self.rfile.readline().decode().strip():
                    command = line.split(" ")[0].upper()
                    if command in mail.refuse:
                        self.say(mail.refuse[command])
                    elif command == "EHLO":
                        self.say("250-here")
                        self.say("250-AUTH PLAIN" if not mail._certificate else "250-STARTTLS")
                        self.say("250 SIZE 1000000")
                    elif command == "STARTTLS":
                        self.say("220 go on")
                        self.secure()
                        mail.secured += 1
                    elif command == "AUTH":
                        mail.logins.append(base64.b64decode(line.split(" ")[2]).decode())
                        self.say("235 welcome")
                    elif command == "RCPT":
                        recipients.append(line)
                        self.say("250 fine")
                    elif command == "DATA":
                        self.say("354 go on")
                        raw = b""
                        while (part := self.rfile.readline()) != b".\r\n":
                            raw += part
                        message = email.message_from_bytes(raw, policy=email.policy.default)
                        mail.messages.append((recipients, message))
                        self.say(mail.refuse.get(".", "250 taken"))
                    elif command == "QUIT":
                        self.say("221 bye")
                        return
                    else:
                        self.say("250 fine")

            def finish(self) -> None:
                super().finish()
                self.request.close()

            def secure(self) -> None:
                assert mail._certificate
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(mail._certificate)
                self.request = context.wrap_socket(self.request, server_side=True)
                self.rfile = self.request.makefile("rb")
                self.wfile = self.request.makefile("wb", 0)

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                """A client that goes is none of ours."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def hooks() -> Iterator[WorkspaceServer]:
    with WorkspaceServer() as server:
        server.replies["POST /alerts"] = Answer()
        yield server


def hook(server: WorkspaceServer, alert: dict[str, Any] = ALERT, **more: Any) -> Attempt:
    way = Webhook(f"{server.url}/alerts", **more.pop("way", {}))
    return make_sender(Receiver("on-call", way, **{"timeout": 2.0, **more}))(alert)


# Webhooks ------------------------------------------------------------------------------------------------------------


def test_webhook_gets_the_row_with_its_id_and_revision(hooks: WorkspaceServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK_KEY", "key")
    assert hook(hooks, {**ALERT, "revision": 2}, way={"secret_env": "HOOK_KEY"}) == Attempt(SENT)
    (asked,) = hooks.asked
    assert (asked.body["alert_id"], asked.body["revision"], asked.body["key"]) == (
        ALERT["alert_id"],
        2,
        {"payer": "Zoë"},
    )
    assert asked.headers["Content-Type"] == "application/json"
    assert asked.headers["Idempotency-Key"] == f"{ALERT['alert_id']}-2"
    assert (asked.headers["X-Lookback-Alert-Id"], asked.headers["X-Lookback-Revision"]) == (ALERT["alert_id"], "2")
    at, signed = (part.partition("=")[2] for part in asked.headers["X-Lookback-Signature"].split(","))
    body = json.dumps(asked.body, ensure_ascii=False).encode()
    assert signed == hmac.new(b"key", at.encode() + b"." + body, hashlib.sha256).hexdigest()


@pytest.mark.parametrize(("code", "status"), [(204, SENT), (400, GIVEN_UP), (404, FAILED), (500, FAILED)])
def test_answer_of_a_webhook(hooks: WorkspaceServer, code: int, status: str) -> None:
    hooks.replies["POST /alerts"] = Answer("", code)
    assert hook(hooks).status == status


def test_webhook_that_asks_for_time(hooks: WorkspaceServer) -> None:
    hooks.replies["POST /alerts"] = Answer({}, 429, {"Retry-After": "60"})
    assert hook(hooks) == Attempt(FAILED, "HTTP status 429", 60.0)


def test_webhook_that_leads_elsewhere_is_not_followed(hooks: WorkspaceServer) -> None:
    with WorkspaceServer() as other:
        for code in (301, 302, 303, 307, 308):
            hooks.replies["POST /alerts"] = Answer({}, code, {"Location": f"{other.url}/alerts"})
            assert hook(hooks).status == FAILED
        assert not other.asked


def test_webhook_that_is_slow_or_gone_fails_in_time(hooks: WorkspaceServer) -> None:
    hooks.replies["POST /alerts"] = Answer({}, seconds=0.6)
    assert "timed out" in hook(hooks, timeout=0.2).error
    with WorkspaceServer() as gone:
        pass
    assert "refused" in hook(gone).error


@contextmanager
def dripping() -> Iterator[str]:
    """A server that answers a byte every tenth of a second, and never ends."""
    stop = threading.Event()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                self.request.sendall(b"HTTP/1.1 200 OK\r\n")
                while not stop.wait(0.1):
                    self.request.sendall(b"X")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            stop.set()
            server.shutdown()


def test_an_attempt_ends_in_time_though_bytes_keep_coming_and_holds_up_no_other(hooks: WorkspaceServer) -> None:
    with dripping() as url:
        slow = [Receiver(f"slow{at}", Webhook(url), timeout=0.5) for at in range(4)]
        quick = Receiver("quick", Webhook(f"{hooks.url}/alerts"), timeout=2.0)
        senders = {each: make_sender(each) for each in (*slow, quick)}
        began = time.monotonic()
        outcomes = send_to_all(ALERT, senders)
        assert time.monotonic() - began < 1.5
    assert outcomes[quick] == Attempt(SENT)
    assert {outcomes[each].error for each in slow} == {"TimeoutError: timed out: no answer within 0.5 seconds"}


def test_a_webhook_of_this_machine_goes_through_no_proxy(
    hooks: WorkspaceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with WorkspaceServer() as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy"):
            monkeypatch.setenv(name, proxy.url)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        assert hook(hooks) == Attempt(SENT)
        assert not proxy.asked


def test_secret_that_is_not_set_is_told_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOOK_URL", raising=False)
    receiver = Receiver("on-call", Webhook(url_env="HOOK_URL"))
    with pytest.raises(SetupError, match="receiver 'on-call' needs the environment variable HOOK_URL"):
        make_sender(receiver)
    monkeypatch.setenv("HOOK_URL", "http://hooks.example.com/secret")
    with pytest.raises(SetupError, match="the URL in HOOK_URL must begin with https://") as caught:
        make_sender(receiver)
    assert "secret" not in str(caught.value)


# E-mail --------------------------------------------------------------------------------------------------------------


def letter_to(mail: MailServer, alert: dict[str, Any] = ALERT, timeout: float = 2.0, **more: Any) -> Attempt:
    more = {"starttls": False, **more}
    way = Email("127.0.0.1", mail.port, "lookback@example.com", ("desk@example.com", "boss@example.com"), **more)
    return make_sender(Receiver("desk", way, timeout=timeout))(alert)


def test_letter_has_the_row_its_id_and_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAIL_USER", "ann")
    monkeypatch.setenv("MAIL_WORD", "word")
    with MailServer() as mail:
        assert letter_to(mail, user_env="MAIL_USER", password_env="MAIL_WORD") == Attempt(SENT)
    assert mail.logins == ["\0ann\0word"]
    ((recipients, message),) = mail.messages
    assert [line.partition(":")[2].strip("<>") for line in recipients] == ["desk@example.com", "boss@example.com"]
    assert message["Subject"] == "[high] day-spend: 1,200.50 by Zoë"
    assert (message["X-Lookback-Alert-Id"], message["X-Lookback-Revision"]) == (ALERT["alert_id"], "0")
    assert message["Message-ID"] == f"<{ALERT['alert_id']}-0@lookback.invalid>"
    text, attached = message.iter_parts()
    assert "key: payer = Zoë" in text.get_content()
    assert json.loads(attached.get_content())["measures"] == {"total": "1200.50"}


def test_no_header_comes_from_an_event() -> None:
    hostile = {**ALERT, "message": "x\r\nBcc: eve@example.com\r\n\r\nClick here", "alert_id": "a\r\nX-Evil: 1"}
    with MailServer() as mail:
        assert letter_to(mail, hostile) == Attempt(SENT)
    ((recipients, message),) = mail.messages
    assert len(recipients) == 2
    assert message["Bcc"] is None
    assert message["X-Evil"] is None
    assert message["Subject"] == "[high] day-spend: x Bcc: eve@example.com Click here"


def test_long_and_foreign_texts_arrive_whole() -> None:
    said = "支払い 😀 " * 12
    with MailServer() as mail:
        assert letter_to(mail, {**ALERT, "message": said, "measures": {"m": "ß" * 5_000}}) == Attempt(SENT)
    ((_, message),) = mail.messages
    assert message["Subject"] == f"[high] day-spend: {said.strip()}"
    assert "ß" * 5_000 in next(message.iter_parts()).get_content()


@pytest.mark.parametrize(
    ("refuse", "status"),
    [
        ({".": "554 no such things here"}, GIVEN_UP),
        ({".": "451 later"}, FAILED),
        ({"MAIL": "550 not you"}, FAILED),
        ({"RCPT": "550 nobody of that name"}, FAILED),
    ],
)
def test_refusal_of_a_mail_server(refuse: dict[str, str], status: str) -> None:
    with MailServer() as mail:
        mail.refuse = refuse
        outcome = letter_to(mail)
    assert outcome.status == status
    assert outcome.error


def test_mail_server_that_is_gone_or_offers_no_tls_fails() -> None:
    with MailServer() as mail:
        assert "STARTTLS" in letter_to(mail, starttls=True).error
        assert not mail.messages
    assert "refused" in letter_to(mail).error


def test_tls_is_taken_only_of_whom_it_should_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with MailServer(certificate(tmp_path / "server.pem")) as mail:
        refused = letter_to(mail, starttls=True)
        assert refused.status == FAILED
        assert "CERTIFICATE_VERIFY_FAILED" in refused.error
        assert not mail.messages
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "server.pem"))
        assert letter_to(mail, starttls=True) == Attempt(SENT)
    assert len(mail.messages) == 1
    assert mail.secured == 1


def certificate(file: Path) -> Path:
    """A key and a certificate of its own for 127.0.0.1."""
    from ipaddress import ip_address

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "here")])
    now = dt.datetime.now(dt.timezone.utc)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    plain = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    file.write_bytes(key.private_bytes(*plain) + made.public_bytes(serialization.Encoding.PEM))
    return file


# The health of a stream ------------------------------------------------------------------------------------------------


def health_of(stream: str, *levels: str) -> dict[str, Any]:
    """The row of `lookback status` for a stream, as far as it is sent."""
    findings = [
        {"level": level, "check": f"check-{level}", "what": f"A {level}.", "remedy": "Look."} for level in levels
    ]
    healthy = not {"problem", "warning"} & set(levels)
    return {
        "stream": stream,
        "healthy": healthy,
        "health": f"{stream} needs a look:",
        "findings": findings,
        "judged": 7,
    }


def test_a_stream_that_is_not_healthy_is_told_with_one_id_an_hour() -> None:
    at = dt.datetime(2026, 3, 1, 10, 5, tzinfo=dt.timezone.utc)
    notice = make_health_notice(health_of("payments", "warning", "note"), at)
    # No person decides about a notice, so it does not say whether it waits for one.
    assert set(notice) == set(ALERT) - {"change", "queue"}
    assert (notice["rule_id"], notice["severity"], notice["stream"]) == ("lookback.health", "medium", "payments")
    assert notice["message"] == "payments needs a look: A warning. Look."
    later = make_health_notice(health_of("payments", "warning"), at + dt.timedelta(minutes=54))
    assert later["alert_id"] == notice["alert_id"]
    others = [
        make_health_notice(health_of("payments", "warning"), at + dt.timedelta(minutes=55)),
        make_health_notice(health_of("payments", "warning", "problem"), at),
        make_health_notice(health_of("logins", "warning"), at),
    ]
    assert len({notice["alert_id"], *(each["alert_id"] for each in others)}) == 4
    assert others[1]["severity"] == "high"


def test_status_tells_the_receivers_that_want_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "streams").mkdir()
    for name in ("payments", "logins"):
        declared = f"stream: {name}\nevent_id: id\nevent_time: at\nfields: {{id: bigint, at: timestamp}}\n"
        (tmp_path / f"streams/{name}.yml").write_text(declared)
    found = {"payments": health_of("payments", "problem"), "logins": health_of("logins", "note")}
    monkeypatch.setattr("lookback.spark.operations.status.stream_status", lambda tables, stream, *_: found[stream.name])
    status = ["status", "--json", "--conf", str(tmp_path), "--root", str(tmp_path)]
    with WorkspaceServer() as server:
        server.replies["POST /desk"] = Answer({})
        receivers = f"""
receivers:
  - {{name: desk, webhook: {{url: {server.url}/desk}}, rules: [lookback.*]}}
  - {{name: analysts, webhook: {{url: {server.url}/analysts}}, rules: [card-*]}}
"""
        (tmp_path / "notifiers.yml").write_text(receivers)
        assert main([*status, "--tell"]) == 0
        assert main([*status, "--check", "--tell"]) == 1
        (first, again) = server.asked
        assert (first.path, first.body["stream"], first.body["severity"]) == ("/desk", "payments", "high")
        assert again.body["alert_id"] == first.body["alert_id"]
        # It is no success where somebody could not be told.
        server.replies["POST /desk"] = Answer({}, status=503)
        capsys.readouterr()
        assert main([*status, "--tell"]) == 1
    assert "desk could not be notified of payments: HTTP status 503" in capsys.readouterr().err

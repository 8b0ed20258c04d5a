"""Sends alerts by webhook and e-mail. Each call makes one attempt, never raises, and keeps the receiver's timeout."""

from __future__ import annotations

import http.client
import os
import smtplib
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from email.message import EmailMessage
from email.policy import SMTP as SMTP_POLICY
from email.utils import formatdate
from threading import Thread
from typing import Any

from lookback.core.errors import SetupError
from lookback.core.operations.notifications import (
    GIVEN_UP,
    SENT,
    Attempt,
    Send,
    format_alert_email,
    format_alert_json,
    format_headline,
    make_delivery_id,
    make_failed_attempt,
    read_http_status,
    sign,
)
from lookback.core.operations.receivers import Email, Receiver, Webhook, find_url_problem, is_local_url
from lookback.core.values.texts import collapse_spaces


def make_sender(receiver: Receiver) -> Send:
    """Makes the function that sends a row of the alerts table to a receiver, once.

    Raises SetupError if an environment variable that the receiver names is not set.
    """
    if isinstance(receiver.way, Webhook):
        return _limit_time(_make_webhook(receiver, receiver.way), receiver.timeout)
    return _limit_time(_make_email(receiver, receiver.way), receiver.timeout)


def send_to_all(alert: Mapping[str, Any], senders: Mapping[Receiver, Send]) -> dict[Receiver, Attempt]:
    """Sends a row to all receivers in parallel, so that none waits for another."""
    if not senders:
        return {}
    with ThreadPoolExecutor(len(senders)) as pool:
        return dict(zip(senders, pool.map(lambda send: send(alert), senders.values()), strict=True))


def _limit_time(send: Send, seconds: float) -> Send:
    """Ends an attempt in time. A socket's timeout only limits each single read, and never the lookup of a host name."""

    def send_in_time(alert: Mapping[str, Any]) -> Attempt:
        outcome: Future[Attempt] = Future()

        def run() -> None:
            try:
                outcome.set_result(send(alert))
            except Exception as error:  # noqa: BLE001 - raised below
                outcome.set_exception(error)

        # A pool would make the process wait at its end for attempts without an answer.
        Thread(target=run, name="send", daemon=True).start()
        try:
            return outcome.result(seconds)
        except FutureTimeoutError:
            return make_failed_attempt(TimeoutError(f"timed out: no answer within {seconds:g} seconds"))

    return send_in_time


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: an alert goes only to the declared URL."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Returns None, so that the request ends here."""


def _make_webhook(receiver: Receiver, way: Webhook) -> Send:
    url = way.url or _read_variable(receiver, way.url_env)
    if problem := find_url_problem(url):
        raise SetupError(f"receiver {receiver.name!r}: the URL in {way.url_env or 'url'} {problem}")
    secret = _read_variable(receiver, way.secret_env) if way.secret_env else ""
    # A proxy would send the request out of this machine.
    direct = [urllib.request.ProxyHandler({})] if is_local_url(url) else []
    opener = urllib.request.build_opener(_NoRedirect, *direct)

    def send(alert: Mapping[str, Any]) -> Attempt:
        headers = {"Content-Type": "application/json", "User-Agent": "lookback"}
        headers |= {"Idempotency-Key": collapse_spaces(make_delivery_id(alert)), **_make_id_headers(alert)}
        try:
            body = format_alert_json(alert).encode()
            if secret:
                headers["X-Lookback-Signature"] = sign(secret, body, int(time.time()))
            # find_url_problem checked the scheme.
            request = urllib.request.Request(url, data=body, headers=headers, method="POST")  # noqa: S310
            with opener.open(request, timeout=receiver.timeout) as answer:
                return read_http_status(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return read_http_status(error.code, error.headers.get("Retry-After"))
        except (OSError, ValueError, http.client.HTTPException) as error:
            return make_failed_attempt(error)

    return send


def _make_email(receiver: Receiver, way: Email) -> Send:
    user = _read_variable(receiver, way.user_env) if way.user_env else ""
    password = _read_variable(receiver, way.password_env) if way.password_env else ""

    def send(alert: Mapping[str, Any]) -> Attempt:
        try:
            with smtplib.SMTP(way.host, way.port, timeout=receiver.timeout) as server:
                if way.starttls:
                    server.starttls(context=ssl.create_default_context())
                if user:
                    server.login(user, password)
                server.send_message(_make_message(alert, way), way.sender, way.to)
            return Attempt(SENT)
        except smtplib.SMTPDataError as error:
            # A 5xx rejects this message for good; a rejected log-in or recipient may be corrected later.
            refused = 500 <= error.smtp_code < 600
            return Attempt(GIVEN_UP, make_failed_attempt(error).error) if refused else make_failed_attempt(error)
        except (OSError, smtplib.SMTPException, ValueError) as error:
            return make_failed_attempt(error)

    return send


def _make_message(alert: Mapping[str, Any], way: Email) -> EmailMessage:
    message = EmailMessage(policy=SMTP_POLICY)
    message["Subject"] = format_headline(alert)
    message["From"] = way.sender
    message["To"] = ", ".join(way.to)
    message["Date"] = formatdate()
    message["Message-ID"] = f"<{collapse_spaces(make_delivery_id(alert)).replace(' ', '')}@lookback.invalid>"
    for name, value in _make_id_headers(alert).items():
        message[name] = value
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(format_alert_email(alert), cte="base64")
    message.add_attachment(
        format_alert_json(alert).encode(), maintype="application", subtype="json", filename="alert.json"
    )
    return message


def _make_id_headers(alert: Mapping[str, Any]) -> dict[str, str]:
    """Returns the headers with which a receiver can drop repeats."""
    return {"X-Lookback-Alert-Id": collapse_spaces(alert["alert_id"]), "X-Lookback-Revision": str(alert["revision"])}


def _read_variable(receiver: Receiver, name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise SetupError(f"receiver {receiver.name!r} needs the environment variable {name}, which is not set")
    return value

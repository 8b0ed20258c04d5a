"""Webhooks and e-mail: one attempt each, which never raises and never takes longer than it may."""

from __future__ import annotations

import http.client
import os
import smtplib
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from email.message import EmailMessage
from email.policy import SMTP as SMTP_POLICY
from email.utils import formatdate
from typing import Any

from lookback.core.errors import SetupError
from lookback.core.operations.notifications import (
    GIVEN_UP,
    SENT,
    Attempt,
    alert_text,
    delivery_id,
    email_text,
    failed,
    headline,
    of_status,
    one_line,
    signature,
)
from lookback.core.operations.receivers import Email, Receiver, Webhook, url_problem

# Sends a row of the alerts table once.
Send = Callable[[Mapping[str, Any]], Attempt]


def sender_of(receiver: Receiver) -> Send:
    """What sends to a receiver. Raises SetupError where the environment lacks what it names."""
    if isinstance(receiver.way, Webhook):
        return _webhook(receiver, receiver.way)
    return _email(receiver, receiver.way)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Goes nowhere else: an alert is for the receiver that was declared."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Nothing in place of the request."""


def _webhook(receiver: Receiver, way: Webhook) -> Send:
    url = way.url or _variable(receiver, way.url_env)
    if problem := url_problem(url):
        raise SetupError(f"receiver {receiver.name!r}: the URL in {way.url_env or 'url'} {problem}")
    secret = _variable(receiver, way.secret_env) if way.secret_env else ""
    opener = urllib.request.build_opener(_NoRedirect)

    def send(alert: Mapping[str, Any]) -> Attempt:
        headers = {"Content-Type": "application/json", "User-Agent": "lookback"}
        headers |= {"Idempotency-Key": one_line(delivery_id(alert)), **_marks(alert)}
        try:
            body = alert_text(alert).encode()
            if secret:
                headers["X-Lookback-Signature"] = signature(secret, body, int(time.time()))
            # The scheme was looked at above.
            request = urllib.request.Request(url, data=body, headers=headers, method="POST")  # noqa: S310
            with opener.open(request, timeout=receiver.timeout) as answer:
                return of_status(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return of_status(error.code, error.headers.get("Retry-After"))
        except (OSError, ValueError, http.client.HTTPException) as error:
            return failed(error)

    return send


def _email(receiver: Receiver, way: Email) -> Send:
    user = _variable(receiver, way.user_env) if way.user_env else ""
    password = _variable(receiver, way.password_env) if way.password_env else ""

    def send(alert: Mapping[str, Any]) -> Attempt:
        try:
            with smtplib.SMTP(way.host, way.port, timeout=receiver.timeout) as server:
                if way.starttls:
                    server.starttls(context=ssl.create_default_context())
                if user:
                    server.login(user, password)
                server.send_message(_message(alert, way), way.sender, way.to)
            return Attempt(SENT)
        except smtplib.SMTPDataError as error:
            # Of the message itself, and for good; a log-in or a recipient that is refused may be mended.
            refused = 500 <= error.smtp_code < 600
            return Attempt(GIVEN_UP, failed(error).error) if refused else failed(error)
        except (OSError, smtplib.SMTPException, ValueError) as error:
            return failed(error)

    return send


def _message(alert: Mapping[str, Any], way: Email) -> EmailMessage:
    message = EmailMessage(policy=SMTP_POLICY)
    message["Subject"] = headline(alert)
    message["From"] = way.sender
    message["To"] = ", ".join(way.to)
    message["Date"] = formatdate()
    message["Message-ID"] = f"<{one_line(delivery_id(alert)).replace(' ', '')}@lookback.invalid>"
    for name, value in _marks(alert).items():
        message[name] = value
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(email_text(alert), cte="base64")
    message.add_attachment(alert_text(alert).encode(), maintype="application", subtype="json", filename="alert.json")
    return message


def _marks(alert: Mapping[str, Any]) -> dict[str, str]:
    """What a receiver can drop repeats by."""
    return {"X-Lookback-Alert-Id": one_line(alert["alert_id"]), "X-Lookback-Revision": str(alert["revision"])}


def _variable(receiver: Receiver, name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise SetupError(f"receiver {receiver.name!r} needs the variable {name} of the environment, which is not set")
    return value

"""Formats alerts for receivers, and decides what to do after an attempt to send one."""

from __future__ import annotations

import datetime as dt
import hashlib
import hmac
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lookback.core.operations.health import NOTE, PROBLEM
from lookback.core.values.columns import to_text
from lookback.core.values.texts import collapse_spaces, cut_end

# Statuses of an alert and a receiver in the table `notifications`. BEGAN marks the time from which on a receiver gets
# alerts; SETTLED, for a receiver and a stream, the time up to which nothing is left to send.
BEGAN, SENT, FAILED, GIVEN_UP, SETTLED = "began", "sent", "failed", "given_up", "settled"
# Pauses after failed attempts double from the first to the maximum.
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 10.0, 600.0
# A receiver's Retry-After is honoured up to this.
MAX_RETRY_AFTER_SECONDS = 3_600.0
# The rule_id of notices of a stream's health, for the `rules` of a receiver.
HEALTH_RULE = "lookback.health"
_MAX_HEADLINE_CHARACTERS, _MAX_ERROR_CHARACTERS = 150, 300
# HTTP statuses that reject this message for good. After any other status a later attempt may succeed.
_REFUSED = frozenset({400, 413, 422})


@dataclass(frozen=True)
class Attempt:
    """The outcome of an attempt.

    Attributes:
        status: sent, failed (try again later) or given_up (do not try again).
        error: Why it failed.
        pause: The pause in seconds that the receiver requested.
    """

    status: str
    error: str = ""
    pause: float = 0.0


# Sends an alert and returns the outcome.
Send = Callable[[Mapping[str, Any]], Attempt]


def format_alert_json(alert: Mapping[str, Any]) -> str:
    """Formats a row of the alerts table as JSON, with its columns in order and times as ISO 8601 with Z."""
    return json.dumps(dict(alert), ensure_ascii=False, default=to_text)


def make_health_notice(status: Mapping[str, Any], now: dt.datetime) -> dict[str, Any]:
    """Makes the notice that a stream is not healthy, as a row of an alert of the rule `lookback.health`.

    While the findings stay the same, so does the id within an hour, so that receivers can drop repeats. Severity is
    high if a finding is a problem, else medium.

    Args:
        status: The stream's status from `lookback status`.
        now: An aware datetime.
    """
    checks = sorted({finding["check"] for finding in status["findings"] if finding["level"] != NOTE})
    is_problem = any(finding["level"] == PROBLEM for finding in status["findings"])
    hour = now.replace(minute=0, second=0, microsecond=0)
    identity = json.dumps([HEALTH_RULE, status["stream"], checks, to_text(hour)], separators=(",", ":"))
    findings = " ".join(f"{each['what']} {each['remedy']}" for each in status["findings"] if each["level"] != NOTE)
    return {
        "alert_id": hashlib.sha256(identity.encode()).hexdigest()[:32],
        "revision": 0,
        "verdict": "raised",
        "rule_id": HEALTH_RULE,
        "rule_version": 0,
        "mode": "active",
        "severity": "high" if is_problem else "medium",
        "stream": status["stream"],
        "key": {},
        "event_id": None,
        "event_time": now,
        "window_start": None,
        "window_end": None,
        "window_complete": None,
        "measures": {},
        "message": f"{status['health']} {findings}",
        "evidence": [],
        "arrival": status["judged"],
        "decided_at": now,
        "entities": {},
        "tags": [],
    }


def make_delivery_id(alert: Mapping[str, Any]) -> str:
    """Returns the alert's id and revision, by which a receiver can drop repeats."""
    return f"{alert['alert_id']}-{alert['revision']}"


def format_headline(alert: Mapping[str, Any]) -> str:
    """Formats an alert as one line of at most 150 characters: `[high] customer-day-spend: 1,200 by customer 17`.

    Event values in the message can neither begin a line nor control a terminal or a mail reader.
    """
    verdict = "" if alert["verdict"] == "raised" else f"{alert['verdict']}: "
    message = f": {alert['message']}" if alert["message"] else ""
    line = collapse_spaces(f"[{alert['severity']}] {verdict}{alert['rule_id']}{message}")
    return cut_end(line, _MAX_HEADLINE_CHARACTERS)


def format_alert_email(alert: Mapping[str, Any]) -> str:
    """Formats an alert for people, with a line for each column. Measures and key are written as name = value."""
    lines = [format_headline(alert), ""]
    for name, value in alert.items():
        if name not in ("message", "severity") and value not in (None, [], {}):
            lines.append(f"{name}: {collapse_spaces(_format_value(value))}")
    return "\n".join(lines) + "\n"


def _format_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} = {to_text(each)}" for key, each in value.items())
    return to_text(value) or ""


def sign(secret: str, body: bytes, seconds: int) -> str:
    """Signs a body: returns `t=<seconds>,v1=<hex>`, the HMAC-SHA-256 of `<seconds>.<body>`.

    `seconds` is the time of sending, in seconds since 1970.
    """
    digest = hmac.new(secret.encode(), f"{seconds}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={seconds},v1={digest}"


def read_http_status(code: int, retry_after: str | None = None) -> Attempt:
    """Returns the outcome that an HTTP status means.

    2xx is sent. 400, 413 and 422 are given up, since they reject this message. Any other status failed, to be retried.
    """
    if 200 <= code < 300:
        return Attempt(SENT)
    if code in _REFUSED:
        return Attempt(GIVEN_UP, f"refused with HTTP status {code}")
    if 300 <= code < 400:
        return Attempt(FAILED, f"HTTP status {code} is a redirect, which is not followed; give the final URL")
    pause = float(retry_after) if retry_after and retry_after.isascii() and retry_after.isdigit() else 0.0
    return Attempt(FAILED, f"HTTP status {code}", min(pause, MAX_RETRY_AFTER_SECONDS))


def make_failed_attempt(error: BaseException) -> Attempt:
    """Returns a failed attempt with the error on one line."""
    return Attempt(FAILED, f"{type(error).__name__}: {collapse_spaces(str(error))}"[:_MAX_ERROR_CHARACTERS])


def pause_seconds(attempts: int) -> float:
    """Returns the seconds to wait after this many failed attempts, at least one: 10, 20, 40 ... at most 600."""
    return min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(attempts - 1, 20))


def is_given_up(
    now: float, give_up_after: float, first_failed: float | None, decided_at: float, down_since: float | None
) -> bool:
    """Returns whether to give up a waiting alert, because it or its receiver has failed for `give_up_after`.

    An alert that was never tried is given up only if it has also waited that long. All times are in seconds.

    Args:
        now: The current time.
        give_up_after: How long to keep trying.
        first_failed: When the alert first failed; None if it was not tried.
        decided_at: When the alert was raised.
        down_since: The receiver's first failure without a success after it; None if it works.
    """
    if first_failed is not None and now - first_failed >= give_up_after:
        return True
    if down_since is None or now - down_since < give_up_after:
        return False
    return now - decided_at >= give_up_after

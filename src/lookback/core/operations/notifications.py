"""What is sent of an alert, and what becomes of an attempt to send it."""

from __future__ import annotations

import datetime as dt
import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lookback.core.operations.health import NOTE, PROBLEM
from lookback.core.values.columns import text_of

# What the table `notifications` says of an alert and a receiver; BEGAN: of a receiver, from when on it hears of alerts;
# SETTLED: of a receiver and a stream, up to when nothing is left to be sent.
BEGAN, SENT, FAILED, GIVEN_UP, SETTLED = "began", "sent", "failed", "given_up", "settled"
# After an attempt that failed: the first pause, and the longest. Seconds.
FIRST_PAUSE, LONGEST_PAUSE = 10.0, 600.0
# What a receiver may ask for by Retry-After.
LONGEST_WISH = 3_600.0
# What receivers of a stream's health name among their `rules`.
HEALTH_RULE = "lookback.health"
_MOST_SUBJECT, _MOST_ERROR = 150, 300
# This message is wrong, and so it stays; any other refusal may be of the receiver, or pass.
_REFUSED = frozenset({400, 413, 422})


@dataclass(frozen=True)
class Attempt:
    """What became of an attempt. status: sent, failed (again later) or given_up (never again); pause: seconds asked for."""

    status: str
    error: str = ""
    pause: float = 0.0


def alert_text(alert: Mapping[str, Any]) -> str:
    """A row of the alerts table as JSON: its columns in order; times are ISO 8601 with Z."""
    return json.dumps(dict(alert), ensure_ascii=False, default=text_of)


def health_notice(status: Mapping[str, Any], now: dt.datetime) -> dict[str, Any]:
    """What receivers are sent where a stream is not healthy: like an alert, of the rule `lookback.health`.

    status: as `lookback status` has it. now: aware. The id is the same for an hour while the same is found, so that
    receivers drop repeats. Severity is high where there is a problem, else medium.
    """
    checks = sorted({finding["check"] for finding in status["findings"] if finding["level"] != NOTE})
    is_problem = any(finding["level"] == PROBLEM for finding in status["findings"])
    hour = now.replace(minute=0, second=0, microsecond=0)
    identity = json.dumps([HEALTH_RULE, status["stream"], checks, text_of(hour)], separators=(",", ":"))
    found = " ".join(f"{each['what']} {each['remedy']}" for each in status["findings"] if each["level"] != NOTE)
    return {
        "alert_id": hashlib.sha256(identity.encode()).hexdigest()[:32], "revision": 0, "verdict": "raised",
        "rule_id": HEALTH_RULE, "rule_version": 0, "mode": "active", "severity": "high" if is_problem else "medium",
        "stream": status["stream"], "key": {}, "event_id": None, "event_time": now, "window_start": None,
        "window_end": None, "window_complete": None, "measures": {}, "message": f"{status['health']} {found}",
        "evidence": [], "arrival": status["judged"], "decided_at": now,
    }  # fmt: skip


def delivery_id(alert: Mapping[str, Any]) -> str:
    """What a receiver can drop repeats by: the alert's id and revision."""
    return f"{alert['alert_id']}-{alert['revision']}"


def headline(alert: Mapping[str, Any]) -> str:
    """One line on an alert, such as `[high] customer-day-spend: 1,200 by customer 17`; at most 150 characters.

    What events brought into the message can begin no line of its own and steer nothing.
    """
    said = "" if alert["verdict"] == "raised" else f"{alert['verdict']}: "
    message = f": {alert['message']}" if alert["message"] else ""
    line = one_line(f"[{alert['severity']}] {said}{alert['rule_id']}{message}")
    return line if len(line) <= _MOST_SUBJECT else line[: _MOST_SUBJECT - 3] + "..."


def email_text(alert: Mapping[str, Any]) -> str:
    """An alert for people: a line a column, measures and key spelled out."""
    lines = [headline(alert), ""]
    for name, value in alert.items():
        if name not in ("message", "severity") and value not in (None, [], {}):
            lines.append(f"{name}: {one_line(_spelled(value))}")
    return "\n".join(lines) + "\n"


def _spelled(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} = {text_of(each)}" for key, each in value.items())
    return text_of(value) or ""


def one_line(text: str) -> str:
    """The text on one line, without what would steer a terminal or a mail reader."""
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())


def signature(secret: str, body: bytes, seconds: int) -> str:
    """`t=<seconds>,v1=<hex>`: HMAC-SHA-256 by the secret over `<seconds>.<body>`. seconds: since 1970, of the sending."""
    digest = hmac.new(secret.encode(), f"{seconds}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={seconds},v1={digest}"


def of_status(code: int, retry_after: str | None = None) -> Attempt:
    """What an HTTP status says: 2xx is sent; 400, 413 and 422 refuse this very message; anything else may pass."""
    if 200 <= code < 300:
        return Attempt(SENT)
    if code in _REFUSED:
        return Attempt(GIVEN_UP, f"refused with HTTP status {code}")
    if 300 <= code < 400:
        return Attempt(FAILED, f"HTTP status {code} leads elsewhere, where nothing is sent; give the final URL")
    wish = float(retry_after) if retry_after and retry_after.isascii() and retry_after.isdigit() else 0.0
    return Attempt(FAILED, f"HTTP status {code}", min(wish, LONGEST_WISH))


def failed(error: BaseException) -> Attempt:
    """An attempt that ended in an error; its words on one line."""
    return Attempt(FAILED, f"{type(error).__name__}: {one_line(str(error))}"[:_MOST_ERROR])


def pause_after(attempts: int) -> float:
    """Seconds to wait after so many attempts that failed, at least one: 10, 20, 40 ... at most 600."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(attempts - 1, 20))


def is_given_up(
    now: float, give_up_after: float, first_failed: float | None, decided_at: float, down_since: float | None
) -> bool:
    """Whether an alert that waits is given up: it was tried for so long, or its receiver was down for so long.

    first_failed: when it was first tried in vain; None if it was not tried. down_since: the receiver's first failure with
    no success after it. An alert that was never tried goes only where it has waited itself for so long. Seconds.
    """
    if first_failed is not None and now - first_failed >= give_up_after:
        return True
    if down_since is None or now - down_since < give_up_after:
        return False
    return now - decided_at >= give_up_after

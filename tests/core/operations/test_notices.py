"""Who hears of an alert, what is sent of it, and what becomes of an attempt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lookback.config import load_receivers
from lookback.core.errors import SetupError
from lookback.core.operations.notifications import (
    FAILED,
    GIVEN_UP,
    SENT,
    format_alert_email,
    format_alert_json,
    format_headline,
    is_given_up,
    make_delivery_id,
    pause_seconds,
    read_http_status,
    sign,
)
from lookback.core.operations.receivers import Email, Receiver, Webhook, find_url_problem, read_receivers
from sample_alert import ALERT

HOOK = {"name": "on-call", "webhook": {"url": "https://hooks.example.com/x"}}
DESK = {
    "name": "desk",
    "email": {"host": "smtp.example.com", "from": "lookback@example.com", "to": ["desk@example.com"]},
}


def read(*receivers: Any) -> tuple[Receiver, ...]:
    return read_receivers({"receivers": list(receivers)}, "notifiers.yml")


def test_receivers_have_what_the_document_says() -> None:
    hook, desk = read(
        {**HOOK, "severity": "high", "rules": ["card-*"], "give_up_after": "2 days", "timeout": "3 seconds"},
        {**DESK, "streams": "payments", "verdicts": ["raised", "suppressed"], "modes": ["active", "shadow"]},
    )
    assert hook == Receiver(
        "on-call", Webhook("https://hooks.example.com/x"), "high", ("card-*",), give_up_after=172_800.0, timeout=3.0
    )
    assert desk.way == Email("smtp.example.com", 587, "lookback@example.com", ("desk@example.com",))
    assert (desk.streams, desk.verdicts, desk.modes) == (("payments",), ("raised", "suppressed"), ("active", "shadow"))
    assert (desk.give_up_after, desk.timeout) == (86_400.0, 10.0)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"name": "On Call"}, "name must be lower-case letters"),
        ({"severity": "worst"}, "severity must be one of info, low, medium, high, critical, got 'worst'"),
        ({"severty": "high"}, "has no key 'severty'; did you mean 'severity'?"),
        ({"verdicts": ["raise"]}, "verdicts must be among raised, suppressed, retracted, got 'raise'"),
        ({"rules": [1]}, "rules must be a list of texts"),
        ({"give_up_after": "soon"}, "give_up_after: "),
        ({"timeout": "0 seconds"}, "timeout must be longer than 0 s"),
        ({"email": DESK["email"]}, "must have either webhook or email"),
        ({"webhook": {}}, "webhook must have either url or url_env"),
        ({"webhook": {"url": "http://hooks.example.com"}}, "url must begin with https://"),
        ({"webhook": {"url_env": "https://secret.example.com"}}, "url_env must be the name of an environment variable"),
    ],
)
def test_wrong_receiver_is_refused_with_its_place(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(SetupError) as caught:
        read({**HOOK, **changes})
    assert problem in str(caught.value)
    assert str(caught.value).startswith("notifiers.yml: receiver ")
    # A secret in the wrong place is not repeated.
    assert "secret.example" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"to": []}, "to must name at least one address"),
        ({"to": ["desk"]}, "must be addresses such as desk@example.com, got 'desk'"),
        ({"from": "a@example.com\nBcc: b@example.com"}, "must be addresses"),
        ({"port": "587"}, "port a number"),
        ({"user_env": "USER"}, "user_env and password_env go together"),
        ({"starttls": False, "user_env": "U", "password_env": "P"}, "a password requires starttls"),
    ],
)
def test_wrong_email_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(SetupError, match=problem):
        read({**DESK, "email": {**DESK["email"], **changes}})


def test_all_problems_are_told_at_once_and_names_are_unique() -> None:
    with pytest.raises(SetupError) as caught:
        read({**HOOK, "severity": "x", "rules": []}, "desk", HOOK, HOOK)
    assert len(str(caught.value).splitlines()) == 3
    assert "two receivers are named 'on-call'" in str(caught.value)


def test_file_that_ships_names_nobody_and_its_examples_are_fine(tmp_path: Path) -> None:
    shipped = Path(__file__).parents[3] / "conf/notifiers.yml"
    with pytest.raises(SetupError, match="names no receiver"):
        load_receivers(shipped.parent)
    lines = shipped.read_text().replace("receivers: []", "receivers:").splitlines()
    (tmp_path / "notifiers.yml").write_text(
        "\n".join(line.replace("# ", "", 1) if line.startswith(("# - ", "#   ")) else line for line in lines)
    )
    assert [receiver.name for receiver in load_receivers(tmp_path)] == ["on-call", "fraud-desk"]


def test_example_of_the_operations_guide_is_fine() -> None:
    page = (Path(__file__).parents[3] / "docs/how-to/notify.md").read_text(encoding="utf-8")
    block = page.partition("```yaml\nreceivers:")[2].partition("```")[0]
    calls, desk = read_receivers(yaml.safe_load(f"receivers:{block}"), "operations.md")
    assert (calls.name, calls.severity, calls.give_up_after, calls.timeout) == ("on-call", "high", 43_200.0, 5.0)
    # What it calls the default is that.
    assert (desk.verdicts, desk.modes) == (Receiver("x", desk.way).verdicts, Receiver("x", desk.way).modes)
    assert isinstance(desk.way, Email)
    assert (desk.way.port, desk.way.starttls) == (587, Email("h", 587, "f", ()).starttls)


@pytest.mark.parametrize(
    ("url", "fine"),
    [
        ("https://example.com/x?y=1", True),
        ("http://localhost:8080/", True),
        ("http://127.0.0.1/", True),
        ("http://[::1]:80/", True),
        ("http://example.com/", False),
        ("http://localhost.example.com/", False),
        ("https://user:word@example.com/", False),
        ("https://example.com/a b", False),
        ("https://example.com/\r\nX: y", False),
        ("https:///x", False),
        ("https://example.com:port/", False),
        ("file:///etc/passwd", False),
        ("ftp://localhost/", False),
    ],
)
def test_urls(url: str, fine: bool) -> None:
    assert (find_url_problem(url) == "") is fine


@pytest.mark.parametrize(
    ("receiver", "alert", "wanted"),
    [
        ({}, {}, True),
        # By default what is shadow or suppressed stays here; a retraction is sent.
        ({}, {"mode": "shadow"}, False),
        ({}, {"verdict": "suppressed"}, False),
        ({}, {"verdict": "retracted"}, True),
        ({"modes": ["shadow"]}, {"mode": "shadow"}, True),
        ({"severity": "high"}, {"severity": "high"}, True),
        ({"severity": "high"}, {"severity": "critical"}, True),
        ({"severity": "high"}, {"severity": "medium"}, False),
        ({}, {"severity": "info"}, False),
        ({"severity": "info"}, {"severity": "info"}, True),
        ({}, {"queue": False}, True),
        ({"rules": ["day-*", "x"]}, {}, True),
        ({"rules": ["day"]}, {}, False),
        ({"streams": ["logins"]}, {}, False),
    ],
)
def test_what_a_receiver_hears_of(receiver: dict[str, Any], alert: dict[str, Any], wanted: bool) -> None:
    (found,) = read({**HOOK, **receiver})
    assert found.wants({**ALERT, **alert}) is wanted


def test_body_has_the_columns_in_order() -> None:
    body = json.loads(format_alert_json(ALERT))
    assert list(body) == list(ALERT)
    assert (body["event_time"], body["key"], body["measures"]) == (
        "2026-03-01T10:00:00Z",
        {"payer": "Zoë"},
        {"total": "1200.50"},
    )
    assert "Zoë" in format_alert_json(ALERT)
    assert make_delivery_id({**ALERT, "revision": 3}) == "0123456789abcdef0123456789abcdef-3"


def test_headline_is_one_line_whatever_an_event_brought() -> None:
    assert format_headline(ALERT) == "[high] day-spend: 1,200.50 by Zoë"
    assert format_headline({**ALERT, "verdict": "retracted"}) == "[high] retracted: day-spend: 1,200.50 by Zoë"
    assert format_headline({**ALERT, "message": ""}) == "[high] day-spend"
    hostile = format_headline({**ALERT, "message": "a\r\nBcc: x@example.com\u2028b\x1b[2J\u202e"})
    assert hostile == "[high] day-spend: a Bcc: x@example.com b [2J"
    assert len(format_headline({**ALERT, "message": "x" * 133})) == 150
    assert format_headline({**ALERT, "message": "x" * 134}).endswith("xxx...")
    assert len(format_headline({**ALERT, "message": "x" * 134})) == 150


def test_letter_has_a_line_a_column_and_no_other() -> None:
    text = format_alert_email({**ALERT, "key": {"payer": "a\nverdict: retracted"}})
    assert text.splitlines()[0] == format_headline(ALERT)
    assert "key: payer = a verdict: retracted" in text.splitlines()
    assert "verdict: raised" in text.splitlines()
    assert "event_time: 2026-03-01T10:00:00Z" in text.splitlines()
    assert not [line for line in text.splitlines() if line.startswith("evidence")]


def test_signature_is_over_time_and_body() -> None:
    # By openssl: printf '1772359200.{}' | openssl dgst -sha256 -hmac key
    assert sign("key", b"{}", 1772359200) == f"t=1772359200,v1={SIGNED}"


SIGNED = "c28e0c36309aa9f4b27eee1f325826991e5e111bdb577ceaed76c950bd1d07cd"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (200, SENT), (204, SENT), (299, SENT), (301, FAILED), (307, FAILED), (400, GIVEN_UP), (401, FAILED), (404, FAILED),
        (408, FAILED), (413, GIVEN_UP), (422, GIVEN_UP), (429, FAILED), (500, FAILED), (503, FAILED),
    ],
)  # fmt: skip
def test_what_a_status_means(code: int, status: str) -> None:
    assert read_http_status(code).status == status
    assert bool(read_http_status(code).error) is (status != SENT)


@pytest.mark.parametrize(
    ("wish", "pause"), [("30", 30.0), ("9999", 3_600.0), (None, 0.0), ("soon", 0.0), ("-5", 0.0), ("²", 0.0)]
)
def test_receiver_may_ask_for_a_pause(wish: str | None, pause: float) -> None:
    assert read_http_status(503, wish).pause == pause


def test_pauses_double_up_to_ten_minutes() -> None:
    assert [pause_seconds(attempts) for attempts in (1, 2, 3, 6, 7, 8, 5_000)] == [10, 20, 40, 320, 600, 600, 600]


@pytest.mark.parametrize(
    ("first_failed", "decided_at", "down_since", "over"),
    [
        # now is 1000, given up after 100.
        (901.0, 0.0, None, False),
        (900.0, 0.0, None, True),
        # Never tried: only of a receiver that was down for so long, and an alert that has waited for so long.
        (None, 0.0, None, False),
        (None, 0.0, 901.0, False),
        (None, 900.0, 900.0, True),
        (None, 901.0, 900.0, False),
    ],
)
def test_when_an_alert_is_given_up(
    first_failed: float | None, decided_at: float, down_since: float | None, over: bool
) -> None:
    assert is_given_up(1_000.0, 100.0, first_failed, decided_at, down_since) is over

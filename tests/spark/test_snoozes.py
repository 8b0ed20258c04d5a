"""Snoozes: what the queue and notifications leave out meanwhile, and what is there again afterwards (contract 11.5)."""

from __future__ import annotations

import datetime as dt
import json
import time
from threading import Event
from typing import TYPE_CHECKING, Any

import pytest

from lookback.cli import main
from lookback.core.errors import ReviewError
from lookback.core.operations.notifications import SENT, Attempt
from lookback.core.operations.receivers import Receiver, Webhook
from lookback.spark.operations.notify import Notifier
from lookback.spark.review import note_on_snoozed, open_queue, record_review, show_snoozes
from lookback.spark.snoozes import end_snoozes, snooze
from lookback.spark.tables.schemas import ALERTS
from payins import STREAM, STREAMS, publish
from sample_alert import ALERT

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark
NOW = dt.datetime.now(dt.timezone.utc)
HOUR = dt.timedelta(hours=1)
GROUPED = {"stream": STREAM.name, "window": "1 hour", "measures": {"n": "count(*)"}, "when": "n >= 2"}


def raise_alerts(tables: Tables, *alerts: tuple[str, str, dict[str, str | None]], **changes: Any) -> None:
    rows = [
        {**ALERT, "alert_id": name, "rule_id": rule_id, "key": key, "stream": STREAM.name, "decided_at": NOW, **changes}
        for name, rule_id, key in alerts
    ]
    tables.append(tables.spark.createDataFrame(rows, ALERTS).coalesce(1), "alerts")


def queue(tables: Tables) -> set[str]:
    return {row["alert_id"] for row in open_queue(tables).collect()}


@pytest.fixture
def desk(ready: Tables) -> Tables:
    """Two rules, one of them of two fields, and five open alerts."""
    publish(ready, [
        {"rule_id": "by-customer", "group_by": ["customer"], **GROUPED},
        {"rule_id": "by-both", "group_by": ["customer", "shop"], **GROUPED},
    ])  # fmt: skip
    raise_alerts(
        ready, ("c17", "by-customer", {"customer": "17"}), ("c5", "by-customer", {"customer": "5"}),
        ("a17", "by-both", {"customer": "17", "shop": "a"}), ("b17", "by-both", {"customer": "17", "shop": "b"}),
        ("n17", "by-both", {"customer": "17", "shop": None}),
    )  # fmt: skip
    return ready


@pytest.mark.long
def test_c11_5_queue_leaves_out_what_is_snoozed_while_it_is(desk: Tables) -> None:
    everything = {"c17", "c5", "a17", "b17", "n17"}
    assert note_on_snoozed(desk) == ""
    later, until = NOW + 24 * HOUR, NOW + 48 * HOUR
    snooze(desk, STREAMS, "by-both", {"customer": "17", "shop": "b"}, until=until, reason="a known shop", author="ann")
    assert queue(desk) == everything - {"b17"}
    # An alert stands for its rule and its whole key, a NULL in it included.
    assert snooze(desk, STREAMS, "n17", until=until, reason="seen").key == {"customer": "17", "shop": None}
    assert queue(desk) == everything - {"b17", "n17"}
    # Part of a key; any rule; and one that has not begun.
    snooze(desk, STREAMS, "*", {"customer": "17"}, since=later, until=until, reason="a test card", author="bob")
    assert queue(desk) == everything - {"b17", "n17"}
    place = desk.identifier("snoozes")
    desk.spark.sql(
        f"INSERT INTO {place} (rule_id, key, until, reason) VALUES (NULL, map('customer', '17'), now() + interval 1 hour, 'SQL'), "
        "('by-customer', NULL, now() + interval 1 hour, 'rebuilt')"
    )
    assert queue(desk) == set()
    # The clock ends them.
    desk.spark.sql(f"UPDATE {place} SET `from` = now() - interval 2 hours, until = now() WHERE reason = 'rebuilt'")
    assert queue(desk) == {"c5"}
    columns = ("rule_id", "key", "author", "reason", "state", "alerts")
    assert [tuple(row[name] for name in columns) for row in show_snoozes(desk)] == [
        ("by-customer", None, "", "rebuilt", "expired", 0),
        (None, {"customer": "17"}, "", "SQL", "active", 4),
        (None, {"customer": "17"}, "bob", "a test card", "pending", 0),
        ("by-both", {"customer": "17", "shop": "b"}, "ann", "a known shop", "active", 1),
        ("by-both", {"customer": "17", "shop": None}, desk.current_user, "seen", "active", 1),
    ]
    assert note_on_snoozed(desk).startswith("3 snoozes leave out 6 open alerts; ")
    assert desk.read("alerts").count() == 5
    # Ended by hand: those of just this key, pending ones too.
    assert end_snoozes(desk, STREAMS, "*", {"customer": "17"}) == 2
    assert queue(desk) == everything - {"b17", "n17"}
    assert end_snoozes(desk, STREAMS, "n17") == 1
    assert queue(desk) == everything - {"b17"}


def test_c11_5_reason_and_end_are_asked_for(desk: Tables) -> None:
    end = NOW + HOUR
    with pytest.raises(ReviewError, match="needs a reason"):
        snooze(desk, STREAMS, "by-customer", until=end, reason=" ")
    with pytest.raises(ReviewError, match="must end after its begin and after now"):
        snooze(desk, STREAMS, "by-customer", until=NOW - HOUR, reason="late")
    with pytest.raises(ReviewError, match="must end after its begin"):
        snooze(desk, STREAMS, "by-customer", since=end, until=end, reason="empty")
    with pytest.raises(ReviewError, match="did you mean 'by-customer'"):
        snooze(desk, STREAMS, "by-custome", until=end, reason="unknown")
    with pytest.raises(ReviewError, match="field 'shop' is not one of the group_by of rule by-customer"):
        snooze(desk, STREAMS, "by-customer", {"shop": "a"}, until=end, reason="no such field")
    with pytest.raises(ReviewError, match="did you mean 'customer'"):
        snooze(desk, STREAMS, "*", {"custome": "a"}, until=end, reason="no such field")
    assert desk.read("snoozes").isEmpty()


@pytest.mark.long
def test_c11_5_notifications_wait_and_come_for_what_is_still_open(desk: Tables) -> None:
    came: list[tuple[str, int]] = []

    def send(alert: Mapping[str, Any]) -> Attempt:
        came.append((alert["alert_id"], alert["revision"]))
        return Attempt(SENT)

    now = [time.time() + 1]
    senders = {Receiver("desk", Webhook("http://localhost/"), give_up_after=60.0): send}
    notifier = Notifier(desk, [STREAM.name], senders, since=NOW, clock=lambda: now[0])

    def run() -> list[tuple[str, int]]:
        came.clear()
        notifier.run(once=True, every=0.0, stop=Event(), report=lambda _: None)
        return sorted(came)

    snooze(desk, STREAMS, "by-both", until=NOW + HOUR, reason="known")
    assert run() == [("c17", 0), ("c5", 0)]
    assert run() == []
    raise_alerts(desk, ("a17", "by-both", {"customer": "17", "shop": "a"}), revision=1)
    record_review(desk, "b17", "benign", "ann")
    assert run() == []
    # Nothing new but the time: of a17 the last revision, b17 has been reviewed.
    now[0] += 3_600
    assert run() == [("a17", 1), ("n17", 0)]
    assert run() == []
    # A snooze that is ended early lets its alerts go at once.
    snooze(desk, STREAMS, "by-customer", {"customer": "7"}, until=NOW + 5 * HOUR, reason="known")
    raise_alerts(desk, ("c7", "by-customer", {"customer": "7"}))
    assert run() == []
    end_snoozes(desk, STREAMS, "by-customer", {"customer": "7"})
    assert run() == [("c7", 0)]


@pytest.mark.long
def test_c11_5_the_commands(desk: Tables, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conf = tmp_path / "conf/streams"
    conf.mkdir(parents=True)
    (conf / "payins.yml").write_text(json.dumps(STREAM.to_dict()), encoding="utf-8")
    words = ["--root", str(desk.root), "--conf", str(tmp_path / "conf")]
    said = [
        "snooze",
        "by-both",
        "--key",
        "customer=17",
        "--until",
        "8 hours",
        "--reason",
        "known\x1b[2J",
        "--author",
        "ann",
    ]
    assert main([*words, *said]) == 0
    assert "The queue leaves out by-both, customer = 17 until " in capsys.readouterr().out
    assert main([*words, "alerts", "--queue", "--json"]) == 0
    out, err = capsys.readouterr()
    assert {json.loads(line)["alert_id"] for line in out.splitlines()} == {"c17", "c5"}
    assert "1 snooze leaves out 3 open alerts" in err
    assert main([*words, "snoozes"]) == 0
    out = capsys.readouterr().out
    assert "ann" in out
    assert "\x1b" not in out
    assert main([*words, "snooze", "by-both", "--key", "customer=17", "--end"]) == 0
    assert capsys.readouterr().out == "1 snooze ended\n"
    assert main([*words, "snoozes", "--json"]) == 0
    assert capsys.readouterr().out == ""
    assert main([*words, "snoozes", "--all", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "expired"
    assert main([*words, "snooze", "by-both", "--until", "8 hours"]) == 2
    assert "a snooze needs its end and a reason" in capsys.readouterr().err
    assert main([*words, "snooze", "by-both", "--until", "soon", "--reason", "r"]) == 2
    assert "or after a duration such as '8 hours', got 'soon'" in capsys.readouterr().err
    assert main([*words, "snooze", "by-both", "--key", "customer", "--until", "1 hour", "--reason", "r"]) == 2
    assert "FIELD=VALUE" in capsys.readouterr().err

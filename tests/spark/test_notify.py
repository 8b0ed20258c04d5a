"""Alerts out of real tables: what is sent, recorded, tried again and given up."""

from __future__ import annotations

import datetime as dt
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import pytest

from lookback.cli import main
from lookback.core.operations.notifications import BEGAN, FAILED, GIVEN_UP, SENT, Attempt
from lookback.core.operations.receivers import Receiver, Webhook
from lookback.spark.operations.notify import DeliveryCounts, Notifier
from lookback.spark.tables.lakehouse import Tables
from lookback.spark.tables.schemas import ALERTS
from sample_alert import ALERT, AT
from workspace_server import Answer, WorkspaceServer

if TYPE_CHECKING:
    from collections.abc import Iterable

pytestmark = pytest.mark.spark
NOW = AT.timestamp()
HOUR = 3_600.0


class Inbox:
    """A receiver's side: what came, and what is answered by rule_id; fine unless said."""

    def __init__(self) -> None:
        self.came: list[tuple[str, int]] = []
        self.answers: dict[str, Attempt] = {}
        self.down = False

    def __call__(self, alert: Mapping[str, Any]) -> Attempt:
        self.came.append((alert["alert_id"], alert["revision"]))
        return Attempt(FAILED, "down") if self.down else self.answers.get(alert["rule_id"], Attempt(SENT))


class Clock:
    """Seconds since 1970, which pass when they are told to."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def raise_alerts(tables: Tables, *names: str, **changes: Any) -> None:
    """Alerts named so, in one commit."""
    rows = [{**ALERT, "alert_id": name, **changes} for name in names]
    tables.append(tables.spark.createDataFrame(rows, ALERTS).coalesce(1), "alerts")


def notes(tables: Tables, *columns: str) -> list[tuple[Any, ...]]:
    found = tables.read("notifications").where(f"status <> '{BEGAN}'").orderBy("sent_at", "alert_id", "receiver")
    return [tuple(row) for row in found.select(*columns).collect()]


def passes(notifier: Notifier) -> DeliveryCounts:
    return notifier.run(once=True, every=0.0, stop=Event(), report=lambda _: None)


def receiver(name: str, **more: Any) -> Receiver:
    return Receiver(name, Webhook("http://localhost/"), **more)


@pytest.mark.long
def test_each_alert_is_sent_once_to_each_receiver_also_over_restarts_and_a_kill(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, calls, desk = Clock(), Inbox(), Inbox()
    senders = {receiver("calls", severity="high"): calls, receiver("desk"): desk}

    def notifier(streams: Iterable[str] = ("payments",)) -> Notifier:
        return Notifier(tables, list(streams), senders, clock=clock)

    raise_alerts(tables, "before", decided_at=AT - dt.timedelta(seconds=1))
    # A new receiver hears of what comes.
    assert passes(notifier()) == DeliveryCounts()
    raise_alerts(tables, "a1", "a2")
    raise_alerts(tables, "low", severity="low")
    raise_alerts(tables, "shadow", mode="shadow")
    raise_alerts(tables, "kept", verdict="suppressed")
    raise_alerts(tables, "foreign", stream="logins")
    clock.now += 60
    # Killed after it has sent and before it has recorded.
    with monkeypatch.context() as patch:
        patch.setattr(Tables, "append", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            passes(notifier())
    assert calls.came == [("a1", 0), ("a2", 0)]
    assert passes(notifier()).sent == 5
    # The same ids and revisions again, by which the receiver drops them.
    assert calls.came == [("a1", 0), ("a2", 0)] * 2
    assert desk.came == [("a1", 0), ("a2", 0), ("low", 0)] * 2
    assert passes(notifier()) == DeliveryCounts()
    clock.now += 1
    raise_alerts(tables, "a1", revision=1, verdict="retracted")
    assert passes(notifier()).sent == 2
    assert passes(notifier()) == DeliveryCounts()
    assert calls.came[4:] == [("a1", 1)]
    columns = ("alert_id", "revision", "receiver", "status", "attempts", "error")
    assert notes(tables, *columns)[:2] == [("a1", 0, "calls", SENT, 1, None), ("a1", 0, "desk", SENT, 1, None)]
    # Another stream's, when it is asked for.
    assert passes(notifier(("payments", "logins"))).sent == 2


@pytest.mark.long
def test_receiver_that_is_down_stops_no_other_and_gets_what_it_missed(
    tables: Tables, caplog: pytest.LogCaptureFixture
) -> None:
    clock, calls, desk = Clock(), Inbox(), Inbox()
    senders = {receiver("calls", give_up_after=2 * HOUR): calls, receiver("desk"): desk}
    notifier = Notifier(tables, ["payments"], senders, since=AT, clock=clock)
    raise_alerts(tables, "a1", "a2", "a3")
    desk.answers["day-spend"] = Attempt(SENT)
    calls.down = True
    counts = passes(notifier)
    # The first failure spares it the rest.
    assert (counts.sent, counts.failed, counts.waiting) == (3, 1, 3)
    assert calls.came == [("a1", 0)]
    # Not before its pause is over.
    clock.now += 9
    assert passes(notifier) == DeliveryCounts()
    clock.now += 1
    # Another is tried first, so that no message holds up the others.
    assert passes(notifier).failed == 1
    assert calls.came == [("a1", 0), ("a2", 0)]
    calls.down = False
    clock.now += 21
    assert passes(notifier).sent == 3
    assert sorted(calls.came[2:]) == [("a1", 0), ("a2", 0), ("a3", 0)]
    assert [row for row in notes(tables, "alert_id", "receiver", "status", "attempts") if row[1] == "calls"] == [
        ("a1", "calls", FAILED, 1), ("a2", "calls", FAILED, 1), ("a1", "calls", SENT, 2), ("a2", "calls", SENT, 2),
        ("a3", "calls", SENT, 1),
    ]  # fmt: skip
    # Down for good: given up after two hours, with a warning, and another notifier knows since when.
    calls.down = True
    clock.now += 1
    raise_alerts(tables, "b1", "b2")
    assert passes(notifier).failed == 1
    clock.now += 2 * HOUR
    raise_alerts(tables, "young", decided_at=AT + dt.timedelta(hours=1.5))
    with caplog.at_level(logging.WARNING, logger="lookback"):
        counts = passes(Notifier(tables, ["payments"], senders, clock=clock))
    assert (counts.given_up, counts.waiting) == (2, 1)
    given_up = [row for row in notes(tables, "alert_id", "status") if row[1] == GIVEN_UP]
    assert sorted(given_up) == [("b1", GIVEN_UP), ("b2", GIVEN_UP)]
    assert "receiver=calls alert=b1 revision=0 given_up" in caplog.text


@pytest.mark.long
def test_message_that_is_refused_is_given_up_and_one_that_fails_holds_up_no_other(tables: Tables) -> None:
    clock, calls = Clock(), Inbox()
    notifier = Notifier(tables, ["payments"], {receiver("calls", give_up_after=HOUR): calls}, since=AT, clock=clock)
    calls.answers = {
        "bad": Attempt(GIVEN_UP, "refused with HTTP status 400"),
        "odd": Attempt(FAILED, "HTTP status 500"),
    }
    raise_alerts(tables, "a-bad", rule_id="bad")
    raise_alerts(tables, "b-odd", rule_id="odd")
    raise_alerts(tables, "c-fine")
    assert passes(notifier) == DeliveryCounts(0, 1, 1, 2)
    clock.now += 10
    counts = passes(notifier)
    assert (counts.sent, calls.came[-2:]) == (1, [("c-fine", 0), ("b-odd", 0)])
    assert passes(notifier) == DeliveryCounts()
    # Its own first failure counts, as the receiver is well.
    clock.now += HOUR
    assert passes(notifier).given_up == 1
    assert notes(tables, "alert_id", "status", "attempts", "error")[-1] == ("b-odd", GIVEN_UP, 3, "HTTP status 500")


@pytest.mark.long
def test_command_sends_by_the_file_and_goes_on_until_it_is_stopped(
    tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conf = tmp_path / "conf"
    (conf / "streams").mkdir(parents=True)
    shipped = Path(__file__).parents[2] / "conf/streams/payments.yml"
    (conf / "streams/payments.yml").write_text(shipped.read_text(encoding="utf-8"))
    (conf / "notifiers.yml").write_text("receivers: [{name: calls, webhook: {url_env: CALLS_URL}, timeout: 2 seconds}]")
    command = ["notify", "--root", str(tables.root), "--conf", str(conf), "--since", "2026-03-01", "--json"]
    monkeypatch.setattr("lookback.spark.platform.session.get_spark", lambda *_, **__: tables.spark)
    monkeypatch.setattr("lookback.commands.options.signal.signal", lambda *_: None)
    with WorkspaceServer() as server:
        monkeypatch.setenv("CALLS_URL", f"{server.url}/alerts")
        server.replies["POST /alerts"] = [Answer({}, 500), Answer({})]
        raise_alerts(tables, "a1")
        assert main([*command, "payments", "--once"]) == 1
        assert capsys.readouterr().out == '{"sent": 0, "failed": 1, "given_up": 0, "waiting": 1}\n'
        # Another process, so another pause; the alert's own has passed when it looks again.
        stopped: list[Callable[..., Any]] = []
        monkeypatch.setattr("lookback.commands.options.signal.signal", lambda _, stop: stopped.append(stop))
        real = Notifier.send

        def send(self: Notifier) -> DeliveryCounts:
            self.clock = lambda: time.time() + 3_600
            counts = real(self)
            stopped[0]()
            return counts

        monkeypatch.setattr(Notifier, "send", send)
        assert main([*command, "--all", "--every", "1 second"]) == 0
        assert capsys.readouterr().out == '{"sent": 1, "failed": 0, "given_up": 0, "waiting": 0}\n'
        assert [asked.headers["X-Lookback-Alert-Id"] for asked in server.asked] == ["a1", "a1"]


@pytest.mark.long
def test_a_pass_reads_no_files_of_what_is_settled_however_long_the_history_is(tables: Tables) -> None:
    clock, desk, day = Clock(), Inbox(), dt.timedelta(days=1)
    senders = {receiver("desk"): desk}

    def notifier(*streams: str) -> Notifier:
        return Notifier(tables, list(streams or ("payments",)), senders, since=AT, clock=clock)

    raise_alerts(tables, "a1", "a2")
    raise_alerts(tables, "foreign", stream="logins")
    assert passes(notifier()).sent == 2
    folders = [Path(tables.path_or_name(name)) for name in ("alerts", "notifications")]
    old = [file for folder in folders for file in folder.glob("*.parquet")]
    clock.now += 3 * 24 * HOUR
    # Nobody was told of it while no notifier ran.
    raise_alerts(tables, "b1", decided_at=AT + day)
    desk.down = True
    assert passes(notifier()).waiting == 1
    desk.down = False
    clock.now += HOUR
    assert passes(notifier()).sent == 1
    marks = tables.read("notifications").where("status = 'settled'").select("receiver", "stream", "sent_at")
    # Up to the alert that waited, and when it was sent up to a day ago: an evaluation may be about to commit.
    at = [AT + day, AT + dt.timedelta(days=2, hours=1)]
    assert [row["sent_at"].astimezone(dt.timezone.utc) for row in marks.orderBy("sent_at").collect()] == at
    # Another stream has no mark yet, and hears of what was raised since the receiver began.
    assert passes(notifier("payments", "logins")).sent == 1
    assert desk.came == [("a1", 0), ("a2", 0), ("b1", 0), ("b1", 0), ("foreign", 0)]

    # Who opens a file of before fails.
    for file in old:
        file.unlink()
    clock.now += HOUR
    raise_alerts(tables, "c1", decided_at=dt.datetime.fromtimestamp(clock.now, dt.timezone.utc))
    assert passes(notifier("payments", "logins")).sent == 1
    assert desk.came[-1] == ("c1", 0)

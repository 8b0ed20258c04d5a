"""Rows older than the settings keep them go, those that anything needs stay, on real Delta."""

from __future__ import annotations

import datetime as dt
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException

from lookback.config import RETAINED
from lookback.core.engine.schedule import DELETED, NO_CHANGES
from lookback.core.operations.notifications import SENT, Attempt
from lookback.core.operations.receivers import Receiver, Webhook
from lookback.spark.operations import maintenance, retention
from lookback.spark.operations.forget import forget
from lookback.spark.operations.maintenance import Maintenance, maintain
from lookback.spark.operations.notify import Notifier
from lookback.spark.operations.retention import ORDER, Deletion, delete_old
from lookback.spark.operations.status import event_account
from lookback.spark.review import explain, open_queue
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from lookback.spark.tables.schemas import (
    ALERTS,
    INGESTS,
    LABELS,
    LATE_EVENTS,
    LISTS,
    NOTIFICATIONS,
    REVIEWS,
    RULE_LOG,
    SNOOZES,
)
from payins import (
    RULES,
    STREAM,
    STREAMS,
    append,
    make_events,
    publish,
    replay_of_tables,
    replayed_alerts,
    stored_alerts,
)
from sample_alert import ALERT

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark
NOW = dt.datetime.now(dt.timezone.utc)
YEAR = dt.timedelta(days=365)


def ago(days: float) -> dt.datetime:
    return NOW - dt.timedelta(days=days)


def write(tables: Tables, name: str, schema: Any, rows: list[Any]) -> None:
    tables.append(tables.spark.createDataFrame(rows, schema).coalesce(1), name)


def texts(tables: Tables, name: str, *columns: str) -> set[str]:
    """The rows of a table, the columns of each joined by a space."""
    return {" ".join(map(str, row)) for row in tables.read(name).select(*columns).collect()}


@pytest.mark.long
def test_every_table_of_the_settings_has_its_order_and_maintain_deletes_by_them(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(ORDER) == set(RETAINED)
    write(tables, "alerts", ALERTS, [{**ALERT, "decided_at": NOW}])
    done: list[Any] = []
    monkeypatch.setattr(maintenance, "delete_old", lambda _, *chosen: done.append(chosen) or Deletion(7, 2, "left"))
    monkeypatch.setattr(maintenance, "_optimize", lambda *_: (0, 0, ""))
    monkeypatch.setattr(maintenance, "_find_vacuumed", lambda *_: 0)
    monkeypatch.setattr(maintenance, "PRODUCT_TABLES", ["alerts"])
    found: Maintenance = maintain(tables, {}, {}, {"alerts": YEAR, "metrics": YEAR})
    (alerts,) = found.tables
    assert done == [("alerts", YEAR)]
    assert (alerts.expired, alerts.open, alerts.note) == (7, 2, "left")
    assert found.older is not None
    assert found.older.count == 0


@pytest.mark.long
def test_rows_that_are_older_go_and_what_rebuilds_and_notifiers_read_stays(tables: Tables) -> None:
    old, young = ago(400), ago(300)
    alerts = [("a1", 0, old, 5), ("a1", 1, young, 9), ("a2", 0, old, 6), ("a3", 0, old, 6), ("a4", 0, young, 8)]
    names = ("alert_id", "revision", "decided_at", "arrival")
    write(tables, "alerts", ALERTS, [{**ALERT, **dict(zip(names, row, strict=True))} for row in alerts])
    write(tables, "reviews", REVIEWS, [("a2", "confirmed", 0, "kim", "", young)])
    late = [("e1", 4, 60), ("e2", 7, 60), ("e3", 4, -1), ("e4", 6, 60)]
    rows = [("payments", event, old, arrival, late_by, "recorded") for event, arrival, late_by in late]
    write(tables, "late_events", LATE_EVENTS, [*rows, ("logins", "e5", old, 1, 60, "recorded")])
    log = [("activated", old, 3), ("failed", old, 5), ("failed", young, 9), ("session_closed", old, 6)]
    logged = [("payments", "r", 1, action, "", 0, arrival, at, None, None, None) for action, at, arrival in log]
    write(tables, "rule_log", RULE_LOG, logged)
    write(tables, "ingests", INGESTS, [("payments", n, n, 0, 0, 1, at, at, None) for n, at in ((1, old), (2, young))])
    labels = [("payments", "e1", True, None, old, None, None), ("payments", "e2", True, None, young, None, None)]
    write(tables, "labels", LABELS, labels)
    write(tables, "snoozes", SNOOZES, [("r", None, old, at, f"until {at:%Y}", "kim") for at in (old, young)])

    kept = [("a", f"{at}", None, "kim", old, at, None) for at in (young, None)]
    write(tables, "lists", LISTS, [("a", "x", None, "kim", old, old, None), *kept])

    found = {name: delete_old(tables, name, YEAR) for name in ORDER}

    # Open was a3: a1 was revised since, a2 reviewed.
    assert found["alerts"] == Deletion(3, 1)
    assert texts(tables, "alerts", "alert_id", "revision") == {"a1 1", "a4 0"}
    assert {row["alert_id"] for row in open_queue(tables, days=365).collect()} == {"a1", "a4"}
    assert texts(tables, "reviews", "alert_id") == {"a2"}
    # Commit 6 is the last that alerts say was judged before; of logins nothing says so; e3 was beyond max_future.
    assert found["late_events"].rows == 2
    assert texts(tables, "late_events", "event_id") == {"e2", "e3", "e5"}
    assert found["ingests"].rows == 1
    assert texts(tables, "ingests", "offered") == {"2"}
    assert (found["labels"].rows, texts(tables, "labels", "event_id")) == (1, {"e2"})
    assert (found["snoozes"].rows, texts(tables, "snoozes", "reason")) == (1, {f"until {young:%Y}"})
    assert (found["lists"].rows, texts(tables, "lists", "value")) == (1, {f"{young}", "None"})
    assert found["rule_log"].rows == 2
    assert texts(tables, "rule_log", "action", "arrival") == {
        "activated 3", "failed 9", "late_events_deleted 6", "alerts_deleted 6", "log_deleted 6",
    }  # fmt: skip
    assert not set(DELETED.values()) & NO_CHANGES
    (message,) = [row["message"] for row in tables.read("rule_log").where("action = 'alerts_deleted'").collect()]
    assert message.startswith("3 rows of alerts from before ")
    assert message.endswith("Z, through commit 6, are deleted by the settings' retention")
    # Again there is nothing to do, and nothing is written.
    before = tables.version("rule_log")
    assert [delete_old(tables, name, YEAR) for name in ORDER] == [Deletion()] * len(ORDER)
    assert tables.version("rule_log") == before


@pytest.mark.long
def test_an_alert_is_not_sent_again_once_what_was_sent_has_been_deleted(tables: Tables) -> None:
    came: list[str] = []

    def notifier(now: dt.datetime) -> Notifier:
        def send(alert: Any) -> Attempt:
            came.append(alert["alert_id"])
            return Attempt(SENT)

        desk = Receiver("desk", Webhook("http://localhost/"))
        return Notifier(tables, ["payments"], {desk: send}, since=ago(100), clock=now.timestamp)

    write(tables, "alerts", ALERTS, [{**ALERT, "alert_id": "a1", "decided_at": ago(90)}])
    notifier(ago(90)).send()
    # No mark is a day further than the begin yet, so a notifier would read it again.
    notes = [
        (None, 0, "desk", "began", None, None, ago(100), None),
        ("x", 0, "gone", SENT, 1, None, ago(99), "payments"),
    ]
    write(tables, "notifications", NOTIFICATIONS, notes)
    write(tables, "alerts", ALERTS, [{**ALERT, "alert_id": "a2", "decided_at": ago(50)}])
    notifier(ago(49.5)).send()
    assert came == ["a1", "a2"]

    # Its last mark is of half a day before a2, and rows of a day before that may be read again.
    found = delete_old(tables, "notifications", dt.timedelta(days=7))

    assert found.rows == 1
    assert texts(tables, "notifications", "alert_id", "status") == {
        "None began", "x sent", "None settled", "a2 sent",
    }  # fmt: skip
    notifier(ago(1)).send()
    assert came == ["a1", "a2"]


@pytest.mark.long
def test_where_others_keep_writing_old_rows_are_left_and_it_is_told(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Conflict(PySparkException):
        pass

    attempts: list[str] = []

    def refused(*_: Any) -> Any:
        def delete(_: Any) -> None:
            attempts.append("")
            raise Conflict("[DELTA_CONCURRENT_APPEND] of another writer")

        return SimpleNamespace(delete=delete)

    write(tables, "ingests", INGESTS, [("payments", 1, 1, 0, 0, 1, ago(400), ago(400), None)])
    monkeypatch.setattr(type(tables), "delta", refused)
    monkeypatch.setattr(retention, "_PATIENCE_SECONDS", 0.5)
    found = delete_old(tables, "ingests", YEAR)
    assert found == Deletion(0, 0, "other writers kept conflicting; old rows are left for the next run")
    assert len(attempts) > 1
    monkeypatch.undo()
    assert delete_old(tables, "ingests", YEAR).rows == 1


@pytest.mark.long
def test_what_was_deleted_beside_an_evaluation_stays_away_also_after_a_rebuild(ready: Tables) -> None:
    tables, checkpoint = ready, checkpoint_folder(ready, STREAM)
    publish(tables, RULES)
    events = make_events(150, seed=11)
    append(tables, events[:75])
    evaluation = Evaluation(tables, STREAM, STREAMS, checkpoint, every="0 seconds").start()
    try:
        evaluation.wait_until(lambda report: (report.arrival or 0) >= 3, timeout=120)
        everything = {name: delete_old(tables, name, dt.timedelta(0)) for name in ORDER}
        append(tables, events[75:])
        evaluation.wait_until(lambda report: (report.arrival or 0) >= 6, timeout=120)
    finally:
        evaluation.stop()
    # A rule of these suppresses some.
    assert everything["alerts"].rows > everything["alerts"].open > 3
    assert everything["late_events"].rows > 3
    replayed = [row for row in replayed_alerts(replay_of_tables(tables)) if row.arrival > 3]
    assert stored_alerts(tables) == replayed
    late, log = (sorted(texts(tables, name, "*")) for name in ("late_events", "rule_log"))
    account = event_account(tables, STREAM, 6, since=4)
    assert account.closes
    assert account.recorded + account.discarded + account.evaluated == 75

    Evaluation(tables, STREAM, STREAMS, checkpoint, once=True, rebuild=True).run()

    assert stored_alerts(tables) == replayed
    assert sorted(texts(tables, "late_events", "*")) == late
    assert sorted(texts(tables, "rule_log", "*")) == log
    alert = tables.read("alerts").orderBy("arrival").head()
    assert alert is not None
    assert explain(tables, STREAMS, alert["alert_id"]).consistent
    report = forget(tables, STREAM, "customer = 3")
    assert report.rows["alerts"] > 0
    assert tables.read("alerts").where("key['customer'] = '3'").isEmpty()

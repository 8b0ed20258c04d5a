"""The desks of authors and streams on real Spark and Delta: what is pressed is in the tables, what is cancelled is gone."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import SparkSession
from widgets import field, find, find_all, read_rows

from lookback import notebook
from lookback.config import Settings, load_rule_document
from lookback.core.rules.gate import Gate
from lookback.desk.authoring import Authoring
from lookback.desk.running import RunningEvaluation
from lookback.desk.streams import StreamDesk
from lookback.spark.replay.backtest import backtest
from lookback.spark.rules import RulesTable
from lookback.spark.tables.lakehouse import Tables
from lookback.spark.tables.schemas import ALERTS
from payins import STREAM, STREAMS, append, make_events, rule
from sample_alert import ALERT

pytestmark = pytest.mark.spark
_SECONDS = 120


def open_desk(tables: Tables, conf: Path, gate: Gate | None = None) -> Authoring:
    return Authoring(RulesTable(tables, STREAMS, gate is not None), STREAM, Settings(str(tables.root), conf, gate=gate))


def press(desk: Authoring, name: str) -> str:
    """Presses a button, waits for what it started, and returns the sentence in the status."""
    find(desk, name).click()
    assert desk.run is not None
    assert desk.run.wait(_SECONDS)
    return desk.status


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def fill_in(desk: Authoring) -> None:
    field(desk, "rule-id").value = "often"
    field(desk, "group-by").value = ("customer",)
    field(desk, "window-lookback").value = "5 minutes"
    find_all(desk, "parameter-value")[0].value = "2"


@pytest.mark.long
def test_a_rule_goes_from_the_form_to_the_running_stream(ready: Tables, tmp_path: Path) -> None:
    """Form, check, quick look, what-if, file and rules table, as a person presses one after the other."""
    append(ready, make_events(60, seed=3))
    desk = open_desk(ready, tmp_path)
    field(desk, "rule-id").value = "Often"
    assert "must be 1 to 100 lower-case letters" in find(desk, "field-rule-id").children[1].value
    find(desk, "look").click()
    assert desk.status == "Problem: fix 1 problem first, see Check"
    fill_in(desk)
    assert "Raised when n >= 2, where n is the number of events" in find(desk, "words").value
    assert press(desk, "look").endswith("of 60 events judged; nothing was written.")
    _, picture, *_ = find(desk, "look-result").children
    assert 'alt="often: what it would have flagged"' in picture.value

    find(desk, "vary").value = "limit=1,2,4,30"
    assert press(desk, "backtest") == "60 events judged; nothing was published."
    (slider,) = find_all(desk, "slider")
    assert (slider.value, [value for _, value in slider.options]) == (2, [1, 2, 4, 30])
    alerts = find(desk, "alerts-picture").value
    slider.value = 30
    assert find(desk, "chosen").value.startswith("With limit 30: 0 alerts")
    assert find(desk, "alerts-picture").value != alerts
    slider.value = 4
    find(desk, "take").click()
    assert desk.text.get("parameters") == {"limit": 4}
    assert ready.read("rules").isEmpty()

    find(desk, "save").click()
    assert load_rule_document(tmp_path / "rules/often.yml") == desk.text.document
    find(desk, "author").value, find(desk, "comment").value = "ann", "first"
    assert press(desk, "publish") == "often is published as version 1, active."
    (published,) = RulesTable(ready, STREAMS).rows()
    assert (published.document, published.author, published.comment) == (desk.text.document, "ann", "first")
    find(desk, "vary").value = "limit"
    find(desk, "backtest").click()
    assert "'limit' is not NAME=VALUE,VALUE" in desk.status


@pytest.mark.long
def test_the_gate_is_shown_and_the_draft_made_active(ready: Tables, tmp_path: Path) -> None:
    """Contract 10.8: under a gate Publish makes a draft, and Activate asks what `rules activate` asks."""
    append(ready, make_events(60, seed=3))
    desk = open_desk(ready, tmp_path, Gate(backtest_days=1, max_alerts_per_day=1e9, approval=True))
    fill_in(desk)
    find(desk, "author").value = "ann"
    assert press(desk, "gate") == "1 condition of the gate not met."
    shown = [cell for row in read_rows(find(desk, "gate-table").value) for cell in row]
    assert shown[4:6] == ["at most 1e+09 alerts a day in a backtest of 1 days", "met"]
    assert "ask somebody other than ann to activate it" in shown
    assert (
        press(desk, "publish")
        == "often version 1 is a draft: it is not in force yet; the settings have a gate: Activate makes it active."
    )
    assert press(desk, "activate") == "Version 1 is not active: not all conditions are met."
    find(desk, "author").value = "bob"
    assert press(desk, "activate") == "Version 1 is active as version 2."
    field(desk, "severity").value = "low"
    assert "version 2 in the table has another document; publish this one first" in press(desk, "activate")


def _sleep(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    time.sleep(600)
    yield from frames


def test_a_cancelled_run_leaves_no_job_behind(spark: SparkSession) -> None:
    tracker, seen = spark.sparkContext.statusTracker(), list[str]()

    def work(_: Callable[[str], None]) -> None:
        spark.range(1).mapInPandas(_sleep, "id long").collect()

    run = RunningEvaluation(
        spark,
        work,
        on_line=seen.append,
        on_done=lambda _: seen.append("done"),
        on_failure=seen.append,
        on_cancelled=lambda: seen.append("cancelled"),
    ).start()
    wait_until(lambda: bool(tracker.getActiveJobsIds()))
    run.cancel()
    assert run.wait(30)
    assert seen == ["cancelled"]
    wait_until(lambda: not tracker.getActiveJobsIds())
    # What is run here afterwards is no part of it.
    assert spark.range(3).count() == 3


def test_a_cancelled_backtest_leaves_nothing_running_and_nothing_kept(
    ready: Tables, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(ready, make_events(60, seed=3))
    context = spark.sparkContext

    def list_kept() -> set[int]:
        return set(context._jsc.getPersistentRDDs())

    # What other tests kept may be dropped at any time.
    before = list_kept()
    desk = open_desk(ready, tmp_path)
    fill_in(desk)
    begun: set[int] = set()
    counted = backtest.__globals__["find_events_behind"]

    def cancel_between(*given: Any) -> Any:
        # The events are judged, and what Spark keeps of them is there.
        begun.update(list_kept() - before)
        find(desk, "cancel").click()
        return counted(*given)

    monkeypatch.setitem(backtest.__globals__, "find_events_behind", cancel_between)
    find(desk, "backtest").click()
    assert find(desk, "look").disabled
    assert not find(desk, "cancel").disabled
    assert desk.run is not None
    assert desk.run.wait(_SECONDS)
    assert begun
    assert desk.status == "Backtest was cancelled; nothing is running."
    wait_until(lambda: not context.statusTracker().getActiveJobsIds())
    wait_until(lambda: not list_kept() - before)
    assert find(desk, "cancel").disabled
    assert not find(desk, "look").disabled
    assert find(desk, "what-if").children == ()


@pytest.mark.long
def test_the_stream_is_steered_from_the_list_of_its_rules(ready: Tables, spark: SparkSession) -> None:
    rules = RulesTable(ready, STREAMS)
    rules.push(rule("often", when="n >= :limit", parameters={"limit": 3}, message=""))
    rules.push(rule("rare", when="n > 100", message=""))
    now = dt.datetime.now(dt.timezone.utc)
    own = {**ALERT, "rule_id": "often", "stream": STREAM.name, "decided_at": now}
    old = now - dt.timedelta(hours=1)
    rows = [
        {**own, "alert_id": "a"}, {**own, "alert_id": "b"}, {**own, "alert_id": "b", "revision": 1},
        {**own, "alert_id": "c", "verdict": "suppressed"}, {**own, "alert_id": "d", "decided_at": old},
        {**own, "alert_id": "e", "mode": "shadow"}, {**own, "alert_id": "f", "stream": "payments"},
    ]  # fmt: skip
    ready.append(spark.createDataFrame(rows, ALERTS).coalesce(1), "alerts")
    desk = StreamDesk(rules, STREAM, seconds=0)
    assert [(each.rule_id, each.status, each.per_minute) for each in desk.rules] == [
        ("often", "active", 0.4),
        ("rare", "active", 0.0),
    ]
    find(desk, "value").value = "x"
    find(desk, "set").click()
    assert "must be a number, such as 3" in desk.status
    find(desk, "value").value = "5"
    find(desk, "set").click()
    assert desk.status == "published often version 2 with limit = 5."
    find(desk, "pause").click()
    assert desk.status == "often is published as version 3, paused."
    paused = rules.rows()[0]
    assert (paused.version, paused.status, (paused.document or {})["parameters"]) == (3, "paused", {"limit": 5})
    find(desk, "resume").click()
    assert desk.status == "often is published as version 4, active."
    find(desk, "rules").value = "rare"
    find(desk, "pause").click()
    assert [(row.rule_id, row.status) for row in rules.rows()] == [("often", "active"), ("rare", "paused")]


@pytest.mark.long
def test_a_continuous_evaluation_runs_beside_the_desk_until_stop(ready: Tables, tmp_path: Path) -> None:
    append(ready, make_events(50, seed=3))
    rules = RulesTable(ready, STREAMS)
    rules.push(rule("often", when="n >= 2", message=""))
    workspace = notebook.Workspace(Settings(str(ready.root), tmp_path))
    vars(workspace).update(tables=ready, streams=STREAMS, stream=STREAM)
    desk = StreamDesk(rules, STREAM, seconds=0.2)
    assert notebook.evaluate_stream(workspace, "continuous", view="desk", desk=desk) == []
    try:
        wait_until(lambda: any(each.per_minute > 0 for each in desk.rules))
        wait_until(lambda: find(desk, "progress-picture").value != "")
        find(desk, "pause").click()
        wait_until(lambda: "paused" in {row["action"] for row in ready.read("rule_log").select("action").collect()})
    finally:
        find(desk, "stop").click()
    assert desk.status == "The evaluation has ended; the next one continues from there."
    assert not desk.is_refreshing

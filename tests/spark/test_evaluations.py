"""Alerts of several evaluations of a stream: after `evaluate --fresh` the last one counts, and each by what it obeyed itself."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F  # noqa: N812

from lookback.spark.challenger import compare_versions
from lookback.spark.explaining.counted import find_counted_events
from lookback.spark.figures import RuleFigures
from lookback.spark.labels import read_labels
from lookback.spark.newwindows import NewWindows
from lookback.spark.review import explain, open_queue, record_review
from lookback.spark.rules import RulesTable
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from lookback.spark.tables.schemas import ALERTS, REVIEWS
from payins import START, STREAM, STREAMS, append, publish, rule, window
from sample_alert import ALERT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark
SECOND = 1_000_000
BOTH = {**STREAMS, "others": replace(STREAM, name="others")}


def event(name: str, seconds: float, amount: int, arrival: int) -> dict[str, Any]:
    at = START + round(seconds * SECOND)
    return {"id": name, "at": at, "customer": 1, "shop": "a", "amount": f"{amount}.00", "arrival": arrival}


def evaluate(tables: Tables, **options: Any) -> None:
    folder = checkpoint_folder(tables, STREAM) + ("-fresh" if options else "")
    Evaluation(tables, STREAM, BOTH, folder, once=True, **options).run()


def counted_in(rows: DataFrame) -> dict[str, set[str | None]]:
    """The ids of the events behind each alert."""
    found = defaultdict[str, set[str | None]](set)
    for row in rows.collect():
        found[row["alert_id"]].add(row["event_id"])
    return dict(found)


@pytest.mark.long
def test_c10_4_an_alert_is_the_row_of_the_last_evaluation_that_wrote_it(ready: Tables):
    begun = dt.datetime.now(dt.timezone.utc) - dt.timedelta(minutes=10)
    before, after = begun - dt.timedelta(minutes=5), begun + dt.timedelta(minutes=5)

    def alert(name: str, decided_at: dt.datetime, **values: Any) -> dict[str, Any]:
        base = {"alert_id": name, "stream": STREAM.name, "rule_id": "r", "key": {"customer": "1"}, "event_id": name}
        return {**ALERT, **base, "decided_at": decided_at, **values}

    append(
        ready, [event(name, at, 1, 1) for at, name in enumerate(("kept", "gone", "alone", "twice", "seq", "e4", "e5"))]
    )
    publish(ready, [rule("r")])
    ready.append_rows([{"stream": STREAM.name, "action": "begun_afresh", "arrival": 1, "logged_at": begun}], "rule_log")
    alerts = [
        alert("kept", before), alert("kept", before, revision=1, verdict="retracted"), alert("kept", after, message="new"),
        alert("gone", before), alert("gone", after, verdict="suppressed"), alert("alone", before),
        alert("twice", before), alert("twice", after, message="new"),
        alert("seq", before, evidence=["e4", "seq"]), alert("seq", after, evidence=["e5", "seq"], verdict="suppressed"),
    ]  # fmt: skip
    ready.append(ready.spark.createDataFrame(alerts, ALERTS).coalesce(1), "alerts")

    queue = [(row["alert_id"], row["message"]) for row in open_queue(ready).collect()]
    assert sorted(queue) == [("alone", ALERT["message"]), ("kept", "new"), ("twice", "new")]
    (of_rule, _) = RuleFigures(ready, STREAM).by_rule().select("alerts", "flagged").collect()
    assert tuple(of_rule) == (3, 3)
    # A person has seen the row that was there at the time, whatever an evaluation wrote later.
    seen = [("seq", "confirmed", 0, "kim", "", before), ("twice", "benign", 0, "kim", "", after)]
    ready.append(ready.spark.createDataFrame(seen, REVIEWS), "reviews")
    labels = {row["event_id"]: row["positive"] for row in read_labels(ready, STREAM).collect()}
    assert labels == {"e4": True, "seq": True, "twice": False}
    decision = record_review(ready, "kept", "confirmed", "kim")
    assert (decision.revision, decision.last, decision.message) == (0, 0, "new")
    assert record_review(ready, "kept", "unclear", "kim", revision=1).last == 0


@pytest.mark.long
def test_c10_7_a_challenger_is_compared_by_the_last_evaluation(ready: Tables):
    begun = dt.datetime.now(dt.timezone.utc) - dt.timedelta(minutes=10)
    before, after = begun - dt.timedelta(minutes=5), begun + dt.timedelta(minutes=5)
    publish(ready, [rule("r")])
    RulesTable(ready, STREAMS).push(rule("r", when="n >= 2"), status="shadow")

    def log(action: str, version: int | None, arrival: int | None, logged_at: dt.datetime) -> None:
        named = {"stream": STREAM.name, "rule_id": None if version is None else "r", "version": version}
        ready.append_rows([{**named, "action": action, "arrival": arrival, "logged_at": logged_at}], "rule_log")

    log("shadowed", 2, 5, before)
    log("begun_afresh", None, 9, begun)
    log("shadowed", 2, None, after)
    base = {**ALERT, "stream": STREAM.name, "rule_id": "r", "rule_version": 1, "key": {"customer": "1"}}
    shadow = {**base, "mode": "shadow", "rule_version": 2}
    rows = [
        {**base, "alert_id": "old", "event_id": "old", "arrival": 7, "decided_at": before},
        {**base, "alert_id": "a", "event_id": "a", "arrival": 3, "decided_at": after},
        {**shadow, "alert_id": "s", "event_id": "a", "arrival": 3, "decided_at": after},
    ]
    ready.append(ready.spark.createDataFrame(rows, ALERTS).coalesce(1), "alerts")

    compared = compare_versions(ready, STREAMS, "r")
    assert compared.since is None
    counts = {row["side"]: row["alerts"] for row in compared.count().collect()}
    assert counts == {"both": 1, "only active": 0, "only shadow": 0}


# 0 a10 b30 |      70 c10 d30  | v2 counts amounts above 20 |  140 e10 f30 |    210 g30
# old: v1 has {a, b} at d, v2 has {f} at g                        fresh: v2 has {b}, {d} and {f}
@pytest.mark.long
def test_c10_9_each_row_is_explained_and_its_events_counted_by_what_its_evaluation_obeyed(ready: Tables):
    document = window("minutes", {"tumbling": "1 minute"}, group_by=[])
    publish(ready, [document])
    append(ready, [event("a", 0, 10, 1), event("b", 1, 30, 1), event("c", 70, 10, 2), event("d", 71, 30, 2)])
    evaluate(ready)
    RulesTable(ready, STREAMS).push({**document, "where": "amount > 20"})
    append(ready, [event("e", 140, 10, 3), event("f", 141, 30, 3), event("g", 210, 30, 4)])
    evaluate(ready)
    last = (
        ready.read("alerts")
        .where("rule_version = 2")
        .withColumns({"revision": F.lit(1), "verdict": F.lit("retracted")})
    )
    ready.append(last.select(*ready.read("alerts").columns).localCheckpoint(), "alerts")
    evaluate(ready, fresh=True)

    rows = ready.read("alerts").orderBy("decided_at", "revision").collect()
    assert [(row["rule_version"], row["revision"]) for row in rows] == [(1, 0), (2, 0), (2, 1), (2, 0), (2, 0), (2, 0)]
    shared = rows[1]["alert_id"]
    assert [row["alert_id"] for row in rows].count(shared) == 3
    explained = explain(ready, STREAMS, shared)
    assert (explained.alert["revision"], explained.alert["decided_at"], explained.consistent) == (
        0,
        rows[-1]["decided_at"].astimezone(dt.timezone.utc),
        True,
    )
    assert explain(ready, STREAMS, shared, revision=1).alert["verdict"] == "retracted"

    newest = (
        ready.read("alerts").groupBy("alert_id").agg(F.max_by(F.struct("*"), "decided_at").alias("row")).select("row.*")
    )
    behind = counted_in(find_counted_events(ready, STREAMS, newest))
    starts = {row["alert_id"]: (row["rule_version"], row["window_start"].second) for row in rows}
    by_window = sorted((starts[name], sorted(ids, key=str)) for name, ids in behind.items())
    assert by_window == [((1, 0), ["a", "b"]), ((2, 0), ["b"]), ((2, 0), ["d"]), ((2, 0), ["f"])]
    figures = RuleFigures(ready, STREAM)
    assert {row["event_id"] for row in figures.flagged.collect()} == {"a", "b", "d", "f"}
    assert figures.unexplained.isEmpty()


# In one batch an advance ends the window, and a version moves the rule to another stream.
@pytest.mark.long
def test_c10_9_alerts_of_several_streams_are_counted_where_a_version_moved_their_rule(ready: Tables):
    document = window("minutes", {"tumbling": "1 minute"}, group_by=[])
    publish(ready, [document])
    append(ready, [event("a", 0, 10, 1)])
    evaluate(ready)
    rules = RulesTable(ready, BOTH)
    rules.command(
        "advance", STREAM.name, time=dt.datetime.fromtimestamp(START / SECOND + 60, dt.timezone.utc).isoformat()
    )
    rules.push({**document, "stream": "others"})
    evaluate(ready)
    log = ready.read("rule_log").where("action in ('advance', 'retired')").collect()
    assert len(log) == 2
    assert len({row["batch_id"] for row in log}) == 1
    (row,) = ready.read("alerts").collect()
    elsewhere = {**ALERT, "alert_id": "elsewhere", "stream": "unknown", "rule_id": "minutes", "event_id": None}
    ready.append(ready.spark.createDataFrame([elsewhere], ALERTS), "alerts")

    behind = counted_in(find_counted_events(ready, BOTH, ready.read("alerts")))
    assert behind == {row["alert_id"]: {"a"}, "elsewhere": {None}}
    assert RuleFigures(ready, STREAM, streams=BOTH).unexplained.isEmpty()


def test_health_looks_at_the_last_evaluation_alone(ready: Tables) -> None:
    now = dt.datetime(2026, 3, 1, 10, tzinfo=dt.timezone.utc)
    times = [now - dt.timedelta(minutes=minutes) for minutes in (50, 40, 10, 5)]
    rows = [{"metrics_id": str(at), "stream": STREAM.name, "measured_at": at, "events": 100} for at in times]
    ready.append_rows(rows, "metrics")

    def count_recent() -> int:
        found = ready.ask("health_samples", stream=STREAM.name, since=now - dt.timedelta(hours=1)).collect()
        return sum(row["is_recent"] for row in found)

    assert count_recent() == 4
    begun = {"action": "begun_afresh", "arrival": 1, "logged_at": now - dt.timedelta(minutes=20)}
    ready.append_rows([{"stream": "another", **begun}], "rule_log")
    assert count_recent() == 4
    ready.append_rows([{"stream": STREAM.name, **begun}], "rule_log")
    assert count_recent() == 2


def test_a_checkpoint_that_is_there_goes_on_and_what_was_judged_stays_judged(
    ready: Tables, caplog: pytest.LogCaptureFixture
) -> None:
    rules, folder = RulesTable(ready, STREAMS), checkpoint_folder(ready, STREAM)
    publish(ready, [{"rule_id": "all", "stream": STREAM.name, "where": "amount > 0"}])
    append(ready, [event("a", 0, 10, 1)])
    assert NewWindows(rules).describe_past([STREAM.name]) == ""
    for _ in range(2):
        Evaluation(ready, STREAM, STREAMS, folder, once=True, fresh=True).run()
    (text,) = (each for each in caplog.messages if "--fresh" in each)
    assert text.startswith(f"{folder} exists, so the evaluation goes on where it ended")
    assert ready.read("alerts").count() == 1
    assert (
        NewWindows(rules).describe_past([STREAM.name]).startswith("events that were judged before are not judged again")
    )
    assert NewWindows(rules).describe_past([]) == ""

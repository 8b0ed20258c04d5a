"""A sequence whose steps have keys of their own, on the real stream: shards, a delete, a warm start, a rebuild (12.6)."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cases import STREAMS
from test_equals_oracle import regression, run_oracle

from lookback.core.rules.compiling import compile_rule
from lookback.core.streams.blocks import TRIED
from lookback.spark.explaining.counted import find_counted_events
from lookback.spark.explaining.explanations import explain, explain_event
from lookback.spark.replay.flagging import _mark_concerned
from lookback.spark.rules import RulesTable
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from stored_cases import append, assert_proved, written

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark
STREAM = STREAMS["plain"]
RULE: dict[str, Any] = {
    "rule_id": "r1",
    "stream": "tx",
    "group_by": ["c"],
    "sequence": {
        "within": "15 microseconds",
        "steps": [{"name": "login", "where": "k = 'x'"}, {"name": "remote", "where": "k = 'y'", "key": ["n"]}],
        "until": {"where": "k = 'z'", "key": ["n"]},
    },
    "message": "{c} from {remote.c}",
}
# Eight places, of which events connect one with another; five events a commit.
ROWS = [
    {"id": f"e{at:03}", "at": at, "c": at * 3 % 8, "n": at * 5 % 7, "k": "xyxyxyz"[at * 4 % 11 % 7], "arrival": 1 + at // 5}
    for at in range(100)
]  # fmt: skip
# The event that commit 13 deletes connects, and a later connection to the same place would name it.
GONE, DELETED = 57, 13
LATER = [row | {"arrival": row["arrival"] + (row["arrival"] >= DELETED)} for row in ROWS]


def evaluate(tables: Tables, **options: Any) -> None:
    folder = checkpoint_folder(tables, STREAM)
    limits = {"maxFilesPerTrigger": "2"}
    Evaluation(tables, STREAM, {"tx": STREAM}, folder, once=True, admission=limits, default_shards=3, **options).run()


def part(first: int, last: int) -> list[dict[str, Any]]:
    plain = {"a": "0.00", "d": 0.0}
    return [plain | row for row in LATER if first <= row["arrival"] <= last]


def judge_first(tables: Tables) -> RulesTable:
    """Judges the commits up to 15 in two runs, with a delete between them."""
    tables.create(STREAM)
    rules = RulesTable(tables, {"tx": STREAM})
    rules.push(RULE)
    append(tables, part(1, 12), STREAM.fields)
    evaluate(tables)
    tables.delta("tx").delete(f"id = '{LATER[GONE]['id']}'")
    append(tables, part(14, 15), STREAM.fields)
    evaluate(tables)
    return rules


def list_expected(last: int) -> list[tuple[Any, ...]]:
    """The rows of alerts up to a commit. The next commit with events finds the deleted one gone."""
    case = regression("step keys", [RULE], [row for row in LATER if row["arrival"] <= last])
    expected = run_oracle(case | {"deleted": [(GONE, DELETED + 1)]}).alerts
    assert run_oracle(case).alerts != expected
    return sorted(expected, key=repr)


@pytest.mark.long
def test_c12_6_the_stream_judges_each_key_once_whatever_the_shards(tables: Tables) -> None:
    judge_first(tables)
    assert written(tables) == list_expected(15)


@pytest.mark.long
def test_c12_6_a_warm_start_a_rebuild_and_explanations_find_each_key_of_an_event(tables: Tables) -> None:
    rules = judge_first(tables)
    # The same rule once more, with the history of its keys.
    rules.push(RULE | {"rule_id": "r2"})
    append(tables, part(16, 17), STREAM.fields)
    evaluate(tables)
    assert_proved(tables, STREAM)
    # The state is lost, and made anew from the tables.
    shutil.rmtree(Path(checkpoint_folder(tables, STREAM)))
    append(tables, part(18, 21), STREAM.fields)
    evaluate(tables, rebuild=True)

    alerts = written(tables)
    assert [alert for alert in alerts if alert[2] == "r1"] == list_expected(21)
    since = {rule_id: min(alert[-1] for alert in alerts if alert[2] == rule_id) for rule_id in ("r1", "r2")}
    assert since["r2"] > since["r1"]
    about = Counter((alert[6], alert[-2]) for alert in alerts if alert[-1] >= since["r2"])
    assert set(about.values()) == {2}
    assert len(about) >= 5

    # An alert is explained by all events of its key, in whatever field they have it.
    streams = {"tx": STREAM}
    rows = tables.read("alerts").where("rule_id = 'r1'").collect()
    longest = max(rows, key=lambda row: (len(row["evidence"]), row["event_id"]))
    explained = explain(tables, streams, longest["alert_id"])
    assert explained.consistent
    assert [event for step in explained.steps for event in step.events["id"]] == longest["evidence"]
    counted = find_counted_events(tables, streams, tables.read("alerts").where("rule_id = 'r1'"))
    listed = {(row["alert_id"], row["event_id"]) for row in counted.collect()}
    assert listed == {(row["alert_id"], event) for row in rows for event in row["evidence"]}
    why = explain_event(tables, streams, "r1", longest["event_id"])
    assert dict(why.key) == dict(longest["key"])
    assert longest["alert_id"] in {alert["alert_id"] for alert in why.alerts}
    silent = next(row for row in part(1, 10) if row["k"] == "y" and row["id"] not in {r["event_id"] for r in rows})
    why = explain_event(tables, streams, "r1", silent["id"])
    assert dict(why.key) == {"c": str(silent["n"])}
    assert why.reasons[-1].name == "sequence"


def test_c12_6_events_of_every_key_of_an_alert_are_judged_again_to_name_those_behind_it(tables: Tables) -> None:
    rule = compile_rule(RULE, STREAM)
    rows = [(at, key, other, "insert") for at, (key, other) in enumerate([(1, 9), (9, 1), (9, 9)])]
    events = tables.spark.createDataFrame(rows, "id int, c int, n int, _change_type string")
    key = '[{"key": "c", "value": "1"}]'
    last = tables.spark.createDataFrame([(0, "raised", key)], f"{TRIED} int, verdict string, key string")
    marked = _mark_concerned(events, STREAM, last, {(rule.key, fields): [0] for fields in rule.keys})
    found = {row["id"]: row["_change_type"] for row in marked.select("id", "_change_type").collect()}
    assert found == {0: "insert", 1: "insert", 2: "delete"}

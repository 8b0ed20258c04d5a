"""Expressions in keys, through the stream: dispatch, several shards, explanations, backtests, figures, snoozes."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import lookback
from alert_rows import collect_alerts, list_alerts
from lookback.core.errors import ReviewError
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.coverage import find_coverage
from lookback.core.streams.blocks import unpack_events
from lookback.core.streams.declarations import Declarations
from lookback.spark.batches.dispatch import Dispatch
from lookback.spark.checkpoints.checkpoint import Checkpoint
from lookback.spark.explaining.counted import find_counted_events
from lookback.spark.explaining.explanations import explain, explain_event
from lookback.spark.figures import RuleFigures
from lookback.spark.replay import history, tasks
from lookback.spark.replay.backtest import Candidate, backtest
from lookback.spark.snoozes import list_snoozes, snooze
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from payins import STREAM, STREAMS, append, make_events, publish, replayed_alerts, rule, sequence, stored_alerts, window
from spark.test_dispatch import LABELS, changes

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark
# An error for customer 3, and NULL without a customer.
RISKY = {"part": "60 div (customer - 3)"}
SHOP = {"at_shop": "upper(coalesce(shop, 'none'))"}
KEYED = {"group_by": [SHOP], "entities": ["at_shop"], "message": "{at_shop}"}
RULES: list[dict[str, Any]] = [
    rule("risky", group_by=["shop", RISKY], message="{part}", when="n > 1 and coalesce(part, -60) < 0"),
    rule("shared", group_by=[{"outlet": "UPPER(coalesce(SHOP, 'none'))"}], message="{outlet}"),
    rule("one", **KEYED, when="n > 2 and at_shop <> 'NONE'", suppress="1 minute"),
    {"rule_id": "each", "stream": STREAM.name, **KEYED, "when": "amount > 40 and at_shop = 'A'", "suppress": "20 seconds"},
    {**window("minutes", {"tumbling": "1 minute"}), **KEYED, "when": "n > 2 and at_shop <> 'NONE'"},
    {**window("visits", {"session": "10 seconds"}), "group_by": [RISKY, {"cents": "amount % 1 > 0.5"}], "message": "{cents}"},
    {**sequence("steps", [{"name": "first", "where": "amount > 40"}, {"name": "then", "where": "amount < 20"}]), **KEYED},
]  # fmt: skip


def test_c12_5_dispatch_sends_an_event_by_the_value_of_an_expression_and_its_fields_alone(tmp_path: Path) -> None:
    documents = [
        rule("a", group_by=[{"part": "customer % 2"}], where="amount > 9", message=""),
        rule("b", group_by=[RISKY], where="amount between 3 and 5", message=""),
    ]
    coverage = find_coverage(compile_rule(each, STREAM) for each in documents)
    (blocks,) = Dispatch(Declarations.of(STREAM), coverage, LABELS, Checkpoint(tmp_path))([changes()])
    homes: dict[int, set[int]] = {}
    found = set()
    for shard, payload in enumerate(blocks.column("payload").to_pylist()):
        events, _ = unpack_events(payload, STREAM)
        assert set(events.columns) == {"id", "at", "position", "customer", "amount"}
        for name, customer in zip(events.id_texts, events.columns["customer"].to_list(), strict=True):
            found.add(name)
            if int(name[1:]) > 9 and int(name[1:]) % 4 and customer != 3:
                homes.setdefault(customer % 2, set()).add(shard)
    # Each value is in one shard; an event whose key has an error is sent, so that the failure is logged, unless `where`
    # is false; it is NULL for e24.
    assert found == {"e3", "e5", "e24", *(f"e{n}" for n in range(40) if n > 9 and n % 4)}
    assert all(len(shards) == 1 for shards in homes.values()), homes


@pytest.mark.long
def test_c12_5_the_stream_gives_what_replay_gives_and_explains_it(ready: Tables) -> None:
    events = make_events(250, seed=12)
    publish(ready, RULES)
    append(ready, events)
    folder = checkpoint_folder(ready, STREAM)
    Evaluation(ready, STREAM, STREAMS, folder, once=True, shards=3, admission={"maxFilesPerTrigger": "3"}).run()
    expected = lookback.replay(RULES, events, STREAM)
    assert stored_alerts(ready) == replayed_alerts(expected) != []
    assert {alert.rule_id for alert in expected.alerts} == {each["rule_id"] for each in RULES}
    failed = ready.read("rule_log").where("action = 'failed'").select("rule_id").distinct().collect()
    assert {row["rule_id"] for row in failed} >= {"risky", "visits"}
    for document in RULES:
        own = [alert for alert in expected.alerts if alert.rule_id == document["rule_id"]]
        for alert in (own[0], own[-1]):
            explained = explain(ready, STREAMS, alert.alert_id, revision=alert.revision)
            assert explained.consistent, (alert, explained.notes)
            assert explained.key == alert.key
        if own[0].event_id is not None:
            found = explain_event(ready, STREAMS, document["rule_id"], own[0].event_id)
            assert (found.is_seen, found.key) == (True, own[0].key)
    standing = ready.read("alerts").where("rule_id in ('minutes', 'visits') and verdict = 'raised'")
    counted = find_counted_events(ready, STREAMS, standing.dropDuplicates(["alert_id"]))
    assert counted.where("event_id is null").isEmpty()
    figures = {row["rule_id"]: row for row in RuleFigures(ready, STREAM).by_rule().collect()}
    assert figures["one"]["cases"] == len(
        {alert.key["at_shop"] for alert in expected.alerts if alert.rule_id == "one" and alert.verdict == "raised"}
    )
    ends = dt.datetime.now(dt.timezone.utc) + dt.timedelta(days=1)
    snooze(ready, STREAMS, "one", key={"at_shop": "A"}, until=ends, reason="known", author="ann")
    (listed,) = list_snoozes(ready, dt.datetime(2020, 1, 1, tzinfo=dt.timezone.utc))
    covered = [
        alert
        for alert in expected.alerts
        if alert.rule_id == "one" and alert.key["at_shop"] == "A" and alert.verdict == "raised"
    ]
    assert (listed["key"], listed["alerts"]) == ({"at_shop": "A"}, len(covered))
    snooze(ready, STREAMS, "*", key={"at_shop": "Ü"}, until=ends, reason="known", author="ann")
    for subject in ("one", "*"):
        with pytest.raises(ReviewError, match="'outlets' is not one of"):
            snooze(ready, STREAMS, subject, key={"outlets": "A"}, until=ends, reason="known", author="ann")


@pytest.mark.long
def test_c12_5_a_backtest_gives_the_alerts_of_replay_and_the_events_behind_them(
    ready: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "_SPAN_EVENTS", 60)
    monkeypatch.setattr(tasks, "_SHARD_EVENTS", 100)
    events = make_events(250, seed=12)
    append(ready, events)
    with backtest(ready, STREAM, [Candidate(each) for each in RULES]) as result:
        assert sorted(collect_alerts(result.alerts)) == sorted(list_alerts(lookback.replay(RULES, events, STREAM)))
        assert all(figures.flagged for figures in result.figures)

"""Features: what rules measure of each event as it arrives, with its label (contract 12.11)."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
import yaml
from pyspark.sql import functions as F  # noqa: N812

from lookback.cli import main
from lookback.core.errors import SetupError
from lookback.core.values.columns import to_text
from lookback.spark.replay import history, tasks
from lookback.spark.replay.backtest import Candidate
from lookback.spark.replay.features import compute_features
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from payins import MORE_RULES, RULES, START, STREAM, STREAMS, append, make_events, publish, rule
from spark.test_backtest import label, lose_feed

if TYPE_CHECKING:
    from lookback.spark.replay.features import Features
    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark
MEASURES = {
    "n": "count(*)", "total": "sum(amount)", "mean": "avg(amount)", "spread": "stddev_samp(amount)",
    "middle": "median(amount)", "most": "max(amount) filter (where shop = 'a')", "shops": "count(distinct shop)",
    "seen": "collect_set(shop)", "amounts": "collect_set(amount)", "before": {"measure": "last(shop)", "window": {"lookback": "2 minutes", "delay": "1 second"}},
    "latest": "max(at)", "third": "max(cast(amount as double) / 3)",
}  # fmt: skip
PLAIN = {"measures": MEASURES, "when": "true", "message": ""}
ALWAYS = [
    rule("one", **PLAIN, group_by=["customer"]),
    rule("two", **PLAIN, group_by=["customer"], where="amount > 20 and amount <> 25.5", window="1 minute"),
    rule("all", **PLAIN, group_by=[], late="record"),
    rule("shop", **PLAIN, group_by=[{"first": "substr(shop, 1, 1)"}, "customer"], late="revise", window="40 seconds"),
]
RESET = rule("reset", measures={"n": "count(*)"}, when="n >= 3", message="", group_by=["customer"], reset_on_alert=True)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans of some commits and several shards, as a large table has them."""
    monkeypatch.setattr(history, "_SPAN_EVENTS", 60)
    monkeypatch.setattr(tasks, "_SHARD_EVENTS", 100)


def rows_of(result: Features) -> dict[str, dict[str, Any]]:
    """The rows by event."""
    found = [row.asDict() for row in result.rows.collect()]
    assert len({row["event_id"] for row in found}) == len(found)
    return {row["event_id"]: row for row in found}


def evaluate(tables: Tables) -> None:
    folder = checkpoint_folder(tables, STREAM)
    Evaluation(tables, STREAM, STREAMS, folder, once=True, admission={"maxFilesPerTrigger": "3"}).run()


@pytest.mark.long
def test_c12_11_features_are_what_the_stream_judged_by(ready: Tables, spans: None, tmp_path: Path) -> None:
    events = make_events(300, seed=24)
    publish(ready, [*ALWAYS, RESET])
    append(ready, [row for row in events if row["arrival"] <= 6])
    evaluate(ready)
    gone = {row["id"] for at, row in enumerate(events) if at % 9 == 4 and row["arrival"] in (5, 6)}
    ready.spark.sql(f"DELETE FROM {ready.identifier(STREAM.name)} WHERE id IN ({', '.join(map(repr, sorted(gone)))})")
    append(ready, [row for row in events if row["arrival"] > 6])
    evaluate(ready)
    judged = {
        (row["rule_id"], row["event_id"]): row.asDict()
        for row in ready.read("alerts").where("revision = 0 AND verdict = 'raised'").collect()
    }
    late = {row["event_id"] for row in ready.read("late_events").where("action = 'evaluated'").collect()}
    with compute_features(ready, STREAM, [Candidate(each) for each in [*ALWAYS, RESET]]) as result:
        found = rows_of(result)
        assert result.write(str(tmp_path / "out")) == len(found)
    expected = {event_id for _, event_id in judged} - gone
    # Each alert is about a row, and a row about an event that a rule sees.
    assert found.keys() == expected
    assert late & expected
    for (rule_id, event_id), alert in judged.items():
        if event_id not in gone:
            row = found[event_id]
            own = {name: to_text(row[f"{rule_id}.{name}"]) for name in alert["measures"]}
            assert own == alert["measures"], (rule_id, event_id)
            assert row[f"{rule_id}.window_complete"] is alert["window_complete"]
            assert (row["event_time"], row["arrival"]) == (alert["event_time"], alert["arrival"])
            assert {name: to_text(row[name]) for name in alert["key"]} == alert["key"]
    for each in ALWAYS:
        # What a rule does not judge is NULL.
        own = {event_id for event_id, row in found.items() if row[f"{each['rule_id']}.n"] is not None}
        assert own == {event_id for rule_id, event_id in judged if rule_id == each["rule_id"]} - gone
    own_complete = [f"{each['rule_id']}.window_complete" for each in [*ALWAYS, RESET]]
    for row in found.values():
        known = [row[name] for name in own_complete if row[name] is not None]
        assert row["window_complete"] is all(known)
    # The files have the columns as other programs read them.
    table = pq.read_table(tmp_path / "out")
    assert str(table.schema.field("one.total").type) == "decimal128(28, 2)"
    assert {row["event_id"]: row["one.total"] for row in table.to_pylist()} == {
        event_id: row["one.total"] for event_id, row in found.items()
    }


def test_c12_11_the_command_writes_rows_with_labels_as_known_then(
    ready: Tables, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = make_events(120, seed=7)
    append(ready, events)
    kept = rule(
        "kept",
        message="",
        measures={"n": "count(*)"},
        parameters={"limit": 3},
        when="n >= :limit",
        effective_from=START + 10**9,
    )
    publish(ready, [kept])
    label(ready, [("e30", True, "10:00:00"), ("e31", False, "10:00:00"), ("e32", True, "12:00:00")])
    conf, out = tmp_path / "conf", tmp_path / "out.parquet"
    (conf / "streams").mkdir(parents=True)
    (conf / "streams/payins.yml").write_text(yaml.safe_dump(STREAM.to_dict()))
    (conf / "shop.yml").write_text(
        yaml.safe_dump(rule("of-shop", group_by=["shop"], measures={"m": "max(amount)"}, when="m > 1", message=""))
    )
    never = rule(
        "never", group_by=["shop"], where="amount > 1000000", measures={"top": "max(amount)"}, when="true", message=""
    )
    (conf / "never.yml").write_text(yaml.safe_dump(never))
    place = ["--root", str(ready.root), "--conf", str(conf)]

    def run(*words: str, code: int = 0) -> str:
        capsys.readouterr()
        assert main([*place, "features", *words]) == code
        said = capsys.readouterr()
        return said.err if code else said.out

    ids = {row["id"] for row in events}
    said = run("kept", str(conf / "shop.yml"), str(conf / "never.yml"), "--out", str(out))
    rows = {row["event_id"]: row for row in pq.read_table(out).to_pylist()}
    assert f"{len(rows)} rows in {out}, of 120 events" in said
    assert rows.keys() <= ids
    assert [*next(iter(rows.values()))] == [
        "event_id", "event_time", "arrival", "customer", "shop", "kept.n", "kept.window_complete", "of-shop.m",
        "of-shop.window_complete", "never.top", "never.window_complete", "window_complete", "positive", "label", "labelled_at",
    ]  # fmt: skip
    # A rule that saw none of the events.
    assert {(row["never.top"], row["never.window_complete"]) for row in rows.values()} == {(None, None)}
    assert {each: row["positive"] for each, row in rows.items() if row["positive"] is not None} == {
        "e30": True,
        "e31": False,
        "e32": True,
    }
    assert "is not empty; name a new or empty folder" in run("kept", "--out", str(out), code=2)

    second = tmp_path / "second"
    since, until = (dt.datetime.fromtimestamp((START + at * 10**6) / 10**6, dt.timezone.utc) for at in (30, 90))
    bounds = ["--since", since.isoformat(), "--until", until.isoformat(), "--as-of", "2024-03-04T11:00:00Z"]
    (report,) = map(json.loads, run("kept", *bounds, "--out", str(second), "--format", "delta", "--json").splitlines())
    few = {row["event_id"]: row.asDict() for row in ready.spark.read.format("delta").load(str(second)).collect()}
    assert (report["rows"], report["rules"][0]["rule_id"], report["rules"][0]["failures"]) == (len(few), "kept", 0)
    times = {row["id"]: dt.datetime.fromtimestamp(row["at"] / 10**6, dt.timezone.utc) for row in events}
    assert few.keys() == {each for each in rows if since <= times[each] < until} != set()
    # Events before the range count in windows.
    assert {each: row["kept.n"] for each, row in few.items()} == {each: rows[each]["kept.n"] for each in few}
    shown = {each: row["positive"] for each, row in few.items() if row["positive"] is not None}
    assert shown == {each: value for each, value in {"e30": True, "e31": False}.items() if each in few}


def test_c12_11_rules_without_a_window_that_ends_at_the_event_are_refused(ready: Tables) -> None:
    def refuse(*documents: dict[str, Any]) -> str:
        with pytest.raises(SetupError) as error:
            compute_features(ready, STREAM, [Candidate(each) for each in documents])
        return str(error.value)

    by_id = {each["rule_id"]: each for each in [*RULES, *MORE_RULES]}
    remedy = "features are of rules with a window that ends at each event, such as window: 1 hour"
    assert refuse(by_id["minutes"]) == (
        f"minutes: a tumbling window is measured when it ends, not when an event arrives; {remedy}"
    )
    assert refuse(by_id["sessions"]).startswith("sessions: a session window is measured when it ends")
    assert refuse(by_id["large-small"]) == f"large-small: a sequence measures nothing; {remedy}"
    alone = {"rule_id": "alone", "stream": STREAM.name, "when": "amount > 3"}
    assert refuse(RULES[0], alone) == f"alone: an event rule measures nothing; {remedy}"
    assert refuse(RULES[0], RULES[0]) == "by-customer is given twice; name each rule once"
    first, second = (rule(name, group_by=[{"p": text}]) for name, text in (("a", "lower(shop)"), ("b", "upper(shop)")))
    assert refuse(first, second).startswith(
        "two rules call different entries of their keys p; give one of them another"
    )
    assert refuse(rule("a", group_by=[{"label": "lower(shop)"}])).startswith("group_by: label has the name of a column")


@pytest.mark.parametrize(("sizes", "parts"), [([], [0]), ([1, 1], [2]), ([5, 6, 1, 20, 1], [2, 2, 1]), ([11], [1, 0])])
def test_many_answers_come_in_several_batches(
    sizes: list[int], parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "_BATCH_BYTES", 10)
    answers = [("measured-0", bytes(size)) for size in sizes]
    found = list(tasks._cut(answers))
    assert [len(each) for each in found] == parts
    assert [answer for each in found for answer in each] == answers


@pytest.mark.long
def test_c12_11_without_a_change_feed_rows_come_in_the_order_of_their_stamps(ready: Tables, spans: None) -> None:
    events = make_events(120, seed=24)
    append(ready, events)
    with compute_features(ready, STREAM, [Candidate(each) for each in ALWAYS]) as result:
        before = rows_of(result)
    lose_feed(ready)
    with compute_features(ready, STREAM, [Candidate(each) for each in ALWAYS]) as result:
        assert result.rows.where(F.col("arrival").isNotNull()).count() == 0
        assert "events come in the order of ingested_at" in result.warnings[0]
        assert rows_of(result) == {event_id: row | {"arrival": None} for event_id, row in before.items()}

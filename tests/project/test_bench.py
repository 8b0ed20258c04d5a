"""The benchmarks' own parts: sets as they say they are, alerts compared before figures, a report that sees what is worse."""

from __future__ import annotations

import copy
import datetime as dt
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dev.bench import goals, plan, producer, report, scale, sets, shapes
from dev.bench.__main__ import parser
from dev.bench.drain import throughput
from dev.bench.lakehouse import STREAMS, rows_of
from dev.bench.latency import Verdict, first_verdicts, read_commit_times, read_logged, verdicts_of
from dev.bench.results import percentiles
from dev.bench.rules import FEATURES, LIST, RULE_SETS, peers_rules, rules_for
from dev.bench.sets import ALLOWED_LATENESS, COMMIT_ROWS, DAY, OUT_OF_ORDERNESS, SECOND, EventSet, Windows
from dev.bench.versus import PEERS, Comparison, compare, read_alerts
from lookback.core.rules.compiling import compile_rule
from lookback.spark.tables.schemas import LISTS
from lookback.testing.harness import Harness

ROWS = 250_000


@pytest.fixture(scope="module")
def zipf() -> sets.Columns:
    return sets.make("zipf", ROWS)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EventSet:
    monkeypatch.setattr(sets, "DATA", tmp_path)
    monkeypatch.setattr("dev.bench.rules.DATA", tmp_path)
    return EventSet("zipf", 20_000)


def test_the_generator_makes_the_same_twice(zipf: sets.Columns) -> None:
    again = sets.make("zipf", ROWS)
    assert zipf.keys() == again.keys()
    for name, values in zipf.items():
        np.testing.assert_array_equal(values, again[name])


def test_uniform_differs_from_zipf_in_its_keys_alone(zipf: sets.Columns) -> None:
    uniform = sets.make("uniform", ROWS)
    for name in ("event_id", "event_time", "amount_cents"):
        np.testing.assert_array_equal(zipf[name], uniform[name])
    assert np.bincount(zipf["customer_id"]).max() > 0.07 * ROWS
    assert np.bincount(zipf["terminal_id"]).max() > 0.02 * ROWS
    assert np.bincount(uniform["customer_id"]).max() < 0.001 * ROWS


@pytest.mark.parametrize("name", ["zipf", "logins"])
def test_commits_are_sorted_and_ids_are_the_order_of_arrival(name: str) -> None:
    columns = sets.make(name, ROWS)
    np.testing.assert_array_equal(columns["event_id"], np.arange(ROWS))
    for first in range(0, ROWS, COMMIT_ROWS):
        assert (np.diff(columns["event_time"][first : first + COMMIT_ROWS]) >= 0).all()


def test_some_events_are_late_and_none_is_too_late(zipf: sets.Columns) -> None:
    late = 0
    for first in range(COMMIT_ROWS, ROWS, COMMIT_ROWS):
        watermark = zipf["event_time"][:first].max() - OUT_OF_ORDERNESS
        times = zipf["event_time"][first : first + COMMIT_ROWS]
        late += int((times < watermark).sum())
        assert times.min() >= watermark - ALLOWED_LATENESS
    assert late > 100


def test_a_tenth_of_the_times_are_whole_seconds_and_some_are_tied(zipf: sets.Columns) -> None:
    assert 0.09 < (zipf["event_time"] % SECOND == 0).mean() < 0.11
    assert sets.summary(zipf)["tied"] > 100


def test_repeats_follow_in_time_with_other_ids(small: EventSet) -> None:
    first, later = small.columns, small.commit(0)
    rows = len(first["event_id"])
    np.testing.assert_array_equal(later["event_id"], np.arange(COMMIT_ROWS))
    np.testing.assert_array_equal(later["event_time"][rows : 2 * rows], first["event_time"] + DAY)
    assert later["customer_id"][:rows].max() < later["customer_id"][rows : 2 * rows].min()
    np.testing.assert_array_equal(small.commit(1)["event_id"][:3], COMMIT_ROWS + np.arange(3))


def test_the_binary_file_holds_the_same_rows(small: EventSet) -> None:
    records = np.fromfile(small.binary, dtype=sets.RECORD)
    assert small.binary.stat().st_size == 28 * len(records)
    for name in records.dtype.names or ():
        np.testing.assert_array_equal(records[name], small.columns[name])


def test_amounts_become_exact_decimals(small: EventSet) -> None:
    amounts = rows_of(small.columns).column("amount").to_pylist()
    assert [int(amount * 100) for amount in amounts[:1_000]] == small.columns["amount_cents"][:1_000].tolist()
    assert str(amounts[0].as_tuple().exponent) == "-2"


def test_windows_hold_what_a_scan_finds() -> None:
    random = np.random.default_rng(5)
    keys, times = random.integers(0, 4, 300), random.integers(0, 60, 300) * SECOND
    values = random.integers(0, 100, 300)
    window = 7 * SECOND
    expected = [
        values[(keys == key) & (times >= time - window) & (times <= time)].sum()
        for key, time in zip(keys, times, strict=True)
    ]
    np.testing.assert_array_equal(Windows(keys, times).sums(values, window), expected)


def test_gaps_are_those_between_events_of_a_key() -> None:
    gaps = Windows(np.array([1, 2, 1, 1]), np.array([5, 6, 9, 20]) * SECOND).gaps()
    assert (gaps[[2, 3]] == [4 * SECOND, 11 * SECOND]).all()
    assert (gaps[[0, 1]] > 30 * DAY).all()


def test_the_two_rules_alert_for_a_few_of_the_events(small: EventSet) -> None:
    spend, burst = peers_rules(small)["rules"]
    columns = small.columns
    cents = columns["amount_cents"].astype(np.int64)
    found = Windows(columns["customer_id"], columns["event_time"]).sums(cents, spend["window_us"])
    assert 0.001 < (found >= spend["at_least"]).mean() < 0.01
    large = (cents >= burst["min_amount_cents"]).astype(np.int64)
    found = Windows(columns["terminal_id"], columns["event_time"]).sums(large, burst["window_us"])
    assert 0.001 < (found >= burst["at_least"]).mean() < 0.011


@pytest.mark.parametrize(
    ("name", "rules", "features"),
    [("100", 100, 20), ("200", 200, 20), pytest.param("1000", 1_000, 100, marks=pytest.mark.long)],
)
def test_many_rules_have_few_features_of_five_grouping_sets(
    small: EventSet, name: str, rules: int, features: int
) -> None:
    compiled = [compile_rule(document, STREAMS["transactions"]) for document in RULE_SETS[name](small).documents]
    assert len({rule.spec.rule_id for rule in compiled}) == rules
    assert len({feature.feature_id for rule in compiled for feature in rule.features}) == features
    assert len(FEATURES) == 20
    assert len({rule.group_by for rule in compiled}) == 5


def test_a_rule_about_large_amounts_has_a_limit_that_few_of_them_reach(small: EventSet) -> None:
    rules = {document["rule_id"]: document for document in RULE_SETS["1000"](small).documents}
    rule, least = rules["f03-a25-w04"], 2_500
    assert (rule["measures"]["value"], rule["where"]) == ("count(distinct terminal_id)", "amount >= 25")
    window, limit = int(rule["window"].split()[0]) * 1_000_000, int(rule["when"].split()[-1])
    columns = small.columns
    at = np.flatnonzero(columns["amount_cents"] >= least)
    by_customer: dict[int, list[tuple[int, int]]] = {}
    found = []
    for row in at[np.argsort(columns["event_time"][at], kind="stable")].tolist():
        time, terminal = int(columns["event_time"][row]), int(columns["terminal_id"][row])
        kept = by_customer.setdefault(int(columns["customer_id"][row]), [])
        kept.append((time, terminal))
        found.append(len({other for then, other in kept if then >= time - window}))
    assert np.mean(np.array(found) >= limit) < 0.003


@pytest.mark.parametrize(("with_list", "without"), [("2-asking", "2"), ("2-listed", "2-condition")])
def test_rules_that_ask_a_list_or_none_alert_alike(small: EventSet, with_list: str, without: str) -> None:
    """11.3: the drain that asks a list stands beside one that judges the same events."""
    asking, other = (RULE_SETS[name](small) for name in (with_list, without))
    assert (asking.listed, other.listed) == (1_000_000, 0)
    assert rules_for(with_list, small) == asking
    rows = rows_of({name: values[:500] for name, values in small.columns.items()})
    rows = rows.append_column("arrival", pa.array([1] * 500))
    alerts = []
    for rules in (asking, other):
        spend = {**rules.documents[0], "when": "value >= 100"}
        harness = Harness(STREAMS["transactions"])
        harness.rule(spend)
        harness.lists({LIST: [str(odd) for odd in range(1, 2 * 100_000, 2)]})
        harness.events(rows)
        alerts.append([alert.event_id for alert in harness.alerts])
    assert 0 < len(alerts[0]) < 500
    assert alerts[0] == alerts[1]


def test_a_value_is_put_on_a_list_without_spark(tmp_path: Path) -> None:
    log = tmp_path / "_delta_log"
    log.mkdir()
    (log / f"{0:020d}.json").write_text("{}")
    kept = ("numMetadata", "numProtocol", "setTransactions", "domainMetadata", "metadata", "protocol")
    (log / f"{0:020d}.crc").write_text(json.dumps({**dict.fromkeys(kept), "tableSizeBytes": 0, "numFiles": 0}))
    assert [producer.put_on_list(tmp_path, LIST, values) for values in (range(1, 7, 2), [8])] == [1, 2]
    added = json.loads((log / f"{1:020d}.json").read_text().splitlines()[1])["add"]
    rows = pq.read_table(tmp_path / added["path"])
    assert rows.column_names == LISTS.fieldNames()
    assert rows.column("value").to_pylist() == ["1", "3", "5"]
    assert set(rows.column("list").to_pylist()) == {LIST}


def test_events_go_on_where_a_set_ends(small: EventSet) -> None:
    """Ten commits hold the set fifty times: ids and times follow, and the keys are those of the last repeat."""
    source = producer._Source.of(small, 10)
    rows = source.rows(1_000, 1, ahead=0)
    np.testing.assert_array_equal(rows["event_id"], 10 * COMMIT_ROWS + 500 + np.arange(500))
    assert source.last == small.commit(9)["event_time"].max()
    last = small.commit(9)
    assert set(rows["customer_id"].tolist()) <= set(last["customer_id"][-20_000:].tolist())
    np.testing.assert_array_equal(producer._Source.of(small, 0).rows(1_000, 1, 0)["event_id"], 500 + np.arange(500))


def test_percentiles_are_values_that_were_measured() -> None:
    values = list(range(1, 201))
    assert percentiles(values, 50, 95, 99, 100) == [100, 190, 198, 200]
    assert percentiles([3.0], 1, 50, 99) == [3.0, 3.0, 3.0]
    assert np.isnan(percentiles([], 50)).all()


def test_alerts_are_equal_only_if_every_one_is() -> None:
    ours = [("spend", 1, 100), ("burst", 5, 3)]
    assert compare(ours, reversed(ours), 10).equal
    assert compare(ours, [*ours, ("spend", 7, 9)], 10) == Comparison(2, 0, 1, ("spend", 7, 9))
    assert compare(ours, ours[:1], 10) == Comparison(1, 1, 0, ("burst", 5, 3))
    assert not compare(ours, [("spend", 1, 101), ours[1]], 10).equal
    assert not compare([], [], 10).equal


def test_a_peer_that_was_stopped_is_compared_by_what_it_judged() -> None:
    ours = [("spend", 1, 100), ("burst", 5, 3)]
    assert compare(ours, ours[:1], judged=5).equal
    assert not compare(ours, ours[:1], judged=6).equal


def test_an_alert_that_stands_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "alerts.csv"
    file.write_text("spend,1,100\nburst,5,3\n")
    assert read_alerts(file) == {("spend", 1, 100), ("burst", 5, 3)}
    file.write_text("spend,1,100\nspend,1,100\n")
    with pytest.raises(ValueError, match="1 alerts stand twice"):
        read_alerts(file)


def test_steady_state_begins_after_the_second_batch() -> None:
    started = dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc)
    ends = [10.0, 12.0, 13.0, 14.0, 16.0, 16.1]
    counts = [100, 100, 100, 100, 100, 10]
    batches: list[Any] = [
        SimpleNamespace(events=count, finished_at=started + dt.timedelta(seconds=end))
        for count, end in zip(counts, ends, strict=True)
    ]
    figures = throughput(batches, started, seconds=17.0)
    assert figures["cold_events_per_s"] == pytest.approx(510 / 17, abs=0.1)
    assert figures["steady_events_per_s"] == pytest.approx(310 / 4.1, abs=0.1)
    assert figures["batch_events_per_s"] == {"p10": 50, "p50": 100, "p90": 100}
    assert throughput(batches[:2], started, seconds=13.0)["steady_events_per_s"] == 0


def test_the_first_verdict_is_the_earliest_commit() -> None:
    verdicts = [Verdict("a", 2, 7, 3, 12.5), Verdict("a", 2, 6, 1, 11.0), Verdict("a", 1, 5, 1, 9.0)]
    assert first_verdicts(verdicts) == {("a", 2): 11.0, ("a", 1): 9.0}


def test_verdicts_are_read_from_the_logs_of_the_tables(tmp_path: Path) -> None:
    alerts = tmp_path / "alerts"
    (alerts / "_delta_log").mkdir(parents=True)
    rows = {"rule_id": ["spend", "spend", "burst"], "rule_version": [1, 1, 1], "arrival": [4, 4, 5]}
    pq.write_table(pa.table(rows), alerts / "a.parquet")
    for version, line in enumerate([{"metaData": {}}, {"add": {"path": "a.parquet"}}]):
        log = alerts / f"_delta_log/{version:020d}.json"
        log.write_text(json.dumps({"commitInfo": {}}) + "\n" + json.dumps(line) + "\n", encoding="utf-8")
        os.utime(log, (1_000.0, 1_000.0 + version / 4))
    assert read_commit_times(alerts) == {1: 1_000.25}
    found = verdicts_of(alerts)
    assert found == [Verdict("spend", 1, 4, 2, 1_000.25), Verdict("burst", 1, 5, 1, 1_000.25)]


def test_what_is_logged_is_read_with_the_time_of_its_commit(tmp_path: Path) -> None:
    rule_log = tmp_path / "rule_log"
    (rule_log / "_delta_log").mkdir(parents=True)
    rows = {"rule_id": ["a", "*"], "version": [2, 7], "action": ["activated", "list"]}
    pq.write_table(pa.table(rows), rule_log / "a.parquet")
    for version, line in enumerate([{"metaData": {}}, {"add": {"path": "a.parquet"}}]):
        log = rule_log / f"_delta_log/{version:020d}.json"
        log.write_text(json.dumps(line) + "\n", encoding="utf-8")
        os.utime(log, (1_000.0, 1_000.0 + version / 4))
    assert read_logged(rule_log) == {("a", 2, "activated"): 1_000.25, ("*", 7, "list"): 1_000.25}


@pytest.mark.parametrize("quick", [True, False])
def test_every_step_of_a_run_is_a_command(quick: bool) -> None:
    steps = plan.steps(quick=quick, peers=[peer.name for peer in PEERS], limit_seconds=9.0)
    assert {step.part for step in steps} == set(plan.PARTS)
    # The table of backtests has all of its columns from one part.
    compared = [step.arguments for step in steps if step.is_in(["backtest"]) and step.arguments[0] != "what-if"]
    assert [(each[0], each[each.index("--set") + 1]) for each in compared] == [
        ("drain", "handbook"), ("drain", "handbook"), ("backtest", "handbook"), ("backtest", "handbook"), ("peer", "handbook"),
    ]  # fmt: skip
    for step in steps:
        options = parser().parse_args(step.arguments)
        assert options.command in (
            "shapes",
            "drain",
            "backtest",
            "what-if",
            "latency",
            "changes",
            "warm",
            "scale",
            "peer",
        )
        if options.command == "peer":
            assert (options.peer, options.variant, options.durable) in {(p.name, p.variant, p.durable) for p in PEERS}


def result(name: str, part: str, settings: dict[str, Any], figures: dict[str, Any], at: str = "now") -> dict[str, Any]:
    return {
        "name": name, "part": part, "command": f"python -m dev.bench {name}", "measured_at": at, "git": {"commit": "abc"},
        "machine": {"cores": 2, "processor": "any", "memory_gib": 24}, "versions": {}, "settings": settings, "figures": figures,
    }  # fmt: skip


def drain(name: str, rate: float, spread: float = 0.04, at: str = "now") -> dict[str, Any]:
    figures = {
        "events": 1_000, "steady_events_per_s": rate, "steady_spread": spread, "steady_batches": 20, "features": 2,
        "cold_events_per_s": rate / 2, "alerts": 5, "state": {}, "memory": {}, "step_ms": {},
    }  # fmt: skip
    return result(name, "drain", {"set": name.split("-")[1], "rules": "2", "rule_count": 2}, figures, at)


def peer(variant: str, rate: float, *, equal: bool, durable: bool = True) -> dict[str, Any]:
    comparison = {"equal": equal, "both": 9, "ours_alone": 0, "theirs_alone": 0 if equal else 1}
    figures = {"outcome": "complete", "steady_events_per_s": rate, "comparison": comparison}
    settings = {"set": "handbook", "peer": "flink", "variant": variant, "durable": durable}
    return result(f"peer-flink-{variant}-handbook", "peer", settings, figures)


@pytest.fixture
def sample() -> dict[str, dict[str, Any]]:
    missing = result(
        "peer-bytewax", "peer", {"set": "handbook", "peer": "bytewax", "variant": "w", "durable": False},
        {"outcome": "not installed"},
    )  # fmt: skip
    listed = [
        drain("drain-handbook-2", 300_000),
        drain("drain-zipf-2", 120_000),
        drain("drain-uniform-2", 200_000),
        peer("heap", 50_000, equal=True),
        peer("fast-but-wrong", 150_000, equal=False),
        missing,
    ]
    return {each["name"]: each for each in listed}


def test_a_backtest_stands_beside_the_drain_of_the_same_rules_and_the_query_of_all_at_once(
    sample: dict[str, dict[str, Any]],
) -> None:
    figures = {"events": 1_000, "events_per_s": 75_000.0, "alerts": 7, "memory": {}}
    tried = {
        f"backtest-handbook-{rules}": result(
            f"backtest-handbook-{rules}", "backtest", {"set": "handbook", "rules": rules}, figures
        )
        for rules in ("2", "100")
    }
    limit = peer("x", 4_000_000, equal=True) | {"name": "peer-oneshot-polars-handbook"}
    now = sample | tried | {"peer-oneshot-polars-handbook": limit}
    page = report.render(now, {})
    assert "| handbook, 2 | 1,000 | 7 | 75,000 | 150,000 | 0.5 | 300,000 | 4,000,000 |" in page
    assert "| handbook, 100 | 1,000 | 7 | 75,000 | - | - | - | - |" in page
    drained = {**now, "drain-handbook-100": drain("drain-handbook-100", 300_000)}
    (value,) = [goal.value(drained) for goal in goals.GOALS if goal.what.startswith("backtest over")]
    assert value == 0.5


def test_a_warm_start_is_shown_with_what_it_costs_the_stream() -> None:
    spans = {
        "before": {"p95_ms": 400},
        "meanwhile": {"p95_ms": 900},
        "after": {"p95_ms": 410},
        "from_then_on": {"p95_ms": 900},
    }
    figures = {"events": 1_800_000, "seconds": 12.5, **spans, "p95_from_then_on_ratio": 2.25, "memory_more_gb": 0.5}
    now = {"warm-handbook": result("warm-handbook", "warm", {"set": "handbook"}, figures)}
    assert "| handbook | window | 1,800,000 | 12.5 | 400 | 900 | 410 | 900 | 2.25 | - | - | 0.5 |" in report.render(
        now, {}
    )
    reached = [goal.reached(value) for goal in goals.GOALS if (value := goal.value(now)) is not None]
    assert reached == [True, False, True]


def test_changes_of_rules_and_lists_are_shown() -> None:
    figures = {f"{what}_{key}_s": 0.5 for what in ("known_key", "list") for key in ("p50", "max")}
    figures |= {"known_key_s": [0.5], "list_s": [0.5, 0.4]}
    page = report.render({"rule-changes": result("rule-changes", "changes", {}, figures)}, {})
    assert "| known grouping key | 0.5 | 0.5 | 1 |" in page
    assert "| a value of a list of a million | 0.5 | 0.5 | 2 |" in page
    assert "without history" not in page.partition("## Rule changes")[2]


def test_a_shape_beyond_its_bound_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dev.bench.results.RESULTS", tmp_path)
    slow = shapes.Shape("slow", 10, lambda: iter([2.0, 1.0]), bound=1e9)
    twice = shapes.Shape("twice", 10, lambda: iter([2.0]), bound=2.5, against="slow")
    monkeypatch.setattr(shapes, "SHAPES", (slow, twice))
    assert shapes.run() == 0
    assert re.search(
        r"twice +200,000.00 us an event +2.0 times slow, at most 2.5$", capsys.readouterr().out, re.MULTILINE
    )
    page = report.render({"shapes": json.loads((tmp_path / "shapes.json").read_text())}, {})
    assert "| twice | 200,000 us an event | 2 | slow | 2.5 |" in page
    monkeypatch.setattr(shapes, "SHAPES", (slow, replace(twice, bound=1.9)))
    assert shapes.run() == 1
    assert "BEYOND" in capsys.readouterr().out


def test_goals_are_judged_by_the_results(sample: dict[str, dict[str, Any]]) -> None:
    values = {goal.what: (goal.value(sample), goal) for goal in goals.GOALS if goal.value(sample) is not None}
    verdicts = {what: goal.reached(value) for what, (value, goal) in values.items() if value is not None}
    assert verdicts["steady drain, Handbook, 2 rules"]
    assert not verdicts["steady drain, Zipf, 2 rules"]
    assert values["Zipf over uniform, 2 rules"][0] == pytest.approx(0.6)
    assert not verdicts["Zipf over uniform, 2 rules"]


def test_a_peer_whose_alerts_differ_gets_no_ratio(sample: dict[str, dict[str, Any]]) -> None:
    page = report.render(sample, {})
    (wrong,) = [line for line in page.splitlines() if "fast-but-wrong |" in line]
    assert "**differ**: no ratio" in wrong
    assert "150,000" not in wrong
    (right,) = [line for line in page.splitlines() if "flink heap |" in line]
    assert "| 50,000 | 6 |" in right
    # The goal is a multiple of the best that is right.
    assert (
        "| the same over the best Flink with checkpoints and a file sink | at least 0.8 times | 6 | reached |" in page
    )


def test_a_peer_that_is_missing_is_named(sample: dict[str, dict[str, Any]]) -> None:
    assert "| handbook: bytewax w | no | - | - | not installed | - |" in report.render(sample, {})


def test_worse_than_noise_is_a_regression(sample: dict[str, dict[str, Any]]) -> None:
    before = copy.deepcopy(sample)
    for each in before.values():
        each["measured_at"] = "before"
    before["drain-zipf-2"]["figures"]["steady_events_per_s"] = 140_000
    before["drain-uniform-2"]["figures"]["steady_events_per_s"] = 205_000
    found = {change.name: change.verdict for change in goals.changes(before, sample)}
    assert found == {"drain-handbook-2": "noise", "drain-uniform-2": "noise", "drain-zipf-2": "regressed"}
    # The same fall is noise where the batches themselves differ by more.
    sample["drain-zipf-2"]["figures"]["steady_spread"] = 0.3
    assert {change.verdict for change in goals.changes(before, sample)} == {"noise"}


def test_nothing_is_compared_with_itself(sample: dict[str, dict[str, Any]]) -> None:
    assert goals.changes(sample, sample) == []


def test_pictures_are_drawn(sample: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "results"
    monkeypatch.setattr("dev.bench.results.RESULTS", folder)
    for each in sample.values():
        sets.write_json(folder / f"{each['name']}.json", each)
    page = report.write(baseline=tmp_path)
    assert page == tmp_path / "results.md"
    assert "![throughput](results/throughput.png)" in page.read_text(encoding="utf-8")
    assert (folder / "throughput.png").stat().st_size > 5_000
    assert not (folder / "latency.png").exists()


@pytest.mark.long
def test_scale_measures_shards_and_rules_as_the_evaluation_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from lookback.spark.batches import shard

    # The measurement raises it for its process.
    monkeypatch.setattr(shard, "_MAX_IN_MEMORY", shard._MAX_IN_MEMORY)
    few, many = scale.measure_shards([2, 4]).values()
    assert few["1000"]["rules_bytes"] * 2 == many["1000"]["rules_bytes"]
    for rows in (1_000, 100_000):
        # Two grouping sets send each event to a shard or two.
        assert few[str(rows)]["shuffled_bytes"] > 20 * rows
    (figures,) = scale.measure_rules([20]).values()
    assert figures["text_bytes"] > figures["page_bytes"] > 0
    assert figures["batch_of_100_ms"] > 0
    assert set(scale.PARTS) == set(scale.SIZES) == set(scale.QUICK) == set(plan.SCALE_PARTS)

"""Backtests on Spark: their alerts are those of a stream in which the rules were always in force (contract 10.2)."""

from __future__ import annotations

import datetime as dt
import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest
import yaml
from cases import STREAMS as CASES
from cases import documents, rows
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812

import lookback
from alert_rows import AlertRow, collect_alerts, list_alerts
from core.rules.test_parameters import take_out
from lookback.cli import main
from lookback.core.errors import SetupError
from lookback.core.rules.variants import make_variants
from lookback.core.streams.declaration import Stream
from lookback.spark.figures import RuleFigures
from lookback.spark.replay import answers, history, tasks
from lookback.spark.replay import backtest as backtests
from lookback.spark.replay.backtest import Backtest, Candidate, Range, backtest
from lookback.spark.replay.flagging import _pair_by_span
from lookback.spark.rules import RulesTable
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from payins import MORE_RULES, RULES, START, STREAM, STREAMS, append, make_events, publish, sequence, window
from spark.test_generated_cases import append as append_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame

    from lookback.spark.replay.counting import LabelCounts
    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark
NOW = dt.datetime(2024, 3, 4, tzinfo=dt.timezone.utc)
ALL_RULES = [*RULES, *MORE_RULES]


def alerts_of(result: Backtest) -> list[AlertRow]:
    return sorted(collect_alerts(result.alerts))


def replayed(rules: list[Any], events: list[dict[str, Any]]) -> list[AlertRow]:
    return sorted(list_alerts(lookback.replay(rules, events, STREAM)))


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans of some commits and several shards, as a large table has them."""
    monkeypatch.setattr(history, "_SPAN_EVENTS", 60)
    monkeypatch.setattr(tasks, "_SHARD_EVENTS", 100)


def test_c10_2_a_backtest_gives_the_alerts_of_replay_for_every_kind_of_rule(ready: Tables, spans: None) -> None:
    events = make_events(300, seed=24)
    append(ready, events)
    lines: list[str] = []
    with backtest(ready, STREAM, [Candidate(each) for each in ALL_RULES], progress=lines.append) as result:
        found = alerts_of(result)
        assert found == replayed(ALL_RULES, events)
        assert {row.rule_id for row in found} == {each["rule_id"] for each in ALL_RULES}
        assert {row.verdict for row in found} == {"raised", "suppressed", "retracted"}
        assert (result.events, result.deletes, result.commits) == (300, 0, (0, 12))
        assert [row["decided_at"] for row in result.alerts.select("decided_at").distinct().collect()] == [None]
        last: dict[tuple[str, str], AlertRow] = {}
        for row in sorted(found, key=lambda each: each.revision):
            last[row.rule_id, row.alert_id] = row
        stands = [row for row in last.values() if row.verdict == "raised"]
        for figures in result.figures:
            own = [row for row in stands if row.rule_id == figures.rule_id]
            assert (figures.alerts, figures.rows) == (
                len(own), len([row for row in found if row.rule_id == figures.rule_id]),
            )  # fmt: skip
        again = lookback.replay(ALL_RULES, events, STREAM)
        discarded = [row for row in again.late_events if row.action == "discarded"]
        (warning,) = (each for each in result.warnings if "too late" in each)
        assert warning.startswith(f"{len(discarded)} events came too late for every rule here and do not count")
        failed = {row.rule_id for row in again.errors if row.action == "failed"}
        assert {each.rule_id for each in result.figures if each.failures} == failed == {"pair"}
    assert ready.version("alerts") == 0


@pytest.mark.long
def test_c10_2_a_rule_speaks_within_the_range_and_gathers_before_it(ready: Tables, spans: None) -> None:
    events = make_events(300, seed=7)
    append(ready, events)
    since, until = START + 60_000_000, START + 250_000_000
    bounded = [{**each, "effective_from": since, "effective_until": until} for each in ALL_RULES]
    with backtest(ready, STREAM, [Candidate(each, 3) for each in ALL_RULES], Range(since, until)) as result:
        expected = replayed(
            [({"rule_id": each["rule_id"], "version": 3, "document": each}, None) for each in bounded], events
        )
        assert alerts_of(result) == expected != []
    rows = [{"rule_id": each["rule_id"], "version": 2, "document": each} for each in ALL_RULES]
    silent = [({**row, "version": 1, "status": "paused"}, None) for row in rows]
    with backtest(ready, STREAM, [Candidate(each, 2) for each in ALL_RULES], Range(since_commit=6)) as result:
        expected = replayed([*silent, *((row, 5) for row in rows)], events)
        assert alerts_of(result) == expected != []


@pytest.mark.long
def test_c10_2_deleted_events_count_nowhere_and_commands_come_as_they_came(ready: Tables, spans: None) -> None:
    events = make_events(200, seed=5)
    append(ready, events)
    # The rule sees none of them: what is left of them is that they moved the watermark.
    unseen = [{**row, "shop": "gone"} for row in events]
    gone = {row["id"] for at, row in enumerate(events) if at % 7 == 3}
    ready.spark.sql(f"DELETE FROM {ready.identifier(STREAM.name)} WHERE id IN ({', '.join(map(repr, sorted(gone)))})")
    rules = [{**each, "where": f"({each.get('where', 'true')}) and coalesce(shop, '') <> 'gone'"} for each in ALL_RULES]
    left = [row if row["id"] not in gone else hidden for row, hidden in zip(events, unseen, strict=True)]
    with backtest(ready, STREAM, [Candidate(each) for each in rules]) as result:
        assert alerts_of(result) == replayed(rules, left) != []
        assert result.deletes == 1
    publish(ready, ALL_RULES[:1])
    table = RulesTable(ready, STREAMS)
    table.command("advance", STREAM.name, time=START + 100_000_000)
    logged = [
        (STREAM.name, "*", None, "advance", 3, NOW, "2023-11-14T22:15:00Z"),
        (STREAM.name, "*", None, "clear_state", 5, NOW + dt.timedelta(seconds=1), None),
    ]
    names = ("stream", "rule_id", "version", "action", "arrival", "logged_at", "decision")
    ready.append_rows([dict(zip(names, row, strict=True)) for row in logged], "rule_log")
    commands = [
        ({"rule_id": "*", "status": "advance", "document": {"stream": STREAM.name, "time": "2023-11-14T22:15:00Z"}}, 3),
        ({"rule_id": "*", "status": "clear_state", "document": {"stream": STREAM.name}}, 5),
    ]
    with backtest(ready, STREAM, [Candidate(each) for each in rules]) as result:
        assert alerts_of(result) == replayed([*rules, *commands], left) != replayed(rules, left)
    # An evaluation that begins anew obeys them before the first commit, and only these count from then on.
    later = [
        (STREAM.name, None, None, "begun_afresh", 9, NOW + dt.timedelta(seconds=2), None),
        (STREAM.name, "*", None, "clear_state", None, NOW + dt.timedelta(seconds=3), None),
    ]
    ready.append_rows([dict(zip(names, row, strict=True)) for row in later], "rule_log")
    with backtest(ready, STREAM, [Candidate(each) for each in rules]) as result:
        assert alerts_of(result) == replayed(rules, left)


@pytest.mark.long
def test_c10_2_a_backtest_frees_its_blocks_and_needs_no_kept_rows(
    ready: Tables, spans: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = make_events(120, seed=24)
    append(ready, events)
    candidates, expected = [Candidate(each) for each in ALL_RULES], replayed(ALL_RULES, events)
    context = ready.spark.sparkContext._jsc

    def find_kept() -> set[int]:
        return set(context.getPersistentRDDs())

    before, bounds = find_kept(), list[str]()
    setting, keep_on_disk = "spark.sql.execution.arrow.maxBytesPerBatch", answers._keep_on_disk

    def keep(blocks: Any) -> bool:
        bounds.append(blocks.sparkSession.conf.get(setting))
        return keep_on_disk(blocks)

    monkeypatch.setattr(answers, "_keep_on_disk", keep)
    with backtest(ready, STREAM, candidates) as result:
        assert alerts_of(result) == expected
        assert find_kept() > before
    # What Spark measures at every event would take longer than to read it.
    assert bounds
    assert "67108864" not in bounds
    assert find_kept() == before

    def refuse(*_: object) -> None:
        raise PySparkException("[NOT_SUPPORTED_WITH_SERVERLESS] PERSIST TABLE is not supported on serverless compute")

    monkeypatch.setattr(type(ready.read(STREAM.name)), "persist", refuse)
    with backtest(ready, STREAM, candidates) as result:
        assert alerts_of(result) == expected
    assert find_kept() == before


@pytest.mark.long
def test_a_backtest_without_events(ready: Tables) -> None:
    for has_rows in (True, False):
        with backtest(ready, STREAM, [Candidate(RULES[0])], rows=has_rows) as result:
            assert (result.events, result.first_time) == (0, None)
            assert [(each.alerts, each.alerts_per_day) for each in result.figures] == [(0, None)]
            if has_rows:
                assert result.alerts.count() == 0
            else:
                with pytest.raises(SetupError, match="run it with rows=True to get the alerts"):
                    assert result.alerts


def vary(document: dict[str, Any]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The document with parameters, and two values for the first number and for the first duration among them."""
    values: dict[str, Any] = {}
    taken = take_out(document, values)
    varied: dict[str, list[Any]] = {}
    for name, value in values.items():
        if isinstance(value, int) and int not in {type(each[0]) for each in varied.values()}:
            varied[name] = [value, value + 1]
        elif isinstance(value, str) and str not in {type(each[0]) for each in varied.values()}:
            count, _, unit = value.partition(" ")
            varied[name] = [value, f"{2 * int(count)} {unit}"]
    return {**taken, "parameters": values}, varied


@pytest.mark.long
def test_c10_3_each_variant_is_the_document_with_its_values_written_in(ready: Tables, spans: None) -> None:
    events = make_events(200, seed=24)
    append(ready, events)
    tried = [vary({**each, "rule_id": f"r{at}"}) for at, each in enumerate(ALL_RULES)]
    # Names of different rules must differ, since a name is varied in all rules that have it.
    tried = [rename(document, varied, f"{at}x") for at, (document, varied) in enumerate(tried)]
    varied = {name: values for _, own in tried for name, values in own.items()}
    candidates = [Candidate(document, 3) for document, _ in tried]
    variants = [each for made in make_variants([each.document for each in candidates], varied) for each in made]
    assert len(variants) > 2 * len(ALL_RULES)
    with backtest(ready, STREAM, candidates, vary=varied) as result:
        found = sorted(collect_alerts(result.alerts))
        expected = [alerts_alone(each.document, events) for each in variants]
        assert found == sorted(row for rows in expected for row in rows)
        assert [each.rows for each in result.figures] == [len(rows) for rows in expected]
        assert [each.parameters for each in result.figures] == [each.parameters for each in variants]
        counted = {
            (row["rule_id"], row["variant"]): row["count"]
            for row in result.alerts.groupBy("rule_id", "variant").count().collect()
        }
        assert counted == {
            (each.document["rule_id"], each.text): len(rows)
            for each, rows in zip(variants, expected, strict=True)
            if rows
        }
        with backtest(ready, STREAM, candidates, vary=varied, rows=False) as counts:
            assert counts.figures == result.figures


def alerts_alone(document: Mapping[str, Any], events: list[dict[str, Any]]) -> list[AlertRow]:
    row = {"rule_id": document["rule_id"], "version": 3, "document": document}
    return replayed([(row, None)], events)


def rename(
    document: dict[str, Any], varied: dict[str, list[Any]], suffix: str
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The document with another name for each parameter."""
    parameters = document["parameters"]
    text = re.sub(r":(p\d+)\b", rf":\1_{suffix}", json.dumps({**document, "parameters": {}}))
    renamed = {**json.loads(text), "parameters": {f"{name}_{suffix}": value for name, value in parameters.items()}}
    return renamed, {f"{name}_{suffix}": values for name, values in varied.items()}


@pytest.mark.long
def test_c10_2_the_command_tries_files_and_ids_and_writes_its_alerts(
    ready: Tables, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = make_events(200, seed=11)
    append(ready, events)
    published = {**RULES[0], "parameters": {"limit": 2}, "when": f"({RULES[0]['when']}) or n >= :limit"}
    publish(ready, [published])
    RulesTable(ready, STREAMS).set_status("by-customer", "paused")
    conf, out = tmp_path / "conf", tmp_path / "out"
    (conf / "streams").mkdir(parents=True)
    (conf / "streams/payins.yml").write_text(yaml.safe_dump(STREAM.to_dict()))
    (conf / "tried.yml").write_text(yaml.safe_dump(MORE_RULES[3]))
    place = ["--root", str(ready.root), "--conf", str(conf)]

    def run(*words: str, code: int = 0) -> str:
        capsys.readouterr()
        assert main([*place, "backtest", *words]) == code
        said = capsys.readouterr()
        return said.err if code else said.out

    found = [
        json.loads(line)
        for line in run("by-customer", str(conf / "tried.yml"), "--json", "--out", str(out)).splitlines()
    ]
    rows = [{"rule_id": each["rule_id"], "version": 1, "document": each} for each in (published, MORE_RULES[3])]
    expected = replayed([(row, None) for row in rows], events)
    assert sorted(collect_alerts(ready.spark.read.format("delta").load(str(out)))) == expected
    assert {(row["rule_id"], row["version"]) for row in found} == {("by-customer", 1), ("minutes", 1)}
    assert [row["parameters"] for row in found] == [{"limit": 2}, {}]
    assert found[0]["alerts"] == len({row.alert_id for row in expected if row.rule_id == "by-customer"}) > 0
    assert found[0]["alerts_per_day"] == pytest.approx(found[0]["alerts"] / days_of(events))
    assert "200 events of the commits 0 to 8" in run("by-customer", "--since-commit", "3")
    shutil.rmtree(out)
    varied = ("by-customer", "--vary", "limit=2,3,2", "--json")
    (few, many), kept = (list(map(json.loads, run(*varied, *more).splitlines())) for more in ((), ("--out", str(out))))
    assert [few, many] == kept
    assert (few["parameters"], few["alerts"], few["flagged"]) == ({"limit": 2}, found[0]["alerts"], found[0]["flagged"])
    assert 0 < many["alerts"] < few["alerts"]
    written = ready.spark.read.format("delta").load(str(out))
    assert sorted(collect_alerts(written.where("variant = '{\"limit\": 2}'"))) == [
        row for row in expected if row.rule_id == "by-customer"
    ]
    beside = ("by-customer", "--against", "by-customer", "--vary", "limit=3", "--as-of", "2030-01-01")
    (row,) = map(json.loads, run(*beside, "--json").splitlines())
    assert (row["against"]["rule_id"], row["against"]["lost"]["alerts"]) == (
        "by-customer",
        few["alerts"] - many["alerts"],
    )
    assert f"with limit = 3: {few['alerts']} alerts become {many['alerts']} (0 gained," in run(*beside)
    assert "did you mean 'limit'?" in run("by-customer", "--vary", "limt=3", code=1)
    assert "--vary: 'limit' is not NAME=VALUE,VALUE" in run("by-customer", "--vary", "limit", code=2)
    assert "is not empty; name a new or empty folder" in run("by-customer", "--out", str(out), code=2)
    assert "not a rule in the table" in run("nobody", code=1)
    assert "--since must be a time" in run("by-customer", "--since", "soon", code=2)


def lose_feed(tables: Tables) -> None:
    """Compacts the table and removes the files of its commits so far, as OPTIMIZE and VACUUM do in time."""
    folder = Path(str(tables.root)) / STREAM.name
    files = list(folder.glob("*.parquet"))
    tables.spark.sql(f"OPTIMIZE {tables.identifier(STREAM.name)}")
    for file in files:
        file.unlink()


@pytest.mark.long
def test_c10_2_without_a_change_feed_events_come_in_the_order_of_their_stamps(ready: Tables, spans: None) -> None:
    events = make_events(200, seed=24)
    append(ready, [row for row in events if row["arrival"] <= 5])
    clear = {
        "stream": STREAM.name,
        "rule_id": "*",
        "action": "clear_state",
        "logged_at": dt.datetime.now(dt.timezone.utc),
    }
    lose_feed(ready)
    append(ready, [row for row in events if row["arrival"] > 5])
    candidates = [Candidate(each) for each in ALL_RULES]
    with backtest(ready, STREAM, candidates) as result:
        expected = replayed(ALL_RULES, events)
        found = alerts_of(result)
        assert [row._replace(arrival=None) for row in expected] == found != []
        assert (result.events, result.commits) == (200, (1, 8))
        warning, late = result.warnings
        assert "7 events came too late" in late
        assert "begins at commit 6: events come in the order of ingested_at, arrival is NULL" in warning
    # A command after commit 7, which can be read: the seventh stamp.
    ready.append_rows([{**clear, "arrival": 8}], "rule_log")
    with backtest(ready, STREAM, candidates) as result:
        command = ({"rule_id": "*", "status": "clear_state", "document": {"stream": STREAM.name}}, 7)
        expected = replayed([*ALL_RULES, command], events)
        assert [row._replace(arrival=None) for row in expected] == alerts_of(result)
    with pytest.raises(SetupError, match="so you cannot begin at a commit"):
        backtest(ready, STREAM, candidates, Range(since_commit=7))
    with backtest(ready, replace(STREAM, table=f"{ready.root}/{STREAM.name}"), candidates) as result:
        assert result.events == len([row for row in events if row["arrival"] > 5])
        assert "the events of earlier commits are not judged" in result.warnings[0]


LIMITED = {**RULES[0], "rule_id": "limited", "parameters": {"least": 2}, "when": "n >= :least"}


def label(tables: Tables, rows: list[tuple[str, bool, str]]) -> None:
    """Labels events: their ids, whether they are positive, and the hour of the 4th of March at which that became known."""
    times = {hour: dt.datetime.fromisoformat(f"2024-03-04T{hour}+00:00") for _, _, hour in rows}
    names = ("stream", "event_id", "positive", "label", "labelled_at", "source", "author")
    listed = [(STREAM.name, event_id, positive, "", times[hour], "desk", "ann") for event_id, positive, hour in rows]
    tables.append_rows([dict(zip(names, row, strict=True)) for row in listed], "labels")


WINDOWS = [
    window("minute", {"tumbling": "1 minute"}, when="total > 90"), window("gaps", {"session": "10 seconds"}, when="n > 1"),
    window("sized", {"sliding": "2 minutes", "slide": "1 minute"}, where="amount > 20", when="n >= 2", early=True),
    window("largest", {"tumbling": "1 minute"}, measures={"most": "max(amount) filter (where shop = 'a')"}, early=True, when="most > 20", message=""),
]  # fmt: skip
MANY = sequence("many", [{"name": "small", "where": "amount < 20", "at_least": 2}, {"name": "large", "where": "amount = 99"}], message="")  # fmt: skip


def make_long_sequence() -> list[dict[str, Any]]:
    """Events of customer 7: 250 small ones and a large one, and one later than all, which lets the watermark pass."""
    base, time = {"customer": 7, "shop": "a"}, START + 1_000_000_000
    many = [
        {**base, "id": f"s{at}", "at": time + at * 1_000, "amount": "1.00", "arrival": 20 + at // 100}
        for at in range(250)
    ]
    last = {**base, "id": "end", "at": time + 1_000_000, "amount": "99.00", "arrival": 23}
    far = {**base, "id": "far", "at": time + 86_400_000_000, "amount": "1.00", "arrival": 24, "customer": 9}
    return [*many, last, far]


def list_behind(events: DataFrame) -> dict[str, set[str]]:
    """Lists the ids of the events behind each standing alert, by its id."""
    rows = events.groupBy("alert_id").agg(F.collect_list("event_id").alias("ids")).collect()
    assert all(len(row["ids"]) == len(set(row["ids"])) for row in rows)
    return {row["alert_id"]: set(row["ids"]) for row in rows}


@pytest.mark.long
def test_c10_4_windows_and_long_sequences_flag_in_a_backtest_what_the_stream_says_of_its_own_alerts(
    ready: Tables, spans: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[DataFrame] = []
    count = backtests.count_trials

    def keep(trials: int, last: DataFrame, events: DataFrame, *others: Any) -> LabelCounts:
        counted.append(events)
        return count(trials, last, events, *others)

    monkeypatch.setattr(backtests, "count_trials", keep)
    rules = [*WINDOWS, MANY]
    events = [*make_events(300, seed=3), *make_long_sequence()]
    append(ready, events)
    label(ready, [(row["id"], at % 3 == 0, "10:00") for at, row in enumerate(events) if at % 2])
    publish(ready, rules)
    folder = checkpoint_folder(ready, STREAM)
    Evaluation(ready, STREAM, STREAMS, folder, once=True, admission={"maxFilesPerTrigger": "7"}).run()
    live = RuleFigures(ready, STREAM)
    groups = live._flagged.groupBy("alert_id").agg(F.collect_set("event_id").alias("ids")).collect()
    expected = {row["alert_id"]: set(row["ids"]) for row in groups}
    assert {row["rule_id"] for row in live._flagged.select("rule_id").distinct().collect()} == {
        each["rule_id"] for each in rules
    }
    recorded = live.by_rule().collect()
    with backtest(ready, STREAM, [Candidate(each) for each in rules], rows=False) as result:
        found = list_behind(counted[0])
        assert found == expected
        assert max(map(len, found.values())) == 251
        names = ("rule_id", "alerts", "keys", "flagged", "labelled", "positives", "precision", "recall")
        by_id = {row["rule_id"]: tuple(row[name] for name in names) for row in recorded}
        assert {each.rule_id: tuple(getattr(each, name) for name in names) for each in result.figures} == {
            each["rule_id"]: by_id[each["rule_id"]] for each in rules
        }
    # Late events are among those that count, and one that came after an alert's last row is not.
    assert any(row.revision for row in alerts_alone(WINDOWS[2], events))


@pytest.mark.long
def test_c10_4_a_window_counts_what_pandas_finds_in_it(ready: Tables, spans: None) -> None:
    document = window(
        "spend", {"tumbling": "1 minute"}, parameters={"least": 60}, when="spent >= :least", message="",
        measures={"spent": "sum(amount) filter (where shop = 'a')"},
    )  # fmt: skip
    events = make_events(300, seed=9)
    append(ready, events)
    # Nothing is too late here, so that a frame of all events says what counts.
    stream = Stream.from_dict({**STREAM.to_dict(), "max_out_of_orderness": "1 hour"})
    end = {"id": "far", "at": START + 86_400_000_000, "customer": 9, "shop": "b", "amount": "1.00", "arrival": 99}
    append(ready, [end])
    positives = {row["id"] for at, row in enumerate(events) if at % 4 == 0}
    label(ready, [(row["id"], row["id"] in positives, "10:00") for row in events[::2]])
    frame = pd.DataFrame(events)
    frame = frame[frame.shop == "a"].assign(amount=frame.amount.map(Decimal), minute=frame["at"] // 60_000_000)
    groups = frame.groupby(["customer", "minute"], dropna=False)
    spent = groups["amount"].transform("sum")
    with backtest(ready, stream, [Candidate(document)], vary={"least": [60, 120, 9_999]}) as result:
        for figures in result.figures:
            flagged = frame[spent >= int(figures.parameters["least"])]  # type: ignore[call-overload]
            labelled = flagged.id.isin({row["id"] for row in events[::2]}).sum()
            right = flagged.id.isin(positives).sum()
            assert (figures.flagged, figures.labelled, figures.positives) == (len(flagged), labelled, right)
            assert figures.alerts == flagged.groupby(["customer", "minute"], dropna=False).ngroups
            assert (figures.precision, figures.recall) == (
                right / labelled if labelled else None,
                right / len(positives),
            )
        assert result.figures[0].flagged > result.figures[1].flagged > result.figures[2].flagged == 0


@pytest.mark.parametrize(
    ("events", "cores", "shards"),
    [
        (0, 2, 2),
        (1_000_000, 2, 2),
        (20_300_000, 2, 2),
        (25_000_000, 2, 4),
        (20_300_000, 8, 8),
        (5_000_000_000, 8, 400),
        (1, 500, 400),
    ],
)
def test_every_core_judges_as_many_shards_as_the_others(events: int, cores: int, shards: int) -> None:
    assert tasks.count_shards(events, cores) == shards


def test_an_event_meets_only_the_windows_about_where_it_is(ready: Tables) -> None:
    minute = 60_000_000

    def count_pairs(size: int) -> int:
        def make_time(column: str) -> Any:
            return F.timestamp_micros(F.expr(column).cast("bigint"))

        each = ready.spark.range(size).select("id", F.lit("k").alias("key"), F.lit(0).alias("tried"))
        windows = each.select(
            "tried", "key", F.col("id").cast("string").alias("alert_id"), F.lit(size).alias("arrival"),
            make_time(f"id * {minute} + 7").alias("window_start"), make_time(f"(id + 1) * {minute} + 7").alias("window_end"),
        )  # fmt: skip
        events = each.select(
            "tried",
            "key",
            F.col("id").cast("string").alias("event_id"),
            "id",
            make_time(f"id * {minute} + 9").alias("event_time"),
        )
        return _pair_by_span(windows, events.withColumnRenamed("id", "arrival"), {0: 0}, {0: minute}).count()

    assert count_pairs(400) <= 2 * 400


@pytest.mark.long
@pytest.mark.parametrize("has_rows", [True, False])
def test_c10_3_two_versions_are_compared_by_key_and_event(ready: Tables, *, has_rows: bool) -> None:
    events = make_events(150, seed=11)
    append(ready, events)
    old, new = {**LIMITED, "when": "n >= 1"}, {**LIMITED, "suppress": "1 microsecond"}
    before, after = (
        {(row.key, row.event_id): row for row in replayed([each], events) if row.verdict == "raised"}
        for each in (old, new)
    )
    assert len(before) > len(after) > 2
    lost, kept = before.keys() - after.keys(), before.keys() & after.keys()
    lost_ids, kept_ids = (sorted(event for _, event in each) for each in (lost, kept))
    positive, negative = {lost_ids[0], kept_ids[0]}, {kept_ids[-1]}
    unflagged = next(row["id"] for row in events if row["id"] not in {event for _, event in before})
    known = [(each, True, "10:00") for each in positive] + [(each, False, "10:00") for each in negative]
    label(ready, [*known, (unflagged, True, "10:00"), ("nobody", True, "10:00"), (lost_ids[-1], False, "12:00")])
    as_of = dt.datetime(2024, 3, 4, 11, tzinfo=dt.timezone.utc)
    candidate, against = Candidate(new, 7), Candidate(old, 6)
    with backtest(ready, STREAM, [candidate], against=against, rows=has_rows, as_of=as_of) as result:
        (found,) = result.comparisons
        assert (found.rule_id, found.version) == ("limited", 6)
        assert [found.gained.alerts, found.lost.alerts, found.kept.alerts] == [0, len(lost), len(kept)]
        assert (found.kept.positives, found.lost.positives, found.kept.negatives) == (1, 1, 1)
        assert found.keys_lost == len({key for key, _ in before} - {key for key, _ in after})
        assert found.sentence == f"{len(before)} alerts become {len(after)}; of 2 with a positive label 1 stay"
        (figures,) = result.figures
        assert (figures.flagged, figures.labelled, figures.positives) == (len(after), 1 + 1, 1)
        assert (figures.precision, figures.recall) == (1 / (1 + 1), 1 / 3)
        changes = {(row["event_id"], row["change"]) for row in result.find_changes().collect()}
        assert changes == {(event, "lost") for _, event in lost} | {(event, "kept") for _, event in kept}
        if has_rows:
            assert {row["rule_version"] for row in result.alerts.select("rule_version").distinct().collect()} == {7}


def days_of(events: list[dict[str, Any]]) -> float:
    times = [row["at"] for row in events]
    return (max(times) - min(times)) / 86_400_000_000


def drawn(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    """So many of what the strategy draws."""
    found: list[Any] = []

    @settings(max_examples=count, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def collect(each: Any) -> None:
        found.append(each)

    collect()
    return found


@pytest.mark.long
def test_c10_2_any_rules_over_any_events_give_what_replay_gives(tables: Tables, spans: None) -> None:
    stream = CASES["plain"]
    tables.create(stream)
    events = max(drawn(rows(), 40), key=lambda each: len({row["arrival"] for row in each}))
    commits = sorted({row["arrival"] for row in events})
    events = [{**row, "arrival": commits.index(row["arrival"]) + 1} for row in events]
    append_rows(tables, events, stream.fields)
    kinds = st.sampled_from(["lookback", "tumbling", "sliding", "session", "sequence"])
    documents_ = [
        {**document, "rule_id": f"r{at}"}
        for at, document in enumerate(drawn(kinds.flatmap(lambda kind: documents("r", kind)), 60))
    ]
    with backtest(tables, stream, [Candidate(each) for each in documents_]) as result:
        expected = lookback.replay(documents_, events, stream)
        assert sorted(collect_alerts(result.alerts)) == sorted(list_alerts(expected)) != []
        failed = Counter(row.rule_id for row in expected.errors if row.action == "failed")
        assert {each.rule_id for each in result.figures if each.failures} == set(failed)

"""Proof of what is recorded: a replay from the tables has every row, and a row that somebody changed is found (contract 10.6)."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from pyspark.sql import functions as F  # noqa: N812

from lookback.cli import main
from lookback.core.errors import SetupError
from lookback.core.streams.declarations import Declarations
from lookback.spark.record.evaluations import Term
from lookback.spark.record.record import Record
from lookback.spark.replay import history, tasks
from lookback.spark.replay.proof import Proof, describe_match, prove
from lookback.spark.replay.saved import SavedState
from lookback.spark.rules import RulesTable
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from lookback.spark.tables.lakehouse import Tables
from payins import (
    MORE_RULES,
    RULES,
    START,
    STREAM,
    STREAMS,
    append,
    lose_first_files,
    make_events,
    publish,
    rule,
    window,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = pytest.mark.spark


@pytest.fixture
def judged(ready: Tables, monkeypatch: pytest.MonkeyPatch) -> Tables:
    """Tables of a stream with every kind of rule, changes of rules between batches, a command and deletions."""
    monkeypatch.setattr(history, "_SPAN_EVENTS", 60)
    monkeypatch.setattr(tasks, "_SHARD_EVENTS", 100)
    rules = RulesTable(ready, STREAMS)
    publish(ready, [RULES[0], RULES[3], *MORE_RULES])
    events = make_events(300, seed=24)
    append(ready, [row for row in events if row["arrival"] <= 7])
    evaluate(ready)
    rules.command("advance", STREAM.name, time=START + 250_000_000)
    rules.push({**MORE_RULES[3], "message": "{n}"})
    rules.set_status("by-customer", "paused")
    ready.spark.sql(f"DELETE FROM {ready.identifier(STREAM.name)} WHERE id IN ('e170', 'e171')")
    # The deletion is commit 8.
    append(ready, [{**row, "arrival": row["arrival"] + 1} for row in events if row["arrival"] > 7])
    evaluate(ready)
    return ready


def evaluate(tables: Tables) -> None:
    folder = checkpoint_folder(tables, STREAM)
    Evaluation(tables, STREAM, STREAMS, folder, once=True, admission={"maxFilesPerTrigger": "3"}).run()


def advance(tables: Tables, beyond: int) -> int:
    """Moves the watermark beyond the last event, in microseconds, and judges. Returns how many alerts that raised."""
    alerts, highest = tables.read("alerts"), tables.read(STREAM.name).agg(F.max(F.unix_micros(STREAM.event_time)))
    before, ((last,),) = alerts.count(), highest.collect()
    RulesTable(tables, STREAMS).command("advance", STREAM.name, time=last + beyond)
    evaluate(tables)
    return tables.read("alerts").count() - before


def proofs_of(tables: Tables, **commits: int) -> dict[str | None, Proof]:
    with prove(tables, STREAM, STREAMS, **commits) as proofs:
        found = {row.rule_id: row for row in proofs.rows}
        differing = {(row["side"], row["rule_id"]) for row in proofs.differences.collect()}
        expected = {("recorded", row.rule_id) for row in proofs.rows if row.only_recorded and row.rule_id}
        expected |= {("replayed", row.rule_id) for row in proofs.rows if row.only_replayed and row.rule_id}
        assert differing == expected
        return found


@pytest.mark.long
def test_c10_6_what_the_stream_wrote_is_proved_and_what_somebody_changed_is_found(
    judged: Tables, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = proofs_of(judged)
    assert all(row.holds for row in found.values()), found
    assert None in found
    assert {each["rule_id"] for each in MORE_RULES} <= set(found)
    alerts, late = judged.read("alerts").count(), judged.read("late_events").count()
    # A row about an event that was deleted later is alike, too, as long as its files are there.
    assert sum(row.alike for rule_id, row in found.items() if rule_id) == alerts > 100
    assert found[None].alike == late > 3
    assert sum(row.unprovable for row in found.values()) == 0
    part = proofs_of(judged, first=3, last=6)
    between = judged.read("alerts").where("arrival between 3 and 6").count()
    assert sum(row.alike for rule_id, row in part.items() if rule_id) == between > 0
    assert all(row.holds for row in part.values())

    names = judged.read("alerts").columns
    row = judged.read("alerts").where("rule_id = 'minutes' and revision = 0").orderBy("arrival").first()
    assert row is not None
    judged.spark.sql(
        f"UPDATE {judged.identifier('alerts')} SET message = 'nothing' WHERE alert_id = '{row['alert_id']}' AND revision = 0"
    )
    gone = judged.read("alerts").where("rule_id = 'sessions'").first()
    assert gone is not None
    judged.spark.sql(
        f"DELETE FROM {judged.identifier('alerts')} WHERE alert_id = '{gone['alert_id']}' AND revision = {gone['revision']}"
    )
    judged.append(
        judged.read("alerts")
        .where(f"alert_id = '{row['alert_id']}'")
        .limit(1)
        .withColumn("alert_id", F.lit("0" * 32))
        .select(names),
        "alerts",
    )
    lost = judged.read("late_events").agg(F.min("event_id").alias("id")).collect()[0]["id"]
    judged.spark.sql(f"DELETE FROM {judged.identifier('late_events')} WHERE event_id = '{lost}'")
    changed = proofs_of(judged)
    assert (changed["minutes"].only_recorded, changed["minutes"].only_replayed) == (2, 1)
    assert (changed["sessions"].only_recorded, changed["sessions"].only_replayed) == (0, 1)
    assert changed[None].only_replayed == 1
    assert {rule_id for rule_id, row in changed.items() if not row.holds} == {"minutes", "sessions", None}

    conf = tmp_path / "conf/streams"
    conf.mkdir(parents=True)
    (conf / "payins.yml").write_text(yaml.safe_dump(STREAM.to_dict()))
    place = ["--root", str(judged.root), "--conf", str(conf.parent)]
    capsys.readouterr()
    assert main([*place, "prove", STREAM.name, "--json"]) == 1
    listed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {each["rule_id"]: Proof(**each) for each in listed} == changed
    assert main([*place, "prove", STREAM.name]) == 1
    said = capsys.readouterr().out
    assert "only recorded: raised" in said
    assert said.splitlines()[-1] == "commits 0 to 13: the tables differ from a replay"


@pytest.mark.long
def test_c10_6_a_nightly_proof_goes_on_from_its_saved_state(
    ready: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "_SPAN_EVENTS", 60)
    monkeypatch.setattr(tasks, "_SHARD_EVENTS", 100)
    rules = RulesTable(ready, STREAMS)
    publish(ready, [RULES[0], RULES[3], *MORE_RULES])
    events = make_events(300, seed=31)
    saved, nights = tmp_path / "proofs", list[dict[str | None, Proof]]()
    read, raised = list[tuple[int, int]](), list[int]()
    read_changes = Tables.read_changes

    def note(tables: Tables, name: str, start: int, end: int | None = None) -> DataFrame:
        if name == STREAM.name:
            read.append((start, tables.version(name) if end is None else end))
        return read_changes(tables, name, start, end)

    for first, last in ((1, 4), (5, 8), (9, 12)):
        append(ready, [row for row in events if first <= row["arrival"] <= last])
        evaluate(ready)
        if last == 8:
            # What a command raises after the last commit counts to that commit: before a proof, and after it.
            raised.append(advance(ready, 10_000_000))
        with monkeypatch.context() as patched:
            patched.setattr(Tables, "read_changes", note)
            with prove(ready, STREAM, STREAMS, saved=saved) as proofs:
                nights.append({row.rule_id: row for row in proofs.rows})
                assert proofs.commits == (first if first > 1 else 0, last)
        rules.push({**MORE_RULES[3], "message": f"{{n}} after {last}"})
        rules.set_status("by-customer", "paused" if last == 4 else "active")
        if last == 8:
            raised.append(advance(ready, 60_000_000))
    assert min(raised) > 0
    assert min(start for start, _ in read[-3:]) == 9
    assert len(list(saved.iterdir())) == 1
    assert all(row.holds for night in nights for row in night.values()), nights
    whole = proofs_of(ready)
    for rule_id, row in whole.items():
        alike = sum(night[rule_id].alike for night in nights if rule_id in night)
        assert alike == row.alike, rule_id
    assert sum(row.alike for row in nights[2].values()) > 20

    with prove(ready, STREAM, STREAMS, saved=saved) as nothing_new:
        assert [vars(row) for row in nothing_new.rows] == [vars(Proof(None, 0, 0, 0, 0))]
        assert nothing_new.differences.count() == 0
    with pytest.raises(SetupError, match="a nightly proof begins after its saved state"):
        prove(ready, STREAM, STREAMS, saved=saved, first=3)
    # A state of other settings is of no use.
    declarations = Record.read(ready, STREAM, Term()).declarations
    assert SavedState.find(saved, Declarations.of(replace(STREAM, allowed_lateness=1))) is None
    ready.spark.sql(f"DELETE FROM {ready.identifier('alerts')} WHERE arrival = 11")
    (saved / next(saved.iterdir()).name / "state.json").unlink()
    with prove(ready, STREAM, STREAMS, saved=saved) as proofs:
        assert sum(row.only_replayed for row in proofs.rows) > 0
        assert proofs.commits == (0, 12)
    assert SavedState.find(saved, declarations) is None
    with prove(ready, STREAM, STREAMS, saved=saved, accept=True):
        accepted = SavedState.find(saved, declarations)
        assert accepted is not None
        assert accepted.through == 12


@pytest.mark.long
def test_c10_6_what_was_written_before_a_fresh_beginning_cannot_be_proved_and_is_no_difference(ready: Tables) -> None:
    publish(ready, [RULES[0], MORE_RULES[3]])
    append(ready, make_events(120, seed=5))
    evaluate(ready)
    written = ready.read("alerts").count()
    late = ready.read("late_events").count()
    assert proofs_of(ready)[None].alike == late
    folder = f"{checkpoint_folder(ready, STREAM)}-fresh"
    Evaluation(ready, STREAM, STREAMS, folder, once=True, fresh=True).run()
    assert ready.read("alerts").count() == 2 * written
    (begun,) = ready.read("rule_log").where("action = 'begun_afresh'").collect()
    assert begun["arrival"] is not None

    found = proofs_of(ready)
    assert all(row.holds for row in found.values()), found
    assert sum(row.alike for rule_id, row in found.items() if rule_id) == written
    assert sum(row.unprovable for rule_id, row in found.items() if rule_id) == written
    assert (found[None].alike, found[None].unprovable) == (late, late)


@pytest.mark.long
def test_c10_6_where_the_first_events_are_gone_what_depends_on_them_is_unprovable_and_the_rest_is_proved(
    ready: Tables, tmp_path: Path
) -> None:
    short = {"window": "1 minute", "when": "n >= 2"}
    documents = [
        rule("short", **short), rule("revised", **short, late="revise"), rule("held", **short, suppress="20 seconds"),
        window("minutes", {"tumbling": "30 seconds"}), {**MORE_RULES[8], "rule_id": "silent"},
    ]  # fmt: skip
    publish(ready, documents)
    events = make_events(650, seed=8)
    append(ready, [row for row in events if row["arrival"] <= 22])
    evaluate(ready)
    lose_first_files(ready, 8)
    with prove(ready, STREAM, STREAMS, saved=tmp_path) as proofs:
        found = {row.rule_id: row for row in proofs.rows}
        assert all(row.holds for row in found.values()), found
        said = re.search(r"begins at commit 9, .* up to commit (\d+): .*, nor those of held, whose", proofs.gone)
    assert said is not None
    exact = int(said[1]) + 1
    assert 10 < exact <= 20
    alerts = ready.read("alerts")
    # Whatever came before the first commit that can be read is unprovable, and no row afterwards is.
    for rule_id in ("short", "revised", "minutes", "silent"):
        own = alerts.where(f"rule_id = '{rule_id}'")
        early, since = own.where("arrival < 9").count(), own.where(f"arrival >= {exact}").count()
        assert found[rule_id].unprovable >= early > 0, rule_id
        assert found[rule_id].alike >= since > 0, rule_id
    late = ready.read("late_events")
    assert found[None].alike >= late.where(f"arrival >= {exact}").count() > 0

    # The next night goes on from there, and finds what somebody changed, but not of a rule whose alerts hang together.
    append(ready, [{**row, "arrival": row["arrival"] + 1} for row in events if row["arrival"] > 22])
    evaluate(ready)
    for rule_id in ("short", "held"):
        row = ready.read("alerts").where(f"arrival > 23 and rule_id = '{rule_id}' and revision = 0").first()
        assert row is not None
        name = ready.identifier("alerts")
        ready.spark.sql(f"UPDATE {name} SET message = 'nothing' WHERE alert_id = '{row['alert_id']}' AND revision = 0")
    with prove(ready, STREAM, STREAMS, saved=tmp_path) as proofs:
        assert proofs.commits[0] > 22
        changed = {row.rule_id: row for row in proofs.rows}
    assert (changed["short"].only_recorded, changed["short"].only_replayed) == (1, 1)
    assert [rule_id for rule_id, row in changed.items() if not row.holds] == ["short"]
    assert changed["held"].unprovable >= 1
    assert changed["minutes"].unprovable == 0

    # Soon after the loss nothing can be told yet.
    with prove(ready, STREAM, STREAMS, last=10) as proofs:
        assert "no row can be proved to differ yet" in proofs.gone
        assert all(row.holds for row in proofs.rows)


@pytest.mark.long
def test_c10_6_where_the_first_rules_are_gone_their_rows_of_now_are_taken_and_the_rest_is_unprovable(
    ready: Tables, tmp_path: Path
) -> None:
    rules, name = RulesTable(ready, STREAMS), ready.identifier("rules")
    documents = [
        rule("kept"),
        rule("paused"),
        rule("deleted", group_by=["shop"]),
        window("minutes", {"tumbling": "1 minute"}),
    ]
    publish(ready, documents)
    events = make_events(300, seed=8)
    append(ready, [row for row in events if row["arrival"] <= 3])
    evaluate(ready)
    rules.push({**documents[0], "when": "n >= 2"})
    rules.push({**rule("beside"), "group_by": ["shop"]})
    ready.spark.sql(f"UPDATE {name} SET status = 'paused' WHERE rule_id = 'paused'")
    append(ready, [row for row in events if 3 < row["arrival"] <= 6])
    evaluate(ready)
    ready.spark.sql(f"UPDATE {name} SET status = 'active' WHERE rule_id = 'paused'")
    ready.spark.sql(f"DELETE FROM {name} WHERE rule_id = 'deleted'")
    append(ready, [row for row in events if 6 < row["arrival"] <= 9])
    evaluate(ready)
    prove(ready, STREAM, STREAMS, saved=tmp_path).close()
    lose_first_files(ready, ready.version("rules"), "rules")
    rules.push({**documents[0], "when": "n >= 3"})
    append(ready, [row for row in events if row["arrival"] > 9])
    evaluate(ready)

    with prove(ready, STREAM, STREAMS) as proofs:
        found = {row.rule_id: row for row in proofs.rows}
        assert all(row.holds for row in found.values()), found
        assert re.search(
            r"begins at commit \d+: earlier versions are read from the table's current rows. Some versions of deleted, paused "
            r"are missing: their rows cannot be proved to differ, nor those of beside, kept, which came into force later, "
            r"nor those of late_events$",
            proofs.gone,
        )
    counts = {row["rule_id"]: row["count"] for row in ready.read("alerts").groupBy("rule_id").count().collect()}
    assert {rule_id: row.alike for rule_id, row in found.items() if rule_id in ("kept", "minutes")} == {
        rule_id: counts[rule_id] for rule_id in ("kept", "minutes")
    }
    assert {rule_id: row.unprovable for rule_id, row in found.items() if rule_id in ("paused", "deleted")} == {
        rule_id: counts[rule_id] for rule_id in ("paused", "deleted")
    }
    assert min(counts.values()) > 0
    with prove(ready, STREAM, STREAMS, saved=tmp_path) as proofs:
        assert proofs.commits[0] == 10
        assert all(row.holds for row in proofs.rows), proofs.rows
        assert {row.rule_id for row in proofs.rows if row.alike} >= {"kept", "minutes", "beside"}

    alerts = ready.identifier("alerts")
    ready.spark.sql(f"UPDATE {alerts} SET message = 'nothing' WHERE rule_id in ('minutes', 'paused') AND arrival = 5")
    changed = proofs_of(ready)
    assert {rule_id for rule_id, row in changed.items() if not row.holds} == {"minutes"}


@pytest.mark.parametrize(
    ("unprovable", "sentence"),
    [
        ((0, 0), "all rows match a replay"),
        ((1, 0), "all rows that can be proved match a replay; 1 row is unprovable"),
        ((140, 7), "all rows that can be proved match a replay; 147 rows are unprovable"),
    ],
)
def test_rows_that_cannot_be_proved_are_never_said_to_match(unprovable: tuple[int, ...], sentence: str) -> None:
    assert describe_match([Proof("r", 100, 0, 0, each) for each in unprovable]) == sentence

"""A stream's lateness changes at a restart: rule_log says so, and what is judged again is judged as then (contract 10.2)."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F  # noqa: N812

from lookback.core.streams.declarations import list_settings
from lookback.core.values.zones import ZONES_RELEASE
from lookback.spark.explaining.counted import find_counted_events
from lookback.spark.explaining.explanations import explain, explain_event
from lookback.spark.replay.backtest import Candidate, backtest
from lookback.spark.replay.proof import prove
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from payins import MORE_RULES, RULES, STREAM, append, forget_commit, make_events, outputs, publish

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream
    from lookback.spark.replay.proof import Proof
    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark

EVENTS = make_events(300, seed=24)
# STREAM allows 20 s of disorder; afterwards less, then more.
STRICT = replace(STREAM, max_out_of_orderness=1_000_000, allowed_lateness=20_000_000, max_revisions=3)
LAX = replace(STREAM, max_out_of_orderness=60_000_000)


def evaluate(tables: Tables, stream: Stream, checkpoint: str | None = None, **options: Any) -> None:
    folder = checkpoint or checkpoint_folder(tables, stream)
    Evaluation(tables, stream, {stream.name: stream}, folder, once=True, **options).run()


def judge_parts(tables: Tables) -> None:
    """Twelve commits, four under each declaration."""
    publish(tables, [RULES[0], RULES[3], *MORE_RULES])
    for stream, last in ((STREAM, 4), (STRICT, 8), (LAX, 12)):
        append(tables, [row for row in EVENTS if last - 4 < row["arrival"] <= last])
        evaluate(tables, stream)


def list_declared(tables: Tables) -> list[tuple[int | None, dict[str, Any]]]:
    rows = tables.read("rule_log").where("action = 'declared'").orderBy("logged_at").collect()
    return [(row["arrival"], json.loads(row["message"])) for row in rows]


def proofs_of(tables: Tables, stream: Stream, **options: Any) -> dict[str | None, Proof]:
    with prove(tables, stream, {stream.name: stream}, **options) as proofs:
        return {row.rule_id: row for row in proofs.rows}


@pytest.mark.long
def test_c10_2_declarations_are_logged_when_they_change_and_proved_and_rebuilt_by(
    ready: Tables, caplog: pytest.LogCaptureFixture
) -> None:
    judge_parts(ready)
    evaluate(ready, LAX)
    listed = list_declared(ready)
    assert [arrival for arrival, _ in listed] == [None, 4, 8]
    for (_, settings), stream in zip(listed, (STREAM, STRICT, LAX), strict=True):
        release = settings.pop("release")
        assert settings.pop("zones") == ZONES_RELEASE
        assert release
        assert settings == list_settings(stream)
    found = proofs_of(ready, LAX)
    assert all(row.holds and not row.unprovable for row in found.values()), found
    assert sum(row.alike for row in found.values()) > 100

    # Without the rows today's declaration counts, and the rest of the tables was judged by others.
    name = ready.identifier("rule_log")
    ready.spark.sql(f"DELETE FROM {name} WHERE action = 'declared'")
    assert not all(row.holds for row in proofs_of(ready, LAX).values())


@pytest.mark.long
def test_c10_2_a_rebuild_and_a_backtest_take_the_declarations_of_then(ready: Tables, tmp_path: Path) -> None:
    judge_parts(ready)
    before = outputs(ready)
    shutil.rmtree(checkpoint_folder(ready, STREAM))
    # Declared once more, the settings count after what is judged again.
    evaluate(ready, STRICT, rebuild=True, admission={"maxFilesPerTrigger": "3"})
    assert [arrival for arrival, _ in list_declared(ready)] == [None, 4, 8, 12]
    after = outputs(ready)
    assert after["alerts"] == before["alerts"]
    assert after["late"] == before["late"]
    assert sum(after["log"].values()) == sum(before["log"].values()) + 1
    append(ready, [{**row, "id": f"more-{row['id']}"} for row in EVENTS if row["arrival"] == 12])
    evaluate(ready, STRICT)
    found = proofs_of(ready, STRICT)
    assert all(row.holds for row in found.values()), found

    document = RULES[0]
    with backtest(ready, STREAM, [Candidate(document)]) as result:
        tried = {(row["alert_id"], row["revision"], row["verdict"]) for row in result.alerts.collect()}
    own = ready.read("alerts").where(f"rule_id = '{document['rule_id']}'").collect()
    assert tried == {(row["alert_id"], row["revision"], row["verdict"]) for row in own}
    assert len(tried) > 10


@pytest.mark.long
def test_c10_9_alerts_are_explained_and_their_events_counted_by_the_declarations_of_then(ready: Tables) -> None:
    judge_parts(ready)
    alerts = ready.read("alerts")
    raised = alerts.where("verdict = 'raised'")
    unnamed = raised.where("rule_id in ('minutes', 'tens', 'sessions', 'large-small', 'fixed')")
    last = (
        unnamed.groupBy("alert_id").agg(F.max_by(F.struct(*unnamed.columns), "revision").alias("row")).select("row.*")
    )
    counted = (
        find_counted_events(ready, {LAX.name: LAX}, last)
        .groupBy("alert_id")
        .agg(F.count("event_id").alias("counted"), F.count_if(F.col("event_id").isNull()).alias("unknown"))
    )
    rows = last.join(counted, "alert_id").collect()
    assert len(rows) == last.count() > 40
    assert not [row["alert_id"] for row in rows if row["unknown"]]
    for row in rows:
        if row["rule_id"] in ("minutes", "tens"):
            assert int(row["measures"]["n"]) == row["counted"], row
    for rule_id in (RULES[0]["rule_id"], "revised"):
        for first in (1, 5, 9):
            own = raised.where(f"rule_id = '{rule_id}' and arrival between {first} and {first + 3}")
            row = own.orderBy(F.col("arrival").desc(), "event_time").first()
            assert row is not None
            assert explain(ready, {LAX.name: LAX}, row["alert_id"], revision=row["revision"]).consistent, row
    # An event that STREAM would take, and STRICT discarded.
    late = ready.read("late_events").where("action = 'discarded' and arrival between 5 and 8").first()
    assert late is not None
    found = explain_event(ready, {LAX.name: LAX}, RULES[0]["rule_id"], late["event_id"])
    assert any("so the rule discarded it" in reason.text for reason in found.reasons), found.reasons


@pytest.mark.long
def test_c3_1_a_batch_that_is_repeated_under_another_declaration_is_judged_as_it_began(
    ready: Tables, tmp_path: Path
) -> None:
    publish(ready, [RULES[0], RULES[3], *MORE_RULES])
    append(ready, [row for row in EVENTS if row["arrival"] <= 4])
    evaluate(ready, STREAM)
    append(ready, [row for row in EVENTS if 4 < row["arrival"] <= 8])
    evaluate(ready, STREAM)
    expected = outputs(ready)
    # As if killed before the alerts were written: the batch is planned, and its late events are there.
    forget_commit(ready, "alerts")
    folder = Path(checkpoint_folder(ready, STREAM))
    last = max(int(file.name) for file in (folder / "commits").glob("[0-9]*"))
    for file in (folder / "commits").glob(f"*{last}*"):
        file.unlink()
    append(ready, [row for row in EVENTS if row["arrival"] > 8])
    evaluate(ready, STRICT)
    assert [arrival for arrival, _ in list_declared(ready)] == [None, 8]
    after = outputs(ready)
    for name in ("alerts", "late"):
        early = {key: count for key, count in expected[name].items() if after[name][key] != count}
        assert not early
    found = proofs_of(ready, STRICT)
    assert all(row.holds for row in found.values()), found


@pytest.mark.long
def test_c10_6_a_saved_proof_goes_on_over_a_change_of_the_declaration(
    ready: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(ready, [RULES[0], *MORE_RULES])
    for stream, last in ((STREAM, 4), (STRICT, 8)):
        append(ready, [row for row in EVENTS if last - 4 < row["arrival"] <= last])
        evaluate(ready, stream)
        with prove(ready, stream, {stream.name: stream}, saved=tmp_path) as proofs:
            assert all(row.holds for row in proofs.rows), proofs.rows
            assert proofs.commits == (0 if last == 4 else 5, last)

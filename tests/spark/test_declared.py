"""A stream's lateness changes at a restart: rule_log says so, and what is judged again is judged as then (contract 10.2)."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lookback.core.streams.declarations import list_settings
from lookback.spark.replay.backtest import Candidate, backtest
from lookback.spark.replay.proof import prove
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from payins import MORE_RULES, RULES, STREAM, append, forget_commit, make_events, outputs, publish

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream
    from lookback.spark.replay.proof import Proof
    from lookback.spark.tables.lakehouse import Tables

pytestmark = [pytest.mark.spark, pytest.mark.slow]

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


def test_c10_2_declarations_are_logged_when_they_change_and_proved_and_rebuilt_by(
    ready: Tables, caplog: pytest.LogCaptureFixture
) -> None:
    judge_parts(ready)
    evaluate(ready, LAX)
    listed = list_declared(ready)
    assert [arrival for arrival, _ in listed] == [None, 4, 8]
    for (_, settings), stream in zip(listed, (STREAM, STRICT, LAX), strict=True):
        release = settings.pop("release")
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

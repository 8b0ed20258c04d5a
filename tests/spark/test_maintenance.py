"""OPTIMIZE and VACUUM beside a running evaluation, and the health of checkpoints, on real Delta."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException

from lookback.cli import main
from lookback.spark.checkpoints.checkpoint import Checkpoint
from lookback.spark.operations import maintenance
from lookback.spark.operations.forget import forget
from lookback.spark.operations.maintenance import CheckpointHealth, TableUpkeep, check_checkpoint, maintain
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from payins import RULES, STREAM, STREAMS, append, make_events, replay_of_tables, replayed_alerts, stored_alerts

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark


def publish(tables: Tables) -> None:
    rows = [(document["rule_id"], 1, "active", json.dumps(document)) for document in RULES]
    written = tables.spark.createDataFrame(rows, "rule_id string, version bigint, status string, document string")
    tables.append(written, "rules")


def maintain_tables(tables: Tables) -> dict[str, TableUpkeep]:
    """Maintains the tables. Returns the actions by table."""
    done = maintain(tables, STREAMS, {STREAM.name: checkpoint_folder(tables, STREAM)})
    return {each.table: each for each in done.tables}


@pytest.mark.long
def test_an_evaluation_that_runs_notices_nothing_of_it(tables: Tables) -> None:
    tables.create(STREAM)
    publish(tables)
    events = make_events(150, seed=11)
    append(tables, events[:75])
    evaluation = Evaluation(tables, STREAM, STREAMS, checkpoint_folder(tables, STREAM), every="0 seconds").start()
    try:
        evaluation.wait_until(lambda report: (report.arrival or 0) >= 3, timeout=120)
        # As many commits of alerts as batches: at least one more for the second half.
        append(tables, events[75:100])
        evaluation.wait_until(lambda report: (report.arrival or 0) >= 4, timeout=60)

        found = maintain_tables(tables)

        assert (found[STREAM.name].compacted, found[STREAM.name].written, found[STREAM.name].files) == (4, 1, 1)
        assert found["alerts"].compacted >= 2
        assert {name: each.keeps for name, each in found.items()} == {
            "rejected_events": "7 days", "rules": "3650 days", "alerts": "30 days", "late_events": "7 days",
            "rule_log": "7 days", "reviews": "7 days", "notifications": "7 days", "ingests": "7 days", "labels": "7 days", "snoozes": "7 days", "lists": "3650 days", "metrics": "30 days", STREAM.name: "30 days",
        }  # fmt: skip
        # What OPTIMIZE has removed is younger than that.
        assert {each.deleted for each in found.values()} == {0}
        append(tables, events[100:])
        last = tables.version(STREAM.name)
        evaluation.wait_until(lambda report: (report.arrival or 0) >= last, timeout=60)
        assert evaluation.running
        assert evaluation.replans == 0
    finally:
        evaluation.stop()
    alerts = stored_alerts(tables)
    assert len({row.arrival for row in alerts}) > 3
    assert alerts == replayed_alerts(replay_of_tables(tables))
    again = maintenance._maintain_table(tables, STREAM.name)
    assert again.compacted == 3  # the one of before and the two since
    third = maintenance._maintain_table(tables, STREAM.name)
    assert (third.compacted, third.written) == (0, 0)


@pytest.mark.long
def test_files_go_when_the_table_keeps_them_no_longer_and_not_before(tables: Tables) -> None:
    tables.create(STREAM)
    append(tables, make_events(75, seed=2))
    folder = Path(tables.path_or_name(STREAM.name))
    files = {path.name for path in folder.glob("*.parquet")}
    assert len(files) == 3

    assert maintenance._maintain_table(tables, STREAM.name).deleted == 0
    assert files < {path.name for path in folder.glob("*.parquet")}

    kept = "set tblproperties ('delta.deletedFileRetentionDuration' = 'interval 0 hours')"
    tables.spark.sql(f"alter table {tables.identifier(STREAM.name)} {kept}")
    found = maintenance._maintain_table(tables, STREAM.name)

    assert (found.deleted, found.files, found.keeps) == (3, 1, "0 days")
    assert not files & {path.name for path in folder.glob("*.parquet")}
    assert tables.read(STREAM.name).count() == 75


def health_of(tables: Tables) -> CheckpointHealth:
    return check_checkpoint(tables, STREAM, checkpoint_folder(tables, STREAM))


@pytest.mark.long
def test_a_checkpoint_that_cannot_be_gone_on_with_is_a_problem_and_the_command_says_so(
    tables: Tables, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conf/streams").mkdir(parents=True)
    (tmp_path / "conf/streams/payins.yml").write_text(json.dumps(STREAM.to_dict()))
    command = ["--root", str(tables.root), "--conf", str(tmp_path / "conf"), "maintain"]
    assert health_of(tables).what == f"payins: no evaluation has begun in {checkpoint_folder(tables, STREAM)}."
    tables.create(STREAM)
    publish(tables)
    append(tables, make_events(25, seed=5))
    checkpoint = Path(checkpoint_folder(tables, STREAM))
    Evaluation(tables, STREAM, STREAMS, checkpoint, once=True).run()

    assert main(command) == 0
    said = capsys.readouterr().out
    assert "compacted" in said
    # Whether the stream is healthy, some of its events being late, is another question than whether it can go on.
    assert "note: payins needs a look (1 warning): judged through commit 1, nothing waits" in said
    assert "The checkpoint is in order; lookback status says what to do." in said
    assert "ok: payins" not in said

    (checkpoint.parent / f"{checkpoint.name}.20260301T100000Z").mkdir()
    assert health_of(tables).level == "note"
    assert health_of(tables).what.endswith(f"once it has caught up: {checkpoint.name}.20260301T100000Z.")

    (checkpoint / "lookback.json").write_text("{")
    assert main([*command, "--json"]) == 1
    (found,) = (row for row in map(json.loads, capsys.readouterr().out.splitlines()) if "stream" in row)
    assert (found["stream"], found["level"]) == ("payins", "problem")
    assert "lookback.json is damaged" in found["what"]

    checkpoint.rename(tmp_path / "elsewhere")
    assert health_of(tables).level == "warning"
    assert f"an evaluation has written rows, and its checkpoint is not in {checkpoint}" in health_of(tables).what
    assert forget(tables, STREAM, "id = 'e1'", checkpoint=checkpoint).waiting is None


def test_a_backlog_that_grows_as_old_as_the_history_is_told_in_time(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables.create(STREAM)
    folder = Path(checkpoint_folder(tables, STREAM))
    (folder / "offsets").mkdir(parents=True)
    (folder / "offsets" / "0").write_text("")
    monkeypatch.setattr(maintenance.Checkpoint, "require_fit", lambda *_: None)
    monkeypatch.setattr(maintenance, "require_sources", lambda *_: None)
    monkeypatch.setattr(maintenance, "describe_health", lambda *_: "payins needs a look.")
    monkeypatch.setattr(maintenance, "check_health", lambda _: [])
    day = 86_400.0
    for waiting, lag, level in ((1, 15 * day, "ok"), (1, 15 * day + 1, "warning"), (0, 20 * day, "ok")):
        figures = SimpleNamespace(waiting=waiting, lag=lag)
        monkeypatch.setattr(maintenance, "read_stream_figures", lambda *_, figures=figures: figures)
        monkeypatch.setattr(maintenance, "with_account", lambda *given: given[-1])
        found = health_of(tables)
        assert found.level == level, (waiting, lag)
    assert found.what == "payins needs a look."


class ConcurrentDeleteReadException(PySparkException):
    """As Delta's Python package has it, where it has one."""


def test_a_checkpoint_moved_aside_goes_if_one_of_its_batches_is_older_than_a_deletion(ready: Tables) -> None:
    append(ready, make_events(10, seed=3))
    ready.spark.sql(f"DELETE FROM {ready.identifier(STREAM.name)} WHERE id = 'e1'")
    checkpoint, now = Checkpoint(Path(checkpoint_folder(ready, STREAM))), time.time()
    folders = {
        name: checkpoint.folder.with_name(f"{checkpoint.folder.name}.2024010{day}T000000Z")
        for day, name in enumerate(("before", "around", "after"), 1)
    }
    for name, times in {"before": (-60, -30), "around": (-30, 60), "after": (30, 60)}.items():
        (folders[name] / "commits").mkdir(parents=True)
        for batch, seconds in enumerate(times):
            (folders[name] / "commits" / str(batch)).touch()
            os.utime(folders[name] / "commits" / str(batch), (now + seconds, now + seconds))
    maintenance._remove_old_states(ready, STREAM, checkpoint)
    assert [name for name, folder in folders.items() if folder.exists()] == ["after"]


@pytest.mark.parametrize(
    "error",
    [
        ConcurrentDeleteReadException("of another writer"),
        PySparkException("io.delta.exceptions.ConcurrentDeleteReadException: Files were deleted"),
        PySparkException("[DELTA_CONCURRENT_DELETE_READ] ConcurrentDeleteReadException: of another writer"),
    ],
)
def test_a_table_whose_writers_come_first_again_and_again_is_left_and_says_so(error: Exception) -> None:
    asked: list[str] = []

    def sql(statement: str) -> Any:
        asked.append(statement)
        raise error

    tables: Any = SimpleNamespace(spark=SimpleNamespace(sql=sql))
    left = maintenance._optimize(tables, "t")
    assert left == (0, 0, "other writers kept rewriting its files; left for the next run")
    assert asked == ["OPTIMIZE t"] * 3
    error = PySparkException("[TABLE_OR_VIEW_NOT_FOUND] t")
    with pytest.raises(PySparkException, match="NOT_FOUND"):
        maintenance._optimize(tables, "t")


@pytest.mark.long
def test_a_run_goes_on_where_its_table_gets_another_column(tables: Tables) -> None:
    tables.create(STREAM)
    publish(tables)
    events = make_events(100, seed=7)
    append(tables, events[:50])
    checkpoint = checkpoint_folder(tables, STREAM)
    evaluation = Evaluation(tables, STREAM, STREAMS, checkpoint, every="0 seconds").start()
    evaluation.wait_until(lambda report: (report.arrival or 0) >= 2, timeout=120)

    tables.spark.sql(f"alter table {tables.identifier(STREAM.name)} add columns (channel string)")
    append(tables, events[50:])
    last = tables.version(STREAM.name)
    evaluation.wait_until(lambda report: report.arrival == last, timeout=120)
    evaluation.stop()

    alerts = stored_alerts(tables)
    assert {row.arrival for row in alerts} & {4, 5}
    assert alerts == replayed_alerts(replay_of_tables(tables))

"""Tables and checkpoints that were restored from backups of different times, or deleted and created again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import lookback
from lookback.core.errors import SetupError
from lookback.spark.checkpoints.checkpoint import Checkpoint
from lookback.spark.lists import add_values
from lookback.spark.operations.status import stream_status
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from payins import STREAM, STREAMS, append, make_events, outputs, publish, replayed_alerts, rule, stored_alerts

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark
COUNTED = rule("counted", when="n >= 1", message="")
LISTED = rule("listed", where="in_list(shop, 'known')", when="n >= 1", message="")
EVENTS = make_events(150, seed=5)


def evaluate(tables: Tables, **more: Any) -> None:
    Evaluation(tables, STREAM, STREAMS, checkpoint_folder(tables, STREAM), once=True, **more).run()


def append_commits(tables: Tables, *commits: int) -> None:
    append(tables, [row for row in EVENTS if row["arrival"] in commits])


def restore(tables: Tables, place: Path, backup: Path) -> None:
    """Puts a copy of a folder in its place."""
    shutil.rmtree(place)
    shutil.copytree(backup, place)
    tables.spark._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()  # type: ignore[union-attr]


@pytest.mark.long
def test_an_older_table_of_events_under_a_newer_checkpoint_is_refused_and_a_fresh_evaluation_judges_it(
    ready: Tables, tmp_path: Path
) -> None:
    events = Path(ready.path_or_name(STREAM.name))
    publish(ready, [COUNTED])
    append_commits(ready, 1, 2)
    shutil.copytree(events, tmp_path / "backup")
    append_commits(ready, 3, 4)
    evaluate(ready)
    restore(ready, events, tmp_path / "backup")
    with pytest.raises(
        SetupError, match=r"ends at commit 2, but commit 4 was read before\. .*lookback evaluate payins --fresh"
    ):
        evaluate(ready)
    # Others go on to write, until the numbers fit again.
    append_commits(ready, 5, 6)
    append_commits(ready, 4)
    with pytest.raises(SetupError, match=r"commit 4 of table .* is from 20.*, but the one read before was from 20"):
        evaluate(ready)
    with pytest.raises(SetupError, match="Restore the tables that were read"):
        evaluate(ready, rebuild=True)
    status = stream_status(ready, STREAM, Checkpoint(Path(checkpoint_folder(ready, STREAM))))
    assert not status["healthy"]
    assert [(each["level"], each["check"]) for each in status["findings"]] == [("problem", "other_tables")]
    before = len(stored_alerts(ready))
    evaluate(ready, fresh=True)
    numbers = {1: 1, 2: 2, 5: 3, 6: 4, 4: 5}
    there = [{**row, "arrival": numbers[row["arrival"]]} for row in EVENTS if row["arrival"] in numbers]
    assert len(stored_alerts(ready)) - before == len(replayed_alerts(lookback.replay([COUNTED], there, STREAM)))


@pytest.mark.long
def test_an_older_checkpoint_under_newer_tables_is_refused_and_a_rebuild_writes_nothing_twice(
    ready: Tables, tmp_path: Path
) -> None:
    folder = Path(checkpoint_folder(ready, STREAM))
    publish(ready, [COUNTED])
    append_commits(ready, 1, 2)
    evaluate(ready)
    shutil.copytree(folder, tmp_path / "backup")
    append_commits(ready, 3)
    evaluate(ready)
    before = outputs(ready)
    restore(ready, folder, tmp_path / "backup")
    with pytest.raises(
        SetupError,
        match=r"ends at batch 0, but the tables have rows of its batch 1: .*lookback evaluate payins --rebuild",
    ):
        evaluate(ready)
    assert outputs(ready) == before
    evaluate(ready, rebuild=True)
    assert outputs(ready) == before
    assert not before["twice"]


@pytest.mark.long
def test_a_table_of_lists_that_was_deleted_and_created_again_is_refused_and_a_fresh_evaluation_obeys_it(
    ready: Tables,
) -> None:
    add_values(ready, "known", ["a"])
    add_values(ready, "known", ["ü"])
    publish(ready, [LISTED])
    append_commits(ready, 1)
    evaluate(ready)
    shutil.rmtree(ready.path_or_name("lists"))
    ready.spark._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()  # type: ignore[union-attr]
    ready.create(STREAM)
    with pytest.raises(SetupError, match=r"lists` ends at commit 0, but commit 2 was read before"):
        evaluate(ready)
    add_values(ready, "known", ["ü"])
    add_values(ready, "other", ["x"])
    append_commits(ready, 2)
    with pytest.raises(SetupError, match=r"commit 2 of table .*lists` is from 20"):
        evaluate(ready)
    before = len(stored_alerts(ready))
    evaluate(ready, fresh=True)
    there = [row for row in EVENTS if row["arrival"] <= 2]
    expected = lookback.replay([LISTED], there, STREAM, lists={"known": ["ü"]})
    assert len(stored_alerts(ready)) - before == len(expected.alerts) > 0


@pytest.mark.long
def test_a_restore_of_events_judges_only_what_it_changes(ready: Tables) -> None:
    name = ready.identifier(STREAM.name)
    publish(ready, [COUNTED])
    append_commits(ready, 1, 2)
    evaluate(ready)
    before = stored_alerts(ready)
    ready.spark.sql(f"OPTIMIZE {name}")
    ready.spark.sql(f"RESTORE TABLE {name} TO VERSION AS OF 2")
    evaluate(ready)
    assert stored_alerts(ready) == before
    # Takes the rows of commit 2 away, as a DELETE does.
    ready.spark.sql(f"RESTORE TABLE {name} TO VERSION AS OF 1")
    evaluate(ready)
    last = {**EVENTS[-1], "at": max(row["at"] for row in EVENTS), "arrival": 6}
    append(ready, [last])
    evaluate(ready)
    kept = [row for row in EVENTS if row["arrival"] == 1 and row["customer"] == last["customer"]]
    assert [row for row in stored_alerts(ready) if row not in before]
    assert kept

"""The account of events that `lookback status` shows: it adds up, says where it does not, and costs the same for ever."""

from __future__ import annotations

import datetime as dt
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F  # noqa: N812

from lookback.core.values.times import to_utc
from lookback.spark.checkpoints.checkpoint import Checkpoint
from lookback.spark.ingest.files import ingest
from lookback.spark.operations import status
from lookback.spark.operations.status import find_recent_account, stream_status
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from lookback.spark.tables.lakehouse import Tables
from lookback.views.terminal import describe_account
from payins import RULES, START, STREAM, STREAMS, copy_of, publish

pytestmark = pytest.mark.spark


def offer(tables: Tables, folder: Path, rows: list[tuple[str | None, int]]) -> None:
    """Ingests events of these ids and seconds."""
    file = folder / "events.json"
    lines = [
        {"id": id_, "at": to_utc(START + 1_000_000 * second).isoformat(), "customer": 1, "shop": "a", "amount": "9.00"}
        for id_, second in rows
    ]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    ingest(tables, STREAM, file)


@pytest.fixture(scope="module")
def judged_once(created: Tables, tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """Two rounds that are judged, with a duplicate, a row without an id, and an event that is too late for every rule."""
    folder = tmp_path_factory.mktemp("judged")
    tables = copy_of(created, folder / "lakehouse", STREAM.name)
    publish(tables, RULES[:1])
    offer(tables, folder, [("a", 0), ("b", 600), ("b", 600), (None, 5)])
    offer(tables, folder, [("c", 1), ("d", 601)])
    Evaluation(tables, STREAM, STREAMS, checkpoint_folder(tables, STREAM), once=True).run()
    return tables


@pytest.fixture
def judged(judged_once: Tables, tmp_path: Path) -> Tables:
    """Its tables and checkpoint, of which each test has a copy."""
    root = tmp_path / "lakehouse"
    shutil.copytree(str(judged_once.root), root)
    return Tables.local(judged_once.spark, root)


def account(tables: Tables) -> dict[str, Any]:
    found = stream_status(tables, STREAM, Checkpoint(Path(checkpoint_folder(tables, STREAM))))["account"]
    assert found is not None
    return dict(found)


@pytest.mark.long
def test_c3_3_the_account_of_the_last_rounds_adds_up(judged: Tables, tmp_path: Path) -> None:
    # All of it is known already.
    offer(judged, tmp_path, [("a", 0), ("b", 600)])
    offer(judged, tmp_path, [("e", 700)])
    found = account(judged)
    since = found.pop("since")
    assert dt.datetime.now(dt.timezone.utc) - since < dt.timedelta(hours=1)
    assert found == {
        "rounds": 4, "offered": 9, "ingested": 5, "duplicates": 3, "rejected": 1,
        "evaluated": 3, "recorded": 0, "discarded": 1, "waiting": 1, "closes": True,
    }  # fmt: skip
    words = describe_account({**found, "since": since})
    assert words.endswith(
        ": 9 offered = 5 ingested + 3 duplicates + 1 rejected; "
        "5 ingested = 3 evaluated + 0 recorded + 1 discarded + 1 waiting"
    )


@pytest.mark.long
def test_c3_3_what_does_not_add_up_is_said(judged: Tables) -> None:
    assert account(judged)["closes"]
    late = judged.read("late_events")
    judged.append(late.withColumn("event_id", F.lit("never came")), "late_events")
    found = account(judged)
    assert not found["closes"]
    assert "This does not add up" in describe_account(found)


@pytest.mark.long
def test_the_account_costs_the_same_however_long_the_stream_has_run(
    judged: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "_ACCOUNT_ROWS", 4)
    read: list[int] = []
    changes = Tables.read_changes

    def counting(tables: Tables, name: str, *bounds: int) -> Any:
        rows = changes(tables, name, *bounds)
        read.append(rows.count())
        return rows

    monkeypatch.setattr(Tables, "read_changes", counting)
    found = account(judged)
    assert (found["rounds"], found["ingested"], read) == (1, 2, [2])
    for number in range(2):
        offer(judged, tmp_path, [(f"new-{number}", 800 + number), (f"more-{number}", 800 + number)])
        read.clear()
        found = account(judged)
        assert (found["rounds"], found["ingested"], found["closes"]) == (2, 4, True)
        assert read == [4]
    # Of another day nothing is read.
    read.clear()
    assert find_recent_account(judged, STREAM, 2, dt.datetime.now(dt.timezone.utc) + dt.timedelta(days=2)) is None
    assert read == []

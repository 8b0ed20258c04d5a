"""Checkpoints that earlier releases left: gone on with to the same alerts, or refused for their layout and made anew."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lookback.core.errors import StateError
from lookback.spark.pipeline import Evaluation, checkpoint_folder
from lookback.spark.rules import RulesTable
from lookback.spark.tables import Tables
from payins import MORE_RULES, STREAM, STREAMS, append, relocate, replay_of_tables, replayed_alerts, stored_alerts
from stored_checkpoint import DATA, EVENTS, JUDGED, PLACE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

STORED = sorted(DATA.glob("checkpoint-*.zip"))


def test_there_is_a_stored_checkpoint() -> None:
    assert STORED


@pytest.mark.parametrize("stored", STORED, ids=lambda path: path.stem)
def test_c8_the_checkpoint_of_an_earlier_release_is_gone_on_with(
    spark: SparkSession, stored: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(stored) as archive:
        archive.extractall(tmp_path / "lakehouse")
    relocate(tmp_path / "lakehouse", PLACE, str(tmp_path / "lakehouse"))
    tables = Tables.local(spark, tmp_path / "lakehouse")
    before = stored_alerts(tables)
    assert {row[3] for row in before} >= {document["rule_id"] for document in MORE_RULES}
    RulesTable(tables, STREAMS).push({**MORE_RULES[3], "message": "{n}"})
    append(tables, [row for row in EVENTS if row["arrival"] > JUDGED])
    folder = checkpoint_folder(tables, STREAM)
    try:
        Evaluation(tables, STREAM, STREAMS, folder, once=True).run()
    except StateError as error:
        assert "layout version" in str(error)  # noqa: PT017 - either is right
        Evaluation(tables, STREAM, STREAMS, folder, once=True, rebuild=True).run()
    found = stored_alerts(tables)
    assert judged_alike(found) == judged_alike(replayed_alerts(replay_of_tables(tables)))
    assert [row for row in found if row[-1] <= JUDGED and row in before] == before
    assert len(found) > len(before)


def judged_alike(alerts: list[Any]) -> list[Any]:
    """All but what release 0.1.0 wrote of fixed expiry: its steps took events in order of arrival."""
    return [row for row in alerts if row[3] != "fixed" or row[-1] > JUDGED]

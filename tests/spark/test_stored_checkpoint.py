"""Checkpoints that earlier releases and other versions of Spark left: gone on with to the same alerts, or refused and made anew."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lookback.core.errors import SetupError, StateError
from lookback.spark.checkpoints.checkpoint import Checkpoint
from lookback.spark.rules import RulesTable
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from lookback.spark.tables.lakehouse import Tables
from payins import MORE_RULES, STREAM, STREAMS, append, relocate, replay_of_tables, replayed_alerts, stored_alerts
from stored_checkpoint import DATA, EVENTS, JUDGED, PLACE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

STORED = sorted(DATA.glob("checkpoint-*.zip"))
# What `make test-runtimes` had each Spark write.
OF_SPARKS = sorted(Path(os.environ.get("LOOKBACK_CHECKPOINTS", os.devnull)).glob("spark-*.zip"))


def test_there_is_a_stored_checkpoint() -> None:
    assert STORED


def unpack(spark: SparkSession, stored: Path, folder: Path) -> Tables:
    with zipfile.ZipFile(stored) as archive:
        archive.extractall(folder)
    relocate(folder, PLACE, str(folder))
    return Tables.local(spark, folder)


def go_on(tables: Tables, **options: bool) -> None:
    Evaluation(tables, STREAM, STREAMS, checkpoint_folder(tables, STREAM), once=True, **options).run()


@pytest.mark.parametrize("stored", OF_SPARKS, ids=lambda path: path.stem)
def test_c8_the_checkpoint_of_an_older_spark_is_gone_on_with_and_that_of_a_newer_one_is_refused(
    spark: SparkSession, stored: Path, tmp_path: Path
) -> None:
    tables = unpack(spark, stored, tmp_path / "lakehouse")
    plan = Checkpoint(Path(checkpoint_folder(tables, STREAM))).read_plan()
    assert plan is not None
    assert plan.spark.startswith(stored.stem.removeprefix("spark-"))
    before = stored_alerts(tables)
    append(tables, [row for row in EVENTS if row["arrival"] > JUDGED])
    if stored.stem > f"spark-{spark.version}":
        with pytest.raises(
            SetupError, match=rf"was last written by Spark {plan.spark}, and this is Spark {spark.version}:"
        ):
            go_on(tables)
        go_on(tables, rebuild=True)
    else:
        go_on(tables)
    found = stored_alerts(tables)
    assert found == replayed_alerts(replay_of_tables(tables))
    assert [row for row in found if row in before] == before
    assert len(found) > len(before)


@pytest.mark.parametrize("stored", STORED, ids=lambda path: path.stem)
@pytest.mark.long
def test_c8_the_checkpoint_of_an_earlier_release_is_gone_on_with(
    spark: SparkSession, stored: Path, tmp_path: Path
) -> None:
    tables = unpack(spark, stored, tmp_path / "lakehouse")
    before = stored_alerts(tables)
    assert {row.rule_id for row in before} >= {document["rule_id"] for document in MORE_RULES}
    RulesTable(tables, STREAMS).push({**MORE_RULES[3], "message": "{n}"})
    append(tables, [row for row in EVENTS if row["arrival"] > JUDGED])
    try:
        go_on(tables)
    except StateError as error:
        assert "layout version" in str(error)  # noqa: PT017 - either is right
        go_on(tables, rebuild=True)
    found = stored_alerts(tables)
    assert judged_alike(found) == judged_alike(replayed_alerts(replay_of_tables(tables)))
    assert [row for row in found if row.arrival <= JUDGED and row in before] == before
    assert len(found) > len(before)


def judged_alike(alerts: list[Any]) -> list[Any]:
    """All but what release 0.1.0 wrote of fixed expiry: its steps took events in order of arrival."""
    return [row for row in alerts if row.rule_id != "fixed" or row.arrival > JUDGED]

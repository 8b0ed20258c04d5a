"""A checkpoint that an older version of Spark wrote goes on to the same alerts; that of a newer one is refused and rebuilt."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lookback.core.errors import SetupError
from lookback.spark.checkpoints.checkpoint import Checkpoint
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from lookback.spark.tables.lakehouse import Tables
from payins import STREAM, STREAMS, append, relocate, replay_of_tables, replayed_alerts, stored_alerts
from stored_checkpoint import EVENTS, JUDGED, PLACE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

# What `make test-runtimes` had each Spark write.
OF_SPARKS = sorted(Path(os.environ.get("LOOKBACK_CHECKPOINTS", os.devnull)).glob("spark-*.zip"))


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
            SetupError, match=rf"was last written by Spark {plan.spark}, but this is Spark {spark.version}:"
        ):
            go_on(tables)
        go_on(tables, rebuild=True)
    else:
        go_on(tables)
    found = stored_alerts(tables)
    assert found == replayed_alerts(replay_of_tables(tables))
    assert [row for row in found if row in before] == before
    assert len(found) > len(before)

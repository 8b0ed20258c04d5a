"""A table's history that does not reach back far enough: switched on late, or cleaned while the stream was down."""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F  # noqa: N812

import lookback
from lookback.core.errors import SetupError
from lookback.spark.checkpoints.checkpoint import Checkpoint
from lookback.spark.checkpoints.sparklogs import EVENTS
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from lookback.spark.tables.history import find_first_readable
from payins import STREAM, STREAMS, append, make_events, publish, replayed_alerts, rule, stored_alerts, window

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark

RULES = [
    rule("short", window="30 seconds", when="n >= 2", suppress="20 seconds"),
    rule("long", window="2 hours", when="n >= 9"),
    window("tens", {"tumbling": "10 seconds"}, group_by=["shop"]),
]


def evaluate(tables: Tables, **options: Any) -> Evaluation:
    evaluation = Evaluation(tables, STREAM, STREAMS, checkpoint_folder(tables, STREAM), once=True, **options)
    evaluation.run()
    return evaluation


def append_by_spark(tables: Tables, rows: list[dict[str, Any]]) -> None:
    """Appends one commit of Delta's own, which makes a checkpoint of the log where one is due."""
    fields = tuple(STREAM.fields)
    values = [(*(row[name] for name in fields), at) for at, row in enumerate(rows)]
    columns = "id string, at long, customer int, shop string, amount string, position long"
    frame = tables.spark.createDataFrame(values, columns)
    frame = frame.withColumn("at", F.timestamp_micros("at")).withColumn("amount", F.col("amount").cast("decimal(18,2)"))
    tables.append(frame.withColumn("ingested_at", F.current_timestamp()).coalesce(1), STREAM.name)


def clean_log(tables: Tables, before: int) -> None:
    """As Delta does when the retention is over: the log begins at a checkpoint."""
    for file in Path(tables.path_or_name(STREAM.name), "_delta_log").iterdir():
        number = file.name.lstrip(".")[:20]
        if number.isdigit() and int(number) < before:
            file.unlink()
    tables.spark._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()  # type: ignore[union-attr]


@pytest.mark.long
def test_c3_1_a_history_that_does_not_reach_back(
    tables: Tables, spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "lookback")
    name = tables.identifier(STREAM.name)
    columns = ", ".join(f"{field} {type_}" for field, type_ in STREAM.fields.items())
    spark.sql(f"CREATE TABLE {name} ({columns}, position bigint, ingested_at timestamp) USING delta")
    events = make_events(375, seed=5)
    append(tables, [row for row in events if row["arrival"] <= 2])
    with pytest.raises(
        SetupError, match=r"has no change feed; switch it on: ALTER TABLE .*enableChangeDataFeed = true"
    ):
        evaluate(tables)
    properties = ("enableChangeDataFeed = true", "enableInCommitTimestamps = true", "checkpointInterval = 3")
    spark.sql(f"ALTER TABLE {name} SET TBLPROPERTIES ({', '.join(f'delta.{each}' for each in properties)})")
    # Commit 3 switched it on: arrivals are one more than the events say from here on.
    later = [{**row, "arrival": row["arrival"] + 1} for row in events if row["arrival"] > 2]
    publish(tables, RULES)
    append(tables, [row for row in later if row["arrival"] <= 5])
    evaluate(tables)
    checkpoint = Checkpoint(Path(checkpoint_folder(tables, STREAM)))
    plan = checkpoint.read_plan()
    assert plan is not None
    assert plan.starts == {EVENTS: 3, "rules": 0}
    assert "can be read only from commit 3 on: earlier rows are not evaluated" in caplog.text
    assert stored_alerts(tables) == replayed_alerts(
        lookback.replay(RULES, [r for r in later if r["arrival"] <= 5], STREAM)
    )

    # Down for longer than the log is kept.
    append(tables, [row for row in later if 5 < row["arrival"] <= 8])
    append_by_spark(tables, [row for row in later if row["arrival"] == 9])
    append(tables, [row for row in later if 9 < row["arrival"] <= 11])
    clean_log(tables, 9)
    assert find_first_readable(tables, STREAM.name) == 9
    with pytest.raises(
        SetupError, match=r"resumes at commit 6 of .*, but commits 3 to 8 can no longer be read: .* begins at commit 9 of "
        r"20.*the last batch ended at 20.*lookback evaluate payins --rebuild, which rebuilds the state from commit 9;",
    ):  # fmt: skip
        evaluate(tables)
    before = stored_alerts(tables)
    caplog.clear()
    evaluate(tables, rebuild=True)
    assert "can be read only from commit 9 on" in caplog.text
    append(tables, [row for row in later if row["arrival"] > 11])
    evaluate(tables)
    found = stored_alerts(tables)
    assert [row for row in found if row.arrival < 9] == before
    assert max(Counter(row[:2] for row in found).values()) == 1

    # As a run would have given that lost no event but those: less what begins before what was read.
    cut = max(row["at"] for row in later if row["arrival"] < 9)
    expected = [row for row in replayed_alerts(lookback.replay(RULES, later, STREAM)) if row.arrival >= 9]
    new = [row for row in found if row.arrival >= 9]
    whole = [row for row in expected if row.window_start >= cut]

    def told_of(rows: list[tuple[Any, ...]]) -> set[tuple[Any, ...]]:
        return {(row.rule_id, row.window_start - cut, row.arrival, *row[:2]) for row in rows}

    assert not told_of(new) - told_of(whole), sorted(told_of(new) - told_of(whole))
    assert not told_of(whole) - told_of(new), sorted(told_of(whole) - told_of(new))
    assert {row.rule_id for row in new} == {"short", "tens"}
    assert not [row for row in new if not row.window_complete]
    late = tables.read("late_events").where("arrival >= 9").withColumn("at", F.unix_micros("event_time")).collect()
    told = [row for row in lookback.replay(RULES, later, STREAM).late_events if row.arrival >= 9]
    assert {(row["event_id"], row["late_by_us"]) for row in late} == {(row.event_id, row.late_by_us) for row in told}

    # Files that are gone, with the log still there.
    spark.sql(f"ALTER TABLE {name} SET TBLPROPERTIES (delta.checkpointInterval = 100)")
    append(tables, [{**row, "id": f"x{row['id']}"} for row in later if row["arrival"] == 12])
    file = max(Path(tables.path_or_name(STREAM.name)).glob("*.parquet"), key=lambda path: path.stat().st_mtime_ns)
    kept_file = file.with_suffix(".kept")
    shutil.move(file, kept_file)
    with pytest.raises(SetupError, match=r"can no longer be read .*lookback evaluate payins --rebuild"):
        evaluate(tables)
    shutil.move(kept_file, file)
    evaluate(tables)

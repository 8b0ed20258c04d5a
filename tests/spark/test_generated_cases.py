"""Generated cases on the real stream: Spark, Delta and RocksDB against the oracle, ids and revisions included."""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cases import STREAMS, cases, with_reserved_names
from hypothesis import HealthCheck, Phase, given, settings
from pyspark.sql import functions as F  # noqa: N812
from test_equals_oracle import run_oracle

from lookback.spark.checkpoints.checkpoint import Checkpoint
from lookback.spark.operations.status import event_account
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from stored_cases import append, assert_proved, written

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark
CASES = 20 if os.environ.get("LOOKBACK_CASES") == "fuzz" else 1
_MAX_RUNS = 4


@cache
def pick_cases(count: int) -> list[dict[str, Any]]:
    """Picks from many generated cases those with most kinds of rules, then with most rows of alerts; all have alerts.

    Hypothesis draws other cases when the modules that are loaded beside it change, so no case is relied on.
    """
    found: list[tuple[int, int, dict[str, Any]]] = []

    @settings(max_examples=60 * count, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck))
    @given(cases(updates=True))
    def collect(case: dict[str, Any]) -> None:
        numbered(case)
        kinds = {kind_of(change["document"]) for change in case["changes"] if change["rule_id"] != "*"}
        if len({change["after"] for change in case["changes"]}) <= _MAX_RUNS:
            alerts = len(run_oracle(case).alerts)
            if alerts:
                found.append((len(kinds), alerts, case))

    collect()
    return [case for *_, case in sorted(found, key=lambda each: each[:2], reverse=True)[:count]]


def kind_of(document: dict[str, Any]) -> str:
    window = document.get("window")
    return "sequence" if window is None else next(iter(window)) if isinstance(window, dict) else "lookback"


def numbered(case: dict[str, Any]) -> None:
    """Gives the commits the numbers that a table gives: 1, 2, 3 ..."""
    commits = sorted({row["arrival"] for row in case["rows"]})
    for row in case["rows"]:
        row["arrival"] = commits.index(row["arrival"]) + 1
    for change in case["changes"]:
        change["after"] = bisect_right(commits, change["after"])


@pytest.mark.long
@pytest.mark.parametrize("number", range(CASES))
def test_c3_the_stream_equals_the_oracle_on_generated_cases(tables: Tables, number: int, tmp_path: Path) -> None:
    # Conditions go to dispatch as text.
    case = with_reserved_names(pick_cases(CASES)[number])
    stream = STREAMS[case["stream"]]
    tables.create(stream)
    edges = sorted({0, *(change["after"] for change in case["changes"])})
    for start, end in zip(edges, [*edges[1:], 10**9], strict=True):
        for change in case["changes"]:
            if change["after"] == start:
                write_change(tables, change)
        append(tables, [row for row in case["rows"] if start < row["arrival"] <= end], stream.fields)
        folder = checkpoint_folder(tables, stream)
        options = {"admission": {"maxFilesPerTrigger": str(1 + number)}, "default_shards": case["shards"]}
        Evaluation(tables, stream, {stream.name: stream}, folder, once=True, **options).run()
        if number:
            # Every night, which takes its time.
            assert_proved(tables, stream, saved=tmp_path / "proofs")
    assert_proved(tables, stream)
    oracle = run_oracle(case)
    assert written(tables) == sorted(oracle.alerts, key=repr)
    late = tables.read("late_events").collect()
    assert sorted((r["event_id"], r["arrival"], r["late_by_us"], r["action"]) for r in late) == sorted(oracle.late)
    account = event_account(tables, stream, Checkpoint(Path(folder)).read_last_judged())
    assert account.closes, account


def write_change(tables: Tables, change: dict[str, Any]) -> None:
    document = None if change["document"] is None else json.dumps(change["document"])
    row = (change["rule_id"], change["version"], change["status"], document)
    if change["change"] == "insert":
        frame = tables.spark.createDataFrame([row], "rule_id string, version long, status string, document string")
        tables.append(frame, "rules")
    else:
        this = (F.col("rule_id") == row[0]) & (F.col("version") == row[1])
        tables.delta("rules").update(this, {"status": F.lit(row[2]), "document": F.lit(row[3])})

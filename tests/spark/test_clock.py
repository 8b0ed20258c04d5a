"""The clock of the machine is set back while a stream is down."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from lookback.spark.batches import sink
from lookback.spark.checkpoints.checkpoint import Checkpoint
from lookback.spark.replay.proof import prove
from lookback.spark.rules import RulesTable
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from lookback.spark.tables import history
from payins import (
    RULES,
    STREAM,
    STREAMS,
    append,
    make_events,
    publish,
    replay_of_tables,
    replayed_alerts,
    stored_alerts,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from lookback.spark.tables.lakehouse import Tables

pytestmark = [pytest.mark.spark, pytest.mark.long]


def evaluate(tables: Tables, **options: Any) -> None:
    Evaluation(tables, STREAM, STREAMS, checkpoint_folder(tables, STREAM), once=True, **options).run()


def set_clock_back(monkeypatch: pytest.MonkeyPatch, days: int) -> None:
    class Clock(dt.datetime):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> dt.datetime:  # type: ignore[override]
            return dt.datetime.now(tz) - dt.timedelta(days=days)

    for module in (sink, history):
        monkeypatch.setattr(module, "dt", SimpleNamespace(**{**vars(dt), "datetime": Clock}))


def test_c8_a_clock_that_is_set_back_does_not_change_the_order_in_which_rules_were_obeyed(
    ready: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, rules = make_events(150, seed=8), RulesTable(ready, STREAMS)
    rule_id = RULES[0]["rule_id"]
    changes: list[Callable[[], object]] = [
        lambda: publish(ready, RULES),
        lambda: rules.set_status(rule_id, "paused"),
        lambda: rules.push({**RULES[0], "when": "n >= 1"}),
    ]
    for days, change in enumerate(changes):
        with monkeypatch.context() as patch:
            set_clock_back(patch, days)
            change()
            append(ready, [row for row in events if row["arrival"] // 3 == days])
            evaluate(ready)
    right = replayed_alerts(replay_of_tables(ready))
    assert stored_alerts(ready) == right
    log = ready.read("rule_log").orderBy("logged_at", "position").collect()
    arrivals = [-1 if row["arrival"] is None else row["arrival"] for row in log]
    assert arrivals == sorted(arrivals)
    with prove(ready, STREAM, STREAMS) as proofs:
        assert all(row.holds for row in proofs.rows), proofs.rows
    evaluate(ready, rebuild=True)
    assert stored_alerts(ready) == right
    with monkeypatch.context() as patch:
        set_clock_back(patch, 3)
        Checkpoint(Path(checkpoint_folder(ready, STREAM))).move_aside()
        evaluate(ready, fresh=True)
    (begun,) = ready.read("rule_log").where("action = 'begun_afresh'").select("logged_at").collect()
    assert begun["logged_at"] > log[-1]["logged_at"]

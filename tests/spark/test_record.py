"""What rule_log says a stream obeyed is read in the order in which it took effect, however the rows are stored."""

from __future__ import annotations

import datetime as dt
import random
from typing import TYPE_CHECKING

import pytest

from lookback.spark.record.evaluations import Term
from lookback.spark.record.log import list_declarations, read_log
from payins import STREAM

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark
NOW = dt.datetime(2024, 3, 4, tzinfo=dt.timezone.utc)


def test_c9_rows_of_rule_log_are_read_in_the_order_in_which_they_took_effect(ready: Tables) -> None:
    placed = [
        # rule_id, action, arrival, rules_commit, batch, position
        ("-", "declared", None, None, 0, 1), ("b", "activated", None, 1, 0, 0), ("a", "retired", 3, 4, 1, 0),
        ("*", "retire_all", 3, 4, 1, 1), ("a", "activated", 3, 5, 1, 2), ("c", "activated", 3, 6, 2, 0),
        ("-", "failed", 4, None, 2, 1), ("d", "paused", 4, 7, 3, 0),
    ]  # fmt: skip
    rows = [
        {
            "stream": STREAM.name, "rule_id": name, "action": action, "arrival": arrival, "rules_commit": commit,
            "logged_at": NOW + dt.timedelta(seconds=batch), "batch_id": batch, "position": position,
        }
        for name, action, arrival, commit, batch, position in placed
    ]  # fmt: skip
    random.Random(1).shuffle(rows)
    others = [{**row, "stream": "others"} for row in rows]
    for part in (rows[:4], others, rows[4:]):
        ready.append_rows(part, "rule_log")
    found = read_log(ready, STREAM, Term())
    assert [(row.rule_id, row.action, row.arrival, row.rules_commit) for row in found] == [each[:4] for each in placed]
    later = read_log(ready, STREAM, Term(begun_at=NOW + dt.timedelta(seconds=1)))
    assert [row.rule_id for row in later] == ["c", "-", "d"]
    assert list_declarations(STREAM, later).last == STREAM

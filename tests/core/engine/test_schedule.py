"""State made anew from the events: rule changes that arrive together take effect where they were logged to have."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import cases as generated
import pytest
from hypothesis import given
from test_equals_oracle import (
    DictStore,
    changes_after,
    failures_of,
    late_of,
    new_state,
    notes_of,
    plain,
    run_engine,
    run_oracle,
)

from lookback.core.engine.evaluation import Batch, Evaluator, Output
from lookback.core.engine.schedule import Schedule, WaitingChange, judge_batch, pack_waiting, unpack_waiting
from lookback.core.rules.rulebook import LogRow, RuleChange
from lookback.core.streams.arrival import find_marks
from lookback.core.streams.events import read_events
from payins import STREAM, STREAMS, rule

if TYPE_CHECKING:
    from collections.abc import Sequence


def all_changes(case: dict[str, Any]) -> list[RuleChange]:
    afters = sorted({change["after"] for change in case["changes"]})
    return [change for after in afters for change in changes_after(case, after)]


def run_rebuilt(case: dict[str, Any], schedule: Schedule, batches: Sequence[int]) -> Output:
    """All changes come with the first batch; the batches end at these commits."""
    stream = generated.STREAMS[case["stream"]]
    events, _ = read_events(case["rows"], stream, 1)
    marks, total = find_marks(events, events.commits), Output()
    bound = [(change, schedule.after(change.commit)) for change in all_changes(case)]
    for shard in range(case["shards"]):
        evaluator, state, store = Evaluator(stream, shard, case["shards"]), new_state(stream), DictStore()
        waiting = [WaitingChange(change, after) for change, after in bound if after is not None]
        changes = [change for change, after in bound if after is None]
        for start, end in zip([0, *batches], [*batches, 10**9], strict=True):
            state.begin(store)
            here = events.take((events.commits > start) & (events.commits <= end))
            part = {commit: high for commit, high in marks.items() if start < commit <= end}
            output, waiting = judge_batch(evaluator, state, Batch(here, marks=part, changes=changes), waiting)
            state.drop_old()
            state.save()
            changes, waiting = [], unpack_waiting(pack_waiting(waiting))
            for name in ("rows", "late", "failures", "notes", *(["log"] if shard == 0 else [])):
                getattr(total, name).extend(getattr(output, name))
        assert not waiting
    if case["shards"] > 1:
        total.rows.sort(key=lambda row: row[0])
    return total


def logged(rows: list[LogRow]) -> list[tuple[Any, ...]]:
    return sorted((dataclasses.astuple(row) for row in rows if row.action != "commit_cut"), key=repr)


@given(generated.cases(updates=True))
def test_c3_7_changes_bound_to_their_logged_arrivals_give_what_they_gave(case: dict[str, Any]) -> None:
    oracle, first = run_oracle(case), run_engine(case)
    stream = generated.STREAMS[case["stream"]]
    through = max((row["arrival"] for row in case["rows"]), default=0)
    schedule = Schedule.from_log(all_changes(case), first.log, stream, {stream.name: stream}, through)
    assert Schedule.from_dict(schedule.to_dict()) == schedule
    again = run_rebuilt(case, schedule, sorted(case["cuts"]) if case["reload"] else [])
    assert list(map(plain, again.alerts)) == oracle.alerts
    assert late_of(again.late) == sorted(oracle.late)
    assert failures_of(again) == oracle.failed
    assert notes_of(again.notes) == sorted(oracle.notes)
    assert logged(again.log) == logged(first.log)


def change(commit: int, rule_id: str, version: int | None = 1, status: str = "active") -> RuleChange:
    return RuleChange("insert", commit, rule_id, version, status, json.dumps(rule(rule_id)))


def log(rule_id: str, version: int | None, action: str, arrival: int | None) -> LogRow:
    return LogRow(STREAM.name, rule_id, version, action, "", arrival)


@pytest.mark.parametrize(
    ("changes", "rows", "arrivals"),
    [
        # What was not logged goes with the next that was; what comes after the last waits.
        ([change(1, "a"), change(2, "a"), change(3, "b"), change(4, "c")], [log("b", 1, "activated", 5)],
         {1: 5, 2: 5, 3: 5}),
        # Of rows that say the same, each change takes one, and none goes back.
        ([change(1, "a"), change(2, "a"), change(3, "b"), change(4, "a")],
         [log("a", 1, "rejected", 7), log("a", 1, "rejected", 2), log("a", 1, "activated", None),
          log("b", 1, "activated", 3), log("a", 1, "failed", 4)], {1: None, 2: 2, 3: 3, 4: 7}),
        ([change(1, "a")], [], {}),
    ],
)  # fmt: skip
def test_c3_7_the_schedule_reads_the_log(
    changes: list[RuleChange], rows: list[LogRow], arrivals: dict[int, int | None]
) -> None:
    schedule = Schedule.from_log(changes, rows, STREAM, STREAMS, 9)
    assert dict(schedule.arrivals) == arrivals
    assert schedule.after(100) == 9

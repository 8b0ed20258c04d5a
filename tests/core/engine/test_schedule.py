"""State made anew from the events: rule changes that arrive together take effect where they were logged to have."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import TYPE_CHECKING, Any

import cases as generated
import pytest
from hypothesis import given
from test_equals_oracle import (
    DictStore,
    changes_after,
    failures_of,
    late_of,
    lists_of,
    new_state,
    notes_of,
    plain,
    run_engine,
    run_oracle,
)

from growth import grows_in_proportion
from lookback.core.engine.batch import Batch
from lookback.core.engine.evaluation import Evaluator
from lookback.core.engine.output import Output
from lookback.core.engine.schedule import (
    Schedule,
    WaitingChange,
    find_causes,
    judge_batch,
    pack_waiting,
    restore_changes,
    unpack_waiting,
)
from lookback.core.rules.changes import RETIRE_ALL, ROW_DELETED, RuleChange
from lookback.core.rules.gate import APPROVAL, REFUSAL, write_evidence
from lookback.core.rules.rulelog import LogRow
from lookback.core.rules.versions import WARM, WITH_HISTORY, Piece
from lookback.core.streams.arrival import find_marks
from lookback.core.streams.declarations import Declarations
from lookback.core.streams.eventrows import read_events
from lookback.core.values.lists import KnownLists
from payins import STREAM, rule

if TYPE_CHECKING:
    from collections.abc import Sequence


def all_changes(case: dict[str, Any]) -> list[RuleChange]:
    afters = sorted({change["after"] for change in case["changes"]})
    return [dataclasses.replace(change, gate="") for after in afters for change in changes_after(case, after)]


def run_rebuilt(case: dict[str, Any], schedule: Schedule, batches: Sequence[int]) -> Output:
    """All changes come with the first batch; the batches end at these commits. The schedule alone knows of the gate."""
    stream = generated.STREAMS[case["stream"]]
    events, _ = read_events(case["rows"], stream, 1)
    marks, total = find_marks(events, events.commits), Output()
    bound = [(schedule.restore_decision(change), schedule.after(change.commit)) for change in all_changes(case)]
    for shard in range(case["shards"]):
        evaluator = Evaluator(stream, shard, case["shards"], lists=KnownLists(lists_of(case)))
        state, store = new_state(stream), DictStore()
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


@pytest.mark.long
@given(generated.list_cases(with_deletes=False))
def test_c11_3_commits_of_lists_bound_to_their_logged_arrivals_give_what_they_gave(case: dict[str, Any]) -> None:
    assert_rebuilt_equals_oracle(case)


@pytest.mark.long
@given(generated.cases(updates=True))
def test_c3_7_changes_bound_to_their_logged_arrivals_give_what_they_gave(case: dict[str, Any]) -> None:
    assert_rebuilt_equals_oracle(case)


def assert_rebuilt_equals_oracle(case: dict[str, Any]) -> None:
    oracle, first = run_oracle(case), run_engine(case)
    stream = generated.STREAMS[case["stream"]]
    through = max((row["arrival"] for row in case["rows"]), default=0)
    schedule = Schedule.from_log(all_changes(case), first.log, through, Declarations.of(stream))
    assert not schedule.unexplained
    assert Schedule.from_dict(schedule.to_dict()) == schedule
    again = run_rebuilt(case, schedule, sorted(case["cuts"]) if case["reload"] else [])
    assert list(map(plain, again.alerts)) == oracle.alerts
    assert late_of(again.late) == sorted(oracle.late)
    assert failures_of(again) == oracle.failed
    assert notes_of(again.notes) == sorted(oracle.notes)
    assert logged(again.log) == logged(first.log)


def change(commit: int, rule_id: str, version: int | None = 1, status: str = "active") -> RuleChange:
    return RuleChange("insert", commit, rule_id, version, status, json.dumps(rule(rule_id)))


def log(
    rule_id: str, version: int | None, action: str, arrival: int | None, commit: int = 1, decision: str | None = None
) -> LogRow:
    return LogRow(STREAM.name, rule_id, version, action, "", arrival, commit, decision)


def read_schedule(changes: list[RuleChange], rows: list[LogRow], through: int | None = 9) -> Schedule:
    return Schedule.from_log(changes, rows, through, Declarations.of(STREAM))


@pytest.mark.parametrize(
    ("changes", "rows", "arrivals"),
    [
        # What was not logged goes with the next that was; what comes after the last waits.
        ([change(1, "a"), change(2, "a"), change(3, "b"), change(4, "c")], [log("b", 1, "activated", 5, 3)],
         {1: 5, 2: 5, 3: 5}),
        # Rows that say the same name different commits.
        ([change(1, "a"), change(2, "a"), change(3, "b"), change(4, "a")],
         [log("a", 1, "rejected", 7, 4), log("a", 1, "rejected", 2, 2), log("a", 1, "activated", None),
          log("b", 1, "activated", 3, 3), LogRow(STREAM.name, "a", 1, "failed", "", 4)], {1: None, 2: 2, 3: 3, 4: 7}),
        ([change(1, "a")], [], {}),
    ],
)  # fmt: skip
def test_c3_7_the_schedule_reads_the_log(
    changes: list[RuleChange], rows: list[LogRow], arrivals: dict[int, int | None]
) -> None:
    schedule = read_schedule(changes, rows)
    assert dict(schedule.arrivals) == arrivals
    assert schedule.after(100) == 9


def piece(commit: int, query: str = "q1", through: int = 1, number: int = 1) -> RuleChange:
    """A piece of the history of version 1 of rule a; the second is the last."""
    document = Piece("a", 1, through, number, 2, f"a-1-{through}", query).to_document(STREAM.name)
    return RuleChange("insert", commit, "*", None, WARM, document)


A, B = change(1, "a"), change(5, "b")
WARMED_UP = [
    log("a", 1, "warming", 1), log("a", 1, "activated", 5, 3, WITH_HISTORY), log("b", 1, "activated", 7, 5)
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "rows", "taken", "arrival"),
    {
        "named once": ([A, piece(2), piece(3, number=2), B], WARMED_UP, 3, 5),
        # A driver was killed after the stream had taken the last piece, and before it knew that.
        "named again": ([A, piece(2), piece(3, number=2), B, piece(6, number=2), piece(7, number=2)], WARMED_UP, 3, 5),
        "made anew by another evaluation": (
            [A, piece(3, number=2), B, piece(6, "q2", number=2), piece(7, "q2", number=2)],
            [log("a", 1, "warming", 1), log("b", 1, "activated", 7, 5), log("a", 1, "activated", 9, 6, WITH_HISTORY)], 6, 9,
        ),
        "made anew from a later commit": (
            [A, piece(3, number=2), B, piece(6, through=7, number=2), piece(7, through=7, number=2)],
            [log("a", 1, "warming", 1), log("b", 1, "activated", 7, 5), log("a", 1, "activated", 9, 6, WITH_HISTORY)], 6, 9,
        ),
        # As one that did not see that the version was in force already.
        "made anew for nothing": (
            [A, piece(3, number=2), B, piece(6, "q2", number=2), piece(8, "q3", number=2)], WARMED_UP, 3, 5,
        ),
    }.values(),
)  # fmt: skip
def test_c11_2_a_version_came_into_force_with_the_piece_that_the_log_tells(
    changes: list[RuleChange], rows: list[LogRow], taken: int, arrival: int
) -> None:
    schedule = read_schedule(changes, rows)
    assert schedule.warming == {(1, "a", 1), (taken, "*", None)}
    assert [(each.rule_id, each.version, each.arrival) for each in schedule.warmed] == [("a", 1, arrival)]
    assert (schedule.arrivals[taken], schedule.arrivals[5]) == (arrival, 7)
    assert not schedule.unexplained


@pytest.mark.parametrize(
    ("changes", "rows", "causes"),
    {
        "versions by the stream": (
            [change(1, "a", None), change(1, "a", None)], [log("a", 1, "activated", 5), log("a", 2, "activated", 5)], [0, 1],
        ),
        "one of them rejected": (
            [change(1, "a", None), change(1, "a", None)], [log("a", None, "rejected", 5), log("a", 1, "activated", 5)], [0, 1],
        ),
        "beside one by its author": (
            [change(1, "a", 3), change(1, "a", None)], [log("a", 3, "activated", 5), log("a", 4, "activated", 5)], [0, 1],
        ),
        "one that the log does not name": (
            [change(1, "a", None, "draft"), change(1, "a", None, "paused"), change(1, "a", None)],
            [log("a", 1, "drafted", 5), log("a", 2, "warming", 5), log("a", 2, "activated", 5)], [0, 1, 2],
        ),
        "a version that is paused while it warms up": (
            [change(1, "a", None, "paused"), change(1, "a", None, "paused")],
            [log("a", 1, "warming", 5), log("a", 1, "paused", 5), log("a", 2, "paused", 5)], [0, 0, 1],
        ),
        "a command": (
            [change(1, "*", None, "retire_all")],
            [log("a", 1, "retired", 5, 1, RETIRE_ALL), log("b", 1, "retired", 5, 1, RETIRE_ALL),
             log("*", None, "retire_all", 5)], [0, 0, 0],
        ),
        "what is gone": ([change(1, "a", 1, "draft")], [log("a", 1, "activated", 5), log("b", 1, "activated", 5)], [None, None]),
    }.values(),
)  # fmt: skip
def test_c10_6_each_row_of_the_log_has_its_row_of_the_rules_table(
    changes: list[RuleChange], rows: list[LogRow], causes: list[int | None]
) -> None:
    numbered = [dataclasses.replace(each, evidence=str(at)) for at, each in enumerate(changes)]
    found = [None if cause is None else int(str(cause.evidence)) for _, cause in find_causes(rows, numbered)]
    assert found == causes


def row(rule_id: str, version: int | None = 1, status: str = "active") -> RuleChange:
    return dataclasses.replace(change(0, rule_id, version, status), change="")


@pytest.mark.parametrize(
    ("rows", "rows_of_log", "arrivals", "unexplained"),
    {
        "in the order of the log": (
            [row("b"), row("a", 2), row("a")],
            [log("a", 1, "activated", None), log("b", 1, "activated", 3, 2), log("a", 2, "activated", 6, 3)],
            [("a", 1, None), ("b", 1, 3), ("a", 2, 6)], set(),
        ),
        "never read, or drafts": (
            [row("a"), row("b"), row("c", status="draft")], [log("a", 1, "activated", 2), log("c", 1, "drafted", 2)],
            [("a", 1, 2)], set(),
        ),
        "a row that was deleted": (
            [row("a")], [log("a", 1, "activated", 2), log("b", 1, "activated", 2), log("b", 1, "retired", 4, 2, ROW_DELETED)],
            [("a", 1, 2)], {"b"},
        ),
        "a row that was updated": (
            [row("a")], [log("a", 1, "activated", 2), log("a", 1, "paused", 3, 2), log("a", 1, "activated", 4, 3)],
            [("a", 1, 2)], {"a"},
        ),
        "a row that was updated before its commits were gone, and not read since": (
            [row("a", status="paused"), row("b")], [log("b", 1, "activated", None), log("a", 1, "activated", 2, 2)],
            [("a", 1, None), ("b", 1, None)], {"a"},
        ),
        "a draft that was made active": (
            [row("a")], [log("a", 1, "drafted", 1), log("a", 1, "activated", 4, 2)], [("a", 1, 4)], set(),
        ),
        "rejected for what is not there any more": (
            [row("a", 2)], [log("a", 3, "activated", 2), log("a", 2, "rejected", 4, 2)], [("a", 2, 4)], {"a"},
        ),
        "a command": ([row("a")], [log("a", 1, "activated", 2), log("*", None, "clear_state", 5, 2)], [("a", 1, 2)], {"*"}),
        "a command beside one to another stream": (
            [row("*", None, "clear_state"), dataclasses.replace(row("*", None, "clear_state"), document='{"stream": "other"}')],
            [log("*", None, "clear_state", 3), log("*", None, "clear_state", 5, 2)], [("*", None, 3)], {"*"},
        ),
        "a version whose history is named": (
            [row("a"), dataclasses.replace(piece(0, number=2), change="")],
            [log("a", 1, "warming", 1), log("a", 1, "activated", 5, 3, WITH_HISTORY)], [("a", 1, 1), ("*", None, 5)], set(),
        ),
    }.values(),
)  # fmt: skip
def test_c10_6_rows_whose_commits_are_gone_come_in_the_order_of_the_log_and_what_is_missing_is_named(
    rows: list[RuleChange],
    rows_of_log: list[LogRow],
    arrivals: list[tuple[str, int, int | None]],
    unexplained: set[str],
) -> None:
    restored = restore_changes(rows, rows_of_log, 4)
    schedule = read_schedule(restored, rows_of_log, None)
    placed = [(each.rule_id, each.version, schedule.arrivals.get(each.commit)) for each in restored]
    assert placed == arrivals
    assert all(each.commit < 4 and each.change == "insert" for each in restored)
    assert schedule.unexplained == unexplained


def gated(commit: int, evidence: str | None = None, kind: str = "insert") -> RuleChange:
    document = json.dumps(rule("a"))
    return RuleChange(kind, commit, "a", 1, "active", document, evidence, "ann", "bob")


PROOF = write_evidence(rule("a"), [], "then")


@pytest.mark.parametrize(
    ("changes", "rows", "refused"),
    {
        "refused, then mended": (
            [gated(1), gated(2, PROOF, "update")],
            [log("a", 1, "rejected", 5, 1, REFUSAL), log("a", 1, "activated", 9, 2)], {1},
        ),
        "the same with no event between": (
            [gated(1), gated(2, PROOF, "update")],
            [log("a", 1, "rejected", 5, 1, REFUSAL), log("a", 1, "activated", 5, 2)], {1},
        ),
        "refused, and obeyed once the gate was open": (
            [gated(1), gated(2, None, "update")],
            [log("a", 1, "rejected", 5, 1, REFUSAL), log("a", 1, "activated", 5, 2)], {1},
        ),
        "in force before the gate, then an update refused": (
            [gated(1), dataclasses.replace(gated(2, None, "update"), document=json.dumps(rule("a", message="x")))],
            [log("a", 1, "activated", 5), log("a", 1, "rejected", 5, 2, REFUSAL)], {2},
        ),
        "without a gate": ([gated(1)], [log("a", 1, "activated", 5)], set()),
        "rejected for another reason": ([change(1, "a"), change(2, "a")], [
            log("a", 1, "activated", 5), log("a", 1, "rejected", 5, 2)], set()),
    }.values(),
)  # fmt: skip
def test_c10_8_the_schedule_refuses_the_rows_that_the_log_says_the_gate_rejected(
    changes: list[RuleChange], rows: list[LogRow], refused: set[int]
) -> None:
    """Whatever the settings say today: they are no input."""
    schedule = read_schedule(changes, rows)
    assert {commit for commit, _, _ in schedule.refused} == refused
    assert Schedule.from_dict(json.loads(json.dumps(schedule.to_dict()))) == schedule
    assert {each.commit for each in map(schedule.restore_decision, changes) if each.gate} == refused
    # A row that comes after those that were logged is decided as it comes.
    assert schedule.restore_decision(dataclasses.replace(gated(100), gate=APPROVAL)).gate == APPROVAL


@pytest.mark.long
def test_c10_8_the_time_to_read_the_log_is_in_proportion_to_the_rows_that_the_gate_rejected() -> None:
    texts = [json.dumps(rule(f"r{at}")) for at in range(1_600)]

    def seconds_for(size: int) -> float:
        changes = [
            RuleChange("insert", commit, f"r{at}", version, "active", texts[at])
            for commit, version in ((1, 1), (2, 2)) for at in range(size)
        ]  # fmt: skip
        rows = [
            log(f"r{at}", version, action, version, version, decision)
            for version, action, decision in ((1, "activated", None), (2, "rejected", REFUSAL)) for at in range(size)
        ]  # fmt: skip
        started = time.process_time()
        schedule = read_schedule(changes, rows)
        seconds = time.process_time() - started
        assert len(schedule.refused) == size
        return seconds

    seconds_for(1_600)
    assert grows_in_proportion(seconds_for, 400)

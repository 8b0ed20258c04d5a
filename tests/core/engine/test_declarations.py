"""A stream whose lateness changes at a restart: a replay has it change after the same commit (contract 10.2, 3.2)."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import cases as generated
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_equals_oracle import DictStore, changes_after, failures_of, late_of, new_state, notes_of, plain

from lookback.core.engine.batch import Batch
from lookback.core.engine.evaluation import Evaluator
from lookback.core.engine.output import Output
from lookback.core.engine.schedule import Schedule, WaitingChange, declare, judge_batch
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.rulelog import LogRow
from lookback.core.streams.arrival import find_marks, split_future
from lookback.core.streams.declarations import Declarations, Declared, list_settings, plan_declarations
from lookback.core.streams.eventrows import read_events
from lookback.core.values.zones import ZONES_RELEASE
from payins import STREAM, rule

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream

_END = 10**9


def declared(stream: Stream, *changes: tuple[int, dict[str, Any]]) -> Declarations:
    first = Declarations((Declared.now(stream, "1"),))
    for after, settings in changes:
        first = first.then(Declared.now(replace(stream, **settings), "1", after))
    return first


def judge_restarting(case: dict[str, Any], declarations: Declarations, shard: int) -> Output:
    """As the stream does: each declaration begins with a restart, on a state that is read back."""
    stream, total, store = generated.STREAMS[case["stream"]], Output(), DictStore()
    events, _ = read_events(case["rows"], stream, 1)
    marks = find_marks(events, events.commits)
    edges = sorted({0, *(each["after"] for each in case["changes"]), *case["cuts"], *declarations.cuts})
    state = new_state(stream)
    for start, end in pairwise([*edges, _END]):
        now = declarations.after(start)
        state.begin(store)
        evaluator = declare(Evaluator(stream, shard, case["shards"]), state, now, total)
        here = events.take((events.commits > start) & (events.commits <= end))
        part = {commit: high for commit, high in marks.items() if start < commit <= end}
        evaluator.process(state, Batch(here, None, part, changes_after(case, start)), total)
        state.drop_old()
        state.save()
        state = new_state(now.stream)
        assert state.load(store)
    return total


def judge_at_once(case: dict[str, Any], declarations: Declarations, shard: int, *, whole: bool) -> Output:
    """As a replay does: the events in one batch or in a few, within which rules and declarations change."""
    stream, total, store = generated.STREAMS[case["stream"]], Output(), DictStore()
    events, _ = read_events(case["rows"], stream, 1)
    marks, state = find_marks(events, events.commits), new_state(stream)
    first = changes_after(case, 0)
    afters = sorted({each["after"] for each in case["changes"]} - {0})
    waiting = [WaitingChange(change, after) for after in afters for change in changes_after(case, after)]
    for start, end in pairwise([0, *([] if whole else sorted(case["cuts"])), _END]):
        state.begin(store)
        here = events.take((events.commits > start) & (events.commits <= end))
        part = {commit: high for commit, high in marks.items() if start < commit <= end}
        evaluator = Evaluator(stream, shard, case["shards"])
        output, waiting = judge_batch(evaluator, state, Batch(here, None, part, first), waiting, declarations)
        first = []
        for name in ("rows", "late", "failures", "notes", "log"):
            getattr(total, name).extend(getattr(output, name))
        state.drop_old()
        state.save()
        state = new_state(stream)
        assert state.load(store)
    return total


SPANS = st.sampled_from([1, 3, 6, 11])
# The first commit of a generated case is 1; before it the first declaration holds.
CHANGES = st.lists(st.tuples(st.integers(1, 12), SPANS, SPANS), min_size=1, max_size=2, unique_by=lambda each: each[0])


@pytest.mark.long
@given(generated.cases(updates=False), CHANGES, st.booleans())
def test_c10_2_a_replay_over_changed_lateness_gives_what_the_restarted_stream_gave(
    case: dict[str, Any], changes: list[tuple[int, int, int]], whole: bool
) -> None:
    listed = [
        (after, {"max_out_of_orderness": disorder, "allowed_lateness": lateness})
        for after, disorder, lateness in sorted(changes)
    ]
    declarations = declared(generated.STREAMS[case["stream"]], *listed)
    for shard in range(case["shards"]):
        lived = judge_restarting(case, declarations, shard)
        again = judge_at_once(case, declarations, shard, whole=whole)
        assert list(map(plain, again.alerts)) == list(map(plain, lived.alerts))
        assert late_of(again.late) == late_of(lived.late)
        assert failures_of(again) == failures_of(lived)
        assert sorted(notes_of(again.notes)) == sorted(notes_of(lived.notes))


TX = generated.STREAMS["plain"]
COUNT = {"rule_id": "n", "stream": "tx", "window": {"tumbling": "10 microseconds"}, "measures": {"m": "count(*)"}}


def judge_counts(rows: list[dict[str, Any]], declarations: Declarations, document: dict[str, Any] = COUNT) -> Output:
    events, _ = read_events(rows, TX, 1)
    changes = [RuleChange("insert", 0, document["rule_id"], 1, "active", json.dumps(document))]
    batch = Batch(events, marks=find_marks(events, events.commits), changes=changes)
    output, _ = judge_batch(Evaluator(TX), new_state(TX), batch, [], declarations)
    return output


def test_c3_2_a_watermark_never_falls_when_more_disorder_is_declared() -> None:
    # Times        0----5----10----15----20     commits in order: 5, 20, 8, 60
    #              [0 ------ 10)                W = 17 after commit 2, and would be 8 under 12 us of disorder
    rows = [{"id": f"{at}", "at": at, "arrival": n} for n, at in enumerate((5, 20, 8, 60), 1)]
    lateness = {"allowed_lateness": 1}
    quiet = declared(replace(TX, **lateness))
    ended = judge_counts(rows, quiet).alerts
    assert [(alert.window_start.microsecond, alert.measures["m"]) for alert in ended] == [
        (0, 1),
        (20, 1),
    ]
    # The window of 5 ended at 17 for good; under 12 us it must not begin anew with the event of 8 alone.
    more = declared(replace(TX, **lateness), (2, {**lateness, "max_out_of_orderness": 12}))
    output = judge_counts(rows, more)
    assert [(alert.window_start.microsecond, alert.revision) for alert in output.alerts] == [
        (0, 0), (20, 0),
    ]  # fmt: skip
    assert [(late.event_id, late.late_by_us) for late in output.late] == [("8", 9)]


def test_c3_2_a_watermark_that_rises_by_a_declaration_is_there_before_the_next_commit() -> None:
    rows = [{"id": f"{at}", "at": at, "arrival": n} for n, at in enumerate((5, 20, 18, 21), 1)]
    assert judge_counts(rows, declared(TX)).late == []
    less = declared(TX, (2, {"max_out_of_orderness": 1}))
    assert [(late.event_id, late.late_by_us) for late in judge_counts(rows, less).late] == [("18", 1)]


def test_c10_2_a_declaration_is_logged_once_and_again_when_one_of_its_settings_changes() -> None:
    rows = [{"id": f"{at}", "at": at, "arrival": at} for at in range(1, 9)]
    output = judge_counts(rows, declared(TX, (3, {"max_revisions": 7}), (6, {"max_revisions": 7})))
    listed = [row for row in output.log if row.action == "declared"]
    assert [row.arrival for row in listed] == [None, 3]
    assert json.loads(listed[0].message) == {**list_settings(TX), "release": "1", "zones": ZONES_RELEASE}
    assert json.loads(listed[1].message)["max_revisions"] == 7
    assert all((row.rule_id, row.version) == (None, None) for row in listed)


def test_c10_2_what_a_shard_and_a_checkpoint_keep_of_declarations_does_not_grow_with_their_number() -> None:
    def save_after(times: int) -> int:
        state, output, evaluator, rows = new_state(TX), Output(), Evaluator(TX), list[tuple[int | None, str]]()
        state.begin(DictStore())
        for at in range(times):
            # Each is declared while the batch before it waits to be repeated.
            now = Declared.now(replace(TX, max_revisions=100 + at), "1", at)
            evaluator = declare(evaluator, state, now, output)
            rows = plan_declarations(rows, at, now).to_rows()
            assert len(rows) <= 2
        state.save()
        assert len(output.log) == times
        return len(state.manifest)

    # Its page is compressed, and marks differ.
    assert save_after(300) <= save_after(2) + 16


def test_c10_2_a_log_without_declarations_means_todays_and_an_unreadable_row_is_passed_over() -> None:
    assert Declarations.from_rows(TX, []).after(5).stream == TX
    text = Declared.now(replace(TX, max_future=5), "1").text
    rows: list[tuple[int | None, str]] = [(4, text), (6, "{"), (7, '{"max_future": "soon"}'), (8, "[]")]
    read = Declarations.from_rows(TX, rows)
    assert len(read.listed) == 1
    # The first one counts for the commits before it, too.
    assert [read.after(at).stream.max_future for at in (None, 3, 9)] == [5, 5, 5]
    assert Declarations.from_rows(TX, read.to_rows()) == read
    assert Declarations.of(TX).after(0).mark == ""
    # One by which nothing was judged is replaced.
    twice = Declarations.from_rows(TX, [(None, Declared.now(TX, "1").text), (4, text), (4, Declared.now(TX, "2").text)])
    assert [(each.after, each.stream) for each in twice.listed] == [(None, TX), (4, TX)]


def test_c3_2_an_event_is_too_far_ahead_by_the_max_future_of_its_commit() -> None:
    declarations = declared(replace(TX, max_future=10), (2, {"max_future": 3}))
    rows = [{"id": f"{n}", "at": 105, "arrival": n, "committed_at": 100} for n in (1, 2, 3)]
    events, committed = read_events(rows, TX, 1)
    assert committed is not None
    most = declarations.list_values("max_future", events.commits)
    assert np.array_equal(most, [10, 10, 3])
    assert declarations.least_future == 3
    kept, future = split_future(events, committed, TX, most)
    assert list(kept.commits) == [1, 2]
    assert [row.arrival for row in future] == [3]
    assert declared(TX).list_values("max_future", events.commits) == TX.max_future


@pytest.mark.parametrize(
    ("before", "unfinished", "expected"),
    [
        # Nothing to repeat: today's alone.
        ([(None, 1)], None, [(None, 9)]),
        ([], 5, [(None, 9)]),
        # The repeated batch ends at 5; it was begun by the declaration that held when its first commit came.
        ([(None, 1)], 5, [(None, 1), (5, 9)]),
        ([(None, 1), (5, 2)], 5, [(None, 1), (5, 9)]),
        ([(None, 1), (5, 2)], 8, [(None, 2), (8, 9)]),
        ([(None, 9)], 8, [(None, 9)]),
    ],
)  # fmt: skip
def test_c3_1_a_repeated_batch_is_judged_by_the_declaration_that_it_began_with(
    before: list[tuple[int | None, int]], unfinished: int | None, expected: list[tuple[int | None, int]]
) -> None:
    def make(revisions: int) -> Declared:
        return Declared.now(replace(TX, max_revisions=revisions), "1")

    planned = plan_declarations([(after, make(number).text) for after, number in before], unfinished, make(9))
    assert [(each.after, each.stream.max_revisions) for each in planned.listed] == expected


def test_c3_7_what_was_accepted_under_an_earlier_declaration_is_scheduled_by_it() -> None:
    # Its own lateness is more than the stream allows today.
    document = json.dumps({**rule("own"), "allowed_lateness": "50 minutes"})
    changes = [RuleChange("insert", 1, "own", 1, "active", document)]
    rows = [LogRow(STREAM.name, "own", 1, "activated", "", 4, 1)]
    strict, lax = replace(STREAM, allowed_lateness=1_000_000), replace(STREAM, allowed_lateness=3_600_000_000)
    declarations = Declarations((Declared.now(lax, "1"), Declared.now(strict, "1", 6)))
    schedule = Schedule.from_log(changes, rows, 9, declarations)
    assert dict(schedule.arrivals) == {1: 4}
    assert Schedule.from_dict(json.loads(json.dumps(schedule.to_dict()))) == schedule
    assert declarations.widest.allowed_lateness == lax.allowed_lateness

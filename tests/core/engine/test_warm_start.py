"""A version that comes into force with the history of its windows alerts as if it had stood there in silence from the start.

Contract 11.1 and 11.2. C is the arrival at which its row is admitted, A the one at which it comes into force:

    commits:   1 .. C          | C+1 .. A              | A+1 ..
    rows from: the table, made | kept in features of   | features that rules share
               in pieces       | its own               |
    speaks:    the version before it                   | the version
"""

from __future__ import annotations

import json
from copy import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from cases import STREAMS, documents, revised, rows
from hypothesis import event, given
from hypothesis import strategies as st
from test_equals_oracle import DictStore, plain

from lookback.core.engine.batch import Batch
from lookback.core.engine.evaluation import Evaluator
from lookback.core.engine.output import Output
from lookback.core.engine.schedule import Warmed, open_warmed
from lookback.core.engine.warming import WindowHistory, find_gap, find_reach, find_reason_cold, find_settled
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.roles import WARMING
from lookback.core.rules.rulebook import RuleBook
from lookback.core.rules.versions import WARM, Piece
from lookback.core.state.shard import ShardState
from lookback.core.streams.arrival import find_marks
from lookback.core.streams.declaration import Stream
from lookback.core.streams.eventrows import read_events
from lookback.core.streams.events import Events

_QUERY = "q"
# Other rules start without history, so that one version is warming at a time.
_COLD = {"warm_start": False}


def _change(commit: int, rule: dict[str, Any], version: int, status: str = "active", **more: Any) -> RuleChange:
    return RuleChange("insert", commit, rule["rule_id"], version, status, json.dumps(rule), **more)


class Table:
    """The events of a case, with the commits that delete some of them."""

    def __init__(self, stream: Stream, listed: list[dict[str, Any]], deleted: list[tuple[int, int]]) -> None:
        self.stream, self.deleted = stream, deleted
        self.events, _ = read_events(listed, stream, 1)
        # Those that deletes name by their places.
        self.every = self.events
        marks = find_marks(self.events, self.events.commits)
        self.marks = {commit: marks.get(commit) for commit in sorted({*marks, *(commit for _, commit in deleted)})}

    def since(self, begin: int) -> Table:
        """The table without the events before a time."""
        left, events = copy(self), self.events
        event("events are left out" if (events.times < begin).any() else "none are before")
        left.events = events.take(events.times >= begin)
        marks = find_marks(left.events, left.events.commits)
        left.marks = {commit: marks.get(commit) for commit in self.marks}
        left.deleted = [(at, commit) for at, commit in self.deleted if self.every.times[at] >= begin]
        return left

    def batch(self, start: int, end: int, changes: list[RuleChange]) -> Batch:
        """The commits after `start` up to `end`."""
        here = self.events.take((self.events.commits > start) & (self.events.commits <= end))
        marks = {commit: high for commit, high in self.marks.items() if start < commit <= end}
        gone = [(at, commit) for at, commit in self.deleted if start < commit <= end]
        deleted = None
        if gone:
            taken = self.every.take(np.array([at for at, _ in gone]))
            commits = np.array([commit for _, commit in gone], dtype=np.int64)
            deleted = Events(taken.columns, commits, self.stream.event_id, self.stream.event_time)
        return Batch(here, deleted, marks, changes, deleting=frozenset(commit for _, commit in gone))


def new_state(stream: Stream) -> ShardState:
    return ShardState(RuleBook(stream, {stream.name: stream}))


def judge(
    table: Table, changes: list[tuple[int, RuleChange]], cuts: list[int], evaluator: Evaluator,
    warmed: tuple[Warmed, ...] = (),
) -> Output:  # fmt: skip
    """Judges all commits, with each change after its arrival; state is written and read back between batches."""
    state, store, total = new_state(table.stream), DictStore(), Output()
    open_warmed(state, warmed)
    edges = sorted({0, *(after for after, _ in changes), *cuts})
    for number, (start, end) in enumerate(zip(edges, [*edges[1:], 10**9], strict=True)):
        if number:
            state = new_state(table.stream)
            assert state.load(store)
        state.begin(store)
        due = [change for after, change in changes if after == start]
        evaluator.process(state, table.batch(start, end, due), total)
        if number % 2:
            state.drop_old()
        state.save()
    return total


def gather(
    table: Table, before: list[tuple[int, RuleChange]], rule: dict[str, Any], through: int, part: int, parts: int
) -> bytes:
    """Makes the history of a rule of some of the keys, as the driver does: by a replay in which it stands paused."""
    stream = table.stream
    state, evaluator = new_state(stream), Evaluator(stream, part, parts)
    # A command after a number that no commit has is obeyed after the last commit before it.
    obeyed = [
        (after, change) for after, change in before if not any(through < commit <= after for commit in table.marks)
    ]
    commands = [(min(after, through), change) for after, change in obeyed if change.rule_id == "*"]
    changes = [(0, _change(0, rule, 1, "paused")), *commands]
    edges = sorted({0, *(after for after, _ in changes)})
    for start, end in zip(edges, [*edges[1:], through], strict=True):
        evaluator.process(state, table.batch(start, end, [change for after, change in changes if after == start]))
        state.drop_old()
    return WindowHistory.of(state, compile_rule(rule, stream)).encode()


def leave_out(table: Table, rule: dict[str, Any], through: int, active: int, span: int) -> Table:
    """The table as the driver reads it for a history: without events that no window reaches, or that are settled."""
    compiled = compile_rule(rule, table.stream)
    reach, before = find_reach(compiled), find_watermark(table, through)
    if reach is not None:
        # The floor is that of some batch until A.
        now = find_watermark(table, active)
        return table if now is None else table.since(now - reach)
    gap, settled = find_gap(compiled), find_settled(compiled, before)
    if settled is None or len(compiled.routes) > 1:
        return table
    assert gap is not None
    begin, read = settled - span, table.events.take(table.events.commits <= through)
    by_key: dict[tuple[int, int], list[int]] = {}
    for key, time in zip(read.find_keys(compiled.group_by).list_pairs(), read.times.tolist(), strict=True):
        if time >= begin:
            by_key.setdefault(key, []).append(time)
    for times in by_key.values():
        listed = [begin, *sorted(times)]
        has_gap = any(one <= settled and other - one > gap for one, other in pairwise(listed))
        if listed[-1] > settled and not has_gap:
            return table
    return table.since(begin)


def find_watermark(table: Table, commit: int) -> int | None:
    """The watermark after a commit, without what commands move."""
    highs = [high for each, high in table.marks.items() if each <= commit and high is not None]
    return max(highs) - table.stream.max_out_of_orderness if highs else None


def find_warmings(output: Output) -> list[tuple[str | None, int | None, int | None]]:
    return [(row.rule_id, row.version, row.arrival) for row in output.log if row.action == WARMING]


@st.composite
def warm_cases(draw: st.DrawFn, kinds: list[str]) -> dict[str, Any]:
    kind = draw(st.sampled_from(kinds))
    # In the others a session is soon too long.
    named = draw(st.sampled_from(["plain", "narrow", "tight"] if kind == "session" else ["plain"]))
    stream = STREAMS[named]
    events = draw(rows())
    last = max(row["arrival"] for row in events)
    rule = draw(documents("warmed", kind).filter(lambda rule: find_reason_cold(compile_rule(rule, stream)) is None))
    # Mostly early, so that there is something to alert on afterwards.
    begun = draw(st.integers(1, max(1, last // 2)) | st.integers(1, last))
    active = draw(st.integers(begun, max(begun, (begun + last) // 2)) | st.integers(begun, last))
    others: list[tuple[int, RuleChange]] = []
    if draw(st.booleans()):
        others.append((draw(st.integers(0, begun)), _change(0, draw(revised(rule, kind)) | _COLD, 1)))
    for at in range(draw(st.sampled_from([0, 1, 1, 2]))):
        other = draw(st.one_of(st.just(rule), revised(rule, kind))) | _COLD | {"rule_id": f"other{at}"}
        others.append((draw(st.integers(0, last)), _change(1 + at, other, 1)))
    for at in range(draw(st.sampled_from([0, 0, 1]))):
        time = draw(st.integers(-10, 40))
        command = draw(st.sampled_from(["advance", "clear_state"]))
        document = json.dumps({"time": f"1970-01-01T00:00:00.{max(time, 0):06d}Z"}) if command == "advance" else None
        others.append((draw(st.integers(0, last)), RuleChange("insert", 5 + at, "*", None, command, document)))
    deleted = []
    if draw(st.booleans()):
        at = draw(st.integers(0, len(events) - 1))
        deleted.append((at, draw(st.integers(events[at]["arrival"] + 1, last + 2))))
    return {
        "stream": named, "rows": events, "rule": rule, "version": 2, "begun": begun, "active": active, "others": others, "deleted": deleted,
        "cuts": draw(st.lists(st.integers(1, last), unique=True, max_size=4)),
        "shards": draw(st.sampled_from([1, 1, 2, 3])), "pieces": draw(st.sampled_from([1, 2, 3])),
        "span": draw(st.sampled_from([0, 1, 5, 30])), "status": draw(st.sampled_from(["active", "active", "active", "shadow"])),
    }  # fmt: skip


def run_stream(case: dict[str, Any], table: Table) -> tuple[Output, int, int] | None:
    """Judges as the stream does; None if the version is not warmed. Returns the output, the last C, and A."""
    rule, shards, pieces = case["rule"], case["shards"], case["pieces"]
    stream, begun, active = table.stream, case["begun"], case["active"]
    row = _change(50, rule, case["version"], case["status"])
    cuts = sorted({*case["cuts"], *(commit for _, commit in case["deleted"])})
    first = judge(table, [*case["others"], (begun, row)], cuts, Evaluator(stream, 0, shards, warms=True))
    warmings = [arrival for *key, arrival in find_warmings(first) if key == ["warmed", 2]]
    if not warmings:
        return None
    # A delete in between lets it begin anew.
    usable = [arrival for arrival in warmings if arrival is not None and arrival <= active]
    through = usable[-1]
    assert not any(through < commit <= active for _, commit in case["deleted"])
    parts = []
    for number, after in enumerate(np.linspace(max(begun, through), active, pieces + 1).astype(int).tolist()[1:], 1):
        document = Piece("warmed", case["version"], through, number, pieces, "p", _QUERY).to_document(stream.name)
        parts.append((after, RuleChange("insert", 60 + number, "*", None, WARM, document)))
    read = leave_out(table, rule, through, active, case["span"])
    made = {at: gather(read, case["others"], rule, through, at, shards * pieces) for at in range(shards * pieces)}
    total = Output()
    for shard in range(shards):
        evaluator = Evaluator(stream, shard, shards, warms=True, read_parcel=lambda _, part: made[part], query=_QUERY)
        output = judge(table, [*case["others"], (begun, row), *parts], cuts, evaluator)
        total.rows += output.rows
        total.late += output.late
        total.failures += output.failures
        if shard == 0:
            total.log += output.log
    return total, through, active


def alerts_after(output: Output, arrival: int, rule_id: str | None = None) -> list[Any]:
    found = [alert for _, alert in output.rows if alert.arrival > arrival and rule_id in (None, alert.rule_id)]
    return sorted(map(plain, found), key=repr)


# What a session or a sequence keeps depends on the order of events: these are judged to A, not merged.
_MERGED = ["lookback", "lookback", "lookback", "tumbling", "sliding"]
_ORDERED = ["session", "sequence", "sequence"]


@given(warm_cases(_MERGED))
def test_c11_1_alerts_equal_those_of_a_version_that_stood_in_silence_from_the_start(case: dict[str, Any]) -> None:
    """11.1, 11.2: alerts after A equal those of a replay in which the version is paused before commit 1, and active from A."""
    check_equals_silent(case)


@given(warm_cases(_ORDERED))
def test_c11_2_sessions_and_sequences_are_judged_to_a_as_if_they_had_stood_in_silence(case: dict[str, Any]) -> None:
    """11.2: what order decides is replayed to A, not merged; alerts that were never written neither suppress nor reset."""
    check_equals_silent(case)


def check_equals_silent(case: dict[str, Any]) -> None:
    # Alerts of the version before would suppress some of this one (4), and nobody has written those in the replay.
    case = case | {"others": [(after, _without_suppress(change)) for after, change in case["others"]]}
    table = Table(STREAMS[case["stream"]], case["rows"], case["deleted"])
    ran = run_stream(case, table)
    if ran is None:
        event("not warmed")
        return
    output, _, active = ran
    assert [row.arrival for row in output.log if (row.rule_id, row.version) == ("warmed", 2)][-1] is not None
    rule = case["rule"]
    commands = [(after, change) for after, change in case["others"] if change.rule_id == "*"]
    silent = [
        (0, _change(0, rule, 2, "paused")),
        *commands,
        (active, replace(_change(50, rule, 2, case["status"]), change="update")),
    ]
    oracle = judge(table, silent, [], Evaluator(table.stream))
    found = [each for each in alerts_after(output, active, "warmed") if each[3] == 2]
    event("alerts" if found else "none")
    expected = alerts_after(oracle, active, "warmed")
    assert found == expected, (found, expected)


@given(warm_cases(_MERGED))
def test_c11_1_a_replay_of_what_was_logged_gives_what_the_stream_gave(case: dict[str, Any]) -> None:
    """11.1: the log's arrivals C and A are enough for a rebuild or a proof: all alerts of all rules, and late events."""
    check_equals_replay(case)


@given(warm_cases(_ORDERED))
def test_c11_2_a_replay_of_sessions_and_sequences_gives_what_the_stream_gave(case: dict[str, Any]) -> None:
    """11.1: as above. A sequence stands in `late_events` from C, a session from A."""
    check_equals_replay(case)


def _without_suppress(change: RuleChange) -> RuleChange:
    document = json.loads(change.document or "null")
    if change.rule_id != "warmed" or not document.pop("suppress", None):
        return change
    return replace(change, document=json.dumps(document))


def check_equals_replay(case: dict[str, Any]) -> None:
    table = Table(STREAMS[case["stream"]], case["rows"], case["deleted"])
    ran = run_stream(case, table)
    if ran is None:
        event("not warmed")
        return
    output, _, active = ran
    rule, stream = case["rule"], table.stream
    warmed = Warmed(active, "warmed", 2, case["status"], json.dumps(rule))
    ending = Piece("warmed", 2, active, 1, 1).to_document(stream.name)
    changes = [
        *case["others"], (case["begun"], _change(50, rule, 2, case["status"], warms=True)),
        (active, RuleChange("insert", 70, "*", None, WARM, ending, warms=True)),
    ]  # fmt: skip
    changes = [(after, replace(each, warms=bool(each.warms))) for after, each in changes]
    replayed = judge(table, changes, [], Evaluator(stream), (warmed,))
    assert alerts_after(output, -1) == alerts_after(replayed, -1)
    assert sorted({*map(repr, _strongest(output))}) == sorted({*map(repr, _strongest(replayed))})


def _strongest(output: Output) -> list[Any]:
    best: dict[tuple[str, int], Any] = {}
    order = ["discarded", "recorded", "evaluated"]
    for row in output.late:
        known = best.get((row.event_id, row.arrival))
        if known is None or order.index(row.action) > order.index(known.action):
            best[row.event_id, row.arrival] = row
    return list(best.values())

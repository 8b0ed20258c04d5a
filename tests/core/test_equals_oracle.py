"""The evaluator against the oracle, on generated rules, events, rule changes, cuts and shard counts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from cases import (
    STREAMS,
    cases,
    gate_columns,
    linked_cases,
    list_cases,
    resolution_cases,
    rising_cases,
    step_key_cases,
    union_cases,
)
from hypothesis import given
from state_layout import small_runs, state_pages

from lookback.core.engine import batch as batch_module
from lookback.core.engine.batch import Batch
from lookback.core.engine.evaluation import Evaluator
from lookback.core.engine.output import Output
from lookback.core.judging import candidates, keyjudge, lookbacks, lookups, matches, taken, tiledwindows
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.gate import APPROVAL, REFUSAL
from lookback.core.rules.rulebook import RuleBook
from lookback.core.rules.rulelog import LogRow
from lookback.core.state import keyruns, pieces, storedruns
from lookback.core.state import shard as state_module
from lookback.core.state.shard import MANIFEST, ShardState, decode_text
from lookback.core.streams.alerts import Alert, LateEvent
from lookback.core.streams.arrival import find_marks, late_sort_key
from lookback.core.streams.blocks import merge_alerts, pack_alerts
from lookback.core.streams.declaration import Stream
from lookback.core.streams.eventrows import read_events
from lookback.core.streams.events import Events
from lookback.core.values import pages as pages_module
from lookback.core.values.cache import Cache
from lookback.core.values.columns import to_text
from lookback.core.values.listchanges import ListChange
from lookback.core.values.lists import KnownLists, Lists
from lookback.spark.batches import arrayfiles
from lookback.testing.harness import replay
from oracle import COVERED, Oracle, OracleEvent

_END = 10**9


class FileInMemory:
    """An array file without a disk: what it holds is taken apart and made anew as there, and cannot be written to."""

    def __init__(self) -> None:
        self._content: tuple[Any, list[Any]] | None = None

    def write(self, content: Any) -> bool:
        arrays: list[Any] = []
        described = arrayfiles._describe(content, arrays, {})
        if any(array.dtype.hasobject for array in arrays):
            return False
        self._content = (
            described,
            [np.frombuffer(pa.py_buffer(array.tobytes()), array.dtype) for array in arrays],
        )
        return True

    def read(self, classes: Mapping[str, type[Any]]) -> Any:
        return None if self._content is None else arrayfiles._make(*self._content, classes)


class DictStore:
    """Pages in a dict, as the state store keeps them. files: for what is decoded of each page; None for none."""

    files: dict[tuple[str, bytes], FileInMemory] | None = None

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}

    def get(self, name: str) -> bytes | None:
        return self.pages.get(name)

    def put(self, name: str, page: bytes) -> None:
        assert len(page) <= pieces.MAX_PIECE_BYTES
        self.pages[name] = page

    def remove(self, name: str) -> None:
        del self.pages[name]

    def find_file(self, name: str) -> FileInMemory | None:
        if self.files is None or name not in self.pages:
            return None
        return self.files.setdefault((name, self.pages[name]), FileInMemory())


def plain(alert: Alert) -> tuple[Any, ...]:
    measures = tuple(sorted((name, to_text(value)) for name, value in alert.measures.items()))
    return (
        alert.alert_id, alert.revision, alert.rule_id, alert.rule_version, alert.mode, alert.verdict, alert.event_id,
        alert.event_time, alert.window_start, alert.window_end, measures, alert.window_complete, alert.message,
        tuple(sorted(alert.entities.items())), tuple(alert.tags), tuple(alert.evidence), alert.arrival,
    )  # fmt: skip


def run_oracle(case: dict[str, Any]) -> Oracle:
    stream = STREAMS[case["stream"]]
    events, _ = read_events(case["rows"], stream, 1)
    oracle = Oracle(stream)
    listed = [
        OracleEvent(
            {
                name: None if c.null is not None and c.null[at] else as_stored(c, at)
                for name, c in events.columns.items()
            },
            int(events.commits[at]),
            int(events.times[at]),
            (position_of(events, at), events.columns["id"].values[at].encode()),
        )
        for at in range(len(events))
    ]
    deleted: dict[int, list[OracleEvent]] = {}
    for at, commit in case.get("deleted", ()):
        deleted.setdefault(commit, []).append(listed[at])
    edges = sorted({0, *(change["after"] for change in case["changes"])})
    for start, end in zip(edges, [*edges[1:], _END], strict=True):
        for change in case["changes"]:
            if change["after"] != start:
                continue
            if change["status"] == "lists":
                oracle.change_lists(change["document"]["rows"])
            elif change["rule_id"] == "*":
                oracle.command(change["status"], (change["document"] or {}).get("time"))
            elif change["change"] == "delete":
                oracle.end(change["rule_id"], change["version"])
            elif change.get("shown", "fits") != "fits":
                oracle.refuse(change["document"], change["version"])
            elif change["status"] == "quarantined":
                oracle.end(change["rule_id"], json.loads(change["evidence"])["quarantined"])
            else:
                oracle.change(change["document"], change["version"], change["status"])
        oracle.run([event for event in listed if start < event.commit <= end], deleted)
    COVERED["cases"] += 1
    return oracle


def position_of(events: Events, at: int) -> tuple[bool, int]:
    """NULL comes first."""
    position = events.columns["position"].item(at)
    return position is not None, position or 0


def as_stored(column: Any, at: int) -> Any:
    value = column.values[at]
    return value.item() if hasattr(value, "item") else value


@contextmanager
def small_pages() -> Iterator[None]:
    """As if a state store took 150 bytes at once, an array of a page no more, a match two rows and few searched ones, and tables were large.

    However many events may meet a condition, only these are measured. A batch is judged in parts of three events.
    """
    with pytest.MonkeyPatch.context() as patch, small_runs():
        patch.setattr(pieces, "MAX_PIECE_BYTES", 150)
        patch.setattr(keyruns, "_MAX_ROW_CHARACTERS", 20)
        patch.setattr(state_module, "_MAX_ROW_CHARACTERS", 20)
        patch.setattr(pages_module, "_MAX_BYTES", 150)
        patch.setattr(pages_module, "_MAX_ROWS", 18)
        patch.setattr(taken, "_MAX_SEARCHED", 1)
        patch.setattr(matches, "_FIRST_ROWS", 1)
        patch.setattr(matches, "_MIN_LOOKED_UP", 0)
        patch.setattr(matches, "_MAX_LISTED", 10)
        patch.setattr(matches, "_MATCHES_AT_ONCE", 2)
        patch.setattr(lookups, "MAX_PAIRS", 5)
        patch.setattr(lookups, "_MAX_ITEMS", 2)
        patch.setattr(candidates, "_MAX_ROWS", 20)
        patch.setattr(keyjudge, "_MIN_ASKED", 1)
        patch.setattr(batch_module, "MAX_EVENTS", 3)
        patch.setattr(storedruns, "_MAX_UNSAVED_BYTES", 0)
        patch.setattr(storedruns, "_SAMPLE_ROWS", 2)
        patch.setattr(storedruns, "_MIN_FILED_ROWS", 0)
        patch.setattr(tiledwindows, "_MAX_WINDOWS", 3)
        patch.setattr(lookbacks, "_MAX_CANDIDATES", 2)
        yield


def run_engine(case: dict[str, Any]) -> Output:
    """The evaluator as the stream runs it: shards, micro-batches, state written and read back."""
    with small_pages() if case.get("small_pages") else nullcontext():
        return _run_engine(case)


def _run_engine(case: dict[str, Any]) -> Output:
    stream = STREAMS[case["stream"]]
    events, _ = read_events(case["rows"], stream, 1)
    total = Output()
    marks = find_marks(events, events.commits)
    edges = sorted({0, *(change["after"] for change in case["changes"]), *case["cuts"]})
    blocks = []
    for shard in range(case["shards"]):
        known = len(total.rows)
        evaluator = Evaluator(stream, shard, case["shards"], lists=KnownLists(lists_of(case)))
        state, store = new_state(stream, case.get("cached")), DictStore()
        store.files = {}
        for number, (start, end) in enumerate(zip(edges, [*edges[1:], _END], strict=True)):
            if case["reload"] and number:
                before = state if number % 2 else None
                state = new_state(stream, case.get("cached"))
                assert state.load(store, before)
            twin = copy_of(state, store, stream) if case["reload"] else None
            state.begin(store, store.find_file)
            here = events.take((events.commits > start) & (events.commits <= end))
            part = {commit: high for commit, high in marks.items() if start < commit <= end}
            batch = Batch(here, deleted_in(case, events, start, end), part, changes_after(case, start))
            output = evaluator.process(state, batch)
            if number % 2:
                state.drop_old()
            state.save()
            if twin is not None:
                # A repetition of the batch leaves the very pages that its first attempt left.
                repeated, pages = twin
                evaluator.process(repeated, batch)
                if number % 2:
                    repeated.drop_old()
                repeated.save()
                assert pages.pages == store.pages
            manifest = json.loads(decode_text(pieces.Pieces(store, {}).get(MANIFEST), ""))
            split = {f"{name}/{at}" for name, count in manifest.get("pieces", {}).items() for at in range(count)}
            there = {name for name in store.pages if "/" in name and not name.startswith(MANIFEST)}
            assert split == there
            # No page is left behind.
            assert set(store.pages) == state_pages(state)
            total.rows += output.rows
            total.late += output.late
            total.failures += output.failures
            total.notes += output.notes
            if shard == 0:
                total.log += output.log
        blocks.append(pack_alerts(total.rows[known:]))
    # As the write step brings together what the shards answer; one shard's rows are in order as they come.
    if case["shards"] > 1:
        total.rows.sort(key=lambda row: row[0])
    assert merge_alerts(blocks).column("alert_id").to_pylist() == [alert.alert_id for alert in total.alerts]
    return total


def lists_of(case: dict[str, Any]) -> dict[int, Lists]:
    """The lists of a case after each commit that changes them, made of the changes from one commit to the next."""
    known, before, found = Lists.empty(), Counter[tuple[Any, ...]](), {}
    for change in case["changes"]:
        if change["status"] == "lists":
            commit, after = change["document"]["commit"], Counter(map(tuple, change["document"]["rows"]))
            rows = [ListChange("delete", commit, *row) for row in (before - after).elements()]
            rows += [ListChange("insert", commit, *row) for row in (after - before).elements()]
            known, before = known.apply(rows, commit), after
            found[commit] = Lists.from_bytes(known.to_bytes()) if case["reload"] else known
    return found


def deleted_in(case: dict[str, Any], events: Events, start: int, end: int) -> Events | None:
    """The rows that commits after `start` up to `end` delete."""
    gone = [(at, commit) for at, commit in case.get("deleted", ()) if start < commit <= end]
    if not gone:
        return None
    rows = events.take(np.array([at for at, _ in gone]))
    return Events.of(rows.columns, np.array([commit for _, commit in gone], dtype=np.int64), STREAMS[case["stream"]])


def new_state(stream: Stream, cached: int | None = None) -> ShardState:
    """cached: how many bytes of pages stay in memory; None for the default."""
    cache = Cache() if cached is None else Cache(cached)
    return ShardState(RuleBook(stream, {stream.name: stream}), cache=cache)


def changes_after(case: dict[str, Any], commit: int) -> list[RuleChange]:
    changes = []
    for at, change in enumerate(case["changes"]):
        if change["after"] == commit:
            document = None if change["document"] is None else json.dumps(change["document"])
            row = (change["rule_id"], change["version"], change["status"], document)
            gate = APPROVAL if change.get("gate") else ""
            changes.append(RuleChange(change["change"], at, *row, **gate_columns(change), gate=gate))
    return changes


def copy_of(state: ShardState, store: DictStore, stream: Stream) -> tuple[ShardState, DictStore]:
    """The state as another worker would have it, read from a copy of the store; a new one where nothing is stored."""
    pages = DictStore()
    pages.pages = dict(store.pages)
    other = new_state(stream)
    other.load(pages)
    other.begin(pages)
    return other, pages


def late_of(rows: list[LateEvent]) -> list[tuple[Any, ...]]:
    """One row per late event, as the write step makes it: the strongest of what the shards did with it."""
    best: dict[tuple[str, int], tuple[Any, ...]] = {}
    strength = ["discarded", "recorded", "evaluated"].index
    for late in rows:
        slot = (late.event_id, late.arrival)
        if slot not in best or strength(late.action) > strength(best[slot][3]):
            best[slot] = (late.event_id, late.arrival, late.late_by_us, late.action)
    return sorted(best.values())


def failures_of(output: Output) -> dict[tuple[str, int], int]:
    counts: dict[tuple[str, int], int] = {}
    for failure in output.failures:
        slot = (failure.rule_id, failure.version)
        counts[slot] = counts.get(slot, 0) + failure.count
    return counts


def notes_of(rows: list[LogRow]) -> list[tuple[Any, ...]]:
    return sorted((row.action, row.rule_id, row.version, row.arrival) for row in rows)


def changes_of(alerts: list[Alert]) -> list[int]:
    """What each row means for its alert by the row before it (contract 11.6): it begins to stand, goes on, or ceases to."""
    standing: dict[str, bool] = {}
    changes = []
    for alert in alerts:
        stands = alert.verdict != "retracted"
        changes.append(stands - standing.get(alert.alert_id, False))
        standing[alert.alert_id] = stands
    return changes


def assert_engine_equals_oracle(case: dict[str, Any]) -> None:
    oracle, engine = run_oracle(case), run_engine(case)
    # Row by row in the same order, however the batches are cut and the keys divided.
    assert list(map(plain, engine.alerts)) == oracle.alerts
    assert [alert.change for alert in engine.alerts] == changes_of(engine.alerts)
    assert late_of(engine.late) == sorted(oracle.late)
    assert failures_of(engine) == oracle.failed
    assert notes_of(engine.notes) == sorted(oracle.notes)
    logged = [(row.rule_id, row.version, row.arrival or 0) for row in engine.log if row.action == "list"]
    commits = [change for change in case["changes"] if change["status"] == "lists"]
    judged = sorted({0, *(row["arrival"] for row in case["rows"])})
    assert logged == [
        ("*", each["document"]["commit"], max(commit for commit in judged if commit <= each["after"]))
        for each in commits
    ]
    rejected = [row for row in engine.log if row.action == "rejected"]
    assert [(row.rule_id, row.version) for row in rejected] == oracle.refused
    assert all(row.decision == REFUSAL for row in rejected)


def lists_in(change: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """What the lists have after a change, as a replay takes it; those that have nothing any more are empty."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ("l1", "l2", "it's. é")}
    for name, value, end in change["document"]["rows"]:
        found[name].append({"value": value, "expires_at": end})
    return found


def assert_replay_equals_oracle(case: dict[str, Any]) -> None:
    oracle = run_oracle(case)
    # Those that rule_log says took effect.
    obeyed = [change for change in case["changes"] if change.get("shown", "fits") == "fits"]
    rules = [(change, change["after"] or None) for change in obeyed if change["status"] != "lists"]
    lists = [(lists_in(change), change["after"] or None) for change in obeyed if change["status"] == "lists"]
    result = replay(rules, case["rows"], STREAMS[case["stream"]], lists)
    assert list(map(plain, result.alerts)) == oracle.alerts
    assert [alert.change for alert in result.alerts] == changes_of(result.alerts)
    assert late_of(result.late_events) == sorted(oracle.late)
    stream = STREAMS[case["stream"]]
    places = [late_sort_key(stream, row.arrival, row.event_time, row.event_id) for row in result.late_events]
    assert places == sorted(places)
    assert notes_of([row for row in result.errors if row.action != "failed"]) == sorted(oracle.notes)
    # In order of arrival, and the revisions of an alert one after another.
    assert [row.arrival for row in result.alerts] == sorted(row.arrival for row in result.alerts)
    revisions: dict[str, list[int]] = {}
    for row in result.alerts:
        revisions.setdefault(row.alert_id, []).append(row.revision)
    assert all(numbers == list(range(len(numbers))) for numbers in revisions.values())


@given(list_cases(with_deletes=True))
def test_c11_3_rules_that_ask_lists_equal_the_oracle(case: dict[str, Any]) -> None:
    """Lists change between commits; in `where`, FILTER, arguments and steps they count as they were when an event arrived."""
    assert_engine_equals_oracle(case)


@given(list_cases(with_deletes=False))
def test_c11_3_a_replay_with_lists_equals_the_oracle(case: dict[str, Any]) -> None:
    assert_replay_equals_oracle(case)


@given(cases(updates=True))
def test_c3_evaluator_equals_oracle_for_any_cut_and_shard_count(case: dict[str, Any]) -> None:
    assert_engine_equals_oracle(case)


@pytest.mark.long
@given(cases(updates=True, kinds=["event"]))
def test_c12_1_event_rules_equal_the_oracle(case: dict[str, Any]) -> None:
    assert_engine_equals_oracle(case)


def test_c12_1_event_rules_with_a_key_alert_in_every_shard() -> None:
    """Their events go to shards by their ids, so that those of one key are in several."""
    events = [{"id": f"e{at}", "at": at, "k": "x", "n": at, "arrival": at} for at in range(1, 13)]
    case = regression("a key", [{"group_by": ["k"], "when": "n >= 0"}], events) | {"shards": 3}
    assert len(run_engine(case).alerts) == 12
    assert_engine_equals_oracle(case)


@given(step_key_cases())
def test_c12_6_sequences_with_keys_of_their_steps_equal_the_oracle(case: dict[str, Any]) -> None:
    assert_engine_equals_oracle(case)


@given(cases(updates=False))
def test_c6_replay_equals_oracle(case: dict[str, Any]) -> None:
    assert_replay_equals_oracle(case)


@given(union_cases(updates=True))
def test_c12_8_the_evaluator_of_a_union_equals_the_oracle_for_any_cut_and_shard_count(case: dict[str, Any]) -> None:
    assert_engine_equals_oracle(case)


@given(union_cases(updates=False))
def test_c12_8_a_replay_of_a_union_equals_the_oracle(case: dict[str, Any]) -> None:
    assert_replay_equals_oracle(case)


@given(resolution_cases())
def test_c3_4_windows_with_a_resolution_equal_the_oracle(case: dict[str, Any]) -> None:
    assert_engine_equals_oracle(case)


@pytest.mark.long
@given(rising_cases())
def test_rules_with_rising_conditions_equal_the_oracle(case: dict[str, Any]) -> None:
    assert_engine_equals_oracle(case)


@given(linked_cases())
def test_sequences_with_a_linked_last_step_equal_the_oracle(case: dict[str, Any]) -> None:
    assert_engine_equals_oracle(case)


@pytest.mark.long
@pytest.mark.parametrize(
    ("second", "third"),
    [
        # Known of the step before is its first event alone, whatever it took.
        ({"where": "n = element_at(s0.n, 1)"}, {"where": "s1.count >= 2 and n > 1"}),
        ({"where": "n = element_at(s0.n, 1)"}, {"where": "array_contains(s1.c, c) and n > element_at(s1.n, 1)"}),
        ({"where": "n <> element_at(s0.n, 1)"}, {"where": "n = element_at(s1.n, 1) and c = element_at(s0.c, -1)"}),
        ({"where": "n > element_at(s0.n, 1)"}, {"where": "c <> element_at(s1.c, 1)", "at_least": 2}),
        # The last event of the step before and its number change from event to event.
        ({"where": "n = element_at(s0.n, -1) and c > 1"}, {"where": "c <> element_at(s0.c, 1)"}),
        ({"where": "n = s0.count and c > 1"}, {"where": "c = 1 and n <> element_at(s0.n, 1)"}),
        # Too few events or too many, before the first of the next step.
        ({"where": "n = element_at(s0.n, 1)", "at_most": 1}, {"where": "c = 2"}),
        ({"where": "n >= element_at(s0.n, 1)", "at_least": 2, "at_most": 3}, {"where": "c = 2 and n > 1"}),
        ({"where": "n <> element_at(s0.n, 1)", "at_most": 2}, {"where": "c = element_at(s0.c, 1)"}),
        ({"where": "c = element_at(s0.c, 1)", "at_least": 2}, {"where": "10 / n > element_at(s0.n, 1)", "at_most": 2}),
    ],
)
@pytest.mark.parametrize(
    "more", [[], [{"where": "n <> element_at(s2.n, 1) and c = 2"}], [{"where": "n > 0", "at_most": 2}]]
)
def test_sequences_with_linked_steps_in_between_equal_the_oracle(
    second: dict[str, Any], third: dict[str, Any], more: list[dict[str, Any]]
) -> None:
    """Events of one key in order, of which a window sees some twelve."""
    steps = [{"name": f"s{at}", **step} for at, step in enumerate([{"where": "c < 3"}, second, third, *more])]
    document = {
        "group_by": ["k"],
        "message": "{s0.count} {s1.count} {s1.n}",
        "sequence": {"within": "12 microseconds", "steps": steps},
    }
    for seed in range(6):
        random = Random(seed)
        events = [
            {
                "id": str(at),
                "at": at,
                "arrival": 1 + at // 20,
                "n": random.randrange(4),
                "c": random.choice([1, 2, 2, 3, None]),
            }
            for at in range(40)
        ]
        assert_engine_equals_oracle(regression("", [document], events) | {"small_pages": seed % 2 > 0})


def regression(
    name: str,
    documents: list[dict[str, Any]],
    events: list[dict[str, Any]],
    stream: str = "plain",
    more: tuple[dict[str, Any], ...] = (),
    cuts: tuple[int, ...] = (),
) -> dict[str, Any]:
    """A case as `cases` makes them. documents: of rules that are there from the start; more: later changes."""
    plain_values = {"c": 1, "k": "x", "a": "0.00", "n": 0, "d": 0.0}
    changes = [
        {"after": 0, "change": "insert", "rule_id": f"r{at}", "version": 1, "status": "active",
         "document": {"rule_id": f"r{at}", "stream": "tx", **document}}
        for at, document in enumerate(documents, 1)
    ]  # fmt: skip
    rows = [plain_values | event for event in events]
    return {
        "name": name, "stream": stream, "rows": rows, "changes": [*changes, *more], "cuts": list(cuts), "shards": 1,
        "reload": bool(cuts),
    }  # fmt: skip


# Cases in which engine and oracle once differed. What a failing test prints can be kept here as it is, with a name.
REGRESSIONS: list[dict[str, Any]] = [
    regression(
        "rows of one event come by rule_id, whatever the rules still know of earlier events",
        [
            {"group_by": ["k"], "window": "2 microseconds", "measures": {"m0": "count(*)"}, "when": "true", "late": "revise"},
            {"group_by": ["k"], "window": "2 microseconds", "measures": {"m0": "count(*)"}, "when": "true"},
        ],
        [{"id": "a", "at": 1, "arrival": 1}, {"id": "b", "at": 3, "arrival": 2}, {"id": "c", "at": 2, "arrival": 3}],
        cuts=(2,),
    ),
    regression(
        "two rules over the same tumbling windows",
        [{"group_by": ["k"], "window": {"tumbling": "1 microsecond"}, "measures": {"m0": "count(*)"}}] * 2,
        [{"id": "a", "at": 13, "arrival": 8}],
        more=({"after": 9, "change": "insert", "rule_id": "*", "version": None, "status": "advance", "document": {"time": 35}},),
    ),
    regression(
        "a session merged away is retracted as it was last written",
        [{"window": {"session": "4 microseconds"}, "measures": {"m0": "avg(a)"}, "early": True}],
        [{"id": "a", "at": 41, "arrival": 14}, {"id": "b", "at": 37, "arrival": 14}, {"id": "c", "at": 36, "arrival": 20}],
        stream="narrow",
    ),
    regression(
        "an absence is as complete as its match was, however the batches are cut",
        [{"sequence": {"within": "1 microsecond", "steps": [
            {"name": "s0", "where": "c = 1", "at_most": 2}, {"name": "silent", "absent": "a > 1", "within": "12 microseconds"},
        ]}}],
        [{"id": "a", "at": -8, "arrival": 2}, {"id": "b", "at": 7, "arrival": 8}, {"id": "c", "at": 9, "arrival": 10}],
        cuts=(8,),
    ),
    regression(
        "a wait of a late event that is over when it begins",
        [{"sequence": {"within": "5 microseconds", "steps": [
            {"name": "s0", "where": "n = 0"}, {"name": "silent", "absent": "n = 1", "within": "2 microseconds"},
        ]}}],
        [
            {"id": "a", "at": 10, "arrival": 1, "n": 2}, {"id": "b", "at": 4, "arrival": 2}, {"id": "c", "at": 6, "arrival": 2, "n": 1},
            {"id": "d", "at": 6, "arrival": 3, "n": 1},
        ],
    ),
    regression(
        "a key that is due at the watermark 0",
        [{"group_by": ["k"], "sequence": {"within": "8 microseconds", "steps": [
            {"name": "s0", "where": "n = 0"}, {"name": "silent", "absent": "n = 1", "within": "2 microseconds"},
        ]}}],
        [{"id": "a", "at": -3, "arrival": 1}, {"id": "b", "at": 20, "arrival": 2, "k": "y", "n": 2}],
        cuts=(1,),
    ),
    regression(
        "a condition over arrays that errs is a failure only where the event is judged",
        [{"effective_from": 10, "sequence": {"within": "6 microseconds", "steps": [
            {"name": "s0", "where": "c = 1", "at_least": 2}, {"name": "s1", "where": "10 / element_at(s0.n, -1) > n"},
            {"name": "silent", "absent": "s1.count >= 2", "within": "1 microsecond"},
        ]}}],
        [{"id": "a", "at": -4, "arrival": 4}, {"id": "b", "at": -3, "arrival": 4}, {"id": "c", "at": -3, "arrival": 7}],
    ),
    regression(
        "what is in force under a gate, with its keys in another order",
        [{"group_by": ["k"], "window": "2 microseconds", "measures": {"m0": "count(*)"}, "when": "true"}],
        [{"id": "a", "at": 1, "arrival": 1}, {"id": "b", "at": 3, "arrival": 2}],
        more=({
            "after": 1, "change": "update", "rule_id": "r1", "version": 1, "status": "active", "gate": True, "shown": "nobody",
            "document": {
                "when": "true", "measures": {"m0": "count(*)"}, "window": "2 microseconds", "group_by": ["k"], "stream": "tx",
                "rule_id": "r1",
            },
        },),
    ),
    regression(
        "a quarantined version no longer keeps what it shared with a narrower window",
        [
            {"group_by": ["k"], "window": f"{width} microseconds", "measures": {"m0": "count(*)"}, "when": "not window_complete",
             "allowed_lateness": "2 microseconds"}
            for width in (4, 1)
        ],
        [{"id": "a", "at": -4, "arrival": 5}, {"id": "b", "at": -9, "arrival": 11}],
        stream="tight",
        more=tuple(
            {"after": after, "change": "insert", "rule_id": "r1", "version": version, "status": status,
             "evidence": '{"quarantined": 1}', "document": {
                 "rule_id": "r1", "stream": "tx", "group_by": ["k"], "window": "4 microseconds", "measures": {"m0": "count(*)"},
                 "when": "not window_complete", "allowed_lateness": "2 microseconds",
             }}
            for after, version, status in ((4, 2, "quarantined"), (7, 3, "shadow"))
        ),
    ),
    regression(
        "a call of in_list with an error keeps an event from a step, whatever the steps before took",
        [{"group_by": [], "sequence": {"within": "8 microseconds", "steps": [
            {"name": "s0", "where": "n <= 1"},
            {"name": "s1", "where": "in_list(10 div n, 'l2') or element_at(s0.n, 1) <= n", "at_least": 2, "at_most": 2},
            {"name": "s2", "where": "(k <> 'q') or element_at(s1.n, 1) <= n"},
        ]}}],
        [
            {"id": "a", "at": 42, "arrival": 32, "n": 0}, {"id": "b", "at": 42, "arrival": 32, "n": 0},
            {"id": "c", "at": 45, "arrival": 35, "n": 2**31 - 1}, {"id": "d", "at": 45, "arrival": 38, "n": 2**31 - 1},
        ],
        stream="narrow",
    ),
    regression(
        "an event rule shows the keys of its events on whatever shard their ids are",
        [{"group_by": ["k"], "when": "n >= 0", "message": "{k}"}, {"group_by": [{"p": "upper(k)"}], "when": "p <> 'Q'", "message": "{p}"}],
        [{"id": name, "at": at, "arrival": 1 + at // 4, "k": name} for at, name in enumerate("qwertyuiopas")],
    ) | {"shards": 3},
    regression(
        "what a linked step took is forgotten while a step after it is searched",
        [{"group_by": ["k"], "sequence": {"within": "5 microseconds", "steps": [
            {"name": "s0", "where": "true", "at_most": 2},
            {"name": "s1", "where": "array_contains(s0.c, c)"},
            {"name": "s2", "where": "at > element_at(s1.at, 1) and s1.count < 4", "at_most": 1},
            {"name": "s3", "where": "at > element_at(s2.at, 1) and s2.count < 4", "at_most": 1},
        ]}}],
        [{"id": str(at), "at": at, "arrival": 1} for at in range(27)],
    ) | {"small_pages": True},
]  # fmt: skip


@pytest.mark.parametrize("case", REGRESSIONS, ids=lambda case: case["name"])
def test_cases_that_once_differed(case: dict[str, Any]) -> None:
    assert_engine_equals_oracle(case)
    if all(change["change"] == "insert" for change in case["changes"]):
        assert_replay_equals_oracle(case)


_WINDOWED = {"measures": {"m0": "count(*)"}}
_NO_SOON = [{"name": "s0", "where": "n = 0"}, {"name": "silent", "absent": "n = 1", "within": "3 microseconds"}]
# A rule of every kind, with whatever it keeps of a key beside the rows of its windows.
EVERY_KIND: dict[str, dict[str, Any]] = {
    "lookback": {"window": "5 microseconds", **_WINDOWED, "when": "m0 > 1"},
    "revise": {"window": "5 microseconds", **_WINDOWED, "when": "m0 > 1", "late": "revise"},
    "reset": {"window": "5 microseconds", **_WINDOWED, "when": "m0 > 1", "reset_on_alert": True},
    "suppress": {"window": "5 microseconds", **_WINDOWED, "when": "m0 > 0", "suppress": "9 microseconds"},
    "tumbling": {"window": {"tumbling": "4 microseconds"}, **_WINDOWED},
    "sliding": {"window": {"sliding": "6 microseconds", "slide": "2 microseconds"}, **_WINDOWED},
    "early": {"window": {"tumbling": "4 microseconds"}, **_WINDOWED, "early": True},
    "session": {"window": {"session": "2 microseconds"}, **_WINDOWED},
    "early session": {"window": {"session": "2 microseconds"}, **_WINDOWED, "early": True},
    "sequence": {"sequence": {"within": "9 microseconds", "steps": [
        {"name": "s0", "where": "n = 0"}, {"name": "s1", "where": "n = 1"},
    ]}},
    "fixed": {"sequence": {"within": "9 microseconds", "expiry": "fixed", "steps": [
        {"name": "s0", "where": "n = 0"}, {"name": "s1", "where": "n = 1"},
    ]}},
    "absence": {"sequence": {"within": "9 microseconds", "steps": _NO_SOON}},
}  # fmt: skip
SOME_KINDS = ("revise", "suppress", "early session", "absence")
OTHER_KINDS = [kind for kind in EVERY_KIND if kind not in SOME_KINDS]


@pytest.mark.parametrize("first", [*SOME_KINDS, *(pytest.param(kind, marks=pytest.mark.long) for kind in OTHER_KINDS)])
def test_c4_a_version_reads_nothing_that_another_kind_left(first: str) -> None:
    """From a rule of one kind to one of each other kind, and back after it was retired."""
    events = [
        {"id": f"e{at:02}", "at": at - 5 * (at % 5 == 4), "n": int(at % 3 == 2), "arrival": 1 + at // 2}
        for at in range(36)
    ]
    case = regression(first, [{"group_by": ["k"], **EVERY_KIND[first]} for _ in EVERY_KIND], events, cuts=(5, 11, 14))
    case["small_pages"] = True
    for row, later in zip(list(case["changes"]), EVERY_KIND, strict=True):
        document = {**EVERY_KIND[later], **{name: row["document"][name] for name in ("rule_id", "stream", "group_by")}}
        case["changes"] += [
            {**row, "after": 7, "version": 2, "document": document},
            {**row, "after": 12, "version": 3, "status": "retired"},
            {**row, "after": 14, "version": 4},
        ]
    case["changes"].sort(key=lambda change: change["after"])
    assert_engine_equals_oracle(case)


def test_c4_an_advance_before_the_first_commit_knows_the_version_that_came_just_before_it() -> None:
    """The second version keeps rows for longer, so all windows of its events are complete."""
    rule = {"group_by": ["c"], "measures": {"m0": "count(*)"}, "when": "true"}
    events = [{"id": f"e{at}", "at": 10 * at, "c": 1, "n": 1, "arrival": at + 1} for at in range(1, 4)]
    case = regression("widened, then advanced", [{**rule, "window": "5 microseconds"}], events)
    document = {"rule_id": "r1", "stream": "tx", **rule, "window": "25 microseconds"}
    case["changes"] += [
        {"after": 1, "change": "insert", "rule_id": "r1", "version": 2, "status": "active", "document": document},
        {"after": 1, "change": "insert", "rule_id": "*", "version": None, "status": "advance", "document": {"time": 5}},
    ]
    assert_engine_equals_oracle(case)
    assert [alert.window_complete for alert in run_engine(case).alerts] == [True, True, True]


def test_c4_an_alert_of_a_version_with_another_key_suppresses_nothing() -> None:
    """Customer 1 as payer is not customer 1 as payee: `suppress` is about the rule and its key."""
    rule = {"window": "5 microseconds", "measures": {"m0": "count(*)"}, "when": "true", "suppress": "1 hour"}
    events = [{"id": f"e{at}", "at": at, "c": 1, "n": 1, "arrival": at} for at in range(1, 5)]
    case = regression("payer, payee", [{"group_by": ["c"], **rule}], events, cuts=(1, 3))
    document = {"rule_id": "r1", "stream": "tx", "group_by": ["n"], **rule}
    case["changes"].append(
        {"after": 2, "change": "insert", "rule_id": "r1", "version": 2, "status": "active", "document": document}
    )
    assert_engine_equals_oracle(case)
    found = [(alert.event_id, alert.verdict) for alert in run_engine(case).alerts]
    assert found == [("e1", "raised"), ("e2", "suppressed"), ("e3", "raised"), ("e4", "suppressed")]


@pytest.mark.parametrize(("first", "then"), [("2", "99"), ("99", "2")])
def test_c4_a_new_span_of_suppress_holds_for_alerts_raised_before_it(first: str, then: str) -> None:
    rule = {"window": "5 microseconds", "measures": {"m0": "count(*)"}, "when": "true", "group_by": ["k"]}
    events = [{"id": f"e{at}", "at": at, "k": "x", "arrival": at} for at in range(1, 61)]
    case = regression("spans", [{**rule, "suppress": f"{first} microseconds"}], events, cuts=(1, 2, 4, 5, 20, 40, 50))
    document = {"rule_id": "r1", "stream": "tx", **rule, "suppress": f"{then} microseconds"}
    change = {"change": "insert", "rule_id": "r1", "version": 2, "status": "active", "document": document}
    case["changes"].append({"after": 2, **change})
    assert_engine_equals_oracle(case)
    assert_engine_equals_oracle({**case, "small_pages": True})
    raised = [alert.event_id for alert in run_engine(case).alerts if alert.verdict == "raised"]
    assert raised == (["e1"] if then == "99" else [f"e{at}" for at in range(1, 61, 3)])


def test_c4_an_updated_session_takes_back_what_it_wrote_of_other_measures() -> None:
    """An UPDATE of the row in force keeps the version, and so the identity of its alerts."""
    session = {"group_by": ["k"], "window": {"session": "2 microseconds"}, "early": True}
    events = [{"id": f"e{at}", "at": time, "arrival": at} for at, time in enumerate((10, 14, 12), 1)]
    case = regression("measures", [{**session, "measures": {"m0": "count(*)", "m1": "max(a)"}}], events, cuts=(1,))
    document = {"rule_id": "r1", "stream": "tx", **session, "measures": {"m0": "avg(n)"}}
    case["changes"].append({**case["changes"][0], "after": 2, "change": "update", "document": document})
    found = run_engine(case)
    assert not found.failures
    assert [(alert.revision, alert.verdict) for alert in found.alerts if alert.window_start.microsecond == 14] == [
        (0, "raised"), (1, "retracted"),
    ]  # fmt: skip
    assert_engine_equals_oracle(case)

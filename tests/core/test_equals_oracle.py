"""The evaluator against the oracle, on generated rules, events, rule changes, cuts and shard counts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lookback.core.alerts import Alert
from lookback.core.arrival import marks_of
from lookback.core.columns import text_of
from lookback.core.evaluation import Batch, Evaluator, Output
from lookback.core.events import Events, read_events
from lookback.core.rulebook import RuleBook, RuleChange
from lookback.core.state import ShardState
from lookback.core.streams import Stream
from lookback.harness import replay

sys.path.insert(0, str(Path(__file__).parents[1]))
from oracle import Oracle, OracleEvent

STREAM = Stream.from_dict(
    {
        "stream": "tx",
        "event_id": "id",
        "event_time": "at",
        "fields": {"id": "string", "at": "timestamp", "c": "int", "k": "string", "a": "decimal(18,2)", "n": "int"},
        "max_out_of_orderness": "3 microseconds",
        "allowed_lateness": "6 microseconds",
    }
)
AGGREGATES = [
    "count(*)",
    "count(a)",
    "sum(a)",
    "sum(n)",
    "avg(a)",
    "avg(n)",
    "min(a)",
    "max(k)",
    "max(n)",
    "stddev_samp(a)",
]
FILTERS = ["", " filter (where a > 1)", " filter (where 10 / n > 2)"]
WHERES = [None, None, "n > 0", "k <> 'x'", "10 / n > 1", "a is not null"]
WHENS = ["m0 >= {limit}", "m0 is null", "m0 >= {limit} or window_complete", "m0 * n > {limit}", "{limit} / m0 > 1"]


class DictStore:
    """Pages in a dict, as the state store keeps them."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}

    def get(self, name: str) -> bytes | None:
        return self.pages.get(name)

    def put(self, name: str, page: bytes) -> None:
        self.pages[name] = page

    def remove(self, name: str) -> None:
        del self.pages[name]


@st.composite
def rule_documents(draw: st.DrawFn, rule_id: str) -> dict[str, Any]:
    measures: dict[str, Any] = {}
    for at in range(draw(st.integers(1, 3))):
        text = draw(st.sampled_from(AGGREGATES)) + draw(st.sampled_from(FILTERS))
        if at == 0 and "max(k)" in text:
            text = "count(k)"
        own = draw(st.none() | st.integers(1, 12))
        measures[f"m{at}"] = text if own is None else {"measure": text, "window": f"{own} microseconds"}
    window: Any = f"{draw(st.integers(1, 12))} microseconds"
    if draw(st.booleans()):
        window = {"lookback": window, "delay": f"{draw(st.integers(0, 5))} microseconds"}
    document = {
        "rule_id": rule_id,
        "stream": "tx",
        "group_by": draw(st.lists(st.sampled_from(["c", "k"]), unique=True, max_size=2)),
        "window": window,
        "measures": measures,
        "when": draw(st.sampled_from(WHENS)).format(limit=draw(st.integers(0, 4))),
        "late": draw(st.sampled_from(["evaluate", "record"])),
    }
    optional = {
        "where": draw(st.sampled_from(WHERES)),
        "allowed_lateness": draw(st.sampled_from([None, None, "0 seconds", "2 microseconds"])),
        "suppress": draw(st.sampled_from([None, None, "4 microseconds"])),
        "effective_from": draw(st.sampled_from([None, None, None, 10])),
    }
    return document | {key: value for key, value in optional.items() if value is not None}


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    count = draw(st.integers(1, 40))
    time, commit, rows = draw(st.integers(-20, 20)), 1, []
    for at in range(count):
        time += draw(st.sampled_from([0, 0, 1, 1, 2, 5]))
        commit += draw(st.sampled_from([0, 0, 1, 1, 3]))
        row = {
            "id": f"{draw(st.sampled_from(['é', 'a', 'Z', '']))}{at}",
            "at": time - draw(st.sampled_from([0, 0, 0, 1, 3, 8, 20])),
            "c": draw(st.sampled_from([None, 0, 1, 1, 2])),
            "k": draw(st.sampled_from(["x", "y", "y", None])),
            "a": draw(st.sampled_from([None, "0.00", "1.01", "2.50", "-7.25", "9999999999999999.99"])),
            "n": draw(st.sampled_from([None, 0, 1, 3, -2, 2**31 - 1])),
            "arrival": commit,
        }
        rows.append(row)
    changes = []
    versions: dict[str, int] = {}
    for _ in range(draw(st.integers(1, 5))):
        rule_id = draw(st.sampled_from(["r1", "r2", "r3"]))
        versions[rule_id] = versions.get(rule_id, 0) + 1
        status = draw(st.sampled_from(["active", "active", "active", "shadow", "paused", "retired"]))
        after = 0 if not changes else draw(st.integers(0, commit))
        changes.append((after, versions[rule_id], status, draw(rule_documents(rule_id))))
    changes.sort(key=lambda change: change[0])
    ordered = {}
    for at, (after, _, status, document) in enumerate(changes):
        ordered[document["rule_id"]] = ordered.get(document["rule_id"], 0) + 1
        changes[at] = (after, ordered[document["rule_id"]], status, document)
    return {
        "rows": rows,
        "changes": changes,
        "cuts": draw(st.sets(st.integers(1, commit), max_size=6)),
        "shards": draw(st.integers(1, 3)),
        "reload": draw(st.booleans()),
    }


def plain(alert: Alert) -> tuple[Any, ...]:
    measures = tuple(sorted((name, text_of(value)) for name, value in alert.measures.items()))
    return (
        alert.alert_id, alert.rule_id, alert.rule_version, alert.mode, alert.verdict, alert.event_id,
        alert.event_time, measures, alert.window_complete, alert.arrival,
    )  # fmt: skip


def run_oracle(case: dict[str, Any], events: Events) -> Oracle:
    oracle = Oracle(STREAM)
    listed = [
        OracleEvent(
            {
                name: None if c.null is not None and c.null[at] else as_stored(c, at)
                for name, c in events.columns.items()
            },
            int(events.commits[at]),
            int(events.times[at]),
            events.columns["id"].values[at].encode(),
        )
        for at in range(len(events))
    ]
    edges = sorted({after for after, *_ in case["changes"]})
    for start, end in zip(edges, [*edges[1:], 10**9], strict=True):
        for after, version, status, document in case["changes"]:
            if after == start:
                oracle.change(document, version, status)
        oracle.run([event for event in listed if start < event.commit <= end])
    return oracle


def as_stored(column: Any, at: int) -> Any:
    value = column.values[at]
    return value.item() if hasattr(value, "item") else value


def run_engine(case: dict[str, Any], events: Events) -> Output:
    """The evaluator as the stream runs it: shards, micro-batches, state written and read back."""
    total = Output()
    marks = marks_of(events, events.commits)
    edges = sorted({0, *(after for after, *_ in case["changes"]), *case["cuts"]})
    for shard in range(case["shards"]):
        evaluator = Evaluator(STREAM, shard, case["shards"])
        state, store = ShardState(RuleBook(STREAM, {"tx": STREAM})), DictStore()
        for number, (start, end) in enumerate(zip(edges, [*edges[1:], 10**9], strict=True)):
            if case["reload"] and number:
                known = state if number % 2 else None
                state = ShardState(RuleBook(STREAM, {"tx": STREAM}))
                assert state.load(store, known)
            twin = copy_of(state, store) if case["reload"] else None
            state.begin(store)
            here = events.take((events.commits > start) & (events.commits <= end))
            changes = [
                RuleChange("insert", at, d["rule_id"], version, status, json.dumps(d))
                for at, (after, version, status, d) in enumerate(case["changes"])
                if after == start
            ]
            part = {commit: high for commit, high in marks.items() if start < commit <= end}
            output = evaluator.process(state, Batch(here, marks=part, changes=changes))
            if number % 2:
                state.drop_old()
            state.save()
            if twin is not None:
                # A repetition of the batch leaves the very pages that its first attempt left.
                repeated, pages = twin
                evaluator.process(repeated, Batch(here, marks=part, changes=changes))
                if number % 2:
                    repeated.drop_old()
                repeated.save()
                assert pages.pages == store.pages
            total.alerts += output.alerts
            total.late += output.late
            total.failures += output.failures
            if shard == 0:
                total.log += output.log
    return total


def copy_of(state: ShardState, store: DictStore) -> tuple[ShardState, DictStore]:
    """The state as another worker would have it, read from a copy of the store; a new one where nothing is stored."""
    pages = DictStore()
    pages.pages = dict(store.pages)
    other = ShardState(RuleBook(STREAM, {"tx": STREAM}))
    other.load(pages)
    other.begin(pages)
    return other, pages


def late_of(output: Output) -> list[tuple[Any, ...]]:
    """One row per late event, as the write step makes it: the strongest of what the shards did with it."""
    best: dict[tuple[str, int], tuple[Any, ...]] = {}
    strength = ["discarded", "recorded", "evaluated"].index
    for late in output.late:
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


@given(cases())
def test_c3_evaluator_equals_oracle_for_any_cut_and_shard_count(case: dict[str, Any]) -> None:
    events, _ = read_events(case["rows"], STREAM, 1)
    oracle = run_oracle(case, events)
    engine = run_engine(case, events)
    assert sorted(map(plain, engine.alerts), key=repr) == sorted(oracle.alerts, key=repr)
    assert late_of(engine) == sorted(oracle.late)
    assert failures_of(engine) == oracle.failed
    assert not [row for row in engine.log if row.action == "rejected"]


@given(cases())
def test_c6_replay_equals_oracle(case: dict[str, Any]) -> None:
    events, _ = read_events(case["rows"], STREAM, 1)
    oracle = run_oracle(case, events)
    rules = [
        ({"rule_id": d["rule_id"], "version": version, "status": status, "document": d}, after or None)
        for after, version, status, d in case["changes"]
    ]
    result = replay(rules, case["rows"], STREAM)
    assert sorted(map(plain, result.alerts), key=repr) == sorted(oracle.alerts, key=repr)

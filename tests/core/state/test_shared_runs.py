"""C 3, C 8: features of one grouping share their rows: keys and times are kept once, and no rows of what is gone remain."""

from __future__ import annotations

import json
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_equals_oracle import DictStore

from lookback.core.aggregation import runs as runs_module
from lookback.core.aggregation.aggregates import AGGREGATES
from lookback.core.aggregation.distinct import DistinctCounter
from lookback.core.aggregation.grouping import Grouping, Queries, Spans
from lookback.core.aggregation.runs import Run
from lookback.core.aggregation.sharedruns import (
    FeatureColumn,
    Kept,
    Place,
    SharedRun,
    make_shared_run,
    merge_shared_runs,
)
from lookback.core.engine.batch import Batch
from lookback.core.engine.evaluation import Evaluator
from lookback.core.errors import StateError
from lookback.core.judging import measuring as measuring_module
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.rulebook import RuleBook
from lookback.core.state import storedruns
from lookback.core.state.shard import ShardState
from lookback.core.streams.arrival import find_marks
from lookback.core.streams.declaration import Stream
from lookback.core.streams.eventrows import read_events
from lookback.core.values.cache import estimate_bytes
from lookback.core.values.keys import Keys, number_keys, order_by_group
from lookback.core.values.pages import decode_page, encode_page

TX = Stream.from_dict(
    {
        "stream": "tx", "event_id": "id", "event_time": "at", "max_out_of_orderness": "0 seconds", "allowed_lateness": "0 seconds",
        "fields": {"id": "string", "at": "timestamp", "k": "string", "n": "int", "name": "string"},
    }
)  # fmt: skip
SIX = ("sum(n)", "avg(n)", "min(n)", "max(n)", "stddev_samp(n)", "count(n)")


class Shard:
    """A shard whose state is read anew before each batch."""

    def __init__(self) -> None:
        self.store, self.alerts, self._version = DictStore(), list[Any](), 0
        self.state = ShardState(RuleBook(TX, {"tx": TX}))

    def judge(
        self, rows: list[dict[str, Any]], *rules: dict[str, Any], gone: list[dict[str, Any]] | None = None
    ) -> None:
        """Judges rows after rules were changed; all of a batch are one commit."""
        self._version += 1
        if self._version > 1:
            self.state = ShardState(RuleBook(TX, {"tx": TX}))
            assert self.state.load(self.store)
        changes = []
        for at, rule in enumerate(rules):
            document = {"rule_id": f"r{at}", "stream": "tx", "group_by": ["k"], "when": "true", **rule}
            rule_id, text = str(document["rule_id"]), json.dumps(document)
            changes.append(RuleChange("insert", self._version, rule_id, self._version, "active", text))
        events, _ = read_events([{**row, "arrival": self._version} for row in rows], TX, self._version)
        deleted = None
        if gone:
            deleted, _ = read_events([{**row, "arrival": self._version} for row in gone], TX, self._version)
        self.state.begin(self.store)
        marks = {self._version: None, **find_marks(events, events.commits)}
        output = Evaluator(TX).process(self.state, Batch(events, deleted, marks, changes))
        assert not output.failures
        self.alerts += output.alerts
        self.state.drop_old()
        self.state.save()

    def stored_rows(self) -> list[int]:
        return [stored.rows for stored in self.state.windows.list_runs()]

    def stored_texts(self) -> set[str]:
        """The texts in the values of all runs."""
        pages = (decode_page(self.store.get(stored.run_id) or b"", "") for stored in self.state.windows.list_runs())
        arrays = (array for page in pages for array in page if array is not None and array.dtype == object)
        return {value for array in arrays for value in array.tolist() if value}


def row(at: int, n: int = 1, k: str = "x", name: str = "") -> dict[str, Any]:
    return {"id": f"e{at}", "at": at, "k": k, "n": n, "name": name or f"name {at}"}


def test_c8_six_aggregates_of_one_field_take_the_state_of_one() -> None:
    sizes = []
    for texts in (SIX[:1], SIX):
        shard = Shard()
        measures = {f"m{at}": text for at, text in enumerate(texts)}
        shard.judge(
            [row(at, at * 7919 % 1000, f"k{at % 50}") for at in range(4_000)],
            {"window": "1 hour", "measures": measures, "when": "m0 < 0"},
        )
        sizes.append(sum(len(shard.store.get(stored.run_id) or b"") for stored in shard.state.windows.list_runs()))
    assert sizes[1] <= 1.02 * sizes[0]
    # A row is an event in one feature, wherever it lies.
    assert shard.state.state_rows() == 6 * 4_000 == shard.state.estimate_counts().rows


def test_c8_rules_that_count_other_events_share_keys_and_times() -> None:
    sizes = []
    for count in (1, 40):
        shard = Shard()
        rules = [
            {
                "rule_id": f"r{at}",
                "window": "1 hour",
                "where": f"n <> {at}",
                "measures": {"m": "sum(n)"},
                "when": "m < 0",
            }
            for at in range(count)
        ]
        shard.judge([row(at, at * 7919 % 200, f"k{at % 50}") for at in range(4_000)], *rules)
        assert len(shard.stored_rows()) == 1
        sizes.append(sum(len(shard.store.get(stored.run_id) or b"") for stored in shard.state.windows.list_runs()))
    assert sizes[1] < 2 * sizes[0]


@pytest.mark.parametrize(("count", "apart"), [(1, 0), (40, 0), (40, 3)])
def test_rules_over_the_same_windows_find_their_rows_once(
    count: int, apart: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"batch": 0, "runs": 0}

    def counting(owner: type, name: str, what: str) -> None:
        method = getattr(owner, name)

        def counted(*given: Any) -> Any:
            found[what] += 1
            return method(*given)

        monkeypatch.setattr(owner, name, counted)

    counting(Grouping, "_compute_spans", "batch")
    counting(FeatureColumn, "find_windows", "runs")
    # Most events are of each rule; or, of the last `apart`, few.
    wheres = [f"n <> {at}" if at < count - apart else f"n = {at}" for at in range(count)]
    texts = ("sum(n)", "max(n)", "count(*)")
    rules = [
        {"rule_id": f"r{at}", "window": "1 hour", "where": where, "measures": {"m": texts[at % 3]}, "when": "m < 0"}
        for at, where in enumerate(wheres)
    ]
    shard = Shard()
    shard.judge([row(at, at % 50) for at in range(100)], *rules)
    shard.judge([row(100 + at, at % 50) for at in range(100)])
    assert found == {"batch": 2 + 2 * apart, "runs": 1 + apart}


def test_the_memory_of_a_run_is_estimated_anew_only_where_there_is_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rule asks for it, also in a batch of few events."""
    estimated: list[int] = []

    def note(content: Any) -> int:
        estimated.append(estimate_bytes(content))
        return estimated[-1]

    monkeypatch.setattr(runs_module, "estimate_bytes", note)
    at = np.arange(4, dtype=np.int64)
    run = Run(Keys(at, np.zeros_like(at)), np.arange(5, dtype=np.int64), at, None)
    assert [run.memory_bytes for _ in range(3)] == 3 * [4 * 8 * 3 + 5 * 8]
    run.find_rows(at[:1], at[1:2], at[1:2])
    # What finds times has one number for each row.
    assert [run.memory_bytes for _ in range(3)] == 3 * [4 * 8 * 4 + 5 * 8]
    assert len(estimated) == 2


def test_what_measures_one_grouping_is_gone_when_the_next_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[DistinctCounter] = weakref.WeakSet()
    others: list[int] = []

    class Noted(DistinctCounter):
        def __init__(self, *given: Any) -> None:
            others.append(len(alive))
            super().__init__(*given)
            alive.add(self)

    monkeypatch.setattr(measuring_module, "DistinctCounter", Noted)
    measures = {"m": "count(distinct name)", "s": "sum(n)"}
    rules = [
        {"rule_id": f"r{at}", "group_by": [field], "window": "1 hour", "measures": measures}
        for at, field in enumerate(("k", "n", "id"))
    ]
    shard = Shard()
    shard.judge([row(at, at % 7, f"k{at % 3}") for at in range(50)], *rules)
    assert others == [0, 0, 0]
    assert len(shard.alerts) == 150


def test_what_measures_one_window_is_gone_when_the_next_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[DistinctCounter | Queries] = weakref.WeakSet()
    others: list[int] = []
    compute_spans = Grouping._compute_spans

    class Noted(DistinctCounter):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            alive.add(self)

    def note(grouping: Grouping, queries: Queries) -> Spans:
        others.append(len(alive))
        alive.add(queries)
        return compute_spans(grouping, queries)

    monkeypatch.setattr(measuring_module, "DistinctCounter", Noted)
    monkeypatch.setattr(Grouping, "_compute_spans", note)
    rules = [
        {"rule_id": f"r{hours}{at}", "window": f"{hours} hours", "measures": {"m": measure}, "when": "m < 0"}
        for hours in (1, 2, 3)
        for at, measure in enumerate(("count(distinct name)", "sum(n)", "max(n)"))
    ]
    Shard().judge([row(at, at % 7, f"k{at % 3}") for at in range(50)], *rules)
    assert others == [0, 0, 0]


@pytest.mark.parametrize("size", [1, 4])
def test_c3_a_row_is_kept_for_as_long_as_a_feature_needs_it(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Runs of any size are merged, or none.
    monkeypatch.setattr(storedruns, "_RUNS_PER_CLASS", 2 if size == 1 else 1_000)
    shard = Shard()
    short = {"rule_id": "short", "window": "10 microseconds", "measures": {"m": "count(*)"}}
    long = {"rule_id": "long", "window": "100 microseconds", "measures": {"m": "sum(n)"}, "where": "n > 10"}
    for batch in range(60):
        rows = [row(batch * 4 + at, 11 if (batch * 4 + at) % 20 == 0 else 1) for at in range(4)]
        shard.judge(rows, *([short, long] if batch == 0 else []))
    by_rule = {
        rule_id: [each.measures["m"] for each in shard.alerts if each.rule_id == rule_id]
        for rule_id in ("short", "long")
    }
    assert by_rule["short"][-1] == 11
    assert by_rule["long"][-1] == 11 * 6
    # Of 240 events the last eleven, and each twentieth of the last hundred; less than twice as many are kept.
    assert sum(shard.stored_rows()) <= 2 * (11 + 5) + 8
    assert shard.state.state_rows() == 11 + 5 == shard.state.estimate_counts().rows


def test_c3_a_feature_that_comes_back_begins_anew() -> None:
    shard = Shard()
    total = {"rule_id": "a", "window": "1 hour", "measures": {"m": "sum(n)"}}
    count = {"rule_id": "b", "window": "1 hour", "measures": {"m": "count(*)"}}
    shard.judge([row(1), row(2)], total, count)
    # Version 2 of `a` has no sum; version 3 has it again.
    shard.judge([row(3)], {**total, "measures": {"m": "count(*)"}})
    assert shard.state.state_rows() == 3
    shard.judge([row(4)], total)
    last = {each.rule_id: (each.measures["m"], each.window_complete) for each in shard.alerts[-2:]}
    assert last == {"a": (1, False), "b": (4, True)}


def test_c3_1_a_deleted_event_leaves_nothing_of_dropped_features_either() -> None:
    shard = Shard()
    names = {"rule_id": "a", "window": "1 hour", "measures": {"m": "max(name)"}}
    count = {"rule_id": "b", "window": "1 hour", "measures": {"m": "count(*)"}}
    shard.judge([row(at) for at in range(1, 9)], names, count)
    assert "name 3" in shard.stored_texts()
    shard.judge([row(9)], {**names, "measures": {"m": "count(*)"}})
    shard.judge([row(10)], gone=[row(3)])
    assert "name 3" not in shard.stored_texts()
    assert shard.alerts[-1].measures["m"] == 9


def shared_run(rows: list[tuple[int, int, int, tuple[bool, bool]]]) -> tuple[SharedRun, dict[str, Place]]:
    """A run of (key, time, value, kept by `a` and `b`)."""
    low = np.array([key for key, *_ in rows], dtype=np.int64)
    times, values = (np.array([each[at] for each in rows], dtype=np.int64) for at in (1, 2))
    numbers, keys = number_keys(Keys(low, np.zeros(len(low), dtype=np.int64)))
    order = order_by_group(numbers, times)
    masks = (np.array([each[3][at] for each in rows], dtype=bool)[order] for at in (0, 1))
    kept = [Kept(name, mask, values[order], "v") for name, mask in zip("ab", masks, strict=True) if mask.any()]
    return make_shared_run(numbers[order], keys, times[order], kept)


ROWS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 5), st.sampled_from([(True, True), (True, False), (False, True)])),
    min_size=1,
    max_size=8,
)  # fmt: skip


@given(st.lists(ROWS, min_size=1, max_size=4), st.integers(0, 9), st.booleans())
def test_merged_runs_hold_the_rows_of_each_feature_at_or_above_its_floor(
    parts: list[Any], floor: int, paged: bool
) -> None:
    made = [shared_run(rows) for rows in parts]
    runs = [SharedRun.decode(run.encode(), "run:1") if paged else run for run, _ in made]
    floors = {"a": floor, "b": None}
    merged = merge_shared_runs(runs, {name: [places.get(name) for _, places in made] for name in "ab"}, floors)
    for at, name in enumerate("ab"):
        expected = sorted(
            (key, time, value)
            for rows in parts
            for key, time, value, kept in rows
            if kept[at] and time >= (floors[name] or 0)
        )
        found = []
        if merged is not None and name in merged[1]:
            run = FeatureColumn(merged[0], merged[1][name]).to_run()
            assert run.values is not None
            found = sorted(zip(run.keys.low[run.groups].tolist(), run.times.tolist(), run.values.tolist(), strict=True))
        assert found == expected
        if merged is not None and found:
            column, count = FeatureColumn(merged[0], merged[1][name]), AGGREGATES["count"]
            everything = np.array([0]), np.array([len(merged[0])])
            assert column.aggregate_ranges("count", count, *everything)[0].tolist() == [len(expected)]


def test_c8_a_damaged_page_of_shared_rows_says_what_to_do() -> None:
    run, places = shared_run([(1, 1, 5, (True, False)), (1, 2, 6, (True, True)), (2, 3, 7, (False, True))])
    arrays = decode_page(run.encode(), "run:1")
    low, high, counts, times, sizes, *columns = arrays
    assert run.has_place(places["a"])
    assert not run.has_place(Place(7, 0, 2))
    assert not run.has_place(places["a"]._replace(rows=3))
    for wrong in (
        [low, high, counts, times],
        [low, high, counts, times, np.array([9, 9]), *columns],
        [low, high, counts, times, np.array([-1, 4]), *columns],
        [low, high, counts, times, sizes, *columns[:-1], None],
        [low, high, counts, times, sizes, np.array([5]), *columns[1:]],
        [low, high, counts, times, sizes, np.zeros(3, dtype=bool), *columns[1:]],
        [low, high, counts, times, sizes, *columns[:-1], np.array([1])],
        [low, high, np.array([1]), times, sizes, *columns],
    ):
        with pytest.raises(
            StateError, match=r"run:1: a page of window state (is damaged|holds something else); start with a new"
        ):
            SharedRun.decode(encode_page(wrong), "run:1")

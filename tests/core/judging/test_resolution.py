"""C 3.4 with a resolution: how close it comes, what is combined and when, and what a DELETE takes out again."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_equals_oracle import DictStore

import lookback
from lookback.core.aggregation.runs import Buckets, Run, combine_runs, make_run, subtract_rows
from lookback.core.engine.batch import Batch
from lookback.core.engine.evaluation import Evaluator
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.rulebook import RuleBook
from lookback.core.state.shard import ShardState
from lookback.core.streams.declaration import Stream
from lookback.core.streams.eventrows import read_events
from lookback.core.values.keys import Keys, number_keys

# W is the highest time; what is at most 4 late is taken.
TX = Stream.from_dict(
    {
        "stream": "tx",
        "event_id": "id",
        "event_time": "at",
        "fields": {"id": "string", "at": "timestamp", "k": "string", "n": "int"},
        "max_out_of_orderness": "0 seconds",
        "allowed_lateness": "4 microseconds",
    }
)
ADDITIVE = {"n_": "count(*)", "total": "sum(n)", "mean": "avg(n)", "spread": "stddev_samp(n)"}


def rule(size: int, resolution: int | None, **keys: Any) -> dict[str, Any]:
    window = {"lookback": f"{size} microseconds"}
    if resolution:
        window["resolution"] = f"{resolution} microseconds"
    return {
        "rule_id": "r", "stream": "tx", "group_by": ["k"], "window": window, "measures": ADDITIVE, "when": "true", **keys,
    }  # fmt: skip


def row(at: int, n: int = 1, k: str = "x", name: str | None = None) -> dict[str, Any]:
    return {"id": name or f"e{at}", "at": at, "k": k, "n": n}


class Shard:
    """A shard that is given a commit at a time: (events, deleted events). reload: its state is read anew each time."""

    def __init__(self, document: dict[str, Any], *, reload: bool = False, tidy: bool = True) -> None:
        self._store, self._reload, self._tidy = DictStore(), reload, tidy
        self.state, self._arrival = self._new(), 0
        self._changes = [RuleChange("insert", 0, "r", 1, "active", json.dumps(document))]
        self.alerts: list[Any] = []

    def commit(self, rows: list[dict[str, Any]], gone: list[dict[str, Any]] | None = None) -> None:
        self._arrival += 1
        listed = [{**each, "arrival": self._arrival} for each in [*rows, *(gone or [])]]
        events, _ = read_events(listed, TX, 1)
        marks = {self._arrival: max((each["at"] for each in rows), default=None)}
        if self._reload and self._arrival > 1:
            self.state = self._new()
            assert self.state.load(self._store)
        self.state.begin(self._store)
        kept, deleted = events.take(slice(0, len(rows))), events.take(slice(len(rows), None))
        batch = Batch(kept, deleted if gone else None, marks, self._changes)
        self.alerts += Evaluator(TX).process(self.state, batch).alerts
        self._changes = []
        if self._tidy:
            self.state.drop_old()
        self.state.save()

    def measured(self) -> list[tuple[Any, ...]]:
        return [(alert.event_id, *alert.measures.values()) for alert in self.alerts]

    def rows(self) -> list[tuple[int, ...]]:
        """(time, *what is kept of it) of each row of the first feature that counts."""
        feature = next(f for f in self.state.features.values() if f.buckets and f.buckets.function == "sum")
        runs = [self.state.runs.load(stored, Run) for stored in feature.runs]
        columns = [(run.times, *(run.parts or (run.values,))) for run in runs]
        return sorted(each for column in columns for each in zip(*(part.tolist() for part in column), strict=True))

    def _new(self) -> ShardState:
        return ShardState(RuleBook(TX, {"tx": TX}))


# How close it comes ---------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(-40, 40), st.integers(0, 5)), min_size=1, max_size=60),
    st.integers(1, 12),
    st.integers(1, 12),
    st.sampled_from([0, 3]),
)
def test_a_value_lies_between_that_of_the_exact_window_and_that_of_one_longer_by_the_resolution(
    given_rows: list[tuple[int, int]], size: int, resolution: int, delay: int
) -> None:
    size = max(size, resolution)
    spans = {"delay": f"{delay} microseconds", "resolution": f"{resolution} microseconds"}
    measures: dict[str, Any] = {"n_": "count(*)", "total": "sum(n)"}
    for name, length in (("low", size), ("high", size + resolution)):
        exact = {"lookback": f"{length} microseconds", "delay": spans["delay"]}
        measures[f"n_{name}"] = {"measure": "count(*)", "window": exact}
        measures[f"sum_{name}"] = {"measure": "sum(n)", "window": exact}
    document = rule(size, None, window={"lookback": f"{size} microseconds", **spans}, measures=measures)
    harness = lookback.Harness(TX)
    harness.rule(document)
    harness.events([row(at, n, name=str(number)) for number, (at, n) in enumerate(given_rows)])
    assert harness.alerts
    for alert in harness.alerts:
        found = {name: value or 0 for name, value in alert.measures.items()}
        assert found["n_low"] <= found["n_"] <= found["n_high"]
        assert found["sum_low"] <= found["total"] <= found["sum_high"]


# What is combined -----------------------------------------------------------------------------------------------------


def test_rows_of_a_closed_bucket_become_one_and_those_of_an_open_one_stay() -> None:
    #   0           4           8           12          16      W = 15, lateness 4: closed up to 8, the multiple before 11
    #   ├───1──2────┼─────5─────┼──8────────┼────────15──
    shard = Shard(rule(12, 4))
    for at in (1, 2, 5, 8, 15):
        shard.commit([row(at, n=at)])
    # 1 and 2 became one when four runs were merged, at W = 8. 15 has just come: its run is the only one that is not merged.
    assert shard.rows() == [(0, 2, 3), (5, 1, 5), (8, 1, 8), (15, 15)]
    # Half of what was left of the merged run can be combined only when 8 can be too.
    shard.commit([row(16, n=16)])
    assert shard.rows() == [(0, 2, 3), (4, 1, 5), (8, 1, 8), (15, 15), (16, 16)]
    assert shard.measured()[-2] == ("e15", 5, 31, 6.2, pytest.approx(5.630275))


def test_of_a_long_batch_only_what_later_windows_can_hold_is_kept() -> None:
    # A window of 12 and events that are 4 late: what is 16 before the watermark still counts.
    shard = Shard(rule(12, None), tidy=False)
    shard.commit([row(at) for at in range(1_000)])
    assert [stored.rows for stored in shard.state.windows.list_runs()] == [17]


def test_an_event_that_is_just_late_enough_never_meets_a_combined_bucket_that_it_splits() -> None:
    # W = 16: closed up to 12, and what is at 12 is still taken. It sees all of [8, 12) and 12 itself.
    shard = Shard(rule(4, 4))
    for at in (8, 9, 11, 13, 16):
        shard.commit([row(at)])
    shard.commit([row(12)])
    assert shard.measured()[-1][:2] == ("e12", 4)
    shard.commit([row(11, name="too late")])
    assert [alert.event_id for alert in shard.alerts][-1] == "e12"


@pytest.mark.parametrize("reload", [False, True])
def test_combined_buckets_are_dropped_whole(*, reload: bool) -> None:
    shard = Shard(rule(8, 4), reload=reload)
    for at in range(40):
        shard.commit([row(at)])
    # W = 39; 39 - (8 + 4) - 4 = 23, so the floor is 20, and what begins before it is gone with its bucket.
    assert {time for time, *_ in shard.rows() if time < 32} == {20, 24, 28}
    assert shard.measured()[-1][:2] == ("e39", 12)


def test_a_run_is_combined_again_when_half_of_it_can_be_though_nothing_new_joins_it() -> None:
    # Closed up to W - 104.
    window = {"lookback": "1 second", "resolution": "10 microseconds", "delay": "100 microseconds"}
    shard = Shard(rule(0, None, window=window, measures={"total": "sum(n)"}))
    shard.commit([row(at) for at in range(100)])
    (feature,) = shard.state.features.values()
    sizes, is_rewritten = [], []
    for time in (163, 164, 193, 204, 500):
        before = feature.runs[0]
        Evaluator(TX).advance(shard.state, time)
        shard.state.drop_old()
        sizes.append(feature.runs[0].rows)
        is_rewritten.append(feature.runs[0] is not before)
    # At 164 [0, 60) become 6 rows beside 40; 23 of these are half of all, and [60, 90) is not closed before 194.
    assert sizes == [100, 46, 46, 10, 10]
    assert is_rewritten == [False, True, False, True, False]


def test_state_is_per_bucket_and_key_not_per_event() -> None:
    chance = random.Random(7)
    kept = {}
    for resolution in (None, 600):
        shard = Shard(rule(18_000, resolution, measures={"total": "sum(n)"}, when="total < 0"))
        for start in range(0, 40_000, 500):
            shard.commit([row(at, chance.randint(0, 9), chance.choice("abcde")) for at in range(start, start + 500)])
        kept[resolution] = shard.state.state_rows()
    assert kept[None] > 18_000
    # Five keys, 32 buckets of [W - 18,604, W], and the last runs, which are not closed yet.
    assert kept[600] < 5 * 32 + 1_500


def test_c8_pages_with_combined_rows_come_back_and_pages_of_plain_rows_are_as_they_were() -> None:
    keys = Keys(np.array([1, 1, 2, 2]), np.zeros(4, dtype=np.int64))
    run = make_run(*number_keys(keys), np.array([1, 2, 5, 9]), np.array([2**61, 2**61, 3, 4]))
    wide = combine_runs([run], None, Buckets(4, 0, "stddev_samp"), 8)
    back = Run.decode(wide.encode(), "run:1")
    assert back.times.tolist() == [0, 4, 9]
    assert back.parts is not None
    assert [part.tolist() for part in back.parts] == [[2, 1, 1], [2**62, 3, 4], [2**123, 9, 16]]
    assert Run.decode(run.encode(), "run:2").parts is None


# What a DELETE takes out ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reload", [False, True])
@pytest.mark.parametrize("tidy", [True, False], ids=["combined before", "combined by the request"])
def test_c3_1_a_deleted_event_is_subtracted_from_its_bucket(*, tidy: bool, reload: bool) -> None:
    shard = Shard(rule(12, 4), tidy=tidy, reload=reload)
    for at in (1, 2, 5, 8, 15):
        shard.commit([row(at, n=at), row(8, n=7, name="twin")] if at == 8 else [row(at, n=at)])
    # Closed up to 8. 2 was combined with 1, 5 was alone in its bucket, the two at 8 stand for themselves.
    gone = [row(2, n=2), row(5, n=5), row(8, n=8)]
    # What never came; that at 8 is none of the two, by its value (a count, which keeps none, cannot tell).
    never = [row(6, n=6), row(8, n=6), row(9, n=9)]
    shard.commit([row(15, n=0, name="after")], gone=[*gone, *never])
    assert [each for each in shard.rows() if each[0] < 15] == [(0, 1, 1), (8, 1, 7)]
    assert shard.measured()[-1][:3:2] == ("after", 1 + 7 + 15 + 0)


def test_c3_1_a_bucket_from_which_all_is_deleted_is_no_more() -> None:
    shard = Shard(rule(12, 4))
    for at in (1, 2, 15):
        shard.commit([row(at, n=at)])
    shard.commit([row(15, name="after")], gone=[row(1), row(2, n=2), row(3, n=7)])
    assert [each[0] for each in shard.rows()] == [15, 15]
    assert shard.measured()[-1][1] == 2


@pytest.mark.parametrize("reload", [False, True])
def test_c3_1_the_deletion_of_an_event_that_was_discarded_takes_out_nothing(*, reload: bool) -> None:
    #   0           4           8           12       15    W = 15, lateness 4: what comes at 2 now is discarded
    #   ├──1──2*────┼─────5*────┼───────────┼────────15
    shard = Shard(rule(16, 4), reload=reload)
    for at in (1, 5, 15):
        shard.commit([row(at, n=at)])
    shard.commit([row(2, n=7, name="late"), row(5, n=7, name="late too"), row(5, n=7, k="y", name="of another key")])
    shard.commit([row(15, n=0, name="one")], gone=[row(2, n=7), row(5, n=7)])
    assert shard.measured()[-1][:3] == ("one", 4, 1 + 5 + 15)
    # The one that counted goes, and so does nothing in place of one that is deleted again.
    shard.commit([row(15, n=0, name="two")], gone=[row(1, n=1), row(5, n=7, k="y")])
    assert shard.measured()[-1][:3] == ("two", 4, 5 + 15)
    assert [name for name in shard.state.tables if "discarded" in name] == []


def test_events_that_were_discarded_are_forgotten_with_their_windows() -> None:
    shard = Shard(rule(8, 4))
    for at in (15, 3, 40, 60):
        shard.commit([row(at)])
        # Kept for 8 + 4 + 4 after its bucket [0, 4).
        assert any("discarded" in name for name in shard.state.tables) == (at == 3)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 0, 1, 2, 5]), st.sampled_from([0, 1, 2, 4, 5, 6, 7]), st.integers(-2, 2), st.sampled_from("xxy"),
            st.integers(0, 40),
        ),
        min_size=1, max_size=40,
    ),
    st.sampled_from([1, 2, 3, 5]),
    st.sampled_from([0, 2]),
    st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_c3_1_what_was_deleted_counts_no_more_however_it_was_kept(
    moves: list[tuple[int, int, int, str, int]],
    resolution: int,
    delay: int,
    tidy: bool,
    reload: bool,
) -> None:
    """Each verdict is known from those events that stand, which were not too late when they came: rescanned here."""
    size = 7
    window = {
        "lookback": f"{size} microseconds",
        "resolution": f"{resolution} microseconds",
        "delay": f"{delay} microseconds",
    }
    shard = Shard(
        rule(size, None, window=window, measures={"n_": "count(*)", "total": "sum(n)"}), tidy=tidy, reload=reload
    )
    # Those that were discarded are deleted too, but for twins of others: nobody can tell these apart.
    standing: list[dict[str, Any]] = []
    discarded: set[str] = set()
    expected = []
    time = watermark = 0
    for number, (later, back, n, k, victim) in enumerate(moves):
        time += later
        new = row(time - back, n, k, str(number))
        gone = [standing[victim]] if victim < len(standing) else []
        twins = [each for each in standing if gone and (each["at"], each["k"]) == (gone[0]["at"], gone[0]["k"])]
        gone = gone if len({each["id"] in discarded for each in twins}) == 1 else []
        standing = [each for each in standing if each not in gone] + [new]
        is_late = number > 0 and new["at"] < watermark - 4
        watermark = max(watermark, new["at"]) if number else new["at"]
        if is_late:
            discarded.add(new["id"])
            shard.commit([new], gone)
            continue
        last = new["at"] - delay
        first = (last - size) // resolution * resolution
        counted = [each for each in standing if each["id"] not in discarded and each["k"] == k]
        values = [each["n"] for each in counted if first <= each["at"] <= last]
        expected.append((str(number), len(values), sum(values) if values else None))
        shard.commit([new], gone)
    assert shard.measured() == expected


# What is shared -------------------------------------------------------------------------------------------------------


def test_rules_share_state_only_if_resolution_and_delay_are_the_same() -> None:
    def feature(**window: str) -> str:
        document = rule(1, None, window={"lookback": "12 hours", **window}, measures={"m": "count(*)"})
        (found,) = compile_rule(document, TX).features
        return found.feature_id

    plain = feature()
    assert plain == feature(delay="1 hour")
    assert plain == feature(lookback="3 days")
    assert feature(resolution="1 hour") == feature(resolution="60 minutes", lookback="3 days")
    different = [
        feature(),
        feature(resolution="1 hour"),
        feature(resolution="2 hours"),
        feature(resolution="1 hour", delay="1 day"),
    ]
    assert len(set(different)) == 4


def test_a_feature_with_a_resolution_is_kept_longer_by_it() -> None:
    (width,) = compile_rule(rule(10, 3, measures={"m": "count(*)"}), TX).needs.values()
    assert width == 10 + 3 + 4


def test_what_subtracts_is_of_the_very_key() -> None:
    run = make_run(*number_keys(Keys(np.array([1, 1, 2]), np.array([0, 0, 0]))), np.array([1, 2, 1]), None)
    buckets = Buckets(4, 0, "count")
    combined = combine_runs([run], None, buckets, 4)
    other = Keys(np.array([3, 2]), np.array([0, 0]))
    left, had = subtract_rows(combined, other, np.array([1, 1]), None, buckets, 4)
    assert had.tolist() == [1]
    assert (left.keys.low.tolist(), left.times.tolist()) == ([1], [0])

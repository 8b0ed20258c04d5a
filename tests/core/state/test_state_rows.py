"""How much state there is, told alike by the harness and by what a stream reports; and how much of it is in memory."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_equals_oracle import DictStore

from lookback import Harness
from lookback.core.aggregation.aggregates import AGGREGATES
from lookback.core.aggregation.runs import Run
from lookback.core.engine.batch import Batch
from lookback.core.engine.evaluation import Evaluator
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.rulebook import RuleBook
from lookback.core.state import storedruns
from lookback.core.state.shard import ShardState, StateCounts
from lookback.core.streams.arrival import find_marks
from lookback.core.streams.declaration import Stream
from lookback.core.streams.eventrows import read_events
from lookback.core.streams.events import Events
from lookback.core.values.cache import Cache
from lookback.core.values.columns import from_values
from lookback.core.values.keys import TimeSearch
from lookback.spark.batches.arrayfiles import MappedFile

STREAM = Stream.from_dict(
    {
        "stream": "uses",
        "event_id": "id",
        "event_time": "at",
        "fields": {"id": "bigint", "at": "timestamp", "card": "string", "n": "bigint"},
        "max_out_of_orderness": "0 seconds",
        "allowed_lateness": "10 microseconds",
    }
)
COUNTS = {"measures": {"m": "count(*)"}}
STEPS = [{"name": "one", "where": "n = 1"}, {"name": "two", "where": "n = 2"}]
WAIT = [{"name": "one", "where": "n = 1"}, {"name": "none", "absent": "n = 9", "within": "50 microseconds"}]
# Three cards with an event each at 0, then for card a two more.
ROWS = [
    {"id": 1, "at": 0, "card": "a", "n": 1}, {"id": 2, "at": 0, "card": "b", "n": 1}, {"id": 3, "at": 0, "card": "c", "n": 1},
    {"id": 4, "at": 5, "card": "a", "n": 2}, {"id": 5, "at": 6, "card": "a", "n": 1},
]  # fmt: skip
HOUR = "3600 seconds"


@pytest.mark.parametrize(
    ("document", "held"),
    [
        pytest.param({"window": HOUR, **COUNTS, "when": "m > 9"}, StateCounts(5, 0), id="lookback"),
        pytest.param({"window": {"lookback": HOUR, "resolution": HOUR}, **COUNTS, "when": "m > 9"}, StateCounts(5, 0), id="buckets"),
        pytest.param({"window": {"tumbling": HOUR}, **COUNTS}, StateCounts(5, 0), id="tumbling"),
        pytest.param({"window": {"tumbling": HOUR}, **COUNTS, "early": True}, StateCounts(5, 3), id="early: a verdict for each card"),
        pytest.param({"window": {"session": HOUR}, **COUNTS}, StateCounts(5, 0), id="session"),
        pytest.param({"sequence": {"within": HOUR, "steps": STEPS}}, StateCounts(5, 0), id="sequence"),
        # All events that a step may take, once: the last one too, since an event between it and 2 may still come.
        pytest.param({"sequence": {"within": HOUR, "steps": STEPS, "expiry": "fixed"}}, StateCounts(5, 0), id="begun matches"),
        # Four events that may be waited after, and their waits.
        pytest.param({"sequence": {"within": HOUR, "steps": WAIT}}, StateCounts(8, 0), id="waits of an absence"),
        pytest.param({"window": HOUR, **COUNTS, "when": "true", "suppress": HOUR}, StateCounts(5, 3), id="suppressed keys"),
        pytest.param({"window": HOUR, **COUNTS, "when": "m > 1", "reset_on_alert": True}, StateCounts(3, 1), id="emptied keys"),
        pytest.param({"window": HOUR, **COUNTS, "when": "true", "late": "revise"}, StateCounts(5, 5), id="events to revise"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("cached", [None, 0])
def test_c6_a_stream_reports_the_rows_that_the_harness_counts(
    document: dict[str, Any], held: StateCounts, cached: int | None
) -> None:
    rule = {"rule_id": "r", "stream": "uses", "group_by": ["card"], **document}
    harness = Harness(STREAM)
    harness.rule(rule)
    harness.events([row | {"arrival": 1} for row in ROWS])
    if "reset_on_alert" in document:
        # Its rows of the first three events are in a run when the alert comes.
        harness = Harness(STREAM)
        harness.rule(rule)
        harness.events([row | {"arrival": 1} for row in ROWS[:3]])
        harness.events([row | {"arrival": 2} for row in ROWS[3:]])
    shard = _Shard(rule, Cache() if cached is None else Cache(cached))
    shard.judge([row | {"arrival": 1} for row in ROWS[:3]])
    shard.judge([row | {"arrival": 2} for row in ROWS[3:]])
    if cached == 0 and "reset_on_alert" in document:
        # Of a run that is not in memory all rows count, also those of the emptied key.
        held = StateCounts(held.rows + 1, held.remembered)
        assert shard.state.estimate_counts() == held
        held = StateCounts(held.rows - 1, held.remembered)
    else:
        assert shard.state.estimate_counts() == held
    assert harness.state_rows() == shard.state.state_rows() == held.rows
    # All of it goes with time.
    later = [{"id": 9, "at": 2 * 3600 * 10**6, "card": "z", "n": 7, "arrival": 3}]
    shard.judge([*later, {"id": 10, "at": 4 * 3600 * 10**6, "card": "z", "n": 7, "arrival": 4}])
    harness.events(
        [row | {"arrival": 3 + at} for at, row in enumerate([later[0], {**later[0], "id": 10, "at": 4 * 3600 * 10**6}])]
    )
    assert harness.state_rows() == shard.state.estimate_counts().rows == shard.state.state_rows() <= 2


def test_c6_rows_below_the_floor_are_no_state() -> None:
    rule = {
        "rule_id": "r",
        "stream": "uses",
        "group_by": ["card"],
        "window": "20 microseconds",
        **COUNTS,
        "when": "m > 9",
    }
    shard = _Shard(rule, Cache())
    # W = 32 and the floor 2: two of five rows of one run lie below it, too few to write the run anew.
    shard.judge([{"id": at, "at": at, "card": "a", "n": 1, "arrival": 1} for at in range(5)])
    shard.judge([{"id": 32, "at": 32, "card": "a", "n": 1, "arrival": 2}])
    shard.state.drop_old()
    assert [stored.rows for stored in shard.state.windows.list_runs()] == [5, 1]
    shard = _Shard(rule, Cache())
    shard.judge([{"id": at, "at": at, "card": "a", "n": 1, "arrival": 1} for at in range(5)])
    shard.judge([{"id": 32, "at": 32, "card": "a", "n": 1, "arrival": 2}])
    assert shard.state.estimate_counts().rows == shard.state.state_rows() == 4


@pytest.mark.parametrize("kind", ["runs", pytest.param("sessions", marks=pytest.mark.long)])
def test_memory_follows_the_limit_while_state_grows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storedruns, "_MAX_MERGED_ROWS", 4_000)
    window: Any = HOUR if kind == "runs" else {"session": HOUR}
    when = "m > 1000000" if kind == "runs" else "m > 3"
    rule = {"rule_id": "r", "stream": "uses", "group_by": ["card"], "window": window, **COUNTS, "when": when}
    limit, batches = 150_000, 12
    found: dict[int | None, list[Any]] = {}
    for most in (None, limit):
        cache = Cache(10**12 if most is None else most)
        shard = _Shard(rule, cache)
        peaks = []
        for batch in range(batches):
            shard.judge_events(_many(1_000, batch))
            peaks.append(shard.in_memory())
            assert cache.bytes >= shard.in_memory()
        assert shard.state.estimate_counts().rows == 1_000 * batches
        found[most] = shard.alerts
        if most is None:
            # 40 bytes a row and more: memory grows with state.
            assert peaks[-1] > 1.3 * peaks[batches // 2 - 1] > 0
            assert peaks[-1] > 2 * limit
        else:
            assert max(peaks) <= limit
    assert found[None] == found[limit]


@pytest.mark.parametrize("batches", [12, 24])
@pytest.mark.parametrize("has_files", [True, False])
def test_a_batch_reads_no_long_run_again_however_much_state_there_is(
    batches: int, has_files: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storedruns, "_MAX_MERGED_ROWS", 4_000)
    monkeypatch.setattr(storedruns, "_MIN_FILED_ROWS", 1)
    measures = {"m": "sum(n)", "few": "count(*) filter (where n > 0)"}
    rule = {"rule_id": "r", "stream": "uses", "group_by": ["card"], "window": HOUR, "measures": measures, "when": "m > 5 and few > 5"}  # fmt: skip
    shard = _Shard(rule, Cache(50_000), tmp_path if has_files else None)
    for batch in range(batches):
        shard.judge_events(_many(1_000, batch))
    # The run that was merged last is dropped once, and read once.
    for batch in (batches, batches + 1):
        shard.judge_events(_many(10, batch))
    shard.store.read.clear()
    shard.judge_events(_many(10, batches + 2))
    long = {stored.run_id for stored in shard.state.windows.list_runs() if stored.rows >= 1_000}
    assert len(long) >= batches // 4
    assert len(long & {*shard.store.read}) == (0 if has_files else len(long))
    assert shard.in_memory() <= 50_000
    if not has_files:
        return
    # Another worker maps the files, of which it has the indexes too.
    other = _Shard(rule, Cache(50_000), tmp_path)
    other.store = shard.store
    assert other.state.load(other.store)
    searched = []
    make_search = TimeSearch.__init__

    def note(self: TimeSearch, groups: Any, times: Any, numbered: int = 0) -> None:
        searched.append(len(times))
        make_search(self, groups, times, numbered)

    monkeypatch.setattr(TimeSearch, "__init__", note)
    shard.store.read.clear()
    other.judge_events(_many(1_000, batches + 3), [])
    assert not long & {*shard.store.read}
    # Of the events themselves, and of runs that were not read before.
    assert len(searched) >= 1
    assert max(searched) <= 1_000
    assert other.in_memory() <= 50_000


def test_history_leaves_memory_to_other_rows_when_it_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storedruns, "_MIN_FILED_ROWS", 500)
    rule = {"rule_id": "r", "stream": "uses", "group_by": ["card"], "window": HOUR, "measures": {"m": "sum(n)"}, "when": "m > 5"}  # fmt: skip
    shard = _Shard(rule, Cache(10**9), tmp_path)
    shard.judge_events(_many(1_000, 1))
    (feature_id,) = shard.state.features
    (own,) = shard.state.windows.list_runs()
    rows = shard.state.windows.gather_rows(feature_id)
    assert rows is not None
    shard.begin()
    shard.state.windows.add_history(feature_id, rows, partial(Run.prepare, name="sum", aggregate=AGGREGATES["sum"]))
    shard.state.save()
    history, *others = shard.state.windows.list_runs()
    assert history.file is not None
    assert history.run is not None
    assert history.run.memory_bytes == 0
    assert own in others
    assert own.file is None
    assert own.run is not None
    assert own.run.memory_bytes > 0
    assert shard.in_memory() == sum(each.run.memory_bytes for each in others if each.run is not None)


def _many(rows: int, batch: int) -> Events:
    """Events of many cards, each with a few; a millisecond a batch."""
    rng = np.random.default_rng(batch)
    ids = np.arange(rows, dtype=np.int64) + batch * rows
    columns = {
        "id": from_values(STREAM.fields["id"], ids.tolist()),
        "at": from_values(STREAM.fields["at"], sorted((rng.integers(0, 1_000, rows) + batch * 1_000).tolist())),
        "card": from_values(STREAM.fields["card"], [f"c{n}" for n in rng.integers(0, 10_000, rows).tolist()]),
        "n": from_values(STREAM.fields["n"], [1] * rows),
    }
    return Events(columns, np.full(rows, batch + 1, dtype=np.int64), "id", "at")


class _Store(DictStore):
    """Notes what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    def get(self, name: str) -> bytes | None:
        self.read.append(name)
        return super().get(name)


class _Shard:
    """One shard that keeps its pages in a store, as the stream's do."""

    def __init__(self, rule: dict[str, Any], cache: Cache, folder: Path | None = None) -> None:
        self.state, self.store, self.alerts = (
            ShardState(RuleBook(STREAM, {"uses": STREAM}), cache=cache),
            _Store(),
            [],
        )
        self._folder = folder
        self._changes = [RuleChange("insert", 1, rule["rule_id"], 1, "active", json.dumps(rule))]

    def judge(self, rows: list[dict[str, Any]]) -> None:
        self.judge_events(read_events(rows, STREAM, 1)[0])

    def begin(self) -> None:
        self.state.begin(
            self.store, lambda name: None if self._folder is None else MappedFile(self._folder / name.replace(":", "-"))
        )

    def judge_events(self, events: Events, changes: list[RuleChange] | None = None) -> None:
        self.begin()
        changes = self._changes if changes is None else changes
        batch = Batch(events, marks=find_marks(events, events.commits), changes=changes)
        self.alerts += Evaluator(STREAM).process(self.state, batch).alerts
        self._changes = []
        self.state.drop_old()
        self.state.save()

    def in_memory(self) -> int:
        """The memory of the decoded pages, as the cache counts it."""
        runs = [run.run for run in self.state.windows.list_runs() if run.run is not None]
        tables = self.state.tables.values()
        pages = [
            page
            for table in tables
            for run in table._runs.runs
            for page in (run.pages or {}).values()
            if page.rows is not None
        ]
        decoded = [table for table in tables if table._former]
        sizes = dict(self.state.cache.list_items())
        return sum(run.memory_bytes for run in runs) + sum(sizes[item] for item in [*pages, *decoded])

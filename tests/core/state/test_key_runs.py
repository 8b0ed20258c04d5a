"""Keyed tables of many keys: a batch reads and writes in proportion to the keys that it touches, and loses none."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from state_layout import small_runs, state_pages, table_pages

from lookback.core.engine.batch import Batch
from lookback.core.engine.evaluation import Evaluator
from lookback.core.errors import StateError
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.rulebook import RuleBook
from lookback.core.state.keyed import Key, KeyedTable
from lookback.core.state.keyruns import Rows
from lookback.core.state.shard import ShardState
from lookback.core.streams.arrival import find_marks
from lookback.core.streams.declaration import Stream
from lookback.core.streams.events import Events
from lookback.core.values.cache import Cache
from lookback.core.values.columns import from_values
from lookback.core.values.keycolumns import KeyColumns
from lookback.core.values.keys import Keys
from lookback.core.values.times import NEVER_DUE
from lookback.core.values.types import BIGINT, STRING, array


class CountingStore(dict[str, bytes]):
    """Pages in a dict; counts the bytes, and the rows of keyed tables, that are written, and the pages that are read."""

    def __init__(self) -> None:
        self.bytes = self.rows = self.reads = 0

    def get(self, name: str, default: Any = None) -> Any:
        self.reads += 1
        return super().get(name, default)

    def put(self, name: str, page: bytes) -> None:
        self.bytes += len(page)
        if name.startswith("table:") and not name.endswith("wakes"):
            self.rows += len(Rows.decode(page, name))
        self[name] = page

    def remove(self, name: str) -> None:
        del self[name]


def reopened(table: KeyedTable, store: CountingStore, cache: Cache) -> KeyedTable:
    """The table as another worker reads it from the store."""
    record = json.loads(json.dumps(table.to_json()))
    return KeyedTable.from_json(table.name, record, store, cache)


# Keys of which some share their low half, and some their page in any run.
ALL_KEYS = [(low, high) for low in (0, 1, 2, 8, 16, 2**40, -1, -(2**63), 2**63 - 1) for high in (0, 1)]
KEYS = st.sampled_from(ALL_KEYS)
WAKES = st.sampled_from([0, 1, 2, 3, 5, 8, NEVER_DUE])
# Values in columns: so many rows for each key.
COLUMNS = st.lists(st.tuples(KEYS, st.integers(0, 3), WAKES), max_size=5, unique_by=lambda entry: entry[0])
STEPS = st.one_of(
    st.tuples(st.just("put"), KEYS, st.integers(0, 9), WAKES),
    st.tuples(st.just("put"), KEYS, st.integers(0, 9), WAKES),
    st.tuples(st.just("replace"), COLUMNS, st.sampled_from([0, 3, 99])),
    st.tuples(st.just("replace"), COLUMNS, st.sampled_from([0, 3, 99])),
    st.tuples(st.just("find_due"), st.integers(0, 9), st.integers(0, 3)),
    st.tuples(st.just("forget"), KEYS),
    st.tuples(st.just("get"), KEYS),
    st.tuples(st.just("due"), st.integers(0, 9)),
    st.tuples(st.just("forget_due"), st.integers(0, 9)),
    st.tuples(st.just("items")),
    st.tuples(st.just("save")),
    st.tuples(st.just("save")),
    st.tuples(st.just("reopen")),
    st.tuples(st.just("evict")),
)


def list_rows(key: Key, count: int) -> list[list[Any]]:
    """Rows of a key in columns: numbers, texts of which some are NULL, and lists."""
    return [[at, None if (at + key[1]) % 2 else f"{key[0]}", [at, None]] for at in range(count)]


def replace(
    table: KeyedTable, entries: list[tuple[Key, int, int]], looked_up: list[Key], truth: Any = None
) -> set[Key]:
    """Replaces the values of keys by so many rows in columns each. Returns the keys that had such rows and have none now."""
    asked = list({**dict.fromkeys(looked_up), **{key: None for key, _, _ in entries}})
    found = table.find_rows(as_keys(asked))
    had_rows = {asked[at] for at in found.places.tolist()}
    if truth is not None:
        assert had_rows <= {key for key in asked if isinstance(truth.get(key, (0, 0))[1], dict)} - set(table._changed)
        others = {asked[at] for at in found.others.tolist()}
        assert {key for key in asked if key in truth} <= had_rows | others
    gone = had_rows - {key for key, _, _ in entries}
    entries = [*entries, *((key, 0, NEVER_DUE) for key in gone)]
    rows = [row for key, count, _ in entries for row in list_rows(key, count)]
    types = (BIGINT, STRING, array(BIGINT))
    columns = KeyColumns.from_columns([from_values(type_, [row[at] for row in rows]) for at, type_ in enumerate(types)])
    wakes, lengths = (np.array([entry[at] for entry in entries], dtype=np.int64) for at in (2, 1))
    keys = as_keys([key for key, _, _ in entries])
    table.replace_rows(found, Rows.from_columns(keys, wakes, lengths, columns if rows else None))
    return gone


def put_due(table: KeyedTable, watermark: int) -> list[Key]:
    """Puts the keys that are due again as they are, and returns them."""
    due = table.find_due(watermark).list_pairs()
    for key in due:
        table.put(key, table.get(key), table.find_wake(key))
    return due


def moved(table: KeyedTable) -> KeyedTable:
    """Another table with the same keys, which come as those of a piece of history do."""
    other = KeyedTable("moved")
    for rows in table.export_rows(lambda _: 1):
        other.add_rows(Rows.decode(rows.encode(), "moved"))
    return other


def as_keys(listed: list[Key]) -> Keys:
    return Keys(*(np.array([key[half] for key in listed], dtype=np.int64) for half in (0, 1)))


@settings(max_examples=max(100, settings().max_examples))
@given(
    st.lists(STEPS, max_size=60),
    st.sampled_from([0, 400, 10**9]),
    st.booleans(),
)
def test_a_table_is_the_dict_that_it_stands_for(steps: list[tuple[Any, ...]], cached: int, is_large: bool) -> None:
    """is_large: new keys are few beside those of an old run."""
    with small_runs():
        store, cache = CountingStore(), Cache(cached)
        table = KeyedTable("t", {"note": 1}, store, cache)
        truth = dict[Key, tuple[int, Any]]()
        for low in range(100, 164) if is_large else ():
            table.put((low, 0), [low], 8)
            truth[low, 0] = (8, [low])
        table.save()
        for step, *given_ in [*steps, ("save",), ("reopen",), ("items",)]:
            if step == "put":
                key, value, wake = given_
                table.put(key, [value], wake)
                truth[key] = (wake, [value])
            elif step == "replace":
                entries, looked_up = given_
                gone = replace(table, entries, ALL_KEYS[:looked_up], truth)
                truth |= {key: (wake, {"rows": list_rows(key, count)}) for key, count, wake in entries}
                truth = {key: entry for key, entry in truth.items() if key not in gone and entry[1] != {"rows": []}}
            elif step == "find_due":
                watermark, count = given_
                due = [key for key, (wake, _) in truth.items() if wake <= watermark]
                assert table.find_due(watermark).list_pairs() == sorted(due)
                replace(table, [(key, count, watermark + 1) for key in due], [])
                truth |= {key: (watermark + 1, {"rows": list_rows(key, count)}) for key in due}
                truth = {key: entry for key, entry in truth.items() if entry[1] != {"rows": []}}
            elif step == "forget":
                table.put(given_[0], None)
                truth.pop(given_[0], None)
            elif step == "get":
                assert table.get(given_[0]) == truth.get(given_[0], (0, None))[1]
            elif step == "due":
                assert put_due(table, given_[0]) == sorted(key for key, (wake, _) in truth.items() if wake <= given_[0])
            elif step == "forget_due":
                table.forget_due(given_[0])
                truth = {key: entry for key, entry in truth.items() if entry[0] > given_[0]}
            elif step == "items":
                listed = list(table.items())
                assert {key: (wake, value) for key, wake, value in listed} == truth
                assert len(listed) == len(truth)
                assert {key: (wake, value) for key, wake, value in moved(table).items()} == truth
            elif step == "evict":
                for item, _ in cache.list_items():
                    cache.forget(item)
                    item.evict()
            else:
                table.save()
                assert set(store) == table_pages(table)
                if step == "reopen":
                    table = reopened(table, store, cache)
                # As another worker sees it, whose caches do not hide what is stored.
                other = reopened(table, store, Cache())
                assert {key: (wake, value) for key, wake, value in other.items()} == truth
                assert all(other.get(key) == value for key, (_, value) in truth.items())
                assert all(other.get((low, 1)) == truth.get((low, 1), (0, None))[1] for low in (0, 1, 2, 8))
        assert table.notes == {"note": 1}
        assert not (table.is_empty and truth)
        for name in table.clear():
            store.remove(name)
        assert not store


@pytest.mark.long
@given(
    st.lists(
        st.tuples(st.lists(st.tuples(KEYS, st.integers(0, 4) | st.none()), max_size=6), COLUMNS, st.booleans()),
        max_size=30,
    ),
    st.booleans(),
)
def test_the_rows_of_all_keys_are_known_without_reading_them(
    batches: list[tuple[list[tuple[Key, int | None]], list[tuple[Key, int, int]], bool]], reopen: bool
) -> None:
    def count(value: Any) -> int:
        return len(value["rows"] if isinstance(value, dict) else value)

    with small_runs():
        store, truth = CountingStore(), dict[Key, int]()
        table = KeyedTable("t", store=store)
        for batch, columns, are_first in batches:
            for is_columns in (are_first, not are_first):
                if is_columns:
                    gone = replace(table, columns, list(truth)[:3])
                    truth |= dict.fromkeys(gone, 0) | {key: rows for key, rows, _ in columns}
                    continue
                for key, rows in batch:
                    table.put(key, None if rows is None else [0] * rows, 1)
                    truth[key] = rows or 0
            table.save(count)
            if reopen:
                table = reopened(table, store, Cache())
            reads = store.reads
            assert table.rows == sum(truth.values())
            assert store.reads == reads


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_what_a_merge_of_newer_runs_forgets_stays_forgotten(*, is_forgotten: bool) -> None:
    """An older run still has the key, with a later wake."""
    with small_runs():
        store = CountingStore()
        table = KeyedTable("t", store=store)
        for low in range(64):
            table.put((low, 0), [low], 100)
        table.save()
        table.put((7, 0), None if is_forgotten else [-7], 5)
        table.save()
        table.forget_due(5)
        for low in range(100, 103):
            table.put((low, 0), [low], 100)
            table.save()
        # The four small runs have become one.
        assert len(table._runs.runs) == 2
        for each in (table, reopened(table, store, Cache())):
            assert each.get((7, 0)) is None
            assert each.get((8, 0)) == [8]
            assert len(list(each.items())) == 66


@pytest.mark.parametrize("in_columns", [False, True])
def test_a_key_that_is_forgotten_while_its_runs_merge_does_not_come_back(*, in_columns: bool) -> None:
    """The page of the newer run is gone, that of the older one is not."""
    with small_runs():
        table = KeyedTable("t", store=CountingStore())
        if in_columns:
            replace(table, [((1, 1), 1, NEVER_DUE)], [])
        else:
            table.put((1, 1), [1])
        table.save()
        table.put((0, 0), [0])
        table.put((1, 1), None)
        table.save()
        assert any(run.sources for run in table._runs.runs)
        assert table.get((1, 1)) is None
        assert [key for key, _, _ in table.items()] == [(0, 0)]
        found = table.find_rows(as_keys([(0, 0), (1, 1)]))
        assert (found.places.tolist(), found.others.tolist()) == ([], [0])


def test_keys_that_a_merge_forgets_count_no_more() -> None:
    with small_runs():
        table = KeyedTable("t", store=CountingStore())
        for low in range(64):
            table.put((low, 0), [low], 5 if low % 2 else 100)
        table.save()
        # Keys that come again count once, whether they were due or not.
        for low in (1, 2, 3, 4):
            table.put((low, 0), [-low], 100)
        table.save()
        table.forget_due(5)
        for batch in range(40):
            table.put((100 + batch, 0), [batch], 100)
            table.save()
        assert table.rows == len(list(table.items())) == 34 + 40


def test_a_key_that_a_merge_forgets_counts_no_more_while_its_page_is_still_needed() -> None:
    """Its run has one page, which has keys of parts that are merged later."""
    with small_runs():
        table = KeyedTable("t", store=CountingStore())
        for low in range(8):
            table.put((low, 0), [low], 100)
        table.save()
        table.put((16, 0), [16], 5)
        table.save()
        table.forget_due(5)
        for low in (8, 9, 10):
            table.put((low, 0), [low], 100)
        table.save()
        for _ in range(20):
            table.put((8, 0), [8], 100)
            table.save()
        assert table.rows == len(list(table.items())) == 11


def test_a_table_whose_keys_are_all_due_leaves_no_page() -> None:
    store = CountingStore()
    table = KeyedTable("t", store=store)
    for batch in range(20):
        for at in range(500):
            table.put((batch * 500 + at, 0), [at], batch)
        table.save()
    assert len(store) > 10
    table.forget_due(18)
    assert not table.is_empty
    table.forget_due(19)
    assert table.is_empty
    table.save()
    assert not store


def _filled(keys: int) -> tuple[KeyedTable, CountingStore]:
    store = CountingStore()
    table = KeyedTable("t", store=store, cache=Cache())
    for start in range(0, keys, 5_000):
        for at in range(start, min(keys, start + 5_000)):
            table.put((at, 0), {"rows": [[at, "x"]]}, 10**6 + at)
        table.save()
    return table, store


def _touch(keys: int, touched: int, batches: int) -> tuple[CountingStore, list[int]]:
    """Changes some keys of a table of many. Returns the store, and the rows that each batch wrote."""
    table, store = _filled(keys)
    rng, written = np.random.default_rng(1), list[int]()
    store.bytes = store.rows = 0
    for batch in range(batches):
        before = store.rows
        for at in rng.choice(keys, touched, replace=False).tolist():
            table.put((at, 0), {"rows": [[at, batch]]}, 10**7 + batch)
        table.save()
        written.append(store.rows - before)
    return store, written


def test_twice_the_keys_cost_a_batch_no_more() -> None:
    small, small_rows = _touch(20_000, 200, 150)
    large, large_rows = _touch(40_000, 200, 150)
    assert large.bytes <= 1.3 * small.bytes
    assert sum(large_rows) <= 1.3 * sum(small_rows)
    # A few rows for each that changed, on the average and at most: no batch writes the table.
    assert sum(large_rows) <= 10 * 200 * 150
    assert max(large_rows) <= 40_000 / 4


def test_a_batch_reads_the_pages_of_its_keys() -> None:
    found = []
    for keys in (20_000, 40_000):
        table, store = _filled(keys)
        table = reopened(table, store, Cache())
        store.reads = 0
        for at in range(10):
            assert table.get((at * 1_000, 0)) is not None
        assert not len(table.find_due(10**6 - 1))
        found.append(store.reads)
    assert found[1] <= found[0] + 20
    assert found[1] <= 60


def test_due_keys_are_found_without_a_look_at_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    table, store = _filled(20_000)
    opened = []
    find = KeyedTable._find
    monkeypatch.setattr(KeyedTable, "_find", lambda table, key: opened.append(key) or find(table, key))
    assert table.find_due(10**6 + 9).list_pairs() == [(at, 0) for at in range(10)]
    assert len(opened) == 10
    for at in range(10):
        table.put((at, 0), None)
    table.save()
    opened.clear()
    # Keys that were due are not found again.
    assert not len(reopened(table, store, Cache()).find_due(10**6 + 9))
    assert not opened


def test_a_page_of_wakes_that_is_gone_or_damaged_is_named() -> None:
    table, store = _filled(20_000)
    (name,) = [name for name in store if name.endswith(":wakes")][:1]
    page = store[name]
    for damaged in (None, b"", page[:-1], page[:4] + b"\x09" + page[5:]):
        if damaged is None:
            store.remove(name)
        else:
            store[name] = damaged
        with pytest.raises(StateError, match=f"{name}: .*start with a new checkpoint|{name}: .* layout version"):
            list(reopened(table, store, Cache()).items())


STREAM = Stream.from_dict(
    {
        "stream": "uses",
        "event_id": "id",
        "event_time": "at",
        "fields": {"id": "bigint", "at": "timestamp", "card": "string"},
        "max_out_of_orderness": "0 seconds",
    }
)
RULES: dict[str, dict[str, Any]] = {
    "session": {"window": {"session": "1 hour"}, "when": "m > 1", "early": True},
    "suppress": {"window": "1 hour", "when": "true", "suppress": "1 hour"},
    "reset": {"window": "1 hour", "when": "m > 1", "reset_on_alert": True},
}
REVISE = {"window": "1 hour", "when": "m > 1", "late": "revise"}


class _Shard:
    """A shard that keeps its pages in a store."""

    def __init__(self, kind: str) -> None:
        rule = {
            "rule_id": "r",
            "stream": "uses",
            "group_by": ["card"],
            "measures": {"m": "count(*)"},
            **RULES.get(kind, REVISE),
        }
        self._changes = [RuleChange("insert", 1, "r", 1, "active", json.dumps(rule))]
        self.state, self.store, self.verdicts = _new_state(), CountingStore(), list[tuple[Any, ...]]()
        self._commits = 0

    def judge(self, cards: list[int], hours: int = 0) -> None:
        self._commits += 1
        count, at = len(cards), self._commits * 10**6 + hours * 3_600 * 10**6
        columns = {
            "id": from_values(STREAM.fields["id"], [at + number for number in range(count)]),
            "at": from_values(STREAM.fields["at"], [at] * count),
            "card": from_values(STREAM.fields["card"], [f"c{card}" for card in cards]),
        }
        events = Events(columns, np.full(count, self._commits, dtype=np.int64), "id", "at")
        self.state.begin(self.store)
        output = Evaluator(STREAM).process(
            self.state, Batch(events, marks=find_marks(events, events.commits), changes=self._changes)
        )
        self._changes = []
        self.state.drop_old()
        self.state.save()
        self.verdicts += [(alert.verdict, alert.key, alert.event_id, alert.measures) for alert in output.alerts]

    def reopen(self) -> None:
        self.state = _new_state()
        assert self.state.load(self.store)


def _new_state() -> ShardState:
    return ShardState(RuleBook(STREAM, {"uses": STREAM}), cache=Cache())


@pytest.mark.long
@pytest.mark.parametrize("kind", RULES)
def test_a_batch_of_few_keys_writes_little_of_a_large_state(kind: str) -> None:
    rng, written = np.random.default_rng(1), []
    for keys in (10_000, 20_000):
        shard = _Shard(kind)
        for _ in range(2 if kind == "reset" else 1):
            shard.judge(list(range(keys)))
        assert len(shard.verdicts) == (0 if kind == "session" else keys)
        shard.store.bytes = shard.store.rows = 0
        for _ in range(60):
            shard.judge(rng.choice(keys, 100, replace=False).tolist())
        assert set(shard.store) == state_pages(shard.state)
        written.append((shard.store.bytes, shard.store.rows))
    assert written[1][0] <= 1.3 * written[0][0]
    assert written[1][1] <= max(1.3 * written[0][1], 10 * 60 * 100)


def test_a_key_that_an_alert_emptied_stays_empty_in_later_batches() -> None:
    """Among fewer keys than were emptied, and among many more."""
    shard = _Shard("reset")
    for cards in (10, 10, 5, 200, 200, 200):
        shard.judge(list(range(cards)))
        shard.reopen()
    # Every second event of a card alerts.
    expected = Counter[str]()
    for card in range(200):
        came = 3 + (2 if card < 10 else 0) + (1 if card < 5 else 0)
        expected[f"c{card}"] = came // 2
    assert Counter(dict(verdict[1])["card"] for verdict in shard.verdicts) == expected


@pytest.mark.parametrize("kind", [*RULES, "revise"])
def test_keys_that_do_not_come_again_are_forgotten(kind: str) -> None:
    shard = _Shard(kind)
    for _ in range(2):
        shard.judge(list(range(3_000)))
    assert shard.state.estimate_counts().remembered == 3_000 * (2 if kind == "revise" else 1)
    for hours in (1_000, 2_000, 3_000, 4_000):
        shard.judge([-1, -1], hours)
    assert shard.state.estimate_counts().remembered <= 3
    assert set(shard.store) == state_pages(shard.state)
    assert sum(map(len, shard.store.values())) < 4_000

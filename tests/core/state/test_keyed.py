"""Keyed tables: what is put comes back, by pages that are written only where a key was touched."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookback.core.errors import StateError
from lookback.core.state import keyruns, pieces
from lookback.core.state.keyed import KeyedTable
from lookback.core.state.pieces import Pieces
from lookback.core.values.keys import Keys

HALF = st.integers(-(2**63), 2**63 - 1)


class DictStore(dict):
    """Pages in a dict; counts what is written."""

    written = 0

    def put(self, name: str, page: bytes) -> None:
        self.written += 1
        self[name] = page

    def remove(self, name: str) -> None:
        del self[name]


def reloaded(table: KeyedTable, store: DictStore) -> KeyedTable:
    table.save()
    return KeyedTable.from_json(table.name, table.to_json(), store)


@given(st.dictionaries(st.tuples(HALF, HALF), st.tuples(st.integers(0, 50), st.text()), max_size=30), st.data())
def test_values_and_wakes_come_back(values: dict[tuple[int, int], tuple[int, str]], data: st.DataObject) -> None:
    store = DictStore()
    table = KeyedTable("t", {"note": 1}, store)
    for key, (wake, text) in values.items():
        table.put(key, {"rows": [[wake, text]]}, wake)
    table = reloaded(table, store)
    gone = data.draw(st.sets(st.sampled_from(sorted(values)))) if values else set()
    for key in gone:
        table.put(key, None)
    table = reloaded(table, store)
    left = {key: value for key, value in values.items() if key not in gone}
    assert {key: table.get(key) for key in values} == {
        key: {"rows": [[left[key][0], left[key][1]]]} if key in left else None for key in values
    }
    assert table.notes == {"note": 1}
    assert table.is_empty == (not left)
    for watermark in (0, 25, 50):
        due = table.find_due(watermark).list_pairs()
        assert due == sorted(key for key, (wake, _) in left.items() if wake <= watermark)
        for key in due:
            table.put(key, table.get(key), left[key][0])
    assert bool(store) == bool(left)


@pytest.mark.long
@given(
    st.lists(st.sets(st.tuples(st.integers(-2, 2), st.integers(0, 1)), max_size=6), max_size=12), st.integers(1, 600)
)
def test_the_keys_that_may_have_a_value_are_all_that_have_one(batches: list[set[tuple[int, int]]], step: int) -> None:
    store, listed = DictStore(), [(low * step, high) for low in range(-3, 1_200) for high in (0, 1)]
    table = KeyedTable("t", store=store)
    keys = Keys(*(np.array(half, dtype=np.int64) for half in zip(*listed, strict=True)))
    assert not table.may_have(keys).any()
    for number, batch in enumerate(batches):
        for low, high in batch:
            table.put((low * step, high), None if table.get((low * step, high)) else number + 1)
        if number % 3:
            table = reloaded(table, store)
        may_have = table.may_have(keys).tolist()
        assert all(may for key, may in zip(listed, may_have, strict=True) if table.get(key) is not None)
        put = {(low * step, high) for batch in batches[: number + 1] for low, high in batch}
        assert not any(may for key, may in zip(listed, may_have, strict=True) if key not in put)


def test_only_the_page_of_a_touched_key_is_written() -> None:
    store = DictStore()
    table = KeyedTable("t", store=store)
    for at in range(1_000):
        table.put((at, 0), at)
    table = reloaded(table, store)
    store.written = 0
    table.put((7, 0), "other")
    table.put((8_000_000, 1), None)
    table.save()
    assert store.written == 1
    assert table.get((8, 0)) == 8


@given(st.data())
def test_a_damaged_page_is_refused_or_harmless(data: st.DataObject) -> None:
    store = DictStore()
    table = KeyedTable("t", store=store)
    for at in range(20):
        table.put((at << 8, 0), {"rows": [[at, "x"]]}, at)
    table.save()
    (name,) = store
    page = bytearray(store[name])
    for _ in range(data.draw(st.integers(1, 4))):
        page[data.draw(st.integers(0, len(page) - 1))] = data.draw(st.integers(0, 255))
    store[name] = bytes(page[: data.draw(st.integers(0, len(page)))])
    damaged = KeyedTable.from_json("t", table.to_json(), store)
    # Any other exception than a StateError fails the test.
    with contextlib.suppress(StateError):
        damaged.get((0, 0))


def test_a_page_that_is_gone_is_named() -> None:
    store = DictStore()
    table = KeyedTable("t", store=store)
    table.put((1, 2), [1])
    table.save()
    store.clear()
    with pytest.raises(StateError, match="table:t:1:0"):
        KeyedTable.from_json("t", table.to_json(), store).get((1, 2))


def test_a_page_of_any_size_is_kept_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "MAX_PIECE_BYTES", 10)
    store, counts = DictStore(), {}
    split = Pieces(store, counts)
    for page in (b"0123456789", b"0123456789a", b"x" * 35, b"0123456789ab", b"", b"y" * 20):
        split.put("page", page)
        assert Pieces(store, {}).get("page") == page
        assert all(len(part) <= 10 for part in store.values())
        assert len(store) == (1 + -(-len(page) // 10) if len(page) > 10 else 1)
    # Who has not read the page removes it by the counts that are kept with the state.
    Pieces(store, dict(counts)).remove("page")
    assert not store
    assert split.get("page") is None


def test_a_page_with_a_piece_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "MAX_PIECE_BYTES", 10)
    store = DictStore()
    Pieces(store, {}).put("page", b"x" * 35)
    store.remove("page/2")
    with pytest.raises(StateError, match=r"page: .* damaged .piece 3 of 4 is missing.; start with a new checkpoint"):
        Pieces(store, {}).get("page")


def test_a_value_longer_than_a_row_of_a_page_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyruns, "_MAX_ROW_CHARACTERS", 7)
    store = DictStore()
    table = KeyedTable("t", store=store)
    values = {(1, 1): {"rows": list(range(100))}, (1, 2): [], (2, 0): "ü" * 30}
    for key, value in values.items():
        table.put(key, value, 5)
    table = reloaded(table, store)
    assert {key: table.get(key) for key in values} == values
    assert table.find_due(5).list_pairs() == sorted(values)

"""Arbitrary and mutated bytes to everything that reads state or blocks: a StateError, or arrays that fit together."""

from __future__ import annotations

import datetime as dt
import json
import struct
import tracemalloc
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from fuzz_targets import STREAM, block, page, state
from hypothesis import given
from hypothesis import strategies as st

import lookback
from lookback.core.aggregation.runs import Run
from lookback.core.errors import StateError
from lookback.core.rules.rulebook import RuleBook
from lookback.core.state.shard import ShardState
from lookback.core.streams.alerts import Alert, AlertOrder, Failure, LateEvent
from lookback.core.streams.blocks import (
    COMMIT,
    narrow_columns,
    pack_alerts,
    pack_events,
    pack_failures,
    pack_late,
    unpack_events,
    unpack_late,
)
from lookback.core.values.columns import arrow_type
from lookback.core.values.pages import PAGE_VERSION, decode_page, encode_page

_INT64 = st.integers(-(2**63), 2**63 - 1)
_HEAD = struct.pack("<4sHH", b"LBpg", PAGE_VERSION, 1)
_TIME = dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc)


def _objects(items: list[Any]) -> np.ndarray:
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array


def _array_page(kind: int, rows: int, base: int, size: int, raw: bytes, packed: int | None = None) -> bytes:
    """A page of one array whose lengths need not be right."""
    compressed = pa.compress(raw, codec="zstd", asbytes=True) if raw else b""
    return (
        _HEAD
        + struct.pack("<BQqQQ", kind, rows, base, size, len(compressed) if packed is None else packed)
        + compressed
    )


@given(
    st.integers(0, 80) | st.integers(0, 255),
    st.integers(0, 40) | st.integers(0, 2**64 - 1),
    _INT64,
    st.integers(0, 320) | st.integers(0, 2**64 - 1),
    st.binary(max_size=80) | st.text(max_size=9).map(lambda text: json.dumps([text]).encode()),
    st.none() | st.integers(0, 2**64 - 1),
)
def test_an_array_that_is_not_what_it_says(
    kind: int, rows: int, base: int, size: int, raw: bytes, packed: int | None
) -> None:
    page(_array_page(kind, rows, base, size, raw, packed))


_ARRAYS = st.one_of(
    st.none(),
    st.lists(_INT64, max_size=4).map(lambda items: np.array(items, dtype=np.int64)),
    st.lists(st.integers(-(10**38), 10**38), max_size=4).map(_objects),
    st.lists(st.text(), max_size=4).map(_objects),
    st.lists(st.floats(), max_size=4).map(np.array),
    st.lists(st.booleans(), max_size=4).map(lambda items: np.array(items, dtype=bool)),
)


@given(st.lists(_ARRAYS, max_size=8))
def test_whole_pages_of_other_arrays_than_those_wanted(arrays: list[Any]) -> None:
    page(encode_page(arrays))


@given(st.lists(st.integers(-2, 3) | _INT64, min_size=1, max_size=3), st.lists(st.booleans(), max_size=2), st.data())
def test_values_in_columns_that_are_something_else(counts: list[int], is_json: list[bool], data: st.DataObject) -> None:
    arrays = data.draw(
        st.lists(_ARRAYS, max_size=5) | st.lists(_ARRAYS, min_size=2 * len(is_json), max_size=2 * len(is_json))
    )
    keys, texts = np.arange(len(counts)), _objects([""] * len(counts))
    page(encode_page([keys, keys * 0, keys, texts, np.array(counts), np.array(is_json, dtype=bool), *arrays]))


@pytest.mark.parametrize(
    "claim",
    [
        _array_page(3, 2**40, 0, 2**40, b""),
        _array_page(3, 2**27, 0, 2**30, b"\0" * 8),
        _array_page(18, 2**30, 0, 1, b"\0"),
        _array_page(17, 2**27, 0, 2**30, b"\0" * 8),
        _array_page(19, 2**30, 0, 2, b"[]"),
        _array_page(21, 2**30, 0, 2**30, b"\0"),
        struct.pack("<4sHH", b"LBpg", PAGE_VERSION, 65_535) + struct.pack("<BQqQQ", 21, 0, 0, 0, 0) * 10,
    ],
)
def test_a_page_that_claims_much_is_refused_before_anything_is_made_of_it(claim: bytes) -> None:
    tracemalloc.start()
    try:
        before = pa.total_allocated_bytes()
        with pytest.raises(StateError, match="page 7"):
            decode_page(claim, "page 7")
        assert tracemalloc.get_traced_memory()[1] < 2**20
        assert pa.total_allocated_bytes() - before < 2**20
    finally:
        tracemalloc.stop()


def test_counts_of_a_run_whose_sum_overflows_to_the_right_number() -> None:
    keys = np.arange(5, dtype=np.int64)
    counts = np.array([2**62, 2**62, 2**62, 2**62 - 1, 2], dtype=np.int64)
    crafted = encode_page([keys, keys, counts, np.array([7], dtype=np.int64), None])
    with pytest.raises(StateError, match="page 7"):
        Run.decode(crafted, "page 7")


def test_half_a_block_and_half_a_manifest_are_named() -> None:
    with pytest.raises(StateError, match="a block between two operators is damaged"):
        unpack_events(BLOCKS[0][:-200], STREAM)
    shard = ShardState(RuleBook(STREAM, {STREAM.name: STREAM}))
    manifest = json.dumps({"high": 1})
    with pytest.raises(StateError, match=r"manifest: the state of a shard is damaged \(KeyError: 'advanced'\)"):
        shard.load(_Store({"manifest": encode_page([_objects([manifest])])}))


def test_a_late_event_of_a_year_that_there_is_not_is_refused() -> None:
    block = bytearray(BLOCKS[2])
    time = int(_TIME.timestamp() * 1_000_000).to_bytes(8, "little")
    block[(at := block.index(time)) : at + 8] = (2**62).to_bytes(8, "little")
    with pytest.raises(StateError, match="a block between two operators is damaged"):
        unpack_late(bytes(block))


_JSON = st.recursive(
    st.none() | st.booleans() | _INT64 | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


def _saved() -> list[str]:
    """The texts of a shard that has a rule, runs, keyed tables and something suppressed."""
    harness = lookback.Harness(STREAM)
    rule = {"rule_id": "r1", "stream": "tx", "group_by": ["k"], "measures": {"m": "sum(a)"}, "when": "m > 1"}
    harness.rule({**rule, "window": {"lookback": "10 seconds", "resolution": "1 second"}, "suppress": "1 hour"})
    harness.rule({**rule, "rule_id": "r2", "window": {"session": "3 microseconds"}})
    harness.events([{"id": f"e{at}", "at": at, "k": "x", "a": "1.50"} for at in range(9)])
    store: dict[str, bytes] = {}
    harness._state.begin(_Store(store))
    harness._state.save()
    return [str(_first(decode_page(store[name], name))) for name in ("manifest", "rules")]


def _first(arrays: list[Any]) -> Any:
    return arrays[0][0]


class _Store:
    def __init__(self, pages: dict[str, bytes]) -> None:
        self.get, self.put, self.remove = pages.get, pages.__setitem__, pages.pop


SAVED = _saved()


@given(st.data())
def test_a_manifest_with_something_else_in_some_place(data: st.DataObject) -> None:
    texts = list(SAVED)
    at = data.draw(st.integers(0, len(texts) - 1))
    if data.draw(st.integers(0, 3)):
        texts[at] = json.dumps(_replaced(json.loads(texts[at]), data))
    else:
        texts[at] = data.draw(st.text() | st.just("[" * 100_000) | st.just("9" * 10_000))
    state(texts[: data.draw(st.sampled_from([2, 2, 2, 1, 0]))])


def _replaced(value: Any, data: st.DataObject) -> Any:
    if isinstance(value, dict) and value and data.draw(st.integers(0, 5)):
        key = data.draw(st.sampled_from(sorted(value)))
        if not data.draw(st.integers(0, 5)):
            return {name: each for name, each in value.items() if name != key}
        return {**value, key: _replaced(value[key], data)}
    if isinstance(value, list) and value and data.draw(st.integers(0, 5)):
        at = data.draw(st.integers(0, len(value) - 1))
        return [*value[:at], _replaced(value[at], data), *value[at + 1 :]]
    return data.draw(_JSON)


def _blocks() -> list[bytes]:
    fields = {name: arrow_type(type_) for name, type_ in STREAM.fields.items()}
    rows = {name: pa.array([None, None], type_) for name, type_ in fields.items()}
    rows |= {"id": pa.array(["a", "b"]), "at": pa.array([1, 2], fields["at"]), COMMIT: pa.array([1, 1])}
    rows["position"] = pa.array([0, None], pa.int64())
    alert = Alert(
        "0" * 32, 0, "raised", "r1", 1, "active", "high", "tx", {"k": "x"}, "a", _TIME, _TIME, _TIME, True, {"m": 1}, "m",
        ["a"], 1,
    )  # fmt: skip
    return [
        pack_events(pa.record_batch(rows), {"marks": [[1, 2]], "own": [], "future": []}),
        pack_events(narrow_columns(pa.record_batch(rows)), {"marks": [[1, 2]], "own": [], "future": []}),
        pack_alerts([(AlertOrder(1, 0, 1, "a", "r1", 1, '["x"]', 0), alert)] * 3),
        pack_late([LateEvent("tx", "a", _TIME, 1, 5, "recorded")]),
        pack_failures([Failure("r1", 1, 2, "a", (1, 2))]),
    ]


BLOCKS = _blocks()


@given(st.data())
def test_a_damaged_block_is_refused_or_harmless(data: st.DataObject) -> None:
    damaged = bytearray(data.draw(st.sampled_from(BLOCKS)))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    block(bytes(damaged[: data.draw(st.integers(0, len(damaged)))]))


@given(st.binary())
def test_any_bytes_are_no_block(data: bytes) -> None:
    block(data)
    page(data)
    page(_HEAD + data)

"""Blocks of events hold whole numbers in as few bytes as their range needs, and give back exactly what was packed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookback.core.streams.blocks import COMMIT, narrow_columns, pack_events, unpack_events
from lookback.core.streams.declaration import Stream
from lookback.core.streams.events import Events
from lookback.core.values.columns import arrow_type

TYPES = {
    "id": "bigint", "at": "timestamp", "tiny": "tinyint", "small": "smallint", "plain": "int", "day": "date",
    "money": "decimal(18,2)", "small_money": "decimal(5,1)", "wide_money": "decimal(38,3)", "ratio": "double", "part": "float",
    "flag": "boolean", "name": "string", "list": "array<int>",
}  # fmt: skip
STREAM = Stream.from_dict(
    {
        "stream": "s", "event_id": "id", "event_time": "at", "fields": TYPES, "max_out_of_orderness": "0 seconds",
        "allowed_lateness": "0 seconds",
    }
)  # fmt: skip
_EDGES = {8: (-128, 127), 16: (-(2**15), 2**15 - 1), 32: (-(2**31), 2**31 - 1), 64: (-(2**63), 2**63 - 1)}
_SPANS = (0, 1, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32)


@st.composite
def integers(draw: st.DrawFn, bits: int, rows: int, nulls: bool) -> list[int | None]:
    """Draws integers of a width whose range is at a bound of a narrower one, or anything."""
    low, high = _EDGES[bits]
    span = draw(st.sampled_from([span for span in _SPANS if span <= high - low] + [high - low]))
    least = draw(st.sampled_from([low, high - span, max(low, min(0, high - span))]))
    value = st.sampled_from([least, least + span]) | st.integers(least, least + span)
    return draw(st.lists(value | st.none() if nulls else value, min_size=rows, max_size=rows))


@st.composite
def batches(draw: st.DrawFn) -> pa.RecordBatch:
    """Draws rows of every type, sometimes as a slice of longer columns."""
    rows, skipped = draw(st.integers(0, 6)), draw(st.integers(0, 3))
    every = rows + skipped
    columns: dict[str, pa.Array[Any]] = {}
    for name, type_ in STREAM.fields.items():
        arrow = arrow_type(type_)
        nulls = name not in ("id", "at")
        if type_.is_integer or name in ("at", "day"):
            bits = type_.bits if type_.is_integer else 64 if name == "at" else 32
            stored = pa.array(
                draw(integers(bits, every, nulls)), {8: pa.int8(), 16: pa.int16(), 32: pa.int32()}.get(bits, pa.int64())
            )
            columns[name] = stored.view(arrow)
        elif type_.is_decimal:
            most = 10**type_.precision - 1
            number = st.sampled_from([0, 1, 255, 256, most, -most]) | st.integers(-most, most)
            numbers = draw(st.lists(number | st.none(), min_size=every, max_size=every))
            columns[name] = _to_decimals(numbers, arrow)
        else:
            values: dict[str, st.SearchStrategy[Any]] = {
                "ratio": st.floats(), "part": st.floats(width=32), "flag": st.booleans(), "name": st.text(max_size=3),
                "list": st.lists(st.integers(0, 9), max_size=2),
            }  # fmt: skip
            columns[name] = pa.array(draw(st.lists(values[name] | st.none(), min_size=every, max_size=every)), arrow)
    columns["position"] = pa.array(draw(integers(64, every, nulls=True)), pa.int64())
    columns[COMMIT] = pa.array(draw(integers(64, every, nulls=False)), pa.int64())
    return pa.RecordBatch.from_pydict(columns).slice(skipped)


def _to_decimals(numbers: list[int | None], type_: Any) -> pa.Array[Any]:
    words = b"".join((number or 0).to_bytes(16, "little", signed=True) for number in numbers)
    known = pa.array([number is not None for number in numbers], pa.bool_()).buffers()[1]
    return pa.Array.from_buffers(type_, len(numbers), [known, pa.py_buffer(words)])


def unpack(batch: pa.RecordBatch) -> Events:
    return unpack_events(pack_events(batch, {"own": [], "future": []}), STREAM)[0]


@given(batches())
def test_a_narrow_block_has_the_events_of_a_wide_one(batch: pa.RecordBatch) -> None:
    narrow, wide = unpack(narrow_columns(batch)), unpack(batch)
    assert narrow.commits.tolist() == wide.commits.tolist()
    assert narrow.commits.dtype == wide.commits.dtype
    assert list(narrow.columns) == list(wide.columns)
    for name, column in wide.columns.items():
        found = narrow.columns[name]
        assert (found.type, found.values.dtype) == (column.type, column.values.dtype)
        np.testing.assert_array_equal(found.is_known(), column.is_known())
        np.testing.assert_equal(found.to_stored_list(), column.to_stored_list())


@pytest.mark.parametrize(
    ("span", "width"), [(0, 8), (255, 8), (256, 16), (65_535, 16), (65_536, 32), (2**32 - 1, 32), (2**32, 64)]
)
def test_a_column_takes_the_bytes_that_its_range_needs(span: int, width: int) -> None:
    first = 1_700_000_000_000_000
    batch = pa.RecordBatch.from_pydict({"n": pa.array([first, None, first + span], pa.int64())})
    assert narrow_columns(batch).column("n").type.bit_width == width
    money = pa.array([first, None, first + span], pa.int64()).cast(pa.decimal128(38, 0)).cast(pa.decimal128(18, 0))
    assert narrow_columns(pa.RecordBatch.from_pydict({"n": money})).column("n").type.bit_width == width

"""Events as columns: what they keep of the expressions that were asked of them."""

from __future__ import annotations

import gc
import tracemalloc
from decimal import Decimal
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookback.core.expressions.compiling import Expression, compile_expression
from lookback.core.streams import events as module
from lookback.core.streams.declaration import Stream
from lookback.core.streams.eventrows import read_events
from lookback.core.streams.events import Events
from lookback.core.values.columns import Column, arrow_type, from_arrow, from_values
from lookback.core.values.types import BIGINT, STRING, TIMESTAMP, DataType, parse_type

ROWS = 20_000
SCHEMA = {"n": BIGINT, "text": STRING}
STREAM_OF = {
    ids: Stream.from_dict(
        {"stream": "s", "event_id": "id", "event_time": "at", "fields": {"id": ids, "at": "timestamp", "n": "bigint"}}
    )
    for ids in ("bigint", "string")
}


def make_events() -> Events:
    numbers = np.arange(ROWS)
    texts = np.array([f"t{number}" for number in numbers], dtype=object)
    columns = {"id": Column(BIGINT, numbers), "at": Column(TIMESTAMP, numbers), "n": Column(BIGINT, numbers)}
    return Events({**columns, "text": Column(STRING, texts)}, np.ones(ROWS, dtype=np.int64), "id", "at")


def asked(count: int) -> list[Expression]:
    """As many rules with a number and a text of their own each."""
    texts = [text for at in range(count) for text in (f"n + {at}", f"concat(text, '{at}')")]
    return [compile_expression(text, SCHEMA) for text in texts]


@pytest.mark.parametrize(("name", "number"), [("date", 4_000_000), ("timestamp", 2**62)])
def test_an_array_of_times_that_python_cannot_say_is_read(name: str, number: int) -> None:
    plain = parse_type(name)
    made = from_values(parse_type(f"array<{name}>"), [[number, None], None, [], [-number, 0]])
    numbers = pa.array([[number, None], None, [], [-number, 0]], pa.list_(pa.int32() if name == "date" else pa.int64()))
    read = from_arrow(numbers.cast(arrow_type(made.type)), made.type)
    assert read.to_stored_list() == made.to_stored_list()
    first = compile_expression("element_at(x, 1) > y", {"x": made.type, "y": plain})
    later = first.evaluate({"x": read, "y": from_values(plain, [0, 0, 0, 0])}, 4)
    assert later.to_stored_list([0, 3]) == [True, False]


@pytest.mark.long
def test_values_of_expressions_are_kept_up_to_a_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_VALUE_BYTES", 4 * 2**20)
    events, expressions = make_events(), asked(40)
    tracemalloc.start()
    try:
        for expression in expressions:
            events.value(expression)
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # All of them would be 40 numbers of 0.16 MB and 40 texts of about 1.3 MB.
    assert held < 8 * 2**20
    # The last one asked for is there, the first one is computed again.
    assert events.value(expressions[-1]) is events.value(expressions[-1])
    again = make_events()
    for expression in (expressions[0], expressions[1], expressions[-1]):
        assert events.value(expression).to_list() == again.value(expression).to_list()


def test_a_column_larger_than_the_limit_is_given_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_VALUE_BYTES", ROWS)
    events, (expression, *_) = make_events(), asked(1)
    assert events.value(expression) is not events.value(expression)
    assert events.value(expression).item(ROWS - 1) == ROWS - 1
    small = compile_expression("n > 5", SCHEMA)
    assert events.value(small) is events.value(small)


def arrived(rows: list[tuple[int, int, object]], ids: DataType) -> Events:
    """Events of these commits, times and ids, each with its place in the list."""
    columns = {"id": from_values(ids, [row[2] for row in rows]), "n": from_values(BIGINT, list(range(len(rows))))}
    times = np.array([row[1] for row in rows], dtype=np.int64)
    commits = np.array([row[0] for row in rows], dtype=np.int64)
    columns["position"] = from_values(BIGINT, [None] * len(rows))
    return Events.of({**columns, "at": Column(TIMESTAMP, times)}, commits, STREAM_OF[ids.name])


@given(st.data())
def test_events_of_several_blocks_come_in_order_of_arrival(data: st.DataObject) -> None:
    ids, draw_id = data.draw(
        st.sampled_from(
            [(BIGINT, st.integers(-2, 2)), (STRING, st.sampled_from(["", "b", "a", "\uffff", "\U0001f600"]))]
        )
    )
    row = st.tuples(st.integers(1, 4), st.integers(-2, 2), draw_id)
    rows = data.draw(st.lists(st.lists(row, max_size=6) | st.lists(row, max_size=6).map(sorted), max_size=4))
    with mock.patch.object(module, "_LONG_COMMIT_ROWS", data.draw(st.sampled_from([1, 2, 100]))):
        found = Events.concat_arrived([arrived(part, ids) for part in rows], STREAM_OF[ids.name])
    listed = list(zip(found.commits.tolist(), found.times.tolist(), found.id_column.to_list(), strict=True))
    assert listed == sorted(each for part in rows for each in part)


_ORDERED: list[tuple[str, st.SearchStrategy[Any]]] = [
    ("bigint", st.integers(-2, 2) | st.sampled_from([2**63 - 1, -(2**63)])),
    ("decimal(38,2)", st.sampled_from([Decimal("-0.01"), Decimal("0.01"), Decimal(10) ** 35, -(Decimal(10) ** 35)])),
    ("string", st.text("\0\1a\uffff\U0001f600", max_size=3)),
    ("date", st.dates()),
]


@given(st.data())
def test_what_orders_events_of_one_time_comes_before_their_ids(data: st.DataObject) -> None:
    (first, values), (second, others) = data.draw(st.lists(st.sampled_from(_ORDERED), min_size=2, max_size=2))
    fields = {"id": "string", "at": "timestamp", "p": first, "q": second}
    document = {"stream": "s", "event_id": "id", "event_time": "at", "fields": fields, "table": "/lake/s"}
    stream = Stream.from_dict({**document, "order_by": ["p", "q"]})
    row = st.fixed_dictionaries(
        {
            "arrival": st.integers(1, 2), "at": st.integers(0, 1), "p": st.none() | values, "q": st.none() | others,
            "id": st.sampled_from("ba"),
        }
    )  # fmt: skip
    rows = data.draw(st.lists(row, max_size=8))
    given = read_events(rows, stream, 1)[0]
    found = given.in_order_of_arrival()

    def place(row: dict[str, Any]) -> tuple[Any, ...]:
        nulls_first = [(False,) if row[name] is None else (True, row[name]) for name in "pq"]
        return row["arrival"], row["at"], *nulls_first, row["id"]

    expected = sorted(rows, key=place)
    assert found.columns["p"].to_list() == [each["p"] for each in expected]
    assert found.columns["q"].to_list() == [each["q"] for each in expected]
    assert found.id_column.to_list() == [each["id"] for each in expected]
    # A text by which shards' answers are brought together says the same.
    places = [(int(given.commits[at]), int(given.times[at]), given.sort_text(at)) for at in range(len(given))]
    assert [rows[at]["id"] for at in sorted(range(len(rows)), key=places.__getitem__)] == [r["id"] for r in expected]
    assert found.in_order_of_arrival() is found


def test_events_in_order_are_not_copied() -> None:
    events = arrived([(1, 5, 1), (1, 5, 2), (2, 4, 1)], BIGINT)
    assert events.in_order_of_arrival() is events
    assert arrived([(1, 5, 2), (1, 5, 1)], BIGINT).in_order_of_arrival().id_column.to_list() == [1, 2]

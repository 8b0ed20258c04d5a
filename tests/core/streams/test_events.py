"""Events as columns: what they keep of the expressions that were asked of them."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest

from lookback.core.expressions.compiling import Expression, compile_expression
from lookback.core.streams import events as module
from lookback.core.streams.events import Events
from lookback.core.values.columns import Column, arrow_type, from_arrow, from_values
from lookback.core.values.types import BIGINT, STRING, TIMESTAMP, parse_type

ROWS = 20_000
SCHEMA = {"n": BIGINT, "text": STRING}


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

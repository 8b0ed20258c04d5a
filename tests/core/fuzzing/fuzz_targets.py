"""One function per entrance for input from outside, which raises unless bad input is refused as documented.

Shared by the generated tests here (`test_fuzz_*.py`) and by the coverage-guided fuzzer (`fuzz_coverage.py`).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from typing import Any

import numpy as np

import lookback
from lookback.core.aggregation.runs import Run
from lookback.core.aggregation.sharedruns import SharedRun
from lookback.core.errors import (
    DurationError,
    EventError,
    ExpressionError,
    LookbackError,
    RuleError,
    SetupError,
    StateError,
    StreamError,
    TypeNameError,
)
from lookback.core.expressions.aggregatecalls import compile_aggregate
from lookback.core.expressions.compiling import compile_expression, compile_part
from lookback.core.operations.receivers import read_receivers
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.document import read_document
from lookback.core.rules.rulebook import RuleBook
from lookback.core.state.keyed import KeyedTable
from lookback.core.state.shard import ShardState
from lookback.core.streams.blocks import unpack_events, unpack_failures, unpack_late
from lookback.core.streams.declaration import Stream
from lookback.core.streams.eventrows import read_events
from lookback.core.values.columns import Column, from_values
from lookback.core.values.durations import parse_duration
from lookback.core.values.lists import Lists
from lookback.core.values.pages import decode_page, encode_page
from lookback.core.values.types import STRING, parse_type

# The fields of the generated cases, and one of every other type.
STREAM = Stream.from_dict(
    {
        "stream": "tx",
        "event_id": "id",
        "event_time": "at",
        "fields": {
            "id": "string", "at": "timestamp", "c": "int", "k": "string", "a": "decimal(18,2)", "n": "int", "d": "double",
            "b": "bigint", "t": "tinyint", "w": "decimal(38,10)", "f": "float", "ok": "boolean", "day": "date",
            "tags": "array<string>",
        },
        "max_out_of_orderness": "3 microseconds",
        "allowed_lateness": "6 microseconds",
    }
)  # fmt: skip
# Stored values (see DataType.storage) at the edges of each type; as many of each.
_EDGES: dict[str, list[Any]] = {
    "id": ["", "a", "ü\U0001f600", "\0", "%_\\"],
    "at": [0, -1, 2**53, -62135596800000000, 253402300799999999],
    "c": [0, 2**31 - 1, -(2**31), None, 1],
    "k": ["", None, "12", "-1e400", "2024-02-30"],
    "a": [0, 10**18 - 1, -(10**18) + 1, None, 1],
    "n": [-1, 0, None, 7, 2**31 - 1],
    "d": [0.0, float("nan"), float("inf"), None, 5e-324],
    "b": [0, 2**63 - 1, -(2**63), None, -1],
    "t": [0, 127, -128, None, 1],
    "w": [0, 10**38 - 1, -(10**38) + 1, None, 1],
    "f": [-0.0, float("nan"), float("-inf"), None, 1.5],
    "ok": [True, False, None, True, False],
    "day": [0, -719162, 2932896, None, 1],
    "tags": [[], None, [None], ["", "a"], ["12"] * 9],
}
EDGE_ROWS = 5
# How the engine says that it met a defect of its own, which costs one rule and nothing else. None may be met here.
_DEFECTS = (
    "the row cannot be read: ",
    "the document cannot be read: ",
    "judging failed with",
    "cannot be read any more",
)


def assert_no_defect(messages: Iterable[str]) -> None:
    """Raises for a defect that the engine has kept within one rule, or told as a refusal."""
    found = [message for message in messages if any(words in message for words in _DEFECTS)]
    assert not found, found


def edge_columns() -> dict[str, Column]:
    return {name: from_values(type_, _EDGES[name]) for name, type_ in STREAM.fields.items()}


def expression(text: str) -> None:
    """An accepted text runs over edges of every type without an exception, and means the same when read again."""
    try:
        compiled = compile_expression(text, STREAM.fields)
    except ExpressionError:
        return
    column = compiled.evaluate(edge_columns(), EDGE_ROWS)
    assert len(column.values) == EDGE_ROWS
    again = compile_expression(compiled.sql, STREAM.fields)
    assert again.type == compiled.type
    assert _outcomes(again.evaluate(edge_columns(), EDGE_ROWS)) == _outcomes(column)
    # The second reading may leave out parentheses within a chain, such as those of a between; nothing after that does.
    assert compile_expression(again.sql, STREAM.fields) == again


def _outcomes(column: Column) -> tuple[str, list[bool]]:
    """The values as they are stored, as text, in which NaN is like itself; and which rows have an error."""
    error = np.zeros(len(column), dtype=bool) if column.error is None else column.error
    return str(column.to_stored_list()), error.tolist()


def other_texts(text: str) -> None:
    """Aggregates, conjunctions, types, durations, documents."""
    for read, refusal in (
        (lambda: compile_aggregate(text, STREAM.fields), ExpressionError),
        (lambda: compile_part(text, STREAM.fields), ExpressionError),
        (lambda: parse_type(text), TypeNameError),
        (lambda: parse_duration(text), DurationError),
        (lambda: read_document(text), RuleError),
    ):
        with contextlib.suppress(refusal):
            read()


def document(value: Any) -> None:
    """Any value as a rule, as a stream or as a receiver. A rule that is not refused judges events without an exception."""
    with contextlib.suppress(StreamError):
        Stream.from_dict(value)
    with contextlib.suppress(SetupError):
        read_receivers({"receivers": [value]}, "notifiers.yml")
    try:
        compile_rule(value, STREAM)
    except RuleError:
        return
    harness = lookback.Harness(STREAM)
    try:
        harness.rule(json.loads(json.dumps(value, default=str)))
    except RuleError as refused:
        assert_no_defect(problem.message for problem in refused.problems)
        return
    harness.events([{"id": f"e{at}", "at": at, "n": at, "a": "1.50", "k": "x", "d": 0.5} for at in (1, 2, 9, 4)])
    # What ends windows and waits.
    harness.watermark(10**15)
    assert_no_defect(row.message for row in harness.errors)


def change(row: tuple[Any, ...]) -> None:
    """Any row of the rules table: it is obeyed or logged, and the book can be written and read again."""
    book = RuleBook(STREAM, {STREAM.name: STREAM})
    log, _ = book.apply([RuleChange(*row)], None)
    assert_no_defect(entry.message for entry in log)
    assert_no_defect(problems for _, problems in book.unreadable())
    text = book.to_json()
    again = RuleBook(STREAM, {STREAM.name: STREAM})
    again.load(text)
    assert again.to_json() == text


def events(rows: Any) -> None:
    """Any value as events."""
    with contextlib.suppress(EventError):
        found, _ = read_events(rows, STREAM, 1)
        found.in_order_of_arrival()


def harness_call(rule: Any, status: Any, version: Any, time: Any) -> None:
    """Any values as the arguments of a harness."""
    harness = lookback.Harness(STREAM)
    with contextlib.suppress(RuleError):
        harness.rule(rule, status, version)
    with contextlib.suppress(EventError):
        harness.watermark(time)
    harness.events([{"id": "a", "at": 1}])
    assert_no_defect(row.message for row in harness.errors)


def replay_call(rules: Any, rows: Any, stream: Any) -> None:
    """Any values as the arguments of a replay. A path of a stream may be of no file."""
    with contextlib.suppress(RuleError, EventError, StreamError, SetupError):
        assert_no_defect(row.message for row in lookback.replay(rules, rows, stream).errors)


def page(data: bytes) -> None:
    """Any bytes as a page, as a run, as lists and as keys of a keyed table."""
    with contextlib.suppress(StateError):
        decode_page(data, "page 7")
    with contextlib.suppress(StateError):
        run = Run.decode(data, "page 7")
        run.take(np.ones(len(run), dtype=bool)).encode()
    with contextlib.suppress(StateError):
        shared = SharedRun.decode(data, "page 7")
        shared.encode()
    with contextlib.suppress(StateError):
        lists = Lists.from_bytes(data, "page 7")
        for name in lists.names:
            lists.find_until(name, from_values(STRING, ["10.0.0.1"]))
        Lists.from_bytes(lists.to_bytes())
    for record in (
        [{}, 1, [[1, 0, 1, 1, 0, 0, 1, 0, 0, [1]]]],
        [{}, 1, [[1, 5, 1, 1, 0, 0, 1, 0, 0, []]]],
    ):
        store = _Pages({"keys:t:0": data, "table:t:1:0": data, "table:t:1:wakes": data})
        table = KeyedTable.from_json("t", record, store)
        with contextlib.suppress(StateError):
            table.get((0, 0))
        with contextlib.suppress(StateError):
            list(table.items())


def state(texts: list[str]) -> None:
    """Any texts as manifest and rules of a shard."""
    names = ("manifest", "rules")
    pages = {name: encode_page([_text(text)]) for name, text in zip(names, texts, strict=False)}
    loaded = ShardState(RuleBook(STREAM, {STREAM.name: STREAM}))
    with contextlib.suppress(StateError):
        loaded.load(_Pages(pages))


def block(data: bytes) -> None:
    """Any bytes as a block of events, of alerts or of failures."""
    with contextlib.suppress(StateError):
        found, _ = unpack_events(data, STREAM)
        found.in_order_of_arrival()
    with contextlib.suppress(StateError):
        unpack_late(data)
    with contextlib.suppress(StateError):
        unpack_failures(data)


def _text(text: str) -> np.ndarray:
    array = np.empty(1, dtype=object)
    array[0] = text
    return array


class _Pages(dict):
    def put(self, name: str, page: bytes) -> None:
        self[name] = page

    def remove(self, name: str) -> None:
        del self[name]


def yaml_text(text: str) -> None:
    """Any text as the YAML file of a stream or of a rule."""
    import tempfile
    from pathlib import Path

    from lookback.config import load_rule_document, load_stream

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "some.yml")
        file.write_text(text, encoding="utf-8", errors="surrogatepass")
        for load in (load_stream, load_rule_document):
            with contextlib.suppress(LookbackError):
                load(file)

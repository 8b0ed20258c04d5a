"""Lambdas over the items of arrays: three-valued logic, errors, the event's own fields, refusals, memory."""

from __future__ import annotations

from typing import Any

import pytest

from lookback.core.errors import ExpressionError
from lookback.core.expressions import lambdas
from lookback.core.expressions.compiling import compile_expression, find_items
from lookback.core.streams.declaration import Stream
from lookback.core.values.columns import from_values
from lookback.core.values.types import BOOLEAN, INT, STRING, array
from lookback.testing.harness import Harness

SCHEMA = {"a": array(INT), "texts": array(STRING), "i": INT, "ok": BOOLEAN, "step.ip": array(STRING)}
VALUES: dict[str, list[Any]] = {
    "a": [[1, 2], [None, 1], [None, 3], [], None],
    "texts": [["x", None, "y"], [], [None], None, ["z"]],
    "i": [1, 2, 3, 4, None],
    "ok": [True, False, None, True, True],
    "step.ip": [["p", "q"], [], ["p"], None, ["q"]],
}


def evaluate(text: str) -> list[Any]:
    expression = compile_expression(text, SCHEMA)
    column = expression.evaluate({name: from_values(SCHEMA[name], VALUES[name]) for name in expression.fields}, 5)
    return ["error" if column.error is not None and column.error[row] else column.item(row) for row in range(5)]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("exists(a, x -> x > 2)", [False, None, True, False, None]),
        ("forall(a, x -> x > 2)", [False, False, None, True, None]),
        ("not exists(a, x -> x > 2)", [True, None, False, True, None]),
        ("exists(a, x -> x is null)", [False, True, True, False, None]),
        ("exists(a, x -> null)", [None, None, None, False, None]),
        ("filter(a, x -> x > 1)", [[2], [], [3], [], None]),
        ("filter(a, x -> x is null or x = i)", [[1], [None], [None, 3], [], None]),
        ("transform(a, x -> x * 10)", [[10, 20], [None, 10], [None, 30], [], None]),
        ("transform(a, x -> x > i)", [[False, True], [None, False], [None, False], [], None]),
        ("size(filter(a, X -> x >= 1))", [2, 1, 1, 0, None]),
        ("forall(filter(a, x -> x is not null), y -> y < 3)", [True, True, False, True, None]),
        ("exists(step.ip, ip -> ip = 'q' and ok)", [True, False, False, None, True]),
        ("exists(texts, `the item` -> `the item` rlike '^[xz]$')", [True, False, None, None, True]),
        ("array_join(texts, ', ')", ["x, y", "", "", None, "z"]),
        ("array_join(texts, '', '?')", ["x?y", "", "?", None, "z"]),
        ("array_join(texts, null)", [None] * 5),
        ("array_join(transform(a, x -> cast(x as string)), '-')", ["1-2", "1", "3", "", None]),
        ("array_size(a)", [2, 2, 2, 0, None]),
    ],
)
def test_c12_4_lambdas_have_the_logic_of_spark(text: str, values: list[Any]) -> None:
    assert evaluate(text) == values


def test_c12_4_items_that_grow_too_long_together_are_an_error_of_their_event_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lookback.core.expressions.texts.MAX_JOINED_CHARACTERS", 5)
    monkeypatch.setitem(VALUES, "texts", [["x", "x"], ["x"], ["x"], None, []])
    assert evaluate("exists(texts, t -> repeat(t, 3) = 'xxx')") == ["error", True, True, None, False]
    assert evaluate("size(transform(texts, t -> repeat(t, 3)))") == ["error", 1, 1, None, 0]
    assert evaluate("size(filter(texts, t -> repeat(t, 3) = ''))") == ["error", 0, 0, None, 0]
    assert evaluate("i > 0 or exists(texts, t -> repeat(t, 3) = 'xxx')") == [True, True, True, True, None]


def test_c12_4_an_error_counts_unless_an_item_decided_before() -> None:
    arrays = [[2, 0], [0, 2], [9, 0], [None, 0], [2, 0, 2], [0, 2, 0]]
    for text, values in {
        "exists(a, x -> 4 / x = 2)": [True, "error", "error", "error", True, "error"],
        "forall(a, x -> 4 / x = 2)": ["error", "error", False, "error", "error", "error"],
        "filter(a, x -> 4 / x = 2)": ["error"] * 6,
        "transform(a, x -> 4 / x)": ["error"] * 6,
        "transform(a, x -> coalesce(1 / nullif(x, 0), 0) > 0)": [
            [True, False], [False, True], [True, False], [False, False], [True, False, True], [False, True, False],
        ],
    }.items():  # fmt: skip
        column = compile_expression(text, SCHEMA).evaluate({"a": from_values(array(INT), arrays)}, 6)
        error = column.error
        assert ["error" if error is not None and error[row] else column.item(row) for row in range(6)] == values, text


def test_c12_4_the_text_of_a_lambda_is_canonical_and_reads_fields_only() -> None:
    expression = compile_expression("EXISTS( A , x->(x>I) )", SCHEMA)
    assert expression.sql == "exists(a, x -> x > i)"
    assert expression.fields == {"a", "i"}
    assert expression.is_readable
    assert find_items(compile_expression("exists(step.ip, x -> x = 'p')", SCHEMA)) == {"step.ip": None}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("exists(a, x -> exists(texts, y -> y = 'a'))", "exists() is in another lambda; write it outside, or use array_contains() there"),
        ("exists(a, x -> size(filter(a, y -> y > x)) > 1)", "filter() is in another lambda; write it outside, or use array_contains() there"),
        ("exists(a, i -> i > 1)", "exists(): i is a field; give the items another name, such as item -> ..."),
        ("exists(i, x -> x > 1)", "exists() takes an array, but 'i' is of type int"),
        ("exists(a)", "exists() takes an array and a lambda with one variable, such as exists(a, x -> x > 1)"),
        ("forall(a, i > 1)", "forall() takes an array and a lambda with one variable, such as forall(a, x -> x > 1)"),
        ("transform(a, (x, at) -> x)", "transform() takes an array and a lambda with one variable, such as transform(a, x -> x + 1)"),
        ("filter(a, x -> x + 1)", "filter() needs a condition, but 'x + 1' is of type int; compare it with something"),
        ("transform(a, x -> texts)", "transform() makes an array of single values, but 'texts' is of type array<string>"),
        ("exists(a, x -> in_list(x, 'l'))", "in_list(): x is an item of an array; look up a field, or list the values with in"),
        ("exists(a, x -> z > 1)", "unknown field 'z'; the fields are a, i, ok, step.ip, texts"),
        ("exists(a, x -> x > 1) and x", "unknown field 'x'; the fields are a, i, ok, step.ip, texts"),
        ("length(texts, x -> x)", "a lambda (->) is not allowed; use it in exists(), forall(), filter() or transform()"),
        ("array_join(a, ',')", "array_join() joins texts, but 'a' is of type array<int>; use transform(a, x -> cast(x as string))"),
    ],
)  # fmt: skip
def test_c12_4_a_wrong_lambda_is_refused_with_a_remedy(text: str, problem: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        compile_expression(text, SCHEMA)
    assert caught.value.problems == [problem]


def test_c12_4_a_rule_asks_about_the_arrays_of_an_event_and_of_steps() -> None:
    stream = {
        "stream": "s", "event_id": "id", "event_time": "at",
        "fields": {"id": "string", "at": "timestamp", "k": "string", "args": "array<string>", "ip": "string"},
    }  # fmt: skip
    harness = Harness(Stream.from_dict(stream))
    parameters = {"flag": "%-enc%"}
    harness.rule(
        {
            "rule_id": "e",
            "stream": "s",
            "parameters": parameters,
            "when": "exists(args, x -> x ilike :flag and k = 'u')",
        }
    )
    where = "args is not null and forall(tries.ip, x -> x <> ip)"
    steps = [{"name": "tries", "where": "args is null", "at_least": 2}, {"name": "in", "where": where}]
    sequence = {"within": "1 hour", "steps": steps}
    harness.rule({"rule_id": "q", "stream": "s", "group_by": ["k"], "sequence": sequence})
    for number, (key, ip, args) in enumerate(
        [
            ("u", "1", None), ("u", "2", None), ("u", "3", ["a", "-ENCODED"]),
            ("v", "1", None), ("v", "2", None), ("v", "2", ["-enc", None]),
        ]
    ):  # fmt: skip
        harness.events([{"id": str(number), "at": number, "k": key, "ip": ip, "args": args}])
    assert [(alert.rule_id, alert.event_id) for alert in harness.alerts] == [("e", "2"), ("q", "2")]


def test_c12_4_many_items_are_evaluated_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lambdas, "MAX_ITEMS", 3)
    assert evaluate("exists(a, x -> x > 2)") == [False, None, True, False, None]
    column = from_values(array(INT), [list(range(10)), [1]])
    assert compile_expression("size(filter(a, x -> x > 2))", SCHEMA).evaluate({"a": column}, 2).to_list() == [7, 0]

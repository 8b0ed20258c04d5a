"""A call of in_list looks each value up once; every row gets what it gets alone, whatever was asked before."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookback.core.expressions.compiling import Expression, compile_expression
from lookback.core.values import lists as lists_module
from lookback.core.values.cache import SHARED_CACHE
from lookback.core.values.columns import Column, from_values
from lookback.core.values.listchanges import ListChange
from lookback.core.values.lists import Answers, Lists
from lookback.core.values.types import BIGINT, TIMESTAMP, DataType, parse_type

# What a column may hold, and texts by which it is looked up: of values and of NULL.
DRAWN: dict[str, list[Any]] = {
    "bigint": [0, 7, -7, 2**62, None],
    "string": ["a", "", "7", "é", "10.0.0.1", None],
    "boolean": [True, False, None],
    "decimal(9,2)": [Decimal("7.00"), Decimal("-0.50"), None],
    "timestamp": [0, 1_000_000, None],
}
CALLS = [
    "in_list(x, 'l')", "in_list(coalesce(cast(x as string), 'none'), 'l')", "in_list(x, 'gone')",
    "in_list(cast(cast(x as string) as int), 'l')", "in_list(concat(cast(x as string), cast(y as string)), 'l')",
]  # fmt: skip
LISTED = ["7", "none", "-0.50", "7.00", "true", "a", "77", "1970-01-01 00:00:00", ""]
LISTS = Lists.empty().apply([
    *(ListChange("insert", 1, "l", text, 5 if at % 2 else None) for at, text in enumerate(LISTED)),
    ListChange("insert", 1, "l", "10.0.0.0/8", 7, "cidr"),
])  # fmt: skip


def make_lists() -> Lists:
    """Lists that have not been asked yet."""
    return Lists(LISTS.commit, {name: replace(each, answers={}) for name, each in LISTS._lists.items()})


compile_call = functools.lru_cache(lambda call, kind: compile_expression(call, {"x": kind, "y": kind}))


@given(data=st.data())
def test_c11_3_every_row_gets_what_it_gets_alone(data: st.DataObject) -> None:
    asked = make_lists()
    with pytest.MonkeyPatch.context() as patch:
        # So few that some batches find their values, some add theirs, and some begin anew.
        patch.setattr(lists_module, "_MAX_ANSWERS", data.draw(st.sampled_from([1, 3, 250_000])))
        patch.setattr(lists_module, "_MIN_SHARE", data.draw(st.sampled_from([1, 8])))
        for _ in range(data.draw(st.integers(1, 5))):
            name, call = data.draw(st.sampled_from(sorted(DRAWN))), data.draw(st.sampled_from(CALLS))
            row = st.tuples(st.sampled_from(DRAWN[name]), st.sampled_from([4, 5, 7]))
            batch, kind = data.draw(st.lists(row, max_size=12)), parse_type(name)
            assert ask(asked, call, kind, batch) == [ask(make_lists(), call, kind, [row])[0] for row in batch]


def ask(lists: Lists, call: str, kind: DataType, rows: list[tuple[Any, int]]) -> list[tuple[bool | None, bool]]:
    """Returns per value and time the answer, None for NULL, and whether it is an error."""
    (membership,) = compile_call(call, kind).memberships
    column = from_values(kind, [value for value, _ in rows])
    found = membership.evaluate({"x": column, "y": column}, np.array([at for _, at in rows], dtype=np.int64), lists)
    wrong = np.zeros(len(rows), dtype=bool) if found.error is None else found.error
    return [(None if wrong[at] else found.item(at), bool(wrong[at])) for at in range(len(rows))]


def test_c11_3_a_value_is_asked_again_when_its_list_has_changed_and_not_before() -> None:
    (membership,) = compile_call("in_list(x, 'l')", BIGINT).memberships
    asked: list[list[Any]] = []

    def look_up(lists: Lists, *values: int | None) -> list[bool | None]:
        evaluated = replace(membership, text=_Recorded(membership.text, asked))
        return evaluated.evaluate(
            {"x": from_values(BIGINT, list(values))}, np.zeros(len(values), np.int64), lists
        ).to_list()

    lists = make_lists()
    assert look_up(lists, 7, 8, 7, None) == [True, False, True, None]
    assert look_up(lists, 8, 77, 7, 9) == [False, True, True, False]
    assert look_up(lists.select(["l"]), 9, 8) == [False, False]
    assert asked == [[None], [7, 8], [77, 9]]
    other = lists.apply([ListChange("insert", 2, "other", "8")])
    assert (look_up(other, 7, 8), len(asked)) == ([True, False], 3)
    changed = lists.apply([ListChange("insert", 2, "l", "8"), ListChange("delete", 2, "l", "7")])
    assert (look_up(changed, 7, 8), asked[3:]) == ([False, True], [[None], [7, 8]])


@dataclass(frozen=True)
class _Recorded:
    """An expression that notes for which values it was evaluated."""

    expression: Expression
    asked: list[list[Any]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.expression, name)

    def evaluate(self, columns: Mapping[str, Column], rows: int) -> Column:
        self.asked.append(columns["x"].to_list())
        return self.expression.evaluate(columns, rows)


def test_c11_3_answers_are_as_many_as_memory_allows() -> None:
    """Ids that never come again would fill it, and to sort in the few of a small batch would take longer than to ask."""
    answers, cached = Answers(), SHARED_CACHE.bytes

    def find(first: int, count: int) -> int:
        column = Column(BIGINT, np.arange(first, first + count))
        answers.find(column, lambda part: Column(TIMESTAMP, np.zeros(len(part), np.int64)))
        return 0 if answers._known is None else len(answers._known[0])

    assert [find(0, 200_000), find(200_000, 20_000), find(200_000, 50_000)] == [200_000, 200_000, 250_000]
    assert SHARED_CACHE.bytes - cached >= 250_000 * 32
    assert (find(250_000, 100_000), SHARED_CACHE.bytes) == (0, cached)
    assert find(0, 100) == 100
    SHARED_CACHE.forget(answers)

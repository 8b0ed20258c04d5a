"""Expressions without Spark: values, boundaries, NULLs, errors, refusals and canonical text."""

from __future__ import annotations

import hashlib
import ipaddress
import pickle
import random
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlglot.parsers.spark import SparkParser

from lookback.core.errors import ExpressionError
from lookback.core.expressions.aggregatecalls import AggregateCall, compile_aggregate
from lookback.core.expressions.compiling import Expression, compile_expression, find_comparisons, find_items, recompile
from lookback.core.expressions.forms import FORMS
from lookback.core.expressions.functions import AGGREGATE_ALIASES, AGGREGATE_ARGUMENTS, FUNCTIONS
from lookback.core.expressions.lambdas import LAMBDAS
from lookback.core.expressions.letters import change_to_lower, change_to_upper
from lookback.core.expressions.like import compile_like, split_pattern
from lookback.core.expressions.refusals import REMEDIES
from lookback.core.expressions.syntax import LookbackSql, is_bare_name
from lookback.core.values.columns import Column, from_values
from lookback.core.values.types import (
    BIGINT,
    BOOLEAN,
    DATE,
    DOUBLE,
    INT,
    STRING,
    TIMESTAMP,
    TINYINT,
    DataType,
    array,
    decimal,
    parse_type,
)

SCHEMA = {
    "amount": decimal(18, 2),
    "Payment_Type": STRING,
    "i": INT,
    "j": INT,
    "big": BIGINT,
    "tiny": TINYINT,
    "x": DOUBLE,
    "ok": BOOLEAN,
    "text": STRING,
    "day": DATE,
    "at": TIMESTAMP,
    "wide": decimal(38, 0),
    "total": decimal(28, 2),
    "failures.ip": array(STRING),
    "numbers": array(INT),
}
MAX_INT, MIN_INT = 2**31 - 1, -(2**31)
MAX_LONG, MIN_LONG = 2**63 - 1, -(2**63)
ERROR = "error"


def compiled(text: str) -> Expression:
    return compile_expression(text, SCHEMA)


def outcomes(column: Column) -> list[Any]:
    """Values as Python has them, None for NULL, "error" for an error."""
    error = column.error
    return [ERROR if error is not None and error[row] else column.item(row) for row in range(len(column))]


AGGREGATES = ", ".join(sorted([*AGGREGATE_ARGUMENTS, *AGGREGATE_ALIASES]))


def evaluated(expression: str, /, **values: list[Any]) -> list[Any]:
    """The outcomes of an expression over columns of stored values; dots in names are written as two underscores."""
    columns = {
        name: from_values(SCHEMA[name], items)
        for name, items in ((key.replace("__", "."), items) for key, items in values.items())
    }
    rows = len(next(iter(values.values()))) if values else 1
    return outcomes(compiled(expression).evaluate(columns, rows))


def value(text: str) -> Any:
    return evaluated(text)[0]


def refusals(text: str) -> list[str]:
    with pytest.raises(ExpressionError) as caught:
        compiled(text)
    return caught.value.problems


def aggregate_refusals(text: str) -> list[str]:
    with pytest.raises(ExpressionError) as caught:
        compile_aggregate(text, SCHEMA)
    return caught.value.problems


# What an expression is -----------------------------------------------------------------------------------------------


def test_an_expression_has_type_fields_and_canonical_text() -> None:
    expression = compiled("PAYMENT_TYPE   = 'CSH' and (amount)>1000")
    assert expression.sql == "Payment_Type = 'CSH' and amount > 1000"
    assert expression.type == BOOLEAN
    assert expression.fields == {"Payment_Type", "amount"}


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("((i = 1))", "i = 1"),
        ("I == 1 -- a comment\n", "i = 1"),
        ("i <> 1", "i != 1"),
        ("i + (j + 1)", "i + (j + 1)"),
        ("(i + j) + 1", "i + j + 1"),
        ("(i + j) * 2", "(i + j) * 2"),
        ("i - (-5)", "i - -5"),
        ("-(5)", "-(5)"),
        ("- -5", "-(-5)"),
        ("ok AND (i = 1 OR j = 2)", "ok and (i = 1 or j = 2)"),
        ("ok and (i = 1 and j = 2)", "ok and i = 1 and j = 2"),
        ("NOT (ok OR i IS NULL)", "not (ok or i is null)"),
        ("i NOT IN (1,2)", "not i in (1, 2)"),
        ("i BETWEEN 1 AND 2", "i >= 1 and i <= 2"),
        ("i is not null", "i is not null"),
        ("not i is null", "i is not null"),
        ("nvl(i, 0)", "coalesce(i, 0)"),
        ("text || 'a' || 'b'", "concat(concat(text, 'a'), 'b')"),
        ("CAST(i AS Decimal( 5 , 1 ))", "cast(i as decimal(5,1))"),
        ("i::bigint", "cast(i as bigint)"),
        ('"it\'s"', "'it\\'s'"),
        ("'it''s'", "'it\\'s'"),
        ("'\\\\'", "'\\\\'"),
        ("1.50", "1.50"),
        (".5", "0.5"),
        ("5.", "5."),
        ("1e3", "1000.0e0"),
        ("case when ok then 1 end", "case when ok then 1 end"),
        ("at + interval 90 seconds", "at + interval '90' second"),
        ("failures.IP", "failures.ip"),
        ("text like 'a\\\\_%'", "text like 'a\\\\_%'"),
    ],
)
def test_canonical_text_is_stable_and_reads_back(text: str, canonical: str) -> None:
    expression = compiled(text)
    assert expression.sql == canonical
    assert compiled(canonical) == expression


# Every word that the parser knows, words that Spark reserves, and names that are no words.
_PARSERS = (SparkParser.FUNCTIONS, SparkParser.FUNCTION_PARSERS, SparkParser.NO_PAREN_FUNCTION_PARSERS)
NAMES = {
    word.lower()
    for word in (*LookbackSql.Tokenizer.KEYWORDS, *(w for known in _PARSERS for w in known))
    if word.isidentifier()
}
NAMES |= {
    "anti",
    "semi",
    "user",
    "time",
    "some",
    "check",
    "only",
    "leading",
    "both",
    "current_date",
    "current_user",
    "cluster",
}
NAMES |= {"Null", "FROM", "True", "a b", "a`b", "`", "a.b", "a..b", ".a", "a.b.c.d.e", "from.null", "1", "1.5", "\u00fc", "\u0130", "a\nb",
          "a'b", 'a"b', "a\\", "--", "/*", "${x}", ":x", "{x}", "\0", "\U0001f600", "x" * 200}  # fmt: skip
EVERYWHERE = (
    "{0} + {0} * -{0} > 1 and not {0} in ({0}, 2) or {0} is null or abs({0}) = 1 "
    "or case {0} when 1 then {0} else {0} end = if({0} = 1, {0}, 2)"
)


def test_every_name_of_a_field_is_printed_so_that_it_is_read_again() -> None:
    assert len(NAMES) > 300
    # Every third word: each kind of word has many.
    for name in sorted(NAMES)[::3]:
        schema = {name: INT}
        expression = compile_expression(EVERYWHERE.format(in_backticks(name)), schema)
        assert expression.fields == {name}
        assert recompile(expression.sql, schema) == expression
        if not is_bare_name(name):
            assert expression.is_readable
            call = compile_aggregate("max({0}) filter (where {0} > 1)".format(in_backticks(name)), schema)
            assert compile_aggregate(call.sql, schema) == call
            at = compile_expression(f"{in_backticks(name)} - interval 1 day is null", {name: TIMESTAMP})
            assert recompile(at.sql, {name: TIMESTAMP}) == at


def in_backticks(name: str) -> str:
    return f"`{name.replace('`', '``')}`"


def test_a_name_that_is_read_without_backticks_is_printed_without() -> None:
    # The text of a condition is part of what names its state.
    for name in (
        "amount",
        "Date",
        "timestamp",
        "user",
        "key",
        "value",
        "rows",
        "count",
        "status",
        "type",
        "map",
        "show",
    ):
        assert compile_expression(f"{name} = 1", {name: INT}).sql == f"{name} = 1"


@pytest.mark.parametrize("text", ["`null` = 1", "`true`", "`current_date` is null", "`interval` = 1", "`CASE` = 1"])
def test_a_field_named_like_a_value_is_the_field(text: str) -> None:
    name = text.split("`")[1]
    type_ = BOOLEAN if name == "true" else INT
    columns = {name: from_values(type_, [1, 0, None])}
    expected = [False, False, True] if "is null" in text else [True, False, None]
    again = recompile(compile_expression(text, {name: type_}).sql, {name: type_})
    assert outcomes(again.evaluate(columns, 3)) == expected


@pytest.mark.parametrize(
    ("one", "other"), [("i = 1", "i = 1.0"), ("1.5", "1.50"), ("i - (j - 1)", "i - j - 1"), ("'a'", "'A'")]
)
def test_expressions_that_differ_have_different_text(one: str, other: str) -> None:
    assert compiled(one).sql != compiled(other).sql


def test_the_comparisons_of_a_condition_are_the_operands_of_its_outermost_and() -> None:
    condition = compiled(
        "i < 2 * j and (text = 'a' and not (i = j)) and (i > 1 or j > 1) and i between 3 and j and i <=> 5"
    )
    found = [(each.left.sql, each.symbol, each.right.sql) for each in find_comparisons(condition)]
    assert found == [("i", "<", "2 * j"), ("text", "=", "'a'"), ("i", ">=", "3"), ("i", "<=", "j")]
    assert [each.turn().symbol for each in find_comparisons(condition)] == [">", "=", "<=", ">="]


def test_the_sides_of_a_comparison_have_values_that_can_be_compared() -> None:
    (comparison,) = find_comparisons(compiled("amount = i"))
    columns = {"amount": from_values(decimal(18, 2), [150, 200]), "i": from_values(INT, [2, 2])}
    sides = [side.evaluate(columns, 2).values.tolist() for side in (comparison.left, comparison.right)]
    assert sides == [[150, 200], [200, 200]]


@pytest.mark.parametrize(
    ("text", "items"),
    [
        (
            "element_at(a.ip, 1) = ip and element_at(b.n, 1) > element_at(b.n, 2)",
            {"a.ip": {1}, "ip": None, "b.n": {1, 2}},
        ),
        ("element_at(a.ip, -1) = element_at(a.ip, 2)", {"a.ip": {-1, 2}}),
        ("array_contains(a.ip, ip) or ip = element_at(a.ip, 1)", {"a.ip": None, "ip": None}),
        ("element_at(a.n, element_at(b.n, 1)) = 1 and a.count > 1", {"a.n": None, "b.n": {1}, "a.count": None}),
    ],
)
def test_items_that_a_condition_reads_of_arrays(text: str, items: dict[str, set[int] | None]) -> None:
    schema = {"ip": STRING, "a.ip": array(STRING), "a.n": array(INT), "b.n": array(INT), "a.count": BIGINT}
    assert find_items(compile_expression(text, schema)) == items


def test_expressions_pickle() -> None:
    expression = compiled("amount > 1000 and text like 'a%'")
    again = pickle.loads(pickle.dumps(expression))
    assert again == expression
    assert again.evaluate(
        {"amount": from_values(decimal(18, 2), [100_001]), "text": from_values(STRING, ["ab"])}, 1
    ).item(0)


def test_no_rows_give_an_empty_column() -> None:
    for text in ("amount / 3", "1", "null", "text like 'a%'", "coalesce(i, j, 1)", "numbers", "total * 2"):
        expression = compiled(text)
        columns = {name: from_values(SCHEMA[name], []) for name in expression.fields}
        assert len(expression.evaluate(columns, 0)) == 0, text


def test_values_have_the_storage_of_their_type() -> None:
    column = compiled("total * 2").evaluate({"total": from_values(decimal(28, 2), [100])}, 1)
    assert column.values.dtype == object
    assert column.item(0) == Decimal("2.00")


def test_columns_without_null_or_error_have_no_masks() -> None:
    columns = {"i": from_values(INT, [1, 2]), "ok": from_values(BOOLEAN, [True, False])}
    for text in ("i > 1 and ok", "i / 2 > 1", "case when ok then i else 0 end", "i in (1, 2)", "coalesce(i, 0)"):
        column = compiled(text).evaluate(columns, 2)
        assert column.null is None, text
        assert column.error is None, text


def test_inputs_are_left_as_they_were() -> None:
    numbers = from_values(INT, [3, None, MIN_INT])
    kept = numbers.values.copy()
    for text in ("greatest(i, 0)", "-i", "case when i > 0 then i else 0 end", "abs(i)", "i in (1, 3)"):
        compiled(text).evaluate({"i": numbers}, 3)
    assert np.array_equal(numbers.values, kept)


# Types ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "type_"),
    [
        ("1", "int"),
        ("2147483647", "int"),
        ("2147483648", "bigint"),
        ("-2147483648", "int"),
        ("-9223372036854775808", "bigint"),
        ("9223372036854775808", "decimal(19,0)"),
        ("1.5", "decimal(2,1)"),
        ("0.05", "decimal(2,2)"),
        ("1e3", "double"),
        ("i / 2", "double"),
        ("i div 2", "bigint"),
        ("tiny + tiny", "tinyint"),
        ("tiny + big", "bigint"),
        ("amount + 1", "decimal(19,2)"),
        ("amount + i", "decimal(19,2)"),
        ("amount * 2", "decimal(20,2)"),
        ("amount * amount", "decimal(37,4)"),
        ("amount / amount", "decimal(38,20)"),
        ("wide * wide", "decimal(38,0)"),
        ("amount / 3", "decimal(22,6)"),
        ("amount % 7", "decimal(3,2)"),
        ("round(amount, 1)", "decimal(18,1)"),
        ("ceil(amount)", "decimal(17,0)"),
        ("coalesce(i, amount)", "decimal(18,2)"),
        ("if(ok, i, 1.5)", "decimal(11,1)"),
        ("coalesce(i, x)", "double"),
        ("null", "null"),
        ("case when ok then day else at end", "timestamp"),
    ],
)
def test_types_are_those_of_spark(text: str, type_: str) -> None:
    assert compiled(text).type == parse_type(type_) if type_ != "null" else DataType("null")


# Errors stay in their rows -------------------------------------------------------------------------------------------


def test_integer_overflow_is_an_error_of_its_row() -> None:
    assert evaluated("i + 1", i=[MAX_INT, 1, None]) == [ERROR, 2, None]
    assert evaluated("i - 1", i=[MIN_INT, 1]) == [ERROR, 0]
    assert evaluated("i * 2", i=[2**30, 2**30 - 1]) == [ERROR, 2**31 - 2]
    assert evaluated("-i", i=[MIN_INT, MAX_INT]) == [ERROR, MIN_INT + 1]
    assert evaluated("abs(i)", i=[MIN_INT, -1]) == [ERROR, 1]
    assert evaluated("big + 1", big=[MAX_LONG, MAX_LONG - 1]) == [ERROR, MAX_LONG]
    assert evaluated("big * big", big=[3_037_000_500, 3_037_000_499]) == [ERROR, 3_037_000_499**2]
    assert evaluated("big div -1", big=[MIN_LONG, MAX_LONG]) == [ERROR, -MAX_LONG]
    assert evaluated("tiny + tiny", tiny=[64, 63, -64]) == [ERROR, 126, -128]


def test_division_by_zero_is_an_error_but_null_is_null() -> None:
    assert evaluated("1 / i", i=[0, 2, None]) == [ERROR, 0.5, None]
    assert evaluated("i % j", i=[7, -7, 7, None], j=[0, 3, -3, 0]) == [ERROR, -1, 1, None]
    assert evaluated("i div j", i=[7, -7, 7], j=[2, 2, 0]) == [3, -3, ERROR]
    assert evaluated("x / 0", x=[1.0, float("nan")]) == [ERROR, ERROR]
    assert evaluated("amount / 0", amount=[100]) == [ERROR]


def test_a_null_before_an_error_hides_it_and_an_error_before_a_null_does_not() -> None:
    assert evaluated("i + 1 / j", i=[None, 1], j=[0, 0]) == [None, ERROR]
    assert evaluated("1 / j + i", i=[None, 1], j=[0, 0]) == [ERROR, ERROR]


def test_and_or_evaluate_from_left_to_right_as_far_as_needed() -> None:
    failing = "1 / i = 1"
    for left, and_, or_ in [(True, ERROR, True), (False, False, ERROR), (None, ERROR, ERROR)]:
        assert evaluated(f"ok and {failing}", ok=[left], i=[0]) == [and_]
        assert evaluated(f"ok or {failing}", ok=[left], i=[0]) == [or_]
        assert evaluated(f"{failing} and ok", ok=[left], i=[0]) == [ERROR]
        assert evaluated(f"{failing} or ok", ok=[left], i=[0]) == [ERROR]


def test_logic_has_three_values() -> None:
    values = [True, False, None]
    rows = [(a, b) for a in values for b in values]
    columns = {"ok": from_values(BOOLEAN, [a for a, _ in rows]), "no": from_values(BOOLEAN, [b for _, b in rows])}
    schema = {"ok": BOOLEAN, "no": BOOLEAN}
    conjunction = compile_expression("ok and no", schema).evaluate(columns, 9).to_list()
    disjunction = compile_expression("ok or no", schema).evaluate(columns, 9).to_list()
    assert conjunction == [False if False in row else None if None in row else True for row in rows]
    assert disjunction == [True if True in row else None if None in row else False for row in rows]


def test_a_branch_that_is_not_taken_cannot_fail() -> None:
    assert evaluated("case when i = 0 then 0 else 10 / i end", i=[0, 5, None]) == [0.0, 2.0, None]
    assert evaluated("if(i > 0, 1 / i, null)", i=[0, 2]) == [None, 0.5]
    assert evaluated("coalesce(j, 1 / i)", i=[0, 0], j=[7, None]) == [7.0, ERROR]
    assert evaluated("1 / nullif(i, 0)", i=[0, 4]) == [None, 0.25]
    assert evaluated("i in (1, j, 1 / i)", i=[1, 0], j=[5, 5]) == [True, ERROR]


def test_a_failing_condition_fails_the_case() -> None:
    assert evaluated("case when 1 / i > 0 then 1 else 2 end", i=[0, 1, None]) == [ERROR, 1, 2]


# Decimals ------------------------------------------------------------------------------------------------------------


def test_decimals_are_exact() -> None:
    assert evaluated("amount + 0.01", amount=[10**18 - 1]) == [Decimal("10000000000000000.00")]
    assert value("0.1 + 0.2 = 0.3") is True
    assert evaluated("amount * amount = 99999999999999999800000000000000.0001", amount=[10**18 - 1]) == [True]
    assert evaluated("amount / 3", amount=[100, -100]) == [Decimal("0.333333"), Decimal("-0.333333")]
    assert evaluated("round(amount, 1)", amount=[125, -125, 124]) == [Decimal("1.3"), Decimal("-1.3"), Decimal("1.2")]


def test_a_decimal_that_does_not_fit_is_an_error() -> None:
    top = 10**38 - 1
    assert evaluated("wide + 1", wide=[top, top - 1]) == [ERROR, Decimal(top)]
    assert evaluated("wide * 10", wide=[10**37, 10**36]) == [ERROR, Decimal(10**37)]
    assert evaluated("cast(i as decimal(3,1))", i=[99, 100]) == [Decimal("99.0"), ERROR]


def test_decimals_compare_across_scales() -> None:
    assert evaluated("amount = 10", amount=[1000, 1001]) == [True, False]
    assert evaluated("amount > 9.995", amount=[1000, 999]) == [True, False]
    assert evaluated("total >= 10000000", total=[10**9, 10**9 - 1, 10**27]) == [True, False, True]
    assert evaluated("amount < x", amount=[100], x=[1.5]) == [True]


# Floats --------------------------------------------------------------------------------------------------------------


def test_nan_equals_nan_and_is_the_greatest() -> None:
    nan = float("nan")
    assert evaluated("x = x", x=[nan, 0.0]) == [True, True]
    assert evaluated("x > 1e300", x=[nan, float("inf")]) == [True, True]
    assert evaluated("x = -0e0", x=[0.0]) == [True]
    assert str(evaluated("greatest(x, 1e0)", x=[nan])[0]) == "nan"
    assert evaluated("least(x, 1e0)", x=[nan]) == [1.0]


def test_casts_of_doubles_at_the_edge() -> None:
    assert evaluated("cast(x as bigint)", x=[2.0**63, 1e19, -1.9, float("nan")]) == [MAX_LONG, ERROR, -1, ERROR]
    assert evaluated("cast(x as int)", x=[2147483647.0, 2147483647.9, 2147483648.0, -2147483648.9]) == [
        MAX_INT,
        MAX_INT,
        ERROR,
        MIN_INT,
    ]
    assert evaluated("cast(x as decimal(5,2))", x=[0.005, 999.994, 999.995, float("inf")]) == [
        Decimal("0.01"), Decimal("999.99"), ERROR, None,
    ]  # fmt: skip


# Texts, times, arrays ------------------------------------------------------------------------------------------------


def test_casts_of_texts() -> None:
    texts = ["12", " -7 ", "+1", "1.5", "", "2147483648", None]
    assert evaluated("cast(text as int)", text=texts) == [12, -7, 1, ERROR, ERROR, ERROR, None]
    assert evaluated("try_cast(text as int)", text=texts) == [12, -7, 1, None, None, None, None]
    assert evaluated("cast(text as decimal(5,2))", text=["1e2", ".005", "1000", "x", "٣", "1e-99999999"]) == [
        Decimal("100.00"), Decimal("0.01"), ERROR, ERROR, Decimal("3.00"), Decimal("0.00"),
    ]  # fmt: skip
    assert evaluated("cast(text as boolean)", text=["Yes", " f ", "2"]) == [True, False, ERROR]


def test_substring_counts_from_one_or_from_the_end() -> None:
    assert [value(f"substring('abc', {start}, 2)") for start in (-5, -4, -3, -1, 0, 1, 3, 4)] == [
        "", "a", "ab", "c", "ab", "ab", "c", "",
    ]  # fmt: skip
    assert (value("left('abc', 2)"), value("right('abc', 2)"), value("right('abc', -1)")) == ("ab", "bc", "")


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("", [""], ["a"]),
        ("%", ["", "a\nb"], []),
        ("_", ["a", "😀", "\n"], ["", "ab"]),
        ("a%", ["a", "ab"], ["ba", ""]),
        ("%a", ["a", "ba"], ["ab"]),
        ("a%a", ["aa", "aba"], ["a"]),
        ("%a%a%", ["aa", "xaxa"], ["a"]),
        ("a_%c", ["abc", "abbc"], ["ac"]),
        ("50\\%", ["50%"], ["50x"]),
        ("\\_\\\\", ["_\\"], ["a\\"]),
        ("a.c", ["a.c"], ["abc"]),
        ("%ab%ab", ["abab", "abxab"], ["ab", "aab"]),
    ],
)
def test_like(pattern: str, yes: list[str], no: list[str]) -> None:
    matches = compile_like(split_pattern(pattern, "\\"))
    assert all(matches(text) for text in yes)
    assert not any(matches(text) for text in no)


def test_like_does_not_backtrack() -> None:
    # A backtracking matcher would try about 10^40 ways.
    assert compile_like(split_pattern("%a" * 20 + "%b_", "\\"))("a" * 5_000) is False


@given(
    st.lists(st.tuples(st.sampled_from([0, 0, 0, 0, 0, 0, 1, 2, None]), st.none() | st.integers(0, 3)), min_size=1, max_size=40),
    st.sampled_from([
        "n = 1 and 6 / m > 2", "n = 1 and 6 / m > 2 and m <> 3", "n <> 1 or 6 / m > 2", "n = 0 or m = 1 or 6 / m = 3",
        "(n = 1 or n = 2) and (m is null or 6 / m < 4)", "n > 0 and not (m = 1 and 6 / (m - 1) > 1)", "null and 6 / m > 2 or n = 2",
    ]),
)  # fmt: skip
def test_a_row_gets_the_value_that_it_has_alone(rows: list[tuple[int | None, int | None]], condition: str) -> None:
    """The operands of `and` and `or` are evaluated without the rows that are settled, if most are."""
    expression = compile_expression(condition, {"n": INT, "m": INT})

    def evaluate_rows(chosen: list[tuple[int | None, int | None]]) -> list[tuple[Any, bool]]:
        columns = {
            name: from_values(INT, list(values)) for name, values in zip("nm", zip(*chosen, strict=True), strict=True)
        }
        found = expression.evaluate(columns, len(chosen))
        return [(found.item(row), found.error is not None and bool(found.error[row])) for row in range(len(chosen))]

    assert evaluate_rows(rows) == [value for row in rows for value in evaluate_rows([row])]


LIKE_PIECES = st.sampled_from(
    ["%", "%", "_", "a", "b", "ab", "AB", "\u0130", "\u212a", "k", "\\\\%", "\0", "\U0001f600"]
)
LIKE_PATTERNS = st.lists(LIKE_PIECES, max_size=5).map("".join)


@given(
    st.lists(LIKE_PATTERNS, min_size=2, max_size=14),
    st.lists(st.none() | st.text("aAbBkK%_\0\u0130\u212a\U0001f600", max_size=5), min_size=1, max_size=8),
    st.sampled_from(["like", "ilike"]),
    st.sampled_from([1, 300]),
)
def test_patterns_that_are_tried_together_match_what_each_one_matches(
    patterns: list[str], texts: list[str | None], word: str, times: int
) -> None:
    """Texts that repeat are tested once; more than eight patterns of one kind are looked for at once."""
    quoted = [f"'{pattern}'" for pattern in patterns]

    def match(condition: str, column: Column) -> Column:
        return compile_expression(condition, {"x": STRING}).evaluate({"x": column}, len(column))

    joined = match(f"x {word} any ({', '.join(quoted)})", from_values(STRING, texts * times))
    alone = [match(f"x {word} {each}", from_values(STRING, list(texts))).is_true().tolist() for each in quoted]
    assert joined.is_true().tolist() == [any(hits) for hits in zip(*alone, strict=True)] * times
    assert joined.is_known().tolist() == [text is not None for text in texts] * times


def test_times_are_utc_and_before_the_epoch_round_down() -> None:
    assert evaluated("hour(at)", at=[-1, 0, 3_600_000_000]) == [23, 0, 1]
    assert evaluated("year(at)", at=[-1, 0]) == [1969, 1970]
    assert [moment.isoformat() for moment in evaluated("date_trunc('hour', at)", at=[-1])] == [
        "1969-12-31T23:00:00+00:00"
    ]
    assert evaluated("at >= timestamp '1970-01-01 00:00:01'", at=[999_999, 1_000_000]) == [False, True]
    assert evaluated("at + interval '10' minutes >= '1970-01-01 00:10:00'", at=[-1, 0]) == [False, True]
    assert evaluated("dayofweek(day)", day=[0, 3]) == [5, 1]
    assert evaluated("unix_micros(at + interval '1' day)", at=[MAX_LONG, 0]) == [ERROR, 86_400_000_000]


def test_arrays() -> None:
    arrays = [["a", "b"], ["a", None], [], None]
    assert evaluated("array_contains(failures.ip, 'b')", failures__ip=arrays) == [True, None, False, None]
    assert evaluated("size(failures.ip)", failures__ip=arrays) == [2, 2, 0, None]
    assert evaluated("element_at(failures.ip, -1)", failures__ip=arrays) == ["b", None, ERROR, None]
    assert evaluated("element_at(numbers, i)", numbers=[[1, 2]] * 4, i=[0, 2, 3, -2]) == [ERROR, 2, ERROR, 1]


def test_in_with_null_is_unknown_unless_found() -> None:
    assert evaluated("i in (1, null)", i=[1, 2, None]) == [True, None, None]
    assert evaluated("i not in (1, 2)", i=[1, 3, None]) == [False, True, None]
    assert evaluated("text in ('a', 'b')", text=["a", "c", None]) == [True, False, None]


def test_null_safe_equality_is_never_null() -> None:
    assert evaluated("i <=> j", i=[1, None, None, 1], j=[1, None, 1, 2]) == [True, True, False, False]


# Refusals ------------------------------------------------------------------------------------------------------------


def test_all_problems_are_found_at_once() -> None:
    assert refusals("amuont > 1 and sum(i) > 3 and rand() < 1 and text + 1 = 2") == [
        "unknown field 'amuont'; did you mean 'amount'?",
        "sum() is an aggregate; an aggregate belongs in measures",
        "rand() is not allowed; it gives another value each time, so a replay would differ",
        "'text + 1': '+' takes numbers, got string and int; cast to a number, or join texts with ||",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the expression is empty"),
        ("-- nothing", "the expression is empty"),
        ("i = 1; j = 2", "write one expression, without a semicolon"),
        ("select 1", "a query is not allowed; an expression sees the fields of one event"),
        ("i in (select 1)", "a query is not allowed; an expression sees the fields of one event"),
        ("sum(i) over ()", "a window function (over) is not allowed; the rule's window and measures do that"),
        ("x -> x", "a lambda (->) is not allowed; use it in exists(), forall(), filter() or transform()"),
        ("count(*)", "count() is an aggregate; an aggregate belongs in measures"),
        ("kurtosis(i) > 3", f"kurtosis() is an aggregate that rules cannot use; the aggregates, which belong in measures, are {AGGREGATES}"),
        ("any(ok)", "any() is an aggregate; an aggregate belongs in measures"),
        ("current_timestamp()", "current_timestamp() is not allowed; it reads a clock, so a replay would differ; use the event's time"),
        ("at < current_date", "current_date() is not allowed; it reads a clock, so a replay would differ; use the event's time"),
        ("upper(text) ilike 'a%'", "'ilike' of 'upper(text)' changes the case twice; leave upper() out"),
        ("text ilike upper(text)", "the pattern of 'ilike' must be a literal text; use contains(), startswith() or endswith()"),
        ("text not like any ('a', 'b')", "\"text NOT LIKE ANY ('a', 'b')\" is easily misread; where none of the patterns matches, write not (x like any (...))"),
        ("text ilike all ()", "'text ILIKE ALL ()': ilike all takes patterns in parentheses, such as ('a%', 'b%')"),
        ("lag(text) <> text", "lag() is not allowed; for the value before an event write {measure: last(x), window: {lookback: 1 day, delay: 1 microsecond}} in measures"),
        ("lead(i) > 1", "lead() is not allowed; no event sees a later one; write a sequence whose last step is the later event"),
        ("lwoer(text)", "function lwoer() is not allowed; did you mean lower()?"),
        ("numbers[0]", "[ ] is not allowed; use element_at(), which counts from 1"),
        ("10L", "10L: numbers take no suffix here; write cast(10 as bigint)"),
        ("i = 1 = ok", "put parentheses around the comparisons in 'i = 1 = ok'"),
        ("text || 'a' + 'b'", "put parentheses around the sum in \"text || 'a' + 'b'\""),
        ("i", None),
        ("amount > 'a'", "\"amount > 'a'\" compares decimal(18,2) and string; cast one of them, or drop the quotes of a number"),
        ("i and ok", "'and' needs a condition, but 'i' is of type int; compare it with something"),
        ("year(text)", "year() takes a date, but 'text' is of type string; declare the field as date"),
        ("lower(i)", "lower() takes a string, but 'i' is of type int; cast it"),
        ("lower(upper(text))", "lower() of 'upper(text)' changes the case twice; once is enough"),
        ("-wide", "'-wide': Spark cuts a decimal(38,0) to 34 digits there; write 0 - x, or cast to at most 34 digits"),
        ("9" * 5_000, "a number has more than 38 digits"),
        (".0.", "0.0. is not a number"),
        ("-(.0.e1)", "0.0.e1 is not a number"),
        ("lower()", "lower() takes 1 argument, got 0"),
        ("case when ok then 1 else 'a' end", "\"case when ok then 1 else 'a' end\" mixes int and string; cast them to one type"),
        ("at - at", "'at - at': '-' takes numbers, got timestamp and timestamp; subtract unix_micros() of one from that of the other"),
        ("cast(text as double)", "cast from string to double is not supported; cast to a decimal"),
        ("cast(text as timestamp)", "cast from string to timestamp is not supported; write a literal such as timestamp '2026-01-31 12:00:00', or declare the field as timestamp"),
        ("at > 'tomorrow'", "'tomorrow' is not a valid timestamp; write it like '2026-01-31 12:00:00'"),
        ("text like text", "the pattern of 'like' must be a literal text; use contains(), startswith() or endswith()"),
        ("text like 'a!b' escape '!'", "the pattern 'a!b' has '!' before something other than %, _ or '!'; double it"),
        ("interval '1' day", "an interval by itself is not allowed; add it to a timestamp or take it from one"),
        ("at + interval '999999999' days > at", "\"INTERVAL '999999999' DAYS\" is longer than 106,751,991 days; write a shorter interval"),
        ("at + interval '1' month", "\"INTERVAL '1' MONTH\": write an interval as a whole number and a unit, such as interval '10' minutes"),
        ("round(x)", "round() of a double depends on the Java version; round cast(x as decimal(p,s))"),
        ("'a' 'b'", "adjacent strings are not allowed; join them with concat()"),
        ("i = null = null", "put parentheses around the comparisons in 'i = NULL = NULL'"),
        ("null = null", "'null = null' compares null and null; compare single values, and test for NULL with 'is null'"),
        ("i & 1", "& is not allowed; write 'and' for conditions"),
    ],
)  # fmt: skip
def test_refusals_name_the_remedy(text: str, problem: str | None) -> None:
    if problem is None:
        compiled(text)
    else:
        assert refusals(text) == [problem]


def test_unknown_fields_far_from_any_name_list_the_fields() -> None:
    with pytest.raises(ExpressionError, match=r"^unknown field 'zzz'; the fields are a, b$"):
        compile_expression("zzz = 1", {"b": INT, "a": INT})
    with pytest.raises(ExpressionError, match=r"^field 'A' could be any of a, A; "):
        compile_expression("A = 1", {"a": INT, "A": INT})


@pytest.mark.parametrize(
    "text",
    ["(", "i +", "i = ", "'open", "i ) (", "case when", "i between 1", "/* open", "i i", "+i", "`open", "i in ()"],
)
def test_what_cannot_be_read_is_one_sentence(text: str) -> None:
    (problem,) = refusals(text)
    assert "\n" not in problem
    assert "\x1b" not in problem


def test_length_and_depth_have_limits() -> None:
    assert compiled("i" + " " * 99_999).sql == "i"
    (long,) = refusals("i" + " " * 100_000)
    assert long == (
        "the expression has 100,001 characters, more than 100,000; split it into smaller ones "
        "(limits.expression_characters of the stream)"
    )
    assert compiled("(" * 100 + "i" + ")" * 100).sql == "i"
    deep = [
        "the expression is nested deeper than 100 levels; split it into smaller ones (limits.expression_levels of the stream)"
    ]
    for text in (
        "(" * 101 + "i" + ")" * 101, "not " * 101 + "ok", "- " * 101 + "i", " + ".join("i" * 102),
        "abs(" * 101 + "i" + ")" * 101, "case when ok then " * 101 + "i" + " end" * 101, "(" * 5_000, "not " * 2_000 + "ok",
    ):  # fmt: skip
        assert refusals(text) == deep, text[:40]


def test_a_long_chain_of_conditions_is_not_deep() -> None:
    text = " or ".join(f"i = {number}" for number in range(900))
    assert evaluated(text, i=[899, 900]) == [True, False]


@pytest.mark.parametrize(
    ("address", "holds"),
    [
        ("10.1.2.3", True), ("::ffff:10.1.2.3", True), ("::FFFF:A01:203", True), ("11.0.0.0", False),
        ("10.255.255.255", True), ("2001:db8::1", True), ("2001:db9::", False), ("192.0.2.7", True), ("192.0.2.8", False),
        ("10.1.2", None), ("10.1.2.3 ", None), ("010.1.2.3", None), ("", None), ("host", None), (None, None),
    ],
)  # fmt: skip
def test_an_address_is_in_a_range_of_either_version(address: str | None, holds: bool | None) -> None:
    text = "cidr_match(text, '10.0.0.0/8', '2001:db8::/32', '192.0.2.7')"
    assert evaluated(text, text=[address]) == [holds]


def test_ranges_of_addresses_agree_with_the_standard_library() -> None:
    chance = random.Random(5)
    for _ in range(300):
        version, bits = chance.choice([(4, 32), (6, 128)])
        base, length = chance.getrandbits(bits), chance.randrange(bits + 1)
        network = ipaddress.ip_network((base, length), strict=False)
        # Half of them near the range's edges.
        edges = [int(network[0]), int(network[-1]), int(network[0]) - 1, int(network[-1]) + 1]
        numbers = [number for number in [*edges, chance.getrandbits(bits)] if 0 <= number < 2**bits]
        address_of = ipaddress.IPv4Address if version == 4 else ipaddress.IPv6Address
        addresses = [address_of(number) for number in numbers]
        found = evaluated(f"cidr_match(text, '{network}')", text=[str(each) for each in addresses])
        assert found == [each in network for each in addresses], network


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("cidr_match(text, text)", "cidr_match() takes ranges as literal texts, such as '10.0.0.0/8', got 'text'; for many ranges, or those that change, keep a list and ask in_list()"),
        ("cidr_match(text, '10.0.*')", "cidr_match(): '10.0.*' is not an address or a range of addresses; write 10.0.0.0/16"),
        ("cidr_match(text, null)", "cidr_match() takes ranges as literal texts, such as '10.0.0.0/8', got 'null'; for many ranges, or those that change, keep a list and ask in_list()"),
    ],
)  # fmt: skip
def test_a_wrong_range_is_refused_with_a_remedy(text: str, remedy: str) -> None:
    assert refusals(text) == [remedy]


@pytest.mark.parametrize("name", sorted([*FUNCTIONS, *FORMS, *LAMBDAS]))
def test_every_function_refuses_too_many_arguments_of_a_wrong_kind(name: str) -> None:
    assert refusals(f"{name}(numbers, ok, at, numbers)")


def test_columns_of_any_schema_are_only_read_where_named() -> None:
    column = compiled("i = 1").evaluate({"i": from_values(INT, [1])}, 1)
    assert column.to_list() == [True]


# Aggregates ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("text = DECLINED", "put texts in single quotes: 'DECLINED'"),
        ("GERMANY = Payment_Type", "put texts in single quotes: 'GERMANY'"),
        ("text not in (10.0.0.5, 'a')", "put texts in single quotes: '10.0.0.5'"),
        ("text in (tex, FAILED)", "unknown field 'tex'; did you mean 'text'?; put texts in single quotes: 'tex'"),
        ("text in ('a', FAILED)", "put texts in single quotes: 'FAILED'"),
        ("contains(lower(text), decl)", "put texts in single quotes: 'decl'"),
        ("case text when DECLINED then 1 end = 1", "put texts in single quotes: 'DECLINED'"),
        ("text = New York and ok", "put texts in single quotes: 'New York'"),
        ("text = a@b.com", "put texts in single quotes: 'a@b.com'"),
        ("text like DECL%", "put texts in single quotes: 'DECL%'"),
        ("text = \u201cDECLINED\u201d", "put texts in straight single quotes: 'DECLINED'"),
        ("day >= 2024-1-31", "put dates in single quotes: '2024-01-31'"),
        ("at >= 2024-01-31 10:00", "put texts in single quotes: '2024-01-31 10:00'"),
    ],
)
def test_a_text_without_quotes_is_shown_with_them(text: str, remedy: str) -> None:
    assert remedy in "; ".join(refusals(text))


@pytest.mark.parametrize(
    "text", ["i > nope", "nope = 'CSH'", "i = 1 j", "text = 'x' y", "nope and text = 'a'", "text = now()", "text = 5L"]
)
def test_no_quotes_are_advised_where_no_text_is_meant(text: str) -> None:
    assert "quotes:" not in "; ".join(refusals(text))


@pytest.mark.parametrize(
    ("text", "function", "argument", "condition", "sql"),
    [
        ("COUNT( * )", "count", None, None, "count(*)"),
        ("sum(AMOUNT)", "sum", "amount", None, "sum(amount)"),
        ("(count(distinct text))", "count_distinct", "text", None, "count(distinct text)"),
        ("avg(i) FILTER (WHERE amount > 1000)", "avg", "i", "amount > 1000", "avg(i) filter (where amount > 1000)"),
        ("stddev_samp(cast(x as decimal(18,2)))", "stddev_samp", "cast(x as decimal(18,2))", None, "stddev_samp(cast(x as decimal(18,2)))"),
        ("max(at)", "max", "at", None, "max(at)"),
        ("mean(i)", "avg", "i", None, "avg(i)"),
        ("std(i)", "stddev_samp", "i", None, "stddev_samp(i)"),
        ("percentile(i, 0.90)", "percentile(0.9)", "i", None, "percentile(i, 0.9)"),
        ("median(x)", "median", "x", None, "median(x)"),
        ("count_if(i > 1 or ok)", "count", None, "i > 1 or ok", "count(*) filter (where i > 1 or ok)"),
        ("count_if(i > 1) filter (where ok or j = 1)", "count", None, "(ok or j = 1) and i > 1", "count(*) filter (where (ok or j = 1) and i > 1)"),
        ("every(ok)", "min", "ok", None, "min(ok)"),
        ("any(ok)", "max", "ok", None, "max(ok)"),
        ("min(x)", "min", "x", None, "min(x)"),
    ],
)  # fmt: skip
def test_aggregates(text: str, function: str, argument: str | None, condition: str | None, sql: str) -> None:
    call = compile_aggregate(text, SCHEMA)
    assert isinstance(call, AggregateCall)
    assert call.function == function
    assert (call.argument.sql if call.argument else None) == argument
    assert (call.filter.sql if call.filter else None) == condition
    assert call.sql == sql
    assert compile_aggregate(call.sql, SCHEMA) == call


TEACHING = (
    "a measure is one aggregate such as sum(amount) or count(*) filter (where amount > 1000); "
    "give each aggregate its own measure and combine them in when"
)


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("sum(amount) / count(*)", [f"'SUM(amount) / COUNT(*)' is not an aggregate: {TEACHING}"]),
        ("amount", [f"'amount' is not an aggregate: {TEACHING}"]),
        ("last_value(i)", ["last_value() is not an aggregate that can be used: write last(x) in measures"]),
        ("kurtosis(i)", [f"kurtosis() is not an aggregate that can be used: {TEACHING}; the aggregates are {AGGREGATES}"]),
        ("percentile(i)", ["percentile() takes a field and a number from 0 to 1, such as 0.95; got 1"]),
        ("percentile(i, 95)", ["percentile() takes a number from 0 to 1, such as 0.95, as its second argument; got '95'"]),
        ("percentile(i, j)", ["percentile() takes a number from 0 to 1, such as 0.95, as its second argument; got 'j'"]),
        ("median(text)", ["median() takes a number, got string; cast it"]),
        ("every(i)", ["bool_and() takes a condition, got int; compare it with something"]),
        ("count_if(*)", ["count_if(*) is not allowed; name a field"]),
        ("sum(x)", ["sum() takes exact numbers, since sums of a double depend on order; write cast(x as decimal(18,2)) or as needed"]),
        ("avg(text)", ["avg() takes an integer or a decimal, got string; cast it"]),
        ("min(numbers)", ["min() takes single values, got array<int>"]),
        ("count(distinct numbers)", ["count(distinct) takes single values, got array<int>"]),
        ("count(distinct null)", ["count(distinct) takes single values, got null"]),
        ("sum(distinct i)", ["sum(distinct ...) is not supported; only count takes distinct"]),
        ("sum(*)", ["sum(*) is not allowed; name a field"]),
        ("sum(i) filter (i > 1)", ["filter ( needs the word where; write filter (where i ...)"]),
        ("count(*) FILTER (not ok)", ["FILTER ( needs the word where; write filter (where not ...)"]),
        ("count(i, j)", ["count() takes one argument, got 2"]),
        ("last(i, true)", ["last() takes one argument, got 2; to leave NULLs out add filter (where x is not null)"]),
        ("count(distinct i, numbers)", ["count(distinct) takes single values, got array<int>"]),
        ("count(distinct i, *)", ["count(distinct *) is not allowed; name a field"]),
        ("count(distinct (i, j))", ["a list in parentheses is not allowed; only 'in' takes one"]),
        ("max(sum(i))", ["sum() is an aggregate; an aggregate belongs in measures"]),
        ("sum(i) over (partition by j)", ["a window function (over) is not allowed; the rule's window does that"]),
        ("sum(nope) filter (where i)", ["unknown field 'nope'; the fields are " + ", ".join(sorted(SCHEMA)), "filter takes a condition, but 'i' is of type int; compare it with something"]),
    ],
)  # fmt: skip
def test_aggregate_refusals(text: str, problems: list[str]) -> None:
    assert aggregate_refusals(text) == problems


@pytest.mark.parametrize(
    "text",
    [
        "ok is null = ok", "ok = ok is null = ok", "i not between 1 and 2 is false", "i in (1) is true", "not ok is null = ok",
        "ok is null <=> ok", "ok is null is not distinct from ok", "ok is not distinct from ok is null", "ok <=> ok < ok",
        "text like 'a' is null", "ok is true in (ok)", "ok is null between ok and ok",
    ],
)  # fmt: skip
def test_a_chain_that_spark_refuses_or_groups_otherwise_needs_parentheses(text: str) -> None:
    with pytest.raises(ExpressionError, match="put parentheses around the comparisons"):
        compile_expression(text, SCHEMA)


def test_a_comparison_may_be_tested_without_parentheses_as_in_spark() -> None:
    assert compile_expression("i = j is null", SCHEMA).sql == "(i = j) is null"
    assert compile_expression("(ok is null) = ok", SCHEMA).sql == "(ok is null) = ok"


def test_small_letters_and_capitals_do_not_depend_on_the_version_of_python() -> None:
    """The digest is the same on Python 3.10 to 3.12; tests/spark compares each character with Spark."""
    characters = [chr(code) for code in range(1, 0x110000) if not 0xD800 <= code < 0xE000]
    changed = "\n".join(f"{change_to_lower(each)}\0{change_to_upper(each)}" for each in characters)
    assert hashlib.sha256(changed.encode()).hexdigest().startswith("46311785cf34b7f2")


# What is written in place of each function that a message names a remedy for.
REMEDIED = {
    "ilike": "text ilike 'a'", "decimal": "cast(i as decimal(9,2))", "cardinality": "size(numbers)", "nvl2": "case when i is not null then j else 0 end",
    "decode": "case when i = 1 then 'a' end", "iff": "if(ok, i, j)",
}  # fmt: skip


def test_what_a_message_says_to_use_can_be_used() -> None:
    assert REMEDIED.keys() == REMEDIES.keys()
    for text in REMEDIED.values():
        compile_expression(text, SCHEMA)
    # A cast that has a function of its own says what the cast says.
    for text in ("to_date(text)", "date(text)", "cast(text as date)"):
        with pytest.raises(
            ExpressionError, match=r"cast from string to date is not supported; .* declare the field as date"
        ):
            compile_expression(text, SCHEMA)
    assert compile_expression("to_date(at)", SCHEMA).sql == "cast(at as date)"
    assert compile_expression("pmod(-7, 3)", {}).evaluate({}, 1).item(0) == 2

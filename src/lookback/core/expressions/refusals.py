"""Explains why a name, a function or a construct is not allowed in an expression, and what to write instead."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from sqlglot import exp

from lookback.core.expressions.forms import FORMS
from lookback.core.expressions.functions import AGGREGATE_ALIASES, AGGREGATE_ARGUMENTS, FUNCTIONS
from lookback.core.expressions.lambdas import LAMBDAS
from lookback.core.expressions.like import quote_text
from lookback.core.expressions.syntax import LookbackSql, quote_node
from lookback.core.values.suggestions import find_nearest, suggest
from lookback.core.values.types import DataType

_CLOCKS = {
    "current_timestamp",
    "current_date",
    "current_time",
    "localtimestamp",
    "now",
    "unix_timestamp",
    "curdate",
    "getdate",
    "current_timezone",
}
_RANDOM = {"rand", "randn", "random", "uuid", "randstr", "uniform", "shuffle", "monotonically_increasing_id"}
_OTHER_AGGREGATES = {
    "any_value", "approx_count_distinct", "collect_list", "array_agg", "percentile_approx",
    "approx_percentile", "skewness", "kurtosis", "corr", "covar_samp", "covar_pop", "listagg", "string_agg", "try_sum", "try_avg",
}  # fmt: skip
REMEDIES = {
    "ilike": "use x ilike 'a%'",
    "decimal": "use cast(x as decimal(p,s))",
    "cardinality": "use size()",
    "nvl2": "use case when",
    "decode": "use case when",
    "iff": "use if()",
}
_BEFORE = "for the value before an event write {measure: last(x), window: {lookback: 1 day, delay: 1 microsecond}} in measures"
# Window functions of SQL, and what a rule has in their place.
WINDOW_REMEDIES = {
    "lag": _BEFORE,
    "prev": _BEFORE,
    "previous": _BEFORE,
    "lead": "no event sees a later one; write a sequence whose last step is the later event",
    "first_value": "write first(x) in measures",
    "last_value": "write last(x) in measures",
    **dict.fromkeys(("countdistinct", "count_distinct", "nunique"), "write count(distinct x) in measures"),
}
_NUMBER_SUFFIX = re.compile(r"([0-9]+|[0-9]*\.[0-9]+|[0-9]+\.)(L|S|Y|D|F|BD)", re.IGNORECASE | re.ASCII)
_SUFFIX_TYPES = {"L": "bigint", "S": "smallint", "Y": "tinyint", "D": "double", "F": "float", "BD": "decimal(18,2)"}

_CURLY = "\u201c\u201d\u201e\u2018\u2019\u201a\u00b4"
# An address or version, and a date, both written without quotes.
_DOTTED = re.compile(r"[0-9]+(\.[0-9]+){2,}", re.ASCII)
# The function that tests whether a value is in a list.
IN_LIST = "in_list"


def explain_unknown_field(name: str, schema: Mapping[str, DataType], *, beside_text: bool = False) -> str:
    """Explains why a name is not a field.

    `beside_text`: the name is compared with a field of texts or times, so it may be a text without quotes.
    """
    problem, bare = _explain_no_field(name, schema), name.strip(_CURLY)
    if bare != name:
        return f"{problem}; put texts in straight single quotes: {quote_text(bare)}"
    if beside_text and problem.startswith("unknown field"):
        return f"{problem}; put texts in single quotes: {quote_text(name)}"
    return problem


def _explain_no_field(name: str, schema: Mapping[str, DataType]) -> str:
    if suffixed := _NUMBER_SUFFIX.fullmatch(name):
        number, suffix = suffixed.groups()
        return f"{name}: numbers take no suffix here; write cast({number} as {_SUFFIX_TYPES[suffix.upper()]})"
    if name.lower() in _CLOCKS:
        return explain_no_function(name.lower())
    if part := next((known for known in schema if known.lower().startswith(f"{name.lower()}.")), None):
        return f"{name} is a struct; read a part of it, such as {part}"
    if hint := suggest(name, schema, ""):
        return f"unknown field {name!r}; {hint}"
    lowered = {known.lower(): known for known in schema}
    if (last := name.lower().rpartition(".")[2]) in lowered:
        return f"unknown field {name!r}; did you mean {lowered[last]!r}?"
    if not schema:
        return f"unknown field {name!r}; no fields are available here"
    shown = ", ".join(sorted(schema)[:20]) + (", ..." if len(schema) > 20 else "")
    return f"unknown field {name!r}; the fields are {shown}"


def explain_ambiguous_field(name: str, matches: Sequence[str]) -> str:
    """Explains why a name could be any of several fields."""
    return f"field {name!r} could be any of {', '.join(matches)}; names differ in more than case in Spark"


def explain_no_function(name: str) -> str:
    """Explains why a function is not allowed."""
    if name in AGGREGATE_ARGUMENTS or name in AGGREGATE_ALIASES:
        return f"{name}() is an aggregate; an aggregate belongs in measures"
    if name in _OTHER_AGGREGATES:
        listed = ", ".join(sorted([*AGGREGATE_ARGUMENTS, *AGGREGATE_ALIASES]))
        return f"{name}() is an aggregate that rules cannot use; the aggregates, which belong in measures, are {listed}"
    if name in _CLOCKS:
        return f"{name}() is not allowed; it reads a clock, so a replay would differ; use the event's time"
    if name in _RANDOM:
        return f"{name}() is not allowed; it gives another value each time, so a replay would differ"
    if remedy := REMEDIES.get(name) or WINDOW_REMEDIES.get(name):
        return f"{name}() is not allowed; {remedy}"
    known = [*FUNCTIONS, *FORMS, *LAMBDAS, IN_LIST]
    near = find_nearest(name, known)
    hint = f"did you mean {near}()?" if near else f"the functions are {', '.join(sorted(known))}"
    return f"function {name}() is not allowed; {hint}"


def quote_day(difference: str) -> str:
    """Writes a date that was written without quotes, and so as a difference of numbers."""
    year, month, day = difference.split(" - ")
    return f"'{year}-{month:0>2}-{day:0>2}'"


def explain_refusal(tree: exp.Expr) -> str:
    """Explains why a construct is not allowed."""
    if isinstance(tree, exp.Dot) and _DOTTED.fullmatch(text := tree.sql(LookbackSql)):
        return f"{text} is not a number; put texts in single quotes: '{text}'"
    name, remedy = _REFUSALS.get(type(tree), (f"{tree.key} in {quote_node(tree)}", "leave it out"))
    if isinstance(tree, exp.In):
        name, remedy = _REFUSALS[exp.Subquery]
    return f"{name} is not allowed; {remedy}"


_REFUSALS: dict[type[exp.Expr], tuple[str, str]] = {
    exp.Subquery: ("a subquery", "an expression sees the fields of one event"),
    exp.Select: ("a subquery", "an expression sees the fields of one event"),
    exp.Exists: ("a subquery", "an expression sees the fields of one event"),
    exp.Window: ("a window function (over)", "the rule's window and measures do that"),
    exp.Filter: ("filter (where ...)", "it belongs to an aggregate, and an aggregate belongs in measures"),
    exp.Lambda: ("a lambda (->)", "use it in exists(), forall(), filter() or transform()"),
    exp.JSONExtract: ("a lambda (->)", "use it in exists(), forall(), filter() or transform()"),
    exp.SimilarTo: ("similar to", "use like"),
    exp.Bracket: ("[ ]", "use element_at(), which counts from 1"),
    exp.Interval: ("an interval by itself", "add it to a timestamp or take it from one"),
    exp.Star: ("*", "name the fields; only count(*) takes it, in measures"),
    exp.Distinct: ("distinct", "it belongs in an aggregate such as count(distinct x), in measures"),
    exp.Tuple: ("a list in parentheses", "only 'in' takes one"),
    exp.BitwiseAnd: ("&", "write 'and' for conditions"),
    exp.BitwiseOr: ("|", "write 'or' for conditions, || to join texts"),
    exp.BitwiseXor: ("^", "use pow()"),
    exp.BitwiseNot: ("~", "write 'not' for conditions"),
    exp.Placeholder: ("a parameter", "write the value, or a name without braces"),
    exp.Parameter: ("a parameter", "write the value, or a name without braces"),
    exp.Dot: ("a nested field", "declare it as a field of the stream"),
    exp.Collate: ("collate", "use lower() to ignore case"),
    exp.AtTimeZone: ("at time zone", "times are UTC; use from_utc_timestamp(t, 'Europe/Berlin')"),
}

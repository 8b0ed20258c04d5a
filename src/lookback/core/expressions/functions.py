"""Defines the functions that expressions may call, in one table of SQL name -> Spark's type rule and vectorised kernel.

Rules can use only the functions in `FUNCTIONS`, `FORMS` and `AGGREGATE_ARGUMENTS`. To add a function, add a line there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from lookback.core.expressions.arrays import contains_item, drop_repeated, find_item, pick_item, take_item
from lookback.core.expressions.calendars import (
    add_days,
    convert_to_local,
    count_months,
    count_months_between,
    count_seconds,
    find_day_of_month,
    find_day_of_year,
    find_last_days,
    find_week_of_year,
    truncate,
)
from lookback.core.expressions.casts import SECOND_US
from lookback.core.expressions.forms import FORMS
from lookback.core.expressions.kernels import (
    LONG_MAX,
    LONG_MIN,
    KernelResult,
    either_mask,
    is_out_of_range,
    mask_or_none,
    negate_integers,
    rescale,
    round_off,
    store_decimal,
)
from lookback.core.expressions.letters import change_to_lower, change_to_upper
from lookback.core.expressions.mathematics import (
    find_angle,
    find_exponential,
    find_power,
    inside_domain,
    map_doubles,
    map_logarithm,
    measure_distances,
    take_root,
    to_degrees,
    to_radians,
)
from lookback.core.expressions.nodes import Node, make_strict
from lookback.core.expressions.operators import RefusedOperator
from lookback.core.expressions.regexps import extract_regexp, match_regexp, type_regexp_extract, type_regexp_like
from lookback.core.expressions.signatures import (
    MAX_ARGUMENTS,
    Arguments,
    Call,
    CallKernel,
    TypeRule,
    format_call,
    read_places,
    require_count,
    takes,
    takes_dates,
    takes_doubles,
    type_abs,
    type_array_distinct,
    type_array_extreme,
    type_array_join,
    type_array_search,
    type_array_size,
    type_case_change,
    type_cidr_match,
    type_concat,
    type_date_trunc,
    type_element_at,
    type_from_utc_timestamp,
    type_reverse,
    type_round,
    type_unix_timestamp,
    type_whole_number,
)
from lookback.core.expressions.texts import (
    capitalize_words,
    find_position,
    hash_md5,
    hash_sha2,
    join,
    join_items,
    map_growing,
    map_texts,
    measure_items,
    measure_joined,
    measure_padded,
    measure_repeated,
    measure_replaced,
    pad_left,
    pad_right,
    repeat,
    replace,
    reverse,
    split_part,
)
from lookback.core.values.addresses import ADDRESS_BITS, read_address, read_network
from lookback.core.values.columns import Column, Values, is_nan, make_objects
from lookback.core.values.sortable import write_sortable
from lookback.core.values.types import BIGINT, BOOLEAN, DATE, DOUBLE, INT, STRING, TIMESTAMP, DataType

# The limit for the texts that an expression gives for all events that are judged at once.
MAX_TEXT_CHARACTERS = 1_000_000_000


@dataclass(frozen=True)
class Function:
    """A function that is NULL if an argument is: `rule` types a call or raises Refused, `kernel` computes it."""

    rule: TypeRule
    kernel: CallKernel


def make_call(name: str, arguments: Arguments) -> Node:
    """Makes the node of a call of a function in FUNCTIONS or FORMS. Raises Refused."""
    if name in FORMS:
        return FORMS[name](name, arguments)
    function = FUNCTIONS[name]
    call = function.rule(name, arguments)
    sql = format_call(_CANONICAL.get(name, name), arguments)

    def kernel(*values: Values) -> KernelResult:
        return function.kernel(call, values)

    return make_strict(call.type, sql, call.arguments, kernel)


# Kernels: numbers ----------------------------------------------------------------------------------------------------


def _abs(call: Call, values: Sequence[Values]) -> KernelResult:
    magnitudes = np.abs(values[0])
    return KernelResult(
        magnitudes, negate_integers(values[0], call.first.bits).error if call.first.is_integer else None
    )


def _sign(call: Call, values: Sequence[Values]) -> KernelResult:
    x = values[0]
    return KernelResult(np.where((x == 0) | is_nan(x), x, np.sign(x)))


def _to_whole(cut: Callable[[Values], Values], call: Call, arguments: Sequence[Values]) -> KernelResult:
    type_, (values,) = call.first, arguments
    if type_.is_integer:
        return KernelResult(values)
    if type_.is_decimal:
        factor = 10**type_.scale
        if factor > LONG_MAX:
            values = values.astype(object)
        whole = -(-values // factor) if cut is np.ceil else values // factor
        return store_decimal(whole, call.type)
    whole = cut(values.astype(np.float64))
    # Java converts an out-of-range double to the nearest bigint, and NaN to 0.
    inside = (whole > LONG_MIN) & (whole < 2.0**63)
    integers = np.where(inside, whole, 0.0).astype(np.int64)
    return KernelResult(np.where(inside | is_nan(whole), integers, np.where(whole > 0, LONG_MAX, LONG_MIN)))


def _round(call: Call, values: Sequence[Values]) -> KernelResult:
    type_, places = call.first, read_places("round", call.arguments)
    scale = type_.scale if type_.is_decimal else 0
    if places >= scale:
        return rescale(values[0], scale, call.type) if type_.is_decimal else KernelResult(values[0])
    wide = values[0].astype(object) if scale - places > 17 else values[0]
    rounded = round_off(wide, scale - places)
    if places < 0:
        rounded = np.asarray(rounded.astype(object) * 10**-places, dtype=object)
    if type_.is_decimal:
        return store_decimal(rounded, call.type)
    error = is_out_of_range(rounded, type_.bits)
    return KernelResult(np.where(error, 0, rounded).astype(np.int64), mask_or_none(error))


# Kernels: strings ----------------------------------------------------------------------------------------------------


def _map_values(function: Callable[..., Values]) -> CallKernel:
    return lambda call, values: KernelResult(function(*values))


def _map_tests(function: Callable[..., bool]) -> CallKernel:
    def kernel(call: Call, values: Sequence[Values]) -> KernelResult:
        rows = zip(*(v.tolist() for v in values), strict=True)
        return KernelResult(np.fromiter((function(*row) for row in rows), dtype=bool, count=len(values[0])))

    return kernel


def _cidr_match(call: Call, values: Sequence[Values]) -> KernelResult:
    networks = [read_network(str(argument.literal)) for argument in call.arguments[1:]]
    # By version, the first number of each range and the bits that tell its addresses apart.
    ranges = [(each[0], each[1], ADDRESS_BITS[each[0]] - each[2]) for each in networks if each is not None]
    addresses = [read_address(text) for text in values[0].tolist()]
    matches = (
        any(version in address and address[version] >> bits == first >> bits for version, first, bits in ranges)
        for address in addresses
    )
    unknown = np.fromiter((not address for address in addresses), dtype=bool, count=len(addresses))
    return KernelResult(np.fromiter(matches, dtype=bool, count=len(addresses)), None, mask_or_none(unknown))


def _length(call: Call, values: Sequence[Values]) -> KernelResult:
    return KernelResult(np.fromiter(map(len, values[0].tolist()), dtype=np.int64, count=len(values[0])))


def _substring(text: str, position: int, length: int = 2**31 - 1) -> str:
    start = position - 1 if position > 0 else len(text) + position if position < 0 else 0
    end = min(start + length, 2**31 - 1)
    return text[max(start, 0) : max(end, 0)] if end > start else ""


_STRINGS = takes(STRING, gives=STRING)
_PADDING = takes(STRING, INT, STRING, gives=STRING, optional=1)
_TWO_STRINGS = takes(STRING, STRING, gives=BOOLEAN)

FUNCTIONS: dict[str, Function] = {
    # numbers
    "abs": Function(type_abs, _abs),
    "ceil": Function(type_whole_number, partial(_to_whole, np.ceil)),
    "floor": Function(type_whole_number, partial(_to_whole, np.floor)),
    "round": Function(type_round, _round),
    "sign": Function(takes_doubles(1), _sign),
    "sqrt": Function(takes_doubles(1), take_root),
    "exp": Function(takes_doubles(1), map_doubles(find_exponential)),
    "ln": Function(takes_doubles(1), map_logarithm(math.log)),
    "log10": Function(takes_doubles(1), map_logarithm(math.log10)),
    "pow": Function(takes_doubles(2), map_doubles(find_power)),
    "sin": Function(takes_doubles(1), map_doubles(inside_domain(math.sin))),
    "cos": Function(takes_doubles(1), map_doubles(inside_domain(math.cos))),
    "asin": Function(takes_doubles(1), map_doubles(inside_domain(math.asin))),
    "acos": Function(takes_doubles(1), map_doubles(inside_domain(math.acos))),
    "atan2": Function(takes_doubles(2), map_doubles(find_angle)),
    "radians": Function(takes_doubles(1), to_radians),
    "degrees": Function(takes_doubles(1), to_degrees),
    "haversine_km": Function(takes_doubles(4), measure_distances),
    # strings
    "lower": Function(type_case_change, map_texts(change_to_lower)),
    "upper": Function(type_case_change, map_texts(change_to_upper)),
    "trim": Function(_STRINGS, map_texts(lambda text: text.strip(" "))),
    "ltrim": Function(_STRINGS, map_texts(lambda text: text.lstrip(" "))),
    "rtrim": Function(_STRINGS, map_texts(lambda text: text.rstrip(" "))),
    "length": Function(takes(STRING, gives=INT), _length),
    "substring": Function(takes(STRING, INT, INT, gives=STRING, optional=1), map_texts(_substring)),
    "left": Function(takes(STRING, INT, gives=STRING), map_texts(lambda text, length: _substring(text, 1, length))),
    "right": Function(
        takes(STRING, INT, gives=STRING),
        map_texts(lambda text, length: _substring(text, -length) if length > 0 else ""),
    ),
    "concat": Function(type_concat, map_growing(measure_joined, join)),
    "replace": Function(
        takes(STRING, STRING, STRING, gives=STRING, optional=1), map_growing(measure_replaced, replace)
    ),
    "split_part": Function(takes(STRING, STRING, INT, gives=STRING), split_part),
    "instr": Function(takes(STRING, STRING, gives=INT), find_position),
    "lpad": Function(_PADDING, map_growing(measure_padded, pad_left)),
    "rpad": Function(_PADDING, map_growing(measure_padded, pad_right)),
    "repeat": Function(takes(STRING, INT, gives=STRING), map_growing(measure_repeated, repeat)),
    "reverse": Function(type_reverse, reverse),
    "initcap": Function(_STRINGS, map_texts(capitalize_words)),
    "md5": Function(_STRINGS, map_texts(hash_md5)),
    "sha2": Function(takes(STRING, INT, gives=STRING), hash_sha2),
    "startswith": Function(_TWO_STRINGS, _map_tests(str.startswith)),
    "endswith": Function(_TWO_STRINGS, _map_tests(str.endswith)),
    "contains": Function(_TWO_STRINGS, _map_tests(str.__contains__)),
    "cidr_match": Function(type_cidr_match, _cidr_match),
    "regexp_like": Function(type_regexp_like, match_regexp),
    "regexp_extract": Function(type_regexp_extract, extract_regexp),
    # times
    "hour": Function(takes(TIMESTAMP, gives=INT), _map_values(lambda time: time // (3600 * SECOND_US) % 24)),
    "minute": Function(takes(TIMESTAMP, gives=INT), _map_values(lambda time: time // (60 * SECOND_US) % 60)),
    "second": Function(takes(TIMESTAMP, gives=INT), _map_values(lambda time: time // SECOND_US % 60)),
    # Sunday is 1; the epoch was a Thursday.
    "dayofweek": Function(takes_dates(1), _map_values(lambda day: (day + 4) % 7 + 1)),
    "dayofmonth": Function(takes_dates(1), _map_values(find_day_of_month)),
    "month": Function(takes_dates(1), _map_values(lambda day: count_months(day) % 12 + 1)),
    "year": Function(takes_dates(1), _map_values(lambda day: count_months(day) // 12 + 1970)),
    "quarter": Function(takes_dates(1), _map_values(lambda day: count_months(day) % 12 // 3 + 1)),
    "dayofyear": Function(takes_dates(1), _map_values(find_day_of_year)),
    "weekofyear": Function(takes_dates(1), _map_values(find_week_of_year)),
    "last_day": Function(takes(DATE, gives=DATE), _map_values(find_last_days)),
    "date_add": Function(takes(DATE, INT, gives=DATE), _map_values(add_days)),
    "date_sub": Function(takes(DATE, INT, gives=DATE), _map_values(lambda day, less: add_days(day, -less))),
    "months_between": Function(takes(TIMESTAMP, TIMESTAMP, BOOLEAN, gives=DOUBLE, optional=1), count_months_between),
    "from_utc_timestamp": Function(type_from_utc_timestamp, convert_to_local),
    "unix_timestamp": Function(type_unix_timestamp, count_seconds),
    "date_trunc": Function(type_date_trunc, truncate),
    "datediff": Function(takes_dates(2), _map_values(lambda end, start: add_days(end, -start))),
    "unix_micros": Function(takes(TIMESTAMP, gives=BIGINT), _map_values(lambda time: time)),
    # arrays
    "array_contains": Function(type_array_search(BOOLEAN), contains_item),
    "size": Function(type_array_size, _length),
    "array_join": Function(type_array_join, map_growing(measure_items, join_items)),
    "array_position": Function(type_array_search(BIGINT), find_item),
    "array_distinct": Function(type_array_distinct, drop_repeated),
    "array_max": Function(type_array_extreme, pick_item(max)),
    "array_min": Function(type_array_extreme, pick_item(min)),
    "element_at": Function(type_element_at, take_item),
}

# Other names of functions -> the name in canonical SQL.
_CANONICAL = {
    "ceiling": "ceil",
    "signum": "sign",
    "lcase": "lower",
    "ucase": "upper",
    "power": "pow",
    "char_length": "length",
    "substr": "substring",
    "array_size": "size",
    "rlike": "regexp_like",
    "regexp": "regexp_like",
    "day": "dayofmonth",
}
FUNCTIONS |= {alias: FUNCTIONS[name] for alias, name in _CANONICAL.items()}


# Combinations --------------------------------------------------------------------------------------------------------


def make_combination(nodes: Arguments) -> Node:
    """Makes a text that is unique for each combination of values; NULL if a value is NULL, as in count(distinct).

    Raises Refused.
    """
    require_count("count(distinct)", nodes, 2, MAX_ARGUMENTS)
    for node in nodes:
        if problem := check_ordered(node.type):
            raise RefusedOperator(f"count(distinct) {problem}")

    def kernel(*values: Values) -> KernelResult:
        # Both zeros have the same text, and so has every NaN.
        columns = [(each + 0.0 if each.dtype.kind == "f" else each).tolist() for each in values]
        return KernelResult(make_objects([json.dumps(row) for row in zip(*columns, strict=True)]))

    return make_strict(STRING, f"({', '.join(node.sql for node in nodes)})", nodes, kernel)


# The text that max_by and min_by keep of two values. Rules cannot call it.
RANKED = "ranked"


def make_ranked(nodes: Arguments) -> Node:
    """Makes a text that sorts by the first of two values, then by the second; NULL if the first is NULL."""
    rank, value = nodes

    def run(columns: Mapping[str, Column], rows: int) -> Column:
        first, second = rank.run(columns, rows), value.run(columns, rows)
        pairs = zip(first.to_stored_list(), second.to_stored_list(), strict=True)
        texts = ["" if by is None else write_sortable(by) + write_sortable(own) for by, own in pairs]
        return Column(STRING, make_objects(texts), first.null, either_mask(first.error, second.error))

    return Node(STRING, f"{RANKED}({rank.sql}, {value.sql})", run, fields=rank.fields | value.fields)


# Aggregates ----------------------------------------------------------------------------------------------------------


def check_any_value(type_: DataType) -> str | None:
    """Accepts every type, since anything can be counted."""
    return None


def check_exact_number(type_: DataType) -> str | None:
    """Accepts integers and decimals, whose sums do not depend on order. Returns the problem with any other type."""
    if type_.is_float:
        return (
            f"takes exact numbers, since sums of a {type_} depend on order; write cast(x as decimal(18,2)) or as needed"
        )
    return None if type_.is_integer or type_.is_decimal else f"takes an integer or a decimal, got {type_}; cast it"


def check_number(type_: DataType) -> str | None:
    """Accepts numbers. Returns the problem with any other type."""
    return None if type_.is_numeric else f"takes a number, got {type_}; cast it"


def check_condition(type_: DataType) -> str | None:
    """Accepts conditions. Returns the problem with any other type."""
    return None if type_ == BOOLEAN else f"takes a condition, got {type_}; compare it with something"


def check_ordered(type_: DataType) -> str | None:
    """Accepts single values, which have an order. Returns the problem with any other type."""
    return f"takes single values, got {type_}" if type_.name in ("array", "null") else None


# SQL name -> the check of the argument's type, which returns the problem or None. See aggregation/aggregates.py for the
# result type, state and arithmetic of each aggregate.
AGGREGATE_ARGUMENTS: dict[str, Callable[[DataType], str | None]] = {
    "count": check_any_value,
    "sum": check_exact_number,
    "avg": check_exact_number,
    "min": check_ordered,
    "max": check_ordered,
    "first": check_ordered,
    "last": check_ordered,
    "stddev_samp": check_exact_number,
    "stddev_pop": check_exact_number,
    "var_samp": check_exact_number,
    "var_pop": check_exact_number,
    "median": check_number,
    "percentile": check_number,
    "mode": check_ordered,
    "max_by": check_ordered,
    "min_by": check_ordered,
    "collect_set": check_ordered,
    "count_if": check_condition,
    "bool_and": check_condition,
    "bool_or": check_condition,
}
# Other names of aggregates.
AGGREGATE_ALIASES = {
    "mean": "avg",
    "stddev": "stddev_samp",
    "std": "stddev_samp",
    "variance": "var_samp",
    "every": "bool_and",
    "any": "bool_or",
    "some": "bool_or",
}

"""Defines the functions that expressions may call, in one table of SQL name -> Spark's type rule and vectorised kernel.

Rules can use only the functions in `FUNCTIONS`, `FORMS` and `AGGREGATE_ARGUMENTS`. To add a function, add a line there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from lookback.core.expressions.casts import SECOND_US, timestamps_to_dates
from lookback.core.expressions.kernels import (
    LONG_MAX,
    LONG_MIN,
    KernelResult,
    is_less,
    is_out_of_range,
    mask_or_none,
    negate_integers,
    rescale,
    round_off,
    store_decimal,
)
from lookback.core.expressions.nodes import Choice, Node, decide_at_once, make_strict, replace_settled, union_fields
from lookback.core.expressions.operators import (
    RefusedOperator,
    cast_explicitly,
    cast_implicitly,
    cast_to_common,
    make_arithmetic,
    make_case,
    make_comparison,
    make_is_nan,
    make_is_null,
    require_condition,
    require_exact_sign,
)
from lookback.core.values.columns import Column, Values, is_nan, make_objects
from lookback.core.values.times import DAY_US
from lookback.core.values.types import BIGINT, BOOLEAN, DATE, DOUBLE, INT, NULL, STRING, TIMESTAMP, DataType, decimal


class TooManyCharacters(Exception):
    """Raised if the texts of all events do not fit in memory at once; evaluate fewer events at a time."""


Arguments = Sequence[Node]
# A call has all its arguments in memory at once, for all events of a batch.
MAX_ARGUMENTS = 100
# The limit for one call of concat(). A single text beyond it is an error of its event; if only the texts together
# exceed it, the events are evaluated in slices. No other function returns longer texts than it takes.
MAX_JOINED_CHARACTERS = 256_000_000
# The limit for the texts that an expression gives for all events that are judged at once.
MAX_TEXT_CHARACTERS = 1_000_000_000
# The limit for a part between two `%` of a LIKE pattern if it has `_`, since it is compared at every position of the
# text.
MAX_LIKE_PART_CHARACTERS = 100


@dataclass(frozen=True)
class Call:
    """A call with its arguments after implicit casts, and the type of its result."""

    arguments: Arguments
    type: DataType

    @property
    def first(self) -> DataType:
        """The type of the first argument."""
        return self.arguments[0].type


TypeRule = Callable[[str, Arguments], Call]
CallKernel = Callable[[Call, Sequence[Values]], KernelResult]


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


def format_call(name: str, arguments: Arguments) -> str:
    """Writes the canonical SQL of a call."""
    return f"{name}({', '.join(argument.sql for argument in arguments)})"


# Type rules: each checks and casts the arguments of a call, or raises Refused
# ------------------------------------------


def _require_count(name: str, arguments: Arguments, least: int, most: int) -> None:
    if least <= len(arguments) <= most:
        return
    wanted = str(least) if least == most else f"{least} to {most}"
    plural = "" if wanted == "1" else "s"
    raise RefusedOperator(f"{name}() takes {wanted} argument{plural}, got {len(arguments)}")


def _require_type(name: str, argument: Node, type_: DataType) -> Node:
    if argument.type == type_:
        return argument
    if argument.type == NULL or (argument.type == DATE and type_ == TIMESTAMP):
        return cast_implicitly(argument, type_)
    if type_ == INT and argument.type.name in ("tinyint", "smallint"):
        return cast_implicitly(argument, INT)
    if argument.type == STRING and isinstance(argument.literal, str) and type_ in (DATE, TIMESTAMP):
        return cast_implicitly(argument, type_)
    raise RefusedOperator(f"{name}() takes a {type_}, but {argument.sql!r} is of type {argument.type}; cast it")


def takes(*types: DataType, gives: DataType, optional: int = 0) -> TypeRule:
    """Makes the rule of a function with exactly these argument types. The last `optional` arguments may be left out."""

    def rule(name: str, arguments: Arguments) -> Call:
        _require_count(name, arguments, len(types) - optional, len(types))
        return Call(
            [_require_type(name, argument, type_) for argument, type_ in zip(arguments, types, strict=False)], gives
        )

    return rule


def type_concat(name: str, arguments: Arguments) -> Call:
    """Types a call with one or more strings; the result is a string."""
    _require_count(name, arguments, 1, MAX_ARGUMENTS)
    return Call([_require_type(name, argument, STRING) for argument in arguments], STRING)


def type_case_change(name: str, arguments: Arguments) -> Call:
    """Types a call with a string; the result is a string.

    Changing the case twice is refused, since Spark drops the inner call, which matters for letters such as the sharp s.
    """
    _require_count(name, arguments, 1, 1)
    if arguments[0].sql.startswith(("lower(", "upper(")):
        raise RefusedOperator(f"{name}() of {arguments[0].sql!r} changes the case twice; once is enough")
    return Call([_require_type(name, arguments[0], STRING)], STRING)


def takes_dates(count: int) -> TypeRule:
    """Makes the rule of a function of dates, or of timestamps that are cast to dates; the result is an int."""

    def rule(name: str, arguments: Arguments) -> Call:
        _require_count(name, arguments, count, count)
        return Call(
            [
                cast_implicitly(each, DATE) if each.type == TIMESTAMP else _require_type(name, each, DATE)
                for each in arguments
            ],
            INT,
        )

    return rule


def _require_number(name: str, argument: Node) -> Node:
    if not argument.type.is_numeric:
        raise RefusedOperator(f"{name}() takes a number, but {argument.sql!r} is of type {argument.type}; cast it")
    return argument


def _type_number(name: str, arguments: Arguments) -> Call:
    """Types a call with a number; the result has its type."""
    _require_count(name, arguments, 1, 1)
    return Call([_require_number(name, arguments[0])], arguments[0].type)


def type_abs(name: str, arguments: Arguments) -> Call:
    """Types a call with a number; the result has its type. Refuses a decimal whose digits Spark would cut."""
    call = _type_number(name, arguments)
    require_exact_sign(arguments[0], format_call(name, arguments))
    return call


def type_sign(name: str, arguments: Arguments) -> Call:
    """Types a call with a number that is cast to double; the result is a double."""
    _require_count(name, arguments, 1, 1)
    return Call([cast_implicitly(_require_number(name, arguments[0]), DOUBLE)], DOUBLE)


def type_whole_number(name: str, arguments: Arguments) -> Call:
    """Types a call with a number; the result is a decimal of scale 0 for a decimal, otherwise a bigint."""
    _require_count(name, arguments, 1, 1)
    type_ = _require_number(name, arguments[0]).type
    if not type_.is_decimal:
        return Call(arguments, BIGINT)
    if type_.scale == 0:
        return Call(arguments, type_)
    return Call(arguments, decimal(min(type_.precision - type_.scale + 1, 38), 0))


def type_round(name: str, arguments: Arguments) -> Call:
    """Types a call with an integer or decimal and a literal number of places; the result is the same kind of number."""
    _require_count(name, arguments, 1, 2)
    type_ = _require_number(name, arguments[0]).type
    if type_.is_float:
        raise RefusedOperator(
            f"{name}() of a double depends on the Java version; round cast({arguments[0].sql} as decimal(p,s))"
        )
    places = _read_places(name, arguments)
    if not type_.is_decimal:
        return Call(arguments, type_)
    whole = type_.precision - type_.scale + 1
    if places < 0:
        return Call(arguments, decimal(min(max(whole, 1 - places), 38), 0))
    scale = min(type_.scale, places)
    return Call(arguments, decimal(min(whole + scale, 38), scale))


def _read_places(name: str, arguments: Arguments) -> int:
    places = arguments[1].literal if len(arguments) > 1 else 0
    if not isinstance(places, int) or abs(places) > 38:
        raise RefusedOperator(f"{name}() takes its number of places as an integer literal from -38 to 38")
    return places


def type_date_trunc(name: str, arguments: Arguments) -> Call:
    """Types a call with a literal unit and a timestamp; the result is a timestamp."""
    _require_count(name, arguments, 2, 2)
    unit = arguments[0].literal
    if not isinstance(unit, str) or unit.lower() not in _TRUNCATIONS:
        raise RefusedOperator(
            f"{name}() takes a unit in quotes first, one of {', '.join(_UNITS)}; got {arguments[0].sql}"
        )
    return Call([arguments[0], _require_type(name, arguments[1], TIMESTAMP)], TIMESTAMP)


def _require_array(name: str, argument: Node) -> DataType:
    if argument.type.element is None:
        raise RefusedOperator(f"{name}() takes an array, but {argument.sql!r} is of type {argument.type}")
    return argument.type.element


def type_array_contains(name: str, arguments: Arguments) -> Call:
    """Types a call with an array and a value of its element type; the result is a boolean."""
    _require_count(name, arguments, 2, 2)
    element, value = _require_array(name, arguments[0]), arguments[1]
    if value.type.element is not None or not (value.type == element or (value.type.is_integer and element.is_integer)):
        raise RefusedOperator(f"{name}() looks for a {element}, but {value.sql!r} is of type {value.type}; cast it")
    return Call(arguments, BOOLEAN)


def type_element_at(name: str, arguments: Arguments) -> Call:
    """Types a call with an array and an int; the result has the element type."""
    _require_count(name, arguments, 2, 2)
    return Call([arguments[0], _require_type(name, arguments[1], INT)], _require_array(name, arguments[0]))


def type_array_size(name: str, arguments: Arguments) -> Call:
    """Types a call with an array; the result is an int."""
    _require_count(name, arguments, 1, 1)
    _require_array(name, arguments[0])
    return Call(arguments, INT)


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
    type_, places = call.first, _read_places("round", call.arguments)
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


def _map_texts(function: Callable[..., str]) -> CallKernel:
    return lambda call, values: KernelResult(
        make_objects([function(*row) for row in zip(*(v.tolist() for v in values), strict=True)])
    )


# Pairs of a capital and a small letter that Unicode added after version 13, which the oldest supported Python has: the
# first capital of a range, the number of capitals, and the first small letter. Spark knows them, but Python may not.
_NEW_CAPITALS = (
    (0x1C89, 1, 0x1C8A), (0x2C2F, 1, 0x2C5F), (0xA7C0, 1, 0xA7C1), (0xA7CB, 1, 0x264), (0xA7CC, 1, 0xA7CD),
    (0xA7CE, 1, 0xA7CF), (0xA7D0, 1, 0xA7D1), (0xA7D2, 1, 0xA7D3), (0xA7D4, 1, 0xA7D5), (0xA7D6, 1, 0xA7D7),
    (0xA7D8, 1, 0xA7D9), (0xA7DA, 1, 0xA7DB), (0xA7DC, 1, 0x19B), (0x10570, 11, 0x10597), (0x1057C, 15, 0x105A3),
    (0x1058C, 7, 0x105B3), (0x10594, 2, 0x105BB), (0x10D50, 22, 0x10D70), (0x16EA0, 25, 0x16EBB),
)  # fmt: skip
_TO_SMALL = {first + at: small + at for first, count, small in _NEW_CAPITALS for at in range(count)}
_TO_CAPITAL = {small: capital for capital, small in _TO_SMALL.items()}


def change_to_lower(text: str) -> str:
    """Converts a text to lower case, as Spark does."""
    return text.lower() if text.isascii() else text.translate(_TO_SMALL).lower()


def change_to_upper(text: str) -> str:
    """Converts a text to upper case, as Spark does."""
    return text.upper() if text.isascii() else text.translate(_TO_CAPITAL).upper()


def _map_tests(function: Callable[..., bool]) -> CallKernel:
    def kernel(call: Call, values: Sequence[Values]) -> KernelResult:
        rows = zip(*(v.tolist() for v in values), strict=True)
        return KernelResult(np.fromiter((function(*row) for row in rows), dtype=bool, count=len(values[0])))

    return kernel


def _length(call: Call, values: Sequence[Values]) -> KernelResult:
    return KernelResult(np.fromiter(map(len, values[0].tolist()), dtype=np.int64, count=len(values[0])))


def _substring(text: str, position: int, length: int = 2**31 - 1) -> str:
    start = position - 1 if position > 0 else len(text) + position if position < 0 else 0
    end = min(start + length, 2**31 - 1)
    return text[max(start, 0) : max(end, 0)] if end > start else ""


def _concat(call: Call, values: Sequence[Values]) -> KernelResult:
    joined: list[object] = []
    error = np.zeros(len(values[0]), dtype=bool)
    characters = 0
    for at, row in enumerate(zip(*(v.tolist() for v in values), strict=True)):
        length = sum(map(len, row))
        error[at] = length > MAX_JOINED_CHARACTERS
        characters += 0 if error[at] else length
        if characters > MAX_JOINED_CHARACTERS:
            raise TooManyCharacters
        joined.append("" if error[at] else "".join(row))
    return KernelResult(make_objects(joined), mask_or_none(error))


# Kernels: times ------------------------------------------------------------------------------------------------------


def _count_months(days: Values) -> Values:
    """Returns the number of months from January 1970 to each day."""
    return np.asarray(days.astype("datetime64[D]").astype("datetime64[M]").astype(np.int64))


def _find_first_days(months: Values) -> Values:
    return np.asarray(months.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64))


_UNITS = {
    "microsecond": 1, "millisecond": 1_000, "second": SECOND_US, "minute": 60 * SECOND_US, "hour": 3600 * SECOND_US,
    "day": DAY_US, "week": 0, "month": 1, "quarter": 3, "year": 12,
}  # fmt: skip
_TRUNCATIONS = {unit: unit for unit in _UNITS} | {
    "dd": "day", "mon": "month", "mm": "month", "yyyy": "year", "yy": "year",
}  # fmt: skip


def _truncate(call: Call, values: Sequence[Values]) -> KernelResult:
    unit, times = _TRUNCATIONS[str(call.arguments[0].literal).lower()], values[1]
    if unit in ("month", "quarter", "year"):
        months = _count_months(timestamps_to_dates(times))
        return KernelResult(_find_first_days(months // _UNITS[unit] * _UNITS[unit]) * DAY_US)
    if unit == "week":
        days = timestamps_to_dates(times)
        return KernelResult((days - (days + 3) % 7) * DAY_US)
    return KernelResult(times // _UNITS[unit] * _UNITS[unit])


# Kernels: arrays -----------------------------------------------------------------------------------------------------


def _array_contains(call: Call, values: Sequence[Values]) -> KernelResult:
    contains = np.zeros(len(values[0]), dtype=bool)
    unknown = np.zeros(len(values[0]), dtype=bool)
    for row, (items, value) in enumerate(zip(values[0].tolist(), values[1].tolist(), strict=True)):
        contains[row] = value in items or (is_nan(value) and any(map(is_nan, items)))
        unknown[row] = not contains[row] and None in items
    return KernelResult(contains, None, mask_or_none(unknown))


def _element_at(call: Call, values: Sequence[Values]) -> KernelResult:
    arrays, positions = values[0].tolist(), values[1].tolist()
    elements, error = [], np.zeros(len(arrays), dtype=bool)
    for row, (items, p) in enumerate(zip(arrays, positions, strict=True)):
        try:
            elements.append(None if p == 0 else items[p - 1 if p > 0 else p])
        except IndexError:
            elements.append(None)
            error[row] = True
        error[row] |= p == 0
    null = np.fromiter((item is None for item in elements), dtype=bool, count=len(elements)) & ~error
    filler = np.zeros((), dtype=call.type.storage).item()
    return KernelResult(
        make_objects([filler if item is None else item for item in elements]).astype(call.type.storage, copy=False),
        mask_or_none(error), mask_or_none(null),
    )  # fmt: skip


_STRINGS = takes(STRING, gives=STRING)
_TWO_STRINGS = takes(STRING, STRING, gives=BOOLEAN)

FUNCTIONS: dict[str, Function] = {
    # numbers
    "abs": Function(type_abs, _abs),
    "ceil": Function(type_whole_number, partial(_to_whole, np.ceil)),
    "ceiling": Function(type_whole_number, partial(_to_whole, np.ceil)),
    "floor": Function(type_whole_number, partial(_to_whole, np.floor)),
    "round": Function(type_round, _round),
    "sign": Function(type_sign, _sign),
    "signum": Function(type_sign, _sign),
    # strings
    "lower": Function(type_case_change, _map_texts(change_to_lower)),
    "lcase": Function(type_case_change, _map_texts(change_to_lower)),
    "upper": Function(type_case_change, _map_texts(change_to_upper)),
    "ucase": Function(type_case_change, _map_texts(change_to_upper)),
    "trim": Function(_STRINGS, _map_texts(lambda text: text.strip(" "))),
    "ltrim": Function(_STRINGS, _map_texts(lambda text: text.lstrip(" "))),
    "rtrim": Function(_STRINGS, _map_texts(lambda text: text.rstrip(" "))),
    "length": Function(takes(STRING, gives=INT), _length),
    "char_length": Function(takes(STRING, gives=INT), _length),
    "substring": Function(takes(STRING, INT, INT, gives=STRING, optional=1), _map_texts(_substring)),
    "substr": Function(takes(STRING, INT, INT, gives=STRING, optional=1), _map_texts(_substring)),
    "left": Function(takes(STRING, INT, gives=STRING), _map_texts(lambda text, length: _substring(text, 1, length))),
    "right": Function(
        takes(STRING, INT, gives=STRING),
        _map_texts(lambda text, length: _substring(text, -length) if length > 0 else ""),
    ),
    "concat": Function(type_concat, _concat),
    "startswith": Function(_TWO_STRINGS, _map_tests(str.startswith)),
    "endswith": Function(_TWO_STRINGS, _map_tests(str.endswith)),
    "contains": Function(_TWO_STRINGS, _map_tests(str.__contains__)),
    # times
    "hour": Function(takes(TIMESTAMP, gives=INT), _map_values(lambda time: time // (3600 * SECOND_US) % 24)),
    "minute": Function(takes(TIMESTAMP, gives=INT), _map_values(lambda time: time // (60 * SECOND_US) % 60)),
    "second": Function(takes(TIMESTAMP, gives=INT), _map_values(lambda time: time // SECOND_US % 60)),
    # Sunday is 1; the epoch was a Thursday.
    "dayofweek": Function(takes_dates(1), _map_values(lambda day: (day + 4) % 7 + 1)),
    "dayofmonth": Function(takes_dates(1), _map_values(lambda day: day - _find_first_days(_count_months(day)) + 1)),
    "day": Function(takes_dates(1), _map_values(lambda day: day - _find_first_days(_count_months(day)) + 1)),
    "month": Function(takes_dates(1), _map_values(lambda day: _count_months(day) % 12 + 1)),
    "year": Function(takes_dates(1), _map_values(lambda day: _count_months(day) // 12 + 1970)),
    "date_trunc": Function(type_date_trunc, _truncate),
    "datediff": Function(takes_dates(2), _map_values(np.subtract)),
    "unix_micros": Function(takes(TIMESTAMP, gives=BIGINT), _map_values(lambda time: time)),
    # arrays
    "array_contains": Function(type_array_contains, _array_contains),
    "size": Function(type_array_size, _length),
    "element_at": Function(type_element_at, _element_at),
}

_CANONICAL = {
    "ceiling": "ceil", "signum": "sign", "lcase": "lower", "ucase": "upper", "char_length": "length",
    "substr": "substring", "day": "dayofmonth", "nvl": "coalesce", "ifnull": "coalesce",
}  # fmt: skip


# Forms: functions that do not evaluate all arguments, or that are not NULL for NULL -----------------------------------


def _coalesce(name: str, arguments: Arguments) -> Node:
    _require_count(name, arguments, *((2, 2) if name in ("nvl", "ifnull") else (1, MAX_ARGUMENTS)))
    sql = format_call("coalesce", arguments)
    nodes = cast_to_common(arguments, repr(sql))

    def run(columns: Mapping[str, Column], rows: int) -> Column:
        choice = Choice(nodes[0].type, rows)
        for argument in nodes:
            column = argument.run(columns, rows)
            choice.fail(column)
            choice.take(column.is_known(), column)
        return choice.column()

    return Node(nodes[0].type, sql, run, fields=union_fields(nodes))


def _if(name: str, arguments: Arguments) -> Node:
    _require_count(name, arguments, 3, 3)
    condition, yes, no = arguments
    return make_case([(require_condition(condition, "if()"), yes)], no, format_call("if", arguments))


def _nullif(name: str, arguments: Arguments) -> Node:
    _require_count(name, arguments, 2, 2)
    value, other = arguments
    same = make_comparison("=", value, other)
    none = cast_implicitly(Node(NULL, "null", value.run), value.type)
    return make_case([(same, none)], value, format_call(name, arguments))


def _extreme(name: str, arguments: Arguments) -> Node:
    _require_count(name, arguments, 2, MAX_ARGUMENTS)
    sql = format_call(name, arguments)
    nodes = cast_to_common(arguments, repr(sql))
    if nodes[0].type.name == "array":
        raise RefusedOperator(f"{name}() takes single values, got {nodes[0].type}")

    def better(new: Values, old: Values) -> Values:
        return is_less(old, new) if name == "greatest" else is_less(new, old)

    def run(columns: Mapping[str, Column], rows: int) -> Column:
        inputs = [argument.run(columns, rows) for argument in nodes]
        _, error = decide_at_once(inputs)
        known = inputs[0].is_known()
        kind = object if any(column.values.dtype == object for column in inputs) else inputs[0].values.dtype
        values = replace_settled(inputs[0], ~known).astype(kind)
        for column in inputs[1:]:
            there = column.is_known()
            new = replace_settled(column, ~there)
            wins = there & (~known | better(new, values))
            values[wins] = new[wins]
            known |= there
        null = ~known if error is None else ~known & ~error
        return Column(nodes[0].type, values, mask_or_none(null), error)

    return Node(nodes[0].type, sql, run, fields=union_fields(nodes))


def _is_null(name: str, arguments: Arguments) -> Node:
    _require_count(name, arguments, 1, 1)
    return make_is_null(arguments[0], negated=name == "isnotnull")


def _mod(name: str, arguments: Arguments) -> Node:
    _require_count(name, arguments, 2, 2)
    return make_arithmetic("%" if name == "mod" else name, *arguments)


def _is_nan(name: str, arguments: Arguments) -> Node:
    _require_count(name, arguments, 1, 1)
    return make_is_nan(_as_float(name, arguments[0]), format_call(name, arguments))


def _nanvl(name: str, arguments: Arguments) -> Node:
    _require_count(name, arguments, 2, 2)
    value = _as_float(name, arguments[0])
    other = cast_implicitly(arguments[1], value.type) if arguments[1].type == NULL else _as_float(name, arguments[1])
    is_missing = make_is_nan(value, format_call("isnan", arguments[:1]))
    return make_case([(is_missing, other)], value, format_call(name, arguments))


def _as_float(name: str, argument: Node) -> Node:
    if argument.type.is_float:
        return argument
    return cast_implicitly(argument if argument.type == NULL else _require_number(name, argument), DOUBLE)


_CASTS = {
    "to_date": DATE, "to_timestamp": TIMESTAMP, "date": DATE, "timestamp": TIMESTAMP,
    "boolean": BOOLEAN, "int": INT, "bigint": BIGINT, "double": DOUBLE, "string": STRING,
}  # fmt: skip


def _cast(name: str, arguments: Arguments) -> Node:
    if len(arguments) == 2 and name.startswith("to_"):
        raise RefusedOperator(
            f"{name}() takes no format here; declare the field as {_CASTS[name]} and read it by columns"
        )
    _require_count(name, arguments, 1, 1)
    return cast_explicitly(arguments[0], _CASTS[name], tolerant=False)


FORMS: dict[str, Callable[[str, Arguments], Node]] = {
    "coalesce": _coalesce,
    "nvl": _coalesce,
    "ifnull": _coalesce,
    "if": _if,
    "nullif": _nullif,
    "greatest": _extreme,
    "least": _extreme,
    "isnull": _is_null,
    "isnotnull": _is_null,
    "isnan": _is_nan,
    "nanvl": _nanvl,
    "mod": _mod,
    "pmod": _mod,
    **dict.fromkeys(_CASTS, _cast),
}


# LIKE ----------------------------------------------------------------------------------------------------------------


def make_like(value: Node, pattern: Node, escape: str, negated: bool) -> Node:
    """Makes value [not] like pattern: `%` is any text, `_` any character. Takes linear time. Raises Refused."""
    if not isinstance(pattern.literal, str):
        raise RefusedOperator(
            "the pattern of 'like' must be a literal text; use contains(), startswith() or endswith()"
        )
    sql = f"{value.within(4)} {'not ' if negated else ''}like {pattern.sql}"
    if escape != "\\":
        sql += f" escape {quote_text(escape)}"
    matches = compile_like(pattern.literal, escape)
    kernel: Callable[[str], bool] = (lambda text: not matches(text)) if negated else matches
    text = _require_type("like", value, STRING)

    def run(values: Values) -> KernelResult:
        return KernelResult(np.fromiter(map(kernel, values.tolist()), dtype=bool, count=len(values)))

    return make_strict(BOOLEAN, sql, [text], run, 4)


def quote_text(text: str) -> str:
    """Writes a text as a string literal."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _split_pattern(pattern: str, escape: str) -> list[list[str | None]]:
    """Splits a pattern at `%`; None in a piece matches any character. Raises Refused."""
    pieces: list[list[str | None]] = [[]]
    position = 0
    while position < len(pattern):
        character = pattern[position]
        position += 1
        if character == escape:
            following = pattern[position : position + 1]
            if following not in ("%", "_", escape) or not following:
                raise RefusedOperator(
                    f"the pattern {pattern!r} has {escape!r} before something other than %, _ or {escape!r}; double it"
                )
            pieces[-1].append(following)
            position += 1
        elif character == "%":
            pieces.append([])
        else:
            pieces[-1].append(None if character == "_" else character)
    return pieces


def compile_like(pattern: str, escape: str) -> Callable[[str], bool]:
    """Returns the test of a LIKE pattern. Raises Refused.

    Each part between `%` is matched at the first place where it fits, so the test never backtracks.
    """
    pieces = _split_pattern(pattern, escape)
    parts = [re.compile("".join("." if c is None else re.escape(c) for c in piece), re.DOTALL) for piece in pieces]
    if all(None not in piece for piece in pieces):
        return _compile_plain_like(["".join(c or "" for c in piece) for piece in pieces])
    if len(parts) == 1:
        return lambda text: parts[0].fullmatch(text) is not None
    if any(None in piece and len(piece) > MAX_LIKE_PART_CHARACTERS for piece in pieces[1:-1]):
        raise RefusedOperator(
            f"the pattern has a part of more than {MAX_LIKE_PART_CHARACTERS} characters with '_' between two '%'; make "
            "it shorter"
        )
    head, *middle, tail = parts
    tail_length = len(pieces[-1])

    def matches(text: str) -> bool:
        match = head.match(text)
        for part in middle:
            if match is None:
                return False
            match = part.search(text, match.end())
        end = len(text) - tail_length
        return match is not None and end >= match.end() and tail.match(text, end) is not None

    return matches


def _compile_plain_like(pieces: list[str]) -> Callable[[str], bool]:
    """Returns the test of a pattern without `_`."""
    head, tail = pieces[0], pieces[-1]
    if len(pieces) == 1:
        return head.__eq__
    if len(pieces) == 2:
        least = len(head) + len(tail)
        return lambda text: text.startswith(head) and text.endswith(tail) and len(text) >= least

    def matches(text: str) -> bool:
        if not text.startswith(head):
            return False
        end = len(head)
        for piece in pieces[1:-1]:
            start = text.find(piece, end)
            if start < 0:
                return False
            end = start + len(piece)
        return text.endswith(tail) and len(text) - len(tail) >= end

    return matches


# Combinations --------------------------------------------------------------------------------------------------------


def make_combination(nodes: Arguments) -> Node:
    """Makes a text that is unique for each combination of values; NULL if a value is NULL, as in count(distinct).

    Raises Refused.
    """
    _require_count("count(distinct)", nodes, 2, MAX_ARGUMENTS)
    for node in nodes:
        if problem := check_ordered(node.type):
            raise RefusedOperator(f"count(distinct) {problem}")

    def kernel(*values: Values) -> KernelResult:
        # Both zeros have the same text, and so has every NaN.
        columns = [(each + 0.0 if each.dtype.kind == "f" else each).tolist() for each in values]
        return KernelResult(make_objects([json.dumps(row) for row in zip(*columns, strict=True)]))

    return make_strict(STRING, f"({', '.join(node.sql for node in nodes)})", nodes, kernel)


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
}

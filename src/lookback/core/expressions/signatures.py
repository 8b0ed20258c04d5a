"""Type rules of functions: each checks and casts the arguments of a call, or raises Refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lookback.core.expressions.casts import SECOND_US
from lookback.core.expressions.kernels import KernelResult
from lookback.core.expressions.nodes import Node
from lookback.core.expressions.operators import RefusedOperator, cast_implicitly, require_exact_sign
from lookback.core.values.addresses import explain_no_range
from lookback.core.values.columns import Values
from lookback.core.values.times import DAY_US
from lookback.core.values.types import (
    BIGINT,
    BOOLEAN,
    DATE,
    DOUBLE,
    INT,
    NULL,
    STRING,
    TIMESTAMP,
    DataType,
    array,
    decimal,
)
from lookback.core.values.zones import explain_no_zone, find_zone

Arguments = Sequence[Node]
# A call has all its arguments in memory at once, for all events of a batch.
MAX_ARGUMENTS = 100
UNITS = {
    "microsecond": 1,
    "millisecond": 1_000,
    "second": SECOND_US,
    "minute": 60 * SECOND_US,
    "hour": 3600 * SECOND_US,
    "day": DAY_US,
    "week": 0,
    "month": 1,
    "quarter": 3,
    "year": 12,
}
TRUNCATIONS = {unit: unit for unit in UNITS} | {
    "dd": "day",
    "mon": "month",
    "mm": "month",
    "yyyy": "year",
    "yy": "year",
}


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


def format_call(name: str, arguments: Arguments) -> str:
    """Writes the canonical SQL of a call."""
    return f"{name}({', '.join(argument.sql for argument in arguments)})"


def require_count(name: str, arguments: Arguments, least: int, most: int) -> None:
    """Checks the number of arguments. Raises Refused."""
    if least <= len(arguments) <= most:
        return
    wanted = str(least) if least == most else f"{least} to {most}"
    plural = "" if wanted == "1" else "s"
    raise RefusedOperator(f"{name}() takes {wanted} argument{plural}, got {len(arguments)}")


def require_type(name: str, argument: Node, type_: DataType) -> Node:
    """Casts an argument to a type, if Spark does so by itself. Raises Refused."""
    if argument.type == type_:
        return argument
    if argument.type == NULL or {argument.type, type_} == {DATE, TIMESTAMP}:
        return cast_implicitly(argument, type_)
    if type_ == INT and argument.type.name in ("tinyint", "smallint"):
        return cast_implicitly(argument, INT)
    if argument.type == STRING and isinstance(argument.literal, str) and type_ in (DATE, TIMESTAMP):
        return cast_implicitly(argument, type_)
    # No text can be cast to a time: Spark reads it by the session's settings.
    remedy = f"declare the field as {type_}" if argument.type == STRING and type_ in (DATE, TIMESTAMP) else "cast it"
    raise RefusedOperator(f"{name}() takes a {type_}, but {argument.sql!r} is of type {argument.type}; {remedy}")


def takes(*types: DataType, gives: DataType, optional: int = 0) -> TypeRule:
    """Makes the rule of a function with exactly these argument types. The last `optional` arguments may be left out."""

    def rule(name: str, arguments: Arguments) -> Call:
        require_count(name, arguments, len(types) - optional, len(types))
        return Call(
            [require_type(name, argument, type_) for argument, type_ in zip(arguments, types, strict=False)], gives
        )

    return rule


def type_concat(name: str, arguments: Arguments) -> Call:
    """Types a call with one or more strings; the result is a string."""
    require_count(name, arguments, 1, MAX_ARGUMENTS)
    return Call([require_type(name, argument, STRING) for argument in arguments], STRING)


def type_case_change(name: str, arguments: Arguments) -> Call:
    """Types a call with a string; the result is a string.

    Changing the case twice is refused, since Spark drops the inner call, which matters for letters such as the sharp s.
    """
    require_count(name, arguments, 1, 1)
    if arguments[0].sql.startswith(("lower(", "upper(")):
        raise RefusedOperator(f"{name}() of {arguments[0].sql!r} changes the case twice; once is enough")
    return Call([require_type(name, arguments[0], STRING)], STRING)


def takes_dates(count: int) -> TypeRule:
    """Makes the rule of a function of dates, or of timestamps that are cast to dates; the result is an int."""
    return takes(*[DATE] * count, gives=INT)


def takes_doubles(count: int) -> TypeRule:
    """Makes the rule of a function of numbers that are cast to double; the result is a double."""

    def rule(name: str, arguments: Arguments) -> Call:
        require_count(name, arguments, count, count)
        numbers = [each if each.type == NULL else require_number(name, each) for each in arguments]
        return Call([cast_implicitly(each, DOUBLE) for each in numbers], DOUBLE)

    return rule


def require_number(name: str, argument: Node) -> Node:
    """Returns an argument that is a number. Raises Refused."""
    if not argument.type.is_numeric:
        raise RefusedOperator(f"{name}() takes a number, but {argument.sql!r} is of type {argument.type}; cast it")
    return argument


def _type_number(name: str, arguments: Arguments) -> Call:
    """Types a call with a number; the result has its type."""
    require_count(name, arguments, 1, 1)
    return Call([require_number(name, arguments[0])], arguments[0].type)


def type_abs(name: str, arguments: Arguments) -> Call:
    """Types a call with a number; the result has its type. Refuses a decimal whose digits Spark would cut."""
    call = _type_number(name, arguments)
    require_exact_sign(arguments[0], format_call(name, arguments))
    return call


def type_cidr_match(name: str, arguments: Arguments) -> Call:
    """Types a call with an address as a text, and ranges of addresses as literals."""
    require_count(name, arguments, 2, MAX_ARGUMENTS)
    for argument in arguments[1:]:
        if not isinstance(argument.literal, str):
            raise RefusedOperator(
                f"{name}() takes ranges as literal texts, such as '10.0.0.0/8', got {argument.sql!r}; for many ranges, or "
                "those that change, keep a list and ask in_list()"
            )
        if problem := explain_no_range(argument.literal):
            raise RefusedOperator(f"{name}(): {problem}")
    return Call([require_type(name, arguments[0], STRING), *arguments[1:]], BOOLEAN)


def type_unix_timestamp(name: str, arguments: Arguments) -> Call:
    """Types a call with a timestamp; the result is a bigint. Without one Spark would read the clock."""
    if not arguments:
        raise RefusedOperator(f"{name}() without a time reads a clock, so a replay would differ; use the event's time")
    return takes(TIMESTAMP, gives=BIGINT)(name, arguments)


def type_reverse(name: str, arguments: Arguments) -> Call:
    """Types a call with a string or an array; the result has its type."""
    require_count(name, arguments, 1, 1)
    if arguments[0].type.element is not None:
        return Call(arguments, arguments[0].type)
    return Call([require_type(name, arguments[0], STRING)], STRING)


def type_whole_number(name: str, arguments: Arguments) -> Call:
    """Types a call with a number; the result is a decimal of scale 0 for a decimal, otherwise a bigint."""
    require_count(name, arguments, 1, 1)
    type_ = require_number(name, arguments[0]).type
    if not type_.is_decimal:
        return Call(arguments, BIGINT)
    if type_.scale == 0:
        return Call(arguments, type_)
    return Call(arguments, decimal(min(type_.precision - type_.scale + 1, 38), 0))


def type_round(name: str, arguments: Arguments) -> Call:
    """Types a call with an integer or decimal and a literal number of places; the result is the same kind of number."""
    require_count(name, arguments, 1, 2)
    type_ = require_number(name, arguments[0]).type
    if type_.is_float:
        raise RefusedOperator(
            f"{name}() of a double depends on the Java version; round cast({arguments[0].sql} as decimal(p,s))"
        )
    places = read_places(name, arguments)
    if not type_.is_decimal:
        return Call(arguments, type_)
    whole = type_.precision - type_.scale + 1
    if places < 0:
        return Call(arguments, decimal(min(max(whole, 1 - places), 38), 0))
    scale = min(type_.scale, places)
    return Call(arguments, decimal(min(whole + scale, 38), scale))


def read_places(name: str, arguments: Arguments) -> int:
    """Returns the number of places to round to, 0 if it is left out. Raises Refused."""
    places = arguments[1].literal if len(arguments) > 1 else 0
    if not isinstance(places, int) or abs(places) > 38:
        raise RefusedOperator(f"{name}() takes its number of places as an integer literal from -38 to 38")
    return places


def type_from_utc_timestamp(name: str, arguments: Arguments) -> Call:
    """Types a call with a timestamp and a zone as a text, which must exist if it is a literal."""
    call = takes(TIMESTAMP, STRING, gives=TIMESTAMP)(name, arguments)
    zone = arguments[1].literal
    if isinstance(zone, str) and find_zone(zone) is None:
        raise RefusedOperator(f"{name}(): {explain_no_zone(zone)}")
    return call


def type_date_trunc(name: str, arguments: Arguments) -> Call:
    """Types a call with a literal unit and a timestamp; the result is a timestamp."""
    require_count(name, arguments, 2, 2)
    unit = arguments[0].literal
    if not isinstance(unit, str) or unit.lower() not in TRUNCATIONS:
        raise RefusedOperator(
            f"{name}() takes a unit in quotes first, one of {', '.join(UNITS)}; got {arguments[0].sql}"
        )
    return Call([arguments[0], require_type(name, arguments[1], TIMESTAMP)], TIMESTAMP)


def _require_array(name: str, argument: Node) -> DataType:
    if argument.type.element is None:
        raise RefusedOperator(f"{name}() takes an array, but {argument.sql!r} is of type {argument.type}")
    return argument.type.element


def type_array_search(gives: DataType) -> TypeRule:
    """Makes the rule of a function of an array and a value of its element type."""

    def rule(name: str, arguments: Arguments) -> Call:
        require_count(name, arguments, 2, 2)
        element, value = _require_array(name, arguments[0]), arguments[1]
        is_alike = value.type == element or (value.type.is_integer and element.is_integer)
        if value.type.element is not None or not is_alike:
            raise RefusedOperator(f"{name}() looks for a {element}, but {value.sql!r} is of type {value.type}; cast it")
        return Call(arguments, gives)

    return rule


def type_array_distinct(name: str, arguments: Arguments) -> Call:
    """Types a call with an array of single values; the result has its type."""
    return Call(arguments, array(_type_array_item(name, arguments)))


def type_array_extreme(name: str, arguments: Arguments) -> Call:
    """Types a call with an array of single values; the result has the element type."""
    return Call(arguments, _type_array_item(name, arguments))


def _type_array_item(name: str, arguments: Arguments) -> DataType:
    require_count(name, arguments, 1, 1)
    element = _require_array(name, arguments[0])
    if element.element is not None:
        raise RefusedOperator(f"{name}() takes an array of single values, got {arguments[0].type}")
    return element


def type_element_at(name: str, arguments: Arguments) -> Call:
    """Types a call with an array and an int; the result has the element type."""
    require_count(name, arguments, 2, 2)
    return Call([arguments[0], require_type(name, arguments[1], INT)], _require_array(name, arguments[0]))


def type_array_size(name: str, arguments: Arguments) -> Call:
    """Types a call with an array; the result is an int."""
    require_count(name, arguments, 1, 1)
    _require_array(name, arguments[0])
    return Call(arguments, INT)


def type_array_join(name: str, arguments: Arguments) -> Call:
    """Types a call with an array of strings, a separator and a string for NULLs, which may be left out."""
    require_count(name, arguments, 2, 3)
    if _require_array(name, arguments[0]) != STRING:
        texts = f"transform({arguments[0].sql}, x -> cast(x as string))"
        raise RefusedOperator(
            f"{name}() joins texts, but {arguments[0].sql!r} is of type {arguments[0].type}; use {texts}"
        )
    return Call([arguments[0], *(require_type(name, each, STRING) for each in arguments[1:])], STRING)

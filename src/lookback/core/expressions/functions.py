"""The functions that expressions may call: one visible table of SQL name -> Spark type rule -> vectorised kernel.

A function that is not in `FUNCTIONS`, `FORMS` or `AGGREGATES` does not exist for a rule. To add one, write a line there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lookback.core.expressions.casts import DAY_US, SECOND_US, timestamps_to_dates
from lookback.core.expressions.kernels import (
    LONG_MAX,
    LONG_MIN,
    KernelResult,
    as_mask,
    less,
    mask_or_none,
    negate_integers,
    rescaled,
    rounded_off,
    stored_decimal,
)
from lookback.core.expressions.nodes import Choice, Node, decide_at_once, fields_of, harmless_values, strict
from lookback.core.expressions.operators import (
    Refused,
    arithmetic,
    boolean,
    cases,
    comparison,
    convert_to_common,
    exact_sign,
    implicit,
    is_null,
)
from lookback.core.values.columns import Column, Values
from lookback.core.values.types import BIGINT, BOOLEAN, DATE, DOUBLE, INT, NULL, STRING, TIMESTAMP, DataType, decimal

Arguments = Sequence[Node]
# Of one call; all of them are in memory at once, for all events of a batch.
MAX_ARGUMENTS = 100
# What one call of concat() may make of all events of a batch. A text grows with the lengths of the fields and the number of
# its parts; no other function makes more than it is given.
MAX_JOINED = 256_000_000
# Of a part of a LIKE pattern that stands between two `%` and has a `_`: it is compared at each place of the text.
MAX_LIKE_PART = 100


@dataclass(frozen=True)
class Call:
    """A call with its arguments after implicit casts, and the type of its result."""

    arguments: Arguments
    type: DataType

    @property
    def first(self) -> DataType:
        """Type of the first argument."""
        return self.arguments[0].type


Rule = Callable[[str, Arguments], Call]
CallKernel = Callable[[Call, Sequence[Values]], KernelResult]


@dataclass(frozen=True)
class Function:
    """A function that is NULL if an argument is: `rule` types a call (raises Refused), `kernel` computes it."""

    rule: Rule
    kernel: CallKernel


def call(name: str, arguments: Arguments) -> Node:
    """The node of a call of a function in FUNCTIONS or FORMS. Raises Refused."""
    if name in FORMS:
        return FORMS[name](name, arguments)
    function = FUNCTIONS[name]
    made = function.rule(name, arguments)
    sql = call_text(_CANONICAL.get(name, name), arguments)

    def kernel(*values: Values) -> KernelResult:
        return function.kernel(made, values)

    return strict(made.type, sql, made.arguments, kernel)


def call_text(name: str, arguments: Arguments) -> str:
    """The canonical SQL of a call."""
    return f"{name}({', '.join(argument.sql for argument in arguments)})"


# Type rules ----------------------------------------------------------------------------------------------------------


def _counted(name: str, arguments: Arguments, least: int, most: int) -> None:
    if least <= len(arguments) <= most:
        return
    wanted = str(least) if least == most else f"{least} to {most}"
    plural = "" if wanted == "1" else "s"
    raise Refused(f"{name}() takes {wanted} argument{plural}, got {len(arguments)}")


def _typed(name: str, argument: Node, type_: DataType) -> Node:
    if argument.type == type_:
        return argument
    if argument.type == NULL or (argument.type == DATE and type_ == TIMESTAMP):
        return implicit(argument, type_)
    if type_ == INT and argument.type.name in ("tinyint", "smallint"):
        return implicit(argument, INT)
    if argument.type == STRING and isinstance(argument.literal, str) and type_ in (DATE, TIMESTAMP):
        return implicit(argument, type_)
    raise Refused(f"{name}() takes a {type_}, but {argument.sql!r} is of type {argument.type}; cast it")


def takes(*types: DataType, gives: DataType, optional: int = 0) -> Rule:
    """Exactly these argument types, the last `optional` ones may be left out."""

    def rule(name: str, arguments: Arguments) -> Call:
        _counted(name, arguments, len(types) - optional, len(types))
        return Call([_typed(name, argument, type_) for argument, type_ in zip(arguments, types, strict=False)], gives)

    return rule


def many_strings(name: str, arguments: Arguments) -> Call:
    """One or more strings give a string."""
    _counted(name, arguments, 1, MAX_ARGUMENTS)
    return Call([_typed(name, argument, STRING) for argument in arguments], STRING)


def changed_case(name: str, arguments: Arguments) -> Call:
    """A string gives a string. Twice is refused: Spark drops the inner call, which matters for letters such as sharp s."""
    _counted(name, arguments, 1, 1)
    if arguments[0].sql.startswith(("lower(", "upper(")):
        raise Refused(f"{name}() of {arguments[0].sql!r} changes the case twice; once is enough")
    return Call([_typed(name, arguments[0], STRING)], STRING)


def date_part(name: str, arguments: Arguments) -> Call:
    """A date, or a timestamp cut to one, gives an int."""
    _counted(name, arguments, 1, 1)
    return Call([_as_date(name, arguments[0])], INT)


def _as_date(name: str, argument: Node) -> Node:
    return implicit(argument, DATE) if argument.type == TIMESTAMP else _typed(name, argument, DATE)


def two_dates(name: str, arguments: Arguments) -> Call:
    """Two dates give an int."""
    _counted(name, arguments, 2, 2)
    return Call([_as_date(name, argument) for argument in arguments], INT)


def _number(name: str, argument: Node) -> Node:
    if not argument.type.is_numeric:
        raise Refused(f"{name}() takes a number, but {argument.sql!r} is of type {argument.type}; cast it")
    return argument


def same_number(name: str, arguments: Arguments) -> Call:
    """A number gives a number of its type."""
    _counted(name, arguments, 1, 1)
    return Call([_number(name, arguments[0])], arguments[0].type)


def size(name: str, arguments: Arguments) -> Call:
    """A number gives a number of its type, but not a decimal whose digits Spark would cut."""
    made = same_number(name, arguments)
    exact_sign(arguments[0], call_text(name, arguments))
    return made


def number_to_double(name: str, arguments: Arguments) -> Call:
    """A number, cast to double, gives a double."""
    _counted(name, arguments, 1, 1)
    return Call([implicit(_number(name, arguments[0]), DOUBLE)], DOUBLE)


def whole_number(name: str, arguments: Arguments) -> Call:
    """A decimal gives a decimal of scale 0, another number a bigint."""
    _counted(name, arguments, 1, 1)
    type_ = _number(name, arguments[0]).type
    if not type_.is_decimal:
        return Call(arguments, BIGINT)
    if type_.scale == 0:
        return Call(arguments, type_)
    return Call(arguments, decimal(min(type_.precision - type_.scale + 1, 38), 0))


def rounding(name: str, arguments: Arguments) -> Call:
    """An integer or decimal, rounded to a literal number of places, gives the same kind of number."""
    _counted(name, arguments, 1, 2)
    type_ = _number(name, arguments[0]).type
    if type_.is_float:
        raise Refused(
            f"{name}() of a double depends on the Java version; round cast({arguments[0].sql} as decimal(p,s))"
        )
    places = _places(name, arguments)
    if not type_.is_decimal:
        return Call(arguments, type_)
    whole = type_.precision - type_.scale + 1
    if places < 0:
        return Call(arguments, decimal(min(max(whole, 1 - places), 38), 0))
    scale = min(type_.scale, places)
    return Call(arguments, decimal(min(whole + scale, 38), scale))


def _places(name: str, arguments: Arguments) -> int:
    places = arguments[1].literal if len(arguments) > 1 else 0
    if not isinstance(places, int) or abs(places) > 38:
        raise Refused(f"{name}() takes its number of places as an integer literal from -38 to 38")
    return places


def truncation(name: str, arguments: Arguments) -> Call:
    """A unit, as a literal, and a timestamp give a timestamp."""
    _counted(name, arguments, 2, 2)
    unit = arguments[0].literal
    if not isinstance(unit, str) or unit.lower() not in _TRUNCATIONS:
        raise Refused(f"{name}() takes a unit in quotes first, one of {', '.join(_UNITS)}; got {arguments[0].sql}")
    return Call([arguments[0], _typed(name, arguments[1], TIMESTAMP)], TIMESTAMP)


def _array(name: str, argument: Node) -> DataType:
    if argument.type.element is None:
        raise Refused(f"{name}() takes an array, but {argument.sql!r} is of type {argument.type}")
    return argument.type.element


def contained(name: str, arguments: Arguments) -> Call:
    """An array and a value of its element type give a boolean."""
    _counted(name, arguments, 2, 2)
    element, value = _array(name, arguments[0]), arguments[1]
    if value.type.element is not None or not (value.type == element or (value.type.is_integer and element.is_integer)):
        raise Refused(f"{name}() looks for a {element}, but {value.sql!r} is of type {value.type}; cast it")
    return Call(arguments, BOOLEAN)


def element(name: str, arguments: Arguments) -> Call:
    """An array and an int give an element."""
    _counted(name, arguments, 2, 2)
    return Call([arguments[0], _typed(name, arguments[1], INT)], _array(name, arguments[0]))


def counted_array(name: str, arguments: Arguments) -> Call:
    """An array gives an int."""
    _counted(name, arguments, 1, 1)
    _array(name, arguments[0])
    return Call(arguments, INT)


# Kernels: numbers ----------------------------------------------------------------------------------------------------


def _abs(made: Call, values: Sequence[Values]) -> KernelResult:
    size = np.abs(values[0])
    return KernelResult(size, negate_integers(values[0], made.first.bits).bad if made.first.is_integer else None)


def _sign(made: Call, values: Sequence[Values]) -> KernelResult:
    x = values[0]
    return KernelResult(np.where((x == 0) | (x != x), x, np.sign(x)))


def _floor(made: Call, values: Sequence[Values]) -> KernelResult:
    return _to_whole(made, values[0], np.floor, 0)


def _ceil(made: Call, values: Sequence[Values]) -> KernelResult:
    return _to_whole(made, values[0], np.ceil, 1)


def _to_whole(made: Call, values: Values, cut: Callable[[Values], Values], up: int) -> KernelResult:
    type_ = made.first
    if type_.is_integer:
        return KernelResult(values)
    if type_.is_decimal:
        factor = 10**type_.scale
        if factor > LONG_MAX:
            values = values.astype(object)
        whole = -(-values // factor) if up else values // factor
        return stored_decimal(whole, made.type)
    whole = cut(values.astype(np.float64))
    # Out of range, Java's conversion gives the nearest bigint, and 0 for NaN.
    inside = (whole > LONG_MIN) & (whole < 2.0**63)
    integers = np.where(inside, whole, 0.0).astype(np.int64)
    return KernelResult(np.where(inside | (whole != whole), integers, np.where(whole > 0, LONG_MAX, LONG_MIN)))


def _round(made: Call, values: Sequence[Values]) -> KernelResult:
    type_, places = made.first, _places("round", made.arguments)
    scale = type_.scale if type_.is_decimal else 0
    if places >= scale:
        return rescaled(values[0], scale, made.type) if type_.is_decimal else KernelResult(values[0])
    wide = values[0].astype(object) if scale - places > 17 else values[0]
    rounded = rounded_off(wide, scale - places)
    if places < 0:
        rounded = np.asarray(rounded.astype(object) * 10**-places, dtype=object)
    if type_.is_decimal:
        return stored_decimal(rounded, made.type)
    bad = as_mask((rounded < -(2 ** (type_.bits - 1))) | (rounded >= 2 ** (type_.bits - 1)))
    return KernelResult(np.where(bad, 0, rounded).astype(np.int64), mask_or_none(bad))


# Kernels: strings ----------------------------------------------------------------------------------------------------


def _objects(made: list[object]) -> Values:
    values = np.empty(len(made), dtype=object)
    values[:] = made
    return values


def _texts(function: Callable[..., str]) -> CallKernel:
    return lambda made, values: KernelResult(
        _objects([function(*row) for row in zip(*(v.tolist() for v in values), strict=True)])
    )


def _tests(function: Callable[..., bool]) -> CallKernel:
    def kernel(made: Call, values: Sequence[Values]) -> KernelResult:
        rows = zip(*(v.tolist() for v in values), strict=True)
        return KernelResult(np.fromiter((function(*row) for row in rows), dtype=bool, count=len(values[0])))

    return kernel


def _length(made: Call, values: Sequence[Values]) -> KernelResult:
    return KernelResult(np.fromiter(map(len, values[0].tolist()), dtype=np.int64, count=len(values[0])))


def _substring(text: str, position: int, length: int = 2**31 - 1) -> str:
    start = position - 1 if position > 0 else len(text) + position if position < 0 else 0
    end = min(start + length, 2**31 - 1)
    return text[max(start, 0) : max(end, 0)] if end > start else ""


def _concat(made: Call, values: Sequence[Values]) -> KernelResult:
    joined: list[object] = []
    characters = 0
    for row in zip(*(v.tolist() for v in values), strict=True):
        text = "".join(row)
        characters += len(text)
        if characters > MAX_JOINED:
            raise OverflowError(f"concat() makes more than {MAX_JOINED:,} characters of one batch of events")
        joined.append(text)
    return KernelResult(_objects(joined))


def _left(text: str, length: int) -> str:
    return _substring(text, 1, length)


def _right(text: str, length: int) -> str:
    return "" if length <= 0 else _substring(text, -length)


# Kernels: times ------------------------------------------------------------------------------------------------------


def _clock(unit: int, modulus: int) -> CallKernel:
    return lambda made, values: KernelResult(values[0] // unit % modulus)


def _day_of_week(made: Call, values: Sequence[Values]) -> KernelResult:
    # Sunday is 1; the epoch was a Thursday.
    return KernelResult((values[0] + 4) % 7 + 1)


def _months(days: Values) -> Values:
    """Months since January 1970."""
    return np.asarray(days.astype("datetime64[D]").astype("datetime64[M]").astype(np.int64))


def _first_days(months: Values) -> Values:
    return np.asarray(months.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64))


def _year(made: Call, values: Sequence[Values]) -> KernelResult:
    return KernelResult(_months(values[0]) // 12 + 1970)


def _month(made: Call, values: Sequence[Values]) -> KernelResult:
    return KernelResult(_months(values[0]) % 12 + 1)


def _day_of_month(made: Call, values: Sequence[Values]) -> KernelResult:
    return KernelResult(values[0] - _first_days(_months(values[0])) + 1)


def _days_between(made: Call, values: Sequence[Values]) -> KernelResult:
    return KernelResult(values[0] - values[1])


_UNITS = {
    "microsecond": 1, "millisecond": 1_000, "second": SECOND_US, "minute": 60 * SECOND_US, "hour": 3600 * SECOND_US,
    "day": DAY_US, "week": 0, "month": 1, "quarter": 3, "year": 12,
}  # fmt: skip
_TRUNCATIONS = {unit: unit for unit in _UNITS} | {
    "dd": "day", "mon": "month", "mm": "month", "yyyy": "year", "yy": "year",
}  # fmt: skip


def _truncate(made: Call, values: Sequence[Values]) -> KernelResult:
    unit, moments = _TRUNCATIONS[str(made.arguments[0].literal).lower()], values[1]
    if unit in ("month", "quarter", "year"):
        months = _months(timestamps_to_dates(moments))
        return KernelResult(_first_days(months // _UNITS[unit] * _UNITS[unit]) * DAY_US)
    if unit == "week":
        days = timestamps_to_dates(moments)
        return KernelResult((days - (days + 3) % 7) * DAY_US)
    return KernelResult(moments // _UNITS[unit] * _UNITS[unit])


# Kernels: arrays -----------------------------------------------------------------------------------------------------


def _array_contains(made: Call, values: Sequence[Values]) -> KernelResult:
    found = np.zeros(len(values[0]), dtype=bool)
    unknown = np.zeros(len(values[0]), dtype=bool)
    for row, (items, value) in enumerate(zip(values[0].tolist(), values[1].tolist(), strict=True)):
        found[row] = value in items or (value != value and any(item is not None and item != item for item in items))
        unknown[row] = not found[row] and None in items
    return KernelResult(found, None, mask_or_none(unknown))


def _size(made: Call, values: Sequence[Values]) -> KernelResult:
    return _length(made, values)


def _element_at(made: Call, values: Sequence[Values]) -> KernelResult:
    arrays, positions = values[0].tolist(), values[1].tolist()
    bad = np.array([p == 0 or abs(p) > len(items) for items, p in zip(arrays, positions, strict=True)], dtype=bool)
    picked = [
        None if wrong else items[p - 1 if p > 0 else p]
        for items, p, wrong in zip(arrays, positions, bad.tolist(), strict=True)
    ]
    null = np.fromiter((item is None for item in picked), dtype=bool, count=len(picked)) & ~bad
    filler = np.zeros((), dtype=made.type.storage).item()
    return KernelResult(
        _objects([filler if item is None else item for item in picked]).astype(made.type.storage, copy=False),
        mask_or_none(bad), mask_or_none(null),
    )  # fmt: skip


_STRINGS = takes(STRING, gives=STRING)
_TWO_STRINGS = takes(STRING, STRING, gives=BOOLEAN)

FUNCTIONS: dict[str, Function] = {
    # numbers
    "abs": Function(size, _abs),
    "ceil": Function(whole_number, _ceil),
    "ceiling": Function(whole_number, _ceil),
    "floor": Function(whole_number, _floor),
    "round": Function(rounding, _round),
    "sign": Function(number_to_double, _sign),
    "signum": Function(number_to_double, _sign),
    # strings
    "lower": Function(changed_case, _texts(str.lower)),
    "lcase": Function(changed_case, _texts(str.lower)),
    "upper": Function(changed_case, _texts(str.upper)),
    "ucase": Function(changed_case, _texts(str.upper)),
    "trim": Function(_STRINGS, _texts(lambda text: text.strip(" "))),
    "ltrim": Function(_STRINGS, _texts(lambda text: text.lstrip(" "))),
    "rtrim": Function(_STRINGS, _texts(lambda text: text.rstrip(" "))),
    "length": Function(takes(STRING, gives=INT), _length),
    "char_length": Function(takes(STRING, gives=INT), _length),
    "substring": Function(takes(STRING, INT, INT, gives=STRING, optional=1), _texts(_substring)),
    "substr": Function(takes(STRING, INT, INT, gives=STRING, optional=1), _texts(_substring)),
    "left": Function(takes(STRING, INT, gives=STRING), _texts(_left)),
    "right": Function(takes(STRING, INT, gives=STRING), _texts(_right)),
    "concat": Function(many_strings, _concat),
    "startswith": Function(_TWO_STRINGS, _tests(str.startswith)),
    "endswith": Function(_TWO_STRINGS, _tests(str.endswith)),
    "contains": Function(_TWO_STRINGS, _tests(str.__contains__)),
    # times
    "hour": Function(takes(TIMESTAMP, gives=INT), _clock(3600 * SECOND_US, 24)),
    "minute": Function(takes(TIMESTAMP, gives=INT), _clock(60 * SECOND_US, 60)),
    "second": Function(takes(TIMESTAMP, gives=INT), _clock(SECOND_US, 60)),
    "dayofweek": Function(date_part, _day_of_week),
    "dayofmonth": Function(date_part, _day_of_month),
    "day": Function(date_part, _day_of_month),
    "month": Function(date_part, _month),
    "year": Function(date_part, _year),
    "date_trunc": Function(truncation, _truncate),
    "datediff": Function(two_dates, _days_between),
    "unix_micros": Function(takes(TIMESTAMP, gives=BIGINT), lambda made, values: KernelResult(values[0])),
    # arrays
    "array_contains": Function(contained, _array_contains),
    "size": Function(counted_array, _size),
    "element_at": Function(element, _element_at),
}

_CANONICAL = {
    "ceiling": "ceil", "signum": "sign", "lcase": "lower", "ucase": "upper", "char_length": "length",
    "substr": "substring", "day": "dayofmonth", "nvl": "coalesce", "ifnull": "coalesce",
}  # fmt: skip


# Forms: what does not evaluate all of its arguments, or does not give NULL for NULL -------------------------------------


def _coalesce(name: str, arguments: Arguments) -> Node:
    _counted(name, arguments, *((2, 2) if name in ("nvl", "ifnull") else (1, MAX_ARGUMENTS)))
    sql = call_text("coalesce", arguments)
    made = convert_to_common(arguments, repr(sql))

    def run(columns: Mapping[str, Column], rows: int) -> Column:
        choice = Choice(made[0].type, rows)
        for argument in made:
            column = argument.run(columns, rows)
            choice.fail(column)
            choice.take(column.is_known(), column)
        return choice.column()

    return Node(made[0].type, sql, run, fields=fields_of(made))


def _if(name: str, arguments: Arguments) -> Node:
    _counted(name, arguments, 3, 3)
    condition, yes, no = arguments
    return cases([(boolean(condition, "if()"), yes)], no, call_text("if", arguments))


def _nullif(name: str, arguments: Arguments) -> Node:
    _counted(name, arguments, 2, 2)
    value, other = arguments
    same = comparison("=", value, other)
    none = implicit(Node(NULL, "null", value.run), value.type)
    return cases([(same, none)], value, call_text(name, arguments))


def _extreme(name: str, arguments: Arguments) -> Node:
    _counted(name, arguments, 2, MAX_ARGUMENTS)
    sql = call_text(name, arguments)
    made = convert_to_common(arguments, repr(sql))
    if made[0].type.name == "array":
        raise Refused(f"{name}() takes single values, got {made[0].type}")

    def better(new: Values, old: Values) -> Values:
        return less(old, new) if name == "greatest" else less(new, old)

    def run(columns: Mapping[str, Column], rows: int) -> Column:
        inputs = [argument.run(columns, rows) for argument in made]
        _, error = decide_at_once(inputs)
        known = inputs[0].is_known()
        kind = object if any(column.values.dtype == object for column in inputs) else inputs[0].values.dtype
        values = harmless_values(inputs[0], ~known).astype(kind)
        for column in inputs[1:]:
            there = column.is_known()
            new = harmless_values(column, ~there)
            wins = there & (~known | better(new, values))
            values[wins] = new[wins]
            known |= there
        null = ~known if error is None else ~known & ~error
        return Column(made[0].type, values, mask_or_none(null), error)

    return Node(made[0].type, sql, run, fields=fields_of(made))


def _is_null(name: str, arguments: Arguments) -> Node:
    _counted(name, arguments, 1, 1)
    return is_null(arguments[0], negated=name == "isnotnull")


def _mod(name: str, arguments: Arguments) -> Node:
    _counted(name, arguments, 2, 2)
    return arithmetic("%", *arguments)


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
    "mod": _mod,
}


# LIKE ----------------------------------------------------------------------------------------------------------------


def like(value: Node, pattern: Node, escape: str, negated: bool) -> Node:
    """value [not] like pattern: `%` is any text, `_` any character. The time is linear in the text. Raises Refused."""
    if not isinstance(pattern.literal, str):
        raise Refused("the pattern of 'like' must be a literal text; use contains(), startswith() or endswith()")
    sql = f"{value.within(4)} {'not ' if negated else ''}like {pattern.sql}"
    if escape != "\\":
        sql += f" escape {quoted(escape)}"
    matches = matcher(pattern.literal, escape)
    kernel: Callable[[str], bool] = (lambda text: not matches(text)) if negated else matches
    text = _typed("like", value, STRING)

    def run(values: Values) -> KernelResult:
        return KernelResult(np.fromiter(map(kernel, values.tolist()), dtype=bool, count=len(values)))

    return strict(BOOLEAN, sql, [text], run, 4)


def quoted(text: str) -> str:
    """A string literal of this text."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _pieces(pattern: str, escape: str) -> list[list[str | None]]:
    """The pattern cut at `%`; None stands for any character. Raises Refused."""
    pieces: list[list[str | None]] = [[]]
    position = 0
    while position < len(pattern):
        character = pattern[position]
        position += 1
        if character == escape:
            following = pattern[position : position + 1]
            if following not in ("%", "_", escape) or not following:
                raise Refused(
                    f"the pattern {pattern!r} has {escape!r} before something other than %, _ or {escape!r}; double it"
                )
            pieces[-1].append(following)
            position += 1
        elif character == "%":
            pieces.append([])
        else:
            pieces[-1].append(None if character == "_" else character)
    return pieces


def matcher(pattern: str, escape: str) -> Callable[[str], bool]:
    """The test of a LIKE pattern. Each part between `%` is taken where it first fits, so nothing is tried twice."""
    pieces = _pieces(pattern, escape)
    parts = [re.compile("".join("." if c is None else re.escape(c) for c in piece), re.DOTALL) for piece in pieces]
    if all(None not in piece for piece in pieces):
        return _plain_matcher(["".join(c or "" for c in piece) for piece in pieces])
    if len(parts) == 1:
        return lambda text: parts[0].fullmatch(text) is not None
    if any(None in piece and len(piece) > MAX_LIKE_PART for piece in pieces[1:-1]):
        raise Refused(
            f"the pattern has a part of more than {MAX_LIKE_PART} characters with '_' between two '%'; make it shorter"
        )
    head, *middle, tail = parts
    tail_length = len(pieces[-1])

    def matches(text: str) -> bool:
        found = head.match(text)
        for part in middle:
            if found is None:
                return False
            found = part.search(text, found.end())
        end = len(text) - tail_length
        return found is not None and end >= found.end() and tail.match(text, end) is not None

    return matches


def _plain_matcher(pieces: list[str]) -> Callable[[str], bool]:
    """The test of a pattern without `_`."""
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


# Aggregates ----------------------------------------------------------------------------------------------------------


def any_value(type_: DataType) -> str | None:
    """count: anything can be counted."""
    return None


def exact_number(type_: DataType) -> str | None:
    """sum, avg, stddev_samp: numbers whose sums do not depend on their order."""
    if type_.is_float:
        return (
            f"takes exact numbers, since sums of a {type_} depend on order; write cast(x as decimal(18,2)) or as needed"
        )
    return None if type_.is_integer or type_.is_decimal else f"takes an integer or a decimal, got {type_}; cast it"


def ordered(type_: DataType) -> str | None:
    """min, max, count(distinct): single values, which have an order."""
    return f"takes single values, got {type_}" if type_.name in ("array", "null") else None


# SQL name -> what is wrong with an argument type, None if nothing
AGGREGATES: dict[str, Callable[[DataType], str | None]] = {
    "count": any_value,
    "sum": exact_number,
    "avg": exact_number,
    "min": ordered,
    "max": ordered,
    "stddev_samp": exact_number,
}

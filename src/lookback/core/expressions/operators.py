"""Operators and special forms of SQL as nodes, typed and coerced as Spark does in ANSI mode."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from lookback.core.expressions.casts import DAY_US, cast_kernel, refusal
from lookback.core.expressions.coercion import (
    common_type,
    decimal_of,
    literal_decimal,
    product_type,
    quotient_type,
    remainder_type,
    sum_type,
    wider_decimal,
)
from lookback.core.expressions.kernels import (
    LONG_MAX,
    KernelResult,
    add_decimals,
    add_integers,
    aligned_decimals,
    divide_decimals,
    divide_floats,
    divide_integers,
    either_mask,
    equal,
    less,
    mask_or_none,
    multiply_decimals,
    multiply_integers,
    negate_integers,
    remainder_decimals,
    remainder_floats,
    remainder_integers,
    subtract_integers,
)
from lookback.core.expressions.nodes import (
    AND,
    COMPARISON,
    NOT,
    OR,
    PRIMARY,
    PRODUCT,
    SUM,
    UNARY,
    Choice,
    Kernel,
    Node,
    conjunction,
    constant,
    disjunction,
    fields_of,
    renamed,
    strict,
)
from lookback.core.values.columns import Column, Values
from lookback.core.values.types import BIGINT, BOOLEAN, DATE, DOUBLE, NULL, STRING, TIMESTAMP, DataType


class Refused(Exception):
    """An operation that is not allowed on its operands; the text says what to do."""


# Casts ---------------------------------------------------------------------------------------------------------------


def implicit(node: Node, type_: DataType) -> Node:
    """The node cast to a type that Spark casts to by itself; it prints as before."""
    if node.type == type_:
        return node
    return convert(node, type_, node.sql, node.level)


def convert(node: Node, type_: DataType, sql: str, level: int = PRIMARY) -> Node:
    """The node cast to a type. Raises Refused."""
    if node.type == NULL:
        return constant(type_, None, sql, level)
    if node.type == STRING and type_.name in ("date", "timestamp") and isinstance(node.literal, str):
        return constant(type_, parse_literal_time(node.literal, type_), sql, level)
    kernel = cast_kernel(node.type, type_)
    if kernel is None:
        raise Refused(refusal(node.type, type_))
    return strict(type_, sql, [node], kernel, level)


def explicit_cast(node: Node, type_: DataType, tolerant: bool) -> Node:
    """cast(node as type), or try_cast, which gives NULL where the cast fails (but not where the operand does)."""
    sql = f"{'try_cast' if tolerant else 'cast'}({node.sql} as {type_})"
    if not tolerant:
        return renamed(convert(node, type_, sql), sql)
    if node.type == NULL or node.type == type_:
        return renamed(convert(node, type_, sql), sql)
    kernel = cast_kernel(node.type, type_)
    if kernel is None:
        raise Refused(refusal(node.type, type_))

    def forgiving(values: Values) -> KernelResult:
        outcome = kernel(values)
        return KernelResult(outcome.values, None, either_mask(outcome.bad, outcome.null))

    return strict(type_, sql, [node], forgiving)


_MOMENT = re.compile(
    r"(\d{4})-(\d{1,2})-(\d{1,2})(?:[ T](\d{1,2}):(\d{1,2})(?::(\d{1,2})(?:\.(\d{1,6}))?)?(Z|[+-]\d{2}:\d{2})?)?",
    re.ASCII,
)


def parse_literal_time(text: str, type_: DataType) -> int:
    """Days or microseconds since the epoch of a date or timestamp literal; without a zone it is UTC. Raises Refused."""
    match = _MOMENT.fullmatch(text.strip(" "))
    remedy = f"{text!r} is not a {type_} that is understood; write it like "
    remedy += "'2026-01-31'" if type_ == DATE else "'2026-01-31 12:00:00'"
    if match is None or (type_ == DATE and match.group(4)):
        raise Refused(remedy)
    year, month, day, hour, minute, second, fraction, zone = match.groups()
    try:
        date = dt.date(int(year), int(month), int(day))
        time = dt.time(int(hour or 0), int(minute or 0), int(second or 0), int((fraction or "0").ljust(6, "0")))
    except ValueError:
        raise Refused(remedy) from None
    days = (date - dt.date(1970, 1, 1)).days
    if type_ == DATE:
        return days
    seconds = time.hour * 3600 + time.minute * 60 + time.second - _offset(zone, remedy)
    return days * DAY_US + seconds * 1_000_000 + time.microsecond


def _offset(zone: str | None, remedy: str) -> int:
    if zone is None or zone == "Z":
        return 0
    hours, minutes = int(zone[1:3]), int(zone[4:6])
    if hours > 18 or minutes > 59 or (hours == 18 and minutes):
        raise Refused(remedy)
    return (-1 if zone[0] == "-" else 1) * (hours * 3600 + minutes * 60)


def convert_to_common(nodes: Sequence[Node], what: str) -> list[Node]:
    """The nodes cast to their common type. Raises Refused."""
    dated = next((node.type for node in nodes if node.type.name in ("date", "timestamp")), None)
    if dated is not None:
        nodes = [
            implicit(n, dated) if n.type == STRING and isinstance(n.literal, str) else n for n in nodes
        ]  # Spark casts the string literals
    type_ = common_type(node.type for node in nodes)
    if type_ is None:
        raise Refused(f"{what} mixes {_listing(nodes)}; cast them to one type")
    return [implicit(node, type_) for node in nodes]


def _listing(nodes: Sequence[Node]) -> str:
    names = list(dict.fromkeys(str(node.type) for node in nodes))
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


# Comparison ----------------------------------------------------------------------------------------------------------

_Order = Callable[[Values, Values], Values]
_ORDERS: dict[str, _Order] = {
    "=": equal,
    "!=": lambda a, b: ~equal(a, b),
    "<": less,
    ">": lambda a, b: less(b, a),
    "<=": lambda a, b: ~less(b, a),
    ">=": lambda a, b: ~less(a, b),
}


def comparison(symbol: str, a: Node, b: Node) -> Node:
    """a = b and its kin; `<=>` is `=` that is never NULL. Raises Refused."""
    sql = f"{a.within(COMPARISON)} {symbol} {b.within(COMPARISON)}"
    left, right, scales = _comparable(a, b, sql)
    order = _ORDERS["=" if symbol == "<=>" else symbol]

    def kernel(x: Values, y: Values) -> KernelResult:
        return KernelResult(order(*(aligned_decimals(x, y, scales) if scales else (x, y))))

    node = strict(BOOLEAN, sql, [left, right], kernel, COMPARISON)
    return _null_safe(left, right, kernel, sql) if symbol == "<=>" else node


def _comparable(a: Node, b: Node, sql: str) -> tuple[Node, Node, tuple[int, int] | None]:
    """Both operands ready to compare, and the scales to align if they are decimals."""
    types = {a.type.name, b.type.name}
    if "array" in types or (a.type == NULL and b.type == NULL):
        raise Refused(
            f"{sql!r} compares {a.type} and {b.type}; compare single values, and test for NULL with 'is null'"
        )
    if a.type.is_numeric and b.type.is_numeric and "decimal" in types and not (a.type.is_float or b.type.is_float):
        left, right = operand_decimals(a, b)
        wide = wider_decimal(left, right)
        if wide.scale == max(left.scale, right.scale):
            return a, b, (left.scale, right.scale)
        return convert(a, wide, a.sql, a.level), convert(b, wide, b.sql, b.level), (wide.scale, wide.scale)
    if a.type.is_integer and b.type.is_integer:
        return a, b, None
    if a.type != b.type and STRING in (a.type, b.type) and (a.type.is_numeric or b.type.is_numeric):
        raise Refused(f"{sql!r} compares {a.type} and {b.type}; cast one of them, or drop the quotes of a number")
    left_node, right_node = convert_to_common([a, b], repr(sql))
    return left_node, right_node, None


def operand_decimals(a: Node, b: Node) -> tuple[DataType, DataType]:
    """The decimal types that two exact numbers, at least one of them a decimal, count with."""

    def counted(node: Node, other: Node) -> DataType:
        if node.type.is_integer and other.type.is_decimal and isinstance(node.literal, int):
            return literal_decimal(node.literal)
        return decimal_of(node.type)

    return counted(a, b), counted(b, a)


def _null_safe(a: Node, b: Node, kernel: Kernel, sql: str) -> Node:
    def run(columns: Mapping[str, Column], rows: int) -> Column:
        left, right = a.run(columns, rows), b.run(columns, rows)
        plain = strict(BOOLEAN, "", [_given(left), _given(right)], kernel).run(columns, rows)
        none = np.zeros(rows, dtype=bool)
        left_null = none if left.null is None else left.null
        right_null = none if right.null is None else right.null
        same = np.where(left_null | right_null, left_null & right_null, plain.values)
        error = none if left.error is None else left.error
        error = error if right.error is None else error | right.error
        return Column(BOOLEAN, same, None, mask_or_none(error))

    return Node(BOOLEAN, sql, run, COMPARISON, fields=fields_of([a, b]))


def _given(column: Column) -> Node:
    return Node(column.type, "", lambda columns, rows: column)


def is_null(node: Node, negated: bool) -> Node:
    """node is [not] null."""

    def run(columns: Mapping[str, Column], rows: int) -> Column:
        column = node.run(columns, rows)
        null = np.zeros(rows, dtype=bool) if column.null is None else column.null
        return Column(BOOLEAN, ~null if negated else null, None, column.error)

    sql = f"{node.within(COMPARISON)} is {'not ' if negated else ''}null"
    return Node(BOOLEAN, sql, run, COMPARISON, fields=node.fields)


def is_truth(node: Node, truth: bool, negated: bool) -> Node:
    """node is [not] true, node is [not] false: never NULL. Raises Refused."""
    condition = boolean(node, "'is true'")

    def run(columns: Mapping[str, Column], rows: int) -> Column:
        column = condition.run(columns, rows)
        same = column.values if truth else ~column.values
        if column.null is not None:
            same = same & ~column.null
        return Column(BOOLEAN, ~same if negated else same, None, column.error)

    sql = f"{node.within(COMPARISON)} is {'not ' if negated else ''}{str(truth).lower()}"
    return Node(BOOLEAN, sql, run, COMPARISON, fields=node.fields)


def in_list(value: Node, items: Sequence[Node]) -> Node:
    """value in (items): true at the first equal item; what comes after it cannot fail. Raises Refused."""
    sql = f"{value.within(COMPARISON)} in ({', '.join(item.sql for item in items)})"
    if value.type.name == "array":
        raise Refused(f"{sql!r} looks for an array; use array_contains()")
    nodes = convert_to_common([value, *items], repr(sql))
    if (member := _literal_member(value, items)) is not None:
        return strict(BOOLEAN, sql, nodes[:1], member, COMPARISON)

    def run(columns: Mapping[str, Column], rows: int) -> Column:
        # One after the other: all at once could be thousands of columns.
        return _member(nodes[0].run(columns, rows), (node.run(columns, rows) for node in nodes[1:]))

    return Node(BOOLEAN, sql, run, COMPARISON, fields=fields_of(nodes))


def _literal_member(value: Node, items: Sequence[Node]) -> Kernel | None:
    literals = [item.literal for item in items]
    if value.type == STRING and all(isinstance(literal, str) for literal in literals):
        texts = frozenset(literals)
        return lambda x: KernelResult(np.fromiter((text in texts for text in x.tolist()), dtype=bool, count=len(x)))
    if value.type.is_integer and all(isinstance(literal, int) and abs(literal) <= LONG_MAX for literal in literals):
        return lambda x: KernelResult(np.isin(x, np.array(literals, dtype=np.int64)))
    return None


def _member(value: Column, items: Iterable[Column]) -> Column:
    rows = len(value)
    open_ = value.is_known()
    hit, unknown, error = (np.zeros(rows, dtype=bool) for _ in range(3))
    for item in items:
        if item.error is not None:
            error |= open_ & item.error
            open_ &= ~item.error
        null = np.zeros(rows, dtype=bool) if item.null is None else item.null
        unknown |= open_ & null
        same = open_ & ~null & equal(value.values, item.values)
        hit |= same
        open_ = open_ & ~same
    null = unknown & ~hit & ~error
    if value.null is not None:
        null |= value.null
    if value.error is not None:
        error |= value.error
    return Column(BOOLEAN, hit, mask_or_none(null), mask_or_none(error))


# Logic ---------------------------------------------------------------------------------------------------------------


def boolean(node: Node, what: str) -> Node:
    """The node as a condition. Raises Refused."""
    if node.type not in (BOOLEAN, NULL):
        raise Refused(f"{what} needs a condition, but {node.sql!r} is of type {node.type}; compare it with something")
    return implicit(node, BOOLEAN)


def logic(word: str, nodes: Sequence[Node]) -> Node:
    """`and` or `or` of conditions, evaluated from left to right as far as needed. Raises Refused."""
    level, combine = (AND, conjunction) if word == "and" else (OR, disjunction)
    conditions = [boolean(node, repr(word)) for node in nodes]
    # The first may stand without parentheses even if it is such a chain itself.
    shown = [node.within(level - (index == 0)) for index, node in enumerate(nodes)]

    def run(columns: Mapping[str, Column], rows: int) -> Column:
        return combine(condition.run(columns, rows) for condition in conditions)

    return Node(BOOLEAN, f" {word} ".join(shown), run, level, fields=fields_of(nodes))


def negation(node: Node) -> Node:
    """not node. Raises Refused."""
    condition = boolean(node, "'not'")
    return strict(BOOLEAN, f"not {node.within(NOT - 1)}", [condition], lambda values: KernelResult(~values), NOT)


def cases(branches: Sequence[tuple[Node, Node]], default: Node | None, sql: str) -> Node:
    """The value of the first branch whose condition is true, else the default or NULL. Raises Refused."""
    values = [value for _, value in branches] + ([] if default is None else [default])
    made = convert_to_common(values, repr(sql))
    conditions = [boolean(condition, "'when'") for condition, _ in branches]
    if any(condition.type == NULL for condition, _ in branches):
        raise Refused(f"{sql!r} has a bare NULL as a condition; leave that branch out")
    type_ = made[0].type

    def run(columns: Mapping[str, Column], rows: int) -> Column:
        choice = Choice(type_, rows)
        for condition, value in zip(conditions, made, strict=False):
            when = condition.run(columns, rows)
            choice.fail(when)
            choice.take(when.is_true(), value.run(columns, rows))
        if default is not None:
            choice.take(None, made[-1].run(columns, rows))
        return choice.column()

    return Node(type_, sql, run, fields=fields_of([*conditions, *made]))


# Arithmetic ----------------------------------------------------------------------------------------------------------

_LEVELS = {"+": SUM, "-": SUM, "||": SUM, "*": PRODUCT, "/": PRODUCT, "%": PRODUCT, "div": PRODUCT}


def arithmetic(symbol: str, a: Node, b: Node) -> Node:
    """a + b, a - b, a * b, a / b, a % b, a div b of numbers. Raises Refused."""
    level = _LEVELS[symbol]
    sql = f"{a.within(level - 1)} {symbol} {b.within(level)}"
    if a.type == NULL and b.type.is_numeric:
        a = implicit(a, b.type)
    if b.type == NULL and a.type.is_numeric:
        b = implicit(b, a.type)
    if not (a.type.is_numeric and b.type.is_numeric):
        raise Refused(_no_arithmetic(symbol, a, b, sql))
    if a.type.is_float or b.type.is_float:
        return _float_arithmetic(symbol, a, b, sql)
    if a.type.is_decimal or b.type.is_decimal:
        return _decimal_arithmetic(symbol, a, b, sql)
    if symbol == "/":
        return _float_arithmetic(symbol, a, b, sql)
    return _integer_arithmetic(symbol, a, b, sql)


def _no_arithmetic(symbol: str, a: Node, b: Node, sql: str) -> str:
    names = {a.type.name, b.type.name}
    reason = f"{sql!r}: {symbol!r} takes numbers, got {a.type} and {b.type}"
    if names == {"timestamp"}:
        return f"{reason}; subtract unix_micros() of one from that of the other"
    if "date" in names:
        return f"{reason}; use datediff() for days between dates, or cast to timestamp and add an interval"
    if "timestamp" in names:
        return f"{reason}; add an interval, such as interval '10' minutes"
    if "string" in names and symbol == "+":
        return f"{reason}; cast to a number, or join texts with ||"
    return f"{reason}; cast to a number"


def _integer_arithmetic(symbol: str, a: Node, b: Node, sql: str) -> Node:
    type_ = common_type([a.type, b.type])
    assert type_ is not None
    bits = type_.bits
    kernels: dict[str, Kernel] = {
        "+": lambda x, y: add_integers(x, y, bits),
        "-": lambda x, y: subtract_integers(x, y, bits),
        "*": lambda x, y: multiply_integers(x, y, bits),
        "%": remainder_integers,
        "div": divide_integers,
    }
    result = BIGINT if symbol == "div" else type_
    return strict(result, sql, [a, b], kernels[symbol], _LEVELS[symbol], right_first=symbol in ("%", "div"))


_FLOAT_KERNELS: dict[str, Kernel] = {
    "+": lambda x, y: KernelResult(x + y),
    "-": lambda x, y: KernelResult(x - y),
    "*": lambda x, y: KernelResult(x * y),
    "/": divide_floats,
    "%": remainder_floats,
}


def _float_arithmetic(symbol: str, a: Node, b: Node, sql: str) -> Node:
    if symbol == "div":
        raise Refused(f"{sql!r}: 'div' takes integers; use floor({sql.replace(' div ', ' / ')})")
    type_ = a.type if a.type == b.type and symbol != "/" and a.type.is_float else DOUBLE
    operands = [implicit(a, type_), implicit(b, type_)]
    return strict(type_, sql, operands, _FLOAT_KERNELS[symbol], _LEVELS[symbol], right_first=symbol in ("/", "%"))


def _decimal_arithmetic(symbol: str, a: Node, b: Node, sql: str) -> Node:
    if symbol == "div":
        raise Refused(f"{sql!r}: 'div' takes integers; cast both to bigint")
    types = operand_decimals(a, b)
    rules = {"+": sum_type, "-": sum_type, "*": product_type, "/": quotient_type, "%": remainder_type}
    result = rules[symbol](*types)
    kernels: dict[str, Kernel] = {
        "+": lambda x, y: add_decimals(x, y, types, result),
        "-": lambda x, y: add_decimals(x, y, types, result, sign=-1),
        "*": lambda x, y: multiply_decimals(x, y, types, result),
        "/": lambda x, y: divide_decimals(x, y, types, result),
        "%": lambda x, y: remainder_decimals(x, y, types, result),
    }
    return strict(result, sql, [a, b], kernels[symbol], _LEVELS[symbol], right_first=symbol in ("/", "%"))


def negative(node: Node) -> Node:
    """-node of a number. Raises Refused."""
    if not node.type.is_numeric:
        raise Refused(f"'-' takes a number, but {node.sql!r} is of type {node.type}; cast it")
    # A minus before the cast of a literal is refused (see syntax), and one before a number makes a literal of both, which
    # has a type of its own beside decimals: what is printed must be read again as it was.
    alone = not node.fields and (node.sql.startswith(("cast(", "try_cast(")) or node.sql[0].isdigit())
    sql = f"-({node.sql})" if alone else f"-{node.within(UNARY)}"
    if node.type.is_integer:
        bits = node.type.bits
        return strict(node.type, sql, [node], lambda values: negate_integers(values, bits), UNARY)
    exact_sign(node, sql)
    return strict(node.type, sql, [node], lambda values: KernelResult(-values), UNARY)


def exact_sign(node: Node, sql: str) -> None:
    """Refuse to turn the sign of a decimal for which Spark rounds to 34 digits in doing so. Raises Refused."""
    if node.type.is_decimal and node.type.precision > 34:
        raise Refused(
            f"{sql!r}: Spark cuts a {node.type} to 34 digits there; write 0 - x, or cast to at most 34 digits"
        )


def add_interval(node: Node, microseconds: int, sql: str) -> Node:
    """A timestamp moved by an interval. Raises Refused."""
    if node.type != TIMESTAMP:
        raise Refused(f"{sql!r}: an interval is added to a timestamp, but {node.sql!r} is of type {node.type}; cast it")

    def kernel(values: Values) -> KernelResult:
        return add_integers(values, np.full(1, microseconds, dtype=np.int64), 64)

    return strict(TIMESTAMP, sql, [node], kernel, SUM)

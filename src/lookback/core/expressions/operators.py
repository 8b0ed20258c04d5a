"""Makes the nodes of SQL's operators and special forms, with the types and casts of Spark in ANSI mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from lookback.core.expressions.casts import explain_refusal, find_cast
from lookback.core.expressions.coercion import (
    common_type,
    decimal_type_of,
    literal_decimal_type,
    product_type,
    quotient_type,
    remainder_type,
    sum_type,
    wider_decimal_type,
)
from lookback.core.expressions.kernels import (
    LONG_MAX,
    KernelResult,
    add_decimals,
    add_integers,
    divide_decimals,
    divide_floats,
    divide_integers,
    either_mask,
    is_equal,
    is_less,
    mask_or_none,
    multiply_decimals,
    multiply_integers,
    negate_integers,
    positive_remainder_decimals,
    positive_remainder_floats,
    positive_remainder_integers,
    remainder_decimals,
    remainder_floats,
    remainder_integers,
    scale_up,
    subtract_integers,
)
from lookback.core.expressions.literaltimes import read_literal_time
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
    combine,
    make_constant,
    make_strict,
    replace_settled,
    union_fields,
)
from lookback.core.values.columns import Column, Mask, Values, is_nan
from lookback.core.values.texts import join_words
from lookback.core.values.types import BIGINT, BOOLEAN, DATE, DOUBLE, NULL, STRING, TIMESTAMP, DataType


class RefusedOperator(Exception):
    """Raised for an operation that is not allowed on its operands. The message says what to do."""


# Casts ---------------------------------------------------------------------------------------------------------------


def cast_implicitly(node: Node, type_: DataType) -> Node:
    """Casts a node implicitly, as Spark does, and keeps its SQL. Raises Refused."""
    if node.type == type_:
        return node
    return cast_node(node, type_, node.sql, node.level)


def cast_node(node: Node, type_: DataType, sql: str, level: int = PRIMARY) -> Node:
    """Casts a node to a type. Raises Refused."""
    if node.type == NULL:
        return make_constant(type_, None, sql, level)
    if node.type == STRING and type_.name in ("date", "timestamp") and isinstance(node.literal, str):
        return make_constant(type_, parse_literal_time(node.literal, type_), sql, level)
    kernel = find_cast(node.type, type_)
    if kernel is None:
        raise RefusedOperator(explain_refusal(node.type, type_))
    return make_strict(type_, sql, [node], kernel, level)


def cast_explicitly(node: Node, type_: DataType, tolerant: bool) -> Node:
    """Makes cast(node as type), or try_cast, which is NULL if the cast fails but not if the operand fails."""
    sql = f"{'try_cast' if tolerant else 'cast'}({node.sql} as {type_})"
    if not tolerant or node.type in (NULL, type_):
        return cast_node(node, type_, sql)
    kernel = find_cast(node.type, type_)
    if kernel is None:
        raise RefusedOperator(explain_refusal(node.type, type_))
    return make_strict(type_, sql, [node], _tolerate(kernel))


def _tolerate(kernel: Kernel) -> Kernel:
    """Returns a kernel whose errors are NULL; an error of an operand stays one."""

    def run(*values: Values) -> KernelResult:
        outcome = kernel(*values)
        return KernelResult(outcome.values, None, either_mask(outcome.error, outcome.null))

    return run


def parse_literal_time(text: str, type_: DataType) -> int:
    """Parses a date or timestamp literal as days or microseconds since 1970; UTC if it has no zone. Raises Refused."""
    value = read_literal_time(text, is_date=type_ == DATE)
    if value is None:
        example = "'2026-01-31'" if type_ == DATE else "'2026-01-31 12:00:00'"
        raise RefusedOperator(f"{text!r} is not a valid {type_}; write it like {example}")
    return value


def cast_to_common(nodes: Sequence[Node], what: str) -> list[Node]:
    """Casts nodes to their common type. Raises Refused."""
    dated = next((node.type for node in nodes if node.type.name in ("date", "timestamp")), None)
    if dated is not None:
        nodes = [
            cast_implicitly(n, dated) if n.type == STRING and isinstance(n.literal, str) else n for n in nodes
        ]  # Spark casts the string literals
    type_ = common_type(node.type for node in nodes)
    if type_ is None:
        mixed = join_words(list(dict.fromkeys(str(node.type) for node in nodes)))
        raise RefusedOperator(f"{what} mixes {mixed}; cast them to one type")
    return [cast_implicitly(node, type_) for node in nodes]


# Comparison ----------------------------------------------------------------------------------------------------------

_Order = Callable[[Values, Values], Values]
_ORDERS: dict[str, _Order] = {
    "=": is_equal,
    "!=": lambda a, b: ~is_equal(a, b),
    "<": is_less,
    ">": lambda a, b: is_less(b, a),
    "<=": lambda a, b: ~is_less(b, a),
    ">=": lambda a, b: ~is_less(a, b),
}


def make_comparison(symbol: str, a: Node, b: Node) -> Node:
    """Makes a = b or another comparison. `<=>` is `=` that is never NULL. Raises Refused."""
    sql = f"{a.within(COMPARISON)} {symbol} {b.within(COMPARISON)}"
    left, right = _cast_to_compare(a, b, sql)
    order = _ORDERS["=" if symbol == "<=>" else symbol]
    if symbol == "<=>":
        return _make_null_safe(left, right, order, sql)
    node = make_strict(BOOLEAN, sql, [left, right], lambda x, y: KernelResult(order(x, y)), COMPARISON)
    return replace(node, compared=(symbol, left, right))


def _cast_to_compare(a: Node, b: Node, sql: str) -> tuple[Node, Node]:
    """Casts both operands so that their stored values can be compared."""
    types = {a.type.name, b.type.name}
    if "array" in types or (a.type == NULL and b.type == NULL):
        raise RefusedOperator(
            f"{sql!r} compares {a.type} and {b.type}; compare single values, and test for NULL with 'is null'"
        )
    if a.type.is_numeric and b.type.is_numeric and "decimal" in types and not (a.type.is_float or b.type.is_float):
        left, right = find_operand_types(a, b)
        wide = wider_decimal_type(left, right)
        if wide.scale == max(left.scale, right.scale):
            return _align_decimal(a, left.scale, wide), _align_decimal(b, right.scale, wide)
        return cast_node(a, wide, a.sql, a.level), cast_node(b, wide, b.sql, b.level)
    if a.type.is_integer and b.type.is_integer:
        return a, b
    if a.type != b.type and STRING in (a.type, b.type) and (a.type.is_numeric or b.type.is_numeric):
        raise RefusedOperator(
            f"{sql!r} compares {a.type} and {b.type}; cast one of them, or drop the quotes of a number"
        )
    left_node, right_node = cast_to_common([a, b], repr(sql))
    return left_node, right_node


def _align_decimal(node: Node, scale: int, wide: DataType) -> Node:
    """Converts exact numbers of a scale to a decimal type that holds all of them, and keeps the SQL."""
    places = wide.scale - scale
    if places == 0:
        return node
    return make_strict(wide, node.sql, [node], lambda values: KernelResult(scale_up(values, places)), node.level)


def find_operand_types(a: Node, b: Node) -> tuple[DataType, DataType]:
    """Returns the decimal types of two exact numbers as operands of an operation. At least one must be a decimal."""

    def find_type(node: Node, other: Node) -> DataType:
        if node.type.is_integer and other.type.is_decimal and isinstance(node.literal, int):
            return literal_decimal_type(node.literal)
        return decimal_type_of(node.type)

    return find_type(a, b), find_type(b, a)


def _make_null_safe(a: Node, b: Node, order: _Order, sql: str) -> Node:
    def run(columns: Mapping[str, Column], rows: int) -> Column:
        inputs = a.run(columns, rows), b.run(columns, rows)
        left, right = (_find_nulls(column) for column in inputs)
        settled = mask_or_none(~(inputs[0].is_known() & inputs[1].is_known()))
        same = order(*(replace_settled(column, settled) for column in inputs))
        return Column(
            BOOLEAN, np.where(left | right, left & right, same), None, either_mask(inputs[0].error, inputs[1].error)
        )

    return Node(BOOLEAN, sql, run, COMPARISON, fields=union_fields([a, b]))


def _find_nulls(column: Column) -> Mask:
    return np.zeros(len(column), dtype=bool) if column.null is None else column.null


def _make_test(node: Node, sql: str, test: Callable[[Column], Mask], level: int = COMPARISON) -> Node:
    """Makes a test of a value, which is never NULL."""

    def run(columns: Mapping[str, Column], rows: int) -> Column:
        column = node.run(columns, rows)
        return Column(BOOLEAN, test(column), None, column.error)

    return Node(BOOLEAN, sql, run, level, fields=node.fields)


def make_is_nan(node: Node, sql: str) -> Node:
    """Makes isnan(node) of a float, which is false for NULL."""
    return _make_test(node, sql, lambda column: is_nan(column.values) & column.is_known(), PRIMARY)


def make_is_null(node: Node, negated: bool) -> Node:
    """Makes node is [not] null."""
    sql = f"{node.within(COMPARISON)} is {'not ' if negated else ''}null"
    return _make_test(node, sql, lambda column: _find_nulls(column) ^ negated)


def make_is_truth(node: Node, truth: bool, negated: bool) -> Node:
    """Makes node is [not] true or node is [not] false, which is never NULL. Raises Refused."""
    sql = f"{node.within(COMPARISON)} is {'not ' if negated else ''}{str(truth).lower()}"
    condition = require_condition(node, "'is true'")
    return _make_test(condition, sql, lambda column: ((column.values == truth) & ~_find_nulls(column)) ^ negated)


def make_in_list(value: Node, items: Sequence[Node]) -> Node:
    """Makes value in (items): true at the first equal item, so later items cannot make it fail. Raises Refused."""
    sql = f"{value.within(COMPARISON)} in ({', '.join(item.sql for item in items)})"
    if value.type.name == "array":
        raise RefusedOperator(f"{sql!r} looks for an array; use array_contains()")
    nodes = cast_to_common([value, *items], repr(sql))
    if (member := _make_literal_test(value, items)) is not None:
        return make_strict(BOOLEAN, sql, nodes[:1], member, COMPARISON)

    def run(columns: Mapping[str, Column], rows: int) -> Column:
        # Evaluate items one by one, since all at once could be thousands of columns.
        return _find_members(nodes[0].run(columns, rows), (node.run(columns, rows) for node in nodes[1:]))

    return Node(BOOLEAN, sql, run, COMPARISON, fields=union_fields(nodes))


def _make_literal_test(value: Node, items: Sequence[Node]) -> Kernel | None:
    literals = [item.literal for item in items]
    if value.type == STRING and all(isinstance(literal, str) for literal in literals):
        texts = frozenset(literals)
        return lambda x: KernelResult(np.fromiter((text in texts for text in x.tolist()), dtype=bool, count=len(x)))
    if value.type.is_integer and all(isinstance(literal, int) and abs(literal) <= LONG_MAX for literal in literals):
        return lambda x: KernelResult(np.isin(x, np.array(literals, dtype=np.int64)))
    return None


def _find_members(value: Column, items: Iterable[Column]) -> Column:
    rows = len(value)
    open_ = value.is_known()
    hit, unknown, error = (np.zeros(rows, dtype=bool) for _ in range(3))
    for item in items:
        if item.error is not None:
            error |= open_ & item.error
            open_ &= ~item.error
        null = _find_nulls(item)
        unknown |= open_ & null
        same = open_ & ~null & is_equal(value.values, item.values)
        hit |= same
        open_ = open_ & ~same
    null = unknown & ~hit & ~error
    if value.null is not None:
        null |= value.null
    if value.error is not None:
        error |= value.error
    return Column(BOOLEAN, hit, mask_or_none(null), mask_or_none(error))


# Logic ---------------------------------------------------------------------------------------------------------------


def require_condition(node: Node, what: str) -> Node:
    """Returns the node as a boolean node. Raises Refused if it is not a condition."""
    if node.type not in (BOOLEAN, NULL):
        raise RefusedOperator(
            f"{what} needs a condition, but {node.sql!r} is of type {node.type}; compare it with something"
        )
    return cast_implicitly(node, BOOLEAN)


def make_logic(word: str, nodes: Sequence[Node], joined: Sequence[Node] | None = None) -> Node:
    """Makes `and` or `or` of conditions, evaluated from left to right as far as needed. Raises Refused.

    joined: fewer nodes that say the same in the same order.
    """
    level = AND if word == "and" else OR
    conditions = [require_condition(node, repr(word)) for node in joined or nodes]
    # The first operand needs no parentheses, even if it is a chain of the same operator.
    shown = [node.within(level - (index == 0)) for index, node in enumerate(nodes)]

    def run(columns: Mapping[str, Column], rows: int) -> Column:
        return combine(conditions, columns, rows, settles=word == "or")

    return Node(BOOLEAN, f" {word} ".join(shown), run, level, fields=union_fields(nodes))


def make_not(node: Node) -> Node:
    """Makes not node. Raises Refused."""
    condition = require_condition(node, "'not'")
    return make_strict(BOOLEAN, f"not {node.within(NOT - 1)}", [condition], lambda values: KernelResult(~values), NOT)


def make_case(branches: Sequence[tuple[Node, Node]], default: Node | None, sql: str) -> Node:
    """Makes a case expression: the first branch whose condition is true, else the default or NULL. Raises Refused."""
    values = [value for _, value in branches] + ([] if default is None else [default])
    nodes = cast_to_common(values, repr(sql))
    conditions = [require_condition(condition, "'when'") for condition, _ in branches]
    if any(condition.type == NULL for condition, _ in branches):
        raise RefusedOperator(f"{sql!r} has a bare NULL as a condition; leave that branch out")
    type_ = nodes[0].type

    def run(columns: Mapping[str, Column], rows: int) -> Column:
        choice = Choice(type_, rows)
        for condition, value in zip(conditions, nodes, strict=False):
            when = condition.run(columns, rows)
            choice.fail(when)
            choice.take(when.is_true(), value.run(columns, rows))
        if default is not None:
            choice.take(None, nodes[-1].run(columns, rows))
        return choice.column()

    return Node(type_, sql, run, fields=union_fields([*conditions, *nodes]))


# Arithmetic ----------------------------------------------------------------------------------------------------------

_LEVELS = {
    "+": SUM,
    "-": SUM,
    "||": SUM,
    "*": PRODUCT,
    "/": PRODUCT,
    "%": PRODUCT,
    "div": PRODUCT,
    "pmod": PRIMARY,
    "try_divide": PRIMARY,
}
# These evaluate their second operand first.
_DIVISIONS = ("/", "%", "div", "pmod", "try_divide")


def make_arithmetic(symbol: str, a: Node, b: Node) -> Node:
    """Makes a + b, a - b, a * b, a / b, a % b, a div b, pmod(a, b) or try_divide(a, b). Raises Refused."""
    level = _LEVELS[symbol]
    sql = f"{a.within(level - 1)} {symbol} {b.within(level)}" if level < PRIMARY else f"{symbol}({a.sql}, {b.sql})"
    if a.type == NULL and b.type.is_numeric:
        a = cast_implicitly(a, b.type)
    if b.type == NULL and a.type.is_numeric:
        b = cast_implicitly(b, a.type)
    if not (a.type.is_numeric and b.type.is_numeric):
        raise RefusedOperator(_explain_no_arithmetic(symbol, a, b, sql))
    if a.type.is_float or b.type.is_float:
        return _make_float_arithmetic(symbol, a, b, sql)
    if a.type.is_decimal or b.type.is_decimal:
        return _make_decimal_arithmetic(symbol, a, b, sql)
    if symbol in ("/", "try_divide"):
        return _make_float_arithmetic(symbol, a, b, sql)
    return _make_integer_arithmetic(symbol, a, b, sql)


def _explain_no_arithmetic(symbol: str, a: Node, b: Node, sql: str) -> str:
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


def _make_integer_arithmetic(symbol: str, a: Node, b: Node, sql: str) -> Node:
    type_ = common_type([a.type, b.type])
    assert type_ is not None
    bits = type_.bits
    kernels: dict[str, Kernel] = {
        "+": lambda x, y: add_integers(x, y, bits),
        "-": lambda x, y: subtract_integers(x, y, bits),
        "*": lambda x, y: multiply_integers(x, y, bits),
        "%": remainder_integers,
        "pmod": lambda x, y: positive_remainder_integers(x, y, bits),
        "div": divide_integers,
    }
    result = BIGINT if symbol == "div" else type_
    return make_strict(result, sql, [a, b], kernels[symbol], _LEVELS[symbol], right_first=symbol in _DIVISIONS)


_FLOAT_KERNELS: dict[str, Kernel] = {
    "+": lambda x, y: KernelResult(x + y),
    "-": lambda x, y: KernelResult(x - y),
    "*": lambda x, y: KernelResult(x * y),
    "/": divide_floats,
    "try_divide": _tolerate(divide_floats),
    "%": remainder_floats,
    "pmod": positive_remainder_floats,
}


def _make_float_arithmetic(symbol: str, a: Node, b: Node, sql: str) -> Node:
    if symbol == "div":
        raise RefusedOperator(f"{sql!r}: 'div' takes integers; use floor({sql.replace(' div ', ' / ')})")
    type_ = a.type if a.type == b.type and symbol not in ("/", "try_divide") and a.type.is_float else DOUBLE
    operands = [cast_implicitly(a, type_), cast_implicitly(b, type_)]
    return make_strict(type_, sql, operands, _FLOAT_KERNELS[symbol], _LEVELS[symbol], right_first=symbol in _DIVISIONS)


def _make_decimal_arithmetic(symbol: str, a: Node, b: Node, sql: str) -> Node:
    if symbol == "div":
        raise RefusedOperator(f"{sql!r}: 'div' takes integers; cast both to bigint")
    types = find_operand_types(a, b)
    rules = {"+": sum_type, "-": sum_type, "*": product_type, "/": quotient_type, "try_divide": quotient_type}
    result = rules.get(symbol, remainder_type)(*types)
    kernels: dict[str, Kernel] = {
        "+": lambda x, y: add_decimals(x, y, types, result),
        "-": lambda x, y: add_decimals(x, y, types, result, sign=-1),
        "*": lambda x, y: multiply_decimals(x, y, types, result),
        "/": lambda x, y: divide_decimals(x, y, types, result),
        "try_divide": _tolerate(lambda x, y: divide_decimals(x, y, types, result)),
        "%": lambda x, y: remainder_decimals(x, y, types, result),
        "pmod": lambda x, y: positive_remainder_decimals(x, y, types, result),
    }
    return make_strict(result, sql, [a, b], kernels[symbol], _LEVELS[symbol], right_first=symbol in _DIVISIONS)


def make_negative(node: Node) -> Node:
    """Makes -node of a number. Raises Refused."""
    if not node.type.is_numeric:
        raise RefusedOperator(f"'-' takes a number, but {node.sql!r} is of type {node.type}; cast it")
    # The SQL must parse to the same node again. But a minus before the cast of a literal is refused (see syntax), and a
    # minus before a number is read as one literal, which has a different type next to decimals. Hence the parentheses.
    alone = not node.fields and (node.sql.startswith(("cast(", "try_cast(")) or node.sql[0].isdigit())
    sql = f"-({node.sql})" if alone else f"-{node.within(UNARY)}"
    if node.type.is_integer:
        bits = node.type.bits
        return make_strict(node.type, sql, [node], lambda values: negate_integers(values, bits), UNARY)
    require_exact_sign(node, sql)
    return make_strict(node.type, sql, [node], lambda values: KernelResult(-values), UNARY)


def require_exact_sign(node: Node, sql: str) -> None:
    """Raises Refused for a decimal of more than 34 digits, which Spark cannot negate without rounding."""
    if node.type.is_decimal and node.type.precision > 34:
        raise RefusedOperator(
            f"{sql!r}: Spark cuts a {node.type} to 34 digits there; write 0 - x, or cast to at most 34 digits"
        )


def add_interval(node: Node, microseconds: int, sql: str) -> Node:
    """Moves a timestamp by an interval. Raises Refused."""
    if node.type != TIMESTAMP:
        raise RefusedOperator(
            f"{sql!r}: an interval is added to a timestamp, but {node.sql!r} is of type {node.type}; cast it"
        )
    moved = np.full(1, microseconds, dtype=np.int64)
    return make_strict(TIMESTAMP, sql, [node], lambda values: add_integers(values, moved, 64), SUM)

"""Writes values that rules of other systems compute of fields, such as `length(file.name) - 4`, as SQL.

Places in a text count from 0 there, and from 1 in SQL. A missing field makes the value NULL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lookback.core.values.types import STRING, DataType
from lookback.importing.conditions import Call, Literal, Operand, list_operands
from lookback.importing.fields import FieldNames
from lookback.importing.literals import write_text
from lookback.importing.reasons import Refusal

# SQL, and the type of its value.
Value = tuple[str, DataType]
# Wide enough for what logs hold, and exact.
DECIMAL = DataType("decimal", 38, 9)
_INTEGER = DataType("bigint")
# The name of an item of an array.
ITEM = "item"


def as_text(sql: str, type_: DataType) -> str:
    """Writes a value as a text."""
    return sql if type_ == STRING else f"cast({sql} as string)"


def find_array(operands: Iterable[Operand | Literal], names: FieldNames) -> str | None:
    """Finds the field that is an array; its items are tried one by one. Raises Refusal if there are several."""
    found = {name for each in operands for name in list_operands(each) if names.find_type(name).element is not None}
    if len(found) > 1:
        raise Refusal("type", f"{' and '.join(sorted(found))} are arrays, and are compared with each other")
    return next(iter(found), None)


def write_operand(operand: Operand | Literal, names: FieldNames, array: str | None = None) -> Value:
    """Writes a field, a literal or a call. array: the field whose item takes its place. Raises Refusal."""
    if isinstance(operand, Literal):
        return (write_text(operand.value), STRING) if isinstance(operand.value, str) else _write_number(operand)
    if isinstance(operand, Call):
        if operand.function not in _CALLS:
            raise Refusal("function", f"{operand.function}() has no counterpart")
        values = [write_operand(each, names, array) for each in operand.arguments]
        return _CALLS[operand.function](operand, values)
    type_ = names.find_type(operand)
    if operand == array and type_.element is not None:
        return ITEM, type_.element
    return names.write(operand), type_


def _write_number(literal: Literal) -> Value:
    return f"{literal.value}", _INTEGER if isinstance(literal.value, int) else DECIMAL


def _as_number(value: Value) -> Value:
    sql, type_ = value
    if type_.is_integer or type_.is_decimal:
        return value
    return f"try_cast({sql} as {DECIMAL})", DECIMAL


def _write_length(_: Call, values: list[Value]) -> Value:
    return f"length({as_text(*values[0])})", _INTEGER


def _write_string(_: Call, values: list[Value]) -> Value:
    return as_text(*values[0]), STRING


def _write_to_number(call: Call, values: list[Value]) -> Value:
    if len(values) > 1:
        raise Refusal("function", f"number() with a base, {call.arguments[1]}")
    return _as_number(values[0])


def _write_concat(_: Call, values: list[Value]) -> Value:
    return f"concat({', '.join(as_text(*each) for each in values)})", STRING


def _write_index(call: Call, values: list[Value]) -> Value:
    text, wanted = (_fold(as_text(*each), call) for each in values[:2])
    if len(values) == 2:
        return f"nullif(instr({text}, {wanted}), 0) - 1", _INTEGER
    start = _find_whole(call, 2)
    return f"nullif(instr(substring({text}, {start + 1}), {wanted}), 0) + {start - 1}", _INTEGER


def _write_between(call: Call, values: list[Value]) -> Value:
    """Writes the text between two others; empty if one of them is not there."""
    if len(values) > 3:
        raise Refusal("function", "between() that is greedy")
    text, left, right = (as_text(*each) for each in values)
    folded, left, right = (_fold(each, call) for each in (text, left, right))
    begin = f"instr({folded}, {left}) + length({left})"
    rest, folded_rest = f"substring({text}, {begin})", f"substring({folded}, {begin})"
    has_both = f"instr({folded}, {left}) > 0 and instr({folded_rest}, {right}) > 0"
    return f"if({has_both}, substring({rest}, 1, instr({folded_rest}, {right}) - 1), substring({text}, 1, 0))", STRING


def _write_substring(call: Call, values: list[Value]) -> Value:
    """Writes a part of a text; places below 0 count from its end, and the second one is excluded."""
    text, start = as_text(*values[0]), _find_whole(call, 1)
    if len(values) == 2:
        return (f"substring({text}, {start + 1})" if start >= 0 else f"right({text}, {-start})"), STRING
    begin = f"{start}" if start >= 0 else f"greatest(length({text}) - {-start}, 0)"
    last, (end, _) = call.arguments[2], _as_number(values[2])
    if not isinstance(last, Literal):
        end = f"if({end} < 0, length({text}) + {end}, {end})"
    elif end.startswith("-"):
        end = f"length({text}) - {end[1:]}"
    length = f"cast({end} as int)" if begin == "0" else f"cast({end} - {begin} as int)"
    return f"substring({text}, {begin} + 1, {length})" if start else f"substring({text}, 1, {length})", STRING


def _write_arithmetic(call: Call, values: list[Value]) -> Value:
    sign = {"add": "+", "subtract": "-", "multiply": "*", "modulo": "%"}[call.function]
    (left, left_type), (right, right_type) = (_as_number(each) for each in values)
    right = f"nullif({right}, 0)" if sign == "%" else right
    is_whole = left_type.is_integer and right_type.is_integer
    return f"({left} {sign} {right})", _INTEGER if is_whole else DECIMAL


def _find_whole(call: Call, at: int) -> int:
    argument = call.arguments[at]
    if isinstance(argument, Literal) and isinstance(argument.value, int):
        return argument.value
    raise Refusal("function", f"{call.function}() from a place that is computed")


def _fold(text: str, call: Call) -> str:
    return text if call.is_cased else f"lower({text})"


_CALLS: dict[str, Callable[[Call, list[Value]], Value]] = {
    "add": _write_arithmetic,
    "between": _write_between,
    "concat": _write_concat,
    "indexof": _write_index,
    "length": _write_length,
    "modulo": _write_arithmetic,
    "multiply": _write_arithmetic,
    "number": _write_to_number,
    "string": _write_string,
    "substring": _write_substring,
    "subtract": _write_arithmetic,
}

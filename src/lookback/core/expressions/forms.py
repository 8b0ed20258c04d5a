"""Forms: functions that do not evaluate all arguments, or that are not NULL for NULL."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lookback.core.expressions.kernels import either_mask, is_less, mask_or_none
from lookback.core.expressions.nodes import Choice, Node, decide_at_once, finish_column, replace_settled, union_fields
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
)
from lookback.core.expressions.signatures import (
    MAX_ARGUMENTS,
    Arguments,
    format_call,
    require_count,
    require_number,
    require_type,
)
from lookback.core.expressions.texts import grow_texts, join_separated, measure_separated
from lookback.core.values.columns import Column, Values
from lookback.core.values.types import BIGINT, BOOLEAN, DATE, DOUBLE, INT, NULL, STRING, TIMESTAMP, array


def _coalesce(name: str, arguments: Arguments) -> Node:
    require_count(name, arguments, *((2, 2) if name in ("nvl", "ifnull") else (1, MAX_ARGUMENTS)))
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
    require_count(name, arguments, 3, 3)
    condition, yes, no = arguments
    return make_case([(require_condition(condition, "if()"), yes)], no, format_call("if", arguments))


def _nullif(name: str, arguments: Arguments) -> Node:
    require_count(name, arguments, 2, 2)
    value, other = arguments
    same = make_comparison("=", value, other)
    none = cast_implicitly(Node(NULL, "null", value.run), value.type)
    return make_case([(same, none)], value, format_call(name, arguments))


def _extreme(name: str, arguments: Arguments) -> Node:
    require_count(name, arguments, 2, MAX_ARGUMENTS)
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
    require_count(name, arguments, 1, 1)
    return make_is_null(arguments[0], negated=name == "isnotnull")


def _divide(name: str, arguments: Arguments) -> Node:
    require_count(name, arguments, 2, 2)
    return make_arithmetic("%" if name == "mod" else name, *arguments)


def _is_nan(name: str, arguments: Arguments) -> Node:
    require_count(name, arguments, 1, 1)
    return make_is_nan(_as_float(name, arguments[0]), format_call(name, arguments))


def _nanvl(name: str, arguments: Arguments) -> Node:
    require_count(name, arguments, 2, 2)
    value = _as_float(name, arguments[0])
    other = cast_implicitly(arguments[1], value.type) if arguments[1].type == NULL else _as_float(name, arguments[1])
    is_missing = make_is_nan(value, format_call("isnan", arguments[:1]))
    return make_case([(is_missing, other)], value, format_call(name, arguments))


def _as_float(name: str, argument: Node) -> Node:
    if argument.type.is_float:
        return argument
    return cast_implicitly(argument if argument.type == NULL else require_number(name, argument), DOUBLE)


def _concat_ws(name: str, arguments: Arguments) -> Node:
    require_count(name, arguments, 1, MAX_ARGUMENTS)
    texts = [each if each.type == array(STRING) else require_type(name, each, STRING) for each in arguments[1:]]
    nodes = [require_type(name, arguments[0], STRING), *texts]

    def run(columns: Mapping[str, Column], rows: int) -> Column:
        inputs = [node.run(columns, rows) for node in nodes]
        _, error = decide_at_once(inputs)
        null = mask_or_none(~inputs[0].is_known() if error is None else ~inputs[0].is_known() & ~error)
        listed = zip(*(column.to_stored_list() for column in inputs), strict=True)
        outcome = grow_texts(listed, measure_separated, join_separated)
        return finish_column(STRING, outcome, null, error, either_mask(null, error))

    return Node(STRING, format_call(name, arguments), run, fields=union_fields(nodes))


_CASTS = {
    "to_date": DATE,
    "to_timestamp": TIMESTAMP,
    "date": DATE,
    "timestamp": TIMESTAMP,
    "boolean": BOOLEAN,
    "int": INT,
    "bigint": BIGINT,
    "double": DOUBLE,
    "string": STRING,
}


def _cast(name: str, arguments: Arguments) -> Node:
    if len(arguments) == 2 and name.startswith("to_"):
        raise RefusedOperator(
            f"{name}() takes no format here; declare the field as {_CASTS[name]} and read it by columns"
        )
    require_count(name, arguments, 1, 1)
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
    "concat_ws": _concat_ws,
    "mod": _divide,
    "pmod": _divide,
    "try_divide": _divide,
    **dict.fromkeys(_CASTS, _cast),
}

"""A slow and obvious evaluator of EQL and KQL on dicts, from their documentation: what imported rules are compared with.

It reads a tree that the test has made, writes it as a query, and shares no code with the import. A tree is a tuple:

    ("and", a, b)  ("or", a, b)  ("not", a)
    (operator, field, value)       such as ("like~", "name", "a*"); the value is a text, a number, a boolean or None
    (operator, field, [values])    in, in~, like, like~, regex, :
    ("call", function, field, text)
    (operator, ("length", field), number)  and other computed values
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from typing import Any

Event = Mapping[str, Any]
Tree = tuple[Any, ...]
ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def holds(tree: Tree, event: Event) -> bool:
    """Returns whether an event satisfies a condition; a field that is missing satisfies no test."""
    kind = tree[0]
    if kind == "and":
        return all(holds(each, event) for each in tree[1:])
    if kind == "or":
        return any(holds(each, event) for each in tree[1:])
    if kind == "not":
        return not holds(tree[1], event)
    if kind == "!=":
        return not holds(("==", *tree[1:]), event)
    if kind == "call":
        return any(call(tree[1], value, tree[3]) for value in list_values(tree[2], event))
    values = list_values(tree[1], event)
    if tree[2] is None:
        return (not values) == (kind in ("==", ":"))
    wanted = tree[2] if isinstance(tree[2], list) else [tree[2]]
    return any(compare(kind, value, each) for value in values for each in wanted)


def list_values(operand: Any, event: Event) -> list[Any]:
    """Lists the values of a field, or what is computed of each."""
    if isinstance(operand, str):
        found = event.get(operand)
        return (
            []
            if found is None
            else [each for each in found if each is not None]
            if isinstance(found, list)
            else [found]
        )
    function, field, *arguments = operand
    computed = [compute(function, value, arguments) for value in list_values(field, event)]
    return [value for value in computed if value is not None]


def compute(function: str, value: Any, arguments: list[Any]) -> Any:
    """Computes a value; None if there is none."""
    text = str(value)
    if function == "length":
        return len(text)
    if function == "substring":
        start, end = (*arguments, None)[:2]
        return text[start:end]
    if function == "indexOf":
        found = text.find(arguments[0])
        return None if found < 0 else found
    if function == "concat":
        return text + arguments[0]
    if function == "between":
        _, left, rest = text.partition(arguments[0])
        inner, right, _ = rest.partition(arguments[1])
        return inner if left and right else ""
    assert function == "add"
    return number(value) + arguments[0] if is_number(value) else None


def call(function: str, value: Any, wanted: str) -> bool:
    """Returns whether a function is true of a value."""
    text, name = str(value), function.removesuffix("~")
    if function.endswith("~"):
        text, wanted = text.lower(), wanted.lower()
    if name == "cidrMatch":
        try:
            return ipaddress.ip_address(text) in ipaddress.ip_network(wanted)
        except ValueError:
            return False
    return {"startsWith": text.startswith, "endsWith": text.endswith, "stringContains": text.__contains__}[name](wanted)


def compare(operator: str, value: Any, wanted: Any) -> bool:
    """Returns whether a value is what one literal asks for."""
    if isinstance(wanted, bool):
        return str(value).lower() == str(wanted).lower()
    if operator in ORDERS:
        return is_number(value) and ORDERS[operator](number(value), wanted)
    if not isinstance(wanted, str):
        return str(value) == str(wanted) if isinstance(value, str) else bool(value == wanted)
    text, is_cased = str(value), operator in ("==", "in", "like", "regex", "kql")
    if operator.startswith("regex"):
        return re.fullmatch(wanted, text, re.DOTALL | (0 if is_cased else re.IGNORECASE)) is not None
    if not is_cased:
        text, wanted = text.lower(), wanted.lower()
    signs = {"==": "", "in": "", "in~": "", "kql": "*"}.get(operator, "*?")
    return re.fullmatch("".join(to_regex(each, signs) for each in wanted), text, re.DOTALL) is not None


def to_regex(sign: str, signs: str) -> str:
    """Writes a sign of a pattern as a regular expression."""
    return {"*": ".*", "?": "."}[sign] if sign in signs and sign in "*?" else re.escape(sign)


def is_number(value: Any) -> bool:
    """Returns whether a value is a number, or a text that is one."""
    return re.fullmatch(r"-?\d+(\.\d+)?", str(value)) is not None


def number(value: Any) -> float:
    """Returns a value as a number."""
    return float(str(value))


# Queries --------------------------------------------------------------------------------------------------------------


def write_eql(tree: Tree) -> str:
    """Writes a tree as a condition of EQL."""
    kind = tree[0]
    if kind in ("and", "or"):
        return f"({f' {kind} '.join(map(write_eql, tree[1:]))})"
    if kind == "not":
        return f"not ({write_eql(tree[1])})"
    if kind == "call":
        return f"{tree[1]}({tree[2]}, {write_literal(tree[3])})"
    left, value = write_operand(tree[1]), tree[2]
    right = f"({', '.join(map(write_literal, value))})" if isinstance(value, list) else write_literal(value)
    return f"{left} {kind} {right}"


def write_operand(operand: Any) -> str:
    """Writes a field, or a call."""
    if isinstance(operand, str):
        return operand
    function, field, *arguments = operand
    return f"{function}({', '.join([field, *map(write_literal, arguments)])})"


def write_literal(value: Any) -> str:
    """Writes a literal of EQL."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if not isinstance(value, str):
        return str(value)
    if '"' not in value and "\\" in value:
        return f'"""{value}"""'
    for sign, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\t", "\\t")):
        value = value.replace(sign, escaped)
    return f'"{value}"'


def write_kql(tree: Tree) -> str:
    """Writes a tree as a query of KQL, whose tests are `kql`, orders, and `==` for a text in quotes."""
    kind = tree[0]
    if kind in ("and", "or"):
        return f"({f' {kind} '.join(map(write_kql, tree[1:]))})"
    if kind == "not":
        return f"not ({write_kql(tree[1])})"
    _, field, value = tree
    if kind in ORDERS:
        return f"{field} {kind} {value}"
    if kind == "!=":
        assert value is None
        return f"{field}: *"
    if isinstance(value, list):
        return f"{field}: ({' or '.join(write_kql_value(kind, each) for each in value)})"
    return f"{field}: {write_kql_value(kind, value)}"


def write_kql_value(kind: str, value: Any) -> str:
    """Writes a value of KQL."""
    if not isinstance(value, str):
        return str(value).lower()
    if kind == "==":
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return re.sub(r'([\\():<>"{}])', r"\\\1", value)

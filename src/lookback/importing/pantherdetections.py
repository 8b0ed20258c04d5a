"""Reads the match expressions of Panther's simple detections, which are YAML."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lookback.importing.conditions import And, Condition, Flag, Not, Number, Or, Present, Text, Wildcard
from lookback.importing.detections import Shape, list_fields_read
from lookback.importing.reasons import Refusal

_ANY = Wildcard.ANY


def read_match(expression: Any) -> Condition:
    """Reads a match expression, or several of which all must hold. Raises Refusal."""
    if isinstance(expression, list):
        return And(tuple(map(read_match, expression)))
    if not isinstance(expression, dict):
        raise Refusal("unsupported", f"a match expression is {expression!r:.100}")
    if len(expression) == 1 and (combine := _COMBINED.get(name := str(next(iter(expression))))):
        parts = expression[name]
        return combine(tuple(map(read_match, parts if isinstance(parts, list) else [parts])))
    read = _CONDITIONS.get(str(expression.get("Condition")))
    if read is None or not set(expression) <= {"Key", "KeyPath", "DeepKey", "Condition", "Value", "Values"}:
        raise Refusal("unsupported", f"a match expression is {expression!r:.150}")
    return read(_read_field(expression), expression)


def find_value(log: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """Returns the fields of an event that a rule reads, by their paths."""
    found = {}
    for field in list_fields_read(shape):
        value: Any = log
        for name in field.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            found[field] = str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value
    return found


def _read_field(expression: Mapping[str, Any]) -> str:
    path = expression.get("DeepKey")
    named = ".".join(map(str, path)) if isinstance(path, list) else expression.get("KeyPath", expression.get("Key"))
    if not isinstance(named, str) or "[" in named:
        raise Refusal("unsupported", f"a match expression is {expression!r:.150}")
    return named


def _equals(field: str, value: Any) -> Condition:
    if isinstance(value, bool):
        return Flag(field, value)
    if isinstance(value, int):
        return Number(field, "=", value)
    if not isinstance(value, str):
        raise Refusal("unsupported", f"{field} is compared with {value!r:.100}")
    return Text(field, (value,) if value else (), is_cased=True)


def _match(*around: Wildcard | None) -> Callable[[str, Mapping[str, Any]], Condition]:
    """Returns a reader of a text with anything before it, behind it, or both."""
    before, behind = around

    def read(field: str, expression: Mapping[str, Any]) -> Condition:
        pattern = (before, str(expression.get("Value", "")), behind)
        return Text(field, tuple(part for part in pattern if part), is_cased=True)

    return read


def _any_of(field: str, expression: Mapping[str, Any]) -> Condition:
    values = expression.get("Values")
    if not isinstance(values, list):
        raise Refusal("unsupported", f"{field} is compared with {values!r:.100}")
    return Or(tuple(_equals(field, value) for value in values))


def _negate(
    read: Callable[[str, Mapping[str, Any]], Condition],
) -> Callable[[str, Mapping[str, Any]], Condition]:
    return lambda field, expression: Not(read(field, expression))


def _equal(field: str, expression: Mapping[str, Any]) -> Condition:
    return _equals(field, expression.get("Value"))


def _present(field: str, _: Mapping[str, Any]) -> Condition:
    return Present(field)


_COMBINED: dict[str, Callable[[tuple[Condition, ...]], Condition]] = {
    "All": And,
    "Any": Or,
    "None": lambda parts: Not(Or(parts)),
}
_CONDITIONS: dict[str, Callable[[str, Mapping[str, Any]], Condition]] = {
    "Equals": _equal,
    "DoesNotEqual": _negate(_equal),
    "IsIn": _any_of,
    "IsNotIn": _negate(_any_of),
    "StartsWith": _match(None, _ANY),
    "EndsWith": _match(_ANY, None),
    "Contains": _match(_ANY, _ANY),
    "DoesNotContain": _negate(_match(_ANY, _ANY)),
    "Exists": _present,
    "DoesNotExist": _negate(_present),
    "IsNotNull": _present,
    "IsNull": _negate(_present),
}

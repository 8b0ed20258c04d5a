"""A slow and obvious evaluator of Sigma rules, from their specification: what imported rules are compared with.

It reads the document itself, and shares no code with pySigma or with the import.
"""

from __future__ import annotations

import base64
import fnmatch
import ipaddress
import re
from collections.abc import Callable, Mapping
from typing import Any

Event = Mapping[str, Any]
DASHES = "-/\u2013\u2014\u2015"


def matches(rule: Mapping[str, Any], event: Event) -> bool:
    """Returns whether an event satisfies the condition of a rule."""
    detection = rule["detection"]
    names = [name for name in detection if name != "condition"]
    tokens = re.findall(r"[()]|[^\s()]+", detection["condition"])
    return _Condition(tokens, {name: selected(detection[name], event) for name in names}).read()


def selected(selection: Any, event: Event) -> bool:
    """Returns whether an event satisfies a selection: all of a mapping, any of a list."""
    if isinstance(selection, list):
        return any(selected(each, event) for each in selection)
    return all(holds(key, value, event) for key, value in selection.items())


def holds(key: str, value: Any, event: Event) -> bool:
    """Returns whether a field, with its modifiers, has a value, any of several, or with `all` each of them."""
    field, *modifiers = key.split("|")
    quantity = all if "all" in modifiers else any
    values = value if isinstance(value, list) else [value]
    found = quantity(has(event.get(field), each, modifiers, event) for each in values)
    return found != ("neq" in modifiers)


def has(found: Any, value: Any, modifiers: list[str], event: Event) -> bool:
    """Returns whether what an event has in a field is what a rule looks for there."""
    if "exists" in modifiers:
        return (found is not None) == value
    if value is None:
        return found is None
    if isinstance(found, list):
        return any(has(item, value, modifiers, event) for item in found)
    if found is None:
        return False
    compare = {"lt": float.__lt__, "lte": float.__le__, "gt": float.__gt__, "gte": float.__ge__}
    for name in compare.keys() & set(modifiers):
        return is_number(found) and compare[name](float(found), float(value))
    if "fieldref" in modifiers:
        other = event.get(value)
        return other is not None and str(found).lower() == str(other).lower()
    if "re" in modifiers:
        flags = re.IGNORECASE if "i" in modifiers else 0
        return re.search(value, str(found), flags) is not None
    if "cidr" in modifiers:
        return is_address(str(found)) and ipaddress.ip_address(found) in ipaddress.ip_network(value)
    return any(fits(str(found), each, modifiers) for each in expand(str(value), modifiers))


def expand(value: str, modifiers: list[str]) -> list[str]:
    """Returns the values that modifiers make of one."""
    if "base64" in modifiers:
        return [base64.b64encode(value.encode()).decode()]
    if "windash" in modifiers and (dash := re.search(r"\B[-/]\b", value)):
        return [f"{value[: dash.start()]}{each}{value[dash.end() :]}" for each in DASHES]
    return [value]


def fits(text: str, value: str, modifiers: list[str]) -> bool:
    """Returns whether a text fits a value with wildcards."""
    change: Callable[[str], str] = str if "cased" in modifiers else str.lower
    pattern = to_regex(change(value))
    before = ".*" if {"contains", "endswith"} & set(modifiers) else ""
    after = ".*" if {"contains", "startswith"} & set(modifiers) else ""
    return re.fullmatch(before + pattern + after, change(text), re.DOTALL) is not None


def to_regex(value: str) -> str:
    """Writes a value as a regular expression; a backslash takes its meaning from a wildcard or a backslash behind it."""
    found, at = "", 0
    while at < len(value):
        if value[at] == "\\" and value[at + 1 : at + 2] in ("*", "?", "\\"):
            found, at = found + re.escape(value[at + 1]), at + 2
            continue
        found += {"*": ".*", "?": "."}.get(value[at], re.escape(value[at]))
        at += 1
    return found


def is_number(found: Any) -> bool:
    """Returns whether a value is a number, or a text that is one."""
    return not isinstance(found, bool) and re.fullmatch(r"-?\d+(\.\d+)?", str(found)) is not None


def is_address(text: str) -> bool:
    """Returns whether a text is an address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


class _Condition:
    """Reads `a and not (1 of b* or c)`: `not` binds before `and`, `and` before `or`."""

    def __init__(self, tokens: list[str], values: Mapping[str, bool]) -> None:
        self._tokens, self._values = tokens, values

    def read(self) -> bool:
        found = self._read_and()
        while self._take("or"):
            found = self._read_and() or found
        return found

    def _read_and(self) -> bool:
        found = self._read_not()
        while self._take("and"):
            found = self._read_not() and found
        return found

    def _read_not(self) -> bool:
        if self._take("not"):
            return not self._read_not()
        if self._take("("):
            found = self.read()
            assert self._take(")")
            return found
        word = self._tokens.pop(0)
        if not self._take("of"):
            return self._values[word]
        pattern = self._tokens.pop(0).replace("them", "*")
        named = [value for name, value in self._values.items() if fnmatch.fnmatchcase(name, pattern)]
        return all(named) if word == "all" else any(named)

    def _take(self, token: str) -> bool:
        taken = self._tokens[:1] == [token]
        del self._tokens[: int(taken)]
        return taken

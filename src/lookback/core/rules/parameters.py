"""Reads the parameters of a rule document, and writes their values where its texts have `:name`, as in Spark SQL.

Values are written as literals before anything is checked, so a document with parameters means the same as one with the
values written in.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal

from lookback.core.errors import DurationError, ExpressionError, Problem
from lookback.core.expressions.like import quote_text
from lookback.core.expressions.syntax import Marker, find_markers
from lookback.core.values.durations import format_duration, parse_duration
from lookback.core.values.suggestions import suggest

# The value of a parameter; a duration is a text.
Value = str | int | float | bool
# The names of parameters, measures and steps.
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)
_MARKER = re.compile(rf"\s*:({NAME.pattern})\s*", re.ASCII)
# In a message a colon may also end a word (`total: 5`) or be part of a time (`12:30`).
_MARKER_IN_MESSAGE = re.compile(rf"\{{:({NAME.pattern})\}}|(?<![\w:]):({NAME.pattern})", re.ASCII)
# The most digits of Spark's decimals.
_MAX_DIGITS = 38
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?", re.ASCII)
_KINDS = "a number, a text, true or false"
_MAX_VALUE_CHARACTERS = 100


@dataclass(frozen=True)
class Parameters:
    """The parameters of one document, by name."""

    values: Mapping[str, Value] = field(default_factory=dict)

    def fill_expression(self, text: str) -> tuple[str, list[str]]:
        """Replaces each `:name` in an expression by a literal, and returns it with a message for each unknown name.

        A duration that is added or subtracted becomes an interval; any other text becomes a string. An unknown name becomes
        NULL, so that the rest can be checked.
        """
        if ":" not in text:
            return text, []
        try:
            markers = find_markers(text)
        except ExpressionError:
            return text, []  # compiling it reports the same
        filled, end, unknown = "", 0, []
        for marker in markers:
            if marker.name not in self.values:
                unknown.append(self._describe_unknown(marker.name))
            filled += text[end : marker.start]
            # A literal must not grow together with a word before it.
            filled += " " * filled[-1:].isalnum() + self._write_literal(marker)
            end = marker.end
        return filled + text[end:], unknown

    def fill_message(self, text: str) -> str:
        """Replaces each `:name` and `{:name}` of a known parameter in a message by its value."""

        def write(match: re.Match[str]) -> str:
            name = match[1] or match[2]
            return _write_plain(self.values[name]) if name in self.values else match[0]

        return _MARKER_IN_MESSAGE.sub(write, text)

    def fill_value(self, value: object) -> object:
        """Returns the value of parameter `name` if `value` is `:name` and the parameter exists, otherwise `value`."""
        match = _MARKER.fullmatch(value) if isinstance(value, str) else None
        return self.values.get(match[1], value) if match else value

    def find_unknown(self, value: object) -> str | None:
        """Returns a message if `value` is `:name` and no parameter has that name, otherwise None."""
        match = _MARKER.fullmatch(value) if isinstance(value, str) else None
        return self._describe_unknown(match[1]) if match and match[1] not in self.values else None

    def change(self, changes: Mapping[str, object]) -> tuple[dict[str, Value], list[Problem]]:
        """Returns all values after `changes`, and a problem for each unknown name and each value of the wrong kind.

        A text is read as the parameter's kind of value: '1200' becomes a number if the parameter is one.
        """
        changed, problems = dict(self.values), []
        for name, value in changes.items():
            if name not in self.values:
                problems.append(Problem(f"parameters.{name}", self.describe_missing(name)))
                continue
            read, before = _read_like(value, self.values[name]), self.values[name]
            message = find_wrong_value(read)
            if not message and _find_kind(read) != _find_kind(before):
                message = f"must be {_find_kind(before)}, such as {_write_plain(before)}, got {_quote(value)}"
            if message:
                problems.append(Problem(f"parameters.{name}", message))
            elif isinstance(read, Value):
                changed[name] = read
        return changed, problems

    def describe_missing(self, name: str) -> str:
        """Returns the message for a value whose parameter the document does not have."""
        return f"unknown parameter; {suggest(name, self.values, None if self.values else 'the rule has none')}"

    def _write_literal(self, marker: Marker) -> str:
        value = self.values.get(marker.name)
        if value is None:
            return "null"
        if isinstance(value, bool) or not isinstance(value, str):
            text = _write_plain(value)
            return f"({text})" if text.startswith("-") else text
        if marker.is_added:
            try:
                count, _, unit = format_duration(parse_duration(value)).partition(" ")
            except DurationError:
                return quote_text(value)
            return f"interval '{count}' {unit}"
        return quote_text(value)

    def _describe_unknown(self, name: str) -> str:
        otherwise = f"add it under `parameters`, such as `parameters: {{{name}: 1000}}`"
        return f"unknown parameter :{name}; {suggest(name, self.values, otherwise)}"


def read_parameter(text: str) -> Value | Decimal:
    """Reads a value as YAML does: a number, true, false or a text. Returns a Decimal if a JSON number would round it."""
    if text in ("true", "false"):
        return text == "true"
    return _read_number(Decimal(text)) if _NUMBER.fullmatch(text) else text


def find_wrong_value(value: object) -> str | None:
    """Returns a message if a parameter cannot have this value, otherwise None."""
    if isinstance(value, (bool, str)):
        return None
    if isinstance(value, Decimal):
        return f"{value} has more digits than a JSON number can hold; write it in the expression itself"
    if not isinstance(value, (int, float)):
        return f"must be {_KINDS}, got {_quote(value)}; put a time in quotes"
    if not math.isfinite(value):
        return f"must be a finite number, got {value}"
    _, digits, exponent = Decimal(str(value)).as_tuple()
    assert isinstance(exponent, int)
    if max(len(digits) + max(exponent, 0), -exponent) > _MAX_DIGITS:
        return f"has more than {_MAX_DIGITS} digits, too many for a decimal; write fewer"
    return None


def _read_like(value: object, before: Value) -> object:
    """Reads a text as the kind of value that `before` is, if it can; returns any other value unchanged."""
    if isinstance(value, Decimal) and value.is_finite():
        return _read_number(value)
    if not isinstance(value, str) or isinstance(before, str):
        return value
    return read_parameter(value.strip())


def _read_number(value: Decimal) -> int | float | Decimal:
    """Returns an int, or the float with exactly these digits; the Decimal itself if no float has them."""
    if value.as_tuple().exponent == 0:
        return int(value)
    near = float(value)
    return near if math.isfinite(near) and Decimal(repr(near)) == value else value


def _find_kind(value: object) -> str:
    return "true or false" if isinstance(value, bool) else "a text" if isinstance(value, str) else "a number"


def _write_plain(value: Value) -> str:
    """Formats a value for people and SQL; numbers without an exponent."""
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else f"{Decimal(str(value)):f}"


def _quote(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else f"{text[:_MAX_VALUE_CHARACTERS]}..."

"""Reads rules of AWS's sample of a dynamic rules engine: JSON with an expression over sensors, each with a window.

{"id": "1", "name": "Hot", "status": "ACTIVE", "equipmentName": "T1", "ruleExpression": "(S1.getValue() > 50)",
 "sensorWindowMap": {"S1": 5}}
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from lookback.core.errors import SetupError
from lookback.importing.conditions import Text
from lookback.importing.detections import Detection, Gauge, Gauged, Key, Origin, Unread
from lookback.importing.jsonrules import read_json_rules
from lookback.importing.reasons import Reason, Refusal
from lookback.importing.rulefiles import RuleFile

FORMAT = "aws"
# The fields of the sample's events.
SENSOR, EQUIPMENT, VALUE = "id", "equipment.id", "measureValue"
_TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?|[A-Za-z_]\w*|&&|\|\||[<>=!]=|[-<>!(),.]|\S)", re.ASCII)
_NUMBER = re.compile(r"\d+(?:\.\d+)?", re.ASCII)
_WORDS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "=", "ne": "<>"}
_OPERATORS = {**_WORDS, **{operator: operator for operator in _WORDS.values()}, "==": "=", "!=": "<>"}
_MAX_LEVELS, _MAX_MINUTES = 50, 10 * 366 * 24 * 60
_ALWAYS_THERE = "each evaluation sends an alert, also one that it calls STOP, and equipmentName is never compared"
_CHANGE_THERE = "hasChanged and hasNotChanged compare objects, not numbers, and times of events with the clock"


def read_rules(files: Iterable[RuleFile]) -> list[Detection | Unread]:
    """Reads the rules of files, in order. A rule or a file that is wrong costs only itself."""
    found: list[Detection | Unread] = []
    for file in files:
        try:
            rules = read_json_rules(file)
        except SetupError as error:
            found.append(Unread(Origin(FORMAT, str(file.path), 1, file.below), (Reason("file", str(error)),)))
            continue
        for at, rule in enumerate(rules):
            named = rule if isinstance(rule, Mapping) else {}
            id_, title = (str(named.get(key) or "") for key in ("id", "name"))
            origin = Origin(FORMAT, str(file.path), at + 1, file.below, title=title, id=id_)
            try:
                found.append(_read_rule(named, origin))
            except Refusal as refusal:
                found.append(Unread(origin, (refusal.reason,)))
    return found


def _read_rule(rule: Mapping[str, Any], origin: Origin) -> Detection:
    if rule.get("status") == "INACTIVE":
        raise Refusal("command", "INACTIVE takes the rule away there")
    text, windows = rule.get("ruleExpression"), rule.get("sensorWindowMap")
    if not isinstance(text, str) or not isinstance(windows, dict) or not windows or rule.get("status") != "ACTIVE":
        raise Refusal("engine", "a rule has status, ruleExpression and sensorWindowMap")
    for sensor, minutes in windows.items():
        if isinstance(minutes, bool) or not isinstance(minutes, int) or not 0 < minutes <= _MAX_MINUTES:
            raise Refusal("engine", f"sensorWindowMap.{sensor} is {minutes!r:.60}, which is not a number of minutes")
    reader = ExpressionReader(text, windows)
    # There, nothing is evaluated until each sensor has sent a value.
    known = [reader.add_gauge("value", sensor) for sensor in windows]
    wanted = " and ".join([f"({reader.read()})", *(f"{name} is not null" for name in known)])
    members = tuple(Text(SENSOR, (sensor,), is_cased=True) for sensor in windows)
    shape = Gauged(members, (Key(EQUIPMENT, (EQUIPMENT,)),), (VALUE,), tuple(reader.gauges.values()), wanted)
    there = [_ALWAYS_THERE, *([_CHANGE_THERE] if reader.asks_change else [])]
    return Detection(origin, shape, (Reason("there", "; ".join(there)),))


class ExpressionReader:
    """Reads an expression over sensors as SQL over measures, which it collects.

    Args:
        text: An expression of JEXL.
        windows: How many minutes the values of each sensor are kept.
    """

    def __init__(self, text: str, windows: Mapping[str, int]) -> None:
        self._tokens, self._at, self._levels = [match[1] for match in _TOKEN.finditer(text)], 0, 0
        self._windows, self._places = windows, {sensor: at for at, sensor in enumerate(windows)}
        self.gauges: dict[str, Gauge] = {}
        self.asks_change = False

    def read(self) -> str:
        """Reads the whole expression. Raises Refusal."""
        sql = self._read_or()
        if self._at < len(self._tokens):
            raise self._refuse("what follows is not understood")
        return sql

    def add_gauge(self, kind: str, sensor: str, minutes: int = 0) -> str:
        """Adds a measure of a sensor, unless it is there, and returns its name.

        kind: value, the last one; different, how many values there were in the last minutes; before, how many events
        were kept from before.
        """
        place = self._places[sensor]
        name = f"{kind}_{place + 1}" + (f"_{minutes}" if minutes else "")
        span, kept = minutes * 60, self._windows[sensor] * 60
        gauge = {
            "value": Gauge(name, "last", place, kept),
            "different": Gauge(name, "count(distinct)", place, span),
            "before": Gauge(name, "count", place, kept, span),
        }[kind]
        self.gauges[name] = gauge
        return name

    def _read_or(self) -> str:
        parts = [self._read_and()]
        while self._take("or", "||"):
            parts.append(self._read_and())
        return " or ".join(parts)

    def _read_and(self) -> str:
        parts = [self._read_not()]
        while self._take("and", "&&"):
            parts.append(self._read_not())
        return " and ".join(parts)

    def _read_not(self) -> str:
        self._levels += 1
        if self._levels > _MAX_LEVELS:
            raise self._refuse("it is nested too deeply")
        if self._take("not", "!"):
            sql = f"not ({self._read_not()})"
        elif self._take("("):
            sql = f"({self._read_or()})"
            self._require(")")
        else:
            sql = self._read_comparison()
        self._levels -= 1
        return sql

    def _read_comparison(self) -> str:
        sql, is_condition = self._read_operand()
        if is_condition:
            return sql
        operator = _OPERATORS.get(self._next())
        other, is_condition = self._read_operand() if operator else ("", True)
        if is_condition:
            raise self._refuse("it does not compare numbers")
        return f"{sql} {operator} {other}"

    def _read_operand(self) -> tuple[str, bool]:
        """Reads a number, or a call on a sensor. Returns SQL, and whether it is a condition."""
        if self._peek() == "-" or _NUMBER.fullmatch(self._peek()):
            return self._read_number(), False
        sensor = self._next()
        if sensor not in self._windows:
            raise self._refuse(f"{sensor!r:.60} is not in sensorWindowMap")
        self._require(".")
        method = self._next()
        self._require("(")
        arguments = [] if self._peek() == ")" else [self._read_number()]
        while self._take(","):
            arguments.append(self._read_number())
        self._require(")")
        return self._write_call(sensor, method, arguments)

    def _write_call(self, sensor: str, method: str, arguments: list[str]) -> tuple[str, bool]:
        if method == "getValue" and not arguments:
            return self.add_gauge("value", sensor), False
        if method == "isValueBetween" and len(arguments) == 2:
            return f"{self.add_gauge('value', sensor)} between {arguments[0]} and {arguments[1]}", True
        is_change = method in ("hasChanged", "hasNotChanged") and len(arguments) == 1
        if not is_change or not arguments[0].isdigit() or not 0 < int(arguments[0]) <= _MAX_MINUTES:
            raise Refusal("unsupported", f"{method}({', '.join(arguments)}) of a sensor")
        self.asks_change, minutes = True, int(arguments[0])
        different = self.add_gauge("different", sensor, minutes)
        before = self.add_gauge("before", sensor, minutes)
        # A value that is kept for the first time has changed.
        if method == "hasChanged":
            return f"({different} > 1 or {before} = 0)", True
        return f"({different} = 1 and {before} > 0)", True

    def _read_number(self) -> str:
        sign = "-" if self._take("-") else ""
        token = self._next()
        if not _NUMBER.fullmatch(token):
            raise self._refuse(f"{token!r:.60} is not a number")
        return sign + token

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _next(self) -> str:
        token = self._peek()
        self._at += 1
        return token

    def _take(self, *tokens: str) -> bool:
        if self._peek() not in tokens:
            return False
        self._at += 1
        return True

    def _require(self, token: str) -> None:
        if not self._take(token):
            raise self._refuse(f"{token!r} is missing")

    def _refuse(self, why: str) -> Refusal:
        return Refusal("unsupported", f"its expression at {' '.join(self._tokens[self._at :][:5])!r:.80}: {why}")

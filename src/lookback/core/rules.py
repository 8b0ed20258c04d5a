"""A rule as its author wrote it: read from a document, checked for its own sense, kept as it is.

What needs the stream (fields, types, expressions) is checked by `compiled.compile_rule`.
"""

from __future__ import annotations

import copy
import datetime as dt
import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lookback.core.durations import parse_duration
from lookback.core.errors import DurationError, Problem, RuleError

RULE_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}", re.ASCII)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)
SEVERITIES = ("low", "medium", "high", "critical")
LATE_POLICIES = ("evaluate", "record")
STATUSES = ("draft", "shadow", "active", "paused", "retired", "quarantined")
MAX_DOCUMENT_BYTES = 100_000
MAX_MEASURES = 50
_KEYS = (
    "rule_id", "description", "stream", "severity", "group_by", "where", "effective_from", "effective_until",
    "allowed_lateness", "suppress", "message", "tests", "window", "measures", "when", "late",
)  # fmt: skip
# Written down in the contract, but not in this release: refused by name, never ignored.
_LATER = {
    "sequence": "sequences are not in this release; write a lookback window",
    "reset_on_alert": "reset_on_alert is not in this release; leave it out",
    "early": "early belongs to tumbling, sliding and session windows, which are not in this release",
}
_LATER_WINDOWS = ("tumbling", "sliding", "session")


@dataclass(frozen=True)
class Window:
    """A lookback window in microseconds: of an event at t it covers [t - delay - size, t - delay], both ends included."""

    size: int
    delay: int = 0


@dataclass(frozen=True)
class Measure:
    """A named aggregate, such as `sum(amount) filter (where amount > 0)`, over the rule's window or one of its own."""

    name: str
    text: str
    window: Window


@dataclass(frozen=True)
class Rule:
    """A rule whose document makes sense in itself. Times and durations in microseconds.

    effective_from and effective_until bound, both included, the event times that may trigger.
    allowed_lateness None: the stream's. `document` is what the author wrote.
    """

    rule_id: str
    stream: str
    window: Window
    measures: tuple[Measure, ...]
    when: str
    description: str = ""
    severity: str = "medium"
    group_by: tuple[str, ...] = ()
    where: str | None = None
    late: str = "evaluate"
    suppress: int | None = None
    allowed_lateness: int | None = None
    effective_from: int | None = None
    effective_until: int | None = None
    message: str = ""
    tests: tuple[Mapping[str, Any], ...] = ()
    document: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Rule:
        """The rule that a document describes. Raises RuleError with every problem of the document in itself."""
        rule, problems = read_rule(document)
        if problems:
            raise RuleError(rule.rule_id, problems)
        return rule

    def to_dict(self) -> dict[str, Any]:
        """The document as it was written: to_dict(from_dict(x)) == x."""
        return copy.deepcopy(dict(self.document))


def read_rule(document: object) -> tuple[Rule, list[Problem]]:
    """The rule of a document as far as it can be read, and all that is wrong with the document in itself."""
    reader = _Reader(document)
    return reader.rule(), reader.problems


def read_document(text: object) -> dict[str, Any]:
    """The document that the table holds as JSON. Raises RuleError where it is not a JSON object or is too large."""
    if not isinstance(text, str):
        raise RuleError("?", [Problem("document", "is empty; it must hold the rule as JSON")])
    if len(text.encode("utf-8", "surrogatepass")) > MAX_DOCUMENT_BYTES:
        raise RuleError(
            "?", [Problem("document", f"is longer than {MAX_DOCUMENT_BYTES:,} bytes; make the rule smaller")]
        )
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RuleError(
            "?", [Problem("document", f"is not JSON: {error}; write it with `lookback rules push`")]
        ) from None
    if not isinstance(document, dict):
        raise RuleError("?", [Problem("document", f"must be a JSON object, got {type(document).__name__}")])
    return document


class _Reader:
    def __init__(self, document: object) -> None:
        self.problems: list[Problem] = []
        self._document: Mapping[str, Any] = {}
        if isinstance(document, Mapping) and document:
            self._document = document
        else:
            self._wrong(
                "", f"a rule is a mapping with the keys rule_id, stream, window, measures, when; got {document!r:.100}"
            )

    def rule(self) -> Rule:
        document = self._document
        if not document:
            return Rule("?", "", Window(1), (), "")
        self._keys()
        window = self._window(document.get("window"), "window")
        return Rule(
            rule_id=self._rule_id(),
            stream=self._text("stream", required=True),
            window=window,
            measures=self._measures(window),
            when=self._text("when", required=True),
            description=self._text("description"),
            severity=self._choice("severity", SEVERITIES, "medium"),
            group_by=self._group_by(),
            where=self._text("where") or None,
            late=self._late(),
            suppress=self._duration(document.get("suppress"), "suppress") if "suppress" in document else None,
            allowed_lateness=self._lateness(),
            effective_from=self._time("effective_from"),
            effective_until=self._time("effective_until"),
            message=self._text("message"),
            tests=self._tests(),
            document=copy.deepcopy(dict(document)),
        )

    def _wrong(self, place: str, message: str) -> None:
        self.problems.append(Problem(place, message))

    def _keys(self) -> None:
        for key in self._document:
            if key in _KEYS:
                continue
            if key in _LATER:
                self._wrong(str(key), _LATER[key])
                continue
            near = difflib.get_close_matches(str(key), _KEYS, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(_KEYS)}"
            self._wrong(str(key), f"unknown key {key!r}; {hint}")

    def _rule_id(self) -> str:
        rule_id = self._document.get("rule_id")
        if isinstance(rule_id, str) and RULE_ID.fullmatch(rule_id):
            return rule_id
        self._wrong(
            "rule_id",
            "must be 1 to 100 lower-case letters, digits, '.', '_' or '-', beginning with a letter or digit, "
            f"got {rule_id!r:.120}",
        )
        return str(rule_id)[:100] if rule_id else "?"

    def _text(self, key: str, *, required: bool = False) -> str:
        value = self._document.get(key)
        if value is None and not required:
            return ""
        if isinstance(value, str) and (value.strip() or not required):
            return value
        self._wrong(key, f"must be a text, got {value!r:.100}" if value is not None else f"is missing; {_MISSING[key]}")
        return ""

    def _choice(self, key: str, choices: tuple[str, ...], default: str) -> str:
        value = self._document.get(key, default)
        if value in choices:
            return str(value)
        self._wrong(key, f"must be one of {', '.join(choices)}, got {value!r:.100}")
        return default

    def _late(self) -> str:
        if self._document.get("late") == "revise":
            self._wrong("late", "revise is not in this release; write evaluate or record")
            return "evaluate"
        return self._choice("late", LATE_POLICIES, "evaluate")

    def _group_by(self) -> tuple[str, ...]:
        value = self._document.get("group_by", [])
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            self._wrong("group_by", f"must be a list of field names, such as [customer_id], got {value!r:.100}")
            return ()
        if len({name.lower() for name in value}) < len(value):
            self._wrong("group_by", f"names a field twice: {', '.join(value)}")
        return tuple(value)

    def _duration(self, value: object, place: str, *, zero: bool = False) -> int:
        try:
            microseconds = parse_duration(value)
        except DurationError as error:
            self._wrong(place, str(error))
            return 1
        if microseconds == 0 and not zero:
            self._wrong(place, f"must be longer than 0 s, got {value!r}")
            return 1
        return microseconds

    def _lateness(self) -> int | None:
        value = self._document.get("allowed_lateness")
        return None if value is None else self._duration(value, "allowed_lateness", zero=True)

    def _window(self, value: object, place: str) -> Window:
        if value is None:
            self._wrong(place, "is missing; write how far each event looks back, such as 'window: 24 hours'")
            return Window(1)
        if not isinstance(value, Mapping):
            return Window(self._duration(value, place))
        for key in value:
            if key in _LATER_WINDOWS:
                self._wrong(f"{place}.{key}", f"{key} windows are not in this release; write {{lookback: 24 hours}}")
                return Window(1)
            if key not in ("lookback", "delay"):
                self._wrong(f"{place}.{key}", f"unknown key {key!r}; a lookback window has lookback and delay")
        size = self._duration(value.get("lookback"), f"{place}.lookback")
        return Window(size, self._duration(value["delay"], f"{place}.delay", zero=True) if "delay" in value else 0)

    def _measures(self, window: Window) -> tuple[Measure, ...]:
        value = self._document.get("measures")
        if not isinstance(value, Mapping) or not value:
            found = "is missing" if value is None else f"must be a mapping, got {value!r:.100}"
            self._wrong("measures", f"{found}; write at least one name and aggregate, such as 'n: count(*)'")
            return ()
        if len(value) > MAX_MEASURES:
            self._wrong("measures", f"{len(value)} measures are more than {MAX_MEASURES}; split the rule")
        measures, names = [], set()
        for name, spec in value.items():
            place = f"measures.{name}"
            if not (isinstance(name, str) and _NAME.fullmatch(name)):
                self._wrong(place, f"{name!r} is not a name; use letters, digits and _")
                continue
            if name.lower() in names:
                self._wrong(place, f"{name!r} is there twice (capitals make no difference)")
            names.add(name.lower())
            measures.append(self._measure(name, spec, window, place))
        return tuple(measures)

    def _measure(self, name: str, spec: object, window: Window, place: str) -> Measure:
        if isinstance(spec, str):
            return Measure(name, spec, window)
        if not isinstance(spec, Mapping) or not isinstance(spec.get("measure"), str):
            self._wrong(
                place, f"must be an aggregate, such as count(*), or {{measure: ..., window: ...}}, got {spec!r:.100}"
            )
            return Measure(name, "", window)
        for key in spec:
            if key not in ("measure", "window"):
                self._wrong(f"{place}.{key}", f"unknown key {key!r}; a measure has measure and window")
        own = self._window(spec["window"], f"{place}.window") if "window" in spec else window
        return Measure(name, spec["measure"], own)

    def _time(self, key: str) -> int | None:
        value = self._document.get(key)
        if value is None:
            return None
        try:
            return parse_time(value)
        except ValueError:
            self._wrong(key, f"must be a time such as '2026-01-31T12:00:00Z', got {value!r:.100}")
            return None

    def _tests(self) -> tuple[Mapping[str, Any], ...]:
        value = self._document.get("tests", [])
        if not isinstance(value, list):
            self._wrong("tests", f"must be a list, got {value!r:.100}")
            return ()
        for at, test in enumerate(value):
            if not isinstance(test, Mapping) or not isinstance(test.get("events"), list):
                self._wrong(f"tests[{at}]", "must be a mapping with name, events (a list) and alerts (a list)")
            elif not all(isinstance(item, Mapping) for key in ("events", "alerts") for item in test.get(key) or []):
                self._wrong(f"tests[{at}]", "events and alerts are lists of mappings")
            else:
                for key in test:
                    if key not in ("name", "events", "alerts"):
                        self._wrong(f"tests[{at}].{key}", f"unknown key {key!r}; a test has name, events and alerts")
        return tuple(test for test in value if isinstance(test, Mapping))


_MISSING = {
    "stream": "name the stream whose events the rule judges",
    "when": "write the condition that raises the alert, such as 'n >= 10'",
}
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)


def parse_time(value: object) -> int:
    """UTC microseconds of an aware or naive (taken as UTC) datetime, an ISO 8601 text or integer microseconds.

    Raises ValueError for anything else.
    """
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is not a time")
    if isinstance(value, int):
        return value
    if isinstance(value, str):
        text = value.strip()
        # Python 3.10 reads neither the Z nor fractions of other than 3 or 6 digits.
        text = text[:-1] + "+00:00" if text[-1:] in ("Z", "z") else text
        match = re.fullmatch(r"(.*:\d\d)\.(\d{1,6})(|[+-]\d\d:?\d\d)", text)
        value = dt.datetime.fromisoformat(f"{match[1]}.{match[2]:0<6}{match[3]}" if match else text)
    if not isinstance(value, dt.datetime):
        if not isinstance(value, dt.date):
            raise ValueError(f"{value!r} is not a time")
        value = dt.datetime(value.year, value.month, value.day, tzinfo=dt.timezone.utc)
    aware = value if value.tzinfo else value.replace(tzinfo=dt.timezone.utc)
    return (aware - _EPOCH) // dt.timedelta(microseconds=1)

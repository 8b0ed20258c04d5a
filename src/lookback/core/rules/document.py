"""A rule as its author wrote it: read from a document, checked for its own sense, kept as it is.

What needs the stream (fields, types, expressions) is checked by `compiled.compile_rule`.
"""

from __future__ import annotations

import copy
import datetime as dt
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lookback.core.errors import DurationError, Problem, RuleError
from lookback.core.values.durations import format_duration, parse_duration
from lookback.core.values.limits import DEFAULT_LIMITS, WIDEST, Limits, over
from lookback.core.values.suggestions import suggest
from lookback.core.values.times import parse_calendar_time
from lookback.core.values.windows import LOOKBACK, SEQUENCE, Lookback, Sequence, Session, Step, TiledWindow, Window

RULE_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}", re.ASCII)
# Of a measure, of a step.
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)
SEVERITIES = ("low", "medium", "high", "critical")
LATE_POLICIES = ("evaluate", "record", "revise")
EXPIRIES = ("sliding", "fixed")
STATUSES = ("draft", "shadow", "active", "paused", "retired", "quarantined")
# Unless the stream says otherwise.
MAX_DOCUMENT_BYTES = DEFAULT_LIMITS.document_bytes
MAX_MEASURES = DEFAULT_LIMITS.measures
MAX_STEPS = DEFAULT_LIMITS.steps
# Of one step.
MAX_EVENTS = 2**31 - 1
# Levels of lists and mappings in a document; the deepest sense it can make is an array in an event of a test.
MAX_NESTING = 20
# Parts of a document, each counted as often as it is meant: aliases of YAML can make a small text endless.
MAX_PARTS = 100_000
# Of one document so many problems are told; a made-up one could have tens of thousands.
MAX_PROBLEMS = 100
_MAX_MESSAGE = 550
# One event lies in so many windows at most.
MAX_OVERLAP = 1_000
COMMON_KEYS = (
    "rule_id", "description", "stream", "severity", "group_by", "where", "effective_from", "effective_until",
    "allowed_lateness", "suppress", "message", "tests",
)  # fmt: skip
_WINDOW_KEYS = ("window", "measures", "when", "early")
# What else a rule of each kind may have.
KEYS_OF_KIND = {
    "lookback": ("window", "measures", "when", "late", "reset_on_alert"),
    "tumbling": _WINDOW_KEYS,
    "sliding": _WINDOW_KEYS,
    "session": _WINDOW_KEYS,
    "sequence": ("sequence", "late", "reset_on_alert"),
}
WINDOW_FORMS = {
    "lookback": ("lookback", "delay", "resolution"),
    "tumbling": ("tumbling", "offset"),
    "sliding": ("sliding", "slide", "offset"),
    "session": ("session",),
}
SEQUENCE_KEYS = ("within", "steps", "until", "expiry")
STEP_KEYS = ("name", "where", "at_least", "at_most")
ABSENT_KEYS = ("name", "absent", "within")
MEASURE_KEYS = ("measure", "window")
TEST_KEYS = ("name", "events", "alerts")
_KEYS = tuple(dict.fromkeys((*COMMON_KEYS, *(key for keys in KEYS_OF_KIND.values() for key in keys))))


@dataclass(frozen=True)
class Measure:
    """A named aggregate, such as `sum(amount) filter (where amount > 0)`, over the rule's window or a look-back of its own."""

    name: str
    text: str
    window: Window


@dataclass(frozen=True)
class Rule:
    """A rule whose document makes sense in itself. Times and durations in microseconds.

    It has a `window` with measures, or a `sequence`. What triggers lies in [effective_from, effective_until).
    allowed_lateness None: the stream's. when: may be empty where windows give results by themselves (tumbling, sliding,
    session). `document` is what the author wrote.
    """

    rule_id: str
    stream: str
    window: Window | None = None
    measures: tuple[Measure, ...] = ()
    when: str = ""
    sequence: Sequence | None = None
    description: str = ""
    severity: str = "medium"
    group_by: tuple[str, ...] = ()
    where: str | None = None
    late: str = "evaluate"
    reset_on_alert: bool = False
    early: bool = False
    suppress: int | None = None
    allowed_lateness: int | None = None
    effective_from: int | None = None
    effective_until: int | None = None
    message: str = ""
    tests: tuple[Mapping[str, Any], ...] = ()
    document: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def kind(self) -> str:
        """lookback, tumbling, sliding, session or sequence."""
        return SEQUENCE if self.window is None else self.window.kind

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Rule:
        """The rule that a document describes. Raises RuleError with every problem of the document in itself."""
        rule, problems = read_rule(document)
        if problems:
            raise RuleError(rule.rule_id, first_problems(problems))
        return rule

    def to_dict(self) -> dict[str, Any]:
        """The document as it was written: to_dict(from_dict(x)) == x."""
        return copy.deepcopy(dict(self.document))


def read_rule(document: object, limits: Limits = DEFAULT_LIMITS) -> tuple[Rule, list[Problem]]:
    """The rule of a document as far as it can be read, and all that is wrong with the document in itself."""
    reader = _Reader(document, limits)
    return reader.rule(), reader.problems


def read_document(text: object, limits: Limits = WIDEST) -> dict[str, Any]:
    """The document that the table holds as JSON. Raises RuleError where it is not a JSON object or is too large.

    limits: those of its stream, where that is known.
    """
    if not isinstance(text, str):
        raise RuleError("?", [Problem("document", "is empty; it must hold the rule as JSON")])
    if len(text) > limits.document_bytes or len(text.encode("utf-8", "surrogatepass")) > limits.document_bytes:
        raise RuleError("?", [Problem("document", too_long(limits))])
    unreadable = ""
    try:
        document = json.loads(text, object_pairs_hook=_once_each)
    except _TwiceError as error:
        raise RuleError(
            "?",
            [problem_at("document", f"gives the key {shown(error.key)} twice in one object; leave one of them out")],
        ) from None
    except json.JSONDecodeError as error:
        unreadable = str(error)
    except RecursionError:
        unreadable = "it is nested too deeply"
    except ValueError:
        unreadable = "a number in it has too many digits"
    if unreadable:
        raise RuleError("?", [Problem("document", f"is not JSON: {unreadable}; write it with `lookback rules push`")])
    if not isinstance(document, dict):
        raise RuleError(
            "?", [problem_at("document", f"must be a JSON object with rule_id, stream ..., got {shown(document)}")]
        )
    return document


class _TwiceError(Exception):
    """A key that stands twice in one JSON object, of which only the last value would count."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _TwiceError(key)
        found[key] = value
    return found


def too_long(limits: Limits) -> str:
    """What is said of a document with more bytes than it may have."""
    what = f"is longer than {limits.document_bytes:,} bytes; make the rule smaller, or give it fewer tests"
    return over(what, "document_bytes")


def problem_at(place: str, message: str) -> Problem:
    """A problem in one line of at most about 550 characters, whatever a document's names and values hold."""
    return Problem(_line(place, 120), _line(message, _MAX_MESSAGE))


def first_problems(problems: list[Problem]) -> list[Problem]:
    """The problems to tell: the first 100, and how many more there are."""
    more = len(problems) - MAX_PROBLEMS
    if more <= 0:
        return problems
    return [*problems[:MAX_PROBLEMS], Problem("", f"{more:,} more problems are not listed; mend these first")]


def shown(value: object) -> str:
    """A value of a document for a message: a text in quotes, anything else as JSON has it; at most 100 characters."""
    if isinstance(value, str):
        text = repr(value)
    elif isinstance(value, dt.date):
        text = str(value)
    else:
        try:
            text = json.dumps(value, default=str, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            text = "something that JSON cannot hold"
    return text if len(text) <= 100 else f"{text[:97]}..."


_SURROGATE = re.compile("[\ud800-\udfff]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]+")


def _line(text: str, most: int) -> str:
    # Half a surrogate pair can stand in JSON, but in no table.
    text = _CONTROL.sub(" ", text).encode("utf-8", "backslashreplace").decode()
    if len(text) <= most:
        return text
    # What it is about stands at the front, what to do at the end.
    return f"{text[: most * 2 // 3]} ... {text[-most // 3 :]}"


def _too_deep(document: Mapping[str, Any]) -> bool:
    # By levels, each part of a level once: aliases of YAML can make a small text endless.
    level: list[Any] = [document]
    for _ in range(MAX_NESTING):
        parts = (part for outer in level for part in (outer.values() if isinstance(outer, Mapping) else outer))
        level = list({id(part): part for part in parts if isinstance(part, (Mapping, list, tuple))}.values())
    return bool(level)


def _parts(document: Mapping[str, Any]) -> int:
    """How many parts a document has once every alias is written out; it is not nested too deeply."""
    known: dict[int, int] = {}

    def count(part: Any) -> int:
        if not isinstance(part, (Mapping, list, tuple)):
            return 1
        if id(part) not in known:
            inner = part.values() if isinstance(part, Mapping) else part
            known[id(part)] = 1 + sum(count(each) for each in inner)
        return known[id(part)]

    return count(document)


def _unwritable(part: Any, place: str) -> str | None:
    """The place of the first text, keys included, that cannot be written: it holds half of a surrogate pair."""
    if isinstance(part, str):
        return place if _SURROGATE.search(part) else None
    pairs: Iterable[tuple[Any, str]] = ()
    if isinstance(part, Mapping):
        if any(isinstance(key, str) and _SURROGATE.search(key) for key in part):
            return place
        pairs = ((value, f"{place}.{key}" if place else str(key)) for key, value in part.items())
    elif isinstance(part, (list, tuple)):
        pairs = ((value, f"{place}[{at}]") for at, value in enumerate(part))
    return next((found for value, inner in pairs if (found := _unwritable(value, inner)) is not None), None)


class _Reader:
    def __init__(self, document: object, limits: Limits) -> None:
        self.problems: list[Problem] = []
        self._limits = limits
        self._document: Mapping[str, Any] = {}
        if not isinstance(document, Mapping) or not document:
            self._wrong(
                "",
                "a rule is a mapping; write at least the keys rule_id, stream, window, measures and when, "
                f"got {shown(document)}",
            )
        elif _too_deep(document):
            self._wrong(
                "", f"the document is nested deeper than {MAX_NESTING} levels; leave out what is no part of a rule"
            )
        elif _parts(document) > MAX_PARTS:
            self._wrong("", f"the document has more than {MAX_PARTS:,} parts; split the rule, or write fewer aliases")
        elif (place := _unwritable(document, "")) is not None:
            self._wrong(
                place or "document", "holds half of a surrogate pair (\\ud800 to \\udfff); write the character itself"
            )
        else:
            self._document = document

    def rule(self) -> Rule:
        document = self._document
        if not document:
            return Rule("?", "")
        sequence = self._sequence() if "sequence" in document else None
        window = None if sequence is not None else self._window(document.get("window"), "window")
        kind = None if window is _UNREAD else SEQUENCE if window is None else window.kind
        self._keys(kind)
        # A rule without any window is taken for one that looks back.
        required = kind == LOOKBACK or (sequence is None and document.get("window") is None)
        rule = Rule(
            rule_id=self._rule_id(),
            stream=self._text("stream", required=True),
            window=window,
            measures=() if window is None else self._measures(window),
            when=self._text("when", required=required) if sequence is None else "",
            sequence=sequence,
            description=self._text("description"),
            severity=self._choice("severity", SEVERITIES, "medium"),
            group_by=self._group_by(),
            where=self._text("where") or None,
            late=self._choice("late", LATE_POLICIES, "evaluate"),
            reset_on_alert=self._flag("reset_on_alert"),
            early=self._flag("early"),
            suppress=self._duration(document.get("suppress"), "suppress") if "suppress" in document else None,
            allowed_lateness=self._lateness(),
            effective_from=self._time("effective_from"),
            effective_until=self._time("effective_until"),
            message=self._text("message"),
            tests=self._tests(),
            document=copy.deepcopy(dict(document)),
        )
        self._combinations(rule)
        return rule

    def _wrong(self, place: str, message: str) -> None:
        self.problems.append(problem_at(place, message))

    def _keys(self, kind: str | None) -> None:
        allowed = _KEYS if kind is None else (*COMMON_KEYS, *KEYS_OF_KIND[kind])
        keys: list[object] = list(self._document)  # YAML and JSON differ in what a key may be
        for key in keys:
            if key in allowed:
                continue
            place = key if isinstance(key, str) else shown(key)
            if key == "window":
                self._wrong(
                    "window", "a rule has a window or a sequence, not both; leave the window out, within is enough"
                )
            elif key in _KEYS:
                kinds = [name for name, those in KEYS_OF_KIND.items() if key in those]
                self._wrong(place, f"{key} is for {_listed(kinds)} rules, and this is a {kind} rule; leave it out")
            elif key in _OF_THE_ROW:
                self._wrong(place, f"{key} is kept beside the document, in the rule's row; leave it out here")
            else:
                self._wrong(place, _unknown(key, allowed))

    def _combinations(self, rule: Rule) -> None:
        if rule.late == "revise" and rule.kind == SEQUENCE:
            self._wrong("late", "revise is for lookback rules; a sequence takes evaluate or record")
        elif rule.late == "revise" and rule.reset_on_alert and rule.kind == LOOKBACK:
            self._wrong(
                "late",
                "revise and reset_on_alert exclude each other, since what an alert has emptied cannot be judged again; "
                "leave one of them out",
            )
        start, end = rule.effective_from, rule.effective_until
        if start is not None and end is not None and end <= start:
            self._wrong(
                "effective_until",
                f"must be after effective_from, {shown(self._document['effective_from'])}, or nothing could trigger, "
                f"got {shown(self._document['effective_until'])}",
            )

    def _rule_id(self) -> str:
        rule_id = self._document.get("rule_id")
        if isinstance(rule_id, str) and RULE_ID.fullmatch(rule_id):
            return rule_id
        if rule_id is None:
            self._wrong("rule_id", "is missing; write a name such as 'large-payment'")
            return "?"
        near = re.sub(r"[^a-z0-9._-]+", "-", str(rule_id).lower()).strip("._-")[:100]
        self._wrong(
            "rule_id",
            "must be 1 to 100 lower-case letters, digits, '.', '_' or '-', beginning with a letter or digit, "
            f"got {shown(rule_id)}; write {near or 'large-payment'!r}",
        )
        return str(rule_id)[:100] if rule_id else "?"

    def _text(self, key: str, *, required: bool = False) -> str:
        value = self._document.get(key)
        if isinstance(value, str) and (value.strip() or key not in _REMEDIES):
            return value
        if value is None and not required:
            return ""
        if value is None or isinstance(value, str):
            self._wrong(key, f"is {'missing' if value is None else 'blank'}; {_REMEDIES[key]}")
        else:
            self._wrong(key, f"must be a text, got {shown(value)}; put it in quotes")
        return ""

    def _choice(self, key: str, choices: tuple[str, ...], default: str) -> str:
        value = self._document.get(key, default)
        if value in choices:
            return str(value)
        self._wrong(key, _one_of(choices, value))
        return default

    def _flag(self, key: str) -> bool:
        value = self._document.get(key, False)
        if not isinstance(value, bool):
            self._wrong(key, f"must be true or false, got {shown(value)}")
            return False
        return value

    def _group_by(self) -> tuple[str, ...]:
        value = self._document.get("group_by", [])
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            self._wrong("group_by", f"must be a list of field names, such as [customer_id], got {shown(value)}")
            return ()
        names = {name.lower(): name for name in reversed(value)}
        if len(names) < len(value):
            self._wrong(
                "group_by", f"group_by names a field twice (capitals make no difference): {shown(value)}; leave one out"
            )
        return tuple(reversed(names.values()))

    def _duration(self, value: object, place: str, *, zero: bool = False) -> int:
        try:
            microseconds = parse_duration(value)
        except DurationError as error:
            self._wrong(place, str(error).replace(repr(value), shown(value)))
            return 1
        if microseconds == 0 and not zero:
            self._wrong(place, f"must be longer than 0 s, got {shown(value)}")
            return 1
        return microseconds

    def _limited(self, span: int, place: str) -> None:
        """Refuses a window that looks back too far: its state would be kept for as long."""
        most = self._limits.window
        if span > most:
            what = f"{format_duration(span)} is longer than {format_duration(most)}; write at most that"
            self._wrong(place, over(what, "window"))

    def _lateness(self) -> int | None:
        value = self._document.get("allowed_lateness")
        return None if value is None else self._duration(value, "allowed_lateness", zero=True)

    def _window(self, value: object, place: str) -> Window:
        if value is None:
            self._wrong(place, "is missing; write how far each event looks back, such as 'window: 24 hours'")
            return _UNREAD
        if not isinstance(value, Mapping):
            size = self._duration(value, place)
            self._limited(size, place)
            return Lookback(size)
        kinds = [kind for kind in WINDOW_FORMS if kind in value]
        if len(kinds) != 1:
            wanted = "must be of one kind" if kinds else "must name its kind"
            found = f"{wanted}, got {f'{_listed(kinds)} at once' if kinds else shown(dict(value))}"
            self._wrong(place, f"{found}; write one of {', '.join(f'{{{kind}: 1 hour}}' for kind in WINDOW_FORMS)}")
            return _UNREAD
        kind = kinds[0]
        for key in value:
            if key not in WINDOW_FORMS[kind]:
                others = [name for name, keys in WINDOW_FORMS.items() if key in keys]
                self._wrong(
                    f"{place}.{key}",
                    f"{key} is for {_listed(others)} windows, and this is a {kind} window; leave it out"
                    if others
                    else _unknown(key, WINDOW_FORMS[kind]),
                )
        sound = len(self.problems)
        size = self._duration(value[kind], f"{place}.{kind}")
        if kind == "lookback":
            delay = self._optional(value, "delay", place)
            self._limited(size + delay, f"{place}.delay" if delay else f"{place}.lookback")
            return Lookback(size, delay, self._resolution(value, size, sound, place))
        self._limited(size, f"{place}.{kind}")
        if kind == "session":
            return Session(size)
        slide = self._slide(value, place) or size if kind == "sliding" else size
        if len(self.problems) == sound:
            self._overlap(value, size, slide, f"{place}.slide")
        return TiledWindow(size, slide, self._optional(value, "offset", place))

    def _slide(self, value: Mapping[str, Any], place: str) -> int | None:
        place = f"{place}.slide"
        if "slide" in value:
            return self._duration(value["slide"], place)
        self._wrong(place, "is missing; write how far apart the windows start, such as 'slide: 5 minutes'")
        return None

    def _overlap(self, value: Mapping[str, Any], size: int, slide: int, place: str) -> None:
        if slide > size:
            self._wrong(
                place,
                f"{shown(value['slide'])} is larger than the window of {shown(value['sliding'])}, so events between "
                "two windows would be in none; write at most the window",
            )
        elif size > MAX_OVERLAP * slide:
            self._wrong(
                place,
                f"{shown(value['slide'])} puts every event into more than {MAX_OVERLAP:,} windows of "
                f"{shown(value['sliding'])}; write a longer slide",
            )

    def _resolution(self, value: Mapping[str, Any], size: int, sound: int, place: str) -> int:
        """sound: how many problems there were before the window was read."""
        if "resolution" not in value:
            return 0
        place = f"{place}.resolution"
        resolution = self._duration(value["resolution"], place)
        if len(self.problems) == sound and resolution > size:
            self._wrong(
                place,
                f"{shown(value['resolution'])} is larger than the window of {shown(value['lookback'])}, so it would say "
                "little of how far back the window goes; write at most the window",
            )
        return resolution

    def _optional(self, value: Mapping[str, Any], key: str, place: str) -> int:
        return self._duration(value[key], f"{place}.{key}", zero=True) if key in value else 0

    def _sequence(self) -> Sequence:
        value = self._document.get("sequence")
        if not isinstance(value, Mapping):
            self._wrong("sequence", f"must be a mapping with within and steps, got {shown(value)}")
            return Sequence(1, ())
        for key in value:
            if key not in SEQUENCE_KEYS:
                self._wrong(f"sequence.{key}", _unknown(key, SEQUENCE_KEYS))
        if "within" not in value:
            self._wrong(
                "sequence.within", "is missing; write the time that the steps have, such as 'within: 10 minutes'"
            )
        within = self._duration(value["within"], "sequence.within") if "within" in value else 1
        self._limited(within, "sequence.within")
        until, expiry = value.get("until"), value.get("expiry", "sliding")
        if until is not None and not (isinstance(until, str) and until.strip()):
            self._wrong("sequence.until", f"must be a condition, such as \"outcome = 'SUCCESS'\", got {shown(until)}")
            until = None
        if expiry not in EXPIRIES:
            self._wrong("sequence.expiry", _one_of(EXPIRIES, expiry))
        return Sequence(within, self._steps(value.get("steps"), within), until, str(expiry))

    def _steps(self, value: object, within: int) -> tuple[Step, ...]:
        place = "sequence.steps"
        if not isinstance(value, list) or not value:
            found = "is missing" if value is None else f"must be a list with at least one step, got {shown(value)}"
            self._wrong(
                place, f"{found}; write steps such as {{name: failures, where: \"outcome = 'FAIL'\", at_least: 3}}"
            )
            return ()
        most = self._limits.steps
        if len(value) > most:
            self._wrong(place, over(f"{len(value):,} steps are more than {most:,}; split the rule", "steps"))
        steps: list[Step] = []
        for at, spec in enumerate(value[:most]):
            step = self._step(spec, f"{place}[{at}]", within)
            if step is None:
                continue
            if step.name.lower() in {known.name.lower() for known in steps}:
                self._wrong(f"{place}[{at}].name", f"{step.name!r} is there twice; give each step its own name")
            if step.absent and at != len(value) - 1:
                self._wrong(
                    f"{place}[{at}].absent", "only the last step can be absent; move it to the end or leave it out"
                )
            elif step.absent and at == 0:
                self._wrong(
                    f"{place}[{at}].absent",
                    "nothing begins the wait; write a step before it, such as {name: seen, where: 'true'}",
                )
            steps.append(step)
        return tuple(steps)

    def _step(self, spec: object, place: str, within: int) -> Step | None:
        if not isinstance(spec, Mapping):
            self._wrong(place, f"must be a mapping with name and where, got {shown(spec)}")
            return None
        absent = "absent" in spec
        keys = ABSENT_KEYS if absent else STEP_KEYS
        for key in spec:
            if key not in keys:
                self._wrong(f"{place}.{key}", _OF_OTHER_STEPS.get((absent, key)) or _unknown(key, keys))
        name, key = spec.get("name"), "absent" if absent else "where"
        if not (isinstance(name, str) and NAME.fullmatch(name)):
            self._wrong(
                f"{place}.name", _no_name(name) if "name" in spec else "is missing; write one, such as 'failures'"
            )
            return None
        condition = spec.get(key)
        if not (isinstance(condition, str) and condition.strip()):
            found = f"must be a condition, got {shown(condition)}" if key in spec else "is missing"
            self._wrong(f"{place}.{key}", f"{found}; write which events the step takes, such as \"outcome = 'FAIL'\"")
            condition = ""
        if absent:
            return Step(name, condition, absent=True, within=self._wait(spec, place, within))
        least = self._number(spec.get("at_least", 1), f"{place}.at_least", 1, "1")
        most = None
        if "at_most" in spec:
            most = self._number(spec["at_most"], f"{place}.at_most", least, f"{least} (at_least)")
        return Step(name, condition, least, most)

    def _wait(self, spec: Mapping[str, Any], place: str, within: int) -> int:
        if "within" not in spec:
            return within
        wait = self._duration(spec["within"], f"{place}.within")
        self._limited(wait, f"{place}.within")
        return wait

    def _number(self, value: object, place: str, least: int, words: str) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= MAX_EVENTS:
            return value
        self._wrong(place, f"must be a whole number from {words} to {MAX_EVENTS:,}, got {shown(value)}")
        return least

    def _measures(self, window: Window) -> tuple[Measure, ...]:
        value = self._document.get("measures")
        if not isinstance(value, Mapping) or not value:
            found = "is missing" if value is None else f"must be a mapping, got {shown(value)}"
            self._wrong("measures", f"{found}; write at least one name and aggregate, such as 'n: count(*)'")
            return ()
        most = self._limits.measures
        if len(value) > most:
            self._wrong("measures", over(f"{len(value):,} measures are more than {most:,}; split the rule", "measures"))
        measures, names = [], set()
        for name, spec in list(value.items())[:most]:
            place = f"measures.{name}"
            if not (isinstance(name, str) and NAME.fullmatch(name)):
                self._wrong(place, _no_name(name))
                continue
            if name.lower() in names:
                self._wrong(
                    place, f"{name!r} is there twice (capitals make no difference); give each measure its own name"
                )
                continue
            names.add(name.lower())
            measures.append(self._measure(name, spec, window, place))
        return tuple(measures)

    def _measure(self, name: str, spec: object, window: Window, place: str) -> Measure:
        text = spec.get("measure") if isinstance(spec, Mapping) else spec
        if not (isinstance(text, str) and text.strip()):
            self._wrong(
                place, f"must be an aggregate, such as count(*), or {{measure: ..., window: ...}}, got {shown(spec)}"
            )
            return Measure(name, "", window)
        if not isinstance(spec, Mapping):
            return Measure(name, text, window)
        for key in spec:
            if key not in MEASURE_KEYS:
                self._wrong(f"{place}.{key}", _unknown(key, MEASURE_KEYS))
        if "window" not in spec:
            return Measure(name, text, window)
        own = self._window(spec["window"], f"{place}.window")
        if not isinstance(own, Lookback) or not isinstance(window, Lookback):
            self._wrong(
                f"{place}.window",
                f"only measures of a lookback rule have windows of their own, and those look back too; "
                f"leave out this {own.kind} window in a {window.kind} rule",
            )
        return Measure(name, text, own)

    def _time(self, key: str) -> int | None:
        value = self._document.get(key)
        if value is None:
            return None
        try:
            return parse_calendar_time(value)
        except ValueError:
            self._wrong(key, f"must be a time such as '2026-01-31T12:00:00Z', got {shown(value)}")
            return None

    def _tests(self) -> tuple[Mapping[str, Any], ...]:
        value = self._document.get("tests", [])
        if not isinstance(value, list):
            self._wrong("tests", f"must be a list of mappings with name, events and alerts, got {shown(value)}")
            return ()
        for at, test in enumerate(value):
            place = f"tests[{at}]"
            if not isinstance(test, Mapping):
                self._wrong(place, f"must be a mapping with name, events and alerts, got {shown(test)}")
                continue
            for key in test:
                if key not in TEST_KEYS:
                    self._wrong(f"{place}.{key}", _unknown(key, TEST_KEYS))
            for key, example in (("events", "{event_id: 1, amount: 100}"), ("alerts", "{event_id: 1}")):
                items = test.get(key)
                if items is None and key == "alerts":
                    continue
                if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
                    found = "is missing; write" if items is None else "must be"
                    got = "" if items is None else f", got {shown(items)}"
                    self._wrong(f"{place}.{key}", f"{found} a list of mappings, such as [{example}]{got}")
        return tuple(test for test in value if isinstance(test, Mapping))


# Words that people try, and the key that means it. A step has a `where` in place of a `when`.
_MEANT = {
    "condition": "when", "conditions": "when", "having": "when", "alert_when": "when", "if": "when", "filter": "where",
    "aggregates": "measures", "aggregations": "measures", "metrics": "measures", "key": "group_by", "keys": "group_by",
    "partition_by": "group_by", "id": "rule_id", "priority": "severity", "text": "message", "throttle": "suppress",
}  # fmt: skip


def _unknown(key: object, known: tuple[str, ...]) -> str:
    hint = suggest(key, known)
    if isinstance(key, str) and (meant := _MEANT.get(key.lower())):
        words = [word for word in (meant, "where" if meant == "when" else "") if word in known]
        hint = f"did you mean {words[0]!r}?" if words else hint
    return f"unknown key {shown(key)}; {hint}"


def _one_of(choices: tuple[str, ...], value: object) -> str:
    hint = suggest(value, choices, "")
    return f"must be one of {', '.join(choices)}, got {shown(value)}" + (f"; {hint}" if hint else "")


def _no_name(value: object) -> str:
    return f"{shown(value)} is not a name; use letters, digits and _, no digit first, at most 128 in all"


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


# (whether the step is of absence, key) -> why the key is not for it.
_OF_OTHER_STEPS = {
    (True, "where"): "a step has where or absent, not both; leave one of them out",
    (True, "at_least"): "at_least is for steps that take events, and this is one of absence; leave it out",
    (True, "at_most"): "at_most is for steps that take events, and this is one of absence; leave it out",
    (False, "within"): "within is for a last step with absent; leave it out, the steps have the sequence's within",
}
# What to write for a text that must not be blank.
_REMEDIES = {
    "stream": "name the stream whose events the rule judges",
    "where": "write which events the rule sees, such as \"payment_type = 'CSH'\", or leave it out for all",
    "when": "write the condition that raises the alert, such as 'n >= 10'",
}
# Belongs to the rule's row, not to its document.
_OF_THE_ROW = ("version", "status", "author", "comment")
# A window that cannot be told to be of any kind.
_UNREAD = Lookback(0)

"""Reads a rule from the document that its author wrote, and finds every problem that shows without its stream.

`compiled.compile_rule` checks the rest: fields, types and expressions.
"""

from __future__ import annotations

import copy
import datetime as dt
import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lookback.core.errors import DurationError, Problem, RuleError
from lookback.core.rules.parameters import Parameters, Value, find_wrong_value
from lookback.core.values.contents import read_contents
from lookback.core.values.durations import format_duration, parse_duration
from lookback.core.values.limits import DEFAULT_LIMITS, MAX_NESTING, WIDEST_LIMITS, Limits, is_too_deep, name_limit
from lookback.core.values.suggestions import suggest
from lookback.core.values.texts import cut_end, cut_middle, join_words, to_one_line
from lookback.core.values.times import parse_calendar_time
from lookback.core.values.windows import LOOKBACK, SEQUENCE, Lookback, Session, Step, StepSequence, TiledWindow, Window

RULE_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}", re.ASCII)
# The names of measures and steps.
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)
# From the least grave on. The alerts of an `info` rule are reports, unless it says `queue: true`.
INFO = "info"
SEVERITIES = (INFO, "low", "medium", "high", "critical")
# What an alert adds to the risk of its entity where the document has no `score`: ten low ones weigh as much as a critical one.
SCORES = {INFO: 0, "low": 10, "medium": 25, "high": 50, "critical": 100}
MAX_SCORE = 1_000_000
LATE_POLICIES = ("evaluate", "record", "revise")
EXPIRIES = ("sliding", "fixed")
STATUSES = ("draft", "shadow", "active", "paused", "retired", "quarantined")
# The defaults of a stream's `limits`.
MAX_DOCUMENT_BYTES = DEFAULT_LIMITS.document_bytes
MAX_MEASURES = DEFAULT_LIMITS.measures
MAX_STEPS = DEFAULT_LIMITS.steps
# The most events that one step can need.
MAX_EVENTS = 2**31 - 1
# Parts of a document, an aliased one counted at each use: aliases of YAML can make a small text endless.
MAX_PARTS = 100_000
# Problems listed for one document; a hostile one could have tens of thousands.
MAX_PROBLEMS = 100
_MAX_PLACE_CHARACTERS, _MAX_MESSAGE_CHARACTERS, _MAX_VALUE_CHARACTERS = 120, 550, 100
# Windows that one event lies in.
MAX_OVERLAP = 1_000
COMMON_KEYS = (
    "rule_id", "description", "parameters", "stream", "severity", "group_by", "entity", "score", "queue", "where",
    "effective_from", "effective_until", "allowed_lateness", "suppress", "warm_start", "message", "tests",
)  # fmt: skip
_WINDOW_KEYS = ("window", "measures", "when", "early")
# The further keys of each kind of rule.
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
TEST_KEYS = ("name", "events", "alerts", "parameters", "lists")
_KEYS = tuple(dict.fromkeys((*COMMON_KEYS, *(key for keys in KEYS_OF_KIND.values() for key in keys))))


@dataclass(frozen=True)
class Measure:
    """A named aggregate, such as `sum(amount) filter (where amount > 0)`, over the rule's window or a look-back of its own."""

    name: str
    text: str
    window: Window


@dataclass(frozen=True)
class Rule:
    """A rule read from a document that is consistent in itself. Times and durations in microseconds.

    It has either a `window` with measures or a `sequence`. Triggers lie in [effective_from, effective_until).
    allowed_lateness: None for the stream's. when: can be empty for tumbling, sliding and session windows, which give a
    result each. entity: the field of group_by whose value the alerts are about; empty for none. score: what an alert adds to
    the risk of that value. queue: whether an alert waits for a person; False for a report. parameters: the values that are
    written into the other attributes already. document: as the author wrote it.
    """

    rule_id: str
    stream: str
    window: Window | None = None
    measures: tuple[Measure, ...] = ()
    when: str = ""
    sequence: StepSequence | None = None
    description: str = ""
    parameters: Mapping[str, Value] = field(default_factory=dict, compare=False)
    severity: str = "medium"
    group_by: tuple[str, ...] = ()
    entity: str = ""
    score: int = SCORES["medium"]
    queue: bool = True
    where: str | None = None
    late: str = "evaluate"
    reset_on_alert: bool = False
    early: bool = False
    suppress: int | None = None
    warm_start: bool = True
    allowed_lateness: int | None = None
    effective_from: int | None = None
    effective_until: int | None = None
    message: str = ""
    tests: tuple[Mapping[str, Any], ...] = ()
    document: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def kind(self) -> str:
        """The rule's kind: lookback, tumbling, sliding, session or sequence."""
        return SEQUENCE if self.window is None else self.window.kind

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Rule:
        """Reads a rule from a document. Raises RuleError with every problem that shows without the stream."""
        rule, problems = read_rule(document)
        if problems:
            raise RuleError(rule.rule_id, limit_problems(problems))
        return rule

    def to_dict(self) -> dict[str, Any]:
        """Returns a copy of the document as it was written: to_dict(from_dict(x)) == x."""
        return copy.deepcopy(dict(self.document))


def read_rule(document: object, limits: Limits = DEFAULT_LIMITS) -> tuple[Rule, list[Problem]]:
    """Reads as much of a rule as it can, and returns it with every problem that shows without the stream."""
    reader = _Reader(document, limits)
    return reader.read(), reader.problems


def read_document(text: object, limits: Limits = WIDEST_LIMITS) -> dict[str, Any]:
    """Parses a document from the JSON that the rules table holds. Raises RuleError if it is too large or not a JSON object.

    limits: those of its stream, if the stream is known.
    """
    if not isinstance(text, str):
        raise RuleError("?", [Problem("document", "is empty; it must hold the rule as JSON")])
    if len(text) > limits.document_bytes or len(text.encode("utf-8", "surrogatepass")) > limits.document_bytes:
        raise RuleError("?", [Problem("document", describe_size_limit(limits))])
    unreadable = ""
    try:
        document = json.loads(text, object_pairs_hook=_refuse_repeated_keys)
    except _RepeatedKeyError as error:
        raise RuleError(
            "?",
            [
                make_problem(
                    "document", f"gives the key {quote_value(error.key)} twice in one object; leave one of them out"
                )
            ],
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
            "?",
            [make_problem("document", f"must be a JSON object with rule_id, stream ..., got {quote_value(document)}")],
        )
    return document


def is_same_document(one: str | None, other: str | None) -> bool:
    """Returns whether two documents say the same. The order of keys and the white space of their JSON do not count."""
    if one is None or other is None:
        return one is other
    return one == other or _normalize(one) == _normalize(other)


@functools.lru_cache(maxsize=256)
def _normalize(text: str) -> str:
    try:
        return json.dumps(read_document(text), sort_keys=True)
    except (RuleError, RecursionError):
        return text


class _RepeatedKeyError(Exception):
    """A JSON object repeats a key; a parser would silently keep the last value."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise _RepeatedKeyError(key)
        mapping[key] = value
    return mapping


def describe_size_limit(limits: Limits) -> str:
    """Returns the message for a document with more bytes than the limit."""
    problem = f"is longer than {limits.document_bytes:,} bytes; make the rule smaller, or give it fewer tests"
    return name_limit(problem, "document_bytes")


def make_problem(place: str, message: str) -> Problem:
    """Returns a problem on one line of at most about 550 characters, whatever a document's names and values hold.

    A long message is cut in its middle: it begins with the place and ends with the remedy.
    """
    message = cut_middle(to_one_line(message), _MAX_MESSAGE_CHARACTERS)
    return Problem(cut_middle(to_one_line(place), _MAX_PLACE_CHARACTERS), message)


def limit_problems(problems: list[Problem]) -> list[Problem]:
    """Returns the first 100 problems, and the number of the rest as the last one."""
    more = len(problems) - MAX_PROBLEMS
    if more <= 0:
        return problems
    return [*problems[:MAX_PROBLEMS], Problem("", f"{more:,} more problems are not listed; mend these first")]


def quote_value(value: object) -> str:
    """Formats a value for a message: a text in quotes, anything else as JSON; at most 100 characters."""
    if isinstance(value, str):
        text = repr(value)
    elif isinstance(value, dt.date):
        text = str(value)
    else:
        try:
            text = json.dumps(value, default=str, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            text = "something that JSON cannot hold"
    return cut_end(text, _MAX_VALUE_CHARACTERS)


_SURROGATE = re.compile("[\ud800-\udfff]")


def _count_parts(document: Mapping[str, Any]) -> int:
    """Counts the parts of a document as if every alias were written out; the document is not nested too deeply."""
    known: dict[int, int] = {}

    def count(part: Any) -> int:
        if not isinstance(part, (Mapping, list, tuple)):
            return 1
        if id(part) not in known:
            inner = part.values() if isinstance(part, Mapping) else part
            known[id(part)] = 1 + sum(count(each) for each in inner)
        return known[id(part)]

    return count(document)


def _find_unwritable(part: Any, place: str) -> str | None:
    """Returns the place of the first text or key with half of a surrogate pair, which no table can hold."""
    if isinstance(part, str):
        return place if _SURROGATE.search(part) else None
    pairs: Iterable[tuple[Any, str]] = ()
    if isinstance(part, Mapping):
        if any(isinstance(key, str) and _SURROGATE.search(key) for key in part):
            return place
        pairs = ((value, f"{place}.{key}" if place else str(key)) for key, value in part.items())
    elif isinstance(part, (list, tuple)):
        pairs = ((value, f"{place}[{at}]") for at, value in enumerate(part))
    return next((found for value, inner in pairs if (found := _find_unwritable(value, inner)) is not None), None)


class _Reader:
    """Reads a document and collects its problems. Its methods return a usable value even for a wrong key."""

    def __init__(self, document: object, limits: Limits) -> None:
        self.problems: list[Problem] = []
        self._limits = limits
        self._document: Mapping[str, Any] = {}
        self._parameters = Parameters()
        if not isinstance(document, Mapping) or not document:
            self._add_problem(
                "",
                "a rule is a mapping; write at least the keys rule_id, stream, window, measures and when, "
                f"got {quote_value(document)}",
            )
        elif is_too_deep(document):
            self._add_problem(
                "", f"the document is nested deeper than {MAX_NESTING} levels; leave out what does not belong to a rule"
            )
        elif _count_parts(document) > MAX_PARTS:
            self._add_problem(
                "", f"the document has more than {MAX_PARTS:,} parts; split the rule, or write fewer aliases"
            )
        elif (place := _find_unwritable(document, "")) is not None:
            self._add_problem(
                place or "document", "holds half of a surrogate pair (\\ud800 to \\udfff); write the character itself"
            )
        else:
            self._document = document

    def read(self) -> Rule:
        document = self._document
        if not document:
            return Rule("?", "")
        self._parameters = self._read_parameters(document.get("parameters", {}), "parameters")
        sequence = self._read_sequence() if "sequence" in document else None
        window = None if sequence is not None else self._read_window(document.get("window"), "window")
        kind = None if window is _UNREADABLE else SEQUENCE if window is None else window.kind
        self._check_keys(kind)
        # A rule without any window counts as a lookback rule.
        required = kind == LOOKBACK or (sequence is None and document.get("window") is None)
        severity, group_by = self._read_choice("severity", SEVERITIES, "medium"), self._read_group_by()
        rule = Rule(
            rule_id=self._read_rule_id(),
            stream=self._read_text("stream", required=True),
            parameters=self._parameters.values,
            window=window,
            measures=() if window is None else self._read_measures(window),
            when=self._read_expression("when", required=required) if sequence is None else "",
            sequence=sequence,
            description=self._read_text("description"),
            severity=severity,
            group_by=group_by,
            entity=self._read_entity(group_by),
            score=self._read_score(severity),
            queue=self._read_flag("queue", default=severity != INFO),
            where=self._read_expression("where") or None,
            late=self._read_choice("late", LATE_POLICIES, "evaluate"),
            reset_on_alert=self._read_flag("reset_on_alert"),
            early=self._read_flag("early"),
            suppress=self._read_duration(document.get("suppress"), "suppress") if "suppress" in document else None,
            warm_start=self._read_flag("warm_start", default=True),
            allowed_lateness=self._read_lateness(),
            effective_from=self._read_time("effective_from"),
            effective_until=self._read_time("effective_until"),
            message=self._parameters.fill_message(self._read_text("message")),
            tests=self._read_tests(),
            document=copy.deepcopy(dict(document)),
        )
        self._check_combinations(rule)
        return rule

    def _add_problem(self, place: str, message: str) -> None:
        self.problems.append(make_problem(place, message))

    def _check_keys(self, kind: str | None) -> None:
        allowed = _KEYS if kind is None else (*COMMON_KEYS, *KEYS_OF_KIND[kind])
        keys: list[object] = list(self._document)  # YAML and JSON differ in what a key may be
        for key in keys:
            if key in allowed:
                continue
            place = key if isinstance(key, str) else quote_value(key)
            if key == "window":
                self._add_problem(
                    "window", "a rule has a window or a sequence, not both; leave the window out, within is enough"
                )
            elif key in _KEYS:
                kinds = [name for name, those in KEYS_OF_KIND.items() if key in those]
                self._add_problem(
                    place, f"{key} is for {join_words(kinds)} rules, and this is a {kind} rule; leave it out"
                )
            elif key in _ROW_KEYS:
                self._add_problem(place, f"{key} is kept beside the document, in the rule's row; leave it out here")
            else:
                self._add_problem(place, _describe_unknown_key(key, allowed))

    def _check_combinations(self, rule: Rule) -> None:
        if rule.late == "revise" and rule.kind == SEQUENCE:
            self._add_problem("late", "revise is for lookback rules; a sequence takes evaluate or record")
        elif rule.late == "revise" and rule.reset_on_alert and rule.kind == LOOKBACK:
            self._add_problem(
                "late",
                "revise and reset_on_alert exclude each other, since what an alert has emptied cannot be judged again; "
                "leave one of them out",
            )
        start, end = rule.effective_from, rule.effective_until
        if start is not None and end is not None and end <= start:
            self._add_problem(
                "effective_until",
                f"must be after effective_from, {quote_value(self._document['effective_from'])}, or nothing could trigger, "
                f"got {quote_value(self._document['effective_until'])}",
            )

    def _read_rule_id(self) -> str:
        rule_id = self._document.get("rule_id")
        if isinstance(rule_id, str) and RULE_ID.fullmatch(rule_id):
            return rule_id
        if rule_id is None:
            self._add_problem("rule_id", "is missing; write a name such as 'large-payment'")
            return "?"
        near = re.sub(r"[^a-z0-9._-]+", "-", str(rule_id).lower()).strip("._-")[:100]
        self._add_problem(
            "rule_id",
            "must be 1 to 100 lower-case letters, digits, '.', '_' or '-', beginning with a letter or digit, "
            f"got {quote_value(rule_id)}; write {near or 'large-payment'!r}",
        )
        return str(rule_id)[:100] if rule_id else "?"

    def _read_text(self, key: str, *, required: bool = False) -> str:
        value = self._document.get(key)
        if isinstance(value, str) and (value.strip() or key not in _REMEDIES):
            return value
        if value is None and not required:
            return ""
        if value is None or isinstance(value, str):
            self._add_problem(key, f"is {'missing' if value is None else 'blank'}; {_REMEDIES[key]}")
        else:
            self._add_problem(key, f"must be a text, got {quote_value(value)}; put it in quotes")
        return ""

    def _read_expression(self, key: str, *, required: bool = False) -> str:
        return self._fill(self._read_text(key, required=required), key)

    def _fill(self, text: str, place: str) -> str:
        """Writes the values of parameters into an expression."""
        filled, unknown = self._parameters.fill_expression(text)
        for message in unknown:
            self._add_problem(place, message)
        return filled

    def _read_parameters(self, value: object, place: str) -> Parameters:
        if not isinstance(value, Mapping):
            self._add_problem(place, f"must be a mapping, such as {{limit: 1000}}, got {quote_value(value)}")
            return Parameters()
        values = {}
        for name, each in value.items():
            if not (isinstance(name, str) and NAME.fullmatch(name)):
                self._add_problem(f"{place}.{name}", _describe_bad_name(name))
            elif message := find_wrong_value(each):
                self._add_problem(f"{place}.{name}", message)
            else:
                values[name] = each
        return Parameters(values)

    def _read_choice(self, key: str, choices: tuple[str, ...], default: str) -> str:
        value = self._document.get(key, default)
        if value in choices:
            return str(value)
        self._add_problem(key, _describe_bad_choice(choices, value))
        return default

    def _read_flag(self, key: str, *, default: bool = False) -> bool:
        value = self._document.get(key, default)
        if not isinstance(value, bool):
            self._add_problem(key, f"must be true or false, got {quote_value(value)}")
            return default
        return value

    def _read_group_by(self) -> tuple[str, ...]:
        value = self._document.get("group_by", [])
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            self._add_problem(
                "group_by", f"must be a list of field names, such as [customer_id], got {quote_value(value)}"
            )
            return ()
        names = {name.lower(): name for name in reversed(value)}
        if len(names) < len(value):
            self._add_problem(
                "group_by",
                f"group_by names a field twice (capitals make no difference): {quote_value(value)}; leave one out",
            )
        return tuple(reversed(names.values()))

    def _read_entity(self, group_by: tuple[str, ...]) -> str:
        """Reads the field that the alerts are about: one of group_by, capitals make no difference."""
        entity = self._read_text("entity")
        if not entity:
            return ""
        named = next((name for name in group_by if name.lower() == entity.lower()), None)
        # A group_by that cannot be read has a problem of its own.
        if named is None and (group_by or self._document.get("group_by", []) == []):
            self._add_problem(
                "entity", f"{quote_value(entity)} is not in group_by; name one of its fields, or add it there"
            )
        return named or ""

    def _read_score(self, severity: str) -> int:
        if "score" not in self._document:
            return SCORES[severity]
        value = self._document["score"]
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_SCORE:
            return value
        self._add_problem(
            "score",
            f"must be a whole number from 0 to {MAX_SCORE:,}, got {quote_value(value)}; leave it out for that of the severity, "
            f"{SCORES[severity]}",
        )
        return SCORES[severity]

    def _read_duration(self, value: object, place: str, *, zero: bool = False) -> int:
        if message := self._parameters.find_unknown(value):
            self._add_problem(place, message)
            return 1
        value = self._parameters.fill_value(value)
        try:
            microseconds = parse_duration(value)
        except DurationError as error:
            self._add_problem(place, str(error).replace(repr(value), quote_value(value)))
            return 1
        if microseconds == 0 and not zero:
            self._add_problem(place, f"must be longer than 0 s, got {quote_value(value)}")
            return 1
        return microseconds

    def _check_length(self, span: int, place: str) -> None:
        """Refuses a window that looks back too far: its state would be kept for as long."""
        most = self._limits.window
        if span > most:
            what = f"{format_duration(span)} is longer than {format_duration(most)}; write at most that"
            self._add_problem(place, name_limit(what, "window"))

    def _read_lateness(self) -> int | None:
        value = self._document.get("allowed_lateness")
        return None if value is None else self._read_duration(value, "allowed_lateness", zero=True)

    def _read_window(self, value: object, place: str) -> Window:
        if value is None:
            self._add_problem(place, "is missing; write how far each event looks back, such as 'window: 24 hours'")
            return _UNREADABLE
        if not isinstance(value, Mapping):
            size = self._read_duration(value, place)
            self._check_length(size, place)
            return Lookback(size)
        kinds = [kind for kind in WINDOW_FORMS if kind in value]
        if len(kinds) != 1:
            wanted = "must be of one kind" if kinds else "must name its kind"
            problem = f"{wanted}, got {f'{join_words(kinds)} at once' if kinds else quote_value(dict(value))}"
            self._add_problem(
                place, f"{problem}; write one of {', '.join(f'{{{kind}: 1 hour}}' for kind in WINDOW_FORMS)}"
            )
            return _UNREADABLE
        kind = kinds[0]
        for key in value:
            if key not in WINDOW_FORMS[kind]:
                others = [name for name, keys in WINDOW_FORMS.items() if key in keys]
                self._add_problem(
                    f"{place}.{key}",
                    f"{key} is for {join_words(others)} windows, and this is a {kind} window; leave it out"
                    if others
                    else _describe_unknown_key(key, WINDOW_FORMS[kind]),
                )
        sound = len(self.problems)
        size = self._read_duration(value[kind], f"{place}.{kind}")
        if kind == "lookback":
            delay = self._read_optional_duration(value, "delay", place)
            self._check_length(size + delay, f"{place}.delay" if delay else f"{place}.lookback")
            return Lookback(size, delay, self._read_resolution(value, size, sound, place))
        self._check_length(size, f"{place}.{kind}")
        if kind == "session":
            return Session(size)
        slide = self._read_slide(value, place) or size if kind == "sliding" else size
        if len(self.problems) == sound:
            self._check_overlap(value, size, slide, f"{place}.slide")
        return TiledWindow(size, slide, self._read_optional_duration(value, "offset", place))

    def _read_slide(self, value: Mapping[str, Any], place: str) -> int | None:
        place = f"{place}.slide"
        if "slide" in value:
            return self._read_duration(value["slide"], place)
        self._add_problem(place, "is missing; write how far apart the windows start, such as 'slide: 5 minutes'")
        return None

    def _check_overlap(self, value: Mapping[str, Any], size: int, slide: int, place: str) -> None:
        if slide > size:
            self._add_problem(
                place,
                f"{quote_value(value['slide'])} is larger than the window of {quote_value(value['sliding'])}, so events between "
                "two windows would be in none; write at most the window",
            )
        elif size > MAX_OVERLAP * slide:
            self._add_problem(
                place,
                f"{quote_value(value['slide'])} puts every event into more than {MAX_OVERLAP:,} windows of "
                f"{quote_value(value['sliding'])}; write a longer slide",
            )

    def _read_resolution(self, value: Mapping[str, Any], size: int, sound: int, place: str) -> int:
        """Reads the resolution of a lookback window. sound: the number of problems before the window was read."""
        if "resolution" not in value:
            return 0
        place = f"{place}.resolution"
        resolution = self._read_duration(value["resolution"], place)
        if len(self.problems) == sound and resolution > size:
            self._add_problem(
                place,
                f"{quote_value(value['resolution'])} is larger than the window of {quote_value(value['lookback'])}, so it would say "
                "little of how far back the window goes; write at most the window",
            )
        return resolution

    def _read_optional_duration(self, value: Mapping[str, Any], key: str, place: str) -> int:
        return self._read_duration(value[key], f"{place}.{key}", zero=True) if key in value else 0

    def _read_sequence(self) -> StepSequence:
        value = self._document.get("sequence")
        if not isinstance(value, Mapping):
            self._add_problem("sequence", f"must be a mapping with within and steps, got {quote_value(value)}")
            return StepSequence(1, ())
        for key in value:
            if key not in SEQUENCE_KEYS:
                self._add_problem(f"sequence.{key}", _describe_unknown_key(key, SEQUENCE_KEYS))
        if "within" not in value:
            self._add_problem(
                "sequence.within", "is missing; write the time that the steps have, such as 'within: 10 minutes'"
            )
        within = self._read_duration(value["within"], "sequence.within") if "within" in value else 1
        self._check_length(within, "sequence.within")
        until, expiry = value.get("until"), value.get("expiry", "sliding")
        if until is not None and not (isinstance(until, str) and until.strip()):
            self._add_problem(
                "sequence.until", f"must be a condition, such as \"outcome = 'SUCCESS'\", got {quote_value(until)}"
            )
            until = None
        until = None if until is None else self._fill(until, "sequence.until")
        if expiry not in EXPIRIES:
            self._add_problem("sequence.expiry", _describe_bad_choice(EXPIRIES, expiry))
        return StepSequence(within, self._read_steps(value.get("steps"), within), until, str(expiry))

    def _read_steps(self, value: object, within: int) -> tuple[Step, ...]:
        place = "sequence.steps"
        if not isinstance(value, list) or not value:
            problem = (
                "is missing" if value is None else f"must be a list with at least one step, got {quote_value(value)}"
            )
            self._add_problem(
                place, f"{problem}; write steps such as {{name: failures, where: \"outcome = 'FAIL'\", at_least: 3}}"
            )
            return ()
        most = self._limits.steps
        if len(value) > most:
            self._add_problem(
                place, name_limit(f"{len(value):,} steps are more than {most:,}; split the rule", "steps")
            )
        steps: list[Step] = []
        for at, spec in enumerate(value[:most]):
            step = self._read_step(spec, f"{place}[{at}]", within)
            if step is None:
                continue
            if step.name.lower() in {known.name.lower() for known in steps}:
                self._add_problem(f"{place}[{at}].name", f"{step.name!r} is there twice; give each step its own name")
            if step.absent and at != len(value) - 1:
                self._add_problem(
                    f"{place}[{at}].absent", "only the last step can be absent; move it to the end or leave it out"
                )
            elif step.absent and at == 0:
                self._add_problem(
                    f"{place}[{at}].absent",
                    "nothing begins the wait; write a step before it, such as {name: seen, where: 'true'}",
                )
            steps.append(step)
        return tuple(steps)

    def _read_step(self, spec: object, place: str, within: int) -> Step | None:
        if not isinstance(spec, Mapping):
            self._add_problem(place, f"must be a mapping with name and where, got {quote_value(spec)}")
            return None
        absent = "absent" in spec
        keys = ABSENT_KEYS if absent else STEP_KEYS
        for key in spec:
            if key not in keys:
                self._add_problem(
                    f"{place}.{key}", _KEYS_OF_OTHER_STEPS.get((absent, key)) or _describe_unknown_key(key, keys)
                )
        name, key = spec.get("name"), "absent" if absent else "where"
        if not (isinstance(name, str) and NAME.fullmatch(name)):
            self._add_problem(
                f"{place}.name",
                _describe_bad_name(name) if "name" in spec else "is missing; write one, such as 'failures'",
            )
            return None
        condition = spec.get(key)
        if not (isinstance(condition, str) and condition.strip()):
            problem = f"must be a condition, got {quote_value(condition)}" if key in spec else "is missing"
            self._add_problem(
                f"{place}.{key}", f"{problem}; write which events the step takes, such as \"outcome = 'FAIL'\""
            )
            condition = ""
        condition = self._fill(condition, f"{place}.{key}")
        if absent:
            return Step(name, condition, absent=True, within=self._read_wait(spec, place, within))
        least = self._read_number(spec.get("at_least", 1), f"{place}.at_least", 1, "1")
        most = None
        if "at_most" in spec:
            most = self._read_number(spec["at_most"], f"{place}.at_most", least, f"{least} (at_least)")
        return Step(name, condition, least, most)

    def _read_wait(self, spec: Mapping[str, Any], place: str, within: int) -> int:
        if "within" not in spec:
            return within
        wait = self._read_duration(spec["within"], f"{place}.within")
        self._check_length(wait, f"{place}.within")
        return wait

    def _read_number(self, value: object, place: str, least: int, words: str) -> int:
        if message := self._parameters.find_unknown(value):
            self._add_problem(place, message)
            return least
        value = self._parameters.fill_value(value)
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= MAX_EVENTS:
            return value
        self._add_problem(place, f"must be a whole number from {words} to {MAX_EVENTS:,}, got {quote_value(value)}")
        return least

    def _read_measures(self, window: Window) -> tuple[Measure, ...]:
        value = self._document.get("measures")
        if not isinstance(value, Mapping) or not value:
            problem = "is missing" if value is None else f"must be a mapping, got {quote_value(value)}"
            self._add_problem("measures", f"{problem}; write at least one name and aggregate, such as 'n: count(*)'")
            return ()
        most = self._limits.measures
        if len(value) > most:
            self._add_problem(
                "measures", name_limit(f"{len(value):,} measures are more than {most:,}; split the rule", "measures")
            )
        measures, names = [], set()
        for name, spec in list(value.items())[:most]:
            place = f"measures.{name}"
            if not (isinstance(name, str) and NAME.fullmatch(name)):
                self._add_problem(place, _describe_bad_name(name))
                continue
            if name.lower() in names:
                self._add_problem(
                    place, f"{name!r} is there twice (capitals make no difference); give each measure its own name"
                )
                continue
            names.add(name.lower())
            measures.append(self._read_measure(name, spec, window, place))
        return tuple(measures)

    def _read_measure(self, name: str, spec: object, window: Window, place: str) -> Measure:
        text = spec.get("measure") if isinstance(spec, Mapping) else spec
        if not (isinstance(text, str) and text.strip()):
            self._add_problem(
                place,
                f"must be an aggregate, such as count(*), or {{measure: ..., window: ...}}, got {quote_value(spec)}",
            )
            return Measure(name, "", window)
        text = self._fill(text, place)
        if not isinstance(spec, Mapping):
            return Measure(name, text, window)
        for key in spec:
            if key not in MEASURE_KEYS:
                self._add_problem(f"{place}.{key}", _describe_unknown_key(key, MEASURE_KEYS))
        if "window" not in spec:
            return Measure(name, text, window)
        own = self._read_window(spec["window"], f"{place}.window")
        if not isinstance(own, Lookback) or not isinstance(window, Lookback):
            self._add_problem(
                f"{place}.window",
                f"only measures of a lookback rule have windows of their own, and those look back too; "
                f"leave out this {own.kind} window in a {window.kind} rule",
            )
        return Measure(name, text, own)

    def _read_time(self, key: str) -> int | None:
        value = self._document.get(key)
        if value is None:
            return None
        try:
            return parse_calendar_time(value)
        except ValueError:
            self._add_problem(key, f"must be a time such as '2026-01-31T12:00:00Z', got {quote_value(value)}")
            return None

    def _read_tests(self) -> tuple[Mapping[str, Any], ...]:
        value = self._document.get("tests", [])
        if not isinstance(value, list):
            self._add_problem(
                "tests", f"must be a list of mappings with name, events and alerts, got {quote_value(value)}"
            )
            return ()
        for at, test in enumerate(value):
            place = f"tests[{at}]"
            if not isinstance(test, Mapping):
                self._add_problem(place, f"must be a mapping with name, events and alerts, got {quote_value(test)}")
                continue
            for key in test:
                if key not in TEST_KEYS:
                    self._add_problem(f"{place}.{key}", _describe_unknown_key(key, TEST_KEYS))
            if "parameters" in test:
                self._check_test_parameters(test["parameters"], f"{place}.parameters")
            if "lists" in test:
                _, problems = read_contents(test["lists"], f"{place}.lists")
                for found in problems:
                    self._add_problem(found.place, found.message)
            for key, example in (("events", "{event_id: 1, amount: 100}"), ("alerts", "{event_id: 1}")):
                items = test.get(key)
                if items is None and key == "alerts":
                    continue
                if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
                    problem = "is missing; write" if items is None else "must be"
                    got = "" if items is None else f", got {quote_value(items)}"
                    self._add_problem(f"{place}.{key}", f"{problem} a list of mappings, such as [{example}]{got}")
        return tuple(test for test in value if isinstance(test, Mapping))

    def _check_test_parameters(self, value: object, place: str) -> None:
        for name in self._read_parameters(value, place).values:
            if name not in self._parameters.values:
                self._add_problem(f"{place}.{name}", self._parameters.describe_missing(name))


# Words that people try for a key, and the key. A step has a `where` instead of a `when`.
_SYNONYMS = {
    "condition": "when", "conditions": "when", "having": "when", "alert_when": "when", "if": "when", "filter": "where",
    "aggregates": "measures", "aggregations": "measures", "metrics": "measures", "key": "group_by", "keys": "group_by",
    "partition_by": "group_by", "id": "rule_id", "priority": "severity", "text": "message", "throttle": "suppress",
}  # fmt: skip


def _describe_unknown_key(key: object, known: tuple[str, ...]) -> str:
    hint = suggest(key, known)
    if isinstance(key, str) and (meant := _SYNONYMS.get(key.lower())):
        words = [word for word in (meant, "where" if meant == "when" else "") if word in known]
        hint = f"did you mean {words[0]!r}?" if words else hint
    return f"unknown key {quote_value(key)}; {hint}"


def _describe_bad_choice(choices: tuple[str, ...], value: object) -> str:
    hint = suggest(value, choices, "")
    return f"must be one of {', '.join(choices)}, got {quote_value(value)}" + (f"; {hint}" if hint else "")


def _describe_bad_name(value: object) -> str:
    return f"{quote_value(value)} is not a name; use letters, digits and _, no digit first, at most 128 in all"


# (step is absent, key) -> why the step cannot have the key.
_KEYS_OF_OTHER_STEPS = {
    (True, "where"): "a step has where or absent, not both; leave one of them out",
    (True, "at_least"): "at_least is for steps that take events, and this is one of absence; leave it out",
    (True, "at_most"): "at_most is for steps that take events, and this is one of absence; leave it out",
    (False, "within"): "within is for a last step with absent; leave it out, the steps have the sequence's within",
}
# The remedy for a text that must not be blank.
_REMEDIES = {
    "stream": "name the stream whose events the rule judges",
    "entity": "name a field of group_by, such as customer_id, or leave it out",
    "where": "write which events the rule sees, such as \"payment_type = 'CSH'\", or leave it out for all",
    "when": "write the condition that raises the alert, such as 'n >= 10'",
}
# Columns of the rules table, which are not keys of a document.
_ROW_KEYS = ("version", "status", "author", "comment")
# Stands in for a window whose kind cannot be read.
_UNREADABLE = Lookback(0)

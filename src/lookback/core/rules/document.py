"""Reads a rule from the document that its author wrote, and finds every problem that shows without its stream.

`compiled.compile_rule` checks the rest: fields, types and expressions.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from lookback.core.errors import Problem, RuleError
from lookback.core.rules import descriptions, forms, kinds, sequenceforms
from lookback.core.rules.forms import INHERITED, Measure
from lookback.core.rules.keys import KEY, KeyEntry
from lookback.core.rules.kinds import WAIT, Kind, Reading, choice, expression, key, list_keys, read_form, settle
from lookback.core.rules.parameters import Parameters
from lookback.core.rules.problems import describe_unknown_key, limit_problems, make_problem, quote_value
from lookback.core.values.limits import DEFAULT_LIMITS, MAX_NESTING, WIDEST_LIMITS, Limits, is_too_deep, name_limit
from lookback.core.values.reading import Refused
from lookback.core.values.texts import join_words
from lookback.core.values.windows import EVENT, LOOKBACK, SEQUENCE, Lookback, Moment

WINDOW_FORMS, MEASURE_KEYS, TEST_KEYS = forms.WINDOW_FORMS, forms.MEASURE_KEYS, forms.TEST_KEYS
SEQUENCE_KEYS, STEP_KEYS, ABSENT_KEYS = sequenceforms.SEQUENCE_KEYS, sequenceforms.STEP_KEYS, sequenceforms.ABSENT_KEYS
RULE_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}", re.ASCII)
# From the least grave on. The alerts of an `info` rule are reports, unless it says `queue: true`.
INFO = "info"
SEVERITIES = (INFO, "low", "medium", "high", "critical")
# What an alert adds to the risk of its entity where the document has no `score`: ten low ones weigh as much as a
# critical one.
SCORES = {INFO: 0, "low": 10, "medium": 25, "high": 50, "critical": 100}
MAX_SCORE = 1_000_000
MAX_ENTITIES = 8
LATE_POLICIES = ("evaluate", "record", "revise")
STATUSES = ("draft", "shadow", "active", "paused", "retired", "quarantined")
# Parts of a document, an aliased one counted at each use: aliases of YAML can make a small text endless.
MAX_PARTS = 100_000
_WINDOW_KEYS = ("window", "measures", "when", "early")
# The keys that not all kinds of rules have.
KEYS_OF_KIND = {
    "event": ("when", "late"),
    "lookback": ("window", "measures", "when", "late", "reset_on_alert"),
    "tumbling": _WINDOW_KEYS,
    "sliding": _WINDOW_KEYS,
    "session": _WINDOW_KEYS,
    "sequence": ("sequence", "late", "reset_on_alert"),
}
# Columns of the rules table, which are not keys of a document.
_ROW_KEYS = ("version", "status", "author", "comment")
_STREAM = "name the stream whose events the rule judges"
_RUNBOOK = "write what to do about an alert, or the URL of a page that says so; or leave it out"
_ENTITY = "name a field of the event or of group_by, such as customer_id, or leave it out"
_WHERE = "write which events the rule sees, such as \"payment_type = 'CSH'\", or leave it out for all"
_WHEN = "write the condition that raises the alert, such as 'n >= 10'"
_NO_CONDITION = (
    "is missing: a rule without a window judges each event by itself, and needs a condition; write one such as "
    "'amount >= 10000' here or as `where`, or give the rule a window and measures"
)
_SURROGATE = re.compile("[\ud800-\udfff]")
# Stands in for a window that cannot be read.
_UNREADABLE = Lookback(0)


def _read_rule_id(value: Any, _: Reading) -> str:
    if isinstance(value, str) and RULE_ID.fullmatch(value):
        return value
    near = re.sub(r"[^a-z0-9._-]+", "-", str(value).lower()).strip("._-")[:100]
    message = (
        "must be 1 to 100 lower-case letters, digits, '.', '_' or '-', beginning with a letter or digit, "
        f"got {quote_value(value)}; write {near or 'large-payment'!r}"
    )
    return settle(str(value)[:100] if value else "?", [Problem("", message)])


def _read_entities(value: Any, _: Reading) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"must be a list of field names, such as [customer_id], got {quote_value(value)}")
    names = tuple(reversed({name.lower(): name for name in reversed(value)}.values()))
    if len(names) < len(value):
        message = f"entities names a field twice (capitals make no difference): {quote_value(value)}; leave one out"
        return settle(names, [Problem("", message)])
    if len(names) <= MAX_ENTITIES:
        return names
    message = f"names {len(names):,} fields, and an alert is about at most {MAX_ENTITIES}; leave some out"
    return settle((), [Problem("", message)])


def _read_score(value: Any, reading: Reading) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_SCORE:
        return value
    remedy = f"leave it out for that of the severity, {reading.score}"
    message = f"must be a whole number from 0 to {MAX_SCORE:,}, got {quote_value(value)}; {remedy}"
    return settle(reading.score, [Problem("", message)])


def _read_message(value: Any, reading: Reading) -> str:
    return reading.parameters.fill_message(kinds.read_text(value, reading))


def _read_lateness(value: Any, reading: Reading) -> int | None:
    return None if value is None else WAIT.read(value, reading)


_RuleId = Kind(
    _read_rule_id,
    {
        "type": "string",
        "pattern": f"^{RULE_ID.pattern}$",
        "patternErrorMessage": "use lower-case letters, digits, '.', '_' or '-', such as {}",
    },
)
_Entities = Kind(
    _read_entities, {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "maxItems": MAX_ENTITIES}
)
_Score = Kind(_read_score, {"type": "integer", "minimum": 0, "maximum": MAX_SCORE})
_Lateness = replace(WAIT, read=_read_lateness)
_Message = Kind(_read_message, {"type": "string"})


@dataclass(frozen=True)
class Rule:
    """A rule read from a document that is consistent in itself.

    Times and durations are in microseconds. It has a `window` with measures, or a `sequence`, or neither: then it is an event
    rule, whose window is a `Moment`. Triggers lie in [effective_from, effective_until). The values of parameters are written into the other attributes. An empty `entity` or
    `when` and a lateness of None stand for the default. Editors show the following lines.

    rule_id: The rule's name: 1 to 100 lower-case letters, digits, '.', '_' or '-', beginning with a letter or digit. Alerts
        and versions go by it; it never changes.
    description: What the rule looks for, for those who review its alerts.
    tags: Words by which people find the rule and its alerts, such as the MITRE ATT&CK techniques that it detects. Without
        blanks, at most 100 characters each; capitals make no difference. Each alert has those of its version. Default:
        none.
    references: URLs of what the rule is based on. Default: none.
    runbook: What to do about an alert: a text or a URL. Default: none.
    source: Where the rule comes from, if it was written elsewhere. Default: here.
    parameters: Values by name, which the rule's expressions, durations, at_least, at_most and message take as :name. Each
        can be changed by itself, with `lookback rules set`. Default: none.
    stream: The stream whose events the rule judges: a name from conf/streams.
    severity: How grave an alert is; reviewers see the gravest first, and info only among reports. Default: medium.
    group_by: The fields that make the key: events with equal values are looked at together. An entry may also give a name
        to an expression over the event. Order does not matter, NULL is a value. Default: [], one key for all events.
    entity: Whom the alerts are about, if that is one field: `entity: x` means `entities: [x]`. Default: none.
    entities: Whom the alerts are about: at most 8 fields of group_by or, unless the rule has a tumbling, sliding or session
        window, of the event. Rules over the stream `alerts` add up the scores of each entity. Default: none.
    score: What an alert adds to the risk of its entity. Default: by severity, info 0, low 10, medium 25, high 50, critical
        100.
    queue: Whether alerts wait for a person in the queue. If false they are reports, such as totals, and have a view of their
        own. Default: true, and false if the severity is info.
    where: Which events the rule sees; it may name the event's fields. Default: all events.
    effective_from: What lies before this time triggers nothing, though it counts in windows (an event's time, a window's
        end, an absence's due). Default: no limit.
    effective_until: What lies at or after this time triggers nothing; later than effective_from. Default: no limit.
    allowed_lateness: How far behind the watermark an event may be and still be taken by this rule. At most the stream's,
        which is the default.
    suppress: After an alert, later ones of the same rule and key up to this much event time on get the verdict suppressed.
        Default: every alert is raised.
    warm_start: Whether the rule comes into force with the events of before in its windows. If false, its windows fill from
        then on. Default: true.
    message: The alert's text. Names in braces are filled in: fields, measures and window_complete; in a sequence also
        {step.count} and {step.field}. So are parameters, as :name. Default: empty.
    tests: The rule's own examples; `lookback rules check` and the test suite run them. Default: none.
    window: What is looked at together: of lookback rules, for each event, the time up to it ('24 hours', both ends
        included); or tumbling, sliding or session windows, which give a result when they end. Instead of a window a rule
        may have a sequence. A rule with neither judges each event by itself.
    measures: Aggregates over the window, by name; at least one, at most 50. count(*), count(x), count(distinct x), sum, avg,
        min, max, stddev_samp, first, last, each with an optional filter (where ...). Names of the stream's fields cannot be
        used.
    when: The condition that raises the alert; NULL raises none. It may name measures, window_complete, the fields in
        group_by, and of lookback rules all fields of the event. Without it every tumbling, sliding or session window gives a
        result; lookback rules need it. An event rule has where, when or both, and both must hold.
    early: Whether windows give a result after each event too, before they end. Default: false.
    late: What becomes of an event behind the watermark, within the allowed lateness. evaluate: it is judged at its own time
        over what has arrived. record: it is not judged, but counts in later windows. revise (lookback rules): events that
        it concerns are judged again as well. Default: evaluate.
    reset_on_alert: Whether an alert empties what this rule has gathered for the key, for events that arrive later. Not with
        late: revise. Default: false.
    sequence: Steps that have to follow one another; instead of a window, measures and when.
    """

    rule_id: Annotated[str, _RuleId] = key("?", "large-payment", missing="write a name such as 'large-payment'")
    description: kinds.Text = key("", "Much money to one beneficiary within a day")
    tags: descriptions.Tags = key((), ["attack.t1110"], ["typology.structuring"], default=[])
    references: descriptions.References = key((), ["https://attack.mitre.org/techniques/T1110/"], default=[])
    runbook: Annotated[str, kinds.visible_text(_RUNBOOK)] = key("", "Call the customer before the next payment leaves")
    source: descriptions.Source = key(descriptions.SourceForm(), {"format": "sigma", "license": "DRL-1.1"})
    parameters: forms.ParameterValues = key(dict, {"limit": 1000, "span": "24 hours"})
    stream: Annotated[str, kinds.visible_text(_STREAM)] = key("", "payments", missing=_STREAM)
    severity: Annotated[str, choice(SEVERITIES)] = key("medium", default="medium")
    group_by: Annotated[tuple[KeyEntry, ...], KEY] = key(
        (), ["customer_id"], ["customer_id", {"domain": "lower(split_part(email, '@', 2))"}], default=[]
    )
    entity: Annotated[str, kinds.visible_text(_ENTITY)] = key("", "customer_id")
    entities: Annotated[tuple[str, ...], _Entities] = key((), ["customer_id", "terminal_id"], default=[])
    score: Annotated[int, _Score] = key(SCORES["medium"], 25)
    queue: kinds.Flag = key(True, False)
    where: Annotated[str | None, expression(_WHERE)] = key(None, "payment_type = 'CSH'")
    effective_from: kinds.Time = key(None, "2026-01-31T12:00:00Z")
    effective_until: kinds.Time = key(None, "2026-12-31T00:00:00Z")
    allowed_lateness: Annotated[int | None, _Lateness] = key(None, "1 hour")
    suppress: Annotated[int | None, kinds.SPAN] = key(None, "1 hour")
    warm_start: kinds.Flag = key(True, default=True)
    message: Annotated[str, _Message] = key("", "{total} to {beneficiary_id} in a day", default="")
    tests: forms.AnyTests = key(())
    window: forms.AnyWindow = key(
        None,
        "24 hours",
        {"lookback": "30 days", "delay": "1 day"},
        {"tumbling": "5 minutes"},
        missing="write how far each event looks back, such as 'window: 24 hours'",
    )
    measures: Annotated[tuple[Measure, ...], forms.MEASURES] = key(
        (), {"total": "sum(amount)", "large": "count(*) filter (where amount > 1000)"}, missing=forms.SOME_MEASURE
    )
    when: Annotated[str, expression(_WHEN)] = key("", "total >= 10000 and large >= 3")
    early: kinds.Flag = key(False, default=False)
    late: Annotated[str, choice(LATE_POLICIES)] = key("evaluate", default="evaluate")
    reset_on_alert: kinds.Flag = key(False, default=False)
    sequence: sequenceforms.AnySequence = key(None)
    document: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def kind(self) -> str:
        """The rule's kind: event, lookback, tumbling, sliding, session or sequence."""
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


_KEYS = list_keys(Rule)
# Each kind of rule has them.
COMMON_KEYS = tuple(name for name in _KEYS if not any(name in keys for keys in KEYS_OF_KIND.values()))


def read_rule(document: object, limits: Limits = DEFAULT_LIMITS) -> tuple[Rule, list[Problem]]:
    """Reads as much of a rule as it can, and returns it with every problem that shows without the stream."""
    if unreadable := _find_unreadable(document):
        return Rule(), [make_problem(*unreadable)]
    assert isinstance(document, Mapping)
    try:
        parameters = Parameters(forms.read_parameters(document.get("parameters", {})))
    except Refused as error:
        parameters = Parameters(error.partial)
    severity, window = document.get("severity"), document.get("window")
    severity = severity if isinstance(severity, str) and severity in SEVERITIES else "medium"
    kind = find_kind(document)
    keys = () if kind is None else (*COMMON_KEYS, *KEYS_OF_KIND[kind])
    given = {"score": SCORES[severity], "queue": severity != INFO, **document}
    reading = Reading(parameters, limits, SCORES[severity])
    rule, problems = read_form(Rule, given, reading, keys, functools.partial(_explain_key, kind))
    # First what decides about the other keys.
    problems.sort(key=lambda each: each.place.split(".")[0] not in ("parameters", "window", "sequence"))
    # A rule with measures but without a window counts as a lookback rule.
    if document.get("when") is None and (kind == LOOKBACK or (kind is None and window is None)):
        problems.append(Problem("when", f"is missing; {_WHEN}"))
    elif kind == EVENT and document.get("when") is None and document.get("where") is None:
        problems.append(Problem("when", _NO_CONDITION))
    if kind == EVENT:
        rule = replace(rule, window=Moment())
    rule, contradictions = _combine(rule, document)
    return rule, [make_problem(each.place, each.message) for each in (*problems, *contradictions)]


def find_kind(document: Mapping[str, Any]) -> str | None:
    """Finds the kind of rule that a document describes; None if its window does not say, or is missing beside measures."""
    window = document.get("window")
    if "sequence" in document:
        return SEQUENCE
    if window is not None:
        return forms.find_window_kind(window) if isinstance(window, Mapping) else LOOKBACK
    return EVENT if document.get("measures") is None else None


def _explain_key(kind: str | None, name: Any) -> str | None:
    """Explains why a rule of a kind cannot have a key; None for a key that no rule has."""
    of_kinds = [each for each, keys in KEYS_OF_KIND.items() if name in keys]
    if name == "window":
        return "a rule has a window or a sequence, not both; leave the window out, within is enough"
    if of_kinds:
        this = "an event rule" if kind == EVENT else f"a {kind} rule"
        return f"{name} is for {join_words(of_kinds)} rules, and this is {this}; leave it out"
    if name in _ROW_KEYS:
        return f"{name} is kept beside the document, in the rule's row; leave it out here"
    # A misspelt `window` makes a rule look like an event rule, so all keys are suggested.
    return describe_unknown_key(name, _KEYS) if kind == EVENT else None


def _combine(rule: Rule, document: Mapping[str, Any]) -> tuple[Rule, list[Problem]]:
    """Settles what depends on several keys, and finds keys that contradict each other."""
    problems = []
    window = rule.window or _UNREADABLE
    measures = [replace(each, window=window) if each.window is INHERITED else each for each in rule.measures]
    for each in measures:
        if each.window is not window and not (isinstance(each.window, Lookback) and isinstance(window, Lookback)):
            message = (
                "only measures of a lookback rule have windows of their own, and those look back too; "
                f"leave out this {each.window.kind} window in a {window.kind} rule"
            )
            problems.append(Problem(f"measures.{each.name}.window", message))
    if "entity" in document and "entities" in document:
        problems.append(Problem("entity", "`entity: x` means `entities: [x]`; leave it out and write all in entities"))
    if rule.late == "revise" and ("sequence" in document or window.kind == EVENT):
        this = "an event rule" if window.kind == EVENT else "a sequence"
        problems.append(Problem("late", f"revise is for lookback rules; {this} takes evaluate or record"))
    elif rule.late == "revise" and rule.reset_on_alert and isinstance(window, Lookback):
        message = "since what an alert has emptied cannot be judged again; leave one of them out"
        problems.append(Problem("late", f"revise and reset_on_alert exclude each other, {message}"))
    start, end = rule.effective_from, rule.effective_until
    if start is not None and end is not None and end <= start:
        message = (
            f"must be after effective_from, {quote_value(document['effective_from'])}, or nothing could trigger, "
            f"got {quote_value(document['effective_until'])}"
        )
        problems.append(Problem("effective_until", message))
    settled = replace(
        rule,
        window=None if "sequence" in document else window,
        measures=tuple(measures),
        entities=(rule.entity,) if rule.entity else rule.entities,
        where=rule.where or None,
        document=copy.deepcopy(dict(document)),
    )
    return settled, problems


def _find_unreadable(document: object) -> tuple[str, str] | None:
    """Finds why a document cannot be read at all: a place and a message."""
    if not isinstance(document, Mapping) or not document:
        wanted = "write at least the keys rule_id, stream and when"
        return "", f"a rule is a mapping; {wanted}, got {quote_value(document)}"
    if is_too_deep(document):
        remedy = "leave out what does not belong to a rule"
        return "", f"the document is nested deeper than {MAX_NESTING} levels; {remedy}"
    for count, (place, part) in enumerate(_list_parts(document, "")):
        if count == MAX_PARTS:
            return "", f"the document has more than {MAX_PARTS:,} parts; split the rule, or write fewer aliases"
        texts = [part] if isinstance(part, str) else part if isinstance(part, Mapping) else ()
        if any(isinstance(text, str) and _SURROGATE.search(text) for text in texts):
            message = "holds half of a surrogate pair (\\ud800 to \\udfff); write the character itself"
            return place or "document", message
    return None


def _list_parts(part: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Lists the parts of a document with their places; an aliased one at each use."""
    yield place, part
    if isinstance(part, Mapping):
        for name, each in part.items():
            yield from _list_parts(each, f"{place}.{name}" if place else str(name))
    elif isinstance(part, (list, tuple)):
        for at, each in enumerate(part):
            yield from _list_parts(each, f"{place}[{at}]")


def read_document(text: object, limits: Limits = WIDEST_LIMITS) -> dict[str, Any]:
    """Parses a document from the JSON that the rules table holds. Raises RuleError if it is too large or not a JSON object.

    limits: those of its stream, if the stream is known.
    """
    document = None
    if not isinstance(text, str):
        message = "is empty; it must hold the rule as JSON"
    elif len(text) > limits.document_bytes or len(text.encode("utf-8", "surrogatepass")) > limits.document_bytes:
        message = describe_size_limit(limits)
    else:
        try:
            document = json.loads(text, object_pairs_hook=_refuse_repeated_keys)
            message = f"must be a JSON object with rule_id, stream ..., got {quote_value(document)}"
        except _RepeatedKeyError as error:
            message = str(error)
        except (ValueError, RecursionError) as error:
            reason = "a number in it has too many digits"
            if isinstance(error, RecursionError):
                reason = "it is nested too deeply"
            elif isinstance(error, json.JSONDecodeError):
                reason = str(error)
            message = f"is not JSON: {reason}; write it with `lookback rules push`"
    if not isinstance(document, dict):
        raise RuleError("?", [make_problem("document", message)])
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


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for name, value in pairs:
        if name in mapping:
            raise _RepeatedKeyError(f"gives the key {quote_value(name)} twice in one object; leave one of them out")
        mapping[name] = value
    return mapping


def describe_size_limit(limits: Limits) -> str:
    """Returns the message for a document with more bytes than the limit."""
    problem = f"is longer than {limits.document_bytes:,} bytes; make the rule smaller, or give it fewer tests"
    return name_limit(problem, "document_bytes")

"""The mappings within a rule document: windows, measures, the steps of a sequence, and the rule's own tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from lookback.core.errors import Problem
from lookback.core.rules import kinds
from lookback.core.rules.kinds import NAMES, SPAN, Kind, Reading, key, list_keys, make_schema, read_form, settle
from lookback.core.rules.parameters import Value, find_wrong_value
from lookback.core.rules.problems import quote_value
from lookback.core.values.contents import read_contents
from lookback.core.values.limits import DEFAULT_LIMITS, name_limit
from lookback.core.values.listchanges import CIDR
from lookback.core.values.reading import Refused, put_below
from lookback.core.values.texts import join_words
from lookback.core.values.windows import (
    LOOKBACK,
    SESSION,
    SLIDING,
    Lookback,
    Session,
    Step,
    StepSequence,
    TiledWindow,
    Window,
)

EXPIRIES = ("sliding", "fixed")
TAKES = ("all", "once")
# How many events the steps of a sequence with take: once may need together; as many as the evidence of an alert has.
MAX_STAGES = 100
# Windows that one event lies in.
MAX_OVERLAP = 1_000
_SIZE = "write a duration, such as '24 hours'"

# Parameters -----------------------------------------------------------------------------------------------------------


def read_parameters(value: Any, _: object = None) -> dict[str, Value]:
    """Reads the values of parameters by name. Raises Refused, with the right ones, if some are wrong."""
    if not isinstance(value, Mapping):
        raise Refused([Problem("", f"must be a mapping, such as {{limit: 1000}}, got {quote_value(value)}")], {})
    values, problems = {}, []
    for name, each in value.items():
        if message := kinds.check_name(name) or find_wrong_value(each):
            problems.append(Problem(str(name), message))
        else:
            values[name] = each
    return settle(values, problems)


def _read_test_parameters(value: Any, reading: Reading) -> dict[str, Value]:
    values, known = read_parameters(value), reading.parameters
    unknown = [Problem(name, known.describe_missing(name)) for name in values if name not in known.values]
    return settle(values, unknown)


_VALUES = {"type": "object", "propertyNames": NAMES, "additionalProperties": {"type": ["number", "string", "boolean"]}}
ParameterValues = Annotated[Mapping[str, Value], Kind(read_parameters, _VALUES)]


# Windows --------------------------------------------------------------------------------------------------------------


WINDOW_FORMS = {
    "lookback": ("lookback", "delay", "resolution"),
    "tumbling": ("tumbling", "offset"),
    "sliding": ("sliding", "slide", "offset"),
    "session": ("session",),
}


@dataclass(frozen=True)
class WindowForm:
    """A window of one of the four kinds.

    lookback: How far each event looks back.
    delay: The window ends this long before the event, which it then leaves out. Default: 0 seconds.
    resolution: The window begins at the multiple of this at or before its exact start, and state is kept per key and this
        long instead of per event. At most the window; for count, sum, avg, stddev_samp. Default: exact.
    tumbling: Windows of this size, side by side, counted from 1970.
    sliding: Windows of this size that overlap.
    slide: How far apart the windows start: at most their size, at least a 1,000th of it.
    offset: Windows start this long after full multiples of the slide. Default: 0 seconds.
    session: Events this far apart or less belong to one window.
    """

    lookback: kinds.Span = key(1, "24 hours", missing=_SIZE)
    delay: kinds.Wait = key(0, "7 days", default="0 seconds")
    resolution: kinds.Span = key(0, "1 hour", "1 minute")
    tumbling: kinds.Span = key(1, "5 minutes", missing=_SIZE)
    sliding: kinds.Span = key(1, "1 hour", missing=_SIZE)
    slide: kinds.Span = key(1, "5 minutes", missing="write how far apart the windows start, such as 'slide: 5 minutes'")
    offset: kinds.Wait = key(0, "1 minute", default="0 seconds")
    session: kinds.Span = key(1, "30 minutes", missing=_SIZE)


def find_window_kind(value: Mapping[Any, Any]) -> str | None:
    """Returns the kind of window that a mapping names; None unless it names just one."""
    named = [kind for kind in WINDOW_FORMS if kind in value]
    return named[0] if len(named) == 1 else None


def _read_window(value: Any, reading: Reading) -> Window:
    if not isinstance(value, Mapping):
        size = SPAN.read(value, reading)
        return settle(Lookback(size), kinds.find_long_span(size, reading.limits))
    kind = find_window_kind(value)
    if kind is None:
        named = [each for each in WINDOW_FORMS if each in value]
        wanted = "must be of one kind" if named else "must name its kind"
        got = f"{join_words(named)} at once" if named else quote_value(dict(value))
        raise ValueError(
            f"{wanted}, got {got}; write one of {', '.join(f'{{{each}: 1 hour}}' for each in WINDOW_FORMS)}"
        )

    def explain(name: Any) -> str | None:
        others = [each for each, keys in WINDOW_FORMS.items() if name in keys]
        this = f"this is a {kind} window; leave it out"
        return f"{name} is for {join_words(others)} windows, and {this}" if others else None

    form, problems = read_form(WindowForm, value, reading, WINDOW_FORMS[kind], explain)
    size = getattr(form, kind)
    problems += kinds.find_long_span(size + form.delay, reading.limits, "delay" if form.delay else kind)
    problems = problems or [Problem(*found) for found in _compare_spans(form, value)]
    if kind == LOOKBACK:
        return settle(Lookback(size, form.delay, form.resolution), problems)
    slide = form.slide if kind == SLIDING else size
    return settle(Session(size) if kind == SESSION else TiledWindow(size, slide, form.offset), problems)


def _compare_spans(form: WindowForm, value: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Finds the key that does not fit the size of its window, and says why."""
    resolution, slide, size = (quote_value(value.get(each)) for each in ("resolution", "slide", "sliding"))
    if form.resolution > form.lookback:
        size = quote_value(value["lookback"])
        why = "so it would say little of how far back the window goes; write at most the window"
        yield "resolution", f"{resolution} is larger than the window of {size}, {why}"
    if form.slide > form.sliding:
        why = "so events between two windows would be in none; write at most the window"
        yield "slide", f"{slide} is larger than the window of {size}, {why}"
    if form.sliding > MAX_OVERLAP * form.slide:
        yield (
            "slide",
            f"{slide} puts every event into more than {MAX_OVERLAP:,} windows of {size}; write a longer slide",
        )


_LOOKBACK_TEXT = {
    **SPAN.schema,
    "description": f"How far each event looks back, itself included. {SPAN.about}",
    "patternErrorMessage": SPAN.schema["patternErrorMessage"].format("24 hours"),
    "examples": ["24 hours", "10 minutes"],
}
_WINDOW = {
    "oneOf": [
        _LOOKBACK_TEXT,
        *(make_schema(WindowForm, keys, f"A {kind} window.") for kind, keys in WINDOW_FORMS.items()),
    ]
}
AnyWindow = Annotated[Window | None, Kind(_read_window, _WINDOW)]
OwnWindow = Annotated[Window | None, Kind(_read_window, {"oneOf": _WINDOW["oneOf"][:2]})]


# Measures -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeasureForm:
    """An aggregate with a window of its own, in lookback rules.

    measure: One aggregate.
    window: A window of its own, which looks back too. Default: the rule's.
    """

    measure: Annotated[str, kinds.expression("")] = key(
        "", "sum(amount)", "count(*) filter (where amount > 1000)", missing="write one"
    )
    window: OwnWindow = key(None, "30 days", {"lookback": "30 days", "delay": "1 day"})


@dataclass(frozen=True)
class Measure:
    """A named aggregate, such as `sum(amount) filter (where amount > 0)`, over the rule's window or a look-back of its own."""

    name: str
    text: str
    window: Window


def _read_measures(value: Any, reading: Reading) -> tuple[Measure, ...]:
    if not isinstance(value, Mapping) or not value:
        raise ValueError(f"must be a mapping, got {quote_value(value)}; {SOME_MEASURE}")
    most, measures, problems = reading.limits.measures, dict[str, Measure](), []
    if len(value) > most:
        message = f"{len(value):,} measures are more than {most:,}; split the rule"
        problems.append(Problem("", name_limit(message, "measures")))
    for name, spec in list(value.items())[:most]:
        if bad_name := kinds.check_name(name):
            problems.append(Problem(str(name), bad_name))
        elif name.lower() in measures:
            message = f"{name!r} is there twice (capitals make no difference); give each measure its own name"
            problems.append(Problem(name, message))
        else:
            form, found = _read_measure(spec, reading)
            measures[name.lower()] = Measure(name, form.measure, form.window or INHERITED)
            problems += [put_below(name, each) for each in found]
    return settle(tuple(measures.values()), problems)


def _read_measure(spec: Any, reading: Reading) -> tuple[MeasureForm, list[Problem]]:
    parts = spec if isinstance(spec, Mapping) else {"measure": spec}
    if kinds.is_blank(parts.get("measure")):
        message = f"must be an aggregate, such as count(*), or {{measure: ..., window: ...}}, got {quote_value(spec)}"
        return MeasureForm(), [Problem("", message)]
    form, problems = read_form(MeasureForm, parts, reading)
    # The place of an aggregate is that of its measure.
    return form, [Problem("", each.message) if each.place == "measure" else each for each in problems]


# The window of a measure without one of its own, until the whole rule is read.
INHERITED = Lookback(-1)
SOME_MEASURE = "write at least one name and aggregate, such as 'n: count(*)'"
_MEASURE = make_schema(MeasureForm)
MEASURES = Kind(
    _read_measures,
    {
        "type": "object",
        "minProperties": 1,
        "maxProperties": DEFAULT_LIMITS.measures,
        "propertyNames": NAMES,
        "additionalProperties": {"oneOf": [_MEASURE["properties"]["measure"], _MEASURE]},
    },
)


# Sequences ------------------------------------------------------------------------------------------------------------

_TAKEN = "write which events the step takes, such as \"outcome = 'FAIL'\""
_StepCondition = Annotated[str, kinds.condition(f"must be a condition, got {{}}; {_TAKEN}")]


@dataclass(frozen=True)
class StepForm:
    """Events to be taken (where), or as the last step events that must not come (absent).

    name: By which later steps and the message mean its events: failures.count, failures.ip.
    where: Which events the step takes. It may name the event's fields and those of earlier steps as arrays, and their
        number: failures.ip, failures.count.
    at_least: How many events the step needs. Default: 1.
    at_most: More events than this prevent a match; not below at_least. Default: no limit.
    absent: As the last step: no event may satisfy this up to `within` after the step before.
    within: How long the absence lasts. Default: the sequence's within.
    """

    name: kinds.Name = key("", "failures", missing="write one, such as 'failures'")
    where: _StepCondition = key("", "outcome = 'FAIL'", "not array_contains(failures.ip, ip)", missing=_TAKEN)
    at_least: kinds.Count = key(1, default=1)
    at_most: Annotated[int | None, kinds.COUNT] = key(None)
    absent: _StepCondition = key("", "outcome = 'SUCCESS'", missing=_TAKEN)
    within: kinds.Span = key(0, "5 minutes")


STEP_KEYS, ABSENT_KEYS = ("name", "where", "at_least", "at_most"), ("name", "absent", "within")
# The keys that only the other kind of step has -> why; of a step of absence, and of one that takes events.
_NOT_FOR_ABSENCE = {
    "where": "a step has where or absent, not both; leave one of them out",
    "at_least": "at_least is for steps that take events, and this is one of absence; leave it out",
    "at_most": "at_most is for steps that take events, and this is one of absence; leave it out",
}
_NOT_FOR_EVENTS = {
    "within": "within is for a last step with absent; leave it out, the steps have the sequence's within"
}
_NOT_FIRST = "nothing begins the wait; write a step before it"


def _refuse_all(messages: Mapping[str, str]) -> kinds.Schema:
    return {"properties": {name: kinds.refuse(message) for name, message in messages.items()}}


def _read_steps(value: Any, reading: Reading) -> tuple[Step, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"must be a list with at least one step, got {quote_value(value)}; {_SOME_STEPS}")
    most, steps, problems = reading.limits.steps, list[Step](), list[Problem]()
    if len(value) > most:
        problems.append(
            Problem("", name_limit(f"{len(value):,} steps are more than {most:,}; split the rule", "steps"))
        )
    for at, spec in enumerate(value[:most]):
        step, found = _read_step(spec, reading)
        if step.name and step.name.lower() in {known.name.lower() for known in steps}:
            found.append(Problem("name", f"{step.name!r} is there twice; give each step its own name"))
        if step.absent and at != len(value) - 1:
            found.append(Problem("absent", "only the last step can be absent; move it to the end or leave it out"))
        elif step.absent and at == 0:
            found.append(Problem("absent", f"{_NOT_FIRST}, such as {{name: seen, where: 'true'}}"))
        steps += [step] if step.name else []
        problems += [put_below(f"[{at}]", each) for each in found]
    return settle(tuple(steps), problems)


def _read_step(spec: Any, reading: Reading) -> tuple[Step, list[Problem]]:
    """Reads a step, without a name if it has no right one."""
    if not isinstance(spec, Mapping):
        return Step("", ""), [Problem("", f"must be a mapping with name and where, got {quote_value(spec)}")]
    is_absent = "absent" in spec
    keys, others = (ABSENT_KEYS, _NOT_FOR_ABSENCE) if is_absent else (STEP_KEYS, _NOT_FOR_EVENTS)
    form, problems = read_form(StepForm, spec, reading, keys, others.get)
    problems += kinds.find_long_span(form.within, reading.limits, "within")
    if form.at_most is not None and form.at_most < form.at_least:
        wanted = f"must be a whole number from {form.at_least} (at_least) to {kinds.MAX_EVENTS:,}"
        problems.append(Problem("at_most", f"{wanted}, got {quote_value(spec['at_most'])}"))
    condition = form.absent if is_absent else form.where
    return Step(form.name, condition, form.at_least, form.at_most, is_absent, form.within), problems


_SOME_STEPS = "write steps such as {name: failures, where: \"outcome = 'FAIL'\", at_least: 3}"
_STEPS = {
    "type": "array",
    "minItems": 1,
    "maxItems": DEFAULT_LIMITS.steps,
    "items": {
        **make_schema(StepForm),
        "required": ["name"],
        "if": {"required": ["absent"]},
        "then": _refuse_all(_NOT_FOR_ABSENCE),
        "else": {"required": ["where"], **_refuse_all(_NOT_FOR_EVENTS)},
    },
    "allOf": [{"prefixItems": [{"properties": {"absent": kinds.refuse(_NOT_FIRST)}}]}],
}


@dataclass(frozen=True)
class SequenceForm:
    """Steps that have to follow one another; instead of a window, measures and when.

    within: The time that the steps have, from the first event to the last.
    steps: What has to happen, in order; at most 20. The rule is judged when an event satisfies the last.
    until: An event that satisfies this ends the match, after it has been judged itself; it may name the event's fields.
        Default: only time ends it.
    expiry: From where `within` counts. sliding: back from the event that is judged. fixed: on from the first event taken.
        Default: sliding.
    take: Which matches an event may belong to. all: every step takes all its events, and a match may begin at any event
        of step one. once: a step takes the events it needs, and the newest match waits for the next step.
        Default: all.
    """

    within: kinds.Span = key(
        1, "10 minutes", missing="write the time that the steps have, such as 'within: 10 minutes'"
    )
    steps: Annotated[tuple[Step, ...], Kind(_read_steps, _STEPS)] = key((), missing=_SOME_STEPS)
    until: Annotated[str | None, kinds.condition("must be a condition, such as \"outcome = 'SUCCESS'\", got {}")] = key(
        None, "outcome = 'SUCCESS'"
    )
    expiry: Annotated[str, kinds.choice(EXPIRIES)] = key("sliding", default="sliding")
    take: Annotated[str, kinds.choice(TAKES)] = key("all", default="all")


def _read_sequence(value: Any, reading: Reading) -> StepSequence:
    if not isinstance(value, Mapping):
        message = f"must be a mapping with within and steps, got {quote_value(value)}"
        raise Refused([Problem("", message)], StepSequence(1, ()))
    given = {name: each for name, each in value.items() if name != "until" or each is not None}
    form, problems = read_form(SequenceForm, given, reading)
    problems += kinds.find_long_span(form.within, reading.limits, "within")
    steps = (replace(step, within=step.within or form.within) if step.absent else step for step in form.steps)
    if form.take == "once":
        problems += _find_not_once(form)
    return settle(StepSequence(form.within, tuple(steps), form.until, form.expiry, form.take), problems)


def _find_not_once(form: SequenceForm) -> Iterator[Problem]:
    """Finds the keys that `take: once` gives no meaning."""
    if form.expiry != "sliding":
        yield Problem("expiry", "with take: once, within always counts back from the event; leave expiry out")
    wanted = sum(step.at_least for step in form.steps if not step.absent)
    if wanted > MAX_STAGES:
        message = f"with take: once, the steps may need at most {MAX_STAGES} events, and these need {wanted:,}"
        yield Problem("steps", f"{message}; lower at_least, or use take: all")
    for at, step in enumerate(form.steps):
        if step.at_most is not None:
            message = "with take: once, a step takes no more events than it needs; leave at_most out, or use take: all"
            yield Problem(f"steps[{at}].at_most", message)


SEQUENCE_KEYS = list_keys(SequenceForm)
AnySequence = Annotated[StepSequence | None, Kind(_read_sequence, make_schema(SequenceForm))]


# Tests ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AlertForm:
    """An alert that a test expects.

    event_id: The id of the event that triggered it.
    measures: Measures by name, numbers compared by value.
    message: The text, filled in.
    """

    event_id: kinds.Anything = key(None)
    measures: kinds.Anything = key(None, type="object")
    message: kinds.Anything = key(None, type="string")


@dataclass(frozen=True)
class ListedForm:
    """A value.

    value: The text that cast(field as string) gives.
    expires_at: Events from this time on do not find the value. Default: never.
    kind: cidr for a range of addresses, such as 10.0.0.0/8. Default: a text.
    """

    value: kinds.Anything = key(None, type=["string", "integer"], missing="write it")
    expires_at: kinds.Time = key(None, "2026-01-31T12:00:00Z")
    kind: kinds.Anything = key(None, enum=[CIDR])


def _mappings(example: str, items: kinds.Schema) -> Kind:
    def read(value: Any, _: Reading) -> Any:
        is_list = isinstance(value, list) and all(isinstance(item, Mapping) for item in value)
        if value is not None and not is_list:
            raise ValueError(f"must be a list of mappings, such as [{example}], got {quote_value(value)}")
        return value

    return Kind(read, {"type": "array", "items": items})


def _read_lists(value: Any, _: Reading) -> Any:
    problems = [replace(each, place=each.place.removeprefix("lists")) for each in read_contents(value)[1]]
    return settle(value, [replace(each, place=each.place.removeprefix(".")) for each in problems])


_EVENT = "{event_id: 1, amount: 100}"
_LISTED = {"oneOf": [{"type": ["string", "integer"]}, make_schema(ListedForm)]}
_LISTS = {"type": "object", "additionalProperties": {"type": "array", "items": _LISTED}}


@dataclass(frozen=True)
class ExampleForm:
    """Events, and the alerts that they raise.

    name: What the test shows.
    events: Events of the stream, as mappings of field to value. Each is a commit of its own.
    alerts: All alerts that these events raise, in order; of each, what is written is compared. Default: none.
    parameters: Values of parameters for this test alone. Default: those of the rule.
    lists: The contents of the lists that in_list() asks, by name. Default: a list is empty.
    """

    name: kinds.Anything = key(None, "the third payment in a day", type="string")
    events: Annotated[Any, _mappings(_EVENT, {"type": "object"})] = key(
        None,
        [{"payment_id": 1, "event_time": "2026-03-01T10:00:00Z", "amount": 400}],
        missing=f"write a list of mappings, such as [{_EVENT}]",
    )
    alerts: Annotated[Any, _mappings("{event_id: 1}", {**make_schema(AlertForm), "additionalProperties": True})] = key(
        None, [{"event_id": 3, "measures": {"total": 12000}}]
    )
    parameters: Annotated[Any, Kind(_read_test_parameters, _VALUES)] = key(None, {"limit": 1000})
    lists: Annotated[Any, Kind(_read_lists, _LISTS)] = key(None, {"known-terminals": ["T1", "T2"]})


def _read_tests(value: Any, reading: Reading) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list):
        raise ValueError(f"must be a list of mappings with name, events and alerts, got {quote_value(value)}")
    problems = []
    for at, test in enumerate(value):
        if isinstance(test, Mapping):
            found = read_form(ExampleForm, test, reading)[1]
        else:
            found = [Problem("", f"must be a mapping with name, events and alerts, got {quote_value(test)}")]
        problems += [put_below(f"[{at}]", each) for each in found]
    return settle(tuple(test for test in value if isinstance(test, Mapping)), problems)


MEASURE_KEYS, TEST_KEYS = list_keys(MeasureForm), list_keys(ExampleForm)
AnyTests = Annotated[
    tuple[Mapping[str, Any], ...], Kind(_read_tests, {"type": "array", "items": make_schema(ExampleForm)})
]

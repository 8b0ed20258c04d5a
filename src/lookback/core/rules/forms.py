"""The mappings within a rule document: windows, measures, and the rule's own tests."""

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
    TiledWindow,
    Window,
)

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

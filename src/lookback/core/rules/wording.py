"""Describes a rule in words, for people who did not write it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from sqlglot import exp

from lookback.core.aggregation.aggregates import RANKING
from lookback.core.expressions.syntax import LookbackSql, parse, unwrap
from lookback.core.rules.compiled import CompiledMeasure, CompiledRule, Feature
from lookback.core.rules.document import Rule
from lookback.core.streams.declaration import Stream
from lookback.core.values.durations import MICROSECONDS, format_duration
from lookback.core.values.limits import WIDEST_LIMITS
from lookback.core.values.texts import collapse_spaces, join_words
from lookback.core.values.times import format_time
from lookback.core.values.types import BOOLEAN
from lookback.core.values.windows import EVENT, LOOKBACK, Lookback, Moment, Session, Step, TiledWindow, Window


@dataclass(frozen=True)
class DocumentChange:
    """A place of a rule's document at which two versions differ; None where one has nothing there."""

    place: str
    before: Any
    after: Any

    def __str__(self) -> str:
        if self.before is None:
            return f"{self.place} is new: {self.after!r}"
        if self.after is None:
            return f"{self.place} is gone, it was {self.before!r}"
        return f"{self.place}: {self.before!r} becomes {self.after!r}"


def list_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[DocumentChange]:
    """Lists the places at which two documents differ, such as `measures.total`, in the order of the documents.

    Lists of the same length are compared item by item, so a parameter that every test gets is not all of the tests.
    """
    return list(_find_changes(before, after, ""))


def _find_changes(before: Any, after: Any, place: str) -> Iterator[DocumentChange]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in dict.fromkeys([*before, *after]):
            yield from _find_changes(before.get(name), after.get(name), f"{place}.{name}" if place else str(name))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for at, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from _find_changes(old, new, f"{place}[{at}]")
    elif before != after:
        yield DocumentChange(place, before, after)


_AGGREGATES = {
    "count": "the number of events with a value of {}",
    "count_distinct": "the number of different values of {}",
    "sum": "the sum of {}",
    "avg": "the average of {}",
    "min": "the smallest {}",
    "max": "the largest {}",
    "first": "the first {}",
    "last": "the last {}",
    "stddev_samp": "the standard deviation of {}",
    "stddev_pop": "the standard deviation of {}",
    "var_samp": "the variance of {}",
    "var_pop": "the variance of {}",
    "median": "the median of {}",
    "percentile": "percentile {1} of {0}",
    "mode": "the most frequent {}",
    "max_by": "the {1} with the largest {0}",
    "min_by": "the {1} with the smallest {0}",
    "collect_set": "the different values of {}",
}
_BOUNDS = (exp.GT, exp.GTE, exp.LT, exp.LTE, exp.EQ)
_DAY = MICROSECONDS["day"]


def describe_rule(rule: CompiledRule) -> str:
    """Describes in one sentence when the rule raises an alert.

    Such as: Raised when total >= 2000, where total is the sum of amount over the 24 hours up to each event, per
    customer_id; only events where amount > 0.
    """
    spec = rule.spec
    parts = [_describe_sequence(rule) if spec.sequence is not None else _describe_measures(rule)]
    if spec.where and (spec.when or spec.kind != EVENT):
        parts.append(f"only events where {collapse_spaces(spec.where)}")
    if spec.sequence is not None and spec.sequence.until:
        until, key = spec.sequence.until, _describe_step_key(spec, spec.sequence.until_key)
        parts.append(f"{_describe_events(until)}{key} ends what has begun, once it has been judged itself")
    if rule.lists:
        asked = "the list {} is asked" if len(rule.lists) == 1 else "the lists {} are asked"
        parts.append(f"{asked.format(join_words(sorted(rule.lists)))} when an event arrives")
    if spec.early:
        parts.append("judged after each event as well, before the window ends")
    if spec.late == "record":
        parts.append("late events count but raise nothing themselves")
    if spec.late == "revise":
        parts.append("judged again when an event arrives later that lies in the window")
    if spec.reset_on_alert:
        parts.append("after an alert the key starts again: earlier events no longer count")
    if spec.suppress:
        parts.append(f"further alerts of a key within {format_duration(spec.suppress)} of one are suppressed")
    if spec.effective_from is not None or spec.effective_until is not None:
        parts.append(_describe_effective_time(spec.effective_from, spec.effective_until))
    if not set(rule.entities) <= set(rule.key_names):
        parts.append(f"its alerts are about {join_words(rule.entities)}")
    if not spec.queue:
        parts.append("its alerts are reports, which wait for nobody")
    return "; ".join(parts) + "."


def describe_measure(measure: CompiledMeasure) -> str:
    """Describes a measure and its window, such as `the number of events over the 10 minutes up to each event`."""
    feature = measure.feature
    argument = "" if feature.argument is None else feature.argument.sql
    aggregate = _describe_aggregate(feature, argument) if argument else "the number of events"
    where = f" where {feature.filter.sql}" if feature.filter is not None else ""
    return f"{aggregate}{where} {_describe_window(measure.window)}"


def _describe_aggregate(feature: Feature, argument: str) -> str:
    name, _, fraction = feature.function.partition("(")
    if feature.argument_type == BOOLEAN and name in ("min", "max"):
        return f"whether {argument} for {'all events' if name == 'min' else 'any event'}"
    if name in RANKING:
        return _AGGREGATES[name].format(*(part.sql(LookbackSql) for part in parse(argument, WIDEST_LIMITS).expressions))
    percents = f"{100 * float(fraction.rstrip(')')):g}" if fraction else ""
    return _AGGREGATES[name].format(argument, percents)


def describe_step(step: Step) -> str:
    """Describes the events that a step of a sequence takes, such as `at least 3 events where outcome = 'FAIL'`."""
    if step.absent:
        return f"no event{_describe_condition(step.condition)}"
    least, most = step.at_least, step.at_most
    if most is None:
        return (
            _describe_events(step.condition)
            if least == 1
            else f"at least {least} events{_describe_condition(step.condition)}"
        )
    number = (
        f"{least} to {most} events" if most > least else "exactly one event" if most == 1 else f"exactly {most} events"
    )
    return f"{number}{_describe_condition(step.condition)}"


def find_measure_limits(rule: CompiledRule) -> Mapping[str, tuple[float, ...]]:
    """Finds the numbers that `when` compares a measure with, by the measure's name, such as {"total": (2000.0,)}.

    Only comparisons of one measure with one number count; a limit that depends on the event is left out.
    """
    return _find_limits(rule, [measure.name for measure in rule.measures])


def find_field_limits(rule: CompiledRule, stream: Stream) -> Mapping[str, tuple[float, ...]]:
    """Finds the numbers that `when` compares a field of the event with, such as {"amount": (220.0,)}.

    The condition of an event rule may be in `where` too.
    """
    measures = {measure.name.lower() for measure in rule.measures}
    return _find_limits(rule, [name for name in stream.fields if name.lower() not in measures])


def _find_limits(rule: CompiledRule, among: Iterable[str]) -> Mapping[str, tuple[float, ...]]:
    names = {name.lower(): name for name in among}
    limits: dict[str, list[float]] = {}
    texts = (rule.spec.when, rule.spec.where if rule.spec.kind == EVENT else None)
    for node in chain.from_iterable(parse(text).find_all(*_BOUNDS) for text in texts if text):
        for name, number in ((node.this, node.expression), (node.expression, node.this)):
            column, value = unwrap(name), _read_number(number)
            if isinstance(column, exp.Column) and value is not None and column.name.lower() in names:
                limits.setdefault(names[column.name.lower()], []).append(value)
    return {name: tuple(values) for name, values in limits.items()}


@dataclass(frozen=True)
class RelativeLimit:
    """An expression that `when` compares a measure, or a field of the judged event, with.

    Attributes:
        name: The measure or field, in lower case.
        text: The expression.
        measures: The measures that it reads.
    """

    name: str
    text: str
    measures: frozenset[str]


def find_measure_relations(rule: CompiledRule) -> list[RelativeLimit]:
    """Finds the limits of measures that depend on other values, such as `3 * before` in `n > 3 * before`."""
    names = {measure.name.lower() for measure in rule.measures}
    return [each for each in _find_relations(rule) if each.name in names]


def find_event_limits(rule: CompiledRule) -> list[RelativeLimit]:
    """Finds the limits of a lookback rule's fields that depend on measures, such as `3 * usual` in `amount > 3 * usual`."""
    names = {measure.name.lower() for measure in rule.measures}
    relations = _find_relations(rule) if rule.spec.kind == LOOKBACK else ()
    return [each for each in relations if each.name not in names and each.measures]


def _find_relations(rule: CompiledRule) -> Iterator[RelativeLimit]:
    """Yields the comparisons of a name with an expression that is more than a number.

    Two forms count: a name on one side of a comparison, or a name divided by something beside a number.
    """
    measures = {measure.name.lower(): measure.name for measure in rule.measures}
    for node in parse(rule.spec.when, WIDEST_LIMITS).find_all(*_BOUNDS) if rule.spec.when else ():
        for side, other in ((node.this, node.expression), (node.expression, node.this)):
            column, limit = unwrap(side), unwrap(other)
            if isinstance(column, exp.Div) and _read_number(limit) is not None:
                limit, column = exp.Mul(this=limit, expression=column.expression), unwrap(column.this)
            names = {each.name.lower() for each in limit.find_all(exp.Column)}
            if isinstance(column, exp.Column) and names:
                read = frozenset(measures[name] for name in names & set(measures))
                yield RelativeLimit(column.name.lower(), limit.sql(LookbackSql, comments=False), read)


def _read_number(node: exp.Expr) -> float | None:
    node = unwrap(node)
    if isinstance(node, exp.Neg):
        value = _read_number(node.this)
        return None if value is None else -value
    return float(node.name) if isinstance(node, exp.Literal) and not node.is_string else None


def _describe_measures(rule: CompiledRule) -> str:
    """Describes when a rule with measures raises an alert."""
    if isinstance(rule.window, Moment):
        return f"Raised for each event where {collapse_spaces(rule.spec.when or rule.spec.where or '')}"
    clauses = [f"{measure.name} is {describe_measure(measure)}" for measure in rule.measures]
    if rule.spec.when:
        raised = f"raised when {collapse_spaces(rule.spec.when)}"
    else:
        raised = "raised if there is any event"
    window = rule.spec.window
    raised = (
        f"R{raised[1:]}" if isinstance(window, Lookback) or window is None else f"{_describe_windows(window)}, {raised}"
    )
    return f"{raised}, where {join_words(clauses)}, {_describe_key(rule)}"


def _describe_windows(window: TiledWindow | Session) -> str:
    if isinstance(window, Session):
        return f"In every session (events no more than {format_duration(window.gap)} apart)"
    details = [] if window.slide == window.size else [f"one begins every {_format_span(window.slide)}"]
    # Windows without an offset whose slide divides a day begin where everybody expects it.
    if window.offset % window.slide or _DAY % window.slide:
        details.append(f"counted from {format_time(window.offset)}")
    return f"In every {_format_span(window.size)}" + (f" ({', '.join(details)})" if details else "")


def _describe_window(window: Window) -> str:
    if isinstance(window, Session):
        return "over the session"
    if isinstance(window, TiledWindow):
        return f"over the {_format_span(window.size)} of the window"
    size = _format_span(window.size)
    if not window.delay:
        words = f"over the {size} up to each event"
    else:
        ends = "end" if size[0].isdigit() else "ends"
        words = f"over the {size} that {ends} {_format_length(window.delay)} before each event"
    return f"{words} (begun at a multiple of {_format_length(window.resolution)})" if window.resolution else words


def _describe_sequence(rule: CompiledRule) -> str:
    """Describes when a sequence raises an alert."""
    spec = rule.spec.sequence
    assert spec is not None
    taken = [step for step in spec.steps if not step.absent]
    text = f"Raised when, {_describe_key(rule)}, {_join_steps(taken, rule.spec)}"
    several = len(taken) > 1 or taken[0].at_least > 1
    if spec.expiry == "fixed":
        text += f", within {format_duration(spec.within)} from the first event on, after which the next such event begins again"
    elif several:
        text += f", within the {_format_span(spec.within)} up to the last event"
    if spec.take == "once":
        text += "; the newest match waits at each step and is used up when it alerts"
    for step in spec.steps:
        if step.absent:
            after = f"the {_format_span(step.within)} after {'the last of them' if several else 'it'}"
            text += f", and in {after} there is {_name_step(step, rule.spec)}"
    return text


def _name_step(step: Step, rule: Rule) -> str:
    return f"{describe_step(step)} ({step.name}{_describe_step_key(rule, step.key)})"


def _describe_step_key(rule: Rule, key: Sequence[str] | None) -> str:
    """Describes the key of a step, such as ` with dst_ip as src_ip`; empty if it is that of the rule."""
    pairs = [] if key is None else zip(key, rule.group_by, strict=True)
    others = [f"{name} as {entry.name}" for name, entry in pairs if name.lower() != entry.name.lower()]
    return f" with {join_words(others)}" if others else ""


def _join_steps(steps: Sequence[Step], rule: Rule) -> str:
    """Joins the descriptions of steps in order."""
    phrases = [_name_step(step, rule) for step in steps]
    verbs = ["are" if step.at_least > 1 else "is" for step in steps]
    if len(phrases) == 1:
        return f"there {verbs[0]} {phrases[0]}"
    return f"{phrases[0]} {verbs[0]} followed by {', then by '.join(phrases[1:])}"


def _describe_events(condition: str) -> str:
    return f"an event{_describe_condition(condition)}"


def _describe_condition(condition: str) -> str:
    plain = collapse_spaces(condition)
    return " of any kind" if plain.lower() == "true" else f" where {plain}"


def _describe_key(rule: CompiledRule) -> str:
    if not rule.key:
        return "over all events together"
    written = {entry.name: collapse_spaces(entry.expression) for entry in rule.spec.group_by if entry.expression}
    names = [f"{name} ({written[name]})" if name in written else name for name in rule.key_names]
    return f"per {' and '.join(names)}"


def _describe_effective_time(start: int | None, end: int | None) -> str:
    bounds = ([f"from {format_time(start)} on"] if start is not None else []) + (
        [f"before {format_time(end)}"] if end is not None else []
    )
    return f"only for times {' and '.join(bounds)}"


def _format_span(microseconds: int) -> str:
    """Formats a length of time after `the` or `every`, such as `24 hours` and `week`."""
    return _format_length(microseconds).removeprefix("1 ")


def _format_length(microseconds: int) -> str:
    """Formats a length of time: up to two days in hours, as people name windows, longer ones in days or weeks."""
    hours, rest = divmod(microseconds, MICROSECONDS["hour"])
    return f"{hours} hours" if not rest and 1 < hours <= 48 else format_duration(microseconds)

"""The sequence of a rule document: its steps, and what ends a match."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from lookback.core.errors import Problem
from lookback.core.rules import kinds
from lookback.core.rules.kinds import Kind, Reading, key, list_keys, make_schema, read_form, settle
from lookback.core.rules.problems import quote_value
from lookback.core.values.limits import DEFAULT_LIMITS, name_limit
from lookback.core.values.reading import Refused, put_below
from lookback.core.values.windows import Step, StepSequence

EXPIRIES = ("sliding", "fixed")
TAKES = ("all", "once")
# How many events the steps of a sequence with take: once may need together; as many as the evidence of an alert has.
MAX_STAGES = 100


def _read_key(value: Any, _: Reading) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        wanted = "must be a list of field names, one for each entry of group_by, such as [dst_ip]"
        raise ValueError(f"{wanted}, got {quote_value(value)}")
    return tuple(value)


_Key = Annotated[tuple[str, ...] | None, Kind(_read_key, {"type": "array", "items": {"type": "string"}})]
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
    key: The fields of these events that must equal those of group_by: as many, of the same types, in the same order.
        Default: group_by.
    """

    name: kinds.Name = key("", "failures", missing="write one, such as 'failures'")
    where: _StepCondition = key("", "outcome = 'FAIL'", "not array_contains(failures.ip, ip)", missing=_TAKEN)
    at_least: kinds.Count = key(1, default=1)
    at_most: Annotated[int | None, kinds.COUNT] = key(None)
    absent: _StepCondition = key("", "outcome = 'SUCCESS'", missing=_TAKEN)
    within: kinds.Span = key(0, "5 minutes")
    key: _Key = key(None, ["dst_ip"])


STEP_KEYS, ABSENT_KEYS = ("name", "where", "at_least", "at_most", "key"), ("name", "absent", "within", "key")
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
    return Step(form.name, condition, form.at_least, form.at_most, is_absent, form.within, form.key), problems


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


_UNTIL = "must be a condition, such as \"outcome = 'SUCCESS'\", got {}"
_CONDITION = kinds.condition(_UNTIL)


@dataclass(frozen=True)
class UntilForm:
    """Events that end a match, if they have a key of their own.

    where: Which events end the match; it may name the event's fields.
    key: The fields of these events that must equal those of group_by, as in a step. Default: group_by.
    """

    where: Annotated[str, _CONDITION] = key("", "outcome = 'SUCCESS'", missing="write which events end the match")
    key: _Key = key(None, ["dst_ip"])


def _read_until(value: Any, reading: Reading) -> UntilForm:
    if isinstance(value, Mapping):
        form, problems = read_form(UntilForm, value, reading)
        return settle(form, problems)
    return UntilForm(_CONDITION.read(value, reading))


_UNTIL_SCHEMA = {"oneOf": [dict(_CONDITION.schema), make_schema(UntilForm)]}


@dataclass(frozen=True)
class SequenceForm:
    """Steps that have to follow one another; instead of a window, measures and when.

    within: The time that the steps have, from the first event to the last.
    steps: What has to happen, in order; at most 20. The rule is judged when an event satisfies the last.
    until: An event that satisfies this ends the match, after it has been judged itself; it may name the event's fields.
        {where: ..., key: [...]} if it has a key of its own. Default: only time ends it.
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
    until: Annotated[UntilForm | None, Kind(_read_until, _UNTIL_SCHEMA, _CONDITION.about)] = key(
        None, "outcome = 'SUCCESS'", {"where": "outcome = 'SUCCESS'", "key": ["dst_ip"]}
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
    until, until_key = (None, None) if form.until is None else (form.until.where or None, form.until.key)
    return settle(StepSequence(form.within, tuple(steps), until, form.expiry, form.take, until_key), problems)


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

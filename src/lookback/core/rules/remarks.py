"""Finds what is valid in a rule but may not be what its author meant. Remarks do not stop a rule."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from sqlglot import exp

from lookback.core.errors import Problem
from lookback.core.expressions.syntax import COMPARISONS, parse, unwrap
from lookback.core.rules.compiled import CompiledMeasure, CompiledRule
from lookback.core.values.durations import MICROSECONDS, format_duration
from lookback.core.values.limits import WIDEST_LIMITS
from lookback.core.values.windows import LOOKBACK, Lookback, TiledWindow

_WEEK, _DAY = MICROSECONDS["week"], MICROSECONDS["day"]
# Offsets from the epoch, a Thursday, to the first Monday and the first Sunday after it.
_TO_MONDAY, _TO_SUNDAY = 4 * _DAY, 3 * _DAY
_VALUE_AGGREGATES = {
    "avg": "the average", "sum": "the sum", "min": "the smallest", "max": "the largest",
    "last": "the last",
    "stddev_samp": "the standard deviation",
}  # fmt: skip


@dataclass(frozen=True)
class Remark:
    """Something that a person should look at: `place` is a dotted path in the document, `message` says what to do."""

    place: str
    message: str

    def __str__(self) -> str:
        return str(Problem(self.place, self.message))


def find_remarks(rule: CompiledRule) -> list[Remark]:
    """Finds the remarks that need no events, in the order of the rule's keys."""
    return [
        *_find_unused_parameters(rule),
        *_find_week_starts(rule),
        *_find_self_limits(rule),
        *_find_unasked_reports(rule),
        *_find_missing_tests(rule),
        *_find_empty_lists(rule),
    ]


def _find_unused_parameters(rule: CompiledRule) -> Iterator[Remark]:
    texts = {
        key: value for key, value in rule.spec.document.items() if key not in ("description", "parameters", "tests")
    }
    written = json.dumps(texts, ensure_ascii=False, default=str)
    for name in rule.spec.parameters:
        if not re.search(rf":{name}(?!\w)", written, re.ASCII):
            yield Remark(f"parameters.{name}", f"nothing in the rule takes it; write :{name} where its value belongs")


def _find_week_starts(rule: CompiledRule) -> Iterator[Remark]:
    """Finds a window of whole weeks that starts on a Thursday by default."""
    window = rule.spec.window
    if not isinstance(window, TiledWindow) or window.slide % _WEEK or window.offset:
        return
    yield Remark(
        "window",
        f"a window of {format_duration(window.size)} begins on a Thursday, as 1 January 1970 was, at 00:00 UTC; write "
        f"`offset: {_TO_MONDAY // _DAY} days` for weeks from Monday, `offset: {_TO_SUNDAY // _DAY} days` for weeks from Sunday",
    )


def _find_self_limits(rule: CompiledRule) -> Iterator[Remark]:
    """Finds a field compared with an aggregate of itself over a window that includes the event."""
    if rule.spec.kind != LOOKBACK or not rule.spec.when:
        return
    measures = {measure.name.lower(): measure for measure in rule.measures}
    texts = {measure.name: measure.text for measure in rule.spec.measures}
    reported: set[str] = set()
    for node in parse(rule.spec.when, WIDEST_LIMITS).find_all(*COMPARISONS, exp.Between):
        names = {column.name.lower() for column in node.find_all(exp.Column)}
        for name in sorted(names & set(measures)):
            measure = measures[name]
            fields = _value_fields(measure)
            shared = sorted(field for field in fields if field.lower() in names)
            if not shared or name in reported or not _holds_event(measure) or _is_record(node, measure):
                continue
            reported.add(name)
            window = measure.window
            assert isinstance(window, Lookback)
            own = f"{{measure: {texts[measure.name]}, window: {{lookback: {format_duration(window.size)}, delay: 1 microsecond}}}}"
            aggregate = f"{_VALUE_AGGREGATES[measure.feature.function]} of {', '.join(sorted(fields))}"
            is_own = measure.feature.function == "last"
            effect = "it is compared with itself" if is_own else "an outlier moves its own limit"
            yield Remark(
                "when",
                f"{shared[0]} is compared with {measure.name}, {aggregate} over a window that holds the event itself, so "
                f"{effect}; to leave the event out write `{measure.name}: {own}`",
            )


def _value_fields(measure: CompiledMeasure) -> frozenset[str]:
    """Returns the fields whose values the measure aggregates; none for a count."""
    feature = measure.feature
    is_other = feature.function == "last" and feature.filter is not None  # an event that may not be this one
    if feature.argument is None or feature.function not in _VALUE_AGGREGATES or is_other:
        return frozenset()
    return feature.argument.named


def _holds_event(measure: CompiledMeasure) -> bool:
    return isinstance(measure.window, Lookback) and not measure.window.delay


def _is_record(node: exp.Expr, measure: CompiledMeasure) -> bool:
    """Returns whether the comparison tests for the largest or smallest event, which needs the event in the window."""
    if measure.feature.function not in ("min", "max") or isinstance(node, (exp.GT, exp.LT, exp.Between)):
        return False
    return isinstance(unwrap(node.this), exp.Column) and isinstance(unwrap(node.expression), exp.Column)


def _find_unasked_reports(rule: CompiledRule) -> Iterator[Remark]:
    """Finds a rule whose every window is an alert that waits for a person."""
    if rule.spec.sequence is None and not rule.spec.when and rule.spec.queue:
        yield Remark(
            "queue",
            "without `when` every window with an event raises an alert, and each waits for a person; write `queue: false` if "
            "they are reports, or a condition",
        )


def _find_missing_tests(rule: CompiledRule) -> Iterator[Remark]:
    if not rule.spec.tests:
        yield Remark(
            "tests", "is missing; write an alert that you want and a near miss, so that a change cannot break them"
        )


def _find_empty_lists(rule: CompiledRule) -> Iterator[Remark]:
    """Finds lists that the rule asks and that are empty in all of its tests."""
    filled = {name for test in rule.spec.tests for name, values in (test.get("lists") or {}).items() if values}
    if rule.spec.tests:
        for name in sorted(rule.lists - filled):
            yield Remark("tests", f"list {name!r} is empty in every test; write `lists: {{{name}: [...]}}` into one")

"""The tests that travel with a rule, run through the harness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from lookback.core.alerts import Alert
from lookback.core.columns import text_of
from lookback.core.compiled import CompiledRule, compile_rule
from lookback.core.errors import EventError, Problem, RuleError
from lookback.core.rules import Rule, read_rule
from lookback.core.streams import Stream
from lookback.harness import Harness


def check_rule(document: Mapping[str, Any] | Rule, streams: Mapping[str, Stream]) -> CompiledRule:
    """The rule, bound to its stream, its own tests run. streams: every declared stream by name.

    Raises RuleError with every problem at once.
    """
    rule, problems = read_rule(document.document if isinstance(document, Rule) else document)
    stream = streams.get(rule.stream)
    if stream is None:
        if rule.stream:
            known = ", ".join(sorted(streams))
            problems.append(Problem("stream", f"there is no stream {rule.stream!r}; known are {known}"))
        raise RuleError(rule.rule_id, problems)
    compiled = compile_rule(document, stream)
    if failed := run_rule_tests(compiled.rule, stream):
        raise RuleError(rule.rule_id, failed)
    return compiled


def run_rule_tests(rule: Rule, stream: Stream) -> list[Problem]:
    """What of the rule's own tests does not come out as written; empty if all is well.

    A test's events go through a fresh harness, each a commit of its own unless `arrival` groups them. Its `alerts` are
    all rows with verdict raised, in order of arrival; once one of them names a verdict, all rows, also the suppressed
    and the retracted. Of each, what is written is compared: numbers by value, other things as text.
    """
    problems = []
    for at, test in enumerate(rule.tests):
        name = str(test.get("name", f"test {at + 1}"))
        problems += [Problem(f"tests[{at}]", f"{name}: {message}") for message in _run(rule, stream, test)]
    return problems


def _run(rule: Rule, stream: Stream, test: Mapping[str, Any]) -> list[str]:
    harness = Harness(stream)
    harness.rule(rule)
    try:
        harness.events(test["events"])
    except EventError as error:
        return [str(error)]
    expected = test.get("alerts") or []
    every = any("verdict" in alert for alert in expected)
    return _differences([alert for alert in harness.alerts if every or alert.verdict == "raised"], expected)


def _differences(raised: Sequence[Alert], expected: Sequence[Mapping[str, Any]]) -> list[str]:
    messages = []
    if len(raised) != len(expected):
        found = ", ".join(alert.event_id or f"window of {text_of(alert.window_start)}" for alert in raised) or "none"
        messages.append(f"alerts expected: {len(expected)}, found: {len(raised)} ({found})")
    for at, (alert, wanted) in enumerate(zip(raised, expected, strict=False)):
        for name, value in wanted.items():
            if name == "measures":
                for measure, number in value.items():
                    if not _same(alert.measures.get(measure), number):
                        got = text_of(alert.measures.get(measure))
                        messages.append(f"alert {at + 1}: {measure} is {got}, expected is {number}")
            elif not hasattr(alert, name):
                messages.append(
                    f"alert {at + 1}: an alert has no {name!r}; compare event_id, measures, message, key ..."
                )
            elif not _same(getattr(alert, name), value):
                messages.append(f"alert {at + 1}: {name} is {text_of(getattr(alert, name))}, expected is {value}")
    return messages


def _same(found: Any, wanted: Any) -> bool:
    if found is None or wanted is None or isinstance(wanted, Mapping):
        return bool(found == wanted)
    left, right = str(text_of(found)), str(text_of(wanted))
    try:
        return left == right or Decimal(left) == Decimal(right)
    except InvalidOperation:
        return False

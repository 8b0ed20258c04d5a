"""Checks a rule and runs the tests in its document through the harness."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal, InvalidOperation
from typing import Any

from lookback.config import load_rule_document
from lookback.core.errors import EventError, Problem, RuleError, SetupError
from lookback.core.expressions.compiling import Expression, recompile
from lookback.core.rules.compiled import CompiledRule
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.document import Rule, read_rule
from lookback.core.rules.problems import quote_value
from lookback.core.streams.alerts import Alert
from lookback.core.streams.declaration import Stream
from lookback.core.streams.eventrows import find_row_problems, read_events
from lookback.core.values.columns import to_text
from lookback.core.values.lists import Lists
from lookback.core.values.suggestions import suggest
from lookback.core.values.times import parse_time
from lookback.testing.harness import Harness

# The columns of an alert that a test can compare. Only the running stream knows decided_at.
_COLUMNS = tuple(column.name for column in fields(Alert) if column.name != "decided_at")
# The columns that a test's row may have in addition to the stream's fields.
_EXTRA_COLUMNS = ("arrival", "committed_at")


@dataclass(frozen=True)
class CheckedFile:
    """A rule's file after its check.

    Attributes:
        file: The path of the file.
        name: Id of the rule; empty if the file cannot be read.
        problems: What is wrong with the file or the rule; empty if the rule is valid.
        rule: The rule; None if it is invalid. It is there if its only problem is an id that another file has.
    """

    file: str
    name: str
    problems: Sequence[Problem] = ()
    rule: CompiledRule | None = None


def check_files(files: Iterable[str], streams: Mapping[str, Stream]) -> Iterator[CheckedFile]:
    """Checks the rules in files and runs their tests; see `check_rule`.

    An unreadable file or an invalid rule fails alone. Of two valid rules with the same id, the later one fails.
    """
    seen: dict[str, str] = {}
    for file in files:
        try:
            document = load_rule_document(file)
        except SetupError as error:
            yield CheckedFile(file, "", [Problem("", str(error))])
            continue
        try:
            rule = check_rule(document, streams)
        except RuleError as error:
            yield CheckedFile(file, error.name, error.problems)
            continue
        first = seen.setdefault(rule.spec.rule_id, file)
        twice = Problem("rule_id", f"{first} has a rule with the same rule_id; rename one of them")
        yield CheckedFile(file, rule.spec.rule_id, () if first == file else [twice], rule)


def check_rule(document: Mapping[str, Any] | Rule, streams: Mapping[str, Stream]) -> CompiledRule:
    """Binds a rule to its stream, one of the declared `streams`, runs its tests and returns it.

    Raises RuleError with all problems at once.
    """
    rule, problems = read_rule(document.document if isinstance(document, Rule) else document)
    stream = streams.get(rule.stream)
    if stream is None:
        if rule.stream:
            known = ", ".join(sorted(streams))
            problems.append(Problem("stream", f"unknown stream {rule.stream!r}; known: {known}"))
        raise RuleError(rule.rule_id, problems)
    compiled = compile_rule(document, stream)
    if failed := run_rule_tests(compiled, stream):
        raise RuleError(rule.rule_id, failed)
    return compiled


def run_rule_tests(rule: Rule | CompiledRule, stream: Stream) -> list[Problem]:
    """Runs the tests in a rule's document and returns the differences between expected and raised alerts.

    A test's events go through a fresh harness, each as its own commit unless `arrival` groups them. Its `alerts` are
    the expected rows with verdict raised, in order of arrival; if one of them has a verdict, all rows are expected,
    including suppressed and retracted ones. Only the columns in the test are compared: numbers and times by value, the
    rest as text. `lists` has the contents of lists before the first event; other lists are empty.

    A name that neither the stream nor the rule knows is a problem, and so is an event that could not be judged: a test
    that passes because of either proves nothing.
    """
    compiled = rule if isinstance(rule, CompiledRule) else compile_rule(rule, stream)
    problems = []
    for at, test in enumerate(compiled.spec.tests):
        name = str(test.get("name", f"test {at + 1}"))
        problems += [Problem(f"tests[{at}]", f"{name}: {message}") for message in _run_test(compiled, stream, test)]
    return problems


def _run_test(rule: CompiledRule, stream: Stream, test: Mapping[str, Any]) -> list[str]:
    rows, expected = test["events"], test.get("alerts") or []
    wrong = [
        *_find_unknown_fields(rows, stream),
        *find_row_problems(rows, stream),
        *_find_wrong_expectations(expected, rule),
        *_find_unread_lists(test.get("lists", {}), rule),
    ]
    if wrong:
        return wrong
    harness = Harness(stream)
    try:
        harness.lists(test.get("lists", {}))
        harness.rule(_with_parameters(rule.spec, test))
        harness.events(rows)
    except RuleError as error:
        return [f"with these parameters {problem}" for problem in error.problems]
    except EventError as error:
        return [str(error)]
    # An error also causes missing alerts; listing those as differences would hide the cause.
    if failed := [row.message for row in harness.errors if row.action == "failed"]:
        return [f"{message}; {_find_cause(rule, rows, stream)}" for message in failed]
    every = any("verdict" in alert for alert in expected)
    return _find_differences([alert for alert in harness.alerts if every or alert.verdict == "raised"], expected)


def _with_parameters(rule: Rule, test: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the document of a rule with the parameter values of a test."""
    own = {"parameters": {**rule.parameters, **test["parameters"]}} if "parameters" in test else {}
    return {**rule.document, **own}


def _find_unknown_fields(rows: Sequence[Mapping[str, Any]], stream: Stream) -> Iterator[str]:
    known = (*stream.fields, *_EXTRA_COLUMNS)
    for number, row in enumerate(rows, 1):
        for name in _list_names(row, stream):
            if name not in known:
                yield f"row {number}: stream {stream.name!r} has no field {quote_value(name)}; {_suggest_name(name, known)}"


def _list_names(row: Mapping[str, Any], stream: Stream, above: str = "") -> Iterator[str]:
    """Lists the names of a row's values; those in a struct have dots."""
    for name in row:
        whole = f"{above}{name}"
        if not any(field.startswith(f"{whole}.") for field in stream.fields):
            yield whole
        elif isinstance(row[name], Mapping):
            yield from _list_names(row[name], stream, f"{whole}.")


def _find_wrong_expectations(expected: Sequence[Mapping[str, Any]], rule: CompiledRule) -> Iterator[str]:
    """Yields a message for each name or value that no alert of the rule can have."""
    named = {
        "measures": ("measure", tuple(measure.name for measure in rule.measures)),
        "key": ("field of group_by", rule.key_names),
    }
    for number, alert in enumerate(expected, 1):
        for name, value in alert.items():
            if name not in _COLUMNS:
                yield f"alert {number}: an alert has no {quote_value(name)}; {_suggest_name(name, _COLUMNS)}"
            elif name in named:
                kind, known = named[name]
                if not isinstance(value, Mapping):
                    example = f"{{{known[0] if known else 'n'}: 3}}"
                    yield f"alert {number}: {name} must be a mapping, such as {example}, got {quote_value(value)}"
                    continue
                for inner in value:
                    if inner not in known:
                        yield f"alert {number}: the rule has no {kind} {quote_value(inner)}; {_suggest_name(inner, known)}"


def _find_unread_lists(contents: Mapping[str, Any], rule: CompiledRule) -> Iterator[str]:
    """Yields a message for each list that a test fills and the rule does not read."""
    for name in contents:
        if name not in rule.lists:
            yield f"the rule reads no list {quote_value(name)}; {_suggest_name(name, sorted(rule.lists))}"


def _suggest_name(name: object, known: Iterable[str]) -> str:
    listed = tuple(known)
    return suggest(name, listed, None if listed else "leave it out, it has none")


def _find_cause(rule: CompiledRule, rows: Sequence[Mapping[str, Any]], stream: Stream) -> str:
    """Returns the expression that fails for one of the test's events, and the remedy."""
    guard = "guard it, such as by nullif(x, 0) under a division, or by try_cast"
    events, _ = read_events(rows, stream, 1)
    # Empty lists suffice: an error in a looked-up expression does not depend on the contents of the lists.
    events = events.look_up(rule.memberships, Lists.empty())
    parts: list[tuple[str, Expression | None]] = [
        (f"group_by.{part.name}", recompile(part.sql, stream.fields)) for part in rule.key if part.sql
    ]
    parts += [("where", rule.where)]
    for measure in rule.measures:
        parts += [(f"measures.{measure.name}", measure.feature.filter)]
        parts += [(f"measures.{measure.name}", measure.feature.argument)]
    if rule.sequence is not None:
        parts += [("sequence.until", rule.sequence.until)]
        parts += [(f"step {step.step.name!r}", step.condition) for step in rule.sequence.conditions if step.own]
    for place, part in parts:
        if part is not None:
            error = events.value(part).error
            if error is not None and error.any():
                return f"the error is in {place}; {guard}"
    left = "a condition of the sequence" if rule.sequence is not None else "when, or in the value of a measure"
    return f"the error is in {left}; {guard}"


def _find_differences(raised: Sequence[Alert], expected: Sequence[Mapping[str, Any]]) -> list[str]:
    messages = []
    if len(raised) != len(expected):
        events = ", ".join(alert.event_id or f"window of {to_text(alert.window_start)}" for alert in raised) or "none"
        messages.append(f"alerts expected: {len(expected)}, found: {len(raised)} ({events})")
    for number, (alert, expected_alert) in enumerate(zip(raised, expected, strict=False), 1):
        for label, actual, value in _pair_values(alert, expected_alert):
            if not _is_same(actual, value):
                messages.append(
                    f"alert {number}: {label} is {_format_value(actual)}, expected is {_format_value(value)}"
                )
    return messages


def _pair_values(alert: Alert, expected_alert: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yields (name, value in the alert, value in the test) of each column in the test, measures and key split up."""
    for name, value in expected_alert.items():
        actual = getattr(alert, name)
        if isinstance(value, Mapping) and isinstance(actual, Mapping):
            yield from ((inner, actual.get(inner), value[inner]) for inner in value)
        else:
            yield name, actual, value


def _format_value(value: Any) -> str | None:
    return to_text(list(value) if isinstance(value, tuple) else value)


def _is_same(actual: Any, expected: Any) -> bool:
    if actual is None or expected is None:
        return actual is expected
    if isinstance(actual, dt.datetime):
        try:
            return parse_time(expected) == parse_time(actual)
        except (ValueError, OverflowError):
            return False
    if isinstance(actual, (list, tuple)) and isinstance(expected, (list, tuple)):
        return len(actual) == len(expected) and all(map(_is_same, actual, expected))
    left, right = str(to_text(actual)), str(to_text(expected))
    try:
        return left == right or Decimal(left) == Decimal(right)
    except InvalidOperation:
        return False

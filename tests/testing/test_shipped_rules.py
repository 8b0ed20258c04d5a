"""Every rule that ships passes the tests that travel with it, and together they show what the language can say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lookback.config import load_rule_document, load_streams
from lookback.core.rules.compiled import CompiledRule
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.document import Rule
from lookback.core.values.windows import Lookback
from lookback.testing.rule_tests import check_rule, run_rule_tests

CONF = Path(__file__).parents[2] / "conf"
STREAMS = load_streams(CONF)
FILES = sorted((CONF / "rules").glob("*.yml"))
DAY = 86_400_000_000


def compiled(file: Path) -> CompiledRule:
    document = load_rule_document(file)
    return compile_rule(document, STREAMS[document["stream"]])


RULES = {file.stem: compiled(file) for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_shipped_rule(file: Path) -> None:
    document = load_rule_document(file)
    assert document["rule_id"] == file.stem
    check_rule(document, STREAMS)
    assert Rule.from_dict(document).to_dict() == document


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_shipped_rule_can_be_read_by_a_person(file: Path) -> None:
    document = load_rule_document(file)
    assert file.read_text(encoding="utf-8").startswith("# yaml-language-server: $schema=../rule.schema.json\n")
    assert len(document["description"]) >= 30
    assert document["message"]
    names = [test["name"] for test in document["tests"]]
    assert len(names) >= 2
    assert len(set(names)) == len(names)
    raised = {bool(test["alerts"]) for test in document["tests"]}
    assert raised == {True, False}, "a rule ships with an alert and with a near miss"


def test_a_rule_test_that_does_not_come_out_says_so() -> None:
    document = load_rule_document(CONF / "rules/large-payment.yml")
    document["tests"][0]["alerts"][0]["event_id"] = 1
    rule = Rule.from_dict(document)
    problems = run_rule_tests(rule, STREAMS["transactions"])
    assert [str(problem) for problem in problems] == [
        "the limit itself is still usual: alert 1: event_id is 2, expected is 1 (tests[0])"
    ]


def windows(rule: CompiledRule) -> list[Any]:
    """The windows of a rule and of its measures."""
    return [rule.spec.window, *(measure.window for measure in rule.measures)]


def functions(rule: CompiledRule) -> set[str]:
    return {measure.feature.function for measure in rule.measures}


def looks_back(rule: CompiledRule, size: int) -> bool:
    return isinstance(rule.spec.window, Lookback) and rule.spec.window.size == size


def by(*group_by: str) -> Callable[[CompiledRule], bool]:
    return lambda rule: rule.group_by == tuple(sorted(group_by))


FEATURES: dict[str, Callable[[CompiledRule], bool]] = {
    "lookback": lambda rule: rule.spec.kind == "lookback",
    "tumbling with lateness of its own": lambda rule: (
        rule.spec.kind == "tumbling" and rule.spec.allowed_lateness == 120_000_000
    ),
    "sliding": lambda rule: rule.spec.kind == "sliding",
    "session, told early": lambda rule: rule.spec.kind == "session" and rule.spec.early,
    "sequence with until": lambda rule: rule.sequence is not None and rule.sequence.until is not None,
    "sequence that reads earlier steps": lambda rule: (
        rule.sequence is not None and any(not step.own for step in rule.sequence.steps)
    ),
    "absence": lambda rule: rule.sequence is not None and rule.sequence.absent is not None,
    "measure with a window of its own": lambda rule: len(set(windows(rule))) > 1,
    "delay": lambda rule: any(getattr(window, "delay", 0) for window in windows(rule)),
    "filter": lambda rule: any(measure.feature.filter for measure in rule.measures),
    "count(distinct)": lambda rule: "count_distinct" in functions(rule),
    "average": lambda rule: "avg" in functions(rule),
    "reset_on_alert": lambda rule: rule.spec.reset_on_alert,
    "suppress": lambda rule: rule.spec.suppress is not None,
    "revise": lambda rule: rule.spec.late == "revise",
    "no condition": lambda rule: rule.spec.window is not None and not rule.spec.when,
    "window_complete": lambda rule: rule.when is not None and "window_complete" in rule.when.fields,
    "event rule": lambda rule: rule.spec.kind == "event",
    "expression in group_by": lambda rule: any(part.sql for part in rule.key),
    "parts of structs": lambda rule: rule.where is not None and any("." in name for name in rule.where.fields),
    "condition on the elements of an array": lambda rule: "exists(" in (rule.spec.where or ""),
    "local time": lambda rule: "from_utc_timestamp(" in (rule.spec.when or ""),
    "key of a step": lambda rule: rule.sequence is not None and any(step.key for step in rule.spec.sequence.steps),
    "each event once": lambda rule: rule.sequence is not None and rule.spec.sequence.take == "once",
    "union": lambda rule: STREAMS[rule.spec.stream].union is not None,
    # What the rules are for.
    "money by payer and beneficiary over 30 days": lambda rule: (
        by("payer_id", "beneficiary_id")(rule) and "sum" in functions(rule) and looks_back(rule, 30 * DAY)
    ),
    "count by payment type with a reset": lambda rule: by("payment_type")(rule) and rule.spec.reset_on_alert,
    "large sums by beneficiary in a day": lambda rule: (
        by("beneficiary_id")(rule) and "sum" in functions(rule) and looks_back(rule, DAY)
    ),
    "payments at new terminals in 10 minutes": lambda rule: (
        by("customer_id")(rule) and "count_distinct" in functions(rule) and looks_back(rule, DAY // 144)
    ),
    "totals by city": lambda rule: by("city")(rule) and rule.spec.kind == "tumbling",
    "first use": lambda rule: by("customer_id", "terminal_id")(rule) and looks_back(rule, 90 * DAY),
    "sensor that does not change": lambda rule: by("sensor_id")(rule) and "count_distinct" in functions(rule),
    "sensor that does not report": lambda rule: by("sensor_id")(rule) and rule.spec.kind == "sequence",
}


@pytest.mark.parametrize("feature", FEATURES)
def test_some_rule_that_ships_shows(feature: str) -> None:
    shown = [name for name, rule in RULES.items() if FEATURES[feature](rule)]
    assert shown, f"no rule in conf/rules shows: {feature}"


def test_every_stream_that_ships_has_a_rule() -> None:
    assert {rule.spec.stream for rule in RULES.values()} == set(STREAMS)

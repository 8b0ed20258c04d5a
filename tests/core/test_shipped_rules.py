"""Every rule that ships passes the tests that travel with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lookback.config import load_rule_document, load_streams
from lookback.core.rules import Rule
from lookback.rule_tests import check_rule, run_rule_tests

CONF = Path(__file__).parents[2] / "conf"
STREAMS = load_streams(CONF)


@pytest.mark.parametrize("file", sorted((CONF / "rules").glob("*.yml")), ids=lambda file: file.stem)
def test_shipped_rule(file: Path) -> None:
    document = load_rule_document(file)
    assert document["rule_id"] == file.stem
    assert document["tests"], "a rule ships with its own examples"
    check_rule(document, STREAMS)
    assert Rule.from_dict(document).to_dict() == document


def test_a_rule_test_that_does_not_come_out_says_so() -> None:
    document = load_rule_document(CONF / "rules/large-payment.yml")
    document["tests"][0]["alerts"][0]["event_id"] = 1
    rule = Rule.from_dict(document)
    problems = run_rule_tests(rule, STREAMS["transactions"])
    assert [str(problem) for problem in problems] == [
        "the limit itself is still usual: alert 1: event_id is 2, expected is 1 (tests[0])"
    ]

"""How often rules are compiled and parsed, which is most of what many rules cost."""

from __future__ import annotations

from typing import Any

import pytest

import lookback
from lookback.core.expressions import textsearch
from lookback.core.expressions.compiling import compile_expression
from lookback.core.rules import compiling

STREAM = {
    "stream": "uses", "event_id": "id", "event_time": "at",
    "fields": {"id": "bigint", "at": "timestamp", "card": "string"},
}  # fmt: skip


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The conditions that were compiled."""
    found: list[str] = []

    def compile_and_count(text: str, *arguments: Any, **named: Any) -> Any:
        found.append(text)
        return compile_expression(text, *arguments, **named)

    monkeypatch.setattr(compiling, "compile_expression", compile_and_count)
    return found


def make_rules(label: str, count: int) -> list[dict[str, Any]]:
    """Makes rules that no other test has: what is compiled is kept for the process."""
    return [
        {"rule_id": f"{label}-{at}", "stream": "uses", "where": f"card = '{label} {at}'", "tags": ["a"]}
        for at in range(count)
    ]


def test_a_replay_compiles_each_rule_once(calls: list[str]) -> None:
    rules = make_rules("replayed", 30)
    result = lookback.replay(rules, [{"id": 1, "at": "2026-03-01", "card": "replayed 7"}], STREAM)
    assert [alert.rule_id for alert in result.alerts] == ["replayed-7"]
    assert sorted(calls) == sorted(rule["where"] for rule in rules)


def test_a_harness_compiles_each_rule_once(calls: list[str]) -> None:
    harness = lookback.Harness(STREAM)
    for rule in make_rules("tested", 3):
        harness.rule(rule)
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("key", "value"), [("score", float("nan")), ("tags", {1: "a"}), ("tests", ()), ("where", "crad = 'x'")]
)
def test_a_wrong_rule_is_refused_as_it_is_given(key: str, value: Any) -> None:
    """Not as its JSON, in which () is a list."""
    with pytest.raises(lookback.RuleError) as caught:
        lookback.replay([{**make_rules("odd", 1)[0], key: value}], [], STREAM)
    assert caught.value.problems[0].place.startswith(key)


def test_the_search_for_texts_parses_a_condition_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    parse = textsearch.parse

    def parse_and_count(text: str, *arguments: Any) -> Any:
        found.append(text)
        return parse(text, *arguments)

    monkeypatch.setattr(textsearch, "parse", parse_and_count)
    condition = compile_expression("lower(card) like '%once only%'", lookback.Stream.from_dict(STREAM).fields)
    assert textsearch.find_clauses(condition)
    assert len(found) == 1

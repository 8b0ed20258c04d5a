"""Contract 10.8: the hash of what a rule means, the conditions of a gate, and the settings that name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lookback.config import Settings
from lookback.core.errors import SetupError
from lookback.core.rules.gate import Gate, Knowledge, check_gate, hash_document, is_proven, write_evidence

RULE: dict[str, Any] = {
    "rule_id": "r", "stream": "tx", "group_by": ["b", "a"], "window": "1 hour", "measures": {"n": "count(*)"},
    "when": "n >= 1000",
}  # fmt: skip
NOTHING = Knowledge(0, None, None, None, "ann", "ann")
ALL = Knowledge(2, 50.0, 12.0, 0.5, "ann", "bob")
GATE = Gate(2, 30, 200, 0.4, 48, approval=True)


def test_c10_8_the_hash_is_over_the_document_with_parameter_values_without_tests_and_texts() -> None:
    known = hash_document(RULE)
    alike = [
        {**RULE, "tests": [{"name": "x"}], "description": "y", "message": "z"},
        dict(reversed(RULE.items())),
        {**RULE, "group_by": ["a", "b"]},
        {**RULE, "when": "n >= :limit", "window": ":span", "parameters": {"limit": 1000, "span": "1 hour"}},
    ]
    assert {hash_document(each) for each in alike} == {known}
    others = [
        {**RULE, "when": "n >= 1001"},
        {**RULE, "when": "n >= :limit", "parameters": {"limit": 999}},
        {**RULE, "severity": "high"},
        {**RULE, "suppress": "1 hour"},
    ]
    assert known not in {hash_document(each) for each in others}
    assert len({hash_document(each) for each in others}) == 4


def test_c10_8_each_condition_has_its_figure_and_a_remedy_where_it_is_not_met() -> None:
    met = check_gate(GATE, ALL)
    assert [(each.condition, each.figure) for each in met] == [
        ("at least 2 tests", "2"),
        ("at most 200 alerts a day in a backtest of 30 days", "12"),
        ("a precision of at least 0.4 in a backtest of 30 days", "0.5"),
        ("48 hours in shadow", "50"),
        ("an approval by another person", "bob"),
    ]
    assert all(each.met and not each.remedy for each in met)
    missed = check_gate(GATE, NOTHING)
    assert [each.figure for each in missed] == ["0", "none", "none", "none", "ann"]
    assert not any(each.met or not each.remedy for each in missed)
    assert check_gate(Gate(), NOTHING) == []


def test_c10_8_evidence_fits_its_document_alone() -> None:
    evidence = write_evidence(RULE, check_gate(GATE, ALL), "2026-03-01T00:00:00Z")
    assert set(json.loads(evidence)) == {"hash", "figures", "when"}
    assert is_proven({**RULE, "message": "{n}"}, evidence)
    assert not is_proven({**RULE, "when": "n >= 1"}, evidence)
    assert not any(is_proven(RULE, each) for each in (None, "", "no json", "[]", '{"quarantined": 1}'))


def read(folder: Path, text: str) -> Gate | None:
    (folder / "settings.yml").write_text(text, encoding="utf-8")
    return Settings.local(conf=folder).gate


def test_c10_8_the_settings_name_the_conditions(tmp_path: Path) -> None:
    assert read(tmp_path, "every: 1 second") is None
    text = "gate: {tests: 2, backtest_days: 30, max_alerts_per_day: 200, min_precision: 0.4, shadow_hours: 48, approval: true}"
    assert read(tmp_path, text) == GATE
    for wrong, message in {
        "{test: 1}": "gate has no condition 'test'; did you mean 'tests'",
        "{tests: 1.5}": "gate.tests must be a number from 0 to 1000, got '1.5'",
        "{min_precision: 2}": "gate.min_precision must be a number from 0 to 1, got '2'",
        "{max_alerts_per_day: 5}": "gate.backtest_days must be there too",
        "{approval: perhaps}": "gate.approval is true or false, got 'perhaps'",
    }.items():
        with pytest.raises(SetupError, match=message):
            read(tmp_path, f"gate: {wrong}")

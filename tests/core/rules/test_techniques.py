"""The MITRE ATT&CK techniques and tactics that rules cover, by their tags (contract 12.2)."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from lookback.core.rules.descriptions import has_tag
from lookback.core.rules.techniques import Covered, describe_coverage, find_coverage, find_technique


class Version(NamedTuple):
    """A version of a rule."""

    rule_id: str
    version: int
    status: str
    document: dict[str, Any] | None


@pytest.mark.parametrize(
    ("tag", "technique"),
    [
        ("attack.t1110", "T1110"), ("ATTACK.T1110.003", "T1110.003"), ("attack.ta0006", "TA0006"),
        ("attack.credential_access", "credential_access"), ("attack.Credential-Access", "credential_access"),
        ("attack.impact", "impact"),
        # Groups, software, other frameworks, and what only looks alike.
        ("attack.g0016", None), ("attack.s0002", None), ("attack.t111", None), ("attack.t11100", None), ("attack.t1110.3", None),
        ("attack.t1110.0031", None), ("t1110", None), ("car.2013-05-004", None), ("attack.", None), ("attack.t\u0661110", None),
        ("attack._a", None), ("typology.structuring", None),
    ],
)  # fmt: skip
def test_c12_2_a_tag_names_a_technique_or_a_tactic(tag: str, technique: str | None) -> None:
    assert find_technique(tag) == technique


def test_c12_2_coverage_lists_techniques_then_tactics_with_their_rules_and_statuses() -> None:
    versions = [
        Version("b", 2, "shadow", {"tags": ["attack.t1110.003", "attack.T1110.003", "attack.credential_access"]}),
        Version("a", 1, "active", {"tags": ["attack.t1110", "attack.t1110.003", "mine"]}),
        Version("c", 4, "retired", {"tags": ["attack.t1078"]}),
        # Rows written by hand may hold anything.
        Version("d", 1, "active", {"tags": "attack.t1"}),
        Version("e", 1, "active", {"tags": [1, None]}),
        Version("f", 1, "active", None),
    ]
    found = find_coverage(versions)
    assert found == [
        Covered("T1078", "c", 4, "retired"), Covered("T1110", "a", 1, "active"), Covered("T1110.003", "a", 1, "active"),
        Covered("T1110.003", "b", 2, "shadow"), Covered("credential_access", "b", 2, "shadow"),
    ]  # fmt: skip
    assert describe_coverage(found) == "3 techniques, 2 of them with an active rule"
    assert describe_coverage([]) == "no rule has a tag such as attack.t1110"


def test_c12_2_a_rule_has_a_tag_whatever_its_capitals() -> None:
    assert has_tag({"tags": ["Attack.T1110"]}, "attack.t1110")
    assert not has_tag({"tags": ["attack.t1110.003"]}, "attack.t1110")
    assert not any(has_tag(document, "a") for document in ({}, None, {"tags": "a"}, {"tags": [1]}))

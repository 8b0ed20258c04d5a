"""Contract 10.8: the hash of what a rule means, the conditions of a gate, and the settings that name them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lookback.config import Settings
from lookback.core.errors import SetupError
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.descriptions import DESCRIPTIONS
from lookback.core.rules.gate import (
    APPROVAL,
    EVIDENCE,
    Gate,
    Knowledge,
    check_gate,
    find_objection,
    hash_document,
    is_proven,
    write_evidence,
)
from lookback.core.rules.rulebook import RuleBook
from lookback.core.rules.rulelog import LogRow
from lookback.core.streams.declaration import Stream

RULE: dict[str, Any] = {
    "rule_id": "r", "stream": "tx", "group_by": ["b", "a"], "window": "1 hour", "measures": {"n": "count(*)"},
    "when": "n >= 1000",
}  # fmt: skip
TX = Stream.from_dict(
    {
        "stream": "tx", "event_id": "id", "event_time": "at",
        "fields": {"id": "string", "at": "timestamp", "a": "string", "b": "string"},
    }
)  # fmt: skip
DESCRIBED: dict[str, Any] = {
    "tags": ["attack.t1110"],
    "references": ["https://example.org/a"],
    "runbook": "https://example.org/b",
    "source": {"format": "sigma"},
}
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


def test_c12_2_the_hash_tells_entities_apart_and_not_the_ways_to_write_them() -> None:
    alike = [{**RULE, "entity": "a"}, {**RULE, "entities": ["a"]}]
    both = [{**RULE, "entities": ["a", "b"]}, {**RULE, "entities": ["b", "a"]}]
    found = [{hash_document(each) for each in documents} for documents in ([RULE], alike, both)]
    assert [len(each) for each in found] == [1, 1, 1]
    assert len(set.union(*found)) == 3


def test_c12_2_descriptions_are_not_part_of_the_hash_nor_of_any_feature() -> None:
    assert set(DESCRIPTIONS) == {"description", *DESCRIBED}
    described = {**RULE, **DESCRIBED}
    assert hash_document(described) == hash_document(RULE)
    plain, same = (compile_rule(each, TX) for each in (RULE, described))
    assert (same.features, same.store, same.needs) == (plain.features, plain.store, plain.needs)
    session = {**RULE, "window": {"session": "1 hour"}}
    assert compile_rule({**session, **DESCRIBED}, TX).store == compile_rule(session, TX).store != ""


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


@pytest.mark.parametrize(
    ("approver", "user", "committers", "met", "figure"),
    [
        ("bob", "bob", None, True, "bob"),
        ("bob", "bob", [], True, "bob; its authors could not be checked, since the table's history names no users"),
        ("bob", "bob", ["ann"], True, "bob; by the table's history, ann wrote it"),
        # Bob wrote it under Ann's name, or approves it under the name of Eve.
        ("bob", "bob", ["bob"], False, "bob; by the table's history, bob wrote it"),
        ("eve", "bob", ["ann", "Bob"], False, "eve; by the table's history, ann and Bob wrote it"),
        ("Ann", "x", ["ann"], False, "Ann; by the table's history, ann wrote it"),
        ("", "x", [], False, "none; its authors could not be checked, since the table's history names no users"),
    ],
)
def test_c10_8_an_approval_is_checked_by_the_history_where_it_names_users(
    approver: str, user: str, committers: list[str] | None, met: bool, figure: str
) -> None:
    known = replace(ALL, approver=approver, user=user, committers=committers)
    (condition,) = check_gate(Gate(approval=True), known)
    assert (condition.met, condition.figure) == (met, figure)
    if not met:
        assert condition.remedy.startswith("ask somebody other than ann")


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
    assert read(tmp_path, "gate: {enforce: true}") == Gate(enforce=True)
    for wrong, message in {
        "{test: 1}": "gate has no condition 'test'; did you mean 'tests'",
        "{tests: 1.5}": "gate.tests must be a number from 0 to 1000, got '1.5'",
        "{min_precision: 2}": "gate.min_precision must be a number from 0 to 1, got '2'",
        "{max_alerts_per_day: 5}": "gate.backtest_days is missing",
        "{approval: perhaps}": "gate.approval must be true or false, got 'perhaps'",
        "{enforce: 1}": "gate.enforce must be true or false, got '1'",
    }.items():
        with pytest.raises(SetupError, match=message):
            read(tmp_path, f"gate: {wrong}")


STREAM = Stream.from_dict(
    {
        "stream": "tx",
        "event_id": "id",
        "event_time": "at",
        "fields": {"id": "bigint", "at": "timestamp", "a": "int", "b": "int"},
    }
)
PROOF = write_evidence(RULE, check_gate(GATE, ALL), "2026-03-01T00:00:00Z")
OF_ANOTHER = write_evidence({**RULE, "when": "n >= 1"}, [], "2026-03-01T00:00:00Z")


def test_c10_8_enforcement_asks_for_evidence_and_with_approval_for_another_person() -> None:
    assert [Gate().enforced, Gate(enforce=True).enforced, Gate(approval=True).enforced] == ["", EVIDENCE, ""]
    assert Gate(enforce=True, approval=True).enforced == APPROVAL


@pytest.mark.parametrize(
    ("author", "approver", "evidence", "with_evidence", "with_approval"),
    [
        ("ann", "bob", PROOF, "", ""),
        (None, "bob", PROOF, "", ""),
        ("ann", None, PROOF, "", "nobody approved it"),
        ("ann", " ", PROOF, "", "nobody approved it"),
        (None, None, PROOF, "", "nobody approved it"),
        ("ann", "Ann ", PROOF, "its author, 'ann', approved it", "its author, 'ann', approved it"),
        ("ann", "bob", None, "it has no evidence", "it has no evidence"),
        ("ann", "ann", "", "it has no evidence", "it has no evidence"),
        ("ann", "bob", OF_ANOTHER, "its evidence is for another document", "its evidence is for another document"),
        ("ann", "bob", "no json", "its evidence is for another document", "its evidence is for another document"),
    ],
)
def test_c10_8_an_enforced_gate_decides_by_the_row_alone(
    author: str | None, approver: str | None, evidence: str | None, with_evidence: str, with_approval: str
) -> None:
    for asked, expected in ((EVIDENCE, with_evidence), (APPROVAL, with_approval)):
        found = find_objection(RULE, author, approver, evidence, required=asked)
        assert found.startswith(expected)
        assert bool(found) == bool(expected)


def change(version: int | None, status: str = "active", **more: Any) -> RuleChange:
    """A row under an enforced gate; evidence and approval only if given."""
    document = more.pop("document", RULE)
    row = RuleChange("insert", 0, "r", version, status, json.dumps(document), gate=APPROVAL, author="ann")
    return replace(row, **more)


PROVEN = {"evidence": PROOF, "approved_by": "bob"}
MESSAGE = "Look: {n}"


def apply(book: RuleBook, *changes: RuleChange) -> list[LogRow]:
    """The log of changes, each of a commit of its own."""
    log: list[LogRow] = []
    for at, each in enumerate(changes, 1):
        log += book.apply([replace(each, commit=at)], at)[0]
    return log


@pytest.mark.parametrize(
    ("changes", "actions", "in_force"),
    {
        "without evidence": ([change(1)], ["rejected"], []),
        "with it": ([change(1, **PROVEN)], ["activated"], [(1, "active")]),
        "the last good version goes on": (
            [change(1, **PROVEN), change(2, document={**RULE, "when": "n >= 1"}, **PROVEN)],
            ["activated", "rejected"], [(1, "active")],
        ),
        "other statuses need none": (
            [change(1, "draft"), change(2, "shadow"), change(3, "paused"), change(4, "retired")],
            ["drafted", "shadowed", "paused", "retired"], [],
        ),
        "a draft made active by an UPDATE": (
            [change(1, "draft"), change(1, change="update")], ["drafted", "rejected"], [],
        ),
        "a rejected row is mended": (
            [change(1), change(1, change="update", **PROVEN)], ["rejected", "activated"], [(1, "active")],
        ),
        "pause and resume carry the evidence on": (
            [change(1, **PROVEN), change(2, "paused", **PROVEN), change(3, **PROVEN)],
            ["activated", "paused", "activated"], [(3, "active")],
        ),
        "resumed without it": (
            [change(1, **PROVEN), change(2, "paused"), change(3)],
            ["activated", "paused", "rejected"], [(2, "paused")],
        ),
        "quarantined by the engine": (
            [change(1, **PROVEN), change(2, "quarantined", evidence='{"quarantined": 1}')],
            ["activated", "quarantined"], [],
        ),
        "admitted before the gate, its comment updated since": (
            [change(1, gate=""), change(1, change="update", author="bob")], ["activated"], [(1, "active")],
        ),
        "admitted before the gate, its document updated since": (
            [change(1, gate=""), change(1, change="update", document={**RULE, "when": "n >= 1"})],
            ["activated", "rejected"], [(1, "active")],
        ),
        "the message of what is in force, updated": (
            [change(1, **PROVEN), change(1, change="update", document={**RULE, "message": MESSAGE}, **PROVEN)],
            ["activated", "activated"], [(1, "active")],
        ),
        "a shadow stays beside what is rejected": (
            [change(1, **PROVEN), change(2, "shadow"), change(3)],
            ["activated", "shadowed", "rejected"], [(1, "active"), (2, "shadow")],
        ),
        "deleted": ([change(1, **PROVEN), change(1, change="delete")], ["activated", "retired"], []),
        "no version": ([change(None), change(None, **PROVEN)], ["rejected", "activated"], [(1, "active")]),
    }.values(),
)  # fmt: skip
def test_c10_8_the_stream_rejects_an_active_row_without_evidence_and_nothing_else(
    changes: list[RuleChange], actions: list[str], in_force: list[tuple[int, str]]
) -> None:
    book = RuleBook(STREAM, {"tx": STREAM})
    assert [row.action for row in apply(book, *changes)] == actions
    assert [(entry.version, entry.status) for entry, _ in book.in_force()] == in_force


def test_c10_8_the_log_says_what_to_do_about_a_rejected_row() -> None:
    (row,) = apply(RuleBook(STREAM, {"tx": STREAM}), change(1))
    assert (row.action, row.version) == ("rejected", 1)
    assert row.message == (
        "the gate is enforced: version 1 is not active, since it has no evidence that it met the gate (evidence); publish it "
        "as a draft, then run `lookback rules activate r`"
    )


def test_c10_8_commands_need_no_evidence() -> None:
    book = RuleBook(STREAM, {"tx": STREAM})
    commands = [RuleChange("insert", 1, "*", None, each, None, gate=APPROVAL) for each in ("clear_state", "retire_all")]
    assert [row.action for row in apply(book, *commands)] == ["clear_state", "retire_all"]

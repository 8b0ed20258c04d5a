"""Contract 10.7: a version in shadow beside the active one, which rows end which role, and what is a role's own."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

import lookback
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.roles import find_roles, write_quarantined
from lookback.core.rules.rulebook import RuleBook
from lookback.core.rules.wording import list_changes
from lookback.core.streams.declaration import Stream

FIELDS = {"id": "bigint", "at": "timestamp", "card": "string", "amount": "decimal(18,2)"}
TX, OTHER = (
    Stream.from_dict({"stream": name, "event_id": "id", "event_time": "at", "fields": FIELDS})
    for name in ("tx", "other")
)
STREAMS = {"tx": TX, "other": OTHER}


def document(limit: int = 2, **more: Any) -> dict[str, Any]:
    rule = {"rule_id": "r", "stream": "tx", "group_by": ["card"], "window": "10 seconds", "measures": {"n": "count(*)"}}
    return {**rule, "when": f"n >= {limit}", **more}


def row(version: int | None, status: str, change: str = "insert", **more: Any) -> RuleChange:
    evidence = more.pop("evidence", None)
    return RuleChange(
        change, more.pop("commit", version or 9), "r", version, status, json.dumps(document(**more)), evidence
    )


def in_force(*changes: RuleChange) -> list[tuple[int, str]]:
    """Versions and statuses after the changes, each in a commit of its own, and again from the book as it is stored."""
    book = RuleBook(TX, STREAMS)
    for at, change in enumerate(changes, 1):
        book.apply([replace(change, commit=at)], None)
    again = RuleBook(TX, STREAMS)
    again.load(book.to_json())
    found, reread = ([(e.version, e.status, e.lane) for e, _ in each.in_force()] for each in (book, again))
    assert found == reread
    assert len({lane for _, _, lane in found}) == len(found)
    return [(version, status) for version, status, _ in found]


ACTIVE, SHADOW = row(1, "active"), row(2, "shadow")


@pytest.mark.parametrize(
    ("changes", "expected"),
    {
        "beside": ([ACTIVE, SHADOW], [(1, "active"), (2, "shadow")]),
        "beside a paused one": ([row(1, "paused"), SHADOW], [(1, "paused"), (2, "shadow")]),
        "alone": ([SHADOW], [(2, "shadow")]),
        "a new shadow": ([ACTIVE, SHADOW, row(3, "shadow")], [(1, "active"), (3, "shadow")]),
        "a new shadow alone": ([SHADOW, row(3, "shadow")], [(3, "shadow")]),
        "active ends both": ([ACTIVE, SHADOW, row(3, "active")], [(3, "active")]),
        "retired ends both": ([ACTIVE, SHADOW, row(3, "retired")], []),
        "paused leaves the shadow": ([ACTIVE, SHADOW, row(3, "paused")], [(3, "paused"), (2, "shadow")]),
        "paused leaves a shadow alone": ([SHADOW, row(3, "paused")], [(3, "paused"), (2, "shadow")]),
        "draft": ([ACTIVE, SHADOW, row(3, "draft")], [(1, "active"), (2, "shadow")]),
        "deleted shadow": ([ACTIVE, SHADOW, row(2, "shadow", "delete")], [(1, "active")]),
        "deleted active": ([ACTIVE, SHADOW, row(1, "active", "delete")], [(2, "shadow")]),
        "both deleted": ([ACTIVE, SHADOW, row(1, "active", "delete"), row(2, "shadow", "delete")], []),
        "shadow updated to active": ([ACTIVE, SHADOW, row(2, "active", "update")], [(2, "active")]),
        "active updated, and nothing changed": ([ACTIVE, SHADOW, row(1, "active", "update")], [(1, "active"), (2, "shadow")]),
        "active updated to shadow": ([ACTIVE, SHADOW, row(1, "shadow", "update")], [(1, "shadow")]),
        "active updated to paused": ([ACTIVE, SHADOW, row(1, "paused", "update")], [(1, "paused"), (2, "shadow")]),
        "shadow updated to paused": ([ACTIVE, SHADOW, row(2, "paused", "update")], [(2, "paused")]),
        "quarantined active": (
            [ACTIVE, SHADOW, row(3, "quarantined", evidence=write_quarantined(1))], [(2, "shadow")],
        ),
        "quarantined shadow": (
            [ACTIVE, SHADOW, row(3, "quarantined", evidence=write_quarantined(2))], [(1, "active")],
        ),
        "quarantined without evidence": ([ACTIVE, row(4, "shadow"), row(5, "quarantined")], [(1, "active")]),
        "quarantined by hand": ([ACTIVE, row(4, "shadow"), row(7, "quarantined", evidence="x")], [(4, "shadow")]),
        "a challenger again": (
            [ACTIVE, SHADOW, row(1, "active", "delete"), row(3, "active"), row(4, "shadow")],
            [(3, "active"), (4, "shadow")],
        ),
    }.values(),
    ids=lambda value: "",
)  # fmt: skip
def test_c10_7_roles(changes: list[RuleChange], expected: list[tuple[int, str]]) -> None:
    assert in_force(*changes) == expected


def test_c10_7_an_insert_is_above_both_versions_and_above_what_ended_one() -> None:
    book = RuleBook(TX, STREAMS)
    book.apply([ACTIVE, row(3, "shadow"), row(4, "quarantined", evidence=write_quarantined(1))], None)
    log, _ = book.apply(
        [row(2, "active", commit=10), row(4, "active", commit=11), row(None, "active", commit=12)], None
    )
    assert [(each.version, each.action) for each in log] == [(2, "rejected"), (4, "rejected"), (5, "activated")]
    assert "superseded: version 4 is not above version 4" in log[1].message


def test_c10_7_a_quarantine_of_a_version_that_is_not_in_force_is_rejected() -> None:
    book = RuleBook(TX, STREAMS)
    log, _ = book.apply([ACTIVE, row(3, "active"), row(4, "quarantined", evidence=write_quarantined(1))], None)
    assert [each.action for each in log] == ["activated", "activated", "rejected"]
    assert "version 1, which the row quarantines, is not in force (evidence)" in log[2].message
    assert [(e.version, e.status) for e, _ in book.in_force()] == [(3, "active")]


def test_c10_7_a_shadow_for_another_stream_leaves_the_active_version_in_this_one() -> None:
    here, there = RuleBook(TX, STREAMS), RuleBook(OTHER, STREAMS)
    changes = [ACTIVE, SHADOW, row(3, "shadow", stream="other")]
    logs = [[(each.version, each.action) for each in book.apply(changes, None)[0]] for book in (here, there)]
    assert logs == [[(1, "activated"), (2, "shadowed"), (3, "retired")], [(3, "shadowed")]]
    assert [[e.version for e, _ in book.in_force()] for book in (here, there)] == [[1], [3]]


def test_c4_an_update_that_moves_a_version_to_another_stream_retires_it_in_the_one_that_it_leaves() -> None:
    here, there = RuleBook(TX, STREAMS), RuleBook(OTHER, STREAMS)
    changes = [ACTIVE, replace(row(1, "active", stream="other"), change="update", commit=9)]
    logs = [[(each.version, each.action) for each in book.apply(changes, None)[0]] for book in (here, there)]
    assert logs == [[(1, "activated"), (1, "retired")], [(1, "activated")]]
    assert [[e.version for e, _ in book.in_force()] for book in (here, there)] == [[], [1]]


def test_c10_7_retire_all_ends_both_and_logs_each() -> None:
    book = RuleBook(TX, STREAMS)
    changes = [ACTIVE, SHADOW, RuleChange("insert", 9, "*", None, "retire_all", None)]
    log, _ = book.apply(changes, None)
    assert [(each.rule_id, each.version, each.action) for each in log[2:]] == [
        ("r", 1, "retired"), ("r", 2, "retired"), ("*", None, "retire_all"),
    ]  # fmt: skip
    assert book.in_force() == []


def events(*seconds: int, start: int = 0) -> list[dict[str, Any]]:
    return [
        {"id": start + at, "at": f"2026-03-01T10:00:{second:02d}Z", "card": "x", "amount": "1"}
        for at, second in enumerate(seconds)
    ]


def shown(harness: lookback.Harness) -> list[tuple[str | None, int, str, str]]:
    return [(alert.event_id, alert.rule_version, alert.mode, alert.verdict) for alert in harness.alerts]


def test_c10_7_both_versions_alert_and_are_told_apart() -> None:
    harness = lookback.Harness(TX)
    harness.rule(document(2))
    harness.rule(document(1), "shadow")
    harness.events(events(1, 2))
    assert shown(harness) == [("0", 2, "shadow", "raised"), ("1", 1, "active", "raised"), ("1", 2, "shadow", "raised")]
    assert len({alert.alert_id for alert in harness.alerts}) == 3
    assert harness.state_rows() == 2, "rows of windows are shared"


def test_c10_7_suppress_is_per_role() -> None:
    harness = lookback.Harness(TX)
    harness.rule(document(2, suppress="5 seconds"))
    harness.rule(document(1, suppress="5 seconds"), "shadow")
    harness.events(events(1, 2, 8))
    assert shown(harness) == [
        ("0", 2, "shadow", "raised"),
        ("1", 1, "active", "raised"), ("1", 2, "shadow", "suppressed"),
        ("2", 1, "active", "raised"), ("2", 2, "shadow", "raised"),
    ]  # fmt: skip
    # The version that becomes active goes on with the alerts of its role, not with those in shadow.
    harness.rule(document(1, suppress="60 seconds"))
    harness.events(events(9, start=3))
    assert shown(harness)[5:] == [("3", 3, "active", "suppressed")]
    alone = lookback.Harness(TX)
    alone.rule(document(1, suppress="60 seconds"), "shadow")
    alone.events(events(1))
    alone.rule(document(1, suppress="60 seconds"))
    alone.events(events(2, 3, start=1))
    assert shown(alone) == [
        ("0", 1, "shadow", "raised"),
        ("1", 2, "active", "raised"),
        ("2", 2, "active", "suppressed"),
    ]


def test_c10_7_resets_are_per_role() -> None:
    harness = lookback.Harness(TX)
    harness.rule(document(3, reset_on_alert=True))
    harness.rule(document(2, reset_on_alert=True), "shadow")
    harness.events(events(1, 2, 3, 4))
    assert shown(harness) == [
        ("1", 2, "shadow", "raised"), ("2", 1, "active", "raised"), ("3", 2, "shadow", "raised"),
    ]  # fmt: skip


def test_c10_7_matches_are_per_role() -> None:
    def followed(limit: int) -> dict[str, Any]:
        steps = [{"name": "small", "where": "amount < 2", "at_least": limit}, {"name": "next", "where": "amount >= 2"}]
        sequence = {"within": "20 seconds", "expiry": "fixed", "steps": steps}
        return {
            "rule_id": "r",
            "stream": "tx",
            "group_by": ["card"],
            "sequence": sequence,
            "reset_on_alert": limit == 1,
        }

    rows = [{**each, "amount": amount} for each, amount in zip(events(1, 2, 3, 4), ("1", "5", "1", "5"), strict=True)]
    both, one, other = (lookback.Harness(TX) for _ in range(3))
    for harness, limits in ((both, (2, 1)), (one, (2,)), (other, (1,))):
        for limit in limits:
            harness.rule(followed(limit), "active" if limit == 2 else "shadow", version=3 - limit)
        harness.events(rows)
    assert [(a.event_id, a.mode) for a in both.alerts] == [("1", "shadow"), ("3", "active"), ("3", "shadow")]
    assert sorted(map(repr, both.alerts)) == sorted(map(repr, [*one.alerts, *other.alerts]))


def test_c10_7_quarantine_of_a_broken_version_leaves_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = lookback.Harness(TX)
    harness.rule(document(1))
    harness.rule(document(1, message="{n} uses"), "shadow")
    harness.events(events(1))
    book = harness._state.book
    book.mark_broken(book.challengers["r"])
    assert book.broken == {("r", 2)}
    harness.events(events(2, start=1))
    assert shown(harness)[2:] == [("1", 1, "active", "raised")]


def test_c10_7_the_rows_of_the_table_show_the_roles() -> None:
    def roles(*rows: tuple[int, str], **evidence: str) -> list[int]:
        listed = [{"version": v, "status": s, "evidence": evidence.get(f"v{v}")} for v, s in rows]
        return [each["version"] for each in find_roles(listed).listed]

    assert roles((1, "active"), (2, "shadow")) == [1, 2]
    assert roles((1, "active"), (2, "shadow"), (3, "paused"), (4, "draft")) == [3, 2, 4]
    assert roles((1, "active"), (2, "shadow"), (3, "draft"), (4, "active")) == [4]
    assert roles((1, "active"), (2, "shadow"), (3, "quarantined"), v3=write_quarantined(2)) == [1, 3]
    assert roles((1, "active"), (2, "shadow"), (3, "quarantined"), v3=write_quarantined(1)) == [3, 2]
    current = find_roles(
        [{"version": v, "status": s, "evidence": None} for v, s in ((1, "active"), (2, "shadow"))]
    ).current
    assert current is not None
    assert current["version"] == 1


def test_c10_7_the_difference_of_two_versions_in_words() -> None:
    before = {"when": "n >= 2", "measures": {"n": "count(*)", "m": "max(a)"}, "tests": []}
    after = {"when": "n >= 3", "measures": {"n": "count(*)"}, "tests": [], "suppress": "1 hour"}
    assert [str(change) for change in list_changes(before, after)] == [
        "when: 'n >= 2' becomes 'n >= 3'",
        "measures.m is gone, it was 'max(a)'",
        "suppress is new: '1 hour'",
    ]
    assert list_changes(after, after) == []
    # Lists of the same length are compared item by item, others as a whole.
    tests = {"tests": [{"name": "a", "events": [[1]]}, {"name": "b", "events": []}], "group_by": ["x"]}
    more = {"tests": [{**test, "parameters": {"p": 1}} for test in tests["tests"]], "group_by": ["x", "y"]}
    assert [str(change) for change in list_changes(tests, more)] == [
        "tests[0].parameters is new: {'p': 1}",
        "tests[1].parameters is new: {'p': 1}",
        "group_by: ['x'] becomes ['x', 'y']",
    ]

"""Contract 10.9: the order in which changes of rules took effect is that of the rules table, whatever the log's rows say of it."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import replace
from itertools import count
from typing import Any
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from core.cases import STREAMS
from lookback.core.engine.schedule import Schedule
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.compiled import CompiledRule
from lookback.core.rules.rulebook import RuleBook
from lookback.core.rules.rulelog import LogRow
from lookback.core.streams.arrival import arrival_number
from lookback.core.streams.declarations import Declarations
from lookback.spark.explaining import history
from lookback.spark.explaining.history import Lanes, RuleHistory
from lookback.spark.record.evaluations import Term
from lookback.spark.record.record import Record

OWN = STREAMS["plain"]
BOTH = {OWN.name: OWN, "other": replace(OWN, name="other")}
STATUSES = ["active", "active", "shadow", "shadow", "shadow", "paused", "paused", "retired"]


@st.composite
def batches(draw: st.DrawFn) -> list[list[RuleChange]]:
    """Changes of two rules between commits, each time with an advance; rows may move a rule to another stream and back.

    Many of them are UPDATEs, also several of one version in a batch.
    """
    commits, versions, found = count(1), {"r": 0, "s": 0}, list[list[RuleChange]]()
    for at in range(draw(st.integers(1, 4))):
        found.append([])
        for what in draw(
            st.permutations(["advance", *draw(st.lists(st.sampled_from("rrrrs"), min_size=2, max_size=5))])
        ):
            if what == "advance":
                time = json.dumps({"time": f"2024-01-01T00:00:0{at}Z"})
                found[-1].append(RuleChange("insert", next(commits), "*", None, "advance", time))
                continue
            name = "s" if what == "s" else "r"
            stream, limit = draw(st.sampled_from([OWN.name, "other"])), draw(st.integers(1, 3))
            document = json.dumps(
                {"rule_id": name, "stream": stream, "group_by": [], "window": f"{limit} seconds", "measures": {"m": "count(*)"},
                 "when": f"m >= {limit}"}
            )  # fmt: skip
            status = draw(st.sampled_from(STATUSES))
            number = draw(st.integers(1, versions[name] + 1))
            kind = "insert" if number > versions[name] else "update"
            versions[name] = max(versions[name], number)
            found[-1].append(RuleChange(kind, next(commits), name, number, status, document))
    return found


def read_history(changes: list[RuleChange], logged: list[LogRow]) -> RuleHistory:
    """The history of rules, of which tables have these changes and this log."""
    tables: Any = mock.Mock()
    known = {
        "Term": mock.Mock(find=lambda *_: Term()),
        "Record": mock.Mock(read=lambda *_: Record(Term(), logged, Declarations.of(OWN), 0, changes)),
    }
    with mock.patch.multiple(history, **known):
        return RuleHistory(tables, OWN, BOTH)


# The documents of each rule that are in force after so many advances, of the changes after a commit.
States = dict[tuple[int, int], dict[str, list[str]]]


def list_documents(book: RuleBook) -> dict[str, list[str]]:
    """The documents of each rule that are in force."""
    entries = [entry for entry, _ in book.in_force()]
    return {name: sorted(each.document for each in entries if each.rule_id == name) for name in "rs"}


def follow_book(given: list[list[RuleChange]]) -> tuple[RuleBook, list[LogRow], States]:
    """What the stream makes of the changes: its rules in the end, its log, and its rules after each."""
    book, logged, states, advances = RuleBook(OWN, BOTH), list[LogRow](), States(), 0
    for arrival, batch in enumerate(given):
        for change in batch:
            log, commands = book.apply([change], arrival)
            logged += log
            advances += len(commands)
            states[arrival, advances] = list_documents(book)
    return book, logged, states


def follow_lanes(lanes: Lanes, states: States) -> States:
    """The documents in force by the activations, at the places of `states`."""
    held, found, left = dict[str, CompiledRule](), States(), deque(lanes.activations)
    for place in states:
        while left and (arrival_number(left[0].arrival), left[0].advances) <= place:
            each = left.popleft()
            if each.rule is None:
                held.pop(each.rule_id, None)
            else:
                held[each.rule_id] = each.rule
        found[place] = {
            name: sorted(json.dumps(rule.spec.document) for rule in held.values() if rule.spec.rule_id == name)
            for name in "rs"
        }
    assert not left
    return found


# A rebuild and a proof apply each change where the log has it.
@given(batches())
def test_c4_c10_6_rows_that_update_versions_or_move_them_between_streams_come_into_force_again_where_they_did(
    given: list[list[RuleChange]],
) -> None:
    _, logged, states = follow_book(given)
    changes = [change for batch in given for change in batch]
    schedule = Schedule.from_log(changes, logged, None, Declarations.of(OWN))
    book = RuleBook(OWN, BOTH)
    for arrival in range(len(given)):
        book.apply([each for each in changes if schedule.arrivals.get(each.commit) == arrival], arrival)
        expected = next(state for place, state in reversed(states.items()) if place[0] == arrival)
        assert list_documents(book) == expected


# In force is the last row by (commit version, version), and what is explained is what was in force.
@given(batches())
def test_c4_c10_9_rows_that_update_versions_or_move_them_between_streams_take_effect_in_the_order_of_the_rules_table(
    given: list[list[RuleChange]],
) -> None:
    book, logged, states = follow_book(given)
    known = read_history([change for batch in given for change in batch], logged)
    lanes = Lanes(known.list_obeyed(len(given)), known, {"rule_id": "r", "rule_version": 1})
    assert follow_lanes(lanes, states) == states
    for name in ("r", "s"):
        held = [each[name] for each in (book.entries, book.challengers) if name in each]
        here = [(each.version, each.status) for each in held if each.is_in_force and each.stream == OWN.name]
        assert [(each.version, each.status) for each in lanes.list_roles(name)] == here

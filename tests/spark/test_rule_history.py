"""Contract 10.9: the order in which changes of rules took effect is that of the rules table, whatever the log's rows say of it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from typing import Any
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import Row

from core.cases import STREAMS
from lookback.core.rules.rulebook import LogRow, RuleBook, RuleChange
from lookback.core.streams.declarations import Declarations
from lookback.spark.explaining import history
from lookback.spark.explaining.history import STATUS_BY_ACTION, Lanes, RuleHistory
from lookback.spark.stream.rebuild import Term

OWN = STREAMS["plain"]
BOTH = {OWN.name: OWN, "other": replace(OWN, name="other")}
STATUSES = ["active", "active", "shadow", "shadow", "shadow", "paused", "paused", "retired"]


@st.composite
def batches(draw: st.DrawFn) -> list[list[RuleChange]]:
    """Changes of two rules between commits, each time with an advance; versions may move a rule to another stream and back."""
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
                {"rule_id": name, "stream": stream, "group_by": [], "window": "1 second", "measures": {"m": "count(*)"},
                 "when": f"m >= {limit}"}
            )  # fmt: skip
            status = draw(st.sampled_from(STATUSES))
            versions[name] += 1
            found[-1].append(RuleChange("insert", next(commits), name, versions[name], status, document))
    return found


def read_history(changes: list[RuleChange], logged: list[LogRow]) -> RuleHistory:
    """The history of rules, of which tables have these changes and this log."""
    tables: Any = mock.Mock()
    known = {
        "Term": mock.Mock(find=lambda *_: Term()),
        "read_declarations": lambda *_: Declarations.of(OWN),
        "read_log": lambda *_: logged,
        "find_first_readable": lambda *_: 0,
        "restore_rule_changes": lambda *_: changes,
    }
    with mock.patch.multiple(history, **known):
        return RuleHistory(tables, OWN, BOTH)


@given(batches())
def test_c10_9_versions_that_move_a_rule_between_streams_take_effect_in_the_order_of_the_rules_table(
    given: list[list[RuleChange]],
) -> None:
    book, expected, logged = RuleBook(OWN, BOTH), list[Row](), list[LogRow]()
    for arrival, batch in enumerate(given):
        for change in batch:
            log, _ = book.apply([change], arrival)
            logged += log
            expected += [
                Row(**vars(row), batch_id=arrival) for row in log if row.action in {*STATUS_BY_ACTION, "advance"}
            ]

    # As `read_obeyed` reads it.
    shuffled = sorted(expected, key=lambda row: (row["arrival"], row["version"] is None, row["version"] or 0))
    known = read_history([change for batch in given for change in batch], logged)
    found = known.sort_obeyed(shuffled)

    assert found == expected
    lanes = Lanes(found, known, {"rule_id": "r", "rule_version": 1})
    for name in ("r", "s"):
        held = [each[name] for each in (book.entries, book.challengers) if name in each]
        here = [(each.version, each.status) for each in held if each.is_in_force and each.stream == OWN.name]
        assert [(each.version, each.status) for each in lanes.list_roles(name)] == here

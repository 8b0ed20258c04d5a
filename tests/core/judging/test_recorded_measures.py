"""Rules that record the measures of every event that they judge, instead of raising alerts (contract 12.11)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pyarrow as pa
import pytest
from cases import STREAMS, measured_cases
from hypothesis import given
from test_equals_oracle import (
    DictStore,
    changes_after,
    deleted_in,
    lists_of,
    new_state,
    regression,
    run_engine,
    run_oracle,
    small_pages,
)

from lookback.core.engine.batch import Batch
from lookback.core.engine.evaluation import Evaluator
from lookback.core.rules.compiling import compile_rule
from lookback.core.streams import measured
from lookback.core.streams.arrival import find_marks
from lookback.core.streams.eventrows import read_events
from lookback.core.streams.measured import MeasuredPlace
from lookback.core.values.columns import to_text
from lookback.core.values.lists import KnownLists

_END = 10**9
_COMPLETE = "window_complete"


def places_of(case: dict[str, Any], **bounds: int) -> dict[str, MeasuredPlace]:
    """Where the rules of a case record; those with the same key share a table."""
    places, keys = {}, list[Any]()
    for change in case["changes"]:
        if change["status"] != "lists":
            rule = compile_rule(change["document"], STREAMS[case["stream"]])
            keys += [] if rule.key in keys else [rule.key]
            names = {name: f"{change['rule_id']}.{name}" for name in (*(m.name for m in rule.measures), _COMPLETE)}
            places[change["rule_id"]] = MeasuredPlace(keys.index(rule.key), names, **bounds)
    return places


def record(case: dict[str, Any], **bounds: int) -> list[tuple[int, pa.Table]]:
    """What the evaluator records as the stream would run it, in shards and batches."""
    stream, places = STREAMS[case["stream"]], places_of(case, **bounds)
    events, _ = read_events(case["rows"], stream, 1)
    marks = find_marks(events, events.commits)
    edges = sorted({0, *(change["after"] for change in case["changes"]), *case["cuts"]})
    tables = []
    with small_pages() if case.get("small_pages") else nullcontext():
        for shard in range(case["shards"]):
            evaluator = Evaluator(stream, shard, case["shards"], lists=KnownLists(lists_of(case)), flagging=places)
            state = new_state(stream, case.get("cached"))
            state.begin(DictStore())
            for start, end in zip(edges, [*edges[1:], _END], strict=True):
                here = events.take((events.commits > start) & (events.commits <= end))
                part = {commit: high for commit, high in marks.items() if start < commit <= end}
                batch = Batch(here, deleted_in(case, events, start, end), part, changes_after(case, start))
                output = evaluator.process(state, batch)
                assert output.alerts == []
                assert output.flagged == []
                tables += [(each.group, table) for each in output.measured for table in each.list_tables()]
    return tables


def rows_of(tables: list[tuple[int, pa.Table]]) -> dict[tuple[int, str], dict[str, Any]]:
    """The rows of all tables, by group and event; each event has one row in a group."""
    rows = [(group, row) for group, table in tables for row in table.to_pylist()]
    found = {(group, row["event_id"]): row for group, row in rows}
    assert len(found) == len(rows)
    return found


def assert_records_equal_oracle(case: dict[str, Any]) -> None:
    oracle, places, found = run_oracle(case), places_of(case), rows_of(record(case))
    expected = {(places[rule_id].group, event_id) for rule_id, event_id in oracle.measured}
    assert found.keys() == expected
    for (group, event_id), row in found.items():
        for rule_id, place in places.items():
            if place.group == group:
                texts, complete = oracle.measured.get((rule_id, event_id)) or ({}, None)
                # A table has no columns of a rule that measured none of its events.
                own = {name: to_text(row.get(column)) for name, column in place.names.items() if name != _COMPLETE}
                assert own == (texts or dict.fromkeys(own)), (rule_id, event_id)
                assert row.get(place.names[_COMPLETE]) is complete


@given(measured_cases())
def test_c12_11_recorded_measures_equal_the_oracle(case: dict[str, Any]) -> None:
    assert_records_equal_oracle(case)


def rule(**more: Any) -> dict[str, Any]:
    return {"group_by": ["k"], "window": "5 microseconds", "measures": {"m0": "count(*)"}, "when": "m0 >= 2"} | more


EVENTS = [{"id": f"e{at}", "at": at, "arrival": at} for at in range(1, 13)]
# The watermark is 3 microseconds behind the latest event, and six more are allowed: e20 is late, and e21 lost.
LATE = [*EVENTS, {"id": "e20", "at": 6, "arrival": 13}, {"id": "e21", "at": 1, "arrival": 13}]


@pytest.mark.parametrize(
    "policy",
    [{}, {"late": "record"}, {"late": "revise"}, {"reset_on_alert": True}, {"effective_from": 5, "suppress": "1 hour"}],
    ids=str,
)
@pytest.mark.parametrize("cuts", [(), (3, 6), tuple(range(1, 14))], ids=str)
def test_c12_11_an_event_is_measured_once_as_of_its_arrival(policy: dict[str, Any], cuts: tuple[int, ...]) -> None:
    case = regression("", [rule(**policy)], LATE, cuts=cuts)
    assert_records_equal_oracle(case)
    rows = {event_id: row["r1.m0"] for (_, event_id), row in rows_of(record(case)).items()}
    assert "e21" not in rows
    assert ("e20" in rows) == (policy.get("late") != "record")
    if "reset_on_alert" in policy:
        # The second of two is over two events, and then all is forgotten.
        assert [rows[f"e{at}"] for at in range(1, 13)] == [1, 2] * 6
    else:
        assert [rows[f"e{at}"] for at in range(1, 13)] == [1, 2, 3, 4, 5, 6, 6, 6, 6, 6, 6, 6]


def test_c12_11_recorded_measures_are_those_of_the_alerts() -> None:
    measures = {"m0": "count(*)", "m1": "sum(a)", "m2": "last(k)"}
    case = regression("", [rule(measures=measures, when="true")], LATE, cuts=(4,))
    alerts = run_engine(case).alerts
    found = rows_of(record(case))
    assert len(alerts) == len(found) == 13
    for alert in alerts:
        row = found[0, alert.event_id or ""]
        assert {name: row[f"r1.{name}"] for name in alert.measures} == alert.measures
        assert (row["r1.window_complete"], row["arrival"], row["event_time"], row["k"]) == (
            alert.window_complete, alert.arrival, alert.event_time, alert.key["k"],
        )  # fmt: skip


def test_c12_11_only_events_within_the_range_are_recorded() -> None:
    case = regression("", [rule()], EVENTS)
    found = rows_of(record(case, since=4, until=7))
    assert {event_id: row["r1.m0"] for (_, event_id), row in found.items()} == {"e4": 4, "e5": 5, "e6": 6}


def test_c12_11_a_long_table_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [rule(), rule(where="n = 1", when="true", measures={"m1": "max(id)", "m2": "collect_set(n)"})]
    events = [{**each, "n": at % 3} for at, each in enumerate(EVENTS)]
    case = regression("", documents, events)
    whole = record(case)
    # A row has an array, which counts as 30, and eight values beside it.
    monkeypatch.setattr(measured, "_MAX_VALUES", 2 * 38)
    parts = record(case)
    assert [len(table) for _, table in parts] == [2] * 6
    assert rows_of(parts) == rows_of(whole)
    assert [row["r2.m1"] for row in rows_of(whole).values()].count(None) == 8

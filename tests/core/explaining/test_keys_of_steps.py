"""Explanations of a sequence whose steps have keys of their own (12.6): under one key, as an alert has it."""

from __future__ import annotations

from typing import Any

from test_evidence import moment

from lookback.core.explaining.eventexplanation import EventExplanation, Standing
from lookback.core.explaining.events import explain_event_at, find_key_fields
from lookback.core.explaining.evidence import Activation, Clock, Evidence
from lookback.core.rules.compiling import compile_rule
from lookback.core.streams.arrival import find_marks
from lookback.core.streams.declaration import Stream
from lookback.core.streams.declarations import Declarations
from lookback.core.streams.eventrows import read_events
from lookback.core.values.columns import to_text
from lookback.views.explanations import describe_event

STREAM = Stream.from_dict(
    {
        "stream": "hosts",
        "event_id": "id",
        "event_time": "at",
        "fields": {"id": "string", "at": "timestamp", "src": "string", "dst": "string", "n": "int"},
    }
)
RULE = compile_rule(
    {
        "rule_id": "r",
        "stream": "hosts",
        "group_by": ["src"],
        "sequence": {
            "within": "1 minute",
            "steps": [{"name": "login", "where": "n = 0"}, {"name": "remote", "where": "n = 1", "key": ["dst"]}],
            "until": "n = 3",
        },
    },
    STREAM,
)


def explain(given: list[tuple[str, str, str, int]], event_id: str) -> tuple[EventExplanation, Evidence]:
    """Explains an event among those that have its key for some step; events are (id, src, dst, n), a second apart."""
    rows: list[dict[str, Any]] = [
        {"id": name, "at": moment(at), "src": src, "dst": dst, "n": n, "arrival": 1 + at}
        for at, (name, src, dst, n) in enumerate(given)
    ]
    events = read_events(rows, STREAM, 1)[0].in_order_of_arrival()
    at = next(number for number, row in enumerate(rows) if row["id"] == event_id)
    (field,) = find_key_fields(RULE, {name: column.take(slice(at, at + 1)) for name, column in events.columns.items()})
    value = to_text(events.columns[field].item(at))
    of_key, _ = read_events([row for row in rows if value in (row["src"], row["dst"])], STREAM, 1)
    highs = {commit: high for commit, high in find_marks(events, events.commits).items() if high is not None}
    clock, activation = Clock(Declarations.of(STREAM), highs), Activation(None, "r", RULE)
    evidence = Evidence(RULE, of_key.in_order_of_arrival(), clock, [activation], key={"src": value})
    place = evidence.find_position(event_id)
    assert place is not None
    return explain_event_at(evidence, place, len(rows), Standing(1, "active"), {}, 0), evidence


def test_c12_6_an_event_is_explained_under_the_key_of_the_last_step_that_it_fits() -> None:
    given = [("a", "p", "x", 0), ("b", "x", "y", 0), ("c", "z", "p", 1), ("d", "p", "x", 1), ("e", "q", "q", 9)]
    found, _ = explain(given, "c")
    assert found.key == {"src": "p"}
    assert [part.holds for part in found.steps] == [False, True]
    assert str(found.steps[0]) == "step login: src = src of the key is false (src = z)"
    assert len(found.windows) == 1
    # d counts for x, where b has logged in; under p it would be nothing.
    found, _ = explain(given, "d")
    assert (found.key, len(found.windows)) == ({"src": "x"}, 1)
    # An event that fits no step has the key of group_by.
    assert explain(given, "e")[0].key == {"src": "q"}


def test_c12_6_steps_beside_an_expression_in_group_by_are_explained_under_its_key() -> None:
    document = {**RULE.spec.document, "group_by": [{"host": "lower(src)"}]}
    rule = compile_rule(document, STREAM)
    rows = [
        {"id": "a", "at": moment(0), "src": "P", "dst": "x", "n": 0, "arrival": 1},
        {"id": "c", "at": moment(1), "src": "z", "dst": "p", "n": 1, "arrival": 2},
    ]
    events = read_events(rows, STREAM, 1)[0]
    highs = {commit: high for commit, high in find_marks(events, events.commits).items() if high is not None}
    clock, activation = Clock(Declarations.of(STREAM), highs), Activation(None, "r", rule)
    evidence = Evidence(rule, events, clock, [activation], key={"host": "p"})
    place = evidence.find_position("c")
    assert place is not None
    found = explain_event_at(evidence, place, 2, Standing(1, "active"), {}, 0)
    assert (found.key, len(found.windows)) == ({"host": "p"}, 1)
    assert str(found.steps[0]) == "step login: lower(src) = host of the key is false (lower(src) = z)"


def test_c12_6_what_ends_a_match_and_how_far_it_came_go_by_the_key() -> None:
    given = [("a", "p", "x", 0), ("b", "x", "p", 3), ("c", "z", "p", 1)]
    assert len(explain(given, "c")[0].windows) == 1
    given[1] = ("b", "p", "x", 3)
    found, evidence = explain(given, "c")
    assert not found.windows
    assert evidence.ends_sequence.tolist() == [False, True, False]
    assert found.progress is not None
    assert [step.event_ids for step in found.progress.steps] == [(), ()]
    # A login elsewhere is no step of this key, though the event has it.
    found, _ = explain([("a", "y", "p", 0), ("c", "z", "p", 1)], "c")
    assert found.progress is not None
    assert [step.event_ids for step in found.progress.steps] == [(), ()]


def test_the_window_of_a_match_waits_for_nothing() -> None:
    found, _ = explain([("a", "h", "x", 0), ("b", "z", "h", 1)], "b")
    (line,) = (line for line in describe_event(found) if line.startswith("Window from"))
    assert line.endswith(" UTC")

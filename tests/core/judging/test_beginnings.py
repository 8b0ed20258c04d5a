"""A match of a sequence may begin at any event of step one, and the earliest that ends in an event gives its alert."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lookback
from lookback.core.judging.lookups import Contained, Peaks
from lookback.core.streams.declaration import Stream
from lookback.core.values.columns import from_values
from lookback.core.values.types import DOUBLE, STRING, DataType

STREAM = Stream.from_dict(
    {
        "stream": "s", "event_id": "id", "event_time": "at",
        "fields": {"id": "string", "at": "timestamp", "k": "string", "kind": "string", "tx": "string", "n": "int", "amount": "decimal(18,2)"},
        "max_out_of_orderness": "10 seconds", "allowed_lateness": "1 hour",
    }
)  # fmt: skip
_PAIRS = [
    {"name": "req", "where": "kind = 'REQ'"},
    {"name": "err", "where": "kind = 'ERR' and array_contains(req.tx, tx)"},
]


def alerts_of(
    steps: list[dict[str, Any]], *events: dict[str, Any], message: str = "", **more: Any
) -> list[tuple[Any, ...]]:
    """The verdicts, triggering events and evidence for events of one key, named by letters and a minute apart.

    more: of the sequence, or `reset_on_alert` of the rule.
    """
    harness = lookback.Harness(STREAM)
    own = {key: more.pop(key) for key in ("reset_on_alert",) if key in more}
    sequence = {"within": "10 minutes", **more, "steps": steps}
    harness.rule({"rule_id": "r", "stream": "s", "group_by": ["k"], "sequence": sequence, "message": message, **own})
    for at, event in enumerate(events):
        harness.events([{"id": chr(97 + at), "at": f"2026-03-01T10:{at:02}:00Z", "k": "x", **event}])
    return [
        (alert.verdict, alert.event_id, "".join(alert.evidence), *([alert.message] if message else []))
        for alert in harness.alerts
    ]


def test_c4_each_request_that_fails_alerts_also_after_another_one_did() -> None:
    """
    minute   0        1        2        3
             REQ t1   ERR t1   REQ t2   ERR t2
             ├────────▲        ├────────▲
    """
    events = [{"kind": kind, "tx": tx} for tx in ("t1", "t2") for kind in ("REQ", "ERR")]
    assert alerts_of(_PAIRS, *events) == [("raised", "b", "ab"), ("raised", "d", "cd")]


def test_c4_an_order_that_is_paid_and_not_shipped_alerts_also_if_an_earlier_one_was_shipped() -> None:
    steps = [
        {"name": "paid", "where": "kind = 'PAID'"},
        {"name": "known", "where": "kind = 'PACKED' and tx = element_at(paid.tx, 1)"},
        {"name": "gone", "absent": "kind = 'SHIPPED' and tx = element_at(paid.tx, 1)", "within": "3 minutes"},
    ]
    shipped = [{"kind": kind, "tx": "t1"} for kind in ("PAID", "PACKED", "SHIPPED")]
    packed = [{"kind": kind, "tx": "t2"} for kind in ("PAID", "PACKED")]
    others = [{"kind": "-", "tx": "-"}] * 5
    assert alerts_of(steps, *shipped, *packed, *others) == [("raised", "e", "de")]


@pytest.mark.parametrize(("last", "raised"), [("500", True), ("20.00", False)])
def test_c4_a_second_theft_is_found_as_the_first_was(last: str, raised: bool) -> None:
    steps = [
        {"name": "small", "where": "amount < 5"},
        {"name": "large", "where": "amount > 10 * element_at(small.amount, -1) and at <= element_at(small.at, -1) + interval '1' minute"},
    ]  # fmt: skip
    events = [{"amount": amount} for amount in ("2.00", "20.01", "100", "2.00", last)]
    expected = [("raised", "b", "ab"), ("raised", "e", "de")]
    assert alerts_of(steps, *events) == expected[: 1 + raised]


def test_c4_the_earliest_beginning_gives_evidence_arrays_and_the_start_of_the_window() -> None:
    """From b on the match would end in d as well."""
    steps = [{"name": "f", "where": "n = 1"}, {"name": "s", "where": "n = 2 and array_contains(f.tx, tx)"}]
    events = [{"n": 1, "tx": "p"}, {"n": 1, "tx": "q"}, {"n": 2, "tx": "z"}, {"n": 2, "tx": "q"}]
    assert alerts_of(steps, *events, message="{f.tx} {f.count}") == [("raised", "d", "abd", "[p, q] 2")]


@pytest.mark.parametrize("expiry", ["sliding", "fixed"])
def test_c4_at_most_is_judged_for_each_beginning(expiry: str) -> None:
    """From a the step takes two events, from b one. A match with fixed expiry begins at a."""
    steps = [{"name": "f", "where": "n = 1", "at_most": 1}, {"name": "s", "where": "n = 2"}]
    found = alerts_of(steps, {"n": 1}, {"n": 1}, {"n": 2}, expiry=expiry)
    assert found == ([("raised", "c", "bc")] if expiry == "sliding" else [])


def test_c4_no_match_begins_before_the_last_until() -> None:
    steps = [{"name": "f", "where": "n = 1"}, {"name": "s", "where": "n = 2 and tx = element_at(f.tx, 1)"}]
    events = [{"n": 1, "tx": "p"}, {"n": 1, "tx": "q"}, {"n": 3, "tx": "-"}, {"n": 2, "tx": "q"}]
    assert alerts_of(steps, *events) == [("raised", "d", "bd")]
    assert alerts_of(steps, *events, until="n = 3") == []


@pytest.mark.parametrize("late", [False, True])
def test_c4_after_an_alert_that_resets_a_match_begins_with_an_event_that_arrived_since(late: bool) -> None:
    """c empties a and b, whatever their times: e is judged from d on, and with a late d before b likewise."""
    steps = [{"name": "f", "where": "n = 1"}, {"name": "s", "where": "n = 2 and array_contains(f.tx, tx)"}]
    time = {"at": "2026-03-01T10:00:30Z"} if late else {}
    events = [{"n": 1, "tx": "p"}, {"n": 1, "tx": "q"}, {"n": 2, "tx": "p"}, {"n": 1, "tx": "p"} | time]
    events += [{"n": 2, "tx": "q"}, {"n": 2, "tx": "p"}]
    assert alerts_of(steps, *events, reset_on_alert=True) == [("raised", "c", "abc"), ("raised", "f", "df")]


def test_c4_an_error_counts_if_the_earliest_match_has_it_and_no_later_one_ends_in_the_event() -> None:
    steps = [{"name": "f", "where": "n <= 1"}, {"name": "s", "where": "kind = 'S' and 10 / element_at(f.n, 1) > 4"}]
    harness = lookback.Harness(STREAM)
    harness.rule(
        {"rule_id": "r", "stream": "s", "group_by": ["k"], "sequence": {"within": "10 minutes", "steps": steps}}
    )
    kinds = [(0, "F"), (5, "S"), (1, "F"), (5, "S")]
    harness.events(
        [{"id": str(at), "at": at * 60_000_000, "k": "x", "n": n, "kind": kind} for at, (n, kind) in enumerate(kinds)]
    )
    (error,) = harness.errors
    assert error.message.startswith("1 event ")
    assert error.message.endswith("the first is 1")
    assert [(alert.event_id, alert.evidence) for alert in harness.alerts] == [("3", ["2", "3"])]


_VALUES: dict[DataType, list[Any]] = {
    DOUBLE: [None, float("nan"), 0.0, -0.0, 1.5],
    STRING: [None, "", "a", "a\0", "a\0b", "b"],
}


@given(st.data(), st.sampled_from([DOUBLE, STRING]), st.booleans())
def test_matches_that_have_a_value_are_found_without_a_look_at_their_rows(
    data: st.DataObject, type_: DataType, is_wanted: bool
) -> None:
    def equals(one: Any, other: Any) -> bool:
        return one == other or (one != one and other != other and one is not None and other is not None)

    values = data.draw(st.lists(st.sampled_from(_VALUES[type_]), min_size=1, max_size=12))
    count = len(values)
    begins = sorted(data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=8)))
    ends = [data.draw(st.integers(begin + 1, count)) for begin in begins]
    asked = data.draw(st.lists(st.sampled_from(_VALUES[type_]), min_size=1, max_size=3))
    contained = Contained(
        is_wanted, np.array(begins), np.array(ends), from_values(type_, values), from_values(type_, asked)
    )
    for candidate, value in enumerate(asked):
        has = [any(equals(value, each) for each in values[begin:end]) for begin, end in zip(begins, ends, strict=True)]
        wanted = [at for at, is_there in enumerate(has) if value is not None and is_there == is_wanted]
        for match in range(len(begins)):
            found = int(contained.find_next(np.array([candidate]), np.array([match]))[0])
            # It may stop early, and passes none over.
            assert match <= found <= min([at for at in wanted if at >= match], default=len(begins))
            # Where it stays it is right.
            assert found > match or match in wanted or value is None


def test_peaks_end_where_nothing_is_above() -> None:
    assert Peaks(np.array([3, 1, 2])).find_next(np.array([0, 1, 1]), np.array([2, 1, 5])).tolist() == [0, 2, 3]

"""The state that sequences keep of a key, and its size."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from test_equals_oracle import DictStore

import lookback
from growth import grows_in_proportion
from lookback.core.engine.batch import Batch
from lookback.core.engine.evaluation import Evaluator
from lookback.core.judging.keystates import KeyState
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.rulebook import RuleBook
from lookback.core.state.keyruns import Rows
from lookback.core.state.shard import ShardState
from lookback.core.streams.arrival import find_marks
from lookback.core.streams.declaration import Stream
from lookback.core.streams.eventrows import read_events

_MINUTE = 60_000_000
STREAM = Stream.from_dict(
    {
        "stream": "s", "event_id": "id", "event_time": "at",
        "fields": {"id": "int", "at": "timestamp", "k": "string", "n": "int", "ip": "string"},
        "max_out_of_orderness": "10 seconds", "allowed_lateness": "1 hour",
    }
)  # fmt: skip


def rule(steps: list[dict[str, Any]], message: str = "", **sequence: Any) -> dict[str, Any]:
    return {
        "rule_id": "r", "stream": "s", "group_by": ["k"], "message": message,
        "sequence": {"within": "1 hour", "steps": steps, **sequence},
    }  # fmt: skip


def row(event_id: int, minute: float, n: int, ip: str = "a") -> dict[str, Any]:
    return {"id": event_id, "at": int(minute * _MINUTE), "k": "x", "n": n, "ip": ip}


def test_c4_a_match_of_fixed_expiry_takes_what_lies_before_the_event_that_is_judged_in_order_of_time() -> None:
    """
    arrival  1  2  3      4  5     6
    minute   0  5  3      6  6.5   4
    ip       a  b  c      b  c     c
    f.ip                [acb] [acb] [ac]    of n = 1, up to the event with n = 2
    """
    steps = [{"name": "f", "where": "n = 1"}, {"name": "s", "where": "n = 2 and ip = element_at(f.ip, -1)"}]
    harness = lookback.Harness(STREAM)
    harness.rule(rule(steps, "{f.ip} {f.count} {s.count}", expiry="fixed"))
    harness.events([row(1, 0, 1, "a"), row(2, 5, 1, "b"), row(3, 3, 1, "c")])
    harness.events([row(4, 6, 2, "b"), row(5, 6.5, 2, "c"), row(6, 4, 2, "c")])
    assert [(alert.event_id, alert.evidence, alert.message) for alert in harness.alerts] == [
        ("4", ["1", "3", "2", "4"], "[a, c, b] 3 1"),
        ("6", ["1", "3", "6"], "[a, c] 2 1"),
    ]


def test_c4_a_match_of_fixed_expiry_has_not_enough_before_what_arrives_late() -> None:
    """The third event of step one lies after the late event, which is judged with the two before it."""
    steps = [{"name": "f", "where": "n = 1", "at_least": 3}, {"name": "s", "where": "n = 2"}]
    harness = lookback.Harness(STREAM)
    harness.rule(rule(steps, expiry="fixed"))
    harness.events([row(1, 0, 1), row(2, 3, 1), row(3, 5, 1), row(4, 4, 2), row(5, 6, 2)])
    assert [(alert.event_id, alert.evidence) for alert in harness.alerts] == [("5", ["1", "2", "3", "5"])]


_ABSENCE = [{"name": "a", "where": "n = 1"}, {"name": "silent", "absent": "n = 2", "within": "5 minutes"}]


@pytest.mark.parametrize(
    ("limits", "minute", "n", "action", "alerts"),
    [
        # Due at minute 15, which lies in the range, though the event does not.
        ({"effective_from": 12 * _MINUTE}, 10, 1, "evaluated", ["raised"]),
        # The mirror case: the event lies in it, the due does not.
        ({"effective_until": 12 * _MINUTE}, 10, 1, "recorded", []),
        ({"effective_from": 15 * _MINUTE}, 10, 1, "evaluated", ["raised"]),
        ({"effective_from": 15 * _MINUTE + 1}, 10, 1, "recorded", []),
        ({"effective_until": 15 * _MINUTE}, 10, 1, "recorded", []),
        ({"effective_until": 15 * _MINUTE + 1}, 10, 1, "evaluated", ["raised"]),
        # What ends waits is judged where one that it may end is due in the range.
        ({"effective_from": 15 * _MINUTE}, 10, 2, "evaluated", []),
        ({"effective_from": 15 * _MINUTE + 1}, 10, 2, "recorded", []),
        ({"effective_until": 10 * _MINUTE + 1}, 10, 2, "evaluated", []),
        ({"effective_until": 10 * _MINUTE}, 10, 2, "recorded", []),
    ],
)
def test_c3_a_late_event_of_an_absence_was_evaluated_where_its_due_is_effective(
    limits: dict[str, int], minute: int, n: int, action: str, alerts: list[str]
) -> None:
    """
    minute   10        15              20
    ─────────a──────────┤───────────────o───▶   a comes after o, and is due at once
    """
    harness = lookback.Harness(STREAM)
    harness.rule({**rule(_ABSENCE), **limits})
    harness.events([row(1, 20, 0), row(2, minute, n)])
    assert [late.action for late in harness.late_events] == [action]
    assert [alert.verdict for alert in harness.alerts] == alerts


def judged(
    events: int, steps: list[dict[str, Any]], message: str = "", minutes: int = 50, **sequence: Any
) -> tuple[int, int, float]:
    """Bytes of pages, characters of values, and seconds, for so many events of one key in these minutes."""
    return judged_rows([row(at, minutes * at / events, 1) for at in range(events)], rule(steps, message, **sequence))


def judged_rows(rows: list[dict[str, Any]], document: dict[str, Any]) -> tuple[int, int, float]:
    """What `judged` returns, for these rows, each a commit unless it has an `arrival`, and this rule."""
    listed, _ = read_events(rows, STREAM, 1)
    state, store = ShardState(RuleBook(STREAM, {"s": STREAM})), DictStore()
    state.begin(store)
    change = RuleChange("insert", 0, "r", 1, "active", json.dumps(document))
    started = time.process_time()
    Evaluator(STREAM).process(state, Batch(listed, None, find_marks(listed, listed.commits), [change]))
    state.save()
    spent = time.process_time() - started
    values = (value for table in state.tables.values() for value in table.values())
    return sum(map(len, store.pages.values())), sum(len(json.dumps(value)) for value in values), spent


@pytest.mark.long
@pytest.mark.parametrize("expiry", ["sliding", "fixed"])
@pytest.mark.parametrize("wait", ["1 minute", "1 hour"])
def test_c8_waits_of_an_absence_grow_with_the_events_alone(expiry: str, wait: str) -> None:
    """Every event begins a wait, whose steps took all the events before it."""
    steps = [{"name": "a", "where": "n = 1"}, {"name": "b", "where": "n = 1"}]
    steps.append({"name": "silent", "absent": "n = 2", "within": wait})
    judged(100, steps, expiry=expiry)
    small, large = (judged(n, steps, expiry=expiry) for n in (2_000, 4_000))
    assert large[0] <= 2.2 * small[0]
    assert large[1] <= 2.2 * small[1]
    assert grows_in_proportion(lambda n: judged(n, steps, expiry=expiry)[2], 2_000)
    assert small[1] < 150 * 2_000


_OTHER_ADDRESS = "n = 1 and ip <> element_at(a.ip, -1)"


@pytest.mark.parametrize(
    ("events", "last", "message"),
    [
        # Every event asks the rows of the step before, and none answers.
        (500, _OTHER_ADDRESS, ""),
        (500, "n = 1 and not array_contains(a.ip, ip)", ""),
        # Every event alerts.
        (500, "n = 1 and array_contains(a.ip, ip) and a.count < 10000", "{a.count} {b.count}"),
        (1_500, "n = 1", "{a.count} and {b.count}"),
    ],
)
@pytest.mark.parametrize("expiry", ["sliding", "fixed"])
def test_c8_a_sequence_takes_time_in_proportion_to_the_events_of_a_key(
    events: int, last: str, message: str, expiry: str
) -> None:
    steps = [{"name": "a", "where": "n = 1", "at_least": 2}, {"name": "b", "where": last}]
    assert grows_in_proportion(lambda count: judged(count, steps, message, expiry=expiry)[2], events)


@pytest.mark.long
@pytest.mark.parametrize(
    "last",
    [
        "n = 1 and ip <> element_at(a.ip, 1)",
        "n = 1 and not array_contains(a.ip, ip)",
        "n = 1 and array_contains(a.ip, concat(ip, 'x'))",
        # Of these conditions the end of step one decides, which every event would move.
        "n = 1 and ip <> element_at(a.ip, -1)",
        "n = 1 and size(a.ip) > 5000",
    ],
)
def test_c8_a_window_that_slides_past_events_takes_time_in_proportion_to_them(last: str) -> None:
    """The window begins with another event at each, sees half as many as there are, and none of them answers."""
    steps = [{"name": "a", "where": "n = 1", "at_least": 2}, {"name": "b", "where": last}]
    assert grows_in_proportion(lambda count: judged(count, steps, minutes=120)[2], 2_000)


@pytest.mark.long
@pytest.mark.parametrize(
    "last", ["ip = element_at(a.ip, 1)", "ip = element_at(a.ip, -1)", "array_contains(a.ip, ip)", "a.count > 50"]
)
def test_c8_a_window_that_slides_past_events_which_all_alert_takes_time_in_proportion_to_them(last: str) -> None:
    steps = [{"name": "a", "where": "n = 1", "at_least": 2}, {"name": "b", "where": f"n = 1 and {last}"}]
    assert grows_in_proportion(lambda count: judged(count, steps, "{a.count}", minutes=120)[2], 400)


_NEVER, _ALWAYS = "n = 1 and ip <> element_at(a.ip, 1)", "n = 1 and ip = element_at(a.ip, 1)"


@pytest.mark.long
@pytest.mark.parametrize(
    "steps",
    [
        # A step in between that no event satisfies, whatever the last one reads.
        [{"name": "b", "where": _NEVER}, {"name": "c", "where": "n = 1"}],
        [{"name": "b", "where": _NEVER, "at_least": 2}, {"name": "c", "where": "n = 1 and array_contains(b.ip, ip)"}],
        [{"name": "b", "where": _ALWAYS}, {"name": "c", "where": "n = 1"}],
        [{"name": "b", "where": _NEVER, "at_least": 3}],
        [{"name": "b", "where": _ALWAYS, "at_least": 30}],
        [{"name": "b", "where": _NEVER, "at_most": 2}],
        [{"name": "b", "where": _ALWAYS, "at_most": 2}],
    ],
)
@pytest.mark.parametrize("resets", [False, True])
def test_c8_a_window_that_slides_past_events_takes_time_in_proportion_whatever_the_steps_count(
    steps: list[dict[str, Any]], resets: bool
) -> None:
    """The window begins with another event at each, and sees half as many as there are."""
    listed = [{"name": "a", "where": "n = 1", "at_least": 2}, *steps]
    document = {**rule(listed), "reset_on_alert": resets}

    def seconds_for(events: int) -> float:
        return judged_rows([row(at, 120 * at / events, 1) for at in range(events)], document)[2]

    assert grows_in_proportion(seconds_for, 1_000)


_SAME, _LOWER = "ip = element_at(a.ip, 1)", "id < element_at(a.id, 1)"
_LAST = {"name": "c", "where": "n > 0"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("steps", "addresses"),
    [
        # A step in between whose condition is another one in each match.
        ([{"name": "b", "where": _SAME}, _LAST], 1),
        ([{"name": "b", "where": _LOWER}, _LAST], 1),
        ([{"name": "b", "where": "id <= element_at(a.id, 1) - 1"}, _LAST], 1),
        ([{"name": "b", "where": "element_at(a.id, 1) > id and n > 0"}, _LAST], 1),
        ([{"name": "b", "where": f"{_LOWER} and {_SAME}"}, _LAST], 1_000),
        # Some events satisfy it, and never enough, or too many.
        ([{"name": "b", "where": _SAME, "at_least": 2}, _LAST], 2),
        ([{"name": "b", "where": f"{_SAME} and id > element_at(a.id, 1)", "at_least": 3, "at_most": 4}, _LAST], 3),
        (
            [
                {"name": "b", "where": "id > element_at(a.id, 1)", "at_most": 1},
                {"name": "c", "where": "n = 1 and id % 4 = 0"},
            ],
            1,
        ),
        # A later step reads earlier ones too.
        ([{"name": "b", "where": _SAME}, {"name": "c", "where": "ip = element_at(a.ip, 1)"}], 2),
        ([{"name": "b", "where": _SAME}, {"name": "c", "where": "n > 0 and id < element_at(b.id, 1)"}], 2),
        ([{"name": "b", "where": _SAME}, {"name": "c", "where": _LOWER}, {"name": "d", "where": "n > 0"}], 2),
        # It is the last one, and lacks one event.
        ([{"name": "b", "where": _SAME, "at_least": 2}], 2),
    ],
)
def test_c8_a_condition_that_is_another_one_in_each_match_takes_time_in_proportion_to_the_events(
    steps: list[dict[str, Any]], addresses: int
) -> None:
    """The window begins with another event at each and sees half of them; so many neighbours have one address."""
    document = rule([{"name": "a", "where": "n = 1"}, *steps])

    def seconds_for(events: int) -> float:
        rows = [row(at, 120 * at / events, 1 + at % 2, str(at // addresses)) for at in range(events)]
        return judged_rows(rows, document)[2]

    assert grows_in_proportion(seconds_for, 1_000)


@pytest.mark.long
@pytest.mark.parametrize("last", [_NEVER, _ALWAYS, "n = 1 and not array_contains(a.ip, ip)"])
@pytest.mark.parametrize("resets", [False, True])
def test_c8_events_of_many_commits_that_come_late_take_time_in_proportion_to_them(last: str, resets: bool) -> None:
    """Every tenth event comes two minutes late, in 48 commits; the window sees half of them.

    A window is settled once for each commit in which one of its events came late, so the commits stay the same.
    """
    steps = [{"name": "a", "where": "n = 1", "at_least": 2}, {"name": "b", "where": last}]
    document = {**rule(steps), "reset_on_alert": resets}

    def seconds_for(events: int) -> float:
        minutes = [120 * at / events - 2 * (at % 10 == 9) for at in range(events)]
        rows = [{**row(at, minute, 1), "arrival": 1 + 48 * at // events} for at, minute in enumerate(minutes)]
        return judged_rows(rows, document)[2]

    assert grows_in_proportion(seconds_for, 1_000)


@pytest.mark.parametrize("expiry", ["sliding", "fixed"])
def test_c8_absences_count_the_events_of_a_step_without_a_list_of_them(expiry: str) -> None:
    steps = [{"name": "a", "where": "n = 1"}, {"name": "b", "where": "n = 1"}]
    steps.append({"name": "silent", "absent": "n = 2", "within": "1 minute"})
    message = "{a.count} and {b.count}"
    assert grows_in_proportion(lambda count: judged(count, steps, message, expiry=expiry)[2], 1_000)


@pytest.mark.long
@pytest.mark.parametrize(
    ("last", "absent"),
    [("n = 1 and ip = element_at(a.ip, 1)", "n = 2"), ("n = 1", "n = 1 and array_contains(a.ip, concat(ip, 'x'))")],
)
@pytest.mark.parametrize("expiry", ["sliding", "fixed"])
def test_c8_absences_with_linked_conditions_take_time_in_proportion_to_the_events(
    last: str, absent: str, expiry: str
) -> None:
    """All events are of one match, and as many waits are pending at each."""
    steps = [{"name": "a", "where": "n = 1"}, {"name": "b", "where": last}]
    message = "{a.count} and {b.count}"

    def seconds_for(events: int) -> float:
        wait = {"name": "silent", "absent": absent, "within": f"{50 * 60 * 10 // events} seconds"}
        return judged(events, [*steps, wait], message, expiry=expiry)[2]

    assert grows_in_proportion(seconds_for, 500)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(
    ("last", "alerts"),
    [
        ("n = 2 and ip = element_at(f.ip, 1)", ["4", "5", "6", "10", "11"]),
        ("n = 2 and ip = element_at(f.ip, -1)", ["5", "10", "11"]),
        ("n = 2 and array_contains(f.ip, ip)", ["4", "5", "6", "10", "11"]),
        ("n = 2 and not array_contains(f.ip, ip)", ["4", "6", "7", "8", "10", "11"]),
        ("n = 2 and f.count = 3 and ip <> 'a'", ["5", "7", "8", "10", "11"]),
        ("n = 2 and size(f.ip) = 3", ["5", "6", "7", "8", "10", "11"]),
    ],
)
def test_c4_a_condition_sees_the_rows_up_to_the_first_that_satisfied_it(
    last: str, alerts: list[str], together: bool
) -> None:
    """
    A match begins at each event with n = 1. From the first on `f` takes a, b and c, from the last on z alone.

    id       1  2  3  4  5  6  7  8  9  10 11      the third arrives after the fourth
    minute   0  1  2  3  4  5  6  7  8  9  10
    n        1  1  1  2  2  2  2  2  1  2  2
    ip       a  b  c  a  c  a  d  e  z  c  z
    """
    steps = [{"name": "f", "where": "n = 1"}, {"name": "s", "where": last}]
    harness = lookback.Harness(STREAM)
    harness.rule(rule(steps))
    rows = [row(1, 0, 1, "a"), row(2, 1, 1, "b"), row(4, 3, 2, "a"), row(3, 2, 1, "c"), row(5, 4, 2, "c")]
    rows += [
        row(6, 5, 2, "a"),
        row(7, 6, 2, "d"),
        row(8, 7, 2, "e"),
        row(9, 8, 1, "z"),
        row(10, 9, 2, "c"),
        row(11, 10, 2, "z"),
    ]
    for some in [rows] if together else [[each] for each in rows]:
        harness.events(some)
    assert [alert.event_id for alert in harness.alerts] == alerts


@pytest.mark.parametrize("expiry", ["sliding", "fixed"])
def test_c4_a_match_goes_back_to_the_place_of_an_event_that_comes_late(expiry: str) -> None:
    """
    arrival  1  2  3  4         5       6
    minute   0  2  4  6         3       8
    n        1  1  2  2         2       2
    ip       a  b  b  a         a       b
                 [ab]b [ab]a  [ab]a   [ab]b     the late event ends step one earlier than the third did
    """
    steps = [{"name": "f", "where": "n = 1"}, {"name": "s", "where": "n = 2 and array_contains(f.ip, ip)"}]
    harness = lookback.Harness(STREAM)
    harness.rule(rule(steps, "{f.ip} {s.ip}", expiry=expiry))
    harness.events([row(1, 0, 1, "a"), row(2, 2, 1, "b"), row(3, 4, 2, "b"), row(4, 6, 2, "a")])
    harness.events([row(5, 3, 2, "a"), row(6, 8, 2, "b"), row(7, 1, 2, "b"), row(8, 9, 2, "b")])
    assert [(alert.event_id, alert.message) for alert in harness.alerts] == [
        ("3", "[a, b] [b]"),
        ("4", "[a, b] [b, a]"),
        ("5", "[a, b] [a]"),
        ("6", "[a, b] [a, b, a, b]"),
        ("8", "[a, b] [a, b, a, b, b]"),
    ]


def test_c4_a_step_that_takes_fewer_rows_again_finds_no_value_of_the_others() -> None:
    """The rows before the first success are offered at once: step one takes b and c after a, then b and c are s.

    The sixth row is in the array of the match that begins at a, and not in that of the one that begins at the first b.
    """
    steps = [
        {"name": "f", "where": "n >= 1"},
        {"name": "s", "where": "n >= 1 and not array_contains(f.ip, ip)"},
        {"name": "t", "where": "n = 2 and not array_contains(f.ip, ip)"},
    ]
    harness = lookback.Harness(STREAM)
    harness.rule(rule(steps, "{f.ip} {s.ip}"))
    harness.events([row(at, at, 1, ip) for at, ip in enumerate("abbcc")])
    harness.events([row(5, 5, 2, "c"), row(6, 6, 2, "a"), row(7, 7, 2, "b")])
    assert [(alert.event_id, alert.message) for alert in harness.alerts] == [
        ("5", "[a] [b, b, c, c]"),
        ("6", "[b, b] [c, c]"),
        ("7", "[a] [b, b, c, c]"),
    ]


@pytest.mark.parametrize("expiry", ["sliding", "fixed"])
@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("absent", [False, True])
def test_c4_an_event_that_comes_late_is_evidence_of_the_alerts_after_it(expiry: str, reset: bool, absent: bool) -> None:
    """Alerts have as much evidence as they may, and begin with the same events; one arrives late, between those that are evidence."""
    rows = [row(at, 10 * at / 250, 1) for at in range(100, 300)]
    rows.insert(150, row(300, 10 * 150.5 / 250, 1))
    steps = [{"name": "a", "where": "n = 1", "at_least": 2}, {"name": "b", "where": "n = 1", "at_least": 103}]
    if absent:
        steps.append({"name": "silent", "absent": "n = 2", "within": "1 second"})
    harness = lookback.Harness(STREAM)
    harness.rule({**rule(steps, expiry=expiry), "reset_on_alert": reset})
    harness.events(
        [*({**each, "arrival": 1 + (at >= 150)} for at, each in enumerate(rows)), {**row(400, 60, 0), "arrival": 3}]
    )
    since, expected = 0, {}
    for at, each in enumerate(rows):
        before = sorted((r for r in rows[since : at + 1] if r["at"] <= each["at"]), key=lambda r: int(r["at"]))
        if len(before) >= 105 and each["id"] != 300:
            expected[str(each["id"])] = [str(r["id"]) for r in before[:100]]
            since = at + 1 if reset and not absent else since
    found = {alert.event_id: list(alert.evidence) for alert in harness.alerts}
    if reset and absent:
        # The waits that were pending when the first one was over are raised as well.
        assert found.items() <= expected.items()
    else:
        assert found == expected
    assert found


@pytest.mark.parametrize("kind", ["steps", "fixed", "absence"])
def test_c8_rows_of_a_key_that_were_kept_as_text_are_gone_on_with_in_columns(kind: str) -> None:
    steps = [
        {"name": "a", "where": "n = 1", "at_least": 2},
        {"name": "b", "where": "n = 2 and ip = element_at(a.ip, 1)"},
    ]
    if kind == "absence":
        steps.append({"name": "silent", "absent": "n = 3", "within": "5 minutes"})
    sequence = {"expiry": "fixed"} if kind == "fixed" else {}
    first, found = [row(1, 0, 1, "a"), row(2, 1, 1, "b")], []
    later = [
        row(3, 2, 2, "b"),
        row(4, 3, 2, "a"),
        row(5, 30, 0),
        row(6, 31, 1, "c"),
        row(7, 32, 2, "a"),
        row(8, 300, 0),
    ]
    for as_text in (False, True):
        harness = lookback.Harness(STREAM)
        harness.rule(rule(steps, "{a.ip} {b.ip}", **sequence))
        harness.events(first)
        ((key, wake, value),) = harness._state.tables[own_table(harness)].items()
        assert ("waits" in value) == (kind == "fixed")
        if as_text:
            harness._state.tables[own_table(harness)].put(
                key, {**KeyState.from_value(value).to_value(), "key": ["x"]}, wake
            )
        for each in later:
            harness.events([each])
        found.append([(a.event_id, a.key, a.verdict, a.evidence, a.message) for a in harness.alerts])
        assert list(harness._state.tables[own_table(harness)].items()) == []
    assert found[0] == found[1]
    assert [alert[0] for alert in found[0]] == ["4", "7"]


def own_table(harness: lookback.Harness) -> str:
    (name,) = [name for name in harness._state.tables if name.startswith("own-")]
    return name


@pytest.mark.parametrize("expiry", ["sliding", "fixed"])
def test_c8_keys_that_have_only_rows_keep_them_in_columns(expiry: str) -> None:
    """Those of user 0 are a begun match where expiry is fixed."""
    state, store = ShardState(RuleBook(STREAM, {"s": STREAM})), DictStore()
    state.begin(store)
    rows = [{**row(at, at / 1_000, 1 + (at > 0)), "k": f"user-{at % 2_000}"} for at in range(6_000)]
    listed, _ = read_events(rows, STREAM, 1)
    last = "n = 2 and not array_contains(a.ip, ip)"
    document = rule([{"name": "a", "where": "n = 1"}, {"name": "b", "where": last}], expiry=expiry)
    change = RuleChange("insert", 0, "r", 1, "active", json.dumps(document))
    Evaluator(STREAM).process(state, Batch(listed, None, find_marks(listed, listed.commits), [change]))
    state.save()
    (table,) = state.tables.values()
    pages = [Rows.decode(page, name) for name, page in store.pages.items() if name.startswith("table:")]
    in_text = sum(sum(map(bool, page.texts.tolist())) for page in pages)
    in_columns = sum(len(page.columns) for page in pages if page.columns is not None)
    assert (in_text, in_columns) == ((1, 5_997) if expiry == "fixed" else (0, 6_000))
    assert table.rows == sum(len(value["rows"]) for value in table.values()) == 6_000


@pytest.mark.parametrize(
    ("sequence", "arrivals", "alerts"),
    [
        # The event that ends a match arrives after the one that completed it, though its time is before.
        ({}, [(0, 1), (5, 2), (3, 3), (6, 2)], ["2"]),
        ({}, [(0, 1), (3, 3), (5, 2), (6, 2)], []),
        # It came before the match began that the completing event belongs to, and its time is within that match.
        ({"expiry": "fixed"}, [(3, 3), (0, 1), (5, 2)], ["3"]),
        ({"expiry": "fixed"}, [(0, 1), (3, 3), (5, 2)], []),
    ],
)
@pytest.mark.parametrize("together", [False, True])
def test_c4_until_ends_a_match_only_from_when_it_has_arrived(
    sequence: dict[str, Any], arrivals: list[tuple[int, int]], alerts: list[str], together: bool
) -> None:
    steps = [{"name": "a", "where": "n = 1"}, {"name": "b", "where": "n = 2"}]
    rows = [row(at, minute, n) for at, (minute, n) in enumerate(arrivals, 1)]
    harness = lookback.Harness(STREAM)
    harness.rule(rule(steps, until="n = 3", **sequence))
    for some in [rows] if together else [[each] for each in rows]:
        harness.events(some)
    assert [alert.event_id for alert in harness.alerts] == alerts


def test_c4_an_until_from_before_a_reset_ends_no_later_match() -> None:
    """
    arrival  1  2  3    4  5
    minute   0  6  2    5  8
    n        1  3  2    1  2      the alert of the third lets nothing count that has arrived
    """
    steps = [{"name": "a", "where": "n = 1"}, {"name": "b", "where": "n = 2"}]
    harness = lookback.Harness(STREAM)
    harness.rule({**rule(steps, until="n = 3"), "reset_on_alert": True})
    harness.events([row(1, 0, 1), row(2, 6, 3), row(3, 2, 2), row(4, 5, 1), row(5, 8, 2)])
    assert [alert.event_id for alert in harness.alerts] == ["3", "5"]


def test_c4_an_error_of_the_last_condition_counts_where_too_few_events_satisfy_it() -> None:
    steps = [
        {"name": "a", "where": "n = 1"},
        {"name": "b", "where": "n <> 1 and element_at(a.n, 1) / n > 0", "at_least": 2},
    ]
    harness = lookback.Harness(STREAM)
    harness.rule(rule(steps))
    harness.events([row(1, 0, 1), row(2, 1, 0), row(3, 2, 2)])
    assert [error.message.endswith("the first is 2") for error in harness.errors] == [True]
    assert not harness.alerts

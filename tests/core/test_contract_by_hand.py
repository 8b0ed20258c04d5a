"""The engine, and the judge itself, on cases whose results were worked out by hand from the contract.

Times in microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lookback.core.errors import RuleError
from lookback.core.rules.compiling import compile_rule
from lookback.core.streams.declaration import Stream
from lookback.core.values.columns import to_text
from lookback.core.values.times import to_utc
from lookback.testing.harness import Harness
from oracle import Oracle, OracleEvent

# W = highest - 3; what is at most 6 late is taken.
STREAM = Stream.from_dict(
    {
        "stream": "tx",
        "event_id": "id",
        "event_time": "at",
        "fields": {"id": "string", "at": "timestamp", "k": "string", "n": "int"},
        "max_out_of_orderness": "3 microseconds",
        "allowed_lateness": "6 microseconds",
        "max_session": "20 microseconds",
        "max_revisions": 2,
    }
)


class Engine:
    """The harness as the oracle is spoken to, and what it says in the oracle's form."""

    def __init__(self, stream: Stream) -> None:
        self._harness = Harness(stream)

    def change(self, document: dict[str, Any], version: int, status: str) -> None:
        self._harness.rule(document, status, version)

    def command(self, action: str, time: int | None = None) -> None:
        if action == "advance":
            self._harness.watermark(time)
        else:
            self._harness.clear_state()

    def run(self, events: list[OracleEvent]) -> None:
        self._harness.events([{**event.values, "arrival": event.commit} for event in events])

    @property
    def alerts(self) -> list[tuple[Any, ...]]:
        return [
            (
                a.alert_id, a.revision, a.rule_id, a.rule_version, a.mode, a.verdict, a.event_id, a.event_time,
                a.window_start, a.window_end, tuple(sorted((n, to_text(v)) for n, v in a.measures.items())),
                a.window_complete, a.message, tuple(sorted(a.entities.items())), tuple(a.tags), tuple(a.evidence), a.arrival,
            )
            for a in self._harness.alerts
        ]  # fmt: skip

    @property
    def late(self) -> list[tuple[Any, ...]]:
        return [(late.event_id, late.arrival, late.late_by_us, late.action) for late in self._harness.late_events]

    @property
    def notes(self) -> list[tuple[Any, ...]]:
        return [(r.action, r.rule_id, r.version, r.arrival) for r in self._harness.errors if r.action != "failed"]

    @property
    def failed(self) -> dict[tuple[str, int], int]:
        counts: dict[tuple[str, int], int] = {}
        for row in self._harness.errors:
            if row.action == "failed":
                slot = (str(row.rule_id), int(row.version or 0))
                counts[slot] = counts.get(slot, 0) + int(row.message.split()[0])
        return counts


Judge = Oracle | Engine
_made: list[Callable[[Stream], Judge]] = []


@pytest.fixture(autouse=True, params=[Oracle, Engine], ids=["oracle", "engine"])
def judge(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test runs with both."""
    _made.append(request.param)
    yield
    _made.pop()


def rule(**keys: Any) -> dict[str, Any]:
    return {"rule_id": "r", "stream": "tx", **keys}


def window(kind: object, **keys: Any) -> dict[str, Any]:
    return rule(window=kind, measures={"m": "count(*)"}, **keys)


def sequence(*steps: dict[str, Any], within: str = "10 microseconds", **keys: Any) -> dict[str, Any]:
    own = {name: keys.pop(name) for name in ("until", "expiry", "take") if name in keys}
    return rule(sequence={"within": within, "steps": list(steps), **own}, **keys)


def feed(judge: Judge, commit: int, *events: tuple[str, int, int]) -> None:
    """A commit of events (id, time, n)."""
    judge.run(
        [
            OracleEvent({"id": name, "at": time, "k": "x", "n": n}, commit, time, (False, name.encode()))
            for name, time, n in events
        ]
    )


def started(document: dict[str, Any], *commits: list[tuple[str, int, int]]) -> Judge:
    judge = _made[-1](STREAM)
    judge.change(document, 1, "active")
    for commit, events in enumerate(commits, 1):
        feed(judge, commit, *events)
    return judge


def windows(judge: Judge) -> list[tuple[Any, ...]]:
    """(start, end, revision, verdict, m, arrival) of every row."""
    zero = to_utc(0)
    rows = []
    for _, revision, _, _, _, verdict, _, _, start, end, measures, *_, arrival in judge.alerts:
        rows.append(((start - zero).microseconds, (end - zero).microseconds, revision, verdict, measures, arrival))
    return [
        (start, end, revision, verdict, dict(m).get("m"), arrival) for start, end, revision, verdict, m, arrival in rows
    ]


def events(judge: Judge) -> list[tuple[Any, ...]]:
    """(event id, revision, verdict, arrival) of every row."""
    return [(row[6], row[1], row[5], row[-1]) for row in judge.alerts]


def evidence(judge: Judge) -> list[tuple[str, ...]]:
    return [row[-2] for row in judge.alerts]


def coarse(size: int, resolution: int, delay: int = 0, **keys: Any) -> dict[str, Any]:
    spans = {"lookback": size, "resolution": resolution, "delay": delay}
    return window({name: f"{span} microseconds" for name, span in spans.items()}, **{"when": "m >= 0", **keys})


def seen(judge: Judge) -> list[tuple[Any, ...]]:
    """(event id, m, start and end of its window, whether that is complete) of every row."""
    zero = to_utc(0)
    return [
        (row[6], int(dict(row[10])["m"]), *((time - zero) // (to_utc(1) - zero) for time in row[8:10]), row[11])
        for row in judge.alerts
    ]


def changed(**keys: Any) -> dict[str, Any]:
    """Raises where n is not what it was last."""
    before = {"lookback": "50 microseconds", "delay": "1 microsecond"}
    return window(before, **{"when": "n <> m", **keys}) | {"measures": {"m": "last(n)"}}


def test_c4_last_gives_what_an_event_changes() -> None:
    countries = [1, 2, 1, 2, 2, 1]
    judge = started(changed(), *([(f"{at}", at, n)] for at, n in enumerate(countries, 1)))
    assert [row[6] for row in judge.alerts] == ["2", "3", "4", "6"]


def test_c4_first_and_last_go_by_time_and_then_by_arrival() -> None:
    #  arrival: c(6) a(2) b(6) d(4) late, in any time; at 9 the first is a, and the last b, that arrived after c
    commits = [[("c", 6, 3)], [("a", 2, 1)], [("b", 6, 2)], [("d", 4, 4)], [("now", 9, 0)]]
    for measure, value in (("first(n)", "1"), ("last(n)", "2"), ("last(n) filter (where n > 2)", "3")):
        judge = started(changed(when="n = 0") | {"measures": {"m": measure}}, *commits)
        assert [dict(row[10])["m"] for row in judge.alerts] == [value], measure


def test_c4_first_and_last_give_null_where_their_row_has_it() -> None:
    rule = changed(when="n = 0") | {
        "measures": {"m": "last(n)", "f": "first(n)", "known": "last(n) filter (where n > 0)"}
    }
    judge = started(rule, [("a", 1, 7)], [("b", 2, None)], [("now", 3, 0)])  # type: ignore[list-item]
    assert dict(judge.alerts[0][10]) == {"m": None, "f": "7", "known": "7"}


def test_c3_4_a_window_with_a_resolution_begins_at_the_multiple_before_its_exact_start() -> None:
    #      3   4       6                   11
    #      a   b───────┴───────────────────c     exactly from 6 on, with a resolution of 4 from 4 on, b included
    judge = started(coarse(5, 4), [("a", 3, 0)], [("b", 4, 0)], [("c", 11, 0)])
    assert seen(judge)[2] == ("c", 2, 4, 11, True)
    # At 13 the exact start is 8, a multiple itself: 7 is out, 8 is in.
    judge = started(coarse(5, 4), [("a", 7, 0)], [("b", 8, 0)], [("c", 13, 0)])
    assert seen(judge)[2] == ("c", 2, 8, 13, True)


def test_c3_4_multiples_of_a_resolution_go_on_before_1970() -> None:
    #      -9  -8          -5                  0      down from -5 to -8, not up to -4
    #      a   b───────────┴───────────────────c
    judge = started(coarse(5, 4), [("a", -9, 0)], [("b", -8, 0)], [("c", 0, 0)])
    assert seen(judge) == [("a", 1, -16, -9, True), ("b", 2, -16, -8, True), ("c", 2, -8, 0, True)]


def test_c3_4_a_window_with_resolution_and_delay_is_exact_at_its_end() -> None:
    #      3   4   5               9   10      12
    #      a   b───┴───────────────c   d       e     [12 - 3 - 4, 12 - 3] = [5, 9], from 4 on
    commits = [[("a", 3, 0)], [("b", 4, 0)], [("c", 9, 0)], [("d", 10, 0)], [("e", 12, 0)]]
    assert seen(started(coarse(4, 4, 3), *commits))[4] == ("e", 2, 4, 9, True)


def test_c3_4_of_ties_at_the_start_of_a_bucket_those_count_that_have_arrived() -> None:
    judge = started(coarse(4, 4), [("a", 4, 0), ("b", 4, 0)], [("c", 8, 0)], [("d", 4, 0)], [("e", 8, 0)])
    assert [(row[0], row[1]) for row in seen(judge)] == [("a", 1), ("b", 2), ("c", 3), ("d", 3), ("e", 5)]


@pytest.mark.parametrize("delay", [0, 1])
def test_c3_4_an_event_at_the_latest_splits_a_bucket_that_is_still_open(delay: int) -> None:
    #   0                   8   9   10  11  12       W = 20 - 3; what is at 17 - 6 = 11 is taken. With a delay its window
    #   ├───── closed ──────┼───a───b───c───┤ open   ends at 10, within [8, 12), and must not see what lies after that
    before = [("a", 9, 0), ("b", 10, 0), ("c", 11, 0)]
    filler = [[(f"{at}", at, 0)] for at in (20, 20, 20, 20, 20)]
    judge = started(coarse(8, 4, delay), before, *filler, [("late", 11, 0)])
    assert seen(judge)[-1][1] == (2 if delay else 4)
    feed(judge, 9, ("later", 11, 0))
    assert seen(judge)[-1][1] == (2 if delay else 5)


def test_c3_6_revise_with_a_resolution_judges_again_what_a_late_event_enters_through_its_bucket() -> None:
    #   4           7       9   11      13     W = 13 - 3, so d is just taken; b's window is exactly [7, 11], from 4 on
    #   d───────────┴───────┴───b───────c      c's is [9, 13], from 8 on
    judge = started(coarse(4, 4, when="m >= 2", late="revise"), [("b", 11, 0)], [("c", 13, 0)], [("d", 4, 0)])
    assert events(judge) == [("c", 0, "raised", 2), ("b", 0, "raised", 3)]


def test_c3_8_the_floor_of_a_feature_with_a_resolution_is_a_multiple_of_it() -> None:
    # W = 24 - 3; 21 - (4 + 4) - 6 = 7, so the floor is 4, and the window that is widened has what lies after that.
    judge = started(coarse(4, 4), [("a", 3, 0), ("b", 4, 0)], [("c", 24, 0)])
    judge.change(coarse(20, 4), 2, "active")
    feed(judge, 3, ("d", 24, 0), ("e", 23, 0))
    assert seen(judge)[3:] == [("e", 2, 0, 23, False), ("d", 4, 4, 24, True)]


def test_c3_5_tumbling_results_come_when_the_watermark_reaches_the_end_and_with_each_late_event() -> None:
    #   [0, 10)  W after each commit: 6, 10, 10, 15, 16
    commits = [[("a", 9, 0)], [("b", 13, 0)], [("c", 2, 0)], [("d", 18, 0)], [("e", 9, 0)]]
    judge = started(window({"tumbling": "10 microseconds"}), *commits)
    # e: 10 + 6 > 15, so the window takes it.
    assert windows(judge) == [(0, 10, 0, "raised", "1", 2), (0, 10, 1, "raised", "2", 3), (0, 10, 2, "raised", "3", 5)]
    # b and d lie in [10, 20), which W = 15 has not reached.
    assert judge.late == [("c", 3, 8, "evaluated"), ("e", 5, 6, "evaluated")]


def test_c3_5_a_window_whose_end_and_lateness_the_watermark_has_reached_takes_nothing() -> None:
    judge = started(window({"tumbling": "10 microseconds"}), [("a", 19, 0)], [("b", 9, 0)], [("c", 18, 0)])
    assert windows(judge) == []
    assert judge.late == [("b", 2, 7, "discarded")]


def test_c3_5_sliding_windows_overlap_and_early_results_come_with_each_event() -> None:
    sliding = {"sliding": "4 microseconds", "slide": "2 microseconds"}
    judge = started(window(sliding, early=True), [("a", 5, 0)])
    # 5 lies in [2, 6) and [4, 8).
    assert windows(judge) == [(2, 6, 0, "raised", "1", 1), (4, 8, 0, "raised", "1", 1)]
    feed(judge, 2, ("b", 10, 0))
    # W = 7 reaches 6: nothing new to say of [2, 6). b is in [8, 12) and [10, 14).
    assert windows(judge)[2:] == [(8, 12, 0, "raised", "1", 2), (10, 14, 0, "raised", "1", 2)]


def test_c3_5_sessions_merge_and_take_back_what_was_said_of_the_later_part() -> None:
    #   0   5       gap 4: 5 - 0 > 4, two sessions [0, 5) and [5, 10); the event at 3 joins them
    judge = started(window({"session": "4 microseconds"}), [("a", 0, 0)], [("b", 5, 0)], [("c", 13, 0)])
    assert windows(judge) == [(0, 5, 0, "raised", "1", 3), (5, 10, 0, "raised", "1", 3)]
    feed(judge, 4, ("d", 4, 0))
    assert windows(judge)[2:] == [(5, 10, 1, "retracted", "1", 4), (0, 10, 1, "raised", "3", 4)]


def test_c3_5_a_session_is_closed_at_its_longest() -> None:
    commits = [[(f"e{at}", at, 0)] for at in range(0, 24, 2)]
    judge = started(window({"session": "4 microseconds"}), *commits)
    # e0 .. e18 are a session that ends at 20; W = 19 after e22. e20 begins the next.
    assert windows(judge) == []
    feed(judge, 13, ("z", 23, 0))
    assert windows(judge) == [(0, 20, 0, "raised", "10", 13)]
    assert judge.notes == [("session_closed", "r", 1, 13)]


def test_c3_6_revise_judges_again_what_an_event_out_of_order_enters() -> None:
    document = window("5 microseconds", when="m = 2", late="revise")
    judge = started(document, [("a", 5, 0)], [("b", 6, 0)], [("c", 4, 0)])
    # b counted a; then c enters the windows of a (now 2) and of b (now 3), and is judged itself (1).
    assert events(judge) == [("b", 0, "raised", 2), ("a", 0, "raised", 3), ("b", 1, "retracted", 3)]
    feed(judge, 4, ("d", 7, 0))
    assert len(judge.alerts) == 3
    # Three events have the one at 3 in their windows, of which the two oldest are judged again.
    feed(judge, 5, ("e", 3, 0))
    assert events(judge)[3:] == [("c", 0, "raised", 5), ("a", 1, "retracted", 5)]
    assert judge.notes == [("revisions_limited", "r", 1, 5)]


def test_c4_reset_on_alert_empties_the_key_for_what_arrives_later() -> None:
    document = window("9 microseconds", when="m >= 2", reset_on_alert=True)
    judge = started(document, [("a", 1, 0)], [("b", 2, 0)], [("c", 3, 0)], [("d", 4, 0)])
    assert events(judge) == [("b", 0, "raised", 2), ("d", 0, "raised", 4)]


def test_c4_a_suppressed_alert_starts_no_new_hour() -> None:
    judge = started(
        window("1 microsecond", when="true", suppress="4 microseconds"), *[[(f"e{t}", t, 0)] for t in range(6)]
    )
    verdicts = ["raised", "suppressed", "suppressed", "suppressed", "suppressed", "raised"]
    assert [verdict for _, _, verdict, _ in events(judge)] == verdicts


def test_c4_a_sequence_takes_greedily_and_keeps_what_it_matched() -> None:
    fails = {"name": "fails", "where": "n = 0", "at_least": 2}
    success = {"name": "success", "where": "n > 0 and not array_contains(fails.id, id)"}
    judge = started(
        sequence(fails, success, message="{fails.count} of {fails.id}, {id}"),
        [("a", 1, 0)], [("b", 2, 1)], [("c", 3, 0)], [("d", 3, 0)], [("e", 11, 1)], [("f", 12, 1)],
    )  # fmt: skip
    # e: [1, 11] holds a, which begins; b is passed over. f: [2, 12] has c and d.
    assert events(judge) == [("e", 0, "raised", 5), ("f", 0, "raised", 6)]
    # Once at the last step, e is an event of it, and so is f: but in f's own window both were taken.
    assert evidence(judge) == [("a", "c", "d", "e"), ("c", "d", "e", "f")]
    assert judge.alerts[0][12] == "3 of [a, c, d], e"
    assert judge.alerts[0][8:10] == (to_utc(1), to_utc(11))


def test_c4_a_step_that_took_more_than_at_most_is_no_match_and_until_begins_anew() -> None:
    steps = ({"name": "one", "where": "n = 0", "at_most": 1}, {"name": "two", "where": "n = 1"})
    commits = [[("a", 1, 0)], [("b", 2, 0)], [("c", 3, 1)], [("d", 4, 2)], [("e", 5, 0)], [("f", 6, 1)], [("g", 7, 1)]]
    # From a on, step one takes two events; from b on, it takes one.
    assert evidence(started(sequence(*steps), *commits)) == [("b", "c"), ("b", "c", "f"), ("b", "c", "f", "g")]
    judge = started(sequence(*steps, until="n = 2"), *commits)
    assert evidence(judge) == [("b", "c"), ("e", "f"), ("e", "f", "g")]


def test_c4_a_fixed_sequence_goes_by_arrival_from_its_first_event() -> None:
    steps = ({"name": "one", "where": "n = 0"}, {"name": "two", "where": "n = 1"})
    commits = [[("a", 5, 0)], [("b", 4, 1)], [("c", 15, 1)], [("d", 16, 1)], [("e", 17, 0)], [("f", 18, 1)]]
    judge = started(sequence(*steps, expiry="fixed"), *commits)
    # b is before the begin, d beyond begin + 10; e begins the next.
    assert evidence(judge) == [("a", "c"), ("e", "f")]


def test_c4_an_absence_is_raised_after_its_due_and_taken_back_by_a_late_event() -> None:
    steps = ({"name": "seen", "where": "n = 0"}, {"name": "silent", "absent": "n = 1", "within": "4 microseconds"})
    judge = started(sequence(*steps), [("a", 1, 0)], [("b", 8, 2)])
    # W = 5 has reached due = 5, but is not beyond it.
    assert events(judge) == []
    feed(judge, 3, ("c", 9, 2))
    assert events(judge) == [("a", 0, "raised", 3)]
    assert judge.alerts[0][7:10] == (to_utc(5), to_utc(1), to_utc(5))
    feed(judge, 4, ("d", 6, 1))
    assert len(judge.alerts) == 1
    feed(judge, 5, ("e", 5, 1))
    assert events(judge)[1:] == [("a", 1, "retracted", 5)]


def test_c4_an_absence_is_ended_by_an_event_that_had_arrived_before() -> None:
    steps = ({"name": "seen", "where": "n = 0"}, {"name": "silent", "absent": "n = 1", "within": "4 microseconds"})
    judge = started(sequence(*steps), [("b", 3, 1)], [("a", 2, 0)], [("z", 20, 2)])
    assert events(judge) == []
    # At the same time, but arrived before: not after it.
    judge = started(sequence(*steps), [("b", 3, 1)], [("a", 3, 0)], [("z", 20, 2)])
    assert events(judge) == [("a", 0, "raised", 3)]


def test_c4_a_late_event_begins_a_wait_that_may_be_over_at_once() -> None:
    steps = ({"name": "seen", "where": "n = 0"}, {"name": "silent", "absent": "n = 1", "within": "2 microseconds"})
    judge = started(sequence(*steps), [("z", 10, 2)], [("a", 4, 0)], [("b", 6, 1)])
    # a: due = 6 < W = 7.
    assert events(judge) == [("a", 0, "raised", 2), ("a", 1, "retracted", 3)]


def test_c4_advance_ends_windows_and_clear_state_forgets_rows_but_not_revisions() -> None:
    judge = started(window({"tumbling": "10 microseconds"}), [("a", 1, 0)], [("b", 2, 0)])
    judge.command("advance", 10)
    assert windows(judge) == [(0, 10, 0, "raised", "2", 2)]
    judge.command("clear_state")
    feed(judge, 3, ("c", 3, 0))
    assert windows(judge)[1:] == [(0, 10, 1, "raised", "1", 3)]
    assert [row[11] for row in judge.alerts] == [True, False]


def test_c4_what_errors_does_not_judge_and_is_counted() -> None:
    document = rule(
        window="5 microseconds", measures={"m": "count(*) filter (where 1 / n > 0)"}, when="1 / (m - 2) < 0"
    )
    # a: FILTER; b: m = 1; c: m = 2, so `when` errs; d: 3.
    judge = started(document, [("a", 1, 0)], [("b", 1, 1)], [("c", 1, 1)], [("d", 1, 1)])
    assert events(judge) == [("b", 0, "raised", 2)]
    assert judge.failed == {("r", 1): 2}


@pytest.mark.parametrize(
    "kind", [{"window": "9 microseconds"}, {"window": {"tumbling": "9 microseconds"}, "early": True}]
)
def test_c4_a_measure_beyond_the_calendar_is_no_verdict_and_counted(kind: dict[str, Any]) -> None:
    # 1969 and 2,932,897 days is 9999 still; from 1970 on it is the year 10000.
    document = rule(**kind, measures={"m": "max(at + interval 2932897 days)"}, when="m is not null", message="{m}")
    judge = started(document, [("a", -2, 1)], [("b", -1, 1)], [("c", 0, 1)], [("d", 1, 1)])
    assert {row[12] for row in judge.alerts} == {"9999-12-31T23:59:59.999998Z", "9999-12-31T23:59:59.999999Z"}
    assert judge.failed == {("r", 1): 2}
    # In a condition it is a time like any other.
    judge = started(
        rule(**kind, where="at + interval 2932897 days > at", measures={"m": "count(*)"}, when="m = 1"), [("a", 5, 1)]
    )
    assert [row[10] for row in judge.alerts] == [(("m", "1"),)]


@pytest.mark.parametrize(
    "kind",
    [
        {"window": "9 microseconds"},
        {"window": "9 microseconds", "late": "revise"},
        {"window": {"tumbling": "10 microseconds"}, "early": True},
        {"window": {"session": "9 microseconds"}, "early": True},
    ],
)
def test_c4_an_argument_is_not_evaluated_where_its_filter_or_the_where_is_not_true(kind: dict[str, Any]) -> None:
    measures = {"total": "sum(12 div n) filter (where n <> 0)", "seen": "count(*)"}
    document = rule(**kind, measures=measures, when="seen = 3 and total = 10")
    # 12 div 3 + 12 div 2; the second is not counted, and judged.
    judge = started(document, [("a", 1, 3)], [("b", 2, 0)], [("c", 3, 2)])
    assert [row[10] for row in judge.alerts] == [(("seen", "3"), ("total", "10"))]
    assert judge.failed == {}
    judge = started({**document, "when": "seen = 2", "where": "n <> 0"}, [("a", 1, 3)], [("b", 2, 0)], [("c", 3, 2)])
    assert [row[10] for row in judge.alerts] == [(("seen", "2"), ("total", "10"))]
    assert judge.failed == {}
    # An argument with an error that counts, and a filter with one.
    for text in ("sum(12 div n) filter (where n <= 1)", "sum(n) filter (where 1 / n > 0)"):
        judge = started(rule(**kind, measures={"m": text}, when="true"), [("a", 1, 1)], [("b", 2, 0)])
        assert judge.failed == {("r", 1): 1}


def test_c4_paused_keeps_state_and_judges_nothing() -> None:
    judge = started(window("9 microseconds", when="m >= 1"), [("a", 1, 0)])
    judge.change(window("9 microseconds", when="m >= 1"), 2, "paused")
    feed(judge, 2, ("b", 2, 0))
    judge.change(window("9 microseconds", when="m >= 1"), 3, "shadow")
    feed(judge, 3, ("c", 3, 0))
    assert [(row[3], row[4], row[10]) for row in judge.alerts] == [
        (1, "active", (("m", "1"),)),
        (3, "shadow", (("m", "3"),)),
    ]


def test_c12_1_an_event_rule_judges_each_event_by_itself() -> None:
    document = rule(where="id <> 'c'", when="n > 1", group_by=["k"], message="{id} of {k}: {n} {window_complete}")
    judge = started(document, [("a", 5, 2), ("b", 6, 1), ("c", 7, 9)], [("d", 8, 3)])
    assert events(judge) == [("a", 0, "raised", 1), ("d", 0, "raised", 2)]
    assert windows(judge) == [(5, 5, 0, "raised", None, 1), (8, 8, 0, "raised", None, 2)]
    assert evidence(judge) == [("a",), ("d",)]
    measures, complete, message = judge.alerts[0][10:13]
    assert (measures, complete, message) == ((), True, "a of x: 2 true")


@pytest.mark.parametrize("keys", [{"where": "n > 1"}, {"when": "n > 1"}], ids=["where", "when"])
def test_c12_1_either_condition_is_enough_and_group_by_may_be_left_out(keys: dict[str, str]) -> None:
    judge = started(rule(**keys), [("a", 5, 2), ("b", 6, 1)])
    assert events(judge) == [("a", 0, "raised", 1)]


def test_c12_1_null_raises_nothing_and_an_error_is_a_failure() -> None:
    judge = started(rule(where="n <> 7", when="10 / n > 1"), [("a", 5, 0), ("b", 6, 1), ("c", 7, 7)])
    judge.run([OracleEvent({"id": "d", "at": 8, "k": "x", "n": None}, 2, 8, (False, b"d"))])
    assert events(judge) == [("b", 0, "raised", 1)]
    assert judge.failed == {("r", 1): 1}


def test_c12_1_late_events_are_judged_or_recorded() -> None:
    late = [[("a", 10, 2)], [("b", 7, 2), ("c", 6, 2), ("d", 1, 2), ("e", 0, 2), ("f", 0, 1)]]
    judge = started(rule(when="n > 1"), *late)
    assert [row[0] for row in events(judge)] == ["a", "d", "c", "b"]
    # W = 7, so `b` is in time; nobody wants `f`.
    assert sorted((row[0], row[-1]) for row in judge.late) == [
        ("c", "evaluated"),
        ("d", "evaluated"),
        ("e", "discarded"),
    ]
    judge = started(rule(when="n > 1", late="record"), *late)
    assert [row[0] for row in events(judge)] == ["a", "b"]
    assert sorted((row[0], row[-1]) for row in judge.late) == [("c", "recorded"), ("d", "recorded"), ("e", "discarded")]


def test_c12_1_suppress_keeps_later_alerts_of_the_key_back() -> None:
    judge = started(
        rule(when="n > 1", group_by=["k"], suppress="2 microseconds"), [("a", 5, 2), ("b", 7, 2), ("c", 8, 2)]
    )
    assert [row[2] for row in events(judge)] == ["raised", "suppressed", "raised"]


ONE_TWO = ({"name": "one", "where": "n = 0"}, {"name": "two", "where": "n = 1"})


def test_c12_7_the_newest_match_waits_and_is_used_up() -> None:
    commits = [[("a", 1, 0), ("b", 2, 0)], [("c", 3, 1)], [("d", 4, 1)], [("e", 5, 0), ("f", 15, 1)], [("g", 16, 1)]]
    judge = started(sequence(*ONE_TWO, take="once"), *commits)
    # b replaces a, and c uses it up; e is exactly 10 before f.
    assert evidence(judge) == [("b", "c"), ("e", "f")]
    assert judge.alerts[0][8:10] == (to_utc(2), to_utc(3))
    commits[3] = [("e", 5, 0), ("f", 16, 1)]
    assert evidence(started(sequence(*ONE_TWO, take="once"), *commits)) == [("b", "c")]


def test_c12_7_an_event_ends_one_match_and_begins_the_next() -> None:
    any_two = ({"name": "one", "where": "n = 0"}, {"name": "two", "where": "n = 0"})
    judge = started(sequence(*any_two, take="once"), [("a", 1, 0)], [("b", 2, 0)], [("c", 3, 0)])
    assert evidence(judge) == [("a", "b"), ("b", "c")]


def test_c12_7_a_match_that_moves_on_replaces_the_one_that_waits_there() -> None:
    three = (*ONE_TWO, {"name": "three", "where": "n = 2"})
    commits = [[("a", 1, 0)], [("b", 2, 1)], [("c", 3, 0)], [("d", 4, 1)], [("e", 5, 2)], [("f", 6, 2)]]
    assert evidence(started(sequence(*three, take="once"), *commits)) == [("c", "d", "e")]


def test_c12_7_at_least_is_as_many_stages() -> None:
    steps = ({"name": "one", "where": "n = 0", "at_least": 2}, {"name": "two", "where": "n = 1"})
    message = "{one.count} of {one.n}, {two.count}"
    commits = [[("a", 1, 0)], [("b", 2, 0)], [("c", 3, 0)], [("d", 4, 1)], [("e", 5, 1)]]
    judge = started(sequence(*steps, take="once", message=message), *commits)
    # a and b waited for two when b and c replaced them.
    assert evidence(judge) == [("b", "c", "d")]
    assert judge.alerts[0][12] == "2 of [0, 0], 1"


def test_c12_7_until_is_offered_first_and_then_removes_all_matches() -> None:
    commits = [[("a", 1, 0)], [("b", 2, 1)], [("c", 3, 0)], [("d", 4, 3)], [("e", 5, 1)]]
    assert evidence(started(sequence(*ONE_TWO, take="once", until="n = 3"), *commits)) == [("a", "b")]
    assert evidence(started(sequence(*ONE_TWO, take="once", until="n = 1"), *commits)) == [("a", "b"), ("c", "e")]


def test_c12_7_an_event_is_judged_with_what_has_arrived_up_to_its_time() -> None:
    # c comes late, and so does not see d; e would have replaced a if it had come before b.
    commits = [[("a", 1, 0)], [("b", 5, 1)], [("e", 2, 0)], [("d", 6, 0)], [("c", 3, 1)], [("f", 7, 1)]]
    assert evidence(started(sequence(*ONE_TWO, take="once"), *commits)) == [("a", "b"), ("e", "c"), ("d", "f")]


@pytest.mark.parametrize(
    ("keys", "place"),
    [
        ({"expiry": "fixed"}, "sequence.expiry"),
        ({"steps": [{"name": "a", "where": "n = 0", "at_most": 2}]}, "sequence.steps[0].at_most"),
        ({"steps": [{"name": "a", "where": "n = 0", "at_least": 101}]}, "sequence.steps"),
    ],
)
def test_c12_7_what_has_no_meaning_is_refused(keys: dict[str, Any], place: str) -> None:
    document = sequence(*ONE_TWO, take="once")
    document["sequence"] |= keys
    with pytest.raises(RuleError, match="take: once") as refused:
        compile_rule(document, STREAM)
    assert [problem.place for problem in refused.value.problems] == [place]

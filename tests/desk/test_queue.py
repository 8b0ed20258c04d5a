"""The queue of a review desk: filters, orders, pages, which alert comes next, and what a session can undo."""

from __future__ import annotations

import datetime as dt
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookback.desk.queue import (
    AGES,
    ONLY_SNOOZED,
    ORDERS,
    PAGE_SIZE,
    WITH_SNOOZED,
    QueuedAlert,
    QueueFilter,
    ReviewQueue,
    SessionStep,
    find_step,
)

NOW = dt.datetime(2026, 3, 1, 12, tzinfo=dt.timezone.utc)
FIRST_ORDER = next(iter(ORDERS))


def alert(number: int, **values: object) -> QueuedAlert:
    made = QueuedAlert(
        alert_id=f"{number:032x}", revision=0, severity="high", event_time=NOW - dt.timedelta(minutes=number),
        decided_at=NOW - dt.timedelta(minutes=number), rule_id="day-spend", rule_version=1, stream="payments",
        key={"customer": f"c{number}"}, message="much",
    )  # fmt: skip
    return replace(made, **values)


def ids(alerts: object) -> list[int]:
    return [int(each.alert_id, 16) for each in alerts]


def queue_of(*alerts: QueuedAlert, order: str = FIRST_ORDER, **values: object) -> ReviewQueue:
    queue = ReviewQueue(alerts, NOW)
    queue.show(QueueFilter(**values), order)
    return queue


def test_alerts_are_filtered_by_rule_severity_entity_and_snooze():
    alerts = (
        alert(1), alert(2, rule_id="burst"), alert(3, severity="low"), alert(4, key={"customer": "Zoë", "shop": None}),
        alert(5, is_snoozed=True),
    )  # fmt: skip
    assert ids(queue_of(*alerts).shown) == [1, 2, 4, 3]
    assert ids(queue_of(*alerts, rule_id="burst").shown) == [2]
    assert ids(queue_of(*alerts, severity="low").shown) == [3]
    for text in ("customer zoË", "shop null", " Zoë "):
        assert ids(queue_of(*alerts, entity=text).shown) == [4]
    assert ids(queue_of(*alerts, snoozed=WITH_SNOOZED).shown) == [1, 2, 4, 5, 3]
    assert ids(queue_of(*alerts, snoozed=ONLY_SNOOZED).shown) == [5]
    assert queue_of(*alerts).list_rules() == ["burst", "day-spend"]


def test_c12_2_alerts_are_filtered_by_a_tag_whatever_its_capitals():
    alerts = (alert(1), alert(2, tags=("attack.T1110", "b")), alert(3, tags=("ATTACK.t1110",)))
    assert queue_of(*alerts).list_tags() == ["attack.t1110", "b"]
    assert ids(queue_of(*alerts, tag="attack.t1110").shown) == [2, 3]
    assert ids(queue_of(*alerts, tag="b").shown) == [2]
    assert ids(queue_of(*alerts, tag="attack").shown) == []


# decided:   8 d        7 d + 1 us   7 d      1 d        1 h + 1 us  1 h       now
#            |----------|------------|--------|----------|-----------|---------|
@pytest.mark.parametrize(
    ("age", "shown"),
    [
        ("any age", [0, 1, 2, 3, 4, 5, 6]),
        ("at most 1 hour", [5, 6]),
        ("at most 1 day", [3, 4, 5, 6]),
        ("at most 7 days", [2, 3, 4, 5, 6]),
        ("more than 1 day", [0, 1, 2]),
        ("more than 7 days", [0, 1]),
        ("more than 30 days", []),
    ],
)
def test_an_age_includes_its_end(age: str, shown: list[int]):
    tick = dt.timedelta(microseconds=1)
    day, hour = dt.timedelta(days=1), dt.timedelta(hours=1)
    ages = [8 * day, 7 * day + tick, 7 * day, day, hour + tick, hour, dt.timedelta(0)]
    alerts = [alert(number, decided_at=NOW - each) for number, each in enumerate(ages)]
    assert sorted(ids(queue_of(*alerts, age=age).shown)) == shown
    assert set(AGES) == {
        "any age", "at most 1 hour", "at most 1 day", "at most 7 days", "more than 1 day", "more than 7 days", "more than 30 days",
    }  # fmt: skip


def test_the_first_order_is_that_of_the_open_queue():
    alerts = [alert(4, severity="low"), alert(3, severity="medium"), alert(2), alert(1), alert(5, severity="critical")]
    assert ids(queue_of(*alerts).shown) == [5, 1, 2, 3, 4]
    # Of equal severity the score decides, then the time.
    scored = [alert(1), alert(2, score=40), alert(3, score=7), alert(4, score=99, severity="medium")]
    assert ids(queue_of(*scored).shown) == [2, 3, 1, 4]
    # Equal in all else: the rule's id decides, then the alert's.
    same = [
        alert(9, event_time=NOW, rule_id="b"),
        alert(8, event_time=NOW, rule_id="b"),
        alert(7, event_time=NOW, rule_id="c"),
    ]
    assert ids(queue_of(*same).shown) == [8, 9, 7]


def test_other_orders():
    alerts = [
        alert(2, rule_id="b", key={"c": "x"}),
        alert(1, rule_id="a", key={"c": "z"}),
        alert(3, rule_id="a", key={"c": "y"}),
    ]
    assert ids(queue_of(*alerts, order="newest first").shown) == [1, 2, 3]
    assert ids(queue_of(*alerts, order="oldest first").shown) == [3, 2, 1]
    assert ids(queue_of(*alerts, order="rule").shown) == [1, 3, 2]
    assert ids(queue_of(*alerts, order="entity").shown) == [2, 3, 1]


def test_the_largest_come_first_by_the_first_measure_that_is_a_number():
    def sized(number: int, *texts: str | None, **values: object) -> QueuedAlert:
        return alert(number, measures={f"m{at}": text for at, text in enumerate(texts)}, **values)

    alerts = [
        sized(1, "9.50"),
        sized(2, "100"),
        sized(3, "Berlin", "20"),
        sized(4),
        sized(5, None, "NaN", "Infinity"),
        sized(6, "1", score=5),
        sized(7, "0", severity="critical"),
    ]
    assert ids(queue_of(*alerts, order="severity, score, largest").shown) == [7, 6, 2, 3, 1, 4, 5]


def test_alerts_of_one_entity_have_its_key_in_the_same_stream_and_pass_the_filter():
    of_one = {"key": {"customer": "c1"}}
    alerts = (
        alert(1), alert(2, rule_id="burst", **of_one), alert(3), alert(4, stream="logins", **of_one),
        alert(5, severity="low", **of_one), alert(6, is_snoozed=True, **of_one),
    )  # fmt: skip
    queue = queue_of(*alerts)
    assert [int(each, 16) for each in queue.list_like(alerts[0])] == [1, 2, 5]


def test_pages_hold_fifty_and_there_is_always_one():
    queue = queue_of(*(alert(number) for number in range(2 * PAGE_SIZE + 1)))
    assert (queue.page, queue.pages, len(queue.on_page)) == (0, 3, PAGE_SIZE)
    queue.page = 99
    assert (queue.page, ids(queue.on_page)) == (2, [2 * PAGE_SIZE])
    queue.page = -1
    assert queue.page == 0
    # The last page is gone with its only alert.
    queue.page = 2
    queue.take_out([f"{2 * PAGE_SIZE:032x}"])
    assert (queue.page, queue.pages) == (1, 2)
    empty = ReviewQueue()
    assert (empty.page, empty.pages, list(empty.on_page)) == (0, 1, [])
    assert queue.turn_to(f"{PAGE_SIZE + 3:032x}") == 3
    assert queue.page == 1
    assert queue.turn_to("no such alert") is None


def test_the_next_alert_is_the_one_behind_and_at_the_end_the_first():
    queue = queue_of(*(alert(number) for number in range(4)))
    one = [f"{number:032x}" for number in range(4)]

    def following(*numbers: int) -> list[int]:
        found = queue.find_next([one[number] for number in numbers])
        return [] if found is None else ids([found])

    assert following(0) == [1]
    assert following(0, 2) == [3]
    assert following(3) == [0]
    assert following(0, 3) == [1]
    assert following(0, 1, 2, 3) == []
    # The open alert is not shown any more: the first that is.
    queue.show(QueueFilter(entity="c2"), FIRST_ORDER)
    assert following(0) == [2]


def test_what_is_taken_out_can_be_put_back_where_it_was():
    queue = queue_of(*(alert(number) for number in range(3)))
    taken = queue.take_out([f"{1:032x}", "no such alert"])
    assert (ids(taken), ids(queue.shown), len(queue)) == ([1], [0, 2], 2)
    queue.put_back(taken)
    assert ids(queue.shown) == [0, 1, 2]
    # Another revision takes the place of the one before.
    queue.put_back([alert(1, revision=2)])
    assert queue.find(f"{1:032x}").revision == 2
    assert len(queue) == 3


def test_a_snooze_hides_what_it_covers():
    queue = queue_of(alert(1), alert(2), alert(3, is_snoozed=True))
    assert ids(queue.snooze(lambda each: each.entity == "customer c1")) == [1]
    assert ids(queue.shown) == [2]
    assert queue.snooze(lambda each: each.entity == "customer c1") == []


def test_the_last_decision_on_an_alert_is_found():
    one = SessionStep((alert(0),), "benign", "", "kim", NOW)
    both = SessionStep((alert(0), alert(1)), "unclear", "", "kim", NOW)
    steps = [one, both]
    assert find_step(steps, alert(0).alert_id) is find_step(steps, alert(1).alert_id) is both
    assert find_step(steps[:1], alert(0).alert_id) is one
    assert find_step(steps[:1], alert(1).alert_id) is None
    assert find_step([], alert(0).alert_id) is None


@given(
    st.lists(st.sampled_from(range(12)), max_size=30),
    st.sampled_from(sorted(ORDERS)),
    st.lists(st.sampled_from(["low", "medium", "high", "critical", "of a later release"]), min_size=12, max_size=12),
)
def test_any_way_through_the_queue_meets_each_alert_once(decided: list[int], order: str, severities: list[str]):
    queue = queue_of(*(alert(number, severity=each) for number, each in enumerate(severities)), order=order)
    for number in decided:
        queue.take_out([f"{number:032x}"])
    met, current = [], queue.find_next([])
    while current is not None:
        met.append(current)
        following = queue.find_next([current.alert_id])
        queue.take_out([current.alert_id])
        current = following
    assert sorted(ids(met)) == sorted(set(range(12)) - set(decided))


def test_work_grows_in_line_with_the_alerts():
    def measure(count: int) -> float:
        alerts = [alert(number) for number in range(count)]
        begun = time.perf_counter()
        queue = queue_of(*alerts, entity="C1")
        for _ in range(20):
            following = queue.find_next([queue.shown[0].alert_id])
            queue.take_out([queue.shown[0].alert_id])
            queue.turn_to(following.alert_id)
        return time.perf_counter() - begun

    measure(1_000)
    small, large = min(measure(2_500) for _ in range(3)), min(measure(10_000) for _ in range(3))
    assert large < 4 * 2.5 * small

"""Review: what is in the queue, why an alert was raised, and what becomes of it."""

from __future__ import annotations

import datetime as dt
import json
import random
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from lookback import notebook
from lookback.cli import main
from lookback.core.errors import ReviewError, SetupError
from lookback.core.streams.declaration import Stream
from lookback.core.values.times import parse_time
from lookback.spark.explaining.counted import find_counted_events
from lookback.spark.explaining.evidence import find_first_within
from lookback.spark.newwindows import NewWindows
from lookback.spark.review import (
    count_older,
    decisions,
    explain,
    explain_event,
    note_on_older,
    open_queue,
    record_review,
)
from lookback.spark.rules import RulesTable
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from lookback.spark.tables.schemas import ALERTS
from payins import commit as commit_columns
from payins import lose_first_files, publish

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark
START = dt.datetime(2024, 3, 4, tzinfo=dt.timezone.utc)
STREAM = Stream.from_dict(
    {
        "stream": "spends",
        "event_id": "id",
        "event_time": "at",
        "fields": {"id": "bigint", "at": "timestamp", "customer": "string", "amount": "decimal(18,2)"},
        "max_out_of_orderness": "10 seconds",
        "allowed_lateness": "1 hour",
    }
)
STREAMS = {STREAM.name: STREAM}
SPEND = {
    "rule_id": "day-spend",
    "stream": "spends",
    "severity": "high",
    "group_by": ["customer"],
    "where": "amount > 0",
    "window": "24 hours",
    "measures": {
        "total": "sum(amount)",
        "large": "count(*) filter (where amount >= 100)",
        "usual": {"measure": "avg(amount)", "window": {"lookback": "2 days", "delay": "24 hours"}},
    },
    "when": "total >= 300 and large >= 1",
    "message": "{customer} spent {total}",
}
ANY = {
    "rule_id": "any-spend",
    "stream": "spends",
    "severity": "low",
    "group_by": [],
    "window": "10 minutes",
    "measures": {"n": "count(*)"},
    "when": "n >= 1",
}

TIME = pa.timestamp("us", tz="UTC")
COLUMNS = pa.schema(
    [
        ("id", pa.int64()),
        ("at", TIME),
        ("customer", pa.string()),
        ("amount", pa.decimal128(18, 2)),
        ("ingested_at", TIME),
    ]
)

Event = tuple[int, dt.datetime, "str | None", "Decimal | None"]


def event(number: int, seconds: float, amount: int | None = 100, customer: str | None = "a") -> Event:
    return (number, START + dt.timedelta(seconds=seconds), customer, None if amount is None else Decimal(amount))


def commit(tables: Tables, events: list[Event]) -> int:
    if not tables.exists(STREAM.name):
        tables.create(STREAM)
    # As another engine would, without a job of Spark's.
    columns = {name: list(values) for name, values in zip(STREAM.fields, zip(*events, strict=True), strict=True)}
    columns["ingested_at"] = [None] * len(events)
    commit_columns(tables, STREAM.name, columns, COLUMNS)
    return tables.version(STREAM.name)


def evaluate(tables: Tables, *rules: dict[str, Any]) -> None:
    if tables.is_unwritten("rules"):
        publish(tables, rules)
    else:
        for rule in rules:
            RulesTable(tables, STREAMS).push(rule)
    Evaluation(tables, STREAM, STREAMS, checkpoint_folder(tables, STREAM), once=True).run()


def alerts_of(tables: Tables, rule_id: str) -> list[Any]:
    return tables.read("alerts").where(f"rule_id = '{rule_id}'").orderBy("arrival", "event_time", "event_id").collect()


def ids(explained: Any, name: str) -> set[int]:
    (measure,) = [measure for measure in explained.measures if measure.name == name]
    return set(measure.events["id"]) if len(measure.events) else set()


def counted(commits: list[list[Event]], arrival: int, own: Event, first: float, last: float) -> set[int]:
    """The contract, event by event: what had arrived, was no more than an hour late, and lies `first` to `last` hours back."""
    taken, high = [], None
    for number, events in enumerate(commits, 1):
        for each in sorted(events, key=lambda e: (e[1], e[0])):
            late = high is not None and each[1] < high - dt.timedelta(seconds=10) - dt.timedelta(hours=1)
            if (number, each[1], each[0]) <= (arrival, own[1], own[0]) and not late:
                taken.append(each)
        high = max([each[1] for each in events] + ([high] if high else []))
    oldest, newest = own[1] - dt.timedelta(hours=first), own[1] - dt.timedelta(hours=last)
    return {e[0] for e in taken if oldest <= e[1] <= newest and e[2] == own[2] and e[3] is not None and e[3] > 0}


@pytest.mark.long
def test_c3_events_of_an_alert_are_those_that_stood_when_it_was_judged(tables: Tables):
    chance = random.Random(7)
    commits: list[list[Event]] = []
    for number in range(6):
        # Out of order within a commit and over commits, up to 14 hours: many are late, some beyond the lateness.
        base = number * 8 * 3600
        seconds = [base + chance.randint(-6 * 3600, 8 * 3600) // 600 * 600 for _ in range(40)]
        customers = [chance.choice(["a", "b", None]) for _ in seconds]
        commits.append(
            [
                event(number * 100 + at, second, chance.choice([None, -5, 20, 100, 150]), customer)
                for at, (second, customer) in enumerate(zip(seconds, customers, strict=True))
            ]
        )
    for events in commits:
        commit(tables, events)
    evaluate(tables, SPEND)
    by_id = {each[0]: each for events in commits for each in events}

    alerts = alerts_of(tables, "day-spend")

    assert len(alerts) > 50
    late = {int(row["event_id"]) for row in tables.read("late_events").where("action = 'evaluated'").collect()}
    chosen = [row for row in alerts if int(row["event_id"]) in late][:2] + chance.sample(alerts, 2)
    assert {row["key"]["customer"] for row in alerts} == {"a", "b", None}
    for row in chosen:
        explained, own = explain(tables, STREAMS, row["alert_id"]), by_id[int(row["event_id"])]
        assert explained.consistent, explained.measures
        expected = counted(commits, row["arrival"], own, 24, 0)
        assert ids(explained, "total") == expected
        assert ids(explained, "large") == {i for i in expected if by_id[i][3] >= 100}
        assert ids(explained, "usual") == counted(commits, row["arrival"], own, 72, 24)
        assert explained.timeline["is_alert"].sum() == 1
        assert set(explained.timeline.loc[explained.timeline["in_window"], "event_id"].astype(int)) == expected
        assert explained.timeline.loc[explained.timeline["is_alert"], "running"].item() == float(
            row["measures"]["total"]
        )


# commit 1           0 h ....................... 6 h  -> watermark 6 h - 10 s, late events are taken from 5 h - 10 s on
# commit 2                       x   y                   x one microsecond before that, y on it
# commit 3                                   z           judged over what was taken
@pytest.mark.long
def test_c3_3_an_event_at_the_allowed_lateness_counts_and_one_before_it_does_not(tables: Tables):
    edge = 5 * 3600 - 10
    commit(tables, [event(1, 0), event(2, 6 * 3600)])
    commit(tables, [event(3, edge - 1e-6), event(4, edge)])
    commit(tables, [event(5, 7 * 3600)])
    evaluate(tables, {**SPEND, "when": "total >= 1"})

    last = alerts_of(tables, "day-spend")[-1]
    explained = explain(tables, STREAMS, last["alert_id"])

    assert (last["event_id"], ids(explained, "total"), explained.consistent) == ("5", {1, 2, 4, 5}, True)


# 0 h [----- 24 hours -----] 24 h     both ends are included; one microsecond earlier is outside
@pytest.mark.long
def test_c3_4_both_ends_of_the_window_are_included(tables: Tables):
    commit(tables, [event(1, -1e-6), event(2, 0), event(3, 24 * 3600), event(4, 24 * 3600), event(5, 24 * 3600)])
    evaluate(tables, SPEND)

    by_event = {row["event_id"]: explain(tables, STREAMS, row["alert_id"]) for row in alerts_of(tables, "day-spend")}

    # Of the three at one time, each sees those with a lower id.
    assert {number: ids(explained, "total") for number, explained in by_event.items()} == {
        "4": {2, 3, 4},
        "5": {2, 3, 4, 5},
    }
    assert all(explained.consistent for explained in by_event.values())


@pytest.mark.long
def test_what_came_before_the_rule_and_what_a_widened_window_had_forgotten_does_not_count(tables: Tables):
    short = {**SPEND, "window": "1 hour", "measures": {"total": "sum(amount)"}, "when": "total >= 1"}
    commit(tables, [event(1, 0)])
    evaluate(tables, ANY)
    evaluate(tables, short)
    commit(tables, [event(2, 3600), event(3, 10 * 3600)])
    evaluate(tables)
    evaluate(tables, {**short, "window": "24 hours"})
    commit(tables, [event(4, 11 * 3600)])
    evaluate(tables)

    alerts = {row["event_id"]: row for row in alerts_of(tables, "day-spend")}
    explained = {number: explain(tables, STREAMS, row["alert_id"]) for number, row in alerts.items()}

    assert {number: ids(each, "total") for number, each in explained.items()} == {"2": {2}, "3": {3}, "4": {3, 4}}
    assert all(each.consistent for each in explained.values())
    assert (alerts["4"]["rule_version"], alerts["4"]["window_complete"]) == (2, False)
    assert explained["3"].rule["document"]["window"] == "1 hour"


@pytest.mark.long
def test_an_explanation_says_rule_key_window_measures_and_limits(tables: Tables):
    commit(tables, [event(1, 0, 200), event(2, 60, 150)])
    evaluate(tables, SPEND)

    (row,) = alerts_of(tables, "day-spend")
    explained = explain(tables, STREAMS, row["alert_id"])

    assert explained.sentence == (
        "Raised when total >= 300 and large >= 1, where total is the sum of amount over the 24 hours up to each event, "
        "large is the number of events where amount >= 100 over the 24 hours up to each event and usual is the average "
        "of amount over the 48 hours that end 24 hours before each event, per customer; only events where amount > 0."
    )
    assert explained.key == {"customer": "a"}
    assert explained.limits == {"total": (300.0,), "large": (1.0,)}
    assert [(m.name, m.recorded, m.recomputed) for m in explained.measures] == [
        ("total", "350.00", "350.00"),
        ("large", "2", "2"),
        ("usual", None, None),
    ]
    total = explained.measures[0]
    end = START + dt.timedelta(seconds=60)
    assert (total.window_start, total.window_end) == (end - dt.timedelta(hours=24), end)
    assert list(total.events.columns) == ["id", "at", "customer", "amount", "arrival"]
    assert explained.rule["version"] == 1
    assert list(explained.timeline["running"]) == [200.0, 350.0]
    # No event is missing from the window, and there was none in most of it.
    assert explained.alert["window_complete"]
    first = f"{START:%Y-%m-%d %H:%M:%S} UTC"
    assert explained.notes == (f"Table spends has no event before {first}, so the window is empty up to then.",)
    microsecond = dt.timedelta(microseconds=1)
    assert find_first_within(tables, STREAM, START - microsecond, START) == parse_time(START)
    # A window that begins at the first event is not empty there, as that of an event rule.
    assert find_first_within(tables, STREAM, START, START) is None
    assert find_first_within(tables, STREAM, START - 2 * microsecond, START - microsecond) is None


@pytest.mark.long
def test_events_deleted_before_did_not_count_and_those_deleted_since_are_missing(tables: Tables):
    commit(tables, [event(1, 0, 1000), event(2, 60), event(3, 120)])
    tables.spark.sql(f"DELETE FROM {tables.identifier(STREAM.name)} WHERE id = 1")
    evaluate(tables, {**SPEND, "when": "total >= 1"})
    commit(tables, [event(4, 180)])
    evaluate(tables)
    tables.spark.sql(f"DELETE FROM {tables.identifier(STREAM.name)} WHERE id = 2")

    last = alerts_of(tables, "day-spend")[-1]
    explained = explain(tables, STREAMS, last["alert_id"])

    assert (last["event_id"], last["measures"]["total"]) == ("4", "300.00")
    assert (ids(explained, "total"), explained.missing, explained.consistent) == ({3, 4}, 1, True)
    assert list(explained.timeline["event_id"]) == ["3", "4"]


# minutes  0     1     2          30   31         then, late: 1.5 and 11; 11 joins the two sessions and breaks a silence
#          100   20    150        100  100                    100     20
KINDS = {
    "again": {"window": "5 minutes", "measures": {"n": "count(*)"}, "when": "n >= 3", "late": "revise"},
    "emptied": {"window": "1 hour", "measures": {"n": "count(*)"}, "when": "n >= 2", "reset_on_alert": True},
    "tiles": {"window": {"tumbling": "10 minutes"}, "measures": {"total": "sum(amount)"}, "when": "total < 350"},
    "sliding": {"window": {"sliding": "10 minutes", "slide": "5 minutes"}, "measures": {"n": "count(distinct amount)"}},
    "visit": {"window": {"session": "19 minutes"}, "measures": {"total": "sum(amount)"}},
    "rise": {
        "sequence": {
            "within": "10 minutes",
            "steps": [{"name": "small", "where": "amount < 150"}, {"name": "large", "where": "amount > 100"}],
            "until": "amount > 100",
        }
    },
    "quiet": {
        "sequence": {
            "within": "10 minutes",
            "steps": [
                {"name": "large", "where": "amount > 100"},
                {"name": "silent", "absent": "true", "within": "10 minutes"},
            ],
        }
    },
}


# (rule, minute at which its window begins, revision) -> verdict, commit, events that counted or were taken, how many of
# these have been deleted since.
EXPLAINED = {
    ("again", -3, 1): ("raised", 4, {1, 2, 3, 6}, 0),
    ("emptied", -30, 0): ("raised", 2, {3}, 1),
    ("emptied", -49, 0): ("raised", 4, {6, 8}, 0),
    ("tiles", 0, 1): ("retracted", 4, {1, 2, 3, 6}, 0),
    ("sliding", 30, 0): ("raised", 3, {5}, 1),
    ("visit", 30, 1): ("retracted", 4, {5}, 1),
    ("visit", 0, 1): ("raised", 4, {1, 2, 3, 6}, 0),
    ("rise", 0, 0): ("raised", 1, {1, 2, 3}, 0),
    ("quiet", 2, 1): ("retracted", 4, {3, 8}, 0),
}


@pytest.mark.long
def test_a_row_of_every_kind_of_rule_is_explained_by_the_events_behind_it(tables: Tables):
    commit(tables, [event(1, 0), event(2, 60, 20), event(3, 120, 150), event(9, 60, 100, "b")])
    commit(tables, [event(4, 1800), event(5, 1860)])
    commit(tables, [event(10, 3060, 100, "b")])
    commit(tables, [event(6, 90), event(8, 660, 20)])
    commit(tables, [event(7, 4 * 3600)])
    base = {"stream": "spends", "group_by": ["customer"], "where": "amount > 0"}
    evaluate(tables, *({"rule_id": rule_id, **base, **own} for rule_id, own in KINDS.items()))
    tables.spark.sql(f"DELETE FROM {tables.identifier(STREAM.name)} WHERE id = 4")
    rows = {}
    for row in tables.read("alerts").where("key['customer'] = 'a'").collect():
        minute = (row["window_start"].replace(tzinfo=dt.timezone.utc) - START) // dt.timedelta(minutes=1)
        rows[row["rule_id"], minute, row["revision"]] = row

    for named, expected in EXPLAINED.items():
        row, revision = rows[named], named[2]
        is_last = (*named[:2], revision + 1) not in rows
        found = explain(tables, STREAMS, row["alert_id"], revision=None if is_last else revision)
        frames = [measure.events for measure in found.measures] + [step.events for step in found.steps]
        took = {int(number) for frame in frames for number in frame["id"]}
        assert (found.alert["verdict"], found.alert["arrival"], took, found.missing) == expected, named
        assert (found.alert["revision"], found.consistent) == (revision, True), (named, found.measures, found.steps)
    assert found.notes[0] == "Retracted: 8 came after all, with commit 4."
    with pytest.raises(ReviewError, match=r"has no revision 7; there are \[0, 1\]"):
        explain(tables, STREAMS, rows["quiet", 2, 0]["alert_id"], revision=7)


@pytest.mark.long
def test_c10_9_why_an_event_raised_nothing_is_said_with_its_values(tables: Tables):
    commit(tables, [event(1, 0), event(2, 60, 20), event(3, 120, 0), event(9, 60, 100, "b")])
    steps = [{"name": "large", "where": "amount = 100"}, {"name": "small", "where": "amount = 20"}]
    pair = {
        "rule_id": "pair",
        "stream": "spends",
        "group_by": ["customer"],
        "sequence": {"within": "40 seconds", "steps": steps},
    }
    evaluate(tables, SPEND, pair)
    commit(tables, [event(4, 1800, 250), event(5, 86_000, 20)])
    commit(tables, [event(6, 3, 500)])
    evaluate(tables)

    def names(number: int, rule_id: str = "day-spend", version: int | None = None) -> list[str]:
        found = explain_event(tables, STREAMS, rule_id, str(number), version=version)
        return [reason.name for reason in found.reasons]

    first = explain_event(tables, STREAMS, "day-spend", "2")
    assert (first.standing.status, first.arrival, first.key, first.event["amount"]) == (
        "active",
        1,
        {"customer": "a"},
        "20.00",
    )
    assert [str(part) for part in first.windows[0].parts] == [
        "total >= 300 is false (total = 120.00)", "large >= 1 is true (large = 1)",
    ]  # fmt: skip
    assert first.windows[0].measures == {"total": "120.00", "large": "1", "usual": None}
    assert first.picture is not None
    assert list(first.picture.timeline["event_id"]) == ["1", "2"]
    apart = explain_event(tables, STREAMS, "pair", "2").progress
    assert apart is not None
    assert [step.event_ids for step in apart.steps] == [(), ()]
    assert ([step.event_ids for step in apart.untimed], apart.gap) == ([("1",), ("2",)], 60_000_000)
    assert names(3) == ["where"]
    assert names(4) == ["raised"]
    assert names(6) == ["late"]
    with pytest.raises(ReviewError, match=r"rule 'day-spnd' does not exist; did you mean 'day-spend'"):
        explain_event(tables, STREAMS, "day-spnd", "1")
    with pytest.raises(ReviewError, match=r"never had an event '77'"):
        explain_event(tables, STREAMS, "day-spend", "77")
    with pytest.raises(
        ReviewError, match=r"version 7 of rule 'day-spend' is neither in the rules table nor in its history"
    ):
        explain_event(tables, STREAMS, "day-spend", "1", version=7)

    RulesTable(tables, STREAMS).set_status("day-spend", "paused")
    evaluate(tables)
    commit(tables, [event(7, 86_100, 900)])
    evaluate(tables)
    assert names(7)[0] == "paused"
    assert "deleted" not in names(2)
    tables.spark.sql(f"DELETE FROM {tables.identifier(STREAM.name)} WHERE id = 2")
    assert "deleted" in names(2)


@pytest.mark.long
def test_c10_9_a_document_that_was_rejected_or_obeyed_later_explains_no_earlier_alert(tables: Tables):
    document = {**ANY, "group_by": ["customer"], "when": "n >= 2"}

    def update(changed: dict[str, Any]) -> None:
        name = tables.identifier("rules")
        tables.spark.sql(f"UPDATE {name} SET document = '{json.dumps(changed)}' WHERE rule_id = 'any-spend'")

    commit(tables, [event(1, 0), event(2, 10)])
    evaluate(tables, document)
    # The stream rejects a document of another rule, and goes on with the one before.
    update({**document, "rule_id": "other", "window": "5 seconds"})
    commit(tables, [event(3, 20)])
    evaluate(tables)
    update({**document, "window": "15 seconds"})
    commit(tables, [event(4, 30)])
    evaluate(tables)
    explained = {row["event_id"]: explain(tables, STREAMS, row["alert_id"]) for row in alerts_of(tables, "any-spend")}
    assert all(each.consistent for each in explained.values())
    assert {name: ids(each, "n") for name, each in explained.items()} == {"2": {1, 2}, "3": {1, 2, 3}, "4": {3, 4}}
    windows = [each.rule["document"]["window"] for _, each in sorted(explained.items())]
    assert windows == ["10 minutes", "10 minutes", "15 seconds"]
    assert explain_event(tables, STREAMS, "any-spend", "3").windows[0].measures == {"n": "3"}


# 120 s         180 s         240 s     the watermark is at 172, goes to 180, a version with a sum comes, and it goes to 240
#     1     2      3
@pytest.mark.long
def test_c10_9_versions_and_advances_that_came_in_one_batch_explain_alerts_in_their_order(tables: Tables):
    document = {**ANY, "rule_id": "tiles", "group_by": ["customer"], "window": {"tumbling": "1 minute"}}
    commit(tables, [event(1, 125), event(2, 150), event(3, 182)])
    evaluate(tables, document)
    rules = RulesTable(tables, STREAMS)
    rules.command("advance", STREAM.name, time="2024-03-04T00:03:00Z")
    rules.push({**document, "measures": {"n": "count(*)", "total": "sum(amount)"}})
    rules.command("advance", STREAM.name, time="2024-03-04T00:04:00Z")
    evaluate(tables)

    log = tables.read("rule_log").where("action = 'advance' or version = 2").collect()
    assert [len(log), len({(row["arrival"], row["batch_id"]) for row in log})] == [3, 1]
    alerts = alerts_of(tables, "tiles")
    # The sum of version 2 begins with it.
    expected = [(1, {"n": "2"}), (2, {"n": "1", "total": None})]
    assert [(row["rule_version"], dict(row["measures"])) for row in alerts] == expected
    explained = [explain(tables, STREAMS, row["alert_id"]) for row in alerts]
    assert [(each.consistent, ids(each, "n")) for each in explained] == [(True, {1, 2}), (True, {3})]
    counted = find_counted_events(tables, STREAMS, tables.read("alerts")).collect()
    assert sorted((row["alert_id"] == alerts[0]["alert_id"], row["event_id"]) for row in counted) == [
        (False, "3"), (True, "1"), (True, "2")
    ]  # fmt: skip


# As above, but a sum comes into the same version by an UPDATE.
@pytest.mark.long
def test_c10_9_a_document_that_changed_between_advances_of_one_batch_explains_what_came_after_it(tables: Tables):
    document = {**ANY, "rule_id": "tiles", "group_by": ["customer"], "window": {"tumbling": "1 minute"}}
    commit(tables, [event(1, 125), event(2, 150), event(3, 182)])
    evaluate(tables, document)
    rules, name = RulesTable(tables, STREAMS), tables.identifier("rules")
    updated = json.dumps({**document, "measures": {"n": "count(*)", "total": "sum(amount)"}})
    rules.command("advance", STREAM.name, time="2024-03-04T00:03:00Z")
    tables.spark.sql(f"UPDATE {name} SET document = '{updated}' WHERE rule_id = 'tiles'")
    rules.command("advance", STREAM.name, time="2024-03-04T00:04:00Z")
    evaluate(tables)

    alerts = alerts_of(tables, "tiles")
    expected = [(1, {"n": "2"}), (1, {"n": "1", "total": None})]
    assert [(row["rule_version"], dict(row["measures"])) for row in alerts] == expected
    explained = [explain(tables, STREAMS, row["alert_id"]) for row in alerts]
    assert [(each.consistent, ids(each, "n")) for each in explained] == [(True, {1, 2}), (True, {3})]
    assert [list(each.rule["document"]["measures"]) for each in explained] == [["n"], ["n", "total"]]
    counted = find_counted_events(tables, STREAMS, tables.read("alerts")).collect()
    assert sorted((row["alert_id"] == alerts[0]["alert_id"], row["event_id"]) for row in counted) == [
        (False, "3"), (True, "1"), (True, "2")
    ]  # fmt: skip


@pytest.mark.long
def test_c10_9_where_the_first_rules_are_gone_their_rows_of_now_explain_alerts_and_what_is_lost_is_said(tables: Tables):
    document = {**ANY, "group_by": ["customer"], "window": "1 minute"}
    kept, changed, deleted = ({**document, "rule_id": name} for name in ("kept", "changed", "deleted"))
    commit(tables, [event(0, 0)])
    evaluate(tables, kept, changed, deleted)
    commit(tables, [event(1, 61), event(2, 62)])
    evaluate(tables)
    name = tables.identifier("rules")
    tables.spark.sql(f"DELETE FROM {name} WHERE rule_id = 'deleted'")
    tables.spark.sql(
        f"UPDATE {name} SET document = replace(document, '1 minute', '2 minutes') WHERE rule_id = 'changed'"
    )
    evaluate(tables, ANY)
    begins = tables.version("rules") + 1
    lose_first_files(tables, begins - 1, "rules")
    evaluate(tables, {**kept, "window": "2 minutes"})
    commit(tables, [event(3, 150)])
    evaluate(tables)

    found = {each: explain(tables, STREAMS, alerts_of(tables, each)[1]["alert_id"]) for each in ("kept", "changed")}
    assert [each.consistent for each in found.values()] == [True, False]
    said = found["kept"].notes[-1]
    assert said.endswith(
        f"begins at commit {begins}: earlier versions are read from the table's current rows; rows of 'changed' and "
        "'deleted' are missing, so state that they kept first may begin too late."
    )
    assert (
        "rows of 'changed' were updated or deleted, so it may have had another document" in found["changed"].notes[-1]
    )
    last = explain(tables, STREAMS, alerts_of(tables, "kept")[-1]["alert_id"])
    assert (last.alert["rule_version"], ids(last, "n"), last.consistent) == (2, {1, 2, 3}, True)
    with pytest.raises(ReviewError, match=f"version 1 of rule 'deleted' .* which begins at commit {begins}"):
        explain(tables, STREAMS, alerts_of(tables, "deleted")[0]["alert_id"])
    event_found = explain_event(tables, STREAMS, "kept", "2")
    assert (event_found.windows[0].measures, event_found.notes) == ({"n": "2"}, (said,))


# old:    v1 | 1 | v1 retired | 2 | v2 | 3        fresh:    v1, v2 | 1 | 2 | 3
@pytest.mark.long
def test_c10_9_an_alert_is_explained_by_what_its_own_evaluation_obeyed(tables: Tables):
    document, rules = {**ANY, "rule_id": "again"}, RulesTable(tables, STREAMS)
    commit(tables, [event(1, 0)])
    evaluate(tables, document)
    rules.set_status("again", "retired")
    evaluate(tables)
    commit(tables, [event(2, 1)])
    evaluate(tables)
    evaluate(tables, document)
    commit(tables, [event(3, 2)])
    evaluate(tables)
    folder = f"{checkpoint_folder(tables, STREAM)}-fresh"
    Evaluation(tables, STREAM, STREAMS, folder, once=True, fresh=True).run()

    rows = alerts_of(tables, "again")
    explained = [explain(tables, STREAMS, each) for each in sorted({row["alert_id"] for row in rows})]
    counted = {(each.alert["event_id"], each.alert["rule_version"]): ids(each, "n") for each in explained}
    assert all(each.consistent for each in explained), counted
    assert counted == {("1", 1): {1}, ("1", 3): {1}, ("2", 3): {1, 2}, ("3", 3): {1, 2, 3}}
    assert [each["arrival"] for each in explain_event(tables, STREAMS, "again", "3").alerts] == [rows[-1]["arrival"]]


@pytest.mark.long
def test_a_timeline_goes_back_as_many_days_as_asked(tables: Tables):
    commit(tables, [event(day, day * 86_400, 400) for day in range(8)])
    evaluate(tables, SPEND)

    last = alerts_of(tables, "day-spend")[-1]

    assert list(explain(tables, STREAMS, last["alert_id"], days=0).timeline["event_id"]) == ["6", "7"]
    assert list(explain(tables, STREAMS, last["alert_id"], days=3).timeline["event_id"]) == ["3", "4", "5", "6", "7"]


@pytest.mark.long
def test_push_can_warn_of_what_starts_empty_and_takes_over_a_day_to_fill_whatever_the_kind(tables: Tables):
    rules = RulesTable(tables, STREAMS)

    def find_cold(document: dict[str, Any]) -> list[str]:
        return NewWindows(rules).find_cold_measures(rules.check(document))

    base = {"rule_id": "long", "stream": "spends", "group_by": ["customer"]}
    measures = {"n": "count(*)", "total": "sum(amount)"}
    steps = [{"name": "any", "where": "true"}]
    tiles = {**base, "window": {"tumbling": "2 days"}, "measures": {"n": "count(*)"}}
    assert find_cold({**base, "window": {"tumbling": "1 day"}, "measures": measures}) == []
    assert find_cold({**base, "window": {"session": "2 hours"}, "measures": measures}) == []
    # Nobody could have kept rows of a stream that has none.
    sessions = {**base, "window": {"session": "2 days"}, "measures": measures}
    assert find_cold(sessions) == []
    commit(tables, [event(1, 0)])
    assert find_cold(sessions) == ["n", "total"]
    assert find_cold({**base, "sequence": {"within": "2 days", "steps": steps}}) == ["sequence"]
    assert find_cold(tiles) == ["n"]
    rules.push(tiles)
    assert find_cold({**tiles, "rule_id": "other", "measures": measures}) == ["total"]


def alert_row(number: int, **changes: Any) -> dict[str, Any]:
    time = START + dt.timedelta(minutes=number)
    row = {
        "alert_id": f"{number:032d}", "revision": 0, "verdict": "raised", "rule_id": "r", "rule_version": 1,
        "mode": "active", "severity": "medium", "stream": "spends", "key": {}, "event_id": str(number),
        "event_time": time, "window_start": time, "window_end": time, "window_complete": True, "measures": {},
        "message": "", "evidence": [], "arrival": 1, "decided_at": dt.datetime.now(dt.timezone.utc),
        "change": 1, "queue": True,
    }  # fmt: skip
    return {**row, **changes}


def test_the_queue_is_by_severity_then_newest_and_leaves_out_what_needs_nobody(tables: Tables):
    rows = [
        alert_row(1, severity="low"), alert_row(2, severity="critical"), alert_row(3, severity="high"), alert_row(4), alert_row(5),
        alert_row(6, mode="shadow"), alert_row(7, verdict="suppressed"), alert_row(8), alert_row(8, revision=1, verdict="retracted"),
        alert_row(9), alert_row(9, revision=1, message="second"), alert_row(10, rule_id="s"),
        alert_row(11, verdict="suppressed"), alert_row(11, revision=1, verdict="suppressed"),
        alert_row(12), alert_row(12, revision=1, verdict="retracted"), alert_row(12, revision=2, message="again"),
    ]  # fmt: skip
    tables.append(tables.spark.createDataFrame(rows, ALERTS), "alerts")
    record_review(tables, f"{4:032d}", "false_positive", "kim", "a refund")

    queue = open_queue(tables).collect()

    assert [int(row["alert_id"]) for row in queue] == [2, 3, 12, 10, 9, 5, 1]
    assert [row["message"] for row in queue if int(row["alert_id"]) in (9, 12)] == ["again", "second"]
    assert [int(row["alert_id"]) for row in open_queue(tables, "s").collect()] == [10]
    (review,) = tables.read("reviews").collect()
    assert review[:5] == (f"{4:032d}", "false_positive", 0, "kim", "a refund")

    with pytest.raises(
        ReviewError, match="disposition must be one of confirmed, false_positive, benign, unclear, got 'fine'"
    ):
        record_review(tables, f"{5:032d}", "fine", "kim")
    with pytest.raises(ReviewError, match="alert 'nothing' does not exist"):
        record_review(tables, "nothing", "confirmed", "kim")
    with pytest.raises(ReviewError, match="alert 'nothing' does not exist"):
        explain(tables, STREAMS, "nothing")
    with pytest.raises(ReviewError, match="reviewer must not be empty"):
        record_review(tables, f"{5:032d}", "confirmed", " ")
    assert tables.read("reviews").count() == 1

    record_review(tables, f"{9:032d}", "unclear", "kim")
    record_review(tables, f"{12:032d}", "confirmed", "kim")
    record_review(tables, f"{10:032d}", "confirmed", "kim")
    record_review(tables, f"{4:032d}", "confirmed", "kim", "no refund after all")
    assert [tuple(row) for row in decisions(tables).collect()] == [
        ("spends", "r", "confirmed", 2), ("spends", "r", "unclear", 1), ("spends", "s", "confirmed", 1),
    ]  # fmt: skip


def test_c12_2_alerts_are_listed_and_queued_by_a_tag(tables: Tables, capsys: Any):
    tags = {1: ["attack.T1110", "a"], 2: ["ATTACK.t1110"], 3: ["attack.t1110.003"], 4: [], 5: None}
    rows = [alert_row(number, tags=each) for number, each in tags.items()]
    rows.append(alert_row(6, tags=["attack.t1110"], verdict="suppressed"))
    tables.append(tables.spark.createDataFrame(rows, ALERTS), "alerts")

    def listed(*words: str) -> set[int]:
        assert main(["--root", str(tables.root), "alerts", "--json", *words]) == 0
        return {int(json.loads(line)["alert_id"]) for line in capsys.readouterr().out.splitlines()}

    assert listed("--tag", "attack.t1110") == {1, 2, 6}
    assert listed("--queue", "--tag", "attack.t1110") == {1, 2}
    assert listed("--tag", "attack.t1110.003") == {3}
    assert listed("--queue", "--tag", "t1110") == set()
    assert len(listed()) == 6
    assert {int(row["alert_id"]) for row in open_queue(tables, tag="A").collect()} == {1}


@pytest.mark.long
def test_reports_are_not_in_the_queue_and_have_a_view_of_their_own(tables: Tables, capsys: Any):
    late = START + dt.timedelta(days=1)
    rows = [
        alert_row(1, queue=True), alert_row(2, queue=False), alert_row(3), alert_row(4, severity="info", queue=False),
        alert_row(5, severity="info", queue=True), alert_row(6, severity="info", queue=False), alert_row(7, queue=False, mode="shadow"),
        alert_row(8, queue=False), alert_row(8, queue=False, revision=1, verdict="retracted"), alert_row(9, queue=False),
        # The rule was a report at first, and is none now.
        alert_row(10, queue=False, rule_id="s"), alert_row(11, queue=True, rule_id="s", rule_version=2),
        recent_row(12, 100, queue=False, event_time=late), recent_row(13, 100, queue=True),
    ]  # fmt: skip
    tables.append(tables.spark.createDataFrame(rows, ALERTS), "alerts")
    record_review(tables, f"{9:032d}", "benign", "kim")

    def listed(**changes: Any) -> list[int]:
        return [int(row["alert_id"]) for row in open_queue(tables, **changes).collect()]

    assert listed() == [11, 3, 1, 5]
    assert listed(reports=True) == [10, 2, 6, 4]
    assert listed(reports=True, rule_id="s") == [10]
    assert listed(reports=True, days=120)[0] == 12
    # Nobody is waited for, so it is not counted among the open ones that are too old for the queue.
    assert count_older(tables).count == 1
    words = ["--root", str(tables.root), "alerts", "--json"]
    assert main([*words, "--reports", "--days", "120"]) == 0
    assert [int(json.loads(line)["alert_id"]) for line in capsys.readouterr().out.splitlines()] == [12, 10, 2, 6, 4]
    shown = notebook.show_reports(SimpleNamespace(tables=tables, stream=STREAM), days=120)  # type: ignore[arg-type]
    assert [int(each) for each in shown["alert_id"]] == [12, 10, 6, 4, 2]


@pytest.mark.long
def test_a_decision_has_the_revision_that_was_seen_and_says_where_it_is_no_longer_the_last(tables: Tables):
    name = f"{1:032d}"
    rows = [alert_row(1, message="total 300"), alert_row(1, revision=1, message="total 5000000")]
    tables.append(tables.spark.createDataFrame(rows, ALERTS), "alerts")

    old = record_review(tables, name, "false_positive", "kim", revision=0)
    last = record_review(tables, name, "confirmed", "kim")

    assert (old.revision, old.last, last.revision, last.last) == (0, 1, 1, 1)
    assert str(old) == (
        f"Alert {name} is recorded as false_positive, by its revision 0: total 300. Revision 1 has arrived since; look "
        "at it, and decide again if it changes your mind."
    )
    assert str(last) == f"Alert {name} is recorded as confirmed, by its revision 1: total 5000000."
    # A repeated decision is no second row, so that it does not go over what somebody else has said in between.
    record_review(tables, name, "unclear", "ann")
    again = record_review(tables, name, "confirmed", "kim")
    assert not again.is_new
    (first,) = tables.read("reviews").where("disposition = 'confirmed'").collect()
    at = first["reviewed_at"].astimezone(dt.timezone.utc)
    assert str(again).startswith(
        f"Alert {name} was already recorded as confirmed by kim at {at:%Y-%m-%d %H:%M:%S} UTC, so nothing was written, by "
        "its revision 1: total 5000000"
    )
    recorded = tables.read("reviews").orderBy("reviewed_at").select("disposition", "revision", "reviewer").collect()
    assert [tuple(row) for row in recorded] == [
        ("false_positive", 0, "kim"),
        ("confirmed", 1, "kim"),
        ("unclear", 1, "ann"),
    ]
    with pytest.raises(ReviewError, match=r"has no revision 2; there are \[0, 1\]"):
        record_review(tables, name, "confirmed", "kim", revision=2)


@pytest.mark.long
def test_a_notebook_that_is_run_again_decides_only_on_the_alert_that_is_named(tables: Tables, capsys: Any):
    commit(tables, [event(1, 0), event(2, 60)])
    evaluate(tables, {**ANY, "message": "{n} spends"})
    workspace: Any = SimpleNamespace(tables=tables, streams=STREAMS, stream=STREAM)

    def run_all(alert_id: str, revision: str, disposition: str) -> str:
        """The cells of notebook 4 from the queue on."""
        capsys.readouterr()
        queue = notebook.show_queue(workspace)
        explanation = notebook.explain_alert(workspace, alert_id, queue, revision)
        notebook.review_alert(workspace, explanation, alert_id, disposition, "kim")
        return str(capsys.readouterr().out)

    first, second = (row["alert_id"] for row in open_queue(tables).collect())
    for _ in range(2):
        said = run_all("", "", "confirmed")
        assert f"For the one above, set alert_id {first} and revision 0." in said
    assert tables.read("reviews").count() == 0
    for _ in range(2):
        said = run_all(second, "0", "confirmed")
    assert f"Alert {second} was already recorded as confirmed by kim at " in said
    assert [tuple(row) for row in tables.read("reviews").select("alert_id", "revision").collect()] == [(second, 0)]
    with pytest.raises(ReviewError, match="has no revision 7"):
        run_all(second, "7", "confirmed")
    with pytest.raises(SetupError, match="parameter revision must be a whole number or empty, got 'last'"):
        run_all(second, "last", "confirmed")
    assert "set disposition to" in run_all(second, "", "")


def recent_row(number: int, days: float, **changes: Any) -> dict[str, Any]:
    """An alert that was decided so many days ago."""
    return alert_row(number, decided_at=dt.datetime.now(dt.timezone.utc) - dt.timedelta(days=days), **changes)


@pytest.mark.long
def test_the_queue_reads_no_files_from_before_it_begins_and_what_is_open_there_is_told(tables: Tables):
    # The old files are gone from the disk: who opens one fails.
    old = [recent_row(1, 120), recent_row(2, 100), recent_row(3, 110, mode="shadow"), recent_row(4, 95)]
    changed = [recent_row(4, 94, revision=1, verdict="retracted"), recent_row(5, 99, verdict="suppressed")]
    tables.append(tables.spark.createDataFrame([*old, *changed], ALERTS).coalesce(1), "alerts")
    record_review(tables, f"{2:032d}", "confirmed", "kim")
    older = count_older(tables)
    assert (older.count, older.oldest) == (1, old[0]["decided_at"])
    assert str(older).startswith("1 open alert is older than the queue, which begins at ")
    assert str(older).endswith("lookback alerts --queue --days 121 shows all of them.")
    assert [int(row["alert_id"]) for row in open_queue(tables, days=121).collect()] == [1]
    assert "There are older ones" in note_on_older(tables)
    assert note_on_older(tables, 130) == ""
    for file in Path(tables.path_or_name("alerts")).glob("*.parquet"):
        file.unlink()
    # An alert that was revised within the 90 days is as young as its revision.
    tables.append(tables.spark.createDataFrame([recent_row(6, 89), recent_row(1, 1, revision=1)], ALERTS), "alerts")

    assert {int(row["alert_id"]) for row in open_queue(tables).collect()} == {1, 6}
    assert [int(row["alert_id"]) for row in open_queue(tables, days=2).collect()] == [1]
    for days in (0, -1, float("nan"), 1e9):
        with pytest.raises(ReviewError, match="days of the queue"):
            open_queue(tables, days=days)

"""A new version comes into force with the history of its windows, read from the table beside the running stream (11.1, 11.2)."""

from __future__ import annotations

import datetime as dt
import json
import re
import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import lookback
from lookback.core.operations.health import check_health
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.versions import Piece
from lookback.core.values.columns import to_text
from lookback.core.values.times import to_utc
from lookback.spark.explaining.explanations import explain
from lookback.spark.following.warmups import Request
from lookback.spark.newwindows import NewWindows
from lookback.spark.operations.status import read_stream_figures, read_warm_ups
from lookback.spark.replay import histories
from lookback.spark.replay.histories import leave_out_settled, make_history
from lookback.spark.replay.history import History
from lookback.spark.replay.proof import prove
from lookback.spark.rules import RulesTable
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from lookback.spark.tables.lakehouse import Tables
from payins import MORE_RULES, RULES, STREAM, STREAMS, append, make_events, replayed_alerts, rule, stored_alerts, window

if TYPE_CHECKING:
    from alert_rows import AlertRow
    from lookback.core.streams.declaration import Stream

pytestmark = pytest.mark.spark

EVENTS = make_events(300, seed=24)
# Windows that reach back before the commits after which they come into force.
LONG = {**rule("long"), "window": "30 minutes", "when": "n >= 1", "message": "{n} {window_complete}"}
MINUTES = window("long-minutes", {"sliding": "3 minutes", "slide": "20 seconds"}, when="n >= 1")
# The order of events decides what these keep: sessions, matches with fixed expiry, waits for an absence.
ORDERED = [each for each in MORE_RULES if each["rule_id"] in ("sessions", "fixed", "silent")]


def evaluate(tables: Tables, **options: Any) -> Evaluation:
    options = {"once": True, "historian": make_history, **options}
    evaluation = Evaluation(tables, STREAM, STREAMS, checkpoint_folder(tables, STREAM), **options)
    evaluation.run()
    return evaluation


def part(first: int, last: int) -> list[dict[str, Any]]:
    return [row for row in EVENTS if first <= row["arrival"] <= last]


def log_of(tables: Tables, *rule_ids: str) -> list[tuple[Any, ...]]:
    rows = tables.read("rule_log").orderBy("logged_at", "position").collect()
    return [tuple(row[name] for name in ("rule_id", "action", "arrival")) for row in rows if row["rule_id"] in rule_ids]


def alerts_of(rows: list[AlertRow], rule_id: str, after: int) -> list[AlertRow]:
    return sorted(row for row in rows if row.rule_id == rule_id and row.arrival > after)


def replay_warm(document: dict[str, Any], begun: int, active: int) -> list[AlertRow]:
    row = {"rule_id": document["rule_id"], "version": 1, "status": "active", "document": json.dumps(document)}
    return replayed_alerts(lookback.replay([(row, begun, active)], EVENTS, STREAM))


@pytest.mark.long
def test_c11_1_a_run_that_does_not_wait_warms_first_and_then_judges(tables: Tables) -> None:
    """11.1: `--once` warms with A = C; rebuild and proof give the same from what was logged."""
    tables.create(STREAM)
    rules = RulesTable(tables, STREAMS)
    rules.push(RULES[1])
    append(tables, part(1, 6))
    evaluate(tables)
    documents = (LONG, MINUTES, *ORDERED)
    for document in documents:
        rules.push(document)
    append(tables, part(7, 9))
    evaluate(tables)
    for document in documents:
        assert [row[1:] for row in log_of(tables, document["rule_id"])] == [("warming", 6), ("activated", 6)]

    def check(last: int) -> None:
        for document in documents:
            found = alerts_of(stored_alerts(tables), document["rule_id"], 0)
            replayed = [row for row in replay_warm(document, 6, 6) if row.arrival <= last]
            assert found == alerts_of(replayed, document["rule_id"], 0)
            assert found

    check(9)
    for document in documents:
        alerts = alerts_of(stored_alerts(tables), document["rule_id"], 6)
        assert {row.window_complete for row in alerts} == {True}
        assert explain(tables, STREAMS, alerts[-1].alert_id).consistent
    with prove(tables, STREAM, STREAMS) as proofs:
        assert all(row.holds for row in proofs.rows)

    # A driver that was killed before it knew that the stream had taken a piece names it again, after other changes.
    append(tables, part(10, 10))
    rules.push(RULES[0])
    evaluate(tables)
    for row in tables.read("rules").where("status = 'warm'").collect():
        rules.publish_piece(STREAM.name, Piece.from_document(json.loads(row["document"])))
    # The state is lost: made anew, it has the history of before too.
    shutil.rmtree(checkpoint_folder(tables, STREAM))
    append(tables, part(11, 12))
    evaluate(tables, rebuild=True)
    check(12)
    with prove(tables, STREAM, STREAMS) as proofs:
        assert not proofs.differences.collect()
    # What the pieces were made of is not needed any more.
    assert not list(Path(checkpoint_folder(tables, STREAM)).glob("lookback-histories/*"))


@pytest.mark.long
@pytest.mark.parametrize("documents", [[LONG], ORDERED], ids=["long", "ordered"])
def test_c11_1_the_stream_goes_on_while_a_version_is_warming(documents: list[dict[str, Any]], tables: Tables) -> None:
    """11.1: pieces come between the batches; alerts after A are those of a version that stood in silence from the start."""
    may_read = threading.Event()
    ids = [document["rule_id"] for document in documents]

    def activated() -> set[str]:
        logged = [row for report in evaluation.reports for row in report.log]
        return {row["rule_id"] for row in logged if row["action"] == "activated"}

    def make_late(tables: Tables, stream: Stream, request: Request) -> int:
        may_read.wait(120)
        return make_history(tables, stream, request)

    tables.create(STREAM)
    rules = RulesTable(tables, STREAMS)
    rules.push(RULES[1])
    append(tables, part(1, 4))
    evaluation = Evaluation(
        tables, STREAM, STREAMS, checkpoint_folder(tables, STREAM), every="0 seconds", historian=make_late
    ).start()
    try:
        evaluation.wait_until(lambda report: report.arrival == 4, timeout=60)
        for document in documents:
            rules.push(document)
        evaluation.wait_until(lambda report: len(report.warming) == len(documents), timeout=60)
        append(tables, part(5, 8))
        evaluation.wait_until(lambda report: report.arrival == 8, timeout=60)
        assert {row.rule_id: row.status for row in rules.list_rows()} == {
            RULES[1]["rule_id"]: "active", **dict.fromkeys(ids, "warming"),
        }  # fmt: skip
        assert {(each.rule_id, each.version, each.pieces) for each in read_warm_ups(tables, STREAM)} == {
            (rule_id, 1, 0) for rule_id in ids
        }
        late = dt.datetime.now(dt.timezone.utc) + dt.timedelta(hours=1)
        figures = read_stream_figures(tables, STREAM, now=late)
        assert {each.check for each in check_health(figures)} >= {"warming_stuck"}
        may_read.set()
        evaluation.wait_until(lambda _: activated() >= set(ids), timeout=120)
        append(tables, part(9, 12))
        evaluation.wait_until(lambda report: report.arrival == 12, timeout=60)
        time.sleep(0.1)
    finally:
        may_read.set()
        evaluation.stop()
    assert not read_warm_ups(tables, STREAM)
    assert evaluation.reports[-1].warming == ()
    for document in documents:
        rule_id = document["rule_id"]
        (_, begun), (_, active) = [row[1:] for row in log_of(tables, rule_id)]
        found = alerts_of(stored_alerts(tables), rule_id, 0)
        assert (begun, found) == (4, alerts_of(replay_warm(document, begun, active), rule_id, 0))
        assert found
    with prove(tables, STREAM, STREAMS) as proofs:
        assert all(row.holds for row in proofs.rows)


@pytest.mark.long
def test_c11_1_a_history_that_cannot_be_made_lets_the_version_start_cold(tables: Tables) -> None:
    """11.1: after three failures it starts cold, logged."""

    def fail(*_: object) -> int:
        raise OSError("no such volume")

    tables.create(STREAM)
    rules = RulesTable(tables, STREAMS)
    rules.push(RULES[1])
    append(tables, part(1, 6))
    evaluate(tables)
    rules.push(LONG)
    append(tables, part(7, 12))
    evaluate(tables, historian=fail)
    assert [row[1:] for row in log_of(tables, "long")] == [("warming", 6), ("activated", 6)]
    message = tables.read("rule_log").where("rule_id = 'long' and action = 'activated'").collect()[0]["message"]
    assert message == "without history: it could not be made"
    row = {"rule_id": "long", "version": 1, "status": "active", "document": json.dumps(LONG)}
    cold = replayed_alerts(lookback.replay([(row, 6)], EVENTS, STREAM))
    assert alerts_of(stored_alerts(tables), "long", 0) == alerts_of(cold, "long", 0)
    with prove(tables, STREAM, STREAMS) as proofs:
        assert all(row.holds for row in proofs.rows)


def describe_history(rules: RulesTable, document: dict[str, Any]) -> str:
    return NewWindows(rules).describe_history(rules.check(document))


def describe_young_stream(rules: RulesTable, document: dict[str, Any]) -> str:
    return NewWindows(rules).describe_young_stream(rules.check(document))


def test_push_says_what_history_there_is(tables: Tables) -> None:
    tables.create(STREAM)
    append(tables, part(1, 12))
    rules = RulesTable(tables, STREAMS)
    assert describe_history(rules, LONG) == (
        f"the stream has not been evaluated yet: the first lookback evaluate {STREAM.name} judges all its events in the "
        "order of their arrival, and the windows fill from the first one on"
    )
    logged = {"stream": STREAM.name, "rule_id": "other", "version": 1, "action": "activated", "message": ""}
    tables.append_rows([{**logged, "arrival": None, "logged_at": dt.datetime.now(dt.timezone.utc)}], "rule_log")
    words = r"the running stream reads the (\d+) events since (\S+Z) from the table, in about 5 s, and until then "
    found = re.fullmatch(rf"{words}the rule raises no alert", describe_history(rules, LONG))
    assert found
    rules.push(LONG)
    assert re.fullmatch(rf"{words}version 1 stays in force", describe_history(rules, LONG))
    newest = max(row["at"] for row in EVENTS)
    counted = [row["at"] for row in EVENTS if row["at"] >= newest - compile_rule(LONG, STREAM).needs.popitem()[1]]
    assert (int(found[1]), found[2]) == (len(counted), to_text(to_utc(min(counted))))
    cold = "so window_complete is false until the longest window has filled"
    assert describe_history(rules, {**LONG, "warm_start": False}) == f"its document has warm_start: false, {cold}"
    # Where a session begins may depend on all that came before.
    for document in ORDERED[:2]:
        assert f"the {len(EVENTS):,} events since {to_text(to_utc(min(row['at'] for row in EVENTS)))}" in (
            describe_history(rules, document)
        )


def test_c3_8_push_warns_where_a_window_is_longer_than_the_stream(tables: Tables) -> None:
    rules = RulesTable(tables, STREAMS)
    waits = {**LONG, "window": "5 minutes", "when": "n >= 1 and window_complete"}
    assert describe_young_stream(rules, waits) == ""  # there is no event yet
    tables.create(STREAM)
    append(tables, part(1, 12))
    first, last = (pick(row["at"] for row in part(1, 12)) for pick in (min, max))
    # Five minutes fit between the first and the last event, and two days do not.
    assert last - first >= 5 * 60_000_000
    assert describe_young_stream(rules, waits) == ""
    years = {**waits, "window": "2 days"}
    full = to_text(to_utc(first + 2 * _DAY))
    assert describe_young_stream(rules, years) == (
        f"the first event of {STREAM.name} is of {to_text(to_utc(first))}, and window_complete is true from it on, "
        f"although the windows of 2 days begin earlier; to wait until they do not, set effective_from: {full}"
    )
    assert describe_young_stream(rules, {**years, "effective_from": full}) == ""
    assert describe_young_stream(rules, {**years, "when": "n >= 1"}) == ""


def test_push_reads_the_tables_once_for_all_rules(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    tables.create(STREAM)
    append(tables, part(1, 12))
    rules = RulesTable(tables, STREAMS)
    logged = {"stream": STREAM.name, "rule_id": "other", "version": 1, "action": "activated", "message": ""}
    tables.append_rows([{**logged, "arrival": None, "logged_at": dt.datetime.now(dt.timezone.utc)}], "rule_log")
    read, found = [], []
    of_tables, of_rules = Tables.read, RulesTable.rows
    monkeypatch.setattr(Tables, "read", lambda self, name, *rest: read.append(name) or of_tables(self, name, *rest))
    monkeypatch.setattr(RulesTable, "rows", lambda self, *rest: read.append("rules") or of_rules(self, *rest))
    windows, document = NewWindows(rules), {**LONG, "when": "n >= 1 and window_complete", "window": "2 days"}
    for rule_id in ("a", "b", "c"):
        rule = rules.check({**document, "rule_id": rule_id})
        found.append(
            [windows.find_cold_measures(rule), windows.describe_history(rule), windows.describe_young_stream(rule)]
        )
    assert all(found[0])
    assert found == [found[0]] * 3
    # Of the events: whether there are any, the first and last, and those that the windows reach.
    assert sorted(read) == sorted(["rule_log", "rules", *[STREAM.name] * 3])


_HOUR, _DAY = 3_600_000_000, 86_400_000_000


@pytest.mark.parametrize(
    ("times", "is_left_out"),
    [
        # All that is settled has ended a gap before; the key goes on after it.
        ([-40, -30, -1, 1], True),
        # An hour apart each, from before the day that is looked at: it may be one session.
        ([*range(-40, 2)], False),
        # A microsecond more than the gap, once, is enough.
        ([*range(-40, -9), -9 + 1 / _HOUR, *range(-8, 2)], True),
        # The last event is settled, whatever came before.
        ([*range(-40, 1)], True),
        # A gap that begins at that time is enough; one that begins later is not.
        ([*range(-24, 1), 3], True),
        ([*range(-24, 2), 4], False),
    ],
)
def test_events_are_left_out_before_a_gap_of_every_key(
    tables: Tables, times: list[float], is_left_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hours after the time that is settled, of the key NULL; another one is seldom there."""
    monkeypatch.setattr(histories, "_MIN_LEFT_OUT", 1)
    monkeypatch.setattr(histories, "_SPANS", (1,))
    document = window("sessions", {"session": "1 hour"})
    settled = 100 * _DAY
    rows = [
        (to_utc(settled + round(at * _HOUR)), customer)
        for customer, hours in ((None, times), (1, [-40, 2]))
        for at in hours
    ]
    frame = tables.spark.createDataFrame(
        [(at, customer, kind) for at, customer in rows for kind in ("insert", "delete")],
        "at timestamp, customer int, _change_type string",
    )
    listed = sorted((at - to_utc(0)) // dt.timedelta(microseconds=1) for at, _ in rows)
    history = History(STREAM, 1, 9, len(rows), 0, [9], listed[0], listed[-1])
    request = Request(compile_rule(document, STREAM), 9, 1, None, "", settled=settled)  # type: ignore[arg-type]
    begin = settled - _DAY
    kept = sum(2 for at in listed if at >= begin) if is_left_out else 2 * len(rows)
    assert leave_out_settled(frame, STREAM, request, history).count() == kept

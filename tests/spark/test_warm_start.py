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
from lookback.core.rules.compiled import compile_rule
from lookback.core.values.columns import to_text
from lookback.core.values.times import to_utc
from lookback.spark.explaining.explanations import explain
from lookback.spark.operations.status import read_stream_figures, read_warm_ups
from lookback.spark.replay.histories import make_history
from lookback.spark.replay.proof import prove
from lookback.spark.rules import RulesTable
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from payins import MORE_RULES, RULES, STREAM, STREAMS, append, make_events, replayed_alerts, rule, stored_alerts, window

if TYPE_CHECKING:
    from alert_rows import AlertRow
    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark

EVENTS = make_events(300, seed=24)
# Windows that reach back before the commits after which they come into force.
LONG = {**rule("long"), "window": "30 minutes", "when": "n >= 1", "message": "{n} {window_complete}"}
MINUTES = window("long-minutes", {"sliding": "3 minutes", "slide": "20 seconds"}, when="n >= 1")


def evaluate(tables: Tables, **options: Any) -> Evaluation:
    options = {"once": True, "historian": make_history, **options}
    evaluation = Evaluation(tables, STREAM, STREAMS, checkpoint_folder(tables, STREAM), **options)
    evaluation.run()
    return evaluation


def part(first: int, last: int) -> list[dict[str, Any]]:
    return [row for row in EVENTS if first <= row["arrival"] <= last]


def log_of(tables: Tables, *rule_ids: str) -> list[tuple[Any, ...]]:
    rows = tables.read("rule_log").orderBy("logged_at", "batch_id").collect()
    return [tuple(row[name] for name in ("rule_id", "action", "arrival")) for row in rows if row["rule_id"] in rule_ids]


def alerts_of(rows: list[AlertRow], rule_id: str, after: int) -> list[AlertRow]:
    return sorted(row for row in rows if row.rule_id == rule_id and row.arrival > after)


def replay_warm(document: dict[str, Any], begun: int, active: int) -> list[AlertRow]:
    row = {"rule_id": document["rule_id"], "version": 1, "status": "active", "document": json.dumps(document)}
    return replayed_alerts(lookback.replay([(row, begun, active)], EVENTS, STREAM))


def test_a_run_that_does_not_wait_warms_first_and_then_judges(tables: Tables) -> None:
    """11.1: `--once` warms with A = C; rebuild and proof give the same from what was logged."""
    tables.create(STREAM)
    rules = RulesTable(tables, STREAMS)
    rules.push(RULES[1])
    append(tables, part(1, 6))
    evaluate(tables)
    for document in (LONG, MINUTES):
        rules.push(document)
    append(tables, part(7, 9))
    evaluate(tables)
    expected = [("warming", 6), ("activated", 6)]
    assert (
        [row[1:] for row in log_of(tables, "long")] == [row[1:] for row in log_of(tables, "long-minutes")] == expected
    )

    def check(last: int) -> None:
        for document in (LONG, MINUTES):
            found = alerts_of(stored_alerts(tables), document["rule_id"], 0)
            replayed = [row for row in replay_warm(document, 6, 6) if row.arrival <= last]
            assert found == alerts_of(replayed, document["rule_id"], 0)
            assert found

    check(9)
    alerts = alerts_of(stored_alerts(tables), "long", 6)
    assert {row.window_complete for row in alerts} == {True}
    assert explain(tables, STREAMS, alerts[-1].alert_id).consistent
    with prove(tables, STREAM, STREAMS) as proofs:
        assert all(row.holds for row in proofs.rows)

    # The state is lost: made anew, it has the history of before too.
    shutil.rmtree(checkpoint_folder(tables, STREAM))
    append(tables, part(10, 12))
    evaluate(tables, rebuild=True)
    check(12)
    # What the pieces were made of is not needed any more.
    assert not list(Path(checkpoint_folder(tables, STREAM)).glob("lookback-histories/*"))


def test_the_stream_goes_on_while_a_version_is_warming(tables: Tables) -> None:
    """11.1: pieces come between the batches; alerts after A are those of a version that stood in silence from the start."""
    may_read = threading.Event()

    def make_later(*given: Any) -> int:
        may_read.wait(120)
        return make_history(*given)

    tables.create(STREAM)
    rules = RulesTable(tables, STREAMS)
    rules.push(RULES[1])
    append(tables, part(1, 4))
    evaluation = Evaluation(
        tables, STREAM, STREAMS, checkpoint_folder(tables, STREAM), every="0 seconds", historian=make_later
    ).start()
    try:
        evaluation.wait_until(lambda report: report.arrival == 4, timeout=60)
        rules.push(LONG)
        evaluation.wait_until(lambda report: bool(report.warming), timeout=60)
        append(tables, part(5, 8))
        evaluation.wait_until(lambda report: report.arrival == 8, timeout=60)
        assert [(row.rule_id, row.status) for row in rules.list_rows()] == [
            (RULES[1]["rule_id"], "active"),
            ("long", "warming"),
        ]
        (waiting,) = read_warm_ups(tables, STREAM)
        assert (waiting.rule_id, waiting.version, waiting.pieces) == ("long", 1, 0)
        late = dt.datetime.now(dt.timezone.utc) + dt.timedelta(hours=1)
        figures = read_stream_figures(tables, STREAM, now=late)
        assert [each.check for each in check_health(figures) if each.check == "warming_stuck"] == ["warming_stuck"]
        may_read.set()
        evaluation.wait_until(
            lambda report: any((row["rule_id"], row["action"]) == ("long", "activated") for row in report.log),
            timeout=120,
        )
        append(tables, part(9, 12))
        evaluation.wait_until(lambda report: report.arrival == 12, timeout=60)
        time.sleep(0.1)
    finally:
        may_read.set()
        evaluation.stop()
    assert not read_warm_ups(tables, STREAM)
    (_, begun), (_, active) = [row[1:] for row in log_of(tables, "long")]
    assert (begun, evaluation.reports[-1].warming) == (4, ())
    assert alerts_of(stored_alerts(tables), "long", 0) == alerts_of(replay_warm(LONG, begun, active), "long", 0)
    with prove(tables, STREAM, STREAMS) as proofs:
        assert all(row.holds for row in proofs.rows)


def test_a_history_that_cannot_be_made_lets_the_version_start_cold(tables: Tables) -> None:
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


def test_push_says_what_history_there_is(tables: Tables) -> None:
    tables.create(STREAM)
    append(tables, part(1, 12))
    rules = RulesTable(tables, STREAMS)
    found = re.fullmatch(
        r"the running stream reads the (\d+) events since (\S+Z) from the table, in some 5 s, and until then the version before it "
        r"stays in force",
        rules.describe_history(LONG),
    )
    assert found
    newest = max(row["at"] for row in EVENTS)
    counted = [row["at"] for row in EVENTS if row["at"] >= newest - compile_rule(LONG, STREAM).needs.popitem()[1]]
    assert (int(found[1]), found[2]) == (len(counted), to_text(to_utc(min(counted))))
    cold = "so window_complete is false until the longest window has filled"
    assert rules.describe_history({**LONG, "warm_start": False}) == f"its document has warm_start: false, {cold}"
    assert rules.describe_history(MORE_RULES[5]) == f"a session depends on the order of its events, {cold}"

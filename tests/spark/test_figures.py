"""Figures of rules by hand: precision, recall, overlap, as of a moment (contracts 10.4 and 10.5)."""

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from pyspark.sql import functions as F  # noqa: N812

from lookback.cli import main
from lookback.core.errors import StreamError
from lookback.core.streams.declaration import Stream
from lookback.spark.figures import Period, RuleFigures, _FlaggedSet, find_redundant
from lookback.spark.labels import read_labels
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from lookback.spark.tables.schemas import ALERTS, LABELS
from payins import START, STREAM, STREAMS, append, make_events, publish, rule, sequence, window
from sample_alert import ALERT

if TYPE_CHECKING:
    from pathlib import Path

    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark
SECOND, DAY = 1_000_000, 86_400_000_000
MIDNIGHT = START - START % DAY
WORTH = Stream.from_dict({**STREAM.to_dict(), "value": "amount"})


def time(microseconds: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(0, dt.timezone.utc) + dt.timedelta(microseconds=microseconds)


def event(name: str, at: int, customer: int | None, amount: int, arrival: int = 1) -> dict[str, Any]:
    return {"id": name, "at": at, "customer": customer, "shop": "a", "amount": f"{amount}.00", "arrival": arrival}


def alert(
    name: str, rule_id: str, of: dict[str, Any], decided: int, revision: int = 0, **values: Any
) -> dict[str, Any]:
    key = {"customer": str(of["customer"])}
    base = {"rule_id": rule_id, "key": key, "stream": STREAM.name, "event_id": of["id"], "event_time": time(of["at"])}
    return {**ALERT, "alert_id": name, "revision": revision, **base, "decided_at": time(decided), **values}


def write(tables: Tables, name: str, schema: Any, rows: list[Any]) -> None:
    tables.append(tables.spark.createDataFrame(rows, schema).coalesce(1), name)


EVENTS = [event(f"e{at}", MIDNIGHT + at * DAY // 4, 1 + at // 2, 10 * (at + 1)) for at in range(8)]
KNOWN = MIDNIGHT + 10 * DAY
# e0, e1 of customer 1; e2, e3 of 2; e4, e5 of 3; e6, e7 of 4; four a day.
LABELS_OF = {"e0": True, "e1": False, "e2": False, "e4": True, "e6": True}


@pytest.fixture
def judged(ready: Tables) -> Tables:
    append(ready, EVENTS)
    publish(ready, [rule("a"), rule("b"), rule("c")])
    e = {each["id"]: each for each in EVENTS}
    write(
        ready, "alerts", ALERTS,
        [
            alert("a0", "a", e["e0"], KNOWN), alert("a1", "a", e["e1"], KNOWN), alert("a3", "a", e["e3"], KNOWN),
            # Two alerts of one event count it once; suppressed, retracted and shadow ones do not stand.
            alert("a0x", "a", e["e0"], KNOWN),
            alert("a5", "a", e["e5"], KNOWN), alert("a5", "a", e["e5"], KNOWN + DAY, 1, verdict="retracted"),
            alert("a6", "a", e["e6"], KNOWN, verdict="suppressed"), alert("a4", "a", e["e4"], KNOWN, mode="shadow"),
            alert("b0", "b", e["e0"], KNOWN), alert("b4", "b", e["e5"], KNOWN, evidence=["e4", "e5"]),
        ],
    )  # fmt: skip
    labels = [(STREAM.name, name, positive, None, time(KNOWN), None, None) for name, positive in LABELS_OF.items()]
    write(ready, "labels", LABELS, labels)
    return ready


def rows_of(frame: Any, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in frame.select(*names).collect()]


@pytest.mark.long
def test_c10_4_precision_and_recall_by_rule_and_for_all_together(judged: Tables) -> None:
    figures = RuleFigures(judged, WORTH)
    counts = ("rule_id", "alerts", "keys", "flagged", "labelled", "unlabelled", "positives", "all_positives")
    # a: e0, e1, e3, of which e3 has no label; b: e0, e4, e5.
    assert rows_of(figures.by_rule(), *counts) == [
        ("a", 4, 2, 3, 2, 1, 1, 3), ("b", 2, 2, 3, 2, 1, 2, 3), ("c", 0, 0, 0, 0, 0, 0, 3), (None, 6, 3, 5, 3, 2, 2, 3),
    ]  # fmt: skip
    ratios = ("rule_id", "precision", "recall", "value_precision", "value_recall")
    third = pytest.approx(1 / 3)
    # Positives are worth 10 (e0), 50 (e4) and 70 (e6); a: 10 of 10 + 20; b: all of 10 + 50.
    assert rows_of(figures.by_rule(), *ratios) == [
        ("a", 0.5, third, third, pytest.approx(10 / 130)), ("b", 1.0, pytest.approx(2 / 3), 1.0, pytest.approx(60 / 130)),
        ("c", None, 0.0, None, 0.0), (None, pytest.approx(2 / 3), pytest.approx(2 / 3), pytest.approx(60 / 80), pytest.approx(60 / 130)),
    ]  # fmt: skip
    # By customer: a flags 1 (positive) and 2 (no label among the flagged), b flags 1 and 3; positive are 1, 3 and 4.
    cases = rows_of(figures.by_rule(), "rule_id", "cases", "case_precision", "case_recall")
    assert cases == [
        ("a", 2, 1.0, third),
        ("b", 2, 1.0, pytest.approx(2 / 3)),
        ("c", 0, None, 0.0),
        (None, None, None, None),
    ]
    # From the first event to the last it is 7/4 days.
    per_day = {row[0]: row[1] for row in rows_of(figures.by_rule(), "rule_id", "alerts_per_day")}
    assert per_day == {"a": pytest.approx(16 / 7), "b": pytest.approx(8 / 7), "c": 0.0, None: pytest.approx(24 / 7)}
    waited = {row[0]: row[1] for row in rows_of(figures.by_rule(), "rule_id", "seconds_to_alert")}
    assert waited["b"] == pytest.approx((2 * KNOWN - EVENTS[0]["at"] - EVENTS[5]["at"]) / 2 / SECOND)
    assert figures.unexplained.isEmpty()


@pytest.mark.long
def test_c10_4_figures_are_of_a_period_and_as_of_a_moment(judged: Tables) -> None:
    second = Period(since=time(MIDNIGHT + DAY))
    assert rows_of(RuleFigures(judged, WORTH, second).by_rule(), "rule_id", "flagged", "positives", "all_positives") == [
        ("a", 0, 0, 2), ("b", 2, 1, 2), ("c", 0, 0, 2), (None, 2, 1, 2),
    ]  # fmt: skip
    names = ("rule_id", "alerts", "flagged", "labelled", "all_positives")
    # One microsecond before, neither alerts nor labels are known.
    before = RuleFigures(judged, WORTH, Period(as_of=time(KNOWN - 1)), rules=["a"])
    assert rows_of(before.by_rule(), *names) == [("a", 0, 0, 0, 0), (None, 0, 0, 0, 0)]
    # a5 stands until it is retracted, a day later.
    then = RuleFigures(judged, WORTH, Period(as_of=time(KNOWN + DAY - 1)), rules=["a"])
    assert rows_of(then.by_rule(), *names)[0] == ("a", 5, 4, 2, 3)
    at = RuleFigures(judged, WORTH, Period(as_of=time(KNOWN + DAY)), rules=["a"])
    assert rows_of(at.by_rule(), *names)[0] == ("a", 4, 3, 2, 3)
    asked = RuleFigures(judged, WORTH, Period(unlabelled_are_negative=True), rules=["a"])
    assert rows_of(asked.by_rule(), "labelled", "unlabelled", "precision")[0] == (3, 0, pytest.approx(1 / 3))
    # No value field, no figures by value.
    assert rows_of(RuleFigures(judged, STREAM, rules=["b"]).by_rule(), "value_precision", "value_recall")[0] == (
        None,
        None,
    )
    days = RuleFigures(judged, WORTH, rules=["b"]).by_day()
    assert rows_of(days, "day", "rule_id", "alerts", "flagged", "positives", "all_positives", "recall") == [
        (time(MIDNIGHT).date(), "b", 1, 1, 1, 1, 1.0), (time(MIDNIGHT).date(), None, 1, 1, 1, 1, 1.0),
        (time(MIDNIGHT + DAY).date(), "b", 1, 2, 1, 2, 0.5), (time(MIDNIGHT + DAY).date(), None, 1, 2, 1, 2, 0.5),
    ]  # fmt: skip


@pytest.mark.long
def test_c10_5_overlap_says_what_two_rules_share_and_what_each_catches_alone(
    judged: Tables, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conf/streams").mkdir(parents=True)
    (tmp_path / "conf/streams/payins.yml").write_text(yaml.safe_dump(STREAM.to_dict()), encoding="utf-8")
    words = ["--root", str(judged.root), "--conf", str(tmp_path / "conf"), "rules", "overlap"]
    assert main([*words, "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row for row in found if "b" in row] == [
        {"a": "a", "b": "b", "both": 1, "jaccard": pytest.approx(1 / 5)}, {"a": "a", "b": "c", "both": 0, "jaccard": 0.0},
        {"a": "b", "b": "c", "both": 0, "jaccard": 0.0},
    ]  # fmt: skip
    # Of a, e3 has no label yet: it may be what a alone catches.
    assert [row for row in found if "b" not in row] == [
        {"a": "a", "alone": 0, "flagged": 3, "adds_nothing": False}, {"a": "b", "alone": 1, "flagged": 3, "adds_nothing": False},
        {"a": "c", "alone": 0, "flagged": 0, "adds_nothing": True},
    ]  # fmt: skip
    assert main([*words, "--since", time(MIDNIGHT + DAY).isoformat()]) == 0
    assert "a and c add nothing: without" in capsys.readouterr().out


def test_c10_5_a_rule_that_alone_catches_something_is_never_proposed_for_retirement() -> None:
    def flagged(rules: str, positives: int, wanted: int) -> _FlaggedSet:
        return _FlaggedSet(frozenset(rules), 9, positives, wanted)

    # Of two equal rules one stays; with the last one its positives would be lost.
    assert find_redundant(["a", "b"], [flagged("ab", 2, 2)]) == {"a"}
    # a is covered by b, and b by nobody.
    assert find_redundant(["a", "b"], [flagged("ab", 2, 2), flagged("b", 1, 1)]) == {"a"}
    # Either of a and b may go, not both: c does not have what they share.
    assert find_redundant(["a", "b", "c"], [flagged("ab", 1, 1), flagged("ac", 1, 1), flagged("bc", 1, 1)]) == {"a"}
    # What has no label yet may turn out positive.
    assert find_redundant(["a"], [flagged("a", 0, 1)]) == set()
    assert find_redundant(["a", "b"], [flagged("a", 0, 0)]) == {"a", "b"}


@pytest.mark.parametrize(("value", "message"), [("amont", "did you mean 'amount'"), ("shop", "must be a number")])
def test_c10_4_the_value_of_an_event_is_a_number_of_the_stream(value: str, message: str) -> None:
    assert Stream.from_dict(WORTH.to_dict()) == WORTH
    with pytest.raises(StreamError, match=message):
        Stream.from_dict({**STREAM.to_dict(), "value": value})


@pytest.mark.long
def test_c10_4_windows_flag_what_their_last_revision_counted_and_sequences_all_that_they_matched(ready: Tables) -> None:
    documents = [
        window("minute", {"tumbling": "1 minute"}), window("gaps", {"session": "10 seconds"}),
        window("sized", {"sliding": "2 minutes", "slide": "1 minute"}, where="amount > 20", when="n >= 2"),
        sequence("many", [{"name": "small", "where": "amount < 20", "at_least": 2}, {"name": "large", "where": "amount = 99"}], message=""),
    ]  # fmt: skip
    many = [event(f"s{at}", START + 900 * SECOND + at * 1_000, 7, 1, 20 + at // 100) for at in range(250)]
    last = event("end", START + 901 * SECOND, 7, 99, 23)
    append(ready, [*make_events(300, seed=3), *many, last, event("far", START + DAY, 9, 1, 24)])
    publish(ready, documents)
    folder = checkpoint_folder(ready, STREAM)
    Evaluation(ready, STREAM, STREAMS, folder, once=True, admission={"maxFilesPerTrigger": "7"}).run()
    figures = RuleFigures(ready, STREAM)
    assert figures.unexplained.isEmpty()
    groups = figures._flagged.groupBy("alert_id").agg(F.collect_set("event_id").alias("ids")).collect()
    found = {row["alert_id"]: set(row["ids"]) for row in groups}
    alerts = ready.read("alerts").orderBy("revision").collect()
    standing = {row["alert_id"]: row for row in alerts}
    standing = {name: row for name, row in standing.items() if row["verdict"] == "raised"}
    kinds = {row["rule_id"] for row in standing.values()}
    assert kinds == {"minute", "gaps", "sized", "many"}
    assert any(row["revision"] for row in standing.values())
    amounts = {
        row["id"]: row["amount"]
        for row in ready.read(STREAM.name).select("id", "amount").collect()
    }  # fmt: skip
    for name, row in standing.items():
        ids = found[name]
        if row["rule_id"] == "many":
            assert set(row["evidence"]) <= ids
        else:
            # Each window rule has a count and a sum: both are those of the events that it is said to have counted.
            measures = dict(row["measures"])
            assert len(ids) == int(measures["n"]), name
            assert f"{sum(amounts[each] for each in ids):.2f}" == measures["total"], name
    (whole,) = [found[name] for name, row in standing.items() if row["event_id"] == "end"]
    assert whole == {each["id"] for each in many} | {"end"}

    # A review of it labels all of them, and leaves the other alerts' events without a label.
    (long,) = [row for row in standing.values() if row["event_id"] == "end"]
    seen = (long["alert_id"], "confirmed", long["revision"], "ann", None, dt.datetime.now(dt.timezone.utc))
    ready.append_rows([seen], "reviews")
    labelled = {row["event_id"] for row in read_labels(ready, STREAM).where("positive").collect()}
    assert labelled == whole

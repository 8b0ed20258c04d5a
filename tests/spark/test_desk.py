"""The review desk on real tables: filter, open, decide, a conflict that is told, undo, many at once, snooze."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F  # noqa: N812

from lookback import notebook
from lookback.config import Settings
from lookback.core.errors import ReviewError
from lookback.desk.queue import ONLY_SNOOZED, QueuedAlert, QueueFilter
from lookback.desk.records import AlertRecords
from lookback.desk.review import ReviewDesk
from lookback.spark.review import (
    Explainer,
    SeenAlert,
    explain,
    open_queue,
    read_alerts_like,
    read_reviews_of,
    record_review,
    record_reviews,
)
from lookback.spark.rules import RulesTable
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from lookback.spark.tables.schemas import ALERTS
from payins import STREAM, STREAMS, append, publish, rule
from sample_alert import ALERT

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark
HOUR = dt.timedelta(hours=1)
BY_CUSTOMER = rule("by-customer", when="n >= 2", severity="high")
START = 1_700_000_000_000_000


def events(first: int, customers: list[int], arrival: int = 1) -> list[dict[str, Any]]:
    return [
        {"id": f"e{first + at}", "at": START + (first + at) * 1_000_000, "customer": customer, "shop": "<b>a</b>",
         "amount": "10.00", "arrival": arrival}
        for at, customer in enumerate(customers)
    ]  # fmt: skip


def evaluate(tables: Tables) -> None:
    Evaluation(tables, STREAM, STREAMS, checkpoint_folder(tables, STREAM), once=True).run()


@pytest.fixture
def judged(ready: Tables) -> Tables:
    """Six open alerts: two each of the customers 1, 2 and 3."""
    append(ready, events(0, [1, 1, 1, 2, 2, 2, 3, 3, 3]))
    publish(ready, [BY_CUSTOMER])
    evaluate(ready)
    return ready


def sit_down(tables: Tables, reviewer: str = "kim") -> ReviewDesk:
    return ReviewDesk(AlertRecords(tables, STREAMS, stream=STREAM.name, reviewer=reviewer), in_background=False)


def waiting(tables: Tables) -> int:
    return open_queue(tables).count()


def reviews(tables: Tables) -> list[tuple[str, str, int, str]]:
    rows = tables.read("reviews").orderBy("reviewed_at").collect()
    return [(row["reviewer"], row["disposition"], row["revision"], row["note"]) for row in rows]


def current(desk: ReviewDesk) -> QueuedAlert:
    assert desk._current is not None
    return desk._current


@pytest.mark.long
def test_a_reviewer_works_through_the_queue(judged: Tables) -> None:
    desk = sit_down(judged)
    assert desk.status.text == "6 alerts wait."
    assert desk._opened is not None
    # Opened: explained by its events, with a picture and their fields.
    assert desk._opened.lines[-1].endswith("match those of the alert.")
    assert desk._opened.picture.startswith(b"\x89PNG")
    assert desk._opened.events[0].fields["shop"] == "<b>a</b>"
    assert desk._opened.events[0].fields["amount"] == "10.00"
    assert len(desk.records.read_like(desk._opened)) == 1

    # Filtered and decided.
    desk.show(QueueFilter(entity="customer 2"), desk.queue.order)
    first = current(desk)
    assert first.entity == "customer 2"
    desk.decide("confirmed", "as he says")
    assert reviews(judged) == [("kim", "confirmed", 0, "as he says")]
    second = current(desk)
    assert second.entity == "customer 2"
    (like,) = desk.records.read_like(desk._opened)
    assert (like["alert_id"], [each.disposition for each in like["reviews"]]) == (first.alert_id, ["confirmed"])

    # Decided by another person meanwhile: told, not overwritten; recorded beside it only when pressed again.
    record_review(judged, second.alert_id, "benign", "lee", "<i>known</i>")
    desk.decide("confirmed", "mine")
    assert desk.status.text.startswith("Problem: Not recorded for 1 alert, decided meanwhile: benign by lee at ")
    assert ": <i>known</i>. Press again" in desk.status.text
    assert len(reviews(judged)) == 2
    desk.decide("confirmed", "mine")
    assert reviews(judged)[2:] == [("kim", "confirmed", 0, "mine")]

    # Undone one after another; what lee decided stays.
    desk.undo()
    assert "1 alert stay decided: benign by lee" in desk.status.text
    assert [each[:2] for each in reviews(judged)] == [("kim", "confirmed"), ("lee", "benign")]
    desk.undo()
    assert [each[:2] for each in reviews(judged)] == [("lee", "benign")]
    assert current(desk) == first
    assert waiting(judged) == 5

    # Many at once, with one reason, in one commit.
    desk.show(QueueFilter(), desk.queue.order)
    desk.choose_all()
    desk.decide("false_positive", "")
    assert "write the reason in the note" in desk.status.text
    before = judged.version("reviews")
    desk.decide("false_positive", "a test")
    assert judged.version("reviews") == before + 1
    assert reviews(judged)[1:] == [("kim", "false_positive", 0, "a test")] * 5
    assert waiting(judged) == 0
    desk.undo()
    assert waiting(judged) == 5


@pytest.mark.long
def test_a_snooze_and_a_filter_that_shows_what_it_hides(judged: Tables) -> None:
    desk = sit_down(judged)
    alert = current(desk)
    desk.snooze("8 hours", "")
    assert desk.status.text.startswith("Problem: a snooze needs a reason")
    desk.snooze("tomorrow", "holiday")
    assert desk.status.text.startswith("Problem: a snooze ends at a time such as")
    desk.snooze("8 hours", "holiday")
    assert "holiday (2 alerts of this queue.)" in desk.status.text
    assert current(desk).entity != alert.entity
    assert waiting(judged) == 4
    # Read again, it is the same; the filter shows what is snoozed.
    desk.read()
    assert (len(desk.queue), len(desk.queue.shown)) == (6, 4)
    desk.show(QueueFilter(snoozed=ONLY_SNOOZED), desk.queue.order)
    assert {each.entity for each in desk.queue.shown} == {alert.entity}


@pytest.mark.long
def test_a_decision_on_a_revision_that_is_not_the_last_is_told_and_the_last_is_opened(judged: Tables) -> None:
    desk = sit_down(judged)
    alert = current(desk)
    row = judged.read("alerts").where(f"alert_id = '{alert.alert_id}'").toArrow().to_pylist()[0]
    later = {**row, "revision": 1, "verdict": "retracted", "key": alert.key, "measures": alert.measures}
    later["entities"] = dict(row["entities"] or [])
    later["decided_at"] += HOUR
    judged.append(judged.spark.createDataFrame([later], ALERTS).coalesce(1), "alerts")
    desk.decide("confirmed", "")
    assert "1 alert got a later revision" in desk.status.text
    assert reviews(judged) == [("kim", "confirmed", 0, "")]
    assert current(desk).revision == 1
    desk.decide("false_positive", "")
    assert [each[:3] for each in reviews(judged)] == [("kim", "confirmed", 0), ("kim", "false_positive", 1)]


@pytest.mark.long
def test_two_people_at_once_see_what_the_other_has_decided(judged: Tables) -> None:
    kim, lee = sit_down(judged, "kim"), sit_down(judged, "lee")
    assert current(kim) == current(lee)
    kim.decide("confirmed", "")
    lee.decide("benign", "")
    assert "decided meanwhile: confirmed by kim" in lee.status.text
    # What one has left is not in the other's queue when it is read again.
    lee.skip()
    lee.read()
    assert len(lee.queue) == 5
    # Of many, those that the other has decided are left out.
    lee.choose_all()
    kim.decide("unclear", "")
    lee.decide("benign", "all of them")
    assert (
        "Recorded benign for 4 alerts. Not recorded for 1 alert, decided meanwhile: unclear by kim" in lee.status.text
    )
    assert sorted(each[:2] for each in reviews(judged)) == [
        ("kim", "confirmed"), ("kim", "unclear"), *[("lee", "benign")] * 4,
    ]  # fmt: skip


@pytest.mark.long
def test_an_alert_is_opened_by_the_files_that_it_needs(judged: Tables) -> None:
    records = AlertRecords(judged, STREAMS, reviewer="kim")
    reading = records.read_queue()
    # Alerts of other times, and events of later commits, whose files are gone.
    others = [{**ALERT, "alert_id": f"{at:032x}", "decided_at": ALERT["decided_at"] - at * HOUR} for at in range(3)]
    before = {*files_of(judged, "alerts"), *files_of(judged, STREAM.name)}
    for other in others:
        judged.append(judged.spark.createDataFrame([other], ALERTS).coalesce(1), "alerts")
    # By Spark, whose files have statistics: of others nobody knows whether they have events before the window.
    table = judged.read(STREAM.name)
    later = table.withColumn("at", F.expr("at + INTERVAL 100 SECONDS")).withColumn(
        "id", F.concat("id", F.lit("-later"))
    )
    judged.append(later.coalesce(1), STREAM.name)
    for file in {*files_of(judged, "alerts"), *files_of(judged, STREAM.name)} - before:
        file.unlink()
    for alert in reading.alerts[:2]:
        assert records.open(alert).lines[-1].endswith("match those of the alert.")


def files_of(tables: Tables, name: str) -> list[Path]:
    return [*Path(tables.path_or_name(name)).glob("**/*.parquet")]


@pytest.mark.long
def test_an_explainer_keeps_rules_until_something_is_written_about_them(judged: Tables) -> None:
    explainer = Explainer(judged, STREAMS)
    first = judged.read("alerts").toArrow().to_pylist()[0]
    opened = explainer.read_row(first["alert_id"], 0, first["decided_at"])
    assert explainer.explain(opened).consistent
    (known,) = explainer._known[STREAM.name]
    explainer.explain(opened)
    assert explainer._known[STREAM.name] == [known]
    # Another version, by which other alerts are explained.
    RulesTable(judged, STREAMS).push({**BY_CUSTOMER, "when": "n >= 3"})
    append(judged, events(100, [1, 1, 1], arrival=2))
    evaluate(judged)
    rows = judged.read("alerts").where("rule_version = 2").toArrow().to_pylist()
    assert rows
    for row in rows:
        opened = explainer.read_row(row["alert_id"], row["revision"], row["decided_at"])
        one, other = explainer.explain(opened), explain(judged, STREAMS, row["alert_id"])
        assert one.to_dict() == other.to_dict()
        assert one.consistent
    (read_again,) = explainer._known[STREAM.name]
    assert read_again.history is not known.history
    # Of an alert that was decided well before they were read, nothing that is written now changes what is known.
    explainer._known[STREAM.name] = [read_again._replace(commits=(), read_at=read_again.read_at + HOUR)]
    assert explainer.explain(opened).consistent
    assert explainer._known[STREAM.name][0].history is read_again.history
    with pytest.raises(ReviewError, match="no longer exists; read the queue again"):
        explainer.read_row("0" * 32, 0, first["decided_at"])


@pytest.mark.long
def test_many_reviews_are_checked_and_recorded_by_their_ids(judged: Tables) -> None:
    # More than are listed in a condition.
    seen = [SeenAlert(f"{at:032x}", 0, ALERT["decided_at"]) for at in range(150)]
    record_reviews(judged, seen[:2], "benign", "lee", "two")
    recorded = record_reviews(judged, seen, "unclear", "kim", "many")
    assert len(recorded.recorded) == 148
    assert sorted(recorded.elsewhere) == [seen[0].alert_id, seen[1].alert_id]
    assert len(read_reviews_of(judged, [each.alert_id for each in seen])) == 150
    for wrong, message in (("fraud", "disposition must be one of confirmed"), ("benign", "reviewer must not be empty")):
        with pytest.raises(ReviewError, match=message):
            record_reviews(judged, seen, wrong, " ")


@pytest.mark.long
def test_the_like_of_an_alert_have_its_key_or_its_entity(ready: Tables) -> None:
    def alert(name: str, key: dict[str, str | None], **values: Any) -> dict[str, Any]:
        now = dt.datetime.now(dt.timezone.utc)
        return {**ALERT, "alert_id": name, "key": key, "decided_at": now, **values}

    rows = [
        alert("own", {"c": "1", "s": None}, entities={"c": "1", "s": None}),
        alert("same key", {"s": None, "c": "1"}, rule_id="other"),
        alert("same entity", {"c": "1"}, entities={"d": "2", "c": "1"}, rule_id="another"),
        alert("other key", {"c": "2", "s": None}, entities={"c": "2", "s": None, "d": "1"}),
        alert("more fields", {"c": "1", "s": None, "t": "x"}),
        alert("other field", {"d": "1", "s": None}),
        alert("no key", {}),
        alert("no key too", {}),
        alert("entity alone", {}, entities={"d": "2"}),
    ]  # fmt: skip
    ready.append(ready.spark.createDataFrame(rows, ALERTS).coalesce(1), "alerts")
    found = {
        name: {each["alert_id"] for each in read_alerts_like(ready, row)}
        for name, row in zip("abcdefghi", rows, strict=True)
    }
    assert found["a"] == {"same key", "same entity"}
    assert found["b"] == {"own"}
    assert found["g"] == found["h"] == set()
    assert found["i"] == {"same entity"}


@pytest.mark.long
def test_the_notebook_shows_the_desk_where_somebody_is(
    judged: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = notebook.Workspace(Settings(str(judged.root), tmp_path))
    vars(place).update(tables=judged, streams=STREAMS, stream=STREAM)
    assert notebook.open_desk(place) is None
    assert "No desk: the notebook runs non-interactively" in capsys.readouterr().out
    monkeypatch.setattr("lookback.notebook.showing.has_person", lambda: True)
    assert notebook.open_desk(place, wanted=False) is None
    desk = notebook.open_desk(place, "by-customer", reviewer="kim")
    assert desk is not None
    assert len(desk.queue) == 6
    monkeypatch.setitem(__import__("sys").modules, "ipywidgets", None)
    for name in ("lookback.desk.review", "lookback.desk.alert"):
        monkeypatch.delitem(__import__("sys").modules, name)
    capsys.readouterr()
    assert notebook.open_desk(place) is None
    assert "The desk needs the package ipywidgets, which is not installed" in capsys.readouterr().out

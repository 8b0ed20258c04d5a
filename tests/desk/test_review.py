"""The review desk without a browser: its buttons are pressed, its fields set, and what they hold is read."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from typing import Any

import ipywidgets
import pytest
from widgets import TableReader, read_rows

from lookback.core.errors import ReviewError
from lookback.desk.queue import PAGE_SIZE, QueuedAlert
from lookback.desk.records import ListedEvent, OpenedAlert, QueueReading, describe_decisions
from lookback.desk.review import ReviewDesk
from lookback.spark.review import RecordedReviews, Review
from lookback.spark.snoozes import Snooze

NOW = dt.datetime(2026, 3, 1, 12, tzinfo=dt.timezone.utc)
SCRIPT = "<script>alert('x')</script> $x$"


def alert(number: int, **values: Any) -> QueuedAlert:
    made = QueuedAlert(
        alert_id=f"{number:032x}", revision=0, severity="high", event_time=NOW - dt.timedelta(minutes=number),
        decided_at=NOW - dt.timedelta(minutes=number), rule_id="day-spend", rule_version=1, stream="payments",
        key={"customer": f"c{number}"}, measures={"total": "1200.50"}, message=f"c{number} spent 1,200.50",
    )  # fmt: skip
    return replace(made, **values)


class Records:
    """The tables, in memory. Others decide by `others`; later revisions are put into `later`."""

    reviewer = "kim"

    def __init__(self, *alerts: QueuedAlert) -> None:
        self.alerts = list(alerts)
        self.reviews: list[Review] = []
        self.opened: list[str] = []
        self.later: dict[str, QueuedAlert] = {}
        self.is_broken = False
        self.clock = NOW

    def read_queue(self) -> QueueReading:
        decided = {each.alert_id for each in self.reviews}
        return QueueReading([each for each in self.alerts if each.alert_id not in decided], NOW)

    def open(self, alert: QueuedAlert) -> OpenedAlert:
        if self.is_broken:
            raise ReviewError("the history of table 'payments' cannot be read")
        self.opened.append(alert.alert_id)
        events = [ListedEvent(SCRIPT, {"id": str(n), "shop": SCRIPT, "city": None}) for n in (2, 1)]
        lines = [f"Alert {alert.alert_id}: {alert.message}", "Rule day-spend, version 1."]
        return OpenedAlert(alert, {"key": dict(alert.key)}, lines, b"PNG", "day-spend: customer", events)

    def read_like(self, opened: OpenedAlert) -> list[dict[str, Any]]:
        row = {
            "alert_id": "f" * 32, "event_time": NOW, "rule_id": "burst", "severity": "low", "verdict": "raised", "mode": "active", "message": SCRIPT,
            "reviews": [Review("f" * 32, "benign", 0, "lee", "moved house", NOW)],
        }  # fmt: skip
        return [row, {**row, "verdict": "retracted", "mode": "shadow", "reviews": []}]

    def count_decisions(self) -> dict[str, dict[str, int]]:
        return {"day-spend": {"confirmed": 1, "false_positive": 3}}

    def find_last(self, alert_id: str) -> QueuedAlert:
        return self.later[alert_id]

    def decide(self, seen: Any, disposition: str, note: str) -> RecordedReviews:
        self.clock += dt.timedelta(seconds=1)
        elsewhere, own, later = {}, [], {}
        for each in seen:
            unseen = [r for r in self.reviews if r.alert_id == each.alert_id and r not in each.reviews]
            if unseen:
                elsewhere[each.alert_id] = tuple(unseen)
                continue
            own.append(each.alert_id)
            self.reviews.append(Review(each.alert_id, disposition, each.revision, "kim", note, self.clock))
            if each.alert_id in self.later and self.later[each.alert_id].revision > each.revision:
                later[each.alert_id] = self.later[each.alert_id].revision
        return RecordedReviews(tuple(own), self.clock, elsewhere, later)

    def undo(self, step: Any) -> dict[str, list[Review]]:
        self.reviews = [r for r in self.reviews if (r.reviewer, r.reviewed_at) != (step.reviewer, step.reviewed_at)]
        own = {each.alert_id for each in step.alerts}
        left: dict[str, list[Review]] = {}
        for review in self.reviews:
            if review.alert_id in own:
                left.setdefault(review.alert_id, []).append(review)
        return left

    def snooze(self, alert: QueuedAlert, until: str, reason: str, *, whole_rule: bool = False) -> Snooze:
        if not reason:
            raise ReviewError("a snooze needs a reason, for readers who wonder where the alerts are")
        return Snooze(alert.rule_id, None if whole_rule else alert.key, NOW, NOW + dt.timedelta(hours=8), reason, "kim")


def all_widgets(widget: Any) -> list[Any]:
    return [widget, *(each for child in getattr(widget, "children", ()) for each in all_widgets(child))]


class Person:
    """What a person sees and presses, by the stable names of the widgets."""

    def __init__(self, *alerts: QueuedAlert, **options: Any) -> None:
        self.records = Records(*alerts)
        self.desk = ReviewDesk(self.records, in_background=False, **options)

    def find(self, name: str) -> Any:
        (found,) = [
            each for each in all_widgets(self.desk.widget) if f"lookback-{name}" in getattr(each, "_dom_classes", ())
        ]
        return found

    def press(self, name: str) -> None:
        self.find(name).click()

    def fill(self, name: str, value: Any) -> None:
        self.find(name).value = value

    def choose(self, *places: int) -> None:
        self.find("queue-list").index = places

    def read_table(self, name: str) -> list[list[str]]:
        """The cells of a table as a browser reads them, its titles first."""
        return read_rows(self.find(name).value)

    @property
    def status(self) -> str:
        return self.desk.status.text

    @property
    def title(self) -> str:
        return self.find("alert-title").value

    @property
    def decided(self) -> list[tuple[int, str, str]]:
        return [(int(each.alert_id, 16), each.disposition, each.note) for each in self.records.reviews]

    @property
    def listed(self) -> list[str]:
        return [text.replace("\N{NO-BREAK SPACE}", " ") for text, _ in self.find("queue-list").options]


def test_the_first_alert_is_open_with_words_picture_events_and_its_like():
    person = Person(alert(2), alert(1))
    assert person.title == "high: day-spend, customer c1, 2026-03-01 11:59:00 UTC (+00:00)"
    assert person.find("words").value == f"Alert {1:032x}: c1 spent 1,200.50\nRule day-spend, version 1."
    (picture,) = person.find("picture").children
    assert 'alt="Time line of day-spend: customer; the events are listed below"' in picture.value
    assert 'src="data:image/png;base64,UE5H"' in picture.value
    assert person.read_table("events") == [
        ["why", "id", "shop", "city"],
        [SCRIPT, "2", SCRIPT, "null"],
        [SCRIPT, "1", SCRIPT, "null"],
    ]
    assert person.find("like-words").value == "Other alerts of the same entity: 2."
    decided = "benign by lee at 2026-03-01 12:00:00 UTC: moved house"
    assert person.read_table("like")[1:] == [
        ["2026-03-01 12:00:00", "burst", "low", "raised", SCRIPT, decided],
        ["2026-03-01 12:00:00", "burst", "low", "retracted, shadow", SCRIPT, ""],
    ]
    assert person.status == "2 alerts wait."
    assert person.find("queue-list").index == (0,)
    assert " ".join(person.listed[0].split()) == "high 2026-03-01 11:59 day-spend customer c1 c1 spent 1,200.50"


@pytest.mark.parametrize("name", ["confirmed", "false-positive", "benign", "unclear"])
def test_one_press_decides_and_the_next_alert_opens(name: str):
    person = Person(alert(1), alert(2), alert(3))
    person.fill("note", "as he says")
    person.press(f"decide-{name}")
    assert person.decided == [(1, name.replace("-", "_"), "as he says")]
    assert person.status == f"Recorded {name.replace('-', '_')} for day-spend, customer c1."
    assert "customer c2" in person.title
    assert person.find("note").value == ""
    assert len(person.listed) == 2
    # An arrow in the list opens another one.
    person.choose(1)
    assert "customer c3" in person.title
    person.press("decide-benign")
    assert "customer c2" in person.title
    person.press("decide-benign")
    assert person.title == "No open alerts."
    assert not person.find("picture").children
    person.press("decide-benign")
    assert person.status == "Problem: No alert is chosen: choose one in the queue."


def test_next_opens_the_next_without_a_decision():
    person = Person(alert(1), alert(2))
    person.press("skip")
    assert "customer c2" in person.title
    person.press("skip")
    assert "customer c1" in person.title
    assert person.decided == []


def test_a_decision_of_another_person_is_told_and_not_overwritten():
    person = Person(alert(1), alert(2))
    person.records.reviews.append(Review(f"{1:032x}", "false_positive", 0, "lee", "known", NOW))
    person.fill("note", "mine")
    person.press("decide-confirmed")
    assert person.decided == [(1, "false_positive", "known")]
    assert person.status == (
        "Problem: Not recorded for 1 alert, decided meanwhile: false_positive by lee at 2026-03-01 12:00:00 UTC: "
        "known. "
        "Press again to override, or Next to leave it."
    )
    # The alert and the note are still there.
    assert "customer c1" in person.title
    assert person.find("note").value == "mine"
    person.press("decide-confirmed")
    assert person.decided == [(1, "false_positive", "known"), (1, "confirmed", "mine")]
    assert "customer c2" in person.title


def test_what_another_person_decided_can_be_left():
    person = Person(alert(1), alert(2))
    person.records.reviews.append(Review(f"{1:032x}", "false_positive", 0, "lee", "known", NOW))
    person.press("decide-confirmed")
    person.press("skip")
    assert "customer c2" in person.title
    assert len(person.listed) == 1


def test_a_later_revision_is_told_and_opened_after_the_decision_on_the_one_that_was_seen():
    person = Person(alert(1), alert(2))
    later = alert(1, revision=2, message="c1 spent 99")
    person.records.later[later.alert_id] = later
    person.press("decide-confirmed")
    assert [(each.revision, each.disposition) for each in person.records.reviews] == [(0, "confirmed")]
    assert "1 alert got a later revision" in person.status
    assert "c1 spent 99" in person.find("words").value
    # One's own decision on the revision before is no conflict.
    person.press("decide-unclear")
    assert [(each.revision, each.disposition) for each in person.records.reviews] == [(0, "confirmed"), (2, "unclear")]
    assert "customer c2" in person.title


def test_undo_takes_decisions_back_one_after_another():
    person = Person(alert(1), alert(2), alert(3))
    person.press("undo")
    assert person.status == "Problem: Nothing to undo in this session."
    person.press("decide-confirmed")
    person.press("decide-benign")
    person.press("undo")
    assert person.decided == [(1, "confirmed", "")]
    assert person.status == "Undone: benign of day-spend, customer c2."
    assert "customer c2" in person.title
    person.press("undo")
    assert person.decided == []
    assert "customer c1" in person.title
    assert len(person.listed) == 3


def test_undo_leaves_a_later_revision_that_waits():
    person = Person(alert(1), alert(2))
    later = alert(1, revision=2, message="c1 spent 99")
    person.records.later[later.alert_id] = later
    person.press("decide-confirmed")
    person.press("undo")
    assert person.decided == []
    assert person.desk.queue.find(later.alert_id).revision == 2
    assert len(person.listed) == 2


def test_a_decision_is_seen_beside_its_like_that_was_prepared_before_it():
    person = Person(alert(1), alert(2))
    like = person.records.read_like(None)
    person.records.read_like = lambda _: [{**like[1], "alert_id": f"{1:032x}", "verdict": "raised"}]
    person.fill("note", "as he says")
    person.press("decide-confirmed")
    assert person.read_table("like")[-1][-1].startswith("confirmed by kim at 2026-03-01 12:00:01 UTC: as he says")


def test_undo_leaves_what_another_person_decided_beside_it():
    person = Person(alert(1), alert(2))
    person.press("decide-confirmed")
    person.records.reviews.append(Review(f"{1:032x}", "benign", 0, "lee", "", NOW))
    person.press("undo")
    assert person.decided == [(1, "benign", "")]
    assert person.status == (
        "Undone: confirmed of day-spend, customer c1. 1 alert stay decided: benign by lee at 2026-03-01 12:00:00 UTC."
    )
    assert len(person.listed) == 1


def test_many_are_decided_at_once_with_one_reason():
    person = Person(*(alert(number) for number in range(1, 6)))
    person.choose(0, 2, 3)
    assert person.find("decide-benign").description == "Benign (3)"
    assert person.find("decide-benign").tooltip == "Decide on all 3 chosen alerts: true but harmless"
    person.press("decide-benign")
    assert person.status.startswith("Problem: 3 alerts are chosen: write the reason in the note")
    assert person.decided == []
    person.records.reviews.append(Review(f"{3:032x}", "confirmed", 0, "lee", "", NOW))
    person.fill("note", "salaries")
    person.press("decide-benign")
    assert person.decided[1:] == [(1, "benign", "salaries"), (4, "benign", "salaries")]
    assert (
        "Recorded benign for 2 alerts. Not recorded for 1 alert, decided meanwhile: confirmed by lee" in person.status
    )
    assert "customer c5" in person.title
    assert person.find("decide-benign").description == "Benign"
    person.press("undo")
    assert person.decided == [(3, "confirmed", "")]
    assert len(person.listed) == 4


def test_all_that_the_filter_shows_are_chosen_on_every_page():
    person = Person(*(alert(number) for number in range(3 * PAGE_SIZE)))
    person.fill("filter-entity", "customer c1")
    person.press("choose-all")
    chosen = 1 + 10 + 50
    assert person.status == f"{chosen} alerts chosen: a decision applies to all of them."
    person.fill("note", "test customers")
    person.press("decide-false-positive")
    assert len(person.decided) == chosen
    assert person.title == "No open alert matches the filter."


def test_all_alerts_of_the_open_ones_entity_are_chosen():
    person = Person(alert(1), alert(2), alert(3, rule_id="burst", key={"customer": "c1"}))
    person.press("choose-like")
    assert person.status == "2 alerts chosen: a decision applies to all of them."
    person.fill("note", "one thief")
    person.press("decide-confirmed")
    assert [number for number, *_ in person.decided] == [1, 3]
    person.press("decide-benign")
    person.press("choose-like")
    assert person.status == "Problem: No alert is open: choose one in the queue."


def test_filters_and_orders_choose_what_is_listed():
    person = Person(alert(1), alert(2, rule_id="burst"), alert(3, severity="critical"), alert(4, is_snoozed=True))
    assert "customer c3" in person.title
    assert [value for _, value in person.find("filter-rule").options] == ["", "burst", "day-spend"]
    # A browser shows the title of the chosen value; None would show nothing.
    assert person.find("filter-rule").label == person.find("filter-severity").label == "any"
    person.fill("filter-rule", "burst")
    assert [line.split()[3] for line in person.listed] == ["burst"]
    assert person.status == "4 alerts wait, 1 of them shown."
    person.fill("filter-rule", "")
    assert person.find("filter-tag").label == "any"
    assert [value for _, value in person.find("filter-tag").options] == [""]
    person.fill("filter-snoozed", "snoozed ones only")
    assert [line.split()[:2] for line in person.listed] == [["high", "zz"]]
    assert ", snoozed: " in person.title
    person.fill("filter-snoozed", "with snoozed ones")
    person.fill("order", "oldest first")
    assert [line.split("customer c")[1][0] for line in person.listed] == ["4", "3", "2", "1"]
    person.fill("filter-severity", "critical")
    person.fill("filter-age", "more than 30 days")
    assert person.listed == []
    # A rule that no alert waits of any more can still be chosen, as it is.
    person.fill("filter-age", "any age")
    person.press("read")
    assert person.find("filter-severity").value == "critical"


def test_a_snooze_takes_the_key_or_the_rule_out_of_the_queue():
    person = Person(alert(1), alert(2, key={"customer": "c1"}), alert(3), alert(4, rule_id="burst"))
    person.press("snooze")
    assert person.status == "Problem: a snooze needs a reason, for readers who wonder where the alerts are"
    person.fill("snooze-reason", "on holiday")
    person.press("snooze")
    assert person.status == (
        "The queue leaves out day-spend, customer = c1 until 2026-03-01T20:00:00Z: on holiday (2 alerts of this queue.)"
    )
    assert "customer c3" in person.title
    person.fill("snooze-rule", True)
    person.press("snooze")
    assert "burst" in person.title
    assert len(person.listed) == 1


def test_ten_thousand_alerts_are_shown_a_page_at_a_time():
    person = Person(*(alert(number) for number in range(10_000)))
    assert len(person.listed) == PAGE_SIZE
    assert person.find("page").value == "Page 1 of 200; 10,000 alerts"
    before = len(all_widgets(person.desk.widget))
    person.press("next-page")
    assert person.find("page").value == "Page 2 of 200; 10,000 alerts"
    assert "customer c50" in person.listed[0]
    # No alert of the page is open, and the one that is stays.
    assert person.find("queue-list").index == ()
    assert "customer c0" in person.title
    person.press("previous-page")
    assert person.find("queue-list").index == (0,)
    assert len(all_widgets(person.desk.widget)) == before


def test_nothing_of_a_value_is_markup_or_a_formula():
    hostile = alert(1, rule_id=SCRIPT, key={SCRIPT: SCRIPT}, message=SCRIPT, measures={SCRIPT: SCRIPT}, severity=SCRIPT)
    person = Person(hostile)
    person.press("decide-benign")
    person.press("undo")
    shown = all_widgets(person.desk.widget)
    for each in shown:
        if isinstance(each, (ipywidgets.HTML, ipywidgets.HTMLMath)):
            reader = TableReader()
            reader.feed(each.value)
            assert reader.tags <= {"style", "h3", "img", "div", "table", "thead", "tbody", "tr", "th", "td"}
            assert "$" not in each.value or "mathjax_ignore" in each.value
        if isinstance(each, ipywidgets.Label) and "$" in each.value:
            assert "mathjax_ignore" in each._dom_classes
        # A title of a field may hold a formula in the browser, so it is always the desk's own.
        if not isinstance(each, ipywidgets.Button):
            assert "$" not in getattr(each, "description", "")
    assert SCRIPT in person.find("words").value
    assert SCRIPT in person.read_table("events")[1]


def test_every_control_has_a_title_and_a_sentence_and_tab_reaches_it_in_the_order_of_the_page():
    person = Person(alert(1))
    kinds = (
        ipywidgets.Button,
        ipywidgets.Text,
        ipywidgets.Textarea,
        ipywidgets.Dropdown,
        ipywidgets.SelectMultiple,
        ipywidgets.Select,
    )
    controls = [each for each in all_widgets(person.desk.widget) if isinstance(each, kinds)]
    assert all(each.description and each.tooltip for each in controls)
    assert all(each.tabbable is None for each in controls)
    names = [next(name for name in each._dom_classes if name not in ("lookback-list",)) for each in controls]
    assert names == [
        "lookback-filter-rule", "lookback-filter-severity", "lookback-filter-tag", "lookback-filter-entity", "lookback-filter-age",
        "lookback-filter-snoozed", "lookback-order", "lookback-read", "lookback-queue-list", "lookback-previous-page",
        "lookback-next-page", "lookback-choose-like", "lookback-choose-all", "lookback-note", "lookback-decide-confirmed",
        "lookback-decide-false-positive", "lookback-decide-benign", "lookback-decide-unclear", "lookback-skip", "lookback-undo",
        "lookback-snooze-until", "lookback-snooze-reason", "lookback-snooze",
    ]  # fmt: skip


def test_an_alert_without_an_explanation_can_still_be_decided():
    person = Person(alert(1), alert(2))
    person.records.is_broken = True
    person.press("skip")
    assert person.find("words").value.endswith("Not explained: the history of table 'payments' cannot be read")
    assert "c2 spent" in person.find("words").value
    person.press("decide-unclear")
    assert person.decided == [(2, "unclear", "")]


def test_an_error_of_the_tables_is_shown_and_nothing_is_lost():
    person = Person(alert(1))

    def refuse(*_: Any) -> Any:
        raise OSError("no space left\n  at java.lang.Thread")

    person.records.decide = refuse
    person.fill("note", "seen")
    person.press("decide-unclear")
    assert person.status == "Problem: no space left"
    assert person.find("note").value == "seen"
    assert "customer c1" in person.title


def test_the_next_alert_is_explained_in_the_background_once():
    records = Records(alert(1), alert(2), alert(3))
    desk = ReviewDesk(records)
    desk.skip()
    desk.skip()
    assert [int(each, 16) for each in records.opened[:3]] == [1, 2, 3]
    # The one after the last is the first.
    desk._ahead._next[1].result()
    assert [int(each, 16) for each in records.opened] == [1, 2, 3, 1]


def test_decisions_of_a_rule_are_described_with_those_of_the_session():
    records = Records(alert(1), alert(2), alert(3))
    desk = ReviewDesk(records)
    desk._ahead._counting.result()
    desk.decide("confirmed")
    (counts,) = [each for each in all_widgets(desk.widget) if "lookback-counts" in getattr(each, "_dom_classes", ())]
    expected = "confirmed 2, false_positive 3: 40% of the clear ones confirmed"
    assert counts.value == f"Alerts of the same rule, decided before: {expected}."
    desk.undo()
    assert "confirmed 1, false_positive 3: 25%" in counts.value
    assert describe_decisions({}) == "none yet"
    assert describe_decisions({"unclear": 2}) == "unclear 2"

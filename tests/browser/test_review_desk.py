"""The whole way of a reviewer in notebook 04: look, decide, undo, by mouse and by keys, among 10,000 alerts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from desk_page import SELECTOR, DeskPage, open_desk
from legibility import list_controls, read_texts
from notebook_page import DARK, LIGHT
from playwright.sync_api import expect
from reviewed_tables import ALERTS, BOLD, IMAGE, SCRIPT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from lab_server import LabServer
    from notebook_page import NotebookPage
    from playwright.sync_api import Browser
    from reviewed_tables import Place

pytestmark = [pytest.mark.browser, pytest.mark.spark]


class ReviewDesk(DeskPage):
    """The review desk, and what becomes of its decisions in the tables."""

    def __init__(self, notebook: NotebookPage, place: Place) -> None:
        super().__init__(notebook)
        self.place = place
        self.title = self.root.locator(".lookback-alert-title")
        self.words = self.root.locator(".lookback-words")
        self.options = self.root.locator(".lookback-queue-list option")
        self.picture = self.root.locator(".lookback-picture img")

    def begin(self, rule: str = "any", entity: str = "") -> None:
        """Shows the alerts of a rule, and of keys with a text in them, as they are in the tables."""
        self.field("Rule").select_option(label=rule)
        self.field("Entity").fill(entity)
        self.field("Entity").press("Enter")
        self.press("Read again")

    def reviews(self, alert_id: str) -> list[tuple[Any, ...]]:
        """The reviews of an alert in the tables, the last one last."""
        rows = self.place.tables.read("reviews").where(f"alert_id = '{alert_id}'").orderBy("reviewed_at")
        return [(row["disposition"], row["reviewer"], row["note"], row["revision"]) for row in rows.collect()]

    def find_first(self, rule_id: str) -> str:
        """The id of the alert of a rule that the queue has first."""
        from lookback.spark.review import open_queue

        return str(open_queue(self.place.tables, rule_id).head()["alert_id"])  # type: ignore[index]


@pytest.fixture(scope="module")
def notebook(browser: Browser, lab: LabServer, place: Place) -> Iterator[NotebookPage]:
    yield from open_desk(browser, lab, place, "04_review_alerts", reviewer="kim")


@pytest.fixture
def desk(notebook: NotebookPage, place: Place) -> ReviewDesk:
    return ReviewDesk(notebook, place)


def test_queue_of_10_000_alerts_is_shown_in_pages(desk: ReviewDesk) -> None:
    desk.begin("every-payment")
    assert f"{ALERTS:,} of them shown" in desk.status.inner_text()
    expect(desk.options).to_have_count(50)
    page = desk.root.locator(".lookback-page")
    expect(page).to_contain_text(f"Page 1 of {ALERTS // 50}")
    first = desk.options.first.inner_text()
    desk.button("Next page").click()
    expect(page).to_contain_text("Page 2 of")
    expect(desk.options.first).not_to_have_text(first)
    expect(desk.options).to_have_count(50)


def test_queue_alert_and_buttons_are_in_view_at_once(desk: ReviewDesk) -> None:
    desk.begin("every-payment")
    expect(desk.picture).to_be_visible()
    desk.notebook.scroll_to(desk.root)
    # 900 pixels are the height of a laptop's screen.
    for part in (desk.options.first, desk.title, desk.button("Confirmed"), desk.button("Undo"), desk.words):
        expect(part).to_be_in_viewport(ratio=1)
    expect(desk.picture).to_be_in_viewport(ratio=0.8)
    queue, alert = (desk.root.locator(f".lookback-{name}").bounding_box() for name in ("queue", "alert"))
    assert queue is not None
    assert alert is not None
    assert queue["x"] + queue["width"] <= alert["x"]
    assert queue["y"] == alert["y"]


def test_empty_filters_say_any(desk: ReviewDesk) -> None:
    desk.begin("any")
    for title in ("Rule", "Severity", "Tag"):
        expect(desk.field(title).locator("option:checked")).to_have_text("any")


def test_events_are_a_table_with_all_fields(desk: ReviewDesk) -> None:
    desk.begin("large-sum")
    table = desk.root.get_by_role("region", name="The events behind the alert").get_by_role("table")
    titles = ["why", "event_id", "event_time", "payer_id", "beneficiary_id", "payment_type", "amount", "arrival"]
    expect(table.get_by_role("columnheader")).to_have_text(titles)
    expect(table.get_by_role("row").nth(1)).to_contain_text("counted for ")


def test_alert_is_opened_by_a_click(desk: ReviewDesk) -> None:
    desk.begin("every-payment")
    before = desk.title.inner_text()
    desk.options.nth(20).click()
    expect(desk.title).not_to_have_text(before)
    expect(desk.words).not_to_contain_text("Being explained")
    expect(desk.picture).to_be_visible()
    assert "(+00:00)" in desk.title.inner_text()


def test_click_decides_and_undo_takes_it_back(desk: ReviewDesk) -> None:
    desk.begin("large-sum")
    alert, title = desk.find_first("large-sum"), desk.title.inner_text()
    desk.field("Note").fill("seen in the browser")
    said = desk.press("Confirmed")
    assert said.startswith("Recorded confirmed for large-sum, payer_id ")
    expect(desk.title).not_to_have_text(title)
    assert desk.reviews(alert) == [("confirmed", "kim", "seen in the browser", 0)]
    expect(desk.field("Note")).to_have_value("")
    assert desk.press("Undo").startswith("Undone: confirmed of large-sum")
    expect(desk.title).to_have_text(title)
    assert desk.reviews(alert) == []


def test_what_another_person_decided_meanwhile_is_said_and_not_overwritten(desk: ReviewDesk) -> None:
    from lookback.spark.review import record_review

    desk.begin("large-sum")
    alert = desk.find_first("large-sum")
    record_review(desk.place.tables, alert, "benign", "lee", "a known customer")
    said = desk.press("Confirmed")
    assert said.startswith("Problem: Not recorded for 1 alert, decided meanwhile: ")
    assert "lee" in said
    assert "benign" in said
    assert [row[1] for row in desk.reviews(alert)] == ["lee"]
    assert desk.press("Confirmed").startswith("Recorded confirmed for ")
    assert [row[:2] for row in desk.reviews(alert)] == [("benign", "lee"), ("confirmed", "kim")]


def test_keys_alone_choose_decide_and_undo(desk: ReviewDesk) -> None:
    desk.begin("every-payment", "A123")
    keys = desk.page.keyboard
    desk.focus_cell()
    desk.notebook.tab_to("Rule")
    desk.notebook.tab_to("The alerts that wait")
    title = desk.title.inner_text()
    # JupyterLab may take the arrows for its cells.
    desk.notebook.tab_to("Next")
    keys.press("Enter")
    expect(desk.title).not_to_have_text(title)
    second = desk.title.inner_text()
    desk.notebook.tab_to("Note", back=True)
    # In a notebook these letters cut, delete and undo cells.
    keys.type("x d d z")
    desk.notebook.tab_to("False positive")
    desk.watch_status()
    keys.press("Enter")
    assert desk.await_status().startswith("Recorded false_positive for every-payment, payer_id A123.")
    expect(desk.title).not_to_have_text(second)
    desk.notebook.tab_to("Undo")
    desk.watch_status()
    keys.press("Space")
    assert desk.await_status().startswith("Undone: false_positive of every-payment, payer_id A123.")
    expect(desk.title).to_have_text(second)


def test_many_are_decided_at_once_with_one_reason(desk: ReviewDesk) -> None:
    desk.begin("every-payment", "A124")
    expect(desk.options).to_have_count(20)
    assert desk.press("Choose all shown").startswith("20 alerts chosen")
    assert "write the reason in the note" in desk.press("Benign (20)")
    desk.field("Note").fill("a test account")
    assert desk.press("Benign (20)").startswith("Recorded benign for 20 alerts.")
    expect(desk.options).to_have_count(0)
    assert desk.press("Undo").startswith("Undone: benign of 20 alerts.")
    expect(desk.options).to_have_count(20)


def test_markup_in_values_is_text(desk: ReviewDesk) -> None:
    desk.begin("any", "<script>")
    expect(desk.title).to_contain_text(SCRIPT)
    expect(desk.words).not_to_contain_text("Being explained")
    expect(desk.options.first).to_contain_text("<script>")
    fields = desk.root.locator(".lookback-events")
    for text in (SCRIPT, IMAGE, BOLD):
        expect(fields).to_contain_text(text)
    made = desk.page.evaluate("() => [window.hacked, document.querySelectorAll('.hacked, img[src=x]').length]")
    assert made == [None, 0]


def test_snoozed_alert_leaves_the_queue(desk: ReviewDesk) -> None:
    desk.begin("every-payment", "A125")
    expect(desk.options).to_have_count(20)
    desk.field("Reason").fill("a known test")
    said = desk.press("Snooze")
    assert "payer_id" in said
    expect(desk.options).to_have_count(0)
    desk.field("Snoozed").select_option(label="snoozed ones only")
    expect(desk.options).to_have_count(20)
    desk.field("Snoozed").select_option(label="without snoozed ones")


def test_each_control_has_a_name(desk: ReviewDesk) -> None:
    desk.begin("large-sum")
    expect(desk.picture).to_be_visible()
    controls = list_controls(desk.page, SELECTOR)
    assert {each.role for each in controls} >= {"button", "combobox", "listbox", "textbox", "image"}
    assert [each for each in controls if not each.name] == []


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_every_text_can_be_read(desk: ReviewDesk, theme: Any, pictures: Path | None) -> None:
    desk.begin("any")
    expect(desk.picture).to_be_visible()
    desk.notebook.set_theme(theme)
    try:
        texts = read_texts(desk.root)
        desk.save_picture(pictures, "review_desk_dark" if theme == DARK else "review_desk")
    finally:
        desk.notebook.set_theme(LIGHT)
    assert len(texts) > 50
    assert [each for each in texts if not each.is_readable] == []

"""The whole way of an author in notebook 02: write, check, try, vary, save, publish, by mouse and by keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import yaml
from desk_page import SELECTOR, DeskPage, open_desk
from legibility import list_controls, read_texts
from notebook_page import DARK, LIGHT
from playwright.sync_api import expect
from reviewed_tables import ALERTS, SCRIPT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from lab_server import LabServer
    from notebook_page import NotebookPage
    from playwright.sync_api import Browser
    from reviewed_tables import Place

pytestmark = [pytest.mark.browser, pytest.mark.spark]
# A backtest walks through all events, on a machine that may be busy.
WORK_MS = 180_000
RULE = {
    "rule_id": "browser-rush", "severity": "high", "group_by": "payer_id", "window": "24 hours",
    "measures": "total: sum(amount); n: count(*)", "parameters": "limit: 4000", "when": "total >= :limit and n >= 2",
    "message": "{payer_id} paid {total} in a day",
}  # fmt: skip


@pytest.fixture(scope="module")
def notebook(browser: Browser, lab: LabServer, place: Place) -> Iterator[NotebookPage]:
    yield from open_desk(browser, lab, place, "02_author_rules", **RULE)


@pytest.fixture
def desk(notebook: NotebookPage) -> DeskPage:
    return DeskPage(notebook)


def read_yaml(desk: DeskPage) -> Any:
    return yaml.safe_load(desk.field("YAML").input_value())


def test_rule_is_checked_while_it_is_typed(desk: DeskPage) -> None:
    when = desk.field("When")
    when.fill("")
    when.press_sequentially("totl >= :limit")
    problem = desk.root.locator(".lookback-field-when .lookback-problem")
    expect(problem).to_contain_text("totl")
    expect(desk.root.locator(".lookback-findings")).to_contain_text("totl")
    when.fill("total >= :limit and n >= 2")
    expect(problem).to_be_hidden()
    expect(desk.root.locator(".lookback-words").first).to_contain_text("total >= 4000 and n >= 2")
    assert read_yaml(desk)["when"] == "total >= :limit and n >= 2"


def test_check_is_in_view_beside_what_is_typed(desk: DeskPage) -> None:
    form, check = desk.root.locator(".lookback-form").bounding_box(), desk.root.locator(".lookback-words").first
    expect(check).not_to_be_empty()
    box = check.bounding_box()
    assert form is not None
    assert box is not None
    assert form["x"] + form["width"] <= box["x"]
    assert form["y"] < box["y"] < form["y"] + form["height"]


def test_rare_fields_are_shown_when_asked_for(desk: DeskPage) -> None:
    expect(desk.field("Score")).to_be_hidden()
    desk.button("More fields").click()
    expect(desk.field("Score")).to_be_visible()
    desk.button("More fields").click()
    expect(desk.field("Score")).to_be_hidden()


def test_form_follows_the_yaml_and_is_off_while_that_cannot_be_read(desk: DeskPage) -> None:
    area, severity = desk.field("YAML"), desk.field("Severity")
    text = area.input_value()
    area.fill(text.replace("severity: high", "severity: critical"))
    expect(severity).to_have_value("critical")
    area.fill(f"{text}\n: [")
    expect(severity).to_be_disabled()
    desk.press("Undo")
    expect(severity).to_be_enabled()
    area.fill(text)
    expect(severity).to_have_value("high")


def test_quick_look_draws_what_the_rule_would_have_flagged(desk: DeskPage) -> None:
    desk.button("Quick look").click()
    expect(desk.status).to_contain_text("nothing was written", timeout=WORK_MS)
    expect(desk.root.get_by_role("img", name="browser-rush: what it would have flagged")).to_be_visible()


def test_slider_redraws_the_picture_by_keys(desk: DeskPage) -> None:
    desk.field("What if").fill("limit=300,4000,9000")
    desk.button("Backtest").click()
    expect(desk.status).to_contain_text(f"{ALERTS:,} events judged; nothing was published", timeout=WORK_MS)
    chosen, picture = desk.root.locator(".lookback-chosen"), desk.root.locator("img.lookback-alerts-picture")
    expect(chosen).to_contain_text("With limit 4000")
    before = picture.get_attribute("src")
    desk.root.locator(".lookback-slider").get_by_role("slider").focus()
    desk.page.keyboard.press("ArrowRight")
    expect(chosen).to_contain_text("With limit 9000")
    expect(picture).not_to_have_attribute("src", str(before))
    desk.press("Take these values")
    assert read_yaml(desk)["parameters"] == {"limit": 9000}
    desk.press("Undo")
    assert read_yaml(desk)["parameters"] == {"limit": 4000}


def test_backtest_can_be_cancelled(desk: DeskPage) -> None:
    desk.button("Backtest").click()
    expect(desk.button("Quick look")).to_be_disabled()
    desk.button("Cancel").click()
    expect(desk.status).to_contain_text("Backtest was cancelled; nothing is running.", timeout=WORK_MS)
    expect(desk.button("Quick look")).to_be_enabled()


def test_markup_in_a_rule_is_text(desk: DeskPage) -> None:
    desk.field("Description").fill(SCRIPT)
    desk.field("Where").fill("payment_type <> '<b class=hacked>'")
    expect(desk.root.locator(".lookback-words").first).to_contain_text("<b class=hacked>")
    assert read_yaml(desk)["description"] == SCRIPT
    assert desk.page.evaluate("() => [window.hacked, document.querySelectorAll('.hacked').length]") == [None, 0]
    desk.field("Where").fill("")
    desk.field("Description").fill("Much from one payer within a day")


def test_each_control_has_a_name(desk: DeskPage) -> None:
    controls = list_controls(desk.page, SELECTOR)
    assert {each.role for each in controls} >= {"button", "checkbox", "combobox", "listbox", "textbox"}
    # ipywidgets gives the handle of a slider no name; its title is the text before it.
    assert [each for each in controls if not each.name and each.role != "slider"] == []


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_every_text_can_be_read(desk: DeskPage, theme: Any, pictures: Path | None) -> None:
    desk.notebook.set_theme(theme)
    try:
        texts = read_texts(desk.root)
        desk.save_picture(pictures if theme == LIGHT else None, "author_desk")
    finally:
        desk.notebook.set_theme(LIGHT)
    assert len(texts) > 50
    assert [each for each in texts if not each.is_readable] == []


def test_rule_is_saved_as_the_file_that_git_keeps(desk: DeskPage, place: Place) -> None:
    said = desk.press("Save as conf/rules/ID.yml")
    file = place.conf / "rules/browser-rush.yml"
    assert said == f"Wrote {file}."
    assert file.read_text() == desk.field("YAML").input_value()


def test_keys_alone_publish_it(desk: DeskPage, place: Place) -> None:
    desk.field("Severity").focus()
    desk.notebook.tab_to("Author")
    desk.page.keyboard.type("kim")
    desk.notebook.tab_to("Comment")
    desk.page.keyboard.type("x d d z")
    desk.notebook.tab_to("Publish")
    desk.page.keyboard.press("Enter")
    expect(desk.status).to_contain_text("browser-rush is published as version 1, active.", timeout=WORK_MS)
    (row,) = place.tables.read("rules").where("rule_id = 'browser-rush'").collect()
    assert (row["author"], row["comment"], row["status"]) == ("kim", "x d d z", "active")

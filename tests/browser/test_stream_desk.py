"""The desk of notebook 03 pauses a rule, resumes it and sets a parameter of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from desk_page import SELECTOR, DeskPage, open_desk
from legibility import list_controls, read_texts
from notebook_page import DARK, LIGHT
from playwright.sync_api import expect

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from lab_server import LabServer
    from notebook_page import NotebookPage
    from playwright.sync_api import Browser
    from reviewed_tables import Place

pytestmark = [pytest.mark.browser, pytest.mark.spark]


@pytest.fixture(scope="module")
def notebook(browser: Browser, lab: LabServer, place: Place) -> Iterator[NotebookPage]:
    yield from open_desk(browser, lab, place, "03_evaluate_stream")


@pytest.fixture
def desk(notebook: NotebookPage) -> DeskPage:
    return DeskPage(notebook)


def choose(desk: DeskPage, rule_id: str) -> None:
    rules = desk.root.locator(".lookback-rules")
    rules.locator("select").select_option(label=rules.locator("option", has_text=rule_id).inner_text())


def read_rule(place: Place, rule_id: str) -> list[tuple[Any, ...]]:
    rows = place.tables.read("rules").where(f"rule_id = '{rule_id}'").orderBy("version")
    return [(row["version"], row["status"], row["author"]) for row in rows.collect()]


def test_rule_is_paused_and_resumed(desk: DeskPage, place: Place) -> None:
    choose(desk, "large-sum")
    desk.field("Author").fill("kim")
    assert desk.press("Pause") == "large-sum is published as version 2, paused."
    expect(desk.root.locator(".lookback-rules option", has_text="large-sum")).to_contain_text("paused")
    assert desk.press("Resume") == "large-sum is published as version 3, active."
    assert read_rule(place, "large-sum")[1:] == [(2, "paused", "kim"), (3, "active", "kim")]


def test_keys_alone_set_a_parameter(desk: DeskPage, place: Place) -> None:
    choose(desk, "large-sum")
    expect(desk.field("Parameter")).to_have_value("limit")
    desk.field("Parameter").focus()
    desk.notebook.tab_to("Value")
    desk.page.keyboard.press("Control+A")
    desk.page.keyboard.type("6000")
    desk.notebook.tab_to("Set")
    desk.watch_status()
    desk.page.keyboard.press("Space")
    assert "with limit = 6000" in desk.await_status()
    assert read_rule(place, "large-sum")[-1][1] == "active"


def test_each_control_has_a_name_and_every_text_can_be_read(desk: DeskPage, pictures: Path | None) -> None:
    assert [each for each in list_controls(desk.page, SELECTOR) if not each.name] == []
    desk.save_picture(pictures, "stream_desk")
    for theme in (DARK, LIGHT):
        desk.notebook.set_theme(theme)
        assert [each for each in read_texts(desk.root) if not each.is_readable] == []

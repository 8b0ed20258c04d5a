"""The tests' own means, on a notebook of a few widgets: what they call legible, named and reached by keys is so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import nbformat
import pytest
from legibility import Control, list_controls, read_texts
from notebook_page import DARK, LIGHT, NotebookPage
from playwright.sync_api import expect

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lab_server import LabServer
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser
CELL = """
import ipywidgets as widgets
from IPython.display import display

press = widgets.Button(description="Press")
said = widgets.Label("nothing yet")
press.on_click(lambda _: setattr(said, "value", "pressed"))
fade = widgets.HTML('<p style="color: #999; background: #fff">faint</p><p style="color: #767676; background: #fff">just so</p>')
nameless = widgets.Text()
box = widgets.VBox([press, said, fade, nameless])
box.add_class("tried")
display(box)
"""


@pytest.fixture(scope="module")
def notebook(browser: Browser, lab: LabServer) -> Iterator[NotebookPage]:
    document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    page = NotebookPage.open(browser, lab.add_notebook("tried.ipynb", document))
    page.run_all()
    yield page
    page.close()
    lab.end_kernels()


def test_button_answers_a_click_and_keys(notebook: NotebookPage) -> None:
    said = notebook.page.locator(".tried .widget-label").first
    expect(said).to_have_text("nothing yet")
    notebook.button("Press").click()
    expect(said).to_have_text("pressed")


def test_text_that_is_too_faint_is_found(notebook: NotebookPage) -> None:
    texts = {each.text: each for each in read_texts(notebook.page.locator(".tried"))}
    # #767676 on white is the lightest grey that is enough.
    assert (texts["faint"].is_readable, texts["faint"].ratio) == (False, 2.85)
    assert (texts["just so"].is_readable, texts["just so"].ratio) == (True, 4.54)


def test_control_without_a_name_is_found(notebook: NotebookPage) -> None:
    assert list_controls(notebook.page, ".tried") == [Control("button", "Press"), Control("textbox", "")]


def test_theme_changes_what_is_behind_a_text(notebook: NotebookPage) -> None:
    backgrounds = []
    for theme in (DARK, LIGHT):
        notebook.set_theme(theme)
        backgrounds.append(
            notebook.page.evaluate("() => getComputedStyle(document.querySelector('.jp-Notebook')).backgroundColor")
        )
    assert len(set(backgrounds)) == 2


def test_cell_that_fails_is_told(browser: Browser, lab: LabServer) -> None:
    document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("raise ValueError('as it is')")])
    page = NotebookPage.open(browser, lab.add_notebook("fails.ipynb", document))
    try:
        with pytest.raises(AssertionError, match="the run of all cells is failed: ValueError: as it is"):
            page.run_all()
    finally:
        page.close()
        lab.end_kernels()


def test_run_that_asks_the_kernel_nothing_is_begun_again(browser: Browser, lab: LabServer) -> None:
    document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 + 1")])
    page = NotebookPage.open(browser, lab.add_notebook("stalls.ipynb", document))
    try:
        page.page.evaluate("""() => {
            const {commands} = window.jupyterapp;
            const execute = commands.execute.bind(commands);
            window.runs = 0;
            commands.execute = (id, ...given) => {
                if (id !== 'notebook:run-all-cells') return execute(id, ...given);
                window.runs += 1;
                return window.runs === 1 ? new Promise(() => {}) : execute(id, ...given);
            };
        }""")
        page.run_all()
        assert page.page.evaluate("() => window.runs") == 2
    finally:
        page.close()
        lab.end_kernels()

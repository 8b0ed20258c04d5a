"""A desk of a notebook as the person at it sees it: buttons and fields by their titles, and the line of its status."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import nbformat
from notebook_page import ANSWER_MS, NotebookPage
from reviewed_tables import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from lab_server import LabServer
    from playwright.sync_api import Browser, Locator
    from reviewed_tables import Place

SELECTOR = ".lookback-desk"
_STATUS = f"{SELECTOR} .lookback-status"
# A line may say the same after a press as before, so its changes are counted.
_WATCH = """(selector) => {
    window.statusWatch?.disconnect();
    window.statusChanges = 0;
    window.statusWatch = new MutationObserver(() => { window.statusChanges += 1; });
    const what = {childList: true, subtree: true, characterData: true};
    window.statusWatch.observe(document.querySelector(selector), what);
}"""
_HAS_ANSWERED = """(selector) => {
    return window.statusChanges > 0 && !document.querySelector(selector).innerText.endsWith('...');
}"""


def open_desk(browser: Browser, lab: LabServer, place: Place, name: str, **parameters: Any) -> Iterator[NotebookPage]:
    """Opens a notebook and runs its cells down to the desk; at the end ends its kernel.

    The cells below a desk do the same by parameters, for runners; tests/notebooks runs them.
    """
    document = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    (at,) = [n for n, cell in enumerate(document.cells) if "_desk = notebook.open_" in cell.source]
    document.cells = document.cells[: at + 1]
    page = NotebookPage.open(browser, lab.add_notebook(f"{name}.ipynb", document, **place.parameters, **parameters))
    try:
        page.run_all()
        yield page
    finally:
        page.close()
        lab.end_kernels()


class DeskPage:
    """The desk of a notebook that is open in a browser. root: all of it; status: its line."""

    def __init__(self, notebook: NotebookPage) -> None:
        self.notebook, self.page = notebook, notebook.page
        self.root = self.page.locator(SELECTOR)
        self.status = self.page.locator(_STATUS)

    def button(self, name: str) -> Locator:
        """Finds a button by its title, such as `Confirmed (20)`."""
        return self.root.get_by_role("button", name=name, exact=True)

    def field(self, title: str) -> Locator:
        """Finds a field by its title."""
        return self.root.get_by_label(title, exact=True)

    def press(self, name: str) -> str:
        """Presses a button, and returns what the status line says once that is done."""
        self.notebook.await_idle()
        self.watch_status()
        self.button(name).click()
        return self.await_status()

    def watch_status(self) -> None:
        """Counts the changes of the status line from now on."""
        self.page.evaluate(_WATCH, _STATUS)

    def await_status(self) -> str:
        """Waits until the status line has changed and the kernel has nothing to do; returns what the line says."""
        self.page.wait_for_function(_HAS_ANSWERED, arg=_STATUS, timeout=ANSWER_MS)
        self.notebook.await_idle()
        return self.status.inner_text()

    def focus_cell(self) -> None:
        """Gives the focus to the cell of the desk, as the arrows of a notebook do."""
        self.root.locator("xpath=ancestor::*[contains(concat(' ', @class, ' '), ' jp-Cell ')][1]").focus()

    def save_picture(self, folder: Path | None, name: str) -> None:
        """Saves what the desk looks like, if a folder is given."""
        if folder is not None:
            self.notebook.save_picture(self.root, folder / f"{name}.png")

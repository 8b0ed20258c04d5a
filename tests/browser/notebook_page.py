"""A notebook that is open in a browser: running its cells, finding the controls of its desk, pressing keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from playwright.sync_api import expect

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser, Locator, Page, ViewportSize

Theme = Literal["JupyterLab Light", "JupyterLab Dark"]
LIGHT: Theme = "JupyterLab Light"
DARK: Theme = "JupyterLab Dark"
# JupyterLab and the kernel start side by side, and on a busy machine slowly.
_OPEN_MS = 120_000
# A run of all cells starts Spark, on a machine that may be busy.
_RUN_MS = 300_000
# A press asks the kernel, which may read tables, on a machine that may be busy.
ANSWER_MS = 60_000
# A laptop's screen.
_WINDOW: ViewportSize = {"width": 1280, "height": 900}
# JupyterLab's line below a notebook.
_STATUS_BAR_PIXELS = 26
# Controls that a page of JupyterLab and a notebook have at most before one that is looked for.
_MAX_TABS = 120
_READY = """() => {
    const panel = window.jupyterapp?.shell?.currentWidget;
    return panel?.context?.isReady && panel.sessionContext.isReady
        && panel.sessionContext.session?.kernel?.status === 'idle';
}"""
# A message that was just sent makes the kernel busy a moment later, so it must have been idle for a while.
_IS_IDLE = """() => {
    const now = performance.now();
    if (window.jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status !== 'idle') window.busyAt = now;
    window.busyAt ??= now;
    return now - window.busyAt > 500;
}"""
# The command answers nothing as long as JupyterLab does not know that the notebook is the current one. Now and then, right after
# the kernel has connected, it asks the kernel nothing and does not end: where no cell has begun for 15 s it is given again.
_RUN = """() => {
    const {commands, shell} = window.jupyterapp;
    const pause = () => new Promise((resolve) => setTimeout(resolve, 100));
    const hasBegun = () => shell.currentWidget.sessionContext.session?.kernel?.status !== 'idle'
        || [...shell.currentWidget.content.model.cells].some((cell) => cell.type === 'code' && cell.executionCount !== null);
    const stalls = async () => {
        for (let attempt = 0; attempt < 150; attempt += 1) {
            if (hasBegun()) return new Promise(() => {});
            await pause();
        }
    };
    const run = async () => {
        for (let attempt = 0; attempt < 100; attempt += 1) {
            shell.activateById(shell.currentWidget.id);
            const ok = await Promise.race([commands.execute('notebook:run-all-cells'), stalls()]);
            if (ok !== undefined) return ok ? 'done' : 'failed';
            await pause();
        }
        return 'not begun';
    };
    window.runOfAllCells = 'running';
    run().catch((error) => `failed: ${error}`).then((end) => { window.runOfAllCells = end; });
}"""
_READ_ERRORS = """() => {
    const cells = [...window.jupyterapp.shell.currentWidget.content.model.cells];
    const outputs = cells.flatMap((cell) => (cell.type === 'code' ? cell.outputs.toJSON() : []));
    return outputs.filter((each) => each.output_type === 'error').map((each) => `${each.ename}: ${each.evalue}`).join('; ');
}"""
_FOCUSED = """() => {
    const at = document.activeElement;
    const label = at.labels && at.labels.length ? at.labels[0].innerText : '';
    const text = at.matches('select, input, textarea') ? '' : at.innerText;
    return (at.getAttribute('aria-label') || label || text || at.title || '').trim();
}"""
_SHOWS_FOCUS = """() => {
    const style = getComputedStyle(document.activeElement);
    return (style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) > 0) || style.boxShadow !== 'none';
}"""


class NotebookPage:
    """One notebook in one page. page: for what these methods do not offer."""

    def __init__(self, page: Page) -> None:
        self.page = page

    @classmethod
    def open(cls, browser: Browser, url: str, theme: Theme = LIGHT) -> NotebookPage:
        """Opens a notebook in a fresh profile of the browser, and waits until its kernel is idle."""
        context = browser.new_context(viewport=_WINDOW)
        page = context.new_page()
        page.set_default_timeout(ANSWER_MS)
        page.goto(url, timeout=_OPEN_MS)
        page.wait_for_function(_READY, timeout=_OPEN_MS)
        opened = cls(page)
        opened.set_theme(theme)
        return opened

    def close(self) -> None:
        """Closes the page with its profile; its kernel goes on."""
        self.page.context.close()

    def set_theme(self, theme: Theme) -> None:
        """Chooses the theme of JupyterLab, and waits until it is there."""
        body = self.page.locator("body")
        if body.get_attribute("data-jp-theme-name") != theme:
            # The command answers once its setting is saved, and what `evaluate` waits for has no limit; the theme has one.
            self.page.evaluate(
                "theme => { window.jupyterapp.commands.execute('apputils:change-theme', {theme}); }", theme
            )
        expect(body).to_have_attribute("data-jp-theme-name", theme)

    def run_all(self) -> None:
        """Runs all cells, as the menu's command does, and asserts that none failed."""
        self.page.evaluate(_RUN)
        self.page.wait_for_function("() => window.runOfAllCells !== 'running'", timeout=_RUN_MS)
        end = self.page.evaluate("() => window.runOfAllCells")
        assert end == "done", f"the run of all cells is {end}: {self.read_errors()}"

    def await_idle(self) -> None:
        """Waits until the kernel has nothing to do."""
        self.page.evaluate("() => { window.busyAt = performance.now(); }")
        self.page.wait_for_function(_IS_IDLE, timeout=ANSWER_MS)

    def read_errors(self) -> str:
        """Returns the errors of the cells; empty without any."""
        return str(self.page.evaluate(_READ_ERRORS))

    def button(self, name: str) -> Locator:
        """Finds a button by its accessible name."""
        return self.page.get_by_role("button", name=name, exact=True)

    def tab_to(self, name: str, *, back: bool = False) -> None:
        """Presses Tab (back: Shift and Tab) until the control with this accessible name has the focus, and shows it."""
        passed: list[str] = []
        for _ in range(_MAX_TABS):
            self.page.keyboard.press("Shift+Tab" if back else "Tab")
            passed.append(self.read_focused())
            if passed[-1] == name:
                assert self.page.evaluate(_SHOWS_FOCUS), f"the focus on {name!r} cannot be seen"
                return
        raise AssertionError(f"Tab does not reach {name!r}; it passed {passed}")

    def read_focused(self) -> str:
        """Returns the accessible name of the control that has the focus."""
        return str(self.page.evaluate(_FOCUSED))

    def scroll_to(self, locator: Locator) -> None:
        """Scrolls the notebook until a part of it begins at the top of the window."""
        locator.evaluate("(element) => element.scrollIntoView({block: 'start'})")

    def save_picture(self, locator: Locator, path: Path) -> None:
        """Saves as a small PNG what the window shows of a part of the page, from its start on."""
        from PIL import Image

        self.scroll_to(locator)
        box = locator.bounding_box()
        assert box is not None
        box["height"] = min(box["height"], _WINDOW["height"] - _STATUS_BAR_PIXELS - box["y"])
        self.page.screenshot(path=path, clip=box)
        with Image.open(path) as whole:
            small = whole.convert("RGB").quantize(96, dither=Image.Dither.NONE)
        small.save(path, optimize=True)

"""Can everybody read and operate a part of a page? Names as the browser gives them to screen readers, contrast as WCAG has it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import CDPSession, Locator, Page

# What WCAG 2.2 calls controls and images, by their roles in the browser's accessibility tree.
_NAMED_ROLES = {
    "button", "checkbox", "combobox", "image", "img", "link", "listbox", "menuitem", "radio", "searchbox", "slider",
    "spinbutton", "switch", "tab", "textbox",
}  # fmt: skip
# WCAG 2.2, 1.4.3: of text, and of large text.
_CONTRAST, _CONTRAST_OF_LARGE = 4.5, 3.0
# Text that is shown and not disabled, with its colour over the colours behind it. Colours of any form are read by a canvas.
_READ_TEXTS = """(root) => {
    const canvas = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
    const read = (colour) => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
        return [r, g, b, a / 255];
    };
    const over = (above, below) => [0, 1, 2].map((i) => above[i] * above[3] + below[i] * (1 - above[3])).concat(1);
    const backgroundOf = (element) => {
        const layers = [];
        for (let at = element; at; at = at.parentElement) {
            const layer = read(getComputedStyle(at).backgroundColor);
            layers.push(layer);
            if (layer[3] === 1) break;
        }
        return layers.reverse().reduce((below, above) => over(above, below), [255, 255, 255, 1]);
    };
    const luminance = (colour) => {
        const [r, g, b] = colour.slice(0, 3).map((value) => {
            const part = value / 255;
            return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
        });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const found = [];
    const add = (element, text) => {
        if (!text.trim() || element.closest('[disabled], [aria-disabled="true"], option')) return;
        if (!element.checkVisibility({opacityProperty: true, visibilityProperty: true})) return;
        const style = getComputedStyle(element);
        const background = backgroundOf(element);
        let ink = read(style.color);
        for (let at = element; at; at = at.parentElement) ink[3] *= parseFloat(getComputedStyle(at).opacity);
        ink = over(ink, background);
        const [light, dark] = [luminance(ink), luminance(background)].sort((a, b) => b - a);
        const size = parseFloat(style.fontSize);
        found.push({
            text: text.trim().slice(0, 60),
            ratio: (light + 0.05) / (dark + 0.05),
            isLarge: size >= 24 || (size >= 18.66 && parseInt(style.fontWeight) >= 700),
        });
    };
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) add(walker.currentNode.parentElement, walker.currentNode.data);
    for (const field of root.querySelectorAll('input, textarea, select')) add(field, field.value || 'a value');
    return found;
}"""


@dataclass(frozen=True)
class Text:
    """A piece of text that is shown. ratio: the contrast with what is behind it, 1 to 21."""

    text: str
    ratio: float
    is_large: bool

    @property
    def is_readable(self) -> bool:
        """Returns whether its contrast is enough for WCAG's level AA."""
        return self.ratio >= (_CONTRAST_OF_LARGE if self.is_large else _CONTRAST)


@dataclass(frozen=True)
class Control:
    """A control or an image, as a screen reader gets it. element: how it begins in the page, if it has no name."""

    role: str
    name: str
    element: str = field(default="", compare=False)


def read_texts(part: Locator) -> list[Text]:
    """Reads every text that is shown in a part of a page, with its contrast."""
    rows = part.evaluate(_READ_TEXTS)
    return [Text(row["text"], round(row["ratio"], 2), row["isLarge"]) for row in rows]


def list_controls(page: Page, selector: str) -> list[Control]:
    """Lists the controls and images of the first part of a page that a selector finds, from the accessibility tree."""
    session = page.context.new_cdp_session(page)
    try:
        session.send("Accessibility.enable")
        # Node ids are those of a document that was asked for.
        document = session.send("DOM.getDocument", {"depth": 0})["root"]["nodeId"]
        node = session.send("DOM.querySelector", {"nodeId": document, "selector": selector})["nodeId"]
        nodes = session.send("Accessibility.queryAXTree", {"nodeId": node})["nodes"]
        found = [each for each in nodes if not each.get("ignored") and _read(each, "role") in _NAMED_ROLES]
        return [_describe(session, each) for each in found]
    finally:
        session.detach()


def _describe(session: CDPSession, node: dict[str, Any]) -> Control:
    role, name = _read(node, "role"), _read(node, "name")
    if name or "backendDOMNodeId" not in node:
        return Control(role, name)
    html: str = session.send("DOM.getOuterHTML", {"backendNodeId": node["backendDOMNodeId"]})["outerHTML"]
    return Control(role, name, html[:300])


def _read(node: dict[str, Any], name: str) -> str:
    return str(node.get(name, {}).get("value", "")).strip()

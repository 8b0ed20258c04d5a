"""The parts of all desks: texts, buttons, fields, tables, a status line, a picture.

Values of events and alerts are shown as plain text, never as HTML or a formula. All text has the colours of the
notebook's theme, light or dark. The desk's own colours are only in the edges next to texts, which say the same in a
word.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import ipywidgets

from lookback.core.errors import LookbackError
from lookback.core.values.texts import cut_end, escape_unprintable, summarize_error
from lookback.views.display import draw_png, read_title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The class that MathJax skips; otherwise ipywidgets lets it process all labels.
_NO_FORMULA = ("mathjax_ignore", "tex2jax_ignore")
# Longer texts are cut, so that the browser never has to lay out a megabyte.
_MAX_CHARACTERS = 2_000
WIDE = {"width": "98%"}
# How a desk shows a time in a list or table.
TIME = "%Y-%m-%d %H:%M:%S"
# The edge next to a text, by its subject: Okabe and Ito's colours, darkened or lightened until each has a contrast of
# at least 3:1 on white and on black (WCAG 2.2, 1.4.11).
EDGES = {"critical": "#D55E00", "high": "#B07B00", "medium": "#3D87B8", "low": "#7F7F7F"}
EDGES |= {"done": "#008F68", "problem": "#D55E00", "news": "#7F7F7F"}
# No text has its own colour or background. A focused control gets an outline in its text colour; `!important` overrides
# the `outline: none !important` of ipywidgets' fields.
_STYLE = """
.lookback-desk .jupyter-widgets:focus-visible, .lookback-desk .jupyter-widgets :focus-visible {
  outline: 2px solid currentColor !important; outline-offset: 1px; }
.lookback-desk .lookback-text { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.4; height: auto; }
.lookback-desk .lookback-head { font-weight: 600; }
.lookback-desk .lookback-list select, .lookback-desk .lookback-list-head {
  font-family: monospace; font-size: 12px; line-height: 1.5; }
.lookback-desk .lookback-list-head { white-space: pre; overflow: hidden; padding-left: 4px; }
.lookback-desk .lookback-named > label { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
.lookback-desk .lookback-rows { overflow: auto; max-height: 320px; }
.lookback-desk .lookback-rows table { border-collapse: collapse; line-height: 1.4; }
.lookback-desk .lookback-rows th, .lookback-desk .lookback-rows td {
  text-align: left; vertical-align: top; padding: 2px 16px 2px 0; max-width: 320px; overflow-wrap: break-word; }
.lookback-desk .lookback-rows td { white-space: pre-wrap; }
.lookback-desk img { max-width: 100%; }
"""
_EDGE = ".lookback-desk .lookback-{} {{ border-left: 4px solid {}; padding-left: 8px; }}"
_STYLE += "\n".join(_EDGE.format(name, colour) for name, colour in EDGES.items())


def clean_text(value: object, most: int = _MAX_CHARACTERS) -> str:
    """Returns a value as a text of at most `most` characters, with unprintable characters escaped; empty for None.

    Line breaks are kept. Marks that change the writing direction count as unprintable, so one value cannot hide
    another.
    """
    lines = ("" if value is None else cut_end(str(value), most)).splitlines()
    return "\n".join(escape_unprintable(line) for line in lines)


def make_text(value: object = "", *classes: str, layout: Any = None) -> Any:
    """Makes a text with stable class names for tests and styles, as high as it is unless `layout` says otherwise."""
    label = ipywidgets.Label(clean_text(value), layout=layout or {"width": "auto", "height": "auto"})
    return add_classes(label, "lookback-text", *_NO_FORMULA, *classes)


def make_heading(title: str) -> Any:
    """Makes a heading, to which screen readers can jump. Its title is the desk's own text, never a value."""
    return ipywidgets.HTML(f"<h3>{html.escape(title)}</h3>")


def make_button(title: str, act: Callable[[], None], hint: str, *classes: str, width: str = "auto") -> Any:
    """Makes a button that the keyboard reaches. Its hint is a full sentence that explains the title."""
    button = ipywidgets.Button(description=clean_text(title, 100), layout={"width": width})
    describe(button, hint)
    button.on_click(lambda _: act())
    return add_classes(button, *classes)


def make_field(kind: type[Any], title: str, hint: str, *classes: str, **values: Any) -> Any:
    """Makes an input field with its title, such as `make_field(ipywidgets.Dropdown, "Rule", ...)`.

    The title is the desk's own text, never a value; with the class `lookback-named` only screen readers get it.
    `values` go to the widget. A text is sent when you leave the field or press Enter: text sent while the kernel is
    busy could arrive after the press of a button. continuous_update=True sends it at every key, for checks as you type.
    """
    values.setdefault("style", {"description_width": "initial"})
    if issubclass(kind, ipywidgets.Text | ipywidgets.Textarea):
        values.setdefault("continuous_update", False)
    field = kind(description=title, **values)
    describe(field, hint)
    return add_classes(field, *classes)


def make_list(kind: type[Any], title: str, hint: str, rows: int, *classes: str) -> Any:
    """Makes a list of options, `rows` high and as wide as the desk."""
    return make_field(kind, title, hint, "lookback-list", *classes, options=[], rows=rows, layout=WIDE)


def describe(widget: Any, hint: str) -> None:
    """Gives a widget a sentence for screen readers and as a tooltip, in ipywidgets 7 and 8."""
    name = "tooltip" if widget.has_trait("tooltip") else "description_tooltip"
    if widget.has_trait(name):
        setattr(widget, name, clean_text(hint, 300))


def add_classes(widget: Any, *classes: str) -> Any:
    """Gives a widget stable class names and returns it."""
    for name in classes:
        widget.add_class(name)
    return widget


def make_desk(*parts: Any) -> Any:
    """Stacks parts with the shared style."""
    return add_classes(ipywidgets.VBox([ipywidgets.HTML(f"<style>{_STYLE}</style>"), *parts]), "lookback-desk")


def make_row(*parts: Any, name: str = "") -> Any:
    """Puts parts side by side, in Tab order; they wrap if the row is too narrow."""
    row = ipywidgets.HBox(list(parts), layout={"flex_flow": "row wrap", "align_items": "center"})
    return add_classes(row, *filter(None, [name]))


def make_halves(left: Any, right: Any) -> Any:
    """Puts two columns side by side, half the desk each; the right one goes below the left if there is no room."""
    for column in (left, right):
        column.layout.flex, column.layout.min_width = "1 1 480px", "0"
    return ipywidgets.HBox([left, right], layout={"flex_flow": "row wrap", "align_items": "flex-start"})


def make_column(*parts: Any, name: str = "") -> Any:
    """Stacks parts."""
    return add_classes(ipywidgets.VBox(list(parts)), *filter(None, [name]))


def make_picture(png: bytes, words: str, *classes: str) -> Any:
    """Makes a picture from a PNG file, empty for none yet; `words` describe it for people who cannot see it.

    ipywidgets' own Image has no alternative text, and an Image with a tooltip cannot be shown.
    """
    picture = add_classes(ipywidgets.HTML(), *classes)
    show_picture(picture, png, words)
    return picture


def show_picture(picture: Any, png: bytes, words: str) -> None:
    """Replaces the image in a picture from `make_picture`."""
    names, alt = html.escape(" ".join(picture._dom_classes)), html.escape(clean_text(words, 300))
    data = base64.b64encode(png).decode()
    picture.value = f'<img class="{names}" alt="{alt}" src="data:image/png;base64,{data}"/>' if png else ""


def show_figure(picture: Any, figure: Figure) -> None:
    """Renders a figure into a picture from `make_picture`."""
    show_picture(picture, draw_png(figure), read_title(figure))


def show_rows(place: Any, columns: Sequence[str], rows: Sequence[Sequence[object]], words: str) -> None:
    """Shows rows of values in an `ipywidgets.HTML` as a table, which scrolls if it is large; nothing without rows.

    All values are escaped, so that they are shown as text. `words` name the table for screen readers.
    """
    titles = "".join(f'<th scope="col">{html.escape(clean_text(title, 100))}</th>' for title in columns)
    lines = ("".join(f"<td>{html.escape(clean_text(value))}</td>" for value in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    # A box that scrolls must take the focus, so that the arrow keys can scroll it.
    box = f'<div class="lookback-rows {" ".join(_NO_FORMULA)}" tabindex="0" role="region" aria-label="{html.escape(words)}">'
    place.value = f"{box}<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>" if rows else ""


class Status:
    """The status line: says what was done, or what is wrong and what to do."""

    def __init__(self) -> None:
        self.widget = make_text("", "lookback-status")
        self._kind = ""

    @property
    def text(self) -> str:
        """The displayed sentence."""
        return str(self.widget.value)

    def show(self, sentence: str, kind: str = "news") -> None:
        """Shows a sentence of a kind: news, done, or problem, which it then begins with."""
        if self._kind:
            self.widget.remove_class(f"lookback-{self._kind}")
        self._kind = kind
        self.widget.add_class(f"lookback-{kind}")
        self.widget.value = clean_text(f"Problem: {sentence}" if kind == "problem" else sentence)

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Shows an error of the block as a problem, as it would be lost in a browser's callback."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever fails is shown to the person who pressed the button
            self.show(describe_failure(error), "problem")


def describe_failure(error: BaseException) -> str:
    """Describes an error in a sentence; one that Lookback raises says what to do."""
    return str(error) if isinstance(error, LookbackError) else summarize_error(error)


class Filling:
    """A block in which a desk changes its own controls, so that these changes do not count as a person's."""

    def __init__(self) -> None:
        self._depth = 0

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1

    def observe(self, control: Any, act: Callable[[], None], name: str = "value") -> None:
        """Calls `act` after each change of a control outside the block."""
        control.observe(lambda _: None if self._depth else act(), name)

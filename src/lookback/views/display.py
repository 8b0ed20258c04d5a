"""Displays text, frames and figures in a notebook, and prints them elsewhere."""

from __future__ import annotations

import base64
import html
import io
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from lookback.core.values.columns import to_text


@dataclass(frozen=True)
class Markup:
    """A thing to display as markup in a notebook and as text elsewhere."""

    markup: str
    text: str

    def _repr_html_(self) -> str:
        return self.markup

    def __repr__(self) -> str:
        return self.text


def text(words: str) -> Markup:
    """Returns a paragraph."""
    return Markup(f"<p>{html.escape(words)}</p>", words)


def code(lines: str) -> Markup:
    """Returns preformatted text, with its line breaks."""
    return Markup(f"<pre>{html.escape(lines)}</pre>", lines)


def make_image_tag(figure: Figure) -> str:
    """Returns a figure as an HTML image with embedded data."""
    data = base64.b64encode(draw_png(figure)).decode()
    return f'<img alt="{html.escape(read_title(figure))}" src="data:image/png;base64,{data}"/>'


def draw_png(figure: Figure) -> bytes:
    """Renders a figure as a PNG file with 90 dots per inch."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=90)
    return buffer.getvalue()


def read_title(figure: Figure) -> str:
    """Returns a figure's title, for people who cannot see the figure."""
    return figure.get_suptitle().replace("\\$", "$")


def show(*things: Any) -> None:
    """Displays text, frames and figures in a notebook, and prints them elsewhere."""
    shown = [
        Markup(make_image_tag(thing), f"a picture: {read_title(thing)}") if isinstance(thing, Figure) else thing
        for thing in things
    ]
    display = _find_display()
    # Columns are not truncated, so that messages are complete.
    with pd.option_context("display.max_colwidth", None, "display.max_columns", None, "display.width", 200):
        for thing in shown:
            display(_make_readable(thing) if isinstance(thing, pd.DataFrame) else thing)


def _find_display() -> Callable[[Any], Any]:
    try:
        from IPython.core.getipython import get_ipython
        from IPython.display import display
    except ImportError:
        return print
    return display if get_ipython() is not None else print  # type: ignore[no-untyped-call]


def has_front_end() -> bool:
    """Returns whether this runs in a notebook, which can replace an output; false in a script or IPython's shell."""
    try:
        from IPython.core.getipython import get_ipython
    except ImportError:
        return False
    return getattr(get_ipython(), "kernel", None) is not None  # type: ignore[no-untyped-call]


def has_person() -> bool:
    """Returns whether the notebook may be interactive. Runners such as nbmake declare that they accept no input.

    On Databricks no notebook accepts input, so there a job looks like an interactive session.
    """
    if not has_front_end():
        return False
    from IPython.core.getipython import get_ipython

    kernel = get_ipython().kernel  # type: ignore[no-untyped-call]
    return "DATABRICKS_RUNTIME_VERSION" in os.environ or bool(getattr(kernel, "_allow_stdin", True))


def clear() -> None:
    """Clears the cell's output once the next thing is shown."""
    try:
        from IPython.display import clear_output
    except ImportError:
        return
    clear_output(wait=True)  # type: ignore[no-untyped-call]


def _make_readable(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the frame with exact texts for mappings and decimals, and without an index."""
    plain = {name: [_format_cell(value) for value in frame[name]] for name in frame.columns}
    return pd.DataFrame(plain, index=[""] * len(frame))


def _format_cell(value: Any) -> Any:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {to_text(each)}" for name, each in value.items())
    if isinstance(value, pd.Timestamp):
        return f"{value:%Y-%m-%d %H:%M:%S}"
    return "" if value is None or value is pd.NaT else value


def to_frame(rows: Any) -> pd.DataFrame:
    """Converts a Spark frame to pandas through Arrow; maps become dicts."""
    table = rows.toArrow()
    maps = [
        name for name, kind in zip(table.column_names, table.schema.types, strict=True) if str(kind).startswith("map<")
    ]
    frame: pd.DataFrame = table.to_pandas(integer_object_nulls=True)
    for name in maps:
        frame[name] = pd.Series([{} if value is None else dict(value) for value in frame[name]], dtype=object)
    return frame

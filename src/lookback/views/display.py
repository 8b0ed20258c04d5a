"""What a notebook displays: text, frames and figures; printed where there is no notebook."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from lookback.core.values.columns import text_of


@dataclass(frozen=True)
class Markup:
    """Markup for a notebook, text for anything else."""

    markup: str
    text: str

    def _repr_html_(self) -> str:
        return self.markup

    def __repr__(self) -> str:
        return self.text


def text(words: str) -> Markup:
    """A paragraph."""
    return Markup(f"<p>{html.escape(words)}</p>", words)


def code(lines: str) -> Markup:
    """Text with its line breaks."""
    return Markup(f"<pre>{html.escape(lines)}</pre>", lines)


def png_tag(figure: Figure) -> str:
    """A figure as an image within markup."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=90)
    return f'<img alt="{html.escape(title_of(figure))}" src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"/>'


def title_of(figure: Figure) -> str:
    """A figure's title, for who cannot see it."""
    return figure.get_suptitle().replace("\\$", "$")


def show(*things: Any) -> None:
    """Displays text, frames and figures; prints them where there is no notebook."""
    shown = [
        Markup(png_tag(thing), f"a picture: {title_of(thing)}") if isinstance(thing, Figure) else thing
        for thing in things
    ]
    display = _display()
    # A person wants the whole message.
    with pd.option_context("display.max_colwidth", None, "display.max_columns", None, "display.width", 200):
        for thing in shown:
            display(_readable(thing) if isinstance(thing, pd.DataFrame) else thing)


def _display() -> Callable[[Any], Any]:
    try:
        from IPython.core.getipython import get_ipython
        from IPython.display import display
    except ImportError:
        return print
    return display if get_ipython() is not None else print  # type: ignore[no-untyped-call]


def has_front_end() -> bool:
    """Whether this runs in a notebook, where an output can be replaced; not in a script, nor in IPython in a terminal."""
    try:
        from IPython.core.getipython import get_ipython
    except ImportError:
        return False
    return getattr(get_ipython(), "kernel", None) is not None  # type: ignore[no-untyped-call]


def clear() -> None:
    """Lets the next thing shown take the place of what the cell has shown so far."""
    try:
        from IPython.display import clear_output
    except ImportError:
        return
    clear_output(wait=True)  # type: ignore[no-untyped-call]


def _readable(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame as people read it: maps and decimals as their exact text, no index."""
    plain = {name: [_cell(value) for value in frame[name]] for name in frame.columns}
    return pd.DataFrame(plain, index=[""] * len(frame))


def _cell(value: Any) -> Any:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {text_of(each)}" for name, each in value.items())
    if isinstance(value, pd.Timestamp):
        return f"{value:%Y-%m-%d %H:%M:%S}"
    return "" if value is None or value is pd.NaT else value


def frame_of(rows: Any) -> pd.DataFrame:
    """A Spark frame as pandas, by way of Arrow; maps as dicts."""
    table = rows.toArrow()
    maps = [
        name for name, kind in zip(table.column_names, table.schema.types, strict=True) if str(kind).startswith("map<")
    ]
    frame: pd.DataFrame = table.to_pandas(integer_object_nulls=True)
    for name in maps:
        frame[name] = pd.Series([{} if value is None else dict(value) for value in frame[name]], dtype=object)
    return frame

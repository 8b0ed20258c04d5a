"""Makes the figures, axes, titles and legends of all charts.

Figures are made without pyplot, so they need no display and change no global state. The colours are Okabe and Ito's
(2008), which colour-blind people can distinguish.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any

import matplotlib.dates
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# matplotlib.dates has no type hints.
DATES: Any = matplotlib.dates
BLUE, ORANGE, GREEN, RED, SKY, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#7F7F7F"
DARK = "#444444"
_WIDTH_INCHES = 10.0


def make_figure(height: float) -> Figure:
    """Returns an empty figure of the common width, with a height in inches."""
    return Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")


def make_stacked_axes(rows: int, height: float, *, sharex: bool = False) -> tuple[Figure, list[Axes]]:
    """Returns a figure, with a total height in inches, and its stacked axes."""
    figure = make_figure(height)
    axes = list(figure.subplots(rows, 1, sharex=sharex, squeeze=False).ravel())
    for each in axes:
        style_axes(each)
    return figure, axes


def style_axes(axes: Axes) -> None:
    """Sets the common style of axes: a light grid, no top and right border."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.yaxis.set_major_formatter(FuncFormatter(format_thousands))
    axes.tick_params(labelsize=9)


def format_thousands(value: float, _: Any = None) -> str:
    """Formats a number with commas between thousands. Also works as a tick formatter."""
    return f"{value:,.10g}"


def set_titles(figure: Figure, title: str, below: str) -> None:
    """Sets the left-aligned title and the line below it."""
    figure.suptitle(escape_formula(title), x=0.01, ha="left", fontsize=13, fontweight="bold")
    figure.axes[0].set_title(escape_formula(below), loc="left", fontsize=10, color=DARK)


def escape_formula(text: str) -> str:
    """Escapes dollar signs, between which matplotlib would read a formula."""
    return text.replace("$", "\\$")


def format_time_axis(axes: Axes) -> None:
    """Formats the horizontal axis as event time in UTC."""
    locator = DATES.AutoDateLocator(tz=dt.timezone.utc, minticks=4, maxticks=9)
    axes.xaxis_date(tz=dt.timezone.utc)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(DATES.ConciseDateFormatter(locator, tz=dt.timezone.utc))
    axes.set_xlabel("event time (UTC)")


def to_utc_index(values: Any) -> pd.DatetimeIndex:
    """Converts times of any kind to one aware index."""
    return pd.DatetimeIndex(pd.to_datetime(pd.Series(list(values), dtype=object), utc=True))


def shorten_name(name: str) -> str:
    """Truncates a name that would take too much room from the axes."""
    return name if len(name) <= 28 else f"{name[:27]}…"


def write_placeholder(axes: Axes, text: str) -> None:
    """Writes a text in empty axes."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY)
    axes.set_xticks([])
    axes.set_yticks([])


def draw_legend(axes: Axes, skip: int = 0) -> None:
    """Draws the legend in a row above the axes, where it covers nothing, without the first `skip` handles."""
    handles, labels = axes.get_legend_handles_labels()
    place = {"loc": "lower right", "bbox_to_anchor": (1.0, 0.99), "borderaxespad": 0.2}
    axes.legend(handles[skip:], labels[skip:], ncols=4, fontsize=9, frameon=False, **place)


def draw_legend_beside(axes: Axes) -> None:
    """Draws the legend to the right of the axes."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)


def draw_limit(axes: Axes, value: float, label: str) -> None:
    """Draws a limit as a dashed line."""
    axes.axhline(value, color=RED, linestyle="--", linewidth=1.4, label=label)


def format_share_axis(axes: Axes, name: str) -> None:
    """Formats the vertical axis as shares from 0% to 100%."""
    axes.set_ylim(-0.03, 1.03)
    axes.set_ylabel(name)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))

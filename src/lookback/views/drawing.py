"""What pictures are drawn with: figures, axes, colours, titles, the axis of time.

A Figure is made by itself, never by pyplot, so nothing outside of it changes and no display is needed. The colours are
Okabe and Ito's (2008), which stay apart for colour-blind eyes.
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

# Its functions carry no types.
DATES: Any = matplotlib.dates
BLUE, ORANGE, GREEN, RED, SKY, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#7F7F7F"
_WIDTH = 10.0


def new_figure(height: float) -> Figure:
    """An empty figure, as wide as all are. height: inches."""
    return Figure(figsize=(_WIDTH, height), layout="constrained")


def stacked_axes(rows: int, height: float, *, sharex: bool = False) -> tuple[Figure, list[Axes]]:
    """A figure and its axes, one above the other. height: inches, of the whole."""
    figure = new_figure(height)
    axes = list(figure.subplots(rows, 1, sharex=sharex, squeeze=False).ravel())
    for each in axes:
        plain(each)
    return figure, axes


def plain(axes: Axes) -> None:
    """Axes with what reading them needs and no more."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.yaxis.set_major_formatter(FuncFormatter(thousands))
    axes.tick_params(labelsize=9)


def thousands(value: float, _: Any = None) -> str:
    """A number with its thousands apart; also as a formatter of ticks."""
    return f"{value:,.10g}"


def titled(figure: Figure, title: str, below: str) -> None:
    """Title and the line below it, at the left."""
    figure.suptitle(no_formula(title), x=0.01, ha="left", fontsize=13, fontweight="bold")
    figure.axes[0].set_title(no_formula(below), loc="left", fontsize=10, color="#444444")


def no_formula(text: str) -> str:
    """The text with its dollar signs as they are: between two of them matplotlib would read a formula."""
    return text.replace("$", "\\$")


def time_axis(axes: Axes) -> None:
    """The axis of event time, in UTC."""
    locator = DATES.AutoDateLocator(tz=dt.timezone.utc, minticks=4, maxticks=9)
    axes.xaxis_date(tz=dt.timezone.utc)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(DATES.ConciseDateFormatter(locator, tz=dt.timezone.utc))
    axes.set_xlabel("event time (UTC)")


def moment_text(time: dt.datetime) -> str:
    """`2024-03-04 10:00:00 UTC`."""
    return f"{time:%Y-%m-%d %H:%M:%S} UTC"


def utc(values: Any) -> pd.DatetimeIndex:
    """Times of any kind as one index, aware."""
    return pd.DatetimeIndex(pd.to_datetime(pd.Series(list(values), dtype=object), utc=True))


def short(name: str) -> str:
    """The name, cut off where it would take the room of the axes."""
    return name if len(name) <= 28 else f"{name[:27]}…"


def nothing(axes: Axes, text: str) -> None:
    """Says in empty axes that there is nothing."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY)
    axes.set_xticks([])
    axes.set_yticks([])


def legend(axes: Axes, skip: int = 0) -> None:
    """In a row above the axes, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    place = {"loc": "lower right", "bbox_to_anchor": (1.0, 0.99), "borderaxespad": 0.2}
    axes.legend(handles[skip:], labels[skip:], ncols=4, fontsize=9, frameon=False, **place)

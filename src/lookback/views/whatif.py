"""Plots alerts per day, precision and recall against the values of a parameter.

Each function returns a new matplotlib Figure, as in `pictures`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from matplotlib.ticker import FuncFormatter, NullFormatter

from lookback.core.errors import DurationError
from lookback.core.values.durations import MICROSECONDS, format_duration, parse_duration
from lookback.core.values.texts import count_noun
from lookback.views.drawing import (
    BLUE,
    DARK,
    GREEN,
    GREY,
    ORANGE,
    SKY,
    draw_legend,
    draw_limit,
    format_share_axis,
    format_thousands,
    make_stacked_axes,
    set_titles,
    shorten_name,
    write_placeholder,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lookback.spark.replay.backtest import BacktestFigures

_COLOURS = (BLUE, ORANGE, GREEN, SKY, GREY)
_HOUR = MICROSECONDS["hour"]
# With more non-numeric values than this, the axis labels only some of them.
_MAX_NAMED = 12


def plot_alerts_by_value(
    figures: Sequence[BacktestFigures],
    name: str,
    *,
    today: object = None,
    budget: float | None = None,
    chosen: object = None,
) -> Figure:
    """Plots alerts per day against the values of a parameter, on a logarithmic scale.

    Args:
        figures: Figures of a rule's variants.
        name: The parameter. Each combination of the remaining parameters is a line.
        today: The rule's current value, which is marked.
        budget: Alerts that a team can review in a day, drawn as a line.
        chosen: Another value to mark, such as that of a slider.
    """
    figure, (axes,) = make_stacked_axes(1, 3.8)
    place = _PanelPlaces(figures, name)
    # A logarithmic scale has no zero.
    is_drawn = _draw_lines(axes, figures, place, "alerts a day", lambda each: each.alerts_per_day or None)
    if budget:
        draw_limit(axes, budget, f"budget {format_thousands(budget)} a day")
    _finish(axes, place, today, chosen)
    if is_drawn:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(format_thousands))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_ylabel("alerts a day")
        draw_legend(axes)
    else:
        write_placeholder(axes, "no variant raises an alert")
    silent = sum(1 for each in figures if not each.alerts)
    within = [each for each in figures if budget and each.alerts_per_day is not None and each.alerts_per_day <= budget]
    below = count_noun(len(figures), "variant") + (f", {len(within):,} within the budget" if budget else "")
    below += f"; {silent:,} raise none" if silent else ""
    set_titles(figure, f"{_name_rule(figures)}: alerts a day by {name}", below)
    return figure


def _draw_lines(
    axes: Axes,
    figures: Sequence[BacktestFigures],
    place: _PanelPlaces,
    label: str,
    read: Callable[[BacktestFigures], float | None],
) -> bool:
    """Draws a line for each combination of the remaining parameters. Returns whether there is a value at all."""
    is_drawn = False
    for colour, (name, own) in zip(_COLOURS, _split(figures, place).items(), strict=False):
        points = [(place(each), read(each)) for each in own if read(each) is not None]
        is_drawn |= bool(points)
        axes.plot(*zip(*points, strict=True) if points else ((), ()), marker="o", color=colour, label=name or label)
    return is_drawn


def plot_precision_by_value(
    figures: Sequence[BacktestFigures], name: str, *, today: object = None, chosen: object = None
) -> Figure:
    """Plots precision and recall against the values of a parameter.

    The arguments are as in `plot_alerts_by_value`. Variants without a labelled event have neither figure.
    """
    figure, axes_of = make_stacked_axes(2, 5.0, sharex=True)
    place = _PanelPlaces(figures, name)
    for axes, ratio in zip(axes_of, ("precision", "recall"), strict=True):
        is_drawn = _draw_lines(axes, figures, place, ratio, attrgetter(ratio))
        format_share_axis(axes, ratio)
        if not is_drawn:
            axes.text(0.5, 0.5, "no labels", transform=axes.transAxes, ha="center", va="center", color=GREY)
    for axes in axes_of:
        _finish(axes, place, today, chosen)
    axes_of[0].set_xlabel("")
    draw_legend(axes_of[0])
    positives = max((each.all_positives for each in figures), default=0)
    below = f"{count_noun(positives, 'positive event')} in all"
    set_titles(figure, f"{_name_rule(figures)}: precision and recall by {name}", below)
    return figure


class _PanelPlaces:
    """The positions of values on the horizontal axis: numbers and hours to scale, texts at equal distances."""

    def __init__(self, figures: Sequence[BacktestFigures], name: str) -> None:
        self.name = name
        self.values = list(dict.fromkeys(each.parameters[name] for each in figures))
        self.unit = ""
        hours = [_read_hours(value) for value in self.values]
        self._numbers: dict[object, float] = {}
        if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in self.values):
            self._numbers = {value: float(value) for value in self.values}
        elif all(each is not None for each in hours):
            self._numbers = {value: each for value, each in zip(self.values, hours, strict=True) if each is not None}
            self.unit = " (hours)"
        self.is_ranked = not self._numbers

    def __call__(self, figures: BacktestFigures) -> float:
        place = self.find(figures.parameters[self.name])
        assert place is not None
        return place

    def find(self, value: object) -> float | None:
        """Returns the position of a value, which may be off the plotted ones; None for an unknown text."""
        if self.is_ranked:
            return float(self.values.index(value)) if value in self.values else None
        if self.unit:
            return _read_hours(value)
        return float(value) if isinstance(value, (int, float)) else None


def _read_hours(value: object) -> float | None:
    try:
        return parse_duration(value) / _HOUR if isinstance(value, str) else None
    except DurationError:
        return None


def _split(figures: Sequence[BacktestFigures], place: _PanelPlaces) -> Mapping[str, list[BacktestFigures]]:
    """Splits the variants by the values of the other varied parameters, and sorts each part by this one."""
    others = [other for other in figures[0].parameters if other != place.name] if figures else []
    varied = [other for other in others if len({each.parameters[other] for each in figures}) > 1]
    parts = dict[str, list[Any]]()
    for each in sorted(figures, key=place):
        label = ", ".join(f"{other} {each.parameters[other]}" for other in varied)
        parts.setdefault(shorten_name(label), []).append(each)
    return parts


def _finish(axes: Axes, place: _PanelPlaces, today: object, chosen: object) -> None:
    for value, word, line, colour in ((today, "today", ":", GREY), (chosen, "chosen", "-", DARK)):
        at = None if value is None else place.find(value)
        if at is not None:
            axes.axvline(at, color=colour, linestyle=line, linewidth=1.6, label=f"{word}: {_write(value)}")
    axes.set_xlabel(f"{place.name}{place.unit}")
    if place.is_ranked:
        step = -(-len(place.values) // _MAX_NAMED)
        shown = range(0, len(place.values), step)
        axes.set_xticks(list(shown), [shorten_name(str(place.values[at])) for at in shown])
    else:
        axes.xaxis.set_major_formatter(FuncFormatter(format_thousands))


def _write(value: object) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return format_thousands(value)
    hours = _read_hours(value)
    return str(value) if hours is None else format_duration(parse_duration(value))


def _name_rule(figures: Sequence[BacktestFigures]) -> str:
    return figures[0].rule_id if figures else "no rule"

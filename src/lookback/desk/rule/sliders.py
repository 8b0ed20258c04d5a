"""The sliders of a what-if, and its two charts, which follow them immediately."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ipywidgets

from lookback.core.values.texts import format_figure
from lookback.desk.parts import (
    TextTable,
    clean_text,
    make_button,
    make_column,
    make_field,
    make_heading,
    make_picture,
    make_row,
    make_text,
    show_picture,
)
from lookback.views import whatif
from lookback.views.display import draw_png, read_title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lookback.desk.rule.tuning import Tuning
    from lookback.spark.replay.backtest import BacktestFigures

_WIDE = {"width": "98%"}


class Sliders:
    """The sliders of a what-if, and its two charts, which follow them immediately. `take` gets the chosen values."""

    def __init__(self, take: Callable[[Mapping[str, Any]], None]) -> None:
        self._take = take
        self._tuning: Tuning | None = None
        self._budget: float | None = None
        self._sliders: dict[str, Any] = {}
        self._table = TextTable(
            ("parameters", "alerts", "a day", "keys", "flagged", "positives", "precision", "recall"),
            name="lookback-figures",
        )
        self._words = make_text("", "lookback-chosen")
        self._pictures = [
            make_picture(b"", "", "lookback-alerts-picture"),
            make_picture(b"", "", "lookback-precision-picture"),
        ]
        self._button = make_button(
            "Take these values", self._take_chosen, "Write the chosen values into the rule", "lookback-take"
        )
        self.widget = make_column(name="lookback-what-if")

    @property
    def chosen(self) -> dict[str, Any]:
        """The values of the sliders."""
        return {name: slider.value for name, slider in self._sliders.items()}

    def clear(self) -> None:
        """Shows nothing."""
        self._tuning, self._sliders, self.widget.children = None, {}, []

    def show(self, tuning: Tuning, budget: float | None) -> None:
        """Shows the figures of all variants, and a slider for each parameter that varies."""
        self._tuning, self._budget = tuning, budget
        first = tuning.first_choice
        self._sliders = {name: self._make_slider(name, values, first[name]) for name, values in tuning.values.items()}
        self._table.show([_list_figures(each, tuning.values) for each in tuning.figures])
        if not self._sliders:
            note = make_text(
                "No parameter was varied: write a number under Parameters, and :name where its value belongs."
            )
            self.widget.children = [make_heading("What if"), self._table.widget, note]
            return
        self._draw(next(iter(self._sliders)))
        self.widget.children = [
            make_heading("What if"),
            *self._sliders.values(),
            self._words,
            make_row(self._button),
            *self._pictures,
            self._table.widget,
        ]

    def _make_slider(self, name: str, values: Sequence[Any], first: Any) -> Any:
        # ipywidgets 7 renders descriptions as HTML, so they never contain values; parameter names are only letters and
        # digits.
        slider = make_field(
            ipywidgets.SelectionSlider,
            name,
            f"The value of {name}; the pictures follow",
            "lookback-slider",
            options=[(str(value), value) for value in values],
            value=first,
            layout=_WIDE,
        )
        slider.observe(lambda _: self._draw(name), names="value")
        return slider

    def _draw(self, name: str) -> None:
        """Draws both charts along a parameter, from the figures of the backtest."""
        if self._tuning is None:
            return
        chosen = self.chosen
        figures, today = self._tuning.slice(name, chosen), self._tuning.today.get(name)
        marks: dict[str, Any] = {"today": today, "chosen": chosen[name]}
        drawn = (
            whatif.plot_alerts_by_value(figures, name, budget=self._budget, **marks),
            whatif.plot_precision_by_value(figures, name, **marks),
        )
        self._words.value = clean_text(self._tuning.describe(chosen))
        for picture, figure in zip(self._pictures, drawn, strict=True):
            show_picture(picture, draw_png(figure), read_title(figure))

    def _take_chosen(self) -> None:
        self._take(self.chosen)


def draw(figure: Figure) -> Any:
    """Renders a figure as a picture."""
    return make_picture(draw_png(figure), read_title(figure), "lookback-picture")


def _list_figures(figures: BacktestFigures, varied: Mapping[str, Sequence[Any]]) -> list[str]:
    values = ", ".join(f"{name} {figures.parameters[name]}" for name in varied) or "as they are"
    ratios = (figures.precision, figures.recall)
    per_day = "" if figures.alerts_per_day is None else format_figure(figures.alerts_per_day)
    counts = (figures.keys, figures.flagged, figures.positives)
    return [
        values, f"{figures.alerts:,}", per_day, *(f"{count:,}" for count in counts),
        *("" if ratio is None else f"{ratio:.1%}" for ratio in ratios),
    ]  # fmt: skip

"""The sliders of a what-if, and its two charts, which follow them immediately."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ipywidgets

from lookback.core.values.texts import format_figure
from lookback.desk import parts
from lookback.views import whatif

if TYPE_CHECKING:
    from lookback.desk.rule.tuning import Tuning
    from lookback.spark.replay.backtest import BacktestFigures

_COLUMNS = ("parameters", "alerts", "a day", "keys", "flagged", "positives", "precision", "recall")
TakeValues = Callable[[Mapping[str, Any]], None]


class Sliders:
    """The sliders of a what-if, and its two charts, which follow them immediately. `take` gets the chosen values."""

    def __init__(self, take: TakeValues) -> None:
        self._tuning: Tuning | None = None
        self._budget: float | None = None
        self._sliders: dict[str, Any] = {}
        self._table = parts.add_classes(ipywidgets.HTML(), "lookback-figures")
        self._words = parts.make_text("", "lookback-chosen")
        names = ("lookback-alerts-picture", "lookback-precision-picture")
        self._pictures = [parts.make_picture(b"", "", name) for name in names]
        hint = "Write the chosen values into the rule"
        self._button = parts.make_button("Take these values", lambda: take(self.chosen), hint, "lookback-take")
        self.widget = parts.make_column(name="lookback-what-if")

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
        rows = [_list_figures(each, tuning.values) for each in tuning.figures]
        parts.show_rows(self._table, _COLUMNS, rows, "The figures of all variants")
        if self._sliders:
            self._draw(next(iter(self._sliders)))
            shown = [
                *self._sliders.values(),
                self._words,
                parts.make_row(self._button),
                *self._pictures,
                self._table,
            ]
        else:
            note = "No parameter was varied: write a number under Parameters, and :name where its value belongs."
            shown = [self._table, parts.make_text(note)]
        self.widget.children = [parts.make_heading("What if"), *shown]

    def _make_slider(self, name: str, values: Sequence[Any], first: Any) -> Any:
        # ipywidgets 7 renders descriptions as HTML, so they never contain values; parameter names are only letters and
        # digits.
        options, hint = [(str(value), value) for value in values], f"The value of {name}; the pictures follow"
        kind = ipywidgets.SelectionSlider
        slider = parts.make_field(kind, name, hint, "lookback-slider", options=options, value=first, layout=parts.WIDE)
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
        self._words.value = parts.clean_text(self._tuning.describe(chosen))
        for picture, figure in zip(self._pictures, drawn, strict=True):
            parts.show_figure(picture, figure)


def _list_figures(figures: BacktestFigures, varied: Mapping[str, Sequence[Any]]) -> list[str]:
    values = ", ".join(f"{name} {figures.parameters[name]}" for name in varied) or "as they are"
    per_day = "" if figures.alerts_per_day is None else format_figure(figures.alerts_per_day)
    counts = (f"{count:,}" for count in (figures.keys, figures.flagged, figures.positives))
    ratios = ("" if ratio is None else f"{ratio:.1%}" for ratio in (figures.precision, figures.recall))
    return [values, f"{figures.alerts:,}", per_day, *counts, *ratios]

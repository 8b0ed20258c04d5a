"""The parameter values that a what-if has tried, from which you choose by moving sliders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lookback.core.values.texts import count_noun, format_figure

if TYPE_CHECKING:
    from lookback.spark.replay.backtest import BacktestFigures


@dataclass(frozen=True)
class Tuning:
    """The figures of a rule's variants, and the rule's current values (today)."""

    figures: Sequence[BacktestFigures]
    today: Mapping[str, Any]

    @property
    def values(self) -> dict[str, list[Any]]:
        """The tried values of each parameter with more than one, in the order of the what-if."""
        names = list(self.figures[0].parameters) if self.figures else []
        found = {name: list(dict.fromkeys(each.parameters.get(name) for each in self.figures)) for name in names}
        return {name: values for name, values in found.items() if len(values) > 1}

    @property
    def first_choice(self) -> dict[str, Any]:
        """The initial values: the rule's current ones if they were tried, else the middle ones."""
        return {
            name: self.today[name] if self.today.get(name) in values else values[len(values) // 2]
            for name, values in self.values.items()
        }

    def find(self, chosen: Mapping[str, Any]) -> BacktestFigures | None:
        """Finds the figures of a choice; None if it was not tried."""
        return next((each for each in self.figures if self._is_of(each, chosen)), None)

    def slice(self, name: str, chosen: Mapping[str, Any]) -> list[BacktestFigures]:
        """Lists the figures along one parameter, with the chosen values of the remaining parameters."""
        others = {other: value for other, value in chosen.items() if other != name}
        return [each for each in self.figures if self._is_of(each, others)]

    def describe(self, chosen: Mapping[str, Any]) -> str:
        """Describes in a sentence what the rule does with the chosen values."""
        values = ", ".join(f"{name} {value}" for name, value in chosen.items())
        each = self.find(chosen)
        if each is None:
            return f"{values} was not tried; run the backtest with these values."
        per_day = "" if each.alerts_per_day is None else f", {format_figure(each.alerts_per_day)} a day"
        ratios = [
            f"{name} {ratio:.0%}" for name in ("precision", "recall") if (ratio := getattr(each, name)) is not None
        ]
        known = ", ".join(ratios) or "no labels to measure precision"
        keys = count_noun(each.keys, "key")
        return f"With {values}: {count_noun(each.alerts, 'alert')}{per_day}, of {keys}; {known}."

    @staticmethod
    def _is_of(figures: BacktestFigures, chosen: Mapping[str, Any]) -> bool:
        return all(figures.parameters.get(name) == value for name, value in chosen.items())

"""Values of a what-if: the figures of any choice are there without another backtest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lookback.desk.rule.tuning import Tuning
from lookback.spark.replay.comparison import AlertCount, RunComparison
from lookback.verbs import describe_against


def variant(alerts: int, precision: float | None = None, **parameters: Any) -> Any:
    return SimpleNamespace(
        parameters=parameters, alerts=alerts, alerts_per_day=alerts / 2, keys=1, precision=precision, recall=None
    )


FIGURES = [variant(10 * a + b, a=a, b=b, c=1) for a in (1, 2, 3) for b in (5, 6)]


def test_parameters_with_one_value_have_no_slider():
    assert Tuning(FIGURES, {}).values == {"a": [1, 2, 3], "b": [5, 6]}
    assert Tuning([], {}).values == {}


def test_the_first_choice_is_that_of_today_or_the_middle():
    assert Tuning(FIGURES, {"a": 1, "b": 7}).first_choice == {"a": 1, "b": 6}


def test_a_slice_has_the_others_as_chosen():
    tuning = Tuning(FIGURES, {})
    assert [each.alerts for each in tuning.slice("a", {"a": 3, "b": 6})] == [16, 26, 36]
    assert [each.alerts for each in tuning.slice("b", {"a": 3, "b": 6})] == [35, 36]
    found = tuning.find({"a": 2, "b": 5})
    assert found is not None
    assert found.alerts == 25
    assert tuning.find({"a": 9, "b": 5}) is None


def test_a_choice_in_words():
    tuning = Tuning([variant(1, 0.5, a=1), variant(43_240, a=2)], {})
    assert tuning.describe({"a": 1}) == "With a 1: 1 alert, 0.5 a day, of 1 key; precision 50%."
    assert (
        tuning.describe({"a": 2}) == "With a 2: 43,240 alerts, 21,620 a day, of 1 key; no labels to measure precision."
    )
    assert tuning.describe({"a": 3}) == "a 3 was not tried; run the backtest with these values."


def test_lines_of_a_what_if_name_their_values() -> None:
    kept = AlertCount(3, positives=2)
    compared = RunComparison("a", 4, AlertCount(1), AlertCount(), kept, 0, 0)
    sentence = "3 alerts become 4; of 2 with a positive label 2 stay."
    assert describe_against(compared, {}) == f"Against a version 4: {sentence}"
    assert describe_against(compared, {"limit": 5, "span": "1 hour"}) == (
        f"Against a version 4, with limit = 5, span = 1 hour: {sentence}"
    )

"""Trials while writing a rule: a quick look at the newest events, and a backtest with a what-if."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import ipywidgets

from lookback.core.errors import SetupError
from lookback.core.values.columns import to_text
from lookback.core.values.texts import count_noun
from lookback.desk.parts import TextTable, make_column, make_field, make_heading, make_row, make_text
from lookback.desk.rule.sliders import Sliders, draw
from lookback.desk.rule.tuning import Tuning
from lookback.verbs import read_what_if, run_what_if, try_rule
from lookback.views import pictures

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream
    from lookback.desk.work import Work
    from lookback.spark.replay.comparison import RunComparison
    from lookback.spark.rules import RulesTable
    from lookback.testing.trial import DocumentTrial

_MAX_SHOWN_ALERTS = 10


@dataclass
class _Look:
    """The result of a quick look at a rule."""

    rule_id: str
    trial: DocumentTrial
    stream: Stream
    remarks: Sequence[Any]


@dataclass
class _Tested:
    """The result of a backtest."""

    tuning: Tuning
    events: int
    comparisons: Sequence[RunComparison] = field(default_factory=list)


class TryingPanel:
    """The fields and buttons of trials (controls), and their results.

    It takes the rules table; `read_document`, which returns the rule to try or raises SetupError; and `take`, which
    gets the values chosen in a what-if.
    """

    def __init__(
        self, rules: RulesTable, work: Work, read_document: Callable[[], Mapping[str, Any]], take: Callable[[Mapping[str, Any]], None]
    ) -> None:  # fmt: skip
        self._rules, self._work, self._read_document = rules, work, read_document
        self._sliders = Sliders(take)
        self._look_result = make_column(name="lookback-look-result")
        self.controls = make_column(self._make_look(), *self._make_backtest())
        self.results = make_column(self._look_result, self._sliders.widget)

    def clear(self) -> None:
        """Clears the results."""
        self._look_result.children = []
        self._sliders.clear()

    def _make_look(self) -> Any:
        self._events = make_field(
            ipywidgets.BoundedIntText,
            "Newest events",
            "How many of the newest events to try the rule on",
            value=10_000,
            min=1,
            max=1_000_000,
        )
        button = self._work.make_button(
            "Quick look", self._look, "Run the rule over the newest events; nothing is written", "lookback-look"
        )
        return make_row(button, self._events)

    def _look(self) -> None:
        document, events = dict(self._read_document()), self._events.value
        stream, tables = self._rules.streams[str(document["stream"])], self._rules.tables

        def work(progress: Callable[[str], None]) -> _Look:
            progress(f"reading the newest {events:,} events")
            rule = self._rules.check(document)
            trial, remarks = try_rule(tables, document, stream, events, progress)
            return _Look(rule.spec.rule_id, trial, stream, remarks)

        self._work.start("Quick look", work, self._show_look)

    def _show_look(self, look: _Look) -> None:
        trial = look.trial
        title = f"{look.rule_id}: what it would have flagged"
        measured: dict[str, Any] = {"values": trial.values, "name": trial.name, "limits": trial.limits}
        figure = pictures.plot_flagged(trial.events, trial.final_alerts, look.stream.event_time, title, **measured)
        table = TextTable(("event time", "severity", "key", "measures", "message"), name="lookback-look-alerts")
        table.show([_list_alert(row) for row in trial.alerts.tail(_MAX_SHOWN_ALERTS).iloc[::-1].to_dict("records")])
        notes = [make_text(f"Remark: {each}") for each in look.remarks]
        notes += [make_text(f"Problem: {row['message']}") for row in trial.errors.to_dict("records")]
        shown = [table.widget] if len(trial.alerts) else []
        self._look_result.children = [make_heading("Quick look"), draw(figure), *shown, *notes]
        judged = f"{count_noun(len(trial.events), 'event')} judged"
        self._work.status.show(
            f"{count_noun(len(trial.final_alerts), 'alert')} of {judged}; nothing was written.", "done"
        )

    def _make_backtest(self) -> tuple[Any, Any]:
        make = partial(make_field, ipywidgets.Text)
        self._since = make("Since", "The event time from which alerts count; empty: the first", "lookback-since")
        self._vary = make(
            "What if",
            "Values to try, such as limit=500,1000,2000, separated by semicolons; empty: the first numeric parameter",
            "lookback-vary",
        )
        self._against = make("Against", "The id of a published rule to compare with; empty: none", "lookback-against")
        self._budget = make_field(
            ipywidgets.BoundedFloatText,
            "Budget",
            "The alerts that the team can review in a day; 0: no line",
            "lookback-budget",
            value=0,
            min=0,
            max=1e9,
        )
        button = self._work.make_button(
            "Backtest", self._backtest, "Judge all events of the stream; nothing is written", "lookback-backtest"
        )
        return make_row(self._vary, self._since, self._against, self._budget), make_row(button)

    def _backtest(self) -> None:
        document, against = dict(self._read_document()), self._against.value.strip()
        try:
            varied, within = read_what_if(document, self._vary.value, self._since.value.strip())
        except ValueError as error:
            raise SetupError(f"What if or Since: {error}") from None

        def work(progress: Callable[[str], None]) -> _Tested:
            with run_what_if(self._rules, document, varied, within, against, progress) as result:
                tuning = Tuning(result.figures, dict(document.get("parameters") or {}))
                return _Tested(tuning, result.events, result.comparisons)

        self._work.start("Backtest", work, self._show_backtest)

    def _show_backtest(self, tested: _Tested) -> None:
        self._sliders.show(tested.tuning, self._budget.value or None)
        beside = [
            f" Against {each.rule_id} version {each.version}: {each.sentence}." for each in tested.comparisons[:1]
        ]
        self._work.status.show(f"{tested.events:,} events judged; nothing was published.{''.join(beside)}", "done")


def _list_alert(row: Mapping[Any, Any]) -> list[str]:
    pairs = (
        ", ".join(f"{name} {to_text(value)}" for name, value in row[column].items()) for column in ("key", "measures")
    )
    return [to_text(row["event_time"].to_pydatetime()), row["severity"], *pairs, row["message"]]

"""Trials while writing a rule: a quick look at the newest events, and a backtest with a what-if."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import ipywidgets

from lookback.core.errors import SetupError
from lookback.core.values.columns import to_text
from lookback.core.values.texts import count_noun
from lookback.desk import parts
from lookback.desk.rule.sliders import Sliders, TakeValues
from lookback.desk.rule.tuning import Tuning
from lookback.verbs import describe_comparisons, read_what_if, run_what_if, try_rule
from lookback.views import pictures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lookback.core.errors import Problem
    from lookback.desk.work import Work
    from lookback.spark.replay.backtest import Backtest
    from lookback.spark.rules import RulesTable
    from lookback.testing.trial import DocumentTrial

_MAX_SHOWN_ALERTS = 10


class TryingPanel:
    """The fields and buttons of trials (controls), and their results.

    It takes the rules table; `read_document`, which returns the rule to try or raises SetupError; and `take`, which
    gets the values chosen in a what-if.
    """

    def __init__(
        self, rules: RulesTable, work: Work, read_document: Callable[[], Mapping[str, Any]], take: TakeValues
    ) -> None:
        self._rules, self._work, self._read_document = rules, work, read_document
        self._sliders = Sliders(take)
        self._look_result = parts.make_column(name="lookback-look-result")
        self.controls = parts.make_column(self._make_look(), *self._make_backtest())
        self.results = parts.make_column(self._look_result, self._sliders.widget)

    def clear(self) -> None:
        """Clears the results."""
        self._look_result.children = []
        self._sliders.clear()

    def _make_look(self) -> Any:
        hint, kind = "How many of the newest events to try the rule on", ipywidgets.BoundedIntText
        self._events = parts.make_field(kind, "Newest events", hint, value=10_000, min=1, max=1_000_000)
        hint = "Run the rule over the newest events; nothing is written"
        return parts.make_row(self._work.make_button("Quick look", self._look, hint, "lookback-look"), self._events)

    def _look(self) -> None:
        document, events = dict(self._read_document()), self._events.value
        stream, tables = self._rules.streams[str(document["stream"])], self._rules.tables

        def work(progress: Callable[[str], None]) -> tuple[DocumentTrial, list[Problem]]:
            progress(f"reading the newest {events:,} events")
            self._rules.check(document)
            return try_rule(tables, document, stream, events, progress)

        def show(found: tuple[DocumentTrial, list[Problem]]) -> None:
            self._show_look(pictures.plot_trial(str(document["rule_id"]), found[0], stream.event_time), *found)

        self._work.start("Quick look", work, show)

    def _show_look(self, figure: Figure, trial: DocumentTrial, remarks: Sequence[Problem]) -> None:
        table = parts.add_classes(ipywidgets.HTML(), "lookback-look-alerts")
        rows = [_list_alert(row) for row in trial.alerts.tail(_MAX_SHOWN_ALERTS).iloc[::-1].to_dict("records")]
        parts.show_rows(table, ("event time", "severity", "key", "measures", "message"), rows, "The newest alerts")
        notes = [parts.make_text(f"Remark: {each}") for each in remarks]
        notes += [parts.make_text(f"Problem: {row['message']}") for row in trial.errors.to_dict("records")]
        picture = parts.make_picture(b"", "", "lookback-picture")
        parts.show_figure(picture, figure)
        self._look_result.children = [parts.make_heading("Quick look"), picture, table, *notes]
        alerts, judged = count_noun(len(trial.final_alerts), "alert"), count_noun(len(trial.events), "event")
        self._work.status.show(f"{alerts} of {judged} judged; nothing was written.", "done")

    def _make_backtest(self) -> tuple[Any, Any]:
        make = partial(parts.make_field, ipywidgets.Text)
        self._since = make("Since", "The event time from which alerts count; empty: the first", "lookback-since")
        hint = "Values to try, such as limit=500,1000,2000, separated by semicolons; empty: the first numeric parameter"
        self._vary = make("What if", hint, "lookback-vary")
        self._against = make("Against", "The id of a published rule to compare with; empty: none", "lookback-against")
        hint, kind = "The alerts that the team can review in a day; 0: no line", ipywidgets.BoundedFloatText
        self._budget = parts.make_field(kind, "Budget", hint, "lookback-budget", value=0, min=0, max=1e9)
        hint = "Judge all events of the stream; nothing is written"
        button = self._work.make_button("Backtest", self._backtest, hint, "lookback-backtest")
        return parts.make_row(self._vary, self._since, self._against, self._budget), parts.make_row(button)

    def _backtest(self) -> None:
        document, against = dict(self._read_document()), self._against.value.strip()
        try:
            varied, within = read_what_if(document, self._vary.value, self._since.value.strip())
        except ValueError as error:
            raise SetupError(f"What if or Since: {error}") from None

        def work(progress: Callable[[str], None]) -> Backtest:
            with run_what_if(self._rules, document, varied, within, against, progress) as result:
                return result

        def show(result: Backtest) -> None:
            self._sliders.show(Tuning(result.figures, document.get("parameters") or {}), self._budget.value or None)
            beside = [f" {each}" for each in describe_comparisons(result, varied)[:1]]
            self._work.status.show(f"{result.events:,} events judged; nothing was published.{''.join(beside)}", "done")

        self._work.start("Backtest", work, show)


def _list_alert(row: Mapping[Any, Any]) -> list[str]:
    pairs = (
        ", ".join(f"{name} {to_text(value)}" for name, value in row[column].items()) for column in ("key", "measures")
    )
    return [to_text(row["event_time"].to_pydatetime()), row["severity"], *pairs, row["message"]]
